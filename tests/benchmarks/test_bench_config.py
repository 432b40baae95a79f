"""A step of a user's own config, by policy."""

import json

import pytest

from mpjax.cli import main
from tests.train._own_config import PLUGIN, write_config


@pytest.mark.slow
def test_a_plugin_is_measured_under_each_policy(tmp_path, capsys):
  file = tmp_path / "report.json"
  arguments = [write_config(tmp_path, "plain"), "--plugin", PLUGIN, "policy=fp32,fp16", "model.width=8"]
  assert main(["bench", "config", *arguments, "--rounds", "2", "--json", str(file)]) == 0
  rows = json.loads(file.read_text())["policies"]
  assert list(rows) == ["fp32", "fp16"]
  assert all(row["step_s"] > 0 and row["peak_bytes"] > 0 for row in rows.values())
  assert "fp16" in capsys.readouterr().out
