"""`mpjax` as a user calls it: the list of commands, wrong ones, missing packages, and the wheel alone."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

import mpjax
from mpjax._render.plain_text import pip_install
from mpjax.cli import COMMANDS, main, run_command

ROOT = pathlib.Path(__file__).parents[2]


def test_help_fits_a_screen_and_has_examples_before_the_commands(capsys):
  assert main(["--help"]) == 0
  text = capsys.readouterr().out
  assert all(f"  {name} " in text for name in COMMANDS)
  assert text.index("  mpjax train ") < text.index("commands:")
  assert len(text.splitlines()) <= 24
  assert max(map(len, text.splitlines())) <= 80
  assert main([]) == 2
  assert capsys.readouterr().err == text
  assert main(["--version"]) == 0
  assert capsys.readouterr().out == f"mpjax {mpjax.__version__}\n"


def test_a_wrong_command_is_answered_with_the_nearest_one(capsys):
  assert main(["trian", "gpt_stdlib"]) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: unknown command 'trian': expected one of train, explain")
  assert error.endswith("did you mean 'train'?\n")


def test_each_command_says_how_it_was_called_and_gives_an_example(capsys):
  for command in COMMANDS:
    with pytest.raises(SystemExit) as status:
      main([command, "--help"])
    assert status.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: mpjax {command} " in out
    assert f"example: mpjax {command} " in " ".join(out.split()) or command == "bench"


def test_help_version_and_a_wrong_command_import_no_jax():
  code = """
import sys
from mpjax.cli import COMMANDS, main
lines = [["--help"], ["--version"], ["trian"], ["export", "runs/x", "--dtype", "bf16"]]
for line in [*lines, *([command, "--help"] for command in COMMANDS)]:
  try:
    main(line)
  except SystemExit:
    pass
print([name for name in ("jax", "numpy", "flax", "pydantic", "rich") if name in sys.modules])
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.endswith("\n[]\n")


WRONG_FLAGS = {
  "train gpt_stdlib --lr=0.1": f"mpjax train --help says what it takes, such as {COMMANDS['train'].example}",
  "export runs/x --dtype bf16": "mpjax export --help says what it takes, such as runs/x dtype=bf16",
  "plan --fitt": "did you mean --fit?",
  "numerics --pictures x": "save_html writes a page that draws them, --html says where",
  "plan --picture x": "--json FILE has the bytes of each part; docs/notebooks/plan_7b.ipynb draws them",
  "tune --prove": "train both: mpjax train tuned.yaml, and mpjax train CONFIG policy=fp32",
}


def test_a_wrong_flag_is_answered_with_what_to_write(capsys):
  for line, advice in WRONG_FLAGS.items():
    command, *words = line.split()
    with pytest.raises(SystemExit) as status:
      main([command, *words])
    assert status.value.code == 2
    flag = next(word for word in words if word.startswith("--")).partition("=")[0]
    assert capsys.readouterr().err == f"error: mpjax {command} has no option {flag}: {advice}\n"


@pytest.mark.parametrize("line", ["plan --fit --cheapest", "plan --all --table time", "tune --for speed"])
def test_flags_that_exclude_each_other_and_wrong_choices_are_errors(line, capsys):
  with pytest.raises(SystemExit) as status:
    main(line.split())
  assert status.value.code == 2
  assert "not allowed with" in (error := capsys.readouterr().err) or "invalid choice" in error


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch, capsys):
  monkeypatch.delitem(sys.modules, "mpjax.cli._export_command", raising=False)
  monkeypatch.setitem(sys.modules, "mpjax.train._export", None)  # what an import that fails leaves

  class Missing:
    def find_spec(self, name, path=None, target=None):
      if name == "mpjax.cli._export_command":
        raise ModuleNotFoundError("No module named 'safetensors.flax'", name="safetensors.flax")

  monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
  assert run_command("export", ["runs/x"], "mpjax export") == 2
  expected = f"error: mpjax export needs safetensors: {pip_install('train')}\n"
  assert capsys.readouterr().err == expected


def test_a_wrong_config_or_run_is_answered_with_those_there_are(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  for line, answer in [
    ("explain gpt_stdlb", "gpt_stdlb: expected a YAML file, or an example: gpt_stdlib"),
    ("explain gpt_stdlb", "did you mean 'gpt_stdlib'?"),
    ("numerics runs/gpt-fp16", "no such run directory or config file: runs/gpt-fp16: no runs there"),
  ]:
    assert main(line.split()) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert answer in error
  assert list(tmp_path.iterdir()) == []
  run = tmp_path / "runs" / "gpt-bf16"
  run.mkdir(parents=True)
  (run / "config.yaml").touch()
  assert main(["numerics", "runs/gpt-fp16"]) == 2
  assert "there are runs/gpt-bf16; did you mean 'runs/gpt-bf16'?" in capsys.readouterr().err


def test_examples_are_found_by_name_and_are_the_default(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  by_name = mpjax.train.load_config("gpt_stdlib", ["policy=bf16"])
  assert by_name == mpjax.train.load_config(ROOT / "configs" / "gpt_stdlib.yaml", ["policy=bf16"])
  assert by_name.out == "runs/gpt_stdlib-bf16"  # in the folder that the command is called from
  for arguments in (["seed=-1"], ["gpt_stdlib", "seed=-1"]):
    assert main(["train", *arguments]) == 2


@pytest.mark.slow
def test_the_wheel_alone_trains_from_any_folder(tmp_path):
  build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
  subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
  (wheel,) = tmp_path.glob("*.whl")
  with zipfile.ZipFile(wheel) as file:
    file.extractall(tmp_path / "site")
    entry_points = next(name for name in file.namelist() if name.endswith("entry_points.txt"))
    assert "mpjax = mpjax.cli:main" in file.read(entry_points).decode()
  folder = tmp_path / "elsewhere"
  folder.mkdir()
  environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"}

  def run(*arguments):
    code = f"import mpjax, sys; assert mpjax.__file__.startswith({str(tmp_path)!r}); from mpjax.cli import main; sys.exit(main())"
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)

  small = [
    "train.steps=2",
    "model.dim=16",
    "model.layers=1",
    "model.heads=2",
    "data.eval_batches=1",
    "mesh.data=1",
  ]
  done = run("train", "policy=bf16", *small)
  assert done.returncode == 0, done.stderr
  assert json.loads((folder / "runs/gpt_stdlib-bf16/summary.json").read_text())["steps"] == 2
  done = run("explain", "vit_digits", "policy=bf16", "mesh.data=1")
  assert done.returncode == 0, done.stderr
  done = run("bench")
  assert done.returncode == 2
  assert "run it from a checkout of mpjax" in done.stderr


def test_a_bare_dtype_as_a_policy_is_one_line_on_stderr(capsys):
  small = ["model.dim=16", "model.layers=1", "model.heads=2", "mesh.data=1"]
  for policy, meant in {"bfloat16": "bf16", "float16": "fp16", "16-true": "fp16", "bf16-true": None}.items():
    assert main(["plan", "gpt_stdlib", f"policy={policy}", "--analytic", *small]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line.lower()]
    assert len(lines) == (meant is not None), policy
    assert all(line.startswith(f"warning: policy {policy!r}") and repr(meant) in line for line in lines)
