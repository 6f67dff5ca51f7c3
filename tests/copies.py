"""Writes one copy of a function over the others: python tests/copies.py NAME --from FILE

NAME is a function, a Class.function or a Class. Scripts that tests/waivers.toml allows another body are left
alone, and are named. SCRIPT_multigpu.py has what SCRIPT.py has, waived or not, unless it is waived itself.
"""

import argparse
import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lines_of(source: str, name: str) -> slice | None:
    """Where a function or class stands in a file, with its decorators, as lines; None if it does not."""
    body = ast.parse(source).body
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not found:
            return None
        node = found[-1]  # of two that have one name the last one counts
        body = node.body
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return slice(first - 1, node.end_lineno)


def reason_of(name: str, script: str, waivers: dict[str, dict]) -> str | None:
    """Why this script may have another body; for a class, why one of its functions may."""
    for waived, waiver in waivers.items():
        if (waived == name or waived.startswith(f"{name}.")) and script in waiver["scripts"]:
            return f"{waived}: {waiver['reason']}"
    return None


def copy(name: str, source: Path, root: Path = ROOT) -> list[str]:
    """Writes the copy of `source` over the others; returns a line for each script that has one.

    Raises ValueError if `source` has none, or one that is waived.
    """
    waivers = tomllib.loads((root / "tests/waivers.toml").read_text(encoding="utf-8"))
    lines = source.read_text(encoding="utf-8").split("\n")
    if (place := lines_of("\n".join(lines), name)) is None:
        raise ValueError(f"there is no {name} in {source}")
    text = lines[place]
    paths = sorted([*root.glob("*.py"), *root.glob("baselines/*.py")])
    if reason := reason_of(name, script_of(source, root), waivers):
        paths = [path for path in paths if sibling_of(path).resolve() == source.resolve() != path.resolve()]
        if not paths:
            raise ValueError(f"the copy in {source} is waived, so that it is not for the others ({reason})")

    said = []
    for path in paths:
        script, lines = script_of(path, root), path.read_text(encoding="utf-8").split("\n")
        place = lines_of("\n".join(lines), name)
        if place is None or path.resolve() == source.resolve():
            continue
        reason = reason_of(name, script, waivers)
        if sibling_of(path).resolve() != source.resolve():
            reason = reason or reason_of(name, script_of(sibling_of(path), root), waivers)
        if reason:
            said.append(f"{script}: waived, left alone ({reason})")
        elif lines[place] == text:
            said.append(f"{script}: the same already")
        else:
            lines[place] = text
            path.write_text("\n".join(lines), encoding="utf-8")
            said.append(f"{script}: written")
    return said or [f"no other script has {name}"]


def sibling_of(path: Path) -> Path:
    """SCRIPT.py of a SCRIPT_multigpu.py; of any other script itself."""
    return path.with_name(f"{path.stem.removesuffix('_multigpu')}.py")


def script_of(path: Path, root: Path) -> str:
    """The name of a script in tests/waivers.toml. Raises ValueError for a file outside of `root`."""
    return path.resolve().relative_to(root.resolve()).as_posix()


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes one copy of a function over the others.")
    parser.add_argument("name", metavar="NAME", help="a function, a Class.function or a Class")
    parser.add_argument("--from", dest="source", type=Path, required=True, metavar="FILE", help="whose copy")
    args = parser.parse_args()
    try:
        print("\n".join(copy(args.name, args.source)))
    except (ValueError, OSError, SyntaxError) as error:
        print(f"copies.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
