"""The snippets of README and docs run as they stand, each page from top to bottom; API pages have all names."""

import importlib
import inspect
import pathlib
import re
import shlex

import pytest
import yaml

import mpjax
from mpjax.cli import COMMANDS, main
from mpjax.train import load_config, make_setup

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Those with code; a block with a title shows what is to be replaced, or another library's.
WITH_PYTHON = [page for page in PAGES if "```python\n" in page.read_text()]

# A command of these pages runs with a model and data that are small; its own keys come before these.
_SMALL = "model.dim=16 model.layers=1 model.heads=2 data.batch_size=8 data.eval_batches=1"
SMALL = {
  "train": f"{_SMALL} train.steps=2 train.eval_every=2 train.log_every=1 optimizer.warmup_steps=0",
  "explain": _SMALL,
  "plan": f"{_SMALL} --analytic",
  "numerics": "batches=1",
  "tune": f"{_SMALL} steps=1 batches=1",
  "export": "",
}
# What a person types besides: to set up, and to look at runs.
OTHERS = ("python3 scripts/bootstrap.py ", "source .venv/bin/activate", "tensorboard --logdir ")
# Keys of a command that are none of a config's.
OWN_KEYS = {"target", "checkpoint", "batches", "steps", "keep", "dtype", "step", "out"}


def shell_lines(page):
  """The commands in a page's shell blocks, without comments."""
  for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
    for line in block.replace("\\\n", " ").splitlines():
      words = shlex.split(line, comments=True)
      if words:
        yield words


@pytest.mark.slow
@pytest.mark.parametrize(
  ("page", "expected"),
  [
    ("README.md", {"train", "explain", "export", "plan", "numerics", "tune"}),
    ("docs/train.md", {"train", "explain", "export"}),
    ("docs/guides/own_model.md", {"train", "plan", "export"}),
    ("docs/guides/fsdp.md", {"train", "plan"}),
  ],
)
def test_the_commands_of_a_page_run_in_order(page, expected, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  text = (ROOT / page).read_text()
  for name, block in re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)```", text, re.DOTALL | re.MULTILINE):
    (tmp_path / name).write_text(block)
  done = []
  for program, *words in shell_lines(ROOT / page):
    if program == "mpjax":
      done.append(words[0])
      own = "--plugin" in words  # with a model of its own
      small = [word for word in SMALL[words[0]].split() if not (own and word.startswith("model."))]
      # Steps that the small run has.
      words = [re.sub(r"(?<=^train\.profile_steps=).*", "[1,2]", word) for word in words]
      assert main([*words, *small]) == 0, words
    else:
      assert shlex.join([program, *words]).startswith(OTHERS), program
  assert set(done) == expected


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_name_examples_and_keys_that_there_are(page):
  for program, *words in shell_lines(page):
    if program != "mpjax":
      continue
    command, *arguments = words
    assert command in COMMANDS, words
    keys = [a for a in arguments if "=" in a and a.partition("=")[0] not in OWN_KEYS]
    keys = [key for key in keys if not (key.startswith("policy=") and "," in key)]
    named = [a for a in arguments if "=" not in a and not a.startswith("-")]
    if (
      command in ("train", "plan", "explain", "numerics", "tune") and named and (ROOT / named[0]).suffix == ""
    ):
      assert named[0].startswith("runs/") or load_config(named[0], keys)


def test_the_policies_of_the_page_of_policies_fit_the_first_example():
  [block] = re.findall(r"```yaml\n(.*?)```", (DOCS / "policies.md").read_text(), re.DOTALL)
  lines = block.strip().splitlines()
  assert len(lines) > 3
  for line in lines:
    policy = yaml.safe_load(line)["policy"]
    config = load_config("gpt_stdlib", ["model.dim=16", "model.heads=2", "data.batch_size=8"])
    make_setup(
      config.model_copy(update={"policy": policy})
    ).explain()  # raises if an override matches nothing


def is_about(shown, printed):
  """Whether lines have the same words and about the same numbers; `...` stands for anything."""
  number = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?!\w)"
  word = lambda text: re.escape(text).replace(r"\.\.\.", ".*")
  words = re.split(number, " ".join(shown.split()))
  found = re.fullmatch(f"({number})".join(map(word, words)), " ".join(printed.split()))
  return found is not None and [float(n) for n in found.groups()] == pytest.approx(
    [float(n) for n in re.findall(number, shown)], rel=0.25, abs=1e-3
  )


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_snippets_of_a_page_run_and_print_what_it_shows(page, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)  # some write files
  text = page.read_text()
  shown = r'\n\n```text title="Output"\n(?P<shown>.*?)```'
  blocks = list(re.finditer(rf"```python\n(.*?)```(?:{shown})?", text, re.DOTALL))
  names = {}
  for block in blocks:
    line = text[: block.start()].count("\n") + 1
    exec(compile("\n" * line + block[1], str(page), "exec"), names)
    printed = capsys.readouterr().out
    for line in (block["shown"] or "").splitlines():
      assert any(is_about(line, other) for other in printed.splitlines()), (line, printed)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_of_mpjax_on_a_page_exists(page):
  for name in set(re.findall(r"\bmpjax\.([A-Za-z_]\w*)", page.read_text())):
    assert hasattr(mpjax, name), name


@pytest.mark.parametrize(
  "page",
  [*PAGES, ROOT / "README.md", ROOT / "benchmarks" / "README.md"],
  ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_file_on_a_page_exists(page):
  text = page.read_text()
  named = re.findall(r"\b((?:docs|benchmarks|scripts|configs)/[\w./-]+\.\w+)", text)
  linked = [page.parent / link for link in re.findall(r"\]\(([\w./-]+)\)", text)]
  for path in [*(ROOT / name for name in named), *linked]:
    assert path.exists(), path


def test_the_api_pages_have_every_public_name():
  pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
  shown = re.findall(r"^::: mpjax\.(\S+)$", pages, re.MULTILINE)
  public = {name for name in dir(mpjax) if not inspect.ismodule(getattr(mpjax, name))} - {"__version__"}
  public |= {f"train.{name}" for name in dir(mpjax.train)}
  public |= {f"formats.{name}" for name in mpjax.formats.__all__}
  assert public <= set(shown)  # which also have what is public in other packages
  assert len(shown) == len(set(shown))
  for name in shown:
    package, _, member = f"mpjax.{name}".rpartition(".")
    assert hasattr(importlib.import_module(package), member), name
