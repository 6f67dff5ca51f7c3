"""LOOP: PPO with a leave-one-out baseline for agents that act over many turns, in one file.

    python loop_ppo.py --env apps                  # goes on from checkpoints/apps, which sft.py made
    python loop_ppo.py --epochs 1 --minibatch 0    # RLOO; with --normalise --kl 0.04 GRPO
    python loop_ppo.py --resume runs/...           # goes on; the paper's 32B model: docs/loop_ppo.md

K rollouts of each task start from the same state. What a rollout earned above the mean of the others is the
advantage of all tokens that the model wrote in it. There is no value network; only E7 has a reference model.

Paper: Chen et al. 2025, arXiv:2502.01600
  E1  A_k = R_k - mean of the others = K/(K-1) (R_k - mean R)       Eq. 3      leave_one_out
  E2  min(w A, g(A)),  g(A) = A + eps |A|                           Eq. 4      surrogate
  E3  w = pi(x_t) / pi_old(x_t), one for each token                 Eq. 5, 10  ratios, --level token
  E4  w = product of E3 over a turn                                 sec. 4.2   ratios, --level turn
  E5  w = product of E3 over a rollout ("bandit")                   Eq. 4, 9   ratios, --level trajectory
  E6  A_k = (R_k - mean R) / std R                                  GRPO       normalised, --normalise
  E7  KL(pi || pi_start) ~ exp(d) - d - 1,  d = log pi_start/pi     GRPO       kl_penalty, --kl
Differs from the paper; in brackets what undoes it (docs/loop_ppo.md has the reasons):
  D1  A tiny Llama that learned from flawed solutions (--model), in the place of a 32B model that can code.
  D2  It learns on all difficulties (--max-difficulty 2): a small model forgets what it does not train on.
  D3  Its learning rate falls linearly to zero (--no-anneal-lr): late steps undo less.
  D4  E7, too, skips rollouts with a small |A| (--min-advantage 0), of which the paper says nothing.
  D5  E6 divides by the sample deviation; the release divides E1 by that of the population.
  D6  120 iterations (--iterations 200, the release's): enough for the tiny model.
  D7  AppWorld's prompt has no worked example, as the paper's has: contexts are shorter.
Rollouts with |A| < 0.01 (App. D) are left out before minibatches are formed, as in the release.
"""

import json
import re
import shutil
import time
from collections import ChainMap, Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter

import envs
from envs import runs


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "apps"  # an id of `python -m envs` (appworld: D7) or yours (docs/your_world.md); append-only
    world: str = ""  # its options, as NAME=VALUE,NAME=VALUE (docs/worlds.md), such as reward=success
    seed: int = 1  # of everything random in the run; 0 or more
    iterations: int = 120  # rounds of rollouts and updates (D6; release: 200); 0: only evaluates
    runs: str = "runs"  # folder in which the run's own folder is made
    name: str = ""  # of the run, for the name of its folder
    resume: str = ""  # folder of a run to continue; its saved arguments are used unless given anew
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 2  # on the CPU; take one beside other work, or to resume bit for bit
    world_threads: int = 2  # worlds that step at the same time, while the model writes for the others
    save_every: int = 20  # iterations between checkpoints; Ctrl-C writes one, too

    # --- model
    model: str = ""  # a causal LM: folder or Hugging Face name; "" takes the world's in checkpoints/ (D1)
    dtype: Literal["float32", "bfloat16"] = "float32"  # of its parameters; losses and adapters stay float32
    lora: bool = False  # train low-rank adapters only (needs the package peft)
    lora_rank: int = 16  # of the adapters; their alpha is twice that (paper: rank 16, alpha 32)
    gradient_checkpointing: bool = False  # compute activations again in the backward pass: slower, smaller

    # --- data
    max_difficulty: int = 3  # tasks above it are not trained on (paper: 2; see D2)
    tasks: int = 16  # tasks in an iteration (paper: 40)
    rollouts: int = 6  # K, rollouts of each task (paper: 6)
    worlds: int = 150  # rollouts that are played at the same time, also in evaluations; a multiple of K
    temperature: float = 1.0  # of sampling; log-probs are scored at the same one (paper: 1)
    max_action_tokens: int = 48  # tokens after which a turn is cut (paper: 1,500)
    context: int = 2048  # tokens after which a rollout is cut, at most the model's (paper: 32,000)
    finish_all: float = 0.9  # rollouts stop when so many of those played together have ended ... (paper: 0.9)
    finish_each: int = 4  # ... and so many of each task; those cut off leave their group (paper: 4)

    # --- algorithm
    level: Literal["token", "turn", "trajectory"] = "token"  # what has a ratio of its own: E3, E4, E5
    normalise: bool = False  # E6 instead of E1 (GRPO, and LOOP RwNorm)
    epochs: int = 2  # passes over the rollouts of an iteration (release: 2; RLOO and GRPO: 1)
    minibatch: int = 48  # rollouts in a step (release: 32); 0 takes all (RLOO and GRPO)
    micro_batch: int = 16  # rollouts in a forward pass, those of about one length together
    logit_chunk: int = 4096  # tokens whose logits are made at a time
    clip: float = 0.2  # eps of E2 (release: 0.1)
    lower_bound: Literal["minus", "over"] = "minus"  # of w: 1-eps (paper) or 1/(1+eps) (release)
    min_advantage: float = 0.01  # rollouts of a smaller advantage are left out (paper: 0.01; 0: none)
    kl: float = 0.0  # weight of E7 (GRPO: 0.04); above 0 a second model is kept, but not with --lora
    lr: float = 2e-4  # paper: 5e-5, for adapters of a 32B model
    anneal_lr: bool = True  # it falls to zero over the iterations (D3)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm (paper: 1; release: 0.1)

    # --- evaluation
    eval_every: int = 20  # iterations between evaluations
    eval_episodes: int = 0  # tasks of an evaluation, from the first on; 0 takes all of the split


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
@dataclass(eq=False)  # equal to itself only: a rollout can be the key of a dict
class Trajectory:
    """A rollout: what the model read and wrote, token for token, and what the world made of it."""

    task: int  # its number in the split
    answer: str = ""  # the world's name for it
    text: str = ""  # all that the world shows
    ids: list[int] = field(default_factory=list)  # prompt, turn, reply, turn ...; never tokenised again
    logps: list[float] = field(default_factory=list)  # of the sampled tokens, by the sampler
    turns: list[range] = field(default_factory=list)  # where in the ids the sampled tokens of each turn stand
    said: list[tuple[str, str]] = field(default_factory=list)  # action, as the world took it, and its reply
    rewards: list[float] = field(default_factory=list)  # of each turn
    total: float = 0.0  # the return
    success: bool = False
    terminated: bool = False  # the world ended it; if not, the limit of turns or the context did
    fate: str = "playing"  # then "ended", or "dropped" (a straggler), "broken" (its world): not learned from
    first: int = 0  # where in the ids the present turn begins
    step: Future | None = None  # of the world: what it says next, while it is at work


@lru_cache(maxsize=100_000)  # worlds repeat themselves
def encode(tokenizer, text: str) -> list[int]:
    """Token ids of a piece of text. The list is shared: do not change it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@lru_cache(maxsize=8)
def chat_pieces(tokenizer) -> tuple[str, str, str]:
    """A chat template's (head, to_prompt, to_reply): head prompt to_reply reply EOS to_prompt prompt ..."""
    if not tokenizer.chat_template:
        return "", "", ""
    chat = [{"role": role, "content": f"<{i}>"} for i, role in enumerate(("user", "assistant", "user"))]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    head, _, to_prompt, to_reply = re.split("<[012]>", text)  # _ is to_reply once more
    if not to_prompt.startswith(tokenizer.eos_token):
        raise ValueError(f"the chat template ends turns with another token than {tokenizer.eos_token!r}")
    return head, to_prompt.removeprefix(tokenizer.eos_token), to_reply


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: B rows of a batch, T tokens of a row, M sampled tokens of a rollout, N of a batch, C
# of a chunk, K rollouts of a task, Q tokens read in a pass, V vocabulary, H hidden, D of an attention head.
def leave_one_out(return_K: torch.Tensor) -> torch.Tensor:
    """E1: each return minus the mean of the others [K]; sums to zero."""
    K = len(return_K)
    return (return_K - return_K.mean()) * K / (K - 1)  # E1


def normalised(return_K: torch.Tensor) -> torch.Tensor:
    """E6: returns minus their mean, over their standard deviation [K]; 0 where all are the same."""
    return (return_K - return_K.mean()) / (return_K.std() + 1e-6)  # E6, D5


def ratios(logp_M: torch.Tensor, old_logp_M: torch.Tensor, lengths: list[int], level: str) -> torch.Tensor:
    """w of each sampled token [M]: the token's own, its turn's or the rollout's; `lengths` are the turns'."""
    log_w_M = logp_M - old_logp_M  # E3
    if level == "turn":
        log_w_M = torch.cat([turn.sum().expand(len(turn)) for turn in log_w_M.split(lengths)])  # E4
    if level == "trajectory":
        log_w_M = log_w_M.sum().expand(len(log_w_M))  # E5
    return log_w_M.clamp(max=80).exp()  # beyond 88 it would be infinite, and its clipped gradient 0 * inf


def surrogate(w_M, advantage_M, clip: float, lower_bound: str = "minus") -> torch.Tensor:
    """E2: min(w A, g(A)) [M]. g(A) is w A at the bound of w: (1+eps) A where A > 0, (1-eps) A where A < 0.

    >>> surrogate(torch.tensor([2.0, 2.0, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.25).tolist()
    [1.25, -2.0, 0.5, -0.75]
    """
    lowest = 1 - clip if lower_bound == "minus" else 1 / (1 + clip)
    bound_M = torch.where(advantage_M > 0, (1 + clip) * advantage_M, lowest * advantage_M)  # E2: g(A)
    return torch.minimum(w_M * advantage_M, bound_M)  # E2


def kl_penalty(logp_M, start_logp_M) -> torch.Tensor:
    """E7: an estimate of KL(pi || pi_start) from the tokens sampled, never negative [M]."""
    d_M = start_logp_M - logp_M
    return d_M.exp() - d_M - 1  # E7


# ---------------------------------------------------------- 4. models
def load(auto, source: str, args: Args):
    """A model without dropout, in float32, and its tokenizer, from a local folder or by Hugging Face name."""
    options = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
    try:
        model, report = auto.from_pretrained(source, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if missing := [name for name in report["missing_keys"] if "pooler" not in name]:
            raise ValueError(f"no weights for {missing[0]}")  # else they would be drawn at random
    except Exception as error:  # a damaged folder can raise anything
        why = runs.why_not_loaded(source, error, args)
        raise ValueError(f"no model in {source}: {why}") from error
    return model.to(args.device).eval(), tokenizer


def make_model(args: Args, source: str):
    """The model as it is trained, with its tokenizer; LoRA trains all linear layers but the head."""
    model, tokenizer = load(transformers.AutoModelForCausalLM, source, replace(args, device="cpu"))
    for p in model.parameters():  # not the buffers: in bfloat16 the angles of far positions are radians off
        p.data = p.data.to(args.device, getattr(torch, args.dtype), copy=True)
    model.to(args.device).tokenizer = tokenizer
    if args.lora:
        try:
            from peft import LoraConfig
        except ModuleNotFoundError as error:
            raise ValueError("--lora needs the package peft: pip install peft") from error
        alpha = 2 * args.lora_rank
        model.add_adapter(LoraConfig(r=args.lora_rank, lora_alpha=alpha, target_modules="all-linear"))
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            p.data = p.data.float()  # in bfloat16 a step of 5e-5 would vanish
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model


class Memory(transformers.Cache):
    """A key-value cache that lasts across turns, and the last hidden state of each rollout of a batch [B, H].

    A token's column is its position in its rollout. So rows need no padding between turns, and what padding
    writes behind the end of a row is overwritten before anyone can see it.
    """

    def __init__(self, model, batch: list[Trajectory]):
        super().__init__(layers=[])
        self.model, self.stored = model, {}  # keys and values of each layer [2, B, columns, heads, D]
        self.length_B = torch.zeros(len(batch), dtype=torch.long)
        self.hidden_BH = next(model.parameters()).new_zeros(len(batch), model.config.hidden_size)
        self.read(batch)

    def keep(self, rows: list[int]) -> None:
        """These rows and no others, in this order; a row may be named more than once."""
        self.length_B, self.hidden_BH = self.length_B[rows], self.hidden_BH[rows]
        for layer in self.stored:  # one by one: two whole caches would not fit
            self.stored[layer] = self.stored[layer][:, rows]

    def read(self, batch: list[Trajectory]) -> None:
        """Reads what is new in every rollout, but not in those that wait for their world."""
        pieces = [[] if t.step else t.ids[n:] for t, n in zip(batch, self.length_B.tolist(), strict=True)]
        size_B = torch.tensor([len(piece) for piece in pieces])
        Q = max(map(len, pieces), default=0)
        if Q == 0:
            return
        # Of one token all rows are run, also those with nothing new: to gather the others' keys takes longer.
        self.rows = slice(None) if Q == 1 else size_B.nonzero()[:, 0]
        self.column_BQ = (self.length_B[:, None] + torch.arange(Q))[self.rows]
        ids_BQ = torch.tensor([piece + [0] * (Q - len(piece)) for piece in pieces])[self.rows]
        may_see = torch.arange(int(self.column_BQ.max()) + 1) <= self.column_BQ[:, None, :, None]
        inputs = {"input_ids": ids_BQ, "position_ids": self.column_BQ, "attention_mask": may_see}
        hidden_BQH = self.model.base_model(**inputs, past_key_values=self, use_cache=True).last_hidden_state
        size_B = size_B[self.rows]
        self.hidden_BH[self.rows] = hidden_BQH[torch.arange(len(size_B)), size_B - 1]
        self.length_B[self.rows] += size_B

    def update(self, keys, values, layer: int, *args, **kwargs):
        """Called by each layer: stores what is new [B, heads, Q, D]; returns all columns of the rows."""
        new = torch.stack([keys, values]).transpose(2, 3)
        width = int(self.column_BQ.max()) + 1
        store = self.stored.setdefault(layer, new[:, :, :0])
        if store.shape[2] < width:  # a quarter more, so that growing costs little
            more = width + width // 4 - store.shape[2]
            store = self.stored[layer] = nn.functional.pad(store, (0, 0, 0, 0, 0, more))
        row_B1 = torch.arange(len(self.length_B))[self.rows, None]
        store[:, row_B1, self.column_BQ] = new
        return store[:, self.rows, :width].transpose(2, 3).unbind()


# ---------------------------------------------------------- 5. rollouts
def listen(t: Trajectory, tokenizer, args: Args) -> None:
    """Takes in what the world says, waiting for it if need be: a prompt, or the reply to a turn."""
    try:
        text, *outcome, info = t.step.result()
    except (envs.WorldBroken, envs.Unavailable) as error:
        t.fate, t.text = "broken", f"{t.text}{error}"
        return
    head, to_prompt, to_reply = chat_pieces(tokenizer)
    if outcome:  # of a step; a reset has none
        reward, terminated, truncated = outcome
        reply = text.removeprefix(t.text + info["action"])
        t.said.append((info["action"], reply))
        t.turns.append(range(t.first, len(t.ids)))
        if t.ids[-1] != tokenizer.eos_token_id:  # the turn was cut: its end is added, not sampled
            t.ids.append(tokenizer.eos_token_id)
        t.ids += encode(tokenizer, to_prompt + reply + to_reply)
        t.rewards.append(reward)
        t.total += reward
        if terminated or truncated:
            t.fate, t.terminated, t.success = "ended", terminated, info["result"]["success"]
    else:
        t.answer, t.ids = info["answer"], list(encode(tokenizer, head + text + to_reply))
    t.text, t.first, t.step = text, len(t.ids), None
    if t.first + args.max_action_tokens > args.context:  # no room for a turn
        t.fate = "ended"


def sample(model, hidden_BH, temperature: float, generator, greedy: bool) -> tuple[list[int], list[float]]:
    """The next token of every row, and its log-prob."""
    logp_BV = (model.get_output_embeddings()(hidden_BH).float() / temperature).log_softmax(-1)
    if greedy:
        token_B1 = logp_BV.argmax(-1, keepdim=True)
    else:  # the first token whose cumulative probability reaches a uniform number
        total_BV = logp_BV.exp().cumsum(-1)
        u_B1 = torch.rand(len(logp_BV), 1, generator=generator, device=generator.device) * total_BV[:, -1:]
        token_B1 = torch.searchsorted(total_BV, u_B1, right=True).clamp(max=logp_BV.shape[1] - 1)
    return token_B1[:, 0].tolist(), logp_BV.gather(1, token_B1)[:, 0].tolist()


@torch.no_grad()
def rollout(model, worlds, tasks, seeds, args: Args, generator, greedy=False, may_drop=False):
    """Plays tasks to their end, each in a world. The model reads a prompt once, however many rollouts it has.

    Worlds step while other rows go on writing. When a quarter of the rows wait, their replies are read
    together: a moment counted in rows, so that threads do not change the outcome.
    """
    if len(tasks) > len(worlds):
        n, rest = len(worlds), (args, generator, greedy, may_drop)
        now, later = (tasks[:n], seeds[:n]), (tasks[n:], seeds[n:])
        return rollout(model, worlds, *now, *rest) + rollout(model, worlds, *later, *rest)
    tokenizer, end = model.tokenizer, model.tokenizer.eos_token_id
    played = [Trajectory(task) for task in tasks]
    world_of = dict(zip(played, worlds, strict=False))
    with ThreadPoolExecutor(args.world_threads) as pool:
        for t, seed in zip(played, seeds, strict=True):
            t.step = pool.submit(world_of[t].reset, seed=seed, options={"index": t.task})
        for t in played:
            listen(t, tokenizer, args)
        if all(t.fate == "broken" for t in played):
            raise envs.WorldBroken(f"no world of {args.env} starts: {played[0].text}")
        batch = [t for t in played if t.fate == "playing"]
        different = {t.text: t for t in batch}
        memory = Memory(model, list(different.values()))
        memory.keep([list(different).index(t.text) for t in batch])

        while batch:  # row b of the memory is that of batch[b]
            # 1. one token for all that write; a turn ends with the end token or is cut
            tokens, logps = sample(model, memory.hidden_BH, args.temperature, generator, greedy)
            for t, token, logp in zip(batch, tokens, logps, strict=True):
                if t.step is None:
                    t.ids.append(token)
                    t.logps.append(logp)
                    if token == end or len(t.ids) - t.first == args.max_action_tokens:
                        action = tokenizer.decode(t.ids[t.first :], skip_special_tokens=True)
                        t.step = pool.submit(world_of[t].step, action)
            memory.read(batch)

            # 2. the replies; those that have ended leave the batch
            waiting = [t for t in batch if t.step]
            if 4 * len(waiting) < len(batch):
                continue
            for t in waiting:
                listen(t, tokenizer, args)
            if may_drop and has_enough(played, args):
                break
            rows = [b for b, t in enumerate(batch) if t.fate == "playing"]
            if len(rows) < len(batch):
                batch = [batch[b] for b in rows]
                memory.keep(rows)
            memory.read(batch)
    for t in played:
        t.fate = "dropped" if t.fate == "playing" else t.fate
    return played


def has_enough(played: list[Trajectory], args: Args) -> bool:
    """Whether so many rollouts have ended, of all and of each task, that the rest may be dropped."""
    whole = [t for t in played if t.fate != "broken"]  # a broken one is not waited for
    number = Counter(t.task for t in whole)
    ended = Counter(t.task for t in whole if t.fate == "ended")
    of_each = all(ended[task] >= min(args.finish_each, number[task]) for task in number)
    return of_each and ended.total() >= args.finish_all * len(whole)


# ---------------------------------------------------------- 6. updates
def score(model, trajectories: list[Trajectory], args: Args):
    """Yields micro-batches of about one length as dicts, trajectory -> log-probs of its sampled tokens [M].

    Rows are padded behind their end, which no causal model can see. Logits are made at sampled tokens only,
    some at a time, and with --gradient-checkpointing made again in the backward pass: [B, T, V] never exists.
    """
    by_length, head = sorted(trajectories, key=lambda t: len(t.ids)), model.get_output_embeddings()
    remake = args.gradient_checkpointing and torch.is_grad_enabled()

    def logps(hidden_CH, token_C):
        logit_CV = head(hidden_CH).float() / args.temperature
        return -nn.functional.cross_entropy(logit_CV, token_C, reduction="none")

    chunk_logps = partial(checkpoint, logps, use_reentrant=False) if remake else logps
    for start in range(0, len(by_length), args.micro_batch):
        part = by_length[start : start + args.micro_batch]
        rows = [t.ids[: t.turns[-1].stop] for t in part]  # what the world said last is answered by nobody
        T = max(map(len, rows))
        ids_BT = torch.tensor([row + [0] * (T - len(row)) for row in rows])
        places = [(b, column) for b, t in enumerate(part) for column in chain(*t.turns)]
        row_N, column_N = torch.tensor(places).T
        for module in model.modules():  # checkpointed layers ask for training mode; dropout must not be in it
            module.training = remake and getattr(module, "gradient_checkpointing", False)
        hidden_BTH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        model.eval()  # in training mode there would be no cache for the rollouts
        hidden = hidden_BTH[row_N, column_N - 1].split(args.logit_chunk)
        logp_N = torch.cat(list(map(chunk_logps, hidden, ids_BT[row_N, column_N].split(args.logit_chunk))))
        yield dict(zip(part, logp_N.split([len(t.logps) for t in part]), strict=True))


@torch.no_grad()
def start_logps(model, start_model, kept: list[Trajectory], args: Args) -> dict[Trajectory, torch.Tensor]:
    """Log-probs [M] by the model of the start (E7); with LoRA that is `model` without its adapters."""
    if start_model:
        return dict(ChainMap(*score(start_model, kept, args)))
    model.disable_adapters()
    logps = dict(ChainMap(*score(model, kept, args)))
    model.enable_adapters()
    return logps


def advantages_of_groups(played: list[Trajectory], args: Args) -> dict[Trajectory, float]:
    """Advantages of the rollouts that ended, where a task has two of them; its K rollouts are neighbours."""
    advantages = {}
    for i in range(0, len(played), args.rollouts):
        group = [t for t in played[i : i + args.rollouts] if t.fate == "ended" and t.turns]
        if len(group) > 1:  # in float64, as in float32 the mean of equal returns may be another
            return_K = torch.tensor([t.total for t in group], dtype=torch.float64)
            advantage_K = normalised(return_K) if args.normalise else leave_one_out(return_K)
            advantages |= zip(group, advantage_K.tolist(), strict=True)
    return advantages


def update(model, optimizer, advantages: dict[Trajectory, float], args: Args, rng, start_model=None):
    """Some epochs of steps on E2, and E7 if asked for, with the rollouts of an iteration."""
    kept = [t for t, advantage in advantages.items() if abs(advantage) >= args.min_advantage]
    if not kept:
        return {"update/filtered": 1.0}
    size, minibatches = args.minibatch or len(kept), []
    for _ in range(args.epochs):  # without regard to tasks
        shuffled = [kept[i] for i in rng.permutation(len(kept))]
        minibatches += [shuffled[i : i + size] for i in range(0, len(shuffled), size)]
    # Old log-probs are scored, not the sampler's (App. D). Those of the first minibatch are its own step's.
    with torch.no_grad():
        old = dict(ChainMap(*score(model, [t for t in kept if t not in minibatches[0]], args)))
    start = start_logps(model, start_model, kept, args) if args.kl else {}  # D4
    figures = defaultdict(list, filtered=[1 - len(kept) / len(advantages)])
    for minibatch in minibatches:
        optimizer.zero_grad()
        log_ratios = []
        for part in score(model, minibatch, args):
            loss = torch.zeros(())
            for t, logp_M in part.items():
                old_M = old.setdefault(t, logp_M.detach())
                w_M = ratios(logp_M, old_M, list(map(len, t.turns)), args.level)
                gain_M = surrogate(w_M, torch.tensor(advantages[t]), args.clip, args.lower_bound)
                figures["ratio"].append(w_M.max().item())
                figures["clipped"].append((gain_M < w_M * advantages[t]).float().mean().item())
                log_ratios.append((logp_M - old_M).sum().item())
                if start:
                    penalty_M = kl_penalty(logp_M, start[t])
                    figures["kl"].append(penalty_M.mean().item())
                    gain_M = gain_M - args.kl * penalty_M
                loss = loss - gain_M.mean() / size  # a last, smaller minibatch weighs less
            loss.backward()
        figures["log_ratio"].append(fmean(log_ratios))
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        if not torch.isfinite(norm):
            raise ArithmeticError(f"the model diverged (gradient {norm.item()}): lower --lr")
        optimizer.step()
        figures["grad_norm"].append(norm.item())
    figures["sampler_gap"] = [max((old[t] - torch.tensor(t.logps)).abs().max().item() for t in kept)]
    return {f"update/{tag}": (max if tag == "ratio" else fmean)(values) for tag, values in figures.items()}


# ---------------------------------------------------------- 7. evaluation
def evaluate(model, args: Args, split: str) -> dict[str, float]:
    """Every task of a split, sampled and greedy, always from the same seed, so that evaluations compare."""
    worlds, metrics = make_worlds(args, split), {}
    tasks = list(range(worlds[0].num_tasks))[: args.eval_episodes or None]
    for suffix in ("", "_greedy"):
        generator = torch.Generator(args.device).manual_seed(0)
        played = rollout(model, worlds, tasks, tasks, args, generator, greedy=suffix == "_greedy")
        solved = {t.task: t.success for t in played}
        figures = {"return": fmean(t.total for t in played), "success": fmean(solved.values())}
        if hasattr(worlds[0], "goals"):
            figures |= worlds[0].goals(solved)
        metrics |= {f"{key}{suffix}": value for key, value in figures.items()}
    for world in worlds:
        world.close()
    return metrics


def behaviour(played: list[Trajectory], world) -> dict[str, float]:
    """Figures of an iteration's rollouts, and the habits that the world counts."""
    ended = [t for t in played if t.fate == "ended"]  # of the others the return is not known
    lists = {
        "return": [t.total for t in ended],
        "success": [t.success for t in ended],
        "truncated": [not t.terminated for t in ended],
        "length": [len(t.said) for t in played],
        "tokens": [len(t.logps) for t in played],
        "entropy": [-fmean(t.logps) for t in played if t.logps],
        "dropped": [t.fate == "dropped" for t in played],
        "broken": [t.fate == "broken" for t in played],
    }
    metrics = {f"rollout/{name}": fmean(values or [0.0]) for name, values in lists.items()}
    if hasattr(world, "habits"):
        metrics |= {f"habit/{name}": value for name, value in world.habits([t.said for t in played]).items()}
    return metrics


# ---------------------------------------------------------- 8. save and resume
def save(run: Path, state: dict, models: dict) -> None:
    """Saves a run's state in checkpoint.pt, and each of `models`, name -> (model, tokenizer), in a folder."""
    for name, (model, tokenizer) in models.items():  # first, as they may fit on a nearly full disk
        temporary = run / f"{name}.tmp"
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(runs.card(run, name), encoding="utf-8")
        shutil.rmtree(run / name, ignore_errors=True)
        temporary.rename(run / name)
    torch.save(state, run / "checkpoint.tmp")
    (run / "checkpoint.tmp").replace(run / "checkpoint.pt")


def restore(run: Path, modules: dict, rng, generator) -> dict:
    """Loads a run's checkpoint into its modules and both random generators; returns the saved state."""
    try:
        state = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
        for name, module in modules.items():
            module.load_state_dict(state["modules"][name])
        rng.bit_generator.state = state["rng"]
        generator.set_state(state["generator"])
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{run}/checkpoint.pt cannot be resumed: {type(error).__name__}: {error}") from error
    return state


# ---------------------------------------------------------- 9. training
def make_worlds(args: Args, split: str) -> list:
    """Worlds of a split; one without splits gives all its tasks."""
    options = envs.options(args.world)
    if hasattr(envs.make(args.env, **options), "split"):
        options["split"] = split
    worlds = [envs.make(args.env, **options) for _ in range(args.worlds)]
    if not worlds[0].append_only:
        raise ValueError(f"--env {args.env}: its text is written anew every turn, and here it must only grow")
    return worlds


def main(args: Args) -> dict[str, float]:
    """Iterations of rollouts and updates; returns what it writes to summary.json."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started, cpu_started = time.time(), time.process_time()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng, generator = np.random.default_rng(args.seed), torch.Generator(args.device).manual_seed(args.seed)
    worlds = make_worlds(args, "train")
    difficulties = getattr(worlds[0], "difficulties", [1] * worlds[0].num_tasks)
    trained_on = [i for i, difficulty in enumerate(difficulties) if difficulty <= args.max_difficulty]  # D2

    # --- all that learns, as it starts; variants of a world share a checkpoint
    source = args.model or str(Path(__file__).parent / "checkpoints" / worlds[0].demonstration_env)  # D1
    model = make_model(args, source)
    args = replace(args, context=min(args.context, model.config.max_position_embeddings))
    start_model = make_model(args, source) if args.kl and not args.lora else None
    torch.set_default_device(args.device)
    parameters = nn.ParameterList(p for p in model.parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.01)  # the release's
    modules = {"parameters": parameters, "optimizer": optimizer}

    # --- a new run, or one that goes on
    run = runs.folder(args, "loop_ppo")
    if args.resume:
        state = restore(run, modules, rng, generator)
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
    else:
        evaluation = evaluate(model, args, "dev")
        state = {"iteration": 0, "episodes": 0, "metrics": [], "samples": []}
        state |= {"warm_start": evaluation, "evaluation": evaluation}
    runs.write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    print(f"{run}: starts from {source}, which returns {state['warm_start']['return']:.2f}")
    writer = SummaryWriter(str(run), purge_step=state["iteration"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))
    if not args.resume:
        start = {f"eval/{name}": figure for name, figure in evaluation.items()}
        state["metrics"].append(runs.log(writer, 0, start, "return|success$"))
    stopped = runs.stop_signals()  # Ctrl-C ends the iteration that it falls into

    for iteration in range(state["iteration"] + 1, args.iterations + 1):
        began = time.time()
        # 1. K rollouts of some tasks, all of a task from one seed
        chosen = rng.choice(trained_on, args.tasks, replace=len(trained_on) < args.tasks)
        seeds = rng.integers(2**31, size=args.tasks)
        tasks, seeds = (x.repeat(args.rollouts).tolist() for x in (chosen, seeds))
        played = rollout(model, worlds, tasks, seeds, args, generator, may_drop=True)
        rolled = time.time()

        # 2. their advantages, and some steps
        share = 1 - (iteration - 1) / args.iterations if args.anneal_lr else 1.0  # D3
        optimizer.param_groups[0]["lr"] = args.lr * share
        metrics = behaviour(played, worlds[0])
        metrics |= update(model, optimizer, advantages_of_groups(played, args), args, rng, start_model)

        # 3. the books
        state["iteration"], state["episodes"] = iteration, state["episodes"] + len(played)
        metrics |= {"time/rollout": rolled - began, "time/update": time.time() - rolled}
        metrics["time/tokens_per_second"] = sum(len(t.logps) for t in played) / (rolled - began)
        is_last = iteration == args.iterations
        if iteration % args.eval_every == 0 or is_last:
            state["evaluation"] = evaluate(model, args, "dev")
            metrics |= {f"eval/{name}": figure for name, figure in state["evaluation"].items()}
        state["metrics"].append(runs.log(writer, iteration, metrics, "return|success$|no_op|filtered"))
        for t in [t for i, t in enumerate(played) if i < args.rollouts or t.fate != "ended"]:
            ends = np.cumsum([0, *map(len, t.turns)])
            logps = [fmean(t.logps[i:j]) for i, j in pairwise(ends)]
            columns = zip(t.said, t.rewards, logps, strict=False)
            turns = [{"action": a, "reply": r, "reward": x, "log-prob": p} for (a, r), x, p in columns]
            sample = {"answer": t.answer, "return": t.total, "fate": t.fate, "text": t.text, "turns": turns}
            state["samples"].append({"iteration": iteration} | sample)
        with runs.saving(run, iteration):  # a full disk, for example, does not end the run
            runs.write(run / "metrics.jsonl", state["metrics"])
            runs.write(run / "rollouts.jsonl", state["samples"])
            if iteration % args.save_every == 0 or is_last or stopped:
                state |= {"seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu_started}
                state["modules"] = {name: module.state_dict() for name, module in modules.items()}
                state["rng"], state["generator"] = rng.bit_generator.state, generator.get_state()
                save(run, state, {"actor": (model, model.tokenizer)})
        if stopped:
            break
    writer.close()

    summary = {f"warm_start_{name}": figure for name, figure in state["warm_start"].items()}
    summary |= {f"eval_{name}": figure for name, figure in state["evaluation"].items()}
    for split in ["test-normal", "test-challenge"] if hasattr(worlds[0], "split") and not stopped else []:
        figures = evaluate(model, args, split)
        summary |= {f"{split}_{name}".replace("-", "_"): figure for name, figure in figures.items()}
    summary |= {"episodes": state["episodes"], "seed": args.seed} | runs.facts()
    summary |= {"seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu_started}
    runs.write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    for world in worlds:
        world.close()
    return summary


if __name__ == "__main__":
    runs.cli(Args, main)
