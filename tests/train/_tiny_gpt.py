"""The small training run that several tests start."""

import json
import pathlib
from typing import Any


def write_tiny_gpt(folder: pathlib.Path, layers: int = 2) -> list[str]:
  """Arguments of `scripts/train.py` for a GPT that trains in a second, without `out`."""
  corpus = folder / "corpus"
  corpus.mkdir()
  for i in range(8):
    text = "".join(f"def f{j}(x):\n  return x + {i * j}\n" for j in range(60))
    (corpus / f"{i}.txt").write_text(text)
  config = folder / "tiny.yaml"
  config.write_text(
    f"""
seed: 3
model: {{kind: gpt, dim: 32, layers: {layers}, heads: 2, dropout: 0.1}}
data: {{kind: text, path: {corpus}, seq_len: 16, batch_size: 8, valid_fraction: 0.2, eval_batches: 2}}
optimizer: {{learning_rate: 1e-2, warmup_steps: 2, clip_norm: 1.0}}
mesh: {{data: 1}}
train: {{steps: 20, log_every: 1, eval_every: 10, checkpoint_every: 4}}
"""
  )
  return [str(config)]


def records(directory: pathlib.Path) -> list[dict[str, Any]]:
  """The metrics that a run has logged, a record a line."""
  return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
