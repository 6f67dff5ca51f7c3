"""Offline ArCHer: an IQL critic on utterances and an AWR actor on tokens, from recorded dialogues alone.

    python archer_offline_iql.py --env twenty-questions-subset
    python archer_offline_iql.py --env ENV --dataset FILE --actor FOLDER --actor-lr 1e-4 --critic-lr 1e-5

The critic learns what the utterances of the data are worth; the actor imitates them, the good ones more: at
beta 0 all alike, which is BC, and with --keep 0.1 filtered BC. The world only makes data, and evaluates.

Paper: Zhou et al. 2024, arXiv:2402.19446, sec. 3.5 and App. B
  E1  Q(s,a) <- r + gamma * Vbar(s')                     iql          Eq. 1      td_target
  E2  V(s)   <- E Qbar(s,a),  a ~ data (Eq. 2: a ~ pi)   sarsa        sec. 5.7   value_loss
  E3  grad log pi(a|s) * A,  A = min Q - min V, a ~ pi   reinforce    Eq. 3      advantages, reinforce_loss
  E6  V(s)   <- upper expectile of Qbar(s,a), a ~ data   iql          Eq. 6      value_loss
  E7  grad log pi(a|s) * exp(beta * A),  a ~ data        awr          Eq. 7      awr_weights, reinforce_loss
  E8  Q(s,a) <- r + gamma * Qbar(s',a'),  a' ~ data      sarsa        sec. 5.7   td_target
Differs from the paper (docs/archer_offline_iql.md has the reasons; "authors" below is their code's default):
  D1  AWR weights are clamped (--max-weight inf): one over-valued utterance must not outweigh the batch.
  D2  Critic (a decoder) and actor start from a checkpoint of sft.py; App. B does without pre-training.
  D3  Learning rates, batches and numbers of updates are tuned for a tiny model.
  D4  The value heads start at the mean discounted return of the data instead of zero.
  D5  Both learning rates fall linearly to zero (--no-anneal-lr): the last steps undo less.
"""

import copy
import json
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import envs
from envs import runs
from envs.datasets import make_dialogues, read_dialogues


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "twenty-questions"  # the world: an id of `python -m envs` or your own (docs/your_world.md)
    world: str = ""  # options of the world, as NAME=VALUE, separated by commas (docs/worlds.md)
    seed: int = 1  # of all that is random but the data and the evaluation; 0 or more
    iterations: int = 20  # rounds of critic and actor updates; 0: only evaluates
    runs: str = "runs"  # folder in which the run's own folder is made
    name: str = ""  # of the run, for the name of its folder
    resume: str = ""  # folder of a run to continue; its saved arguments are used unless given anew
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # on the CPU; with one, resuming is exact to the bit

    # --- model
    actor: str = ""  # a causal LM that sft.py has made: folder or Hugging Face name; "" takes the world's
    dtype: Literal["float32", "bfloat16"] = "float32"  # of computations; parameters stay float32
    temperature: float = 1.0  # of sampling; log-probs are scored at the same one
    max_action_tokens: int = 16  # tokens after which a sampled utterance is cut

    # --- data
    dataset: str = ""  # file of dialogues: the authors' JSON, or a run's dataset.jsonl or rollouts.jsonl
    dataset_size: int = 5_000  # dialogues that scripted players make where no file is given
    dataset_seed: int = 0  # of these dialogues
    mix: str = "random=0.8/expert=0.2"  # players by shares of the dialogues; with commas, of the turns

    # --- algorithm
    critic: Literal["iql", "sarsa"] = "iql"  # E1 and E6, or E8 and E2
    critic_lr: float = 3e-3  # at the start (authors: 1e-5, for RoBERTa; D3)
    critic_updates: int = 50  # of an iteration, each with a Polyak step of the target; 0: none, as for BC
    gamma: float = 0.95  # discount per utterance (authors: 0.99)
    polyak: float = 0.05  # share of the critic that enters its target copy after every update (authors: 0.05)
    expectile: float = 0.9  # of E6 (authors: 0.9)

    actor_loss: Literal["awr", "reinforce"] = "awr"  # E7 on the data, or E3 on the actor's own utterances
    actor_lr: float = 5e-3  # at the start (authors: 1e-4, for GPT-2; D3)
    actor_updates: int = 50  # of an iteration; 0: none
    beta: float = 1.0  # of E7, inverse temperature of the advantages (authors: 1; 0: BC)
    max_weight: float = 20.0  # clamp of the weights of E7; inf is none (D1)
    bc_weight: float = 0.0  # of imitation beside the actor's loss (REINFORCE + BC: 1)
    keep: float = 1.0  # share of the dialogues, the best ones, that the actor learns from (filtered BC: 0.1)
    batch: int = 16  # dialogues in an update of critic or actor (D3)
    anneal_lr: bool = True  # both learning rates fall to zero (D5)
    max_grad_norm: float = 1.0  # gradients of actor and critic are clipped to this norm, apart

    # --- evaluation
    eval_every: int = 10  # iterations between evaluations, and between checkpoints; Ctrl-C writes one, too
    eval_episodes: int = 314  # sampled dialogues of an evaluation, in whole passes over the tasks


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
# A dialogue is the world's dict of text: n "actions", n "rewards", n + 1 "observations", "success" and so on.
# The N actions of a batch are numbered through all its dialogues; what the world said last is no state.
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
# Suffixes name the axes: N actions, M the tokens of N utterances in a row (each with its end of turn), V the
# vocabulary, H hidden, 2 the twin critics, B rows, T columns; in `speak` S states of one row.
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


def awr_weights(advantage_N: torch.Tensor, beta: float, max_weight: float) -> torch.Tensor:
    """E7: exp(beta * A) [N], at most `max_weight`; no gradient flows into them."""
    return (beta * advantage_N.detach()).exp().clamp(max=max_weight)  # E7, D1


def reinforce_loss(logp_M, advantage_N, owner_M, baseline_M=0.0) -> torch.Tensor:
    """E3, E5: -mean over utterances of sum_i log pi(a_i|s,a_<i) (A - baseline_i); owner_M: a token's n."""
    weight_M = (advantage_N[owner_M] - baseline_M).detach()
    return -(logp_M * weight_M).sum() / len(advantage_N)  # E3


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
    """Twin V heads at the last token of each state and Q heads at each end of turn of a decoder (D2)."""

    def __init__(self, body, tokenizer, value: float, dtype: str):
        super().__init__()
        self.body, self.tokenizer, self.dtype = body, tokenizer, dtype
        H = body.config.hidden_size
        self.v_heads = nn.ModuleList(mlp(H, H, value) for _ in range(2))
        self.q_heads = nn.ModuleList(mlp(H, H, value) for _ in range(2))

    def forward(self, dialogues: list[dict], utterances: list[str] | None = None):
        """V of all states [N, 2], and Q [N, 2] of an utterance in each; None reads the actions taken."""
        end = [self.tokenizer.eos_token_id]
        ids = utterances and [encode(self.tokenizer, text) + end for text in utterances]
        batch, row_N, columns = pack(dialogues, self.tokenizer, ids)
        hidden_BTH = read(self.body, *batch, self.dtype)
        v_NH = hidden_BTH[row_N, [own[0] for own in columns]]
        q_NH = hidden_BTH[row_N, [own[-1] for own in columns]]
        return torch.cat([h(v_NH) for h in self.v_heads], -1), torch.cat([h(q_NH) for h in self.q_heads], -1)


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
    """One step on V (E6 or E2) and Q (E1 or E8) over the data's utterances, one Polyak step of the target."""
    reward_N = torch.tensor([reward for d in dialogues for reward in d["rewards"]], device=critic.body.device)
    return_N = reward_N.new_tensor([g for d in dialogues for g in mc_returns(d["rewards"], args.gamma)])
    turns_left_N = reward_N.new_tensor([n for d in dialogues for n in range(len(d["actions"]), 0, -1)])

    v_N2, q_N2 = critic(dialogues)
    with torch.no_grad():
        target_v_N2, target_q_N2 = target(dialogues)
        next_N2 = target_v_N2 if args.critic == "iql" else target_q_N2  # E1, E8
        next_N2 = next_N2.roll(-1, 0).masked_fill(turns_left_N[:, None] == 1, 0.0)  # a cut ends, too
        q_target_N2 = td_target(reward_N, next_N2, args.gamma)
    q_loss = nn.functional.mse_loss(q_N2, q_target_N2)
    v_loss = value_loss(v_N2, target_q_N2, args.expectile if args.critic == "iql" else 0.5)  # E6, E2
    norm = descend(q_loss + v_loss, optimizer, critic.parameters(), args.max_grad_norm, "critic")
    for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
        slow.data.lerp_(fast.data, args.polyak)
    error_N = v_N2.detach().mean(-1) - return_N
    metrics = {"q_loss": q_loss, "v_loss": v_loss, "bias": error_N.mean()}
    variance = return_N.var(correction=0)
    variance[variance < 1e-8] = torch.nan  # all returns are equal: there is nothing to explain
    metrics["explained_variance"] = 1 - error_N.var(correction=0) / variance
    return {f"critic/{name}": figure.item() for name, figure in metrics.items()} | {"critic/grad_norm": norm}


def actor_update(actor, critic, optimizer, dialogues: list[dict], args: Args, generator) -> dict[str, float]:
    """One step on E7 with the utterances of the data, or on E3 with some that the actor has just sampled."""
    logits_MV, token_M, _, owner_M = score(actor, dialogues, None, args)
    logp_M = -nn.functional.cross_entropy(logits_MV, token_M, reduction="none")
    data_nll = reinforce_loss(logp_M, torch.ones(owner_M[-1] + 1, device=actor.device), owner_M)
    said = None  # in each state, what the data says
    if args.actor_loss == "reinforce":
        rows, spans = lay_out(dialogues, actor.tokenizer)
        starts = [[start for row, start, _ in spans if row == b] for b in range(len(rows))]
        fresh, _ = speak(actor, rows, starts, args, generator)
        said = [spoken(actor.tokenizer, ids) for ids in fresh]
        logits_MV, token_M, _, owner_M = score(actor, dialogues, fresh, args)
        logp_M = -nn.functional.cross_entropy(logits_MV, token_M, reduction="none")
    with torch.no_grad():
        v_N2, q_N2 = critic(dialogues, said)
        weight_N = advantage_N = advantages(q_N2, v_N2)  # E3
        entropy = torch.distributions.Categorical(logits=logits_MV).entropy().sum() / len(v_N2)
    metrics = {"advantage_mean": advantage_N.mean(), "advantage_std": advantage_N.std(correction=0)}
    if args.actor_loss == "awr":
        weight_N = awr_weights(advantage_N, args.beta, args.max_weight)  # E7
        metrics["effective_samples"] = weight_N.double().mean() ** 2 / (weight_N.double() ** 2).mean()
        metrics["clamped"] = (weight_N >= args.max_weight).float().mean()
    loss = reinforce_loss(logp_M, weight_N, owner_M) + args.bc_weight * data_nll
    norm = descend(loss, optimizer, actor.parameters(), args.max_grad_norm, "actor")
    metrics |= {"loss": loss, "data_nll": data_nll, "entropy": entropy}
    return {f"actor/{name}": figure.item() for name, figure in metrics.items()} | {"actor/grad_norm": norm}


# ---------------------------------------------------------- 7. evaluation
@torch.no_grad()
def evaluate(actor, critic, known: set[str], args: Args) -> tuple[dict[str, float], list[dict]]:
    """All tasks of the world, or the first, greedy and sampled, from the same seeds; and the sampled ones."""
    options, metrics = envs.options(args.world), {}
    tasks = list(range(envs.make(args.env, **options).num_tasks))[: args.eval_episodes]
    for suffix, passes in {"_greedy": 1, "": max(1, round(args.eval_episodes / len(tasks)))}.items():
        worlds = envs.VecTextEnv(args.env, passes * len(tasks), **options)
        generator, is_greedy = torch.Generator(args.device).manual_seed(0), suffix == "_greedy"
        played, _ = rollout(actor, worlds, args, generator, None, passes * tasks, is_greedy)
        figures = envs.summarise(played)
        metrics |= {f"{name}{suffix}": figures[name] for name in ("return", "success", "invalid", "repeated")}
    metrics["unseen"] = float(np.mean([action not in known for d in played for action in d["actions"]]))
    for dialogue in played:
        v_N2, q_N2 = critic([dialogue])
        dialogue |= {"Q": q_N2.min(-1).values.tolist(), "V": v_N2.min(-1).values.tolist()}
    errors = [np.subtract(d["Q"], mc_returns(d["rewards"], args.gamma)) for d in played]
    metrics["overestimation"] = float(np.concatenate(errors).mean())
    return metrics, played


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
    """Iterations of critic and actor on recorded dialogues; returns what it writes to summary.json."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started, cpu_started = time.time(), time.process_time()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng, generator = np.random.default_rng(args.seed), torch.Generator(args.device).manual_seed(args.seed)
    world = envs.make(args.env, **envs.options(args.world))

    # --- the data, and all that learns, as it starts
    source = args.actor or str(Path(__file__).parent / "checkpoints" / world.demonstration_env)
    actor, actor.tokenizer = load(transformers.AutoModelForCausalLM, source, args)
    if args.dataset:
        found, notes = read_dialogues(args.dataset, world.append_only)
    else:
        found, notes = make_dialogues(world, args.dataset_size, args.dataset_seed, args.mix), []
    limit = getattr(actor.config, "max_position_embeddings", sys.maxsize) - args.max_action_tokens
    data = [d for d in found if max(map(len, lay_out([d], actor.tokenizer)[0])) <= limit]
    print(*notes, f"{len(data)} of {len(found)} dialogues fit into {limit} tokens", sep="\n")
    data.sort(key=lambda d: -sum(d["rewards"]))
    imitated = data[: max(1, int(args.keep * len(data)))]
    data_return = envs.summarise(data)["return"]
    known = {action for d in data for action in d["actions"]}
    value = float(np.mean([g for d in data for g in mc_returns(d["rewards"], args.gamma)]))  # D4
    critic = Critic(copy.deepcopy(actor.base_model), actor.tokenizer, value, args.dtype).to(args.device)  # D2
    target = copy.deepcopy(critic).requires_grad_(False)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=args.actor_lr, betas=(0.9, 0.98), weight_decay=0.01)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)
    modules = {"actor": actor, "optimizer": optimizer}
    modules |= {"critic": critic, "target": target, "critic_optimizer": critic_optimizer}

    # --- a new run, or one that goes on
    run = runs.folder(args, "archer_offline_iql")
    if args.resume:
        state = restore(run, modules, rng, generator)
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
    else:
        start, _ = evaluate(actor, critic, known, args)
        state = {"iteration": 0, "metrics": [], "samples": [], "warm_start": start, "evaluation": start}
        runs.write(run / "dataset.jsonl", data)
    runs.write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    print(f"{run}: starts from {source}, which returns {state['warm_start']['return']:.2f}")
    writer = SummaryWriter(str(run), purge_step=state["iteration"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))
    if not args.resume:
        start = {f"eval/{name}": figure for name, figure in start.items()}
        state["metrics"].append(runs.log(writer, 0, start, "return"))
    stopped = runs.stop_signals()  # Ctrl-C ends the iteration that it falls into

    for iteration in range(state["iteration"] + 1, args.iterations + 1):
        began, rows = time.time(), []
        share = (args.iterations - iteration + 1) / args.iterations if args.anneal_lr else 1.0  # D5
        # 1. the critic
        critic_optimizer.param_groups[0]["lr"] = args.critic_lr * share
        for _ in range(args.critic_updates):
            batch = rng.choice(data, args.batch)
            rows.append(critic_update(critic, target, critic_optimizer, batch, args))
        # 2. the actor, by the critic that has just learned
        optimizer.param_groups[0]["lr"] = args.actor_lr * share
        for _ in range(args.actor_updates):
            batch = rng.choice(imitated, args.batch)
            rows.append(actor_update(actor, critic, optimizer, batch, args, generator))
        # 3. the books
        state["iteration"], metrics = iteration, {"data/return": data_return}
        metrics |= runs.means(rows)
        metrics["time/updates_per_second"] = len(rows) / (time.time() - began)
        is_due = iteration % args.eval_every == 0 or iteration == args.iterations
        if is_due:
            state["evaluation"], played = evaluate(actor, critic, known, args)
            metrics |= {f"eval/{name}": figure for name, figure in state["evaluation"].items()}
            state["samples"] += [{"iteration": iteration} | dialogue for dialogue in played[:8]]
        state["metrics"].append(runs.log(writer, iteration, metrics, "eval/return|explained|nll|entropy"))
        with runs.saving(run, iteration):  # a full disk, for example, does not end the run
            runs.write(run / "metrics.jsonl", state["metrics"])
            runs.write(run / "rollouts.jsonl", state["samples"])
            if is_due or stopped:
                state |= {"seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu_started}
                state["modules"] = {name: module.state_dict() for name, module in modules.items()}
                state["rng"], state["generator"] = rng.bit_generator.state, generator.get_state()
                save(run, state, {"actor": (actor, actor.tokenizer)})
        if stopped:
            break
    writer.close()

    summary = {f"warm_start_{name}": figure for name, figure in state["warm_start"].items()}
    summary |= {f"eval_{name}": figure for name, figure in state["evaluation"].items()}
    last = summary["eval_return"]
    learned = [row for row in state["metrics"] if row["iteration"] > 0]  # the start is no result of the run
    summary["best_return"] = max([last, *(row.get("eval/return", last) for row in learned)])
    summary |= {"episodes": len(data), "seed": args.seed} | runs.facts()
    summary |= {"seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu_started}
    runs.write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    return summary


if __name__ == "__main__":
    runs.cli(Args, main)
