"""Keys of a kind: which values an annotation takes, and that a config reads back as it was written."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import pydantic
import pytest
import yaml

# What a registered name leads to.
from mpjax.registry._kinds import MODELS
from mpjax.train import ConfigError, load_config, register_data, register_model
from tests.train._runs import raises_one_line

REST = {"data": {"kind": "digits"}}
Odd = Annotated[int, pydantic.Field(gt=0, multiple_of=2)]


def with_options(
  info,
  *,
  count: int,
  rate: float = 0.5,
  name: str = "a",
  on: bool = False,
  choice: Literal["x", "y", 3] = "x",
  maybe: int | None = None,
  implicit: int = None,  # noqa: RUF013
  sizes: tuple[int, ...] = (1, 2),
  pair: tuple[int, str] = (1, "b"),
  names: list[str] = ["a"],  # noqa: B006
  sequence: Sequence[float] = (),
  by_name: dict[str, float] = {},  # noqa: B006
  even: Odd = 2,
  text: "str | list[str]" = "t",
  untyped=3,
  free=None,
  copy: int = 1,
  model_config: int = 1,
):
  """Some names are those of attributes of pydantic's models."""


@pytest.fixture(autouse=True, scope="module")
def _with_options(_kinds):
  register_model("with_options")(with_options)


def options(**given):
  return load_config({"model": {"kind": "with_options", "count": 1, **given}, **REST}).model.options


def test_a_value_that_fits_is_taken_and_reads_back():
  for key, value, expected in [
    ("count", 3, 3),
    ("rate", 1, 1.0),
    ("choice", 3, 3),
    ("maybe", None, None),
    ("implicit", 4, 4),
    ("sizes", [4, 5, 6], (4, 5, 6)),
    ("pair", [2, "c"], (2, "c")),
    ("names", ["b"], ["b"]),
    ("sequence", [1, 2.5], [1.0, 2.5]),
    ("by_name", {"a": 1}, {"a": 1.0}),
    ("even", 4, 4),
    ("text", ["a", "b"], ["a", "b"]),
    ("untyped", 7, 7),
    ("free", {"any": ["thing"]}, {"any": ["thing"]}),
    ("copy", 2, 2),
    ("model_config", 2, 2),
  ]:
    found = options(**{key: value})[key]
    assert (found, type(found)) == (expected, type(expected)), key
    config = load_config({"model": {"kind": "with_options", "count": 1, key: value}, **REST})
    assert load_config(yaml.safe_load(config.to_yaml())).model == config.model, key


def test_a_value_that_does_not_is_one_line():
  for key, value, words in [
    ("count", 1.5, "model.count=1.5: expected an integer"),
    ("count", True, "model.count=True: expected a number, not True"),
    ("rate", float("nan"), "model.rate=nan: expected a finite number"),
    ("rate", True, "expected a number"),
    ("name", 3, "model.name=3: expected text"),
    ("on", "perhaps", "model.on='perhaps': expected true or false"),
    ("choice", "z", "model.choice='z': expected 'x', 'y' or 3"),
    ("sizes", [1, True], "model.sizes.1=True: expected a number"),
    ("sizes", 3, "model.sizes=3: expected a list"),
    ("by_name", {"a": "b"}, "model.by_name.a='b': expected a number"),
    ("even", 3, "model.even=3: expected a multiple of 2"),
    ("even", -2, "model.even=-2: expected a number greater than 0"),
    ("other", 1, "unknown key 'model.other' of model.kind=with_options: expected one of count, rate"),
  ]:
    raises_one_line(ConfigError, [words], options, **{key: value})


def test_a_key_without_a_default_has_to_be_given():
  with pytest.raises(ConfigError, match=r"^missing key 'model.count': model.kind=with_options needs it$"):
    load_config({"model": {"kind": "with_options"}, **REST})


def test_a_kind_may_be_registered_again():
  """As a cell of a notebook does that is run again."""
  before = MODELS.find("with_options")
  register_model("with_options")(with_options)
  assert MODELS.find("with_options").fun is before.fun


def test_a_section_has_no_key_of_another_kind():
  tree = {"model": {"kind": "vit", "patch": 4}, **REST}
  changed = tree | {"model": tree["model"] | {"kind": "resnet"}}
  with pytest.raises(ConfigError, match=r"unknown key 'model.patch' of model.kind=resnet: .* stages, width"):
    load_config(changed)


def test_a_kind_is_a_function():
  for fun in (3, dataclasses.make_dataclass("C", ["x"])):
    with pytest.raises(TypeError, match="expected a function"):
      register_model("no_function")(fun)


def test_a_function_of_code_without_a_module_can_be_registered_again():
  """As of a cell of a notebook, or of an example that is executed."""
  for _ in range(2):
    made = {}
    exec("def load(*, width: int = 64): ...", made)
    made["load"].__module__ = None
    register_data("of_no_module")(made["load"])
