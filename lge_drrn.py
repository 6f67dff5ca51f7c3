"""LGE: a Guide prunes a text world's valid actions, and an Explorer (DRRN) learns which of the rest to take.

    python lge_drrn.py                  # in the school, a small world of our own: a minute on one core
    python lge_drrn.py --guide none     # plain DRRN
    python guide_simcse.py --env scienceworld                  # the guide, once
    python lge_drrn.py --env scienceworld --task find-plant    # 14 to 24 minutes; 3 seeds score 55, 62, 47
    # closer to the paper's settings; we have not run this:
    python lge_drrn.py --env scienceworld --steps 100000 --lr 1e-4 --eval-every 1000 --eval-episodes 10

The explorer is a Q function of a state (task and observation, room, inventory) and an action, all as text.
The guide, from guide_simcse.py, knows only the task: of hundreds of valid actions it keeps the nearest 50.

Paper: Golchha et al. 2024, arXiv:2403.03141; the explorer: He et al. 2016, arXiv:1511.04636
Authors' code: github.com/hitzkrieg/drrn-scienceworld-clone
  E1  Q(s,a) = w relu(W [GRU_o(o), GRU_l(l), GRU_i(i), GRU_a(a)] + b) + c sec. 3.1.1        DRRN
  E2  y = r + gamma * max_a' Q(s',a')                                     Alg. 1            q_target
      after success or failure y = r                                      authors' code
  E3  Huber loss of Q(s,a) - y, mean of a batch; Alg. 1 sums              Alg. 1, A.1.3     learn
  E4  pi(a|s) proportional to exp(Q(s,a) / temperature)                   Alg. 1            sample_action
      argmax in evaluation                                                sec. 3.1.1        choose
  E5  with probability 1 - epsilon only the k actions nearest to the task Alg. 1            prune
Differs from the paper (docs/lge_drrn.md has the reasons at length):
  D1  Targets and actions come from a copy of the network, renewed every 50 updates (--copy-every 1): a text
      is encoded once per renewal.
  D2  A hidden layer with ReLU, as in the authors' code; the paper has one linear layer.
  D3  Positive rewards fill the memory's priority half (--priority released): the authors leave it empty.
  D4  The value is bootstrapped at the step limit, and no transition crosses a reset; in the authors' code one
      does in every episode.
  D5  Byte pairs, which may span words, trained on the world's own text; the authors provide 8,000 unigrams.
  D6  Navigation is never pruned (--prune-navigation), as in the authors' runs; the paper does not say so.
  D7  The learning rate decays from ten times the paper's to the paper's (--lr 1e-4), as the steps are a
      fortieth of the paper's or fewer.
  D8  The value of a next state is at most the points still to be won there (--no-bound-targets).
  D9  The Huber loss is quadratic up to an error of 100 points (--huber-delta 1): Q is a mean, not a median.
  D10 The task's words stand before the observation, as in the authors' code; sec. 3.1.1 does not say where.
  D11 In the school, whose runs are short: episodes of 40 steps, half the width, 1,000 byte pairs, gamma 0.7,
      E4 with Q / 5.
"""

import time
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import nn

from envs import models, runs
from envs.worlds import school, scienceworld

WORLDS = {"school": school, "scienceworld": scienceworld}
SETTINGS = {  # defaults of each world (D11)
    "school": {
        "steps": 600,
        "step_limit": 40,
        "hidden": 64,
        "vocabulary": 1_000,
        "gamma": 0.7,
        "temperature": 5.0,
    },
    "scienceworld": {
        "steps": 2_500,
        "step_limit": 100,
        "hidden": 128,
        "vocabulary": 4_000,
        "gamma": 0.9,
        "temperature": 1.0,
    },
}


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "school"  # or scienceworld, which needs Java
    task: str = "find-living-thing"  # by name or by the paper's number, such as T12
    seed: int = 1  # seed of everything random in the run; 0 or more
    steps: int = -1  # per world; -1: the world's default in SETTINGS (paper: 100,000)
    worlds: int = 8  # worlds played in parallel (paper: 8, A.1.3)
    step_limit: int = -1  # actions after which an episode is truncated; -1: the world's (paper: 100)
    simplifications: Literal["", "easy"] = "easy"  # those of the world (authors' flag: easy)
    runs: str = "runs"  # folder in which the run's own folder is created
    name: str = ""  # label of the run, a part of its folder's name
    resume: str = ""  # folder of a run to continue; its saved arguments hold unless given again
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # CPU threads; with one, resuming after a kill is exact to the bit, after Ctrl-C not
    log_every: int = 100  # steps between lines of metrics

    # --- model
    guide: str = "auto"  # a guide's folder; auto: the newest in --runs, or the one supplied; none: plain DRRN
    explorer: Literal["drrn", "random"] = "drrn"  # random: uniform over the actions that the guide keeps
    hidden: int = -1  # size of embeddings and GRUs; -1: the world's (paper: 128)
    vocabulary: int = -1  # size of the byte-pair vocabulary (D5); -1: the world's
    vocabulary_steps: int = 50  # random steps of each world that yield the text to train the vocabulary on

    # --- data
    memory: int = 100_000  # transitions in the replay memory (paper: 100,000)
    priority: Literal["gain", "released"] = "gain"  # what is prioritised: rewards above 0, or nothing (D3)
    priority_fraction: float = 0.5  # priority part of memory and batch, below 1 (paper: 0.5; 0: none)

    # --- algorithm
    top_k: int = 50  # nearest actions that the guide keeps; all navigation is kept, too (paper: 50)
    prune_navigation: bool = False  # also prune "go to ..." and "teleport to ..." (D6)
    epsilon: float = 0.1  # probability of not pruning (paper: 0.1; 0: always prune)
    epsilon_schedule: Literal["fixed", "increasing"] = "fixed"  # increasing: to 1, so at the end all is valid
    target_actions: Literal["valid", "pruned"] = "valid"  # a' in E2: all valid ones (Alg. 1), or the guide's
    batch: int = 64  # transitions per update; one update per step of the worlds (authors' default: 64)
    lr: float = 1e-3  # Adam's initial learning rate (D7; paper: 1e-4)
    lr_end: float = 1e-4  # final learning rate; the change is linear (D7); a constant rate is given twice
    huber_delta: float = 100.0  # error in points above which E3 is linear (D9; paper: 1)
    bound_targets: bool = True  # bound values by the points still to be won (D8)
    gamma: float = -1.0  # discount; -1: the world's (authors' default: 0.9)
    temperature: float = -1.0  # temperature of E4, in points; -1: the world's (paper: 1, without a unit)
    max_grad_norm: float = 5.0  # the gradient is clipped to this norm (authors' default: 5)
    copy_every: int = 50  # updates between renewals of the copy (D1)

    # --- evaluation
    eval_every: int = 2_500  # steps between evaluations and checkpoints (paper: 1,000; 0: only at the end)
    eval_episodes: int = 50  # greedy episodes on test variations (paper: 10; 0: none)
    dev_episodes: int = 10  # greedy episodes on dev variations (0: none)


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
FIELDS = ("observation", "look", "inventory")  # texts of a state, each with a GRU of its own


class Texts:
    """All distinct texts met so far: each is stored, tokenised and embedded once, then known by number."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.texts = []
        self.tokens = []  # of each text, a tensor [T]
        self.numbers = {}  # text -> its place in both lists

    def add(self, text):
        """The number of a text; a new text gets the next one."""
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
            ids = self.tokenizer.encode(text + "\n").ids  # the newline: even an empty text has a token
            self.tokens.append(torch.tensor(ids))
        return self.numbers[text]

    def __getitem__(self, number):
        return self.texts[number]

    def state_dict(self):
        return {"tokenizer": self.tokenizer.to_str(), "texts": self.texts}

    def load_state_dict(self, state):
        self.tokenizer = Tokenizer.from_str(state["tokenizer"])
        for text in state["texts"]:
            self.add(text)


class View(NamedTuple):
    """What a world shows; each text is its number in `Texts`."""

    state: tuple[int, int, int]  # of FIELDS
    task: int
    valid: np.ndarray  # the actions [A], int32


def to_view(info, texts):
    """The View of a world's info; new texts get a number."""
    valid = [texts.add(action) for action in info["valid"]]
    observation = f"{info['task']} OBSERVATION {info['observation']}"  # D10
    state = tuple(map(texts.add, (observation, info["look"], info["inventory"])))
    return View(state, texts.add(info["task"]), np.array(valid, np.int32))


class Transition(NamedTuple):
    """A step of a world; states and actions are numbers of texts."""

    state: tuple[int, int, int]
    action: int
    reward: float  # in points: the score goes to 100
    next_state: tuple[int, int, int]
    terminated: bool
    points_left: float  # points still to be won in the next state (D8)
    next_actions: np.ndarray  # int32; E2 takes the maximum over them


class Ring:
    """A ring buffer of the newest transitions: once it is full, each replaces the oldest."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.rows = []
        self.pushed = 0  # in total

    def push(self, transition):
        if self.pushed < self.capacity:
            self.rows.append(transition)
        else:
            self.rows[self.pushed % self.capacity] = transition
        self.pushed += 1

    def sample(self, size, rng):
        """`size` transitions without replacement; all if there are fewer."""
        total = len(self.rows)
        places = rng.choice(total, min(size, total), replace=False)
        return [self.rows[i] for i in places]

    def state_dict(self):
        rows = [(*row[:-1], torch.from_numpy(row.next_actions)) for row in self.rows]
        return {"capacity": self.capacity, "pushed": self.pushed, "rows": rows}

    def load_state_dict(self, state):
        if state["capacity"] != self.capacity:
            raise ValueError("--memory and --priority-fraction cannot be changed")
        self.pushed = state["pushed"]
        for *facts, actions in state["rows"]:
            self.rows.append(Transition(*facts, actions.numpy()))


class ReplayBuffer:
    """Two rings: one for transitions with a positive reward, one for the rest (D3).

    With --priority released, all are in the second, and batches are smaller by the share of the first.
    """

    def __init__(self, capacity, fraction, is_released):
        if fraction >= 1:
            raise ValueError("--priority-fraction must be below 1")
        size = int(fraction * capacity)
        self.fraction = fraction
        self.is_released = is_released
        self.priority = Ring(size)
        self.rest = Ring(capacity - size)

    def __len__(self):
        return len(self.priority.rows) + len(self.rest.rows)

    def push(self, transition):
        is_prior = transition.reward > 0 and not self.is_released  # D3
        if is_prior and self.priority.capacity:
            self.priority.push(transition)
        else:
            self.rest.push(transition)

    def sample(self, size, rng):
        """`size` transitions without replacement, `fraction` of them (or all there are) with a reward."""
        share = int(self.fraction * size)
        prior = self.priority.sample(share, rng)
        if not self.is_released:
            share = len(prior)  # the rest fills up the batch
        return prior + self.rest.sample(size - share, rng)


def pad(rows, value=0):
    """Stacks rows of numbers into one tensor [B, T], padded on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes: N transitions, states or texts, A actions of a state, B texts at once, T tokens, H hidden.
def q_target(reward_N, next_q_N, terminated_N, left_N, gamma):
    """E2: r + gamma * max_a' Q(s',a') [N]; the maximum is 0 after an end, and at most the points left (D8).

    >>> reward, terminated, left = torch.tensor([[0.0, 8, 17], [0, 0, 1], [50, 4, 9]])
    >>> q_target(reward, torch.tensor(10.0), terminated, left, 0.5).tolist()
    [5.0, 10.0, 17.0]
    """
    bounded_N = torch.minimum(next_q_N, left_N)  # D8
    return reward_N + gamma * (1 - terminated_N) * bounded_N  # E2


def sample_action(q_A, temperature, u):
    """E4: the first action at which the total of softmax(Q / temperature) exceeds `u`, uniform in [0, 1).

    >>> q_A = torch.tensor([9.0, 0.0])
    >>> sample_action(q_A, 1.0, 0.6), sample_action(q_A, 99.0, 0.6)
    (0, 1)
    """
    p_A = (q_A.cpu() / temperature).double().softmax(0)  # E4
    total_A = p_A.cumsum(0)
    place = int((total_A <= u).sum())
    return min(place, len(q_A) - 1)  # the last total may be rounded below 1


def prune(cosine_A, is_kept_A, k):
    """E5: the indices, in order, of the k actions nearest to the task and of those that are always kept.

    >>> prune(np.array([0.1, 0.9, 0.5, 0.2]), np.array([True, False, False, False]), 2).tolist()
    [0, 1, 2]
    """
    nearest = np.argsort(-cosine_A, kind="stable")[:k]  # E5
    is_chosen_A = is_kept_A.copy()
    is_chosen_A[nearest] = True
    return np.flatnonzero(is_chosen_A)


# ---------------------------------------------------------- 4. models
class DRRN(nn.Module):
    """Q of a state and an action as text. The layer on both is the sum of two parts, each computed once."""

    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.encoders = nn.ModuleDict()
        for name in (*FIELDS, "action"):
            self.encoders[name] = nn.GRU(hidden, hidden)
        self.state_part = nn.Linear(3 * hidden, hidden)
        self.action_part = nn.Linear(hidden, hidden, bias=False)
        bound = (4 * hidden) ** -0.5  # as for one layer on both
        for part in (self.state_part, self.action_part):
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -bound, bound)
        self.last = nn.Linear(hidden, 1)  # D2

    def encode(self, name, texts, numbers):
        """The last hidden states [N, H] of a GRU over the texts of these numbers, each read once."""
        distinct, place_N = np.unique(numbers, return_inverse=True)
        tokens = [texts.tokens[i] for i in distinct]
        packed = nn.utils.rnn.pack_sequence(tokens, enforce_sorted=False)
        packed = packed.to(self.embedding.weight.device)
        vectors = self.embedding(packed.data)
        _, last_1BH = self.encoders[name](packed._replace(data=vectors))
        return last_1BH[0][torch.from_numpy(place_N)]

    def encode_action(self, texts, numbers):
        """The actions' part of the layer on both [N, H]."""
        return self.action_part(self.encode("action", texts, numbers))

    def q(self, state, action):
        """E1, from the parts of states and actions: both [N, H], or one [H] and the other [A, H]."""
        both = (state + action).relu()  # E1
        return self.last(both)[..., 0]


class Table:
    """A cache of one row per text, from `compute(numbers of N texts) -> [N, H]` when first asked for."""

    def __init__(self, compute):
        self.compute = compute
        self.forget()

    def forget(self):
        self.place = np.zeros(0, int)  # where the row of each text is; -1: nowhere
        self.rows = torch.zeros(0)
        self.used = 0  # rows in use; behind them is spare room

    def __call__(self, numbers):
        """The rows [N, H] of the texts of these numbers."""
        size = numbers.max() + 1
        if size > len(self.place):
            more = np.full(size, -1)  # doubling makes growth cheap
            self.place = np.append(self.place, more)
        missing = np.unique(numbers[self.place[numbers] < 0])
        if len(missing):
            self.add(missing)
        place_N = self.place[numbers]
        return self.rows[torch.from_numpy(place_N)]

    def add(self, numbers):
        """Computes the rows of texts that have none."""
        new = self.compute(numbers)
        end = self.used + len(new)
        if end > len(self.rows):
            more = new.new_empty(end, new.shape[1])  # doubling, again
            self.rows = torch.cat([self.rows.to(new), more])
        self.rows[self.used : end] = new
        self.place[numbers] = np.arange(self.used, end)
        self.used = end


class Copy:
    """The explorer that acts and gives the targets (D1): a copy of the network that caches encoded texts."""

    def __init__(self, network, texts):
        self.network = deepcopy(network).requires_grad_(False)
        encode = self.network.encode
        self.fields = [Table(partial(encode, name, texts)) for name in FIELDS]
        self.actions = Table(partial(self.network.encode_action, texts))

    def renew(self, network):
        """Copies the network's current weights."""
        self.network.load_state_dict(network.state_dict())
        for table in (*self.fields, self.actions):
            table.forget()

    def q(self, state_N3, actions):
        """Q [A] of each state's actions."""
        fields = [table(state_N3[:, i]) for i, table in enumerate(self.fields)]
        state_NH = self.network.state_part(torch.cat(fields, -1))
        return [self.network.q(state_NH[i], self.actions(row)) for i, row in enumerate(actions)]


class Uniform:
    """The random explorer: all actions have the same Q."""

    def renew(self, network):
        pass

    def q(self, state_N3, actions):
        return [torch.zeros(len(row)) for row in actions]


def embed(encoder, texts):
    """Unit vectors of texts [N, H]: the mean over their tokens, or the first (`pooling` in the config)."""
    rows = encoder.tokenizer(texts, truncation=True, padding=False)["input_ids"]
    lengths = [len(row) for row in rows]
    order = np.argsort(lengths, kind="stable")  # similar lengths together, to save padding
    vectors = []
    for start in range(0, len(rows), 64):
        part = [rows[i] for i in order[start : start + 64]]
        ones = [[1] * len(row) for row in part]
        token_BT = pad(part).to(encoder.device)
        mask_BT = pad(ones).to(encoder.device)
        hidden_BTH = encoder(input_ids=token_BT, attention_mask=mask_BT).last_hidden_state.float()
        if encoder.config.pooling == "cls":
            vectors.append(hidden_BTH[:, 0])
        else:
            total_BH = (hidden_BTH * mask_BT[..., None]).sum(1)
            vectors.append(total_BH / mask_BT.sum(1, keepdim=True))
    sorted_NH = nn.functional.normalize(torch.cat(vectors), dim=-1)
    place_N = torch.from_numpy(order.argsort())  # of each text among the sorted
    return sorted_NH[place_N.to(encoder.device)]


def load_encoder(source, args):
    """Loads an encoder and its tokenizer by folder or Hugging Face name; ValueError if either is missing."""
    encoder = models.load(transformers.AutoModel, source, args)
    if len(encoder.tokenizer) < encoder.config.vocab_size // 2:  # made up by transformers
        raise ValueError(f"{source} has no tokenizer, or another model's")
    for parameter in encoder.parameters():  # alignment in the file can change the last digit of a product
        parameter.data = parameter.data.clone()
    return encoder


class Guide:
    """Chooses which of the valid actions the explorer may take."""

    def __init__(self, args, texts):
        self.args = args
        self.texts = texts
        self.table = None  # of the texts' vectors, if there is a guide
        if args.guide == "none":
            print("guide: none")
            return
        encoder = load_encoder(args.guide, args)
        pooling = getattr(encoder.config, "pooling", None)
        if pooling not in ("mean", "cls"):
            raise ValueError(f"--guide {args.guide}: not saved by guide_simcse.py, its config has no pooling")
        if args.device == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16"):
            encoder.to(torch.bfloat16)  # twice as fast as float32 there
        encoder.requires_grad_(False)

        def vectors(numbers):
            return embed(encoder, [texts[i] for i in numbers]).cpu()

        self.table = Table(vectors)

    def forget(self):
        """Drops all vectors; they will be computed again."""
        if self.table:
            self.table.forget()

    def pruned(self, view):
        """The valid actions that are kept (E5)."""
        if not self.table:
            return view.valid
        navigation = () if self.args.prune_navigation else ("go to ", "teleport to ")  # D6
        is_kept_A = np.array([self.texts[i].startswith(navigation) for i in view.valid])
        return view.valid[prune(self.cosines(view), is_kept_A, self.args.top_k)]

    def cosines(self, view):
        """The cosine of each valid action with the task [A]."""
        action_AH = self.table(view.valid)
        (task_H,) = self.table(np.array([view.task]))
        return (action_AH @ task_H).numpy()

    def rank(self, view, action):
        """The rank of a valid action by its cosine; the guide's favourite is number 1."""
        cosine_A = self.cosines(view)
        is_nearer_A = cosine_A > cosine_A[view.valid == action]
        return 1 + int(is_nearer_A.sum())


def make_vocabulary(texts, size):
    """Byte-pair tokenizer trained on these texts; it has all bytes, so that it can encode any text."""
    tokenizer = Tokenizer(BPE())
    lines = pre_tokenizers.Split(Regex(r"[^\n?]*[?\n]"), "isolated")  # D5: pairs within a line or question
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=to_bytes.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text + "\n" for text in texts], trainer)
    return tokenizer


# ---------------------------------------------------------- 5. rollouts
class Choice(NamedTuple):
    """What an explorer does in a state, and the Q values behind it."""

    view: View
    action: int  # number of its text
    q_A: torch.Tensor  # Q of all actions that it could choose from


def choose(explorer, guide, views, epsilon, rng, is_greedy=False):
    """A Choice for each view: among what the guide keeps or, with probability epsilon, all valid actions.

    `explorer` is a Copy, or anything with the same method `q`.
    """
    candidates = []
    for view in views:
        is_free = rng.random() < epsilon
        actions = view.valid if is_free else guide.pruned(view)  # E5
        candidates.append(actions)
    state_N3 = np.array([view.state for view in views])
    q = explorer.q(state_N3, candidates)
    choices = []
    for view, actions, q_A in zip(views, candidates, q, strict=True):
        place = int(q_A.argmax())
        if not is_greedy:
            place = sample_action(q_A, guide.args.temperature, rng.random())  # E4; the run's arguments
        choices.append(Choice(view, int(actions[place]), q_A))
    return choices


def remember(choices, results, replay_buffer, guide, args):
    """Stores a step of each world in the memory; returns the new Views, and metrics.

    After an end, a world's View is the start of its next episode; the transition has what the step itself
    showed (D4).
    """
    views = []
    logs = []
    for choice, (result, shown) in zip(choices, results, strict=True):
        _, reward, terminated, truncated, info = result
        after = to_view(info, guide.texts)
        views.append(to_view(shown, guide.texts))  # D4
        policy = torch.distributions.Categorical(logits=choice.q_A / args.temperature)
        metrics = {"rollout/candidates": len(choice.q_A), "rollout/died": info["died"]}
        metrics["rollout/entropy"] = policy.entropy().item()
        logs.append(metrics)
        if info["died"]:  # what the step did is unknown; the episode does not count
            continue
        if terminated or truncated:
            logs.append(score_metrics("rollout/", info["score"]))
            logs.append({"rollout/length": info["result"]["length"]})
        next_actions = guide.pruned(after) if args.target_actions == "pruned" else after.valid
        left = 100 - info["score"] if args.bound_targets else np.inf  # D8
        transition = Transition(
            choice.view.state,
            choice.action,
            reward,
            after.state,
            terminated,
            left,
            next_actions,
        )
        replay_buffer.push(transition)
    return views, logs


def play_out(explorer, guide, worlds, infos, epsilon, rng, is_greedy):
    """Plays an episode in each world from `infos`; returns those that ended without a Java process dying."""
    played = []
    episodes = [{"variation": info["answer"], "turns": []} for info in infos]
    shown = dict(enumerate(infos))  # of each world whose episode goes on
    while shown:
        views = [to_view(info, guide.texts) for info in shown.values()]
        choices = choose(explorer, guide, views, epsilon, rng, is_greedy)
        words = [guide.texts[choice.action] for choice in choices]
        actions = dict(zip(shown, words, strict=True))
        results = worlds.step(actions)
        for i, choice, (result, info) in zip(actions, choices, results, strict=True):
            _, reward, terminated, truncated, _ = result
            turn = {"action": info["action"], "reply": info["observation"], "reward": reward}
            if guide.table:
                turn["rank"] = guide.rank(choice.view, choice.action)
            turn["Q"] = round(choice.q_A.max().item(), 3)
            episodes[i]["turns"].append(turn)
            shown[i] = info
            is_over = terminated or truncated
            if is_over:
                del shown[i]
            if is_over and not info["died"]:
                played.append(episodes[i] | {"score": info["score"]})
    return played


# ---------------------------------------------------------- 6. updates
def learn(network, target, optimizer, batch, texts, args):
    """One gradient step on E3 with a list of transitions; returns metrics."""
    columns = Transition(*zip(*batch, strict=True))  # each field is a tuple of N
    state_N3 = np.array(columns.state)
    fields = [network.encode(name, texts, state_N3[:, i]) for i, name in enumerate(FIELDS)]
    state_NH = network.state_part(torch.cat(fields, -1))
    action_NH = network.encode_action(texts, columns.action)
    q_N = network.q(state_NH, action_NH)

    # three columns in one tensor, so that one copy brings them to the device
    figure_3N = torch.tensor((columns.reward, columns.terminated, columns.points_left), dtype=torch.float32)
    reward_N, terminated_N, left_N = figure_3N.to(q_N.device)
    with torch.no_grad():
        next_q = target.q(np.array(columns.next_state), columns.next_actions)
        next_q_N = torch.stack([q_A.max() for q_A in next_q])
        y_N = q_target(reward_N, next_q_N, terminated_N, left_N, args.gamma)
    loss = nn.functional.huber_loss(q_N, y_N, delta=args.huber_delta)  # E3, D9
    optimizer.zero_grad()
    loss.backward()
    norm = models.clipped_step(optimizer, network, args.max_grad_norm, "explorer")
    return {
        "explorer/loss": loss.item(),
        "explorer/q": q_N.mean().item(),
        "explorer/grad_norm": norm,
    }


# ---------------------------------------------------------- 7. evaluation
def score_metrics(prefix, score):
    """The outcome of an episode by its final score; -100 is a failure, and counts as 0."""
    return {
        f"{prefix}score": max(score, 0),
        f"{prefix}success": score >= 100,
        f"{prefix}failure": score < 0,
    }


def greedy_play(explorer, guide, worlds, epsilon, args, step):
    """Episodes on dev and test, greedy unless the explorer is random: metrics, and the first two of each.

    `step` is the seed of the variations, drawn with replacement, so that all runs play the same ones.
    """
    metrics, transcripts = {}, []
    is_greedy = args.explorer == "drrn"
    for split, number in (("dev", args.dev_episodes), ("test", args.eval_episodes)):
        rng = np.random.default_rng(step)
        variations = WORLDS[args.env].variations(args.task, split)
        indices = rng.integers(len(variations), size=number)
        if not is_greedy:
            rng = np.random.default_rng((args.seed, step))  # otherwise all seeds would play the same
        played = []
        for start in range(0, number, args.worlds):
            infos = worlds.reset(split, indices[start : start + args.worlds])
            played += play_out(explorer, guide, worlds, infos, epsilon, rng, is_greedy)  # also prunes (E5)
        rows = [score_metrics(f"eval/{split}_", episode["score"]) for episode in played]
        metrics |= runs.means(rows)
        transcripts += [{"iteration": step, "split": split} | episode for episode in played[:2]]
    return metrics, transcripts


def final_metrics(evaluations):
    """The mean over the last tenth of the evaluations, as in the paper (A.1.3), by names of summary.json."""
    tenth = max(1, len(evaluations) // 10)
    metrics = runs.means(evaluations[-tenth:])
    return {tag.replace("/", "_"): figure for tag, figure in metrics.items()}


# ---------------------------------------------------------- 8. training
def complete(args):
    """Completes the arguments: the world's defaults, the task's name and the guide's folder (or none)."""
    if args.env not in WORLDS:
        raise ValueError(f"--env {args.env}: the explorer knows {' and '.join(WORLDS)}")
    names = {f"T{n}": task for n, task in enumerate(scienceworld.TASKS)}  # by the paper's numbers
    task = names.get(args.task, args.task)
    guide = models.guide_of(args.env, args.runs) if args.guide == "auto" else args.guide
    settings = SETTINGS[args.env]
    given = {name: getattr(args, name) for name in settings if getattr(args, name) != -1}
    return replace(args, task=task, guide=guide, **(settings | given))


def start_worlds(args):
    """The worlds to play in parallel; they are all alike."""
    return WORLDS[args.env].Worlds(
        args.worlds,
        task=args.task,
        simplifications=args.simplifications,
        step_limit=args.step_limit,
    )


def main(args: Args) -> dict[str, float]:
    """Steps all worlds, updates the network meanwhile, evaluates; returns what it writes to summary.json."""
    args = complete(args)
    run = runs.Run(args, "lge_drrn")
    num_variations = len(WORLDS[args.env].variations(args.task, "train"))

    # --- vocabulary, guide, network
    worlds = start_worlds(args)
    samples = worlds.texts(args.vocabulary_steps, run.rng)
    texts = Texts(make_vocabulary(samples, args.vocabulary))  # D5
    guide = Guide(args, texts)
    torch.manual_seed(args.seed)  # after the guide, as loading it draws numbers, too
    network = DRRN(texts.tokenizer.get_vocab_size(), args.hidden).to(args.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr)
    is_learning = args.explorer == "drrn"
    replay_buffer = ReplayBuffer(args.memory, args.priority_fraction, args.priority == "released")
    modules = {"network": network, "optimizer": optimizer, "texts": texts}
    rings = {"priority": replay_buffer.priority, "rest": replay_buffer.rest}
    run.start(modules | rings, episodes=0, updates=0, successes=0, first_success=0, evaluations=[])
    explorer = Copy(network, texts) if is_learning else Uniform()

    views = []
    logs = []
    logged, began = run.iteration, time.time()
    for step in run.iterations(args.steps):
        # 1. the worlds take a step; those of ScienceWorld in threads, while the network learns
        if not views:  # at the start and after a checkpoint: all begin new episodes
            indices = run.rng.integers(num_variations, size=args.worlds)
            views = [to_view(info, texts) for info in worlds.reset("train", indices)]
        epsilon = step / args.steps if args.epsilon_schedule == "increasing" else args.epsilon
        choices = choose(explorer, guide, views, epsilon, run.rng)
        actions = {i: texts[choice.action] for i, choice in enumerate(choices)}
        indices = run.rng.integers(num_variations, size=args.worlds)  # of the worlds whose episodes end
        results = worlds.step(actions, indices)

        # 2. the network learns from the memory
        optimizer.param_groups[0]["lr"] = args.lr + (args.lr_end - args.lr) * step / args.steps  # D7
        if is_learning and len(replay_buffer) >= args.batch:
            batch = replay_buffer.sample(args.batch, run.rng)
            logs.append(learn(network, explorer, optimizer, batch, texts, args))
            run.state["updates"] += 1
            if run.state["updates"] % args.copy_every == 0:
                explorer.renew(network)  # D1

        # 3. the results go into the memory
        views, rows = remember(choices, results, replay_buffer, guide, args)
        logs += rows
        run.state["episodes"] += sum("rollout/score" in row for row in rows)
        if not run.state["successes"]:
            run.state["first_success"] = step
        run.state["successes"] += sum(row.get("rollout/success", 0) for row in rows)

        # 4. metrics every --log-every steps; evaluation and checkpoint every --eval-every
        is_evaluated = run.is_due(args.eval_every)
        if not (is_evaluated or run.stopped or run.is_due(args.log_every)):
            continue
        metrics = runs.means(logs)
        curve = runs.means([*run.metrics, metrics])  # fair if --log-every divides the other two
        metrics["rollout/area"] = curve.get("rollout/score", 0)
        metrics["rollout/first_success"] = run.state["first_success"]
        metrics["memory/priority"] = len(replay_buffer.priority.rows)
        metrics["time/steps_per_second"] = args.worlds * (step - logged) / (time.time() - began)
        samples = []
        if is_evaluated:
            explorer.renew(network)  # evaluate the weights that are saved
            evaluation, samples = greedy_play(explorer, guide, worlds, epsilon, args, step)
            run.state["evaluations"].append(evaluation)
            metrics |= evaluation
        run.log(metrics, "score|/q$", samples)
        if is_evaluated or run.stopped:
            run.save({})
            views = []  # start afresh, episodes and cached encodings, as a run resumed from here does
            explorer.renew(network)
            guide.forget()
        logs = []
        logged, began = step, time.time()

    worlds.close()
    area = run.metrics[-1]["rollout/area"]
    return run.finish(steps=run.iteration, area=area, **final_metrics(run.state["evaluations"]))


if __name__ == "__main__":
    runs.cli(Args, main)
