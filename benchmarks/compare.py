"""ArCHer beside what its paper compares it with: Figures 3, 5 and 7 at the size of this repository.

    python benchmarks/compare.py                      # thirty hours of one core; goes on where it was stopped
    python benchmarks/compare.py --dry                # the commands that are left
    python benchmarks/compare.py --worlds twenty-questions-subset --methods ArCHer PPO --jobs 2
    python benchmarks/compare.py --quick              # three minutes, and its figures mean nothing

METHODS and ABLATIONS below are the table: a name, a script with its flags, and the settings that were tried.
Each method may try four. Each is run once in each world, with a seed that is not reported, and the one with
the largest area under the curve of the rollouts' return is taken. All rows have about as many dialogues
in a world; both these and CPU-seconds are counted. What the CSVs in --out have is not run again.
docs/compare.md explains what comes out.

Paper: Zhou et al. 2024, arXiv:2402.19446, sec. 5, App. C, D and F
"""

import io
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import tyro
from tables import half_width, interval, read_lines, read_results, stop, write_results

# ---------------------------------------------------------- 1. the table
FULL, SUBSET, CITY = "twenty-questions", "twenty-questions-subset", "guess-my-city"
WORLDS = (FULL, SUBSET, CITY)
SEEDS = {FULL: 3, SUBSET: 5, CITY: 3}  # 1 to this are reported
DIALOGUES = {FULL: 896, SUBSET: 1792, CITY: 896}  # played to learn, in every row
LEVELS = {FULL: (-14, -12, -10), SUBSET: (-8, -6, -4), CITY: (-12, -10, -8)}  # returns; when reached?
PLAIN = "PPO"  # with which all others are paired
TUNING_SEED = 101
TRIES = 4  # settings that each method may try
EVALUATIONS = 2  # of a run, and one before it; a quick run has one at its end


@dataclass(frozen=True)
class Row:
    """A line of the table. A setting stands before the command's flags, which count where both have one."""

    command: str  # OTHER is the folder of --other; x3 is the dialogues of three iterations
    tries: tuple[str, ...] = ("",)  # settings, of which one is taken
    like: str = ""  # the method whose setting it has, too
    worlds: tuple[str, ...] = WORLDS


ARCHER = (  # about as many looks at each dialogue
    "",
    "--kl 0.02",
    "--rollouts 16 --critic-updates 20 --critic-pool 64 --warmup 4 --actor-updates 4",
    "--rollouts 64 --critic-updates 60 --actor-updates 16",
)
FRESH = (
    "--rollouts 64 --critic-updates 60 --actor-updates 4 --actor-lr 4e-4",
    "--rollouts 64 --critic-updates 60 --actor-updates 4 --actor-lr 6e-4",
    "--rollouts 64 --critic-updates 60 --actor-updates 4 --actor-lr 4e-4 --kl 0.02",
    "--warmup 4 --actor-updates 4 --actor-lr 4e-4 --kl 0.05",  # twice the updates of the actor
)
PPO = ("--rollouts 8 --minibatch 8", "--rollouts 16 --minibatch 16", "--rollouts 32", "--rollouts 64")
LARGER = ("--rollouts 128", "--rollouts 512 --minibatch 128")  # only rows of their own
AS_FRESH = "--rollouts 64 --critic-updates 60 --critic-batch 16"
METHODS = {
    "CHAI": Row(
        "-m baselines.chai",
        (
            f"{AS_FRESH} --buffer-size 128",
            AS_FRESH,
            f"{AS_FRESH} --critic-lr 1e-3",
            "--rollouts 32 --critic-updates 40 --critic-batch 16",
        ),
    ),
    "Filtered BC": Row(
        "-m baselines.filtered_bc",
        (
            "--rollouts 64",
            "--rollouts 64 --actor-lr 1e-4",
            "--rollouts 64 --buffer-size 256",
            "--rollouts 16",
        ),
    ),
    "PPO": Row("-m baselines.ppo", PPO),
    "LOOP": Row(  # --finish-all 1: none is dropped, as those dropped are long, and their return is low
        "loop_ppo.py --tasks 8 --max-action-tokens 16 --world-threads 1 --finish-all 1",
        ("--minibatch 24", *(f"--minibatch 24 --lr {rate}" for rate in ("5e-4", "1e-3", "2e-3"))),
    ),
    "ArCHer": Row("archer.py", ARCHER),
    "ArCHer, fresh": Row("archer.py --fresh", FRESH),  # the paper's way
}
TABLE_3 = (
    "--actor-lr 3e-4 --critic-lr 6e-4 --critic-updates 50 --actor-updates 3 --warmup 10 --buffer-size 10000"
)
# An encoder reads every state from its beginning: with the usual batches three minutes an iteration, 4 GB.
FEW = "--critic-batch 8 --critic-pool 64"
ABLATIONS = {
    **{
        f"PPO, {words.split()[1]} an iteration": Row(f"-m baselines.ppo {words}", worlds=(FULL,))
        for words in PPO + LARGER
    },
    "ArCHer, td": Row("benchmarks/variants.py td --kl 0.02"),
    # --fresh: a network that learned from played utterances would memorise their advantages.
    "ArCHer, token baseline": Row("benchmarks/variants.py D8 --fresh --baseline", (), "ArCHer, fresh"),
    "D1: no KL penalty": Row("archer.py --kl 0", (), "ArCHer", (SUBSET,)),
    "D2: encoder, random": Row(f"benchmarks/variants.py D2 {FEW}", (), "ArCHer", (SUBSET,)),
    "D2: decoder, random": Row(f"benchmarks/variants.py random {FEW}", (), "ArCHer", (SUBSET,)),
    "D3: no centring": Row("archer.py --no-center", (), "ArCHer", (SUBSET,)),
    "D4: heads from zero": Row("benchmarks/variants.py D4", (), "ArCHer", (SUBSET,)),
    "D5: Table 3": Row(f"archer.py {TABLE_3}", (), "ArCHer", (SUBSET,)),
    "D6: no annealing": Row("archer.py --no-anneal-lr", (), "ArCHer", (SUBSET,)),
    "D7: no pool": Row("benchmarks/variants.py D7 --critic-pool 10000", (), "ArCHer", (SUBSET,)),
    "E2: fresh at every update": Row("benchmarks/variants.py D7", (), "ArCHer", (SUBSET,)),
    "D8: a head as baseline": Row("archer.py --fresh --baseline", (), "ArCHer, fresh", (CITY,)),
    "D9: networks for Q": Row("benchmarks/variants.py D9", (), "ArCHer", (FULL, SUBSET)),
    "buffer: 48 dialogues": Row("archer.py --buffer-size 48", (), "ArCHer", (CITY,)),
    "buffer: 10,000 dialogues": Row("archer.py --buffer-size 10000", (), "ArCHer", (CITY,)),
    "Monte Carlo": Row("benchmarks/variants.py mc --buffer-size x3", (), "ArCHer", (SUBSET,)),
    "online IQL": Row("benchmarks/variants.py iql", (), "ArCHer", (FULL, SUBSET)),
    "ArCHer from --other": Row("archer.py --actor OTHER", (), "ArCHer", (FULL, SUBSET)),
}
ROWS = METHODS | ABLATIONS
USUAL_ROLLOUTS = {"archer": 32, "variants": 32}  # an iteration's, where it is not 128
LEARN = "--critic-updates 1 --critic-batch 2 --critic-pool 4"
ACT = "--actor-updates 1 --actor-batch 2"
QUICK = {  # by script: what makes a run tiny
    "archer": f"--rollouts 3 --warmup 0 {LEARN} {ACT} --eval-episodes 2",
    "variants": f"--rollouts 3 --warmup 0 {LEARN} {ACT} --eval-episodes 2",
    "chai": f"--rollouts 3 {LEARN} --eval-episodes 2",
    "filtered_bc": f"--rollouts 4 {ACT} --eval-episodes 2",
    "ppo": "--rollouts 3 --minibatch 2 --epochs 1 --eval-episodes 2",
    "loop_ppo": "--tasks 2 --rollouts 3 --finish-each 3 --worlds 3 --minibatch 2 --eval-episodes 2",
    "start": "--temperatures 1 --hold 3 --episodes 2",
}


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


@dataclass
class Args:
    worlds: tuple[str, ...] = WORLDS  # those in which runs are made
    methods: tuple[str, ...] = tuple(ROWS)  # rows that are run
    seeds: tuple[int, ...] = ()  # those that are run, 1 to 10; none: 1 to 5 on the subset, 1 to 3 elsewhere
    jobs: int = 1  # runs at a time, one thread each
    start: str = ""  # folder of the checkpoint that all start from; "" is each world's own
    other: str = ""  # folder of another one, for the row that compares both; "" leaves it out
    runs: Path = Path("runs/compare")  # folder of the runs
    out: Path = RESULTS  # folder of the CSVs; an empty one, with an empty --runs, runs everything anew
    dry: bool = False  # only print the commands
    quick: bool = False  # one seed, runs of two iterations, in a folder that is removed


# ---------------------------------------------------------- 2. one run
@dataclass(frozen=True)
class Cell:
    """A run of the table: what is typed, and the folder in which it makes its own."""

    about: str  # for people
    head: tuple[str, ...]  # script, and what stands before its flags
    flags: tuple[str, ...]
    seed: int
    iterations: int
    per: int  # dialogues an iteration
    folder: Path

    @property
    def script(self) -> str:
        """Its name, as in QUICK."""
        return script_of(self.head)

    def words(self) -> list[str]:
        """The command, from the beginning."""
        return [*self.head, *self.flags, "--runs", str(self.folder)]

    def words_to_go_on(self) -> list[str]:
        """The command that does what is missing: from the last checkpoint, if there is one."""
        if begun := sorted(self.folder.glob("*/checkpoint.pt")):
            return [*self.head, "--resume", str(begun[-1].parent)]
        return self.words()

    def finished(self) -> Path | None:
        """The folder of the run, if it has done all its iterations: an interrupted one has a summary, too."""
        for path in sorted(self.folder.glob("*/summary.json")):
            if read_json(path)["iteration"] >= self.iterations:
                return path.parent
        return None

    def judged(self) -> bool:
        """Whether it is finished, and evaluated: LOOP by a run of archer.py, others by themselves."""
        if self.script == "loop_ppo" and self.finished():
            return self.judge().finished() is not None
        return self.finished() is not None

    def diverged(self) -> bool:
        """Whether it ended in numbers that are none, which it would do again."""
        return (self.folder / "diverged.txt").exists()

    def judge(self) -> "Cell":
        """The run of archer.py that only evaluates what this one, finished, has learned: as others are."""
        env = self.flags[self.flags.index("--env") + 1]
        flags = ["--env", env, "--rollouts", "2", "--iterations", "0"]
        flags += ["--actor", f"{self.finished()}/actor"]
        if "--eval-episodes" in self.flags:  # a quick run
            flags += ["--eval-episodes", "2"]
        folder = self.folder / "judge"
        return Cell(f"{self.about}, evaluated", ("archer.py",), tuple(flags), self.seed, 0, 2, folder)


def script_of(head: tuple[str, ...]) -> str:
    """The name of a script.

    >>> script_of(("-m", "baselines.ppo")), script_of(("benchmarks/variants.py", "D4"))
    ('ppo', 'variants')
    """
    if head[0] == "-m":
        return head[1].split(".")[-1]
    return Path(head[0]).stem


def last(words: list[str], flag: str, usual: int) -> int:
    """A flag's value: the last one counts.

    >>> last(["--tasks", "2", "--tasks", "3"], "--tasks", 16)
    3
    """
    found = [words[i + 1] for i, word in enumerate(words) if word == flag]
    return int(found[-1]) if found else usual


def dialogues_of(script: str, words: list[str]) -> int:
    """Dialogues an iteration, where LOOP counts tasks and rollouts of each."""
    if script == "loop_ppo":
        return last(words, "--tasks", 16) * last(words, "--rollouts", 6)
    return last(words, "--rollouts", USUAL_ROLLOUTS.get(script, 128))


def cell_of(args: Args, world: str, name: str, setting: str, seed: int) -> Cell:
    """The run of a row in a world with a setting and a seed."""
    words = ROWS[name].command.replace("OTHER", args.other or "OTHER").split()
    n = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    head = tuple(words[:n])
    script = script_of(head)
    start = [("--model" if script == "loop_ppo" else "--actor"), args.start] if args.start else []
    own = [*start, *setting.split(), *words[n:]]
    if args.quick:
        own += QUICK[script].split()
    per = dialogues_of(script, own)
    own = [str(per * int(word[1:])) if re.fullmatch(r"x\d+", word) else word for word in own]
    iterations = 2 if args.quick else round(DIALOGUES[world] / per)
    evaluations = 1 if args.quick else EVALUATIONS
    every = str(math.ceil(iterations / evaluations))
    parts = [word for word in head if word != "-m"]
    slug = short(" ".join([*parts, *own, str(iterations), str(seed)]))
    flags = [*own, "--env", world, "--seed", str(seed), "--threads", "1", "--name", plain(name)]
    flags += ["--iterations", str(iterations)]
    if script == "loop_ppo":  # its own evaluations are not used: one at the start, one at the end
        flags += ["--save-every", every, "--eval-every", "0"]
    else:
        flags += ["--eval-every", every]
    about = f"{world}, seed {seed}: {name} {setting}".strip()
    return Cell(about, head, tuple(flags), seed, iterations, per, args.runs / world / slug)


def plain(text: str) -> str:
    """What a file can be called, and --name takes.

    >>> plain("--kl 0.02 checkpoints/new")
    '--kl_0.02_checkpoints_new'
    """
    return re.sub(r"[^\w.-]+", "_", text)


def short(text: str) -> str:
    """The same for long texts: their beginning, and a number by which others with this beginning differ."""
    name = plain(text)
    return name if len(name) < 120 else f"{name[:110]}_{zlib.crc32(text.encode()):08x}"


def read_json(path: Path) -> dict:
    """One object."""
    return json.loads(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------- 3. running them
CHILDREN = set()  # processes at work
STOPPED = threading.Event()
FAILED = []  # a line each


def launch(words: list[str]) -> str:
    """A script as a process; returns its stdout. A failure is told by its last line."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    # A session of its own: Ctrl-C is handed on by stop_all, once.
    child = subprocess.Popen([sys.executable, *words], env=env, start_new_session=True, **options)
    CHILDREN.add(child)
    out, err = child.communicate()
    CHILDREN.discard(child)
    if child.returncode != 0:
        raise RuntimeError((err.strip().splitlines() or ["no message"])[-1])
    return out


def call(words: list[str]) -> str:
    """The same in this process, which saves the import of torch."""
    script, rest = words[0], words[1:]
    if script == "-m":
        script, rest = words[1].replace(".", "/") + ".py", words[2:]
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = [script, *rest]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError((err.getvalue().strip().splitlines() or ["no message"])[-1]) from end
    finally:
        sys.argv = before
    return out.getvalue()


def stop_all(number, frame) -> None:
    """A handler of signals: every run ends after its iteration, and none is begun."""
    print("stopping; the same command goes on", flush=True)
    STOPPED.set()
    for child in list(CHILDREN):
        child.terminate()


def run_cell(cell: Cell, start: Callable[[list[str]], str]) -> None:
    """Runs what of a cell is missing; what fails is told, and the others go on."""
    try:
        run_one(cell, start)
        if cell.script == "loop_ppo" and cell.seed != TUNING_SEED and cell.finished():
            run_one(cell.judge(), start)
    except RuntimeError as error:
        if STOPPED.is_set():  # it was not far enough to end well
            return
        if "diverged" in str(error):
            cell.folder.mkdir(parents=True, exist_ok=True)
            (cell.folder / "diverged.txt").write_text(f"{error}\n", encoding="utf-8")
        FAILED.append(f"{cell.about}: {error}")
        print(FAILED[-1], file=sys.stderr, flush=True)


def run_one(cell: Cell, start: Callable[[list[str]], str]) -> None:
    """Runs a command, unless it has been run or nothing is to begin."""
    if STOPPED.is_set() or cell.diverged() or cell.finished():
        return
    print(cell.about, flush=True)
    start(cell.words_to_go_on())
    if not (cell.finished() or STOPPED.is_set()):
        raise RuntimeError("it was interrupted; the same command goes on")


def run_start(args: Args, world: str, start: Callable[[list[str]], str]) -> None:
    """What the checkpoint earns without learning, as text in a file; made unless it is there."""
    path = start_file(args, world)
    if path.exists() or recorded_start(args, world) or STOPPED.is_set():
        return
    checkpoint = args.start or ROOT / "checkpoints" / world.removesuffix("-subset")
    words = ["benchmarks/start.py", str(checkpoint), "--env", world]
    words += QUICK["start"].split() if args.quick else []
    print(f"{world}: start", flush=True)
    try:
        said = start(words)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said, encoding="utf-8")
    except RuntimeError as error:
        if not STOPPED.is_set():
            FAILED.append(f"{world}, start: {error}")


def start_file(args: Args, world: str) -> Path:
    """Where `run_start` leaves it: another checkpoint, another file."""
    return args.runs / world / f"start{plain(args.start)}.txt"


def run_all(cells: list[Cell], args: Args) -> None:
    """Runs cells, `jobs` at a time."""
    if args.quick or args.jobs == 1:
        for cell in cells:
            run_cell(cell, call if args.quick else launch)
        return
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda cell: run_cell(cell, launch), cells))


# ---------------------------------------------------------- 4. settings
def tries_of(args: Args, name: str) -> tuple[str, ...]:
    """The settings among which a row's is chosen, which may be those of another row."""
    tries = ROWS[ROWS[name].like or name].tries
    return tries[:1] if args.quick else tries


def tuning_cells(args: Args, world: str, name: str) -> dict[str, Cell]:
    """By setting: the run that tells what it is worth; none where there is no choice."""
    tries = tries_of(args, name)
    owner = ROWS[name].like or name
    if len(tries) == 1:
        return {}
    return {setting: cell_of(args, world, owner, setting, TUNING_SEED) for setting in tries}


def setting_of(args: Args, world: str, name: str) -> str | None:
    """The setting of a row, or None as long as it is not decided."""
    areas = areas_of(args, world, name)
    return choose(areas) if areas else tries_of(args, name)[0]


def areas_of(args: Args, world: str, name: str) -> dict[str, float | None]:
    """By setting, the area of its run, made here or read; none where there is no choice."""
    recorded = {line["run"]: line["area"] for line in lines_of(args, world, "tuning")}
    cells = tuning_cells(args, world, name)
    return {setting: area_of(cell, recorded) for setting, cell in cells.items()}


def area_of(cell: Cell, recorded: dict[str, float]) -> float | None:
    """The area of a run, or else what is recorded; None before its end, and of one that diverged -inf."""
    if cell.diverged():
        return -math.inf
    run = cell.finished()
    return area(curve_of(cell, run)) if run else recorded.get(cell.folder.name)


def choose(areas: dict[str, float | None]) -> str | None:
    """The setting with the largest area, of equals the first; None if one is not known.

    >>> choose({"a": -9.0, "b": -8.0, "c": -8.0}), choose({"a": -9.0, "b": None})
    ('b', None)
    """
    if None in areas.values():
        return None
    return max(areas, key=areas.get)


def seeds_of(args: Args, world: str) -> tuple[int, ...]:
    """The seeds that are run."""
    usual = tuple(range(1, SEEDS[world] + 1))
    return (1,) if args.quick else args.seeds or usual


def names_in(args: Args, world: str) -> list[str]:
    """The rows that are run in a world."""
    names = [name for name in args.methods if world in ROWS[name].worlds]
    return [name for name in names if args.other or "OTHER" not in ROWS[name].command]


# ---------------------------------------------------------- 5. curves and figures
def curve(metrics: list[dict], summary: dict, per: int) -> list[dict]:
    """A run by iteration: dialogues and CPU-seconds so far, return of its rollouts, evaluations."""
    tags = {"return": "rollout/return", "eval_sampled": "eval/return", "eval_greedy": "eval/return_greedy"}
    first = max(0, summary["episodes"] - summary["iteration"] * per)  # played before the first iteration
    points = []
    for row in metrics:
        n = row["iteration"]
        seconds = round(row["time/cpu_seconds"], 2)
        point = {"iteration": n, "dialogues": first + n * per, "cpu_seconds": seconds}
        points.append(point | {name: row[tag] for name, tag in tags.items() if tag in row})
    return points


def curve_of(cell: Cell, run: Path) -> list[dict]:
    """The curve of a finished run. LOOP's evaluations are those of its judge: at the end only."""
    points = curve(read_lines(run / "metrics.jsonl"), read_json(run / "summary.json"), cell.per)
    if cell.script != "loop_ppo":
        return points
    points = [{k: v for k, v in point.items() if not k.startswith("eval")} for point in points]
    if judged := cell.judge().finished():
        verdict = read_json(judged / "summary.json")
        points[-1]["eval_sampled"] = verdict["eval_return"]
        points[-1]["eval_greedy"] = verdict["eval_return_greedy"]
    return points


def area(points: list[dict]) -> float:
    """Area under the rollouts' return by dialogues, over its width: the return of the mean dialogue.

    A batch that is played before the first iteration, as ArCHer's, is not in it.

    >>> area([{"eval_sampled": 0.0}, {"return": -3.0}, {"return": -1.0}])
    -2.0
    """
    return fmean(point["return"] for point in points if "return" in point)


def crossing(points: list[dict], level: float, axis: str) -> float | None:
    """Where on the axis the return first reaches a level; None: never.

    It is the mean of the last 3 iterations; of more, if they have fewer than 192 dialogues, so that small
    iterations do not get there by chance.
    """
    points = [point for point in points if "return" in point]
    if len(points) < 3:
        return None
    per = points[1]["dialogues"] - points[0]["dialogues"]
    width = max(3, math.ceil(192 / per))
    for end in range(width, len(points) + 1):
        if fmean(point["return"] for point in points[end - width : end]) >= level:
            return points[end - 1][axis]
    return None


def reached(places: list[float | None]) -> str:
    """Mean of the seeds that got there, and how many did if not all.

    >>> reached([100, 200]), reached([100, None]), reached([None])
    ('150', '100 (1 of 2)', 'never')
    """
    there = [place for place in places if place is not None]
    if not there:
        return "never"
    share = "" if len(there) == len(places) else f" ({len(there)} of {len(places)})"
    return f"{fmean(there):.0f}{share}"


def figures(world: str, curves: list[list[dict]]) -> dict:
    """What the summary has of the seeds of a row."""
    found = {"seeds": len(curves)}
    ends = {
        "sampled": [points[-1].get("eval_sampled") for points in curves],
        "greedy": [points[-1].get("eval_greedy") for points in curves],
        "area": [area(points) for points in curves],
    }
    for name, values in ends.items():
        if None not in values:
            found[name] = round(fmean(values), 3)
            found[f"{name}_half"] = round(half_width(values), 3)
    for k, level in enumerate(LEVELS[world], 1):
        found[f"level_{k}"] = level
        for axis in ("dialogues", "cpu_seconds"):
            found[f"{axis}_{k}"] = reached([crossing(points, level, axis) for points in curves])
    for axis in ("dialogues", "cpu_seconds"):
        found[axis] = round(fmean(points[-1][axis] for points in curves), 1)
    return found


def start_figures(text: str) -> dict[str, float]:
    """Returns by the names that benchmarks/start.py prints.

    >>> start_figures("greedy      return  -8.71 ± 0.2  success 1\\nbest: greedy: return -8.71, success 1")
    {'greedy': -8.71}
    """
    lines = re.findall(r"^(?!best:)(.+?) +return +(-?[\d.]+) ±", text, re.M)
    return {name: float(value) for name, value in lines}


# ---------------------------------------------------------- 6. what the CSVs have
def lines_of(args: Args, world: str, table: str) -> list[dict]:
    """The lines of a world in `compare_TABLE.csv`."""
    return [line for line in read_results(args.out / f"compare_{table}.csv") if line["world"] == world]


def recorded_start(args: Args, world: str) -> list[dict]:
    """The summary's lines about the start."""
    return [line for line in lines_of(args, world, "summary") if line["method"].startswith("start")]


def recorded_curves(args: Args, world: str) -> dict[str, list[dict]]:
    """The curves of a world, by the name of the run's folder."""
    curves = defaultdict(list)
    for line in read_results(args.out / f"compare_{world}.csv"):
        point = {name: value for name, value in line.items() if name not in ("method", "seed", "run")}
        curves[line["method"], line["run"]].append(point)
    return {run: points for (_, run), points in curves.items()}  # two rows may share one


def missing(args: Args, world: str) -> list[Cell]:
    """The runs that the CSVs do not have: of the settings, and of the rows whose setting is decided."""
    settings = {line["run"] for line in lines_of(args, world, "tuning")}
    curves = recorded_curves(args, world)
    cells = []
    for name in names_in(args, world):
        tuning = tuning_cells(args, world, name).values()
        cells += [cell for cell in tuning if cell.folder.name not in settings]
        setting = setting_of(args, world, name)
        if setting is not None:
            seeds = [cell_of(args, world, name, setting, seed) for seed in seeds_of(args, world)]
            cells += [cell for cell in seeds if cell.folder.name not in curves]
    return list({cell.folder: cell for cell in cells}.values())  # two rows may share one


# ---------------------------------------------------------- 7. what comes out
def collect(args: Args, world: str) -> tuple[list[dict], list[dict], list[dict]]:
    """Of a world, whatever was run or is recorded: all curves, the summary, and the areas of the settings."""
    curves, summary, tuning = [], recorded_start(args, world), []
    recorded = recorded_curves(args, world)
    if not summary and start_file(args, world).exists():
        earned = start_figures(start_file(args, world).read_text(encoding="utf-8"))
        best = max(earned, key=earned.get)
        play = {"sampled": earned["temperature 1"], "greedy": earned["greedy"]}
        summary.append({"world": world, "method": "start"} | play)
        summary.append({"world": world, "method": f"start: {best}", "sampled": earned[best]})
    gone = rows_diverged(args, world)
    for name in names_in(replace(args, methods=tuple(ROWS)), world):
        setting = setting_of(args, world, name)
        if name in METHODS:
            areas, cells = areas_of(args, world, name), tuning_cells(args, world, name)
            for words, value in areas.items():
                if value is not None:
                    line = {"world": world, "method": name, "setting": words or "default", "area": value}
                    tuning.append(line | {"taken": words == setting, "run": cells[words].folder.name})
        if setting is None or name in gone:
            continue
        done = {}
        for cell in reported_cells(args, world, name):
            if cell.judged():
                done[cell] = curve_of(cell, cell.finished())
            elif cell.folder.name in recorded:
                done[cell] = recorded[cell.folder.name]
        for cell, points in done.items():
            about = {"method": name, "seed": cell.seed, "run": cell.folder.name}
            curves += [about | point for point in points]
        if done:
            about = {"world": world, "method": name, "setting": setting or own_flags(name)}
            summary.append(about | figures(world, list(done.values())))
    return curves, summary, tuning


def reported_cells(args: Args, world: str, name: str) -> list[Cell]:
    """The runs of a row that may be reported; none as long as its setting is not decided."""
    setting = setting_of(args, world, name)
    if setting is None:
        return []
    return [cell_of(args, world, name, setting, seed) for seed in range(1, 11)]


def rows_diverged(args: Args, world: str) -> set[str]:
    """The rows of which a reported seed diverged: the mean of the others would be better than the method."""
    names = names_in(replace(args, methods=tuple(ROWS)), world)
    return {name for name in names if any(cell.diverged() for cell in reported_cells(args, world, name))}


def own_flags(name: str) -> str:
    """What a row without settings to try is run with.

    >>> own_flags("ArCHer, td"), own_flags("ArCHer")
    ('--kl 0.02', 'default')
    """
    words = ROWS[name].command.split()
    flags = next((words[i:] for i, word in enumerate(words) if word.startswith("--")), ["default"])
    return " ".join(flags)


def report(args: Args) -> str:
    """Writes the CSVs of what is there, and returns the summary as markdown. What is not new is kept."""
    tables = []
    for world in WORLDS:
        curves, summary, tuning = collect(args, world)
        gone = rows_diverged(args, world)
        keep(args.out / f"compare_{world}.csv", curves, ("method",), {(name,) for name in gone})
        gone = {(world, name) for name in gone}
        summary = keep(args.out / "compare_summary.csv", summary, ("world", "method"), gone, place_of)
        keep(args.out / "compare_tuning.csv", tuning, ("world", "run"))
        if summary := [line for line in summary if line["world"] == world]:
            tables.append(markdown(world, summary))
        if others := paired(args, world):
            tables.append(others)
    return "\n\n".join(tables)


def place_of(line: dict) -> tuple[int, int]:
    """Where a line of the summary belongs: worlds and rows in the order of the table, the start first."""
    method = line["method"]
    place = -1 if method.startswith("start") else len(ROWS)  # that of a row which is no more
    return WORLDS.index(line["world"]), list(ROWS).index(method) if method in ROWS else place


def keep(
    path: Path,
    lines: list[dict],
    key: tuple[str, ...],
    gone: set[tuple] = frozenset(),
    order: Callable | None = None,
) -> list[dict]:
    """Adds lines to a CSV in the place of those with the same key, and drops what is gone; returns all."""
    dropped = gone | {tuple(line[name] for name in key) for line in lines}
    before = read_results(path)
    kept = [line for line in before if tuple(line[name] for name in key) not in dropped]
    together = sorted(kept + lines, key=order) if order else kept + lines
    if lines or kept != before:
        write_results(path, together)
    return together


def markdown(world: str, summary: list[dict]) -> str:
    """A world's summary as a table: means, and the half width of the 95 % interval over the seeds."""
    levels = LEVELS[world]
    heads = ["method", "setting", "seeds", "sampled", "greedy", "area"]
    heads += [f"dialogues; CPU-seconds to {levels[0]}", *(f"to {level}" for level in levels[1:]), "in all"]
    lines = [f"{world}:", "", f"| {' | '.join(heads)} |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for row in summary:
        setting = row.get("setting", "")
        parts = [row["method"], f"`{setting}`" if setting.startswith("-") else setting]
        parts += [str(row.get("seeds", "")), *(with_half(row, key) for key in ("sampled", "greedy", "area"))]
        parts += [reached_in(row, k) for k in range(1, len(levels) + 1)]
        parts.append(f"{row['cpu_seconds']:.0f}" if "cpu_seconds" in row else "")
        lines.append(f"| {' | '.join(parts)} |")
    return "\n".join(lines)


def reached_in(row: dict, k: int) -> str:
    """When the k-th level was reached, in dialogues and CPU-seconds.

    >>> reached_in({"dialogues_1": "100 (1 of 2)", "cpu_seconds_1": "30 (1 of 2)"}, 1)
    '100; 30 (1 of 2)'
    """
    dialogues, seconds = str(row.get(f"dialogues_{k}", "")), str(row.get(f"cpu_seconds_{k}", ""))
    return f"{dialogues.split()[0]}; {seconds}" if seconds[:1].isdigit() else seconds


def with_half(row: dict, key: str) -> str:
    """A mean with its half width; of two seeds both figures, of one seed its own, of none "-".

    >>> row = {"area": -3.0, "area_half": 0.25}
    >>> with_half(row | {"seeds": 3}, "area"), with_half(row | {"seeds": 2}, "area"), with_half({}, "area")
    ('-3.00 ± 0.25', '-3.25, -2.75', '-')
    """
    if key not in row:
        return "-"
    mean, seeds = row[key], row.get("seeds", 1)
    if seeds < 2:
        return f"{mean:.2f}"
    half = row[f"{key}_half"]
    return f"{mean:.2f} ± {half:.2f}" if seeds > 2 else f"{mean - half:.2f}, {mean + half:.2f}"


def paired(args: Args, world: str) -> str:
    """Each method less PPO as a table, of the seeds that both have; and when it is where PPO ends, by seed.

    That is the mean of PPO's sampled returns at the end. Empty if there is no PPO.
    """
    curves = defaultdict(lambda: defaultdict(list))
    for line in read_results(args.out / f"compare_{world}.csv"):
        curves[line["method"]][line["seed"]].append(line)
    plain = curves.get(PLAIN, {})
    ends = [points[-1].get("eval_sampled") for points in plain.values()]
    if not plain or None in ends:
        return ""
    rows = []
    for name in ROWS:
        pairs = [(curves[name][seed], plain[seed]) for seed in plain if seed in curves[name]]
        if not pairs or (name != PLAIN and pairs[0][0][0]["run"] == pairs[0][1][0]["run"]):
            continue  # it is not run, or is PPO by another name
        gains = ["", "", ""]
        if name != PLAIN:
            gains = [less(pairs, "eval_sampled"), less(pairs, "eval_greedy")]
            gains.append(interval([area(ours) - area(theirs) for ours, theirs in pairs], digits=2))
        places = [crossing(ours, fmean(ends), "dialogues") for ours, _ in pairs]
        when = ", ".join(str(place or "never") for place in places)
        rows.append(f"| {' | '.join([name, str(len(pairs)), *gains, when])} |")
    heads = [f"less {PLAIN}", "seeds", "sampled", "greedy", "area", f"dialogues to {fmean(ends):.2f}"]
    return "\n".join([f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1), *rows])


def less(pairs: list[tuple[list[dict], list[dict]]], key: str) -> str:
    """The mean difference of two curves' ends with its interval, or "-" where a run has no such figure.

    >>> less([([{"eval_sampled": -1.0}], [{"eval_sampled": -3.0}])], "eval_sampled")
    '2.00'
    """
    ends = [(ours[-1].get(key), theirs[-1].get(key)) for ours, theirs in pairs]
    if any(None in pair for pair in ends):
        return "-"
    return interval([ours - theirs for ours, theirs in ends], digits=2)


def state_of(cell: Cell) -> str:
    """How far a run has come, in a word."""
    if cell.diverged():
        return "diverged"
    if cell.finished():
        return "done"
    return "begun" if any(cell.folder.glob("*/checkpoint.pt")) else ""


def dry(args: Args) -> str:
    """The commands of which the CSVs have no result, a line each, and how far they are."""
    lines, left = [], 0
    for world in args.worlds:
        for name in names_in(args, world):
            if setting_of(args, world, name) is None:
                lines.append(f"after tuning   {name} in {world}, {len(seeds_of(args, world))} seeds")
        for cell in missing(args, world):
            lines.append(f"{state_of(cell):14} {' '.join(cell.words())}")
            left += not (cell.finished() or cell.diverged())
    return "\n".join([*lines, f"{left} are to be run, and what has to wait for tuning"])


# ---------------------------------------------------------- 8. all of it
def check(args: Args) -> None:
    """Stops for what cannot be run."""
    for given, known, flag in ((args.worlds, WORLDS, "worlds"), (args.methods, ROWS, "methods")):
        if unknown := sorted(set(given) - set(known)):
            stop(f"--{flag} {unknown[0]}: there are {', '.join(known)}")
    if args.start and args.out.resolve() == RESULTS:
        stop("--start: its results need a folder of their own; name one with --out")
    if args.jobs < 1 or not set(args.seeds) <= set(range(1, 11)):
        stop("--jobs must be at least 1, and --seeds from 1 to 10")
    for name, row in METHODS.items():
        if len(row.tries) != TRIES:
            stop(f"{name} tries {len(row.tries)} settings; each method has {TRIES}")


def run_world(args: Args, world: str) -> None:
    """All runs of a world: the start, the settings, then the rows with the setting that was best."""
    run_start(args, world, call if args.quick else launch)
    run_all([cell for cell in missing(args, world) if cell.seed == TUNING_SEED], args)
    run_all([cell for cell in missing(args, world) if cell.seed != TUNING_SEED], args)


def quick(args: Args) -> str:
    """All rows, tiny, each in one world, in a folder that is removed; pictures, too. None may be absent."""
    import plot

    with TemporaryDirectory() as place:
        folder = Path(place)
        other = args.other or str(ROOT / "checkpoints" / FULL)
        args = replace(args, runs=folder / "runs", out=folder, other=other)
        rows, seen = {}, set()
        for world in args.worlds:
            rows[world] = [name for name in names_in(args, world) if name not in seen]
            seen.update(rows[world])
            run_world(replace(args, methods=tuple(rows[world])), world)
        table = report(args)
        for world, names in rows.items():
            path = folder / f"compare_{world}.csv"
            if names:
                plot.main(plot.Args(runs=[path], out=path.with_suffix(".svg")))
            absent = set(names) - {line["method"] for line in read_results(path)}
            FAILED.extend(f"{world}: no curve of {name}" for name in sorted(absent))
    return table


def main(args: Args) -> str:
    """Runs what is missing, writes the CSVs, and returns the summary as markdown."""
    check(args)
    args = replace(args, runs=args.runs.absolute(), out=args.out.absolute())
    if args.dry:
        table = dry(args)
    elif args.quick:
        table = quick(args)
    else:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop_all)
        for world in args.worlds:
            run_world(args, world)
        table = report(args)
    print(table)
    if FAILED:
        stop(f"{len(FAILED)} failed: {FAILED[0]}")
    return table


if __name__ == "__main__":
    main(tyro.cli(Args, description=(__doc__ or "").split("\n")[0]))
