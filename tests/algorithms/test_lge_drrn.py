"""lge_drrn.py: each equation against a loop in float64, the memory, the guide, whole runs without Java."""

import copy
import json
import math
import os
import runpy
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_scienceworld
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from fake_scienceworld import House
from torch import nn
from torch.nn.functional import huber_loss

import guide_simcse
import lge_drrn
from envs.worlds import scienceworld
from envs.worlds.scienceworld import ScienceWorld, variations
from lge_drrn import (  # E2, E5, E4
    DRRN,
    FIELDS,
    Args,
    Copy,
    Guide,
    ReplayBuffer,
    Ring,
    Table,
    Texts,
    Transition,
    Uniform,
    View,
    learn,
    prune,
    q_target,
    sample_action,
)

# ------------------------------------------------------------------------------------- a tiny world
TINY = {
    "env": "scienceworld", "worlds": 2, "steps": 24, "step_limit": 8, "log_every": 4, "eval_every": 12,
    "eval_episodes": 3, "dev_episodes": 3, "batch": 8, "hidden": 8, "vocabulary": 300, "vocabulary_steps": 4,
    "memory": 40, "copy_every": 3, "guide": "none",
}  # fmt: skip


@pytest.fixture(autouse=True)
def handlers():
    """`main` takes over Ctrl-C and SIGTERM, which pytest wants back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def house(monkeypatch):
    """ScienceWorld without Java."""
    fake_scienceworld.install(monkeypatch)


@pytest.fixture(scope="module")
def texts():
    words = [
        "go to garden",
        "take pear",
        "a house with\tthings",
        "nothing",
        "look",
        "",
        "find the pear OBSERVATION x",
    ]
    texts = Texts(lge_drrn.make_vocabulary(words, 280))
    for word in words:
        texts.add(word)
    return texts


@pytest.fixture(scope="module")
def guide_folder(tmp_path_factory):
    """A random BERT of one layer with a word for every letter, as guide_simcse.py would save it."""
    folder = tmp_path_factory.mktemp("guide")
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *[c for x in "abcdefghijklmnopqrstuvwxyz" for c in (x, f"##{x}")],
    ]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    config.pooling, tokenizer.model_max_length = "mean", 16
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def gru(weights: nn.GRU, rows: torch.Tensor) -> torch.Tensor:
    """The last hidden state of a GRU over rows [T, H], written out."""
    w_i, w_h = weights.weight_ih_l0.chunk(3), weights.weight_hh_l0.chunk(3)
    b_i, b_h = weights.bias_ih_l0.chunk(3), weights.bias_hh_l0.chunk(3)
    h = torch.zeros(rows.shape[1], dtype=rows.dtype)
    for x in rows:
        r = torch.sigmoid(w_i[0] @ x + b_i[0] + w_h[0] @ h + b_h[0])
        z = torch.sigmoid(w_i[1] @ x + b_i[1] + w_h[1] @ h + b_h[1])
        n = torch.tanh(w_i[2] @ x + b_i[2] + r * (w_h[2] @ h + b_h[2]))
        h = (1 - z) * n + z * h
    return h


def naive_q(network: DRRN, texts: Texts, state, action: int) -> torch.Tensor:
    """E1 for one pair: every text through its GRU, all four concatenated, the head."""
    parts = []
    for name, number in zip((*FIELDS, "action"), (*state, action), strict=True):
        parts.append(gru(network.encoders[name], network.embedding.weight[texts.tokens[number]]))
    weight = torch.cat([network.state_part.weight, network.action_part.weight], -1)
    first = weight @ torch.cat(parts) + network.state_part.bias
    return network.last.weight[0] @ first.relu() + network.last.bias[0]


# ------------------------------------------------------------------------------------- the maths
def test_e1_is_the_naive_loop_whether_texts_repeat_or_not(texts):
    torch.manual_seed(0)
    network = DRRN(texts.tokenizer.get_vocab_size(), 6).double()
    states = np.array([(6, 2, 3), (6, 2, 3), (4, 2, 5)])
    actions = [np.array([0, 1, 4, 0]), np.array([1]), np.array([0, 5])]
    found = Copy(network, texts).q(states, actions)
    for state, row, q_A in zip(states, actions, found, strict=True):
        assert torch.allclose(q_A, torch.stack([naive_q(network, texts, state, a) for a in row]), atol=1e-12)


def test_the_heads_two_parts_start_as_one_layer_would():
    """`nn.Linear(4 * H, H)` draws from +-1 / sqrt(4 H), its bias likewise."""
    network = DRRN(50, 32)
    one = nn.Linear(4 * 32, 32)
    for part in (network.state_part.weight, network.action_part.weight, network.state_part.bias):
        assert part.abs().max() <= 128**-0.5
    both = torch.cat([network.state_part.weight, network.action_part.weight], -1)
    assert both.shape == one.weight.shape and both.std().item() == pytest.approx(
        one.weight.std().item(), rel=0.05
    )


def test_e2_is_the_naive_loop():
    rng = np.random.default_rng(0)
    reward, next_q = (torch.tensor(rng.normal(0, 3, 50)) for _ in range(2))
    ended, left = torch.tensor((rng.random(50) < 0.3).astype(float)), torch.tensor(rng.normal(2, 2, 50))
    rows = zip(*(column.tolist() for column in (reward, next_q, ended, left)), strict=True)
    y = [r + (0 if e else 0.9 * (n if n < most else most)) for r, n, e, most in rows]  # D8
    assert 5 < (next_q > left).sum() < 45
    assert torch.allclose(q_target(reward, next_q, ended, left, 0.9), torch.tensor(y, dtype=torch.float64))


@pytest.mark.parametrize("delta, value", [(1.0, 60), (Args().huber_delta, -4)])
def test_d9_the_default_fits_the_mean_and_the_authors_loss_the_median(delta, value):
    """An action that brings 60 or, in two cases of five, -100: its median is 60, its mean -4."""
    y = torch.tensor([60.0] * 60 + [-100.0] * 40, dtype=torch.float64)
    q = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([q], lr=1.0)
    for _ in range(400):
        optimizer.zero_grad()
        huber_loss(q.expand(100), y, delta=delta).backward()
        optimizer.step()
    assert q.item() == pytest.approx(value, abs=2)


def test_e4_samples_the_softmax():
    """E4: shares of 20,000 draws."""
    q = torch.tensor([1.0, 3.0, 2.0])
    rng = np.random.default_rng(0)
    for temperature in (1.0, 2.0):
        drawn = [sample_action(q, temperature, rng.random()) for _ in range(20_000)]
        p = np.exp(q.numpy() / temperature)
        assert np.allclose(np.bincount(drawn, minlength=3) / 20_000, p / p.sum(), atol=0.01)
    assert sample_action(torch.tensor([0.0, 0.0]), 1.0, np.nextafter(1, 0)) == 1


def test_an_action_is_drawn_from_what_the_guide_leaves_or_with_epsilon_from_all(texts):
    class First:
        args = Args(temperature=1.0)

        def pruned(self, view):
            return view.valid[:2]

    class Known:
        def q(self, states, candidates):
            return [torch.tensor([0.0, 1.0, 2.0, 3.0])[: len(row)] for row in candidates]

    rng, views = np.random.default_rng(0), [View((0, 0, 0), 0, np.array([7, 5, 3, 1]))] * 2000
    choices = lge_drrn.choose(Uniform(), First(), views, 0.3, rng)
    assert np.mean([len(choice.q_A) == 4 for choice in choices]) == pytest.approx(0.3, abs=0.04)
    shares = np.bincount([choice.action for choice in choices], minlength=8)[[7, 5, 3, 1]] / 2000
    assert np.allclose(shares, [0.425, 0.425, 0.075, 0.075], atol=0.04)
    greedy = lge_drrn.choose(Known(), First(), views, 0.0, rng, is_greedy=True)
    assert {choice.action for choice in greedy} == {5}
    choices = lge_drrn.choose(Known(), First(), views, 0.0, rng)
    assert all(choice.view is view for choice, view in zip(choices, views, strict=True))
    assert np.mean([choice.action == 5 for choice in choices]) == pytest.approx(np.e / (1 + np.e), abs=0.04)
    First.args = Args(temperature=4.0)  # D11
    choices = lge_drrn.choose(Known(), First(), views, 0.0, rng)
    odds = np.e**0.25
    assert np.mean([choice.action == 5 for choice in choices]) == pytest.approx(odds / (1 + odds), abs=0.04)


def test_e5_keeps_the_nearest_and_what_is_kept_in_any_case():
    rng = np.random.default_rng(0)
    for _ in range(50):
        n, k = int(rng.integers(1, 30)), int(rng.integers(1, 12))
        cosine, kept = rng.integers(0, 5, n) / 5, rng.random(n) < 0.2
        best = sorted(range(n), key=lambda i: (-cosine[i], i))[:k]
        assert prune(cosine, kept, k).tolist() == sorted({*best, *np.flatnonzero(kept).tolist()})


@pytest.mark.parametrize("delta", [1.0, 20.0])
def test_learning_from_a_batch_is_the_naive_descent(texts, delta):
    """The same loss and gradient: texts encoded once as if encoded for each transition apart (E1, E2, E3)."""
    torch.manual_seed(1)
    network, args = (
        DRRN(texts.tokenizer.get_vocab_size(), 6).double(),
        Args(max_grad_norm=1e9, gamma=0.7, huber_delta=delta),
    )
    other = DRRN(texts.tokenizer.get_vocab_size(), 6).double()
    other.load_state_dict(network.state_dict())
    batch = [
        Transition((6, 2, 3), 0, 3.0, (6, 2, 5), False, 50, np.array([0, 1])),
        Transition((6, 2, 3), 1, -40.0, (4, 2, 3), True, 100, np.array([4])),
        Transition((6, 2, 3), 0, 0.0, (6, 2, 5), False, -7, np.array([1, 0, 4])),
    ]
    target = Copy(network, texts)
    metrics = learn(network, target, torch.optim.SGD(network.parameters(), lr=0.0), batch, texts, args)

    loss = 0.0
    for row in batch:
        with torch.no_grad():
            best = max(naive_q(other, texts, row.next_state, a).item() for a in row.next_actions)
        y = row.reward + 0.7 * (not row.terminated) * min(row.points_left, best)
        error = (naive_q(other, texts, row.state, row.action) - y).abs()
        loss = loss + (error**2 / 2 if error < delta else delta * (error - delta / 2)) / 3  # D9
    loss.backward()
    assert metrics["explorer/loss"] == pytest.approx(loss.item(), abs=1e-6)
    for (name, mine), theirs in zip(network.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6), name
    assert all(p.grad is None for p in target.network.parameters()), "no gradient through targets"


def test_the_gradient_is_clipped(texts):
    """By plain descent at rate 1 the weights move as far as --max-grad-norm says."""
    torch.manual_seed(1)
    network = DRRN(texts.tokenizer.get_vocab_size(), 6)
    before, target = copy.deepcopy(network), Copy(network, texts)
    batch = [Transition((6, 2, 3), 0, 90.0, (6, 2, 5), True, 0, np.array([0]))]
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    metrics = learn(network, target, optimizer, batch, texts, Args(max_grad_norm=0.01))
    pairs = zip(network.parameters(), before.parameters(), strict=True)
    moved = torch.cat([(new - old).flatten() for new, old in pairs]).norm().item()
    assert moved == pytest.approx(0.01, rel=1e-3) and metrics["explorer/grad_norm"] > 0.1


def test_a_view_says_what_is_wanted(texts):
    """The task is in the state, as in the authors' code, and is what the guide ranks by."""
    info = {"task": "find it", "observation": "You look.", "look": "a hall", "inventory": "an orange"}
    seen = lge_drrn.to_view(info | {"valid": ["wait", "look"]}, texts)
    said = [texts[number] for number in (*seen.state, seen.task, *seen.valid)]
    assert said == ["find it OBSERVATION You look.", "a hall", "an orange", "find it", "wait", "look"]


# -------------------------------------------------------------------------------- memory and tables
def transition(n: int, reward: float = 0.0) -> Transition:
    actions = np.arange(n % 3 + 1, dtype=np.int32)
    return Transition((n, n, n), n, reward, (n, n, n), False, np.inf, actions)


def numbers_of(transitions: list[Transition]) -> list[int]:
    return [row.action for row in transitions]


def test_a_ring_keeps_the_newest():
    ring = Ring(4)
    for n in range(10):
        ring.push(transition(n))
    assert numbers_of(ring.rows) == [8, 9, 6, 7]
    rng = np.random.default_rng(0)
    assert sorted(numbers_of(ring.sample(9, rng))) == [6, 7, 8, 9]
    drawn = [numbers_of(ring.sample(2, rng)) for _ in range(400)]
    assert all(len(set(pair)) == 2 for pair in drawn)
    assert np.bincount([n for pair in drawn for n in pair])[6:].min() > 150


def test_the_memory_has_two_rings():
    replay_buffer, rng = ReplayBuffer(10, 0.4, False), np.random.default_rng(0)
    for n in range(20):
        replay_buffer.push(transition(n, n % 5 == 0))
    assert len(replay_buffer) == 10
    assert sorted(numbers_of(replay_buffer.priority.rows)) == [0, 5, 10, 15]
    assert sorted(numbers_of(replay_buffer.rest.rows)) == [13, 14, 16, 17, 18, 19]
    drawn = numbers_of(replay_buffer.sample(8, rng))
    assert len(set(drawn)) == 8 and sum(n % 5 == 0 for n in drawn) == 3  # 0.4 of 8, none twice
    for reward in (0.0, -100.0):
        replay_buffer.push(transition(20, reward))
    assert numbers_of(replay_buffer.rest.rows).count(20) == 2, "what brings nothing has no priority"
    without = ReplayBuffer(10, 0.0, False)
    without.push(transition(1, 1.0))
    assert numbers_of(without.sample(4, rng)) == [1]
    with pytest.raises(ValueError, match="--priority-fraction must be below 1"):
        ReplayBuffer(10, 1.0, False)


def test_the_released_memory_has_half_the_size_and_half_the_batch():
    """D3: nothing is ever marked, so that the priority half stays empty; ours is made up for by the rest."""
    released, ours = ReplayBuffer(10, 0.5, True), ReplayBuffer(10, 0.5, False)
    rng = np.random.default_rng(0)
    for n in range(20):
        released.push(transition(n, 1.0))
        ours.push(transition(n, 0.0))
    assert len(released) == len(released.rest.rows) == len(ours.rest.rows) == 5
    assert len(released.sample(4, rng)) == 2 and len(ours.sample(4, rng)) == 4


def test_the_memory_survives_saving(tmp_path):
    ring = Ring(10)
    for n in range(17):
        ring.push(transition(n, float(n)))
    torch.save(ring.state_dict(), tmp_path / "x.pt")
    other = Ring(10)
    other.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True))
    for n in range(17, 20):
        ring.push(transition(n))
        other.push(transition(n))
    for mine, theirs in zip(ring.rows, other.rows, strict=True):
        assert mine[:-1] == theirs[:-1] and mine.next_actions.tolist() == theirs.next_actions.tolist()
        assert theirs.next_actions.dtype == np.int32
    empty = Ring(4)
    empty.load_state_dict(Ring(4).state_dict())
    assert empty.rows == [] and empty.pushed == 0


def test_a_table_computes_each_row_once():
    asked = []
    table = Table(lambda numbers: (asked.extend(numbers), torch.tensor(numbers)[:, None] * 2.0)[1])
    rng = np.random.default_rng(0)
    for _ in range(20):
        numbers = rng.integers(0, 3000, 200)
        assert table(numbers)[:, 0].tolist() == (numbers * 2.0).tolist()
    assert len(asked) == len(set(asked))
    table.forget()
    assert table(numbers)[:, 0].tolist() == (numbers * 2.0).tolist()
    assert len(asked) == len(set(asked)) + len(set(numbers.tolist())), "and anew what it has forgotten"


def test_a_copy_stays_as_it_is_until_it_is_renewed(texts):
    network = DRRN(texts.tokenizer.get_vocab_size(), 6)
    player, states, actions = Copy(network, texts), np.array([(6, 2, 3)]), [np.array([0, 1, 4])]
    (before,) = player.q(states, actions)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1)
    assert torch.equal(player.q(states, actions)[0], before)
    player.renew(network)
    (after,) = player.q(states, actions)
    assert torch.equal(after, Copy(network, texts).q(states, actions)[0]) and not torch.equal(after, before)
    assert not any(weight.requires_grad for weight in player.network.parameters())


# --------------------------------------------------------------------------------------- the guide
def test_the_guide_leaves_the_nearest_and_navigation(guide_folder, texts):
    args = Args(guide=str(guide_folder), top_k=1)
    actions = ["take pear", "go to garden", "teleport to moon", "take stone", "ago to x"]
    view = View(
        (0, 0, 0), texts.add("take stone"), np.array([texts.add(action) for action in actions], np.int32)
    )
    names = [texts[i] for i in Guide(args, texts).pruned(view)]
    assert names == ["go to garden", "teleport to moon", "take stone"]  # cosine 1 with itself
    without = Guide(replace(args, prune_navigation=True), texts)
    assert [texts[i] for i in without.pruned(view)] == ["take stone"]  # D6
    assert len(Guide(Args(guide="none"), texts).pruned(view)) == 5


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_guide_is_refused(broken, guide_folder, tmp_path, texts):
    for file in guide_folder.iterdir():
        (tmp_path / file.name).write_bytes(b"\x00garbage" if file.name == broken else file.read_bytes())
    with pytest.raises(ValueError, match=f"no model in {tmp_path}"):
        Guide(Args(guide=str(tmp_path)), texts)


def test_a_guide_that_would_be_another_is_refused(guide_folder, tmp_path, texts):
    """Weights under other names would be drawn at random, a pooling of another name taken for the mean."""
    shutil.copytree(guide_folder, tmp_path / "weights")
    weights = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    renamed = {f"other.{name}": weight for name, weight in weights.items()}
    safetensors.torch.save_file(renamed, tmp_path / "weights" / "model.safetensors", {"format": "pt"})
    for name, pooling in {"other": "max", "none": None}.items():
        shutil.copytree(guide_folder, tmp_path / name)
        config = json.loads((guide_folder / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"pooling": pooling}))
    for name, reason in {"weights": "no weights for", "other": "pooling", "none": "pooling"}.items():
        with pytest.raises(ValueError, match=reason):
            Guide(Args(guide=str(tmp_path / name)), texts)


def test_the_newest_guide_is_found(house, tmp_path, monkeypatch):
    """And a task by its number; both are in the arguments that the run keeps."""
    seen = []
    monkeypatch.setattr(lge_drrn, "Guide", lambda args, texts: (seen.append(args), 1 / 0))
    for number, expected in (
        (0, "none"),
        (1, "scienceworld__guide_simcse__1__x"),
        (2, "scienceworld__guide_simcse__2__x"),
    ):
        if number:
            folder = tmp_path / expected / "guide"
            folder.mkdir(parents=True)
            os.utime(folder, (number, number))
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, guide="auto", task="T20")
        assert expected in seen[-1].guide and seen[-1].task == "lifespan-longest-lived"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--task", "cook"], "cook"),
        (["--guide", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_arguments_are_one_line(house, options, said, tmp_path, monkeypatch, capsys):
    assert said in one_line(monkeypatch, capsys, *options, "--runs", str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def one_line(monkeypatch, capsys, *words: str) -> str:
    """What the script says on the command line when it ends with exit code 2."""
    capsys.readouterr()
    small = {key: value for key, value in TINY.items() if f"--{key}" not in words and key != "guide"}
    small = [word for key, value in small.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    guide = [] if "--guide" in words else ["--guide", "none"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as error:
        patch.setattr(
            sys, "argv", ["lge_drrn.py", *(small if "--resume" not in words else []), *guide, *words]
        )
        runpy.run_path(lge_drrn.__file__, run_name="__main__")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lge_drrn.py")]
    assert error.value.code == 2 and len(said) == 1
    return said[0]


# ----------------------------------------------------------------------------------------- whole runs
def run(tmp_path, **options) -> tuple[Path, dict]:
    args = Args(**(TINY | {"runs": str(tmp_path)} | options))
    summary = lge_drrn.main(args)
    return Path(options.get("resume") or max(tmp_path.glob("*lge_drrn*"), key=os.path.getmtime)), summary


def number_of(answer: str) -> int:
    """Of "find-living-thing 17" the 17."""
    return int(answer.split()[-1])


def state_of(folder: Path) -> dict:
    """What the checkpoint holds, with the script's and the modules' states beside the rest."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    return state | state.pop("state") | state.pop("modules")


def test_the_same_seed_draws_the_same_network_with_a_guide_and_without(tmp_path, house, guide_folder):
    copy, weights = shutil.copytree(guide_folder, tmp_path / "guide"), []
    without = transformers.BertModel.from_pretrained(guide_folder, add_pooling_layer=False)
    without.save_pretrained(copy)  # as guide_simcse.py does: what is missing is drawn when it is loaded
    for name, guide in (("with", str(copy)), ("without", "none")):
        folder, summary = run(tmp_path / name, guide=guide, steps=2, eval_every=2, batch=64, memory=200)
        assert summary["updates"] == 0
        weights.append(state_of(folder)["network"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def logged(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{tag: value for tag, value in row.items() if not tag.startswith("time/")} for row in rows]


@pytest.mark.parametrize("with_guide", [False, True])
def test_resuming_is_the_same_run_to_the_bit(house, tmp_path, with_guide, guide_folder):
    options = {"guide": str(guide_folder), "top_k": 2} if with_guide else {}
    options |= {"lr_end": Args.lr}  # else the rate depends on the steps to come
    whole, _ = run(tmp_path / "whole", **options)
    half, _ = run(tmp_path / "half", steps=12, **options)
    resumed, _ = run(tmp_path / "half", resume=str(half), **options)
    a, b = state_of(whole), state_of(resumed)
    assert all(torch.equal(a["network"][name], b["network"][name]) for name in a["network"])
    assert str(a["priority"]) == str(b["priority"]) and str(a["rest"]) == str(b["rest"])
    assert a["texts"] == b["texts"] and str(a["optimizer"]) == str(b["optimizer"])
    assert a["rng"] == b["rng"] and a["episodes"] == b["episodes"] and logged(whole) == logged(resumed)
    assert a["priority"]["pushed"] + a["rest"]["pushed"] == 48
    assert (whole / "rollouts.jsonl").read_text() == (resumed / "rollouts.jsonl").read_text()


def test_control_c_in_an_evaluation_ends_behind_it(house, tmp_path, monkeypatch):
    real = lge_drrn.greedy_play

    def pressed(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(lge_drrn, "greedy_play", pressed)
    folder, summary = run(tmp_path)
    assert summary["steps"] == 12 and state_of(folder)["iteration"] == 12 and "eval_test_score" in summary
    monkeypatch.setattr(lge_drrn, "greedy_play", real)
    resumed, _ = run(tmp_path, resume=str(folder))
    whole, _ = run(tmp_path / "whole")
    assert logged(resumed) == logged(whole), "the same run to the bit"


def test_an_evaluation_in_which_every_world_dies_measures_nothing(house, tmp_path, monkeypatch):
    monkeypatch.setattr(House, "dies_at", 1)
    _, summary = run(tmp_path, batch=2)
    assert summary["steps"] == 24 and not any("score" in name for name in summary)


@pytest.mark.parametrize("change", [("--memory", "80"), ("--priority-fraction", "0.2"), ("--hidden", "16")])
def test_what_a_resumed_run_must_keep(house, tmp_path, monkeypatch, change, capsys):
    folder, _ = run(tmp_path, steps=12)
    said = one_line(monkeypatch, capsys, "--resume", str(folder), *change)
    assert "checkpoint.pt cannot be resumed" in said and (
        "--memory" in said or "size mismatch" in said or "DRRN" in said
    )


def test_a_world_that_does_not_start_again_is_one_line(house, tmp_path, monkeypatch, capsys):
    folder, _ = run(tmp_path, steps=12)

    def load(self, *rest):
        raise scienceworld.Died("the simulator: no memory")

    monkeypatch.setattr(House, "load", load)
    monkeypatch.setattr(scienceworld.time, "sleep", lambda seconds: None)  # between its three attempts
    assert "no memory" in one_line(monkeypatch, capsys, "--resume", str(folder), "--steps", "24")


@pytest.mark.parametrize("explorer", ["drrn", "random"])
def test_what_main_hands_to_training_and_to_evaluations(house, tmp_path, monkeypatch, explorer):
    """Training plays train, evaluations dev and test, greedily, and by a copy of what is saved."""
    splits, greedy, trained, players, weights = [], [], [], [], []
    evaluating = False
    reset, choose, greedy_play = ScienceWorld.reset, lge_drrn.choose, lge_drrn.greedy_play

    def spied_reset(self, **options):
        splits.append((evaluating, self.split))
        result = reset(self, **options)
        trained.extend([] if evaluating else [result[1]["answer"]])
        return result

    def spied_choose(explorer, guide, views, epsilon, rng, is_greedy=False):
        greedy.append((evaluating, is_greedy, explorer))
        return choose(explorer, guide, views, epsilon, rng, is_greedy)

    def spied_play(explorer, guide, worlds, epsilon, args, step):
        nonlocal evaluating
        evaluating = True
        players.append(explorer)
        if isinstance(explorer, Copy):
            weights.append(copy.deepcopy(explorer.network.state_dict()))
        first = len(greedy)
        result = greedy_play(explorer, guide, worlds, epsilon, args, step)
        evaluating = False
        assert len(greedy) > first and all(row[2] is explorer for row in greedy[first:])
        return result

    monkeypatch.setattr(ScienceWorld, "reset", spied_reset)
    monkeypatch.setattr(lge_drrn, "choose", spied_choose)
    monkeypatch.setattr(lge_drrn, "greedy_play", spied_play)
    folder, _ = run(tmp_path, explorer=explorer)
    assert {split for is_evaluation, split in splits if not is_evaluation} == {"train"}
    assert {number_of(answer) for answer in trained} <= {*variations(Args.task, "train")}
    assert len(set(trained)) == len(trained) > 4, "one of 150 each time"
    assert {split for is_evaluation, split in splits if is_evaluation} == {"dev", "test"}
    is_drrn = explorer == "drrn"
    assert all(is_greedy == (is_drrn and is_evaluation) for is_evaluation, is_greedy, _ in greedy)
    assert len(players) == 2 and all(isinstance(player, Copy if is_drrn else Uniform) for player in players)
    if is_drrn:
        saved = state_of(folder)["network"]
        assert all(torch.equal(weights[-1][name], saved[name]) for name in saved)
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert {row["split"] for row in rows} == {"dev", "test"}
    assert all(number_of(row["variation"]) in variations(Args.task, row["split"]) for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_run_on_the_gpu(house, tmp_path, guide_folder):
    """Runs, is resumed there and on the CPU, and there the memory is where numpy reads it."""
    options = {"guide": str(guide_folder), "top_k": 2}
    folder, summary = run(tmp_path, steps=12, device="cuda", **options)
    assert summary["updates"] > 0
    for steps, device in ((24, "cuda"), (36, "cpu")):
        _, summary = run(tmp_path, resume=str(folder), steps=steps, device=device, **options)
        assert summary["steps"] == steps and np.isfinite(logged(folder)[-1]["explorer/loss"])


def test_a_dead_world_costs_its_episode_only(house, tmp_path, monkeypatch):
    monkeypatch.setattr(House, "dies_at", 3)
    folder, summary = run(tmp_path, memory=200)
    rows = logged(folder)
    assert summary["steps"] == 24 and max(row["rollout/died"] for row in rows) > 0
    size = sum(state_of(folder)[ring]["pushed"] for ring in ("priority", "rest"))
    died = sum(row["rollout/died"] * 8 for row in rows)  # mean over four steps of two worlds
    assert size == pytest.approx(48 - died), "a step that nobody knows is not remembered"


def test_the_random_explorer_learns_nothing(house, tmp_path):
    folder, summary = run(tmp_path, explorer="random")
    assert summary["updates"] == 0 and "eval_test_score" in summary
    assert not any(tag.startswith("explorer/") for row in logged(folder) for tag in row)


def test_random_play_is_another_with_another_seed(house, tmp_path):
    """The variations are the same for all seeds, what is played there is not; with the same seed it is."""

    def played(seed: int, name: str) -> list:
        folder, _ = run(tmp_path / name, explorer="random", steps=4, seed=seed)
        rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
        return [(row["split"], row["variation"], [turn["action"] for turn in row["turns"]]) for row in rows]

    first, again, other = played(1, "a"), played(1, "b"), played(2, "c")
    assert first == again and first != other


@pytest.mark.parametrize("target_actions", ["valid", "pruned"])
def test_what_is_remembered_and_logged_of_training(
    house, tmp_path, monkeypatch, target_actions, guide_folder
):
    """From what is pushed: transitions of an episode chain, with what the step showed as next state (D4), the
    limit bootstraps, a positive reward is the mark (D3). And the figures of the episodes, by hand."""
    pushed, stepped, guides, buffers = [], [], [], []
    push, step, make = ReplayBuffer.push, ScienceWorld.step, Guide.__init__

    def push_and_tell(self, transition):
        buffers.append(self)
        pushed.append(transition)
        push(self, transition)

    def make_and_tell(self, args, texts):
        guides.append(self)
        make(self, args, texts)

    def step_and_tell(self, action):
        result = step(self, action)
        stepped.append(result)
        return result

    monkeypatch.setattr(ReplayBuffer, "push", push_and_tell)
    monkeypatch.setattr(Guide, "__init__", make_and_tell)
    monkeypatch.setattr(lge_drrn, "greedy_play", lambda *rest: ({}, []))  # its steps are not remembered
    monkeypatch.setattr(ScienceWorld, "step", step_and_tell)
    options = {"explorer": "random", "guide": str(guide_folder), "top_k": 2, "epsilon": 0.5}
    options |= {"target_actions": target_actions, "eval_every": 60, "log_every": 60}
    options |= {"bound_targets": target_actions == "valid"}  # each of the two switches once
    folder, _ = run(tmp_path, worlds=1, steps=60, step_limit=5, **options)
    stepped = stepped[-60:]  # before them the vocabulary's
    assert len(pushed) == 60 and {math.copysign(1, row.reward) for row in pushed if row.reward} == {1, -1}
    assert any(result[3] for result in stepped)
    begins = True
    for before, row, (*_, reward, terminated, truncated, info) in zip(
        [None, *pushed], pushed, stepped, strict=False
    ):
        after = lge_drrn.to_view(info, guides[0].texts)
        assert begins or row.state == before.next_state
        assert guides[0].texts[row.action] == info["action"] and row.next_state == after.state
        assert (row.reward, row.terminated) == (reward, terminated)
        assert row.points_left == (100 - info["score"] if target_actions == "valid" else np.inf)  # D8
        assert terminated == (info["score"] in (100, -100))
        allowed = guides[0].pruned(after) if target_actions == "pruned" else after.valid
        assert row.next_actions.tolist() == allowed.tolist()
        begins = terminated or truncated
    marked = buffers[0].priority.rows
    assert marked == [row for row in pushed if row.reward > 0][-len(marked) :] and len(marked) > 1  # D3
    ended = [info for *_, info in stepped if "result" in info]
    expected = {
        "score": [max(0, info["score"]) for info in ended],
        "success": [info["score"] == 100 for info in ended],
        "failure": [info["score"] == -100 for info in ended],
        "length": [info["result"]["length"] for info in ended],
    }
    (row,) = logged(folder)
    for name, values in expected.items():
        assert row[f"rollout/{name}"] == pytest.approx(np.mean(values))
    assert 0 < row["rollout/failure"] < 1 and row["memory/priority"] == len(marked)


def test_the_area_and_the_first_success_by_hand(house, tmp_path, monkeypatch):
    """From what every step returned: of each ten steps the mean score, of these the mean so far. The first
    success is the step of the first score of 100; as long as there is none, the step so far."""
    stepped, step = [], ScienceWorld.step

    def step_and_tell(self, action):
        result = step(self, action)
        stepped.append(result[4])
        return result

    monkeypatch.setattr(ScienceWorld, "step", step_and_tell)
    options = {"explorer": "random", "eval_episodes": 0, "dev_episodes": 0, "log_every": 10, "eval_every": 60}
    folder, summary = run(tmp_path, steps=60, seed=2, **options)
    rows = logged(folder)
    scores = [
        [info["score"] for info in stepped[-120:][2 * i : 2 * i + 2] if "result" in info] for i in range(60)
    ]
    first = next(i for i, row in enumerate(scores, 1) if 100 in row)
    means = []
    for n, row in enumerate(rows, 1):
        ended = [max(0, score) for row in scores[10 * n - 10 : 10 * n] for score in row]
        means.append(np.mean(ended))
        assert row["rollout/score"] == pytest.approx(means[-1])
        assert row["rollout/area"] == pytest.approx(np.mean(means))
        assert row["rollout/first_success"] == min(first, 10 * n)
    assert 10 < first < 60 and len(set(means)) > 2 and summary["first_success"] == first
    assert summary["area"] == pytest.approx(np.mean(means))
    assert summary["successes"] == sum(row.count(100) for row in scores)


def test_without_a_success_the_first_is_still_to_come(house, tmp_path, monkeypatch):
    monkeypatch.setattr(House, "ROOMS", ("kitchen", "hallway"))  # no garden: nothing is to be found
    folder, summary = run(tmp_path, explorer="random")
    assert summary["successes"] == 0 and summary["first_success"] == 24
    assert [row["rollout/first_success"] for row in logged(folder)] == [4, 8, 12, 16, 20, 24]


def test_by_default_it_plays_in_the_school_with_the_ready_made_guide(tmp_path):
    args = lge_drrn.complete(Args(runs=str(tmp_path)))
    ready = Path(lge_drrn.__file__).parent / "checkpoints/school-guide"
    assert (args.env, args.steps, Path(args.guide)) == ("school", 600, ready) and ready.is_dir()
    assert (args.step_limit, args.hidden, args.gamma, args.temperature) == (40, 64, 0.7, 5.0)
    theirs = lge_drrn.complete(Args(env="scienceworld", runs=str(tmp_path)))
    assert (theirs.steps, theirs.guide) == (2500, "none"), "it is none of ScienceWorld's"
    assert (theirs.hidden, theirs.vocabulary, theirs.gamma, theirs.temperature) == (128, 4000, 0.9, 1.0)
    assert theirs.step_limit == 100
    assert lge_drrn.complete(Args(gamma=0.3, temperature=2.0, runs=str(tmp_path))).temperature == 2.0
    assert lge_drrn.complete(Args(gamma=0.0, runs=str(tmp_path))).gamma == 0.0, "zero is a discount, too"
    own = tmp_path / "school__guide_simcse__1__x" / "guide"
    own.mkdir(parents=True)
    assert lge_drrn.complete(Args(runs=str(tmp_path), steps=7)).guide == str(own)
    with pytest.raises(ValueError, match=r"^--env nowhere: the explorer knows school and scienceworld$"):
        lge_drrn.complete(Args(env="nowhere"))


@pytest.mark.parametrize("name", ["steps", "top_k", "copy_every", "memory"])
def test_what_counts_from_one_is_told_so_before_anything_is_written(name, tmp_path):
    """No steps leave nothing to report, and -1 of the nearest actions are all but one."""
    args = Args(runs=str(tmp_path / "runs"), **{name: -2 if name == "top_k" else 0})
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"^{flag} (0|-2): it must be at least 1$"):
        lge_drrn.main(args)
    assert not (tmp_path / "runs").exists()


def test_a_run_in_the_school(tmp_path):
    """With the ready-made guide 50 actions are left, and the ways; without one all that are valid."""
    small = {
        "env": "school",
        "steps": 8,
        "eval_every": 8,
        "epsilon": 0.0,
        "eval_episodes": 2,
        "dev_episodes": 2,
    }
    candidates = {}
    for guide in ("auto", "none"):
        folder, summary = run(tmp_path / guide, guide=guide, **small)
        candidates[guide] = np.mean([row["rollout/candidates"] for row in logged(folder)])
        assert 0 <= summary["eval_test_score"] <= 100 and summary["updates"] > 0
    assert 50 < candidates["auto"] < 65 and candidates["none"] > 250


def test_the_copy_is_renewed_as_often_as_said(house, tmp_path, monkeypatch, guide_folder):
    """D1; and before and after each evaluation, when the guide's vectors are forgotten, too."""
    renewed, renew, guides, forget = [], Copy.renew, [], Guide.forget

    def renew_and_tell(self, network):
        renewed.append(network)
        renew(self, network)

    def forget_and_tell(self):
        guides.append(self)
        assert self.table.used > 0
        forget(self)

    monkeypatch.setattr(Copy, "renew", renew_and_tell)
    monkeypatch.setattr(Guide, "forget", forget_and_tell)
    _, summary = run(tmp_path, eval_every=24, guide=str(guide_folder), top_k=2)
    assert len(renewed) == summary["updates"] // 3 + 2
    assert len(guides) == 1 and guides[0].table.used == 0


@pytest.mark.parametrize("schedule", ["fixed", "increasing"])
def test_epsilon_is_as_the_schedule_says_in_training_and_in_evaluations(
    house, tmp_path, monkeypatch, schedule
):
    """E5: of each step; an evaluation prunes as the step behind which it comes."""
    seen, choose = [], lge_drrn.choose

    def spied_choose(explorer, guide, views, epsilon, rng, is_greedy=False):
        seen.append((is_greedy, epsilon))
        return choose(explorer, guide, views, epsilon, rng, is_greedy)

    monkeypatch.setattr(lge_drrn, "choose", spied_choose)
    run(tmp_path, steps=8, eval_every=4, epsilon=0.3, epsilon_schedule=schedule, batch=64)
    increasing = schedule == "increasing"
    trained = [epsilon for is_greedy, epsilon in seen if not is_greedy]
    assert trained == ([step / 8 for step in range(1, 9)] if increasing else [0.3] * 8)
    evaluated = {epsilon for is_greedy, epsilon in seen if is_greedy}
    assert evaluated == ({4 / 8, 8 / 8} if increasing else {0.3})


def test_switches_reach_what_they_switch(house, tmp_path, monkeypatch):
    """Each with another value than its default; a resumed run has the new learning rate."""
    seen, learn = [], lge_drrn.learn

    def spied_learn(network, target, optimizer, batch, texts, args):
        seen.append((network, optimizer.param_groups[0]["lr"], len(batch)))
        return learn(network, target, optimizer, batch, texts, args)

    monkeypatch.setattr(lge_drrn, "learn", spied_learn)
    options = {"priority": "released", "priority_fraction": 0.25, "memory": 48, "batch": 12, "lr": 0.01}
    options |= {"lr_end": 0.002}
    options |= {"hidden": 6, "step_limit": 3, "simplifications": ""}
    folder, _ = run(tmp_path, steps=12, **options)
    run(tmp_path, resume=str(folder), **(options | {"lr": 0.5, "lr_end": 0.5}))
    falling = [0.01 - 0.008 * step / 12 for step in range(1, 13)]  # D7; the first steps have no batch yet
    rates = [lr for _, lr, _ in seen]
    assert rates[:-12] == pytest.approx(falling[-len(rates[:-12]) :]) and rates[-12:] == [0.5] * 12
    assert all(length == 9 for _, _, length in seen)  # D3: the priority quarter stays empty
    assert seen[0][0].embedding.weight.shape[1] == 6
    state = state_of(folder)
    rings = [state["priority"], state["rest"]]
    assert [(ring["capacity"], ring["pushed"]) for ring in rings] == [(12, 0), (36, 48)]
    assert not any(text.startswith("teleport") for text in state["texts"]["texts"])  # "easy" has it
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert max(len(row["turns"]) for row in rows) == 3


def test_an_evaluation_by_hand(house, monkeypatch):
    """As many episodes as said, of variations drawn by the step; what failed counts as 0."""
    drawn, scores = [], [100, -100, 50, 0, 25, -100]

    class Known:
        def reset(self, split, indices):
            drawn.append((split, indices))
            return indices

    def play_out(explorer, guide, worlds, infos, epsilon, rng, is_greedy):
        return [{"score": scores[len(drawn) * 2 % 6 + i]} for i in range(len(infos))]

    monkeypatch.setattr(lge_drrn, "play_out", play_out)
    args = Args(env="scienceworld", worlds=2, eval_episodes=6, dev_episodes=4)
    metrics, transcripts = lge_drrn.greedy_play(None, None, Known(), 0.1, args, 7)
    expected = {"dev": ((50 + 25) / 4, 0, 1 / 4), "test": ((100 + 50 + 25) / 6, 1 / 6, 2 / 6)}
    for name, figures in expected.items():
        found = [metrics[f"eval/{name}_{figure}"] for figure in ("score", "success", "failure")]
        assert found == pytest.approx(figures)
    assert [len(indices) for _, indices in drawn] == [2] * 5
    assert [split for split, _ in drawn] == ["dev"] * 2 + ["test"] * 3
    assert [row["split"] for row in transcripts] == ["dev", "dev", "test", "test"]
    dev = [index for split, indices in drawn if split == "dev" for index in indices]
    assert dev == np.random.default_rng(7).integers(75, size=4).tolist() and len(set(dev)) > 2


def test_the_final_figure_is_the_mean_of_the_last_tenth(house, tmp_path, monkeypatch):
    """App. A.1.3: of the evaluations; here of 20 the last two."""

    def greedy_play(explorer, guide, worlds, epsilon, args, step):
        return {"eval/test_score": float(step)}, []

    monkeypatch.setattr(lge_drrn, "greedy_play", greedy_play)
    _, summary = run(tmp_path, worlds=1, steps=20, eval_every=1, explorer="random")
    assert summary["eval_test_score"] == (19 + 20) / 2


def test_from_gold_paths_to_an_explorer(house, tmp_path, monkeypatch):
    """The guide learns from paths that are walked for it, and --guide auto explores with it."""
    monkeypatch.chdir(tmp_path)
    sizes = {"encoder": "tiny", "width": 32, "layers": 1, "iterations": 2, "updates": 5, "lr": 3e-3}
    data = {"env": "scienceworld", "train_variations": 3, "negative_variations": 1, "threads": 1}
    ranked = guide_simcse.main(guide_simcse.Args(**sizes, **data))
    files = sorted(path.name for path in Path("data").iterdir())
    assert files == ["guide_dev_1.jsonl.gz", "guide_train_3_1.jsonl.gz"]
    assert ranked["pairs"] == 30 * 3 * 3, "tasks, variations, actions of a path"
    assert 0 < ranked["eval_map"] <= 1
    folder, _ = run(Path("runs"), guide="auto", top_k=2)
    (guide,) = Path("runs").glob("*/guide")
    assert json.loads((folder / "args.json").read_text())["guide"] == str(guide)
    without, _ = run(Path("runs"), top_k=2)
    candidates = [np.mean([row["rollout/candidates"] for row in logged(x)]) for x in (folder, without)]
    assert candidates[0] < candidates[1] - 1


# ------------------------------------------------------------------------------------------ learning
class Toy:
    """Two rooms and three things: "take" of the thing that the task names, in the garden, is worth 100."""

    id, things = "scienceworld", ("pear", "stone", "rope")

    def __init__(self, task="find-living-thing", split="train", simplifications="easy", step_limit=8):
        self.step_limit, self.die_at = step_limit, -1
        self.choose(split)

    def choose(self, split):
        self.split, self.variations, self.num_tasks = split, range(3), 3

    def info(self, said):
        names = [
            f"go to {'house' if self.garden else 'garden'}",
            "look around",
            *[f"take {x}" for x in self.things],
        ]
        return {
            "task": f"find the {self.things[self.index]}",
            "observation": said,
            "look": "a garden with a pear, a stone and a rope" if self.garden else "a house",
            "inventory": "nothing",
            "valid": sorted(names),
            "score": self.score,
            "died": False,
        }

    def reset(self, seed=None, options=None):
        self.index, self.garden, self.score, self.turns, self.total = options["index"] % 3, False, 0, 0, 0
        info = self.info("You wake up.") | {"answer": f"{self.split} {self.index}"}
        return "", info

    def step(self, action):
        self.turns += 1
        before, terminated, said = self.score, False, "Nothing happens."
        if action.startswith("go to "):
            self.garden, said = action == "go to garden", f"You {action}."
        elif action.startswith("take ") and self.garden:
            right = action == f"take {self.things[self.index]}"
            self.score, terminated, said = (100 if right else -100), True, "You take it."
        truncated = not terminated and self.turns == self.step_limit
        info = self.info(said) | {"action": action}
        if self.turns == self.die_at:
            self.score, terminated, truncated, info["died"] = before, False, True, True
        if terminated or truncated:
            info["result"] = {"return": float(self.score), "length": self.turns, "success": self.score >= 100}
        return "", float(self.score - before), terminated, truncated, info

    def close(self):
        pass


@pytest.fixture
def toy(monkeypatch):
    """The trainer on a world smaller than the house, so that it is learned in a minute."""
    monkeypatch.setattr(scienceworld, "ScienceWorld", Toy)
    monkeypatch.setattr(scienceworld, "variations", lambda task, split: range(3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_a_small_world(toy, tmp_path, seed):
    """Random play takes the right thing in a third of the cases and the wrong one in two thirds."""
    options = {
        "steps": 1500,
        "worlds": 4,
        "hidden": 32,
        "batch": 32,
        "memory": 5000,
        "lr": 1e-3,
        "log_every": 500,
    }
    _, summary = run(tmp_path, **options, eval_every=1500, eval_episodes=12, seed=seed, copy_every=20)
    assert summary["eval_test_success"] > 0.9


def test_the_guides_rank_of_an_action():
    guide = object.__new__(lge_drrn.Guide)
    guide.cosines = lambda view: np.array([0.1, 0.9, 0.5])
    view = SimpleNamespace(valid=np.array([7, 3, 5]))
    assert [guide.rank(view, action) for action in (3, 5, 7)] == [1, 2, 3]


# ------------------------------------------------------------------------------------ what else main hands on


def test_targets_are_the_copys(house, tmp_path, monkeypatch):
    seen, learn, players, choose = [], lge_drrn.learn, [], lge_drrn.choose

    def spied_learn(network, target, *rest):
        lags = any(
            not torch.equal(a, b)
            for a, b in zip(network.parameters(), target.network.parameters(), strict=True)
        )
        seen.append((target, lags))
        return learn(network, target, *rest)

    monkeypatch.setattr(lge_drrn, "learn", spied_learn)
    monkeypatch.setattr(
        lge_drrn, "choose", lambda *given, **more: players.append(given[0]) or choose(*given, **more)
    )
    run(tmp_path, copy_every=3, eval_every=24)
    assert {id(target) for target, _ in seen} == {id(player) for player in players}
    assert [lags for _, lags in seen] == [i % 3 > 0 for i in range(len(seen))]


def test_an_episodes_score_is_what_its_turns_earned(house, tmp_path, monkeypatch, guide_folder):
    episodes, play_out = [], lge_drrn.play_out

    def spied(*given):
        played = play_out(*given)
        episodes.extend(played)
        return played

    monkeypatch.setattr(lge_drrn, "play_out", spied)
    folder, _ = run(
        tmp_path,
        explorer="random",
        steps=4,
        eval_every=4,
        eval_episodes=20,
        dev_episodes=20,
        step_limit=20,
        guide=str(guide_folder),
        top_k=5,
    )
    for episode in episodes:
        assert (sum(turn["reward"] for turn in episode["turns"]) < 0) == (episode["score"] < 0)
    scores = [episode["score"] for episode in episodes]
    assert min(scores) < 0 < max(scores)
    row = logged(folder)[-1]
    assert row["eval/dev_failure"] + row["eval/test_failure"] == pytest.approx(
        np.mean([s < 0 for s in scores]) * 2
    )


def test_the_entropy_is_of_the_policy(texts):
    """E4 at the run's temperature."""
    q = torch.tensor([0.0, 4.0])
    choice = lge_drrn.Choice(lge_drrn.View((0, 0, 0), 0, np.array([0, 1])), 0, q)
    info = {
        "task": "t",
        "observation": "",
        "look": "",
        "inventory": "",
        "valid": ["look"],
        "score": 0,
        "died": True,
    }
    _, logs = lge_drrn.remember(
        [choice],
        [(("", 0.0, False, False, info), info)],
        None,
        SimpleNamespace(texts=texts),
        Args(temperature=4.0),
    )
    p = np.exp([0, 1]) / (1 + np.e)
    assert logs[0]["rollout/entropy"] == pytest.approx(-(p * np.log(p)).sum())
