"""Options that a program reads are seen whatever parser reads them, and named as they are typed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import click
import pytest

from batchwright.scripts.option_parsers import seeing_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def seen() -> Iterator[dict[str, int]]:
    options: dict[str, int] = {}
    with ExitStack() as stack:
        for place, name, replacement in seeing_options(options.__setitem__):
            stack.enter_context(patch.object(place, name, replacement))
        yield options


def test_argparse_by_the_longest_name() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    with seen() as options:
        parser.parse_args([])
    assert options == {"--batch-size": 8}


def test_a_number_that_the_program_makes_of_a_word_itself() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bs", default="512")
    with seen() as options:
        parser.parse_args([])
    assert options == {"--bs": 512}


def test_absl_with_its_defaults() -> None:
    flags = pytest.importorskip("absl.flags")
    values = flags.FlagValues()
    flags.DEFINE_integer("batch_size", 32, "", flag_values=values)
    flags.DEFINE_string("batch_kind", "even", "", flag_values=values)
    with seen() as options:
        values(["train.py"])
    assert options == {"--batch_size": 32}


def test_click_by_what_it_was_given() -> None:
    @click.command()
    @click.option("--bs", default=8)
    @click.option("--shuffle-batch", is_flag=True)
    def train(bs: int, shuffle_batch: bool) -> None:
        """Nothing to train."""

    with seen() as options:
        train.main(["--bs", "4"], standalone_mode=False)
    assert options == {"--bs": 4}


def test_jsonargparse_by_nested_names() -> None:
    jsonargparse: Any = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--data.batch_size", type=int, default=8)
    with seen() as options:
        parser.parse_args(["--data.batch_size=2"])
    assert options == {"--data.batch_size": 2}


@dataclasses.dataclass
class Loader:
    """Settings of a loader."""

    batch_size: int = 8
    workers: int = 2


@dataclasses.dataclass
class Settings:
    """Settings of a training, with others inside."""

    loader: Loader = dataclasses.field(default_factory=Loader)
    accumulate: int = 4


def test_tyro_by_the_fields_of_its_dataclasses() -> None:
    tyro: Any = pytest.importorskip("tyro")
    with seen() as options:
        tyro.cli(Settings, args=["--loader.batch-size", "16"])
    assert options == {"--loader.batch-size": 16, "--accumulate": 4}


def test_hydra_by_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hydra: Any = pytest.importorskip("hydra")
    importlib.import_module("hydra.core.utils")
    (tmp_path / "c.yaml").write_text("train:\n  batch_size: 8\nhydra: {run: {dir: .}, output_subdir: null}\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "train.batch_size=4"])
    monkeypatch.chdir(tmp_path)
    with seen() as options:
        hydra.main(version_base=None, config_path=str(tmp_path), config_name="c")(lambda config: None)()
    assert options["train.batch_size="] == 4
