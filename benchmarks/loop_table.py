"""The table of LOOP: what its parts are worth, each row for some seeds, beside the paper's figures.

    python benchmarks/loop_table.py                            # hours; goes on where it was stopped
    python benchmarks/loop_table.py --quick                    # seconds, and its figures mean nothing
    python benchmarks/loop_table.py --out docs/loop_ppo.md     # puts the table between the file's two marks
    python benchmarks/loop_table.py --known cells.jsonl        # what has been run elsewhere is not run again
    python benchmarks/loop_table.py --curves curves.svg        # draws, too, how it came to that

Every cell is one run of loop_ppo.py in a folder of its own below --runs. All rows of a seed go on from one warm start,
which is the same to the bit as if each had made its own. A cell that has ended is not run again, one that was killed
goes on from its last checkpoint. Printed is the mean over the seeds at the end of training, at temperature 1, with the
half width of its 95 % interval (Student's t): task goal completion (TGC) and scenario goal completion (SGC) of both
test splits, in percent. The paper's figures (Table 1) are of a 32B model in AppWorld: compare orders, not sizes.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import tyro
from tables import check, drawing, insert, interval, read_lines, stop, write_lines

SCRIPT = Path(__file__).parent.parent / "loop_ppo.py"
ROWS = {  # the options of each row, and the paper's figures for it, in the order of COLUMNS
    "RLOO": ("--variant rloo --level token", (57.2, 35.7, 36.7, 17.4)),
    "GRPO": ("--variant grpo --level token", (58.0, 36.8, 39.5, 22.4)),
    "LOOP (bandit)": ("--variant loop --level trajectory", (53.3, 33.6, 27.7, 13.0)),
    "LOOP (turn)": ("--variant loop --level turn", (64.1, 43.5, 40.8, 26.5)),
    "LOOP (token)": ("--variant loop --level token", (71.3, 53.6, 45.7, 26.6)),
    "LOOP RwNorm (token)": ("--variant loop-rwnorm --level token", None),
}
COLUMNS = {"normal TGC": "test_normal_success", "SGC": "test_normal_scenarios"}
COLUMNS |= {"challenge TGC": "test_challenge_success", "SGC ": "test_challenge_scenarios"}
CURVES = {"rollout/success": "solved in training", "update/filtered": "groups of equal returns"}
CURVES |= {"update/clipped": "tokens that the clip leaves out", "rollout/no_op": "rollouts that do nothing"}
BASE = (39.2, 18.6, 21.0, 7.5)  # the paper's model before training
O1 = (61.9, 41.1, 36.7, 19.4)  # what it compares with
START, END = "<!-- table -->", "<!-- /table -->"
QUICK = "--drills 16 --demonstrations 40 --warm-start-epochs 1 --width 32 --layers 1 --tasks 2"
QUICK += " --rollouts 3 --eval-episodes 3 --max-action-tokens 6"


@dataclass
class Args:
    env: str = "apps"  # the world, one with splits
    seeds: int = 5  # 1 to this
    jobs: int = 2  # runs at a time, one thread each
    iterations: int = 80  # of every run
    options: str = ""  # for every run, in one piece: --options="--tasks 8 --width 64"
    runs: Path = Path("runs/loop_table")  # folder of the runs
    known: Path | None = None  # file of cells, a line each; those in it are not run, and those that are run join it
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


def group(args: Args) -> Path:
    """The folder of all runs with these options: other options, other runs."""
    about = f"{args.env} {QUICK if args.quick else args.options}".strip()
    return args.runs / quote(about, safe="=")


def warm_start(args: Args, seed: int) -> Path:
    """The run of no iterations from which all rows of this seed go on; made unless it is there."""
    folder = group(args) / f"start_{seed}"
    if not list(folder.glob("*/summary.json")):
        options = (QUICK if args.quick else args.options).split()
        # The checkpoint of grpo has what the others need, and the start model besides.
        options += ["--variant", "grpo", "--iterations", "0", "--seed", seed, "--runs", folder]
        run(f"warm start, seed {seed}", "--env", args.env, *options)
    return sorted(folder.glob("*/summary.json"))[0].parent


def folder_of(args: Args, row: str, seed: int) -> Path:
    """The folder of a cell's run."""
    return group(args) / re.sub(r"\W+", "_", f"{row} {seed}")


def run_cell(args: Args, row: str, seed: int, start: Path) -> dict:
    """Runs one cell, or what is missing of it, and returns its summary."""
    folder, iterations = folder_of(args, row, seed), 1 if args.quick else args.iterations
    if not folder.exists():
        copy = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(start, copy)
        (copy / "summary.json").unlink()
        copy.replace(folder)
    summary = folder / "summary.json"

    def has_ended() -> bool:  # one that was interrupted has a summary, too
        rows = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return summary.exists() and bool(rows) and json.loads(rows[-1])["iteration"] == iterations

    if not has_ended():
        summary.unlink(missing_ok=True)  # of an interruption: not that of the run to come
        run(f"{row}, seed {seed}", "--resume", folder, "--iterations", iterations, *ROWS[row][0].split())
    if not has_ended():  # Ctrl-C goes to the whole group of processes
        raise RuntimeError(f"{row}, seed {seed}: stopped; the same command goes on")
    return json.loads(summary.read_text(encoding="utf-8"))


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
        summary = run_cell(args, *cell, starts[cell[1]])
        logged = read_lines(folder_of(args, *cell) / "metrics.jsonl")
        curves = {tag: [round(100 * row[tag], 1) for row in logged] for tag in CURVES}
        with lock:
            found[cell] = about | {"method": cell[0], "seed": cell[1], "summary": summary, "curves": curves}
            known.append(found[cell])
            if args.known:
                write_lines(args.known, known)

    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            begun = sorted({seed for _, seed in missing})
            starts = dict(zip(begun, pool.map(lambda seed: warm_start(args, seed), begun), strict=True))
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

    lines = [f"| method | {' | '.join(COLUMNS)} | paper, all four |", "| --- |" + " ---: |" * (len(COLUMNS) + 1)]
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
                *(found[row, seed]["curves"][tag] for seed in seeds if "curves" in found[row, seed]), strict=True
            )
            return [(iteration, statistics.fmean(same)) for iteration, same in enumerate(by_seed, 1)]

        panels = {f"{title}, %": {row: mean(row, tag) for row in ROWS} for tag, title in CURVES.items()}
        args.curves.write_text(drawing(panels, "iterations"), encoding="utf-8")
    return table


if __name__ == "__main__":
    main(tyro.cli(Args))
