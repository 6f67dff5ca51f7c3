"""LOOP on several devices: PPO with a leave-one-out baseline for agents that act over many turns.

    torchrun --standalone --nproc_per_node 2 loop_ppo_multigpu.py --env apps
    torchrun --standalone --nproc_per_node 3 loop_ppo_multigpu.py --resume runs/...

Each process plays some rollouts and passes some through its model; all add up their gradients, and so take
the steps that loop_ppo.py takes, but for --finish-all, which counts in each process. docs/multigpu.md shows
what differs from it, and why.

K rollouts of each task start from the same state. The advantage of every token that the model wrote in a
rollout is the rollout's return minus the mean return of the others. There is no value network, and only E7
needs a reference model.

Paper: Chen et al. 2025, arXiv:2502.01600; release: the authors' code, github.com/apple/ml-loop
  E1  A_k = R_k - mean of the others = K/(K-1) (R_k - mean R)       Eq. 3      leave_one_out
  E2  min(w A, g(A)),  g(A) = A + eps |A|                           Eq. 4      surrogate
  E3  w = pi(x_t) / pi_old(x_t), one for each token                 Eq. 5, 10  log_ratios, --level token
  E4  w = product of E3 over a turn                                 sec. 4.2   log_ratios, --level turn
  E5  w = product of E3 over a rollout ("bandit")                   Eq. 4, 8   log_ratios, --level trajectory
  E6  A_k = (R_k - mean R) / std R                                  GRPO       normalised, --normalise
  E7  KL(pi || pi_ref) ~ exp(d) - d - 1,  d = log pi_ref/pi         GRPO       kl_penalty, --kl
The loss of a rollout is the mean of -E2 + kl E7 over its M tokens, as in Eq. 10. So at w = 1 the gradient
of a token's log pi weighs A / M with --level token, A L / M with turn (L tokens in its turn), and A with
trajectory, as in Eq. 2.
Rollouts with |A| < 0.01 (App. D) are left out before minibatches are formed, as in the release.
Differs from the paper; the option in brackets, if any, undoes it (docs/loop_ppo.md has the reasons):
  D1  A tiny Llama trained on flawed solutions (--model), all of whose weights learn (--lora), instead of
      LoRA adapters of a 32B model that can code.
  D2  It trains on all difficulties (--max-difficulty 2): a small model forgets what it does not train on.
  D3  The learning rate decays linearly towards zero (--no-anneal-lr): late steps then undo less.
  D4  The last model is tested; the paper tests the best checkpoint of a run by its dev score (App. E).
  D5  E6 divides R - mean R, as GRPO does; LOOP's paper divides E1. Our std R has K - 1 in its denominator.
  D6  120 iterations (--iterations 200, the release's): enough for the tiny model.
  D7  In AppWorld the paper's prompt has a worked example, the turn limit is a failure, and replies are cut
      at 3,000 tokens; here the prompt is short, the limit is graded, and 12,000 characters are shown.
  D8  RLOO takes the mean over a rollout's tokens, as LOOP does, and the paper's the sum (--level trajectory).
"""

import json
import os
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import nan
from statistics import fmean
from threading import Lock
from typing import Literal
from urllib import error, request

import torch
import transformers
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

import envs
from envs import models, runs


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "apps"  # id from `python -m envs` (appworld: D7) or yours (docs/your_world.md); append-only
    world: str = ""  # the world's options: NAME=VALUE,NAME=VALUE (docs/worlds), such as reward=success
    seed: int = 1  # seed of everything random in the run; 0 or more
    iterations: int = 120  # rounds of rollouts and updates (D6; release: 200); 0: only evaluate
    runs: str = "runs"  # folder in which the run's own folder is created
    name: str = ""  # label of the run, a part of its folder's name
    resume: str = ""  # folder of a run to continue; its saved arguments hold unless given again
    device: str = "cpu"  # or cuda: each process takes the GPU of its number
    threads: int = 1  # CPU threads; with one, resuming is exact to the bit
    world_threads: int = 2  # worlds that step in parallel while the model writes for the others
    save_every: int = 20  # iterations between checkpoints; Ctrl-C also writes one

    # --- model
    model: str = ""  # causal LM: folder or Hugging Face name; "" takes the world's in checkpoints/ (D1)
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters; bfloat16 learns with --lora only
    lora: bool = False  # train only low-rank adapters; needs the package peft
    lora_rank: int = 16  # rank of the adapters; their alpha is twice that (paper: rank 16, alpha 32)
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: slower, less memory
    engine: str = ""  # http://HOST:PORT of a `vllm serve` that writes the turns; it needs --lora

    # --- data
    max_difficulty: int = 3  # do not train on tasks above it (paper: 2; see D2)
    tasks: int = 16  # tasks per iteration (paper: 40)
    rollouts: int = 6  # K, rollouts per task (paper: 6)
    worlds: int = 150  # rollouts that a process plays at the same time; whole groups if it divides --tasks
    temperature: float = 1.0  # of sampling, and of scored log-probs (paper: 1)
    max_action_tokens: int = 48  # tokens after which a turn is cut off (paper: 1,500)
    context: int = 2048  # most tokens of a rollout; it ends when a full turn might not fit (paper: 32,000)
    finish_all: float = 0.9  # in training, stop a process's slowest when this share has ended (paper: 0.9)
    finish_each: int = 4  # but not before this many of each task have ended (paper: 4)

    # --- algorithm
    level: Literal["token", "turn", "trajectory"] = "token"  # unit of the importance ratio w: E3, E4, E5
    normalise: bool = False  # E6 instead of E1 (GRPO, and LOOP RwNorm)
    epochs: int = 2  # passes over the rollouts of an iteration (release: 2; RLOO and GRPO: 1)
    minibatch: int = 48  # rollouts per step (release: 32); 0 takes all (RLOO and GRPO)
    micro_batch: int = 16  # rollouts per forward pass, grouped by length
    logit_chunk: int = 4096  # tokens whose logits are computed at a time
    clip: float = 0.2  # eps of E2 (release: 0.1)
    lower_bound: Literal["minus", "over"] = "minus"  # lower bound of w: 1-eps (paper) or 1/(1+eps) (release)
    min_advantage: float = 0.01  # leave out rollouts with A nearer to 0 (paper: 0.01; 0: none)
    kl: float = 0.0  # weight of E7 (GRPO: 0.04); above 0 it keeps a second model, except with --lora
    lr: float = 2e-4  # learning rate (paper: 5e-5, for adapters of a 32B model)
    anneal_lr: bool = True  # the learning rate decays linearly towards zero (D3)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm (paper: 1; release: 0.1)

    # --- evaluation
    eval_every: int = 20  # iterations between evaluations
    eval_episodes: int = 0  # tasks per evaluation, from the first on; 0 takes the whole split


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
@dataclass(eq=False)  # compared by identity: two rollouts of a task may be equal in all fields
class Trajectory:
    """A rollout: the tokens that the model read and wrote, and what came of them in the world."""

    task: int  # index of the task in the split
    seed: int = 0  # seed of the world
    world: object = None  # its own world while it is played
    answer: str = ""  # the world's name for the task
    text: str = ""  # all that the world has shown: prompt, action, reply, action ...
    ids: list[int] = field(default_factory=list)  # prompt, turn, reply, turn ...; never tokenised again
    logps: list[float] = field(default_factory=list)  # log-probs of the sampled tokens, from the sampler
    turns: list[range] = field(default_factory=list)  # where in `ids` the sampled tokens of each turn are
    turn_records: list[dict] = field(default_factory=list)  # a turn's action, reply, reward, mean log-prob
    total: float = 0.0  # the return
    success: bool = False
    terminated: bool = False  # the world ended it, not the turn limit or the context
    cut: bool = False  # the context ended it
    fate: str = "playing"  # then "ended"; or "dropped" (a straggler) or "broken" (world): not trained on

    # --- while it is played
    turn_start: int = 0  # where in `ids` the current turn begins
    pending: Future | None = None  # the world's reply, while it is being computed
    u_T: object = ()  # uniform random numbers, one for each token that it may write

    # --- while it is trained on; log-probs are of the sampled tokens [M]
    advantage: float | None = None  # E1 or E6; the same for all its tokens
    old_logp_M: torch.Tensor | None = None  # by the model before the first step
    ref_logp_M: torch.Tensor | None = None  # by the initial model (E7)


def padded(rows: list[list[int]]) -> torch.Tensor:
    """Stacks rows of numbers into one tensor [B, T], padded on the right. A row may be empty."""
    T = max(map(len, rows))
    return torch.tensor([row + [0] * (T - len(row)) for row in rows])


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: B rows of a batch, R of them that a forward pass reads, T tokens of a row, Q of them
# that a pass reads; sampled tokens: M of a rollout, N of a batch, C of a chunk;
# K rollouts of a task, P tasks, V vocabulary, H hidden size, D size of an attention head.
def leave_one_out(return_K) -> torch.Tensor:
    """E1: each return minus the mean of the others [K]; sums to zero."""
    K = len(return_K)
    return (return_K - return_K.mean()) * K / (K - 1)  # E1


def normalised(return_K) -> torch.Tensor:
    """E6: returns minus their mean, divided by their standard deviation [K]; 0 if all are equal."""
    return (return_K - return_K.mean()) / (return_K.std() + 1e-6)  # E6, D5


def log_ratios(logp_M, old_logp_M, lengths: list[int], level: str):
    """log w of each sampled token [M]: of the token, its turn or the rollout; `lengths` are the turns'."""
    log_w_M = logp_M - old_logp_M  # E3
    if level == "turn":
        turns = log_w_M.split(lengths)
        sums = [turn.sum().expand_as(turn) for turn in turns]  # E4
        log_w_M = torch.cat(sums)
    if level == "trajectory":
        log_w_M = log_w_M.sum().expand_as(log_w_M)  # E5
    return log_w_M


def surrogate(w_M, advantage_M, clip, lower_bound="minus") -> torch.Tensor:
    """E2: min(w A, g(A)) [M]; `clip` is eps. g(A) is w A at the bound of w: (1+eps) A where A > 0, and where
    A < 0 (1-eps) A or, if `lower_bound` is "over", A / (1+eps).

    >>> surrogate(torch.tensor([2.0, 2.0, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.25).tolist()
    [1.25, -2.0, 0.5, -0.75]
    """
    highest = 1 + clip
    lowest = 1 - clip
    if lower_bound == "over":
        lowest = 1 / highest
    bound_M = torch.where(advantage_M > 0, highest * advantage_M, lowest * advantage_M)  # E2: g(A)
    return torch.minimum(w_M * advantage_M, bound_M)  # E2


def kl_penalty(logp_M, ref_logp_M) -> torch.Tensor:
    """E7: an estimate of KL(pi || pi_ref) at each sampled token [M], never negative."""
    d_M = ref_logp_M - logp_M
    return d_M.exp() - d_M - 1  # E7


# ---------------------------------------------------------- 4. models
def make_model(args: Args, source: str):
    """Loads the model, ready for training, with its tokenizer; LoRA adapts all linear layers but the head."""
    on_cpu = replace(args, device="cpu")  # the float32 weights may not fit on the device
    model = models.load(transformers.AutoModelForCausalLM, source, on_cpu)
    models.prepare(model, args)
    return model


class Memory:
    """Key-value cache of a batch of rollouts, and the hidden state of each one's last token [B, H].

    A token's column is its position in its rollout. So no padding is needed between turns, and what padding
    writes behind the end of a row is overwritten before any token can see it.
    """

    def __init__(self, model, batch):
        B = len(batch)
        self.model = model
        self.stored = {}  # layer -> its keys and values [2, B, columns, heads, D]
        self.length_B = torch.zeros(B, dtype=torch.long)  # tokens read so far
        self.hidden_BH = torch.zeros(B, 0)
        self.read(batch)

    def keep(self, rows: list[int]) -> None:
        """Keeps only these rows, in this order; a row may be given more than once."""
        self.length_B = self.length_B[rows]
        self.hidden_BH = self.hidden_BH[rows]
        for layer in self.stored:  # layer by layer: two whole caches may not fit
            self.stored[layer] = self.stored[layer][:, rows]

    def read(self, batch) -> None:
        """Reads the new tokens of every rollout, except those that wait for their world."""
        pieces = []
        lengths = self.length_B.tolist()
        for t, length in zip(batch, lengths, strict=True):
            piece = [] if t.pending else t.ids[length:]
            pieces.append(piece)
        if not any(pieces):
            return

        # the rows to run, their new tokens, and the columns of these
        size_B = torch.tensor([len(piece) for piece in pieces])
        Q = max(map(len, pieces))
        rows = size_B.nonzero()[:, 0]
        if Q == 1:  # all rows, even with nothing new: selecting the keys of some takes longer
            rows = slice(None)
        size_R = size_B[rows]
        ids_RQ = padded(pieces)[rows]
        column_RQ = self.length_B[rows, None] + torch.arange(Q)

        cache = Pass(self.stored, rows, column_RQ)
        visible = torch.arange(cache.width) <= column_RQ[:, None, :, None]  # [R, 1, Q, columns]
        mask = models.mask_of(self.model, visible)  # transformers takes one of four axes as it is
        output = self.model.base_model(
            input_ids=ids_RQ,
            position_ids=column_RQ.clamp(max=self.model.context - 1),  # padding may be beyond the last one
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        # The last new token of a row is number size - 1 of Q; a row with nothing new keeps its old state.
        row_R = torch.arange(len(size_R))
        last_RH = output.last_hidden_state[row_R, size_R - 1]
        if not self.hidden_BH.numel():  # the first pass, which has all rows
            self.hidden_BH = last_RH
        self.hidden_BH[size_B > 0] = last_RH[size_R > 0]
        self.length_B[rows] += size_R


class Pass(transformers.Cache):
    """The cache that one forward pass is given: some rows of a Memory's keys and values.

    Each layer of the model calls `update` once, with the keys and values of the new tokens.
    """

    def __init__(self, stored, rows, column_RQ):
        super().__init__(layers=[])
        self.stored = stored  # the Memory's own dict
        self.rows = rows  # indices or a slice
        self.column_RQ = column_RQ  # columns of the new tokens
        self.width = int(column_RQ.max()) + 1  # columns that may be seen

    def update(self, keys, values, layer, *args, **kwargs):
        """Stores new keys and values [R, heads, Q, D]; returns those of all columns [R, heads, width, D]."""
        new = torch.stack([keys, values]).transpose(2, 3)  # [2, R, Q, heads, D]
        empty = new[:, :, :0]  # for a memory's first pass, which has all rows: R = B
        store = self.stored.get(layer, empty)
        missing = self.width - store.shape[2]
        if missing > 0:
            more = missing + self.width // 4  # spare columns, so that it rarely grows
            behind = (0, 0, 0, 0, 0, more)  # before and after, for D, heads and columns
            store = nn.functional.pad(store, behind)
            self.stored[layer] = store
        row_R = torch.arange(store.shape[1])[self.rows]
        store[:, row_R[:, None], self.column_RQ] = new
        seen = store[:, self.rows, : self.width]
        return seen.transpose(2, 3).unbind()


def probe_cache(model) -> None:
    """Raises ValueError if the model's states in our cache differ from those of its own forward pass."""
    ids_BT = models.probe_ids(model)
    *ids, last = ids_BT[0].tolist()
    t = Trajectory(0, ids=ids)

    def last_state():
        memory = Memory(model, [t, t])
        memory.keep([0])
        t.ids.append(last)
        memory.read([t])
        return memory.hidden_BH

    models.compare(model, ids_BT, last_state, "what is written")


class Engine:
    """A server of vLLM with the model as it was, which is handed the adapters as often as they change."""

    def __init__(self, args):
        self.url = args.engine
        self.name = ""  # of the adapters that it has
        if self.url and not args.lora:
            raise ValueError("--engine: it is handed adapters, not whole models: give --lora, too")

    def post(self, path, **body):
        """Its answer; ValueError if it has none, or refuses."""
        header = {"Content-Type": "application/json"}
        question = request.Request(self.url + path, json.dumps(body).encode(), header)
        try:
            with request.urlopen(question) as answer:
                return answer.read()
        except OSError as problem:
            why = problem.read().decode() if isinstance(problem, error.HTTPError) else ""
            raise ValueError(f"--engine {self.url}{path}: {problem} {why}") from problem

    def take(self, model, run):
        """Hands it the adapters in a folder of the run, under a new name.

        By an old one it would go on from keys and values that old adapters made of a prompt.
        """
        name = f"turnrl-{time.time_ns()}"
        if self.url and runs.rank() == 0:
            folder = run.folder.resolve() / "engine"
            model.save_pretrained(folder)
            if self.name:
                self.post("/v1/unload_lora_adapter", lora_name=self.name)
            self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))
        self.name = gathered([name])[0]  # the first one's; nobody asks before it is there

    def write(self, t, end, args, greedy):
        """The tokens of a turn up to `end`, each with its log-prob."""
        answer = self.post(
            "/v1/completions",
            model=self.name,
            prompt=t.ids,
            max_tokens=args.max_action_tokens,
            temperature=args.temperature * (not greedy),
            seed=int(t.u_T[len(t.logps)] * 2**31),
            ignore_eos=True,  # its own, which need not be what ends a turn here
            stop_token_ids=[end],
            logprobs=0,
            return_token_ids=True,
        )
        choice = json.loads(answer)["choices"][0]
        return zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)


# ---------------------------------------------------------- 5. rollouts
def join_others(args):
    """Meets the other processes that torchrun has started; on GPUs each takes the one of its number."""
    if runs.processes() == 1:
        return
    backend = "gloo"
    if args.device.startswith("cuda"):
        backend = "nccl"
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        runs.check_device(args.device)
        torch.cuda.set_device(args.device)
    distributed.init_process_group(backend, timeout=timedelta(days=1))  # worlds may take long


def gathered(own):
    """The lists of all processes put together, in the order of their numbers; tensors on the CPU."""
    own = [item.cpu() if torch.is_tensor(item) else item for item in own]
    if runs.processes() == 1:
        return own
    lists = [None] * runs.processes()
    distributed.all_gather_object(lists, own)
    return [item for each in lists for item in each]


def make_worlds(args: Args, split: str) -> list:
    """Makes the worlds of a split; a world without splits has all its tasks in each."""
    options = envs.options(args.world)
    world = envs.make(args.env, **options)
    if not world.append_only:
        raise ValueError(f"--env {args.env}: its text is written anew every turn, and here it must only grow")
    if hasattr(world, "split"):
        options["split"] = split
    world.close()
    number = args.worlds
    if number > args.rollouts:
        number -= number % args.rollouts  # so that no group is played in two parts
    return [envs.make(args.env, **options) for _ in range(number)]


def listen(t: Trajectory, tokenizer, args) -> None:
    """Adds the world's reply, or its prompt, to the rollout, waiting for it if necessary.

    A rollout without room for another turn ends there, and one whose world breaks is "broken".
    """
    try:
        result = t.pending.result()
        if t.ids:
            take_reply(t, tokenizer, *result)
        else:  # no prompt yet: this is what `reset` has returned
            t.text, info = result
            t.ids += models.encode_prompt(tokenizer, t.text)
            t.answer = info["answer"]
        t.pending = None
        t.turn_start = len(t.ids)
        if t.fate == "playing" and t.turn_start + args.max_action_tokens > args.context:
            cut(t)
    except (envs.WorldBroken, envs.Unavailable) as error:
        t.fate = "broken"
        t.text += str(error)


def cut(t: Trajectory) -> None:
    """Ends a rollout; what the world pays or charges for the turns left is added to its last turn."""
    added, t.success = envs.play_out(t.world.step)
    t.total += added
    if t.turns:
        t.turn_records[-1]["reward"] += added
    t.cut = True
    t.fate = "ended"


def take_reply(t: Trajectory, tokenizer, text, reward, terminated, truncated, info) -> None:
    """Adds what a world's `step` returned to the rollout; `text` is t.text, the action and its reply."""
    turn = range(t.turn_start, len(t.ids))
    action = info["action"]  # as the world took it
    reply = text.removeprefix(t.text + action)
    logp = fmean(t.logps[-len(turn) :])
    record = {"action": action, "reply": reply, "reward": reward, "log-prob": logp}
    t.turns.append(turn)
    t.turn_records.append(record)
    t.text = text
    t.total += reward

    end = tokenizer.eos_token_id
    if t.ids[-1] != end:  # cut off: the end is added, not sampled
        t.ids.append(end)
    t.ids += models.encode_reply(tokenizer, reply)
    if terminated or truncated:
        t.fate = "ended"
        t.terminated = terminated
        t.success = info["result"]["success"]


def write(t: Trajectory, token, logp, tokenizer, max_tokens: int) -> str | None:
    """Adds a token to the turn. If that ends the turn (end token, or too long), returns the action."""
    t.ids.append(token)
    t.logps.append(logp)
    turn = t.ids[t.turn_start :]
    if token != tokenizer.eos_token_id and len(turn) < max_tokens:
        return None
    return tokenizer.decode(turn, skip_special_tokens=True)


def rollout(model, worlds, tasks, world_seeds, token_seeds, args, greedy=False, may_drop=False):
    """Plays tasks to their end, as many at a time as there are worlds; returns a Trajectory for each.

    There is a seed of its world and one of its tokens for each. With `may_drop` the slowest are stopped, as
    --finish-all and --finish-each say. Raises WorldBroken if no world starts.
    """
    u_BT = models.uniform(models.streams(token_seeds), args.context)  # a row for each rollout
    u_BT = u_BT.numpy()  # a list would be eight times as large
    n = len(worlds)
    played = []
    for i, (task, seed) in enumerate(zip(tasks, world_seeds, strict=True)):
        t = Trajectory(task, seed, worlds[i % n], u_T=u_BT[i])
        if i * runs.processes() // len(tasks) == runs.rank():  # neighbours, as their prompt is one
            played.append(t)
    play = play_by_engine if args.engine else play_together
    for i in range(0, len(played), n):
        play(model, played[i : i + n], args, greedy, may_drop)
    for t in played:  # the others have no use for these, and some cannot be sent
        t.world = t.pending = None
        t.u_T = ()
    played = gathered(played)
    if not any(t.ids for t in played):  # no prompt was read
        raise envs.WorldBroken(f"no world of {args.env} starts: {played[0].text}")
    return played


def start(played, pool, tokenizer, args) -> None:
    """Resets each rollout's world and takes its prompt."""
    for t in played:
        t.pending = pool.submit(t.world.reset, seed=t.seed, options={"index": t.task})
    for t in played:
        listen(t, tokenizer, args)


@torch.no_grad()
def play_together(model, played, args, greedy, may_drop) -> None:
    """Plays rollouts side by side, each in its own world; with `may_drop` only until enough have ended.

    Worlds step while other rows go on writing. Replies are read together, once a quarter of the rows wait for
    theirs: counting rows, not time, keeps the outcome independent of the threads' timing.
    """
    tokenizer = model.tokenizer
    with ThreadPoolExecutor(args.world_threads) as pool:
        start(played, pool, tokenizer, args)
        batch = [t for t in played if t.fate == "playing"]
        memory = read_prompts(model, batch)

        while batch:  # row b of the memory belongs to batch[b]
            # 1. one token for each row that is writing
            logits_BV = models.logits_of(model, memory.hidden_BH).float() / args.temperature
            u_B = torch.tensor([t.u_T[len(t.logps)] for t in batch])
            token_B, logp_B = models.sample_tokens(logits_BV, u_B, greedy)
            sampled = zip(batch, token_B.tolist(), logp_B.tolist(), strict=True)
            for t, token, logp in sampled:
                if t.pending:
                    continue
                action = write(t, token, logp, tokenizer, args.max_action_tokens)
                if action is not None:
                    t.pending = pool.submit(t.world.step, action)
            memory.read(batch)

            # 2. the replies; rollouts that have ended leave the batch
            waiting = [t for t in batch if t.pending]
            if 4 * len(waiting) < len(batch):
                continue
            for t in waiting:
                listen(t, tokenizer, args)
            if may_drop and has_enough(played, args.finish_all, args.finish_each):
                break
            rows = [b for b, t in enumerate(batch) if t.fate == "playing"]
            if len(rows) < len(batch):
                batch = [batch[b] for b in rows]
                memory.keep(rows)
            memory.read(batch)
    for t in played:
        if t.fate == "playing":
            t.fate = "dropped"


def play_by_engine(model, played, args, greedy, may_drop) -> None:
    """The same with turns that the engine writes: each rollout has a thread, which waits for it."""
    tokenizer = model.tokenizer
    lock = Lock()  # a tokenizer serves one thread at a time

    def play(t):
        while t.fate == "playing":
            if may_drop and has_enough(played, args.finish_all, args.finish_each):
                t.fate = "dropped"
                break
            written = model.engine.write(t, tokenizer.eos_token_id, args, greedy)
            with lock:
                for token, logp in written:
                    action = write(t, token, logp, tokenizer, args.max_action_tokens)
            t.pending = pool.submit(t.world.step, action)
            wait([t.pending])
            with lock:
                listen(t, tokenizer, args)

    with ThreadPoolExecutor(args.world_threads) as pool, ThreadPoolExecutor(len(played)) as players:
        start(played, pool, tokenizer, args)
        list(players.map(play, played))  # raises what went wrong in a thread


def read_prompts(model, batch) -> Memory:
    """A Memory with a row for each rollout. Each distinct prompt is read only once."""
    different = {t.text: t for t in batch}
    memory = Memory(model, list(different.values()))
    prompts = list(different)
    memory.keep([prompts.index(t.text) for t in batch])
    return memory


def has_enough(played, finish_all, finish_each) -> bool:
    """Whether enough rollouts have ended, of all and of each group, for the rest to be dropped."""
    whole = [t for t in played if t.fate != "broken"]  # nobody waits for broken ones
    number = Counter((t.task, t.seed) for t in whole)
    ended = Counter((t.task, t.seed) for t in whole if t.fate == "ended")
    of_each = all(ended[group] >= min(finish_each, number[group]) for group in number)
    return of_each and ended.total() >= finish_all * len(whole)


# ---------------------------------------------------------- 6. updates
def set_advantages(played, K, normalise: bool) -> list[Trajectory]:
    """Sets the advantages of the rollouts that ended, if at least two of their task did; returns these.

    The K rollouts of a task are consecutive in `played`.
    """
    judged = []
    for i in range(0, len(played), K):
        neighbours = played[i : i + K]
        group = [t for t in neighbours if t.fate == "ended" and t.turns]
        if len(group) < 2:
            continue
        returns = [t.total for t in group]
        return_K = torch.tensor(returns, dtype=torch.float64)  # float32: E6 of six times 0.6 is 0.06, not 0
        advantage_K = leave_one_out(return_K)
        if normalise:
            advantage_K = normalised(return_K)
        for k, t in enumerate(group):
            t.advantage = advantage_K[k].item()
        judged += group
    return judged


def states_before_sampled(model, batch):
    """The hidden states that predict the sampled tokens [N, H], and these tokens [N].

    Padding is on the right, where a causal model cannot see it.
    """
    rows = [t.ids[: t.turns[-1].stop] for t in batch]  # without the world's last reply, which no turn follows
    ids_BT = padded(rows)
    is_sampled_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for b, t in enumerate(batch):
        for turn in t.turns:
            is_sampled_BT[b, turn.start : turn.stop] = True
    output = model.base_model(input_ids=ids_BT, use_cache=False)
    is_before_BT = is_sampled_BT.roll(-1, dims=1)  # a token is predicted from the position before it
    return output.last_hidden_state[is_before_BT], ids_BT[is_sampled_BT]


def token_logps(head, hidden_CH, token_C, temperature) -> torch.Tensor:
    """Log-probs of tokens [C] at the sampling temperature."""
    logits_CV = head(hidden_CH).float() / temperature
    return -nn.functional.cross_entropy(logits_CV, token_C, reduction="none")


def score(model, trajectories, args):
    """Yields micro-batches of similar length: pairs of a rollout and its sampled tokens' log-probs [M].

    Those of this process alone; so all have about as many rollouts, and of about the same lengths.

    Logits are computed at sampled tokens only, a chunk at a time. With --gradient-checkpointing only those of
    one chunk exist at once, as the backward pass computes them again; else those of a micro-batch [N, V] do.
    """
    by_length = sorted(trajectories, key=lambda t: len(t.ids))[runs.rank() :: runs.processes()]
    head = partial(models.logits_of, model)
    chunk_logps = token_logps
    if args.gradient_checkpointing:
        chunk_logps = partial(checkpoint, token_logps, use_reentrant=False)
    for batch in models.micro_batches(by_length, args.micro_batch):
        hidden_NH, token_N = states_before_sampled(model, batch)
        hidden = hidden_NH.split(args.logit_chunk)
        tokens = token_N.split(args.logit_chunk)
        logps = []
        for hidden_CH, token_C in zip(hidden, tokens, strict=True):
            logp_C = chunk_logps(head, hidden_CH, token_C, args.temperature)
            logps.append(logp_C)
        sizes = [len(t.logps) for t in batch]
        logps_of_rollouts = torch.cat(logps).split(sizes)
        yield zip(batch, logps_of_rollouts, strict=True)


@torch.no_grad()
def read_old(model, trajectories, args) -> None:
    """Sets the old log-probs of rollouts: those of the model before the first step."""
    for pairs in score(model, trajectories, args):
        for t, logp_M in pairs:
            t.old_logp_M = logp_M


@torch.no_grad()
def read_ref(ref_model, trajectories, args) -> None:
    """Sets the log-probs of the initial model (E7); with LoRA that is the model without its adapters."""
    with models.without_adapters(ref_model):
        for pairs in score(ref_model, trajectories, args):
            for t, logp_M in pairs:
                t.ref_logp_M = logp_M


def exchange(trajectories, name):
    """Log-probs that one process has set under this name become known to all."""
    own = []
    for i, t in enumerate(trajectories):
        logp_M = getattr(t, name)
        if logp_M is not None:
            own.append((i, logp_M.tolist()))
    for i, logps in gathered(own):
        setattr(trajectories[i], name, torch.tensor(logps))


def sum_gradients(optimizer):
    """Adds to the gradients of what is trained those of the other processes."""
    parameters = optimizer.param_groups[0]["params"]
    own = [i for i, p in enumerate(parameters) if p.grad is not None]
    for i in sorted(set(gathered(own))):  # not where nobody has one; a process without rollouts has none
        p = parameters[i]
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if runs.processes() > 1:
            distributed.all_reduce(p.grad)


def rollout_loss(t: Trajectory, logp_M, args):
    """The loss of a rollout: the mean over its tokens of -E2, plus E7 if --kl is set; and metrics, a dict."""
    advantage = torch.tensor(t.advantage)
    lengths = [len(turn) for turn in t.turns]
    log_w_M = log_ratios(logp_M, t.old_logp_M, lengths, args.level)
    w_M = log_w_M.clamp(max=80).exp()  # above 88 exp is inf, and where E2 clips the gradient 0 * inf = nan
    gain_M = surrogate(w_M, advantage, args.clip, args.lower_bound)
    is_clipped_M = gain_M < w_M * advantage
    gap_M = t.old_logp_M - torch.tensor(t.logps)
    gap = models.gap_of(gap_M, args.dtype)
    models.check_gap(gap, args.dtype)
    figures = {
        "update/ratio": w_M.max().item(),
        "update/spread": log_w_M.square().mean().item(),  # `update` takes the root
        "update/clipped": is_clipped_M.float().mean().item(),
        "update/log_ratio": (logp_M - t.old_logp_M).sum().item(),
        "update/sampler_gap": gap,
    }
    if args.kl:
        penalty_M = kl_penalty(logp_M, t.ref_logp_M)
        figures["update/kl"] = penalty_M.mean().item()
        gain_M = gain_M - args.kl * penalty_M
    return -gain_M.mean(), figures  # D8


def step(model, optimizer, minibatch, size, args):
    """One optimiser step on a minibatch; `size` is that of a full minibatch.

    Returns a dict of metrics for each rollout, and the norm of the gradient.
    """
    optimizer.zero_grad()
    figures = []
    for pairs in score(model, minibatch, args):
        loss = torch.zeros(())
        for t, logp_M in pairs:
            if t.old_logp_M is None:  # first step: nothing has changed yet
                t.old_logp_M = logp_M.detach()
            loss_of_t, figures_of_t = rollout_loss(t, logp_M, args)
            loss = loss + loss_of_t / size
            figures.append(figures_of_t)
        loss.backward()
    sum_gradients(optimizer)
    norm = models.clipped_step(optimizer, model, args.max_grad_norm, "model")
    return gathered(figures), norm


def update(model, optimizer, judged, args, rng, ref_model=None) -> dict:
    """Epochs of steps on those of an iteration's rollouts that have an advantage; returns metrics."""
    kept = [t for t in judged if abs(t.advantage) >= args.min_advantage]
    if not kept:
        return {"update/filtered": 1.0}
    size = args.minibatch or len(kept)
    minibatches = []
    for _ in range(args.epochs):
        order = rng.permutation(len(kept))  # a minibatch may split a task's group
        shuffled = [kept[i] for i in order]
        for i in range(0, len(kept), size):
            minibatches.append(shuffled[i : i + size])

    # Old log-probs come from `score`, not from the sampler (App. D). The first minibatch needs none here: the
    # model has not changed before its step, which takes the log-probs that it computes itself.
    later = [t for t in kept if t not in minibatches[0]]
    read_old(model, later, args)
    if args.kl:
        read_ref(ref_model, kept, args)
        exchange(kept, "ref_logp_M")

    of_rollouts = []
    norms = []
    for minibatch in minibatches:  # a smaller last one of an epoch weighs less
        figures, norm = step(model, optimizer, minibatch, size, args)
        if minibatch is minibatches[0]:  # now each has been read, by one process or another
            exchange(kept, "old_logp_M")
        of_rollouts += figures
        norms.append(norm)
    metrics = runs.means(of_rollouts)
    metrics["update/grad_norm"] = fmean(norms)
    for tag in ("update/ratio", "update/sampler_gap"):
        metrics[tag] = max(figures[tag] for figures in of_rollouts)
    metrics["update/spread"] **= 0.5
    metrics["update/filtered"] = 1 - len(kept) / len(judged)
    return metrics


# ---------------------------------------------------------- 7. evaluation
def named(tag: str, figures: dict[str, float]) -> dict[str, float]:
    """Metrics renamed by `tag`: with "habit/{}", no_op becomes habit/no_op."""
    return {tag.format(name): figure for name, figure in figures.items()}


def evaluate(model, args: Args, split: str, tag: str) -> dict[str, float]:
    """Metrics over the tasks of a split, with sampled and with greedy turns."""
    worlds = make_worlds(args, split)
    sampled = play_all(model, worlds, args, greedy=False)
    greedy = play_all(model, worlds, args, greedy=True)
    for world in worlds:
        world.close()
    return named(tag, sampled) | named(f"{tag}_greedy", greedy)


def play_all(model, worlds, args, greedy: bool) -> dict:
    """Metrics over all tasks, played with the same seeds every time, so that evaluations are comparable."""
    tasks = list(range(worlds[0].num_tasks))[: args.eval_episodes or None]
    played = rollout(model, worlds, tasks, tasks, tasks, args, greedy)  # a task's index is also its seed
    solved = {t.task: t.success for t in played}
    metrics = {"return": fmean(t.total for t in played), "success": fmean(solved.values())}
    metrics["cut"] = fmean(t.cut for t in played)
    if hasattr(worlds[0], "goals"):
        metrics |= worlds[0].goals(solved)
    return metrics


def average(values) -> float:
    """The mean; nan if there are no values."""
    return fmean(values or [nan])


def behaviour(played, world) -> dict:
    """Metrics of an iteration's rollouts, and the habits that the world counts."""
    ended = [t for t in played if t.fate == "ended"]  # the returns of the others are not known
    metrics = {
        "rollout/return": average([t.total for t in ended]),
        "rollout/success": average([t.success for t in ended]),
        "rollout/truncated": average([not t.terminated for t in ended]),
        "rollout/cut": average([t.cut for t in ended]),
        "rollout/length": average([len(t.turns) for t in played]),
        "rollout/tokens": average([len(t.logps) for t in played]),
        "rollout/entropy": average([-fmean(t.logps) for t in played if t.logps]),
        "rollout/dropped": average([t.fate == "dropped" for t in played]),
        "rollout/broken": average([t.fate == "broken" for t in played]),
    }
    if hasattr(world, "habits"):
        said = [[(turn["action"], turn["reply"]) for turn in t.turn_records] for t in played]
        habits = world.habits(said)
        metrics |= named("habit/{}", habits)
    return metrics


def sample_of(t: Trajectory, iteration) -> dict:
    """A rollout as rollouts.jsonl has it."""
    return {
        "iteration": iteration,
        "answer": t.answer,
        "return": t.total,
        "success": t.success,
        "fate": t.fate,
        "text": t.text,
        "turns": t.turn_records,
    }


# ---------------------------------------------------------- 8. training
def main(args: Args) -> dict:
    """Alternates rollouts and updates; returns what it writes to summary.json."""
    join_others(args)
    run = runs.Run(args, "loop_ppo_multigpu")
    K = args.rollouts
    if K < 2:
        raise ValueError(f"--rollouts {K}: a rollout is judged by the others of its task, so it takes two")
    worlds = make_worlds(args, "train")
    world = worlds[0]
    difficulties = getattr(world, "difficulties", [1] * world.num_tasks)
    trained_on = [i for i, difficulty in enumerate(difficulties) if difficulty <= args.max_difficulty]  # D2
    if not trained_on:
        raise ValueError(f"--max-difficulty {args.max_difficulty}: all tasks of {args.env} are above it")

    # --- model and optimiser, as they start
    source = args.model or models.checkpoint_of(world)  # D1
    model = make_model(args, source)
    ref_model = models.reference_of(model) if args.kl else None
    args.context = min(args.context, model.context)
    device = None if args.device == "cpu" else args.device  # the CPU is the default; setting it slows all
    torch.set_default_device(device)
    probe_cache(model)
    model.engine = Engine(args)
    parameters = nn.ParameterList(p for p in model.parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW(parameters, args.lr, weight_decay=0.01)  # as in the release

    # --- a new run, or a resumed one
    run.start({"parameters": parameters, "optimizer": optimizer}, episodes=0)
    model.engine.take(model, run)
    shown = "return|success$|no_op|filtered"
    if not args.resume:
        run.log(evaluate(model, args, "dev", "eval/{}"), shown)

    for iteration in run.iterations(args.iterations):
        # 1. K rollouts of some tasks; the worlds of a task have the same seed
        began = time.time()
        is_short = len(trained_on) < args.tasks
        task_P = run.rng.choice(trained_on, args.tasks, replace=is_short)
        seed_P = run.rng.integers(2**31, size=args.tasks)
        tasks = task_P.repeat(K).tolist()
        world_seeds = seed_P.repeat(K).tolist()
        token_seeds = run.rng.integers(2**63, size=len(tasks))
        played = rollout(model, worlds, tasks, world_seeds, token_seeds, args, may_drop=True)
        rolled = time.time()

        # 2. advantages, and some steps
        lr = args.lr
        if args.anneal_lr:
            lr *= 1 - (iteration - 1) / args.iterations  # D3
        optimizer.param_groups[0]["lr"] = lr
        judged = set_advantages(played, K, args.normalise)
        metrics = behaviour(played, world)
        metrics |= update(model, optimizer, judged, args, run.rng, ref_model)
        model.engine.take(model, run)

        # 3. metrics, evaluation, checkpoint
        run.state["episodes"] += len(played)
        metrics["time/rollout"] = rolled - began
        metrics["time/update"] = time.time() - rolled
        written = sum(len(t.logps) for t in played)
        metrics["time/tokens_per_second"] = written / metrics["time/rollout"]
        if run.is_due(args.eval_every):
            metrics |= evaluate(model, args, "dev", "eval/{}")
        logged = played[:K] + [t for t in played[K:] if t.fate != "ended"]  # the first task's, and unfinished
        samples = [sample_of(t, iteration) for t in logged]
        run.log(metrics, shown, samples)
        run.stopped = any(gathered([run.asked]))  # all stop after the same iteration
        if run.is_due(args.save_every) or run.stopped:
            run.save({"actor": model})

    tests = {}  # D4
    if hasattr(world, "split") and not run.stopped:
        tests |= evaluate(model, args, "test-normal", "test_normal_{}")
        tests |= evaluate(model, args, "test-challenge", "test_challenge_{}")
    for each in worlds:
        each.close()
    if runs.processes() > 1:
        distributed.destroy_process_group()
    return run.finish(**tests)


if __name__ == "__main__":
    runs.cli(Args, main)
