"""The school: ten kinds of exercises in a school of eight rooms, where some 300 to 500 actions are valid.

    world = School("find-plant")
    observation, info = world.reset(seed=0)
    observation, reward, terminated, truncated, info = world.step("go to garden")

    Task: Find a plant. Focus on it, then bring it to the green box in the attic.
    You are in the garden, with beehive, compost heap, flower pot, ... You see: hop vine, tin can, ...
    You carry: nothing.
    You go to the garden.

It is not ScienceWorld (Wang et al. 2022, arXiv:2203.07540), and its scores say nothing about that: it is a
small world of our own for what ScienceWorld is used for, without Java and hundreds of times as fast. It
borrows the names of ten of its tasks, its options and its kind of score. Rooms, things, rules and words are
ours and stand in school.toml, for a reader to change.

    tasks        10, each with 70 variations; one world plays one of them
    splits       variations 0 to 39 are "train", 10 "dev", 20 "test". In dev and test the words of the task
                 are new, and part of what is looked for: a "maple tree" beside a "pine tree"
    reward       change of the score, 0 to 100, which is the sum of the sub-goals reached. Who focuses on what
                 was not asked for fails: the score becomes -100. Evaluations take max(score, 0)
    the end      success (100) and failure terminate, `step_limit` truncates
    actions      any text; info["valid"] has those that are understood here

To take it alone, copy envs/__init__.py, envs/datasets.py, envs/worlds/school.py and envs/worlds/school.toml,
each to the same place. It needs gymnasium and nothing else.
"""

import random
import re
import tomllib
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import gymnasium

from envs import AnyText, read_action, task_index
from envs.datasets import dialogue

# -------------------------------------------------------------------------------- 1. the school

BOOK = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ROOMS = BOOK["rooms"]
HOLDERS, SWITCHES = frozenset(BOOK["fixtures"]["holders"]), frozenset(BOOK["fixtures"]["switches"])
TASKS = tuple(BOOK["tasks"])
VARIATIONS = {"train": range(40), "dev": range(40, 50), "test": range(50, 70)}
SPLITS = tuple(VARIATIONS)
POT, KETTLE, LAMP, BOWL = "flower pot", "kettle", "test lamp", "mixing bowl"
THERMOMETER, CAN = "thermometer", "watering can"
PRIMARY = ("blue", "red", "yellow")
FAILED = -100
SLOW = 3  # turns that a kettle takes to boil, and a seed to grow


def variations(task: str, split: str) -> range:
    """The variations of a split, the same for every task.

    >>> variations("boil", "test")
    range(50, 70)
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r}; known: {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"split {split!r}; known: {', '.join(SPLITS)}")
    return VARIATIONS[split]


class Thing(NamedTuple):
    """What can be met; what cannot be taken is a fixture or a box."""

    name: str
    kind: str  # "animal", "plant", "copy", "object", "liquid", "colour", "seed", "tool" or "box"
    split: str  # in which it is met, if not "train": then everywhere
    noun: str = ""
    years: int = 0  # that an animal lives
    conducts: bool = False


def all_things() -> dict[str, Thing]:
    """Everything of school.toml that is no fixture, by its name."""
    things = []
    for split in SPLITS:
        things += [Thing(name, "box", split) for name in BOOK["boxes"][split]]
        things += [Thing(name, "tool", split) for name in BOOK["tools"][split]]
        for noun, row in BOOK["animals"].items():
            things += [Thing(f"{x} {noun}", "animal", split, noun, row["years"]) for x in row[split]]
        for noun, row in BOOK["plants"].items():
            things += [Thing(f"{x} {noun}", "plant", split, noun) for x in row[split]]
            if noun in BOOK["seeds"]["of"]:
                things += [Thing(f"{x} seed", "seed", split, f"{x} {noun}") for x in row[split]]
        for material, row in BOOK["copies"].items():
            things += [Thing(f"{material} {noun}", "copy", split, noun) for noun in row[split]]
        for material, row in BOOK["objects"].items():
            conducts = row["conducts"]
            things += [Thing(f"{material} {x}", "object", split, x, 0, conducts) for x in row[split]]
        for noun, row in BOOK["liquids"].items():
            things += [Thing(f"{x} {noun}", "liquid", split, noun) for x in row[split]]
        for medium in BOOK["colours"]["media"][split]:
            things += [Thing(f"{colour} {medium}", "colour", split, medium) for colour in PRIMARY]
    return {thing.name: thing for thing in things}


THINGS = all_things()
FOUND = {  # the kinds that each of the tasks of finding looks for
    "find-plant": ("plant",),
    "find-animal": ("animal",),
    "find-living-thing": ("animal", "plant"),
    "find-non-living-thing": ("copy",),
}
# How many things of a kind lie about, beside those that a task needs; seeds only where one is to grow.
SCATTERED = {"animal": 5, "plant": 5, "copy": 14, "liquid": 8, "colour": 6, "tool": 6, "object": 16}


def names(kind: str, *splits: str) -> list[str]:
    """The things of a kind that are met in these splits, sorted.

    >>> names("box", "train", "dev")
    ['blue box', 'green box', 'purple box', 'red box', 'yellow box']
    """
    return sorted(name for name, thing in THINGS.items() if thing.kind == kind and thing.split in splits)


# ---------------------------------------------------------------------------- 2. the variations


class Variation(NamedTuple):
    """One exercise: where all is, what is to be done, and what is true of it."""

    task: str
    split: str
    text: str  # the task in words
    boxes: dict[str, str]  # of each the room in which it stands
    where: dict[str, str]  # of each thing the room in which it lies
    degrees: dict[str, int]  # of each liquid
    targets: frozenset  # what is looked for: whoever sees one is on the way
    thing: str  # the one that the task is about, if it is one
    box: str  # where it belongs, or the answer
    other: str  # the box that would be wrong
    plant: str  # into which the seed grows
    mixed: str  # the colour that is to be mixed


@cache  # there are 700
def variation(task: str, number: int) -> Variation:
    """An exercise, drawn by its name and its number."""
    rng = random.Random(f"{task} {number}")
    split = next(split for split, numbers in VARIATIONS.items() if number in numbers)
    degrees = {name: 5 * rng.randrange(4, 17) for name in names("liquid", "train", split)}
    facts = question(task, split, degrees, rng)
    place = facts["place"]

    # --- what lies about, and where
    boxes = rng.sample(names("box", "train", split), 4)
    rooms = sorted(ROOMS)
    box_rooms = dict(zip(boxes, rng.sample(rooms, 4), strict=True))
    lying = {THERMOMETER, CAN, *facts["needed"]}
    for kind, n in SCATTERED.items():
        lying |= set(rng.sample(names(kind, "train", split), n))
    if task == "grow-plant":
        lying |= set(rng.sample(names("seed", "train", split), 5))
    lying = sorted(lying - {facts["plant"]})
    rng.shuffle(lying)
    where = {}
    for i, name in enumerate(lying):
        where[name] = rooms[i % len(rooms)]
        if place and THINGS[name].kind == "animal":  # the three that are asked for have a room of their own
            where[name] = place if name in facts["needed"] else rng.choice([x for x in rooms if x != place])

    # --- the task in words: the first box is that of a yes
    right, wrong = boxes[:2]
    if not facts["is_yes"]:
        right, wrong = wrong, right
    words = facts | {"box": boxes[0], "other": boxes[1], "place": place or box_rooms[boxes[0]]}
    text = rng.choice(BOOK["tasks"][task][split]).format(**words)
    targets = facts["needed"]
    if task in FOUND:
        targets = [name for name in lying if THINGS[name].kind in FOUND[task]]
    known = {name: facts[name] for name in ("thing", "plant", "mixed")}
    named = {"box": right, "other": wrong, **known}
    return Variation(task, split, text, box_rooms, where, degrees, frozenset(targets), **named)


def question(task: str, split: str, degrees: dict[str, int], rng: random.Random) -> dict:
    """What an exercise asks about, all of it of its split: the facts of a Variation, and words of its text.

    "needed" are the things that must be there, "is_yes" says which of two boxes is right.
    """
    facts = {"thing": "", "plant": "", "mixed": "", "place": "", "is_yes": True}
    if task in FOUND:
        kind = rng.choice(FOUND[task])
        return facts | {"needed": rng.sample(names(kind, split), 3)}
    if task == "lifespan-longest-lived":
        place = rng.choice([room for room in sorted(ROOMS) if room != BOOK["start"]])
        nouns = rng.sample(sorted(BOOK["animals"]), 3)
        animals = [f"{rng.choice(BOOK['animals'][noun][split])} {noun}" for noun in nouns]
        oldest = max(animals, key=lambda name: THINGS[name].years)
        return facts | {"needed": animals, "thing": oldest, "place": place}
    if task == "chemistry-mix-paint-secondary-color":
        medium = rng.choice(BOOK["colours"]["media"][split])
        colour = rng.choice(["green", "orange", "violet"])
        needed = [f"{one} {medium}" for one in BOOK["colours"][colour]]
        return facts | {"needed": needed, "mixed": f"{colour} {medium}", "colour": colour, "medium": medium}

    kinds = {"test-conductivity": "object", "grow-plant": "seed"}
    thing = rng.choice(names(kinds.get(task, "liquid"), split))
    facts |= {"needed": [thing], "thing": thing}
    if task == "grow-plant":
        facts["plant"] = THINGS[thing].noun
    if task == "test-conductivity":
        facts["is_yes"] = THINGS[thing].conducts
    if task == "use-thermometer":
        facts["degrees"] = degrees[thing] + rng.choice((-15, -5, 0, 10))
        facts["is_yes"] = degrees[thing] > facts["degrees"]
    return facts


# -------------------------------------------------------------------------------- 3. the rules
# What can be done, in one pattern: a verb, a thing, and with some verbs another thing.

ONE_THING = ("focus on", "look at")  # of whatever is to be seen
TAKEABLE = ("eat", "pick up")  # and put down, if it is carried
TWO_THINGS = ("connect {} to {}", "use {} on {}")
VERBS = "go to|teleport to|put down|pick up|look at|focus on|eat|activate|deactivate|mix|move|connect|use"
DEED = re.compile(rf"({VERBS}) (.+?)(?: (?:to|on) (.+))?")
IDLE = {"inventory": "You look through your bag.", "look around": "You look around.", "wait": "Time goes by."}
REFUSAL = "Invalid action. Nothing like that can be done here."
# To choose what is not in view fails as any wrong choice does: else one could try all names, and never look.
ABSENT = frozenset(f"focus on {name}" for name in THINGS)


class Seen(NamedTuple):
    """What is before one's eyes, sorted: enough to say what can be done."""

    room: str
    boxes: tuple[str, ...]
    loose: tuple[str, ...]
    inside: tuple[tuple[str, tuple[str, ...]], ...]  # of each box or fixture that holds something
    carried: tuple[str, ...]

    def things(self) -> tuple[str, ...]:
        """All that can be taken or is carried."""
        held = tuple(name for _, row in self.inside for name in row)
        return self.loose + held + self.carried


@lru_cache(maxsize=2_000)  # of some 35 kB each
def valid_actions(seen: Seen, can_teleport: bool) -> tuple[str, ...]:
    """Everything that is understood there, sorted. What it is good for is another question."""
    fixtures = ROOMS[seen.room]["fixtures"]
    things, places = seen.things(), (*fixtures, *seen.boxes)
    actions = [*IDLE, *(f"go to {room}" for room in ROOMS[seen.room]["ways"])]
    if can_teleport:
        actions += [f"teleport to {room}" for room in ROOMS]
    for name in fixtures:
        if name in SWITCHES:
            actions += [f"activate {name}", f"deactivate {name}"]
        if name in HOLDERS:
            actions.append(f"mix {name}")
    for name in (*things, *places):
        actions += [f"{verb} {name}" for verb in ONE_THING]
    for name in things:
        actions += [f"{verb} {name}" for verb in TAKEABLE]
        actions += [f"move {name} to {place}" for place in places if place in HOLDERS or place in seen.boxes]
        for other in (*things, *places):
            if other != name:
                actions += [pattern.format(name, other) for pattern in TWO_THINGS]
    actions += [f"put down {name}" for name in seen.carried]
    return tuple(sorted(actions))


class Lesson:
    """An exercise under way: the state of the school, its rules, and the sub-goals reached."""

    def __init__(self, exercise: Variation, can_teleport: bool):
        self.exercise, self.can_teleport = exercise, can_teleport
        self.points = BOOK["tasks"][exercise.task]["points"]
        self.room = BOOK["start"]
        self.where = dict(exercise.where)  # thing -> a room, a box or fixture, or "" if it is carried
        self.active = set()  # fixtures that are switched on
        self.focus = set()  # what was focused on, all of it rightly
        self.at_lamp = ""  # what the test lamp is connected to
        self.shown = set()  # what was measured, tested or watered
        self.notes = {}  # the exercise book: what was learned or chosen, in this order; the values are None
        self.heat = self.growth = 0  # turns
        self.reached = set()  # of the sub-goals
        self.failed = False

    @property
    def score(self) -> int:
        """Points of all sub-goals reached, 0 to 100; FAILED if the wrong thing was chosen."""
        return FAILED if self.failed else sum(self.points[goal] for goal in self.reached)

    def seen(self) -> Seen:
        """What can be seen and reached from here."""
        boxes = tuple(sorted(box for box, room in self.exercise.boxes.items() if room == self.room))
        found = {place: [] for place in (self.room, "", *ROOMS[self.room]["fixtures"], *boxes)}
        for name, place in self.where.items():
            if place in found:
                found[place].append(name)
        found = {place: tuple(sorted(things)) for place, things in found.items() if things}
        loose, carried = found.pop(self.room, ()), found.pop("", ())
        return Seen(self.room, boxes, loose, tuple(sorted(found.items())), carried)

    def act(self, action: str) -> str:
        """Does what is among the valid actions; the reply. Then a turn has gone by."""
        if action in IDLE:
            reply = IDLE[action]
        else:
            verb, first, second = DEED.fullmatch(action).groups()
            method = getattr(self, verb.replace(" ", "_"))
            reply = method(first, second) if second else method(first)
        self.let_time_pass()
        self.reached |= self.goals() & self.points.keys()
        return reply

    def let_time_pass(self) -> None:
        """The kettle grows hot, what was sown and watered grows."""
        thing = self.exercise.thing
        if self.where.get(thing) == KETTLE and KETTLE in self.active:
            self.heat += 1
        if self.exercise.plant and self.where.get(thing) == POT and "watered" in self.shown:
            self.growth += 1
            if self.growth == SLOW:
                del self.where[thing]
                self.where[self.exercise.plant] = POT

    # --- one method for each verb: what it does, and what one reads

    def go_to(self, room: str) -> str:
        self.room = room
        return f"You go to the {room}."

    def teleport_to(self, room: str) -> str:
        self.room = room
        return f"All at once you are in the {room}."

    def look_at(self, name: str) -> str:
        kind = THINGS[name].kind if name in THINGS else ""
        if kind == "animal":
            return f"The {name} breathes. It can live for {THINGS[name].years} years."
        said = {
            "plant": f"The {name} has roots and grows.",
            "copy": f"The {name} is a copy. It does not live.",
            "liquid": f"A flask of {name}.",
            "colour": f"A pot of {name}.",
        }
        if name in SWITCHES:
            return f"The {name} is {'on' if name in self.active else 'off'}."
        return said.get(kind, f"The {name} looks like any other.")

    def focus_on(self, name: str) -> str:
        if name not in self.allowed():
            self.failed = True
            return f"The {name} is not what was asked for. The exercise ends."
        self.focus.add(name)
        self.note(f"you focused on the {name}")
        return f"You focus on the {name}."

    def pick_up(self, name: str) -> str:
        if not self.where[name]:
            return f"You already carry the {name}."
        self.take_away(name)
        self.where[name] = ""
        return f"You pick up the {name}."

    def put_down(self, name: str) -> str:
        self.take_away(name)
        self.where[name] = self.room
        return f"You put down the {name}."

    def move(self, name: str, place: str) -> str:
        self.take_away(name)
        self.where[name] = place
        is_sorted = self.exercise.task == "test-conductivity" and name == self.exercise.thing
        if is_sorted and place == self.exercise.other:
            self.failed = True
            return f"The {name} does not belong into the {place}. The exercise ends."
        return f"You move the {name} to the {place}."

    def take_away(self, name: str) -> None:
        """Whatever is moved is no longer connected."""
        if self.at_lamp == name:
            self.at_lamp = ""

    def eat(self, name: str) -> str:
        return f"Nobody eats the {name} at school."

    def activate(self, name: str) -> str:
        self.active.add(name)
        if name != LAMP:
            return f"The {name} is on."
        if not self.at_lamp:
            return f"The {name} stays dark: nothing is connected to it."
        self.shown.add(f"tested {self.at_lamp}")
        thing = THINGS.get(self.at_lamp)  # a colour that was mixed is not in the book
        is_bright = thing and thing.conducts
        self.note(f"the {self.at_lamp} {'conducts' if is_bright else 'does not conduct'}")
        return f"The {name} {'glows' if is_bright else 'stays dark'}."

    def deactivate(self, name: str) -> str:
        self.active.discard(name)
        return f"The {name} is off."

    def connect(self, name: str, other: str) -> str:
        if other == LAMP:
            self.at_lamp = name
        return f"You connect the {name} to the {other}."

    def use(self, name: str, other: str) -> str:
        if name == THERMOMETER and other in self.exercise.degrees:
            self.shown.add(f"measured {other}")
            self.note(f"the {other} has {self.exercise.degrees[other]} degrees")
            return f"The thermometer shows {self.exercise.degrees[other]} degrees."
        if name == CAN and other == POT:
            if self.where.get(self.exercise.thing) == POT:
                self.shown.add("watered")
                self.note(f"you watered the {self.exercise.thing}")
            return "You water the flower pot."
        return f"You use the {name} on the {other}, but nothing comes of it."

    def mix(self, holder: str) -> str:
        """Two colours of one medium, and nothing else in the bowl, make a third."""
        inside = {name for name, place in self.where.items() if place == holder}
        nouns = {THINGS[name].noun if name in THINGS else "" for name in inside}
        colours = sorted(name.split()[0] for name in inside)
        made = [colour for colour, parts in BOOK["colours"].items() if parts == colours]
        if holder != BOWL or len(nouns) != 1 or not made:
            return f"What is in the {holder} does not mix."
        for name in inside:
            del self.where[name]
        self.where[f"{made[0]} {nouns.pop()}"] = holder
        return f"In the {holder} it turns {made[0]}."

    def note(self, fact: str) -> None:
        """Writes it into the exercise book, once: else a player would have to remember what was done."""
        self.notes[fact] = None

    # --- what is asked for

    def allowed(self) -> set[str]:
        """On what one may focus now."""
        exercise = self.exercise
        if exercise.task in FOUND:
            return set(exercise.targets)
        names = {exercise.thing, exercise.mixed, exercise.plant}
        if exercise.task == "use-thermometer" and "measured" in self.reached:
            names.add(exercise.box)
        return names

    def goals(self) -> set[str]:
        """The sub-goals, by the names of school.toml, that this state is in; of all tasks together."""
        exercise, thing, where = self.exercise, self.exercise.thing, self.where
        chosen = {thing}
        if exercise.task in FOUND:
            chosen = self.focus
        places = {where.get(name) for name in chosen}
        mixing = [where.get(name) == BOWL for name in exercise.targets]
        is_hot = where.get(thing) == KETTLE and KETTLE in self.active
        is_sorted = exercise.task in FOUND or "tested" in self.reached
        holds = {
            "near": bool(exercise.targets & set(self.seen().things())),
            "focus": bool(self.focus - {exercise.plant, exercise.box}),
            "held": "" in places,
            "there": "" in places and self.room == exercise.boxes[exercise.box],
            "boxed": exercise.box in places and is_sorted,
            "tool": where[THERMOMETER] == "",
            "measured": f"measured {thing}" in self.shown,
            "answer": exercise.box in self.focus,
            "filled": where.get(thing) == KETTLE,
            "heated": is_hot,
            "boiled": self.heat >= SLOW,
            "one": any(mixing),
            "both": all(mixing),
            "mixed": exercise.mixed in where,
            "connected": bool(thing) and self.at_lamp == thing,
            "tested": f"tested {thing}" in self.shown,
            "planted": where.get(thing) == POT,
            "watered": "watered" in self.shown,
            "grown": self.growth >= SLOW,
            "plant": exercise.plant in self.focus,
        }
        return {goal for goal, is_true in holds.items() if is_true}


# ---------------------------------------------------------------------------- 4. the gold paths


def way(start: str, end: str) -> list[str]:
    """The rooms to go through, the last one included.

    >>> way("attic", "pond"), way("lab", "lab")
    (['hall', 'garden', 'pond'], [])
    """
    before, queue = {start: ""}, [start]
    for room in queue:
        for other in ROOMS[room]["ways"]:
            if other not in before:
                before[other] = room
                queue.append(other)
    rooms = [end]
    while before[rooms[-1]]:
        rooms.append(before[rooms[-1]])
    return rooms[-2::-1]


@cache
def gold_path(task: str, number: int) -> tuple[str, ...]:
    """The actions of one solution, which reaches 100. It walks: teleporting is not needed."""
    exercise = variation(task, number)
    thing, where, boxes = exercise.thing, exercise.where, exercise.boxes
    actions, room = [], BOOK["start"]

    def do(place: str, *deeds: str) -> None:
        nonlocal room
        actions.extend(f"go to {x}" for x in way(room, place))
        actions.extend(deeds)
        room = place

    if task in FOUND:
        thing = min(exercise.targets, key=lambda name: (len(way(room, where[name])), name))
    if task == "chemistry-mix-paint-secondary-color":
        colours = sorted(exercise.targets)
        for name in colours:
            do(where[name], f"pick up {name}")
        do("lab", *(f"move {name} to {BOWL}" for name in colours))
        do("lab", f"mix {BOWL}", f"focus on {exercise.mixed}")
        return tuple(actions)
    if task == "use-thermometer":
        do(where[THERMOMETER], f"pick up {THERMOMETER}")
    do(where[thing], f"focus on {thing}")
    if task == "lifespan-longest-lived":
        return tuple(actions)
    if task == "use-thermometer":
        do(room, f"use {THERMOMETER} on {thing}")
        do(boxes[exercise.box], f"focus on {exercise.box}")
        return tuple(actions)
    do(room, f"pick up {thing}")
    if task == "boil":
        do("canteen", f"move {thing} to {KETTLE}", f"activate {KETTLE}", *["wait"] * (SLOW - 1))
    elif task == "grow-plant":
        do(where[CAN], f"pick up {CAN}")
        do("garden", f"move {thing} to {POT}", f"use {CAN} on {POT}", *["wait"] * (SLOW - 1))
        do("garden", f"focus on {exercise.plant}")
    else:
        if task == "test-conductivity":
            do("workshop", f"connect {thing} to {LAMP}", f"activate {LAMP}")
        do(boxes[exercise.box], f"move {thing} to {exercise.box}")
    return tuple(actions)


# -------------------------------------------------------------------------------- 5. the world


class School(gymnasium.Env):
    """The world: variations `options["index"]` of `variations(task, split)`.

    The observation is the task, the room, the bag with the exercise book and what the last action did. The
    book has what was focused on, measured, tested and watered: no player has to remember these. For policies
    that read the parts alone `info` has "task", "look", "inventory", "observation", and besides "valid", the
    sorted tuple of valid actions, and "score". ("died" is always False: there is no other process.)

    An action is cut at its first newline, stripped and cut to `max_action_chars`; `info["action"]` is what
    remains. It may be written in capitals. What is not valid costs a turn and changes nothing; but to focus
    on a thing of the school that is not in view fails.
    """

    rules = (
        "Do what the task asks. You can: go to ROOM, look around, inventory, wait, and with "
        "what you see: focus on, look at, pick up, put down, eat THING; move THING to PLACE; use THING on "
        "THING; connect THING to THING; activate, deactivate DEVICE; mix BOWL. To focus on a thing is to "
        "choose it: a wrong one, or one that you do not see, ends the exercise. The best score is 100. "
        "Unless the simplifications are empty, you can also teleport to ROOM."
    )
    id = "school"
    max_action_chars = 200
    append_only = False
    demonstration_env = "school"
    best_return = 100.0
    expert_return = 100.0

    def __init__(
        self,
        task: str = "find-living-thing",
        split: str = "train",
        simplifications: str = "easy",
        step_limit: int = 100,
    ):
        if simplifications not in ("", "easy"):
            raise ValueError(f"simplifications {simplifications!r}; known: '' and 'easy', which teleports")
        if step_limit < 1:
            raise ValueError(f"step_limit: {step_limit} is not positive")
        self.task, self.simplifications, self.max_turns = task, simplifications, step_limit
        self.choose(split)
        self.observation_space = AnyText(10_000)
        self.action_space = AnyText(self.max_action_chars)
        self.over = True  # until the first reset

    def choose(self, split: str) -> None:
        """Plays another split from the next reset on."""
        self.split, self.variations = split, variations(self.task, split)
        self.num_tasks = len(self.variations)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts with variation number `options["index"]` of the split,
        or one drawn by the world's own generator.

        `info["answer"]` names it: "find-plant 17".
        """
        super().reset(seed=seed)
        index = task_index(options, self.num_tasks, self.np_random)
        self.variation = self.variations[index]
        self.lesson = Lesson(variation(self.task, self.variation), self.simplifications == "easy")
        self.turns, self.over = 0, False
        self.info = self.look(IDLE["look around"])
        return self.observe(), self.info | {"answer": f"{self.task} {self.variation}"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Does one action; see the class for what becomes of the text."""
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        action = read_action(action, self.max_action_chars)

        before = self.lesson.score
        self.turns += 1
        if action.lower() in self.info["valid"]:
            self.info = self.look(self.lesson.act(action.lower()))
        elif action.lower() in ABSENT:
            self.lesson.failed = True
            self.info = self.look("There is no such thing here. The exercise ends.")
        else:
            self.info = self.info | {"observation": REFUSAL}
        score = self.lesson.score
        terminated = score in (FAILED, 100)
        truncated = not terminated and self.turns == self.max_turns
        self.over = terminated or truncated

        info = self.info | {"action": action}
        if self.over:
            info["result"] = {"return": float(score), "length": self.turns, "success": score == 100}
        return self.observe(), float(score - before), terminated, truncated, info

    def look(self, said: str) -> dict:
        """What there is to know now; looking takes no time."""
        seen = self.lesson.seen()
        look, inventory = describe(seen, frozenset(self.lesson.active), tuple(self.lesson.notes))
        return {
            "observation": said,
            "look": look,
            "inventory": inventory,
            "task": self.lesson.exercise.text,
            "valid": valid_actions(seen, self.lesson.can_teleport),
            "score": self.lesson.score,
            "died": False,
        }

    def observe(self) -> str:
        """The state in words, with what the last action did."""
        info = self.info
        return f"Task: {info['task']}\n{info['look']}\n{info['inventory']}\n{info['observation']}\n"

    # --- the players know more than the observation says, as that has no list of actions: they are bound to
    # this very world

    @property
    def players(self) -> dict[str, Callable[[str, random.Random], str]]:
        """Scripted players by name; `player(observation, rng)` is an action in this world's present state."""
        return {"expert": self.expert, "random": self.random_player}

    def random_player(self, observation: str, rng: random.Random) -> str:
        """Any valid action."""
        return rng.choice(self.info["valid"])

    def expert(self, observation: str, rng: random.Random | None = None) -> str:
        """The next action of the gold path, for one who has followed it from the start."""
        path = gold_path(self.task, self.variation)
        return path[self.turns] if self.turns < len(path) else "wait"

    def demonstrations(self, n: int, seed: int) -> list[dict]:
        """`n` gold paths of variations drawn evenly."""
        world = School(self.task, self.split, self.simplifications, self.max_turns)
        rng = random.Random(seed)
        return [dialogue(world, world.expert, rng, rng.randrange(world.num_tasks)) for _ in range(n)]


@lru_cache(maxsize=10_000)
def describe(seen: Seen, active: frozenset, notes: tuple[str, ...]) -> tuple[str, str]:
    """The room, and the bag with the exercise book, in words."""
    fixtures = ROOMS[seen.room]["fixtures"]
    said = [f"You are in the {seen.room}, with {listed((*fixtures, *seen.boxes))}."]
    said.append(f"You see: {listed(seen.loose)}.")
    said += [f"In the {place}: {listed(things)}." for place, things in seen.inside]
    said += [f"The {name} is on." for name in fixtures if name in active]
    said.append(f"Ways lead to {', '.join(ROOMS[seen.room]['ways'])}.")
    bag = f"You carry: {listed(seen.carried)}."
    if notes:
        bag += f" Your book says: {'; '.join(notes)}."
    return " ".join(said), bag


def listed(names: tuple[str, ...]) -> str:
    """Names in a row, as short as can be: a network that reads word by word reads these most.

    >>> listed(("apple tree", "kettle")), listed(())
    ('apple tree, kettle', 'nothing')
    """
    return ", ".join(names) or "nothing"


# ------------------------------------------------------------------------ 6. for LGE's two scripts


class Worlds:
    """`n` worlds side by side, in this process, with the methods of envs.worlds.scienceworld.Worlds."""

    def __init__(self, n: int, **options):
        self.worlds = [School(**options) for _ in range(n)]

    def reset(self, split: str, indices: list[int]) -> list[dict]:
        """Starts as many worlds as there are indices of the split's variations; their infos."""
        for world in self.worlds:
            world.choose(split)
        started = zip(self.worlds, indices, strict=False)
        return [world.reset(options={"index": index})[1] for world, index in started]

    def step(self, actions: dict[int, str], indices: list[int] | None = None) -> list[tuple[tuple, dict]]:
        """Of the worlds of these numbers what `step` returned and the info of what is to be seen now.

        Where the episode is over and `indices` are given, that is the next one's, of the variation that the
        world's entry names.
        """
        results = []
        for i, action in actions.items():
            result = self.worlds[i].step(action)
            shown = result[4]
            if indices is not None and self.worlds[i].over:
                shown = self.worlds[i].reset(options={"index": indices[i]})[1]
            results.append((result, shown))
        return results

    def texts(self, steps: int, rng) -> list[str]:
        """All different texts that a random player sees in so many steps of each world; `rng` is numpy's."""
        n, num_tasks, found = len(self.worlds), self.worlds[0].num_tasks, {}
        infos = self.reset(self.worlds[0].split, rng.integers(num_tasks, size=n))
        for _ in range(steps):
            for info in infos:
                shown = info["task"], info["observation"], info["look"], info["inventory"]
                found |= dict.fromkeys([*shown, *info["valid"]])
            actions = {i: info["valid"][rng.integers(len(info["valid"]))] for i, info in enumerate(infos)}
            infos = [seen for _, seen in self.step(actions, rng.integers(num_tasks, size=n))]
        return list(found)

    def close(self) -> None:
        pass


def walk(task: str, number: int, see: bool) -> dict:
    """A variation's description and gold path, and if `see` the valid actions of every step.

    A record of the guide's development data, as envs/worlds/scienceworld/guide.py describes them. Without
    teleporting, as there.
    """
    lesson, gold = Lesson(variation(task, number), False), gold_path(task, number)
    record = {"task": task, "variation": number, "desc": lesson.exercise.text, "gold": list(gold)}
    if not see:
        return record
    index, steps, before = {}, [], set()
    for action in gold:
        texts = valid_actions(lesson.seen(), False)
        valid = {index.setdefault(text, len(index)) for text in texts}
        steps.append({"gold": index[action], "add": sorted(valid - before), "rem": sorted(before - valid)})
        lesson.act(action)
        before = valid
    return record | {"vocab": list(index), "steps": steps}
