"""Does a critic of tokens need more data than one of utterances? Section 4 of ArCHer,
where every value is known.

    python benchmarks/theory_fpe.py                  # a minute on one CPU core
    python benchmarks/theory_fpe.py --quick          # a second
    python benchmarks/theory_fpe.py --out table.md   # as markdown, too

A small language world is one MDP of utterances and, unrolled, one of tokens. Fitted policy evaluation (FPE)
runs on both with the same dialogues; printed is the error of its advantages, beside a bound.
docs/theory_fpe.md has a result.

Paper: Zhou et al. 2024, arXiv:2402.19446, section 4 and appendix. Its text was not at hand for this file: the
question, FPE (its Algorithm 2) and what Theorem 1 assumes (Bellman completeness, concentrability C) and says
(tokens have an L times longer horizon, and so the greater error) are told second-hand, and none of its
constants is quoted. Derived here are E2 and E3; ours is the world. With g the discount of a level and f(x,pi)
the mean of f(x,a) over a ~ pi:
  E1  f_k <- argmin_f sum (f(x,a) - r - g f_{k-1}(x',pi))^2;  A(x,a) = f(x,a) - f(x,pi)          fit,
      advantages
  E2  A(s,u) = sum_i g^(i-L) A(s,u_<i,u_i), where g = gamma^(1/L) for tokens: a telescope
      utterance_error A token's A has mean 0 given what is before it: in the mean square, the squares of the L
      errors add up, too.
  E3  mean square of the error of A over d^pi  <=  C G^2 Vmax^2 d / (l (N + 1))                  bound
      for N utterances, d cells in the table, l steps in an utterance (1, or L), and G the sum of g^t over all
      steps
Vmax is the value of a reward of 1 in every turn. E3: an utterance of the data falls with probability p into a
cell, m ~ Binomial(N, p) of them. As it has l steps, the p of all cells add up to l, and a cell's share of the
data is p / l. The cell's fit is 0 if m = 0, else the mean of m targets in [0, Vmax]. These are independent
given the later fits, because a state knows its step, so that no two regressions share a transition. Hence p
times its mean square error is at most p Vmax^2 (E[1/4m; m>0] + P(m=0)) <= Vmax^2 / (N + 1). A regression's
error reaches earlier steps discounted, and |g*e|_2 <= |g|_1 |e|_2 (Young). From the data's norm to d^pi's
costs C; to take f(x,pi) off is a projection, free. Our setting is narrower than the theorem's:
  D1  Complete tables instead of any complete class: regressions are exact, and d stands where log|F| would.
  D2  H turns, and a state knows its turn: FPE is done after as many regressions as steps (H, or H L).
  D3  A level's policy is known: f(x,pi) is a sum over all actions, at the level of utterances, too.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    samples: tuple[int, ...] = (300, 1000, 3000, 10_000, 30_000, 100_000)  # N of the sweep over N
    lengths: tuple[int, ...] = (1, 2, 4, 8)  # L of the sweep over L
    at_samples: int = 10_000  # N of the sweep over L
    at_length: int = 4  # L of the sweep over N
    turns: int = 4  # H, utterances in a dialogue
    states: int = 3  # dialogue states
    vocabulary: int = 3  # V tokens; the world hears their sum modulo V
    gamma: float = 0.95  # discount of an utterance; a token's is its L-th root: a turn is discounted alike
    noise: float = 0.02  # of the last two errors: the normal error by which a regression misses every cell
    seeds: int = 50  # worlds, each with data of its own
    quick: bool = False  # two values of N and of L, three seeds
    out: Path | None = None  # file for the tables as markdown


def stop(message: str):
    """Ends the program for bad input: one line that says what is wrong and what to do, exit code 2."""
    print(f"theory_fpe.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def check(args: Args) -> None:
    for name in ("samples", "lengths", "at_samples", "at_length", "turns", "states", "seeds"):
        if np.size(getattr(args, name)) == 0 or np.min(getattr(args, name)) < 1:
            stop(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")
    if args.vocabulary < 2:
        stop(f"--vocabulary must be 2 or more, not {args.vocabulary}")
    if not 0 < args.gamma < 1:
        stop(f"--gamma must lie between 0 and 1, not {args.gamma}")
    if not 0 <= args.noise < float("inf"):
        stop(f"--noise must be 0 or more, not {args.noise}")
    cells = args.turns * args.states * args.vocabulary ** max(*args.lengths, args.at_length)
    if cells > 10**6:
        stop(
            f"a table of all utterances would have {cells:.0e} cells; "
            "take fewer --lengths or a smaller --vocabulary"
        )
    if args.out and (args.out.is_dir() or not args.out.parent.is_dir()):
        stop(f"--out {args.out} must be a file in a folder that is there")


# ---------------------------------------------------------- 2. the world, at both levels
# Suffixes name the axes: S dialogue states, V tokens (and sums modulo V), L tokens of an utterance, N
# utterances of the data, B states that begin a turn (turn * S + s). Of a level: X states, A actions, C cells,
# E transitions.
@dataclass
class World:
    """The world hears the sum z of an utterance's tokens modulo V; a policy knows s and the sum so far."""

    turns: int
    gamma: float
    reward_SV: np.ndarray  # probability of the reward 1 for z in s; else 0
    next_SVS: np.ndarray  # probability of the next s
    target_SVV: np.ndarray  # pi(token | s, sum so far)
    behaviour_SVV: np.ndarray  # the same of the data


def make_world(turns: int, states: int, vocabulary: int, gamma: float, rng: np.random.Generator) -> World:
    """A random world. The behaviour is half pi and half uniform: it never shuns what pi does."""
    reward_SV = rng.random((states, vocabulary))
    next_SVS = rng.dirichlet(np.ones(states), (states, vocabulary))
    target_SVV = rng.dirichlet(np.ones(vocabulary), (states, vocabulary))
    return World(turns, gamma, reward_SV, next_SVS, target_SVV, (target_SVV + 1 / vocabulary) / 2)


@dataclass
class Level:
    """One of the two MDPs. States 0 to B - 1 begin a turn, -1 is the end of the dialogue."""

    children: list[np.ndarray]  # what a token makes of a prefix, see prefixes
    first: np.ndarray  # first cell of each step of an utterance, and their number C
    cell_XA: np.ndarray  # a cell is what has been said after the action: what the function class tells apart
    policy_XA: np.ndarray
    behaviour_XA: np.ndarray
    # the model: cell [E], next state [E], probability [E], mean reward * probability [E]
    edges: tuple[np.ndarray, ...]
    step_X: np.ndarray  # place of the state's action in its utterance, from 0
    length: int  # actions in an utterance: L, or 1
    steps: int  # actions in a dialogue
    gamma: float  # discount of an action


def prefixes(vocabulary: int, length: int, table: bool):
    """The prefixes of 0 to L tokens that the function class tells apart: all (V^i), or only sums modulo V.

    Returns children, L arrays [prefixes, V] of the prefix that a token leads to, and sums, L + 1 arrays
    [prefixes].

    >>> prefixes(2, 2, table=True)[0][1].tolist(), prefixes(2, 2, table=False)[0][1].tolist()
    ([[0, 1], [2, 3]], [[0, 1], [1, 0]])
    """
    children, sums = [], [np.zeros(1, int)]
    for _ in range(length):
        heard = (sums[-1][:, None] + np.arange(vocabulary)) % vocabulary
        children.append(np.arange(heard.size).reshape(heard.shape) if table else heard)
        sums.append(heard.ravel() if table else np.arange(vocabulary))
    return children, sums


def make_level(world: World, length: int, tokens: bool, table: bool) -> Level:
    """The MDP of tokens or of utterances. Cell c inside an utterance leads to state c + B: its prefix,
    to be continued.

    Utterances of one cell count as one action; the cell decides what the world answers, so that this loses
    nothing.
    """
    S, V = world.reward_SV.shape
    turn, state = np.divmod(np.arange(world.turns * S), S)
    B, L = len(turn), length if tokens else 1
    children, sums = prefixes(V, length, table)

    def flat(policy_SVV):
        by_step = [policy_SVV[state][:, z] for z in sums[:-1]]  # [B, prefixes, V] each
        if tokens:
            return np.concatenate([step.reshape(-1, V) for step in by_step])
        chance_BA = np.ones((B, 1))  # the product over the tokens, added up over all ways to a cell
        for child, step in zip(children, by_step, strict=True):
            flow = (chance_BA[:, :, None] * step).reshape(B, -1)
            chance_BA = np.stack([np.bincount(child.ravel(), row) for row in flow])
        return chance_BA

    actions = children if tokens else [np.arange(len(sums[-1]))[None]]
    first = np.cumsum([0, *(B * len(z) for z in sums[-L:])])
    cells = [
        f + np.arange(B)[:, None, None] * (a.max() + 1) + a for f, a in zip(first[:-1], actions, strict=True)
    ]
    cell_XA = np.concatenate([part.reshape(-1, part.shape[-1]) for part in cells])
    inner = np.arange(first[-2])  # for certain on to the next state, without reward
    ends = np.arange(first[-2], first[-1])  # what the world answers to an utterance:
    chance_BAS = world.next_SVS[state][:, sums[-1]]
    next_BS = np.where(turn[:, None] + 1 < world.turns, (turn[:, None] + 1) * S + np.arange(S), -1)
    edges = (
        np.append(inner, np.repeat(ends, S)),
        np.append(inner + B, np.broadcast_to(next_BS[:, None], chance_BAS.shape)),
        np.append(np.ones(len(inner)), chance_BAS),
        np.append(np.zeros(len(inner)), chance_BAS * world.reward_SV[state][:, sums[-1], None]),
    )
    step_X = np.repeat(np.arange(L), [B * len(z) for z in sums[:L]])
    policies = flat(world.target_SVV), flat(world.behaviour_SVV)
    return Level(
        children, first, cell_XA, *policies, edges, step_X, L, world.turns * L, world.gamma ** (1 / L)
    )


def sample(world: World, length: int, count: int, rng: np.random.Generator):
    """N independent transitions (s,u,r,s') as the behaviour makes them, each of a random turn.

    Returns the state that begins the turn [N], tokens [N, L], reward [N], the state that begins the next turn
    [N].
    """
    S, V = world.reward_SV.shape
    level = make_level(world, length, tokens=False, table=False)
    begin = rng.choice(world.turns * S, count, p=visits(level, level.behaviour_XA)[0])
    turn, state = np.divmod(begin, S)

    def draw(chances_NK):
        return (rng.random((count, 1)) > chances_NK.cumsum(1)[:, :-1]).sum(1)

    tokens, heard = np.zeros((count, length), int), np.zeros(count, int)
    for i in range(length):
        tokens[:, i] = draw(world.behaviour_SVV[state, heard])
        heard = (heard + tokens[:, i]) % V
    reward = (rng.random(count) < world.reward_SV[state, heard]).astype(float)
    after = draw(world.next_SVS[state, heard])
    return begin, tokens, reward, np.where(turn + 1 < world.turns, (turn + 1) * S + after, -1)


def transitions(level: Level, data):
    """The data in the form of level.edges, with weights 1: [N] of utterances, or [L * N] of tokens."""
    begin, tokens, reward, after = data
    prefix, said = 0, []
    for child, token in zip(level.children, tokens.T, strict=True):
        prefix = child[prefix, token]
        said.append(begin * (child.max() + 1) + prefix)
    cell = np.concatenate([f + c for f, c in zip(level.first[:-1], said[-level.length :], strict=True)])
    inner = len(cell) - len(begin)
    B = np.count_nonzero(level.step_X == 0)
    return cell, np.append(cell[:inner] + B, after), np.ones(len(cell)), np.append(np.zeros(inner), reward)


# ---------------------------------------------------------- 3. the maths: pure functions
def fit(edges, cell_XA, policy_XA, gamma: float, regressions: int, disturb=np.zeros) -> np.ndarray:
    """E1: FPE from f = 0; Q [X, A]. The least squares fit of a cell is the mean of its targets,
    0 without data.

    `edges`: cell, next state, weight, reward * weight, all [E]: the data, or the model for the exact values.
    `disturb`: number of cells -> errors [C] that are added to a regression.

    >>> edges = [0, 1], [1, -1], [1.0, 2.0], [0.0, 6.0]
    >>> fit(edges, np.array([[0], [1]]), np.ones((2, 1)), 0.5, regressions=2).tolist()
    [[1.5], [3.0]]
    """
    cell_E, next_E, weight_E, reward_E = edges
    weight_C, reward_C = (np.bincount(cell_E, w, minlength=cell_XA.max() + 1) for w in (weight_E, reward_E))
    q_XA = np.zeros_like(policy_XA)
    for _ in range(regressions):
        v_X = np.append((policy_XA * q_XA).sum(1), 0.0)  # D3; the end, state -1, is worth 0
        target_C = reward_C + gamma * np.bincount(cell_E, weight_E * v_X[next_E], minlength=len(weight_C))
        f_C = target_C / np.where(weight_C > 0, weight_C, 1) + disturb(len(weight_C))  # E1, D1
        q_XA = f_C[cell_XA]
    return q_XA


def advantages(q_XA: np.ndarray, policy_XA: np.ndarray) -> np.ndarray:
    """E1: Q(x,a) minus its mean over pi [X, A]."""
    return q_XA - (policy_XA * q_XA).sum(1, keepdims=True)  # E1


def visits(level: Level, policy_XA: np.ndarray):
    """Shares of the visits to states [X] and cells [C] under a policy, over all steps;
    all s begin a dialogue alike."""
    cell_E, next_E, chance_E, _ = level.edges
    X, S = len(policy_XA), np.count_nonzero(level.step_X == 0) * level.length // level.steps
    now_X, states_X, cells_C = np.where(np.arange(X) < S, 1 / S, 0), 0, 0
    for _ in range(level.steps):
        now_C = np.bincount(level.cell_XA.ravel(), (now_X[:, None] * policy_XA).ravel())
        states_X, cells_C = states_X + now_X / level.steps, cells_C + now_C / level.steps
        # without those that ended
        now_X = np.bincount(next_E + 1, now_C[cell_E] * chance_E, minlength=X + 1)[1:]
    return states_X, cells_C


def action_error(level: Level, wrong_XA: np.ndarray) -> float:
    """Root mean square over d^pi of errors of the advantages of actions, be these tokens or utterances."""
    return float(np.sqrt(visits(level, level.policy_XA)[0] @ (level.policy_XA * wrong_XA**2).sum(1)))


def utterance_error(level: Level, wrong_XA: np.ndarray) -> float:
    """E2: the same for utterances, whose advantages are put together
    from those of tokens where actions are tokens."""
    weight_X = np.sqrt(level.length) * level.gamma ** (level.step_X + 1 - level.length)
    return action_error(level, weight_X[:, None] * wrong_XA)  # E2


def bound(level: Level, samples: int) -> float:
    """E3: what action_error, in root mean square over data sets of N utterances, cannot exceed."""
    wanted_C, seen_C = (visits(level, policy)[1] for policy in (level.policy_XA, level.behaviour_XA))
    concentrability = (wanted_C / seen_C).max()
    horizon = (1 - level.gamma**level.steps) / (1 - level.gamma)  # G
    # Vmax: a reward of 1 in every turn
    highest = (1 - level.gamma**level.steps) / (1 - level.gamma**level.length)
    # E3
    return float(horizon * highest * np.sqrt(concentrability * len(seen_C) / (level.length * (samples + 1))))


# ---------------------------------------------------------- 4. the sweeps
COLUMNS = {
    "class": "what f tells apart: all utterances and prefixes (table), or only their sums modulo V (sum)",
    "L": "tokens in an utterance",
    "N": "utterances in the data",
    "size": "root mean square of the exact advantages of utterances, "
    "whose errors follow, in root mean square, too",
    "utterance": "FPE on utterances: N transitions, H regressions",
    "tokens": "FPE on tokens, same dialogues: N L transitions, H L regressions",
    "a token": "the same, but the error of the advantages of tokens",
    "N tokens": "FPE on tokens with as many transitions as on utterances: N / L dialogues",
    "H fits": "FPE on tokens with as many regressions as on utterances: H",
    "utt. noise": "FPE on utterances with --noise in every regression",
    "tok. noise": "FPE on tokens, likewise",
    "E3 utt.": "bound on 'utterance'",
    "E3 tok.": "bound on 'a token'",
}


def measure(args: Args, table: bool, length: int, samples: int, seed: int) -> list[float]:
    """A row's numbers for one world and data set."""
    rng = np.random.default_rng(seed)
    world = make_world(args.turns, args.states, args.vocabulary, args.gamma, rng)
    data = sample(world, length, samples, rng)
    fewer = [part[: max(1, samples // length)] for part in data]
    utterances, tokens = (make_level(world, length, is_tokens, table) for is_tokens in (False, True))

    def solve(level, edges, regressions, disturb=np.zeros):
        q_XA = fit(edges, level.cell_XA, level.policy_XA, level.gamma, regressions, disturb)
        return advantages(q_XA, level.policy_XA)

    def wrong(level, data, regressions, disturb=np.zeros):
        return solve(level, transitions(level, data), regressions, disturb) - solve(
            level, level.edges, level.steps
        )

    def noise(cells):
        return rng.normal(0, args.noise, cells)

    # D2: as many regressions as steps, but where fewer are the point.
    H, T, whole = utterances.steps, tokens.steps, wrong(tokens, data, tokens.steps)
    return [
        utterance_error(utterances, solve(utterances, utterances.edges, H)),
        utterance_error(utterances, wrong(utterances, data, H)),
        utterance_error(tokens, whole),
        action_error(tokens, whole),
        utterance_error(tokens, wrong(tokens, fewer, T)),
        utterance_error(tokens, wrong(tokens, data, H)),
        utterance_error(utterances, wrong(utterances, data, H, noise)),
        utterance_error(tokens, wrong(tokens, data, T, noise)),
        bound(utterances, samples),
        bound(tokens, samples),
    ]


def row(args: Args, table: bool, length: int, samples: int) -> list[str]:
    """Means over the seeds; for errors also the standard error of the mean."""
    values = np.array([measure(args, table, length, samples, seed) for seed in range(args.seeds)])
    mean, sem = values.mean(0), values.std(0, ddof=args.seeds > 1) / np.sqrt(args.seeds)
    errors = [f"{m:.4f}±{s:.4f}" for m, s in zip(mean[1:8], sem[1:8], strict=True)]
    numbers = [f"{mean[0]:.3f}", *errors, f"{mean[8]:.2f}", f"{mean[9]:.2f}"]
    return ["table" if table else "sum", str(length), str(samples), *numbers]


def main(args: Args) -> None:
    if args.quick:
        args = replace(args, samples=(300, 3000), lengths=(1, 3), at_samples=1000, at_length=3, seeds=3)
    check(args)
    sweeps = {
        "N": [(args.at_length, n) for n in args.samples],
        "L": [(length, args.at_samples) for length in args.lengths],
    }
    pages = []
    for name, points in sweeps.items():
        rows = [list(COLUMNS), *(row(args, table, *point) for table in (True, False) for point in points)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print(f"Against {name}, mean of {args.seeds} seeds ± standard error")
        for texts in rows:
            print("  ".join(text.rjust(width) for text, width in zip(texts, widths, strict=True)))
        print()
        pages.append("".join(f"| {' | '.join(r)} |\n" for r in [rows[0], ["---:"] * len(widths), *rows[1:]]))
    print(*(f"{name:>10}  {meaning}" for name, meaning in COLUMNS.items()), sep="\n")
    if args.out:  # whole or not at all
        temporary = args.out.with_name(args.out.name + ".tmp")
        temporary.write_text("\n".join(pages), encoding="utf-8")
        os.replace(temporary, args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
