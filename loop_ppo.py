# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers>=5.23,<6", "numpy>=2.4,<3",
#     "gymnasium>=1.4,<2", "rapidfuzz>=3.14,<4", "tyro>=1.0.17,<2", "tensorboard>=2.21,<3", "tqdm>=4.70,<5"]
# ///
"""LOOP: PPO with a leave-one-out baseline for agents that act over many turns, in one file.

    python loop_ppo.py --env apps                   # 5 minutes on 2 CPU cores: solves 0.28 -> 0.83 of new tasks
    python loop_ppo.py --level trajectory        python loop_ppo.py --variant grpo
    python loop_ppo.py --resume runs/...            # a 32B model in AppWorld, the paper's setting: docs/loop_ppo.md

K rollouts of each task start from the same state. What a rollout earned above the mean of the others is the advantage
of all its tokens. There is no value network and, but for GRPO, no reference model: one copy of the weights is all.

Paper: Chen et al. 2025, arXiv:2502.01600
  E1  A_k = R_k - mean of the others = K/(K-1) (R_k - mean R)       sec. 4     leave_one_out
  E2  min(w A, g(A)),  g(A) = A + eps |A|                           sec. 4     surrogate
  E3  w = pi(x_t) / pi_old(x_t), one for each token                 Eq. 9, 10  ratios, --level token
  E4  w = product of E3 over a turn                                 sec. 5     ratios, --level turn
  E5  w = product of E3 over a rollout ("bandit")                   Eq. 9, 10  ratios, --level trajectory
  E6  A_k = (R_k - mean R) / std R                                  GRPO       normalised, --variant grpo, loop-rwnorm
  E7  KL(pi || pi_start) ~ exp(d) - d - 1,  d = log pi_start/pi     GRPO       kl_penalty, --variant grpo
Differs from the paper; in brackets what undoes it (docs/loop_ppo.md has the reasons):
  D1  A tiny Llama, trained here on flawed scripted solutions (--model), in the place of a 32B model that can code.
  D2  Its vocabulary has whole words, the same token wherever a word stands, so that copying one is one step.
  D3  It first learns to copy, on random words that repeat (--drills 0), and to read, on solutions in which words are
      exchanged for others (--exchanged 0): large models bring that along.
  D4  It learns on all difficulties (--max-difficulty 2): of a small model what is not trained on decays.
  D5  Its learning rate falls linearly to zero (--no-anneal-lr): late steps undo less.
  D6  E7, too, leaves out the rollouts that E2 leaves out (--min-advantage 0): the start model reads less.
Switches to the authors' release: --lower-bound over (1/(1+eps) instead of 1-eps), --max-grad-norm 0.1, --clip 0.1.
"""

import copy
import inspect
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Literal

import numpy as np
import torch
import transformers
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers.cache_utils import Cache, DynamicLayer

import envs


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    env: str = "apps"  # the world, an id that `python -m envs` lists; its text must be append-only
    reward: Literal["fraction", "success"] = "fraction"  # share of a task's tests passed, or 1 if all (apps, appworld)
    world: str = ""  # more options of the world, as NAME=VALUE; a comma between two of them (docs/worlds.md)
    max_difficulty: int = 3  # tasks above it are not trained on (paper: 2; see D4)
    seed: int = 1  # of everything random in the run
    iterations: int = 80  # rounds of rollouts and updates
    runs: str = "runs"  # folder in which the run's own folder is made
    resume: str = ""  # a run's folder to go on with; its arguments hold, unless given anew
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the model; losses stay float32
    threads: int = 2  # on the CPU; take one beside other work, or two wait for each other, and to resume to the bit
    world_threads: int = 2  # worlds that step at a time, while the model writes for the others

    model: str = "tiny"  # tiny (a small Llama from scratch) or a causal LM: Hugging Face name or local folder
    width: int = 96  # hidden size of the tiny model
    layers: int = 2  # of the tiny model
    vocabulary: int = 4000  # size of the tiny model's vocabulary: words, numbers, pieces of words, bytes
    lora: bool = False  # train low-rank adapters only (needs the package peft)
    lora_rank: int = 16  # of the adapters; their alpha is twice that (paper: 16, 32)
    gradient_checkpointing: bool = False  # compute activations again in the backward pass instead of keeping them

    drills: int = 9600  # random sequences that repeat, from which the tiny model learns to copy first (D3)
    demonstrations: int = -1  # solutions of a scripted player for the warm start; -1: 16,000 if tiny, else none
    exchanged: float = 0.25  # share of these in which words are exchanged, if the model is tiny (D3)
    warm_start_epochs: int = 3  # passes over the demonstrations; 0: none
    warm_start_lr: float = 3e-3  # its peak; take about 1e-5 for a real checkpoint
    warm_start_batch: int = 16  # solutions in an update of the warm start

    tasks: int = 16  # tasks in an iteration (paper: 40)
    rollouts: int = 6  # K, rollouts of each task (paper: 6)
    tasks_at_a_time: int = 0  # tasks whose rollouts share a batch, and its cache's memory; 0 takes all
    temperature: float = 1.0  # of sampling, and so of scoring (paper: 1, no top-p, no top-k)
    max_action_tokens: int = 48  # tokens after which a turn is cut (paper: 1,500)
    context: int = 2048  # tokens after which a rollout is cut (paper: 32,000)
    finish_all: float = 0.9  # rollouts stop when this share of all has ended ... (paper: 0.9)
    finish_each: int = 4  # ... and so many of each task; those cut off leave their group (paper: 4)

    variant: Literal["loop", "rloo", "grpo", "loop-rwnorm"] = "loop"  # rows of VARIANTS
    level: Literal["token", "turn", "trajectory"] = "token"  # what a ratio belongs to: E3, E4 or E5
    epochs: int = 0  # passes over the rollouts of an iteration; 0 takes the variant's (paper: 2)
    minibatch: int = 48  # rollouts in a step; 0 takes all (paper: 32)
    logit_chunk: int = 4096  # tokens whose logits are made at a time; kept for the backward pass unless checkpointed
    micro_batch: int = 16  # rollouts in a forward pass, those of about one length together
    clip: float = 0.2  # eps of E2 (release: 0.1)
    lower_bound: Literal["minus", "over"] = "minus"  # where w is clipped below: 1-eps (paper), 1/(1+eps) (release)
    min_advantage: float = 0.01  # rollouts of a smaller advantage are left out (paper: 0.01)
    kl: float = 0.04  # weight of E7, where the variant has it
    lr: float = 2e-4  # paper: 5e-5, for adapters of a 32B model
    anneal_lr: bool = True  # it falls to zero over the iterations (D5)
    weight_decay: float = 0.01  # paper: 0.01
    max_grad_norm: float = 1.0  # gradients are clipped to this norm (paper: 1; release: 0.1)
    max_log_ratio: float = 20.0  # an iteration ends early when a minibatch's mean log-ratio leaves +-this

    eval_every: int = 20  # iterations between evaluations
    eval_episodes: int = 0  # tasks of an evaluation, from the first on; 0 takes all of the split
    eval_batch: int = 150  # of these so many are played at a time, each in a world of its own
    save_every: int = 20  # iterations between checkpoints; Ctrl-C writes one, too


# What tells the algorithms apart: passes over the rollouts, one step with all of them, E6 instead of E1, E7.
VARIANTS = {
    "loop": {"epochs": 2, "on_policy": False, "normalise": False, "kl": False},
    "rloo": {"epochs": 1, "on_policy": True, "normalise": False, "kl": False},
    "grpo": {"epochs": 1, "on_policy": True, "normalise": True, "kl": True},
    "loop-rwnorm": {"epochs": 2, "on_policy": False, "normalise": True, "kl": False},
}

FAILED = re.compile("error|exception|failed", re.IGNORECASE)  # how worlds say that a call went wrong

METRICS = {
    "rollout/return": "return of the iteration's rollouts, mean; should rise",
    "rollout/success": "share of rollouts that solved their task",
    "rollout/length": "turns of a rollout, mean",
    "rollout/tokens": "tokens that the model wrote in a rollout, mean",
    "rollout/truncated": "share of rollouts that the limit of turns or the context cut off",
    "rollout/entropy": "mean -log pi of the written tokens, nats: estimates the entropy; near 0 it explores no more",
    "rollout/dropped": "share of rollouts stopped as stragglers; they teach nothing",
    "rollout/broken": "share of rollouts whose world broke; above 0 look after the server",
    "rollout/no_op": "share of rollouts whose only call completed the task; rising means that doing nothing pays",
    "habit/many_cells": "turns with more than one code cell, share",
    "habit/api_docs": "calls of show_api_doc in a rollout",
    "habit/assum": "times that a rollout says 'assum...'",
    "habit/dummy": "times that a rollout says 'dummy'",
    "habit/gave_up": "share of rollouts that completed the task right after a failed call",
    "update/filtered": "share of groups whose rollouts all earned the same; at 1 nothing is learned",
    "update/sampler_gap": "largest |log-prob at sampling - at scoring|, nats; above 0.01 (float32) something is wrong",
    "update/loss": "E2, negative, mean over micro-batches; its size means little",
    "update/ratio": "largest ratio w of the iteration",
    "update/clipped": "share of tokens that E2 gives no gradient; near 0 the clip does nothing",
    "update/log_ratio": "log pi/pi_old, mean over a minibatch's rollouts, nats; beyond --max-log-ratio it stops",
    "update/stopped": "1 if the log-ratio ended the iteration early",
    "update/grad_norm": "before clipping",
    "update/kl": "E7 in nats a token; with --variant grpo only",
    "eval/return": "return with sampled turns, every task of the dev split once (or --eval-episodes of them)",
    "eval/success": "share of these that were solved: the task goal completion (TGC)",
    "eval/scenarios": "share of scenarios with all variants solved (SGC)",
    "eval/questions": "share of the tasks that ask for an answer that were solved; with --env apps only",
    "eval/no_op": "return of completing every task at once, a baseline; with --env apps only",
    "eval/return_greedy": "return with the likeliest tokens, of the same tasks",
    "eval/success_greedy": "TGC of these",
    "eval/scenarios_greedy": "SGC of these",
    "eval/questions_greedy": "as above, with the likeliest tokens; with --env apps only",
    "time/rollout": "seconds of the rollouts",
    "time/update": "seconds of the updates",
    "time/tokens_per_second": "written in the rollouts",
}


def stop(message: str):
    """Ends the program for bad input: one line that says what is wrong and what to do, exit code 2."""
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
@dataclass
class Trajectory:
    """A rollout: what the model read and wrote, token for token, and what the world made of it."""

    task: int  # number of the task in its split
    answer: str  # the world's name for it
    start: str  # the prompt
    ids: list[int]  # prompt, turn, reply, turn, reply ...; it only grows and is never tokenised again
    turns: list[tuple[int, int]] = field(default_factory=list)  # [first, last) in ids of a turn's sampled tokens
    logps: list[float] = field(default_factory=list)  # of the sampled tokens, by the sampler
    actions: list[str] = field(default_factory=list)  # as the world took them
    replies: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: bool = False  # the world ended it; if not, the limit of turns or the context did
    success: bool = False
    fate: str = "ended"  # or "dropped" as a straggler, or "broken" like its world: these teach nothing

    def __len__(self) -> int:
        return len(self.actions)


@lru_cache(maxsize=20_000)  # worlds repeat themselves; what they print can be long
def encode(tokenizer, text: str) -> list[int]:
    """Token ids of a piece of text. The list is shared: do not change it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@lru_cache(maxsize=8)
def frame(tokenizer) -> tuple[str, str, str]:
    """What stands before a prompt, before a reply, and behind both: an instruction-tuned model's chat template."""
    if not tokenizer.chat_template:
        return "", "", ""
    chat = [{"role": role, "content": f"<{i}>"} for i, role in enumerate(("user", "assistant", "user"))]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    before, reply, behind = (re.split("<[012]>", text)[i] for i in (0, 2, 3))
    if not reply.startswith(end := tokenizer.eos_token):
        stop(f"--model: a turn of its chat template ends with {reply[:20]!r}, not with its end token {end!r}; mend one")
    return before, reply.removeprefix(tokenizer.eos_token), behind  # the end of turn is the model's own to write


def prompt_ids(tokenizer, observation: str) -> list[int]:
    """Token ids of a task's prompt."""
    before, _, behind = frame(tokenizer)
    return encode(tokenizer, before + observation + behind)


def reply_ids(tokenizer, reply: str) -> list[int]:
    """Token ids of the world's reply, which follows the end of a turn."""
    _, before, behind = frame(tokenizer)
    return encode(tokenizer, before + reply + behind)


def demonstrated(dialogue: dict, tokenizer) -> Trajectory:
    """A scripted dialogue in the tokens that the model would have read and written."""
    start, actions = dialogue["observations"][0], dialogue["actions"]
    replies = envs.replies(dialogue["observations"], actions)
    t = Trajectory(-1, dialogue["answer"], start, list(prompt_ids(tokenizer, start)), actions=actions, replies=replies)
    for action, reply in zip(actions, replies, strict=True):
        first = len(t.ids)
        t.ids += [*encode(tokenizer, action), tokenizer.eos_token_id]
        t.turns.append((first, len(t.ids)))
        t.ids += reply_ids(tokenizer, reply)
    return t


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: B rows of a batch, T tokens, K rollouts of a task, N rollouts, M all the sampled tokens of all
# rollouts in a row, U turns, V the vocabulary, H hidden. The end of a turn is a sampled token like any other.
def leave_one_out(return_K: torch.Tensor) -> torch.Tensor:
    """E1: each return minus the mean of the others [K]; sums to zero.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.5])).tolist()
    [0.75, -0.75, 0.0]
    """
    K = len(return_K)
    return (return_K - return_K.mean()) * K / (K - 1)  # E1


def normalised(return_K: torch.Tensor) -> torch.Tensor:
    """E6: returns minus their mean, over their standard deviation [K]; 0 where all are the same."""
    return (return_K - return_K.mean()) / (return_K.std() + 1e-6)  # E6


def ratios(logp_M, old_logp_M, turn_M, rollout_M, level: str) -> torch.Tensor:
    """w of every token [M]: its own (E3), its turn's (E4) or its rollout's (E5). `turn_M`, `rollout_M` number these."""
    log_ratio_M = logp_M - old_logp_M
    if level != "token":
        owner_M = turn_M if level == "turn" else rollout_M
        sums = log_ratio_M.new_zeros(int(owner_M.max()) + 1).index_add(0, owner_M, log_ratio_M)
        log_ratio_M = sums[owner_M]  # E4, E5
    return log_ratio_M.clamp(max=80).exp()  # E3; beyond 88 it would be infinite, and its clipped gradient 0 * inf


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


def mean_of_rollouts(x_M, rollout_M, constant: float) -> torch.Tensor:
    """Mean over the tokens of a rollout, summed over rollouts, over a constant: no batch size enters."""
    length_N = torch.bincount(rollout_M)
    return (x_M / length_N[rollout_M]).sum() / constant


# ---------------------------------------------------------- 4. models
class Column(DynamicLayer):
    """A layer of the key-value cache in which a token's column is its position in its rollout.

    So rows need no padding between turns, and a token written in vain is overwritten before anyone can see it.
    """

    def __init__(self, memory: "Memory"):
        super().__init__()
        self.memory = memory

    def update(self, key_states, value_states, *args, **kwargs):
        """Writes [B, heads, Q, D] at the memory's rows and columns; returns all columns so far of these rows."""
        rows, position_BQ, length = self.memory.where
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            B, heads, _, D = key_states.shape
            self.keys, self.values = (key_states.new_zeros(B, 0, heads, D) for _ in range(2))
        if (room := self.keys.shape[1]) < length:  # a quarter more, so that growing costs little
            add = self.keys.new_zeros(len(self.keys), max(length - room, room // 4), *self.keys.shape[2:])
            self.keys, self.values = torch.cat([self.keys, add], 1), torch.cat([self.values, add], 1)
        at = torch.arange(len(self.keys)) if rows is None else rows
        found = []
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            store[at[:, None], position_BQ] = new.transpose(1, 2)
            found.append((store[:, :length] if rows is None else store[rows, :length]).transpose(1, 2))
        return found


class Memory:
    """What the model has read of each row of a batch: the key-value cache, and the last hidden state [B, H]."""

    def __init__(self, model, prompts: list[list[int]], copies: list[int]):
        """Reads each prompt once, whatever the number of its copies."""
        # A proxy: else memory and cache would hold each other until the garbage collector comes.
        self.model, self.cache = model, Cache(layer_class_to_replicate=partial(Column, weakref.proxy(self)))
        self.length_B = torch.zeros(len(prompts), dtype=torch.long)
        self.hidden_BH = torch.zeros(len(prompts), model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.read(prompts)
        self.keep(torch.arange(len(prompts)).repeat_interleave(torch.tensor(copies)))

    def keep(self, rows: torch.Tensor) -> None:
        """These rows and no others, in this order."""
        self.length_B, self.hidden_BH = self.length_B[rows], self.hidden_BH[rows]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def read(self, pieces: list[list[int]], rows: list[int] | None = None) -> None:
        """Goes on with these rows (None: all); a row whose piece is empty stays as it is."""
        at = slice(None) if rows is None else torch.tensor(rows)
        size = torch.tensor([len(piece) for piece in pieces])
        Q = int(size.max())
        ids_BQ = torch.tensor([piece + [0] * (Q - len(piece)) for piece in pieces])
        position_BQ = self.length_B[at][:, None] + torch.arange(Q)
        length = int(position_BQ.max()) + 1
        self.where = None if rows is None else at, position_BQ, length
        blocked = torch.finfo(self.model.dtype).min
        bias = torch.zeros(len(pieces), 1, Q, length, dtype=self.model.dtype)
        bias.masked_fill_(torch.arange(length) > position_BQ[:, None, :, None], blocked)
        inputs = transformers.BatchEncoding({"input_ids": ids_BQ, "position_ids": position_BQ, "attention_mask": bias})
        output = self.model.base_model(**inputs.to(self.model.device), past_key_values=self.cache, use_cache=True)
        last_BH = output.last_hidden_state[torch.arange(len(pieces)), (size - 1).clamp(min=0)]
        self.hidden_BH[at] = torch.where((size > 0)[:, None].to(last_BH.device), last_BH, self.hidden_BH[at])
        self.length_B[at] += size


def make_vocabulary(texts: list[str], size: int):
    """Words and numbers that occur are tokens of their own, so that one look is enough to copy them (D2).

    A word's token is the same wherever it stands: it begins with a mark, and the one blank between two words is left
    out. All else is written in pieces of words, characters and bytes, so that every text can be.
    """
    # D2: a blank between two words becomes the second one's mark, and any other word gets one
    tokenizer, special, mark = Tokenizer(models.BPE(byte_fallback=True)), "<|endoftext|>", "\u2581"
    drop = normalizers.Replace(Regex(r"(?<=\w) (?=\w)"), mark)
    put = normalizers.Replace(Regex(r"(?<![\w\u2581])(?=\w)"), mark)
    tokenizer.normalizer = normalizers.Sequence([drop, put])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\u2581\w+|[^\w\u2581\n]+|\n"), "isolated")
    back = decoders.Replace(Regex(rf"(?<=\w){mark}"), " "), decoders.Replace(mark, "")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), *back])
    options = {"special_tokens": [special, *(f"<0x{byte:02X}>" for byte in range(256))]}
    options |= {"initial_alphabet": [chr(code) for code in range(32, 127)], "vocab_size": size}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(show_progress=False, **options))
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


def make_model(args: Args, texts: list[str], checkpoint: Path | None = None):
    """The model, with its tokenizer; `texts` train the tiny one's vocabulary. A checkpoint has its weights."""
    source = args.model if checkpoint is None or args.lora else str(checkpoint / "actor")
    if source == "tiny":  # D1
        tokenizer = make_vocabulary(texts, args.vocabulary)
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, max_position_embeddings=args.context,
            hidden_size=args.width, intermediate_size=2 * args.width, num_hidden_layers=args.layers,
            num_attention_heads=max(1, args.width // 32), tie_word_embeddings=True,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
    else:
        model, tokenizer = load(transformers.AutoModelForCausalLM, source, "--model")
    if args.context > (limit := getattr(model.config, "max_position_embeddings", args.context)):
        stop(f"--context {args.context}: {args.model} reads {limit} tokens; give at most these")
    model.tokenizer = tokenizer
    model.to(args.device).eval()  # eval: no dropout, ever
    for p in model.parameters():  # and no buffers: at position 8,000 rotary frequencies in bfloat16 are radians off
        p.data = p.data.to(getattr(torch, args.dtype))
    if args.lora:
        add_adapters(model, args, checkpoint)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model


def add_adapters(model, args: Args, checkpoint: Path | None) -> None:
    """LoRA on all projections, fresh or from a checkpoint; the rest of the model stands still."""
    try:
        import peft
    except ModuleNotFoundError:
        stop("--lora needs the package peft: pip install peft")
    projections = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    config = peft.LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules=projections)
    try:
        model.add_adapter(config)
    except ValueError as error:  # layers of other names
        stop(f"--lora: {args.model} takes no adapters on its {', '.join(projections)}: {error}".splitlines()[0])
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()  # in bfloat16 a step of 5e-5 would vanish
    if checkpoint:  # only now: model.load_adapter would round them to the model's dtype
        peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(checkpoint / "actor"), args.device))


# ---------------------------------------------------------- 5. rollouts
def sample(model, hidden_BH, temperature: float, generator, greedy: bool) -> tuple[list[int], list[float]]:
    """The next token of every row, and its log-prob."""
    logp_BV = (model.get_output_embeddings()(hidden_BH).float() / temperature).log_softmax(-1)
    if greedy:
        token_B1 = logp_BV.argmax(-1, keepdim=True)
    else:  # the first token whose cumulative probability exceeds a uniform number
        total_BV = logp_BV.exp().cumsum(-1)
        u_B1 = torch.rand(len(logp_BV), 1, generator=generator, device=generator.device) * total_BV[:, -1:]
        token_B1 = torch.searchsorted(total_BV, u_B1, right=True).clamp(max=logp_BV.shape[1] - 1)
    return token_B1[:, 0].tolist(), logp_BV.gather(1, token_B1)[:, 0].tolist()


def start_world(world, task: int, seed: int) -> tuple[str, str, str]:
    """Resets a world; returns the prompt, the world's name of the task, and whether all went well."""
    try:
        observation, info = world.reset(seed=seed, options={"index": task})
        return observation, info["answer"], "ended"
    except (envs.WorldBroken, envs.Unavailable) as error:
        return "", str(error), "broken"


def step_world(world, observation: str, action: str) -> tuple[str, dict]:
    """A turn in a world that showed `observation`: the next one, and what the turn adds to its trajectory."""
    try:
        after, reward, terminated, truncated, info = world.step(action)
    except envs.WorldBroken as error:
        return observation, {"reply": str(error), "over": True, "fate": "broken"}
    reply = after.removeprefix(observation + info["action"])
    outcome = {"action": info["action"], "reply": reply, "reward": reward, "terminated": terminated}
    return after, outcome | {"over": terminated or truncated, "success": info.get("episode", {}).get("success", False)}


@torch.no_grad()
def rollout(model, worlds, tasks: list[int], seeds: list[int], args: Args, generator, greedy=False, may_drop=False):
    """Plays worlds[i] on tasks[i] to its end; those of one task stand in a row, and their prompt is read once.

    A row of the batch writes or waits for its world, and worlds step while other rows go on writing. When a quarter
    of the rows wait, their replies are read together: a fixed moment, so that threads do not change the outcome.
    """
    tokenizer, end, pool = model.tokenizer, model.tokenizer.eos_token_id, ThreadPoolExecutor(args.world_threads)
    starts = list(pool.map(start_world, worlds, tasks, seeds))
    played = [
        Trajectory(task, answer, text, list(prompt_ids(tokenizer, text)), fate=fate)
        for task, (text, answer, fate) in zip(tasks, starts, strict=True)
    ]
    texts = [text for text, _, _ in starts]  # what each world shows
    if all(fate == "broken" for *_, fate in starts):
        stop(f"--env {args.env}: no world starts: {starts[0][1]}")

    def has_room(t: Trajectory) -> bool:
        return len(t.ids) + args.max_action_tokens <= args.context

    rows = [i for i, t in enumerate(played) if t.fate == "ended" and has_room(t)]  # the rollout of each row
    firsts = [b for b, i in enumerate(rows) if b == 0 or played[i].ids != played[rows[b - 1]].ids]
    copies = np.diff([*firsts, len(rows)]).tolist()
    memory = Memory(model, [played[rows[b]].ids for b in firsts], copies) if rows else None
    writing = {i: len(played[i].ids) for i in rows}  # where the turn began of each rollout that writes
    waiting: dict[int, Future] = {}
    over = set(range(len(played))) - set(rows)

    while len(over) < len(played):
        # 1. one token for all that write; a turn ends with the end token or is cut
        tokens, logps = sample(model, memory.hidden_BH, args.temperature, generator, greedy)
        for i, token, logp in zip(rows, tokens, logps, strict=True):
            if i in writing:
                t = played[i]
                t.ids.append(token)
                t.logps.append(logp)
                if token == end or len(t.ids) - writing[i] == args.max_action_tokens:
                    t.turns.append((writing.pop(i), len(t.ids)))
                    action = tokenizer.decode(t.ids[slice(*t.turns[-1])], skip_special_tokens=True)
                    waiting[i] = pool.submit(step_world, worlds[i], texts[i], action)
        if writing:
            memory.read([played[i].ids[-1:] if i in writing else [] for i in rows])

        # 2. the replies
        if 4 * len(waiting) < len(writing) + len(waiting):
            continue
        answered = sorted(waiting)
        for i in answered:
            t, (texts[i], turn) = played[i], waiting.pop(i).result()
            t.ids += [end] * (t.ids[-1] != end) + reply_ids(tokenizer, turn["reply"])  # a forced end is not in t.turns
            t.replies.append(turn["reply"])
            t.actions.append(turn.get("action", ""))
            t.rewards.append(turn.get("reward", 0.0))
            t.terminated, t.success = turn.get("terminated", False), turn.get("success", False)
            t.fate = turn.get("fate", t.fate)
            if turn["over"] or not has_room(t):
                over.add(i)
        if may_drop and has_enough(played, over, args):
            break
        if 8 * sum(i in over for i in rows) >= len(rows):  # those that have ended leave the batch
            kept = [b for b, i in enumerate(rows) if i not in over]
            rows = [rows[b] for b in kept]
            memory.keep(torch.tensor(kept, dtype=torch.long))
        going = [b for b, i in enumerate(rows) if i in answered and i not in over]
        if going:
            memory.read([played[rows[b]].ids[int(memory.length_B[b]) :] for b in going], going)
        writing |= {rows[b]: len(played[rows[b]].ids) for b in going}
    pool.shutdown()
    for i in set(range(len(played))) - over:
        played[i].fate = "dropped"
    return played


def has_enough(played: list[Trajectory], over: set[int], args: Args) -> bool:
    """Whether so many rollouts have ended, of all and of each task, that the rest may be dropped."""
    whole = [i for i, t in enumerate(played) if t.fate != "broken"]  # a broken one is not waited for
    ended, tasks = (Counter(played[i].task for i in part) for part in (over & {*whole}, whole))
    each = all(ended[task] >= min(args.finish_each, number) for task, number in tasks.items())
    return each and ended.total() >= args.finish_all * len(whole)


# ---------------------------------------------------------- 6. updates
def score(model, trajectories: list[Trajectory], args: Args):
    """Log-probs of the M sampled tokens of some trajectories, the numbers of their turns and of their trajectories.

    Rows are padded behind their end, which no causal model can see. Logits are made at sampled tokens only, a chunk
    at a time, and with --gradient-checkpointing made again in the backward pass: [B, T, V] never exists.
    """
    rows = [t.ids[: t.turns[-1][1]] for t in trajectories]  # what the world said last is answered by nobody
    T = max(map(len, rows))
    ids_BT = torch.tensor([row + [0] * (T - len(row)) for row in rows], device=model.device)
    remake = args.gradient_checkpointing and torch.is_grad_enabled()
    for module in model.modules():  # layers look at it; what is inside them stays without dropout
        module.training = remake and getattr(module, "gradient_checkpointing", False)
    hidden_BTH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    model.eval()  # else rollouts would have no cache
    spans = [(b, *span) for b, t in enumerate(trajectories) for span in t.turns]
    where = [(b, u, column) for u, (b, first, last) in enumerate(spans) for column in range(first, last)]
    rollout_M, turn_M, column_M = torch.tensor(where, device=model.device).T
    hidden_MH, token_M = hidden_BTH[rollout_M, column_M - 1], ids_BT[rollout_M, column_M]
    head = model.get_output_embeddings()

    def chunk_logps(hidden_CH, token_C):
        return -nn.functional.cross_entropy(head(hidden_CH).float() / args.temperature, token_C, reduction="none")

    part_logps = partial(checkpoint, chunk_logps, use_reentrant=False) if remake else chunk_logps
    parts = zip(hidden_MH.split(args.logit_chunk), token_M.split(args.logit_chunk), strict=True)
    return torch.cat([part_logps(*part) for part in parts]), turn_M, rollout_M


def buckets(trajectories: list[Trajectory], order, size: int) -> list[list[int]]:
    """The trajectories that `order` names in batches of `size`, each of about equally long ones."""
    by_length = sorted(order, key=lambda i: len(trajectories[i].ids))
    return [by_length[i : i + size] for i in range(0, len(by_length), size)]


def advantages_of_groups(played: list[Trajectory], normalise: bool) -> tuple[list[Trajectory], torch.Tensor, float]:
    """The rollouts that ended, in groups of at least two of a task, their advantages [N], the share of equal groups."""
    groups: dict[int, list[Trajectory]] = {}
    for t in played:
        if t.fate == "ended" and t.turns:
            groups.setdefault(t.task, []).append(t)
    kept = [group for group in groups.values() if len(group) >= 2]
    returns = [torch.tensor([sum(t.rewards) for t in g], dtype=torch.float64) for g in kept]  # or equals differ
    advantage_N = torch.cat([(normalised if normalise else leave_one_out)(r) for r in returns] or [torch.zeros(0)])
    equal = [float(r.max() - r.min() < 1e-6) for r in returns]
    return [t for group in kept for t in group], advantage_N.float(), float(np.mean(equal or [1.0]))


def update(model, optimizer, played: list[Trajectory], advantage_N, args: Args, rng, start_model=None):
    """Some epochs of steps on E2 (and E7, given a start model) with the rollouts of an iteration."""
    variant = VARIANTS[args.variant]
    size = (0 if variant["on_policy"] else args.minibatch) or len(played) or 1
    useful = [i for i, a in enumerate(advantage_N.tolist()) if abs(a) >= args.min_advantage]
    minibatches = []  # of all epochs, without regard to tasks
    for _ in range(args.epochs or variant["epochs"]):
        order = rng.permutation(len(played)).tolist()
        minibatches += [sorted(set(order[i : i + size]) & set(useful)) for i in range(0, len(order), size)]
    minibatches = list(filter(None, minibatches))  # one may be empty: all its rollouts were left out

    def logps_of(which, scorer) -> dict[int, torch.Tensor]:
        found = {}
        for part in buckets(played, which, args.micro_batch):
            logp_M, *_ = score(scorer, [played[i] for i in part], args)
            found |= zip(part, logp_M.split([len(played[i].logps) for i in part]), strict=True)
        return found

    with torch.no_grad():  # the first minibatch has its old log-probs from its own step: nothing will have moved yet
        old = logps_of(sorted(set(useful) - set(*minibatches[:1])), model)
        start = logps_of(useful, start_model) if start_model is not None else {}  # D6

    rows, diverged, gap = [], False, 0.0
    for step, chosen in enumerate(minibatches):
        optimizer.zero_grad()
        log_ratios = []
        for part in buckets(played, chosen, args.micro_batch):
            logp_M, turn_M, rollout_M = score(model, [played[i] for i in part], args)
            if not step:
                old |= zip(part, logp_M.detach().split([len(played[i].logps) for i in part]), strict=True)
            old_M = torch.cat([old[i] for i in part])
            advantage_M = advantage_N[part].to(logp_M.device)[rollout_M]
            w_M = ratios(logp_M, old_M, turn_M, rollout_M, args.level)
            gain_M = surrogate(w_M, advantage_M, args.clip, args.lower_bound)
            loss = -mean_of_rollouts(gain_M, rollout_M, size)
            row = {"update/loss": loss.item(), "update/ratio": w_M.max().item()}
            row["update/clipped"] = (gain_M < w_M * advantage_M).float().mean().item()
            if start:
                penalty_M = kl_penalty(logp_M, torch.cat([start[i] for i in part]))
                loss = loss + args.kl * mean_of_rollouts(penalty_M, rollout_M, size)
                row["update/kl"] = penalty_M.mean().item()
            loss.backward()
            difference_M = (logp_M - old_M).detach()
            log_ratios += torch.zeros(len(part)).index_add(0, rollout_M.cpu(), difference_M.cpu()).tolist()
            rows.append(row)
        if not step:
            gap_M = torch.cat([(old[i].cpu() - torch.tensor(played[i].logps)).abs() for i in useful])
            gap = gap_M.max().item()
            if gap > 1e-2 if args.dtype == "float32" else gap_M.mean() > 0.1:
                stop(f"log-probs at scoring are not those at sampling (off by {gap:.2g}): does the model have dropout?")
        mean = rows[-1]["update/log_ratio"] = float(np.mean(log_ratios))
        if diverged := not abs(mean) <= args.max_log_ratio:  # also NaN
            break
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        if not torch.isfinite(norm):
            stop(f"the model diverged (gradient {norm.item()}): lower --lr")
        optimizer.step()
        rows[-1]["update/grad_norm"] = norm.item()
    metrics = {tag: 0.0 for tag in METRICS if tag.startswith("update/") and tag != "update/kl"}
    metrics |= {tag: float(np.mean([r[tag] for r in rows if tag in r])) for tag in {tag for r in rows for tag in r}}
    metrics |= {"update/ratio": max([r["update/ratio"] for r in rows], default=1.0), "update/sampler_gap": gap}
    return metrics | {"update/stopped": float(diverged)}


def drills(tokenizer, n: int, rng, length: int = 96) -> list[Trajectory]:
    """D3: random words that come again after 8 to 39 places, to be gone on with from the second time on.

    Attention that finds where the present token stood before, and looks what came next, appears all at once after some
    400 updates of 16. The demonstrations alone, with one or two things to copy in each, do not bring it about.
    """
    periods = rng.integers(8, 40, n).tolist()
    words = [rng.integers(257, len(tokenizer), period) for period in periods]  # before them: end of text, 256 bytes
    repeated = [np.resize(part, length).tolist() for part in words]
    return [Trajectory(-1, "", "", ids, [(at + 1, length)]) for ids, at in zip(repeated, periods, strict=True)]


def exchange_words(demonstrations: list[Trajectory], tokenizer, share: float, rng) -> list[Trajectory]:
    """D3: the demonstrations, in a share of which three in ten of the words that they copy are others, throughout.

    What a call is named then says nothing of what it does, as with one that training does not have: it must be read.
    """
    words = [i for i in range(257, len(tokenizer)) if tokenizer.convert_ids_to_tokens(i)[0] == "\u2581"]

    def exchange(t: Trajectory) -> Trajectory:
        said = Counter(token for first, last in t.turns for token in t.ids[first:last])
        copied = sorted((Counter(t.ids) - said).keys() & said.keys() & set(words))
        old = [word for word in copied if rng.random() < 0.3]
        new = dict(zip(old, rng.permutation(np.setdiff1d(words, t.ids)).tolist(), strict=False))
        return replace(t, ids=[new.get(token, token) for token in t.ids])

    return [exchange(t) if rng.random() < share else t for t in demonstrations]


def warm_start(model, demonstrations: list[Trajectory], epochs: int, args: Args, rng, name="warm start") -> None:
    """Supervised learning of the demonstrations' turns, their ends included."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.warm_start_lr, betas=(0.9, 0.98), weight_decay=0.01)
    orders, size = [rng.permutation(len(demonstrations)) for _ in range(epochs)], args.warm_start_batch
    batches = []
    for order in orders:  # of about equal lengths within windows of 16 batches
        windows = [buckets(demonstrations, order[i : i + 16 * size], size) for i in range(0, len(order), 16 * size)]
        batches += [window[i] for window in windows for i in rng.permutation(len(window))]
    for step, batch in enumerate(bar := tqdm(batches, desc=name, unit="update", disable=None)):
        share = min(1, (step + 1) / 50, 1.02 - step / len(batches))  # up in 50 updates, then linearly down
        optimizer.param_groups[0]["lr"] = args.warm_start_lr * share
        loss = -score(model, [demonstrations[i] for i in batch], args)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        bar.set_postfix(nll=f"{loss.item():.3f}", refresh=False)


# ---------------------------------------------------------- 7. evaluation
def evaluate(model, args: Args, split: str) -> dict[str, float]:
    """Every task of a split, sampled and greedy, always from the same seed: evaluations compare."""
    worlds = make_worlds(args, 1, split)
    N = min(worlds[0].num_tasks, args.eval_episodes or sys.maxsize)
    worlds += make_worlds(args, min(N, args.eval_batch) - 1, split)
    scenarios = getattr(worlds[0], "scenarios", range(worlds[0].num_tasks))
    whole = {scenarios[i] for i in range(N)} - {scenarios[i] for i in range(N, worlds[0].num_tasks)}
    is_question, metrics = getattr(worlds[0], "is_question", [False] * N), {}
    for suffix in ("", "_greedy"):
        generator, played = torch.Generator(args.device).manual_seed(0), []
        for first in range(0, N, len(worlds)):
            tasks = list(range(first, min(first + len(worlds), N)))
            played += rollout(model, worlds, tasks, tasks, args, generator, suffix == "_greedy")
        failed = {scenarios[t.task] for t in played if not t.success}
        asked = [t.success for t in played if is_question[t.task]]
        figures = {"return": np.mean([sum(t.rewards) for t in played]), "success": np.mean([t.success for t in played])}
        figures |= {"scenarios": 1 - len(failed & whole) / len(whole)} if whole else {}
        figures |= {"questions": np.mean(asked)} if asked else {}
        metrics |= {f"{key}{suffix}": float(value) for key, value in figures.items()}
    if hasattr(worlds[0], "no_op_returns"):
        metrics["no_op"] = float(np.mean(worlds[0].no_op_returns()[:N]))
    for world in worlds:
        world.close()
    return metrics


def behaviour(played: list[Trajectory]) -> dict[str, float]:
    """Figures of an iteration's rollouts, and the habits that the paper counts (its appendix)."""
    turns = [action for t in played for action in t.actions]
    said = ["\n".join(t.actions).lower() for t in played]
    last = [(t.replies[-2], t.actions[-1]) for t in played if len(t) > 1]
    ended = [t for t in played if t.fate == "ended"]  # of the others the return is not known
    metrics = {
        "rollout/return": [sum(t.rewards) for t in ended],
        "rollout/success": [t.success for t in ended],
        "rollout/length": [len(t) for t in played],
        "rollout/tokens": [len(t.logps) for t in played],
        "rollout/truncated": [not t.terminated for t in ended],
        "rollout/entropy": [-np.mean(t.logps) for t in played if t.logps],
        "rollout/dropped": [t.fate == "dropped" for t in played],
        "rollout/broken": [t.fate == "broken" for t in played],
        "rollout/no_op": [re.findall(r"\bapis\.\w+\.(\w+)", text) == ["complete_task"] for text in said],
        "habit/many_cells": [action.count("```") > 2 for action in turns],
        "habit/api_docs": [text.count("show_api_doc") for text in said],
        "habit/assum": [text.count("assum") for text in said],
        "habit/dummy": [text.count("dummy") for text in said],
        "habit/gave_up": [bool(FAILED.search(reply)) and "complete_task" in action for reply, action in last],
    }
    return {tag: float(np.mean(values or [0.0])) for tag, values in metrics.items()}


# ---------------------------------------------------------- 8. save and resume
LOGS = ("metrics.jsonl", "rollouts.jsonl")  # in the folder of a run, a line an iteration or a rollout


def write(path: Path, records: list[dict], indent: int | None = None) -> None:
    """JSON, a line each. The file appears whole or not at all: it is written under another name, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(record, indent=indent) + "\n" for record in records), encoding="utf-8")
    temporary.replace(path)


def read(path: Path) -> list[dict]:
    """What `write` has written, a record a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def save(run: Path, state: dict, model) -> None:
    """A checkpoint: the model, or its adapters, as a Hugging Face folder, all else in state.pt."""
    folder = run / "checkpoints" / f"{state['iteration']:06d}"
    temporary = folder.with_suffix(".tmp")
    for unfinished in folder.parent.glob("*.tmp"):  # else a full disk stays full
        shutil.rmtree(unfinished)
    try:
        model.save_pretrained(temporary / "actor")
        model.tokenizer.save_pretrained(temporary / "actor")
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
    """Warm start, then iterations of rollouts and updates; returns what it writes to summary.json."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started, cpu_started = time.time(), time.process_time()
    if args.demonstrations == -1:
        args = replace(args, demonstrations=16_000 if args.model == "tiny" else 0)
    check(args)
    if args.rollouts < 2:
        stop("--rollouts 1: a rollout is judged by the others of its task; give at least 2")
    if args.max_action_tokens >= args.context:
        stop(f"--max-action-tokens {args.max_action_tokens}: --context {args.context} has no room for a turn")
    if args.lora and args.model == "tiny":
        stop("--lora: the tiny model is trained whole; give a --model")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng, generator = np.random.default_rng(args.seed), torch.Generator(args.device).manual_seed(args.seed)
    worlds = make_worlds(args, min(args.tasks_at_a_time or args.tasks, args.tasks) * args.rollouts, "train")
    difficulties = getattr(worlds[0], "difficulties", [1] * worlds[0].num_tasks)
    trained_on = [i for i, difficulty in enumerate(difficulties) if difficulty <= args.max_difficulty]
    has_splits = "split" in inspect.signature(type(worlds[0])).parameters
    splits = ["dev", "test-normal", "test-challenge"] if has_splits else ["dev"]

    # --- the model of a checkpoint, or a new one
    if args.resume:
        run, checkpoint = Path(args.resume), newest_checkpoint(args.resume, "--resume")
        model = make_model(args, [], checkpoint)
        try:
            state = torch.load(checkpoint / "state.pt", "cpu", weights_only=True)
            logs = {name: [row for row in read(run / name) if row["iteration"] <= state["iteration"]] for name in LOGS}
        except Exception as error:  # as many as there are ways to damage a file
            stop(f"--resume {run}: {checkpoint.name} cannot be read ({type(error).__name__}); give another run")
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
    else:
        dialogues = worlds[0].demonstrations(args.demonstrations, args.seed)
        if not dialogues and args.model == "tiny":
            stop("--demonstrations 0: the tiny model's vocabulary is trained on them; give at least one")
        model = make_model(args, [d["observations"][-1] for d in dialogues])
        shown = [demonstrated(d, model.tokenizer) for d in dialogues]
        if args.model == "tiny":  # D3
            warm_start(model, drills(model.tokenizer, args.drills, rng), 1, args, rng, "drill")
            shown = exchange_words(shown, model.tokenizer, args.exchanged, rng)
        warm_start(model, shown, args.warm_start_epochs, args, rng)

    interrupted = []  # Ctrl-C ends the iteration that it falls into; a second one aborts
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.SIG_DFL)))
    if not args.resume:
        evaluations = {split: evaluate(model, args, split) for split in splits}
        state = {"iteration": 0, "episodes": 0, "warm_start": evaluations, "evaluation": evaluations["dev"]}
        now = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 1000 % 10**6:06d}"  # twins start in one second
        run = Path(args.runs) / f"{args.env}__{Path(__file__).stem}__{args.seed}__{now}"
        logs = {name: [] for name in LOGS}
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay)
    modules = {"optimizer": optimizer}
    if VARIANTS[args.variant]["kl"]:
        modules["start_model"] = copy.deepcopy(model).requires_grad_(False)

    def checkpoint_now():
        state["seconds"], state["cpu_seconds"] = time.time() - started, time.process_time() - cpu_started
        state["modules"] = {name: module.state_dict() for name, module in modules.items()}
        state["rng"] = rng.bit_generator.state, generator.get_state()
        save(run, state, model)

    if args.resume:
        if missing := modules.keys() - state["modules"].keys():
            stop(f"--variant {args.variant}: this run has kept no {missing.pop()}; begin a new one")
        for name, module in modules.items():
            module.load_state_dict(state["modules"][name])
        optimizer.param_groups[0]["weight_decay"] = args.weight_decay  # the saved state has brought back the old one
        rng.bit_generator.state = state["rng"][0]
        if len(state["rng"][1]) == len(generator.get_state()):  # else it is another kind of device: a new stream
            generator.set_state(state["rng"][1])
    run.mkdir(parents=True, exist_ok=True)
    write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    for name in LOGS:
        write(run / name, logs[name])
    if not args.resume:
        checkpoint_now()
    print(f"{run}: the warm start returns {state['warm_start']['dev']['return']:.2f}")

    # --- iterations
    writer = SummaryWriter(str(run), purge_step=state["iteration"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))
    todo = range(state["iteration"] + 1, args.iterations + 1)
    for iteration in tqdm(todo, "iterations", initial=state["iteration"], total=args.iterations, disable=None):
        began = time.time()
        # 1. K rollouts of some tasks
        chosen = rng.choice(trained_on, args.tasks, replace=len(trained_on) < args.tasks)
        seeds = rng.integers(2**31, size=args.tasks).repeat(args.rollouts).tolist()
        tasks = chosen.repeat(args.rollouts).tolist()
        played, size = [], len(worlds)
        for i in range(0, len(tasks), size):
            played += rollout(model, worlds, tasks[i : i + size], seeds[i : i + size], args, generator, may_drop=True)
        rolled = time.time()

        # 2. their advantages, and some steps
        share = 1 - state["iteration"] / args.iterations if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"] = args.lr * share  # D5
        learned, advantage_N, filtered = advantages_of_groups(played, VARIANTS[args.variant]["normalise"])
        metrics = behaviour(played)
        metrics |= update(model, optimizer, learned, advantage_N, args, rng, modules.get("start_model"))
        metrics["update/filtered"] = filtered

        # 3. the books
        state["iteration"], state["episodes"] = iteration, state["episodes"] + len(played)
        metrics |= {"time/rollout": rolled - began, "time/update": time.time() - rolled}
        metrics["time/tokens_per_second"] = sum(len(t.logps) for t in played) / (rolled - began)
        if iteration % args.eval_every == 0 or iteration == args.iterations:
            state["evaluation"] = evaluate(model, args, "dev")
            metrics |= {f"eval/{key}": value for key, value in state["evaluation"].items()}
        try:
            log(run, logs, writer, {"iteration": iteration} | metrics, played)
            if iteration % args.save_every == 0 or iteration == args.iterations or interrupted:
                checkpoint_now()
        except OSError as error:  # a full disk costs nothing that was learned
            tqdm.write(f"not saved at iteration {iteration}: {error}".splitlines()[0])
        if interrupted:
            print(f"stopped; go on with: python {Path(__file__).name} --resume {run}")
            break
    writer.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)

    summary = {f"eval_{key}": state["evaluation"][key] for key in ("return", "return_greedy", "success")}
    summary |= {"warm_start_return": state["warm_start"]["dev"]["return"]}
    for split in splits[1:] if state["iteration"] >= args.iterations else []:
        name = split.replace("-", "_")
        summary |= {f"{name}_warm_start_{key}": value for key, value in state["warm_start"][split].items()}
        summary |= {f"{name}_{key}": value for key, value in evaluate(model, args, split).items()}
    state["seconds"], state["cpu_seconds"] = time.time() - started, time.process_time() - cpu_started
    summary |= {key: state[key] for key in ("episodes", "seconds", "cpu_seconds")}
    summary["peak_memory_mb"] = getrusage(RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "darwin" else 10)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    head = shutil.which("git") and subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    summary |= {"seed": args.seed, "commit": head or "unknown"}
    write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    for world in worlds:
        world.close()
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


def make_worlds(args: Args, n: int, split: str) -> list:
    """n worlds of a split, which a world without splits takes for all its tasks."""
    try:
        known = inspect.signature(type(envs.make(args.env))).parameters if n else ()
        options = {key: value for key, value in {"split": split, "reward": args.reward}.items() if key in known}
        given = dict(option.strip().partition("=")[::2] for option in args.world.split(",") if option.strip())
        if taken := given.keys() & {"split", "reward"}:  # evaluations would be of another split than they say
            raise ValueError(f"--world may not set {taken.pop()}; --reward does, and splits are for evaluations")
        options |= {key: int(value) if re.fullmatch(r"-?\d+", value) else value for key, value in given.items()}
        worlds = [envs.make(args.env, **options) for _ in range(n)]
    except (ValueError, TypeError, envs.Unavailable) as error:
        stop(f"--env {args.env}: {error}")
    if worlds and not worlds[0].append_only:
        stop(f"--env {args.env}: its text is written anew every turn, and here it must only grow; take archer.py")
    return worlds


def log(run: Path, logs: dict[str, list], writer, metrics: dict[str, float], played: list[Trajectory]) -> None:
    """The metrics to TensorBoard, a file and the terminal; some rollouts, and all that did not end, to another file."""
    iteration = metrics["iteration"]
    shown = {"return": "rollout/return", "success": "rollout/success", "no-op": "rollout/no_op"}
    shown |= {"filtered": "update/filtered", "entropy": "rollout/entropy", "turns": "rollout/length"}
    shown |= {"clipped": "update/clipped", "dev": "eval/success", "greedy": "eval/success_greedy"}
    shown |= {"sgc": "eval/scenarios", "questions": "eval/questions"}
    figures = "".join(f"  {name} {metrics[tag]:.2f}" for name, tag in shown.items() if tag in metrics)
    tqdm.write(f"{iteration:4d}{figures}")
    for tag in metrics.keys() & METRICS.keys():
        writer.add_scalar(tag, metrics[tag], iteration)
    logs["metrics.jsonl"].append(metrics)
    every = max(1, len(played) // 4)
    for t in [t for i, t in enumerate(played) if i % every == 0 or t.fate != "ended"]:
        turns = [{"action": action, "reply": reply} for action, reply in zip(t.actions, t.replies, strict=True)]
        about = {"iteration": iteration, "answer": t.answer, "return": sum(t.rewards), "success": t.success}
        logs["rollouts.jsonl"].append(about | {"fate": t.fate, "start": t.start, "turns": turns})
    for name in LOGS:
        write(run / name, logs[name])


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.resume:  # the run's own arguments hold, unless given anew
        try:
            saved = Args(**json.loads(Path(args.resume, "args.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            stop(f"--resume {args.resume}: {error}; give the folder of a run of this script")
        args = tyro.cli(Args, default=saved)
        kept = ("env", "seed", "model", "width", "layers", "vocabulary", "lora", "lora_rank", "drills", "exchanged")
        for name in (*kept, "demonstrations", *(name for name in vars(saved) if name.startswith("warm_start"))):
            if getattr(args, name) != getattr(saved, name):
                stop(f"--{name.replace('_', '-')}: the run has {getattr(saved, name)} and must keep it")
    try:
        main(args)
    except (OSError, KeyboardInterrupt, envs.Unavailable, envs.WorldBroken) as error:
        stop(f"{str(error) or 'stopped'}; a run that has a checkpoint goes on with --resume")
