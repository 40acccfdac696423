"""The lengths of all samples as one array, from whatever the user has: a list, an array, a column, a function.

Promises:
- a length that is none (negative, zero, missing, not a number) is refused with its place;
- samples have one length each, or two: source and target, image tokens and text.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.units import counted, shortened
from batchwright.user_files import MOST_BYTES, check_place, read_bytes, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt


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
