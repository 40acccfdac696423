"""Profile this machine's CPU in a minute, predict the steps of models on it, then run them: how far off is the time?

    OMP_NUM_THREADS=1 python benchmarks/cpu_time.py                  14 models at 3 sizes each
    OMP_NUM_THREADS=1 python benchmarks/cpu_time.py --profile FILE   with a profile that is kept, or made there

The clock is the processor time of one thread, so that what else runs on the machine counts little; the profile is made
by the same clock. No model is among the layers of the profile. Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import batchwright as bw
from batchwright.device.step import PLAIN_STEP, run_probe
from batchwright.state.untouched import untouched
from batchwright.timing.calibrate import calibrate
from batchwright.timing.profile import Profile, read_profile, write_profile
from batchwright.timing.step_time import StepTime, time_here
from batchwright.trace.run import trace_workload

BARS = {"median": 10.0, "p90": 25.0}
_STEPS = 5


class Decoder(nn.Module):
    """A small GPT."""

    def __init__(self, *, width: int = 192, layers: int = 4, heads: int = 6, words: int = 4000) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class DecoderBlock(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.a, self.b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        n, length, width = x.shape
        q, k, v = self.qkv(self.a(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.b(x))))
        return out


class Encoder(nn.Module):
    """torch's own encoder layers over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return two logits."""
        out: torch.Tensor = self.head(self.layers(self.embed(tokens)).mean(1))
        return out


class VisionTransformer(nn.Module):
    """Patches, decoder blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 160, 8, 8)
        self.blocks = nn.ModuleList(DecoderBlock(160, 5) for _ in range(4))
        self.head = nn.Linear(160, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x.mean(1))
        return out


class Residual(nn.Module):
    """A block of a residual net."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()),
            *(nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)),
        )
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False) if (inner, stride) != (outer, 1) else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both ways."""
        return functional.relu(self.body(x) + self.short(x))


class Bottleneck(nn.Module):
    """A block of a deep residual net."""

    def __init__(self, width: int, groups: int = 1) -> None:
        super().__init__()
        inner = width // 4 if groups == 1 else width // 2
        self.body = nn.Sequential(
            *(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, inner, 3, 1, 1, groups=groups, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both ways."""
        return functional.relu(x + self.body(x))


class Mobile(nn.Module):
    """An inverted residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()),
            *(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()),
            *(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both ways."""
        out: torch.Tensor = x + self.body(x)
        return out


class UNet(nn.Module):
    """Three stages down and up, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64)
        self.down = nn.ModuleList(_double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(_double(a + b, b) for a, b in ((64, 32), (32, 16)))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a map of logits."""
        kept = []
        for stage in self.down:
            x = stage(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = kept[-1]
        for stage, skip in zip(self.up, kept[-2::-1], strict=True):
            x = stage(torch.cat([functional.interpolate(x, scale_factor=2.0, mode="bilinear"), skip], 1))
        out: torch.Tensor = self.head(x)
        return out


def _double(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(inner, outer, 3, 1, 1), nn.BatchNorm2d(outer), nn.ReLU()),
        *(nn.Conv2d(outer, outer, 3, 1, 1), nn.BatchNorm2d(outer), nn.ReLU()),
    )


class Recurrent(nn.Module):
    """A language model of recurrent layers."""

    def __init__(self, kind: Any, *, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(3000, width)
        self.layers = kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 3000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.head(self.layers(self.embed(tokens))[0])
        return out


class Mixer(nn.Module):
    """Layers that mix patches, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(8))
        self.across = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))
        self.along = nn.ModuleList(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for number in range(4):
            x = x + self.across[number](self.norms[2 * number](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.along[number](self.norms[2 * number + 1](x))
        out: torch.Tensor = self.head(x.mean(1))
        return out


class Dense(nn.Module):
    """Each layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, 1, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(24 + 12 * k), nn.ReLU(), nn.Conv2d(24 + 12 * k, 12, 3, 1, 1, bias=False))
            for k in range(8)
        )
        self.head = nn.Linear(24 + 96, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.first(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def _net(*parts: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def _stem(width: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()


def _images(side: int) -> Callable[[int], Any]:
    return lambda n: (torch.randn(n, 3, side, side), torch.randint(10, (n,)))


def _tokens(length: int, words: int) -> Callable[[int], Any]:
    return lambda n: (torch.randint(words, (n, length)),) * 2


def _classified(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _next(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _pairs(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1][:, 0] % 2)


def _per_pixel(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long())


def _restored(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.mse_loss(model(batch[0]), batch[0])


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def workloads() -> list[tuple[bw.Workload, tuple[int, ...]]]:
    """Return the models, and the micro-batches of each."""

    def one(name: str, model: Any, batch: Any, loss: Any, optimizer: Any, *sizes: int) -> Any:
        return bw.Workload(model=model, batch=batch, loss=loss, optimizer=optimizer, name=name), sizes

    vgg = [nn.Conv2d(3, 32, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 96, 3, 1, 1), nn.ReLU()]
    vgg += [nn.MaxPool2d(2), nn.Conv2d(96, 160, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)]
    auto = [nn.Conv2d(3, 48, 4, 2, 1), nn.ReLU(), nn.Conv2d(48, 96, 4, 2, 1), nn.ReLU()]
    auto += [nn.ConvTranspose2d(96, 48, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(48, 3, 4, 2, 1)]
    return [
        one("gpt", Decoder, _tokens(96, 4000), _next, _adamw, 1, 4, 12),
        one("wide gpt", lambda: Decoder(width=384, layers=2), _tokens(64, 4000), _next, _adamw, 1, 4, 12),
        one("encoder", Encoder, _tokens(64, 3000), _pairs, _adamw, 2, 8, 24),
        one("vit", VisionTransformer, _images(64), _classified, _adamw, 2, 8, 24),
        one("mixer", Mixer, _images(64), _classified, _adamw, 2, 8, 24),
        one(
            "resnet",
            lambda: _net(*_stem(32), Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2), width=128),
            *(_images(64), _classified, _sgd, 2, 8, 24),
        ),
        one(
            "deep resnet",
            lambda: _net(*_stem(128), *(Bottleneck(128) for _ in range(4)), width=128),
            *(_images(48), _classified, _sgd, 2, 8, 16),
        ),
        one(
            "resnext",
            lambda: _net(*_stem(128), *(Bottleneck(128, 8) for _ in range(3)), width=128),
            *(_images(48), _classified, _sgd, 2, 8, 16),
        ),
        one("vgg", lambda: _net(*vgg, width=160), _images(48), _classified, _sgd, 2, 8, 24),
        one(
            "mobilenet",
            lambda: _net(*_stem(32), *(Mobile(32) for _ in range(4)), width=32),
            *(_images(64), _classified, _sgd, 2, 8, 16),
        ),
        one("densenet", Dense, _images(32), _classified, _sgd, 2, 8, 24),
        one("u-net", UNet, _images(64), _per_pixel, _adamw, 1, 4, 8),
        one("autoencoder", lambda: nn.Sequential(*auto), _images(64), _restored, _adamw, 2, 8, 24),
        one("lstm", lambda: Recurrent(nn.LSTM), _tokens(32, 3000), _next, _sgd, 2, 8, 24),
        one("gru", lambda: Recurrent(nn.GRU, width=96), _tokens(24, 3000), _next, _sgd, 2, 8, 24),
    ]


def measure(workload: bw.Workload, size: int) -> float:
    """Return the seconds of a step, by the processor time of this thread."""
    with untouched(workload):
        seconds = run_probe(workload, size, PLAIN_STEP, device=torch.device("cpu"), steps=_STEPS, now=time.thread_time)
    return statistics.median(seconds[1:])


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    profile: Profile
    if options.profile is not None and options.profile.exists():
        profile = read_profile(options.profile)
    else:
        start = time.thread_time()
        profile = calibrate(clock=time.thread_time, progress=lambda text: print(text, file=sys.stderr))
        print(f"calibrated in {time.thread_time() - start:.0f} s")
        if options.profile is not None:
            write_profile(profile, options.profile)
    errors, inside = [], []
    print(f"{'model':<14}{'size':>5}{'predicted':>12}{'measured':>12}{'off':>9}")
    for workload, sizes in workloads():
        for size in sizes:
            work = trace_workload(workload, size).work
            assert work is not None
            predicted = time_here(work, profile, samples=size)
            assert isinstance(predicted, StepTime), predicted
            true = measure(workload, size)
            errors.append(100 * abs(predicted.seconds / true - 1))
            inside.append(predicted.low <= true <= predicted.high)
            off = 100 * (predicted.seconds / true - 1)
            print(f"{workload.name:<14}{size:>5}{predicted.seconds * 1e3:>9.1f} ms{true * 1e3:>9.1f} ms{off:>+8.0f}%")
    errors.sort()
    found = {"median": statistics.median(errors), "p90": errors[int(0.9 * (len(errors) - 1))]}
    print(f"{len(errors)} steps: median {found['median']:.1f} %, p90 {found['p90']:.1f} %, ", end="")
    print(f"inside the interval {sum(inside) / len(inside):.0%}")
    missed = [f"{name} {found[name]:.1f}, the bar {bar}" for name, bar in BARS.items() if found[name] > bar]
    print("; ".join(missed) or "every bar is met")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
