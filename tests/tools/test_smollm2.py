"""benchmarks/smollm2.sh with a tiny model in the place of SmolLM2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.external
def test_the_second_run_goes_on_from_what_the_first_has_merged(tmp_path):
    pytest.importorskip("peft", reason="needs the package peft")
    sizes = {"DIALOGUES": "8", "ITERATIONS": "1", "START": str(ROOT / "checkpoints/twenty-questions")}
    environment = (
        os.environ | sizes | {"RUNS": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    )
    command = ["bash", str(ROOT / "benchmarks/smollm2.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (first,) = tmp_path.glob("*__sft__*")
    (second,) = tmp_path.glob("*__loop_ppo__*")
    told = [json.loads((run / "args.json").read_text()) for run in (first, second)]
    assert all(args["lora"] and args["dtype"] == "bfloat16" for args in told)
    assert told[1]["model"] == str(first / "actor") and (first / "actor/model.safetensors").exists()
    assert len((tmp_path / "dialogues.jsonl").read_text().splitlines()) == 8
    rows = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1] and "eval/return" in rows[1]
