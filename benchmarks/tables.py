"""What the tables over several seeds share: checks, runs and the CSV of their results, an interval, a place
between two marks, curves."""

import csv
import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")  # Okabe and Ito's
# Student's t, by seeds
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
T95 |= {11: 2.23, 12: 2.20, 13: 2.18, 14: 2.16, 15: 2.14, 16: 2.13, 17: 2.12, 18: 2.11, 19: 2.10, 20: 2.09}


def stop(message: str):
    """Ends the program for bad input: one line that says what is wrong and what to do, exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


def check(seeds: int, jobs: int, out: Path | None, start: str, end: str) -> None:
    """Stops for what no table can be made with: better before the runs than after them."""
    if seeds < 1 or jobs < 1:
        stop("--seeds and --jobs must be at least 1")
    if seeds > max(T95):
        stop(f"--seeds {seeds}: at most {max(T95)}")
    text = out.read_text(encoding="utf-8") if out and out.exists() else ""
    if out and not 0 <= text.find(start) < text.find(end):
        stop(f"--out {out}: no {start} in it; the table goes between {start} and {end}")


def half_width(values: list[float]) -> float:
    """Half the width of the 95 % interval of the mean; of two values half their distance, of one 0.

    >>> round(half_width([1.0, 2.0, 3.0]), 2), half_width([3.0, 1.0]), half_width([2.0])
    (2.48, 1.0, 0.0)
    """
    if len(values) <= 2:
        return (max(values) - min(values)) / 2
    if len(values) > max(T95):
        stop(f"{len(values)} values of one kind: an interval is of at most {max(T95)}")
    return T95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def interval(values: list[float], digits: int = 1) -> str:
    """Mean and half width of the 95 % interval of the mean; of two values these,
    as their interval says nothing; "-" where a value is missing, which is nan.

    >>> interval([1.0, 2.0, 3.0]), interval([3.0, 1.0]), interval([2.0], digits=2), interval([float("nan")])
    ('2.0 ± 2.5', '2.0 (3.0, 1.0)', '2.00', '-')
    """
    if any(map(math.isnan, values)):
        return "-"
    if len(values) <= 2:
        both = ", ".join(f"{value:.{digits}f}" for value in values)
        return f"{statistics.fmean(values):.{digits}f} ({both})" if len(values) == 2 else both
    return f"{statistics.fmean(values):.{digits}f} ± {half_width(values):.{digits}f}"


def read_lines(path: Path | None) -> list[dict]:
    """The records of a file, a line each; none, if there is no file."""
    if not path or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def parsed(text: str):
    """A value of a CSV: JSON, or else plain text.

    >>> parsed("0.5"), parsed("[1, 2]"), parsed("LOOP (turn)"), parsed('"1234567"')
    (0.5, [1, 2], 'LOOP (turn)', '1234567')
    """
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_results(path: Path | None) -> list[dict]:
    """The runs of a CSV, a line each; none, if there is no file. What a run does not have is left out."""
    if not path or not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [{name: parsed(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def write_results(path: Path, runs: list[dict]) -> None:
    """A line a run, a column a figure. The file is there in whole, old or new, at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, dict.fromkeys(name for run in runs for name in run), lineterminator="\n"
        )
        writer.writeheader()
        for run in runs:  # a text stays as it is, unless it would be read as a number
            plain = {name for name, value in run.items() if isinstance(value, str) and parsed(value) == value}
            writer.writerow({name: v if name in plain else json.dumps(v) for name, v in run.items()})
    temporary.replace(path)


def run_missing(
    key: tuple[str, ...], wanted: Iterable[tuple], run: Callable[..., dict], path: Path | None, jobs: int
) -> dict[tuple, dict]:
    """Results by `key`, columns of the CSV at `path`. `run(*cell)` makes those that are wanted and not there.

    Each joins the file as soon as it is made. The first that fails ends the program with its message.
    """
    results, lock = read_results(path), threading.Lock()
    found = {tuple(result.get(name) for name in key): result for result in results}

    def run_and_keep(cell: tuple) -> None:
        result = dict(zip(key, cell, strict=True)) | run(*cell)
        with lock:
            found[cell] = result
            results.append(result)
            if path:
                write_results(path, results)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(run_and_keep, [cell for cell in wanted if cell not in found]))
        except (RuntimeError, OSError) as error:
            pool.shutdown(cancel_futures=True)
            stop(str(error))
    return found


def launch(what: str, script: Path, *options) -> None:
    """Runs a script to its end. A failure is told by the script's last line."""
    command = [sys.executable, str(script), *map(str, options)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{what}: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")


def insert(table: str, out: Path, start: str, end: str) -> None:
    """Puts the table between the document's two marks; the file is there in whole, old or new,
    at every moment."""
    text = out.read_text(encoding="utf-8")
    before, after = text.partition(start)[0], text.partition(end)[2]
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(f"{before}{start}\n{table}\n{end}{after}", encoding="utf-8")
    temporary.replace(out)


def draw(
    panels: dict,
    unit: str,
    out: Path,
    marks: dict[str, float] | None = None,
    colours: dict[str, str] | None = None,
) -> None:
    """Writes an SVG with a panel for each title and a line for each row: points (x, y) or (x, y, low, high).

    Between low and high is shaded. `marks` are level lines in all panels: name -> y. `colours` has the rows'
    that are to have the same everywhere. There is no background, and greys that can be read on light and
    dark pages.
    """
    import matplotlib.pyplot as plt

    grey = "#808080"
    greys = dict.fromkeys(
        ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], grey
    )
    plt.rcParams.update(greys | {"svg.fonttype": "none", "svg.hashsalt": "turnrl", "font.size": 9})
    columns = min(2, len(panels))
    rows_of_panels = -(-len(panels) // columns)
    size = (4.5 * columns + (3 if marks else 0.5), 3 * rows_of_panels + 0.3)
    figure, axes = plt.subplots(rows_of_panels, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, rows) in zip(axes.flat, panels.items(), strict=False):
        axis.set_title(title, loc="left")
        axis.set_xlabel(unit)
        axis.spines[["top", "right"]].set_visible(False)
        for (row, points), colour in zip(rows.items(), itertools.cycle(COLOURS)):
            colour = (colours or {}).get(row, colour)
            x, y, *edges = zip(*points, strict=True)
            axis.plot(x, y, color=colour, label=row)
            if edges:
                axis.fill_between(x, *edges, color=colour, alpha=0.25, linewidth=0)
        for name, level in (marks or {}).items():
            axis.axhline(level, color=grey, linestyle="--", linewidth=1)
            axis.annotate(name, (1.01, level), xycoords=("axes fraction", "data"), va="center")
    lines, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(len(names), 5), frameon=False)
    temporary = out.with_name(out.name + ".tmp")
    figure.savefig(temporary, format="svg", transparent=True, metadata={"Date": None})
    temporary.replace(out)
    plt.close(figure)
