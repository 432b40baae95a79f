"""Says how to install an extra of mpjax."""


def pip_install(extras: str) -> str:
  """Returns the command that installs extras of mpjax, such as `plan` or `train,plan`."""
  return f'pip install "mpjax[{extras}]", or in a checkout pip install -e ".[{extras}]"'
