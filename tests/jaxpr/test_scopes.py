"""Module paths, phases and source lines of equations, and of the names in compiled programs."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax.jaxpr import (
  as_traced,
  backward_depth,
  bodies_of,
  inside,
  is_library,
  marked_path,
  module_path,
  open_jaxpr,
  parse_scopes,
  phase_of,
  source_line,
  split_scopes,
  transform_place,
  without_marks,
)

X = jnp.ones((3, 3))


def equations(fun, *args):
  """The equations of a function, those in bodies too."""
  todo = list(jax.make_jaxpr(fun)(*args).jaxpr.eqns)
  while todo:
    equation = todo.pop(0)
    yield equation
    todo += [inner for body in bodies_of(equation) for inner in open_jaxpr(body).eqns]


def only(fun, name, *args):
  (equation,) = (e for e in equations(fun, *args) if e.primitive.name == name)
  return equation


def net(x):
  with jax.named_scope("net"), jax.named_scope("h0/attn"):
    return jnp.sin(jnp.einsum("ij,jk->ik", x, x)).sum()


def test_a_path_is_the_scopes_without_einsums():
  assert module_path(only(net, "dot_general", X)) == "net/h0/attn"
  assert module_path(only(lambda x: jnp.sin(x), "sin", X)) == ""


@pytest.mark.parametrize(
  ("fun", "primitive", "phase", "depth"),
  [
    (net, "sin", "", 0),
    (jax.grad(net), "sin", "forward", 0),
    (jax.grad(net), "cos", "forward", 0),
    (jax.grad(net), "mul", "backward", 1),
    (lambda x: jax.vmap(jax.grad(net))(x[None]), "mul", "backward", 1),
  ],
)
def test_the_phase_of_an_equation_and_its_path(fun, primitive, phase, depth):
  equation, *_ = (e for e in equations(fun, X) if e.primitive.name == primitive)
  assert (phase_of(equation), backward_depth(equation)) == (phase, depth)
  assert module_path(equation) == "net/h0/attn"


@pytest.mark.parametrize(
  ("text", "path", "phase"),
  [
    ("", "", ""),
    ("GPT/h0", "GPT/h0", ""),
    ("jit(step)/transpose(jvp(GPT))/blocks/5", "GPT/blocks/5", "backward"),
    ("GPT/jvp(GPT)/h0", "GPT/h0", "forward"),
    ("out/transpose(jvp(vmap(a/b)))/out/jvp(vmap(a/b))", "out/a/b", "backward"),
    ("out/jvp()", "out", "forward"),
    ("net/net/jvp(x)", "net/net/x", "forward"),
    ("jvp(jit(f))/a", "a", "forward"),
    ("a/full_precision/b/autocast_output", "a/b", ""),
    ("a/checkpoint/rematted_computation/b", "a/b", ""),
  ],
)
def test_name_stacks_as_text(text, path, phase):
  scopes = parse_scopes(text)
  assert (scopes.path(), scopes.phase) == (path, phase)


def test_a_name_is_split_outside_of_parentheses_alone():
  assert split_scopes("jit(step)/transpose(jvp(a/b))/dot") == ["jit(step)", "transpose(jvp(a/b))", "dot"]


def test_marks_are_no_modules_and_autocast_still_sees_them():
  def fun(x):
    with jax.named_scope("net"):
      return mpjax.full_precision(jnp.sin)(x)

  equation = only(fun, "sin", X)
  assert module_path(equation) == "net"
  assert marked_path(equation) == "net/full_precision"
  assert without_marks("net/full_precision/h0") == "net/h0"
  (row,) = (row for row in mpjax.explain(fun, "bf16")(X).rows if row.primitive == "sin")
  assert row.path == "net"


@pytest.mark.parametrize(
  ("outer", "path", "whole"),
  [
    ("", "h0", "h0"),
    ("GPT", "", "GPT"),
    ("GPT", "h0", "GPT/h0"),
    ("GPT", "GPT", "GPT"),
    ("GPT", "GPT/h0", "GPT/h0"),
    ("GPT", "GPT2/h0", "GPT/GPT2/h0"),
  ],
)
def test_the_path_of_an_equation_in_a_body(outer, path, whole):
  assert inside(outer, path) == whole


def test_new_equations_take_the_place_of_the_one_they_are_for():
  equation = only(net, "sin", X)

  def fun(x):
    with jax.named_scope("outside"), as_traced(equation):
      return jnp.tan(x)

  made = only(fun, "tan", X)
  assert module_path(made) == "outside/net/h0/attn"
  assert source_line(made) == source_line(equation)
  assert source_line(made).startswith("test_scopes.py:")


def test_files_of_libraries_are_told_from_the_users():
  assert is_library(jnp.__file__)
  assert is_library(mpjax.__file__)
  assert not is_library(__file__)


def test_an_optimisers_operations_are_placed_in_their_transform():
  def my_transform():
    return optax.stateless(lambda u, p: jax.tree.map(jnp.sin, u))

  tx = optax.chain(my_transform(), optax.scale_by_adam())
  state = tx.init(jnp.ones(2))
  found = equations(tx.update, jnp.ones(2), state)
  places = {e.primitive.name: transform_place(e) for e in found}
  assert places["sin"][1].startswith("test_scopes.py:")
  assert places["sqrt"][0] == "scale_by_adam"
