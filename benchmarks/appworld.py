"""What the world `appworld` costs: start of a server, resets, turns, grading, memory.

    APPWORLD=venv-appworld/bin/appworld APPWORLD_ROOT=FOLDER python benchmarks/appworld.py [--episodes 48]

FOLDER has the data of AppWorld, or what tests/worlds/appworld_data.py makes. CPU seconds are those of the
server, for the figures of the clock on the wall depend on what else the machine does. Linux only.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parent.parent))

import envs


def server_figures(world) -> tuple[float, float]:
    """CPU seconds and megabytes of the processes in the group of a world's server."""
    seconds = megabytes = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[2]) == world.server.process.pid:
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            megabytes += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return seconds, megabytes


def main() -> None:
    parser = argparse.ArgumentParser(description="What the world appworld costs.")
    parser.add_argument("--episodes", type=int, default=48)
    args = parser.parse_args()
    world = envs.make("appworld", episodes_per_server=args.episodes + 1)
    began = time.perf_counter()
    world.reset(options={"index": 0})
    cpu, start_memory = server_figures(world)
    print(
        f"first reset: {cpu:.1f} CPU s, {time.perf_counter() - began:.1f} s on the wall, "
        f"{start_memory:.0f} MB"
    )

    figures = {"reset": [], "turn that prints a profile": [], "solution, grading": []}

    def timed(what: str, method, argument):
        cpu, began = server_figures(world)[0], time.perf_counter()
        result = method(argument)
        wall = time.perf_counter() - began
        figures[what].append((server_figures(world)[0] - cpu, wall))
        return result

    for episode in range(args.episodes):
        index = episode % world.num_tasks
        observation, _ = timed("reset", lambda i: world.reset(options={"index": i}), index)
        for _ in range(5):
            timed("turn that prints a profile", world.step, "print(apis.supervisor.show_profile())")
        timed("solution, grading", world.step, world.expert(observation))
    for what, rows in figures.items():
        cpu, wall = fmean(row[0] for row in rows), median(row[1] for row in rows)
        print(f"{what}: {1000 * cpu:.0f} ms of CPU, {1000 * wall:.0f} ms on the wall")
    grown = server_figures(world)[1] - start_memory
    print(f"memory: {grown / args.episodes:.1f} MB more with each episode")
    world.close()


if __name__ == "__main__":
    main()
