"""Mixed precision on the simulated card: which operator runs in which number format, as CUDA's autocast has it.

The lists are those of torch 2.13's ATen/autocast_mode.h. torch asks a backend of its own to bring the casts along; they
are registered for the dispatch key of the simulated device, so that operators inside others (einsum's products) are
reached as well.

Promises:
- a weight is cast once per outermost `autocast` and kept until its end, as on CUDA: that copy is part of the peak;
- outside `autocast` nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from batchwright.simulated.torch_patches.backend import NAME, is_on_card, simulated_device

_LOWER = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""
_FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
"""
# These sum up in float32 by their own dtype argument, without a copy of what they read.
_FLOAT32_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"

_KEY = "AutocastPrivateUse1"
_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


@cache
def register_autocast() -> tuple[torch.library.Library, ...]:
    """Bring the casts along, once per process: as long as the libraries are held."""
    simulated_device()
    others = torch.library.Library("_", "IMPL", _KEY)
    others.fallback(torch.library.fallthrough_kernel)
    aten = torch.library.Library("aten", "IMPL", _KEY)
    for names, rule in (
        (_LOWER, lambda *call: _run_in(torch.get_autocast_dtype(NAME), *call)),
        (_FLOAT32, partial(_run_in, torch.float32)),
        (_FLOAT32_RESULT, _float32_result),
        (_WIDEST, _widest),
    ):
        for name in names.split():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name, _without_autocast(rule, operator))
    aten.impl("binary_cross_entropy", _refuse_to_overflow)
    return others, aten


def forget_casts() -> None:
    """Drop the copies of weights: the outermost `autocast` has ended."""
    _casts.clear()


def _without_autocast(rule: Callable[..., Any], operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return rule(operator, args, kwargs)

    return run


def _refuse_to_overflow(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast, as on CUDA; "
        "binary_cross_entropy_with_logits is safe."
    )


def _float32_result(operator: Any, args: Any, kwargs: Any) -> Any:
    position = [argument.name for argument in operator._schema.arguments].index("dtype")
    is_given = (len(args) > position and args[position] is not None) or kwargs.get("dtype") is not None
    if is_given or not _can_be_cast(args[0]) or not args[0].is_floating_point():
        return operator(*args, **kwargs)
    return operator(*args[:position], **{**kwargs, "dtype": torch.float32})


def _widest(operator: Any, args: Any, kwargs: Any) -> Any:
    dtypes = [t.dtype for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    dtype = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(NAME)
    return _run_in(dtype, operator, args, kwargs)


def _run_in(dtype: torch.dtype, operator: Any, args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        return _cast(value, dtype) if isinstance(value, torch.Tensor) else value

    return operator(*tree_map(cast, args), **tree_map(cast, kwargs))


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not _can_be_cast(tensor) or tensor.dtype == dtype:
        return tensor
    is_weight = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    is_lowered = tensor.dtype is torch.float32 and dtype is torch.get_autocast_dtype(NAME)
    if not (is_weight and is_lowered and torch.is_autocast_cache_enabled()):
        return tensor.to(dtype)
    known = _casts.get(id(tensor))
    if known is None:
        known = _casts[id(tensor)] = (tensor, tensor.to(dtype))
    return known[1]


def _can_be_cast(tensor: torch.Tensor) -> bool:
    return is_on_card(tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64
