"""The lengths of all samples, what a batch of them costs, and how many samples of a length stay within a budget.

Lengths come from whatever the user has: a list, an array, a column, a function. A batch costs what its longest sample
makes of all. A sample that is over the budget on its own is an error, is left out, or is a batch by itself, as
`oversize` says.

Promises:
- a length that is none (negative, zero, missing, not a number) is refused with its place;
- samples have one length each, or two: source and target, image tokens and text;
- a budget is a bound, never a target: a batch that is cut by it costs at most that;
- everything is a formula of whole arrays.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchwright.errors import InvalidInputError
from batchwright.units import LARGEST_COUNT, counted, shortened, whole_number
from batchwright.user_files import MOST_BYTES, check_place, read_bytes, replace_file

# Longer ones would not leave room for the index of a sample beside them in one sort key.
LARGEST_LENGTH = 2**31 - 1
# What takes longer than this is spoken of, and again after as long.
_SECONDS_BETWEEN = 2.0


def read_lengths(given: Any) -> npt.NDArray[np.int64]:
    """Return lengths as an array of one or two columns, a row per sample.

    >>> read_lengths([3, 5]).tolist(), read_lengths([(3, 1), (5, 2)]).tolist()
    ([[3], [5]], [[3, 1], [5, 2]])
    >>> read_lengths([3, 0, 5])
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: the length of sample 1 must be a whole number from 1 to 2^31 - 1; received 0.
    """
    array = _as_array(given)
    if array.ndim == 1:
        array = array.reshape(-1, 1)
    if len(array) == 0:
        return np.zeros((0, 1), np.int64)
    if array.ndim != 2 or array.shape[1] not in (1, 2):
        raise InvalidInputError(
            f"lengths are one number per sample, or two (source and target); received an array of shape {array.shape}."
        )
    _check(array)
    return np.ascontiguousarray(array, dtype=np.int64)


def gather_lengths(
    given: Any, dataset: Any, progress: Callable[[str], None] | None, remember: str | Path | None
) -> npt.NDArray[np.int64]:
    """Return the lengths of all samples, measured where a function was given, and check them against the dataset."""
    if callable(given):
        if dataset is None:
            raise InvalidInputError(
                "lengths is a function of a sample, and no dataset= was handed in to call it on.",
                remedy="TokenBatchSampler(len, dataset=dataset)",
            )
        given = measure_lengths(given, dataset, progress, remember)
    elif remember is not None:
        raise InvalidInputError("remember= keeps what a function measured, and these lengths are given.")
    lengths = read_lengths(given)
    if dataset is not None and len(dataset) != len(lengths):
        raise InvalidInputError(
            f"{counted(len(lengths), 'length')} for a dataset of {counted(len(dataset), 'sample')}."
        )
    return lengths


def measure_lengths(
    length_of: Callable[[Any], Any],
    dataset: Any,
    progress: Callable[[str], None] | None,
    remember: str | Path | None = None,
) -> npt.NDArray[np.int64]:
    """Call a function once on every sample, and keep what it said in a file where one is named."""
    number = len(dataset)
    file = None if remember is None else Path(remember)
    if file is not None:
        check_place(file, what="the lengths", option="remember=")
    if file is not None and file.exists():
        known = _remembered(file, number)
        if len(known) != number:
            raise InvalidInputError(
                f"'{file}' remembers the lengths of {counted(len(known), 'sample')}, the dataset has {number:,}.",
                remedy="delete the file, and they are measured anew",
            )
        return known
    measured, last = [], time.monotonic()
    say = progress or (lambda text: print(text, file=sys.stderr))
    for index in range(number):
        if time.monotonic() - last > _SECONDS_BETWEEN:
            last = time.monotonic()
            say(f"measuring lengths: {index:,} of {counted(number, 'sample')}")
        measured.append(length_of(dataset[index]))
    lengths = read_lengths(measured)
    if file is not None:
        # Written aside and moved, so that no other rank reads half of it.
        content = io.BytesIO()
        np.save(content, lengths, allow_pickle=False)
        replace_file(file, content.getvalue(), what="the lengths", option="remember=")
    return lengths


def _remembered(file: Path, number: int) -> npt.NDArray[np.int64]:
    most_bytes = max(MOST_BYTES, 32 * number)  # two lengths for each take 16
    try:
        return read_lengths(np.load(io.BytesIO(read_bytes(file, most_bytes=most_bytes, may_be_pipe=False))))
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInputError(
            f"'{file}' holds no lengths that can be read: {getattr(error, 'strerror', None) or error}.",
            remedy="delete the file, and they are measured anew",
        ) from None


def _as_array(given: Any) -> Any:
    if hasattr(given, "detach"):  # a tensor, whose package need not be imported for this
        given = given.detach().cpu()
        given = (given.double() if given.is_floating_point() else given).numpy()
    elif hasattr(given, "to_numpy"):  # a column of pandas, arrow or datasets
        given = given.to_numpy()
    elif not isinstance(given, np.ndarray | list | tuple | dict | str | bytes) and hasattr(given, "__getitem__"):
        given = given[:]  # a column of datasets
    try:
        array = np.asarray(given)
    except ValueError:
        raise InvalidInputError(
            "lengths are one number per sample, or two for each; received rows of different sizes."
        ) from None
    if array.ndim == 0:
        raise InvalidInputError(
            f"lengths are one number per sample, or two for each; received {type(given).__name__}.",
            remedy="a list, an array, a tensor, a column, or a function of a sample with dataset=",
        )
    if array.dtype == object:
        array = _numbers(array)
    return array


def _numbers(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    for index, row in enumerate(array.reshape(len(array), -1)):
        if any(not isinstance(value, int | float | np.number) for value in row):
            raise _refusal(index, row[0] if len(row) == 1 else tuple(row))
    return array.astype(np.float64)


def _check(array: npt.NDArray[Any]) -> None:
    if array.dtype.kind not in "iuf":
        raise InvalidInputError(f"lengths are whole numbers; received {shortened(array.dtype.name)}.")
    is_wrong = ~((array >= 1) & (array <= LARGEST_LENGTH))
    if array.dtype.kind == "f":
        is_wrong |= array != np.floor(array)
    # One length of two may be 0: a text without an image.
    if array.shape[1] == 2:
        is_wrong &= ~(array == 0) | (array.sum(axis=1, keepdims=True) <= 0)
    wrong = np.flatnonzero(is_wrong.any(axis=1))
    if len(wrong):
        row = array[wrong[0]].tolist()
        raise _refusal(int(wrong[0]), row[0] if len(row) == 1 else tuple(row), others=len(wrong) - 1)


def _refusal(index: int, value: object, others: int = 0) -> InvalidInputError:
    more = f" ({others:,} more are wrong as well)" if others else ""
    return InvalidInputError(
        f"the length of sample {index:,} must be a whole number from 1 to 2^31 - 1; received {shortened(value)}{more}."
    )


Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchCost:
    """`fixed + per_token * n * L + per_token_squared * n * L^2` for n samples padded to L tokens.

    >>> BatchCost().of(np.array([4]), np.array([100]))
    array([400.])
    >>> BatchCost(fixed=10.0, per_token=1.0, per_token_squared=0.01).of(np.array([4]), np.array([100]))
    array([810.])
    """

    fixed: float = 0.0
    per_token: float = 1.0
    per_token_squared: float = 0.0

    def __post_init__(self) -> None:
        for name in ("fixed", "per_token", "per_token_squared"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
                raise InvalidInputError(f"{name} of a cost must be 0 or more; received {shortened(value)}.")
        if not self.per_token and not self.per_token_squared:
            raise InvalidInputError("a cost must grow with the tokens: per_token or per_token_squared above 0.")

    def of(self, samples: Numbers, longest: Numbers) -> npt.NDArray[np.float64]:
        """Return the cost of batches of so many samples, padded to so many tokens."""
        return self.fixed + samples * self.of_sample(longest)

    def of_sample(self, longest: Numbers) -> npt.NDArray[np.float64]:
        """Return what each further sample of this length adds."""
        length = longest.astype(np.float64)
        return length * self.per_token + length * length * self.per_token_squared


@dataclass(frozen=True)
class Budget:
    """The most that a batch may cost, and what else bounds its samples."""

    limit: float
    cost: BatchCost = BatchCost()
    max_samples: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.limit, bool) or not isinstance(self.limit, Real) or not 0 < float(self.limit) < math.inf:
            raise InvalidInputError(
                f"the budget of a batch must be a number above 0, of tokens or of its cost; received "
                f"{shortened(self.limit)}."
            )
        if not isinstance(self.cost, BatchCost):
            raise InvalidInputError(
                f"cost must be a BatchCost; received {shortened(self.cost)}.",
                remedy="bw.BatchCost(per_token=1.0)",
            )
        whole_number(self.multiple_of, "multiple_of")
        if self.max_samples is not None and whole_number(self.max_samples, "max_samples") < self.multiple_of:
            raise InvalidInputError(
                f"max_samples={self.max_samples} is below multiple_of={self.multiple_of}: no batch is both."
            )

    def most_samples(self, longest: Numbers) -> Numbers:
        """Return how many samples padded to each length fit; 0 where not even one does.

        >>> Budget(16_384).most_samples(np.array([8, 100, 4096, 20_000]))
        array([2048,  163,    4,    0])
        >>> Budget(16_384, multiple_of=8).most_samples(np.array([100, 4096]))
        array([160,   4])
        """
        room, per_sample = float(self.limit) - self.cost.fixed, self.cost.of_sample(longest)
        # Rounding may have gone either way: one more if that fits as well, one less if this does not.
        most = np.clip(np.floor(room / per_sample), 0, LARGEST_COUNT).astype(np.int64)
        most += (most + 1) * per_sample <= room
        most -= (most > 0) & (most * per_sample > room)
        if self.max_samples is not None:
            np.minimum(most, self.max_samples, out=most)
        if self.multiple_of > 1:
            # Fewer than one multiple are left as they are: the samples must go somewhere.
            most = np.where(most >= self.multiple_of, most - most % self.multiple_of, most)
        return most

    def to_dict(self) -> dict[str, Any]:
        """Return the budget as plain data."""
        return {
            "limit": self.limit,
            "fixed": self.cost.fixed,
            "per_token": self.cost.per_token,
            "per_token_squared": self.cost.per_token_squared,
            "max_samples": self.max_samples,
            "multiple_of": self.multiple_of,
        }


OVERSIZE = ("error", "drop", "single")


@dataclass(frozen=True)
class Usable:
    """The samples that take part, all where None, and how many were left out or stand alone."""

    samples: Numbers | None = None
    num_dropped: int = 0
    num_single: int = 0


def select_usable(lengths: Numbers, budget: Budget, choice: str) -> Usable:
    """Find the samples over the budget, and do with them as was chosen.

    >>> from batchwright.sampler.cost import Budget
    >>> select_usable(np.array([[5], [9]]), Budget(8), "drop").samples
    array([0])
    """
    if choice not in OVERSIZE:
        raise InvalidInputError(f"oversize is {', '.join(OVERSIZE)}; received {shortened(choice)}.")
    totals = lengths[:, 0] if lengths.shape[1] == 1 else lengths.sum(axis=1)
    longest = np.array([totals.max(initial=1)])
    is_any = budget.most_samples(longest)[0] < 1
    too_long = np.flatnonzero(budget.most_samples(totals) < 1) if is_any else np.zeros(0, np.int64)
    if not len(too_long) or choice == "single":
        return Usable(num_single=len(too_long))
    if choice == "drop" and len(too_long) == len(lengths):
        raise InvalidInputError(
            f"of {counted(len(lengths), 'sample')} every one costs more than the budget of {budget.limit:g} alone.",
            remedy=f"a budget of at least {float(budget.cost.of(np.array([1]), np.array([totals.min()]))[0]):g}",
        )
    if choice == "drop":
        return Usable(np.delete(np.arange(len(lengths)), too_long), num_dropped=len(too_long))
    raise InvalidInputError(
        f"{counted(len(too_long), 'sample')} of {len(lengths):,} cost more than the budget of {budget.limit:g} alone: "
        f"the first is sample {too_long[0]:,}, the longest has {int(totals.max()):,} tokens.",
        remedy='a larger budget, oversize="drop", or oversize="single" for a batch of its own',
    )
