"""envs/runs.py: the command line, a run's folder and lock, what is logged, saved and resumed, a full disk."""

import errno
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import make_checkpoint
from torch import nn

import archer
import archer_offline_iql
import lge_drrn
import sft
from envs import models, runs

ROOT = Path(__file__).parents[2]


@dataclass
class Toy:
    env: str = "toy/World:One"  # the world
    actor: str = ""  # a model's folder
    seed: int = 1  # of all
    threads: int = 1  # of torch
    runs: str = "runs"  # folder of runs
    name: str = ""  # of the run
    resume: str = ""  # a run's folder
    device: str = "cpu"  # where
    iterations: int = 4  # of training
    save_every: int = 2  # iterations
    rate: float = 0.5  # of learning
    loss: Literal["mean", "sum"] = "mean"  # of two
    center: bool = True  # about zero (D3)


class Words:
    """What has a folder: a model, or its tokenizer."""

    def __init__(self, words: str, tokenizer: "Words | None" = None):
        self.words, self.tokenizer = words, tokenizer

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / self.words).write_text(self.words)


def train(args: Toy, each=lambda run: None) -> dict:
    """All random numbers, a module, an optimiser and a state; `each` looks at each iteration."""
    run = runs.Run(args, "toy")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), args.rate)
    run.start({"model": model, "optimizer": optimizer}, seen=[], episodes=0)
    if not args.resume:
        run.log({"eval/return": 0.0}, "return")
    for iteration in run.iterations(args.iterations):
        each(run)
        numbers = [torch.rand(1).item(), run.rng.random()]
        loss = (model(torch.randn(4, 2)) - sum(numbers)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.state["seen"].append(numbers[0])
        run.state["episodes"] += 1
        metrics = {
            "loss": loss.item(),
            "eval/return": np.float64(sum(numbers)),
            "seen": len(run.state["seen"]),
        }
        run.log(metrics, "loss|return", [{"iteration": iteration, "numbers": numbers}])
        if run.is_due(args.save_every) or run.stopped:
            run.save({"actor": Words("weights", Words("vocabulary"))})
    return run.finish(best_return=1.5)


@pytest.fixture(autouse=True)
def as_before():
    """The signals and the threads of this process after a test that trains in it."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def toy(tmp_path):
    """Arguments of a run below tmp_path."""
    return lambda **given: Toy(**{"runs": str(tmp_path / "runs"), **given})


def folder_of(args: Toy) -> Path:
    """The one folder below --runs, or that of --resume."""
    (folder,) = [Path(args.resume)] if args.resume else Path(args.runs).iterdir()
    return folder


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


def age(folder: Path) -> None:
    """Makes the curves older: TensorBoard reads files by their names, which have the second."""
    for path in folder.glob("events.out.tfevents.*"):
        path.rename(folder / path.name.replace("tfevents.1", "tfevents.0"))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def call(monkeypatch, *words, main=None) -> list:
    """What `main` gets from a command line."""
    found = []
    monkeypatch.setattr(sys, "argv", ["toy.py", *map(str, words)])
    runs.cli(Toy, main or found.append)
    return found


def one_line(monkeypatch, capsys, *words, main=None) -> str:
    """What is said of a command line that is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        call(monkeypatch, *words, main=main)
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and line.startswith("toy.py: ")
    return line.removeprefix("toy.py: ")


@pytest.fixture
def folder(toy) -> Path:
    """The folder of a run with a rate of its own, before its first iteration."""
    args = toy(rate=0.25)
    made = runs.new_folder(args, "toy")
    runs.write_json(made / "args.json", asdict(args))
    return made


# ------------------------------------------------------------------------------------ the command line
def test_the_help_has_the_comments_and_the_command_line_the_last_word(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "--help")
    said = capsys.readouterr().out
    assert "about zero (D3) (default: True)" in said and "{mean,sum}" in said and "a run's folder" in said
    assert call(monkeypatch, "--rate", "3", "--no-center") == [Toy(rate=3.0, center=False)]
    assert call(monkeypatch, "--rate", "0", "--iterations", "-1") == [Toy(rate=0.0, iterations=-1)]


@pytest.mark.parametrize(
    "error",
    [ValueError, TypeError, OSError, ArithmeticError, runs.envs.Unavailable, runs.envs.WorldBroken],
)
def test_what_goes_wrong_is_one_line(monkeypatch, capsys, error):
    def main(args):
        raise error("first\nsecond")

    assert one_line(monkeypatch, capsys, main=main) == "first"


def test_a_full_disk_and_control_c_before_the_first_iteration_are_one_line(monkeypatch, capsys):
    def full(args):
        raise OSError(errno.ENOSPC, "No space left on device")

    def stopped(args):
        raise KeyboardInterrupt

    assert one_line(monkeypatch, capsys, main=full).startswith("disk full: ")
    assert one_line(monkeypatch, capsys, main=stopped) == "stopped before there was anything to save"


def test_what_python_itself_raises_comes_with_its_place(monkeypatch, capsys):
    """As when somebody has changed a script; what was raised in words needs none."""

    def changed(args):
        [_, _] = [1]

    def known(args):
        raise ValueError("--rate 2: too high")

    said = one_line(monkeypatch, capsys, main=changed)
    line = changed.__code__.co_firstlineno + 1
    assert said.startswith("not enough values") and said.endswith(f"(ValueError in {__file__}, line {line})")
    assert one_line(monkeypatch, capsys, main=known) == "--rate 2: too high"


def test_what_is_nobodys_mistake_is_seen_in_full(monkeypatch):
    def main(args):
        raise KeyError("a mistake of the script")

    with pytest.raises(KeyError):
        call(monkeypatch, main=main)


def test_a_run_that_goes_on_keeps_its_arguments(monkeypatch, folder):
    (args,) = call(monkeypatch, "--resume", folder, "--threads", "2")
    assert args == Toy(threads=2, rate=0.25, resume=str(folder), runs=str(folder.parent))


def test_a_run_that_goes_on_stays_in_its_world(monkeypatch, capsys, folder):
    said = one_line(monkeypatch, capsys, "--resume", folder, "--env", "apps")
    env = json.loads((folder / "args.json").read_text())["env"]
    assert said == f"--env apps: {folder} is a run of {env}; start a new one"


def test_a_run_that_goes_on_keeps_its_initial_actor(monkeypatch, capsys, folder):
    """From which ArCHer measures its KL, and on which adapters were trained."""
    said = one_line(monkeypatch, capsys, "--resume", folder, "--actor", "other")
    assert said == f"--actor other: {folder} is a run of the default; start a new one"


def test_a_run_that_goes_on_keeps_its_seed(monkeypatch, capsys, folder):
    """sft.py makes data and vocabulary from it once more."""
    said = one_line(monkeypatch, capsys, "--resume", folder, "--seed", "2")
    assert said == f"--seed 2: {folder} is a run of 1; start a new one"
    assert call(monkeypatch, "--resume", folder, "--seed", "1")[0].seed == 1, "what it has may be said again"


def test_a_run_that_goes_on_keeps_its_task(monkeypatch, capsys, tmp_path):
    """And with it the book of its scores; a world's other options may say where it is, and are only told."""
    runs.write_json(tmp_path / "args.json", asdict(lge_drrn.Args(runs=str(tmp_path.parent))))
    for flag, value in {"task": "boil", "step-limit": "7", "simplifications": ""}.items():
        monkeypatch.setattr("sys.argv", ["script", "--resume", str(tmp_path), f"--{flag}", value])
        with pytest.raises(SystemExit):
            runs.cli(lge_drrn.Args, pytest.fail)
        assert f"--{flag} {value}: {tmp_path} is a run of " in capsys.readouterr().err

    runs.write_json(tmp_path / "args.json", asdict(archer.Args(runs=str(tmp_path.parent), world="url=a")))
    began = []
    for value, is_told in {"url=b": True, "url=a": False}.items():
        monkeypatch.setattr("sys.argv", ["script", "--resume", str(tmp_path), "--world", value])
        runs.cli(archer.Args, began.append)
        assert began[-1].world == value
        told = "goes on with --world 'url=b', and began with 'url=a'" in capsys.readouterr().out
        assert told == is_told


@pytest.mark.parametrize("script", [sft, archer_offline_iql])
def test_a_run_that_goes_on_keeps_its_data(script, monkeypatch, capsys, tmp_path):
    """Every argument that says which data, or in which batches."""
    folder = tmp_path / "run"
    folder.mkdir()
    runs.write_json(folder / "args.json", asdict(script.Args(runs=str(tmp_path))))
    of_data = {
        "dataset": "other.jsonl",
        "demonstrations": "7",
        "keep": "0.5",
        "batch": "3",
        "vocabulary": "9",
    }
    of_data |= {"dataset-size": "7", "dataset-seed": "7", "mix": "random=1"}
    refused = []
    for flag, value in of_data.items():
        if hasattr(script.Args, flag.replace("-", "_")):
            monkeypatch.setattr("sys.argv", ["script", "--resume", str(folder), f"--{flag}", value])
            with pytest.raises(SystemExit):
                runs.cli(script.Args, pytest.fail)
            assert f"--{flag} {value}: {folder} is a run of " in capsys.readouterr().err
            refused.append(flag)
    assert len(refused) == (5 if script is sft else 6)


def test_a_run_that_goes_on_stays_where_it_is(monkeypatch, capsys, folder, tmp_path):
    said = one_line(monkeypatch, capsys, "--resume", folder, "--runs", tmp_path / "other")
    assert said == f"--runs {tmp_path}/other: a run that goes on stays in its folder, {folder}"
    assert call(monkeypatch, "--resume", folder, "--runs", folder.parent)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"seed": "many"}', "seed cannot be 'many'"),
        ('{"seed": true}', "seed cannot be True"),
        ('{"rate": null}', "rate cannot be None"),
        ('{"loss": "most"}', "loss cannot be 'most'"),
        ('{"device": 5}', "device cannot be 5"),
        ('{"flavour": 1}', "flavour is no argument of this script"),
        ('{"seed": 1}', "no actor is in it, so that another version began it"),
        ('{"seed": 1', "Expecting ',' delimiter"),
        ("[1]", ""),
        ("\x00\xff", ""),
    ],
)
def test_a_damaged_args_json_is_named(monkeypatch, capsys, folder, content, reason):
    (folder / "args.json").write_text(content)
    said = one_line(monkeypatch, capsys, "--resume", folder)
    assert said.startswith(f"{folder}/args.json is damaged, or of another script: {reason}")


def test_what_is_no_run_cannot_go_on(monkeypatch, capsys, folder, tmp_path):
    assert one_line(monkeypatch, capsys, "--resume", tmp_path / "no") == f"there is no folder {tmp_path}/no"
    (folder / "args.json").unlink()
    said = one_line(monkeypatch, capsys, "--resume", folder)
    assert said == f"{folder} is not the folder of a run: it has no args.json"


# ------------------------------------------------------------------------- with what no run can start
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rate": math.nan}, "--rate nan: it must be a number"),
        ({"save_every": math.nan}, "--save-every nan: it must be a number"),
        ({"seed": -1}, "--seed -1: it must be at least 0"),
        ({"threads": 0}, "--threads 0: it must be at least 1"),
        ({"name": "a/b"}, "--name a/b: a folder is named by it; take letters, digits, _ . and -"),
        ({"device": "moon"}, "--device moon: not here, take cpu"),
    ],
)
def test_what_would_fail_late_or_never_fails_before_anything_is_written(toy, given, said):
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        train(toy(**given))
    assert not Path(toy().runs).exists()


def test_a_bare_number_may_be_infinite_zero_or_negative(toy):
    """What it means, the script knows: it says so where the number is used."""
    for rate in (math.inf, 0.0, -1.0):
        runs.check(toy(rate=rate), "toy")


@pytest.mark.parametrize(("processes", "is_refused"), [("2", True), ("1", False), ("", False)])
def test_torchrun_would_train_the_same_seed_twice(monkeypatch, toy, processes, is_refused):
    monkeypatch.setenv("WORLD_SIZE", processes)
    if is_refused:
        with pytest.raises(ValueError, match="without torchrun"):
            runs.check(toy(), "toy")
    else:
        runs.check(toy(), "toy")


def test_a_folder_that_cannot_be_written_to_is_named(toy, tmp_path):
    (tmp_path / "file").touch()
    said = f"--runs {tmp_path}/file/runs: no folder can be made in {tmp_path}/file: Not a directory"
    with pytest.raises(ValueError, match=f"^{said}$"):
        runs.check(toy(runs=f"{tmp_path}/file/runs"), "toy")


# -------------------------------------------------------------------------------------------- a folder
def test_a_run_s_folder_is_named_by_world_script_seed_and_name(toy):
    first, second = (runs.new_folder(toy(name=name), "toy") for name in ("", "high-rate"))
    assert re.fullmatch(r"toy-World-One__toy__1__\d{8}-\d{6}-\d{6}", first.name)
    assert re.fullmatch(r"toy-World-One__toy__1__high-rate__\d{8}-\d{6}-\d{6}", second.name)
    assert (first / "lock").read_text() == f"{os.getpid()}\n"


def test_of_two_processes_the_second_is_refused_until_the_first_has_ended(toy, folder):
    """However it ended, and whatever the file says then: here it was killed."""
    code = (
        "import sys; from envs import models, runs; from pathlib import Path; runs.lock(Path(sys.argv[1]));"
    )
    code += "print('locked', flush=True); sys.stdin.read()"
    (folder / "checkpoint.pt").touch()
    runs.LOCKS.pop().close()  # this process has made the run
    words = [sys.executable, "-c", code, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    args = toy(resume=str(folder))
    with subprocess.Popen(words, cwd=ROOT, **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=f"^{folder}: process {other.pid} is at work on it$"):
            runs.Run(args, "toy")
        other.kill()
    assert (folder / "lock").read_text() == f"{other.pid}\n"
    runs.Run(args, "toy")
    assert (folder / "lock").read_text() == f"{os.getpid()}\n"
    runs.Run(args, "toy")  # the same process may go on


# ------------------------------------------------------------------------------- what is there in the end
def test_what_a_run_leaves(toy, capsys):
    args = toy()
    summary = train(args)
    folder = folder_of(args)
    events = [path.name for path in folder.glob("events.out.tfevents.*")]
    names = ["actor", "args.json", "checkpoint.pt", "lock", "metrics.jsonl", "rollouts.jsonl", "summary.json"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, *events]) and len(events) == 1
    assert json.loads((folder / "args.json").read_text()) == asdict(args)

    rows = lines_of(folder / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    for tag in ("loss", "seen", "eval/return"):
        logged = [(row["iteration"], pytest.approx(row[tag])) for row in rows if tag in row]
        assert curve(folder, tag) == logged
    samples = lines_of(folder / "rollouts.jsonl")
    assert [row["iteration"] for row in samples] == [1, 2, 3, 4]

    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [str(folder), "    0  eval/return 0"]
    assert said[2] == f"    1  loss {rows[1]['loss']:.4g}  eval/return {rows[1]['eval/return']:.4g}"
    assert json.loads(said[-1]) == summary == json.loads((folder / "summary.json").read_text())
    assert sorted(path.name for path in (folder / "actor").iterdir()) == [
        "README.md",
        "vocabulary",
        "weights",
    ]


def test_the_summary_has_the_first_and_the_last_evaluation_and_the_costs(toy):
    args = toy(seed=3)
    summary = train(args)
    rows = lines_of(folder_of(args) / "metrics.jsonl")
    costs = {"seconds", "cpu_seconds", "peak_memory_mb", "commit"}
    figures = {"warm_start_return": 0.0, "eval_return": rows[-1]["eval/return"], "episodes": 4}
    figures |= {"best_return": 1.5}
    figures |= {"iteration": 4, "seed": 3}
    assert {name: summary[name] for name in set(summary) - costs} == figures
    assert summary["cpu_seconds"] > 0 and 0 < summary["seconds"] < 60
    assert 50 < summary["peak_memory_mb"] < 50_000


def test_only_an_evaluation_before_the_first_iteration_is_of_the_start(toy):
    run = runs.Run(toy(), "toy")
    run.start({})
    for iteration in run.iterations(2):
        run.log({"eval/return": float(iteration), "loss": 1.0}, "")
    run.log({"loss": 2.0}, "")
    summary = run.finish()
    assert summary["eval_return"] == 2 and "warm_start_return" not in summary


@pytest.mark.parametrize(("end", "is_said"), [(-2.5, True), (-2.0, False), (-1.0, False)])
def test_a_run_that_ends_below_its_start_says_so(toy, capsys, end, is_said):
    run = runs.Run(toy(), "toy")
    run.start({})
    run.log({"eval/return": -2.0}, "")
    for _ in run.iterations(2):
        run.log({"eval/return": end}, "")
    run.finish()
    said = "The run ends below its start: it returned -2.00 at first, -2.50 at last."
    assert (said in capsys.readouterr().out.splitlines()) == is_said


def test_an_evaluation_anew_may_have_other_tags(toy):
    """The summary has the last row with any; the samples may have a file of their own."""
    run = runs.Run(toy(), "toy", samples_file="rankings.jsonl")
    run.start({})
    run.log({"eval/return": 1.0, "eval/test_score": 2.0}, "", [{"a": 1}])
    for _ in run.iterations(1):
        run.log({"eval/return": 3.0}, "")
    summary = run.finish()
    start = {"warm_start_return": 1.0, "warm_start_test_score": 2.0, "eval_return": 3.0}
    assert {name: summary[name] for name in summary if "_return" in name or "score" in name} == start
    assert lines_of(run.folder / "rankings.jsonl") == [{"a": 1}]


def test_the_commit_is_asked_for_when_the_run_begins(monkeypatch, toy):
    """Not at import, for who only looks at runs; and not at the end, when files may have changed."""
    answers = iter(["at the beginning", "later"])
    monkeypatch.setattr(runs, "commit", lambda: next(answers))
    assert train(toy(iterations=1))["commit"] == "at the beginning"

    def no_process(*args, **kwargs):
        raise AssertionError("a process at import")

    monkeypatch.setattr(subprocess, "run", no_process)
    assert runpy.run_path(runs.__file__)["commit"]


def test_the_commit_of_a_folder_without_git_is_unknown(monkeypatch):
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|unknown", runs.commit())
    monkeypatch.setattr(runs.shutil, "which", lambda name: None)
    assert runs.commit() == "unknown"


def test_a_run_on_a_gpu_says_what_it_took_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30 * int(device[-1]))
    assert runs.peak_memory("cuda:3")["peak_device_memory_mb"] == 3072
    assert (
        runs.peak_memory("cpu").keys() == {"peak_memory_mb"}
        and runs.peak_memory("cpu")["peak_memory_mb"] > 50
    )


def test_a_run_has_its_threads_and_its_seed(toy):
    def numbers(**given) -> list[float]:
        run = runs.Run(toy(**given), "toy")
        assert torch.get_num_threads() == given.get("threads", 1)
        return [torch.rand(1).item(), run.rng.random()]

    first = numbers(seed=1)
    assert numbers(seed=1, threads=2) == first
    assert all(one != other for one, other in zip(numbers(seed=2), first, strict=True))


# ---------------------------------------------------------------------------------- saved and resumed
def log_of(folder: Path) -> list[dict]:
    """What a run has logged, and its samples, without the clock."""
    rows = lines_of(folder / "metrics.jsonl") + lines_of(folder / "rollouts.jsonl")
    return [{tag: value for tag, value in row.items() if tag != "time/cpu_seconds"} for row in rows]


def test_two_and_two_iterations_are_four(toy, tmp_path):
    """Modules, optimiser, all random numbers, the state and the log."""
    whole, half = toy(runs=str(tmp_path / "whole")), toy(runs=str(tmp_path / "half"), iterations=2)
    expected = train(whole)
    train(half)
    age(folder_of(half))
    again = toy(runs=half.runs, resume=str(folder_of(half)))
    summary = train(again)
    assert log_of(folder_of(again)) == log_of(folder_of(whole))
    clocks = [row["time/cpu_seconds"] for row in lines_of(folder_of(again) / "metrics.jsonl")]
    assert clocks == sorted(clocks), "the clock goes on, too"
    for name in set(expected) - {"seconds", "cpu_seconds", "peak_memory_mb"}:
        assert summary[name] == expected[name], name
    assert json.loads((folder_of(again) / "args.json").read_text()) == asdict(toy(runs=half.runs))
    assert [step for step, _ in curve(folder_of(again), "loss")] == [1, 2, 3, 4]


def test_the_clocks_of_a_resumed_run_go_on(toy):
    args = toy(iterations=1)
    train(args)
    path = folder_of(args) / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    torch.save(saved | {"seconds": 1000.0, "cpu_seconds": 500.0}, path)
    summary = train(toy(resume=str(path.parent)))
    assert 1000 < summary["seconds"] < 1060 and 500 < summary["cpu_seconds"] < 560


def test_what_came_after_the_checkpoint_is_done_again(toy, tmp_path):
    """As after SIGKILL: the log has more than the checkpoint knows."""
    whole = toy(runs=str(tmp_path / "whole"), iterations=6, save_every=0)
    train(whole)
    args = toy(iterations=6)

    def die(run):
        if run.iteration == 4:
            raise KeyError("killed")

    with pytest.raises(KeyError):
        train(args, die)
    folder = folder_of(args)
    assert [row["iteration"] for row in lines_of(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["iteration"] == 2
    for name in ("checkpoint.tmp", "metrics.jsonl.tmp"):
        (folder / name).write_bytes(b"half")
    (folder / "actor.tmp").mkdir()
    age(folder)
    train(toy(iterations=6, resume=str(folder)))
    assert log_of(folder) == log_of(folder_of(whole))
    assert not list(folder.rglob("*.tmp"))
    assert [step for step, _ in curve(folder, "loss")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("content", [b"garbage", b""])
def test_a_damaged_checkpoint_is_named(toy, content):
    args = toy(iterations=1)
    train(args)
    path = folder_of(args) / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path} cannot be resumed: [A-Z]"):
        train(toy(resume=str(path.parent)))
    path.unlink()
    with pytest.raises(ValueError, match=f"^{path.parent} has no checkpoint: it ended before its first"):
        train(toy(resume=str(path.parent)))


def test_that_nothing_was_left_to_do_is_said(toy, capsys):
    args = toy(iterations=1)
    train(args)
    assert "left to do" not in capsys.readouterr().out
    train(toy(iterations=1, resume=str(folder_of(args))))
    assert capsys.readouterr().out.endswith("No iteration was left to do: 1 were done before.\n")


def test_dialogues_that_outgrow_the_context_are_spoken_of(toy, capsys):
    run = runs.Run(toy(), "toy")
    run.start({})
    run.log({"eval/cut": 0.4}, "")
    assert "outgrew" not in capsys.readouterr().out
    run.log({"eval/cut": 0.6}, "")
    assert "60% of the dialogues outgrew the model's context (eval/cut)" in capsys.readouterr().out


def test_a_checkpoint_of_other_modules_is_named(toy):
    args = toy(iterations=1)
    train(args)
    run = runs.Run(toy(resume=str(folder_of(args))), "toy")
    with pytest.raises(ValueError, match="cannot be resumed: KeyError: 'critic'"):
        run.start({"critic": nn.Linear(2, 1)})


def test_a_checkpoint_is_due_at_the_last_iteration_and_at_every_so_many(toy):
    def due(every: int, last: int) -> list[int]:
        run = runs.Run(toy(), "toy")
        return [iteration for iteration in run.iterations(last) if run.is_due(every)]

    assert due(every=2, last=5) == [2, 4, 5]
    assert due(every=2, last=4) == [2, 4]
    assert due(every=0, last=3) == [3]
    assert due(every=9, last=3) == [3]
    assert due(every=1, last=0) == []


# --------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_behind_the_iteration_it_falls_into(toy, capsys, number):
    def ask(run):
        if run.iteration == 3:
            os.kill(os.getpid(), number)

    args = toy(iterations=100, save_every=0)
    assert train(args, ask)["iteration"] == 3
    assert "stopping after this iteration; --resume goes on" in capsys.readouterr().out
    assert torch.load(folder_of(args) / "checkpoint.pt", weights_only=True)["iteration"] == 3
    assert signal.getsignal(number) == signal.SIG_DFL, "the second one ends it at once"
    assert train(toy(resume=str(folder_of(args))))["iteration"] == 4


def test_a_signal_in_the_middle_of_a_print_ends_it_all_the_same(toy, monkeypatch):
    """Python does not let a handler print into one that has not ended, as into a full pipe."""

    def ask(run):
        if run.iteration == 3:
            with monkeypatch.context() as context:
                context.setattr(
                    runs, "say", lambda text: (_ for _ in ()).throw(RuntimeError("reentrant call"))
                )
                signal.raise_signal(signal.SIGINT)

    args = toy(iterations=100, save_every=0)
    assert train(args, ask)["iteration"] == 3
    assert torch.load(folder_of(args) / "checkpoint.pt", weights_only=True)["iteration"] == 3


@pytest.mark.parametrize("killed", [None, "first", "second"])
def test_a_folder_is_replaced_whole(tmp_path, monkeypatch, killed):
    """Killed between its steps, both are there under some name, and the next time all is well."""
    old, new = tmp_path / "actor", tmp_path / "actor.tmp"
    for folder, text in ((old, "old"), (new, "new")):
        folder.mkdir()
        (folder / "weights").write_text(text)
    rename, calls = Path.rename, []

    def dies(self, target):
        calls.append(target)
        if len(calls) == {"first": 1, "second": 2}.get(killed):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as context:
        context.setattr(Path, "rename", dies)
        if killed:
            with pytest.raises(KeyboardInterrupt):
                runs.replace_folder(old, new)
            kept = {path.read_text() for path in tmp_path.glob("*/weights")}
            assert kept == {"old", "new"}
        else:
            runs.replace_folder(old, new)
    if killed:
        runs.replace_folder(old, new)
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
    assert (old / "weights").read_text() == "new"


# ----------------------------------------------------------------------------------------- a full disk
def full_at(iterations: range, name: str, error: Exception):
    """For `train`: in these iterations the file cannot be written, and what is half-written is there."""
    write_text, save = runs.write_text, torch.save

    def each(run):
        def write(target, *rest):
            path, args = (rest[0], (target, *rest)) if isinstance(target, dict) else (target, (target, *rest))
            if run.iteration in iterations and path.name.startswith(name):
                path.with_name(f"{name}.tmp").write_text("half")
                raise error
            return (save if isinstance(target, dict) else write_text)(*args)

        runs.write_text = torch.save = write

    return each


@pytest.fixture
def patched(monkeypatch):
    """What `full_at` replaces is put back."""
    monkeypatch.setattr(runs, "write_text", runs.write_text)
    monkeypatch.setattr(torch, "save", torch.save)


ENOSPC = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint"])
def test_what_cannot_be_written_ends_nothing(toy, patched, capsys, name):
    """The next time may be better, and then all is well."""
    args = toy(save_every=1)
    assert train(args, full_at(range(2, 4), name, ENOSPC))["iteration"] == 4
    folder = folder_of(args)
    said = re.findall(r"^not saved at iteration (\d): disk full", capsys.readouterr().out, re.M)
    assert said == ["2", "3"]
    assert len(lines_of(folder / "metrics.jsonl")) == 5 and len(lines_of(folder / "rollouts.jsonl")) == 4
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["iteration"] == 4
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint", "summary.json"])
def test_who_could_not_save_the_last_ends_with_exit_code_2(monkeypatch, toy, patched, capsys, name):
    args = toy(save_every=1)
    words = ["--runs", args.runs, "--save-every", 1]
    said = one_line(
        monkeypatch, capsys, *words, main=lambda args: train(args, full_at(range(3, 5), name, ENOSPC))
    )
    folder = folder_of(args)
    what = {"metrics.jsonl": "the log", "checkpoint": "the checkpoint", "summary.json": "the summary"}[name]
    assert said.startswith(f"{folder}: {what}: not saved at iteration 4: disk full")
    assert said.endswith("; the one that is there is of an earlier iteration") == (name == "checkpoint")
    assert not list(folder.rglob("*.tmp"))
    if name == "checkpoint":
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["iteration"] == 2
    if name != "summary.json":
        assert json.loads((folder / "summary.json").read_text())["iteration"] == 4


def test_a_folder_that_is_gone_is_no_full_disk(tmp_path):
    assert not runs.is_full(tmp_path / "gone", ValueError("no such file"))


BEHIND_A_PIPE = """
import signal, sys, time
sys.path[:0] = {path!r}
import test_runs
from envs import runs
args = test_runs.Toy(runs={runs!r}, iterations=9, save_every=9)
def each(run):
    if run.iteration == 3:
        print("now", flush=True)
        sys.stdin.read()  # until the other end has been closed
        signal.raise_signal(signal.SIGINT)
test_runs.train(args, each)
"""


def test_control_c_saves_when_nobody_reads_any_more(tmp_path):
    """As in `| tee log`, which the same Ctrl-C ends."""
    code = BEHIND_A_PIPE.format(path=[str(Path(__file__).parent), *sys.path], runs=str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    while child.stdout.readline() != "now\n":
        assert child.poll() is None, child.stderr.read()
    child.stdout.close()
    child.stdin.close()
    said = child.stderr.read()
    assert child.wait(60) == 0, said
    (folder,) = tmp_path.iterdir()
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["iteration"] == 3
    assert json.loads((folder / "summary.json").read_text())["iteration"] == 3


def test_a_signal_behind_the_save_ends_the_next_iteration(toy):
    """Not this one, of which nothing would be saved."""
    run = runs.Run(toy(), "toy")
    run.start({})
    done = []
    for iteration in run.iterations(9):
        done.append(iteration)
        if run.stopped:
            run.save({})
        if iteration == 4:
            signal.raise_signal(signal.SIGTERM)
    assert done == [1, 2, 3, 4, 5] and run.saved == 5


def test_an_evaluation_of_the_start_is_none_of_what_was_learned(toy):
    """Where a run ends before its first evaluation; with --iterations 0 it is both."""
    run = runs.Run(toy(), "toy")
    run.start({})
    run.log({"eval/return": 1.0}, "")
    both = run.finish()
    assert both["warm_start_return"] == both["eval_return"] == 1.0
    for _ in run.iterations(2):
        run.log({"loss": 1.0}, "")
    assert run.finish()["warm_start_return"] == 1.0 and "eval_return" not in run.finish()


def test_curves_that_cannot_be_written_end_nothing_either(toy, capsys):
    """TensorBoard's writer is of no use any more once it has failed: there is another one."""
    broken = []

    def each(run):
        if run.iteration == 2:
            broken.append(run.writer)
            run.writer.flush = lambda: (_ for _ in ()).throw(ENOSPC)

    args = toy()
    assert train(args, each)["iteration"] == 4 and broken
    assert re.findall(r"^not saved at iteration (\d): disk full", capsys.readouterr().out, re.M) == ["2"]
    assert {3, 4} <= {step for step, _ in curve(folder_of(args), "loss")}


def test_a_disk_that_is_full_from_the_start_is_known_at_the_start(monkeypatch, toy):
    def full(writer):
        raise ENOSPC

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.flush", full)
    with pytest.raises(OSError, match="No space left"):
        runs.Run(toy(), "toy").start({})


@pytest.mark.parametrize(
    ("error", "free", "reason"),
    [
        (ENOSPC, 2**40, "disk full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 2**40, "disk full"),
        (ValueError("I/O error: No space left on device (os error 28)"), 2**40, "disk full"),
        (RuntimeError("[enforce fail at inline_container.cc] . unexpected pos\nmore"), 0, "disk full"),
        (RuntimeError("another\nreason"), 2**40, "another"),
        (RuntimeError(), 2**40, "RuntimeError"),
    ],
)
def test_why_something_was_not_saved(monkeypatch, capsys, toy, error, free, reason):
    """It is said, and half-written files, models' folders too, make room."""
    run = runs.Run(toy(), "toy")
    run.start({})
    monkeypatch.setattr(runs.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with run.writing("the checkpoint"):
        (run.folder / "checkpoint.tmp").write_text("half")
        (run.folder / "actor.tmp").mkdir()
        (run.folder / "actor.tmp" / "model").write_text("half")
        raise error
    assert not list(run.folder.rglob("*.tmp")) and (run.folder / "args.json").exists()
    assert re.search(f"^not saved at iteration 0: {reason}", capsys.readouterr().out, re.M)
    with pytest.raises(OSError, match=re.escape(f"not saved at iteration 0: {reason}")):
        run.finish()
    with run.writing("the checkpoint"):
        pass
    run.finish()


# -------------------------------------------------------------------------------------- what is logged
def test_what_is_not_defined_is_a_dash_and_in_no_file(capsys, toy):
    run = runs.Run(toy(), "toy")
    run.start({})
    run.iteration = 12
    capsys.readouterr()
    run.log({"critic/explained": math.nan, "critic/loss": 0.123456, "time/all": 1.0}, "explained|loss")
    assert capsys.readouterr().out == "   12  critic/explained -  critic/loss 0.1235\n"
    expected = {"iteration": 12, "critic/loss": 0.123456, "time/all": 1.0}
    (row,) = lines_of(run.folder / "metrics.jsonl")
    expected["time/cpu_seconds"] = row["time/cpu_seconds"]
    assert 0 <= row["time/cpu_seconds"] <= run.seconds()[1]
    assert lines_of(run.folder / "metrics.jsonl") == [expected]
    assert set(EventAccumulator(str(run.folder)).Reload().Tags()["scalars"]) == {*expected} - {"iteration"}


def test_json_is_there_in_whole_or_not_at_all(tmp_path):
    one, many = tmp_path / "args.json", tmp_path / "metrics.jsonl"
    runs.write_json(one, {"a": 1})
    runs.write_jsonl(many, [{"a": 1}, {"b": 2}])
    for write, path, wrong in (
        (runs.write_json, one, {"a": object()}),
        (runs.write_jsonl, many, [{}, object()]),
    ):
        with pytest.raises(TypeError):
            write(path, wrong)
    assert json.loads(one.read_text()) == {"a": 1} and len(one.read_text().splitlines()) == 3
    assert many.read_text() == '{"a": 1}\n{"b": 2}\n'


# --------------------------------------------------------------------------------------------- models
def test_why_there_is_no_model(tmp_path):
    error = ValueError("\nfirst\nsecond")
    assert models.why_not_loaded(str(tmp_path), error) == "first"
    for path in (f"{tmp_path}/no", "./no", "runs/RUN/actor"):
        assert models.why_not_loaded(path, error) == "there is no such folder"
    assert models.why_not_loaded("gpt3", error) == "there is no such folder; as a name: first"
    (tmp_path / "actor").mkdir()
    said = f"it is the folder of a run; its model is in {tmp_path}/actor"
    assert models.why_not_loaded(str(tmp_path), error) == said


@pytest.mark.parametrize("flag", ["actor", "model"])
def test_a_world_without_a_checkpoint_is_told_how_to_make_a_model(flag):
    """What somebody asked for by name is no such world's: sft.py would not make it."""
    known = {"env": "my:World", "world": "size=3"}
    said = models.why_not_loaded("checkpoints/my:World", OSError(), SimpleNamespace(**known, **{flag: ""}))
    assert "python sft.py --env my:World --world size=3 makes a model" in said
    assert said.endswith(f"--{flag} FOLDER/actor")
    said = models.why_not_loaded(
        "checkpoints/x", OSError(), SimpleNamespace(**known | {"world": "", flag: ""})
    )
    assert "--env my:World makes" in said
    for source in ("gpt2", "runs/RUN/actor"):
        given = SimpleNamespace(**known, **{flag: source})
        assert "sft.py" not in models.why_not_loaded(source, OSError("offline"), given)


def test_a_model_is_loaded_without_dropout_and_whole_or_not_at_all(tmp_path, capsys):
    """Weights that are missing would be drawn at random."""
    folder, args = (
        make_checkpoint("twenty-questions-subset", tmp_path / "model"),
        SimpleNamespace(device="cpu"),
    )
    model = models.load(transformers.AutoModelForCausalLM, str(folder), args)
    assert not model.training and model.dtype == torch.float32
    assert model.tokenizer.eos_token == "<|endoftext|>" and capsys.readouterr().out == f"model: {folder}\n"
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"^no model in .*: no weights for model\.norm\.weight$"):
        models.load(transformers.AutoModelForCausalLM, str(folder), args)


def test_a_tokenizer_larger_than_its_model_is_refused(tmp_path):
    """A token without a vector would end the run in the middle, the first time that somebody says it."""
    args = SimpleNamespace(device="cpu")
    folder = make_checkpoint("twenty-questions-subset", tmp_path / "model")
    model = models.load(transformers.AutoModelForCausalLM, str(folder), args)
    models.probe(model)
    tokens = len(model.tokenizer)
    model.tokenizer.add_tokens("<new>")
    said = f"a tokenizer of {tokens + 1} tokens, but the model has vectors for {tokens}: resize them"
    with pytest.raises(ValueError, match=said):
        models.probe(model)


def adapter_of(base: Path, folder: Path) -> Path:
    """An adapter as peft saves it, with random weights, for a projection of the tiny model."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    config |= {"base_model_name_or_path": str(base), "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    width = transformers.AutoConfig.from_pretrained(base).hidden_size
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    weights = {name.format("A"): torch.randn(2, width), name.format("B"): torch.randn(width, 2)}
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@pytest.mark.external
def test_an_adapter_is_merged_into_its_model(tmp_path, capsys):
    """Loaded as peft has it, it would be frozen: a run would change nothing and say nothing."""
    pytest.importorskip("peft", reason="needs the package peft")
    base = make_checkpoint("twenty-questions-subset", tmp_path / "base")
    folder, args = adapter_of(base, tmp_path / "adapter"), SimpleNamespace(device="cpu", world="")
    plain = models.load(transformers.AutoModelForCausalLM, str(base), args)
    model = models.load(transformers.AutoModelForCausalLM, str(folder), args)
    assert f"model: {folder}, an adapter, merged into {base}" in capsys.readouterr().out
    weights = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    low_rank = {name.rpartition("lora_")[2][0]: weight for name, weight in weights.items()}
    moved = dict(model.named_parameters())
    assert set(moved) == {name for name, _ in plain.named_parameters()}
    for name, p in plain.named_parameters():
        added = 2 * low_rank["B"] @ low_rank["A"] if "q_proj" in name else 0  # alpha / r = 2
        assert torch.allclose(moved[name], p + added, atol=1e-6) and moved[name].requires_grad
    with pytest.raises(ValueError, match="--lora begins with a whole model"):  # theirs would name `base`
        models.add_adapters(model, rank=2)
    model.save_pretrained(tmp_path / "whole")
    model.tokenizer.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole/adapter_config.json").exists()
    again = models.load(transformers.AutoModelForCausalLM, str(tmp_path / "whole"), args)
    assert all(torch.equal(p, moved[name]) for name, p in again.named_parameters())


def test_an_adapter_needs_peft(tmp_path, monkeypatch):
    base = make_checkpoint("twenty-questions-subset", tmp_path / "base")
    folder = adapter_of(base, tmp_path / "adapter")
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^no model in .*: it is an adapter, .* pip install peft$"):
        models.load(transformers.AutoModelForCausalLM, str(folder), SimpleNamespace(device="cpu", world=""))


def test_a_model_that_cannot_learn_is_refused(tmp_path, monkeypatch):
    folder = make_checkpoint("twenty-questions-subset", tmp_path / "base")
    load = transformers.AutoModelForCausalLM.from_pretrained

    def frozen(*given, **options):
        model, report = load(*given, **options)
        return model.requires_grad_(False), report

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", frozen)
    with pytest.raises(ValueError, match=r"^no model in .*: none of its parameters can be trained$"):
        models.load(transformers.AutoModelForCausalLM, str(folder), SimpleNamespace(device="cpu", world=""))


def test_variants_of_a_world_share_a_checkpoint():
    world = runs.envs.make("twenty-questions-subset")
    assert Path(models.checkpoint_of(world)) == ROOT / "checkpoints/twenty-questions"


def test_a_saved_model_says_what_it_is(toy):
    run = runs.Run(toy(env="apps"), "loop_ppo")
    run.start({})
    assert "see metrics.jsonl" in run.card("actor") and "the ready-made checkpoint" in run.card("actor")
    run.log({"eval/return": 0.1}, "")
    for _ in run.iterations(1):
        run.log({"loss": 2.0}, "")
    run.args = SimpleNamespace(env="apps", model="some/model")
    card = run.card("actor")
    assert card.startswith("# actor, trained in the world apps\n") and "| some/model |" in card
    assert '{"iteration": 0, "eval/return": 0.1}' in card and "Saved by loop_ppo.py" in card
    run.args = SimpleNamespace(env="apps", actor="gpt2", critic="roberta-base")
    assert "| gpt2 |" in run.card("actor") and "| roberta-base |" in run.card("critic")


@pytest.mark.parametrize(
    ("script", "name", "least"),
    [
        ("loop_ppo", "worlds", 1),
        ("loop_ppo", "tasks", 1),
        ("loop_ppo", "logit_chunk", 1),
        ("loop_ppo", "minibatch", 0),
        ("loop_ppo", "max_difficulty", 1),
        ("lge_drrn", "top_k", 1),
        ("chai", "candidates", 1),
        ("guide_simcse", "negative_variations", 1),
        ("guide_simcse", "max_tokens", 1),
        ("archer_offline_iql", "dataset_size", 1),
        ("ppo", "minibatch", 1),
    ],
)
def test_numbers_below_the_least_are_named(script, name, least):
    args = SimpleNamespace(name="", env="x", runs="runs", resume="", device="cpu", **{name: least - 1})
    with pytest.raises(
        ValueError, match=f"^--{name.replace('_', '-')} {least - 1}: it must be at least {least}$"
    ):
        runs.check(args, script)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_grad_norm": 0.0}, "--max-grad-norm 0.0: it must be above 0"),
        ({"kl": -0.1}, "--kl -0.1: it must be at least 0"),
        ({"warmup": -1}, "--warmup -1: it must be at least 0"),
        ({"buffer_size": 63, "rollouts": 64}, "--buffer-size 63: it must be at least --rollouts 64"),
    ],
)
def test_numbers_with_which_a_run_would_not_learn_are_named(given, said):
    args = SimpleNamespace(name="", env="x", runs="runs", resume="", device="cpu", **given)
    with pytest.raises(ValueError, match=f"^{said}$"):
        runs.check(args, "archer")


@pytest.mark.parametrize("name", ["gamma", "polyak"])
def test_shares_are_between_0_and_1(name):
    args = SimpleNamespace(name="", env="x", runs="runs", resume="", device="cpu", **{name: 1})
    runs.check(args, "archer")
    setattr(args, name, 1.5)
    with pytest.raises(ValueError, match=f"^--{name} 1.5: it must be between 0 and 1$"):
        runs.check(args, "archer")


def test_an_actor_that_cannot_learn_is_spoken_of(capsys):
    args = SimpleNamespace(name="", env="x", runs="runs", resume="", device="cpu", iterations=3, warmup=2)
    runs.check(args, "archer")
    assert capsys.readouterr().out == ""
    args.warmup = 3
    runs.check(args, "archer")
    assert capsys.readouterr().out == "The actor will not learn: all 3 iterations belong to --warmup 3.\n"


@pytest.mark.parametrize("script", ["loop_ppo", "loop_ppo_multigpu", "sft", "archer"])
@pytest.mark.parametrize(("iterations", "lora"), [(1, False), (0, False), (1, True)])
def test_parameters_in_bfloat16_do_not_learn(script, iterations, lora):
    args = SimpleNamespace(
        name="", env="x", runs="runs", resume="", device="cpu", dtype="bfloat16", lora=lora
    )
    if script != "sft":
        args.iterations = iterations
    if script != "archer" and not lora and getattr(args, "iterations", 1):
        with pytest.raises(ValueError, match=r"^--dtype bfloat16: steps would be rounded away"):
            runs.check(args, script)
    else:
        runs.check(args, script)
