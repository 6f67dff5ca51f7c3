# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers>=5.23,<6", "numpy>=2.4,<3",
#     "gymnasium>=1.4,<2", "rapidfuzz>=3.14,<4", "tyro>=1.0.17,<2", "tensorboard>=2.21,<3", "tqdm>=4.70,<5"]
# ///
"""Offline ArCHer: an IQL critic on utterances and an AWR actor on tokens, from recorded dialogues alone.

    python archer_offline_iql.py --env twenty-questions-subset                  # 2.5 minutes on a CPU core, return -3.5
    python archer_offline_iql.py --env twenty-questions-subset --actor-loss bc  # 1 minute, -11.0; the data: -10.2
    python archer_offline_iql.py --env ENV --dataset FILE --actor gpt2 --actor-lr 1e-4 --critic-lr 1e-5
    python archer_offline_iql.py --resume runs/...     python archer_offline_iql.py --play runs/...

Nothing is asked of the world but an evaluation now and then. The critic learns what the utterances of the data are
worth; the actor imitates them, the good ones more. Every row of the paper's Table 1 is a choice of two switches:

  --critic iql | sarsa      --actor-loss awr | reinforce | reinforce-bc | bc | filtered-bc

Paper: Zhou et al. 2024, arXiv:2402.19446, sec. 3.5 and App. B
  E1  Q(s,a) <- r + gamma * Vbar(s')                     iql          Eq. 1      td_target
  E2  V(s)   <- E_{a~data} Qbar(s,a)                     sarsa        Eq. 2      value_loss
  E3  grad log pi(a|s) * A,  A = min Q - min V, a ~ pi   reinforce    Eq. 3      advantages, reinforce_loss
  E6  V(s)   <- upper expectile of Qbar(s,a), a ~ data   iql          sec. 3.5   value_loss
  E7  grad log pi(a|s) * exp(beta * A),  a ~ data        awr          sec. 3.5   awr_weights, reinforce_loss
  E8  Q(s,a) <- r + gamma * Qbar(s',a'),  a' ~ data      sarsa        Table 1    td_target
The order of an update: V and Q in one step, each towards the target networks of before it; then the target networks;
and after all critic updates of an iteration the actor, by the critic that they have made. (As a step of the authors'
release, where both alternate; IQL's code moves V first, the actor by the new V and the target Q, Q, then the target.)
Differs from the paper (docs/archer_offline_iql.md has the reasons at length):
  D1  AWR weights are clamped (--max-weight inf): one utterance that the critic over-values must not be the batch.
  D2  The critic is a decoder and starts as the actor does, with heads of its own; sec. 5.5 finds both kinds equal.
  D3  The value heads start at the mean discounted return of the data instead of zero.
  D4  A tiny GPT-2 trained from scratch on the data alone (--actor gpt2), with learning rates found by measurement.
  D5  As in the release the time limit is an end (--no-truncation-is-terminal); behind it no state is ever seen.
  D6  Both learning rates rise over the first updates and fall linearly to zero (--no-anneal-lr).
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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs
import envs.play
from envs.datasets import make_dialogues, read_dialogues


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    env: str = "twenty-questions"  # the world, an id that `python -m envs` lists; it makes the data, and evaluates
    oracle: str = ""  # folder of a seq2seq checkpoint that answers instead of the world's table (paper: flan-t5-small)
    rom: str = ""  # your copy of detective.z5, for --env detective
    webshop_data: str = ""  # folder of the published items and instructions, for --env webshop
    seed: int = 1  # of everything random in the run, but for the data
    iterations: int = 20  # rounds of critic and actor updates; learning rates fall to zero over them
    runs: str = "runs"  # folder in which the run's own folder is made
    resume: str = ""  # a run's folder to go on with; its arguments hold, unless given anew
    play: str = ""  # a run's folder: its agent asks and you answer
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # in which the bodies compute; all parameters stay float32
    threads: int = 1  # on the CPU; with one, resuming is exact to the bit, and tiny models are no faster with two

    dataset: str = ""  # file of dialogues: the authors' JSON, or a run's dataset.jsonl, replay.jsonl or rollouts.jsonl
    dataset_size: int = 5_000  # dialogues that scripted players make where no file is given
    dataset_seed: int = 0  # of these dialogues
    mix: str = "random=0.8/expert=0.2"  # players by their shares of dialogues; with commas, by shares of turns

    actor: str = "tiny"  # tiny (a small GPT-2 from scratch) or a causal LM: Hugging Face name or local folder
    width: int = 64  # hidden size of the tiny model
    layers: int = 3  # of the tiny model
    vocabulary: int = 700  # size of the tiny model's byte-pair vocabulary, trained on the data
    superwords: bool = True  # byte pairs may span words: 3 tokens a turn instead of 9
    temperature: float = 1.0  # of sampling, and so of scoring
    max_action_tokens: int = 16  # tokens after which an utterance is cut

    critic: Literal["iql", "sarsa"] = "iql"  # E6 and E1, or E2 and E8
    critic_lr: float = 3e-3  # its peak; authors' configuration: 1e-5, for a RoBERTa
    critic_updates: int = 50  # updates of the critic in an iteration, each with a Polyak step of the target
    gamma: float = 0.95  # discount of an utterance (authors' configuration: 0.99)
    polyak: float = 0.05  # share of the critic that enters its target copy after every update (authors: 0.05)
    expectile: float = 0.9  # of E6 (authors' configuration: 0.9)
    truncation_is_terminal: bool = True  # no bootstrap where the world's time limit cut a dialogue off (D5)

    actor_loss: Literal["awr", "reinforce", "reinforce-bc", "bc", "filtered-bc"] = "awr"  # E7, E3, or imitation
    actor_lr: float = 5e-3  # its peak; authors' configuration: 1e-4, for GPT-2
    actor_updates: int = 50  # updates of the actor in an iteration
    beta: float = 1.0  # of E7, inverse temperature of the advantages (authors' configuration: 1)
    max_weight: float = 20.0  # clamp of the weights of E7 (D1)
    bc_weight: float = 1.0  # of imitation beside REINFORCE, for reinforce-bc
    keep: float = 0.1  # share of the dialogues, those of the highest return, that filtered-bc imitates (authors: 0.1)
    batch: int = 16  # dialogues in an update of critic or actor
    anneal_lr: bool = True  # learning rates rise over 50 updates and fall linearly to zero (D6)
    max_grad_norm: float = 1.0  # gradients of actor and critic are clipped to this norm, apart

    eval_every: int = 10  # iterations between evaluations
    eval_episodes: int = 314  # sampled dialogues of an evaluation, in whole passes; fewer than tasks: of the first
    save_every: int = 10  # iterations between checkpoints; Ctrl-C writes one, too


METRICS = {
    "data/return": "undiscounted return of the dialogues of the data, mean; what bc aims at",
    "critic/q_loss": "E1 or E8, mean square in units of return; should settle, not grow",
    "critic/v_loss": "E6 or E2, likewise; sinks with q_loss, or V learns nothing",
    "critic/grad_norm": "before clipping; a jump is a batch that the critic cannot explain",
    "critic/explained_variance": "of the data's Monte-Carlo returns by V, before the update; below 0 useless",
    "critic/bias": "V minus the data's Monte-Carlo return; with iql above 0, as V is that of a better policy",
    "actor/loss": "E7, E3 or -log pi; its size means little",
    "actor/data_nll": "-log pi of the data's utterances, nats each (filtered-bc: of those kept); should fall and stay",
    "actor/entropy": "of the actor's next token, nats summed over an utterance; near 0 it has stopped exploring",
    "actor/advantage_mean": "of the utterances that the actor learns from; about 0 for sarsa, below it for iql",
    "actor/advantage_std": "spread of the advantages; the signal, and the critic's noise",
    "actor/effective_samples": "Kish's share of E7's weights; near 0 a single one is all; with --actor-loss awr only",
    "actor/clamped": "share of weights at --max-weight (D1), should be small; with --actor-loss awr only",
    "actor/grad_norm": "before clipping; where it grows with reinforce, imitate beside it",
    "eval/return": "return with sampled utterances, every task equally often",
    "eval/success": "share of these that reached the goal",
    "eval/return_greedy": "return with the likeliest tokens, every task once",
    "eval/success_greedy": "share of these that reached the goal",
    "eval/invalid": "share of sampled utterances that the world calls invalid",
    "eval/overestimation": "min Q minus Monte-Carlo return of the actor's own utterances; far above 0 it dreams",
    "eval/unseen": "distance from the data: share of sampled utterances that it has nowhere; their worth is guessed",
    "time/utterances_per_second": "learned from, by critic and actor, without evaluations",
}


IMITATION = ("bc", "filtered-bc")  # these need no critic and train none


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


def read_data(args: Args, world) -> list[Trajectory]:
    """The dialogues of a file, or of the world's scripted players."""
    flag, notes = ("--dataset", []) if args.dataset else ("--mix", [])
    try:
        if args.dataset:
            made, notes = read_dialogues(args.dataset, world.append_only)
        else:
            made = make_dialogues(world, args.dataset_size, args.dataset_seed, args.mix)
    except ValueError as error:
        stop(f"{flag} {error}")
    print("\n".join(notes), end="\n" if notes else "")
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


def best(data: list[Trajectory], share: float) -> list[Trajectory]:
    """The dialogues of the highest return, at least one."""
    return sorted(data, key=lambda t: -sum(t.rewards))[: max(1, int(share * len(data)))]


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: B trunks, T their tokens, S states, N utterances, M all the tokens of all utterances in a row,
# V the vocabulary, H hidden, 2 the twin critics. An utterance includes its end of turn.
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


def awr_weights(advantage_N: torch.Tensor, beta: float, max_weight: float) -> torch.Tensor:
    """E7: exp(beta * A) [N], at most `max_weight`; no gradient flows into them.

    >>> awr_weights(torch.tensor([0.0, 99.0]), 1.0, 20.0).tolist()
    [1.0, 20.0]
    """
    return (beta * advantage_N.detach()).exp().clamp(max=max_weight)  # E7, D1


def reinforce_loss(logp_M, advantage_N, owner_M, baseline_M=0.0) -> torch.Tensor:
    """E3: -mean over utterances of sum_i log pi(a_i|s,a_<i) * A(s,a); E4 with a baseline. `owner_M`: a token's own."""
    weight_M = (advantage_N[owner_M] - baseline_M).detach()
    return -(logp_M * weight_M).sum() / len(advantage_N)  # E3


def effective_samples(weight_N: torch.Tensor) -> torch.Tensor:
    """Kish's share of effective samples, (sum w)^2 / (n sum w^2): 1 where all weigh the same, 1/n where one is all.

    >>> effective_samples(torch.tensor([1.0, 0.0])).item()
    0.5
    """
    weight_N = weight_N / weight_N.max().clamp(min=1e-30)  # their squares may not fit into a float32
    return weight_N.sum() ** 2 / (len(weight_N) * (weight_N**2).sum()).clamp(min=1e-30)


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
    """Twin Q and V heads on a decoder, which reads the whole dialogue in one causal pass (D2).

    V is read at the last token of each observation, Q at the end of turn of each utterance.
    """

    def __init__(self, body, tokenizer, append_only: bool, value: float):
        super().__init__()
        self.body, self.tokenizer, self.append_only = body, tokenizer, append_only
        H = body.config.hidden_size
        self.v_heads = nn.ModuleList(mlp(H, H, value) for _ in range(2))
        self.q_heads = nn.ModuleList(mlp(H, H, value) for _ in range(2))

    def forward(self, trajectories: list[Trajectory], at: list[int], utterances: list[str]):
        """V of all states [S, 2], n + 1 for each trajectory, and Q [N, 2] of `utterances[i]` in state `at[i]`."""
        trunks, states = lay_out(trajectories, self.tokenizer, self.append_only)
        said = [encode(self.tokenizer, text) + encode(self.tokenizer, "\n") for text in utterances]
        *packed, columns = pack(trunks, [(*states[s], ids) for s, ids in zip(at, said, strict=True)])
        hidden_BTH, _ = forward(self.body, *packed)
        row_S, length_S = torch.tensor(states).T
        v_SH = hidden_BTH[row_S, length_S - 1]
        q_NH = hidden_BTH[row_S[at], [own[-1] for own in columns]]
        return torch.cat([h(v_SH) for h in self.v_heads], -1), torch.cat([h(q_NH) for h in self.q_heads], -1)


def mlp(inputs: int, width: int, value: float) -> nn.Module:
    """Two hidden layers and one output, which starts near `value`."""
    last = nn.Linear(width, 1)
    nn.init.constant_(last.bias, value)  # D3
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)


def make_tokenizer(texts: list[str], size: int, superwords: bool = True):
    """A byte-pair vocabulary trained on these texts, with all bytes in it: any text can be written."""
    tokenizer, special = Tokenizer(models.BPE()), "<|endoftext|>"
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not superwords)
    if superwords:  # merges stay within what this finds, a whole question or a whole answer
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
    if source == "tiny":  # D4
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


def critic_update(critic, target, optimizer, trajectories, args: Args) -> dict[str, float]:
    """One step on V (E6 or E2) and Q (E1 or E8) over the utterances of the data, and one Polyak step of the target."""
    acted, taken = states_acted(trajectories), [action for t in trajectories for action in t.actions]
    device, next_N = critic.body.device, [s + 1 for s in acted]
    is_last_N = torch.tensor([k == len(t) - 1 for t in trajectories for k in range(len(t))], device=device)
    ends = [t.terminated or args.truncation_is_terminal for t in trajectories for _ in t.actions]  # D5
    is_over_N = is_last_N & torch.tensor(ends, device=device)
    reward_N = torch.tensor([reward for t in trajectories for reward in t.rewards], device=device)
    return_N = reward_N.new_tensor([g for t in trajectories for g in mc_returns(t.rewards, args.gamma)])

    v_S2, q_N2 = critic(trajectories, acted, taken)
    with torch.no_grad():
        target_v_S2, target_q_N2 = target(trajectories, acted, taken)
        next_N2 = target_v_S2[next_N]  # E1
        if args.critic == "sarsa":  # E8; behind a time limit there is no utterance, and V is a guess
            next_N2 = torch.where(is_last_N[:, None], next_N2, target_q_N2.roll(-1, 0))
        q_target_N2 = td_target(reward_N, next_N2, is_over_N.float(), args.gamma)
    q_loss = nn.functional.mse_loss(q_N2, q_target_N2)
    v_loss = value_loss(v_S2[acted], target_q_N2, args.expectile if args.critic == "iql" else 0.5)  # E6, E2
    norm = descend(q_loss + v_loss, optimizer, critic, args.max_grad_norm, "critic")
    polyak_update(target, critic, args.polyak)

    error_N = v_S2[acted].detach().mean(-1) - return_N
    metrics = {"critic/q_loss": q_loss.item(), "critic/v_loss": v_loss.item(), "critic/grad_norm": norm}
    metrics["critic/explained_variance"] = (
        1 - (error_N.var(correction=0) / return_N.var(correction=0).clamp(min=1e-8)).item()
    )
    return metrics | {"critic/bias": error_N.mean().item()}


def actor_update(actor, critic, optimizer, trajectories, append_only: bool, args: Args, generator) -> dict[str, float]:
    """One step on --actor-loss: utterances of the data by their weights, or the actor's own by their advantages."""
    acted, tokenizer = states_acted(trajectories), actor.tokenizer
    trunks, states = lay_out(trajectories, tokenizer, append_only)
    taken, end = [action for t in trajectories for action in t.actions], encode(tokenizer, "\n")
    judged = taken
    utterances = [(*states[s], encode(tokenizer, action) + end) for s, action in zip(acted, taken, strict=True)]
    learns_from_its_own = args.actor_loss in ("reinforce", "reinforce-bc")
    if learns_from_its_own:  # E3
        fresh = fresh_utterances(actor, trajectories, append_only, args, generator)
        sampled = [ids for row in fresh for ids in row[:-1]]  # none of what could be said after the end
        utterances += [(*states[s], ids) for s, ids in zip(acted, sampled, strict=True)]
        judged = [spoken(tokenizer, ids) for ids in sampled]
    weight_N, N = torch.ones(len(taken), device=actor.device), len(taken)
    metrics = {}
    if args.actor_loss not in IMITATION:
        with torch.no_grad():
            v_S2, q_N2 = critic(trajectories, acted, judged)
        advantage_N = advantages(q_N2, v_S2[acted])  # E3
        metrics |= {
            "actor/advantage_mean": advantage_N.mean().item(),
            "actor/advantage_std": advantage_N.std(correction=0).item(),
        }
    if args.actor_loss == "awr":
        weight_N = awr_weights(advantage_N, args.beta, args.max_weight)  # E7
        metrics["actor/effective_samples"] = effective_samples(weight_N).item()
        metrics["actor/clamped"] = (weight_N >= args.max_weight).float().mean().item()

    logits_MV, token_M, _, owner_M = score(actor, trunks, utterances, args.temperature)
    logp_MV = logits_MV.log_softmax(-1)
    logp_M = logp_MV.gather(-1, token_M[:, None])[:, 0]
    is_data_M = owner_M < N
    data_nll = reinforce_loss(logp_M[is_data_M], torch.ones_like(weight_N), owner_M[is_data_M])
    loss = reinforce_loss(logp_M[is_data_M], weight_N, owner_M[is_data_M])
    if learns_from_its_own:
        loss = reinforce_loss(logp_M[~is_data_M], advantage_N, owner_M[~is_data_M] - N)  # E3
        loss = loss + (args.bc_weight * data_nll if args.actor_loss == "reinforce-bc" else 0.0)
    entropy = -(logp_MV.detach().exp() * logp_MV.detach()).sum() / len(utterances)
    metrics |= {"actor/loss": loss.item(), "actor/data_nll": data_nll.item(), "actor/entropy": entropy.item()}
    metrics["actor/grad_norm"] = descend(loss, optimizer, actor, args.max_grad_norm, "actor")
    return metrics


# ---------------------------------------------------------- 7. evaluation
@torch.no_grad()
def evaluate(actor, critic, known: set[str], args: Args) -> tuple[dict[str, float], list[Trajectory]]:
    """The world's tasks, or the first ones, sampled and greedy, from the same seed; how the critic judges the sampled.

    `known` are all utterances of the data. Returns the sampled dialogues, too. Imitation has no critic to be judged.
    """
    tasks = list(range(make_worlds(args, 1).envs[0].num_tasks))[: args.eval_episodes or None]
    indices, generator = tasks * max(1, round(args.eval_episodes / len(tasks))), torch.Generator(args.device)
    worlds, seeds = make_worlds(args, len(indices)), list(range(len(indices)))
    played, _ = rollout(actor, worlds, args, generator.manual_seed(0), seeds, indices)
    greedy, _ = rollout(actor, make_worlds(args, len(tasks)), args, generator, tasks, tasks, greedy=True)
    figures, figures_greedy = (envs.summarise([vars(t) for t in dialogues]) for dialogues in (played, greedy))
    metrics = {f"eval/{key}": figures[key] for key in ("return", "success", "invalid")}
    metrics |= {f"eval/{key}_greedy": figures_greedy[key] for key in ("return", "success")}
    said = [action for t in played for action in t.actions]
    metrics["eval/unseen"] = float(np.mean([action not in known for action in said]))
    errors = []
    for part in (played[i : i + 32] for i in range(0, 0 if args.actor_loss in IMITATION else len(played), 32)):
        _, q_N2 = critic(part, states_acted(part), [action for t in part for action in t.actions])
        returns = [g for t in part for g in mc_returns(t.rewards, args.gamma)]
        errors += (q_N2.min(-1).values.cpu() - torch.tensor(returns)).tolist()
    return metrics | ({"eval/overestimation": float(np.mean(errors))} if errors else {}), played


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


def save(run: Path, state: dict, actor) -> None:
    """A checkpoint: the actor as a Hugging Face folder, all else in state.pt."""
    folder = run / "checkpoints" / f"{state['iteration']:06d}"
    temporary = folder.with_suffix(".tmp")
    for unfinished in folder.parent.glob("*.tmp"):  # else a full disk stays full
        shutil.rmtree(unfinished)
    try:
        actor.save_pretrained(temporary / "actor")
        actor.tokenizer.save_pretrained(temporary / "actor")
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
    """Iterations of critic and actor on recorded dialogues; returns what it writes to summary.json."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started, cpu_started = time.time(), time.process_time()
    check(args)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng, generator = np.random.default_rng(args.seed), torch.Generator(args.device).manual_seed(args.seed)
    world = make_worlds(args, 1).envs[0]

    # --- data and actor, of a run or new
    state, logs = {"iteration": 0}, {name: [] for name in LOGS}
    if args.resume:
        run, checkpoint = Path(args.resume), newest_checkpoint(args.resume, "--resume")
        actor = make_actor(args, str(checkpoint / "actor"), [])
        try:
            state = torch.load(checkpoint / "state.pt", "cpu", weights_only=True)
            data = [Trajectory(**record) for record in read(run / "dataset.jsonl")]
            logs = {name: [row for row in read(run / name) if row["iteration"] <= state["iteration"]] for name in LOGS}
        except Exception as error:  # as many as there are ways to damage a file
            stop(f"--resume {run}: {checkpoint.name} cannot be read ({type(error).__name__}); give another run")
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
    else:
        data = read_data(args, world)
        texts = [t.observations[-1:] if world.append_only else t.observations for t in data[:3000]]
        actor = make_actor(args, args.actor, [text for part in texts for text in part])
        data = that_fit(data, actor, world.append_only, args)
        now = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 1000 % 10**6:06d}"  # twins start in one second
        run = Path(args.runs) / f"{args.env}__archer_offline_iql__{args.seed}__{now}"
    known = {action for t in data for action in t.actions}
    imitated = best(data, args.keep) if args.actor_loss == "filtered-bc" else data
    data_return = float(np.mean([sum(t.rewards) for t in data]))

    # --- all that learns; a checkpoint overwrites where it starts
    value = float(np.mean([g for t in data for g in mc_returns(t.rewards, args.gamma)]))  # D3
    critic = Critic(copy.deepcopy(actor.base_model), actor.tokenizer, world.append_only, value)  # D2
    critic = critic.to(args.device).eval()
    target = copy.deepcopy(critic, {id(actor.tokenizer): actor.tokenizer}).requires_grad_(False)  # texts: once for both
    optimizer = torch.optim.AdamW(actor.parameters(), lr=args.actor_lr, betas=(0.9, 0.98), weight_decay=0.01)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)
    modules = {"critic": critic, "target": target, "optimizer": optimizer, "critic_optimizer": critic_optimizer}
    if args.actor_loss in IMITATION:  # the critic learns nothing
        modules = {"optimizer": optimizer}
    if args.resume:
        for name, module in modules.items():
            module.load_state_dict(state["modules"][name])
        rng.bit_generator.state = state["rng"][0]
        if len(state["rng"][1]) == len(generator.get_state()):  # else it is another kind of device: a new stream
            generator.set_state(state["rng"][1])

    interrupted = []  # Ctrl-C ends the iteration that it falls into; a second one aborts

    def checkpoint_now():
        state["seconds"], state["cpu_seconds"] = time.time() - started, time.process_time() - cpu_started
        state["modules"] = {name: module.state_dict() for name, module in modules.items()}
        state["rng"] = rng.bit_generator.state, generator.get_state()  # models are made at the start: torch's own rests
        save(run, state, actor)

    def draw(dialogues: list[Trajectory]) -> list[Trajectory]:
        return [dialogues[i] for i in rng.integers(len(dialogues), size=args.batch)]

    def rate(update: int, updates: int) -> float:  # D6, of the iteration's updates
        done = state["iteration"] * updates + update
        return min(1, (done + 1) / 50) * (1 - done / (args.iterations * updates)) if args.anneal_lr else 1.0

    signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.SIG_DFL)))
    if not args.resume:
        few = replace(args, eval_episodes=min(args.eval_episodes, 100))  # it has learned nothing yet
        state["evaluation"], _ = evaluate(actor, critic, known, few)
        state["warm_start_return"] = state["evaluation"]["eval/return"]  # there is none: the actor as it was given
        run.mkdir(parents=True)
        write(run / "dataset.jsonl", [vars(t) for t in data])
    write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    for name in LOGS:
        write(run / name, logs[name])
    if not args.resume:
        checkpoint_now()
    print(
        f"{run}: {len(data)} dialogues return {data_return:.2f}, the untrained actor {state['warm_start_return']:.2f}"
    )

    # --- iterations
    writer = SummaryWriter(str(run), purge_step=state["iteration"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))
    todo = range(state["iteration"] + 1, args.iterations + 1)
    for iteration in tqdm(todo, "iterations", initial=state["iteration"], total=args.iterations, disable=None):
        began, critic_rows, actor_rows = time.time(), [], []
        for update in range(0 if args.actor_loss in IMITATION else args.critic_updates):
            critic_optimizer.param_groups[0]["lr"] = args.critic_lr * rate(update, args.critic_updates)
            critic_rows.append(critic_update(critic, target, critic_optimizer, draw(data), args))
        for update in range(args.actor_updates):
            optimizer.param_groups[0]["lr"] = args.actor_lr * rate(update, args.actor_updates)
            learners = actor, critic, optimizer, draw(imitated)
            actor_rows.append(actor_update(*learners, world.append_only, args, generator))

        state["iteration"] = iteration
        metrics, played = {"iteration": iteration, "data/return": data_return}, []
        for rows in filter(None, (critic_rows, actor_rows)):
            metrics |= {tag: float(np.mean([row[tag] for row in rows])) for tag in rows[0]}
        learned = args.batch * (len(critic_rows) + len(actor_rows)) * np.mean([len(t) for t in imitated])
        metrics["time/utterances_per_second"] = float(learned / (time.time() - began))
        if iteration % args.eval_every == 0 or iteration == args.iterations:
            state["evaluation"], played = evaluate(actor, critic, known, args)
            metrics |= state["evaluation"]
        try:
            log(run, logs, writer, metrics, None if args.actor_loss in IMITATION else critic, played[:8])
            if iteration % args.save_every == 0 or iteration == args.iterations or interrupted:
                checkpoint_now()
        except OSError as error:  # a full disk costs nothing that was learned
            tqdm.write(f"not saved at iteration {iteration}: {error}".splitlines()[0])
        if interrupted:
            print(f"stopped; go on with: python {Path(__file__).name} --resume {run}")
            break
    writer.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)

    summary = {f"eval_{key}": state["evaluation"][f"eval/{key}"] for key in ("return", "return_greedy", "success")}
    evaluated = [row["eval/return"] for row in logs["metrics.jsonl"] if "eval/return" in row]
    summary["best_return"] = max(evaluated, default=summary["eval_return"])  # above the last: it learned too long
    summary |= {key: state[key] for key in ("warm_start_return", "seconds", "cpu_seconds")} | {"episodes": len(data)}
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
    if folder := args.resume or args.play:  # its own arguments hold, unless given anew
        try:
            saved = Args(**json.loads(Path(folder, "args.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            stop(f"--resume, --play {folder}: {error}; give the folder of a run of this script")
        args = tyro.cli(Args, default=saved)
        kept = ("env", "seed", "actor", "width", "layers", "vocabulary", "superwords", "critic", "actor_loss", "keep")
        for name in (*kept, "dataset", "dataset_size", "dataset_seed", "mix"):
            if args.resume and getattr(args, name) != getattr(saved, name):
                stop(f"--{name.replace('_', '-')}: the run has {getattr(saved, name)} and must keep it")
    check(args)
    try:
        play(args) if args.play else main(args)
    except (OSError, KeyboardInterrupt) as error:
        stop(f"{str(error) or 'stopped'}; a run that has a checkpoint goes on with --resume")
