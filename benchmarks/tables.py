"""What the tables over several seeds share: checks, an interval, a file of cells, a place between two marks,
curves."""

import json
import statistics
import sys
from pathlib import Path

COLOURS = ("#999999", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#000000")  # Okabe and Ito's
# Student's t, by seeds
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


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


def interval(values: list[float], digits: int = 1) -> str:
    """Mean and half width of the 95 % interval of the mean; of two values these,
    as their interval says nothing.

    >>> interval([1.0, 2.0, 3.0]), interval([3.0, 1.0]), interval([2.0], digits=2)
    ('2.0 ± 2.5', '2.0 (3.0, 1.0)', '2.00')
    """
    if len(values) <= 2:
        both = ", ".join(f"{value:.{digits}f}" for value in values)
        return f"{statistics.fmean(values):.{digits}f} ({both})" if len(values) == 2 else both
    half = T95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.{digits}f} ± {half:.{digits}f}"


def read_lines(path: Path | None) -> list[dict]:
    """The records of a file, a line each; none, if there is no file."""
    if not path or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, records: list[dict]) -> None:
    """The file is there in whole, old or new, at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    temporary.replace(path)


def insert(table: str, out: Path, start: str, end: str) -> None:
    """Puts the table between the document's two marks; the file is there in whole, old or new,
    at every moment."""
    text = out.read_text(encoding="utf-8")
    before, after = text.partition(start)[0], text.partition(end)[2]
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(f"{before}{start}\n{table}\n{end}{after}", encoding="utf-8")
    temporary.replace(out)


def drawing(panels: dict[str, dict[str, list[tuple[int, float]]]], unit: str, top: float = 0) -> str:
    """An SVG with a line for each row of each panel, points (x, y).

    `top` ends all y axes; 0: the largest y does.
    """
    width, height, gap = 300, 180, 50
    last = max(x for rows in panels.values() for points in rows.values() for x, _ in points)
    shapes = ['<rect width="100%" height="100%" fill="white"/>']
    for n, (title, rows) in enumerate(panels.items()):
        left, above = gap + n % 2 * (width + gap), gap + n // 2 * (height + gap)
        end = top or max(y for points in rows.values() for _, y in points) or 1
        shapes.append(
            f'<rect x="{left}" y="{above}" width="{width}" height="{height}" fill="none" stroke="black"/>'
        )
        shapes.append(f'<text x="{left}" y="{above - 6}">{title}</text>')
        shapes.append(f'<text x="{left - 4}" y="{above + 10}" text-anchor="end">{end:.3g}</text>')
        shapes.append(f'<text x="{left + width - 90}" y="{above + height + 14}">{last} {unit}</text>')
        for k, (row, points) in enumerate(rows.items()):
            at = [(left + width * x / last, above + height * (1 - y / end)) for x, y in points]
            line, colour = " ".join(f"{x:.1f},{y:.1f}" for x, y in at), COLOURS[k % len(COLOURS)]
            shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    below = gap + (len(panels) + 1) // 2 * (height + gap)
    for k, row in enumerate(next(iter(panels.values()))):  # the same in all panels
        at = f'x="{gap + 115 * k}" y="{below - 8}"'
        shapes.append(f'<text {at} fill="{COLOURS[k % len(COLOURS)]}">{row}</text>')
    size = f'width="{2 * (width + gap) + gap}" height="{below + 4}"'
    style = 'font-family="sans-serif" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *shapes, "</svg>\n"])
