"""Profile this machine in a minute: layers of many sizes, each operator of their steps timed as it runs.

Small steps of single layers (products, convolutions, norms, activations, recurrent layers, optimizers) run forward and
backward under a mode that takes the time of every operator. The same steps run once more without it: what they take
beyond their operators is autograd's and Python's, and is shared out among kernels and views.

Promises:
- no model of the user's is run, and nothing of the process is changed but the profile that is written;
- what is timed is the operator by itself, in the place and with the memory that a step gives it;
- a profile is made anew with every call; it holds for this machine, these threads and this torch.
"""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from batchwright.timing.profile import Machine, Point, Profile, place_of
from batchwright.trace.work import StepWork, Work, WorkLog

_SECONDS = 60.0
_REPEATS = 3
_aten = torch.ops.aten


@dataclass(frozen=True)
class Layer:
    """A small step: what is built, what it is fed, and its optimizer."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    # Not a sum alone: its gradient is one number, expanded, which kernels read faster than any that trains.
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: model(x).square().mean()
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None


class _Timing(TorchDispatchMode):
    """Writes down every operator with the seconds it took."""

    def __init__(self, now: Callable[[], float], call_seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now, self._call_seconds = now, call_seconds
        self.log = WorkLog(lambda _: True)
        self.seconds: list[float] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        start = self._now()
        result = func(*args, **options)
        parts = [self._taken(start)]
        if func is _aten.convolution_backward.default:
            parts = self._parts_of(func, args, parts[0])
        before = len(self.log.last_entries())
        outputs = [value for value in tree_iter(result) if isinstance(value, torch.Tensor)]
        self.log.note(func, args, options, outputs, str)
        written = len(self.log.last_entries()) - before
        if written:
            if len(parts) < written:  # a bias is timed with its convolution, forward and backward
                parts += [0.0] * (written - len(parts))
            self.seconds += parts[:written]
        return result

    def _parts_of(self, func: Callable[..., Any], args: Any, whole: float) -> list[float]:
        """Share a convolution's backward out among its gradients, as each takes alone; a bias comes by the way."""
        alone = []
        for number in (0, 1):
            if args[10][number]:
                start = self._now()
                func(*args[:10], [number == other for other in range(3)])
                alone.append(self._taken(start))
        return [whole * part / sum(alone) for part in alone] if alone else [whole]

    def _taken(self, start: float) -> float:
        """Seconds since then, less what calling any operator from Python takes: autograd calls them from C++."""
        seconds = self._now() - start
        return max(seconds - self._call_seconds, seconds / 4)


@dataclass
class _Measured:
    """What all layers took, by operator."""

    curves: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    products: dict[str, list[Point]] = field(default_factory=lambda: defaultdict(list))
    steps: list[tuple[StepWork, float, float]] = field(default_factory=list)
    """Of each layer its work, the seconds of its operators, and those of the whole step."""

    def add(self, work: Work, seconds: float) -> None:
        """Keep one operator."""
        if work.flops:
            point = (place_of(work), math.log(max(seconds, 1e-9) / work.flops))
            self.products[f"{work.operator}/{work.kind}"].append(point)
            self.products[work.kind].append(point)
        else:
            self.curves[work.operator].append((work.num_bytes, seconds))
            if "(bias)" not in work.operator:
                self.curves[work.kind].append((work.num_bytes, seconds))


def calibrate(
    device: str = "cpu",
    *,
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Time layers for about so many seconds, and return the profile of this machine.

    Where others keep the machine busy, `clock=time.thread_time` with one thread counts what this process took.
    """
    where = torch.device(device)
    now = _clock(where, clock)
    measured = _Measured()
    call_seconds = _call_seconds(now) if device == "cpu" else 0.0
    start = clock()
    skipped = 0
    with torch.random.fork_rng(devices=[] if device == "cpu" else [where]):
        # In a mixed order, so that what there is no time for is a little of everything.
        layers = sorted(_layers(), key=lambda layer: zlib.crc32(layer.name.encode()))
        for number, layer in enumerate(layers):
            if clock() - start > seconds:
                skipped = len(layers) - number
                break
            if number % 20 == 0:
                progress(f"timing layers: {number} of {len(layers)}")
            _time_layer(layer, where, now, call_seconds, measured)
    host, overlaps = _host_seconds(measured), device != "cpu"
    notes = (f"{skipped} of {len(layers)} layers were left out for lack of time",) if skipped else ()
    profile = Profile(
        Machine.here(device), _curves(measured), dict(measured.products), host, overlaps=overlaps, notes=notes
    )
    return replace(profile, spread=_spread(profile, measured))


def _spread(profile: Profile, measured: _Measured) -> tuple[float, float]:
    """True over predicted seconds of the layers themselves, widened: a step of many is not one of them."""
    ratios = sorted(
        whole / (sum(map(profile.seconds_of, step.entries)) + profile.beyond_operators(step))
        for step, _, whole in measured.steps
    )
    if not ratios:
        return 0.5, 2.0
    low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
    return min(low, 0.8), max(high, 1.25)


def _clock(device: torch.device, clock: Callable[[], float]) -> Callable[[], float]:
    if device.type == "cpu":
        return clock

    def now() -> float:
        torch.accelerator.synchronize(device)
        return clock()

    return now


def _call_seconds(now: Callable[[], float]) -> float:
    """Return what it takes to call an operator that does nothing, and to read the clock around it."""
    x = torch.zeros(4)
    taken = []
    for _ in range(200):
        start = now()
        _aten.alias.default(x)
        taken.append(now() - start)
    return statistics.median(taken)


def _time_layer(
    layer: Layer, device: torch.device, now: Callable[[], float], call_seconds: float, measured: _Measured
) -> None:
    model = layer.build().to(device)
    batch = layer.batch().to(device)
    optimizer = None if layer.optimizer is None else layer.optimizer(model.parameters())

    def run() -> None:
        layer.loss(model, batch).backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None

    def timed() -> _Timing:
        mode = _Timing(now, call_seconds)
        with mode:
            mode.log.enter("forward")
            loss = layer.loss(model, batch)
            mode.log.enter("backward")
            loss.backward()
            mode.log.enter("optimizer")
            if optimizer is not None:
                optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        return mode

    run()
    whole, modes = [], []
    for _ in range(_REPEATS):
        start = now()
        run()
        whole.append(now() - start)
        modes.append(timed())
    step = modes[0].log.last_step()
    if any(len(mode.seconds) != len(modes[0].seconds) for mode in modes):
        return
    seconds = [statistics.median(times) for times in zip(*(mode.seconds for mode in modes), strict=True)]
    for work, taken in zip(modes[0].log.last_entries(), seconds, strict=True):
        measured.add(work, taken)
    measured.steps.append((step, sum(seconds), statistics.median(whole)))


def _curves(measured: _Measured) -> dict[str, list[tuple[float, float]]]:
    """Return for each operator one time for each size: the median of what is within a fifth."""
    curves = {}
    for name, points in measured.curves.items():
        groups: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for size, taken in points:
            groups[round(4 * math.log2(max(size, 1)))].append((size, taken))
        curve = [
            (float(statistics.median(size for size, _ in group)), max(statistics.median(t for _, t in group), 1e-8))
            for _, group in sorted(groups.items())
        ]
        curves[name] = [point for number, point in enumerate(curve) if not number or point[0] > curve[number - 1][0]]
    return curves


_COLUMNS = ("forward", "backward", "view")


def _host_seconds(measured: _Measured) -> dict[str, float]:
    """Share out what steps took beyond their operators: among kernels of forward, of the rest, and views."""
    rows, rest = [], []
    for step, operators, whole in measured.steps:
        if whole < 4e-3:  # of small steps it is a part that can be seen
            forward = sum(work.kernels for work in step.entries if work.phase == "forward")
            others = sum(work.kernels for work in step.entries) - forward
            rows.append([count / whole for count in (forward, others, step.num_views)])
            rest.append((whole - operators) / whole)
    best, costs = math.inf, dict.fromkeys(_COLUMNS, 0.0)
    if len(rows) < 4:
        return {**costs, "optimizer": 0.0}
    a, b = torch.tensor(rows, dtype=torch.float64), torch.tensor(rest, dtype=torch.float64).unsqueeze(1)
    for chosen in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
        solution = torch.linalg.lstsq(a[:, list(chosen)], b).solution
        error = float((a[:, list(chosen)] @ solution - b).square().sum())
        if bool((solution >= 0).all()) and error < best:
            best = error
            costs = dict.fromkeys(_COLUMNS, 0.0)
            costs.update((_COLUMNS[column], float(value)) for column, value in zip(chosen, solution, strict=True))
    return {**costs, "optimizer": costs["backward"]}


def _layers() -> Iterator[Layer]:
    yield from _products()
    yield from _convolutions()
    yield from _stacks()
    yield from _element_wise()
    yield from _sequences()


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-4, momentum=0.9)


def _products() -> Iterator[Layer]:
    for rows in (8, 64, 512, 2048):
        for width in (64, 256, 1024):
            for out in (64, 256, 1024, 4096):
                if rows * width * out > 2**30 or (out > 4 * width and width != 64):
                    continue
                yield Layer(
                    f"linear {rows} {width} {out}",
                    lambda width=width, out=out: nn.Linear(width, out),  # type: ignore[misc]
                    lambda rows=rows, width=width: torch.randn(rows, width, requires_grad=True),  # type: ignore[misc]
                    optimizer=_adam if rows == 64 else _sgd if rows == 8 else None,
                )


class _Convolve(nn.Module):
    def __init__(self, inner: int, outer: int, window: int, stride: int, groups: int, *, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Conv2d(inner, outer, window, stride, window // 2, groups=groups, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def _convolutions() -> Iterator[Layer]:
    shapes = [(3, 32, 3, 1, 1), (3, 64, 7, 2, 1), (3, 64, 4, 4, 1)]
    for channels in (16, 64, 128, 256):
        shapes += [(channels, channels, 3, 1, 1), (channels, channels, 1, 1, 1), (channels, 2 * channels, 3, 2, 1)]
        shapes += [(channels, 4 * channels, 1, 1, 1), (channels, channels, 3, 1, channels)]
        shapes += [(channels, channels, 3, 1, max(channels // 16, 2))]
    for inner, outer, window, stride, groups in shapes:
        for side in (8, 16, 32, 64):
            for samples in (2, 16):
                flops = 2 * samples * (side // stride) ** 2 * outer * inner * window**2 // groups
                if flops > 3e8 or flops < 2e5:
                    continue
                yield Layer(
                    f"convolution {inner} {outer} {window} {stride} {groups} {side} {samples}",
                    lambda a=(inner, outer, window, stride, groups): _Convolve(*a, bias=a[4] == 1),  # type: ignore[misc]
                    lambda s=(samples, inner, side, side): torch.randn(s, requires_grad=True),  # type: ignore[misc]
                )


class _Block(nn.Module):
    """What convolutional nets are made of; a layer by itself finds its tensors in the cache, one of a stack not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 2 * width
        self.dense = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.thin = nn.Sequential(
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()),
            *(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()),
            *(nn.Conv2d(wide, wide, 3, 1, 1, groups=4, bias=False), nn.ReLU(), nn.Conv2d(wide, width, 1, bias=False)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense(x) + self.thin(x)
        return out


def _stacks() -> Iterator[Layer]:
    for samples, width, side, depth in _STACKS:
        yield Layer(
            f"stack {samples} {width} {side} {depth}",
            lambda width=width, depth=depth: nn.Sequential(*(_Block(width) for _ in range(depth))),  # type: ignore[misc]
            lambda s=(samples, width, side, side): torch.randn(s, requires_grad=True),  # type: ignore[misc]
        )


_STACKS = (
    *((2, 16, 16, 3), (8, 16, 32, 4), (2, 64, 16, 3), (8, 32, 32, 4), (8, 64, 24, 4), (4, 64, 32, 6)),
    *((8, 64, 32, 5), (16, 64, 32, 4), (16, 32, 48, 4), (8, 128, 16, 3), (2, 24, 64, 4), (24, 24, 32, 5)),
)


class _Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


_IMAGES = (
    *((2, 16, 8), (2, 64, 12), (4, 32, 24), (8, 32, 16), (8, 128, 16), (4, 96, 32)),
    *((8, 64, 32), (16, 128, 24), (16, 32, 48), (16, 64, 64)),
)


def _element_wise() -> Iterator[Layer]:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "silu": functional.silu,
        "hardswish": functional.hardswish,
        "leaky": functional.leaky_relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "softmax": lambda x: functional.softmax(x, -1),
        "log_softmax": lambda x: functional.log_softmax(x, -1),
        "dropout": lambda x: functional.dropout(x, 0.1),
        "transpose": lambda x: x.transpose(-1, -2).contiguous() * 2,
        "cat": lambda x: torch.cat([x, x], -1),
        "mean": lambda x: (x - x.mean(-1, keepdim=True)) / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt(),
        "stack": lambda x: torch.stack([x, x]),
        "chunk": lambda x: torch.cat([part * 2 for part in x.chunk(4, -1)], -1),
        "exp": lambda x: x.exp().clamp(max=10.0) + x.sin(),
        "mask": lambda x: x.masked_fill(x > 0, -1.0) + 1,
    }
    shapes = [(8, 64), (64, 128), (256, 256), (512, 256), (1024, 384), (1024, 1024), (2048, 1024), (4096, 1024)]
    for name, function in functions.items():
        for rows, width in shapes:
            yield Layer(
                f"{name} {rows} {width}",
                lambda function=function: _Apply(function),  # type: ignore[misc]
                lambda s=(rows, width): torch.randn(s, requires_grad=True),  # type: ignore[misc]
            )
    for rows, width in shapes:
        yield Layer(
            f"layer norm {rows} {width}",
            lambda width=width: nn.LayerNorm(width),  # type: ignore[misc]
            lambda s=(rows, width): torch.randn(s, requires_grad=True),  # type: ignore[misc]
        )
    images: dict[str, Callable[[int], nn.Module]] = {
        "batch norm": nn.BatchNorm2d,
        "group norm": lambda channels: nn.GroupNorm(8, channels),
        "max pool": lambda _: nn.MaxPool2d(2),
        "wide max pool": lambda _: nn.MaxPool2d(3, 2, 1),
        "average pool": lambda _: nn.AvgPool2d(2),
        "adaptive pool": lambda _: nn.AdaptiveAvgPool2d(1),
        "nearest": lambda _: nn.Upsample(scale_factor=2.0),
        "bilinear": lambda _: nn.Upsample(scale_factor=2.0, mode="bilinear"),
        "up": lambda channels: nn.ConvTranspose2d(channels, channels, 2, 2),
        "cat of channels": lambda _: _Apply(lambda x: torch.cat([x, x], 1)),
        "to last": lambda _: _Apply(lambda x: x.flatten(2).transpose(1, 2).contiguous() * 2),
    }
    for name, build in images.items():
        for samples, channels, side in _IMAGES:
            yield Layer(
                f"{name} {samples} {channels} {side}",
                lambda build=build, channels=channels: build(channels),  # type: ignore[misc]
                lambda s=(samples, channels, side, side): torch.randn(s, requires_grad=True),  # type: ignore[misc]
            )


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.fused = heads, fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, -1)
        )
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = functional.softmax(q @ k.transpose(-2, -1) * 0.1, -1) @ v
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def _first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = model(x)[0].square().mean()
    return total


def _classify(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten())


def _sequences() -> Iterator[Layer]:
    for samples, length, width, heads in ((1, 32, 64, 4), (4, 64, 128, 4), (4, 128, 256, 8), (8, 256, 256, 4)):
        for fused in (True, False):
            yield Layer(
                f"attention {samples} {length} {width} {heads} {fused}",
                lambda a=(width, heads), fused=fused: _Attention(*a, fused=fused),  # type: ignore[misc]
                lambda s=(samples, length, width): torch.randn(s, requires_grad=True),  # type: ignore[misc]
            )
    for samples, length, inner, width in ((2, 10, 32, 64), (8, 20, 64, 128), (16, 30, 128, 256), (32, 40, 256, 512)):
        for kind in (nn.LSTM, nn.GRU):
            if kind is nn.GRU and width > 256:
                continue
            yield Layer(
                f"{kind.__name__} {samples} {length} {inner} {width}",
                lambda kind=kind, a=(inner, width): kind(*a, batch_first=True),  # type: ignore[misc]
                lambda s=(samples, length, inner): torch.randn(s, requires_grad=True),  # type: ignore[misc]
                _first,
            )
    for rows, vocabulary, width in ((64, 500, 32), (512, 2000, 64), (2048, 8000, 128), (2048, 16000, 256)):
        yield Layer(
            f"embedding {rows} {vocabulary} {width}",
            lambda a=(vocabulary, width): nn.Sequential(nn.Embedding(*a), nn.Linear(a[1], a[0])),  # type: ignore[misc]
            lambda rows=rows, most=vocabulary: torch.randint(most, (4, rows // 4)),  # type: ignore[misc]
            _classify,
            _adam if rows <= 512 else None,
        )
