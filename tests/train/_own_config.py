"""Where the plug-in of the tests is, and a config of one of its models."""

import pathlib

import yaml

PLUGIN = str(pathlib.Path(__file__).with_name("_own_models.py"))


def write_config(folder, kind):
  config = {
    "policy": "fp16",
    "seed": 1,
    "model": {"kind": f"own_{kind}"},
    "data": {"kind": "blobs", "batch_size": 16},
    "optimizer": {"learning_rate": 1e-2},
    "mesh": {"data": 1},
    "train": {"steps": 12, "log_every": 1, "eval_every": 6, "checkpoint_every": 4, "checkpoint_wait": True},
  }
  file = folder / f"{kind}.yaml"
  file.write_text(yaml.safe_dump(config))
  return str(file)
