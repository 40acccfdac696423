"""The pages of the site, before mkdocs draws them: every link leads to a page, every name and page is in the navigation."""

from __future__ import annotations

import doctest
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

import batchwright as bw
from batchwright import cli

if TYPE_CHECKING:
    from types import ModuleType

WEBSITE = Path(__file__).parents[1] / "website"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, WEBSITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stage() -> ModuleType:
    return load("stage")


@pytest.fixture(scope="module")
def staged(stage: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("pages")
    return folder, stage.stage_pages(folder)


def test_every_link_between_pages_leads_to_a_page(stage: ModuleType, staged: tuple[Path, dict[str, str]]) -> None:
    folder, pages = staged
    links = 0
    for place, text in pages.items():
        for _, target, _ in stage.LINK.findall(stage.FENCE.sub("", text)):
            if target and ":" not in target and not target.startswith(("calculator/", "../calculator")):
                links += 1
                goal = os.path.normpath(folder / PurePosixPath(place).parent / target)
                assert Path(goal).is_file(), f"{place} links to {target}"
    assert links > 200


def test_every_public_name_has_a_page_of_its_own(staged: tuple[Path, dict[str, str]]) -> None:
    api = {place: text for place, text in staged[1].items() if place.startswith("reference/api/")}
    for name in bw.__all__:
        assert sum(f"::: batchwright.{bw._HOMES[name]}.{name}\n" in text for text in api.values()) == 1, name
    assert len({place.lower() for place in api}) == len(api), "two pages would be one file where case does not count"


def test_the_navigation_names_every_page(stage: ModuleType, staged: tuple[Path, dict[str, str]]) -> None:
    def places(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [place for part in parts for place in places(part)]

    assert sorted(places(stage.navigation(staged[1]))) == sorted(staged[1])


def test_the_calculators_page_is_whole_in_both_languages(tmp_path: Path) -> None:
    build = load("build_calculator")
    build.write_pages(tmp_path)
    english, chinese = ((tmp_path / name).read_text(encoding="utf-8") for name in ("index.html", "zh.html"))
    texts = json.loads((WEBSITE / "calculator" / "texts.json").read_text(encoding="utf-8"))

    def keys(part: Any) -> Any:
        return {name: keys(value) for name, value in part.items()} if isinstance(part, dict) else None

    assert keys(texts["en"]) == keys(texts["zh"])
    used = set(re.findall(r"\{\{(\w+)\}\}", (WEBSITE / "calculator" / "calculator.html").read_text(encoding="utf-8")))
    assert used - {"texts_json", "choices_json"} == set(texts["en"]) - {"dynamic"}
    script = (WEBSITE / "calculator" / "calculator.mjs").read_text(encoding="utf-8")
    assert set(re.findall(r"\btexts\.(\w+)", script)) <= set(texts["en"]["dynamic"])
    for page in (english, chinese):
        assert "//" not in re.sub(r"http-equiv[^>]*|</", "", re.sub(r"<script.*?</script>", "", page, flags=re.S))
        assert page.count("<h1>") == 1


@pytest.mark.parametrize("name", ["stage", "check_site"])
def test_examples_in_docstrings_hold(name: str) -> None:
    assert doctest.testmod(load(name)).failed == 0


def test_the_look_at_a_site_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(place: str, text: str) -> None:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text, encoding="utf-8")

    write("index.html", '<a href="a/">a</a><a href="nowhere.html">no</a><a href="a/#no">no</a>')
    write("a/index.html", '<p id="yes"><a href="../b.html">b</a><script src="https://elsewhere.example/x.js"></script>')
    write("b.html", '<a href="c.html">c</a>')
    write("c.html", "three clicks away")
    write("alone.html", "")
    write("calculator/index.html", '<form id="question">')
    anchors = [f'<h2 id="batchwright.{bw._HOMES[name]}.{name}">' for name in bw.__all__ if name != "tune"]
    write("reference/api/index.html", "".join(anchors) + '<a href="../commands/">c</a>')
    check = load("check_site")
    told = [(command, option) for command, option in check.options() if option != "--branches"]
    helps = (f"$ batchwright {name} --help {[o for c, o in told if c == name]} " for name in cli.COMMANDS)
    write("reference/commands/index.html", "".join(helps))
    monkeypatch.chdir(tmp_path)
    problems, counts = check.find_problems(Path())
    far = {problem.split()[0] for problem in problems if "clicks" in problem}
    assert {"index.html", "a/index.html", "b.html"}.isdisjoint(far)
    for part in (
        "the link to nowhere.html leads nowhere",
        "a/#no has no such anchor",
        "loads https://elsewhere.example/x.js from another origin",
        "c.html takes 3 clicks",
        "alone.html takes no number of clicks",
        "bw.tune is on no page",
        "tune --branches is on no page",
    ):
        assert any(part in problem for problem in problems), part
    assert counts["public names"] == len(bw.__all__)


@pytest.mark.slow
def test_the_site_is_built_without_a_problem(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="the extra 'site' is not installed")
    done = subprocess.run(
        [sys.executable, str(WEBSITE / "build_site.py"), "--out", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
