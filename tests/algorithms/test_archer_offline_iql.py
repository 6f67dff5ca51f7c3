"""What archer_offline_iql.py promises: its equations, the order of an update, and that a run can be resumed.

What an update should compute is computed a second time, one utterance at a time. What the critic should
converge to is known from dynamic programming: in a world of few states, with a table for its critic.
"""

import copy
import inspect
import json
import math
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import archer_offline_iql as offline
import envs
from envs import models
from envs.datasets import make_dialogues, read_dialogues

PAGE = Path(offline.__file__).parent / "docs/archer_offline_iql.md"
LOSSES = {
    "awr": {},
    "reinforce": {"actor_loss": "reinforce"},
    "reinforce-bc": {"actor_loss": "reinforce", "bc_weight": 0.3},
    "bc": {"beta": 0.0, "critic_updates": 0},
    "filtered-bc": {"beta": 0.0, "critic_updates": 0, "keep": 0.2},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Bits repeat on one thread only; and `main` takes over Ctrl-C, which pytest wants back."""
    torch.set_num_threads(1)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def make_tokenizer(texts: list[str], size: int = 300):
    """A byte-pair vocabulary, with all bytes in it: any text can be written."""
    tokenizer, special = Tokenizer(BPE()), "<|endoftext|>"
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"special_tokens": [special], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False, **options))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special, pad_token=special)


def tiny_checkpoint(folder: Path, texts: list[str] | None = None, limit: int = 4096) -> str:
    """The folder of an untrained GPT-2 that reads `limit` tokens, as sft.py saves one."""
    if texts is None:
        made = make_dialogues(envs.make("twenty-questions-subset"), 100, 0, "random")
        texts = [d["observations"][-1] for d in made]
    torch.manual_seed(0)
    tokenizer = make_tokenizer(texts, 400)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=limit,
        n_embd=32,
        n_layer=1,
        n_head=2,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    for part in (GPT2LMHeadModel(config), tokenizer):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True, scope="session")
def start(checkpoint):
    """Every run of these tests starts from the tiny checkpoint, unless it says otherwise."""
    DEFAULTS["actor"] = checkpoint


DEFAULTS = {"env": "twenty-questions-subset", "seed": 3, "iterations": 2, "dataset_size": 40}
DEFAULTS |= {"max_action_tokens": 6, "critic_updates": 3, "actor_updates": 2, "batch": 3}
DEFAULTS |= {"eval_every": 2, "eval_episodes": 4}


def spy(monkeypatch, name: str, look=lambda call: None, of=offline) -> list[SimpleNamespace]:
    """Every call of a function of the script: its arguments by name, its `result`, and what `look` saw at
    the time, for what changes later."""
    right, calls = getattr(of, name), []
    signature = inspect.signature(right)

    def listen(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = SimpleNamespace(**bound.arguments, of=name)
        call.seen = look(call)
        calls.append(call)
        call.result = right(*args, **kwargs)
        return call.result

    monkeypatch.setattr(of, name, listen)
    return calls


def small(**changes) -> offline.Args:
    """Arguments that make a run small."""
    changes = {key: str(value) if isinstance(value, Path) else value for key, value in changes.items()}
    return offline.Args(**DEFAULTS | changes)


def dialogue(said: str, terminated: bool, rewards: list[float] | None = None) -> dict:
    """A dialogue of one-letter utterances, each answered by itself: "ab" is "> a a\\n" and "b b\\n"."""
    observations = [">"]
    for letter in said:
        observations.append(f"{observations[-1]}{letter} {letter}\n")
    made = {"observations": observations, "actions": list(said), "rewards": rewards or [-1.0] * len(said)}
    return made | {"terminated": terminated, "success": terminated, "answer": "answer"}


@pytest.fixture(scope="module")
def data():
    """Dialogues of one to four turns; the second and the last end at the time limit."""
    return [
        dialogue("abc", True, [-1.0, 0.5, 2.0]),
        dialogue("ba", False, [0.3, -0.7]),
        dialogue("c", True, [1.0]),
        dialogue("abca", False, [-1.0, -1.0, 0.1, -1.0]),
    ]


@pytest.fixture
def actor(data):
    """Untrained, with a bias on its output that makes the end of turn likely."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer([d["observations"][-1] for d in data])
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=1024, n_embd=32, n_layer=1, n_head=2, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    actor = GPT2LMHeadModel(config).eval()
    head = torch.nn.Linear(32, len(tokenizer))
    head.weight.data = actor.lm_head.weight.data.clone()
    head.bias.data.zero_()
    head.bias.data[tokenizer.eos_token_id] = 4.0
    actor.lm_head, actor.tokenizer = head, tokenizer
    actor.context = actor.config.max_position_embeddings
    return actor


def make_critic(actor, seed: int) -> offline.Critic:
    """A critic whose values differ: its heads are random, not at their small start."""
    torch.manual_seed(seed)
    body = copy.deepcopy(actor.base_model)
    body.tokenizer = actor.tokenizer
    critic = offline.Critic(body, 0.5, "float32").eval()
    for parameter in critic.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return critic


@torch.no_grad()
def value_alone(critic, d: dict, k: int, text: str):
    """V and Q [2] in float64 of the state before action k and one utterance, in a batch of nothing else."""
    upto = d | {"observations": d["observations"][: k + 1], "actions": [*d["actions"][:k], text]}
    v_N2, q_N2 = critic([upto], [*d["actions"][:k], text])
    return v_N2[k].double(), q_N2[k].double()


def turns_of(data: list[dict]):
    """Dialogue, number and action of every turn."""
    return [(d, k, action) for d in data for k, action in enumerate(d["actions"])]


@torch.no_grad()
def plain_logps(model, before: list[int], ids: list[int], temperature: float = 1.0):
    """log pi of each token of `ids` after `before`: one unpadded forward pass, softmax in float64."""
    logits = model(input_ids=torch.tensor([before + ids])).logits[0].double() / temperature
    return [logits[len(before) + k - 1].log_softmax(-1)[token].item() for k, token in enumerate(ids)]


def still(*modules):
    """An optimiser that leaves everything where it is, so that only the gradient remains."""
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.0)


def gradient(module):
    return torch.cat(
        [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in module.parameters()]
    )


# ---------------------------------------------------------------------------------------- the equations


@pytest.mark.parametrize("beta, limit", [(1.0, 20.0), (3.0, 2.0), (0.0, 1.0), (1.0, math.inf)])
def test_E7_is_the_loop(beta, limit):
    torch.manual_seed(2)
    advantage, logp = 2 * torch.randn(5, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    advantage.requires_grad_(True)
    owner = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4])
    expected = 0.0
    for n in range(5):
        weight = min(math.exp(beta * advantage[n].item()), limit)
        expected -= weight * sum(logp[m].item() for m in range(12) if owner[m] == n) / 5
    weights = offline.awr_weights(advantage, beta, limit)
    assert offline.reinforce_loss(logp, weights, owner).item() == pytest.approx(expected, rel=1e-12)
    assert not weights.requires_grad, "the actor must not learn to raise its own advantage"


@pytest.mark.parametrize(
    "advantage, expected",
    [([0.5] * 4, 1.0), ([14.0, 0.0, 0.0, 0.0], 0.25), ([69.0] * 4, 1.0), ([-46.0] * 4, 1.0)],
    ids=["all alike", "one outweighs all", "squares beyond float32", "small ones"],
)
def test_effective_share(actor, monkeypatch, advantage, expected):
    monkeypatch.setattr(offline, "advantages", lambda q, v: torch.tensor(advantage))
    monkeypatch.setattr(models, "clipped_step", lambda *_: 0.0)
    args = small(max_weight=math.inf)
    update = actor, make_critic(actor, 1), still(actor), [dialogue("abca", True)], args, None
    assert offline.actor_update(*update)["actor/effective_share"] == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------------- the updates


@pytest.mark.parametrize("critic_loss", ["iql", "sarsa"])
def test_critic_update_is_the_loop(actor, data, critic_loss):
    """E1, E2, E6 and E8 utterance by utterance: who bootstraps, from which state, with which utterance."""
    critic, target = make_critic(actor, 1), make_critic(actor, 2)
    args = small(critic_loss=critic_loss, gamma=0.8, expectile=0.7)
    q_terms, v_terms, errors = [], [], []
    for d, k, action in turns_of(data):
        v, q = value_alone(critic, d, k, action)
        goal = torch.full((2,), d["rewards"][k], dtype=torch.float64)
        if k < len(d["actions"]) - 1:  # behind the last turn is nothing, terminated or not
            next_v, next_q = value_alone(target, d, k + 1, d["actions"][k + 1])
            goal += 0.8 * (next_v if critic_loss == "iql" else next_q)
        q_terms.append(((q - goal) ** 2).mean().item())
        gap = value_alone(target, d, k, action)[1] - v
        share = 0.7 if critic_loss == "iql" else 0.5
        v_terms.append(sum((share if g > 0 else 1 - share) * g.item() ** 2 for g in gap))
        errors.append(v.mean().item() - sum(r * 0.8**i for i, r in enumerate(d["rewards"][k:])))
    metrics = offline.critic_update(critic, target, still(critic), data, args)
    assert metrics["critic/q_loss"] == pytest.approx(np.mean(q_terms), rel=1e-4)
    assert metrics["critic/v_loss"] == pytest.approx(np.mean(v_terms), rel=1e-4)
    assert metrics["critic/bias"] == pytest.approx(np.mean(errors), rel=1e-4)


def test_the_order_of_an_update(actor, data):
    """V and Q learn from the target of before the step, the target follows, the actor sees the new critic.

    Fails when V's new value enters Q's goal (as in IQL's own code), or the target moves first.
    """
    critic, target = make_critic(actor, 1), make_critic(actor, 2).requires_grad_(False)
    before, target_before = copy.deepcopy(critic), copy.deepcopy(target)
    args = small(gamma=0.8, polyak=0.25, max_grad_norm=1e9)
    offline.critic_update(critic, target, torch.optim.SGD(critic.parameters(), lr=1e-2), data, args)

    v_N2, q_N2 = before(data)
    with torch.no_grad():
        next_v, q = target_before(data)
    over = torch.tensor([float(k == len(d["actions"]) - 1) for d, k, _ in turns_of(data)])
    reward = torch.tensor([d["rewards"][k] for d, k, _ in turns_of(data)])
    goal = reward[:, None] + 0.8 * (1 - over[:, None]) * torch.cat([next_v[1:], next_v[:1]])
    gap = q - v_N2
    loss = ((q_N2 - goal) ** 2).mean() + (torch.where(gap > 0, 0.9, 0.1) * gap**2).sum(-1).mean()
    loss.backward()
    for new, old in zip(critic.parameters(), before.parameters(), strict=True):
        moved = old.detach() - 1e-2 * (old.grad if old.grad is not None else 0)
        assert torch.allclose(new, moved, atol=1e-6)
    for now, old, new in zip(
        target.parameters(), target_before.parameters(), critic.parameters(), strict=True
    ):
        assert torch.allclose(now, 0.75 * old + 0.25 * new, atol=1e-6)

    metrics = offline.actor_update(actor, critic, still(actor), data, args, np.random.default_rng(0))
    A = []
    for d, k, action in turns_of(data):
        v, q = value_alone(critic, d, k, action)
        A.append(q.min().item() - v.min().item())
    assert metrics["actor/advantage_mean"] == pytest.approx(np.mean(A), abs=1e-5)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", ["awr", "reinforce"])
def test_an_update_is_the_same_in_micro_batches(actor, data, loss, size):
    """In float64, where sums differ by rounding alone: gradients and figures, those of the whole batch, too,
    and what the actor samples."""
    actor, critic, target = (
        model.double() for model in (actor, make_critic(actor, 1), make_critic(actor, 2))
    )

    def results(micro_batch):
        options = {"critic_loss": "sarsa", "actor_loss": loss, "bc_weight": 0.5, "max_weight": 1.5}
        args = small(micro_batch=micro_batch, max_grad_norm=1e9, polyak=0.0, **options)
        figures = offline.critic_update(critic, target, still(critic), data, args)
        of_critic = gradient(critic)
        figures |= offline.actor_update(actor, critic, still(actor), data, args, np.random.default_rng(0))
        return figures, torch.cat([of_critic, gradient(actor)])

    expected, whole = results(len(data))
    figures, parts = results(size)
    assert figures == pytest.approx(expected, rel=1e-9) and len(data) == 4
    assert (parts - whole).norm() < 1e-12 * whole.norm() and whole.norm() > 0
    assert loss == "reinforce" or 0 < figures["actor/clamped"] < 1, "weights differ, and some are clamped"


def test_no_more_than_a_micro_batch_is_read_at_a_time(actor, data, monkeypatch):
    """Where gradients are, where there are none, and where the actor samples."""
    critic, rows, hidden_states = make_critic(actor, 1), [], models.hidden_states

    def listen(body, dtype, **inputs):
        rows.append(len(inputs["input_ids"]))
        return hidden_states(body, dtype, **inputs)

    monkeypatch.setattr(models, "hidden_states", listen)
    args = small(micro_batch=2, actor_loss="reinforce")
    offline.critic_update(critic, copy.deepcopy(critic), still(critic), data, args)
    offline.actor_update(actor, critic, still(actor), data, args, np.random.default_rng(0))
    assert len(data) > 2 == max(rows)


@pytest.mark.external
def test_adapters_are_all_that_learns_of_the_actor(tmp_path, monkeypatch, checkpoint):
    """A resumed run goes on with them; what is saved is the actor, whole and as an adapter."""
    pytest.importorskip("peft", reason="needs the package peft")
    options = {"lora": True, "lora_rank": 4, "gradient_checkpointing": True, "micro_batch": 2}
    with pytest.raises(ValueError, match=r"^--lora: .* give --critic$"):
        go(tmp_path / "none", **options)
    updates = spy(monkeypatch, "actor_update")
    options |= {"critic": checkpoint, "anneal_lr": False, "actor_lr": 2e-2}
    whole, _ = go(tmp_path / "whole", iterations=2, eval_every=1, **options)
    half, _ = go(tmp_path / "half", iterations=1, eval_every=1, **options)
    offline.main(small(resume=half, runs=tmp_path / "half", iterations=2, eval_every=1, **options))
    assert timeless(half) == timeless(whole)
    for name, p in updates[0].actor.named_parameters():
        assert p.requires_grad == ("lora" in name)
    ids = torch.tensor([[5, 6, 7]])
    logits = updates[3].actor(ids).logits
    assert (logits - AutoModelForCausalLM.from_pretrained(checkpoint)(ids).logits).abs().max() > 0.05
    for folder in (whole, half):
        for name in ("actor", "actor_adapter"):
            saved = models.load(AutoModelForCausalLM, str(folder / name), small())
            assert torch.allclose(saved(ids).logits, logits, atol=1e-4)


def test_an_encoder_is_no_critic(actor, tmp_path):
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    body = BertModel(BertConfig(vocab_size=300, **size))
    body.tokenizer = actor.tokenizer
    with pytest.raises(ValueError, match=r"^--critic: an encoder "):
        offline.Critic(body, 0.0, "float32")


def test_the_actor_learns_from_the_critic_that_has_just_learned(tmp_path, monkeypatch):
    """In `main`: all critic updates of an iteration, then the actor's, by the critic, not its target. The
    critic is evaluated, too."""
    order, evaluated = [], spy(monkeypatch, "evaluate")
    of_critic = spy(monkeypatch, "critic_update", lambda call: order.append(call.of))
    of_actor = spy(monkeypatch, "actor_update", lambda call: order.append(call.of))
    go(tmp_path)
    assert order == (["critic_update"] * 3 + ["actor_update"] * 2) * 2
    assert len({id(call.critic) for call in of_critic + of_actor + evaluated}) == 1
    assert len({id(call.target_critic) for call in of_critic}) == 1
    assert len({id(call.rng) for call in of_actor}) == 1, "each update has new random numbers"
    assert of_critic[0].critic is not of_critic[0].target_critic


def test_the_critic_does_not_share_the_actors_body(tmp_path, monkeypatch):
    """Nor does its target share the critic's: no number is in two of the three, and they start alike (D2)."""
    evaluated = spy(monkeypatch, "evaluate")
    apart, alike = [], []

    def look(call):
        actor = evaluated[0].actor
        parts = actor, call.critic, call.target_critic
        places = [{p.data_ptr() for p in part.parameters()} for part in parts]
        apart.append(not places[0] & places[1] | places[1] & places[2] | places[0] & places[2])
        bodies = [actor.base_model, call.critic.body, call.target_critic.body]
        trios = zip(*(body.parameters() for body in bodies), strict=True)
        alike.append(all(torch.equal(one, other) for one, *others in trios for other in others))

    spy(monkeypatch, "critic_update", look)
    go(tmp_path)
    assert all(apart) and alike[0] and not any(alike[1:])
    actor, critic = evaluated[0].actor.base_model, evaluated[0].critic.body
    assert not torch.equal(next(actor.parameters()), next(critic.parameters()))


def test_D4_a_new_critic_says_the_mean_return_of_the_data(tmp_path, monkeypatch):
    made = []

    class Listening(offline.Critic):
        def __init__(self, body, value, dtype):
            super().__init__(body, value, dtype)
            heads = [*self.v_heads, *self.q_heads]
            made.append((value, [head[-1].bias.item() for head in heads]))

    monkeypatch.setattr(offline, "Critic", Listening)
    run, _ = go(tmp_path, gamma=0.5, critic_updates=1)
    data = lines_of(run, "dataset.jsonl")
    returns = [
        sum(r * 0.5**k for k, r in enumerate(t["rewards"][i:]))
        for t in data
        for i in range(len(t["rewards"]))
    ]
    assert made[0][0] == pytest.approx(np.mean(returns)) and made[0][1] == pytest.approx([made[0][0]] * 4)


@pytest.mark.parametrize("loss", LOSSES)
def test_actor_update_is_the_loop(actor, data, loss, monkeypatch):
    """Each loss of Table 1, E3 or E7, token by token, end of turn included; its gradient reaches only the
    actor."""
    critic, args = make_critic(actor, 1), small(**{"beta": 2.0, "max_weight": 1.5} | LOSSES[loss])
    drawn = spy(monkeypatch, "write_utterances")
    metrics = offline.actor_update(actor, critic, still(actor), data, args, np.random.default_rng(0))
    assert len(drawn) == (1 if "reinforce" in loss else 0), "only REINFORCE asks the actor"

    tokenizer, turns = actor.tokenizer, turns_of(data)
    imitation = weighted = online = 0.0
    weights = []
    for n, (d, k, action) in enumerate(turns):
        rows, spans, _ = offline.lay_out([d], tokenizer)
        before = rows[0][: spans[k].start]
        logp = sum(plain_logps(actor, before, [*models.encode(tokenizer, action), tokenizer.eos_token_id]))
        v, q = value_alone(critic, d, k, action)
        weights.append(min(math.exp(args.beta * (q.min() - v.min()).item()), 1.5))
        imitation -= logp / len(turns)
        weighted -= weights[-1] * logp / len(turns)
        if drawn:
            ids = drawn[0].result[0][n]
            v, q = value_alone(critic, d, k, offline.spoken(tokenizer, ids))
            online -= (q.min() - v.min()).item() * sum(plain_logps(actor, before, ids)) / len(turns)
    online += args.bc_weight * imitation
    assert metrics["actor/loss"] == pytest.approx(online if drawn else weighted, rel=1e-4)
    assert metrics["actor/data_nll"] == pytest.approx(imitation, rel=1e-4)
    assert gradient(actor).norm() > 0 and all(p.grad is None for p in critic.parameters())
    assert ("actor/clamped" in metrics) == (not drawn)
    if not drawn:
        share = sum(weights) ** 2 / len(weights) / sum(w * w for w in weights)
        assert metrics["actor/effective_share"] == pytest.approx(share, rel=1e-4)
        assert metrics["actor/clamped"] == np.mean([w >= 1.5 for w in weights])
    if args.beta == 0:
        assert weighted == pytest.approx(imitation), "BC"


# ------------------------------------------ what the critic converges to: a world with a table for its critic


class Table(torch.nn.Module):
    """Stands in for the critic where it can be exact: a value for every text."""

    def __init__(self, texts: list[str]):
        super().__init__()
        self.index = {text: n for n, text in enumerate(texts)}
        self.values = torch.nn.Parameter(torch.zeros(len(texts), 2, dtype=torch.float64))
        self.body = torch.nn.Module()
        self.body.device = torch.device("cpu")

    def forward(self, dialogues):
        states = [d["observations"][k] for d, k, _ in turns_of(dialogues)]
        pairs = [f"{d['observations'][k]}|{action}" for d, k, action in turns_of(dialogues)]
        return [self.values[[self.index[text] for text in column]] for column in (states, pairs)]


REWARDS = {"x": 1.0, "y": 0.4, "z": -0.5}  # of the last of three turns; of the others less, see `tabular`
SHARES = {
    "": {"x": 1, "y": 2, "z": 1},
    "x": {"y": 3, "z": 1},
}  # of the data's utterances; behind x there is no x


def tabular() -> list[dict]:
    """All dialogues of three turns, as often as a behaviour policy has them that never says x after x."""
    found = []
    for first in "xyz":
        for second in "xyz":
            for third in "xyz":
                count = 1
                for before, said in (("", first), (first, second), (second, third)):
                    count *= SHARES["x" if before == "x" else ""].get(said, 0)
                rewards = [0.5 * REWARDS[first], -0.2 * REWARDS[second], REWARDS[third]]
                found += [dialogue(first + second + third, True, rewards)] * count
    return found


def known_values(best: bool, gamma: float) -> float:
    """Value of the first state: of the best policy within the data, or of the data's own."""

    def value(said: str) -> float:
        if len(said) == 3:
            return 0.0
        shares = SHARES["x" if said[-1:] == "x" else ""]
        scale = (0.5, -0.2, 1.0)[len(said)]
        q = {letter: scale * REWARDS[letter] + gamma * value(said + letter) for letter in shares}
        return max(q.values()) if best else sum(q[a] * n for a, n in shares.items()) / sum(shares.values())

    return value("")


def value_of_awr(critic: Table, gamma: float, beta: float) -> float:
    """Value of the policy that E7 makes of the data: its shares of utterances times the weights."""

    def value(said: str, state: str) -> float:
        if len(said) == 3:
            return 0.0
        shares, scale = SHARES["x" if said[-1:] == "x" else ""], (0.5, -0.2, 1.0)[len(said)]
        q_N = torch.stack([critic.values[critic.index[f"{state}|{letter}"]].min() for letter in shares])
        weight_N = offline.awr_weights(q_N - critic.values[critic.index[state]].min(), beta, 1e9)
        p_N = weight_N * torch.tensor(list(shares.values()))
        worth = [scale * REWARDS[a] + gamma * value(said + a, f"{state}{a} {a}\n") for a in shares]
        return ((p_N / p_N.sum()) @ torch.tensor(worth, dtype=p_N.dtype)).item()

    return value("", ">")


@pytest.mark.parametrize("critic_loss, best", [("iql", True), ("sarsa", False)])
def test_the_critic_reaches_the_known_value(critic_loss, best):
    """IQL that of the best policy within the data (expectile near 1), sarsa that of the data's, to 2 %."""
    data, gamma = tabular(), 0.9
    texts = {text for d in data for text in d["observations"]}
    texts |= {f"{d['observations'][k]}|{action}" for d, k, action in turns_of(data)}
    critic = Table(sorted(texts))
    target = copy.deepcopy(critic).requires_grad_(False)
    args = small(critic_loss=critic_loss, gamma=gamma, expectile=0.998, polyak=0.2, max_grad_norm=1e9)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.05)
    steps = 1200
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.05 * min(1, 2 * (1 - step / steps))
        offline.critic_update(critic, target, optimizer, data, args)
    expected = known_values(best, gamma)
    assert critic.values[critic.index[">"]].mean().item() == pytest.approx(expected, rel=0.02)
    if best:  # and so does the policy that E7 makes of the data with it, where imitation alone does not
        assert value_of_awr(critic, gamma, 30.0) == pytest.approx(expected, rel=0.02)
        assert value_of_awr(critic, gamma, 0.0) == pytest.approx(known_values(False, gamma))
    assert abs(known_values(True, gamma) - known_values(False, gamma)) > 0.3, "the two can be told apart"


# ------------------------------------------------------------------------------------- the program


def lines_of(run: Path, name="metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def timeless(run: Path) -> list[dict]:
    """The metrics, without those of the clock."""
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines_of(run)]


def go(folder: Path, **changes) -> tuple[Path, dict]:
    """A run in a folder of its own, and its summary."""
    summary = offline.main(small(runs=folder, **changes))
    (run,) = folder.iterdir()
    return run, summary


def test_the_summary_has_the_last_and_the_best_evaluation(tmp_path, monkeypatch):
    """Of all evaluations, those before an interruption too, but for that of the untrained actor."""
    returns, evaluate = iter([-2.0, -9.0, -5.0, -7.0]), offline.evaluate

    def told(*args):
        figures, played = evaluate(*args)
        return figures | {"eval/return": next(returns)}, played

    monkeypatch.setattr(offline, "evaluate", told)
    run, summary = go(tmp_path, iterations=2, eval_every=1)
    assert (summary["eval_return"], summary["best_return"]) == (-5.0, -5.0)
    summary = offline.main(small(resume=str(run), iterations=3, eval_every=1))
    assert (summary["eval_return"], summary["best_return"], summary["warm_start_return"]) == (
        -7.0,
        -5.0,
        -2.0,
    )


def test_a_run_that_only_began_has_no_best_evaluation(tmp_path, monkeypatch):
    """That of the start is none of what was learned."""

    def pressed(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return update(*args)

    update = offline.critic_update
    monkeypatch.setattr(offline, "critic_update", pressed)
    _, summary = go(tmp_path, iterations=3, eval_every=9, critic_updates=1)
    assert summary["iteration"] == 1 and "warm_start_return" in summary
    assert "best_return" not in summary and "eval_return" not in summary


def test_a_resumed_run_learns_from_the_data_in_its_folder(tmp_path, finished):
    """The file that it was given may have changed since, or be gone."""
    file = tmp_path / "data.jsonl"
    file.write_bytes((finished[0] / "dataset.jsonl").read_bytes())
    run, _ = go(tmp_path / "runs", iterations=1, dataset=file)
    before = lines_of(run)[-1]["data/return"]
    file.unlink()
    offline.main(small(resume=run, runs=tmp_path / "runs", iterations=2, dataset=file))
    assert lines_of(run)[-1]["iteration"] == 2 and lines_of(run)[-1]["data/return"] == before


def test_a_resumed_run_takes_its_data_as_they_are(tmp_path):
    """What scripted players have made may be longer, and of another form, than a file may be."""
    run, _ = go(tmp_path, iterations=0)
    data = lines_of(run, "dataset.jsonl")
    data[0]["observations"][0] = "x" * 7000
    data[1]["answer"] = ""
    (run / "dataset.jsonl").write_text("".join(json.dumps(record) + "\n" for record in data))
    world = envs.make("twenty-questions-subset")
    seen = []

    def layout(dialogues, tokenizer):
        seen.extend(dialogues)
        return [[0]], [], []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "lay_out", layout)
        model = SimpleNamespace(context=10**6, tokenizer=None)
        offline.recorded_dialogues(world, model, model, small(resume=run, dataset="gone.jsonl"))
    assert seen[::2] == data, "read as they were written, for the actor and for the critic"


def test_actions_that_the_actor_cannot_finish_are_counted(tmp_path, finished, capfd):
    """Of the data, whose actions here have a token or more, and an end."""
    go(tmp_path, iterations=0, dataset=finished[0] / "dataset.jsonl", max_action_tokens=1)
    data = lines_of(finished[0], "dataset.jsonl")
    longer = sum(bool(action) for d in data for action in d["actions"])
    assert f"{longer} actions are longer than --max-action-tokens" in capfd.readouterr().out


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    torch.set_num_threads(1)
    return go(tmp_path_factory.mktemp("finished"), iterations=4)


@pytest.mark.parametrize(
    "changes",
    [
        *LOSSES.values(),
        {"critic_loss": "sarsa"},
        {"temperature": 0.7, "anneal_lr": False},
        {"dtype": "bfloat16"},
        {"env": "twenty-questions", "mix": "scripted"},
        {
            "env": "mini-detective",
            "mix": "random",
            "actor_loss": "reinforce",
            "bc_weight": 1.0,
            "dataset_size": 4,
        },
        {"batch": 1, "dataset_size": 1},
        {"critic_updates": 0},
        {"max_weight": math.inf},
    ],
    ids=str,
)
def test_every_switch_runs(tmp_path, changes):
    """Two iterations: every figure is finite, and of a tag that the page explains."""
    run, _ = go(tmp_path / "runs", **changes)
    _, *rows = lines_of(run)
    assert [row.pop("iteration") for row in rows] == [1, 2]
    assert all(math.isfinite(figure) for row in rows for figure in row.values())
    assert {tag for row in rows for tag in row} - explained() == set()
    assert ("critic/q_loss" in rows[0]) == (changes.get("critic_updates") != 0)
    for sample in lines_of(run, "rollouts.jsonl"):
        assert len(sample["Q"]) == len(sample["V"]) == len(sample["actions"]) == len(sample["rewards"]) > 0


def explained() -> set[str]:
    """The tags of the page's table of metrics."""
    table = PAGE.read_text(encoding="utf-8").split("## Logged metrics")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w/]+)` \| .{10,} \|$", table, re.M))


def test_sampled_and_greedy_evaluation(tmp_path, monkeypatch):
    """The greedy one has every task once, and each figure is of its own."""
    asked = spy(monkeypatch, "rollout")
    run, summary = go(tmp_path, eval_episodes=20)
    assert sorted(call.greedy for call in asked) == [False, False, True, True]
    for call in asked:
        assert call.indices == [*range(10)] * (1 if call.greedy else 2)
    for call in asked[-2:]:
        suffix = "_greedy" if call.greedy else ""
        dialogues = call.result
        for name, figure in envs.summarise(dialogues).items():
            assert summary[f"eval_{name}{suffix}"] == figure == lines_of(run)[-1][f"eval/{name}{suffix}"]
        said = [(sample["actions"], sample["answer"]) for sample in lines_of(run, "rollouts.jsonl")]
        played = [(d["actions"], d["answer"]) for d in dialogues[:8]]
        assert (said == played) == (not call.greedy), "what is kept to be read is what was sampled"


def test_filtered_bc_imitates_the_best_and_bc_all(tmp_path, monkeypatch):
    """And the critic learns from all in any case."""
    seen = {}
    for loss in ("bc", "filtered-bc"):
        with monkeypatch.context() as patch:
            of_actor, of_critic = spy(patch, "actor_update"), spy(patch, "critic_update")
            run, _ = go(tmp_path / loss, **LOSSES[loss] | {"actor_updates": 10, "critic_updates": 10})
        data = sorted(sum(d["rewards"]) for d in lines_of(run, "dataset.jsonl"))
        returns, of_critic = (
            [sum(d["rewards"]) for call in calls for d in call.dialogues] for calls in (of_actor, of_critic)
        )
        seen[loss] = returns
        assert min(of_critic) < data[len(data) // 2]
    assert min(seen["filtered-bc"]) >= data[-len(data) // 5] and min(seen["bc"]) < data[len(data) // 2]


def test_dialogues_that_do_not_fit_are_left_out(tmp_path, capfd):
    """And said; the longest that is learned from has room for one utterance more."""
    actor = tiny_checkpoint(tmp_path / "short", limit=120)
    run, _ = go(tmp_path / "runs", actor=actor, max_action_tokens=4)
    data = lines_of(run, "dataset.jsonl")
    assert f"{len(data)} of 40 dialogues fit into 104 tokens" in capfd.readouterr().out and 0 < len(data) < 40
    tokenizer = AutoTokenizer.from_pretrained(actor)
    assert max(len(offline.lay_out([d], tokenizer)[0][0]) for d in data) <= 116


REAL = Path(__file__).parents[3] / "shared/data/guess_my_city.json"  # published with the authors' code


@pytest.mark.slow
@pytest.mark.external
@pytest.mark.skipif(not REAL.exists(), reason=f"the authors' data of Guess My City is not at {REAL}")
def test_the_real_data_of_guess_my_city_trains(tmp_path, capfd):
    """What is left out is counted with the reason, the rest is learned from, and the agent plays its game."""
    texts = [d["observations"][-1] for d in read_dialogues(str(REAL))[0]]
    actor = tiny_checkpoint(tmp_path / "actor", texts, limit=1024)
    changes = {"iterations": 6, "eval_every": 6, "actor_updates": 6, "batch": 4, "max_action_tokens": 16}
    run, _ = go(tmp_path / "runs", env="guess-my-city", dataset=REAL, actor=actor, **changes)
    said = capfd.readouterr().out
    for note in (
        "20 of 950 dialogues left out",
        "16 of 950 dialogues left out",
        "29 of 950 dialogues left out",
    ):
        assert note in said
    assert re.search(r"\d+ of 885 dialogues fit into 960 tokens", said)
    rows = lines_of(run)
    assert all(math.isfinite(figure) for row in rows for figure in row.values())
    assert rows[-1]["actor/data_nll"] < rows[1]["actor/data_nll"] - 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("changes", [{}, LOSSES["reinforce-bc"], {"critic_loss": "sarsa"}], ids=str)
def test_a_run_on_the_gpu(tmp_path, changes):
    run, _ = go(tmp_path, device="cuda", **changes)
    offline.main(small(runs=tmp_path, resume=run, iterations=4, device="cuda", **changes))
    offline.main(small(runs=tmp_path, resume=run, iterations=5, device="cpu", **changes))
    assert [row["iteration"] for row in lines_of(run)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("changes", [{}, LOSSES["reinforce-bc"] | {"keep": 0.2}], ids=str)
def test_2n_iterations_are_n_and_n_resumed(tmp_path, changes):
    """To the bit. Fails for whatever is not in the checkpoint: random states, optimisers, target, data."""
    changes = changes | {"anneal_lr": False}
    whole, _ = go(tmp_path / "whole", iterations=4, **changes)
    half, _ = go(tmp_path / "half", iterations=2, **changes)
    early = torch.load(half / "checkpoint.pt", weights_only=True)
    offline.main(small(resume=half, runs=tmp_path / "half", iterations=4, **changes))
    assert timeless(half) == timeless(whole)
    assert lines_of(half, "rollouts.jsonl") == lines_of(whole, "rollouts.jsonl")
    late = torch.load(half / "checkpoint.pt", weights_only=True)
    assert torch.equal(early["torch_rng"], late["torch_rng"]), "torch's numbers differ from device to device"
    assert [path for path in half.rglob("*") if ".tmp" in path.name] == []


def test_learning_rates_fall(tmp_path, monkeypatch):
    """D5: linearly to zero, from iteration to iteration; and the actor comes after the critic."""
    look = lambda call: call.optimizer.param_groups[0]["lr"]  # noqa: E731
    steps = spy(monkeypatch, "clipped_step", look, of=models)
    go(tmp_path, iterations=4, critic_updates=2, actor_updates=1, critic_lr=1.0e-3, actor_lr=1e-4)
    assert [step.what for step in steps] == (["critic"] * 2 + ["actor"]) * 4
    shares = [1.0, 0.75, 0.5, 0.25]
    expected = [rate * share for share in shares for rate in (1e-3, 1e-3, 1e-4)]
    assert [step.seen for step in steps] == pytest.approx(expected)


def test_the_data_can_be_used_again(finished, tmp_path):
    """--dataset takes what a run has saved, and the run is the same to the bit."""
    again, _ = go(tmp_path, iterations=4, dataset=finished[0] / "dataset.jsonl")
    assert timeless(again) == timeless(finished[0])
    returns = [sum(d["rewards"]) for d in lines_of(again, "dataset.jsonl")]
    assert [row["data/return"] for row in lines_of(again)[1:]] == pytest.approx([np.mean(returns)] * 4)


def test_evaluation_tells_what_offline_runs_hide(actor):
    """Overestimation is min Q minus the discounted return, unseen the share that the data has nowhere."""
    critic, args = make_critic(actor, 1), small(eval_episodes=10, gamma=0.7)
    metrics, played = offline.evaluate(actor, critic, {"", "nothing"}, args)
    gaps, unseen = [], []
    for d, k, action in turns_of(played):
        _, q = value_alone(critic, d, k, action)
        assert d["Q"][k] == pytest.approx(q.min().item(), abs=1e-4)
        gaps.append(q.min().item() - sum(0.7**i * r for i, r in enumerate(d["rewards"][k:])))
        unseen.append(action not in ("", "nothing"))
    assert metrics["eval/overestimation"] == pytest.approx(np.mean(gaps), rel=1e-4)
    assert metrics["eval/unseen"] == pytest.approx(np.mean(unseen)) and 0 < np.mean(unseen) <= 1
    assert metrics["eval/return"] == pytest.approx(np.mean([sum(d["rewards"]) for d in played]))


@pytest.mark.parametrize("world", ["guess-my-city", "mini-detective", "detective", "webshop"])
def test_it_trains_in_every_world_of_the_paper(tmp_path, world):
    if problem := envs.missing(world):
        pytest.skip(problem)
    _, summary = go(tmp_path, env=world, dataset_size=4, eval_episodes=1, iterations=1)
    assert math.isfinite(summary["eval_return"])


MISUSE = {
    "unknown world": ({"env": "nowhere"}, "nowhere"),
    "no actor": ({"actor": "MISSING"}, "MISSING: there is no such folder$"),
    "no data": ({"dataset": "MISSING"}, "MISSING"),
    "nothing to imitate": ({"keep": 0.0}, "--keep 0.0"),
    "a share above one": ({"keep": 1.5}, "--keep 1.5"),
    "no such player": ({"mix": "random=0.5,genius=0.5"}, "genius.*scripted"),
    "no such share": ({"mix": "random=half"}, "half"),
    "a negative share": ({"mix": "random=-1,scripted=2"}, "positive"),
    "no such option": ({"world": "colour=blue"}, "colour"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_a_sentence_and_leaves_nothing_behind(tmp_path, case):
    changes, expected = MISUSE[case]
    missing = str(tmp_path / "not" / "there")
    changes = {key: missing if value == "MISSING" else value for key, value in changes.items()}
    with pytest.raises(ValueError, match=expected.replace("MISSING", re.escape(missing))):
        offline.main(small(runs=tmp_path / "runs", **changes))
    assert not (tmp_path / "runs").exists()


def test_without_a_checkpoint_it_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "__file__", str(tmp_path / "envs/models.py"))
    with pytest.raises(
        ValueError, match=r"checkpoints/mini-detective: .* python sft.py --env mini-detective makes a model"
    ):
        offline.main(small(runs=tmp_path / "runs", env="mini-detective", actor=""))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_iql_and_awr_beat_imitation_and_their_data(tmp_path, seed):
    """The default run on ten words: in ten minutes 3 points above BC and above the data; best return -2.8."""
    returns = {}
    for loss in ("awr", "bc"):
        run = tmp_path / loss
        args = {"env": "twenty-questions-subset", "seed": seed} | LOSSES[loss]
        summary = offline.main(offline.Args(runs=str(run), **args))
        returns[loss] = summary["eval_return"]
        assert summary["cpu_seconds"] < 600
        (folder,) = run.iterdir()
        data = lines_of(folder)[-1]["data/return"]
    assert returns["awr"] > returns["bc"] + 3 and returns["awr"] > data and returns["awr"] > -7


@pytest.mark.external
def test_a_real_model_learns_in_its_chat_template(tmp_path, smollm, monkeypatch):
    """SmolLM2-135M-Instruct, an iteration on games of three questions, E3 and imitation; then what was saved,
    by transformers alone.

    The same utterances have the same log-probs in `write_utterances` and in `score`.
    """
    monkeypatch.setattr("envs.worlds.twenty_questions.TwentyQuestions.max_turns", 3)
    written, scored = spy(monkeypatch, "write_utterances"), spy(monkeypatch, "score")
    sizes = {"iterations": 1, "dataset_size": 4, "eval_episodes": 1, "max_action_tokens": 8}
    sizes |= {"critic_updates": 1, "actor_updates": 1, "batch": 2}
    losses = LOSSES["reinforce-bc"] | {"actor_lr": 1e-5, "critic_lr": 1e-5}
    run, _ = go(tmp_path, actor=smollm, **losses, **sizes)

    (run / "checkpoint.pt").unlink()  # 4 GB, which pytest would keep
    tokenizer = AutoTokenizer.from_pretrained(run / "actor")
    (call,) = (call for call in scored if call.utterances)  # else those of the data
    (sampling,) = (other for other in written if other.result[0] is call.utterances)
    dialogues, rows, (_, said_N) = call.dialogues, sampling.rows, sampling.result
    logits_MV, token_M, _, owner_M = call.result
    logp_M = logits_MV.detach().log_softmax(-1).gather(-1, token_M[:, None])[:, 0]
    scored_N = torch.zeros(len(said_N)).index_add(0, owner_M, logp_M).tolist()
    assert len(said_N) == sum(len(d["actions"]) for d in dialogues)
    assert max(abs(a - b) for a, b in zip(said_N, scored_N, strict=True)) < 1e-4
    for d, row in zip(dialogues, rows, strict=True):
        asked = [d["observations"][0], *envs.replies(d["observations"], d["actions"])]
        turns = zip(asked, d["actions"], strict=False)
        pairs = [pair for turn in turns for pair in zip(("user", "assistant"), turn, strict=True)]
        chat = [{"role": role, "content": text} for role, text in pairs]
        assert tokenizer.decode(row) + "\n" == tokenizer.apply_chat_template(chat, tokenize=False)
        assert "<|im_start|>user\nQuestions:\n<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(row)

    model, start = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "actor", smollm))
    for now, old in zip(model.parameters(), start.parameters(), strict=True):
        assert not torch.equal(now, old) and torch.allclose(now, old, atol=1e-4)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)


# ------------------------------------------------------------------------------------ what else main hands on
def test_the_bc_loss_has_its_gradient(actor, data):
    critic = make_critic(actor, 1)

    def of(**changes):
        args = small(max_grad_norm=1e9, **changes)
        offline.actor_update(actor, critic, still(actor), data, args, np.random.default_rng(0))
        return gradient(actor).clone()

    alone, both, bc = of(actor_loss="reinforce"), of(actor_loss="reinforce", bc_weight=0.3), of(beta=0.0)
    assert torch.allclose(both, alone + 0.3 * bc, atol=1e-5) and bc.norm() > 0.1


def test_the_temperature_is_that_of_sampling_and_of_scoring(actor, data, monkeypatch):
    drawn, args = spy(monkeypatch, "write_utterances"), small(temperature=0.5, actor_loss="reinforce")
    log = offline.actor_update(
        actor, make_critic(actor, 1), still(actor), data, args, np.random.default_rng(0)
    )
    (call,) = drawn
    total, found, entropies = 0.0, [], 0.0
    for n, (d, k, action) in enumerate(turns_of(data)):
        rows, spans, _ = offline.lay_out([d], actor.tokenizer)
        before = rows[0][: spans[k].start]
        said = [*models.encode(actor.tokenizer, action), actor.tokenizer.eos_token_id]
        total -= sum(plain_logps(actor, before, said, 0.5))
        ids = call.result[0][n]
        found.append(sum(plain_logps(actor, before, ids, 0.5)))
        with torch.no_grad():
            logits = actor(input_ids=torch.tensor([before + ids])).logits[0, len(before) - 1 : -1] / 0.5
        entropies += torch.distributions.Categorical(logits=logits).entropy().sum().item()
    N = len(found)
    assert call.result[1] == pytest.approx(found, abs=1e-3)
    assert log["actor/data_nll"] == pytest.approx(total / N, rel=1e-4)
    assert log["actor/entropy"] == pytest.approx(entropies / N, rel=1e-3)


def test_the_data_are_those_of_their_own_seed(tmp_path):
    seeds = [(1, 0), (2, 0), (1, 5)]
    data = [
        lines_of(go(tmp_path / f"{a}{b}", seed=a, dataset_seed=b, iterations=0)[0], "dataset.jsonl")
        for a, b in seeds
    ]
    assert data[0] == data[1] != data[2]


def test_the_critic_starts_and_unseen_is_told_by_all_data_whatever_is_kept(tmp_path, monkeypatch):
    evaluated, mlps = spy(monkeypatch, "evaluate"), spy(monkeypatch, "mlp")
    run, _ = go(tmp_path, keep=0.1, iterations=1)
    data = lines_of(run, "dataset.jsonl")
    assert all(call.known == set(offline.flat(data, "actions")) for call in evaluated)
    returns = [offline.mc_returns(d["rewards"], 0.95) for d in data]
    assert mlps[0].value == pytest.approx(np.concatenate(returns).mean())


@pytest.mark.parametrize("which", ["actor", "critic"])
def test_gradients_are_clipped_to_max_grad_norm(actor, data, which):
    critic = make_critic(actor, 1)
    trained = actor if which == "actor" else critic
    before = torch.cat([p.detach().flatten() for p in trained.parameters()])
    optimizer, args = torch.optim.SGD(trained.parameters(), lr=1.0), small(max_grad_norm=0.01)
    if which == "actor":
        log = offline.actor_update(actor, critic, optimizer, data, args, None)
    else:
        log = offline.critic_update(critic, copy.deepcopy(critic), optimizer, data, args)
    moved = torch.cat([p.detach().flatten() for p in trained.parameters()]) - before
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-2) and log[f"{which}/grad_norm"] > 0.1
