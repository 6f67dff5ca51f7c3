"""benchmarks/lge.py: every method runs, runs once, goes on where it was killed, and lands in the document."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fake_scienceworld
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import lge
import lge_bc

import envs
import lge_drrn

ROOT = Path(__file__).parents[2]
PROBLEM = envs.missing("scienceworld")
PAPER = ROOT.parent / "shared/papers/lge.txt"


@pytest.mark.slow
@pytest.mark.external
@pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")
def test_the_quick_table(tmp_path):
    """All methods; a second call runs nothing, a third goes on with one that seems to have been killed."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{lge.START}\nold\n{lge.END}\nafter\n")
    command = [sys.executable, ROOT / "benchmarks/lge.py", "--quick", "--tasks", "T12"]
    command += ["--guide", "none", "--runs", tmp_path / "runs", "--out", page]
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert first.returncode == 0, first.stderr[-2000:]
    assert first.stderr.count(": done") == len(lge.ROWS)
    (group,) = (tmp_path / "runs").iterdir()
    rows = (group / "curves.csv").read_text().splitlines()
    assert len(rows) == 1 + (len(lge.ROWS) - 1) * 2 * 3 + 2  # twice dev, test and training; of BC once two
    assert all(f">{row}<" in (group / "curves.svg").read_text() for row in lge.ROWS)  # its legend
    text = page.read_text()
    assert text.startswith(f"before\n{lge.START}\n| task |") and text.endswith(f"{lge.END}\nafter\n")
    assert re.search(r"^\| T12 \|( -?\d+\.\d \|){8} 26 \| 56 \| 18 \| 29 \|$", text, re.M)

    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (second.stdout, second.stderr) == (first.stdout, "")
    (run,) = (group / "T12_DRRN_1").iterdir()
    (run / "summary.json").unlink()
    third = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert third.stdout == first.stdout and third.stderr.count(": done") == 1
    assert list((group / "T12_DRRN_1").iterdir()) == [run] and (run / "summary.json").exists()


def run_of(folder: Path, steps: int, scores: list[float], done: int | None = None) -> None:
    """What a finished run leaves behind, as far as the table reads it."""
    folder.mkdir(parents=True)
    each = steps // len(scores)
    rows = [
        {"iteration": each * (i + 1), "eval/test_score": s, "eval/dev_score": 0.0}
        for i, s in enumerate(scores)
    ]
    rows += [{"iteration": steps, "rollout/score": scores[-1] / 2}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "args.json").write_text(json.dumps({"steps": steps}))
    summary = {"steps": done or steps, "eval_test_score": scores[-1], "eval_dev_score": 0.0}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.external
@pytest.mark.skipif(not PAPER.exists(), reason=f"no text at {PAPER}")
def test_the_papers_columns_are_its_table_3():
    """A line of it: task, DRRN, BC, TDT, LGE increasing, LGE fixed, the best difference."""
    found = {}
    for line in PAPER.read_text(encoding="utf-8").splitlines():
        if re.match(r"T\d+ [\d.]+ ", line):
            task, drrn, cloned, _, increasing, fixed, _ = line.split()
            found[task] = pytest.approx([100 * float(x) for x in (drrn, fixed, increasing, cloned)])
    assert found == {task: list(row) for task, row in lge.PAPER.items()} and len(found) == 30
    above = [(fixed > drrn, increasing > drrn) for drrn, fixed, increasing, _ in lge.PAPER.values()]
    assert [sum(column) for column in zip(*above, strict=True)] == [16, 15]  # docs/lge_drrn.md
    assert sum(map(any, above)) == 21


def test_a_line_a_run_has_the_training_score_of_each_quarter():
    training = [(10, 1.0), (25, 3.0), (26, 10.0), (50, 20.0), (100, 7.0)]
    run = {"steps": 100, "eval_test_score": 5.0, "curve training": training, "curve q": [(100, 1.6)]}
    *_, line = lge.each({("T12", "DRRN", 3): run}).splitlines()
    assert line == "| T12 | DRRN | 3 | 5.0 | nan | 2, 15, 7 | 2 |  |"


def test_the_table_from_runs(tmp_path, capfd):
    """Means over seeds and tasks, from runs that are all there."""
    figures = {
        "T12": {"DRRN": (10, 20, 30), "LGE fixed": (50, 60, 70)},
        "T20": {"DRRN": (0, 0, 0), "LGE fixed": (8, 8, 8)},
    }
    for task, rows in figures.items():
        for row, scores in rows.items():
            for seed, score in enumerate(scores, 1):
                folder = tmp_path / "default" / re.sub(r"\W+", "_", f"{task} {row} {seed}") / "run"
                run_of(folder, 40, [0.0, float(score)])
    options = {"tasks": ("T12", "T20"), "methods": ("DRRN", "LGE fixed"), "guide": "none", "runs": tmp_path}
    lines = lge.main(lge.Args(**options)).splitlines()
    assert lines[2:] == [
        "| T12 | 20.0 ± 24.8 | 60.0 ± 24.8 | 40.0 ± 0.0 | 26 | 56 | 18 | 29 |",
        "| T20 | 0.0 ± 0.0 | 8.0 ± 0.0 | 8.0 ± 0.0 | 48 | 89 | 55 | 26 |",
        "| mean | 10.0 ± 12.4 | 34.0 ± 12.4 | 24.0 ± 0.0 | 37.0 | 72.5 | 36.5 | 27.5 |",
    ]

    in_training = lge.main(lge.Args(**options, split="training")).splitlines()
    assert in_training[2] == "| T12 | 10.0 ± 12.4 | 30.0 ± 12.4 | 20.0 ± 0.0 | 26 | 56 | 18 | 29 |"
    # What is known is not run: the folder of a cell may be gone.
    cells = tmp_path / "runs.csv"
    lge.main(lge.Args(**options, results=cells))
    assert len(cells.read_text().splitlines()) == 1 + 12
    cells.write_text(
        "".join(line + "\n" for line in cells.read_text().splitlines() if "T12,DRRN,1," not in line)
    )
    for folder in (tmp_path / "default").glob("*/"):
        if folder.name != "T12_DRRN_1":
            shutil.rmtree(folder)
    assert lge.main(lge.Args(**options, results=cells)).splitlines() == lines
    assert len(cells.read_text().splitlines()) == 1 + 12 and not cells.with_name("runs.csv.tmp").exists()
    assert "T12,LGE fixed,3,test,40,70.0" in (tmp_path / "default/curves.csv").read_text().splitlines()
    shutil.rmtree(tmp_path / "default/T12_DRRN_1")
    run_of(tmp_path / "default/T12_DRRN_1/run", 40, [5.0], done=20)
    assert lge.finished(tmp_path / "default/T12_DRRN_1") is None, "it was interrupted"


def test_the_area_in_the_school(tmp_path, capfd):
    """Its runs lie apart from ScienceWorld's, and have none of the paper's columns beside them."""
    for row, areas in {"DRRN": (10, 20, 30), "LGE fixed": (20, 32, 38)}.items():
        for seed, area in enumerate(areas, 1):
            name = re.sub(r"\W+", "_", f"find-plant {row} {seed}")
            folder = tmp_path / ("school__default__x" if "LGE" in row else "school__default") / name / "run"
            run_of(folder, 40, [0.0, 50.0])
            if seed == 1:  # no episode has ended in its first line
                first, *rest = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
                first = first.replace("rollout/score", "rollout/other")
                (folder / "metrics.jsonl").write_text(first + "".join(rest))
            summary = json.loads((folder / "summary.json").read_text())
            summary |= {"area": float(area), "first_success": area}
            (folder / "summary.json").write_text(json.dumps(summary))
    options = {"env": "school", "tasks": ("find-plant",), "methods": ("DRRN", "LGE fixed"), "runs": tmp_path}
    lines = lge.main(lge.Args(**options, guide="guides/x", split="area")).splitlines()
    assert lines == [
        "| task | DRRN | LGE fixed | gain of fixed |",
        "| --- | ---: | ---: | ---: |",
        "| find-plant | 20.0 ± 24.8 | 30.0 ± 22.8 | 10.0 ± 5.0 |",
    ]
    page = tmp_path / "page.md"
    area, first = (lge.marks(lge.Args(env="school", split=split)) for split in ("area", "first_success"))
    page.write_text("\n".join([*area, *first]))
    options |= {"out": page}
    lines = lge.main(lge.Args(**options, guide="guides/x", split="first_success")).splitlines()
    assert lines[0] == "| task | DRRN | LGE fixed | difference of fixed |"
    assert page.read_text().splitlines() == [*area, first[0], *lines, first[1]], "the other stays as it is"
    assert lines[2] == "| find-plant | 20.0 ± 24.8 | 30.0 ± 22.8 | 10.0 ± 5.0 |"
    curves = (tmp_path / "school__default__x/curves.csv").read_text().splitlines()
    assert "find-plant,DRRN,2,training,40,25.0" in curves


def test_a_run_is_told_its_world(tmp_path, monkeypatch):
    """The script's own default is the school."""
    told = []
    monkeypatch.setattr(lge, "launch", lambda title, *words: told.append(words[1:]))
    monkeypatch.setattr(lge, "finished", lambda folder: folder if told else None)
    for env in ("scienceworld", "school"):
        lge.run_cell(lge.Args(env=env, runs=tmp_path, options="--steps 9"), "none", "T14", "DRRN", 2)
        assert told.pop()[:6] == ("--env", env, "--task", "T14", "--seed", 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seeds": 0}, "--seeds"),
        ({"seeds": 99}, "99"),
        ({"methods": ("PPO",)}, "PPO"),
        ({"out": Path("x")}, "--out"),
    ],
)
def test_bad_options_are_one_line(options, said, tmp_path, capfd):
    with pytest.raises(SystemExit) as caught:
        lge.main(lge.Args(**options, guide="none", runs=tmp_path / "runs"))
    (line,) = capfd.readouterr().err.splitlines()
    assert caught.value.code == 2 and said in line and not (tmp_path / "runs").exists()


def test_the_school_has_tasks_of_its_own_and_cloning_needs_no_guide(tmp_path, monkeypatch, capfd):
    """A figure that a row does not have is "-" in the table."""
    monkeypatch.chdir(tmp_path)
    made = []

    def outcome_of(args, guide, task, row, seed):
        made.append((guide, task, row))
        return tmp_path

    monkeypatch.setattr(lge, "run_cell", outcome_of)
    curves = {f"curve {name}": [] for name in ("dev", "test", "training", "q")}
    monkeypatch.setattr(lge, "outcome", lambda run: {"eval_test_score": 50.0, **curves})
    table = lge.main(lge.Args(env="school", methods=("BC",), seeds=1, split="area", runs=tmp_path))
    assert [task for _, task, _ in made] == list(lge.SCHOOL) and "| find-plant | - |" in table
    made.clear()
    lge.main(lge.Args(methods=("BC", "DRRN"), seeds=1, runs=tmp_path))
    assert list(dict.fromkeys(task for _, task, _ in made)) == list(lge.TASKS) and made[0][0] == "none"
    with pytest.raises(SystemExit):
        lge.main(lge.Args(methods=("BC", "LGE fixed"), seeds=1, runs=tmp_path))
    assert "--guide auto: no guide in runs/" in capfd.readouterr().err


def test_a_run_that_fails_is_one_line(tmp_path, capfd):
    with pytest.raises(SystemExit):
        lge.main(lge.Args(tasks=("cook",), guide="none", runs=tmp_path))
    (line,) = capfd.readouterr().err.splitlines()
    assert "cook, random, seed 1" in line


def test_runs_without_a_guide_serve_every_guide():
    args = lge.Args(options="--steps 9")
    assert (
        lge.group_of(args, "runs/a/guide", "LGE fixed")
        == "--steps%209__a"
        != lge.group_of(args, "runs/b/guide")
    )
    assert {lge.group_of(args, f"runs/{name}/guide", "DRRN") for name in "ab"} == {"--steps%209"}
    assert lge.group_of(args, "checkpoints/school-guide", "LGE fixed") == "--steps%209__school-guide"


# ------------------------------------------------------------------------------------------ BC on gold paths
def test_gold_paths_are_cloned(tmp_path, monkeypatch):
    """In the fake house: every step of a path is learned; play then goes to the garden and focuses."""
    fake_scienceworld.install(monkeypatch)
    learned, learn = [], lge_bc.learn
    monkeypatch.setattr(lge_bc, "learn", lambda *rest: (learned.append(rest), learn(*rest))[1])
    sizes = {"eval_episodes": 6, "dev_episodes": 2, "batch": 8, "lr": 1e-2}
    summary = lge_bc.main(lge_bc.Args(task="T12", steps=60, paths=4, runs=str(tmp_path), **sizes))
    (run,) = tmp_path.iterdir()
    outcome = lge.outcome(lge.finished(tmp_path))
    assert outcome["curve test"] == [(60, round(summary["eval_test_score"], 2))] and summary["paths"] == 4
    loss = [json.loads(line)["bc/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert loss[-1] < math.log(64), "below what drawing one of 64 costs"
    played = [json.loads(line)["turns"] for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert all("garden" in " ".join(turn["action"] for turn in turns[:2]) for turns in played)
    assert all(turns[-1]["action"].startswith("focus on ") for turns in played)
    texts = learned[0][1]
    said = {
        (texts.texts[state[1]], texts.texts[gold]) for *_, steps, _, _ in learned for state, gold, _ in steps
    }
    rooms = {"kitchen": "go to hallway", "hallway": "go to garden", "garden": "focus on "}
    assert (
        all(action.startswith(rooms[text.split()[-1].strip(".")]) for text, action in said) and len(said) > 3
    )
    assert all(gold not in others for *_, steps, _, _ in learned for _, gold, others in steps)


def test_cloning_that_is_stopped_ends_at_once_and_cannot_go_on(tmp_path, monkeypatch):
    made, learn = [], lge_bc.learn

    def stopped(*given):
        made.append(given)
        signal.raise_signal(signal.SIGTERM)
        return learn(*given)

    monkeypatch.setattr(lge_bc, "learn", stopped)
    sizes = {"eval_episodes": 2, "dev_episodes": 2, "batch": 4, "steps": 9, "paths": 2, "runs": str(tmp_path)}
    lge_bc.main(lge_bc.Args(env="school", task="find-plant", **sizes))
    assert len(made) == 1 and lge.finished(tmp_path) is None
    with pytest.raises(ValueError, match="cannot be resumed"):
        lge_bc.main(lge_bc.Args(resume=str(tmp_path)))


def test_gold_paths_of_the_school_are_cloned(tmp_path):
    sizes = {"eval_episodes": 4, "dev_episodes": 2, "batch": 8, "lr": 1e-2}
    sizes |= {"steps": 40, "paths": 4, "runs": str(tmp_path)}
    summary = lge_bc.main(lge_bc.Args(env="school", task="lifespan-longest-lived", **sizes))
    (run,) = tmp_path.iterdir()
    loss = [json.loads(line)["bc/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert loss[-1] < math.log(64) and 0 <= summary["eval_test_score"] <= 100 and summary["paths"] == 4


def test_cloning_is_the_cross_entropy_of_the_gold_action(tmp_path):
    """By hand, against negatives that can be but one, so that nothing is left to chance."""
    tokenizer = lge_drrn.make_vocabulary(["a room", "nothing", "look", "wait", "eat"], 300)
    texts = lge_drrn.Texts(tokenizer)
    room, nothing, look, wait, eat = map(texts.add, ["a room", "nothing", "look", "wait", "eat"])
    torch.manual_seed(0)
    network = lge_drrn.DRRN(tokenizer.get_vocab_size(), 4)
    steps = [((room, room, nothing), look, np.array([wait])), ((room, nothing, room), wait, np.array([eat]))]
    copied, expected = lge_drrn.Copy(network, texts), 0.0
    for state, gold, others in steps:
        (q,) = copied.q(np.array([state]), [np.array([gold, others[0], others[0]])])
        expected += -torch.log_softmax(q, 0)[0].item() / 2
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    found = lge_bc.learn(network, texts, optimizer, steps, 2, np.random.default_rng(0))
    assert found == pytest.approx(expected, rel=1e-5)
    assert any(not torch.equal(before[name], weight) for name, weight in network.state_dict().items())
    again = lge_bc.learn(network, texts, optimizer, steps, 2, np.random.default_rng(0))
    assert again < found
