"""benchmarks/table1.py: every row runs, runs once, and lands in the document."""

import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import table1
import tables
from test_archer_offline_iql import tiny_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_quick_table(tmp_path):
    """All six rows for two seeds; a second call runs nothing and finds the same figures."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table1.START}\nold\n{table1.END}\nafter\n")
    command = [
        sys.executable,
        ROOT / "benchmarks/table1.py",
        "--quick",
        "--runs",
        tmp_path / "runs",
        "--out",
        page,
    ]
    command += [
        "--results",
        tmp_path / "runs.csv",
        f"--options=--actor {tiny_checkpoint(tmp_path / 'tiny')}",
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert first.returncode == 0, first.stderr[-2000:]
    runs = sorted((tmp_path / "runs").glob("*/*"))
    assert len(runs) == 12
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert second.stdout == first.stdout and sorted((tmp_path / "runs").glob("*/*")) == runs
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 1 + 12
    for path in (tmp_path / "runs").glob("*/*"):  # cells alone are enough
        shutil.rmtree(path)
    third = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert third.stdout == first.stdout and not list((tmp_path / "runs").glob("*/*"))
    text = page.read_text()
    assert text.startswith(f"before\n{table1.START}\n| method") and text.endswith(f"{table1.END}\nafter\n")
    for row in table1.TABLE:
        assert re.search(rf"^\| {re.escape(row)} \| -?\d+\.\d\d \(-?\d", text, re.M), row
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_page_without_marks_is_one_line(tmp_path, capfd):
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(SystemExit) as caught:
        table1.main(table1.Args(out=page, runs=tmp_path / "runs"))
    assert caught.value.code == 2 and len(capfd.readouterr().err.splitlines()) == 1
    assert page.read_text() == "nothing here" and not (tmp_path / "runs").exists()


def test_a_row_that_there_is_not_is_one_line(tmp_path, capfd):
    with pytest.raises(SystemExit):
        table1.main(table1.Args(rows=("BC", "PPO"), runs=tmp_path))
    (line,) = capfd.readouterr().err.splitlines()
    assert "--rows PPO" in line


def test_a_run_that_fails_is_one_line(tmp_path, capfd):
    with pytest.raises(SystemExit):
        table1.main(table1.Args(env="nowhere", quick=True, seeds=1, jobs=1, runs=tmp_path))
    (line,) = capfd.readouterr().err.splitlines()
    assert "IQL + AWR, seed 1" in line and "nowhere" in line


def test_an_interval_and_a_place_in_a_page(tmp_path, capfd):
    """Student's t for three values: 4.30 standard errors on each side.

    Marks in the wrong order are no place.
    """
    assert tables.interval([1.0, 2.0, 3.0]) == "2.0 ± 2.5"
    assert tables.interval([3.0, 1.0]) == "2.0 (3.0, 1.0)", "the interval of two says nothing"
    assert tables.interval([2.0], digits=2) == "2.00", "of one value there is none"
    page = tmp_path / "page.md"
    page.write_text("a <b> old </b> c")
    tables.insert("new", page, "<b>", "</b>")
    assert page.read_text() == "a <b>\nnew\n</b> c" and list(tmp_path.iterdir()) == [page]
    tables.check(3, 1, page, "<b>", "</b>")
    for seeds, jobs, marks in ((0, 1, ("<b>", "</b>")), (99, 1, ("<b>", "</b>")), (3, 1, ("</b>", "<b>"))):
        with pytest.raises(SystemExit):
            tables.check(seeds, jobs, page, *marks)
        assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_file_of_results_is_read_as_it_was_written(tmp_path):
    """Texts that look like numbers stay texts, and what a run has not is not there."""
    path = tmp_path / "results" / "runs.csv"
    runs = [
        {"method": "LOOP, (turn)", "seed": 1, "commit": "1234567", "score": 0.1 + 0.2, "curve x": [[1, 2.5]]}
    ]
    runs += [{"method": '"a"\nb', "seed": 2, "commit": "12e4567", "done": True}]
    tables.write_results(path, runs)
    assert tables.read_results(path) == runs and path.read_text().startswith(
        "method,seed,commit,score,curve x,done\n"
    )
    assert list(path.parent.iterdir()) == [path] and tables.read_results(tmp_path / "none.csv") == []


def test_a_bc_run_that_others_start_from_is_made_once(tmp_path, monkeypatch):
    """Also where BC itself is known or not wanted; and no option undoes what makes a row."""
    calls, lock = [], threading.Lock()

    def fake(command, **_):
        with lock:
            calls.append(command)
        run = Path(command[command.index("--runs") + 1]) / "run"
        (run / "actor").mkdir(parents=True)
        for name, told in {"args.json": {"iterations": 1}, "metrics.jsonl": {"iteration": 1}}.items():
            (run / name).write_text(json.dumps(told))
        (run / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "data/return": 0.0}))
        (run / "summary.json").write_text(json.dumps({"commit": "abc"}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(tables.subprocess, "run", fake)
    rows = ("IQL + REINFORCE", "IQL + REINFORCE + BC")
    table1.main(
        table1.Args(rows=rows, seeds=2, runs=tmp_path / "runs", options="--actor gpt2 --actor-lr 1e-5")
    )
    assert len(calls) == 6 and sum("--beta" in command for command in calls) == 2
    for command in (command for command in calls if "--actor-loss" in command and "reinforce" in command):
        parsed = dict(zip(command[2::2], command[3::2], strict=True))  # the last one counts
        assert parsed["--actor-lr"] == "1e-3" and parsed["--actor"].endswith("run/actor")
