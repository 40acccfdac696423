"""What a refusal says of a missing rule: what failed, and not all that torch has to tell."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from batchwright.trace.refused_operators import NotFollowedError, shapes_from

OPERATOR = torch.ops.aten.relu.default


def missing(*_: Any) -> Any:
    """What torch itself says of an operator that a device has no kernel for."""
    return torch.ops.aten._thnn_fused_lstm_cell.default(*[torch.ones(2, 8), torch.ones(2, 8), torch.ones(2, 2)])


def test_a_missing_kernel_is_told_without_the_list_of_backends() -> None:
    with pytest.raises(NotImplementedError) as torchs_own:
        missing()
    assert len(str(torchs_own.value).splitlines()[0]) > 500
    with pytest.raises(NotFollowedError) as refused:
        shapes_from(missing, OPERATOR, (), {})
    assert "Could not run 'aten::_thnn_fused_lstm_cell'" in refused.value.reason
    assert len(refused.value.reason) < 200


def test_an_error_without_words_is_told_by_its_name() -> None:
    def silent() -> NoReturn:
        raise NotImplementedError

    with pytest.raises(NotFollowedError, match=r"\(NotImplementedError\)"):
        shapes_from(silent, OPERATOR, (), {})
