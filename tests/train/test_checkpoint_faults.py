"""Checkpoints that are damaged, cannot be written, or come back on other devices and processes."""

import contextlib
import functools
import gc
import json
import pathlib
import resource
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.cli import main
from mpjax.step import TrainState
from mpjax.train import CheckpointError

# Checksums are written nowhere by themselves.
from mpjax.train._checksums import examine
from mpjax.train.checkpoints import Checkpoints, quiet
from tests.train._runs import raises_one_line, refused, write_line

ROOT = pathlib.Path(__file__).parents[2]
# Orbax drops the reads that are under way when another one fails: Python says so whenever it collects them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
DTYPES = ["float32", "bfloat16", "float8_e5m2", "int8", "bool", "complex64"]


def make_state(seed):
  """A state with big and small arrays, of several dtypes, and keys."""
  key = jax.random.key(seed)
  big, half = np.random.default_rng(seed).normal(size=(64, 64)), np.arange(24) + seed
  params = {"big": jnp.asarray(big, jnp.float32), "half": jnp.asarray(half.astype(jnp.bfloat16))}
  counters = {"seen": jnp.asarray(np.arange(8) > seed), "keys": jax.random.split(key, 8)}
  return TrainState(jnp.int32(seed), params, counters, optax.adam(1e-3).init(params), rng=key)


def abstract(state, mesh=None, *axes):
  """Like `state`: on the first device, or over a mesh, split where the axis divides the first dimension."""
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  def of(x):
    divides = mesh is not None and x.ndim and x.shape[0] % mesh.size == 0
    sharding = (
      one if mesh is None else NamedSharding(mesh, PartitionSpec(*axes) if divides else PartitionSpec())
    )
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(of, jax.eval_shape(lambda: state))


def bits(tree):
  plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  return [(x.dtype, x.shape, np.asarray(plain(x)).tobytes()) for x in jax.tree.leaves(tree)]


@functools.cache
def bits_of_step(step):
  return bits(make_state(step))


def save(folder, *steps):
  checkpoints = Checkpoints(folder, keep=5)
  for step in steps:
    save_step(checkpoints, step)
  checkpoints.close()


def save_step(checkpoints, step):
  loop = {"fingerprint": "f", "last": {"loss": 1 / step}}
  checkpoints.save(step, make_state(step), {"row": step, "seen": (1, 2)}, loop, 1.0 * step)


def resume(folder):
  """What a run resumes from, which is exactly what was saved."""
  checkpoints = Checkpoints(folder, keep=5)
  try:
    resumed = checkpoints.restore_latest(abstract(make_state(0)))
  finally:
    checkpoints.close()
  assert bits(resumed.state) == bits_of_step(resumed.step)
  assert resumed.data == {"row": resumed.step, "seen": [1, 2]}
  assert resumed.loop == {"fingerprint": "f", "last": {"loss": 1 / resumed.step}}
  return resumed


def files_of(folder):
  return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(autouse=True, scope="module")
def _collect_dropped_reads():
  """While this module's filter holds, and not in the middle of another module's test."""
  yield
  gc.collect()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A folder with checkpoints of steps 2 and 4, which no test may change."""
  folder = tmp_path_factory.mktemp("saved") / "checkpoints"
  save(folder, 2, 4)
  return folder


@pytest.fixture
def folder(saved, tmp_path):
  """A copy of `saved`."""
  return shutil.copytree(saved, tmp_path / "run" / "checkpoints")


def largest_file(folder):
  return max(folder.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())


def truncate(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def swap_halves(path):
  data = path.read_bytes()
  path.write_bytes(data[len(data) // 2 :] + data[: len(data) // 2])


def check_damage_to_every_file(saved, folder, damage):
  """Damages each file of a checkpoint by itself: that is noticed, or does no harm."""
  noticed = set()
  for i, file in enumerate(files_of(saved / "4")):
    run = folder / str(i)
    shutil.copytree(saved, run / "checkpoints")
    damage(run / "checkpoints" / "4" / file)
    resumed = resume(run / "checkpoints")
    if resumed.step == 2:
      noticed.add(file.parts[0] if file.parts[0] != "state" else file.parts[1])
      (line,) = resumed.unfit
      assert line.startswith("the checkpoint of step 4 is damaged: ")
      assert file.parts[0] in line
    else:
      assert (resumed.step, resumed.unfit) == (4, [])
  assert noticed >= {"record", "_METADATA", "ocdbt.process_0"}


def test_a_flipped_bit_in_any_file_is_noticed_or_does_no_harm(saved, tmp_path):
  check_damage_to_every_file(saved, tmp_path, flip)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, swap_halves, pathlib.Path.unlink])
def test_damage_to_any_file_is_noticed_or_does_no_harm(saved, tmp_path, damage):
  check_damage_to_every_file(saved, tmp_path, damage)


def test_a_missing_part_is_noticed_and_a_flipped_bit_of_a_parameter_named_by_its_path(saved, tmp_path):
  for part in ("state", "record"):
    folder = shutil.copytree(saved, tmp_path / part / "checkpoints")
    shutil.rmtree(folder / "4" / part)
    assert resume(folder).step == 2, part
  folder = shutil.copytree(saved, tmp_path / "flipped" / "checkpoints")
  flip(largest_file(folder / "4"))
  assert resume(folder).unfit[0].split(": ")[1] == "state/params/big"


def test_a_step_whose_checkpoint_was_damaged_is_saved_again(folder):
  truncate(folder / "4" / "record" / "metadata")
  assert resume(folder).step == 2
  checkpoints = Checkpoints(folder, keep=5)
  assert checkpoints.restore_latest(abstract(make_state(0))).step == 2
  save_step(checkpoints, 4)
  checkpoints.close()
  assert resume(folder).step == 4


def test_without_a_good_checkpoint_nothing_is_changed(folder):
  truncate(folder / "2" / "record" / "metadata")
  flip(folder / "4" / "record" / "metadata")
  before = {file: (folder / file).read_bytes() for file in files_of(folder)}
  words = ["no checkpoint in ", "of step 4 is damaged: record: ", "of step 2 is damaged: record: ", "copy"]
  raises_one_line(CheckpointError, words, resume, folder)
  assert {file: (folder / file).read_bytes() for file in files_of(folder)} == before
  assert [path.name for path in folder.parent.iterdir()] == ["checkpoints"]


def test_checkpoints_of_another_state_are_named(folder):
  checkpoints = Checkpoints(folder)
  like = abstract(make_state(0))
  other = like.replace(params=like.params | {"big": jax.ShapeDtypeStruct((64, 32), jnp.float32)})
  words = ["params/big is float32[64,64] in ", "float32[64,32] in this run"]
  raises_one_line(CheckpointError, words, checkpoints.restore_latest, other)
  checkpoints.close()
  assert resume(folder).step == 4


def test_checksums_are_those_of_bits_and_places_under_every_sharding():
  mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
  places = [
    NamedSharding(mesh, PartitionSpec(*spec))
    for spec in ((), ("fsdp", "tensor"), (("fsdp", "tensor"),), (None, "fsdp"))
  ]
  for dtype in DTYPES:
    rng = np.random.default_rng(0)
    array = (rng.normal(size=(16, 8)) * 9 * rng.integers(0, 2, (16, 8))).astype(jnp.dtype(dtype))
    found = set(
      examine([jnp.asarray(array), *(jax.device_put(array, place) for place in places)]).leaves.values()
    )
    assert len(found) == 1, dtype
    moved, changed = array.copy(), array.copy()
    moved[3], moved[4] = array[4], array[3]
    changed.reshape(-1).view(np.uint8)[77] ^= 1
    assert len(found | set(examine([jnp.asarray(moved), jnp.asarray(changed)]).leaves.values())) == 3, dtype
  tree = {"key": jax.random.key(1), "count": jnp.int32(3), "none": None, "empty": jnp.zeros((0, 4))}
  leaves = examine(tree).leaves
  assert leaves.keys() == {"key", "count", "empty"}
  changed = examine({**tree, "key": jax.random.key(2), "count": jnp.uint32(3)}).leaves
  assert [name for name in leaves if leaves[name] != changed[name]] == ["count", "key"]


def test_a_state_comes_back_bitwise_on_other_meshes(tmp_path):
  state = make_state(3)
  meshes = [
    jax.make_mesh((4, 2), ("fsdp", "tensor")),
    None,
    jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2]),
  ]
  for step, mesh in enumerate(meshes):
    like = abstract(state, mesh, "fsdp")
    checkpoints = Checkpoints(tmp_path)
    if step:
      state = checkpoints.restore(step - 1, like).state
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, like))
    assert bits(state) == bits(make_state(3))
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, like)
    checkpoints.save(step, state, {}, {}, None)
    checkpoints.close()


@contextlib.contextmanager
def full_disk():
  """Yields a function that, until the end, lets no file grow beyond a size: what a full disk does to a process."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failed_write_is_told_at_the_next_save_and_leaves_the_last_good_one(folder):
  checkpoints = Checkpoints(folder)
  values = np.random.default_rng(0).normal(size=(32, 64, 1024)).astype(np.float32)
  many = {str(i): jnp.asarray(x) for i, x in enumerate(values)}
  with full_disk() as fill:
    fill(3 * 2**20)
    checkpoints.save(6, make_state(6).replace(params=many), {}, {}, None)
    told = rf"^the checkpoint of step 6 cannot be written in {folder}: File too large; the newest checkpoint is of step 4 .*$"
    with pytest.raises(CheckpointError, match=told):
      checkpoints.save(8, make_state(8), {}, {}, None)
    checkpoints.close()
  assert {path.name for path in folder.iterdir() if path.name.isdecimal()} == {"2", "4"}
  assert resume(folder).step == 4
  assert {path.name for path in folder.iterdir()} == {"2", "4"}


def test_a_run_whose_last_checkpoint_fails_is_not_finished(tmp_path, monkeypatch, capsys):
  run, save = tmp_path / "run", Checkpoints.save
  # The weights alone are larger than what is left on the disk.
  arguments = [*write_line(tmp_path), "model.columns=30000", "train.steps=8", f"out={run}"]
  with full_disk() as fill, monkeypatch.context() as patch:

    def full_at_the_end(self, step, *rest):
      if step == 8:
        self.wait()  # for the checkpoint of step 4
        fill(60000)
      return save(self, step, *rest)

    patch.setattr(Checkpoints, "save", full_at_the_end)
    words = [
      "the checkpoint of step 8 cannot be written in ",
      "File too large; the newest checkpoint is of step 4 in ",
    ]
    refused(["train", *arguments], words, capsys, status=4)
  assert not (run / "summary.json").exists()
  assert main(["train", *arguments]) == 0
  assert json.loads((run / "summary.json").read_text())["steps"] == 8


def test_reads_that_orbax_gave_up_are_not_said_and_all_else_is(monkeypatch):
  said = []
  monkeypatch.setattr(sys, "unraisablehook", said.append)
  dropped = lambda text, of=None: types.SimpleNamespace(exc_value=RuntimeError(text), object=of)
  closed, own, other = (
    dropped("Event loop is closed"),
    dropped("Event loop is closed", said.append),
    dropped("no"),
  )
  with quiet():
    for each in (closed, own, other):
      sys.unraisablehook(each)
  assert said == [own, other]
  sys.unraisablehook(closed)
  assert said == [own, other, closed]
