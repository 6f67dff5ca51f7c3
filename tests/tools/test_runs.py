"""envs/runs.py: the command line, a run's folder and its lock, what is logged, and a full disk."""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from envs import runs

ROOT = Path(__file__).parents[2]


@dataclass
class Toy:
    # --- run
    env: str = "toy/World:One"  # the world
    seed: int = 1  # of all
    runs: str = "runs"  # folder of runs
    name: str = ""  # of the run
    resume: str = ""  # a run's folder
    device: str = "cpu"  # where

    # --- model
    rate: float = 0.5  # of learning
    limit: float = 2.0  # of it; inf is none
    decay: float = 0.5  # of it (paper: 0.5; 0: none)
    skipped: int = 0  # of some
    loss: Literal["mean", "sum"] = "mean"  # of two
    center: bool = True  # about zero (D3)


class Writer:
    """TensorBoard's, which remembers."""

    def __init__(self):
        self.written = []

    def add_scalar(self, *given):
        self.written.append(given)


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
def run(tmp_path) -> Path:
    """The folder of a run with a rate of its own."""
    folder = runs.folder(Toy(runs=str(tmp_path / "runs")), "toy")
    runs.write(folder / "args.json", [asdict(Toy(runs=str(tmp_path / "runs"), rate=0.25))], indent=2)
    return folder


# ------------------------------------------------------------------------------------ the command line
def test_the_help_has_groups_and_the_comments(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "--help")
    said = capsys.readouterr().out
    _, first, second = re.split("(?:run|model) options [ ─]", said)
    assert "a run's folder" in first and "--device" in first and "--rate" not in first
    assert "about zero (D3) (default: True)" in second and "{mean,sum}" in second


def test_arguments_are_given_and_else_the_default(monkeypatch):
    assert call(monkeypatch, "--rate", "3", "--no-center") == [Toy(rate=3.0, center=False)]


def test_inf_is_taken_where_the_help_speaks_of_it(monkeypatch, capsys):
    assert call(monkeypatch, "--limit", "inf") == [Toy(limit=math.inf)]
    assert one_line(monkeypatch, capsys, "--limit", "nan") == "--limit nan: it must be a finite number"
    assert one_line(monkeypatch, capsys, "--rate", "inf") == "--rate inf: it must be a finite number"


def test_numbers_are_positive_but_0_is_taken_where_the_help_speaks_of_it(monkeypatch, capsys):
    """Or where it is the default. The 0 of 0.5 is none."""
    assert call(monkeypatch, "--decay", "0", "--skipped", "0") == [Toy(decay=0.0)]
    assert one_line(monkeypatch, capsys, "--decay", "-0.1") == "--decay -0.1: it must be at least 0"
    assert one_line(monkeypatch, capsys, "--skipped", "-1") == "--skipped -1: it must be at least 0"
    assert one_line(monkeypatch, capsys, "--rate", "0") == "--rate 0.0: it must be above 0"
    assert one_line(monkeypatch, capsys, "--limit", "-inf") == "--limit -inf: it must be above 0"


@pytest.mark.parametrize(("processes", "is_refused"), [("2", True), ("1", False), ("", False)])
def test_torchrun_would_train_the_same_seed_twice(monkeypatch, capsys, processes, is_refused):
    monkeypatch.setenv("WORLD_SIZE", processes)
    if is_refused:
        assert "without torchrun" in one_line(monkeypatch, capsys)
    else:
        assert call(monkeypatch) == [Toy()]


def test_a_run_that_goes_on_keeps_its_arguments(monkeypatch, run):
    assert call(monkeypatch, "--resume", run, "--seed", "2") == [
        Toy(seed=2, rate=0.25, resume=str(run), runs=str(run.parent))
    ]


def test_a_run_that_goes_on_stays_where_it_is(monkeypatch, capsys, run, tmp_path):
    said = one_line(monkeypatch, capsys, "--resume", run, "--runs", tmp_path / "other")
    assert said == f"--runs {tmp_path}/other: a run that goes on stays in its folder, {run}"
    assert call(monkeypatch, "--resume", run, "--runs", run.parent)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"seed": "many"}', "seed cannot be 'many'"),
        ('{"seed": true}', "seed cannot be True"),
        ('{"rate": null}', "rate cannot be None"),
        ('{"loss": "most"}', "loss cannot be 'most'"),
        ('{"device": 5}', "device cannot be 5"),
        ('{"flavour": 1}', "flavour is no argument of this script"),
        ('{"seed": 1', "Expecting ',' delimiter"),
        ("[1]", ""),
        ("\x00\xff", ""),
    ],
)
def test_a_damaged_args_json_is_named(monkeypatch, capsys, run, content, reason):
    (run / "args.json").write_text(content)
    said = one_line(monkeypatch, capsys, "--resume", run)
    assert said.startswith(f"{run}/args.json is damaged, or of another script: {reason}")


def test_a_folder_that_cannot_be_written_to_is_named_before_anything_is_done(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    said = one_line(monkeypatch, capsys, "--runs", tmp_path / "file" / "runs")
    assert said == f"--runs {tmp_path}/file/runs: no folder can be made in {tmp_path}/file: Not a directory"


def test_control_c_before_the_first_iteration_is_one_line(monkeypatch, capsys):
    def main(args):
        raise KeyboardInterrupt

    assert one_line(monkeypatch, capsys, main=main) == "stopped before there was anything to save"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_the_second_one_stops(number):
    code = (
        f"from envs import runs; import os; asked = runs.stop_signals(); os.kill(os.getpid(), {number:d})\n"
    )
    code += f"print(asked, flush=True); os.kill(os.getpid(), {number:d}); print('still here')"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "--resume" in result.stdout and str(int(number)) in result.stdout.splitlines()[-1]
    assert result.returncode == -number and "still here" not in result.stdout


# -------------------------------------------------------------------------------------------- a folder
def test_a_run_s_folder_is_named_by_world_script_seed_and_name(tmp_path):
    first, second = (runs.folder(Toy(runs=str(tmp_path), name=name), "toy") for name in ("", "high-rate"))
    assert re.fullmatch(r"toy-World-One__toy__1__\d{8}-\d{6}-\d{6}", first.name)
    assert re.fullmatch(r"toy-World-One__toy__1__high-rate__\d{8}-\d{6}-\d{6}", second.name)
    assert runs.folder(Toy(resume=str(first)), "toy") == first


def test_of_two_processes_the_second_is_refused_until_the_first_has_ended(monkeypatch, capsys, run):
    """However it ended, and whatever the file says then: here it was killed."""
    code = "import sys; from envs import runs; from pathlib import Path; runs.lock(Path(sys.argv[1]));"
    code += "print('locked', flush=True); sys.stdin.read()"
    runs.LOCKS.pop().close()  # this process has made the run
    words = [sys.executable, "-c", code, str(run)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        said = one_line(monkeypatch, capsys, "--resume", run)
        assert said == f"{run}: process {other.pid} is at work on it"
        other.kill()
    assert (run / "lock").read_text() == f"{other.pid}\n"
    assert call(monkeypatch, "--resume", run) and (run / "lock").read_text() == f"{os.getpid()}\n"
    assert call(monkeypatch, "--resume", run), "the same process may go on"


# ----------------------------------------------------------------------------------------- a full disk
@pytest.mark.parametrize(
    ("error", "free", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2**40, "disk full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 2**40, "disk full"),
        (ValueError("I/O error: No space left on device (os error 28)"), 2**40, "disk full"),
        (RuntimeError("[enforce fail at inline_container.cc] . unexpected pos\nmore"), 0, "disk full"),
        (RuntimeError("another\nreason"), 2**40, "another"),
    ],
)
def test_what_cannot_be_saved_ends_nothing(monkeypatch, capsys, run, error, free, reason):
    """It is said, half-written files make room, and a run that ends so ends with exit code 2."""
    monkeypatch.setattr(runs.shutil, "disk_usage", lambda path: runs.shutil._ntuple_diskusage(1, 1, free))

    def main(args):
        with runs.saving(run, 7):
            (run / "checkpoint.tmp").write_text("half")
            (run / "actor.tmp").mkdir()
            (run / "actor.tmp" / "model").write_text("half")
            raise error
        assert not list(run.rglob("*.tmp")) and (run / "args.json").exists()
        assert capsys.readouterr().out.startswith(f"not saved at iteration 7: {reason}")
        if args.seed == 1:
            with runs.saving(run, 8):
                pass

    call(monkeypatch, "--seed", 1, main=main)
    said = one_line(monkeypatch, capsys, "--seed", 2, main=main)
    assert said.startswith(f"{run}: not saved at iteration 7: {reason}")


def test_a_full_disk_elsewhere_is_called_that(monkeypatch, capsys):
    def main(args):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert one_line(monkeypatch, capsys, main=main).startswith("disk full: ")


# -------------------------------------------------------------------------------------- what is logged
def test_what_is_not_defined_is_a_dash_and_in_no_file(capsys):
    writer, metrics = Writer(), {"critic/explained": math.nan, "critic/loss": 0.123456, "time/all": 1.0}
    assert runs.log(writer, 12, metrics, "explained|loss") == {
        "iteration": 12,
        "critic/loss": 0.123456,
        "time/all": 1.0,
    }
    assert capsys.readouterr().out == "   12  critic/explained -  critic/loss 0.1235\n"
    assert writer.written == [("critic/loss", 0.123456, 12), ("time/all", 1.0, 12)]


def test_json_is_there_in_whole_or_not_at_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    runs.write(path, [{"a": 1}])
    with pytest.raises(TypeError):
        runs.write(path, [{"a": 2}, {"a": object()}])
    assert json.loads(path.read_text()) == {"a": 1}


def test_why_there_is_no_model(tmp_path):
    error = ValueError("\nfirst\nsecond")
    assert runs.why_not_loaded(str(tmp_path), error) == "first"
    for path in (f"{tmp_path}/no", "./no", "runs/RUN/actor"):
        assert runs.why_not_loaded(path, error) == "there is no such folder"
    assert runs.why_not_loaded("gpt3", error) == "there is no such folder; as a name: first"
    (tmp_path / "actor").mkdir()
    said = f"it is the folder of a run; its model is in {tmp_path}/actor"
    assert runs.why_not_loaded(str(tmp_path), error) == said


@pytest.mark.parametrize("flag", ["actor", "model"])
def test_a_world_without_a_checkpoint_is_told_how_to_make_a_model(flag):
    """What somebody asked for by name is no such world's: sft.py would not make it."""
    known = {"env": "my:World", "world": "size=3"}
    said = runs.why_not_loaded("checkpoints/my:World", OSError(), SimpleNamespace(**known, **{flag: ""}))
    assert "python sft.py --env my:World --world size=3 makes a model" in said
    assert said.endswith(f"--{flag} FOLDER/actor")
    said = runs.why_not_loaded("checkpoints/x", OSError(), SimpleNamespace(**known | {"world": "", flag: ""}))
    assert "--env my:World makes" in said
    for source in ("gpt2", "runs/RUN/actor"):
        given = SimpleNamespace(**known, **{flag: source})
        assert "sft.py" not in runs.why_not_loaded(source, OSError("offline"), given)


def test_a_saved_model_says_what_it_is(tmp_path):
    run = tmp_path / "apps__loop_ppo__1__now"
    run.mkdir()
    (run / "args.json").write_text(json.dumps({"env": "apps", "model": "some/model"}))
    assert "see metrics.jsonl" in runs.card(run, "actor")
    rows = [{"iteration": 0, "eval/return": 0.1}, {"iteration": 1, "loss": 2.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = runs.card(run, "actor")
    assert card.startswith("# actor, trained in the world apps\n") and "| some/model |" in card
    assert '{"iteration": 0, "eval/return": 0.1}' in card
