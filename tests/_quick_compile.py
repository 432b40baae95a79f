"""How tests compile programs that run once: with as little work as XLA for CPU can be asked for."""

import contextlib
import functools

import jax
import pytest

# XLA's newer code generators for CPU take more than twice as long to compile a small program, and a third of what
# is left goes into dividing it among threads.
OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@contextlib.contextmanager
def compile_quickly():
  """Compiles what is compiled inside without most optimisations."""
  jax.config.update("jax_disable_most_optimizations", True)
  with pytest.MonkeyPatch.context() as patch:
    if understood():
      override_options(patch)
    yield
  jax.config.update("jax_disable_most_optimizations", False)


def environment(devices):
  """Returns the variables that ask a process of its own, with so many devices, for the same."""
  flags = [f"--{name}={str(value).lower()}" for name, value in OPTIONS.items()] if understood() else []
  flags.append(f"--xla_force_host_platform_device_count={devices}")
  return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": " ".join(flags)}


@functools.cache
def understood():
  """Returns whether this XLA knows the options; later ones do not."""
  try:
    jax.jit(lambda: 0, compiler_options=OPTIONS).lower().compile()
  except jax.errors.JaxRuntimeError:
    return False
  return True


def override_options(patch):
  """Gives the options to every program: XLA reads its flags once a process, and JAX takes options by program."""
  compiler = getattr(getattr(jax, "_src", None), "compiler", None)
  make_options = getattr(compiler, "get_compile_options", None)
  if make_options is None:  # a JAX that keeps this elsewhere: slower, and no less right
    return

  def options(*args, env_options_overrides=None, backend=None, **kwargs):
    on_cpu = getattr(backend, "platform", None) == "cpu"
    overrides = {**(OPTIONS if on_cpu else {}), **(env_options_overrides or {})}
    return make_options(*args, env_options_overrides=overrides or None, backend=backend, **kwargs)

  patch.setattr(compiler, "get_compile_options", options)
