"""ArCHer: hierarchical multi-turn RL for language agents, in one file.

    python archer.py --env twenty-questions
    python archer.py --actor FOLDER --critic roberta-base --actor-lr 1e-5 --critic-lr 2e-5
    python archer.py --resume runs/...

The critic works on utterances, off-policy: from a replay buffer it learns what an utterance a is worth in the
dialogue s. The actor works on tokens, on-policy: it writes new utterances in replayed dialogues, and each
utterance's advantage is the reward of all its tokens. Both start from a checkpoint, by default a tiny one.

Paper: Zhou et al. 2024, arXiv:2402.19446
  E1  Q(s,a) <- r + gamma * Vbar(s')   (bar: slow copy)    Eq. 1      td_target
  E2  V(s)   <- E_{a~pi} Qbar(s,a)                         Eq. 2      value_loss
  E3  grad log pi(a|s) * A,  A = min Q(s,a) - min V(s)     Eq. 3      advantages, reinforce_loss
  E4  Vtok(s,a_<i) <- A(s,a): a baseline for each token    Eq. 4      baseline_loss
  E5  E3 with A(s,a) - Vtok(s,a_<i)                        Eq. 5      reinforce_loss
  E6  V(s)   <- upper expectile of Qbar(s,a) over the data Eq. 6      value_loss
Differs from the paper; in brackets what undoes it (docs/archer.md has the reasons at length):
  D1  A KL penalty towards the initial actor (--kl 0): without it the actor drifts to gibberish.
  D2  The critic is a decoder and starts as the actor does (--critic roberta-base); sec. 5.5 compares both.
  D3  The batch mean is subtracted from the advantages (--no-center); with an exact critic it is 0 on average.
  D4  All heads, Q and V, start at the mean discounted return of the first dialogues instead of zero.
  D5  Rates, batches, buffer, warm-up and numbers of updates are tuned for a tiny model; Table 3 has others.
  D6  The actor's learning rate falls linearly towards zero (--no-anneal-lr): late noise undoes less.
  D7  The critic updates of an iteration share a pool of dialogues and one new utterance in each state.
  D8  The baseline of E4 is a head on the actor's hidden states; in the paper it is a network of its own.
"""

import copy
import json
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

import envs
from envs import runs


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "twenty-questions"  # the world: an id of `python -m envs` or your own (docs/your_world.md)
    world: str = ""  # options of the world, as NAME=VALUE, separated by commas (docs/worlds.md)
    seed: int = 1  # of all random numbers of the run; 0 or more
    iterations: int = 40  # rounds of rollouts, critic updates and actor updates; 0: only evaluates
    runs: str = "runs"  # folder in which the run's own folder is made
    name: str = ""  # of the run, for the name of its folder
    resume: str = ""  # folder of a run to continue; its saved arguments are used unless given anew
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # on the CPU; with one, resuming is exact to the bit

    # --- model
    actor: str = ""  # causal LM, folder or Hugging Face name; "" is the world's own in checkpoints/
    critic: str = ""  # an encoder or decoder, likewise; "" starts as the actor does (D2)
    dtype: Literal["float32", "bfloat16"] = "float32"  # of computations; parameters stay float32

    # --- data
    rollouts: int = 128  # dialogues played in an iteration (paper: 128; WebShop 512)
    buffer_size: int = 16_000  # utterances that the replay buffer holds (paper, Table 3: 10,000)
    temperature: float = 1.0  # of sampling; log-probs are scored at the same one
    max_action_tokens: int = 16  # tokens after which an utterance is cut

    # --- algorithm
    critic_loss: Literal["td", "mc", "iql"] = "td"  # E1 and E2; Q and V on returns (App. D.1); E1 and E6
    critic_lr: float = 3e-4  # paper: 6e-4 (D5)
    critic_updates: int = 40  # in an iteration, each with a Polyak step of the target (paper: 50)
    critic_batch: int = 32  # dialogues in an update of the critic (paper: a batch of 256)
    critic_pool: int = 256  # dialogues that an iteration draws from the buffer for its critic updates
    warmup: int = 5  # iterations before the actor moves (paper: 20 or 10; 0: none)
    gamma: float = 0.95  # discount per utterance (paper: 0.95; Detective 0.98, WebShop 0.9)
    polyak: float = 0.1  # target += polyak * (critic - target), after every update (paper: 1 - 0.9)
    expectile: float = 0.9  # of E6, for --critic-loss iql

    actor_lr: float = 3e-4  # paper: 3e-5 in Twenty Questions, 3e-4 elsewhere (D5)
    anneal_lr: bool = True  # the actor's learning rate falls towards zero from its first update on (D6)
    actor_updates: int = 4  # in an iteration, each on utterances just sampled (paper: 3; 0: none)
    actor_batch: int = 64  # dialogues in an update of the actor (paper: a batch of 256)
    kl: float = 0.05  # penalty per nat of KL from the initial actor (D1), in units of the return; 0: none
    center: bool = True  # advantages minus their batch mean (D3)
    baseline: bool = False  # a learned baseline for every token (E4, E5)
    max_grad_norm: float = 1.0  # gradients of actor and critic are each clipped to this norm

    # --- evaluation
    eval_every: int = 10  # iterations between evaluations, and between checkpoints; Ctrl-C writes one, too
    eval_episodes: int = 314  # sampled dialogues of an evaluation, in whole passes over the tasks


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
# A dialogue is a dict: n "actions", "rewards" and, by main, "fresh" texts (D7); n + 1 "observations", states.
# Batches are flat: a tensor [N] has one entry per action of all dialogues; last observations have none.
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


def lay_out(dialogues: list[dict], tokenizer) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """Rows of token ids that spell the dialogues; each action's (row, first column, last column + 1).

    An action ends with the end token. A row goes on while each observation adds text: V is read at its last
    token, Q at the end token. Otherwise, as in a world that writes its observations anew, a new row begins.
    """
    rows, spans = [], []
    head, to_prompt, to_reply = chat_pieces(tokenizer)
    for dialogue in dialogues:
        so_far = None
        for observation, action in zip(dialogue["observations"], dialogue["actions"], strict=False):
            if so_far is not None and observation != so_far and observation.startswith(so_far):
                rows[-1] += encode(tokenizer, to_prompt + observation.removeprefix(so_far) + to_reply)
            else:
                rows.append(list(encode(tokenizer, head + observation + to_reply)))
            first = len(rows[-1])
            rows[-1] += [*encode(tokenizer, action), tokenizer.eos_token_id]
            spans.append((len(rows) - 1, first, len(rows[-1])))
            so_far = observation + action
    return rows, spans


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: N actions, M the tokens of N utterances put together, V the vocabulary, H hidden,
# 2 the twin critics, B rows, T columns, C columns that can be seen, S states of a row, L tokens written.
def td_target(reward_N: torch.Tensor, next_v_N2: torch.Tensor, gamma: float) -> torch.Tensor:
    """E1: r + gamma * Vbar(s') [N, 2], for each of the twins; next_v must be 0 after a dialogue's last turn.

    >>> td_target(torch.tensor([-1.0, 0.0]), torch.tensor([[-2.0, -4.0], [0.0, 0.0]]), 0.5).tolist()
    [[-2.0, -3.0], [0.0, 0.0]]
    """
    return reward_N[:, None] + gamma * next_v_N2  # E1


def value_loss(v_N2: torch.Tensor, q_N2: torch.Tensor, expectile: float = 0.5) -> torch.Tensor:
    """E2 at expectile 0.5 (which makes the sum over the twins a mean), E6 above it (V leans to the best)."""
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
    return returns[:0:-1]  # from the first turn on, without the 0 behind the last


def advantages(q_N2: torch.Tensor, v_N2: torch.Tensor) -> torch.Tensor:
    """E3: min Q - min V [N], the minimum over the twins."""
    return q_N2.min(-1).values - v_N2.min(-1).values  # E3


def reinforce_loss(logp_M, advantage_N, owner_M, baseline_M=0.0) -> torch.Tensor:
    """E3, E5: -mean over utterances of sum_i log pi(a_i|s,a_<i) (A - baseline_i); owner_M: a token's n."""
    weight_M = (advantage_N[owner_M] - baseline_M).detach()
    return -(logp_M * weight_M).sum() / len(advantage_N)  # E3


def baseline_loss(baseline_M, advantage_N, owner_M) -> torch.Tensor:
    """E4: mean over utterances of the mean over their tokens of (A(s,a) - Vtok(s,a_<i))^2."""
    length_N = torch.bincount(owner_M, minlength=len(advantage_N))
    square_M = (advantage_N[owner_M].detach() - baseline_M) ** 2
    return (square_M / length_N[owner_M]).sum() / len(advantage_N)  # E4


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


def pack(dialogues: list[dict], tokenizer, utterances: list[list[int]] | None = None):
    """Packs dialogues, and an utterance (token ids) in each of their N states, for one pass of a decoder.

    An utterance forks off its row: it sees the row up to its state, and no other fork. By default, the
    utterances are the actions taken, where they are. Returns ids, positions [B, T], visible [B, query, key];
    the row [N] of each utterance; its columns [N][1 + length]: its state's last one, then its own tokens'.
    """
    rows, spans = lay_out(dialogues, tokenizer)
    # Per token: id, position, how many row tokens it sees, fork (0: the row; n + 1: utterance n; -1: none).
    # A row "s s a s a" and "b b", "c c" in its states:  position  0 1 2 3 4  2 3  4 5
    #                                                   seen      1 2 3 4 5  2 2  4 4
    #                                                   fork      0 0 0 0 0  1 1  2 2
    tokens = [[(token, i, i + 1, 0) for i, token in enumerate(row)] for row in rows]
    columns = [[*range(first - 1, end)] for _, first, end in spans]
    for n, ids in enumerate(utterances or []):
        row, start, _ = spans[n]
        columns[n] = [start - 1, *range(len(tokens[row]), len(tokens[row]) + len(ids))]
        tokens[row] += [(token, start + i, start, n + 1) for i, token in enumerate(ids)]
    T = max(map(len, tokens))
    padded = np.array([row + [(0, 0, 0, -1)] * (T - len(row)) for row in tokens])  # faster than torch.tensor
    ids_BT, position_BT, seen_BT, fork_BT = torch.from_numpy(padded).unbind(-1)
    visible_BTT = (fork_BT[:, None] == 0) & (position_BT[:, None] < seen_BT[:, :, None])  # of the row
    own_BTT = fork_BT[:, None] == fork_BT[:, :, None]
    visible_BTT |= own_BTT & torch.ones(T, T, dtype=torch.bool).tril()  # of its own fork, up to itself
    return (ids_BT, position_BT, visible_BTT), [row for row, _, _ in spans], columns


def read(body, ids_BT, position_BT, visible_BTC, dtype: str, cache=None) -> torch.Tensor:
    """Last hidden states [B, T, H] of a decoder in which a token sees the `visible` ones of C columns."""
    bias_BTC = torch.zeros(visible_BTC.shape)
    bias_BTC.masked_fill_(~visible_BTC, torch.finfo(torch.bfloat16).min)  # finite in either dtype
    inputs = {"input_ids": ids_BT, "position_ids": position_BT, "attention_mask": bias_BTC[:, None]}
    inputs = transformers.BatchEncoding(inputs).to(body.device)
    with torch.autocast(body.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        return body(**inputs, past_key_values=cache, use_cache=cache is not None).last_hidden_state.float()


def score(actor, dialogues: list[dict], utterances: list[list[int]] | None, args: Args):
    """For all M utterance tokens: logits [M, V], its id, the hidden state before it, its utterance's n."""
    batch, row_N, columns = pack(dialogues, actor.tokenizer, utterances)
    hidden_BTH = read(actor.base_model, *batch, args.dtype)
    pairs = [(n, *pair) for n, own in enumerate(columns) for pair in pairwise(own)]  # (n, reads, predicts)
    owner_M, before_M, column_M = torch.from_numpy(np.array(pairs)).T
    row_M = torch.tensor(row_N)[owner_M]
    hidden_MH = hidden_BTH[row_M, before_M]
    logits_MV = actor.get_output_embeddings()(hidden_MH) / args.temperature
    return logits_MV, batch[0][row_M, column_M].to(actor.device), hidden_MH, owner_M.to(actor.device)


class Critic(nn.Module):
    """Twin Q and V heads on one language model (sec. 3.6).

    A decoder (D2) reads dialogues in one causal pass: V at each state's last token, Q at each utterance's end
    token. An encoder reads states and utterances apart; Q sees the [CLS] vectors of both.
    """

    def __init__(self, body, tokenizer, value: float, dtype: str):
        super().__init__()
        self.body, self.tokenizer, self.dtype = body, tokenizer, dtype
        self.is_encoder = body.config.model_type in ENCODERS
        H = body.config.hidden_size
        self.v_heads = nn.ModuleList(mlp(H, H, value) for _ in range(2))
        self.q_heads = nn.ModuleList(mlp(2 * H if self.is_encoder else H, H, value) for _ in range(2))

    def forward(self, dialogues: list[dict], utterances: list[str] | None = None):
        """V of all states [N, 2], and Q [N, 2] of an utterance in each, by default of the action taken."""
        if self.is_encoder:
            v_NH = self.cls([text for d in dialogues for text in d["observations"][: len(d["actions"])]])
            said_NH = self.cls(utterances or [action for d in dialogues for action in d["actions"]])
            q_NH = torch.cat([v_NH, said_NH], -1)
        else:
            end = [self.tokenizer.eos_token_id]
            forks = utterances and [encode(self.tokenizer, text) + end for text in utterances]
            batch, row_N, columns = pack(dialogues, self.tokenizer, forks)
            hidden_BTH = read(self.body, *batch, self.dtype)
            v_NH = hidden_BTH[row_N, [own[0] for own in columns]]
            q_NH = hidden_BTH[row_N, [own[-1] for own in columns]]
        return torch.cat([h(v_NH) for h in self.v_heads], -1), torch.cat([h(q_NH) for h in self.q_heads], -1)

    def cls(self, texts: list[str]) -> torch.Tensor:
        """[CLS] vectors [N, H]; a text that is too long loses its beginning."""
        self.tokenizer.truncation_side = "left"
        limit = self.body.config.max_position_embeddings - 2  # RoBERTa keeps two positions for itself
        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        with torch.autocast(self.body.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            return self.body(**inputs.to(self.body.device)).last_hidden_state[:, 0].float()


def mlp(inputs: int, width: int, value: float) -> nn.Module:
    """Two hidden layers and one output, which starts near `value`."""
    last = nn.Linear(width, 1)
    nn.init.constant_(last.bias, value)  # D4
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)


# ---------------------------------------------------------- 5. rollouts
def spoken(tokenizer, ids: list[int]) -> str:
    """The part of an utterance that critic and world receive: its first line, stripped."""
    return tokenizer.decode(ids, skip_special_tokens=True).split("\n", 1)[0].strip()


@torch.no_grad()
def speak(actor, rows: list[list[int]], starts: list[list[int]], args: Args, generator, greedy: bool = False):
    """Samples one utterance after each prefix rows[b][: starts[b][s]]; N prefixes in all, row by row.

    A row is read once for all its states. Returns ids [N][...], the end token included, and log-probs [N].
    """
    B, C, S = len(rows), max(map(len, rows)), max(map(len, starts))
    ids_BC = torch.tensor([row + [0] * (C - len(row)) for row in rows])  # padding is on the right: never seen
    start_BS = torch.tensor([own + [1] * (S - len(own)) for own in starts])  # padding: any start
    is_state_BS = torch.arange(S) < torch.tensor([[len(own)] for own in starts])
    column_BC, cache = torch.arange(C).expand(B, C), transformers.DynamicCache()
    causal_BCC = torch.ones(C, C, dtype=torch.bool).tril().expand(B, C, C)
    hidden_BCH = read(actor.base_model, ids_BC, column_BC, causal_BCC, args.dtype, cache)
    hidden_BSH = hidden_BCH[torch.arange(B)[:, None], start_BS - 1]
    visible_BSC = column_BC[:, None] < start_BS[..., None]
    token_BS, open_BS, steps = None, is_state_BS, []
    while open_BS.any() and len(steps) < args.max_action_tokens:
        if steps:  # read the tokens just written: S more columns in the cache, each for its own state alone
            visible_BSC = torch.cat([visible_BSC, torch.eye(S, dtype=torch.bool).expand(B, S, S)], -1)
            position_BS = start_BS + len(steps) - 1
            hidden_BSH = read(actor.base_model, token_BS, position_BS, visible_BSC, args.dtype, cache)
        logp_BSV = (actor.get_output_embeddings()(hidden_BSH) / args.temperature).log_softmax(-1)
        if greedy:
            token_BS = logp_BSV.argmax(-1)
        else:  # the first token whose cumulative probability reaches a uniform number
            u_BS1 = torch.rand(B, S, 1, generator=generator, device=generator.device)
            token_BS = (logp_BSV.exp().cumsum(-1) < u_BS1).sum(-1).clamp(max=logp_BSV.shape[-1] - 1)
        logp_BS = logp_BSV.gather(-1, token_BS[..., None])[..., 0]
        steps.append((token_BS.cpu(), logp_BS.cpu() * open_BS, open_BS))
        open_BS = open_BS & (token_BS.cpu() != actor.tokenizer.eos_token_id)
    token_NL, logp_NL, open_NL = (torch.stack(x, -1)[is_state_BS] for x in zip(*steps, strict=True))
    return [ids[own].tolist() for ids, own in zip(token_NL, open_NL, strict=True)], logp_NL.sum(-1)


def rollout(actor, worlds, args: Args, generator, rng=None, indices=None, greedy: bool = False):
    """Plays all worlds to their end, in lockstep; returns dialogues with an action, -log pi of utterances.

    `rng` draws the worlds' seeds; without it they are 0, 1, 2 ... A dialogue is cut at the model's context.
    """
    seeds = rng.integers(2**31, size=len(worlds)).tolist() if rng else list(range(len(worlds)))
    worlds.reset(seeds=seeds, indices=indices)
    # n tokens, encoded again from text, are up to 3n (bytes become U+FFFD): with the end token at most 4n.
    limit = getattr(actor.config, "max_position_embeddings", sys.maxsize) - 4 * args.max_action_tokens
    nll = []
    while worlds.alive():
        rows = {}
        for i in worlds.alive():
            played = worlds.dialogues[i]
            layout, spans = lay_out([played | {"actions": [*played["actions"], ""]}], actor.tokenizer)
            rows[i] = layout[-1][: spans[-1][1]]  # all before the dummy action ""
            if len(rows[i]) > limit:
                worlds.cut(i)
                del rows[i]
        if rows:
            starts = [[len(row)] for row in rows.values()]
            written, logp_N = speak(actor, list(rows.values()), starts, args, generator, greedy)
            said = dict(zip(rows, [spoken(actor.tokenizer, ids) for ids in written], strict=True))
            worlds.step([said.get(i) for i in range(len(worlds))])
            nll += (-logp_N).tolist()
    return [d for d in worlds.dialogues if d["actions"]], nll


def fresh_utterances(actor, dialogues: list[dict], args: Args, generator) -> list[list[int]]:
    """One utterance of the current actor in each of the N states of some dialogues, as token ids."""
    rows, spans = lay_out(dialogues, actor.tokenizer)
    starts = [[start for _, start, _ in own] for _, own in groupby(spans, lambda span: span[0])]
    fresh, size = [], 1 + 500 * len(rows) // len(spans)  # rows with about 500 states: bounds the memory
    for i in range(0, len(rows), size):
        fresh += speak(actor, rows[i : i + size], starts[i : i + size], args, generator)[0]
    return fresh


# ---------------------------------------------------------- 6. updates
def descend(loss: torch.Tensor, optimizer, parameters, max_norm: float, what: str) -> float:
    """One step of an optimiser; the gradients of `parameters` are clipped. Returns their norm before that."""
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    if not torch.isfinite(loss + norm):
        raise ArithmeticError(f"the {what} diverged (loss {loss:.3g}, gradient {norm:.3g}): lower its rate")
    optimizer.step()
    return norm.item()


def critic_update(critic, target, optimizer, dialogues: list[dict], args: Args) -> dict[str, float]:
    """One step on E1 and E2, or on what --critic-loss selects, and one Polyak step of the target."""
    reward_N = torch.tensor([float(r) for d in dialogues for r in d["rewards"]], device=critic.body.device)
    return_N = reward_N.new_tensor([g for d in dialogues for g in mc_returns(d["rewards"], args.gamma)])
    turn_N = torch.tensor([n for d in dialogues for n in range(len(d["actions"]))], device=reward_N.device)
    is_last_N = turn_N.roll(-1) == 0  # the next entry is a turn 0; truncation counts as an end: no bootstrap
    fresh = [text for d in dialogues for text in d["fresh"]] if args.critic_loss == "td" else None  # D7

    v_N2, q_N2 = critic(dialogues)
    with torch.no_grad():
        vbar_N2, qbar_N2 = target(dialogues, fresh)
        next_v_N2 = vbar_N2.roll(-1, 0).masked_fill(is_last_N[:, None], 0.0)
        q_target_N2, v_target_N2 = td_target(reward_N, next_v_N2, args.gamma), qbar_N2
        if args.critic_loss == "mc":
            q_target_N2 = v_target_N2 = return_N[:, None].expand(-1, 2)
    q_loss = nn.functional.mse_loss(q_N2, q_target_N2)  # E1
    v_loss = value_loss(v_N2, v_target_N2, args.expectile if args.critic_loss == "iql" else 0.5)  # E2, E6
    norm = descend(q_loss + v_loss, optimizer, critic.parameters(), args.max_grad_norm, "critic")
    for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
        slow.data.lerp_(fast.data, args.polyak)
    error_N = v_N2.detach().mean(-1) - return_N
    metrics = {"q_loss": q_loss, "v_loss": v_loss, "bias": error_N[turn_N == 0].mean()}
    variance = return_N.var()
    variance[variance < 1e-8] = torch.nan  # all returns are equal: there is nothing to explain
    metrics["explained_variance"] = 1 - error_N.var() / variance
    return {f"critic/{name}": figure.item() for name, figure in metrics.items()} | {"critic/grad_norm": norm}


def actor_update(actor, start_actor, critic, baseline, optimizer, dialogues, args: Args, generator):
    """One step on E3, with an utterance just sampled in each state of replayed dialogues."""
    fresh = fresh_utterances(actor, dialogues, args, generator)
    with torch.no_grad():
        v_N2, q_N2 = critic(dialogues, [spoken(actor.tokenizer, ids) for ids in fresh])
        raw_N = advantages(q_N2, v_N2)
        advantage_N = raw_N - raw_N.mean() if args.center else raw_N  # D3
        start_logp_MV = score(start_actor, dialogues, fresh, args)[0].log_softmax(-1)

    logits_MV, token_M, hidden_MH, owner_M = score(actor, dialogues, fresh, args)
    logp_MV = logits_MV.log_softmax(-1)
    logp_M = logp_MV.gather(-1, token_M[:, None])[:, 0]
    baseline_M = baseline(hidden_MH.detach())[:, 0] * args.baseline  # E5, D8; all 0 without --baseline
    policy_loss = reinforce_loss(logp_M, advantage_N, owner_M, baseline_M)
    token_loss = baseline_loss(baseline_M, advantage_N, owner_M) * args.baseline  # E4; 0 without --baseline
    kl = nn.functional.kl_div(start_logp_MV, logp_MV, log_target=True, reduction="sum") / len(fresh)
    entropy = -(logp_MV.detach().exp() * logp_MV.detach()).sum() / len(fresh)
    loss = policy_loss + args.kl * kl + token_loss  # D1: KL(pi || pi_start), no gradient through a_<i
    norm = descend(loss, optimizer, actor.parameters(), args.max_grad_norm, "actor")
    metrics = {"loss": policy_loss, "baseline_loss": token_loss, "kl": kl, "entropy": entropy}
    metrics |= {"advantage_mean": raw_N.mean(), "advantage_std": raw_N.std()}
    return {f"actor/{name}": figure.item() for name, figure in metrics.items()} | {"actor/grad_norm": norm}


# ---------------------------------------------------------- 7. evaluation
def evaluate(actor, args: Args) -> dict[str, float]:
    """Plays the world's tasks (at most `eval_episodes`) in whole passes, sampled, and once greedily."""
    options, metrics = envs.options(args.world), {}
    tasks = list(range(envs.make(args.env, **options).num_tasks))[: args.eval_episodes]
    for suffix, passes in {"": max(1, round(args.eval_episodes / len(tasks))), "_greedy": 1}.items():
        worlds = envs.VecTextEnv(args.env, passes * len(tasks), **options)
        generator, is_greedy = torch.Generator(args.device).manual_seed(0), suffix == "_greedy"
        figures = envs.summarise(rollout(actor, worlds, args, generator, None, tasks * passes, is_greedy)[0])
        worlds.close()
        metrics |= {f"{name}{suffix}": figures[name] for name in ("return", "success", "repeated")}
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
def main(args: Args) -> dict[str, float]:
    """Iterations of rollouts, critic and actor; returns what it writes to summary.json."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started, cpu_started = time.time(), time.process_time()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng, generator = np.random.default_rng(args.seed), torch.Generator(args.device).manual_seed(args.seed)
    worlds = envs.VecTextEnv(args.env, args.rollouts, **envs.options(args.world))

    # --- all that learns, as it starts; variants of a world share a checkpoint
    source = args.actor or str(Path(__file__).parent / "checkpoints" / worlds.envs[0].demonstration_env)
    actor, actor.tokenizer = load(transformers.AutoModelForCausalLM, source, args)
    start_actor = copy.deepcopy(actor).requires_grad_(False)
    body, tokenizer = copy.deepcopy(actor.base_model), actor.tokenizer  # D2
    if args.critic:
        body, tokenizer = load(transformers.AutoModel, args.critic, args)
    first = [] if args.resume else rollout(actor, worlds, args, generator, rng)[0]
    value = float(np.mean([mc_returns(d["rewards"], args.gamma)[0] for d in first] or [0.0]))  # D4
    critic = Critic(body, tokenizer, value, args.dtype).to(args.device)
    target = copy.deepcopy(critic).requires_grad_(False)
    baseline = mlp(actor.config.hidden_size, actor.config.hidden_size, 0.0).to(args.device)
    moved = [*actor.parameters(), *baseline.parameters()]
    optimizer = torch.optim.AdamW(moved, lr=args.actor_lr, weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)
    modules = {"actor": actor, "baseline": baseline, "optimizer": optimizer}
    modules |= {"critic": critic, "target": target, "critic_optimizer": critic_optimizer}

    # --- a new run, or one that goes on
    run = runs.folder(args, "archer")
    if args.resume:
        state = restore(run, modules, rng, generator)
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
    else:
        evaluation = evaluate(actor, args)
        state = {"iteration": 0, "episodes": len(first), "buffer": first, "metrics": [], "samples": []}
        state |= {"warm_start": evaluation, "evaluation": evaluation}
    buffer = state["buffer"]  # the same list: it is saved with the state
    runs.write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)  # one record
    print(f"{run}: starts from {source}, which returns {state['warm_start']['return']:.2f}")
    writer = SummaryWriter(str(run), purge_step=state["iteration"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))
    if not args.resume:
        start = {f"eval/{name}": figure for name, figure in state["evaluation"].items()}
        state["metrics"].append(runs.log(writer, 0, start, "return"))
    stopped = runs.stop_signals()  # Ctrl-C fills this list: after the iteration the run saves and ends

    for iteration in range(state["iteration"] + 1, args.iterations + 1):
        began, logs = time.time(), []
        # 1. dialogues of the current actor
        played, nll = rollout(actor, worlds, args, generator, rng)
        buffer += played
        while sum(len(d["actions"]) for d in buffer) > args.buffer_size and len(buffer) > 1:
            buffer.pop(0)

        # 2. the critic; the actor stands still, so its utterances for E2 are sampled once for all updates
        pool = [buffer[i] for i in rng.integers(len(buffer), size=args.critic_pool)]
        if args.critic_loss == "td":
            texts = (spoken(actor.tokenizer, ids) for ids in fresh_utterances(actor, pool, args, generator))
            pool = [d | {"fresh": [next(texts) for _ in d["actions"]]} for d in pool]  # D7
        critic_optimizer.param_groups[0]["lr"] = args.critic_lr  # a resumed run may have been given another
        for _ in range(args.critic_updates):
            batch = [pool[i] for i in rng.integers(len(pool), size=args.critic_batch)]
            logs.append(critic_update(critic, target, critic_optimizer, batch, args))

        # 3. the actor, on utterances of its own
        share = (args.iterations - iteration + 1) / max(1, args.iterations - args.warmup)  # 1 at first update
        optimizer.param_groups[0]["lr"] = args.actor_lr * (share if args.anneal_lr else 1)  # D6
        for _ in range(args.actor_updates if iteration > args.warmup else 0):
            batch = [buffer[i] for i in rng.integers(len(buffer), size=args.actor_batch)]
            logs.append(actor_update(actor, start_actor, critic, baseline, optimizer, batch, args, generator))

        # 4. metrics, evaluation, checkpoint
        state["iteration"], state["episodes"] = iteration, state["episodes"] + len(played)
        metrics = {f"rollout/{name}": figure for name, figure in envs.summarise(played).items()}
        metrics["rollout/nll"] = float(np.mean(nll))
        metrics |= runs.means(logs)
        is_due = iteration % args.eval_every == 0 or iteration == args.iterations
        if is_due:
            state["evaluation"] = evaluate(actor, args)
            metrics |= {f"eval/{name}": figure for name, figure in state["evaluation"].items()}
        metrics["time/utterances_per_second"] = len(nll) / (time.time() - began)
        state["metrics"].append(runs.log(writer, iteration, metrics, "return|repeated|explained|kl"))
        for dialogue in played[:4]:
            with torch.no_grad():
                v_N2, q_N2 = critic([dialogue])
            values = {"Q": q_N2.min(-1).values.tolist(), "V": v_N2.min(-1).values.tolist()}
            state["samples"].append({"iteration": iteration} | dialogue | values)
        with runs.saving(run, iteration):  # a full disk, for example, does not end the run
            runs.write(run / "metrics.jsonl", state["metrics"])
            runs.write(run / "rollouts.jsonl", state["samples"])
            if is_due or stopped:
                state |= {"seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu_started}
                state["modules"] = {name: module.state_dict() for name, module in modules.items()}
                state["rng"], state["generator"] = rng.bit_generator.state, generator.get_state()
                models = {"actor": (actor, actor.tokenizer), "critic": (critic.body, critic.tokenizer)}
                save(run, state, models)
        if stopped:
            break
    writer.close()

    summary = {f"warm_start_{name}": figure for name, figure in state["warm_start"].items()}
    summary |= {f"eval_{name}": figure for name, figure in state["evaluation"].items()}
    summary |= {name: state[name] for name in ("iteration", "episodes")} | {"seed": args.seed} | runs.facts()
    summary |= {"seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu_started}
    runs.write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    return summary


if __name__ == "__main__":
    runs.cli(Args, main)
