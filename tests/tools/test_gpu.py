"""benchmarks/gpu.py and gpu.sh without a GPU: every section in its smallest size, and what is left out."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu

from envs import runs

ROOT = Path(__file__).parents[2]


def cells(text: str) -> dict[str, list[str]]:
    """The cells behind the first one of each row of a report's tables."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: rest for name, *rest in rows}


@pytest.fixture(autouse=True)
def as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_same_step_twice_on_the_cpu(capsys):
    """In float32 nothing differs, in bfloat16 all does; and every part has a speed."""
    assert gpu.main(gpu.Args(device="cpu"))
    found = cells(capsys.readouterr().out)
    for name in ("archer: logits", "archer: gradient of the actor", "loop_ppo: gradient", "sft: gradient"):
        size, in_float32, in_bfloat16 = found[name]
        assert float(size) > 0 and float(in_float32) == 0
        assert 0 < float(in_bfloat16) < 0.1 * float(size)
    assert found["loop_ppo: rollouts that are the CPU's, token for token"][1] == "4 of 4"
    speeds = [rest[1].split()[0] for rest in found.values() if rest[-2].endswith("/s")]
    assert len(speeds) == 7 and all(float(speed.replace(",", "")) > 0 for speed in speeds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("step", [gpu.archer_step, gpu.loop_step, gpu.sft_step])
def test_a_step_on_the_gpu_is_the_cpus(step):
    """In float32, to a thousandth of the largest entry."""
    found = step("cuda", "float32")
    for name, expected in step("cpu", "float32").items():
        if not isinstance(expected, str):
            size = max(map(gpu.largest, expected))
            assert float(gpu.far(found[name], expected)) < 1e-3 * size, name


def test_what_fails_is_told_and_what_follows_runs(capsys):
    def section():
        yield ["first", "1", "", ""]
        raise ValueError("no memory\nmore")

    assert not gpu.show("bad", section(), float("inf"))
    assert gpu.show("good", iter([["good", "2", "", ""]]), float("inf"))
    assert gpu.show("late", section(), 0.0)
    found = cells(capsys.readouterr().out)
    assert found["bad"][0] == "failed: ValueError: no memory" and found["good"][0] == "2"
    assert found["late"][0] == "left out"


def test_no_command_of_the_shell_script_is_refused(tmp_path):
    """An interpreter that only writes down what it is given; then the scripts' own checks."""
    spy = tmp_path / "python"
    spy.write_text('#!/bin/bash\necho "$@" >>"$OUT/commands"\n')
    spy.chmod(0o755)
    told = os.environ | {"OUT": str(tmp_path), "PYTHON": str(spy)}
    subprocess.run(["bash", ROOT / "benchmarks/gpu.sh", "cpu"], env=told, capture_output=True, check=True)
    found = set()
    for line in (tmp_path / "commands").read_text().splitlines():
        script, *words = line.removeprefix("-m ").split()
        if script in ("pytest", "benchmarks/gpu.py"):
            continue
        found.add(script.removesuffix(".py"))
        module = importlib.import_module(script.removesuffix(".py"))
        args = tyro.cli(module.Args, args=words)
        if script != "lge_drrn":  # which first asks its world for some of them
            runs.check(args, script)
    assert {"archer", "loop_ppo", "sft", "lge_drrn", "guide_simcse", "baselines.ppo"} <= found


def test_without_time_all_is_left_out_and_named(tmp_path):
    """LIMIT below 0: the shell script's own path through all its sections, and the report."""
    quiet = {"OUT": str(tmp_path), "LIMIT": "-10", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", ROOT / "benchmarks/gpu.sh", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | quiet, timeout=100)
    assert (result.returncode, result.stderr) == (0, "")
    report = (tmp_path / "gpu.md").read_text()
    assert report.endswith(result.stdout) and "nothing of a GPU" in report
    left_out = {name for name, rest in cells(report).items() if rest[0] == "left out"}
    scripts = {path.stem for path in ROOT.glob("*.py") if not path.stem.endswith("_multigpu")}
    scripts |= {f"baselines/{path.stem}" for path in ROOT.glob("baselines/*.py")}
    assert scripts - left_out == set()
    assert {"tests marked gpu", "loop_step", "sft_speed, cpu, float32"} - left_out == set()
