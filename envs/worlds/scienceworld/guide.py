"""The Guide's data from ScienceWorld: gold paths, and what else could have been done along them.

    python -m envs.worlds.scienceworld.guide train FILE --variations 20     # what guide_simcse.py learns from
    python -m envs.worlds.scienceworld.guide dev FILE --variations 5        # what it is tested on

guide_simcse.py runs both for itself. Each variation that was walked is a file of its own in FILE.parts/ until
all are there: a run that was stopped goes on where it was. No simplification of the world, as in the paper
(Golchha et al. 2024, arXiv:2403.03141, App. A.1.2).

A file has a line of JSON each, and is gzipped. Of the training data a line is one step of one gold path, with
an action that was valid somewhere in the task and that this path does not take:

    {"task": "boil", "variation": 0, "desc": "Your task is to ...", "pos": "go to kitchen", "neg": "eat
    apple"}

Of the development data a line is a gold path with all valid actions of every step, as indices into "vocab";
those of a step are those of the step before with some added and some removed:

    {"task": ..., "variation": 14, "desc": ..., "gold": [...], "vocab": [...],
     "steps": [{"gold": 939, "add": [0, 1, ...], "rem": []}, ...]}
"""

import argparse
import gzip
import json
import random
import shutil
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path


def read_lines(path: str | Path) -> Iterator[dict]:
    """The records of a file, one by one; it need not be gzipped."""
    is_zipped = Path(path).read_bytes()[:2] == b"\x1f\x8b"
    with gzip.open(path, "rt", encoding="utf-8") if is_zipped else open(path, encoding="utf-8") as file:
        yield from map(json.loads, file)


def write_lines(path: Path, records: Iterable[dict]) -> None:
    """A gzipped file of records, which appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=6) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    temporary.replace(path)


# ------------------------------------------------------------------------------------ 1. one gold path


def walk(simulator, task: str, variation: int, see: bool) -> dict:
    """A variation's description and gold path, and if `see` the valid actions
    of every step (a record of the dev data).

    Gold actions are often worded otherwise than the valid ones ("open door to hallway", "open hallway door"):
    their index then is of a text that no step adds.
    """
    simulator.call("load", task, variation, "", True)
    description = simulator.call("getTaskDescription").removeprefix("Task Description:\n").strip()
    gold = simulator.strings("getGoldActionSequence")
    record = {"task": task, "variation": variation, "desc": description, "gold": gold}
    if not see:
        return record
    index, steps, before = {}, [], set()
    for action in gold:
        texts = sorted(set(simulator.strings("getValidActionObjectCombinations")))
        valid = {index.setdefault(text, len(index)) for text in texts}
        step = {"gold": index.setdefault(action, len(index)), "add": sorted(valid - before)}
        steps.append(step | {"rem": sorted(before - valid)})
        simulator.call("step", action)
        before = valid
    return record | {"vocab": list(index), "steps": steps}


def collect(folder: Path, wanted: list[tuple[str, int, bool]], workers: int) -> Iterator[dict]:
    """The records of the wanted walks (task, variation, see), in this order;
    those not in `folder` yet are made.

    Each worker has a simulator of its own, a Java process; while Java works, Python's other threads go on.
    """
    from envs.worlds.scienceworld import Died, Simulator  # here: whoever only reads files needs no Java

    own, simulators, stopped = threading.local(), [], threading.Event()

    def make(job: tuple[str, int, bool]) -> None:
        for attempt in range(3):
            try:
                if not getattr(own, "simulator", None):
                    own.simulator = None  # a simulator may die while it starts
                    own.simulator = Simulator()
                    simulators.append(own.simulator)
                write_lines(path_of(job), [walk(own.simulator, *job)])
                return
            except Died:
                if own.simulator:
                    own.simulator.close()
                own.simulator = None
                if attempt == 2 or stopped.is_set():
                    raise

    def path_of(job: tuple[str, int, bool]) -> Path:
        task, variation, see = job
        return folder / f"{task}.{variation}.{'seen' if see else 'path'}.jsonl.gz"

    missing = [job for job in wanted if not path_of(job).exists()]
    try:
        with ThreadPool(workers) as pool:
            for n, _ in enumerate(pool.imap_unordered(make, missing), 1 + len(wanted) - len(missing)):
                if n % 100 == 0 or n == len(wanted):
                    print(f"{n} of {len(wanted)} paths", flush=True)
    finally:  # also after Ctrl-C, while the workers are still at it
        stopped.set()
        for simulator in simulators:
            simulator.close()
    for job in wanted:
        yield from read_lines(path_of(job))


# ------------------------------------------------------------------------------------ 2. the two files


def spaced(numbers: range, n: int) -> list[int]:
    """`n` of the numbers, evenly spaced, or all of them if n is 0 or they are fewer.

    >>> spaced(range(10, 20), 3), spaced(range(3), 0)
    ([11, 15, 18], [0, 1, 2])
    """
    return (
        [numbers[int((k + 0.5) * len(numbers) / n)] for k in range(n)]
        if 0 < n < len(numbers)
        else list(numbers)
    )


def tuples_of(records: Iterable[dict], seed: int = 0) -> Iterator[dict]:
    """The training data from walks: for every step of a path a hard negative
    from what was valid in its task."""
    rng, by_task = random.Random(seed), {}
    for record in records:
        by_task.setdefault(record["task"], []).append(record)
    for task, walks in by_task.items():
        valid = sorted({action for record in walks for action in record.get("vocab", [])})
        for record in walks:
            others = sorted(set(valid) - set(record["gold"]))
            about = {key: record[key] for key in ("variation", "desc")}
            for action in record["gold"]:
                yield {"task": task} | about | {"pos": action, "neg": rng.choice(others)}


def make_train_data(
    path: str, variations: int, seen: int = 10, workers: int = 2, tasks: Iterable[str] = ()
) -> None:
    """Gold paths of `variations` training variations a task (0: all), negatives from `seen` of them (paper:
    10)."""
    from envs.worlds.scienceworld import TASKS
    from envs.worlds.scienceworld import variations as numbers

    print(f"making {path} from ScienceWorld, once; it may be stopped and goes on where it was")
    wanted = []
    for task in tasks or TASKS:
        chosen = spaced(numbers(task, "train"), variations)
        looked_at = set(random.Random(task).sample(chosen, min(seen, len(chosen))))
        wanted += [(task, variation, variation in looked_at) for variation in chosen]
    parts = Path(f"{path}.parts")
    write_lines(Path(path), tuples_of(collect(parts, wanted, workers)))
    shutil.rmtree(parts)


def make_eval_data(path: str, variations: int, workers: int = 2, tasks: Iterable[str] = ()) -> None:
    """Gold paths of `variations` development variations a task, with the valid actions of every step (paper:
    5)."""
    from envs.worlds.scienceworld import TASKS
    from envs.worlds.scienceworld import variations as numbers

    print(f"making {path} from ScienceWorld, once; it may be stopped and goes on where it was")
    wanted = [(task, n, True) for task in tasks or TASKS for n in spaced(numbers(task, "dev"), variations)]
    parts = Path(f"{path}.parts")
    write_lines(Path(path), collect(parts, wanted, workers))
    shutil.rmtree(parts)


# ------------------------------------------------------------------------------------ 3. of the school
# envs/worlds/school.py, our small world, is quick: its data are made anew each time, and no file is kept.


def school_train_data(variations: int, seen: int) -> list[dict]:
    """The training data of the school, with as many variations as `make_train_data` takes."""
    from envs.worlds import school

    records = []
    for task in school.TASKS:
        chosen = spaced(school.variations(task, "train"), variations)
        looked_at = set(random.Random(task).sample(chosen, min(seen, len(chosen))))
        records += [school.walk(task, number, number in looked_at) for number in chosen]
    return list(tuples_of(records))


def school_eval_data(variations: int) -> list[dict]:
    """The development data of the school."""
    from envs.worlds import school

    numbers = {task: spaced(school.variations(task, "dev"), variations) for task in school.TASKS}
    return [school.walk(task, number, True) for task, chosen in numbers.items() for number in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m envs.worlds.scienceworld.guide", description=__doc__.splitlines()[0]
    )
    parser.add_argument("split", choices=["train", "dev"])
    parser.add_argument("file", help="the file to make, .jsonl.gz")
    parser.add_argument("--variations", type=int, default=5, help="variations a task, evenly spaced; 0: all")
    parser.add_argument(
        "--seen", type=int, default=10, help="of these, those whose valid actions become negatives"
    )
    parser.add_argument("--workers", type=int, default=2, help="Java processes")
    parser.add_argument("--tasks", nargs="*", default=[], help="only these tasks")
    args = parser.parse_args()
    if args.split == "train":
        make_train_data(args.file, args.variations, args.seen, args.workers, args.tasks)
    else:
        make_eval_data(args.file, args.variations, args.workers, args.tasks)


if __name__ == "__main__":
    main()
