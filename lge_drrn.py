"""LGE: a Guide prunes the valid actions of ScienceWorld, an Explorer (DRRN) learns which of the rest to take.

    python lge_drrn.py --task find-plant          # 14 to 24 minutes beside another; 55, 62, 47 by seed
    python lge_drrn.py --task find-plant --guide none                    # plain DRRN; 68, 55, 23
    python lge_drrn.py --steps 100000 --lr 1e-4 --eval-every 1000 --eval-episodes 10    # the paper's length

The explorer is a Q function of a state (task and observation, room, inventory) and an action, all in words.
The guide, from guide_simcse.py, knows the task alone: of a thousand valid actions it keeps the nearest 50.

Paper: Golchha et al. 2024, arXiv:2403.03141; the explorer: He et al. 2016, arXiv:1511.04636
  E1  Q(s,a) = w relu(W [GRU_o(o), GRU_l(l), GRU_i(i), GRU_a(a)] + b)     sec. 3.1.1        DRRN.q
  E2  y = r + gamma * max_a' Q(s',a'), 0 behind an end (unsaid in Alg. 1) Alg. 1, A.1.3     q_target
  E3  Huber loss of Q(s,a) - y, mean of a batch; Alg. 1 sums              Alg. 1, A.1.3     learn
  E4  pi(a|s) ~ exp Q(s,a) in training, argmax in evaluation              Alg. 1, 3.1.1     sample
  E5  with probability 1 - epsilon only the k actions nearest to the task Alg. 1            prune
Differs from the paper (docs/lge_drrn.md has the reasons at length):
  D1  Targets and player use a copy of the network, renewed every 50 updates (--copy-every 1): fewer texts.
  D2  A hidden layer with ReLU, as in the authors' code; the paper has one linear layer (--no-q-hidden).
  D3  Positive rewards fill the memory's priority half (--priority released): the authors leave it empty.
  D4  The step limit bootstraps, and no transition crosses a reset, as one in each of the authors' episodes.
  D5  Byte pairs trained on the world's own text, which may span words; the authors bring 8,000 unigrams.
  D6  Navigation is never pruned (--prune-navigation), as in the authors' runs; the paper does not say so.
  D7  The learning rate falls from ten times the paper's to the paper's (--lr 1e-4): a fortieth of its steps.
  D8  The value of a next state is at most the points that are left to be had there (--no-bound-targets).
  D9  The Huber loss is squared up to an error of 100 points (--huber-delta 1): Q is a mean, not a median.
  D10 The state has the task, as in the authors' code: all variations of a task share one network.
"""

import copy
import json
import shutil
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import envs
from envs import runs
from envs.worlds.scienceworld import TASKS, Worlds, variations


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "scienceworld"  # the explorer knows no other world
    task: str = "find-living-thing"  # of the 30, by name or by the paper's number, as T12
    seed: int = 1  # of everything random in the run; 0 or more
    steps: int = 2_500  # of each world (paper: 100,000)
    worlds: int = 8  # played side by side, each in a Java process of its own (paper: 8, A.1.3)
    step_limit: int = 100  # actions after which an episode is cut off (paper: 100)
    simplifications: Literal["", "easy"] = "easy"  # of the world (authors' flag: easy)
    runs: str = "runs"  # folder in which the run's own folder is made
    name: str = ""  # of the run, for the name of its folder
    resume: str = ""  # folder of a run to continue; its saved arguments are used unless given anew
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # of the network on the CPU; with one, resuming is exact to the bit
    log_every: int = 100  # steps between lines of metrics

    # --- model
    guide: str = "auto"  # a guide's folder; auto: the newest in --runs, or none; none: plain DRRN
    explorer: Literal["drrn", "random"] = "drrn"  # random: any of the actions that the guide leaves
    hidden: int = 128  # size of embeddings and GRUs (paper: 128)
    q_hidden: bool = True  # a hidden layer in the Q head (D2)
    vocabulary: int = 4_000  # size of the byte-pair vocabulary (D5)
    vocabulary_steps: int = 50  # random steps of each world whose text the vocabulary is trained on

    # --- data
    memory: int = 100_000  # transitions in the replay memory (paper: 100,000)
    priority: Literal["gain", "released"] = "gain"  # what the priority part has: rewards, or nothing (D3)
    priority_fraction: float = 0.5  # size of that part, and its share of a batch (paper: 0.5; 0: none)

    # --- algorithm
    top_k: int = 50  # actions that the guide leaves (paper: 50)
    prune_navigation: bool = False  # "go to ..." and "teleport to ...", too (D6)
    epsilon: float = 0.1  # probability of not pruning (paper: 0.1; 0: always prunes)
    epsilon_schedule: Literal["fixed", "increasing"] = "fixed"  # increasing: from 0 to 1 over the steps
    target_actions: Literal["valid", "pruned"] = "valid"  # a' of E2; pruned: what the release claims
    batch: int = 64  # transitions in an update, one in each step of the worlds (authors' default: 64)
    lr: float = 1e-3  # of Adam, at the start (D7; paper: 1e-4)
    lr_end: float = 1e-4  # at the end, to which it falls on a straight line (D7)
    huber_delta: float = 100.0  # error in points from which E3 is linear (D9; paper: 1)
    bound_targets: bool = True  # no value above the points that are still to be had (D8)
    gamma: float = 0.9  # discount (authors' default: 0.9)
    max_grad_norm: float = 5.0  # the gradient is clipped to this norm (authors' default: 5)
    copy_every: int = 50  # updates after which the copy is renewed (D1)

    # --- evaluation
    eval_every: int = 2_500  # steps between evaluations, each followed by a checkpoint (paper: 1,000)
    eval_episodes: int = 50  # greedy episodes on test variations (paper: 10; 0: none)
    dev_episodes: int = 10  # greedy episodes on dev variations (0: none)


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
FIELDS = ("observation", "look", "inventory")  # of a state, each with a GRU of its own


class Texts:
    """All different texts met so far: a text is kept, tokenised and embedded once and then is a number."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.texts, self.numbers, self.tokens = tokenizer, [], {}, []

    def add(self, text: str) -> int:
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)  # the newline: no text is without a token
            self.tokens.append(torch.tensor(self.tokenizer.encode(text + "\n").ids))
        return self.numbers[text]

    def state_dict(self) -> dict:
        return {"tokenizer": self.tokenizer.to_str(), "texts": self.texts}

    def load_state_dict(self, state: dict) -> None:
        self.tokenizer = Tokenizer.from_str(state["tokenizer"])
        for text in state["texts"]:
            self.add(text)


class View(NamedTuple):
    """What a world shows, in numbers of texts."""

    state: tuple[int, int, int]  # of FIELDS
    task: int
    valid: np.ndarray  # int32


def view(info: dict, texts: Texts) -> View:
    """A state in numbers. It says what is wanted, as its task stands before the observation."""
    fields = (f"{info['task']} OBSERVATION {info['observation']}", info["look"], info["inventory"])  # D10
    valid = np.array([texts.add(action) for action in info["valid"]], np.int32)
    return View(tuple(map(texts.add, fields)), texts.add(info["task"]), valid)


class Replay:
    """Two rings of transitions in one memory: first the priority part, then the rest."""

    def __init__(self, capacity: int, fraction: float):
        first = int(capacity * fraction)
        self.fraction, self.pushed = fraction, [0, 0]
        self.starts, self.capacities = [0, first], [first, capacity - first]
        self.numbers = np.zeros((capacity, 7), np.int32)  # of texts: state, action, next state
        self.figures = np.zeros((capacity, 3), np.float32)  # reward, terminated, points left
        self.next_actions = [np.zeros(0, np.int32)] * capacity

    def sizes(self) -> list[int]:
        return [min(n, capacity) for n, capacity in zip(self.pushed, self.capacities, strict=True)]

    def push(self, state, action: int, next_state, earned, next_actions, is_prior: bool):
        part = 0 if is_prior and self.capacities[0] else 1
        row = self.starts[part] + self.pushed[part] % self.capacities[part]
        self.numbers[row], self.figures[row] = (*state, action, *next_state), earned
        self.next_actions[row] = next_actions
        self.pushed[part] += 1

    def sample(self, size: int, rng: np.random.Generator, fill: bool = True):
        """N transitions: texts [N, 7], figures [N, 3], and the actions of which E2 takes the maximum.

        `fraction` of them come from the priority part, none twice; with `fill` the rest makes up for it.
        """
        share, (first, second) = int(self.fraction * size), self.sizes()
        prior = min(share, first)
        rest = min(size - (prior if fill else share), second)
        rows = [*rng.choice(first, prior, False), *(self.starts[1] + rng.choice(second, rest, False))]
        return self.numbers[rows], torch.from_numpy(self.figures[rows]), [self.next_actions[i] for i in rows]

    def state_dict(self) -> dict:
        arrays = self.numbers, self.figures, np.concatenate(self.next_actions)
        lengths = [len(actions) for actions in self.next_actions]
        state = {"capacities": self.capacities, "pushed": self.pushed, "lengths": lengths}
        return state | {"arrays": [torch.from_numpy(array) for array in arrays]}

    def load_state_dict(self, state: dict) -> None:
        if state["capacities"] != self.capacities:
            raise ValueError("--memory and --priority-fraction cannot be changed")
        self.numbers[:], self.figures[:], sets = (array.numpy() for array in state["arrays"])
        ends = np.cumsum(state["lengths"])[:-1]
        self.next_actions = [row.copy() for row in np.split(sets, ends)]  # not views of all
        self.pushed = state["pushed"]


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes: N transitions, states or texts, A actions of a state, B texts at once, T tokens, H hidden.
def q_target(reward_N, next_q_N, terminated_N, left_N, gamma: float) -> torch.Tensor:
    """E2: r + gamma * max_a' Q(s',a') [N]. Nothing follows a terminal step, and never more than is left (D8).

    >>> reward, terminated, left = torch.tensor([[0.0, 8, 17], [0, 0, 1], [50, 4, 9]])
    >>> q_target(reward, torch.tensor(10.0), terminated, left, 0.5).tolist()
    [5.0, 10.0, 17.0]
    """
    return reward_N + gamma * (1 - terminated_N) * torch.minimum(next_q_N, left_N)  # E2, D8


def sample(q_A: torch.Tensor, u: float) -> int:
    """E4: the first action at which the cumulative probability of softmax(Q) exceeds `u`, uniform in [0, 1).

    >>> sample(torch.tensor([0.0, 0.0, -1e9]), 0.4), sample(torch.tensor([0.0, 0.0, -1e9]), 0.6)
    (0, 1)
    """
    return min(int((q_A.double().softmax(0).cumsum(0) <= u).sum()), len(q_A) - 1)  # E4


def prune(cosine_A: np.ndarray, is_kept_A: np.ndarray, k: int) -> np.ndarray:
    """E5: the places of the k actions nearest to the task, and of those that are kept in any case; in order.

    >>> prune(np.array([0.1, 0.9, 0.5, 0.2]), np.array([True, False, False, False]), 2).tolist()
    [0, 1, 2]
    """
    is_near_A = np.zeros(len(cosine_A), bool)
    is_near_A[np.argsort(-cosine_A, kind="stable")[:k]] = True  # E5
    return np.flatnonzero(is_near_A | is_kept_A)


# ---------------------------------------------------------- 4. models
class DRRN(nn.Module):
    """Q of a state and an action in words. A linear layer on both is a part of each, computed once."""

    def __init__(self, vocabulary: int, hidden: int, q_hidden: bool):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.encoders = nn.ModuleDict({name: nn.GRU(hidden, hidden) for name in (*FIELDS, "action")})
        width = hidden if q_hidden else 1  # D2
        self.state_part, self.action_part = nn.Linear(3 * hidden, width), nn.Linear(hidden, width, bias=False)
        bound = (4 * hidden) ** -0.5  # as one layer on both would start
        for parameter in (*self.state_part.parameters(), *self.action_part.parameters()):
            nn.init.uniform_(parameter, -bound, bound)
        self.last = nn.Linear(hidden, 1) if q_hidden else None

    def encode(self, name: str, texts: Texts, numbers) -> torch.Tensor:
        """The last hidden states [N, H] of a GRU that reads the texts of these numbers, each text once."""
        distinct, place_N = np.unique(numbers, return_inverse=True)
        packed = nn.utils.rnn.pack_sequence([texts.tokens[i] for i in distinct], enforce_sorted=False)
        packed = packed.to(self.embedding.weight.device)
        last = self.encoders[name](packed._replace(data=self.embedding(packed.data)))[1][0]
        return last[torch.from_numpy(place_N)]

    def q(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """E1, from the parts of states and actions, [N, H] both or one [H] and one [A, H]."""
        both = state + action
        return (self.last(both.relu()) if self.last else both)[..., 0]  # E1


class Table:
    """A row for each text, made by `compute(numbers of N texts) -> [N, H]` when it is first asked for."""

    def __init__(self, compute):
        self.compute, self.row, self.data, self.size = compute, np.zeros(0, np.int64), torch.zeros(0), 0

    def __call__(self, numbers: np.ndarray) -> torch.Tensor:
        if (longest := int(numbers.max())) >= len(self.row):
            self.row = np.append(self.row, np.full(longest + 1, -1))  # twice as long: growing costs little
        missing = np.unique(numbers[self.row[numbers] < 0])
        if len(missing):
            new, end = self.compute(missing), self.size + len(missing)
            if end > len(self.data):
                self.data = torch.cat([self.data.to(new), new.new_empty(end, new.shape[1])])
            self.data[self.size : end], self.row[missing], self.size = new, np.arange(self.size, end), end
        return self.data[torch.from_numpy(self.row[numbers])]


class Copy:
    """D1: the network as it was, and all that it has encoded since."""

    def __init__(self, network: DRRN, texts: Texts):
        old = self.network = copy.deepcopy(network).requires_grad_(False)
        self.fields = [Table(lambda numbers, name=name: old.encode(name, texts, numbers)) for name in FIELDS]
        self.actions = Table(lambda numbers: old.action_part(old.encode("action", texts, numbers)))

    def q(self, state_N3: np.ndarray, actions: list[np.ndarray]) -> list[torch.Tensor]:
        """Q [A] of each state's actions."""
        columns = zip(self.fields, state_N3.T, strict=True)
        state_NH = self.network.state_part(torch.cat([table(column) for table, column in columns], -1))
        pairs = zip(state_NH, actions, strict=True)
        return [self.network.q(state, self.actions(row)) for state, row in pairs]


def embed(encoder, tokenizer, texts: list[str]) -> torch.Tensor:
    """Texts as vectors of length 1 [N, H]: mean of their tokens, or the first (`pooling` in the config)."""
    ids = tokenizer(texts, truncation=True, padding=False)["input_ids"]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # like lengths together: padding costs
    rows = []
    for start in range(0, len(ids), 64):
        part = [ids[i] for i in order[start : start + 64]]
        T = len(part[-1])
        token_BT = torch.tensor([row + [0] * (T - len(row)) for row in part], device=encoder.device)
        mask_BT = torch.tensor([[1] * len(row) + [0] * (T - len(row)) for row in part], device=encoder.device)
        hidden_BTH = encoder(input_ids=token_BT, attention_mask=mask_BT).last_hidden_state.float()
        mean_BH = (hidden_BTH * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
        rows.append(hidden_BTH[:, 0] if encoder.config.pooling == "cls" else mean_BH)
    back = torch.tensor(order, device=encoder.device).argsort()
    return nn.functional.normalize(torch.cat(rows), dim=-1)[back]


def load_encoder(source: str, device: str):
    """An encoder and its tokenizer, from a folder or by Hugging Face name; ValueError if not whole."""
    try:
        auto = transformers.AutoModel
        model, report = auto.from_pretrained(source, output_loading_info=True, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # what a folder can hold has no end, nor have the errors
        raise ValueError(f"{source} cannot be loaded: {runs.why_not_loaded(source, error)}") from error
    if missing := [name for name in report["missing_keys"] if "pooler" not in name]:
        raise ValueError(f"{source} has no weights for {missing[0]}")  # they would be drawn at random
    if len(tokenizer) < model.config.vocab_size // 2:  # what transformers makes up where there is none
        raise ValueError(f"{source} has no tokenizer, or another model's")
    for parameter in model.parameters():  # a copy: a file's alignment can change the last digit of a product
        parameter.data = parameter.data.to(device, torch.float32, copy=True)
    return model.to(device).eval(), tokenizer


class Guide:
    """Which of the valid actions the explorer may take."""

    def __init__(self, args: Args, texts: Texts):
        self.args, self.texts, self.table = args, texts, None
        if args.guide == "none":
            return
        encoder, tokenizer = load_encoder(args.guide, args.device)
        if getattr(encoder.config, "pooling", "") not in ("mean", "cls"):
            raise ValueError(f"--guide {args.guide}: not saved by guide_simcse.py, its config has no pooling")
        if args.device == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16"):
            encoder.to(torch.bfloat16)  # twice as fast as float32 there
        encoder.requires_grad_(False)
        self.table = Table(lambda rows: embed(encoder, tokenizer, [texts.texts[i] for i in rows]).cpu())

    def pruned(self, view: View) -> np.ndarray:
        """The valid actions that are left (E5)."""
        if not self.table:
            return view.valid
        navigation = () if self.args.prune_navigation else ("go to ", "teleport to ")  # D6
        is_kept_A = np.array([self.texts.texts[i].startswith(navigation) for i in view.valid])
        return view.valid[prune(self.cosines(view), is_kept_A, self.args.top_k)]

    def cosines(self, view: View) -> np.ndarray:
        """Of each valid action with the task [A]."""
        return (self.table(view.valid) @ self.table(np.array([view.task]))[0]).numpy()

    def rank(self, view: View, action: int) -> int:
        """The place of a valid action by its cosine; the guide likes number 1 best."""
        cosine_A = self.cosines(view)
        return 1 + int((cosine_A > cosine_A[view.valid == action]).sum())


def make_vocabulary(texts: list[str], size: int) -> Tokenizer:
    """Byte pairs trained on these texts, with all bytes in it: any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    lines = pre_tokenizers.Split(Regex(r"[^\n?]*[?\n]"), "isolated")  # D5: pairs within a line
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, to_bytes])
    options = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": to_bytes.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)
    tokenizer.train_from_iterator([text + "\n" for text in texts], trainer)
    return tokenizer


# ---------------------------------------------------------- 5. rollouts
@torch.no_grad()
def choose(explorer: Copy | None, guide: Guide, views: list[View], epsilon: float, rng, is_greedy=False):
    """An action for each view, and the Q [A] of all it was chosen from; any policy of both will do."""
    candidates = [view.valid if rng.random() < epsilon else guide.pruned(view) for view in views]  # E5
    state_N3 = np.array([view.state for view in views])
    q = explorer.q(state_N3, candidates) if explorer else [torch.zeros(len(row)) for row in candidates]
    draw = [int(q_A.argmax()) if is_greedy and explorer else sample(q_A, rng.random()) for q_A in q]
    return [int(row[place]) for row, place in zip(candidates, draw, strict=True)], q


# ---------------------------------------------------------- 6. updates
def learn(network: DRRN, target: Copy, optimizer, batch, texts: Texts, args: Args) -> dict[str, float]:
    """One descent on E3 with what `Replay.sample` gave; returns metrics."""
    number_N7, figure_N3, next_actions = batch
    columns = zip((*FIELDS, "action"), number_N7[:, :4].T, strict=True)
    *fields, action_NH = [network.encode(name, texts, number_N) for name, number_N in columns]
    q_N = network.q(network.state_part(torch.cat(fields, -1)), network.action_part(action_NH))
    with torch.no_grad():
        next_q_N = torch.stack([q_A.max() for q_A in target.q(number_N7[:, 4:], next_actions)])
        reward_N, terminated_N, left_N = figure_N3.to(q_N.device).T
        y_N = q_target(reward_N, next_q_N, terminated_N, left_N, args.gamma)
    loss = nn.functional.huber_loss(q_N, y_N, delta=args.huber_delta)  # E3, D9
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"explorer/loss": loss.item(), "explorer/q": q_N.mean().item(), "explorer/grad_norm": norm.item()}


# ---------------------------------------------------------- 7. evaluation
def greedy_play(explorer: Copy | None, guide: Guide, worlds: Worlds, epsilon: float, args: Args, step: int):
    """Greedy episodes on dev and test: metrics, and of each the first two. `step` sets the variations."""
    metrics, transcripts = {}, []
    for split, number in (("dev", args.dev_episodes), ("test", args.eval_episodes)):
        rng, played = np.random.default_rng(step), []
        indices = rng.integers(len(variations(args.task, split)), size=number).tolist()
        rng = rng if explorer else np.random.default_rng((args.seed, step))  # else all seeds would play alike
        for start in range(0, len(indices), args.worlds):
            infos = worlds.reset(split, indices[start : start + args.worlds])
            played += play_out(explorer, guide, worlds, infos, epsilon, rng)  # prunes as in training (E5)
        transcripts += [{"iteration": step, "split": split} | episode for episode in played[:2]]
        if played:
            scores = np.array([episode["score"] for episode in played])
            metrics[f"eval/{split}_score"] = float(scores.clip(0).mean())
            metrics[f"eval/{split}_success"] = float((scores >= 100).mean())
            metrics[f"eval/{split}_failure"] = float((scores < 0).mean())
    return metrics, transcripts


def play_out(explorer: Copy | None, guide: Guide, worlds: Worlds, infos: list[dict], epsilon: float, rng):
    """An episode, greedily, in each world from where `infos` are: those in which no Java process died."""
    alive, played = dict(enumerate(infos)), []
    episodes = [{"variation": info["answer"], "turns": []} for info in infos]
    while alive:
        views = [view(info, guide.texts) for info in alive.values()]
        chosen, q = choose(explorer, guide, views, epsilon, rng, is_greedy=True)
        results = worlds.step({i: guide.texts.texts[number] for i, number in zip(alive, chosen, strict=True)})
        ranks = [guide.rank(*pair) if guide.table else None for pair in zip(views, chosen, strict=True)]
        for i, q_A, rank, (result, info) in zip([*alive], q, ranks, results, strict=True):
            turn = {"action": info["action"], "reply": info["observation"], "reward": result[1]}
            turn |= {"rank": rank} if guide.table else {}
            episodes[i]["turns"].append(turn | {"Q": round(q_A.max().item(), 3)})
            alive[i] = info
            if "result" in info:
                episodes[i]["score"] = alive.pop(i)["score"]
                played += [] if info["died"] else [episodes[i]]
    return played


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
    """Steps of all worlds with updates meanwhile, and evaluations; returns what it writes to summary.json."""
    started, cpu_started = time.time(), time.process_time()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.env != "scienceworld":
        raise ValueError(f"--env {args.env}: the explorer knows no other world than scienceworld")
    if problem := envs.missing(args.env):
        raise envs.Unavailable(problem)
    guides = Path(args.runs).glob("scienceworld__guide_simcse__*/guide")
    newest = max(guides, key=lambda path: path.stat().st_mtime, default="none")
    task = {f"T{n}": task for n, task in enumerate(TASKS)}.get(args.task, args.task)
    args = replace(args, task=task, guide=str(newest) if args.guide == "auto" else args.guide)
    torch.set_num_threads(args.threads)
    rng, num_tasks = np.random.default_rng(args.seed), len(variations(args.task, "train"))

    # --- all that learns
    options = {"task": args.task, "simplifications": args.simplifications, "step_limit": args.step_limit}
    worlds = Worlds(args.worlds, **options)
    texts = Texts(make_vocabulary(worlds.texts(args.vocabulary_steps, rng), args.vocabulary))  # D5
    guide = Guide(args, texts)
    torch.manual_seed(args.seed)  # here: to load a guide draws numbers, too
    network = DRRN(texts.tokenizer.get_vocab_size(), args.hidden, args.q_hidden).to(args.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr)
    replay = Replay(args.memory, args.priority_fraction)
    modules = {"network": network, "optimizer": optimizer, "texts": texts, "replay": replay}

    # --- a new run, or one that goes on
    run = runs.folder(args, "lge_drrn")
    if args.resume:
        state = restore(run, modules, rng, torch.default_generator)
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
    else:
        state = {"steps": 0, "episodes": 0, "updates": 0, "evaluations": [], "metrics": [], "samples": []}
    explorer = Copy(network, texts) if args.explorer == "drrn" else None  # it plays and gives targets (D1)
    runs.write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    print(f"{run}: {args.task}, guide {args.guide}")
    stopped = runs.stop_signals()  # Ctrl-C ends the step that it falls into
    writer = SummaryWriter(str(run), purge_step=state["steps"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))
    views, figures, began = [], defaultdict(list), time.time()

    for step in range(state["steps"] + 1, args.steps + 1):
        # 1. the worlds take a step, in threads
        if not views:  # at the start, and behind a checkpoint: all begin anew
            infos = worlds.reset("train", rng.integers(num_tasks, size=args.worlds).tolist())
            views = [view(info, texts) for info in infos]
        epsilon = step / args.steps if args.epsilon_schedule == "increasing" else args.epsilon
        chosen, q = choose(explorer, guide, views, epsilon, rng)
        indices = rng.integers(num_tasks, size=args.worlds).tolist()  # for those that will begin anew
        results = worlds.step({i: texts.texts[number] for i, number in enumerate(chosen)}, indices)
        # 2. meanwhile the network learns from what is in the memory
        optimizer.param_groups[0]["lr"] = args.lr + (args.lr_end - args.lr) * step / args.steps  # D7
        if explorer and sum(replay.sizes()) >= args.batch:
            batch = replay.sample(args.batch, rng, fill=args.priority == "gain")
            for tag, figure in learn(network, explorer, optimizer, batch, texts, args).items():
                figures[tag].append(figure)
            state["updates"] += 1
            if state["updates"] % args.copy_every == 0:
                explorer = Copy(network, texts)  # D1
        # 3. what came of it; `seen` is what to act on next: behind an end it is another episode's start
        for i, ((_, reward, terminated, truncated, info), seen) in enumerate(results):
            before, after, views[i] = views[i], view(info, texts), view(seen, texts)  # D4
            figures["rollout/candidates"].append(len(q[i]))
            figures["rollout/entropy"].append(torch.distributions.Categorical(logits=q[i]).entropy().item())
            figures["rollout/died"].append(info["died"])
            if info["died"]:  # nobody knows what this step did, and nobody counts the episode
                continue
            next_actions = guide.pruned(after) if args.target_actions == "pruned" else after.valid
            is_prior = args.priority == "gain" and reward > 0  # D3
            left = 100 - info["score"] if args.bound_targets else np.inf  # D8
            earned = reward, terminated, left
            replay.push(before.state, chosen[i], after.state, earned, next_actions, is_prior)
            if terminated or truncated:
                state["episodes"] += 1
                figures["rollout/score"].append(max(info["score"], 0))
                figures["rollout/success"].append(info["score"] >= 100)
                figures["rollout/failure"].append(info["score"] < 0)
                figures["rollout/length"].append(info["result"]["length"])
        # 4. the books
        state["steps"] = step
        is_evaluated = step % args.eval_every == 0 or step == args.steps
        if step % args.log_every and not (is_evaluated or stopped):
            continue
        metrics = {tag: float(np.mean(values)) for tag, values in figures.items()}
        metrics["memory/priority"] = replay.sizes()[0]
        metrics["time/steps_per_second"] = len(figures["rollout/candidates"]) / (time.time() - began)
        if is_evaluated:
            explorer = explorer and Copy(network, texts)  # what is judged is what is saved
            evaluation, transcripts = greedy_play(explorer, guide, worlds, epsilon, args, step)
            state["evaluations"].append(evaluation)
            metrics |= evaluation
            state["samples"] += transcripts
        state["metrics"].append(runs.log(writer, step, metrics, "score|/q$"))
        is_last = bool(stopped)
        if is_evaluated or is_last:
            # All begins anew behind it, here as in a run that resumes there: episodes and what is encoded.
            views, explorer = [], explorer and Copy(network, texts)
            guide.table = guide.table and Table(guide.table.compute)
            state |= {"seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu_started}
            state["modules"] = {name: module.state_dict() for name, module in modules.items()}
            state["rng"], state["generator"] = rng.bit_generator.state, torch.get_rng_state()
        with runs.saving(run, step):  # a full disk, for example, does not end the run
            runs.write(run / "metrics.jsonl", state["metrics"])
            runs.write(run / "rollouts.jsonl", state["samples"])
            if is_evaluated or is_last:
                save(run, state, {})
        if is_last:
            break
        figures, began = defaultdict(list), time.time()
    writer.close()
    worlds.close()

    tenth = max(1, len(state["evaluations"]) // 10)
    last, summary = state["evaluations"][-tenth:], {}  # paper: the mean of the last 10 %
    for tag in (last or [{}])[-1]:
        summary[tag.replace("/", "_")] = float(np.mean([row[tag] for row in last if tag in row]))
    summary |= {key: state[key] for key in ("steps", "episodes", "updates")}
    summary |= {"seed": args.seed} | runs.facts()
    summary |= {"seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu_started}
    runs.write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    return summary


if __name__ == "__main__":
    runs.cli(Args, main)
