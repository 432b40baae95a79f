"""`scripts/plan.py` as a user meets it: reports, JSON, searches, exit statuses."""

import json
import math
import pathlib

import jax
import pytest

from mpjax._render.plain_text import bytes_text
from mpjax.cli import main
from mpjax.planner import ARGUMENT_PARTS, TRANSIENT_PARTS, get_target
from mpjax.train import Planner, load_config, make_setup
from tests.train._tiny_gpt import write_tiny_gpt

pytestmark = pytest.mark.optimised
DIM, LAYERS, SEQUENCE, VOCABULARY = 32, 2, 16, 256
MB = 10**6


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """Path of the config of a GPT of one layer, which is traced soon."""
  [path] = write_tiny_gpt(tmp_path_factory.mktemp("plan"))
  file = pathlib.Path(path)
  file.write_text(file.read_text().replace("layers: 2", "layers: 1").replace("dropout: 0.1", "dropout: 0.0"))
  return path


@pytest.fixture
def run(config, tmp_path, capsys, monkeypatch):
  """Runs the command line; returns its report as data, and what it printed."""
  monkeypatch.setenv("COLUMNS", "116")

  def run(*arguments):
    file = tmp_path / "report.json"
    assert main(["plan", config, *arguments, "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(file.read_text()), printed.out

  return run


@pytest.fixture
def fails(config, capsys):
  """Runs a command line that is to fail; returns its one line."""

  def fails(*arguments, config=config):
    assert main(["plan", config, *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line

  return fails


def analytic(*arguments):
  return ("target=h200", "--analytic", *arguments)


@pytest.fixture(scope="module")
def parameters(config):
  state = make_setup(load_config(config)).shapes()[0]
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))


def test_report_holds_the_plan(run, parameters):
  report, printed = run(*analytic("policy=bf16"))
  [plan] = report["plans"]
  assert report.keys() == {"plans"}
  assert (plan["label"], plan["target"], plan["devices"], plan["compiled"]) == ("bf16", "h200", 1, None)
  assert plan["parameters"] == parameters
  assert plan["memory"]["parts"].keys() <= {*ARGUMENT_PARTS, *TRANSIENT_PARTS}
  assert plan["memory"]["parts"]["master weights"] == 4 * parameters
  assert plan["memory"]["optimizer"]["mu float32"] == 4 * parameters
  assert plan["peak"] == plan["memory"]["peak"] == sum(plan["memory"]["parts"].values())
  assert sum(plan["matrix_flops"].values()) == sum(product["flops"] for product in plan["products"])
  assert 0 < plan["floor"]["seconds"] == max(plan["floor"]["parts"].values())
  assert any("GPT/blocks/*" in row["path"] for row in plan["memory"]["saved"])
  assert len(printed.splitlines()) <= 12
  for words in ("bf16", "fits: ", "bfloat16 100.0%", "h200"):
    assert words in printed
  _, memory = run(*analytic("policy=bf16", "--table", "memory"))
  assert "master weights" in memory
  assert "gpt.py:" not in memory
  _, everything = run(*analytic("policy=bf16", "--all"))
  for words in (printed.partition("more:")[0], "master weights", "gpt.py:", "H200"):
    assert words in everything


def test_policies_stand_side_by_side(run, parameters):
  report, printed = run(*analytic("policy=fp32, bf16,fp16"))
  plans = {plan["label"]: plan for plan in report["plans"]}
  assert list(plans) == ["fp32", "bf16", "fp16"]
  assert all(label in printed for label in plans)
  assert len(printed.splitlines()) <= 12
  assert [next(iter(p["matrix_flops"])) for p in plans.values()] == ["tensorfloat32", "bfloat16", "float16"]
  flops = [sum(p["matrix_flops"].values()) for p in plans.values()]
  assert flops[0] == flops[1] == flops[2]
  assert plans["bf16"]["memory"]["saved_bytes"] < plans["fp32"]["memory"]["saved_bytes"]


def test_a_policy_may_be_a_string_of_dtypes(run):
  spec = "params=float32,compute=bfloat16,output=float32"
  [plan] = run(*analytic(f"policy={spec}"))[0]["plans"]
  assert plan["label"] == spec
  assert list(plan["matrix_flops"]) == ["bfloat16"]


def test_the_configs_own_policy_is_the_default_as_the_target_resolves_it(run):
  for target, dtype in (("h200", "float16"), ("v5e", "bfloat16")):
    report, _ = run(f"target={target}", "--analytic")
    assert [list(plan["matrix_flops"]) for plan in report["plans"]] == [[dtype]]


@pytest.mark.parametrize(("target", "mesh", "devices"), [("h200:8", 4, 4), ("v5e:2x4", -1, 8)])
def test_a_batch_lies_over_the_devices(run, target, mesh, devices):
  share, _ = run(f"target={target}", "--analytic", f"mesh.data={mesh}", "policy=bf16")
  alone, _ = run(f"target={target.partition(':')[0]}", "--analytic", "policy=bf16")
  [share], [alone] = share["plans"], alone["plans"]
  assert share["devices"] == devices
  if target.startswith("h200"):
    assert share["memory"]["parts"]["batch"] * devices == alone["memory"]["parts"]["batch"]
  assert share["memory"]["parts"]["master weights"] == alone["memory"]["parts"]["master weights"]
  # Each product is divided, and rounded down.
  assert sum(share["matrix_flops"].values()) * devices == pytest.approx(
    sum(alone["matrix_flops"].values()), rel=1e-3
  )


@pytest.mark.slow
@pytest.mark.parametrize(("policies", "step", "size"), [("bf16", 3, "0.1 gb"), ("fp32,bf16", 256, "100MB")])
def test_fit_finds_a_batch_that_fits_and_the_next_does_not(run, config, policies, step, size):
  overrides = [f"train.accumulate={step}", f"data.batch_size={8 * step}"]
  report, printed = run(*analytic(f"policy={policies}", "--fit", "--memory", size, *overrides))
  planner = Planner(load_config(config, overrides), get_target("h200"))
  for fit, plan, policy in zip(report["fit"], report["plans"], policies.split(","), strict=True):
    assert (fit["label"], fit["memory"]) == (policy, 100 * MB)
    assert fit["batch"] % step == 0
    assert fit["next_batch"] == fit["batch"] + step
    peaks = [planner.plan(policy, batch=fit[name], compile=False).peak for name in ("batch", "next_batch")]
    assert peaks[0] <= 100 * MB < peaks[1] == fit["next_peak"]
    assert plan["peak"] == peaks[0]
    assert f"{policy}: largest batch that fits {bytes_text(100 * MB)}: {fit['batch']} (" in printed
  batches = [fit["batch"] for fit in report["fit"]]
  assert batches == sorted(set(batches))  # half precision fits more


@pytest.mark.slow
def test_cheapest_is_the_fastest_of_policies_and_recomputations_that_fits(run):
  arguments = analytic("--cheapest", "policy=fp32,bf16", "data.batch_size=4096")
  report, printed = run(*arguments, "--memory", "40GB")
  plans = {plan["label"]: plan for plan in report["plans"]}
  assert {"fp32", "bf16"} < plans.keys()
  assert {label.partition(" recompute=")[0] for label in plans} == {"fp32", "bf16"}
  best = plans[report["cheapest"]]
  assert best["time"]["seconds"] == min(plan["time"]["seconds"] for plan in plans.values())
  progress, answer = printed.splitlines()[: len(plans)], printed.splitlines()[len(plans) :]
  assert progress[0] == f"plan 1 of {len(plans)}: fp32, recompute islands, gather step"
  assert answer[0] == f"cheapest that fits {bytes_text(40e9)}: {best['label']}, {bytes_text(best['peak'])}"
  assert len(answer) <= 12
  # With a byte less than the most of them takes, it is not that one.
  largest = max(plans.values(), key=lambda plan: plan["peak"])
  report, _ = run(*arguments, "--memory", str(largest["peak"] - 1))
  assert plans[report["cheapest"]]["peak"] < largest["peak"]


BAD = [
  ("target=h20", "unknown target 'h20': expected one of here, a100,"),
  ("policy=fp61", "policy: unknown policy 'fp61'"),
  ("policy=bf16,fp61", "policy: unknown policy 'fp61'"),
  ("target=h200 mesh.data=8", "target=h200: mesh.data=8: there is 1 device"),
  ("target=v5e:2x2 mesh.data=8", "target=v5e:2x2: mesh.data=8: there are 4 devices"),
  ("target=h200:3 mesh.data=3", "data.batch_size=8: expected a multiple of 3"),
  ("target=h200 train.accumulate=3", "data.batch_size=8 is not divisible by train.accumulate=3"),
  ("nosuch=3", "unknown key 'nosuch'"),
  ("--json /no/dir/plan.json", "--json /no/dir/plan.json: cannot be written (No such file or directory)"),
  ("target=h200 --fit --memory 1kB", "not even a batch of 1 fits 1"),
  ("target=h200 --cheapest --memory 1kB policy=bf16", "none of "),
  ("--table memry", "--table: no table 'memry': expected one of all, summary"),
]


def test_an_error_is_one_line_and_status_2(fails, tmp_path):
  for line, message in BAD:
    assert fails("--analytic", *line.split()).startswith(f"error: {message}"), line
  for text in ("80XB", "", ".GB", "0", "-1GB", "1.2.3GB", "nan", "8 0GB"):
    line = fails(*analytic("--fit", f"--memory={text}"))
    assert line.startswith(f"error: --memory {text!r}: expected a size such as 80GB")
  missing = str(tmp_path / "none.yaml")
  assert fails("--analytic", config=missing).startswith(f"error: no such config file: {missing}: expected ")
