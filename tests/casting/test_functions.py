"""Lists, dtypes and products of every function of jax.nn, optax.losses and jax.lax, of which others are made."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax, nn
from optax import losses

from tests.casting._conformance import (
  case,
  check_traced,
  each,
  exact,
  normal,
  uniform,
)

X, Y = normal(3, 8), normal(3, 8, seed=1)
POSITIVE = uniform(0.5, 3, 3, 8)
MORE = POSITIVE[::-1].copy()
UNIT = uniform(-0.9, 0.9, 3, 8)
PROBABILITIES = uniform(0.05, 0.95, 3, 8)
MASK = np.arange(24).reshape(3, 8) % 3 != 0
MATRIX = exact(normal(4, 4) + 4 * np.eye(4))
SYMMETRIC = exact(MATRIX @ MATRIX.T)
VECTORS = normal(4, 2, seed=2)
LOG = exact(np.log(PROBABILITIES))
LABELS = np.array([1, 7, 0])
QKV = [normal(2, 4, 2, 8, seed=i) for i in range(3)]  # [B, T, N, H]

NN = {
  **each(nn,
    "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid log_softmax "
    "logmeanexp logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus "
    "sparse_sigmoid squareplus standardize swish tanh", X),
  "log1mexp": case(nn.log1mexp, POSITIVE),
  "one_hot": case(lambda labels: nn.one_hot(labels, 8), LABELS),
  "dot_product_attention": case(nn.dot_product_attention, *QKV),
  "dot_product_attention causal": case(lambda *x: nn.dot_product_attention(*x, is_causal=True), *QKV),
  "dot_product_attention mask and bias": case(lambda q, k, v, bias:
    nn.dot_product_attention(q, k, v, bias=bias, mask=jnp.tri(4, dtype=bool)[None, None]), *QKV,
    normal(1, 2, 4, 4)),
  "gelu exact": case(lambda x: nn.gelu(x, approximate=False), X),
  "softmax where": case(lambda x: nn.softmax(x, where=MASK), X),
}  # fmt: skip
NN_EXCLUDED = {
  "get_scaled_dot_general_config": "makes a configuration",
  "scaled_dot_general": "needs cuDNN",
  "scaled_matmul": "needs cuDNN",
}

CTC = (np.zeros((2, 4), np.float32), np.array([[1, 2], [3, 3]]), np.zeros((2, 2), np.float32))
LOSSES_EXCLUDED = {"convex_kl_divergence": "deprecated"}
LOSSES = {
  **each(losses,
    "cosine_distance cosine_similarity huber_loss l2_loss log_cosh perceptron_loss squared_error", X, Y),
  **each(losses, "hinge_loss", X, np.sign(Y)),
  **each(losses, "generalized_kl_divergence kl_divergence", LOG, PROBABILITIES),
  **each(losses,
    "binary_dice_loss dice_loss multiclass_generalized_dice_loss poly_loss_cross_entropy ranking_softmax_loss "
    "safe_softmax_cross_entropy sigmoid_binary_cross_entropy sigmoid_focal_loss softmax_cross_entropy", X,
    np.eye(8, dtype=np.float32)[LABELS]),
  **each(losses, "multiclass_hinge_loss multiclass_perceptron_loss multiclass_sparsemax_loss "
    "softmax_cross_entropy_with_integer_labels", X, LABELS),
  "ctc_loss": case(lambda logits: losses.ctc_loss(logits, *CTC), QKV[0][:, :, 0], selects=True),
  # Paths that cannot be have a log-probability of about -1e5, whose gradients are noise.
  "ctc_loss_with_forward_probs": case(lambda logits: jax.tree.map(lambda x: jnp.maximum(x, -50),
    losses.ctc_loss_with_forward_probs(logits, *CTC)), QKV[0][:, :, 0], selects=True),
  "kl_divergence_with_log_targets": case(losses.kl_divergence_with_log_targets, LOG, LOG[::-1].copy()),
  "make_fenchel_young_loss": case(losses.make_fenchel_young_loss(nn.logsumexp), X[0], PROBABILITIES[0]),
  "ntxent": case(losses.ntxent, normal(4, 8), np.array([0, 0, 1, 1])),
  "smooth_labels": case(lambda labels: losses.smooth_labels(labels, 0.1),
    np.eye(8, dtype=np.float32)[LABELS]),
  "sparsemax_loss": case(losses.sparsemax_loss, X, MASK.astype(np.float32)),
  "triplet_margin_loss": case(losses.triplet_margin_loss, X, Y, X[::-1].copy()),
}  # fmt: skip

CONV = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
IMAGES = normal(2, 4, 6, 6)  # NCHW
KERNEL = normal(4, 4, 3, 3, seed=1)  # OIHW
ROWS = np.array([[2], [0], [2]])
SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
GATHER = lax.GatherDimensionNumbers((1,), (0,), (0,))


@jax.custom_vjp
def masked_product(x):
  return (x @ x.T) * MASK[:, :3]


masked_product.defvjp(
  lambda x: (masked_product(x), x), lambda x, g: ((g * MASK[:, :3]) @ x + (g * MASK[:, :3]).T @ x,)
)


def newton(x: Any) -> Any:
  solve = lambda f, x: lax.fori_loop(0, 20, lambda _, y: y - f(y) / (3 * y**2), x)
  return lax.custom_root(lambda y: y**3 - x, jnp.ones_like(x), solve, lambda g, y: y / g(jnp.ones_like(y)))


LAX = {
  **each(lax,
    "abs asinh atan cos cosh cummax cummin cumlogsumexp cumprod cumsum erf erfc exp exp2 expm1 logistic neg "
    "optimization_barrier sin sinh square stop_gradient tan tanh bessel_i0e bessel_i1e", X),
  **each(lax, "ceil floor is_finite round sign", X),
  **each(lax, "cbrt digamma lgamma log log1p reciprocal rsqrt sqrt", POSITIVE),
  **each(lax, "acos asin atanh erf_inv", UNIT),
  **each(lax, "acosh", POSITIVE + 1),
  **each(lax, "add atan2 complex div max min mul sub eq ge gt le lt ne", X, Y),
  **each(lax, "igamma igammac pow", POSITIVE, MORE),
  **each(lax, "zeta", POSITIVE + 1, POSITIVE, grad=False),
  **each(lax, "nextafter", X, Y, grad=False),
  **each(lax, "random_gamma_grad", POSITIVE, MORE, grad=False),
  **each(lax, "batch_matmul", normal(2, 3, 4), normal(2, 4, 5)),
  **{name: case(lambda x, name=name: getattr(lax, name)(x, k=3), X) for name in
    ("top_k", "approx_max_k", "approx_min_k")},
  **each(lax.linalg, "cholesky", SYMMETRIC),
  **each(lax.linalg, "lu qr", MATRIX),
  **each(lax.linalg, "hessenberg schur tridiagonal", MATRIX, grad=False),
  "argmax": case(lambda x: (lax.argmax(x, 1, jnp.int32), lax.argmin(x, 0, jnp.int32)), X),
  "associative_scan": case(lambda x: lax.associative_scan(lambda a, b: a * b + a, x, axis=1), X),
  "betainc": case(lambda x: lax.betainc(2.0, 3.0, x), PROBABILITIES),
  "bitcast_convert_type": case(lambda x: lax.bitcast_convert_type(x, jnp.int32), X),
  "clamp": case(lambda x: lax.clamp(-1.0, x, 0.5), X),
  "composite": case(lax.composite(lambda x: jnp.tanh(x) + 1, "some.name"), X, grad=False),
  "concatenate": case(lambda x, y: lax.concatenate([x, y], 1), X, Y),
  "cond": case(lambda p, x: lax.cond(p, jnp.sin, lambda x: x @ x.T @ x, x), True, X),
  "convert_element_type": case(lambda x: lax.convert_element_type(10 * x, jnp.int32), X),
  "conv": case(lambda x, w: lax.conv(x, w, (2, 2), "VALID"), IMAGES, KERNEL),
  "conv 1d": case(lambda x, w: CONV(x, w, window_strides=(1,)), IMAGES[..., 0], KERNEL[..., 0]),
  "conv grouped": case(lambda x, w: CONV(x, w, feature_group_count=2), IMAGES, KERNEL[:, :2]),
  "conv batch groups": case(lambda x, w: CONV(x, w, batch_group_count=2), IMAGES, KERNEL),
  "conv dilated": case(lambda x, w: CONV(x, w, padding=((1, 1), (2, 0)), lhs_dilation=(2, 2),
    rhs_dilation=(2, 1)), IMAGES, KERNEL),
  "conv_general_dilated_local": case(lambda x, w: lax.conv_general_dilated_local(x, w, (1, 1), "VALID",
    (3, 3)), IMAGES, normal(3, 36, 4, 4), selects=True),
  "conv_general_dilated_patches": case(lambda x: lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "SAME"),
    IMAGES, selects=True),
  "conv_transpose": case(lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME",
    dimension_numbers=("NCHW", "OIHW", "NCHW")), IMAGES, KERNEL),
  "custom_linear_solve": case(lambda a, b: lax.custom_linear_solve(lambda x: a @ x, b, lambda _, b:
    jnp.linalg.solve(a, b), lambda _, b: jnp.linalg.solve(a.T, b)), MATRIX, VECTORS),
  "custom_root": case(newton, POSITIVE),
  "custom_vjp with constants": case(masked_product, X),
  "dot": case(lax.dot, X, normal(8, 2)),
  "dot preferring float32": case(lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32), X,
    Y.T.copy()),
  "dot_general": case(lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))), normal(2, 3, 4),
    normal(2, 4, 5)),
  "dynamic slices": case(lambda x, i: (lax.dynamic_slice(x, (i, 2), (2, 3)),
    lax.dynamic_index_in_dim(x, i, 0), lax.dynamic_update_slice(x, x[:2, :2] + 1, (i, 0)),
    lax.dynamic_update_index_in_dim(x, x[0] * 2, i, 0)), X, 1),
  "fft": case(lambda x: lax.fft(lax.complex(x, -x), lax.FftType.FFT, (8,)), X),
  "fori_loop": case(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ x.T @ x / 8) + i, x), X),
  "full": case(lambda x: lax.full_like(x, 3.0) + lax.full((3, 8), 2.0), X),
  "gather": case(lambda x: lax.gather(x, ROWS, GATHER, (1, 8)), X),
  "householder_product": case(lax.linalg.householder_product, MATRIX, UNIT[0, :4], grad=False),
  "index_take": case(lambda x: lax.index_take(x, (np.array([0, 2]), np.array([1, 1])), (0, 1)), X),
  "eigh": case(lambda x: lax.linalg.eigh(x)[1], SYMMETRIC),
  "svd": case(lambda x: lax.linalg.svd(x, compute_uv=False), MATRIX),
  "triangular_solve": case(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), MATRIX, VECTORS),
  "tridiagonal_solve": case(lax.linalg.tridiagonal_solve, POSITIVE[0, :4], POSITIVE[1, :4] + 9,
    POSITIVE[2, :4], VECTORS),
  "map": case(lambda x: lax.map(lambda r: jnp.exp(r) @ r, x), X),
  "movement": case(lambda x: [lax.broadcast(x, (2,)), lax.broadcast_in_dim(x, (3, 2, 8), (0, 2)),
    lax.expand_dims(x, (1,)), lax.pad(x, 1.0, ((1, 1, 0), (-1, 2, 1))), lax.reshape(x, (8, 3)),
    lax.rev(x, (1,)), lax.slice(x, (0, 1), (2, 7), (1, 2)), lax.slice_in_dim(x, 1, 3, axis=1),
    lax.squeeze(x[:, :1], (1,)), lax.tile(x, (2, 1)), lax.transpose(x, (1, 0)), lax.split(x, (3, 5), 1),
    lax.collapse(x, 0)], X),
  "integer_pow": case(lambda x: (lax.integer_pow(x, 3), lax.integer_pow(x, -2)), POSITIVE),
  "platform_dependent": case(lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), X),
  "polygamma": case(lambda x: lax.polygamma(1.0, x), POSITIVE, grad=False),
  "ragged_dot": case(lax.ragged_dot, normal(6, 4), normal(3, 4, 5), np.array([1, 3, 2])),
  "reduce": case(lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b, (1,)), X),
  "reduce_precision": case(lambda x: lax.reduce_precision(x, 5, 10), X),
  "reductions": case(lambda x: [f(x, (1,)) for f in (lax.reduce_sum, lax.reduce_prod, lax.reduce_max,
    lax.reduce_min)], X),
  "reduce_window": case(lambda x: [lax.reduce_window(x, init, f, (2, 3), (1, 2), "SAME") for init, f in
    [(0.0, lax.add), (-jnp.inf, lax.max), (jnp.inf, lax.min)]], X),
  "rem": case(lax.rem, X, POSITIVE),
  "random": case(lambda x: x @ x.T + jax.random.normal(jax.random.key(0), (3, 3)), X),
  "scan": case(lambda c, x: lax.scan(lambda c, x: (jnp.tanh(c + x), c * x), c, x), X[0], X),
  "scan reversed with a product": case(lambda c, x: lax.scan(lambda c, x: (x @ x.T @ c, c.sum()), c, x,
    reverse=True), Y[:, 0], normal(4, 3, 3)),
  **{name: case(lambda x, y, name=name: getattr(lax, name)(x, ROWS, y, SCATTER), X, Y) for name in
    ("scatter_add", "scatter_sub", "scatter_min", "scatter_max")},
  "scatter": case(lambda x, y: lax.scatter(x, ROWS[:2], y[:2], SCATTER), X, Y),
  "scatter_mul": case(lambda x, y: lax.scatter_mul(x, ROWS[:2], y[:2], SCATTER, unique_indices=True), X, Y),
  "scatter_apply": case(lambda x: lax.scatter_apply(x, ROWS[:2], jnp.sin, SCATTER, update_shape=(2, 8),
    unique_indices=True), X, grad=False),
  "select": case(lambda x, y: (lax.select(MASK, x, y), lax.select_n(MASK, x, y)), X, Y),
  "sort": case(lambda x, y: (lax.sort(x), lax.sort_key_val(x, y), lax.sort((x, y), num_keys=2)), X, Y),
  "switch": case(lambda i, x: lax.switch(i, [jnp.sin, jnp.exp, lambda x: x @ x.T @ x], x), 2, X),
  "while_loop": case(lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c:
    (c[0] + 1, jnp.tanh(c[1] @ x.T @ x / 8)), (0, x)), X, grad=False),
  "while_loop on a value": case(lambda x: lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: c / 2,
    jnp.abs(x)), X, grad=False),
  "collectives": case(lambda x: jax.vmap(lambda r: [lax.psum(r, "i"), lax.pmean(r, "i"),
    lax.pmax(lax.stop_gradient(r), "i"), lax.all_gather(r, "i")], axis_name="i")(x), X),
}  # fmt: skip
TABLES = {"nn": NN, "losses": LOSSES, "lax": LAX}


@pytest.mark.parametrize("table", TABLES)
def test_lists_dtypes_and_products_of_every_function(table):
  check_traced(TABLES[table])


@pytest.mark.parametrize(
  ("module", "table", "excluded"),
  [(nn, NN, NN_EXCLUDED), (optax.losses, LOSSES, LOSSES_EXCLUDED)],
  ids=["nn", "losses"],
)
def test_every_function_is_in_the_table(module, table, excluded):
  public = {name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name))}
  assert public == {name for name in [*table, *excluded] if " " not in name}
