"""Rows of the fault table about the library itself: programs, threads, memory, and modes of JAX."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

import mpjax
from benchmarks.chaos._trial import Case, Prepared, Row, Trial, Wrong, each

ROOT = pathlib.Path(__file__).parents[2]
POLICIES = ("fp32", "bf16", "fp16", "bf16_pure")
_RNG = np.random.default_rng(0)
_PARAMS = {name: np.float32(_RNG.normal(size=(16, 16)) / 4) for name in ("w", "v")}
_X = _RNG.normal(size=(8, 16)).astype(np.float32)
_GPT = ("gpt_stdlib", "model.layers=1", "model.dim=16", "model.heads=2", "data.seq_len=16", "data.kind=text")
_PROGRAMS = {
  "fp16": (*_GPT, "policy=fp16"),
  "fp8, delayed": (*_GPT, "policy={base: fp8, fp8: {recipe: delayed}}"),
  "data x fsdp": (*_GPT, "policy=bf16", "mesh={data: 2, fsdp: 2}"),
  "fsdp x tensor": (*_GPT, "policy=bf16", "mesh={data: 1, fsdp: 2, tensor: 2}"),
  "ViT": ("vit_digits", "policy=fp16", "model.layers=1", "model.dim=16", "model.heads=2"),
  "ResNet": ("resnet_digits", "policy=fp16", "model.stages=[1]", "model.width=4"),
}
_MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
  "checking_leaks": jax.checking_leaks,
  "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
  "debug_nans": lambda: jax.debug_nans(True),
  "disable_jit": jax.disable_jit,
  "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
}


def rows(prepared: Prepared) -> list[Row]:
  """Returns the rows about the library."""
  threads = {"8 threads with 4 policies": (POLICIES * 2,), "one step in 6 threads": (("fp16",) * 6,)}
  errors = {
    f"an error in {how}, {p}": (p, how) for p in (*POLICIES, "fp8") for how in ("eager", "jit", "step")
  }
  modes = {f"{name}, {policy}": (name, policy) for name in _MODES for policy in ("fp16", "bf16")}
  odd: dict[str, Case] = {"unequal rows, accumulate": _accumulated, "unequal rows, mesh": _on_mesh}
  odd["policies as static arguments"] = _static
  return [
    Row("programs under other hash seeds and `-O`", "the same programs", each(_same, _programs(prepared))),
    Row("threads", "the losses of one thread", each(_in_threads, threads)),
    Row("errors inside traced functions", "settings are as before", each(_raises, errors)),
    Row("memory of 10,000 steps", "no growth", {"fp16": _steps}),
    Row(
      "odd batches and policies, modes of JAX",
      "an error that says so, or no change",
      odd | each(_mode, modes),
    ),
  ]


def _programs(prepared: Prepared) -> dict[str, tuple[Any, ...]]:
  text = (f"data.path={prepared.finished.parent / 'text'}", "data.eval_batches=1")
  return {name: ((*words, *(text if words[0] == _GPT[0] else ())),) for name, words in _PROGRAMS.items()}


def _same(trial: Trial, words: tuple[str, ...]) -> None:
  first, second = (_compiled(trial, words, *how) for how in (("1", []), ("424242", ["-O"])))
  if not first or first != second:
    raise Wrong(f"of {len(first)} programs these differ: {sorted(first ^ second)}")


def _compiled(trial: Trial, words: tuple[str, ...], seed: str, flags: list[str]) -> set[str]:
  """Returns the keys of the programs that a start compiles: they are digests of their texts."""
  cache = trial.folder / f"cache{seed}"
  environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  environment |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
  environment["JAX_NUM_CPU_DEVICES"] = "4" if any("mesh=" in word for word in words) else "1"
  steps = ("train.steps=2", "train.eval_every=2", "train.checkpoint_every=2", "data.batch_size=8")
  command = [sys.executable, *flags, "-m", "mpjax", "train", *words, *steps, f"out={trial.folder / seed}"]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
  if done.returncode:
    raise Wrong(f"status {done.returncode}: {done.stderr[-800:]}")
  return {file.name for file in cache.iterdir() if file.name.endswith("-cache")}


def _loss(params: Any, x: Any) -> Any:
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)


def _step(policy: Any, loss: Any = _loss, **options: Any) -> Any:
  return mpjax.make_train_step(loss, optax.sgd(0.1), policy, donate=False, **options)


def _losses(step: Any, count: int = 20) -> list[float]:
  state, losses = step.init(_PARAMS), []
  for _ in range(count):
    state, metrics = step(state, _X)
    losses.append(float(metrics["loss"]))
  return losses


def _in_threads(trial: Trial, policies: tuple[str, ...]) -> None:
  alone = {policy: _losses(_step(policy)) for policy in set(policies)}
  one = _step(policies[0]) if len(alone) == 1 else None
  sys.setswitchinterval(1e-5)
  with concurrent.futures.ThreadPoolExecutor(len(policies)) as pool:
    together = list(pool.map(lambda policy: _losses(one or _step(policy)), policies))
  if together != [alone[policy] for policy in policies]:
    raise Wrong("other losses than alone")


def _raises(trial: Trial, policy: str, how: str) -> None:
  def bad(params: Any, x: Any) -> Any:
    raise ZeroDivisionError

  def act() -> None:
    if how == "step":
      _losses(_step(policy, bad))
    else:
      fun = mpjax.autocast(bad, policy)
      (jax.jit(fun) if how == "jit" else fun)(_PARAMS, _X)

  def settings() -> tuple[Any, ...]:
    return jax.config.values.copy(), warnings.filters[:], np.geterr(), sys.excepthook, dict(os.environ)

  _step(policy).init(_PARAMS)  # what is set up once is set up
  before = settings()
  for _ in range(2):
    try:
      act()
    except ZeroDivisionError:
      continue
    raise Wrong("the error was lost")
  if settings() != before:
    raise Wrong("settings are not as before")


def _steps(trial: Trial) -> None:
  used = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
  step = _step("fp16")
  state, before = step.init(_PARAMS), 0.0
  for i in range(10_000):
    before = used() if i == 2000 else before
    state, _ = step(state, _X)
  if (grown := used() - before) > 4:
    raise Wrong(f"{grown:.1f} MB more after 8000 steps")


def _accumulated(trial: Trial) -> None:
  _unequal_rows(accumulate=2)


def _on_mesh(trial: Trial) -> None:
  _unequal_rows(mesh=jax.make_mesh((1,), ("data",)))


def _unequal_rows(**options: Any) -> None:
  step = _step("bf16", lambda p, batch: (batch["x"] @ p["w"]).mean() - batch["y"].mean(), **options)
  try:
    step(step.init(_PARAMS), {"x": _X, "y": _X[:4]})
  except ValueError as error:
    if "rows" in str(error):
      return
    raise
  raise Wrong("rows were broadcast in silence")


def _static(trial: Trial) -> None:
  """Policies as static arguments: each has a program of its own, equal ones share one."""
  base, scaled = mpjax.get_policy("fp16"), mpjax.get_policy({"base": "fp16", "loss_scaling": 512.0})
  if base == scaled or mpjax.get_policy(str(scaled)) != scaled:
    raise Wrong("policies that differ are equal, or equal ones are not")
  seen: list[Any] = []

  def trace(x: Any, policy: Any) -> Any:
    seen.append(policy)
    return x

  traced = jax.jit(trace, static_argnums=1)
  for policy in (base, scaled, mpjax.get_policy("fp16")):
    traced(1.0, policy)
  if len(seen) != 2:
    raise Wrong(f"{len(seen)} programs for two policies")
  if base == jmp.get_policy("params=float32,compute=float16,output=float32"):
    raise Wrong("equal to jmp's policy, which has another hash")


def _mode(trial: Trial, name: str, policy: str) -> None:
  plain = _losses(_step(policy), 3)
  with _MODES[name]():
    found = _losses(_step(policy), 3)
  if not np.allclose(found, plain, rtol=1e-2):
    raise Wrong(f"losses {found}, without it {plain}")
