"""What baselines/ promises: the equations of PPO, Filtered BC and CHAI, what each `main` hands on to whom,
and that a run can be resumed.

What is archer.py's to the letter is tested there. The worlds are its toys, the models are untrained and have
a layer of 32. What a network should compute is computed a second time: alone, unpadded, by a plain pass.
"""

import copy
import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_archer import (  # noqa: F401  three are fixtures
    ForgetfulToy,
    Toy,
    before,
    gradient,
    make_model,
    one_thread,
    plain_logps,
    states,
    still,
    talkative,
    tokenizer,
    toys,
)

import archer
import archer_offline_iql
import envs
from baselines import chai, filtered_bc, ppo
from envs import models

BOTH = pytest.mark.parametrize("world", ["toy", "forgetful-toy"])
EACH = pytest.mark.parametrize("script", [ppo, filtered_bc, chai], ids=lambda script: script.__name__[10:])


@pytest.fixture(autouse=True)
def paid(monkeypatch):
    """The toys pay for each letter, so that untrained models have returns that differ."""
    step = Toy.step

    def step_and_pay(self, action):
        observation, _, *rest, info = step(self, action)
        return observation, 0.1 * len(info["action"]) - 0.3, *rest, info

    monkeypatch.setattr(Toy, "step", step_and_pay)


@pytest.fixture
def actor(tokenizer):  # noqa: F811
    actor = make_model("llama", tokenizer)
    actor.tokenizer = tokenizer
    actor.context = actor.config.max_position_embeddings
    return talkative(actor)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):  # noqa: F811
    """One on the disk, which often ends a turn."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = make_model("llama", tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


SIZES = {"env": "toy", "seed": 3, "iterations": 2, "rollouts": 4, "max_action_tokens": 6, "epochs": 2}
SIZES |= {"minibatch": 3, "actor_updates": 2, "actor_batch": 3, "critic_updates": 2, "critic_batch": 3}
SIZES |= {"critic_pool": 4, "candidates": 3, "eval_every": 2, "eval_episodes": 4}


def small(script, **changes):
    """Arguments that make a run of a script small."""
    known = inspect.signature(script.Args).parameters
    return script.Args(**{name: value for name, value in (SIZES | changes).items() if name in known})


def go(script, folder: Path, checkpoint: str, **changes) -> tuple[Path, dict]:
    """A run in a folder of its own, and its summary."""
    summary = script.main(small(script, runs=str(folder), actor=checkpoint, **changes))
    (run,) = folder.iterdir()
    return run, summary


def play(script, world, player, n=8, seed=0, **changes):
    """Dialogues of a player, which is what `rollout` takes first, tasks in turn."""
    worlds, rng = envs.VecTextEnv(world, n), np.random.default_rng(seed)
    indices = [i % worlds.envs[0].num_tasks for i in range(n)]
    return script.rollout(*player, worlds, small(script, **changes), rng, indices)


def spy(monkeypatch, script, name) -> list[dict]:
    """The calls of a function, by the names of its arguments, with its "result"."""
    calls, function = [], getattr(script, name)

    def listen(*given, **options):
        bound = inspect.signature(function).bind(*given, **options)
        bound.apply_defaults()
        call = dict(bound.arguments)
        calls.append(call)
        result = function(*given, **options)
        call["result"] = list(result) if isinstance(result, list) else result  # `main` may change its own
        return result

    monkeypatch.setattr(script, name, listen)
    return calls


def seen_gradients(monkeypatch) -> list[torch.Tensor]:
    """Hidden states as `hidden_states` returns them; they keep their gradients."""
    kept, read = [], models.hidden_states

    def keep(*given, **options):
        hidden = read(*given, **options)
        if hidden.requires_grad:
            hidden.retain_grad()
            kept.append(hidden)
        return hidden

    monkeypatch.setattr(models, "hidden_states", keep)
    return kept


def in_float64(*trained):
    """Models that compute in float64; their hidden states stay so."""
    for model in trained:
        model.double()


# ------------------------------------------------------------------------------------------------ PPO
def token_chain():
    """Three dialogues of 4, 1 and 6 tokens as `gae` takes them."""
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 11)).tolist()
    return rewards, [1.0, 0.9, 1.0, 0.0, 0.0, 1.0, 1.0, 0.9, 0.9, 1.0, 0.0], values, [(0, 4), (4, 5), (5, 11)]


def test_ppo_E1_gae():
    """A_t = sum_l (product of discount * lambda) delta_t+l, dialogue by dialogue."""
    rewards, discounts, values, parts = token_chain()
    expected = []
    for start, stop in parts:
        for t in range(start, stop):
            weight, total = 1.0, 0.0
            for u in range(t, stop):
                after = values[u + 1] if u + 1 < stop else 0.0
                total += weight * (rewards[u] + discounts[u] * after - values[u])
                weight *= discounts[u] * 0.8
            expected.append(total)
    assert ppo.gae(rewards, discounts, values, 0.8) == pytest.approx(expected, abs=1e-12)


def test_ppo_E1_between_returns_and_deltas():
    """With lambda 1 and no values it is the return, with lambda 1 the return minus V, with 0 the delta."""
    rewards, discounts, values, parts = token_chain()
    returns = []
    for start, stop in parts:
        own, after = [], 0.0
        for t in reversed(range(start, stop)):
            after = rewards[t] + discounts[t] * after
            own.append(after)
        returns += own[::-1]
    assert ppo.gae(rewards, discounts, [0.0] * 11, 1.0) == pytest.approx(returns, abs=1e-12)
    gaps = [a - v for a, v in zip(returns, values, strict=True)]
    assert ppo.gae(rewards, discounts, values, 1.0) == pytest.approx(gaps, abs=1e-12)
    deltas = [rewards[t] + discounts[t] * [*values, 0.0][t + 1] - values[t] for t in range(11)]
    assert ppo.gae(rewards, discounts, values, 0.0) == pytest.approx(deltas, abs=1e-12)
    assert ppo.mc_returns(rewards, 0.9)[0] == pytest.approx(
        ppo.gae(rewards, [0.9] * 11, [0.0] * 11, 1.0)[0], abs=1e-12
    )


def test_ppo_E2_clipped_loss():
    """Its value, who is clipped, and that those who are have no gradient."""
    torch.manual_seed(0)
    old, advantage = torch.randn(2, 40, dtype=torch.float64)
    logp = (old + 0.4 * torch.randn(40, dtype=torch.float64)).requires_grad_()
    total, clipped = 0.0, []
    for x, y, a in zip(logp.tolist(), old.tolist(), advantage.tolist(), strict=True):
        w = math.exp(x - y)
        total += min(w * a, min(max(w, 0.8), 1.2) * a)
        clipped.append((w > 1.2 and a > 0) or (w < 0.8 and a < 0))
    loss, share = ppo.clipped_loss(logp, old, advantage, 0.2)
    assert loss.item() == pytest.approx(-total / 40, abs=1e-12)
    assert share.item() == pytest.approx(sum(clipped) / 40) and 0.1 < share < 0.9
    loss.backward()
    assert (logp.grad == 0).tolist() == clipped


def context_of(dialogue, k, tokenizer, append_only) -> list[int]:  # noqa: F811
    """The tokens before action k, earlier actions as they were sampled."""
    ids = []
    for j in range(0 if append_only else k, k + 1):
        text = dialogue["observations"][j]
        if j > 0 and append_only:
            ids += dialogue["ids"][j - 1]
            text = text.removeprefix(dialogue["observations"][j - 1] + dialogue["actions"][j - 1])
        ids += models.encode(tokenizer, text)
    return ids


@BOTH
def test_ppo_tokens_stand_and_are_scored_as_they_were_sampled(actor, world):
    """-log pi of `rollout` and the scores of `score_actions` are those of a plain pass over these tokens."""
    played, nll = play(ppo, world, [actor], temperature=0.7)
    with torch.no_grad():
        logp_MV, logp_M = ppo.score_actions(actor, played, 0.7, "float32")
    scored, odd = iter(logp_M.split([len(ids) for d in played for ids in d["ids"]])), 0
    for (d, k), own in zip(states(played), scored, strict=True):
        context = context_of(d, k, actor.tokenizer, world == "toy")
        assert own.tolist() == pytest.approx(plain_logps(actor, context, d["ids"][k], 0.7), abs=1e-4)
        odd += d["ids"][k] != [*models.encode(actor.tokenizer, d["actions"][k]), 0]
    assert odd > 0, "the test is worth something only if the actor did say odd things"
    assert sum(nll) == pytest.approx(-logp_M.sum().item(), rel=1e-4) and len(nll) == len(states(played))
    assert torch.allclose(logp_MV.exp().sum(-1), torch.ones(len(logp_M)), atol=1e-4)


def value_network(actor, value=0.5):
    body = copy.deepcopy(actor.base_model)
    body.tokenizer = actor.tokenizer
    torch.manual_seed(1)
    network = ppo.ValueNetwork(body, value, "float32")
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return network


@torch.no_grad()
def plain_values(critic, context, ids) -> list[float]:
    """V before each of some tokens: one unpadded pass."""
    hidden = critic.body(input_ids=torch.tensor([context + ids])).last_hidden_state[0, len(context) - 1 : -1]
    return critic.head(hidden)[:, 0].tolist()


def with_rewards(dialogues):
    """Rewards that differ, as those of a toy are mostly zero."""
    for n, d in enumerate(dialogues):
        d["rewards"] = [0.3 * n - k for k in range(len(d["actions"]))]
    return dialogues


@BOTH
@pytest.mark.parametrize("normalise", [False, True])
def test_ppo_judge(actor, world, normalise):
    """The reward at a turn's last token, gamma once a turn, no value behind an end, also a time limit's."""
    played = with_rewards(play(ppo, world, [actor])[0])
    critic, args = value_network(actor), small(ppo, gamma=0.8, gae_lambda=0.9, normalise=normalise)
    judged, errors = ppo.judge(played, actor, critic, args)
    logps, advantages, returns = [], [], []
    for d in played:
        chain = []  # (reward, discount, V) of each token
        for k, ids in enumerate(d["ids"]):
            context = context_of(d, k, actor.tokenizer, world == "toy")
            logps += plain_logps(actor, context, ids)
            for i, v in enumerate(plain_values(critic, context, ids)):
                is_last = i == len(ids) - 1
                chain.append((d["rewards"][k] if is_last else 0.0, 0.8 if is_last else 1.0, v))
        for t in range(len(chain)):
            weight, total = 1.0, 0.0
            for u in range(t, len(chain)):
                after = chain[u + 1][2] if u + 1 < len(chain) else 0.0
                total += weight * (chain[u][0] + chain[u][1] * after - chain[u][2])
                weight *= chain[u][1] * 0.9
            advantages.append(total)
            returns.append(total + chain[t][2])
    explained = errors["critic/explained_variance"]
    assert explained == pytest.approx(1 - np.var(advantages) / np.var(returns), abs=1e-4)
    if normalise:
        advantages = (np.array(advantages) - np.mean(advantages)) / np.std(advantages)
    found_3M = np.concatenate([d["judged"] for d in judged], axis=1)
    assert np.abs(found_3M - np.array([logps, advantages, returns])).max() < 1e-3
    assert [d["judged"].shape[1] for d in judged] == [sum(map(len, d["ids"])) for d in played]


def parts_of_ppo(actor):
    critic = value_network(actor)
    return copy.deepcopy(actor), critic, still(actor), still(critic)


@BOTH
def test_ppo_ratio_is_exactly_1_before_the_first_step(actor, world, monkeypatch):
    """For every minibatch, whoever is in it: in float64 to 1e-12; nothing is clipped."""
    in_float64(actor)
    ref_model, critic, *optimizers = parts_of_ppo(actor)
    args = small(ppo)
    written = iter(range(10**6))

    def generate(memory, rows, args, streams, greedy=False):
        """Utterances of 1 to 5 tokens, as the mask of the real one is float32."""
        numbers = [next(written) for _ in rows]
        return [[5 + n % 7] * (n % 5) + [0] for n in numbers], [0.0] * len(rows)

    monkeypatch.setattr(ppo, "generate", generate)
    played, _ = ppo.rollout(actor, envs.VecTextEnv(world, 7), args)
    judged, _ = ppo.judge(played, actor, critic.double(), args)
    heard = spy(monkeypatch, ppo, "clipped_loss")
    for _ in range(2):
        order = np.random.default_rng(0).permutation(7)
        for first in range(0, 7, 3):
            batch = [judged[i] for i in order[first : first + 3]]
            log = ppo.update(actor, ref_model, critic, *optimizers, batch, args)
            assert log["actor/clipped"] == 0 and abs(log["actor/ratio"] - 1) < 1e-12
    for call in heard:
        assert ((call["logp_M"] - call["old_logp_M"]).exp() - 1).abs().max() < 1e-12


@BOTH
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_ppo_update_is_E2_and_E3(actor, world, kl):
    """Losses against loops over single tokens, once the actor has moved; the gradient of the whole."""
    judged, _ = ppo.judge(with_rewards(play(ppo, world, [actor])[0]), actor, value_network(actor), small(ppo))
    ref_model, critic, *optimizers = parts_of_ppo(actor)
    for module in (actor, critic):
        torch.manual_seed(2)
        for parameter in module.parameters():
            parameter.data += 0.03 * torch.randn_like(parameter)
    batch = [judged[i] for i in (5, 0, 3)]
    gains, squares, kls, entropies, ratios = [], [], [], [], []
    for d in batch:
        columns = iter(d["judged"].T.tolist())
        for k, ids in enumerate(d["ids"]):
            context = context_of(d, k, actor.tokenizer, world == "toy")
            inputs = {"input_ids": torch.tensor([context + ids])}
            with torch.no_grad():
                logp_TV, ref_TV = (m(**inputs).logits[0].log_softmax(-1) for m in (actor, ref_model))
            values = plain_values(critic, context, ids)
            for i, token in enumerate(ids):
                old, advantage, goal = next(columns)
                logp_V, ref_V = logp_TV[len(context) + i - 1], ref_TV[len(context) + i - 1]
                ratios.append(math.exp(logp_V[token].item() - old))
                bounded = min(max(ratios[-1], 0.8), 1.2)
                gains.append(min(ratios[-1] * advantage, bounded * advantage))
                squares.append((values[i] - goal) ** 2)
                kls.append((logp_V.exp() * (logp_V - ref_V)).sum().item())
                entropies.append(-(logp_V.exp() * logp_V).sum().item())
    log = ppo.update(actor, ref_model, critic, *optimizers, batch, small(ppo, kl=kl, max_grad_norm=1e9))
    assert max(ratios) > 1.05 and min(ratios) < 0.95, "else the test shows little"
    assert log["actor/loss"] == pytest.approx(-np.mean(gains), abs=1e-4)
    assert log["critic/v_loss"] == pytest.approx(np.mean(squares), rel=1e-4)
    assert log["actor/entropy_per_token"] == pytest.approx(np.mean(entropies), rel=1e-4)
    assert log["actor/ratio"] == pytest.approx(max(ratios), rel=1e-4)
    if not kl:
        assert math.isnan(log["actor/kl_per_token"])
        return
    assert log["actor/kl_per_token"] == pytest.approx(np.mean(kls), rel=1e-3)
    whole, plain = gradient(actor).clone(), None
    ppo.update(actor, ref_model, critic, *optimizers, batch, small(ppo, kl=0.0, max_grad_norm=1e9))
    plain = gradient(actor).clone()
    actor.zero_grad()
    logp_MV, _ = ppo.score_actions(actor, batch, 1.0, "float32")
    ref_MV, _ = ppo.score_actions(ref_model, batch, 1.0, "float32")
    (logp_MV.exp() * (logp_MV - ref_MV.detach())).sum(-1).mean().backward()
    assert torch.allclose(whole, plain + 0.3 * gradient(actor), atol=1e-5) and gradient(actor).norm() > 1e-3
    assert all(p.grad is None for p in ref_model.parameters())


@BOTH
def test_ppo_what_the_world_says_gets_no_gradient(actor, world, monkeypatch):
    """The hidden states with a gradient are those before the tokens of actions, in actor and critic."""
    judged, _ = ppo.judge(with_rewards(play(ppo, world, [actor])[0]), actor, value_network(actor), small(ppo))
    ref_model, critic, *optimizers = parts_of_ppo(actor)
    kept = seen_gradients(monkeypatch)
    ppo.update(actor, ref_model, critic, *optimizers, judged, small(ppo))
    rows, spans, _ = ppo.lay_out(judged, actor.tokenizer)
    expected = {(row, column - 1) for row, start, stop in spans for column in range(start, stop)}
    assert len(kept) == 2 and 0 < len(expected) < sum(map(len, rows))
    for hidden in kept:
        assert set(map(tuple, hidden.grad.abs().sum(-1).nonzero().tolist())) == expected


def test_ppo_what_main_hands_on(checkpoint, tmp_path, monkeypatch):
    """All dialogues of an iteration, once an epoch, to the networks that learn; evaluations of the actor."""
    names = ("rollout", "judge", "update", "play_tasks")
    rollouts, judges, updates, evaluations = (spy(monkeypatch, ppo, name) for name in names)
    run, summary = go(ppo, tmp_path, checkpoint, rollouts=5, actor_lr=0.01, critic_lr=0.02, kl=0.1)
    trained = [call for call in rollouts if call["rng"] is not None]
    assert len(trained) == len(judges) == 2 and summary["episodes"] == 10
    actor, critic = judges[0]["actor"], judges[0]["critic"]
    for played, judge in zip(trained, judges, strict=True):
        assert judge["dialogues"] is played["result"][0] and judge["actor"] is actor is played["actor"]
        assert [len(d["actions"]) for d in judge["dialogues"]] == [
            len(d["actions"]) for d in judge["result"][0]
        ]
    assert len(updates) == 2 * 2 * 2  # iterations, epochs, minibatches of 3 and 2
    for iteration, judge in enumerate(judges):
        own = [id(d) for d in judge["result"][0]]
        orders = [own]
        for epoch in range(2):
            calls = updates[4 * iteration + 2 * epoch :][:2]
            assert [len(call["dialogues"]) for call in calls] == [3, 2]
            order = [id(d) for call in calls for d in call["dialogues"]]
            assert sorted(order) == sorted(own) and order not in orders, "shuffled"
            orders.append(order)
    for call in updates:
        assert call["actor"] is actor and call["critic"] is critic and call["ref_model"] is not actor
        mine = {id(p) for group in call["actor_optimizer"].param_groups for p in group["params"]}
        assert mine == {id(p) for p in actor.parameters()}
        mine = {id(p) for group in call["critic_optimizer"].param_groups for p in group["params"]}
        assert mine == {id(p) for p in critic.parameters()}
    last = updates[-1]
    assert last["actor_optimizer"].param_groups[0]["lr"] == pytest.approx(0.01 / 2)  # D6: half of it is over
    assert last["critic_optimizer"].param_groups[0]["lr"] == pytest.approx(0.02 / 2)
    start = ppo.transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert all(map(torch.equal, start.parameters(), last["ref_model"].parameters()))
    assert [call["greedy"] for call in evaluations] == [False, True] * 2
    assert all(call["actor"] is actor for call in evaluations)
    samples = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert [d["actions"] for d in samples[:4]] == [d["actions"] for d in trained[0]["result"][0][:4]]


def test_ppo_D4_the_critic_starts_at_what_the_first_dialogues_earned(checkpoint, tmp_path, monkeypatch):
    rollouts, judges = spy(monkeypatch, ppo, "rollout"), spy(monkeypatch, ppo, "judge")
    mlps = spy(monkeypatch, ppo, "mlp")
    go(ppo, tmp_path, checkpoint, iterations=1, gamma=0.5)
    first = rollouts[0]["result"][0]
    expected = np.mean([sum(0.5**k * r for k, r in enumerate(d["rewards"])) for d in first])
    assert mlps[0]["value"] == pytest.approx(expected) and abs(expected) > 0.1
    assert judges[0]["dialogues"] is first


# ---------------------------------------------------------------------------------------- Filtered BC
def test_filtered_E1_cloning_loss():
    """Summed over an utterance, mean over utterances: each token's gradient is the same."""
    utterances = [[-1.0, -0.5, -2.0], [-0.25], [-3.0, -0.1]]
    logp = torch.tensor([x for own in utterances for x in own], dtype=torch.float64, requires_grad=True)
    loss = filtered_bc.cloning_loss(logp, 3)
    assert loss.item() == pytest.approx(sum(-sum(own) for own in utterances) / 3, abs=1e-12)
    loss.backward()
    assert logp.grad.tolist() == pytest.approx([-1 / 3] * 6)


def dialogue_of(number, total):
    return {"number": number, "rewards": [total - 1.0, 1.0]}


@pytest.mark.parametrize("share", [0.1, 0.25, 1.0])
def test_filtered_E2_best_of_keeps_its_share_with_ties(share):
    """The highest returns; where many have the last one that fits, the newest of these, and no more."""
    rng = np.random.default_rng(0)
    for returns in (rng.integers(-4, 0, 60), rng.normal(size=60), np.zeros(60), rng.integers(-1, 1, 57)):
        dialogues = [dialogue_of(i, float(total)) for i, total in enumerate(returns)]
        kept = filtered_bc.best_of(dialogues, share)
        assert len(kept) == round(share * len(dialogues))
        order = sorted(dialogues, key=lambda d: (sum(d["rewards"]), d["number"]), reverse=True)
        assert {d["number"] for d in kept} == {d["number"] for d in order[: len(kept)]}


def test_filtered_E2_at_least_one_is_imitated():
    dialogues = [dialogue_of(i, total) for i, total in enumerate([-3.0, -1.0, -2.0])]
    assert filtered_bc.best_of(dialogues, 0.1) == [dialogues[1]]


@BOTH
def test_filtered_update_is_E1_of_actions_and_nothing_else(actor, world, monkeypatch):
    """The loss by plain passes over single utterances; what the world says gets no gradient."""
    played, _ = play(filtered_bc, world, [actor])
    kept = seen_gradients(monkeypatch)
    total, entropy = 0.0, 0.0
    for d, k in states(played):
        context = context_of(d, k, actor.tokenizer, world == "toy")
        said = d["ids"][k]  # as sampled
        total -= sum(plain_logps(actor, context, said, 0.7))
        with torch.no_grad():
            logits = actor(input_ids=torch.tensor([context + said])).logits[0, len(context) - 1 : -1] / 0.7
        entropy += torch.distributions.Categorical(logits=logits).entropy().sum().item()
    log = filtered_bc.actor_update(actor, still(actor), played, small(filtered_bc, temperature=0.7))
    assert log["actor/loss"] == pytest.approx(total / len(states(played)), rel=1e-4)
    assert log["actor/entropy"] == pytest.approx(entropy / len(states(played)), rel=1e-4)
    assert log["actor/grad_norm"] > 1 and gradient(actor).norm() == pytest.approx(1.0, rel=1e-3), "clipped"
    assert len(kept) == 1
    _, spans, _ = filtered_bc.lay_out(played, actor.tokenizer)
    expected = {(row, column - 1) for row, start, stop in spans for column in range(start, stop)}
    assert set(map(tuple, kept[0].grad.abs().sum(-1).nonzero().tolist())) == expected


def test_filtered_what_main_hands_on(checkpoint, tmp_path, monkeypatch):
    """The buffer has the newest dialogues; the best of it, and nothing else, is imitated."""
    names = ("rollout", "best_of", "actor_update", "play_tasks")
    rollouts, filters, updates, evaluations = (spy(monkeypatch, filtered_bc, name) for name in names)
    buffers, best_of = [], filtered_bc.best_of
    monkeypatch.setattr(
        filtered_bc, "best_of", lambda kept, share: buffers.append(list(kept)) or best_of(kept, share)
    )
    options = {"iterations": 3, "rollouts": 8, "buffer_size": 11, "keep": 0.4, "actor_lr": 0.03}
    run, summary = go(filtered_bc, tmp_path, checkpoint, **options)
    trained = [call["result"][0] for call in rollouts if call["rng"] is not None]
    assert len(trained) == len(buffers) == 3 and summary["episodes"] == 24
    everything = []
    for played, buffer, call in zip(trained, buffers, filters, strict=True):
        everything += played
        assert [id(d) for d in buffer] == [id(d) for d in everything[-11:]] and call["share"] == 0.4
        assert 0 < len(call["result"]) < len(buffer) < 24
    for iteration, call in enumerate(filters):
        mine = updates[2 * iteration : 2 * iteration + 2]
        for update in mine:
            assert len(update["dialogues"]) == 3
            assert {id(d) for d in update["dialogues"]} <= {id(d) for d in call["result"]}
    assert len(updates) == 6 and all(call["actor"] is rollouts[0]["actor"] for call in updates)
    assert updates[-1]["optimizer"].param_groups[0]["lr"] == pytest.approx(0.03 / 3)  # D3
    assert [call["greedy"] for call in evaluations] == [False, True] * 3
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    for row, call in zip(rows, filters, strict=True):
        returns = [sum(d["rewards"]) for d in call["result"]]
        assert row["filter/dialogues"] == len(returns) and row["filter/worst"] == min(returns)
        assert row["filter/return"] == pytest.approx(np.mean(returns))


# ------------------------------------------------------------------------------------------------ CHAI
def critic_of(actor, seed=0):
    """A critic whose values differ: its heads are random, not at their small start."""
    torch.manual_seed(seed)
    body = copy.deepcopy(actor.base_model)
    body.tokenizer = actor.tokenizer
    critic = chai.TwinCritic(body, 0.5, "float32")
    for parameter in critic.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return critic


@torch.no_grad()
def value_alone(critic, dialogue, k, text, append_only):
    """V and Q [2] of one state and one utterance, by one plain pass."""
    context = before(dialogue, k, critic.body.tokenizer, append_only)
    said = [*models.encode(critic.body.tokenizer, text), critic.body.tokenizer.eos_token_id]
    hidden = critic.body(input_ids=torch.tensor([context + said])).last_hidden_state[0]
    return critic.v_heads(hidden[None, len(context) - 1])[0], critic.q_heads(hidden[None, -1])[0]


@BOTH
def test_chai_critic_reads_each_fork_apart(actor, world):
    """Several utterances in a state, in dialogues of other lengths, have the values of plain passes."""
    played, critic = play(archer_play, world, [actor])[0], critic_of(actor)
    rows, spans, _ = chai.lay_out(played, actor.tokenizer)
    texts = [f"{word}{n}" for n in range(len(spans)) for word in ("ant ", "b", "")]
    with torch.no_grad():
        v_M2, q_M2 = critic.judge(rows, [span for span in spans for _ in range(3)], texts)
    for m, text in enumerate(texts):
        d, k = states(played)[m // 3]
        v_2, q_2 = value_alone(critic, d, k, text, world == "toy")
        assert torch.allclose(v_M2[m], v_2, atol=1e-4) and torch.allclose(q_M2[m], q_2, atol=1e-4)
    assert q_M2.std(0).min() > 0.005


@BOTH
def test_chai_critic_reads_actions_where_they_stand(actor, world):
    """What was said is in its row: it needs no fork, and is worth the same."""
    played, critic = play(archer_play, world, [actor])[0], critic_of(actor)
    with torch.no_grad():
        in_row, as_forks = critic(played), critic(played, chai.flat(played, "actions"))
    for a, b in zip(in_row, as_forks, strict=True):
        assert torch.allclose(a, b, atol=1e-5) and a.std(0).min() > 0.005


class archer_play:
    """archer.py's `rollout`, with the arguments of these tests."""

    Args = archer.Args
    rollout = staticmethod(archer.rollout)


@BOTH
def test_chai_critic_update_is_E1_and_E2(actor, world):
    """Against a loop over utterances in float64: V learns from "best", and nothing follows an end."""
    played = with_rewards(play(archer_play, world, [actor], n=4)[0])
    for n, d in enumerate(played):
        d["best"] = [f"bee{n}{k}" for k in range(len(d["actions"]))]
    critic, target = critic_of(actor, 1), critic_of(actor, 2)
    q_terms, v_terms, errors, all_returns = [], [], [], []
    for d in played:
        n = len(d["actions"])
        for k in range(n):
            v, q = (x.double() for x in value_alone(critic, d, k, d["actions"][k], world == "toy"))
            after = value_alone(target, d, k + 1, "", world == "toy")[0].double() if k < n - 1 else 0.0
            q_terms.append(((q - (d["rewards"][k] + 0.8 * after)) ** 2).mean().item())
            best = value_alone(target, d, k, d["best"][k], world == "toy")[1].double()
            v_terms.append(((v - best) ** 2).mean().item())
            all_returns.append(sum(0.8 ** (j - k) * d["rewards"][j] for j in range(k, n)))
            errors.append(v.mean().item() - all_returns[-1])
    args = small(chai, gamma=0.8, polyak=0.25)
    old, fixed = copy.deepcopy(target), copy.deepcopy(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-2)
    log = chai.critic_update(critic, target, optimizer, played, args)
    assert log["critic/q_loss"] == pytest.approx(np.mean(q_terms), rel=1e-4)
    assert log["critic/v_loss"] == pytest.approx(np.mean(v_terms), rel=1e-4)
    assert log["critic/bias"] == pytest.approx(np.mean(errors), rel=1e-4)
    explained = 1 - np.var(errors) / np.var(all_returns)
    assert log["critic/explained_variance"] == pytest.approx(explained, rel=1e-3)
    assert any(not torch.equal(a, b) for a, b in zip(critic.parameters(), fixed.parameters(), strict=True))
    assert all(p.grad is None for p in target.parameters())
    for now, was, new in zip(target.parameters(), old.parameters(), critic.parameters(), strict=True):
        assert torch.allclose(now, 0.75 * was + 0.25 * new, atol=1e-6)


@BOTH
def test_chai_E3_says_the_best_of_k(actor, world, monkeypatch):
    """K utterances of the actor in every state; the one with the highest smaller Q, by a plain pass."""
    played, critic = play(archer_play, world, [actor])[0], critic_of(actor)
    rows, spans, _ = chai.lay_out(played, actor.tokenizer)
    written = spy(monkeypatch, chai, "write_utterances")
    args = small(chai, candidates=4)
    best = chai.best_utterances(actor, critic, rows, spans, args, models.streams(range(len(spans))))
    (call,) = written
    starts = [[] for _ in rows]
    for span in spans:
        starts[span.row] += 4 * [span.start]
    assert call["starts"] == starts and call["actor"] is actor and not call["greedy"]
    texts = [chai.spoken(actor.tokenizer, ids) for ids in call["result"][0]]
    choices, twins_differ = [], 0
    for n, (d, k) in enumerate(states(played)):
        own = texts[4 * n : 4 * n + 4]
        q_42 = torch.stack([value_alone(critic, d, k, text, world == "toy")[1] for text in own])
        q_4 = q_42.min(-1).values
        assert q_4[own.index(best[n])] == pytest.approx(q_4.max().item(), abs=1e-5)
        choices.append(own.index(best[n]))
        twins_differ += own[q_42[:, 0].argmax()] != best[n] or own[q_42[:, 1].argmax()] != best[n]
    assert len(set(choices)) == 4 and twins_differ > 0 and len(best) == len(states(played))


@BOTH
def test_chai_rollouts_say_what_was_chosen(actor, world, monkeypatch):
    """In every turn of every world, for the state that it is in."""
    critic, chosen = critic_of(actor), spy(monkeypatch, chai, "best_utterances")
    played = play(chai, world, [actor, critic])
    for turn, call in enumerate(chosen):
        alive = [d for d in played if len(d["actions"]) > turn]
        assert call["critic"] is critic and len(alive) == len(call["result"]) == len(call["spans"])
        for d, row, span, text in zip(alive, call["rows"], call["spans"], call["result"], strict=True):
            assert row == before(d, turn, actor.tokenizer, world == "toy") and span.start == len(row)
            assert d["actions"][turn] == text[:12]
    assert len(chosen) == max(len(d["actions"]) for d in played)


@BOTH
@pytest.mark.parametrize("script", [archer, archer_offline_iql, ppo, filtered_bc, chai])
def test_a_dialogue_is_that_of_its_seed_whoever_is_beside_it(actor, world, script):
    """To the token, however many worlds there are and however long they go on; and dialogues differ."""
    player = [actor, critic_of(actor)] if script is chai else [actor]
    args = small(archer_play if script in (archer, archer_offline_iql) else script)

    def play(n):
        worlds = envs.VecTextEnv(world, n)
        if script is archer_offline_iql:
            return script.rollout(*player, worlds, args, [1] * n, False)
        played = script.rollout(*player, worlds, args, None, [1] * n)
        played = played if script is chai else played[0]
        # The log-probs of what was said are the same up to rounding only.
        return [{key: value for key, value in d.items() if key != "logps"} for d in played]

    together = play(9)
    assert together[:4] == play(4) and together[:1] == play(1)
    assert len({d["actions"][0] for d in together}) > 6


@BOTH
def test_chai_of_one_candidate_is_the_actor(actor, world):
    """With k = 1 the critic has no say: archer.py's rollout, to the letter."""
    alone = play(archer_play, world, [actor])[0]
    for dialogue in alone:
        del dialogue["ids"], dialogue["logps"]
    assert play(chai, world, [actor, critic_of(actor)], candidates=1) == alone
    assert play(chai, world, [actor, critic_of(actor)], candidates=5) != alone


@BOTH
def test_chai_with_best_asks_in_every_state(actor, world, monkeypatch):
    played, critic = play(archer_play, world, [actor], n=5)[0], critic_of(actor)
    chosen = spy(monkeypatch, chai, "best_utterances")
    found = chai.with_best(played, actor, critic, small(chai), np.random.default_rng(0))
    assert [text for call in chosen for text in call["result"]] == [x for d in found for x in d["best"]]
    for d, was in zip(found, played, strict=True):
        assert len(d["best"]) == len(d["actions"]) and {k: d[k] for k in was} == was and "best" not in was


def test_chai_what_main_hands_on(checkpoint, tmp_path, monkeypatch):
    """A buffer of the newest, a pool of it with utterances of the critic that plays, an actor that stays."""
    names = ("rollout", "with_best", "critic_update", "evaluate")
    rollouts, pools, updates, evaluations = (spy(monkeypatch, chai, name) for name in names)
    options = {"iterations": 3, "rollouts": 6, "buffer_size": 9, "critic_lr": 0.01, "critic_pool": 40}
    run, summary = go(chai, tmp_path, checkpoint, **options)
    trained = [call for call in rollouts if call["rng"] is not None]
    assert len(trained) == 4 and summary["episodes"] == 24  # the first ones are D4's
    assert [call["args"].candidates for call in trained] == [1, 3, 3, 3], "first the actor alone"
    critic, actor = updates[0]["critic"], pools[0]["actor"]
    assert all(call["critic"] is critic and call["actor"] is actor for call in [*trained[1:], *pools])
    assert all(call["critic"] is critic and call["actor"] is actor for call in evaluations)
    assert len(evaluations) == 3 and len(pools) == 3 and len(updates) == 6
    everything = list(trained[0]["result"])
    for i, pool in enumerate(pools):
        everything += trained[i + 1]["result"]
        assert len(pool["dialogues"]) == 40
        drawn = {id(d) for d in pool["dialogues"]}
        assert drawn <= {id(d) for d in everything[-9:]} and len(drawn) > 6, "of all of the buffer"
        for update in updates[2 * i : 2 * i + 2]:
            assert len(update["dialogues"]) == 3 and update["target_critic"] is not critic
            assert {id(d) for d in update["dialogues"]} <= {id(d) for d in pool["result"]}
            mine = {id(p) for group in update["optimizer"].param_groups for p in group["params"]}
            assert mine == {id(p) for p in critic.parameters()}
    start = chai.transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert all(map(torch.equal, start.parameters(), actor.parameters())), "the actor is frozen"
    saved = chai.transformers.AutoModel.from_pretrained(run / "critic")
    assert not all(map(torch.equal, start.base_model.parameters(), saved.parameters()))


def test_chai_evaluations_compare(actor, monkeypatch):
    """The same seeds and tasks every time: whole passes over the tasks, by the critic's choice."""
    critic, rollouts = critic_of(actor), spy(monkeypatch, chai, "rollout")
    args = small(chai, eval_episodes=9)
    figures = [chai.evaluate(actor, critic, args) for _ in range(2)]
    assert figures[0] == figures[1] and set(figures[0]) >= {"eval/return", "eval/success"}
    assert rollouts[0]["indices"] == 2 * [0, 1, 2, 3] and rollouts[0]["critic"] is critic


# ------------------------------------------------------------------------------------------------ all
def timeless(run: Path) -> list[dict]:
    """The metrics, without those of the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{tag: value for tag, value in row.items() if not tag.startswith("time/")} for row in rows]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@EACH
def test_two_and_two_iterations_are_four(script, checkpoint, tmp_path):
    """To the bit. The learning rate, which falls over all iterations, is held."""
    options = {"anneal_lr": False, "kl": 0.1}
    whole, _ = go(script, tmp_path / "whole", checkpoint, iterations=4, **options)
    half, _ = go(script, tmp_path / "half", checkpoint, **options)
    early = torch.load(half / "checkpoint.pt", weights_only=True)
    script.main(
        small(script, runs=str(tmp_path), actor=checkpoint, iterations=4, resume=str(half), **options)
    )
    assert timeless(half) == timeless(whole) and len(timeless(half)) == 5
    saved = [torch.load(run / "checkpoint.pt", weights_only=True) for run in (half, whole)]
    for key in ("rng", "torch_rng", "iteration", "state", "modules"):
        assert same(saved[0][key], saved[1][key]), key
    assert same(early["torch_rng"], saved[0]["torch_rng"]), "torch's numbers differ from device to device"


@EACH
def test_no_dialogue_that_fits_is_an_error_with_a_sentence(script, checkpoint, tmp_path):
    with pytest.raises(ValueError, match="no dialogue fits into the model's context"):
        go(script, tmp_path, checkpoint, max_action_tokens=2000)


@EACH
def test_a_model_without_learning_is_evaluated_alone(script, checkpoint, tmp_path):
    """--iterations 0: the line of the start and nothing else."""
    run, summary = go(script, tmp_path, checkpoint, iterations=0)
    assert [row["iteration"] for row in timeless(run)] == [0]
    assert summary["eval_return"] == summary["warm_start_return"]
    assert ("eval_return_greedy" in summary) == (script is not chai)


# ------------------------------------------------------------------------------------ what else main hands on
def test_ppo_networks_are_apart(checkpoint, tmp_path, monkeypatch):
    judges = spy(monkeypatch, ppo, "judge")
    go(ppo, tmp_path, checkpoint, iterations=1)
    actor, critic = ({p.data_ptr() for p in judges[0][name].parameters()} for name in ("actor", "critic"))
    assert not actor & critic


def test_ppo_temperature_and_clip(actor):
    played, args = with_rewards(play(ppo, "toy", [actor])[0]), small(ppo, temperature=0.5, kl=0.3, clip=0.05)
    judged, _ = ppo.judge(played, actor, value_network(actor), args)
    expected = [
        x
        for d, k in states(played)
        for x in plain_logps(actor, context_of(d, k, actor.tokenizer, True), d["ids"][k], 0.5)
    ]
    logps, advantages, _ = np.concatenate([d["judged"] for d in judged], axis=1)
    assert logps.tolist() == pytest.approx(expected, abs=1e-3)
    ref_model, critic, *optimizers = parts_of_ppo(actor)
    for model, scale in ((actor, 1.05), (ref_model, 0.9)):
        model.lm_head.weight.data *= scale
    log = ppo.update(actor, ref_model, critic, *optimizers, judged, args)
    moved, kls = [], []
    for d, k in states(played):
        context = context_of(d, k, actor.tokenizer, True)
        moved += plain_logps(actor, context, d["ids"][k], 0.5)
        with torch.no_grad():
            p, q = (
                (
                    m(input_ids=torch.tensor([context + d["ids"][k]])).logits[0, len(context) - 1 : -1] / 0.5
                ).log_softmax(-1)
                for m in (actor, ref_model)
            )
        kls += (p.exp() * (p - q)).sum(-1).tolist()
    w = np.exp(np.array(moved) - expected)
    gains = np.minimum(w * advantages, w.clip(0.95, 1.05) * advantages)
    assert log["actor/loss"] == pytest.approx(-gains.mean(), abs=1e-3)
    assert 0.1 < log["actor/clipped"] == pytest.approx((gains < w * advantages - 1e-9).mean(), abs=0.03)
    assert log["actor/kl_per_token"] == pytest.approx(np.mean(kls), rel=1e-2)


@pytest.mark.parametrize("which", ["actor", "critic", "chai"])
def test_gradients_are_clipped(actor, which):
    args = small(chai if which == "chai" else ppo, max_grad_norm=0.01)
    if which == "chai":
        played = with_rewards(play(archer_play, "toy", [actor], n=4)[0])
        played = [d | {"best": d["actions"]} for d in played]
        trained = critic_of(actor)
    else:
        critic = value_network(actor)
        played, _ = ppo.judge(with_rewards(play(ppo, "toy", [actor])[0]), actor, critic, args)
        trained = actor if which == "actor" else critic
    was = torch.cat([p.detach().flatten() for p in trained.parameters()])
    optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
    if which == "chai":
        chai.critic_update(trained, copy.deepcopy(trained), optimizer, played, args)
    else:
        optimizers = [optimizer, still(critic)] if which == "actor" else [still(actor), optimizer]
        ppo.update(actor, copy.deepcopy(actor), critic, *optimizers, played, args)
    moved = torch.cat([p.detach().flatten() for p in trained.parameters()]) - was
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-2)


def test_chai_learns_at_its_rate(checkpoint, tmp_path, monkeypatch):
    updates, rollouts, mlps = (spy(monkeypatch, chai, name) for name in ("critic_update", "rollout", "mlp"))
    run, _ = go(chai, tmp_path, checkpoint, critic_lr=0.01, gamma=0.5)
    assert {call["optimizer"].param_groups[0]["lr"] for call in updates} == {0.01}
    first = rollouts[0]["result"]
    # D4
    assert mlps[-1]["value"] == pytest.approx(
        np.mean([sum(0.5**k * r for k, r in enumerate(d["rewards"])) for d in first])
    )
    updates.clear()
    chai.main(
        small(chai, runs=str(tmp_path), actor=checkpoint, resume=str(run), iterations=3, critic_lr=0.02)
    )
    assert {call["optimizer"].param_groups[0]["lr"] for call in updates} == {0.02}


@pytest.mark.parametrize("script", [chai, archer_offline_iql], ids=["chai", "offline"])
def test_write_utterances_at_a_temperature(actor, script):
    played = play(archer_play, "toy", [actor])[0]
    rows, spans, _ = script.lay_out(played, actor.tokenizer)
    starts = [[] for _ in rows]
    for span in spans:
        starts[span.row].append(span.start)
    args = small(archer_play, temperature=0.5)
    ids, logps = script.write_utterances(actor, rows, starts, args, models.streams(range(len(spans))))
    expected = [
        sum(plain_logps(actor, rows[s.row][: s.start], own, 0.5)) for s, own in zip(spans, ids, strict=True)
    ]
    assert logps == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("script", [ppo, filtered_bc], ids=["ppo", "filtered_bc"])
def test_the_logged_nll_is_that_of_an_utterance(script, checkpoint, tmp_path, monkeypatch):
    rollouts = spy(monkeypatch, script, "rollout")
    run, _ = go(script, tmp_path, checkpoint, iterations=1)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [np.mean(call["result"][1]) for call in rollouts if call["rng"] is not None]
    assert pytest.approx(rows[-1]["rollout/nll"]) in found
