"""What a stranger's config, data, export or run directory can do: be refused in one line, and no more."""

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from mpjax.train import ConfigError, load_config, load_safetensors, parse_config
from mpjax.train.data import DataError
from mpjax.train.monitors import MetricsFile, RunDirectory
from tests._quick_compile import environment as quick_environment
from tests.train._datasets import IMAGES, LABELS, load
from tests.train._tiny_gpt import write_tiny_gpt

ROOT = pathlib.Path(__file__).parents[2]
MINIMAL = "model: {kind: gpt}\ndata: {kind: stdlib}\n"


class Trap:
  """Makes a file when it is unpickled."""

  def __init__(self, file):
    self.file = file

  def __reduce__(self):
    return pathlib.Path.touch, (self.file,)


def doubling(line, count=30):
  return "".join(line.format(i=i, j=i + 1) for i in range(count))


# What a config holds, and a word of the error.
CONFIGS = {
  "a call": (
    "seed: !!python/object/apply:pathlib.Path.touch [{trap}]\n",
    "could not determine a constructor",
  ),
  "a call through a class": ("seed: !!python/object/new:pathlib.Path [{trap}]\n", "constructor"),
  "a name of Python's": ("seed: !!python/name:os.system\n", "constructor"),
  "aliases that double": ("a0: &a0 [x]\n" + doubling("a{j}: &a{j} [*a{i}, *a{i}]\n"), "limit"),
  "an alias of itself": ("optimizer: {{options: &a {{b: *a}}}}\n", "recursive"),
  "references that double": ("a0: x\n" + doubling("a{j}: ${{{{a{i}}}}}${{{{a{i}}}}}\n"), "at most 16"),
  "a reference to itself": ("seed: ${{seed}}\n", "Recursive"),
  "brackets too deep": ("optimizer: {{options: " + "[" * 60 + "]" * 60 + "}}", "nested more than 50"),
  "brackets that overrun the stack": ("optimizer: {{options: " + "[" * 200_000, "nest"),  # ours, or libyaml's
  "an integer of a million digits": ("seed: " + "9" * 1_000_000, "digits"),
  "the environment": ("out: ${{oc.env:A_SECRET}}\n", "only another key"),
  "the environment, hidden": ("x: env\nout: ${{oc.${{x}}:A_SECRET}}\n", "only another key"),
  "the environment, at the second reading": ("out: \\${{oc.env:A_SECRET}}\n", "only another key"),
  "YAML in a string": ("seed: \"${{oc.decode:'[1]'}}\"\n", "only another key"),
  "a set": ("optimizer: {{options: !!set {{a, b}}}}\n", "not a supported"),
  "bytes that are no text": ("seed: \x00\n", "cannot read"),
}


@pytest.mark.parametrize(("text", "words"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_is_data(text, words, tmp_path, monkeypatch):
  monkeypatch.setenv("A_SECRET", "hunter2")
  trap, file = tmp_path / "trap", tmp_path / "c.yaml"
  file.write_text(MINIMAL + text.format(trap=trap))
  with pytest.raises(ConfigError, match=re.escape(words)) as raised:
    load_config(file)
  assert "\n" not in str(raised.value)
  assert "hunter2" not in str(raised.value)
  assert not trap.exists()


def test_a_value_may_refer_to_another_key(tmp_path):
  file = tmp_path / "c.yaml"
  file.write_text(MINIMAL + "seed: 7\nout: runs/${model.kind}-${seed}\n")
  assert load_config(file).out == "runs/gpt-7"


def npz_member(shape, dtype="<f4"):
  """The start of an array that is not there."""
  header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".encode()
  return b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n"


def saved(array):
  file = io.BytesIO()
  np.save(file, array, allow_pickle=True)
  return file.getvalue()


NPZ = {
  "objects": lambda trap: saved(np.array([Trap(trap)] * 40)),
  "a shape larger than any memory": lambda _: npz_member("(10000000000000, 4, 4)"),
  "a shape larger than any integer": lambda _: npz_member(f"({10**20}, 4, 4)"),
  "a shape that is a program": lambda trap: npz_member(f"__import__('pathlib').Path('{trap}').touch()"),
  "a shape that does not end": lambda _: npz_member("(" * 500),
  "no array": lambda _: b"text",
}


@pytest.mark.parametrize("member", NPZ.values(), ids=NPZ)
def test_an_npz_file_is_data(member, tmp_path):
  trap, file = tmp_path / "trap", tmp_path / "d.npz"
  with zipfile.ZipFile(file, "w") as archive:
    archive.writestr("images.npy", member(trap))
    archive.writestr("labels.npy", saved(LABELS))
  with pytest.raises(DataError, match=r"d\.npz") as raised:
    load("npz", path=str(file))
  assert "\n" not in str(raised.value)
  assert not trap.exists()


def test_damage_anywhere_in_an_npz_file_is_a_data_error(tmp_path):
  file = tmp_path / "d.npz"
  np.savez_compressed(file, images=IMAGES, labels=LABELS)
  whole, random = file.read_bytes(), np.random.default_rng(0)
  for _ in range(300):
    damaged = bytearray(whole)
    damaged[random.integers(len(damaged))] = random.integers(256)
    file.write_bytes(damaged)
    with contextlib.suppress(DataError):
      load("npz", path=str(file))


@pytest.mark.parametrize("own", [None, "1"])
def test_scripts_of_hub_datasets_run_only_if_the_environment_says_so(own, monkeypatch):
  monkeypatch.delenv("HF_DATASETS_TRUST_REMOTE_CODE", raising=False)
  if own:
    monkeypatch.setenv("HF_DATASETS_TRUST_REMOTE_CODE", own)
  monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
  with pytest.raises(DataError, match="pip install datasets"):
    load("huggingface", name="x", text_column="text")
  assert os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] == (own or "0")


LINKS = [".lock", "config.yaml.tmp", "metrics.jsonl", "checkpoints", "checkpoints/8", "tensorboard/events"]


@pytest.mark.parametrize("name", LINKS)
def test_a_run_directory_with_a_link_in_it_is_refused(name, tmp_path):
  out, victim = tmp_path / "run", tmp_path / "victim"
  config = parse_config({"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}, "out": str(out)})
  RunDirectory(config).close()
  victim.write_text("precious")
  (out / name).parent.mkdir(exist_ok=True)
  (out / name).unlink(missing_ok=True)
  (out / name).symlink_to(victim)
  with pytest.raises(ConfigError, match=f"{name} in it is a link"):
    RunDirectory(config)
  assert victim.read_text() == "precious"


def test_a_run_directory_may_itself_be_a_link(tmp_path):
  (tmp_path / "disk").mkdir()
  (tmp_path / "run").symlink_to(tmp_path / "disk")
  config = parse_config({"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}, "out": str(tmp_path / "run")})
  RunDirectory(config).close()
  RunDirectory(config).close()


@pytest.mark.parametrize("name", ["config.yaml"])
@pytest.mark.parametrize("text", ["!!python/name:os.system", "[1", "[" * 100_000, "\0"])
def test_a_run_directory_with_damaged_files_is_refused(name, text, tmp_path):
  config = parse_config({"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}, "out": str(tmp_path / "run")})
  RunDirectory(config).close()
  (tmp_path / "run" / name).write_text(text)
  with pytest.raises(ConfigError, match=name), contextlib.closing(RunDirectory(config)) as directory:
    directory.summary()


@pytest.mark.parametrize("line", [b"[1]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"step": {}}\n'])
def test_lines_that_are_no_metrics_are_dropped(line, tmp_path):
  file = tmp_path / "metrics.jsonl"
  file.write_bytes(b'{"step": 1}\n' + line)
  MetricsFile(file, resume_step=5).close()
  assert file.read_text() == '{"step": 1}\n'


STDLIB = "data={kind: stdlib, seq_len: 16, eval_batches: 1}"
# A training run with everything that writes or reads, in a process that notes what Python does meanwhile.
AUDITED = """
import json, os, sys

events = []
FORBIDDEN = {"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname",
             "urllib.Request", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class"}

def note(event, arguments):
  if event in FORBIDDEN:
    events.append([event, repr(arguments)])
  elif event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
    events.append(["write", os.path.realpath(os.fsdecode(arguments[0]))])

sys.addaudithook(note)
sys.dont_write_bytecode = True

from mpjax.cli import main
from mpjax.train import Task, load_safetensors, register_model
from mpjax.train.models._language_model import gpt

@register_model("oddly_named")
def oddly_named(info, *, dim: int, layers: int, heads: int, dropout: float):
  task = gpt(info, dim=dim, layers=layers, heads=heads, dropout=dropout)

  def loss_fn(model, batch, row_rngs):
    loss = task.loss_fn(model, batch, row_rngs)
    return loss, {"../../metric": loss, os.path.abspath("metric"): loss}

  return Task(init=task.init, loss_fn=loss_fn, evaluate=task.evaluate, units=task.units)

arguments, exported = json.loads(sys.argv[1]), sys.argv[2]
statuses = [main(["train", *line]) for line in arguments] + [main(["export", arguments[0][-1].removeprefix("out=")])]
load_safetensors(exported)
print(json.dumps([statuses, events]))
"""


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
  """The folder that a process worked in, its exit statuses, and what it did."""
  folder = tmp_path_factory.mktemp("audited")
  for name in ("work", "home", "tmp"):
    (folder / name).mkdir()
  (tiny,) = write_tiny_gpt(folder)
  for name in ("$(touch trap).txt", "..%2f..%2ftrap.txt", "a\nb.txt", "-rf", "<script>.txt"):
    (folder / "corpus" / name).write_text("x = 1\n" * 200)
  np.savez(folder / "d.npz", **{"images": IMAGES, "labels": LABELS, "../../member": LABELS})
  shared = ["train.eval_every=2", "train.checkpoint_every=2", "train.log_every=1"]
  images = [str(ROOT / "configs" / "resnet_digits.yaml"), "model.stages=[1]", "model.width=4", *shared]
  images += ["data.batch_size=4", "data.eval_batches=1", "train.steps=1", "mesh.data=1"]
  runs = [
    [
      tiny,
      *shared,
      "model.kind=oddly_named",
      "model.layers=1",
      "train.steps=2",
      "train.export=safetensors",
      "out=text",
    ],
    [tiny, *shared, "model.kind=oddly_named", "model.layers=1", "train.steps=1", STDLIB, "out=stdlib"],
    [*images, "out=digits"],
    [*images, f"data={{kind: npz, path: {folder / 'd.npz'}, batch_size: 4, valid_fraction: 0.2}}", "out=npz"],
  ]
  environment = {
    "PATH": os.environ["PATH"],
    "HOME": str(folder / "home"),
    "TMPDIR": str(folder / "tmp"),
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    **quick_environment(devices=1),
  }
  done = subprocess.run(
    [sys.executable, "-c", AUDITED, json.dumps(runs), "text/model.safetensors"],
    cwd=folder / "work",
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  statuses, events = json.loads(done.stdout.splitlines()[-1])
  return folder, statuses, events


@pytest.mark.slow
def test_a_run_opens_no_connection_starts_no_program_and_unpickles_nothing(audited):
  _, statuses, events = audited
  assert statuses == [0] * 5
  # The writer of TensorBoard's files hands its records to a thread of this process through a queue that pickles.
  own = "('tensorboardX.proto.event_pb2', 'Event')", "('builtins', 'object')"
  assert [event for event in events if event[0] != "write" and event[1] not in own] == []


@pytest.mark.slow
def test_a_run_writes_in_its_directory_alone_whatever_is_called_what(audited):
  folder, _, events = audited
  runs = [str(folder / "work" / name) + os.sep for name in ("text", "stdlib", "digits", "npz")]
  outside = {path for event, path in events if event == "write" and not path.startswith(tuple(runs))}
  assert {path for path in outside if not path.startswith("/dev/")} == set()
  assert sorted(os.listdir(folder / "work")) == ["digits", "npz", "stdlib", "text"]
  assert sorted(os.listdir(folder)) == ["corpus", "d.npz", "home", "tiny.yaml", "tmp", "work"]
  assert os.listdir(folder / "home") == os.listdir(folder / "tmp") == []
  text = (folder / "work" / "text" / "metrics.jsonl").read_text()
  assert "../../metric" in text


METADATA = {
  "no config": lambda config, data: (None, data),
  "no data": lambda config, data: (config, None),
  "no JSON": lambda config, data: ("{", data),
  "JSON that overruns the stack": lambda config, data: ("[" * 100_000, data),
  "a list": lambda config, data: (config, []),
  "another type": lambda config, data: (config, data | {"vocab_size": "256; x"}),
  "no vocabulary": lambda config, data: (config, data | {"vocab_size": None}),
  "a vocabulary larger than any memory": lambda config, data: (config, data | {"vocab_size": 10**15}),
  "layers for an hour": lambda config, data: (config | {"model": config["model"] | {"layers": 10**6}}, data),
  "widths larger than any integer": lambda config, data: (
    config | {"model": config["model"] | {"dim": 10**30, "heads": 1}},
    data,
  ),
}


@pytest.mark.parametrize("change", METADATA.values(), ids=METADATA)
def test_metadata_of_an_export_are_checked(audited, change, tmp_path):
  source, file = audited[0] / "work" / "text" / "model.safetensors", tmp_path / "x.safetensors"
  with safetensors.safe_open(source, framework="np") as stored:
    metadata, tensors = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
  parts = zip(("config", "data"), change(*(json.loads(metadata[n]) for n in ("config", "data"))), strict=True)
  metadata = {"format": "mpjax-1"} | {
    name: part if isinstance(part, str) else json.dumps(part) for name, part in parts if part is not None
  }
  safetensors.numpy.save_file(tensors, file, metadata)
  with pytest.raises(ConfigError, match=r"x\.safetensors") as raised:
    load_safetensors(file)
  assert "\n" not in str(raised.value)


def test_an_export_is_not_written_through_a_link(audited, tmp_path):
  from mpjax.cli import main

  victim, link = tmp_path / "victim", tmp_path / "m.safetensors.tmp"
  victim.write_text("precious")
  link.symlink_to(victim)
  assert main(["export", str(audited[0] / "work" / "digits"), f"out={tmp_path / 'm.safetensors'}"]) == 0
  assert victim.read_text() == "precious"
