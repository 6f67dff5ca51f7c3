"""What the guide is worth to an explorer, by task, for some seeds and equal steps: in ScienceWorld, as in
Table 3 of LGE, or in the school.

    python benchmarks/lge.py                                   # a night and more; goes on if stopped
    python benchmarks/lge.py --jobs 2                      # two runs at a time: 96 took 13.5 hours in sum
    python benchmarks/lge.py --tasks T12 --seeds 3         # one task
    python benchmarks/lge.py --env school --tasks find-plant --methods DRRN "LGE fixed" --split area
    python benchmarks/lge.py --env school --tasks all --split first_success
    python benchmarks/lge.py --quick                       # minutes, and its figures mean nothing
    python benchmarks/lge.py --out docs/lge_drrn.md        # puts the table between the file's two marks
    python benchmarks/lge.py --results lge.csv             # what is in this file is not run again

Every cell is one run of lge_drrn.py, of BC one of lge_bc.py, in a folder of its own below --runs. One that
has ended is not run again, one that Ctrl-C or SIGTERM stopped goes on. The guide is trained before,
by guide_simcse.py; the school has a ready-made one. Printed is the score in percent on variations of the test
split, the mean of the last tenth of the evaluations as in the paper, then over the seeds, with the half width
of its 95 % interval (Student's t), and what a seed gains over DRRN, likewise. --split dev is there to choose
settings by; training is the play from which the explorer learns, in the last tenth of its steps, area that of
all its steps; first_success is no score, but the steps of each world until an episode reached 100 (all of the
run, if none did). --each prints a line a run, with its training. curves.csv has every evaluation of all runs,
curves.svg its mean over the seeds, of three or more with the interval.
"""

import csv
import json
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import tyro
from tables import check, draw, half_width, insert, interval, launch, read_lines, run_missing, stop

sys.path.insert(0, str(Path(__file__).parent.parent))
from envs.models import guide_of
from envs.worlds.school import TASKS as SCHOOL
from envs.worlds.scienceworld import TASKS as NAMES

SCRIPT, BC = Path(__file__).parent.parent / "lge_drrn.py", Path(__file__).parent / "lge_bc.py"
ROWS = {
    "random": ["--explorer", "random", "--guide", "none"],
    "random, guided": ["--explorer", "random"],
    "DRRN": ["--guide", "none"],
    "LGE fixed": ["--epsilon-schedule", "fixed"],
    "LGE increasing": ["--epsilon-schedule", "increasing"],
    "BC": ["--guide", "none"],
}
# Golchha et al. 2024, Table 3, in percent, 100,000 steps of 8 worlds: DRRN, LGE fixed, LGE increasing; BC.
PAPER = {
    "T0": (3, 2, 4, 0), "T1": (3, 3, 2, 0), "T2": (1, 0, 0, 1), "T3": (4, 3, 2, 0),
    "T4": (8, 8, 8, 1), "T5": (6, 7, 6, 1), "T6": (10, 11, 8, 4), "T7": (13, 13, 13, 3),
    "T8": (10, 10, 8, 2), "T9": (7, 6, 6, 5), "T10": (20, 29, 23, 4), "T11": (19, 19, 39, 21),
    "T12": (26, 56, 18, 29), "T13": (56, 60, 55, 19), "T14": (19, 67, 19, 17), "T15": (16, 17, 18, 3),
    "T16": (9, 9.4, 10, 8), "T17": (20, 25, 21, 6), "T18": (29, 27, 30, 16), "T19": (11, 11, 11, 5),
    "T20": (48, 89, 55, 26), "T21": (31, 32, 33, 2), "T22": (47, 46, 64, 14), "T23": (10, 18, 17, 2),
    "T24": (9, 5, 16, 4), "T25": (13, 25, 24, 5), "T26": (13, 24, 25, 5), "T27": (13, 21, 21, 4),
    "T28": (19, 22, 19, 6), "T29": (17, 16, 17, 13),
}  # fmt: skip
TASKS = ("T10", "T11", "T12", "T13", "T14", "T20", "T22", "T25")  # the paper gains more there than on average
START, END = "<!-- table3 -->", "<!-- /table3 -->"
QUICK = (
    "--steps 8 --worlds 2 --step-limit 4 --eval-every 4 --log-every 4 --eval-episodes 2 "
    "--vocabulary-steps 2 --batch 4"
)
QUICK_BC = "--steps 8 --paths 2 --eval-episodes 2 --dev-episodes 2"


@dataclass
class Args:
    env: Literal["scienceworld", "school"] = "scienceworld"  # the world; the paper's columns are of the first
    tasks: tuple[str, ...] = ()  # by the paper's numbers or by name; "all": the 30, of the school the ten;
    # none: eight of ScienceWorld, all of the school
    methods: tuple[str, ...] = tuple(ROWS)  # of the rows, by name
    seeds: int = 3  # 1 to this
    jobs: int = 1  # runs at a time; each has 8 Java processes, 2.7 GB in all
    guide: str = "auto"  # folder of the guide; auto: the newest in runs/
    options: str = ""  # for every run but BC's, in one piece: --options="--steps 100000 --eval-every 1000"
    split: Literal["test", "dev", "training", "area", "first_success"] = "test"  # what is printed
    runs: Path = Path("runs/lge")  # folder of the runs
    results: Path | None = None  # CSV, a line a run: what is in it is not run, what is run joins it
    out: Path | None = None  # file that gets the table between its two marks
    each: bool = False  # print a line for every run, too, with its training
    quick: bool = False  # one task, one seed, eight steps, to see that all works


def marks(args: Args) -> tuple[str, str]:
    """The file's two marks between which the table goes; of the school each split has its own.

    >>> marks(Args(env="school", split="area"))
    ('<!-- school area -->', '<!-- /school area -->')
    """
    if args.env == "scienceworld":
        return START, END
    return f"<!-- {args.env} {args.split} -->", f"<!-- /{args.env} {args.split} -->"


def band(scores: list[float]) -> tuple[float, ...]:
    """What is drawn of some seeds' scores: their mean and, of three or more, the ends of its 95 % interval.

    >>> [round(y, 2) for y in band([1.0, 2.0, 3.0])], band([1.0, 2.0])
    ([2.0, -0.48, 4.48], (1.5,))
    """
    mean, half = statistics.fmean(scores), half_width(scores)
    return (mean, mean - half, mean + half) if len(scores) > 2 else (mean,)


def number_of(task: str) -> str:
    """The paper's number of a task that is given by number or by name.

    >>> number_of("T12"), number_of("find-living-thing")
    ('T12', 'T12')
    """
    return task if task in PAPER else f"T{NAMES.index(task)}"


def finished(folder: Path) -> Path | None:
    """The folder of the run in it that has done all its steps; one that was interrupted has a summary,
    too."""
    for path in sorted(folder.glob("*/summary.json")):
        steps = json.loads((path.parent / "args.json").read_text(encoding="utf-8"))["steps"]
        if json.loads(path.read_text(encoding="utf-8"))["steps"] == steps:
            return path.parent
    return None


def group_of(args: Args, guide: str, row: str = "") -> str:
    """Other options or, where the row has one, another guide are other runs:
    the name of the folder that holds them."""
    options = quote((QUICK if args.quick else args.options).strip(), safe="=") or "default"
    if args.env != "scienceworld":
        options = f"{args.env}__{options}"
    has_guide = guide != "none" and "none" not in ROWS.get(row, [])
    folder = Path(guide).resolve()
    name = folder.parent.name if folder.name == "guide" else folder.name  # guide_simcse.py calls all "guide"
    return f"{options}__{name}" if has_guide else options


def run_cell(args: Args, guide: str, task: str, row: str, seed: int) -> Path:
    """Runs one cell, or goes on with it, unless it has ended before; the folder of its run."""
    options = QUICK if args.quick else args.options
    if row == "BC":
        options = QUICK_BC if args.quick else ""
    folder = args.runs / group_of(args, guide, row) / re.sub(r"\W+", "_", f"{task} {row} {seed}")
    if run := finished(folder):
        return run
    given = ["--env", args.env, "--task", task, "--seed", seed, "--guide", guide, "--runs", folder]
    given += [*ROWS[row], *options.split()]
    if begun := sorted(folder.glob("*/checkpoint.pt")):  # BC has none and begins anew
        given = ["--resume", begun[-1].parent]
    launch(f"{task}, {row}, seed {seed}", BC if row == "BC" else SCRIPT, *given)
    if not (run := finished(folder)):  # Ctrl-C goes to the whole group of processes
        raise RuntimeError(f"{task}, {row}, seed {seed}: stopped; the same command goes on")
    print(f"{task}, {row}, seed {seed}: done", file=sys.stderr)
    return run


def outcome(run: Path) -> dict:
    """What a run came to: its summary, and as curves (step, score) of all its evaluations and of training."""
    rows, curves = read_lines(run / "metrics.jsonl"), {}
    for name, tag in {
        "dev": "eval/dev_score",
        "test": "eval/test_score",
        "training": "rollout/score",
        "q": "explorer/q",
    }.items():
        curves[name] = [(row["iteration"], round(row[tag], 2)) for row in rows if tag in row]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return summary | {f"curve {name}": points for name, points in curves.items()}


def each(outcomes: dict[tuple, dict]) -> str:
    """A line a run: scores on test and dev, of training in each quarter of the steps, mean Q at the end."""
    lines = ["| task | method | seed | test | dev | training, by quarter | mean Q at the end | commit |"]
    lines.append("| --- | --- | --- " + "| ---: " * 4 + "| --- |")
    for (task, row, seed), run in outcomes.items():
        quarters = [[] for _ in range(4)]
        for step, score in run.get("curve training", []):
            quarters[min(3, int(4 * (step - 1) / run["steps"]))].append(score)
        means = ", ".join(f"{statistics.fmean(scores):.0f}" for scores in quarters if scores)
        q = f"{run['curve q'][-1][1]:.0f}" if run.get("curve q") else ""
        test, dev = (f"{run.get(f'eval_{split}_score', float('nan')):.1f}" for split in ("test", "dev"))
        lines.append(
            f"| {task} | {row} | {seed} | {test} | {dev} | {means} | {q} | {run.get('commit', '')} |"
        )
    return "\n".join(lines)


def main(args: Args) -> str:
    """Runs what is missing and returns the table as markdown."""
    check(args.seeds, args.jobs, args.out, *marks(args))
    if unknown := [row for row in args.methods if row not in ROWS]:
        stop(f"--methods {unknown[0]}: no such method; known: {', '.join(ROWS)}")
    guide = args.guide
    if guide == "auto":
        guide = guide_of(args.env, "runs")
    guided = [row for row in args.methods if row != "BC" and "none" not in ROWS[row]]
    if args.guide == "auto" and guide == "none" and guided and not args.quick:
        stop("--guide auto: no guide in runs/; train one with guide_simcse.py")
    tasks = args.tasks or (("all",) if args.env == "school" else TASKS)
    if tasks == ("all",):
        tasks = SCHOOL if args.env == "school" else tuple(f"T{n}" for n in range(30))
    tasks, seeds = (tasks[:1], [1]) if args.quick else (tasks, range(1, args.seeds + 1))

    # --- the runs: those known, and those to make
    groups = {row: group_of(args, guide, row) for row in ROWS}
    cells = [(task, row, seed) for seed in seeds for task in tasks for row in args.methods]

    def run(group: str, task: str, row: str, seed: int) -> dict:
        return outcome(run_cell(args, guide, task, row, seed))

    key = ("group", "task", "method", "seed")
    found = run_missing(key, [(groups[cell[1]], *cell) for cell in cells], run, args.results, args.jobs)
    outcomes = {cell: found[groups[cell[1]], *cell] for cell in cells}

    # --- curves
    folder = args.runs / group_of(args, guide)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "curves.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "method", "seed", "split", "step", "score"])
        for cell in cells:
            for split in ("dev", "test", "training"):
                writer.writerows([*cell, split, *point] for point in outcomes[cell][f"curve {split}"])
    means, curve = {}, args.split if args.split in ("test", "dev") else "training"
    for task in tasks:
        for row in args.methods:
            points = defaultdict(list)  # a line of the log in which no episode ended has no score
            for seed in seeds:
                for step, value in outcomes[task, row, seed][f"curve {curve}"]:
                    points[step].append(value)
            mean = [(step, *band(points[step])) for step in sorted(points) if len(points[step]) == len(seeds)]
            if mean:
                means.setdefault(task, {})[row] = mean
    if means:
        draw(means, "steps", folder / "curves.svg")

    # --- table
    def score(task: str, row: str, seed: int) -> float:
        if args.split == "training":
            points = outcomes[task, row, seed]["curve training"] or [(0, float("nan"))]  # BC does not play
            return statistics.fmean(score for _, score in points[-max(1, len(points) // 10) :])
        if args.split in ("area", "first_success"):
            return outcomes[task, row, seed].get(args.split, float("nan"))  # BC does not play
        return outcomes[task, row, seed][f"eval_{args.split}_score"]

    pairs = [(row, "DRRN") for row in args.methods if "LGE" in row and "DRRN" in args.methods]
    gain = "difference" if args.split == "first_success" else "gain"  # fewer steps are better
    gains = [f"{gain} of {row.removeprefix('LGE ')}" for row, _ in pairs]
    has_paper = args.env == "scienceworld"
    columns = [*args.methods, *gains, *(["paper: DRRN", "fixed", "increasing", "BC"] if has_paper else [])]
    lines = [f"| task | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for task in tasks:
        cells = [interval([score(task, row, seed) for seed in seeds]) for row in args.methods]
        cells += [interval([score(task, a, s) - score(task, b, s) for s in seeds]) for a, b in pairs]
        cells += [f"{figure:.0f}" for figure in PAPER[number_of(task)]] if has_paper else []
        lines.append(f"| {task} | {' | '.join(cells)} |")
    if len(tasks) > 1:
        by_seed = {
            row: [statistics.fmean(score(t, row, s) for t in tasks) for s in seeds] for row in args.methods
        }
        paper = zip(*(PAPER[number_of(task)] for task in tasks), strict=True)
        differences = [[a - b for a, b in zip(by_seed[x], by_seed[y], strict=True)] for x, y in pairs]
        means = [*map(interval, [*by_seed.values(), *differences])]
        means += [f"{statistics.fmean(column):.1f}" for column in paper] if has_paper else []
        lines.append(f"| mean | {' | '.join(means)} |")
    table = "\n".join(lines)
    print(f"{len(seeds)} seeds, {args.split}; curves in {folder}\n{table}")
    if args.each:
        print(each(outcomes))
    if args.out:
        insert(table, args.out, *marks(args))
    return table


if __name__ == "__main__":
    main(tyro.cli(Args))
