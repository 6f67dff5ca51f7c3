"""benchmarks/theory_fpe.py against loops over a tiny world, and what its docstring and its page claim."""

import ast
import doctest
import math
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks import theory_fpe as fpe

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/theory_fpe.py"
S, V, L, GAMMA = 2, 3, 3, 0.8
each_level = pytest.mark.parametrize("tokens", [False, True], ids=["utterances", "tokens"])


@pytest.fixture
def world():
    return fpe.make_world(S, V, GAMMA, np.random.default_rng(7))


def cell(i, s, z):
    return (i * S + s) * V + z


# ------------------------------------------------------------------------------------ the naive way


def naive_chance(world, s, sums, policy=None):
    """Of an utterance, given by the sums after its tokens."""
    policy = world.target_SVV if policy is None else policy
    return math.prod(policy[s, before, after] for before, after in zip((0, *sums), sums, strict=False))


def naive_values(world, rounds=120):
    """Q of (s, sum) and V of s, by looking ever further ahead."""
    value = [0.0] * S
    for _ in range(rounds):
        q = {}
        for s, z in product(range(S), range(V)):
            later = sum(world.next_SVS[s, z, after] * value[after] for after in range(S))
            q[s, z] = world.reward_SV[s, z] + GAMMA * later
        utterances = list(product(range(V), repeat=L))
        value = [sum(naive_chance(world, s, u) * q[s, u[-1]] for u in utterances) for s in range(S)]
    return q, value


def naive_visits(world, rounds=120):
    """Discounted share of the turns in s."""
    now, share = np.ones(S) / S, np.zeros(S)
    for t in range(rounds):
        share += (1 - GAMMA) * GAMMA**t * now
        later = np.zeros(S)
        for s, u, after in product(range(S), product(range(V), repeat=L), range(S)):
            later[after] += now[s] * naive_chance(world, s, u) * world.next_SVS[s, u[-1], after]
        now = later
    return share


# ----------------------------------------------------------------------------------------- both levels


@each_level
def test_exact_values(world, tokens):
    level = fpe.make_level(world, L, tokens)
    q_C = fpe.exact(level)
    q, value = naive_values(world)
    last = L - 1 if tokens else 0
    for (s, z), expected in q.items():
        assert q_C[cell(last, s, z)] == pytest.approx(expected, abs=1e-8)
    value_X = level.policy_XC @ q_C / level.gamma**last  # a token's is discounted as far as the reward
    assert [value_X[cell(0, s, 0)] for s in range(S)] == pytest.approx(value, abs=1e-8)


@each_level
def test_probabilities_add_up(world, tokens):
    level = fpe.make_level(world, L, tokens)
    np.testing.assert_allclose(level.policy_XC.sum(1), 1)
    np.testing.assert_allclose(level.next_CX.sum(1), 1)
    assert level.gamma ** (L if tokens else 1) == pytest.approx(GAMMA)


@each_level
def test_error_is_that_over_all_utterances(world, tokens):
    """E3, with errors that have nothing to do with each other."""
    level = fpe.make_level(world, L, tokens)
    wrong_C = np.random.default_rng(1).normal(size=len(level.reward_C))
    baseline_X = level.policy_XC @ wrong_C
    square = 0.0
    visits_S = naive_visits(world)
    for s, u in product(range(S), product(range(V), repeat=L)):
        way = zip((0, *u), u, strict=False) if tokens else [(0, u[-1])]
        error = 0.0
        for i, (before, after) in enumerate(way):
            discount = GAMMA ** ((i + 1 - L) / L) if tokens else 1.0
            error += discount * (wrong_C[cell(i, s, after)] - baseline_X[cell(i, s, before)])
        square += visits_S[s] * naive_chance(world, s, u) * error**2
    assert fpe.advantage_error(level, wrong_C) == pytest.approx(math.sqrt(square), rel=1e-9)


def test_advantages_are_the_same_at_both_levels(world):
    """E3: the telescope of the exact ones, of which the size is one."""
    sizes = []
    for tokens in (False, True):
        level = fpe.make_level(world, L, tokens)
        sizes.append(fpe.advantage_error(level, fpe.exact(level)))
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-9) and sizes[0] > 0.05


# -------------------------------------------------------------------------------------------- the data


def test_data_are_drawn_as_the_world_and_the_behaviour_say(world):
    world.target_SVV[:] = [0.9, 0.05, 0.05]
    world.behaviour_SVV[:] = [0.5, 0.3, 0.2]
    data = fpe.sample(world, 2, 100_000, np.random.default_rng(3))
    assert (data.sums_NL[:, 0] == 0).all()
    assert np.bincount(data.state_N) / 100_000 == pytest.approx(np.ones(S) / S, abs=0.01)
    for i in (1, 2):
        assert np.bincount(data.sums_NL[:, i]) / 100_000 == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    for s, z in product(range(S), range(V)):
        among = (data.state_N == s) & (data.sums_NL[:, -1] == z)
        assert data.reward_N[among].mean() == pytest.approx(world.reward_SV[s, z], abs=0.02)
        share = np.bincount(data.after_N[among], minlength=S) / among.sum()
        assert share == pytest.approx(world.next_SVS[s, z], abs=0.02)


@each_level
def test_transitions_are_the_models(world, tokens):
    level = fpe.make_level(world, L, tokens)
    data = fpe.sample(world, L, 3000, np.random.default_rng(5))
    cell_NL, reward_NL, next_NL = fpe.transitions(world, data, tokens)
    assert cell_NL.shape == (3000, L if tokens else 1)
    assert (level.next_CX[cell_NL, next_NL] > 0).all()
    assert (reward_NL.sum(1) == data.reward_N).all() and (reward_NL[:, :-1] == 0).all()
    if tokens:
        before_NL = cell_NL[:, :-1] + S * V
        assert (before_NL == next_NL[:, :-1]).all(), "a token goes on where the one before it led"
        assert (level.policy_XC[next_NL[:, :-1], cell_NL[:, 1:]] > 0).all()
    assert (next_NL[:, -1] == data.after_N * V).all()


# ------------------------------------------------------------------------------------------- the fits


@each_level
def test_a_fit_is_least_squares(world, tokens):
    """E1: as numpy's, on indicators of the cells. Without data a cell keeps its value (D1)."""
    level = fpe.make_level(world, L, tokens)
    data = fpe.sample(world, L, 12, np.random.default_rng(2))
    parts = [part.ravel() for part in fpe.transitions(world, data, tokens)]
    before_C = np.random.default_rng(0).normal(size=len(level.reward_C))
    targets = []
    for reward, after in zip(*parts[1:], strict=True):
        later = sum(p * f for p, f in zip(level.policy_XC[after], before_C, strict=True))
        targets.append(reward + level.gamma * later)
    solved = np.linalg.lstsq(np.eye(len(before_C))[parts[0]], np.array(targets), rcond=None)[0]
    seen = np.isin(np.arange(len(before_C)), parts[0])
    fitted = fpe.fit_data(before_C, level, *parts)
    np.testing.assert_allclose(fitted[seen], solved[seen])
    assert not seen.all() and (fitted[~seen] == before_C[~seen]).all()


def test_the_result_is_the_average_of_all_fits():
    """Algorithm 2: not the last one; f_0 = 0 is none of them."""
    seen = []

    def fit(f_C, k):
        seen.append((k, f_C.tolist()))
        return f_C + np.array([1.0, 10.0])

    assert fpe.average_fit(fit, cells=2, count=3).tolist() == [2.0, 20.0]
    assert seen == [(0, [0.0, 0.0]), (1, [1.0, 10.0]), (2, [2.0, 20.0])]


@each_level
def test_error_falls_with_the_root_of_the_fits(world, tokens):
    level = fpe.make_level(world, 2, tokens)
    errors = []
    for fits in (40, 640):
        squares = []
        for seed in range(8):
            data = fpe.sample(world, 2, fits * 200, np.random.default_rng(seed))
            parts = [part.reshape(fits, -1) for part in fpe.transitions(world, data, tokens)]
            found_C = fpe.average_fit(
                lambda f_C, k, parts=parts: fpe.fit_data(f_C, level, *(part[k] for part in parts)),
                len(level.reward_C),
                fits,
            )
            squares.append(fpe.advantage_error(level, found_C - fpe.exact(level)) ** 2)
        errors.append(math.sqrt(np.mean(squares)))
    assert errors[1] < 0.1 * fpe.advantage_error(level, fpe.exact(level))
    assert 2.5 < errors[0] / errors[1] < 8


@pytest.mark.parametrize("gamma", [0.5, 0.95, 0.999])
def test_the_theorem_allows_at_most_the_root_of_the_length(gamma):
    """E2 and Lemma 4; the bound is met as gamma goes to 1."""
    for length in (1, 2, 8, 64):
        assert fpe.theorem_ratio(gamma, length) <= length**0.5 + 1e-12
    assert fpe.theorem_ratio(0.99999, 64) == pytest.approx(8, rel=1e-3)


# ------------------------------------------------------------------------------------------ the table


def test_every_fit_has_data_of_its_own(monkeypatch):
    """No utterance reaches two fits on one level; tokens see all dialogues, or the first 1 / L of them."""
    calls = []
    real = fpe.fit_data

    def spy(f_C, level, cell_E, reward_E, next_E):
        calls.append((len(f_C), len(cell_E), cell_E.__array_interface__["data"][0]))
        return real(f_C, level, cell_E, reward_E, next_E)

    monkeypatch.setattr(fpe, "fit_data", spy)
    args = fpe.Args(batch=40)
    values = fpe.measure(args, length=2, fits=5, seed=0)
    assert len(values) == 6 and all(value > 0 for value in values)
    assert [cells for cells, *_ in calls] == [9] * 5 + [18] * 10 + [18] * 5
    assert {count for _, count, _ in calls} == {40}
    for part in (calls[:5], calls[5:15], calls[15:]):
        assert len({place for *_, place in part}) == len(part)


def test_what_the_page_says_shows_in_small():
    """Tokens lose little from the same dialogues; per transition, or where every fit errs, about sqrt(L)."""
    args = fpe.Args(batch=400, seeds=30)
    values = np.array([fpe.measure(args, 4, 150, seed) for seed in range(30)])
    _, utterances, tokens, as_many, noisy, noisy_tokens = np.sqrt((values**2).mean(0))
    assert tokens / utterances < 1.25
    assert 1.5 < as_many / utterances < 3
    assert 1.5 < noisy_tokens / noisy < 2.6


def test_quotient():
    top, bottom = np.array([3.0, 4.0, 5.0, 7.0]), np.array([1.0, 2.0, 2.0, 3.0])
    without = []
    for i in range(4):
        keep = np.arange(4) != i
        without.append(math.sqrt((top[keep] ** 2).sum() / (bottom[keep] ** 2).sum()))
    error = math.sqrt(3 / 4 * sum((value - np.mean(without)) ** 2 for value in without))
    assert fpe.quotient(top, bottom) == f"{math.sqrt(99 / 18):.2f} ± {error:.2f}"
    assert fpe.quotient(2 * bottom, bottom) == "2.00 ± 0.00"


# ------------------------------------------------------------------------------------ the command line


def test_doctests():
    result = doctest.testmod(fpe)
    assert result.attempted >= 2 and result.failed == 0


def test_quick_form():
    command = [sys.executable, SCRIPT, "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line.startswith("|")]
    assert rows[0] == list(fpe.COLUMNS) and {len(cells) for cells in rows} == {len(fpe.COLUMNS)}
    assert [cells[:2] for cells in rows[2:]] == [
        ["1", "20,000"],
        ["2", "20,000"],
        ["4", "20,000"],
        ["2", "10,000"],
    ]
    assert all(f"{name}  {meaning}" in result.stdout for name, meaning in fpe.COLUMNS.items())


def test_help_explains_every_argument():
    command = [sys.executable, SCRIPT, "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    said = re.sub(r"[│\s]+", " ", result.stdout)
    tree = ast.parse(SCRIPT.read_text())
    for node in next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args").body:
        comment = SCRIPT.read_text().splitlines()[node.end_lineno - 1].partition("  # ")[2]
        assert comment and comment in said and f"--{node.target.id} " in said.replace(",", " ")


def test_the_page_shows_the_table_of_the_script():
    page = (ROOT / "docs/theory_fpe.md").read_text(encoding="utf-8")
    assert page.count(f"| {' | '.join(fpe.COLUMNS)} |") == 1
    args = fpe.Args()
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d.]+) \|", page, re.MULTILINE)
    points = [(length, args.fits[-1]) for length in args.lengths]
    points += [(args.lengths[-2], fits) for fits in args.fits[:-1]]
    assert rows == [
        (str(length), f"{fits * args.batch:,}", f"{fpe.theorem_ratio(args.gamma, length):.2f}")
        for length, fits in points
    ]
