"""What the scripts for several devices differ in from their siblings, and what they share: docs/multigpu.md.

    python benchmarks/multigpu.py --out docs/multigpu.md  # writes the differences there as they are now
    python benchmarks/multigpu.py --equal                 # two processes against one, three that go on
    python benchmarks/multigpu.py --time                  # seconds with one process and with two

The page keeps what people wrote; what stands between its marks is written anew. The last two print tables.
"""

import argparse
import difflib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
SCRIPTS = ("archer", "loop_ppo")
LIMIT = 600  # seconds that a run may take

# ---------------------------------------------------------- 1. two processes against one
# All is small; batches do not divide by two, and a minibatch of loop_ppo.py may leave a process without any.
WORLD = {"env": "twenty-questions-subset", "threads": 1, "eval_every": 0, "anneal_lr": False, "iterations": 2}
SMALL = {
    "archer": {
        "rollouts": 5, "max_action_tokens": 2, "eval_episodes": 3, "warmup": 0, "micro_batch": 2,
        "critic_updates": 2, "critic_batch": 3, "critic_pool": 5, "actor_updates": 1, "actor_batch": 3,
    },
    "loop_ppo": {
        "tasks": 3, "rollouts": 3, "worlds": 9, "max_action_tokens": 2, "eval_episodes": 3, "micro_batch": 2,
        "minibatch": 4, "min_advantage": 0.0, "finish_all": 1.0,
    },
}  # fmt: skip
CRITIC = str(ROOT / "checkpoints/twenty-questions")
CASES = {
    ("archer", "td"): {},
    ("archer", "--fresh"): {"fresh": True},
    ("archer", "--baseline"): {"baseline": True},
    ("archer", "--lora"): {"lora": True, "critic": CRITIC},
    ("loop_ppo", "token"): {},
    ("loop_ppo", "GRPO with KL"): {"normalise": True, "kl": 0.04, "epochs": 1, "minibatch": 0},
    ("loop_ppo", "--lora, KL"): {"lora": True, "kl": 0.04},
}


def compute_in_float64() -> None:
    """From now on sums do not depend on their order, up to 1e-15 or so.

    Adam divides by the root of the gradient's square: where that is nearly 0, its eps decides, and with the
    usual one rounding would be blown up.
    """
    import torch

    from envs import models

    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.optim.AdamW = partial(torch.optim.AdamW, eps=1e-2)
    models.GAP["float64"] = 1e-9
    uniform = models.uniform
    models.uniform = lambda streams, number: uniform(streams, number).double()


def run_jobs(path: Path) -> None:
    """Runs what a file asks for, in float64: a list of scripts, each with arguments beyond SMALL."""
    sys.path.insert(0, str(ROOT))
    from envs import runs

    compute_in_float64()
    if runs.processes() > 1:
        from torch import distributed

        distributed.init_process_group("gloo")  # once for all: a second one would wait for ever
        distributed.init_process_group = distributed.destroy_process_group = lambda *_, **__: None
    for script, options in json.loads(path.read_text(encoding="utf-8")):
        name = f"{script}_multigpu" if runs.processes() > 1 else script
        module = importlib.import_module(name)
        module.main(module.Args(**WORLD | SMALL[script] | options))
    runs.leave()


def command_of(script: Path, processes: int) -> list[str]:
    """How a script is started: by torchrun, if by more than one process."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [*command, str(script)]


def start(command: list[str]) -> None:
    """Runs a command; raises RuntimeError, with what it said, if that fails."""
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


def start_jobs(jobs: list, folder: Path, processes: int) -> None:
    """Runs some jobs by so many processes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    start([*command_of(Path(__file__), processes), "--jobs", str(path)])


def equal(folder: Path, cases: dict, by_three: bool = True) -> dict[tuple[str, str], float]:
    """How far the runs of each case are apart: by one process and by two.

    If asked, also of a run that three go on with: the first of loop_ppo.py, which has two iterations of one
    process and gets two more.
    """
    whole = ("loop_ppo", "resumed by three")
    places = {}
    for processes in (1, 2):
        places[processes] = {case: folder / str(processes) / str(i) for i, case in enumerate(cases)}
    one, two = [
        [(case[0], options | {"runs": str(places[processes][case])}) for case, options in cases.items()]
        for processes in (1, 2)
    ]
    loops = [case for case in cases if case[0] == "loop_ppo" and by_three]
    if loops:
        one.append(("loop_ppo", cases[loops[0]] | {"iterations": 4, "runs": str(folder / "whole")}))
    start_jobs(one, folder / "1", 1)
    start_jobs(two, folder / "2", 2)
    found = {case: apart(only(places[1][case]), only(places[2][case])) for case in cases}
    if loops:
        run = shutil.copytree(only(places[1][loops[0]]), folder / "resumed")
        again = ("loop_ppo", cases[loops[0]] | {"iterations": 4, "resume": str(run)})
        start_jobs([again], folder / "3", 3)
        found[whole] = apart(run, only(folder / "whole"))
    return found


def only(folder: Path) -> Path:
    """The one folder in a folder."""
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return found


def numbers(thing) -> list[float]:
    """All numbers in a nest of dicts, lists and tensors."""
    import torch

    if isinstance(thing, torch.Tensor):
        return thing.double().flatten().tolist()
    if isinstance(thing, int | float):
        return [float(thing)]
    if isinstance(thing, dict):
        thing = thing.values()
    elif not isinstance(thing, list | tuple):
        return []
    return [number for each in thing for number in numbers(each)]


def apart(run: Path, other: Path) -> float:
    """The largest difference between two runs: in what was learned, and in what was logged but for times.

    Raises ValueError if they have not logged the same; evaluations do not count, as a resumed run has more.
    """
    import torch

    found = []
    for folder in (run, other):
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        rows = saved["metrics"]
        for row in rows:
            for tag in [tag for tag in row if tag.startswith(("time/", "eval"))]:
                del row[tag]
        found.append(numbers(saved["modules"]) + numbers(rows))
    if len(found[0]) != len(found[1]):
        raise ValueError(f"{run} and {other} are not runs of the same length")
    return max(abs(x - y) for x, y in zip(*found, strict=True))


# ---------------------------------------------------------- 2. seconds
SUBSET = ["--env", "twenty-questions-subset", "--max-action-tokens", "2", "--eval-every", "0"]
TIMED = {
    "archer": ["--warmup", "0", "--rollouts", "16", "--critic-updates", "8", "--actor-updates", "2"],
    "loop_ppo": ["--tasks", "4", "--world-threads", "1"],
}


def seconds(script: str, processes: int, iterations: int) -> list[float]:
    """Of an iteration, the median: wall time, and processor time of the first process.

    The first iteration does not count, nor does the last one, which evaluates.
    """
    with tempfile.TemporaryDirectory() as folder:
        name = f"{script}_multigpu.py" if processes > 1 else f"{script}.py"
        options = [*SUBSET, *TIMED[script], "--threads", "1", "--eval-episodes", "2", "--runs", folder]
        options += ["--iterations", str(2 + iterations)]
        start([*command_of(ROOT / name, processes), *options])
        (run,) = Path(folder).iterdir()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        cpu = [row["time/cpu_seconds"] for row in rows if row["iteration"]]
        return [median(b - a for a, b in pairwise(times[:-1])) for times in (moments(run), cpu)]


def moments(run: Path) -> list[float]:
    """When each iteration was logged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = EventAccumulator(str(run)).Reload().Scalars("rollout/return")
    return [event.wall_time for event in logged]


def time_table(repeats: int, iterations: int) -> str:
    """An iteration by one process and by two, in turns: what runs beside them meets both."""
    lines = ["| script | what | one process | two | ratios |", "|---|---|---|---|---|"]
    for script in SCRIPTS:
        pairs = [[seconds(script, processes, iterations) for processes in (1, 2)] for _ in range(repeats)]
        for i, what in enumerate(("wall time", "processor time of the first process")):
            one, two = (median(found[i] for found in column) for column in zip(*pairs, strict=True))
            ratios = ", ".join(f"{a[i] / b[i]:.2f}" for a, b in pairs)
            lines.append(f"| `{script}` | {what} | {one:.2f} s | {two:.2f} s | {ratios} |")
    return "\n".join(lines)


# ---------------------------------------------------------- 3. the differences
REASONS = tomllib.loads((ROOT / "benchmarks/multigpu.toml").read_text(encoding="utf-8"))["reasons"]
ENGINE = re.compile("[eE]ngine|^import json|, wait$|import Lock|urllib")  # lines that are there for it
MARKS = "<!-- differences: by benchmarks/multigpu.py -->", "<!-- end -->"


def blocks(script: str, root: Path = ROOT) -> list[tuple[str, list[str]]]:
    """What differs: where it stands, and lines with "-" and "+". New functions are blocks of their own."""
    old, new = [
        (root / f"{script}{more}.py").read_text(encoding="utf-8").splitlines() for more in ("", "_multigpu")
    ]
    found = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind == "equal":
            continue
        lines = [f"-{line}" for line in old[i:j]]
        for n in range(k, m):
            if any(line[1:] for line in lines) and re.match("(def|class) ", new[n]):
                found.append((place_of(new, n - 1), lines))
                lines = []
            lines.append(f"+{new[n]}")
        found.append((place_of(new, m - 1), lines))
    return found


def place_of(lines: list[str], n: int) -> str:
    """The function or class, or else the section, that line `n` belongs to."""
    for line in reversed(lines[: n + 1]):
        if name := re.match(r"(?:def|class) (\w+)", line):
            return f"`{name[1]}`"
        if title := re.match(r"# -+ \d\. (.+)", line):
            return title[1]
    return "the head"


def page_of(script: str) -> str:
    """The differences of a script, each with its reason, as the page has them.

    Raises ValueError for a block without a reason.
    """
    known = [row for row in REASONS if script in row.get("scripts", SCRIPTS)]
    found = [[] for _ in known]  # of each reason
    engine = 0
    total = 0
    for place, lines in blocks(script):
        text = "\n".join(lines)
        fit = [i for i, row in enumerate(known) if any(re.search(key, text, re.M) for key in row["keys"])]
        if not fit:
            raise ValueError(f"{script}_multigpu.py: benchmarks/multigpu.toml has no reason for\n{text}")
        found[fit[0]].append((place, text))
        added = [line[1:] for line in lines if line[0] == "+"]
        total += len(added)
        engine += len([line for line in added if "engine" in known[fit[0]] or ENGINE.search(line)])
    more = f", and {engine} for `--engine`" if engine else ""
    parts = [f"### {script}_multigpu.py\n\n{total - engine} lines are new or changed{more}."]
    for row, own in zip(known, found, strict=True):
        if own:
            places = ", ".join(dict.fromkeys(place for place, _ in own))
            diff = "\n".join(text for _, text in own)
            parts.append(f"{row['reason'].strip()}\n\nIn {places}:\n\n```diff\n{diff}\n```")
    return "\n\n".join(parts)


def renewed(page: str) -> str:
    """A page with the differences as they are now."""
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    found = "\n\n".join(page_of(script) for script in SCRIPTS)
    return f"{before}{MARKS[0]}\n\n{found}\n\n{MARKS[1]}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="the page")
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=4)
    args = parser.parse_args()
    if args.jobs:
        run_jobs(args.jobs)
    if args.out:
        args.out.write_text(renewed(args.out.read_text(encoding="utf-8")), encoding="utf-8")
    if args.equal:
        with tempfile.TemporaryDirectory() as folder:
            has_peft = importlib.util.find_spec("peft")
            cases = {case: words for case, words in CASES.items() if "lora" not in words or has_peft}
            for (script, case), distance in equal(Path(folder), cases).items():
                print(f"| `{script}` | {case} | {distance:.1g} |")
    if args.time:
        print(time_table(args.repeats, args.iterations))


if __name__ == "__main__":
    main()
