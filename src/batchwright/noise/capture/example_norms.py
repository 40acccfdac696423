"""The squared norms of per-example gradients, in the backward pass of the whole batch.

Promises:
- no per-example gradient of a matrix is kept, and none is formed where it can be done without; at most a few samples,
  or a few of their rows, are held at a time: about 4M numbers;
- a weight that is used several times gets the norm of the sum, not the sum of the norms;
- everything is computed in fp32 at least, and long sums of squares are added up in float64;
- a pass in which the known layers do not account for the whole gradient is given up with a reason, never guessed;
- the model, its gradients and the random state stay as they are; `stop` leaves no hook behind.

The inputs of the layers are held until their gradients are there. That costs nothing if autograd holds them as
well, but activation checkpointing frees them, so part of what it saves is lost while the norms are taken.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from batchwright.noise.capture.example_uses import Form, UnknownModuleError, Use, UseLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn


# A use of a matrix is a pair of rows, L and R, one of each per position, and its gradient is L^T R. Positions of more
# uses stand behind them, so the squared norm of the sum is that of one longer product. It comes either from the product
# itself or from <L L^T, R R^T> (Goodfellow, arXiv:1510.01799), whichever is cheaper. The rows L of an embedding are
# one-hot: they are kept as ids.

LIMIT = 4 * 1024**2
MATRICES = (Form.LINEAR, Form.TRANSPOSED, Form.CONVOLUTION, Form.EMBEDDING)


def squares_of_uses(
    uses: Sequence[tuple[Form, Use]], gradient: torch.Tensor, *, samples: int, signs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the squared norm of each sample's share, and how much of the gradient the uses leave unexplained.

    The second is a length relative to that of the shares, of one random combination of the columns (Freivalds 1977):
    None without the `signs` of that combination, one for each column.

    >>> layer, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    >>> use = Use(layer, x, gradient=torch.tensor([[1.0], [10.0]]))
    >>> gradient, signs = torch.tensor([[63.0, 84.0]]), torch.tensor([1.0, -1.0])
    >>> squares_of_uses([(Form.LINEAR, use)], gradient, samples=2, signs=signs)
    (tensor([   25., 10000.], dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    account = None if signs is None else _Account(wide.reshape(len(wide), -1), signs)
    if uses[0][0] in MATRICES:
        return _squares_of_matrix(uses, wide, samples, account), account.unexplained() if account else None
    shares = wide.new_zeros(samples, wide.numel())
    for form, use in uses:
        rows = _vector_rows(form, use, wide)
        shares += rows.sum(1)
        if account:
            account.add(rows)
    return _squared(shares[:, None]), account.unexplained() if account else None


def columns_of(gradient: torch.Tensor) -> int:
    """Return the number of columns of a gradient as a matrix.

    >>> columns_of(torch.zeros(8, 4, 3, 3)), columns_of(torch.zeros(5))
    (36, 1)
    """
    return gradient[0].numel()


class _Account:
    """Adds up what the uses explain of a gradient times some signs, and the squares of all that went into it."""

    def __init__(self, gradient: torch.Tensor, signs: torch.Tensor) -> None:
        self._signs = signs
        self._left_over = gradient @ signs
        self._scale = _squared(self._left_over[None])

    def add(self, rows: torch.Tensor) -> None:
        """Account for gradients as they are: (samples, positions, numbers)."""
        self._left_over -= rows.sum((0, 1)).reshape(-1, len(self._signs)) @ self._signs
        self._scale += _squared(rows).sum()

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Account for L^T R, a part of the gradient's rows for each group."""
        self._left_over -= ((right @ self._signs)[:, None] @ left).reshape(-1, len(self._left_over)).sum(0)
        self._scale += (_squared(left[..., None, :]) * _squared(right[..., None, :])).sum()

    def add_at_ids(self, ids: torch.Tensor, at_ids: torch.Tensor) -> None:
        """Account for rows added up by id."""
        self._left_over.index_add_(0, ids.flatten(), (at_ids @ self._signs).flatten(), alpha=-1)
        self._scale += _squared(at_ids).sum()

    def unexplained(self) -> torch.Tensor:
        """Return the length of the rest, relative to that of its parts: a sum that cancels is rounding, not a loss."""
        return (_squared(self._left_over[None]) / self._scale.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()


def _vector_rows(form: Form, use: Use, wide: torch.Tensor) -> torch.Tensor:
    """Return the shares of the gradient of a bias or of the weight of a norm: (samples, positions, numbers)."""
    assert use.gradient is not None
    at_output = use.gradient.to(wide.dtype)
    if form is Form.CHANNEL_BIAS:
        return at_output.flatten(2).mT
    if form is not Form.BIAS:
        at_output = at_output * _normalized(form, use.module, use.input, wide)
    return at_output.reshape(len(at_output), -1, wide.numel())


def _normalized(form: Form, module: Any, given: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if epsilon is None:
        epsilon = torch.finfo(given.dtype).eps  # As torch's RMSNorm has it.
    normalize: Any = functional.layer_norm if form is Form.LAYER_NORM else functional.rms_norm
    normalized: torch.Tensor = normalize(given.to(wide.dtype), wide.shape, eps=epsilon)
    return normalized


def _squares_of_matrix(
    uses: Sequence[tuple[Form, Use]], wide: torch.Tensor, samples: int, account: _Account | None
) -> torch.Tensor:
    dense = [(form, use) for form, use in uses if form is not Form.EMBEDDING]
    sparse = [use for form, use in uses if form is Form.EMBEDDING]
    groups = max((getattr(use.module, "groups", 1) for _, use in dense), default=1)
    height, width = len(wide) // groups, columns_of(wide)
    length = sum(_positions(form, use) for form, use in dense)
    is_formed = height * width <= length * (height + width)
    # Windows of a convolution are a copy of the input, kernel-size times as large.
    of_one_sample = groups * max(height * width if is_formed else length**2, length * (height + width))
    squares = []
    for part in _blocks(samples, of_one_sample):
        terms = []
        if dense:
            left, right = _joined([_rows(form, use, part, wide) for form, use in dense])
            terms.append(_squares_of_product(left, right, is_formed=is_formed))
            if account:
                account.add_product(left, right)
        if sparse:
            ids, at_ids = _joined([_rows_at_ids(use, part, wide) for use in sparse])
            terms.append(_squares_by_id(ids, at_ids))
            if account:
                account.add_at_ids(ids, at_ids)
        if dense and sparse:
            terms.append(2 * _products_at_ids(left, right, ids, at_ids))
        squares.append(reduce(torch.add, terms).reshape(-1, groups).sum(1))
    # Grams of a gradient that cancels out may leave less than nothing.
    return torch.cat(squares).clamp(min=0)


def _positions(form: Form, use: Use) -> int:
    assert use.gradient is not None
    one = use.gradient[0]
    return one[0].numel() if form is Form.CONVOLUTION else one.numel() // one.shape[-1]


def _rows(form: Form, use: Use, part: slice, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return L and R of some samples, each (samples * groups, positions, numbers)."""
    assert use.gradient is not None
    given, at_output = use.input[part].to(wide.dtype), use.gradient[part].to(wide.dtype)
    if form is Form.CONVOLUTION:
        return _rows_of_convolution(use.module, given, at_output)
    x, d = (rows.reshape(len(rows), -1, rows.shape[-1]) for rows in (given, at_output))
    return (d, x) if form is Form.LINEAR else (x, d)


def _rows_of_convolution(
    module: Any, given: torch.Tensor, at_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    windows = functional.pad(given, module._reversed_padding_repeated_twice, mode=mode)
    space = len(module.kernel_size)
    for i, (size, step, apart) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True)):
        windows = windows.unfold(2 + i, (size - 1) * apart + 1, step)[..., ::apart]
    # Positions last: rows of pixels are copied in one go, which took a third of the time of the other order.
    windows = windows.movedim(tuple(range(2 + space, 2 + 2 * space)), tuple(range(2, 2 + space)))
    batches, positions = len(given) * module.groups, at_output[0, 0].numel()
    return at_output.reshape(batches, -1, positions).mT, windows.reshape(batches, -1, positions).mT


def _rows_at_ids(use: Use, part: slice, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert use.gradient is not None
    ids, at_output = use.input[part], use.gradient[part].to(wide.dtype)
    ids, at_output = ids.reshape(len(ids), -1), at_output.reshape(len(ids), -1, at_output.shape[-1])
    padding: Any = use.module.padding_idx
    scale = getattr(use.module, "embed_scale", None)
    if scale is not None:
        at_output = at_output * scale
    if padding is not None:
        at_output = at_output.masked_fill(ids.eq(padding)[..., None], 0)
    return ids, at_output


def _joined(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    left, right = zip(*pairs, strict=True)
    return torch.cat(left, 1), torch.cat(right, 1)


def _squares_of_product(left: torch.Tensor, right: torch.Tensor, *, is_formed: bool) -> torch.Tensor:
    """Return |L^T R|^2 for each sample."""
    if left.shape[1] == 1:
        return _squared(left) * _squared(right)
    if is_formed:
        columns = _blocks(left.shape[2], left.shape[0] * right.shape[2])
        return reduce(torch.add, (_squared(left[:, :, some].mT @ right) for some in columns))
    rows = _blocks(left.shape[1], left.shape[0] * left.shape[1])
    return reduce(torch.add, (_inner(left[:, some] @ left.mT, right[:, some] @ right.mT) for some in rows))


def _squares_by_id(ids: torch.Tensor, at_ids: torch.Tensor) -> torch.Tensor:
    """Return for each sample the squared norm of the rows added up by id.

    >>> _squares_by_id(torch.tensor([[7, 9, 7]]), torch.tensor([[[1.0], [10.0], [2.0]]]))
    tensor([109.], dtype=torch.float64)
    """
    if ids.shape[1] == 1:
        return _squared(at_ids)
    # By rank, not by id: the table has as many rows as a sample has positions, not as the vocabulary has words.
    in_order, order = ids.sort(dim=1)
    rank = functional.pad((in_order.diff(dim=1) != 0).cumsum(1), (1, 0))
    place = torch.empty_like(ids, dtype=rank.dtype).scatter_(1, order, rank)
    place += torch.arange(len(ids), device=ids.device)[:, None] * ids.shape[1]
    added = torch.zeros_like(at_ids).flatten(0, 1).index_add_(0, place.flatten(), at_ids.flatten(0, 1))
    return _squared(added.view_as(at_ids))


def _products_at_ids(left: torch.Tensor, right: torch.Tensor, ids: torch.Tensor, at_ids: torch.Tensor) -> torch.Tensor:
    """Return <L^T R, rows added up by id> for each sample, in the places that the ids name."""
    rows = _blocks(left.shape[1], ids.numel())
    products = (
        _inner(left[:, some].gather(2, ids[:, None].expand(-1, left[:, some].shape[1], -1)), right[:, some] @ at_ids.mT)
        for some in rows
    )
    return reduce(torch.add, products)


def _blocks(count: int, numbers_of_one: int) -> Iterator[slice]:
    step = max(1, LIMIT // max(1, numbers_of_one))
    return (slice(start, start + step) for start in range(0, count, step))


def _squared(rows: torch.Tensor) -> torch.Tensor:
    squares: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1).to(_long_sum(rows)).square().sum(-1)
    return squares


def _inner(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).sum(-1).to(_long_sum(one)).sum(-1)


def _long_sum(rows: torch.Tensor) -> torch.dtype:
    # The GPU of a Mac has no float64.
    return torch.float32 if rows.device.type == "mps" else torch.float64


__all__ = ["ExampleNorms", "UnknownModuleError"]

# A layer that bypasses its module does so in every pass of the kind; a look at a few, then now and then, finds it.
FIRST_CHECKS, CHECK_EVERY = 3, 16


class ExampleNorms:
    """Takes the squared norm of each sample's share of the gradient, weight by weight.

    >>> from torch import nn
    >>> model, x = nn.Linear(2, 1), torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    >>> norms = ExampleNorms(model, [model.weight])
    >>> norms.start()
    >>> hook = model.weight.register_hook(lambda gradient: print(norms.squares_of(model.weight, gradient)))
    >>> model(x).sum().backward()
    tensor([ 25., 100.], dtype=torch.float64)
    >>> norms.stop()

    The shares of the samples add up to the gradient: with a mean loss over B samples each is a B-th of the gradient
    of that sample's loss. A gradient that is not finite has squares that are not.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._log = UseLog(model, parameters)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._done: set[nn.Parameter] = set()
        self._pass_of_done = 0
        # Its own, so that the random numbers of the training stay as they are.
        self._generator = torch.Generator().manual_seed(0)

    @property
    def num_samples(self) -> int | None:
        """The number of samples of the running pass, None before the first."""
        return self._log.num_samples

    @property
    def failure(self) -> str | None:
        """Why the running pass cannot be used; None as long as it can. Each forward of the model begins anew."""
        return self._log.failure

    def start(self) -> None:
        """Install the hooks; passes from here on are followed."""
        self.stop()
        self._log.install()

    def stop(self) -> None:
        """Remove every hook, and drop what is held."""
        self._log.remove()

    @torch.no_grad()
    def squares_of(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the squared norm of each sample's share of a gradient that just arrived; None after a failure.

        To be called from a hook of the weight, once in each pass.
        """
        uses, samples = self._log.taken(parameter), self._log.num_samples
        self._expect_one_gradient(parameter)
        if samples is None:
            self._log.fail("how many samples: the model was not called, or nothing in its inputs tells")
        if self._log.failure or samples is None:
            return None
        resolved = self._resolved(parameter, uses, samples)
        if not resolved:
            return None
        is_checked = self._log.num_passes <= FIRST_CHECKS or self._log.num_passes % CHECK_EVERY == 0
        # A backward inside an autocast block would round the norms to 16 bits.
        with torch.autocast(gradient.device.type, enabled=False):
            signs = self._signs_for(gradient) if is_checked else None
            squares, unexplained = squares_of_uses(resolved, gradient, samples=samples, signs=signs)
        if unexplained is not None and float(unexplained) > tolerance(gradient, resolved):
            rest = f"{float(unexplained):.2g} of its gradient is not accounted for by its layers"
            self._log.fail(f"{self._names[parameter]}: {rest}: it is used elsewhere as well")
            return None
        return squares

    def _expect_one_gradient(self, parameter: nn.Parameter) -> None:
        if self._pass_of_done != self._log.num_passes:
            self._done, self._pass_of_done = set(), self._log.num_passes
        if parameter in self._done:
            # Norms of two parts do not add up to that of their sum.
            self._log.fail(f"{self._names[parameter]}: its gradient came in several parts")
        self._done.add(parameter)

    def _resolved(self, parameter: nn.Parameter, uses: list[tuple[Form, Use]], samples: int) -> list[tuple[Form, Use]]:
        if not uses:
            self._log.fail(f"{self._names[parameter]}: a gradient, but its layer was not called: it is used elsewhere")
        resolved = [(form, row_per_sample(use, samples)) for form, use in uses]
        known = [(form, use) for form, use in resolved if use is not None]
        if len(known) < len(uses):
            where = "and where it is added to theirs is not seen"
            self._log.fail(f"{self._names[parameter]}: one output for all samples, {where}")
            return []
        return known

    def _signs_for(self, gradient: torch.Tensor) -> torch.Tensor:
        bits = torch.randint(0, 2, (columns_of(gradient),), generator=self._generator)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return (2 * bits - 1).to(device=gradient.device, dtype=wide)


def row_per_sample(use: Use, samples: int) -> Use | None:
    """Return a use with one row for each sample, or None if a shared output does not tell whose row is whose.

    >>> positions, arrival = torch.arange(3), torch.ones(2, 3, 4)
    >>> shared = Use(torch.nn.Embedding(3, 4), positions, True, torch.ones(3, 4), arrivals=[arrival])
    >>> row_per_sample(shared, 2).input
    tensor([[0, 1, 2],
            [0, 1, 2]])
    """
    if not use.is_shared or use.gradient is None:
        return use
    ids, shape = use.input, use.gradient.shape
    if use.arrivals and all(arrival.numel() == samples * shape.numel() for arrival in use.arrivals):
        rows = [arrival.reshape(samples, -1, shape[-1]) for arrival in use.arrivals]
        total = torch.stack(rows).sum(0) if len(rows) > 1 else rows[0]
        return Use(use.module, ids.reshape(1, -1).expand(samples, -1), gradient=total)
    # As many positions as samples, and no broadcast after all.
    has_rows = ids.shape[0] == samples and {arrival.shape for arrival in use.arrivals} == {shape}
    return Use(use.module, ids, gradient=use.gradient) if has_rows else None


def tolerance(gradient: torch.Tensor, uses: Sequence[tuple[Form, Use]]) -> float:
    """Return what rounding may leave unexplained of a gradient, relative to the length of the samples' shares.

    >>> tolerance(torch.zeros(1), []), tolerance(torch.zeros(1, dtype=torch.bfloat16), [])
    (0.001, 0.05)
    """
    met = {gradient.dtype}
    for form, use in uses:
        met |= {tensor.dtype for tensor in (use.input, use.gradient) if tensor is not None}
        if form is Form.RMS_NORM:
            met.add(torch.float32)  # Those of transformers compute in it, also on float64.
    coarsest = max(torch.finfo(dtype).eps for dtype in met if dtype.is_floating_point)
    if coarsest > torch.finfo(torch.float32).eps:
        return 5e-2
    return 1e-3 if coarsest > torch.finfo(torch.float64).eps else 1e-8
