"""benchmarks/order.py: the worth of an utterance, GAE, and what the judge says of critics that are known."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_checkpoint
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import order

import archer
import envs
from envs import models
from envs.worlds.twenty_questions import WORDS, candidates, expert, words_in


@pytest.fixture(scope="module")
def dialogues():
    return envs.make("twenty-questions").demonstrations(40, 0)


@pytest.mark.parametrize(
    "action", ["Is it a vehicle?", "Is it a dog?", "Is it a ship?", "What?", "Can it fly?"]
)
def test_the_worth_of_an_utterance_is_its_mean_over_the_words_left(dialogues, action):
    """Every word is played out: a turn of the world itself, then V of where it leads."""
    worth = order.Worth(dialogues, 0.9)
    said = ["Is it alive?", "Is it a vehicle?"]
    world = envs.make("twenty-questions")
    state, _ = world.reset(options={"index": WORDS.index("ship")})
    for question in said:
        state, *_ = world.step(question)
    found = []
    for word in words_in(candidates(state)):
        world.reset(options={"index": WORDS.index(word)})
        for question in said:
            before, *_ = world.step(question)
        assert before == state
        after, reward, terminated, _, _ = world.step(action)
        found.append(reward + 0.9 * (0.0 if terminated else worth.v(candidates(after), 3)))
    assert worth.q(state, 2, action) == pytest.approx(np.mean(found))


def test_v_is_fitted_to_the_returns(dialogues):
    """Who knows the answers has more, the fewer words are left; after the last turn there is nothing."""
    played = []
    for index in range(60):
        world, rng = envs.make("twenty-questions"), random.Random(index)
        state, _ = world.reset(options={"index": index})
        dialogue, over = {"observations": [state], "actions": [], "rewards": []}, False
        while not over:
            dialogue["actions"].append(expert(state, rng))
            state, reward, terminated, truncated, _ = world.step(dialogue["actions"][-1])
            over = terminated or truncated
            dialogue["observations"].append(state)
            dialogue["rewards"].append(reward)
        played.append(dialogue)
    worth = order.Worth(played, 0.95)
    first = np.mean([archer.mc_returns(d["rewards"], 0.95)[0] for d in played])
    assert worth.v((1 << len(WORDS)) - 1, 0) == pytest.approx(first, abs=0.5)
    assert worth.v(1, 6) > worth.v((1 << 40) - 1, 2) > worth.v((1 << 157) - 1, 0)
    assert worth.v(1, 20) == 0.0


def test_gae_without_lambda_is_the_error_of_one_turn(dialogues):
    worth, dialogue = order.Worth(dialogues, 0.9), dialogues[0]
    values = [worth.v(candidates(s), k) for k, s in enumerate(dialogue["observations"][:-1])] + [0.0]
    errors = [r + 0.9 * values[k + 1] - values[k] for k, r in enumerate(dialogue["rewards"])]
    assert order.gae_of(dialogue, worth, 0.0) == pytest.approx(errors)
    expected = sum(0.45**k * error for k, error in enumerate(errors))
    assert order.gae_of(dialogue, worth, 0.5)[0] == pytest.approx(expected)


def test_who_knows_the_worth_is_told_so(tmp_path, monkeypatch, dialogues):
    """Correlation 1, also where it adds to each state what it likes; -1 upside down."""
    monkeypatch.setattr(order, "EACH", 3)
    args = archer.Args(env="twenty-questions", max_action_tokens=3)
    folder = make_checkpoint("twenty-questions", tmp_path / "m")
    actor = models.load(AutoModelForCausalLM, str(folder), args)
    worth = order.Worth(dialogues, 0.95)
    judge = order.Judge(actor, dialogues[:6], worth, args, np.random.default_rng(0))
    # A model that knows nothing writes nothing valid: what it might have said instead.
    texts = ["Is it a dog?", "Is it a vehicle?", "Is it alive?"]
    for draw, text in zip(judge.draws, texts, strict=True):
        for dialogue in draw:
            dialogue["fresh"] = [text] * len(dialogue["actions"])
    turns = [(s, k) for d in dialogues[:6] for k, s in enumerate(d["observations"][:-1])]
    judge.advantage_NK = order.centred(np.array([[worth.q(s, k, text) for text in texts] for s, k in turns]))

    def critic(factor, offset):
        def forward(given, said):
            states = given[0]["observations"][:-1]
            q = [
                factor * worth.q(s, k, a) + offset * k
                for k, (s, a) in enumerate(zip(states, said, strict=True))
            ]
            return None, torch.tensor([[x, x + 1] for x in q])

        return forward

    assert judge(critic(1, 0)) == pytest.approx([1, 1, 1], abs=1e-6)
    assert judge(critic(2, 5)) == pytest.approx([1, 1, 1], abs=1e-6)
    assert judge(critic(-1, 0)) == pytest.approx([-1, -1, -1], abs=1e-6)
