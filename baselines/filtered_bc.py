"""Filtered behaviour cloning, online: the actor imitates the best of its own dialogues, and plays again.

    python -m baselines.filtered_bc --env twenty-questions-subset
    python -m baselines.filtered_bc --rollouts 32 --actor-lr 1e-6 --no-anneal-lr --actor FOLDER
    python -m baselines.filtered_bc --resume runs/...

There is no critic: a dialogue is judged by its return alone, and every utterance of a good one is imitated.

Paper: Zhou et al. 2024, arXiv:2402.19446, sec. 5.2
  E1  -mean over utterances of sum_i log pi(a_i|s,a_<i)          cloning_loss
  E2  the data of E1: the tenth of the buffer's dialogues that has the highest returns     best_of
Differs from the paper; the option in brackets undoes it:
  D1  Ties are broken in favour of the newest dialogues, so that exactly a tenth is kept. The authors' code
      keeps every dialogue that reaches the threshold return: where many tie, the filter passes them all.
  D2  Learning rate and batches suit a tiny model (second command); the paper's batch is of 256 utterances.
  D3  The learning rate decays linearly towards zero (--no-anneal-lr).
  D4  The filter takes dialogues from a buffer, as the paper says, of 1,000 dialogues (Table 3: 10,000
      utterances); the authors' code filters all that were ever played (--buffer-size 1000000).
"""

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
    rollouts: int = 128  # dialogues played per iteration (paper: 32; WebShop 128; D2)
    buffer_size: int = 1_000  # dialogues that the replay buffer holds (Table 3: 10,000; D4)
    temperature: float = 1.0  # of sampling, and of scored log-probs
    max_action_tokens: int = 16  # tokens after which an utterance is cut off

    # --- algorithm
    keep: float = 0.1  # share of the buffer's dialogues that is imitated, best first (paper: 0.1)
    actor_lr: float = 3e-4  # Adam's (Table 3 divided by 32: 1e-6 in Twenty Questions, else 1e-5; D2)
    anneal_lr: bool = True  # the learning rate decays linearly towards zero (D3)
    actor_updates: int = 10  # per iteration (paper: 10)
    actor_batch: int = 32  # dialogues per update (paper: a batch of 256; D2)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm

    # --- evaluation
    eval_every: int = 10  # iterations between evaluations, each with a checkpoint; Ctrl-C also writes one
    eval_episodes: int = 314  # sampled dialogues per evaluation, rounded to whole passes over the tasks


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
# A dialogue is a dict: n "actions", n "rewards" and n + 1 "observations". An observation is the state of the
# next action, in most worlds the whole text so far; the last one comes after the end.
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


def flat(dialogues, key):
    """The dialogues' values under `key`, one for each action, in one list [N]."""
    return [item for dialogue in dialogues for item in dialogue[key]]


def best_of(dialogues, share):
    """E2: the given share of the dialogues, at least one, with the highest returns; ties: the newest (D1)."""
    returns = [sum(dialogue["rewards"]) for dialogue in dialogues]
    worst_first = np.argsort(returns, kind="stable")  # D1: ties keep their order, the newest last
    count = max(1, round(share * len(dialogues)))
    return [dialogues[i] for i in worst_first[-count:]]  # E2


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: N actions, M tokens of all N utterances together, V vocabulary, H hidden size,
# B rows, T columns, C columns of the cache, L tokens of an utterance at most.
def cloning_loss(logp_M, num_actions):
    """E1: -log pi of an utterance, averaged over utterances.

    >>> cloning_loss(torch.tensor([-1.0, -3.0, -2.0]), 2).item()
    3.0
    """
    return -logp_M.sum() / num_actions  # E1


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
def actor_update(actor, optimizer, dialogues, args):
    """One step on E1."""
    logp_MV, logp_M = score_actions(actor, dialogues, args.temperature, args.dtype)
    num_actions = len(flat(dialogues, "actions"))
    loss = cloning_loss(logp_M, num_actions)  # E1
    optimizer.zero_grad()
    loss.backward()
    norm = models.clipped_step(optimizer, actor, args.max_grad_norm, "actor")
    entropy_M = -(logp_MV.exp() * logp_MV).sum(-1)
    return {
        "actor/loss": loss.item(),
        "actor/entropy": entropy_M.sum().item() / num_actions,
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


# ---------------------------------------------------------- 8. training
def main(args: Args) -> dict[str, float]:
    """Alternates rollouts and imitation; returns what it writes to summary.json."""
    if not 0 < args.keep <= 1:
        raise ValueError(f"--keep {args.keep}: it is a share, above 0 and at most 1")
    run = runs.Run(args, "filtered_bc")
    rng = run.rng
    worlds = envs.VecTextEnv(args.env, args.rollouts, **envs.options(args.world))
    source = args.actor or models.checkpoint_of(worlds.envs[0])
    actor = models.load(transformers.AutoModelForCausalLM, source, args)
    models.probe(actor)
    actor_optimizer = torch.optim.AdamW(actor.parameters(), lr=args.actor_lr, weight_decay=0.0)

    # --- a new run, or a resumed one
    run.start({"actor": actor, "actor_optimizer": actor_optimizer}, replay_buffer=[], episodes=0)
    if not args.resume:
        run.log(evaluate(actor, args), "return")
    replay_buffer = run.state["replay_buffer"]  # modified in place, so that checkpoints have it

    for iteration in run.iterations(args.iterations):
        logs = []
        # 1. dialogues of the current actor; the buffer keeps the newest
        played, nll = rollout(actor, worlds, args, rng)
        run.state["episodes"] += len(played)
        replay_buffer += played
        del replay_buffer[: -args.buffer_size]

        # 2. the actor, on the best of them
        best = best_of(replay_buffer, args.keep)
        lr = args.actor_lr
        if args.anneal_lr:
            lr *= 1 - (iteration - 1) / args.iterations  # D3
        actor_optimizer.param_groups[0]["lr"] = lr
        for _ in range(args.actor_updates):
            batch = rng.choice(best, args.actor_batch)
            logs.append(actor_update(actor, actor_optimizer, batch, args))

        # 3. metrics, evaluation, checkpoint
        metrics = envs.summarise(played, "rollout/{}")
        metrics["rollout/nll"] = float(np.mean(nll))
        returns = [sum(dialogue["rewards"]) for dialogue in best]
        metrics["filter/dialogues"] = len(best)
        metrics["filter/return"] = float(np.mean(returns))
        metrics["filter/worst"] = min(returns)
        metrics |= runs.means(logs)
        is_due = run.is_due(args.eval_every)
        if is_due:
            metrics |= evaluate(actor, args)
        samples = [{"iteration": iteration} | dialogue for dialogue in played[:4]]
        run.log(metrics, "return|repeated|actor/loss", samples)
        if is_due or run.stopped:
            run.save({"actor": actor})
    worlds.close()
    return run.finish()


if __name__ == "__main__":
    runs.cli(Args, main)
