"""What archer.py promises: its equations, that a batch is no more than its parts, what `main` hands on to
whom, and that a run can be resumed.

The worlds are Twenty Questions on ten words and three toys defined here; the models are untrained, with one
or two layers of 32, in folders. What an actor or critic should compute is computed a second time: an
utterance at a time, unpadded, by a plain forward pass.
"""

import copy
import inspect
import itertools
import json
import math
import re
import shutil
import signal
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModel,
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
from envs import datasets, models, runs

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


class StillToy(Toy):
    """The same, but it always says the same: no turn adds a word to what the model has read."""

    id = demonstration_env = "still-toy"
    append_only = False

    def follow(self, action, reply):
        return f"{CLUES[self.index]}: "


TOYS = (Toy, ForgetfulToy, StillToy)


@pytest.fixture(autouse=True, scope="module")
def toys():
    """The toys are worlds of the registry while these tests run."""
    for toy in TOYS:
        envs.ENVS[toy.id] = envs.Entry(f"{toy.__module__}:{toy.__name__}", "a toy of the tests")
    yield
    for toy in TOYS:
        del envs.ENVS[toy.id]


@contextmanager
def alone():
    """Bits repeat on one thread only; and `main` takes over Ctrl-C, which pytest wants back."""
    torch.set_num_threads(1)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def one_thread():
    with alone():
        yield


BOTH = pytest.mark.parametrize("world", ["toy", "forgetful-toy"])
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.7])


# ------------------------------------------------------------------------------------- small models
def make_tokenizer(texts, size=300, special=("<|endoftext|>",), template=None) -> PreTrainedTokenizerFast:
    """Byte pairs; the first special token ends a turn and pads."""
    tokenizer = Tokenizer(BPE())
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
        head.bias.data[models.encode(actor.tokenizer, text)[0]] = bias
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
    actor.context = actor.config.max_position_embeddings
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
    body = copy.deepcopy(actor.base_model)
    body.tokenizer = actor.tokenizer
    if kind == "encoder":
        body = models.load(AutoModel, folders["BERT"], small())
    critic = archer.Critic(body, 0.5, "float32")
    for parameter in critic.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return critic


def play(world, actor, n=8, seed=0, greedy=False, **changes):
    """`n` dialogues of the actor, tasks in turn, and the nll of every utterance."""
    worlds, rng = envs.VecTextEnv(world, n), np.random.default_rng(seed)
    indices = [i % worlds.envs[0].num_tasks for i in range(n)]
    return archer.rollout(actor, worlds, small(**changes), rng, indices, greedy)


def said_in(dialogues) -> list[dict]:
    """Dialogues without the log-probs of what was said, which are the same up to rounding only."""
    return [{key: value for key, value in d.items() if key != "logps"} for d in dialogues]


def fresh_for(dialogues, actor, seed=5, **changes):
    """An utterance of the actor for each of the N states of some dialogues, as token ids."""
    rng = np.random.default_rng(seed)
    return archer.flat(archer.with_fresh(dialogues, actor, small(**changes), rng), "ids")


def write(actor, rows, starts, args, seeds, greedy=False):
    """`generate` for rows that nobody has read."""
    rows, streams = dict(enumerate(rows)), models.streams(seeds)
    return archer.generate(archer.Memory(actor, rows), rows, starts, args, streams, greedy)


# ---------------------------------------------------------------- what the tests compute themselves
def before(dialogue, k, tokenizer, append_only) -> list[int]:
    """The tokens that stand before action k, one piece of text after the other."""
    ids, first = [], 0 if append_only else k
    for j in range(first, k + 1):
        text = dialogue["observations"][j]
        if j > first:
            said = dialogue["observations"][j - 1] + dialogue["actions"][j - 1]
            assert text.startswith(said)
            ids += [*models.encode(tokenizer, dialogue["actions"][j - 1]), tokenizer.eos_token_id]
            text = text[len(said) :]
        ids += models.encode(tokenizer, text)
    return ids


@torch.no_grad()
def plain_logps(actor, context, ids, temperature=1.0) -> list[float]:
    """log pi of each token of `ids` after `context`: one unpadded forward pass, softmax in float64."""
    logits = actor(input_ids=torch.tensor([context + ids])).logits[0].double() / temperature
    return [logits[len(context) + k - 1].log_softmax(-1)[token].item() for k, token in enumerate(ids)]


def states(dialogues) -> list[tuple[dict, int]]:
    return [(d, k) for d in dialogues for k in range(len(d["actions"]))]


def cut_off(dialogue, k):
    """A dialogue as it was before action k."""
    return {"observations": dialogue["observations"][: k + 1], "actions": dialogue["actions"][:k]}


@torch.no_grad()
def value_alone(critic, dialogue, k, text):
    """V and Q [2] in float64 of one state and one utterance, in a batch of nothing else."""
    begun = cut_off(dialogue, k)
    v_N2, q_N2 = critic([begun | {"actions": [*begun["actions"], text]}])
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


def test_E2_value_loss(numbers):
    """The mean, over the twins, too; V tends to the mean of Q."""
    v, q, total = numbers[1], numbers[0], 0.0
    for n in range(5):
        for twin in range(2):
            total += (q[n, twin].item() - v[n, twin].item()) ** 2
    assert archer.value_loss(v, q).item() == pytest.approx(total / 10, rel=1e-7)
    grid, some = torch.linspace(0, 1, 1001), torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    losses = [archer.value_loss(v.expand(3, 2), some).item() for v in grid]
    assert grid[int(np.argmin(losses))].item() == pytest.approx(1 / 3, abs=2e-3)


def test_D1_kl_to_come():
    owner, kl = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0.5, 1.0, 0.25, 3.0, 0.125, 2.0])
    expected = []
    for m in range(6):
        expected.append(sum(kl[j].item() for j in range(m + 1, 6) if owner[j] == owner[m]))
    assert archer.kl_to_come(kl, owner).tolist() == expected


def test_D1_has_the_gradient_of_the_kl_of_whole_utterances():
    """Of a policy of two tokens, the second given the first: the mean of what `actor_update` does, over all
    utterances, against KL(pi || reference) written out. Without the KL to come it is another gradient."""
    torch.manual_seed(0)
    first, second, other_1, other_2 = (torch.randn(*size).double() for size in ((3,), (3, 3), (3,), (3, 3)))
    first.requires_grad_(), second.requires_grad_()
    logp_1, logp_2 = first.log_softmax(-1), second.log_softmax(-1)
    ref_1, ref_2 = other_1.log_softmax(-1), other_2.log_softmax(-1)
    kl_1 = (logp_1.exp() * (logp_1 - ref_1)).sum()
    kl_2 = (logp_2.exp() * (logp_2 - ref_2)).sum(-1)
    expected = torch.autograd.grad(kl_1 + (logp_1.exp() * kl_2).sum(), [first, second], retain_graph=True)
    owner, found, partial = torch.tensor([0, 0]), 0.0, 0.0
    for a in range(3):
        for b in range(3):
            p = (logp_1[a] + logp_2[a, b]).exp().detach()
            kl_M, logp_M = torch.stack([kl_1, kl_2[a]]), torch.stack([logp_1[a], logp_2[a, b]])
            cost_M = archer.kl_to_come(kl_M, owner)
            partial += p * kl_M.sum()
            loss, _ = archer.policy_loss(logp_M, logp_M.detach(), torch.zeros(1), owner, cost_M, 0.2)
            found += p * (kl_M.sum() + loss)
    for one, other in zip(
        torch.autograd.grad(found, [first, second], retain_graph=True), expected, strict=True
    ):
        assert torch.allclose(one, other, atol=1e-12)
    assert not torch.allclose(torch.autograd.grad(partial, [first])[0], expected[0], atol=1e-2)


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
def test_E3_E5_policy_loss_at_the_old_log_probs(numbers, with_baseline):
    """The gradient is REINFORCE's; none reaches the advantage or the baseline, numbers to the actor."""
    q, _, logp, baseline, owner = numbers
    old, baseline = logp.clone(), baseline * with_baseline
    logp, advantage, baseline = (x.clone().requires_grad_() for x in (logp, q[:, 0], baseline))
    weights = [advantage[owner[i]].item() - baseline[i].item() for i in range(12)]
    loss, clipped = archer.policy_loss(logp, old, advantage, owner, baseline, 0.2)
    assert clipped == 0
    assert loss.item() == pytest.approx(-sum(weights) / 5, rel=1e-12)
    loss.backward()
    assert advantage.grad is None and baseline.grad is None
    assert logp.grad.tolist() == pytest.approx([-w / 5 for w in weights], rel=1e-12)


@pytest.mark.parametrize("clip", [0.1, 0.3])
def test_D10_policy_loss_away_from_the_old_log_probs(numbers, clip):
    """Against a loop over tokens; no gradient where a token has moved far enough in its direction."""
    q, _, logp, baseline, owner = numbers
    moves = [0.05, 0.2, 0.5, -0.05, -0.2, -0.5] * 2
    old = logp - torch.tensor(moves, dtype=torch.float64)
    logp = logp.clone().requires_grad_()
    total, slopes = 0.0, []
    for i, move in enumerate(moves):
        weight, ratio = q[owner[i], 0].item() - baseline[i].item(), math.exp(move)
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        total += min(ratio * weight, bounded * weight) / 5
        is_stopped = (ratio > 1 + clip and weight > 0) or (ratio < 1 - clip and weight < 0)
        slopes.append(0.0 if is_stopped else -ratio * weight / 5)
    assert 0 < slopes.count(0.0) < 12
    loss, clipped = archer.policy_loss(logp, old, q[:, 0], owner, baseline, clip)
    assert clipped == slopes.count(0.0) / 12
    loss.backward()
    assert loss.item() == pytest.approx(-total, rel=1e-12)
    assert logp.grad.tolist() == pytest.approx(slopes, rel=1e-12)


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
    """Every state stands behind the tokens that `before` spells, and every action ends with the end token.

    The prompts are those of the next actions, of each dialogue at any moment, before its first action, too.
    """
    played, _ = play(world, actor)
    rows, spans, prompts = archer.lay_out(played, tokenizer)
    assert len(rows) == (8 if world == "toy" else len(spans)) and len(spans) == len(states(played))
    for (d, k), (row, start, stop) in zip(states(played), spans, strict=True):
        assert rows[row][:start] == before(d, k, tokenizer, world == "toy")
        assert rows[row][start:stop] == [*models.encode(tokenizer, d["actions"][k]), tokenizer.eos_token_id]
    assert prompts == [before(d, len(d["actions"]), tokenizer, world == "toy") for d in played]
    begun = [cut_off(d, k) for d, k in states(played)]
    _, spans, prompts = archer.lay_out(begun, tokenizer)
    assert prompts == [before(d, k, tokenizer, world == "toy") for d, k in states(played)]
    assert len(spans) == sum(len(d["actions"]) for d in begun)
    rows[0].append(5)  # what is cached is not handed out to be changed
    assert archer.lay_out(played, tokenizer)[0][0] == rows[0][:-1]


def test_an_observation_written_anew_begins_a_row_wherever_it_comes(tokenizer):
    """Also one that says nothing new, and the first of a dialogue that begins as the one before it ends."""
    first = {"observations": ["a: ", "a: ant no\n", "b: ", "b: dog", "b: dogdog yes"]}
    first["actions"] = ["ant", "cow", "dog", "dog"]
    second = {"observations": ["b: dogdog yes, too", "c"], "actions": ["bee"]}
    rows, spans, prompts = archer.lay_out([first, second], tokenizer)
    assert [span.row for span in spans] == [0, 0, 1, 2, 3]
    parts = [("a: ", "ant", " no\n", "cow"), ("b: ", "dog"), ("b: dog", "dog"), ("b: dogdog yes, too", "bee")]
    for row, own in zip(rows, parts, strict=True):
        expected = []
        for i, text in enumerate(own):
            expected += models.encode(tokenizer, text) + [tokenizer.eos_token_id] * (i % 2)
        assert row == expected
    assert prompts == [rows[2] + models.encode(tokenizer, " yes"), models.encode(tokenizer, "c")]


def test_lay_out_spells_the_template_of_the_model(folders):
    """A dialogue in the model's own words, to the token; what comes last is the prompt of the next action."""
    tokenizer = AutoTokenizer.from_pretrained(folders["CHAT"])
    d = {"observations": ["Hi: ", "Hi: a no\n", "Hi: a no\nb yes\n"], "actions": ["a", "b"]}
    (row,), spans, (prompt,) = archer.lay_out([d], tokenizer)
    said = [("user", "Hi: "), ("assistant", "a"), ("user", " no\n"), ("assistant", "b"), ("user", " yes\n")]
    chat = [{"role": role, "content": text} for role, text in said]
    whole = tokenizer.apply_chat_template(chat[:4], tokenize=False)
    assert tokenizer.decode(row) == whole.removesuffix("\n")
    assert [tokenizer.decode(row[span.start : span.stop]) for span in spans] == [
        f"{x}<|endoftext|>" for x in "ab"
    ]
    for ids, n in ((row[: spans[1].start], 3), (prompt, 5)):
        expected = tokenizer.apply_chat_template(chat[:n], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids) == expected


def test_spoken_is_what_the_world_takes(tokenizer):
    """The critic judges fresh utterances by this text and learns from what worlds took: they must not
    differ."""
    worlds = [Toy(), envs.make("twenty-questions-subset")]
    for text in [" ant\n", "ant \n", "\n", "  \n", "a\nb", "ant", "\t ant\t\n", ""]:
        ids = models.encode(tokenizer, text)
        assert archer.spoken(tokenizer, [*ids, tokenizer.eos_token_id]) == archer.spoken(tokenizer, ids)
        for world in worlds:
            world.reset(options={"index": 0})
            assert world.step(text)[-1]["action"] == archer.spoken(tokenizer, ids)


DIALOGUES = [
    {"observations": ["red: ", "red: ant no\nb: ", ""], "actions": ["ant", "bee"]},
    {"observations": ["white: ", "anew: ", "anew: cow, "], "actions": ["", "cow"]},  # a row for each state
]
FORKS = [[9, 8, 7], [5], [4, 3], [2, 0]]


@pytest.mark.parametrize("forks", [None, FORKS], ids=["actions", "forks"])
def test_packed_columns_are_those_of_a_loop_over_utterances(tokenizer, forks):
    """A token sees those whose path it continues, and no other, and stands where the path is so long."""
    rows, spans, _ = archer.lay_out(DIALOGUES, tokenizer)
    packed = archer.pack(DIALOGUES, tokenizer, forks)
    ids_BT, position_BT, visible_BTT = packed.inputs
    kept = list(map(len, rows))
    paths = {(b, c): list(range(c + 1)) for b, row in enumerate(rows) for c in range(len(row))}
    owner, before_it, column = [], [], []
    for n, (b, start, stop) in enumerate(spans):
        said, first = (rows[b][start:stop], start) if forks is None else (forks[n], kept[b])
        own = list(range(first, first + len(said)))
        if forks is not None:
            kept[b] += len(said)  # the next fork stands behind it
            paths |= {(b, c): [*range(start), *own[: i + 1]] for i, c in enumerate(own)}
        assert ids_BT[b, own].tolist() == said
        assert (packed.row_N[n], packed.state_N[n], packed.end_N[n]) == (b, start - 1, own[-1])
        owner += [n] * len(own)
        before_it += [start - 1, *own[:-1]]
        column += own
    assert packed.owner_M.tolist() == owner and packed.column_M.tolist() == column
    assert packed.before_M.tolist() == before_it
    assert ids_BT.shape == (3, max(kept)) and [span.row for span in spans] == [0, 0, 1, 2]
    for (b, c), sees in paths.items():
        assert visible_BTT[b, c].nonzero().flatten().tolist() == sees
        assert position_BT[b, c] == len(sees) - 1


def test_visibility_is_that_of_the_example_in_the_text_of_pack():
    """And of a loop over pairs of tokens, for a row with another number of forks, and padding."""
    lines = re.findall(r"^ +(?:position|fork|start) +([-\d ]+)", archer.pack.__doc__, re.M)
    shown = [[int(x.replace("-", str(archer.ROW))) for x in line.split()] for line in lines]
    other = [[0, 1, 2, 3, 2, 3, 0, 0, 0], [-1, -1, -1, -1, 1, 1, -2, -2, -2], [0, 0, 0, 0, 2, 2, 0, 0, 0]]
    assert [len(row) for row in shown] == [9] * 3 and (archer.ROW, archer.PADDING) == (-1, -2)
    tensors = [torch.tensor(pair) for pair in zip(shown, other, strict=True)]
    visible_BTT = archer.visibility(*tensors)
    position_BT, fork_BT, start_BT = (tensor.tolist() for tensor in tensors)
    for b, query, key in itertools.product(range(2), range(9), range(9)):
        own = fork_BT[b][query] == fork_BT[b][key] and key <= query
        past = fork_BT[b][key] == archer.ROW and position_BT[b][key] < start_BT[b][query]
        assert visible_BTT[b, query, key] == (own or past)
    assert ["".join(".x"[x] for x in row) for row in visible_BTT[0].int().tolist()] == [
        "x........",
        "xx.......",
        "xxx......",
        "xxxx.....",
        "xxxxx....",
        "xx...x...",
        "xx...xx..",
        "xxxx...x.",
        "xxxx...xx",
    ]


def test_pad_and_flat():
    assert archer.pad([[1, 2, 3], [4]], -2).tolist() == [[1, 2, 3], [4, -2, -2]]
    assert archer.pad([[1], [4, 0]]).tolist() == [[1, 0], [4, 0]]
    assert archer.flat([{"a": [3, 1]}, {"a": []}, {"a": [2]}], "a") == [3, 1, 2]


# ------------------------------------------------------- sampler, scorer and a plain forward pass agree
def named(function, given, options) -> dict:
    """The arguments of a call, by their names."""
    bound = inspect.signature(function).bind(*given, **options)
    bound.apply_defaults()
    return bound.arguments


def heard(monkeypatch) -> list[dict]:
    """Of every call of `generate`: its arguments, the utterances that it wrote and their log-probs."""
    calls, generate = [], archer.generate

    def listen(*given, **options):
        utterances, logps = generate(*given, **options)
        call = named(generate, given, options) | {"utterances": utterances, "logps": logps}
        calls.append(call)
        return utterances, logps

    monkeypatch.setattr(archer, "generate", listen)
    return calls


@TEMPERATURES
@pytest.mark.parametrize("world", ["toy", "forgetful-toy", "still-toy", "twenty-questions-subset"])
def test_sampled_logp_is_the_plain_logp(actor, tokenizer, world, temperature, monkeypatch):
    """The nll that `rollout` reports = that of the same tokens behind the dialogue so far, alone and
    unpadded.

    Fails when a position or the mask is off by one, when the temperature is forgotten, or when dialogues that
    have ended leave the wrong rows behind.
    """
    calls = heard(monkeypatch)
    played, nll = play(world, actor, temperature=temperature)
    said, expected = [], []
    for turn, call in enumerate(calls):
        alive = [d for d in played if len(d["actions"]) > turn]
        for d, row, start, ids in zip(
            alive, call["rows"].values(), call["starts"], call["utterances"], strict=True
        ):
            assert row == before(
                d, turn, tokenizer, world in ("toy", "twenty-questions-subset")
            ) and start == [len(row)]
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

    Many forks on one padded row.
    """
    calls = heard(monkeypatch)
    played, _ = play(world, actor, n=36)
    calls.clear()
    fresh = fresh_for(played, actor, temperature=temperature)
    assert [ids for call in calls for ids in call["utterances"]] == fresh
    logps = [own for call in calls for own in call["logps"]]
    assert len(logps) == len(fresh) == len(states(played))
    with torch.no_grad():
        scored = archer.score(actor, played, fresh, temperature, "float32")
    logits_MV, token_M, hidden_MH, owner_M = scored
    logp_M = logits_MV.log_softmax(-1)[torch.arange(len(token_M)), token_M]
    assert token_M.tolist() == [token for ids in fresh for token in ids]
    assert owner_M.tolist() == [n for n, ids in enumerate(fresh) for _ in ids]
    assert len(hidden_MH) == len(owner_M)
    for n, (d, k) in enumerate(states(played)):
        expected = plain_logps(actor, before(d, k, tokenizer, world == "toy"), fresh[n], temperature)
        assert logps[n] == pytest.approx(expected, abs=1e-4)
        assert logp_M[owner_M == n].tolist() == pytest.approx(expected, abs=1e-4)


def test_more_dialogues_than_are_read_at_once(actor, tokenizer, monkeypatch):
    """All of them in their order, each with as many utterances as it has states; they stay as they are."""
    played = Toy().demonstrations(8, seed=0) * 25
    before_it, calls = copy.deepcopy(played), heard(monkeypatch)
    args = small(max_action_tokens=1)
    written = archer.with_fresh(played, actor, args, np.random.default_rng(5))
    assert played == before_it and [d["observations"] for d in written] == [d["observations"] for d in played]
    assert [len(d["fresh"]) for d in written] == [len(d["actions"]) for d in played]
    texts = [archer.spoken(tokenizer, ids) for ids in archer.flat(written, "ids")]
    assert texts == archer.flat(written, "fresh")
    rows, spans, _ = archer.lay_out(played, tokenizer)
    assert len(calls) > 1 and max(len(call["utterances"]) for call in calls) < 600
    assert [row for call in calls for row in call["rows"].values()] == rows
    assert archer.flat(calls, "utterances") == archer.flat(written, "ids")
    starts = [start for call in calls for own in call["starts"] for start in own]
    assert starts == [span.start for span in spans]


@BOTH
def test_score_of_the_actions_taken(actor, tokenizer, world):
    """None scores them where they stand, and says of them what a fork would."""
    played, _ = play(world, actor)
    taken = [[*models.encode(tokenizer, d["actions"][k]), tokenizer.eos_token_id] for d, k in states(played)]
    with torch.no_grad():
        stands, forks = (archer.score(actor, played, said, 0.7, "float32") for said in (None, taken))
    assert torch.allclose(stands[0], forks[0], atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(stands[1::2], forks[1::2], strict=True))


def test_utterances_stop_at_the_end_of_turn_and_only_there(actor, tokenizer, monkeypatch):
    """An utterance has the end token as its last one, or the full number of tokens and none."""
    calls = heard(monkeypatch)
    actor.lm_head.bias.data[tokenizer.eos_token_id] += 3.0
    played, _ = play("toy", actor, n=40)
    written = [ids for call in calls for ids in call["utterances"]] + fresh_for(played, actor)
    assert all(tokenizer.eos_token_id not in ids[:-1] for ids in written)
    assert all(ids[-1] == tokenizer.eos_token_id or len(ids) == 6 for ids in written)
    assert {len(ids) for ids in written} >= {1, 2, 3, 6}
    assert {len(ids) for ids in fresh_for(played, actor, max_action_tokens=1)} == {1}


def test_sample_draws_from_the_whole_softmax(actor, tokenizer):
    """Chi-square of 20,000 first tokens at temperature 0.7. Fails for a hidden top-k, top-p or
    temperature."""
    N, args, row = 20_000, small(max_action_tokens=1, temperature=0.7), models.encode(tokenizer, "red: ")
    with torch.no_grad():
        p = (actor(input_ids=torch.tensor([row])).logits[0, -1].double() / 0.7).softmax(-1)
    rows, starts = [row] * (N // 10), [[len(row)] * 10] * (N // 10)
    written, _ = write(actor, rows, starts, args, range(N))
    assert chi_square(torch.tensor(written).flatten(), p) < 4


def chi_square(token_N, p_V) -> float:
    """How many standard deviations the chi-square of tokens is above what it is of draws from p."""
    counts, expected = torch.bincount(token_N, minlength=len(p_V)).double(), len(token_N) * p_V
    rare = expected < 5  # too few for a chi-square: they make one class together
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    freedom = len(counts) - 1
    assert freedom > 50
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


def test_sample_tokens():
    """Each row of its own softmax, by the given numbers alone; the log-prob is that of the token."""
    torch.manual_seed(0)
    logits_2V = 2 * torch.randn(2, 100)
    logits_NV = logits_2V.repeat(10_000, 1)
    u_N, v_N = (models.uniform(models.streams([seed]), len(logits_NV))[0] for seed in (1, 2))
    logp_2V = logits_2V.double().log_softmax(-1)
    for greedy in (False, True):
        token_N, logp_N = models.sample_tokens(logits_NV, u_N, greedy)
        again_N, _ = models.sample_tokens(logits_NV, u_N, greedy)
        other_N, _ = models.sample_tokens(logits_NV, v_N, greedy)
        assert torch.equal(token_N, again_N) and torch.equal(token_N, other_N) == greedy
        for row in range(2):
            own_N = token_N[row::2]
            assert torch.allclose(logp_N[row::2].double(), logp_2V[row, own_N], atol=1e-5)
            if greedy:
                assert (own_N == logits_2V[row].argmax()).all()
            else:
                assert chi_square(own_N, logp_2V[row].exp()) < 4


def test_no_token_without_probability_is_drawn():
    """Also not where the uniform number is 0 or close to 1, or where the probabilities add up to less."""
    u_N = torch.tensor([0.0, 0.4999, 0.5001, 1 - 2**-24])  # the last is the largest below 1 in float32
    logits_NV = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0, -math.inf]]).expand(4, -1)
    assert models.sample_tokens(logits_NV, u_N, False)[0].tolist() == [1, 1, 3, 3]
    sums = []
    for V in range(90, 130):
        logits_NV = torch.zeros(4, V)
        logits_NV[:, -1] = -math.inf
        sums.append(logits_NV[0].log_softmax(-1).exp().cumsum(-1)[-1])
        assert models.sample_tokens(logits_NV, u_N, False)[0].max() == V - 2
    assert min(sums) < u_N.max()


def test_an_utterance_is_that_of_its_seed_whoever_is_beside_it(actor, tokenizer):
    """To the token: of rows and states written together, and of each alone."""
    texts = ("red: ", "blue: cow no\ngreen: ", "blue: dog yes\nred: cow no\nblue: ")
    rows = [models.encode(tokenizer, text) for text in texts]
    starts = [[len(row) - 1, len(row)] for row in rows] + [[2]]
    rows, seeds = [*rows, rows[1]], [5, 6, 5, 2**40, 8, 9, 0]
    utterances, logps = write(actor, rows, starts, small(), seeds)
    places = [(row, start) for row, own in zip(rows, starts, strict=True) for start in own]
    for n, (row, start) in enumerate(places):
        (ids,), (logp,) = write(actor, [row], [[start]], small(), [seeds[n]])
        assert utterances[n] == ids and logps[n] == pytest.approx(logp, abs=1e-4)
    assert len({tuple(ids) for ids in utterances}) > 3
    again, _ = write(actor, rows[:1] * 8, [[len(rows[0])]] * 8, small(), range(8))
    assert len({tuple(ids) for ids in again}) > 5, "from one state, too; some may end at once"


def test_greedy_writes_the_likeliest_tokens(actor, tokenizer):
    """Token by token; whatever the random numbers are."""
    rows = [models.encode(tokenizer, text) for text in ("red: ", "blue: cow no\ngreen: ")]
    starts = [[len(row) - 1, len(row)] for row in rows]
    utterances, logps = write(actor, rows, starts, small(), range(4), greedy=True)
    contexts = [rows[0][:-1], rows[0], rows[1][:-1], rows[1]]
    for ids, logp, context in zip(utterances, logps, contexts, strict=True):
        assert logp == pytest.approx(plain_logps(actor, context, ids), abs=1e-4)
        for k in range(len(ids)):
            with torch.no_grad():
                logits = actor(input_ids=torch.tensor([context + ids[:k]])).logits[0, -1]
            assert logits[ids[k]] == logits.max()


def test_bfloat16_computes_so_but_keeps_small_steps(actor, folders):
    """Fails with parameters in bfloat16, which a step of 1e-5 leaves where they are, and if nothing computes
    so."""
    played, _ = play("toy", actor)
    fresh = fresh_for(played, actor)
    exact_MV = archer.score(actor, played, fresh, 1.0, "float32")[0]
    logits_MV = archer.score(actor, played, fresh, 1.0, "bfloat16")[0]
    assert logits_MV.dtype == torch.float32 and 1e-4 < (logits_MV - exact_MV).abs().max() < 1
    before_it = copy.deepcopy(actor.state_dict())
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-5)
    logits_MV.var().backward()
    models.clipped_step(optimizer, actor, 1.0, "actor")
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
        logits_MV, token_M, *_ = archer.score(actor, played, fresh, 1.0, "bfloat16")
    logp_M = logits_MV.log_softmax(-1)[torch.arange(len(token_M)), token_M]
    (call,) = calls
    sampled_M = torch.tensor([logp for logps in call["logps"] for logp in logps])
    assert (logp_M - sampled_M).abs().mean() < 0.03


# ------------------------------------------------------------ what is kept in memory from turn to turn
def both_ways(monkeypatch, world, actor, n=8, **changes):
    """The same dialogues twice: with a memory, and with every row read whole in every turn.

    Of each the dialogues, their nll, and how many tokens a row the model was given.
    """
    generate, masked_states, read = archer.generate, models.masked_states, []

    def forgets(memory, rows, *given):
        return generate(archer.Memory(memory.actor, rows), rows, *given)

    def listen(body, ids_BT, *given):
        read.append(ids_BT.shape[1])
        return masked_states(body, ids_BT, *given)

    found = []
    monkeypatch.setattr(models, "masked_states", listen)
    for own in (generate, forgets):
        monkeypatch.setattr(archer, "generate", own)
        read.clear()
        found.append((*play(world, actor, n=n, **changes), sum(read)))
    return found


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("world", ["toy", "forgetful-toy", "still-toy", "twenty-questions-subset"])
def test_a_memory_changes_no_dialogue(actor, world, greedy, monkeypatch):
    """To the token, and in log-probs: of worlds that add text, that write it anew, that say the same again.

    Where text is added it has read less; dialogues end at different turns, so that rows leave it.
    """
    (kept, nll, read), (whole, whole_nll, whole_read) = both_ways(monkeypatch, world, actor, greedy=greedy)
    assert said_in(kept) == said_in(whole) and nll == pytest.approx(whole_nll, abs=1e-5)
    grows = world in ("toy", "twenty-questions-subset")
    assert (read < 0.8 * whole_read) if grows else (read == whole_read)
    assert world == "twenty-questions-subset" or len({len(d["actions"]) for d in kept}) == 4


def test_a_memory_changes_nothing_where_every_utterance_is_one_token(actor, monkeypatch):
    """Then nothing was written into it that it would have to forget."""
    kept, whole = both_ways(monkeypatch, "toy", actor, max_action_tokens=1)
    assert said_in(kept[0]) == said_in(whole[0]) and kept[1] == pytest.approx(whole[1], abs=1e-5)


def test_a_memory_changes_nothing_where_dialogues_are_cut(folders, monkeypatch):
    """Some of them, and not all in the same turn: a context of 150 tokens, learned positions."""
    actor = models.load(AutoModelForCausalLM, folders["SHORT"], small())
    kept, whole = both_ways(monkeypatch, "twenty-questions-subset", actor)
    assert said_in(kept[0]) == said_in(whole[0]) and kept[1] == pytest.approx(whole[1], abs=1e-5)
    assert len({len(d["actions"]) for d in kept[0] if d["cut"]}) > 1


def test_a_memory_reads_what_is_new(actor, tokenizer, monkeypatch):
    """Rows that grow, by different numbers of tokens; that are written anew, longer or shorter; that stay as
    they are; that leave. And it forgets what was written behind them, and is right with learned positions.
    """
    read = {text: models.encode(tokenizer, text) for text in ("red: ", "blue: ", " ant no\ngreen: ", "cow")}
    red, blue, grown, cow = read.values()
    turns = [  # of each row, and how many of its tokens were read before
        {"a": (red, 0), "b": (blue + cow, 0), "c": (red + cow, 0), "d": (cow, 0)},
        {
            "a": (red + grown, len(red)),
            "b": (blue + cow + red, len(blue + cow)),
            "d": (red + grown + blue, 0),
        },
        {
            "a": (red + grown, 0),
            "b": (blue + cow, 0),
            "d": (red + grown + blue + cow, len(red + grown + blue)),
        },
        {"b": (blue + cow + cow, len(blue + cow)), "d": (blue + cow, 0)},
        {"d": (blue + cow + red, len(blue + cow))},
    ]
    memory, streams, seen = archer.Memory(actor, "abcd"), models.streams(range(4)), []
    real = memory.read
    monkeypatch.setattr(memory, "read", lambda *given: seen.append(real(*given)) or seen[-1])
    for turn in turns:
        rows = {name: row for name, (row, _) in turn.items()}
        starts = [[len(row)] for row in rows.values()]
        utterances, logps = archer.generate(memory, rows, starts, small(), streams[: len(rows)])
        hidden_BTH, position_BT = seen.pop()
        assert hidden_BTH.shape[1] == max(len(row) - known for row, known in turn.values())
        for b, (row, known) in enumerate(turn.values()):
            own = slice(len(row) - known)
            with torch.no_grad():
                whole_TH = actor.base_model(input_ids=torch.tensor([row])).last_hidden_state[0]
            assert position_BT[b, own].tolist() == list(range(known, len(row)))
            assert torch.allclose(hidden_BTH[b, own], whole_TH[known:], atol=1e-4)
            assert logps[b] == pytest.approx(plain_logps(actor, row, utterances[b]), abs=1e-4)


def test_a_memory_of_rewritten_rows_keeps_none_of_the_old(actor, tokenizer):
    """As in a world that shows a new text every turn: the cache is as long as the longest row."""
    memory = archer.Memory(actor, "ab")
    for text in ("red: ", "blue: ant ", "cow"):
        rows = {name: models.encode(tokenizer, name + text) for name in "ab"}
        hidden_BTH, _ = memory.read(rows, "float32")
        assert memory.cache.get_seq_length() == hidden_BTH.shape[1] == max(map(len, rows.values()))


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
        found = archer.score(actor, [played[i] for i in which], said, 1.0, "float32")[0].split(sizes)
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
        (alone,), own = archer.rollout(actor, envs.VecTextEnv(world, 1), small(), None, [i], True)
        assert said_in([alone]) == said_in([d])
        total += sum(own)
    assert sum(nll) == pytest.approx(total, rel=1e-5)


def test_rng_draws_the_seeds_of_the_worlds(actor, monkeypatch):
    """Without it they are 0, 1, 2 ..."""
    worlds, seeds = envs.VecTextEnv("toy", 3), []
    reset = worlds.reset
    monkeypatch.setattr(worlds, "reset", lambda **given: seeds.append(list(given["seeds"])) or reset(**given))
    for rng in (None, np.random.default_rng(5)):
        archer.rollout(actor, worlds, small(max_action_tokens=1), rng)
    assert seeds == [[0, 1, 2], np.random.default_rng(5).integers(2**31, size=3).tolist()]


def test_the_token_that_pads_may_occur_in_the_text(actor, tokenizer):
    """pad == eos is safe: masks come from lengths, so token 0 is a token like any other where it really
    stands. Spelled by the world it is text."""
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    text = "red<|endoftext|>: "
    d = {"observations": [text, text + "<|endoftext|> no\nb: ", "."], "actions": ["<|endoftext|>", "ant"]}
    other = {"observations": ["a", "."], "actions": ["bee"]}
    said = [[0], [5, 0, 0, 7, 0], [0, 0]]
    assert models.encode(tokenizer, text).count(0) == 0
    with torch.no_grad():
        logits_MV, token_M, _, _ = archer.score(actor, [d, other], said, 1.0, "float32")
    logp = logits_MV.log_softmax(-1)[torch.arange(len(token_M)), token_M].tolist()
    contexts = [
        before(d, 0, tokenizer, True),
        before(d, 1, tokenizer, True),
        before(other, 0, tokenizer, True),
    ]
    expected = [plain_logps(actor, context, ids) for context, ids in zip(contexts, said, strict=True)]
    assert logp == pytest.approx([x for part in expected for x in part], abs=1e-4)


def test_models_are_loaded_without_dropout_in_float32(tokenizer, tmp_path):
    """A checkpoint's own dropout would make the scorer another policy than the sampler."""
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2)
    assert config.resid_pdrop > 0
    GPT2LMHeadModel(config).bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = models.load(AutoModelForCausalLM, str(tmp_path), small())
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
                said = [*models.encode(own, fresh[n]), own.eos_token_id]
                hidden = body(input_ids=torch.tensor([row + said])).last_hidden_state[0]
                v_H, q_H = hidden[len(row) - 1], hidden[-1]
            else:
                texts = [
                    own(text, return_tensors="pt").input_ids for text in (d["observations"][k], fresh[n])
                ]
                assert all(ids[0, 0] == own.cls_token_id for ids in texts)
                v_H, a_H = (body(input_ids=ids).last_hidden_state[0, 0] for ids in texts)
                q_H = torch.cat([v_H, a_H])
            v = torch.cat([head(v_H) for head in critic.v_heads])
            heads = critic.a_heads if kind == "encoder" else [critic.a_heads]
            q = v + torch.cat([head(q_H) for head in heads])
            assert torch.allclose(v_N2[n], v, atol=1e-4) and torch.allclose(q_N2[n], q, atol=1e-4)
        for pair_N2 in (v_N2, q_N2):  # twins, not copies
            assert not torch.allclose(pair_N2[:, 0], pair_N2[:, 1], atol=1e-2)


def test_D9_at_first_no_utterance_of_a_decoder_is_better_than_another(actor):
    """Q is V; and one step of the critic on rewards that differ tells them apart."""
    played = with_rewards(play("toy", actor, n=4)[0])
    critic = archer.Critic(critic_of(actor).body, -2.0, "float32")
    with torch.no_grad():
        v_N2, q_N2 = critic(played)
    assert torch.equal(v_N2, q_N2)
    target = copy.deepcopy(critic)
    archer.critic_update(critic, target, torch.optim.SGD(critic.parameters(), lr=1e-2), played, small())
    with torch.no_grad():
        v_N2, q_N2 = critic(played)
    assert not torch.allclose(v_N2, q_N2, atol=1e-4)


def test_an_encoder_cuts_the_beginning_of_a_text_that_is_too_long(folders, actor):
    """BERT reads 512 tokens; of a longer dialogue the last ones matter most."""
    critic, long = critic_of(actor, "encoder", folders=folders), "red: ant yes\n" * 400
    with torch.no_grad():
        cls = models.cls_vectors(critic.body, [long + "a", "blue: " + long + "a", long + "b"], "float32")
    assert torch.allclose(cls[0], cls[1], atol=1e-5) and not torch.allclose(cls[0], cls[2], atol=1e-4)


def test_an_encoder_reads_no_control_token_in_a_text(folders, actor):
    critic = critic_of(actor, "encoder", folders=folders)
    read = []
    critic.body.register_forward_pre_hook(
        lambda _, given, options: read.append(options["input_ids"]), with_kwargs=True
    )
    end = critic.tokenizer.sep_token
    with torch.no_grad():
        models.cls_vectors(critic.body, [f"red {end} ant"], "float32")
    assert read[0][0].tolist().count(critic.tokenizer.sep_token_id) == 1, "the one behind the text"


def with_rewards(dialogues):
    """Rewards that differ, as those of a toy are mostly zero; and fresh utterances of their own."""
    found = []
    for n, d in enumerate(dialogues):
        turns = range(len(d["actions"]))
        rewards = {"rewards": [0.3 * n - k for k in turns]}
        found.append(d | rewards | {"fresh": [WORDS[(n + k) % 4] for k in turns]})
    return found


@BOTH
def test_critic_update_is_E1_and_E2(actor, tokenizer, world):
    """Its losses against a loop over single utterances: who bootstraps, from which state, with which
    utterance.

    Fails when a dialogue bootstraps past its end (a time limit is one, too), when the states of neighbouring
    dialogues are mixed up, when V learns from the wrong utterance, or when the target does not stand in for
    it.
    """
    played = with_rewards(play(world, actor, n=4)[0])  # tasks 0 and 2 terminate, 1 and 3 are cut
    critic, target = (critic_of(actor, seed=seed) for seed in (1, 2))
    args = small(gamma=0.8, polyak=0.0)
    q_terms, v_terms, errors, all_returns = [], [], [], []
    for d in played:
        n = len(d["actions"])
        returns = [sum(0.8 ** (j - k) * d["rewards"][j] for j in range(k, n)) for k in range(n)]
        for k in range(n):
            v, q = value_alone(critic, d, k, d["actions"][k])
            next_v = value_alone(target, d, k + 1, "")[0] if k < n - 1 else 0.0
            q_terms.append(((q - d["rewards"][k] - 0.8 * next_v) ** 2).mean().item())
            gap = value_alone(target, d, k, d["fresh"][k])[1] - v
            v_terms.append((gap**2).mean().item())
            errors.append(v.mean().item() - returns[k])
            all_returns.append(returns[k])
    metrics = archer.critic_update(critic, target, still(critic), played, args)
    assert metrics["critic/q_loss"] == pytest.approx(np.mean(q_terms), rel=1e-4)
    assert metrics["critic/v_loss"] == pytest.approx(np.mean(v_terms), rel=1e-4)
    assert metrics["critic/bias"] == pytest.approx(np.mean(errors), rel=1e-4)
    explained = 1 - np.var(errors) / np.var(all_returns)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-3)


def test_a_critic_with_a_tokenizer_of_its_own_hears_the_actors_words(folders, tmp_path, monkeypatch):
    spy, heard, forward = Spy(monkeypatch), [], archer.Critic.forward

    def listen(self, dialogues, texts=None):
        heard.append([] if texts is None else list(texts))
        return forward(self, dialogues, texts)

    monkeypatch.setattr(archer.Critic, "forward", listen)
    go(tmp_path, folders, critic=folders["BERT"], iterations=1)
    own = AutoTokenizer.from_pretrained(folders["LLAMA"])
    written = {archer.spoken(own, ids) for c in spy.of("generate") for ids in c["result"][0]}
    assert any(heard) and all(set(texts) <= written for texts in heard)


def test_of_returns_that_are_all_alike_nothing_is_explained(actor):
    """The share of no variance is no number, which the log shows as such; it was minus many millions."""
    played = with_rewards(play("toy", actor, n=4)[0])
    played = [d | {"rewards": [0.0] * len(d["actions"])} for d in played]
    critic = critic_of(actor)
    metrics = archer.critic_update(critic, copy.deepcopy(critic), still(critic), played, small())
    assert math.isnan(metrics.pop("critic/explained_variance"))
    assert all(math.isfinite(figure) for figure in metrics.values())


def test_critic_update_moves_the_critic_and_the_target_after_it(actor):
    """The gradient goes into the critic only; then the target makes its Polyak step."""
    played = with_rewards(play("toy", actor, n=4)[0])
    critic, target = (critic_of(actor, seed=seed) for seed in (1, 2))
    old, fixed = copy.deepcopy(target), copy.deepcopy(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-2)
    archer.critic_update(critic, target, optimizer, played, small(polyak=0.25))
    assert gradient(critic).norm() > 0 and all(p.grad is None for p in target.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(critic.parameters(), fixed.parameters(), strict=True))
    for now, was, new in zip(target.parameters(), old.parameters(), critic.parameters(), strict=True):
        assert torch.allclose(now, 0.75 * was + 0.25 * new, atol=1e-6)


def test_updates_warn_of_nothing(actor):
    """What a run prints on stderr is for errors."""
    played, baseline = with_rewards(play("toy", actor, n=4)[0]), archer.mlp(32, 32, 0.3)
    critic, ref_model, args = critic_of(actor), copy.deepcopy(actor), small()
    torch.set_warn_always(True)  # not in the first test of a process only
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            archer.critic_update(critic, copy.deepcopy(critic), still(critic), played, args)
            options = (still(actor, baseline), played, args, np.random.default_rng())
            archer.actor_update(actor, ref_model, critic, baseline, *options)
    finally:
        torch.set_warn_always(False)


def test_D4_a_new_critic_says_the_value_that_it_is_given(actor, folders):
    """Near enough: only the last bias is set, what lies before it is drawn."""
    played, _ = play("toy", actor, n=4)
    actor.base_model.tokenizer = actor.tokenizer
    for body in (actor.base_model, models.load(AutoModel, folders["BERT"], small())):
        with torch.no_grad():
            v_N2, q_N2 = archer.Critic(body, -40.0, "float32")(played)
        assert (v_N2 + 40).abs().max() < 3 and (q_N2 + 40).abs().max() < 3


def test_twins_are_networks_side_by_side():
    torch.manual_seed(0)
    twins, x = archer.Twins(archer.mlp(3, 8, -7.0) for _ in range(2)), torch.randn(5, 3)
    y_52 = twins(x)
    assert torch.equal(y_52, torch.stack([twins[0](x)[:, 0], twins[1](x)[:, 0]], -1))
    assert not torch.allclose(y_52[:, 0], y_52[:, 1], atol=1e-3) and (y_52 + 7).abs().max() < 2
    y_52[:, 1].sum().backward()
    assert gradient(twins[0]).norm() == 0 < gradient(twins[1]).norm()
    assert [network[-1].bias[0].item() for network in twins] == [-7.0, -7.0]


CHANGES = [
    {},
    {"fresh": True},
    {"center": False, "kl": 0.0},
    {"baseline": True, "temperature": 0.7},
    {"baseline": True, "temperature": 0.7, "fresh": True},
    {"kl": 0.5, "center": False, "clip": 0.05},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@BOTH
def test_actor_update_is_E3(actor, tokenizer, world, changes, monkeypatch):
    """Its figures and its gradient against a loop over single utterances and their tokens, end of turn
    included: those that were played, from which the actor has moved away (D10), or fresh ones.

    And no more than that: what the baseline learns (E4) moves the baseline only, the advantage is a number,
    and the KL divergence is that of the actor from the actor of the start, not the other way round (D1).
    """
    args, baseline = small(max_grad_norm=1e9, **changes), archer.mlp(32, 32, 0.3)
    played, _ = play(world, actor, n=4, temperature=args.temperature)
    for parameter in [p for p in actor.parameters() if not args.fresh]:
        parameter.data += 0.02 * torch.randn_like(parameter)
    critic, twin, ref_model = critic_of(actor), copy.deepcopy(actor), copy.deepcopy(actor)
    for parameter in ref_model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    learned = archer.flat(played, "ids")
    if args.fresh:
        learned = fresh_for(played, actor, seed=9, temperature=args.temperature)
    old = archer.flat(played, "logps")
    N, advantage, moved = len(learned), [], []
    for (d, k), ids in zip(states(played), learned, strict=True):
        v, q = value_alone(critic, d, k, archer.spoken(tokenizer, ids))
        advantage.append(q.min().item() - v.min().item())
    weights = [a - np.mean(advantage) for a in advantage] if args.center else advantage
    loss = kl = fit = entropy = 0.0
    for (d, k), ids, weight, old_logps in zip(states(played), learned, weights, old, strict=True):
        context = before(d, k, tokenizer, world == "toy")
        tokens, at = torch.tensor([context + ids]), slice(len(context) - 1, -1)
        logp, ref_logp = (
            (x(input_ids=tokens).logits[0, at] / args.temperature).log_softmax(-1) for x in (twin, ref_model)
        )
        hidden = twin.base_model(input_ids=tokens).last_hidden_state[0, at]
        b = baseline(hidden.detach())[:, 0]
        own_kl = (logp.exp() * (logp - ref_logp.detach())).sum(-1)
        to_come = torch.stack([own_kl[i + 1 :].sum() for i in range(len(ids))])
        paid = (weight - b if args.baseline else weight) - args.kl * to_come
        own_logp = logp[range(len(ids)), ids]
        ratio = (own_logp - (own_logp.detach() if args.fresh else torch.tensor(old_logps))).exp()
        bounded = ratio.clamp(1 - args.clip, 1 + args.clip)
        loss = loss - torch.minimum(ratio * paid.detach(), bounded * paid.detach()).sum() / N
        moved += (bounded * paid < ratio * paid).tolist()
        kl = kl + own_kl.sum() / N
        entropy -= (logp.exp() * logp).sum().item() / N
        fit = fit + ((weight - b) ** 2).mean() / N
    assert any(moved) != args.fresh and not all(moved)
    (loss + args.kl * kl).backward()
    expected = gradient(twin)
    fit.backward()
    expected_baseline = gradient(baseline)

    options = (still(actor, baseline), played, args, np.random.default_rng(9))
    metrics = archer.actor_update(actor, ref_model, critic, baseline, *options)
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
    assert metrics["actor/kl"] == pytest.approx(kl.item(), rel=1e-3) and metrics["actor/kl"] > 0
    assert metrics["actor/entropy"] == pytest.approx(entropy, rel=1e-4)
    assert metrics["actor/clipped"] == pytest.approx(np.mean(moved), abs=1e-6)
    assert metrics["actor/advantage_mean"] == pytest.approx(np.mean(advantage), abs=1e-5)
    assert metrics["actor/advantage_std"] == pytest.approx(np.std(advantage), rel=1e-3)
    assert metrics["actor/baseline_loss"] == pytest.approx(fit.item(), rel=1e-4)
    assert (gradient(actor) - expected).norm() < 1e-3 * expected.norm()
    assert metrics["actor/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-3)
    assert gradient(critic).norm() == 0 and gradient(ref_model).norm() == 0
    assert torch.allclose(gradient(baseline), expected_baseline, rtol=1e-3, atol=1e-5)
    assert gradient(baseline).norm() > 0, "it learns without --baseline, too"


def test_environment_tokens_get_no_gradient_and_the_end_of_turn_does(actor, tokenizer):
    """The loss reaches the hidden states that predict tokens of utterances, ends of turn included, and no
    others."""
    played, outputs = Toy().demonstrations(4, seed=1), []
    end = [tokenizer.eos_token_id]
    for d in played:
        d["ids"] = [models.encode(tokenizer, action) + end for action in d["actions"]]
        d["logps"] = [[-1.0] * len(ids) for ids in d["ids"]]

    def keep(module, inputs, output):
        output.last_hidden_state.retain_grad()
        outputs.append(output.last_hidden_state)

    critic, ref_model = critic_of(actor), copy.deepcopy(actor).requires_grad_(False)
    actor.base_model.register_forward_hook(keep)
    baseline, args = archer.mlp(32, 32, 0.0), small(kl=0.0, clip=1e9)
    archer.actor_update(actor, ref_model, critic, baseline, still(actor, baseline), played, args, None)
    (hidden,), packed = outputs, archer.pack(played, tokenizer, archer.flat(played, "ids"))
    row_M = packed.row_N[packed.owner_M]
    for row in range(4):
        expected = set(packed.before_M[row_M == row].tolist())
        assert set(hidden.grad[row].abs().sum(-1).nonzero().flatten().tolist()) == expected


def test_1x8_is_8x1(actor):
    """Losses are means over utterances: a batch has the utterance-weighted mean loss and gradient of its
    parts."""
    played = with_rewards(play("toy", actor, n=8)[0])
    critic, target = (critic_of(actor, seed=seed) for seed in (1, 2))
    ref_model, baseline = copy.deepcopy(actor), archer.mlp(32, 32, 0.3)
    args = small(center=False, max_grad_norm=1e9, polyak=0.0)  # the mean of D3 is one of the batch

    def results(which):
        part, optimizer = [played[i] for i in which], still(actor, baseline)
        a = archer.actor_update(actor, ref_model, critic, baseline, optimizer, part, args, None)
        c = archer.critic_update(critic, target, still(critic), part, args)
        figures = [a["actor/loss"], a["actor/kl"], c["critic/q_loss"], c["critic/v_loss"]]
        return torch.cat([torch.tensor(figures), gradient(actor), gradient(critic)])

    parts = sum(len(d["actions"]) * results([i]) for i, d in enumerate(played)) / len(states(played))
    whole = results(range(8))
    assert (whole - parts).norm() < 1e-4 * whole.norm()


def test_gradients_are_clipped_and_nan_is_an_error():
    """`clipped_step` clips the gradients of what it is given and says how large they were."""
    module, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    (100 * (module(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum()).backward()
    norm = models.clipped_step(still(module, other), module, 1.0, "test")
    assert norm == pytest.approx(100 * math.sqrt(3), rel=1e-5)
    assert gradient(module).norm() == pytest.approx(1, rel=1e-4)
    assert gradient(other).norm() == pytest.approx(100 * math.sqrt(3), rel=1e-5)
    before_it, optimizer = copy.deepcopy(module.state_dict()), torch.optim.SGD(module.parameters(), lr=1.0)
    module(torch.full((1, 2), math.inf)).sum().backward()
    with pytest.raises(ArithmeticError, match="test diverged"):
        models.clipped_step(optimizer, module, 1.0, "test")
    assert all(torch.equal(before_it[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("loss", ["value_loss", "policy_loss"])
def test_an_update_that_diverges_says_whose_it_is(actor, monkeypatch, loss):
    right = getattr(archer, loss)

    def wrong(*given):
        found = right(*given)
        return found * math.nan if loss == "value_loss" else (found[0] * math.nan, found[1])

    monkeypatch.setattr(archer, loss, wrong)
    played, critic = with_rewards(play("toy", actor, n=2)[0]), critic_of(actor)
    baseline = archer.mlp(32, 32, 0.0)
    who = "critic" if loss == "value_loss" else "actor"
    with pytest.raises(ArithmeticError, match=f"the {who} diverged .*nan"):
        archer.critic_update(critic, copy.deepcopy(critic), still(critic), played, small())
        options = (still(actor), played, small(), np.random.default_rng())
        archer.actor_update(actor, actor, critic, baseline, *options)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize(("size", "fresh"), [(1, True), (2, False), (3, True)])
@BOTH
def test_an_update_is_the_same_in_micro_batches(actor, world, kind, size, fresh, folders):
    """In float64, where sums differ by rounding alone: gradients and figures, those of the whole batch, too,
    and the utterances that the actor samples for its update."""
    played = with_rewards(play(world, actor, n=7)[0])
    ref_model, critic = copy.deepcopy(actor).double(), critic_of(actor, kind, folders=folders).double()
    for parameter in ref_model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    actor, baseline, target = actor.double(), archer.mlp(32, 32, 0.3).double(), copy.deepcopy(critic)

    def results(micro_batch):
        args = small(micro_batch=micro_batch, baseline=True, max_grad_norm=1e9, polyak=0.0, fresh=fresh)
        options = (still(actor, baseline), played, args, np.random.default_rng(9))
        figures = archer.critic_update(critic, target, still(critic), played, args)
        found = [gradient(critic)]
        figures |= archer.actor_update(actor, ref_model, critic, baseline, *options)
        return figures, torch.cat([*found, gradient(actor), gradient(baseline)])

    expected, whole = results(7)
    figures, parts = results(size)
    assert figures == pytest.approx(expected, rel=1e-9) and figures["actor/kl"] > 0
    assert (parts - whole).norm() < 1e-12 * whole.norm() and whole.norm() > 0


def test_no_more_than_a_micro_batch_is_read_at_a_time(actor, tokenizer, folders, monkeypatch):
    """By no model and in no pass: not where gradients are, not for targets, advantages or samples."""
    played = with_rewards(play("toy", actor, n=7)[0])
    critic, ref_model, baseline = critic_of(actor), copy.deepcopy(actor), archer.mlp(32, 32, 0.3)
    rows, hidden_states = [], models.hidden_states

    def listen(body, dtype, **inputs):
        rows.append(len(inputs["input_ids"]))
        return hidden_states(body, dtype, **inputs)

    monkeypatch.setattr(models, "hidden_states", listen)
    args = small(micro_batch=2, fresh=True)
    options = (still(actor, baseline), played, args, np.random.default_rng(9))
    archer.critic_update(critic, copy.deepcopy(critic), still(critic), played, args)
    archer.actor_update(actor, ref_model, critic, baseline, *options)
    assert max(rows) == 2 and rows.count(1) >= 6


# ------------------------------------------------------------------------------------- what `main` hands on
class Spy:
    """What every part of a run was given and gave back, in the order of the calls."""

    NAMES = ("rollout", "generate", "with_fresh", "score", "critic_update", "actor_update", "evaluate")

    def __init__(self, patch):
        self.calls, self.open = [], []
        for name in self.NAMES:
            patch.setattr(archer, name, self.wrap(name, getattr(archer, name)))

    def wrap(self, name, real):
        def called(*given, **options):
            call = {"name": name, "within": [outer["name"] for outer in self.open], "inside": []}
            call["given"] = named(real, given, options)
            call["state"] = self.look(name, call["given"])
            for outer in self.open:
                outer["inside"].append(call)
            self.open.append(call)
            self.calls.append(call)
            try:
                result = real(*given, **options)
            finally:
                self.open.pop()
            call["result"] = result if name != "rollout" else (list(result[0]), result[1])  # the buffer grows
            call["iteration"] = self.iteration
            return result

        return called

    @staticmethod
    def look(name, given):
        """A copy of what changes later."""
        models = {"critic_update": ("critic", "target_critic"), "actor_update": ("actor", "ref_model")}
        state = {key: copy.deepcopy(given[key].state_dict()) for key in models.get(name, ())}
        if name == "actor_update":
            state["lr"] = given["optimizer"].param_groups[0]["lr"]
        if name == "with_fresh":
            state["rng"] = given["rng"].bit_generator.state
        return state

    @property
    def iteration(self):
        """0 while the first dialogues are played; every iteration begins with dialogues of its own."""
        return len(self.own_rollouts()) - 1

    def own_rollouts(self):
        return [call for call in self.of("rollout") if "evaluate" not in call["within"]]

    def pools(self):
        """Of each iteration, the call that writes the utterances of E2."""
        return [call for call in self.of("with_fresh") if "actor_update" not in call["within"]]

    def of(self, name, within=None):
        return [c for c in self.calls if c["name"] == name and (within is None or within in c["within"])]


SPIED = {"iterations": 5, "rollouts": 4, "warmup": 2, "critic_updates": 4, "critic_batch": 24}
SPIED |= {"critic_pool": 64, "actor_updates": 3, "actor_batch": 16, "actor_lr": 3e-3}
SPIED |= {"eval_every": 5, "eval_episodes": 8, "polyak": 0.1}


def spy_on(folders, folder, **changes):
    with alone(), pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        spy.folder, spy.summary = go(folder, folders, **SPIED | changes)
    return spy


@pytest.fixture(scope="module")
def spied(folders, tmp_path_factory):
    """A run of five iterations, two of them warm-up, and all that was handed on in it."""
    return spy_on(folders, tmp_path_factory.mktemp("spied"), actor_batch=3)


@pytest.fixture(scope="module")
def spied_fresh(folders, tmp_path_factory):
    """The same with --fresh."""
    return spy_on(folders, tmp_path_factory.mktemp("spied_fresh"), fresh=True)


def which(dialogue) -> int:
    """Who a dialogue is, also where a copy of its dict is handed on."""
    return id(dialogue["observations"])


def played_in(spy) -> list[set[int]]:
    """Of each iteration, the dialogues that were played in it; the first of all are those of iteration 0."""
    return [{which(d) for d in call["result"][0]} for call in spy.own_rollouts()]


def test_a_run_has_as_many_updates_and_dialogues_as_it_should(spied):
    played = spied.own_rollouts()
    assert [len(call["result"][0]) for call in played] == [4] * 6 and spied.summary["episodes"] == 24
    assert [c["iteration"] for c in spied.of("critic_update")] == [n for n in range(1, 6) for _ in range(4)]
    assert [c["iteration"] for c in spied.of("actor_update")] == [n for n in range(3, 6) for _ in range(3)]
    assert not any(inner["given"].get("greedy") for call in played for inner in call["inside"])


def test_rollouts_have_seeds_of_their_own_and_evaluations_always_the_same(spied):
    """By the `rng` of the run, which goes on; an evaluation has none."""
    (ours,) = {id(call["given"]["rng"]) for call in spied.own_rollouts()}
    assert ours not in {id(call["given"]["rng"]) for call in spied.of("rollout", within="evaluate")}
    assert all(call["given"]["rng"] is None for call in spied.of("rollout", within="evaluate"))
    texts = [tuple(d["actions"][0] for d in call["result"][0]) for call in spied.own_rollouts()]
    assert len(set(texts)) == len(texts), "or every iteration would play the same"


def test_the_critic_learns_from_the_whole_buffer(spied):
    """Not from the newest dialogues only: it is off-policy. Its pool, and its batches, have old ones and new
    ones."""
    played, pools = played_in(spied), spied.pools()
    assert len(pools) == 5 and all(len(c["given"]["dialogues"]) == 64 for c in pools)
    for n, pool in enumerate(pools, start=1):
        drawn = {which(d) for d in pool["given"]["dialogues"]}
        batches = [c["given"]["dialogues"] for c in spied.of("critic_update") if c["iteration"] == n]
        learned = {which(d) for batch in batches for d in batch}
        assert learned <= drawn and [len(batch) for batch in batches] == [24] * 4
        assert len({tuple(map(which, batch)) for batch in batches}) == 4, "each update draws its own"
        for some in played[: n + 1]:
            assert drawn & some and learned & some
        assert not any(drawn & later for later in played[n + 1 :])


def test_D10_the_actor_learns_from_the_newest_dialogues(spied, tokenizer):
    """From them alone; it scores the ids that were sampled, and the critic judges their text."""
    played = played_in(spied)
    for n in range(3, 6):
        calls = [c for c in spied.of("actor_update") if c["iteration"] == n]
        batches = [c["given"]["dialogues"] for c in calls]
        assert [len({which(d) for d in batch}) for batch in batches] == [3] * 3
        assert all({which(d) for d in batch} <= played[n] for batch in batches)
        assert {which(d) for batch in batches for d in batch} == played[n]
        assert len({tuple(map(which, batch)) for batch in batches}) == 3, "each update draws its own"
        inside = [inner for call in calls for inner in call["inside"]]
        assert not [inner for inner in inside if inner["name"] == "with_fresh"]
        assert all(
            inner["given"]["utterances"] == archer.flat(inner["given"]["dialogues"], "ids")
            for inner in inside
            if inner["name"] == "score"
        )
    for call in spied.own_rollouts():
        written = [ids for c in call["inside"] if c["name"] == "generate" for ids in c["result"][0]]
        logps = [own for c in call["inside"] if c["name"] == "generate" for own in c["result"][1]]
        dialogues = call["result"][0]
        assert sorted(archer.flat(dialogues, "ids")) == sorted(written)
        assert sorted(archer.flat(dialogues, "logps")) == sorted(logps)
        said = [archer.spoken(tokenizer, ids) for ids in archer.flat(dialogues, "ids")]
        assert said == archer.flat(dialogues, "actions")


def test_fresh_the_actor_learns_in_states_of_the_whole_buffer(spied_fresh):
    """Not of the newest dialogues only."""
    spied = spied_fresh
    played = played_in(spied)
    for n in range(3, 6):
        batches = [c["given"]["dialogues"] for c in spied.of("actor_update") if c["iteration"] == n]
        assert [len(batch) for batch in batches] == [16] * 3
        assert all({which(d) for batch in batches for d in batch} & some for some in played[: n + 1])
        assert len({tuple(map(which, batch)) for batch in batches}) == 3, "each update draws its own"


def test_the_utterances_of_E2_belong_to_their_dialogues(spied):
    """A dialogue of a batch has the texts that were written in its own states, in order, by the actor."""
    actor = spied.of("actor_update")[0]["given"]["actor"]
    for n, pool in enumerate(spied.pools(), start=1):
        assert pool["given"]["actor"] is actor
        said = [ids for c in pool["inside"] if c["name"] == "generate" for ids in c["result"][0]]
        texts = iter([archer.spoken(actor.tokenizer, ids) for ids in said])
        pairs = {(which(d), tuple(next(texts) for _ in d["actions"])) for d in pool["given"]["dialogues"]}
        updates = [c for c in spied.of("critic_update") if c["iteration"] == n]
        learned = [d for c in updates for d in c["given"]["dialogues"]]
        heard = [tuple(d["fresh"]) for d in learned]
        assert set(zip(map(which, learned), heard, strict=True)) <= pairs
        assert len({text for _, own in pairs for text in own}) > 50, "texts differ, or this would say nothing"


def test_the_target_is_a_network_that_lags_behind(spied):
    calls, shares = spied.of("critic_update"), []
    for call in calls:
        critic, target_critic = call["given"]["critic"], call["given"]["target_critic"]
        own = {p.data_ptr() for p in critic.parameters()}
        assert critic is not target_critic and not own & {p.data_ptr() for p in target_critic.parameters()}
        assert not any(p.requires_grad for p in target_critic.parameters())
    for now, after in itertools.pairwise(calls):
        for name, was in now["state"]["target_critic"].items():
            expected = torch.lerp(was, after["state"]["critic"][name], SPIED["polyak"])
            new = after["state"]["target_critic"][name]
            assert torch.allclose(new, expected, atol=1e-6)
            shares.append(not torch.equal(new, after["state"]["critic"][name]))
    assert np.mean(shares) > 0.9


def test_the_kl_is_to_the_actor_of_the_start(spied, folders):
    """Which stands still, while the actor moves away from it."""
    start = AutoModelForCausalLM.from_pretrained(folders["LLAMA"]).state_dict()
    calls = spied.of("actor_update")
    for n, call in enumerate(calls):
        assert call["given"]["actor"] is not call["given"]["ref_model"]
        assert all(torch.equal(value, start[name]) for name, value in call["state"]["ref_model"].items())
        moved = [not torch.equal(value, start[name]) for name, value in call["state"]["actor"].items()]
        assert any(moved) == (n > 0)
    figures = [call["result"]["actor/kl"] for call in calls]
    assert abs(figures[0]) < 1e-5 < min(figures[1:])


def test_fresh_every_actor_update_has_utterances_of_its_own(spied_fresh):
    """On-policy: sampled within the update, from the actor as it is, and these are what it scores; never
    greedy."""
    spied = spied_fresh
    states, critic = [], spied.of("critic_update")[0]["given"]["critic"]
    for call in spied.of("actor_update"):
        given = call["given"]
        assert given["critic"] is critic
        (fresh,) = [c for c in call["inside"] if c["name"] == "with_fresh"]
        assert fresh["given"]["actor"] is given["actor"]
        assert fresh["given"]["dialogues"] is given["dialogues"]
        states.append(str(fresh["state"]["rng"]))
        scored = [c["given"] for c in call["inside"] if c["name"] == "score"]
        assert {id(c["actor"]) for c in scored} == {id(given["actor"]), id(given["ref_model"])}
        assert all(c["utterances"] == archer.flat(fresh["result"], "ids") for c in scored)
        assert all(c["dialogues"] == fresh["result"] for c in scored)
    assert len(set(states)) == len(states) == 9


def test_fresh_utterances_are_sampled(spied_fresh, actor):
    """As the world hears them: not greedy ones, neither for E2 nor for E3."""
    spied = spied_fresh
    assert not any(call["given"]["greedy"] for call in spied.of("generate", within="with_fresh"))
    (d, *_), _ = play("toy", actor)
    assert len({tuple(ids) for ids in fresh_for([d] * 40, actor)[::2]}) > 10


def test_sampled_and_greedy_evaluation_are_not_swapped(spied):
    """eval/return is that of sampled dialogues, every task so often; eval/return_greedy that of greedy
    ones."""
    first, last = spied.of("evaluate")
    assert (first["iteration"], last["iteration"]) == (0, 5)
    for evaluation, stage in ((first, "warm_start"), (last, "eval")):
        found = {}
        for rollout in [c for c in evaluation["inside"] if c["name"] == "rollout"]:
            (is_greedy,) = {c["given"]["greedy"] for c in rollout["inside"] if c["name"] == "generate"}
            found[is_greedy] = rollout["result"][0]
        assert sorted(d["answer"] for d in found[False]) == sorted(WORDS * 2)
        assert sorted(d["answer"] for d in found[True]) == sorted(WORDS)
        figures = envs.summarise(found[False], "{}") | envs.summarise(found[True], "{}_greedy")
        assert evaluation["result"] == {f"eval/{name}": figure for name, figure in figures.items()}
        for name, figure in figures.items():
            assert spied.summary[f"{stage}_{name}"] == figure


def test_the_figures_of_greedy_and_sampled_dialogues_are_not_exchanged(folders, tmp_path, monkeypatch):
    """In the log and in the summary, of the first evaluation and of the last."""
    real = archer.rollout

    def rollout(*given):
        played, nll = real(*given)
        first = 7.0 if named(real, given, {})["greedy"] else 5.0
        return [d | {"rewards": [first, *(0.0 for _ in d["actions"][1:])]} for d in played], nll

    monkeypatch.setattr(archer, "rollout", rollout)
    run, summary = go(tmp_path, folders, iterations=1)
    for stage in ("warm_start", "eval"):
        assert (summary[f"{stage}_return"], summary[f"{stage}_return_greedy"]) == (5, 7)
    assert (lines_of(run)[-1]["eval/return"], lines_of(run)[-1]["eval/return_greedy"]) == (5, 7)


@pytest.mark.parametrize(("episodes", "sizes"), [(1, [1, 1]), (3, [3, 3]), (8, [8, 4])])
def test_an_evaluation_is_no_larger_than_asked_for_and_repeats_itself(actor, monkeypatch, episodes, sizes):
    """Whole passes over the tasks, sampled and greedy; of a world with more tasks the first ones."""
    spy = Spy(monkeypatch)
    args = small(eval_episodes=episodes)
    assert archer.evaluate(actor, args) == archer.evaluate(actor, args)
    played = [call["result"] for call in spy.of("rollout")]
    assert played[:2] == played[2:] and played[0] != played[1]
    tasks = [call["given"]["indices"] for call in spy.of("rollout")]
    assert tasks == 2 * [[i % 4 for i in range(size)] for size in sizes]


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_D6_the_actors_rate_falls_from_its_first_update_on(folders, tmp_path, monkeypatch, anneal_lr):
    """The first has all of it, and the last of three iterations a third."""
    spy = Spy(monkeypatch)
    go(tmp_path, folders, iterations=5, warmup=2, actor_lr=1e-3, anneal_lr=anneal_lr, **ONE)
    expected = [1e-3, 1e-3 * 2 / 3, 1e-3 / 3] if anneal_lr else [1e-3] * 3
    assert [c["state"]["lr"] for c in spy.of("actor_update")] == pytest.approx(expected)


def test_D4_is_the_mean_discounted_return_of_the_first_dialogues(folders, tmp_path, monkeypatch):
    values, real = [], archer.mlp
    monkeypatch.setattr(archer, "mlp", lambda a, b, value: values.append(value) or real(a, b, value))
    options = {"iterations": 1, "gamma": 0.5, "env": "twenty-questions-subset", "eval_episodes": 1}
    run, _ = go(tmp_path, folders, rollouts=6, max_action_tokens=2, **options)
    first = state_of(run)["state"]["replay_buffer"][:6]
    expected = np.mean([sum(r * 0.5**k for k, r in enumerate(d["rewards"])) for d in first])
    assert expected < -1 and values == [pytest.approx(expected)] * 2 + [0.0]


def test_the_buffer_forgets_the_oldest(folders, tmp_path, monkeypatch):
    """What is left is the end of what was played, and no more than the buffer may hold."""
    spy = Spy(monkeypatch)
    run, _ = go(tmp_path, folders, iterations=3, buffer_size=10)
    played = [d for call in spy.own_rollouts() for d in call["result"][0]]
    kept = state_of(run)["state"]["replay_buffer"]
    assert len(played) == 16 and kept == played[-10:]


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


def state_of(run: Path) -> dict:
    """What is in its checkpoint."""
    return torch.load(run / "checkpoint.pt", weights_only=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, folders):
    """A run of two iterations in the default world's small variant, and its summary."""
    with alone():
        return go(tmp_path_factory.mktemp("finished"), folders, env="twenty-questions-subset")


ONE = {"rollouts": 1, "eval_episodes": 1, "critic_pool": 1, "critic_batch": 1, "actor_batch": 1}
SWITCHES = [
    {"baseline": True, "center": False, "dtype": "bfloat16", "anneal_lr": False},
    {"env": "still-toy"},
    {"kl": 0.0, "temperature": 0.7, "actor": "CHAT", "env": "twenty-questions-subset"},
    {"actor": "GPT2", "critic": "BERT", "env": "forgetful-toy", "max_action_tokens": 1, "warmup": 1},
    {"env": "mini-detective", **ONE},
    {"env": "webshop", "actor": "CHAT", **ONE},
    {"env": "guess-my-city", **ONE},
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
    assert rows[-1]["actor/baseline_loss"] > 0 and state_of(run)["modules"]["baseline"]["4.bias"].item() != 0
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
    archer.main(
        small(runs=tmp_path, resume=run, iterations=5, actor=folders["LLAMA"], **changes | {"device": "cpu"})
    )
    assert [row["iteration"] for row in lines_of(run)] == [0, 1, 2, 3, 4, 5]


def test_rollouts_have_text_and_values_and_are_a_data_set(finished):
    """Q and V are those of the critic of that iteration; envs.datasets reads the file as it reads
    demonstrations."""
    run, _ = finished
    lines = lines_of(run, "rollouts.jsonl")
    assert [line["iteration"] for line in lines] == [1] * 4 + [2] * 4
    for line in lines:
        n = len(line["actions"])
        assert line["answer"] in envs.make("twenty-questions-subset").words
        assert len(line["Q"]) == len(line["V"]) == len(line["rewards"]) == n == len(line["observations"]) - 1
        assert all(reply.endswith(("Yes.\n", "No.\n", "uestion.\n")) for reply in line["observations"][1:])
        assert all(math.isfinite(x) for x in line["Q"] + line["V"])
    read, notes = datasets.read_dialogues(str(run / "rollouts.jsonl"))
    assert len(read) == len(lines) and notes == []
    for d, line in zip(read, lines, strict=True):
        for key in ("observations", "actions", "rewards", "terminated", "success"):
            assert d[key] == line[key]


def test_the_values_in_rollouts_are_the_critics(finished, folders):
    """Of the last iteration, behind whose updates the checkpoint was written; the smaller of the twins."""
    run, _ = finished
    body = models.load(AutoModel, folders["LLAMA"], small())
    critic = archer.Critic(body, 0.0, "float32")
    critic.load_state_dict(state_of(run)["modules"]["critic"])
    for line in lines_of(run, "rollouts.jsonl")[-4:]:
        for k, action in enumerate(line["actions"]):
            v, q = value_alone(critic, line, k, action)
            assert [line["Q"][k], line["V"][k]] == pytest.approx([q.min().item(), v.min().item()], abs=1e-4)


def test_what_is_logged_is_of_its_own_iteration(spied):
    """Of its dialogues, the mean of its updates, and its first four dialogues as samples."""
    samples = lines_of(spied.folder, "rollouts.jsonl")
    for row, rollout in zip(lines_of(spied.folder), spied.own_rollouts(), strict=True):
        n, (played, nll) = row["iteration"], rollout["result"]
        assert row.pop("time/cpu_seconds") > 0
        if n == 0:
            assert row == spied.of("evaluate")[0]["result"] | {"iteration": 0}
            continue
        assert envs.summarise(played, "rollout/{}").items() <= row.items()
        assert row["rollout/nll"] == pytest.approx(np.mean(nll)) and len(nll) == len(states(played))
        for name in ("critic_update", "actor_update"):
            logs = [call["result"] for call in spied.of(name) if call["iteration"] == n]
            for tag, figure in runs.means(logs).items():
                assert row.get(tag) == (None if math.isnan(figure) else figure)
            assert any(tag.startswith(name.split("_")[0] + "/") for tag in row) == bool(logs)
        own = [line for line in samples if line["iteration"] == n]
        assert [line["actions"] for line in own] == [d["actions"] for d in played]


def test_what_is_saved_loads_elsewhere_and_is_a_start(finished, tmp_path, folders):
    """Actor and critic in transformers, as they are in the checkpoint with all else that learns."""
    run, _ = finished
    saved = state_of(run)
    modules = {"actor", "critic", "target_critic", "baseline", "actor_optimizer", "critic_optimizer"}
    assert set(saved["modules"]) == modules and len(saved["state"]["replay_buffer"]) == 12
    for name, auto, prefix in (("actor", AutoModelForCausalLM, ""), ("critic", AutoModel, "body.")):
        weights = auto.from_pretrained(run / name).state_dict()
        tokenizer = AutoTokenizer.from_pretrained(run / name)
        assert tokenizer.decode(tokenizer("Is it a dog?").input_ids) == "Is it a dog?"
        assert all(torch.equal(p, saved["modules"][name][prefix + key]) for key, p in weights.items())
    again, _ = go(tmp_path, folders, actor=run / "actor", critic=run / "critic", iterations=0)
    assert [row["iteration"] for row in lines_of(again)] == [0]


# --------------------------------------------------------------------------- dialogues that are too long
def test_a_dialogue_longer_than_the_context_is_cut_and_counted(folders, tmp_path):
    """It never ends the run: a context of 150 tokens."""
    run, _ = go(tmp_path, folders, actor=folders["SHORT"], env="twenty-questions-subset", iterations=3)
    _, *rows = lines_of(run)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
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
    actor = models.load(AutoModelForCausalLM, folders["SHORT"], small())
    played, nll = play("twenty-questions-subset", actor)
    limit = 150 - 4 * 6
    for d in played:
        *lengths, length = [len(before(d, k, actor.tokenizer, True)) for k in range(len(d["actions"]) + 1)]
        assert d["cut"] == (length > limit and not d["terminated"] and len(d["actions"]) < 20)
        assert max(lengths) <= limit
    assert len(nll) == len(states(played)) and any(d["cut"] for d in played)
    assert play("twenty-questions-subset", actor, max_action_tokens=37) == ([], [])


# ------------------------------------------------------------------------ stopped, killed, gone on with
CASES = [
    {"critic": "BERT", "baseline": True},
    {"env": "forgetful-toy", "buffer_size": 6, "critic": "GPT2"},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_2n_iterations_are_n_and_n_resumed(tmp_path, folders, changes):
    """To the bit. Fails for whatever is not in the checkpoint: random states, optimisers, target, buffer."""
    changes = {key: folders.get(value, value) for key, value in changes.items()} | {"anneal_lr": False}
    changes |= {"eval_every": 1, "warmup": 1}
    whole, _ = go(tmp_path / "whole", folders, iterations=4, **changes)
    half, _ = go(tmp_path / "half", folders, iterations=2, **changes)
    early = state_of(half)
    go(tmp_path / "half", folders, iterations=4, resume=half, **changes)
    the_same_run(half, whole)
    assert_equal(early["torch_rng"], state_of(half)["torch_rng"])  # its numbers differ from device to device


def the_same_run(a: Path, b: Path):
    """To the bit, but for what a clock measured."""
    assert timeless(a) == timeless(b)
    assert (a / "rollouts.jsonl").read_bytes() == (b / "rollouts.jsonl").read_bytes()
    one, other = state_of(a), state_of(b)
    for key in ("rng", "torch_rng", "iteration", "state", "modules"):
        assert_equal(one[key], other[key])
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


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_resumed_with_another_learning_rate(tmp_path, folders, name):
    """What the message about a divergence advises must have an effect."""
    run, _ = go(tmp_path, folders)
    before_it = state_of(run)["modules"][name]
    go(tmp_path, folders, resume=run, iterations=3, **{f"{name}_lr": 1e-9})
    after = state_of(run)["modules"][name]
    assert max((before_it[key] - after[key]).abs().max() for key in before_it) < 1e-6


# ------------------------------------------------------------------------- adapters, less activations
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_gradient_checkpointing_changes_no_number(actor, kind, folders, monkeypatch):
    """Gradients and samples to the bit; passes with gradients keep less, passes without have their cache."""
    played, sizes = with_rewards(play("toy", actor, n=4)[0]), []
    critic, baseline = critic_of(actor, kind, folders=folders), archer.mlp(32, 32, 0.3)
    target, ref_model = copy.deepcopy(critic), copy.deepcopy(actor)

    def results():
        kept = []
        options = (still(actor, baseline), played, small(baseline=True), np.random.default_rng(9))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            figures = archer.critic_update(critic, target, still(critic), played, small())
            figures |= archer.actor_update(actor, ref_model, critic, baseline, *options)
        sizes.append(sum(kept))
        return figures, torch.cat([gradient(critic), gradient(actor), gradient(baseline)])

    expected, whole = results()
    for model in (actor, critic.body):
        models.checkpoint_activations(model)
    for _ in range(2):  # what the first has changed of a model changes nothing in the second
        figures, again = results()
        assert figures == expected and torch.equal(again, whole)
    calls = heard(monkeypatch)
    assert max(sizes[1:]) < 0.7 * sizes[0]
    play("toy", actor, n=2)
    assert calls[-1]["memory"].cache.get_seq_length() > 0


LORA = {"lora": True, "lora_rank": 4, "critic": "BERT", "micro_batch": 2, "gradient_checkpointing": True}


@pytest.mark.external
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_all_that_learns_of_the_actor(tmp_path, folders, dtype):
    """The rest is frozen in --dtype. The KL is that from the model of the start, to which a resumed run
    comes back, too; what is saved is the actor, whole and as an adapter."""
    pytest.importorskip("peft", reason="needs the package peft")
    changes = {key: folders.get(value, value) for key, value in LORA.items()}
    changes |= {"dtype": dtype, "anneal_lr": False, "actor_lr": 5e-2, "eval_every": 1, "warmup": 1}
    with pytest.MonkeyPatch.context() as patch:
        seen, update = [], archer.actor_update
        patch.setattr(archer, "actor_update", lambda *given: seen.append(given[:2]) or update(*given))
        whole, _ = go(tmp_path / "whole", folders, iterations=4, **changes)
        half, _ = go(tmp_path / "half", folders, iterations=2, **changes)
        go(tmp_path / "half", folders, iterations=4, resume=half, **changes)
    the_same_run(half, whole)
    kls = [row["actor/kl"] for row in lines_of(whole)[2:]]
    assert abs(kls[0]) < 1e-6 and min(kls[1:]) > 1e-3

    start = AutoModelForCausalLM.from_pretrained(folders["LLAMA"])
    (actor, ref_model), *_ = seen
    assert ref_model is actor
    for name, p in actor.named_parameters():
        assert p.dtype == (torch.float32 if "lora" in name else getattr(torch, dtype))
        assert p.requires_grad == ("lora" in name)
    ids = torch.tensor([[5, 6, 7]])
    learned, first = actor(ids).logits.float(), start(ids).logits
    near = 0.1 * (learned - first).norm() if dtype == "bfloat16" else 1e-4
    with models.without_adapters(actor):
        assert (actor(ids).logits - first).norm() < near
    saved = [models.load(AutoModelForCausalLM, str(whole / name), small()) for name in SAVED]
    for model in saved:
        assert (model(ids).logits - learned).norm() < near
        assert model.dtype == torch.float32
    assert not (whole / "actor/adapter_config.json").exists()
    modules, rank = state_of(whole)["modules"], 4
    assert {min(p.shape) for p in modules["actor"].values()} == {rank}, "adapters, not the whole model"
    again, _ = go(tmp_path / "again", folders, actor=whole / "actor", iterations=0)
    assert lines_of(again)[0].keys() == lines_of(whole)[0].keys()


SAVED = ("actor", "actor_adapter")


@pytest.mark.external
def test_adapters_ask_for_a_critic(tmp_path, folders):
    pytest.importorskip("peft", reason="needs the package peft")
    with pytest.raises(ValueError, match=r"^--lora: .* give --critic$"):
        go(tmp_path / "runs", folders, lora=True)
    assert not (tmp_path / "runs").exists()


def test_lora_without_its_package_is_a_sentence(tmp_path, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="pip install peft"):
        go(tmp_path / "runs", folders, lora=True, critic=folders["BERT"])
    assert not (tmp_path / "runs").exists()


# ----------------------------------------------------------------------------------------- bad input
def test_a_missing_critic_is_seen_before_anything_is_played(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(archer, "rollout", None)
    with pytest.raises(ValueError, match=r"nowhere: there is no such folder$"):
        go(tmp_path / "runs", folders, critic=str(tmp_path / "nowhere"))
    assert not (tmp_path / "runs").exists()


def test_an_utterance_must_fit_into_the_actors_context(folders, tmp_path):
    with pytest.raises(ValueError, match=r"^--max-action-tokens 150: .* reads only 150 tokens$"):
        go(tmp_path / "runs", folders, actor=folders["SHORT"], max_action_tokens=150)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("damage", ["no config", "no tokenizer", "half a file", "a file"])
def test_a_damaged_folder_is_one_line(folders, tmp_path, damage):
    folder = Path(shutil.copytree(folders["LLAMA"], tmp_path / "damaged"))
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    elif damage == "half a file":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    else:
        folder = folder / "config.json"
    with pytest.raises(ValueError, match=f"^no model in {folder}: .+$"):
        models.load(AutoModelForCausalLM, str(folder), small())


def test_a_run_does_not_go_on_with_another_critic(finished, folders, tmp_path):
    run = Path(shutil.copytree(finished[0], tmp_path / "run"))
    before_it = {path: path.read_bytes() for path in run.rglob("*") if path.name != "lock" and path.is_file()}
    args = small(actor=folders["LLAMA"], resume=run, env="twenty-questions-subset", critic=folders["BERT"])
    with pytest.raises(ValueError, match="cannot be resumed"):
        archer.main(args)
    assert before_it == {path: path.read_bytes() for path in before_it}


MISUSE = {
    "rollouts": "--rollouts 0: it must be at least 1",
    "temperature": "--temperature 0: it must be above 0",  # else log-probs would be nan
    "max_action_tokens": "--max-action-tokens 0: it must be at least 1",  # else nothing ends an utterance
    "buffer_size": "--buffer-size 0: it must be at least 1",  # else it would hold all
    "critic_pool": "--critic-pool 0: it must be at least 1",
    "critic_batch": "--critic-batch 0: it must be at least 1",
    "actor_batch": "--actor-batch 0: it must be at least 1",
    "eval_episodes": "--eval-episodes 0: it must be at least 1",
}


def test_a_micro_batch_of_nothing_is_one_line():
    with pytest.raises(ValueError, match=r"^--micro-batch 0: it must be at least 1$"):
        models.micro_batches([1], 0)
    assert models.micro_batches([1, 2, 3], 2) == [[1, 2], [3]]


@pytest.mark.parametrize("flag", MISUSE)
def test_misuse_is_one_line_and_leaves_nothing_behind(tmp_path, flag):
    with pytest.raises(ValueError, match=f"^{MISUSE[flag]}$"):
        archer.main(small(runs=tmp_path / "runs", **{flag: 0}))
    assert not (tmp_path / "runs").exists()


def test_no_episodes_to_evaluate_are_an_error_with_a_sentence(actor):
    with pytest.raises(ValueError, match=r"^0 worlds: at least one must be played, "):
        archer.evaluate(actor, small(eval_episodes=0))


# ------------------------------------------------------------------------------------- a real model
@pytest.mark.external
def test_a_real_model_is_actor_and_critic_in_its_chat_template(tmp_path, smollm, monkeypatch):
    """SmolLM2-135M-Instruct, an iteration of games of three questions; then what was saved, by transformers
    alone.

    The same utterances have the same log-probs in `generate` and in `score`.
    """
    monkeypatch.setattr("envs.worlds.twenty_questions.TwentyQuestions.max_turns", 3)
    calls, scored, score = heard(monkeypatch), [], archer.score

    def listen(*given):
        logits_MV, token_M, hidden_MH, owner_M = score(*given)
        call = calls[-1] | named(score, given, {})
        logp_M = logits_MV.detach().log_softmax(-1).gather(-1, token_M[:, None])[:, 0]
        logp_N = torch.zeros(len(call["utterances"])).index_add(0, owner_M, logp_M)
        scored.append(call | {"scored": logp_N.tolist()})
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
    for call in scored:
        assert len(call["utterances"]) == sum(map(len, call["starts"])) == len(states(call["dialogues"]))
        assert call["logps"] == pytest.approx(call["scored"], abs=1e-4)
        for d, row in zip(call["dialogues"], call["rows"].values(), strict=True):
            asked = [d["observations"][0], *envs.replies(d["observations"], d["actions"])]
            turns = zip(asked, d["actions"], strict=False)
            pairs = [pair for turn in turns for pair in zip(("user", "assistant"), turn, strict=True)]
            chat = [{"role": role, "content": text} for role, text in pairs]
            assert tokenizer.decode(row) + "\n" == tokenizer.apply_chat_template(chat, tokenize=False)
            assert "<|im_start|>user\nQuestions:\n<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(
                row
            )

    for name, auto in {"critic": AutoModel, "actor": AutoModelForCausalLM}.items():
        model, start = (auto.from_pretrained(folder) for folder in (run / name, smollm))
        for now, old in zip(model.parameters(), start.parameters(), strict=True):
            assert not torch.equal(now, old) and torch.allclose(now, old, atol=1e-4)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)


# ------------------------------------------------------------------------------------ what else main hands on
@pytest.mark.parametrize("which", ["actor", "critic"])
def test_gradients_are_clipped_to_max_grad_norm(actor, which):
    played, critic = with_rewards(play("toy", actor, n=4)[0]), critic_of(actor)
    trained = actor if which == "actor" else critic
    before_it = torch.cat([p.detach().flatten() for p in trained.parameters()])
    optimizer, args = torch.optim.SGD(trained.parameters(), lr=1.0), small(max_grad_norm=0.01)
    if which == "actor":
        log = archer.actor_update(
            actor, copy.deepcopy(actor), critic, archer.mlp(32, 32, 0.0), optimizer, played, args, None
        )
    else:
        log = archer.critic_update(critic, copy.deepcopy(critic), optimizer, played, args)
    moved = torch.cat([p.detach().flatten() for p in trained.parameters()]) - before_it
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-2) and log[f"{which}/grad_norm"] > 0.1
