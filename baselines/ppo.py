"""PPO on tokens: the on-policy method that ArCHer is compared with, in one file.

    python -m baselines.ppo --env twenty-questions-subset
    python -m baselines.ppo --actor FOLDER --lr 6e-6 --value-lr 6e-6

Every token is an action, also the one that ends a turn. What the world pays stands at the last token of a
turn; what the world says is no action. A value network says what is to be expected before each token. What came
of it above that, smoothed over the tokens that follow, is the token's advantage. Dialogues are then dropped.

Paper: Schulman et al. 2017, arXiv:1707.06347; as a baseline Zhou et al. 2024, arXiv:2402.19446
  E1  A_t = sum_l (gamma lambda)^l delta_t+l,  delta_t = r_t + gamma V_t+1 - V_t    Eq. 11, 12   gae
  E2  min(w A, clip(w, 1 - eps, 1 + eps) A),  w = pi / pi_old                       Eq. 7        clipped_loss
  E3  (V - (A + V_old))^2                                                           Eq. 9        update
Differs from sec. 5.2 and Table 3 there; in brackets what undoes it:
  D1  Discounting is by the turn, as ArCHer's: gamma counts once, at the last token of a turn.
  D2  Rates, batches and epochs are tuned for a tiny model. Table 3 has 2,048 dialogues in an iteration, 10
      or 20 epochs, and a rate of 6e-6 for Twenty Questions.
  D3  The advantages of a minibatch are normalised (--no-normalise); the paper does not say.
"""

import copy
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

import envs
from envs import runs


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "twenty-questions"  # the world: an id of `python -m envs` or your own (docs/your_world.md)
    world: str = ""  # options of the world, as NAME=VALUE, separated by commas (docs/worlds.md)
    seed: int = 1  # of all random numbers of the run; 0 or more
    iterations: int = 60  # rounds of rollouts and updates; 0: only evaluates
    runs: str = "runs"  # folder in which the run's own folder is made
    name: str = ""  # of the run, for the name of its folder
    resume: str = ""  # folder of a run to continue; its saved arguments are used unless given anew
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # on the CPU; with one, resuming is exact to the bit

    # --- model
    actor: str = ""  # causal LM, folder or Hugging Face name; "" is the world's own in checkpoints/
    dtype: Literal["float32", "bfloat16"] = "float32"  # of computations; parameters stay float32

    # --- data
    rollouts: int = 128  # dialogues played in an iteration (paper: 2,048 or 1,024; D2)
    temperature: float = 1.0  # of sampling; log-probs are scored at the same one
    max_action_tokens: int = 16  # tokens after which an utterance is cut

    # --- algorithm
    lr: float = 3e-4  # of the actor (paper: 6e-6 or 6e-4; D2)
    value_lr: float = 3e-4  # of the value network
    anneal_lr: bool = True  # both fall to zero over the iterations
    epochs: int = 4  # passes over the dialogues of an iteration (paper: 10, 20 or 4)
    minibatch: int = 32  # dialogues in a step (paper: a batch of 1,024; D2)
    gamma: float = 0.95  # discount per turn (D1; paper: 0.95)
    gae_lambda: float = 0.95  # of E1, per token (paper: 0.95)
    clip: float = 0.2  # eps of E2 (paper: 0.2)
    normalise: bool = True  # advantages of a minibatch to mean 0 and deviation 1 (D3)
    kl: float = 0.0  # penalty per nat of KL from the initial actor, as archer.py's; 0: none
    max_grad_norm: float = 1.0  # gradients of actor and value network are each clipped to this norm

    # --- evaluation
    eval_every: int = 10  # iterations between evaluations, and between checkpoints; Ctrl-C writes one, too
    eval_episodes: int = 314  # sampled dialogues of an evaluation, in whole passes over the tasks


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
# A dialogue is a dict: n "actions" and n "rewards", n + 1 "observations", the states in which they are taken.
# Here it has its tokens, too: "ids", a list for each action; for each token "logps", "advantages", "returns".
@lru_cache(maxsize=100_000)  # worlds repeat themselves
def encode(tokenizer, text: str) -> list[int]:
    """Token ids of a piece of text. The list is shared: do not change it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Span(NamedTuple):
    """Where an action stands, its end token included: in columns start to stop - 1 of a row."""

    row: int
    start: int
    stop: int


def lay_out(dialogues, tokenizer):
    """Spells dialogues as rows of token ids; actions stand there as they were sampled.

    A row goes on as long as each observation only adds text. One that is written anew begins another row.
    Returns the rows, a Span for each of the N actions, and for each dialogue the row that ends where its next
    action would begin.
    """
    rows = []
    spans = []
    prompts = []
    head, to_prompt, to_reply = runs.chat_pieces(tokenizer)
    for dialogue in dialogues:
        so_far = ""
        for turn, observation in enumerate(dialogue["observations"]):
            goes_on = turn > 0 and observation != so_far and observation.startswith(so_far)
            if goes_on:
                reply = observation.removeprefix(so_far)
                row = rows[-1] + encode(tokenizer, to_prompt + reply + to_reply)
            else:
                row = encode(tokenizer, head + observation + to_reply)
            if turn == len(dialogue["actions"]):
                prompts.append(row)
                break
            start = len(row)
            row = row + dialogue["ids"][turn]
            if goes_on:
                rows[-1] = row
            else:
                rows.append(row)
            span = Span(len(rows) - 1, start, len(row))
            spans.append(span)
            so_far = observation + dialogue["actions"][turn]
    return rows, spans, prompts


def pad(rows, value=0):
    """Rows of numbers as one tensor [B, T], filled up on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def flat(dialogues, key):
    """What dialogues have under a key for each action, in one list [N]."""
    return [item for dialogue in dialogues for item in dialogue[key]]


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: N actions, M the tokens of N utterances put together, V the vocabulary, H hidden,
# B rows, T columns, C columns that can be seen, S states of a row.
def gae(rewards, discounts, values, gae_lambda):
    """E1 of each token of one dialogue, from its rewards, discounts and values; behind the last token V is 0.

    >>> gae([0.0, 1.0], [1.0, 0.5], [0.5, 0.25], 1.0)
    [0.5, 0.75]
    """
    advantages = []
    advantage = 0.0
    next_value = 0.0
    for reward, discount, value in zip(rewards[::-1], discounts[::-1], values[::-1], strict=True):
        delta = reward + discount * next_value - value
        advantage = delta + discount * gae_lambda * advantage  # E1
        advantages.append(advantage)
        next_value = value
    return advantages[::-1]


def clipped_loss(logp_M, old_logp_M, advantage_M, clip):
    """E2: minus the mean over tokens of the clipped surrogate, and the share of tokens that are clipped."""
    ratio_M = (logp_M - old_logp_M).exp()
    bounded_M = ratio_M.clamp(1 - clip, 1 + clip)
    gain_M = torch.minimum(ratio_M * advantage_M, bounded_M * advantage_M)  # E2
    is_clipped_M = gain_M < ratio_M * advantage_M
    return -gain_M.mean(), is_clipped_M.float().mean()


# ---------------------------------------------------------- 4. models
def hidden_states(body, dtype, **inputs):
    """The last hidden states of a model without head, computed in `dtype`, as float32."""
    is_mixed = dtype == "bfloat16"
    with torch.autocast(body.device.type, torch.bfloat16, enabled=is_mixed):
        return body(**inputs).last_hidden_state.float()


def read(body, ids_BT, position_BT, visible_BTC, dtype, cache=None):
    """Last hidden states [B, T, H] of a decoder in which a token sees the `visible` ones of C columns."""
    bias_BTC = torch.zeros(visible_BTC.shape)
    lowest = torch.finfo(torch.bfloat16).min  # finite in either dtype
    bias_BTC.masked_fill_(~visible_BTC, lowest)
    return hidden_states(
        body,
        dtype,
        input_ids=ids_BT.to(body.device),
        position_ids=position_BT.to(body.device),
        attention_mask=bias_BTC[:, None].to(body.device),
        past_key_values=cache,
        use_cache=cache is not None,
    )


def read_tokens(body, tokenizer, dialogues, dtype):
    """For all M tokens of the actions: hidden states before them [M, H], and their ids [M]."""
    rows, spans, _ = lay_out(dialogues, tokenizer)
    row_M = []
    column_M = []
    for row, start, stop in spans:
        row_M += [row] * (stop - start)
        column_M += range(start, stop)
    ids_BT = pad(rows).to(body.device)  # on the right, where no token sees it
    hidden_BTH = hidden_states(body, dtype, input_ids=ids_BT)
    before_M = torch.tensor(column_M) - 1
    return hidden_BTH[row_M, before_M], ids_BT[row_M, column_M]


def score(actor, dialogues, temperature, dtype):
    """For all M tokens: log-probs of the whole vocabulary [M, V], and of the token [M]."""
    hidden_MH, token_M = read_tokens(actor.base_model, actor.tokenizer, dialogues, dtype)
    logits_MV = actor.get_output_embeddings()(hidden_MH) / temperature
    logp_MV = logits_MV.log_softmax(-1)
    logp_M1 = logp_MV.gather(-1, token_M[:, None])
    return logp_MV, logp_M1[:, 0]


class ValueNetwork(nn.Module):
    """What is to be expected before each token of the actions: a decoder of its own with one head."""

    def __init__(self, body, dtype):
        super().__init__()
        width = body.config.hidden_size
        self.body = body
        self.dtype = dtype
        self.head = mlp(width, width, 0.0)

    def forward(self, dialogues):
        """V [M]."""
        hidden_MH, _ = read_tokens(self.body, self.body.tokenizer, dialogues, self.dtype)
        return self.head(hidden_MH)[:, 0]


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
    """The part of an utterance that critic and world receive: its first line, stripped."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return text.split("\n", 1)[0].strip()


def sample_tokens(logits_NV, generator, greedy):
    """A token of each row's softmax, or its likeliest, and the token's log-prob, both [N]."""
    logp_NV = logits_NV.log_softmax(-1)
    if greedy:
        token_N1 = logp_NV.argmax(-1, keepdim=True)
    else:  # the first token at which the cumulative probability exceeds a uniform number
        total_NV = logp_NV.exp().cumsum(-1)
        u_N1 = torch.rand(len(logp_NV), 1, generator=generator, device=generator.device)
        token_N1 = torch.searchsorted(total_NV, u_N1 * total_NV[:, -1:], right=True)
        token_N1 = token_N1.clamp(max=logp_NV.shape[-1] - 1)
    logp_N1 = logp_NV.gather(-1, token_N1)
    return token_N1[:, 0], logp_N1[:, 0]


@torch.no_grad()
def generate(actor, rows, starts, args, generator, greedy=False):
    """Writes an utterance in each state of some rows: behind rows[b][: starts[b][s]], N in all, row by row.

    A row is read once for all its states. Returns ids [N][...], the end token included, and log-probs [N].
    """
    ids_BC = pad(rows)  # on the right, where no state sees it
    start_BS = pad(starts, 1)  # any start will do where a row has fewer states
    B, C = ids_BC.shape
    S = start_BS.shape[1]
    cache = transformers.DynamicCache()
    inputs = {"input_ids": ids_BC.to(actor.device), "past_key_values": cache, "use_cache": True}
    hidden_BCH = hidden_states(actor.base_model, args.dtype, **inputs)
    hidden_BSH = hidden_BCH[torch.arange(B)[:, None], start_BS - 1]

    visible_BSC = torch.arange(C) < start_BS[:, :, None]
    itself_BSS = torch.eye(S, dtype=torch.bool).expand(B, S, S)
    places = []  # of the N states in [B, S], put in one line
    for b, own in enumerate(starts):
        places += range(b * S, b * S + len(own))
    utterances = {place: [] for place in places}
    total_logps = dict.fromkeys(places, 0.0)
    for step in range(args.max_action_tokens):
        logits_BSV = actor.get_output_embeddings()(hidden_BSH) / args.temperature
        token_N, logp_N = sample_tokens(logits_BSV.flatten(0, 1), generator, greedy)
        tokens = token_N.tolist()
        logps = logp_N.tolist()
        for place in places:
            utterances[place].append(tokens[place])
            total_logps[place] += logps[place]
        places = [place for place in places if tokens[place] != actor.tokenizer.eos_token_id]
        if not places:
            break
        # What was just written is read as S more columns of the cache, each seen by its own state alone.
        visible_BSC = torch.cat([visible_BSC, itself_BSS], -1)
        token_BS = token_N.view(B, S)
        hidden_BSH = read(actor.base_model, token_BS, start_BS + step, visible_BSC, args.dtype, cache)
    return list(utterances.values()), list(total_logps.values())


def rollout(actor, worlds, args, generator, rng=None, indices=None, greedy=False):
    """Plays all worlds to their end, in lockstep; returns dialogues with an action, with "ids" as sampled.

    `rng` draws the worlds' seeds; without it they are 0, 1, 2 ... A dialogue is cut at the model's context.
    """
    seeds = range(len(worlds))
    if rng:
        seeds = rng.integers(2**31, size=len(worlds)).tolist()
    worlds.reset(seeds=seeds, indices=indices)
    for dialogue in worlds.dialogues:
        dialogue["ids"] = []
    context = getattr(actor.config, "max_position_embeddings", sys.maxsize)
    room = 4 * args.max_action_tokens  # n tokens, encoded again from text, may be 3n (U+FFFD), and an end
    while alive := worlds.alive():
        dialogues = [worlds.dialogues[i] for i in alive]
        _, _, prompts = lay_out(dialogues, actor.tokenizer)
        rows = dict(zip(alive, prompts, strict=True))
        for i in alive:
            if len(rows[i]) > context - room:
                worlds.cut(i)
                del rows[i]
        if not rows:
            break
        starts = [[len(row)] for row in rows.values()]
        utterances, _ = generate(actor, list(rows.values()), starts, args, generator, greedy)
        texts = [spoken(actor.tokenizer, ids) for ids in utterances]
        worlds.step(dict(zip(rows, texts, strict=True)))
        for i, ids in zip(rows, utterances, strict=True):
            worlds.dialogues[i]["ids"].append(ids)
    return [dialogue for dialogue in worlds.dialogues if dialogue["actions"]]


# ---------------------------------------------------------- 6. updates
def descend(loss, optimizer, parameters, max_norm, what):
    """One step of an optimiser; the gradients of `parameters` are clipped. Returns their norm before that."""
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    if not torch.isfinite(loss + norm):
        raise ArithmeticError(f"the {what} diverged (loss {loss:.3g}, gradient {norm:.3g}): lower its rate")
    optimizer.step()
    return norm.item()


@torch.no_grad()
def judge(dialogue, actor, value_network, args):
    """The dialogue with the log-prob, the advantage and the target of V of each token."""
    _, logp_M = score(actor, [dialogue], args.temperature, args.dtype)
    value_M = value_network([dialogue])
    rewards = []
    discounts = []
    for reward, ids in zip(dialogue["rewards"], dialogue["ids"], strict=True):
        rewards += [0.0] * (len(ids) - 1) + [reward]
        discounts += [1.0] * (len(ids) - 1) + [args.gamma]  # D1
    advantages = gae(rewards, discounts, value_M.tolist(), args.gae_lambda)
    returns = torch.tensor(advantages) + value_M.cpu()
    return dialogue | {"logps": logp_M.tolist(), "advantages": advantages, "returns": returns.tolist()}


def update(actor, ref_model, value_network, optimizer, value_optimizer, dialogues, args):
    """One step on E2 and one on E3 with a minibatch of judged dialogues."""
    logp_MV, logp_M = score(actor, dialogues, args.temperature, args.dtype)
    old_logp_M = logp_M.new_tensor(flat(dialogues, "logps"))
    advantage_M = logp_M.new_tensor(flat(dialogues, "advantages"))
    if args.normalise:
        advantage_M = (advantage_M - advantage_M.mean()) / (advantage_M.std() + 1e-6)  # D3
    policy_loss, clipped = clipped_loss(logp_M, old_logp_M, advantage_M, args.clip)
    loss = policy_loss
    kl = logp_M.new_zeros(())
    if args.kl:
        with torch.no_grad():
            ref_logp_MV, _ = score(ref_model, dialogues, args.temperature, args.dtype)
        kl_M = (logp_MV.exp() * (logp_MV - ref_logp_MV)).sum(-1)
        kl = kl_M.mean()
        loss = loss + args.kl * kl
    norm = descend(loss, optimizer, actor.parameters(), args.max_grad_norm, "actor")

    value_M = value_network(dialogues)
    return_M = value_M.new_tensor(flat(dialogues, "returns"))
    value_loss = nn.functional.mse_loss(value_M, return_M)  # E3
    descend(value_loss, value_optimizer, value_network.parameters(), args.max_grad_norm, "value network")
    entropy_M = -(logp_MV.exp() * logp_MV).sum(-1)
    return {
        "update/loss": policy_loss.item(),
        "update/value_loss": value_loss.item(),
        "update/clipped": clipped.item(),
        "update/ratio": (logp_M - old_logp_M).exp().max().item(),
        "update/kl": kl.item(),
        "update/entropy": entropy_M.mean().item(),
        "update/grad_norm": norm,
    }


# ---------------------------------------------------------- 7. evaluation
def play_tasks(actor, args, greedy):
    """Dialogues of the world's tasks, at most `eval_episodes`: each once, or sampled in whole passes.

    The seeds are always the same, so that evaluations compare.
    """
    if args.eval_episodes < 1:
        raise ValueError(f"--eval-episodes {args.eval_episodes}: it must be at least 1")
    options = envs.options(args.world)
    num_tasks = envs.make(args.env, **options).num_tasks
    tasks = list(range(min(num_tasks, args.eval_episodes)))
    if not greedy:
        passes = round(args.eval_episodes / len(tasks))
        tasks = passes * tasks
    worlds = envs.VecTextEnv(args.env, len(tasks), **options)
    generator = torch.Generator(args.device).manual_seed(0)
    dialogues = rollout(actor, worlds, args, generator, None, tasks, greedy)
    worlds.close()
    return dialogues


def evaluate(actor, args):
    """Figures of sampled and of greedy play."""
    sampled = envs.summarise(play_tasks(actor, args, greedy=False), "eval/{}")
    greedy = envs.summarise(play_tasks(actor, args, greedy=True), "eval/{}_greedy")
    return sampled | greedy


# ---------------------------------------------------------- 8. training
def main(args: Args):
    """Iterations of rollouts and updates; returns what it writes to summary.json."""
    run = runs.Run(args, "ppo")
    rng = run.rng
    generator = run.generator
    options = envs.options(args.world)
    worlds = envs.VecTextEnv(args.env, args.rollouts, **options)

    # --- all that learns, as it starts
    source = args.actor or runs.checkpoint_of(worlds.envs[0])
    actor = runs.load(transformers.AutoModelForCausalLM, source, args)
    ref_model = copy.deepcopy(actor).requires_grad_(False)
    body = copy.deepcopy(actor.base_model)
    body.tokenizer = actor.tokenizer
    value_network = ValueNetwork(body, args.dtype).to(args.device)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=args.lr, weight_decay=0.0)
    value_optimizer = torch.optim.AdamW(value_network.parameters(), lr=args.value_lr, weight_decay=0.0)

    # --- a new run, or one that goes on
    modules = {"actor": actor, "optimizer": optimizer}
    modules |= {"value_network": value_network, "value_optimizer": value_optimizer}
    run.start(modules, episodes=0)
    if not args.resume:
        run.log(evaluate(actor, args), "return")

    for iteration in run.iterations(args.iterations):
        began = time.time()
        logs = []
        # 1. dialogues of the current actor, and what was good in them
        played = rollout(actor, worlds, args, generator, rng)
        run.state["episodes"] += len(played)
        judged = [judge(dialogue, actor, value_network, args) for dialogue in played]

        # 2. some epochs of steps with them
        share = 1.0
        if args.anneal_lr:
            share = 1 - (iteration - 1) / args.iterations
        optimizer.param_groups[0]["lr"] = args.lr * share
        value_optimizer.param_groups[0]["lr"] = args.value_lr * share
        for _ in range(args.epochs):
            order = rng.permutation(len(judged))
            for first in range(0, len(order), args.minibatch):
                batch = [judged[i] for i in order[first : first + args.minibatch]]
                log = update(actor, ref_model, value_network, optimizer, value_optimizer, batch, args)
                logs.append(log)

        # 3. metrics, evaluation, checkpoint
        metrics = envs.summarise(played, "rollout/{}")
        metrics["rollout/nll"] = -float(np.mean(flat(judged, "logps")))
        metrics |= runs.means(logs)
        is_due = run.is_due(args.eval_every)
        if is_due:
            metrics |= evaluate(actor, args)
        metrics["time/iteration_seconds"] = time.time() - began
        samples = [{"iteration": iteration} | dialogue for dialogue in judged[:4]]
        run.log(metrics, "return|value_loss|clipped|entropy", samples)
        if is_due or run.stopped:
            run.save({"actor": actor})
    return run.finish()


if __name__ == "__main__":
    runs.cli(Args, main)
