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
    """All rows: two rates are tried, then one seed runs; a second call runs nothing and finds the same."""
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
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert first.returncode == 0, first.stderr[-2000:]
    runs = sorted((tmp_path / "runs").glob("*/*"))
    assert len(runs) == 3 * len(loop_table.ROWS) + 1  # and the checkpoint's own
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
    assert len(cells.read_text().splitlines()) == 1 + 3 * len(loop_table.ROWS)

    text = page.read_text()
    assert text.startswith(f"before\n{loop_table.START}\n| method") and text.endswith(
        f"{loop_table.END}\nafter\n"
    )
    for row in loop_table.ROWS:
        assert re.search(rf"^\| {re.escape(row)} \| 0\.000[12] \| \d+\.\d \|", text, re.M), row
    assert "| warm start |" in text and "66.4 / 47.5 / 41.7 / 24.4" in text


def test_differences_are_paired_by_seed():
    """Seeds that differ by 1, 2, 3 points and as many times 96 rollouts; a row that never gets there."""
    assert loop_table.interval([1.0, 2.0, 3.0]) == "2.0 ± 2.5"

    def result(success: float, curve: list[float]) -> dict:
        keys = ("test_normal_success", "test_normal_success_greedy")
        return dict.fromkeys(keys, success) | {"curve rollout/success": curve, "episodes": 96 * len(curve)}

    late = [[0.0] * (3 - n) + [100.0] * (5 + n) for n in range(3)]
    found = {
        "LOOP (token)": [result(0.5, [100.0] * 8) for _ in range(3)],
        "GRPO": [result(0.5 - 0.01 * (3 - n), curve) for n, curve in enumerate(late)],
        "RLOO": [result(0.5, [0.0] * 8) for _ in range(3)],
    }
    lines = loop_table.paired_table(found)
    area = loop_table.interval([37.5, 25.0, 12.5])
    assert lines[2] == f"| GRPO | 2.0 ± 2.5 | 2.0 ± 2.5 | {area} | -192 ± 238 |"
    assert lines[3] == "| RLOO | 0.0 ± 0.0 | 0.0 ± 0.0 | 100.0 ± 0.0 | - |"


def test_a_cell_that_was_interrupted_is_no_result(tmp_path, monkeypatch):
    """The script ends with a summary then, too, and with exit code 0."""
    args = loop_table.Args(runs=tmp_path / "runs", iterations=8)
    folder = loop_table.group(args) / "RLOO_rate_0_0002_seed_1" / "apps__loop_ppo__1__now"
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
        loop_table.run_cell(args, "RLOO", 1, 2e-4)
    monkeypatch.setattr(loop_table, "launch", ends_at(8))
    assert loop_table.run_cell(args, "RLOO", 1, 2e-4) == folder
    assert [options[:2] for options in asked] == 2 * [("--resume", folder)]
    assert loop_table.run_cell(args, "RLOO", 1, 2e-4) == folder and len(asked) == 2, "once is enough"


def test_a_run_that_was_killed_before_its_first_checkpoint_is_left_aside(tmp_path, monkeypatch):
    """It has begun its metrics; the cell is then run anew, beside it, and the new run counts."""
    args = loop_table.Args(seeds=1, rates=[2e-4], iterations=2, jobs=1, runs=tmp_path / "runs")
    monkeypatch.setattr(loop_table, "ROWS", {row: loop_table.ROWS[row] for row in ("RLOO", "LOOP (token)")})
    figures = dict.fromkeys([*loop_table.COLUMNS.values(), "cpu_seconds"], 0.5)
    start = {re.sub("(test_[a-z]+_)", r"\1warm_start_", key): 0.25 for key in loop_table.COLUMNS.values()}
    monkeypatch.setattr(loop_table, "warm_start", lambda args: start)
    killed = loop_table.group(args) / "RLOO_rate_0_0002_seed_1" / "killed"
    killed.mkdir(parents=True)
    (killed / "metrics.jsonl").write_text(json.dumps({"iteration": 0}) + "\n")

    def launch(what, script, *options):
        new = options[options.index("--runs") + 1] / "new"
        new.mkdir(parents=True)
        (new / "metrics.jsonl").write_text(json.dumps({"iteration": 2}) + "\n")
        (new / "summary.json").write_text(json.dumps(figures))

    monkeypatch.setattr(loop_table, "launch", launch)
    assert "| RLOO | 0.0002 | 50.0 |" in loop_table.main(args)


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
    about = {"group": "apps", "iterations": 2, "rate": 2e-4, "cpu_seconds": 9.0, "episodes": 192}
    known, drawn = tmp_path / "runs.csv", {}
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
        seeds=2,
        rates=[2e-4],
        iterations=2,
        results=known,
        curves=tmp_path / "c.svg",
        runs=tmp_path / "runs",
    )
    assert "| RLOO | 0.0002 | 50.0 (50.0, 50.0) |" in loop_table.main(args) and not args.runs.exists()
    assert list(drawn) == [f"{title}, %" for title in loop_table.CURVES.values()]
    for rows in drawn.values():
        assert rows["LOOP (token)"] == [(1, 0.0), (2, 150.0)]
        assert rows["RLOO, as many steps"] == [(0.375, 0.0), (0.75, 150.0)]


# ------------------------------------------------------------------------- rates, rollouts, levels


def test_rollouts_until_a_threshold():
    curve = [50.0, 90.0, 55.0, 94.0, 94.0, 10.0]
    result = {"curve rollout/success": curve, "episodes": 6 * 96}
    assert loop_table.rollouts_to(result, 80.0, window=1) == 2 * 96
    assert loop_table.rollouts_to(result, 80.0) == 5 * 96, "one lucky iteration is not enough"
    assert loop_table.rollouts_to(result, 82.0) is None
    assert loop_table.rollouts_to(result, 0.0) == 3 * 96, "the mean of three is known after three"
    assert loop_table.rollouts_to({"diverged": True}) is None
    assert loop_table.rollouts_to({"curve rollout/success": [90.0], "episodes": 96}) is None


def test_the_threshold_is_over_as_many_rollouts_in_every_row():
    """Eight iterations of 6 tasks are three of 16; three of 6 would be lucky sooner."""
    small = {"curve rollout/success": [100.0] * 4 + [60.0] * 4, "episodes": 8 * 36}
    assert loop_table.reach("RLOO, as many steps", [small]) == "288"
    assert loop_table.reach("RLOO", [small]) == "108"
    never = {"curve rollout/success": [70.0] * 8, "episodes": 8 * 36}
    assert loop_table.reach("RLOO", [never, never]) == "never"
    assert loop_table.reach("RLOO", [small, never]) == "108 (1 of 2)"


def test_the_area_weighs_every_rollout_alike():
    """Of rows that play as many rollouts, in iterations of 96 or of 36."""
    large = {"curve rollout/success": [10.0] * 3 + [90.0] * 3}
    small = {"curve rollout/success": [10.0] * 8 + [90.0] * 8}
    assert loop_table.area(large) == loop_table.area(small) == 50.0


def fake_runs(monkeypatch, success, spread=0.5):
    """Cells that are done at once, with a success that is always the same; returns what was asked for."""
    asked = []

    def warm_start(args):
        keys = loop_table.COLUMNS.values()
        return {re.sub("(test_[a-z]+_)", r"\1warm_start_", key): 0.25 for key in keys}

    def launch(what, script, *options):
        row, rate, seed = re.fullmatch(r"(.*), rate (.*), seed (.*)", what).groups()
        asked.append((row, int(seed), float(rate)))
        assert options[-2:] == ("--lr", float(rate))
        solved = success(*asked[-1])
        if solved is None:
            raise RuntimeError(f"{what}: loop_ppo.py: the model diverged (gradient nan): lower --lr")
        folder = options[options.index("--runs") + 1] / "run"
        folder.mkdir(parents=True)
        iterations = options[options.index("--iterations") + 1]
        line = {"rollout/success": solved, "update/spread": spread, "update/ratio": 1 + float(rate)}
        lines = [{"iteration": i, "update/clipped": 0.1} | line for i in range(iterations + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        figures = dict.fromkeys(loop_table.COLUMNS.values(), 1 - solved)  # what must not choose the rate
        figures |= {"cpu_seconds": 150.0, "episodes": 96 * iterations}
        (folder / "summary.json").write_text(json.dumps(figures))

    monkeypatch.setattr(loop_table, "warm_start", warm_start)
    monkeypatch.setattr(loop_table, "launch", launch)
    return asked


def few_rows(monkeypatch):
    monkeypatch.setattr(loop_table, "ROWS", {row: loop_table.ROWS[row] for row in ("RLOO", "LOOP (token)")})


def test_each_row_has_its_own_best_rate_by_the_area_of_a_seed_that_is_not_reported(tmp_path, monkeypatch):
    few_rows(monkeypatch)
    best = {"RLOO": 8e-4, "LOOP (token)": 2e-4}
    asked = fake_runs(monkeypatch, lambda row, seed, rate: 0.875 if rate == best[row] else 0.5)
    args = loop_table.Args(
        seeds=3, iterations=4, jobs=1, runs=tmp_path / "runs", results=tmp_path / "runs.csv"
    )
    table = loop_table.main(args)
    tuned, reported = asked[:8], asked[8:]
    assert {seed for _, seed, _ in tuned} == {loop_table.TUNING_SEED}
    assert sorted({rate for _, _, rate in tuned}) == [1e-4, 2e-4, 4e-4, 8e-4] and len(set(tuned)) == 8
    assert sorted(reported) == sorted((row, seed, best[row]) for row in best for seed in (1, 2, 3))
    assert "| RLOO | 0.0008 | 12.5 ± 0.0 |" in table and "| LOOP (token) | 0.0002 | 12.5 ± 0.0 |" in table
    assert table.count("| 87.5 ± 0.0 | 288 ± 0 | 150 ± 0 |") == 2

    kept = tables.read_results(args.results)
    assert len(kept) == 14 and [run["rate"] for run in kept if run["method"] == "RLOO"].count(8e-4) == 4
    assert all(run["tuning"] == (run["seed"] == loop_table.TUNING_SEED) for run in kept)
    for results in (args.results, None):  # by the file, and by the folders of the runs
        assert loop_table.main(loop_table.Args(**vars(args) | {"results": results})) == table
    assert len(asked) == 14


def test_what_is_missing_is_run_and_no_more(tmp_path, monkeypatch):
    """Another rate is another tuning run; another best rate means that the reported seeds run with it."""
    few_rows(monkeypatch)
    asked = fake_runs(monkeypatch, lambda row, seed, rate: 1000 * rate)
    args = loop_table.Args(seeds=1, rates=[1e-4, 2e-4], iterations=2, jobs=1, runs=tmp_path / "runs")
    loop_table.main(args)
    del asked[:]
    loop_table.main(loop_table.Args(**vars(args) | {"rates": [1e-4, 2e-4, 4e-4]}))
    wanted = [(row, seed, 4e-4) for seed in (loop_table.TUNING_SEED, 1) for row in ("RLOO", "LOOP (token)")]
    assert asked == wanted


def test_one_rate_needs_no_choice_and_one_that_diverges_is_not_chosen(tmp_path, monkeypatch, capfd):
    few_rows(monkeypatch)
    asked = fake_runs(monkeypatch, lambda row, seed, rate: None if rate == 8e-4 else 0.5)
    args = loop_table.Args(seeds=1, rates=[2e-4], iterations=2, jobs=1, runs=tmp_path / "runs")
    loop_table.main(args)
    assert {seed for _, seed, _ in asked} == {1}
    table = loop_table.main(loop_table.Args(**vars(args) | {"rates": [8e-4, 4e-4]}))
    assert "| RLOO | 0.0004 | 50.0 |" in table and "| never |" in table
    with pytest.raises(SystemExit):
        loop_table.main(loop_table.Args(**vars(args) | {"rates": [8e-4]}))
    error = capfd.readouterr().err
    assert "RLOO, seed 1: diverged" in error and len(error.splitlines()) == 1


def test_the_table_of_levels(tmp_path, monkeypatch):
    """Its own marks and its own rates; a row says how many of its runs diverged."""

    def success(row, seed, rate):
        lost = row == "trajectory, 8 epochs" or (row == "turn, 8 epochs" and seed == 2)
        return None if lost else 0.75

    asked = fake_runs(monkeypatch, success, spread=0.0625)
    page = tmp_path / "page.md"
    page.write_text(f"{loop_table.LEVELS_START}{loop_table.LEVELS_END}")
    args = loop_table.Args(levels=True, seeds=2, iterations=2, jobs=1, runs=tmp_path / "runs", out=page)
    table = loop_table.main(args)
    assert table in page.read_text() and len(asked) == 2 * 9
    assert not {seed for _, seed, _ in asked} - {1, 2}, "nothing is tuned"
    same = "25.0 (25.0, 25.0) | 25.0 (25.0, 25.0) | 75.0 (75.0, 75.0) | 0.062 (0.062, 0.062) | 1"
    assert f"| token, 4 epochs | 0.0004 | {same} | 10.0 (10.0, 10.0) | 150 (150, 150) |" in table
    assert (
        "| turn, 8 epochs (1 of 2 diverged) | 0.0008 | 25.0 | 25.0 | 75.0 | 0.062 | 1 | 10.0 | 150 |" in table
    )
    assert "| trajectory, 8 epochs (2 of 2 diverged) | 0.0008 | | | | | | | |" in table
    widths = {line.count("|") for line in table.splitlines()}
    assert len(widths) == 1


def test_every_line_of_the_main_table_has_all_columns():
    figures = dict.fromkeys([*loop_table.COLUMNS.values(), "cpu_seconds"], 0.5)
    figures |= {re.sub("(test_[a-z]+_)", r"\1warm_start_", key): 0.25 for key in loop_table.COLUMNS.values()}
    found = {row: [figures] for row in loop_table.ROWS}
    lines = loop_table.main_table(dict.fromkeys(found, 1e-4), found)
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == len(found) + 4
