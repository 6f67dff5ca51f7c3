"""A world of your own: what the scripts ask of a world, made of its `reset`, its `step` and what else it has.

    world = envs.make("my_module:MyWorld")  # a class, or a function that returns a world
    world = envs.make("some_package/some-world-v0")  # what another package has registered with gymnasium
    world = gymnasium.make("turnrl/twenty-questions-v0", render_mode="ansi")

docs/your_world.md says what a world must have, what it may have, and what happens without it.
"""

import inspect
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, ClassVar

import gymnasium
import numpy as np

import envs

PAGE = "docs/your_world.md says what a world must have"
RESET = {"text": str, "info": dict}
STEP = {"text": str, "reward": Real, "terminated": bool | np.bool, "truncated": bool | np.bool, "info": dict}
SEEDS = 100  # as many tasks has a world that has no tasks of its own: the seeds from 0 on
TURNS = 100  # after so many an episode is cut, if the world does not say how many it has
CHARACTERS = 1000  # to so many an action is cut, likewise


def adapt(id: str, options: dict) -> "Adapted":
    """A world that is not of ENVS, by "module:Class" or by the id under which gymnasium knows it."""
    if os.getcwd() not in sys.path:  # `python /some/where/archer.py` looks for modules in its own folder only
        sys.path.append(os.getcwd())
    if ":" in id and id.rpartition(":")[2].isidentifier():
        return Adapted(partial(envs.construct, id, id, options), id)
    try:
        return Adapted(partial(gymnasium.make, id, disable_env_checker=True, **options), id)
    except gymnasium.error.UnregisteredEnv as error:
        known = ", ".join([*envs.ENVS, "module:Class", "ids of gymnasium (docs/your_world.md)"])
        module, _, name = id.rpartition(".")
        name = "MyWorld" if name == "py" else name  # a file's name
        module = module.strip("./").replace("/", ".")
        hint = f" (or is it {module}:{name}?)" if module and name.isidentifier() else ""
        raise ValueError(f"unknown environment {id!r}{hint}; known: {known}") from error
    except gymnasium.error.Error as error:
        raise ValueError(f"{id}: {error}") from error


def registered(world: str, render_mode: str | None = None, **options) -> "Adapted":
    """What gymnasium makes of turnrl/WORLD-v0."""
    return Adapted(partial(envs.make, world, **options), world, render_mode)


def apart(text: str, wanted: str) -> str:
    """Where a text parts from one that it should be or begin with; a dialogue can be long.

    >>> apart("Begin.Go", "Begin.\\nGo")
    "'Begin.Go' stands where 'Begin.\\\\nGo' should"
    """
    k = next((k for k in range(len(wanted)) if wanted[k] != text[k : k + 1]), len(wanted))
    shown = slice(max(0, k - 20), k + 40)
    return f"{text[shown]!r} stands where {wanted[shown]!r} should"


def on_a_line(value) -> str:
    """How Python shows a value, cut short; an array may be shown on several lines.

    >>> on_a_line(np.array([["a"], ["b"]]))
    "array([['a'], ['b']], dtype='<U1')"
    """
    return " ".join(repr(value).split())[:80]


def plain(value):
    """A value of numpy, or a container of some, as Python's own, which JSON and a checkpoint take.

    >>> plain({"success": np.True_, "word": (np.str_("dog"), np.arange(2))})
    {'success': True, 'word': ('dog', [0, 1])}
    """
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


class Adapted(gymnasium.Env):
    """The world that `factory` makes, with defaults for what it does not have. What it has is its own."""

    # Of all that render, gymnasium wants to know how fast.
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(self, factory: Callable, id: str, render_mode: str | None = None):
        self.world = factory()
        self.factory, self.id, self.render_mode = factory, id, render_mode
        for method, arguments in {"reset": {"seed": 0, "options": {}}, "step": {"action": ""}}.items():
            self.can_be_called(method, arguments)
        self.has_tasks = self.own("num_tasks") is not None
        self.num_tasks = plain(self.own("num_tasks", SEEDS))
        self.append_only = self.own("append_only", True)
        self.keeps_dialogue = (
            self.own("append_only") is None
        )  # then the world only replies, and this joins it
        self.multiline = self.own("multiline", False)
        self.max_turns = self.own("max_turns", getattr(self.own("spec"), "max_episode_steps", None) or TURNS)
        most = getattr(self.own("action_space"), "max_length", CHARACTERS)
        self.max_action_chars = self.own("max_action_chars", most)
        self.best_return, self.expert_return = self.own("best_return"), self.own("expert_return")
        self.demonstration_env = self.own("demonstration_env", id)
        self.rules = self.own("rules", "")
        self.observation_space, self.action_space = envs.AnyText(10**7), envs.AnyText(self.max_action_chars)
        self.over = True  # until the first reset

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts an episode. The world always gets a seed: this one, or one drawn here."""
        super().reset(seed=seed)
        options = dict(options or {})
        index = options.get("index")
        if index is None:
            options.pop("index", None)
        elif not 0 <= index < self.num_tasks:
            raise ValueError(f"index: {index} is not in 0..{self.num_tasks - 1}")
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        if not self.has_tasks:  # task i is what the seed i makes
            seed = options.pop("index", seed)
        text, info = self.checked("reset", RESET, self.world.reset(seed=seed, options=options))
        if not text.strip():  # a model would have nothing to read
            raise envs.WorldBroken(f"the first observation is empty; {PAGE}")
        self.observation = f"{text.rstrip()}\n" if self.keeps_dialogue else text
        self.turns, self.total, self.over = 0, 0.0, False
        return self.observation, {"answer": "unknown"} | info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One turn. `info["action"]` is what the world got of the action."""
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        action = envs.read_action(action, self.max_action_chars, self.multiline)
        result = self.checked("step", STEP, self.world.step(action))
        text, reward, terminated, truncated, info = result

        info = {"action": action} | info
        outcome = info.pop("result", {})  # which has a meaning at the end only
        for part, value, kind in (("action", info["action"], str), ("result", outcome, dict)):
            if not isinstance(value, kind):
                raise envs.NotAWorld(
                    f'{self.id}: info["{part}"] of step must be {kind.__name__}, '
                    f"not {on_a_line(value)}; {PAGE}"
                )
        so_far = self.observation + info["action"]
        if self.keeps_dialogue:
            text = f"{so_far}\n{text.strip()}\n"
        elif self.append_only and not text.startswith(so_far):
            raise envs.NotAWorld(
                f"{self.id}: append_only is True, but an observation does not begin with the last one and the"
                f" action: {apart(text, so_far)}; without append_only the dialogue is put together for it"
            )
        self.observation = text
        self.turns += 1
        self.total += float(reward)
        truncated = not terminated and (truncated or self.turns >= self.max_turns)
        self.over = terminated or truncated
        if self.over:
            info["result"] = {"return": self.total, "length": self.turns, "success": False} | outcome
        return self.observation, float(reward), terminated, truncated, info

    def render(self) -> str:
        """The last observation."""
        return self.observation

    def close(self) -> None:
        self.own("close", lambda: None)()

    def demonstrations(self, n: int, seed: int) -> list[dict]:
        """The world's own or, if it makes none, dialogues of the first of its players."""
        if own := self.own("demonstrations"):
            return plain(own(n, seed))
        if not self.players:
            raise ValueError(
                f"{self.id} has neither players nor demonstrations to learn from: give --dataset FILE,"
                " or let it have players (docs/your_world.md)"
            )
        from envs.datasets import make_dialogues  # here: whoever only plays needs no such file

        world = Adapted(self.factory, self.id)  # this one may be in the middle of an episode
        return make_dialogues(world, n, seed, next(iter(self.players)))

    @property
    def players(self) -> dict:
        players = self.own("players", {})
        if not isinstance(players, dict) or not all(map(callable, players.values())):
            raise envs.NotAWorld(f"{self.id}: players are {players!r:.80}, and no dict of functions by name")
        for name in players:
            if not isinstance(name, str) or set(name) & set("=,/"):  # of which --mix is made
                raise envs.NotAWorld(f"{self.id}: a player's name is text without = , and /, not {name!r}")
        return players

    def own(self, name: str, default=None):
        """What the world itself has by this name, also behind gymnasium's wrappers."""
        try:
            find = getattr(self.world, "get_wrapper_attr", partial(getattr, self.world))
            found = find(name)
        except AttributeError as error:
            bare = getattr(self.world, "unwrapped", self.world)
            if inspect.getattr_static(bare, name, None) is not None:  # it is there, and fails
                raise envs.NotAWorld(f"{self.id}: {name} fails: {error}") from error
            found = None
        return default if found is None else found

    def __getattr__(self, name: str):
        """What only some scripts ask for: a world has `split`, `habits` ... or has not."""
        if name.startswith("_") or name == "world" or self.own(name) is None:
            raise AttributeError(name)
        return self.own(name)

    def can_be_called(self, method: str, arguments: dict) -> None:
        """Raises NotAWorld for a method that is missing or takes other arguments."""
        function = self.own(method)
        if not callable(function):
            raise envs.NotAWorld(f"{self.id} has no {method}(); {PAGE}")
        try:
            own = inspect.signature(function)
            own.bind(**arguments) if method == "reset" else own.bind(*arguments.values())
        except TypeError as error:
            wanted = ", ".join(arguments)
            raise envs.NotAWorld(f"{self.id}: {method} must take ({wanted}): {error}; {PAGE}") from None

    def checked(self, method: str, parts: dict, result) -> tuple:
        """What a method has returned, made plain. Raises NotAWorld for other parts, or other types."""
        if not isinstance(result, tuple) or len(result) != len(parts):
            raise envs.NotAWorld(
                f"{self.id}: {method} must return ({', '.join(parts)}), not {on_a_line(result)}; {PAGE}"
            )
        for (part, kind), value in zip(parts.items(), result, strict=True):
            if not isinstance(value, kind) or (kind is Real and not math.isfinite(value)):
                name = "a number" if kind is Real else getattr(kind, "__name__", "bool")
                raise envs.NotAWorld(
                    f"{self.id}: the {part} that {method} returns must be {name}, "
                    f"not {on_a_line(value)}; {PAGE}"
                )
            if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
                raise envs.NotAWorld(
                    f"{self.id}: the {part} that {method} returns has half a character in it: "
                    f"{on_a_line(value)}; {PAGE}"
                )
        return tuple(map(plain, result))
