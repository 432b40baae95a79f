"""The devices that plans are for: their names, their files and their figures."""

import importlib.resources
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest
import yaml

import mpjax
from mpjax import formats
from mpjax.planner import get_target, policy_on_target, presets_of, target_names

FOLDER = importlib.resources.files("mpjax").joinpath("formats", "devices")
DOCS = pathlib.Path(__file__).parents[2] / "docs"
FILES = {f.name.removesuffix(".yaml"): yaml.safe_load(f.read_text()) for f in FOLDER.iterdir()}
GIB, TERA = 2**30, 1e12

GPUS = [name for name, data in FILES.items() if "cuda" in data]
# By hand from the vendors' pages, as a second reading: GiB or GB sold, TB/s, dense float16 TFLOP/s, units. Further
# devices need no row.
PUBLISHED = """
a100 80 2.0 312 ampere, h100 80 3.35 989 hopper, h200 141 4.8 989 hopper, b200 180 7.7 2250 blackwell,
l4 24 0.3 121 ada, rtx4090 24 1.0 165 ada, t4 16 0.32 65 turing, v100 16 0.9 125 volta, v5e 16 0.819 197 tpu_v5,
v5p 95 2.765 459 tpu_v5, v6e 32 1.64 918 tpu_v6, tpu7x 96 3.69 1153.5 tpu_v7
"""  # of a tpu7x half a chip


def test_every_file_is_a_target_and_on_a_page_of_the_docs():
  assert target_names() == ["here", *sorted(FILES)]
  pages = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
  assert [name for name in FILES if f"`{name}`" not in pages] == []


def test_figures_are_the_published_ones():
  for name, *figures, units in map(str.split, PUBLISHED.split(",")):
    target = get_target(name)
    found = target.memory / 1e9, target.bandwidth / TERA, target.flops["float16"] / TERA
    for figure, known, off in zip(found, map(float, figures), (0.1, 0.03, 0.01), strict=True):
      assert figure == pytest.approx(known, rel=off), name
    assert target.matrix_units == units, name


@pytest.mark.parametrize("name", GPUS)
def test_a_gpus_description_has_each_fact_once_and_agrees_with_its_file(name):
  target, data = get_target(name), FILES[name]
  text, facts = target.gpu_description(), data["cuda"]
  keys = re.findall(r"^ {0,2}(\w+)", text, re.MULTILINE)
  assert len(keys) == len(set(keys))
  for key, value in facts.items():
    if key != "compute_capability":
      assert len(re.findall(rf"^  {key}: {value}$", text, re.MULTILINE)) == 1, key
  major, minor = facts["compute_capability"]
  assert text.count(f"cuda_compute_capability {{ major: {major} minor: {minor} }}") == 1
  assert text.count(f'device_description_str: "{target.device}"') == 1
  assert text.count("{") == text.count("}")
  assert facts["device_memory_size"] == data["memory"]
  assert facts["memory_bandwidth"] == pytest.approx(data["bandwidth"])
  # A multiply and an add for every unit and cycle.
  peak = 2 * facts["core_count"] * facts["fpus_per_core"] * facts["clock_rate_ghz"] * 1e9
  assert peak == pytest.approx(data["flops"]["float32"], rel=0.1)


# Name, devices, topology.
NAMES = """
h200 1 1x1x1, h200:1 1 1x1x1, h200:8 8 1x1x8, h100:2x8 16 1x2x8, H100:2x8 16 1x2x8, v5e 1 v5e:1x1, v5e:2x4 8 v5e:2x4,
v5p:2x2x1 4 v5p:2x2x1, v5p 1 v5p:1x1x1, v6e:1x1 1 v6e:1x1, v6e:16x16 256 v6e:16x16,
tpu7x 2 tpu7x:1x1x1, tpu7x:2x2x1 8 tpu7x:2x2x1
"""


def test_a_name_says_how_many_devices_and_how_they_lie():
  for name, devices, topology in map(str.split, NAMES.split(",")):
    target, one = get_target(name), get_target(name.partition(":")[0])
    assert (target.name, target.devices, target.topology) == (name, int(devices), topology)
    assert (target.device, target.memory, target.flops) == (one.device, one.memory, one.flops), name
    assert get_target(target) is target


def test_a_name_that_is_none_is_refused():
  known = r"unknown target 'h20': expected one of here, .*a100, .*b200, .*v6e, .*h200:8 .*v5e:2x4; did you mean 'h200'"
  rows = [("h20", known), ("", r"unknown target '': expected one of here"), ("gpu", r"unknown target 'gpu'")]
  rows += [("here:8", r"here:8"), ("v5e:2x2x2", r"v5e"), ("v5p:2x4", r"v5p")]
  gpus, chips = (
    r"expected a number of GPUs, such as h200:8 or h200:2x8",
    r"expected a slice of chips, such as v5e:",
  )
  rows += [(f"h200:{shape}", gpus) for shape in ("0", "x", "-1", "2x", "2x0", "1x2x3", "8 ", "1.5", "x8")]
  rows += [(f"v5e:{shape}", chips) for shape in ("8", "0x4", "2x", "a", "2x2x2x2")]
  for name, message in rows:
    with pytest.raises(ValueError, match=message):
      get_target(name)


def test_this_machine_is_its_devices():
  for name in (None, "here"):
    target = get_target(name)
    assert (target.name, target.kind, target.devices) == ("here", "cpu", jax.device_count())
    assert (target.is_here, target.flops, target.bandwidth) == (True, {}, 0)
    assert target.memory == target.usable > GIB


def found_here(monkeypatch, platform, kind, limit=7 * GIB, count=1, **attributes):
  """The target of a machine with such devices."""
  stats = lambda: limit and {"bytes_limit": limit}
  device = types.SimpleNamespace(platform=platform, device_kind=kind, memory_stats=stats, **attributes)
  monkeypatch.setattr(jax, "local_devices", lambda: [device] * count)
  return get_target()


@pytest.mark.parametrize("name", FILES)
def test_a_device_that_is_here_has_the_figures_of_its_file(name, monkeypatch):
  figures = lambda target: (target.flops, target.bandwidth, target.kind, target.matrix_units)
  for words in FILES[name]["jax_names"]:
    for kind in (words.upper(), f"{words} PCIe") if name in GPUS else (words,):
      target = found_here(monkeypatch, FILES[name]["kind"], kind, count=2)
      assert (target.device, target.devices, target.is_here, target.usable) == (kind, 2, True, 7 * GIB)
      assert figures(target) == figures(get_target(name)), kind


def test_presets_of_a_target_are_those_that_it_has_units_for():
  presets = {"t4": "fp16 fp32", "v100": "fp16 fp32", "a100": "bf16 fp16 tf32 fp32", "v5p": "fp8 bf16 fp32"}
  presets["tpu7x"] = "fp8 bf16 fp32"
  for name, found in (presets | {"h200": "fp8 bf16 fp16 tf32 fp32", "here": "bf16 fp32"}).items():
    assert presets_of(get_target(name)) == found.split(), name


def test_a_policy_has_the_recipe_of_its_target():
  fp8, emulated = mpjax.get_policy("fp8"), {"base": "fp8", "fp8": {"recipe": "nvfp4", "emulate": True}}
  for name, policy, recipe, said in (
    ("h200", fp8, "current", "^current scaling, E4M3FN forward, E5M2 backward"),
    ("b200", fp8, "mx", "^mx scaling, E4M3FN forward, E4M3FN backward"),
    ("v5p", fp8, "current", "^current scaling, E4M3B11FNUZ forward, E4M3B11FNUZ backward"),
    ("tpu7x", fp8, "current", "^current scaling, E4M3FN forward, E5M2 backward"),
    ("a100", fp8, None, "8.0.*has no FP8 units.*: products run in bfloat16"),
    ("h200", emulated, "nvfp4", "^nvfp4 scaling, E2M1FN forward, E2M1FN backward, emulated"),
    ("here", fp8, "auto", "^none, cpu has no FP8 units"),
  ):
    there, text = policy_on_target(mpjax.get_policy(policy), get_target(name))
    assert (there.fp8 and there.fp8.recipe) == recipe, (name, policy)
    assert re.search(said, text), (name, text)
  assert policy_on_target(mpjax.get_policy("bf16"), get_target("h200")) == (mpjax.get_policy("bf16"), "")


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_what_jax_takes_of_a_gpu_is_what_the_environment_says(monkeypatch, name):
  for other in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
    monkeypatch.delenv(other, raising=False)
  memory = get_target("h200").memory
  assert get_target("h200").usable == int(0.75 * memory)
  monkeypatch.setenv(name, ".9")
  assert get_target("h200").usable == int(0.9 * memory)
  assert get_target("v5e").usable == get_target("v5e").memory


def a_step(device):
  """A step under `fp8` on all devices of a target, with the shapes of its arguments."""
  loss = lambda params, x: (jnp.tanh(jnp.tanh(x @ params["in"]) @ params["mid"]) @ params["out"]).mean()
  axes = {} if device.devices == 1 else {"mesh": jax.sharding.AbstractMesh((device.devices,), ("fsdp",))}
  step = mpjax.make_train_step(loss, optax.adam(1e-3), "fp8", **axes)
  params = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in ("in", "mid", "out")}
  state = jax.eval_shape(mpjax.make_train_step(loss, optax.adam(1e-3), "fp8").init, params)
  return step, state, jax.ShapeDtypeStruct((256 * device.devices, 256), jnp.float32)


def test_every_target_has_a_plan_in_eight_bits_or_in_the_compute_dtype():
  fp8 = {"hopper": {"float8_e4m3fn", "float8_e5m2"}, "tpu_v5": {"float8_e4m3b11fnuz"}}
  for name in (*FILES, "v5e:2x2", "tpu7x:2x2x1", "h100:2x8"):
    target = get_target(name)
    plan = mpjax.plan(*a_step(target), target=target, compile=False)
    dtypes = set(plan.matrix_flops())
    assert 0 < plan.peak < plan.room, name
    assert 0 < 0.9 * plan.floor.seconds < plan.time.seconds, name
    if target.matrix_units in formats.LOW_PRECISION:
      assert any(map(formats.narrow_bits, dtypes)), name
      assert dtypes >= fp8.get(target.matrix_units, set()), name
    else:
      assert dtypes == {"bfloat16"}, name
