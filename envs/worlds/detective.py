"""Detective: solve the murder of a mayor in 60 turns, in the text adventure that ArCHer plays.

    world = Detective(rom="detective.z5")               # or the path stands in $DETECTIVE_ROM
    observation, info = world.reset()
    observation, reward, terminated, truncated, info = world.step("take paper")

    << room >> What one sees there, in the words of the game.
    What one is carrying.
    Taken. [Your score has just gone up by ten points.]
    Actions: east, west, north, put paper down

Matt Barringer's game, ported to the Z-machine by Stuart Moore in 2000, as Zhou et al. 2024 (arXiv:2402.19446)
play it with Jericho (Hausknecht et al. 2020, arXiv:1909.05398). An observation has the surroundings, the
inventory, what the last action did, and the available actions; the reward is the change of the game's score,
from 10 to 360 at best.

    needs        jericho (`pip install jericho`: Linux, gcc, make; GPL-2) and a copy of detective.z5 of your
                 own. No text of the game is in this file. Without them: mini-detective, a mystery of our own
    tasks        one, always the same: nothing in the game is left to chance
    ends         the arrest, a death (eight places one should not enter; it costs nothing), or 60 turns
    success      the arrest, with or without all points

  D1  What is not listed is answered "Illegal Action.", changes nothing and costs a turn. The authors' code
      gives any text to the game: `matching="paper"`, except for what would leave or bend the game
      (`Story.blocked`).
  D2  Jericho finds the things that an action may be about with a spaCy model; we take the last word of their
      names, and try nothing with two things that one carries. In this game that finds the same.
  D3  Feedback does not repeat the surroundings, which the game describes again when one enters a room.

To take it alone, copy envs/__init__.py, envs/datasets.py and envs/worlds/detective.py, each to the same
place. It needs gymnasium, jericho and the game.
"""

import copy
import hashlib
import importlib
import os
import random
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import gymnasium

from envs import AnyText, read_action, task_index
from envs.datasets import dialogue

ILLEGAL = "Illegal Action."
WAYS = ["north", "south", "east", "west", "up", "down"]
MD5 = "822655c9be83e292e06d3d3b1d6a9734"  # of the one story file that Jericho knows as Detective
TAKE_BACK = {"undo", "again", "g", "oops"}  # commands about earlier commands

# ------------------------------------------------------------------------- 1. the story and its interpreter


class Moment(NamedTuple):
    """Where a game stands."""

    state: tuple  # of the interpreter
    surroundings: str
    inventory: str
    score: int
    end: str = ""  # "won", "lost" or, while it goes on, nothing


def find(rom: str | Path) -> Path:
    """The story file, checked: on any other file the interpreter may end the whole process.

    Raises FileNotFoundError if it is not there or is another file.
    """
    advice = "give --world rom=FILE, a detective.z5, or set $DETECTIVE_ROM to it; mini-detective needs none"
    rom = rom or os.environ.get("DETECTIVE_ROM", "")
    if not rom:
        raise FileNotFoundError(f"no story file; {advice}")
    path = Path(rom).expanduser().absolute()
    if not path.is_file():
        raise FileNotFoundError(f"the story file {rom} does not exist; {advice}")
    if hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() != MD5:
        raise FileNotFoundError(f"{rom} is not the story file with the md5 {MD5}; {advice}")
    return path


@lru_cache
def open_story(path: Path) -> "Story":
    """The story, opened once: all worlds play on it, and so share what it knows about available actions."""
    return Story(path)


class Story:
    """The game in its interpreter. It remembers no player: each call says from which state it starts."""

    def __init__(self, path: Path):
        import jericho  # here, so that the file can be imported without it

        # `jericho.util` may be ctypes', if that came first
        self.util = importlib.import_module("jericho.util")
        self.game = jericho.FrotzEnv(str(path))
        dictionary = self.game.get_dictionary()
        # cut to nine letters, as the game cuts what it reads
        self.words = {entry.word for entry in dictionary}
        # Save, restore, quit, script, help; and the author's own for testing, one of which leads straight to
        # the culprit. "note" shows footnotes, but is a thing to take, too.
        self.blocked = TAKE_BACK | {entry.word for entry in dictionary if entry.is_meta} - {"note"}
        self.cache: dict[tuple[str, str], tuple[str, ...]] = {}
        said, info = self.game.reset()
        self.start = self.at(self.game.get_state(), info["score"])
        # The title, who wrote it, and the room come before what the first turn says.
        self.intro = plain(said).rpartition(self.start.surroundings)[2].strip()

    def is_blocked(self, command: str) -> bool:
        """A command with a blocked word in it, in whichever sentence."""
        return any(word[:9] in self.blocked for word in re.findall("[a-z]+", command.lower()))

    def say(self, state: tuple, command: str) -> str:
        """What the game answers; the interpreter is left in the state after that."""
        self.game.set_state(state)
        return plain(self.game.step(command)[0])

    def play(self, moment: Moment, command: str) -> tuple[str, Moment]:
        """What the game answers, and where it stands then."""
        said = self.say(moment.state, command)
        state, score = self.game.get_state(), self.game.get_score()
        if self.game.victory() or self.game.game_over():
            # Behind the result the game asks whether to play again; no question may be put to it any more.
            end = "won" if self.game.victory() else "lost"
            return said.partition("In that game you scored")[0].strip(), Moment(state, "", "", score, end)
        after = self.at(state, score)
        return said.replace(after.surroundings, "").strip(), after  # D3

    def at(self, state: tuple, score: int) -> Moment:
        """The state in words.

        To look around takes a turn of the game, so it is done in a copy of the state.
        """
        return Moment(state, self.say(state, "look"), self.say(state, "inventory"), score)

    def actions(self, moment: Moment) -> tuple[str, ...]:
        """The available actions. To find them takes 0.03 to 0.1 seconds, so they are kept.

        Which there are can be seen: the same room, with the same things in it and in one's hands, has the
        same ones.
        """
        seen = moment.surroundings, moment.inventory
        if seen not in self.cache:
            self.cache[seen] = self.find_actions(moment.state)
        return self.cache[seen]

    def find_actions(self, state: tuple) -> tuple[str, ...]:
        """One action for each effect that any of them has, as Jericho's `get_valid_actions` chooses it.

        Ways that are blocked count as one effect, as the game then takes one to the room in which one is.
        """
        game = self.game
        game.set_state(state)
        here = self.util.get_subtree(game.get_player_location().child, game.get_world_objects())
        nouns, in_hand = self.nouns(here), {*self.nouns(game.get_inventory()), "all"}  # D2
        tried = [
            action
            for action in game.act_gen.generate_actions([*nouns, "all"])
            if len(in_hand.intersection(action.split())) < 2 and not self.is_blocked(action)
        ]
        by_effect = game._filter_candidate_actions(tried, use_ctypes=True)
        found = tuple(max(actions, key=self.util.verb_usage_count) for actions in by_effect.values())
        return found or ("wait",)  # with empty hands before somebody who lets nobody go

    def nouns(self, things: list) -> list[str]:
        """The last word of each thing's name, where the game understands it."""
        names = [thing.name.lower().split() for thing in things]
        return list(dict.fromkeys(name[-1] for name in names if name and name[-1][:9] in self.words))


def plain(text: str) -> str:
    """A text of the game on one line.

    >>> plain("\\n\\n<< Closet >>\\nDark.  \\n")
    '<< Closet >> Dark.'
    """
    return " ".join(text.split())


# ------------------------------------------------------------------------------------------ 2. the world


class Detective(gymnasium.Env):
    """The world. An action is one of those that the last line of the observation lists,
    in small letters or capitals.

    It is cut at its first newline, stripped of blanks at both ends and then cut to `max_action_chars`;
    `info["action"]` is what remains. `info["result"]` has the game's `score` besides the `return`, which is
    less by the 10 points that one starts with. All worlds of a process play in one interpreter: no threads.
    """

    id = "detective"
    num_tasks = 1
    max_turns = 60
    # the interpreter cuts at 198 bytes, within a letter of more than one byte if need be
    max_action_chars = 100
    append_only = False
    demonstration_env = "detective"
    best_return = 350.0
    expert_return = 350.0

    def __init__(self, rom: str | Path = "", matching: str = "strict"):
        if matching not in ("strict", "paper"):
            raise ValueError(f"matching: {matching!r} is none of strict, paper")
        self.rom, self.matching = find(rom), matching
        self.story = open_story(self.rom)
        self.observation_space = AnyText(10_000)
        self.action_space = AnyText(self.max_action_chars)
        self.over = True  # until the first reset

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts the game; its one task has the index 0. `info["answer"]` is the goal."""
        super().reset(seed=seed)
        task_index(options, 1, self.np_random)
        self.moment, self.turns, self.over = self.story.start, 0, False
        return self.observe(self.story.intro), {"answer": "360 points"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Plays one turn; see the class for what becomes of the text."""
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        action = read_action(action, self.max_action_chars)

        feedback, before = ILLEGAL, self.moment
        goes = self.matching == "paper" and not self.story.is_blocked(action)  # D1
        if goes or action.lower() in self.available():
            # A backslash is an order to the interpreter, which may wait for ever for the rest of it.
            feedback, self.moment = self.story.play(
                self.moment, re.sub(r"[^\w .,'?!-]", "?", action, flags=re.ASCII)
            )
        self.turns += 1
        terminated = bool(self.moment.end)
        truncated = not terminated and self.turns == self.max_turns
        self.over = terminated or truncated

        info = {"action": action}
        if self.over:
            gained = float(self.moment.score - self.story.start.score)
            info["result"] = {"return": gained, "length": self.turns, "success": self.moment.end == "won"}
            info["result"]["score"] = self.moment.score
        return self.observe(feedback), float(self.moment.score - before.score), terminated, truncated, info

    def available(self) -> tuple[str, ...]:
        return () if self.over else self.story.actions(self.moment)

    def observe(self, feedback: str) -> str:
        """The moment in words, with what the last action did;
        of a game that has ended there is nothing else."""
        lines = [self.moment.surroundings, self.moment.inventory, feedback]
        return "\n".join([*filter(None, lines), f"Actions: {', '.join(self.available()) or 'none'}\n"])

    @property
    def players(self) -> dict[str, Callable[[str, random.Random], str]]:
        """Scripted players by name; `player(observation, rng)` is an action."""
        return {"scripted": scripted, "expert": self.expert, "random": random_player}

    def demonstrations(self, n: int, seed: int, illegal: float = 0.02) -> list[dict]:
        """`n` dialogues of the random player, as in the paper.

        The share `illegal` of its actions are ways that are not listed, so that a learner sees what follows
        on that.
        """
        world, rng = Detective(self.rom), random.Random(seed)

        def player(observation: str, rng: random.Random) -> str:
            if rng.random() < illegal:
                return rng.choice([way for way in WAYS if way not in listed(observation)])
            return random_player(observation, rng)

        return [dialogue(world, player, rng) for _ in range(n)]

    def expert(self, observation: str, rng: random.Random | None = None) -> str:
        """Jericho's walkthrough; any available action where it does not lead."""
        return walkthrough(self.rom).get(observation) or random_player(observation, rng or random.Random(0))


# ---------------------------------------------------------------------------------------- 3. the players
# A player is a function of the observation and a random.Random.


def listed(observation: str) -> list[str]:
    """The available actions.

    >>> listed("A room.\\nYou are carrying nothing.\\nTaken.\\nActions: east, put paper down\\n")
    ['east', 'put paper down']
    """
    return observation.rstrip("\n").rpartition("Actions: ")[2].split(", ")


def random_player(observation: str, rng: random.Random) -> str:
    """Any available action."""
    return rng.choice(listed(observation))


def scripted(observation: str, rng: random.Random) -> str:
    """Takes what there is, puts nothing down, and walks anywhere otherwise."""
    actions = listed(observation)
    takes = [action for action in actions if action.startswith("take ")]
    return rng.choice(takes or [action for action in actions if not action.startswith("put ")] or actions)


@lru_cache
def walkthrough(rom: Path) -> dict[str, str]:
    """Observation -> available action, along Jericho's walkthrough (51 commands).

    It commands in words that are not listed: we take the listed action with the same effect, and leave a
    command out that has none. Nothing in an observation tells where one has been before. So where the way
    leads back to one at which something else was to be done, we put something down first, and the observation
    shows that.
    """
    world, actions = Detective(rom), {}
    observation, _ = world.reset()

    def effect(command: str) -> tuple:
        # all but the state, in which the turns are counted
        return world.story.play(world.moment, command)[1][1:]

    for command in world.story.game.get_walkthrough():
        todo = [action for action in world.available() if effect(action) == effect(command)]
        if not todo or effect(command) == world.moment[1:]:
            continue
        if copy.copy(world).step(todo[0])[0] in actions:
            todo.insert(0, next(action for action in world.available() if action.startswith("put ")))
        for action in todo:
            actions[observation] = action
            observation = world.step(action)[0]
    return actions
