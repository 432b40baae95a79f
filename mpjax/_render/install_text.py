"""Says how to install an extra from the source of this mpjax: a checkout, a wheel, a repository, an index."""

from __future__ import annotations

import pathlib

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def pip_install(extras: str) -> str:
  """Returns the command that installs extras of mpjax, such as `plan` or `train,plan`."""
  if (_ROOT / "pyproject.toml").is_file():
    folder = "." if pathlib.Path.cwd() == _ROOT else str(_ROOT)
    return f'pip install -e "{folder}[{extras}]"'
  if source := _source():
    return f'pip install "mpjax[{extras}] @ {source}"'
  return f'pip install "mpjax[{extras}]", or in a checkout pip install -e ".[{extras}]"'


def _source() -> str | None:
  """Returns the URL that mpjax was installed from; `None` for an index or a file that no longer exists.

  pip records it (PEP 610) if the package did not come from an index.
  """
  import importlib.metadata  # these imports are slow, and needed only if a package is missing
  import json
  import urllib.parse
  import urllib.request

  try:
    written = importlib.metadata.distribution("mpjax").read_text("direct_url.json")
  except importlib.metadata.PackageNotFoundError:
    return None
  if written is None:
    return None
  found = json.loads(written)
  url = str(found["url"])
  if vcs := found.get("vcs_info"):
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
  parts = urllib.parse.urlsplit(url)
  if parts.scheme == "file" and not pathlib.Path(urllib.request.url2pathname(parts.path)).exists():
    return None
  return url
