"""What the scripts for several devices differ in from their siblings, and what they share: docs/multigpu.md.

    python benchmarks/multigpu.py --out docs/multigpu.md  # the page: the differences as they are now
    python benchmarks/multigpu.py --measure equal         # two processes against one, three that go on
    python benchmarks/multigpu.py --measure time          # seconds with one process and with two, when all is quiet

`--measure` writes benchmarks/results/multigpu.csv, from which the page has its numbers.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the scripts, from wherever this is called

from envs import models, runs

# ---------------------------------------------------------- 1. two processes against one
WORLD = {"env": "twenty-questions-subset", "threads": 1, "max_action_tokens": 6, "eval_every": 0}
SMALL = {
    "loop_ppo": WORLD | {"tasks": 3, "rollouts": 4, "worlds": 12, "eval_episodes": 3, "anneal_lr": False},
}
SMALL["loop_ppo"] |= {"minibatch": 5, "micro_batch": 2, "min_advantage": 0.0, "finish_all": 1.0}
CASES = {
    "loop_ppo": {
        "token": {},
        "GRPO with KL": {"normalise": True, "kl": 0.04, "epochs": 1, "minibatch": 0},
        "LoRA": {"lora": True, "kl": 0.04},
    },
}
SCRIPTS = list(CASES)
LIMIT = 300  # seconds


def compute_in_float64() -> None:
    """From now on sums do not depend on their order, up to 1e-15 or so.

    Adam divides by the root of the gradient's square: where that is nearly 0, eps decides, and with the usual
    one rounding would be blown up.
    """
    import torch

    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.optim.AdamW = partial(torch.optim.AdamW, eps=1e-2)
    models.GAP["float64"] = 1e-9


def run_cases(path: Path) -> None:
    """Runs what a file asks for, in float64: a list of scripts and of arguments that differ from SMALL."""
    compute_in_float64()
    if runs.processes() > 1:
        from torch import distributed

        distributed.init_process_group("gloo")  # once for all: a second time it would wait for ever
        distributed.init_process_group = distributed.destroy_process_group = lambda *_, **__: None
    for script, options in json.loads(path.read_text(encoding="utf-8")):
        name = f"{script}_multigpu" if runs.processes() > 1 else script
        module = importlib.import_module(name)
        module.main(module.Args(**SMALL[script] | options))


def start(cases: list, folder: Path, processes: int) -> None:
    """Runs cases by one process, or by several of torchrun; raises RuntimeError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cases{processes}.json"
    path.write_text(json.dumps(cases), encoding="utf-8")
    command = [sys.executable, __file__, "--cases", str(path)]
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command[1:1] = torchrun
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | quiet, **pipes) as process:
        try:
            _, said = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun hands it on
            _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(said[-3000:])


def numbers(thing) -> list:
    """All numbers in a checkpoint's nest of dicts, lists and tensors."""
    import torch

    if isinstance(thing, torch.Tensor):
        return thing.double().flatten().tolist()
    if isinstance(thing, dict):
        thing = thing.values()
    elif not isinstance(thing, list | tuple):
        return [float(thing)] if isinstance(thing, int | float) else []
    return [number for each in thing for number in numbers(each)]


def apart(run: Path, other: Path) -> float:
    """The largest difference between two runs: in what was learned, and in what was logged but for times."""
    import torch

    found = []
    for folder in (run, other):
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        trained = numbers(saved["modules"])
        rows = [
            {tag: value for tag, value in row.items() if not tag.startswith(("time/", "eval"))}
            for row in saved["metrics"]
        ]
        found.append(trained + numbers(rows))
    assert len(found[0]) == len(found[1]) > 1000
    return max(abs(x - y) for x, y in zip(*found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=Path)
    args = parser.parse_args()
    run_cases(args.cases)


if __name__ == "__main__":
    main()
