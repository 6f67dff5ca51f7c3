# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers>=5.23,<6", "numpy>=2.4,<3",
#     "gymnasium>=1.4,<2", "rapidfuzz>=3.14,<4", "tyro>=1.0.17,<2", "tensorboard>=2.21,<3", "tqdm>=4.70,<5"]
# ///
"""ArCHer: hierarchical multi-turn RL for language agents, in one file.

    python archer.py --env twenty-questions              # 12 minutes on a CPU core, mean return -15.4 -> -12.6
    python archer.py --env twenty-questions-subset       # 9 minutes, -15.2 -> -5.2
    python archer.py --actor gpt2 --critic roberta-base --warm-start-lr 1e-4 --actor-lr 1e-5 --critic-lr 2e-5
    python archer.py --resume runs/...          python archer.py --play runs/...

The critic works on utterances, off-policy: from a replay buffer it learns what an utterance a is worth in the dialogue
s. The actor works on tokens, on-policy: the advantage of an utterance that it has just written rewards all its tokens.

Paper: Zhou et al. 2024, arXiv:2402.19446
  E1  Q(s,a) <- r + gamma * Vbar(s')                               Eq. 1       td_target
  E2  V(s)   <- E_{a~pi} Qbar(s,a)                                 Eq. 2       value_loss
  E3  grad log pi(a|s) * A,  A = min Q(s,a) - min V(s)             Eq. 3       advantages, reinforce_loss
  E4  A(s,a) - Vtok(s,a_<i): a baseline for each token             Eq. 4       reinforce_loss
  E5  Vtok(s,a_<i) <- A(s,a)                                       Eq. 5       baseline_loss
  E6  V(s)   <- upper expectile of Qbar(s,a) over the data         sec. 3.5    value_loss
Differs from the paper (docs/archer.md has the reasons at length):
  D1  A KL penalty to the warm-started actor (--kl 0): else it drifts to gibberish, which a young critic over-values.
  D2  The critic is a decoder and starts as the warm-started actor (--critic roberta-base); sec. 5.5 finds both equal.
  D3  Advantages minus their batch mean (--no-center): zero over a ~ pi, but not where Q and V disagree.
  D4  The value heads start at the mean discounted return of the first dialogues instead of zero.
  D5  A tiny GPT-2 trained here (--actor gpt2), with measured learning rates. Table 3's 3e-4 and 6e-4 are 32 times the
      released 1e-5 and 2e-5, as the authors sum the gradients of 32 micro-batches, and Adam does not care for scale.
  D6  None from the paper, but from the rule: a time limit ends, too (--no-truncation-is-terminal bootstraps there).
  D7  The warm start learns to foresee replies, too (--no-warm-start-replies), and so what a question reveals.
  D8  The tiny actor's byte pairs may span words (--no-superwords), as in arXiv:2503.13423: 3 tokens a turn, not 9.
  D9  The actor's learning rate falls linearly to zero (--no-anneal-lr): the last steps undo less of the warm start.
From the authors' code: sampled tokens, their end of turn included, are kept until the loss; sampler and scorer are
one distribution; padding cannot leak into positions; the gradients of actor and critic are clipped apart.
"""

import copy
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Literal

import numpy as np
import torch
import transformers
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

import envs
import envs.play
from envs.datasets import read_dialogues


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    env: str = "twenty-questions"  # the world, an id that `python -m envs` lists; some have defaults of their own
    oracle: str = ""  # folder of a seq2seq checkpoint that answers instead of the world's table (paper: flan-t5-small)
    rom: str = ""  # your copy of detective.z5, for --env detective
    webshop_data: str = ""  # folder of the published items and instructions, for --env webshop
    seed: int = 1  # of everything random in the run
    iterations: int = 50  # rounds of rollouts, critic updates and actor updates
    runs: str = "runs"  # folder in which the run's own folder is made
    resume: str = ""  # a run's folder to go on with; its arguments hold, unless given anew
    play: str = ""  # a run's folder: its agent asks and you answer
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # in which the bodies compute; all parameters stay float32
    threads: int = 1  # on the CPU; with one, resuming is exact to the bit, and tiny models are no faster with two

    actor: str = "tiny"  # tiny (a small GPT-2 from scratch) or a causal LM: Hugging Face name or local folder
    critic: str = "tiny"  # tiny (D2), tiny-cls (a small BERT from scratch), or any encoder or decoder, likewise
    width: int = 64  # hidden size of the tiny models
    layers: int = 3  # of the tiny models
    vocabulary: int = 700  # size of the tiny models' byte-pair vocabulary, trained on the demonstrations
    superwords: bool = True  # byte pairs may span words (D8)

    dataset: str = ""  # JSON file of dialogues in the authors' format, instead of the world's own demonstrations
    demonstrations: int = 20_000  # dialogues that the world's scripted player makes for the warm start
    warm_start_epochs: int = 6  # passes over the demonstrations; 0 leaves the actor as it is
    warm_start_lr: float = 8e-3  # its peak; take about 1e-4 for a real checkpoint
    warm_start_replies: bool = True  # learn to foresee the world's replies, too (D7)
    warm_start_batch: int = 16  # dialogues in an update of the warm start

    rollouts: int = 128  # dialogues played in an iteration (authors' configuration: 128)
    buffer_size: int = 16_000  # utterances that the replay buffer holds (paper Fig. 5b; see LOG.md)
    temperature: float = 1.0  # of sampling, and so of scoring
    max_action_tokens: int = 16  # tokens after which an utterance is cut

    critic_loss: Literal["td", "mc", "iql"] = "td"  # E1 and E2, or the ablations of App. D: Monte-Carlo, E6
    critic_lr: float = 5e-4  # paper: 6e-4 in Table 3, 2e-5 in the released configuration; see D5
    critic_updates: int = 40  # updates of the critic in an iteration, each with a Polyak step of the target
    critic_batch: int = 16  # dialogues in an update of the critic
    critic_pool: int = 256  # dialogues that an iteration draws from the buffer for its critic updates
    critic_warmup: int = 440  # critic updates before the actor moves (paper: 20 iterations)
    gamma: float = 0.95  # discount of an utterance (paper: 0.95)
    polyak: float = 0.1  # share of the critic that enters its target copy after every update (paper: 0.1)
    expectile: float = 0.9  # of E6, for --critic-loss iql
    truncation_is_terminal: bool = True  # no bootstrap where the world's time limit cut a dialogue off (D6)

    actor_lr: float = 1e-3  # paper: 3e-4 in Table 3, 1e-5 in the released configuration; see D5
    anneal_lr: bool = True  # the actor's learning rate falls to zero over the iterations (D9)
    actor_updates: int = 4  # updates of the actor in an iteration, each on utterances just sampled
    actor_batch: int = 64  # dialogues in an update of the actor
    kl: float = 0.2  # weight of the KL divergence from the warm-started actor (D1), in units of the return
    center: bool = True  # advantages minus their batch mean (D3)
    baseline: bool = False  # a learned baseline for every token (E4, E5)
    max_grad_norm: float = 1.0  # gradients of actor and critic are clipped to this norm, apart

    eval_every: int = 10  # iterations between evaluations
    eval_episodes: int = 314  # sampled dialogues of an evaluation, in whole passes; fewer than tasks: of the first
    save_every: int = 10  # iterations between checkpoints; Ctrl-C writes one, too


# The command line's other defaults, for worlds that are longer, repeat whole lines or pay rewards of another size (kl).
SETTINGS = {
    "twenty-questions-subset": {"iterations": 40},
    "guess-my-city": {"warm_start_epochs": 4, "iterations": 40},
    "mini-detective": {
        "vocabulary": 1500, "demonstrations": 4000, "warm_start_epochs": 4,
        "rollouts": 64, "critic_pool": 128, "eval_episodes": 96,
    },
    "detective": {
        "vocabulary": 2000, "demonstrations": 1000, "warm_start_epochs": 4, "kl": 2.0, "iterations": 10,
        "rollouts": 48, "critic_pool": 64, "critic_batch": 8, "critic_warmup": 160, "actor_batch": 16,
        "eval_episodes": 64,
    },
    "webshop": {"vocabulary": 1500, "warm_start_epochs": 2, "kl": 0.01, "iterations": 80},
}  # fmt: skip

METRICS = {
    "rollout/return": "undiscounted return of the iteration's dialogues, mean; should rise",
    "rollout/success": "share of dialogues that reached the goal",
    "rollout/length": "utterances in a dialogue, mean",
    "rollout/truncated": "share of dialogues cut off by the time limit; at 1 the return says nothing",
    "rollout/invalid": "share of utterances that the world calls invalid; rising means a drift to gibberish (D1)",
    "rollout/nll": "-log pi(a|s) of an utterance in nats, as sampled; near 0 the actor has stopped exploring",
    "critic/q_loss": "E1, mean square in units of return; should settle, not grow",
    "critic/v_loss": "E2 (or E6), likewise",
    "critic/grad_norm": "before clipping; a jump is a batch that the critic cannot explain",
    "critic/explained_variance": "of the Monte-Carlo returns by V, before the update; below 0 a constant is better",
    "critic/bias": "V minus Monte-Carlo return at the first turn, in units of return; within 10 %, lower at first",
    "actor/loss": "E3 (E4 with a baseline); its size means little",
    "actor/kl": "KL to the warm-started actor, nats an utterance; a jump means a collapse",
    "actor/entropy": "of the actor's next token, nats summed over an utterance; near 0 it has stopped exploring",
    "actor/advantage_mean": "before centring; far from 0 Q and V disagree about the current actor (D3)",
    "actor/advantage_std": "spread of the advantages; the signal, and the critic's noise",
    "actor/grad_norm": "before clipping",
    "actor/baseline_loss": "E5, mean square; with --baseline only",
    "eval/return": "return with sampled utterances, every task equally often",
    "eval/success": "share of these that reached the goal",
    "eval/return_greedy": "return with the likeliest tokens, every task once",
    "eval/success_greedy": "share of these that reached the goal",
    "time/utterances_per_second": "played and learned from, whole iterations counted",
}


def stop(message: str):
    """Ends the program for bad input: one line that says what is wrong and what to do, exit code 2."""
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
@dataclass
class Trajectory:
    """A dialogue of n turns: n + 1 observations, the last being what the world said at the end."""

    observations: list[str]
    actions: list[str]  # as the world took them
    rewards: list[float]
    terminated: bool  # the world ended it; if not, its time limit did
    answer: str
    action_ids: list[list[int]] = field(default_factory=list)  # as sampled, end of turn included; [] if not ours

    def __len__(self) -> int:
        return len(self.actions)


@lru_cache(maxsize=500_000)  # worlds repeat themselves: each piece of text is tokenised once
def encode(tokenizer, text: str) -> list[int]:
    """Token ids of a piece of text. The list is shared: do not change it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@lru_cache(maxsize=500_000)
def turn_ids(tokenizer, action: str, reply: str, sampled: tuple[int, ...]) -> list[int]:
    """Token ids of a turn. Sampled ones (the last is the end of turn) stay where they spell what the world took."""
    is_kept = action != "" and tokenizer.decode(list(sampled[:-1])) == action  # "": another vocabulary's decode to it
    return (list(sampled[:-1]) if is_kept else encode(tokenizer, action)) + encode(tokenizer, reply)


def lay_out(trajectories: list[Trajectory], tokenizer, append_only: bool):
    """The tokens of dialogues: trunks, and for each of their S states its trunk and how many tokens of it it sees.

    A dialogue of n turns has n + 1 states. Where the history only grows, one trunk holds all of them.
    """
    trunks, states = [], []
    for t in trajectories:
        texts = t.observations[:1] if append_only else t.observations
        states += [(row, len(encode(tokenizer, text))) for row, text in enumerate(texts, len(trunks))]
        trunks += [encode(tokenizer, text) for text in texts]
        replies = envs.replies(t.observations, t.actions) if append_only else []
        for action, reply, sampled in zip(t.actions, replies, t.action_ids or [()] * len(t), strict=False):
            trunks[-1] = trunks[-1] + turn_ids(tokenizer, action, reply, tuple(sampled))
            states.append((len(trunks) - 1, len(trunks[-1])))
    return trunks, states


def states_acted(trajectories: list[Trajectory]) -> list[int]:
    """Which of the trajectories' states in a row are those in which an utterance was made; the next state is one on."""
    last = np.cumsum([len(t) + 1 for t in trajectories]) - 1
    return np.delete(np.arange(last[-1] + 1), last).tolist()


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: B trunks, T their tokens, S states, N utterances, M all the tokens of all utterances in a row,
# V the vocabulary, H hidden, 2 the twin critics. An utterance includes its end of turn. In `speak` and `forward` also
# K tokens that the cache lacks or Q that ask, N the states of one trunk, L the tokens written.
def td_target(reward_N: torch.Tensor, next_v_N2: torch.Tensor, terminated_N: torch.Tensor, gamma: float):
    """E1: r + gamma * Vbar(s') [N, 2], each of the twins from its own; no bootstrap after a terminal turn.

    >>> td_target(torch.tensor([-1.0, 0.0]), torch.tensor([[-2.0], [-9.0]]), torch.tensor([0.0, 1.0]), 0.5).tolist()
    [[-2.0], [0.0]]
    """
    return reward_N[:, None] + gamma * (1 - terminated_N[:, None]) * next_v_N2  # E1


def value_loss(v_N2: torch.Tensor, q_N2: torch.Tensor, expectile: float = 0.5) -> torch.Tensor:
    """E2 at expectile 0.5 (half the square error of V to Qbar), E6 above it (V leans to the best Qbar in the data)."""
    gap_N2 = q_N2 - v_N2
    weight_N2 = torch.where(gap_N2 > 0, gap_N2.new_tensor(expectile), gap_N2.new_tensor(1 - expectile))  # E6
    return (weight_N2 * gap_N2**2).sum(-1).mean()  # E2


def mc_returns(rewards: list[float], gamma: float) -> list[float]:
    """Discounted return from every turn to the end of the dialogue.

    >>> mc_returns([-1.0, -1.0, 0.0], 0.5)
    [-1.5, -1.0, 0.0]
    """
    returns = [0.0]
    for reward in reversed(rewards):
        returns.append(reward + gamma * returns[-1])
    return returns[:0:-1]


def advantages(q_N2: torch.Tensor, v_N2: torch.Tensor) -> torch.Tensor:
    """E3: min Q - min V [N], the minimum over the twins."""
    return q_N2.min(-1).values - v_N2.min(-1).values  # E3


def reinforce_loss(logp_M, advantage_N, owner_M, baseline_M=0.0) -> torch.Tensor:
    """E3: -mean over utterances of sum_i log pi(a_i|s,a_<i) * A(s,a); E4 with a baseline. `owner_M`: a token's own."""
    weight_M = (advantage_N[owner_M] - baseline_M).detach()  # E4
    return -(logp_M * weight_M).sum() / len(advantage_N)  # E3


def baseline_loss(baseline_M, advantage_N, owner_M) -> torch.Tensor:
    """E5: mean over utterances of the mean over their tokens of (A(s,a) - Vtok(s,a_<i))^2."""
    length_N = torch.bincount(owner_M, minlength=len(advantage_N))
    square_M = (advantage_N[owner_M].detach() - baseline_M) ** 2
    return (square_M / length_N[owner_M]).sum() / len(advantage_N)  # E5


def kl_divergence(logp_MV, start_logp_MV) -> torch.Tensor:
    """D1: KL(pi || pi_start) in nats of every token's whole distribution [M]; no sampling noise."""
    return (logp_MV.exp() * (logp_MV - start_logp_MV)).sum(-1)


@torch.no_grad()
def polyak_update(target: nn.Module, source: nn.Module, share: float) -> None:
    """target <- (1 - share) * target + share * source, for every parameter."""
    for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
        slow.lerp_(fast, share)


# ---------------------------------------------------------- 4. models
def pack(trunks: list[list[int]], utterances: list[tuple[int, int, list[int]]]):
    """Many utterances that continue the same dialogues, for one causal forward pass.

    An utterance is (trunk, number of the trunk's tokens before it, its tokens). It forks off there and sees neither the
    rest of the trunk nor other utterances; what it begins with as the trunk goes on, it shares. Returns ids [B, T],
    positions [B, T], visible [B, T, T] (query, key) and each utterance's columns: those that predict its tokens, and
    last the one that has seen all of it.
    """
    # Of every token: id, position, how many tokens of the trunk it sees, and whose it is (0 the trunk, -1 padding).
    rows = [[(token, i, i + 1, 0) for i, token in enumerate(trunk)] for trunk in trunks]
    columns = []
    for n, (row, start, ids) in enumerate(utterances, 1):
        follows = trunks[row][start : start + len(ids)]
        shared = next((i for i, token in enumerate(follows) if token != ids[i]), len(follows))
        first, rest = len(rows[row]), ids[shared:]
        columns.append([*range(start - 1, start + shared), *range(first, first + len(rest))])
        rows[row] += [(token, i, start + shared, n) for i, token in enumerate(rest, start + shared)]
    T = max(map(len, rows))
    padded = np.array([row + [(0, 0, 0, -1)] * (T - len(row)) for row in rows])  # six times as fast as torch.tensor
    ids, position, seen, owner = torch.from_numpy(padded).unbind(-1)
    visible = (owner[:, None] == 0) & (position[:, None] < seen[:, :, None])
    visible |= (owner[:, None] == owner[:, :, None]) & torch.ones(T, T, dtype=torch.bool).tril()
    return ids, position, visible, columns


def precision(body):
    """The context to run a model in: with --dtype bfloat16 it computes so, while its parameters stay float32."""
    is_half = getattr(body.config, "compute_dtype", "float32") == "bfloat16"
    return torch.autocast(body.device.type, torch.bfloat16, enabled=is_half)


def forward(body, ids, position, visible, cache=None, use_cache: bool = False):
    """One pass of a decoder; a token sees `visible` [B, Q, K]. Returns last hidden states [B, Q, H] and the cache."""
    tokens, limit = int(position.max()) + 1, getattr(body.config, "max_position_embeddings", sys.maxsize)
    if tokens > limit:
        stop(f"a dialogue has {tokens} tokens, {body.config.model_type} reads {limit}; take one with a longer context")
    if len(ids) > 64 and not use_cache:  # rows of like lengths together, or the longest would pad them all
        length_B = (torch.arange(1, ids.shape[1] + 1) * (position > 0)).amax(1).clamp(min=1)
        hidden_BTH = torch.zeros(*ids.shape, body.config.hidden_size, device=body.device)
        for rows in length_B.argsort().split(64):
            T = int(length_B[rows].max())
            hidden_BTH[rows, :T] = forward(body, ids[rows, :T], position[rows, :T], visible[rows, :T, :T])[0]
        return hidden_BTH, None
    blocked = torch.finfo(torch.bfloat16).min  # not -inf: the softmax of a row of padding must stay finite
    bias = torch.zeros(visible.shape).masked_fill(~visible, blocked)[:, None]
    inputs = transformers.BatchEncoding({"input_ids": ids, "position_ids": position, "attention_mask": bias})
    with precision(body):
        output = body(**inputs.to(body.device), past_key_values=cache, use_cache=use_cache)
    return output.last_hidden_state.float(), output.past_key_values


def score(actor, trunks, utterances, temperature: float):
    """Of all tokens of the utterances: logits [M, V] they are drawn from, ids, last hidden states [M, H], owners."""
    # The last token of an utterance, its end of turn, is predicted but never read: it need not be fed.
    *packed, columns = pack(trunks, [(row, start, ids[:-1]) for row, start, ids in utterances])
    hidden_BTH, _ = forward(actor.base_model, *packed)
    flat = [(n, row, token) for n, (row, _, ids) in enumerate(utterances) for token in ids]
    owner_M, row_M, token_M = torch.from_numpy(np.array(flat)).to(actor.device).T
    hidden_MH = hidden_BTH[row_M, [column for own in columns for column in own]]
    return actor.get_output_embeddings()(hidden_MH) / temperature, token_M, hidden_MH, owner_M


class Critic(nn.Module):
    """Twin Q and V heads on one language model.

    A decoder (D2) reads the whole dialogue in one causal pass: V at the last token of each observation, Q at the end
    of turn of each utterance. An encoder reads state and utterance one by one and gives Q both [CLS] vectors.
    """

    def __init__(self, body, tokenizer, append_only: bool, value: float):
        super().__init__()
        self.body, self.tokenizer, self.append_only = body, tokenizer, append_only
        self.is_encoder = body.config.model_type in ENCODERS
        H = body.config.hidden_size
        self.v_heads = nn.ModuleList(mlp(H, H, value) for _ in range(2))
        self.q_heads = nn.ModuleList(mlp(2 * H if self.is_encoder else H, H, value) for _ in range(2))

    def forward(self, trajectories: list[Trajectory], at: list[int], utterances: list[str]):
        """V of all states [S, 2], n + 1 for each trajectory, and Q [N, 2] of `utterances[i]` in state `at[i]`."""
        if self.is_encoder:
            v_SH = self.cls([observation for t in trajectories for observation in t.observations])
            q_NH = torch.cat([v_SH[at], self.cls(utterances)], -1)
        else:
            trunks, states = lay_out(trajectories, self.tokenizer, self.append_only)
            end = encode(self.tokenizer, "\n")
            forks = [(*states[s], encode(self.tokenizer, text) + end) for s, text in zip(at, utterances, strict=True)]
            *packed, columns = pack(trunks, forks)
            hidden_BTH, _ = forward(self.body, *packed)
            row_S, length_S = torch.tensor(states).T
            v_SH = hidden_BTH[row_S, length_S - 1]
            q_NH = hidden_BTH[row_S[at], [own[-1] for own in columns]]
        return torch.cat([h(v_SH) for h in self.v_heads], -1), torch.cat([h(q_NH) for h in self.q_heads], -1)

    def cls(self, texts: list[str]) -> torch.Tensor:
        """[CLS] vectors [N, H]; a text that is too long loses its beginning."""
        limit = self.body.config.max_position_embeddings - 2  # RoBERTa keeps two positions for itself
        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        with precision(self.body):
            return self.body(**inputs.to(self.body.device)).last_hidden_state[:, 0].float()


def mlp(inputs: int, width: int, value: float) -> nn.Module:
    """Two hidden layers and one output, which starts near `value`."""
    last = nn.Linear(width, 1)
    nn.init.constant_(last.bias, value)  # D4
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)


def make_tokenizer(texts: list[str], size: int, superwords: bool = True):
    """A byte-pair vocabulary trained on these texts, with all bytes in it: any text can be written."""
    tokenizer, special = Tokenizer(models.BPE()), "<|endoftext|>"
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not superwords)
    if superwords:  # D8: merges stay within what this finds, a whole question or a whole answer
        pieces = pre_tokenizers.Split(Regex(r"[^\n?]*[?\n]"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, tokenizer.pre_tokenizer])
    options = {"special_tokens": [special], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False, **options))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special, pad_token=special)


def load(auto, source: str, flag: str):
    """A model and its tokenizer, by Hugging Face name or local folder."""
    try:
        model, found = auto.from_pretrained(source, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        if missing := [name for name in found["missing_keys"] if "pooler" not in name]:
            raise ValueError(f"no weights for {missing[0]}")  # else they would be drawn at random
        if not encode(tokenizer, "a"):
            raise ValueError("no tokenizer")
        return model, tokenizer
    except Exception as error:  # what a folder can hold has no end, nor have the errors
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        stop(f"{flag} {source}: {reason}; give tiny, a local folder or a Hugging Face name")


def make_actor(args: Args, source: str, texts: list[str]):
    """The actor, with its tokenizer; `source` is tiny, a name or a folder, `texts` train the tiny one's vocabulary."""
    if source == "tiny":  # D5
        tokenizer = make_tokenizer(texts, args.vocabulary, args.superwords)
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, n_positions=1024,
            n_embd=args.width, n_layer=args.layers, n_head=max(1, args.width // 32),
            activation_function="gelu_pytorch_tanh",  # gelu_new in one kernel: a quarter of the time of a step
            initializer_range=0.1,  # GPT-2's 0.02 is for 768 wide; smaller learns slower, see LOG.md
        )  # fmt: skip
        actor = transformers.AutoModelForCausalLM.from_config(config)
    else:
        actor, tokenizer = load(transformers.AutoModelForCausalLM, source, "--actor")
    actor.tokenizer, actor.config.compute_dtype = tokenizer, args.dtype
    return actor.to(args.device, torch.float32).eval()  # eval: no dropout, ever


def make_critic(args: Args, source: str, actor, append_only: bool, value: float) -> Critic:
    """The critic; `source` is tiny, tiny-cls, a name or a folder."""
    tokenizer = actor.tokenizer
    if source == "tiny":
        body = copy.deepcopy(actor.base_model)  # D2
    elif source == "tiny-cls":
        tokenizer, cls = copy.deepcopy(tokenizer), (tokenizer.eos_token, tokenizer.eos_token_id)
        with_cls = processors.TemplateProcessing(f"{cls[0]} $A", special_tokens=[cls])
        tokenizer.backend_tokenizer.post_processor = with_cls
        config = transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=args.width, intermediate_size=4 * args.width,
            num_hidden_layers=args.layers, num_attention_heads=max(1, args.width // 32),
        )  # fmt: skip
        body = transformers.AutoModel.from_config(config)
    else:
        body, tokenizer = load(transformers.AutoModel, source, "--critic")
    tokenizer.truncation_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # masked, so that any will do
    body.config.compute_dtype = args.dtype
    return Critic(body.float(), tokenizer, append_only, value).to(args.device).eval()


# ---------------------------------------------------------- 5. rollouts
def spoken(tokenizer, ids: list[int]) -> str:
    """The text of an utterance as a world takes it: up to the first newline, without blanks at its ends."""
    return tokenizer.decode(ids, skip_special_tokens=True).split("\n", 1)[0].strip()


@lru_cache(maxsize=8)
def turn_enders(tokenizer, size: int) -> torch.Tensor:
    """Which tokens [V] end a turn: all whose text holds a newline, and the end of text."""
    return torch.tensor([token == tokenizer.eos_token_id or "\n" in tokenizer.decode([token]) for token in range(size)])


def speak(actor, trunks, states, args: Args, generator, greedy: bool = False, memory=None):
    """Samples an utterance in each of S states, given as (trunk, number of the trunk's tokens before it).

    A trunk is read once for all its states, and only behind what `memory` holds of it: the key-value cache of all B
    trunks, and which of the cache's columns are no padding [B, T]. Returns token ids [S][...], log-probs [S] and the
    memory of the whole trunks.
    """
    B, (row_S, length_S) = len(trunks), torch.tensor(states).T.contiguous()
    cache, real_BT = memory or (None, torch.zeros(B, 0, dtype=torch.bool))
    known_B1 = real_BT.sum(1, keepdim=True)
    pieces = [trunk[n:] for trunk, n in zip(trunks, known_B1[:, 0].tolist(), strict=True)]
    ids, position, visible_BKK, _ = pack(pieces, [])
    visible = torch.cat([real_BT[:, None].expand(-1, ids.shape[1], -1), visible_BKK], -1)
    hidden_BKH, cache = forward(actor.base_model, ids, known_B1 + position, visible, cache, use_cache=True)
    new_BK = torch.arange(ids.shape[1]) < torch.tensor([[len(piece)] for piece in pieces])
    real_BT = torch.cat([real_BT, new_BK], 1)

    slot_S = torch.arange(len(states)) - torch.searchsorted(row_S, row_S)  # how many states of its trunk precede it
    N = int(slot_S.max()) + 1
    start_BN, open_BN = (known_B1 + 1).repeat(1, N), torch.zeros(B, N, dtype=torch.bool)
    start_BN[row_S, slot_S], open_BN[row_S, slot_S] = length_S, True
    hidden_BNH = hidden_BKH[torch.arange(B)[:, None], start_BN - known_B1 - 1]
    visible_BNT = real_BT[:, None] & (real_BT.cumsum(1)[:, None] <= start_BN[..., None])
    head, (tokens, logps, counts) = actor.get_output_embeddings(), ([], [], [])
    enders = turn_enders(actor.tokenizer, len(head.weight))
    while open_BN.any() and len(tokens) < args.max_action_tokens:
        if tokens:
            visible_BNT = torch.cat([visible_BNT, torch.eye(N, dtype=torch.bool).expand(B, N, N)], -1)  # each its own
            position = (start_BN + len(tokens) - 1) * open_BN  # what has ended has no place in the context any more
            hidden_BNH, cache = forward(actor.base_model, tokens[-1], position, visible_BNT, cache, use_cache=True)
        logp_BNV = (head(hidden_BNH) / args.temperature).log_softmax(-1)
        if greedy:
            token_BN = logp_BNV.argmax(-1)
        else:  # the first token whose cumulative probability exceeds a uniform number
            u_BN1 = torch.rand(B, N, 1, generator=generator, device=generator.device)
            token_BN = (logp_BNV.exp().cumsum(-1) < u_BN1).sum(-1).clamp(max=len(enders) - 1)
        logps.append(logp_BNV.gather(-1, token_BN[..., None])[..., 0].cpu())
        tokens.append(token_BN.cpu())
        counts.append(open_BN)
        open_BN = open_BN & ~enders[tokens[-1]]
    if spare := cache.get_seq_length() - real_BT.shape[1]:
        cache.crop(-spare)  # the utterances: the next turn reads what the world took of them
    tokens_SL, logp_SL, counts_SL = (torch.stack(x, -1)[row_S, slot_S] for x in (tokens, logps, counts))
    written = [ids[is_own].tolist() for ids, is_own in zip(tokens_SL, counts_SL, strict=True)]
    return written, (logp_SL * counts_SL).sum(-1), (cache, real_BT)


@torch.no_grad()
def rollout(actor, worlds, args: Args, generator, seeds=None, indices=None, greedy=False):
    """Plays all worlds to their end, in lockstep. Returns the trajectories and -log pi of every utterance.

    Where the history only grows, the key-value cache is kept across turns, and a turn reads only what is new.
    """
    worlds.reset(seeds=seeds, indices=indices)
    action_ids, nll, append_only = [[] for _ in worlds.envs], [], worlds.envs[0].append_only
    alive, memory = worlds.alive(), None
    while alive:
        played = [Trajectory(**worlds.dialogues[i], action_ids=action_ids[i]) for i in alive]
        trunks = [lay_out([t], actor.tokenizer, append_only)[0][-1] for t in played]
        states = [(b, len(trunk)) for b, trunk in enumerate(trunks)]
        written, logp_B, (cache, real_BT) = speak(actor, trunks, states, args, generator, greedy, memory)
        nll += (-logp_B).tolist()
        for i, ids in zip(alive, written, strict=True):
            action_ids[i].append(ids)
        worlds.step([spoken(actor.tokenizer, ids[-1]) for ids in action_ids])  # those that have ended stay as they are
        before, alive, memory = alive, worlds.alive(), None
        if append_only and alive:
            kept = [before.index(i) for i in alive]
            cache.batch_select_indices(torch.tensor(kept, device=actor.device))
            memory = cache, real_BT[kept]
    return [Trajectory(**d, action_ids=ids) for d, ids in zip(worlds.dialogues, action_ids, strict=True)], nll


@torch.no_grad()
def fresh_utterances(actor, trajectories, append_only: bool, args: Args, generator):
    """One new utterance of the current actor in every state of every trajectory, as token ids."""
    fresh, chunk = [], 32 if append_only else 4  # dialogues read at a time; else each of their states is a trunk
    for first in range(0, len(trajectories), chunk):
        part = trajectories[first : first + chunk]
        in_order = iter(speak(actor, *lay_out(part, actor.tokenizer, append_only), args, generator)[0])
        fresh += [[next(in_order) for _ in t.observations] for t in part]
    return fresh


# ---------------------------------------------------------- 6. updates
def descend(loss: torch.Tensor, optimizer, module, max_norm: float, what: str) -> float:
    """One step of an optimiser with clipped gradients; returns their norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    if not torch.isfinite(loss + norm):
        stop(f"the {what} diverged (loss {loss.item()}, gradient {norm.item()}): lower its learning rate")
    optimizer.step()
    return norm.item()


def warm_start(actor, demonstrations: list[Trajectory], append_only: bool, args: Args, rng) -> None:
    """Supervised learning of the demonstrations' utterances, their ends of turn included."""
    optimizer = torch.optim.AdamW(actor.parameters(), lr=args.warm_start_lr, betas=(0.9, 0.98), weight_decay=0.01)
    orders, size = [rng.permutation(len(demonstrations)) for _ in range(args.warm_start_epochs)], args.warm_start_batch
    batches = [order[i : i + size] for order in orders for i in range(0, len(order), size)]
    limit = getattr(actor.config, "max_position_embeddings", sys.maxsize)  # a reply is cut to what there is room for
    for step, batch in enumerate(bar := tqdm(batches, desc="warm start", unit="update", disable=None)):
        share = min(1, (step + 1) / 50, 1.02 - step / len(batches))  # up in 50 updates, then linearly down
        optimizer.param_groups[0]["lr"] = args.warm_start_lr * share
        part, tokenizer = [demonstrations[i] for i in batch], actor.tokenizer
        said = [encode(tokenizer, action) + encode(tokenizer, "\n") for t in part for action in t.actions]
        if args.warm_start_replies:  # D7: behind the end of turn, where the critic will read Q
            replies = [encode(tokenizer, reply) for t in part for reply in envs.replies(t.observations, t.actions)]
            said = [ids + reply for ids, reply in zip(said, replies, strict=True)]
        trunks, states = lay_out(part, tokenizer, append_only)
        acted = states_acted(part)
        utterances = [(*states[s], ids[: limit - states[s][1]]) for s, ids in zip(acted, said, strict=True)]
        logits_MV, token_M, _, _ = score(actor, trunks, utterances, temperature=1.0)
        loss = nn.functional.cross_entropy(logits_MV, token_M)
        descend(loss, optimizer, actor, 1.0, "warm start")
        bar.set_postfix(nll=f"{loss.item():.2f}", refresh=False)


def critic_update(critic, target, optimizer, trajectories, fresh, args: Args) -> dict[str, float]:
    """One step on E1 and E2, or what else --critic-loss names, and one Polyak step of the target.

    `fresh`, for td, has an utterance of the current actor in every state of every trajectory, as text.
    """
    acted, taken = states_acted(trajectories), [action for t in trajectories for action in t.actions]
    ends = [[False] * len(t) + [t.terminated or args.truncation_is_terminal] for t in trajectories]  # D6
    is_end_S = torch.tensor([end for row in ends for end in row], device=critic.body.device)
    next_N = [s + 1 for s in acted]
    reward_N = torch.tensor([reward for t in trajectories for reward in t.rewards], device=is_end_S.device)
    return_N = reward_N.new_tensor([g for t in trajectories for g in mc_returns(t.rewards, args.gamma)])
    at, said = acted, taken  # where V learns, and from the Q of which utterances
    if args.critic_loss == "td":  # the current actor's, in every state that is no end
        at = (~is_end_S).nonzero()[:, 0].tolist()
        texts = [text for row in fresh for text in row]
        said = [texts[s] for s in at]

    v_S2, q_N2 = critic(trajectories, acted, taken)
    with torch.no_grad():
        target_v_S2, target_q_N2 = target(trajectories, at, said)
        q_target_N2 = td_target(reward_N, target_v_S2[next_N], is_end_S[next_N].float(), args.gamma)
        if args.critic_loss == "mc":
            q_target_N2 = target_q_N2 = return_N[:, None].expand(-1, 2)
    q_loss = nn.functional.mse_loss(q_N2, q_target_N2)  # E1
    v_loss = value_loss(v_S2[at], target_q_N2, args.expectile if args.critic_loss == "iql" else 0.5)  # E2, E6
    norm = descend(q_loss + v_loss, optimizer, critic, args.max_grad_norm, "critic")
    polyak_update(target, critic, args.polyak)

    error_N = v_S2[acted].detach().mean(-1) - return_N
    first_turns = np.cumsum([0] + [len(t) for t in trajectories[:-1]])
    metrics = {"critic/q_loss": q_loss.item(), "critic/v_loss": v_loss.item(), "critic/grad_norm": norm}
    metrics["critic/explained_variance"] = 1 - (error_N.var() / return_N.var().clamp(min=1e-8)).item()
    return metrics | {"critic/bias": error_N[first_turns].mean().item()}


def actor_update(actor, start_actor, critic, baseline, optimizer, trajectories, fresh, append_only, args):
    """One step on E3 with utterances just sampled in replayed states, `fresh`, as token ids."""
    acted, tokenizer = states_acted(trajectories), actor.tokenizer
    trunks, states = lay_out(trajectories, tokenizer, append_only)
    sampled = [ids for row in fresh for ids in row[:-1]]  # none of what could be said after the end
    utterances = [(*states[s], ids) for s, ids in zip(acted, sampled, strict=True)]
    with torch.no_grad():
        v_S2, q_N2 = critic(trajectories, acted, [spoken(tokenizer, ids) for ids in sampled])
        raw_N = advantages(q_N2, v_S2[acted])
        advantage_N = raw_N - raw_N.mean() if args.center else raw_N  # D3
        start_logp_MV = score(start_actor, trunks, utterances, args.temperature)[0].log_softmax(-1)

    logits_MV, token_M, hidden_MH, owner_M = score(actor, trunks, utterances, args.temperature)
    logp_MV = logits_MV.log_softmax(-1)
    logp_M = logp_MV.gather(-1, token_M[:, None])[:, 0]
    baseline_M = baseline(hidden_MH.detach())[:, 0] if args.baseline else torch.zeros_like(logp_M)
    policy_loss = reinforce_loss(logp_M, advantage_N, owner_M, baseline_M)
    kl = kl_divergence(logp_MV, start_logp_MV).sum() / len(sampled)
    entropy = -(logp_MV.detach().exp() * logp_MV.detach()).sum() / len(sampled)
    loss = policy_loss + args.kl * kl  # D1
    metrics = {"actor/loss": policy_loss.item(), "actor/kl": kl.item(), "actor/entropy": entropy.item()}
    metrics |= {"actor/advantage_mean": raw_N.mean().item(), "actor/advantage_std": raw_N.std().item()}
    if args.baseline:
        token_loss = baseline_loss(baseline_M, advantage_N, owner_M)
        loss, metrics["actor/baseline_loss"] = loss + token_loss, token_loss.item()
    metrics["actor/grad_norm"] = descend(loss, optimizer, actor, args.max_grad_norm, "actor")
    return metrics


# ---------------------------------------------------------- 7. evaluation
def evaluate(actor, args: Args) -> dict[str, float]:
    """The tasks of the world, or the first ones, sampled and greedy, from the same seed: evaluations compare."""
    tasks, metrics = list(range(make_worlds(args, 1).envs[0].num_tasks))[: args.eval_episodes or None], {}
    for suffix, passes in {"": max(1, round(args.eval_episodes / len(tasks))), "_greedy": 1}.items():
        indices, generator = tasks * passes, torch.Generator(args.device).manual_seed(0)
        worlds, seeds = make_worlds(args, len(indices)), list(range(len(indices)))
        played, _ = rollout(actor, worlds, args, generator, seeds, indices, suffix == "_greedy")
        figures = envs.summarise([vars(t) for t in played])
        metrics |= {f"eval/{key}{suffix}": figures[key] for key in ("return", "success")}
    return metrics


# ---------------------------------------------------------- 8. save and resume
LOGS = ("metrics.jsonl", "rollouts.jsonl")  # in the folder of a run, a line an iteration or a dialogue


def write(path: Path, records: list[dict], indent: int | None = None) -> None:
    """JSON, a line each. The file appears whole or not at all: it is written under another name, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(record, indent=indent) + "\n" for record in records), encoding="utf-8")
    temporary.replace(path)


def read(path: Path) -> list[dict]:
    """What `write` has written, a record a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def save(run: Path, state: dict, actor, critic: Critic, buffer: list[Trajectory]) -> None:
    """A checkpoint: actor and critic as Hugging Face folders, the replay buffer as text, all else in state.pt."""
    folder = run / "checkpoints" / f"{state['iteration']:06d}"
    temporary = folder.with_suffix(".tmp")
    for unfinished in folder.parent.glob("*.tmp"):  # else a full disk stays full
        shutil.rmtree(unfinished)
    try:
        for name, model, its in (("actor", actor, actor), ("critic", critic.body, critic)):
            model.save_pretrained(temporary / name)
            its.tokenizer.save_pretrained(temporary / name)
        write(temporary / "replay.jsonl", [vars(t) for t in buffer])
        torch.save(state, temporary / "state.pt")
    except Exception as error:  # a full disk has another name in each of the libraries that write here
        raise OSError(f"{folder}: {error}") from error
    temporary.replace(folder)  # from here on it counts; the one before is no longer needed
    for older in sorted(folder.parent.glob("[0-9]*[0-9]"))[:-1]:
        shutil.rmtree(older)


def newest_checkpoint(run: str, flag: str) -> Path:
    """The folder of a run's last checkpoint."""
    folders = sorted(Path(run, "checkpoints").glob("[0-9]*[0-9]"))
    if not folders:
        stop(f"{flag} {run}: no checkpoint in it; give the folder of a run, as in runs/")
    return folders[-1]


# ---------------------------------------------------------- 9. training
def main(args: Args) -> dict[str, float]:
    """Warm start, then iterations of rollouts, critic and actor; returns what it writes to summary.json."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started, cpu_started = time.time(), time.process_time()
    check(args)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng, generator = np.random.default_rng(args.seed), torch.Generator(args.device).manual_seed(args.seed)
    worlds = make_worlds(args, args.rollouts)
    append_only = worlds.envs[0].append_only

    # --- the actor of a checkpoint, or a new one
    if args.resume:
        run, checkpoint = Path(args.resume), newest_checkpoint(args.resume, "--resume")
        actor = make_actor(args, str(checkpoint / "actor"), [])
        try:
            state = torch.load(checkpoint / "state.pt", "cpu", weights_only=True)
            buffer = [Trajectory(**record) for record in read(checkpoint / "replay.jsonl")]
            logs = {name: [row for row in read(run / name) if row["iteration"] <= state["iteration"]] for name in LOGS}
        except Exception as error:  # as many as there are ways to damage a file
            stop(f"--resume {run}: {checkpoint.name} cannot be read ({type(error).__name__}); give another run")
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
    else:
        if args.critic not in ("tiny", "tiny-cls"):  # it is made after the warm start: better to know now
            load(transformers.AutoModel, args.critic, "--critic")
        demonstrations = read_demonstrations(args, worlds.envs[0])
        texts = [t.observations[-1:] if append_only else t.observations for t in demonstrations[:3000]]
        actor = make_actor(args, args.actor, [text for part in texts for text in part])
        demonstrations = that_fit(demonstrations, actor, append_only, args)
        Path(args.runs).mkdir(parents=True, exist_ok=True)  # better to know now
        warm_start(actor, demonstrations, append_only, args, rng)

    interrupted = []  # Ctrl-C ends the iteration that it falls into; a second one aborts
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.SIG_DFL)))
    if not args.resume:
        evaluation = evaluate(actor, args)
        buffer, _ = rollout(actor, worlds, args, generator, rng.integers(2**31, size=len(worlds)).tolist())
        state = {"iteration": 0, "episodes": len(buffer), "critic_updates": 0}
        state |= {"evaluation": evaluation, "warm_start_return": evaluation["eval/return"]}
        state["warm_start_greedy"] = evaluation["eval/return_greedy"]
        now = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 1000 % 10**6:06d}"  # twins start in one second
        run, logs = Path(args.runs) / f"{args.env}__archer__{args.seed}__{now}", {name: [] for name in LOGS}

    # --- all that learns; a checkpoint overwrites where it starts
    value = float(np.mean([mc_returns(t.rewards, args.gamma)[0] for t in buffer]))  # D4
    source = str(checkpoint / "critic") if args.resume else args.critic
    critic = make_critic(args, source, actor, append_only, value)
    same = {id(critic.tokenizer): critic.tokenizer}  # not copied: texts are tokenised once for both
    target, start_actor = copy.deepcopy(critic, same).requires_grad_(False), copy.deepcopy(actor).requires_grad_(False)
    width = actor.get_output_embeddings().weight.shape[1]
    baseline = mlp(width, width, 0.0).to(args.device)
    optimizer = torch.optim.AdamW([*actor.parameters(), *baseline.parameters()], lr=args.actor_lr, weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)
    modules = {"start_actor": start_actor, "baseline": baseline, "optimizer": optimizer}
    modules |= {"critic": critic, "target": target, "critic_optimizer": critic_optimizer}

    def checkpoint_now():
        state["seconds"], state["cpu_seconds"] = time.time() - started, time.process_time() - cpu_started
        state["modules"] = {name: module.state_dict() for name, module in modules.items()}
        state["rng"] = rng.bit_generator.state, generator.get_state()  # models are made at the start: torch's own rests
        save(run, state, actor, critic, buffer)

    if args.resume:
        for name, module in modules.items():
            module.load_state_dict(state["modules"][name])
        critic_optimizer.param_groups[0]["lr"] = args.critic_lr  # the saved state has brought back the old one
        rng.bit_generator.state = state["rng"][0]
        if len(state["rng"][1]) == len(generator.get_state()):  # else it is another kind of device: a new stream
            generator.set_state(state["rng"][1])
    run.mkdir(parents=True, exist_ok=True)
    write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    for name in LOGS:
        write(run / name, logs[name])
    if not args.resume:
        checkpoint_now()
    print(f"{run}: the warm start returns {state['warm_start_return']:.2f}, greedy {state['warm_start_greedy']:.2f}")

    # --- iterations
    writer = SummaryWriter(str(run), purge_step=state["iteration"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))
    todo = range(state["iteration"] + 1, args.iterations + 1)
    for iteration in tqdm(todo, "iterations", initial=state["iteration"], total=args.iterations, disable=None):
        began = time.time()
        # 1. dialogues of the current actor
        played, nll = rollout(actor, worlds, args, generator, rng.integers(2**31, size=len(worlds)).tolist())
        buffer += played
        while sum(map(len, buffer)) > args.buffer_size and len(buffer) > 1:
            buffer.pop(0)

        # 2. the critic; the actor stands still, so its utterances for E2 are sampled once for all updates
        pool = [buffer[i] for i in rng.integers(len(buffer), size=args.critic_pool)]
        texts = [[]] * len(pool)  # the other losses know no utterances but those in the data
        if args.critic_loss == "td":
            fresh = fresh_utterances(actor, pool, append_only, args, generator)
            texts = [[spoken(actor.tokenizer, ids) for ids in row] for row in fresh]
        critic_rows, actor_rows = [], []
        for _ in range(args.critic_updates):
            batch = rng.integers(len(pool), size=args.critic_batch)
            part, said = [pool[i] for i in batch], [texts[i] for i in batch]
            critic_rows.append(critic_update(critic, target, critic_optimizer, part, said, args))
        state["critic_updates"] += args.critic_updates

        # 3. the actor, on utterances of its own
        share = 1 - state["iteration"] / args.iterations if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"] = args.actor_lr * share  # D9
        for _ in range(args.actor_updates if state["critic_updates"] >= args.critic_warmup else 0):
            batch = [buffer[i] for i in rng.integers(len(buffer), size=args.actor_batch)]
            fresh = fresh_utterances(actor, batch, append_only, args, generator)
            learners = actor, start_actor, critic, baseline, optimizer
            actor_rows.append(actor_update(*learners, batch, fresh, append_only, args))

        # 4. the books
        state["iteration"], state["episodes"] = iteration, state["episodes"] + len(played)
        metrics = {f"rollout/{key}": figure for key, figure in envs.summarise([vars(t) for t in played]).items()}
        metrics["rollout/nll"] = float(np.mean(nll))
        for rows in filter(None, (critic_rows, actor_rows)):
            metrics |= {tag: float(np.mean([row[tag] for row in rows])) for tag in rows[0]}
        if iteration % args.eval_every == 0 or iteration == args.iterations:
            state["evaluation"] = evaluate(actor, args)
            metrics |= state["evaluation"]
        metrics["time/utterances_per_second"] = sum(map(len, played)) / (time.time() - began)
        try:
            log(run, logs, writer, {"iteration": iteration} | metrics, critic, played[:4])
            if iteration % args.save_every == 0 or iteration == args.iterations or interrupted:
                checkpoint_now()
        except OSError as error:  # a full disk costs nothing that was learned
            tqdm.write(f"not saved at iteration {iteration}: {error}".splitlines()[0])
        if interrupted:
            print(f"stopped; go on with: python archer.py --resume {run}")
            break
    writer.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)

    summary = {f"eval_{key}": state["evaluation"][f"eval/{key}"] for key in ("return", "return_greedy", "success")}
    summary |= {key: state[key] for key in ("warm_start_return", "episodes", "seconds", "cpu_seconds")}
    summary["peak_memory_mb"] = getrusage(RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "darwin" else 10)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    head = shutil.which("git") and subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    summary |= {"seed": args.seed, "commit": head or "unknown"}
    write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    return summary


def check(args: Args) -> None:
    """Stops for values that no run can be made with."""
    may_be_0 = ("seed", "dataset_seed", "iterations", "demonstrations", "warm_start_epochs", "eval_episodes")
    may_be_0 += ("critic_updates", "critic_warmup", "actor_updates", "drills", "epochs", "minibatch", "tasks_at_a_time")
    above_0 = ("temperature", "keep")
    shares = ("gamma", "polyak", "expectile", "keep", "exchanged", "finish_all", "clip")
    for name, value in vars(args).items():
        least = 0 if name in may_be_0 or type(value) is float else 1
        most = 1 if name in shares else 2**63 - 1 if name == "seed" else math.inf
        if type(value) in (int, float) and not (least <= value <= most and (value > 0 or name not in above_0)):
            limits = f"{'more than' if name in above_0 else 'at least'} {least}"
            stop(f"--{name.replace('_', '-')} {value}: give {limits}" + f" and at most {most}" * (most < math.inf))
    if args.width % (32 if args.width > 32 else 2):
        stop(f"--width {args.width}: give a multiple of 32, the width of an attention head")
    try:
        torch.zeros(1, device=args.device)
    except (AssertionError, RuntimeError) as error:
        stop(f"--device {args.device}: {str(error).splitlines()[0]}")


def make_worlds(args: Args, n: int) -> envs.VecTextEnv:
    """n worlds in lockstep."""
    options = {"oracle": args.oracle, "rom": args.rom, "data": args.webshop_data}
    try:
        return envs.VecTextEnv(args.env, n, **{name: value for name, value in options.items() if value})
    except (ValueError, envs.Unavailable) as error:
        stop(f"--env {args.env}: {error}")


def read_demonstrations(args: Args, world) -> list[Trajectory]:
    """What the actor is warmed up on: dialogues of a file, or of the world's scripted player."""
    try:
        made, notes = read_dialogues(args.dataset, world.append_only) if args.dataset else ([], [])
    except ValueError as error:
        stop(f"--dataset {error}")
    print("\n".join(notes), end="\n" if notes else "")
    made = made or world.demonstrations(args.demonstrations, args.seed)
    if not made:
        stop("--demonstrations 0: the warm start, and the tiny actor's vocabulary, need at least one")
    keys = ("observations", "actions", "rewards", "terminated", "answer")
    return [Trajectory(*(dialogue[key] for key in keys)) for dialogue in made]


def that_fit(data: list[Trajectory], actor, append_only: bool, args: Args) -> list[Trajectory]:
    """The dialogues that the actor's context has room for, with an utterance more; says how many do not fit."""
    room = getattr(actor.config, "max_position_embeddings", sys.maxsize) - args.max_action_tokens - 1
    fit = [t for t in data if max(map(len, lay_out([t], actor.tokenizer, append_only)[0])) <= room]
    if not fit:
        stop(f"--actor {args.actor}: no dialogue of the data fits into {room} tokens; take one with a longer context")
    if len(fit) < len(data):
        print(f"{len(data) - len(fit)} of {len(data)} dialogues left out: more than {room} tokens")
    cut = np.mean([len(encode(actor.tokenizer, a)) >= args.max_action_tokens for t in fit for a in t.actions])
    if cut > 0.01:
        print(f"{cut:.0%} of the data's utterances are longer than --max-action-tokens {args.max_action_tokens}")
    return fit


@torch.no_grad()
def log(run: Path, logs: dict[str, list], writer, metrics: dict[str, float], critic, played: list[Trajectory]) -> None:
    """The metrics to TensorBoard, metrics.jsonl and the terminal; to rollouts.jsonl dialogues and the critic's view."""
    iteration, line = metrics["iteration"], f"{metrics['iteration']:4d}"
    shown = {"return": "rollout/return", "success": "rollout/success", "explained": "critic/explained_variance"}
    shown |= {"invalid": "rollout/invalid", "kl": "actor/kl", "nll": "actor/data_nll", "entropy": "actor/entropy"}
    shown |= {"eval": "eval/return", "greedy": "eval/return_greedy"}
    for name, tag in shown.items():
        line += f"  {name} {metrics[tag]:6.2f}" if tag in metrics else f"  {name}      -" * (tag in METRICS)
    tqdm.write(line)
    for tag in metrics.keys() & METRICS.keys():
        writer.add_scalar(tag, metrics[tag], iteration)
    logs["metrics.jsonl"].append(metrics)
    for t in played:
        said = zip(t.actions, envs.replies(t.observations, t.actions), t.rewards, strict=True)
        turns = [{"action": action, "reply": reply, "reward": r} for action, reply, r in said]
        if critic is not None:
            v_S2, q_N2 = critic([t], states_acted([t]), t.actions)
            for turn, q, v in zip(turns, q_N2.min(-1).values.tolist(), v_S2.min(-1).values.tolist(), strict=False):
                turn |= {"Q": round(q, 3), "V": round(v, 3), "A": round(q - v, 3)}
        about = {"iteration": iteration, "answer": t.answer, "return": sum(t.rewards), "terminated": t.terminated}
        logs["rollouts.jsonl"].append(about | {"start": t.observations[0], "turns": turns})
    for name in LOGS:
        write(run / name, logs[name])


@torch.no_grad()
def play(args: Args) -> None:
    """The trained agent asks, a person answers."""
    transformers.logging.disable_progress_bar()
    actor = make_actor(args, str(newest_checkpoint(args.play, "--play") / "actor"), [])
    world, generator = make_worlds(args, 1).envs[0], torch.Generator(args.device).manual_seed(args.seed)

    def ask(observation: str) -> str:
        so_far = Trajectory([observation], [], [], False, "")
        ((ids,),) = fresh_utterances(actor, [so_far], world.append_only, args, generator)
        return spoken(actor.tokenizer, ids)

    observation, _ = world.reset(seed=args.seed)
    if observation != "Questions:\n":
        stop(f"--play {args.play}: in {args.env} nobody asks questions; its dialogues are in rollouts.jsonl")
    envs.play.answer(ask, observation, world.max_turns)


if __name__ == "__main__":
    args = tyro.cli(Args)
    settings = SETTINGS.get(args.env, {})
    if folder := args.resume or args.play:  # its own arguments hold, unless given anew
        try:
            settings = asdict(Args(**json.loads(Path(folder, "args.json").read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            stop(f"--resume, --play {folder}: {error}; give the folder of a run of this script")
    args = tyro.cli(Args, default=Args(**settings))
    kept = ("env", "seed", "actor", "critic", "width", "layers", "vocabulary", "superwords", "dataset")
    for name in (*kept, "demonstrations", *(name for name in settings if name.startswith("warm_start"))):
        if args.resume and getattr(args, name) != settings[name]:
            stop(f"--{name.replace('_', '-')}: the run has {settings[name]} and must keep it")
    check(args)
    try:
        play(args) if args.play else main(args)
    except (OSError, KeyboardInterrupt) as error:
        stop(f"{str(error) or 'stopped'}; a run that has a checkpoint goes on with --resume")
