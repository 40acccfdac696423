"""Every block of the README and of the pages runs as printed.

`console` blocks hold commands behind `$ ` and what they print; `python` blocks are executed. The comment `<!-- gpu -->`
above a block has it compiled only, `<!-- slow -->` leaves it to `make test-all`. Lines that call make are passed over:
they would run these tests again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("guide", "reference", "development")
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md")))]
FENCE = re.compile(r"(?:<!-- (gpu|slow) -->\n)?^```(console|bash|python)\n(.*?)^```", re.M | re.S)


class Block(NamedTuple):
    page: str
    comment: str | None
    language: str
    text: str


def find_blocks(page: Path) -> dict[str, Block]:
    text = page.read_text(encoding="utf-8")
    return {
        f"{page.name}:{text[: match.start()].count(chr(10)) + 1}": Block(page.name, *match.groups())
        for match in FENCE.finditer(text)
    }


BLOCKS = {place: block for page in PAGES for place, block in find_blocks(page).items()}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that blocks share. Files that pages have their reader write are there: another worker may write them."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", folder / "examples")
    for block in BLOCKS.values():
        if block.language == "bash" and block.text.startswith("cat > "):
            assert run_shell(block.text, folder).returncode == 0
    return folder


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=[pytest.mark.slow] if block.comment == "slow" else [])
        for place, block in BLOCKS.items()
    ],
)
def test_block_runs_as_printed(place: str, workplace: Path) -> None:
    block = BLOCKS[place]
    if block.language == "python":
        run_python(block)
    elif block.language == "bash":
        lines = [line for line in block.text.splitlines() if not line.startswith(("make", "git clone", "cd ", "pip "))]
        assert run_shell("\n".join(lines), workplace).returncode == 0
    else:
        for command, expected in transcripts(block.text):
            if not command.startswith("make"):
                done = run_shell(command, workplace)
                # Talk on stderr may be shown or left out; what is on stdout has to be there to the letter.
                shown = (done.stdout.rstrip(), (done.stdout + done.stderr).rstrip())
                assert expected.rstrip() in shown, command


def run_python(block: Block) -> None:
    code = compile(block.text, block.page, "exec")
    if block.comment != "gpu":
        exec(code, {"__name__": "readme"})


def run_shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=cwd, env=environment)


def transcripts(text: str) -> list[tuple[str, str]]:
    pieces = re.split(r"^\$ ", text, flags=re.M)[1:]
    split = [piece.partition("\n") for piece in pieces]
    return [(command, printed) for command, _, printed in split]


def test_there_are_blocks_to_run() -> None:
    assert sum(block.page == "README.md" for block in BLOCKS.values()) >= 4
