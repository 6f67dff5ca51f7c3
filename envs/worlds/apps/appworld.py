"""AppWorld: do what someone asks for by writing Python that calls the 457 functions of nine everyday apps.

    world = AppWorld(appworld="venv-appworld/bin/appworld", root="FOLDER")  # or in $APPWORLD, $APPWORLD_ROOT
    observation, info = world.reset(options={"index": 0})
    observation, reward, terminated, truncated, info = world.step("print(apis.supervisor.show_profile())")

The published benchmark (Trivedi et al. 2024, arXiv:2407.18901), on which LOOP was shown (Chen et al. 2025,
arXiv:2502.01600). envs/worlds/apps is a small world in its likeness that needs none of what this one does:

    needs        the package `appworld` in a virtual environment of its own, as it pins pydantic 1.10,
                 and its data
                     python3 -m venv venv-appworld && venv-appworld/bin/pip install appworld
                     venv-appworld/bin/appworld install
                     venv-appworld/bin/appworld download data --root FOLDER
    an action    Python, of any number of lines; of a text with ``` fences, what stands in them.
                 Variables stay
    the end      apis.supervisor.complete_task(answer=...), or the turn limit. The state is
                 graded after either
    the reward   at the end: the share of the task's tests passed, or 1 if all were and else 0

  D1  The package runs in a server process, one a world (`appworld serve environment`): in ours it would stop
      the clock, replace SystemExit, and hold one world at a time. The server listens on a file in a folder of
      its own; as published, it runs what anybody on the network sends.
  D2  A server is replaced after 50 episodes, as each leaves more than a megabyte behind.
  D3  Turns and output are cut by characters; about four make a token.

The code runs in the server, beside tests and answers. The package keeps it from accidents, not from anything
that it is meant to do: docs/worlds/appworld.md says what it can reach.

To take it alone, copy envs/__init__.py, envs/datasets.py, envs/worlds/apps/appworld.py and, for what it
shares with the world apps, envs/worlds/apps/__init__.py, envs/worlds/apps/apps.toml,
envs/worlds/apps/tasks.py and envs/worlds/apps/sandbox.py, each to the same place. It needs gymnasium and the
package appworld.
"""

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path

import gymnasium

from envs import AnyText, Unavailable, WorldBroken, read_action, task_index
from envs.datasets import dialogue
from envs.worlds.apps import habits, whole_scenarios

# ------------------------------------------------------------------------- 1. the package and its data

SPLITS = ("train", "dev", "test_normal", "test_challenge")
INSTALL = (
    "python3 -m venv venv-appworld && venv-appworld/bin/pip install appworld && venv-appworld/bin/appworld "
    "install, "
    "then APPWORLD=venv-appworld/bin/appworld"
)


def find_python(appworld: str | Path) -> Path:
    """The Python that a command `appworld` belongs to.

    FileNotFoundError if there is none that could run it.
    """
    name = str(appworld or os.environ.get("APPWORLD", "appworld"))
    command = Path(shutil.which(name) or name).resolve()
    if not (command.exists() and (command.parent / "python").exists()):
        raise FileNotFoundError(f"there is no {name} with a python beside it; {INSTALL}")
    for package in command.parent.parent.glob("lib/python3*/site-packages/appworld"):
        if not (package / "apps" / "admin").is_dir():  # pip brings the apps encrypted
            raise FileNotFoundError(f"the package is not unpacked; run {name} install")
    return command.parent / "python"


@lru_cache
def find_tasks(data: Path, split: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Ids of the tasks of a split, and their difficulties, 1 to 3. FileNotFoundError if a file is missing."""
    try:
        lines = (data / "datasets" / f"{split}.txt").read_text(encoding="utf-8").split()
        ids = tuple(line.partition(":")[0] for line in lines)  # an id may have a tag
        metadata = [
            (data / "tasks" / id / "ground_truth" / "metadata.json").read_text(encoding="utf-8") for id in ids
        ]
    except OSError as error:
        advice = "`appworld download data --root FOLDER` fetches the data; then APPWORLD_ROOT=FOLDER"
        raise FileNotFoundError(f"there is no {error.filename}; {advice}") from None
    return ids, tuple(json.loads(text)["difficulty"] for text in metadata)


# ---------------------------------------------------------------------------------------- 2. the server

# Runs "$@" and reads: its input ends with the process that holds the other end, however that ends. Then the
# whole group ends, as it does when the server ends, and with it goes $0, the server's folder.
KEEPER = '("$@"; kill -9 0) < /dev/null & read -r _; rm -rf "$0"; kill -9 0'

# The command `appworld`, but that it listens on the file of its last argument (D1), and does not read the
# secrets of the first .env that it finds in a folder above itself.
START = """
import sys, dotenv, uvicorn
serve, path, dotenv.load_dotenv = uvicorn.run, sys.argv.pop(), lambda *_, **__: False
uvicorn.run = lambda app, **_: serve(app, uds=path, log_level="error")
from appworld.cli import main
main()
"""
KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG")  # of our environment: there may be secrets in it
MAX_REPLY = 20_000_000  # bytes
GRACE = 60  # seconds to start, to grade, and to stop code by itself; who takes longer hangs


class Broken(OSError):
    """The server is gone, hangs, or answers with an error."""


class Connection(http.client.HTTPConnection):
    """HTTP over a socket that is a file."""

    def __init__(self, path: str, timeout: float):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = self.line = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)

    def hang_up(self) -> None:
        """Ends it from another thread: who reads from it finds the end."""
        with suppress(OSError, AttributeError):  # there is nothing to end yet, or any more
            self.line.shutdown(socket.SHUT_RDWR)


class Server:
    """A server process with one world, for one thread at a time.

    All that it writes goes to a folder of its own.
    """

    def __init__(self, python: Path, data: Path, patience: float):
        self.patience, self.episodes = patience, 0
        self.folder = folder = Path(tempfile.mkdtemp(prefix="appworld-"))
        self.socket = str(folder / "socket")
        self.log = (folder / "log").open("w+b")  # ours to read, whatever becomes of its name
        (folder / "data").symlink_to(data)
        command = [python, "-I", "-X", "utf8", "-c", START, "serve", "environment", "--no-show-usage"]
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | {"HOME": str(folder)}
        # A session of its own keeps Ctrl-C from it, so that a trainer can end in good order.
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, folder, *command, "--root", folder, self.socket], stdin=subprocess.PIPE,
            stdout=self.log, stderr=self.log, cwd=folder, env=environment, start_new_session=True,
        )  # fmt: skip
        self.close = weakref.finalize(self, end, self.process, folder, self.log)
        deadline = time.monotonic() + patience
        while not self.listens():
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = self.last_words()
                self.close()
                raise Unavailable(f"appworld: the server does not start: {said}")
            time.sleep(0.02)

    def listens(self) -> bool:
        with closing(Connection(self.socket, self.patience)) as connection, suppress(OSError):
            connection.connect()
            return True
        return False

    def ask(self, path: str, **body) -> object:
        """POSTs a request and returns the "output" of the reply. Raises Broken, also if it takes too long."""
        connection = Connection(self.socket, self.patience)
        # its own patience begins anew with every byte
        late = threading.Timer(self.patience + 1, connection.hang_up)
        late.daemon = True
        late.start()
        try:
            with closing(connection):
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status == 200:
                    return json.loads(response.read(MAX_REPLY))["output"]
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
            LookupError,
            TypeError,
            RecursionError,
        ) as error:
            raise Broken(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            late.cancel()
        time.sleep(0.1)  # it writes the reason to its log after it has answered
        raise Broken(f"{path}: error {response.status}: {self.last_words()}")

    def last_words(self) -> str:
        """The last line of what it wrote, which of a traceback is the reason."""
        size = os.fstat(self.log.fileno()).st_size
        end = os.pread(self.log.fileno(), 1000, max(0, size - 1000))  # it may have written gigabytes
        lines = end.decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def end(process: subprocess.Popen, folder: Path, log) -> None:
    """Ends a server, which has nothing to save, and all that is in its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()
    process.wait()
    log.close()
    shutil.rmtree(folder, ignore_errors=True)


# ----------------------------------------------------------------------------------------- 3. the world

PROMPT = """\
Supervisor: {first_name} {last_name}, {email}, {phone_number}. Now: {datetime}.
Task: {instruction}
Write Python, some lines a turn. Variables stay, and print shows what you want to see. \
apis.app.call(parameter=value) calls an app, \
apis.api_docs.show_api_descriptions(app_name='app') lists its calls, \
apis.api_docs.show_api_doc(app_name='app', api_name='call') explains one, and \
apis.supervisor.complete_task(answer=None) ends the task.
{index}

"""
INDEX = "for app in apis.api_docs.show_app_descriptions(): print(app['name'] + ': ' + app['description'])"
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_of(action: str) -> str:
    """The code in an action: all of it, or what stands in fences.

    >>> code_of("I look.\\n```python\\nx = 1\\n```\\nThen\\n```\\nprint(x)\\n```")
    'x = 1\\n\\nprint(x)\\n'
    """
    return "\n".join(FENCED.findall(action)) or action


def clean(text: str) -> str:
    """Without lone surrogates, which neither the package nor a tokenizer can encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


class AppWorld(gymnasium.Env):
    """The world. An observation is the prompt and all code and output so far, an action is code.

    An action is stripped of blanks at both ends and then cut to `max_action_chars`; it may have several
    lines. `info["action"]` is what remains. Always:

        next_observation == observation + info["action"] + "\\n=> " + output + "\\n"

    `info["answer"]` of `reset` is the id of the task. The last info["result"] has "passed" and "tests"
    besides. The first reset starts the server. If it breaks or hangs, it is killed and envs.WorldBroken
    raised: the episode is over, and the next reset starts another.
    """

    id = "appworld"
    max_action_chars = 6000  # D3: LOOP has 1,500 tokens
    append_only = True
    multiline = True
    demonstration_env = "appworld"
    best_return = 1.0
    expert_return = None  # some of the package's solutions are made for calls that do not raise

    def __init__(
        self,
        appworld: str | Path = "",  # the command; empty takes $APPWORLD
        root: str | Path = "",  # the folder in which `data` is; empty takes $APPWORLD_ROOT
        split: str = "train",  # one of SPLITS, a hyphen will do
        reward: str = "fraction",  # of the tests, or "success": 1 if all were passed
        max_turns: int = 0,  # 0 takes LOOP's 40 in training and 50 elsewhere
        max_output: int = 12_000,  # D3: characters of a turn's output that are shown; LOOP has 3,000 tokens
        timeout: int = 100,  # seconds that code may run
        episodes_per_server: int = 50,  # D2: 1 for a fresh process each time
    ):
        self.split = split.replace("-", "_")
        if self.split not in SPLITS:
            raise ValueError(f"split: {split!r} is none of {', '.join(SPLITS)}")
        if reward not in ("fraction", "success"):
            raise ValueError(f"reward: {reward!r} is neither fraction nor success")
        if max_turns < 0:
            raise ValueError("max_turns must be at least 1, or 0 for that of the paper")
        self.reward, self.max_turns = reward, max_turns or (40 if self.split == "train" else 50)
        self.max_output, self.timeout, self.episodes_per_server = max_output, timeout, episodes_per_server
        self.python = find_python(appworld)
        self.data = Path(root or os.environ.get("APPWORLD_ROOT", ".")).resolve() / "data"
        self.tasks, self.difficulties = find_tasks(self.data, self.split)
        self.num_tasks = len(self.tasks)
        self.scenarios = tuple(id.rpartition("_")[0] for id in self.tasks)  # an id is <scenario>_<n>
        self.observation_space = AnyText(20_000 + self.max_turns * (self.max_action_chars + max_output + 200))
        self.action_space = AnyText(self.max_action_chars)
        self.server: Server | None = None
        self.over = True  # until the first reset

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts with the task `options["index"]`, or one drawn by the world's own generator."""
        super().reset(seed=seed)
        index = task_index(options, self.num_tasks, self.np_random)
        self.task, self.turns, self.over = self.tasks[index], 0, True
        if self.server and self.server.episodes >= self.episodes_per_server:
            self.close()
        self.server = self.server or Server(self.python, self.data, self.timeout + GRACE)
        self.server.episodes += 1
        about = self.ask("/initialize", dict, experiment_name="turnrl", timeout_seconds=self.timeout)
        index_of_apps = self.ask("/execute", str, code=INDEX).strip()[:10_000]
        try:
            prompt = PROMPT.format(index=index_of_apps, **about, **about["supervisor"])
            self.observation = clean(prompt)[:20_000]
        except (LookupError, TypeError) as error:
            raise self.broken(f"/initialize: no {error}") from error
        self.over = False
        return self.observation, {"answer": self.task}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Runs one piece of code; see the class for what becomes of the text."""
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        action = read_action(action, self.max_action_chars, self.multiline)
        output = clean(self.ask("/execute", str, code=code_of(action))).strip()
        if len(output) > self.max_output:
            output = f"{output[: self.max_output]} ... ({len(output) - self.max_output} characters more)"
        terminated = self.ask("/task_completed", bool)
        self.turns += 1
        truncated = not terminated and self.turns == self.max_turns
        info, reward = {"action": action}, 0.0
        if terminated or truncated:
            passed, tests = self.evaluate()
            reward = float(passed == tests) if self.reward == "success" else passed / tests
            info["result"] = {"return": reward, "length": self.turns, "success": passed == tests}
            info["result"] |= {"passed": passed, "tests": tests}
            self.over = True
        if terminated:  # in the last line, as code can print the same
            output += f"\nTask completed. Your score (min 0.0, max 1.0): {reward:.2f}"
        self.observation += f"{action}\n=> {output}\n"
        return self.observation, reward, terminated, truncated, info

    def evaluate(self) -> tuple[int, int]:
        """How many tests are passed, and how many there are."""
        report = self.ask("/evaluate", dict, suppress_errors=True)  # else the first failure would be an error
        passes, tests = report.get("passes"), report.get("num_tests")
        if not (type(passes) is list and type(tests) is int and len(passes) <= tests > 0):
            raise self.broken("/evaluate: no report")
        return len(passes), tests

    def ask(self, path: str, kind: type, **body):
        """What the server says of the present task, an object of the type `kind`:
        agents' code has run in it."""
        try:
            output = self.server.ask(path, task_id=self.task, **body)
        except Broken as error:
            raise self.broken(error) from error
        if type(output) is not kind:
            raise self.broken(f"{path}: a {type(output).__name__} instead of a {kind.__name__}")
        return output

    def broken(self, reason: object) -> WorldBroken:
        """The error to raise; there is no server any more."""
        self.close()
        return WorldBroken(f"appworld, {self.task}: {reason}")

    def goals(self, solved: dict[int, bool]) -> dict[str, float]:
        """Of tasks by index, solved or not: the share of scenarios of which all tasks were (SGC)."""
        whole = whole_scenarios(self.scenarios, solved)
        return {"scenarios": sum(whole) / len(whole)} if whole else {}

    habits = staticmethod(habits)

    def close(self) -> None:
        """Ends the server."""
        if self.server:
            self.server.close()
        self.server, self.over = None, True

    # ------------------------------------------------------------------------------------ 4. the players

    @property
    def players(self) -> dict[str, Callable[[str, random.Random], str]]:
        """Scripted players by name; `player(observation, rng)` is an action in this world's present state."""
        return {"expert": self.expert, "random": random_player}

    def expert(self, observation: str, rng: random.Random | None = None) -> str:
        """The package's own solution in one turn; where it has none, as in the splits for tests,
        nothing is done."""
        file = self.data / "tasks" / self.task / "ground_truth" / "compiled_solution.py"
        if not file.exists():
            return "apis.supervisor.complete_task()"
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if not line.startswith("#")]
        return "\n".join([*lines, "solution(apis, requester)"]).strip()

    def demonstrations(self, n: int, seed: int) -> list[dict]:
        """`n` dialogues of the expert about tasks of the split train."""
        rng = random.Random(seed)
        world = AppWorld(
            self.python.with_name("appworld"), self.data.parent, reward=self.reward, timeout=self.timeout
        )
        try:
            return [dialogue(world, world.expert, rng, rng.randrange(world.num_tasks)) for _ in range(n)]
        finally:
            world.close()


def random_player(observation: str, rng: random.Random) -> str:
    """Looks about, or gives up with a made-up answer."""
    looks = "print(apis.supervisor.show_profile())", "print(apis.api_docs.show_app_descriptions())"
    return rng.choice([*looks, f"apis.supervisor.complete_task(answer={rng.randrange(100)})"])
