"""What the world `apps` costs: turns a second, start of a process, memory of many worlds.

    python benchmarks/apps.py [--turns 3000] [--worlds 96]

One thread in this process; the code runs in another one, whose time is counted, too. CPU seconds are those of
both, so that other work on the machine does not matter much; turns a second are those of the clock on the
wall. Linux only.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import envs
from envs.datasets import dialogue
from envs.worlds.apps import Apps, expert

KINDS = {
    "one plain call, which needs no process": "apis.phone.list(page=0)",
    "trivial code": "1 + 1",
    "code with one call": "len(apis.phone.list(page=0))",
}


def cpu_seconds(pid: int) -> float:
    """Of a process, from /proc, in hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> float:
    """Of a process, in MB; pages that it shares with others are divided among them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def turns(world: Apps, code: str, n: int) -> tuple[float, float]:
    """Turns a second, and milliseconds of CPU time a turn."""
    world.reset(options={"index": 0})
    world.max_turns = n + 2
    world.step("1")  # starts the process
    wall, cpu = time.perf_counter(), time.process_time() + cpu_seconds(world.sandbox.pid)
    for _ in range(n):
        world.step(code)
        world.observation = ""  # as long as an ordinary one
    cpu = time.process_time() + cpu_seconds(world.sandbox.pid) - cpu
    return n / (time.perf_counter() - wall), 1000 * cpu / n


def start(world: Apps, n: int) -> float:
    """Milliseconds from the reset of a world to the output of its first code."""
    began = time.perf_counter()
    for _ in range(n):
        world.reset(options={"index": 0})
        world.step("1 + 1")
    return 1000 * (time.perf_counter() - began) / n


def main() -> None:
    parser = argparse.ArgumentParser(description="What the world apps costs.")
    parser.add_argument("--turns", type=int, default=3000, help="turns of a measurement")
    parser.add_argument("--worlds", type=int, default=96, help="how many worlds at once")
    args = parser.parse_args()

    world = envs.make("apps")
    began = time.perf_counter()
    world.reset(options={"index": 0})
    world.step("1 + 1")
    print(f"start of the first process: {1000 * (time.perf_counter() - began):.0f} ms")
    print(f"start of another: {start(world, max(1, args.turns // 30)):.1f} ms")
    for name, code in KINDS.items():
        rate, cpu = turns(world, code, args.turns)
        print(f"{name}: {rate:,.0f} turns a second, {cpu:.2f} ms of CPU time each")

    indices = range(0, world.num_tasks, max(1, 10 * world.num_tasks // args.turns))
    dialogue(world, expert, None, 0)
    began = time.process_time()
    length = sum(len(dialogue(world, expert, None, index)["actions"]) for index in indices)
    spent = 1000 * (time.process_time() - began) / len(indices)
    print(f"an episode of the expert: {length / len(indices):.1f} turns, {spent:.1f} ms of CPU time here")

    worlds = [envs.make("apps") for _ in range(args.worlds)]
    for index, one in enumerate(worlds):
        one.reset(options={"index": index % one.num_tasks})
        one.step("x = [i for i in range(1000)]")
    sizes = [memory(one.sandbox.pid) for one in worlds]
    base = memory(worlds[0].sandbox.zygote.process.pid)
    print(
        f"memory of {args.worlds} processes: {sum(sizes):.0f} MB, {max(sizes):.1f} each, besides "
        f"{base:.1f} once"
    )
    for one in [world, *worlds]:
        one.close()


if __name__ == "__main__":
    main()
