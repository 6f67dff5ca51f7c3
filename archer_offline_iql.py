"""Offline ArCHer: an IQL critic on utterances and an AWR actor on tokens, from recorded dialogues alone.

    python archer_offline_iql.py --env twenty-questions-subset
    python archer_offline_iql.py --env ENV --dataset FILE --actor FOLDER --actor-lr 1e-4 --critic-lr 1e-5

The critic learns the values of the utterances in the data; the actor imitates them, the better ones more.
With --beta 0 it imitates all alike, which is behaviour cloning (BC); with --keep 0.1 as well, filtered BC.
The world is only needed to make data and to evaluate.

Paper: Zhou et al. 2024, arXiv:2402.19446, sec. 3.5 and App. B
      (bar: slow copy; A = min Q - min V, sec. 3.6)      with         from       in
  E1  Q(s,a) <- r + gamma * Vbar(s')                     iql          Eq. 1      critic_targets, td_target
  E2  V(s)   <- E Qbar(s,a),  a ~ data (Eq. 2: a ~ pi)   sarsa        sec. 5.7   value_loss
  E3  grad log pi(a|s) * A,  a ~ pi                      reinforce    Eq. 3      advantages, reinforce_loss
  E6  V(s)   <- upper expectile of Qbar(s,a), a ~ data   iql          Eq. 6      value_loss
  E7  grad log pi(a|s) * exp(beta * A),  a ~ data        awr          Eq. 7      awr_weights, reinforce_loss
  E8  Q(s,a) <- r + gamma * Qbar(s',a'),  a' ~ data      sarsa        sec. 5.7   critic_targets, td_target
  (The baseline for tokens, which comes between, is in archer.py.)
Differs from the paper; the option in brackets undoes it ("authors" in a comment: a default of their code):
  D1  AWR weights are clamped (--max-weight inf): no single over-valued utterance may dominate a batch.
  D2  Critic, a decoder, and actor start from a checkpoint of sft.py; in App. B there is no pre-training.
  D3  Learning rates, batches and numbers of updates are tuned for a tiny model.
  D4  All heads, Q and V, start at the mean discounted return of the data's turns instead of zero.
  D5  Both learning rates decay linearly towards zero (--no-anneal-lr): late noise then undoes less.
  D6  A discount of 0.95 (--gamma 0.99), gradients that are clipped (--max-grad-norm inf), no dropout, and for
      the actor AdamW: as in archer.py and sft.py, not tuned here.
"""

import copy
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

import envs
from envs import models, runs
from envs.datasets import make_dialogues, read_for


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "twenty-questions"  # the world: an id from `python -m envs` or your own (docs/your_world.md)
    world: str = ""  # options of the world: NAME=VALUE, separated by commas (docs/worlds/)
    seed: int = 1  # seed of everything random but the data and the evaluation; 0 or more
    iterations: int = 20  # rounds of critic and actor updates; 0: only evaluate
    runs: str = "runs"  # folder in which the run's own folder is created
    name: str = ""  # label of the run, a part of its folder's name
    resume: str = ""  # folder of a run to continue; its saved arguments hold unless given again
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # CPU threads; with one, resuming is exact to the bit

    # --- model
    actor: str = ""  # causal LM fine-tuned by sft.py: folder or Hugging Face name; "" takes the world's
    critic: str = ""  # a decoder, likewise; "" starts from the actor's weights (D2)
    dtype: Literal["float32", "bfloat16"] = "float32"  # for computations; trained parameters stay float32
    lora: bool = False  # train only low-rank adapters; needs the package peft and a --critic
    lora_rank: int = 16  # rank of the adapters; their alpha is twice that
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: slower, less memory
    temperature: float = 1.0  # of sampling, and of scored log-probs
    max_action_tokens: int = 16  # tokens after which a sampled utterance is cut off

    # --- data
    dataset: str = ""  # dialogues: the authors' JSON, or a run's dataset.jsonl or rollouts.jsonl
    dataset_size: int = 5_000  # dialogues that scripted players produce if no file is given
    dataset_seed: int = 0  # seed of these dialogues
    mix: str = "random=0.8/expert=0.2"  # players and their shares of the dialogues; with commas, of the turns

    # --- algorithm
    micro_batch: int = 16  # dialogues of an update that are in memory at a time; the same but for rounding
    critic_loss: Literal["iql", "sarsa"] = "iql"  # E1 and E6, or E8 and E2
    critic_lr: float = 3e-3  # initial learning rate (authors: 1e-5, for RoBERTa; D3)
    critic_updates: int = 50  # per iteration, each with a Polyak step of the target; 0: none, as for BC
    gamma: float = 0.95  # discount per utterance (authors: 0.99)
    polyak: float = 0.05  # target += polyak * (critic - target), after every update (authors: 0.05)
    expectile: float = 0.9  # expectile of E6 (authors: 0.9)

    actor_loss: Literal["awr", "reinforce"] = "awr"  # E7 on the data, or E3 on the actor's own utterances
    actor_lr: float = 5e-3  # initial learning rate (authors: 1e-4, for GPT-2; D3)
    actor_updates: int = 50  # per iteration; 0: none
    beta: float = 1.0  # inverse temperature of the advantages in E7 (authors: 1; 0: BC)
    max_weight: float = 20.0  # upper bound on the weights of E7; inf: none (D1)
    bc_weight: float = 0.0  # weight of a BC loss added to the actor's (REINFORCE + BC: 1)
    keep: float = 1.0  # share of the dialogues, best first, that the actor learns from (filtered BC: 0.1)
    batch: int = 16  # dialogues per update of critic or actor (D3)
    anneal_lr: bool = True  # both learning rates decay linearly towards zero (D5)
    max_grad_norm: float = 1.0  # gradients of actor and critic are each clipped to this norm

    # --- evaluation
    eval_every: int = 10  # iterations between evaluations, each with a checkpoint; Ctrl-C also writes one
    eval_episodes: int = 314  # sampled dialogues per evaluation, rounded to whole passes over the tasks


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
# A dialogue is a dict: n "actions", n "rewards" and n + 1 "observations". An observation is the state of the
# next action, in most worlds the whole text so far; the last one comes after the end. The N actions of a
# batch of dialogues are numbered consecutively; `utterances` has one for each of their states, in that order.
class Span(NamedTuple):
    """Where an action is: columns start to stop - 1 of a row, including its end token."""

    row: int
    start: int
    stop: int


def lay_out(dialogues, tokenizer):
    """Tokenises dialogues into rows of ids; each action ends with the end token.

    A row continues while each observation only appends to the text; one that rewrites it starts a new row.
    Returns the rows, a Span for each of the N actions, and the prompts: for each dialogue, the row up to its
    next action.
    """
    end = tokenizer.eos_token_id
    rows = []
    spans = []
    prompts = []
    for dialogue in dialogues:
        so_far = ""
        for turn, observation in enumerate(dialogue["observations"]):
            # An empty reply starts a new row, too; else V(s') would be read where Q(s,a) is.
            goes_on = turn > 0 and observation != so_far and observation.startswith(so_far)
            if goes_on:
                added = observation.removeprefix(so_far)
                row = rows[-1] + models.encode_reply(tokenizer, added)
            else:
                row = models.encode_prompt(tokenizer, observation)
            if turn == len(dialogue["actions"]):  # the last observation: no action follows it, or none yet
                prompts.append(row)
                break
            start = len(row)
            action = dialogue["actions"][turn]
            # Not +=: `row` may be the list that `encode_prompt` keeps for all.
            row = row + models.encode(tokenizer, action) + [end]
            if goes_on:
                rows[-1] = row
            else:
                rows.append(row)
            span = Span(len(rows) - 1, start, len(row))
            spans.append(span)
            so_far = observation + action
    return rows, spans, prompts


def pad(rows, value=0):
    """Stacks rows of numbers into one tensor [B, T], padded on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def flat(dialogues, key):
    """The dialogues' values under `key`, one for each action, in one list [N]."""
    return [item for dialogue in dialogues for item in dialogue[key]]


def recorded_dialogues(world, actor, body, args):
    """The dialogues to learn from, best first: all that fit into the context of the actor and the critic.

    A resumed run has them in its folder.
    """
    notes = []
    if args.resume:
        found = runs.read_jsonl(f"{args.resume}/dataset.jsonl")
    elif args.dataset:
        found, notes = read_for(world, args.dataset)
    else:
        found = make_dialogues(world, args.dataset_size, args.dataset_seed, args.mix)
    limit = actor.context - 4 * args.max_action_tokens  # room for a fresh utterance, as `rollout` leaves it
    data = []
    cut = 0
    for dialogue in found:
        rows, spans, _ = lay_out([dialogue], actor.tokenizer)
        critic_rows, _, _ = lay_out([dialogue], body.tokenizer)
        longest = max(len(row) for row in rows + critic_rows)
        if longest <= limit:
            data.append(dialogue)
            cut += sum(span.stop - span.start > args.max_action_tokens for span in spans)
    notes.append(f"{len(data)} of {len(found)} dialogues fit into {limit} tokens")
    if cut:
        notes.append(f"{cut} actions are longer than --max-action-tokens: the actor cannot finish them")
    print(*notes, sep="\n")
    return sorted(data, key=lambda dialogue: -sum(dialogue["rewards"]))


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: N actions, M tokens of all N utterances together, V vocabulary, H hidden size,
# 2 twin critics, B rows, T columns, C columns of the cache, S states of a row, P = B * S places,
# L tokens of an utterance at most.
def td_target(reward_N, next_v_N2, gamma):
    """E1: r + gamma * Vbar(s') [N, 2], for each of the twins; next_v must be 0 after a dialogue's last turn.

    >>> td_target(torch.tensor([-1.0, 0.0]), torch.tensor([[-2.0, -4.0], [0.0, 0.0]]), 0.5).tolist()
    [[-2.0, -3.0], [0.0, 0.0]]
    """
    return reward_N[:, None] + gamma * next_v_N2  # E1


def value_loss(v_N2, q_N2, expectile=0.5):
    """E6: the higher the expectile, the closer V is to the best Q. At 0.5 it is E2, the mean over twins."""
    gap_N2 = q_N2 - v_N2
    is_below_N2 = (gap_N2 < 0).to(gap_N2)
    weight_N2 = (expectile - is_below_N2).abs()  # E6: 1 - expectile where Q is below V
    return (weight_N2 * gap_N2**2).sum(-1).mean()  # E2, E6


def mc_returns(rewards, gamma):
    """Discounted return from every turn to the end of the dialogue.

    >>> mc_returns([-1.0, -1.0, 0.0], 0.5)
    [-1.5, -1.0, 0.0]
    """
    returns = [0.0]
    for reward in reversed(rewards):
        returns.append(reward + gamma * returns[-1])
    return returns[:0:-1]  # from the first turn to the last, without the 0 behind it


def advantages(q_N2, v_N2):
    """The A of E3 (sec. 3.6): min Q - min V [N], each minimum over the twins."""
    return q_N2.min(-1).values - v_N2.min(-1).values  # E3


def awr_weights(advantage_N, beta, max_weight):
    """E7: exp(beta * A) [N], at most `max_weight`; no gradient flows through them."""
    weight_N = (beta * advantage_N.detach()).exp()
    return weight_N.clamp(max=max_weight)  # E7, D1


def effective_share(weight_N):
    """Kish's effective share, (sum w)^2 / (n sum w^2): 1 if all weights are equal, 1/n if one has all.

    >>> effective_share(torch.tensor([3.0, 3.0, 0.0, 0.0])).item()
    0.5
    """
    weight_N = weight_N.cpu().double()  # squares may overflow float32
    return weight_N.mean() ** 2 / (weight_N**2).mean()


def reinforce_loss(logp_M, advantage_N, owner_M, subtracted_M=0.0):
    """E3, E5: -mean over utterances of sum_i log pi(a_i|s,a_<i) (A - subtracted_i).

    Token m is in utterance owner_M[m].
    """
    weight_M = (advantage_N[owner_M] - subtracted_M).detach()
    return -(logp_M * weight_M).sum() / len(advantage_N)  # E3


# ---------------------------------------------------------- 4. models
@dataclass
class Packed:
    """Dialogues with one utterance in each of their N states, as a batch of B rows for a decoder."""

    inputs: tuple  # ids [B, T], positions [B, T], visibility [B, T, T]
    row_N: torch.Tensor  # row of each utterance
    state_N: torch.Tensor  # column of its state's last token, where V is read
    end_N: torch.Tensor  # column of its own last token (for the critic, the end token), where Q is read
    owner_M: torch.Tensor  # for each utterance token: the utterance that it belongs to
    before_M: torch.Tensor  # column of the token before it, whose hidden state predicts it
    column_M: torch.Tensor  # column of the token itself


ROW, PADDING = -1, -2  # instead of a fork's number: of a row's own tokens; of padding, which no fork sees


def pack(dialogues, tokenizer, utterances=None) -> Packed:
    """Packs dialogues with one utterance in each state, [N][token ids]; by default the actions taken there.

    Actions are in the rows already. Other utterances, in the order of the states, are forks: each is appended
    to its row, and sees itself and the row up to its state. A row with two actions a, and the forks b and c
    in its two states:

        token     s s a s a  b b  c c
        position  0 1 2 3 4  2 3  4 5
        fork      - - - - -  0 0  1 1
        start     0 0 0 0 0  2 2  4 4   a fork sees the row's tokens before this position
    """
    ids, spans, _ = lay_out(dialogues, tokenizer)
    positions = [list(range(len(row))) for row in ids]
    forks = [[ROW] * len(row) for row in ids]
    starts = [[0] * len(row) for row in ids]
    ends = []
    owners = []
    before = []
    columns = []
    for n, (b, start, stop) in enumerate(spans):
        own = range(start, stop)  # columns of utterance n
        if utterances is not None:
            length = len(utterances[n])
            own = range(len(ids[b]), len(ids[b]) + length)
            ids[b] += utterances[n]
            positions[b] += range(start, start + length)
            forks[b] += [n] * length
            starts[b] += [start] * length
        ends.append(own[-1])
        owners += [n] * len(own)
        before += [start - 1, *own[:-1]]
        columns += own

    position_BT = pad(positions)
    visible_BTT = visibility(position_BT, pad(forks, PADDING), pad(starts))
    return Packed(
        inputs=(pad(ids), position_BT, visible_BTT),
        row_N=torch.tensor([span.row for span in spans]),
        state_N=torch.tensor([span.start - 1 for span in spans]),
        end_N=torch.tensor(ends),
        owner_M=torch.tensor(owners),
        before_M=torch.tensor(before),
        column_M=torch.tensor(columns),
    )


def visibility(position_BT, fork_BT, start_BT):
    """Attention mask [B, T, T]: each token sees its own fork up to itself, and the row before its state."""
    is_same_BTT = fork_BT[:, None] == fork_BT[:, :, None]
    is_row_B1T = fork_BT[:, None] == ROW
    is_before_BTT = position_BT[:, None] < start_BT[:, :, None]
    return is_same_BTT.tril() | (is_row_B1T & is_before_BTT)


def score(actor, dialogues, utterances, temperature, dtype):
    """For the M utterance tokens: logits [M, V], ids [M], predicting hidden states [M, H], owners n [M]."""
    packed = pack(dialogues, actor.tokenizer, utterances)
    hidden_BTH = models.masked_states(actor.base_model, *packed.inputs, dtype)
    row_M = packed.row_N[packed.owner_M]
    ids_BT = packed.inputs[0]
    token_M = ids_BT[row_M, packed.column_M].to(actor.device)
    hidden_MH = hidden_BTH[row_M, packed.before_M]
    logits_MV = models.logits_of(actor, hidden_MH) / temperature
    owner_M = packed.owner_M.to(actor.device)
    return logits_MV, token_M, hidden_MH, owner_M


class Critic(nn.Module):
    """Twin Q and V heads on a decoder (D2), which reads a dialogue in one causal pass.

    V is read at each state's last token, Q at each utterance's end token.
    """

    def __init__(self, body, value, dtype):
        super().__init__()
        if models.is_encoder(body):
            raise ValueError("--critic: an encoder sees what follows; take a decoder")
        self.body = body
        self.tokenizer = body.tokenizer
        self.dtype = dtype
        width = models.width_of(body)
        self.v_heads = Twins(mlp(width, width, value) for _ in range(2))
        self.q_heads = Twins(mlp(width, width, value) for _ in range(2))

    def forward(self, dialogues, texts=None):
        """V of all states [N, 2], and Q [N, 2] of a text in each; by default of the action taken there."""
        forks = None
        if texts is not None:
            end = [self.tokenizer.eos_token_id]
            forks = [models.encode(self.tokenizer, text) + end for text in texts]
        packed = pack(dialogues, self.tokenizer, forks)
        hidden_BTH = models.masked_states(self.body, *packed.inputs, self.dtype)
        state_NH = hidden_BTH[packed.row_N, packed.state_N]
        end_NH = hidden_BTH[packed.row_N, packed.end_N]
        return self.v_heads(state_NH), self.q_heads(end_NH)


class Twins(nn.ModuleList):
    """Networks side by side: [N, inputs] -> [N, 2]."""

    def forward(self, x):
        return torch.cat([network(x) for network in self], -1)


def mlp(inputs, width, value):
    """Two hidden layers and one output, which starts near `value`."""
    last = nn.Linear(width, 1)
    nn.init.constant_(last.bias, value)  # D4
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        last,
    )


# ---------------------------------------------------------- 5. rollouts
def spoken(tokenizer, ids):
    """The part of an utterance that counts: its first line, stripped. The world may cut a very long one."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return text.split("\n", 1)[0].strip()


@torch.no_grad()
def write_utterances(actor, rows, starts, args, streams, greedy=False):
    """Samples N utterances, row by row: one after rows[b][:start] for each start in starts[b].

    Each row is read whole, once for all its states. Returns ids [N][...], with the end token unless cut
    before it, and log-probs [N].
    """
    ids_BC = pad(rows)  # padded on the right, where no state sees it
    start_BS = pad(starts, 1)  # padding of rows with fewer states: any start will do
    B, C = ids_BC.shape
    S = start_BS.shape[1]
    body = actor.base_model
    cache = transformers.DynamicCache()
    inputs = {"input_ids": ids_BC, "past_key_values": cache, "use_cache": True}
    hidden_BCH = models.hidden_states(body, args.dtype, **inputs)
    hidden_BSH = hidden_BCH[torch.arange(B)[:, None], start_BS - 1]

    visible_BSC = torch.arange(C) < start_BS[:, :, None]
    itself_BSS = torch.eye(S, dtype=torch.bool).expand(B, S, S)
    places = []  # where the N states are among the P places of the flattened [B, S]
    for b, row_starts in enumerate(starts):
        places += range(b * S, b * S + len(row_starts))
    utterances = {place: [] for place in places}
    total_logps = dict.fromkeys(places, 0.0)
    end = actor.tokenizer.eos_token_id
    L = args.max_action_tokens
    u_PL = torch.zeros(B * S, L)  # uniform random numbers
    u_PL[places] = models.uniform(streams, L)
    u_PL = u_PL.to(actor.device)
    for step in range(L):
        logits_BSV = models.logits_of(actor, hidden_BSH) / args.temperature
        token_P, logp_P = models.sample_tokens(logits_BSV.flatten(0, 1), u_PL[:, step], greedy)
        tokens = token_P.tolist()
        logps = logp_P.tolist()
        for place in places:
            utterances[place].append(tokens[place])
            total_logps[place] += logps[place]
        places = [place for place in places if tokens[place] != end]
        if not places:
            break
        # The tokens just written become S more columns of the cache, each visible to its own state only.
        visible_BSC = torch.cat([visible_BSC, itself_BSS], -1)
        token_BS = token_P.view(B, S)
        position_BS = start_BS + step
        hidden_BSH = models.masked_states(body, token_BS, position_BS, visible_BSC, args.dtype, cache)
    return list(utterances.values()), list(total_logps.values())


def rollout(actor, worlds, args, indices, greedy):
    """Plays all worlds to their end, in lockstep, each on its task and with its number as a seed.

    Returns the dialogues with at least one action. A dialogue is cut when it fills the model's context.
    """
    seeds = range(len(worlds))
    worlds.reset(seeds=seeds, indices=indices)
    streams = models.streams(seeds)
    # lay_out tokenises an action anew: n broken bytes, decoded as U+FFFD, become 3n tokens. Plus the end.
    room = 4 * args.max_action_tokens
    while alive := worlds.alive():
        dialogues = [worlds.dialogues[i] for i in alive]
        _, _, prompts = lay_out(dialogues, actor.tokenizer)
        rows = dict(zip(alive, prompts, strict=True))
        for i in alive:
            if len(rows[i]) > actor.context - room:
                worlds.cut(i)
                del rows[i]
        if not rows:
            break
        starts = [[len(row)] for row in rows.values()]
        own = [streams[i] for i in rows]
        utterances, _ = write_utterances(actor, list(rows.values()), starts, args, own, greedy)
        texts = [spoken(actor.tokenizer, ids) for ids in utterances]
        worlds.step(dict(zip(rows, texts, strict=True)))
    return [dialogue for dialogue in worlds.dialogues if dialogue["actions"]]


def fresh_utterances(actor, dialogues, args, rng):
    """Samples one utterance of the current actor in each of the N states of the dialogues, as token ids."""
    rows, spans, _ = lay_out(dialogues, actor.tokenizer)
    starts = [[] for _ in rows]
    for span in spans:
        starts[span.row].append(span.start)
    streams = models.streams(rng.integers(2**63, size=len(spans)))
    fresh, _ = write_utterances(actor, rows, starts, args, streams)
    return fresh


# ---------------------------------------------------------- 6. updates
def critic_targets(target_critic, dialogues, args):
    """The targets of Q and of V, [N, 2] each, and the expectile of V's loss."""
    target_v_N2, target_q_N2 = target_critic(dialogues)  # only ever of utterances in the data
    if args.critic_loss == "iql":
        next_N2 = target_v_N2  # E1
        expectile = args.expectile  # E6
    else:
        next_N2 = target_q_N2  # E8
        expectile = 0.5  # E2
    lengths = [len(dialogue["actions"]) for dialogue in dialogues]
    last_turns = np.cumsum(lengths) - 1
    next_N2 = next_N2.roll(-1, 0)
    next_N2[last_turns] = 0.0  # the value behind an end is 0; a truncation counts as an end
    reward_N = next_N2.new_tensor(flat(dialogues, "rewards"))
    return td_target(reward_N, next_N2, args.gamma), target_q_N2, expectile


# Losses are means over the N utterances of a batch; each micro-batch adds its share of loss and gradient.
def critic_update(critic, target_critic, optimizer, dialogues, args):
    """One step of Q and V towards `critic_targets`, and one Polyak step of the target."""
    returns = []
    for dialogue in dialogues:
        returns += mc_returns(dialogue["rewards"], args.gamma)
    return_N = torch.tensor(returns, device=critic.body.device)
    optimizer.zero_grad()
    losses = []
    values = []
    for part in models.micro_batches(dialogues, args.micro_batch):
        with torch.no_grad():
            q_target_N2, v_target_N2, expectile = critic_targets(target_critic, part, args)
        v_N2, q_N2 = critic(part)
        share = len(v_N2) / len(returns)
        q_loss = share * nn.functional.mse_loss(q_N2, q_target_N2)  # E1, E8
        v_loss = share * value_loss(v_N2, v_target_N2, expectile)  # E2, E6
        (q_loss + v_loss).backward()
        losses.append(torch.stack([q_loss, v_loss]).detach())
        values.append(v_N2.detach().mean(-1))
    norm = models.clipped_step(optimizer, critic, args.max_grad_norm, "critic")
    for slow, fast in zip(target_critic.parameters(), critic.parameters(), strict=True):
        slow.data.lerp_(fast.data, args.polyak)

    q_loss, v_loss = sum(losses).tolist()
    metrics = runs.value_errors(torch.cat(values), return_N)
    return metrics | {
        "critic/q_loss": q_loss,
        "critic/v_loss": v_loss,
        "critic/grad_norm": norm,
    }


def actor_losses(actor, critic, dialogues, args, rng):
    """The loss of E7 on the data's utterances, or of E3 on utterances that the actor samples now.

    Also returns the data's nll, the advantages [N], and the sum of the entropies along these utterances.
    """
    data_logp_M, data_owner_M, data_entropy = score_tokens(actor, dialogues, None, args)
    data_nll = -data_logp_M.sum() / len(flat(dialogues, "actions"))
    if args.actor_loss == "awr":
        with torch.no_grad():
            v_N2, q_N2 = critic(dialogues)  # of the data's actions
        advantage_N = advantages(q_N2, v_N2)
        weight_N = awr_weights(advantage_N, args.beta, args.max_weight)
        loss = reinforce_loss(data_logp_M, weight_N, data_owner_M)  # E7: E3 with weights in the place of A
        return loss + args.bc_weight * data_nll, data_nll, advantage_N, data_entropy

    fresh = fresh_utterances(actor, dialogues, args, rng)
    texts = [spoken(actor.tokenizer, ids) for ids in fresh]
    with torch.no_grad():
        v_N2, q_N2 = critic(dialogues, texts)
    advantage_N = advantages(q_N2, v_N2)
    logp_M, owner_M, entropy = score_tokens(actor, dialogues, fresh, args)
    loss = reinforce_loss(logp_M, advantage_N, owner_M)  # E3
    if args.bc_weight:  # else it is only logged
        loss = loss + args.bc_weight * data_nll
    return loss, data_nll, advantage_N, entropy


def score_tokens(actor, dialogues, utterances, args):
    """Log-probs [M] of the utterances' tokens, their owners [M], and the sum of the entropies."""
    logits_MV, token_M, _, owner_M = score(actor, dialogues, utterances, args.temperature, args.dtype)
    logp_M = -nn.functional.cross_entropy(logits_MV, token_M, reduction="none")
    entropy_M = torch.distributions.Categorical(logits=logits_MV.detach()).entropy()
    return logp_M, owner_M, entropy_M.sum().item()


def actor_update(actor, critic, optimizer, dialogues, args, rng):
    """One step on E7 or E3."""
    N = len(flat(dialogues, "actions"))
    optimizer.zero_grad()
    losses = []
    judged = []
    entropies = []
    for part in models.micro_batches(dialogues, args.micro_batch):
        loss, data_nll, advantage_N, entropy = actor_losses(actor, critic, part, args, rng)
        share = len(advantage_N) / N
        loss = share * loss
        loss.backward()
        losses.append(torch.stack([loss, share * data_nll]).detach())
        judged.append(advantage_N)
        entropies.append(entropy)
    norm = models.clipped_step(optimizer, actor, args.max_grad_norm, "actor")
    loss, data_nll = sum(losses).tolist()
    advantage_N = torch.cat(judged)
    metrics = {}
    if args.actor_loss == "awr":
        weight_N = awr_weights(advantage_N, args.beta, args.max_weight)
        is_clamped_N = weight_N >= args.max_weight
        metrics["actor/effective_share"] = effective_share(weight_N).item()
        metrics["actor/clamped"] = is_clamped_N.float().mean().item()
    return metrics | {
        "actor/loss": loss,
        "actor/data_nll": data_nll,
        "actor/entropy": sum(entropies) / N,
        "actor/advantage_mean": advantage_N.mean().item(),
        "actor/advantage_std": advantage_N.std(correction=0).item(),
        "actor/grad_norm": norm,
    }


# ---------------------------------------------------------- 7. evaluation
def play_tasks(actor, args, greedy):
    """Plays about `eval_episodes` dialogues, in whole passes over the tasks; if greedy, each task once.

    The seeds are always the same, so that evaluations are comparable.
    """
    options = envs.options(args.world)
    tasks = envs.tasks_to_evaluate(args.env, args.eval_episodes, greedy, **options)
    worlds = envs.VecTextEnv(args.env, len(tasks), **options)
    dialogues = rollout(actor, worlds, args, tasks, greedy)
    worlds.close()
    return dialogues


def evaluate(actor, critic, known, args):
    """Metrics of sampled and of greedy play, and the sampled dialogues with the critic's Q and V.

    `known` is the set of actions that occur in the data.
    """
    sampled = play_tasks(actor, args, greedy=False)
    greedy = play_tasks(actor, args, greedy=True)
    metrics = envs.summarise(sampled, "eval/{}")
    metrics |= envs.summarise(greedy, "eval/{}_greedy")
    is_unseen = [action not in known for action in flat(sampled, "actions")]
    metrics["eval/unseen"] = float(np.mean(is_unseen))
    judged = [with_values(dialogue, critic) for dialogue in sampled]
    returns = [mc_returns(dialogue["rewards"], args.gamma) for dialogue in judged]
    errors = np.subtract(flat(judged, "Q"), np.concatenate(returns))
    metrics["eval/overestimation"] = float(errors.mean())
    return metrics, judged


@torch.no_grad()
def with_values(dialogue, critic):
    """The dialogue with the critic's Q and V of each turn, for people to read."""
    v_N2, q_N2 = critic([dialogue])
    q_N = q_N2.min(-1).values
    v_N = v_N2.min(-1).values
    return dialogue | {"Q": q_N.tolist(), "V": v_N.tolist()}


# ---------------------------------------------------------- 8. training
def main(args: Args) -> dict[str, float]:
    """Alternates critic and actor updates on recorded dialogues; returns what it writes to summary.json."""
    run = runs.Run(args, "archer_offline_iql")
    rng = run.rng
    world = envs.make(args.env, **envs.options(args.world))

    # --- the initial models, and the data
    source = args.actor or models.checkpoint_of(world)
    actor = models.load_actor(source, args)
    body = models.load_critic(args.critic, actor, args)  # D2
    data = recorded_dialogues(world, actor, body, args)
    world.close()
    data_return = envs.summarise(data)["return"]
    known = set(flat(data, "actions"))
    if not 0 < args.keep <= 1:
        raise ValueError(f"--keep {args.keep}: it is a share, above 0 and at most 1")
    num_kept = max(1, round(args.keep * len(data)))
    imitated = data[:num_kept]

    # --- critic and optimisers, as they start
    returns = [mc_returns(dialogue["rewards"], args.gamma) for dialogue in data]
    value = float(np.concatenate(returns).mean())  # D4
    critic = Critic(body, value, args.dtype).to(args.device)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    actor_optimizer = torch.optim.AdamW(
        actor.parameters(), lr=args.actor_lr, betas=(0.9, 0.98), weight_decay=0.01
    )  # D6
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)

    # --- a new run, or a resumed one
    modules = {"actor": models.learned(actor), "actor_optimizer": actor_optimizer}
    modules |= {"critic": critic, "target_critic": target_critic, "critic_optimizer": critic_optimizer}
    run.start(modules)
    if not args.resume:
        runs.write_jsonl(run.folder / "dataset.jsonl", data)
        evaluation, _ = evaluate(actor, critic, known, args)
        run.log(evaluation, "return")

    for iteration in run.iterations(args.iterations):
        began = time.time()
        logs = []
        share = 1.0
        if args.anneal_lr:
            share = (args.iterations - iteration + 1) / args.iterations  # D5
        # 1. the critic
        critic_optimizer.param_groups[0]["lr"] = args.critic_lr * share
        for _ in range(args.critic_updates):
            batch = rng.choice(data, args.batch)
            logs.append(critic_update(critic, target_critic, critic_optimizer, batch, args))

        # 2. the actor, weighted by the critic just updated
        actor_optimizer.param_groups[0]["lr"] = args.actor_lr * share
        for _ in range(args.actor_updates):
            batch = rng.choice(imitated, args.batch)
            logs.append(actor_update(actor, critic, actor_optimizer, batch, args, rng))

        # 3. metrics, evaluation, checkpoint
        metrics = {"data/return": data_return}
        metrics |= runs.means(logs)
        metrics["time/updates_per_second"] = len(logs) / (time.time() - began)
        samples = []
        is_due = run.is_due(args.eval_every)
        if is_due:
            evaluation, judged = evaluate(actor, critic, known, args)
            metrics |= evaluation
            samples = [{"iteration": iteration} | dialogue for dialogue in judged[:8]]
        run.log(metrics, "eval/return|explained|nll|entropy", samples)
        if is_due or run.stopped:
            run.save(models.to_save("actor", actor))

    figures = {"episodes": len(data)}
    if learned := [row["eval/return"] for row in run.metrics[1:] if "eval/return" in row]:
        figures["best_return"] = max(learned)  # of all evaluations: an optimistic figure
    return run.finish(**figures)


if __name__ == "__main__":
    runs.cli(Args, main)
