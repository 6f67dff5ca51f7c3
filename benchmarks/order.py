"""Does a critic of a game of questions know which of several utterances in one state is the better one?

    python benchmarks/order.py checkpoints/twenty-questions                # ArCHer's critic, as it learns
    python benchmarks/order.py checkpoints/twenty-questions --variant D9   # a part of archer.py exchanged
    python benchmarks/order.py checkpoints/twenty-questions --updates 0    # only what GAE would know
    python benchmarks/order.py runs/.../actor --env guess-my-city          # a trained agent in the other game

The actor stands still. It plays --dialogues, from which the critic learns, and some more to judge it by; in
each of their states it writes eight utterances. What each is worth can be told almost exactly: the table of
the world says which words (or cities) are left after each answer, and how the actor fares from there on is a
smooth function of their number and of the turn, fitted to the returns of all dialogues. Advantages are the
worths less their mean in a state.

Printed is the correlation of the critic's advantages with these, over all states, over the first six turns
and from the tenth on; and that of GAE for the action that was taken, which has the best V there is, but sees
only one answer and what followed it.
"""

import copy
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers
import tyro
import variants

sys.path.insert(0, str(Path(__file__).parent.parent))
import archer
import envs
from envs import models
from envs.worlds import guess_my_city, twenty_questions

WORLDS = {"twenty-questions": twenty_questions, "guess-my-city": guess_my_city}
EACH = 8  # utterances written in a state
JUDGED = 64  # dialogues
LAMBDAS = (0.0, 0.8, 0.95, 1.0)


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]  # folder of a model and its tokenizer, or a Hugging Face name
    env: Literal["twenty-questions", "guess-my-city"] = "twenty-questions"
    variant: Literal["", "D4", "D7", "D9", "mc", "iql"] = ""  # of benchmarks/variants.py
    dialogues: int = 512  # that the critic learns from
    updates: int = 150  # of the critic; it is judged after every 50
    critic_lr: float = archer.Args.critic_lr
    critic_batch: int = archer.Args.critic_batch
    seed: int = 0


# ---------------------------------------------------------- 1. what an utterance is worth
@cache
def words_left(env: str, state: str) -> int:
    """The words or cities that agree with all answers, as a set in an int."""
    return WORLDS[env].candidates(state)


def parts_of(env: str, words: int, action: str) -> list[tuple[int, bool]]:
    """How the answers split a set of words; and whether the game ends for those of a part."""
    question = WORLDS[env].parse(action)
    if question is None:
        return [(words, False)]
    topic = getattr(question, "topic", None)  # of an open question
    if topic is not None:
        said = guess_my_city.SAID_OF.get(topic, {"": words})
        return [(words & agreeing, False) for agreeing in said.values()]
    return [(words & question.yes, question.guess is not None), (words & ~question.yes, False)]


def features(words: int, turn: int) -> list[float]:
    """Of a state: a piecewise linear function of log2 of the words left, times 1, turns left, and its square.

    >>> len(features(0b111, 3)), features(0b1, 20)[:2]
    (27, [1.0, 0.0])
    """
    bits = math.log2(words.bit_count())
    low = min(int(bits), 7)
    basis = [0.0] * 9
    basis[low] = 1 - (bits - low)
    basis[low + 1] = bits - low
    left = 1 - turn / 20
    return [power * x for power in (1.0, left, left**2) for x in basis]


class Worth:
    """V of a state and Q of an utterance, in units of the discounted return."""

    def __init__(self, dialogues: list[dict], gamma: float, env: str = "twenty-questions"):
        self.gamma = gamma
        self.env = env
        inputs, returns = [], []
        for dialogue in dialogues:
            returns += archer.mc_returns(dialogue["rewards"], gamma)
            states = dialogue["observations"][:-1]
            inputs += [features(self.left(state), turn) for turn, state in enumerate(states)]
        x = np.array(inputs)
        ridge = 1e-2 * np.eye(x.shape[1])
        self.weights = np.linalg.solve(x.T @ x + ridge, x.T @ np.array(returns))

    def left(self, state: str) -> int:
        """The words that agree with all answers."""
        return words_left(self.env, state)

    def v(self, words: int, turn: int) -> float:
        """Of a state with these words left; 0 after the last turn."""
        return float(np.dot(features(words, turn), self.weights)) if turn < 20 else 0.0

    def q(self, state: str, turn: int, action: str) -> float:
        """The mean over the words left: a right guess ends the game, all else costs 1 and goes on."""
        words = self.left(state)
        worth = 0.0
        for part, ends in parts_of(self.env, words, action):
            if part and not ends:
                share = part.bit_count() / words.bit_count()
                worth += share * (-1 + self.gamma * self.v(part, turn + 1))
        return worth


def centred(values_NK: np.ndarray) -> np.ndarray:
    """Less the mean of each state."""
    return values_NK - values_NK.mean(1, keepdims=True)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Of numbers whose mean is 0; 0 where all are.

    >>> correlation(np.array([1.0, -1.0]), np.array([1.0, -1.0])), correlation(np.zeros(2), np.ones(2))
    (1.0, 0.0)
    """
    size = math.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / size) if size else 0.0


# ---------------------------------------------------------- 2. dialogues
def play(actor, n: int, seed: int, args: archer.Args) -> list[dict]:
    """`n` sampled dialogues."""
    rng = np.random.default_rng(seed)
    worlds = envs.VecTextEnv(args.env, min(n, 64))
    dialogues = []
    while len(dialogues) < n:
        dialogues += archer.rollout(actor, worlds, args, rng)[0]
    return dialogues[:n]


# ---------------------------------------------------------- 3. judging
def gae_of(dialogue: dict, worth: Worth, lam: float) -> list[float]:
    """Of each action, with the V of `worth`."""
    states = dialogue["observations"][:-1]
    values = [worth.v(worth.left(state), turn) for turn, state in enumerate(states)] + [0.0]
    found, later = [], 0.0
    for turn in reversed(range(len(states))):
        error = dialogue["rewards"][turn] + worth.gamma * values[turn + 1] - values[turn]
        later = error + worth.gamma * lam * later
        found.append(later)
    return found[::-1]


class Judge:
    """Eight utterances in each state of some dialogues, and the worth of each."""

    def __init__(self, actor, dialogues: list[dict], worth: Worth, args: archer.Args, rng):
        self.dialogues = dialogues
        self.draws = [archer.with_fresh(dialogues, actor, args, rng) for _ in range(EACH)]
        self.turn_N = np.concatenate([np.arange(len(dialogue["actions"])) for dialogue in dialogues])
        states = [state for dialogue in dialogues for state in dialogue["observations"][:-1]]
        worths = []
        for draw in self.draws:
            triples = zip(states, self.turn_N, archer.flat(draw, "fresh"), strict=True)
            worths.append([worth.q(*triple) for triple in triples])
        worth_NK = np.array(worths).T
        self.advantage_NK = centred(worth_NK)
        triples = zip(states, self.turn_N, archer.flat(dialogues, "actions"), strict=True)
        self.taken_N = np.array([worth.q(*triple) for triple in triples]) - worth_NK.mean(1)

    @torch.no_grad()
    def __call__(self, critic) -> list[float]:
        """The correlations of a critic: all states, the first six turns, from the tenth on."""
        columns = []
        for draw in self.draws:
            parts = [critic([dialogue], dialogue["fresh"])[1].min(-1).values for dialogue in draw]
            columns.append(torch.cat(parts).numpy())
        guess_NK = centred(np.stack(columns, 1))
        where = (self.turn_N >= 0, self.turn_N < 6, self.turn_N >= 10)
        return [correlation(guess_NK[at], self.advantage_NK[at]) for at in where]


def learn(actor, data: list[dict], judge: Judge, args: archer.Args, updates: int, rng) -> None:
    """Makes the updates of a critic as archer.py does, and prints what the judge says of it."""
    body = copy.deepcopy(actor.base_model)
    body.tokenizer = actor.tokenizer
    value = float(np.mean([archer.mc_returns(dialogue["rewards"], args.gamma)[0] for dialogue in data]))
    critic = archer.Critic(body, value, args.dtype)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)
    print("updates    all   turns 1-6   turns 11-20   V explains")
    for update in range(updates):
        if update % args.critic_updates == 0:
            pool = archer.with_fresh(rng.choice(data, args.critic_pool), actor, args, rng)
        batch = rng.choice(pool, args.critic_batch)
        log = archer.critic_update(critic, target_critic, optimizer, batch, args)
        if (update + 1) % 50 == 0:
            every, early, late = judge(critic)
            explained = log["critic/explained_variance"]
            print(f"{update + 1:7}{every:7.2f}{early:12.2f}{late:14.2f}{explained:13.2f}", flush=True)


def main(args: Args) -> None:
    """Prints the tables."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    settings = archer.Args(env=args.env, critic_lr=args.critic_lr, critic_batch=args.critic_batch)
    actor = models.load(transformers.AutoModelForCausalLM, args.checkpoint, settings)
    rng = np.random.default_rng(args.seed)
    data = play(actor, args.dialogues, args.seed + 1, settings)
    judged = play(actor, JUDGED, args.seed + 2, settings)
    worth = Worth(data + judged, settings.gamma, args.env)
    judge = Judge(actor, judged, worth, settings, rng)
    print(f"standard deviation of an advantage: {judge.advantage_NK.std():.2f} points")
    for lam in LAMBDAS:
        found = np.concatenate([gae_of(dialogue, worth, lam) for dialogue in judged])
        print(f"GAE, lambda {lam:<4}  {np.corrcoef(found, judge.taken_N)[0, 1]:.2f}")
    with variants.exchanged(args.variant):
        learn(actor, data, judge, settings, args.updates, rng)


if __name__ == "__main__":
    main(tyro.cli(Args))
