"""The PyTorch peer of training.py: the GPT of `mpjax.train.models`, trained under `torch.autocast`.

Started by training.py, by an interpreter that needs nothing but torch. RMS norms, rotary positions, a GELU
(tanh) MLP, no biases, the embedding as output matrix; attention by `scaled_dot_product_attention`, which
takes a fused kernel. With CUDA: `torch.compile` and the fused AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from worker import serve


def start(task: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
  """Builds, compiles and warms up the step; see `worker.serve`."""
  try:
    import torch
  except ImportError as error:
    return {
      "skipped": f"torch does not import ({error}): give --torch-python an interpreter that has it"
    }, dict
  cuda = torch.cuda.is_available()
  if not cuda and not task["cpu"]:
    return {"skipped": f"torch {torch.__version__} finds no CUDA device"}, dict
  device = "cuda" if cuda else "cpu"
  dtype = {"fp32": None, "bf16": torch.bfloat16}[task["policy"]]
  torch.manual_seed(0)
  model = gpt(task["model"]).to(device)
  count = sum(p.numel() for p in model.parameters())
  adamw = task["adamw"]
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=adamw["learning_rate"],
    betas=(adamw["b1"], adamw["b2"]),
    eps=adamw["eps"],
    weight_decay=adamw["weight_decay"],
    fused=cuda,
  )
  tokens = torch.randint(task["model"]["vocab"], (task["batch"], task["seq"] + 1), device=device)

  def forward(tokens: Any) -> Any:
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

  if cuda:
    forward = torch.compile(forward)

  def step() -> Any:
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
      loss = forward(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()

  wait = torch.cuda.synchronize if cuda else (lambda: None)
  begin = time.perf_counter()
  first = float(step())
  compile_s = time.perf_counter() - begin
  for _ in range(task["warm_up"]):
    step()
  wait()
  if cuda:
    torch.cuda.reset_peak_memory_stats()

  def measure() -> dict[str, Any]:
    wait()
    begin = time.perf_counter()
    for _ in range(task["steps"]):
      loss = step()
    wait()
    seconds = (time.perf_counter() - begin) / task["steps"]
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return {"seconds": seconds, "loss": float(loss), "peak_bytes": peak}

  ready = {"parameters": count, "first_loss": first, "compile_s": compile_s, "torch": torch.__version__}
  return ready, measure


def gpt(sizes: dict[str, int]) -> Any:
  """The model, `tokens [B, T] -> logits [B, T, vocab]`."""
  import torch
  from torch import nn
  from torch.nn import functional

  dim, heads, layers = sizes["dim"], sizes["heads"], sizes["layers"]

  class Norm(nn.Module):
    def __init__(self) -> None:
      super().__init__()
      self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Any) -> Any:
      y = x.float()
      y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)
      return (y * self.scale.float()).to(x.dtype)

  def linear(size_in: int, size_out: int, scale: float = 1.0) -> Any:
    layer = nn.Linear(size_in, size_out, bias=False)
    nn.init.normal_(layer.weight, std=0.02 * scale)
    return layer

  class Block(nn.Module):
    def __init__(self) -> None:
      super().__init__()
      residual_scale = (2 * layers) ** -0.5
      self.attention_norm, self.mlp_norm = Norm(), Norm()
      self.qkv = linear(dim, 3 * dim)
      self.out = linear(dim, dim, residual_scale)
      self.up = linear(dim, 4 * dim)
      self.down = linear(4 * dim, dim, residual_scale)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
      split = (*x.shape[:2], heads, dim // heads)
      parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
      q, k, v = (part.view(split).transpose(1, 2) for part in parts)  # [B, N, T, H]
      q, k = rotate(q, cos, sin), rotate(k, cos, sin)
      mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
      x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
      return x + self.down(functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

  class GPT(nn.Module):
    def __init__(self) -> None:
      super().__init__()
      self.embed = nn.Parameter(torch.randn(sizes["vocab"], dim) * 0.02)
      self.blocks = nn.ModuleList(Block() for _ in range(layers))
      self.norm = Norm()

    def forward(self, tokens: Any) -> Any:
      half = dim // heads // 2
      frequency = 10000.0 ** (-torch.arange(half, device=tokens.device) / half)
      angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequency  # [T, H/2]
      cos, sin = angle.cos(), angle.sin()
      x = functional.embedding(tokens, self.embed)  # [B, T, D]
      for block in self.blocks:
        x = block(x, cos, sin)
      return functional.linear(self.norm(x), self.embed)

  def rotate(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

  return GPT()


if __name__ == "__main__":
  serve(start)
