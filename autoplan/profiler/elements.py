"""Elementwise operations: what ops compute besides tensor products, as a small number per element.

Such ops are bound by memory, so that the numbers only need the right order: an addition counts 1, an exponential or a
square root 1, a norm about 8 per element. Backward is counted where gradients flow, for the operands that need one.
Every op that is listed here is known to cost this little; one that is not listed is reported, not taken for free.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autoplan.rules import OpView

Count = tuple[int, int]
"""Operations (forward, backward)."""


def elementwise(v: OpView, name: str) -> Count | None:
    """Elementwise operations of an op, or None where no table lists it.

    Args:
        v: The op.
        name: Its name, with its library in front where that is not ATen.
    """
    for known in (name, name.removesuffix("_")):
        if known in _COUNTED:
            return _COUNTED[known](v)
        if known in _PER_RESULT:
            forward, backward = _PER_RESULT[known]
            n = max((s.numel for s in v.outs), default=0)
            return forward * n, backward * n
        if known in _PER_OPERAND:
            forward, backward = _PER_OPERAND[known]
            n = v.ins[0].numel if v.ins else 0
            return forward * n, backward * n
    return None


def _add(v: OpView) -> Count:
    """One addition; broadcast operands sum their gradients, which costs one addition per element."""
    n = v.outs[0].numel
    return n, sum(n for s in v.ins if s.requires_grad and s.numel < n)


def _mul(v: OpView) -> Count:
    """One operation, and one (two where it is broadcast) per operand that needs a gradient."""
    n = v.outs[0].numel
    return n, sum(n * (1 + (s.numel < n)) for s in v.ins if s.requires_grad)


def _bias(position: int) -> Callable[[OpView], Count]:
    """A bias is added to every element, and its gradient summed over them."""

    def count(v: OpView) -> Count:
        bias = v.index(position, "bias")
        n = v.outs[0].numel
        return (0, 0) if bias is None else (n, n * v.ins[bias].requires_grad)

    return count


def _summand(v: OpView) -> Count:
    n = v.outs[0].numel
    return n, n * v.ins[v.index(0) or 0].requires_grad


def _attention(v: OpView) -> Count:
    """Softmax and scaling of the scores."""
    q, k = v.index(0, "query") or 0, v.index(1, "key") or 0
    scores = math.prod(v.ins[q].shape[:-1]) * v.ins[k].shape[-2]
    return 6 * scores, 6 * scores


def _recurrent(v: OpView) -> Count:
    """Gates: some ten operations for every element of every state."""
    n = v.outs[0].numel
    return 10 * n, 15 * n


def _fourier(v: OpView) -> Count:
    """5 n log2 n for a transform of n elements (Cooley and Tukey), over the dims transformed."""
    n = max(v.ins[0].numel, v.outs[0].numel)
    dims = v.op.arg(1, "dim", ())
    longer = v.ins[0] if v.ins[0].numel >= v.outs[0].numel else v.outs[0]
    over = math.prod(longer.shape[d] for d in dims if isinstance(d, int)) if isinstance(dims, tuple) else n
    work = round(5 * n * math.log2(max(2, over)))
    return work, work


def _sorted(v: OpView) -> Count:
    """N log2 n comparisons; backward puts gradients back to where their elements came from."""
    n = v.ins[0].numel
    dim = v.ins[0].shape[-1] if v.ins[0].rank else 1
    return round(n * math.log2(max(2, dim))), v.outs[0].numel


def _pooled(v: OpView) -> Count:
    """Every element of every window."""
    window = v.op.arg(1, "kernel_size", 1)
    spatial = 1 if "1d" in v.op.name else 3 if "3d" in v.op.name else 2
    sizes = [n for n in window if isinstance(n, int)] if isinstance(window, tuple) else [window] * spatial
    if len(sizes) == 1:
        sizes *= spatial
    n = v.outs[0].numel * math.prod(s for s in sizes if isinstance(s, int))
    return n, n


def _distance(v: OpView) -> Count:
    """A difference, a power and a sum per pair of rows and column."""
    n = v.outs[0].numel * v.ins[0].shape[-1]
    return 3 * n, 6 * n


def _bagged(v: OpView) -> Count:
    """Every row that an index names is added to its bag."""
    n = v.ins[v.index(1, "indices") or 0].numel * v.ins[0].shape[-1]
    return n, n


def _none(v: OpView) -> Count:
    return 0, 0


def _table(*rows: tuple[Count, str]) -> dict[str, Count]:
    return {name: count for count, names in rows for name in names.split()}


def _each(fn: Callable[[OpView], Count], names: str) -> dict[str, Callable[[OpView], Count]]:
    return dict.fromkeys(names.split(), fn)


_COUNTED: dict[str, Callable[[OpView], Count]] = {
    **_each(_add, "add sub rsub subtract"),
    **_each(_mul, "mul div multiply divide true_divide"),
    **_each(_bias(2), "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"),
    **_each(_bias(2), "convolution _convolution convolution_overrideable"),
    **_each(_bias(3), "bilinear"),
    **_each(_summand, "addmm baddbmm addmv addbmm"),
    **_each(_none, "matmul mm bmm mv dot vdot inner outer ger tensordot einsum linalg_vecdot"),
    **_each(_attention, "scaled_dot_product_attention autoplan::attention _scaled_dot_product_attention_math"),
    **_each(_attention, "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"),
    **_each(_attention, "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
    **_each(_attention, "_scaled_dot_product_fused_attention_overrideable"),
    **_each(_recurrent, "lstm gru rnn_tanh rnn_relu"),
    **_each(_fourier, "fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn"),
    **_each(_fourier, "fft_ifftn fft_rfftn fft_irfftn _fft_r2c _fft_c2c _fft_c2r"),
    **_each(_sorted, "sort argsort topk msort kthvalue median unique _unique2"),
    **_each(_pooled, "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d"),
    **_each(_pooled, "max_pool2d_with_indices max_pool3d_with_indices"),
    **_each(_distance, "cdist _cdist_forward _euclidean_dist"),
    **_each(_bagged, "embedding_bag _embedding_bag _embedding_bag_forward_only"),
}

_PER_RESULT: dict[str, Count] = _table(
    ((0, 0), "arange zeros ones full empty scalar_tensor eye linspace tril triu zeros_like ones_like full_like"),
    ((0, 0), "empty_like contiguous clone to _to_copy type_as cat concat stack hstack vstack pad constant_pad_nd roll"),
    ((0, 0), "flip one_hot repeat tile repeat_interleave copy argmax argmin new_zeros new_ones new_full new_empty"),
    ((0, 0), "meshgrid reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d pixel_shuffle fill zero"),
    ((0, 0), "pixel_unshuffle channel_shuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d diag_embed"),
    ((0, 0), "empty_strided tril_indices triu_indices bitwise_left_shift bitwise_right_shift im2col slice_scatter"),
    ((0, 0), "select_scatter as_strided_scatter diagonal_scatter masked_scatter complex view_as_complex_copy"),
    ((0, 1), "embedding gather index index_select take_along_dim take scatter index_put _unsafe_index masked_select"),
    ((1, 0), "eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not"),
    ((1, 0), "__and__ __or__ __xor__ bitwise_xor isnan isinf isfinite isin sign sgn floor ceil round trunc frac"),
    ((1, 0), "remainder fmod floor_divide searchsorted bucketize nonzero rand randn randint randperm normal uniform"),
    ((1, 0), "exponential multinomial"),
    ((1, 1), "neg negative abs relu relu6 hardtanh leaky_relu clamp clamp_min clamp_max where masked_fill maximum"),
    ((1, 1), "minimum fmax fmin reciprocal sqrt rsqrt exp exp2 log log2 log10 index_add index_fill scatter_add"),
    ((1, 1), "scatter_reduce index_reduce threshold nan_to_num conj_physical real imag col2im polar angle prelu"),
    ((1, 1), "rrelu rrelu_with_noise _prelu_kernel"),
    ((1, 2), "pow square sigmoid tanh sin cos tan sinh cosh asin acos atan erf erfc log1p expm1 lerp addcmul addcdiv"),
    ((1, 2), "atan2 hypot xlogy logaddexp digamma lgamma erfinv logit sinc addr cross linalg_cross cosine_similarity"),
    ((2, 1), "dropout feature_dropout alpha_dropout native_dropout bernoulli rand_like randn_like randint_like"),
    ((5, 7), "silu elu selu celu softplus softsign hardswish hardsigmoid logsigmoid log_sigmoid mish hardshrink"),
    ((5, 7), "softshrink tanhshrink log_sigmoid_forward"),
    ((8, 12), "gelu"),
    ((8, 8), "upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d grid_sampler"),
    ((8, 8), "grid_sampler_2d grid_sampler_3d"),
    ((40, 40), "upsample_bicubic2d _upsample_bicubic2d_aa"),
    ((5, 4), "softmax log_softmax _softmax _log_softmax softmin _safe_softmax"),
    ((6, 10), "rms_norm _fused_rms_norm"),
    ((8, 14), "layer_norm group_norm batch_norm instance_norm native_layer_norm native_group_norm native_batch_norm"),
    ((8, 14), "_native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update cudnn_batch_norm"),
    ((8, 14), "_batch_norm_no_update"),
)
"""Operations per element of the largest result: (forward, backward)."""

_PER_OPERAND: dict[str, Count] = _table(
    ((1, 1), "sum nansum mean nanmean amax amin max min aminmax prod any all count_nonzero trace bincount histc"),
    ((1, 1), "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d adaptive_max_pool1d"),
    ((1, 1), "adaptive_max_pool2d adaptive_max_pool3d cumsum cumprod cummax cummin logcumsumexp diff equal"),
    ((2, 1), "logsumexp"),
    ((2, 4), "glu"),
    ((3, 3), "var std var_mean std_mean norm linalg_vector_norm mse_loss l1_loss smooth_l1_loss huber_loss dist"),
    ((3, 3), "hinge_embedding_loss margin_ranking_loss soft_margin_loss poisson_nll_loss gaussian_nll_loss"),
    ((3, 3), "pairwise_distance linalg_norm renorm cosine_embedding_loss triplet_margin_loss multi_margin_loss"),
    ((5, 3), "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward binary_cross_entropy"),
    ((5, 3), "binary_cross_entropy_with_logits kl_div multilabel_margin_loss multilabel_soft_margin_loss"),
    ((10, 10), "ctc_loss _ctc_loss"),
)
"""Operations per element of the first operand: (forward, backward)."""
