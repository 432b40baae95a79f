"""The table of primitives, by autocast's decision and its reason.

A primitive has its public name in JAX here, so that a rename in JAX is an error at import. A primitive
without a public name has its name as a string: the tests find each in JAX. A primitive that is
not here is `opaque`, and `mpjax.explain` lists it as unknown.
"""

from __future__ import annotations

from typing import Any

import jax.extend.core.primitives as primitives
from jax import lax
from jax.extend.core import Primitive
from jax.lax import linalg

from mpjax._compat import newer
from mpjax.jaxpr._primitives import CallKind, PrimitiveFacts, Trait as T, register

Key = Primitive | str  # a string may hold several names, separated by spaces
Row = tuple[tuple[Key, ...], dict[str, Any]]


def of(traits: T, *keys: Key, **facts: Any) -> Row:
  """Returns primitives with the same traits, and other facts of theirs."""
  return keys, {"traits": traits, **facts}


def decide(listed: str, reason: str, *rows: Key | Row, **facts: Any) -> None:
  """Adds primitives with the same decision of autocast, its reason and other facts, but for those of a row.

  The backward pass recomputes what is on the lists `deny` and `infer`, if the facts do not say otherwise.
  """
  facts = {"recompute": listed in ("deny", "infer"), **facts}
  for row in rows:
    keys, own = row if isinstance(row, tuple) else of(T.NONE, row)
    for key in keys:
      for primitive in key.split() if isinstance(key, str) else [key]:
        register(primitive, PrimitiveFacts(listed, reason, **(facts | own)))


decide(
  "allow",
  "a dense product: fast in half precision, accumulated in float32",
  of(T.ACCUMULATES | T.PRODUCT | T.READS_STORED, lax.dot_general_p, lax.conv_general_dilated_p),
  of(T.PRODUCT | T.READS_STORED, "ragged_dot_general"),
)
decide(
  "deny",
  "an absolute error of its input becomes a relative error",
  of(T.EXPONENTIAL | T.EXPANDS | T.ELEMENTWISE | T.COSTLY, lax.exp_p, lax.exp2_p, lax.expm1_p),
  of(T.BROADCASTS | T.EXPONENTIAL | T.EXPANDS | T.ELEMENTWISE | T.COSTLY, lax.pow_p),
  of(T.EXPONENTIAL | T.EXPANDS | T.ELEMENTWISE, lax.sinh_p, lax.cosh_p),
  in_float16="its result leaves float16's range",
)
decide(
  "deny",
  "losses subtract logarithms that are nearly equal",
  of(T.EXPONENTIAL | T.ELEMENTWISE | T.COSTLY, lax.log_p, lax.log1p_p, newer("log2_p")),
  in_float16="the gradient 1/x leaves float16's range",
)
decide(
  "deny",
  "steep near zero, where variances and epsilons are",
  of(T.EXPANDS | T.ELEMENTWISE, lax.rsqrt_p),
  of(T.ELEMENTWISE | T.COSTLY, lax.cbrt_p),
)
decide(
  "deny",
  "a large angle keeps no fraction of a period in half precision",
  of(T.ELEMENTWISE | T.COSTLY, lax.sin_p, lax.cos_p),
  of(T.EXPANDS | T.ELEMENTWISE | T.COSTLY, lax.tan_p),
)
decide(
  "deny",
  "an inverse function: steep or cancelling near the ends of its domain",
  of(T.ELEMENTWISE, lax.acos_p, lax.asin_p, lax.atan_p, lax.acosh_p, lax.asinh_p, lax.atanh_p),
  of(T.BROADCASTS | T.ELEMENTWISE | T.COSTLY, lax.atan2_p),
)
decide(
  "deny",
  "a special function: its series, fits and iterations are made for float32",
  of(T.NONE, lax.bessel_i0e_p, lax.bessel_i1e_p, lax.polygamma_p, lax.zeta_p),
  of(T.ELEMENTWISE | T.COSTLY, lax.digamma_p, lax.erf_inv_p, lax.lgamma_p),
  of(T.NONE, lax.igamma_p, lax.igamma_grad_a_p, lax.igammac_p, recompute=False),
  of(T.NONE, lax.regularized_incomplete_beta_p, recompute=False),
)
decide(
  "deny",
  "accumulates: small terms vanish next to a large sum",
  of(T.NO_RESIDUAL | T.ACCUMULATES | T.STORES_RESULT, lax.reduce_sum_p),
  of(T.STORES_RESULT, lax.reduce_prod_p, lax.reduce_p),
  of(T.READS_STORED | T.STORES_RESULT, lax.reduce_window_p),
  of(T.EXPANDS | T.ACCUMULATES | T.READS_STORED | T.STORES_RESULT, lax.reduce_window_sum_p),
  of(T.EXPANDS | T.ACCUMULATES | T.READS_STORED, lax.cumsum_p, recompute=False),
  of(T.EXPANDS | T.READS_STORED, lax.cumprod_p, recompute=False),
  of(T.READS_STORED, lax.cumlogsumexp_p, recompute=False),
  of(T.EXPANDS | T.ACCUMULATES | T.READS_STORED | T.IN_PLACE, lax.scatter_add_p, recompute=False),
  of(T.READS_STORED | T.IN_PLACE, lax.scatter_sub_p, recompute=False),
  of(T.EXPANDS | T.READS_STORED | T.IN_PLACE, lax.scatter_mul_p, recompute=False),
  of(T.READS_STORED, lax.select_and_gather_add_p, lax.select_and_scatter_p, recompute=False),
  of(T.READS_STORED, lax.select_and_scatter_add_p, recompute=False),
  in_float16="large sums overflow float16",
)
decide(
  "deny",
  "its gradient counts ties by a sum, and its result is small",
  of(T.STORES_RESULT, lax.reduce_max_p, lax.reduce_min_p),
)
decide(
  "deny",
  "rounds nothing, but carries a combiner that was traced in float32",
  of(T.READS_STORED | T.IN_PLACE, lax.scatter_max_p, lax.scatter_min_p),
  recompute=False,
)
decide(
  "deny",
  "sums over devices: the error would depend on how many there are",
  of(T.NONE, "unreduced_psum", collective="all-reduce"),
  of(T.NONE, "unreduced_reduce_scatter", collective="reduce-scatter"),
  of(T.ADDS | T.READS_STORED, lax.psum_p, "psum_invariant", collective="all-reduce"),
  of(T.ADDS | T.READS_STORED | T.STORES_RESULT, "reduce_scatter", collective="reduce-scatter"),
  recompute=False,
)
decide(
  "deny",
  "linear algebra: conditioning needs float32, and kernels take nothing less",
  of(T.ALGEBRA, linalg.ormqr_p, linalg.symmetric_product_p, linalg.tridiagonal_p),
  of(T.ALGEBRA, linalg.tridiagonal_solve_p),
  of(T.ALGEBRA | T.READS_STORED, linalg.cholesky_p, linalg.cholesky_update_p, linalg.eig_p, linalg.eigh_p),
  of(T.ALGEBRA | T.READS_STORED, linalg.hessenberg_p, linalg.householder_product_p, linalg.lu_p, linalg.qr_p),
  of(T.ALGEBRA | T.READS_STORED, linalg.schur_p, linalg.svd_p, linalg.triangular_solve_p),
  recompute=False,
)
decide(
  "deny",
  "no half-precision transform, and every output sums all inputs",
  of(T.READS_STORED, lax.fft_p),
  recompute=False,
)
decide(
  "deny",
  "an activation function: its float32 inside is not kept",
  of(T.ELEMENTWISE | T.COSTLY, lax.tanh_p, lax.logistic_p, lax.erf_p, lax.erfc_p),
)
decide(
  "infer",
  "element-wise",
  of(T.BROADCASTS | T.EXPANDS | T.SCALES | T.ELEMENTWISE, lax.div_p),
  of(T.BROADCASTS | T.ELEMENTWISE, lax.rem_p),
  of(T.ELEMENTWISE, lax.sqrt_p),
  float16="deny",
  in_float16="a small divisor or epsilon vanishes in float16",
)
decide(
  "deny",
  "a power, as in variances and activation functions",
  newer("polynomial_p"),
  of(T.EXPANDS | T.ELEMENTWISE, lax.square_p, lax.integer_pow_p),
  of(T.ELEMENTWISE, newer("one_minus_square_p")),
  in_float16="powers overflow beyond 256 in float16",
)
decide(
  "infer",
  "element-wise: as exact as its operands",
  of(T.ELEMENTWISE, lax.abs_p, lax.ceil_p, lax.floor_p, lax.round_p, lax.sign_p),
  of(T.ADDS | T.CHOICE | T.NO_RESIDUAL | T.BROADCASTS | T.ELEMENTWISE, lax.add_p, lax.sub_p),
  of(T.ADDS | T.CHOICE | T.NO_RESIDUAL | T.BROADCASTS | T.ELEMENTWISE, primitives.add_jaxvals_p),
  of(T.CHOICE | T.ELEMENTWISE, lax.clamp_p),
  of(T.CHOICE | T.BROADCASTS | T.ELEMENTWISE, lax.max_p, lax.min_p),
  of(T.BROADCASTS | T.SCALES | T.ELEMENTWISE, lax.mul_p),
  of(T.ADDS | T.NO_RESIDUAL | T.ELEMENTWISE, lax.neg_p),
  of(T.CHOICE | T.NO_RESIDUAL | T.ELEMENTWISE, lax.select_n_p),
)
decide(
  "infer",
  "moves values and computes none",
  lax.tile_p,
  newer("unstack_p"),
  of(T.SAME_WEIGHT | T.PASSES_ON | T.NO_RESIDUAL, lax.broadcast_in_dim_p),
  of(T.PASSES_ON | T.MOVES | T.CHOICE | T.NO_RESIDUAL, lax.concatenate_p),
  of(T.ALIAS | T.SAME_WEIGHT | T.PASSES_ON | T.NO_RESIDUAL | T.ELEMENTWISE, lax.copy_p),
  of(T.PASSES_ON | T.MOVES, lax.dynamic_slice_p, lax.pad_p, lax.split_p),
  of(T.MOVES | T.READS_STORED | T.IN_PLACE, lax.dynamic_update_slice_p),
  of(T.PASSES_ON | T.MOVES | T.READS_STORED, lax.gather_p),
  of(T.ALIAS | T.SAME_WEIGHT | T.PASSES_ON | T.NO_RESIDUAL, lax.reshape_p, lax.squeeze_p, lax.transpose_p),
  of(T.SAME_WEIGHT | T.PASSES_ON | T.NO_RESIDUAL, lax.rev_p),  # of a kernel, in the backward pass
  of(T.PASSES_ON | T.NO_RESIDUAL, lax.slice_p),
  of(T.MOVES, newer("stack_p")),
  of(T.MOVES | T.READS_STORED | T.IN_PLACE, lax.scatter_p, recompute=False),
)
decide(
  "deny",
  "puts values in order: some that differ in float32 are equal in half precision",
  of(T.ORDERS, lax.approx_top_k_p),
  of(T.ORDERS | T.MOVES | T.READS_STORED, lax.top_k_p),
  of(T.ORDERS | T.MOVES | T.EACH | T.READS_STORED, lax.sort_p),
  recompute=False,
)
decide(
  "infer",
  "selects values and rounds none",
  of(T.STORES_RESULT, lax.argmax_p, lax.argmin_p),
  of(T.MOVES | T.READS_STORED, lax.cummax_p, lax.cummin_p, recompute=False),
  of(T.MOVES | T.READS_STORED | T.STORES_RESULT, lax.reduce_window_max_p, lax.reduce_window_min_p),
  of(T.NONE, "unreduced_pmax unreduced_pmin", collective="all-reduce", recompute=False),
  of(T.READS_STORED, lax.pmax_p, lax.pmin_p, collective="all-reduce", recompute=False),
)
decide(
  "infer",
  "a cast of the user's: float32 asks for an island",
  of(T.SAME_WEIGHT | T.PASSES_ON | T.NO_RESIDUAL | T.ELEMENTWISE | T.CAST, lax.convert_element_type_p),
)
decide("infer", "a constant: takes the dtype of what it meets", lax.iota_p, "zeros_like")
decide(
  "infer",
  "annotates a value and leaves it as it is",
  newer("stage_p"),
  "relayout shard_alike xla_metadata_value",
  of(T.ALIAS | T.SAME_WEIGHT | T.PASSES_ON, "layout_constraint"),
  of(T.ALIAS | T.SAME_WEIGHT | T.PASSES_ON | T.NO_RESIDUAL, primitives.name_p, lax.sharding_constraint_p),
  of(T.ALIAS | T.SAME_WEIGHT | T.PASSES_ON | T.NO_RESIDUAL, lax.stop_gradient_p),
  of(T.ALIAS | T.EACH, lax.optimization_barrier_p),
  of(T.EACH, "tie"),
  of(T.MARKS_AXES, "preduced reduced_vary_cast vary_unreduced_cast"),
  of(T.MARKS_AXES | T.ALIAS | T.EACH, "pvary"),
)
decide(
  "infer",
  "moves values between devices: half the bytes in half precision",
  of(T.EACH, lax.device_put_p),
  of(T.ALIAS | T.SAME_WEIGHT | T.PASSES_ON, "reshard"),
  of(T.NONE, lax.ragged_all_to_all_p, collective="ragged-all-to-all"),
  of(T.NONE, "all_gather_invariant all_gather_reduced", collective="all-gather"),
  of(T.NONE, "pbroadcast", collective="collective-broadcast"),
  of(T.MOVES | T.EACH | T.READS_STORED, lax.all_gather_p, collective="all-gather"),
  of(T.MOVES | T.EACH | T.READS_STORED, lax.ppermute_p, collective="collective-permute"),
  of(T.MOVES | T.READS_STORED, lax.all_to_all_p, collective="all-to-all"),
  recompute=False,
)
decide(
  "infer",
  "its result is boolean or an integer",
  of(T.NONE, lax.eq_p, lax.eq_to_p, lax.ge_p, lax.gt_p, lax.le_p, lax.le_to_p, lax.lt_p, lax.lt_to_p),
  of(T.NONE, lax.ne_p, lax.is_finite_p),
  of(T.NONE, lax.and_p, lax.axis_index_p, lax.clz_p, linalg.lu_pivots_to_permutation_p, newer("mulhi_p")),
  of(T.NONE, lax.not_p, lax.or_p, lax.population_count_p, lax.shift_left_p, lax.shift_right_arithmetic_p),
  of(T.NONE, lax.shift_right_logical_p, lax.xor_p),
  "dim_as_value dimension_size platform_index",
  of(T.STORES_RESULT, lax.reduce_and_p, lax.reduce_or_p, lax.reduce_xor_p),
)
decide(
  "opaque",
  "it keeps the dtypes of the program",
  of(T.NONE, lax.complex_p, lax.conj_p, lax.imag_p, lax.real_p),
  of(T.NONE, lax.bitcast_convert_type_p, lax.nextafter_p, "from_edtype to_edtype"),
  of(T.ELEMENTWISE | T.CAST | T.STORES_RESULT, lax.reduce_precision_p),
  of(T.NONE, "debug_callback debug_print io_callback pure_callback"),
  of(T.NONE, lax.after_all_p, lax.create_token_p, "check shape_assertion"),
  of(T.NONE, primitives.get_p, primitives.swap_p),
  "accum_grad_in_ref addupdate create_linear empty_ref free_ref freeze new_ref pin run_state unpin",
  primitives.custom_lin_p,
  "linear_call call_hi_primitive call_hi_primitive_linearized call_exported",
  "custom_partitioning rnn_bwd rnn_fwd scaled_matmul_wrapper",
  of(T.READS_STORED, "ffi_call", "scaled_dot"),
  of(T.NONE, "composite", "compute_on", call=CallKind.UNIT),
  of(T.ALGEBRA, lax.linear_solve_p),
)
decide(
  "opaque",
  "random numbers: the same key must give the same values",
  of(T.NONE, primitives.random_fold_in_p, primitives.random_gamma_p, primitives.random_seed_p),
  of(T.NONE, primitives.random_split_p, lax.rng_uniform_p, primitives.threefry2x32_p),
  "random_clone random_unwrap random_wrap",
  of(T.READS_STORED, primitives.random_bits_p, lax.rng_bit_generator_p),
)
decide(
  "opaque",
  "a kernel, written for the dtypes of the program",
  of(T.READS_STORED | T.KERNEL, "pallas_call dot_product_attention_fwd"),
  of(T.READS_STORED | T.KERNEL, "dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper"),
  of(T.READS_STORED | T.KERNEL, "dot_product_attention_fp8_bwd_wrapper"),
  of(T.READS_STORED | T.KERNEL, "dot_product_attention_fp8_fwd_wrapper"),
)
decide(
  "call",
  "a higher-order primitive: its body is decided operation by operation",
  of(T.NONE, primitives.call_p, primitives.closed_call_p, "eval_jaxpr", call=CallKind.INLINE),
  of(T.READS_STORED, lax.cond_p, call=CallKind.COND),
  of(T.NONE, primitives.custom_jvp_call_p, call=CallKind.CUSTOM_JVP),
  of(T.NONE, primitives.custom_vjp_call_p, call=CallKind.CUSTOM_VJP),
  of(T.NONE, "custom_vmap_call", call=CallKind.CUSTOM_VMAP),
  of(T.NONE, primitives.jit_p, call=CallKind.JIT),
  of(T.NONE, primitives.remat_p, call=CallKind.REMAT),
  of(T.READS_STORED | T.IN_PLACE, lax.scan_p, call=CallKind.SCAN),
  of(T.NONE, "shard_map", call=CallKind.SHARD_MAP),
  of(T.READS_STORED | T.IN_PLACE, lax.while_p, call=CallKind.WHILE),
  of(T.NONE, "xla_metadata_call", call=CallKind.UNIT),
)
