"""Suites that need a device or its compiler, as far as they go without."""

import types

import jax
import pytest

from benchmarks.plan import _measured


@pytest.mark.parametrize(("kind", "name"), [("NVIDIA H200", "h200"), ("NVIDIA L40S", None)])
def test_a_gpu_is_found_among_the_described_ones(kind, name, monkeypatch):
  device = types.SimpleNamespace(
    platform="gpu", device_kind=kind, memory_stats=lambda: {"bytes_limit": 2**37}
  )
  monkeypatch.setattr(jax, "local_devices", lambda: [device])
  monkeypatch.setattr(_measured, "missing", lambda target: "")
  assert _measured.described_here() == name
