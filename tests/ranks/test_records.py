"""What ranks write into their store reads back the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.ranks.meeting import Address, Member, RankFailure
from batchwright.ranks.stuck_ranks import Status

SECONDS = st.floats(0, 1e9)
ERRORS = st.none() | st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text()))


@pytest.mark.parametrize("kind", [Address, Member, RankFailure, Status])
@given(data=st.data())
def test_a_record_reads_back_the_same(kind: Any, data: st.DataObject) -> None:
    special: dict[Any, dict[str, Any]] = {
        RankFailure: {"error": ERRORS},
        Status: {"waited_seconds": SECONDS, "still_seconds": SECONDS, "quiet_seconds": SECONDS},
    }
    record = data.draw(st.builds(kind, **special.get(kind, {})))
    assert kind.unpack(record.pack()) == record
    assert kind.unpack(record.pack().encode()) == record
