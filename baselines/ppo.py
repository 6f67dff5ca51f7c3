"""PPO on tokens: the on-policy baseline that ArCHer is compared with, in one file.

    python -m baselines.ppo --env twenty-questions-subset
    python -m baselines.ppo --rollouts 2048 --minibatch 1024 --epochs 20 --actor-lr 6e-6 --no-anneal-lr
    python -m baselines.ppo --resume runs/...

Every token that the actor writes is an action, including the one that ends a turn; the world's replies are
not. The reward of a turn comes at the turn's last token. The critic is a value network: before each token it
predicts the return, and a token's advantage (E1) is the amount by which the outcome exceeds the prediction.
After a few passes the dialogues are discarded.

Paper: Schulman et al. 2017, arXiv:1707.06347; as a baseline Zhou et al. 2024, arXiv:2402.19446, sec. 5.2
  E1  A_t = delta_t + gamma lambda A_t+1,  delta_t = r_t + gamma V_t+1 - V_t    Eq. 11, 12   gae
  E2  min(w A, clip(w, 1 - eps, 1 + eps) A),  w = pi / pi_old                   Eq. 7        clipped_loss
  E3  (V - R)^2,  R = A + V_old                                                 Eq. 9        update
Differs from the second paper, or from the code that it used (LMRL-Gym's); an option in brackets undoes it:
  D1  gamma applies once per turn, at its last token, as in archer.py; there it applies at every token.
  D2  Learning rates, batches and epochs are tuned for a tiny model; Table 3 has others (second command).
  D3  The value network is a separate model; there it is a head on the actor, trained with one loss, and a
      value may move by at most 0.2 from the old one.
  D4  It starts at the mean discounted return of the first dialogues instead of zero.
  D5  No KL penalty; there 0.001 (log pi - log pi_start) is subtracted from the reward of each token. --kl
      adds another one to the loss: the exact KL from the initial actor, averaged over tokens.
  D6  Both learning rates decay linearly towards zero (--no-anneal-lr).
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
    iterations: int = 60  # rounds of rollouts and updates; 0: only evaluate
    runs: str = "runs"  # folder in which the run's own folder is created
    name: str = ""  # label of the run, a part of its folder's name
    resume: str = ""  # folder of a run to continue; its saved arguments hold unless given again
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # CPU threads; with one, resuming is exact to the bit

    # --- model
    actor: str = ""  # causal LM: folder or Hugging Face name; "" takes the world's own in checkpoints/
    dtype: Literal["float32", "bfloat16"] = "float32"  # for computations; parameters stay float32

    # --- data
    rollouts: int = 128  # dialogues played per iteration (paper: 2,048; Guess My City 1,024; D2)
    temperature: float = 1.0  # of sampling, and of scored log-probs
    max_action_tokens: int = 16  # tokens after which an utterance is cut off

    # --- algorithm
    actor_lr: float = 3e-4  # Adam's learning rate (paper: 6e-6; Guess My City 6e-4; D2)
    critic_lr: float = 3e-4  # learning rate of the value network
    anneal_lr: bool = True  # both learning rates decay linearly towards zero (D6)
    epochs: int = 4  # passes over an iteration's dialogues (paper: 20; subset 10, Guess My City 4; D2)
    minibatch: int = 32  # dialogues per step (paper: 1,024; D2)
    gamma: float = 0.95  # discount per turn (D1; paper: 0.95)
    gae_lambda: float = 0.95  # lambda of E1, per token (paper: 0.95)
    clip: float = 0.2  # eps of E2 (paper: 0.2)
    normalise: bool = True  # standardise the advantages of each iteration, as LMRL-Gym does
    kl: float = 0.0  # penalty per nat of KL from the initial actor, in units of the advantages (D5); 0: none
    max_grad_norm: float = 1.0  # gradients of actor and critic are each clipped to this norm

    # --- evaluation
    eval_every: int = 10  # iterations between evaluations, each with a checkpoint; Ctrl-C also writes one
    eval_episodes: int = 314  # sampled dialogues per evaluation, rounded to whole passes over the tasks


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
# A dialogue is a dict: n "actions", n "rewards" and n + 1 "observations". An observation is the state of the
# next action, in most worlds the whole text so far; the last one comes after the end.
# There an action is a whole utterance; PPO's actions are its token ids, "ids" [n][...]. `judge` adds, for the
# m tokens of all n utterances, "judged" [3, m]: log-prob, advantage, and the return that the critic learns.
class Span(NamedTuple):
    """Where an action is: columns start to stop - 1 of a row, including its end token, if it has one."""

    row: int
    start: int
    stop: int


def lay_out(dialogues, tokenizer):
    """Tokenises dialogues into rows of ids, in which each action keeps the tokens that were sampled.

    So a row also has what `spoken` leaves out, and no end token behind an action that was cut off.
    A row continues while each observation only appends to the text; one that rewrites it starts a new row.
    Returns the rows, a Span for each of the N actions, and the prompts: for each dialogue, the row up to its
    next action.
    """
    rows = []
    spans = []
    prompts = []
    for dialogue in dialogues:
        so_far = ""
        for turn, observation in enumerate(dialogue["observations"]):
            # Not if they are equal: a world that writes its text anew may repeat it after an empty action.
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
            row = row + dialogue["ids"][turn]  # not +=: `encode_prompt` keeps its list
            if goes_on:
                rows[-1] = row
            else:
                rows.append(row)
            span = Span(len(rows) - 1, start, len(row))
            spans.append(span)
            so_far = observation + dialogue["actions"][turn]
    return rows, spans, prompts


def pad(rows, value=0):
    """Stacks rows of numbers into one tensor [B, T], padded on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: N actions, M tokens of all N utterances together, V vocabulary, H hidden size,
# B rows, T columns, C columns of the cache, L tokens of an utterance at most.
def gae(rewards, discounts, values, gae_lambda):
    """E1: advantages of the tokens of concatenated dialogues; the discount of a dialogue's last token is 0.

    >>> gae([0.0, 1.0, 2.0], [0.5, 0.0, 0.0], [0.5, 0.25, 0.0], 1.0)
    [0.0, 0.75, 2.0]
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


def mc_returns(rewards, gamma):
    """Discounted return from every turn to the end of the dialogue.

    >>> mc_returns([-1.0, -1.0, 0.0], 0.5)
    [-1.5, -1.0, 0.0]
    """
    returns = [0.0]
    for reward in reversed(rewards):
        returns.append(reward + gamma * returns[-1])
    return returns[:0:-1]  # from the first turn to the last, without the 0 behind it


def clipped_loss(logp_M, old_logp_M, advantage_M, clip):
    """E2: minus the mean of the clipped objective over tokens, and the share of tokens that are clipped."""
    ratio_M = (logp_M - old_logp_M).exp()
    free_M = ratio_M * advantage_M
    bounded_M = ratio_M.clamp(1 - clip, 1 + clip) * advantage_M
    gain_M = torch.minimum(free_M, bounded_M)  # E2
    is_clipped_M = gain_M < free_M
    return -gain_M.mean(), is_clipped_M.float().mean()


# ---------------------------------------------------------- 4. models
def read_tokens(body, tokenizer, dialogues, dtype):
    """For all M tokens of the actions: the hidden states that predict them [M, H], and their ids [M]."""
    rows, spans, _ = lay_out(dialogues, tokenizer)
    row_M = []
    column_M = []
    for row, start, stop in spans:
        row_M += [row] * (stop - start)
        column_M += range(start, stop)
    ids_BT = pad(rows).to(body.device)  # padded on the right, where no token sees it
    hidden_BTH = models.hidden_states(body, dtype, input_ids=ids_BT)
    before_M = torch.tensor(column_M) - 1
    return hidden_BTH[row_M, before_M], ids_BT[row_M, column_M]


def score_actions(actor, dialogues, temperature, dtype):
    """For all M tokens of the actions: log-probs of the whole vocabulary [M, V], and their own [M]."""
    hidden_MH, token_M = read_tokens(actor.base_model, actor.tokenizer, dialogues, dtype)
    logits_MV = models.logits_of(actor, hidden_MH) / temperature
    logp_MV = logits_MV.log_softmax(-1)
    logp_M1 = logp_MV.gather(-1, token_M[:, None])
    return logp_MV, logp_M1[:, 0]


class ValueNetwork(nn.Module):
    """The expected return before each token of the actions, by a separate decoder (D3) with one head."""

    def __init__(self, body, value, dtype):
        super().__init__()
        width = models.width_of(body)
        self.body = body
        self.dtype = dtype
        self.head = mlp(width, width, value)

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
def generate(memory, rows, args, streams, greedy=False):
    """Samples an utterance after each of B rows {name: token ids}, in lockstep.

    Returns ids [B][...], with the end token unless cut before it, and each utterance's log-prob [B].
    """
    actor = memory.actor
    hidden_BTH, position_BT = memory.read(rows, args.dtype)
    length_B = torch.tensor([len(row) for row in rows.values()])
    B = len(rows)
    last_B = length_B - 1 - position_BT[:, 0]  # index of a row's last token among those just read
    hidden_BH = hidden_BTH[range(B), last_B]
    visible_B1C = memory.position_BC[:, None] < length_B[:, None, None]
    utterances = [[] for _ in rows]
    total_logps = [0.0] * B
    writing = range(B)  # rows whose utterance has not ended
    end = actor.tokenizer.eos_token_id
    L = args.max_action_tokens
    u_BL = models.uniform(streams, L).to(actor.device)
    for step in range(L):
        logits_BV = models.logits_of(actor, hidden_BH) / args.temperature
        token_B, logp_B = models.sample_tokens(logits_BV, u_BL[:, step], greedy)
        tokens = token_B.tolist()
        logps = logp_B.tolist()
        for b in writing:
            utterances[b].append(tokens[b])
            total_logps[b] += logps[b]
        writing = [b for b in writing if tokens[b] != end]
        if not writing:
            break
        # The tokens just written become one more column of the cache.
        visible_B1C = nn.functional.pad(visible_B1C, (0, 1), value=True)
        position_B1 = length_B[:, None] + step
        hidden_B1H = models.masked_states(
            actor.base_model, token_B[:, None], position_B1, visible_B1C, args.dtype, memory.cache
        )
        hidden_BH = hidden_B1H[:, 0]
    return utterances, total_logps


def rollout(actor, worlds, args, rng=None, indices=None, greedy=False):
    """Plays all worlds to their end, in lockstep.

    Returns the dialogues with at least one action, and -log pi of each utterance. `rng` draws a seed of
    each world and its utterances; without it they are 0, 1, 2 ... A dialogue that fills the context is cut.
    Its "ids" are the tokens of its actions, as sampled.
    """
    seeds = range(len(worlds))
    if rng:
        seeds = rng.integers(2**31, size=len(worlds)).tolist()
    worlds.reset(seeds=seeds, indices=indices)
    streams = models.streams(seeds)
    for dialogue in worlds.dialogues:
        dialogue["ids"] = []
    nll = []
    memory = Memory(actor, range(len(worlds)))
    while alive := worlds.alive():
        dialogues = [worlds.dialogues[i] for i in alive]
        _, _, prompts = lay_out(dialogues, actor.tokenizer)
        rows = dict(zip(alive, prompts, strict=True))
        for i in alive:
            if len(rows[i]) > actor.context - args.max_action_tokens:
                worlds.cut(i)
                del rows[i]
        if not rows:
            break
        streams_of_rows = [streams[i] for i in rows]
        utterances, logps = generate(memory, rows, args, streams_of_rows, greedy)
        texts = [spoken(actor.tokenizer, ids) for ids in utterances]
        worlds.step(dict(zip(rows, texts, strict=True)))
        for i, ids in zip(rows, utterances, strict=True):
            worlds.dialogues[i]["ids"].append(ids)
        nll += [-logp for logp in logps]
    return [dialogue for dialogue in worlds.dialogues if dialogue["actions"]], nll


# ---------------------------------------------------------- 6. updates
@torch.no_grad()
def judge(dialogues, actor, critic, args):
    """E1 by the present actor and critic: copies of the dialogues with "judged", which `update` needs.

    Also returns metrics of the critic's error against the returns.
    """
    logps = []
    values = []
    for part in models.micro_batches(dialogues, args.minibatch):
        _, logp_M = score_actions(actor, part, args.temperature, args.dtype)
        logps += logp_M.tolist()
        values += critic(part).tolist()
    rewards = []  # of each token, like `discounts`, `logps` and `values`
    discounts = []
    ends = []  # of each dialogue: where its tokens end
    for dialogue in dialogues:
        for reward, ids in zip(dialogue["rewards"], dialogue["ids"], strict=True):
            within = len(ids) - 1  # tokens before the turn's last
            rewards += [0.0] * within + [reward]
            discounts += [1.0] * within + [args.gamma]  # D1
        discounts[-1] = 0.0  # the value behind an end is 0; a truncation counts as an end
        ends.append(len(rewards))

    advantages = np.array(gae(rewards, discounts, values, args.gae_lambda))
    returns = advantages + values
    errors = runs.value_errors(torch.tensor(values), torch.tensor(returns))
    if args.normalise:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    judged_3M = np.stack([logps, advantages, returns])
    parts = np.split(judged_3M, ends[:-1], axis=1)
    pairs = zip(dialogues, parts, strict=True)
    return [dialogue | {"judged": part} for dialogue, part in pairs], errors


def update(actor, ref_model, critic, actor_optimizer, critic_optimizer, dialogues, args):
    """One step of the actor on E2 and of the critic on E3, on some judged dialogues; returns metrics."""
    logp_MV, logp_M = score_actions(actor, dialogues, args.temperature, args.dtype)
    judged_3M = np.concatenate([dialogue["judged"] for dialogue in dialogues], axis=1)
    old_logp_M, advantage_M, return_M = logp_M.new_tensor(judged_3M)
    policy_loss, clipped = clipped_loss(logp_M, old_logp_M, advantage_M, args.clip)  # E2
    p_MV = logp_MV.exp()
    loss = policy_loss
    kl = logp_M.new_tensor(torch.nan)  # not computed
    if args.kl:
        with torch.no_grad():
            ref_logp_MV, _ = score_actions(ref_model, dialogues, args.temperature, args.dtype)
        kl_M = (p_MV * (logp_MV - ref_logp_MV)).sum(-1)  # D5
        kl = kl_M.mean()
        loss = loss + args.kl * kl
    actor_optimizer.zero_grad()
    loss.backward()
    norm = models.clipped_step(actor_optimizer, actor, args.max_grad_norm, "actor")

    value_M = critic(dialogues)
    v_loss = nn.functional.mse_loss(value_M, return_M)  # E3
    critic_optimizer.zero_grad()
    v_loss.backward()
    models.clipped_step(critic_optimizer, critic, args.max_grad_norm, "critic")
    entropy_M = -(p_MV * logp_MV).sum(-1)
    return {
        "actor/loss": policy_loss.item(),
        "actor/clipped": clipped.item(),
        "actor/ratio": (logp_M - old_logp_M).exp().max().item(),
        "actor/kl_per_token": kl.item(),
        "actor/entropy_per_token": entropy_M.mean().item(),
        "actor/grad_norm": norm,
        "critic/v_loss": v_loss.item(),
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


# ---------------------------------------------------------- 8. training
def main(args: Args) -> dict[str, float]:
    """Alternates rollouts and updates; returns what it writes to summary.json."""
    run = runs.Run(args, "ppo")
    rng = run.rng
    worlds = envs.VecTextEnv(args.env, args.rollouts, **envs.options(args.world))

    # --- models and optimisers, as they start
    source = args.actor or models.checkpoint_of(worlds.envs[0])
    actor = models.load(transformers.AutoModelForCausalLM, source, args)
    models.probe(actor)
    ref_model = copy.deepcopy(actor).requires_grad_(False)  # the initial actor, also in a resumed run
    body = copy.deepcopy(actor.base_model)  # D3
    body.tokenizer = actor.tokenizer
    played, nll = rollout(actor, worlds, args, rng)  # a resumed run discards these
    returns = [mc_returns(dialogue["rewards"], args.gamma)[0] for dialogue in played]
    value = float(np.mean(returns))  # D4
    critic = ValueNetwork(body, value, args.dtype).to(args.device)
    actor_optimizer = torch.optim.AdamW(actor.parameters(), lr=args.actor_lr, weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)

    # --- a new run, or a resumed one
    modules = {"actor": actor, "actor_optimizer": actor_optimizer}
    modules |= {"critic": critic, "critic_optimizer": critic_optimizer}
    run.start(modules, episodes=0)
    if not args.resume:
        run.log(evaluate(actor, args), "return")

    for iteration in run.iterations(args.iterations):
        logs = []
        # 1. dialogues of the current actor, and the advantage of each token
        if iteration > 1:  # the first ones have been played already
            played, nll = rollout(actor, worlds, args, rng)
        run.state["episodes"] += len(played)
        judged, errors = judge(played, actor, critic, args)

        # 2. some epochs over them
        share = 1.0
        if args.anneal_lr:
            share = 1 - (iteration - 1) / args.iterations  # D6
        actor_optimizer.param_groups[0]["lr"] = args.actor_lr * share
        critic_optimizer.param_groups[0]["lr"] = args.critic_lr * share
        for _ in range(args.epochs):
            order = rng.permutation(len(judged))
            for first in range(0, len(order), args.minibatch):
                batch = [judged[i] for i in order[first : first + args.minibatch]]
                log = update(actor, ref_model, critic, actor_optimizer, critic_optimizer, batch, args)
                logs.append(log)

        # 3. metrics, evaluation, checkpoint
        metrics = envs.summarise(played, "rollout/{}")
        metrics["rollout/nll"] = float(np.mean(nll))
        metrics |= errors | runs.means(logs)
        is_due = run.is_due(args.eval_every)
        if is_due:
            metrics |= evaluate(actor, args)
        samples = [{"iteration": iteration} | dialogue for dialogue in played[:4]]
        run.log(metrics, "return|repeated|explained|clipped", samples)
        if is_due or run.stopped:
            run.save({"actor": actor})
    worlds.close()
    return run.finish()


if __name__ == "__main__":
    runs.cli(Args, main)
