"""The table of faults, faults.toml, and which lines each of them changes."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import tomllib


@dataclasses.dataclass(frozen=True)
class Fault:
  """An edit of one file."""

  name: str
  file: str
  old: str
  new: str
  loses: str
  mended: bool = False

  def applied(self, source: str) -> str:
    """Returns a file's text with the fault in it."""
    if (times := source.count(self.old)) != 1:
      raise ValueError(f"{self.name}: {self.file} has its text {times} times, expected once:\n{self.old}")
    return source.replace(self.old, self.new)


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a fault is: lines of the statement that it changes, and those of all functions in the file."""

  lines: frozenset[int]
  in_functions: frozenset[int]

  @property
  def at_import(self) -> bool:
    """Whether the statement runs when the module is imported, as a table of constants does."""
    return self.lines.isdisjoint(self.in_functions)


def read_faults(path: pathlib.Path | None = None) -> list[Fault]:
  """Returns the faults of a table, by default that of this folder."""
  text = (path or pathlib.Path(__file__).with_name("faults.toml")).read_text()
  return [Fault(**row) for row in tomllib.loads(text)["fault"]]


def place_of(fault: Fault, root: pathlib.Path) -> Place:
  """Returns where a fault is in a checkout."""
  source = (root / fault.file).read_text()
  fault.applied(source)
  first = source[: source.index(fault.old)].count("\n") + 1
  last = first + fault.old.count("\n")
  lines: set[int] = set()
  in_functions: set[int] = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
      body = node.body if isinstance(node.body, list) else [node.body]
      in_functions |= {*range(body[0].lineno, (body[-1].end_lineno or 0) + 1)}
    if isinstance(node, ast.stmt) and (own := _own_lines(node)) & {*range(first, last + 1)}:
      lines |= own
  return Place(frozenset(lines), frozenset(in_functions))


def _own_lines(statement: ast.stmt) -> set[int]:
  """Returns the lines of a statement, of one with others inside those of its head."""
  inside = [s.lineno for s in ast.walk(statement) if isinstance(s, ast.stmt) and s is not statement]
  end = min(inside, default=(statement.end_lineno or statement.lineno) + 1)
  return {*range(statement.lineno, max(end, statement.lineno + 1))}
