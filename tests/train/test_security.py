"""What a stranger's config, data, export or run directory can do: be refused in one line, and no more."""

import io
import json
import os
import pathlib
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from mpjax.train import ConfigError, DataError, load_config, load_safetensors, make_setup, save_safetensors
from tests._quick_compile import environment as quick_environment
from tests.train._runs import raises_one_line
from tests.train._tiny_gpt import write_tiny_gpt
from tests.zoo._datasets import IMAGES, LABELS, load

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
  "aliases that double": ("a0: &a0 [x]\n" + doubling("a{j}: &a{j} [*a{i}, *a{i}]\n"), "a reference (*name)"),
  "an alias of itself": ("optimizer: {{options: &a {{b: *a}}}}\n", "a reference (*name)"),
  "another key": ("seed: ${{seed}}\n", "write a plain value"),
  "brackets too deep": ("optimizer: {{options: " + "[" * 500 + "]" * 500 + "}}", "nested too deep"),
  "brackets that overrun the stack": ("optimizer: {{options: " + "[" * 200_000, "cannot read"),
  "an integer of a million digits": ("seed: " + "9" * 1_000_000, "digits"),
  "the environment": ("out: ${{oc.env:A_SECRET}}\n", "write a plain value"),
  "a set": ("optimizer: {{options: !!set {{a, b}}}}\n", "not a set"),
  "bytes that are no text": ("seed: \x00\n", "cannot read"),
}


def test_a_config_is_data(tmp_path, monkeypatch):
  monkeypatch.setenv("A_SECRET", "hunter2")
  trap, file = tmp_path / "trap", tmp_path / "c.yaml"
  for name, (text, words) in CONFIGS.items():
    file.write_text(MINIMAL + text.format(trap=trap))
    assert "hunter2" not in raises_one_line(ConfigError, [words], load_config, file), name
    assert not trap.exists(), name
  file.write_text(MINIMAL)
  words = ["out=${oc.env:A_SECRET}", "write a plain value"]
  assert "hunter2" not in raises_one_line(ConfigError, words, load_config, file, ["out=${oc.env:A_SECRET}"])


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


def test_an_npz_file_is_data(tmp_path):
  trap, file = tmp_path / "trap", tmp_path / "d.npz"
  for name, member in NPZ.items():
    with zipfile.ZipFile(file, "w") as archive:
      archive.writestr("images.npy", member(trap))
      archive.writestr("labels.npy", saved(LABELS))
    raises_one_line(DataError, ["d.npz"], load, "npz", path=str(file))
    assert not trap.exists(), name


@pytest.mark.parametrize("own", [None, "1"])
def test_scripts_of_hub_datasets_run_only_if_the_environment_says_so(own, monkeypatch):
  monkeypatch.delenv("HF_DATASETS_TRUST_REMOTE_CODE", raising=False)
  if own:
    monkeypatch.setenv("HF_DATASETS_TRUST_REMOTE_CODE", own)
  monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
  with pytest.raises(DataError, match="pip install datasets"):
    load("huggingface", name="x", text_column="text")
  assert os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] == (own or "0")


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

import dataclasses
from mpjax.cli import main
from mpjax.train import load_safetensors, register_model
from mpjax.zoo._tasks import gpt

@register_model("oddly_named")
def oddly_named(info, *, dim: int, layers: int, heads: int, dropout: float):
  task = gpt(info, dim=dim, layers=layers, heads=heads, dropout=dropout)

  def loss_fn(model, batch, row_rngs):
    loss = task.loss_fn(model, batch, row_rngs)
    return loss, {"../../metric": loss, os.path.abspath("metric"): loss}

  return dataclasses.replace(task, loss_fn=loss_fn)

statuses = [main(["train", *line]) for line in json.loads(sys.argv[1])] + [main(["export", "text"])]
load_safetensors("text/model.safetensors")
print(json.dumps([statuses, events]))
"""


@pytest.mark.slow
def test_a_run_does_nothing_but_write_in_its_directory_whatever_is_called_what(tmp_path):
  """It opens no connection, starts no program and unpickles nothing."""
  folder = tmp_path
  for name in ("work", "home", "tmp"):
    (folder / name).mkdir()
  (tiny,) = write_tiny_gpt(folder)
  for name in ("$(touch trap).txt", "..%2f..%2ftrap.txt", "a\nb.txt", "-rf", "<script>.txt"):
    (folder / "corpus" / name).write_text("x = 1\n" * 200)
  np.savez(folder / "d.npz", **{"images": IMAGES, "labels": LABELS, "../../member": LABELS})
  shared = ["train.eval_every=2", "train.checkpoint_every=2", "train.log_every=1"]
  images = [str(ROOT / "configs" / "resnet_digits.yaml"), "model.stages=[1]", "model.width=4", *shared]
  images += ["data.batch_size=4", "data.eval_batches=1", "train.steps=1", "mesh.data=1"]
  odd = [tiny, *shared, "model.kind=oddly_named", "model.layers=1"]
  npz = f"data={{kind: npz, path: {folder / 'd.npz'}, batch_size: 4, valid_fraction: 0.2}}"
  runs = [
    [*odd, "train.steps=2", "train.export=safetensors", "out=text"],
    [*odd, "train.steps=1", "data={kind: stdlib, seq_len: 16, eval_batches: 1}", "out=stdlib"],
    [*images, "out=digits"],
    [*images, npz, "out=npz"],
  ]
  environment = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  environment |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), **quick_environment(devices=1)}
  command = [sys.executable, "-c", AUDITED, json.dumps(runs)]
  options = {"capture_output": True, "text": True, "timeout": 300}
  done = subprocess.run(command, cwd=folder / "work", env=environment, **options)
  assert done.returncode == 0, done.stderr
  statuses, events = json.loads(done.stdout.splitlines()[-1])
  assert statuses == [0] * 5
  assert [event for event in events if event[0] != "write"] == []
  inside = tuple(str(folder / "work" / name) + os.sep for name in ("text", "stdlib", "digits", "npz"))
  outside = {path for event, path in events if event == "write" and not path.startswith((*inside, "/dev/"))}
  assert outside == set()
  assert sorted(os.listdir(folder / "work")) == ["digits", "npz", "stdlib", "text"]
  assert sorted(os.listdir(folder)) == ["corpus", "d.npz", "home", "tiny.yaml", "tmp", "work"]
  assert os.listdir(folder / "home") == os.listdir(folder / "tmp") == []
  assert "../../metric" in (folder / "work" / "text" / "metrics.jsonl").read_text()


def with_model(config, **options):
  return config | {"model": config["model"] | options}


def with_vocabulary(data, size):
  return data | {"facts": data["facts"] | {"vocab_size": size}}


METADATA = {  # what becomes of the config and the data in a file
  "no config": lambda config, data: (None, data),
  "no data": lambda config, data: (config, None),
  "no JSON": lambda config, data: ("{", data),
  "JSON that overruns the stack": lambda config, data: ("[" * 100_000, data),
  "a list": lambda config, data: (config, []),
  "another type": lambda config, data: (config, with_vocabulary(data, "256; x")),
  "no vocabulary": lambda config, data: (config, with_vocabulary(data, None)),
  "a vocabulary larger than any memory": lambda config, data: (config, with_vocabulary(data, 10**15)),
  "widths larger than any integer": lambda config, data: (with_model(config, dim=10**30, heads=1), data),
}


def test_metadata_of_an_export_are_checked(tmp_path):
  source, file = tmp_path / "source", tmp_path / "x.safetensors"
  config = load_config(write_tiny_gpt(tmp_path)[0], ["model.layers=1", "policy=fp32"])
  setup = make_setup(config)
  save_safetensors(source, config, setup.info, setup.first_state().params, {})
  with safetensors.safe_open(source, framework="np") as stored:
    metadata, tensors = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
  for name, change in METADATA.items():
    changed = {"format": "mpjax-1"}
    parts = change(*(json.loads(metadata[part]) for part in ("config", "data")))
    for part, value in zip(("config", "data"), parts, strict=True):
      if value is not None:
        changed[part] = value if isinstance(value, str) else json.dumps(value)
    safetensors.numpy.save_file(tensors, file, changed)
    assert raises_one_line(ConfigError, ["x.safetensors"], load_safetensors, file), name
  # No file is written through a link.
  victim, link = tmp_path / "victim", tmp_path / "m.safetensors.tmp"
  victim.write_text("precious")
  link.symlink_to(victim)
  save_safetensors(tmp_path / "m.safetensors", config, setup.info, setup.first_state().params, {})
  assert victim.read_text() == "precious"
