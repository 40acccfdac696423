"""The front door itself: what it names, that each name is there and documented, and that it opens without torch."""

from __future__ import annotations

import subprocess
import sys

import batchwright as bw


def test_all_is_sorted_and_complete() -> None:
    assert bw.__all__ == sorted(bw.__all__)
    assert set(bw.__all__) == set(bw._HOMES)
    assert set(bw.__all__) <= set(dir(bw))


def test_every_public_name_is_documented() -> None:
    for name in bw.__all__:
        documentation = getattr(bw, name).__doc__
        assert documentation, name
        assert len(documentation.split()) >= 5, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(bw, "plam")


def test_plan_stays_the_function_after_its_folder_is_imported() -> None:
    code = "import batchwright as bw, batchwright.planning.plan, batchwright.planning; assert callable(bw.plan)"
    subprocess.run([sys.executable, "-c", code], check=True)
