"""What the scripts share beside their algorithms: the command line, and what a run leaves on the disk.

JSON appears whole or not at all, a run belongs to one process at a time, and what is wrong is one line.
"""

import errno
import fcntl
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import envs


# ---------------------------------------------------------- 1. the command line
def cli(kind: type, main: Callable) -> None:
    """Calls `main` with the command line as a `kind`; whatever goes wrong is one line and exit code 2.

    With --resume the run's own arguments hold, unless given anew.
    """
    UNSAVED.clear()
    try:
        args = parse(kind, kind())
        if args.resume:
            saved = saved_args(kind, Path(args.resume))
            args = parse(kind, saved)
            if args.runs != saved.runs:
                raise ValueError(f"--runs {args.runs}: a run that goes on stays in its folder, {args.resume}")
            lock(Path(args.resume))
        check(args)
        main(args)
        if UNSAVED:
            raise OSError(f"{UNSAVED[0]}; what is saved there is of an earlier iteration")
    except (ValueError, TypeError, OSError, ArithmeticError, envs.Unavailable, envs.WorldBroken) as error:
        stop(f"disk full: {error}" if getattr(error, "errno", None) in FULL else error)
    except KeyboardInterrupt:
        stop("stopped before there was anything to save")


def stop(reason: object) -> None:
    """Ends the program with one line."""
    print(f"{Path(sys.argv[0]).name}: {reason}".splitlines()[0], file=sys.stderr)
    sys.exit(2)


def parse(kind: type, default):
    """The command line as a `kind`. In its help, the fields below a comment `# --- NAME` are a group.

    Raises ValueError for nan and negative numbers; for 0, unless it is the default, and for inf, unless the
    comment behind the field speaks of them.
    """
    import tyro  # here: who only looks at runs does without the packages of who makes them

    hints, abouts, groups, group = get_type_hints(kind), {}, defaultdict(list), "options"
    for line in inspect.getsource(kind).splitlines():
        if title := re.fullmatch(r" +# --- (\w+)", line):
            group = title[1]
        elif found := re.match(r" +(\w+): .*?  # (.*)", line):
            name, abouts[found[1]] = found.groups()
            hint = Annotated[hints[name], tyro.conf.arg(help=abouts[name])]
            groups[group].append((name, hint, getattr(default, name)))
    parts = [(group, make_dataclass(group, rows)) for group, rows in groups.items()]
    whole = make_dataclass(kind.__name__, [(*part, field(default_factory=part[1])) for part in parts])
    given = vars(tyro.cli(tyro.conf.OmitArgPrefixes[whole])).values()
    values = {name: value for part in given for name, value in vars(part).items()}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        flag = f"--{name.replace('_', '-')} {value}"
        may_be_0 = getattr(kind, name) == 0 or re.search(r"(?<![\d.,])0(?!\.\d|\d)", abouts[name])
        may_be_inf = re.search(r"\binf\b", abouts[name])
        if math.isnan(value) or (math.isinf(value) and not may_be_inf):
            raise ValueError(f"{flag}: it must be a finite number")
        if value < 0 or (value == 0 and not may_be_0):
            raise ValueError(f"{flag}: it must be {'at least' if may_be_0 else 'above'} 0")
    return kind(**values)


def saved_args(kind: type, run: Path):
    """A run's arguments, from its args.json; ValueError for what is not a run of this script."""
    path, hints = run / "args.json", get_type_hints(kind)
    if not run.is_dir():
        raise ValueError(f"there is no folder {run}")
    if not path.exists():
        raise ValueError(f"{run} is not the folder of a run: it has no args.json")
    try:
        saved = dict(json.loads(path.read_text(encoding="utf-8")))
        for name, value in saved.items():
            if name not in hints:
                raise ValueError(f"{name} is no argument of this script")
            if not is_of(value, hints[name]):
                raise ValueError(f"{name} cannot be {value!r}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or of another script: {error}") from error
    return kind(**saved)


def is_of(value: object, hint) -> bool:
    """Whether a value from JSON is of a field's type. A whole number is a float, too; True is no number.

    >>> is_of(1, float), is_of(True, int), is_of("a", Literal["a", "b"])
    (True, False, True)
    """
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return type(value) is hint or (hint is float and type(value) is int)


# ---------------------------------------------------------- 2. what is wrong from the start
def check(args) -> None:
    """Raises ValueError for what would otherwise fail late, or go wrong in silence."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ValueError("WORLD_SIZE is above 1, but a run is one process: start it without torchrun")
    if not re.fullmatch(r"[\w.-]*", args.name):
        raise ValueError(f"--name {args.name}: a folder is named by it; take letters, digits, _ . and -")
    check_device(args.device)
    wanted = Path(args.resume or args.runs).absolute()
    place = next(path for path in (wanted, *wanted.parents) if path.exists())
    try:
        TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        flag = f"--resume {args.resume}" if args.resume else f"--runs {args.runs}"
        raise ValueError(f"{flag}: no folder can be made in {place}: {error.strerror}") from error


def check_device(device: str) -> None:
    """Raises ValueError if torch cannot compute there."""
    import torch

    try:
        torch.Generator(torch.zeros(1, device=device).device)
    except Exception as error:  # each kind of device has its own
        usable = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        usable += ["mps"] if torch.backends.mps.is_available() else []
        reason = re.split(r"\. |\n", str(error))[0]
        raise ValueError(f"--device {device}: not here, take {' or '.join(usable)}; {reason}") from error


def why_not_loaded(source: str, error: Exception, args=None) -> str:
    """Why there is no model in a folder, or of a name, which may have been meant for a folder.

    With the arguments of a script, a folder that none of them names is its own choice: it is one in
    checkpoints/ that this world does not have, and `sft.py` makes another.
    """
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if Path(source, "actor").is_dir():
        return f"it is the folder of a run; its model is in {Path(source, 'actor')}"
    if Path(source).exists():
        return reason
    if args is not None and source not in vars(args).values():
        flag = "--actor" if hasattr(args, "actor") else "--model"
        world = f" --world {args.world}" if args.world else ""
        sft = f"python sft.py --env {args.env}{world} makes a model in a folder that it prints"
        return f"there is no such folder; {sft}: then {flag} FOLDER/actor"
    is_name = source.count("/") <= 1 and source[:1] not in (".", "/", "~")
    return f"there is no such folder; as a name: {reason}" if is_name else "there is no such folder"


# ---------------------------------------------------------- 3. a run's folder
LOCKS = []  # files that stay open as long as this process lives
FULL = (errno.ENOSPC, errno.EDQUOT)
UNSAVED = []  # why the last attempt to save has failed; empty if it has not


def folder(args, script: str) -> Path:
    """The folder of a run that goes on, or a new one: `runs`/ENV__SCRIPT__SEED__TIME.

    The run's name, if it has one, stands before the time. The time has microseconds, as twins start together.
    """
    if args.resume:
        return Path(args.resume)
    now, env = time.time_ns(), re.sub(r"[^\w.-]", "-", args.env)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{now // 1000 % 10**6:06d}"
    parts = [env, script, str(args.seed), args.name, stamp]
    path = Path(args.runs, "__".join(part for part in parts if part))
    path.mkdir(parents=True)
    lock(path)
    return path


def lock(run: Path) -> None:
    """Keeps other processes from a run until this one has ended, in whichever way.

    Raises ValueError if another one has it. The file with the number of the process stays, and then means
    nothing: the lock is the system's.
    """
    file = (run / "lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(f"{run}: process {file.read().strip() or '?'} is at work on it") from None
    except OSError:  # a file system without locks
        return
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    LOCKS.append(file)


def write(path: Path, records: list[dict], indent: int | None = None) -> None:
    """JSON, a line each. The file appears whole or not at all: written under another name, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    lines = [json.dumps(record, indent=indent) + "\n" for record in records]
    temporary.write_text("".join(lines), encoding="utf-8")
    temporary.replace(path)


def card(run: Path, name: str) -> str:
    """The README.md of a saved model, which Hugging Face shows: what it is, and how it is spoken to."""
    known = run / "args.json"
    args = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    logged = (run / "metrics.jsonl").read_text(encoding="utf-8") if (run / "metrics.jsonl").exists() else ""
    rows = [row for line in logged.splitlines() if "eval/return" in (row := json.loads(line))]
    rows = [
        {tag: row[tag] for tag in row if tag in ("iteration", "eval/return", "eval/return_greedy")}
        for row in rows
    ]
    start = args.get("actor") or args.get("model") or args.get("encoder") or "the ready-made checkpoint"
    return f"""# {name}, trained in the world {args.get("env", "?")}

Saved by {Path(sys.argv[0]).name} of TurnRL in the run {run.name}.

| | |
|---|---|
| started from | {start} |
| last evaluation | {json.dumps(rows[-1]) if rows else "see metrics.jsonl of the run"} |
| prompt | what the world says; then action, end token, reply, action, end token ... each tokenised apart |
| licence | that of what it started from; MIT where that is of TurnRL itself |
"""


@contextmanager
def saving(run: Path, iteration: int) -> Iterator[None]:
    """What cannot be written in this context costs nothing that was learned: the run says so and goes on.

    The next time may be better; if the last one was not, `cli` ends with exit code 2.
    """
    UNSAVED.clear()
    try:
        yield
    except Exception as error:  # each of the libraries that write has its own
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = f"disk full ({said})" if is_full(run, error) else said
        UNSAVED.append(f"{run}: not saved at iteration {iteration}: {reason}")
        print(f"not saved at iteration {iteration}: {reason}", flush=True)
        for path in run.glob("*.tmp"):  # what is half-written takes the room of what could be whole
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_full(run: Path, error: Exception) -> bool:
    """Whether it was for want of room: safetensors says so only in words, and torch not at all."""
    is_known = getattr(error, "errno", None) in FULL
    return is_known or "os error 28" in str(error) or shutil.disk_usage(run).free < 2**16


# ---------------------------------------------------------- 4. what is logged
def means(logs: list[dict[str, float]]) -> dict[str, float]:
    """Each figure's mean over the updates that have it. nan does not count, and remains where all is nan.

    >>> means([{"a": 1.0, "b": math.nan}, {"a": 2.0, "c": 5.0}])
    {'a': 1.5, 'b': nan, 'c': 5.0}
    """
    figures = defaultdict(list)
    for row in logs:
        for tag, figure in row.items():
            figures[tag] += [] if math.isnan(figure) else [figure]
    return {tag: fmean(known) if known else math.nan for tag, known in figures.items()}


def log(writer, iteration: int, metrics: dict[str, float], shown: str) -> dict[str, float]:
    """Writes figures to TensorBoard, prints those whose tag has `shown` in it, returns a metrics.jsonl row.

    A figure that is nan is not defined, as what is explained of no variance: it is printed "-", and left out.
    """
    defined = {tag: figure for tag, figure in metrics.items() if not math.isnan(figure)}
    for tag, figure in defined.items():
        writer.add_scalar(tag, figure, iteration)
    words = [f"{iteration:5d}"]
    for tag in metrics:
        if re.search(shown, tag):
            words.append(f"{tag} {defined[tag]:.4g}" if tag in defined else f"{tag} -")
    print("  ".join(words), flush=True)
    return {"iteration": iteration} | defined


def commit() -> str:
    """The commit of this checkout, with "-dirty" if files have changed."""
    if not shutil.which("git"):
        return "unknown"
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


COMMIT = commit()  # when the run began: files may change while it lasts


def facts() -> dict:
    """Peak memory of this process in MB, and the commit from which it was started."""
    memory = getrusage(RUSAGE_SELF).ru_maxrss  # KiB, on a Mac bytes
    return {"peak_memory_mb": memory / (2**20 if sys.platform == "darwin" else 2**10), "commit": COMMIT}


def stop_signals() -> list:
    """A list that is empty until Ctrl-C or SIGTERM asks the run to stop; asked twice, it stops at once."""
    asked = []

    def ask(number, frame):
        print("stopping after this iteration; --resume goes on from there", flush=True)
        signal.signal(number, signal.SIG_DFL)
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return asked
