"""Look at runs in a browser: learning curves and dialogues, in one HTML file that needs nothing else.

python -m envs.view runs/RUN                       # writes runs/RUN/view.html
python -m envs.view runs/RUN runs/OTHER --out a.html   # curves one over the other
"""

import argparse
import json
import re
import sys
from pathlib import Path

import envs

PAGES = Path(__file__).parent.parent / "docs"
TEMPLATE = Path(__file__).with_suffix(".html")


def meanings(runs: list[Path]) -> dict[str, str]:
    """What each metric means, by its tag, from the pages in docs/ of the scripts that made the runs."""
    found = {}
    for run in runs:
        script = [*run.absolute().name.split("__"), ""][1]  # ENV__SCRIPT__SEED__TIME
        page = PAGES / f"{script.removesuffix('_multigpu')}.md"
        pages = [page] if page.exists() else sorted(PAGES.glob("*.md"))  # a folder may have another name
        rows = [row for page in pages for row in page.read_text(encoding="utf-8").split("\n")]
        for match in filter(None, (re.match(r"\| `([\w/]+)` \| ([^|]+)", row) for row in rows)):
            found.setdefault(match[1], match[2].strip())  # of two scripts the first run's
    return found


def turns_of(record: dict) -> list[dict]:
    """The turns of a dialogue as any script has written it: action, reply, and the figures that there are."""
    if "text" in record:  # of loop_ppo.py: the prompt, then the turns
        said = "".join(turn["action"] + turn["reply"] for turn in record["turns"])
        prompt, _, error = record["text"].partition(said) if said else (record["text"], "", "")
        broken = [{"action": "", "reply": error}] if error else []
        return [{"action": "", "reply": prompt}, *record["turns"], *broken]
    if "turns" in record:  # of lge_drrn.py
        return record["turns"]
    texts, actions = record["observations"], record["actions"]
    turns = [{"action": a, "reply": r} for a, r in zip(actions, envs.replies(texts, actions), strict=True)]
    for name, values in (
        ("reward", record["rewards"]),
        ("Q", record.get("Q", [])),
        ("V", record.get("V", [])),
    ):
        for turn, value in zip(turns, values, strict=False):
            turn[name] = value
    for turn in turns:
        turn |= {"A": turn["Q"] - turn["V"]} if "Q" in turn else {}
    return turns


def no_number(name: str) -> None:
    """What NaN and infinities of Python's JSON become: a browser knows none, and draws nothing there."""


def read(run: Path) -> dict:
    """A run's arguments, metrics and dialogues. Raises ValueError if the folder is not a run's."""
    if not run.is_dir():
        raise ValueError(f"there is no folder {run}")
    try:
        args = json.loads((run / "args.json").read_text(encoding="utf-8"), parse_constant=no_number)
        files = [run / "metrics.jsonl", run / "rollouts.jsonl"]
        lines = [path.read_text(encoding="utf-8").splitlines() if path.exists() else [] for path in files]
        metrics, records = ([json.loads(line, parse_constant=no_number) for line in part] for part in lines)
    except (OSError, ValueError) as error:
        raise ValueError(f"{run}: not the folder of a run: {error}") from error
    dialogues = []
    for record in records:
        total = record.get("return", record.get("score", sum(record.get("rewards", []))))
        about = {"iteration": record.get("iteration", 0), "return": total, "turns": turns_of(record)}
        dialogues.append(about | {"answer": record.get("answer", record.get("variation", ""))})
    return {"name": run.name, "args": args, "metrics": metrics, "dialogues": dialogues}


def main() -> None:
    """Reads the runs and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m envs.view", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="the file; by default view.html in the first run's folder")
    args = parser.parse_args()
    try:
        data = {"runs": [read(run) for run in args.runs], "meanings": meanings(args.runs)}
        text = json.dumps(data).replace("<", "\\u003c")  # so that no dialogue ends the script
        page = TEMPLATE.read_text(encoding="utf-8").replace("DATA", text)
        out = args.out or args.runs[0] / "view.html"
        out.with_name(out.name + ".tmp").write_text(page, encoding="utf-8")
        out.with_name(out.name + ".tmp").replace(out)
    except (OSError, ValueError) as error:
        print(f"envs.view: {error}".splitlines()[0], file=sys.stderr)
        sys.exit(2)
    print(out)


if __name__ == "__main__":
    main()
