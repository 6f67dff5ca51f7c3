"""Table 1 of ArCHer: six ways to learn from the same recorded dialogues, each for five seeds.

    python benchmarks/table1.py                                  # an hour; goes on where it was stopped
    python benchmarks/table1.py --quick                          # seconds, and its figures mean nothing
    python benchmarks/table1.py --out docs/archer_offline_iql.md # puts the table between the file's two marks
    python benchmarks/table1.py --known docs/table1_cells.jsonl  # what was run elsewhere is not run again

Every cell is one run of archer_offline_iql.py in a folder of its own below --runs; those that have ended are
not run again. All rows learn from one dataset and one checkpoint and differ in what ROWS says only, but for
REINFORCE: its actor starts as that of the BC row, for one that has not seen the data says nothing that a
critic of the data could judge, and learns at 1e-3. What that alone does shows a seventh row, which starts
like it and learns like the first (--rows "IQL + AWR from BC"). Printed is the mean over the seeds at the end
of training, with the half width of its 95 % interval (Student's t).
"""

import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import tyro
from tables import check, insert, interval, read_lines, stop, write_lines

SCRIPT = Path(__file__).parent.parent / "archer_offline_iql.py"
ROWS = {  # in the order of the paper's expectation, best first
    "ArCHer: IQL + AWR": "--critic iql --actor-loss awr",
    "SARSA + AWR": "--critic sarsa --actor-loss awr",
    "IQL + REINFORCE + BC": "--critic iql --actor-loss reinforce --bc-weight 1 --actor-lr 1e-3",
    "Filtered BC": "--actor-loss awr --beta 0 --critic-updates 0 --keep 0.1",
    "BC": "--actor-loss awr --beta 0 --critic-updates 0",
    "IQL + REINFORCE": "--critic iql --actor-loss reinforce --actor-lr 1e-3",
    "IQL + AWR from BC": "--critic iql --actor-loss awr --actor-lr 1e-3",  # not in the paper
}
TABLE = tuple(ROWS)[:6]
FROM_BC = ("IQL + REINFORCE + BC", "IQL + REINFORCE", "IQL + AWR from BC")  # their actor starts as that of BC
SHOWN = {"return": "eval/return", "greedy": "eval/return_greedy", "success": "eval/success"}
SHOWN |= {
    "effective": "actor/effective_samples",
    "overestimation": "eval/overestimation",
    "unseen": "eval/unseen",
    "data nll": "actor/data_nll",
}
START, END = "<!-- table1 -->", "<!-- /table1 -->"
# What these two log of a critic that has learned nothing is not shown.
UNTRAINED = {(row, name) for row in ("Filtered BC", "BC") for name in ("effective", "overestimation")}
QUICK = "--iterations 2 --dataset-size 40 --critic-updates 2 --actor-updates 2 --eval-episodes 4"


@dataclass
class Args:
    env: str = "twenty-questions-subset"  # the world
    rows: tuple[str, ...] = TABLE  # those that are wanted
    seeds: int = 5  # 1 to this
    jobs: int = 2  # runs at a time, one thread each
    options: str = ""  # for every run, in one piece: --options="--mix random=0.5,scripted=0.5"
    runs: Path = Path("runs/table1")  # folder of the runs
    known: Path | None = None  # file of cells, a line each: what is in it is not run, what is run joins it
    out: Path | None = None  # file that gets the table between its two marks
    quick: bool = False  # two seeds at most, of runs of two iterations, to see that all works


def finished(folder: Path) -> Path | None:
    """The folder of the run in it that has done all its iterations; one that was interrupted has a summary,
    too."""
    for path in sorted(folder.glob("*/summary.json")):
        last = json.loads((path.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        if (
            last["iteration"]
            == json.loads((path.parent / "args.json").read_text(encoding="utf-8"))["iterations"]
        ):
            return path.parent
    return None


def group(args: Args) -> str:
    """The name of all runs with these options: other options, other runs."""
    return quote(f"{args.env} {options_of(args)}".strip(), safe="=")


def options_of(args: Args) -> str:
    """What every run is given besides what makes its row."""
    return f"{QUICK} {args.options}".strip() if args.quick else args.options


def run_row(args: Args, row: str, seed: int) -> Path:
    """Runs one cell, unless it has ended before, and returns the folder of its run."""
    folder = args.runs / group(args) / re.sub(r"\W+", "_", f"{row} {seed}")
    if run := finished(folder):
        return run
    command = [sys.executable, str(SCRIPT), "--env", args.env, "--seed", str(seed), "--runs", str(folder)]
    command += [*options_of(args).split(), *ROWS[row].split()]  # a row comes last: options do not undo it
    if row in FROM_BC:
        command += ["--actor", str(run_row(args, "BC", seed) / "actor")]
    if begun := sorted(folder.glob("*/checkpoint.pt")):
        command = [sys.executable, str(SCRIPT), "--resume", str(begun[-1].parent)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(
            f"{row}, seed {seed}: {(result.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
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
    known, lock = read_lines(args.known), threading.Lock()
    cells = {(cell["method"], cell["seed"]): cell for cell in known if cell["group"] == group(args)}
    missing = [(row, seed) for seed in seeds for row in rows if (row, seed) not in cells]

    def run_and_keep(wanted: tuple[str, int]) -> None:
        run = run_row(args, *wanted)
        cell = {"group": group(args), "method": wanted[0], "seed": wanted[1]}
        cell |= {"commit": json.loads((run / "summary.json").read_text(encoding="utf-8"))["commit"]}
        cell["last"] = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        with lock:
            cells[wanted] = cell
            known.append(cell)
            if args.known:
                write_lines(args.known, known)

    with ThreadPoolExecutor(args.jobs) as pool:
        try:  # BC first, and once for a seed: others start from it
            begun = {("BC", seed) for row, seed in missing if row in FROM_BC}
            list(pool.map(lambda cell: run_row(args, *cell), sorted(begun)))
            list(pool.map(run_and_keep, missing))
        except RuntimeError as error:
            pool.shutdown(cancel_futures=True)
            stop(str(error))

    lines = [f"| method | {' | '.join(SHOWN)} |", "| --- |" + " ---: |" * len(SHOWN)]
    for row in rows:
        last = [cells[row, seed]["last"] for seed in seeds]
        shown = {name: tag for name, tag in SHOWN.items() if tag in last[0] and (row, name) not in UNTRAINED}
        figures = [
            interval([r[shown[name]] for r in last], digits=2) if name in shown else "" for name in SHOWN
        ]
        lines.append(f"| {row} | {' | '.join(figures)} |")
    table = "\n".join(lines)
    print(f"commits {', '.join(sorted({cells[row, seed]['commit'] for row in rows for seed in seeds}))}")
    print(f"return of the data {last[0]['data/return']:.2f}, {len(seeds)} seeds\n{table}")
    if args.out:
        insert(table, args.out, START, END)
    return table


if __name__ == "__main__":
    main(tyro.cli(Args))
