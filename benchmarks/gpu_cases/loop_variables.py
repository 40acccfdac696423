"""What the variables of a training loop keep alive.

`outputs = model(batch); outputs.loss.backward()` holds the logits through backward, and through the next forward until
the name is bound anew. A workload's loss returns and forgets, so where the source's loop holds something, it is put
here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def hold(model: nn.Module, value: Any) -> None:
    """Keep a value alive until the same is done with the next one."""
    # Past __setattr__: the value is no part of the model.
    model.__dict__["_held_by_the_loop"] = value
