"""What is said once for a release: the Pythons that are tested, what the workflows run and may do."""

import pathlib
import re
import tomllib

import yaml

from mpjax.cli import COMMANDS

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {
  file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "workflows").glob("*.yml")
}


def commands():
  """The shell text of all steps."""
  for workflow in WORKFLOWS.values():
    for job in workflow["jobs"].values():
      yield from (step["run"] for step in job["steps"] if "run" in step)


def test_every_python_of_the_package_is_tested():
  names = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
  assert WORKFLOWS["test"]["jobs"]["newest"]["strategy"]["matrix"]["python"] == names
  assert f">={names[0]}" == PROJECT["requires-python"]


def test_the_commands_of_the_workflows_name_what_there_is():
  text = "\n".join(commands())
  assert set(re.findall(r"mpjax (\w+)", text)) <= {*COMMANDS}
  for extras in re.findall(r'\.\[([\w,-]+)\]"', text):
    assert {*extras.split(",")} <= {*PROJECT["optional-dependencies"]}
  for file in re.findall(r"\b(?:scripts|examples|tests)/[\w./-]+\.\w+", text):
    assert (ROOT / file).exists(), file


def test_only_publishing_may_write_and_only_for_a_tag():
  for name, workflow in WORKFLOWS.items():
    assert workflow["permissions"] == {"contents": "read"}, name
    for job, settings in workflow["jobs"].items():
      assert "timeout-minutes" in settings, job
      if "permissions" in settings:
        assert (name, job) == ("package", "publish")
        assert settings["permissions"] == {"id-token": "write"}
        assert settings["if"] == "startsWith(github.ref, 'refs/tags/v')"
