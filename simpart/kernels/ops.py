"""What kind of work an op or a kernel is, by the base name of its target; the same on every device."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FAMILIES", "KINDS", "base_name", "family_of", "kind_of"]


def _table(rows: Mapping[str, str]) -> dict[str, str]:
    return {name: kind for kind, names in rows.items() for name in names.split()}


_VIEWS = """
    view reshape transpose permute t split split_with_sizes chunk select slice unsqueeze squeeze expand expand_as
    flatten unflatten alias detach getitem unbind narrow movedim swapaxes swapdims mT T adjoint view_as reshape_as
    as_strided diagonal unfold _unsafe_view _reshape_alias tensor_split hsplit vsplit view_as_real view_as_complex
    real imag lift_fresh broadcast_to broadcast_tensors
"""
_COPIES = """
    clone contiguous to _to_copy copy cat concat concatenate stack hstack vstack repeat repeat_interleave tile roll
    flip pad constant_pad_nd gather scatter scatter_add scatter_reduce index index_select index_put _unsafe_index
    _unsafe_index_put index_add index_copy masked_scatter masked_select take take_along_dim slice_scatter
    select_scatter diagonal_scatter as_strided_scatter slice_backward select_backward _index_put_impl pixel_shuffle
    pixel_unshuffle channel_shuffle type_as float half bfloat16 double long int bool cpu cuda lift_fresh_copy
    split_with_sizes_copy unfold_backward im2col col2im tril triu reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
"""
_FILLS = """
    zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    empty_strided new_empty_strided arange linspace eye scalar_tensor fill zero tril_indices triu_indices tensor
    range logspace
"""
_POINTWISE = """
    add sub rsub mul div true_divide floor_divide remainder fmod pow square sqrt rsqrt exp exp2 expm1 log log2
    log10 log1p neg negative abs sign sgn sin cos tan asin acos atan atan2 sinh cosh tanh sigmoid erf erfc erfinv
    reciprocal ceil floor round trunc frac clamp clamp_min clamp_max clip minimum maximum where masked_fill eq ne
    lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor isnan
    isinf isfinite relu relu6 gelu silu mish elu celu selu leaky_relu prelu hardtanh hardswish hardsigmoid softplus
    softsign logsigmoid log_sigmoid_forward threshold glu hardshrink softshrink tanhshrink lerp addcmul addcdiv
    hypot iadd isub imul itruediv truediv radd rmul rtruediv nan_to_num threshold_backward tanh_backward
    sigmoid_backward gelu_backward silu_backward elu_backward leaky_relu_backward hardtanh_backward
    hardswish_backward hardsigmoid_backward softplus_backward mish_backward glu_backward log_sigmoid_backward
    hardshrink_backward softshrink_backward logit logit_backward native_dropout_backward prelu_kernel _prelu_kernel
    _prelu_kernel_backward sinc i0 digamma lgamma xlogy polar complex and or not invert __and__ __or__ __xor__
    __invert__ upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d
    upsample_linear1d upsample_trilinear3d interpolate grid_sampler grid_sampler_2d upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward upsample_bilinear2d_backward
    upsample_bicubic2d_backward upsample_linear1d_backward upsample_trilinear3d_backward grid_sampler_2d_backward
"""
_REDUCTIONS = """
    sum mean var std var_mean std_mean prod amax amin max min argmax argmin any all logsumexp norm
    linalg_vector_norm cumsum cumprod cummax cummin sort argsort topk count_nonzero median nanmedian kthvalue mode
    unique searchsorted bucketize bincount histc nonzero nansum nanmean aminmax sum_to_size logcumsumexp
    cumsum_backward value_selecting_reduction_backward trace dist frobenius_norm linalg_norm
"""
_POOLS = """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices
    max_pool3d_with_indices _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool1d_with_indices fractional_max_pool2d
"""
_NORMS = """
    layer_norm native_layer_norm batch_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm
    _batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update native_batch_norm_legit
    group_norm native_group_norm instance_norm rms_norm _fused_rms_norm local_response_norm weight_norm
    _weight_norm_interface normalize batch_norm_backward
"""
_SOFTMAXES = (
    "softmax log_softmax _softmax _log_softmax softmin _safe_softmax _softmax_backward_data _log_softmax_backward_data"
)
_EMBEDDINGS = (
    "embedding embedding_bag embedding_dense_backward _embedding_bag _embedding_bag_dense_backward embedding_renorm"
)
_LOSSES = """
    cross_entropy cross_entropy_loss nll_loss nll_loss_nd nll_loss_forward nll_loss2d nll_loss2d_forward mse_loss
    l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div ctc_loss
    _ctc_loss cosine_embedding_loss triplet_margin_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss
    soft_margin_loss gaussian_nll_loss multi_margin_loss multilabel_margin_loss
"""
_RANDOMS = """
    dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d
    bernoulli rand randn randint randperm rand_like randn_like randint_like normal uniform multinomial exponential
    geometric cauchy log_normal random normal_functional rrelu rrelu_with_noise gumbel_softmax poisson
"""
_RNNS = """
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell mkldnn_rnn_layer _cudnn_rnn
    miopen_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_mps _lstm_mps _thnn_fused_lstm_cell_backward_impl
"""
_CONVOLUTIONS = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution conv_tbc
    cudnn_convolution mkldnn_convolution miopen_convolution _conv_depthwise2d slow_conv2d convolution_overrideable
    conv_depthwise3d _slow_conv2d_forward _slow_conv2d
"""
_ATTENTIONS = """
    scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math
    _scaled_dot_product_fused_attention_overrideable _flash_attention_forward _efficient_attention_forward
    multi_head_attention_forward _native_multi_head_attention flex_attention
"""
_OPTIMIZERS = """
    _fused_adam _fused_adamw _fused_sgd _fused_adagrad _foreach_add _foreach_mul _foreach_addcdiv _foreach_addcmul
    _foreach_sqrt _foreach_lerp _foreach_norm _foreach_div
"""
_SHARED = {
    "conv": _CONVOLUTIONS, "attention": _ATTENTIONS, "norm": _NORMS, "softmax": _SOFTMAXES, "embedding": _EMBEDDINGS,
    "loss": _LOSSES, "pool": _POOLS, "pointwise": _POINTWISE, "reduction": _REDUCTIONS, "rnn": _RNNS, "view": _VIEWS,
    "copy": _COPIES, "random": _RANDOMS,
}  # fmt: skip

_KINDS = _table({
    **_SHARED,
    "linear": "linear bilinear addmm addbmm",
    "matmul": """
        matmul mm bmm baddbmm einsum mv dot vdot inner outer tensordot addmv addr __matmul__ chain_matmul multi_dot kron
    """,
    "other": _FILLS,
})  # fmt: skip
_FAMILIES = _table({
    **_SHARED,
    "pointwise": f"{_POINTWISE} accumulate fused",
    "gemm": """
        mm addmm linear mv addmv addr linear_backward _int_mm _scaled_mm _addmm_activation outer dot vdot mkldnn_linear
        _grouped_mm _scaled_grouped_mm
    """,
    "bgemm": "bmm baddbmm matmul einsum addbmm tensordot _trilinear",
    "fill": _FILLS,
    "optimizer": f"optimizer {_OPTIMIZERS}",
})  # fmt: skip

KINDS = tuple(sorted({*_KINDS.values(), "other"}))
FAMILIES = tuple(sorted({*_FAMILIES.values(), "other"}))


def base_name(target: str) -> str:
    """The name of an op or kernel without namespace and overload.

    >>> base_name("aten.native_layer_norm.default"), base_name("aten::mm"), base_name("torch.nn.functional.linear")
    ('native_layer_norm', 'mm', 'linear')
    """
    head, _, tail = target.replace("::", ".").partition(".")
    if head in ("torch", "operator", "_operator", "math", "builtins", "call_method", "") or not tail:
        return (tail or head).rsplit(".", 1)[-1]
    return tail.split(".")[0]


def kind_of(target: str) -> str:
    """Kind of an op of the exported graph: one of KINDS; a name not known is "other".

    >>> kind_of("aten.linear.default"), kind_of("aten.relu_.default"), kind_of("aten.view.default")
    ('linear', 'pointwise', 'view')
    """
    return _look_up(_KINDS, base_name(target))


def family_of(target: str) -> str:
    """Cost family of an ATen kernel, forward or backward: one of FAMILIES; a name not known is "other".

    >>> family_of("aten.mm.default"), family_of("aten.native_batch_norm_backward.default"), family_of("aten.t.default")
    ('gemm', 'norm', 'view')
    """
    return _look_up(_FAMILIES, base_name(target))


def _look_up(table: Mapping[str, str], name: str) -> str:
    """In-place twins (`relu_`) and backwards (`nll_loss_backward`) belong where their namesake does."""
    while name not in table:
        shorter = name.removesuffix("_")
        for ending in ("_backward", "_backward_data", "_jvp", "_for_cpu", "_functional"):
            shorter = shorter.removesuffix(ending)
        if shorter == name:
            return "other"
        name = shorter
    return table[name]
