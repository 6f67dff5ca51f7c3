"""The table of LOOP: what its parts are worth, each row for some seeds, beside the paper's figures.

    python benchmarks/loop_table.py                            # hours; goes on where it was stopped
    python benchmarks/loop_table.py --quick                    # seconds, and its figures mean nothing
    python benchmarks/loop_table.py --out docs/loop_ppo.md     # puts the table between the file's two marks
    python benchmarks/loop_table.py --results loop.csv         # what is in this file is not run again
    python benchmarks/loop_table.py --curves curves.svg        # draws, too, how it came to that

Every cell is one run of loop_ppo.py in a folder of its own below --runs, from the checkpoint that the script
takes. A cell that has ended is not run again, one that was killed goes on from its last save. The first row
is that checkpoint, by a run of no iterations.
Printed is the mean over the seeds at the end of training, sampled at temperature 1 and greedy, with the half
width of its 95 % interval (Student's t): task goal completion (TGC) and scenario goal completion (SGC) of the
test splits, in percent. The paper's figures (Table 2: three runs each, the
best checkpoint of each by dev) are of a 32B model in AppWorld: compare their order.
"""

import json
import re
import statistics
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import tyro
from tables import check, draw, insert, interval, launch, read_lines, run_missing, stop

SCRIPT = Path(__file__).parent.parent / "loop_ppo.py"
ROWS = {  # the options of each row, and the paper's figures for it: normal TGC, SGC, challenge TGC, SGC
    "RLOO": ("--epochs 1 --minibatch 0", (56.3, 33.2, 31.9, 15.2)),
    "RLOO, as many steps": ("--epochs 1 --minibatch 0 --tasks 6", None),
    "GRPO": ("--epochs 1 --minibatch 0 --normalise --kl 0.04", (58.0, 36.6, 38.1, 20.2)),
    "LOOP (bandit)": ("--level trajectory", (48.9, 27.5, 27.3, 11.5)),
    "LOOP (turn)": ("--level turn", (61.7, 41.2, 38.0, 22.2)),
    "LOOP (token)": ("--level token", (66.4, 47.5, 41.7, 24.4)),
    "LOOP RwNorm (token)": ("--normalise", (59.6, 42.1, 35.0, 18.6)),
}
LENGTH = {"RLOO, as many steps": 16 / 6}  # 6 tasks instead of 16: more iterations, as many rollouts
COLUMNS = {"normal TGC": "test_normal_success", "SGC": "test_normal_scenarios"}
COLUMNS |= {"challenge TGC": "test_challenge_success"}
COLUMNS |= {f"{name}, greedy": f"{key}_greedy" for name, key in COLUMNS.items()}
CURVES = {"rollout/success": "solved in training", "update/filtered": "rollouts left out"}
CURVES |= {"update/clipped": "tokens that the clip leaves out", "habit/no_op": "rollouts that do nothing"}
BASE = (39.2, 18.6, 21.0, 7.5)  # the paper's model before training, Table 1
O1 = (61.9, 41.1, 36.7, 19.4)  # what it compares with
START, END = "<!-- table -->", "<!-- /table -->"
QUICK = "--tasks 2 --rollouts 3 --worlds 6 --eval-episodes 3 --max-action-tokens 6"


@dataclass
class Args:
    env: str = "apps"  # the world, one with splits
    seeds: int = 5  # 1 to this
    jobs: int = 2  # runs at a time, one thread each
    iterations: int = 120  # of every run; a row with fewer tasks has more
    options: str = ""  # for every run, in one piece: --options="--tasks 8 --width 64"
    runs: Path = Path("runs/loop_table")  # folder of the runs
    results: Path | None = None  # CSV, a line a run: what is in it is not run, what is run joins it
    out: Path | None = None  # file that gets the table between its two marks
    curves: Path | None = None  # SVG to draw: CURVES by iterations, means over the seeds that have them
    quick: bool = False  # two seeds of runs of one iteration, to see that all works


def options_of(args: Args) -> list[str]:
    """The options of every run."""
    return f"{QUICK if args.quick else ''} {args.options}".split()


def group(args: Args) -> Path:
    """The folder of all runs with these options: other options, other runs."""
    about = f"{args.env} {' '.join(options_of(args))}".strip()
    return args.runs / quote(about, safe="=")


def warm_start(args: Args) -> dict:
    """The checkpoint's own figures on the test splits, by a run of no iterations; made unless it is there."""
    folder = group(args) / "start"
    if not list(folder.glob("*/summary.json")):
        options = ["--threads", 1, "--env", args.env, *options_of(args), "--iterations", 0, "--runs", folder]
        launch("warm start", SCRIPT, *options)
    summary = json.loads(sorted(folder.glob("*/summary.json"))[0].read_text(encoding="utf-8"))
    keys = [key for key in summary if key.startswith("test_")]
    return {re.sub("^(test_[a-z]+_)", r"\1warm_start_", key): summary[key] for key in keys}


def run_cell(args: Args, row: str, seed: int) -> Path:
    """Runs one cell, or what is missing of it, and returns the folder of its run."""
    folder = group(args) / re.sub(r"\W+", "_", f"{row} {seed}")
    iterations = round((1 if args.quick else args.iterations) * LENGTH.get(row, 1))

    def finished() -> Path | None:  # a run that was interrupted has a summary, too
        for path in folder.glob("*/summary.json"):
            rows = read_lines(path.with_name("metrics.jsonl"))
            if rows and rows[-1]["iteration"] == iterations:
                return path.parent

    if not finished():
        for path in folder.glob("*/summary.json"):
            path.unlink()  # of an interruption: not that of the run to come
        begun = sorted(folder.glob("*/checkpoint.pt"))
        options = ["--resume", begun[-1].parent] if begun else ["--env", args.env, "--seed", seed]
        options += [] if begun else ["--runs", folder]
        options += ["--threads", 1, *options_of(args), "--iterations", iterations, *ROWS[row][0].split()]
        launch(f"{row}, seed {seed}", SCRIPT, *options)
    if not finished():  # Ctrl-C goes to the whole group of processes
        raise RuntimeError(f"{row}, seed {seed}: stopped; the same command goes on")
    return finished()


def main(args: Args) -> str:
    """Runs what is missing and returns the table as markdown."""
    check(args.seeds, args.jobs, args.out, START, END)
    seeds = range(1, (2 if args.quick else args.seeds) + 1)
    name = group(args).name
    cells = [(name, args.iterations, row, seed) for seed in seeds for row in ROWS]

    lock = threading.Lock()

    def run(group: str, iterations: int, row: str, seed: int) -> dict:
        with lock:  # the first one makes it, the others find it
            start = warm_start(args)
        path = run_cell(args, row, seed)  # beside it may lie one that was killed before its first checkpoint
        summary = start | json.loads((path / "summary.json").read_text(encoding="utf-8"))
        logged = [line for line in read_lines(path / "metrics.jsonl") if line["iteration"] > 0]
        curves = {f"curve {tag}": [round(100 * line.get(tag, 0.0), 1) for line in logged] for tag in CURVES}
        return summary | curves

    key = ("group", "iterations", "method", "seed")
    results = run_missing(key, cells, run, args.results, args.jobs)
    found = {(row, seed): results[name, args.iterations, row, seed] for _, _, row, seed in cells}
    if missing := [key for key in COLUMNS.values() if key not in found["RLOO", 1]]:
        stop(f"--env {args.env}: its runs have no {missing[0]}; take a world with test splits")

    def line(row: str, prefix: str, paper) -> str:
        keys = [prefix.join(re.match("(test_[a-z]+_)(.*)", key).groups()) for key in COLUMNS.values()]
        ours = [interval([100 * found[row, seed][key] for seed in seeds]) for key in keys]
        theirs = " / ".join(map(str, paper or ["not at hand"]))
        return f"| {row if not prefix else 'warm start'} | {' | '.join(ours)} | {theirs} |"

    lines = [
        f"| method | {' | '.join(COLUMNS)} | paper, all four |",
        "| --- |" + " ---: |" * (len(COLUMNS) + 1),
    ]
    lines += [line("LOOP (token)", "warm_start_", BASE)] + [line(row, "", ROWS[row][1]) for row in ROWS]
    lines.append(f"| o1, not trained |{' |' * len(COLUMNS)} {' / '.join(map(str, O1))} |")
    table = "\n".join(lines)
    print(f"{len(seeds)} seeds\n{table}")
    if args.out:
        insert(table, args.out, START, END)
    if args.curves:
        if not all(any("curve rollout/success" in found[row, seed] for seed in seeds) for row in ROWS):
            stop(f"--curves {args.curves}: a row has no run with curves; make one without --results")

        def mean(row: str, tag: str) -> list[tuple[int, float]]:
            curves = [found[row, seed].get(f"curve {tag}") for seed in seeds]
            by_iteration = zip(*filter(None, curves), strict=True)
            step = 1 / LENGTH.get(row, 1)
            return [(step * n, statistics.fmean(same)) for n, same in enumerate(by_iteration, 1)]

        panels = {f"{title}, %": {row: mean(row, tag) for row in ROWS} for tag, title in CURVES.items()}
        draw(panels, "iterations", args.curves)
    return table


if __name__ == "__main__":
    main(tyro.cli(Args))
