"""Compiled workloads for benchmarks/compiled_cpu.py, small enough for Inductor and g++ to compile in seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from memory_cases import Case, classify, hf, named_architecture, pictures, small_llama
from memory_nets import ResNet, UNet
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from batchwright import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WIDTH, HEADS, WORDS, LENGTH = 256, 4, 2000, 256


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then the feed-forward part."""
        heads = self.qkv(self.before(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        out: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))
        return out


def save_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(save_products)


class Transformer(nn.Module):
    """A small language model; its blocks may be checkpointed, and a graph break may lie between them."""

    def __init__(self, dropout: float = 0.0, recompute: str = "", *, breaks: bool = False, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.recompute, self.breaks = recompute, breaks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.words(tokens)
        for block in self.blocks:
            if self.recompute == "all":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.recompute == "selective":
                x = checkpoint(block, x, use_reentrant=False, context_fn=selective)
            else:
                x = block(x)
        if self.breaks:
            torch._dynamo.graph_break()
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Separable(nn.Module):
    """A convolution net of depthwise and pointwise layers, without normalization over the batch."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 4, 4)]
        for _ in range(3):
            layers += [nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.GroupNorm(1, 32), nn.Conv2d(32, 128, 1)]
            layers += [nn.GELU(), nn.Conv2d(128, 32, 1)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.layers(x)
        return out


def mlp() -> nn.Module:
    widths = [layer for _ in range(4) for layer in (nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))]
    return nn.Sequential(*widths, nn.LayerNorm(512))


def compiled(build: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: torch.compile(build(*args, **options))


def compiled_blocks(**options: Any) -> nn.Module:
    model = Transformer(**options)
    for block in model.blocks:
        block.compile()
    return model


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def compiled_adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = adamw(params)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[assignment, method-assign]
    return optimizer


def language(model: Any, **changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "model": model,
        "batch": lambda n: torch.randint(0, WORDS, (n, LENGTH)),
        "loss": next_token,
        "optimizer": adamw,
    }
    return Workload(**{**fields, **changes})


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).view(-1, WORDS), tokens.view(-1))


def under_autocast(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return next_token(model, tokens)


def with_compiled_loss() -> Workload:
    loss_of = torch.compile(lambda out, tokens: F.cross_entropy(out.view(-1, WORDS).float(), tokens.view(-1)))
    return language(Transformer, loss=lambda model, tokens: loss_of(model(tokens), tokens))


def transformers_model(config: Any, seq_len: int = 128, **changes: Any) -> Workload:
    workload = Workload.from_transformers(config, seq_len=seq_len, **changes)
    assert callable(workload.model)
    return replace(workload, model=compiled(workload.model))


def compiled_cases() -> list[Case]:
    small = {"n_layer": 3, "n_embd": 256, "n_head": 4, "vocab_size": 2000, "n_positions": 256}
    gpt2 = hf.GPT2Config(**small)
    sizes = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 768}
    bert = named_architecture(hf.BertConfig(**sizes, vocab_size=2000), "BertForMaskedLM")
    vit = named_architecture(hf.ViTConfig(**sizes, image_size=96), "ViTForImageClassification")
    llama = small_llama(num_hidden_layers=2, vocab_size=2000, hidden_size=192, intermediate_size=512)
    image: dict[str, Any] = {"loss": classify, "optimizer": sgd}
    return [
        Case(
            "MLP", Workload(compiled(mlp), lambda m, x: m(x).pow(2).mean(), lambda n: torch.randn(n, 512), adamw), 256
        ),
        Case("transformer", language(compiled(Transformer))),
        Case("transformer, fullgraph", language(lambda: torch.compile(Transformer(), fullgraph=True))),
        Case("transformer, dropout", language(compiled(Transformer, 0.1))),
        Case("transformer, bf16 autocast", language(compiled(Transformer, layers=1), loss=under_autocast), 2),
        Case("transformer, graph break", language(compiled(Transformer, breaks=True))),
        Case("transformer, checkpointing inside", language(compiled(Transformer, 0.1, "all"))),
        Case("transformer, selective checkpointing inside", language(compiled(Transformer, recompute="selective"))),
        Case("transformer, blocks", language(compiled_blocks)),
        Case("transformer, blocks, checkpointing around", language(lambda: compiled_blocks(recompute="all"))),
        Case("transformer, loss alone", with_compiled_loss()),
        Case("transformer, optimizer too", language(compiled(Transformer), optimizer=compiled_adamw)),
        Case("transformer, dynamic", language(lambda: torch.compile(Transformer(layers=1), dynamic=True))),
        Case("Llama", transformers_model(llama)),
        Case("GPT-2, graph break", transformers_model(gpt2, 256)),
        Case("BERT, masked LM", transformers_model(bert), 8),
        Case("vision transformer", transformers_model(vit), 8),
        Case("ResNet with BatchNorm", Workload(compiled(ResNet), batch=pictures(64, 10), **image), 8),
        Case("U-Net", Workload(compiled(UNet, upsample=True), batch=pixels, loss=each_pixel, optimizer=sgd), 2),
        Case("depthwise convolutions", Workload(compiled(Separable), batch=pictures(64, 10), **image), 8),
    ]


def pixels(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 64, 64), torch.randint(0, 4, (n, 64, 64))


def each_pixel(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return out.pow(2).mean()
