"""`scripts/numerics.py` and `numerics.every` as a user meets them."""

import json
import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpjax.cli import main
from mpjax.train import load_config
from tests.train._runs import write_line
from tests.train._tiny_gpt import write_tiny_gpt
from tests.train.conftest import _kinds  # noqa: F401 - a fixture

SCALED_TOO_FAR = "policy={base: fp16, loss_scaling: {kind: static, init_scale: 16777216}}"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """The path of a small config; an inspection compiles the model many times over."""
  [path] = write_tiny_gpt(tmp_path_factory.mktemp("numerics"), layers=1)
  return path


@pytest.fixture(scope="module")
def line(_kinds, tmp_path_factory):  # noqa: F811
  """The path of a config of few operations, each of which a hunt compiles."""
  [path] = write_line(tmp_path_factory.mktemp("line"))
  return path


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
  """A finished run in float16, that looked at its numbers on the way."""
  out = tmp_path_factory.mktemp("trained") / "run"
  arguments = [config, "policy=fp16", "train.steps=8", "numerics.every=4", f"out={out}"]
  assert main(["train", *arguments]) == 0
  return out


@pytest.fixture(scope="module")
def plain(config, tmp_path_factory):
  """A finished run in float16."""
  out = tmp_path_factory.mktemp("plain") / "run"
  assert main(["train", config, "policy=fp16", "train.steps=8", f"out={out}"]) == 0
  return out


@pytest.fixture
def run(config, tmp_path, monkeypatch, capsys):
  """Runs the command line in an empty folder; returns its report as data, and what it printed."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("COLUMNS", "116")

  def run(*arguments, config=config):
    assert main(["numerics", str(config), *arguments, "--json", "report.json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads((tmp_path / "report.json").read_text()), printed.out

  return run


@pytest.mark.slow
def test_a_config_is_inspected_after_some_steps(run, tmp_path):
  report, out = run("policy=fp16", "steps=3", "batches=2")
  assert (report["policy"], report["step"], report["batches"], report["rows"]) == ("fp16", 3, 2, 16)
  kinds = {"activation", "activation gradient", "parameter", "weight gradient", "update"}
  assert {t["kind"] for t in report["tensors"]} == kinds
  assert {"GPT/blocks/0/qkv", "GPT/blocks/0/down"} <= {t["module"] for t in report["tensors"]}
  assert all(t["error"] < 0.05 for t in report["tensors"] if t["error"] is not None)
  assert report["advice"]["unchanged"]
  lines = out.splitlines()
  answer = lines[lines.index("inspected batch 2 of 2") + 1 : -2]  # then where the page and the data are
  assert len(answer) <= 12
  assert answer[0] == "numerics of tiny (gpt of 20,576 parameters), policy fp16: the policy is good as it is"
  assert lines[0] == "compiling the training step, and training 3 steps"
  assert "inspected batch 2 of 2" in lines
  page = tmp_path / "runs" / "numerics" / "tiny-fp16.html"
  assert "GPT/blocks/0/qkv" in page.read_text()


@pytest.mark.slow
def test_a_run_directory_is_a_config_with_its_newest_checkpoint(run, trained, tmp_path):
  report, out = run("--table", "modules", config=trained)
  assert "GPT/blocks/0/qkv" in out
  assert (report["step"], report["policy"]) == (8, "fp16")
  assert report["title"] == "run (gpt of 20,576 parameters)"
  assert "GPT/blocks/0/qkv" in (trained / "numerics.html").read_text()


@pytest.mark.slow
def test_a_run_asked_about_another_policy_gets_a_page_and_is_left_alone(run, trained, config):
  before = set(trained.rglob("*"))
  report, _ = run("policy=bf16", f"checkpoint={trained / 'checkpoints' / '4'}")
  assert (report["step"], report["policy"], report["loss_scale"]) == (4, "bf16", 1.0)
  assert set(trained.rglob("*")) == before | {trained / "numerics-bf16.html"}


@pytest.mark.slow
def test_the_advised_config_trains_where_the_other_could_not(run, line, tmp_path, capsys):
  report, out = run(SCALED_TOO_FAR, "steps=1", "batches=1", "--apply", "advised.yaml", config=line)
  assert any(f["severity"] == "problem" for f in report["findings"])
  assert "advised.yaml" in out
  advised = tmp_path / "advised.yaml"
  assert load_config(advised).resolve_policy().loss_scaling.kind == "dynamic"
  assert main(["numerics", line, "steps=0", "batches=1", "--apply", "advised.yaml"]) == 2
  assert capsys.readouterr().err == (
    "error: --apply advised.yaml: exists; it is not overwritten, choose another name\n"
  )
  skipped = {}
  for name, arguments in (("asked", [line, SCALED_TOO_FAR]), ("advised", [str(advised)])):
    assert main(["train", *arguments, "train.steps=6", f"out={tmp_path / name}"]) == 0
    skipped[name] = json.loads((tmp_path / name / "summary.json").read_text())["skipped_steps"]
  assert skipped == {"asked": 6, "advised": 0}


@pytest.mark.slow
def test_looking_at_a_run_changes_nothing_and_leaves_histograms(trained, plain):
  lines = lambda out: (out / "metrics.jsonl").read_text().splitlines()
  losses = lambda out: [json.loads(line)["loss"] for line in lines(out)]
  assert losses(trained) == losses(plain)
  events = EventAccumulator(str(trained / "tensorboard"), size_guidance={"histograms": 0})
  events.Reload()
  tags = events.Tags()
  for kind in ("activations", "activation gradients", "parameters", "weight gradients", "updates"):
    found = [tag for tag in tags["histograms"] if tag.startswith(f"{kind}/")]
    assert found, kind
    assert [event.step for event in events.Histograms(found[0])] == [4, 8]
  shares = [tag for tag in tags["scalars"] if tag.startswith("numerics/")]
  assert any("lost in" in tag.replace("_", " ") for tag in shares)
  assert all(0 <= event.value <= 1 for tag in shares for event in events.Scalars(tag))


@pytest.mark.slow
def test_a_run_that_stops_names_the_operation_and_is_hunted_again(line, tmp_path, capsys):
  out = tmp_path / "stuck"
  policy = "policy={base: fp16, loss_scaling: {init_scale: 16777216, min_scale: 8388608}}"
  assert main(["train", line, policy, "train.max_skips=3", "train.steps=50", f"out={out}"]) == 3
  error = capsys.readouterr().err
  assert "overflowed in float16, backward pass" in error
  assert main(["numerics", str(out), "--hunt"]) == 0
  assert "overflowed in float16, backward pass" in capsys.readouterr().out
  assert main(["numerics", str(out), "policy=bf16", "--hunt", str(out / "nonfinite_batch_3.npz")]) == 0
  assert "every value is finite" in capsys.readouterr().out


def test_the_formats_are_printed_without_a_config(capsys):
  assert main(["numerics", "--formats"]) == 0
  assert "65504" in capsys.readouterr().out


ERRORS = [
  ("CONFIG checkpoint=nowhere", "nowhere is not a run directory"),
  ("CONFIG checkpoint=RUN/checkpoints/3", "there are 4, 8"),
  ("CONFIG checkpoint=RUN model.dim=64", "another model"),
  ("RUN checkpoint=RUN", "expected one of them"),
  ("CONFIG policy=bf16,fp16", "expected one policy"),
  ("CONFIG batches=0", "batches=0: expected a whole number from 1 on"),
  ("CONFIG steps=x", "steps=x: expected a whole number"),
  ("CONFIG keep=1.5", "keep=1.5: expected a share between 0 and 1"),
  ("CONFIG numerics.evry=5", "did you mean 'every'"),
  ("CONFIG --hunt", "expected a checkpoint"),
  ("CONFIG checkpoint=RUN --hunt", "holds no nonfinite_batch_"),
  ("CONFIG checkpoint=RUN --hunt bad.npz", "expected rows of"),
  ("CONFIG checkpoint=RUN --hunt text.npz", "cannot be read as a batch"),
]


def test_an_error_is_one_line_and_status_2(config, plain, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  np.savez("bad.npz", tokens=np.zeros((8, 5), np.int32))
  (tmp_path / "text.npz").write_text("no archive")
  for line, expected in ERRORS:
    words = line.replace("CONFIG", str(config)).replace("RUN", str(plain)).split()
    assert main(["numerics", *words]) == 2, line
    [error] = capsys.readouterr().err.splitlines()
    assert expected in error, line


def test_a_run_of_an_earlier_release_is_resumed(config, plain, tmp_path):
  out = tmp_path / "run"
  shutil.copytree(plain, out)
  (out / "summary.json").unlink()
  file = out / "config.yaml"
  lines = file.read_text().splitlines(keepends=True)
  start = lines.index("numerics:\n")
  file.write_text("".join(lines[:start] + lines[start + 2 :]))
  assert main(["train", config, "policy=fp16", "train.steps=8", f"out={out}"]) == 0
