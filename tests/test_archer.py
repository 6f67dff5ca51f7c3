"""What archer.py promises: its equations, that a batch is no more than its parts, and that a run can be resumed.

The worlds are Twenty Questions on ten words and a toy defined here; the models have one or two layers of 32. What an
actor or critic should compute is computed a second time: one utterance at a time, unpadded, by a plain forward pass.
"""

import copy
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import tyro
from tokenizers import processors
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import archer
import envs

ROOT = Path(archer.__file__).parent
WORDS = ["ant", "bee", "cow", "dog"]
CLUES = ["red", "blue", "green", "white"]
SUMMARY = "warm_start_return eval_return eval_return_greedy eval_success episodes seconds cpu_seconds peak_memory_mb"


# ------------------------------------------------------------------------------------- the toy worlds


class Toy(gymnasium.Env):
    """A clue each turn, and one of four words is right for it; 1 for the right word, 0 for any other text.

    Task i lasts i + 2 turns; those with even numbers end (terminated), the others are cut off (truncated). So
    dialogues have different lengths and both kinds of ends, and the returns of some players are known.
    """

    id = "toy"
    num_tasks = 4
    max_turns = 5
    max_action_chars = 12
    append_only = True
    best_return = 3.5  # mean of 2, 3, 4, 5
    random_return = 3.5 / 4

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        index = (options or {}).get("index")
        self.index = int(self.np_random.integers(4)) if index is None else index
        self.turn, self.total = 0, 0.0
        self.observation = f"{CLUES[self.index]}: "
        return self.observation, {"answer": WORDS[self.index]}

    def step(self, action):
        action = action.split("\n", 1)[0].strip()[: self.max_action_chars]
        right = action == WORDS[(self.index + self.turn) % 4]
        self.turn += 1
        self.total += right
        over = self.turn == self.index + 2
        clue = "" if over else f"{CLUES[(self.index + self.turn) % 4]}: "
        self.observation = self.follow(action, f" {'yes' if right else 'no'}\n{clue}")
        info = {"action": action}
        if over:
            success = self.total == self.turn
            info["episode"] = {"return": self.total, "length": self.turn, "success": success}
        return self.observation, float(right), over and self.index % 2 == 0, over and self.index % 2 == 1, info

    def follow(self, action, reply):
        return self.observation + action + reply

    def demonstrations(self, n, seed):
        """Uniformly random words: nothing in them says which word is right."""
        rng, made = np.random.default_rng(seed), []
        for i in range(n):
            observation, info = self.reset(options={"index": i % 4})
            d = {"observations": [observation], "actions": [], "rewards": [], "answer": info["answer"]}
            over = False
            while not over:
                action = WORDS[rng.integers(4)]
                observation, reward, terminated, truncated, _ = self.step(action)
                d["observations"].append(observation)
                d["actions"].append(action)
                d["rewards"].append(reward)
                over = terminated or truncated
            made.append(d | {"terminated": terminated, "truncated": truncated, "return": self.total})
        return made


class ForgetfulToy(Toy):
    """The same, but an observation has the last turn only: it does not begin with the one before."""

    id = "forgetful-toy"
    append_only = False

    def follow(self, action, reply):
        return f"{self.index + 2 - self.turn} to go, after {action or 'nothing'}:{reply}"


@pytest.fixture(autouse=True, scope="module")
def toys():
    """The toys are worlds of the registry while these tests run."""
    for toy in (Toy, ForgetfulToy):
        envs.ENVS[toy.id] = envs.Entry(f"{toy.__module__}:{toy.__name__}", "a toy of the tests")
    yield
    for toy in (Toy, ForgetfulToy):
        del envs.ENVS[toy.id]


@pytest.fixture(autouse=True)
def one_thread():
    """Bits repeat on one thread only; and `main` takes over Ctrl-C, which pytest wants back."""
    torch.set_num_threads(1)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


BOTH = pytest.mark.parametrize("world", ["toy", "forgetful-toy"])
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.7])


def small(**changes) -> archer.Args:
    """Arguments that make a run small."""
    return archer.Args(
        **{
            "env": "toy",
            "seed": 3,
            "iterations": 2,
            "rollouts": 4,
            "demonstrations": 40,
            "warm_start_epochs": 1,
            "warm_start_batch": 8,
            "width": 32,
            "layers": 1,
            "vocabulary": 300,
            "max_action_tokens": 6,
            "critic_updates": 2,
            "critic_batch": 3,
            "critic_pool": 4,
            "critic_warmup": 0,
            "actor_updates": 1,
            "actor_batch": 3,
            "eval_every": 2,
            "eval_episodes": 4,
            "save_every": 2,
            "threads": 1,
        }
        | {key: str(value) if isinstance(value, Path) else value for key, value in changes.items()}
    )


# --------------------------------------------------------------------------- what the tests compute themselves


@pytest.fixture(scope="module")
def tokenizer(toys):
    texts = [d["observations"][-1] for d in Toy().demonstrations(200, seed=0)]
    tokenizer = archer.make_tokenizer(texts, 300)
    tokenizer.__dict__["of_actor"] = True
    return tokenizer


@pytest.fixture
def actor(tokenizer):
    """An untrained actor that says odd things: any bytes, blanks at the ends, empty lines, lines without an end.

    A bias on its output makes newlines and blanks likely; without one an utterance would hardly ever end.
    """
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=1024, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    actor = GPT2LMHeadModel(config).eval()
    head = torch.nn.Linear(32, len(tokenizer))
    head.weight.data = actor.lm_head.weight.data.clone()
    head.bias.data.zero_()
    head.bias.data[archer.encode(tokenizer, "\n")[0]] = 4.0
    head.bias.data[archer.encode(tokenizer, " ")[0]] = 3.0
    actor.lm_head = head
    actor.tokenizer = tokenizer
    return actor


def make_critic(actor, tokenizer, append_only, kind="tiny", seed=0):
    """A critic whose values differ: its heads are random, not at their small start."""
    torch.manual_seed(seed)
    critic = archer.make_critic(small(), kind, actor, append_only, 0.5)
    for parameter in critic.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return critic


def play(world, actor, tokenizer, n=8, seed=0, **changes):
    """`n` dialogues of the actor, tasks in turn, and the nll of every utterance."""
    worlds, generator = envs.VecTextEnv(world, n), torch.Generator().manual_seed(seed)
    indices = [i % worlds.envs[0].num_tasks for i in range(n)]
    greedy = changes.pop("greedy", False)
    return archer.rollout(actor, worlds, small(**changes), generator, None, indices, greedy)


def fresh_for(trajectories, actor, tokenizer, append_only, **changes):
    generator = torch.Generator().manual_seed(5)
    return archer.fresh_utterances(actor, trajectories, append_only, small(**changes), generator)


@torch.no_grad()
def plain_logps(actor, before, ids, temperature=1.0):
    """log pi of each token of `ids` after `before`: one unpadded forward pass, softmax in float64."""
    logits = actor(input_ids=torch.tensor([before + ids])).logits[0].double() / temperature
    return [logits[len(before) + k - 1].log_softmax(-1)[token].item() for k, token in enumerate(ids)]


def contexts(trajectory, tokenizer, append_only):
    """The tokens that stand before the utterance of each state."""
    trunks, states = archer.lay_out([trajectory], tokenizer, append_only)
    return [trunks[row][:length] for row, length in states]


def utterances_of(trajectories, fresh, tokenizer, append_only):
    """Trunks and the utterances `fresh` in the states in which one was made, as `score` takes them."""
    trunks, states = archer.lay_out(trajectories, tokenizer, append_only)
    ids = [ids for t, row in zip(trajectories, fresh, strict=True) for ids in row[: len(t)]]
    acted = archer.states_acted(trajectories)
    return trunks, [(*states[s], x) for s, x in zip(acted, ids, strict=True)]


@torch.no_grad()
def value_alone(critic, trajectory, state, text):
    """V and Q [2] in float64 of one state and one utterance, in a batch of nothing else."""
    v_S2, q_12 = critic([trajectory], [state], [text])
    return v_S2[state].double(), q_12[0].double()


def still(*modules):
    """An optimiser that leaves everything where it is, so that only the gradient remains."""
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.0)


def gradient(module):
    return torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in module.parameters()])


# ---------------------------------------------------------------------------------------- the equations


@pytest.fixture
def numbers():
    """Q and V of five utterances and the tokens of each: lengths 3, 1, 4, 2, 2."""
    torch.manual_seed(1)
    owner_M = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4])
    return torch.randn(5, 2), torch.randn(5, 2), torch.randn(12) - 2, torch.randn(12), owner_M


def test_E1_td_target(numbers):
    next_v, _, _, _, _ = numbers
    reward, terminated = [-1.0, 0.0, -1.0, 2.0, 0.5], [0.0, 1.0, 0.0, 0.0, 1.0]
    target = archer.td_target(torch.tensor(reward), next_v, torch.tensor(terminated), 0.9)
    for n in range(5):
        for twin in range(2):
            bootstrap = 0.0 if terminated[n] else 0.9 * next_v[n, twin].item()
            assert target[n, twin].item() == pytest.approx(reward[n] + bootstrap, abs=1e-6)


def test_E2_value_loss_is_half_the_square(numbers):
    """Summed over the twins, mean over the rest; the half is what expectile 0.5 makes of a square."""
    v, q, _, _, _ = numbers
    total = sum(0.5 * (q[n, twin].item() - v[n, twin].item()) ** 2 for n in range(5) for twin in range(2))
    assert archer.value_loss(v, q).item() == pytest.approx(total / 5, rel=1e-6)


def test_E6_value_loss_weighs_what_lies_above(numbers):
    v, q, _, _, _ = numbers
    total = 0.0
    for n in range(5):
        for twin in range(2):
            gap = q[n, twin].item() - v[n, twin].item()
            total += (0.8 if gap > 0 else 0.2) * gap**2
    assert archer.value_loss(v, q, 0.8).item() == pytest.approx(total / 5, rel=1e-6)


def test_E6_pulls_v_above_the_mean():
    """The minimiser of the expectile 0.9 of {0, 1} is 0.9; a swapped sign would give 0.1."""
    grid = torch.linspace(0, 1, 1001)
    losses = [archer.value_loss(v.expand(2, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]]), 0.9).item() for v in grid]
    assert grid[int(np.argmin(losses))].item() == pytest.approx(0.9, abs=2e-3)


def test_E2_E6_the_target_q_gets_the_gradient_that_v_gets():
    """No detach is hidden in the loss: what stands still is for the caller to say (by no_grad at the target)."""
    v, q = torch.zeros(3, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    archer.value_loss(v, q).backward()
    assert torch.allclose(v.grad, torch.full((3, 2), -1 / 3)) and torch.equal(q.grad, -v.grad)


def test_mc_returns():
    rewards, gamma = [-1.0, 0.5, -2.0, 3.0], 0.9
    expected = [sum(gamma ** (j - i) * rewards[j] for j in range(i, 4)) for i in range(4)]
    assert archer.mc_returns(rewards, gamma) == pytest.approx(expected)


def test_E3_advantages_take_the_minimum_of_each_twin_apart(numbers):
    """min Q - min V is not min(Q - V)."""
    v, q, _, _, _ = numbers
    expected = [min(q[n].tolist()) - min(v[n].tolist()) for n in range(5)]
    assert archer.advantages(q, v).tolist() == pytest.approx(expected, rel=1e-6)
    assert expected != pytest.approx((q - v).min(-1).values.tolist(), rel=1e-3)


@pytest.mark.parametrize("with_baseline", [False, True], ids=["E3", "E4"])
def test_E3_E4_reinforce_loss(numbers, with_baseline):
    q, _, logp, baseline, owner = numbers
    advantage, total = q[:, 0], 0.0
    for i in range(12):
        weight = advantage[owner[i]].item() - (baseline[i].item() if with_baseline else 0.0)
        total -= logp[i].item() * weight
    loss = archer.reinforce_loss(logp, advantage, owner, *([baseline] if with_baseline else []))
    assert loss.item() == pytest.approx(total / 5, rel=1e-5)


def test_E3_E4_no_gradient_into_advantage_or_baseline(numbers):
    """Otherwise the actor's step would move the critic, or the baseline towards what makes the loss small."""
    q, _, logp, baseline, owner = numbers
    logp, advantage, baseline = (x.clone().requires_grad_() for x in (logp, q[:, 0], baseline))
    archer.reinforce_loss(logp, advantage, owner, baseline).backward()
    assert advantage.grad is None and baseline.grad is None and logp.grad.abs().min() > 0


def test_E5_baseline_loss(numbers):
    """Every utterance counts the same, however long it is."""
    q, _, _, baseline, owner = numbers
    advantage, total = q[:, 0], 0.0
    for n in range(5):
        mine = [i for i in range(12) if owner[i] == n]
        total += sum((advantage[n].item() - baseline[i].item()) ** 2 for i in mine) / len(mine)
    assert archer.baseline_loss(baseline, advantage, owner).item() == pytest.approx(total / 5, rel=1e-5)


def test_E5_no_gradient_into_advantage(numbers):
    q, _, _, baseline, owner = numbers
    advantage, baseline = q[:, 0].clone().requires_grad_(), baseline.clone().requires_grad_()
    archer.baseline_loss(baseline, advantage, owner).backward()
    assert advantage.grad is None and baseline.grad.abs().min() > 0


def test_D1_kl_divergence():
    """Of pi from the start policy, not the other way round; zero for equal ones, never below."""
    torch.manual_seed(0)
    logp, start = torch.randn(50, 9).log_softmax(-1), torch.randn(50, 9).log_softmax(-1)
    kl = archer.kl_divergence(logp, start)
    for m in range(50):
        p, p0 = logp[m].double().exp(), start[m].double().exp()
        expected = sum(p[x].item() * math.log(p[x].item() / p0[x].item()) for x in range(9))
        assert kl[m].item() == pytest.approx(expected, abs=1e-5)
    assert kl.min() >= 0 and archer.kl_divergence(logp, logp).abs().max() == 0


def test_polyak_update():
    torch.manual_seed(0)
    target, source = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    before, fixed = copy.deepcopy(target), copy.deepcopy(source)
    archer.polyak_update(target, source, 0.1)
    pairs = zip(target.parameters(), before.parameters(), source.parameters(), fixed.parameters(), strict=True)
    for now, old, new, same in pairs:
        assert torch.allclose(now, 0.9 * old + 0.1 * new) and torch.equal(new, same)


# ------------------------------------------------------------- sampler, scorer and a plain forward pass agree


@TEMPERATURES
@pytest.mark.parametrize("world", ["toy", "forgetful-toy", "twenty-questions-subset"])
def test_sampled_logp_is_the_plain_logp(actor, tokenizer, world, temperature):
    """The nll that `rollout` reports from its cache = that of the same tokens behind lay_out's tokens, alone.

    Fails when the cache holds something else than lay_out says (what the world did not take), when a position or the
    mask is off by one, when the temperature is forgotten, or when finished dialogues leave the wrong rows behind.
    """
    played, nll = play(world, actor, tokenizer, temperature=temperature)
    append_only = envs.make(world).append_only
    before = [contexts(t, tokenizer, append_only) for t in played]
    expected = [
        -sum(plain_logps(actor, before[i][k], t.action_ids[k], temperature))
        for k in range(max(map(len, played)))
        for i, t in enumerate(played)
        if len(t) > k
    ]
    assert nll == pytest.approx(expected, rel=1e-5, abs=1e-5)
    # The test is worth something only if the actor did say odd things.
    said = [(tokenizer.decode(ids[:-1]), a) for t in played for ids, a in zip(t.action_ids, t.actions, strict=True)]
    assert any(text and text == taken for text, taken in said) and any(text != taken for text, taken in said)
    assert any(taken == "" for _, taken in said)


@TEMPERATURES
@BOTH
def test_score_is_the_plain_logp(actor, tokenizer, world, temperature):
    """Fresh utterances, packed as forks behind their dialogues, against each of them in a plain forward pass."""
    played, _ = play(world, actor, tokenizer)
    append_only = envs.make(world).append_only
    fresh = fresh_for(played, actor, tokenizer, append_only, temperature=temperature)
    trunks, utterances = utterances_of(played, fresh, tokenizer, append_only)
    with torch.no_grad():
        logits_MV, token_M, hidden_MH, owner_M = archer.score(actor, trunks, utterances, temperature)
    logp_M = logits_MV.log_softmax(-1)[torch.arange(len(logits_MV)), token_M]
    expected = [
        x for row, length, ids in utterances for x in plain_logps(actor, trunks[row][:length], ids, temperature)
    ]
    assert logp_M.tolist() == pytest.approx(expected, abs=1e-5)
    assert token_M.tolist() == [x for _, _, ids in utterances for x in ids]
    assert owner_M.tolist() == [n for n, (_, _, ids) in enumerate(utterances) for _ in ids]
    assert len(hidden_MH) == len(expected)


@BOTH
def test_bfloat16_computes_so_but_keeps_small_steps(actor, tokenizer, world):
    """Fails with parameters in bfloat16, which a step of 1e-5 leaves where they are, and if nothing computes so."""
    played, _ = play(world, actor, tokenizer)
    append_only = envs.make(world).append_only
    fresh = fresh_for(played, actor, tokenizer, append_only)
    trunks, utterances = utterances_of(played, fresh, tokenizer, append_only)
    exact_MV = archer.score(actor, trunks, utterances, 1.0)[0]
    actor.config.compute_dtype = "bfloat16"
    logits_MV = archer.score(actor, trunks, utterances, 1.0)[0]
    assert logits_MV.dtype == torch.float32 and 1e-4 < (logits_MV - exact_MV).abs().max() < 0.3
    before = copy.deepcopy(actor.state_dict())
    archer.descend(logits_MV.var(), torch.optim.Adam(actor.parameters(), lr=1e-5), actor, 1.0, "actor")
    moved = [(new - before[name]).abs().max().item() for name, new in actor.state_dict().items()]
    assert sorted(moved)[len(moved) // 2] == pytest.approx(1e-5, rel=0.1)
    sampled = fresh_for(played, actor, tokenizer, append_only)  # the cache is in bfloat16, too
    assert [len(row) for row in sampled] == [len(t) + 1 for t in played]
    for kind in ("tiny", "tiny-cls"):
        critic = make_critic(actor, tokenizer, append_only, kind)
        said = [action for t in played for action in t.actions]
        exact = critic(played, archer.states_acted(played), said)[1]
        critic.body.config.compute_dtype = "bfloat16"
        rough = critic(played, archer.states_acted(played), said)[1]
        assert rough.dtype == torch.float32 and 0 < (rough - exact).abs().max() < 0.3


@TEMPERATURES
@BOTH
def test_sampled_logp_of_fresh_utterances_is_the_plain_logp(actor, tokenizer, world, temperature, monkeypatch):
    """Many forks on one cached, padded trunk: what `speak` says it drew them with is what they have."""
    played, _ = play(world, actor, tokenizer)
    append_only = envs.make(world).append_only
    drawn, speak = [], archer.speak

    def listen(*args, **options):
        drawn.append(speak(*args, **options))
        return drawn[-1]

    monkeypatch.setattr(archer, "speak", listen)
    fresh = fresh_for(played, actor, tokenizer, append_only, temperature=temperature)
    written, logps = [ids for part in drawn for ids in part[0]], [logp for part in drawn for logp in part[1].tolist()]
    flat = [(t, k, ids) for t, row in zip(played, fresh, strict=True) for k, ids in enumerate(row)]
    assert written == [ids for _, _, ids in flat]
    for (t, k, ids), logp in zip(flat, logps, strict=True):
        expected = plain_logps(actor, contexts(t, tokenizer, append_only)[k], ids, temperature)
        assert logp == pytest.approx(sum(expected), abs=1e-5)


def test_utterances_stop_at_the_end_of_turn_and_only_there(actor, tokenizer):
    """An utterance has an end of turn as its last token, or the full number of tokens and none."""
    played, _ = play("toy", actor, tokenizer)
    fresh = fresh_for(played, actor, tokenizer, True)
    enders = archer.turn_enders(tokenizer, actor.config.vocab_size)
    everything = [ids for t in played for ids in t.action_ids] + [ids for row in fresh for ids in row]
    assert all(not enders[ids[:-1]].any() for ids in everything)
    assert all(enders[ids[-1]] or len(ids) == 6 for ids in everything)
    assert {len(ids) for ids in everything} >= {1, 2, 3, 6}


def test_sample_draws_from_the_whole_softmax(actor, tokenizer):
    """Chi-square of 20,000 first tokens at temperature 0.7. Fails for a hidden top-k, top-p or temperature."""
    N, args = 20_000, small(max_action_tokens=1, temperature=0.7)
    before = archer.encode(tokenizer, "red: ")
    with torch.no_grad():
        p = (actor(input_ids=torch.tensor([before])).logits[0, -1].double() / 0.7).softmax(-1)
        generator = torch.Generator().manual_seed(1)
        written, logp_S, _ = archer.speak(actor, [before], [(0, len(before))] * N, args, generator)
    tokens = torch.tensor(written)
    assert tokens.shape == (N, 1)
    assert torch.allclose(logp_S.double(), p.log()[tokens[:, 0]], atol=1e-5)
    seen, expected = torch.bincount(tokens.flatten(), minlength=len(p)).double(), N * p
    rare = expected < 5  # too few for a chi-square: they make one class together
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    chi_square, freedom = ((seen - expected) ** 2 / expected).sum().item(), len(seen) - 1
    assert freedom > 60
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_utterances_of_one_token(actor, tokenizer):
    """The shortest limit: every utterance is cut, unless its only token is the end of the turn."""
    for world, append_only in (("toy", True), ("forgetful-toy", False)):
        played, nll = play(world, actor, tokenizer, max_action_tokens=1)
        assert all(len(ids) == 1 for t in played for ids in t.action_ids)
        before = contexts(played[0], tokenizer, append_only)
        assert nll[0] == pytest.approx(-plain_logps(actor, before[0], played[0].action_ids[0])[0], abs=1e-5)
        fresh = fresh_for(played, actor, tokenizer, append_only, max_action_tokens=1)
        assert all(len(ids) == 1 for row in fresh for ids in row)


def test_an_end_of_text_ends_the_turn_and_is_not_said(actor, tokenizer):
    """A model that closes its turn with its end-of-text token would otherwise say "<|endoftext|>" to the world."""
    ids = [*archer.encode(tokenizer, "ant"), tokenizer.eos_token_id]
    assert archer.turn_enders(tokenizer, actor.config.vocab_size)[tokenizer.eos_token_id]
    assert archer.spoken(tokenizer, ids) == "ant"
    actor.lm_head.bias.data[tokenizer.eos_token_id] = 100.0
    played, _ = play("toy", actor, tokenizer, n=2)
    assert [action for t in played for action in t.actions] == [""] * 5


def test_spoken_is_what_the_world_takes(actor, tokenizer):
    """The critic judges fresh utterances by this text and learns from what worlds took: they must not differ."""
    worlds = [Toy(), envs.make("twenty-questions-subset")]
    texts = [" ant\n", "ant \n", "\n", "  \n", "a\nb", "ant", "\t ant\t\n"]
    for ids in [archer.encode(tokenizer, text) for text in texts]:
        for world in worlds:
            world.reset(options={"index": 0})
            assert world.step(tokenizer.decode(ids))[-1]["action"] == archer.spoken(tokenizer, ids)


# --------------------------------------------------------------------- a batch is no more than its parts


@BOTH
def test_score_of_a_batch_is_that_of_its_parts(actor, tokenizer, world):
    """Dialogues of other lengths beside it, or another order of them, change no log-prob."""
    played, _ = play(world, actor, tokenizer)
    append_only = envs.make(world).append_only
    fresh = fresh_for(played, actor, tokenizer, append_only)

    @torch.no_grad()
    def logits(which):
        part = [played[i] for i in which]
        packed = utterances_of(part, [fresh[i] for i in which], tokenizer, append_only)
        split = [sum(len(ids) for ids in fresh[i][: len(played[i])]) for i in which]
        return dict(zip(which, archer.score(actor, *packed, 1.0)[0].split(split), strict=True))

    together, reversed_ = logits(list(range(8))), logits(list(range(7, -1, -1)))
    for i in range(8):
        assert torch.allclose(together[i], logits([i])[i], atol=1e-5)
        assert torch.allclose(together[i], reversed_[i], atol=1e-5)


@pytest.mark.parametrize("kind", ["tiny", "tiny-cls"])
@BOTH
def test_critic_of_a_batch_is_that_of_its_parts(actor, tokenizer, world, kind):
    played, _ = play(world, actor, tokenizer)
    append_only = envs.make(world).append_only
    critic = make_critic(actor, tokenizer, append_only, kind)
    with torch.no_grad():
        v_S2, q_N2 = critic(played, archer.states_acted(played), [a for t in played for a in t.actions])
        v_alone, q_alone = [], []
        for t in played:
            v, q = critic([t], list(range(len(t))), t.actions)
            v_alone.append(v)
            q_alone.append(q)
    assert v_S2.shape == (sum(len(t) + 1 for t in played), 2) and v_S2.std() > 0.01
    assert torch.allclose(v_S2, torch.cat(v_alone), atol=1e-5)
    assert torch.allclose(q_N2, torch.cat(q_alone), atol=1e-5)


@BOTH
def test_greedy_rollout_of_a_batch_is_that_of_its_parts(actor, tokenizer, world):
    together, nll = play(world, actor, tokenizer, n=4, greedy=True)
    total = 0.0
    for i, t in enumerate(together):
        worlds, generator = envs.VecTextEnv(world, 1), torch.Generator()
        (alone,), own = archer.rollout(actor, worlds, small(), generator, None, [i], True)
        assert (alone.observations, alone.action_ids) == (t.observations, t.action_ids)
        assert (alone.rewards, alone.terminated, alone.answer) == (t.rewards, t.terminated, t.answer)
        total += sum(own)
    assert sum(nll) == pytest.approx(total, rel=1e-5)


def test_padding_is_as_no_padding(actor, tokenizer):
    """`pack` pads on the right, behind dialogues and their forks: a token has the hidden state that it has alone."""
    texts = ["red: ", "red: ant yes\nblue: cow no\ngreen: ", "white: dog yes\n"]
    pieces = [archer.encode(tokenizer, text) for text in texts]
    more = [archer.encode(tokenizer, text) for text in ("bee no\nwhite: ", "dog", "ant yes\n")]
    *packed, columns = archer.pack(pieces, [(i, len(pieces[i]), more[i]) for i in range(3)])
    with torch.no_grad():
        hidden, _ = archer.forward(actor.base_model, *packed)
    for i in range(3):
        with torch.no_grad():
            alone = actor.base_model(input_ids=torch.tensor([pieces[i] + more[i]])).last_hidden_state[0]
        assert torch.allclose(hidden[i, : len(pieces[i])], alone[: len(pieces[i])], atol=1e-5)
        assert torch.allclose(hidden[i, columns[i]], alone[len(pieces[i]) - 1 :], atol=1e-5)


@TEMPERATURES
def test_a_cache_read_in_pieces_is_one_text(actor, tokenizer, temperature):
    """`speak` pads on the right, so that its memory has gaps: nobody sees them, and no position counts them.

    Nor does it keep what was said: a world may go on with something else.
    """
    texts = [
        "red: |ant yes\nblue: |cow",
        "red: ant yes\nblue: cow no\ngreen: |dog| no\nwhite: ",
        "a|white: dog yes\n|b",
    ]
    args, memory, trunks = small(temperature=temperature), None, [[], [], []]
    generator = torch.Generator().manual_seed(4)
    for piece in range(3):
        more = [archer.encode(tokenizer, text.split("|")[piece]) for text in texts]
        trunks = [trunk + ids for trunk, ids in zip(trunks, more, strict=True)]
        # Two states a trunk, the second-last position where the new piece has one.
        states = [(b, len(t) - k) for b, t in enumerate(trunks) for k in ((1, 0) if len(more[b]) > 1 else (0,))]
        with torch.no_grad():
            written, logp_S, memory = archer.speak(actor, trunks, states, args, generator, memory=memory)
        assert memory[1].sum(1).tolist() == [len(trunk) for trunk in trunks]
        assert memory[0].get_seq_length() == memory[1].shape[1]
        for (b, length), ids, logp in zip(states, written, logp_S.tolist(), strict=True):
            assert logp == pytest.approx(sum(plain_logps(actor, trunks[b][:length], ids, temperature)), abs=1e-5)


def test_the_token_that_pads_may_occur_in_the_text(actor, tokenizer):
    """pad == eos is safe: masks come from lengths, so token 0 is a token like any other where it really stands."""
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    trunks = [[5, 0, 0, 7], [0, 9, 8, 0, 0, 11, 0], [4]]
    utterances = [(0, 2, [0, 0, 3]), (0, 4, [0]), (1, 7, [6, 0]), (1, 1, [9, 0, 0, 2]), (2, 1, [0, 0])]
    with torch.no_grad():
        logits_MV, token_M, _, _ = archer.score(actor, trunks, utterances, 1.0)
    logp = logits_MV.log_softmax(-1)[torch.arange(len(logits_MV)), token_M].tolist()
    expected = [x for row, start, ids in utterances for x in plain_logps(actor, trunks[row][:start], ids)]
    assert logp == pytest.approx(expected, abs=1e-5)


def test_dropout_is_off(tmp_path, tokenizer):
    """A checkpoint's own dropout would make the scorer another policy than the sampler."""
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    actor = archer.make_actor(small(), str(tmp_path), [])
    critic = archer.make_critic(small(), str(tmp_path), actor, True, 0.0)
    tiny = archer.make_actor(small(), "tiny", ["Is it a dog? No.\n"] * 9)
    made = [tiny, *(archer.make_critic(small(), kind, tiny, True, 0.0) for kind in ("tiny", "tiny-cls")), actor, critic]
    assert not any(module.training for model in made for module in model.modules())


def test_an_utterance_that_has_ended_needs_no_room_any_more(actor, monkeypatch):
    """One at the end of the context ends at once; the other, far from it, is not stopped for that."""
    room = actor.config.n_positions
    half = torch.arange(len(actor.get_output_embeddings().weight)) % 2 == 0
    monkeypatch.setattr(archer, "turn_enders", lambda tokenizer, size: half)
    trunks, states, met = [[5] * (room - 2), [5] * 3], [(0, room - 2), (1, 3)], 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        try:
            (near, far), *_ = archer.speak(actor, trunks, states, small(max_action_tokens=8), generator)
        except SystemExit:
            continue  # the one at the end had not ended
        met += len(near) <= 2 and len(far) >= 5
    assert met


def test_a_critics_other_vocabulary_does_not_swallow_ids(tokenizer):
    """An empty action of ids that another tokenizer knows: they are not kept, as what does not know them reads none."""
    unknown = len(tokenizer) + 100
    assert archer.turn_ids(tokenizer, "", "No.\n", (unknown, 0)) == archer.encode(tokenizer, "No.\n")


# ------------------------------------------------------------------------------------ packing and layouts


def test_many_rows_are_read_by_length_and_nothing_changes(actor):
    """More than 64 rows go through the model in parts; every row's hidden states and the gradients stay the same."""
    rng = np.random.default_rng(0)
    trunks = [rng.integers(1, 200, size=n).tolist() for n in [90, 1, *rng.integers(1, 12, size=148)]]
    forks = [(row, len(trunk), [7] * (1 + row % 3)) for row, trunk in enumerate(trunks)]
    *packed, columns = archer.pack(trunks, forks)
    together, _ = archer.forward(actor.base_model, *packed)
    weight = actor.base_model.h[0].mlp.c_fc.weight
    (gradient,) = torch.autograd.grad(sum(together[row, own].sum() for row, own in enumerate(columns)), weight)
    alone = [
        archer.forward(actor.base_model, *archer.pack([t], [(0, *fork[1:])])[:3])[0]
        for t, fork in zip(trunks, forks, strict=True)
    ]
    for row, (own, hidden) in enumerate(zip(columns, alone, strict=True)):
        assert torch.allclose(together[row, own], hidden[0, own], atol=1e-5), row
    total = sum(hidden[0, own].sum() for own, hidden in zip(columns, alone, strict=True))
    assert torch.allclose(gradient, torch.autograd.grad(total, weight)[0], rtol=1e-4, atol=1e-3)


def test_pack_shares_what_the_trunk_goes_on_with():
    """An utterance that the trunk itself goes on with takes no room of its own; a fork takes its rest."""
    ids, position, _, columns = archer.pack([[10, 11, 12, 13]], [(0, 2, [12, 13]), (0, 2, [12, 7]), (0, 1, [8, 9])])
    assert ids[0].tolist() == [10, 11, 12, 13, 7, 8, 9]
    assert position[0].tolist() == [0, 1, 2, 3, 3, 1, 2]
    assert columns == [[1, 2, 3], [1, 2, 4], [0, 5, 6]]


def test_a_fork_sees_its_past_and_nothing_else():
    """Naive visibility: a token sees those whose path it continues."""
    trunks, utterances = [[10, 11, 12, 13], [10, 20]], [(0, 2, [12, 7, 6]), (0, 2, [5]), (1, 2, [4, 3]), (0, 4, [2])]
    ids, position, visible, columns = archer.pack(trunks, utterances)
    path = {(row, c): list(range(c + 1)) for row, trunk in enumerate(trunks) for c in range(len(trunk))}
    for (row, start, _), column in zip(utterances, columns, strict=True):
        whole = [*range(start), *column[1:]]
        path |= {(row, c): whole[: k + 1] for k, c in enumerate(whole) if c >= len(trunks[row])}
    for (row, c), sees in path.items():
        assert visible[row, c].nonzero().flatten().tolist() == sees
        assert position[row, c] == len(sees) - 1
    for (row, start, said), column in zip(utterances, columns, strict=True):
        assert [ids[row, c].item() for c in column] == [trunks[row][start - 1], *said]


def test_sharing_changes_nothing(actor, tokenizer):
    """The same utterances behind trunks that end where they begin, so that there is nothing to share."""
    trunk = [x for letter in "red: ant yes\nblue: cow no\n" for x in archer.encode(tokenizer, letter)]
    utterances = [(0, start, trunk[start : start + 5]) for start in range(1, len(trunk) - 5)]
    apart = [(n, start, ids) for n, (_, start, ids) in enumerate(utterances)]
    with torch.no_grad():
        shared = archer.score(actor, [trunk], utterances, 1.0)[0]
        unshared = archer.score(actor, [trunk[:start] for _, start, _ in utterances], apart, 1.0)[0]
    assert torch.allclose(shared, unshared, atol=1e-5)


def said(tokenizer, action, ids):
    """A dialogue of one turn in which `ids` were sampled and the world took `action`."""
    return archer.Trajectory(["red: ", f"red: {action} no\n"], [action], [0.0], True, "ant", [ids])


def test_lay_out_keeps_the_sampled_tokens(tokenizer):
    """Letter by letter is not how the tokenizer would write "ant", but it is what was sampled."""
    letters = [archer.encode(tokenizer, letter)[0] for letter in "ant"]
    assert letters != archer.encode(tokenizer, "ant")
    t = said(tokenizer, "ant", [*letters, *archer.encode(tokenizer, "\n")])
    before, after = archer.encode(tokenizer, "red: "), archer.encode(tokenizer, " no\n")
    trunks, states = archer.lay_out([t], tokenizer, True)
    assert trunks == [before + letters + after]
    assert states == [(0, len(before)), (0, len(before + letters + after))]


@pytest.mark.parametrize("sampled", [" ant\n", "ant \n", "ant, of course\n", "\n"])
def test_lay_out_writes_what_the_world_took(tokenizer, sampled):
    """Where the world stripped or cut an utterance, the dialogue goes on with what it took."""
    taken = sampled.strip()[:3]
    trunks, _ = archer.lay_out([said(tokenizer, taken, archer.encode(tokenizer, sampled))], tokenizer, True)
    expected = [x for text in ("red: ", taken, " no\n") for x in archer.encode(tokenizer, text)]
    assert trunks == [expected]


def test_lay_out_of_an_utterance_without_an_end(tokenizer):
    """Cut at the limit, its last token is a word like the others and may not be dropped."""
    trunks, _ = archer.lay_out([said(tokenizer, "ant bee", archer.encode(tokenizer, "ant bee"))], tokenizer, True)
    assert tokenizer.decode(trunks[0]) == "red: ant bee no\n"


@BOTH
def test_lay_out_spells_the_observations(actor, tokenizer, world):
    """Whatever was said, the tokens before each state spell its observation."""
    append_only = envs.make(world).append_only
    for t in play(world, actor, tokenizer)[0]:
        plain = [tokenizer.decode(x) for x in contexts(t, tokenizer, append_only)]
        readable = [text for text in zip(plain, t.observations, strict=True) if "\ufffd" not in "".join(text)]
        assert all(a == b for a, b in readable) and plain[0] == t.observations[0]


# ---------------------------------------------------------------------------------------------- the updates


@pytest.mark.parametrize("kind", ["tiny", "tiny-cls"])
def test_critic_reads_what_it_should(actor, tokenizer, kind):
    """V at the last token of a state, Q at the end of turn of an utterance; an encoder reads both texts apart."""
    played, _ = play("toy", actor, tokenizer, n=4)
    critic = make_critic(actor, tokenizer, True, kind)
    t, body = played[2], critic.body
    v_S2, q_N2 = critic(played[2:3], [1], ["bee"])
    before = contexts(t, tokenizer, True)[1]
    with torch.no_grad():
        if kind == "tiny":
            end = archer.encode(tokenizer, "bee") + archer.encode(tokenizer, "\n")
            v_H = body(input_ids=torch.tensor([before])).last_hidden_state[0, -1]
            q_H = body(input_ids=torch.tensor([before + end])).last_hidden_state[0, -1]
        else:
            texts = [[0, *archer.encode(tokenizer, text)] for text in (t.observations[1], "bee")]
            v_H, a_H = (body(input_ids=torch.tensor([ids])).last_hidden_state[0, 0] for ids in texts)
            q_H = torch.cat([v_H, a_H])
        v = torch.cat([head(v_H) for head in critic.v_heads])
        q = torch.cat([head(q_H) for head in critic.q_heads])
    assert torch.allclose(v_S2[1], v, atol=1e-5) and torch.allclose(q_N2[0], q, atol=1e-5)
    assert abs(v[0] - v[1]) > 1e-3 and abs(q[0] - q[1]) > 1e-3


def test_an_encoder_cuts_the_beginning_of_a_text_that_is_too_long(actor, tokenizer):
    """BERT reads 512 tokens; of a longer dialogue the last ones matter most."""
    critic = make_critic(actor, tokenizer, True, "tiny-cls")
    long = "red: ant yes\n" * 400
    with torch.no_grad():
        cls = critic.cls([long + "a", "blue: " + long + "a", long + "b"])
    assert torch.allclose(cls[0], cls[1], atol=1e-5) and not torch.allclose(cls[0], cls[2], atol=1e-4)


@pytest.mark.parametrize("truncation_is_terminal", [True, False])
@pytest.mark.parametrize("loss", ["td", "mc", "iql"])
@BOTH
def test_critic_update_is_E1_and_E2(actor, tokenizer, world, loss, truncation_is_terminal):
    """Its losses against a loop over single utterances: who bootstraps, from which state, with which utterance.

    Fails when a time limit counts as an end or an end as a time limit, when the states of neighbouring dialogues
    are mixed up, or when V learns from the wrong utterance.
    """
    append_only = envs.make(world).append_only
    played, _ = play(world, actor, tokenizer, n=4)  # tasks 0 and 2 terminate, 1 and 3 are cut off
    for n, t in enumerate(played):
        t.rewards = [0.3 * n - k for k in range(len(t))]
    critic, target = (make_critic(actor, tokenizer, append_only, seed=seed) for seed in (1, 2))
    fresh = [[WORDS[(n + k) % 4] for k in range(len(t) + 1)] for n, t in enumerate(played)]
    args = small(gamma=0.8, critic_loss=loss, expectile=0.7, polyak=0.0, truncation_is_terminal=truncation_is_terminal)

    q_terms, v_terms = [], []
    for t, row in zip(played, fresh, strict=True):
        over = t.terminated or truncation_is_terminal
        returns = [sum(0.8 ** (j - k) * t.rewards[j] for j in range(k, len(t))) for k in range(len(t))]
        for k in range(len(t) + 1):
            v, _ = value_alone(critic, t, k, "ant")
            if k < len(t):
                _, q = value_alone(critic, t, k, t.actions[k])
                next_v, _ = value_alone(target, t, k + 1, "ant")
                bootstrap = 0.0 if over and k == len(t) - 1 else 0.8 * next_v
                goal = returns[k] if loss == "mc" else t.rewards[k] + bootstrap
                q_terms.append(((q - goal) ** 2).mean().item())
            elif over or loss != "td":
                continue  # V of an end is never asked for; mc and iql know no utterance there
            if loss == "mc":
                gap = returns[k] - v
            else:
                gap = value_alone(target, t, k, row[k] if loss == "td" else t.actions[k])[1] - v
            share = 0.7 if loss == "iql" else 0.5
            v_terms.append(sum((share if g > 0 else 1 - share) * g.item() ** 2 for g in gap))

    metrics = archer.critic_update(critic, target, still(critic), played, fresh, args)
    assert metrics["critic/q_loss"] == pytest.approx(np.mean(q_terms), rel=1e-4)
    assert metrics["critic/v_loss"] == pytest.approx(np.mean(v_terms), rel=1e-4)


def test_the_critics_error_is_that_against_monte_carlo(actor, tokenizer):
    """Its two figures from the returns and V of each state, one by one."""
    played, _ = play("toy", actor, tokenizer, n=4)
    for n, t in enumerate(played):
        t.rewards = [0.3 * n - k for k in range(len(t))]
    critic = make_critic(actor, tokenizer, True, seed=1)
    v = [[value_alone(critic, t, k, "ant")[0].mean().item() for k in range(len(t))] for t in played]
    g = [[sum(0.8 ** (j - k) * t.rewards[j] for j in range(k, len(t))) for k in range(len(t))] for t in played]
    fresh = [["ant"] * (len(t) + 1) for t in played]
    metrics = archer.critic_update(critic, copy.deepcopy(critic), still(critic), played, fresh, small(gamma=0.8))
    first = np.mean([values[0] - returns[0] for values, returns in zip(v, g, strict=True)])
    flat = np.concatenate(v) - np.concatenate(g)
    explained = 1 - flat.var(ddof=1) / np.concatenate(g).var(ddof=1)
    assert metrics["critic/bias"] == pytest.approx(first, rel=1e-4)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-3)


@pytest.mark.parametrize("kind", ["tiny", "tiny-cls"])
def test_D4_a_new_critic_says_the_mean_return(actor, kind):
    """Near enough: only the last bias is set, what lies before it is drawn."""
    critic = archer.make_critic(small(critic=kind), kind, actor, True, -40.0)
    played, _ = play("toy", actor, actor.tokenizer, n=4)
    with torch.no_grad():
        v_S2, q_N2 = critic(played, [0, 1], ["ant", "bee"])
    assert (v_S2 + 40).abs().max() < 2 and (q_N2 + 40).abs().max() < 2


def test_D4_is_the_mean_discounted_return_of_the_first_dialogues(tmp_path, monkeypatch):
    asked, make = [], archer.make_critic
    monkeypatch.setattr(archer, "make_critic", lambda *given: asked.append(given) or make(*given))
    monkeypatch.setattr(archer, "critic_update", lambda *_: {"critic/q_loss": 0.0})
    run, _ = go(tmp_path, iterations=1, gamma=0.5, rollouts=8, buffer_size=10_000)
    first = lines_of(archer.newest_checkpoint(str(run), "--resume"), "replay.jsonl")[:8]
    expected = np.mean([sum(r * 0.5**k for k, r in enumerate(t["rewards"])) for t in first])
    assert asked[0][-1] == pytest.approx(expected)


def test_the_buffer_forgets_the_oldest(tmp_path, monkeypatch):
    """What is left is the end of what was played, and no more than the buffer may hold."""
    played, rollout = [], archer.rollout

    def listening(*given):
        dialogues, nll = rollout(*given)
        if len(given) == 5:  # not an evaluation, which says which tasks
            played.extend(t.observations for t in dialogues)
        return dialogues, nll

    monkeypatch.setattr(archer, "rollout", listening)
    run, _ = go(tmp_path, iterations=3, buffer_size=20)
    kept = lines_of(archer.newest_checkpoint(str(run), "--resume"), "replay.jsonl")
    assert 0 < len(kept) < len(played) == 16 and sum(len(t["actions"]) for t in kept) <= 20
    assert [t["observations"] for t in kept] == played[-len(kept) :]


def test_critic_update_moves_the_critic_and_the_target_after_it(actor, tokenizer):
    """The gradient goes into the critic only; then the target makes its Polyak step."""
    played, _ = play("toy", actor, tokenizer, n=4)
    critic, target = (make_critic(actor, tokenizer, True, seed=seed) for seed in (1, 2))
    target.requires_grad_(False)
    before = copy.deepcopy(target)
    fresh = [["ant"] * (len(t) + 1) for t in played]
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
    archer.critic_update(critic, target, optimizer, played, fresh, small(polyak=0.25))
    assert gradient(critic).norm() > 0
    for now, old, new in zip(target.parameters(), before.parameters(), critic.parameters(), strict=True):
        assert torch.allclose(now, 0.75 * old + 0.25 * new, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"center": False, "kl": 0.0}, {"baseline": True, "temperature": 0.7}], ids=str)
@BOTH
def test_actor_update_is_E3(actor, tokenizer, world, changes):
    """Its figures against a loop over single utterances and their tokens, end of turn included (E4, E5: --baseline)."""
    append_only = envs.make(world).append_only
    played, _ = play(world, actor, tokenizer, n=4)
    fresh = fresh_for(played, actor, tokenizer, append_only)
    critic = make_critic(actor, tokenizer, append_only)
    start = copy.deepcopy(actor)
    for parameter in start.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    args, baseline = small(**changes), archer.mlp(32, 32, 0.3)

    utterances = [(t, k, row[k]) for t, row in zip(played, fresh, strict=True) for k in range(len(t))]
    A = []
    for t, k, ids in utterances:
        v, q = value_alone(critic, t, k, archer.spoken(tokenizer, ids))
        A.append(q.min().item() - v.min().item())
    weights = [a - np.mean(A) for a in A] if args.center else A
    loss = kl = fit = 0.0
    for (t, k, ids), weight in zip(utterances, weights, strict=True):
        before = contexts(t, tokenizer, append_only)[k]
        with torch.no_grad():
            tokens = torch.tensor([before + ids])
            logits, start_logits = (x(input_ids=tokens).logits[0].double() for x in (actor, start))
            hidden = actor.base_model(input_ids=tokens).last_hidden_state[0]
        for i, token in enumerate(ids):
            at = len(before) + i - 1
            logp, start_logp = ((x[at] / args.temperature).log_softmax(-1) for x in (logits, start_logits))
            b = baseline(hidden[at]).item() if args.baseline else 0.0
            loss -= logp[token].item() * (weight - b) / len(A)
            kl += sum(math.exp(p) * (p - p0) for p, p0 in zip(*(x.tolist() for x in (logp, start_logp)), strict=True))
            fit += (weight - b) ** 2 / len(ids) / len(A)

    optimizer = still(actor, baseline)
    metrics = archer.actor_update(actor, start, critic, baseline, optimizer, played, fresh, append_only, args)
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-4)
    assert metrics["actor/kl"] == pytest.approx(kl / len(A), rel=1e-4)
    assert metrics["actor/advantage_mean"] == pytest.approx(np.mean(A), abs=1e-5)
    assert metrics.get("actor/baseline_loss", 0.0) == pytest.approx(fit if args.baseline else 0.0, rel=1e-4)
    assert gradient(critic).norm() == 0, "the critic learns nothing from the actor's step"
    assert (gradient(baseline).norm() > 0) == args.baseline


@pytest.mark.parametrize("with_baseline, kl", [(False, 0.0), (True, 0.0), (False, 0.5)])
def test_the_actors_gradient_is_that_of_E3_and_D1(actor, tokenizer, with_baseline, kl):
    """And no more: what the baseline learns (E5) moves the baseline only, and the advantage is a number."""
    played, _ = play("toy", actor, tokenizer, n=4)
    fresh, critic = fresh_for(played, actor, tokenizer, True), make_critic(actor, tokenizer, True)
    torch.manual_seed(0)
    baseline, twin, start = archer.mlp(32, 32, 0.3), copy.deepcopy(actor), copy.deepcopy(actor)
    start.lm_head.weight.data += 0.2 * torch.randn_like(start.lm_head.weight)
    utterances = [(t, k, row[k]) for t, row in zip(played, fresh, strict=True) for k in range(len(t))]
    for t, k, ids in utterances:
        v, q = value_alone(critic, t, k, archer.spoken(tokenizer, ids))
        before = contexts(t, tokenizer, True)[k]
        tokens, at = torch.tensor([before + ids]), slice(len(before) - 1, -1)
        logps, start_logps = (x(input_ids=tokens).logits[0, at].log_softmax(-1) for x in (twin, start))
        weights = q.min() - v.min()
        if with_baseline:
            weights = weights - baseline(twin.base_model(input_ids=tokens).last_hidden_state[0, at])[:, 0]
        loss = -(logps[range(len(ids)), ids] * weights.detach()).sum()
        loss = loss + kl * (logps.exp() * (logps - start_logps.detach())).sum()
        (loss / len(utterances)).backward()
    args = small(kl=kl, center=False, baseline=with_baseline, max_grad_norm=1e9)
    optimizer = still(actor, baseline)
    archer.actor_update(actor, start, critic, baseline, optimizer, played, fresh, True, args)
    expected = gradient(twin)
    assert (gradient(actor) - expected).norm() < 1e-4 * expected.norm()


def test_environment_tokens_get_no_gradient_and_the_end_of_turn_does(actor, tokenizer):
    """The loss reaches the hidden states that predict tokens of utterances, ends of turn included, and no others."""
    played = [archer.Trajectory(**{k: d[k] for k in ("observations", "actions", "rewards", "terminated", "answer")})
              for d in Toy().demonstrations(4, seed=1)]  # fmt: skip
    end = archer.encode(tokenizer, "\n")
    fresh = [[archer.encode(tokenizer, action) + end for action in (*t.actions, "")] for t in played]
    outputs = []

    def keep(module, inputs, output):
        output.last_hidden_state.retain_grad()
        outputs.append(output.last_hidden_state)

    actor.base_model.register_forward_hook(keep)
    critic, start = make_critic(actor, tokenizer, True), copy.deepcopy(actor).requires_grad_(False)
    start.base_model._forward_hooks.clear()
    critic.body._forward_hooks.clear()
    baseline = archer.mlp(32, 32, 0.0)
    args = small(kl=0.0)
    archer.actor_update(actor, start, critic, baseline, still(actor, baseline), played, fresh, True, args)
    (hidden,) = outputs
    for row, t in enumerate(played):
        expected = set()  # the utterances are those of the dialogue, so that all of them lie in its trunk
        for before, ids in zip(contexts(t, tokenizer, True), fresh[row][: len(t)], strict=False):
            expected |= set(range(len(before) - 1, len(before) - 1 + len(ids)))
        assert set(hidden.grad[row].abs().sum(-1).nonzero().flatten().tolist()) == expected


def test_1x8_is_8x1(actor, tokenizer):
    """Losses are means over utterances: a batch has the utterance-weighted mean loss and gradient of its parts."""
    played, _ = play("toy", actor, tokenizer, n=8)
    fresh = fresh_for(played, actor, tokenizer, True)
    texts = [[archer.spoken(tokenizer, ids) for ids in row] for row in fresh]
    critic, target = (make_critic(actor, tokenizer, True, seed=seed) for seed in (1, 2))
    start, baseline = copy.deepcopy(actor), archer.mlp(32, 32, 0.3)
    args = small(center=False, max_grad_norm=1e9, polyak=0.0)  # the mean of D3 is one of the batch

    def results(which):
        part, ids, said = ([x[i] for i in which] for x in (played, fresh, texts))
        options = (part, ids, True, args)
        a = archer.actor_update(actor, start, critic, baseline, still(actor, baseline), *options)
        c = archer.critic_update(critic, target, still(critic), part, said, args)
        figures = [a["actor/loss"], a["actor/kl"], c["critic/q_loss"], c["critic/v_loss"]]
        return torch.cat([torch.tensor(figures), gradient(actor), gradient(critic)])

    N = sum(map(len, played))
    parts = sum(len(played[i]) / N * results([i]) for i in range(8))
    whole = results(range(8))
    assert torch.allclose(whole, parts, rtol=1e-3, atol=1e-4)
    assert (whole - parts).norm() < 1e-4 * whole.norm()


def test_gradients_of_actor_and_critic_are_clipped_apart():
    """`descend` clips what it is given and says how large the gradient was."""
    module, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    loss = 100 * (module(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum()
    norm = archer.descend(loss, still(module, other), module, 1.0, "test")
    assert norm == pytest.approx(100 * math.sqrt(3), rel=1e-5)
    assert gradient(module).norm() == pytest.approx(1, rel=1e-4)
    assert gradient(other).norm() == pytest.approx(100 * math.sqrt(3), rel=1e-5)


def test_warm_start_learns_the_words_and_their_end(tokenizer):
    """Without the end of the turn in its loss the actor would never stop, and no utterance would be a word."""
    torch.manual_seed(0)
    demonstrations = [
        archer.Trajectory(**{key: d[key] for key in ("observations", "actions", "rewards", "terminated", "answer")})
        for d in Toy().demonstrations(400, seed=0)
    ]
    args = small(warm_start_epochs=3, warm_start_lr=1e-2)
    actor = archer.make_actor(args, "tiny", [t.observations[-1] for t in demonstrations])
    own = actor.tokenizer
    archer.warm_start(actor, demonstrations, True, args, np.random.default_rng(0))
    played, nll = play("toy", actor, own, n=16)
    words = [action for t in played for action in t.actions]
    assert np.mean([word in WORDS for word in words]) > 0.9
    assert np.mean(nll) == pytest.approx(math.log(4), rel=0.2)  # one of four words, and then surely the end


def test_warm_start_learns_the_replies(tokenizer):
    """D7: read behind the end of the turn, where the critic reads Q; without it they stay unknown."""
    keys = ("observations", "actions", "rewards", "terminated", "answer")
    demonstrations = [archer.Trajectory(**{key: d[key] for key in keys}) for d in Toy().demonstrations(400, seed=0)]
    nll = {}
    for switch in (True, False):
        torch.manual_seed(0)
        args = small(warm_start_epochs=3, warm_start_lr=1e-2, warm_start_replies=switch)
        actor = archer.make_actor(args, "tiny", [t.observations[-1] for t in demonstrations])
        own = actor.tokenizer
        archer.warm_start(actor, demonstrations, True, args, np.random.default_rng(0))
        total = 0.0
        for t in demonstrations[:20]:
            for k, reply in enumerate(envs.replies(t.observations, t.actions)):
                before = (
                    archer.encode(own, t.observations[k]) + archer.encode(own, t.actions[k]) + archer.encode(own, "\n")
                )
                ids = archer.encode(own, reply)
                logits = actor(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1]
                total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()
        nll[switch] = total / sum(len(t) for t in demonstrations[:20])
    assert nll[True] < math.log(4) + 0.8 < nll[False]  # which clue comes next, and whether the word was right


# ------------------------------------------------------------------------------------------ --dataset


GOOD = [
    {"lines": ["Is it alive? No.", "Is it a pen? Yes."], "correct": True, "word": ["pen", "pens"]},
    {"lines": ["Is it big? Or small? No."], "correct": False, "word": ["dog"]},
]


def test_read_dataset(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(GOOD))
    args, world = small(dataset=path), envs.make("twenty-questions")
    won, lost = archer.read_demonstrations(args, world)
    assert won.observations == [
        "Questions:\n",
        "Questions:\nIs it alive? No.\n",
        "Questions:\nIs it alive? No.\nIs it a pen? Yes.\n",
    ]
    assert (won.actions, won.rewards) == (["Is it alive?", "Is it a pen?"], [-1.0, 0.0])
    assert (won.terminated, won.answer) == (True, "pen")
    assert (lost.actions, lost.rewards, lost.terminated) == (["Is it big? Or small?"], [-1.0], False)


def test_dialogues_that_do_not_fit_are_left_out(tmp_path, capfd):
    """Real data has dialogues that outgrow a model's context: the others are learned, and how many are not is said."""
    lines = [[f"Is it {'very ' * k}big? No."] for k in range(30)]
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"lines": part, "correct": False, "word": ["dog"]} for part in lines]))
    data = archer.read_demonstrations(small(dataset=path), envs.make("twenty-questions"))
    actor = archer.make_actor(small(), "tiny", [t.observations[-1] for t in data[:1]])  # which never saw a "very"
    lengths = [len(archer.lay_out([t], actor.tokenizer, True)[0][0]) for t in data]
    room = sorted(lengths)[19]
    actor.config.n_positions = room + 6 + 1
    fit = archer.that_fit(data, actor, True, small(max_action_tokens=6))
    assert fit == [t for t, length in zip(data, lengths, strict=True) if length <= room] and len(fit) == 20
    assert f"10 of 30 dialogues left out: more than {room} tokens" in capfd.readouterr().out
    actor.config.n_positions = 8
    stops(capfd, lambda: archer.that_fit(data, actor, True, small(max_action_tokens=6)), "no dialogue", "context")


def test_a_reply_is_learned_as_far_as_the_context_goes():
    """D7 in a world that writes its text anew: a state and the next one behind it may be more than the model reads."""
    states = ["You see a lamp.\n", "You see a door.\n", "You see a cat.\n"]
    data = [archer.Trajectory(states, ["look", "go"], [0.0, 1.0], True, "cat")]
    args = small(vocabulary=257, max_action_tokens=6)  # a token is a byte
    actor = archer.make_actor(args, "tiny", states)
    actor.config.n_positions = len(states[0]) + 6 + 1
    before = actor.base_model.wte.weight.detach().clone()
    archer.warm_start(actor, archer.that_fit(data, actor, False, args), False, args, np.random.default_rng(0))
    assert not torch.equal(before, actor.base_model.wte.weight)


REAL = ROOT.parent / "shared/data/guess_my_city.json"  # published with the authors' code


@pytest.mark.external
@pytest.mark.skipif(not REAL.exists(), reason=f"the authors' data of Guess My City is not at {REAL}")
def test_the_real_data_of_guess_my_city_warms_up_an_actor(tmp_path, capfd):
    """It is longer than what our players say, and a part of it longer than the tiny actor's context."""
    archer.main(small(runs=tmp_path, env="guess-my-city", dataset=REAL, eval_episodes=1, iterations=1))
    assert "dialogues left out: more than" in capfd.readouterr().out


BROKEN = {
    "no lines": ({"correct": True, "word": ["pen"]}, "lines"),
    "lines are text": ({"lines": "Is it? No.", "correct": True, "word": ["pen"]}, "lines"),
    "no line": ({"lines": [], "correct": True, "word": ["pen"]}, "lines"),
    "a number for a line": ({"lines": [5], "correct": True, "word": ["pen"]}, "lines"),
    "no correct": ({"lines": ["Is it? No."], "word": ["pen"]}, "correct"),
    "correct is text": ({"lines": ["Is it? No."], "correct": "yes", "word": ["pen"]}, "correct"),
    "no word": ({"lines": ["Is it? No."], "correct": True}, "word"),
    "word is text": ({"lines": ["Is it? No."], "correct": True, "word": "pen"}, "word"),
    "no word in word": ({"lines": ["Is it? No."], "correct": True, "word": []}, "word"),
}


def stops(capfd, call, *expected):
    """`call` ends the program with exit code 2 and one line on stderr that has all that is `expected`."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        call()
    lines = capfd.readouterr().err.splitlines()
    assert caught.value.code == 2 and len(lines) == 1, lines
    assert [text for text in expected if text not in lines[0]] == [], lines[0]


@pytest.mark.parametrize("kind", BROKEN)
def test_a_malformed_record_is_named(tmp_path, capfd, kind):
    record, key = BROKEN[kind]
    path = tmp_path / "data.json"
    path.write_text(json.dumps([*GOOD, record]))
    stops(capfd, lambda: archer.read_demonstrations(small(dataset=path), Toy()), "record 2", f'"{key}"')


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"lines": []}', "[3]", "no json", "[[]]", "\x00", None])
def test_a_file_without_dialogues(tmp_path, capfd, text):
    path = tmp_path / "data.json"
    if text is not None:
        path.write_text(text)
    stops(capfd, lambda: archer.read_demonstrations(small(dataset=path), Toy()), "data.json")


# ------------------------------------------------------------------------------------- the program: runs


def lines_of(run: Path, name="metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def timeless(run: Path) -> list[dict]:
    """The metrics, without those of the clock."""
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines_of(run)]


def go(folder: Path, **changes) -> tuple[Path, dict]:
    """A run in a folder of its own, and its summary."""
    summary = archer.main(small(runs=folder, **changes))
    (run,) = folder.iterdir()
    return run, summary


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toys):
    """A run of four iterations with checkpoints every two, and its summary."""
    torch.set_num_threads(1)
    return go(tmp_path_factory.mktemp("finished"), iterations=4, env="twenty-questions-subset")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, toys):
    """Local checkpoints: a GPT-2 and a BERT, untrained, each with a tokenizer of its own."""
    texts = [d["observations"][-1] for d in Toy().demonstrations(100, seed=3)]
    gpt2, bert = tmp_path_factory.mktemp("gpt2"), tmp_path_factory.mktemp("bert")
    tokenizer = archer.make_tokenizer(texts, 290)
    tokenizer.save_pretrained(gpt2)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=256, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(gpt2)
    inner = archer.make_tokenizer(texts, 280).backend_tokenizer
    inner.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    special = [(token, inner.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    PreTrainedTokenizerFast(
        tokenizer_object=inner, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    ).save_pretrained(bert)
    BertModel(
        BertConfig(
            vocab_size=inner.get_vocab_size(), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, pad_token_id=inner.token_to_id("[PAD]"),
        )
    ).save_pretrained(bert)  # fmt: skip
    return {"GPT2": str(gpt2), "BERT": str(bert)}


@pytest.mark.parametrize(
    "changes",
    [
        {"critic": "tiny-cls"},
        {"baseline": True},
        {"critic_loss": "iql"},
        {"critic_loss": "mc", "kl": 0.0, "center": False},
        {"truncation_is_terminal": False, "temperature": 0.7},
        {"critic": "BERT"},
        {"critic": "GPT2"},
        {"actor": "GPT2"},
        {"actor": "GPT2", "warm_start_epochs": 0, "max_action_tokens": 1},
        {"env": "forgetful-toy"},
        {"env": "forgetful-toy", "critic": "tiny-cls", "baseline": True},
        {"env": "twenty-questions-subset", "critic_warmup": 3, "buffer_size": 100},
        {"dtype": "bfloat16"},
        {"dataset": "DATA", "env": "twenty-questions-subset"},
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()),
)
def test_every_switch_runs(tmp_path, folders, changes):
    """Two iterations: every figure is finite, and of a tag that METRICS explains."""
    (tmp_path / "data.json").write_text(json.dumps(GOOD))
    names = folders | {"DATA": str(tmp_path / "data.json")}
    changes = {key: names.get(value, value) for key, value in changes.items()}
    run, _ = go(tmp_path / "runs", **changes)
    rows = lines_of(run)
    assert [row.pop("iteration") for row in rows] == [1, 2]
    assert all(math.isfinite(figure) for row in rows for figure in row.values())
    assert {tag for row in rows for tag in row} - set(archer.METRICS) == set()
    assert ("actor/baseline_loss" in rows[-1]) == changes.get("baseline", False)
    assert ("actor/loss" in rows[0]) == (changes.get("critic_warmup", 0) == 0) and "actor/loss" in rows[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("changes", [{}, {"critic": "tiny-cls", "baseline": True}, {"dtype": "bfloat16"}], ids=str)
def test_a_run_on_the_gpu(tmp_path, changes):
    run, _ = go(tmp_path, device="cuda", **changes)
    archer.main(small(runs=tmp_path, resume=run, iterations=4, device="cuda", **changes))
    assert [row["iteration"] for row in lines_of(run)] == [1, 2, 3, 4]


def test_summary(finished):
    run, summary = finished
    assert set(summary) == {*SUMMARY.split(), "seed", "commit"}
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["seed"] == 3
    assert summary["eval_return"] == lines_of(run)[-1]["eval/return"]
    assert summary["eval_return_greedy"] == lines_of(run)[-1]["eval/return_greedy"]


def test_all_dialogues_that_it_learned_from_count(finished):
    run, summary = finished
    folder = archer.newest_checkpoint(str(run), "--resume")
    assert summary["episodes"] == len(lines_of(folder, "replay.jsonl"))


def test_rollouts_have_text_and_values(finished):
    run, _ = finished
    lines = lines_of(run, "rollouts.jsonl")
    assert {line["iteration"] for line in lines} == {1, 2, 3, 4}
    for line in lines:
        assert line["return"] == -len(line["turns"]) and line["answer"] in envs.make("twenty-questions-subset").words
        for turn in line["turns"]:
            assert set(turn) == {"action", "reply", "reward", "Q", "V", "A"}
            assert turn["reply"].endswith(("Yes.\n", "No.\n", "Question.\n"))
            assert turn["A"] == pytest.approx(turn["Q"] - turn["V"], abs=2e-3)


@BOTH
def test_the_log_shows_each_turn(tmp_path, actor, tokenizer, world):
    """What was said and what the world answered, also where an observation does not begin with the one before."""
    played, _ = play(world, actor, tokenizer, n=4)
    critic = make_critic(actor, tokenizer, envs.make(world).append_only)
    with SummaryWriter(str(tmp_path)) as writer:
        logs = {name: [] for name in archer.LOGS}
        archer.log(tmp_path, logs, writer, {"iteration": 7, "rollout/return": 1.0}, critic, played)
    assert lines_of(tmp_path) == [{"iteration": 7, "rollout/return": 1.0}]
    for t, line in zip(played, lines_of(tmp_path, "rollouts.jsonl"), strict=True):
        assert (line["iteration"], line["answer"], line["return"]) == (7, t.answer, sum(t.rewards))
        for k, (turn, action) in enumerate(zip(line["turns"], t.actions, strict=True)):
            assert action == turn["action"] and ("yes" in turn["reply"] or "no" in turn["reply"])
            v, q = value_alone(critic, t, k, action)
            assert [turn["Q"], turn["V"]] == pytest.approx([q.min().item(), v.min().item()], abs=1e-3)


def test_a_checkpoint_is_whole_and_loads_elsewhere(finished):
    """The actor in transformers, the state without pickled objects; nothing temporary remains."""
    run, _ = finished
    assert [path for path in run.rglob("*") if ".tmp" in path.name] == []
    folder = archer.newest_checkpoint(str(run), "--resume")
    assert folder.name == "000004"
    actor, tokenizer = (x.from_pretrained(folder / "actor") for x in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("Is it a dog?", return_tensors="pt").input_ids
    assert torch.isfinite(actor(input_ids=ids).logits).all() and tokenizer.decode(ids[0]) == "Is it a dog?"
    state = torch.load(folder / "state.pt", weights_only=True)
    assert state["iteration"] == 4


@pytest.mark.parametrize(
    "changes",
    [{}, {"critic": "tiny-cls", "baseline": True}, {"critic": "BERT"}, {"env": "forgetful-toy", "buffer_size": 20}],
    ids=str,
)
def test_2n_iterations_are_n_and_n_resumed(tmp_path, folders, changes):
    """To the bit. Fails for whatever is not in the checkpoint: random states, optimisers, target, sampled tokens."""
    changes = {key: folders.get(value, value) for key, value in changes.items()} | {"anneal_lr": False}
    whole, _ = go(tmp_path / "whole", iterations=4, eval_every=1, **changes)
    half, _ = go(tmp_path / "half", iterations=2, eval_every=1, **changes)
    archer.main(small(resume=half, runs=tmp_path / "half", iterations=4, eval_every=1, **changes))
    assert timeless(half) == timeless(whole)
    assert lines_of(half, "rollouts.jsonl") == lines_of(whole, "rollouts.jsonl")


def test_a_resumed_summary_counts_from_the_start(tmp_path):
    run, first = go(tmp_path, iterations=2)
    second = archer.main(small(resume=run, runs=tmp_path, iterations=3))
    assert second["episodes"] == first["episodes"] + 4 and second["warm_start_return"] == first["warm_start_return"]
    assert second["cpu_seconds"] > first["cpu_seconds"] and second["seconds"] > first["seconds"]


def test_resumed_with_another_learning_rate(tmp_path):
    """What the message about a divergence advises must have an effect."""
    run, _ = go(tmp_path)
    rates = {"actor_lr": 1e-9, "critic_lr": 1e-9}

    def weights(name):
        folder = archer.newest_checkpoint(str(run), "--resume") / name
        return torch.cat([p.detach().flatten() for p in AutoModel.from_pretrained(folder).parameters()])

    before = weights("actor"), weights("critic")
    archer.main(small(resume=run, runs=tmp_path, iterations=3, **rates))
    for old, new in zip(before, (weights("actor"), weights("critic")), strict=True):
        assert (old - new).abs().max() < 1e-6


@pytest.mark.parametrize(("episodes", "played"), [(3, [3, 3]), (20, [20, 10]), (0, [10, 10])])
def test_an_evaluation_is_no_larger_than_asked_for(actor, monkeypatch, episodes, played):
    """Whole passes over the tasks, sampled and greedy; of a world with more tasks the first ones."""
    sizes, rollout = [], archer.rollout
    monkeypatch.setattr(archer, "rollout", lambda *options: sizes.append(len(options[5])) or rollout(*options))
    archer.evaluate(actor, small(env="twenty-questions-subset", eval_episodes=episodes))
    assert sizes == played


@pytest.mark.parametrize(("anneal_lr", "share"), [(True, 0.25), (False, 1.0)])
def test_the_actors_learning_rate_falls_to_zero(tmp_path, anneal_lr, share):
    """D9: in the last of four iterations a quarter is left; the critic's does not fall."""
    run, _ = go(tmp_path, iterations=4, actor_lr=1e-3, critic_lr=2e-3, anneal_lr=anneal_lr)
    modules = torch.load(archer.newest_checkpoint(str(run), "--resume") / "state.pt", weights_only=True)["modules"]
    rates = [modules[name]["param_groups"][0]["lr"] for name in ("optimizer", "critic_optimizer")]
    assert rates == [pytest.approx(share * 1e-3), 2e-3]


# -------------------------------------------------------------------------- the program: resumed, misused


def command(*options) -> list[str]:
    return [sys.executable, str(ROOT / "archer.py"), *map(str, options)]


@pytest.mark.parametrize("form", [pytest.param("--resume RUN", marks=pytest.mark.slow), "--resume=RUN"])
def test_resume_on_the_command_line_keeps_the_runs_arguments(finished, tmp_path, form):
    """In both ways to write it; otherwise the run would go on with the defaults for everything."""
    summary, run = finished[1], tmp_path / "run"
    shutil.copytree(finished[0], run)
    before = timeless(run)
    options = form.replace("RUN", str(run)).split()
    result = subprocess.run(command(*options), capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert timeless(run) == before, "all of its iterations were done"
    assert json.loads((run / "summary.json").read_text())["eval_return"] == summary["eval_return"]


def test_some_worlds_have_defaults_of_their_own(tmp_path):
    """They are other defaults of arguments that exist, and what the user gives goes before them."""
    plain = vars(archer.Args())
    for env, settings in archer.SETTINGS.items():
        assert env in envs.ENVS and settings.keys() <= plain.keys()
        assert all(value != plain[key] and type(value) is type(plain[key]) for key, value in settings.items())
    given = {"iterations": 0, "demonstrations": 8, "rollouts": 2, "eval-episodes": 1, "max-action-tokens": 2}
    options = [x for name, value in given.items() for x in (f"--{name}", value)]
    options += ["--env", "mini-detective", "--runs", tmp_path]
    result = subprocess.run(command(*options), capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    (run,) = tmp_path.iterdir()
    used = json.loads((run / "args.json").read_text())
    assert (used["vocabulary"], used["critic_pool"]) == (1500, 128) and used["rollouts"] == 2


@pytest.mark.parametrize("world", ["guess-my-city", "mini-detective", "detective", "webshop"])
def test_it_trains_in_every_world_of_the_paper(tmp_path, world):
    if problem := envs.missing(world):
        pytest.skip(problem)
    _, summary = go(tmp_path, env=world, demonstrations=4, rollouts=2, eval_episodes=1, iterations=1)
    assert math.isfinite(summary["eval_return"])


MISUSE = {
    "unknown world": ({"env": "nowhere"}, ["nowhere"]),
    "unknown device": ({"device": "abacus"}, ["abacus"]),
    "no actor": ({"actor": "MISSING"}, ["--actor", "MISSING"]),
    "no critic": ({"critic": "MISSING"}, ["--critic", "MISSING"]),
    "no oracle": ({"oracle": "MISSING", "env": "twenty-questions-subset"}, ["oracle", "MISSING"]),
    "no run": ({"resume": "MISSING"}, ["--resume", "MISSING"]),
    "no data": ({"dataset": "MISSING"}, ["--dataset", "MISSING"]),
    "no demonstrations": ({"demonstrations": 0}, ["--demonstrations"]),
    "no rollouts": ({"rollouts": 0}, ["--rollouts 0", "at least 1"]),
    "never evaluated": ({"eval_every": 0}, ["--eval-every 0", "at least 1"]),
    "no width of heads": ({"width": 100}, ["--width 100", "multiple of 32"]),
    "cold": ({"temperature": 0.0}, ["--temperature 0.0", "more than 0"]),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_one_line_and_leaves_nothing_behind(tmp_path, capfd, case):
    changes, expected = MISUSE[case]
    missing = str(tmp_path / "is" / "not" / "there")
    changes = {key: missing if value == "MISSING" else value for key, value in changes.items()}
    args = small(runs=tmp_path / "runs", **changes)
    stops(capfd, lambda: archer.main(args), *(text.replace("MISSING", missing) for text in expected))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", ["--dtype", "--critic-loss"])
def test_a_choice_that_there_is_not(tmp_path, capsys, option):
    """A loss that is none of the three must not quietly become one of them."""
    with pytest.raises(SystemExit) as caught:
        archer.main(tyro.cli(archer.Args, args=[option, "sarsa"], default=small(runs=tmp_path / "runs")))
    assert caught.value.code == 2 and "sarsa" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_play_without_a_run_is_one_line(tmp_path, capfd):
    missing = str(tmp_path / "missing")
    stops(capfd, lambda: archer.play(small(play=missing)), "--play", missing)


def test_play(finished, monkeypatch, capsys):
    """The agent asks until the person says c."""
    answers = iter(["y", "n", "what?", "c"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    archer.play(small(play=finished[0], env="twenty-questions-subset"))
    assert next(answers, None) is None and capsys.readouterr().out


def test_only_an_agent_that_asks_can_be_answered(finished, toys, capfd):
    stops(capfd, lambda: archer.play(small(play=finished[0], env="toy")), "--play", "nobody asks questions")


@pytest.mark.parametrize("key", [KeyboardInterrupt, EOFError])
def test_ctrl_c_and_ctrl_d_end_play(finished, monkeypatch, key):
    def pressed(prompt):
        raise key

    monkeypatch.setattr("builtins.input", pressed)
    archer.play(small(play=finished[0], env="twenty-questions-subset"))


def test_no_dialogue_is_read_beyond_the_context(actor, tokenizer, capfd):
    """Whether it comes to be read, or is about to be continued."""
    args, generator = small(max_action_tokens=40), torch.Generator().manual_seed(0)
    actor.lm_head.bias.data[archer.encode(tokenizer, "a")[0]] = 1e3  # it goes on and on
    stops(capfd, lambda: archer.score(actor, [[5] * 1025], [(0, 1, [5])], 1.0), "1025", "1024")

    @torch.no_grad()
    def speak(length):
        archer.speak(actor, [[5] * length], [(0, length)], args, generator)

    stops(capfd, lambda: speak(1025), "1025", "1024")
    stops(capfd, lambda: speak(1020), "1025", "1024")


def test_a_dialogue_longer_than_the_context_is_one_line(tmp_path, capfd, tokenizer):
    folder = tmp_path / "actor"
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=40, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stops(capfd, lambda: archer.main(small(runs=tmp_path / "runs", actor=folder)), "tokens", "40")
    assert list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.parametrize("loss", ["value_loss", "reinforce_loss"])
def test_a_nan_is_one_line_and_the_last_checkpoint_is_whole(tmp_path, capfd, monkeypatch, loss):
    right, calls = getattr(archer, loss), []

    def wrong(*args):
        calls.append(1)
        return right(*args) * (math.nan if len(calls) > 5 else 1.0)

    monkeypatch.setattr(archer, loss, wrong)
    args = small(runs=tmp_path / "runs", iterations=9, save_every=1)
    stops(capfd, lambda: archer.main(args), "nan", "critic" if loss == "value_loss" else "actor")
    monkeypatch.undo()
    ((run),) = (tmp_path / "runs").iterdir()
    assert [path for path in run.rglob("*") if ".tmp" in path.name] == [] and len(lines_of(run)) >= 2
    archer.main(small(runs=tmp_path / "runs", resume=run, iterations=9))
    assert len(lines_of(run)) == 9


def test_the_files_of_a_run_appear_whole_or_not_at_all(tmp_path):
    """What a write that fails half-way leaves is the file of before."""
    path = tmp_path / "file.jsonl"
    archer.write(path, [{"a": 1}])
    with pytest.raises(TypeError):
        archer.write(path, [{"a": 2}, {"a": object()}])
    assert path.read_text() == '{"a": 1}\n'

    def full(self, *rest):
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError):
        patch.setattr(Path, "replace", full)
        archer.write(path, [{"a": 2}])
    assert path.read_text() == '{"a": 1}\n'


@pytest.mark.parametrize("where", ["log", "torch.save"])
def test_a_full_disk_costs_nothing_that_was_learned(tmp_path, toys, monkeypatch, capsys, where):
    """Iteration 2 cannot be saved, 4 can, and of 2 no half is left."""
    owner, name = (archer, "log") if where == "log" else (torch, "save")
    real, calls = getattr(owner, name), []

    def fails_at_the_second(*args, **rest):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no space left") if where == "log" else RuntimeError("file write failed\nat somewhere")
        return real(*args, **rest)

    monkeypatch.setattr(owner, name, fails_at_the_second)
    run, summary = go(tmp_path, iterations=4)
    assert re.search(r"^not saved at iteration 2: .*(no space left|file write failed)$", capsys.readouterr().out, re.M)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["000004"] and summary["episodes"] == 5 * 4
