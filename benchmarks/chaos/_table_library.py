"""Rows of the fault table about the library itself: programs, threads, memory, and modes of JAX."""

from __future__ import annotations

import concurrent.futures
import copy
import os
import pathlib
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.chaos._trial import Case, Prepared, Row, Trial, Wrong, each

ROOT = pathlib.Path(__file__).parents[2]


def rows(prepared: Prepared) -> list[Row]:
  """Returns the rows about the library."""
  return [
    Row("programs under other hash seeds and `-O`", "the same programs", _programs()),
    Row("threads, and errors inside traced functions", "the same numbers; settings as before", _threads()),
    Row("memory of long loops", "no growth beyond that of plain JAX", _memory()),
    Row("odd batches, policies, modes of JAX", "an error that says so, or the same as without", _modes()),
  ]


def _programs() -> dict[str, Case]:
  gpt = (
    "gpt_stdlib",
    "model.layers=1",
    "model.dim=16",
    "model.heads=2",
    "data.seq_len=16",
    "data.batch_size=8",
  )
  gpt += ("data.kind=text", "data.eval_batches=1")
  vit = ("vit_digits", "policy=fp16", "model.layers=1", "model.dim=16", "model.heads=2")
  cases = {
    "fp16": (*gpt, "policy=fp16"),
    "fp8, delayed": (*gpt, "policy={base: fp8, fp8: {recipe: delayed}}"),
    "data x fsdp": (*gpt, "policy=bf16", "mesh={data: 2, fsdp: 2}"),
    "fsdp x tensor": (*gpt, "policy=bf16", "mesh={data: 1, fsdp: 2, tensor: 2}"),
    "ViT": vit,
    "ResNet": ("resnet_digits", "policy=fp16", "model.stages=[1]", "model.width=4"),
  }

  def compiled(trial: Trial, words: tuple[str, ...], seed: str, flags: tuple[str, ...]) -> set[str]:
    """Returns the keys of the programs that a start compiles, which are made of their texts."""
    cache = trial.folder / f"cache{seed}"
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    environment["JAX_NUM_CPU_DEVICES"] = "4" if any("mesh=" in word for word in words) else "1"
    if words[0] == "gpt_stdlib":
      words = (*words, f"data.path={trial.prepared.finished.parent / 'text'}")
    steps = ("train.steps=2", "train.eval_every=2", "train.checkpoint_every=2", "data.batch_size=8")
    command = [sys.executable, *flags, "-m", "mpjax", "train", *words, *steps, f"out={trial.folder / seed}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
      raise Wrong(f"status {done.returncode}: {done.stderr[-800:]}")
    return {file.name for file in cache.iterdir() if file.name.endswith("-cache")}

  def same(trial: Trial, words: tuple[str, ...]) -> None:
    first, second = compiled(trial, words, "1", ()), compiled(trial, words, "424242", ("-O",))
    if not first or first != second:
      raise Wrong(f"of {len(first)} programs these differ: {sorted(first ^ second)}")

  return each(same, {name: (words,) for name, words in cases.items()})


def _setting() -> tuple[Any, ...]:
  """Returns parameters, a batch and a loss function; imported here, since JAX takes its device then."""
  import jax.numpy as jnp
  import numpy as np

  rng = np.random.default_rng(0)
  params = {name: np.float32(rng.normal(size=(16, 16)) / 4) for name in ("w", "v")}

  def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)

  return params, np.float32(rng.normal(size=(8, 16))), loss_fn


_POLICIES = ("fp32", "bf16", "fp16", "bf16_pure")


def _trained(step: Any, count: int = 20) -> list[float]:
  params, x, _ = _setting()
  state, losses = step.init(params), []
  for _ in range(count):
    state, metrics = step(state, x)
    losses.append(float(metrics["loss"]))
  return losses


def _step(policy: Any, **options: Any) -> Any:
  import optax

  import mpjax

  return mpjax.make_train_step(_setting()[2], optax.sgd(0.1), policy, donate=False, **options)


def _threads() -> dict[str, Case]:
  def threads(trial: Trial, one_step: bool) -> None:
    policies = ["fp16"] * 6 if one_step else [*_POLICIES, *_POLICIES]
    alone = {policy: _trained(_step(policy)) for policy in set(policies)}
    shared = _step("fp16")
    sys.setswitchinterval(1e-5)
    with concurrent.futures.ThreadPoolExecutor(len(policies)) as pool:
      work = lambda policy: _trained(shared if one_step else _step(policy))
      together = list(pool.map(work, policies))
    if together != [alone[policy] for policy in policies]:
      raise Wrong("other losses than alone")

  def raises(trial: Trial, policy: str, how: str) -> None:
    import jax
    import numpy as np

    import mpjax

    def state() -> tuple[Any, ...]:
      return jax.config.values.copy(), warnings.filters[:], np.geterr(), sys.excepthook, dict(os.environ)

    params, x, _ = _setting()

    def bad(params: Any, x: Any) -> Any:
      raise ZeroDivisionError

    def act() -> None:
      if how == "step":
        import optax

        step = mpjax.make_train_step(bad, optax.sgd(0.1), policy)
        step(step.init(params), x)
      else:
        fun = mpjax.autocast(bad, policy)
        (jax.jit(fun) if how == "jit" else fun)(params, x)

    _step(policy).init(params)  # what is set up once is set up
    before = state()
    for _ in range(2):
      try:
        act()
      except ZeroDivisionError:
        continue
      raise Wrong("the error was lost")
    if state() != before:
      raise Wrong("settings are not as before")

  policies, hows = (*_POLICIES, "fp8"), ("eager", "jit", "step")
  return {
    **each(threads, {"8 threads with 4 policies": (False,), "one step in 6 threads": (True,)}),
    **each(
      raises, {f"an error in {how} under {policy}": (policy, how) for policy in policies for how in hows}
    ),
  }


def _memory() -> dict[str, Case]:
  def used() -> float:
    """Returns the memory of this process, in MB."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6

  def steps(trial: Trial) -> None:
    params, x, _ = _setting()
    step = _step("fp16")
    state = step.init(params)
    for i in range(10_000):
      if i == 2000:
        before = used()
      state, _ = step(state, x)
    if (grown := used() - before) > 4:
      raise Wrong(f"{grown:.1f} MB more after 8000 steps")

  def made_again(trial: Trial, kind: str) -> None:
    import jax

    import mpjax

    params, x, loss_fn = _setting()
    policy: dict[str, Callable[[int], Any]] = {
      "autocast": lambda i: "bf16",
      "a policy": lambda i: mpjax.get_policy({"base": "fp16", "loss_scaling": 1024.0}),
      "a step": lambda i: "fp16",
    }

    def ours(i: int) -> None:
      if kind == "a step":
        _trained(_step("fp16"), 1)
      else:
        jax.jit(mpjax.autocast(loss_fn, policy[kind](i)))(params, x)

    def grown(act: Callable[[int], object], count: int) -> float:
      for i in range(10):
        act(i)
      before = used()
      for i in range(count):
        act(i)
      return used() - before

    count = 40
    plain = grown(lambda i: jax.jit(lambda p, x: loss_fn(p, x))(params, x), count)
    found = grown(ours, count)
    # A step is several programs; each costs JAX some memory that it keeps.
    if found > 8 * max(plain, 0) + 12:
      raise Wrong(f"{found:.1f} MB for {count}, beside {plain:.1f} MB of plain functions")

  kinds = ("autocast", "a policy", "a step")
  return {"10,000 steps": steps, **each(made_again, {f"{kind} made again": (kind,) for kind in kinds})}


def _modes() -> dict[str, Case]:
  def unequal_rows(trial: Trial, options: Mapping[str, Any]) -> None:
    import numpy as np
    import optax

    import mpjax

    loss = lambda p, batch: ((batch["x"] @ p["w"]).mean() - batch["y"].mean()) ** 2
    step = mpjax.make_train_step(loss, optax.sgd(0.1), "bf16", donate=False, **options)
    batch = {"x": np.ones((4, 4), np.float32), "y": np.ones((2, 1), np.float32)}
    try:
      step(step.init({"w": np.ones((4, 1), np.float32)}), batch)
    except ValueError as error:
      if "rows" in str(error):
        return
      raise
    raise Wrong("rows were broadcast in silence")

  def mesh_rows(trial: Trial) -> None:
    import jax

    unequal_rows(trial, {"mesh": jax.make_mesh((1,), ("data",))})

  def mode(trial: Trial, name: str, policy: str) -> None:
    import jax

    modes = {
      "checking_leaks": jax.checking_leaks,
      "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
      "debug_nans": lambda: jax.debug_nans(True),
      "disable_jit": jax.disable_jit,
      "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    }
    plain = _trained(_step(policy), 3)
    with modes[name]():
      found = _trained(_step(policy), 3)
    if any(abs(a - b) > 1e-2 * abs(b) for a, b in zip(found, plain, strict=True)):
      raise Wrong(f"losses {found}, without it {plain}")

  def policies(trial: Trial) -> None:
    import dataclasses

    import jax
    import jmp

    import mpjax

    base, strict = mpjax.get_policy("fp16"), mpjax.get_policy({"base": "fp16", "loss_scaling": 512.0})
    if (
      base == strict or strict != mpjax.get_policy(str(strict)) or hash(strict) != hash(copy.deepcopy(strict))
    ):
      raise Wrong("policies that differ are equal, or equal ones are not")
    seen: list[Any] = []
    traced = jax.jit(lambda x, policy: (seen.append(policy), x)[1], static_argnums=1)
    others = [field for field in dataclasses.fields(base) if field.name not in ("name", "reason")]
    for policy in (base, strict, mpjax.get_policy("fp16")):
      traced(1.0, policy)
    if len(seen) != 2:
      raise Wrong(f"{len(seen)} traces for two policies of {len(others)} fields")
    plain = jmp.get_policy("params=float32,compute=float16,output=float32")
    if base == plain or plain == base:
      raise Wrong("equal to jmp's policy, with another hash")

  names = ("checking_leaks", "strict promotion", "debug_nans", "disable_jit", "rank promotion")
  return {
    "unequal rows, accumulate=2": lambda trial: unequal_rows(trial, {"accumulate": 2}),
    "unequal rows on a mesh": mesh_rows,
    "policies as static arguments": policies,
    **each(mode, {f"{name} under {policy}": (name, policy) for name in names for policy in ("fp16", "bf16")}),
  }
