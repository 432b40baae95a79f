"""The PyTorch peer of the gpu suite: equal models under `torch.autocast`, compiled, with the fused AdamW.

Started by the suite, by an interpreter that needs nothing but torch. Policies: fp32 (without TensorFloat-32),
tf32, bf16, and fp16 with `torch.amp.GradScaler`. On a CPU nothing is compiled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import Any

from benchmarks._worker import serve_stages


def stages(task: dict[str, Any]) -> Generator[dict[str, Any], str, None]:
  """What `worker.serve_stages` runs: what is known at first; compiled; begun; then a round each."""
  try:
    import torch

    from benchmarks.gpu._torch_models import build
  except ImportError as error:
    yield {"skipped": f"torch does not import ({error}): give --torch-python an interpreter that has it"}
    return
  cuda = torch.cuda.is_available()
  if not cuda and not task["cpu"]:
    yield {"skipped": f"torch {torch.__version__} finds no CUDA device"}
    return
  device = torch.device("cuda" if cuda else "cpu")
  policy = task["policy"]
  dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(policy)
  # What autocast leaves in float32 may take TensorFloat-32, as users who want speed have it.
  torch.set_float32_matmul_precision("highest" if policy == "fp32" else "high")
  torch.backends.cudnn.allow_tf32 = policy != "fp32"
  torch.backends.cudnn.benchmark = True
  if not cuda:
    torch.set_num_threads(1)
  torch.manual_seed(0)
  with device:
    model = build(task)
    batch = batch_of(task)
  if task["kind"] == "resnet":  # the layout that its convolutions are fastest in
    model = model.to(memory_format=torch.channels_last)
    batch["images"] = batch["images"].to(memory_format=torch.channels_last)
  parameters = sum(p.numel() for p in model.parameters())
  yield {"parameters": parameters, "torch": torch.__version__}

  adamw = task["adamw"]
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=adamw["learning_rate"],
    betas=(adamw["b1"], adamw["b2"]),
    eps=adamw["eps"],
    weight_decay=adamw["weight_decay"],
    fused=cuda,
  )
  scaler = torch.amp.GradScaler(device.type, enabled=policy == "fp16")

  def forward(batch: Any) -> Any:
    if task["kind"] == "gpt":
      tokens = batch["tokens"]
      logits, labels = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    else:
      logits, labels = model(batch["images"]), batch["labels"]
    return torch.nn.functional.cross_entropy(logits.float(), labels)

  if cuda:
    forward = torch.compile(forward)

  def step() -> Any:
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
      loss = forward(batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()

  wait = torch.cuda.synchronize if cuda else (lambda: None)
  begin = time.perf_counter()
  first = float(step())
  wait()
  compile_s = time.perf_counter() - begin
  held = torch.cuda.max_memory_reserved() if cuda else 0
  # Parameters and AdamW's two moments, which are not there yet if the first step was skipped.
  tensors = [*model.parameters()] * 3 + [*model.buffers(), *batch.values()]
  state_bytes = sum(x.numel() * x.element_size() for x in tensors)
  yield {"compile_s": compile_s, "held_bytes": held, "step_bytes": held, "state_bytes": state_bytes}

  for _ in range(task["warm_up"]):
    step()
  wait()
  if cuda:
    torch.cuda.reset_peak_memory_stats()
  yield {"first_loss": first if math.isfinite(first) else None}

  while True:
    step()  # not timed: others have had the device since
    wait()
    begin = time.perf_counter()
    for _ in range(task["steps"]):
      loss = step()
    wait()
    seconds = (time.perf_counter() - begin) / task["steps"]
    last = float(loss)
    peak = torch.cuda.max_memory_allocated() if cuda else None
    yield {"seconds": seconds, "loss": last if math.isfinite(last) else None, "peak_bytes": peak}


def batch_of(task: dict[str, Any]) -> dict[str, Any]:
  """Random tokens, or images and labels, on torch's default device."""
  import torch

  rows = task["batch"]
  if task["kind"] == "gpt":
    return {"tokens": torch.randint(task["sizes"]["vocab"], (rows, task["seq"] + 1))}
  side = task["image"]
  images = torch.randn(rows, side, side, 3)
  if task["kind"] == "resnet":
    images = images.permute(0, 3, 1, 2).contiguous()
  return {"images": images, "labels": torch.randint(task["sizes"]["classes"], (rows,))}


if __name__ == "__main__":
  serve_stages(stages)
