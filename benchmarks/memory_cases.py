"""The workloads that benchmarks/memory_cpu.py predicts and then runs for real."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from memory_nets import RecurrentLM, ResNet, UNet
from torch import nn

from batchwright import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Typed only in part, so taken as untyped.
hf: Any = import_module("transformers")


@dataclass(frozen=True)
class Case:
    """One workload at one size."""

    name: str
    workload: Workload
    micro_batch: int = 4
    accumulation: int = 1
    clip_norm: float | None = None


def adamw(**options: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, **options)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def small_llama(**changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 384,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 12000,
    }
    return hf.LlamaConfig(**{**sizes, **changes})


def llama(**changes: Any) -> Workload:
    return Workload.from_transformers(small_llama(), seq_len=256, **changes)


def tiny_llama(**changes: Any) -> Workload:
    """A smaller one: a CPU without bf16 and fp16 instructions multiplies in them at a hundredth of the speed."""
    config = small_llama(num_hidden_layers=2, vocab_size=2000, hidden_size=192)
    return Workload.from_transformers(config, seq_len=64, **changes)


def named_architecture(config: Any, architecture: str) -> Any:
    config.architectures = [architecture]
    return config


def checkpointed(reentrant: bool) -> Workload:
    def build() -> nn.Module:
        model = hf.LlamaForCausalLM(small_llama())
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        training: nn.Module = model.train()
        return training

    return llama(model=build)


def under_autocast(dtype: torch.dtype) -> Callable[[nn.Module, Any], torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            found: torch.Tensor = model(**batch).loss
            return found

    return loss


def in_bf16() -> Workload:
    build = tiny_llama().model
    assert not isinstance(build, nn.Module)
    return tiny_llama(model=lambda: build().to(torch.bfloat16))


def two_optimizers(params: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    listed = list(params)
    matrices = [p for p in listed if p.dim() > 1]
    return [torch.optim.AdamW([p for p in listed if p.dim() < 2]), torch.optim.SGD(matrices, lr=0.1, momentum=0.9)]


def with_lora() -> nn.Module:
    import peft

    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model: nn.Module = peft.get_peft_model(hf.LlamaForCausalLM(small_llama()), adapters)
    return model.train()


def mixtral(experts: str | None) -> Workload:
    config = hf.MixtralConfig(
        num_hidden_layers=3,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=4000,
        num_local_experts=4,
        **({"experts_implementation": experts} if experts else {}),
    )
    return Workload.from_transformers(config, seq_len=256)


def pictures(size: int, classes: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda n: (torch.randn(n, 3, size, size), torch.randint(0, classes, (n,)))


def masks(size: int, classes: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda n: (torch.randn(n, 3, size, size), torch.randint(0, classes, (n, size, size)))


def classify(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def predict_tokens(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def recurrent(kind: type[nn.LSTM | nn.GRU], **options: Any) -> Workload:
    return Workload(
        model=lambda: RecurrentLM(kind, **options),
        batch=lambda n: torch.randint(0, 4000, (n, 100)),
        loss=predict_tokens,
        optimizer=adamw(),
    )


def generate(model: Any, batch: Any) -> Any:
    return model.generate(batch["input_ids"], min_new_tokens=32, max_new_tokens=32, do_sample=False, use_cache=True)


def generating() -> Workload:
    workload = Workload.from_transformers(small_llama(vocab_size=4000), seq_len=256)
    return replace(workload, optimizer=None, loss=None, generate=generate)


def transformer_cases() -> list[Case]:
    bert = hf.BertConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    t5 = hf.T5Config(num_layers=3, d_model=256, d_ff=1024, num_heads=4, d_kv=64, vocab_size=8000)
    t5.decoder_start_token_id = 0
    vit = hf.ViTConfig(num_hidden_layers=6, hidden_size=192, num_attention_heads=3, intermediate_size=768)
    fp16 = tiny_llama(loss=under_autocast(torch.float16), scaler=lambda: torch.amp.GradScaler("cpu"))
    tokens = Workload.from_transformers
    return [
        Case("GPT-2 small, 1024 tokens", tokens(hf.GPT2Config(), seq_len=1024), 1),
        Case("Llama", llama()),
        Case("Llama, bf16 weights", in_bf16()),
        Case("Llama, bf16 autocast", tiny_llama(loss=under_autocast(torch.bfloat16))),
        Case("Llama, fp16 autocast, GradScaler", fp16),
        Case("Llama, checkpointed", checkpointed(reentrant=False)),
        Case("Llama, checkpointed, reentrant", checkpointed(reentrant=True)),
        Case("Llama, LoRA (peft)", llama(model=with_lora)),
        Case("Llama, accumulation 4, clipping", llama(), accumulation=4, clip_norm=1.0),
        Case("Llama, generation, KV cache", generating(), 8),
        Case("Llama, training and generation", llama(generate=generate), 8),
        Case("Llama, training and evaluation", llama(evaluate=lambda m, b: m(**b)), 8),
        Case("Llama, inference only", replace(llama(), optimizer=None), 8),
        Case("BERT, masked LM", tokens(named_architecture(bert, "BertForMaskedLM"), seq_len=128), 8),
        Case("T5", tokens(named_architecture(t5, "T5ForConditionalGeneration"), seq_len=128), 8),
        Case("vision transformer", tokens(named_architecture(vit, "ViTForImageClassification")), 8),
        Case("Mixtral", mixtral(None)),
        Case("Mixtral, eager experts", mixtral("eager")),
    ]


def optimizer_cases() -> list[Case]:
    return [
        Case("Llama, SGD with momentum", llama(optimizer=sgd)),
        Case("Llama, RMSprop", llama(optimizer=lambda params: torch.optim.RMSprop(params))),
        Case("Llama, Adafactor", llama(optimizer=lambda params: torch.optim.Adafactor(params))),
        Case("Llama, AdamW foreach", llama(optimizer=adamw(foreach=True))),
        Case("Llama, AdamW fused", llama(optimizer=adamw(fused=True))),
        Case("Llama, AdamW and SGD at once", llama(optimizer=two_optimizers)),
    ]


def convolutional_cases() -> list[Case]:
    def unet(upsample: bool) -> Workload:
        return Workload(model=lambda: UNet(upsample=upsample), batch=masks(64, 5), loss=classify, optimizer=adamw())

    resnet = Workload(model=ResNet, batch=pictures(128, 100), loss=classify, optimizer=sgd)
    odd = replace(resnet, model=lambda: ResNet(width=13))
    return [
        Case("ResNet with BatchNorm", resnet, 8),
        Case("ResNet, odd channels", odd, 8),
        Case("ResNet, evaluation only", replace(resnet, optimizer=None), 8),
        Case("U-Net, transposed convolutions", unet(upsample=False)),
        Case("U-Net, interpolation", unet(upsample=True)),
    ]


def recurrent_cases() -> list[Case]:
    return [
        Case("LSTM", recurrent(nn.LSTM, batch_first=True), 16),
        Case("LSTM, time first, 2 layers", recurrent(nn.LSTM, num_layers=2), 16),
        Case("LSTM, 2 layers, dropout", recurrent(nn.LSTM, num_layers=2, batch_first=True, dropout=0.1), 16),
        Case("LSTM, both directions", recurrent(nn.LSTM, batch_first=True, bidirectional=True), 16),
        Case("GRU, 2 layers", recurrent(nn.GRU, num_layers=2, batch_first=True), 16),
    ]


def all_cases() -> list[Case]:
    return [*transformer_cases(), *optimizer_cases(), *convolutional_cases(), *recurrent_cases()]
