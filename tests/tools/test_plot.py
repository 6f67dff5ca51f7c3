"""benchmarks/plot.py: which runs are one line, and what is drawn of them."""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import plot
import tables


def a_run(folder: Path, name: str, values: list[float], script: str = "archer", **arguments) -> Path:
    run = folder / f"world__{script}__{name}"
    run.mkdir()
    (run / "args.json").write_text(json.dumps({"env": "world", **arguments}))
    rows = [{"iteration": i, "rollout/return": value} for i, value in enumerate(values, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_line_is_what_differs_in_its_seed_alone(tmp_path):
    runs = [
        a_run(tmp_path, "1", [-3.0, -2.0], seed=1, kl=0.0),
        a_run(tmp_path, "2", [-5.0, -4.0, -1.0], seed=2, kl=0.0),
        a_run(tmp_path, "3", [-8.0], seed=1, kl=0.5),
    ]
    groups = plot.grouped([plot.read(run, "rollout/return") for run in runs])
    assert {label: len(curves) for label, curves in groups.items()} == {"kl 0.0": 2, "kl 0.5": 1}
    assert plot.band(groups["kl 0.0"]) == [(1, -4.0, -5.0, -3.0), (2, -3.0, -4.0, -2.0)], "as far as both go"
    table = plot.main(plot.Args(runs=runs, out=tmp_path / "a.svg", mark=["best=2.5"]))
    assert "| kl 0.0 | 2 | -4.00 (-3.00, -5.00) | -1.50 (-2.00, -1.00) |" in table
    text = "".join(ET.parse(tmp_path / "a.svg").getroot().itertext())
    assert "kl 0.5 (1)" in text and "best" in text and "world: rollout/return" in text
    before = (tmp_path / "a.svg").read_bytes()
    plot.main(plot.Args(runs=runs, out=tmp_path / "a.svg", mark=["best=2.5"]))
    assert (tmp_path / "a.svg").read_bytes() == before, "the same runs make the same file"


def test_runs_of_two_scripts_are_told_apart_by_the_script_and_not_by_its_arguments(tmp_path):
    runs = [
        a_run(tmp_path, "1", [-3.0], seed=1, kl=0.0),
        a_run(tmp_path, "1", [-5.0], script="ppo", seed=1, kl=0.5, clip=0.2),
        a_run(tmp_path, "2", [-4.0], script="ppo", seed=2, kl=0.5, clip=0.2),
    ]
    groups = plot.grouped([plot.read(run, "rollout/return") for run in runs])
    assert {label: len(curves) for label, curves in groups.items()} == {"archer": 1, "ppo": 2}
    runs.append(a_run(tmp_path, "3", [-4.0], script="ppo", seed=2, kl=0.5, clip=0.1))
    groups = plot.grouped([plot.read(run, "rollout/return") for run in runs])
    assert list(groups) == ["archer", "ppo, clip 0.2", "ppo, clip 0.1"], "archer has no clip"


def test_each_metric_has_a_picture_and_a_table_of_its_own(tmp_path):
    run = a_run(tmp_path, "1", [-3.0, -2.0], seed=1)
    rows = [
        {"iteration": 1, "rollout/return": -3.0},
        {"iteration": 2, "rollout/return": -2.0, "actor/kl": 0.5},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = plot.Args(runs=[run], metric=("rollout/return", "actor/kl"), out=tmp_path / "a.svg")
    table = plot.main(args).splitlines()
    assert table[0] == "| rollout/return | runs | first | last |" and "-3.00 | -2.00" in table[2]
    assert table[3] == "| actor/kl | runs | first | last |" and "0.50 | 0.50" in table[5]
    text = "".join(ET.parse(tmp_path / "a.svg").getroot().itertext())
    assert text.count("rollout/return") == 1 and text.count("actor/kl") == 1 and text.count("iterations") == 2


def test_the_metrics_of_runs_in_a_file(tmp_path):
    runs = [a_run(tmp_path, str(seed), [-3.0, -2.0 * seed], seed=seed) for seed in (1, 2)]
    with open(runs[1] / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": 3, "actor/kl": 0.5, "other": 1.0}) + "\n")
    args = plot.Args(runs=runs, metric=("rollout/return", "actor/kl"), csv=tmp_path / "a.csv")
    assert plot.main(args) == ""
    lines = plot.read_results(tmp_path / "a.csv")
    assert lines[1] == {"script": "archer", "env": "world", "seed": 1, "iteration": 2, "rollout/return": -2.0}
    assert lines[4] == {"script": "archer", "env": "world", "seed": 2, "iteration": 3, "actor/kl": 0.5}
    assert len(lines) == 5


def test_a_run_without_the_metric_is_left_out(tmp_path, capsys):
    """Of another script, for instance; the others are drawn."""
    first, second = (a_run(tmp_path, name, [1.0, 2.0]) for name in "12")
    text = (second / "metrics.jsonl").read_text().replace("rollout/return", "eval/return")
    (second / "metrics.jsonl").write_text(text)
    table = plot.main(plot.Args(runs=[first, second]))
    assert table.count("| 1 |") == 1 and "1.00 | 2.00" in table
    assert "2: no 'rollout/return' in its metrics; there are eval/return" in capsys.readouterr().err


def test_when_a_level_is_reached(tmp_path, capsys):
    """By the mean of three iterations, of 4 dialogues each and 4 before them; LOOP plays 2 tasks."""
    run = a_run(tmp_path, "1", [-9.0, -3.0, -6.0, -6.0, -3.0], seed=7, rollouts=4)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = [row | {"time/cpu_seconds": 1000.4 * row["iteration"]} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timed))
    args = plot.Args(runs=[run], smooth=3, reach=(-6.0, -5.0, -1.0))
    with pytest.raises(SystemExit):
        plot.main(args)
    assert "runs that have ended" in capsys.readouterr().err
    (run / "summary.json").write_text(json.dumps({"iteration": 5, "episodes": 24}))
    plot.main(args)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "| | -6 | -5 | -1 |",
        "|---|---|---|---|",
        "| archer, seed 7 | 16 / 3,001 | 20 / 4,002 | never |",
    ]
    about = json.loads((run / "args.json").read_text())
    (run / "args.json").write_text(json.dumps(about | {"tasks": 2}))
    (run / "summary.json").write_text(json.dumps({"iteration": 5, "episodes": 40}))
    plot.main(args)
    assert "| 24 / 3,001 | 32 / 4,002 |" in capsys.readouterr().out


def a_csv(folder: Path, methods: tuple[str, ...]) -> Path:
    """What compare.py writes, of a run each: returns -8, -6, -4 after 64, 128, 192 dialogues."""
    path = folder / "compare.csv"
    lines = ["method,seed,iteration,dialogues,cpu_seconds,return"]
    for name in methods:
        lines += [f'"{name}",1,{n},{64 * n},{10 * n},{2 * n - 10}' for n in (1, 2, 3)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_csv_is_averaged_over_dialogues(tmp_path):
    rows = plot.read_results(a_csv(tmp_path, ("PPO",)))
    assert [point[1] for point in plot.compared(rows, "dialogues", 128)] == [-8.0, -7.0, -5.0]
    assert [point[1] for point in plot.compared(rows, "dialogues", 1)] == [-8.0, -6.0, -4.0]
    assert [point[0] for point in plot.compared(rows, "cpu_seconds", 1)] == [10.0, 20.0, 30.0]
    assert [point[1] for point in plot.compared(rows[:1], "dialogues", 128)] == [-8.0], "a single iteration"


def test_a_method_has_one_colour_in_every_picture(tmp_path):
    def colours(methods: tuple[str, ...]) -> dict[str, str]:
        path = tmp_path / "a.svg"
        plot.main(plot.Args(runs=[a_csv(tmp_path, methods)], out=path, axes=("dialogues",)))
        text = path.read_text()
        assert "return by dialogues" in text and "CPU-seconds" not in text
        return {name: plot.COLOURS[plot.METHODS.index(name)] in text for name in plot.METHODS}

    assert [name for name, there in colours(("PPO", "CHAI")).items() if there] == ["PPO", "CHAI"]
    assert [name for name, there in colours(("CHAI", "ArCHer")).items() if there] == ["ArCHer", "CHAI"]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"runs": [Path("nowhere")]}, "nowhere: not the folder of a run"),
        ({"metric": ("x",)}, "no 'x' in its metrics; there are iteration, rollout/return"),
        ({"mark": ["best"]}, "--mark: write NAME=VALUE"),
        ({"metric": ("rollout/return", "x"), "mark": ["best=1"]}, "--mark: belongs to one metric"),
        ({"metric": ("rollout/return", "x"), "title": "T"}, "--title: belongs to one metric"),
        ({"smooth": 0}, "--smooth 0: at least 1"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, capsys, options, said):
    options = {"runs": [a_run(tmp_path, "1", [1.0])]} | options
    with pytest.raises(SystemExit) as stopped:
        plot.main(plot.Args(**options))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and len(error.splitlines()) == 1


def test_more_runs_of_one_kind_than_there_are_quantiles_is_one_line(capsys):
    tables.half_width([0.0, 1.0] * 10)
    with pytest.raises(SystemExit):
        tables.half_width([0.0, 1.0] * 11)
    assert capsys.readouterr().err.endswith("22 values of one kind: an interval is of at most 20\n")
