"""`scripts/train.py` in several processes on this machine: as one process trains, and through what ends one."""

import concurrent.futures
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import typing

import grain
import numpy as np
import pytest

from mpjax.cli import main
from mpjax.train._config import DataConfig
from mpjax.train.data import load_data
from mpjax.train.multiprocess import _first, _start
from tests._quick_compile import environment as quick_environment
from tests.train._own_config import PLUGIN, write_config
from tests.train._tiny_gpt import records

ROOT = pathlib.Path(__file__).parents[2]
OVERFLOWING = "policy={base: fp16, loss_scaling: {init_scale: 16777216, growth_interval: 5}}"
VIT = """
seed: 3
model: {kind: vit, dim: 16, layers: 1, heads: 2, patch: 4}
data: {kind: digits, batch_size: 8, eval_batches: 2}
optimizer: {learning_rate: 1e-2}
train: {steps: 12, log_every: 1, eval_every: 6, checkpoint_every: 2}
"""


class Group:
  """Processes of one run, one device each; `own` are further arguments by process."""

  def __init__(self, count, arguments, script="scripts/train.py", own=None, **environment):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **quick_environment(devices=1)}
    env |= {"PYTHONPATH": str(ROOT), **environment}
    self.processes = []
    for i in range(count):
      which = ["--coordinator", coordinator, "--num-processes", str(count), "--process-id", str(i)]
      line = [sys.executable, str(ROOT / script), *which, *arguments, *(own or {}).get(i, [])]
      pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
      self.processes.append(subprocess.Popen(line, env=env, **pipes))

  def end(self):
    """Exit statuses, what was written to stdout, and to stderr, without the lines of native code."""
    written = [map(own_lines, process.communicate(timeout=120)) for process in self.processes]
    return [p.returncode for p in self.processes], *map(list, zip(*written, strict=True))

  def signal_at(self, step, directory, signum, which):
    """Sends a signal to one process once the metrics of a step are there."""
    deadline = time.monotonic() + 120
    while last_step(directory) < step:
      assert all(p.poll() is None for p in self.processes), self.end()
      assert time.monotonic() < deadline
      time.sleep(0.01)
    self.processes[which].send_signal(signum)


def own_lines(text):
  """What mpjax wrote: JAX's runtime and its connections write to the same places."""
  native = re.compile(r"\[Gloo\]|[IWEF]\d{4} \d\d:")
  return "".join(line for line in text.splitlines(keepends=True) if not native.match(line))


@pytest.fixture
def start():
  """`Group`, none of whose processes outlives the test."""
  groups = []

  def started(*args, **options):
    groups.append(Group(*args, **options))
    return groups[-1]

  yield started
  for process in (process for group in groups for process in group.processes):
    process.kill()
    process.communicate()


def last_step(directory):
  file = directory / "metrics.jsonl"
  return max(map(int, re.findall(r'"step": (\d+),', file.read_text())), default=0) if file.exists() else 0


def curve(directory):
  keys = ("step", "loss", "loss_scale", "skipped_steps", "eval_loss")
  return [tuple(record.get(key) for key in keys) for record in records(directory)]


@pytest.mark.slow
def test_two_processes_train_as_one_with_two_devices_through_sigterm_to_one(start, tiny_gpt, tmp_path):
  options = [OVERFLOWING, "mesh.data=2", "train.steps=150", "train.accumulate=2", "train.eval_every=50"]
  arguments = [*tiny_gpt, *options, "train.checkpoint_every=20"]
  assert main(["train", *arguments, f"out={tmp_path / 'one'}"]) == 0
  run = start(2, [*arguments, f"out={tmp_path / 'run'}"])
  run.signal_at(45, tmp_path / "run", signal.SIGTERM, 1)
  statuses, shown, errors = run.end()
  assert statuses == [143, 143], errors
  step = int(re.fullmatch(r"SIGTERM: checkpoint of step (\d+) saved in .*\n", errors[0])[1])
  assert (tmp_path / "run" / "checkpoints" / str(step)).exists()
  assert last_step(tmp_path / "run") == step
  assert "2 x cpu (data 2), gradients cross in float32, in 2 processes" in shown[0]
  assert shown[1] == errors[1] == ""
  assert main(["train", *arguments, f"out={tmp_path / 'run'}"]) == 0
  expected = curve(tmp_path / "one")
  assert expected[-1][3] > 0  # steps were skipped
  assert curve(tmp_path / "run") == expected


@pytest.mark.slow
def test_two_processes_train_a_plugin_as_one_with_two_devices(start, tmp_path):
  arguments = [write_config(tmp_path, "linen"), "--plugin", PLUGIN, "mesh.data=2"]
  assert main(["train", *arguments, f"out={tmp_path / 'one'}"]) == 0
  statuses, _, errors = start(2, [*arguments, f"out={tmp_path / 'run'}"]).end()
  assert statuses == [0, 0], errors
  assert curve(tmp_path / "run") == curve(tmp_path / "one")


@pytest.mark.slow
def test_two_processes_start_from_a_run_and_grow(start, tiny_gpt, tmp_path):
  plain = [*tiny_gpt, "policy=fp32", "model.dropout=0", "optimizer.schedule_steps=20"]
  assert main(["train", *plain, "train.steps=4", f"out={tmp_path / 'first'}"]) == 0
  later = [*plain, "policy=bf16", f"train.init_from={tmp_path / 'first'}", "train.init_optimizer=true"]
  assert main(["train", *later, "mesh.data=2", "train.steps=8", f"out={tmp_path / 'one'}"]) == 0
  for steps in (4, 8):
    run = start(2, [*later, "mesh={data: 1, fsdp: 2}", f"train.steps={steps}", f"out={tmp_path / 'two'}"])
    statuses, shown, errors = run.end()
    assert statuses == [0, 0], errors
    assert ("train.steps grows from 4 to 8" in shown[0]) == (steps == 8)
    assert shown[1] == ""
  one, two = records(tmp_path / "one"), records(tmp_path / "two")
  for key, tolerance in (("learning_rate", 1e-6), ("loss", 1e-2), ("grad_norm", 0.05)):
    np.testing.assert_allclose([r[key] for r in two], [r[key] for r in one], rtol=tolerance)
  assert [r["step"] for r in two] == list(range(1, 9))


@pytest.mark.slow
def test_what_is_killed_is_noticed_and_any_number_of_processes_goes_on(start, tiny_gpt, tmp_path):
  out = tmp_path / "run"
  # One device a process, and so a mesh of another size each time.
  options = [
    "policy=fp32",
    "model.dropout=0",
    "mesh.data=-1",
    "optimizer.learning_rate=1e-3",
    "train.checkpoint_every=10",
    "train.eval_every=40",
  ]
  arguments = [*tiny_gpt, *options, "train.steps=120", "distributed.heartbeat_timeout_s=10", f"out={out}"]
  for count, step, killed in ((4, 25, 2), (2, 65, 0)):
    run = start(count, arguments)
    run.signal_at(step, out, signal.SIGKILL, killed)
    killed_at = time.monotonic()
    before = curve(out)
    statuses, _, errors = run.end()
    assert time.monotonic() - killed_at < 60  # two heartbeats, and a machine that is busy
    assert curve(out)[: len(before)] == before
    # Who notices by itself says so; JAX's runtime aborts those that do not before it does.
    lost, aborted = 5, -signal.SIGABRT
    survivors = set(range(count)) - {killed}
    assert statuses[killed] == -signal.SIGKILL
    assert {statuses[i] for i in survivors} <= {lost, aborted}, errors
    for i in survivors:
      if statuses[i] == lost:
        assert re.search(rf"process {i}: error: process(es)? .* (is|are|has) (gone|stopped)", errors[i])
        assert re.search(
          r"the checkpoint of step \d+0 in \S+ is intact; start all processes again", errors[i]
        )
        # JAX's runtime logs what it meets at the coordinator's port.
        assert errors[i].count("\n") == 1 or killed == 0
  run = start(1, arguments)
  statuses, shown, errors = run.end()
  assert statuses == [0], errors
  assert "resumed after step" in shown[0]
  assert [r["step"] for r in records(out)] == list(range(1, 121))
  assert main(["train", *arguments[:-1], f"out={tmp_path / 'undisturbed'}"]) == 0
  losses = [[r["loss"] for r in records(d)] for d in (out, tmp_path / "undisturbed")]
  np.testing.assert_allclose(*losses, rtol=1e-4)  # sums of eight, four, two and one parts


@pytest.mark.slow
def test_rows_of_one_process_that_overflow_or_are_missing_stop_all_at_the_same_step(start, tmp_path):
  (tmp_path / "vit.yaml").write_text(VIT)
  out = tmp_path / "run"
  arguments = [str(tmp_path / "vit.yaml"), "policy=fp16", f"out={out}"]
  faults = {"FAULTS": json.dumps({"inf": [1, 3], "missing": [1, 8]})}
  statuses, _, errors = start(2, arguments, "tests/train/_faulty_train.py", **faults).end()
  assert statuses == [2, 2]
  assert errors[1].startswith(
    "process 1: error: the data of step 8 cannot be read: /data/part-7.bin: No such file"
  )
  assert "the same command resumes" in errors[1]
  assert re.match(
    "process 0: stopped while waiting for .*, since process 1 ended: the data of step 8", errors[0]
  )
  assert [(r["skipped_steps"], r["loss_scale"]) for r in records(out)[1:4]] == [
    (0, 2**16),
    (1, 2**16),
    (1, 2**15),
  ]
  # With the data back, from the last checkpoint: replicas are what process 0 has.
  statuses, _, errors = start(2, arguments).end()
  assert statuses == [0, 0], errors
  assert records(out)[-1]["skipped_steps"] == 1


@pytest.mark.slow
def test_a_state_that_rows_of_one_process_make_nan_is_saved_by_none(start, tmp_path):
  (tmp_path / "vit.yaml").write_text(VIT)
  out = tmp_path / "run"
  options = ["policy=fp32", "mesh={data: 1, fsdp: 2}", "train.skip_nonfinite=false", f"out={out}"]
  faults = {"FAULTS": json.dumps({"inf": [1, 3]})}
  run = start(2, [str(tmp_path / "vit.yaml"), *options], "tests/train/_faulty_train.py", **faults)
  statuses, _, errors = run.end()
  assert statuses == [3, 3], errors
  assert errors[0].startswith("error: stopped at step 4: the state is not finite")
  assert "the last finite checkpoint is of step 2:" in errors[0]
  assert errors[1] == ""
  assert [path.name for path in (out / "checkpoints").iterdir()] == ["2"]


@pytest.mark.slow
def test_one_process_without_its_data_saves_the_steps_so_far(start, tmp_path, monkeypatch, capsys):
  from mpjax.train.data import Data

  (tmp_path / "vit.yaml").write_text(VIT)
  good, out = Data.train, tmp_path / "run"

  def gone(index):
    raise FileNotFoundError(2, "No such file or directory", "/data/part-7.bin")

  def broken(self, *rows):
    inner = good(self, *rows)

    class Iterator:
      get_state, set_state = inner.get_state, inner.set_state

      def __next__(self):
        return next(inner) if inner.get_state()["next_index"] < 4 else gone(0)

    return Iterator()

  arguments = [str(tmp_path / "vit.yaml"), "policy=fp32", "mesh.data=1", "train.checkpoint_every=100"]
  assert main(["train", *arguments, f"out={tmp_path / 'undisturbed'}"]) == 0
  with monkeypatch.context() as patch:
    patch.setattr(Data, "train", broken)
    assert main(["train", *arguments, f"out={out}"]) == 2
  error = capsys.readouterr().err
  assert "the data of step 5 cannot be read: /data/part-7.bin" in error
  assert f"the checkpoint of step 4 is in {out}" in error
  assert error.count("\n") == 1
  assert main(["train", *arguments, f"out={out}"]) == 0
  assert curve(out) == curve(tmp_path / "undisturbed")


@pytest.mark.slow
def test_processes_of_different_configs_are_refused_together(start, tiny_gpt, tmp_path):
  out = tmp_path / "run"
  # The policy is "auto", which asks for the devices: those of all processes come up together or not at all.
  for own, words in (
    ("seed=4", "(seed: 3 in process 0, 4 in process 1)"),
    ("train.bogus=1", "process 1: unknown"),
  ):
    statuses, shown, errors = start(2, [*tiny_gpt, f"out={out}"], own={1: [own]}).end()
    assert statuses == [2, 2]
    assert words in errors[0]
    assert errors[0].count("\n") == 1
    assert shown[1] == errors[1] == ""
    assert not out.exists()


@pytest.mark.slow
def test_processes_of_different_code_are_refused_together(start, tiny_gpt, tmp_path):
  out = tmp_path / "run"
  group = start(
    2,
    [*tiny_gpt, "mesh.data=-1", "policy=bf16", f"out={out}"],
    "tests/train/_faulty_train.py",
    FAULTS='{"code": 1}',
  )
  statuses, _, errors = group.end()
  assert statuses == [2, 2]
  assert re.search(
    "different code .program of the step: [0-9a-f]+ in process 0, [0-9a-f]+ in process 1", errors[0]
  )
  assert errors[0].count("\n") == 1
  assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("full", [0, 1])
def test_one_whose_disk_fills_during_a_checkpoint_ends_all(start, tiny_gpt, tmp_path, full):
  out = tmp_path / "run"
  settings = [f"out={out}", "train.log_every=20", "train.checkpoint_every=4", "mesh.data=1", "mesh.fsdp=2"]
  group = start(2, [*tiny_gpt, *settings], "tests/train/_faulty_train.py", FAULTS=json.dumps({"disk": full}))
  statuses, _, errors = group.end()
  assert statuses == [4, 4]
  assert errors[full].count("the checkpoint of step 4 cannot be written") == 1
  assert "File too large" in errors[full]
  # In the one that is full, tensorstore's threads print that a loop is closed, in between too.
  assert "Traceback" not in errors[1 - full]


@pytest.mark.slow
def test_what_does_not_move_ends_the_process(tmp_path):
  (tmp_path / "checkpoints" / "40").mkdir(parents=True)
  program = """
import pathlib, sys, time
from mpjax.train._config import DistributedConfig
from mpjax.train.multiprocess import Processes
with Processes(DistributedConfig(hang_timeout_s=0.5)) as processes:
  processes.directory = pathlib.Path(sys.argv[1])
  for step in range(4):  # what moves may take longer in all
    processes.doing(f"step {step}")
    time.sleep(0.2)
  time.sleep(60)
"""
  run = subprocess.run(
    [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
  )
  assert run.returncode == 5
  assert "waited for step 3 for more than distributed.hang_timeout_s=0.5 seconds" in run.stderr
  assert f"the checkpoint of step 40 in {tmp_path} is intact" in run.stderr


def test_the_others_see_process_0_end_and_no_other_end_of_a_connection(monkeypatch):
  class Client:
    values: typing.ClassVar = {}

    def key_value_set(self, key, value):
      self.values[key] = value

    def blocking_key_value_get(self, key, milliseconds):
      return self.values[key]

  monkeypatch.setattr(_first._compat, "coordination", lambda: (Client(), 1, 2, "127.0.0.1:1"))
  held = _first.hold_open()
  with concurrent.futures.ThreadPoolExecutor() as pool:
    seen = pool.submit(_first.wait_for_its_end)
    held.accept()[0].close()
    with held, held.accept()[0]:  # there again
      assert not seen.done()
    assert seen.result(timeout=60) is True
  assert _first.wait_for_its_end() is False  # it was never there


@pytest.mark.slow
def test_processes_that_do_not_all_come_end_in_bounded_time(start, tiny_gpt, tmp_path):
  arguments = [*tiny_gpt, "distributed.start_timeout_s=2", f"out={tmp_path / 'run'}"]
  run = start(2, arguments)
  run.processes[1].kill()
  statuses, _, errors = run.end()
  assert statuses == [5, -signal.SIGKILL], errors
  assert errors[0].startswith(
    "error: the processes did not come together within distributed.start_timeout_s=2"
  )
  assert errors[0].count("\n") == 1
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--coordinator", "10.0.0.1:1234"], "--num-processes and --process-id are missing"),
    (["--num-processes", "4", "--process-id", "1"], "--coordinator is missing"),
    (["--coordinator", "10.0.0.1", "--num-processes", "2", "--process-id", "0"], "expected HOST:PORT"),
    (["--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"], "expected ids from 0 to"),
  ],
)
def test_flags_that_do_not_say_it_all_are_refused(tiny_gpt, tmp_path, capsys, flags, words):
  assert main(["train", *tiny_gpt, *flags, f"out={tmp_path / 'run'}"]) == 2
  error = capsys.readouterr().err
  assert words in error
  assert error.count("\n") == 1
  assert not (tmp_path / "run").exists()


SLURM = {
  "SLURM_JOB_ID": "7",
  "SLURM_STEP_NODELIST": "node[1-2]",
  "SLURM_NTASKS": "8",
  "SLURM_PROCID": "3",
  "SLURM_LOCALID": "3",
}
MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911", "OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
  ("environment", "count"),
  [
    ({}, 1),
    (SLURM, 8),
    (SLURM | {"SLURM_NTASKS": "1"}, 1),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, 1),  # a shell in a job of eight
    ({key: SLURM[key] for key in ("SLURM_JOB_ID", "SLURM_NTASKS")}, 1),  # a batch script without srun
    (MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, 4),
    (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, 1),
    ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 1),  # a pod of no indexed job
  ],
)
def test_the_environment_says_how_many_processes_there_are(monkeypatch, environment, count):
  for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "TPU_"))]:
    monkeypatch.delenv(name)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  assert _start.processes_around() == count


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_of_rows_depends_neither_on_processes_nor_on_how_they_are_read(workers):
  data = load_data(DataConfig(kind="digits", batch_size=8, workers=workers), seed=5)

  class Rows:
    def __len__(self):
      return data.info.train_examples

    def __getitem__(self, index):
      return data.train_rows[int(index)]

  # Rows read, then shuffled and batched: what runs of earlier releases resume in the middle of.
  rows = grain.MapDataset.source(Rows()).seed(5).shuffle().batch(8, drop_remainder=True).repeat()
  expected = iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
  parts = [data.train(), data.train(slice(0, 4)), data.train(slice(4, 8)), data.train(np.array([0, 5]))]
  for _ in range(data.info.train_examples // 8 + 3):  # into the next epoch
    whole, first, second, some = (next(part)["images"] for part in parts)
    np.testing.assert_array_equal(whole, next(expected)["images"])
    np.testing.assert_array_equal(whole, np.concatenate([first, second]))
    np.testing.assert_array_equal(whole[[0, 5]], some)
  assert all(part.get_state() == expected.get_state() for part in parts)
  for whole, half in zip(data.eval(), data.eval(slice(4, 8)), strict=True):
    np.testing.assert_array_equal(whole["labels"][4:], half["labels"])
