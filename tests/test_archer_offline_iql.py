"""What archer_offline_iql.py promises: its equations, the order of an update, and that a run can be resumed.

What an update should compute is computed a second time, one utterance at a time. What the critic should converge to is
known from dynamic programming: in a world of few states, with a table for its critic.
"""

import copy
import json
import math
import shutil
import signal
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import archer_offline_iql as offline
import envs
from envs.datasets import make_dialogues

LOSSES = ["awr", "reinforce", "reinforce-bc", "bc", "filtered-bc"]


@pytest.fixture(autouse=True)
def one_thread():
    """Bits repeat on one thread only; and `main` takes over Ctrl-C, which pytest wants back."""
    torch.set_num_threads(1)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def small(**changes) -> offline.Args:
    """Arguments that make a run small."""
    defaults = {
        "env": "twenty-questions-subset", "seed": 3, "iterations": 2, "dataset_size": 40, "width": 32, "layers": 1,
        "vocabulary": 300, "max_action_tokens": 6, "critic_updates": 3, "actor_updates": 2, "batch": 3, "eval_every": 2,
        "eval_episodes": 4, "save_every": 2,
    }  # fmt: skip
    changes = {key: str(value) if isinstance(value, Path) else value for key, value in changes.items()}
    return offline.Args(**defaults | changes)


def dialogue(said: str, terminated: bool, rewards: list[float] | None = None) -> offline.Trajectory:
    """A dialogue of one-letter utterances, each answered by itself: "ab" is "> a a\\n" and "b b\\n"."""
    observations = [">"]
    for letter in said:
        observations.append(f"{observations[-1]}{letter} {letter}\n")
    return offline.Trajectory(observations, list(said), rewards or [-1.0] * len(said), terminated, "answer")


@pytest.fixture(scope="module")
def data():
    """Dialogues of one to four turns; the second and the last end at the time limit."""
    return [
        dialogue("abc", True, [-1.0, 0.5, 2.0]),
        dialogue("ba", False, [0.3, -0.7]),
        dialogue("c", True, [1.0]),
        dialogue("abca", False, [-1.0, -1.0, 0.1, -1.0]),
    ]


@pytest.fixture
def actor(data):
    """Untrained, with a bias on its output that makes newlines likely: else an utterance would hardly ever end."""
    torch.manual_seed(0)
    tokenizer = offline.make_tokenizer([t.observations[-1] for t in data], 300)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=1024, n_embd=32, n_layer=1, n_head=2, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    actor = GPT2LMHeadModel(config).eval()
    head = torch.nn.Linear(32, len(tokenizer))
    head.weight.data = actor.lm_head.weight.data.clone()
    head.bias.data.zero_()
    head.bias.data[offline.encode(tokenizer, "\n")[0]] = 4.0
    actor.lm_head, actor.tokenizer = head, tokenizer
    return actor


def make_critic(actor, seed: int) -> offline.Critic:
    """A critic whose values differ: its heads are random, not at their small start."""
    torch.manual_seed(seed)
    critic = offline.Critic(copy.deepcopy(actor.base_model), actor.tokenizer, True, 0.5).eval()
    for parameter in critic.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return critic


@torch.no_grad()
def value_alone(critic, trajectory, state: int, text: str):
    """V and Q [2] in float64 of one state and one utterance, in a batch of nothing else."""
    v_S2, q_12 = critic([trajectory], [state], [text])
    return v_S2[state].double(), q_12[0].double()


@torch.no_grad()
def plain_logps(model, before: list[int], ids: list[int], temperature: float = 1.0):
    """log pi of each token of `ids` after `before`: one unpadded forward pass, softmax in float64."""
    logits = model(input_ids=torch.tensor([before + ids])).logits[0].double() / temperature
    return [logits[len(before) + k - 1].log_softmax(-1)[token].item() for k, token in enumerate(ids)]


def still(*modules):
    """An optimiser that leaves everything where it is, so that only the gradient remains."""
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.0)


def gradient(module):
    return torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in module.parameters()])


# ---------------------------------------------------------------------------------------- the equations


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9])
def test_E6_is_the_loop(expectile):
    torch.manual_seed(0)
    v, q = torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    total = 0.0
    for n in range(7):
        for twin in range(2):
            gap = q[n, twin].item() - v[n, twin].item()
            total += abs(expectile - (gap < 0)) * gap**2
    assert offline.value_loss(v, q, expectile).item() == pytest.approx(total / 7, rel=1e-12)


def test_E6_at_one_half_is_half_the_square_error():
    """Which is E2, the loss of sarsa's V."""
    torch.manual_seed(1)
    v, q = torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    assert offline.value_loss(v, q).item() == pytest.approx(((q - v) ** 2).sum(-1).mean().item() / 2, rel=1e-12)


@pytest.mark.parametrize("beta, limit", [(1.0, 20.0), (3.0, 2.0), (0.0, 1.0), (1.0, math.inf)])
def test_E7_is_the_loop(beta, limit):
    torch.manual_seed(2)
    advantage, logp = 2 * torch.randn(5, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    advantage.requires_grad_(True)
    owner = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4])
    expected = 0.0
    for n in range(5):
        weight = min(math.exp(beta * advantage[n].item()), limit)
        expected -= weight * sum(logp[m].item() for m in range(12) if owner[m] == n) / 5
    weights = offline.awr_weights(advantage, beta, limit)
    assert offline.reinforce_loss(logp, weights, owner).item() == pytest.approx(expected, rel=1e-12)
    assert not weights.requires_grad, "the actor must not learn to raise its own advantage"


def test_E3_is_min_q_minus_min_v():
    q, v = torch.tensor([[1.0, 2.0], [5.0, 3.0]]), torch.tensor([[0.0, 0.5], [4.0, 4.5]])
    assert offline.advantages(q, v).tolist() == [1.0, -1.0]


def test_effective_samples():
    """All alike: all of them; one that outweighs all: one; and no weight at all is no error."""
    assert offline.effective_samples(torch.full((8,), 3.0)).item() == pytest.approx(1.0)
    assert offline.effective_samples(torch.tensor([1e6, 1.0, 1.0, 1.0])).item() == pytest.approx(0.25, rel=1e-4)
    assert offline.effective_samples(torch.zeros(4)).item() == 0.0
    assert offline.effective_samples(torch.full((8,), 1e30)).item() == pytest.approx(1.0), "squares beyond float32"
    assert offline.effective_samples(torch.full((8,), 1e-20)).item() == pytest.approx(1.0)


def test_best_keeps_those_of_the_highest_return(data):
    kept = offline.best(data, 0.5)
    assert [sum(t.rewards) for t in kept] == [1.5, 1.0]
    assert len(offline.best(data, 1e-9)) == 1


# ------------------------------------------------------------------------------------------- the updates


@pytest.mark.parametrize("truncation_is_terminal", [True, False])
@pytest.mark.parametrize("critic_loss", ["iql", "sarsa"])
def test_critic_update_is_the_loop(actor, data, critic_loss, truncation_is_terminal):
    """E1, E2, E6 and E8 utterance by utterance: who bootstraps, from which state, with which utterance."""
    critic, target = make_critic(actor, 1), make_critic(actor, 2)
    args = small(critic=critic_loss, gamma=0.8, expectile=0.7, truncation_is_terminal=truncation_is_terminal)
    q_terms, v_terms = [], []
    for t in data:
        for k, (action, reward) in enumerate(zip(t.actions, t.rewards, strict=True)):
            v, q = value_alone(critic, t, k, action)
            next_v, _ = value_alone(target, t, k + 1, "a")
            is_last = k == len(t) - 1
            if is_last and (t.terminated or truncation_is_terminal):
                goal = torch.full((2,), reward, dtype=torch.float64)
            elif critic_loss == "iql" or is_last:
                goal = reward + 0.8 * next_v
            else:
                goal = reward + 0.8 * value_alone(target, t, k + 1, t.actions[k + 1])[1]
            q_terms.append(((q - goal) ** 2).mean().item())
            gap = value_alone(target, t, k, action)[1] - v
            share = 0.7 if critic_loss == "iql" else 0.5
            v_terms.append(sum((share if g > 0 else 1 - share) * g.item() ** 2 for g in gap))
    metrics = offline.critic_update(critic, target, still(critic), data, args)
    assert metrics["critic/q_loss"] == pytest.approx(np.mean(q_terms), rel=1e-4)
    assert metrics["critic/v_loss"] == pytest.approx(np.mean(v_terms), rel=1e-4)


def test_the_order_of_an_update(actor, data):
    """V and Q learn from the target of before the step, the target follows, and the actor sees the critic of after it.

    Fails when V's new value enters Q's goal (as in IQL's own code), or the target moves first.
    """
    critic, target = make_critic(actor, 1), make_critic(actor, 2).requires_grad_(False)
    before, target_before = copy.deepcopy(critic), copy.deepcopy(target)
    args = small(gamma=0.8, polyak=0.25, max_grad_norm=1e9)
    acted, taken = offline.states_acted(data), [action for t in data for action in t.actions]
    offline.critic_update(critic, target, torch.optim.SGD(critic.parameters(), lr=1e-2), data, args)

    v_S2, q_N2 = before(data, acted, taken)
    with torch.no_grad():
        next_v, q = target_before(data, acted, taken)
    over = torch.tensor([float(k == len(t) - 1) for t in data for k in range(len(t))])
    reward = torch.tensor([r for t in data for r in t.rewards])
    goal = reward[:, None] + 0.8 * (1 - over[:, None]) * next_v[[s + 1 for s in acted]]
    gap = q - v_S2[acted]
    loss = ((q_N2 - goal) ** 2).mean() + (torch.where(gap > 0, 0.9, 0.1) * gap**2).sum(-1).mean()
    loss.backward()
    for new, old in zip(critic.parameters(), before.parameters(), strict=True):
        moved = old.detach() - 1e-2 * (old.grad if old.grad is not None else 0)
        assert torch.allclose(new, moved, atol=1e-6)
    for now, old, new in zip(target.parameters(), target_before.parameters(), critic.parameters(), strict=True):
        assert torch.allclose(now, 0.75 * old + 0.25 * new, atol=1e-6)

    generator = torch.Generator().manual_seed(0)
    metrics = offline.actor_update(actor, critic, still(actor), data, True, args, generator)
    A = []
    for t in data:
        for k, action in enumerate(t.actions):
            v, q = value_alone(critic, t, k, action)
            A.append(q.min().item() - v.min().item())
    assert metrics["actor/advantage_mean"] == pytest.approx(np.mean(A), abs=1e-5)


def test_the_actor_learns_from_the_critic_that_has_just_learned(tmp_path, monkeypatch):
    """In `main`: first all critic updates of an iteration, then the actor's, by the critic and not by its target."""
    seen, critic_update, actor_update = [], offline.critic_update, offline.actor_update

    def watched_critic(critic, target, *others):
        seen.append(("critic", id(critic), id(target)))
        return critic_update(critic, target, *others)

    def watched_actor(actor, critic, *others):
        seen.append(("actor", id(critic), None))
        return actor_update(actor, critic, *others)

    monkeypatch.setattr(offline, "critic_update", watched_critic)
    monkeypatch.setattr(offline, "actor_update", watched_actor)
    go(tmp_path)
    assert [who for who, *_ in seen] == (["critic"] * 3 + ["actor"] * 2) * 2
    assert len({critic for _, critic, _ in seen}) == 1 and seen[0][1] != seen[0][2]


def test_D3_a_new_critic_says_the_mean_return_of_the_data(tmp_path, monkeypatch):
    made = []

    class Listening(offline.Critic):
        def __init__(self, body, tokenizer, append_only, value):
            super().__init__(body, tokenizer, append_only, value)
            made.append((value, [head[-1].bias.item() for head in [*self.v_heads, *self.q_heads]]))

    monkeypatch.setattr(offline, "Critic", Listening)
    run, _ = go(tmp_path, gamma=0.5, critic_updates=1)
    data = lines_of(run, "dataset.jsonl")
    returns = [sum(r * 0.5**k for k, r in enumerate(t["rewards"][i:])) for t in data for i in range(len(t["rewards"]))]
    assert made[0][0] == pytest.approx(np.mean(returns)) and made[0][1] == pytest.approx([made[0][0]] * 4)


@pytest.mark.parametrize("loss", LOSSES)
def test_actor_update_is_the_loop(actor, data, loss, monkeypatch):
    """Each of the losses of Table 1 token by token, end of turn included; and its gradient reaches only the actor."""
    critic, args = make_critic(actor, 1), small(actor_loss=loss, beta=2.0, max_weight=1.5, bc_weight=0.3)
    drawn, fresh_utterances = [], offline.fresh_utterances

    def listen(*arguments):
        drawn.append(fresh_utterances(*arguments))
        return drawn[-1]

    monkeypatch.setattr(offline, "fresh_utterances", listen)
    metrics = offline.actor_update(actor, critic, still(actor), data, True, args, torch.Generator().manual_seed(0))
    assert len(drawn) == (1 if "reinforce" in loss else 0), "only REINFORCE asks the actor"

    tokenizer, N = actor.tokenizer, sum(map(len, data))
    imitation = weighted = online = 0.0
    for row, t in enumerate(data):
        trunks, states = offline.lay_out([t], tokenizer, True)
        for k, action in enumerate(t.actions):
            before = trunks[0][: states[k][1]]
            logp = sum(plain_logps(actor, before, offline.encode(tokenizer, action) + offline.encode(tokenizer, "\n")))
            v, q = value_alone(critic, t, k, action)
            imitation -= logp / N
            weighted -= min(math.exp(2.0 * (q.min() - v.min()).item()), 1.5) * logp / N
            if drawn:
                ids = drawn[0][row][k]
                v, q = value_alone(critic, t, k, offline.spoken(tokenizer, ids))
                online -= (q.min() - v.min()).item() * sum(plain_logps(actor, before, ids)) / N
    expected = {"awr": weighted, "reinforce": online, "reinforce-bc": online + 0.3 * imitation}.get(loss, imitation)
    assert metrics["actor/loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["actor/data_nll"] == pytest.approx(imitation, rel=1e-4)
    assert gradient(actor).norm() > 0 and all(p.grad is None for p in critic.parameters())
    assert ("actor/clamped" in metrics) == (loss == "awr")
    assert ("actor/advantage_mean" in metrics) == (loss not in offline.IMITATION)


# ---------------------------------------------- what the critic converges to: a world with a table for its critic


class Table(torch.nn.Module):
    """Stands in for the critic where it can be exact: a value for every text."""

    def __init__(self, texts: list[str]):
        super().__init__()
        self.index = {text: n for n, text in enumerate(texts)}
        self.values = torch.nn.Parameter(torch.zeros(len(texts), 2, dtype=torch.float64))
        self.body = torch.nn.Module()
        self.body.device = torch.device("cpu")

    def forward(self, trajectories, at, utterances):
        states = [text for t in trajectories for text in t.observations]
        pairs = [f"{states[s]}|{text}" for s, text in zip(at, utterances, strict=True)]
        return [self.values[[self.index[text] for text in column]] for column in (states, pairs)]


REWARDS = {"x": 1.0, "y": 0.4, "z": -0.5}  # of the last of three turns; of the others less, see `tabular`
SHARES = {"": {"x": 1, "y": 2, "z": 1}, "x": {"y": 3, "z": 1}}  # of the data's utterances; behind x there is no x


def tabular() -> list[offline.Trajectory]:
    """All dialogues of three turns, as often as a behaviour policy has them that never says x after x."""
    found = []
    for first in "xyz":
        for second in "xyz":
            for third in "xyz":
                count = 1
                for before, said in (("", first), (first, second), (second, third)):
                    count *= SHARES["x" if before == "x" else ""].get(said, 0)
                rewards = [0.5 * REWARDS[first], -0.2 * REWARDS[second], REWARDS[third]]
                found += [dialogue(first + second + third, True, rewards)] * count
    return found


def known_values(best: bool, gamma: float) -> float:
    """Value of the first state: of the best policy that says only what the data says, or of the data's own."""

    def value(said: str) -> float:
        if len(said) == 3:
            return 0.0
        shares = SHARES["x" if said[-1:] == "x" else ""]
        scale = (0.5, -0.2, 1.0)[len(said)]
        q = {letter: scale * REWARDS[letter] + gamma * value(said + letter) for letter in shares}
        return max(q.values()) if best else sum(q[a] * n for a, n in shares.items()) / sum(shares.values())

    return value("")


def value_of_awr(critic: Table, gamma: float, beta: float) -> float:
    """Value of the policy that fits the data's utterances with the weights of E7: their shares times the weights."""

    def value(said: str, state: str) -> float:
        if len(said) == 3:
            return 0.0
        shares, scale = SHARES["x" if said[-1:] == "x" else ""], (0.5, -0.2, 1.0)[len(said)]
        q_N = torch.stack([critic.values[critic.index[f"{state}|{letter}"]].min() for letter in shares])
        weight_N = offline.awr_weights(q_N - critic.values[critic.index[state]].min(), beta, 1e9)
        p_N = weight_N * torch.tensor(list(shares.values()))
        worth = [scale * REWARDS[a] + gamma * value(said + a, f"{state}{a} {a}\n") for a in shares]
        return ((p_N / p_N.sum()) @ torch.tensor(worth, dtype=p_N.dtype)).item()

    return value("", ">")


@pytest.mark.parametrize("critic_loss, best", [("iql", True), ("sarsa", False)])
def test_the_critic_reaches_the_known_value(critic_loss, best):
    """IQL the value of the best policy within the data (expectile near 1), sarsa that of the data's own, to 2 %."""
    data, gamma = tabular(), 0.9
    texts = {text for t in data for text in t.observations}
    texts |= {f"{t.observations[k]}|{action}" for t in data for k, action in enumerate(t.actions)}
    critic = Table(sorted(texts))
    target = copy.deepcopy(critic).requires_grad_(False)
    args = small(critic=critic_loss, gamma=gamma, expectile=0.998, polyak=0.2, max_grad_norm=1e9)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.05)
    steps = 1200
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.05 * min(1, 2 * (1 - step / steps))
        offline.critic_update(critic, target, optimizer, data, args)
    expected = known_values(best, gamma)
    assert critic.values[critic.index[">"]].mean().item() == pytest.approx(expected, rel=0.02)
    if best:  # and so does the policy that E7 makes of the data with it, where imitation alone does not
        assert value_of_awr(critic, gamma, 30.0) == pytest.approx(expected, rel=0.02)
        assert value_of_awr(critic, gamma, 0.0) == pytest.approx(known_values(False, gamma))
    assert abs(known_values(True, gamma) - known_values(False, gamma)) > 0.3, "the two can be told apart"


# ------------------------------------------------------------------------------------- the program


def lines_of(run: Path, name="metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def timeless(run: Path) -> list[dict]:
    """The metrics, without those of the clock."""
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines_of(run)]


def go(folder: Path, **changes) -> tuple[Path, dict]:
    """A run in a folder of its own, and its summary."""
    summary = offline.main(small(runs=folder, **changes))
    (run,) = folder.iterdir()
    return run, summary


def test_the_summary_has_the_last_and_the_best_evaluation(tmp_path, monkeypatch):
    """Of all evaluations, those before an interruption too, but for that of the untrained actor."""
    returns, evaluate = iter([-2.0, -9.0, -5.0, -7.0]), offline.evaluate

    def told(*args):
        figures, played = evaluate(*args)
        return figures | {"eval/return": next(returns)}, played

    monkeypatch.setattr(offline, "evaluate", told)
    run, summary = go(tmp_path, iterations=2, eval_every=1)
    assert (summary["eval_return"], summary["best_return"]) == (-5.0, -5.0)
    summary = offline.main(small(resume=str(run), iterations=3, eval_every=1))
    assert (summary["eval_return"], summary["best_return"], summary["warm_start_return"]) == (-7.0, -5.0, -2.0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    torch.set_num_threads(1)
    return go(tmp_path_factory.mktemp("finished"), iterations=4)


@pytest.mark.parametrize(
    "changes",
    [
        *({"actor_loss": loss} for loss in LOSSES),
        {"critic": "sarsa"},
        {"truncation_is_terminal": False, "temperature": 0.7, "anneal_lr": False},
        {"dtype": "bfloat16"},
        {"env": "twenty-questions", "mix": "scripted"},
        {"env": "mini-detective", "mix": "random", "actor_loss": "reinforce-bc", "dataset_size": 4, "temperature": 0.7},
        {"batch": 1, "dataset_size": 1},
        {"critic_updates": 0},
        {"max_weight": math.inf},
    ],
    ids=str,
)
def test_every_switch_runs(tmp_path, changes):
    """Two iterations: every figure is finite, and of a tag that METRICS explains."""
    run, _ = go(tmp_path / "runs", **changes)
    rows = lines_of(run)
    assert [row.pop("iteration") for row in rows] == [1, 2]
    assert all(math.isfinite(figure) for row in rows for figure in row.values())
    assert {tag for row in rows for tag in row} - set(offline.METRICS) == set()
    has_critic = changes.get("actor_loss") not in offline.IMITATION
    assert ("critic/q_loss" in rows[0]) == (has_critic and changes.get("critic_updates") != 0)
    assert ("eval/overestimation" in rows[-1]) == has_critic
    turns = [turn for row in lines_of(run, "rollouts.jsonl") for turn in row["turns"]]
    assert turns and all(("Q" in turn) == has_critic for turn in turns), "an untrained critic has nothing to say"
    state = torch.load(next(run.glob("checkpoints/*/state.pt")), weights_only=True)
    assert ("critic" in state["modules"]) == has_critic


def test_the_default_run_logs_every_metric(finished):
    assert {tag for row in lines_of(finished[0]) for tag in row} - {"iteration"} == set(offline.METRICS)


def test_filtered_bc_imitates_the_best_and_bc_all(tmp_path, monkeypatch):
    seen, actor_update = {}, offline.actor_update
    for loss in offline.IMITATION:
        returns = seen[loss] = []

        def listen(actor, critic, optimizer, batch, *others, returns=returns):
            returns.extend(sum(t.rewards) for t in batch)
            return actor_update(actor, critic, optimizer, batch, *others)

        monkeypatch.setattr(offline, "actor_update", listen)
        run, _ = go(tmp_path / loss, actor_loss=loss, keep=0.2, actor_updates=10)
        data = sorted(sum(d["rewards"]) for d in lines_of(run, "dataset.jsonl"))
    assert min(seen["filtered-bc"]) >= data[-len(data) // 5] and min(seen["bc"]) < data[len(data) // 2]


@pytest.fixture
def gpt2_folder(tmp_path):
    """limit -> folder of an untrained GPT-2 that reads so many tokens."""

    def make(limit: int) -> str:
        made = make_dialogues(envs.make("twenty-questions-subset"), 100, 0, "random")
        tokenizer = offline.make_tokenizer([d["observations"][-1] for d in made], 400)
        config = GPT2Config(vocab_size=len(tokenizer), n_positions=limit, n_embd=32, n_layer=1, n_head=2)
        folder = tmp_path / f"gpt2-{limit}"
        for part in (GPT2LMHeadModel(config), tokenizer):
            part.save_pretrained(folder)
        return str(folder)

    return make


def test_dialogues_that_do_not_fit_are_left_out(tmp_path, capfd, gpt2_folder):
    """And said; where none fits, the program ends before it has written anything."""
    actor = offline.make_actor(small(), gpt2_folder(80), [])
    data = offline.read_data(small(), envs.make("twenty-questions-subset"))
    fit = offline.that_fit(data, actor, True, small())
    assert "of 40 dialogues left out" in capfd.readouterr().out and 0 < len(fit) < 40
    lengths = [len(offline.lay_out([t], actor.tokenizer, True)[0][0]) for t in data]
    assert fit == [t for t, length in zip(data, lengths, strict=True) if length <= 80 - 6 - 1]
    with pytest.raises(SystemExit):
        offline.main(small(runs=tmp_path / "none", actor=gpt2_folder(8)))
    assert "no dialogue" in capfd.readouterr().err and not (tmp_path / "none").exists()


REAL = Path(__file__).parent.parent.parent / "shared/data/guess_my_city.json"  # published with the authors' code


@pytest.mark.external
@pytest.mark.skipif(not REAL.exists(), reason=f"the authors' data of Guess My City is not at {REAL}")
def test_the_real_data_of_guess_my_city_trains(tmp_path, capfd):
    """What is left out is counted with the reason, the rest is learned from, and the agent plays its game."""
    run, _ = go(
        tmp_path,
        env="guess-my-city",
        dataset=REAL,
        vocabulary=700,
        iterations=6,
        eval_every=6,
        actor_updates=6,
        batch=4,
    )
    said = capfd.readouterr().out
    for note in ("20 of 950 dialogues left out", "16 of 950 dialogues left out", "29 of 950 dialogues left out"):
        assert note in said
    assert "dialogues left out: more than" in said, "those that the tiny model's context has no room for"
    rows = lines_of(run)
    assert all(math.isfinite(figure) for row in rows for figure in row.values())
    assert rows[-1]["actor/data_nll"] < rows[0]["actor/data_nll"] - 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("changes", [{}, {"actor_loss": "reinforce-bc"}, {"critic": "sarsa"}], ids=str)
def test_a_run_on_the_gpu(tmp_path, changes):
    run, _ = go(tmp_path, device="cuda", **changes)
    offline.main(small(runs=tmp_path, resume=run, iterations=4, device="cuda", **changes))
    assert [row["iteration"] for row in lines_of(run)] == [1, 2, 3, 4]


@pytest.mark.parametrize("changes", [{}, {"actor_loss": "reinforce-bc"}, {"actor_loss": "filtered-bc"}], ids=str)
def test_2n_iterations_are_n_and_n_resumed(tmp_path, changes):
    """To the bit. Fails for whatever is not in the checkpoint: random states, optimisers, target, data."""
    changes |= {"anneal_lr": False, "eval_every": 1}
    whole, _ = go(tmp_path / "whole", iterations=4, **changes)
    half, _ = go(tmp_path / "half", iterations=2, **changes)
    offline.main(small(resume=half, runs=tmp_path / "half", iterations=4, **changes))
    assert timeless(half) == timeless(whole)
    assert lines_of(half, "rollouts.jsonl") == lines_of(whole, "rollouts.jsonl")
    assert [path for path in half.rglob("*") if ".tmp" in path.name] == []


def test_learning_rates_rise_and_fall(tmp_path, monkeypatch):
    """D6: linearly to zero from the first update on, but for the rise of the first fifty."""
    rates, descend = [], offline.descend

    def listen(loss, optimizer, *others):
        rates.append((others[-1], optimizer.param_groups[0]["lr"]))
        return descend(loss, optimizer, *others)

    monkeypatch.setattr(offline, "descend", listen)
    go(tmp_path, iterations=2, critic_updates=60, actor_updates=1, critic_lr=1.0e-3, actor_lr=1e-4)
    critic, actor = ([rate for what, rate in rates if what == name] for name in ("critic", "actor"))
    assert [what for what, _ in rates] == (["critic"] * 60 + ["actor"]) * 2, "the actor comes after the critic"
    assert critic == pytest.approx([1e-3 * min(1, (n + 1) / 50) * (1 - n / 120) for n in range(120)])
    assert actor == pytest.approx([1e-4 / 50, 1e-4 * 2 / 50 * 0.5])


def test_the_data_can_be_used_again(finished, tmp_path):
    """--dataset takes what a run has saved, and the run is the same to the bit."""
    again, _ = go(tmp_path, iterations=4, dataset=finished[0] / "dataset.jsonl")
    assert timeless(again) == timeless(finished[0])


def test_evaluation_tells_what_offline_runs_hide(actor):
    """Overestimation is min Q minus the discounted return, unseen the share that the data never has: by hand."""
    critic, args = make_critic(actor, 1), small(eval_episodes=10, gamma=0.7)
    metrics, played = offline.evaluate(actor, critic, {"", "nothing"}, args)
    gaps, unseen = [], []
    for t in played:
        for k, action in enumerate(t.actions):
            _, q = value_alone(critic, t, k, action)
            gaps.append(q.min().item() - sum(0.7**i * r for i, r in enumerate(t.rewards[k:])))
            unseen.append(action not in ("", "nothing"))
    assert metrics["eval/overestimation"] == pytest.approx(np.mean(gaps), rel=1e-4)
    assert metrics["eval/unseen"] == pytest.approx(np.mean(unseen)) and 0 < np.mean(unseen) < 1
    assert metrics["eval/return"] == pytest.approx(np.mean([sum(t.rewards) for t in played]))


def test_play(finished, monkeypatch, capsys):
    answers = iter(["y", "n", "c"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    offline.play(small(play=finished[0]))
    assert next(answers, None) is None and capsys.readouterr().out


@pytest.mark.parametrize("world", ["guess-my-city", "mini-detective", "detective", "webshop"])
def test_it_trains_in_every_world_of_the_paper(tmp_path, world):
    if problem := envs.missing(world):
        pytest.skip(problem)
    _, summary = go(tmp_path, env=world, dataset_size=4, eval_episodes=1, iterations=1)
    assert math.isfinite(summary["eval_return"])


MISUSE = {
    "unknown world": ({"env": "nowhere"}, ["nowhere"]),
    "unknown device": ({"device": "abacus"}, ["abacus"]),
    "no actor": ({"actor": "MISSING"}, ["--actor", "MISSING"]),
    "no run": ({"resume": "MISSING"}, ["--resume", "MISSING"]),
    "no data": ({"dataset": "MISSING"}, ["--dataset", "MISSING"]),
    "no dialogues": ({"dataset_size": 0}, ["--dataset-size"]),
    "no such player": ({"mix": "random=0.5,genius=0.5"}, ["--mix", "genius", "scripted"]),
    "no batch": ({"batch": 0}, ["--batch 0", "at least 1"]),
    "no updates, but a negative number of them": ({"critic_updates": -1}, ["--critic-updates -1", "at least 0"]),
    "no width of heads": ({"width": 100}, ["--width 100", "multiple of 32"]),
    "nothing kept": ({"keep": 0.0, "actor_loss": "filtered-bc"}, ["--keep"]),
    "never evaluated": ({"eval_every": 0}, ["--eval-every"]),
    "no temperature": ({"temperature": 0.0}, ["--temperature"]),
    "no such share": ({"mix": "random=half"}, ["--mix", "half"]),
    "a negative share": ({"mix": "random=-1,scripted=2"}, ["--mix", "positive"]),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_one_line_and_leaves_nothing_behind(tmp_path, capfd, case):
    changes, expected = MISUSE[case]
    missing = str(tmp_path / "is" / "not" / "there")
    changes = {key: missing if value == "MISSING" else value for key, value in changes.items()}
    with pytest.raises(SystemExit) as caught:
        offline.main(small(runs=tmp_path / "runs", **changes))
    lines = capfd.readouterr().err.splitlines()
    assert caught.value.code == 2 and len(lines) == 1, lines
    assert [text for text in expected if text.replace("MISSING", missing) not in lines[0]] == [], lines[0]
    assert not (tmp_path / "runs").exists()


def test_a_nan_is_one_line_and_the_last_checkpoint_is_whole(tmp_path, capfd, monkeypatch):
    right, calls = offline.value_loss, []

    def wrong(*args):
        calls.append(1)
        return right(*args) * (math.nan if len(calls) > 7 else 1.0)

    monkeypatch.setattr(offline, "value_loss", wrong)
    with pytest.raises(SystemExit):
        offline.main(small(runs=tmp_path, iterations=9, save_every=1))
    assert "critic" in capfd.readouterr().err
    monkeypatch.undo()
    (run,) = tmp_path.iterdir()
    offline.main(small(runs=tmp_path, resume=run, iterations=9, save_every=1))
    assert [path for path in run.rglob("*") if ".tmp" in path.name] == []
    unbroken, _ = go(tmp_path / "unbroken", iterations=9, save_every=1)
    assert timeless(run) == timeless(unbroken), "to the bit, with rates that fall"


def test_resume_keeps_what_was_logged(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    offline.main(small(resume=run, runs=tmp_path, iterations=5))
    assert timeless(run)[:4] == timeless(finished[0]) and len(lines_of(run)) == 5
    assert {field.name for field in fields(offline.Args)} == set(json.loads((run / "args.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_iql_and_awr_beat_imitation_and_their_data(tmp_path, seed):
    """The default run on ten words: in ten minutes 3 points above BC and above the data; the best return is -2.8."""
    returns = {}
    for loss in ("awr", "bc"):
        args = {"env": "twenty-questions-subset", "seed": seed, "actor_loss": loss}
        run = tmp_path / loss
        summary = offline.main(offline.Args(runs=str(run), **args))
        returns[loss] = summary["eval_return"]
        assert summary["cpu_seconds"] < 600
        (folder,) = run.iterdir()
        data = lines_of(folder)[-1]["data/return"]
    assert returns["awr"] > returns["bc"] + 3 and returns["awr"] > data and returns["awr"] > -7
