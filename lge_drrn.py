"""LGE: a Guide prunes the valid actions of a text world, an Explorer (DRRN) learns which of the rest to take.

    python lge_drrn.py                  # in the school, a small world of our own: a minute of one core
    python lge_drrn.py --guide none     # plain DRRN
    python lge_drrn.py --env scienceworld --task find-plant    # 14 to 24 minutes beside another; 55, 62, 47
    python lge_drrn.py --env scienceworld --steps 100000 --lr 1e-4 --eval-every 1000 --eval-episodes 10

The explorer is a Q function of a state (task and observation, room, inventory) and an action, all in words.
The guide, from guide_simcse.py, knows the task alone: of hundreds of valid actions it keeps the nearest 50.

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
STEPS = {"school": 600, "scienceworld": 2_500}  # of a run, unless given


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "school"  # or scienceworld, which wants Java
    task: str = "find-living-thing"  # by name or by the paper's number, as T12
    seed: int = 1  # of everything random in the run; 0 or more
    steps: int = 0  # of each world; 0: 600 in the school, 2,500 in scienceworld (paper: 100,000)
    worlds: int = 8  # played side by side (paper: 8, A.1.3)
    step_limit: int = 100  # actions after which an episode is cut off (paper: 100)
    simplifications: Literal["", "easy"] = "easy"  # of the world (authors' flag: easy)
    runs: str = "runs"  # folder in which the run's own folder is made
    name: str = ""  # of the run, for the name of its folder
    resume: str = ""  # folder of a run to continue; its saved arguments are used unless given anew
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # of the network on the CPU; with one, resuming is exact to the bit
    log_every: int = 100  # steps between lines of metrics

    # --- model
    guide: str = "auto"  # a guide's folder; auto: the newest in --runs or the ready-made; none: plain DRRN
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
    eval_every: int = 2_500  # steps between evaluations and checkpoints (paper: 1,000; 0: at the end alone)
    eval_episodes: int = 50  # greedy episodes on test variations (paper: 10; 0: none)
    dev_episodes: int = 10  # greedy episodes on dev variations (0: none)


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
FIELDS = ("observation", "look", "inventory")  # of a state, each with a GRU of its own


class Texts:
    """All different texts met so far: a text is kept, tokenised and embedded once and then is a number."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.texts = []
        self.tokens = []  # of each text, a tensor [T]
        self.numbers = {}  # text -> its place in both lists

    def add(self, text: str) -> int:
        """The number of a text, which is a new one if it has none."""
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
            ids = self.tokenizer.encode(text + "\n").ids  # the newline: no text is without a token
            self.tokens.append(torch.tensor(ids))
        return self.numbers[text]

    def state_dict(self):
        return {"tokenizer": self.tokenizer.to_str(), "texts": self.texts}

    def load_state_dict(self, state):
        self.tokenizer = Tokenizer.from_str(state["tokenizer"])
        for text in state["texts"]:
            self.add(text)


class View(NamedTuple):
    """What a world shows, each text as its number in `Texts`."""

    state: tuple[int, int, int]  # of FIELDS
    task: int
    valid: np.ndarray  # the actions [A], int32


def to_view(info, texts):
    """What the info of a world shows; texts that are new get a number."""
    valid = [texts.add(action) for action in info["valid"]]
    observation = f"{info['task']} OBSERVATION {info['observation']}"  # D10
    fields = (observation, info["look"], info["inventory"])
    state = tuple(map(texts.add, fields))
    task = texts.add(info["task"])
    return View(state, task, np.array(valid, np.int32))


class Transition(NamedTuple):
    """A step of a world: states and actions are numbers of texts."""

    state: tuple[int, int, int]
    action: int
    reward: float  # in points: the score goes to 100
    next_state: tuple[int, int, int]
    terminated: bool
    left: float  # points that are still to be had in the next state (D8)
    next_actions: np.ndarray  # int32; E2 takes the maximum over them


class Ring:
    """The newest transitions: once it is full, each takes the place of the oldest."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.rows = []
        self.pushed = 0  # in all

    def push(self, transition):
        if self.pushed < self.capacity:
            self.rows.append(transition)
        else:
            self.rows[self.pushed % self.capacity] = transition
        self.pushed += 1

    def sample(self, size, rng):
        """`size` of them, none twice; all where there are fewer."""
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

    As released, all are in the second, and an update goes without the share of the first.
    """

    def __init__(self, capacity, fraction, is_released):
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
        """`size` of them, none twice: a share of `fraction` with a reward, or all that there are."""
        share = int(self.fraction * size)
        prior = self.priority.sample(share, rng)
        if not self.is_released:
            share = len(prior)  # the rest makes up for what is missing
        return prior + self.rest.sample(size - share, rng)


def pad(rows, value=0):
    """Rows of numbers as one tensor [B, T], padded on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes: N transitions, states or texts, A actions of a state, B texts at once, T tokens, H hidden.
def q_target(reward_N, next_q_N, terminated_N, left_N, gamma):
    """E2: r + gamma * max_a' Q(s',a') [N]. Nothing follows a terminal step, and never more than is left (D8).

    >>> reward, terminated, left = torch.tensor([[0.0, 8, 17], [0, 0, 1], [50, 4, 9]])
    >>> q_target(reward, torch.tensor(10.0), terminated, left, 0.5).tolist()
    [5.0, 10.0, 17.0]
    """
    bounded_N = torch.minimum(next_q_N, left_N)  # D8
    return reward_N + gamma * (1 - terminated_N) * bounded_N  # E2


def sample(q_A, u):
    """E4: the first action at which the cumulative probability of softmax(Q) exceeds `u`, uniform in [0, 1).

    >>> sample(torch.tensor([0.0, 0.0, -1e9]), 0.4), sample(torch.tensor([0.0, 0.0, -1e9]), 0.6)
    (0, 1)
    """
    total_A = q_A.double().softmax(0).cumsum(0)  # E4
    place = int((total_A <= u).sum())
    return min(place, len(q_A) - 1)  # rounded, the last total can be below 1


def prune(cosine_A, is_kept_A, k):
    """E5: the places of the k actions nearest to the task, and of those that are kept in any case; in order.

    >>> prune(np.array([0.1, 0.9, 0.5, 0.2]), np.array([True, False, False, False]), 2).tolist()
    [0, 1, 2]
    """
    nearest = np.argsort(-cosine_A, kind="stable")[:k]  # E5
    is_left_A = is_kept_A.copy()
    is_left_A[nearest] = True
    return np.flatnonzero(is_left_A)


# ---------------------------------------------------------- 4. models
class DRRN(nn.Module):
    """Q of a state and an action in words. A linear layer on both is a part of each, computed once."""

    def __init__(self, vocabulary, hidden, q_hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.encoders = nn.ModuleDict()
        for name in (*FIELDS, "action"):
            self.encoders[name] = nn.GRU(hidden, hidden)
        width = hidden if q_hidden else 1  # D2
        self.state_part = nn.Linear(3 * hidden, width)
        self.action_part = nn.Linear(hidden, width, bias=False)
        bound = (4 * hidden) ** -0.5  # as one layer on both would start
        for part in (self.state_part, self.action_part):
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -bound, bound)
        self.last = nn.Linear(hidden, 1) if q_hidden else None

    def encode(self, name: str, texts: Texts, numbers):
        """The last hidden states [N, H] of a GRU that reads the texts of these numbers, each text once."""
        distinct, place_N = np.unique(numbers, return_inverse=True)
        tokens = [texts.tokens[i] for i in distinct]
        packed = nn.utils.rnn.pack_sequence(tokens, enforce_sorted=False)
        packed = packed.to(self.embedding.weight.device)
        vectors = self.embedding(packed.data)
        _, last_1BH = self.encoders[name](packed._replace(data=vectors))
        return last_1BH[0][torch.from_numpy(place_N)]

    def encode_action(self, texts: Texts, numbers):
        """The part that actions have in the layer on both [N, H]."""
        return self.action_part(self.encode("action", texts, numbers))

    def q(self, state, action):
        """E1, from the parts of states and actions, [N, H] both or one [H] and one [A, H]."""
        both = state + action  # E1
        if self.last:
            both = self.last(both.relu())
        return both[..., 0]


class Table:
    """A row for each text, made by `compute(numbers of N texts) -> [N, H]` when it is first asked for."""

    def __init__(self, compute):
        self.compute = compute
        self.forget()

    def forget(self):
        self.place = np.zeros(0, int)  # of a text's row, by the text's number; -1: it has none
        self.rows = torch.zeros(0)
        self.used = 0  # of the rows; what is behind them is room for more

    def __call__(self, numbers):
        """The rows [N, H] of the texts of these numbers."""
        size = numbers.max() + 1
        if size > len(self.place):
            more = np.full(size, -1)  # twice as long: growing costs little
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
            more = new.new_empty(end, new.shape[1])  # twice as long
            self.rows = torch.cat([self.rows.to(new), more])
        self.rows[self.used : end] = new
        self.place[numbers] = np.arange(self.used, end)
        self.used = end


class Copy:
    """The explorer that plays and gives targets (D1): a copy of the network, which encodes a text once."""

    def __init__(self, network, texts):
        self.network = deepcopy(network).requires_grad_(False)
        encode = self.network.encode
        self.fields = [Table(partial(encode, name, texts)) for name in FIELDS]
        self.actions = Table(partial(self.network.encode_action, texts))

    def renew(self, network):
        """Copies the network as it is now."""
        self.network.load_state_dict(network.state_dict())
        for table in (*self.fields, self.actions):
            table.forget()

    def q(self, state_N3, actions):
        """Q [A] of each state's actions."""
        fields = [table(state_N3[:, i]) for i, table in enumerate(self.fields)]
        state_NH = self.network.state_part(torch.cat(fields, -1))
        return [self.network.q(state_NH[i], self.actions(row)) for i, row in enumerate(actions)]


class Uniform:
    """The random explorer: to it all actions are worth the same."""

    def renew(self, network):
        pass

    def q(self, state_N3, actions):
        return [torch.zeros(len(row)) for row in actions]


def embed(encoder, texts):
    """Texts as vectors of length 1 [N, H]: mean of their tokens, or the first (`pooling` in the config)."""
    rows = encoder.tokenizer(texts, truncation=True, padding=False)["input_ids"]
    lengths = [len(row) for row in rows]
    order = np.argsort(lengths, kind="stable")  # like lengths together: padding costs
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
    place_N = torch.from_numpy(order.argsort())  # of each text among the sorted ones
    return sorted_NH[place_N.to(encoder.device)]


def load_encoder(source, args):
    """An encoder with its tokenizer, from a folder or by Hugging Face name; ValueError if not whole."""
    encoder = models.load(transformers.AutoModel, source, args)
    if len(encoder.tokenizer) < encoder.config.vocab_size // 2:  # what transformers makes up without one
        raise ValueError(f"{source} has no tokenizer, or another model's")
    for parameter in encoder.parameters():  # a file's alignment can change the last digit of a product
        parameter.data = parameter.data.clone()
    return encoder


class Guide:
    """Which of the valid actions the explorer may take."""

    def __init__(self, args: Args, texts: Texts):
        self.args = args
        self.texts = texts
        self.table = None  # of the texts' vectors, if there is a guide
        if args.guide == "none":
            return
        encoder = load_encoder(args.guide, args)
        pooling = getattr(encoder.config, "pooling", None)
        if pooling not in ("mean", "cls"):
            raise ValueError(f"--guide {args.guide}: not saved by guide_simcse.py, its config has no pooling")
        if args.device == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16"):
            encoder.to(torch.bfloat16)  # twice as fast as float32 there
        encoder.requires_grad_(False)

        def vectors(numbers):
            return embed(encoder, [texts.texts[i] for i in numbers]).cpu()

        self.table = Table(vectors)

    def forget(self):
        """All vectors will be computed anew."""
        if self.table:
            self.table.forget()

    def pruned(self, view):
        """The valid actions that are left (E5)."""
        if not self.table:
            return view.valid
        navigation = () if self.args.prune_navigation else ("go to ", "teleport to ")  # D6
        texts = [self.texts.texts[i] for i in view.valid]
        is_kept_A = np.array([text.startswith(navigation) for text in texts])
        left = prune(self.cosines(view), is_kept_A, self.args.top_k)
        return view.valid[left]

    def cosines(self, view):
        """Of each valid action with the task [A]."""
        action_AH = self.table(view.valid)
        (task_H,) = self.table(np.array([view.task]))
        return (action_AH @ task_H).numpy()

    def rank(self, view, action):
        """The place of a valid action by its cosine; the guide likes number 1 best."""
        cosine_A = self.cosines(view)
        is_nearer_A = cosine_A > cosine_A[view.valid == action]
        return 1 + int(is_nearer_A.sum())


def make_vocabulary(texts, size):
    """Byte pairs trained on these texts, with all bytes in it: any text can be written."""
    tokenizer = Tokenizer(BPE())
    lines = pre_tokenizers.Split(Regex(r"[^\n?]*[?\n]"), "isolated")  # D5: pairs within a line
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
    """What an explorer does in a state, and why."""

    view: View
    action: int  # number of its text
    q_A: torch.Tensor  # of all actions that it could choose from


def choose(
    explorer,
    guide,
    views,
    epsilon,
    rng,
    is_greedy=False,
):
    """A choice for each view: of what the guide leaves or, with probability epsilon, of all valid actions.

    `explorer` is a Copy, or another that has its `q`.
    """
    candidates = []
    for view in views:
        if rng.random() < epsilon:
            candidates.append(view.valid)
        else:
            candidates.append(guide.pruned(view))  # E5
    state_N3 = np.array([view.state for view in views])
    q = explorer.q(state_N3, candidates)
    choices = []
    for view, actions, q_A in zip(views, candidates, q, strict=True):
        place = int(q_A.argmax()) if is_greedy else sample(q_A, rng.random())  # E4
        choices.append(Choice(view, int(actions[place]), q_A))
    return choices


def remember(choices, results, replay_buffer, guide, args):
    """Puts a step of each world into the memory; returns what each shows now, and metrics.

    Behind an end it shows another episode's start; the transition has what the step itself showed (D4).
    """
    views = []
    logs = []
    for choice, (result, shown) in zip(choices, results, strict=True):
        _, reward, terminated, truncated, info = result
        after = to_view(info, guide.texts)
        views.append(to_view(shown, guide.texts))  # D4
        policy = torch.distributions.Categorical(logits=choice.q_A)
        metrics = {
            "rollout/candidates": len(choice.q_A),
            "rollout/entropy": policy.entropy().item(),
            "rollout/died": info["died"],
        }
        logs.append(metrics)
        if info["died"]:  # nobody knows what this step did, and nobody counts the episode
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


def play_out(
    explorer,
    guide,
    worlds,
    infos,
    epsilon,
    rng,
    is_greedy,
):
    """An episode in each world from where `infos` are: those in which no Java process died, as they end."""
    played = []
    episodes = [{"variation": info["answer"], "turns": []} for info in infos]
    shown = dict(enumerate(infos))  # by each world whose episode goes on
    while shown:
        views = [to_view(info, guide.texts) for info in shown.values()]
        choices = choose(explorer, guide, views, epsilon, rng, is_greedy)
        texts = [guide.texts.texts[choice.action] for choice in choices]
        actions = dict(zip(shown, texts, strict=True))
        results = worlds.step(actions)
        for i, choice, (result, info) in zip(actions, choices, results, strict=True):
            _, reward, terminated, truncated, _ = result
            turn = {
                "action": info["action"],
                "reply": info["observation"],
                "reward": reward,
            }
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
def descend(loss, optimizer, parameters, max_norm, what):
    """One step of an optimiser; the gradients of `parameters` are clipped. Returns the norm before that."""
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    if not torch.isfinite(loss + norm):
        raise ArithmeticError(f"the {what} diverged (loss {loss:.3g}, gradient {norm:.3g}): lower its rate")
    optimizer.step()
    return norm.item()


def learn(network, target, optimizer, batch, texts, args):
    """One descent on E3 with a list of transitions; returns metrics."""
    columns = Transition(*zip(*batch, strict=True))  # of each field a tuple of N
    state_N3 = np.array(columns.state)
    fields = []
    for i, name in enumerate(FIELDS):
        fields.append(network.encode(name, texts, state_N3[:, i]))
    state_NH = network.state_part(torch.cat(fields, -1))
    action_NH = network.encode_action(texts, columns.action)
    q_N = network.q(state_NH, action_NH)

    figures = (columns.reward, columns.terminated, columns.left)
    figure_3N = torch.tensor(figures, dtype=torch.float32)
    reward_N, terminated_N, left_N = figure_3N.to(q_N.device)
    with torch.no_grad():
        next_q = target.q(np.array(columns.next_state), columns.next_actions)
        next_q_N = torch.stack([q_A.max() for q_A in next_q])
        y_N = q_target(reward_N, next_q_N, terminated_N, left_N, args.gamma)
    loss = nn.functional.huber_loss(q_N, y_N, delta=args.huber_delta)  # E3, D9
    norm = descend(loss, optimizer, network.parameters(), args.max_grad_norm, "explorer")
    return {
        "explorer/loss": loss.item(),
        "explorer/q": q_N.mean().item(),
        "explorer/grad_norm": norm,
    }


# ---------------------------------------------------------- 7. evaluation
def score_metrics(prefix, score):
    """What an episode came to, by its last score: -100 is a failure, and counts as 0."""
    return {
        f"{prefix}score": max(score, 0),
        f"{prefix}success": score >= 100,
        f"{prefix}failure": score < 0,
    }


def greedy_play(
    explorer,
    guide,
    worlds,
    epsilon,
    args,
    step,
):
    """Greedy episodes on dev and test: metrics, and of each the first two. `step` sets the variations."""
    metrics, transcripts = {}, []
    is_greedy = args.explorer == "drrn"
    for split, number in (("dev", args.dev_episodes), ("test", args.eval_episodes)):
        rng = np.random.default_rng(step)
        tasks = WORLDS[args.env].variations(args.task, split)
        indices = rng.integers(len(tasks), size=number)
        if not is_greedy:
            rng = np.random.default_rng((args.seed, step))  # else all seeds would play alike
        played = []
        for start in range(0, number, args.worlds):
            infos = worlds.reset(split, indices[start : start + args.worlds])
            played += play_out(explorer, guide, worlds, infos, epsilon, rng, is_greedy)  # prunes, too (E5)
        rows = [score_metrics(f"eval/{split}_", episode["score"]) for episode in played]
        metrics |= runs.means(rows)
        transcripts += [{"iteration": step, "split": split} | episode for episode in played[:2]]
    return metrics, transcripts


def final_metrics(evaluations):
    """The mean of the last tenth of the evaluations, as the paper has it (A.1.3), by names of a summary."""
    tenth = max(1, len(evaluations) // 10)
    metrics = runs.means(evaluations[-tenth:])
    return {tag.replace("/", "_"): figure for tag, figure in metrics.items()}


# ---------------------------------------------------------- 8. training
def complete(args: Args) -> Args:
    """The arguments, with the steps, the task by its name and the guide by its folder, or none."""
    if args.env not in WORLDS:
        raise ValueError(f"--env {args.env}: the explorer knows {' and '.join(WORLDS)}")
    names = {f"T{n}": task for n, task in enumerate(scienceworld.TASKS)}  # by the paper's numbers
    task = names.get(args.task, args.task)
    steps = args.steps or STEPS[args.env]
    guide = args.guide
    if guide == "auto":
        guide = models.guide_of(args.env, args.runs)
    return replace(args, task=task, steps=steps, guide=guide)


def start_worlds(args):
    """The worlds, side by side; they are all alike."""
    return WORLDS[args.env].Worlds(
        args.worlds,
        task=args.task,
        simplifications=args.simplifications,
        step_limit=args.step_limit,
    )


def main(args: Args) -> dict[str, float]:
    """Steps of all worlds with updates meanwhile, and evaluations; returns what it writes to summary.json."""
    args = complete(args)
    run = runs.Run(args, "lge_drrn")
    num_tasks = len(WORLDS[args.env].variations(args.task, "train"))

    # --- all that learns
    worlds = start_worlds(args)
    words = worlds.texts(args.vocabulary_steps, run.rng)
    texts = Texts(make_vocabulary(words, args.vocabulary))  # D5
    guide = Guide(args, texts)
    torch.manual_seed(args.seed)  # here: to load a guide draws numbers, too
    network = DRRN(texts.tokenizer.get_vocab_size(), args.hidden, args.q_hidden).to(args.device)
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
        # 1. the worlds take a step, in threads
        if not views:  # at the start, and behind a checkpoint: all begin anew
            indices = run.rng.integers(num_tasks, size=args.worlds)
            views = [to_view(info, texts) for info in worlds.reset("train", indices)]
        epsilon = step / args.steps if args.epsilon_schedule == "increasing" else args.epsilon
        choices = choose(explorer, guide, views, epsilon, run.rng)
        actions = {i: texts.texts[choice.action] for i, choice in enumerate(choices)}
        indices = run.rng.integers(num_tasks, size=args.worlds)  # of those that will begin anew
        results = worlds.step(actions, indices)

        # 2. meanwhile the network learns from what is in the memory
        optimizer.param_groups[0]["lr"] = args.lr + (args.lr_end - args.lr) * step / args.steps  # D7
        if is_learning and len(replay_buffer) >= args.batch:
            batch = replay_buffer.sample(args.batch, run.rng)
            logs.append(learn(network, explorer, optimizer, batch, texts, args))
            run.state["updates"] += 1
            if run.state["updates"] % args.copy_every == 0:
                explorer.renew(network)  # D1

        # 3. what came of it is remembered
        views, rows = remember(choices, results, replay_buffer, guide, args)
        logs += rows
        run.state["episodes"] += sum("rollout/score" in row for row in rows)
        if not run.state["successes"]:
            run.state["first_success"] = step
        run.state["successes"] += sum(row.get("rollout/success", 0) for row in rows)

        # 4. a line of metrics after some steps, with an evaluation and a checkpoint after some of these
        is_evaluated = run.is_due(args.eval_every)
        if not (is_evaluated or run.stopped or run.is_due(args.log_every)):
            continue
        metrics = runs.means(logs)
        curve = runs.means([*run.metrics, metrics])  # each line is of as many steps
        metrics["rollout/area"] = curve.get("rollout/score", 0)
        metrics["rollout/first_success"] = run.state["first_success"]
        metrics["memory/priority"] = len(replay_buffer.priority.rows)
        metrics["time/steps_per_second"] = args.worlds * (step - logged) / (time.time() - began)
        samples = []
        if is_evaluated:
            explorer.renew(network)  # what is judged is what is saved
            evaluation, samples = greedy_play(explorer, guide, worlds, epsilon, args, step)
            run.state["evaluations"].append(evaluation)
            metrics |= evaluation
        run.log(metrics, "score|/q$", samples)
        if is_evaluated or run.stopped:
            run.save({})
            views = []  # all begins anew, as in a run that resumes there: episodes and what is encoded
            explorer.renew(network)
            guide.forget()
        logs = []
        logged, began = step, time.time()

    worlds.close()
    final = final_metrics(run.state["evaluations"])
    return run.finish(steps=run.iteration, area=run.metrics[-1]["rollout/area"], **final)


if __name__ == "__main__":
    runs.cli(Args, main)
