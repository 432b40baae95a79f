"""Module paths, phases and source lines of equations, and of the names in compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from mpjax.jaxpr import (
  as_traced,
  backward_depth,
  inside,
  is_library,
  marked_path,
  module_path,
  parse_scopes,
  phase_of,
  source_line,
  split_scopes,
  transform_place,
  without_marks,
)
from tests.casting._jaxprs import equations, named

X = np.ones((3, 3), np.float32)


def only(fun, name, *args):
  (equation,) = named(name, fun, *args)
  return equation


def net(x):
  with jax.named_scope("net"), jax.named_scope("h0/attn"):
    return jnp.sin(jnp.einsum("ij,jk->ik", x, x)).sum()


def test_the_phase_of_an_equation_and_its_path():
  for fun, primitive, phase, depth in (
    (net, "sin", "", 0),
    (net, "dot_general", "", 0),  # without the scope of einsum
    (jax.grad(net), "sin", "forward", 0),
    (jax.grad(net), "cos", "forward", 0),
    (jax.grad(net), "mul", "backward", 1),
    (lambda x: jax.vmap(jax.grad(net))(x[None]), "mul", "backward", 1),
  ):
    equation, *_ = named(primitive, fun, X)
    assert (phase_of(equation), backward_depth(equation)) == (phase, depth), primitive
    assert module_path(equation) == "net/h0/attn", primitive


def test_name_stacks_as_text():
  for text, path, phase in (
    ("", "", ""),
    ("GPT/h0", "GPT/h0", ""),
    ("jit(step)/transpose(jvp(GPT))/blocks/5", "GPT/blocks/5", "backward"),
    ("GPT/jvp(GPT)/h0", "GPT/h0", "forward"),
    ("out/transpose(jvp(vmap(a/b)))/out/jvp(vmap(a/b))", "out/a/b", "backward"),
    ("out/jvp()", "out", "forward"),
    ("net/net/jvp(x)", "net/net/x", "forward"),
    ("jvp(jit(f))/a", "a", "forward"),
    ("a/@full_precision/b/@autocast_output", "a/b", ""),
    ("a/full_precision/b", "a/full_precision/b", ""),
    ("a/checkpoint/rematted_computation/b", "a/b", ""),
  ):
    scopes = parse_scopes(text)
    assert (scopes.path(), scopes.phase) == (path, phase), text
  for outer, path, whole in (
    ("", "h0", "h0"),
    ("GPT", "", "GPT"),
    ("GPT", "GPT", "GPT/GPT"),
    ("GPT", "GPT2/h0", "GPT/GPT2/h0"),
  ):
    assert inside(outer, path) == whole, (outer, path)
  # A name is split outside of parentheses alone.
  assert split_scopes("jit(step)/transpose(jvp(a/b))/dot") == ["jit(step)", "transpose(jvp(a/b))", "dot"]


def test_marks_are_no_modules_and_autocast_still_sees_them():
  def fun(x):
    with jax.named_scope("net"):
      return mpjax.full_precision(jnp.sin)(x)

  equation = only(fun, "sin", X)
  assert module_path(equation) == "net"
  assert marked_path(equation) == "net/@full_precision"
  assert without_marks("net/@full_precision/h0") == "net/h0"
  (row,) = (row for row in mpjax.explain(fun, X, policy="bf16").rows if row.primitive == "sin")
  assert row.path == "net"


def test_new_equations_take_the_place_of_the_one_they_are_for():
  equation = only(net, "sin", X)

  def fun(x):
    with jax.named_scope("outside"), as_traced(equation):
      return jnp.tan(x)

  made = only(fun, "tan", X)
  assert module_path(made) == "outside/net/h0/attn"
  assert source_line(made) == source_line(equation)
  assert source_line(made).startswith("test_scopes.py:")
  assert [is_library(file) for file in (jnp.__file__, mpjax.__file__, __file__)] == [True, True, False]


def test_an_optimisers_operations_are_placed_in_their_transform():
  def my_transform():
    return optax.stateless(lambda u, p: jax.tree.map(jnp.sin, u))

  tx = optax.chain(my_transform(), optax.scale_by_adam())
  weights = np.ones(2, np.float32)
  found = equations(tx.update, weights, tx.init(weights))
  places = {e.primitive.name: transform_place(e) for e in found}
  assert places["sin"][1].startswith("test_scopes.py:")
  assert places["sqrt"][0] == "scale_by_adam"
