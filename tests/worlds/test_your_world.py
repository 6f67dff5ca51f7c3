"""A world of one's own, as docs/your_world.md has it: the example, the rules, what happens without what."""

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import test_envs
from gymnasium.wrappers import TimeLimit

import archer
import archer_offline_iql
import envs
import envs.check
import envs.fuzz
import envs.play
import envs.speed
import loop_ppo
import sft
from envs.worlds.twenty_questions import TwentyQuestions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/your_world.md").read_text(encoding="utf-8")
EXAMPLE, SHOWN = (re.search(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)[1] for kind in ("python", "json"))
ID = "mine.my_world:HigherLower"


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    """A folder in which mine/my_world.py is what the page says; the module is imported from there."""
    folder = tmp_path_factory.mktemp("somewhere")
    (folder / "mine").mkdir()
    (folder / "mine/my_world.py").write_text(EXAMPLE, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def there(mine, monkeypatch) -> Path:
    monkeypatch.chdir(mine)
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which envs.make appends
    return mine


# ----------------------------------------------------------------------------------------- the page


def bullets(title: str) -> list[str]:
    """The list below a heading of the page, an item a line."""
    part = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^- (.+)$", part, re.M)


def test_the_example_is_short():
    assert len(EXAMPLE.splitlines()) <= 40


def test_the_page_has_the_rules_that_are_asked_for():
    said = bullets("What it must have") + bullets("What it may have")
    assert said == [rule.__doc__.partition("\n")[0] for rule in envs.check.RULES]
    tests = [test for name, test in vars(test_envs).items() if name.startswith("test_")]
    of_worlds = [test for test in tests if "world" in test.__code__.co_varnames[: test.__code__.co_argcount]]
    assert bullets("In this repository") == [test.__doc__.partition("\n")[0] for test in of_worlds]


def test_the_page_has_a_consequence_for_each_thing_that_may_be_absent():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.M)
    assert [name for name, _ in rows] == list(envs.check.WITHOUT)


# ------------------------------------------------------------------------------------ what is absent


class Bare:
    """The least that a world can be: an echo that never ends."""

    def reset(self, seed, options):
        self.seed = seed
        return f"Seed {seed}.", {}

    def step(self, action):
        return f"You said {action}.", 1, np.bool(False), False, {}


class Whole(Bare):
    """The same with a dialogue that grows, and all that may be there."""

    append_only, num_tasks, max_turns, max_action_chars, multiline = True, 7, 3, 5, True
    players = {"parrot": lambda text, rng: "polly"}  # noqa: RUF012
    demonstration_env, expert_return, best_return, split = "twenty-questions", 2.0, 3.0, "dev"

    def reset(self, seed, options):
        self.task = options.get("index", seed % 7)
        self.text = f"Task {self.task}.\n"
        return self.text, {"answer": f"task {self.task}"}

    def step(self, action):
        understood = action.lower()
        self.text += f"{understood}?\n"
        result = {"success": True, "score": 9}
        return self.text, 0.5, False, False, {"action": understood, "result": result}


class Arrays(Bare):
    """A world that computes with numpy, and says so wherever it can."""

    num_tasks = np.int64(3)

    def reset(self, seed, options):
        return np.str_("Go."), {"answer": np.array(["dog", "cat"]), "seeds": (np.int64(seed),)}

    def step(self, action):
        result = {"success": np.True_, "score": np.float32(0.5), "seen": [np.arange(2)]}
        info = {"action": np.str_(action), "result": result, np.str_("left"): np.int64(1)}
        return np.str_("You went."), np.float32(0.5), np.True_, np.False_, info

    def demonstrations(self, n, seed):
        made = {"observations": ["Go.\n", "Go.\na\nYou went.\n"], "actions": ["a"], "terminated": np.True_}
        return [made | {"rewards": [np.float32(0.5)], "success": np.True_, "answer": np.int64(4)}] * n


HERE = __name__


def test_defaults():
    world = envs.make(f"{HERE}:Bare")
    assert (world.id, world.demonstration_env) == (f"{HERE}:Bare", f"{HERE}:Bare")
    assert (world.num_tasks, world.max_turns, world.max_action_chars) == (100, 100, 1000)
    assert (world.append_only, world.multiline, world.players) == (True, False, {})
    assert world.best_return is None and world.expert_return is None and not hasattr(world, "split")
    assert world.reset(options={"index": 12}) == ("Seed 12.\n", {"answer": "unknown"})
    observation, reward, terminated, truncated, info = world.step(" Hello \nthere")
    assert observation == "Seed 12.\nHello\nYou said Hello.\n" and info == {"action": "Hello"}
    assert (reward, terminated, truncated) == (1.0, False, False)
    assert type(reward) is float and type(terminated) is bool
    for _ in range(99):
        _, _, terminated, truncated, info = world.step("x" * 2000)
    assert info == {"action": "x" * 1000, "result": {"return": 100.0, "length": 100, "success": False}}
    assert truncated and not terminated
    with pytest.raises(gymnasium.error.ResetNeeded):
        world.step("after the end")
    with pytest.raises(ValueError, match=r"^index: 100 is not in 0\.\.99$"):
        world.reset(options={"index": 100})


def parts_of(value) -> list:
    """All that is in a container, itself included."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    inner = inner if isinstance(value, dict | list | tuple) else []
    return [value, *(part for item in inner for part in parts_of(item))]


def test_what_comes_from_numpy_is_python_s_own():
    """So that JSON and a checkpoint take it; both would lose the run."""
    world = envs.make(f"{HERE}:Arrays")
    first, second = world.reset(seed=4), world.step("a")
    assert first == ("Go.\n", {"answer": ["dog", "cat"], "seeds": (4,)})
    observation, reward, *_, info = second
    result = {"return": 0.5, "length": 1, "success": True, "score": 0.5, "seen": [[0, 1]]}
    assert (observation, reward) == ("Go.\na\nYou went.\n", 0.5) and info["result"] == result
    made = world.demonstrations(2, 0)
    for part in parts_of([first, second, made, world.num_tasks]):
        assert type(part) in (dict, list, tuple, str, float, int, bool)


def test_seeds_are_drawn_by_the_worlds_own_generator():
    world, other = envs.make(f"{HERE}:Bare"), envs.make(f"{HERE}:Bare")
    drawn = [world.reset(seed=7)[0], world.reset()[0], world.reset()[0]]
    assert drawn == [other.reset(seed=7)[0], other.reset()[0], other.reset()[0]]
    assert drawn[0] == "Seed 7.\n" and len(set(drawn)) == 3


def test_what_is_there_is_kept():
    world = envs.make(f"{HERE}:Whole")
    assert (world.num_tasks, world.max_turns, world.max_action_chars) == (7, 3, 5)
    assert (world.append_only, world.multiline, world.split) == (True, True, "dev")
    assert (world.best_return, world.expert_return) == (3.0, 2.0)
    assert world.demonstration_env == "twenty-questions"
    assert world.reset(options={"index": 5}) == ("Task 5.\n", {"answer": "task 5"})
    assert world.step("A\nBCDEF")[0] == "Task 5.\na\nbcd?\n"
    (made,) = world.demonstrations(1, seed=0)
    assert made["actions"] == ["polly"] * 3 and made["success"] and made["return"] == 1.5
    assert world.step("x")[0] == "Task 5.\na\nbcd?\nx?\n", "the episode goes on beside the demonstrations"
    info = world.step("y")[-1]
    assert info["result"] == {"return": 1.5, "length": 3, "success": True, "score": 9}


def test_a_wrapped_world_shows_what_is_inside(monkeypatch):
    monkeypatch.setattr(sys.modules[HERE], "limited", lambda: TimeLimit(TwentyQuestions(), 2), raising=False)
    world = envs.make(f"{HERE}:limited")
    assert (world.num_tasks, world.append_only, world.max_turns) == (157, True, 20)
    world.reset(options={"index": 11})
    world.step("Is it a cat?")
    observation, _, _, truncated, info = world.step("Is it an animal?")
    assert observation == "Questions:\nIs it a cat? No.\nIs it an animal? Yes.\n" and truncated
    assert info["result"] == {"return": -2.0, "length": 2, "success": False}
    assert world.players["expert"]("Questions:\n", random.Random(0)).endswith("?")


# ------------------------------------------------------------------------------------ one clear line


class Short(Bare):
    max_turns = 2


class NoStep:
    reset = Bare.reset


class NoOptions(Bare):
    def reset(self, seed):
        return "", {}


class Number(Bare):
    def reset(self, seed, options):
        return 5, {}


class NoInfo(Bare):
    def step(self, action):
        return "text", 1.0, False, False


class NoReward(Bare):
    def step(self, action):
        return "text", None, False, False, {}


class Nan(Bare):
    def step(self, action):
        return "text", float("nan"), False, False, {}


class Vain(Bare):
    append_only = True


class Choosy(Bare):
    def __init__(self, size: int, colour: str = "red"):
        assert type(size) is int


class Squares(Bare):
    def __init__(self, lamps="seven"):
        self.count = lamps**2


class Picky(Bare):
    def __init__(self):
        raise ValueError("7 is no size")


class Numbers(Bare):
    def __init__(self, noise: float = 0.5, hard: bool = True, name: str | None = None):
        self.got = (noise, hard, name)


class Loose(Bare):
    def __init__(self, size=1, count: "int" = 2, folder: str = ""):
        self.got = size, count, folder


WRONG = {
    "nowhere:World": r"nowhere:World: No module named 'nowhere', neither installed nor in /",
    "mine.my_world:Nothing": r"mine.my_world:Nothing: there is no Nothing in /.*/mine/my_world.py",
    "mine.my_world:random": r"mine.my_world:random: .*not a callable object",
    "mine:my_world:HigherLower": r"mine:my_world:HigherLower: No module named 'mine:my_world', neither",
    "nowhere:some/world-v0": r"nowhere:some/world-v0: No module named 'nowhere'",
    "some/world-v0": r"unknown environment 'some/world-v0'; known: twenty-questions, .*docs/your_world.md",
    "turnrl/chess-v0": r"unknown environment 'chess'; known: ",
    "CartPole-v1": r"CartPole-v1: the text that reset returns must be str, not array",
    f"{HERE}:NoStep": r".*NoStep has no step\(\); docs/your_world.md",
    f"{HERE}:NoOptions": r".*NoOptions: reset must take \(seed, options\)",
    f"{HERE}:Number": r".*Number: the text that reset returns must be str, not 5; docs/your_world.md",
    f"{HERE}:NoInfo": r".*step must return \(text, reward, terminated, truncated, info\), not \('text', 1",
    f"{HERE}:NoReward": r".*the reward that step returns must be a number, not None",
    f"{HERE}:Nan": r".*the reward that step returns must be a number, not nan",
    f"{HERE}:Vain": r".*append_only is True, but an observation does not begin with the last one and the"
    r" action: 'You said 1.' stands where 'Seed \d+.1' should; without",
    "mine.my_world.HigherLower": r"unknown environment .* \(or is it mine.my_world:HigherLower\?\); known: ",
    "my_world.py": r"unknown environment .* \(or is it my_world:MyWorld\?\); known: ",
    f"{HERE}:Choosy": r".*Choosy needs the option size",
    f"{HERE}:Squares": r".*:Squares: TypeError: unsupported .* \(/.*/test_your_world.py, line \d+\)$",
    f"{HERE}:Picky": r".*:Picky: 7 is no size \(/.*/test_your_world.py, line \d+\)$",
}


@pytest.mark.parametrize("id", WRONG)
def test_what_is_wrong_with_a_world_is_one_line(id):
    """Also where worlds are played in lockstep; of these kinds of errors the scripts make one line."""
    with pytest.raises((ValueError, envs.Unavailable), match=f"^{WRONG[id]}") as error:
        worlds = envs.VecTextEnv(id, 2)
        worlds.reset()
        worlds.step({0: "1", 1: "1"})
    assert "\n" not in str(error.value)


def test_an_error_of_the_world_itself_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(Bare, "step", lambda self, action: {}["missing"])
    worlds = envs.VecTextEnv(f"{HERE}:Bare", 1)
    worlds.reset()
    with pytest.raises(RuntimeError, match=r"^world 0 .*step: 'missing'") as error:
        worlds.step({0: "1"})
    assert isinstance(error.value.__cause__, KeyError)


def test_a_world_that_cannot_go_on_says_so_as_what_it_is(monkeypatch):
    """In one line: the command line knows these errors."""
    for kind in (envs.Unavailable, envs.WorldBroken):

        def step(self, action, kind=kind):
            raise kind("no server")

        monkeypatch.setattr(Bare, "step", step)
        worlds = envs.VecTextEnv(f"{HERE}:Bare", 1)
        worlds.reset()
        with pytest.raises(kind, match=r"^world 0 .*no server$"):
            worlds.step({0: "1"})


def test_a_world_that_begins_with_nothing_is_one_line(monkeypatch):
    """A model would have nothing to read, and the value of the state no place."""
    monkeypatch.setattr(Whole, "reset", lambda self, seed, options: ("", {}))
    with pytest.raises(envs.WorldBroken, match=r"^world 0 .*reset: the first observation is empty; "):
        envs.VecTextEnv(f"{HERE}:Whole", 2).reset()


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_world_that_only_replies_may_not_begin_with_nothing_either(monkeypatch, text):
    monkeypatch.setattr(Bare, "reset", lambda self, seed, options: (text, {}))
    with pytest.raises(envs.WorldBroken, match=r"^world 0 .*reset: the first observation is empty"):
        envs.VecTextEnv(f"{HERE}:Bare", 1).reset()


def test_a_world_always_gets_a_seed(monkeypatch):
    """Also where a task is asked for that is none, as our own worlds allow."""
    got, reset = [], Bare.reset
    monkeypatch.setattr(
        Bare, "reset", lambda self, seed, options: got.append(seed) or reset(self, seed, options)
    )
    world = envs.make(f"{HERE}:Bare")
    world.reset(seed=3, options={"index": None})
    world.reset(seed=3)
    world.reset(seed=3, options={"index": 5})
    assert got[-3:] == [3, 3, 5]


def test_a_world_may_say_what_it_has_read_and_need_no_players(monkeypatch):
    """envs.fuzz believes it, and finds words for it."""
    step = Bare.step

    def says(self, action):
        text, reward, terminated, truncated, info = step(self, action)
        return text, reward, terminated, truncated, info | {"action": action.upper()[:5]}

    monkeypatch.setattr(Bare, "step", says)
    assert envs.fuzz.fuzz(envs.make(f"{HERE}:Bare"), 50)["plain"][0] > 0


class Typed(Bare):
    """Its options have types, and there may be others."""

    def __init__(self, on: bool = True, rate: float = 1.0, **others):
        self.got = (on, rate, others)


class Talkative(Bare):
    """It has a result in every turn, one of which is no dict."""

    def step(self, action):
        info = {"result": {"success": True}} if action != "none" else {"result": None}
        info |= {"action": 7} if action == "seven" else {}
        return "Yes.", 0.0, action == "end", False, info


class Slip(Bare):
    """A property that fails."""

    @property
    def players(self):
        return self.plyers


def test_a_result_counts_at_the_end_only():
    world = envs.make(f"{HERE}:Talkative")
    world.reset(seed=0)
    assert "result" not in world.step("go")[4]
    assert world.step("end")[4]["result"] == {"return": 0.0, "length": 2, "success": True}


@pytest.mark.parametrize(("action", "part"), [("none", "result"), ("seven", "action")])
def test_what_step_tells_has_its_type(action, part):
    world = envs.make(f"{HERE}:Talkative")
    world.reset(seed=0)
    with pytest.raises(envs.NotAWorld, match=rf'info\["{part}"\] of step must be '):
        world.step(action)


@pytest.mark.parametrize("name", ["a/b", "a=b", "a,b", 7])
def test_a_player_has_a_name_that_mix_can_take(name):
    world = envs.make(f"{HERE}:Bare")
    world.world.players = {name: lambda text, rng: "polly"}
    with pytest.raises(envs.NotAWorld, match="a player's name is text without"):
        _ = world.players


def test_an_attribute_that_fails_is_not_absent():
    with pytest.raises(envs.NotAWorld, match="players fails: 'Slip' object has no attribute 'plyers'"):
        envs.make(f"{HERE}:Slip").own("players")


def test_a_file_in_the_place_of_a_module_gets_a_hint_that_works():
    with pytest.raises(ValueError, match=r"or is it mine\.my_world:MyWorld\?"):
        envs.make("mine/my_world.py")


def test_options_are_arguments_of_the_class():
    assert envs.make(f"{HERE}:Choosy", **envs.options("size=3")).id == f"{HERE}:Choosy"
    assert envs.make(f"{HERE}:Loose", **envs.options("size=3,count=4,folder=5")).got == (3, 4, "5")
    assert envs.make(f"{HERE}:Numbers", **envs.options("noise=1,hard=0,name=7")).got == (1, 0, "7")
    assert envs.make(f"{HERE}:Typed", **envs.options("on=False,rate=0.1,id=3")).got == (False, 0.1, {"id": 3})
    assert envs.make(f"{HERE}:Typed", **envs.options("on=1,rate=2")).got == (True, 2.0, {})
    with pytest.raises(ValueError, match="on must be True or False, not 'maybe'"):
        envs.make(f"{HERE}:Typed", on="maybe")
    with pytest.raises(ValueError, match="rate must be a number, not 'high'"):
        envs.make(f"{HERE}:Typed", rate="high")
    with pytest.raises(ValueError, match="size must be a whole number, not 'big'"):
        envs.make(f"{HERE}:Choosy", size="big")
    with pytest.raises(ValueError, match="has no option 'sise'; it has: size, colour"):
        envs.make(f"{HERE}:Choosy", sise=3)


def test_textarena_wants_an_id_that_ends_in_raw():
    """Before the package is asked for."""
    with pytest.raises(
        ValueError, match=r"^envs.worlds.textarena:TextArena: game=Mastermind-v0: take an id of"
    ):
        envs.make("envs.worlds.textarena:TextArena", game="Mastermind-v0")


def test_no_players_are_one_line(monkeypatch, capsys):
    world = envs.make(f"{HERE}:Bare")
    with pytest.raises(ValueError, match=r"neither players nor demonstrations to learn from: give --dataset"):
        world.demonstrations(2, seed=0)
    with pytest.raises(ValueError, match=r"NoPlayers: players are \[.*, and no dict of functions by name$"):
        envs.make(f"{HERE}:NoPlayers").demonstrations(2, seed=0)
    with pytest.raises(ValueError, match=r"no player 'random'; .*:Bare has: none, so give --dataset FILE$"):
        envs.datasets.make_dialogues(world, 1, 0, "random=1")
    monkeypatch.setattr("sys.argv", ["envs.speed", f"{HERE}:Bare"])
    assert envs.speed.main() == 2 and capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------------------------------- envs.check


def check(monkeypatch, capsys, id: str) -> tuple[int, list[str], str]:
    """Exit code of envs.check, the rules that it calls broken, and all that it prints."""
    monkeypatch.setattr("sys.argv", ["envs.check", id])
    code, said = envs.check.main(), "".join(capsys.readouterr())
    return code, re.findall(r"^BROKEN  (.+)$", said, re.M), said


def test_the_example_keeps_the_rules(monkeypatch, capsys):
    code, broken, said = check(monkeypatch, capsys, ID)
    assert (code, broken) == (0, []) and said.endswith("13 rules: 12 hold, 0 broken, 1 not tested\n")
    assert f"-       {envs.check.knows_its_returns.__doc__}\n        neither of the two\n" in said
    assert "absent  num_tasks: " in said and "absent  players" not in said


class Fragile(Bare):
    def step(self, action):
        return f"{action[0]}", 0.0, False, False, {}


class Digits(Whole):
    def step(self, action):
        return super().step(str(int(action)))


class Remembers(Bare):
    """Of an episode before."""

    score = 0

    def reset(self, seed, options):
        self.score += 1
        return f"Game {self.score}.", {}


class Shared(Bare):
    """All instances have one list, which only a reset of its own empties."""

    said: list = []  # noqa: RUF012

    def reset(self, seed, options):
        self.said.clear()
        return "Begin.", {}

    def step(self, action):
        self.said.append(action)
        return f"{len(self.said)} said.", 0.0, False, False, {}


class Global(Bare):
    def reset(self, seed, options):
        random.seed(seed)
        return f"{random.random()}", {}


class Unsaid(Bare):
    def step(self, action):
        return "text", 0.0, False, True, {"result": {"success": 1}}


class Doubled(Bare):
    """Its observations are whole dialogues, and it does not say so."""

    def reset(self, seed, options):
        self.text = f"Seed {seed}.\n"
        return self.text, {}

    def step(self, action):
        self.text += f"{action}\nYes.\n"
        return self.text, 0.0, False, False, {}


class Drifts(Whole):
    def reset(self, seed, options):
        text, _ = super().reset(seed, options)
        return text, {"answer": f"{options} {seed % 2}"}


class Mute(Bare):
    players = {"mute": lambda text, rng: None}  # noqa: RUF012


class Locked(Bare):
    players = {"thief": lambda text, rng: "garage"}  # noqa: RUF012

    def step(self, action):
        if action == "garage":
            raise KeyError(action)
        return super().step(action)


class HalfACharacter(Bare):
    def step(self, action):
        text, *others = super().step(action)
        return (text + "\ud800", *others)


class Invents(Bare):
    def demonstrations(self, n, seed):
        return [{"observations": ["a"], "actions": ["b"]}] * n


class Shows(Bare):
    """The page's demonstration, which is right but for what a test changes."""

    def reset(self, seed, options):
        self.number = seed % 5
        return "Guess.", {"answer": str(self.number)}

    def step(self, action):
        won = action == str(self.number)
        return "Right." if won else "Wrong.", won - 1, won, False, {"result": {"success": won}}

    def demonstrations(self, n, seed):
        return [json.loads(SHOWN)] * n


def changed(**parts):
    return lambda self, n, seed: [made | parts for made in RIGHT(self, n, seed)]


RIGHT = Shows.demonstrations
REPLIES = {"observations": ["Guess.\n", "Wrong.\n", "Right.\n"]}
UNENDED = {"observations": ["Guess.", "Guess.\n1\nWrong.\n", "Guess.\n1\nWrong.\n3\nRight.\n"]}
FALSE = {"observations": ["Guess.\n", "Guess.\n1\nWrong.\n", "Guess.\n1\nWrong.\n3\nWrong.\n"]}
NOT_SHOWN = {
    "replies only": (
        changed(**REPLIES),
        r"no observation is the whole dialogue: 'Wrong.\\n' stands where 'Guess.\\n1' should",
    ),
    "no newline": (changed(**UNENDED), r"'Guess.\\n1\\nWrong.\\n' stands where 'Guess.1' should"),
    "none": (lambda self, n, seed: [], "of 2 that were asked for came 0"),
    "one too few": (lambda self, n, seed: RIGHT(self, 1, seed), "of 2 that were asked for came 1"),
    "no list": (lambda self, n, seed: None, "they are None, and no list"),
    "another reply": (
        changed(**FALSE),
        r"task 3 begins likewise, but then '.*3\\nWrong.*' stands where '.*3\\nRight",
    ),
    "other rewards": (changed(rewards=[0, 0]), r"task 3 has rewards = \[-1.0, 0.0\], not \[0, 0\]"),
    "another end": (changed(terminated=False), "task 3 has terminated = True, not False"),
    "no success": (changed(success=False), "task 3 has success = True, not False"),
    "another world's": (
        changed(answer="dog"),
        "no task begins with .* and has the answer 'dog'; task 0 begins",
    ),
    "without keys": (
        lambda self, n, seed: [{}] * n,
        "has no observations, actions, rewards, terminated, succ",
    ),
}


@pytest.mark.parametrize("wrong", NOT_SHOWN)
def test_demonstrations_are_played_again(wrong, monkeypatch):
    rule = envs.check.demonstrates
    assert rule(envs.check.maker(f"{HERE}:Shows")) is None
    monkeypatch.setattr(Shows, "demonstrations", NOT_SHOWN[wrong][0])
    with pytest.raises(AssertionError, match=NOT_SHOWN[wrong][1]):
        rule(envs.check.maker(f"{HERE}:Shows"))


def test_where_the_seed_decides_demonstrations_cannot_be_played_again(monkeypatch):
    """Nor where a task can begin in more ways than are searched."""
    monkeypatch.setattr(Shows, "demonstrations", changed(**FALSE))
    monkeypatch.setattr(Shows, "num_tasks", 5, raising=False)

    def reset(self, seed, options):
        self.number = options.get("index", 0)
        self.step = lambda action: (f"Noise {seed}.", 0.0, False, False, {})
        return "Guess.", {"answer": str(self.number)}

    monkeypatch.setattr(Shows, "reset", reset)
    envs.check.demonstrates(envs.check.maker(f"{HERE}:Shows"))
    monkeypatch.setattr(Shows, "num_tasks", None)
    monkeypatch.setattr(Shows, "reset", Bare.reset)
    monkeypatch.setattr(Shows, "step", Bare.step)
    envs.check.demonstrates(envs.check.maker(f"{HERE}:Shows"))


class NoPlayers(Bare):
    players = [lambda text, rng: "1"]  # noqa: RUF012


class Vague(Bare):
    best_return = "high"


BREAK = {
    Number: {"resets"},
    NoInfo: {"steps"},
    Vain: {"appends"},
    NoPlayers: {"has_players"},
    NoReward: {"steps"},
    Digits: {"steps"},
    Fragile: {"takes_any_text"},
    Remembers: {"repeats_itself"},
    Shared: {"plays_side_by_side"},
    Global: {"leaves_generators_alone"},
    Unsaid: {"says_what_it_says"},
    Doubled: {"appends"},
    Drifts: {"keeps_tasks"},
    Mute: {"has_players"},
    Locked: {"has_players"},
    HalfACharacter: {"steps"},
    Invents: {"demonstrates"},
    Vague: {"knows_its_returns"},
}


@pytest.mark.parametrize("world", BREAK, ids=lambda world: world.__name__)
def test_a_broken_rule_is_found(world, monkeypatch, capsys):
    code, broken, _ = check(monkeypatch, capsys, f"{HERE}:{world.__name__}")
    meant = {rule.__doc__ for rule in envs.check.RULES if rule.__name__ in BREAK[world]}
    assert code == 1 and meant <= set(broken)
    follow = {"Unsaid", "Shared", "Remembers"}  # others, too
    assert meant == set(broken) or world.__name__ in follow


def test_a_word_that_a_world_cannot_read_is_named(monkeypatch, capsys):
    _, _, said = check(monkeypatch, capsys, f"{HERE}:Digits")
    assert "        'yes' raised ValueError: invalid literal for int() with base 10: 'yes'\n" in said


def test_an_action_of_a_player_that_step_cannot_read_is_named(monkeypatch, capsys):
    _, _, said = check(monkeypatch, capsys, f"{HERE}:Locked")
    assert "        to thief's action 'garage' step raised KeyError: 'garage'\n" in said


def test_half_a_character_is_named(monkeypatch, capsys):
    _, _, said = check(monkeypatch, capsys, f"{HERE}:HalfACharacter")
    assert "returns has half a character in it: " in said


def test_after_a_broken_rule_that_others_use_these_are_not_tested(monkeypatch, capsys):
    _, _, said = check(monkeypatch, capsys, f"{HERE}:NoInfo")
    assert said.count("step must return") == 1 and said.count("not tested: mend the broken rule first") == 11
    assert said.endswith("13 rules: 1 hold, 1 broken, 11 not tested\n")


def test_what_a_world_does_not_have_is_not_tested(monkeypatch, capsys):
    _, _, said = check(monkeypatch, capsys, f"{HERE}:Bare")
    untested = [rule.__name__ for rule in envs.check.RULES if f"-       {rule.__doc__}" in said]
    assert untested == ["keeps_tasks", "has_players", "demonstrates", "knows_its_returns"]
    assert said.endswith("13 rules: 9 hold, 0 broken, 4 not tested\n")


def test_each_rule_can_be_broken():
    found = set().union(*BREAK.values())
    assert {rule.__name__ for rule in envs.check.RULES} - found == {"satisfies_gymnasium"}


def test_gymnasiums_checker_is_behind_it(monkeypatch, capsys):
    """It finds what is drawn without the seed."""
    monkeypatch.setattr(
        Bare, "step", lambda self, action: (f"{id(object())} {os.urandom(4)}", 0, False, False, {})
    )
    _, broken, _ = check(monkeypatch, capsys, f"{HERE}:Bare")
    assert envs.check.satisfies_gymnasium.__doc__ in broken


def test_a_world_that_cannot_be_made_is_one_line(monkeypatch, capsys):
    code, _, said = check(monkeypatch, capsys, "nowhere:World")
    assert code == 2 and said.startswith("envs.check: nowhere:World: ") and said.count("\n") == 1


# ---------------------------------------------------------------------------------------- gymnasium


def test_a_registered_world_runs_by_its_id(there, monkeypatch):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("test/tq-v0", entry_point=TwentyQuestions, max_episode_steps=3)
    world = envs.make("test/tq-v0", matching="paper")
    assert (world.id, world.max_turns, world.num_tasks) == ("test/tq-v0", 20, 157)
    assert world.reset(options={"index": 11})[1] == {"answer": "dog"}
    assert world.step("Is it an animal, dog?")[-1]["result"]["success"]

    class Echo(Bare, gymnasium.Env):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed, options)

    gymnasium.register("test/echo-v0", entry_point=Echo, max_episode_steps=3)
    assert envs.make("test/echo-v0").max_turns == 3

    own = "envs.worlds.twenty_questions:TwentyQuestions"
    code = f"import gymnasium\ngymnasium.register('test/own-v0', '{own}')\n"
    (there / "registers.py").write_text(code)
    assert envs.make("registers:test/own-v0").num_tasks == 157


# --------------------------------------------------------------------------------------- the scripts


def run_of(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


@pytest.fixture(scope="module")
def actor(mine, tmp_path_factory) -> Path:
    """A tiny model that sft.py makes from the players of the example."""
    folder = tmp_path_factory.mktemp("sft")
    tiny = {"demonstrations": 8, "drills": 4, "epochs": 1, "batch": 4, "eval_episodes": 2, "width": 32}
    tiny |= {"layers": 1, "max_action_tokens": 4, "threads": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(mine)
        patch.setattr(sys, "path", list(sys.path))
        sft.main(sft.Args(env=ID, runs=str(folder), **tiny))
    assert run_of(folder).name.startswith("mine.my_world-HigherLower__sft__1__")
    return run_of(folder) / "actor"


TINY = {"iterations": 2, "eval_episodes": 2, "max_action_tokens": 4, "threads": 1}


def test_loop_takes_it(actor, tmp_path):
    tiny = TINY | {"tasks": 2, "rollouts": 2, "worlds": 4, "min_advantage": 0.0}
    summary = loop_ppo.main(loop_ppo.Args(env=ID, model=str(actor), runs=str(tmp_path), **tiny))
    path = run_of(tmp_path) / "rollouts.jsonl"
    ended = [row for row in map(json.loads, path.read_text().splitlines()) if row["fate"] == "ended"]
    assert -6 <= summary["eval_return"] <= 0 and ended[0]["text"].startswith("Guess a number from 1 to 20.\n")
    made, _ = envs.datasets.read_dialogues(str(path))  # what it writes is data
    assert [d["observations"][-1] for d in made] == [row["text"] for row in ended]
    assert [sum(d["rewards"]) for d in made] == [row["return"] for row in ended]


def test_offline_takes_it(actor, tmp_path):
    tiny = TINY | {"dataset_size": 8, "critic_updates": 1, "actor_updates": 1, "batch": 4, "mix": "hasty"}
    arguments = archer_offline_iql.Args(env=ID, actor=str(actor), runs=str(tmp_path), **tiny)
    assert -6 <= archer_offline_iql.main(arguments)["eval_return"] <= 0


def test_a_dialogue_of_a_run_is_data(actor, tmp_path):
    """What archer.py has played, archer_offline_iql.py learns from, also if the world says no answer."""
    tiny = TINY | {"rollouts": 2, "critic_updates": 1, "critic_batch": 2, "critic_pool": 2, "warmup": 2}
    archer.main(archer.Args(env=f"{HERE}:Short", actor=str(actor), runs=str(tmp_path), **tiny))
    made, notes = envs.datasets.read_dialogues(str(run_of(tmp_path) / "rollouts.jsonl"), True)
    assert len(made) == 4 and notes == [] and made[0]["answer"] == "unknown"


def test_a_world_of_numpy_loses_no_run(actor, tmp_path, capsys):
    """Samples, checkpoint and model are saved; a run that is resumed reads them."""
    tiny = TINY | {"rollouts": 2, "critic_updates": 1, "critic_batch": 2, "critic_pool": 2, "warmup": 2}
    args = archer.Args(env=f"{HERE}:Arrays", actor=str(actor), runs=str(tmp_path), **tiny)
    archer.main(args)
    run = run_of(tmp_path)
    assert "not saved" not in capsys.readouterr().out and (run / "actor/model.safetensors").exists()
    sample = json.loads((run / "rollouts.jsonl").read_text().splitlines()[0])
    assert sample["answer"] == ["dog", "cat"] and sample["success"] is True
    archer.main(archer.Args(**vars(args) | {"resume": str(run), "iterations": 3}))


def test_play_takes_it(monkeypatch, capsys):
    guesses = iter(["10", "15", "12", "13"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(guesses))
    monkeypatch.setattr("sys.argv", ["envs.play", ID, "--index", "0"])
    assert envs.play.main() == 0
    turns, _, said = capsys.readouterr().out.partition("\n\n")
    assert turns.startswith("You have 6 turns. For example: ")
    assert (
        said.startswith("Guess a number from 1 to 20.\nHigher.\n") and "Solved.\n4 turns, return -3\n" in said
    )


def test_a_script_is_taken_away_with_four_files(actor, tmp_path):
    """A folder with archer.py, the files that the page names, and a world: two iterations."""
    (files,) = re.findall(r"you need four files, (.*?), and your\s+world", PAGE)
    files = re.findall(r"`([^`]+)`", files)
    assert files == ["envs/__init__.py", "envs/adapt.py", "envs/runs.py", "envs/models.py"]
    (tmp_path / "envs").mkdir()
    for file in ["archer.py", *files]:
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "my_world.py").write_text(EXAMPLE, encoding="utf-8")
    options = "--iterations 2 --rollouts 2 --critic-updates 1 --critic-batch 2 --critic-pool 2 --warmup 0"
    options += " --actor-updates 1 --actor-batch 2 --eval-episodes 2 --max-action-tokens 4 --env"
    command = [sys.executable, "archer.py", *options.split(), "my_world:HigherLower", "--actor", str(actor)]
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1"
    }
    result = subprocess.run(command, cwd=tmp_path, env=quiet, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert len((run_of(tmp_path / "runs") / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("script", ["archer", "loop_ppo", "sft", "archer_offline_iql"])
def test_a_script_needs_no_other_file_of_envs(script):
    """Than the page says: what they import, wherever it stands."""
    needed = set()
    for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("envs"):
            of = node.module.removeprefix("envs").strip(".")
            needed |= {of} if of else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            needed |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("envs.")}
    assert needed == {"runs", "models"} | ({"datasets"} if script in ("sft", "archer_offline_iql") else set())


def test_a_file_that_was_left_behind_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "envs.worlds.webshop", None)  # as if there were no such file
    with pytest.raises(
        envs.Unavailable, match=r"^webshop: .*envs\.worlds\.webshop.*, neither installed nor in /"
    ):
        envs.make("webshop")
