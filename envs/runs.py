"""What a run leaves on the disk: its folder, JSON that appears whole or not at all, facts about it."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from shutil import which
from subprocess import run


def folder(runs: str, env: str, script: str, seed: int) -> Path:
    """A new folder, `runs`/ENV__SCRIPT__SEED__TIME; the time has microseconds, as twins start together."""
    now, env = time.time_ns(), re.sub(r"[^\w.-]", "-", env)  # my_module:MyWorld, some_package/some-world-v0
    name = f"{env}__{script}__{seed}__{time.strftime('%Y%m%d-%H%M%S')}-{now // 1000 % 10**6:06d}"
    path = Path(runs, name)
    path.mkdir(parents=True)
    return path


def write(path: Path, records: list[dict], indent: int | None = None) -> None:
    """JSON, a line each. The file appears whole or not at all: written under another name, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    lines = [json.dumps(record, indent=indent) + "\n" for record in records]
    temporary.write_text("".join(lines), encoding="utf-8")
    temporary.replace(path)


def commit() -> str:
    """The commit of this checkout, with "-dirty" if files have changed."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    found = run(git, capture_output=True, text=True, check=False).stdout.strip() if which("git") else ""
    return found or "unknown"


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
