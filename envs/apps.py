"""Apps: solve small office tasks by writing Python that calls the simulated apps of a person.

    world = Apps(split="train")
    observation, info = world.reset(options={"index": 3})
    observation, reward, terminated, truncated, info = world.step("apis.phone.find(name='Ada')")
"""

import ast
import json
import operator
import random
import re
import sqlite3
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import gymnasium

from envs.apps_tasks import SCENARIOS, Scenario
from envs.datasets import dialogue
from envs.sandbox import Finished, Refused, Sandbox

# ------------------------------------------------------------------------------------ 1. the apps

DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WORDS = {name: words.split() for name, words in DATA["words"].items()}
LOGIN = ["pay"]  # the apps that want a password
TYPES = {"int": int, "str": str}
SUPERVISOR = {"supervisor.complete_task": "answer", "supervisor.show_passwords": "", "api_docs.show_api_doc": "name"}


class Call(NamedTuple):
    """A call of an app."""

    name: str
    params: dict[str, tuple[type, object]]  # name -> type, default (None: it must be given)
    about: str
    sql: list[str]

    @property
    def doc(self) -> str:
        given = [name if default is None else f"{name}={default!r}" for name, (_, default) in self.params.items()]
        return f"{self.name}({', '.join(given)}): {self.about}"


def read_calls() -> dict[str, Call]:
    calls = {}
    for app in DATA.keys() - {"tables", "words"}:
        for name, (params, about, sql) in DATA[app].items():
            found = re.findall(r"(\w+): (\w+)(?: = (\S+))?", params)
            params = {p: (TYPES[kind], ast.literal_eval(default) if default else None) for p, kind, default in found}
            calls[f"{app}.{name}"] = Call(f"{app}.{name}", params, about, [sql] if isinstance(sql, str) else sql)
    for app in LOGIN:
        sql = f"select 'ok' from password where app = '{app}' and password = :password"
        calls[f"{app}.login"] = Call(f"{app}.login", {"password": (int, None)}, "logs in", [sql])
    calls["supervisor.show_passwords"] = Call(
        "supervisor.show_passwords", {}, "the passwords of the apps", ["select app, password from password"]
    )
    return calls


CALLS = read_calls()


def populate(db: sqlite3.Connection, rng: random.Random) -> None:
    """Fills an empty database with invented people and things."""
    ids = iter(rng.sample(range(100, 1000), 200))
    numbers = iter(rng.sample(range(100, 1000), 200))

    def add(table: str, **row) -> None:
        names = ", ".join(["id", *row])
        db.execute(f"insert into {table} ({names}) values ({', '.join('?' * (len(row) + 1))})", [next(ids), *row.values()])

    names, titles = rng.sample(WORDS["names"], 7), rng.sample(WORDS["titles"], 12)
    for app in LOGIN:
        add("password", app=app, password=next(numbers))
    for name in names:
        add("contact", name=name, phone=next(numbers), kind=rng.choice(WORDS["kinds"]))
    days = rng.sample(range(1, 100), 9)
    for title, day in zip(titles, days):
        add("mail", sender=rng.choice(names[:5]), subject=title, day=day, read=rng.randrange(2), starred=0,
            words=rng.choice(WORDS["words"]))
    for title in rng.sample(titles, 5):
        add("note", title=title, words=rng.choice(WORDS["words"]))
    add("account", balance=rng.randrange(100, 1000))
    for _ in range(4):
        add("transfer", name=rng.choice(names), amount=rng.randrange(5, 100))
    for name in rng.sample(names, 4):
        add("request", name=name, amount=rng.randrange(5, 100), state=rng.choice(["open", "denied"]))


# ------------------------------------------------------------------------------------ 2. the tasks
# A state is {(table, id): row}, a difference {(table, id): row or None}; new rows stand without their id.

SPLITS = {"train": 8, "dev": 2, "test-normal": 3, "test-challenge": 3}  # scenarios of each kind
VARIANTS = 3


class Task(NamedTuple):
    id: str
    scenario: Scenario
    prompt: str
    answer: object  # None if nothing is asked
    changes: Counter  # of (table, id or None, row or None)
    start: bytes  # the database
    state: dict


def open_database(start: bytes | None = None) -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    if start:
        db.deserialize(start)
    else:
        for table, columns in DATA["tables"].items():
            db.execute(f"create table {table} (id integer primary key, {columns})")
    return db


def read_state(db: sqlite3.Connection) -> dict:
    return {(table, row[0]): row[1:] for table in DATA["tables"] for row in db.execute(f"select * from {table}")}


def difference(before: dict, after: dict) -> Counter:
    """What has changed: a row for each that is other, gone (None) or new (without its id)."""
    changes = Counter()
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            table, id = key
            changes[table, id if key in before else None, after.get(key)] += 1
    return changes


def tasks_of(split: str) -> list[tuple[Scenario, int, int]]:
    return [
        (scenario, number, variant)
        for scenario in SCENARIOS
        if scenario.challenge == (split == "test-challenge")
        for number in range(SPLITS[split])
        for variant in range(1, VARIANTS + 1)
    ]


@lru_cache(maxsize=10_000)
def make_task(split: str, index: int) -> Task:
    scenario, number, variant = tasks_of(split)[index]
    id = f"{scenario.name}.{split}{number}_{variant}"
    rng = random.Random(id)
    rows = []
    while not rows:
        db = open_database()
        populate(db, rng)
        cursor = db.execute(scenario.draw)
        rows = [dict(zip([c[0] for c in cursor.description], row)) for row in cursor]
    values = rng.choice(rows)
    for name, kind in scenario.fresh.items():
        if kind in WORDS:
            values[name] = rng.choice(WORDS[kind])
        else:
            values[name] = rng.randrange(100, 1000) if kind == "number" else rng.randrange(5, 100)
    start, before = db.serialize(), read_state(db)
    answer = db.execute(scenario.answer, values).fetchone()[0] if scenario.answer else None
    for statement in scenario.changes:
        db.execute(statement, values)
    changes = difference(before, read_state(db))
    apps = set(scenario.apps.split()) | {rng.choice([app for app in DATA if app not in ("tables", "words")])}
    index_lines = []
    for app in sorted(apps):
        index_lines.append(f"{app}: " + " ".join(name.partition(".")[2] for name in sorted(CALLS) if name.startswith(f"{app}.")))
    prompt = (
        f"{scenario.sentence.format(**values)}\n"
        "Write Python: apis.app.call(). "
        "api_docs: show_api_doc; supervisor: complete_task show_passwords; " + "; ".join(index_lines) + "\n\n"
    )
    return Task(id, scenario, prompt, answer, changes, start, before)


def grade(task: Task, changes: Counter, answer: object) -> list[bool]:
    """The tests of a task: each requested change, nothing else changed, the right answer."""
    tests = [changes[change] == n for change, n in task.changes.items()]
    tests.append(not set(changes) - set(task.changes))
    if task.answer is not None:
        tests.append(str(answer).strip().lower() == str(task.answer).lower())
    return tests


# ------------------------------------------------------------------------------------ 3. the world


class AnyText(gymnasium.spaces.Text):
    """Every string up to a length: a policy may write in any script. Samples are printable ASCII."""

    def __init__(self, max_length: int):
        super().__init__(max_length, min_length=0, charset="".join(map(chr, range(32, 127))))

    def contains(self, x) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class Apps(gymnasium.Env):
    id = "apps"
    max_action_chars = 1000
    append_only = True
    multiline = True
    demonstration_env = "apps"
    best_return = 1.0
    expert_return = 1.0

    def __init__(self, split: str = "train", reward: str = "fraction", max_turns: int = 10, max_output: int = 1000):
        if split not in SPLITS:
            raise ValueError(f"split: {split!r} is none of {', '.join(SPLITS)}")
        if reward not in ("fraction", "success"):
            raise ValueError(f"reward: {reward!r} is neither fraction nor success")
        self.split, self.reward, self.max_turns, self.max_output = split, reward, max_turns, max_output
        tasks = tasks_of(split)
        self.num_tasks = len(tasks)
        self.scenarios = tuple(i // VARIANTS for i in range(self.num_tasks))
        self.difficulties = tuple(scenario.difficulty for scenario, _, _ in tasks)
        self.is_question = tuple(scenario.answer is not None for scenario, _, _ in tasks)
        self.observation_space = AnyText(5000 + max_turns * (self.max_action_chars + max_output + 200))
        self.action_space = AnyText(self.max_action_chars)
        self.sandbox = Sandbox(max_output=max_output)
        self.over = True

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"index"}:
            raise ValueError(f"reset knows the option index, not {', '.join(map(repr, sorted(unknown)))}")
        index = options.get("index")
        index = int(self.np_random.integers(self.num_tasks)) if index is None else operator.index(index)
        if not 0 <= index < self.num_tasks:
            raise ValueError(f"index: {index} is not in 0..{self.num_tasks - 1}")
        self.sandbox.close()
        self.task = make_task(self.split, index)
        self.db = open_database(self.task.start)
        self.logged_in, self.answer, self.completed = set(), None, False
        self.observation, self.turns, self.over = self.task.prompt, 0, False
        return self.observation, {"answer": self.task.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        if not isinstance(action, str):
            raise TypeError(f"an action is a str, not {type(action).__name__}")
        action = action.strip()[: self.max_action_chars]
        output = self.sandbox.run(action, self.call).strip()
        self.turns += 1
        self.observation += f"{action}\n=> {output}\n"
        truncated = not self.completed and self.turns == self.max_turns
        self.over = self.completed or truncated
        info, reward = {"action": action}, 0.0
        if self.over:
            self.sandbox.close()
            passed = grade(self.task, difference(self.task.state, read_state(self.db)), self.answer)
            success = self.completed and all(passed)
            if self.completed:  # at the time limit nothing was handed in
                reward = sum(passed) / len(passed) if self.reward == "fraction" else float(success)
            info["episode"] = {
                "return": reward, "length": self.turns, "success": success, "passed": sum(passed), "tests": len(passed),
            }  # fmt: skip
        return self.observation, reward, self.completed, truncated, info

    def call(self, name: str, kwargs: dict) -> object:
        """Answers a call of the agent's code. Whatever is in the arguments was written by the agent."""
        if name == "supervisor.complete_task":
            if kwargs.keys() - {"answer"}:
                raise Refused("complete_task takes answer")
            self.answer, self.completed = kwargs.get("answer"), True
            raise Finished
        if name == "api_docs.show_api_doc":
            asked = kwargs.get("name")
            if kwargs.keys() != {"name"} or asked not in CALLS:
                raise Refused(f"no call {asked!r}" if kwargs.keys() == {"name"} else "show_api_doc takes name")
            return CALLS[asked].doc
        call = CALLS.get(name)
        if call is None:
            raise Refused(f"no call {name}")
        values = {param: default for param, (_, default) in call.params.items()}
        for param, value in kwargs.items():
            if param not in call.params:
                raise Refused(f"{name} has no parameter {param}")
            if type(value) is not call.params[param][0]:
                raise Refused(f"{name}: {param} must be {call.params[param][0].__name__}")
            values[param] = value
        for param, value in values.items():
            if value is None:
                raise Refused(f"{name} needs {param}")
        app = name.split(".")[0]
        if app in LOGIN and app not in self.logged_in and name != f"{app}.login":
            raise Refused(f"log in to {app} first")
        try:
            self.db.execute("begin")
            for statement in call.sql:
                cursor = self.db.execute(statement, values)
                rows = cursor.fetchall()
                if cursor.rowcount == 0:
                    raise Refused(f"{name}: not found")
            self.db.execute("commit")
        except (sqlite3.Error, OverflowError, UnicodeError, Refused) as error:
            self.db.execute("rollback")
            raise Refused(str(error)) from None
        if name == f"{app}.login":
            if not rows:
                raise Refused("wrong password")
            self.logged_in.add(app)
            return "ok"
        if cursor.description is None:
            return "ok"
        return [dict(zip([column[0] for column in cursor.description], row)) for row in rows]

    def close(self) -> None:
        self.sandbox.close()

    def no_op_returns(self) -> list[float]:
        """Of each task, what it pays to complete it at once."""
        results = []
        for index in range(self.num_tasks):
            passed = grade(make_task(self.split, index), Counter(), None)
            results.append(sum(passed) / len(passed) if self.reward == "fraction" else float(all(passed)))
        return results

    @property
    def players(self) -> dict[str, Callable[[str, random.Random], str]]:
        return {"scripted": scripted, "expert": expert, "random": random_player}

    def demonstrations(self, n: int, seed: int, **knobs) -> list[dict]:
        world, player, rng = Apps(reward=self.reward), partial(scripted, **knobs), random.Random(seed)
        made = [dialogue(world, player, rng, rng.randrange(world.num_tasks)) for _ in range(n)]
        world.close()
        return made


# ------------------------------------------------------------------------------------ 4. the players

DONE = "apis.supervisor.complete_task({})"


class Guess(int):
    """What someone assumes who has not looked: every field and every item of it is the same made-up number."""

    def __getitem__(self, key):
        return self

    def __iter__(self):
        return iter([self])

    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


@lru_cache(maxsize=None)
def pattern(sentence: str) -> re.Pattern:
    text = re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\w+)", re.escape(sentence))
    return re.compile(text + "$")


def understand(observation: str) -> tuple[Scenario, dict]:
    sentence = observation.split("\n", 1)[0]
    for scenario in SCENARIOS:
        if match := pattern(scenario.sentence).match(sentence):
            return scenario, {k: int(v) if v.isdigit() else v for k, v in match.groupdict().items()}
    raise ValueError(f"no scenario has the sentence {sentence!r}")


def turns_of(observation: str) -> list[tuple[str, str]]:
    """The actions so far and what each printed."""
    return re.findall(r"^(.*)\n=> ?(.*)$", observation.split("\n\n", 1)[1], re.MULTILINE)


def parse(output: str) -> object:
    try:
        value = ast.literal_eval(output)
    except (ValueError, SyntaxError):
        return Guess(100)  # an error: go on as if there were none
    return Guess(100) if value == [] else value


def next_step(observation: str, guess: int | None = None) -> str:
    """What the solution does next, after the steps of it that were taken; with `guess`, as if it had been looked up."""
    scenario, values = understand(observation)
    solution, turns = scenario.solve(**values), turns_of(observation)
    try:
        code = next(solution)
        while True:
            taken = [output for action, output in turns if action == code]
            if not taken:
                if guess is None:
                    return code
                code, guess = solution.send(Guess(guess)), None
                if code.startswith("apis.supervisor"):
                    return code
                return code
            code = solution.send(parse(taken[-1]))
    except StopIteration as end:
        return DONE.format("" if end.value is None else f"answer={end.value!r}")


def expert(observation: str, rng: random.Random | None = None) -> str:
    return next_step(observation)


def scripted(observation: str, rng: random.Random, hasty: float = 0.2, guessing: float = 0.2) -> str:
    """The expert with bad habits: completes without having done it, guesses what it should look up."""
    scenario, _ = understand(observation)
    if rng.random() < hasty:
        wrong = rng.choice([rng.randrange(100, 1000), rng.choice(WORDS["names"]), rng.choice(WORDS["words"])])
        return DONE.format(f"answer={wrong!r}" if scenario.answer else "")
    return next_step(observation, rng.randrange(100, 1000) if rng.random() < guessing else None)


def random_player(observation: str, rng: random.Random) -> str:
    """Any call with made-up arguments."""
    name = rng.choice([*CALLS, "supervisor.complete_task"])
    if name not in CALLS:
        return DONE.format("")
    made = {int: lambda: rng.randrange(100, 1000), str: lambda: rng.choice(WORDS["names"] + WORDS["titles"])}
    return f"apis.{name}({', '.join(f'{p}={made[kind]()!r}' for p, (kind, _) in CALLS[name].params.items())})"
