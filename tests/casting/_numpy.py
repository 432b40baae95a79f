"""Cases of a broad sample of jax.numpy, jax.numpy.linalg, jax.numpy.fft and jax.scipy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import jax.scipy.optimize
import numpy as np
from jax.scipy import special, stats

from tests.casting._conformance import case, each, exact, normal, uniform

X = normal(3, 8)
Y = normal(3, 8, seed=1)
POSITIVE = uniform(0.5, 3, 3, 8)
MORE = POSITIVE[::-1].copy()
UNIT = uniform(-0.9, 0.9, 3, 8)
PROBABILITIES = uniform(0.05, 0.95, 3, 8)
MASK = np.arange(24).reshape(3, 8) % 3 != 0
INDICES = np.array([2, 0, 2])
MATRIX = exact(normal(4, 4) + 4 * np.eye(4))
SYMMETRIC = exact(MATRIX @ MATRIX.T)
VECTORS = normal(4, 2, seed=2)
FLAT = X.ravel()

NUMPY = {
  **each(jnp,
    "abs arcsinh arctan argmax argmin argsort average cos cosh count_nonzero cumprod cumsum degrees diff exp exp2 "
    "expm1 fliplr flipud max mean median min nanmax nanmean nanstd nansum negative ptp radians "
    "ravel real rot90 round sign sin sinc sinh sort square squeeze std sum tan tanh transpose trapezoid tril var",
    X),
  **each(jnp, "cbrt log log10 log1p log2 prod reciprocal sqrt", POSITIVE),
  **each(jnp, "arccos arcsin arctanh", UNIT),
  **each(jnp, "ceil floor isfinite isnan nan_to_num rint signbit trunc frexp modf", X, grad=False),
  **each(jnp,
    "add arctan2 copysign divide fmax fmin heaviside hypot inner isclose less logaddexp logaddexp2 maximum minimum "
    "multiply not_equal subtract true_divide vdot vecdot", X, Y),
  **each(jnp, "floor_divide fmod mod remainder divmod", X, POSITIVE),
  **each(jnp, "power float_power", POSITIVE, MORE),
  **each(jnp, "dot matmul", X, normal(8, 2)),
  **each(jnp, "kron outer", X[0], Y[1]),
  **each(jnp, "convolve correlate polyadd polymul polysub", X[0], Y[1, :3]),
  **each(jnp, "corrcoef cov", X),
  **each(jnp, "diag diagonal trace triu", MATRIX),
  **each(jnp, "hstack vstack concatenate stack column_stack dstack", [X, Y]),
  **each(jnp, "cross", normal(4, 3), normal(4, 3, seed=1)),
  "apply_along_axis": case(lambda x: jnp.apply_along_axis(lambda r: r / r.sum(), 1, x), POSITIVE),
  "array_split": case(lambda x: jnp.array_split(x, 3, axis=1), X),
  "astype": case(lambda x: (x.astype(jnp.int32), x.astype(bool), x.astype(jnp.complex64)), X),
  "at": case(lambda x, y: (x.at[INDICES].add(y), x.at[1].set(0.5), x.at[:, 2].multiply(2), x.at[0].max(y[1])),
    X, Y),
  "block": case(lambda x: jnp.block([[x, x], [x, 2 * x]]), X),
  "choose": case(lambda x, y: jnp.choose(np.arange(8) % 2, [x[0], y[0]], mode="clip"), X, Y),
  "clip": case(lambda x: jnp.clip(x, -0.5, 0.75), X),
  "complex": case(lambda x, y: jnp.abs(x + 1j * y) + jnp.angle(jnp.exp(1j * x)), X, Y),
  "digitize": case(lambda x: jnp.digitize(x, jnp.array([-1.0, 0.1, 1.0])), X),
  "ediff1d": case(jnp.ediff1d, FLAT),
  "einsum": case(lambda x, y: jnp.einsum("ij,kj,j->ik", x, y, x[0]), X, Y),
  "expand_dims": case(lambda x: jnp.expand_dims(x, 1), X),
  "gradient": case(lambda x: jnp.gradient(x, axis=1), X),
  "histogram": case(lambda x: jnp.histogram(x, bins=4, range=(-2, 2)), X),
  "indexing": case(lambda x: (x[INDICES], x[:, ::2], x[..., None], x[1, INDICES], x[jnp.argmax(x[:, 0])]), X),
  "interp": case(lambda x: jnp.interp(x, np.linspace(-3, 3, 7), np.arange(7.0) ** 2), X),
  "linspace": case(lambda x: jnp.linspace(x[0], x[1], 5) + jnp.arange(8.0), X),
  "meshgrid": case(lambda x, y: jnp.meshgrid(x, y), X[0], Y[0]),
  "nonzero": case(lambda x: jnp.nonzero(x > 0, size=5), X),
  "pad": case(lambda x: [jnp.pad(x, 2, mode=mode) for mode in ("constant", "edge", "reflect", "linear_ramp")],
    X),
  "percentile": case(lambda x: jnp.percentile(x, jnp.array([25.0, 60.0]), axis=1), X),
  "piecewise": case(lambda x: jnp.piecewise(x, [x < 0, x > 1], [jnp.exp, 2.0, jnp.sin]), X),
  "polyval": case(jnp.polyval, X[0, :4], Y),
  "quantile": case(lambda x: jnp.quantile(x, 0.3, axis=0), X),
  "repeat": case(lambda x: jnp.repeat(x, 2, axis=1), X),
  "roll": case(lambda x: jnp.roll(x, 3), X),
  "searchsorted": case(lambda x: jnp.searchsorted(jnp.sort(x), 0.3), X[0]),
  "select": case(lambda x, y: jnp.select([x > 1, x > 0], [x, y], 0.5), X, Y),
  "take": case(lambda x: jnp.take(x, INDICES, axis=1), X),
  "take_along_axis": case(lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1), X),
  "tensordot": case(lambda x, y: jnp.tensordot(x, y, 1), normal(2, 3, 4), normal(4, 5)),
  "tile": case(lambda x: jnp.tile(x, (2, 2)), X),
  "unique": case(lambda x: jnp.unique(jnp.round(x), size=4), X, grad=False),
  "unwrap": case(lambda x: jnp.unwrap(3 * x), X),
  "vander": case(lambda x: jnp.vander(x, 4), X[0]),
  "where": case(lambda x, y: jnp.where(MASK, jnp.exp(x), y), X, Y),
  # What float16 cannot hold.
  "mean of large values": case(lambda x: jnp.mean(x + 6e4, axis=0), X),
  "norm beyond float16": case(lambda x: jnp.sqrt(jnp.sum(jnp.square(300 * x))), X),
  "sum beyond float16": case(lambda x: jnp.sum(x + 5000), X),
  "variance beyond float16": case(lambda x: jnp.var(400 * x), X),
  "65505": case(lambda x: (x + 65505.0, 8 * x + 65505.0), X),
  "epsilon": case(lambda x: x / jnp.sqrt(jnp.mean(jnp.square(x * 0), -1, keepdims=True) + 1e-8), X),
  "lowest": case(lambda x: jax.nn.softmax(jnp.where(MASK, x, jnp.finfo(x.dtype).min)), X),
}  # fmt: skip

LINALG = {
  **each(jnp.linalg, "cholesky eigvalsh", SYMMETRIC),
  **each(jnp.linalg, "det inv pinv slogdet svdvals cond", MATRIX),
  **each(jnp.linalg, "diagonal matrix_norm matrix_transpose norm qr trace vector_norm", MATRIX),
  **each(jnp.linalg, "matmul", MATRIX, VECTORS),
  **each(jnp.linalg, "cross outer", normal(3), normal(3, seed=1)),
  **each(jnp.linalg, "vecdot", X, Y),
  "matrix_rank": case(jnp.linalg.matrix_rank, MATRIX),
  "eig": case(lambda x: jnp.sort(jnp.abs(jnp.linalg.eig(x)[0])), SYMMETRIC, grad=False),
  "eigvals": case(lambda x: jnp.sort(jnp.linalg.eigvals(x).real), SYMMETRIC, grad=False),
  "eigh": case(lambda x: jnp.linalg.eigh(x)[0], SYMMETRIC),
  "lstsq": case(lambda a, b: jnp.linalg.lstsq(a, b)[0], MATRIX, VECTORS),
  "matrix_power": case(lambda x: jnp.linalg.matrix_power(x / 4, 3), MATRIX),
  "multi_dot": case(lambda a, b: jnp.linalg.multi_dot([a, a, b]), MATRIX, VECTORS),
  "solve": case(jnp.linalg.solve, MATRIX, VECTORS),
  "svd": case(lambda x: jnp.linalg.svd(x)[1], MATRIX),
  "tensordot": case(lambda a, b: jnp.linalg.tensordot(a, b, axes=1), MATRIX, VECTORS),
  "tensorsolve": case(jnp.linalg.tensorsolve, MATRIX, VECTORS[:, 0]),
}  # fmt: skip

FFT = {
  **each(jnp.fft, "fft fft2 fftshift fftn hfft ifft ifft2 ifftn ifftshift ihfft irfft rfft rfft2 rfftn", X),
  "spectral filter": case(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * jnp.arange(5.0)), X),
}  # fmt: skip

SPECIAL = {
  **each(special,
    "dawsn entr erf erfc erfcx exp1 expi expit i0 i0e i1 i1e log_ndtr log_softmax logsumexp ndtr sici softmax",
    POSITIVE),
  **each(special, "digamma factorial gamma gammaln spence", POSITIVE),
  **each(special, "fresnel gammasgn loggamma", POSITIVE, grad=False),
  **each(special, "erfinv", UNIT),
  **each(special, "logit ndtri", PROBABILITIES),
  **each(special, "beta betaln boxcox boxcox1p kl_div poch rel_entr xlog1py xlogy", POSITIVE, MORE),
  **each(special, "gammainc gammaincc zeta", POSITIVE[0] + 1, MORE[0], grad=False),
  "betainc": case(special.betainc, POSITIVE[0], MORE[0], PROBABILITIES[0], grad=False),
  "multigammaln": case(lambda x: special.multigammaln(x + 2, 3), POSITIVE),
  "polygamma": case(lambda x: special.polygamma(1, x), POSITIVE),
  "sph_harm_y": case(lambda x: special.sph_harm_y(np.array([2]), np.array([1]), x, x, n_max=2), POSITIVE[0],
    grad=False),
}  # fmt: skip

STATS = {
  **{f"{name}.{method}": case(getattr(getattr(stats, name), method), x) for names, x in
    [("cauchy gumbel_l gumbel_r laplace logistic norm", X), ("expon", POSITIVE), ("uniform", PROBABILITIES)]
    for name in names.split() for method in ("logpdf", "cdf")},
  "bernoulli.logpmf": case(lambda p: stats.bernoulli.logpmf(np.array(1), p), PROBABILITIES),
  "beta.logpdf": case(stats.beta.logpdf, PROBABILITIES, POSITIVE, MORE),
  "binom.logpmf": case(lambda p: stats.binom.logpmf(2, 5, p), PROBABILITIES),
  "chi2.logpdf": case(stats.chi2.logpdf, POSITIVE, MORE),
  "dirichlet.logpdf": case(lambda x, alpha: stats.dirichlet.logpdf(jax.nn.softmax(x), alpha), X[0],
    POSITIVE[0]),
  "gamma.logpdf": case(stats.gamma.logpdf, POSITIVE, MORE),
  "gaussian_kde": case(lambda x, y: stats.gaussian_kde(x).evaluate(y), X[0], Y[0, :3], selects=True),
  "gennorm.logpdf": case(stats.gennorm.logpdf, X, POSITIVE),
  "geom.logpmf": case(lambda p: stats.geom.logpmf(3, p), PROBABILITIES),
  "mode": case(lambda x: stats.mode(jnp.round(x), axis=1), X, grad=False),
  "multivariate_normal.logpdf": case(lambda x, mean: stats.multivariate_normal.logpdf(x, mean, SYMMETRIC),
    normal(3, 4), normal(4, seed=1)),
  "nbinom.logpmf": case(lambda p: stats.nbinom.logpmf(2, 3, p), PROBABILITIES),
  "norm.ppf": case(stats.norm.ppf, PROBABILITIES),
  "pareto.logpdf": case(lambda x, b: stats.pareto.logpdf(x + 1, b), POSITIVE, MORE),
  "poisson.logpmf": case(lambda mu: stats.poisson.logpmf(2, mu), POSITIVE),
  "rankdata": case(stats.rankdata, X, grad=False),
  "sem": case(stats.sem, X),
  "t.logpdf": case(stats.t.logpdf, X, POSITIVE),
  "truncnorm.logpdf": case(lambda x: stats.truncnorm.logpdf(x, -1.0, 1.0), UNIT),
  "vonmises.logpdf": case(stats.vonmises.logpdf, X, POSITIVE),
  "wrapcauchy.logpdf": case(stats.wrapcauchy.logpdf, POSITIVE, PROBABILITIES),
}  # fmt: skip

SCIPY = {
  "cluster.vq": case(lambda x: jsp.cluster.vq.vq(x, Y[:2]), X),
  "integrate.trapezoid": case(jsp.integrate.trapezoid, X),
  "linalg.cho_solve": case(lambda a, b: jsp.linalg.cho_solve(jsp.linalg.cho_factor(a), b), SYMMETRIC,
    VECTORS),
  "linalg.expm": case(lambda x: jsp.linalg.expm(x / 4), MATRIX),
  "linalg.lu": case(jsp.linalg.lu, MATRIX),
  "linalg.solve_triangular": case(jsp.linalg.solve_triangular, MATRIX, VECTORS),
  "linalg.sqrtm": case(lambda x: jsp.linalg.sqrtm(x).real, SYMMETRIC, grad=False),
  "ndimage.map_coordinates": case(lambda x, at: jsp.ndimage.map_coordinates(x, list(at), 1), X, POSITIVE[:2] /
    2),
  "optimize.minimize": case(lambda x: jsp.optimize.minimize(lambda y: jnp.sum((y - x) ** 2), jnp.zeros(8),
    method="BFGS").x, X[0], grad=False),
  "signal.convolve2d": case(lambda x, y: jsp.signal.convolve2d(x, y), X, Y[:2, :2]),
  "signal.fftconvolve": case(jsp.signal.fftconvolve, X[0], Y[0, :3]),
  "signal.stft": case(lambda x: jsp.signal.stft(x, nperseg=8)[2], FLAT),
  "sparse.linalg.cg": case(lambda a, b: jsp.sparse.linalg.cg(lambda x: a @ x, b)[0], SYMMETRIC,
    VECTORS[:, 0]),
}  # fmt: skip

TABLES = {"numpy": NUMPY, "linalg": LINALG, "fft": FFT, "special": SPECIAL, "stats": STATS, "scipy": SCIPY}
