"""Does a critic of tokens need more data than one of utterances? Theorem 1 of ArCHer, measured.

    python benchmarks/theory_fpe.py            # three CPU-minutes
    python benchmarks/theory_fpe.py --quick    # a second

A small language world is one MDP of utterances and, token by token, another one. Fitted policy evaluation
runs on both, and its advantages are compared with the exact ones. docs/theory_fpe.md has a result.

Paper: Zhou et al. 2024, arXiv:2402.19446, sec. 4 and App. G. Let g be the discount of an action (gamma for an
utterance, gamma^(1/L) for one of its L tokens) and f(x,pi) the mean of f(x,a) over a ~ pi.
  E1  f_k <- argmin_f sum over D_k of (f(x,a) - r - g f_{k-1}(x',pi))^2    App. G.2   fit_data, average_fit
      for k = 1 ... K, each with data of its own; the result is the average of all f_k (Algorithm 2)
  E2  the error of tokens' advantages is at most that of utterances'       Theorem 1  theorem_ratio
      times (1 - gamma) / (1 - gamma^(1/L)) / sqrt(L): the horizon is longer, but the same dialogues have L
      times as many transitions. By Lemma 4 that is at most sqrt(L).
  E3  A(s,u) = sum_i g^(i-L) A(s,u_<i,u_i), a telescope (ours)             none       advantage_error
      A token's A has mean 0 given what stands before it: the squares of the L errors add up, too.
Narrower than the theorem:
  D1  The class is a table, so that E1's argmin is a mean. Where a cell has no data, all values are minima:
      f_k keeps that of f_{k-1}.
  D2  The policy is known: f(x,pi) is a sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import tyro


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    lengths: tuple[int, ...] = (1, 2, 4, 8)  # L: tokens in an utterance; with the last of --fits
    fits: tuple[int, ...] = (60, 250, 1000)  # K: fits on utterances; the others with the last L but one
    batch: int = 1000  # transitions in the data of a fit, of utterances or tokens; a multiple of every L
    states: int = 3  # S: states of the dialogue
    vocabulary: int = 3  # V: tokens; the world hears their sum modulo V
    gamma: float = 0.95  # discount of an utterance
    noise: float = 1.0  # of the last two columns: a fit misses each cell by a normal error of this size
    seeds: int = 100  # worlds, each with data of its own
    quick: bool = False  # two lengths, few fits, three seeds


# ---------------------------------------------------------- 2. the world, at both levels
# Suffixes name the axes: S states of the dialogue, V sums modulo V, N utterances, L + 1 sums before and after
# each token. Of a level: X its states, C the cells of f, E transitions.
@dataclass
class World:
    """A policy knows s and the sum so far; a token leads to another sum, so that it is named by that sum."""

    reward_SV: np.ndarray  # probability of the reward 1 for the sum of an utterance in s; else 0
    next_SVS: np.ndarray  # probability of the next s
    target_SVV: np.ndarray  # pi: the probability of the next sum, given s and the sum so far
    behaviour_SVV: np.ndarray  # the same of the data
    gamma: float  # discount of an utterance


def make_world(states: int, vocabulary: int, gamma: float, rng: np.random.Generator) -> World:
    """A random world. The behaviour is half pi and half uniform: it never shuns what pi does."""
    reward_SV = rng.random((states, vocabulary))
    next_SVS = rng.dirichlet(np.ones(states), (states, vocabulary))
    target_SVV = rng.dirichlet(np.ones(vocabulary), (states, vocabulary))
    return World(reward_SV, next_SVS, target_SVV, (target_SVV + 1 / vocabulary) / 2, gamma)


@dataclass
class Level:
    """One of the two MDPs. State (i, s, z): i tokens have been said, and their sum is z.

    Cell (i, s, z): one more has led to the sum z. An utterance is one token: the world hears its sum only.
    """

    policy_XC: np.ndarray  # probability of a cell under pi
    next_CX: np.ndarray  # probability of the next state
    reward_C: np.ndarray  # mean reward
    weight_X: np.ndarray  # visits of pi in an utterance, times the squared factor of E3
    gamma: float  # discount of an action


def make_level(world: World, length: int, tokens: bool) -> Level:
    """The MDP of tokens or of utterances."""
    S, V = world.reward_SV.shape
    steps = length if tokens else 1
    gamma = world.gamma ** (1 / steps)
    utterance_SVV = np.linalg.matrix_power(world.target_SVV, length)
    walk_SVSV = np.zeros((S, V, S, V))
    walk_SVSV[range(S), :, range(S)] = world.target_SVV if tokens else utterance_SVV
    policy_XC = np.kron(np.eye(steps), walk_SVSV.reshape(S * V, S * V))

    next_CX = np.eye(steps * S * V, k=S * V)  # on to the next token, for certain and without reward
    next_CX[-S * V :, : S * V : V] = world.next_SVS.reshape(S * V, S)
    reward_C = np.zeros(steps * S * V)
    reward_C[-S * V :] = world.reward_SV.ravel()

    follow_SS = (utterance_SVV[:, 0, :, None] * world.next_SVS).sum(1)
    visits_S = (1 - world.gamma) * np.linalg.solve(np.eye(S) - world.gamma * follow_SS.T, np.ones(S) / S)
    visits_X = np.zeros(steps * S * V)
    visits_X[: S * V : V] = visits_S  # an utterance begins with the sum 0
    for i in range(1, steps):
        visits_X[i * S * V : (i + 1) * S * V] = (visits_X @ policy_XC)[(i - 1) * S * V : i * S * V]
    step_X = np.repeat(np.arange(1, steps + 1), S * V)
    return Level(policy_XC, next_CX, reward_C, visits_X * gamma ** (2 * (step_X - steps)), gamma)


@dataclass
class Data:
    """N independent utterances."""

    state_N: np.ndarray
    sums_NL: np.ndarray  # before the first token, and after each
    reward_N: np.ndarray
    after_N: np.ndarray  # the next state


def sample(world: World, length: int, count: int, rng: np.random.Generator) -> Data:
    """Utterances of the behaviour, in all states equally often."""
    S = len(world.reward_SV)

    def draw(chances_NK):
        return (rng.random((count, 1)) > chances_NK.cumsum(1)[:, :-1]).sum(1)

    state_N = rng.integers(S, size=count)
    sums_NL = np.zeros((count, length + 1), int)
    for i in range(length):
        sums_NL[:, i + 1] = draw(world.behaviour_SVV[state_N, sums_NL[:, i]])
    heard_N = sums_NL[:, -1]
    reward_N = (rng.random(count) < world.reward_SV[state_N, heard_N]).astype(float)
    return Data(state_N, sums_NL, reward_N, draw(world.next_SVS[state_N, heard_N]))


def transitions(world: World, data: Data, tokens: bool):
    """Cell, reward and next state of the actions, [N, L] for tokens or [N, 1] for utterances."""
    S, V = world.reward_SV.shape
    sums_NL = data.sums_NL[:, 1:] if tokens else data.sums_NL[:, -1:]
    cell_NL = (np.arange(sums_NL.shape[1]) * S + data.state_N[:, None]) * V + sums_NL
    reward_NL = np.zeros(cell_NL.shape)
    reward_NL[:, -1] = data.reward_N
    next_NL = cell_NL + S * V
    next_NL[:, -1] = data.after_N * V
    return cell_NL, reward_NL, next_NL


# ---------------------------------------------------------- 3. the maths: pure functions
def fit_data(f_C: np.ndarray, level: Level, cell_E, reward_E, next_E) -> np.ndarray:
    """E1, one fit: the least squares fit of a cell is the mean of its targets."""
    target_E = reward_E + level.gamma * (level.policy_XC @ f_C)[next_E]  # E1, D2
    count_C = np.bincount(cell_E, minlength=len(f_C))
    mean_C = np.bincount(cell_E, target_E, len(f_C)) / np.maximum(count_C, 1)
    return np.where(count_C > 0, mean_C, f_C)  # D1


def average_fit(fit: Callable[[np.ndarray, int], np.ndarray], cells: int, count: int) -> np.ndarray:
    """E1, Algorithm 2: from f = 0, `fit` of f and k makes the next one; the average of all.

    >>> average_fit(lambda f_C, k: 1 + 0.5 * f_C, cells=1, count=2)  # 1 and 1.5
    array([1.25])
    """
    f_C = np.zeros(cells)
    total_C = np.zeros(cells)
    for k in range(count):
        f_C = fit(f_C, k)
        total_C += f_C
    return total_C / count


def exact(level: Level) -> np.ndarray:
    """Q of every cell."""
    backup_CC = level.gamma * level.next_CX @ level.policy_XC
    return np.linalg.solve(np.eye(len(backup_CC)) - backup_CC, level.reward_C)


def advantage_error(level: Level, wrong_C: np.ndarray) -> float:
    """E3: root mean square over pi's utterances of the error of their advantages, from errors of Q."""
    wrong_XC = wrong_C - (level.policy_XC @ wrong_C)[:, None]
    return float(np.sqrt(level.weight_X @ (level.policy_XC * wrong_XC**2).sum(1)))  # E3


def theorem_ratio(gamma: float, length: int) -> float:
    """E2: how many times as much error Theorem 1 allows a critic of tokens.

    >>> [round(theorem_ratio(0.95, length), 2) for length in (1, 2, 4, 8)]
    [1.0, 1.4, 1.96, 2.77]
    """
    return (1 - gamma) / (1 - gamma ** (1 / length)) / length**0.5  # E2


# ---------------------------------------------------------- 4. the table
COLUMNS = {
    "L": "tokens in an utterance",
    "N": "utterances in the data of all fits together",
    "theorem": "E2: what Theorem 1 allows, in multiples of the error of utterances",
    "size": "of the exact advantages of utterances, root mean square as all errors",
    "utterances": "error of these advantages after K fits on utterances",
    "tokens": "after K L fits on tokens of the same dialogues, in multiples of that",
    "as many": "after K fits on tokens: as many transitions, from N / L dialogues; likewise",
    "noisy": "error after K fits on utterances with exact targets, each of which misses each cell by --noise",
    "noisy tokens": "after K such fits on tokens, in multiples of that",
}


def measure(args: Args, length: int, fits: int, seed: int) -> list[float]:
    """A row's measured numbers for one world and its data."""
    rng = np.random.default_rng(seed)
    world = make_world(args.states, args.vocabulary, args.gamma, rng)
    data = sample(world, length, fits * args.batch, rng)

    def from_data(tokens, count):
        level = make_level(world, length, tokens)
        parts = [part.reshape(-1, args.batch) for part in transitions(world, data, tokens)]
        f_C = average_fit(
            lambda f_C, k: fit_data(f_C, level, *(part[k] for part in parts)), len(level.reward_C), count
        )
        return advantage_error(level, f_C - exact(level))

    def from_noise(tokens):
        level = make_level(world, length, tokens)
        backup_CC = level.gamma * level.next_CX @ level.policy_XC
        noise_KC = rng.normal(0, args.noise, (fits, len(backup_CC)))
        f_C = average_fit(lambda f_C, k: level.reward_C + backup_CC @ f_C + noise_KC[k], len(backup_CC), fits)
        return advantage_error(level, f_C - exact(level))

    utterances = make_level(world, length, tokens=False)
    return [
        advantage_error(utterances, exact(utterances)),
        from_data(False, fits),
        from_data(True, fits * length),
        from_data(True, fits),
        from_noise(False),
        from_noise(True),
    ]


def quotient(top_N: np.ndarray, bottom_N: np.ndarray) -> str:
    """Root mean square of the one over that of the other; with the standard error, by leaving out each."""
    top_N, bottom_N = top_N**2, bottom_N**2
    without_N = np.sqrt((top_N.sum() - top_N) / (bottom_N.sum() - bottom_N))
    error = without_N.std() * np.sqrt(len(without_N) - 1)
    return f"{np.sqrt(top_N.sum() / bottom_N.sum()):.2f} ± {error:.2f}"


def row(args: Args, length: int, fits: int) -> list[str]:
    """Over the seeds."""
    values = np.array([measure(args, length, fits, seed) for seed in range(args.seeds)]).T
    size, utterances, tokens, as_many, noisy, noisy_tokens = values
    return [
        str(length),
        f"{fits * args.batch:,}",
        f"{theorem_ratio(args.gamma, length):.2f}",
        f"{np.sqrt((size**2).mean()):.3f}",
        f"{np.sqrt((utterances**2).mean()):.4f}",
        quotient(tokens, utterances),
        quotient(as_many, utterances),
        f"{np.sqrt((noisy**2).mean()):.4f}",
        quotient(noisy_tokens, noisy),
    ]


def main(args: Args) -> str:
    """Prints and returns the table as markdown."""
    if args.quick:
        args = replace(args, lengths=(1, 2, 4), fits=(10, 20), seeds=3)
    points = [(length, args.fits[-1]) for length in args.lengths]
    points += [(args.lengths[-2], fits) for fits in args.fits[:-1]]
    rows = [list(COLUMNS), ["---:"] * len(COLUMNS), *(row(args, *point) for point in points)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    print(table)
    print(*(f"{name:>12}  {meaning}" for name, meaning in COLUMNS.items()), sep="\n")
    return table


if __name__ == "__main__":
    main(tyro.cli(Args))
