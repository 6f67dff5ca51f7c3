"""What archer.py promises: its equations, that a batch is no more than its parts, what `main` hands on to
whom, and that a run can be resumed.

The worlds are Twenty Questions on ten words and two toys defined here; the models are untrained, with one or
two layers of 32, in folders. What an actor or critic should compute is computed a second time: an utterance
at a time, unpadded, by a plain forward pass.
"""

import copy
import itertools
import json
import math
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import archer
import envs
from envs import datasets

ROOT = Path(archer.__file__).parent
WORDS = ["ant", "bee", "cow", "dog"]
CLUES = ["red", "blue", "green", "white"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|endoftext|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---------------------------------------------------------------------------------- the toy worlds
class Toy(gymnasium.Env):
    """A clue each turn, and one of four words is right for it; 1 for the right word, 0 for any other text.

    Task i lasts i + 2 turns; those with even numbers end (terminated), the others are cut off (truncated). So
    dialogues have different lengths and both kinds of ends, and the returns of some players are known.
    """

    id = demonstration_env = "toy"
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
            info["result"] = {"return": self.total, "length": self.turn, "success": self.total == self.turn}
        by_itself = self.index % 2 == 0
        return self.observation, float(right), over and by_itself, over and not by_itself, info

    def follow(self, action, reply):
        return self.observation + action + reply

    def demonstrations(self, n, seed):
        """Uniformly random words: nothing in them says which word is right."""
        rng = np.random.default_rng(seed)
        player = lambda observation, _: WORDS[rng.integers(4)]  # noqa: E731
        return [datasets.dialogue(self, player, None, i % 4) for i in range(n)]


class ForgetfulToy(Toy):
    """The same, but an observation has the last turn only: it does not begin with the one before."""

    id = demonstration_env = "forgetful-toy"
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
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


BOTH = pytest.mark.parametrize("world", ["toy", "forgetful-toy"])
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.7])


# ------------------------------------------------------------------------------------- small models
def make_tokenizer(texts, size=300, special=("<|endoftext|>",), template=None) -> PreTrainedTokenizerFast:
    """Byte pairs; the first special token ends a turn and pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"initial_alphabet": alphabet, "special_tokens": list(special), "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, **options))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0])
    fast.chat_template = template
    return fast


def make_model(kind: str, tokenizer, context=1024, layers=1):
    size = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(n_positions=context, n_embd=32, n_layer=layers, n_head=2, **size)
        return GPT2LMHeadModel(config).eval()
    size |= {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=context, **size)).eval()


def talkative(actor):
    """It says odd things: bytes that are no text, blanks at the ends, empty lines, turns without an end.

    By a bias on its output; without one an utterance would hardly ever end.
    """
    head = torch.nn.Linear(32, actor.config.vocab_size)
    head.weight.data = actor.get_output_embeddings().weight.data.clone()
    head.bias.data.zero_()
    for text, bias in {"\n": 3.0, " ": 3.0}.items():
        head.bias.data[archer.encode(actor.tokenizer, text)[0]] = bias
    head.bias.data[actor.tokenizer.eos_token_id] = 3.0
    actor.lm_head = head
    return actor


@pytest.fixture(scope="module")
def tokenizer(toys):
    return make_tokenizer([d["observations"][-1] for d in Toy().demonstrations(100, seed=0)])


@pytest.fixture(params=["llama", "gpt2"])
def actor(tokenizer, request):
    actor = make_model(request.param, tokenizer, layers=2)
    actor.tokenizer = tokenizer
    return talkative(actor)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """Checkpoints as they are found on a disk, untrained, each with a tokenizer."""
    base = tmp_path_factory.mktemp("folders")
    for name, kind, context in (("LLAMA", "llama", 1024), ("GPT2", "gpt2", 512), ("SHORT", "gpt2", 150)):
        make_model(kind, tokenizer, context).save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    chat = make_tokenizer(["Is it a dog? No.\n"], 290, ("<|endoftext|>", "<|im_start|>"), CHATML)
    make_model("llama", chat).save_pretrained(base / "CHAT")
    chat.save_pretrained(base / "CHAT")
    inner = make_tokenizer(["red: ant yes\n"], 280, ("[PAD]", "[CLS]", "[SEP]")).backend_tokenizer
    special = [("[CLS]", 1), ("[SEP]", 2)]
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(base / "BERT")
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=inner.get_vocab_size(), **size)).save_pretrained(base / "BERT")
    return {path.name: str(path) for path in base.iterdir()}


def small(**changes) -> archer.Args:
    """Arguments that make a run small."""
    sizes = {"env": "toy", "seed": 3, "iterations": 2, "rollouts": 4, "max_action_tokens": 6, "warmup": 0}
    sizes |= {"critic_updates": 2, "critic_batch": 3, "critic_pool": 4, "actor_updates": 1, "actor_batch": 3}
    sizes |= {"eval_every": 2, "eval_episodes": 4}
    texts = {key: str(value) if isinstance(value, Path) else value for key, value in changes.items()}
    return archer.Args(**sizes | texts)


def critic_of(actor, kind="decoder", seed=0, folders=None):
    """A critic whose values differ: its heads are random, not at their small start."""
    torch.manual_seed(seed)
    body, tokenizer = copy.deepcopy(actor.base_model), actor.tokenizer
    if kind == "encoder":
        body, tokenizer = archer.load(archer.transformers.AutoModel, folders["BERT"], small())
    critic = archer.Critic(body, tokenizer, 0.5, "float32")
    for parameter in critic.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return critic


def play(world, actor, n=8, seed=0, greedy=False, **changes):
    """`n` dialogues of the actor, tasks in turn, and the nll of every utterance."""
    worlds, generator = envs.VecTextEnv(world, n), torch.Generator().manual_seed(seed)
    indices = [i % worlds.envs[0].num_tasks for i in range(n)]
    return archer.rollout(actor, worlds, small(**changes), generator, None, indices, greedy)


def fresh_for(dialogues, actor, seed=5, **changes):
    generator = torch.Generator().manual_seed(seed)
    return archer.fresh_utterances(actor, dialogues, small(**changes), generator)


# ---------------------------------------------------------------- what the tests compute themselves
def before(dialogue, k, tokenizer, append_only) -> list[int]:
    """The tokens that stand before action k, one piece of text after the other."""
    ids, first = [], 0 if append_only else k
    for j in range(first, k + 1):
        text = dialogue["observations"][j]
        if j > first:
            said = dialogue["observations"][j - 1] + dialogue["actions"][j - 1]
            assert text.startswith(said)
            ids += [*archer.encode(tokenizer, dialogue["actions"][j - 1]), tokenizer.eos_token_id]
            text = text[len(said) :]
        ids += archer.encode(tokenizer, text)
    return ids


@torch.no_grad()
def plain_logps(actor, context, ids, temperature=1.0) -> list[float]:
    """log pi of each token of `ids` after `context`: one unpadded forward pass, softmax in float64."""
    logits = actor(input_ids=torch.tensor([context + ids])).logits[0].double() / temperature
    return [logits[len(context) + k - 1].log_softmax(-1)[token].item() for k, token in enumerate(ids)]


def states(dialogues) -> list[tuple[dict, int]]:
    return [(d, k) for d in dialogues for k in range(len(d["actions"]))]


@torch.no_grad()
def value_alone(critic, dialogue, k, text):
    """V and Q [2] in float64 of one state and one utterance, in a batch of nothing else."""
    alone = {"observations": dialogue["observations"][: k + 1], "actions": [*dialogue["actions"][:k], text]}
    v_N2, q_N2 = critic([alone])
    return v_N2[k].double(), q_N2[k].double()


def still(*modules):
    """An optimiser that leaves everything where it is, so that only the gradient remains."""
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.0)


def gradient(module):
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in module.parameters()]
    return torch.cat([part.flatten() for part in parts])


# --------------------------------------------------------------------------------------- the equations
@pytest.fixture
def numbers():
    """Q and V of five utterances and the tokens of each: lengths 3, 1, 4, 2, 2."""
    torch.manual_seed(1)
    owner_M = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4])
    q, v = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    logp, baseline = torch.randn(12, dtype=torch.float64) - 2, torch.randn(12, dtype=torch.float64)
    return q, v, logp, baseline, owner_M


def test_E1_td_target(numbers):
    next_v, reward = numbers[0], [-1.0, 0.0, -1.0, 2.0, 0.5]
    target = archer.td_target(torch.tensor(reward, dtype=torch.float64), next_v, 0.9)
    for n in range(5):
        for twin in range(2):
            expected = reward[n] + 0.9 * next_v[n, twin].item()
            assert target[n, twin].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("expectile", [0.5, 0.8])
def test_E2_E6_value_loss(numbers, expectile):
    """Summed over the twins, mean over the rest; half the square at 0.5, which is the default."""
    v, q, total = numbers[1], numbers[0], 0.0
    for n in range(5):
        for twin in range(2):
            gap = q[n, twin].item() - v[n, twin].item()
            total += (expectile if gap > 0 else 1 - expectile) * gap**2
    assert archer.value_loss(v, q, expectile).item() == pytest.approx(total / 5, rel=1e-7)
    assert archer.value_loss(v, q) == archer.value_loss(v, q, 0.5)


def test_E6_pulls_v_above_the_mean():
    """The minimiser of the expectile 0.9 of {0, 1} is 0.9; a swapped sign would give 0.1."""
    grid, ends = torch.linspace(0, 1, 1001), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    losses = [archer.value_loss(v.expand(2, 2), ends, 0.9).item() for v in grid]
    assert grid[int(np.argmin(losses))].item() == pytest.approx(0.9, abs=2e-3)


def test_mc_returns():
    rewards, gamma = [-1.0, 0.5, -2.0, 3.0], 0.9
    expected = [sum(gamma ** (j - i) * rewards[j] for j in range(i, 4)) for i in range(4)]
    assert archer.mc_returns(rewards, gamma) == pytest.approx(expected) and archer.mc_returns([], 0.9) == []


def test_E3_advantages_take_the_minimum_of_each_twin_apart(numbers):
    """min Q - min V is not min(Q - V)."""
    q, v = numbers[:2]
    expected = [min(q[n].tolist()) - min(v[n].tolist()) for n in range(5)]
    assert archer.advantages(q, v).tolist() == pytest.approx(expected, rel=1e-12)
    assert expected != pytest.approx((q - v).min(-1).values.tolist(), rel=1e-3)


@pytest.mark.parametrize("with_baseline", [False, True], ids=["E3", "E5"])
def test_E3_E5_reinforce_loss(numbers, with_baseline):
    """And no gradient reaches the advantage or the baseline, which are numbers to the actor."""
    q, _, logp, baseline, owner = numbers
    logp, advantage, baseline = (x.clone().requires_grad_() for x in (logp, q[:, 0], baseline))
    weights = [advantage[owner[i]].item() - with_baseline * baseline[i].item() for i in range(12)]
    total = sum(-logp[i].item() * weights[i] for i in range(12))
    loss = archer.reinforce_loss(logp, advantage, owner, *([baseline] if with_baseline else []))
    assert loss.item() == pytest.approx(total / 5, rel=1e-12)
    loss.backward()
    assert advantage.grad is None and baseline.grad is None
    assert logp.grad.tolist() == pytest.approx([-w / 5 for w in weights], rel=1e-12)


def test_E4_baseline_loss(numbers):
    """Every utterance counts the same, however long it is; the advantage gets no gradient."""
    q, _, _, baseline, owner = numbers
    advantage, baseline, total = q[:, 0].clone().requires_grad_(), baseline.clone().requires_grad_(), 0.0
    for n in range(5):
        mine = [i for i in range(12) if owner[i] == n]
        total += sum((advantage[n].item() - baseline[i].item()) ** 2 for i in mine) / len(mine)
    loss = archer.baseline_loss(baseline, advantage, owner)
    assert loss.item() == pytest.approx(total / 5, rel=1e-12)
    loss.backward()
    assert advantage.grad is None and baseline.grad.abs().min() > 0


# ----------------------------------------------------------------------------------- how text is laid out
@BOTH
def test_lay_out_is_text_and_ends_of_turn(actor, tokenizer, world):
    """Every state stands behind the tokens that `before` spells, and every action ends with the end token."""
    played, _ = play(world, actor)
    rows, spans = archer.lay_out(played, tokenizer)
    assert len(rows) == (8 if world == "toy" else len(spans)) and len(spans) == len(states(played))
    for (d, k), (row, first, end) in zip(states(played), spans, strict=True):
        assert rows[row][:first] == before(d, k, tokenizer, world == "toy")
        assert rows[row][first:end] == [*archer.encode(tokenizer, d["actions"][k]), tokenizer.eos_token_id]
    rows[0].append(5)  # what is cached is not handed out to be changed
    assert archer.lay_out(played, tokenizer)[0][0] == rows[0][:-1]


def test_lay_out_spells_the_template_of_the_model(folders):
    """A dialogue in the model's own words, to the token; what comes last is no state and stands nowhere."""
    tokenizer = AutoTokenizer.from_pretrained(folders["CHAT"])
    d = {"observations": ["Hi: ", "Hi: a no\n", "Hi: a no\nb yes\n"], "actions": ["a", "b"]}
    rows, spans = archer.lay_out([d], tokenizer)
    said = [("user", "Hi: "), ("assistant", "a"), ("user", " no\n"), ("assistant", "b")]
    chat = [{"role": role, "content": text} for role, text in said]
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.decode(rows[0]) == whole.removesuffix("\n")
    assert [tokenizer.decode(rows[0][first:end]) for _, first, end in spans] == [
        f"{x}<|endoftext|>" for x in "ab"
    ]
    prompt = tokenizer.apply_chat_template(chat[:3], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(rows[0][: spans[1][1]]) == prompt


def test_a_template_that_ends_turns_otherwise_is_an_error(folders):
    tokenizer = copy.deepcopy(AutoTokenizer.from_pretrained(folders["CHAT"]))
    tokenizer.eos_token = "<|im_start|>"
    with pytest.raises(ValueError, match=r"ends turns with another token than '<.im_start.>'"):
        archer.chat_pieces(tokenizer)


def test_spoken_is_what_the_world_takes(tokenizer):
    """The critic judges fresh utterances by this text and learns from what worlds took: they must not
    differ."""
    worlds = [Toy(), envs.make("twenty-questions-subset")]
    for text in [" ant\n", "ant \n", "\n", "  \n", "a\nb", "ant", "\t ant\t\n", ""]:
        ids = archer.encode(tokenizer, text)
        assert archer.spoken(tokenizer, [*ids, tokenizer.eos_token_id]) == archer.spoken(tokenizer, ids)
        for world in worlds:
            world.reset(options={"index": 0})
            assert world.step(text)[-1]["action"] == archer.spoken(tokenizer, ids)


def test_a_fork_sees_its_past_and_nothing_else(tokenizer):
    """Naive visibility: a token sees those whose path it continues, and stands where the path is so long."""
    d = {"observations": ["red: ", "red: ant no\nb: ", ""], "actions": ["ant", "bee"]}
    other = {"observations": ["white: ", ""], "actions": [""]}
    said = [[9, 8, 7], [5], [4, 3]]
    rows, spans = archer.lay_out([d, other], tokenizer)
    (ids, position, visible), row_N, columns = archer.pack([d, other], tokenizer, said)
    assert row_N == [0, 0, 1]
    path = {(b, c): list(range(c + 1)) for b, row in enumerate(rows) for c in range(len(row))}
    for (b, start, _), own, utterance in zip(spans, columns, said, strict=True):
        assert own[0] == start - 1 and ids[b, own[1:]].tolist() == utterance
        path |= {(b, c): [*range(start), *own[1 : i + 2]] for i, c in enumerate(own[1:])}
    for (b, c), sees in path.items():
        assert visible[b, c].nonzero().flatten().tolist() == sees and position[b, c] == len(sees) - 1
    _, _, columns = archer.pack([d, other], tokenizer)
    assert columns == [list(range(first - 1, end)) for _, first, end in spans]


# ------------------------------------------------------- sampler, scorer and a plain forward pass agree
def heard(monkeypatch) -> list:
    """Of every call of `speak`: rows, starts, whether greedy, what it wrote, and its log-probs."""
    calls, speak = [], archer.speak

    def listen(actor, rows, starts, args, generator, greedy=False):
        written, logp_N = speak(actor, rows, starts, args, generator, greedy)
        calls.append((rows, starts, greedy, written, logp_N.tolist()))
        return written, logp_N

    monkeypatch.setattr(archer, "speak", listen)
    return calls


@TEMPERATURES
@pytest.mark.parametrize("world", ["toy", "forgetful-toy", "twenty-questions-subset"])
def test_sampled_logp_is_the_plain_logp(actor, tokenizer, world, temperature, monkeypatch):
    """The nll that `rollout` reports = that of the same tokens behind the dialogue so far, alone and
    unpadded.

    Fails when a position or the mask is off by one, when the temperature is forgotten, or when dialogues that
    have ended leave the wrong rows behind.
    """
    calls = heard(monkeypatch)
    played, nll = play(world, actor, temperature=temperature)
    said, expected = [], []
    for turn, (rows, starts, _, written, _) in enumerate(calls):
        alive = [d for d in played if len(d["actions"]) > turn]
        for d, row, start, ids in zip(alive, rows, starts, written, strict=True):
            assert row == before(d, turn, tokenizer, world != "forgetful-toy") and start == [len(row)]
            expected.append(-sum(plain_logps(actor, row, ids, temperature)))
            said.append((tokenizer.decode(ids, skip_special_tokens=True), d["actions"][turn]))
    assert nll == pytest.approx(expected, rel=1e-5, abs=1e-5)
    # The test is worth something only if the actor did say odd things.
    assert any(text and text == taken for text, taken in said) and any(text != taken for text, taken in said)
    assert any(taken == "" for _, taken in said)


@TEMPERATURES
@BOTH
def test_fresh_utterances_and_score_are_the_plain_logp(actor, tokenizer, world, temperature, monkeypatch):
    """Sampled log-prob = scored log-prob = that of a plain pass; and they come in the order of the states.

    Many forks on one padded row, in more rows than are read at once.
    """
    calls = heard(monkeypatch)
    played, _ = play(world, actor, n=36)
    calls.clear()
    fresh = fresh_for(played, actor, temperature=temperature)
    logps = [logp for call in calls for logp in call[-1]]
    assert [ids for call in calls for ids in call[3]] == fresh and len(fresh) == len(states(played))
    with torch.no_grad():
        args = small(temperature=temperature)
        logits_MV, token_M, hidden_MH, owner_M = archer.score(actor, played, fresh, args)
    scored = logits_MV.log_softmax(-1)[torch.arange(len(token_M)), token_M]
    assert token_M.tolist() == [token for ids in fresh for token in ids]
    assert owner_M.tolist() == [n for n, ids in enumerate(fresh) for _ in ids] and len(hidden_MH) == len(
        owner_M
    )
    for n, (d, k) in enumerate(states(played)):
        expected = plain_logps(actor, before(d, k, tokenizer, world == "toy"), fresh[n], temperature)
        assert logps[n] == pytest.approx(sum(expected), abs=1e-4)
        assert scored[owner_M == n].tolist() == pytest.approx(expected, abs=1e-4)


@BOTH
def test_score_of_the_actions_taken(actor, tokenizer, world):
    """None scores them where they stand, and says of them what a fork would."""
    played, _ = play(world, actor)
    taken = [[*archer.encode(tokenizer, d["actions"][k]), tokenizer.eos_token_id] for d, k in states(played)]
    with torch.no_grad():
        stands, forks = (archer.score(actor, played, said, small()) for said in (None, taken))
    assert torch.allclose(stands[0], forks[0], atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(stands[1::2], forks[1::2], strict=True))


def test_utterances_stop_at_the_end_of_turn_and_only_there(actor, tokenizer, monkeypatch):
    """An utterance has the end token as its last one, or the full number of tokens and none."""
    calls = heard(monkeypatch)
    actor.lm_head.bias.data[tokenizer.eos_token_id] += 3.0
    played, _ = play("toy", actor, n=40)
    written = [ids for call in calls for ids in call[3]] + fresh_for(played, actor)
    assert all(tokenizer.eos_token_id not in ids[:-1] for ids in written)
    assert all(ids[-1] == tokenizer.eos_token_id or len(ids) == 6 for ids in written)
    assert {len(ids) for ids in written} >= {1, 2, 3, 6}
    assert {len(ids) for ids in fresh_for(played, actor, max_action_tokens=1)} == {1}


def test_sample_draws_from_the_whole_softmax(actor, tokenizer):
    """Chi-square of 20,000 first tokens at temperature 0.7. Fails for a hidden top-k, top-p or
    temperature."""
    N, args, row = 20_000, small(max_action_tokens=1, temperature=0.7), archer.encode(tokenizer, "red: ")
    with torch.no_grad():
        p = (actor(input_ids=torch.tensor([row])).logits[0, -1].double() / 0.7).softmax(-1)
    written, _ = archer.speak(actor, [row], [[len(row)] * N], args, torch.Generator().manual_seed(1))
    counts, expected = torch.bincount(torch.tensor(written).flatten(), minlength=len(p)).double(), N * p
    rare = expected < 5  # too few for a chi-square: they make one class together
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum().item(), len(counts) - 1
    assert freedom > 50 and chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_greedy_writes_the_likeliest_tokens(actor, tokenizer):
    """Token by token; whatever the generator says."""
    rows = [archer.encode(tokenizer, text) for text in ("red: ", "blue: cow no\ngreen: ")]
    starts = [[len(row) - 1, len(row)] for row in rows]
    written, _ = archer.speak(actor, rows, starts, small(), torch.Generator().manual_seed(7), greedy=True)
    for ids, context in zip(written, [rows[0][:-1], rows[0], rows[1][:-1], rows[1]], strict=True):
        for k in range(len(ids)):
            with torch.no_grad():
                logits = actor(input_ids=torch.tensor([context + ids[:k]])).logits[0, -1]
            assert logits[ids[k]] == logits.max()


def test_bfloat16_computes_so_but_keeps_small_steps(actor, folders):
    """Fails with parameters in bfloat16, which a step of 1e-5 leaves where they are, and if nothing computes
    so."""
    played, _ = play("toy", actor)
    fresh, rough = fresh_for(played, actor), small(dtype="bfloat16")
    exact_MV = archer.score(actor, played, fresh, small())[0]
    logits_MV = archer.score(actor, played, fresh, rough)[0]
    assert logits_MV.dtype == torch.float32 and 1e-4 < (logits_MV - exact_MV).abs().max() < 1
    before_it = copy.deepcopy(actor.state_dict())
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-5)
    archer.descend(logits_MV.var(), optimizer, actor.parameters(), 1.0, "actor")
    moved = [(new - before_it[name]).abs().max().item() for name, new in actor.state_dict().items()]
    assert sorted(moved)[len(moved) // 2] == pytest.approx(1e-5, rel=0.1)
    assert len(fresh_for(played, actor, dtype="bfloat16")) == len(fresh)
    for kind in ("decoder", "encoder"):
        critic = critic_of(actor, kind, folders=folders)
        q_N2 = critic(played)[1]
        critic.dtype = "bfloat16"
        assert 0 < (critic(played)[1] - q_N2).abs().max() < 0.5 and critic(played)[1].dtype == torch.float32


def test_the_sampler_in_bfloat16_is_the_scorer_in_bfloat16(actor, monkeypatch):
    calls = heard(monkeypatch)
    played, _ = play("toy", actor, dtype="bfloat16")
    calls.clear()
    fresh = fresh_for(played, actor, dtype="bfloat16")
    with torch.no_grad():
        logits_MV, token_M, _, owner_M = archer.score(actor, played, fresh, small(dtype="bfloat16"))
    logp_M = logits_MV.log_softmax(-1)[torch.arange(len(token_M)), token_M]
    scored = torch.zeros(len(fresh)).index_add(0, owner_M, logp_M)
    assert (scored - torch.tensor(calls[0][-1])).abs().mean() < 0.1


# -------------------------------------------------------------------- a batch is no more than its parts
@BOTH
def test_score_of_a_batch_is_that_of_its_parts(actor, world):
    """Dialogues of other lengths beside it (so padding), or another order of them, change no log-prob."""
    played, _ = play(world, actor)
    fresh = fresh_for(played, actor)
    first = np.cumsum([0, *(len(d["actions"]) for d in played)])
    own = [fresh[first[i] : first[i + 1]] for i in range(8)]

    @torch.no_grad()
    def logits(which):
        said = [ids for i in which for ids in own[i]]
        sizes = [sum(map(len, own[i])) for i in which]
        found = archer.score(actor, [played[i] for i in which], said, small())[0].split(sizes)
        return dict(zip(which, found, strict=True))

    together, backwards = logits(range(8)), logits(range(7, -1, -1))
    for i in range(8):
        assert torch.allclose(together[i], logits([i])[i], atol=1e-4)
        assert torch.allclose(together[i], backwards[i], atol=1e-4)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@BOTH
def test_critic_of_a_batch_is_that_of_its_parts(actor, world, kind, folders):
    """And its forks beside one another: Q of the actions taken is Q of the same words as fresh ones."""
    played, _ = play(world, actor)
    critic = critic_of(actor, kind, folders=folders)
    with torch.no_grad():
        v_N2, q_N2 = critic(played)
        alone = [critic([d]) for d in played]
        forks = critic(played, [action for d in played for action in d["actions"]])
    assert v_N2.shape == q_N2.shape == (len(states(played)), 2) and v_N2.std() > 0.005
    assert torch.allclose(v_N2, torch.cat([v for v, _ in alone]), atol=1e-4)
    assert torch.allclose(q_N2, torch.cat([q for _, q in alone]), atol=1e-4)
    assert torch.allclose(v_N2, forks[0], atol=1e-4) and torch.allclose(q_N2, forks[1], atol=1e-4)


@BOTH
def test_greedy_rollout_of_a_batch_is_that_of_its_parts(actor, world):
    together, nll = play(world, actor, n=4, greedy=True)
    total = 0.0
    for i, d in enumerate(together):
        (alone,), own = archer.rollout(
            actor, envs.VecTextEnv(world, 1), small(), torch.Generator(), None, [i], True
        )
        assert alone == d
        total += sum(own)
    assert sum(nll) == pytest.approx(total, rel=1e-5)


def test_the_token_that_pads_may_occur_in_the_text(actor, tokenizer):
    """pad == eos is safe: masks come from lengths, so token 0 is a token like any other where it really
    stands."""
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    text = "red<|endoftext|>: "
    d = {"observations": [text, text + "<|endoftext|> no\nb: ", "."], "actions": ["<|endoftext|>", "ant"]}
    other = {"observations": ["a", "."], "actions": ["bee"]}
    said = [[0], [5, 0, 0, 7, 0], [0, 0]]
    assert archer.encode(tokenizer, text).count(0) == 1
    with torch.no_grad():
        logits_MV, token_M, _, _ = archer.score(actor, [d, other], said, small())
    logp = logits_MV.log_softmax(-1)[torch.arange(len(token_M)), token_M].tolist()
    contexts = [
        before(d, 0, tokenizer, True),
        before(d, 1, tokenizer, True),
        before(other, 0, tokenizer, True),
    ]
    expected = [plain_logps(actor, context, ids) for context, ids in zip(contexts, said, strict=True)]
    assert logp == pytest.approx([x for part in expected for x in part], abs=1e-4)


def test_models_are_loaded_without_dropout_in_float32(folders, tokenizer, tmp_path):
    """A checkpoint's own dropout would make the scorer another policy than the sampler."""
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2)
    assert config.resid_pdrop > 0
    GPT2LMHeadModel(config).bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for source in (str(tmp_path), *(folders[name] for name in ("GPT2", "BERT"))):
        auto = archer.transformers.AutoModel if "BERT" in source else AutoModelForCausalLM
        model, _ = archer.load(auto, source, small())
        assert not any(module.training for module in model.modules()) and model.dtype == torch.float32


# ------------------------------------------------------------------------------------------- the updates
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@BOTH
def test_critic_reads_what_it_should(actor, world, kind, folders):
    """V at the last token of a state, Q at the end of turn of an utterance; an encoder reads both texts
    apart."""
    played, _ = play(world, actor, n=4)
    critic, fresh = critic_of(actor, kind, folders=folders), ["bee", "", "dog dog"] * 9
    N, body, own = len(states(played)), critic.body, critic.tokenizer
    with torch.no_grad():
        v_N2, q_N2 = critic(played, fresh[:N])
        for n, (d, k) in enumerate(states(played)):
            if kind == "decoder":
                row = before(d, k, own, world == "toy")
                said = [*archer.encode(own, fresh[n]), own.eos_token_id]
                hidden = body(input_ids=torch.tensor([row + said])).last_hidden_state[0]
                v_H, q_H = hidden[len(row) - 1], hidden[-1]
            else:
                texts = [
                    own(text, return_tensors="pt").input_ids for text in (d["observations"][k], fresh[n])
                ]
                assert all(ids[0, 0] == own.cls_token_id for ids in texts)
                v_H, a_H = (body(input_ids=ids).last_hidden_state[0, 0] for ids in texts)
                q_H = torch.cat([v_H, a_H])
            v, q = (
                torch.cat([h(x) for h in heads])
                for heads, x in ((critic.v_heads, v_H), (critic.q_heads, q_H))
            )
            assert torch.allclose(v_N2[n], v, atol=1e-4) and torch.allclose(q_N2[n], q, atol=1e-4)
            assert abs(v[0] - v[1]) > 1e-3 and abs(q[0] - q[1]) > 1e-3  # twins, not copies


def test_an_encoder_cuts_the_beginning_of_a_text_that_is_too_long(folders, actor):
    """BERT reads 512 tokens; of a longer dialogue the last ones matter most."""
    critic, long = critic_of(actor, "encoder", folders=folders), "red: ant yes\n" * 400
    with torch.no_grad():
        cls = critic.cls([long + "a", "blue: " + long + "a", long + "b"])
    assert torch.allclose(cls[0], cls[1], atol=1e-5) and not torch.allclose(cls[0], cls[2], atol=1e-4)


def with_rewards(dialogues):
    """Rewards that differ, as those of a toy are mostly zero; and fresh utterances of their own."""
    for n, d in enumerate(dialogues):
        d["rewards"] = [0.3 * n - k for k in range(len(d["actions"]))]
        d["fresh"] = [WORDS[(n + k) % 4] for k in range(len(d["actions"]))]
    return dialogues


@pytest.mark.parametrize("loss", ["td", "mc", "iql"])
@BOTH
def test_critic_update_is_E1_and_E2(actor, world, loss):
    """Its losses against a loop over single utterances: who bootstraps, from which state, with which
    utterance.

    Fails when a dialogue bootstraps past its end (a time limit is one, too), when the states of neighbouring
    dialogues are mixed up, when V learns from the wrong utterance, or when the target does not stand in for
    it.
    """
    played = with_rewards(play(world, actor, n=4)[0])  # tasks 0 and 2 terminate, 1 and 3 are cut off
    critic, target = (critic_of(actor, seed=seed) for seed in (1, 2))
    args, q_terms, v_terms, first, flat = (
        small(gamma=0.8, critic_loss=loss, expectile=0.7, polyak=0.0),
        [],
        [],
        [],
        [],
    )
    for d in played:
        n = len(d["actions"])
        returns = [sum(0.8 ** (j - k) * d["rewards"][j] for j in range(k, n)) for k in range(n)]
        for k in range(n):
            v, q = value_alone(critic, d, k, d["actions"][k])
            next_v = value_alone(target, d, k + 1, "")[0] if k < n - 1 else 0.0
            goal = returns[k] if loss == "mc" else d["rewards"][k] + 0.8 * next_v
            q_terms.append(((q - goal) ** 2).mean().item())
            said = d["fresh"][k] if loss == "td" else d["actions"][k]
            gap = (returns[k] if loss == "mc" else value_alone(target, d, k, said)[1]) - v
            share = 0.7 if loss == "iql" else 0.5
            v_terms.append(sum((share if g > 0 else 1 - share) * g.item() ** 2 for g in gap))
            flat.append((v.mean().item() - returns[k], returns[k]))
            first += [flat[-1][0]] if k == 0 else []
    metrics = archer.critic_update(critic, target, still(critic), played, args)
    assert metrics["critic/q_loss"] == pytest.approx(np.mean(q_terms), rel=1e-4)
    assert metrics["critic/v_loss"] == pytest.approx(np.mean(v_terms), rel=1e-4)
    assert metrics["critic/bias"] == pytest.approx(np.mean(first), rel=1e-4)
    errors, all_returns = np.array(flat).T
    explained = 1 - errors.var(ddof=1) / all_returns.var(ddof=1)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-3)


def test_of_returns_that_are_all_alike_nothing_is_explained(actor):
    """The share of no variance is no number, which the log shows as such; it was minus many millions."""
    played = [d | {"rewards": [0.0] * len(d["actions"])} for d in play("toy", actor, n=4)[0]]
    critic = critic_of(actor)
    metrics = archer.critic_update(
        critic, copy.deepcopy(critic), still(critic), played, small(critic_loss="mc")
    )
    assert math.isnan(metrics.pop("critic/explained_variance"))
    assert all(math.isfinite(figure) for figure in metrics.values())


def test_critic_update_moves_the_critic_and_the_target_after_it(actor):
    """The gradient goes into the critic only; then the target makes its Polyak step."""
    played = with_rewards(play("toy", actor, n=4)[0])
    critic, target = (critic_of(actor, seed=seed) for seed in (1, 2))
    old, fixed = copy.deepcopy(target.requires_grad_(False)), copy.deepcopy(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-2)
    archer.critic_update(critic, target, optimizer, played, small(polyak=0.25))
    assert gradient(critic).norm() > 0 and all(p.grad is None for p in target.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(critic.parameters(), fixed.parameters(), strict=True))
    for now, was, new in zip(target.parameters(), old.parameters(), critic.parameters(), strict=True):
        assert torch.allclose(now, 0.75 * was + 0.25 * new, atol=1e-6)


def test_updates_warn_of_nothing(actor):
    """What a run prints on stderr is for errors."""
    played, baseline = with_rewards(play("toy", actor, n=4)[0]), archer.mlp(32, 32, 0.3)
    critic, start, args = critic_of(actor), copy.deepcopy(actor), small()
    torch.set_warn_always(True)  # not in the first test of a process only
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            archer.critic_update(critic, copy.deepcopy(critic), still(critic), played, args)
            options = (still(actor, baseline), played, args, torch.Generator())
            archer.actor_update(actor, start, critic, baseline, *options)
    finally:
        torch.set_warn_always(False)


def test_D4_a_new_critic_says_the_value_that_it_is_given(actor, folders):
    """Near enough: only the last bias is set, what lies before it is drawn."""
    played, _ = play("toy", actor, n=4)
    bert, tokenizer = archer.load(archer.transformers.AutoModel, folders["BERT"], small())
    for body, own in ((actor.base_model, actor.tokenizer), (bert, tokenizer)):
        with torch.no_grad():
            v_N2, q_N2 = archer.Critic(body, own, -40.0, "float32")(played)
        assert (v_N2 + 40).abs().max() < 3 and (q_N2 + 40).abs().max() < 3


CHANGES = [
    {},
    {"center": False, "kl": 0.0},
    {"baseline": True, "temperature": 0.7},
    {"kl": 0.5, "center": False},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@BOTH
def test_actor_update_is_E3(actor, tokenizer, world, changes, monkeypatch):
    """Its figures and its gradient against a loop over single utterances and their tokens, end of turn
    included.

    And no more than that: what the baseline learns (E4) moves the baseline only, the advantage is a number,
    and
    the KL divergence is that of the actor from the actor of the start, not the other way round (D1).
    """
    played, _ = play(world, actor, n=4)
    critic, twin, start = critic_of(actor), copy.deepcopy(actor), copy.deepcopy(actor)
    for parameter in start.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    args, baseline = small(max_grad_norm=1e9, **changes), archer.mlp(32, 32, 0.3)
    fresh = fresh_for(played, actor, seed=9, temperature=args.temperature)
    N, advantage = len(fresh), []
    for (d, k), ids in zip(states(played), fresh, strict=True):
        v, q = value_alone(critic, d, k, archer.spoken(tokenizer, ids))
        advantage.append(q.min().item() - v.min().item())
    weights = [a - np.mean(advantage) for a in advantage] if args.center else advantage
    loss = kl = fit = entropy = 0.0
    for (d, k), ids, weight in zip(states(played), fresh, weights, strict=True):
        context = before(d, k, tokenizer, world == "toy")
        tokens, at = torch.tensor([context + ids]), slice(len(context) - 1, -1)
        logp, start_logp = (
            (x(input_ids=tokens).logits[0, at] / args.temperature).log_softmax(-1) for x in (twin, start)
        )
        b = (
            baseline(twin.base_model(input_ids=tokens).last_hidden_state[0, at].detach())[:, 0]
            * args.baseline
        )
        loss = loss - (logp[range(len(ids)), ids] * (weight - b.detach())).sum() / N
        kl = kl + (logp.exp() * (logp - start_logp.detach())).sum() / N
        entropy -= (logp.exp() * logp).sum().item() / N
        fit = fit + ((weight - b) ** 2).mean() / N
    (loss + args.kl * kl).backward()
    expected, twin_baseline = gradient(twin), copy.deepcopy(baseline)
    if args.baseline:
        fit.backward()
        twin_baseline = torch.cat([p.grad.flatten() for p in baseline.parameters()])

    generator = torch.Generator().manual_seed(9)
    options = (still(actor, baseline), played, args, generator)
    metrics = archer.actor_update(actor, start, critic, baseline, *options)
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
    assert metrics["actor/kl"] == pytest.approx(kl.item(), rel=1e-3) and metrics["actor/kl"] > 0
    assert metrics["actor/entropy"] == pytest.approx(entropy, rel=1e-4)
    assert metrics["actor/advantage_mean"] == pytest.approx(np.mean(advantage), abs=1e-5)
    assert metrics["actor/advantage_std"] == pytest.approx(np.std(advantage, ddof=1), rel=1e-3)
    assert metrics["actor/baseline_loss"] == pytest.approx(fit.item() if args.baseline else 0.0, rel=1e-4)
    assert (gradient(actor) - expected).norm() < 1e-3 * expected.norm()
    assert metrics["actor/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-3)
    assert gradient(critic).norm() == 0 and gradient(start).norm() == 0
    if args.baseline:
        assert torch.allclose(gradient(baseline), twin_baseline, rtol=1e-3, atol=1e-5)
    else:
        assert gradient(baseline).norm() == 0


def test_environment_tokens_get_no_gradient_and_the_end_of_turn_does(actor, tokenizer, monkeypatch):
    """The loss reaches the hidden states that predict tokens of utterances, ends of turn included, and no
    others."""
    played, outputs = Toy().demonstrations(4, seed=1), []
    end = [tokenizer.eos_token_id]
    fresh = [archer.encode(tokenizer, action) + end for d in played for action in d["actions"]]
    monkeypatch.setattr(archer, "fresh_utterances", lambda *_: fresh)

    def keep(module, inputs, output):
        output.last_hidden_state.retain_grad()
        outputs.append(output.last_hidden_state)

    critic, start = critic_of(actor), copy.deepcopy(actor).requires_grad_(False)
    actor.base_model.register_forward_hook(keep)
    baseline, args = archer.mlp(32, 32, 0.0), small(kl=0.0)
    archer.actor_update(actor, start, critic, baseline, still(actor, baseline), played, args, None)
    (hidden,), (_, row_N, columns) = outputs, archer.pack(played, tokenizer, fresh)
    for row in range(4):
        expected = {c for own, b in zip(columns, row_N, strict=True) if b == row for c in own[:-1]}
        assert set(hidden.grad[row].abs().sum(-1).nonzero().flatten().tolist()) == expected


def test_1x8_is_8x1(actor, monkeypatch):
    """Losses are means over utterances: a batch has the utterance-weighted mean loss and gradient of its
    parts."""
    played = with_rewards(play("toy", actor, n=8)[0])
    fresh = fresh_for(played, actor)
    first = np.cumsum([0, *(len(d["actions"]) for d in played)])
    critic, target = (critic_of(actor, seed=seed) for seed in (1, 2))
    start, baseline = copy.deepcopy(actor), archer.mlp(32, 32, 0.3)
    args = small(center=False, max_grad_norm=1e9, polyak=0.0)  # the mean of D3 is one of the batch

    def results(which):
        said = [ids for i in which for ids in fresh[first[i] : first[i + 1]]]
        monkeypatch.setattr(archer, "fresh_utterances", lambda *_: said)
        part, optimizer = [played[i] for i in which], still(actor, baseline)
        a = archer.actor_update(actor, start, critic, baseline, optimizer, part, args, None)
        c = archer.critic_update(critic, target, still(critic), part, args)
        figures = [a["actor/loss"], a["actor/kl"], c["critic/q_loss"], c["critic/v_loss"]]
        return torch.cat([torch.tensor(figures), gradient(actor), gradient(critic)])

    parts = sum(len(played[i]["actions"]) / first[-1] * results([i]) for i in range(8))
    whole = results(range(8))
    assert (whole - parts).norm() < 1e-4 * whole.norm()


def test_gradients_are_clipped_and_nan_is_an_error():
    """`descend` clips what it is given and says how large the gradient was."""
    module, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    loss, parameters = (
        100 * (module(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum(),
        list(module.parameters()),
    )
    norm = archer.descend(loss, still(module, other), parameters, 1.0, "test")
    assert norm == pytest.approx(100 * math.sqrt(3), rel=1e-5)
    assert gradient(module).norm() == pytest.approx(1, rel=1e-4)
    assert gradient(other).norm() == pytest.approx(100 * math.sqrt(3), rel=1e-5)
    before_it, optimizer = copy.deepcopy(module.state_dict()), torch.optim.SGD(parameters, lr=1.0)
    with pytest.raises(ArithmeticError, match="test diverged"):
        archer.descend(module(torch.full((1, 2), math.inf)).sum(), optimizer, parameters, 1.0, "test")
    assert all(torch.equal(before_it[name], value) for name, value in module.state_dict().items())


# ------------------------------------------------------------------------------------- what `main` hands on
class Spy:
    """What every part of a run was given and gave back, in the order of the calls."""

    NAMES = ("rollout", "speak", "fresh_utterances", "score", "critic_update", "actor_update", "evaluate")

    def __init__(self, patch):
        self.calls, self.open = [], []
        for name in self.NAMES:
            patch.setattr(archer, name, self.wrap(name, getattr(archer, name)))

    def wrap(self, name, real):
        def called(*given, **named):
            call = {"name": name, "given": given, "within": [x["name"] for x in self.open], "inside": []}
            call["state"] = self.look(name, given)
            for outer in self.open:
                outer["inside"].append(call)
            self.open.append(call)
            self.calls.append(call)
            try:
                result = real(*given, **named)
            finally:
                self.open.pop()
            # the first dialogues become the buffer, which grows
            call |= {
                "iteration": self.iteration,
                "result": result if name != "rollout" else (list(result[0]), result[1]),
            }
            return result

        return called

    @staticmethod
    def look(name, given):
        """A copy of what changes later."""
        if name == "critic_update":
            critic, target = given[:2]
            return {
                "critic": copy.deepcopy(critic.state_dict()),
                "target": copy.deepcopy(target.state_dict()),
            }
        if name == "actor_update":
            actor, start = given[:2]
            state = {"actor": copy.deepcopy(actor.state_dict()), "start": copy.deepcopy(start.state_dict())}
            return state | {"rate": given[4].param_groups[0]["lr"]}
        return {"generator": given[3].get_state()} if name == "fresh_utterances" else {}

    @property
    def iteration(self):
        """0 while the first dialogues are played; every iteration begins with dialogues of its own."""
        own = [c for c in self.calls if c["name"] == "rollout" and "evaluate" not in c["within"]]
        return len(own) - 1

    def of(self, name, within=None):
        return [c for c in self.calls if c["name"] == name and (within is None or within in c["within"])]


SPIED = {"iterations": 5, "rollouts": 4, "warmup": 2, "critic_updates": 4, "critic_batch": 24}
SPIED |= {"critic_pool": 64, "actor_updates": 3, "actor_batch": 16, "actor_lr": 3e-3}
SPIED |= {"eval_every": 5, "eval_episodes": 8}


@pytest.fixture(scope="module")
def spied(folders, tmp_path_factory):
    """A run of five iterations, two of them warm-up, and all that was handed on in it."""
    torch.set_num_threads(1)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        spy.args = small(runs=tmp_path_factory.mktemp("spied"), actor=folders["LLAMA"], **SPIED)
        spy.summary = archer.main(spy.args)
    for number, handler in kept.items():
        signal.signal(number, handler)
    return spy


def which(dialogue) -> int:
    """Who a dialogue is, also where a copy of its dict is handed on."""
    return id(dialogue["observations"])


def played_in(spy) -> list[set[int]]:
    """Of each iteration, the dialogues that were played in it; the first of all are those of iteration 0."""
    own = [call for call in spy.of("rollout") if "evaluate" not in call["within"]]
    return [{which(d) for d in call["result"][0]} for call in own]


def test_a_run_has_as_many_updates_and_dialogues_as_it_should(spied):
    played = [call for call in spied.of("rollout") if "evaluate" not in call["within"]]
    assert [len(call["result"][0]) for call in played] == [4] * 6
    assert [c["iteration"] for c in spied.of("critic_update")] == [n for n in range(1, 6) for _ in range(4)]
    assert [c["iteration"] for c in spied.of("actor_update")] == [n for n in range(3, 6) for _ in range(3)]
    assert all(not any(inner["given"][5:] and inner["given"][5] for inner in c["inside"]) for c in played), (
        "sampled"
    )
    assert spied.summary["episodes"] == 24


def test_the_critic_learns_from_the_whole_buffer(spied):
    """Not from the newest dialogues only: it is off-policy. Its pool, and its batches, have old ones and new
    ones."""
    played, pools = played_in(spied), [c for c in spied.of("fresh_utterances") if not c["within"]]
    assert len(pools) == 5 and all(len(c["given"][1]) == 64 for c in pools)
    for n, pool in enumerate(pools, start=1):
        drawn = {which(d) for d in pool["given"][1]}
        learned = [d for c in spied.of("critic_update") if c["iteration"] == n for d in c["given"][3]]
        assert {which(d) for d in learned} <= drawn and len(learned) == 4 * 24
        for some in played[: n + 1]:
            assert drawn & some and {which(d) for d in learned} & some
        assert not any(drawn & later for later in played[n + 1 :])


def test_the_actor_learns_in_states_of_the_whole_buffer(spied):
    """Not of the newest dialogues only."""
    played = played_in(spied)
    for n in range(3, 6):
        batches = [c["given"][5] for c in spied.of("actor_update") if c["iteration"] == n]
        assert [len(batch) for batch in batches] == [16] * 3
        assert all({which(d) for batch in batches for d in batch} & some for some in played[: n + 1])
        assert len({tuple(map(which, batch)) for batch in batches}) == 3, "each update draws its own"


def test_the_utterances_of_E2_belong_to_their_dialogues(spied):
    """A dialogue of a batch has the texts that were written in its own states, in order."""
    pools = [c for c in spied.of("fresh_utterances") if not c["within"]]
    for n, pool in enumerate(pools, start=1):
        texts = iter([archer.spoken(pool["given"][0].tokenizer, ids) for ids in pool["result"]])
        pairs = {(which(d), tuple(next(texts) for _ in d["actions"])) for d in pool["given"][1]}
        learned = [d for c in spied.of("critic_update") if c["iteration"] == n for d in c["given"][3]]
        assert {(which(d), tuple(d["fresh"])) for d in learned} <= pairs
        assert len({text for _, own in pairs for text in own}) > 50, "texts differ, or this would say nothing"


def test_the_target_is_a_network_that_lags_behind(spied):
    calls, shares = spied.of("critic_update"), []
    for call in calls:
        critic, target = call["given"][:2]
        own = {p.data_ptr() for p in critic.parameters()}
        assert critic is not target and not own & {p.data_ptr() for p in target.parameters()}
    for now, after in itertools.pairwise(calls):
        for name, was in now["state"]["target"].items():
            expected = torch.lerp(was, after["state"]["critic"][name], spied.args.polyak)
            assert torch.allclose(after["state"]["target"][name], expected, atol=1e-6)
        shares += [
            not torch.equal(x, after["state"]["critic"][k]) for k, x in after["state"]["target"].items()
        ]
    assert np.mean(shares) > 0.9


def test_the_kl_is_to_the_actor_of_the_start(spied, folders):
    """Which stands still, while the actor moves away from it."""
    start = AutoModelForCausalLM.from_pretrained(folders["LLAMA"]).state_dict()
    calls = spied.of("actor_update")
    for n, call in enumerate(calls):
        assert call["given"][0] is not call["given"][1]
        assert all(torch.equal(value, start[name]) for name, value in call["state"]["start"].items())
        moved = [not torch.equal(value, start[name]) for name, value in call["state"]["actor"].items()]
        assert any(moved) == (n > 0)
    figures = [call["result"]["actor/kl"] for call in calls]
    assert abs(figures[0]) < 1e-5 < min(figures[1:])


def test_every_actor_update_has_utterances_of_its_own(spied):
    """On-policy: sampled within the update, from the actor as it is, and these are what it scores; never
    greedy."""
    generators, critic = [], spied.of("critic_update")[0]["given"][0]
    for call in spied.of("actor_update"):
        assert call["given"][2] is critic
        (fresh,) = [c for c in call["inside"] if c["name"] == "fresh_utterances"]
        assert fresh["given"][0] is call["given"][0] and fresh["given"][1] is call["given"][5]
        generators.append(fresh["state"]["generator"].numpy().tobytes())
        scored = [c for c in call["inside"] if c["name"] == "score"]
        assert {id(c["given"][0]) for c in scored} == {id(x) for x in call["given"][:2]}
        assert all(c["given"][2] is fresh["result"] for c in scored)
    assert len(set(generators)) == len(generators) == 9


def test_fresh_utterances_are_sampled(spied, actor):
    """As the world hears them: not greedy ones, neither for E2 nor for E3."""
    for call in spied.of("speak", within="fresh_utterances"):
        assert not any(call["given"][5:])
    (d, *_), _ = play("toy", actor)
    assert len({tuple(ids) for ids in fresh_for([d] * 40, actor)[::2]}) > 10


def test_sampled_and_greedy_evaluation_are_not_swapped(spied):
    """eval/return is that of sampled dialogues, every task so often; eval/return_greedy that of greedy
    ones."""
    first, last = spied.of("evaluate")
    for evaluation in (first, last):
        rollouts = [c for c in evaluation["inside"] if c["name"] == "rollout"]
        found = {}
        for rollout in rollouts:
            (is_greedy,) = {
                bool(c["given"][5:] and c["given"][5]) for c in rollout["inside"] if c["name"] == "speak"
            }
            found["_greedy" if is_greedy else ""] = rollout
        assert sorted(d["answer"] for d in found[""]["result"][0]) == sorted(WORDS * 2)
        assert sorted(d["answer"] for d in found["_greedy"]["result"][0]) == sorted(WORDS)
        for suffix, rollout in found.items():
            figures = envs.summarise(rollout["result"][0])
            for name in ("return", "success", "repeated"):
                assert evaluation["result"][f"{name}{suffix}"] == figures[name]
    assert {f"warm_start_{k}": v for k, v in first["result"].items()}.items() <= spied.summary.items()
    assert {f"eval_{k}": v for k, v in last["result"].items()}.items() <= spied.summary.items()


def test_the_figures_of_greedy_and_sampled_dialogues_are_not_exchanged(folders, tmp_path, monkeypatch):
    """In the log and in the summary, of the first evaluation and of the last."""
    real = archer.rollout

    def rollout(actor, worlds, args, generator, rng=None, indices=None, greedy=False):
        played, nll = real(actor, worlds, args, generator, rng, indices, greedy)
        first = 7.0 if greedy else 5.0
        return [d | {"rewards": [first, *(0.0 for _ in d["actions"][1:])]} for d in played], nll

    monkeypatch.setattr(archer, "rollout", rollout)
    run, summary = go(tmp_path, folders, iterations=1)
    for stage in ("warm_start", "eval"):
        assert (summary[f"{stage}_return"], summary[f"{stage}_return_greedy"]) == (5, 7)
    assert (lines_of(run)[-1]["eval/return"], lines_of(run)[-1]["eval/return_greedy"]) == (5, 7)


@pytest.mark.parametrize(("episodes", "played"), [(3, [3, 3]), (20, [20, 10])])
def test_an_evaluation_is_no_larger_than_asked_for_and_repeats_itself(actor, monkeypatch, episodes, played):
    """Whole passes over the tasks, sampled and greedy; of a world with more tasks the first ones."""
    sizes, rollout = [], archer.rollout
    monkeypatch.setattr(
        archer, "rollout", lambda *options: sizes.append(len(options[5])) or rollout(*options)
    )
    args = small(env="twenty-questions-subset", eval_episodes=episodes)
    assert archer.evaluate(actor, args) == archer.evaluate(actor, args) and sizes == 2 * played


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_D6_the_actors_rate_falls_from_its_first_update_on(folders, tmp_path, monkeypatch, anneal_lr):
    """The first has all of it, and the last of three iterations a third."""
    spy = Spy(monkeypatch)
    args = small(
        runs=tmp_path, actor=folders["LLAMA"], iterations=5, warmup=2, actor_lr=1e-3, anneal_lr=anneal_lr
    )
    archer.main(args)
    expected = [1e-3, 1e-3 * 2 / 3, 1e-3 / 3] if anneal_lr else [1e-3] * 3
    assert [c["state"]["rate"] for c in spy.of("actor_update")] == pytest.approx(expected)


def test_D4_is_the_mean_discounted_return_of_the_first_dialogues(folders, tmp_path, monkeypatch):
    values, real = [], archer.mlp
    monkeypatch.setattr(archer, "mlp", lambda a, b, value: values.append(value) or real(a, b, value))
    run, _ = go(tmp_path, folders, iterations=1, gamma=0.5, rollouts=8, env="twenty-questions-subset")
    first = torch.load(run / "checkpoint.pt", weights_only=True)["buffer"][:8]
    expected = np.mean([sum(r * 0.5**k for k, r in enumerate(d["rewards"])) for d in first])
    assert expected < -1 and values == [pytest.approx(expected)] * 4 + [0.0]


def test_the_buffer_forgets_the_oldest(folders, tmp_path, monkeypatch):
    """What is left is the end of what was played, and no more than the buffer may hold."""
    spy = Spy(monkeypatch)
    run, _ = go(tmp_path, folders, iterations=3, buffer_size=20)
    calls = [call for call in spy.of("rollout") if "evaluate" not in call["within"]]
    played = [d for call in calls for d in call["result"][0]]
    kept = torch.load(run / "checkpoint.pt", weights_only=True)["buffer"]
    assert 0 < len(kept) < len(played) == 16 and kept == played[-len(kept) :]
    assert len(states(kept)) <= 20 < len(states(played[-len(kept) - 1 :]))


# --------------------------------------------------------------------------------------------- runs
def lines_of(run: Path, name="metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def timeless(run: Path) -> list[dict]:
    """The metrics, without those of the clock."""
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines_of(run)]


def go(folder: Path, folders: dict, **changes) -> tuple[Path, dict]:
    """A run in a folder of its own, and its summary; it starts from the Llama."""
    summary = archer.main(small(**{"runs": folder, "actor": folders["LLAMA"]} | changes))
    (run,) = folder.iterdir()
    return run, summary


@pytest.fixture(scope="module")
def finished(tmp_path_factory, folders):
    """A run of four iterations with checkpoints every two, and its summary."""
    torch.set_num_threads(1)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    options = {"iterations": 4, "env": "twenty-questions-subset"}
    result = go(tmp_path_factory.mktemp("finished"), folders, **options)
    for number, handler in kept.items():
        signal.signal(number, handler)
    return result


SWITCHES = [
    {"baseline": True, "center": False},
    {"critic_loss": "iql", "anneal_lr": False},
    {"critic_loss": "mc", "kl": 0.0, "temperature": 0.7},
    {"critic": "BERT", "env": "forgetful-toy"},
    {"critic": "GPT2"},
    {"actor": "GPT2", "critic": "BERT", "max_action_tokens": 1},
    {"actor": "CHAT", "env": "twenty-questions-subset"},
    {"env": "twenty-questions-subset", "warmup": 1, "buffer_size": 100},
    {"dtype": "bfloat16"},
    {"env": "mini-detective", "rollouts": 2, "eval_episodes": 1},
    {"env": "webshop", "rollouts": 2, "eval_episodes": 1, "actor": "CHAT"},
    {"env": "guess-my-city", "rollouts": 2, "eval_episodes": 1},
]


@pytest.mark.parametrize("changes", SWITCHES, ids=str)
def test_every_switch_runs(tmp_path, folders, changes):
    """Two iterations: every figure is finite, and the actor moves when its warm-up is over."""
    if problem := envs.missing(changes.get("env", "toy")):
        pytest.skip(problem)
    changes = {key: folders.get(value, value) for key, value in changes.items()}
    run, summary = go(tmp_path / "runs", folders, **changes)
    _, *rows = lines_of(run)
    assert [row.pop("iteration") for row in rows] == [1, 2] and math.isfinite(summary["eval_return"])
    assert all(math.isfinite(figure) for row in rows for figure in row.values())
    assert (rows[-1]["actor/baseline_loss"] > 0) == changes.get("baseline", False)
    assert ("actor/loss" in rows[0]) == (changes.get("warmup", 0) == 0) and "actor/loss" in rows[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize(
    "changes", [{}, {"critic": "BERT", "baseline": True}, {"dtype": "bfloat16"}], ids=str
)
def test_a_run_on_the_gpu(tmp_path, folders, changes):
    changes = {key: folders.get(value, value) for key, value in changes.items()} | {"device": "cuda"}
    run, _ = go(tmp_path, folders, **changes)
    archer.main(small(runs=tmp_path, resume=run, iterations=4, actor=folders["LLAMA"], **changes))
    assert [row["iteration"] for row in lines_of(run)] == [0, 1, 2, 3, 4]


def test_the_page_explains_what_is_logged_and_nothing_else(finished):
    """Both ways, and every tag in TensorBoard's file, too."""
    page = (ROOT / "docs/archer.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `(\w+/\w+)` \| .+ \| .+ \| .+ \|$", page, re.M)
    logged = {tag for row in lines_of(finished[0]) for tag in row} - {"iteration"}
    assert set(explained) == logged and len(explained) == len(logged)
    (events,) = finished[0].glob("events.*")
    assert all(tag.encode() in events.read_bytes() for tag in logged)


def test_summary(finished):
    run, summary = finished
    names = [f"{name}{way}" for name in ("return", "success", "repeated") for way in ("", "_greedy")]
    expected = {f"{stage}_{name}" for stage in ("warm_start", "eval") for name in names}
    assert set(summary) == expected | {
        *["iteration", "episodes", "seed", "seconds", "cpu_seconds", "peak_memory_mb", "commit"]
    }
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["seed"] == 3 and summary["episodes"] == 4 * 5
    assert all(summary[f"eval_{name}"] == lines_of(run)[-1][f"eval/{name}"] for name in names)


def test_a_run_says_where_it_starts_from(folders, tmp_path, capsys):
    run, summary = go(tmp_path, folders, iterations=1)
    said = f"{run}: starts from {folders['LLAMA']}, which returns {summary['warm_start_return']:.2f}"
    assert said in capsys.readouterr().out


def test_rollouts_have_text_and_values_and_are_a_data_set(finished):
    """Q and V are those of the critic of that iteration; envs.datasets reads the file as it reads
    demonstrations."""
    run, _ = finished
    lines = lines_of(run, "rollouts.jsonl")
    assert [line["iteration"] for line in lines] == [n for n in range(1, 5) for _ in range(4)]
    for line in lines:
        n = len(line["actions"])
        assert line["answer"] in envs.make("twenty-questions-subset").words
        assert len(line["Q"]) == len(line["V"]) == len(line["rewards"]) == n == len(line["observations"]) - 1
        assert all(reply.endswith(("Yes.\n", "No.\n", "uestion.\n")) for reply in line["observations"][1:])
        assert all(math.isfinite(x) for x in line["Q"] + line["V"])
    read, notes = datasets.read_dialogues(str(run / "rollouts.jsonl"))
    assert len(read) == len(lines) and notes == []
    for d, line in zip(read, lines, strict=True):
        assert all(
            d[key] == line[key] for key in ("observations", "actions", "rewards", "terminated", "success")
        )


def test_the_values_in_rollouts_are_the_critics(finished, folders):
    """Of the last iteration, behind whose updates the checkpoint was written; the smaller of the twins."""
    run, _ = finished
    actor, tokenizer = archer.load(AutoModelForCausalLM, folders["LLAMA"], small())
    critic = archer.Critic(copy.deepcopy(actor.base_model), tokenizer, 0.0, "float32")
    critic.load_state_dict(torch.load(run / "checkpoint.pt", weights_only=True)["modules"]["critic"])
    for line in lines_of(run, "rollouts.jsonl")[-4:]:
        for k, action in enumerate(line["actions"]):
            v, q = value_alone(critic, line, k, action)
            assert [line["Q"][k], line["V"][k]] == pytest.approx([q.min().item(), v.min().item()], abs=1e-4)


def test_a_checkpoint_is_whole_and_loads_elsewhere(finished):
    """Actor and critic in transformers, the state without pickled objects; nothing temporary remains."""
    run, _ = finished
    names = {
        "actor",
        "critic",
        "args.json",
        "checkpoint.pt",
        "lock",
        "metrics.jsonl",
        "rollouts.jsonl",
        "summary.json",
    }
    assert {path.name for path in run.iterdir() if not path.name.startswith("events")} == names
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    assert state["iteration"] == 4 and len(state["buffer"]) == 20
    actor, tokenizer = (x.from_pretrained(run / "actor") for x in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("Is it a dog?", return_tensors="pt").input_ids
    assert torch.isfinite(actor(input_ids=ids).logits).all() and tokenizer.decode(ids[0]) == "Is it a dog?"
    assert all(torch.equal(p, state["modules"]["actor"][name]) for name, p in actor.state_dict().items())
    critic = archer.transformers.AutoModel.from_pretrained(run / "critic").state_dict()
    assert all(torch.equal(p, state["modules"]["critic"][f"body.{name}"]) for name, p in critic.items())


def test_a_run_starts_from_what_another_has_learned(finished, tmp_path, folders):
    run, _ = go(tmp_path, folders, actor=finished[0] / "actor", critic=finished[0] / "critic", iterations=1)
    assert [row["iteration"] for row in lines_of(run)] == [0, 1]


# --------------------------------------------------------------------------- dialogues that are too long
def test_a_dialogue_longer_than_the_context_is_cut_and_counted(folders, tmp_path):
    """It never ends the run: a context of 150 tokens, many iterations, and resumed."""
    options = {"actor": folders["SHORT"], "env": "twenty-questions-subset", "eval_every": 3, "warmup": 1}
    run, _ = go(tmp_path, folders, iterations=6, **options)
    archer.main(small(resume=run, runs=tmp_path, iterations=9, **options))
    _, *rows = lines_of(run)
    assert [row["iteration"] for row in rows] == list(range(1, 10))
    assert all(row["rollout/cut"] > 0.5 and row["rollout/truncated"] >= row["rollout/cut"] for row in rows)
    assert all(math.isfinite(figure) for row in rows for figure in row.values())


def test_what_is_no_text_finds_room_when_it_is_read_again(folders, tmp_path, tokenizer, monkeypatch):
    """A byte that is no letter is read as a sign of three bytes, thrice as long as it was said."""
    model = AutoModelForCausalLM.from_pretrained(folders["SHORT"])
    model.config.tie_word_embeddings = False
    head = torch.zeros(len(tokenizer), 32)
    odd = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])]
    model.transformer.ln_f.weight.data.zero_()
    model.transformer.ln_f.bias.data.fill_(1.0)
    head[odd] = 1.0
    model.lm_head = torch.nn.Linear(32, len(tokenizer), bias=False)
    model.lm_head.weight.data = head
    model.save_pretrained(tmp_path / "odd")
    tokenizer.save_pretrained(tmp_path / "odd")
    run, _ = go(tmp_path / "runs", folders, actor=tmp_path / "odd", env="twenty-questions-subset")
    assert [row["rollout/cut"] for row in lines_of(run)[1:]] == [1.0, 1.0]
    assert any("\ufffd" * 4 in action for d in lines_of(run, "rollouts.jsonl") for action in d["actions"])


def test_a_dialogue_is_cut_where_the_next_utterance_might_not_fit(folders):
    """Not earlier: the last one before it still had room; and dialogues that have no action are left out."""
    actor, tokenizer = archer.load(AutoModelForCausalLM, folders["SHORT"], small())
    actor.tokenizer = tokenizer
    played, nll = play("twenty-questions-subset", actor)
    limit = 150 - 4 * 6
    for d in played:
        length = len(archer.lay_out([d | {"actions": [*d["actions"], ""]}], tokenizer)[0][0]) - 1
        assert d["cut"] == (length > limit and not d["terminated"] and len(d["actions"]) < 20)
        assert all(len(before(d, k, tokenizer, True)) <= limit for k in range(len(d["actions"])))
    assert len(nll) == len(states(played)) and any(d["cut"] for d in played)


# ------------------------------------------------------------------------ stopped, killed, gone on with
CASES = [
    {},
    {"critic": "BERT", "baseline": True},
    {"env": "forgetful-toy", "buffer_size": 20, "critic": "GPT2"},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_2n_iterations_are_n_and_n_resumed(tmp_path, folders, changes):
    """To the bit. Fails for whatever is not in the checkpoint: random states, optimisers, target, buffer."""
    changes = {key: folders.get(value, value) for key, value in changes.items()} | {"anneal_lr": False}
    changes |= {"eval_every": 1, "warmup": 1}
    whole, _ = go(tmp_path / "whole", folders, iterations=4, **changes)
    half, _ = go(tmp_path / "half", folders, iterations=2, **changes)
    go(tmp_path / "half", folders, iterations=4, resume=half, **changes)
    the_same_run(half, whole)


def the_same_run(a: Path, b: Path):
    """To the bit, but for what a clock measured."""
    assert timeless(a) == timeless(b)
    assert (a / "rollouts.jsonl").read_bytes() == (b / "rollouts.jsonl").read_bytes()
    one, other = (torch.load(run / "checkpoint.pt", weights_only=True) for run in (a, b))
    assert one["rng"] == other["rng"] and torch.equal(one["generator"], other["generator"])
    assert one["buffer"] == other["buffer"] and one["episodes"] == other["episodes"]
    for name, module in one["modules"].items():
        assert_equal(module, other["modules"][name])
    tensors = [safetensors.torch.load_file(run / "actor/model.safetensors") for run in (a, b)]
    assert_equal(*tensors)
    timed = {"seconds", "cpu_seconds", "peak_memory_mb"}
    summaries = [json.loads((run / "summary.json").read_text()) for run in (a, b)]
    assert all(summaries[0][key] == summaries[1][key] for key in summaries[0].keys() - timed)
    assert not [path for path in a.rglob("*") if ".tmp" in path.name]


def assert_equal(a, b):
    """Nested dicts and lists of tensors and numbers."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_a_signal_and_resumed(tmp_path, folders, monkeypatch, number, capsys):
    """The iteration that it falls into is finished and saved; what follows is as if nothing had been."""
    options = {"iterations": 4, "eval_every": 4}
    whole, _ = go(tmp_path / "whole", folders, **options)
    calls, real = [], archer.critic_update

    def update(*given):
        calls.append(1)
        if len(calls) == 3:  # in the second iteration
            os.kill(os.getpid(), number)
        return real(*given)

    monkeypatch.setattr(archer, "critic_update", update)
    stopped, summary = go(tmp_path / "stopped", folders, **options)
    assert [row["iteration"] for row in lines_of(stopped)] == [0, 1, 2] and summary["episodes"] == 12
    assert "stopping after this iteration" in capsys.readouterr().out
    monkeypatch.undo()
    go(tmp_path / "stopped", folders, resume=stopped, **options)
    the_same_run(stopped, whole)


def test_a_resumed_summary_counts_from_the_start(tmp_path, folders):
    run, first = go(tmp_path, folders, iterations=2)
    _, second = go(tmp_path, folders, iterations=3, resume=run)
    assert (
        second["episodes"] == first["episodes"] + 4
        and second["warm_start_return"] == first["warm_start_return"]
    )
    assert second["cpu_seconds"] > first["cpu_seconds"] and second["seconds"] > first["seconds"]


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_resumed_with_another_learning_rate(tmp_path, folders, name):
    """What the message about a divergence advises must have an effect."""
    run, _ = go(tmp_path, folders)
    before_it = torch.load(run / "checkpoint.pt", weights_only=True)["modules"][name]
    go(tmp_path, folders, resume=run, iterations=3, **{f"{name}_lr": 1e-9})
    after = torch.load(run / "checkpoint.pt", weights_only=True)["modules"][name]
    assert max((before_it[key] - after[key]).abs().max() for key in before_it) < 1e-6


@pytest.mark.parametrize("loss", ["value_loss", "reinforce_loss"])
def test_a_nan_is_one_line_and_the_last_checkpoint_is_whole(tmp_path, folders, monkeypatch, loss):
    right, calls = getattr(archer, loss), []

    def wrong(*given):
        calls.append(1)
        return right(*given) * (math.nan if len(calls) > 5 else 1.0)

    monkeypatch.setattr(archer, loss, wrong)
    with pytest.raises(
        ArithmeticError, match=f"the {'critic' if loss == 'value_loss' else 'actor'} diverged .*nan"
    ):
        go(tmp_path, folders, iterations=9, eval_every=1)
    monkeypatch.undo()
    (run,) = tmp_path.iterdir()
    assert [path for path in run.rglob("*") if ".tmp" in path.name] == [] and len(lines_of(run)) >= 2
    go(tmp_path, folders, resume=run, iterations=9)
    assert [row["iteration"] for row in lines_of(run)] == list(range(10))


@pytest.mark.parametrize("where", ["metrics", "checkpoint", "folder"])
def test_a_full_disk_costs_nothing_that_was_learned(tmp_path, folders, monkeypatch, capsys, where):
    """Iteration 2 cannot be saved, 4 can; the run goes on, and is in the end what it would have been."""
    whole, _ = go(tmp_path / "whole", folders, iterations=4)
    error = {
        "metrics": OSError("no space left"),
        "checkpoint": RuntimeError("file write failed\nat somewhere"),
    }
    error |= {"folder": safetensors.SafetensorError("I/O error: No space left on device (os error 28)")}
    owner, name = {
        "metrics": (archer.runs, "write"),
        "checkpoint": (torch, "save"),
        "folder": (archer.transformers.PreTrainedModel, "save_pretrained"),
    }[where]
    real, calls = getattr(owner, name), []

    def fails_once(*given, **named):
        calls.append(1)
        if len(calls) == (4 if where == "metrics" else 1):  # args.json, and two files an iteration
            raise error[where]
        return real(*given, **named)

    monkeypatch.setattr(owner, name, fails_once)
    run, summary = go(tmp_path / "full", folders, iterations=4)
    assert re.search(
        r"^not saved at iteration 2: .*(o space left|file write failed)", capsys.readouterr().out, re.M
    )
    assert summary["episodes"] == 20
    monkeypatch.undo()
    the_same_run(run, whole)


def test_a_disk_that_is_really_full(tmp_path, folders, capsys):
    """No file may grow beyond 60 kB, which a checkpoint does: the run says so, goes on and ends well."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        run, summary = go(tmp_path, folders, eval_every=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.findall(r"^not saved at iteration (\d)", capsys.readouterr().out, re.M) == ["1", "2"]
    assert len(lines_of(run)) == 3 and (run / "summary.json").exists() and summary["episodes"] == 12


# ----------------------------------------------------------------------------------------- bad input
def one_line(capsys, *options) -> str:
    """What the command line says when it refuses to run: a line, and exit code 2. In this process, for
    speed."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as error:
        patch.setattr(sys, "argv", ["archer.py", *map(str, options)])
        runpy.run_path(str(ROOT / "archer.py"), run_name="__main__")
    (said,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and said.startswith("archer.py: ")
    return said


def copied(source, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def test_a_missing_folder_is_one_line_that_says_how_to_make_it(folders, tmp_path, capsys):
    """Also the one of a world for which nothing lies in checkpoints/."""
    tiny = ["--env", "toy", "--runs", tmp_path / "runs"]
    assert "python sft.py --env toy makes a model" in one_line(capsys, *tiny)
    for option in ("--actor", "--critic"):
        given = {"--actor": folders["LLAMA"], option: tmp_path / "is/not/there"}
        said = one_line(capsys, *tiny, *[word for pair in given.items() for word in pair])
        assert said.endswith(f"no model in {tmp_path}/is/not/there: there is no such folder")
    assert not (tmp_path / "runs").exists()


def test_a_missing_critic_is_seen_before_anything_is_played(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(archer, "rollout", None)
    with pytest.raises(ValueError, match=r"nowhere: there is no such folder$"):
        go(tmp_path / "runs", folders, critic=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("option", ["--actor", "--critic"])
def test_weights_that_are_missing_are_not_drawn_at_random(folders, tmp_path, capsys, option):
    folder = copied(folders["GPT2" if option == "--actor" else "BERT"], tmp_path / "less")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors[sorted(name for name in tensors if "pooler" not in name)[-1]]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    given = {"--env": "toy", "--runs": tmp_path / "runs", "--actor": folders["LLAMA"], option: folder}
    assert "no weights for" in one_line(capsys, *[word for pair in given.items() for word in pair])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("damage", ["no config", "no tokenizer", "half a file", "a file"])
def test_a_damaged_folder_is_one_line(folders, tmp_path, capsys, damage):
    folder = copied(folders["LLAMA"], tmp_path / "damaged")
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    elif damage == "half a file":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    else:
        folder = folder / "config.json"
    said = one_line(capsys, "--env", "toy", "--runs", tmp_path / "runs", "--actor", folder)
    assert f"no model in {folder}" in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["own class", "known class"])
def test_code_in_a_folder_is_not_executed(folders, tmp_path, capsys, kind):
    """A model may bring code along; it is refused, or read as what transformers knows it to be."""
    folder, witness = copied(folders["LLAMA"], tmp_path / "coded"), tmp_path / "witness"
    (folder / "code.py").write_text(
        f"open({str(witness)!r}, 'w').close()\nclass Model: ...\nclass Config: ...\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = dict.fromkeys(("AutoModel", "AutoModelForCausalLM", "AutoTokenizer"), "code.Model")
    config["auto_map"]["AutoConfig"] = "code.Config"
    config["model_type"] = config["model_type"] if kind == "known class" else "mine"
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "own class":
        assert str(folder) in one_line(capsys, "--env", "toy", "--runs", tmp_path / "runs", "--actor", folder)
    else:
        archer.load(AutoModelForCausalLM, str(folder), small())
    assert not witness.exists()


@pytest.mark.parametrize("content", [b"garbage", b"", None])
def test_a_damaged_or_missing_checkpoint_is_one_line(finished, tmp_path, capsys, content):
    run = copied(finished[0], tmp_path / "run")
    before_it = (run / "args.json").read_bytes()
    if content is None:
        (run / "checkpoint.pt").unlink()
    else:
        (run / "checkpoint.pt").write_bytes(content)
    said = one_line(capsys, "--resume", run, "--iterations", 5)
    assert f"{run}/checkpoint.pt cannot be resumed" in said and (run / "args.json").read_bytes() == before_it


def test_half_a_checkpoint_is_one_line(finished, tmp_path, capsys):
    run = copied(finished[0], tmp_path / "run")
    (run / "checkpoint.pt").write_bytes((run / "checkpoint.pt").read_bytes()[:9999])
    assert "cannot be resumed" in one_line(capsys, "--resume", run, "--iterations", 5)


def test_a_run_does_not_go_on_with_another_critic(finished, folders, tmp_path, capsys):
    run = copied(finished[0], tmp_path / "run")
    before_it = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for critic in ("BERT", "GPT2"):
        assert "cannot be resumed" in one_line(capsys, "--resume", run, "--critic", folders[critic])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before_it


def test_a_folder_that_is_no_run_is_one_line(finished, tmp_path, capsys):
    assert "is/not/there" in one_line(capsys, "--resume", tmp_path / "is/not/there")
    assert "args.json" in one_line(capsys, "--resume", tmp_path)
    run = copied(finished[0], tmp_path / "other")
    for content, expected in {'{"flavour": 1}': "flavour", "{": "", "[1]": "", "\x00": ""}.items():
        (run / "args.json").write_text(content)
        assert expected in one_line(capsys, "--resume", run)


MISUSE = {
    "--env nowhere": "nowhere",
    "--env toy --world flavour=1": "flavour",
    "--env toy --rollouts 0": "--rollouts 0: it must be above 0",
    "--env toy --critic-batch 0": "--critic-batch 0: it must be above 0",
}


@pytest.mark.parametrize("options", MISUSE)
def test_misuse_is_one_line_and_leaves_nothing_behind(folders, tmp_path, capsys, options):
    """Also numbers that no run can be made with."""
    given = [*options.split(), "--runs", tmp_path / "runs", "--actor", folders["LLAMA"]]
    assert MISUSE[options] in one_line(capsys, *given)


@pytest.mark.parametrize("option", ["--dtype", "--critic-loss"])
def test_a_choice_that_there_is_not(monkeypatch, capsys, option):
    """A loss that is none of the three must not quietly become one of them."""
    monkeypatch.setattr(sys, "argv", ["archer.py", option, "sarsa"])
    with pytest.raises(SystemExit) as caught:
        archer.runs.parse(archer.Args, archer.Args())
    assert caught.value.code == 2 and "sarsa" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["--resume RUN", "--resume=RUN"])
def test_resume_on_the_command_line_keeps_the_runs_arguments(finished, tmp_path, monkeypatch, form):
    """In both ways to write it; but for those that are given anew."""
    run = copied(finished[0], tmp_path / "run")
    saved = json.loads((run / "args.json").read_text())
    options = [*form.replace("RUN", str(run)).split(), "--iterations", "5", "--no-center"]
    monkeypatch.setattr(sys, "argv", ["archer.py", *options])
    runpy.run_path(str(ROOT / "archer.py"), run_name="__main__")
    assert timeless(run)[:5] == timeless(finished[0]) and len(lines_of(run)) == 6
    assert json.loads((run / "args.json").read_text()) == saved | {"iterations": 5, "center": False}
    assert replace(archer.Args(**saved), resume="").resume == ""


# ------------------------------------------------------------------------------------- a real model
@pytest.mark.external
def test_a_real_model_is_actor_and_critic_in_its_chat_template(tmp_path, smollm, monkeypatch):
    """SmolLM2-135M-Instruct, an iteration of games of three questions; then what was saved, by transformers
    alone.

    The same utterances have the same log-probs in `speak` and in `score`.
    """
    monkeypatch.setattr("envs.worlds.twenty_questions.TwentyQuestions.max_turns", 3)
    calls, scored, score = heard(monkeypatch), [], archer.score

    def listen(actor, dialogues, utterances, args):
        logits_MV, token_M, hidden_MH, owner_M = score(actor, dialogues, utterances, args)
        logp_M = logits_MV.detach().log_softmax(-1).gather(-1, token_M[:, None])[:, 0]
        logp_N = torch.zeros(len(utterances)).index_add(0, owner_M, logp_M)
        scored.append((dialogues, *calls[-1], logp_N.tolist()))
        return logits_MV, token_M, hidden_MH, owner_M

    monkeypatch.setattr(archer, "score", listen)
    sizes = {"iterations": 1, "rollouts": 2, "eval_episodes": 1, "max_action_tokens": 8}
    sizes |= {"critic_updates": 1, "critic_pool": 2, "critic_batch": 2, "actor_updates": 1, "actor_batch": 2}
    models = {"actor": smollm, "critic": smollm, "actor_lr": 1e-5, "critic_lr": 1e-5}
    archer.main(small(env="twenty-questions-subset", runs=tmp_path, **models, **sizes))

    (run,) = tmp_path.iterdir()
    (run / "checkpoint.pt").unlink()  # 4 GB, which pytest would keep
    tokenizer = AutoTokenizer.from_pretrained(run / "actor")
    assert len(scored) == 2, "by the actor of the start and by the actor, which has not moved yet"
    for dialogues, rows, starts, _, written, said_N, scored_N in scored:
        assert len(written) == sum(map(len, starts)) == sum(len(d["actions"]) for d in dialogues)
        assert max(abs(a - b) for a, b in zip(said_N, scored_N, strict=True)) < 1e-4
        for d, row in zip(dialogues, rows, strict=True):
            asked = [d["observations"][0], *envs.replies(d["observations"], d["actions"])]
            turns = zip(asked, d["actions"], strict=False)
            pairs = [pair for turn in turns for pair in zip(("user", "assistant"), turn, strict=True)]
            chat = [{"role": role, "content": text} for role, text in pairs]
            assert tokenizer.decode(row) + "\n" == tokenizer.apply_chat_template(chat, tokenize=False)
            assert "<|im_start|>user\nQuestions:\n<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(
                row
            )

    for name, auto in {"critic": archer.transformers.AutoModel, "actor": AutoModelForCausalLM}.items():
        model, start = (auto.from_pretrained(folder) for folder in (run / name, smollm))
        for now, old in zip(model.parameters(), start.parameters(), strict=True):
            assert not torch.equal(now, old) and torch.allclose(now, old, atol=1e-4)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)
