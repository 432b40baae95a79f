"""Kinds of models and data by name: mpjax's own, and those that a user's code registers."""

from __future__ import annotations

import dataclasses
import functools
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
from mpjax.train._sections import Float, Int, Section, describe

_F = TypeVar("_F", bound=Callable[..., Any])
_REQUIRED = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Option:
  """A key of a kind: a keyword of its function.

  Attributes:
    adapter: checks a value by the annotation.
    default: of the keyword; `inspect.Parameter.empty` for a key that has to be given.
  """

  adapter: pydantic.TypeAdapter[Any]
  default: Any


@dataclasses.dataclass(frozen=True)
class Registered:
  """A function that makes a model or data, by the name that a config gives it.

  Attributes:
    name: what `kind:` is.
    fun: the function.
    options: its keyword-only arguments.
  """

  name: str
  fun: Callable[..., Any]
  options: Mapping[str, Option]

  @property
  def is_own(self) -> bool:
    """Returns whether it is mpjax's own."""
    return (self.fun.__module__ or "").startswith("mpjax.")  # code that is executed may have no module


class Kinds:
  """The kinds of one section of a config, in the order in which they were registered.

  Args:
    section: `model`, `data` or `optimizer`.
    positional: what a function takes by position.
    common: keys that every kind has and that no function takes.
    key: the key that names a kind.
    options: where the keys of a kind are, if not beside that one.
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
    """Returns a decorator that makes a function a kind; a kind of the same name gives way to it.

    Raises:
      TypeError: for a function whose signature does not say which keys there are.
      ValueError: for the name of a kind that is mpjax's own.
    """
    title = f"register_{self.section}({name!r})"
    if not (isinstance(name, str) and name):
      raise TypeError(f'{title}: expected a name, as in @mpjax.train.register_{self.section}("mine")')

    def decorate(fun: _F) -> _F:
      made = Registered(name, fun, _options(fun, title, self._positional, self._common))
      if name in self._kinds and self._kinds[name].is_own and not made.is_own:
        raise ValueError(f"{title}: the name of a kind of mpjax's own; choose another")
      self._kinds[name] = made
      return fun

    return decorate

  def registered(self) -> dict[str, Registered]:
    """Returns all kinds there are by name."""
    return dict(self._kinds)

  def find(self, name: object) -> Registered:
    """Returns a kind.

    Raises:
      ConfigError: if there is none of that name; says how a plug-in gives it.
    """
    if isinstance(name, str) and name in self._kinds:
      return self._kinds[name]
    names = f"expected one of {', '.join(self._kinds)}{did_you_mean(str(name), self._kinds)}; "
    raise ConfigError(
      f"unknown {self.section}.{self.key} {name!r}: {names if self._kinds else ''}a {self.key} of your own "
      "needs --plugin FILE.py or --plugin package.module on every command, as a config never loads code (in "
      "Python: mpjax.train.load_plugins)"
    )

  def check(self, section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a section's kind, with defaults.

    Raises:
      ConfigError: one line that names the key.
    """
    if self.key not in section:
      raise ConfigError(f"missing key '{self.section}.{self.key}': expected one of {', '.join(self._kinds)}")
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
  """Makes a function a kind of model: `model.kind` in a config.

  The function takes `info` (`ModelInfo`: what the data says of itself, and how the run will use the model)
  and returns a `Task`. Its keyword-only arguments are the keys of the config's `model` section beside `kind`,
  with their defaults, checked by their annotations.

  ```python
  @mpjax.train.register_model("waves_mlp")
  def waves_mlp(info, *, width: int = 64) -> mpjax.train.Task:
    ...
    return mpjax.train.Task(init=init, loss_fn=loss_fn)
  ```

  Raises:
    TypeError: for a function whose signature does not say which keys there are.
    ValueError: for the name of a model of mpjax's own.
  """
  return MODELS.register(kind)


def register_data(kind: str) -> Callable[[_F], _F]:
  """Makes a function a kind of data: `data.kind` in a config.

  The function returns `(train_rows, eval_rows)`, or with a third value `info`, a mapping of what a model has
  to know (`{"num_classes": 10}`). Rows are a sequence: `len(rows)`, and `rows[i]` is a dict of the arrays of
  one row. They are shuffled, batched and divided over processes by mpjax. Keyword-only arguments are the keys
  of the `data` section beside `kind`, `batch_size`, `eval_batches` and `workers`.

  Raises:
    TypeError: for a function whose signature does not say which keys there are.
    ValueError: for the name of data of mpjax's own.
  """
  return DATASETS.register(kind)


def register_optimizer(target: str) -> Callable[[_F], _F]:
  """Makes a function an optimiser: `optimizer.target` in a config.

  The function takes the learning rate, a schedule by update, and returns an optax transform. Its keyword-only
  arguments are the keys of `optimizer.options`. Clipping and the loss scale are put around it.

  ```python
  @mpjax.train.register_optimizer("ademamix")
  def ademamix(learning_rate, *, alpha: float = 5.0) -> optax.GradientTransformation:
    return optax.contrib.ademamix(learning_rate, alpha=alpha)
  ```

  Raises:
    TypeError: for a function whose signature does not say which keys there are.
  """
  return TARGETS.register(target)


class KindSection(Section):
  """A section of a config with a `kind`, whose other keys are those of its function."""

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
      raise TypeError(f"{title}: {name!r} is a key of mpjax's own: choose another name")
    else:
      options[name] = _option(fun, name, parameter, title)
  if len(by_position) != len(positional):
    takes = f"takes {', '.join(by_position) or 'nothing'} by position"
    raise TypeError(f"{title}: {fun.__name__} {takes}: the keys of a config come after *: write {example}")
  return options


def _option(fun: Callable[..., Any], name: str, parameter: inspect.Parameter, title: str) -> Option:
  default = parameter.default
  annotation = parameter.annotation
  if annotation is _REQUIRED:  # by what its default is, where that says something
    known = (bool, int, float, str)
    annotation = type(default) if type(default) in known else Any
  try:
    inner = inspect.unwrap(fun)
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    annotation = typing.get_type_hints(holder, inner.__globals__, include_extras=True)[name]
    if default is None:
      annotation = Union[annotation, None]  # noqa: UP007 (of annotations that `|` may not take)
    adapter = pydantic.TypeAdapter(_strict(annotation))
    if default is not _REQUIRED:
      # As it comes back from `config.yaml`, where a default is written.
      default = adapter.validate_python(pydantic_core.to_jsonable_python(default))
  except Exception as error:  # of many kinds, from names that are missing to types that no config has
    reason = " ".join(str(error).split())
    raise TypeError(
      f"{title}: keyword {parameter}: expected plain data (numbers, text, lists, mappings): {reason}"
    ) from error
  return Option(adapter, default)


def _strict(annotation: Any) -> Any:
  """Returns an annotation whose numbers are checked as those of mpjax's own keys."""
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
