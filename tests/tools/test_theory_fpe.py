"""benchmarks/theory_fpe.py against loops over all dialogues of a tiny world,
and what its docstring claims."""

import ast
import doctest
import math
import os
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
H, S, V, L, GAMMA = 3, 2, 2, 3, 0.8
B = H * S
each_class = pytest.mark.parametrize("table", [True, False], ids=["table", "sum"])
each_level = pytest.mark.parametrize("tokens", [False, True], ids=["utterances", "tokens"])


@pytest.fixture
def world():
    return fpe.make_world(H, S, V, GAMMA, np.random.default_rng(7))


def solve(level, edges, regressions):
    return fpe.fit(edges, level.cell_XA, level.policy_XA, level.gamma, regressions)


def exact(level):
    return solve(level, level.edges, level.steps)


# --------------------------------------------------------------------------------------- the naive way


def naive_token(world, turn, s, said, policy):
    """(Q of every next token, V) by recursion over all that can follow; the discount is GAMMA^(1/L)
    a token."""
    g, q = GAMMA ** (1 / L), []
    for token in range(V):
        now = [*said, token]
        if len(now) < L:
            q.append(g * naive_token(world, turn, s, now, policy)[1])
            continue
        q.append(world.reward_SV[s, sum(now) % V])
        if turn + 1 < H:
            for after in range(S):
                chance = world.next_SVS[s, sum(now) % V, after]
                q[-1] += g * chance * naive_token(world, turn + 1, after, [], policy)[1]
    return q, sum(policy[s, sum(said) % V, token] * q[token] for token in range(V))


def naive_utterance(world, turn, s):
    """({utterance: (Q, probability)}, V) by recursion; no utterance and 0 after the last turn."""
    if turn == H:
        return {}, 0.0
    found = {}
    for u in product(range(V), repeat=L):
        chance = math.prod(world.target_SVV[s, sum(u[:i]) % V, u[i]] for i in range(L))
        z = sum(u) % V
        later = [
            world.next_SVS[s, z, after] * naive_utterance(world, turn + 1, after)[1] for after in range(S)
        ]
        found[u] = world.reward_SV[s, z] + GAMMA * sum(later), chance
    return found, sum(q * chance for q, chance in found.values())


def naive_visits(world):
    """Share of the turns in (turn, s), [B], by following every dialogue."""
    share = np.zeros(B)

    def follow(turn, s, chance):
        if turn < H:
            share[turn * S + s] += chance / H
            for u, (_, likely) in naive_utterance(world, H - 1, s)[0].items():
                for after in range(S):
                    follow(turn + 1, after, chance * likely * world.next_SVS[s, sum(u) % V, after])

    for s in range(S):
        follow(0, s, 1 / S)
    return share


def way(level, begin, u):
    """The pairs (state, token) of an utterance at the level of tokens."""
    x, pairs = begin, []
    for token in u:
        pairs.append((x, token))
        x = level.cell_XA[x, token] + B
    return pairs


# --------------------------------------------------------------------------------------- the values


@each_class
def test_exact_values_of_utterances(world, table):
    level = fpe.make_level(world, L, tokens=False, table=table)
    q_XA = exact(level)
    assert q_XA.shape == (B, V**L if table else V)
    for begin in range(B):
        naive, value = naive_utterance(world, *divmod(begin, S))
        for n, (u, (q, _)) in enumerate(naive.items()):  # product() counts as the table does
            assert q_XA[begin, n if table else sum(u) % V] == pytest.approx(q, abs=1e-12)
        assert (level.policy_XA[begin] * q_XA[begin]).sum() == pytest.approx(value, abs=1e-12)


@each_class
def test_exact_values_of_tokens(world, table):
    level = fpe.make_level(world, L, tokens=True, table=table)
    q_XA = exact(level)
    for begin in range(B):
        for u in product(range(V), repeat=L):
            for i, (x, token) in enumerate(way(level, begin, u)):
                q, value = naive_token(world, *divmod(begin, S), list(u[:i]), world.target_SVV)
                assert q_XA[x, token] == pytest.approx(q[token], abs=1e-12)
                assert (level.policy_XA[x] * q_XA[x]).sum() == pytest.approx(value, abs=1e-12)


@each_level
@each_class
def test_policies_are_distributions_and_cells_number_through(world, tokens, table):
    level = fpe.make_level(world, L, tokens, table)
    for policy_XA in (level.policy_XA, level.behaviour_XA):
        np.testing.assert_allclose(policy_XA.sum(1), 1)
    np.testing.assert_array_equal(np.unique(level.cell_XA), np.arange(level.first[-1]))
    chance_C = np.bincount(level.edges[0], level.edges[2])
    np.testing.assert_allclose(chance_C, 1)


@each_class
def test_advantages_of_tokens_add_up_to_those_of_utterances(world, table):
    """E2: A(s,u) = sum_i g^(i-L) A(s,u_<i,u_i), to rounding; and each has mean 0 given what is before it."""
    by_utterance, by_token = (fpe.make_level(world, L, tokens, table) for tokens in (False, True))
    a_utterance = fpe.advantages(exact(by_utterance), by_utterance.policy_XA)
    a_token = fpe.advantages(exact(by_token), by_token.policy_XA)
    np.testing.assert_allclose((by_token.policy_XA * a_token).sum(1), 0, atol=1e-12)
    assert np.abs(a_utterance).max() > 0.1
    for begin in range(B):
        for n, u in enumerate(product(range(V), repeat=L)):
            pairs = way(by_token, begin, u)
            total = sum(GAMMA ** ((i - L) / L) * a_token[pair] for i, pair in enumerate(pairs, 1))
            assert total == pytest.approx(a_utterance[begin, n if table else sum(u) % V], abs=1e-12)


# ------------------------------------------------------------------------------------ the yardsticks


@each_class
def test_errors_are_those_over_all_utterances(world, table):
    """E2: utterance_error of errors that have nothing to do with each other,
    against a sum over all utterances."""
    share = naive_visits(world)
    for tokens in (False, True):
        level = fpe.make_level(world, L, tokens, table)
        q_XA = np.random.default_rng(1).normal(size=level.policy_XA.shape)
        wrong_XA = fpe.advantages(q_XA, level.policy_XA)
        square, by_action = 0.0, 0.0
        for begin in range(B):
            for n, (u, (_, chance)) in enumerate(naive_utterance(world, H - 1, begin % S)[0].items()):
                if tokens:
                    errors = [wrong_XA[pair] for pair in way(level, begin, u)]
                    discounts = [GAMMA ** ((i - L) / L) for i in range(1, L + 1)]
                else:
                    errors, discounts = [wrong_XA[begin, n if table else sum(u) % V]], [1.0]
                square += share[begin] * chance * sum(np.multiply(errors, discounts)) ** 2
                by_action += share[begin] * chance * np.mean(np.square(errors))
        assert fpe.utterance_error(level, wrong_XA) == pytest.approx(math.sqrt(square), rel=1e-10)
        assert fpe.action_error(level, wrong_XA) == pytest.approx(math.sqrt(by_action), rel=1e-10)


@each_class
def test_bound_is_put_together_as_it_says(world, table):
    """E3 with C, G and Vmax by loops; a bound of the sums is greater for tokens by (1 - gamma)
    / (1 - gamma^(1/L))."""
    bounds = []
    for tokens in (False, True):
        level = fpe.make_level(world, L, tokens, table)
        actions = L if tokens else 1
        G = sum(GAMMA ** (t / actions) for t in range(H * actions))
        highest = sum(GAMMA**t for t in range(H))
        share = {"pi": naive_visits(world), "data": None}
        other = fpe.World(H, GAMMA, world.reward_SV, world.next_SVS, world.behaviour_SVV, world.behaviour_SVV)
        share["data"] = naive_visits(other)
        C = 0.0
        for begin in range(B):
            cells = [{}, {}]
            for n, u in enumerate(product(range(V), repeat=L)):
                if tokens:
                    passed = [level.cell_XA[pair] for pair in way(level, begin, u)]
                else:
                    passed = [n if table else sum(u) % V]
                for sums, policy, visited in zip(
                    cells, (world.target_SVV, world.behaviour_SVV), share.values(), strict=True
                ):
                    chance = math.prod(policy[begin % S, sum(u[:i]) % V, u[i]] for i in range(L))
                    for cell in passed:
                        sums[cell] = sums.get(cell, 0.0) + visited[begin] * chance
            C = max(C, *(cells[0][cell] / cells[1][cell] for cell in cells[0]))
        d = B * (sum(V**i for i in range(1, L + 1)) if tokens and table else V**L if table else V * actions)
        bounds.append(fpe.bound(level, 99))
        assert bounds[-1] == pytest.approx(math.sqrt(C * G**2 * highest**2 * d / (actions * 100)), rel=1e-10)
    if not table:
        # the concentrability of a prefix can exceed that of a whole sum, so that the ratio is at least this
        assert bounds[1] / bounds[0] >= (1 - GAMMA) / (1 - GAMMA ** (1 / L)) - 1e-12


@pytest.mark.parametrize("samples", [1, 2, 7, 40])
def test_lemma_of_the_bound(samples):
    """E3, first step: p (E[1/4m; m>0] + P(m=0)) <= 1/(N+1) for m ~ Binomial(N, p);
    and no bound of half the size."""
    largest = 0.0
    for p in np.linspace(0.001, 1, 400):
        chance = [math.comb(samples, m) * p**m * (1 - p) ** (samples - m) for m in range(samples + 1)]
        largest = max(largest, p * (chance[0] + sum(c / (4 * m) for m, c in enumerate(chance) if m)))
    assert 0.4 / (samples + 1) < largest <= 1 / (samples + 1)


@each_level
@each_class
def test_errors_stay_below_the_bound(world, tokens, table):
    """E3 in root mean square over data sets, with hardly any data and with some."""
    level, rng = fpe.make_level(world, L, tokens, table), np.random.default_rng(0)
    right = fpe.advantages(exact(level), level.policy_XA)
    for samples in (1, 10, 300):
        squares = []
        for _ in range(30):
            edges = fpe.transitions(level, fpe.sample(world, L, samples, rng))
            wrong = fpe.advantages(solve(level, edges, level.steps), level.policy_XA) - right
            squares.append(fpe.action_error(level, wrong) ** 2)
        assert 0 < math.sqrt(np.mean(squares)) < fpe.bound(level, samples)


# ------------------------------------------------------------------------------------------ the data


def test_data_are_drawn_as_the_world_and_the_behaviour_say(world):
    # What pi says has to differ from what the data do, in where they lead, too.
    world.next_SVS[:] = [[0.9, 0.1], [0.1, 0.9]]
    world.target_SVV[:] = [0.95, 0.05]
    world.behaviour_SVV[:] = [0.6, 0.4]
    count = 200_000
    begin, tokens, reward, after = fpe.sample(world, L, count, np.random.default_rng(3))
    behaving = fpe.World(H, GAMMA, world.reward_SV, world.next_SVS, world.behaviour_SVV, world.behaviour_SVV)
    share = naive_visits(behaving)
    assert np.abs(share - naive_visits(world)).max() > 0.03

    def near(mask, chance, among):
        return abs(mask[among].mean() - chance) < 5 * math.sqrt(chance * (1 - chance) / among.sum()) + 1e-9

    everywhere = np.ones(count, bool)
    for x in range(B):
        turn, s = divmod(x, S)
        assert near(begin == x, share[x], everywhere)
        heard = np.zeros(count, int)
        for i in range(L):
            for z in set(heard.tolist()):
                among = (begin == x) & (heard == z)
                assert near(tokens[:, i] == 0, world.behaviour_SVV[s, z, 0], among)
            heard = (heard + tokens[:, i]) % V
        for z in range(V):
            among = (begin == x) & (heard == z)
            assert near(reward == 1, world.reward_SV[s, z], among)
            if turn + 1 < H:
                assert near(after == (turn + 1) * S, world.next_SVS[s, z, 0], among)
                assert set(after[among].tolist()) == {(turn + 1) * S, (turn + 1) * S + 1}
            else:
                assert (after[among] == -1).all()


@each_level
@each_class
def test_transitions_follow_the_model(world, tokens, table):
    """Every transition of the data is one of the model's, an utterance takes its own way,
    and frequencies agree."""
    level = fpe.make_level(world, L, tokens, table)
    data = fpe.sample(world, L, 20_000, np.random.default_rng(5))
    cell, after, weight, reward = fpe.transitions(level, data)
    assert len(cell) == 20_000 * (L if tokens else 1) and (weight == 1).all()
    assert reward.sum() == data[2].sum()
    assert set(zip(cell.tolist(), after.tolist(), strict=True)) <= set(
        zip(*(part.tolist() for part in level.edges[:2]), strict=True)
    )
    seen_C = fpe.visits(level, level.behaviour_XA)[1]
    share_C = np.bincount(cell, minlength=len(seen_C)) / len(cell)
    assert np.abs(share_C - seen_C).max() < 5 * math.sqrt(0.25 / 20_000)
    if tokens:
        for n in range(20):
            ids = [level.cell_XA[pair] for pair in way(level, data[0][n], data[1][n])]
            assert cell[n::20_000].tolist() == ids


# ------------------------------------------------------------------------------------------- the fit


@each_level
@each_class
def test_fit_is_repeated_least_squares(world, tokens, table):
    """E1: the same as numpy's least squares on indicators of the cells, target by target."""
    level = fpe.make_level(world, L, tokens, table)
    edges = fpe.transitions(level, fpe.sample(world, L, 60, np.random.default_rng(2)))
    cell, after, _, reward = edges
    features = np.eye(level.first[-1])[cell]
    f = np.zeros(level.first[-1])
    for _ in range(level.steps):
        targets = []
        for r, x in zip(reward, after, strict=True):
            later = [p * f[c] for p, c in zip(level.policy_XA[x], level.cell_XA[x], strict=True)]
            targets.append(r + level.gamma * (sum(later) if x >= 0 else 0.0))
        f = np.linalg.lstsq(features, np.array(targets), rcond=None)[0]
    np.testing.assert_allclose(solve(level, edges, level.steps), f[level.cell_XA], atol=1e-9)


def test_fit_adds_the_disturbance_of_every_regression(world):
    """A constant c in each of k regressions shifts f by c (1 + g + ... ), as far as steps follow."""
    level = fpe.make_level(world, L, tokens=True, table=False)
    moved = fpe.fit(
        level.edges, level.cell_XA, level.policy_XA, level.gamma, level.steps, lambda n: np.full(n, 0.1)
    )
    shift = (moved - exact(level))[:S]
    np.testing.assert_allclose(shift, 0.1 * sum(level.gamma**t for t in range(level.steps)))


@each_class
def test_both_levels_find_the_same_advantages(world, table):
    """The result of docs/theory_fpe.md: nothing is uncertain inside an utterance,
    so that L fits there add no error.

    Of the sums this holds where every cell has data, of the table whatever the data are.
    """
    data = fpe.sample(world, L, 25 if table else 2000, np.random.default_rng(4))
    by_utterance, by_token = (fpe.make_level(world, L, tokens, table) for tokens in (False, True))
    found = []
    for level in (by_utterance, by_token):
        edges = fpe.transitions(level, data)
        assert table or len(np.unique(edges[0])) == level.first[-1]
        found.append(fpe.advantages(solve(level, edges, level.steps), level.policy_XA))
    assert np.abs(found[0]).max() > 0.1
    for begin in range(B):
        for n, u in enumerate(product(range(V), repeat=L)):
            tokens = [found[1][pair] for pair in way(by_token, begin, u)]
            total = sum(GAMMA ** ((i - L) / L) * a for i, a in enumerate(tokens, 1))
            assert total == pytest.approx(found[0][begin, n if table else sum(u) % V], abs=1e-12)


@each_level
@each_class
def test_error_falls_with_the_root_of_the_samples(world, tokens, table):
    level, rng, means = fpe.make_level(world, L, tokens, table), np.random.default_rng(0), []
    right = fpe.advantages(exact(level), level.policy_XA)
    for samples in (2000, 32_000):
        errors = []
        for _ in range(24):
            edges = fpe.transitions(level, fpe.sample(world, L, samples, rng))
            fitted = fpe.advantages(solve(level, edges, level.steps), level.policy_XA)
            errors.append(fpe.utterance_error(level, fitted - right))
        means.append(np.mean(errors))
    assert means[1] < 0.03 < fpe.utterance_error(level, right) / 3, "it goes to the exact advantages"
    assert 3.0 < means[0] / means[1] < 5.3, "a sixteenfold N: a fourth"


def test_fewer_regressions_than_steps_see_a_shorter_dialogue(world):
    """D2: after L regressions on tokens, the states that begin a turn know the reward
    of that turn and no more."""
    once = fpe.World(1, GAMMA, world.reward_SV, world.next_SVS, world.target_SVV, world.behaviour_SVV)
    one, all_of_it = (fpe.make_level(w, L, tokens=True, table=True) for w in (once, world))
    short = solve(all_of_it, all_of_it.edges, L)[:B]
    np.testing.assert_allclose(short, np.tile(exact(one)[:S], (H, 1)), atol=1e-12)
    assert np.abs(short - exact(all_of_it)[:B])[: B - S].min() > 0.1, (
        "the last turn alone has no more to know"
    )


# ---------------------------------------------------------------------------------------- the columns


def test_columns_are_what_they_say():
    args = fpe.Args(turns=H, states=S, vocabulary=V, gamma=GAMMA, noise=0.0)
    names = [name for name in fpe.COLUMNS if name not in ("class", "L", "N")]
    found = dict(zip(names, fpe.measure(args, False, L, 601, seed=5), strict=True))

    rng = np.random.default_rng(5)
    world = fpe.make_world(H, S, V, GAMMA, rng)
    data = fpe.sample(world, L, 601, rng)
    levels = {name: fpe.make_level(world, L, name == "tokens", False) for name in ("utterance", "tokens")}

    def error(name, data, regressions, measured=fpe.utterance_error):
        level = levels[name]
        wrong = solve(level, fpe.transitions(level, data), regressions) - exact(level)
        return measured(level, fpe.advantages(wrong, level.policy_XA))

    right = fpe.advantages(exact(levels["tokens"]), levels["tokens"].policy_XA)
    expected = {
        "size": fpe.utterance_error(levels["tokens"], right),
        "utterance": error("utterance", data, H),
        "tokens": error("tokens", data, H * L),
        "a token": error("tokens", data, H * L, fpe.action_error),
        "N tokens": error("tokens", [part[:200] for part in data], H * L),
        "H fits": error("tokens", data, H),
        "utt. noise": error("utterance", data, H),
        "tok. noise": error("tokens", data, H * L),
        "E3 utt.": fpe.bound(levels["utterance"], 601),
        "E3 tok.": fpe.bound(levels["tokens"], 601),
    }
    assert found == pytest.approx(expected, rel=1e-9)
    assert len({round(value, 9) for value in expected.values()}) == 7, (
        "alike are both levels, and these with a noise of 0"
    )

    args.noise = 3.0
    loud = dict(zip(names, fpe.measure(args, False, L, 601, seed=5), strict=True))
    assert {name for name in names if loud[name] > 2 * found[name]} == {"utt. noise", "tok. noise"}


def test_rows_are_means_and_standard_errors():
    args = fpe.Args(turns=H, states=S, vocabulary=V, seeds=4)
    values = [fpe.measure(args, True, 2, 50, seed) for seed in range(4)]
    cells = fpe.row(args, True, 2, 50)
    assert cells[:3] == ["table", "2", "50"]
    for column, text in zip(zip(*values, strict=True), cells[3:], strict=True):
        mean = sum(column) / 4
        error = math.sqrt(sum((value - mean) ** 2 for value in column) / 3 / 4)
        expected = [mean, error] if "±" in text else [mean]
        assert [float(part) for part in text.split("±")] == pytest.approx(
            expected, abs=0.0051 / (1 + 99 * ("±" in text))
        )


# ------------------------------------------------------------------------------------ the command line


def run(*options, cwd=ROOT):
    command = [sys.executable, SCRIPT, *map(str, options)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=60, check=False)


def test_doctests():
    result = doctest.testmod(fpe)
    assert result.attempted >= 3 and result.failed == 0


def test_quick_form(tmp_path):
    result = run("--quick", "--out", tmp_path / "table.md", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"], "no temporary file is left"
    rows = [
        line.strip("| ").split(" | ") for line in (tmp_path / "table.md").read_text().splitlines() if line
    ]
    assert len(rows) == 2 * (2 + 4) and {len(cells) for cells in rows} == {len(fpe.COLUMNS)}
    assert rows[0] == list(fpe.COLUMNS)
    printed = [re.split(r"  +", line.strip()) for line in result.stdout.splitlines()]
    assert all(cells in printed for cells in rows if cells[0] in ("table", "sum")), (
        "what is printed is what is written"
    )
    for name, meaning in fpe.COLUMNS.items():
        assert f"{name}  {meaning}" in result.stdout
    same = run("--quick", cwd=tmp_path)
    assert same.stdout == result.stdout, "seeds decide everything"


@pytest.mark.parametrize(
    "options",
    [
        ("--samples", "-3"),
        ("--samples", "300", "0"),
        ("--lengths", "0"),
        ("--seeds", "-1"),
        ("--turns", "0"),
        ("--vocabulary", "1"),
        ("--gamma", "1"),
        ("--gamma", "nan"),
        ("--noise", "-0.1"),
        ("--lengths", "40"),
        ("--quick", "--out", "nowhere/table.md"),
    ],
    ids=" ".join,
)
def test_a_bad_argument_is_one_line(options, tmp_path):
    result = run(*options, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("theory_fpe.py: ")
    assert [option for option in options if option.startswith("--")][-1] in result.stderr, (
        "it names the argument"
    )
    assert list(tmp_path.iterdir()) == []


def test_help_explains_every_argument():
    said = re.sub(r"[│\s]+", " ", run("--help").stdout)
    body = next(
        n for n in ast.parse(SCRIPT.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Args"
    ).body
    for node in body:
        comment = SCRIPT.read_text().splitlines()[node.end_lineno - 1].partition("  # ")[2]
        assert (
            comment and f"--{node.target.id.replace('_', '-')} " in said.replace(",", " ") and comment in said
        )


def test_the_page_shows_the_columns_of_the_script():
    page = (ROOT / "docs/theory_fpe.md").read_text(encoding="utf-8")
    assert page.count(f"| {' | '.join(fpe.COLUMNS)} |") == 2
