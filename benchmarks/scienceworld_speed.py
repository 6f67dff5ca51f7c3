"""Steps per second of ScienceWorld alone, played at random by worlds side by side,
and of lge_drrn.py's whole loop.

    python benchmarks/scienceworld_speed.py                          # 8 worlds, a thread each
    python benchmarks/scienceworld_speed.py --worlds 1
    python benchmarks/scienceworld_speed.py --processes 2            # four threads in each of two processes
    python benchmarks/scienceworld_speed.py --loop runs/RUN/guide    # the loop, with that guide and without

CPU seconds are the figure to compare on a machine that does other work, too. The loop's figures are the
script's own metric time/steps_per_second in each hundred steps; evaluations are not counted.
"""

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import envs

SCRIPT = Path(__file__).parent.parent / "lge_drrn.py"


def java_figures(pid: int) -> tuple[float, float]:
    """CPU seconds and resident megabytes of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    resident = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")
    )
    return (int(fields[11]) + int(fields[12])) / 100, int(resident.split()[1]) / 1024


def play(world, steps: int, seed: int) -> None:
    """So many steps of the random player, with the resets that belong to them."""
    rng = random.Random(seed)
    _, info = world.reset(seed=seed)
    for _ in range(steps):
        _, _, terminated, truncated, info = world.step(rng.choice(info["valid"]))
        if terminated or truncated:
            _, info = world.reset()


def measure(
    task: str, seeds: range, warm_up: int, steps: int, together
) -> tuple[float, float, float, list[float]]:
    """Plays a world a seed, a thread each: seconds, CPU seconds of Java, of Python,
    and each Java's megabytes."""
    worlds = [envs.make("scienceworld", task=task) for _ in seeds]
    with ThreadPoolExecutor(len(worlds)) as pool:
        list(pool.map(play, worlds, [warm_up] * len(worlds), seeds))
        together.wait()
        before = [java_figures(world.simulator.process.pid)[0] for world in worlds]
        began, cpu = time.perf_counter(), time.process_time()
        list(pool.map(play, worlds, [steps] * len(worlds), [seed + 1000 for seed in seeds]))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    after = [java_figures(world.simulator.process.pid) for world in worlds]
    for world in worlds:
        world.close()
    return seconds, sum(row[0] for row in after) - sum(before), cpu, [row[1] for row in after]


def loop(task: str, worlds: int, steps: int, guide: str) -> None:
    """Runs lge_drrn.py three times, one after the other,
    and prints what its worlds made together in a second."""
    rows = {"LGE": ["--guide", guide], "DRRN": ["--guide", "none"]}
    rows["random"] = [*rows["DRRN"], "--explorer", "random"]
    for name, options in rows.items():
        with tempfile.TemporaryDirectory() as runs:
            command = [
                sys.executable,
                str(SCRIPT),
                "--env",
                "scienceworld",
                "--task",
                task,
                "--worlds",
                str(worlds),
                "--steps",
                str(steps),
            ]
            command += ["--eval-episodes", "1", "--runs", runs, *options]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode != 0:
                sys.exit(ended.stderr.splitlines()[-1])
            (log,) = Path(runs).glob("*/metrics.jsonl")
            figures = [json.loads(line)["time/steps_per_second"] for line in log.read_text().splitlines()]
        print(
            f"{name:6s} {worlds} worlds, steps/s: {'  '.join(f'{figure:.1f}' for figure in figures)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps per second of ScienceWorld alone.")
    parser.add_argument("--task", default="find-living-thing")
    parser.add_argument("--worlds", type=int, default=8)
    parser.add_argument(
        "--processes", type=int, default=1, help="of Python, among which the worlds are divided"
    )
    parser.add_argument("--steps", type=int, help="of each world; by default 200, and 300 of the loop")
    parser.add_argument(
        "--warm-up", type=int, default=200, help="steps of each before, as Java compiles while it runs"
    )
    parser.add_argument("--loop", metavar="GUIDE", help="a guide's folder: time the whole loop instead")
    args = parser.parse_args()
    if args.loop:
        return loop(args.task, args.worlds, args.steps or 300, args.loop)
    args.steps = args.steps or 200
    if not 1 <= args.processes <= args.worlds:
        parser.error(f"--processes {args.processes}: give 1 to --worlds, which is {args.worlds}")
    shares = [range(i, args.worlds, args.processes) for i in range(args.processes)]
    with multiprocessing.Manager() as manager, ProcessPoolExecutor(args.processes) as pool:
        together = manager.Barrier(args.processes)
        futures = [
            pool.submit(measure, args.task, share, args.warm_up, args.steps, together) for share in shares
        ]
        seconds, java, python, megabytes = zip(*[future.result() for future in futures], strict=True)
    n, megabytes = args.steps * args.worlds, [each for share in megabytes for each in share]
    print(f"{args.worlds} worlds in {args.processes} processes, {n} steps: {n / max(seconds):.1f} steps/s")
    print(
        f"a step costs {1000 * sum(java) / n:.1f} ms of CPU in Java and {1000 * sum(python) / n:.1f} ms in "
        f"Python"
    )
    print(f"Java takes {sum(megabytes):.0f} MB in all, {max(megabytes):.0f} MB at most")


if __name__ == "__main__":
    main()
