"""Configs: overrides, types, and one clear line for whatever is wrong."""

import pathlib

import pytest
import yaml

from mpjax.train import ConfigError, load_config, make_optimizer, parse_config
from mpjax.train._optimizers import OPTIMIZERS, make_schedule

ROOT = pathlib.Path(__file__).parents[2]
MINIMAL = {"model": {"kind": "gpt"}, "data": {"kind": "stdlib"}}


@pytest.mark.parametrize("name", ["gpt_stdlib", "vit_digits", "resnet_digits"])
def test_shipped_configs_load_and_name_their_run_directory(name):
  config = load_config(ROOT / "configs" / f"{name}.yaml", ["policy=fp32"])
  assert config.out == f"runs/{name}-fp32"
  assert config.resolve_policy().compute_dtype == "float32"


def write(tmp_path, text):
  path = tmp_path / "c.yaml"
  path.write_text(text)
  return path


@pytest.fixture
def minimal(tmp_path):
  return write(tmp_path, yaml.safe_dump(MINIMAL))


@pytest.mark.parametrize(
  ("override", "read"),
  [
    ("train.steps=7", lambda c: c.train.steps == 7),
    ("optimizer.learning_rate=1e-4", lambda c: c.optimizer.learning_rate == 1e-4),
    ("optimizer.clip_norm=null", lambda c: c.optimizer.clip_norm is None),
    ("optimizer.options={b1: 0.8}", lambda c: c.optimizer.options == {"b1": 0.8}),
    ("policy=p=f32,c=f16", lambda c: c.resolve_policy().compute_dtype == "float16"),
    ("policy={base: fp16, loss_scaling: 128}", lambda c: c.resolve_policy().loss_scaling.init_scale == 128),
    ("out=runs/x=y", lambda c: c.out == "runs/x=y"),
    ("model.dim=32", lambda c: c.model.options["dim"] == 32),
    ("mesh.data=2", lambda c: c.mesh.data == 2),
  ],
)
def test_overrides_are_dotted_keys_with_yaml_values(minimal, override, read):
  assert read(load_config(minimal, [override]))


@pytest.mark.parametrize("name", ["gpt_stdlib", "vit_digits"])
def test_no_path_may_be_said_of_data_that_have_none(name):
  assert load_config(name, ["data.path=null"]) == load_config(name)


def test_an_override_inside_a_named_policy_keeps_the_rest_of_it(minimal):
  config = load_config(minimal, ["policy=fp16", "policy.loss_scaling.init_scale=1024"])
  policy = config.resolve_policy()
  assert (policy.loss_scaling.init_scale, policy.loss_scaling.kind) == (1024, "dynamic")
  assert policy.compute_dtype == "float16"


@pytest.mark.parametrize(
  ("overrides", "words"),
  [
    (["policy=fp61"], ["fp61", "did you mean 'fp16'"]),
    (["policy={base: fp16, compute_dtype: float17}"], ["float17", "expected one of"]),
    (["policy={base: fp16, los_scaling: 1}"], ["los_scaling", "did you mean 'loss_scaling'"]),
    (["policy=fp8", "policy.autocast=false"], ["policy", "fp8", "autocast: true"]),
    (["policy={base: bf16, autocast: false, overrides: {head: fp32}}"], ["overrides", "autocast: true"]),
    (["policy={base: fp16, loss_scaling: {init_scale: .inf}}"], ["init_scale", "inf"]),
    (["policy={base: fp16, loss_scaling: on}"], ["loss_scaling", "boolean"]),
    (["optimizer.learning_rte=1"], ["optimizer.learning_rte", "did you mean 'learning_rate'"]),
    (["trian.steps=1"], ["trian", "did you mean 'train'"]),
    (["model.dims=3"], ["model.dims", "did you mean 'dim'"]),
    (["model.kind=gtp"], ["gtp", "did you mean 'gpt'"]),
    (["data.kind=stdlb"], ["stdlb", "did you mean 'stdlib'"]),
    (["train.steps=many"], ["train.steps", "many"]),
    (["train.steps=0"], ["train.steps", "0"]),
    (["seed=4294967296"], ["seed", "4294967295"]),
    (["seed=9223372036854775808"], ["seed", "4294967295"]),
    (["data={kind: tokens, path: x, vocab_size: 4294967296}"], ["data.vocab_size=4294967296", "2147483647"]),
    (["train.steps=3000000000"], ["train.steps", "2147483647"]),
    (["optimizer.warmup_steps=3000000000"], ["optimizer.warmup_steps", "2147483647"]),
    (["model.dim=1099511627776"], ["model.dim", "2147483647"]),
    (["train.steps=true"], ["train.steps", "boolean"]),
    (["optimizer.learning_rate=.nan"], ["optimizer.learning_rate"]),
    (["data.batch_size=10", "train.accumulate=3"], ["10", "train.accumulate=3", "divisible"]),
    (["data.path=x"], ["data", "path", "stdlib"]),
    (["mesh.fsdp=0"], ["mesh", "fsdp=0", "-1"]),
    (["mesh.fsdp=-1"], ["mesh", "data=-1", "fsdp=-1", "one axis"]),
    (["mesh.gather=block"], ["mesh", "gather=block", "fsdp", "2 or more, or -1"]),
    (["mesh=4"], ["mesh", "mapping", "data, fsdp, tensor"]),
    (["mesh.rules={a: fsdp}"], ["mesh", "'a'", "[fsdp, null]"]),
    (["mesh.rules={a: [data]}"], ["mesh", "'a'", "fsdp, tensor or null"]),
    (["steps"], ["'steps'", "key=value"]),
    (["train.steps=[1"], ["train.steps=[1"]),
  ],
)
def test_what_is_wrong_is_one_line_that_names_it(minimal, overrides, words):
  with pytest.raises(ConfigError) as error:
    load_config(minimal, overrides)
  message = str(error.value)
  assert "\n" not in message
  assert all(word in message for word in words), message


def test_a_section_that_is_missing_may_be_one_that_is_misspelt():
  with pytest.raises(ConfigError, match=r"'dat'.*did you mean 'data'"):
    load_config({"model": {"kind": "gpt"}, "dat": {"kind": "stdlib"}})


@pytest.mark.parametrize("overrides", ["policy=bf16", {"policy": "bf16"}])
def test_overrides_are_a_list(minimal, overrides):
  with pytest.raises(ConfigError, match=r"expected a list of texts, as in \['policy=bf16'"):
    load_config(minimal, overrides)


@pytest.mark.parametrize(
  ("text", "word"),
  [("a: [", "c.yaml"), ("- 1\n", "mapping"), ("model: {kind: gpt}\n", "data"), ("", "missing key")],
)
def test_unreadable_or_incomplete_files(tmp_path, text, word):
  with pytest.raises(ConfigError, match=word):
    load_config(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(ConfigError, match=r"no such config file: .*nothing\.yaml"):
    load_config(tmp_path / "nothing.yaml")


def test_yaml_1_1_exponents_without_a_dot_are_numbers(tmp_path):
  path = write(tmp_path, yaml.safe_dump(MINIMAL) + "optimizer: {learning_rate: 1e-4}\n")
  assert load_config(path).optimizer.learning_rate == 1e-4


@pytest.mark.parametrize("policy", ["auto", "fp16", {"base": "fp16", "loss_scaling": 8}])
def test_the_resolved_config_reads_back_as_the_same_run(policy):
  config = parse_config(MINIMAL | {"policy": policy})
  again = parse_config(yaml.safe_load(config.to_yaml()))
  assert again.resolve_policy() == config.resolve_policy()
  assert again.to_yaml() == config.to_yaml()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_a_step(name):
  import jax.numpy as jnp

  config = parse_config(MINIMAL | {"optimizer": {"name": name, "learning_rate": 0.1}}).optimizer
  tx = make_optimizer(config, 10)
  params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
  updates, _ = tx.update(params, tx.init(params), params, value=jnp.ones(()))
  assert all(bool(jnp.isfinite(u).all()) and bool((u != 0).any()) for u in updates.values())


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"name": "adamv"}, ["adamv", "did you mean 'adam"]),
    ({"name": "sgd", "weight_decay": 0.1}, ["weight_decay", "sgd"]),
    ({"options": {"b3": 1}}, ["optimizer.options.b3", "b2"]),
  ],
)
def test_unfit_optimizers_are_config_errors(options, words):
  with pytest.raises(ConfigError) as error:
    make_optimizer(parse_config(MINIMAL | {"optimizer": options}).optimizer, 10)
  assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
  ("schedule", "last"), [("constant", 1.0), ("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1)]
)
def test_schedules_warm_up_from_above_zero_and_end_where_they_should(schedule, last):
  options = {"learning_rate": 1.0, "schedule": schedule, "warmup_steps": 4}
  rate = make_schedule(parse_config(MINIMAL | {"optimizer": options}).optimizer, 20)
  assert [float(rate(i)) for i in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
  assert float(rate(20)) == pytest.approx(last, abs=1e-6)


def test_warm_up_stable_decay_falls_in_its_last_part():
  options = {"learning_rate": 1.0, "schedule": "wsd", "warmup_steps": 4, "decay_fraction": 0.25}
  rate = make_schedule(parse_config(MINIMAL | {"optimizer": options}).optimizer, 40)
  assert [float(rate(i)) for i in (3, 10, 30, 35, 40)] == pytest.approx([1.0, 1.0, 1.0, 0.55, 0.1])


def test_a_schedule_may_end_before_the_run():
  options = {"learning_rate": 1.0, "schedule": "linear", "schedule_steps": 10, "final_fraction": 0.0}
  rate = make_schedule(parse_config(MINIMAL | {"optimizer": options}).optimizer, 40)
  assert [float(rate(i)) for i in (0, 5, 10, 20)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_weight_decay_leaves_vectors_alone():
  import jax.numpy as jnp

  config = parse_config(MINIMAL | {"optimizer": {"weight_decay": 0.5}}).optimizer
  tx = make_optimizer(config, 10)
  params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
  zeros = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
  updates, _ = tx.update(zeros, tx.init(params), params)
  assert (updates["b"] == 0).all()
  assert (updates["w"] < 0).all()
