"""Registers models, data and optimisers by name: mpjax's own and a user's."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, Union

import pydantic
import pydantic_core
import typing_extensions

from mpjax.dtypes import did_you_mean
from mpjax.registry._checks import Float, Int, Section, checked
from mpjax.registry._errors import ConfigError

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Registered:
  """A registered function that makes a model, data or an optimiser.

  Attributes:
    fun: the function.
    keys: a typed dict of its keyword-only arguments.
    defaults: their defaults, as plain data.
  """

  fun: Callable[..., Any]
  keys: type[dict[str, Any]]
  defaults: dict[str, Any]

  @property
  def is_own(self) -> bool:
    """Returns whether the function is mpjax's own."""
    return (self.fun.__module__ or "").startswith("mpjax.")  # code run by `exec` may have no module


@dataclasses.dataclass(eq=False)
class Kinds:
  """The registered kinds of one section of a config, in the order of registration.

  Attributes:
    section: `model`, `data` or `optimizer`.
    where: the key that holds a kind's own keys.
    positional: names of the function's positional arguments.
    common: keys that every kind has and that no function takes.
    key: the key that names a kind.
  """

  section: str
  where: str
  positional: tuple[str, ...] = ()
  common: tuple[str, ...] = ("kind",)
  key: str = "kind"
  _kinds: dict[str, Registered] = dataclasses.field(default_factory=dict)

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
      made = Registered(fun, *_keys(fun, title, self.positional, self.common))
      if not made.is_own and name in self.registered() and self._kinds[name].is_own:
        raise ValueError(f"{title}: mpjax itself uses this name; choose another")
      self._kinds[name] = made
      return fun

    return decorate

  def registered(self) -> dict[str, Registered]:
    """Returns all registered kinds by name."""
    importlib.import_module("mpjax.zoo.registered")  # a plug-in, too: it imports this module
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

  def check(self, name: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a kind's function: the keys given, and the defaults of the others.

    Raises:
      ConfigError: for an unknown kind, or a wrong key or value; one line that names the key.
    """
    kind = self.find(name)
    return checked(kind.keys, {**kind.defaults, **given}, self.where, f"{self.section}.{self.key}={name}")


MODELS = Kinds("model", "model", ("info",))
DATASETS = Kinds("data", "data", common=("kind", "batch_size", "eval_batches", "workers"))
TARGETS = Kinds("optimizer", "optimizer.options", ("learning_rate",), (), "target")


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

  Raises:
    TypeError: if the signature of the function does not say which keys exist.
  """
  return TARGETS.register(target)


class KindSection(Section):
  """A section of a config with a `kind`; its other keys are the arguments of the kind's function."""

  model_config = pydantic.ConfigDict(extra="allow")
  kinds: ClassVar[Kinds]
  kind: str

  @property
  def options(self) -> dict[str, Any]:
    """Returns the arguments of the kind's function."""
    return dict(self.model_extra or {})

  @pydantic.model_validator(mode="before")
  @classmethod
  def _check_options(cls, value: object) -> object:
    if not isinstance(value, Mapping):
      return value
    own = {key: each for key, each in value.items() if key in cls.model_fields}
    # `path: null` is right for each kind, also for one that reads no files.
    rest = {key: each for key, each in value.items() if key not in own and (key, each) != ("path", None)}
    return own | cls.kinds.check(value.get("kind"), rest)


def _keys(
  fun: Callable[..., Any], title: str, positional: tuple[str, ...], common: tuple[str, ...]
) -> tuple[type[dict[str, Any]], dict[str, Any]]:
  """Returns a typed dict of the keyword-only arguments of a function, and their defaults."""
  if not inspect.isfunction(inspect.unwrap(fun)):
    raise TypeError(f"{title} of a {type(fun).__name__}: expected a function")
  example = f"def {fun.__name__}({', '.join((*positional, '*', 'width: int = 64'))})"
  kinds: dict[str, Any] = {}
  defaults: dict[str, Any] = {}
  by_position = []
  for name, parameter in inspect.signature(fun).parameters.items():
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
      by_position.append(name)
    elif parameter.kind != parameter.KEYWORD_ONLY:
      raise TypeError(f"{title}: {parameter} in {fun.__name__} takes keys without a name: write {example}")
    elif name in common:
      raise TypeError(f"{title}: mpjax itself uses the key {name!r}: choose another name")
    else:
      try:
        kinds[name] = _annotation(fun, parameter)
        adapter = pydantic.TypeAdapter(kinds[name])
        if parameter.default is not parameter.empty:
          # As it will be read from `config.yaml`, which holds every default.
          defaults[name] = adapter.validate_python(pydantic_core.to_jsonable_python(parameter.default))
      except Exception as error:  # an undefined name, a type that no config can hold, and others
        reason = " ".join(str(error).split())
        raise TypeError(
          f"{title}: keyword {parameter}: expected plain data (numbers, text, lists, mappings): {reason}"
        ) from error
  if len(by_position) != len(positional):
    takes = f"takes {', '.join(by_position) or 'nothing'} by position"
    raise TypeError(f"{title}: {fun.__name__} {takes}: the keys of a config come after *: write {example}")
  typed_dict: Any = typing_extensions.TypedDict
  keys = typed_dict(fun.__name__, kinds)
  return pydantic.with_config(pydantic.ConfigDict(extra="forbid"))(keys), defaults


def _annotation(fun: Callable[..., Any], parameter: inspect.Parameter) -> Any:
  """Returns the annotation of a keyword, or else its default's type; numbers are strict, as mpjax's own."""
  name, default, annotation = parameter.name, parameter.default, parameter.annotation
  if annotation is parameter.empty:
    annotation = type(default) if type(default) in (bool, int, float, str) else Any
  holder = types.SimpleNamespace(__annotations__={name: annotation})
  annotation = typing.get_type_hints(holder, inspect.unwrap(fun).__globals__, include_extras=True)[name]
  return _strict(annotation if default is not None else Union[annotation, None])  # noqa: UP007


def _strict(annotation: Any) -> Any:
  """Returns an annotation that checks the numbers in it as mpjax's own keys do."""
  if annotation in (int, float):
    return Int if annotation is int else Float
  origin = typing.get_origin(annotation)
  if origin is None:
    return annotation
  origin = Union if origin is types.UnionType else origin
  return origin[tuple(map(_strict, typing.get_args(annotation)))]
