"""Models, data and optimisers by name, and their keys in a config: strict numbers, errors of one line."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import logging
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, Union

import pydantic
import pydantic_core
import typing_extensions

from mpjax._gone import instead
from mpjax._mistakes import ConfigError
from mpjax.dtypes import one_of
from mpjax.policy import Policy

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def _no_bool(value: object) -> object:
  if isinstance(value, bool):
    raise ValueError(f"expected a number, not {value} (YAML reads on, off, yes and no as booleans)")
  return value


# Steps, sizes and counters are int32 in JAX; PRNG seeds are uint32.
INT32_MAX, UINT32_MAX = 2**31 - 1, 2**32 - 1
_Whole = Annotated[int, pydantic.BeforeValidator(_no_bool)]
Int = Annotated[_Whole, pydantic.Field(ge=-INT32_MAX - 1, le=INT32_MAX)]
Seed = Annotated[_Whole, pydantic.Field(ge=0, le=UINT32_MAX)]
Float = Annotated[float, pydantic.BeforeValidator(_no_bool), pydantic.Field(allow_inf_nan=False)]
Positive = Annotated[Int, pydantic.Field(gt=0)]
Natural = Annotated[Int, pydantic.Field(ge=0)]


# Other trainers' names of keys.
_ALIASES = {
  "lr": "learning_rate",
  "bs": "batch_size",
  "batch": "batch_size",
  "wd": "weight_decay",
  "max_steps": "steps",
  "grad_clip": "clip_norm",
  "gradient_accumulation_steps": "accumulate",
  "precision": "policy",
  "dtype": "policy",
  "output_dir": "out",
  "resume_from": "init_from",
}


class Section(pydantic.BaseModel):
  """A mapping of known keys."""

  model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


_adapter: Any = functools.cache(pydantic.TypeAdapter)

# The expected value, by the first word of pydantic's name of the error.
_EXPECTED = {"int": "an integer", "float": "a number", "finite": "a finite number", "bool": "true or false"}
_EXPECTED |= {"string": "text"} | dict.fromkeys(("list", "tuple"), "a list")
_EXPECTED |= dict.fromkeys(("dict", "model"), "a mapping of keys")


def checked(schema: type[_T], data: object, where: str = "", owner: str = "") -> _T:
  """Makes a section of plain data, or keys by the typed dict of a kind.

  `where` is the key of the section, empty for a whole config; `owner` says whose keys these are, as in
  `model.kind=gpt`.

  Raises:
    ConfigError: for the first mistake; one line that names the key.
  """
  try:
    made: _T = _adapter(schema).validate_python(data)
  except pydantic.ValidationError as error:
    raise ConfigError(_describe(error, schema, where, owner)) from error
  return made


def _dotted_keys(schema: type, prefix: str = "") -> Iterator[str]:
  """Yields the keys of a section, and those of the sections, kinds and policy in it: `train.steps`."""
  for name, annotation in _fields(schema).items():
    if _fields(annotation):
      yield from _dotted_keys(annotation, f"{prefix}{name}.")
    else:
      yield prefix + name
    if name == "policy":
      yield from (f"policy.{f.name}" for f in dataclasses.fields(Policy) if f.name not in ("name", "reason"))
  if issubclass(schema, KindSection):
    for kind in schema.kinds.by_name.values():
      yield from _dotted_keys(kind.keys, prefix)


def _meant(word: str, keys: Iterable[str]) -> str:
  """Returns the end of an error message: the first dotted key that a word (`lr`, `stepz`) may mean."""
  ends: dict[str, str] = {}
  for key in keys:
    ends.setdefault(key.rpartition(".")[2], key)
  near = difflib.get_close_matches(_ALIASES.get(word, word), ends, n=1)
  return f"; did you mean {ends[near[0]]!r}?" if near else ""


def _fields(schema: Any) -> dict[str, Any]:
  """Returns the annotation of each key of a section or a typed dict; nothing for anything else."""
  if not isinstance(schema, type):
    return {}
  if issubclass(schema, Section):
    return {name: field.annotation for name, field in schema.model_fields.items()}
  return schema.__annotations__ if hasattr(schema, "__total__") else {}


def _describe(error: pydantic.ValidationError, schema: type, where: str, owner: str) -> str:
  # An unknown key may be a misspelt form of a missing one, so it comes first.
  first = min(error.errors(), key=lambda each: each["type"] == "missing")
  key = ".".join(map(str, ([where] if where else []) + [*first["loc"]]))
  value, message = first["input"], first["msg"].removeprefix("Value error, ")
  kind, _, fault = first["type"].partition("_")
  raised = first.get("ctx", {}).get("error")
  if isinstance(raised, ConfigError):  # from a kind's keys, and names one
    return str(raised)
  if kind == "missing":
    return f"missing key {key!r}" + (f": {owner} needs it" if owner else "")
  if kind == "extra":
    place, _, name = key.rpartition(".")
    if went := instead(name, place):
      return f"unknown key {key!r}{went}"
    at: Any = schema
    for part in first["loc"][:-1]:
      at = _fields(at).get(str(part))
    known = list(_fields(at))
    expected = f"expected one of {', '.join(known)}" if known else "it has none"
    near = _meant(name, [*known, *(other for other in _dotted_keys(schema) if other != key)])
    return f"unknown key {key!r}{' of ' * bool(owner)}{owner}: {expected}{near}"
  if kind in _EXPECTED and fault in ("type", "parsing", "from_float", "number"):
    message = f"expected {_EXPECTED[kind]}"
  else:
    number = "a number " if kind in ("greater", "less") else ""
    message = message.replace("Input should be ", f"expected {number}", 1)
    if kind == "literal":
      message += instead(str(value), str(first["loc"][-1]))
  if not key:
    return message
  if kind == "value" and re.match(r"\w+=", message):  # from a check of several keys
    return f"{key}.{message}"
  if kind != "value" or not isinstance(value, Mapping):  # else the message names several keys of it
    key += f"={value!r}"
  return f"{key}: {message}"


@dataclasses.dataclass(frozen=True)
class Registered:
  """A registered function that makes a model, data or an optimiser.

  `keys` is a typed dict of its keyword-only arguments; `defaults` has their defaults as plain data.
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

  `where` is the key that holds a kind's own keys, `key` the one that names the kind. The functions take
  `positional` arguments. Every kind has the `common` keys, which no function takes.
  """

  section: str
  where: str
  positional: tuple[str, ...] = ()
  common: tuple[str, ...] = ("kind",)
  key: str = "kind"
  by_name: dict[str, Registered] = dataclasses.field(default_factory=dict)

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
      before = self.by_name.get(name, made)
      if before.is_own and not made.is_own:
        raise ValueError(f"{title}: mpjax itself uses this name; choose another")
      if before.fun.__module__ != fun.__module__:
        replaced = f"{title}: {fun.__module__} replaces what {before.fun.__module__} registered"
        logging.getLogger("mpjax.train").warning(f"warning: {replaced}")
      self.by_name[name] = made
      return fun

    return decorate

  def find(self, name: object) -> Registered:
    """Returns the kind of that name.

    Raises:
      ConfigError: if no such kind is registered; the message explains plug-ins.
    """
    if isinstance(name, str) and name in self.by_name:
      return self.by_name[name]
    names = f"{one_of(name, self.by_name)}; " if self.by_name else ""
    raise ConfigError(
      f"unknown {self.section}.{self.key} {name!r}: {names}a {self.key} of your own "
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
