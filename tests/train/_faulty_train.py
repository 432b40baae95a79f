"""`scripts/train.py` with faults: FAULTS='{"missing" or "inf": [process, step], "code" or "disk": process}'."""

import json
import os
import resource
import sys

import numpy as np

from mpjax.cli import main
from mpjax.train import checkpoints
from mpjax.train.data import Data
from mpjax.train.setup import _experiment

FAULTS = json.loads(os.environ["FAULTS"])


class Faulty:
  """The batches of another iterator, but for some."""

  def __init__(self, inner, process):
    self._inner, self.get_state, self.set_state = inner, inner.get_state, inner.set_state
    self._process = process

  def __next__(self):
    step = self._inner.get_state()["next_index"] + 1
    if FAULTS.get("missing") == [self._process, step]:
      raise FileNotFoundError(2, "No such file or directory", "/data/part-7.bin")
    batch = next(self._inner)
    if FAULTS.get("inf") == [self._process, step]:
      batch["images"][0, 0, 0] = np.inf
    return batch


def faulty(data, rows):
  return Faulty(good(data, rows), int(sys.argv[sys.argv.index("--process-id") + 1]))


def other_step(*arguments, **options):
  return make_train_step(*arguments, **options | {"skip_nonfinite": False})


def full_disk_soon(tree):
  resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
  return examine(tree)


good, Data.train = Data.train, faulty
examine = checkpoints.examine
if str(FAULTS.get("disk")) == sys.argv[sys.argv.index("--process-id") + 1]:
  checkpoints.examine = full_disk_soon
make_train_step = _experiment.make_train_step
if str(FAULTS.get("code")) == sys.argv[sys.argv.index("--process-id") + 1]:
  _experiment.make_train_step = other_step

if __name__ == "__main__":
  sys.exit(main(["train", *sys.argv[1:]]))
