"""The devices that plans are for: their names, their files and their figures."""

import importlib.resources
import re
import types

import jax
import pytest
import yaml

from mpjax import formats
from mpjax.planner import Target, _targets, get_target, presets_of, target_names

GPUS = ("a100", "b200", "h100", "h200", "l4", "rtx4090", "t4", "v100")
TPUS = ("v5e", "v5p", "v6e")
FOLDER = importlib.resources.files("mpjax").joinpath("formats", "devices")
FILES = {f.name.removesuffix(".yaml"): yaml.safe_load(f.read_text()) for f in FOLDER.iterdir()}
GIB, TERA = 2**30, 1e12

# By hand from the vendors' pages: GiB or GB sold, TB/s, dense float16 TFLOP/s, units.
KNOWN = {
  "a100": (80, 2.0, 312, "ampere"),
  "h100": (80, 3.35, 989, "hopper"),
  "h200": (141, 4.8, 989, "hopper"),
  "b200": (180, 7.7, 2250, "blackwell"),
  "l4": (24, 0.3, 121, "ada"),
  "rtx4090": (24, 1.0, 165, "ada"),
  "t4": (16, 0.32, 65, "turing"),
  "v100": (16, 0.9, 125, "volta"),
  "v5e": (16, 0.819, 197, "tpu"),
  "v5p": (95, 2.765, 459, "tpu"),
  "v6e": (32, 1.64, 918, "tpu_v6"),
}


def test_every_file_is_a_target_and_no_other():
  assert target_names() == ["here", *sorted((*GPUS, *TPUS))]
  assert FILES.keys() == KNOWN.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_figures_are_the_published_ones(name):
  size, bandwidth, float16, units = KNOWN[name]
  target = get_target(name)
  assert target.memory / 1e9 == pytest.approx(size, rel=0.1)
  assert 0.7 * target.memory < target.usable <= target.memory
  assert target.bandwidth / TERA == pytest.approx(bandwidth, rel=0.03)
  assert target.flops["float16"] / TERA == pytest.approx(float16, rel=0.01)
  assert target.matrix_units == units
  assert target.devices == 1
  assert not target.is_here


@pytest.mark.parametrize("name", KNOWN)
def test_figures_go_together(name):
  target = get_target(name)
  rates = target.flops
  half = rates["float16"]
  assert rates.get("bfloat16", half) == half
  assert rates["float32"] < half
  assert rates.get("float8", half) >= half
  if target.kind == "gpu":
    assert rates["float32"] <= rates.get("tensorfloat32", rates["float32"]) < half
    assert rates.get("tensorfloat32", half / 2) == pytest.approx(half / 2, rel=0.03)
  else:
    assert rates["float32"] == pytest.approx(half / 6, rel=0.01)
  assert ("float8" in rates) == (name not in ("a100", "t4", "v100"))
  assert ("bfloat16" in rates) == (name not in ("t4", "v100"))
  assert target.matrix_units in formats.MATRIX_UNITS
  for dtype in ("bfloat16", "float16", *(("tensorfloat32", "float8") if target.kind == "gpu" else ())):
    assert formats.runs_on(target.matrix_units, dtype) == (dtype in rates)
  assert target.interconnect < target.bandwidth
  # A product of this depth is bound by memory, one of a large matrix by the units.
  assert 50 < half / target.bandwidth < 800


@pytest.mark.parametrize("name", KNOWN)
def test_a_file_says_where_its_figures_are_from_and_has_no_strange_keys(name):
  data = FILES[name]
  assert len(data["source"]) > 40
  known = {
    "device",
    "kind",
    "memory",
    "bandwidth",
    "flops",
    "interconnect",
    "on_chip",
    "jax_names",
    "matrix_units",
    "source",
  }
  assert data.keys() <= known | {"cuda", "tpu"}
  assert ("cuda" in data, "tpu" in data) == (name in GPUS, name in TPUS)


NAMES = [
  ("h200", 1, "1x1x1"),
  ("h200:1", 1, "1x1x1"),
  ("h200:8", 8, "1x1x8"),
  ("h100:2x8", 16, "1x2x8"),
  ("H100:2x8", 16, "1x2x8"),
  ("v5e", 1, "v5e:1x1"),
  ("v5e:2x4", 8, "v5e:2x4"),
  ("v5p:2x2x1", 4, "v5p:2x2x1"),
  ("v5p", 1, "v5p:1x1x1"),
  ("v6e:1x1", 1, "v6e:1x1"),
  ("v6e:16x16", 256, "v6e:16x16"),
]


@pytest.mark.parametrize(("name", "devices", "topology"), NAMES)
def test_a_name_says_how_many_devices_and_how_they_lie(name, devices, topology):
  target = get_target(name)
  assert (target.name, target.devices, target.topology) == (name, devices, topology)
  one = get_target(name.partition(":")[0])
  assert (target.device, target.memory, target.flops) == (one.device, one.memory, one.flops)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    (
      "h20",
      r"unknown target 'h20': expected one of here, a100, b200, .*v6e, .*h200:8 .*v5e:2x4; did you mean 'h200'",
    ),
    ("", r"unknown target '': expected one of here"),
    ("gpu", r"unknown target 'gpu'"),
    ("here:8", r"here:8"),
    *(
      (f"h200:{shape}", r"expected a number of GPUs, such as h200:8 or h200:2x8")
      for shape in ("0", "x", "-1")
    ),
    *((f"h200:{shape}", r"expected a number of GPUs") for shape in ("2x", "2x0", "1x2x3", "8 ", "1.5", "x8")),
    *(
      (f"v5e:{shape}", r"expected a slice of chips, such as v5e:")
      for shape in ("8", "0x4", "2x", "a", "2x2x2x2")
    ),
    ("v5e:2x2x2", r"v5e"),
    ("v5p:2x4", r"v5p"),
  ],
)
def test_a_name_that_is_none_is_refused(name, message):
  with pytest.raises(ValueError, match=message):
    get_target(name)


def test_a_target_is_its_own_name():
  target = get_target("h200:8")
  assert get_target(target) is target


def test_this_machine_is_its_devices():
  for name in (None, "here"):
    target = get_target(name)
    assert (target.name, target.kind, target.devices) == ("here", "cpu", jax.device_count())
    assert target.is_here
    assert target.extra == ""
    assert target.memory == target.usable > GIB
    assert (target.flops, target.bandwidth) == ({}, 0)


@pytest.mark.parametrize(
  ("platform", "kind", "name"),
  [
    ("gpu", "NVIDIA H200", "h200"),
    ("cuda", "NVIDIA H100 80GB HBM3", "h100"),
    ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
    ("gpu", "NVIDIA B200", "b200"),
    ("gpu", "NVIDIA L4", "l4"),
    ("gpu", "NVIDIA GeForce RTX 4090", "rtx4090"),
    ("tpu", "TPU v5 lite", "v5e"),
    ("tpu", "TPU v5", "v5p"),
    ("tpu", "TPU v6 lite", "v6e"),
    ("gpu", "NVIDIA L40S", None),
    ("tpu", "TPU v4", None),
    ("gpu", "Tesla T4", "t4"),
    ("gpu", "Tesla V100-SXM2-16GB", "v100"),
    ("gpu", "Tesla V100-SXM2-32GB", None),
  ],
)
def test_a_known_device_that_is_here_has_its_figures(platform, kind, name, monkeypatch):
  device = types.SimpleNamespace(
    platform=platform, device_kind=kind, memory_stats=lambda: {"bytes_limit": 7 * GIB}
  )
  monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
  target = get_target()
  assert (target.devices, target.is_here) == (2, True)
  assert kind in target.device
  if name is None:
    assert (target.flops, target.memory) == ({}, 7 * GIB)
  else:
    there = get_target(name)
    assert (target.flops, target.bandwidth, target.kind) == (there.flops, there.bandwidth, there.kind)
    assert target.matrix_units == there.matrix_units


@pytest.mark.parametrize(
  ("capability", "dtypes"), [("7.0", 1), ("7.5", 1), ("8.6", 3), ("12.0", 3), ("gfx942", 3)]
)
def test_units_of_a_gpu_that_no_file_describes_are_those_of_its_generation(capability, dtypes, monkeypatch):
  device = types.SimpleNamespace(
    platform="gpu", device_kind="Another GPU", compute_capability=capability, memory_stats=lambda: None
  )
  monkeypatch.setattr(jax, "local_devices", lambda: [device])
  names = ("float16", "bfloat16", "tensorfloat32")
  assert [formats.runs_on(get_target().matrix_units, n) for n in names] == [i < dtypes for i in range(3)]


def test_memory_of_a_device_that_is_here_is_its_own(monkeypatch):
  device = types.SimpleNamespace(
    platform="gpu", device_kind="NVIDIA A100-PCIE-40GB", memory_stats=lambda: {"bytes_limit": 30 * GIB}
  )
  monkeypatch.setattr(jax, "local_devices", lambda: [device])
  assert get_target().usable == 30 * GIB


@pytest.mark.parametrize("name", GPUS)
def test_a_gpus_description_has_each_fact_once(name):
  target = get_target(name)
  text = target.gpu_description()
  facts = FILES[name]["cuda"]
  keys = re.findall(r"^ {0,2}(\w+)", text, re.MULTILINE)
  assert len(keys) == len(set(keys))
  major, minor = facts["compute_capability"]
  for key, value in facts.items():
    if key != "compute_capability":
      assert len(re.findall(rf"^  {key}: {value}$", text, re.MULTILINE)) == 1
  assert text.count(f"cuda_compute_capability {{ major: {major} minor: {minor} }}") == 1
  assert text.count(f'device_description_str: "{target.device}"') == 1
  assert text.count("{") == text.count("}")


@pytest.mark.parametrize("name", GPUS)
def test_the_two_descriptions_of_a_gpu_agree(name):
  data = FILES[name]
  facts = data["cuda"]
  assert facts["device_memory_size"] == data["memory"]
  assert facts["memory_bandwidth"] == pytest.approx(data["bandwidth"])
  # A multiply and an add for every unit and cycle.
  peak = 2 * facts["core_count"] * facts["fpus_per_core"] * facts["clock_rate_ghz"] * 1e9
  assert peak == pytest.approx(data["flops"]["float32"], rel=0.1)
  assert (
    tuple(facts["compute_capability"])
    == {
      "volta": (7, 0),
      "turing": (7, 5),
      "ampere": (8, 0),
      "ada": (8, 9),
      "hopper": (9, 0),
      "blackwell": (10, 0),
    }[data["matrix_units"]]
  )


@pytest.mark.parametrize(
  ("name", "extra"), [*((n, "plan-cuda") for n in GPUS), *((n, "plan-tpu") for n in TPUS)]
)
def test_a_target_names_the_extra_that_compiles_for_it(name, extra):
  assert get_target(name).extra == extra


@pytest.mark.parametrize(
  ("name", "presets"),
  [
    ("t4", "fp16 fp32"),
    ("v100", "fp16 fp32"),
    ("a100", "bf16 fp16 tf32 fp32"),
    ("h200", "fp8 bf16 fp16 tf32 fp32"),
    ("v5p", "fp8 bf16 fp32"),
    ("here", "bf16 fp32"),
  ],
)
def test_presets_of_a_target_are_those_that_it_has_units_for(name, presets):
  assert presets_of(get_target(name)) == presets.split()


def test_a_target_cannot_be_changed():
  with pytest.raises(AttributeError):
    get_target("h200").memory = 1
  assert isinstance(_targets.get_target("h200"), Target)


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_what_jax_takes_of_a_gpu_is_what_the_environment_says(monkeypatch, name):
  for other in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
    monkeypatch.delenv(other, raising=False)
  assert get_target("h200").usable == int(0.75 * get_target("h200").memory)
  monkeypatch.setenv(name, ".9")
  assert get_target("h200").usable == int(0.9 * get_target("h200").memory)
  assert get_target("v5e").usable == get_target("v5e").memory
