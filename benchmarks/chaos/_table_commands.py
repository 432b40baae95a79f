"""Rows of the fault table about wrong configs and arguments of every command, and about exports."""

from __future__ import annotations

import os
import resource
import signal
import stat

from benchmarks.chaos import _mutations
from benchmarks.chaos._starts import OUT_OF_TIME, limit_time
from benchmarks.chaos._trial import (
  TIMEOUT_S,
  Case,
  NotHere,
  Prepared,
  Row,
  Trial,
  Wrong,
  bound_by_permissions,
  digest,
  each,
  judge,
)

MUTATIONS, SEED = 120, 49
TOO_LONG = "a" * 300  # for the name of a file
MEMORY = 24 << 30  # of addresses, for configs that ask for more than there is


def rows(prepared: Prepared) -> list[Row]:
  """Returns the rows about commands."""
  line = "0, or 2 in one line; no traceback"
  mutations = each(_mutation, {str(i): (i,) for i in range(MUTATIONS)})
  return [
    Row("configs with some keys, values or characters changed", "trains, 2 or 3 in one line", mutations),
    Row("configs with numbers at the end of their range", "trains, or 2 to 5 in one line", _extremes()),
    Row("arguments of `plan`, `explain`, `numerics`, `tune`", line, _arguments(prepared)),
    Row("exports: arguments, places, permissions", f"{line}; only regular files replaced", _exports()),
  ]


def _mutation(trial: Trial, number: int) -> str:
  chance = type(trial.chance)(SEED * 1000 + number)
  file, overrides, told = _mutations.mutated(trial.folder, trial.prepared.configs, chance)
  outcome, said = _mutations.tried(trial.folder, file, overrides)
  if outcome == _mutations.SLOW:
    raise NotHere(outcome)
  if outcome not in _mutations.RIGHT.values():
    raise Wrong(f"{outcome}: {told} {overrides}; it said: {said[-1500:]}")
  return outcome


_INTEGERS = (0, 2**31 - 1, 2**32, 2**63, 10**30)
_FLOATS = ("0", "1e-45", "3.5e38", "1e308", ".nan")
_INTEGER_KEYS: tuple[str, ...] = (
  "seed",
  "model.dim",
  "model.heads",
  "data.seq_len",
  "data.batch_size",
  "data.eval_batches",
)
_INTEGER_KEYS += ("optimizer.warmup_steps", "optimizer.schedule_steps", "train.steps", "train.accumulate")
_INTEGER_KEYS += ("train.log_every", "train.eval_every", "train.checkpoint_every", "train.max_skips")
_INTEGER_KEYS += ("mesh.data", "mesh.fsdp", "policy.loss_scaling.growth_interval")
_FLOAT_KEYS: tuple[str, ...] = (
  "optimizer.learning_rate",
  "optimizer.weight_decay",
  "optimizer.clip_norm",
  "model.dropout",
)
_FLOAT_KEYS += ("data.valid_fraction", "distributed.hang_timeout_s", "distributed.heartbeat_timeout_s")
_FLOAT_KEYS += tuple(
  f"policy.loss_scaling.{name}" for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale")
)
_MORE: tuple[str, ...] = ("model.layers=0", "model.layers=3000", "data.workers=-1", "data.workers=2147483648")
_NO_EFFECT = ("growth_factor=1.00000001", "backoff_factor=0.9999999999999999")  # both are 1 as float32
_MORE += tuple(f"policy.loss_scaling.{setting}" for setting in _NO_EFFECT)
_MORE += (f"train.init_from={TOO_LONG}", f"out={TOO_LONG}", "out=", "out=/proc/x", "out=/dev/null")
_MORE += ("out=/", "out=nodir/deep/x")


def _extremes() -> dict[str, Case]:
  settings = [f"{key}={value}" for key in _INTEGER_KEYS for value in _INTEGERS]
  settings += [f"{key}={value}" for key in _FLOAT_KEYS for value in _FLOATS] + list(_MORE)
  # A seed that is cut to 32 bits would be another one's.
  refused = ("seed=4294967296", "seed=9223372036854775808", *_NO_EFFECT, "out=/")

  def limits(_: int) -> None:
    limit_time(25)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

  def tried(trial: Trial, setting: str) -> str:
    team = trial.start(
      *(f"train.{key}=3" for key in ("steps", "eval_every", "checkpoint_every")),
      setting,
      before=limits,
      own={0: [setting]} if setting.startswith("out=") else {},
    )
    team.wait_until(lambda: team.has_logged(3), TIMEOUT_S)
    team.signal(signal.SIGTERM)  # some would train for ever
    statuses = team.statuses(TIMEOUT_S)
    if statuses == [OUT_OF_TIME] and "Traceback (most recent call last)" not in team.said():
      raise NotHere("no end within 25 s of processor time")
    judge(statuses, team.said(), (2,) if setting.endswith(refused) else (0, 2, 3, 4, 5, 143))
    return {0: "trained", 143: "trained until stopped"}.get(statuses[0], "refused in one line")

  return each(tried, {setting[:60]: (setting,) for setting in settings})


_SMALL: tuple[str, ...] = (
  "model.layers=1",
  "model.dim=16",
  "model.heads=2",
  "data.seq_len=16",
  "data.batch_size=4",
)
_SMALL += ("data.eval_batches=1",)
_FILES = ("/", "/proc/x", "nodir/x", TOO_LONG, "/dev/full/x")


# Wrong arguments by command; "" is none, and has to end with 0.
_COMMON = """policy= policy=, policy=bf16,,fp16 policy=bf16,bf61 policy={base:fp16 model.dim=-1 x=1 nonsense
  --nonsense data.path=/nowhere --table= --table=nothing train.steps="""
_COMMON += f" --plugin={TOO_LONG}"
_TARGETS = "target= target=h300 target=v5e:0x0 target=v5e:2x target=v5e:9999x9999 target=h200:-1"
_COUNTS = " ".join(f"{key}={x}" for key in ("batches", "steps") for x in ("0", "-1", "x", "1e30"))
_PLACES = "checkpoint=/nowhere checkpoint=/ checkpoint=RUN/checkpoints/999 checkpoint=RUN/config.yaml"
_PLACES += f" checkpoint={TOO_LONG}"
_FIT = " ".join(f"--fit,--memory={size}" for size in ("0", "-1", "xGB", "1e400GB", "nan", "1e-9GB"))
_FIT += " --fit,--multiple=0 --fit,--multiple=-3 --fit,--cheapest"
_COMMANDS = {
  "explain": ([], _COMMON, ()),
  "plan": (["--analytic"], f"{_COMMON} {_TARGETS} {_FIT}", ("--json", "--picture")),
  "numerics": (
    ["steps=0", "--no-advice", "batches=1"],
    f"{_COMMON} {_COUNTS} {_PLACES} keep=2 keep=nan --hunt=/nowhere.npz --by=colour",
    ("--html", "--json", "--apply"),
  ),
  "tune": (
    ["steps=0", "--minutes=0.01", "batches=1"],
    f"{_COMMON} {_COUNTS} {_PLACES} {_TARGETS} --tolerance=-1 --tolerance=nan --tolerance=noise "
    "--minutes=nan --minutes=-1 --prove=-1 --seeds=0 --for=fame",
    ("--out", "--json"),
  ),
}


def _arguments(prepared: Prepared) -> dict[str, Case]:
  def run(trial: Trial, command: str, argument: str) -> str:
    words = argument.replace("RUN", str(trial.prepared.finished)).split(
      ",--" if argument[:5] == "--fit" else None
    )
    small = (*_SMALL, "data.kind=text", f"data.path={prepared.finished.parent / 'text'}", "policy=bf16")
    words = ["--" * bool(i) + word for i, word in enumerate(words)]
    allowed = (0, 2, 4) if argument else (0,)
    status, _ = trial.command(command, "gpt_stdlib", *small, *_COMMANDS[command][0], *words, statuses=allowed)
    return f"status {status}"

  return each(
    run,
    {
      f"{command} {word[:40]}".strip(): (command, word)
      for command, (_, words, flags) in _COMMANDS.items()
      for word in ("", *words.split(), *(f"{flag}={file}" for flag in flags for file in _FILES))
    },
  )


def _exports() -> dict[str, Case]:
  wrong: tuple[str, ...] = (
    "dtype=",
    "dtype=int8",
    "dtype=bf16,fp16",
    "step=-1",
    "step=999",
    "step=last",
    "out=/",
    "out=.",
  )
  wrong += ("out=/proc/x", "out=nodir/x.st", f"out={TOO_LONG}", "x=1", "--nonsense")

  def export(trial: Trial, argument: str) -> None:
    trial.finished()
    trial.command("export", str(trial.out), argument, statuses=(2, 4))

  def good(trial: Trial, dtype: str) -> None:
    trial.finished()
    trial.command("export", str(trial.out), f"dtype={dtype}", "out=x.st", statuses=(0,))
    # An empty place is the usual one.
    trial.command("export", str(trial.out), f"dtype={dtype}", "out=", statuses=(0,))

  def not_regular(trial: Trial, kind: str) -> None:
    """Exports onto something that is not a regular file: that has to be there afterwards as it was."""
    trial.finished()
    place, victim = trial.folder / "x.st", trial.folder / "victim"
    victim.write_text("of another")
    if kind == "a device":
      try:
        os.mknod(place, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
      except OSError as error:
        raise NotHere(f"no device can be made: {error.strerror}") from error
    elif kind == "a named pipe":
      os.mkfifo(place)
    elif kind == "a link":
      place.symlink_to(victim)
    elif kind == "a dangling link":
      place.symlink_to("nowhere")
    else:
      place.mkdir()
    before, content = place.lstat(), digest(victim)
    trial.command("export", str(trial.out), f"out={place}", statuses=(0, 2, 4))
    after = place.lstat()
    if (after.st_mode, after.st_rdev, after.st_ino) != (before.st_mode, before.st_rdev, before.st_ino):
      raise Wrong(f"{kind} was replaced")
    if kind == "a link" and digest(victim) != content:
      raise Wrong("the target of the link is changed")

  def mode(trial: Trial, umask: int) -> None:
    trial.finished()
    trial.command("export", str(trial.out), "out=x.st", statuses=(0,), before=lambda: os.umask(umask))
    found = (trial.folder / "x.st").stat().st_mode & 0o777
    if found != 0o666 & ~umask:
      raise Wrong(f"its mode is {found:o} under umask {umask:o}")

  def replaced(trial: Trial) -> None:
    trial.finished()
    (trial.folder / "x.st").write_text("old")
    trial.command("export", str(trial.out), "out=x.st", statuses=(0,))
    if (trial.folder / "x.st").stat().st_size < 1000:
      raise Wrong("a regular file was not replaced")

  def full(trial: Trial) -> None:
    trial.finished()
    (trial.folder / "x.st").write_text("old")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    trial.command("export", str(trial.out), "out=x.st", statuses=(2, 4), before=limit)
    if (trial.folder / "x.st").read_text() != "old":
      raise Wrong("the old file is lost")

  def read_only(trial: Trial) -> None:
    trial.finished()
    folder = trial.folder / "closed"
    folder.mkdir(mode=0o555)
    trial.command(
      "export", str(trial.out), f"out={folder / 'x.st'}", statuses=(2, 4), before=bound_by_permissions
    )

  def no_run(trial: Trial, place: str) -> None:
    trial.command("export", place, statuses=(2, 4))

  kinds = ("a device", "a named pipe", "a link", "a dangling link", "a folder")
  return {
    **each(export, {argument[:40]: (argument,) for argument in wrong}),
    **each(good, {f"dtype={dtype}": (dtype,) for dtype in ("fp32", "bf16", "fp16")}),
    **each(not_regular, {f"onto {kind}": (kind,) for kind in kinds}),
    **each(mode, {f"under umask {umask:o}": (umask,) for umask in (0o022, 0o077, 0o002)}),
    "onto a regular file": replaced,
    "on a full disk": full,
    "into a read-only folder": read_only,
    **each(no_run, {f"of {place!r}": (place,) for place in ("/", "/nowhere", "/dev/null", TOO_LONG, "")}),
  }
