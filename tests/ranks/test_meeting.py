"""Who a rank is: as a launcher says, or a message where that makes no sense."""

from __future__ import annotations

import pytest

from batchwright.cli import _run
from batchwright.errors import InvalidInputError
from batchwright.ranks.meeting import Place, is_first_rank, rank_timeout, read_place

LAUNCHED = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_launcher_tells_who_a_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCHED, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert read_place() == Place(2, 4, 0, 2)
    assert not is_first_rank()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "abc"),
        ("WORLD_SIZE", "-1"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "2.0"),
        ("WORLD_SIZE", "٤"),
        ("WORLD_SIZE", "9" * 5000),
        ("RANK", "first"),
        ("RANK", "4"),
        ("RANK", ""),
        ("LOCAL_RANK", "x"),
        ("MASTER_PORT", "http"),
        ("MASTER_ADDR", ""),
    ],
)
def test_what_makes_no_sense_is_refused_and_said(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other, text in {**LAUNCHED, name: value}.items():
        monkeypatch.setenv(other, text)
    with pytest.raises(InvalidInputError, match=name):
        read_place()
    assert is_first_rank()  # in doubt a message is printed


@pytest.mark.parametrize("command", ["tune", "fit", "noise"])
def test_commands_answer_an_odd_world_size_with_a_message(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert _run([command, "tests/fitting/targets.py:mlp"]) == 2
    assert "WORLD_SIZE must be a whole number" in capsys.readouterr().err


def test_a_rank_that_was_left_in_the_environment_silences_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert _run(["plan", "10", "--micro-batch", "none"]) == 2
    assert "--micro-batch" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["abc", "0", "-5", "nan", "inf", "1e9"])
def test_a_time_limit_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_RANK_TIMEOUT", text)
    with pytest.raises(InvalidInputError, match="BATCHWRIGHT_RANK_TIMEOUT is a number of seconds"):
        rank_timeout()
