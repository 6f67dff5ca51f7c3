"""Mini Detective: read the clues in a house of nine rooms, find the ruby, accuse the thief.

    world = MiniDetective()
    observation, info = world.reset(seed=0)
    observation, reward, terminated, truncated, info = world.step("east")

    Kitchen. A stove glows. The cellar is too dark to enter. The cook is here: red hair, slippers.
    You carry: nothing.
    Notes: none.
    You go east.
    Actions: west, search stove, accuse cook

It stands in for Detective, the Z-machine game that ArCHer plays (Zhou et al. 2024, arXiv:2402.19446), where
there is no copy of that game. What a policy sees has the same parts: surroundings, inventory, what the last
action did, and the list of available actions. Anything else is answered "Illegal Action." and costs a turn;
there are 60. The reward is the change of the score. The story is ours and stands in mini_detective.toml, for
a reader to change.

    a task       a thief and a hiding place: 6 x 4 = 24. Nothing but the clues differs between them
    the score    20 at best: things 1 each, clues 2 each, the ruby 4, the right accusation 8
    dead ends    a wrong accusation costs 5 and ends the game; who searches a wrong place warns the thief, and
                 the ruby is lost; who cleans the case or rakes the earth destroys a clue
    success      the right accusation, with or without the rest

An observation holds all there is to know of the past, except how many turns are gone: the notebook keeps what
was read and what was lost. So the players below, like a policy, see the last observation and nothing else.

To take it alone, copy envs/__init__.py, envs/datasets.py, envs/worlds/mini_detective.py and
envs/worlds/mini_detective.toml, each to the same place. It needs gymnasium and nothing else.
"""

import random
import tomllib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import gymnasium

from envs import AnyText, read_action, task_index
from envs.datasets import dialogue

ILLEGAL = "Illegal Action."

# -------------------------------------------------------------------------------- 1. the case
# What has happened is a frozenset of events: the things taken, the clues read ("case") or destroyed
# ("no case"), and the ruby, found ("ruby") or lost ("no ruby"). Room and events are the whole state.

CASE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ROOMS, THINGS, CLUES = CASE["rooms"], CASE["things"], CASE["clues"]
PEOPLE, PLACES, POINTS = CASE["people"], CASE["places"], CASE["points"]
TRAITS = {name: {key: value for key, value in row.items() if key != "room"} for name, row in PEOPLE.items()}
# The clues are written with these: {"thief": "cook", "place": "clock", "hair": "red", ...}
TASKS = [{"thief": thief, "place": place, **TRAITS[thief]} for thief in PEOPLE for place in PLACES]
BEST = sum(row["points"] for row in [*THINGS.values(), *CLUES.values()]) + POINTS["ruby"] + POINTS["arrest"]


class Deed(NamedTuple):
    """An action in a room, possible with the events `needs` and without those of `unless`."""

    action: str
    kind: str  # "go", "take", "read", "spoil", "search" or "accuse"
    what: str  # where to, which thing, which clue, which place, whom
    needs: frozenset = frozenset()
    unless: frozenset = frozenset()


def deeds_in(room: str) -> list[Deed]:
    """All that can ever be done in a room, in the order in which it is listed."""
    deeds = []
    for way, other in ROOMS[room]["exits"].items():
        needs = frozenset([ROOMS[other]["needs"]]) if "needs" in ROOMS[other] else frozenset()
        deeds.append(Deed(way, "go", other, needs))
    for name in [name for name, row in THINGS.items() if row["room"] == room]:
        deeds.append(Deed(f"take {name}", "take", name, unless=frozenset([name])))
    for name, row in [(name, row) for name, row in CLUES.items() if row["room"] == room]:
        unless = frozenset([name, f"no {name}"])
        deeds.append(Deed(row["do"], "read", name, unless=unless))
        if "spoil" in row:
            deeds.append(Deed(row["spoil"], "spoil", name, unless=unless))
    for name in [name for name, row in PLACES.items() if row["room"] == room]:
        deeds.append(Deed(f"search {name}", "search", name, unless=frozenset(["ruby", "no ruby"])))
    for name in [name for name, row in PEOPLE.items() if row["room"] == room]:
        deeds.append(Deed(f"accuse {name}", "accuse", name))
    return deeds


DEEDS = {room: deeds_in(room) for room in ROOMS}
ACTIONS = sorted({deed.action for deeds in DEEDS.values() for deed in deeds})


@lru_cache(maxsize=100_000)
def available(room: str, events: frozenset) -> dict[str, Deed]:
    """What can be done now, by the action that does it. It is the same in all tasks:
    the list gives nothing away.

    >>> list(available("kitchen", frozenset()))
    ['west', 'search stove', 'accuse cook']
    >>> list(available("kitchen", frozenset(["lamp", "ruby"])))
    ['west', 'down', 'accuse cook']
    """
    return {deed.action: deed for deed in DEEDS[room] if deed.needs <= events and not deed.unless & events}


def outcome(deed: Deed, task: dict) -> tuple[str, int, str]:
    """What a deed comes to in a task: its event, the change of the score, and what one reads.

    >>> outcome(available("kitchen", frozenset())["search stove"], TASKS[0])
    ('no ruby', 0, 'Nothing. The noise has warned the thief: the ruby is lost.')
    """
    if deed.kind == "go":
        return "", 0, f"You go {deed.action}."
    if deed.kind == "take":
        return deed.what, THINGS[deed.what]["points"], f"You take the {deed.what}."
    if deed.kind == "read":
        return deed.what, CLUES[deed.what]["points"], CLUES[deed.what]["says"].format(**task)
    if deed.kind == "spoil":
        return f"no {deed.what}", 0, CLUES[deed.what]["spoiled"]
    if deed.kind == "search":
        if task["place"] == deed.what:
            return "ruby", POINTS["ruby"], "The ruby! You take it."
        return "no ruby", 0, "Nothing. The noise has warned the thief: the ruby is lost."
    if task["thief"] == deed.what:
        return "arrest", POINTS["arrest"], f"The {deed.what} confesses. Well done!"
    return "wrong", POINTS["wrong"], f"The {deed.what} was innocent. You are off the case."


# ------------------------------------------------------------------------------- 2. the text


@lru_cache(maxsize=100_000)
def surroundings(room: str, events: frozenset) -> str:
    """The first line of an observation."""
    said = [f"{room.capitalize()}.", ROOMS[room]["text"]]
    for other in ROOMS[room]["exits"].values():
        if "needs" in ROOMS[other] and ROOMS[other]["needs"] not in events:
            said.append(ROOMS[other]["closed"])
    said += [
        f"A {name} lies here." for name, row in THINGS.items() if row["room"] == room and name not in events
    ]
    for name, row in CLUES.items():
        if row["room"] == room and not events & {name, f"no {name}"}:
            said.append(row["sight"])
    said += [f"The {name} is here: {looks(name)}." for name, row in PEOPLE.items() if row["room"] == room]
    return " ".join(said)


def looks(person: str) -> str:
    """How a person looks, in the words of the notebook.

    >>> looks("cook")
    'red hair, slippers'
    """
    notes = [
        row["note"]
        for row in CLUES.values()
        if any(f"{{{trait}}}" in row["note"] for trait in TRAITS[person])
    ]
    return ", ".join(note.format(**TRAITS[person]) for note in notes)


@lru_cache(maxsize=100_000)
def belongings(events: frozenset, index: int) -> str:
    """The second and third line: what one carries, and the notebook in task `index`."""
    carried = [name for name in [*THINGS, "ruby"] if name in events]
    notes = [row["note"].format(**TASKS[index]) for name, row in CLUES.items() if name in events]
    notes += [row["lost"] for name, row in CLUES.items() if f"no {name}" in events]
    notes += ["ruby lost"] * ("no ruby" in events)
    return f"You carry: {', '.join(carried) or 'nothing'}.\nNotes: {', '.join(notes) or 'none'}."


# ------------------------------------------------------------------------------ 3. the world


class MiniDetective(gymnasium.Env):
    """The world. An observation is the state in five lines,
    an action is one of those that its last line lists.

    An action is cut at its first newline, stripped of blanks at both ends and then cut to `max_action_chars`;
    `info["action"]` is what remains. It may be written in capitals. Every text that is not listed, the empty
    one too, is illegal: it changes nothing and costs a turn. No text of an action gets into an observation.
    """

    rules = (
        "A ruby was stolen in this house. Read the clues, find the ruby, accuse the thief. The last line "
        f"says what you can do. The best score is {BEST}."
    )
    id = "mini-detective"
    num_tasks = len(TASKS)
    max_turns = 60
    max_action_chars = 100
    append_only = False
    demonstration_env = "mini-detective"
    best_return = float(BEST)  # of every task
    expert_return = float(BEST)

    def __init__(self):
        self.observation_space = AnyText(2000)
        self.action_space = AnyText(self.max_action_chars)
        self.over = True  # until the first reset

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts with the task `options["index"]`, or one drawn by the world's own generator.

        `info["answer"]` is the thief and the hiding place: "cook, clock".
        """
        super().reset(seed=seed)
        index = task_index(options, self.num_tasks, self.np_random)
        self.index, self.task = index, TASKS[index]
        self.room, self.events = CASE["start"], frozenset()
        self.turns, self.total, self.over = 0, 0.0, False
        return self.observe(CASE["intro"]), {"answer": f"{self.task['thief']}, {self.task['place']}"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Does one deed; see the class for what becomes of the text."""
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        action = read_action(action, self.max_action_chars)

        event, points, feedback = "", 0, ILLEGAL
        if deed := available(self.room, self.events).get(action.lower()):
            event, points, feedback = outcome(deed, self.task)
            self.room = deed.what if deed.kind == "go" else self.room
            self.events = self.events | {event} if event else self.events
        terminated = event in ("arrest", "wrong")
        self.turns += 1
        self.total += points
        truncated = not terminated and self.turns == self.max_turns
        self.over = terminated or truncated

        info = {"action": action}
        if self.over:
            info["result"] = {"return": self.total, "length": self.turns, "success": event == "arrest"}
        observation = self.observe(f"{feedback} ({points:+d})" if points else feedback)
        return observation, float(points), terminated, truncated, info

    def observe(self, feedback: str) -> str:
        """The state in words, with what the last action did."""
        actions = "none" if self.over else ", ".join(available(self.room, self.events))
        where, what = surroundings(self.room, self.events), belongings(self.events, self.index)
        return f"{where}\n{what}\n{feedback}\nActions: {actions}\n"

    @property
    def players(self) -> dict[str, Callable[[str, random.Random], str]]:
        """Scripted players by name; `player(observation, rng)` is an action."""
        return {"scripted": scripted, "expert": expert, "random": random_player}

    def demonstrations(self, n: int, seed: int, **knobs) -> list[dict]:
        """`n` dialogues of the player `mixed` (whose knobs these are) about tasks drawn evenly."""
        world, player, rng = MiniDetective(), partial(mixed, **knobs), random.Random(seed)
        return [dialogue(world, player, rng, rng.randrange(world.num_tasks)) for _ in range(n)]


# ---------------------------------------------------------------------------- 4. the players
# A player is a function of the observation and a random.Random, and knows the house but not the task.


class View(NamedTuple):
    """What an observation says: the state, and the tasks in which the notebook would read so."""

    room: str
    events: frozenset
    tasks: frozenset  # of indices
    actions: tuple[str, ...]


@lru_cache(maxsize=100_000)
def read_state(surroundings: str, carried: str, notes: str) -> tuple[str, frozenset, frozenset]:
    """Room, events and tasks, from the first three lines of an observation."""
    events = set(carried.removeprefix("You carry: ").rstrip(".").split(", ")) & {*THINGS, "ruby"}
    written = set(notes.removeprefix("Notes: ").rstrip(".").split(", "))
    tasks = set(range(len(TASKS)))
    for name, row in CLUES.items():
        if row.get("lost") in written:
            events.add(f"no {name}")
        elif agreeing := {i for i, task in enumerate(TASKS) if row["note"].format(**task) in written}:
            events.add(name)
            tasks &= agreeing
    if "ruby lost" in written:
        events.add("no ruby")
    return surroundings.split(".")[0].lower(), frozenset(events), frozenset(tasks)


def read(observation: str) -> View:
    """The observation, understood.

    >>> room, events, tasks, actions = read(MiniDetective().reset(options={"index": 0})[0])
    >>> room, sorted(events), len(tasks), actions[:2]
    ('hall', [], 24, ('north', 'east'))
    """
    where, carried, notes, _, actions = observation.rstrip("\n").split("\n")
    return View(*read_state(where, carried, notes), tuple(actions.removeprefix("Actions: ").split(", ")))


def random_player(observation: str, rng: random.Random) -> str:
    """Any available action."""
    return rng.choice(read(observation).actions)


def scripted(
    observation: str, rng: random.Random, early: float = 0.05, sure: float = 0.3, busy: float = 0.8
) -> str:
    """Wanders about without a plan, and sometimes accuses too early.

    Where it meets the thief, it accuses: always with the ruby in its pocket, with the probability `sure`
    without it. Anybody else whom the notes leave possible it accuses with the probability `early`. It
    searches where the letter says and nowhere else, takes and reads what it finds with the probability
    `busy`, and goes anywhere otherwise.
    """
    room, events, tasks, actions = read(observation)
    deeds = [available(room, events)[action] for action in actions]
    suspects = {TASKS[i]["thief"] for i in tasks}
    haste = early if len(suspects) > 1 else 1.0 if "ruby" in events else sure
    for deed in deeds:
        if deed.kind == "search" and all(TASKS[i]["place"] == deed.what for i in tasks):
            return deed.action
        if deed.kind == "accuse" and deed.what in suspects and rng.random() < haste:
            return deed.action
    useful = [deed.action for deed in deeds if deed.kind in ("take", "read")]
    ways = [deed.action for deed in deeds if deed.kind == "go"]
    return rng.choice(useful if useful and rng.random() < busy else ways)


def mixed(
    observation: str, rng: random.Random, randomly: float = 0.15, illegal: float = 0.02, **knobs
) -> str:
    """The player of the demonstrations: `scripted`, but in the share `randomly`
    of the turns any available action.

    The share `illegal` of its actions are actions of the game that are not available, so that a learner sees
    how the game goes on after "Illegal Action."
    """
    draw = rng.random()
    if draw < illegal:
        return rng.choice([action for action in ACTIONS if action not in read(observation).actions])
    return (
        random_player(observation, rng) if draw < illegal + randomly else scripted(observation, rng, **knobs)
    )


def expert(observation: str, rng: random.Random | None = None) -> str:
    """The play of most points and, among those, of fewest steps on average over the tasks;
    `rng` is not used."""
    room, events, tasks, actions = read(observation)
    _, where, action = plan(room, events, tasks)
    if not action:  # nothing is left that is worth its risk: it walks until the time is up
        return actions[0]
    return action if where == room else routes(room, events)[where][1]


@lru_cache(maxsize=100_000)
def plan(room: str, events: frozenset, tasks: frozenset) -> tuple[tuple[int, int], str, str]:
    """The best to come, (points, -steps) summed over the `tasks` still possible, and the next deed:
    where and what.

    Between two deeds it walks the shortest way, so that only the deeds are tried, every one in every order.
    "" is to do nothing more, which earns nothing.
    """
    best = (0, 0), room, ""
    for where, (steps, _) in routes(room, events).items():
        for deed in available(where, events).values():
            if deed.kind in ("go", "spoil"):
                continue  # walking is counted in `steps`, and to spoil a clue never helps
            # The next plan may depend on what one reads, and on nothing else: a group has read the same.
            groups = {}
            for i in tasks:
                groups.setdefault(outcome(deed, TASKS[i]), set()).add(i)
            points, cost = 0, -(steps + 1) * len(tasks)
            for (event, reward, _), group in groups.items():
                points += reward * len(group)
                if event not in ("arrest", "wrong"):
                    (more, further), _, _ = plan(where, events | {event}, frozenset(group))
                    points, cost = points + more, cost + further
            best = max(best, ((points, cost), where, deed.action), key=lambda one: one[0])
    return best


@lru_cache(maxsize=100_000)
def routes(room: str, events: frozenset) -> dict[str, tuple[int, str]]:
    """For each room that can be reached: the steps to it and the first of them."""
    found, queue = {room: (0, "")}, [room]
    for here in queue:
        for deed in available(here, events).values():
            if deed.kind == "go" and deed.what not in found:
                found[deed.what] = found[here][0] + 1, found[here][1] or deed.action
                queue.append(deed.what)
    return found
