"""What the scripts share beside their algorithms and models: the command line, and the books of a run.

JSON appears whole or not at all, a run belongs to one process at a time, and what is wrong is one line.
"""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Literal, get_args, get_origin, get_type_hints

import envs

# numpy, torch, transformers and tyro are imported where they are used: who only looks at runs does without.


# ---------------------------------------------------------- 1. the command line
# What a run that goes on has from its beginning: the weights that it reads again, and its data.
FIXED = ("env", "actor", "model", "seed", "dataset", "dataset_size", "dataset_seed", "mix", "demonstrations")
FIXED += ("fresh", "keep", "drills", "exchanged", "vocabulary", "phrases", "batch", "task", "simplifications")
FIXED += ("step_limit",)


def cli(kind: type, main: Callable) -> None:
    """Calls `main` with the command line as a `kind`; bad input is one line and exit code 2.

    So is every error of the kinds below; one that nobody has raised in words comes with its place. With
    --resume the run's own arguments hold, unless given anew; those of FIXED cannot be.
    """
    import tyro

    try:
        args = tyro.cli(kind)
        if args.resume:
            saved = saved_args(kind, Path(args.resume))
            args = tyro.cli(kind, default=saved)
            if args.runs != saved.runs:
                raise ValueError(f"--runs {args.runs}: a run that goes on stays in its folder, {args.resume}")
            for name in FIXED:
                given, began = getattr(args, name, ""), getattr(saved, name, "")
                if given != began:
                    flag = f"--{name.replace('_', '-')} {given}"
                    began = "the default" if began == "" else began
                    raise ValueError(f"{flag}: {args.resume} is a run of {began}; start a new one")
            if getattr(args, "world", "") != getattr(saved, "world", ""):  # it may have moved: url=, root=
                say(f"goes on with --world {args.world!r}, and began with {saved.world!r}")
        main(args)
        leave()
    except (ValueError, TypeError, OSError, ArithmeticError, envs.Unavailable, envs.WorldBroken) as error:
        stop(f"disk full: {error}" if getattr(error, "errno", None) in FULL else f"{error}{place_of(error)}")
    except KeyboardInterrupt:
        stop("stopped before there was anything to save")


def place_of(error: Exception) -> str:
    """Where Python itself has raised an error, as somebody's change of a script may make it do."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = "site-packages" not in frame.filename and not frame.filename.startswith(sys.base_prefix)
    if isinstance(error, OSError) or not is_ours or (frame.line or "").startswith("raise"):
        return ""
    return f" ({type(error).__name__} in {frame.filename}, line {frame.lineno})"


def say(text: str) -> None:
    """Prints a line. That nobody reads it any more, or a full disk, costs nothing that was learned."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Ctrl-C has ended the `tee` behind us, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        pass


def leave() -> None:
    """Ends a process that worked with others at once.

    Threads of torch.distributed may still let go of tensors, for which they need the interpreter: if it is
    ending by then, they abort, and torchrun takes a run that is done for one that has failed.
    """
    if processes() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def stop(reason: object) -> None:
    """Ends the program with one line."""
    print(f"{Path(sys.argv[0]).name}: {reason}".splitlines()[0], file=sys.stderr)
    sys.exit(2)


OF_ONE_SIBLING = {"engine": ""}  # arguments that only a *_multigpu.py has, and their value without effect


def saved_args(kind: type, run: Path):
    """A run's arguments, from its args.json; ValueError for what is not a run of this script."""
    path, hints = run / "args.json", get_type_hints(kind)
    if not run.is_dir():
        raise ValueError(f"there is no folder {run}")
    if not path.exists():
        raise ValueError(f"{run} is not the folder of a run: it has no args.json")
    try:
        saved = dict(json.loads(path.read_text(encoding="utf-8")))
        for name, value in OF_ONE_SIBLING.items():  # a run of either can go on with the other
            if name in hints:
                saved.setdefault(name, value)
            elif saved.get(name) == value:
                del saved[name]
        for name, value in saved.items():
            if name not in hints:
                raise ValueError(f"{name} is no argument of this script")
            if not is_of(value, hints[name]):
                raise ValueError(f"{name} cannot be {value!r}")
        if absent := sorted(set(hints) - set(saved)):  # today's default need not be that of its beginning
            raise ValueError(f"no {absent[0]} is in it, so that another version began it; add what it had")
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


def check(args, script: str) -> None:
    """Raises ValueError for what would otherwise fail late, or go wrong in silence."""
    if processes() > 1 and not script.endswith("_multigpu"):
        sibling = Path(__file__).parents[1] / f"{script}_multigpu.py"
        other = f"give it {sibling.name}" if sibling.exists() else "start it without torchrun"
        raise ValueError(f"torchrun starts {processes()} processes, but this script is for one: {other}")
    for name, value in vars(args).items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"--{name.replace('_', '-')} nan: it must be a number")
    if not re.fullmatch(r"[\w.-]*", args.name):
        raise ValueError(f"--name {args.name}: a folder is named by it; take letters, digits, _ . and -")
    if getattr(args, "temperature", 1) <= 0:
        raise ValueError(f"--temperature {args.temperature}: it must be above 0")  # else all would be nan
    counts = ("threads", "max_action_tokens", "epochs", "batch", "critic_batch", "actor_batch", "worlds")
    counts += ("logit_chunk", "steps", "top_k", "copy_every", "memory", "max_difficulty", "candidates")
    counts += ("negative_variations", "max_tokens", "dataset_size", "tasks", "rollouts")
    at_least = dict.fromkeys((*counts, "critic_pool", "buffer_size"), 1)
    at_least |= dict.fromkeys(("seed", "micro_batch", "reply_weight", "kl", "warmup"), 0)
    at_least["minibatch"] = 0 if script.startswith("loop") else 1  # 0: all
    at_least["eval_episodes"] = 0 if script.startswith(("loop", "lge", "sft")) else 1  # all, or none
    for name, least in at_least.items():
        if getattr(args, name, least) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be at least {least}")
    for name in ("gamma", "polyak"):
        if not 0 <= getattr(args, name, 1) <= 1:
            raise ValueError(f"--{name} {getattr(args, name)}: it must be between 0 and 1")
    if getattr(args, "max_grad_norm", 1) <= 0:  # below 0 it would unlearn
        raise ValueError(f"--max-grad-norm {args.max_grad_norm}: it must be above 0")
    if getattr(args, "buffer_size", math.inf) < getattr(args, "rollouts", 0):
        raise ValueError(f"--buffer-size {args.buffer_size}: it must be at least --rollouts {args.rollouts}")
    if 0 < getattr(args, "iterations", 0) <= getattr(args, "warmup", 0):
        say(f"The actor will not learn: all {args.iterations} iterations belong to --warmup {args.warmup}.")
    is_coarse = script.startswith(("loop", "sft")) and getattr(args, "dtype", "") == "bfloat16"
    if is_coarse and not args.lora and getattr(args, "iterations", 1) > 0:  # others keep float32 parameters
        raise ValueError("--dtype bfloat16: steps would be rounded away; give --lora, too")
    longest = getattr(args, "max_action_tokens", 0)
    if longest >= getattr(args, "context", math.inf):
        raise ValueError(f"--max-action-tokens {longest}: there is no room in --context {args.context}")
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
        torch.zeros(1, device=device).item()  # "meta" has no numbers
    except Exception as error:  # each kind of device has its own
        usable = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        usable += ["mps"] if torch.backends.mps.is_available() else []
        reason = re.split(r"\. |\n", str(error))[0]
        raise ValueError(f"--device {device}: not here, take {' or '.join(usable)}; {reason}") from error


def processes() -> int:
    """How many processes work on a run: one, or as many as torchrun has started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """The number of this process among them. Number 0 alone writes."""
    return int(os.environ["RANK"]) if processes() > 1 else 0


# ---------------------------------------------------------- 2. the books of a run
class Run:
    """The books of a run: clock, random numbers, folder, log, checkpoint and summary.

        run = runs.Run(args, "archer")  # the clock starts; run.rng is seeded
        ...                             # worlds, models, optimisers: what fails here leaves no folder
        run.start({"actor": actor, "optimizer": optimizer}, episodes=0)  # a new folder, or the one to resume
        for iteration in run.iterations(args.iterations):
            ...                         # the algorithm
            run.log(metrics, "return")
            if run.is_due(args.save_every) or run.stopped:
                run.save({"actor": actor})
        return run.finish()

    `args` need the fields seed, threads, device, runs, name, env and resume. `state` has what a script wants
    back when it resumes, beside its modules: numbers, which are in the summary, too, text, and lists and
    dicts of these.

    Of several processes the first one writes; the others print nothing, either. They all have to stop after
    the same iteration, so there a signal only sets `asked`: the script sets `stopped`.
    """

    def __init__(self, args, script: str, samples_file: str = "rollouts.jsonl"):
        """Raises ValueError for arguments with which no run can start, or if another process has the run."""
        import numpy
        import torch
        import transformers

        self.began, self.cpu_began = time.time(), time.process_time()
        self.commit = commit()  # now: files may change while the run lasts
        self.writes = rank() == 0
        if not self.writes:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # standard output
        check(args, script)
        if self.writes and args.resume:
            lock(Path(args.resume))
        if args.resume and not Path(args.resume, "checkpoint.pt").exists():
            raise ValueError(f"{args.resume} has no checkpoint: it ended before its first; start it again")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        # With bfloat16 what a GPU still multiplies in float32, as heads do, need not be exact.
        torch.backends.cuda.matmul.allow_tf32 = getattr(args, "dtype", "") == "bfloat16"
        self.rng = numpy.random.default_rng(args.seed)
        self.args, self.script, self.samples_file = args, script, samples_file
        self.iteration = self.began_at = 0
        self.metrics, self.samples = [], []  # the records of metrics.jsonl, and of samples_file
        self.asked = False  # whether Ctrl-C or SIGTERM has asked the run to end
        self.saved = None  # the iteration that `save` was last called in
        self.stopped = False  # whether it ends with this iteration
        self.unsaved = {}  # what could not be written the last time, and why

    def start(self, modules: dict, **state) -> None:
        """Makes the run's folder or, with --resume, puts back what its checkpoint has: also into `modules`.

        A module is anything with state_dict and load_state_dict.
        """
        self.modules, self.state = modules, state
        if self.args.resume:
            self.folder = Path(self.args.resume)
            self.restore()
        elif self.writes:
            self.folder = new_folder(self.args, self.script)
        if not self.writes:
            return
        write_json(self.folder / "args.json", asdict(replace(self.args, resume="")))
        print(self.folder)
        self.open_curves()
        rows = [f"|{name}|{value}|\n" for name, value in vars(self.args).items()]
        self.writer.add_text("args", "|name|value|\n|-|-|\n" + "".join(rows))
        self.writer.flush()  # what cannot be written is known now

    def open_curves(self) -> None:
        """A new file for TensorBoard; of older ones counts what was before the next iteration."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=self.iteration + 1)

    def restore(self) -> None:
        """Puts a checkpoint back; ValueError if that does not work."""
        import torch

        path = self.folder / "checkpoint.pt"
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            for name, module in self.modules.items():
                module.load_state_dict(saved["modules"][name])
            self.rng.bit_generator.state = saved["rng"]
            torch.set_rng_state(saved["torch_rng"])
            self.iteration = self.began_at = saved["iteration"]
            self.state = saved["state"]
            self.metrics, self.samples = saved["metrics"], saved["samples"]
            self.began -= saved["seconds"]
            self.cpu_began -= saved["cpu_seconds"]
        except Exception as error:  # a damaged file, or another model, can raise anything
            said = " ".join(str(error).split())[:300]
            raise ValueError(f"{path} cannot be resumed: {type(error).__name__}: {said}") from error

    def iterations(self, last: int) -> Iterator[int]:
        """The numbers of the iterations that are left, up to `last` or the one that a signal falls into."""
        self.last = last
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask_to_stop)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a closed terminal, but not under nohup
            signal.signal(signal.SIGHUP, self.ask_to_stop)
        while self.iteration < last:
            self.iteration += 1
            yield self.iteration
            # Asked here, as only an iteration saves. A signal behind its save ends the next one.
            if self.stopped and self.saved == self.iteration:
                break

    def ask_to_stop(self, number, frame) -> None:
        """A handler of signals: the run ends after this iteration; asked twice, it ends at once."""
        signal.signal(number, signal.SIG_DFL)
        self.asked = True
        self.stopped = processes() == 1
        with suppress(RuntimeError):  # it may come in the middle of another print, which none may enter
            say("stopping after this iteration; --resume goes on from there")

    def is_due(self, every: int) -> bool:
        """Whether this is the last iteration, or one of every `every`; 0: the last one only."""
        return self.iteration == self.last or (every > 0 and self.iteration % every == 0)

    def log(self, metrics: dict[str, float], shown: str, samples: Iterable[dict] = ()) -> None:
        """Figures of this iteration for TensorBoard and metrics.jsonl, and `samples` for their own file.

        Those whose tag has the regular expression `shown` in it are printed. A figure that is nan is not
        defined, as what is explained of no variance: it is printed "-", and left out elsewhere.
        """
        if not self.writes:
            return
        metrics = metrics | {"time/cpu_seconds": self.seconds()[1]}
        # float: a checkpoint with numbers of numpy in it could not be read again
        defined = {tag: float(figure) for tag, figure in metrics.items() if not math.isnan(figure)}
        words = [f"{self.iteration:5d}"]
        for tag in metrics:
            if re.search(shown, tag):
                words.append(f"{tag} {defined[tag]:.4g}" if tag in defined else f"{tag} -")
        say("  ".join(words))
        if metrics.get("eval/cut", 0) >= 0.5:
            say(f"       {metrics['eval/cut']:.0%} of the dialogues outgrew the model's context (eval/cut)")
        self.metrics.append({"iteration": self.iteration} | defined)
        self.samples += samples
        with self.writing("the curves"):
            if "the curves" in self.unsaved:
                self.open_curves()  # a writer that has failed once is of no more use
            for tag, figure in defined.items():
                self.writer.add_scalar(tag, figure, self.iteration)
            self.writer.flush()
        with self.writing("the log"):
            write_jsonl(self.folder / "metrics.jsonl", self.metrics)
            write_jsonl(self.folder / self.samples_file, self.samples)

    def save(self, models: dict) -> None:
        """A checkpoint to resume from, and a folder of each of `models`, by name, with its tokenizer."""
        import torch

        self.saved = self.iteration
        if not self.writes:
            return
        state = {name: getattr(self, name) for name in ("iteration", "state", "metrics", "samples")}
        state["seconds"], state["cpu_seconds"] = self.seconds()
        state["modules"] = {name: module.state_dict() for name, module in self.modules.items()}
        state["rng"], state["torch_rng"] = self.rng.bit_generator.state, torch.get_rng_state()
        with self.writing("the checkpoint"):
            for name, model in models.items():  # first: these may fit on a nearly full disk
                temporary = self.folder / f"{name}.tmp"
                model.save_pretrained(temporary)
                model.tokenizer.save_pretrained(temporary)
                (temporary / "README.md").write_text(self.card(name), encoding="utf-8")
                replace_folder(self.folder / name, temporary)
            torch.save(state, self.folder / "checkpoint.tmp")
            (self.folder / "checkpoint.tmp").replace(self.folder / "checkpoint.pt")

    def finish(self, **figures) -> dict:
        """Writes summary.json and returns it: the first and the last evaluation, costs, and `figures`.

        Raises OSError if what was written last could not be saved.
        """
        if not self.writes:
            return {}
        with suppress(OSError):  # `log` has written all, or has said that it could not
            self.writer.close()
        summary = {}
        evaluated = [row for row in self.metrics if any(tag.startswith("eval/") for tag in row)]
        for row in evaluated:  # of the later ones the last stays
            is_start = row["iteration"] == 0
            prefixes = ["warm_start"] * is_start + ["eval"] * (not is_start or self.iteration == 0)
            eval_tags = [tag for tag in row if tag.startswith("eval/")]
            summary |= {f"{p}_{tag.removeprefix('eval/')}": row[tag] for p in prefixes for tag in eval_tags}
        seconds, cpu_seconds = self.seconds()
        summary |= {"iteration": self.iteration, "seed": self.args.seed}
        summary |= {name: value for name, value in self.state.items() if isinstance(value, int | float)}
        summary |= figures
        summary |= {"seconds": seconds, "cpu_seconds": cpu_seconds}
        summary |= peak_memory(self.args.device) | {"commit": self.commit}
        with self.writing("the summary"):
            write_json(self.folder / "summary.json", summary)
        say(json.dumps(summary))
        if self.args.resume and self.iteration == self.began_at:
            say(f"No iteration was left to do: {self.iteration} were done before.")
        start, end = summary.get("warm_start_return"), summary.get("eval_return")
        if start is not None and end is not None and end < start:
            say(f"The run ends below its start: it returned {start:.2f} at first, {end:.2f} at last.")
        for what, reason in self.unsaved.items():
            older = "; the one that is there is of an earlier iteration" if what == "the checkpoint" else ""
            raise OSError(f"{self.folder}: {what}: {reason}{older}")
        return summary

    def seconds(self) -> tuple[float, float]:
        """Wall-clock and processor seconds of the run, those before it was resumed included."""
        return time.time() - self.began, time.process_time() - self.cpu_began

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """What cannot be written in this context costs nothing that was learned: the run goes on.

        It says so; the next time may be better; if the last one was not, `finish` raises.
        """
        try:
            yield
            self.unsaved.pop(what, None)
        except Exception as error:  # each of the libraries that write has its own
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            reason = f"disk full ({said})" if is_full(self.folder, error) else said
            self.unsaved[what] = f"not saved at iteration {self.iteration}: {reason}"
            say(self.unsaved[what])
            for path in self.folder.glob("*.tmp"):  # half-written, it takes room
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def card(self, name: str) -> str:
        """The README.md of a saved model, which Hugging Face shows: what it is, and how it is spoken to."""
        args = vars(self.args)
        sources = [args.get(flag) for flag in (name, "actor", "model", "encoder")]  # of a critic --critic
        start = next(filter(None, sources), "the ready-made checkpoint")
        tags = ("iteration", "eval/return", "eval/return_greedy")
        evaluated = [row for row in self.metrics if "eval/return" in row]
        last = json.dumps({tag: row[tag] for row in evaluated[-1:] for tag in tags if tag in row})
        return f"""# {name}, trained in the world {self.args.env}

Saved by {self.script}.py of TurnRL in the run {self.folder.name}.

| | |
|---|---|
| started from | {start} |
| last evaluation | {last if evaluated else "see metrics.jsonl of the run"} |
| prompt | the world's first text and a newline; then action, end token, reply ... each tokenised apart |
| licence | that of what it started from; MIT where that is of TurnRL itself |
"""


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


def value_errors(value_N, return_N) -> dict[str, float]:
    """How far values are from returns, both tensors: on the mean, and the share of the variance explained."""
    error_N = value_N - return_N
    variance = return_N.var(correction=0)
    variance[variance < 1e-8] = math.nan  # all returns are equal: there is nothing to explain
    explained = 1 - error_N.var(correction=0) / variance
    return {"critic/bias": error_N.mean().item(), "critic/explained_variance": explained.item()}


# ---------------------------------------------------------- 3. files
LOCKS = []  # files that stay open as long as this process lives
FULL = (errno.ENOSPC, errno.EDQUOT)


def new_folder(args, script: str) -> Path:
    """Makes the folder of a new run, `runs`/ENV__SCRIPT__SEED__NAME__TIME, and locks it.

    The time has microseconds, as twins start together.
    """
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


def replace_folder(folder: Path, new: Path) -> None:
    """Renames `new` to `folder`; what had that name before is gone only when `new` has it."""
    old = folder.with_name(f"{folder.name}.old")
    if folder.exists():  # else `old` is all there is, after a kill in between
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, record: dict) -> None:
    """One object, to be read by people, too. The file appears whole or not at all."""
    write_text(path, json.dumps(record, indent=2) + "\n")


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    """An object a line. The file appears whole or not at all."""
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def read_jsonl(path: Path | str) -> list[dict]:
    """What `write_jsonl` has written."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_text(path: Path, text: str) -> None:
    """Text, written under another name and then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def is_full(run: Path, error: Exception) -> bool:
    """Whether it was for want of room: safetensors says so only in words, and torch not at all."""
    if getattr(error, "errno", None) in FULL or "os error 28" in str(error):
        return True
    return run.exists() and shutil.disk_usage(run).free < 2**16


def commit() -> str:
    """The commit of this checkout, with "-dirty" if files have changed."""
    if not shutil.which("git"):
        return "unknown"
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def peak_memory(device: str) -> dict[str, float]:
    """Peak memory in MB: of this process and, if it is a GPU, of what torch had on the device."""
    found = {"peak_memory_mb": peak_memory_mb()}
    if device.startswith("cuda"):
        import torch

        found["peak_device_memory_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
    return found


def peak_memory_mb() -> float:
    """Peak memory of this process, in MB."""
    memory = getrusage(RUSAGE_SELF).ru_maxrss  # KiB, on a Mac bytes
    return memory / (2**20 if sys.platform == "darwin" else 2**10)
