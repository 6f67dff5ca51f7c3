# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers>=5.23,<6", "numpy>=2.4,<3",
#     "gymnasium>=1.4,<2", "tyro>=1.0.17,<2", "tensorboard>=2.21,<3", "tqdm>=4.70,<5"]
# ///
"""ArCHer: hierarchical multi-turn RL for language agents, in one file.

    python archer.py --env twenty-questions              # 13 minutes on 2 CPU cores, mean return -15.4 -> -12.7
    python archer.py --env twenty-questions-subset       # @SUBTIME
    python archer.py --actor gpt2 --critic roberta-base --warm-start-lr 1e-4 --actor-lr 1e-5 --critic-lr 2e-5
    python archer.py --resume runs/...          python archer.py --play runs/...

Two levels. The critic works on whole utterances and learns off-policy, from a replay buffer, what an utterance a in
the dialogue s is worth. The actor works on tokens and learns on-policy: it writes new utterances in replayed
dialogues, and the critic's advantage of an utterance is the reward of all its tokens.

Paper: Zhou et al. 2024, arXiv:2402.19446
  E1  Q(s,a) <- r + gamma * Vbar(s')                               Eq. 1       td_target
  E2  V(s)   <- E_{a~pi} Qbar(s,a)                                 Eq. 2       value_loss
  E3  grad log pi(a|s) * A,  A = min Q(s,a) - min V(s)             Eq. 3       advantages, reinforce_loss
  E4  A(s,a) - Vtok(s,a_<i): a baseline for each token             Eq. 4       reinforce_loss
  E5  Vtok(s,a_<i) <- A(s,a)                                       Eq. 5       baseline_loss
  E6  V(s)   <- upper expectile of Qbar(s,a) over the data         sec. 3.5    value_loss
Differs from the paper:
  D1  A KL penalty to the warm-started actor (--kl 0 is the paper): without it the actor drifts to gibberish, which a
      young critic over-values and the return, near its floor, does not betray.
  D2  The critic is a causal decoder that reads a whole dialogue at once and starts from the warm-started actor's
      weights (--critic roberta-base, or any encoder, is the paper). Section 5.5 finds both kinds equal in result.
  D3  Advantages are centred on their batch mean (--no-center is the paper). Over a ~ pi it is zero by definition;
      where the critic's Q and V disagree it is not, and pushes every sampled token up or down alike.
  D4  The value heads start at the mean discounted return of the first dialogues instead of zero.
  D5  A tiny GPT-2, trained here on the world's demonstrations, stands in for the paper's, with measured learning
      rates. Table 3's 3e-4 and 6e-4 are 32 times the released configuration's 1e-5 and 2e-5: the authors sum the
      gradients of 32 micro-batches, and Adam does not care for scale. Start real checkpoints from the released ones.
  D6  The time limit is an end (--no-truncation-is-terminal bootstraps there). It is a rule of the game and stands in
      the observation, and a bootstrap past it asks for states that the critic never sees: V was -15.4 at the first
      turn where the Monte-Carlo return was -11.3.
  D7  The warm start also learns to foresee the world's reply to an utterance (--no-warm-start-replies leaves it out),
      read at the end of turn, where the critic reads Q. A critic that starts from these weights knows what a question
      may reveal: after 400 updates its advantages correlated 0.4 with those by exact counting, without it 0.15.
  D8  The tiny actor's byte pairs may span words (as in SuperBPE, arXiv:2503.13423), so that a common question is one
      or two tokens (--no-superwords is GPT-2's way). A turn has about 3 tokens instead of 9; with 4 already, a warm
      start of equal time solved 61 % instead of 18 % (one seed).
  D9  The actor's learning rate falls linearly to zero (--no-anneal-lr is the paper). Noise of sampling and errors of
      the critic wear away what the warm start knows; the last, small steps win it back.
From the authors' code: sampled tokens, their end of turn included, are kept until the loss; sampler and scorer are
one distribution; padding cannot leak into positions; the gradients of actor and critic are clipped apart.
"""

import copy
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
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


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    env: str = "twenty-questions"  # the world, an id that `python -m envs` lists
    oracle: str = ""  # folder of a seq2seq checkpoint that answers instead of the world's table (paper: flan-t5-small)
    seed: int = 1  # of everything random in the run
    iterations: int = 50  # rounds of rollouts, critic updates and actor updates
    runs: str = "runs"  # folder in which the run's own folder is made
    resume: str = ""  # a run's folder to go on with; its arguments hold, unless given anew
    play: str = ""  # a run's folder: its agent asks and you answer
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the models; value heads and losses stay float32
    threads: int = 1  # on the CPU; with one, resuming is exact to the bit, and tiny models are no faster with two

    actor: str = "tiny"  # tiny (a small GPT-2 from scratch) or a causal LM: Hugging Face name or local folder
    critic: str = "tiny"  # tiny (D2), tiny-cls (a small BERT from scratch), or any encoder or decoder, likewise
    width: int = 64  # hidden size of the tiny models
    layers: int = 3  # of the tiny models
    vocabulary: int = 700  # size of the tiny models' byte-pair vocabulary, trained on the demonstrations
    superwords: bool = True  # byte pairs may span words (D8)

    dataset: str = ""  # JSON file of dialogues in the authors' format, instead of the world's own demonstrations
    demonstrations: int = 20_000  # dialogues that the world's scripted player makes for the warm start
    warm_start_epochs: int = 7  # passes over the demonstrations; 0 leaves the actor as it is
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
    critic_warmup: int = 400  # critic updates before the actor moves (paper: 20 iterations)
    gamma: float = 0.95  # discount of an utterance (paper: 0.95)
    polyak: float = 0.1  # share of the critic that enters its target copy after every update (paper: 0.1)
    expectile: float = 0.9  # of E6, for --critic-loss iql
    truncation_is_terminal: bool = True  # no bootstrap where the world's time limit cut a dialogue off (D6)

    actor_lr: float = 1e-3  # paper: 3e-4 in Table 3, 1e-5 in the released configuration; see D5
    anneal_lr: bool = True  # the actor's learning rate falls to zero over the iterations (D9)
    actor_updates: int = 4  # updates of the actor in an iteration, each on utterances just sampled
    actor_batch: int = 64  # dialogues in an update of the actor
    kl: float = 0.2  # weight of the KL divergence from the warm-started actor (D1)
    center: bool = True  # advantages minus their batch mean (D3)
    baseline: bool = False  # a learned baseline for every token (E4, E5)
    max_grad_norm: float = 1.0  # gradients of actor and critic are clipped to this norm, apart

    eval_every: int = 10  # iterations between evaluations
    eval_episodes: int = 314  # sampled dialogues of an evaluation, rounded to whole passes over the world's tasks
    save_every: int = 10  # iterations between checkpoints; Ctrl-C writes one, too


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
    "critic/bias": "V minus Monte-Carlo return at the first turn, in units of return; healthy within 10 %",
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
    print(f"archer.py: {message}", file=sys.stderr)
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
    layouts: dict = field(default_factory=dict, repr=False)  # memory of `lay_out`

    def __len__(self) -> int:
        return len(self.actions)

    def replies(self) -> list[str]:
        """What the world wrote behind each utterance."""
        turns = zip(self.observations, self.actions, self.observations[1:], strict=False)
        return [after.removeprefix(before + action) for before, action, after in turns]


def read_dataset(path: str, start: str) -> list[Trajectory]:
    """Dialogues in the authors' format, [{"lines": ["Is it alive? Yes.", ...], "correct": bool, "word": [...]}, ...].

    `start` is the world's first observation. Stops with number and field of a malformed record.
    """
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        stop(f"--dataset {path}: {error}; give a JSON file, a list of dialogues")
    if not isinstance(records, list) or not records:
        stop(f"--dataset {path}: no dialogues in it; it must be a list of records with lines, correct and word")
    trajectories = []
    for n, record in enumerate(records):
        for key, kind in {"lines": list, "correct": bool, "word": list}.items():
            if not isinstance(record, dict) or not isinstance(record.get(key), kind) or record[key] == []:
                stop(f'--dataset {path}: record {n}, field "{key}": must be a {kind.__name__} that is not empty')
        observations, actions = [start], []
        for line in record["lines"]:
            question, mark, reply = str(line).rpartition("? ")
            if not mark:
                stop(f'--dataset {path}: record {n}, field "lines": {line!r} is no "question? answer"')
            actions.append(question + "?")
            observations.append(f"{observations[-1]}{question}? {reply}\n")
        rewards = [-1.0] * (len(actions) - 1) + [record["correct"] - 1.0]
        trajectories.append(Trajectory(observations, actions, rewards, record["correct"], str(record["word"][0])))
    return trajectories


@lru_cache(maxsize=500_000)  # worlds repeat themselves: each piece of text is tokenised once
def encode(tokenizer, text: str) -> list[int]:
    """Token ids of a piece of text. The list is shared: do not change it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def lay_out(t: Trajectory, tokenizer, append_only: bool) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """The tokens of a dialogue: trunks, and for each of its n + 1 states the trunk and how many tokens of it it sees.

    Where the history only grows, one trunk holds all states. Sampled tokens that spell what the world took stay.
    """
    if id(tokenizer) not in t.layouts:
        trunks = [encode(tokenizer, text) for text in (t.observations[:1] if append_only else t.observations)]
        states = [(row, len(trunk)) for row, trunk in enumerate(trunks)]
        for turn, (action, reply) in enumerate(zip(t.actions, t.replies(), strict=True) if append_only else ()):
            sampled = t.action_ids[turn][:-1] if t.action_ids else []
            said = sampled if tokenizer.decode(sampled) == action else encode(tokenizer, action)
            trunks = [trunks[0] + said + encode(tokenizer, reply)]
            states.append((0, len(trunks[0])))
        t.layouts[id(tokenizer)] = trunks, states
    return t.layouts[id(tokenizer)]


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
    weight_N2 = torch.where(gap_N2 > 0, expectile, 1 - expectile)  # E6
    return (weight_N2 * gap_N2**2).sum(-1).mean()  # E2


def mc_returns(rewards: list[float], gamma: float) -> list[float]:
    """Discounted return from every turn to the end of the dialogue.

    >>> mc_returns([-1.0, -1.0, 0.0], 0.5)
    [-1.5, -1.0, 0.0]
    """
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.append(total)
    return returns[::-1]


def advantages(q_N2: torch.Tensor, v_N2: torch.Tensor) -> torch.Tensor:
    """E3: min Q - min V [N], the minimum over the twins."""
    return q_N2.min(-1).values - v_N2.min(-1).values  # E3


def reinforce_loss(logp_M, advantage_N, owner_M, baseline_M=0.0) -> torch.Tensor:
    """E3: minus the mean over utterances of sum_i log pi(a_i|s,a_<i) * A(s,a), and E4 with a baseline for each token.

    `owner_M` is the utterance that a token belongs to. Neither advantage nor baseline gets a gradient.
    """
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

    An utterance is (trunk, number of the trunk's tokens before it, its tokens). It forks off there and sees nothing of
    what follows in the trunk, nor of other utterances. Where it begins as the trunk goes on, it shares its tokens.

    Returns ids [B, T], positions [B, T], visible [B, T, T] (query, key) and for each utterance the columns from which
    its tokens are predicted and, last, the column that has seen all of it.
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
    ids, position, seen, owner = torch.tensor([row + [(0, 0, 0, -1)] * (T - len(row)) for row in rows]).unbind(-1)
    visible = (owner[:, None] == 0) & (position[:, None] < seen[:, :, None])
    visible |= (owner[:, None] == owner[:, :, None]) & torch.ones(T, T, dtype=torch.bool).tril()
    return ids, position, visible, columns


def attention_bias(visible: torch.Tensor, model) -> torch.Tensor:
    """What a query may see [B, Q, K], as the additive mask [B, 1, Q, K] that every attention of transformers takes."""
    blocked = torch.finfo(model.dtype).min  # not -inf: the softmax of a row of padding must stay finite
    return torch.zeros(visible.shape, dtype=model.dtype).masked_fill(~visible, blocked)[:, None].to(model.device)


def forward(body, ids, position, visible, cache=None, use_cache: bool = False):
    """One pass of a decoder with explicit positions and visibility: last hidden states [B, Q, H], and the cache."""
    tokens, limit = int(position.max()) + 1, getattr(body.config, "max_position_embeddings", sys.maxsize)
    if tokens > limit:
        stop(f"a dialogue has {tokens} tokens, {body.config.model_type} reads {limit}; take one with a longer context")
    inputs = {"input_ids": ids.to(body.device), "position_ids": position.to(body.device)}
    bias = attention_bias(visible, body)
    output = body(**inputs, attention_mask=bias, past_key_values=cache, use_cache=use_cache)
    return output.last_hidden_state, output.past_key_values


def read(body, trunks, utterances):
    """Last hidden states [B, T, H] of the packed tokens and the utterances' columns, as `pack` gives them."""
    ids, position, visible, columns = pack(trunks, utterances)
    return forward(body, ids, position, visible)[0], columns


def score(actor, trunks, utterances, temperature: float):
    """Logits [M, V] from which each token of the utterances is drawn, last hidden states [M, H], owners [M]."""
    # The last token of an utterance, its end of turn, is predicted but never read: it need not be fed.
    hidden_BTH, columns = read(actor.base_model, trunks, [(row, start, ids[:-1]) for row, start, ids in utterances])
    owner_M = torch.tensor([n for n, (_, _, ids) in enumerate(utterances) for _ in ids], device=actor.device)
    row_M = [row for row, _, ids in utterances for _ in ids]
    hidden_MH = hidden_BTH[row_M, [column for own in columns for column in own]]
    return actor.get_output_embeddings()(hidden_MH).float() / temperature, hidden_MH, owner_M


def token_ids(utterances, actor) -> torch.Tensor:
    """The tokens [M] of all utterances in a row."""
    return torch.tensor([token for _, _, ids in utterances for token in ids], device=actor.device)


class Critic(nn.Module):
    """Twin Q and V heads on one language model: V(s) reads a state, Q(s,a) a state and an utterance.

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
            trunks, states = join(trajectories, self.tokenizer, self.append_only)
            end = encode(self.tokenizer, "\n")
            forks = [(*states[s], encode(self.tokenizer, text) + end) for s, text in zip(at, utterances, strict=True)]
            hidden_BTH, columns = read(self.body, trunks, forks)
            row_S, length_S = torch.tensor(states).T
            v_SH = hidden_BTH[row_S, length_S - 1]
            q_NH = hidden_BTH[[row for row, _, _ in forks], [row[-1] for row in columns]]
        v_S2 = torch.cat([head(v_SH.float()) for head in self.v_heads], -1)
        q_N2 = torch.cat([head(q_NH.float()) for head in self.q_heads], -1)
        return v_S2, q_N2

    def cls(self, texts: list[str]) -> torch.Tensor:
        """[CLS] vectors [N, H]; a text that is too long loses its beginning."""
        limit = self.body.config.max_position_embeddings - 2  # RoBERTa keeps two positions for itself
        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        return self.body(**inputs.to(self.body.device)).last_hidden_state[:, 0]


def mlp(inputs: int, width: int, value: float) -> nn.Module:
    """Two hidden layers and one output, which starts near `value`."""
    last = nn.Linear(width, 1)
    nn.init.constant_(last.bias, value)  # D4
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)


def join(trajectories: list[Trajectory], tokenizer, append_only: bool):
    """The layouts of several dialogues in a row: trunks, and (trunk, length) of each of their S states."""
    trunks, states = [], []
    for t in trajectories:
        own, ends = lay_out(t, tokenizer, append_only)
        states += [(len(trunks) + row, length) for row, length in ends]
        trunks += own
    return trunks, states


def make_tokenizer(texts: list[str], size: int, superwords: bool = True):
    """A byte-pair vocabulary trained on the demonstrations."""
    tokenizer, special = Tokenizer(models.BPE()), "<|endoftext|>"
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not superwords)
    # D8: merges stay within what this finds, a whole question or a whole answer.
    pieces = pre_tokenizers.Split(Regex(r"[^\n?]*[?\n]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes] if superwords else [as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # any text can be written
    options = {"special_tokens": [special], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, **options))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special, pad_token=special)


def load(auto, source: str, flag: str):
    """A model, tokenizer or configuration by Hugging Face name or local folder."""
    try:
        return auto.from_pretrained(source)
    except (OSError, ValueError) as error:
        stop(f"{flag} {source}: {str(error).splitlines()[0]}; give tiny, a local folder or a Hugging Face name")


def make_actor(args: Args, source: str, texts: list[str]):
    """The actor and its tokenizer; `source` is tiny, a name or a folder, `texts` train the tiny one's vocabulary."""
    if source == "tiny":  # D5
        tokenizer = make_tokenizer(texts, args.vocabulary, args.superwords)
        sizes = {"n_embd": args.width, "n_layer": args.layers, "n_head": max(1, args.width // 32), "n_positions": 1024}
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **sizes,
            activation_function="gelu_pytorch_tanh",  # gelu_new in one kernel: a quarter of the time of a step
            initializer_range=0.1,  # GPT-2's 0.02 is for 768 wide; smaller learns slower, see LOG.md
        )  # fmt: skip
        actor = transformers.AutoModelForCausalLM.from_config(config)
    else:
        tokenizer = load(transformers.AutoTokenizer, source, "--actor")
        actor = load(transformers.AutoModelForCausalLM, source, "--actor")
    return actor.to(args.device, getattr(torch, args.dtype)).eval(), tokenizer  # eval: no dropout, ever


def make_critic(args: Args, source: str, actor, tokenizer, append_only: bool, value: float) -> Critic:
    """The critic; `source` is tiny, tiny-cls, a name or a folder."""
    if source == "tiny":
        body = copy.deepcopy(actor.base_model)  # D2
    elif source == "tiny-cls":
        tokenizer, cls = copy.deepcopy(tokenizer), (tokenizer.eos_token, tokenizer.eos_token_id)
        with_cls = processors.TemplateProcessing(f"{cls[0]} $A", special_tokens=[cls])
        tokenizer.backend_tokenizer.post_processor = with_cls
        sizes = {"hidden_size": args.width, "num_hidden_layers": args.layers, "intermediate_size": 4 * args.width}
        sizes |= {"vocab_size": len(tokenizer), "num_attention_heads": max(1, args.width // 32)}
        body = transformers.AutoModel.from_config(transformers.BertConfig(**sizes))
    else:
        tokenizer = load(transformers.AutoTokenizer, source, "--critic")
        body = load(transformers.AutoModel, source, "--critic")
    tokenizer.truncation_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # masked, so that any will do
    return Critic(body.to(getattr(torch, args.dtype)), tokenizer, append_only, value).to(args.device).eval()


# ---------------------------------------------------------- 5. rollouts
def turn_enders(tokenizer, size: int) -> torch.Tensor:
    """Which tokens [V] end a turn: all whose text holds a newline, and the end of text."""
    return torch.tensor([token == tokenizer.eos_token_id or "\n" in tokenizer.decode([token]) for token in range(size)])


def feed(actor, cache, visible_BT, length_B, pieces: list[list[int]]):
    """Lets each dialogue read its piece of text, behind what the key-value cache holds (None: nothing yet).

    Pieces are padded on the left, so that the last column is the last token of all. Returns hidden states [B, K, H]
    of the K columns, the cache, which of its columns a dialogue sees [B, T + K] and how long the dialogue is now [B].
    """
    B, K = len(pieces), max(map(len, pieces))
    if cache is None:
        visible_BT, length_B = torch.zeros(B, 0, dtype=torch.bool), torch.zeros(B, dtype=torch.long)
    ids = torch.tensor([[0] * (K - len(piece)) + piece for piece in pieces])
    real_BK = torch.arange(K) >= K - torch.tensor([[len(piece)] for piece in pieces])
    position = (length_B[:, None] + real_BK.cumsum(1) - 1).clamp(min=0)
    visible_BKK = real_BK[:, None] & torch.ones(K, K, dtype=torch.bool).tril()
    visible = torch.cat([visible_BT[:, None].expand(-1, K, -1), visible_BKK], -1)
    hidden, cache = forward(actor.base_model, ids, position, visible, cache, use_cache=True)
    return hidden, cache, torch.cat([visible_BT, real_BK], 1), length_B + real_BK.sum(1)


@torch.no_grad()
def sample(actor, cache, hidden_BNH, visible_BNT, start_BN, enders, args: Args, generator, greedy=False):
    """Writes N utterances behind each of B cached trunks, a token of all of them at a time.

    `hidden_BNH` is the state before each utterance, `visible_BNT` what it sees of the cache and `start_BN` its first
    position. Returns tokens [B, N, L], log-probs, which of them count, and which the cache has read [B, N, L - 1].
    """
    B, N, _ = hidden_BNH.shape
    open_BN = torch.ones(B, N, dtype=torch.bool)
    tokens, logps, counts, reads = [], [], [], [torch.zeros(B, N, 0, dtype=torch.bool)]
    for step in range(args.max_action_tokens):
        if step > 0:
            reads.append(open_BN[..., None])
            visible_BNT = torch.cat([visible_BNT, torch.eye(N, dtype=torch.bool).expand(B, N, N)], -1)  # each its own
            hidden_BNH, cache = forward(actor.base_model, tokens[-1], start_BN + step - 1, visible_BNT, cache, True)
        logp_BNV = (actor.get_output_embeddings()(hidden_BNH).float() / args.temperature).log_softmax(-1)
        if greedy:
            token_BN = logp_BNV.argmax(-1)
        else:  # the first token whose cumulative probability exceeds a uniform number
            u_BN1 = torch.rand(B, N, 1, generator=generator, device=generator.device)
            token_BN = (logp_BNV.exp().cumsum(-1) < u_BN1).sum(-1).clamp(max=logp_BNV.shape[-1] - 1)
        logps.append(logp_BNV.gather(-1, token_BN[..., None])[..., 0].cpu())
        tokens.append(token_BN.cpu())
        counts.append(open_BN)
        open_BN = open_BN & ~enders[tokens[-1]]
        if not open_BN.any():
            break
    return torch.stack(tokens, -1), torch.stack(logps, -1), torch.stack(counts, -1), torch.cat(reads, -1)


@torch.no_grad()
def rollout(actor, tokenizer, enders, worlds, args: Args, generator, seeds=None, indices=None, greedy=False):
    """Plays all worlds to their end, in lockstep; the cache is kept across turns where the history only grows.

    Returns the trajectories and -log pi of every utterance, as sampled.
    """
    observations, infos = worlds.reset(seeds=seeds, indices=indices)
    append_only = worlds.envs[0].append_only
    played = [Trajectory([text], [], [], False, info["answer"]) for text, info in zip(observations, infos, strict=True)]
    unread = [encode(tokenizer, text) for text in observations]
    alive, cache, visible, length, nll = list(range(len(played))), None, None, None, []
    while alive:
        hidden, cache, visible, length = feed(actor, cache, visible, length, [unread[i] for i in alive])
        before = hidden[:, -1:], visible[:, None], length[:, None]
        tokens, logp, counts, cached = sample(actor, cache, *before, enders, args, generator, greedy)
        nll += (-logp * counts).sum((1, 2)).tolist()
        ids = {i: tokens[b, 0, counts[b, 0]].tolist() for b, i in enumerate(alive)}
        actions = [spoken(tokenizer, ids[i]) if i in ids else None for i in range(len(played))]
        observations, rewards, terminated, truncated, infos = worlds.step(actions)
        for b, i in enumerate(alive):
            t = played[i]
            t.observations.append(observations[i])
            t.actions.append(infos[i]["action"])
            t.action_ids.append(ids[i])
            t.rewards.append(rewards[i])
            t.terminated = terminated[i]
            reply = encode(tokenizer, t.replies()[-1])
            if not append_only:
                unread[i] = encode(tokenizer, observations[i])
            elif tokenizer.decode(ids[i][:-1]) == t.actions[-1]:
                unread[i], length[b] = reply, length[b] + len(ids[i]) - 1
            else:  # the world took something else than what was written: read that instead
                unread[i], cached[b] = encode(tokenizer, t.actions[-1]) + reply, False
        visible = torch.cat([visible, cached[:, 0]], 1)
        keep = [b for b, i in enumerate(alive) if not (terminated[i] or truncated[i])]
        if not append_only:
            cache = None
        elif 0 < len(keep) < len(alive):  # finished dialogues leave the batch
            cache.batch_select_indices(torch.tensor(keep, device=actor.device))
            visible, length = visible[keep], length[keep]
        alive = [alive[b] for b in keep]
    return played, nll


@torch.no_grad()
def fresh_utterances(actor, tokenizer, enders, trajectories, append_only, args: Args, generator, chunk=32):
    """One new utterance of the current actor in every state of every trajectory, as token ids.

    All states of a trunk share one prefill of it.
    """
    fresh = []
    for first in range(0, len(trajectories), chunk):
        part = trajectories[first : first + chunk]
        trunks, states = join(part, tokenizer, append_only)
        row_S, length_S = torch.tensor(states).T.contiguous()
        slot_S = torch.arange(len(states)) - torch.searchsorted(row_S, row_S)  # how many states of its trunk precede it
        start_BN = torch.ones(len(trunks), int(slot_S.max()) + 1, dtype=torch.long)
        start_BN[row_S, slot_S] = length_S
        hidden, cache, visible, length_B = feed(actor, None, None, None, trunks)
        column_BN = visible.shape[1] - length_B[:, None] + start_BN  # feed pads on the left
        hidden = hidden[torch.arange(len(trunks))[:, None], column_BN - 1]
        visible = visible[:, None] & (torch.arange(visible.shape[1]) < column_BN[..., None])
        tokens, _, counts, _ = sample(actor, cache, hidden, visible, start_BN, enders, args, generator)
        written = iter([tokens[at][counts[at]].tolist() for at in zip(row_S, slot_S, strict=True)])
        fresh += [[next(written) for _ in t.observations] for t in part]
    return fresh


def spoken(tokenizer, ids: list[int]) -> str:
    """The text of an utterance as a world takes it: up to the first newline, without blanks at its ends."""
    return tokenizer.decode(ids, skip_special_tokens=True).split("\n", 1)[0].strip()


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


def warm_start(actor, tokenizer, demonstrations: list[Trajectory], append_only: bool, args: Args, rng) -> None:
    """Supervised learning of the demonstrations' utterances, their ends of turn included."""
    optimizer = torch.optim.AdamW(actor.parameters(), lr=args.warm_start_lr, betas=(0.9, 0.98), weight_decay=0.01)
    orders, size = [rng.permutation(len(demonstrations)) for _ in range(args.warm_start_epochs)], args.warm_start_batch
    batches = [order[i : i + size] for order in orders for i in range(0, len(order), size)]
    for step, batch in enumerate(bar := tqdm(batches, desc="warm start", unit="update", disable=None)):
        share = min(1, (step + 1) / 50, 1.02 - step / len(batches))  # up in 50 updates, then linearly down
        optimizer.param_groups[0]["lr"] = args.warm_start_lr * share
        part, end = [demonstrations[i] for i in batch], encode(tokenizer, "\n")
        trunks, states = join(part, tokenizer, append_only)
        said = [encode(tokenizer, action) + end for t in part for action in t.actions]
        if args.warm_start_replies:  # D7
            replies = [encode(tokenizer, reply) for t in part for reply in t.replies()]
            said = [ids + reply for ids, reply in zip(said, replies, strict=True)]
        utterances = [(*states[s], ids) for s, ids in zip(states_acted(part), said, strict=True)]
        logits_MV, _, _ = score(actor, trunks, utterances, temperature=1.0)
        loss = nn.functional.cross_entropy(logits_MV, token_ids(utterances, actor))
        descend(loss, optimizer, actor, 1.0, "warm start")
        bar.set_postfix(nll=f"{loss.item():.2f}", refresh=False)


def states_acted(trajectories: list[Trajectory]) -> list[int]:
    """Which of the trajectories' states in a row are those in which an utterance was made; the next state is one on."""
    acted, first = [], 0
    for t in trajectories:
        acted += range(first, first + len(t))
        first += len(t) + 1
    return acted


def critic_update(critic, target, optimizer, trajectories, fresh, args: Args) -> dict[str, float]:
    """One step on E1 and E2, or what else --critic-loss names, and one Polyak step of the target.

    `fresh` has the text of an utterance of the current actor for each of the n + 1 states of every trajectory; only
    td reads it.
    """
    acted, taken = states_acted(trajectories), [action for t in trajectories for action in t.actions]
    last_states = np.cumsum([len(t) + 1 for t in trajectories]) - 1
    over = [t.terminated or args.truncation_is_terminal for t in trajectories]  # D6
    ended = {int(s) for s, is_end in zip(last_states, over, strict=True) if is_end}
    terminated_N = torch.tensor([float(s + 1 in ended) for s in acted], device=critic.body.device)
    reward_N = terminated_N.new_tensor([reward for t in trajectories for reward in t.rewards])
    return_N = terminated_N.new_tensor([g for t in trajectories for g in mc_returns(t.rewards, args.gamma)])
    at, texts = acted, taken
    if args.critic_loss == "td":  # the current actor's utterances, in every state that is no end
        at = [s for s in range(last_states[-1] + 1) if s not in ended]
        texts = [text for row in fresh for text in row]
        texts = [texts[s] for s in at]

    v_S2, q_N2 = critic(trajectories, acted, taken)
    with torch.no_grad():
        target_v_S2, target_q_N2 = target(trajectories, at, texts)
        q_target_N2 = td_target(reward_N, target_v_S2[[s + 1 for s in acted]], terminated_N, args.gamma)
        if args.critic_loss == "mc":
            q_target_N2 = target_q_N2 = return_N[:, None].expand(-1, 2)
    q_loss = nn.functional.mse_loss(q_N2, q_target_N2)  # E1
    v_loss = value_loss(v_S2[at], target_q_N2, args.expectile if args.critic_loss == "iql" else 0.5)  # E2, E6
    norm = descend(q_loss + v_loss, optimizer, critic, args.max_grad_norm, "critic")
    polyak_update(target, critic, args.polyak)

    error_N = v_S2[acted].detach().mean(-1) - return_N
    first_turns = np.cumsum([0] + [len(t) for t in trajectories[:-1]])
    metrics = {"critic/q_loss": q_loss.detach(), "critic/v_loss": v_loss.detach(), "critic/grad_norm": norm}
    metrics["critic/explained_variance"] = 1 - error_N.var() / return_N.var().clamp(min=1e-8)
    metrics["critic/bias"] = error_N[first_turns].mean()
    return {tag: float(figure) for tag, figure in metrics.items()}


def actor_update(actor, start_actor, critic, baseline, optimizer, tokenizer, trajectories, fresh, append_only, args):
    """One step on E3 with utterances just sampled in replayed states, `fresh`, as token ids."""
    acted, (trunks, states) = states_acted(trajectories), join(trajectories, tokenizer, append_only)
    sampled = [ids for row in fresh for ids in row[:-1]]  # none of what could be said after the end
    utterances = [(*states[s], ids) for s, ids in zip(acted, sampled, strict=True)]
    with torch.no_grad():
        v_S2, q_N2 = critic(trajectories, acted, [spoken(tokenizer, ids) for ids in sampled])
        raw_N = advantages(q_N2, v_S2[acted])
        advantage_N = raw_N - raw_N.mean() if args.center else raw_N  # D3
        start_logp_MV = score(start_actor, trunks, utterances, args.temperature)[0].log_softmax(-1)

    logits_MV, hidden_MH, owner_M = score(actor, trunks, utterances, args.temperature)
    logp_MV = logits_MV.log_softmax(-1)
    logp_M = logp_MV.gather(-1, token_ids(utterances, actor)[:, None])[:, 0]
    baseline_M = baseline(hidden_MH.detach().float())[:, 0] if args.baseline else torch.zeros_like(logp_M)
    policy_loss = reinforce_loss(logp_M, advantage_N, owner_M, baseline_M)
    kl = kl_divergence(logp_MV, start_logp_MV).sum() / len(sampled)
    loss = policy_loss + args.kl * kl  # D1
    metrics = {"actor/loss": policy_loss.detach(), "actor/kl": kl.detach()}
    metrics["actor/entropy"] = -(logp_MV.detach().exp() * logp_MV.detach()).sum() / len(sampled)
    metrics |= {"actor/advantage_mean": raw_N.mean(), "actor/advantage_std": raw_N.std()}
    if args.baseline:
        token_loss = baseline_loss(baseline_M, advantage_N, owner_M)
        loss, metrics["actor/baseline_loss"] = loss + token_loss, token_loss.detach()
    metrics["actor/grad_norm"] = descend(loss, optimizer, actor, args.max_grad_norm, "actor")
    return {tag: float(figure) for tag, figure in metrics.items()}


# ---------------------------------------------------------- 7. evaluation
def summarise(played: list[Trajectory]) -> dict[str, float]:
    """Mean undiscounted return, success, length, truncation and share of invalid utterances."""
    ends = [t.terminated for t in played]
    invalid = ["invalid" in reply.lower() for t in played for reply in t.replies()]
    figures = {"return": [sum(t.rewards) for t in played], "success": ends, "truncated": np.logical_not(ends)}
    figures |= {"length": [len(t) for t in played], "invalid": invalid}
    return {key: float(np.mean(values)) for key, values in figures.items()}


def evaluate(actor, tokenizer, enders, args: Args) -> dict[str, float]:
    """Every task of the world, sampled and greedy, always from the same seed: evaluations compare."""
    tasks, metrics = envs.make(args.env).num_tasks, {}
    for suffix, passes in {"": max(1, round(args.eval_episodes / tasks)), "_greedy": 1}.items():
        indices = list(range(tasks)) * passes
        worlds, generator = make_worlds(args, len(indices)), torch.Generator(args.device).manual_seed(0)
        seeds, greedy = list(range(len(indices))), suffix == "_greedy"
        played, _ = rollout(actor, tokenizer, enders, worlds, args, generator, seeds, indices, greedy)
        metrics |= {f"eval/{key}{suffix}": summarise(played)[key] for key in ("return", "success")}
    return metrics


def make_worlds(args: Args, n: int) -> envs.VecTextEnv:
    """n worlds in lockstep."""
    try:
        return envs.VecTextEnv(args.env, n, **({"oracle": args.oracle} if args.oracle else {}))
    except (ValueError, envs.Unavailable) as error:
        stop(f"--env {args.env}: {error}")


# ---------------------------------------------------------- 8. save and resume
def write(path: Path, records: list[dict], indent: int | None = None) -> None:
    """JSON, a line each. The file appears whole or not at all: it is written under another name, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(record, indent=indent) + "\n" for record in records), encoding="utf-8")
    temporary.replace(path)


def append(path: Path, records: list[dict]) -> None:
    """Appends lines of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def keep_until(path: Path, iteration: int) -> None:
    """Drops from a log what was written after the checkpoint of an iteration, half a line at the end included."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    write(path, [record for record in map(json.loads, lines) if record["iteration"] <= iteration])


def save(run: Path, state: dict, actor, tokenizer, critic: Critic, buffer: list[Trajectory]) -> None:
    """A checkpoint: actor and critic as Hugging Face folders, the replay buffer as text, all else in state.pt."""
    folder = run / "checkpoints" / f"{state['iteration']:06d}"
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name, model, its_tokenizer in (("actor", actor, tokenizer), ("critic", critic.body, critic.tokenizer)):
        model.save_pretrained(temporary / name)
        its_tokenizer.save_pretrained(temporary / name)
    write(temporary / "replay.jsonl", [{k: v for k, v in vars(t).items() if k != "layouts"} for t in buffer])
    torch.save(state, temporary / "state.pt")
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
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    try:
        torch.zeros(1, device=args.device)
    except (AssertionError, RuntimeError) as error:
        stop(f"--device {args.device}: {str(error).splitlines()[0]}")
    rng, generator = np.random.default_rng(args.seed), torch.Generator(args.device).manual_seed(args.seed)
    worlds = make_worlds(args, args.rollouts)
    append_only = worlds.envs[0].append_only

    # --- the actor of a checkpoint, or a new one
    checkpoint = newest_checkpoint(args.resume, "--resume") if args.resume else None
    if checkpoint:
        run = Path(args.resume)
        state = torch.load(checkpoint / "state.pt", map_location=args.device, weights_only=True)
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
        actor, tokenizer = make_actor(args, str(checkpoint / "actor"), [])
        lines = (checkpoint / "replay.jsonl").read_text(encoding="utf-8").splitlines()
        buffer = [Trajectory(**json.loads(line)) for line in lines]
    else:
        if args.critic not in ("tiny", "tiny-cls"):  # it is made after the warm start: better to know now
            load(transformers.AutoConfig, args.critic, "--critic")
        if args.dataset:
            demonstrations = read_dataset(args.dataset, worlds.envs[0].reset(seed=args.seed)[0])
        else:
            made = worlds.envs[0].demonstrations(args.demonstrations, args.seed)
            keys = ("observations", "actions", "rewards", "terminated", "answer")
            demonstrations = [Trajectory(**{key: dialogue[key] for key in keys}) for dialogue in made]
        if not demonstrations:
            stop("--demonstrations 0: the tiny actor's vocabulary is trained on them; give at least one")
        actor, tokenizer = make_actor(args, args.actor, [t.observations[-1] for t in demonstrations[:3000]])
        warm_start(actor, tokenizer, demonstrations, append_only, args, rng)
    vocabulary, width = actor.get_output_embeddings().weight.shape
    enders = turn_enders(tokenizer, vocabulary)

    # --- Ctrl-C ends the iteration that it interrupts, so that all checkpoints lie between iterations
    interrupted = False

    def interrupt(*_):
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one aborts

    signal.signal(signal.SIGINT, interrupt)

    # --- all that learns; a checkpoint overwrites where it starts
    if not checkpoint:
        evaluation = evaluate(actor, tokenizer, enders, args)
        seeds = rng.integers(2**31, size=args.rollouts).tolist()
        buffer, _ = rollout(actor, tokenizer, enders, worlds, args, generator, seeds)
        state = {"iteration": 0, "episodes": len(buffer), "critic_updates": 0, "evaluation": evaluation}
        state["warm_start_return"] = evaluation["eval/return"]
    value = float(np.mean([mc_returns(t.rewards, args.gamma)[0] for t in buffer]))  # D4
    source = str(checkpoint / "critic") if checkpoint else args.critic
    critic = make_critic(args, source, actor, tokenizer, append_only, value)
    target, start_actor = copy.deepcopy(critic).requires_grad_(False), copy.deepcopy(actor).requires_grad_(False)
    baseline = mlp(width, width, 0.0).to(args.device)
    parameters = [*actor.parameters(), *baseline.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.actor_lr, weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)
    modules = {"start_actor": start_actor, "baseline": baseline, "optimizer": optimizer}
    modules |= {"critic": critic, "target": target, "critic_optimizer": critic_optimizer}

    def checkpoint_now():
        state["seconds"], state["cpu_seconds"] = time.time() - started, time.process_time() - cpu_started
        state["modules"] = {name: module.state_dict() for name, module in modules.items()}
        state["rng"] = rng.bit_generator.state, generator.get_state(), torch.get_rng_state()
        save(run, state, actor, tokenizer, critic, buffer)

    if checkpoint:
        for name, module in modules.items():
            module.load_state_dict(state["modules"][name])
        critic_optimizer.param_groups[0]["lr"] = args.critic_lr  # the saved state has brought back the old one
        rng.bit_generator.state = state["rng"][0]
        generator.set_state(state["rng"][1].cpu())
        torch.set_rng_state(state["rng"][2].cpu())
        keep_until(run / "metrics.jsonl", state["iteration"])
        keep_until(run / "rollouts.jsonl", state["iteration"])
    else:
        run = Path(args.runs) / f"{args.env}__archer__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        while run.exists():  # a twin of this very second
            run = run.with_name(run.name + "b")
        run.mkdir(parents=True)
    write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    if not checkpoint:
        checkpoint_now()
    print(f"{run}: the warm start returns {state['warm_start_return']:.2f}")

    # --- iterations
    writer = SummaryWriter(str(run), purge_step=state["iteration"] + 1)
    bar = tqdm(total=args.iterations, initial=state["iteration"], desc="iterations", disable=None)
    while state["iteration"] < args.iterations and not interrupted:
        began = time.time()
        # 1. dialogues of the current actor
        seeds = rng.integers(2**31, size=args.rollouts).tolist()
        played, nll = rollout(actor, tokenizer, enders, worlds, args, generator, seeds)
        buffer += played
        while sum(map(len, buffer)) > args.buffer_size and len(buffer) > 1:
            buffer.pop(0)

        # 2. the critic; the actor stands still, so its utterances for E2 are sampled once for all updates
        pool = [buffer[i] for i in rng.integers(len(buffer), size=args.critic_pool)]
        asked = pool if args.critic_loss == "td" else []  # the other losses know no utterances but those in the data
        fresh = fresh_utterances(actor, tokenizer, enders, asked, append_only, args, generator)
        texts = [[spoken(tokenizer, ids) for ids in row] for row in fresh] or [[]] * len(pool)
        critic_rows, actor_rows = [], []
        for _ in range(args.critic_updates):
            batch = rng.integers(len(pool), size=args.critic_batch)
            of_batch = [pool[i] for i in batch], [texts[i] for i in batch]
            critic_rows.append(critic_update(critic, target, critic_optimizer, *of_batch, args))
        state["critic_updates"] += args.critic_updates

        # 3. the actor, on utterances of its own
        share = 1 - state["iteration"] / args.iterations if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"] = args.actor_lr * share  # D9
        for _ in range(args.actor_updates if state["critic_updates"] > args.critic_warmup else 0):
            batch = [buffer[i] for i in rng.integers(len(buffer), size=args.actor_batch)]
            fresh = fresh_utterances(actor, tokenizer, enders, batch, append_only, args, generator)
            learners = actor, start_actor, critic, baseline, optimizer
            actor_rows.append(actor_update(*learners, tokenizer, batch, fresh, append_only, args))

        # 4. the books
        state["iteration"] += 1
        state["episodes"] += len(played)
        metrics = {"rollout/nll": float(np.mean(nll))}
        metrics |= {f"rollout/{key}": figure for key, figure in summarise(played).items()}
        for rows in filter(None, (critic_rows, actor_rows)):
            metrics |= {tag: float(np.mean([row[tag] for row in rows])) for tag in rows[0]}
        if state["iteration"] % args.eval_every == 0 or state["iteration"] == args.iterations:
            state["evaluation"] = evaluate(actor, tokenizer, enders, args)
            metrics |= state["evaluation"]
        metrics["time/utterances_per_second"] = sum(map(len, played)) / (time.time() - began)
        for tag, figure in metrics.items():
            writer.add_scalar(tag, figure, state["iteration"])
        append(run / "metrics.jsonl", [{"iteration": state["iteration"]} | metrics])
        append(run / "rollouts.jsonl", dialogues(critic, played[:4], state["iteration"]))
        bar.update()
        tqdm.write(progress(state["iteration"], metrics))
        if state["iteration"] % args.save_every == 0 or state["iteration"] == args.iterations or interrupted:
            checkpoint_now()
    bar.close()
    writer.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        print(f"stopped; go on with: python archer.py --resume {run}")

    summary = {f"eval_{key}": state["evaluation"][f"eval/{key}"] for key in ("return", "return_greedy", "success")}
    summary = {"warm_start_return": state["warm_start_return"]} | summary | {"episodes": state["episodes"]}
    summary |= {"seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu_started}
    summary["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    summary |= {"seed": args.seed, "commit": commit()}
    write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    return summary


def commit() -> str:
    """The commit of this file, where there is git."""
    try:
        git = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() or "unknown"
    except OSError:
        return "unknown"


@torch.no_grad()
def dialogues(critic: Critic, played: list[Trajectory], iteration: int) -> list[dict]:
    """Dialogues for rollouts.jsonl, each turn with what the critic thinks of it."""
    records = []
    for t in played:
        v_S2, q_N2 = critic([t], range(len(t)), t.actions)
        figures = torch.stack([q_N2.min(-1).values, v_S2[:-1].min(-1).values, advantages(q_N2, v_S2[:-1])], -1)
        turns = [
            {"text": action + reply.rstrip("\n")} | {key: round(x, 3) for key, x in zip("QVA", row, strict=True)}
            for action, reply, row in zip(t.actions, t.replies(), figures.tolist(), strict=True)
        ]
        records.append({"iteration": iteration, "answer": t.answer, "return": sum(t.rewards), "turns": turns})
    return records


def progress(iteration: int, metrics: dict[str, float]) -> str:
    """One aligned line for the terminal."""
    shown = {"return": "rollout/return", "success": "rollout/success", "invalid": "rollout/invalid"}
    shown |= {"q_loss": "critic/q_loss", "explained": "critic/explained_variance", "kl": "actor/kl"}
    shown |= {"entropy": "actor/entropy", "eval": "eval/return", "greedy": "eval/return_greedy"}
    return f"{iteration:4d}" + "".join(f"  {name} {metrics[tag]:6.2f}" for name, tag in shown.items() if tag in metrics)


@torch.no_grad()
def play(args: Args) -> None:
    """The trained agent asks, a person answers."""
    transformers.logging.disable_progress_bar()
    actor, tokenizer = make_actor(args, str(newest_checkpoint(args.play, "--play") / "actor"), [])
    enders = turn_enders(tokenizer, len(actor.get_output_embeddings().weight))
    world, generator = make_worlds(args, 1).envs[0], torch.Generator(args.device).manual_seed(args.seed)
    text, _ = world.reset(seed=args.seed)
    print("Think of one of its words. Answer y (yes), n (no) or ? (no such question); c (correct) ends the game.")
    for _ in range(world.max_turns):
        hidden, cache, visible, length = feed(actor, None, None, None, [encode(tokenizer, text)])
        before = hidden[:, -1:], visible[:, None], length[:, None]
        tokens, _, counts, _ = sample(actor, cache, *before, enders, args, generator)
        question = spoken(tokenizer, tokens[counts].tolist())
        try:
            answer = input(f"{question} ")[:1].lower()
        except EOFError:
            break
        if answer == "c":
            break
        reply = {"y": "Yes.", "n": "No."}.get(answer, "Invalid Question.")
        text += f"{question} {reply}\n"


if __name__ == "__main__":
    args = tyro.cli(Args)
    if folder := args.resume or args.play:  # its own arguments hold, unless given anew
        newest_checkpoint(folder, "--resume" if args.resume else "--play")
        args = tyro.cli(Args, default=Args(**json.loads(Path(folder, "args.json").read_text(encoding="utf-8"))))
    play(args) if args.play else main(args)
