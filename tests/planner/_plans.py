"""Plans made by hand, for the tests of what prints and draws them."""

import math

from mpjax.planner import Compiled, Floor, Memory, Note, Plan, ProductGroup, Saved, Time

PARAMETERS = 124_439_808
BATCH = 67_108_864
# Bytes per parameter of the parts that grow with the model, and those of activations.
PER_PARAMETER = {
  "fp32": ({"master weights": 4, "optimizer state": 8, "gradients": 4}, 9_876_543_210),
  "bf16": ({"master weights": 4, "optimizer state": 8, "compute copies": 2, "gradients": 4}, 5_432_109_876),
  "bf16_pure": ({"master weights": 2, "optimizer state": 4, "gradients": 2}, 5_012_345_678),
}
DTYPE = {"fp32": "float32", "bf16": "bfloat16", "bf16_pure": "bfloat16"}


def a_memory(policy="bf16", scale=1.0):
  each, activations = PER_PARAMETER[policy]
  parts = {name: size * PARAMETERS for name, size in each.items()}
  parts |= {"batch": BATCH, "activations": int(scale * activations), "temporaries": 123_456_789}
  slot = "bfloat16" if policy == "bf16_pure" else "float32"
  optimizer = dict.fromkeys((f"mu {slot}", f"nu {slot}"), parts["optimizer state"] // 2)
  saved = tuple(a_saved(i, DTYPE[policy]) for i in range(11))
  return Memory(parts, optimizer, saved, saved_bytes=parts["activations"], peak=sum(parts.values()))


def a_saved(i, dtype):
  path, source, shape = f"GPT/blocks/attention/saved{i}", f"model.py:{30 + i}", (16, 1024, 12, 64 + i)
  return Saved(path, source, "dot_general", dtype, shape, count=12, nbytes=(20 - i) * 100_000_000)


def a_compiled(policy="bf16"):
  memory = a_memory(policy, scale=0.9)
  arguments = sum(memory.parts[part] for part in ("master weights", "optimizer state", "batch"))
  temporaries = memory.peak - arguments + 200_000_000
  peak, dtype = arguments + 8 + temporaries, DTYPE[policy]
  kernels = {f"cublas: {dtype} x {dtype}": 3_000_000_000_000, "triton: f32 x f32": 40_000_000_000}
  totals = (arguments, arguments - BATCH + 8, arguments - BATCH, temporaries, peak)
  return Compiled(*totals, memory, explained=memory.peak / peak, kernels=kernels)


def a_product(shape=(16384, 3072, 768), **changes):
  values = {"path": "GPT/blocks/up", "source": "model.py:40", "phase": "forward"}
  values |= {"dtype": "bfloat16", "padded": shape, "flops": 2 * math.prod(shape)}
  return ProductGroup(shape=shape, **values | changes)


def the_head(dtype="bfloat16"):
  """The product with a vocabulary of 50257, which is no multiple of 8."""
  why = {"padded": (16384, 50264, 768), "why": "N = 50257 is no multiple of 8"}
  return a_product((16384, 50257, 768), path="GPT/head", source="model.py:77", dtype=dtype, **why)


def a_time(seconds=0.025, **changes):
  """A time of which half is for products, and a part runs beside others."""
  parts = {"products": 0.5 * seconds, "element-wise": 0.3 * seconds, "collectives": 0.2 * seconds}
  modules = {"GPT/blocks/*/up": 0.7 * seconds, "GPT/head": 0.3 * seconds}
  values = {"source": "roofline of the compiled program", "error": 0.35, "hidden": 0.1 * seconds}
  return Time(seconds, parts=parts, modules=modules, **values | changes)


def a_plan(policy="bf16", compiled=True, **changes):
  """A plan of a GPT with 124 million parameters on one H200."""
  floor = {"matrix units": 0.0123, "memory": 0.0045}
  values = {
    "label": policy,
    "target": "h200",
    "device": "NVIDIA H200 SXM",
    "devices": 1,
    "device_memory": 141_000_000_000,
    "parameters": PARAMETERS,
    "memory": a_memory(policy),
    "compiled": a_compiled(policy) if compiled else None,
    "products": (the_head(DTYPE[policy]), a_product(dtype=DTYPE[policy])),
    "collectives": (),
    "floor": Floor(seconds=0.0123, parts=floor, bound="matrix units", moved_bytes=21_600_000_000),
    "notes": (Note("Bytes of one device."),),
    "time": a_time(),
  }
  return Plan(**values | changes)
