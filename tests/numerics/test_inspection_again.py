"""A second inspection of the same step or loss function: no program is compiled again, and nothing stays."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax.numerics import _inspection
from tests.numerics._by_hand import batch_of, loss_fn, params_of
from tests.numerics._planted_models import chain


@pytest.fixture
def compiled():
  """Names of the functions that were compiled."""
  names = []

  def listen(event, seconds, **more):
    if "backend_compile" in event:
      names.append(more.get("fun_name", ""))

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("policy", ["bf16", {"base": "fp16", "loss_scaling": 64}])
def test_a_second_inspection_compiles_nothing(policy, compiled):
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), policy)
  state, batch = step.init(params_of()), batch_of()
  look = lambda: mpjax.inspect_numerics(step, state, batch, advise=False)
  first = look()
  assert compiled
  del compiled[:]
  second = look()
  assert compiled == []
  assert first.to_dict() == second.to_dict()


def test_a_loss_function_is_compiled_once_for_its_policy(compiled):
  own = lambda params, batch: loss_fn(params, batch)
  tx = optax.sgd(0.1)
  look = lambda policy, rows: mpjax.inspect_numerics(
    own, params_of(), jax.tree.map(lambda x: x[:rows], batch_of()), policy, tx=tx, advise=False
  )
  look("bf16", 4)
  of_bf16 = look("bf16", 4).loss
  del compiled[:]
  assert look("bf16", 4).loss == of_bf16
  assert compiled == []
  assert look("fp32", 4).loss != of_bf16
  assert compiled
  del compiled[:]
  look("bf16", 2)
  assert compiled


def test_a_function_that_wraps_another_is_looked_at_itself():
  own = lambda params, batch: loss_fn(params, batch)
  before = mpjax.inspect_numerics(own, params_of(), batch_of(), "fp32", advise=False)
  twice = functools.wraps(own)(lambda params, batch: 2 * own(params, batch))
  after = mpjax.inspect_numerics(twice, params_of(), batch_of(), "fp32", advise=False)
  assert after.loss == pytest.approx(2 * before.loss)


def test_nothing_stays_of_a_function_that_is_gone():
  weight = jnp.ones(4)
  own = lambda params, batch: loss_fn(params, batch) + 0 * weight.sum()
  mpjax.inspect_numerics(own, params_of(), batch_of(), "fp32", advise=False)
  gone = weakref.ref(own)
  del own
  jax.clear_caches()
  gc.collect()
  assert gone() is None


@pytest.mark.slow
def test_what_float32_gives_is_not_computed_again_for_each_advice(monkeypatch):
  params, batch, loss = chain(big=1e4)
  runs = []
  make = _inspection.programs_for

  def counted(*args, **options):
    programs = make(*args, **options)
    again = lambda state, batch: runs.append("float32") or programs.theirs(state, batch)
    return programs._replace(theirs=again)

  monkeypatch.setattr(_inspection, "programs_for", counted)
  policy = {"base": "fp16", "loss_scaling": 64}
  lines = []
  report = mpjax.inspect_numerics(loss, params, batch, policy, progress=lines.append)
  assert any(line.startswith("trying") for line in lines)
  assert runs == ["float32"]
  add = _inspection.Inspection.add
  monkeypatch.setattr(_inspection.Inspection, "add", lambda self, batch, known=None: add(self, batch))
  assert mpjax.inspect_numerics(loss, params, batch, policy).to_dict() == report.to_dict()
  assert len(runs) > 2
