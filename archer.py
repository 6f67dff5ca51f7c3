"""ArCHer: hierarchical multi-turn RL for language agents, in one file.

    python archer.py --env twenty-questions    # seven minutes on one core: return -15.6 to -12.1
    python archer.py --fresh --rollouts 64 --critic-updates 60 --actor-updates 4 --actor-lr 4e-4    # no D10
    python archer.py --actor FOLDER --critic roberta-base --actor-lr 1e-6 --critic-lr 2e-5  # a GPT-2
    python archer.py --resume runs/...

The critic works on utterances and learns off-policy: from a replay buffer it learns Q(s, a), the value of
utterance a in dialogue s. The actor works on tokens and learns on-policy, from the utterances that it has
just played. The critic's advantage for an utterance serves as the reward at its last token, and so as
the return of every token in it. Both start from a checkpoint, by default a tiny one.

Paper: Zhou et al. 2024, arXiv:2402.19446
  E1  Q(s,a) <- r + gamma * Vbar(s')   (bar: slow copy)    Eq. 1      td_target
  E2  V(s)   <- E_{a~pi} Qbar(s,a)                         Eq. 2      value_loss
  E3  grad log pi(a|s) * A                                 Eq. 3      policy_loss
      with A = min Q(s,a) - min V(s) over the twins        sec. 3.6   advantages
  E4  Vtok(s,a_<i) <- A(s,a): a baseline for each token    Eq. 4      baseline_loss
  E5  E3 with A(s,a) - Vtok(s,a_<i)                        Eq. 5      policy_loss
Differs from the paper (docs/archer.md gives the reasons at length); an option in brackets undoes it,
benchmarks/variants.py the others:
  D1  A KL penalty towards the initial actor (--kl 0): without it the actor drifts into gibberish.
  D2  The critic is a decoder and starts from the actor's weights (--critic roberta-base, as in sec. 3.6).
  D3  The batch mean is subtracted from the advantages (--no-center); with an exact critic it is 0 on average.
  D4  The V heads start at the mean discounted return of the first dialogues instead of zero.
  D5  Learning rates, batches, dialogues per iteration, buffer, warm-up and numbers of updates suit a tiny
      model. The rates in Table 3 are 32 times those that the authors give to Adam: their code sums the
      gradients of 32 small batches without dividing, which makes no difference to Adam.
  D6  The actor's learning rate decays linearly towards zero (--no-anneal-lr): late noise then undoes less.
  D7  The critic updates of an iteration share a pool of dialogues and one draw of a ~ pi (E2) in each state.
  D8  The baseline of E4 is a head on the actor's hidden states, updated as often as the actor; in the paper
      it is a separate network with 60 updates per iteration. E4 weighs utterances alike, long or short.
  D9  Q is V plus a learned advantage, so that the value of a state is learned once, not twice, by E1 and E2.
      It is a linear function of the utterance's hidden state and starts at zero; for an encoder it is an MLP.
  D10 The actor learns from the utterances of the newest dialogues, in several steps with PPO's clip, not
      from new utterances in replayed states (--fresh): Q has learned from most of the former, and from none
      of the latter.
"""

import copy
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

import envs
from envs import models, runs


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "twenty-questions"  # the world: an id from `python -m envs` or your own (docs/your_world.md)
    world: str = ""  # options of the world: NAME=VALUE, separated by commas (docs/worlds/)
    seed: int = 1  # seed of all random numbers in the run; 0 or more
    iterations: int = 16  # rounds of rollouts, critic updates and actor updates; 0: only evaluate
    runs: str = "runs"  # folder in which the run's own folder is created
    name: str = ""  # label of the run, a part of its folder's name
    resume: str = ""  # folder of a run to continue; its saved arguments hold unless given again
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # CPU threads; with one, resuming is exact to the bit

    # --- model
    actor: str = ""  # causal LM: folder or Hugging Face name; "" takes the world's own in checkpoints/
    critic: str = ""  # encoder or decoder, likewise; "" starts from the actor's weights (D2)
    dtype: Literal["float32", "bfloat16"] = "float32"  # for computations; trained parameters stay float32
    lora: bool = False  # train only low-rank adapters; needs the package peft and a --critic
    lora_rank: int = 16  # rank of the adapters; their alpha is twice that
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: slower, less memory

    # --- data
    rollouts: int = 32  # dialogues played per iteration (paper: 128; WebShop 512; D5)
    buffer_size: int = 128  # dialogues that the replay buffer holds (Table 3: 10,000; D5)
    temperature: float = 1.0  # of sampling, and of scored log-probs
    max_action_tokens: int = 16  # tokens after which an utterance is cut off

    # --- algorithm
    micro_batch: int = 16  # dialogues of an update that are in memory at a time; the same but for rounding
    critic_lr: float = 3e-4  # Adam's learning rate (authors: 2e-5 for RoBERTa; Table 3 has it times 32; D5)
    critic_updates: int = 40  # per iteration, each followed by a Polyak step of the target (paper: 50)
    critic_batch: int = 16  # dialogues per update of the critic (paper: 256; authors: utterances)
    critic_pool: int = 128  # dialogues that each iteration draws from the buffer for its critic updates
    warmup: int = 2  # iterations before the actor's first update (paper: 20 or 10); 0: none
    gamma: float = 0.95  # discount per utterance (paper: 0.95; Detective 0.98, WebShop 0.9)
    polyak: float = 0.1  # target += polyak * (critic - target), after every update (paper: 1 - 0.9)

    actor_lr: float = 3e-4  # Adam's (authors: 1e-6 in Twenty Questions, else 1e-5; Table 3: times 32; D5)
    anneal_lr: bool = True  # the actor's learning rate decays towards zero from its first update on (D6)
    actor_updates: int = 8  # per iteration (paper: 3); 0: none
    actor_batch: int = 16  # dialogues per update of the actor, at most all (paper: 256; authors: utterances)
    fresh: bool = False  # each actor update samples new utterances in replayed states, as in the paper (D10)
    clip: float = 0.2  # E3 stops moving a token's probability once it has changed by this share (D10)
    kl: float = 0.1  # penalty per nat of KL from the initial actor (D1), in units of the return; 0: none
    center: bool = True  # subtract the batch mean from the advantages (D3)
    baseline: bool = False  # subtract a learned baseline at every token (E4, E5)
    max_grad_norm: float = 1.0  # gradients of actor and critic are each clipped to this norm

    # --- evaluation
    eval_every: int = 8  # iterations between evaluations, each with a checkpoint; 0: only the last
    eval_episodes: int = 314  # sampled dialogues per evaluation, rounded to whole passes over the tasks


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
# A dialogue is a dict: n "actions", n "rewards" and n + 1 "observations". An observation is the state of the
# next action, in most worlds the whole text so far; the last one comes after the end. The N actions of a
# batch of dialogues are numbered consecutively, and so are the N states in which they were taken.
# `rollout` adds what the actor learns on: the actions' token ids as sampled, "ids" [n][...], and their
# log-probs, "logps" [n][...]. `with_fresh` replaces both by those of an utterance that the present actor
# writes in each of the n states, and adds its text, "fresh" [n]: the a ~ pi of E2, and with --fresh of E3.
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


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: N actions, M tokens of all N utterances together, V vocabulary, H hidden size,
# 2 twin critics, B rows, T columns, C columns of the cache, S states of a row, P = B * S places, L tokens of
# an utterance at most.
def td_target(reward_N, next_v_N2, gamma):
    """E1: r + gamma * Vbar(s') [N, 2], for each of the twins; next_v must be 0 after a dialogue's last turn.

    >>> td_target(torch.tensor([-1.0, 0.0]), torch.tensor([[-2.0, -4.0], [0.0, 0.0]]), 0.5).tolist()
    [[-2.0, -3.0], [0.0, 0.0]]
    """
    return reward_N[:, None] + gamma * next_v_N2  # E1


def value_loss(v_N2, q_N2):
    """E2: mean squared error of V(s) against Qbar(s,a), a ~ pi; each twin has its own target."""
    return ((q_N2 - v_N2) ** 2).mean()  # E2


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


def policy_loss(logp_M, old_logp_M, advantage_N, owner_M, subtracted_M, clip):
    """E3, E5: -mean over utterances of sum_i min(r_i A_i, clip(r_i) A_i), with A_i = A - subtracted_i.

    r_i is pi(a_i|s,a_<i) divided by what it was when a_i was sampled, and is clipped to 1 - clip to 1 + clip
    (D10). While it is 1, the gradient is that of E3, -sum_i A_i grad log pi(a_i|s,a_<i). Token m is in
    utterance owner_M[m]. Also returns the share of tokens whose gradient the clip has stopped.
    """
    weight_M = (advantage_N[owner_M] - subtracted_M).detach()
    ratio_M = (logp_M - old_logp_M).exp()
    free_M = ratio_M * weight_M  # E3
    bounded_M = ratio_M.clamp(1 - clip, 1 + clip) * weight_M  # D10
    gain_M = torch.minimum(free_M, bounded_M)
    is_clipped_M = gain_M < free_M
    return -gain_M.sum() / len(advantage_N), is_clipped_M.float().mean()


def baseline_loss(baseline_M, advantage_N, owner_M):
    """E4: mean over utterances of the mean over their tokens of (A(s,a) - Vtok(s,a_<i))^2."""
    length_N = torch.bincount(owner_M, minlength=len(advantage_N))
    square_M = (advantage_N[owner_M].detach() - baseline_M) ** 2
    return (square_M / length_N[owner_M]).sum() / len(advantage_N)  # E4


def kl_to_come(kl_M, owner_M):
    """D1: the KL still to come after each token, summed over the rest of its utterance [M].

    >>> kl_to_come(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 0, 1])).tolist()
    [6.0, 4.0, 0.0, 0.0]
    """
    sum_M = kl_M.cumsum(0)
    last_N = torch.bincount(owner_M).cumsum(0) - 1
    return sum_M[last_N][owner_M] - sum_M


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
    """Twin Q and V heads on one language model (sec. 3.6); Q is V plus a learned advantage (D9).

    A decoder (D2) reads a dialogue in one causal pass: V at each state's last token, Q at each utterance's
    end token. An encoder reads states and utterances separately; Q takes the [CLS] vectors of both.
    """

    def __init__(self, body, value, dtype):
        super().__init__()
        self.body = body
        self.tokenizer = body.tokenizer
        self.dtype = dtype
        self.is_encoder = models.is_encoder(body)
        width = models.width_of(body)
        self.v_heads = Twins(mlp(width, width, value) for _ in range(2))  # V is about `value` at first
        if self.is_encoder:
            self.a_heads = Twins(mlp(2 * width, width, 0.0) for _ in range(2))
        else:
            self.a_heads = nn.Linear(width, 2, bias=False)  # D9
            nn.init.zeros_(self.a_heads.weight)

    def forward(self, dialogues, texts=None):
        """V of all states [N, 2], and Q [N, 2] of a text in each; by default of the action taken there."""
        read = self.read_apart if self.is_encoder else self.read_together
        state_NH, said_NH = read(dialogues, texts)  # an encoder's said has 2H columns
        v_N2 = self.v_heads(state_NH)
        return v_N2, v_N2 + self.a_heads(said_NH)  # D9

    def read_together(self, dialogues, texts):
        """A decoder's hidden states [N, H] at the end of each state and of each utterance."""
        forks = None
        if texts is not None:
            end = [self.tokenizer.eos_token_id]
            forks = [models.encode(self.tokenizer, text) + end for text in texts]
        packed = pack(dialogues, self.tokenizer, forks)
        hidden_BTH = models.masked_states(self.body, *packed.inputs, self.dtype)
        state_NH = hidden_BTH[packed.row_N, packed.state_N]
        return state_NH, hidden_BTH[packed.row_N, packed.end_N]

    def read_apart(self, dialogues, texts):
        """An encoder's vectors of each state [N, H], and of state and utterance side by side [N, 2H]."""
        states = []
        for dialogue in dialogues:
            states += dialogue["observations"][: len(dialogue["actions"])]
        state_NH = models.cls_vectors(self.body, states, self.dtype)
        said_NH = models.cls_vectors(self.body, texts or flat(dialogues, "actions"), self.dtype)
        return state_NH, torch.cat([state_NH, said_NH], -1)


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


UNSEEN = 2**30  # position of a cached token that is hidden from all others


class Memory:
    """A decoder's key-value cache for rows {name: token ids}, kept while the rows grow."""

    def __init__(self, actor, names):
        self.actor = actor
        self.rows = {name: [] for name in names}  # the token ids that were read
        self.cache = transformers.DynamicCache()
        self.position_BC = torch.zeros(len(self.rows), 0, dtype=torch.long)  # of the token in each column

    def read(self, rows, dtype):
        """Reads what is new in each row; a row that is not given is dropped, and the others keep their order.

        Returns the last layer's hidden states of the new tokens [B, T, H] and their positions [B, T].
        """
        columns = self.position_BC.shape[1]
        self.cache.crop(columns - self.cache.get_seq_length())  # crop(-n) drops n columns: `generate`'s
        if len(rows) < len(self.rows):
            kept = [b for b, name in enumerate(self.rows) if name in rows]
            self.cache.batch_select_indices(torch.tensor(kept))
            self.position_BC = self.position_BC[kept]
        new = []
        positions = []
        for b, (name, row) in enumerate(rows.items()):
            known = len(self.rows[name])  # how many tokens of the row are in the cache
            goes_on = len(row) > known and row[:known] == self.rows[name]
            if not goes_on:  # it is new or rewritten: what was read of it is hidden
                known = 0
                self.position_BC[b] = UNSEEN
            new.append(row[known:])
            positions.append(range(known, len(row)))
        self.rows = rows
        if (self.position_BC == UNSEEN).all():  # nothing in the cache is needed
            self.cache = transformers.DynamicCache()
            self.position_BC = self.position_BC[:, :0]
        position_BT = pad(positions, UNSEEN)
        self.position_BC = torch.cat([self.position_BC, position_BT], -1)
        visible_BTC = self.position_BC[:, None] <= position_BT[:, :, None]
        position_BT = pad(positions)  # UNSEEN is beyond a model's position table
        body = self.actor.base_model
        hidden_BTH = models.masked_states(body, pad(new), position_BT, visible_BTC, dtype, self.cache)
        return hidden_BTH, position_BT


@torch.no_grad()
def generate(memory, rows, starts, args, streams, greedy=False):
    """Samples N utterances in lockstep: one after row[:start] for each of a row's `starts` [B][...].

    Each row is read once for all its states. A start must lie behind what `memory` has read of it before.
    Returns ids [N][...], with the end token unless cut before it, and the log-prob of each token [N][...].
    """
    actor = memory.actor
    hidden_BTH, position_BT = memory.read(rows, args.dtype)
    start_BS = pad(starts, 1)  # padding of rows with fewer states: any start will do
    B, S = start_BS.shape
    before_BS = start_BS - 1 - position_BT[:, :1]  # index of a state's last token among those just read
    hidden_BSH = hidden_BTH[torch.arange(B)[:, None], before_BS]
    visible_BSC = memory.position_BC[:, None] < start_BS[:, :, None]
    itself_BSS = torch.eye(S, dtype=torch.bool).expand(B, S, S)
    places = []  # where the N states are among the P places of the flattened [B, S]
    for b, row_starts in enumerate(starts):
        places += range(b * S, b * S + len(row_starts))
    utterances = {place: [] for place in places}
    logps = {place: [] for place in places}
    end = actor.tokenizer.eos_token_id
    L = args.max_action_tokens
    u_PL = torch.zeros(B * S, L)  # uniform random numbers
    u_PL[places] = models.uniform(streams, L)
    u_PL = u_PL.to(actor.device)
    for step in range(L):
        logits_BSV = models.logits_of(actor, hidden_BSH) / args.temperature
        token_P, logp_P = models.sample_tokens(logits_BSV.flatten(0, 1), u_PL[:, step], greedy)
        tokens = token_P.tolist()
        step_logps = logp_P.tolist()
        for place in places:
            utterances[place].append(tokens[place])
            logps[place].append(step_logps[place])
        places = [place for place in places if tokens[place] != end]
        if not places:
            break
        # The tokens just written become S more columns of the cache, each visible to its own state only.
        visible_BSC = torch.cat([visible_BSC, itself_BSS], -1)
        token_BS = token_P.view(B, S)
        position_BS = start_BS + step
        hidden_BSH = models.masked_states(
            actor.base_model, token_BS, position_BS, visible_BSC, args.dtype, memory.cache
        )
    return list(utterances.values()), list(logps.values())


def rollout(actor, worlds, args, rng=None, indices=None, greedy=False):
    """Plays all worlds to their end, in lockstep.

    Returns the dialogues with at least one action, and -log pi of each utterance. `rng` draws a seed of
    each world and its utterances; without it they are 0, 1, 2 ... A dialogue that fills the context is cut.
    """
    seeds = range(len(worlds))
    if rng:
        seeds = rng.integers(2**31, size=len(worlds)).tolist()
    worlds.reset(seeds=seeds, indices=indices)
    streams = models.streams(seeds)
    # lay_out tokenises the action's text anew, which may take more tokens: a sampled byte that is no UTF-8
    # becomes U+FFFD, which is three bytes; and an end token comes on top.
    room = 4 * args.max_action_tokens
    for dialogue in worlds.dialogues:
        dialogue |= {"ids": [], "logps": []}
    nll = []
    memory = Memory(actor, range(len(worlds)))
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
        streams_of_rows = [streams[i] for i in rows]
        utterances, logps = generate(memory, rows, starts, args, streams_of_rows, greedy)
        texts = [spoken(actor.tokenizer, ids) for ids in utterances]
        worlds.step(dict(zip(rows, texts, strict=True)))
        for i, ids, own_logps in zip(rows, utterances, logps, strict=True):
            dialogue = worlds.dialogues[i]
            dialogue["ids"].append(ids)
            dialogue["logps"].append(own_logps)
            nll.append(-sum(own_logps))
    return [dialogue for dialogue in worlds.dialogues if dialogue["actions"]], nll


def with_fresh(dialogues, actor, args, rng):
    """Copies of dialogues with an utterance that the actor samples in each state: "ids", "logps", "fresh"."""
    result = []
    for part in models.micro_batches(dialogues, args.micro_batch):
        rows, spans, _ = lay_out(part, actor.tokenizer)
        starts = [[] for _ in rows]
        for span in spans:
            starts[span.row].append(span.start)
        rows = dict(enumerate(rows))
        streams = models.streams(rng.integers(2**63, size=len(spans)))
        utterances, logps = generate(Memory(actor, rows), rows, starts, args, streams)
        for dialogue in part:
            n = len(dialogue["actions"])
            texts = [spoken(actor.tokenizer, ids) for ids in utterances[:n]]
            own = {"ids": utterances[:n], "logps": logps[:n], "fresh": texts}
            result.append(dialogue | own)
            utterances = utterances[n:]
            logps = logps[n:]
    return result


# ---------------------------------------------------------- 6. updates
def critic_targets(target_critic, dialogues, gamma):
    """The targets of Q and of V, [N, 2] each."""
    v_N2, q_N2 = target_critic(dialogues, flat(dialogues, "fresh"))  # E2: a ~ pi (D7)
    lengths = [len(dialogue["actions"]) for dialogue in dialogues]
    last_turns = np.cumsum(lengths) - 1
    next_v_N2 = v_N2.roll(-1, 0)
    next_v_N2[last_turns] = 0.0  # the value behind an end is 0; a truncation counts as an end
    reward_N = v_N2.new_tensor(flat(dialogues, "rewards"))
    return td_target(reward_N, next_v_N2, gamma), q_N2


# Losses are means over the N utterances of a batch; each micro-batch adds its share of loss and gradient.
def critic_update(critic, target_critic, optimizer, dialogues, args):
    """One step of Q and V towards `critic_targets`, and one Polyak step of the target; returns metrics."""
    returns = []  # for the metrics alone
    for dialogue in dialogues:
        returns += mc_returns(dialogue["rewards"], args.gamma)
    return_N = torch.tensor(returns, device=critic.body.device)
    optimizer.zero_grad()
    losses = []
    values = []
    for part in models.micro_batches(dialogues, args.micro_batch):
        with torch.no_grad():
            q_target_N2, v_target_N2 = critic_targets(target_critic, part, args.gamma)
        v_N2, q_N2 = critic(part)
        share = len(v_N2) / len(returns)
        q_loss = share * nn.functional.mse_loss(q_N2, q_target_N2)  # E1
        v_loss = share * value_loss(v_N2, v_target_N2)  # E2
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


def actor_losses(actor, ref_model, baseline, dialogues, advantage_N, args):
    """Of utterances: policy loss (E3 or E5), baseline loss (E4), KL (D1), entropy, share clipped."""
    ids = flat(dialogues, "ids")
    with torch.no_grad(), models.without_adapters(ref_model):
        ref_logits_MV, *_ = score(ref_model, dialogues, ids, args.temperature, args.dtype)
        ref_logp_MV = ref_logits_MV.log_softmax(-1)
    logits_MV, token_M, hidden_MH, owner_M = score(actor, dialogues, ids, args.temperature, args.dtype)
    logp_MV = logits_MV.log_softmax(-1)
    logp_M = logp_MV.gather(-1, token_M[:, None])[:, 0]
    p_MV = logp_MV.exp()
    kl_M = (p_MV * (logp_MV - ref_logp_MV)).sum(-1)  # D1: exact: over the vocabulary, given a_<i
    kl = kl_M.sum() / len(ids)
    subtracted_M = args.kl * kl_to_come(kl_M, owner_M)  # D1: the KL of later tokens depends on a_i
    baseline_M = baseline(hidden_MH.detach())[:, 0]  # D8
    vtok_loss = baseline_loss(baseline_M, advantage_N, owner_M)  # E4
    if args.baseline:
        subtracted_M = subtracted_M + baseline_M  # E5
    old_logp_M = logp_M.new_tensor(np.concatenate(flat(dialogues, "logps")))
    # E3, or E5 with --baseline
    actor_loss, clipped = policy_loss(logp_M, old_logp_M, advantage_N, owner_M, subtracted_M, args.clip)
    entropy = -(p_MV * logp_MV).sum() / len(ids)
    return actor_loss, vtok_loss, kl, entropy, clipped


def actor_update(
    actor,
    ref_model,
    critic,
    baseline,
    optimizer,
    dialogues,
    args,
    rng,
):
    """One step on E3, on what was said in the dialogues or, if --fresh, new ones (D10); returns metrics."""
    key = "fresh" if args.fresh else "actions"
    if args.fresh:
        dialogues = with_fresh(dialogues, actor, args, rng)
    parts = models.micro_batches(dialogues, args.micro_batch)
    with torch.no_grad():
        pairs = [critic(part, flat(part, key)) for part in parts]
    raw = [advantages(q_N2, v_N2) for v_N2, q_N2 in pairs]
    raw_N = torch.cat(raw)

    optimizer.zero_grad()
    losses = []
    for part, advantage_N in zip(parts, raw, strict=True):
        if args.center:
            advantage_N = advantage_N - raw_N.mean()  # D3
        losses_of_part = actor_losses(actor, ref_model, baseline, part, advantage_N, args)
        actor_loss, vtok_loss, kl, *_ = losses_of_part
        share = len(advantage_N) / len(raw_N)
        loss = share * (actor_loss + args.kl * kl + vtok_loss)
        loss.backward()
        losses.append(share * torch.stack(losses_of_part).detach())
    # Only the actor is clipped: a large gradient of the baseline must not shrink the actor's step.
    norm = models.clipped_step(optimizer, actor, args.max_grad_norm, "actor")
    actor_loss, vtok_loss, kl, entropy, clipped = sum(losses).tolist()
    return {
        "actor/loss": actor_loss,
        "actor/baseline_loss": vtok_loss,
        "actor/kl": kl,
        "actor/entropy": entropy,
        "actor/clipped": clipped,
        "actor/advantage_mean": raw_N.mean().item(),
        "actor/advantage_std": raw_N.std(correction=0).item(),
        "actor/grad_norm": norm,
    }


# ---------------------------------------------------------- 7. evaluation
def play_tasks(actor, args, greedy):
    """Plays about `eval_episodes` dialogues, in whole passes over the tasks; if greedy, each task once.

    Without `rng` the seeds are always the same, so that evaluations are comparable.
    """
    options = envs.options(args.world)
    tasks = envs.tasks_to_evaluate(args.env, args.eval_episodes, greedy, **options)
    worlds = envs.VecTextEnv(args.env, len(tasks), **options)
    dialogues, _ = rollout(actor, worlds, args, None, tasks, greedy)
    worlds.close()
    return dialogues


def evaluate(actor, args):
    """Metrics of sampled and of greedy play."""
    sampled = envs.summarise(play_tasks(actor, args, greedy=False), "eval/{}")
    greedy = envs.summarise(play_tasks(actor, args, greedy=True), "eval/{}_greedy")
    return sampled | greedy


@torch.no_grad()
def with_values(dialogue, critic):
    """The dialogue with the critic's Q and V of each turn, for people to read."""
    v_N2, q_N2 = critic([dialogue])
    q_N = q_N2.min(-1).values
    v_N = v_N2.min(-1).values
    return dialogue | {"Q": q_N.tolist(), "V": v_N.tolist()}


# ---------------------------------------------------------- 8. training
def main(args: Args) -> dict[str, float]:
    """Alternates rollouts, critic updates and actor updates; returns what it writes to summary.json."""
    run = runs.Run(args, "archer")
    rng = run.rng
    worlds = envs.VecTextEnv(args.env, args.rollouts, **envs.options(args.world))

    # --- models and optimisers, as they start
    source = args.actor or models.checkpoint_of(worlds.envs[0])
    actor = models.load_actor(source, args)
    ref_model = models.reference_of(actor)  # the initial actor, also in a resumed run
    body = models.load_critic(args.critic, actor, args)  # D2
    first, _ = rollout(actor, worlds, args, rng)  # a resumed run discards these
    returns = [mc_returns(dialogue["rewards"], args.gamma)[0] for dialogue in first]
    value = np.mean(returns)  # D4
    critic = Critic(body, value, args.dtype).to(args.device)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    width = models.width_of(actor)
    # Trained without --baseline, too: if actor/baseline_loss is below advantage_std squared, E5 would help.
    baseline = mlp(width, width, 0.0).to(args.device)
    trained = [*actor.parameters(), *baseline.parameters()]
    actor_optimizer = torch.optim.AdamW(trained, lr=args.actor_lr, weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)

    # --- a new run, or a resumed one
    modules = {"actor": models.learned(actor), "baseline": baseline, "actor_optimizer": actor_optimizer}
    modules |= {"critic": critic, "target_critic": target_critic, "critic_optimizer": critic_optimizer}
    run.start(modules, replay_buffer=first, episodes=len(first))
    if not args.resume:
        run.log(evaluate(actor, args), "return")
    replay_buffer = run.state["replay_buffer"]  # modified in place, so that checkpoints have it

    for iteration in run.iterations(args.iterations):
        logs = []
        # 1. dialogues of the current actor
        played, nll = rollout(actor, worlds, args, rng)
        metrics = envs.summarise(played, "rollout/{}")
        metrics["rollout/nll"] = np.mean(nll)
        run.state["episodes"] += len(played)
        replay_buffer += played
        del replay_buffer[: -args.buffer_size]

        # 2. the critic; the actor is fixed here, so its utterances for E2 are sampled once (D7)
        pool = rng.choice(replay_buffer, args.critic_pool)  # with replacement
        pool = with_fresh(pool, actor, args, rng)
        critic_optimizer.param_groups[0]["lr"] = args.critic_lr  # --resume may come with a new rate
        for _ in range(args.critic_updates):
            batch = rng.choice(pool, args.critic_batch)
            logs.append(critic_update(critic, target_critic, critic_optimizer, batch, args))

        # 3. the actor, on what it has just played, or on what it would say now in older states (D10)
        if iteration > args.warmup:
            lr = args.actor_lr
            if args.anneal_lr:
                lr *= (args.iterations - iteration + 1) / (args.iterations - args.warmup)  # D6
            actor_optimizer.param_groups[0]["lr"] = lr
            dialogues = replay_buffer if args.fresh else played
            size = min(args.actor_batch, len(dialogues))
            for _ in range(args.actor_updates):
                batch = rng.choice(dialogues, size, replace=False)
                log = actor_update(actor, ref_model, critic, baseline, actor_optimizer, batch, args, rng)
                logs.append(log)

        # 4. metrics, evaluation, checkpoint
        metrics |= runs.means(logs)
        is_due = run.is_due(args.eval_every)
        if is_due:
            metrics |= evaluate(actor, args)
        samples = [{"iteration": iteration} | with_values(dialogue, critic) for dialogue in played[:4]]
        run.log(metrics, "return|repeated|explained|kl", samples)
        if is_due or run.stopped:
            run.save(models.to_save("actor", actor) | {"critic": critic.body})
    worlds.close()
    return run.finish()


if __name__ == "__main__":
    runs.cli(Args, main)
