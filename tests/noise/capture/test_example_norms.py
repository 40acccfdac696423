"""Squared norms of per-example gradients against one backward per example."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from batchwright.noise.capture import example_norms
from batchwright.noise.capture import example_norms as example_squares
from batchwright.noise.capture.example_norms import ExampleNorms, UnknownModuleError
from batchwright.noise.capture.example_uses import Use
from tests.oracle.example_gradients import example_squares as oracle_squares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Loss = Callable[[nn.Module, Any], torch.Tensor]

PRECISION = {torch.float64: 1e-9, torch.float32: 1e-5}
VOCABULARY, WIDTH, POSITIONS, SAMPLES = 23, 8, 6, 4


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def summed(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss that is a sum over samples, each position with a weight of its own."""
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    out: torch.Tensor = getattr(output, "logits", output)
    ramp = torch.linspace(-1, 2, out[0].numel(), dtype=out.dtype).view(out.shape[1:])
    return (out.sin() * ramp + out.square() * 0.1).sum()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def squares_in_backward(
    model: nn.Module, batch: Any, loss: Loss, norms: ExampleNorms | None = None
) -> tuple[dict[str, torch.Tensor | None], ExampleNorms]:
    weights = trainable(model)
    norms = norms or ExampleNorms(model, list(weights.values()))
    found: dict[str, torch.Tensor | None] = {}

    def take(name: str, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        found[name] = norms.squares_of(weight, gradient)

    hooks = [weight.register_hook(functools.partial(take, name, weight)) for name, weight in weights.items()]
    norms.start()
    loss(model, batch).backward()
    for hook in hooks:
        hook.remove()
    return found, norms


def assert_agree(
    model: nn.Module, batch: Any, dtype: torch.dtype, loss: Loss = summed, precision: float | None = None
) -> None:
    model.to(dtype)
    if isinstance(batch, torch.Tensor) and batch.is_floating_point():
        batch = batch.to(dtype)
    samples = len(batch if isinstance(batch, torch.Tensor) else next(iter(batch.values())))
    found, norms = squares_in_backward(model, batch, loss)
    norms.stop()
    assert norms.failure is None
    assert norms.num_samples == samples
    expected = oracle_squares(model, batch, loss, samples=samples)
    assert found.keys() == expected.keys()
    scale = max(float(squares.max()) for squares in expected.values())
    for name, squares in expected.items():
        mine = found[name]
        assert mine is not None, name
        # A gradient that is zero by symmetry (the bias of keys) is rounding and nothing else.
        close = torch.isclose(mine, squares, rtol=precision or PRECISION[dtype], atol=scale * 1e-12)
        assert close.all(), f"{name}: {mine} is not {squares}"


def ids(*shape: int, high: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, high, shape or (SAMPLES, POSITIONS))


def failure_of(model: nn.Module, batch: Any, loss: Loss = summed) -> str:
    found, norms = squares_in_backward(model, batch, loss)
    assert None in found.values()
    assert norms.failure is not None
    return norms.failure


class Gpt(nn.Module):
    """Tokens and positions, an MLP behind a norm, logits; the variants differ in how positions come in."""

    def __init__(self, how: str = "broadcast", *, is_tied: bool = False) -> None:
        super().__init__()
        self.how = how
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.norm, self.middle = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count = torch.arange(tokens.shape[1])
        if self.how == "row":
            x = self.tokens(tokens) + self.positions(count[None])
        elif self.how == "unsqueezed":
            x = self.positions(count).unsqueeze(0) + self.tokens(tokens)
        elif self.how == "expanded":
            x = self.tokens(tokens) + self.positions(count)[None].expand(len(tokens), -1, -1)
        elif self.how == "product":
            x = self.tokens(tokens) * self.positions(count)
        else:
            x = self.tokens(tokens) + self.positions(count)
        out: torch.Tensor = self.head(x + self.middle(self.norm(x)).relu())
        return out


class Twice(nn.Module):
    def __init__(self, *, is_checkpointed: bool = False, use_reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.is_checkpointed, self.use_reentrant = is_checkpointed, use_reentrant

    def body(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.inner(self.inner(x).tanh()) + x)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            x = checkpoint(self.body, x.requires_grad_(self.use_reentrant), use_reentrant=self.use_reentrant)
        else:
            x = self.body(x)
        out: torch.Tensor = self.outer(x)
        return out


@pytest.mark.parametrize("dtype", PRECISION)
def test_norms_of_an_mlp_equal_one_backward_per_example(dtype: torch.dtype) -> None:
    assert_agree(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), torch.randn(SAMPLES, 5), dtype)


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize(("positions", "width"), [(40, 4), (3, 30)], ids=["formed", "gram"])
@pytest.mark.parametrize("limit", [example_squares.LIMIT, 7], ids=["whole", "in blocks"])
def test_norms_on_sequences_agree_whichever_way_is_cheaper(
    dtype: torch.dtype, positions: int, width: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_squares, "LIMIT", limit)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
    assert_agree(model, torch.randn(SAMPLES, positions, width), dtype)


def test_samples_of_several_dimensions_are_positions() -> None:
    assert_agree(nn.Linear(3, 4), torch.randn(SAMPLES, 2, 5, 3), torch.float64)


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("size", [5, 12])
@pytest.mark.parametrize("limit", [example_squares.LIMIT, 7], ids=["whole", "in blocks"])
def test_norms_of_convolutions_agree(
    dtype: torch.dtype, size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_squares, "LIMIT", limit)
    flat = nn.Sequential(
        nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), nn.Tanh(), nn.Conv1d(6, 4, 2, dilation=2, padding="same")
    )
    assert_agree(flat, torch.randn(SAMPLES, 4, size), dtype)
    image = nn.Sequential(
        nn.Conv2d(2, 6, (3, 2), padding=(1, 2), bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, stride=(1, 2), padding=1, padding_mode="circular", groups=6),
        nn.Flatten(2),
        nn.Linear(size * ((size + 1) // 2 + 1), 2),
    )
    assert_agree(image, torch.randn(SAMPLES, 2, size, size - 1), dtype)


def test_norms_of_a_convolution_in_space_agree() -> None:
    assert_agree(nn.Conv3d(2, 4, 2, stride=2, groups=2), torch.randn(SAMPLES, 2, 4, 5, 6), torch.float64)


@pytest.mark.parametrize("dtype", PRECISION)
def test_norms_of_normalizations_agree(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.LayerNorm((3, WIDTH)), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH))
    assert_agree(model, torch.randn(SAMPLES, 2, 3, WIDTH), dtype)
    assert_agree(nn.LayerNorm(WIDTH, bias=False), torch.randn(SAMPLES, WIDTH), dtype)


@pytest.mark.parametrize("dtype", PRECISION)
def test_norms_of_embeddings_agree_with_repeated_and_padding_ids(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=2), nn.Linear(3, 2))
    assert_agree(model, ids(SAMPLES, 9, high=5), dtype)
    assert_agree(model, ids(SAMPLES, high=5), dtype)


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("positions", [3, 30])
@pytest.mark.parametrize("limit", [example_squares.LIMIT, 7], ids=["whole", "in blocks"])
def test_a_tied_weight_gets_the_norm_of_the_sum(
    dtype: torch.dtype, positions: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_squares, "LIMIT", limit)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY, bias=False))
    model[2].weight = model[0].weight
    assert_agree(model, ids(SAMPLES, positions), dtype)


@pytest.mark.parametrize("dtype", PRECISION)
def test_a_module_called_twice_gets_the_norm_of_the_sum(dtype: torch.dtype) -> None:
    assert_agree(Twice(), torch.randn(SAMPLES, POSITIONS, WIDTH), dtype)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    model = Twice(is_checkpointed=True, use_reentrant=use_reentrant)
    assert_agree(model, torch.randn(SAMPLES, POSITIONS, WIDTH), torch.float64)


@pytest.mark.parametrize("how", ["broadcast", "row", "unsqueezed", "expanded"])
def test_positions_shared_by_all_samples_are_told_apart(how: str) -> None:
    assert_agree(Gpt(how, is_tied=True), ids(SAMPLES, POSITIONS), torch.float64)


def test_as_many_positions_as_samples_are_given_up_until_another_number_has_told_which_comes_first() -> None:
    model = Gpt(is_tied=True).double()
    norms = ExampleNorms(model, list(model.parameters()))
    norms.start()
    for positions, is_known in ((SAMPLES, False), (POSITIONS, True), (SAMPLES, True)):
        model.zero_grad()
        model(ids(SAMPLES, positions)).sum().backward()
        assert (norms.failure is None) == is_known
    norms.stop()


def test_a_model_can_be_saved_and_copied_while_it_is_looked_at() -> None:
    model = Gpt(is_tied=True)
    norms = ExampleNorms(model, list(model.parameters()))
    norms.start()
    copy.deepcopy(model)(ids(SAMPLES, POSITIONS))
    assert norms.num_samples is None
    pickle.loads(pickle.dumps(model))
    norms.stop()


def test_a_batch_of_one_sample_has_the_norm_of_its_gradient() -> None:
    assert_agree(Gpt(), ids(1, POSITIONS), torch.float64)


def tiny(name: str) -> nn.Module:
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    common |= {"intermediate_size": 24, "max_position_embeddings": 16}
    configs: dict[str, Any] = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2),
        "llama": lambda: transformers.LlamaConfig(**common),
        "gemma": lambda: transformers.GemmaConfig(**common, head_dim=8, num_key_value_heads=1),
        "bert": lambda: transformers.BertConfig(**common),
    }
    kind: Any = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model: nn.Module = kind.from_config(configs[name](), attn_implementation="eager")
    return model.eval()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "bert"])
def test_norms_of_transformers_models_agree(name: str) -> None:
    # The norms of Llama and Gemma compute in fp32, whatever the model is in.
    precision = 1e-6 if name in ("llama", "gemma") else None
    assert_agree(tiny(name), {"input_ids": ids()}, torch.float64, precision=precision)


def test_shares_of_a_mean_loss_inside_the_model_add_up_to_its_gradient() -> None:
    batch = {"input_ids": ids(), "labels": ids()}

    def mean(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss * len(batch["labels"]) / SAMPLES

    assert_agree(tiny("gpt2"), batch, torch.float64, mean)


def test_autocast_rounds_the_layers_but_not_the_norms() -> None:
    model, batch = Gpt(), ids()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return summed(model, batch)

    assert_agree(model, batch, torch.float32, loss, precision=5e-2)


def test_a_backward_inside_autocast_does_not_round_the_norms() -> None:
    model, batch = nn.Linear(40, 30), torch.randn(SAMPLES, 50, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = squares_in_backward(model, batch, summed)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return summed(model, batch)

    outside, _ = squares_in_backward(model, batch, loss)
    for name in inside:
        torch.testing.assert_close(inside[name], outside[name], rtol=1e-9, atol=0.0)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.tokens(tokens), self.tokens.weight)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.flatten(0, 1)).view(*x.shape[:2], 3)
        return out


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(Bare()), "0.scale of Bare: how it is used is not known"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight of MultiheadAttention: how"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "1: batch normalization: a sample has no gradient"),
        (nn.Sequential(nn.BatchNorm1d(2).eval()), "0.weight of BatchNorm1d: how"),
        (nn.Embedding(3, 2, sparse=True), "weight of Embedding: how"),
        (nn.ConvTranspose1d(1, 1, 1), "weight of ConvTranspose1d: how"),
    ],
)
def test_what_is_not_known_is_refused_by_name(model: nn.Module, reason: str) -> None:
    with pytest.raises(UnknownModuleError) as refusal:
        ExampleNorms(model, list(trainable(model).values()))
    assert reason in refusal.value.reason


def test_layers_inside_attention_are_refused_also_alone() -> None:
    model = nn.MultiheadAttention(4, 2)
    with pytest.raises(UnknownModuleError, match=r"out_proj\.weight"):
        ExampleNorms(model, list(model.out_proj.parameters()))


def test_a_weight_of_another_model_is_refused() -> None:
    with pytest.raises(UnknownModuleError, match="that no module holds"):
        ExampleNorms(nn.Linear(1, 1), [nn.Parameter(torch.ones(3))])


def test_a_weight_used_outside_its_layer_gives_the_pass_up() -> None:
    assert "not accounted for" in failure_of(Functional(), ids())


def test_a_layer_called_without_its_model_gives_the_pass_up() -> None:
    reason = failure_of(
        nn.Sequential(nn.Linear(3, 2)), torch.randn(SAMPLES, 3), lambda model, x: summed(model.get_submodule("0"), x)
    )
    assert "the model was not called" in reason


def test_a_gradient_in_two_parts_gives_the_pass_up() -> None:
    def twice(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = summed(model, batch)
        loss.backward(retain_graph=True)
        return loss

    assert failure_of(nn.Linear(3, 2), torch.randn(SAMPLES, 3), twice)


def test_rows_that_are_no_samples_give_the_pass_up() -> None:
    reason = failure_of(Flattened(), torch.randn(SAMPLES, POSITIONS, WIDTH))
    assert reason == f"layer: its input has {SAMPLES * POSITIONS} rows for {SAMPLES} samples"


def test_positions_that_are_not_added_give_the_pass_up() -> None:
    assert "goes into MulBackward0" in failure_of(Gpt("product"), ids())


def test_two_forwards_in_one_backward_give_the_pass_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_norms, "FIRST_CHECKS", 0)

    def both(model: nn.Module, batch: Any) -> torch.Tensor:
        return summed(model, batch) + summed(model, batch.flip(0))

    assert "earlier forward" in failure_of(nn.Linear(3, 2), torch.randn(SAMPLES, 3), both)


def test_batch_normalization_switched_on_later_gives_the_pass_up() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False).eval())
    norms = ExampleNorms(model, list(model.parameters()))
    model.train()
    found, _ = squares_in_backward(model, torch.randn(SAMPLES, 3), summed, norms)
    assert set(found.values()) == {None}
    assert "batch normalization" in (norms.failure or "")


def test_a_failure_ends_with_its_pass() -> None:
    model, x = Flattened(), torch.randn(SAMPLES, POSITIONS, WIDTH)
    _, norms = squares_in_backward(model, x, summed)
    assert norms.failure
    found, norms = squares_in_backward(model, x[:, :1], summed, norms)
    assert norms.failure is None
    assert None not in found.values()


def test_a_forward_without_gradients_in_between_does_not_end_the_pass() -> None:
    def with_evaluation(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = summed(model, batch)
        with torch.no_grad():
            model(batch[:1])
        return loss

    assert_agree(nn.Linear(3, 2), torch.randn(SAMPLES, 3), torch.float64, with_evaluation)


def test_passes_between_checks_have_the_same_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Gpt(is_tied=True).double(), ids()
    checked, _ = squares_in_backward(model, batch, summed)
    monkeypatch.setattr(example_norms, "FIRST_CHECKS", 0)
    unchecked, _ = squares_in_backward(model, batch, summed)
    for name, squares in checked.items():
        other = unchecked[name]
        assert squares is not None
        assert other is not None
        torch.testing.assert_close(squares, other, rtol=1e-14, atol=0.0)


def test_model_gradients_and_random_state_are_as_without() -> None:
    model, batch = tiny("gpt2").train(), {"input_ids": ids()}
    state = torch.get_rng_state()
    summed(model, batch).backward()
    plain, end = {name: weight.grad for name, weight in model.named_parameters()}, torch.get_rng_state()
    model.zero_grad()
    torch.set_rng_state(state)
    squares_in_backward(model, batch, summed)
    assert torch.equal(torch.get_rng_state(), end)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert torch.equal(weight.grad, plain[name]), name  # type: ignore[arg-type]


def test_stop_leaves_no_hook_and_no_record() -> None:
    model, x = Twice(), torch.randn(SAMPLES, POSITIONS, WIDTH)
    norms = ExampleNorms(model, list(model.parameters()))
    norms.start()
    loss = summed(model, x)
    norms.stop()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    loss.backward()
    assert not norms._log._uses
    assert not norms._log._hooks_of_pass


def test_a_loss_that_is_kept_keeps_no_activations() -> None:
    model = Gpt()
    norms = ExampleNorms(model, list(model.parameters()))
    found: list[torch.Tensor | None] = []

    def take(weight: nn.Parameter, gradient: torch.Tensor) -> None:
        found.append(norms.squares_of(weight, gradient))

    def uses_alive() -> int:
        mine = set(model.modules())
        return sum(type(thing) is Use and thing.module in mine for thing in gc.get_objects())

    for weight in model.parameters():
        weight.register_hook(functools.partial(take, weight))
    norms.start()
    loss = summed(model, ids())
    assert uses_alive() == len(list(model.children()))
    loss.backward()
    assert None not in found
    assert uses_alive() == 0
    assert loss.grad_fn is not None
