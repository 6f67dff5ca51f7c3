"""The table of LOOP: what its parts are worth, each row for some seeds, beside the paper's figures.

    python benchmarks/loop_table.py                            # hours; goes on where it was stopped
    python benchmarks/loop_table.py --quick                    # seconds, and its figures mean nothing
    python benchmarks/loop_table.py --out docs/loop_ppo.md     # puts the table between the file's two marks
    python benchmarks/loop_table.py --known cells.jsonl        # what has been run elsewhere is not run again
    python benchmarks/loop_table.py --curves curves.svg        # draws, too, how it came to that

Every cell is one run of loop_ppo.py in a folder of its own below --runs, from the checkpoint that the script
takes. A cell that has ended is not run again, one that was killed goes on from its last save. The first row
is that checkpoint, by a run of no iterations.
Printed is the mean over the seeds at the end of training, sampled at temperature 1 and greedy, with the half
width of its 95 % interval (Student's t): task goal completion (TGC) and scenario goal completion (SGC) of the
test splits, in percent. The paper's figures (Table 1) are of a 32B model in AppWorld: compare their order.
"""

import json
import re
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import tyro
from tables import check, draw, insert, interval, read_lines, stop, write_lines

SCRIPT = Path(__file__).parent.parent / "loop_ppo.py"
ROWS = {  # the options of each row, and the paper's figures for it: normal TGC, SGC, challenge TGC, SGC
    "RLOO": ("--epochs 1 --minibatch 0", (57.2, 35.7, 36.7, 17.4)),
    "RLOO, as many steps": ("--epochs 1 --minibatch 0 --tasks 4", None),
    "GRPO": ("--epochs 1 --minibatch 0 --normalise --kl 0.04", (58.0, 36.8, 39.5, 22.4)),
    "LOOP (bandit)": ("--level trajectory", (53.3, 33.6, 27.7, 13.0)),
    "LOOP (turn)": ("--level turn", (64.1, 43.5, 40.8, 26.5)),
    "LOOP (token)": ("--level token", (71.3, 53.6, 45.7, 26.6)),
    "LOOP RwNorm (token)": ("--normalise", None),
}
QUARTERS = {"RLOO, as many steps"}  # a quarter of the tasks, four times the iterations: as many rollouts
COLUMNS = {"normal TGC": "test_normal_success", "SGC": "test_normal_scenarios"}
COLUMNS |= {"challenge TGC": "test_challenge_success"}
COLUMNS |= {f"{name}, greedy": f"{key}_greedy" for name, key in COLUMNS.items()}
CURVES = {"rollout/success": "solved in training", "update/filtered": "rollouts left out"}
CURVES |= {"update/clipped": "tokens that the clip leaves out", "habit/no_op": "rollouts that do nothing"}
BASE = (39.2, 18.6, 21.0, 7.5)  # the paper's model before training
O1 = (61.9, 41.1, 36.7, 19.4)  # what it compares with
START, END = "<!-- table -->", "<!-- /table -->"
QUICK = "--tasks 2 --rollouts 3 --worlds 6 --eval-episodes 3 --max-action-tokens 6"


@dataclass
class Args:
    env: str = "apps"  # the world, one with splits
    seeds: int = 5  # 1 to this
    jobs: int = 2  # runs at a time, one thread each
    iterations: int = 120  # of every run, of a quarter of the tasks four times as many
    options: str = ""  # for every run, in one piece: --options="--tasks 8 --width 64"
    runs: Path = Path("runs/loop_table")  # folder of the runs
    known: Path | None = (
        None  # file of cells, a line each; those in it are not run, and those that are run join it
    )
    out: Path | None = None  # file that gets the table between its two marks
    curves: Path | None = (
        None  # file that gets an SVG: CURVES by iterations, means over the seeds whose cells have them
    )
    quick: bool = False  # two seeds of runs of one iteration, to see that all works


def run(what: str, *options) -> None:
    """Runs loop_ppo.py to its end."""
    command = [sys.executable, str(SCRIPT), "--threads", "1", *map(str, options)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{what}: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")


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
        run("warm start", "--env", args.env, *options_of(args), "--iterations", "0", "--runs", folder)
    summary = json.loads(sorted(folder.glob("*/summary.json"))[0].read_text(encoding="utf-8"))
    keys = [key for key in summary if key.startswith("test_")]
    return {re.sub("^(test_[a-z]+_)", r"\1warm_start_", key): summary[key] for key in keys}


def folder_of(args: Args, row: str, seed: int) -> Path:
    """The folder that a cell's run is made in."""
    return group(args) / re.sub(r"\W+", "_", f"{row} {seed}")


def run_cell(args: Args, row: str, seed: int) -> dict:
    """Runs one cell, or what is missing of it, and returns its summary."""
    folder, iterations = folder_of(args, row, seed), 1 if args.quick else args.iterations
    iterations *= 4 if row in QUARTERS else 1

    def finished() -> dict | None:  # a run that was interrupted has a summary, too
        for path in folder.glob("*/summary.json"):
            rows = read_lines(path.with_name("metrics.jsonl"))
            if rows and rows[-1]["iteration"] == iterations:
                return json.loads(path.read_text(encoding="utf-8"))

    if not finished():
        for path in folder.glob("*/summary.json"):
            path.unlink()  # of an interruption: not that of the run to come
        begun = sorted(folder.glob("*/checkpoint.pt"))
        options = (
            ["--resume", begun[-1].parent] if begun else ["--env", args.env, "--seed", seed, "--runs", folder]
        )
        options += [*options_of(args), "--iterations", iterations, *ROWS[row][0].split()]
        run(f"{row}, seed {seed}", *options)
    if not finished():  # Ctrl-C goes to the whole group of processes
        raise RuntimeError(f"{row}, seed {seed}: stopped; the same command goes on")
    return finished()


def main(args: Args) -> str:
    """Runs what is missing and returns the table as markdown."""
    check(args.seeds, args.jobs, args.out, START, END)
    seeds = range(1, (2 if args.quick else args.seeds) + 1)
    cells = [(row, seed) for seed in seeds for row in ROWS]
    about = {"group": group(args).name, "iterations": args.iterations}
    known, lock = read_lines(args.known), threading.Lock()
    found = {(r["method"], r["seed"]): r for r in known if about.items() <= r.items()}
    missing = [cell for cell in cells if cell not in found]

    def run_and_keep(cell: tuple[str, int]) -> None:
        summary = start | run_cell(args, *cell)
        (path,) = folder_of(args, *cell).glob("*/summary.json")
        logged = [row for row in read_lines(path.with_name("metrics.jsonl")) if row["iteration"] > 0]
        curves = {tag: [round(100 * row.get(tag, 0.0), 1) for row in logged] for tag in CURVES}
        with lock:
            found[cell] = about | {"method": cell[0], "seed": cell[1], "summary": summary, "curves": curves}
            known.append(found[cell])
            if args.known:
                write_lines(args.known, known)

    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            start = warm_start(args) if missing else {}
            list(pool.map(run_and_keep, missing))
        except RuntimeError as error:
            pool.shutdown(cancel_futures=True)
            stop(str(error))
    if missing := [key for key in COLUMNS.values() if key not in found[cells[0]]["summary"]]:
        stop(f"--env {args.env}: its runs have no {missing[0]}; take a world with test splits")

    def line(row: str, prefix: str, paper) -> str:
        keys = [prefix.join(re.match("(test_[a-z]+_)(.*)", key).groups()) for key in COLUMNS.values()]
        ours = [interval([100 * found[row, seed]["summary"][key] for seed in seeds]) for key in keys]
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
        if not all(any("curves" in found[row, seed] for seed in seeds) for row in ROWS):
            stop(f"--curves {args.curves}: a row has no cell with curves; run one without --known")

        def mean(row: str, tag: str) -> list[tuple[int, float]]:
            by_seed = zip(
                *(found[row, seed]["curves"][tag] for seed in seeds if "curves" in found[row, seed]),
                strict=True,
            )
            step = 0.25 if row in QUARTERS else 1
            return [(step * n, statistics.fmean(same)) for n, same in enumerate(by_seed, 1)]

        panels = {f"{title}, %": {row: mean(row, tag) for row in ROWS} for tag, title in CURVES.items()}
        draw(panels, "iterations", args.curves)
    return table


if __name__ == "__main__":
    main(tyro.cli(Args))
