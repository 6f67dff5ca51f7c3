"""CHAI: a frozen actor proposes utterances and a critic chooses among them, in one file.

    python -m baselines.chai --env twenty-questions-subset
    python -m baselines.chai --candidates 1         # the actor as it is, and a critic of its value
    python -m baselines.chai --resume runs/...

The critic learns from a replay buffer as ArCHer's does. The actor never changes. In each state the agent
samples k utterances from the actor and says the one with the highest Q; this policy is pi.

Paper: Zhou et al. 2024, arXiv:2402.19446, sec. 5.2, after Verma et al. 2022, arXiv:2204.08426
  E1  Q(s,a) <- r + gamma * Vbar(s')   (bar: slow copy)         Eq. 1      td_target
  E2  V(s)   <- E_{a~pi} Qbar(s,a)                              Eq. 2      critic_update
  E3  pi(s) = argmax Q(s,a) over a_1 ... a_k ~ actor            sec. 5.2   best_utterances
      with the smaller Q of the twins, as in the authors' code
E2's expectation is over pi, the best of k, and not over the actor: V is the value of the policy that plays.
Differs from the paper:
  D1  The actor is the checkpoint that all methods start from; Table 3 has a learning rate for the paper's.
  D2  The critic is a decoder and starts from the actor's weights.
  D3  E3 uses the critic; the authors' code uses its slow copy.
  D4  All heads, Q and V, start at the mean discounted return of the actor's first dialogues, not at zero.
  D5  Learning rate, batches, buffer and numbers of updates suit a tiny model; Table 3 has others.
  D6  The critic updates of an iteration share a pool of dialogues and one utterance of pi in each state.
There is no greedy play, as pi samples its candidates. It is evaluated as it plays, with fixed seeds.
"""

import copy
from dataclasses import dataclass, replace
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
    iterations: int = 20  # rounds of rollouts and critic updates; 0: only evaluate
    runs: str = "runs"  # folder in which the run's own folder is created
    name: str = ""  # label of the run, a part of its folder's name
    resume: str = ""  # folder of a run to continue; its saved arguments hold unless given again
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # CPU threads; with one, resuming is exact to the bit

    # --- model
    actor: str = ""  # causal LM: folder or Hugging Face name; "" takes the world's own in checkpoints/
    dtype: Literal["float32", "bfloat16"] = "float32"  # for computations; parameters stay float32

    # --- data
    rollouts: int = 128  # dialogues played per iteration (paper: 128; WebShop 512)
    buffer_size: int = 1_000  # dialogues that the replay buffer holds (Table 3: 10,000; D5)
    temperature: float = 1.0  # sampling temperature
    max_action_tokens: int = 16  # tokens after which an utterance is cut off

    # --- algorithm
    candidates: int = 5  # utterances sampled from the actor, among which the critic chooses (paper: 5)
    critic_lr: float = 3e-4  # Adam's (Table 3 divided by 32: 2e-5 for RoBERTa; D5)
    critic_updates: int = 40  # per iteration, each followed by a Polyak step of the target (paper: 50; D5)
    critic_batch: int = 32  # dialogues per update of the critic (paper: a batch of 256)
    critic_pool: int = 128  # dialogues that each iteration draws from the buffer for its critic updates (D6)
    gamma: float = 0.95  # discount per utterance (paper: 0.95; Detective 0.98, WebShop 0.9)
    polyak: float = 0.1  # target += polyak * (critic - target), after every update (paper: 1 - 0.9)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm

    # --- evaluation
    eval_every: int = 10  # iterations between evaluations, each with a checkpoint; Ctrl-C also writes one
    eval_episodes: int = 314  # sampled dialogues per evaluation, rounded to whole passes over the tasks


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
# A dialogue is a dict: n "actions", n "rewards" and n + 1 "observations". An observation is the state of the
# next action, in most worlds the whole text so far; the last one comes after the end. The N actions of a
# batch of dialogues are numbered consecutively. "best" has an utterance of pi for each of their N states.
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
# Suffixes name the axes: N states or actions, K candidates, M = N K, V vocabulary, H hidden size, 2 twin
# critics, B rows, T columns, C columns of the cache, S states of a row, P = B * S places,
# L tokens of an utterance at most.
def td_target(reward_N, next_v_N2, gamma):
    """E1: r + gamma * Vbar(s') [N, 2], for each of the twins; next_v must be 0 after a dialogue's last turn.

    >>> td_target(torch.tensor([-1.0, 0.0]), torch.tensor([[-2.0, -4.0], [0.0, 0.0]]), 0.5).tolist()
    [[-2.0, -3.0], [0.0, 0.0]]
    """
    return reward_N[:, None] + gamma * next_v_N2  # E1


def mc_returns(rewards, gamma):
    """Discounted return from every turn to the end of the dialogue.

    >>> mc_returns([-1.0, -1.0, 0.0], 0.5)
    [-1.5, -1.0, 0.0]
    """
    returns = [0.0]
    for reward in reversed(rewards):
        returns.append(reward + gamma * returns[-1])
    return returns[:0:-1]  # from the first turn to the last, without the 0 behind it


# ---------------------------------------------------------- 4. models
ROW, PADDING = -1, -2  # instead of a fork's number: of a row's own tokens; of padding, which no fork sees


def read_forks(body, rows, spans, utterances, dtype):
    """Hidden states [N, H] at the ends of N states, and at the ends of one utterance in each.

    The utterances are those of the spans if None, and else forks [N][token ids]: each is appended to its row,
    and sees itself and the row up to its state. A row with two actions a, and the forks b and c in its two
    states:

        token     s s a s a  b b  c c
        position  0 1 2 3 4  2 3  4 5
        fork      - - - - -  0 0  1 1
        start     0 0 0 0 0  2 2  4 4   a fork sees the row's tokens before this position
    """
    ids = [list(row) for row in rows]
    positions = [list(range(len(row))) for row in rows]
    forks = [[ROW] * len(row) for row in rows]
    starts = [[0] * len(row) for row in rows]
    ends = []
    for n, (b, start, stop) in enumerate(spans):
        end = stop - 1
        if utterances is not None:
            length = len(utterances[n])
            ids[b] += utterances[n]
            positions[b] += range(start, start + length)
            forks[b] += [n] * length
            starts[b] += [start] * length
            end = len(ids[b]) - 1
        ends.append(end)
    position_BT = pad(positions)
    visible_BTT = visibility(position_BT, pad(forks, PADDING), pad(starts))
    hidden_BTH = models.masked_states(body, pad(ids), position_BT, visible_BTT, dtype)
    row_N = [span.row for span in spans]
    state_N = [span.start - 1 for span in spans]
    return hidden_BTH[row_N, state_N], hidden_BTH[row_N, ends]


def visibility(position_BT, fork_BT, start_BT):
    """Attention mask [B, T, T]: each token sees its own fork up to itself, and the row before its state."""
    is_same_BTT = fork_BT[:, None] == fork_BT[:, :, None]
    is_row_B1T = fork_BT[:, None] == ROW
    is_before_BTT = position_BT[:, None] < start_BT[:, :, None]
    return is_same_BTT.tril() | (is_row_B1T & is_before_BTT)


class TwinCritic(nn.Module):
    """Twin Q and V heads on a decoder (sec. 3.6): V at a state's last token, Q at an utterance's end.

    Q has networks of its own, as in the paper; archer.py's D9 is not used.
    """

    def __init__(self, body, value, dtype):
        super().__init__()
        width = models.width_of(body)
        self.body = body
        self.dtype = dtype
        self.v_heads = Twins(mlp(width, width, value) for _ in range(2))
        self.q_heads = Twins(mlp(width, width, value) for _ in range(2))

    def forward(self, dialogues, texts=None):
        """V of all states [N, 2], and Q [N, 2] of a text in each; by default of the action taken there."""
        rows, spans, _ = lay_out(dialogues, self.body.tokenizer)
        return self.judge(rows, spans, texts)

    def judge(self, rows, spans, texts=None):
        """The same for the states that end where `spans` begin in `rows`."""
        forks = None
        if texts is not None:
            tokenizer = self.body.tokenizer
            end = [tokenizer.eos_token_id]
            forks = [models.encode(tokenizer, text) + end for text in texts]
        state_NH, end_NH = read_forks(self.body, rows, spans, forks, self.dtype)
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


@torch.no_grad()
def best_utterances(actor, critic, rows, spans, args, streams):
    """E3: the best of K sampled utterances, as text, in each state that ends where one of `spans` begins."""
    K = args.candidates
    starts = [[] for _ in rows]
    for span in spans:
        starts[span.row] += [span.start] * K
    streams_M = [stream for stream in streams for _ in range(K)]  # each serves its K candidates in turn
    utterances, _ = write_utterances(actor, rows, starts, args, streams_M)
    texts = [spoken(actor.tokenizer, ids) for ids in utterances]
    spans_M = [span for span in spans for _ in range(K)]
    _, q_M2 = critic.judge(rows, spans_M, texts)  # D3
    q_M = q_M2.min(-1).values
    q_NK = q_M.view(-1, K)
    choices = q_NK.argmax(-1).tolist()  # E3
    return [texts[n * K + choice] for n, choice in enumerate(choices)]


def rollout(actor, critic, worlds, args, rng=None, indices=None):
    """Plays all worlds to their end by E3, in lockstep; returns the dialogues with at least one action.

    `rng` draws the worlds' seeds; without it they are 0, 1, 2 ... A dialogue is cut when it fills the model's
    context.
    """
    seeds = range(len(worlds))
    if rng:
        seeds = rng.integers(2**31, size=len(worlds)).tolist()
    worlds.reset(seeds=seeds, indices=indices)
    streams = models.streams(seeds)
    # lay_out tokenises the action's text anew, which may take more tokens: a sampled byte that is no UTF-8
    # becomes U+FFFD, which is three bytes; and an end token comes on top.
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
        prompts = list(rows.values())
        spans = []
        for b, row in enumerate(prompts):
            start = len(row)
            span = Span(b, start, start)  # where the action will begin
            spans.append(span)
        own = [streams[i] for i in rows]
        texts = best_utterances(actor, critic, prompts, spans, args, own)
        worlds.step(dict(zip(rows, texts, strict=True)))
    return [dialogue for dialogue in worlds.dialogues if dialogue["actions"]]


# ---------------------------------------------------------- 6. updates
def with_best(dialogues, actor, critic, args, rng):
    """Adds to the dialogues an utterance of pi in each state, as text: the a ~ pi of E2 (D6)."""
    result = []
    for dialogue in dialogues:  # one by one: its states have a hundred candidates or so
        rows, spans, _ = lay_out([dialogue], actor.tokenizer)
        streams = models.streams(rng.integers(2**63, size=len(spans)))
        texts = best_utterances(actor, critic, rows, spans, args, streams)
        result.append(dialogue | {"best": texts})
    return result


def critic_update(critic, target_critic, optimizer, dialogues, args):
    """One step on E1 and E2, and one Polyak step of the target."""
    returns = []  # for the metrics alone
    for dialogue in dialogues:
        returns += mc_returns(dialogue["rewards"], args.gamma)
    return_N = torch.tensor(returns, device=critic.body.device)
    with torch.no_grad():
        slow_v_N2, best_q_N2 = target_critic(dialogues, flat(dialogues, "best"))  # E2: a ~ pi
    lengths = [len(dialogue["actions"]) for dialogue in dialogues]
    last_turns = np.cumsum(lengths) - 1
    next_v_N2 = slow_v_N2.roll(-1, 0)
    next_v_N2[last_turns] = 0.0  # the value behind an end is 0; a truncation counts as an end
    reward_N = return_N.new_tensor(flat(dialogues, "rewards"))
    v_N2, q_N2 = critic(dialogues)
    q_target_N2 = td_target(reward_N, next_v_N2, args.gamma)
    q_loss = nn.functional.mse_loss(q_N2, q_target_N2)  # E1
    v_loss = nn.functional.mse_loss(v_N2, best_q_N2)  # E2
    loss = q_loss + v_loss
    optimizer.zero_grad()
    loss.backward()
    norm = models.clipped_step(optimizer, critic, args.max_grad_norm, "critic")
    for slow, fast in zip(target_critic.parameters(), critic.parameters(), strict=True):
        slow.data.lerp_(fast.data, args.polyak)

    metrics = runs.value_errors(v_N2.detach().mean(-1), return_N)
    return metrics | {
        "critic/q_loss": q_loss.item(),
        "critic/v_loss": v_loss.item(),
        "critic/grad_norm": norm,
    }


# ---------------------------------------------------------- 7. evaluation
def evaluate(actor, critic, args):
    """Metrics of about `eval_episodes` dialogues played by E3, in whole passes over the tasks.

    The seeds are always the same, so that evaluations are comparable.
    """
    options = envs.options(args.world)
    tasks = envs.tasks_to_evaluate(args.env, args.eval_episodes, greedy=False, **options)
    worlds = envs.VecTextEnv(args.env, len(tasks), **options)
    dialogues = rollout(actor, critic, worlds, args, None, tasks)
    worlds.close()
    return envs.summarise(dialogues, "eval/{}")


# ---------------------------------------------------------- 8. training
def main(args: Args) -> dict[str, float]:
    """Alternates rollouts and critic updates; returns what it writes to summary.json."""
    run = runs.Run(args, "chai")
    rng = run.rng
    worlds = envs.VecTextEnv(args.env, args.rollouts, **envs.options(args.world))

    # --- models and optimiser, as they start; the actor stays as it is (D1)
    source = args.actor or models.checkpoint_of(worlds.envs[0])
    actor = models.load(transformers.AutoModelForCausalLM, source, args)
    models.probe(actor)
    body = copy.deepcopy(actor.base_model)  # D2
    body.tokenizer = actor.tokenizer
    blank = TwinCritic(body, 0.0, args.dtype).to(args.device)
    alone = replace(args, candidates=1)  # the actor as it is: no critic has learned yet
    first = rollout(actor, blank, worlds, alone, rng)  # a resumed run discards these
    returns = []
    for dialogue in first:
        from_turns = mc_returns(dialogue["rewards"], args.gamma)
        returns.append(from_turns[0])
    value = float(np.mean(returns))  # D4
    critic = TwinCritic(body, value, args.dtype).to(args.device)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)

    # --- a new run, or a resumed one
    modules = {"critic": critic, "target_critic": target_critic, "critic_optimizer": critic_optimizer}
    run.start(modules, replay_buffer=first, episodes=len(first))
    if not args.resume:
        run.log(evaluate(actor, critic, args), "return")
    replay_buffer = run.state["replay_buffer"]  # modified in place, so that checkpoints have it

    for iteration in run.iterations(args.iterations):
        logs = []
        # 1. dialogues of the frozen actor and the current critic
        played = rollout(actor, critic, worlds, args, rng)
        run.state["episodes"] += len(played)
        replay_buffer += played
        del replay_buffer[: -args.buffer_size]

        # 2. the critic
        pool = rng.choice(replay_buffer, args.critic_pool)  # with replacement
        pool = with_best(pool, actor, critic, args, rng)
        critic_optimizer.param_groups[0]["lr"] = args.critic_lr  # --resume may come with a new rate
        for _ in range(args.critic_updates):
            batch = rng.choice(pool, args.critic_batch)
            logs.append(critic_update(critic, target_critic, critic_optimizer, batch, args))

        # 3. metrics, evaluation, checkpoint
        metrics = envs.summarise(played, "rollout/{}")
        metrics |= runs.means(logs)
        is_due = run.is_due(args.eval_every)
        if is_due:
            metrics |= evaluate(actor, critic, args)
        samples = [{"iteration": iteration} | dialogue for dialogue in played[:4]]
        run.log(metrics, "return|repeated|explained", samples)
        if is_due or run.stopped:
            run.save({"actor": actor, "critic": critic.body})
    worlds.close()
    return run.finish()


if __name__ == "__main__":
    runs.cli(Args, main)
