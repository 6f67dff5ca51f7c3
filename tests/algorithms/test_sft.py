"""What sft.py promises: its loss, that a batch is no more than its parts, what it learns from, and resuming.

The worlds are toys defined here: one says a word that must be said again, and its text only grows; the
other one's text is written anew every turn. The models have one layer.
"""

import inspect
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import envs
import sft
from envs import models, runs
from sft import ACTION, CONTEXT, REPLY

ROOT = Path(sft.__file__).parent
WORDS = ["ant", "bee", "cow", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "kite", "lark"]


class Parrot(gymnasium.Env):
    """A word is named and must be said three times; each time earns 1."""

    id = "parrot"
    num_tasks = len(WORDS)
    max_turns = 3
    max_action_chars = 20
    append_only = True
    best_return = 3.0

    def __init__(self, loud: int = 0):
        self.loud = loud

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        index = (options or {}).get("index", 0)
        self.word, self.turn, self.total = WORDS[index], 0, 0.0
        self.observation = f"say {'so ' * (index % 4)}{self.word}\n" + "!" * self.loud
        return self.observation, {"answer": self.word}

    def tell(self, action: str, reply: str) -> str:
        return f"{self.observation}{action}{reply}"

    def step(self, action):
        action, self.turn = action.split("\n")[0].strip()[:20], self.turn + 1
        reward = float(action == self.word)
        self.total += reward
        self.observation = self.tell(action, ": right\n" if reward else ": wrong\n")
        over, info = self.turn == 3, {"action": action}
        if over:
            figures = {"return": self.total, "length": 3, "success": self.total == 3}
            info |= {"episode": figures, "result": figures}
        return self.observation, reward, over, False, info

    def demonstrations(self, n: int, seed: int) -> list[dict]:
        rng, made = random.Random(seed), []
        for _ in range(n):
            observation, info = self.reset(options={"index": rng.randrange(self.num_tasks)})
            d = {
                "observations": [observation],
                "actions": [],
                "rewards": [],
                "terminated": True,
                "imitate": [],
            }
            for _ in range(3):
                is_right = rng.random() < 0.8
                observation, reward, *_, info = self.step(self.word if is_right else rng.choice(WORDS))
                d["observations"].append(observation)
                d["actions"].append(info["action"])
                d["rewards"].append(reward)
                d["imitate"].append(bool(reward))
            made.append(d | {"answer": self.word, "success": sum(d["rewards"]) == 3})
        return made


class Rooms(Parrot):
    """The same, but what was said before is not shown again."""

    id = "rooms"
    append_only = False

    def tell(self, action, reply):
        return f"turn {self.turn}{reply}say {self.word}\n"


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for world in (Parrot, Rooms):
        monkeypatch.setitem(envs.ENVS, world.id, envs.Entry(f"{__name__}:{world.__name__}", "a toy"))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


TINY = {"demonstrations": 40, "epochs": 2, "batch": 8, "width": 32, "inner": 32, "layers": 1, "context": 64}
TINY |= {"max_action_tokens": 4, "vocabulary": 600, "warm_up": 3, "env": "parrot"}


def small(tmp_path, **options) -> sft.Args:
    return sft.Args(**TINY | {"runs": str(tmp_path)} | options)


@pytest.fixture(scope="module")
def tiny():
    """A model and its tokenizer, and dialogues of both toys."""
    torch.manual_seed(0)
    dialogues = Parrot().demonstrations(40, 0) + Rooms().demonstrations(40, 0)
    model = sft.make_tiny(dialogues, sft.Args(**TINY))
    return model.double(), model.tokenizer, dialogues


def rows_in(dialogues, tokenizer) -> list[torch.Tensor]:
    return [row for d in dialogues for row in sft.rows_of(d, tokenizer, TINY["context"])]


def run_of(tmp_path) -> Path:
    (run,) = tmp_path.iterdir()
    return run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------ the loss


def test_e1_is_the_weighted_mean(tiny):
    """E1 against a loop over tokens in float64."""
    logp, weight = torch.randn(50, dtype=torch.float64), torch.rand(50, dtype=torch.float64)
    naive = -sum(float(lp) * float(w) for lp, w in zip(logp, weight, strict=True)) / sum(map(float, weight))
    total = weight.sum()
    assert sft.imitation_loss(logp, weight, total).item() == pytest.approx(naive, rel=1e-12)
    assert sft.imitation_loss(logp, 3 * weight, 3 * total).item() == pytest.approx(naive, rel=1e-12)
    parts = zip(logp.split(7), weight.split(7), strict=True)
    assert sum(sft.imitation_loss(*part, total) for part in parts).item() == pytest.approx(naive, rel=1e-12)
    logp.requires_grad_()
    sft.imitation_loss(logp, (weight > 0.5).double(), total).backward()
    assert (logp.grad == 0).tolist() == (weight <= 0.5).tolist()


def test_scores_are_those_of_a_plain_forward_pass(tiny):
    model, tokenizer, dialogues = tiny
    rows = rows_in(dialogues[:3] + dialogues[40:42], tokenizer)
    logp_M, kind_M = sft.score(model, rows)
    expected, kinds = [], []
    for row in rows:
        ids, logits = row[:, 0].long(), model(input_ids=row[None, :, 0].long()).logits[0].log_softmax(-1)
        for t in range(1, len(row)):
            if row[t, 1] != CONTEXT:
                expected.append(logits[t - 1, ids[t]].item())
                kinds.append(int(row[t, 1]))
    assert logp_M.tolist() == pytest.approx(expected, abs=1e-10) and kind_M.tolist() == kinds


def test_padding_order_and_composition_of_a_batch_change_nothing(tiny):
    model, tokenizer, dialogues = tiny
    rows = rows_in(dialogues[:4] + dialogues[40:43], tokenizer)
    assert len({len(row) for row in rows}) > 2
    whole = sft.score(model, rows)[0]
    alone = torch.cat([sft.score(model, [row])[0] for row in rows])
    turned = sft.score(model, rows[::-1])[0]
    counts = [int((row[1:, 1] != CONTEXT).sum()) for row in rows]
    assert torch.allclose(whole, alone, atol=1e-12)
    assert torch.allclose(whole, torch.cat(turned.split(counts[::-1])[::-1]), atol=1e-12)


def gradients(model, rows, micro_batch=0, reply_weight=1.0) -> dict[str, torch.Tensor]:
    """After one update with a rate of 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sft.update(model, [optimizer], rows, micro_batch, reply_weight)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_one_times_eight_is_eight_times_one(tiny, monkeypatch):
    """Micro-batches of rows of unequal lengths, and so of unequal numbers of tokens and sums of weights."""
    model, tokenizer, dialogues = tiny
    rows = rows_in(dialogues[:6] + dialogues[40:41], tokenizer)[:8]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    whole = gradients(model, rows, reply_weight=0.25)
    told = sft.update(model, [optimizer], rows, 0, 0.25)
    passes = spy(monkeypatch, "score")
    for micro_batch in (1, 3, 8):
        parts = gradients(model, rows, micro_batch, 0.25)
        assert all(torch.allclose(whole[name], parts[name], atol=1e-14) for name in whole)
        assert sft.update(model, [optimizer], rows, micro_batch, 0.25) == pytest.approx(told, rel=1e-12)
        assert {len(given["rows"]) for given in passes} == {micro_batch, 8 % micro_batch or micro_batch}
        passes.clear()


def test_gradient_checkpointing_changes_nothing(tiny, monkeypatch):
    """Of a model of two layers; what is scored without gradients is not computed again, and can be cached."""
    _, tokenizer, dialogues = tiny
    model = sft.make_tiny(dialogues, sft.Args(**TINY | {"layers": 2})).double()
    rows = rows_in(dialogues[:6], tokenizer)
    plain = gradients(model, rows)
    remade, forward = [], torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        "transformers.modeling_utils.checkpoint", lambda *a, **k: remade.append(1) or forward(*a, **k)
    )
    models.prepare(model, sft.Args(gradient_checkpointing=True))
    model.double()
    saved = gradients(model, rows)
    assert len(remade) == 2
    assert all(torch.allclose(plain[name], saved[name], atol=1e-6) for name in plain)
    with torch.no_grad():
        sft.score(model, rows)
    assert len(remade) == 2 and not any(module.training for module in model.modules())


def test_no_gradient_from_what_is_not_learned(tiny):
    """Replies of weight 0 and actions that are not imitated: what they are foreseen as plays no part."""
    model, tokenizer, dialogues = tiny
    (row,) = sft.rows_to_learn(dialogues[:1], tokenizer, context=64, reply_weight=0)
    assert set(row[:, 1].tolist()) <= {CONTEXT, ACTION}
    other = row.clone()
    other[-1, 0] = other[0, 0]  # the last token of the last reply: nobody reads it
    a, b = gradients(model, [row]), gradients(model, [other])
    embedding = "model.embed_tokens.weight"
    assert all(torch.equal(a[name], b[name]) for name in a) and a[embedding].abs().sum() > 0
    learned = gradients(model, rows_in(dialogues[:1], tokenizer))
    assert not torch.equal(a[embedding], learned[embedding])


def test_weights_of_replies(tiny):
    """The loss is the mean over all weighted tokens of the batch, not over dialogues."""
    model, tokenizer, dialogues = tiny
    rows = rows_in(dialogues[:5], tokenizer)
    logp_M, kind_M = sft.score(model, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for weight in (0.5, 1.0, 10.0):
        figures = sft.update(model, [optimizer], rows, 0, weight)
        said, replied = -logp_M[kind_M == ACTION], -logp_M[kind_M == REPLY]
        mean = (said.sum() + weight * replied.sum()) / (len(said) + weight * len(replied))
        assert figures["train/loss"] == pytest.approx(mean.item(), rel=1e-6)
        assert figures["train/nll_actions"] == pytest.approx(said.mean().item(), rel=1e-9)
        assert figures["train/nll_replies"] == pytest.approx(replied.mean().item(), rel=1e-9)


def test_an_update_descends_and_clips(tiny):
    model, tokenizer, dialogues = tiny
    rows = rows_in(dialogues[:8], tokenizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = sft.update(model, [optimizer], rows, 0, 1.0)
    moved = sum(((p - before[name]) ** 2).sum() for name, p in model.named_parameters()).sqrt().item()
    assert moved == pytest.approx(0.1 * min(1.0, first["train/grad_norm"]), rel=1e-3)
    assert sft.update(model, [optimizer], rows, 0, 1.0)["train/loss"] < first["train/loss"]
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])


def test_a_loss_that_is_not_finite_stops_with_a_sentence(tiny):
    _, tokenizer, dialogues = tiny
    model = sft.make_tiny(dialogues, sft.Args(**TINY))
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ArithmeticError, match="--lr"):
        sft.update(model, [optimizer], rows_in(dialogues[:2], tokenizer), 0, 1.0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_muon_has_the_matrices_of_the_layers(tiny, kind):
    """And AdamW all else: norms, biases, embedding and output, tied or not."""
    if kind == "llama":
        model = tiny[0]
    else:
        sizes = {"n_embd": 8, "n_layer": 2, "n_head": 1, "vocab_size": 300, "n_positions": 16}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, tie_word_embeddings=False))
    names = {p: name for name, p in model.named_parameters()}
    (only,) = sft.make_optimizers(model, "adamw", 0.1)
    assert [names[p] for p in only.param_groups[0]["params"]] == list(names.values())
    adamw, muon = sft.make_optimizers(model, "muon", 0.1)
    moved = {names[p] for p in muon.param_groups[0]["params"]}
    rest = {names[p] for p in adamw.param_groups[0]["params"]}
    assert moved | rest == set(names.values()) and not moved & rest
    layers = {name for name in names.values() if re.search(r"\.\d\..*(proj|attn|c_fc)\S*weight", name)}
    assert (
        layers
        and layers <= moved
        and not any(re.search("lm_head|embed|wte|wpe|ln_|norm", name) for name in moved)
    )


# ------------------------------------------------------------------------------------------ the rows


def spelled(tokenizer, row) -> list[tuple[str, int]]:
    """(text, kind) of each stretch of one kind."""
    parts = []
    for token, kind in row.tolist():
        if not parts or parts[-1][1] != kind:
            parts.append(([], kind))
        parts[-1][0].append(token)
    return [(tokenizer.decode(ids), kind) for ids, kind in parts]


def test_a_dialogue_that_grows_is_one_row(tiny):
    _, tokenizer, _ = tiny
    d = {"observations": ["say ant\n", "say ant\nant: right\n", "say ant\nant: right\nbee: wrong\n"]}
    d |= {"actions": ["ant", "bee"], "rewards": [1.0, 0.0], "terminated": False, "answer": "ant"}
    (row,) = sft.rows_of(d, tokenizer, 2048)
    end = tokenizer.eos_token
    expected = [("say ant\n", CONTEXT), (f"ant{end}", ACTION), (": right\n", REPLY)]
    expected += [(f"bee{end}", ACTION), (": wrong\n", REPLY)]
    assert spelled(tokenizer, row) == expected
    pieces = ["say ant\n", "ant", end, ": right\n", "bee", end, ": wrong\n"]
    assert row[:, 0].tolist() == [token for piece in pieces for token in tokenizer(piece)["input_ids"]]
    (row,) = sft.rows_of(d | {"imitate": [True, False]}, tokenizer, 2048)  # D4
    expected[3] = (expected[3][0], CONTEXT)
    assert spelled(tokenizer, row) == expected
    (row,) = sft.rows_to_learn([d], tokenizer, 2048, reply_weight=0.1)
    assert spelled(tokenizer, row)[2::2] == expected[2::2]
    (row,) = sft.rows_to_learn([d], tokenizer, 2048, reply_weight=0)  # D3
    assert [kind for _, kind in spelled(tokenizer, row)] == [CONTEXT, ACTION, CONTEXT, ACTION, CONTEXT]


def test_a_history_that_is_rewritten_is_a_row_for_each_turn(tiny):
    _, tokenizer, dialogues = tiny
    d = next(d for d in dialogues[40:] if d["rewards"] == [1, 1, 1])
    rows, end = sft.rows_of(d, tokenizer, 2048), tokenizer.eos_token
    for row, before, action, after in zip(
        rows, d["observations"], d["actions"], d["observations"][1:], strict=False
    ):
        assert spelled(tokenizer, row) == [(before, CONTEXT), (action + end, ACTION), (after, REPLY)]
    assert len(rows) == 4 and not rows[3][:, 1].any(), "behind the last action there is nothing to learn"
    shortest = max(len(row) for row in rows) - 2  # the reply is cut, but the action fits
    cut = sft.rows_of(d, tokenizer, shortest)
    assert max(map(len, cut)) == shortest
    assert all(torch.equal(row[:shortest], part) for row, part in zip(rows, cut, strict=True))
    assert sft.rows_of(d, tokenizer, 5) == []
    learned = sft.rows_to_learn([d], tokenizer, 2048, 1.0)
    assert all(torch.equal(row, part) for row, part in zip(rows[:3], learned, strict=True))


def test_a_dialogue_that_does_not_fit_is_left_out(tiny):
    _, tokenizer, dialogues = tiny
    (row,) = sft.rows_of(dialogues[0], tokenizer, 2048)
    assert len(sft.rows_of(dialogues[0], tokenizer, len(row))) == 1
    assert sft.rows_of(dialogues[0], tokenizer, len(row) - 1) == []


def test_left_out_dialogues_are_counted_and_none_left_is_an_error(tiny, capsys):
    _, tokenizer, _ = tiny
    dialogues = Parrot().demonstrations(40, 1)
    lengths = sorted(len(row) for row in rows_in(dialogues, tokenizer))
    longest = lengths[20]
    assert longest < lengths[-1]
    found = sft.rows_to_learn(dialogues, tokenizer, longest, 1.0)
    too_long = sum(length > longest for length in lengths)
    assert 0 < too_long < 40 and len(found) == 40 - too_long
    assert f"{too_long} of 40 dialogues left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--context"):
        sft.rows_to_learn(dialogues, tokenizer, 8, 1.0)


CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token if m.role == 'assistant' else '/' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_chat_template_is_spoken_to_in_it(tiny):
    """The row is what the template makes of the same dialogue."""
    _, _, dialogues = tiny
    tokenizer = sft.make_tiny(dialogues, sft.Args(**TINY)).tokenizer
    tokenizer.chat_template = CHAT
    d = dialogues[0]
    (row,) = sft.rows_of(d, tokenizer, 2048)
    chat = [{"role": "user", "content": d["observations"][0]}]
    for action, reply in zip(d["actions"], envs.replies(d["observations"], d["actions"]), strict=True):
        chat += [{"role": "assistant", "content": action}, {"role": "user", "content": reply}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(row[:, 0]) == text
    tokenizer = sft.make_tiny(dialogues, sft.Args(**TINY)).tokenizer
    tokenizer.chat_template = CHAT.replace("eos_token", "';'")
    with pytest.raises(ValueError, match="chat template"):
        sft.rows_of(d, tokenizer, 2048)


# ---------------------------------------------------------------------------- what is learned from


def test_drills_repeat_and_only_what_repeats_is_learned():
    words, rng = np.arange(300, 400), np.random.default_rng(0)
    rows = sft.drills(words, 50, rng)
    assert len(rows) == 50 and sft.drills(words, 0, rng) == []
    periods = set()
    for row in rows:
        ids, kinds = row.T.tolist()
        period = kinds.index(ACTION) - 1
        periods.add(period)
        assert len(ids) == 96 and 8 <= period < 40 and set(ids) <= set(words.tolist())
        assert all(ids[i] == ids[i - period] for i in range(period, 96))
        assert kinds == [CONTEXT] * (period + 1) + [ACTION] * (95 - period)
    assert len(periods) > 15


def test_exchanged_words_are_exchanged_throughout():
    words, rng = np.arange(100, 200), np.random.default_rng(0)
    said, read, other = [110, 120, 130, 140], [110, 120, 130, 140, 150], [5, 6]
    row = torch.tensor(
        [(i, CONTEXT) for i in read + other]
        + [(i, ACTION) for i in [*said, 160, 7]]
        + [(i, REPLY) for i in [110, 7]],
        dtype=torch.int32,
    )
    changed = Counter()
    for _ in range(300):
        new = sft.exchange_words(row, words, rng)
        pairs = set(zip(row[:, 0].tolist(), new[:, 0].tolist(), strict=True))
        assert torch.equal(new[:, 1], row[:, 1]) and new.dtype == row.dtype
        assert len(pairs) == len(set(row[:, 0].tolist())) == len({b for _, b in pairs}), "one for one"
        for a, b in pairs:
            changed[a] += a != b
            assert a == b or (b in words and b not in row[:, 0])
    assert set(+changed) == set(said), "only words that stand in actions and elsewhere"
    assert all(60 < changed[word] < 120 for word in said), "three in ten"


def test_no_more_words_are_exchanged_than_there_are_others():
    rng, said = np.random.default_rng(0), range(100, 120)
    row = torch.tensor([(i, kind) for kind in (CONTEXT, ACTION) for i in said], dtype=torch.int32)
    for number in (0, 1, 2):
        for _ in range(20):
            new = sft.exchange_words(row, np.arange(100, 120 + number), rng)
            assert len(set(new[:, 0].tolist())) == len(said)
            assert sum(i >= 120 for i in set(new[:, 0].tolist())) <= number
    assert torch.equal(sft.exchange_words(row, np.array([], int), rng), row), "a tokenizer without words"


def test_batches_have_every_row_once_and_rows_of_like_lengths(tiny):
    _, tokenizer, _ = tiny
    rows = rows_in(Parrot().demonstrations(600, 1), tokenizer)
    batches = sft.batches_of(rows, 8, np.random.default_rng(0))
    assert Counter(id(row) for batch in batches for row in batch) == Counter(map(id, rows))
    assert Counter(map(len, batches)) == {8: 75}
    spread = [max(map(len, batch)) - min(map(len, batch)) for batch in batches]
    assert sum(spread) < 75
    shortest = [len(batch[0]) for batch in batches[:16]]
    assert shortest != sorted(shortest)
    again, other = (sft.batches_of(rows, 8, np.random.default_rng(seed)) for seed in (0, 1))
    assert [id(row) for batch in again for row in batch] == [id(row) for batch in batches for row in batch]
    assert [id(row) for batch in other for row in batch] != [id(row) for batch in batches for row in batch]
    assert sorted(map(len, sft.batches_of(rows[:20], 8, np.random.default_rng(0)))) == [4, 8, 8]


def test_the_rate_rises_and_falls():
    rates = [sft.lr_share(step, step / 150, 3) for step in range(150)]
    assert rates == pytest.approx([min((step + 1) / 3, 1 - step / 150) for step in range(150)])
    assert sft.lr_share(0, 0.0, 0) == 1


def record_lessons(monkeypatch, stop: int = 0) -> list:
    """(rows, rate) of every update; none computes anything. In number `stop` comes a Ctrl-C."""
    seen = []

    def update(model, optimizers, rows, micro_batch, reply_weight):
        (rate,) = {optimizer.param_groups[0]["lr"] for optimizer in optimizers}
        seen.append((rows, rate))
        if len(seen) == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return {"train/loss": 0.0}

    monkeypatch.setattr(sft, "update", update)
    return seen


def test_lessons_go_on_where_they_stood(tmp_path, monkeypatch):
    """Two epochs of five batches, behind three of drills; stopped inside of each and at its end."""
    options = {"drills": 20, "exchanged": 0.5, "fresh": True, "eval_episodes": 1, "optimizer": "muon"}
    whole = record_lessons(monkeypatch)
    sft.main(small(tmp_path / "whole", **options))
    assert len(whole) == 13
    shares = [min((n + 1) / 3, 1 - n / total) for total in (3, 10) for n in range(total)]
    assert [rate / 3e-3 for _, rate in whole] == pytest.approx(shares), "drills have a fall of their own"
    for stop in (1, 3, 5, 8, 9, 13):
        seen = record_lessons(monkeypatch, stop)
        sft.main(small(tmp_path / str(stop), **options))
        assert len(seen) == stop
        sft.main(small(tmp_path, **options, resume=str(run_of(tmp_path / str(stop)))))
        for (rows, rate), (expected, its_rate) in zip(seen, whole, strict=True):
            assert rate == its_rate and all(map(torch.equal, rows, expected))


def test_a_share_of_the_rows_has_words_exchanged(tiny):
    _, tokenizer, _ = tiny
    dialogues = Parrot().demonstrations(300, 1)
    rows, changed = sft.rows_to_learn(dialogues, tokenizer, 64, 1.0), []
    for share in (0.0, 0.5, 1.0):
        args, rng = sft.Args(**TINY | {"exchanged": share}), np.random.default_rng(0)
        found = sft.rows_of_epoch(1, dialogues, tokenizer, args, rng)
        changed.append(sum(not torch.equal(row, new) for row, new in zip(rows, found, strict=True)))
    assert changed[0] == 0 and changed[2] > 50 and 0.3 < changed[1] / changed[2] < 0.7


def test_every_epoch_has_all_dialogues_and_fresh_ones_if_asked(tmp_path, monkeypatch):
    for fresh in (False, True):
        seen = record_lessons(monkeypatch)
        sft.main(small(tmp_path / str(fresh), fresh=fresh, eval_episodes=1))
        tokenizer = AutoTokenizer.from_pretrained(run_of(tmp_path / str(fresh)) / "actor")
        for epoch in (1, 2):
            expected = rows_in(Parrot().demonstrations(40, 1 + epoch * fresh), tokenizer)
            batches = [rows for rows, _ in seen[5 * (epoch - 1) : 5 * epoch]]
            found = Counter(str(row.tolist()) for rows in batches for row in rows)
            assert found == Counter(str(row.tolist()) for row in expected)


def test_a_signal_between_two_epochs_ends_the_run_behind_the_next_update(tmp_path, monkeypatch):
    """What was learned since the last line is saved."""
    seen, real, made = record_lessons(monkeypatch), sft.batches_of, []

    def batches_of(rows, size, rng):
        made.append(rows)
        if len(made) == 3:  # drills, none, the first epoch and the second
            os.kill(os.getpid(), signal.SIGTERM)
        return real(rows, size, rng)

    monkeypatch.setattr(sft, "batches_of", batches_of)
    sft.main(small(tmp_path, eval_episodes=1))
    assert len(seen) == 6
    assert [row["iteration"] for row in lines(run_of(tmp_path) / "metrics.jsonl")] == [6]
    sft.main(small(tmp_path, eval_episodes=1, resume=str(run_of(tmp_path))))
    assert len(seen) == 10


def test_keep_takes_the_best_by_return():
    world = Parrot()
    every = world.demonstrations(200, 1)
    best = sft.read(world, sft.Args(env="parrot", demonstrations=200, keep=0.1), 0)
    returns = sorted((sum(d["rewards"]) for d in every), reverse=True)
    assert [sum(d["rewards"]) for d in best] == returns[:20]
    assert sft.read(world, sft.Args(env="parrot", demonstrations=200), 0) == every


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--keep", {"keep": 0}),
        ("--keep", {"keep": -0.5}),
        ("--keep", {"demonstrations": 0}),
        ("--batch", {"batch": 0}),
        ("--micro-batch", {"micro_batch": -1}),
        ("--reply-weight", {"reply_weight": -1}),
        ("--epochs", {"epochs": 0}),
    ],
)
def test_what_would_go_wrong_in_silence_is_a_sentence(tmp_path, flag, options):
    with pytest.raises(ValueError, match=flag):
        sft.main(small(tmp_path, **options))


def test_fresh_demonstrations_are_of_another_seed_each_epoch():
    world = Parrot()
    args = sft.Args(env="parrot", demonstrations=20, seed=3)
    assert sft.read(world, args, 2) == sft.read(world, args, 1) == world.demonstrations(20, 3)
    fresh = replace(args, fresh=True)
    made = [sft.read(world, fresh, epoch) for epoch in range(4)]
    assert made[1] == world.demonstrations(20, 4) and len({str(d) for d in made}) == 4


def test_a_file_of_dialogues(tmp_path, capsys):
    dialogues = Parrot().demonstrations(30, 5)
    runs.write_jsonl(tmp_path / "data.jsonl", dialogues)
    args = small(tmp_path / "runs", dataset=str(tmp_path / "data.jsonl"), keep=0.5, epochs=1)
    seen = sft.read(Parrot(), args, 0)
    assert (
        len(seen) == 15
        and seen[0]["observations"] == max(dialogues, key=lambda d: sum(d["rewards"]))["observations"]
    )
    summary = sft.main(args)
    assert summary["episodes"] == 15
    with pytest.raises(ValueError, match="nowhere"):
        sft.read(Parrot(), sft.Args(dataset="nowhere"), 0)


# ------------------------------------------------------------------------------------------ models


def test_a_word_is_one_token_wherever_it_stands(tiny):
    said = Counter(["apis.mail.show(id=17)\n", "the mail, and the show of 17.\n"] * 3)
    tokenizer = sft.make_vocabulary(said, 600, 0)
    (mail,) = [i for i in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(i) == "\u2581mail"]
    for text in ("mail", "the mail", "apis.mail", "(mail)", "mail mail\nmail"):
        assert models.encode(tokenizer, text).count(mail) == text.count("mail")


def test_a_reply_is_told_by_its_first_token():
    replies = [" Yes.\n", " No.\n", " Invalid question.\n"]
    tokenizer = sft.make_vocabulary(Counter(replies * 9), 600, 0)
    spelled = [models.encode(tokenizer, reply) for reply in replies]
    assert len({ids[0] for ids in spelled}) == 3
    assert [len(ids) for ids in spelled] == [2, 2, 3]
    assert [tokenizer.decode(ids) for ids in spelled] == replies


def test_every_text_can_be_written(tiny):
    _, tokenizer, _ = tiny
    rng = random.Random(0)
    for text in ["", " ", "  a  b ", "x=1;  y", "\t\n\n é 漢字 🦊 \u2581 a\u2581b", "<0x41> <|other|>"]:
        if "\u2581" not in text:  # the mark itself is taken for a blank
            assert tokenizer.decode(models.encode(tokenizer, text)) == text
    for _ in range(300):
        text = "".join(rng.choice("ab 1_.,!?(\n'\"ÄЖ漢🦊") for _ in range(rng.randrange(30)))
        assert tokenizer.decode(models.encode(tokenizer, text)) == text


def test_the_most_frequent_lines_are_one_token_inside_a_text_too():
    dialogues = envs.make("mini-detective").demonstrations(50, 0)
    options = {"vocabulary": 500, "width": 32, "layers": 1}
    tokenizer = sft.make_tiny(dialogues, sft.Args(phrases=200, **options)).tokenizer
    texts = [text for d in dialogues for text in d["observations"]]
    assert all(tokenizer.decode(models.encode(tokenizer, text)) == text for text in texts)
    # a line and its end, but for the last one, which has its end with it
    short = [len(models.encode(tokenizer, text)) == 2 * text.count("\n") - 1 for text in texts]
    assert sum(short) / len(short) > 0.95


def test_the_most_frequent_phrases_are_one_token(tmp_path):
    dialogues = envs.make("twenty-questions").demonstrations(100, 0)
    said = Counter(a for d in dialogues for a in d["actions"])
    said.update(r for d in dialogues for r in envs.replies(d["observations"], d["actions"]))
    model = sft.make_tiny(dialogues, sft.Args(phrases=50, vocabulary=500, width=32, layers=1))
    tokenizer = model.tokenizer
    assert len(tokenizer) == model.config.vocab_size <= 550
    for text, number in said.most_common(40):
        assert (
            len(models.encode(tokenizer, text)) == 1
            and tokenizer.decode(models.encode(tokenizer, text)) == text
        )
    rare = [text for text, number in said.items() if number == 1]
    assert rare and all(tokenizer.decode(models.encode(tokenizer, text)) == text for text in rare)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for d in dialogues[:20]:
        assert models.encode(again, d["observations"][-1]) == models.encode(tokenizer, d["observations"][-1])


def test_the_tiny_model_is_what_the_flags_say(tiny):
    _, _, dialogues = tiny
    model = sft.make_tiny(dialogues, sft.Args(width=64, inner=80, layers=2, context=300))
    config = model.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 80, 2)
    assert (config.num_attention_heads, config.max_position_embeddings) == (2, 300)
    assert config.tie_word_embeddings and config.eos_token_id == model.tokenizer.eos_token_id
    assert not model.training


def parsed() -> sft.Args:
    """The command line's arguments, as `main` gets them."""
    found = []
    sft.runs.cli(sft.Args, found.append)
    return found[0]


def test_a_missing_model_is_seen_before_dialogues_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(sft, "read", None)
    with pytest.raises(ValueError, match=r"nowhere: there is no such folder$"):
        sft.main(small(tmp_path, model=str(tmp_path / "nowhere")))


# ------------------------------------------------------------------------------------------ playing


def play(tiny, greedy, **options):
    model, args = tiny[0], sft.Args(**TINY | options)
    sft.set_generation(model, args.max_action_tokens)
    return sft.play(model, args, greedy)


@pytest.mark.parametrize("env", ["parrot", "rooms"])
def test_greedy_play_is_the_argmax(tiny, env):
    """Of a plain forward pass, token by token, dialogue by dialogue."""
    model, tokenizer, _ = tiny
    for index, d in enumerate(play(tiny, True, env=env)):
        assert d["answer"] == WORDS[index]
        ids = list(models.encode(tokenizer, d["observations"][0]))
        for turn, action in enumerate(d["actions"]):
            if env == "rooms":
                ids = list(models.encode(tokenizer, d["observations"][turn]))
            written = []
            while len(written) < 4 and tokenizer.eos_token_id not in written:
                logits = model(input_ids=torch.tensor([ids + written])).logits[0, -1]
                written.append(int(logits.argmax()))
            text = tokenizer.decode([i for i in written if i != tokenizer.eos_token_id])
            assert text.split("\n")[0].strip()[:20] == action
            after, before = d["observations"][turn + 1], d["observations"][turn] + action
            ids += [*models.encode(tokenizer, action), tokenizer.eos_token_id]
            ids += models.encode(tokenizer, after.removeprefix(before))


def test_play_takes_every_task_once_and_repeats_itself(tiny):
    first, again = play(tiny, False), play(tiny, False)
    assert first == again != play(tiny, True)
    assert [d["answer"] for d in first] == WORDS
    assert [d["answer"] for d in play(tiny, True, eval_episodes=5)] == WORDS[:5]


def test_a_context_without_room_ends_a_dialogue(tiny):
    cut = play(tiny, True, context=14)
    short = [d for d in cut if len(d["actions"]) < 3]
    assert short and all(d["cut"] and not d["terminated"] for d in short)
    assert play(tiny, True, context=5) == []


# ------------------------------------------------------------------------------------------ main


def spy(monkeypatch, name: str) -> list[dict]:
    """The arguments of all calls of a function of sft, by name."""
    calls, real = [], getattr(sft, name)

    def spied(*args, **kwargs):
        calls.append(inspect.signature(real).bind(*args, **kwargs).arguments)
        return real(*args, **kwargs)

    monkeypatch.setattr(sft, name, spied)
    return calls


def test_what_main_hands_on(tmp_path, monkeypatch):
    """Drills first, then the best tenth, mistakes in context only; then greedy and sampled play."""
    rates, is_new, updates, played = [], [], spy(monkeypatch, "update"), spy(monkeypatch, "play")
    real = torch.optim.AdamW.step

    def step(optimizer):
        rates.append(optimizer.param_groups[0]["lr"])
        is_new.append(not optimizer.state)
        real(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    args = small(tmp_path, demonstrations=400, keep=0.1, drills=16, epochs=3, lr=0.01, warm_up=4)
    args = replace(args, micro_batch=3, reply_weight=0.5)
    sft.main(args)
    tokenizer = AutoTokenizer.from_pretrained(run_of(tmp_path) / "actor")
    batches = [given["rows"] for given in updates]
    assert all(len(row) == 96 for batch in batches[:2] for row in batch) and len(batches) == 2 + 3 * 5
    every = Parrot().demonstrations(400, 1)
    best = sorted(every, key=lambda d: -sum(d["rewards"]))[:40]
    for epoch in range(3):
        seen = Counter(str(row.tolist()) for batch in batches[2 + 5 * epoch :][:5] for row in batch)
        assert seen == Counter(str(row.tolist()) for row in rows_in(best, tokenizer))
    phases = [(i, 2) for i in range(2)] + [(i, 15) for i in range(15)]
    expected = [0.01 * min((i + 1) / 4, 1 - i / total) for i, total in phases]
    assert rates == pytest.approx(expected)
    assert [i for i, new in enumerate(is_new) if new] == [0, 2], "moments of drills are no use for dialogues"
    assert [given["greedy"] for given in played] == [True, False]
    assert len({id(given["model"]) for given in updates + played}) == 1, "what was trained is what plays"
    assert {(given["micro_batch"], given["reply_weight"]) for given in updates} == {(3, 0.5)}


def test_greedy_and_sampled_figures_are_not_exchanged(tmp_path, monkeypatch):
    real = sft.play

    def play(model, args, greedy):
        dialogues = real(model, args, greedy)
        return [d | {"rewards": [7.0 if greedy else 5.0]} for d in dialogues]

    monkeypatch.setattr(sft, "play", play)
    summary = sft.main(small(tmp_path, epochs=1))
    assert (summary["eval_return"], summary["eval_return_greedy"]) == (5, 7)
    last = lines(run_of(tmp_path) / "metrics.jsonl")[-1]
    assert (last["eval/return"], last["eval/return_greedy"]) == (5, 7)
    samples = lines(run_of(tmp_path) / "rollouts.jsonl")
    assert [d["rewards"] for d in samples] == [[5]] * 8, "what is kept was sampled"


@pytest.fixture
def trained(tmp_path_factory, toys):
    """(summary, folder) of a run that has learned to say the word; made once."""
    if not TRAINED:
        folder = tmp_path_factory.mktemp("trained")
        summary = sft.main(small(folder, epochs=20, demonstrations=400, lr=0.01, warm_up=20))
        TRAINED.extend([summary, run_of(folder)])
    return TRAINED


TRAINED = []


def test_mistakes_are_not_imitated(trained):
    """One word in two is a mistake; a model that imitated these would be right half of the time."""
    summary, _ = trained
    assert summary["eval_return_greedy"] == 3 and summary["eval_return"] > 2.8
    assert summary["eval_success"] > 0.8 and "warm_start_return" not in summary


def test_a_run_leaves_what_it_must(tmp_path):
    summary = sft.main(small(tmp_path, save_every=3, drills=8))
    run = run_of(tmp_path)
    assert run.name.startswith("parrot__sft__1__")
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["episodes"] == 40 and summary["iteration"] == 11
    assert sft.Args(**json.loads((run / "args.json").read_text())) == small(tmp_path, save_every=3, drills=8)
    rows = lines(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [3, 6, 9, 11, 11]
    assert ["eval/return" in row for row in rows] == [False, False, False, False, True]
    assert ["train/loss" in row for row in rows] == [True, True, True, True, False]
    assert len(lines(run / "rollouts.jsonl")) == 8 and list(run.glob("events.out.tfevents.*"))
    assert not list(run.rglob("*.tmp"))
    torch.load(run / "checkpoint.pt", weights_only=True)


def test_the_saved_actor_loads_and_speaks(trained):
    """By transformers alone; a turn ends by itself, as the generation's configuration says how."""
    folder = trained[1] / "actor"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("say ant\n", return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**inputs, do_sample=False)[0].tolist()
    assert ids[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "say ant\nant"
    assert model.generation_config.top_k == 0 and model.generation_config.do_sample


def test_a_model_that_exists_goes_on(trained, tmp_path):
    """Its own return comes first, its own tokenizer is used, and training starts from its weights."""
    first, folder = trained
    actor = str(folder / "actor")
    second = sft.main(small(tmp_path / "b", model=actor, epochs=1, lr=1e-9))
    assert second["warm_start_return"] == pytest.approx(first["eval_return"], abs=0.1)
    assert second["eval_return"] == second["warm_start_return"]
    run = run_of(tmp_path / "b")
    found = [row["eval/return"] for row in lines(run / "metrics.jsonl") if "eval/return" in row]
    assert found == [second["warm_start_return"], second["eval_return"]]
    sft.main(small(tmp_path / "b", model=actor, epochs=1, lr=1e-9, resume=str(run)))
    assert len(lines(run / "metrics.jsonl")) == 3, "a run that goes on does not start again"
    kept = (run / "actor/tokenizer.json").read_text()
    assert json.loads(kept)["model"] == json.loads(Path(actor, "tokenizer.json").read_text())["model"]


# ------------------------------------------------------------------------------------------ resuming


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoint.pt", weights_only=True)["modules"]["model"]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def timeless(run: Path) -> list[dict]:
    """What a run has logged, without the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{tag: value for tag, value in row.items() if not tag.startswith("time/")} for row in rows]


def test_twice_the_same_is_the_same(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        sft.main(small(tmp_path / name, seed=seed, drills=8))
    a, b, c = (run_of(tmp_path / name) for name in "abc")
    assert same(weights(a), weights(b)) and not same(weights(a), weights(c))
    assert timeless(a) == timeless(b)


@pytest.mark.parametrize("stop", [1, 4, 9, 11])
def test_stopped_and_resumed_to_the_bit(tmp_path, monkeypatch, stop, capsys):
    """Ctrl-C in the middle of an update, of the drills or of an epoch."""
    options = {"drills": 16, "exchanged": 0.5, "fresh": True, "save_every": 100}
    sft.main(small(tmp_path / "whole", **options))
    real, count = sft.update, []

    def update(*args):
        count.append(1)
        if len(count) == stop:
            os.kill(os.getpid(), signal.SIGINT if stop % 2 else signal.SIGTERM)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "update", update)
        summary = sft.main(small(tmp_path / "parts", **options))
    run = run_of(tmp_path / "parts")
    assert len(count) == stop and "eval_return" not in summary and "--resume" in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sft.py", "--resume", str(run)])
        args = parsed()
    assert replace(args, resume="") == small(tmp_path / "parts", **options)
    sft.main(args)
    whole = run_of(tmp_path / "whole")
    assert same(weights(run), weights(whole))
    final, expected = lines(run / "metrics.jsonl")[-1], lines(whole / "metrics.jsonl")[-1]
    assert {k: v for k, v in final.items() if k.startswith("eval")} == {
        k: v for k, v in expected.items() if k.startswith("eval")
    }
    assert (run / "rollouts.jsonl").read_text() == (whole / "rollouts.jsonl").read_text()
    again = sft.main(args)  # a run that has ended stays as it is
    assert again["eval_return"] == expected["eval/return"] and same(weights(run), weights(whole))


def test_resumed_with_other_arguments(tmp_path):
    sft.main(small(tmp_path))
    run = run_of(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sft.py", "--resume", str(run), "--epochs", "3"])
        args = parsed()
    assert args.epochs == 3 and args.width == 32
    sft.main(args)
    assert [row["iteration"] for row in lines(run / "metrics.jsonl")] == [10, 10, 15, 15]


def test_a_run_whose_evaluation_has_failed_is_evaluated_when_it_goes_on(tmp_path, monkeypatch):
    """Nothing but the evaluation is left to do, and it is that of a run without the failure."""
    whole = sft.main(small(tmp_path / "whole"))

    def breaks(*args, **kwargs):
        raise envs.WorldBroken("no server")

    with monkeypatch.context() as patch:
        patch.setattr(sft, "play", breaks)
        with pytest.raises(envs.WorldBroken):
            sft.main(small(tmp_path / "parts"))
    run = run_of(tmp_path / "parts")
    learned = weights(run)
    again = sft.main(small(tmp_path / "parts", resume=str(run)))
    assert again["eval_return_greedy"] == whole["eval_return_greedy"] and same(weights(run), learned)
    assert timeless(run) == timeless(run_of(tmp_path / "whole"))


def command(*words) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, str(ROOT / "sft.py"), *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300, check=False)


SMALL = (
    "--demonstrations 40 --epochs 3 --batch 8 --width 32 --layers 1 --eval-episodes 2 --max-action-tokens 4"
)


@pytest.mark.slow
def test_killed_and_resumed_to_the_bit(tmp_path):
    """SIGKILL, at an unknown moment behind the first checkpoint."""
    words = [*SMALL.split(), "--save-every", "2"]
    assert command(*words, "--runs", tmp_path / "whole").returncode == 0
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options = [sys.executable, str(ROOT / "sft.py"), *words, "--runs", str(tmp_path / "killed")]
    process = subprocess.Popen(options, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)
    deadline = time.time() + 200
    while time.time() < deadline and not list(tmp_path.glob("killed/*/checkpoint.pt")):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    run, whole = run_of(tmp_path / "killed"), run_of(tmp_path / "whole")
    assert process.returncode == -signal.SIGKILL
    (run / "actor.tmp").mkdir(exist_ok=True)  # as if it had been writing
    result = command("--resume", run)
    assert result.returncode == 0, result.stderr
    assert same(weights(run), weights(whole)) and not list(run.rglob("*.tmp"))
    assert timeless(run) == timeless(whole)


def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, capsys):
    for words, said in [
        (["--env", "nowhere"], "unknown environment"),
        (["--world", "rules=odd"], "no option 'rules'"),
        (["--dataset", "nothing"], "nothing"),
        (["--width", "100", "--demonstrations", "9"], "--width 100: take a multiple of 32"),
        (["--max-action-tokens", "3000"], "--max-action-tokens 3000: there is no room in --context 2048"),
    ]:
        monkeypatch.setattr(sys, "argv", ["sft.py", *words, "--runs", str(tmp_path / "runs")])
        with pytest.raises(SystemExit) as error:
            runs.cli(sft.Args, sft.main)
        (line,) = capsys.readouterr().err.splitlines()
        assert error.value.code == 2 and said in line and line.startswith("sft.py: ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_twenty_questions(tmp_path, seed):
    """In 10,000 dialogues it learns to ask what is understood, and finds some words."""
    options = {"demonstrations": 10_000, "epochs": 1, "vocabulary": 600, "phrases": 250, "seed": seed}
    summary = sft.main(sft.Args(runs=str(tmp_path), **options))
    last = lines(run_of(tmp_path) / "metrics.jsonl")[-1]
    assert last["eval/invalid"] < 0.12 and summary["eval_success"] > 0.03


@pytest.mark.external
def test_with_lora_only_adapters_learn(tmp_path, trained):
    """What is saved gives the same logits twice: merged, by transformers, and as an adapter, by peft."""
    peft = pytest.importorskip("peft", reason="needs the package peft")
    start = trained[1] / "actor"
    options = {"model": str(start), "lora": True, "lora_rank": 4, "lr": 1e-2, "save_every": 3}
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        real = models.prepare
        patch.setattr(models, "prepare", lambda model, args: real(model, args) or seen.append(model))
        sft.main(small(tmp_path, **options))
    run, (model,) = run_of(tmp_path), seen
    before = AutoModelForCausalLM.from_pretrained(start)
    ids = torch.tensor([[300, 301, 302, 303]])
    own = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora" not in name}
    assert same(dict(before.named_parameters()), own)
    adapters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    assert adapters and all("lora" in name and min(p.shape) == 4 for name, p in adapters)
    after = model(ids).logits
    assert not torch.allclose(before(ids).logits, after, atol=1e-2)

    merged = AutoModelForCausalLM.from_pretrained(run / "actor")
    assert not hasattr(merged, "peft_config") and torch.allclose(merged(ids).logits, after, atol=1e-5)
    loaded = peft.PeftModel.from_pretrained(before, run / "actor_adapter")
    assert torch.allclose(loaded(ids).logits, after, atol=1e-5)
    learned = torch.load(run / "checkpoint.pt", weights_only=True)["modules"]["model"]
    assert [p.shape for p in learned.values()] == [p.shape for _, p in adapters]


@pytest.mark.external
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_lora_resumed_to_the_bit(tmp_path, monkeypatch, trained, dtype):
    """Stopped in the middle of an epoch, in micro-batches and with activations computed again."""
    pytest.importorskip("peft", reason="needs the package peft")
    options = {"model": str(trained[1] / "actor"), "lora": True, "dtype": dtype, "save_every": 100}
    options |= {"micro_batch": 3, "gradient_checkpointing": True, "eval_episodes": 2}
    sft.main(small(tmp_path / "whole", **options))
    real, count = sft.update, []

    def update(model, *args):
        count.append(1)
        if len(count) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        if len(count) == 1:
            kinds = {("lora" in name, p.dtype) for name, p in model.named_parameters()}
            assert kinds == {(True, torch.float32), (False, getattr(torch, dtype))}
            logp_M, _ = sft.score(model, args[1])
            assert logp_M.dtype == torch.float32
        return real(model, *args)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "update", update)
        sft.main(small(tmp_path / "parts", **options))
    run, whole = run_of(tmp_path / "parts"), run_of(tmp_path / "whole")
    assert len(count) == 7 and not same(weights(run), weights(whole))
    sft.main(small(tmp_path / "parts", **options, resume=str(run)))
    assert same(weights(run), weights(whole))
    rows = [row["iteration"] for row in lines(run / "metrics.jsonl")]
    assert rows == [0, 7, 10, 10]  # the start, where it was stopped, the last update, the evaluation
    name = "actor_adapter/adapter_model.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.external
def test_a_real_model_learns_and_speaks_in_its_chat_template(tmp_path, smollm, monkeypatch):
    """SmolLM2-135M-Instruct, twenty updates on 50 dialogues; then what was saved, by transformers alone."""
    updates = spy(monkeypatch, "update")
    options = {"demonstrations": 2500, "keep": 0.02, "epochs": 2, "batch": 5, "lr": 1e-4, "warm_up": 5}
    options |= {"eval_episodes": 1, "max_action_tokens": 12, "context": 300, "save_every": 4}
    summary = sft.main(sft.Args(model=str(smollm), runs=str(tmp_path), **options))
    losses = [row["train/nll_actions"] for row in lines(run_of(tmp_path) / "metrics.jsonl")]
    assert len(updates) == 20 and losses[-1] < 0.6 * losses[0]
    assert -20 <= summary["warm_start_return"] <= 0
    folder = run_of(tmp_path) / "actor"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    first = updates[0]["rows"][0][:, 0]
    assert tokenizer.decode(first).startswith("<|im_start|>system\n")
    assert "<|im_start|>user\nQuestions:\n<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(first)
    chat = [{"role": "user", "content": "Questions:\n"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**inputs, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert said[-1] == tokenizer.eos_token_id and tokenizer.decode(said).startswith("Is it")


# ------------------------------------------------------------------------------------ what else main hands on
def test_generate_draws_from_the_models_own_logits(tiny):
    """No top-k, no top-p, no temperature."""
    model, tokenizer, _ = tiny
    play(tiny, False, eval_episodes=1)
    prompt = torch.tensor([models.encode(tokenizer, "say ant\n")])
    options = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    said = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, **options)
    assert all(torch.equal(a, b) for a, b in zip(said.scores, said.logits, strict=True))


def test_the_start_is_sampled_too(tmp_path, monkeypatch):
    sft.main(small(tmp_path / "a", epochs=1))
    played = spy(monkeypatch, "play")
    sft.main(small(tmp_path / "b", epochs=1, model=str(run_of(tmp_path / "a") / "actor")))
    assert [given["greedy"] for given in played] == [False, True, False]
