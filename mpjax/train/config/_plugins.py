"""Plug-ins: a user's code that registers models, data and optimisers. A config never names a plug-in."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Iterable

from mpjax._mistakes import ConfigError
from mpjax.registry import (
  register_data as register_data,
  register_model as register_model,
  register_optimizer as register_optimizer,
)
from mpjax.train._errors import described

# Names of the modules that are plug-ins.
_LOADED: set[str] = set()


def load_plugins(names: str | Iterable[str]) -> None:
  """Imports plug-ins, which register models, data and optimisers of your own.

  ```python
  mpjax.train.load_plugins(["waves.py", "my_package.models"])
  config = mpjax.train.load_config({"model": {"kind": "waves_mlp"}, "data": {"kind": "waves"}})
  ```

  Args:
    names: a file `FILE.py`, a module `package.module`, or several. The working directory is searched for
      modules, too. Of two kinds of one name, the later replaces the earlier.

  Raises:
    ConfigError: if a plug-in is missing or cannot be imported.
  """
  for name in dict.fromkeys([names] if isinstance(names, str) else names):
    _load(name)


def plugin_digests() -> dict[str, str]:
  """Returns a digest of the source of each plug-in, by module name."""
  files = {name: getattr(sys.modules.get(name), "__file__", None) for name in _LOADED}
  read = {name: pathlib.Path(file).read_bytes() for name, file in files.items() if file is not None}
  return {name: hashlib.blake2b(source, digest_size=8).hexdigest() for name, source in read.items()}


def _load(name: str) -> None:
  path = pathlib.Path(name)
  is_file = path.suffix == ".py" or path.exists()
  if is_file and not path.is_file():
    raise ConfigError(f"--plugin {name}: no such file")
  # At the end of the path, so that nothing there hides an installed package.
  folder = str(path.resolve().parent if is_file else pathlib.Path.cwd())
  if folder not in sys.path:
    sys.path.append(folder)
  module = f"mpjax_plugin_{path.stem}" if is_file else name
  _LOADED.add(module)
  try:
    _run_file(module, path) if is_file else importlib.import_module(module)
  except (Exception, SystemExit) as error:  # a user's code can raise anything
    if isinstance(error, ModuleNotFoundError) and not is_file and name.startswith(str(error.name)):
      raise ConfigError(
        f"--plugin {name}: no such module; expected a file FILE.py, or a module that can be imported"
      ) from error
    where = "" if isinstance(error, SyntaxError) else place(error)  # a SyntaxError names its line
    raise ConfigError(f"--plugin {name}: {described(error)}{where}") from error


def _run_file(name: str, path: pathlib.Path) -> None:
  """Runs a file as a module, also if it was run before."""
  spec = importlib.util.spec_from_file_location(name, path.resolve())
  if spec is None or spec.loader is None:
    raise ImportError("not a Python file")
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # where dataclasses and pickle look for it
  spec.loader.exec_module(module)


def place(error: BaseException) -> str:
  """Returns the last line of a plug-in in an error's traceback, as ` (own.py:12)`, or an empty string."""
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  own = [frame for frame in frames if frame.f_globals.get("__name__") in _LOADED]
  return f" ({pathlib.Path(own[-1].f_code.co_filename).name}:{own[-1].f_lineno})" if own else ""
