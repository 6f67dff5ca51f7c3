"""What loop_ppo.py promises: its equations, that a batch is but its parts, that a run can be resumed.

The world is a toy defined here: look a number up, then copy it. The models have one or two
layers. What they should compute is computed a second time, one rollout at a time, by a plain forward pass.
"""

import copy
import functools
import gc
import inspect
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer
from transformers import AutoModelForCausalLM

import envs
import loop_ppo
from envs import models
from envs.worlds.apps import whole_scenarios

ROOT = Path(loop_ppo.__file__).parent

NAMES = ["ann", "bob", "cid", "dot", "eve", "fay"]


class Lookup(gymnasium.Env):
    """A number is asked for; `look` shows it, `answer 17` ends the episode. A guess earns nothing.

    What is right can be known, so the best return is 1; a blind answer is right once in 40 tries.
    """

    id = "lookup"
    num_tasks = 600  # for training; 48 in the other splits
    max_turns = 4
    max_action_chars = 40
    append_only = True
    multiline = True
    demonstration_env = "lookup"
    best_return = 1.0

    def __init__(self, split: str = "train", reward: str = "fraction"):
        self.split = split
        offset = {"train": 0, "dev": 1000, "test-normal": 2000, "test-challenge": 3000}[split]
        self.num_tasks = 600 if split == "train" else 48
        self.asked = [
            (rng.choice(NAMES), rng.randrange(10, 50))
            for rng in map(random.Random, range(offset, offset + 600))
        ]
        self.scenarios = tuple(i // 3 for i in range(self.num_tasks))
        self.difficulties = tuple(1 + i % 3 for i in range(self.num_tasks))
        self.is_question = tuple(i % 2 == 0 for i in range(self.num_tasks))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.index = (options or {}).get("index", 0)
        (self.name, self.value), self.turn = self.asked[self.index], 0
        self.observation = f"value of {self.name}?\n> "
        return self.observation, {"answer": f"lookup_{self.index}"}

    def step(self, action):
        action = action.strip()[: self.max_action_chars]
        self.turn += 1
        terminated, reward, reply = False, 0.0, "\nerror\n> "
        if action == "look":
            reply = f"\n{self.name} {self.value}\n> "
        elif action.startswith("answer"):
            terminated, reward, reply = True, float(action == f"answer {self.value}"), "\ndone\n> "
        self.observation += action + reply
        truncated = not terminated and self.turn == self.max_turns
        info = {"action": action}
        if terminated or truncated:
            info["result"] = {"return": reward, "length": self.turn, "success": reward == 1}
        return self.observation, reward, terminated, truncated, info

    def goals(self, solved):
        return {"questions": sum(solved.values()) / len(solved)} | (
            {"scenarios": sum(whole) / len(whole)}
            if (whole := whole_scenarios(self.scenarios, solved))
            else {}
        )

    def demonstrations(self, n, seed, skill=0.5):
        """Three in ten answer without looking, and half of all with any number."""
        rng, made = random.Random(seed), []
        for _ in range(n):
            observation, info = self.reset(options={"index": rng.randrange(self.num_tasks)})
            d = {"observations": [observation], "actions": [], "rewards": [], "answer": info["answer"]}
            value = self.value if rng.random() < skill else rng.randrange(10, 50)
            for action in ["look"] * (rng.random() < 0.7) + [f"answer {value}"]:
                observation, reward, terminated, _, _ = self.step(action)
                d["observations"].append(observation)
                d["actions"].append(action)
                d["rewards"].append(reward)
            made.append(d | {"terminated": terminated})
        return made


def prompt_ids(tokenizer, observation: str) -> list[int]:
    """Token ids of what a rollout begins with."""
    pieces = models.chat_pieces(tokenizer)
    return tokenizer(pieces.head + observation + pieces.to_reply, add_special_tokens=False)["input_ids"]


def reply_ids(tokenizer, reply: str) -> list[int]:
    """Token ids of what a world says behind the end of a turn."""
    pieces = models.chat_pieces(tokenizer)
    return tokenizer(pieces.to_prompt + reply + pieces.to_reply, add_special_tokens=False)["input_ids"]


@pytest.fixture(autouse=True, scope="module")
def toy():
    envs.ENVS["lookup"] = envs.Entry(f"{__name__}:Lookup", "a toy of the tests")
    yield
    del envs.ENVS["lookup"]


@pytest.fixture(autouse=True)
def one_thread():
    """Bits repeat on one thread only; and `main` takes over Ctrl-C, which pytest wants back."""
    torch.set_num_threads(1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def small(**changes) -> loop_ppo.Args:
    """Arguments that make a run small."""
    usual = {
        "env": "lookup",
        "tasks": 3,
        "rollouts": 4,
        "iterations": 2,
        "max_action_tokens": 6,
        "eval_episodes": 6,
    }
    return loop_ppo.Args(**usual | {"worlds": 12, "threads": 1, "world_threads": 2} | changes)


def make_tokenizer(texts: list[str]):
    """Words and marks that occur, each a token; the last resort is a token a byte."""
    tokenizer = Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(Regex(r" ?\w+|\W"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    special = ["<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    options = {"special_tokens": special, "vocab_size": 500, "show_progress": False}
    tokenizer.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**options))
    end = special[0]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def taught_model(dialogues: list[dict], width: int, epochs: int, folder: Path) -> Path:
    """A tiny Llama that has learned the actions of dialogues, saved as a Hugging Face folder."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer([d["observations"][-1] for d in dialogues])
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, max_position_embeddings=2048,
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=max(1, width // 32), tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shown = []
    for d in dialogues:
        t = loop_ppo.Trajectory(0, ids=list(prompt_ids(tokenizer, d["observations"][0])))
        replies = envs.replies(d["observations"], d["actions"])
        for action, reply in zip(d["actions"], replies, strict=True):
            turn = [*models.encode(tokenizer, action), tokenizer.eos_token_id]
            t.turns.append(range(len(t.ids), len(t.ids) + len(turn)))
            t.logps += [0.0] * len(turn)
            t.ids += turn + reply_ids(tokenizer, reply)
        shown.append(t)
    batches = [shown[i : i + 16] for i in range(0, len(shown), 16)] * epochs
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 50, 1.02 - step / len(batches))
        (pairs,) = loop_ppo.score(model, batch, small())
        optimizer.zero_grad()
        (-torch.cat([logp_M for _, logp_M in pairs]).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a model that has seen some dialogues: it acts in different ways and ends its turns."""
    return str(taught_model(Lookup().demonstrations(300, 0), 32, 6, tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def warm(base):
    return loop_ppo.make_model(small(), base)


@pytest.fixture(scope="module")
def skilled(tmp_path_factory):
    """The folder of a model that solves some tasks, so that LOOP has something to learn from."""
    dialogues = Lookup().demonstrations(1500, 0, skill=0.9)
    return str(taught_model(dialogues, 64, 6, tmp_path_factory.mktemp("skilled")))


def play(model, args, tasks=(0, 0, 0, 1, 1, 1), seed=0, worlds=None, **options):
    worlds = worlds or [Lookup() for _ in tasks]
    draws = [1000 * seed + i for i in range(len(tasks))]
    return loop_ppo.rollout(model, worlds, list(tasks), [0] * len(tasks), draws, args, **options)


@torch.no_grad()
def plain_logps(model, t: loop_ppo.Trajectory) -> list[float]:
    """Log-probs of the sampled tokens of one rollout by a plain forward pass of the whole model, unpadded."""
    logp_TV = model(torch.tensor([t.ids])).logits[0].double().log_softmax(-1)
    return [logp_TV[c - 1, t.ids[c]].item() for turn in t.turns for c in turn]


def ended(task: int, total: float) -> loop_ppo.Trajectory:
    return loop_ppo.Trajectory(task, ids=[1, 2], turns=[range(1, 2)], logps=[0.0], total=total, fate="ended")


def logps_of(model, trajectories, args) -> list[torch.Tensor]:
    """What `score` says of each trajectory, in their order."""
    found = dict(pair for pairs in loop_ppo.score(model, trajectories, args) for pair in pairs)
    return [found[t] for t in trajectories]


# ------------------------------------------------------------------------------------- the equations


def test_e1_is_each_return_minus_the_mean_of_the_others():
    """E1, written out; and it sums to zero."""
    returns = [0.3, 1.0, 0.0, 0.7, 1.0]
    naive = [r - sum(returns[:k] + returns[k + 1 :]) / 4 for k, r in enumerate(returns)]
    found = loop_ppo.leave_one_out(torch.tensor(returns, dtype=torch.float64))
    assert found.tolist() == pytest.approx(naive, abs=1e-12) and found.sum().item() == pytest.approx(
        0, abs=1e-12
    )
    assert loop_ppo.leave_one_out(torch.ones(6)).tolist() == [0.0] * 6


@pytest.mark.parametrize("lower_bound", ["minus", "over"])
def test_e2_and_its_gradient_are_those_of_a_loop(lower_bound):
    """E2: where the ratio is clipped there is no gradient, elsewhere it is the advantage."""
    rng, clip = random.Random(0), 0.2
    w = [rng.uniform(0.5, 1.6) for _ in range(200)]
    advantages = [rng.uniform(-1, 1) for _ in w]
    lowest = 1 - clip if lower_bound == "minus" else 1 / (1 + clip)
    w_M = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    gain_M = loop_ppo.surrogate(w_M, torch.tensor(advantages, dtype=torch.float64), clip, lower_bound)
    gain_M.sum().backward()
    clipped = 0
    for ratio, a, gain, gradient in zip(w, advantages, gain_M.tolist(), w_M.grad.tolist(), strict=True):
        g = a + clip * abs(a) if a > 0 or lower_bound == "minus" else a / (1 + clip)
        assert gain == pytest.approx(min(ratio * a, g), abs=1e-12)
        is_clipped = ratio > 1 + clip if a > 0 else ratio < lowest
        assert gradient == pytest.approx(0.0 if is_clipped else a, abs=1e-12)
        clipped += is_clipped
    assert 20 < clipped < 180


def test_e3_e4_e5_are_products_over_tokens_turns_and_rollouts():
    """E3, E4 and E5, written out."""
    rng, turn_M = random.Random(1), [0, 0, 0, 1, 1, 2]
    new, old = ([rng.uniform(-3, 0) for _ in range(6)] for _ in range(2))
    new_M, old_M = (torch.tensor(x, dtype=torch.float64) for x in (new, old))
    owners = {"token": range(6), "turn": turn_M, "trajectory": [0] * 6}
    for level, owner in owners.items():
        naive = [
            math.prod(math.exp(new[j] - old[j]) for j in range(6) if owner[j] == owner[i]) for i in range(6)
        ]
        log_w_M = loop_ppo.log_ratios(new_M, old_M, [3, 2, 1], level)
        assert log_w_M.exp().tolist() == pytest.approx(naive, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "turn", "trajectory"])
def test_a_ratio_that_overflows_has_no_gradient_that_is_no_number(level):
    """exp(119) is inf in float32. Inside the clip the gradient is that of the logarithm."""
    for old, gradient in ((-120.0, 0.0), (-1.0, -1.0)):
        logp_M = torch.tensor([-1.0], requires_grad=True)
        t = loop_ppo.Trajectory(0, logps=[old], turns=[range(1)], advantage=1.0)
        t.old_logp_M = torch.tensor([old])
        loss, _ = loop_ppo.rollout_loss(t, logp_M, small(level=level))
        loss.backward()
        assert logp_M.grad.tolist() == [gradient]


def test_e3_e4_e5_are_the_same_where_a_rollout_is_one_token():
    new, old = torch.randn(1), torch.randn(1)
    token, turn, trajectory = (loop_ppo.log_ratios(new, old, [1], x) for x in ("token", "turn", "trajectory"))
    assert torch.equal(token, turn) and torch.equal(token, trajectory)


def test_e6_has_mean_zero_and_deviation_one():
    """E6, written out."""
    returns = torch.tensor([0.0, 1.0, 1.0, 0.5], dtype=torch.float64)
    mean, n = returns.mean().item(), 4
    deviation = math.sqrt(sum((r - mean) ** 2 for r in returns.tolist()) / (n - 1))
    naive = [(r - mean) / deviation for r in returns.tolist()]
    assert loop_ppo.normalised(returns).tolist() == pytest.approx(naive, rel=1e-5)
    assert loop_ppo.normalised(torch.ones(4)).tolist() == [0.0] * 4


@pytest.mark.parametrize("total", [3 / 5, 5 / 7, 6 / 7])
def test_a_group_that_earned_the_same_has_no_advantage(total):
    """In float32 the mean of six times 0.6 is not 0.6, and E6 would divide that by next to nothing."""
    group = [ended(0, total) for _ in range(6)]
    for normalise in (False, True):
        assert loop_ppo.set_advantages(group, 6, normalise) == group
        assert max(abs(t.advantage) for t in group) < 1e-6


def test_e7_is_the_kl_divergence_on_average():
    """E7: its mean over the policy's own tokens is the divergence."""
    p, q = (torch.randn(6, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    penalty_V = loop_ppo.kl_penalty(p, q)
    assert (penalty_V >= 0).all()
    naive = sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert (p.exp() * penalty_V).sum().item() == pytest.approx(naive, rel=1e-9)


# ------------------------------------------------------------------------------------- the rollouts


def test_the_sampler_and_the_scorer_are_one_distribution(warm):
    args = small(max_action_tokens=8)
    played = play(warm, args, tasks=[i // 3 for i in range(24)])
    assert len({len(t.turns) for t in played}) > 1, "turns should differ, or this shows little"
    for t, logp_M in zip(played, logps_of(warm, played, args), strict=True):
        assert t.logps == pytest.approx(plain_logps(warm, t), abs=2e-4)
        assert logp_M.tolist() == pytest.approx(plain_logps(warm, t), abs=2e-4)


def test_tokens_are_kept_as_they_were_sampled_and_only_they_are_trained(warm):
    tokenizer, end = warm.tokenizer, warm.tokenizer.eos_token_id
    cut = 0
    for t in play(warm, small(max_action_tokens=3), tasks=[i // 3 for i in range(12)]):
        prompt = Lookup().reset(options={"index": t.task})[0]
        place = len(prompt_ids(tokenizer, prompt))
        assert t.ids[:place] == prompt_ids(tokenizer, prompt)
        assert t.text == prompt + "".join(action + reply for action, reply in said(t))
        for (first, last), (action, reply) in zip([(x.start, x.stop) for x in t.turns], said(t), strict=True):
            assert (
                first == place
                and tokenizer.decode(t.ids[first:last], skip_special_tokens=True).strip() == action
            )
            assert end not in t.ids[first : last - 1]
            forced = t.ids[last - 1] != end  # then the end of turn stands behind what counts
            assert not forced or (last - first == 3 and t.ids[last] == end)
            cut += forced
            place = last + forced + len(reply_ids(tokenizer, reply))
            assert t.ids[last + forced : place] == reply_ids(tokenizer, reply)
        assert place == len(t.ids) and len(t.logps) == sum(map(len, t.turns))
    assert cut


def test_prompts_and_replies_get_no_gradient(warm):
    """The loss does not change when the model's predictions of the world's tokens do, nor with padding."""
    played = play(warm, small())
    hidden = {}

    def keep(_, __, output):
        output.last_hidden_state.retain_grad()
        hidden["BTH"] = output.last_hidden_state

    handle = warm.base_model.register_forward_hook(keep)
    torch.cat(logps_of(warm, played, small())).sum().backward()
    handle.remove()
    warm.zero_grad()
    has_gradient = hidden["BTH"].grad.abs().sum(-1) > 0
    for row, t in zip(has_gradient, sorted(played, key=lambda t: len(t.ids)), strict=True):
        predicts = {c - 1 for turn in t.turns for c in turn}
        assert set(row.nonzero()[:, 0].tolist()) == predicts


def test_how_rows_share_a_batch_changes_nothing(warm):
    """Greedy rollouts are the same alone and among others, whose turns and ends fall elsewhere."""
    tasks = list(range(10))
    together = play(warm, small(), tasks=tasks, greedy=True)
    for task, t in zip(tasks, together, strict=True):
        (alone,) = play(warm, small(), tasks=[task], greedy=True)
        assert alone.ids == t.ids and alone.total == t.total
        assert alone.logps == pytest.approx(t.logps, abs=2e-4)


def without_world(t: loop_ppo.Trajectory) -> dict:
    """All that a rollout has, but for the very world it was played in."""
    return vars(t) | {"world": None, "u_T": t.u_T.tolist()}


def test_a_rollout_is_that_of_its_seed_whoever_is_beside_it(warm):
    """To the token: alone, in a batch, and in another order; waiting for a world costs it no number."""
    tasks, draws, args = [0, 0, 1, 2, 2], [11, 12, 11, 13, 14], small()
    whole = list(zip(tasks, draws, strict=True))

    def ids_of(pairs):
        tasks, draws = zip(*pairs, strict=True)
        worlds = [Lookup() for _ in pairs]
        played = loop_ppo.rollout(warm, worlds, tasks, [0] * len(tasks), draws, args)
        return [t.ids for t in played]

    together = ids_of(whole)
    assert together == ids_of(whole[::-1])[::-1] == [ids_of([pair])[0] for pair in whole]
    assert len({tuple(ids) for ids in together}) == 5


def test_threads_do_not_change_a_rollout(warm):
    first, second = (play(warm, small(world_threads=n), tasks=[0, 0, 1, 1, 2, 2]) for n in (1, 4))
    for one, other in zip(first, second, strict=True):
        assert without_world(one) == without_world(other)


def test_a_rollout_ends_where_the_context_does(warm):
    prompt = len(prompt_ids(warm.tokenizer, Lookup().reset()[0]))
    played = play(warm, small(context=prompt + 20))
    cut = [t for t in played if not t.terminated]
    assert cut and all(t.turns and not t.success and len(t.ids) > prompt + 14 for t in cut)
    assert max(t.turns[-1].stop for t in played) <= prompt + 20
    assert all(t.fate == "ended" and not t.turns for t in play(warm, small(context=prompt + 2)))


class Broken(Lookup):
    """Task 1 breaks at once, task 2 in its first turn."""

    def reset(self, seed=None, options=None):
        if options["index"] == 1:
            raise envs.WorldBroken("no server")
        return super().reset(seed, options)

    def step(self, action):
        if self.index == 2:
            raise envs.WorldBroken("time-out")
        return super().step(action)


def test_a_world_that_breaks_leaves_its_group(warm):
    tasks = [0, 0, 0, 1, 1, 2, 2]
    played = play(warm, small(), tasks=tasks, worlds=[Broken() for _ in tasks])
    assert [t.fate for t in played] == ["ended"] * 3 + ["broken"] * 4
    judged = loop_ppo.set_advantages([*played[:3], *played[5:], *played[3:5]], 3, False)
    assert [t.task for t in judged] == [0, 0, 0]
    assert all(t.advantage is None for t in played[3:])


def test_a_world_that_breaks_while_it_is_played_out_leaves_its_group(warm):
    """The context has no room for a second turn, and the world breaks at the first empty action."""

    class Breaking(Lookup):
        def step(self, action):
            if not action:
                raise envs.WorldBroken("no answer")
            return super().step(action)

    room = len(prompt_ids(warm.tokenizer, Lookup().reset(options={"index": 0})[0])) + 4
    args = small(context=room, max_action_tokens=4)
    whole = play(warm, args, tasks=[0] * 6)
    assert any(t.cut for t in whole)
    played = play(warm, args, tasks=[0] * 6, worlds=[Breaking() for _ in range(6)])
    assert [t.fate for t in played] == ["broken" if t.cut else "ended" for t in whole]


def test_stragglers_are_dropped_when_enough_have_ended(warm):
    args, tasks = small(finish_all=0.1, finish_each=0), [i // 4 for i in range(24)]
    played = play(warm, args, tasks=tasks, may_drop=True)
    dropped = [t for t in played if t.fate == "dropped"]
    assert dropped and len(dropped) < 24
    assert not set(dropped) & set(loop_ppo.set_advantages(played, args.rollouts, False))
    assert all(t.fate == "ended" for t in play(warm, args, tasks=tasks))


def test_enough_is_so_many_of_all_and_of_each_task_and_nobody_waits_for_the_broken():
    args = small(finish_all=0.5, finish_each=4)
    of_each = {0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15}

    def has_enough(over, args, broken=()):
        fates = ["broken" if i in broken else "ended" if i in over else "playing" for i in range(18)]
        played = [loop_ppo.Trajectory(i // 6, fate=fate) for i, fate in enumerate(fates)]
        return loop_ppo.has_enough(played, args.finish_all, args.finish_each)

    assert has_enough(of_each, args)
    assert not has_enough(of_each - {12}, args), "three of six"
    assert not has_enough(of_each, small(finish_all=0.9, finish_each=4))
    broken = {12, 13, 14, 15}
    assert not has_enough(of_each, args, broken), "the two that are whole play on"
    assert has_enough(of_each | {16, 17}, args, broken)


def test_two_groups_of_one_task_must_each_have_enough():
    """They have seeds of their own, and baselines of their own."""
    fates = ["ended"] * 6 + ["playing"] * 6
    played = [loop_ppo.Trajectory(0, seed=i // 6, fate=fate) for i, fate in enumerate(fates)]
    assert not loop_ppo.has_enough(played, 0.5, 4)
    for t in played[6:10]:
        t.fate = "ended"
    assert loop_ppo.has_enough(played, 0.5, 4)


def test_worlds_are_made_for_whole_groups_and_the_one_that_is_only_asked_is_closed(monkeypatch):
    made, closed = [], []

    class Counted(Lookup):
        def __init__(self):
            super().__init__()
            made.append(self)

        def close(self):
            closed.append(self)

    monkeypatch.setattr(envs, "make", lambda id, **options: Counted())
    for worlds, number in ((10, 8), (8, 8), (3, 3)):
        made.clear()
        closed.clear()
        assert loop_ppo.make_worlds(small(worlds=worlds, rollouts=4), "train") == made[1:]
        assert len(made) - 1 == number and closed == made[:1]


def test_padding_may_be_beyond_the_last_position_of_a_model(base):
    """A long row beside one with a long reply: GPT-2's table of positions has no more than its context."""
    config = transformers.GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.context = 64
    ids = torch.randint(50, (67,)).tolist()
    long, short = loop_ppo.Trajectory(0, ids=ids[:45]), loop_ppo.Trajectory(1, ids=ids[45:48])
    with torch.no_grad():
        memory = loop_ppo.Memory(model, [long, short])
        long.ids = ids[:47]
        short.ids = ids[45:67]
        memory.read([long, short])
        for b, t in enumerate((long, short)):
            plain_1TH = model.transformer(torch.tensor([t.ids])).last_hidden_state
            assert torch.allclose(memory.hidden_BH[b], plain_1TH[0, -1], atol=1e-5)


def test_broken_worlds_are_not_among_those_that_are_waited_for(warm):
    """Half of the worlds never start: the others are played to the last one, none of them is dropped."""
    tasks = [0] * 4 + [1] * 4
    played = play(
        warm, small(finish_all=1.0, finish_each=4), tasks, worlds=[Broken() for _ in tasks], may_drop=True
    )
    assert [t.fate for t in played] == ["ended"] * 4 + ["broken"] * 4
    played = play(
        warm, small(finish_all=0.5, finish_each=1), tasks, worlds=[Broken() for _ in tasks], may_drop=True
    )
    assert sum(t.fate == "ended" for t in played) >= 2, "half of the four that are whole, not of eight"


def test_what_did_not_end_has_no_return():
    one = replace(ended(0, 1.0), terminated=True, success=True)
    figures = loop_ppo.behaviour([one, loop_ppo.Trajectory(0, fate="broken")], Lookup())
    assert figures["rollout/return"] == figures["rollout/success"] == 1.0 and figures["rollout/broken"] == 0.5
    none = loop_ppo.behaviour([loop_ppo.Trajectory(0, fate="broken")], Lookup())
    assert math.isnan(none["rollout/return"]) and math.isnan(none["rollout/entropy"]), "0 would be a figure"


def test_worlds_that_do_not_start_are_an_error_if_none_does(warm, monkeypatch):
    def reset(self, seed=None, options=None):
        if options["index"] == 0:
            raise envs.Unavailable("the server is gone")
        return real(self, seed=seed, options=options)

    real = Lookup.reset
    monkeypatch.setattr(Lookup, "reset", reset)
    fates = [t.fate for t in play(warm, small())]
    assert fates[:3] == ["broken"] * 3 and set(fates[3:]) == {"ended"}
    # Nor if those of one task do not, which is played by itself, with as many worlds as it has rollouts.
    fates = [t.fate for t in play(warm, small(), tasks=(0, 0, 1, 1), worlds=[Lookup(), Lookup()])]
    assert fates[:2] == ["broken"] * 2 and set(fates[2:]) == {"ended"}
    with pytest.raises(envs.WorldBroken, match="no world of lookup starts: the server is gone"):
        play(warm, small(), tasks=(0, 0))


def test_a_world_without_easy_tasks_is_refused(tmp_path, monkeypatch):
    @functools.wraps(Lookup.__init__)
    def start(self, **options):
        real(self, **options)
        self.difficulties = [4] * self.num_tasks

    real = Lookup.__init__
    monkeypatch.setattr(Lookup, "__init__", start)
    with pytest.raises(ValueError, match="--max-difficulty 3: all tasks of lookup are above it"):
        loop_ppo.main(small(runs=str(tmp_path)))
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_row_with_nothing_new_keeps_what_was_read(warm):
    """Also where a reply is one token: then all rows are run."""
    batch = [loop_ppo.Trajectory(0, ids=[5, 6]), loop_ppo.Trajectory(0, ids=[7, 8, 9])]
    memory = loop_ppo.Memory(warm, batch)
    before = memory.hidden_BH.clone()
    batch[0].ids.append(4)
    memory.read(batch)
    assert torch.equal(memory.hidden_BH[1], before[1]) and not torch.equal(memory.hidden_BH[0], before[0])
    assert memory.length_B.tolist() == [3, 3]


def test_a_cache_goes_with_its_memory(warm):
    gc.disable()
    try:
        cache = weakref.ref(loop_ppo.Memory(warm, [loop_ppo.Trajectory(0, ids=[5, 6])]))
        assert cache() is None
    finally:
        gc.enable()


def test_what_would_play_or_learn_nonsense_is_a_sentence(warm):
    with pytest.raises(ValueError, match="--micro-batch 0: "):
        logps_of(warm, [ended(0, 1.0)], small(micro_batch=0))


def test_scenarios_that_an_evaluation_cuts_do_not_count(warm, monkeypatch):
    monkeypatch.setattr(Lookup, "scenarios", [i // 3 for i in range(Lookup().num_tasks)], raising=False)
    whole = loop_ppo.evaluate(warm, small(eval_episodes=6), "dev", "{}")
    cut = loop_ppo.evaluate(warm, small(eval_episodes=5), "dev", "{}")
    played = loop_ppo.evaluate(warm, small(eval_episodes=2), "dev", "{}")
    assert "scenarios" in whole and cut["scenarios"] in (0.0, 1.0) and "scenarios" not in played


def test_a_group_of_one_teaches_nothing():
    alone = ended(0, 1.0)
    assert loop_ppo.set_advantages([alone], 4, False) == [] and alone.advantage is None


def test_one_rollout_of_a_task_is_refused_before_anything_is_played(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_ppo, "evaluate", None)
    with pytest.raises(ValueError, match="--rollouts 1: "):
        loop_ppo.main(small(rollouts=1, runs=str(tmp_path)))
    assert not list(tmp_path.iterdir()), "nothing is left behind"


# ------------------------------------------------------------------------------------- the updates


def said(t) -> list[tuple[str, str]]:
    """Action and reply of each turn."""
    return [(turn["action"], turn["reply"]) for turn in t.turn_records]


def weights_after(model, judged, args):
    for t in judged:  # an earlier call may have left some
        t.old_logp_M = None
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    metrics = loop_ppo.update(model, optimizer, judged, args, np.random.default_rng(0))
    return torch.cat([p.detach().flatten() for p in model.parameters()]), metrics


@pytest.mark.parametrize(
    ("dtype", "one", "all_", "is_said"),
    [
        ("float32", 0.005, 0.0, None),
        ("float32", 0.02, 0.0, r"0\.02"),
        ("bfloat16", 0.3, 0.0, None),  # rounding of a single token
        ("bfloat16", 0.0, 0.08, None),
        ("bfloat16", 0.0, 0.13, r"0\.13"),
    ],
)
def test_a_sampler_that_is_not_the_scorer_ends_the_run(warm, dtype, one, all_, is_said):
    """Before a step is taken: the ratios, and all that is learned, would be wrong."""
    (t,) = judged(play(warm, small(), tasks=[0]), [1.0])
    t.old_logp_M = torch.tensor(t.logps)
    t.logps = [logp - all_ for logp in t.logps]
    t.logps[0] -= one
    if is_said:
        with pytest.raises(ArithmeticError, match=f"sampled and of scored tokens are {is_said} nats apart"):
            loop_ppo.rollout_loss(t, t.old_logp_M, small(dtype=dtype))
    else:
        loop_ppo.rollout_loss(t, t.old_logp_M, small(dtype=dtype))


def judged(played, values) -> list:
    """The rollouts, with these advantages."""
    for t, t.advantage in zip(played, values, strict=True):
        pass
    return played


def test_on_policy_with_one_epoch_loop_is_rloo_to_the_bit(warm):
    """One step on -A log pi, written out here, and LOOP's: the ratio is 1, its gradient the logarithm's."""
    args = small(epochs=1, minibatch=0, micro_batch=100, min_advantage=0.0)
    played = loop_ppo.set_advantages(play(warm, small(), tasks=[i // 4 for i in range(12)]), 4, False)
    found, metrics = weights_after(warm, played, args)
    assert metrics["update/ratio"] == 1.0 and metrics["update/clipped"] == 0.0
    assert metrics["update/spread"] == 0.0

    model = copy.deepcopy(warm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    rng = np.random.default_rng(0)
    shuffled = [played[i] for i in rng.permutation(len(played))]
    loss = torch.zeros(())
    (pairs,) = loop_ppo.score(model, shuffled, args)
    for t, logp_M in pairs:
        loss = loss - (logp_M * torch.tensor(t.advantage)).mean() / len(played)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert torch.equal(found, torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.parametrize("level", ["token", "turn", "trajectory"])
def test_the_spread_is_that_of_the_ratios_of_the_level(warm, monkeypatch, level):
    """Root of the mean square of log w; a rollout's mean is over its tokens, so long turns weigh more."""
    played = judged(play(warm, small(), tasks=[0] * 4), [0.5, -0.5, 0.3, -0.3])
    args = small(epochs=1, minibatch=0, level=level)

    def step(model, optimizer, minibatch, size, args):  # each token is 0.01 likelier than it was
        for t in minibatch:
            t.old_logp_M = torch.tensor(t.logps)
        return [loop_ppo.rollout_loss(t, t.old_logp_M + 0.01, args)[1] for t in minibatch], 1.0

    monkeypatch.setattr(loop_ppo, "step", step)
    metrics = loop_ppo.update(warm, None, played, args, np.random.default_rng(0))
    squares = []
    for t in played:
        lengths = [len(turn) for turn in t.turns]
        tokens = {"token": [1] * sum(lengths), "turn": lengths, "trajectory": [sum(lengths)]}[level]
        squares.append(sum(n * (0.01 * n) ** 2 for n in tokens) / sum(tokens))
    assert metrics["update/spread"] == pytest.approx(np.mean(squares) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("level", ["token", "turn", "trajectory"])
def test_a_batch_of_eight_is_eight_of_one(warm, level):
    played = play(warm, small(), tasks=[0] * 4 + [1] * 4)
    judged(played, [0.5, -0.5, 0.3, -0.3, 1.0, -1.0, 0.2, -0.2])
    args = small(minibatch=8, epochs=2, level=level)
    whole, _ = weights_after(warm, played, replace(args, micro_batch=8))
    parts, _ = weights_after(warm, played, replace(args, micro_batch=1))
    start = torch.cat([p.detach().flatten() for p in warm.parameters()])
    assert (whole - start).abs().max() > 1e-4
    assert torch.allclose(whole, parts, atol=2e-5)


def test_small_advantages_are_left_out_before_minibatches_are_formed(warm, monkeypatch):
    played = play(warm, small(), tasks=[i // 4 for i in range(12)])
    start = torch.cat([p.detach().flatten() for p in warm.parameters()])
    same, metrics = weights_after(warm, judged(played, [0.009] * 12), small(minibatch=2))
    assert torch.equal(same, start) and metrics == {"update/filtered": 1.0}

    learned, score = [], loop_ppo.score

    def watched(model, trajectories, args):
        if torch.is_grad_enabled():
            learned.append(list(trajectories))
        return score(model, trajectories, args)

    monkeypatch.setattr(loop_ppo, "score", watched)
    judged(played, [1.0, 0.0, -1.0, 0.005] * 3)
    moved, metrics = weights_after(warm, played, small(minibatch=4, epochs=2))
    assert not torch.equal(moved, start) and metrics["update/filtered"] == 0.5
    assert [len(part) for part in learned] == [4, 2, 4, 2], "full ones first, of those that teach"
    norms = [weights_after(warm, played, small(minibatch=n, epochs=1))[1]["update/grad_norm"] for n in (0, 6)]
    assert norms[0] == norms[1], "all that teach are a full one"
    del learned[4:]
    for epoch in (learned[:2], learned[2:]):
        assert {t for part in epoch for t in part} == {t for t in played if abs(t.advantage) == 1}


@pytest.mark.parametrize("options", [{"minibatch": 0}, {}])
def test_an_iteration_without_a_group_is_no_error(warm, options):
    _, metrics = weights_after(warm, [], small(**options))
    assert metrics == {"update/filtered": 1.0}


def test_a_scorer_that_is_not_the_sampler_is_seen(warm):
    """Whether a rollout's old log-probs are of the first step or of the pass before it."""
    played, model = play(warm, small()), copy.deepcopy(warm)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 1.02
    for minibatch in (0, 2):
        _, metrics = weights_after(warm, judged(played, [1.0] * 6), small(minibatch=minibatch))
        assert metrics["update/sampler_gap"] < 1e-3
        with pytest.raises(ArithmeticError, match="nats apart"):
            weights_after(model, judged(played, [1.0] * 6), small(minibatch=minibatch))
        coarse = small(minibatch=minibatch, dtype="bfloat16")  # in which the mean counts
        _, metrics = weights_after(model, judged(played, [1.0] * 6), coarse)
        assert 1e-3 < metrics["update/sampler_gap"] < 0.1


def test_the_old_log_probs_are_of_before_the_first_step(warm, monkeypatch):
    """Each rollout is read once before it is learned from, those of the first step in that step."""
    played, read, score = play(warm, small(temperature=0.9)), [], loop_ppo.score

    def watched(model, trajectories, args):
        read.append((torch.is_grad_enabled(), list(trajectories)))
        return score(model, trajectories, args)

    monkeypatch.setattr(loop_ppo, "score", watched)
    args = small(minibatch=2, epochs=1, temperature=0.9)
    _, metrics = weights_after(warm, judged(played, [1.0] * 6), args)
    before = {t for with_gradient, part in read if not with_gradient for t in part}
    learned = [t for with_gradient, part in read if with_gradient for t in part]
    assert len(before) == 4 and set(learned) == set(played) and not before & set(learned[:2])
    assert [with_gradient for with_gradient, _ in read] == [False, True, True, True]
    assert 0 < metrics["update/sampler_gap"] < 1e-3


@pytest.mark.parametrize("chunk", [1, 7])
def test_logits_in_chunks_are_the_same(warm, chunk):
    played = play(warm, small())
    whole, parts = (torch.cat(logps_of(warm, played, args)) for args in (small(), small(logit_chunk=chunk)))
    assert torch.allclose(parts, whole, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(base, warm, monkeypatch):
    played = play(warm, small())
    judged(played, [0.5, -0.5, 0.3, -0.3, 1.0, -1.0])
    plain, _ = weights_after(warm, played, small())
    args = small(gradient_checkpointing=True, logit_chunk=16)
    model = loop_ppo.make_model(args, base)
    remade, logits, forward = [], [], torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        "transformers.modeling_utils.checkpoint", lambda *a, **k: remade.append(1) or forward(*a, **k)
    )
    monkeypatch.setattr(loop_ppo, "checkpoint", lambda *a, **k: logits.append(1) or forward(*a, **k))
    model.activation_checkpointing_enable()
    assert [t.ids for t in play(model, args)] == [t.ids for t in played] and not remade, (
        "rollouts keep their cache"
    )
    saved, _ = weights_after(model, played, args)
    assert torch.allclose(plain, saved, atol=1e-5)
    assert remade and logits
    assert [t.ids for t in play(model, args)] == [t.ids for t in played], "also behind an update"


# ------------------------------------------------------------------- an update and a rollout, written out


def odd_returns(model, args):
    """Rollouts of three tasks, their advantages: some large, one negative, one too small to count."""
    played = play(model, args, tasks=[i // 4 for i in range(12)])
    return judged(played, [1.0, -1.0, 0.4, -0.4, 0.005, 2.0, -0.7, -1.3, 0.6, 0.3, -0.2, -0.7])


def written_out(model, ref_model, played, args):
    """The weights after an update, one rollout at a time, a token after the other, as the equations say."""
    model, rng = copy.deepcopy(model), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)

    def logps(model, t):
        logp_TV = (model(torch.tensor([t.ids])).logits[0] / args.temperature).log_softmax(-1)
        return [[logp_TV[c - 1, t.ids[c]] for c in turn] for turn in t.turns]

    advantages = torch.tensor([t.advantage for t in played])
    with torch.no_grad():
        old, start = ([logps(m, t) for t in played] for m in (model, ref_model))
    taught = [i for i in range(len(played)) if abs(advantages[i]) >= 0.01]
    size = args.minibatch or len(taught)
    for _ in range(args.epochs):
        order = [taught[i] for i in rng.permutation(len(taught))]
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            loss = torch.zeros(())
            for i in chosen:
                new, terms = logps(model, played[i]), []
                all_turns = sum(
                    n - o
                    for row, before in zip(new, old[i], strict=True)
                    for n, o in zip(row, before, strict=True)
                )
                for row, before, at_start in zip(new, old[i], start[i], strict=True):
                    turn = sum(n - o for n, o in zip(row, before, strict=True))
                    for n, o, s in zip(row, before, at_start, strict=True):
                        log_w = {"token": n - o, "turn": turn, "trajectory": all_turns}[args.level]
                        A, w = advantages[i].item(), log_w.exp()
                        lowest = 1 - args.clip if args.lower_bound == "minus" else 1 / (1 + args.clip)
                        gain = torch.minimum(w * A, torch.tensor((1 + args.clip if A > 0 else lowest) * A))
                        penalty = (s - n).exp() - (s - n) - 1
                        terms.append(args.kl * penalty - gain)
                loss = loss + sum(terms) / len(terms) / size
            optimizer.zero_grad()
            loss.backward()
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad *= min(1.0, args.max_grad_norm / norm)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "changes",
    [
        {"level": "token"},
        {"level": "turn"},
        {"level": "trajectory"},
        {"lower_bound": "over", "clip": 0.4},
        {"max_grad_norm": 0.01},
        {"minibatch": 0, "epochs": 1},
        {"minibatch": 0, "epochs": 1, "kl": 3.0},
    ],
    ids=str,
)
def test_an_update_is_what_the_equations_say(warm, changes):
    """Every switch against the loop above: E2 to E5, E7, who is left out, the divisor, how often, clipped."""
    args = small(**{"temperature": 0.7, "minibatch": 5, "micro_batch": 2, "clip": 0.02} | changes)
    played = odd_returns(warm, args)
    ref_model, model = copy.deepcopy(warm), copy.deepcopy(warm)
    with torch.no_grad():
        ref_model.get_output_embeddings().weight[260:] *= 1.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    arguments = model, optimizer, played, args, np.random.default_rng(0)
    metrics = loop_ppo.update(*arguments, *([ref_model] if args.kl else []))
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    expected = written_out(warm, ref_model, played, args)
    before = torch.cat([p.detach().flatten() for p in warm.parameters()])
    # Adam makes steps of like size of all gradients, also near 0: the bulk must agree, not each weight.
    assert (found - expected).norm() < 0.02 * (expected - before).norm()
    assert metrics["update/grad_norm"] > 0


def test_e1_and_e6_reach_the_groups():
    played = [ended(i // 3, total) for i, total in enumerate([1, 0, 0, 1, 1, 0])]
    plain = [1.0, -0.5, -0.5, 0.5, 0.5, -1.0]
    scaled = [x / 3**0.5 for x in (2, -1, -1, 1, 1, -2)]
    for normalise, expected in ((False, plain), (True, scaled)):
        assert loop_ppo.set_advantages(played, 3, normalise) == played
        assert [t.advantage for t in played] == pytest.approx(expected, abs=1e-4)


def test_a_gradient_that_is_no_number_ends_the_run(warm, monkeypatch):
    played = odd_returns(warm, small())
    score = loop_ppo.score

    def broken(*given):
        for pairs in score(*given):
            yield [(t, logp_M * torch.nan if torch.is_grad_enabled() else logp_M) for t, logp_M in pairs]

    monkeypatch.setattr(loop_ppo, "score", broken)
    with pytest.raises(ArithmeticError, match=r"the model diverged .*lower its rate"):
        weights_after(warm, played, small())


def watch(monkeypatch, name: str) -> list[tuple[dict, object]]:
    """Each call of a function of the script: its arguments by their names, and what it returned."""
    calls, real = [], getattr(loop_ppo, name)

    def watched(*given, **named):
        bound = inspect.signature(real).bind(*given, **named)
        bound.apply_defaults()
        result = real(*given, **named)
        calls.append((bound.arguments, result))
        return result

    monkeypatch.setattr(loop_ppo, name, watched)
    return calls


def test_main_hands_on_what_the_switches_say(tmp_path, base, monkeypatch):
    """The rate falls (D3), E6 and the start model where asked for, stragglers go in training only."""
    rates, update = [], loop_ppo.update
    rollouts, advantages = watch(monkeypatch, "rollout"), watch(monkeypatch, "set_advantages")

    def watched_update(model, optimizer, judged, args, rng, ref_model):
        rates.append(optimizer.param_groups[0]["lr"])
        weights = [p.clone() for p in ref_model.parameters()]
        seen = zip(weights, loop_ppo.make_model(args, base).parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in seen), "the start model stays as it was"
        assert judged is advantages[-1][1]
        return update(model, optimizer, judged, args, rng, ref_model)

    monkeypatch.setattr(loop_ppo, "update", watched_update)
    run_of(tmp_path, model=base, iterations=4, lr=1e-3, normalise=True, kl=0.1, eval_every=100)
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert [(given["K"], given["normalise"]) for given, _ in advantages] == [(4, True)] * 4
    may_drop = [given["may_drop"] for given, _ in rollouts]
    assert may_drop.count(True) == 4 and may_drop.count(False) > 0


def test_the_rollouts_of_a_task_share_its_seed_and_its_difficulty_is_allowed(tmp_path, base, monkeypatch):
    rollouts = watch(monkeypatch, "rollout")
    run_of(tmp_path, model=base, iterations=3, max_difficulty=1, tasks=5, rollouts=4, worlds=20)
    difficulties, trained = Lookup().difficulties, []
    for given, played in rollouts:
        if given["may_drop"]:
            tasks, seeds = given["tasks"], given["world_seeds"]
            groups = [list(zip(tasks, seeds, strict=True))[i : i + 4] for i in range(0, 20, 4)]
            assert len(groups) == 5 and all(len(set(group)) == 1 for group in groups)
            assert len(set(seeds)) == 5 and [t.task for t in played] == tasks
            trained += tasks
    assert len(trained) == 60 and {difficulties[task] for task in trained} == {1}


def test_the_greedy_evaluation_is_greedy_and_the_other_is_not(tmp_path, skilled, monkeypatch):
    """Which rollout becomes which figure, and that each token of the greedy one is the likeliest."""
    rollouts = watch(monkeypatch, "rollout")
    model = loop_ppo.make_model(small(), skilled)
    figures = loop_ppo.evaluate(model, small(eval_episodes=24, worlds=24), "dev", "{}")
    assert len(rollouts) == 2
    for (_, played), suffix in zip(rollouts, ("", "_greedy"), strict=True):
        assert figures[f"return{suffix}"] == pytest.approx(sum(t.total for t in played) / 24)
        likeliest = []
        for t in played:
            with torch.no_grad():
                best_T = model(torch.tensor([t.ids])).logits[0].argmax(-1)
            likeliest += [t.ids[c] == best_T[c - 1] for turn in t.turns for c in turn]
        assert all(likeliest) == (suffix == "_greedy")
        assert all(t.fate == "ended" for t in played) and [t.task for t in played] == list(range(24))
    loop_ppo.evaluate(model, small(eval_episodes=24, worlds=24), "dev", "{}")
    again = [[t.ids for t in played] for _, played in rollouts]
    assert again[:2] == again[2:], "from the same seed every time"


def test_the_temperature_is_that_of_sampling_and_of_scoring(warm):
    """At temperature 0.5 against a plain forward pass; greedy play takes the likeliest token everywhere."""
    args = small(temperature=0.5)
    played = play(warm, args, tasks=[i // 3 for i in range(12)])
    for t, logp_M in zip(played, logps_of(warm, played, args), strict=True):
        with torch.no_grad():
            logp_TV = (warm(torch.tensor([t.ids])).logits[0].double() / 0.5).log_softmax(-1)
        expected = [logp_TV[c - 1, t.ids[c]].item() for turn in t.turns for c in turn]
        assert t.logps == pytest.approx(expected, abs=5e-4) and logp_M.tolist() == pytest.approx(
            expected, abs=5e-4
        )
    logits = {"hot": 3.0, "cold": 0.2}
    spread = {
        name: len({tuple(t.ids) for t in play(warm, small(temperature=heat), tasks=[0] * 24)})
        for name, heat in logits.items()
    }
    assert spread["hot"] > spread["cold"], "and it is felt"
    for t in play(warm, small(), tasks=[0, 1, 2], greedy=True):
        with torch.no_grad():
            best_T = warm(torch.tensor([t.ids])).logits[0].argmax(-1)
        assert all(t.ids[c] == best_T[c - 1] for turn in t.turns for c in turn)


def test_a_prompt_is_read_once_and_nothing_is_read_again(warm):
    """Rows, and tokens in a row, of all forward passes: K rollouts share a prompt, turns add themselves."""
    shapes = []
    hook = warm.base_model.register_forward_pre_hook(
        lambda _, args, options: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    played = play(warm, small(), tasks=[i // 6 for i in range(24)])
    hook.remove()
    prompt = max(t.turns[0].start for t in played)
    reply = max(len(reply_ids(warm.tokenizer, text)) for t in played for _, text in said(t))
    different = {Lookup().reset(options={"index": task})[0] for task in range(4)}
    assert shapes[0] == (len(different), prompt)
    assert max(tokens for _, tokens in shapes[1:]) <= reply + 2, (
        "a reply, the end of a cut turn, its last token"
    )
    assert shapes[1][0] == 24 and shapes[-1][0] < 24, "those that have ended leave"


def test_a_worlds_options_reach_it():
    args = small(env="apps", world="max_turns=3, max_output=99", worlds=2)
    for split in ("dev", "train"):
        worlds = loop_ppo.make_worlds(args, split)
        assert len(worlds) == 2 and {world.split for world in worlds} == {split}
        assert {(world.max_turns, world.sandbox.max_output) for world in worlds} == {(3, 99)}
        for world in worlds:
            world.close()
    for wrong in ("flavour=salt", "flavour", "max_turns=many", "max_turns=-1"):
        with pytest.raises((ValueError, TypeError), match=r"flavour|max_turns|str"):
            loop_ppo.make_worlds(small(env="apps", world=wrong), "dev")


def test_tasks_may_be_played_some_at_a_time(tmp_path, base, monkeypatch):
    sizes, memory = [], loop_ppo.Memory

    def watched(model, batch):
        sizes.append(len(batch))
        return memory(model, batch)

    monkeypatch.setattr(
        loop_ppo, "evaluate", lambda *_: {"eval/return": 0.0, "eval/return_greedy": 0.0, "eval/success": 0.0}
    )
    monkeypatch.setattr(loop_ppo, "Memory", watched)
    made = watch(monkeypatch, "make_worlds")
    _, summary = run_of(tmp_path, model=base, iterations=1, worlds=8)
    assert sizes == [2, 2, 1] and summary["episodes"] == 12  # the first is of the probe
    assert [len(worlds) for _, worlds in made] == [8], "worlds are used again, as a server each may be dear"


def test_bfloat16_leaves_the_rotary_frequencies_alone(skilled):
    model = loop_ppo.make_model(small(dtype="bfloat16"), skilled)
    rotary = model.base_model.rotary_emb
    assert model.dtype == torch.bfloat16 and rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, rotary.original_inv_freq)


def test_a_run_that_is_stopped_plays_no_test_splits(tmp_path, base, monkeypatch):
    """Whoever types Ctrl-C does not wait for them; the summary says what is known."""
    played, update = [], loop_ppo.update

    def evaluated(model, args, split, tag):
        played.append(split)
        return {tag.format(name): 0.0 for name in ("return", "return_greedy", "success")}

    def typed(*args):
        os.kill(os.getpid(), number)
        return update(*args)

    monkeypatch.setattr(loop_ppo, "evaluate", evaluated)
    _, summary = run_of(tmp_path / "whole", model=base, iterations=1)
    assert played == ["dev", "dev", "test-normal", "test-challenge"] and "test_normal_success" in summary
    monkeypatch.setattr(loop_ppo, "update", typed)
    for number in (signal.SIGINT, signal.SIGTERM):
        played.clear()
        folder, summary = run_of(tmp_path / number.name, model=base, iterations=3)
        assert played == ["dev"] and "test_normal_success" not in summary
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["iteration"] == 1


def test_no_more_logits_than_a_chunk(warm):
    rows, played = [], play(warm, small())
    hook = warm.get_output_embeddings().register_forward_hook(
        lambda *given: rows.append(tuple(given[2].shape))
    )
    logps_of(warm, played, small(logit_chunk=5))
    hook.remove()
    assert {shape[:-1] for shape in rows[:-1]} == {(1, 5)} and len(rows[-1]) == 3
    assert sum(shape[1] for shape in rows) == sum(len(t.logps) for t in played)


def test_updates_need_no_mask_and_expand_no_keys(warm, monkeypatch):
    """The page says what attention gets: updates allow flash attention, and no token expands keys."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    config = transformers.LlamaConfig(vocab_size=len(warm.tokenizer), num_hidden_layers=1, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    model.tokenizer, model.context, calls = warm.tokenizer, 2048, []
    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, attn_mask=None, **options):
        calls.append((query.shape[2], key.shape[1], attn_mask is None, options["is_causal"]))
        return plain(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    played = play(model, small())
    assert {key_heads for _, key_heads, *_ in calls} == {2, 4}, "of a token as they are, of a reply expanded"
    calls.clear()
    logps_of(model, played, small())
    assert {call[1:] for call in calls} == {(2, True, True)}


def test_worlds_step_side_by_side(warm):
    """Two that wait for each other: one after the other they would wait for ever."""
    both = threading.Barrier(2, timeout=20)

    class Together(Lookup):
        def step(self, action):
            if self.turn == 0:
                both.wait()
            return super().step(action)

    worlds = [Together(), Together()]  # greedy, so that both turns end with the same token
    played = play(warm, small(world_threads=2), tasks=[0, 0], worlds=worlds, greedy=True)
    assert all(t.fate == "ended" and t.turns for t in played)


def test_the_habits_are_counted():
    def rollout_of(*said, terminated=True):
        turns = [{"action": action, "reply": reply} for action, reply in said]
        t = loop_ppo.Trajectory(0, turn_records=turns, turns=[range(1)] * len(turns), logps=[-1.0] * 3)
        return replace(t, total=0.5, terminated=terminated, fate="ended")

    done = "apis.supervisor.complete_task()"
    nothing = rollout_of((done, "ok"))
    whole = rollout_of((f"apis.mail.send(to='a')\n{done}", "ok"))
    gives_up = rollout_of(("apis.mail.send()", "Exception: no"), (done, "done"))
    assuming = "# I assume a dummy id, assuming it\napis.api_docs.show_api_doc('a')"
    wordy = rollout_of(("```a```\n```b```", "ok"), (assuming, "ok"), terminated=False)
    (apps,) = loop_ppo.make_worlds(small(env="apps", worlds=1), "train")
    figures = loop_ppo.behaviour([nothing, whole, gives_up, wordy], apps)
    assert figures["habit/no_op"] == 0.25 and figures["rollout/truncated"] == 0.25
    assert figures["habit/gave_up"] == 0.5, "of those with two turns or more"
    assert figures["habit/many_cells"] == 1 / 6 and figures["habit/api_docs"] == 0.25
    assert figures["habit/assum"] == 0.5 and figures["habit/dummy"] == 0.25
    assert figures["rollout/length"] == 1.5 and figures["rollout/return"] == 0.5
    assert figures["rollout/tokens"] == 3 and figures["rollout/entropy"] == 1
    assert not any(tag.startswith("habit/") for tag in loop_ppo.behaviour([nothing], Lookup())), (
        "they are apps' own"
    )


def test_what_was_played_is_written_down_turn_by_turn(tmp_path, skilled, monkeypatch):
    """With each turn's reward and the mean log-prob of its tokens, by the sampler."""
    played, behaviour = [], loop_ppo.behaviour
    monkeypatch.setattr(loop_ppo, "behaviour", lambda *given: played.extend(given[0]) or behaviour(*given))
    folder, _ = run_of(tmp_path, iterations=1, model=skilled)
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    of_text = {t.text: t for t in played}
    for row in rows:
        t, turns = of_text[row["text"]], row["turns"]
        assert row["text"].endswith("".join(turn["action"] + turn["reply"] for turn in turns))
        assert sum(turn["reward"] for turn in turns) == pytest.approx(row["return"])
        assert len(turns) == len(t.turns)
        first = len(t.turns[0])
        assert turns[0]["log-prob"] == pytest.approx(sum(t.logps[:first]) / first)
        assert turns[-1]["log-prob"] == pytest.approx(np.mean(t.logps[-len(t.turns[-1]) :]))
    assert any(len(row["turns"]) > 1 for row in rows)


def test_who_was_dropped_is_written_down_once(tmp_path, skilled, monkeypatch):
    monkeypatch.setattr(loop_ppo, "has_enough", lambda *_: True)
    folder, _ = run_of(tmp_path, iterations=1, model=skilled)
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    dropped = results(folder)[0][-1]["rollout/dropped"] * 12
    assert sum(row["fate"] == "dropped" for row in rows) == round(dropped) > 0


# ------------------------------------------------------------------------------------- words and chats


def test_a_chat_template_frames_prompts_and_replies(base):
    """Around the ids that were sampled stands what the template has around them."""
    model = loop_ppo.make_model(small(), base)
    model.tokenizer.chat_template = (
        "<<{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.role == 'user' %}.{% else %}<|endoftext|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = model.tokenizer
    assert models.chat_pieces(tokenizer) == ("<<[user]", ".[assistant]", "<|endoftext|>", "[user]")
    played = play(model, small(max_action_tokens=3))
    for t in played:
        prompt, _ = Lookup().reset(options={"index": t.task})
        expected = tokenizer(f"<<[user]{prompt}.[assistant]")["input_ids"]
        for turn, (_, reply) in zip(t.turns, said(t), strict=True):
            expected += [t.ids[c] for c in turn]
            expected += [0] if expected[-1] else []  # the end of a turn that was cut
            expected += tokenizer(f"[user]{reply}.[assistant]")["input_ids"]
        assert t.ids == expected
    assert max(len(t.turns) for t in played) > 1


# ------------------------------------------------------------------------------------- whole runs


def run_of(tmp_path, **changes):
    summary = loop_ppo.main(small(runs=str(tmp_path), **changes))
    (folder,) = tmp_path.iterdir()
    return folder, summary


def results(folder):
    """What two runs of the same arguments share, and the last model's weights."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{tag: value for tag, value in row.items() if not tag.startswith("time/")} for row in rows]
    model = folder / "actor" / "model.safetensors"
    return rows, (folder / "rollouts.jsonl").read_text(), model.read_bytes()


@pytest.mark.parametrize("changes", [{}, {"normalise": True, "kl": 0.04, "epochs": 1, "minibatch": 0}])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, skilled, changes):
    options = {"model": skilled, "anneal_lr": False} | changes
    folder, _ = run_of(tmp_path / "whole", iterations=4, **options)
    half, _ = run_of(tmp_path / "half", iterations=2, eval_every=4, **options)
    early = torch.load(half / "checkpoint.pt", weights_only=True)
    saved = json.loads((half / "args.json").read_text())
    loop_ppo.main(loop_ppo.Args(**saved | {"resume": str(half), "iterations": 4, "eval_every": 10}))
    whole, resumed = results(folder), results(half)
    assert all(
        max(row.get("update/grad_norm", 0) for row in rows) > 0 for rows in (whole[0][:2], whole[0][2:])
    ), "it learns"
    for row in whole[0] + resumed[0]:  # an evaluation at the end of the half run has no part in it
        for tag in [tag for tag in row if tag.startswith("eval/")]:
            del row[tag]
    assert whole == resumed
    late = torch.load(half / "checkpoint.pt", weights_only=True)
    assert torch.equal(early["torch_rng"], late["torch_rng"]), "torch's numbers differ from device to device"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"kl": 0.04, "epochs": 1}], ids=str)
def test_a_run_on_the_gpu(tmp_path, skilled, changes):
    """Resumed there, then on the CPU, in the same process, which was told of another device."""
    options = {"model": skilled} | changes
    folder, _ = run_of(tmp_path, iterations=2, device="cuda", **options)
    for device, iterations in (("cuda", 3), ("cpu", 4)):
        again = small(runs=str(tmp_path), resume=str(folder), iterations=iterations, device=device, **options)
        loop_ppo.main(again)
    assert {row["iteration"] for row in results(folder)[0]} == {0, 1, 2, 3, 4}


def test_groups_that_all_earned_the_same_are_logged(tmp_path, base):
    """With one token a turn nobody can answer: every return is 0 and every group filtered."""
    folder, _ = run_of(tmp_path, model=base, iterations=1, max_action_tokens=1)
    assert results(folder)[0][-1]["update/filtered"] == 1.0


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_to_the_bit(tmp_path, skilled):
    """SIGKILL eight times, anywhere behind the first checkpoint, also while the next one is being written."""
    sizes = {"model": skilled, "iterations": 12, "eval_every": 2, "save_every": 2}
    (whole, _), rng, killed = run_of(tmp_path / "whole", **sizes), random.Random(0), []
    for moment in range(8):
        args, lines = small(runs=str(tmp_path / str(moment)), **sizes), rng.randrange(3, 12)
        code = (
            f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests/algorithms')!r}]\n"
            "import envs, loop_ppo\n"
            "envs.ENVS['lookup'] = envs.Entry('test_loop_ppo:Lookup', 'toy')\n"
            f"loop_ppo.main(loop_ppo.Args(**{vars(args)!r}))\n"
        )
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process, deadline = subprocess.Popen([sys.executable, "-c", code], **quiet), time.time() + 300
        while time.time() < deadline and process.poll() is None:
            found = list(Path(args.runs).glob("*/metrics.jsonl"))
            if found and found[0].read_text().count("\n") >= lines:
                break
            time.sleep(0.002)
        time.sleep(rng.random() * 0.3)
        process.kill()
        process.wait()
        (folder,) = Path(args.runs).iterdir()
        killed.append((process.returncode, len(results(folder)[0])))
        saved = json.loads((folder / "args.json").read_text())
        loop_ppo.main(loop_ppo.Args(**saved | {"resume": str(folder)}))
        assert results(folder) == results(whole), killed
    assert sum(code == -9 for code, _ in killed) >= 6, killed  # the others had ended before
    assert len({done for _, done in killed}) > 2, killed


def test_a_checkpoint_of_another_model_cannot_be_resumed(tmp_path, base, skilled):
    folder, _ = run_of(tmp_path, model=base, iterations=1)
    saved = json.loads((folder / "args.json").read_text())
    with pytest.raises(ValueError, match=r"checkpoint\.pt cannot be resumed"):
        loop_ppo.main(loop_ppo.Args(**saved | {"resume": str(folder), "iterations": 2, "model": skilled}))


def test_the_summary_has_the_test_splits(tmp_path, base):
    folder, summary = run_of(tmp_path, model=base)
    for split in ("test_normal", "test_challenge"):
        for key in ("success", "scenarios", "questions", "success_greedy"):
            assert 0 <= summary[f"{split}_{key}"] <= 1
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_a_world_without_a_checkpoint_says_how_to_make_one():
    with pytest.raises(ValueError, match=r"no model in .*lookup.*python sft.py --env lookup"):
        loop_ppo.main(small())


class Forgetful(Lookup):
    append_only = False


def test_a_world_that_rewrites_its_text_is_an_error():
    envs.ENVS["forgetful"] = envs.Entry(f"{__name__}:Forgetful", "a toy of the tests")
    try:
        with pytest.raises(ValueError, match=r"forgetful.*must only grow"):
            loop_ppo.main(small(env="forgetful"))
    finally:
        del envs.ENVS["forgetful"]


def test_rollouts_have_seeds_of_their_own_and_evaluations_always_the_same(tmp_path, base, monkeypatch):
    """Rollouts of a task share the world's seed, but not that of what they sample."""
    rollouts = watch(monkeypatch, "rollout")
    run_of(tmp_path, model=base, iterations=2)
    ours = [[int(draw) for draw in given["token_seeds"]] for given, _ in rollouts if given["may_drop"]]
    assert len({draw for draws in ours for draw in draws}) == len(ours[0]) * len(ours)
    theirs = [given for given, _ in rollouts if not given["may_drop"]]
    assert theirs and all(given["token_seeds"] == given["world_seeds"] == given["tasks"] for given in theirs)


def test_a_run_on_the_cpu_is_there_whatever_was_the_default_device(tmp_path, base, monkeypatch):
    """As behind a run on a GPU in the same process."""
    make_model = loop_ppo.make_model

    def make(args, source):
        torch.set_default_device(None)
        model = make_model(args, source)
        torch.set_default_device("meta")
        return model

    monkeypatch.setattr(loop_ppo, "make_model", make)
    try:
        run_of(tmp_path, model=base, iterations=1)
        assert torch.get_default_device().type == "cpu"
    finally:
        torch.set_default_device(None)


def test_the_context_is_at_most_what_the_model_reads(tmp_path, base, monkeypatch):
    rollouts = watch(monkeypatch, "rollout")
    run_of(tmp_path, model=base, iterations=1, context=100_000)
    assert {given["args"].context for given, _ in rollouts} == {2048}


def test_lora_without_its_package_is_a_sentence(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="pip install peft"):
        loop_ppo.make_model(small(lora=True), base)


def test_loras_rank_and_alpha_are_handed_on(base, monkeypatch):
    """The paper's alpha is twice its rank; peft itself need not be here."""
    given, loaded = {}, models.load(AutoModelForCausalLM, base, small())
    monkeypatch.setattr(models, "load", lambda *_: loaded)
    fake = types.SimpleNamespace(LoraConfig=lambda **options: given.update(options))
    monkeypatch.setitem(sys.modules, "peft", fake)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "add_adapter", lambda self, config: None)
    loop_ppo.make_model(small(lora=True, lora_rank=8), base)
    assert (given["r"], given["lora_alpha"]) == (8, 16)


@pytest.mark.external
def test_adapters_are_trained_saved_and_loaded_by_peft(tmp_path, base):
    """Only the adapters move; peft itself loads what was saved, and a resumed run goes on with it."""
    peft = pytest.importorskip("peft", reason="needs the package peft")
    folder, args = base, small(lora=True)
    model = loop_ppo.make_model(args, base)
    assert {config.lora_alpha for config in model.peft_config.values()} == {32}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) > 0 and all(
        "lora" in n for n, p in model.named_parameters() if p.requires_grad
    )
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    played = judged(play(model, args), [1.0] * 6)
    loop_ppo.update(model, optimizer, played, args, np.random.default_rng(0))
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    model.save_pretrained(tmp_path / "actor")

    ids = torch.tensor([[5, 6, 7]])
    plain = AutoModelForCausalLM.from_pretrained(folder)
    before, after = plain(ids).logits, model(ids).logits
    assert not torch.allclose(before, after, atol=1e-3)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "actor")
    assert torch.allclose(loaded(ids).logits, after, atol=1e-5)
    for name, p in loop_ppo.make_model(replace(args, dtype="bfloat16"), folder).named_parameters():
        assert p.dtype == (torch.float32 if "lora" in name else torch.bfloat16)
    # E7 reads the model of the start, which is this one without its adapters
    loop_ppo.read_ref(model, played, args)
    expected = logps_of(AutoModelForCausalLM.from_pretrained(folder).eval(), played, args)
    for t, logp_M in zip(played, expected, strict=True):
        assert torch.allclose(t.ref_logp_M, logp_M, atol=1e-5)
    assert torch.allclose(model(ids).logits, after, atol=1e-5)  # switched on again, and still trained
    assert [p for p in model.parameters() if p.requires_grad] == trained
    options = {"model": folder, "lora": True, "anneal_lr": False}
    whole, _ = run_of(tmp_path / "whole", iterations=2, **options)
    half, _ = run_of(tmp_path / "half", iterations=1, **options)
    saved = json.loads((half / "args.json").read_text())
    loop_ppo.main(loop_ppo.Args(**saved | {"resume": str(half), "iterations": 2}))
    weights = [(run / "actor" / "adapter_model.safetensors").read_bytes() for run in (whole, half)]
    assert weights[0] == weights[1]
    assert (half / "checkpoint.pt").stat().st_size < 3 * len(weights[0]) + 200_000, (
        "adapters, not the whole model"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_toy_world_is_solved(tmp_path, seed):
    """LOOP learns always to look and to say what it saw; what it starts from does so four times in ten."""
    dialogues = Lookup().demonstrations(3000, seed)
    model = str(taught_model(dialogues, 64, 6, tmp_path / "start"))
    options = {"model": model, "eval_episodes": 0, "minibatch": 32, "worlds": 96, "eval_every": 40}
    summary = loop_ppo.main(
        small(runs=str(tmp_path), seed=seed, iterations=40, tasks=16, rollouts=6, **options)
    )
    assert summary["eval_success"] > summary["warm_start_return"] + 0.25
    assert summary["eval_return_greedy"] > 0.95


class Chatter(Lookup):
    """The same, two turns long; each earns its letters, so that returns differ, whatever a model says."""

    max_turns, max_action_chars = 2, 200

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(len(info["action"])), terminated, truncated, info


@pytest.mark.external
def test_a_real_model_is_trained_in_its_chat_template(tmp_path, smollm, monkeypatch):
    """SmolLM2-135M-Instruct, an iteration; then what was saved, by transformers alone.

    The sampler's log-probs are those of the scorer, and of a plain forward pass.
    """
    monkeypatch.setitem(envs.ENVS, "chatter", envs.Entry(f"{__name__}:Chatter", "a toy of the tests"))
    rollouts = watch(monkeypatch, "rollout")
    sizes = {"iterations": 1, "tasks": 2, "rollouts": 2, "worlds": 4, "max_action_tokens": 8}
    sizes |= {"epochs": 1, "minibatch": 0, "eval_episodes": 1, "lr": 1e-5}
    run, _ = run_of(tmp_path, env="chatter", model=str(smollm), **sizes)

    (run / "checkpoint.pt").unlink()  # 2 GB, which pytest would keep
    _, row = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["update/sampler_gap"] < 1e-4 and row["update/grad_norm"] > 0
    model, start = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "actor", smollm))
    for now, old in zip(model.parameters(), start.parameters(), strict=True):
        assert not torch.equal(now, old) and torch.allclose(now, old, atol=1e-4)

    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "actor")
    (played,) = [result for given, result in rollouts if given["may_drop"]]
    for t in played:
        plain = plain_logps(start, t)
        assert max(abs(a - b) for a, b in zip(t.logps, plain, strict=True)) < 1e-4
        prompt, _ = Chatter().reset(options={"index": t.task})
        chat = [{"role": "user", "content": prompt}]
        for turn, (_, reply) in zip(t.turns, said(t), strict=True):
            said = tokenizer.decode(t.ids[turn.start : turn.stop]).removesuffix(tokenizer.eos_token)
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": reply}]
        expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(t.ids) == expected
        assert f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" in expected
    assert max(len(t.turns) for t in played) == 2

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)


# ------------------------------------------------------------------------------------ what else main hands on
def test_an_evaluation_plays_its_own_split_and_counts_success(warm, monkeypatch):
    rollouts = watch(monkeypatch, "rollout")
    figures = loop_ppo.evaluate(warm, small(eval_episodes=24), "test-normal", "{}")
    for (given, played), suffix in zip(rollouts, ("", "_greedy"), strict=True):
        assert {world.split for world in given["worlds"]} == {"test-normal"}
        assert figures[f"success{suffix}"] == pytest.approx(sum(t.success for t in played) / 24)
        assert figures[f"cut{suffix}"] == pytest.approx(sum(t.cut for t in played) / 24)
    assert any(t.terminated and not t.success for t in rollouts[0][1])


def test_only_those_that_ended_are_in_a_baseline():
    dropped, silent = replace(ended(0, 9.0), fate="dropped"), replace(ended(0, 5.0), turns=[])
    played = [dropped, ended(0, 1.0), silent, ended(0, 0.0), ended(0, 0.5)]
    judged = [played[1], played[3], played[4]]
    assert loop_ppo.set_advantages(played, 5, False) == judged
    assert [t.advantage for t in judged] == pytest.approx([0.75, -0.75, 0.0])
    assert dropped.advantage is None and silent.advantage is None


def test_what_a_cut_costs_is_on_its_last_turn(warm):
    class Dear(Lookup):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, reward - 1.0, *rest

    room = len(prompt_ids(warm.tokenizer, Lookup().reset(options={"index": 0})[0])) + 4
    played = play(
        warm, small(context=room, max_action_tokens=4), tasks=[0] * 6, worlds=[Dear() for _ in range(6)]
    )
    cut = [t for t in played if t.cut]
    assert cut and {t.total for t in cut} == {-4.0}
    assert all(sum(turn["reward"] for turn in t.turn_records) == t.total for t in played)


def test_the_figures_of_a_rollout():
    t = loop_ppo.Trajectory(0, logps=[-1.0, -2.0], turns=[range(2)], advantage=1.0)
    t.old_logp_M, t.ref_logp_M = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    _, figures = loop_ppo.rollout_loss(t, torch.tensor([-0.5, -2.1]), small(kl=0.1))
    assert figures["update/clipped"] == 0.5
    assert figures["update/log_ratio"] == pytest.approx(0.4)
    assert figures["update/kl"] == pytest.approx((math.exp(-1.0) + 1.0 - 1 + math.exp(0.1) - 0.1 - 1) / 2)
