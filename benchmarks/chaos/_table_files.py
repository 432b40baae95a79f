"""Rows of the fault table about files that stand still: checkpoints, metrics, configs, links, locks."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Callable

from benchmarks.chaos._contents import contents
from benchmarks.chaos._damage import METRICS, WAYS, damage_metrics
from benchmarks.chaos._run import STEPS, arguments_of, mesh_of
from benchmarks.chaos._starts import checkpoints, newest_checkpoint
from benchmarks.chaos._trial import (
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
  says,
)

ROOT = pathlib.Path(__file__).parents[2]
OTHER_CONFIGS: tuple[str, ...] = ("policy=bf16", "policy=fp32", "seed=1", "model.dim=32", "model.layers=2")
OTHER_CONFIGS += ("data.batch_size=8", "data.seq_len=32", "optimizer.learning_rate=1e-3")
OTHER_CONFIGS += ("optimizer.name=lion", "train.accumulate=2", "optimizer.schedule=constant")


def rows(prepared: Prepared) -> list[Row]:
  """Returns the rows about files."""
  like_twin = "the end of an undisturbed run, bit for bit"
  or_refused = f"{like_twin}; or one line, and that end once it is mended"
  return [
    Row("each file of the newest checkpoint damaged", like_twin, _checkpoint_files(prepared)),
    Row("strange entries in `checkpoints/`", or_refused, _entries()),
    Row("a checkpoint of another run put in", f"notices, and {or_refused}", _other_runs()),
    Row("`metrics.jsonl` damaged", f"tells, and {like_twin}, but for records destroyed", _metrics()),
    Row("`config.yaml` damaged", "status 2, nothing changed; mended, the same end", _configs()),
    Row("`summary.json` damaged", f"tells, and {or_refused}", _summaries()),
    Row("resumed with another config", "status 2, nothing changed; then the same end", _overrides()),
    Row("links in a run directory, and as `out`", f"the target untouched, {or_refused}", _links()),
    Row("several starts at once, a lock deleted", "one goes on (0), others stop (2, 4); same end", _starts()),
    Row("read-only folders", "status 2 or 4 in one line; same end when mended", _read_only()),
    Row("resumed on another mesh or version", "records kept; loss within 1% of the twin's", _meshes()),
  ]


def _checkpoint_files(prepared: Prepared) -> dict[str, Case]:
  newest = checkpoints(prepared.stopped)[-1]
  files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
  ways = ("deleted", "emptied", "halved", *(f"bit flipped, {i}" for i in (1, 2, 3)), "exchanged", "a folder")
  return each(_damaged, {f"{file} {way}": (file, way) for file in files for way in ways})


def _damaged(trial: Trial, file: pathlib.Path, way: str) -> str:
  *_, before, newest = checkpoints(trial.stopped())
  path = newest / file
  if way == "exchanged":
    # Files of arrays are named at random: the one at the same place in its folder stands in for them.
    of = lambda folder: sorted(x for x in (folder / file.parent).iterdir() if x.is_file())
    there = (
      before / file if (before / file).exists() else of(before)[of(newest).index(path) % len(of(before))]
    )
    shutil.copy(there, path)
  elif way == "a folder":
    path.unlink()
    path.mkdir()
  else:
    WAYS["with a bit flipped" if "flipped" in way else way](path, trial.chance)
  said = trial.goes_on()
  return "from the one before" if "is damaged: " in said else "not needed"


def _entries() -> dict[str, Case]:
  def a_file(name: str) -> Callable[[pathlib.Path, pathlib.Path], object]:
    return lambda folder, newest: (folder / name).write_text("x")

  made: dict[str, Callable[[pathlib.Path, pathlib.Path], object]] = {
    "a file of a later step's name": a_file("50"),
    "a file of an earlier step's name": a_file("30x"),
    "a note": a_file("notes.txt"),
    "an empty folder of a later step's name": lambda folder, newest: (folder / "50").mkdir(),
    "a folder without a step's name": lambda folder, newest: (folder / "latest").mkdir(),
    "the newest under a later name": lambda folder, newest: newest.rename(folder / "55"),
    "a copy of the newest under a later name": lambda folder, newest: shutil.copytree(
      newest, folder / "1000"
    ),
    "a copy with a zero before its name": lambda f, newest: shutil.copytree(newest, f / f"000{newest.name}"),
    "a copy under a negative name": lambda folder, newest: shutil.copytree(newest, folder / "-5"),
    "a temporary folder of orbax": lambda f, newest: shutil.copytree(newest, f / "50.orbax-checkpoint-tmp"),
    "an old temporary folder": lambda f, newest: (f / "50.orbax-checkpoint-tmp-17").mkdir(),
    "a link under a later name": lambda folder, newest: (folder / "50").symlink_to(newest),
    "a dangling link": lambda folder, newest: (folder / "50").symlink_to("/nowhere"),
  }

  def with_entry(trial: Trial, make: Callable[[pathlib.Path, pathlib.Path], object]) -> str:
    folder = trial.stopped() / "checkpoints"
    newest = checkpoints(trial.out)[-1]
    before = {path.name for path in folder.iterdir()}
    make(folder, newest)

    def mend() -> None:
      for path in folder.iterdir():
        if path.name not in before:
          path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)

    return trial.goes_on_or_is_refused(mend)

  return each(with_entry, {name: (make,) for name, make in made.items()})


def _other_runs() -> dict[str, Case]:
  def put_in(trial: Trial, override: str) -> str:
    other = trial.folder / "other"
    trial.train(override, out=other)
    there = trial.stopped() / "checkpoints" / "50"
    shutil.copytree(other / "checkpoints" / "50", there)
    team = trial.start()
    statuses, said = trial.end(team, (0, 2, 4))
    says(said, "another run", "error: ")
    if statuses != [0]:
      shutil.rmtree(there)
      trial.train()
    trial.is_as_its_twin()
    return "set aside" if statuses == [0] else "refused, went on when mended"

  others = ("policy=fp32", "policy=bf16", "seed=7", "optimizer.learning_rate=0.001", "model.dim=32")
  return each(put_in, {override: (override,) for override in (*others, "optimizer.name=lion")})


def _metrics() -> dict[str, Case]:
  def damaged(trial: Trial, way: str) -> None:
    damage = damage_metrics(trial.stopped(), trial.chance, way)
    assert damage is not None
    said = trial.goes_on(destroyed=damage.destroyed)
    last = newest_checkpoint(trial.prepared.stopped)
    if not damage.destroyed or any(step <= last for step in damage.destroyed):
      says(said, "no record", "not a record", "not records", "are missing")

  def a_folder(trial: Trial) -> str:
    file = trial.stopped() / "metrics.jsonl"
    content = file.read_bytes()
    file.unlink()
    file.mkdir()

    def mend() -> None:
      file.rmdir()
      file.write_bytes(content)

    return trial.goes_on_or_is_refused(mend)

  return {**each(damaged, {way: (way,) for way in METRICS}), "a folder": a_folder}


def _put(path: pathlib.Path, content: bytes | None) -> None:
  """Makes a path a file of some bytes; an empty folder for `None`."""
  path.unlink(missing_ok=True)
  path.mkdir() if content is None else path.write_bytes(content)


def _mended(path: pathlib.Path, content: bytes) -> None:
  if path.is_dir():
    path.rmdir()
  path.write_bytes(content)


def _configs() -> dict[str, Case]:
  changes: dict[str, Callable[[bytes], bytes | None]] = {
    "emptied": lambda text: b"",
    "halved": lambda text: text[: len(text) // 2],
    "no YAML": lambda text: b"{[",
    "a list": lambda text: b"[1, 2]\n",
    "zeros": lambda text: b"\0" * len(text),
    "of another seed": lambda text: text.replace(b"seed: 0", b"seed: 1"),
    "a folder": lambda text: None,
  }

  def damaged(trial: Trial, change: Callable[[bytes], bytes | None]) -> None:
    file = trial.stopped() / "config.yaml"
    content = file.read_bytes()
    _put(file, change(content))
    trial.refused(lambda: _mended(file, content))

  def deleted(trial: Trial) -> None:
    file = trial.stopped() / "config.yaml"
    content = file.read_bytes()
    file.unlink()
    trial.refused(lambda: file.write_bytes(content))

  return {"deleted": deleted, **each(damaged, {name: (change,) for name, change in changes.items()})}


def _summaries() -> dict[str, Case]:
  texts: dict[str, bytes | None] = {"emptied": b"", "a list": b"[]", "an object": b"{}", "a number": b"3"}
  texts |= {
    "of few keys": b'{"steps": 60}',
    "of another form": b'{"steps": 60, "final_loss": 4.09, "time_s": 3}',
    "halved": b'{"final_loss": 4.09',
    "zeros": b"\0" * 99,
    "a folder": None,
  }

  def damaged(trial: Trial, content: bytes | None) -> str:
    file = trial.finished() / "summary.json"
    good = file.read_bytes()
    _put(file, content)
    return trial.goes_on_or_is_refused(lambda: _mended(file, good))

  return each(damaged, {name: (content,) for name, content in texts.items()})


def _overrides() -> dict[str, Case]:
  def resumed(trial: Trial, override: str) -> None:
    trial.stopped()
    trial.refused(lambda: None, override)

  return each(resumed, {override: (override,) for override in OTHER_CONFIGS})


def _links() -> dict[str, Case]:
  inside: tuple[str, ...] = (
    "config.yaml",
    "metrics.jsonl",
    ".lock",
    "checkpoints",
    "tensorboard",
    "damaged",
    "train.log",
  )
  inside += ("summary.json", "checkpoints/NEWEST", "checkpoints/NEWEST/state")
  inside += ("checkpoints/NEWEST/record/metadata", "tensorboard/EVENTS")

  def in_it(trial: Trial, place: str) -> str:
    trial.stopped()
    events = next((trial.out / "tensorboard").iterdir()).name
    path = trial.out / place.replace("NEWEST", checkpoints(trial.out)[-1].name).replace("EVENTS", events)
    victim = trial.folder / "victim"
    if path.exists():
      path.rename(victim)
    elif place == "damaged":
      victim.mkdir()
    else:
      victim.write_text("of another")
    if place in ("train.log", "summary.json"):
      os.truncate(victim, 0)
    path.symlink_to(victim)
    before = digest(victim)
    if place in ("damaged", "train.log"):  # these are written only when there is something to put in
      damage_metrics(trial.out, trial.chance, "a note")

    def mend() -> None:
      _untouched(victim, before)
      path.unlink()
      if place not in ("damaged", "train.log", "summary.json"):
        shutil.copytree(victim, path) if victim.is_dir() else shutil.copy(victim, path)

    came_to = trial.goes_on_or_is_refused(mend)
    _untouched(victim, before)
    return came_to

  def out_of_run(trial: Trial) -> None:
    trial.stopped().rename(trial.folder / "target")
    trial.out.symlink_to(trial.folder / "target")

    def mend() -> None:
      trial.out.unlink()
      (trial.folder / "target").rename(trial.out)

    trial.goes_on_or_is_refused(mend)

  def out_of_another(trial: Trial) -> None:
    target = trial.folder / "target"
    target.mkdir()
    (target / "thesis.txt").write_text("x")
    trial.out.symlink_to(target)
    before = digest(target)
    trial.train(statuses=(2,))
    _untouched(target, before)

  def dangling(trial: Trial) -> None:
    trial.out.symlink_to(trial.folder / "nowhere")
    trial.goes_on_or_is_refused(trial.out.unlink)

  outs = {"to a run": out_of_run, "to another's folder": out_of_another, "to nothing": dangling}
  return each(in_it, {place: (place,) for place in inside}) | {
    f"`out` a link {to}": x for to, x in outs.items()
  }


def _untouched(victim: pathlib.Path, before: dict[str, tuple[int, bytes]]) -> None:
  if digest(victim) != before:
    raise Wrong("the target of the link is changed")


def _starts() -> dict[str, Case]:
  def at_once(trial: Trial, begun: bool) -> None:
    if begun:
      trial.stopped()
    teams = [trial.start() for _ in range(4)]
    statuses = sorted(trial.end(team, (0, 2))[0][0] for team in teams)
    if statuses != [0, 2, 2, 2]:
      raise Wrong(f"four starts at once end with {statuses}")
    trial.is_as_its_twin()

  def without_lock(trial: Trial, until: int) -> None:
    first = trial.start()
    first.wait_until(lambda: first.has_logged(5))
    first.signal(signal.SIGSTOP)
    (trial.out / ".lock").unlink()
    second = trial.start()
    second.wait_until(lambda: second.has_logged(until))
    first.signal(signal.SIGCONT)
    statuses = [trial.end(team, (0, 2, 4))[0][0] for team in (first, second)]
    if 0 not in statuses:
      trial.train()
    trial.is_as_its_twin()

  starts = {"four starts of a new run": (False,), "four starts of a begun run": (True,)}
  wakes = {f"lock deleted, the first wakes at step {until}": (until,) for until in (20, 45, STEPS + 1)}
  return each(at_once, starts) | each(without_lock, wakes)


def _read_only() -> dict[str, Case]:
  def at_start(trial: Trial, place: str) -> str:
    trial.stopped()
    folder = trial.out / place
    folder.chmod(0o555)
    try:
      team = trial.start(before=bound_by_permissions)
      statuses, _ = trial.end(team, (0, 2, 4))
    finally:
      folder.chmod(0o755)
    if statuses != [0]:
      trial.train()
    trial.is_as_its_twin()
    return "went on" if statuses == [0] else f"status {statuses[0]}"

  def no_place(trial: Trial) -> None:
    parent = trial.folder / "parent"
    parent.mkdir()
    parent.chmod(0o555)
    trial.train(out=parent / "run", statuses=(2, 4), before=bound_by_permissions)

  def in_mid_run(trial: Trial, place: str) -> str:
    team = trial.start()
    team.wait_until(lambda: team.has_logged(12))
    team.signal(signal.SIGSTOP)
    folder = trial.out / place
    done = subprocess.run(["chattr", "+i", str(folder)], capture_output=True, check=False)
    try:
      team.signal(signal.SIGCONT)
      if done.returncode:
        raise NotHere("no folder can be made immutable")
      statuses, _ = trial.end(team, (0, 4))
    finally:
      subprocess.run(["chattr", "-i", str(folder)], capture_output=True, check=False)
    if statuses != [0]:
      trial.train()
    trial.is_as_its_twin()
    return "went on" if statuses == [0] else f"status {statuses[0]}"

  places = {".": "the run directory", "checkpoints": "`checkpoints/`", "tensorboard": "`tensorboard/`"}
  return {
    **each(at_start, {f"{name} at the start": (place,) for place, name in places.items()}),
    "the folder above it": no_place,
    **each(in_mid_run, {f"{name} in mid-run": (place,) for place, name in places.items()}),
  }


def _meshes() -> dict[str, Case]:
  def moved(trial: Trial, before: tuple[str, int, int], after: tuple[str, int, int]) -> None:
    """Trains to step 40 in one way and on in another: axis, devices, processes."""
    of = lambda way: {"axis": way[0], "devices": way[1], "processes": way[2]}
    team = trial.start(**of(before))
    team.wait_until(lambda: team.has_logged(41))
    team.signal(signal.SIGTERM)
    trial.end(team, (143,))
    trial.train(**of(after))
    _near(trial)

  def from_older(trial: Trial) -> None:
    if not trial.prepared.older:
      raise NotHere("needs --older")
    command = [trial.prepared.older, "-m", "mpjax", "train", *arguments_of(trial.prepared.example)]
    command += [
      *mesh_of("data", False)[0],
      f"out={trial.out}",
      "train.steps=40",
      "optimizer.schedule_steps=60",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    judge([done.returncode], done.stdout + done.stderr, (0,))
    trial.train("optimizer.schedule_steps=60")
    _near(trial)

  one, two = ("data", 1, 1), ("data", 1, 2)
  data, fsdp = ("data", 2, 1), ("fsdp", 2, 1)
  changes = {
    "data=2 to fsdp=2": (data, fsdp),
    "fsdp=2 to data=2": (fsdp, data),
    "data=2 to one device": (data, one),
    "one device to fsdp=2": (one, fsdp),
    "two processes to one": (two, one),
    "one process to two": (one, two),
    "two processes to fsdp=2": (two, fsdp),
  }
  return each(moved, changes) | {"from an older JAX": from_older}


def _near(trial: Trial) -> None:
  """Raises `Wrong` unless a run has all records and an evaluation loss near its twin's."""
  found, twin = contents(trial.out, trial.folder), trial.prepared.twin
  if found["records"].keys() != twin["records"].keys():
    raise Wrong(f"{len(found['records'])} records of {len(twin['records'])}")
  losses = [run["summary"]["eval_loss"] for run in (found, twin)]
  if abs(losses[0] / losses[1] - 1) > 0.01:
    raise Wrong(f"the evaluation loss is {losses[0]}, that of the twin {losses[1]}")
