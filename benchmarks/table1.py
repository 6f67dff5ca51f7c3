"""Table 1 of ArCHer: six ways to learn from the same recorded dialogues, each for five seeds.

    python benchmarks/table1.py                                  # an hour; goes on where it was stopped
    python benchmarks/table1.py --quick                          # seconds, and its figures mean nothing
    python benchmarks/table1.py --out docs/archer_offline_iql.md # puts the table between the file's two marks
    python benchmarks/table1.py --results table1.csv             # what is in this file is not run again

Every cell is one run of archer_offline_iql.py in a folder of its own below --runs; those that have ended are
not run again. All rows learn from one dataset and one checkpoint and differ in what ROWS says only, but for
REINFORCE: its actor starts as that of the BC row, for one that has not seen the data says nothing that a
critic of the data could judge, and learns at 1e-3. What that alone does shows a seventh row, which starts
like it and learns like the first (--rows "IQL + AWR from BC"). Printed is the mean over the seeds at the end
of training, with the half width of its 95 % interval (Student's t).
"""

import json
import re
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import tyro
from tables import check, insert, interval, launch, read_lines, run_missing, stop

SCRIPT = Path(__file__).parent.parent / "archer_offline_iql.py"
ROWS = {  # in the order of the paper's expectation, best first
    "ArCHer: IQL + AWR": "--critic-loss iql --actor-loss awr",
    "SARSA + AWR": "--critic-loss sarsa --actor-loss awr",
    "IQL + REINFORCE + BC": "--critic-loss iql --actor-loss reinforce --bc-weight 1 --actor-lr 1e-3",
    "Filtered BC": "--actor-loss awr --beta 0 --critic-updates 0 --keep 0.1",
    "BC": "--actor-loss awr --beta 0 --critic-updates 0",
    "IQL + REINFORCE": "--critic-loss iql --actor-loss reinforce --actor-lr 1e-3",
    "IQL + AWR from BC": "--critic-loss iql --actor-loss awr --actor-lr 1e-3",  # not in the paper
}
TABLE = tuple(ROWS)[:6]
FROM_BC = ("IQL + REINFORCE + BC", "IQL + REINFORCE", "IQL + AWR from BC")  # their actor starts as that of BC
SHOWN = {"return": "eval/return", "greedy": "eval/return_greedy", "success": "eval/success"}
SHOWN |= {
    "effective": "actor/effective_share",
    "overestimation": "eval/overestimation",
    "unseen": "eval/unseen",
    "data nll": "actor/data_nll",
}
START, END = "<!-- table1 -->", "<!-- /table1 -->"
# What these two log of a critic that has learned nothing is not shown.
UNTRAINED = {(row, name) for row in ("Filtered BC", "BC") for name in ("effective", "overestimation")}
MADE_ONCE = defaultdict(threading.Lock)  # by row and seed: several rows may wait for one BC
QUICK = "--iterations 2 --dataset-size 40 --critic-updates 2 --actor-updates 2 --eval-episodes 4"


@dataclass
class Args:
    env: str = "twenty-questions-subset"  # the world
    rows: tuple[str, ...] = TABLE  # those that are wanted
    seeds: int = 5  # 1 to this
    jobs: int = 2  # runs at a time, one thread each
    options: str = ""  # for every run, in one piece: --options="--mix random=0.5,scripted=0.5"
    runs: Path = Path("runs/table1")  # folder of the runs
    results: Path | None = None  # CSV, a line a run: what is in it is not run, what is run joins it
    out: Path | None = None  # file that gets the table between its two marks
    quick: bool = False  # two seeds at most, of runs of two iterations, to see that all works


def finished(folder: Path) -> Path | None:
    """The folder of the run in it that has done all its iterations: an interrupted one has a summary, too."""
    for path in sorted(folder.glob("*/summary.json")):
        run, wanted = path.parent, json.loads(path.with_name("args.json").read_text(encoding="utf-8"))
        if read_lines(run / "metrics.jsonl")[-1]["iteration"] == wanted["iterations"]:
            return run
    return None


def group(args: Args) -> str:
    """The name of all runs with these options: other options, other runs."""
    return quote(f"{args.env} {options_of(args)}".strip(), safe="=")


def options_of(args: Args) -> str:
    """What every run is given besides what makes its row."""
    return f"{QUICK} {args.options}".strip() if args.quick else args.options


def run_row(args: Args, row: str, seed: int) -> Path:
    """Runs one cell, unless it has ended before, and returns the folder of its run."""
    with MADE_ONCE[row, seed]:
        folder = args.runs / group(args) / re.sub(r"\W+", "_", f"{row} {seed}")
        if run := finished(folder):
            return run
        options = ["--env", args.env, "--seed", seed, "--runs", folder]
        options += [*options_of(args).split(), *ROWS[row].split()]  # a row comes last: options do not undo it
        if row in FROM_BC:
            options += ["--actor", run_row(args, "BC", seed) / "actor"]
        if begun := sorted(folder.glob("*/checkpoint.pt")):
            options = ["--resume", begun[-1].parent]
        launch(f"{row}, seed {seed}", SCRIPT, *options)
        if not (run := finished(folder)):  # Ctrl-C goes to the whole group of processes
            raise RuntimeError(f"{row}, seed {seed}: stopped; the same command goes on")
        return run


def main(args: Args) -> str:
    """Runs what is missing and returns the table as markdown."""
    check(args.seeds, args.jobs, args.out, START, END)
    if unknown := set(args.rows) - set(ROWS):
        stop(f"--rows {min(unknown)}: there are {', '.join(ROWS)}")
    rows = [row for row in ROWS if row in args.rows]
    seeds = range(1, (min(2, args.seeds) if args.quick else args.seeds) + 1)
    key, name = ("group", "method", "seed"), group(args)
    cells = [(name, row, seed) for seed in seeds for row in rows]

    def run(group: str, row: str, seed: int) -> dict:
        run = run_row(args, row, seed)
        last = read_lines(run / "metrics.jsonl")[-1]
        return {"commit": json.loads((run / "summary.json").read_text(encoding="utf-8"))["commit"]} | last

    found = run_missing(key, cells, run, args.results, args.jobs)

    lines = [f"| method | {' | '.join(SHOWN)} |", "| --- |" + " ---: |" * len(SHOWN)]
    for row in rows:
        last = [found[name, row, seed] for seed in seeds]
        shown = {tag for about, tag in SHOWN.items() if tag in last[0] and (row, about) not in UNTRAINED}
        figures = [interval([r[tag] for r in last], 2) if tag in shown else "" for tag in SHOWN.values()]
        lines.append(f"| {row} | {' | '.join(figures)} |")
    table = "\n".join(lines)
    print(f"commits {', '.join(sorted({found[cell]['commit'] for cell in cells}))}")
    print(f"return of the data {last[0]['data/return']:.2f}, {len(seeds)} seeds\n{table}")
    if args.out:
        insert(table, args.out, START, END)
    return table


if __name__ == "__main__":
    main(tyro.cli(Args))
