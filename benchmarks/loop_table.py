"""The table of LOOP: what its parts are worth, each row for some seeds, beside the paper's figures.

    python benchmarks/loop_table.py                            # hours; goes on where it was stopped
    python benchmarks/loop_table.py --quick                    # seconds, and its figures mean nothing
    python benchmarks/loop_table.py --out docs/loop_ppo.md     # puts the table between the file's two marks
    python benchmarks/loop_table.py --results loop.csv         # what is in this file is not run again
    python benchmarks/loop_table.py --curves curves.svg        # draws, too, how it came to that
    python benchmarks/loop_table.py --levels                   # the other table: token, turn, trajectory

Every cell is one run of loop_ppo.py in a folder of its own below --runs, from the checkpoint that the script
takes. A cell that has ended is not run again, one that was killed goes on from its last save. The first row
is that checkpoint, by a run of no iterations.
Each row has its own learning rate: that of --rates with the largest area under `rollout/success` in one run
with a seed that no reported run has. So no row lives with a rate that was chosen for another, and the choice
sees no test split. With one rate there is nothing to choose.
Printed is the mean over the seeds at the end of training, sampled at temperature 1 and greedy, with the half
width of its 95 % interval (Student's t): task goal completion (TGC) and scenario goal completion (SGC) of the
test splits, in percent. The area is the mean of `rollout/success` over a run. All rows play as many rollouts,
so it compares what they make of them; so does the number of rollouts until 0.8 of them succeed. A second
table has LOOP less each row, paired by seed. The paper's
figures (Table 2: three runs each, the best checkpoint of each by dev) are of a 32B model in AppWorld: compare
their order.
--levels takes so many and so large steps that the ratios leave 1: only then can it matter whether a token, a
turn or a rollout has one.
"""

import json
import re
import statistics
import threading
from dataclasses import dataclass, field
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
LEVELS = {  # epochs and rates at which the levels should separate: LOOP has 2 and 2e-4
    f"{level}, {epochs} epochs": (f"--level {level} --epochs {epochs}", rates)
    for epochs, rates in {4: (4e-4, 8e-4), 8: (8e-4,)}.items()
    for level in ("token", "turn", "trajectory")
}
TUNING_SEED = 101  # of the runs that choose the rates; no reported run has it
COLUMNS = {"normal TGC": "test_normal_success", "SGC": "test_normal_scenarios"}
COLUMNS |= {"challenge TGC": "test_challenge_success"}
COLUMNS |= {f"{name}, greedy": f"{key}_greedy" for name, key in COLUMNS.items()}
CURVES = {"rollout/success": "solved in training", "update/filtered": "rollouts left out"}
CURVES |= {"update/clipped": "tokens that the clip leaves out", "habit/no_op": "rollouts that do nothing"}
BASE = (39.2, 18.6, 21.0, 7.5)  # the paper's model before training, Table 1
O1 = (61.9, 41.1, 36.7, 19.4)  # what it compares with
LOGGED = {  # what the table of levels has of a run's iterations
    "mean update/spread": (statistics.fmean, "update/spread"),
    "mean update/clipped": (statistics.fmean, "update/clipped"),
    "largest update/ratio": (max, "update/ratio"),
}
START, END = "<!-- table -->", "<!-- /table -->"
LEVELS_START, LEVELS_END = "<!-- levels -->", "<!-- /levels -->"
QUICK = "--tasks 2 --rollouts 3 --worlds 6 --eval-episodes 3 --max-action-tokens 6"


@dataclass
class Args:
    env: str = "apps"  # the world, one with splits
    seeds: int = 5  # 1 to this
    rates: list[float] = field(default_factory=lambda: [1e-4, 2e-4, 4e-4, 8e-4])  # tried for each row
    levels: bool = False  # the table of the levels instead
    jobs: int = 2  # runs at a time, one thread each
    iterations: int = 120  # of every run; a row with fewer tasks has more
    options: str = ""  # for every run, in one piece: --options="--tasks 8 --width 64"
    runs: Path = Path("runs/loop_table")  # folder of the runs
    results: Path | None = None  # CSV, a line a run: what is in it is not run, what is run joins it
    out: Path | None = None  # file that gets the table between its two marks
    curves: Path | None = None  # SVG to draw: CURVES by iterations, means over the seeds
    quick: bool = False  # runs of one iteration, one seed, two rates, to see that all works


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


def run_cell(args: Args, row: str, seed: int, rate: float) -> Path:
    """Runs one cell, or what is missing of it, and returns the folder of its run."""
    what = f"{row}, rate {rate:g}, seed {seed}"
    folder = group(args) / re.sub(r"\W+", "_", what)
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
        own = LEVELS[row] if row in LEVELS else ROWS[row]
        options += ["--threads", 1, *options_of(args), "--iterations", iterations, *own[0].split()]
        launch(what, SCRIPT, *options, "--lr", rate)
    if not finished():  # Ctrl-C goes to the whole group of processes
        raise RuntimeError(f"{what}: stopped; the same command goes on")
    return finished()


def figures_of(run: Path) -> dict:
    """What the results keep of a run that has ended."""
    logged = [line for line in read_lines(run / "metrics.jsonl") if line["iteration"] > 0]
    figures = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    for tag in CURVES:
        figures[f"curve {tag}"] = [round(100 * line.get(tag, 0.0), 1) for line in logged]
    for name, (summed, tag) in LOGGED.items():  # an iteration in which nothing is learned has none
        values = [line[tag] for line in logged if tag in line]
        figures[name] = summed(values or [0.0])
    return figures


def run_cells(args: Args, wanted: list[tuple[str, int, float]]) -> dict[tuple[str, int, float], dict]:
    """Results by row, seed and rate, of which those that are missing are made."""
    name, lock = group(args).name, threading.Lock()

    def run(group: str, iterations: int, row: str, seed: int, rate: float) -> dict:
        with lock:  # the first one makes it, the others find it
            about = {"tuning": seed == TUNING_SEED} | warm_start(args)
        try:  # beside the cell's run may lie one that was killed before its first checkpoint
            return about | figures_of(run_cell(args, row, seed, rate))
        except RuntimeError as error:
            if "diverged" not in str(error):
                raise
            return about | {"diverged": True}

    key = ("group", "iterations", "method", "seed", "rate")
    cells = [(name, args.iterations, *cell) for cell in wanted]
    results = run_missing(key, cells, run, args.results, args.jobs)
    return {cell[2:]: results[cell] for cell in cells}


def area(result: dict) -> float:
    """Percent of a run's rollouts that succeed: the area under `rollout/success`; 0 if the run diverged.

    >>> area({"curve rollout/success": [20.0, 60.0, 100.0]}), area({"diverged": True})
    (60.0, 0.0)
    """
    return statistics.fmean(result.get("curve rollout/success") or [0.0])


def rollouts_to(result: dict, percent: float = 80.0, window: int = 3) -> int | None:
    """Rollouts played until the mean success of `window` iterations has reached a percentage; None: never.

    >>> curve = [60.0, 90.0, 60.0, 80.0, 100.0]  # the mean of the last three is the first of 80
    >>> rollouts_to({"curve rollout/success": curve, "episodes": 480})
    480
    >>> rollouts_to({"curve rollout/success": curve, "episodes": 480}, window=1)
    192
    """
    curve = result.get("curve rollout/success", [])
    for end in range(window, len(curve) + 1):
        if statistics.fmean(curve[end - window : end]) >= percent:
            return round(end * result["episodes"] / len(curve))
    return None


def best_rates(args: Args, rates: list[float]) -> dict[str, float]:
    """Each row's rate: that with the largest area in the tuning runs; of two that are equal the first."""
    if len(rates) == 1:
        return dict.fromkeys(ROWS, rates[0])
    tried = run_cells(args, [(row, TUNING_SEED, rate) for rate in rates for row in ROWS])
    return {row: max(rates, key=lambda rate: area(tried[row, TUNING_SEED, rate])) for row in ROWS}


def reach(row: str, results: list[dict]) -> str:
    """Mean of the rollouts until 0.8 succeed; "never" if no run gets there, else how many of them do.

    The mean is over as many rollouts in every row: those of three iterations of 16 tasks.
    """
    window = round(3 * LENGTH.get(row, 1))
    counts = [rollouts_to(result, window=window) for result in results]
    reached = [count for count in counts if count is not None]
    if not reached:
        return "never"
    some = "" if len(reached) == len(counts) else f" ({len(reached)} of {len(counts)})"
    return interval(reached, digits=0) + some


def main_table(rates: dict[str, float], found: dict[str, list[dict]]) -> list[str]:
    """The lines of the table: `found` has the results of each row, a dict a seed."""

    def tests(results: list[dict], prefix: str = "") -> str:
        keys = [re.sub("^(test_[a-z]+_)", rf"\1{prefix}", key) for key in COLUMNS.values()]
        return " | ".join(interval([100 * result[key] for result in results]) for key in keys)

    def theirs(figures: tuple | None) -> str:
        return " / ".join(map(str, figures or ["not at hand"]))

    names = ["method", "rate", *COLUMNS, "area", "rollouts to 0.8", "CPU-seconds", "paper, all four"]
    lines = [f"| {' | '.join(names)} |", "| --- |" + " ---: |" * (len(names) - 1)]
    lines.append(f"| warm start | | {tests(found['LOOP (token)'], 'warm_start_')} | | | | {theirs(BASE)} |")
    for row, results in found.items():
        areas = interval([area(result) for result in results])
        cost = interval([result["cpu_seconds"] for result in results], digits=0)
        costs = f"{areas} | {reach(row, results)} | {cost}"
        lines.append(f"| {row} | {rates[row]:g} | {tests(results)} | {costs} | {theirs(ROWS[row][1])} |")
    lines.append(f"| o1, not trained |{' |' * (len(COLUMNS) + 4)} {theirs(O1)} |")
    return lines


def paired_table(found: dict[str, list[dict]]) -> list[str]:
    """The lines of a second table: LOOP (token) less each other row, the mean of the seeds' differences."""

    def figures(row: str, name: str) -> list[float | None]:
        if name == "area":
            return [area(result) for result in found[row]]
        if name == "rollouts to 0.8":
            window = round(3 * LENGTH.get(row, 1))
            return [rollouts_to(result, window=window) for result in found[row]]
        return [100 * result[COLUMNS[name]] for result in found[row]]

    def less(row: str, name: str) -> str:
        pairs = list(zip(figures("LOOP (token)", name), figures(row, name), strict=True))
        if any(None in pair for pair in pairs):
            return "-"
        return interval([ours - theirs for ours, theirs in pairs], digits=1 - (name == "rollouts to 0.8"))

    names = ("normal TGC", "normal TGC, greedy", "area", "rollouts to 0.8")
    lines = [f"| LOOP (token) less | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    rows = [row for row in found if row != "LOOP (token)"]
    return lines + [f"| {row} | {' | '.join(less(row, name) for name in names)} |" for row in rows]


def levels_table(found: dict[tuple[str, float], list[dict]]) -> list[str]:
    """The lines of the table of levels: `found` has the results of each row and rate, a dict a seed."""
    tests = ("test_normal_success", "test_challenge_success")
    names = ["level", "rate", "normal TGC", "challenge TGC", "area", "spread of log w", "largest w"]
    names += ["clipped, %", "CPU-seconds"]
    lines = [f"| {' | '.join(names)} |", "| --- |" + " ---: |" * (len(names) - 1)]
    for (row, rate), results in found.items():
        ended = [result for result in results if "diverged" not in result]
        lost = len(results) - len(ended)
        name = f"{row} ({lost} of {len(results)} diverged)" if lost else row
        if not ended:
            lines.append(f"| {name} | {rate:g} |{' |' * (len(names) - 2)}")
            continue
        values = [interval([100 * result[key] for result in ended]) for key in tests]
        values.append(interval([area(result) for result in ended]))
        values.append(interval([result["mean update/spread"] for result in ended], digits=3))
        values.append(f"{max(result['largest update/ratio'] for result in ended):.3g}")
        values.append(interval([100 * result["mean update/clipped"] for result in ended]))
        values.append(interval([result["cpu_seconds"] for result in ended], digits=0))
        lines.append(f"| {name} | {rate:g} | {' | '.join(values)} |")
    return lines


def draw_curves(found: dict[str, list[dict]], out: Path) -> None:
    """Draws CURVES by iterations of 16 tasks, means over the seeds."""

    def mean(row: str, tag: str) -> list[tuple[int, float]]:
        by_iteration = zip(*(result[f"curve {tag}"] for result in found[row]), strict=True)
        step = 1 / LENGTH.get(row, 1)
        return [(step * n, statistics.fmean(same)) for n, same in enumerate(by_iteration, 1)]

    panels = {f"{title}, %": {row: mean(row, tag) for row in ROWS} for tag, title in CURVES.items()}
    draw(panels, "iterations", out)


def check_results(args: Args, found: dict[tuple[str, float], list[dict]]) -> None:
    """Stops for results of which no table can be made."""
    for (row, rate), results in found.items():
        diverged = [result["seed"] for result in results if "diverged" in result]
        if diverged and not args.levels:
            stop(f"{row}, seed {diverged[0]}: diverged at its best rate; leave {rate:g} out of --rates")
        for result in results:
            missing = [key for key in COLUMNS.values() if key not in result and "diverged" not in result]
            if missing:
                stop(f"--env {args.env}: its runs have no {missing[0]}; take a world with test splits")


def main(args: Args) -> str:
    """Runs what is missing and returns the table as markdown."""
    marks = (LEVELS_START, LEVELS_END) if args.levels else (START, END)
    check(args.seeds, args.jobs, args.out, *marks)
    if not args.rates:
        stop("--rates: at least one")
    seeds = range(1, (1 if args.quick else args.seeds) + 1)
    if args.levels:
        cells = [(row, rate) for row, (_, rates) in LEVELS.items() for rate in rates]
    else:
        rates = best_rates(args, args.rates[:2] if args.quick else args.rates)
        cells = list(rates.items())
    results = run_cells(args, [(row, seed, rate) for seed in seeds for row, rate in cells])
    found = {(row, rate): [results[row, seed, rate] for seed in seeds] for row, rate in cells}
    check_results(args, found)

    if args.levels:
        lines = levels_table(found)
    else:
        of_rows = {row: found[row, rate] for row, rate in cells}
        lines = [*main_table(rates, of_rows), "", *paired_table(of_rows)]
        if args.curves:
            draw_curves(of_rows, args.curves)
    table = "\n".join(lines)
    print(f"{len(seeds)} seeds\n{table}")
    if args.out:
        insert(table, args.out, *marks)
    return table


if __name__ == "__main__":
    main(tyro.cli(Args))
