"""`scripts/train.py` in several processes on this machine: as one process trains, and through what ends one."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mpjax.cli import main
from mpjax.cli._train_command import processes_around
from mpjax.train import Agreed, ConfigError, processes as several
from mpjax.train.config._config import DistributedConfig
from tests._quick_compile import environment as quick_environment
from tests.train import _runs
from tests.train._runs import last_step
from tests.train._tiny_gpt import records

ROOT = pathlib.Path(__file__).parents[2]
LOST = 5
# How long a run may take on a machine that is busy.
PATIENCE_S = 900
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
      address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **quick_environment(devices=1)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, str(ROOT / script), "--coordinator", address, "--num-processes", str(count)]
    self.processes = [
      subprocess.Popen(
        [*command, "--process-id", str(i), *arguments, *(own or {}).get(i, [])],
        env=env | environment,
        **pipes,
      )
      for i in range(count)
    ]

  def end(self):
    """Exit statuses, what was written to stdout, and to stderr, without the lines of native code."""
    written = [map(own_lines, process.communicate(timeout=PATIENCE_S)) for process in self.processes]
    return [p.returncode for p in self.processes], *map(list, zip(*written, strict=True))

  def signal_at(self, step, directory, signum, which):
    """Sends a signal to one process once the metrics of a step are there."""
    deadline = time.monotonic() + PATIENCE_S
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


def curve(directory):
  """What does not depend on the order of a sum."""
  return [row[:4] + row[-1:] for row in _runs.curve(directory)]


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
def test_what_is_killed_is_noticed_and_any_number_of_processes_goes_on(start, tiny_gpt, tmp_path):
  out = tmp_path / "run"
  # One device a process, and so a mesh of another size each time.
  options = ["policy=fp32", "model.dropout=0", "mesh.data=-1", "optimizer.learning_rate=1e-3"]
  options += ["train.checkpoint_every=10", "train.eval_every=40", "distributed.heartbeat_timeout_s=10"]
  arguments = [*tiny_gpt, *options, "train.steps=120", f"out={out}"]
  for count, step, killed in ((4, 25, 2), (2, 65, 0)):
    run = start(count, arguments)
    run.signal_at(step, out, signal.SIGKILL, killed)
    killed_at = time.monotonic()
    before = curve(out)
    statuses, _, errors = run.end()
    assert time.monotonic() - killed_at < 60  # two heartbeats, and a machine that is busy
    assert curve(out)[: len(before)] == before
    # Who notices by itself says so; JAX's runtime aborts those that do not before it does.
    survivors = set(range(count)) - {killed}
    assert statuses[killed] == -signal.SIGKILL
    assert {statuses[i] for i in survivors} <= {LOST, -signal.SIGABRT}, errors
    for i in survivors:
      if statuses[i] == LOST:
        assert f"process {i}: error: " in errors[i]
        assert re.search(
          r"may be gone; the newest checkpoint is of step \d+0 in \S+: the same command in any", errors[i]
        )
        # One line of ours; JAX's runtime may log what it meets at the coordinator's port.
        assert len(re.findall(r"^process \d+: ", errors[i], re.MULTILINE)) == 1, errors[i]
  run = start(1, arguments)
  statuses, shown, errors = run.end()
  assert statuses == [0], errors
  assert "resumed after step" in shown[0]
  assert [r["step"] for r in records(out)] == list(range(1, 121))
  assert main(["train", *arguments[:-1], f"out={tmp_path / 'undisturbed'}"]) == 0
  losses = [[r["loss"] for r in records(d)] for d in (out, tmp_path / "undisturbed")]
  np.testing.assert_allclose(*losses, rtol=1e-4)  # sums of eight, four, two and one parts


@pytest.mark.slow
def test_two_processes_agree_on_the_newest_good_checkpoint(start, tiny_gpt, tmp_path):
  out = tmp_path / "run"
  arguments = [*tiny_gpt, "mesh.data=-1", "train.steps=8", "train.checkpoint_every=4", f"out={out}"]
  assert main(["train", *arguments]) == 0
  (out / "summary.json").unlink()
  largest = max((out / "checkpoints" / "8").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)
  statuses, shown, errors = start(2, arguments).end()
  assert statuses == [0, 0], errors
  assert "the checkpoint of step 8 is damaged: state/" in shown[0]
  assert "resumed after step 4" in shown[0]
  assert shown[1] == ""


@pytest.mark.slow
def test_rows_of_one_process_that_overflow_or_are_missing_stop_all_at_the_same_step(start, tmp_path):
  (tmp_path / "vit.yaml").write_text(VIT)
  out = tmp_path / "run"
  arguments = [str(tmp_path / "vit.yaml"), "policy=fp16", f"out={out}"]
  faults = {"FAULTS": json.dumps({"inf": [1, 3], "missing": [1, 8]})}
  statuses, _, errors = start(2, arguments, "tests/train/_faulty_train.py", **faults).end()
  assert statuses[1] == 2
  assert statuses[0] in (LOST, -signal.SIGABRT), errors
  told = "process 1: error: the data of step 8 cannot be read: /data/part-7.bin: No such file"
  assert errors[1].startswith(told)
  assert "the same command resumes" in errors[1]
  scales = [(r["skipped_steps"], r["loss_scale"]) for r in records(out)[1:4]]
  assert scales == [(0, 2**16), (1, 2**16), (1, 2**15)]
  # With the data back, from the last checkpoint: replicas are what process 0 has.
  statuses, _, errors = start(2, arguments).end()
  assert statuses == [0, 0], errors
  assert records(out)[-1]["skipped_steps"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
  ("script", "own", "faults", "told"),
  [
    # The policy is "auto", which asks for the devices: those of all processes come up together or not at all.
    ("scripts/train.py", ["seed=4"], "{}", r"\(seed: 3 in process 0, 4 in process 1\)"),
    ("scripts/train.py", ["--num-processes", "3"], "{}", r"\(number of processes: 2 in process 0, 3 in "),
    (
      "tests/train/_faulty_train.py",
      ["policy=auto"],
      '{"code": 1}',
      r"\(program of the step: '[0-9a-f]+' in process 0, '[0-9a-f]+' in process 1\)",
    ),
  ],
)
def test_processes_of_different_configs_or_code_are_refused_together(
  start, tiny_gpt, tmp_path, script, own, faults, told
):
  out = tmp_path / "run"
  group = start(2, [*tiny_gpt, "mesh.data=-1", f"out={out}"], script, own={1: own}, FAULTS=faults)
  statuses, shown, errors = group.end()
  assert statuses == [2, 2], errors
  assert re.search(told, errors[0])
  assert errors[0].count("\n") == 1
  assert shown[1] == errors[1] == ""
  assert not out.exists()


def test_processes_go_on_only_if_the_work_went_well_in_all_of_them_and_they_agree(monkeypatch):
  def failing():
    raise ConfigError("bad")

  ours = {"ok": lambda: "mine", "bad": failing}
  tell = lambda result: {"data": result.upper()}
  monkeypatch.setattr(several._compat, "coordination", lambda: (object(), 0, 2))
  for work, other, said, status in [
    ("ok", {"told": {"data": "MINE"}}, None, None),
    ("ok", {"told": {"data": "OTHER"}}, "(data: 'MINE' in process 0, 'OTHER' in process 1)", 2),
    ("ok", {"problem": "full", "status": 4}, "process 1: full", 4),
    ("bad", {"told": {"data": "MINE"}}, "bad", 2),
    ("bad", {"problem": "bad", "status": 2}, "bad", 2),
    ("bad", {"problem": "full", "status": 4}, "bad", 2),
    ("ok", {"problem": "SIGTERM: stopped", "status": 143}, "process 1: SIGTERM: stopped", 143),
  ]:
    monkeypatch.setattr(several, "everyone", lambda told: [told, other])
    processes = several.Processes()
    if said is None:
      assert processes.agree(ours[work], tell, same=True) == ("mine", {"data": "MINE"}), other
      continue
    with pytest.raises(Agreed) as raised:
      processes.agree(ours[work], tell, same=True)
    assert said in str(raised.value), other
    assert raised.value.exit_status == status


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_does_not_move_ends_the_process(tmp_path, monkeypatch, capsys):
  ended, statuses = threading.Event(), []

  def exit_thread(status):
    statuses.append(status)
    ended.set()
    raise SystemExit

  monkeypatch.setattr(os, "_exit", exit_thread)
  (tmp_path / "checkpoints" / "40").mkdir(parents=True)
  processes = several.Processes(DistributedConfig(hang_timeout_s=1))
  processes.directory = tmp_path
  with processes.watched():
    for step in range(20):  # what moves may take longer in all
      processes.phase("step", f"step {step}")
      time.sleep(0.1)
    assert statuses == []
    assert ended.wait(60)
  for thread in threading.enumerate():
    if thread.name == "watch over the run":
      thread.join()
  assert statuses == [5]
  error = capsys.readouterr().err
  assert "waited for step 19 for more than distributed.hang_timeout_s=1 seconds" in error
  assert f"the newest checkpoint is of step 40 in {tmp_path}" in error


@pytest.mark.slow
@pytest.mark.parametrize("full", [0, 1])
def test_one_whose_disk_fills_during_a_checkpoint_ends_all(start, tiny_gpt, tmp_path, full):
  out = tmp_path / "run"
  settings = [f"out={out}", "train.log_every=20", "train.checkpoint_every=4", "mesh={data: 1, fsdp: 2}"]
  group = start(2, [*tiny_gpt, *settings], "tests/train/_faulty_train.py", FAULTS=json.dumps({"disk": full}))
  statuses, _, errors = group.end()
  assert statuses[full] == 4, errors
  assert statuses[1 - full] in (4, LOST, -signal.SIGABRT), errors
  assert errors[full].count("the checkpoint of step 4 cannot be written") == 1
  assert "File too large" in errors[full]
  # In the one that is full, tensorstore's threads print that a loop is closed, in between too.
  assert "Traceback" not in errors[1 - full]


@pytest.mark.parametrize(("bound", "named"), [("127.0.0.1", "localhost"), ("0.0.0.0", "10.0.0.1")])
def test_a_port_that_is_taken_is_one_line(capsys, bound, named):
  with socket.create_server((bound, 0)) as server:
    port = server.getsockname()[1]
    flags = ["--coordinator", f"{named}:{port}", "--num-processes", "2", "--process-id", "0"]
    assert main(["train", "gpt_stdlib", *flags]) == 2
  said = (
    f"error: --coordinator {named}:{port}: Address already in use: expected a free port of this machine\n"
  )
  assert capsys.readouterr().err == said


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


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "8"}
SLURM |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "3"}
MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911", "OMPI_COMM_WORLD_RANK": "0"}


def test_the_environment_says_how_many_processes_there_are(monkeypatch):
  for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "TPU_"))]:
    monkeypatch.delenv(name)
  for environment, count in [
    ({}, 1),
    (SLURM, 8),
    (SLURM | {"SLURM_NTASKS": "1"}, 1),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, 1),  # a shell in a job of eight
    ({key: SLURM[key] for key in ("SLURM_JOB_ID", "SLURM_NTASKS")}, 1),  # a batch script without srun
    (MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, 4),
    (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, 1),
    ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 1),  # a pod of no indexed job
  ]:
    with monkeypatch.context() as patch:
      for name, value in environment.items():
        patch.setenv(name, value)
      assert processes_around() == count, environment
