"""The uses of a weight in one pass: what its modules were given, and the gradients at what they returned.

Promises:
- a weight is followed only in modules whose arithmetic is known; any other is refused by name before training starts;
- outputs, gradients and random numbers stay as they are, and no tensor is copied;
- an embedding that all samples share (positions) is followed to where it is added to them, or the pass is given up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, WeakSet

import torch
from torch import nn

from batchwright.accumulate.boundary import graph_nodes
from batchwright.device.batches import clear_num_samples, tensors_in
from batchwright.noise.capture.weight_hooks import WeakHook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.autograd.graph import Node

    Forms = dict[nn.Module, list[tuple[nn.Parameter, "Form"]]]


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLAIN = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, *CONVOLUTIONS)
# Where one output becomes one for each sample, and by which factor.
_BROADCASTS = (("AddBackward0", 1), ("ExpandBackward0", 1))
# What these pass on has the elements of what they got, in the same order.
_SAME_ELEMENTS = ("UnsqueezeBackward0", "ViewBackward0", "ToCopyBackward0")


class UnknownModuleError(Exception):
    """A weight, or a whole model, whose samples have no gradients that could be told apart."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Form(Enum):
    """How the gradient of a weight comes from the input x of its module and the gradient D at its output."""

    LINEAR = auto()  # D^T x
    TRANSPOSED = auto()  # x^T D
    EMBEDDING = auto()  # rows of D added up by id
    CONVOLUTION = auto()  # D^T (windows of x)
    LAYER_NORM = auto()  # D times x normalized
    RMS_NORM = auto()  # the same without the mean; a weight that is applied as 1 + w has the same gradient
    BIAS = auto()  # D
    CHANNEL_BIAS = auto()  # D, the channels in dimension 1


BIASES = (Form.BIAS, Form.CHANNEL_BIAS)


def form_of(module: nn.Module, name: str) -> Form | None:
    """Return how a weight of a module is used, or None if that is not known.

    >>> form_of(nn.Linear(2, 3), "weight"), form_of(nn.Linear(2, 3), "bias"), form_of(nn.Bilinear(2, 2, 2), "weight")
    (<Form.LINEAR: 1>, <Form.BIAS: 7>, None)
    """
    kind = type(module).__name__
    plain = next((one for one in _PLAIN if isinstance(module, one) and type(module).forward is one.forward), None)
    if plain in CONVOLUTIONS:
        return Form.CONVOLUTION if name == "weight" else Form.CHANNEL_BIAS
    if isinstance(module, nn.Embedding):
        is_simple = not module.sparse and module.max_norm is None and not module.scale_grad_by_freq
        is_scaled = kind.endswith("ScaledWordEmbedding") and hasattr(module, "embed_scale")  # Gemma, BART
        return Form.EMBEDDING if is_simple and (plain or is_scaled) else None
    if plain or (kind == "Conv1D" and hasattr(module, "nf")):
        weights = {nn.Linear: Form.LINEAR, nn.LayerNorm: Form.LAYER_NORM, nn.RMSNorm: Form.RMS_NORM}
        return Form.BIAS if name == "bias" else weights.get(plain, Form.TRANSPOSED)  # type: ignore[arg-type]
    has_epsilon = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    has_one_vector = [weight.dim() for weight in module.parameters()] == [1]
    is_rms_norm = kind.endswith(("RMSNorm", "T5LayerNorm")) and name == "weight" and has_epsilon and has_one_vector
    return Form.RMS_NORM if is_rms_norm else None


def mixes_samples(module: nn.Module) -> bool:
    """Whether a module normalizes over the batch, now."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)


def forms_by_module(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Forms:
    """Return for each module that holds one of the weights how it uses them; refuse what is not known."""
    forms: Forms = defaultdict(list)
    holders = {weight: f"a weight of shape {tuple(weight.shape)} that no module holds" for weight in parameters}
    # Its layers are no layers: it hands their weights to one function, and never calls them.
    in_attention = {m for a in model.modules() if isinstance(a, nn.MultiheadAttention) for m in a.modules()}
    for path, module in model.named_modules():
        if mixes_samples(module):
            raise UnknownModuleError(f"{path or 'model'}: batch normalization: a sample has no gradient of its own")
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in holders:
                holders[parameter] = f"{path}.{name} of {type(module).__name__}".lstrip(".")
                form = form_of(module, name)
                if form and parameter.is_floating_point() and module not in in_attention:
                    forms[module].append((parameter, form))
    # One known holder is enough: BERT's head keeps the bias of its own decoder, and a use of it would not go unseen.
    known = {parameter for pairs in forms.values() for parameter, _ in pairs}
    unknown = [holder for parameter, holder in holders.items() if parameter not in known]
    if unknown:
        raise UnknownModuleError(f"{unknown[0]}: how it is used is not known, so samples cannot be told apart")
    return forms


@dataclass(eq=False)
class Use:
    """One call of a module: its input, and in the backward pass the gradient at its output."""

    module: nn.Module
    input: torch.Tensor
    is_shared: bool = False
    gradient: torch.Tensor | None = None
    arrivals: list[torch.Tensor] = field(default_factory=list)  # where a shared output was added to all samples

    def at_output(self, gradient: torch.Tensor) -> None:
        """Keep the gradient at the output: a hook of that tensor."""
        self.gradient = gradient

    def at_sum(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Keep a gradient that is about to be added up over the samples: a hook of the node that does it."""
        self.arrivals.append(gradients[0])


class UseLog:
    """Writes down the uses of each weight while its hooks are installed; `failure` says why a pass is of no use."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.num_samples: int | None = None
        self.num_passes = 0
        self.failure: str | None = None
        self._model = model
        self._forms = forms_by_module(model, parameters)
        self._names = {module: path or "model" for path, module in model.named_modules()}
        self._batch_norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._uses: dict[nn.Parameter, list[tuple[Form, Use]]] = defaultdict(list)
        self._shared: list[tuple[Use, Node]] = []
        self._given: set[int] = set()
        self._samples_first: WeakSet[nn.Module] = WeakSet()
        """Modules whose inputs were seen with more or fewer positions than samples, samples first."""
        self._hooks: list[Any] = []
        self._hooks_of_pass: list[Any] = []

    def install(self) -> None:
        """Begin to write."""
        record, begin, follow = WeakHook(self._record), WeakHook(self._begin), WeakHook(self._follow_shared)
        self._hooks = [module.register_forward_hook(record, with_kwargs=True) for module in self._forms]
        self._hooks.append(self._model.register_forward_pre_hook(begin, with_kwargs=True))
        self._hooks.append(self._model.register_forward_hook(follow))

    def remove(self) -> None:
        """Take every hook away, also those on a graph that still lives, and forget all uses."""
        for hook in self._hooks + self._hooks_of_pass:
            hook.remove()
        self._hooks = []
        self._forget()

    def taken(self, parameter: nn.Parameter) -> list[tuple[Form, Use]]:
        """Return the uses through which a gradient came, and forget them."""
        # A module that ran in vain, or once more for activation checkpointing, has no gradient at its output.
        return [(form, use) for form, use in self._uses.pop(parameter, []) if use.gradient is not None]

    def fail(self, reason: str) -> None:
        """Give the pass up; the first reason counts."""
        self.failure = self.failure or reason

    def _forget(self) -> None:
        self._hooks_of_pass, self._shared = [], []
        self._uses.clear()

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        # An evaluation between forward and backward must not end the pass.
        if not torch.is_grad_enabled():
            return
        self._forget()
        self.failure = None
        self.num_passes += 1
        self.num_samples = clear_num_samples((args, kwargs))
        self._given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        if any(mixes_samples(module) for module in self._batch_norms):
            self.fail("batch normalization: a sample has no gradient of its own")

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        if self.failure or self.num_samples is None or not torch.is_grad_enabled() or not output.requires_grad:
            return
        given = args[0] if args else next(iter(kwargs.values()))
        # A bias does without the input, and autograd may not hold it.
        kept = given.detach() if any(form not in BIASES for _, form in self._forms[module]) else given.new_empty(0)
        use = Use(module, kept, is_shared=isinstance(module, nn.Embedding) and self._may_be_shared(given))
        if use.is_shared and output.grad_fn is not None:
            self._shared.append((use, output.grad_fn))
        elif (rows := _rows(module, given)) != self.num_samples:
            self.fail(f"{self._names[module]}: its input has {rows} rows for {self.num_samples} samples")
            return
        elif self._is_ambiguous(module, given):
            shape = tuple(given.shape)
            self.fail(f"{self._names[module]}: its input of shape {shape} may have the samples along either dimension")
            return
        self._hooks_of_pass.append(output.register_hook(self._weakly(use.at_output)))
        for parameter, form in self._forms[module]:
            self._uses[parameter].append((form, use))

    def _is_ambiguous(self, module: nn.Module, given: torch.Tensor) -> bool:
        """Whether as many positions as samples leave it open which of the two comes first."""
        own = 2 if isinstance(module, nn.Embedding) else 3
        is_input = given.untyped_storage().data_ptr() in self._given  # dimension 0 of an input is the samples
        if isinstance(module, CONVOLUTIONS) or given.dim() < own or is_input:
            return False
        if given.shape[1] != self.num_samples:
            self._samples_first.add(module)
            return False
        return module not in self._samples_first

    def _weakly(self, method: Callable[[Any], None]) -> Callable[[Any], None]:
        # A loss that is kept until the next one keeps its graph, and with it what hooks hold: not the activations.
        reference = WeakMethod(method)

        def hook(given: Any) -> None:
            if (alive := reference()) is not None:
                alive(given)
            else:
                self.fail("a backward pass through an earlier forward of the model: their samples cannot be told apart")

        return hook

    def _may_be_shared(self, ids: torch.Tensor) -> bool:
        # Positions made in the model, exactly as many as there are samples, look like a sample's own id.
        looks_alike = set(ids.shape) == {self.num_samples} and ids.untyped_storage().data_ptr() not in self._given
        return ids.dim() == 0 or ids.shape[0] != self.num_samples or looks_alike

    def _follow_shared(self, _: nn.Module, __: Any, outputs: Any) -> None:
        consumers = _consumers(outputs) if self._shared else {}
        for use, made_by in self._shared:
            ahead = [made_by]
            while ahead:
                for node in consumers.get(ahead.pop(), []):
                    if node.name() in _SAME_ELEMENTS:
                        ahead.append(node)
                    elif (node.name(), getattr(node, "_saved_alpha", 1)) in _BROADCASTS:
                        self._hooks_of_pass.append(node.register_prehook(self._weakly(use.at_sum)))
                    else:
                        where = f"{self._names[use.module]}: one output for all samples"
                        self.fail(f"{where} goes into {node.name()}, and is not added to theirs")
        self._shared = []


def _rows(module: nn.Module, given: torch.Tensor) -> int:
    # The dimensions of one sample, at least: none for an id, those that are normalized, channels and space, or one row.
    own = len(getattr(module, "normalized_shape", (1,))) + len(getattr(module, "kernel_size", ()))
    return given.shape[0] if given.dim() > own or isinstance(module, nn.Embedding) else 1


def _consumers(outputs: Any) -> dict[Node, list[Node]]:
    """Return for each node of the graph behind some outputs the nodes that use what it made, once for each use."""
    consumers: dict[Node, list[Node]] = defaultdict(list)
    for node in graph_nodes([tensor.grad_fn for tensor in tensors_in(outputs)]):
        for before in [before for before, _ in node.next_functions if before is not None]:
            consumers[before].append(node)
    return consumers
