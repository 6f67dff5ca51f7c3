"""benchmarks/loop_table.py: every row runs, runs once, and lands in the document."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import loop_table
import tables
import test_loop_ppo

import envs

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_quick_table(tmp_path):
    """All rows for two seeds; a second call runs nothing and finds the same figures."""
    page, model = tmp_path / "page.md", tmp_path / "m"
    page.write_text(f"before\n{loop_table.START}\nold\n{loop_table.END}\nafter\n")
    test_loop_ppo.taught_model(envs.make("apps").demonstrations(40, 0), 32, 1, model)
    command = [
        sys.executable,
        ROOT / "benchmarks/loop_table.py",
        "--quick",
        "--runs",
        tmp_path / "runs",
        "--out",
        page,
    ]
    command += [f"--options=--model {model}"]
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert first.returncode == 0, first.stderr[-2000:]
    runs = sorted((tmp_path / "runs").glob("*/*"))
    assert len(runs) == 2 * len(loop_table.ROWS) + 1  # and the checkpoint's own
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert second.stdout == first.stdout and sorted((tmp_path / "runs").glob("*/*/*")) == sorted(
        path for run in runs for path in run.iterdir()
    )
    # What is known is not run.
    cells = tmp_path / "runs.csv"
    subprocess.run([*command, "--results", cells], capture_output=True, check=True, timeout=60)
    shutil.rmtree(tmp_path / "runs")
    third = subprocess.run(
        [*command, "--results", cells], capture_output=True, text=True, check=False, timeout=60
    )
    assert third.stdout == first.stdout and not (tmp_path / "runs").exists()
    assert len(cells.read_text().splitlines()) == 1 + 2 * len(loop_table.ROWS)

    text = page.read_text()
    assert text.startswith(f"before\n{loop_table.START}\n| method") and text.endswith(
        f"{loop_table.END}\nafter\n"
    )
    for row in loop_table.ROWS:
        assert re.search(rf"^\| {re.escape(row)} \| \d+\.\d \(\d", text, re.M), row
    assert "| warm start |" in text and "66.4 / 47.5 / 41.7 / 24.4" in text


def test_a_cell_that_was_interrupted_is_no_result(tmp_path, monkeypatch):
    """The script ends with a summary then, too, and with exit code 0."""
    args = loop_table.Args(runs=tmp_path / "runs", iterations=8)
    folder = loop_table.group(args) / "RLOO_1" / "apps__loop_ppo__1__now"
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt").touch()
    asked = []

    def ends_at(iteration):
        def run(what, script, *options):
            asked.append(options)
            assert not (folder / "summary.json").exists(), "an old summary is not that of this run"
            (folder / "metrics.jsonl").write_text(json.dumps({"iteration": iteration}) + "\n")
            (folder / "summary.json").write_text(json.dumps({"episodes": iteration}))

        return run

    monkeypatch.setattr(loop_table, "launch", ends_at(5))
    with pytest.raises(RuntimeError, match="goes on"):
        loop_table.run_cell(args, "RLOO", 1)
    monkeypatch.setattr(loop_table, "launch", ends_at(8))
    assert loop_table.run_cell(args, "RLOO", 1) == folder
    assert [options[:2] for options in asked] == 2 * [("--resume", folder)]
    assert loop_table.run_cell(args, "RLOO", 1) == folder and len(asked) == 2, "once is enough"


def test_a_run_that_was_killed_before_its_first_checkpoint_is_left_aside(tmp_path, monkeypatch):
    """It has begun its metrics; the cell is then run anew, beside it, and the new run counts."""
    args = loop_table.Args(seeds=1, iterations=2, jobs=1, runs=tmp_path / "runs")
    monkeypatch.setattr(loop_table, "ROWS", {row: loop_table.ROWS[row] for row in ("RLOO", "LOOP (token)")})
    figures = dict.fromkeys(loop_table.COLUMNS.values(), 0.5)
    start = {re.sub("(test_[a-z]+_)", r"\1warm_start_", key): 0.25 for key in figures}
    monkeypatch.setattr(loop_table, "warm_start", lambda args: start)
    killed = loop_table.group(args) / "RLOO_1" / "killed"
    killed.mkdir(parents=True)
    (killed / "metrics.jsonl").write_text(json.dumps({"iteration": 0}) + "\n")

    def launch(what, script, *options):
        new = options[options.index("--runs") + 1] / "new"
        new.mkdir(parents=True)
        (new / "metrics.jsonl").write_text(json.dumps({"iteration": 2}) + "\n")
        (new / "summary.json").write_text(json.dumps(figures))

    monkeypatch.setattr(loop_table, "launch", launch)
    assert "| RLOO | 50.0 |" in loop_table.main(args)


def test_a_page_without_marks_is_one_line(tmp_path, capfd):
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(SystemExit) as caught:
        loop_table.main(loop_table.Args(out=page, runs=tmp_path / "runs"))
    assert caught.value.code == 2 and len(capfd.readouterr().err.splitlines()) == 1
    assert page.read_text() == "nothing here" and not (tmp_path / "runs").exists()


def test_the_curves_are_means_over_the_seeds(tmp_path, monkeypatch):
    """Drawn from cells that are known; a run of quarters has the same axis as the others."""
    figures = dict.fromkeys(loop_table.COLUMNS.values(), 0.5)
    figures |= {re.sub("(test_[a-z]+_)", r"\1warm_start_", key): 0.25 for key in figures}
    about, known, drawn = {"group": "apps", "iterations": 2}, tmp_path / "runs.csv", {}
    runs = [
        about
        | {"method": row, "seed": seed}
        | figures
        | {f"curve {tag}": [0.0, 100.0 * seed] for tag in loop_table.CURVES}
        for row in loop_table.ROWS
        for seed in (1, 2)
    ]
    tables.write_results(known, runs)
    monkeypatch.setattr(loop_table, "draw", lambda panels, unit, out: drawn.update(panels))
    args = loop_table.Args(
        seeds=2, iterations=2, results=known, curves=tmp_path / "c.svg", runs=tmp_path / "runs"
    )
    assert "| RLOO | 50.0 (50.0, 50.0) |" in loop_table.main(args) and not args.runs.exists()
    assert list(drawn) == [f"{title}, %" for title in loop_table.CURVES.values()]
    for rows in drawn.values():
        assert rows["LOOP (token)"] == [(1, 0.0), (2, 150.0)]
        assert rows["RLOO, as many steps"] == [(0.375, 0.0), (0.75, 150.0)]
