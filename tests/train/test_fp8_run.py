"""`scripts/train.py` and `scripts/explain.py` under FP8 policies: exact resume, errors, and what is said."""

import json
import signal

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mpjax.cli import main
from mpjax.step import TrainStep
from mpjax.train import load_config, make_setup
from mpjax.train.checkpoints import Checkpoints
from tests.train._tiny_gpt import write_tiny_gpt

STEPS, LENGTH = 8, 4
OPTIONS = [
  "model.dim=128",
  "model.layers=1",
  f"train.steps={STEPS}",
  "train.eval_every=8",
  "train.checkpoint_every=3",
  "data.eval_batches=1",
]
POLICIES = {
  "delayed": f"policy={{base: fp8, fp8: {{emulate: true, recipe: delayed, amax_history_len: {LENGTH}}}}}",
  "current": "policy={base: fp8, fp8: {emulate: true}}",
}


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory):
  """Each run makes its own step, of the same program, which is compiled once, and fast."""
  folder = str(tmp_path_factory.mktemp("compiled"))
  before = {
    "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir,
    "jax_persistent_cache_min_compile_time_secs": jax.config.jax_persistent_cache_min_compile_time_secs,
    "jax_disable_most_optimizations": False,
  }
  for name, value in zip(before, (folder, 0, True), strict=True):
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return [*write_tiny_gpt(tmp_path_factory.mktemp("fp8")), *OPTIONS]


@pytest.fixture(scope="module", params=POLICIES)
def uninterrupted(request, config, tmp_path_factory):
  """Arguments of a finished run, and its directory."""
  out = tmp_path_factory.mktemp("run") / request.param
  arguments = [*config, POLICIES[request.param]]
  assert main(["train", *arguments, f"out={out}"]) == 0
  return arguments, out


def curve(out):
  records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
  return [(r["step"], r["loss"], r.get("eval_loss")) for r in records]


def last_states(arguments, *outs):
  """The states of the last checkpoints of some runs."""
  like = make_setup(load_config(arguments[0], arguments[1:])).abstract_state()
  for out in outs:
    checkpoints = Checkpoints(out / "checkpoints")
    yield checkpoints.restore(STEPS, like).state
    checkpoints.close()


class Killed(BaseException):
  """Stands for a process that is gone."""


def interrupted(monkeypatch, step, how):
  """Has the next run end before the step that is its `step`th."""
  calls, call = [], TrainStep.__call__

  def counted(self, *args, **kwargs):
    calls.append(None)
    if len(calls) == step:
      how()
    return call(self, *args, **kwargs)

  monkeypatch.setattr(TrainStep, "__call__", counted)


def kill():
  raise Killed


@pytest.mark.slow
def test_a_run_killed_and_interrupted_resumes_bit_for_bit(uninterrupted, tmp_path, monkeypatch, capsys):
  arguments, finished = uninterrupted
  out = tmp_path / "run"
  run = [*arguments, f"out={out}"]
  with monkeypatch.context() as patch:
    interrupted(patch, 5, kill)
    with pytest.raises(Killed):
      main(["train", *run])
  with monkeypatch.context() as patch:
    interrupted(patch, 2, lambda: signal.raise_signal(signal.SIGTERM))
    assert main(["train", *run]) == 143
  assert "resumed after step 3" in capsys.readouterr().out
  assert not (out / "summary.json").exists()
  assert main(["train", *run]) == 0
  shown = capsys.readouterr().out
  assert "resumed after step 5" in shown
  recipe = "delayed" if "delayed" in arguments[-1] else "current"
  assert f"{recipe} scaling, emulated" in shown
  assert curve(out) == curve(finished)
  ours, expected = last_states(arguments, out, finished)
  jax.tree.map(np.testing.assert_array_equal, ours.fp8_state, expected.fp8_state)
  jax.tree.map(
    np.testing.assert_array_equal, (ours.params, ours.opt_state), (expected.params, expected.opt_state)
  )
  if recipe == "delayed":
    histories = jax.tree.leaves(expected.fp8_state["amax"])
    assert len(histories) == 4 * 3
    assert all(h.shape == (LENGTH,) and np.count_nonzero(h) == LENGTH for h in histories)
  else:
    assert not jax.tree.leaves(expected.fp8_state)


@pytest.mark.parametrize(
  ("policy", "words"),
  [
    ("{base: fp8, fp8: {emulat: true}}", ["'emulat'", "did you mean 'emulate'"]),
    ("{base: fp8, fp8: {recipe: curent}}", ["fp8.recipe", "'curent'", "did you mean 'current'"]),
    ("{base: fp8, fp8: {amax_history_len: 4}}", ["'amax_history_len'", "delayed"]),
    ("{base: fp8, fp8: {recipe: delayed, amax_history_len: 0}}", ["fp8.amax_history_len=0", "at least 1"]),
    ("{base: fp8, autocast: false}", ["fp8", "autocast: true"]),
    ("{base: fp32, autocast: true, fp8: {emulate: true}}", ["fp8", "float32", "base: fp8"]),
    ("{base: fp32, fp8: {emulate: true}}", ["fp8", "autocast: true"]),
    (
      "{base: fp8, fp8: {emulate: true, exclude: [nothere]}}",
      ["fp8.exclude", "'nothere'", "GPT/blocks/0/up"],
    ),
  ],
)
def test_a_policy_that_is_wrong_is_one_line_and_status_2(config, tmp_path, capsys, policy, words):
  assert main(["train", *config, f"policy={policy}", f"out={tmp_path / 'run'}"]) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ")
  assert error.count("\n") == 1
  assert all(word in error for word in words), error
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_without_units_a_run_is_one_of_bfloat16_and_says_so_once(config, tmp_path, capsys):
  with pytest.warns(UserWarning, match=r"cpu has no FP8 units: they run in bfloat16") as said:
    assert main(["train", *config, "train.steps=1", "policy=fp8", f"out={tmp_path / 'run'}"]) == 0
  # Python shows those of one place once: the evaluation is traced too.
  assert len({(str(w.message), w.filename, w.lineno) for w in said}) == 1
  assert "current scaling: none, cpu has no FP8 units" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", POLICIES)
def test_explain_says_which_products_are_fp8(config, capsys, recipe, monkeypatch):
  monkeypatch.setenv("COLUMNS", "120")
  assert main(["explain", *config, POLICIES[recipe]]) == 0
  text = capsys.readouterr().out
  # Four products, 8 x 16 rows, of 128 x (384 + 128 + 512 + 512).
  assert "float8_e4m3fn 50.33 MFLOP (84%)" in " ".join(text.split())
  section = text[text.index("not in FP8") : text.index("in float32  ")]
  assert "last layer (fp8.last_layer)" in section
  assert "GPT/blocks/0 " in section
  assert "GPT/blocks/0/up" not in section


def test_a_checkpoint_knows_of_fp8_only_where_there_is_a_state(tmp_path):
  arguments = [str(write_tiny_gpt(tmp_path)[0]), *OPTIONS]
  fields = {}
  for name, policy in {"bf16": "policy=bf16", **POLICIES}.items():
    setup = make_setup(load_config(arguments[0], [*arguments[1:], policy]))
    checkpoints = Checkpoints(tmp_path / name)
    checkpoints.save(1, setup.first_state(), {}, {}, None)
    checkpoints.close()
    fields[name] = "fp8_state" in next((tmp_path / name).rglob("state/_METADATA")).read_text()
  assert fields == {"bf16": False, "current": False, "delayed": True}
