"""The texts are in plain words: no dialect, no long sentence or page, no heading twice on a page."""

import textwrap

import pytest

from tests import words

FAULTS = {
  "has not": "A column that the table has not, is refused.",
  "is none": "The second is none of them.",
  "is no": "An epoch is no step.",
  "of before": "The checkpoints of before stay.",
  "beside": "It has a bias besides.",
  "Of ...": "Of the gradients two are lost.",
  "name: of": "path: of the file.",
  "So is": "It is float32. So is the sum.",
  "Those of": "It has two parts. Those of the step are last.",
  "such a one": "An island is a region; such a one stays.",
  "that there are": "It takes the devices that there are.",
  "archaic": "The step and the parts thereof.",
  "long sentence": "A " + "very " * 40 + "long sentence.",
}


def kinds(text, path="page.md"):
  return [fault.kind for fault in words.faults_of(textwrap.dedent(text), path)]


def test_every_kind_has_an_example():
  assert set(FAULTS) == {*words.DIALECT, "long sentence"}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(
  ("path", "form"),
  [
    ("page.md", "# Title\n\n- {}\n"),
    ("page.md", "1. One.\n\n    {}\n"),
    ("page.md", "| a | b |\n|---|---|\n| `x` | {} |\n"),
    ("module.py", 'def f():\n  """{}"""\n'),
    ("module.py", "x = 1  # {}\n"),
    ("module.py", 'raise ValueError(\n  "{}"\n)\n'),
    ("module.py", 'print(f"{}", 1)\n'),
    ("page.ipynb", '{{\n "cell_type": "markdown",\n "source": [\n  "{}"\n ]\n}}\n'),
  ],
)
def test_a_fault_is_found_in_each_kind_of_text(kind, path, form):
  assert kinds(form.format(FAULTS[kind]), path) == [kind]


@pytest.mark.parametrize(
  "text",
  [
    "The step has not been compiled. It has not yet gone through. A map has not only lost it.",
    "There is none. It is `none`. Its default is None.",
    "There is no scale. The error is no larger than before, it is no longer needed, it is no such file.",
    "Use fp16 instead of before. It is as before.",
    "Of course it is. The sum of the parts.",
    "It says that there is no GPU, and that there are two hosts.",
    "Such a step is skipped; such as this one.",
    "```python\n# Of the parts one is none besides.\n```",
    "Run this:\n\n    of the parts one is none besides.\n\n    Of those one is none.\n",
    "The case `penalty-beside-an-average` and penalty-beside-a-sum.",
    "~~~text\nOf the parts one is none besides.\n~~~",
    "The message is `Of the parts one\nis none besides`, in code.",
    "See [the parts](besides.md#is-none) and https://example.org/besides.",
    "<!-- Of the parts one is none besides. -->",
    "One sentence here. " * 30,
    "| " + "cell | " * 60,
    "## On `a`\n\n## On `b`",
  ],
)
def test_plain_words_and_code_have_no_fault(text):
  assert kinds(text) == []


@pytest.mark.parametrize(
  "text",
  [
    'def f():\n  """Runs it.\n\n  >>> f()\n  Of the parts one is none besides.\n  """\n',
    'def f():\n  """Runs it::\n\n    Of the parts one is none besides.\n\n  Then stops.\n  """\n',
    'def f(a):\n  """Runs it.\n\n  Args:\n'
    + "    a: a number of parts, with a word or two on each.\n" * 9
    + '  """\n',
    'x = "is none"  # noqa: E501\n',
    'x = re.compile("of the parts one is none besides")\n',
  ],
)
def test_examples_and_names_in_modules_have_no_fault(text):
  assert kinds(text, "module.py") == []


def test_a_heading_is_on_a_page_once():
  assert kinds("# A\n\n## Use\n\n## Use\n") == ["repeated heading"]


def test_a_page_has_at_most_so_many_words():
  assert kinds("Two words. " * 1250) == []
  assert kinds("Two words. " * 1251) == ["long page"]


def test_a_fault_is_shown_with_its_place(tmp_path, capsys, monkeypatch):
  page = tmp_path / "page.md"
  page.write_text("# Title\n\nA first line,\nand one that is none.\n\nA sentence. Of those\none is last.\n")
  monkeypatch.setattr("sys.argv", ["words", str(tmp_path)])
  assert words.main() == 1
  first, second = capsys.readouterr().out.splitlines()
  assert first.startswith(f'{page}:4: is none: "line, and one that is none."')
  assert second.startswith(f'{page}:6: Of ...: "Of those one is last."')


def test_the_texts_have_no_fault():
  found = words.faults([str(words.ROOT / path) for path in words.SCOPE])
  assert not found, "\n".join(["", *map(str, found)])
