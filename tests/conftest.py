"""Eight CPU devices for every test, how much of a compiler each needs, and which tests run without `--all`."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

from tests import _array_types, _cost
from tests._quick_compile import compile_quickly
from tests.train._tiny_gpt import write_tiny_gpt

if os.environ.get("MPJAX_TYPECHECK"):
  _array_types.install()


# Compiled programs are kept for the next run, of another clone, too: their keys have the versions, flags and processor.
_COMPILED = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "mpjax" / "tests"
_MOST_BYTES = 1 << 30


def pytest_addoption(parser):
  parser.addoption("--all", action="store_true", help="with the tests that are slow or aot")
  parser.addoption("--cost", action="store_true", help=_cost.__doc__.partition("\n")[0])


def pytest_configure(config):
  if config.option.cost:
    config.pluginmanager.register(_cost.Costs())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
  """Keeps the tests of a file together, as far as the workers have as much to do: they share what they compile."""
  if config.option.dist != "load":
    return None
  from xdist.scheduler import WorkStealingScheduling

  return WorkStealingScheduling(config, log)


def pytest_collection_modifyitems(config, items):
  """The runs first, each of which takes long: at the end there is something short for either worker."""
  items.sort(key=lambda item: item.path.parent.name not in ("train", "cli"))
  if not (config.option.all or config.option.markexpr):
    named = {_place(config.invocation_params.dir, argument) for argument in config.args if "::" in argument}
    left = [item for item in items if _is_long(item) and _place(config.rootpath, item.nodeid) not in named]
    config.hook.pytest_deselected(items=left)
    config.stash[_LEFT] = len(left)
    out = set(left)
    items[:] = [item for item in items if item not in out]


def pytest_report_collectionfinish(config):
  if left := config.stash.get(_LEFT, 0):
    return f"{left} that are slow or aot are left out: --all, -m or their own names run them"
  return []


_LEFT = pytest.StashKey[int]()  # how many tests are left out


def _place(folder, name):
  """The file and the function of a test, whose name is relative to a folder."""
  file, _, function = name.partition("[")[0].partition("::")
  return (folder / file).resolve(), function


def _is_long(item):
  return bool(item.get_closest_marker("slow") or item.get_closest_marker("aot"))


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request):
  """Most programs run once: most of the time would be spent on making them fast."""
  if request.node.get_closest_marker("optimised"):
    yield
    return
  with compile_quickly():
    yield


@pytest.fixture(autouse=True, scope="module")
def _clear_caches():
  """Compiled programs of one file are of no use to the next, and take gigabytes."""
  yield
  jax.clear_caches()


@pytest.fixture(autouse=True, scope="session")
def _compile_once(tmp_path_factory):
  """A program is compiled once, whichever test, worker, process of its own or earlier run is the first to need it."""
  folder = _COMPILED
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError:  # nothing can be kept there
    folder = tmp_path_factory.mktemp("compiled")
  entries = [(entry, _size(entry)) for entry in folder.iterdir()]
  is_full = sum(size for _, size in entries) > _MOST_BYTES  # of many versions by now
  for entry, size in entries:
    if is_full or not size:  # of a process that was killed as it wrote
      entry.unlink(missing_ok=True)
  with pytest.MonkeyPatch.context() as patch:
    for name, value in {
      "jax_compilation_cache_dir": str(folder),
      "jax_persistent_cache_min_compile_time_secs": 0.0,
      "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
      patch.setenv(name.upper(), str(value))
      jax.config.update(name, value)
    yield


def _size(entry):
  try:
    return entry.stat().st_size
  except FileNotFoundError:  # another worker took it away
    return 0


@pytest.fixture
def tiny_gpt(tmp_path):
  """Arguments for a training run of a second, with its data in the test's own folder."""
  return write_tiny_gpt(tmp_path)
