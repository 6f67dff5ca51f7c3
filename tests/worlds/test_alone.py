"""Every world can be taken away: what its head names, in an empty folder, is a world that plays."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import envs

ROOT = Path(__file__).parents[2]
HEADS = [
    path
    for path in sorted((ROOT / "envs/worlds").rglob("*.py"))
    if "To take it alone, copy" in ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
]
CLASSES = {"textarena.py": "TextArena", "openenv.py": "OpenEnv"}  # of worlds that are not registered
PLAY = """
import random, sys
import envs
from envs.datasets import dialogue

id, house = sys.argv[1:]
if house:  # without Java
    sys.path.append(house)
    import fake_scienceworld, pytest
    fake_scienceworld.install(pytest.MonkeyPatch())
try:
    world = envs.make(id)
    played = dialogue(world, world.players["random"], random.Random(0), 0)
    shown = world.demonstrations(1, 0)
    print(len(played["actions"]), len(shown[0]["actions"]))
except envs.Unavailable as error:
    print(error)
here = [module.__file__ for name, module in list(sys.modules.items()) if name.split(".")[0] == "envs"]
print(*(file for file in here if file))
"""


def ids_of(head: Path) -> list[str]:
    """The worlds that are made of this module; for one that is not registered, its class."""
    module = ".".join(head.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    found = [id for id, entry in envs.ENVS.items() if entry.target.startswith(f"{module}:")]
    return found or [f"{module}:{CLASSES[head.name]}"]


def named_in(head: Path) -> list[str]:
    """The files that the head tells one to copy."""
    text = " ".join(ast.get_docstring(ast.parse(head.read_text(encoding="utf-8"))).split())
    return re.findall(r"envs/[\w./]+\.(?:py|toml)", text.partition("To take it alone, copy")[2])


def imported_by(files: list[str]) -> set[str]:
    """The files of envs/ that these import, wherever the import stands."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                place = Path(*name.split("."))
                places = (place.with_suffix(".py"), place / "__init__.py")
                found |= {str(path) for path in places if name.startswith("envs") and (ROOT / path).exists()}
    return found


def test_every_world_says_what_must_be_copied():
    ids = [id for head in HEADS for id in ids_of(head)]
    assert set(envs.ENVS) <= set(ids) and len(ids) == len(set(ids)) == len(envs.ENVS) + len(CLASSES)


@pytest.mark.parametrize("head", HEADS, ids=lambda path: str(path.relative_to(ROOT / "envs/worlds")))
def test_it_plays_with_what_its_head_names_and_needs_all_of_it(head, tmp_path):
    """One that needs what this machine lacks says so, and not that a file of envs/ is missing."""
    files = named_in(head)
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    id = ids_of(head)[0]
    problem = envs.missing(id)
    is_faked = id == "scienceworld" and problem
    house = str(ROOT / "tests") if is_faked else ""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", PLAY, id, house]
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    result = subprocess.run(command, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    said, loaded = result.stdout.splitlines()[-2:]
    if problem and not is_faked:
        assert said == problem
    else:
        assert all(int(number) > 0 for number in said.split())
    assert all(Path(file).is_relative_to(tmp_path) for file in loaded.split())

    sources = [file for file in files if file.endswith(".py")]
    later = {"envs/adapt.py", "envs/worlds/apps/sandbox_monty.py"}  # for worlds of one's own; for one option
    assert imported_by(sources) - set(files) <= later
    read = set(files) - imported_by(sources) - {"envs/__init__.py", str(head.relative_to(ROOT))}
    assert all(file.endswith((".toml", "sandbox_child.py")) for file in read), "not needed"
