"""`batchwright advise` and `batchwright explain` as a person types them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from batchwright.concepts import LANGUAGES, TOPICS, read_page

if TYPE_CHECKING:
    from tests.conftest import Run


def test_advise_shows_before_after_and_what_to_type(run: Run) -> None:
    ran = run("advise", "out-of-memory", "--micro-batch", "8")
    assert (ran.code, ran.err) == (0, "")
    assert "--per_device_train_batch_size 4 --gradient_accumulation_steps 2" in ran.out
    assert "8 (kept)" in ran.out


def test_advise_as_json(run: Run) -> None:
    data = json.loads(run("advise", "slow", "--micro-batch", "4", "--learning-rate", "1e-5", "--json").out)
    assert data["schema"] == 1
    assert data["options"][0]["after"]["effective_batch"] == 8
    assert data["learning_rate_rule"]["source"].startswith("Malladi")


@pytest.mark.parametrize(
    "args",
    [["sad", "--micro-batch", "4"], ["slow"], ["slow", "--micro-batch", "4", "--learning-rate", "fast"], []],
)
def test_wrong_advice_is_exit_code_2(run: Run, args: list[str]) -> None:
    ran = run("advise", *args)
    assert (ran.code, ran.out) == (2, "")


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("topic", TOPICS)
def test_explain_prints_the_page(run: Run, topic: str, lang: str) -> None:
    ran = run("explain", topic, "--lang", lang)
    assert ran.code == 0
    assert ran.out.rstrip("\n") == read_page(topic, lang).text.rstrip("\n")


def test_explain_lists_its_topics(run: Run) -> None:
    out = run("explain").out
    assert [line.split()[0] for line in out.splitlines()] == list(TOPICS)
    assert len(json.loads(run("explain", "--lang", "zh", "--json").out)["topics"]) == len(TOPICS)


def test_explain_names_the_nearest_topic(run: Run) -> None:
    ran = run("explain", "acumulation")
    assert ran.code == 2
    assert "try: accumulation" in ran.err
    assert run("explain", "memory", "--lang", "fr").code == 2
