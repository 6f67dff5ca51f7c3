"""Apps: do small things for someone by writing Python that calls the simulated apps of this person.

    world = Apps(split="train")
    observation, info = world.reset(options={"index": 1445})
    observation, reward, terminated, truncated, info = world.step("apis.mail.find(sender='Hugo')")

    Supervisor: Viktor. Today is day 98.
    Task: Star the newest mail from Hugo.
    Write Python: apis.api_docs.show_api_doc(name='app') explains an app, ...

    apis.mail.find(sender='Hugo')
    => [{'subject': 'theatre', 'day': 39, 'id': 40}, {'subject': 'price', 'day': 21, 'id': 88}]

It is made in the likeness of AppWorld (Trivedi et al. 2024, arXiv:2407.18901), on which LOOP was shown
(arXiv:2502.01600), small enough for a model that is trained from nothing within minutes.

    an action    Python, of any number of lines. Variables stay from turn to turn; the value of the last line
                 is shown
    the end      apis.supervisor.complete_task(answer=...), or the turn limit, at which nothing has been
                 handed in
    a task       people and things invented anew; three tasks with one sentence and other names are a scenario
    its tests    each row of the database that was to be changed, or the right answer; each row that was
                 changed besides is a test that failed
    the reward   at the end: the share of tests passed, or 1 if all were and else 0

The code runs in a process of its own (sandbox.py). Database and tests are in this one, so that the code
can do nothing to them but call. Apps, calls and words stand in apps.toml, tasks and their solutions in
tasks.py.

To take it alone, copy envs/__init__.py, envs/datasets.py, envs/worlds/apps/__init__.py,
envs/worlds/apps/apps.toml, envs/worlds/apps/tasks.py, envs/worlds/apps/sandbox.py and
envs/worlds/apps/sandbox_child.py, each to the same place, and for `sandbox="monty"`
envs/worlds/apps/sandbox_monty.py. It needs gymnasium and nothing else.
"""

import ast
import inspect
import random
import re
import sqlite3
import threading
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import gymnasium

from envs import AnyText, WorldBroken, read_action, task_index
from envs.datasets import dialogue
from envs.worlds.apps.sandbox import Finished, Refused
from envs.worlds.apps.tasks import SCENARIOS, Scenario

# -------------------------------------------------------------------------------------- 1. the apps

DATA = tomllib.loads(Path(__file__).with_name("apps.toml").read_text(encoding="utf-8"))
WORDS = {name: words.split() for name, words in DATA["words"].items()}
FAMILIES = DATA["family"]  # of apps whose names, calls and parameters are drawn for each task, from these:
DRAWN = {
    group: {"name": DATA["names"][group].split()} | {app: FAMILIES[app][group].split() for app in FAMILIES}
    for group in ("known", "challenge")
}
SHOPS = {shop for lists in DRAWN.values() for shop in lists["shop"]}
for lists in DRAWN.values():
    for drawn in lists.values():
        WORDS["words"] += drawn
TYPES = {"int": int, "str": str, "any": object}
MAX_TEXT = 300  # characters of a text that a call takes
NUMBERS = range(10, 100)  # ids and most other numbers: few enough for a small model to know each of them


class Call(NamedTuple):
    """What an app can be asked to do."""

    name: str  # "mail.star"
    # type and default by name; `...` for a parameter that must be given
    parameters: dict[str, tuple[type, object]]
    about: str
    sql: list[str]  # empty for the two calls that `Apps.call` does itself

    @property
    def doc(self) -> str:
        """What its documentation says.

        >>> CALLS["phone.list"].doc
        'lists contacts, four a page: apis.phone.list(page=0)'
        """
        given = [
            name if default is ... else f"{name}={default}" for name, (_, default) in self.parameters.items()
        ]
        return f"{self.about}: apis.{self.name}({', '.join(given)})"


def make_call(name: str, parameters: str, about: str, sql: str | list[str]) -> Call:
    """A call from its row in apps.toml.

    >>> make_call("phone.list", "page: int = 0", "lists", "select 1").parameters
    {'page': (<class 'int'>, 0)}
    """
    parts = re.findall(r"(\w+): (\w+)(?: = (\w+))?", parameters)
    known = {
        part: (TYPES[kind], ast.literal_eval(default) if default else ...) for part, kind, default in parts
    }
    return Call(name, known, about, [sql] if isinstance(sql, str) else sql)


def make_calls() -> dict[str, Call]:
    """The calls of all tasks, by name; those of devices and shops differ from task to task."""
    rows = {f"{app}.{name}": row for app, calls in DATA["apps"].items() for name, row in calls.items()}
    password = "select app, password from password where app = :app"
    rows["supervisor.show_password"] = ["app: str", "shows the password of an app", password]
    for app in DATA["login"]:
        check = f"select 'ok' from password where app = '{app}' and password = :password"
        rows[f"{app}.login"] = ["password: int", "logs in", check]
    rows["supervisor.complete_task"] = ["answer: any = None", "ends the task", []]
    rows["api_docs.show_api_doc"] = ["name: str", "explains an app or one of its calls", []]
    return {name: make_call(name, *row) for name, row in sorted(rows.items())}


CALLS = make_calls()


def draw_names(family: str, names: list[str], rng: random.Random) -> dict[str, str]:
    """What the maker of an app calls its calls and their parameters, by what apps.toml calls them."""
    calls = FAMILIES[family]["calls"]
    parts = [*calls, *(part for row in calls.values() for part in re.findall(r"\w+(?=: )", row[0]))]
    return dict(zip(dict.fromkeys(parts), rng.sample(names, len(set(parts))), strict=True))


def drawn_calls(family: str, app: str, names: dict[str, str]) -> dict[str, Call]:
    """The calls of a device or shop.

    >>> names = {"find": "seek", "where": "place", "set": "turn", "device": "number", "level": "to"}
    >>> [call.doc for call in drawn_calls("device", "lamp", names).values()]
    ['finds the lamp in a room: apis.lamp.seek(place)', 'sets the lamp: apis.lamp.turn(number, to)']
    """
    calls = {}
    for role, (parameters, about, sql) in FAMILIES[family]["calls"].items():
        parameters = re.sub(r"\w+(?=: )", lambda match: names[match[0]], parameters)
        call = make_call(f"{app}.{names[role]}", parameters, about.format(app=app), sql)
        renamed = [re.sub(r"(?<=:)\w+", lambda match: names[match[0]], text) for text in call.sql]
        calls[call.name] = call._replace(sql=[text.format(app=app) for text in renamed])
    return dict(sorted(calls.items()))


# ---------------------------------------------------------------------------------- 2. the database
# A state is all its rows, {(table, id): row}.


def open_database(content: bytes) -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.deserialize(content)
    return db


@lru_cache
def empty_database() -> bytes:
    """The tables without rows."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.execute("pragma page_size = 512")  # a table takes a page at least, and each task keeps a copy
    for table, columns in DATA["tables"].items():
        db.execute(f"create table {table} (id integer primary key, {columns})")
    return db.serialize()


def populate(db: sqlite3.Connection, rng: random.Random, devices: list[str]) -> None:
    """Fills an empty database with invented people and things; `devices` are the kinds that there are."""
    ids = {table: iter(rng.sample(NUMBERS, 20)) for table in DATA["tables"]}
    numbers = iter(rng.sample(NUMBERS, 10))  # phone numbers and passwords

    def add(table: str, **row) -> None:
        marks = ", ".join("?" * (len(row) + 1))
        db.execute(
            f"insert into {table} (id, {', '.join(row)}) values ({marks})", (next(ids[table]), *row.values())
        )

    def some(name: str, n: int) -> list[str]:
        return rng.sample(WORDS[name], n)

    def one(name: str) -> str:
        return rng.choice(WORDS[name])

    for app in DATA["login"]:
        add("password", app=app, password=next(numbers))
    names = some("name", 7)
    for name in names:
        add("contact", name=name, phone=next(numbers), kind=one("kind"))
    for subject, day in zip(some("title", 9), rng.sample(NUMBERS, 9), strict=True):
        sender, read = rng.choice(names[:4]), rng.randrange(2)
        add("mail", sender=sender, subject=subject, day=day, read=read, starred=0, words=one("words"))
    for title in some("title", 5):
        add("note", title=title, words=one("words"), pinned=0)
    days = rng.sample(NUMBERS, 3)
    for title, hour in zip(some("title", 6), rng.sample(range(8, 20), 6), strict=True):
        add("event", title=title, name=rng.choice(names), day=rng.choice(days), hour=hour)
    for title, seconds in zip(some("song", 7), rng.sample(NUMBERS, 7), strict=True):
        add("song", title=title, artist=one("artist"), seconds=seconds, liked=int(rng.random() < 0.2))
    for title, size in zip(some("title", 6), rng.sample(NUMBERS, 6), strict=True):
        add("file", title=title, folder=one("folder"), size=size)
    add("account", balance=rng.choice(NUMBERS))
    for _ in range(5):
        add("transfer", name=rng.choice(names[:3]), amount=rng.randrange(1, 20))
    for name in rng.sample(names, 4):
        add("request", name=name, amount=rng.randrange(1, 10), state=rng.choice(["open", "denied"]))
    for kind in rng.sample(devices, min(6, len(devices))):
        for room, level in zip(some("room", 3), rng.sample(range(10), 3), strict=True):
            add("device", kind=kind, room=room, level=level)
    for product in some("product", 4):
        add("product", product=product, price=rng.choice(NUMBERS), stock=rng.choice(NUMBERS))
    for product in some("product", 3):
        add("purchase", product=product, count=rng.randrange(1, 10), state=rng.choice(["open", "canceled"]))


def rows_of(cursor: sqlite3.Cursor) -> list[dict]:
    return [dict(zip([column[0] for column in cursor.description], row, strict=True)) for row in cursor]


def read_state(db: sqlite3.Connection) -> dict[tuple[str, int], tuple]:
    return {
        (table, row[0]): row[1:] for table in DATA["tables"] for row in db.execute(f"select * from {table}")
    }


def difference(before: dict, after: dict) -> Counter:
    """How often each change was made: (table, id, row after it). A row that is gone is None,
    the id of a new one, too.

    >>> difference({("note", 5): ("a",), ("note", 6): ("b",)}, {("note", 6): ("c",), ("note", 7): ("d",)})
    Counter({('note', 5, None): 1, ('note', 6, ('c',)): 1, ('note', None, ('d',)): 1})
    """
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return Counter(
        (table, id if (table, id) in before else None, after.get((table, id))) for table, id in changed
    )


# ----------------------------------------------------------------------------------- 3. the tasks

VARIANTS = 3  # tasks of a scenario
SPLITS = {"train": 40, "dev": 1, "test-normal": 2, "test-challenge": 4}  # scenarios of each kind
READING = 3  # times as many in training where the documentation must be read: that is harder to learn
FRESH = {  # what a task may ask for that is not in the database
    "phone": lambda rng: rng.choice(NUMBERS),
    "amount": lambda rng: rng.randrange(1, 10),
    "day": lambda rng: rng.choice(NUMBERS),
    "hour": lambda rng: rng.randrange(8, 20),
    "level": lambda rng: rng.randrange(1, 10),
}
PROMPT = """\
Supervisor: {me}. Today is day {today}.
Task: {sentence}
Write Python: apis.api_docs.show_api_doc(name='app') explains an app, \
apis.supervisor.complete_task(answer=None) ends.
{index}

"""


class Task(NamedTuple):
    """A task, and what `Apps` needs to run and to grade it."""

    id: str  # "mail-star.train5_2": its kind, the number of its scenario from 0, its variant from 1
    prompt: str
    calls: dict[str, Call]
    start: bytes  # the database
    state: dict  # its rows
    changes: Counter  # what it asks for, see `difference`
    answer: object  # None where nothing is asked


@lru_cache
def tasks_of(split: str) -> list[tuple[Scenario, int, int]]:
    """All tasks of a split: kind of scenario, number of the scenario in its kind, variant."""
    kinds = [scenario for scenario in SCENARIOS if scenario.challenge == (split == "test-challenge")]
    counts = [SPLITS[split] * (READING if "{" in kind.apps and split == "train" else 1) for kind in kinds]
    return [
        (kind, n, v)
        for kind, N in zip(kinds, counts, strict=True)
        for n in range(N)
        for v in range(1, VARIANTS + 1)
    ]


@lru_cache(maxsize=2_000)
def make_task(split: str, index: int) -> Task:
    """Invents task `index` of a split, the same one every time."""
    scenario, number, variant = tasks_of(split)[index]
    id = f"{scenario.name}.{split}{number}_{variant}"
    rng = random.Random(id)
    drawn = DRAWN["challenge" if scenario.challenge else "known"]
    words = {"shop": drawn["shop"]} | WORDS
    # until there is something to do: nobody may have written two mails, or a note says it already
    for _ in range(100):
        db = open_database(empty_database())
        populate(db, rng, drawn["device"])
        people = {name for (name,) in db.execute("select name from contact")}
        values = {
            "me": rng.choice([name for name in WORDS["name"] if name not in people]),
            "today": FRESH["day"](rng),
        }
        for name, kind in scenario.fresh.items():
            values[name] = rng.choice(words[kind]) if kind in words else FRESH[kind](rng)
        rows = rows_of(db.execute(scenario.draw))
        if not rows:
            continue
        values |= rng.choice(rows)
        start, before = db.serialize(), read_state(db)
        answer = db.execute(scenario.answer, values).fetchone()[0] if scenario.answer else None
        for statement in scenario.changes:
            db.execute(statement, values)
        changes = difference(before, read_state(db))
        if changes or answer is not None:
            break
    else:
        raise ValueError(f"{id}: in 100 databases there was nothing to do")

    # Its apps, and one that it does not need.
    apps = scenario.apps.format(**values).split()
    named = {}
    for family in FAMILIES:
        if f"{{{family}}}" in scenario.apps:
            named |= drawn_calls(family, values[family], draw_names(family, drawn["name"], rng))
    apps.append(rng.choice([app for app in DATA["apps"] if app not in apps]))
    offered = ["api_docs", "supervisor", *sorted(apps)]
    calls = {name: call for name, call in (CALLS | named).items() if name.split(".")[0] in offered}
    names = {app: [name.split(".")[1] for name in calls if name.startswith(f"{app}.")] for app in offered}
    lines = "\n".join(f"{app}: {' '.join(of_app)}" for app, of_app in names.items())
    prompt = PROMPT.format(sentence=scenario.sentence.format(**values), index=lines, **values)
    return Task(id, prompt, calls, start, before, changes, answer)


def run_tests(task: Task, changes: Counter, answer: object) -> list[bool]:
    """Which tests of a task are passed: each change that it asks for, or the answer.

    Each change that it does not ask for, and an answer to no question, is a test that failed. So it pays
    neither to do nothing nor to do the same to all rows.
    """
    tests = [changes[change] == n for change, n in task.changes.items()]
    tests += [is_right(answer, task.answer)] if task.answer is not None else []
    unasked = (changes - task.changes).total() + (task.answer is None and answer is not None)
    return tests + [False] * unasked


def is_right(answer: object, expected: object) -> bool:
    """Whether an answer, which may be anything that JSON can hold, says what is expected.

    >>> [is_right(answer, 12) for answer in (12, "12", 12.0, " 12 ", 13, True, [12], None)]
    [True, True, True, True, False, False, False, False]
    >>> [is_right(answer, "Rosa") for answer in ("Rosa", "rosa", "Rosa Luna")]
    [True, True, False]
    """
    if type(answer) is float and answer.is_integer():
        answer = int(answer)
    if type(answer) is int and abs(answer) > 10**18:
        return False  # Python writes no number of more than 4,300 digits
    return type(answer) in (int, str) and str(answer).strip().lower() == str(expected).lower()


# ----------------------------------------------------------------------------------- 4. the world

FAILED = re.compile("error|exception|failed", re.IGNORECASE)  # how a call that went wrong shows


def habits(episodes: list[list[tuple[str, str]]]) -> dict[str, float]:
    """What LOOP's paper counts in its appendix, in episodes of actions and replies.

    many_cells: share of actions with more than one cell of code; api_docs, assum, dummy: how often an episode
    says show_api_doc, "assum..." and "dummy"; gave_up: share of episodes, of those with two turns or more,
    that completed the task right after a call that failed; no_op: share whose only call completed the task.
    """
    said = ["\n".join(action for action, _ in turns).lower() for turns in episodes]
    ends = [(turns[-2][1], turns[-1][0]) for turns in episodes if len(turns) > 1]
    figures = {
        "many_cells": [action.count("```") > 2 for turns in episodes for action, _ in turns],
        "api_docs": [text.count("show_api_doc") for text in said],
        "assum": [text.count("assum") for text in said],
        "dummy": [text.count("dummy") for text in said],
        "gave_up": [bool(FAILED.search(reply)) and "complete_task" in action for reply, action in ends],
        "no_op": [re.findall(r"\bapis\.\w+\.(\w+)", text) == ["complete_task"] for text in said],
    }
    return {name: fmean(values or [0.0]) for name, values in figures.items()}


def whole_scenarios(scenarios: tuple, solved: dict[int, bool]) -> list[bool]:
    """Whether all tasks of a scenario were solved, for those of which all were played.

    >>> whole_scenarios(("a", "a", "b", "b", "c"), {0: True, 1: True, 2: True, 3: False})
    [True, False]
    """
    results = {name: [] for name in scenarios}
    for i, name in enumerate(scenarios):
        results[name].append(solved.get(i))
    return [all(of_tasks) for of_tasks in results.values() if None not in of_tasks]


class Apps(gymnasium.Env):
    """The world. An observation is the prompt and all code and output so far, an action is code.

    An action is stripped of blanks at both ends and then cut to `max_action_chars`; it may have several
    lines. `info["action"]` is what remains. Always:

        next_observation == observation + info["action"] + "\\n=> " + output + "\\n"

    (without the blank where there is no output).

    `info["answer"]` of `reset` is the id of the task, never what is expected. The last info["result"] has
    "passed" and "tests" besides. Raises envs.WorldBroken if no process for the code can be had.

    Options: `split`, one of SPLITS; `reward`, "fraction" of the tests or "success", 1 if all were passed;
    `max_turns`; `max_output`, the characters of a turn's output that are shown; `sandbox`, where the code
    runs: "process" or, with the package pydantic-monty, the stricter "monty".
    """

    rules = (
        "Do the task in Python; you may look first. An empty line ends a loop. When all is done, call "
        "apis.supervisor.complete_task(); 1 point is the most."
    )
    id = "apps"
    max_action_chars = 1000
    append_only = True
    multiline = True
    demonstration_env = "apps"
    best_return = 1.0
    expert_return = 1.0

    def __init__(
        self,
        split: str = "train",
        reward: str = "fraction",
        max_turns: int = 10,
        max_output: int = 1000,
        sandbox: str = "process",
    ):
        if split not in SPLITS:
            raise ValueError(f"split: {split!r} is none of {', '.join(SPLITS)}")
        if reward not in ("fraction", "success"):
            raise ValueError(f"reward: {reward!r} is neither fraction nor success")
        if sandbox not in ("process", "monty"):
            raise ValueError(f"sandbox: {sandbox!r} is neither process nor monty")
        if min(max_turns, max_output) < 1:
            raise ValueError("max_turns and max_output must be at least 1")
        self.split, self.reward, self.max_turns, self.max_output = split, reward, max_turns, max_output
        tasks = tasks_of(split)
        self.num_tasks = len(tasks)
        self.scenarios = tuple(index // VARIANTS for index in range(self.num_tasks))
        self.difficulties = tuple(scenario.difficulty for scenario, _, _ in tasks)
        self.is_question = tuple(scenario.answer is not None for scenario, _, _ in tasks)
        self.observation_space = AnyText(2000 + max_turns * (self.max_action_chars + max_output + 100))
        self.action_space = AnyText(self.max_action_chars)
        if sandbox == "monty":
            from envs.worlds.apps.sandbox_monty import MontySandbox as Sandbox
        else:
            from envs.worlds.apps.sandbox import Sandbox
        self.sandbox = Sandbox(max_output=max_output)
        self.over = True  # until the first reset

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts with the task `options["index"]`, or one drawn by the world's own generator."""
        super().reset(seed=seed)
        index = task_index(options, self.num_tasks, self.np_random)
        self.close()
        self.task = make_task(self.split, index)
        self.sandbox.names = tuple(self.task.calls)
        self.db = open_database(self.task.start)
        self.logged_in, self.answer, self.completed = set(), None, False
        self.observation, self.turns, self.over = self.task.prompt, 0, False
        return self.observation, {"answer": self.task.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Runs one piece of code; see the class for what becomes of the text."""
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        action = read_action(action, self.max_action_chars, self.multiline)
        try:
            output = self.sandbox.run(action, self.call)
        except OSError as error:
            raise WorldBroken(f"apps: {error}") from error
        self.turns += 1
        truncated = not self.completed and self.turns == self.max_turns
        self.over = self.completed or truncated
        info, reward = {"action": action}, 0.0
        if self.over:
            tests = run_tests(self.task, difference(self.task.state, read_state(self.db)), self.answer)
            success = self.completed and all(tests)
            if self.completed:
                reward = float(success) if self.reward == "success" else sum(tests) / len(tests)
                output = f"Task completed. Your score (min 0.0, max 1.0): {reward:.2f}"
            episode = {"return": reward, "length": self.turns, "success": success}
            info["result"] = episode | {"passed": sum(tests), "tests": len(tests)}
            self.close()
        self.observation += f"{action}\n=> {output.strip()}".rstrip(" ") + "\n"
        return self.observation, reward, self.completed, truncated, info

    def call(self, name: str, kwargs: dict) -> object:
        """Does what the code asks for.

        Name and arguments may be anything: a hostile agent has made them up.
        """
        call = self.task.calls.get(name)
        if call is None:
            raise Refused(f"there is no {name[:50]}")
        values = {parameter: default for parameter, (_, default) in call.parameters.items()}
        for parameter, value in kwargs.items():
            if parameter not in values:
                raise Refused(f"{name} has no parameter {parameter[:50]}")
            kind = call.parameters[parameter][0]
            if type(value) is not kind and kind is not object:
                raise Refused(f"{name}: {parameter} must be {kind.__name__}, not {type(value).__name__}")
            if isinstance(value, str) and len(value) > MAX_TEXT:
                raise Refused(f"{name}: {parameter} must not be longer than {MAX_TEXT} characters")
            values[parameter] = value
        if missing := [parameter for parameter, value in values.items() if value is ...]:
            raise Refused(f"{name} needs {missing[0]}")

        if name == "supervisor.complete_task":
            self.answer, self.completed = values["answer"], True
            raise Finished
        if name == "api_docs.show_api_doc":
            asked = values["name"]
            docs = [
                call.doc for other, call in self.task.calls.items() if asked in (other, other.split(".")[0])
            ]
            if not docs:
                raise Refused(f"there is no {asked[:50]}")
            return docs
        app = name.split(".")[0]
        if app in DATA["login"] and app not in self.logged_in and not name.endswith(".login"):
            raise Refused(f"log in to {app} first")
        rows = self.query(call, values)
        if name.endswith(".login"):
            if not rows:
                raise Refused("wrong password")
            self.logged_in.add(app)
            return "ok"
        return rows

    def query(self, call: Call, values: dict) -> list[dict] | str:
        """The rows of the last statement, or "ok". Either all statements of a call happen or none."""
        self.db.execute("begin")
        try:
            for statement in call.sql:
                cursor = self.db.execute(statement, values)
                if cursor.rowcount == 0:  # of a change; a select has -1
                    raise Refused(f"{call.name}: not found")
            result = rows_of(cursor) if cursor.description else "ok"
        except (sqlite3.Error, OverflowError, UnicodeError, Refused) as error:
            self.db.execute("rollback")
            raise error if isinstance(error, Refused) else Refused(f"{call.name}: {error}") from None
        self.db.execute("commit")
        return result

    def close(self) -> None:
        """Ends the process of the code, if there is one, and forgets the database."""
        self.sandbox.close()
        if hasattr(self, "db"):
            self.db.close()

    def goals(self, solved: dict[int, bool]) -> dict[str, float]:
        """Of tasks by index, solved or not: the share of whole scenarios, and of questions."""
        figures = {"scenarios": whole_scenarios(self.scenarios, solved)}
        figures["questions"] = [success for i, success in solved.items() if self.is_question[i]]
        return {name: fmean(values) for name, values in figures.items() if values}

    habits = staticmethod(habits)

    @property
    def players(self) -> dict[str, Callable[[str, random.Random], str]]:
        """Scripted players by name; `player(observation, rng)` is an action."""
        return {"scripted": scripted, "expert": expert, "random": random_player}

    def demonstrations(self, n: int, seed: int, careful: float = 0.25, **knobs) -> list[dict]:
        """`n` dialogues about training tasks: a share `careful` by the expert, the others by `scripted`,
        which gets the knobs."""
        world, player, rng = Apps(reward=self.reward), partial(scripted, **knobs), random.Random(seed)
        indices = sorted(rng.randrange(world.num_tasks) for _ in range(n))  # so that a task is made but once
        made = [
            dialogue(world, expert if rng.random() < careful else player, rng, index) for index in indices
        ]
        rng.shuffle(made)
        world.close()
        return made


# --------------------------------------------------------------------------------- 5. the players
# A player is a function of the observation and a random.Random. It finds out which scenario it is in, starts
# the solution from the beginning and sends it what was printed, until it comes to a step that has not been
# taken.


class Guess(int):
    """What one assumes who has not looked: each item and field of it is one made-up number,
    and fits everything."""

    def __getitem__(self, key):
        return self

    def __iter__(self):
        return iter([self])

    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


@lru_cache(maxsize=1000)
def pattern(sentence: str) -> re.Pattern:
    """The sentence of a scenario as a pattern with a group for each blank."""
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\w+)", re.escape(sentence)))


@lru_cache(maxsize=10_000)
def read_prompt(prompt: str) -> tuple[Scenario, dict]:
    """The scenario of a prompt and what fills its blanks."""
    head = re.match(r"Supervisor: (?P<me>\w+)\. Today is day (?P<today>\d+)\.\nTask: (.*)\n", prompt)
    offered = re.findall(r"^(\w+): ", prompt, re.MULTILINE)
    shop = next((app for app in offered if app in SHOPS), "")
    for scenario in SCENARIOS:
        if match := pattern(scenario.sentence).fullmatch(head[3]):
            found = head.groupdict() | match.groupdict() | {"shop": shop}
            values = {name: int(text) if text.isdigit() else text for name, text in found.items()}
            needed = inspect.signature(scenario.solve).parameters
            return scenario, {name: value for name, value in values.items() if name in needed}
    raise ValueError(f"no scenario has the sentence {head[3]!r}")


def split_turns(observation: str) -> list[tuple[str, str]]:
    """Code of one line and what it printed, for each turn so far."""
    return re.findall(r"^(.*)\n=>(.*)$", observation.split("\n\n", 1)[1], re.MULTILINE)


# CPython 3.11 adds up how deep all threads are in a text, and may raise SystemError
PARSING = threading.Lock()


def read_output(output: str) -> object:
    """What was printed, as an object; a guess where it is an error or nothing was found:
    one goes on regardless."""
    try:
        with PARSING:
            value = ast.literal_eval(output.strip())
    except (ValueError, SyntaxError):
        return Guess(50)
    return Guess(50) if value == [] else value


def completion(answer: object = None) -> str:
    return f"apis.supervisor.complete_task({'' if answer is None else f'answer={answer!r}'})"


def next_step(observation: str, assume: Callable[[str], object] | None = None) -> str:
    """The next step of the solution. With `assume` it is the one after that: as if it had been taken and had
    printed what `assume(code)` makes of it."""
    scenario, values = read_prompt(observation.split("\n\n", 1)[0])
    solution, turns = scenario.solve(**values), split_turns(observation)
    try:
        code = next(solution)
        while True:
            printed = [output for action, output in turns if action == code]
            if printed:
                code = solution.send(read_output(printed[-1]))
            elif assume:
                code, assume = solution.send(assume(code)), None
            else:
                return code
    except StopIteration as end:
        return completion(end.value)
    except (LookupError, RuntimeError, TypeError, ValueError):  # what it looks for is not there: it gives up
        return completion()


def expert(observation: str, rng: random.Random | None = None) -> str:
    """Looks up everything, reads what it needs to, and solves every task; `rng` is not used."""
    return next_step(observation)


def scripted(
    observation: str,
    rng: random.Random,
    hasty: float = 0.2,
    guessing: float = 0.25,
    careless: float = 0.2,
    garbled: float = 0.03,
) -> str:
    """The expert with the habits of a language model that has not been trained:
    the player of the demonstrations.

    In the share `guessing` of the turns it does not take the next step, a look-up or the documentation, but
    assumes what it would have found; in the share `careless` it takes another number or name of the last
    output than the right one; in the share `hasty` it completes the task, answering a question at random.
    Errors it ignores. The share `garbled` of its code comes out wrong, so that a learner sees how one goes on
    after a SyntaxError.
    """
    if rng.random() < garbled:
        return garble(next_step(observation), rng)
    draw = rng.random()
    if draw < hasty:
        scenario, _ = read_prompt(observation.split("\n\n", 1)[0])
        made_up = rng.choice([rng.choice(NUMBERS), rng.choice(WORDS["name"]), rng.choice(WORDS["words"])])
        return completion(made_up if scenario.answer else None)
    if draw < hasty + guessing:
        return next_step(observation, lambda code: assumption(code, observation, rng))
    code = next_step(observation)
    return confuse(code, observation, rng) if draw < hasty + guessing + careless else code


def assumption(code: str, observation: str, rng: random.Random) -> object:
    """What one might expect the code to print: for documentation the calls of the prompt in any order with
    drawn parameters, else one number for everything."""
    if "show_api_doc" not in code:
        return Guess(rng.choice(NUMBERS))
    app = re.search(r"'(\w+)'", code)[1]
    names = re.search(rf"^{app}: (.*)$", observation, re.MULTILINE)[1].split()
    rng.shuffle(names)
    family = "shop" if app in SHOPS else "device"
    words = draw_names(family, DRAWN["known"]["name"], rng)
    docs = []
    for name, (parameters, about, _) in zip(names, FAMILIES[family]["calls"].values(), strict=True):
        given = ", ".join(words[part] for part in re.findall(r"\w+(?=: )", parameters))
        docs.append(f"{about.split()[0]}: apis.{app}.{name}({given})")
    return docs


def confuse(code: str, observation: str, rng: random.Random) -> str:
    """The code with a value that it takes from the last output replaced by another one of that output.

    >>> seen = "\\n\\napis.x()\\n=> [{'name': 'Ada', 'day': 3, 'id': 7}]\\n"
    >>> confuse("apis.mail.star(id=7)", seen, random.Random(0))
    'apis.mail.star(id=3)'
    """
    turns = split_turns(observation)
    seen = re.findall(r"\d+|'\w+'(?!:)", turns[-1][1]) if turns else []
    taken = [value for value in re.findall(r"=(\d+|'\w+')", code) if value in seen]
    if not taken:
        return code
    right = rng.choice(taken)
    others = [value for value in seen if value != right and value[0].isdigit() == right[0].isdigit()]
    return code.replace(f"={right}", f"={rng.choice(others)}") if others else code


def garble(code: str, rng: random.Random) -> str:
    """The code without some of its words or marks."""
    parts = re.findall(r"\w+|\W", code)
    first = rng.randrange(len(parts))
    return "".join(parts[:first] + parts[first + rng.randrange(1, 4) :])


def random_player(observation: str, rng: random.Random) -> str:
    """Any call of those that the prompt names, with arguments that are made up."""
    offered = re.findall(r"^(\w+): (.*)$", observation.split("\n\n", 1)[0], re.MULTILINE)[2:]
    app, names = rng.choice(offered)
    name = f"{app}.{rng.choice(names.split())}"
    if name == "supervisor.complete_task":
        return completion(rng.choice([None, rng.randrange(100)]))
    made_up = {int: lambda: rng.choice(NUMBERS), str: lambda: rng.choice(WORDS["name"] + WORDS["title"])}
    known = CALLS[name].parameters if name in CALLS else {}
    arguments = ", ".join(f"{parameter}={made_up[kind]()!r}" for parameter, (kind, _) in known.items())
    return f"apis.{name}({arguments})"
