"""Steps per second of ScienceWorld alone, played at random by worlds side by side, and what they cost.

    python benchmarks/scienceworld_speed.py                          # 8 worlds, a thread each
    python benchmarks/scienceworld_speed.py --worlds 1

The steps per second of the whole training loop are lge_drrn.py's own metric time/steps_per_second. CPU seconds are the
figure to compare on a machine that does other work, too.
"""

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import envs


def java_figures(pid: int) -> tuple[float, float]:
    """CPU seconds and resident megabytes of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    resident = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return (int(fields[11]) + int(fields[12])) / 100, int(resident.split()[1]) / 1024


def play(world, steps: int, seed: int) -> None:
    """So many steps of the random player, with the resets that belong to them."""
    rng = random.Random(seed)
    _, info = world.reset(seed=seed)
    for _ in range(steps):
        _, _, terminated, truncated, info = world.step(rng.choice(info["valid"]))
        if terminated or truncated:
            _, info = world.reset()


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps per second of ScienceWorld alone.")
    parser.add_argument("--task", default="find-living-thing")
    parser.add_argument("--worlds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200, help="of each world")
    parser.add_argument("--warm-up", type=int, default=200, help="steps of each before, as Java compiles while it runs")
    args = parser.parse_args()
    worlds = [envs.make("scienceworld", task=args.task) for _ in range(args.worlds)]
    with ThreadPoolExecutor(args.worlds) as pool:
        list(pool.map(lambda i: play(worlds[i], args.warm_up, i), range(args.worlds)))
        before = [java_figures(world.simulator.process.pid)[0] for world in worlds]
        began, cpu = time.perf_counter(), time.process_time()
        list(pool.map(lambda i: play(worlds[i], args.steps, args.worlds + i), range(args.worlds)))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    after = [java_figures(world.simulator.process.pid) for world in worlds]
    java, n = sum(row[0] for row in after) - sum(before), args.steps * args.worlds
    print(f"{args.worlds} worlds, {n} steps: {n / seconds:.1f} steps/s")
    print(f"a step costs {1000 * java / n:.1f} ms of CPU in Java and {1000 * cpu / n:.1f} ms in Python")
    print(f"Java takes {sum(row[1] for row in after):.0f} MB in all, {max(row[1] for row in after):.0f} MB at most")
    for world in worlds:
        world.close()


if __name__ == "__main__":
    main()
