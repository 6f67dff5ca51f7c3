"""envs/fuzz.py: every world keeps its promises, and each broken promise is noticed."""

import sys

import gymnasium
import pytest
from test_envs import all_worlds

import envs
from envs import fuzz

# What a turn costs differs; scienceworld's episodes have 100, and two of each kind are wanted.
# Ten times as many of each: python -m envs.fuzz WORLD --turns 10000
TURNS = {"apps": 150, "appworld": 50, "scienceworld": 300, "detective": 500}


@pytest.mark.parametrize("id", list(all_worlds()))
def test_a_world_keeps_its_promises(id):
    world = envs.make(id)
    counts = fuzz.fuzz(world, TURNS.get(id, 2000), limit=60.0)
    world.close()
    assert all(n > 1 for n, _ in counts.values())


def test_a_reward_for_naming_lists_is_noticed():
    """The authors' rule pays for a city that stands anywhere in a question, and so for a list of them."""
    with pytest.raises(fuzz.BrokenPromise, match="what is paid for there is no knowledge"):
        fuzz.fuzz(envs.make("guess-my-city", matching="paper"), 20_000)


class Toy(gymnasium.Env):
    """Guess a letter within five turns. What it does wrong is `fault`."""

    id, max_turns, max_action_chars, append_only = "toy", 5, 20, True
    observation_space = action_space = envs.make("apps").observation_space.__class__(1000)

    def __init__(self, fault: str = ""):
        self.fault = fault

    def demonstrations(self, n: int, seed: int) -> list[dict]:
        return [{"actions": list("abcdefghijklmnopqrst")}]

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.letter = "abcdefghijklmnopqrst"[self.np_random.integers(20)]
        self.observation, self.turns, self.over = "Guess.\n", 0, False
        return self.observation, {"answer": self.letter}

    def step(self, action: str):
        if self.over and self.fault != "goes on":
            raise gymnasium.error.ResetNeeded("over")
        if self.fault == "raises" and "dog" in action:
            raise KeyError(action)
        taken = envs.read_action(action, self.max_action_chars)
        if self.fault == "surrogates":
            taken = action.split("\n", 1)[0].strip()[: self.max_action_chars]
        self.turns += 1
        won = self.letter in taken if self.fault == "lists" else taken == self.letter
        limit = 6 if self.fault == "long" else 5
        self.over = won or self.turns >= limit
        reward = float("nan") if self.fault == "nan" and not taken else float(won)
        self.observation += f"{taken} {'yes' if won else 'no'}.\n"
        if self.fault == "written anew":
            self.observation = self.observation[-30:]
        info = {"action": taken}
        if self.over:
            length = self.turns + (self.fault == "length")
            info["result"] = {"return": float(won), "length": length, "success": won}
        return self.observation, reward, won, self.over and not won, info


FAULTS = {
    "": None,
    "raises": "after the action '[^']*dog[^']*'.*: KeyError: ",
    "nan": "the reward is nan",
    "long": "turn 6 of 5",
    "length": "turns and a return of .*, but info says",
    "surrogates": "the action that it has taken is",
    "written anew": "does not go on from the last one",
    "goes on": "must raise ResetNeeded",
    "lists": "what is paid for there is no knowledge",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_world_does_wrong_is_noticed(fault):
    if FAULTS[fault] is None:
        (n, wins), (_, spoilt) = fuzz.fuzz(Toy(), 3000).values()
        assert 0.1 < wins / n < 0.4 and spoilt < wins, "five different letters of twenty, or fewer"
    else:
        with pytest.raises(fuzz.BrokenPromise, match=FAULTS[fault]):
            fuzz.fuzz(Toy(fault), 3000)


def test_a_slow_step_is_noticed():
    with pytest.raises(fuzz.BrokenPromise, match=r"after the action .*: the step took 0\.\d s"):
        fuzz.fuzz(Toy(), limit=1e-9)


def test_the_same_seed_says_the_same(monkeypatch):
    said = []
    monkeypatch.setattr(fuzz, "play", lambda world, actions, *_: (said.append(next(actions)) or 5, False))
    for seed in (1, 1, 2):
        fuzz.fuzz(Toy(), 500, seed)
    a, b, c = said[:100], said[100:200], said[200:]
    assert a == b != c


def test_on_the_command_line(monkeypatch, capsys):
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["envs.fuzz", *words])
        return fuzz.main(), *capsys.readouterr()

    code, said, _ = call("mini-detective", "--turns", "100")
    assert code == 0 and said.startswith("mini-detective: no promise broken; ")
    code, _, errors = call("guess-my-city", "--world", "matching=paper", "--turns", "20000")
    assert code == 1 and errors.startswith("guess-my-city: ") and errors.count("\n") == 1
    bad = (["chess"], ["apps", "--world", "matching=paper"], ["apps", "--turns", "0"], [".my:World"])
    for words in bad:
        code, _, errors = call(*words)
        assert code == 2 and errors.count("\n") == 1
