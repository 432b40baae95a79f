"""What the matrix products of a program are to each other: first, last, of a weight or of two activations.

A forward pass over the program finds what comes after a layer (a product, or a lookup in a table), and a
backward one what comes before a product; both enter the bodies of higher-order primitives, call by call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpjax import _compat
from mpjax.casting import calls, traits
from mpjax.casting.rules import Rules, live

_REMAT = ("remat2", "checkpoint")


class Fact(NamedTuple):
  """What is known of a value.

  Attributes:
    active: whether a layer came before it.
    varies: whether it depends on an input of the program.
    root: what identifies it behind reshapes and calls.
  """

  active: bool
  varies: bool
  root: Any


class Product(NamedTuple):
  """What a matrix product is in its program.

  Attributes:
    active: which of its operands come after a layer.
    gradients: which of its operands are gradients, in a backward pass inside the program.
    roots: what identifies its operands.
    last: whether no product follows it.
  """

  active: tuple[bool, bool]
  gradients: tuple[bool, bool]
  roots: tuple[Any, Any]
  last: bool

  @property
  def first(self) -> bool:
    """Whether no layer came before it."""
    return not any(self.active)


class Layers:
  """The products of a jaxpr, as it is called here, and those of its bodies.

  Those of a backward pass inside the program are what the forward ones are that they come from.

  Attributes:
    products: by equation (its id).
    inner: for each higher-order equation (its id), those of its bodies, by body (its id).
  """

  def __init__(self, jaxpr: Any, facts: Sequence[Fact], rules: Rules, recomputed: bool = False):
    self._jaxpr = _compat.open_jaxpr(jaxpr)
    self._rules = rules
    self._recomputed = recomputed
    self.products: dict[int, Product] = {}
    self.inner: dict[int, dict[int, Layers]] = {}
    self._facts: dict[Any, Fact] = {}
    self._depth: dict[Any, int] = {}
    inputs = [*self._jaxpr.constvars, *self._jaxpr.invars]
    missing = len(inputs) - len(facts)
    constants = [Fact(False, False, (id(v), "constant")) for v in inputs[:missing]]
    self._facts.update(zip(inputs, [*constants, *facts], strict=True))
    self._equations = live(self._jaxpr)
    for equation in self._equations:
      self._forward(equation)
    self.outs = [self._fact(v) for v in self._jaxpr.outvars]

  @classmethod
  def of(cls, jaxpr: Any, rules: Rules) -> Layers:
    """Of a whole program."""
    body = _compat.open_jaxpr(jaxpr)
    layers = cls(body, [Fact(False, True, (i, "input")) for i in range(len(body.invars))], rules)
    layers.backward([False] * len(body.outvars))
    readers: dict[Any, list[Product]] = {}
    for product in layers.all():
      if not any(product.gradients):
        for root in product.roots:
          readers.setdefault(root, []).append(product)
    layers._inherit(readers)
    return layers

  def all(self) -> Iterator[Product]:
    """All products, those of bodies too."""
    yield from self.products.values()
    for bodies in self.inner.values():
      for layers in bodies.values():
        yield from layers.all()

  def _inherit(self, readers: dict[Any, list[Product]]) -> None:
    for key, product in list(self.products.items()):
      if not any(product.gradients):
        continue
      kept = [i for i in (0, 1) if not product.gradients[i]]
      forward = readers.get(product.roots[kept[0]], []) if kept else []
      if not forward or self._recomputed:
        del self.products[key]
        continue
      active = (all(p.active[0] for p in forward), all(p.active[1] for p in forward))
      last = any(p.last for p in forward)
      self.products[key] = product._replace(active=active, last=last)
    for bodies in self.inner.values():
      for layers in bodies.values():
        layers._inherit(readers)

  def _fact(self, atom: Any) -> Fact:
    return self._facts[atom] if _compat.is_variable(atom) else Fact(False, False, None)

  def _forward(self, equation: Any) -> None:
    facts = [self._fact(a) for a in equation.invars]
    name = equation.primitive.name
    variables = [a for a in equation.invars if _compat.is_variable(a)]
    depth = max([_compat.backward_depth(equation), *(self._depth.get(a, 0) for a in variables)])
    active, varies = any(f.active for f in facts), any(f.varies for f in facts)
    outs = [Fact(active, varies, (id(self), id(v))) for v in equation.outvars]
    if self._rules.list_of(name, None) == "call":
      outs = self._call(equation, facts) or outs
    elif is_layer(equation, self._rules):
      lhs, rhs = equation.invars[:2]
      is_gradient = lambda a: _compat.is_variable(a) and self._depth.get(a, 0) > 0
      self.products[id(equation)] = Product(
        active=(facts[0].active, facts[1].active),
        gradients=(is_gradient(lhs), is_gradient(rhs)),
        roots=(facts[0].root, facts[1].root),
        last=False,
      )
      outs = [fact._replace(active=True) for fact in outs]
    elif name == "gather" and facts[1].varies:
      outs = [fact._replace(active=True) for fact in outs]
    elif name in traits.SAME and len(facts) == 1:
      outs = [facts[0]]
    self._facts.update(zip(equation.outvars, outs, strict=True))
    self._depth.update(dict.fromkeys(equation.outvars, depth))

  def _call(self, equation: Any, facts: list[Fact]) -> list[Fact] | None:
    name = equation.primitive.name
    n = len(equation.outvars)
    bodies: dict[int, Layers] = {}
    merged: list[Fact] | None = None
    entering = list(facts)
    if name == "scan":
      consts, carry, _ = _compat.scan_parts(equation)
      entering[consts + carry :] = [f._replace(root=(f.root, "row")) for f in entering[consts + carry :]]
      first, loops = consts, carry
    elif name == "while":
      first, loops = equation.params["cond_nconsts"] + equation.params["body_nconsts"], n
    else:
      first, loops = 0, 0
    recomputed = self._recomputed or (name in _REMAT and _compat.backward_depth(equation) > 0)
    for _ in range(2 if loops else 1):
      bodies, merged = {}, None
      for body, indices in calls.alignment(equation):
        layers = Layers(body, [entering[i] for i in indices], self._rules, recomputed)
        bodies[id(_compat.open_jaxpr(body))] = layers
        if len(layers.outs) == n and not (name == "while" and body is equation.params["cond_jaxpr"]):
          pairs = zip(merged or layers.outs, layers.outs, strict=True)
          merged = [Fact(a.active or b.active, a.varies or b.varies, a.root) for a, b in pairs]
      if not loops or merged is None:
        break
      for i in range(loops):
        before = entering[first + i]
        entering[first + i] = before._replace(
          active=before.active or merged[i].active, varies=before.varies or merged[i].varies
        )
    self.inner[id(equation)] = bodies
    if merged is None:
      return None
    if name in ("scan", "while", "cond"):
      merged = [
        fact._replace(root=(id(self), id(v))) for fact, v in zip(merged, equation.outvars, strict=True)
      ]
    return merged

  def backward(self, reached: Sequence[bool]) -> list[bool]:
    """Marks the last products, given which outputs reach one; returns which inputs do."""
    reaches = {v for v, is_reached in zip(self._jaxpr.outvars, reached, strict=True) if is_reached}
    reaches = {v for v in reaches if _compat.is_variable(v)}
    for equation in reversed(self._equations):
      if _compat.backward_depth(equation):
        continue
      out = [v in reaches for v in equation.outvars]
      sources = list(equation.invars) if any(out) else []
      if id(equation) in self.inner:
        sources = self._backward_call(equation, out)
      elif id(equation) in self.products:
        product = self.products[id(equation)]
        self.products[id(equation)] = product._replace(last=not any(out))
        sources = list(equation.invars)
      reaches.update(a for a in sources if _compat.is_variable(a))
    return [v in reaches for v in [*self._jaxpr.constvars, *self._jaxpr.invars]]

  def _backward_call(self, equation: Any, out: list[bool]) -> list[Any]:
    name = equation.primitive.name
    found: set[int] = set()
    loops = 0
    if name == "scan":
      consts, loops, _ = _compat.scan_parts(equation)
      first = consts
    elif name == "while":
      first, loops = equation.params["cond_nconsts"] + equation.params["body_nconsts"], len(out)
    known = False
    for _ in range(2 if loops else 1):
      for body, indices in calls.alignment(equation):
        layers = self.inner[id(equation)].get(id(_compat.open_jaxpr(body)))
        if layers is None or len(layers.outs) != len(out):
          continue
        known = True
        reached = layers.backward(out)[-len(indices) :] if indices else []
        found.update(i for i, is_reached in zip(indices, reached, strict=True) if is_reached)
      out = [is_out or (i < loops and first + i in found) for i, is_out in enumerate(out)]
    if not known:
      return list(equation.invars) if any(out) else []
    return [equation.invars[i] for i in found]


def is_layer(equation: Any, rules: Rules) -> bool:
  """Whether an equation is a product of matrices or vectors with one, or a convolution."""
  name = equation.primitive.name
  if rules.list_of(name, None) != "allow":
    return False
  if name != "dot_general":
    return True
  contracted, batch = equation.params["dimension_numbers"]
  used = [len(c) + len(b) for c, b in zip(contracted, batch, strict=True)]
  return used != [len(a.aval.shape) for a in equation.invars]
