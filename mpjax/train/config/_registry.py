"""Registers models, data and optimisers by name: mpjax's own and a user's."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, Union

import pydantic
import pydantic_core

from mpjax.dtypes import did_you_mean
from mpjax.train._errors import ConfigError
from mpjax.train.config._checks import Float, Int, Section, describe

_F = TypeVar("_F", bound=Callable[..., Any])
_REQUIRED = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Option:
  """A config key of a kind: a keyword argument of its function.

  Attributes:
    adapter: checks a value against the annotation.
    default: the keyword's default; `inspect.Parameter.empty` if the key is required.
  """

  adapter: pydantic.TypeAdapter[Any]
  default: Any


@dataclasses.dataclass(frozen=True)
class Registered:
  """A registered function that makes a model, data or an optimiser.

  Attributes:
    name: the name in a config.
    fun: the function.
    options: its keyword-only arguments.
  """

  name: str
  fun: Callable[..., Any]
  options: Mapping[str, Option]

  @property
  def is_own(self) -> bool:
    """Returns whether the function is mpjax's own."""
    return (self.fun.__module__ or "").startswith("mpjax.")  # code run by `exec` may have no module


class Kinds:
  """The registered kinds of one section of a config, in the order of registration.

  Args:
    section: `model`, `data` or `optimizer`.
    positional: names of the function's positional arguments.
    common: keys that every kind has and that no function takes.
    key: the key that names a kind.
    options: the key that holds a kind's own keys; empty if they are keys of the section.
  """

  def __init__(
    self,
    section: str,
    positional: tuple[str, ...],
    common: tuple[str, ...] = (),
    key: str = "kind",
    options: str = "",
  ):
    self.section, self.key = section, key
    self._options = f"{section}.{options}" if options else section
    self._positional, self._common = positional, common
    self._kinds: dict[str, Registered] = {}

  def register(self, name: str) -> Callable[[_F], _F]:
    """Returns a decorator that registers a function; it replaces a user's kind of the same name.

    Raises:
      TypeError: if the signature of the function does not say which keys exist.
      ValueError: if the name belongs to mpjax.
    """
    title = f"register_{self.section}({name!r})"
    if not (isinstance(name, str) and name):
      raise TypeError(f'{title}: expected a name, as in @mpjax.train.register_{self.section}("mine")')

    def decorate(fun: _F) -> _F:
      made = Registered(name, fun, _options(fun, title, self._positional, self._common))
      there = self.registered().get(name)
      if there is not None and there.is_own and not made.is_own:
        raise ValueError(f"{title}: mpjax itself uses this name; choose another")
      self._kinds[name] = made
      return fun

    return decorate

  def registered(self) -> dict[str, Registered]:
    """Returns all registered kinds by name."""
    importlib.import_module("mpjax.zoo")  # registers mpjax's own
    return dict(self._kinds)

  def find(self, name: object) -> Registered:
    """Returns the kind of that name.

    Raises:
      ConfigError: if no such kind is registered; the message explains plug-ins.
    """
    there = self.registered()
    if isinstance(name, str) and name in there:
      return there[name]
    names = f"expected one of {', '.join(there)}{did_you_mean(str(name), there)}; "
    raise ConfigError(
      f"unknown {self.section}.{self.key} {name!r}: {names if there else ''}a {self.key} of your own "
      "needs --plugin FILE.py or --plugin package.module on every command, as a config never loads code (in "
      "Python: mpjax.train.load_plugins)"
    )

  def check(self, section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a section's kind, with defaults.

    Raises:
      ConfigError: for a wrong key or value; one line that names the key.
    """
    if self.key not in section:
      raise ConfigError(
        f"missing key '{self.section}.{self.key}': expected one of {', '.join(self.registered())}"
      )
    kind = self.find(section[self.key])
    known = [key for key in self._common if key != self.key] + list(kind.options)
    for key in section:
      if key not in known and key != self.key:
        expected = f"expected one of {', '.join(known)}" if known else "it has none"
        where = f"unknown key '{self._options}.{key}' of {self.section}.{self.key}={kind.name}"
        raise ConfigError(f"{where}: {expected}{did_you_mean(str(key), known)}")
    return {key: self._value(kind, key, option, section) for key, option in kind.options.items()}

  def _value(self, kind: Registered, key: str, option: Option, section: Mapping[str, Any]) -> Any:
    if key not in section:
      if option.default is _REQUIRED:
        raise ConfigError(
          f"missing key '{self._options}.{key}': {self.section}.{self.key}={kind.name} needs it"
        )
      return option.default
    try:
      return option.adapter.validate_python(section[key])
    except pydantic.ValidationError as error:
      first = error.errors()[0]
      raise ConfigError(describe(first, (self._options, key, *first["loc"]))) from error


MODELS = Kinds("model", ("info",), ("kind",))
DATASETS = Kinds("data", (), ("kind", "batch_size", "eval_batches", "workers"))
TARGETS = Kinds("optimizer", ("learning_rate",), key="target", options="options")


def register_model(kind: str) -> Callable[[_F], _F]:
  """Registers a function as a model, for `model.kind` in a config.

  The function takes `info` (a `ModelInfo`: facts about the data, and how the run will use the model) and
  returns a `Task`. Its keyword-only arguments become keys of the config's `model` section, with their
  defaults; their annotations check the values.

  ```python
  @mpjax.train.register_model("waves_mlp")
  def waves_mlp(info, *, width: int = 64) -> mpjax.train.Task:
    def init(key):
      first, second = jax.random.split(key)
      return {
        "in": jax.random.normal(first, (info.features, width)),
        "out": jax.random.normal(second, (width, 1)) / width,
      }

    def loss_fn(params, batch):
      prediction = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
      return jnp.mean((prediction - batch["y"]) ** 2)

    return mpjax.train.Task(init, loss_fn)
  ```

  Args:
    kind: the name in a config.

  Returns:
    A decorator, which returns the function as it is.

  Raises:
    TypeError: if the signature of the function does not say which keys exist.
    ValueError: if the name is one of mpjax's own models.
  """
  return MODELS.register(kind)


def register_data(kind: str) -> Callable[[_F], _F]:
  """Registers a function as data, for `data.kind` in a config.

  The function returns `(train_rows, eval_rows)` or `(train_rows, eval_rows, info)`. Rows are a sequence: they
  have a length, and `rows[i]` is a dict of the arrays of one row. `info` is a mapping of facts that a model
  needs, such as `{"num_classes": 10}`. mpjax shuffles and batches the rows and divides them over processes.
  Keyword-only arguments become keys of the config's `data` section.

  ```python
  @mpjax.train.register_data("waves")
  def waves(*, count: int = 4096):
    x = np.linspace(-3, 3, count, dtype=np.float32)[:, None]
    rows = [{"x": each, "y": np.sin(each)} for each in x]
    return rows[::2], rows[1::2], {"features": 1}
  ```

  Args:
    kind: the name in a config.

  Returns:
    A decorator, which returns the function as it is.

  Raises:
    TypeError: if the signature of the function does not say which keys exist, or takes `kind`, `batch_size`,
      `eval_batches` or `workers`.
    ValueError: if the name is one of mpjax's own.
  """
  return DATASETS.register(kind)


def register_optimizer(target: str) -> Callable[[_F], _F]:
  """Registers a function as an optimiser, for `optimizer.target` in a config.

  The function takes the learning rate, an optax schedule, and returns an optax transform. Its keyword-only
  arguments become keys of `optimizer.options`. mpjax adds clipping and the loss scale.

  ```python
  @mpjax.train.register_optimizer("ademamix")
  def ademamix(learning_rate, *, alpha: float = 5.0) -> optax.GradientTransformation:
    return optax.contrib.ademamix(learning_rate, alpha=alpha)
  ```

  Args:
    target: the name in a config.

  Returns:
    A decorator, which returns the function as it is.

  Raises:
    TypeError: if the signature of the function does not say which keys exist.
  """
  return TARGETS.register(target)


class KindSection(Section):
  """A section of a config with a `kind`; its other keys are the arguments of the kind's function."""

  kinds: ClassVar[Kinds]
  kind: str
  options: dict[str, Any] = pydantic.Field(default_factory=dict)

  @pydantic.model_validator(mode="before")
  @classmethod
  def _check_options(cls, value: object) -> object:
    if isinstance(value, cls):
      return value
    if not isinstance(value, Mapping):
      raise ValueError("expected a mapping of keys, such as {kind: ...}")
    options = cls.kinds.check(value)
    own = {key: each for key, each in value.items() if key in cls.model_fields and key not in options}
    return own | {"options": options}

  @pydantic.model_serializer
  def _flat(self) -> dict[str, Any]:
    own = {key: getattr(self, key) for key in type(self).model_fields if key != "options"}
    return own | {key: pydantic_core.to_jsonable_python(value) for key, value in self.options.items()}


def _options(
  fun: Callable[..., Any], title: str, positional: tuple[str, ...], common: tuple[str, ...]
) -> dict[str, Option]:
  """Returns the keyword-only arguments of a function as options."""
  if not inspect.isfunction(inspect.unwrap(fun)):
    raise TypeError(f"{title} of a {type(fun).__name__}: expected a function")
  example = f"def {fun.__name__}({', '.join((*positional, '*', 'width: int = 64'))})"
  options: dict[str, Option] = {}
  by_position = []
  for name, parameter in inspect.signature(fun).parameters.items():
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
      by_position.append(name)
    elif parameter.kind != parameter.KEYWORD_ONLY:
      raise TypeError(f"{title}: {parameter} in {fun.__name__} takes keys without a name: write {example}")
    elif name in common:
      raise TypeError(f"{title}: mpjax itself uses the key {name!r}: choose another name")
    else:
      options[name] = _option(fun, name, parameter, title)
  if len(by_position) != len(positional):
    takes = f"takes {', '.join(by_position) or 'nothing'} by position"
    raise TypeError(f"{title}: {fun.__name__} {takes}: the keys of a config come after *: write {example}")
  return options


def _option(fun: Callable[..., Any], name: str, parameter: inspect.Parameter, title: str) -> Option:
  default = parameter.default
  annotation = parameter.annotation
  if annotation is _REQUIRED:  # take the type of the default
    known = (bool, int, float, str)
    annotation = type(default) if type(default) in known else Any
  try:
    inner = inspect.unwrap(fun)
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    annotation = typing.get_type_hints(holder, inner.__globals__, include_extras=True)[name]
    if default is None:
      annotation = Union[annotation, None]  # noqa: UP007 (`|` does not take every annotation)
    adapter = pydantic.TypeAdapter(_strict(annotation))
    if default is not _REQUIRED:
      # As it will be read from `config.yaml`, which holds every default.
      default = adapter.validate_python(pydantic_core.to_jsonable_python(default))
  except Exception as error:  # an undefined name, a type that no config can hold, and others
    reason = " ".join(str(error).split())
    raise TypeError(
      f"{title}: keyword {parameter}: expected plain data (numbers, text, lists, mappings): {reason}"
    ) from error
  return Option(adapter, default)


def _strict(annotation: Any) -> Any:
  """Returns an annotation that checks numbers as mpjax's own keys do."""
  if annotation in (int, float):
    return Int if annotation is int else Float
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Annotated:
    return Annotated[(_strict(arguments[0]), *arguments[1:])]
  if origin in (Union, types.UnionType):
    return functools.reduce(operator.or_, map(_strict, arguments))
  if origin in (list, tuple, dict):
    return origin[tuple(map(_strict, arguments))]
  return annotation
