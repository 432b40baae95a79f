"""Configs: overrides, types, and one clear line for whatever is wrong."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import numpy as np
import pydantic
import pytest
import yaml

from mpjax.train import ConfigError, load_config, make_optimizer, register_data, register_model

# A schedule by itself, and which optimisers there are.
from mpjax.train.config._config import OptimizerConfig
from mpjax.train.setup._optimizers import OPTIMIZERS, make_schedule
from tests.train._runs import raises_one_line

ROOT = pathlib.Path(__file__).parents[2]
MINIMAL = {"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}}


def test_shipped_configs_load_and_name_their_run_directory():
  for name in ("gpt_stdlib", "vit_digits", "resnet_digits"):
    config = load_config(ROOT / "configs" / f"{name}.yaml", ["policy=fp32"])
    assert config.out == f"runs/{name}-fp32"
    assert config.resolve_policy().compute_dtype == "float32"
    # No path may be said of data that have none.
    assert load_config(name, ["data.path=null"]) == load_config(name)


def write(tmp_path, text):
  path = tmp_path / "c.yaml"
  path.write_text(text)
  return path


@pytest.fixture
def minimal(tmp_path):
  return write(tmp_path, yaml.safe_dump(MINIMAL))


def test_overrides_are_dotted_keys_with_yaml_values(minimal):
  for override, read in [
    ("train.steps=7", lambda c: c.train.steps == 7),
    ("optimizer.learning_rate=1e-4", lambda c: c.optimizer.learning_rate == 1e-4),
    ("optimizer.clip_norm=null", lambda c: c.optimizer.clip_norm is None),
    ("optimizer.options={b1: 0.8}", lambda c: c.optimizer.options == {"b1": 0.8}),
    ("policy=p=f32,c=f16", lambda c: c.resolve_policy().compute_dtype == "float16"),
    ("policy={base: fp16, loss_scaling: 128}", lambda c: c.resolve_policy().loss_scaling.init_scale == 128),
    ("out=runs/x=y", lambda c: c.out == "runs/x=y"),
    ("model.dim=32", lambda c: c.model.options["dim"] == 32),
    ("mesh.data=2", lambda c: c.mesh.data == 2),
    ("train.average=0.999", lambda c: c.train.average == 0.999),
    ("train.profile_steps=[3, 5]", lambda c: c.train.profile_steps == (3, 5)),
    ("train.trackers=[]", lambda c: c.train.trackers == ()),
  ]:
    assert read(load_config(minimal, [override])), override


def test_an_override_inside_a_named_policy_keeps_the_rest_of_it(minimal):
  config = load_config(minimal, ["policy=fp16", "policy.loss_scaling.init_scale=1024"])
  policy = config.resolve_policy()
  assert (policy.loss_scaling.init_scale, policy.loss_scaling.kind) == (1024, "dynamic")
  assert policy.compute_dtype == "float16"


def test_an_override_inside_no_policy_keeps_the_rest_of_the_default(minimal):
  for source in (minimal, MINIMAL, MINIMAL | {"policy": None}):
    policy = load_config(source, ["policy.loss_scaling=1024"]).resolve_policy()
    assert (policy.compute_dtype, policy.loss_scaling.init_scale) == ("bfloat16", 1024), source


def test_a_default_run_directory_follows_the_policy_of_a_config_that_is_loaded_again():
  config = load_config("gpt_stdlib")
  for source, overrides, out in [
    (config, [], "runs/gpt_stdlib-auto"),
    (config, ["policy=fp16"], "runs/gpt_stdlib-fp16"),
    (load_config(config, ["policy=fp16"]), ["policy=bf16"], "runs/gpt_stdlib-bf16"),
    (config.model_copy(update={"out": config.out}), ["policy=fp16"], config.out),
    (load_config(config, ["out=mine"]), ["policy=fp16"], "mine"),
  ]:
    assert load_config(source, overrides).out == out, (source.out, overrides)


WRONG = [
  (["policy=fp61"], ["fp61", "did you mean 'fp16'"]),
  (["policy={base: fp16, compute_dtype: float17}"], ["float17", "expected one of"]),
  (["policy={base: fp16, los_scaling: 1}"], ["los_scaling", "did you mean 'loss_scaling'"]),
  (["policy={base: fp8, fp8: {recipe: curent}}"], ["fp8.recipe", "did you mean 'current'"]),
  (["policy=fp8", "policy.autocast=false"], ["policy", "fp8", "autocast: true"]),
  (["policy={base: bf16, autocast: false, overrides: {head: fp32}}"], ["overrides", "autocast: true"]),
  (["policy={base: fp16, loss_scaling: {init_scale: .inf}}"], ["init_scale", "inf"]),
  (["policy={base: fp16, loss_scaling: on}"], ["loss_scaling", "boolean"]),
  (["optimizer.learning_rte=1"], ["optimizer.learning_rte", "did you mean 'learning_rate'"]),
  (["trian.steps=1"], ["trian", "did you mean 'train'"]),
  (["learning_rate=1"], ["'learning_rate'", "did you mean 'optimizer.learning_rate'"]),
  (["lr=1"], ["'lr'", "did you mean 'optimizer.learning_rate'"]),
  (["optimizer.batch_size=8"], ["optimizer.batch_size", "did you mean 'data.batch_size'"]),
  (["loss_scaling=8"], ["'loss_scaling'", "did you mean 'policy.loss_scaling'"]),
  (["model.dims=3"], ["model.dims", "did you mean 'dim'"]),
  (["model.kind=gtp"], ["gtp", "did you mean 'gpt'"]),
  (["model.layers=2", "model.kind=resnet"], ["'model.layers' of model.kind=resnet", "stages, width"]),
  (["data.kind=stdlb"], ["stdlb", "did you mean 'stdlib'"]),
  (["train.steps=many"], ["train.steps", "many"]),
  (["train.steps=0"], ["train.steps", "0"]),
  (["seed=4294967296"], ["seed", "4294967295"]),
  (["train.steps=3000000000"], ["train.steps", "2147483647"]),
  (["model.dim=1099511627776"], ["model.dim", "2147483647"]),
  (["train.steps=true"], ["train.steps", "boolean"]),
  (["train.average=1"], ["train.average=1", "less than 1"]),
  (["train.profile_steps=[5, 3]"], ["train.profile_steps=[5, 3]", "[10, 12]"]),
  (["train.profile_steps=[5, 9]", "train.steps=4"], ["train.profile_steps=[5, 9]", "of 4"]),
  (["train.profile_steps=[0, 3]"], ["train.profile_steps.0=0", "greater than 0"]),
  (["train.trackers=[wand]"], ["train.trackers.0='wand'", "expected 'tensorboard' or 'wandb'"]),
  (["train.trackers=[wandb, wandb]"], ["trackers=['wandb', 'wandb']", "only once"]),
  (["optimizer.learning_rate=.nan"], ["optimizer.learning_rate"]),
  (["data.batch_size=10", "train.accumulate=3"], ["10", "train.accumulate=3", "divisible"]),
  (["data.path=x"], ["data", "path", "stdlib"]),
  (["mesh.fsdp=0"], ["mesh", "fsdp=0", "-1"]),
  (["mesh.fsdp=-1"], ["mesh", "data=-1", "fsdp=-1", "one axis"]),
  (["mesh.gather=block"], ["mesh", "gather=block", "fsdp", "2 or more, or -1"]),
  (["mesh.gather_prefetch=0"], ["mesh.gather_prefetch", "leave it out"]),
  (["policy={base: fp16, loss_scaling: {consecutive_hysteresis: true}}"], ["hysteresis", "leave it out"]),
  (["mesh=4"], ["mesh=4", "a mapping of keys"]),
  (["mesh.rules={a: fsdp}"], ["mesh", "'a'", "[fsdp, null]"]),
  (["steps"], ["'steps'", "key=value"]),
  (["train.steps=[1"], ["train.steps=[1"]),
]


def test_what_is_wrong_is_one_line_that_names_it(minimal):
  for overrides, words in WRONG:
    raises_one_line(ConfigError, words, load_config, minimal, overrides)


def test_a_section_that_is_missing_may_be_one_that_is_misspelt():
  with pytest.raises(ConfigError, match=r"'dat'.*did you mean 'data'"):
    load_config({"model": {"kind": "gpt"}, "dat": {"kind": "stdlib"}})


def test_overrides_are_a_list(minimal):
  for overrides in ("policy=bf16", {"policy": "bf16"}):
    words = ["expected a list of texts, as in ['policy=bf16'"]
    raises_one_line(ConfigError, words, load_config, minimal, overrides)


def test_unreadable_or_incomplete_files(tmp_path):
  for text, word in [
    ("a: [", "c.yaml"),
    ("- 1\n", "mapping"),
    ("model: {kind: gpt}\n", "data"),
    ("", "missing key"),
  ]:
    raises_one_line(ConfigError, [word], load_config, write(tmp_path, text))
  words = ["no such config file: ", "nothing.yaml"]
  raises_one_line(ConfigError, words, load_config, tmp_path / "nothing.yaml")


def test_keys_that_went_are_passed_over_where_a_run_has_the_value_that_holds_anyway():
  scaling = {"kind": "dynamic", "consecutive_hysteresis": False}
  older = MINIMAL | {"mesh": {"gather_prefetch": 1}, "policy": {"base": "fp16", "loss_scaling": scaling}}
  newer = MINIMAL | {"policy": {"base": "fp16", "loss_scaling": {"kind": "dynamic"}}}
  assert load_config(older).to_yaml() == load_config(newer).to_yaml()
  older, newer = (MINIMAL | {"model": {"kind": "gpt", "attention": name}} for name in ("cudnn", "auto"))
  assert load_config(older).to_yaml() == load_config(newer).to_yaml()
  for recipe, pow2 in (("current", True), ("delayed", True), ("per_channel", False)):
    fp8 = {"recipe": recipe, "include": [], "exclude": [], "pow2_scales": pow2, "amax_compute": "max"}
    older = MINIMAL | {"policy": {"base": "fp8", "fp8": fp8}}
    newer = MINIMAL | {"policy": {"base": "fp8", "fp8": {"recipe": recipe}}}
    assert load_config(older).to_yaml() == load_config(newer).to_yaml(), recipe
    with pytest.raises(ConfigError, match=r"'pow2_scales'.*leave it out"):
      load_config(older, [f"policy.fp8.pow2_scales={not pow2}"]).resolve_policy()


def test_the_resolved_config_reads_back_as_the_same_run():
  for policy in ("auto", "fp16", {"base": "fp16", "loss_scaling": 8}):
    config = load_config(MINIMAL | {"policy": policy})
    again = load_config(yaml.safe_load(config.to_yaml()))
    assert again.resolve_policy() == config.resolve_policy(), policy
    assert again.to_yaml() == config.to_yaml(), policy


def step_of(parameters, gradients, steps=10, **options):
  """Returns the updates of a first step of an optimiser."""
  tx = make_optimizer(load_config(MINIMAL | {"optimizer": options}).optimizer, steps)
  updates = lambda p, g: tx.update(g, tx.init(p), p, value=1.0)[0]
  return jax.jit(updates)(parameters, gradients)


PARAMETERS = {"w": np.ones((2, 2), np.float32), "b": np.ones(2, np.float32)}


def test_every_optimizer_takes_a_step():
  for name in OPTIMIZERS:
    updates = step_of(PARAMETERS, PARAMETERS, name=name, learning_rate=0.1)
    assert all(np.isfinite(u).all() and np.any(u) for u in updates.values()), name


def test_weight_decay_leaves_vectors_alone():
  zeros = {name: 0 * value for name, value in PARAMETERS.items()}
  updates = step_of(PARAMETERS, zeros, weight_decay=0.5)
  assert not np.any(updates["b"])
  assert (np.asarray(updates["w"]) < 0).all()


def test_gradients_are_clipped_by_their_global_norm():
  updates = step_of(PARAMETERS, PARAMETERS, name="sgd", learning_rate=1.0, clip_norm=0.5, schedule="constant")
  np.testing.assert_allclose(updates["w"], -0.5 / np.sqrt(6), rtol=1e-5)


def test_unfit_optimizers_are_config_errors():
  for options, words in [
    ({"name": "adamv"}, ["adamv", "did you mean 'adam"]),
    ({"name": "sgd", "weight_decay": 0.1}, ["weight_decay", "sgd"]),
    ({"options": {"b3": 1}}, ["optimizer.options.b3", "b2"]),
  ]:
    config = load_config(MINIMAL | {"optimizer": options}).optimizer
    raises_one_line(ConfigError, words, make_optimizer, config, 10)


def test_schedules_warm_up_from_above_zero_and_end_where_they_should():
  for options, steps, rates in [
    ({"schedule": "constant"}, 20, {20: 1.0}),
    ({"schedule": "cosine"}, 20, {20: 0.1}),
    ({"schedule": "wsd", "decay_fraction": 0.25}, 40, {10: 1.0, 30: 1.0, 35: 0.55, 40: 0.1}),
    # A schedule may end before the run.
    ({"schedule": "linear", "schedule_steps": 14, "final_fraction": 0.0}, 40, {9: 0.5, 14: 0.0, 20: 0.0}),
  ]:
    settings = {"learning_rate": 1.0, "warmup_steps": 4} | options
    rate = make_schedule(OptimizerConfig(**settings), steps)
    rates = {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0} | rates
    found = jax.jit(jax.vmap(rate))(np.array([*rates]))
    np.testing.assert_allclose(found, [*rates.values()], atol=1e-6, err_msg=str(options))


# Keys of a kind: which values an annotation takes, and that a config reads back as it was written.

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


def test_a_kind_is_a_function():
  for fun in (3, dataclasses.make_dataclass("C", ["x"])):
    with pytest.raises(TypeError, match="expected a function"):
      register_model("no_function")(fun)


def test_a_function_of_code_without_a_module_can_be_registered_again():
  """As of a cell of a notebook, or of an example that is executed: the later one counts."""
  for width in (64, 32):
    made = {}
    exec(f"def load(*, width: int = {width}): ...", made)
    made["load"].__module__ = None
    register_data("of_no_module")(made["load"])
  config = load_config({"model": {"kind": "gpt"}, "data": {"kind": "of_no_module"}})
  assert config.data.options == {"width": 32}
