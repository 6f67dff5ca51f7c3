"""tests/copies.py: which copies it writes over, which it leaves alone, and that all else stays as it is."""

import subprocess
import sys
from pathlib import Path

import pytest
from copies import ROOT, copy, lines_of

ONE = '''"""One."""

from functools import cache


@cache
def add(x, y):
    """The sum."""
    return x + y  # exact


class Model:
    """A model."""

    def __init__(self):
        self.x = 1

    def forward(self):
        return add(self.x, 1)
'''
OTHER = (
    ONE.replace('"""One."""', '"""Another."""')
    .replace("@cache\n", "")
    .replace("x + y  # exact", "y + x")
    .replace("add(self.x, 1)", "add(self.x, 2)\n\n    def close(self):\n        pass")
)
WAIVERS = """
[add]
scripts = ["c.py"]
reason = "subtracts"

["Model.forward"]
scripts = ["baselines/d.py"]
reason = "is another"
"""


@pytest.fixture
def root(tmp_path):
    """Two scripts, one whose `add` is waived, one in baselines/, and one that has nothing of theirs."""
    for folder in ("tests", "baselines"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tests/waivers.toml").write_text(WAIVERS)
    (tmp_path / "a.py").write_text(ONE)
    for name in ("b.py", "c.py", "baselines/d.py", "tests/e.py"):
        (tmp_path / name).write_text(OTHER)
    (tmp_path / "f.py").write_text("x = 1\n")
    return tmp_path


def test_a_function_with_its_decorators_and_comments(root):
    said = copy("add", root / "a.py", root)
    assert said == ["b.py: written", "baselines/d.py: written", "c.py: waived, left alone (add: subtracts)"]
    expected = OTHER.replace("def add", "@cache\ndef add").replace("y + x", "x + y  # exact")
    assert (root / "b.py").read_text() == (root / "baselines/d.py").read_text() == expected
    assert (root / "c.py").read_text() == (root / "tests/e.py").read_text() == OTHER
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--check", root / "b.py"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert copy("add", root / "a.py", root)[0] == "b.py: the same already"


def test_a_function_of_a_class_and_a_whole_class(root):
    assert copy("Model.forward", root / "a.py", root) == [
        "b.py: written",
        "baselines/d.py: waived, left alone (Model.forward: is another)",
        "c.py: written",
    ]
    assert (root / "b.py").read_text() == OTHER.replace("add(self.x, 2)", "add(self.x, 1)")
    copy("Model", root / "a.py", root)
    assert "close" not in (root / "b.py").read_text() and "is another" not in (root / "b.py").read_text()
    assert (root / "baselines/d.py").read_text() == OTHER


def test_a_script_for_several_devices_has_what_its_sibling_has(root):
    """Of a waived function, too; but where a waiver names it, it is left alone."""
    for name in ("a_multigpu.py", "c_multigpu.py"):
        (root / name).write_text(OTHER)
    (root / "c.py").write_text(OTHER.replace("y + x", "y - x"))
    said = copy("add", root / "a.py", root)
    assert said[0] == "a_multigpu.py: written" and said[-1] == said[-2].replace("c.py", "c_multigpu.py")
    assert copy("add", root / "c.py", root) == ["c_multigpu.py: written"]
    assert "y - x" in (root / "c_multigpu.py").read_text()
    named = WAIVERS.replace('["c.py"]', '["c.py", "a_multigpu.py"]')
    (root / "tests/waivers.toml").write_text(named)
    (root / "a_multigpu.py").write_text(OTHER)
    assert copy("add", root / "a.py", root)[0] == "a_multigpu.py: waived, left alone (add: subtracts)"


def test_what_cannot_be_copied_is_said(root):
    with pytest.raises(ValueError, match=r"there is no Model\.backward in "):
        copy("Model.backward", root / "a.py", root)
    with pytest.raises(ValueError, match=r"is waived, so that it is not for the others \(add: subtracts\)"):
        copy("add", root / "c.py", root)
    assert copy("Model.close", root / "b.py", root)[0] == "baselines/d.py: the same already"
    (root / "c.py").unlink()
    (root / "baselines/d.py").unlink()
    assert copy("Model.close", root / "b.py", root) == ["no other script has Model.close"]


def test_the_command_line():
    """A function that no other script has changes nothing; an error is one line."""
    script = ROOT / "tests/copies.py"
    command = [sys.executable, script, "lines_of", "--from", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "no other script has lines_of\n")
    command[-1] = Path("nowhere.py")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert lines_of(script.read_text(), "nothing") is None
