"""The decision on every JAX primitive under autocast, as data: its list, why, its counterparts elsewhere."""

from __future__ import annotations

from typing import NamedTuple


class Operation(NamedTuple):
  """What autocast does with one primitive.

  Attributes:
    list: `allow` (runs in the compute dtype), `deny` (runs in float32), `infer` (follows its operands),
      `opaque` (keeps the dtypes of the user's program) or `call` (a higher-order primitive, whose
      body is entered).
    reason: why it is on that list.
    float16: the list in float16 where it differs; bfloat16 has float32's range and float16 has not.
    cheap: whether the backward pass may compute it a second time rather than save it.
    torch: the counterpart in PyTorch's CUDA autocast lists, as `operator: list`; empty where there is none.
    tensorflow: the counterpart in TensorFlow's auto_mixed_precision lists, as `operator: list`.
  """

  list: str
  reason: str
  float16: str = ""
  cheap: bool = True
  torch: str = ""
  tensorflow: str = ""


# PyTorch's names of its lists: lower, fp32, fp32_set_opt_dtype and promote.
TORCH = {
  "dot_general": "matmul: lower",
  "conv_general_dilated": "convolution: lower",
  "dot_product_attention_fwd": "scaled_dot_product_attention: lower",
  "dot_product_attention_fwd_wrapper": "scaled_dot_product_attention: lower",
  "rnn_fwd": "lstm: lower",
  "acos": "acos: fp32",
  "asin": "asin: fp32",
  "cosh": "cosh: fp32",
  "sinh": "sinh: fp32",
  "tan": "tan: fp32",
  "erf_inv": "erfinv: fp32",
  "exp": "exp: fp32",
  "expm1": "expm1: fp32",
  "log": "log: fp32",
  "log1p": "log1p: fp32",
  "log2": "log2: fp32",
  "pow": "pow: fp32",
  "integer_pow": "pow: fp32",
  "reciprocal": "reciprocal: fp32",
  "rsqrt": "rsqrt: fp32",
  "reduce_sum": "sum: fp32_set_opt_dtype",
  "reduce_prod": "prod: fp32_set_opt_dtype",
  "cumsum": "cumsum: fp32_set_opt_dtype",
  "cumprod": "cumprod: fp32_set_opt_dtype",
  "atan2": "atan2: promote",
  "scatter": "index_put: promote",
  "scatter-add": "scatter_add: promote",
}

# TensorFlow's names of its lists: allow, infer, deny and clear.
TENSORFLOW = {
  "dot_general": "MatMul: allow",
  "conv_general_dilated": "Conv2D: allow",
  "rnn_fwd": "CudnnRNNV3: allow",
  "rnn_bwd": "CudnnRNNBackpropV3: allow",
  "exp": "Exp: deny",
  "expm1": "Expm1: deny",
  "pow": "Pow: deny",
  "integer_pow": "Pow: deny",
  "reduce_sum": "Sum: deny",
  "add": "AddV2: infer",
  "add_any": "AddN: infer",
  "sub": "Sub: infer",
  "mul": "Mul: infer",
  "div": "RealDiv: infer",
  "reciprocal": "Reciprocal: infer",
  "log": "Log: infer",
  "log1p": "Log1p: infer",
  "erf": "Erf: infer",
  "erfc": "Erfc: infer",
  "logistic": "Sigmoid: infer",
  "tanh": "Tanh: infer",
  "sqrt": "Sqrt: infer",
  "reduce_prod": "Prod: infer",
  "reduce_window_sum": "AvgPool: infer",
  "reduce_max": "Max: clear",
  "reduce_min": "Min: clear",
  "reduce_window_max": "MaxPool: clear",
  "select_and_scatter_add": "MaxPoolGrad: clear",
  "abs": "Abs: clear",
  "neg": "Neg: clear",
  "sign": "Sign: clear",
  "max": "Maximum: clear",
  "min": "Minimum: clear",
  "clamp": "ClipByValue: clear",
  "select_n": "SelectV2: clear",
  "ceil": "Ceil: clear",
  "floor": "Floor: clear",
  "round": "Round: clear",
  "is_finite": "IsFinite: clear",
  "eq": "Equal: clear",
  "ne": "NotEqual: clear",
  "ge": "GreaterEqual: clear",
  "gt": "Greater: clear",
  "le": "LessEqual: clear",
  "lt": "Less: clear",
  "argmax": "ArgMax: clear",
  "argmin": "ArgMin: clear",
  "top_k": "TopKV2: clear",
  "broadcast_in_dim": "BroadcastTo: clear",
  "concatenate": "ConcatV2: clear",
  "copy": "Identity: clear",
  "dynamic_slice": "Slice: clear",
  "gather": "GatherV2: clear",
  "pad": "PadV2: clear",
  "reshape": "Reshape: clear",
  "rev": "ReverseV2: clear",
  "slice": "StridedSlice: clear",
  "split": "SplitV: clear",
  "squeeze": "Squeeze: clear",
  "stack": "Pack: clear",
  "stop_gradient": "StopGradient: clear",
  "tile": "Tile: clear",
  "transpose": "Transpose: clear",
  "zeros_like": "ZerosLike: clear",
}

# Groups of primitives that share a decision: the names, and the decision without counterparts.
GROUPS = (
  # allow: what tensor cores and matrix units are for
  (
    "dot_general ragged_dot_general conv_general_dilated",
    Operation("allow", "a dense product: fast in half precision, accumulated in float32", cheap=False),
  ),
  # deny: range, cancellation or accumulation
  (
    "exp exp2 expm1 pow sinh cosh",
    Operation("deny", "leaves float16's range; its relative error is the exponent's absolute error"),
  ),
  (
    "log log1p log2",
    Operation("deny", "losses subtract logarithms, and the gradient 1/x leaves the range"),
  ),
  ("rsqrt cbrt", Operation("deny", "steep at zero, where variances and their epsilons are")),
  (
    "sin cos tan",
    Operation("deny", "a large angle keeps no fraction of a period in half precision"),
  ),
  (
    "acos asin atan atan2 acosh asinh atanh",
    Operation("deny", "an inverse function: steep or cancelling near the ends of its domain"),
  ),
  (
    "bessel_i0e bessel_i1e digamma erf_inv lgamma polygamma zeta",
    Operation("deny", "a special function: its series and rational fits are made for float32"),
  ),
  (
    "igamma igamma_grad_a igammac regularized_incomplete_beta",
    Operation("deny", "a special function: iterates until it converges to float32", cheap=False),
  ),
  (
    "reduce_sum reduce_prod reduce reduce_window reduce_window_sum",
    Operation("deny", "accumulates: small terms vanish beside a large sum, and float16 overflows"),
  ),
  (
    "reduce_max reduce_min",
    Operation("deny", "its gradient counts ties by a sum, and its result is small"),
  ),
  (
    "cumsum cumprod cumlogsumexp",
    Operation("deny", "accumulates: the error grows along the axis", cheap=False),
  ),
  (
    "scatter-add scatter-sub scatter-mul select_and_gather_add select_and_scatter select_and_scatter_add",
    Operation("deny", "accumulates the updates that meet in one element", cheap=False),
  ),
  (
    "scatter-max scatter-min",
    Operation("deny", "rounds nothing, but carries a combiner that was traced in float32", cheap=False),
  ),
  (
    "psum psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter",
    Operation("deny", "sums over devices: the error would depend on how many there are", cheap=False),
  ),
  (
    "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur spsolve"
    " svd symmetric_product triangular_solve tridiagonal tridiagonal_solve",
    Operation(
      "deny", "linear algebra: conditioning needs float32, and kernels take nothing less", cheap=False
    ),
  ),
  ("fft", Operation("deny", "no half-precision transform, and every output sums all inputs", cheap=False)),
  (
    "tanh logistic erf erfc",
    Operation("deny", "an activation function: as an island, its inside is not kept for the backward pass"),
  ),
  # infer in bfloat16, deny in float16: the range decides, not the precision
  (
    "div reciprocal rem sqrt",
    Operation("infer", "element-wise; in float16 a small divisor or epsilon vanishes", float16="deny"),
  ),
  (
    "square integer_pow one_minus_square polynomial",
    Operation("deny", "part of activation functions and variances; in float16 powers overflow beyond 256"),
  ),
  # infer: follows its operands
  (
    "abs add add_any ceil clamp floor is_finite max min mul neg round select_n sign sub",
    Operation("infer", "element-wise: as exact as its operands"),
  ),
  ("eq eq_to ge gt le le_to lt lt_to ne", Operation("infer", "compares: its result is boolean")),
  (
    "broadcast_in_dim broadcast_to concatenate copy dynamic_slice dynamic_update_slice gather pad reshape"
    " rev slice split squeeze stack tile transpose unstack",
    Operation("infer", "moves values and computes none"),
  ),
  ("scatter", Operation("infer", "overwrites elements and computes none", cheap=False)),
  (
    "approx_top_k cummax cummin sort top_k",
    Operation("infer", "selects values and rounds none", cheap=False),
  ),
  ("argmax argmin reduce_window_max reduce_window_min", Operation("infer", "selects values and rounds none")),
  ("convert_element_type", Operation("infer", "a cast of the user's: float32 asks for an island")),
  ("iota zeros_like", Operation("infer", "a constant: takes the dtype of what it meets")),
  (
    "layout_constraint name optimization_barrier relayout shard_alike sharding_constraint stage"
    " stop_gradient tie with_memory_space_constraint xla_metadata_value",
    Operation("infer", "annotates a value and leaves it as it is"),
  ),
  (
    "device_put global_array_to_host_local_array host_local_array_to_global_array reshard",
    Operation("infer", "moves values between devices: half the bytes in half precision", cheap=False),
  ),
  (
    "all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pbroadcast_dynamic ppermute"
    " ragged_all_to_all",
    Operation("infer", "moves values between devices: half the bytes in half precision", cheap=False),
  ),
  (
    "pmax pmin unreduced_pmax unreduced_pmin",
    Operation("infer", "selects values over devices and rounds none", cheap=False),
  ),
  (
    "preduced pvary reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p",
    Operation("infer", "marks how a value varies over devices and leaves it as it is"),
  ),
  (
    "and axis_index clz dim_as_value dimension_size lu_pivots_to_permutation mulhi not or platform_index"
    " population_count reduce_and reduce_or reduce_xor shift_left shift_right_arithmetic shift_right_logical"
    " xor",
    Operation("infer", "integers and booleans only: no floating operand"),
  ),
  # opaque: keeps the dtypes of the user's program
  ("complex conj imag real", Operation("opaque", "complex numbers have no half precision", cheap=False)),
  (
    "bitcast_convert_type nextafter reduce_precision",
    Operation("opaque", "depends on the bits of the user's dtype", cheap=False),
  ),
  (
    "from_edtype to_edtype",
    Operation("opaque", "an extended dtype with its own representation", cheap=False),
  ),
  (
    "philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed random_split"
    " random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32 threefry4x32 iota_2x32_shape",
    Operation("opaque", "random numbers: the same key must give the same values", cheap=False),
  ),
  (
    "buffer_callback debug_callback debug_print inspect_sharding io_callback pure_callback",
    Operation("opaque", "a callback: the host is promised the user's dtypes", cheap=False),
  ),
  (
    "ffi_call tpu_custom_call",
    Operation("opaque", "foreign code, compiled for the user's dtypes", cheap=False),
  ),
  (
    "core_map mosaic_gpu_p mpmd_map pallas_call",
    Operation("opaque", "a kernel, written for the user's dtypes", cheap=False),
  ),
  (
    "scaled_dot scaled_matmul scaled_matmul_wrapper",
    Operation("opaque", "a block-scaled product: the user has chosen its narrow dtypes", cheap=False),
  ),
  (
    "dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd"
    " dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd"
    " dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper",
    Operation("opaque", "cuDNN attention takes no float32: the user has chosen its dtypes", cheap=False),
  ),
  ("rnn_bwd rnn_fwd", Operation("opaque", "a cuDNN LSTM: JAX's binding takes float32 only", cheap=False)),
  (
    "bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general coo_matmat coo_matvec"
    " coo_spmm coo_spmv csr_matmat csr_matvec csr_spmm csr_spmv",
    Operation("opaque", "a sparse product: JAX calls cuSPARSE for float32 and wider only", cheap=False),
  ),
  (
    "bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_sum_duplicates bcoo_todense bcoo_transpose"
    " bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_todense csr_fromdense csr_todense todense",
    Operation("opaque", "the values of a sparse array keep the dtype of its products", cheap=False),
  ),
  (
    "accum_grad_in_ref addupdate create_linear empty_ref free_ref freeze get new_ref pin run_state swap"
    " unpin",
    Operation("opaque", "a reference: its dtype was fixed where it was made", cheap=False),
  ),
  (
    "box_get box_set log_extend log_read new_box new_log",
    Operation("opaque", "mutable state: its dtype was fixed where it was made", cheap=False),
  ),
  ("empty empty2", Operation("opaque", "an uninitialised buffer, written to in its own dtype", cheap=False)),
  (
    "call_hi_primitive call_hi_primitive_linearized",
    Operation("opaque", "a primitive over types of the user's: its rules fix the dtypes", cheap=False),
  ),
  ("call_exported", Operation("opaque", "a serialised program with fixed dtypes", cheap=False)),
  (
    "composite cudnn_fusion custom_partitioning fused_call",
    Operation("opaque", "a unit that a backend replaces or splits as the user wrote it", cheap=False),
  ),
  ("compute_on program_order", Operation("opaque", "placed or ordered by the user as one unit", cheap=False)),
  (
    "custom_lin linear_call remat_opt unreachable",
    Operation("opaque", "a residue of differentiation: its parts agree on their dtypes", cheap=False),
  ),
  ("custom_linear_solve", Operation("opaque", "its solver's tolerances are the user's dtype's", cheap=False)),
  (
    "all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start"
    " pbroadcast_done pbroadcast_start ppermute_done ppermute_start psum_done psum_invariant_start"
    " psum_start reduce_scatter_done reduce_scatter_start unreduced_psum_start"
    " unreduced_reduce_scatter_start",
    Operation("opaque", "half of an asynchronous collective: nothing can be cast on its way", cheap=False),
  ),
  ("precv psend", Operation("opaque", "one end of a transfer: the other end fixes the dtype", cheap=False)),
  (
    "after_all check create_token dce_sink shape_assertion",
    Operation("opaque", "an effect or a token: computes no value", cheap=False),
  ),
  (
    "_copysign add_dependency all_reduce_ffs all_reduce_population_count assert_consumed_value"
    " async_copy_scales_to_tmem async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem async_load"
    " async_prefetch async_store_smem async_store_tmem atomic_cas atomic_rmw barrier barrier_arrive"
    " barrier_arrive_and_wait barrier_test barrier_wait bitcast commit_group commit_smem commit_tmem consume"
    " conv copy_gmem_to_smem copy_smem_to_gmem custom_fusion debug_barrier debug_barrier_p delay dma_start"
    " dma_wait einshape_lo elementwise_inline_asm elementwise_inline_asm_p emit_pipeline fusible"
    " get_barrier_semaphore get_global griddepcontrol_launch_dependents griddepcontrol_wait has_memory_space"
    " inline_mgpu inline_mgpu_p jaxpr_call layout_cast load masked_cummax masked_cummin masked_cumsum"
    " masked_load masked_sort masked_swap matmul_acc_lhs matmul_lhs_fifo matmul_pop matmul_pop_fifo"
    " matmul_push_rhs max_contiguous mgpu_atomic_store mma mosaic_gpu_reduce_max mosaic_gpu_reduce_min"
    " mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum multimem_load_reduce multimem_store multiple_of"
    " num_programs pack pack_dtype pack_elementwise parallel_loop pipeline_body print_layout prng_join"
    " prng_random_bits prng_seed prng_split program_id query_cluster_cancel remove_memory_space roll"
    " run_scoped sc_fetch_and_add scan_count semaphore_read semaphore_signal semaphore_signal_multicast"
    " semaphore_signal_parallel semaphore_wait set_max_registers set_max_registers_p stochastic_round store"
    " tcgen05_commit_arrive tcgen05_mma trace_value try_cluster_cancel unique unpack unpack_dtype"
    " unpack_elementwise wait_gmem_to_smem wait_load_tmem wait_smem_to_gmem wgmma wgmma_accumulator_deref"
    " wgmma_accumulator_deref_p wgmma_accumulator_store wgmma_accumulator_store_p wgmma_ref wgmma_wait",
    Operation("opaque", "an instruction of a Pallas kernel's body, which is never entered", cheap=False),
  ),
  (
    "thunky.all_gather thunky.all_reduce thunky.all_to_all thunky.async_done thunky.async_start"
    " thunky.call_jax thunky.call_thunky_nested thunky.collective_group thunky.collective_permute"
    " thunky.cond thunky.copy thunky.custom_call thunky.inline_constant thunky.memset thunky.memzero"
    " thunky.ptx_kernel thunky.reduce_scatter thunky.while",
    Operation("opaque", "a command to the runtime over buffers of fixed dtypes", cheap=False),
  ),
  # call: the body is entered
  (
    "call checkpoint closed_call cond custom_jvp_call custom_jvp_call_jaxpr custom_vjp_call"
    " custom_vmap_call eval_jaxpr jit remat2 scan shard_map while xla_metadata_call",
    Operation("call", "a higher-order primitive: its body is decided operation by operation", cheap=False),
  ),
)

OPERATIONS: dict[str, Operation] = {
  name: operation._replace(torch=TORCH.get(name, ""), tensorflow=TENSORFLOW.get(name, ""))
  for names, operation in GROUPS
  for name in names.split()
}
