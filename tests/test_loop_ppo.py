"""What loop_ppo.py promises: its equations, that a batch is no more than its parts, and that a run can be resumed.

The world is a toy defined here: look a number up, then copy it. The models have one or two
layers. What they should compute is computed a second time, one rollout at a time, by a plain forward pass.
"""

import copy
import gc
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import envs
import loop_ppo

ROOT = Path(loop_ppo.__file__).parent

NAMES = ["ann", "bob", "cid", "dot", "eve", "fay"]


class Lookup(gymnasium.Env):
    """A number is asked for; `look` shows it, `answer 17` ends the episode. A guess earns nothing.

    What is right can be known, so the best return is 1; who answers without looking is right once in 40 tries.
    """

    id = "lookup"
    num_tasks = 600  # for training; 48 in the other splits
    max_turns = 4
    max_action_chars = 40
    append_only = True
    multiline = True
    best_return = 1.0

    def __init__(self, split: str = "train", reward: str = "fraction"):
        offset = {"train": 0, "dev": 1000, "test-normal": 2000, "test-challenge": 3000}[split]
        self.num_tasks = 600 if split == "train" else 48
        self.asked = [
            (rng.choice(NAMES), rng.randrange(10, 50)) for rng in map(random.Random, range(offset, offset + 600))
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
            info["episode"] = {"return": reward, "length": self.turn, "success": reward == 1}
        return self.observation, reward, terminated, truncated, info

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


@pytest.fixture(autouse=True, scope="module")
def toy():
    envs.ENVS["lookup"] = envs.Entry(f"{__name__}:Lookup", "a toy of the tests")
    yield
    del envs.ENVS["lookup"]


@pytest.fixture(autouse=True)
def one_thread():
    """Bits repeat on one thread only; and `main` takes over Ctrl-C, which pytest wants back."""
    torch.set_num_threads(1)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def small(**changes) -> loop_ppo.Args:
    """Arguments that make a run small."""
    usual = {"env": "lookup", "max_difficulty": 3, "width": 32, "layers": 2, "drills": 32, "demonstrations": 60}
    usual |= {"tasks": 3}
    usual |= {"warm_start_epochs": 2, "rollouts": 4, "iterations": 2, "max_action_tokens": 6, "eval_episodes": 6}
    return loop_ppo.Args(**usual | {"threads": 1, "world_threads": 2} | changes)


@pytest.fixture(scope="module")
def warm():
    """A model that has seen some dialogues, so that it acts in different ways and ends its turns."""
    torch.manual_seed(0)
    args, dialogues = small(demonstrations=300), Lookup().demonstrations(300, 0)
    model = loop_ppo.make_model(args, [d["observations"][-1] for d in dialogues])
    demos = [loop_ppo.demonstrated(d, model.tokenizer) for d in dialogues]
    loop_ppo.warm_start(model, demos, 6, args, np.random.default_rng(0))
    return model


@pytest.fixture(scope="module")
def skilled(tmp_path_factory):
    """The folder of a model that solves some tasks, so that LOOP has something to learn from."""
    torch.manual_seed(0)
    dialogues, folder = Lookup().demonstrations(3000, 0, skill=0.9), tmp_path_factory.mktemp("skilled")
    model = loop_ppo.make_model(small(width=64), [d["observations"][-1] for d in dialogues])
    demos = [loop_ppo.demonstrated(d, model.tokenizer) for d in dialogues]
    loop_ppo.warm_start(model, demos, 3, small(), np.random.default_rng(0))
    model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return str(folder)


def test_drills_repeat_and_are_scored_from_the_second_time_on(warm):
    for t in loop_ppo.drills(warm.tokenizer, 50, np.random.default_rng(0)):
        ((first, last),) = t.turns
        period = first - 1
        assert 8 <= period < 40 and last == len(t.ids) == 96
        assert t.ids[period:] == t.ids[: len(t.ids) - period]
        assert min(t.ids) > 256, "words, neither bytes nor the end of text"


def test_words_are_exchanged_throughout_a_demonstration(warm):  # D3
    """What is said can still be read off what stands before it; all else, numbers of tokens included, is as it was."""
    shown = [loop_ppo.demonstrated(d, warm.tokenizer) for d in Lookup().demonstrations(200, 1)]
    rng, changed = np.random.default_rng(0), 0
    for old, new in zip(shown, loop_ppo.exchange_words(shown, warm.tokenizer, 1.0, rng), strict=True):
        pairs = {(a, b) for a, b in zip(old.ids, new.ids, strict=True) if a != b}
        assert new.turns == old.turns and len(dict(pairs)) == len(pairs) == len({b for _, b in pairs})
        said = {token for first, last in old.turns for token in old.ids[first:last]}
        places = {i for first, last in old.turns for i in range(first, last)}
        read = {token for i, token in enumerate(old.ids) if i not in places}
        for a, b in pairs:
            assert min(a, b) > 256 and a in said & read and b not in old.ids
            assert all((x == a) == (y == b) for x, y in zip(old.ids, new.ids, strict=True)), "everywhere"
        changed += bool(pairs)
    assert changed > 20
    same = loop_ppo.exchange_words(shown, warm.tokenizer, 0.0, rng)
    assert [t.ids for t in same] == [t.ids for t in shown]
    half = loop_ppo.exchange_words(shown, warm.tokenizer, 0.5, rng)
    assert 0.2 * changed < sum(a.ids != b.ids for a, b in zip(shown, half, strict=True)) < 0.8 * changed


@pytest.mark.slow
def test_drills_teach_to_copy():  # D3
    """After the default drills a repeated word that was never trained on in this order is found again."""
    torch.manual_seed(0)
    args, rng = loop_ppo.Args(width=96), np.random.default_rng(0)
    model = loop_ppo.make_model(args, [d["observations"][-1] for d in envs.make("apps").demonstrations(500, 0)])
    fresh = loop_ppo.drills(model.tokenizer, 64, np.random.default_rng(1))
    before = loop_ppo.score(model, fresh, args)[0].exp().mean().item()
    loop_ppo.warm_start(model, loop_ppo.drills(model.tokenizer, args.drills, rng), 1, args, rng)
    assert before < 0.01 and loop_ppo.score(model, fresh, args)[0].exp().mean().item() > 0.8


def play(model, args, tasks=(0, 0, 0, 1, 1, 1), seed=0, worlds=None, **options):
    worlds = worlds or [Lookup() for _ in tasks]
    generator = torch.Generator().manual_seed(seed)
    return loop_ppo.rollout(model, worlds, list(tasks), [0] * len(tasks), args, generator, **options)


@torch.no_grad()
def plain_logps(model, t: loop_ppo.Trajectory) -> list[float]:
    """Log-probs of the sampled tokens of one rollout by a plain forward pass of the whole model, unpadded."""
    logp_TV = model(torch.tensor([t.ids])).logits[0].double().log_softmax(-1)
    return [logp_TV[c - 1, t.ids[c]].item() for first, last in t.turns for c in range(first, last)]


# ------------------------------------------------------------------------------------- the equations


def test_e1_is_each_return_minus_the_mean_of_the_others():
    """E1, written out; and it sums to zero."""
    returns = [0.3, 1.0, 0.0, 0.7, 1.0]
    naive = [r - sum(returns[:k] + returns[k + 1 :]) / 4 for k, r in enumerate(returns)]
    found = loop_ppo.leave_one_out(torch.tensor(returns, dtype=torch.float64))
    assert found.tolist() == pytest.approx(naive, abs=1e-12) and found.sum().item() == pytest.approx(0, abs=1e-12)
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
    rng = random.Random(1)
    rollout_M, turn_M = [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 2, 3]
    new, old = ([rng.uniform(-3, 0) for _ in range(6)] for _ in range(2))
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (new, old)] + [
        torch.tensor(turn_M),
        torch.tensor(rollout_M),
    ]
    owners = {"token": range(6), "turn": turn_M, "trajectory": rollout_M}
    for level, owner in owners.items():
        naive = [math.prod(math.exp(new[j] - old[j]) for j in range(6) if owner[j] == owner[i]) for i in range(6)]
        assert loop_ppo.ratios(*tensors, level).tolist() == pytest.approx(naive, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "turn", "trajectory"])
def test_a_ratio_that_overflows_has_no_gradient_that_is_no_number(level):
    logp_M, owner_M = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True), torch.tensor([0, 0, 1])
    w_M = loop_ppo.ratios(logp_M, torch.tensor([-120.0, -120.0, -1.0]), owner_M, owner_M, level)
    loop_ppo.surrogate(w_M, torch.ones(3), 0.2).sum().backward()
    assert logp_M.grad.tolist() == [0.0, 0.0, 1.0]


def test_e3_e4_e5_are_the_same_where_a_rollout_is_one_token():
    new, old, one = torch.randn(5), torch.randn(5), torch.arange(5)
    token, turn, trajectory = (loop_ppo.ratios(new, old, one, one, x) for x in ("token", "turn", "trajectory"))
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
    group = [replace(loop_ppo.Trajectory(0, "", "", [1, 2], [(1, 2)]), rewards=[total]) for _ in range(6)]
    for normalise in (False, True):
        _, advantage_N, filtered = loop_ppo.advantages_of_groups(group, normalise)
        assert advantage_N.abs().max() < 1e-6 and advantage_N.dtype == torch.float32 and filtered == 1.0


def test_e7_is_the_kl_divergence_on_average():
    """E7: its mean over the policy's own tokens is the divergence."""
    p, q = (torch.randn(6, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    penalty_V = loop_ppo.kl_penalty(p, q)
    assert (penalty_V >= 0).all()
    naive = sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert (p.exp() * penalty_V).sum().item() == pytest.approx(naive, rel=1e-9)


def test_the_mean_of_rollouts_knows_no_batch():
    x, owner = [1.0, 2.0, 3.0, 10.0, 20.0], [0, 0, 0, 1, 1]
    found = loop_ppo.mean_of_rollouts(torch.tensor(x), torch.tensor(owner), 32)
    assert found.item() == pytest.approx((2.0 + 15.0) / 32)


# ------------------------------------------------------------------------------------- the rollouts


def test_the_sampler_and_the_scorer_are_one_distribution(warm):
    args = small(max_action_tokens=8)
    played = play(warm, args, tasks=[i // 3 for i in range(24)])
    assert len({len(t) for t in played}) > 1, "turns should differ, or this shows little"
    scored = loop_ppo.score(warm, played, args)[0].split([len(t.logps) for t in played])
    for t, logp_M in zip(played, scored, strict=True):
        assert t.logps == pytest.approx(plain_logps(warm, t), abs=2e-4)
        assert logp_M.tolist() == pytest.approx(plain_logps(warm, t), abs=2e-4)


def test_tokens_are_kept_as_they_were_sampled_and_only_they_are_trained(warm):
    tokenizer, end = warm.tokenizer, warm.tokenizer.eos_token_id
    cut = 0
    for t in play(warm, small(max_action_tokens=3), tasks=[i // 3 for i in range(12)]):
        place = len(loop_ppo.prompt_ids(tokenizer, t.start))
        assert t.ids[:place] == loop_ppo.prompt_ids(tokenizer, t.start)
        for (first, last), action, reply in zip(t.turns, t.actions, t.replies, strict=True):
            assert first == place and tokenizer.decode(t.ids[first:last], skip_special_tokens=True).strip() == action
            assert end not in t.ids[first : last - 1]
            forced = t.ids[last - 1] != end  # then the end of turn stands behind what counts
            assert not forced or (last - first == 3 and t.ids[last] == end)
            cut += forced
            place = last + forced + len(loop_ppo.reply_ids(tokenizer, reply))
            assert t.ids[last + forced : place] == loop_ppo.reply_ids(tokenizer, reply)
        assert place == len(t.ids) and len(t.logps) == sum(last - first for first, last in t.turns)
    assert cut


def test_prompts_and_replies_get_no_gradient(warm):
    """The loss does not change when the model's predictions of the world's tokens do, nor with padding."""
    played = play(warm, small())
    hidden = {}

    def keep(_, __, output):
        output.last_hidden_state.retain_grad()
        hidden["BTH"] = output.last_hidden_state

    handle = warm.base_model.register_forward_hook(keep)
    loop_ppo.score(warm, played, small())[0].sum().backward()
    handle.remove()
    warm.zero_grad()
    has_gradient = hidden["BTH"].grad.abs().sum(-1) > 0
    for row, t in zip(has_gradient, played, strict=True):
        predicts = {c - 1 for first, last in t.turns for c in range(first, last)}
        assert set(row.nonzero()[:, 0].tolist()) == predicts


def test_how_rows_share_a_batch_changes_nothing(warm):
    """Greedy rollouts are the same alone and among others, whose turns and ends fall elsewhere."""
    tasks = list(range(10))
    together = play(warm, small(), tasks=tasks, greedy=True)
    for task, t in zip(tasks, together, strict=True):
        (alone,) = play(warm, small(), tasks=[task], greedy=True)
        assert alone.ids == t.ids and alone.rewards == t.rewards
        assert alone.logps == pytest.approx(t.logps, abs=2e-4)


def test_threads_do_not_change_a_rollout(warm):
    first, second = (play(warm, small(world_threads=n), tasks=[0, 0, 1, 1, 2, 2]) for n in (1, 4))
    assert [vars(t) for t in first] == [vars(t) for t in second]


def test_a_rollout_ends_where_the_context_does(warm):
    prompt = len(loop_ppo.prompt_ids(warm.tokenizer, Lookup().reset()[0]))
    played = play(warm, small(context=prompt + 20))
    cut = [t for t in played if not t.terminated]
    assert cut and all(t.turns and not t.success and len(t.ids) > prompt + 14 for t in cut)
    assert max(t.turns[-1][1] for t in played) <= prompt + 20
    assert all(t.fate == "ended" and len(t) == 0 for t in play(warm, small(context=prompt + 2)))


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
    learned, advantage_N, _ = loop_ppo.advantages_of_groups(played, normalise=False)
    assert [t.task for t in learned] == [0, 0, 0] and len(advantage_N) == 3


def test_stragglers_are_dropped_when_enough_have_ended(warm):
    args, tasks = small(finish_all=0.1, finish_each=0), [i // 4 for i in range(24)]
    played = play(warm, args, tasks=tasks, may_drop=True)
    dropped = [t for t in played if t.fate == "dropped"]
    assert dropped and len(dropped) < 24
    learned, _, _ = loop_ppo.advantages_of_groups(played, normalise=False)
    assert not set(map(id, dropped)) & set(map(id, learned))
    assert all(t.fate == "ended" for t in play(warm, args, tasks=tasks))


def test_enough_is_so_many_of_all_and_of_each_task_and_nobody_waits_for_the_broken():
    played = [loop_ppo.Trajectory(i // 6, "", "", []) for i in range(18)]
    args = small(finish_all=0.5, finish_each=4)
    of_each = {0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15}
    assert loop_ppo.has_enough(played, of_each, args)
    assert not loop_ppo.has_enough(played, of_each - {12}, args), "three of six"
    assert not loop_ppo.has_enough(played, of_each, small(finish_all=0.9, finish_each=4))
    for i in (12, 13, 14, 15):
        played[i].fate = "broken"
    assert not loop_ppo.has_enough(played, of_each, args), "the two that are whole play on"
    assert loop_ppo.has_enough(played, of_each | {16, 17}, args)


def test_what_did_not_end_has_no_return():
    one = loop_ppo.Trajectory(0, "", "", [], actions=["a"], replies=["b"], rewards=[1.0], terminated=True, success=True)
    figures = loop_ppo.behaviour([one, loop_ppo.Trajectory(0, "", "", [], fate="broken")])
    assert figures["rollout/return"] == figures["rollout/success"] == 1.0 and figures["rollout/broken"] == 0.5


def test_worlds_that_do_not_start_are_one_line_if_none_does(warm, monkeypatch, capsys):
    def reset(self, seed=None, options=None):
        if options["index"] == 0:
            raise envs.Unavailable("the server is gone")
        return real(self, seed=seed, options=options)

    real = Lookup.reset
    monkeypatch.setattr(Lookup, "reset", reset)
    fates = [t.fate for t in play(warm, small())]
    assert fates[:3] == ["broken"] * 3 and set(fates[3:]) == {"ended"}
    with pytest.raises(SystemExit):
        play(warm, small(), tasks=(0, 0))
    assert "the server is gone" in capsys.readouterr().err


def test_a_cache_goes_with_its_memory(warm):
    gc.disable()
    try:
        cache = weakref.ref(loop_ppo.Memory(warm, [[5, 6]], [2]).cache)
        assert cache() is None
    finally:
        gc.enable()


def test_scenarios_that_an_evaluation_cuts_do_not_count(warm, monkeypatch):
    monkeypatch.setattr(Lookup, "scenarios", [i // 3 for i in range(Lookup().num_tasks)], raising=False)
    whole = loop_ppo.evaluate(warm, small(eval_episodes=6), "dev")
    cut = loop_ppo.evaluate(warm, small(eval_episodes=5), "dev")
    played = loop_ppo.evaluate(warm, small(eval_episodes=2), "dev")
    assert "scenarios" in whole and cut["scenarios"] in (0.0, 1.0) and "scenarios" not in played


def test_the_tiny_model_takes_no_adapters(tmp_path, capsys):
    with pytest.raises(SystemExit):
        loop_ppo.main(small(lora=True, runs=str(tmp_path)))
    assert "--lora" in capsys.readouterr().err


def test_a_full_disk_costs_nothing_that_was_learned(tmp_path, monkeypatch, capsys):
    real, calls = torch.save, []

    def fails_at_the_second(*args, **rest):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("file write failed\nat somewhere")
        return real(*args, **rest)

    monkeypatch.setattr(torch, "save", fails_at_the_second)
    loop_ppo.main(small(iterations=2, save_every=1, runs=str(tmp_path)))
    (folder,) = tmp_path.glob("*/checkpoints")
    assert re.search(r"^not saved at iteration 1: .*file write failed$", capsys.readouterr().out, re.M)
    assert [path.name for path in folder.iterdir()] == ["000002"]


def test_a_group_of_one_teaches_nothing():
    t = loop_ppo.Trajectory(0, "", "", [1, 2], turns=[(1, 2)], rewards=[1.0])
    learned, advantage_N, filtered = loop_ppo.advantages_of_groups([t], normalise=False)
    assert (learned, len(advantage_N), filtered) == ([], 0, 1.0)


# ------------------------------------------------------------------------------------- the updates


def weights_after(model, played, advantage_N, args):
    model = copy.deepcopy(model)
    model.tokenizer = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    metrics = loop_ppo.update(model, optimizer, played, advantage_N, args, np.random.default_rng(0))
    return torch.cat([p.detach().flatten() for p in model.parameters()]), metrics


def test_on_policy_with_one_epoch_loop_is_rloo_to_the_bit(warm):
    """One step on -A log pi, written out here, and LOOP's: the ratio is 1 and its gradient that of the logarithm."""
    played = play(warm, small(), tasks=[i // 4 for i in range(12)])
    learned, advantage_N, _ = loop_ppo.advantages_of_groups(played, normalise=False)
    args = small(epochs=1, minibatch=0, micro_batch=100, min_advantage=0.0)
    found, metrics = weights_after(warm, learned, advantage_N, args)
    assert metrics["update/ratio"] == 1.0 and metrics["update/clipped"] == 0.0

    model = copy.deepcopy(warm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    order = sorted(range(len(learned)), key=lambda i: len(learned[i].ids))
    logp_M, _, rollout_M = loop_ppo.score(model, [learned[i] for i in order], args)
    length_N = torch.bincount(rollout_M)
    (-(logp_M * advantage_N[order][rollout_M] / length_N[rollout_M]).sum() / len(learned)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert torch.equal(found, torch.cat([p.detach().flatten() for p in model.parameters()]))
    rloo, _ = weights_after(warm, learned, advantage_N, replace(args, variant="rloo", epochs=0, minibatch=5))
    assert torch.equal(found, rloo)


@pytest.mark.parametrize("level", ["token", "turn", "trajectory"])
def test_a_batch_of_eight_is_eight_of_one(warm, level):
    played = play(warm, small(), tasks=[0] * 4 + [1] * 4)
    advantage_N = torch.tensor([0.5, -0.5, 0.3, -0.3, 1.0, -1.0, 0.2, -0.2])
    args = small(minibatch=8, epochs=2, level=level)
    whole, _ = weights_after(warm, played, advantage_N, replace(args, micro_batch=8))
    parts, _ = weights_after(warm, played, advantage_N, replace(args, micro_batch=1))
    start = torch.cat([p.detach().flatten() for p in warm.parameters()])
    assert (whole - start).abs().max() > 1e-4
    assert torch.allclose(whole, parts, atol=2e-5)


def test_small_advantages_are_left_out_and_an_empty_minibatch_is_no_error(warm):
    played = play(warm, small())
    start = torch.cat([p.detach().flatten() for p in warm.parameters()])
    same, metrics = weights_after(warm, played, torch.full((6,), 0.009), small(minibatch=2))
    assert torch.equal(same, start) and metrics["update/grad_norm"] == 0
    some = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    moved, _ = weights_after(warm, played, some, small(minibatch=2))
    assert not torch.equal(moved, start)


@pytest.mark.parametrize("options", [{"variant": "rloo"}, {"minibatch": 0}, {}])
def test_an_iteration_without_a_group_is_no_error(warm, options):
    _, metrics = weights_after(warm, [], torch.zeros(0), small(**options))
    assert metrics["update/grad_norm"] == 0 and metrics["update/stopped"] == 0


def test_a_log_ratio_too_large_stops_the_iteration(warm):
    played = play(warm, small())
    _, metrics = weights_after(warm, played, torch.ones(6), small(minibatch=2, max_log_ratio=1e-6))
    assert metrics["update/stopped"] == 1.0 and abs(metrics["update/log_ratio"]) > 0


@pytest.mark.parametrize("variant", ["loop", "rloo"])
def test_a_scorer_that_is_not_the_sampler_is_noticed(warm, capfd, variant):
    """Before the first step, whether a rollout's old log-probs are of that step or of the pass before it."""
    played, model = play(warm, small()), copy.deepcopy(warm)
    with torch.no_grad():
        model.get_output_embeddings().weight[5:9] += 0.5
    with pytest.raises(SystemExit):
        weights_after(model, played, torch.ones(6), small(variant=variant, minibatch=2))
    (line,) = capfd.readouterr().err.splitlines()
    assert "log-probs at scoring are not those at sampling" in line


def test_the_old_log_probs_are_of_before_the_first_step(warm):
    """Each rollout is read once before it is learned from, those of the first step in that step."""
    played, read, score = play(warm, small(temperature=0.9)), [], loop_ppo.score

    def watched(model, trajectories, args):
        read.append((torch.is_grad_enabled(), [id(t) for t in trajectories]))
        return score(model, trajectories, args)

    loop_ppo.score = watched
    try:
        _, metrics = weights_after(warm, played, torch.ones(6), small(minibatch=2, epochs=1, temperature=0.9))
    finally:
        loop_ppo.score = score
    before = {i for with_gradient, part in read if not with_gradient for i in part}
    learned = [i for with_gradient, part in read if with_gradient for i in part]
    assert len(before) == 4 and sorted(learned) == sorted(map(id, played)) and not before & set(learned[:2])
    assert 0 < metrics["update/sampler_gap"] < 1e-3


@pytest.mark.parametrize("chunk", [1, 7])
def test_logits_in_chunks_are_the_same(warm, chunk):
    played = play(warm, small())
    whole = loop_ppo.score(warm, played, small())[0]
    assert torch.allclose(loop_ppo.score(warm, played, small(logit_chunk=chunk))[0], whole, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(tmp_path, warm, monkeypatch):
    played, advantage_N = play(warm, small()), torch.tensor([0.5, -0.5, 0.3, -0.3, 1.0, -1.0])
    plain, _ = weights_after(warm, played, advantage_N, small())
    warm.save_pretrained(tmp_path)
    warm.tokenizer.save_pretrained(tmp_path)
    args = small(model=str(tmp_path), gradient_checkpointing=True, logit_chunk=16)
    model = loop_ppo.make_model(args, [])
    remade, forward = [], torch.utils.checkpoint.checkpoint
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", lambda *a, **k: remade.append(1) or forward(*a, **k))
    model.activation_checkpointing_enable()
    assert [t.ids for t in play(model, args)] == [t.ids for t in played] and not remade, "rollouts keep their cache"
    saved, _ = weights_after(model, played, advantage_N, args)
    assert torch.allclose(plain, saved, atol=1e-5)
    assert remade and not any(module.training for module in model.modules())


# ------------------------------------------------------------------- an update and a rollout, written out


def odd_returns(model, args):
    """Rollouts of three tasks, their advantages: some large, one negative, one too small to count."""
    played = play(model, args, tasks=[i // 4 for i in range(12)])
    return played, torch.tensor([1.0, -1.0, 0.4, -0.4, 0.005, 2.0, -0.7, -1.3, 0.6, 0.3, -0.2, -0.7])


def written_out(model, start_model, played, advantages, args, epochs, size):
    """The weights after an update, one rollout at a time and one token after the other, as the equations say it."""
    model, rng = copy.deepcopy(model), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)

    def logps(model, t):
        logp_TV = (model(torch.tensor([t.ids])).logits[0] / args.temperature).log_softmax(-1)
        return [[logp_TV[c - 1, t.ids[c]] for c in range(first, last)] for first, last in t.turns]

    with torch.no_grad():
        old, start = ([logps(m, t) for t in played] for m in (model, start_model))
    for _ in range(epochs):
        order = rng.permutation(len(played)).tolist()
        for first in range(0, len(order), size):
            chosen = [i for i in order[first : first + size] if abs(advantages[i]) >= 0.01]
            loss = torch.zeros(())
            for i in chosen:
                new, terms = logps(model, played[i]), []
                all_turns = sum(
                    n - o for row, before in zip(new, old[i], strict=True) for n, o in zip(row, before, strict=True)
                )
                for row, before, at_start in zip(new, old[i], start[i], strict=True):
                    turn = sum(n - o for n, o in zip(row, before, strict=True))
                    for n, o, s in zip(row, before, at_start, strict=True):
                        log_w = {"token": n - o, "turn": turn, "trajectory": all_turns}[args.level]
                        A, w = advantages[i].item(), log_w.exp()
                        lowest = 1 - args.clip if args.lower_bound == "minus" else 1 / (1 + args.clip)
                        gain = torch.minimum(w * A, torch.tensor((1 + args.clip if A > 0 else lowest) * A))
                        penalty = (s - n).exp() - (s - n) - 1
                        terms.append(args.kl * penalty - gain if args.variant == "grpo" else -gain)
                loss = loss + sum(terms) / len(terms) / size
            if not chosen:
                continue
            optimizer.zero_grad()
            loss.backward()
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad *= min(1.0, args.max_grad_norm / norm)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("variant", "epochs", "size", "changes"),
    [
        ("loop", 2, 5, {"level": "token"}),
        ("loop", 2, 5, {"level": "turn"}),
        ("loop", 2, 5, {"level": "trajectory"}),
        ("loop", 2, 5, {"level": "token", "lower_bound": "over", "clip": 0.4}),
        ("loop", 2, 5, {"level": "token", "max_grad_norm": 0.01}),
        ("loop-rwnorm", 2, 5, {"level": "token"}),
        ("rloo", 1, 12, {}),
        ("grpo", 1, 12, {"kl": 3.0}),
    ],
    ids=str,
)
def test_an_update_is_what_the_equations_say(warm, variant, epochs, size, changes):
    """Every switch against the loop above: E2 to E5 and E7, who is left out, what is divided by, how often, clipped."""
    args = small(variant=variant, temperature=0.7, minibatch=5, micro_batch=2, **{"clip": 0.02, "kl": 0.0} | changes)
    played, advantage_N = odd_returns(warm, args)
    start_model, model = copy.deepcopy(warm), copy.deepcopy(warm)
    with torch.no_grad():
        start_model.get_output_embeddings().weight[300:] *= 1.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    arguments = model, optimizer, played, advantage_N, args, np.random.default_rng(0)
    metrics = loop_ppo.update(*arguments, *([start_model] if variant == "grpo" else []))
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    expected = written_out(warm, start_model, played, advantage_N, args, epochs, size)
    before = torch.cat([p.detach().flatten() for p in warm.parameters()])
    # Adam makes steps of like size of all gradients, those near 0 included: the bulk must agree, not each weight.
    assert (found - expected).norm() < 0.02 * (expected - before).norm()
    assert metrics["update/grad_norm"] > 0 and metrics["update/stopped"] == 0


def test_e1_and_e6_reach_the_variants_that_name_them():
    played = [
        loop_ppo.Trajectory(i // 3, "", "", [], turns=[(0, 1)], rewards=[r]) for i, r in enumerate([1, 0, 0, 1, 1, 0])
    ]
    for variant, normalise in {"loop": False, "rloo": False, "grpo": True, "loop-rwnorm": True}.items():
        assert loop_ppo.VARIANTS[variant]["normalise"] is normalise
    _, plain, filtered = loop_ppo.advantages_of_groups(played, normalise=False)
    assert plain.tolist() == pytest.approx([1.0, -0.5, -0.5, 0.5, 0.5, -1.0]) and filtered == 0.0
    _, scaled, _ = loop_ppo.advantages_of_groups(played, normalise=True)
    assert scaled.tolist() == pytest.approx([x / 3**0.5 for x in (2, -1, -1, 1, 1, -2)], abs=1e-4)


def test_a_log_ratio_that_is_no_number_stops_the_iteration(warm, monkeypatch):
    played, advantage_N = odd_returns(warm, small())
    score = loop_ppo.score

    def broken(*given):
        logp_M, *others = score(*given)
        return (logp_M * torch.nan if torch.is_grad_enabled() else logp_M, *others)

    monkeypatch.setattr(loop_ppo, "score", broken)
    found, metrics = weights_after(warm, played, advantage_N, small())
    assert metrics["update/stopped"] == 1.0
    assert torch.equal(found, torch.cat([p.detach().flatten() for p in warm.parameters()]))


def test_main_hands_on_what_the_switches_say(tmp_path, monkeypatch):
    """The rate falls (D5), E6 where the variant has it, stragglers may go in training and only there."""
    rates, normalise, may_drop = [], [], []
    update, advantages, rollout = loop_ppo.update, loop_ppo.advantages_of_groups, loop_ppo.rollout

    def watched_update(model, optimizer, *others):
        rates.append(optimizer.param_groups[0]["lr"])
        return update(model, optimizer, *others)

    def watched_rollout(*given, **options):
        may_drop.append(options.get("may_drop", False))
        return rollout(*given, **options)

    monkeypatch.setattr(loop_ppo, "update", watched_update)
    monkeypatch.setattr(loop_ppo, "rollout", watched_rollout)
    monkeypatch.setattr(
        loop_ppo, "advantages_of_groups", lambda t, switch: normalise.append(switch) or advantages(t, switch)
    )
    run_of(tmp_path, iterations=4, lr=1e-3, variant="loop-rwnorm", eval_every=100)
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3]) and normalise == [True] * 4
    assert may_drop.count(True) == 4 and may_drop.count(False) > 0


def test_the_temperature_is_that_of_sampling_and_of_scoring(warm):
    """At temperature 0.5 against a plain forward pass; greedy play takes the likeliest token at every place."""
    args = small(temperature=0.5)
    played = play(warm, args, tasks=[i // 3 for i in range(12)])
    scored = loop_ppo.score(warm, played, args)[0].split([len(t.logps) for t in played])
    for t, logp_M in zip(played, scored, strict=True):
        with torch.no_grad():
            logp_TV = (warm(torch.tensor([t.ids])).logits[0].double() / 0.5).log_softmax(-1)
        expected = [logp_TV[c - 1, t.ids[c]].item() for first, last in t.turns for c in range(first, last)]
        assert t.logps == pytest.approx(expected, abs=5e-4) and logp_M.tolist() == pytest.approx(expected, abs=5e-4)
    logits = {"hot": 3.0, "cold": 0.2}
    spread = {
        name: len({tuple(t.ids) for t in play(warm, small(temperature=heat), tasks=[0] * 24)})
        for name, heat in logits.items()
    }
    assert spread["hot"] > spread["cold"], "and it is felt"
    for t in play(warm, small(), tasks=[0, 1, 2], greedy=True):
        with torch.no_grad():
            best_T = warm(torch.tensor([t.ids])).logits[0].argmax(-1)
        assert all(t.ids[c] == best_T[c - 1] for first, last in t.turns for c in range(first, last))


def test_a_prompt_is_read_once_and_nothing_is_read_again(warm):
    """Rows, and tokens in a row, of all forward passes. K rollouts share a prompt; a turn adds itself only."""
    shapes = []
    hook = warm.base_model.register_forward_pre_hook(
        lambda _, args, options: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    played = play(warm, small(), tasks=[i // 6 for i in range(24)])
    hook.remove()
    prompt = max(len(loop_ppo.prompt_ids(warm.tokenizer, t.start)) for t in played)
    reply = max(len(loop_ppo.reply_ids(warm.tokenizer, text)) for t in played for text in t.replies)
    assert shapes[0] == (4, prompt)
    assert max(tokens for _, tokens in shapes[1:]) <= reply + 2, "a reply, the end of a cut turn, its last token"
    assert shapes[1][0] == 24 and shapes[-1][0] < 24, "those that have ended leave"


def test_a_worlds_options_reach_it(capsys):
    (world,) = loop_ppo.make_worlds(small(env="apps", world="max_turns=3, max_output=99"), 1, "dev")
    assert (world.max_turns, world.sandbox.max_output) == (3, 99)
    world.close()
    for wrong in ("flavour=salt", "flavour", "split=dev", "reward=success", "max_turns=many", "max_turns=-1"):
        with pytest.raises(SystemExit):
            loop_ppo.make_worlds(small(env="apps", world=wrong), 1, "dev")
        (line,) = capsys.readouterr().err.splitlines()
        assert "--env apps: " in line and (wrong.partition("=")[0] in line or "str" in line), line


def test_tasks_may_be_played_some_at_a_time(tmp_path, monkeypatch):
    sizes, memory = [], loop_ppo.Memory

    def watched(model, prompts, copies):
        sizes.append(copies)
        return memory(model, prompts, copies)

    monkeypatch.setattr(loop_ppo, "evaluate", lambda *_: {"return": 0.0, "return_greedy": 0.0, "success": 0.0})
    monkeypatch.setattr(loop_ppo, "Memory", watched)
    made, make_worlds = [], loop_ppo.make_worlds
    monkeypatch.setattr(loop_ppo, "make_worlds", lambda *which: made.append(make_worlds(*which)) or made[-1])
    _, summary = run_of(tmp_path, iterations=1, tasks_at_a_time=2)
    assert sizes == [[4, 4], [4]] and summary["episodes"] == 12
    assert list(map(len, made)) == [8], "worlds are used again, as a server each may be dear"


def test_bfloat16_leaves_the_rotary_frequencies_alone(skilled):
    model = loop_ppo.make_model(small(model=skilled, dtype="bfloat16"), [])
    rotary = model.base_model.rotary_emb
    assert model.dtype == torch.bfloat16 and rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, rotary.original_inv_freq)


def test_a_run_that_is_stopped_plays_no_test_splits(tmp_path, monkeypatch):
    """Whoever types Ctrl-C does not wait for them; the summary says what is known."""
    played, update = [], loop_ppo.update

    def evaluated(model, args, split):
        played.append(split)
        return {"return": 0.0, "return_greedy": 0.0, "success": 0.0}

    def typed(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return update(*args)

    monkeypatch.setattr(loop_ppo, "evaluate", evaluated)
    _, summary = run_of(tmp_path / "whole", env="apps", iterations=1)
    assert played == 2 * ["dev", "test-normal", "test-challenge"] and "test_normal_success" in summary
    monkeypatch.setattr(loop_ppo, "update", typed)
    played.clear()
    _, summary = run_of(tmp_path / "stopped", env="apps", iterations=3)
    assert played == ["dev", "test-normal", "test-challenge"] and "test_normal_success" not in summary


def test_a_real_model_needs_no_demonstrations(tmp_path, skilled):
    folder, _ = run_of(tmp_path, iterations=1, model=skilled, demonstrations=-1)
    assert json.loads((folder / "args.json").read_text())["demonstrations"] == 0


def test_no_more_logits_than_a_chunk(warm):
    rows, played = [], play(warm, small())
    hook = warm.get_output_embeddings().register_forward_hook(lambda *given: rows.append(tuple(given[2].shape)))
    loop_ppo.score(warm, played, small(logit_chunk=5))
    hook.remove()
    assert {shape[0] for shape in rows[:-1]} == {5} and all(len(shape) == 2 for shape in rows)
    assert sum(shape[0] for shape in rows) == sum(len(t.logps) for t in played)


def test_worlds_step_side_by_side(warm):
    """Two that wait for each other: one after the other they would wait for ever."""
    both = threading.Barrier(2, timeout=20)

    class Together(Lookup):
        def step(self, action):
            if self.turn == 0:
                both.wait()
            return super().step(action)

    played = play(warm, small(world_threads=2), tasks=[0, 0], worlds=[Together(), Together()])
    assert all(t.fate == "ended" and len(t) for t in played)


def test_the_habits_are_counted():
    def rollout_of(*actions, replies=None, terminated=True):
        replies = replies or ["ok"] * len(actions)
        return loop_ppo.Trajectory(
            0, "", "", [], actions=list(actions), replies=replies, rewards=[0.5], terminated=terminated
        )

    nothing = rollout_of("apis.supervisor.complete_task()")
    whole = rollout_of("apis.mail.send(to='a')\napis.supervisor.complete_task()")
    gives_up = rollout_of("apis.mail.send()", "apis.supervisor.complete_task()", replies=["Exception: no", "done"])
    wordy = rollout_of(
        "```a```\n```b```", "# I assume a dummy id, assuming it\napis.api_docs.show_api_doc('a')", terminated=False
    )
    figures = loop_ppo.behaviour([nothing, whole, gives_up, wordy])
    assert figures["rollout/no_op"] == 0.25 and figures["rollout/truncated"] == 0.25
    assert figures["habit/gave_up"] == 0.5, "of those with two turns or more"
    assert figures["habit/many_cells"] == 1 / 6 and figures["habit/api_docs"] == 0.25
    assert figures["habit/assum"] == 0.5 and figures["habit/dummy"] == 0.25
    assert figures["rollout/length"] == 1.5 and figures["rollout/return"] == 0.5


def test_who_was_dropped_is_written_down_once(tmp_path, skilled, monkeypatch):
    monkeypatch.setattr(loop_ppo, "has_enough", lambda *_: True)
    folder, _ = run_of(tmp_path, iterations=1, model=skilled, warm_start_epochs=0)
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    dropped = json.loads((folder / "metrics.jsonl").read_text())["rollout/dropped"] * 12
    assert sum(row["fate"] == "dropped" for row in rows) == round(dropped) > 0


# ------------------------------------------------------------------------------------- words and chats


@pytest.mark.parametrize(
    "text",
    ["apis.mail.show(id=12)", "Ann Lee's mail", "a  b\n  c_d 12-05 ", "é 日本 🐕", "\x00\t\r", "12ab zz99 x", ""],
)
def test_the_vocabulary_can_write_every_text(warm, text):
    assert warm.tokenizer.decode(loop_ppo.encode(warm.tokenizer, text)) == text


def test_a_word_is_one_token_wherever_it_stands(warm):
    tokens = {tuple(loop_ppo.encode(warm.tokenizer, text)[-1:]) for text in ("ann", "of ann", "\nann", "'ann", "  ann")}
    assert len(tokens) == 1 and len(loop_ppo.encode(warm.tokenizer, "ann")) == 1


def test_a_chat_template_frames_prompts_and_replies(warm):
    tokenizer = copy.deepcopy(warm.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert loop_ppo.frame(tokenizer) == ("[user]", "[user]", "<|endoftext|>[assistant]")
    assert tokenizer.decode(loop_ppo.reply_ids(tokenizer, "ann")) == "[user]ann<|endoftext|>[assistant]"


def test_a_chat_template_with_another_end_of_turn_is_one_line(warm, capsys):
    """Else turns would not end where the model ends them."""
    tokenizer = copy.deepcopy(warm.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end_of_turn>{% endfor %}"
    with pytest.raises(SystemExit):
        loop_ppo.frame(tokenizer)
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "'<end_of_turn>[user]'" in line and "'<|endoftext|>'" in line


# ------------------------------------------------------------------------------------- whole runs


def run_of(tmp_path, **changes):
    summary = loop_ppo.main(small(runs=str(tmp_path), **changes))
    (folder,) = tmp_path.iterdir()
    return folder, summary


def results(folder):
    """What two runs of the same arguments share, and the last model's weights."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{tag: value for tag, value in row.items() if not tag.startswith("time/")} for row in rows]
    model = loop_ppo.newest_checkpoint(str(folder), "") / "actor" / "model.safetensors"
    return rows, (folder / "rollouts.jsonl").read_text(), model.read_bytes()


@pytest.mark.parametrize("variant", ["loop", "grpo"])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, skilled, variant):
    options = {"variant": variant, "model": skilled, "warm_start_epochs": 0, "anneal_lr": False}
    folder, _ = run_of(tmp_path / "whole", iterations=4, **options)
    half, _ = run_of(tmp_path / "half", iterations=2, eval_every=4, **options)
    saved = json.loads((half / "args.json").read_text())
    loop_ppo.main(loop_ppo.Args(**saved | {"resume": str(half), "iterations": 4, "eval_every": 10}))
    whole, resumed = results(folder), results(half)
    assert all(max(row["update/grad_norm"] for row in rows) > 0 for rows in (whole[0][:2], whole[0][2:])), "it learns"
    for row in whole[0] + resumed[0]:  # an evaluation at the end of the half run has no part in it
        for tag in [tag for tag in row if tag.startswith("eval/")]:
            del row[tag]
    assert whole == resumed


def test_a_run_without_a_start_model_cannot_go_on_as_grpo(tmp_path, capfd):
    folder, _ = run_of(tmp_path, iterations=1)
    saved = json.loads((folder / "args.json").read_text())
    with pytest.raises(SystemExit):
        loop_ppo.main(loop_ppo.Args(**saved | {"resume": str(folder), "iterations": 2, "variant": "grpo"}))
    assert "--variant grpo: this run has kept no start_model" in capfd.readouterr().err


def test_groups_that_all_earned_the_same_are_logged(tmp_path):
    """With one token a turn nobody can answer: every return is 0 and every group filtered."""
    folder, _ = run_of(tmp_path, iterations=1, max_action_tokens=1)
    assert results(folder)[0][0]["update/filtered"] == 1.0


def test_a_run_that_is_killed_goes_on(tmp_path):
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import envs, loop_ppo, test_loop_ppo as t\n"
        "envs.ENVS['lookup'] = envs.Entry('test_loop_ppo:Lookup', 'toy')\n"
        f"loop_ppo.main(t.small(runs={str(tmp_path)!r}, iterations=10_000, save_every=1))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not list(tmp_path.glob("*/checkpoints/000003")) and time.time() < deadline and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (folder,) = tmp_path.iterdir()
    saved = json.loads((folder / "args.json").read_text())
    last = int(loop_ppo.newest_checkpoint(str(folder), "").name)
    loop_ppo.main(loop_ppo.Args(**saved | {"resume": str(folder), "iterations": last + 1}))
    rows, _, _ = results(folder)
    assert [row["iteration"] for row in rows] == list(range(1, last + 2))


def test_the_summary_has_the_test_splits(tmp_path):
    folder, summary = run_of(tmp_path)
    for split in ("test_normal", "test_challenge"):
        for key in ("success", "scenarios", "questions", "success_greedy"):
            assert 0 <= summary[f"{split}_{key}"] <= 1 and 0 <= summary[f"{split}_warm_start_{key}"] <= 1
    assert json.loads((folder / "summary.json").read_text()) == summary


class Forgetful(Lookup):
    append_only = False


def test_a_world_that_rewrites_its_text_is_one_line(capfd):
    envs.ENVS["forgetful"] = envs.Entry(f"{__name__}:Forgetful", "a toy of the tests")
    try:
        with pytest.raises(SystemExit):
            loop_ppo.main(small(env="forgetful"))
    finally:
        del envs.ENVS["forgetful"]
    (line,) = capfd.readouterr().err.splitlines()
    assert "forgetful" in line and "must only grow" in line


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("tasks", 0, "--tasks 0: give at least 1"),
        ("rollouts", 1, "--rollouts 1: a rollout is judged by the others of its task; give at least 2"),
        ("temperature", 0.0, "--temperature 0.0: give more than 0"),
        ("width", 65, "--width 65: give a multiple of 32, the width of an attention head"),
        ("device", "nothing", "--device nothing: "),
        ("clip", 1.5, "--clip 1.5: give at least 0 and at most 1"),
        ("max_action_tokens", 2048, "--max-action-tokens 2048: --context 2048 has no room for a turn"),
    ],
)
def test_a_value_that_no_run_can_be_made_with_is_one_line(capfd, option, value, said):
    with pytest.raises(SystemExit) as stopped:
        loop_ppo.main(small(**{option: value}))
    (line,) = capfd.readouterr().err.splitlines()
    assert stopped.value.code == 2 and said in line


def test_lora_without_its_package_is_one_line(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit):
        loop_ppo.make_model(small(lora=True), ["a b c"])
    assert "pip install peft" in capfd.readouterr().err


@pytest.mark.external
def test_adapters_are_trained_saved_and_loaded_by_peft(tmp_path, warm):
    """Only the adapters move; peft itself loads what was saved, and a resumed run goes on with it."""
    peft = pytest.importorskip("peft", reason="needs the package peft")
    warm.save_pretrained(tmp_path / "base")
    warm.tokenizer.save_pretrained(tmp_path / "base")
    options = {"model": str(tmp_path / "base"), "lora": True, "warm_start_epochs": 0}
    args = small(**options)
    model = loop_ppo.make_model(args, [])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) > 0 and all(
        "lora" in n for n, p in model.named_parameters() if p.requires_grad
    )
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loop_ppo.update(model, optimizer, play(model, args), torch.ones(6), args, np.random.default_rng(0))
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    (tmp_path / "run").mkdir()
    loop_ppo.save(tmp_path / "run", {"iteration": 1}, model)

    checkpoint, ids = loop_ppo.newest_checkpoint(str(tmp_path / "run"), ""), torch.tensor([[5, 6, 7]])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before, after = base(ids).logits, model(ids).logits
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.allclose(peft.PeftModel.from_pretrained(base, checkpoint / "actor")(ids).logits, after, atol=1e-5)
    ours = loop_ppo.make_model(args, [], checkpoint)
    assert torch.allclose(ours(ids).logits, after, atol=1e-5)
    assert sum(p.requires_grad for p in ours.parameters()) == len(trained)
    for name, p in loop_ppo.make_model(replace(args, dtype="bfloat16"), [], checkpoint).named_parameters():
        if "lora" in name:  # the base is rounded, what was trained is not
            assert torch.equal(p, dict(model.named_parameters())[name])
    folder, _ = run_of(tmp_path / "runs", iterations=1, **options)
    saved = json.loads((folder / "args.json").read_text())
    loop_ppo.main(loop_ppo.Args(**saved | {"resume": str(folder), "iterations": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_toy_world_is_solved(tmp_path, seed):
    """LOOP learns always to look and to say what it saw; the warm start does so four times in ten."""
    options = {
        "width": 64,
        "drills": 9600,
        "demonstrations": 3000,
        "warm_start_epochs": 6,
        "eval_episodes": 0,
        "minibatch": 32,
    }
    _, summary = run_of(tmp_path, seed=seed, iterations=40, tasks=16, rollouts=6, eval_every=40, **options)
    assert summary["eval_success"] > summary["warm_start_return"] + 0.25
    assert summary["eval_return_greedy"] > 0.95
