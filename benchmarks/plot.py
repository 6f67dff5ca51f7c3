"""Learning curves of runs side by side, as a picture or as a table.

    python benchmarks/plot.py runs/* --out curves.svg
    python benchmarks/plot.py runs/* --metric eval/return --mark "best possible=-6.78" --table
    python benchmarks/plot.py runs/* --metric rollout/return actor/kl actor/entropy --out health.svg
    python benchmarks/plot.py compare_WORLD.csv --out compare.svg --methods PPO ArCHer --smooth 192
    python benchmarks/plot.py runs/* --smooth 3 --reach -14 -13
    python benchmarks/plot.py runs/* --metric rollout/return actor/kl --csv curves.csv

Runs that differ in nothing but their seed make one line: the mean over the seeds and its 95 % interval, up to
where the shortest of them has come. A line is named by its script, if there are several, and by the arguments
in which runs of one script differ.
The third draws a panel for each metric. The fourth draws what benchmarks/compare.py has written: return by
dialogues and, beside it, by CPU-seconds; a method has one colour in all such pictures. The fifth prints, for
each run, dialogues / CPU-seconds until the metric first reached each level. The last writes a line for each
iteration of each run.
"""

import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro
from tables import COLOURS, draw, half_width, interval, read_lines, read_results, stop, write_results

METHODS = ("ArCHer", "PPO", "LOOP", "Filtered BC", "ArCHer, fresh", "CHAI")  # of a CSV: their colours
APART = {"seed", "runs", "resume", "name", "threads"}  # arguments by which runs are not told apart


@dataclass
class Args:
    runs: tyro.conf.Positional[list[Path]]  # folders of runs, or one CSV of compare.py
    metric: tuple[str, ...] = ("rollout/return",)  # tags of metrics.jsonl
    mark: list[str] = field(default_factory=list)  # level lines, as NAME=VALUE, such as "best possible=-6.78"
    smooth: int = 1  # iterations over which a curve is averaged; of a CSV: dialogues
    title: str = ""  # above the picture; "" takes world and metric
    out: Path | None = None  # the picture, an SVG
    methods: tuple[str, ...] = ()  # of a CSV: those that are drawn, in this order; none: all
    axes: tuple[Literal["dialogues", "cpu_seconds"], ...] = ("dialogues", "cpu_seconds")  # of a CSV: panels
    csv: Path | None = None  # file that gets the metrics, not averaged, a line for each iteration of a run
    table: bool = False  # print each line's first and last value
    reach: tuple[float, ...] = ()  # levels: print when the mean of --smooth iterations reaches each


def read(run: Path, metric: str) -> tuple[dict, dict[int, float]]:
    """A run's arguments, and the metric by iteration, if it has it. Stops where the folder is no run's."""
    try:
        arguments = json.loads((run / "args.json").read_text(encoding="utf-8"))
        rows = read_lines(run / "metrics.jsonl")
    except (OSError, ValueError) as error:
        stop(f"{run}: not the folder of a run: {error}")
    points = {row["iteration"]: row[metric] for row in rows if metric in row}
    if not points:
        tags = sorted({tag for row in rows for tag in row})
        print(f"{run}: no {metric!r} in its metrics; there are {', '.join(tags)}", file=sys.stderr)
    script = run.name.split("__")[1] if "__" in run.name else ""
    return {"script": script} | arguments, points


def lines_of(run: Path, metrics: tuple[str, ...]) -> list[dict]:
    """Of each iteration of a run its seed, its number and those of the metrics that it has."""
    arguments, _ = read(run, metrics[0])
    about = {"script": arguments["script"], "env": arguments.get("env", ""), "seed": arguments["seed"]}
    rows = read_lines(run / "metrics.jsonl")
    return [about | {name: row[name] for name in ("iteration", *metrics) if name in row} for row in rows]


def average(points: dict[int, float], over: int) -> dict[int, float]:
    """Running mean of a curve, of the values of the last `over` iterations that have one.

    >>> average({1: 0.0, 2: 2.0, 3: 4.0}, 2)
    {1: 0.0, 2: 1.0, 3: 3.0}
    """
    return {i: statistics.fmean(y for j, y in points.items() if i - over < j <= i) for i in points}


def grouped(found: list[tuple[dict, dict]]) -> dict[str, list[dict[int, float]]]:
    """Curves of runs that differ in their seed alone, under what tells the groups apart.

    That is the script, and the arguments in which runs of one script differ.
    """
    told = [{name: value for name, value in arguments.items() if name not in APART} for arguments, _ in found]
    names = list(dict.fromkeys(name for arguments in told for name in arguments))
    scripts = list(dict.fromkeys(arguments["script"] for arguments in told))
    varied = ["script"] if len(scripts) > 1 else []
    for name in names:
        values = {(arguments["script"], str(arguments.get(name))) for arguments in told}
        if len(values) > len(scripts):
            varied.append(name)
    groups = {}
    for arguments, (_, points) in zip(told, found, strict=True):
        own = [name for name in varied if name in arguments]
        label = ", ".join(f"{name} {arguments[name]}".removeprefix("script ") for name in own)
        groups.setdefault(label or arguments["script"], []).append(points)
    return groups


def band(curves: list[dict[int, float]]) -> list[tuple[int, float, float, float]]:
    """Mean of curves, and both ends of its interval, at the iterations that all of them have.

    Two curves have no interval to speak of: the band ends at them.
    """
    points = []
    for iteration in sorted(set.intersection(*map(set, curves))):
        values = [curve[iteration] for curve in curves]
        mean, half = statistics.fmean(values), half_width(values)
        points.append((iteration, mean, mean - half, mean + half))
    return points


def compared(rows: list[dict], axis: str, smooth: int) -> list[tuple[float, float, float, float]]:
    """The band of a method of compare.py, by the mean of its seeds on an axis.

    A point is the mean of the last `smooth` dialogues: of so many iterations, of one at least.
    """
    curves, places, dialogues = {}, {}, {}
    for row in rows:
        if "return" in row:
            curves.setdefault(row["seed"], {})[row["iteration"]] = row["return"]
            places.setdefault(row["iteration"], []).append(row[axis])
            dialogues[row["iteration"]] = row["dialogues"]
    first, last = min(dialogues), max(dialogues)
    per = (dialogues[last] - dialogues[first]) / max(1, last - first)
    over = max(1, round(smooth / per)) if per else 1
    points = band([average(curve, over) for curve in curves.values()])
    return [(statistics.fmean(places[iteration]), *edges) for iteration, *edges in points]


def draw_csv(args: Args) -> None:
    """Draws a CSV of compare.py."""
    (path,) = args.runs
    rows = read_results(path)
    there = list(dict.fromkeys(row["method"] for row in rows))
    if unknown := [name for name in args.methods if name not in there]:
        stop(f"--methods {unknown[0]}: there are {', '.join(there)}")
    if not there or not args.out:
        stop(f"{path}: no curves in it" if not there else "--out: where the picture is to be")
    panels = {}
    for axis in args.axes:
        lines = {name: [row for row in rows if row["method"] == name] for name in args.methods or there}
        title = f"{args.title or 'return'} by {axis.replace('cpu_', 'CPU-')}"
        panels[title] = {name: compared(own, axis, args.smooth) for name, own in lines.items()}
    colours = dict(zip(METHODS, COLOURS, strict=True))
    draw(panels, "", args.out, marks_of(args), colours)


def marks_of(args: Args) -> dict[str, float]:
    """The level lines by their names."""
    try:
        return {name: float(value) for name, _, value in (mark.rpartition("=") for mark in args.mark)}
    except ValueError as error:
        stop(f"--mark: write NAME=VALUE: {error}")


def table_of(metric: str, groups: dict[str, list[dict[int, float]]]) -> list[str]:
    """Lines of markdown: what each line of the picture begins and ends with."""
    lines = [f"| {metric} | runs | first | last |", "|---|---|---|---|"]
    for label, curves in groups.items():
        ends = [interval([curve[end(curve)] for curve in curves], digits=2) for end in (min, max)]
        lines.append(f"| {label} | {len(curves)} | {' | '.join(ends)} |")
    return lines


def reach_of(run: Path, args: Args) -> str:
    """A line of markdown: dialogues / CPU-seconds until the metric, a running mean, reaches each level."""
    arguments, points = read(run, args.metric[0])
    if not points:
        sys.exit(2)
    rows = {row["iteration"]: row for row in read_lines(run / "metrics.jsonl")}
    if "rollouts" not in arguments or not (run / "summary.json").exists():
        stop(f"{run}: --reach takes runs that have ended, of scripts that play dialogues")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    per = arguments["rollouts"] * arguments.get("tasks", 1)  # LOOP plays some rollouts of each task
    first = summary["episodes"] - summary["iteration"] * per  # dialogues before the first iteration
    full = list(average(points, args.smooth).items())[args.smooth - 1 :]
    cells = []
    for level in args.reach:
        places = [iteration for iteration, value in full if value >= level]
        if not places:
            cells.append("never")
            continue
        dialogues = first + places[0] * per
        cells.append(f"{dialogues:,} / {rows[places[0]]['time/cpu_seconds']:,.0f}")
    return f"| {arguments['script']}, seed {arguments['seed']} | {' | '.join(cells)} |"


def main(args: Args) -> str:
    """Draws and prints; returns the table as markdown."""
    if args.smooth < 1:
        stop(f"--smooth {args.smooth}: at least 1")
    marks = marks_of(args)
    if args.csv:
        write_results(args.csv, [line for run in args.runs for line in lines_of(run, args.metric)])
        return ""
    if args.runs[0].suffix == ".csv":
        draw_csv(args)
        return ""
    if len(args.metric) > 1 and (args.mark or args.title):
        stop(f"{'--mark' if args.mark else '--title'}: belongs to one metric, draw that alone")
    if args.reach:
        print(
            f"| | {' | '.join(f'{level:g}' for level in args.reach)} |",
            "|---" * (1 + len(args.reach)) + "|",
            sep="\n",
        )
        print(*(reach_of(run, args) for run in args.runs), sep="\n")
        return ""
    panels, lines = {}, []
    for metric in args.metric:
        found = [read(run, metric) for run in args.runs]
        found = [(arguments, points) for arguments, points in found if points]
        if not found:
            sys.exit(2)
        groups = grouped([(arguments, average(points, args.smooth)) for arguments, points in found])
        world = ", ".join(sorted({arguments["env"] for arguments, _ in found if "env" in arguments}))
        title = args.title or f"{world}: {metric}"
        if len(args.metric) > 1:
            title = metric
        panels[title] = {f"{label} ({len(curves)})": band(curves) for label, curves in groups.items()}
        lines += table_of(metric, groups)
    if args.out:
        draw(panels, "iterations", args.out, marks)
    if args.table or not args.out:
        print("\n".join(lines))
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Args, description=(__doc__ or "").split("\n")[0]))
    sys.exit(0)
