"""Supervised fine-tuning on dialogues: the start of the other scripts, and what they must surpass.

    python sft.py --env twenty-questions                                  # a small Llama from scratch
    python sft.py --env twenty-questions --dataset FILE --keep 0.1        # filtered imitation of a file
    python sft.py --env guess-my-city --model gpt2 --lr 2e-4 --batch 32   # the paper's model, rate and batch
    python sft.py --resume runs/...                     # the commands behind checkpoints/ are in its README

Paper: Zhou et al. 2024 (ArCHer), arXiv:2402.19446
  E1  -sum w log pi(x_t | x_<t) / sum w,  w = 1 where the agent speaks    "BC" in sec. 5.7   imitation_loss
Differs from the paper, which has no formula; options undo D1 and D3, and switch on D2, D5, D6 (docs/sft.md):
  D1  A tiny Llama from scratch (--model gpt2); in its vocabulary a word, or even a whole line, is one token.
  D2  Optional data augmentation: drills on repeated tokens (--drills N) teach it to copy, exchanged words
      (--exchanged SHARE) to read.
  D3  It also learns to predict the replies (--reply-weight 0), and so what a question reveals.
  D4  An action that a dialogue marks as a mistake is read but not imitated; the reply to it is predicted.
  D5  Filtered BC (--keep 0.1) is that of sec. 5.7, on a fixed set; that of sec. 5.2 uses the newest rollouts.
  D6  Optionally Muon (--optimizer muon): with it a tiny model learns sooner to look back.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import nn

import envs.datasets
from envs import models, runs


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "twenty-questions"  # the world: an id from `python -m envs` or your own (docs/your_world.md)
    world: str = ""  # options of the world: NAME=VALUE, separated by commas (docs/worlds/)
    seed: int = 1  # seed of everything random but the evaluation; 0 or more
    runs: str = "runs"  # folder in which the run's own folder is created
    name: str = ""  # label of the run, a part of its folder's name
    resume: str = ""  # folder of a run to continue; its saved arguments hold unless given again
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # CPU threads; with one, resuming is exact to the bit
    save_every: int = 200  # updates between lines of metrics, each with a checkpoint; 0: only at the end

    # --- model
    model: str = "tiny"  # tiny (a small Llama from scratch) or a causal LM: Hugging Face name or local folder
    width: int = 96  # hidden size of the tiny model, which has one attention head for every 32
    inner: int = 192  # hidden size of its feed-forward layers
    layers: int = 3  # number of layers of the tiny model
    init: float = 0.1  # standard deviation of its initial weights
    vocabulary: int = 4000  # size of its vocabulary, at most: words, numbers, pieces of words, bytes
    phrases: int = 0  # additional tokens for the most frequent whole lines
    context: int = 2048  # most tokens of a dialogue
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters; bfloat16 learns with --lora only
    lora: bool = False  # train only low-rank adapters; needs the package peft
    lora_rank: int = 16  # rank of the adapters; their alpha is twice that
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: slower, less memory

    # --- data
    dataset: str = ""  # file of dialogues (envs/datasets.py has the formats) instead of demonstrations
    demonstrations: int = 20_000  # dialogues that the world's scripted player produces
    fresh: bool = False  # new demonstrations for every epoch: of the seeds seed + 1, seed + 2 ...
    keep: float = 1.0  # share of the dialogues that is learned, those of the highest returns (Table 3: 0.1)
    drills: int = 0  # repeating random sequences, learned before everything else (D2)
    exchanged: float = 0.0  # share of the dialogues in which words are exchanged (D2)

    # --- algorithm
    reply_weight: float = 1.0  # weight of reply tokens in the loss (D3; 0: none); those of the agent have 1
    epochs: int = 3  # passes over the dialogues
    batch: int = 16  # dialogues per update; turns, where the world rewrites its text (paper, Table 3: 32)
    micro_batch: int = 0  # how many of these per forward pass; 0: all
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon updates the matrices of the layers (D6)
    lr: float = 3e-3  # peak learning rate, for a tiny model; a pretrained one takes 2e-4 (paper, Table 3)
    warm_up: int = 50  # updates of linear warm-up (0: none), before the linear decay to zero

    # --- evaluation
    max_action_tokens: int = 48  # tokens after which an action is cut off in the evaluation
    eval_episodes: int = 0  # tasks per evaluation, from the first on, each in a world of its own; 0: all


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
Row = torch.Tensor  # [T, 2]: token ids, and the kind of each
CONTEXT, ACTION, REPLY = range(3)  # the kinds; the last two have a loss


def read(world, args: Args, epoch: int) -> list[dict]:
    """The dialogues to learn from: a file's or the world's demonstrations; with --keep, the best of them."""
    if args.dataset:
        dialogues, notes = envs.datasets.read_for(world, args.dataset)
        for note in notes:
            print(note)
    else:
        seed = args.seed + args.fresh * epoch
        dialogues = world.demonstrations(args.demonstrations, seed)
    if not 0 < args.keep <= 1:
        raise ValueError(f"--keep {args.keep}: it is a share, above 0 and at most 1")
    if args.keep < 1:  # D5
        dialogues.sort(key=lambda dialogue: -sum(dialogue["rewards"]))
    n = round(args.keep * len(dialogues))
    if n < 1:
        raise ValueError(f"--keep {args.keep} of {len(dialogues)} dialogues: there is nothing to learn")
    return dialogues[:n]


def of_kind(kind: int, ids: list[int]) -> list:
    """Part of a row: tokens that are all of one kind."""
    return [(token, kind) for token in ids]


def rows_of(dialogue: dict, tokenizer, context: int) -> list[Row]:
    """Splits a dialogue into rows: prompt, action, end of turn, reply, action, end of turn, reply ...

    One row is enough while the world only appends to its text. Where it rewrites the text, the new text is
    both the last reply of the row, cut to the room that is left, and the prompt of the next row.
    Returns no rows for a dialogue that does not fit into `context` tokens.
    """
    texts = dialogue["observations"]
    imitated = dialogue.get("imitate", [True] * len(texts))
    prompt = models.encode_prompt(tokenizer, texts[0])
    row = of_kind(CONTEXT, prompt)
    rows = []
    for turn, action in enumerate(dialogue["actions"]):
        kind = ACTION if imitated[turn] else CONTEXT  # D4
        row += of_kind(kind, models.encode(tokenizer, action))
        row += of_kind(kind, [tokenizer.eos_token_id])
        so_far = texts[turn] + action
        after = texts[turn + 1]
        reply = models.encode_reply(tokenizer, after.removeprefix(so_far))
        if after.startswith(so_far):
            row += of_kind(REPLY, reply)
        else:  # rewritten
            room = max(0, context - len(row))
            row += of_kind(REPLY, reply[:room])
            rows.append(row)
            prompt = models.encode_prompt(tokenizer, after)
            row = of_kind(CONTEXT, prompt)
    rows.append(row)
    if max(map(len, rows)) > context:
        return []
    return [torch.tensor(row).int() for row in rows]


def rows_to_learn(dialogues: list[dict], tokenizer, context: int, reply_weight: float) -> list[Row]:
    """The rows of all dialogues that fit, except rows in which there is nothing to learn."""
    fitting = []
    too_long = 0
    for dialogue in dialogues:
        rows = rows_of(dialogue, tokenizer, context)
        fitting += rows
        too_long += not rows
    if too_long:
        print(f"{too_long} of {len(dialogues)} dialogues left out as they do not fit")
    if reply_weight == 0:  # D3
        for row in fitting:
            kinds = row[:, 1]  # a view
            kinds[kinds == REPLY] = CONTEXT
    learned = [row for row in fitting if row[:, 1].any()]  # CONTEXT is 0
    if not learned:
        raise ValueError(f"nothing to learn fits into {context} tokens; give a longer --context")
    return learned


def as_row(ids: np.ndarray, kinds: np.ndarray) -> Row:
    """Makes a row of two arrays [T]."""
    pairs = np.stack([ids, kinds], 1)
    return torch.from_numpy(pairs).int()


def drills(tokens: np.ndarray, n: int, rng) -> list[Row]:
    """D2: random tokens that repeat with a period of 8 to 39; the repetitions are to be predicted."""
    place = np.arange(96)
    rows = []
    for period in rng.integers(8, 40, n):
        ids = rng.choice(tokens, period)[place % period]
        kinds = np.where(place > period, ACTION, CONTEXT)  # nothing tells that the first repetition begins
        rows.append(as_row(ids, kinds))
    return rows


def exchange_words(row: Row, words: np.ndarray, rng) -> Row:
    """D2: replaces 30 % of the words that the row's actions copy, throughout the row, by words not in it."""
    ids, kinds = row.numpy().T
    is_said = kinds == ACTION
    copied = np.intersect1d(ids[is_said], ids[~is_said])
    copied = np.intersect1d(copied, words)
    old = copied[rng.random(len(copied)) < 0.3]
    unused = np.setdiff1d(words, ids)
    old = old[: len(unused)]
    largest = max(ids.max(), words.max(initial=0))
    new_id = np.arange(largest + 1)
    new_id[old] = rng.permutation(unused)[: len(old)]
    return as_row(new_id[ids], kinds)


def rows_of_epoch(epoch: int, dialogues: list[dict], tokenizer, args: Args, rng) -> list[Row]:
    """The rows of an epoch: in epoch 0 the drills, in all others the dialogues, augmented as in D2."""
    if epoch == 0:
        ids = np.arange(257, len(tokenizer))  # behind the tiny model's end token and 256 bytes
        tokens = np.setdiff1d(ids, tokenizer.all_special_ids)
        return drills(tokens, args.drills, rng)
    rows = rows_to_learn(dialogues, tokenizer, args.context, args.reply_weight)
    words = np.array(models.words_of(tokenizer), dtype=int)
    for i, row in enumerate(rows):
        if rng.random() < args.exchanged:
            rows[i] = exchange_words(row, words, rng)
    return rows


def batches_of(rows: list[Row], size: int, rng) -> list[list[Row]]:
    """Batches of all rows in random order, except that rows of similar length share a batch."""
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    batches = []
    for window in models.micro_batches(shuffled, 16 * size):
        near = sorted(window, key=len)
        parts = models.micro_batches(near, size)
        batches += [parts[i] for i in rng.permutation(len(parts))]
    return batches


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: B rows of a batch, T tokens, M all tokens of a batch that have a loss, V vocabulary.
def imitation_loss(logp_M: torch.Tensor, weight_M: torch.Tensor, total_weight) -> torch.Tensor:
    """E1, in nats per token; for a part of a batch, its share of it. `total_weight` is the whole batch's.

    >>> imitation_loss(torch.tensor([-1.0, -3.0, -9.0]), torch.tensor([1.0, 1.0, 0.0]), 2.0).item()
    2.0
    """
    return -(logp_M * weight_M).sum() / total_weight  # E1


def lr_share(step: int, progress: float, warm_up: int) -> float:
    """The share of the peak learning rate: rises for `warm_up` steps, then falls to zero at progress 1.

    >>> [lr_share(step, step / 4, 2) for step in range(4)]
    [0.5, 0.75, 0.5, 0.25]
    """
    rising = (step + 1) / max(1, warm_up)
    return min(rising, 1 - progress)


# ---------------------------------------------------------- 4. models
def make_vocabulary(said: Counter, size: int, phrases: int):
    """D1: words and numbers that occur are single tokens, so that attending to one token is enough to copy.

    Everything else is written in pieces of words, characters and bytes, so that any text can be encoded.
    `said` counts lines of text; the most frequent ones become the phrases.
    """
    tokenizer = Tokenizer(BPE(byte_fallback=True))
    end = "<|endoftext|>"
    mark = "\u2581"  # marks the beginning of a word

    # A space between two words becomes the second word's mark; every other word is given one.
    blank_to_mark = normalizers.Replace(Regex(r"(?<=\w) (?=\w)"), mark)
    put_mark = normalizers.Replace(Regex(r"(?<![\w\u2581])(?=\w)"), mark)
    tokenizer.normalizer = normalizers.Sequence([blank_to_mark, put_mark])
    # A space at the start of a text joins its word, so that the first token of a reply tells what it says.
    pieces = Regex(r" ?\u2581\w+|[^\w\u2581\n]+\n?|\n")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    mark_to_blank = decoders.Replace(Regex(rf"(?<=\w){mark}"), " ")
    drop_mark = decoders.Replace(mark, "")
    join = [decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*join, mark_to_blank, drop_mark])

    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[chr(code) for code in range(32, 127)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(said.elements(), trainer)
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = parts["added_tokens"][:1]  # bytes must not be special: decoders would skip them
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    often = [text for text, _ in said.most_common(phrases)]
    lines = [AddedToken(text, normalized=False, single_word=True) for text in often]
    tokenizer.add_tokens(lines)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def make_tiny(dialogues: list[dict], args: Args):
    """D1: a small Llama with random weights; its attribute `tokenizer` is trained on these dialogues."""
    said = Counter()
    for dialogue in dialogues:
        texts = dialogue["observations"]
        actions = dialogue["actions"]
        replies = envs.replies(texts, actions)
        for text in [texts[0], *actions, *replies]:
            lines = re.split(r"\n(?=.)", text)  # a newline at the end stays
            said.update(filter(str.strip, lines))
    heads = max(1, args.width // 32)
    if args.width % (2 * heads):
        raise ValueError(f"--width {args.width}: take a multiple of 32, or an even number below it")
    tokenizer = make_vocabulary(said, args.vocabulary, args.phrases)
    end = tokenizer.eos_token_id
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        max_position_embeddings=args.context,
        initializer_range=args.init,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )  # D1
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.tokenizer = tokenizer
    model.context = args.context
    return model.eval()


def set_generation(model, max_action_tokens: int) -> None:
    """Makes `generate` sample one turn from the model's unmodified distribution, up to its end token."""
    tokenizer = model.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # masked, so any will do
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        top_k=0,
        max_new_tokens=max_action_tokens,
    )


def probe_score(model) -> None:
    """Raises ValueError if the states that `score` uses differ from those of the model's own forward pass."""
    ids_BT = models.probe_ids(model)

    def read():
        return model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state[0]

    models.compare(model, ids_BT, read, "what is scored")


def score(model, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [M] of the tokens that have a loss, and their kinds [M]. Padding is on the right: unseen."""
    padded_BT2 = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    padded_BT2 = padded_BT2.long().to(model.device)
    ids_BT, kind_BT = padded_BT2.unbind(-1)
    next_kind_BT = kind_BT[:, 1:]
    is_learned_BT = next_kind_BT != CONTEXT  # 0, as is padding
    output = model.base_model(input_ids=ids_BT, use_cache=False)
    hidden_MH = output.last_hidden_state[:, :-1][is_learned_BT]
    logits_MV = models.logits_of(model, hidden_MH)  # not [B, T, V], which would be large
    precise = torch.promote_types(logits_MV.dtype, torch.float32)
    target_M = ids_BT[:, 1:][is_learned_BT]
    nll_M = nn.functional.cross_entropy(logits_MV.to(precise), target_M, reduction="none")
    return -nll_M, next_kind_BT[is_learned_BT]


# ---------------------------------------------------------- 6. updates
def make_optimizers(model, kind: str, lr: float) -> list:
    """AdamW; or, D6, Muon for the matrices between embedding and output and AdamW for the rest."""
    # By their type, as names differ: GPT-2 calls its two wte and wpe.
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = []
    rest = []
    for name, parameter in model.named_parameters():
        is_inside = name.startswith(model.base_model_prefix) and id(parameter) not in embedded
        is_matrix = is_inside and parameter.ndim == 2
        if kind == "muon" and is_matrix:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    adamw = torch.optim.AdamW(rest, lr, betas=(0.9, 0.98), weight_decay=0.01)
    if not matrices:
        return [adamw]
    muon = torch.optim.Muon(matrices, lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [adamw, muon]


def update(model, optimizers, rows: list[Row], micro_batch: int, reply_weight: float) -> dict:
    """One step on E1, with `micro_batch` rows in memory at a time (0: all); returns metrics."""
    kinds = torch.cat([row[1:, 1] for row in rows])
    total_weight = (kinds == ACTION).sum() + reply_weight * (kinds == REPLY).sum()
    losses = []
    learned = []
    model.zero_grad()
    for part in models.micro_batches(rows, micro_batch or len(rows)):
        logp_M, kind_M = score(model, part)
        weight_M = torch.where(kind_M == ACTION, 1.0, reply_weight)
        loss = imitation_loss(logp_M, weight_M, total_weight)
        loss.backward()
        losses.append(loss.item())
        learned.append(torch.stack([-logp_M.detach(), kind_M]))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        raise ArithmeticError(f"the model diverged (gradient {norm.item()}): lower --lr")
    for optimizer in optimizers:
        optimizer.step()
    nll_M, kind_M = torch.cat(learned, 1)
    return {  # nan where a batch has no token of a kind
        "train/loss": sum(losses),
        "train/lr": optimizers[0].param_groups[0]["lr"],
        "train/nll_actions": nll_M[kind_M == ACTION].mean().item(),
        "train/nll_replies": nll_M[kind_M == REPLY].mean().item(),
        "train/grad_norm": norm.item(),
    }


# ---------------------------------------------------------- 7. evaluation
@torch.no_grad()
def play(model, args: Args, greedy: bool) -> list[dict]:
    """Plays every task once with `generate`, in lockstep; a dialogue is cut when the context has no room.

    Returns the dialogues with at least one action.
    """
    tokenizer = model.tokenizer
    options = envs.options(args.world)
    num_tasks = envs.make(args.env, **options).num_tasks
    tasks = list(range(num_tasks))[: args.eval_episodes or None]
    worlds = envs.VecTextEnv(args.env, len(tasks), **options)
    worlds.reset(seeds=tasks, indices=tasks)
    room = args.context - args.max_action_tokens
    torch.manual_seed(0)  # `generate` draws from torch's own generator
    while True:
        prompts = {}
        for i in worlds.alive():
            rows = rows_of(worlds.dialogues[i], tokenizer, args.context)
            if rows and len(rows[-1]) <= room:
                prompts[i] = rows[-1][:, 0].tolist()
            else:
                worlds.cut(i)
        if not prompts:
            break
        ids = {"input_ids": list(prompts.values())}
        inputs = tokenizer.pad(ids, padding_side="left", return_tensors="pt").to(model.device)
        written = model.generate(**inputs, do_sample=not greedy)
        written = written[:, inputs.input_ids.shape[1] :]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        worlds.step(dict(zip(prompts, texts, strict=True)))
    worlds.close()
    return [dialogue for dialogue in worlds.dialogues if dialogue["actions"]]


# ---------------------------------------------------------- 8. training
def main(args: Args) -> dict[str, float]:
    """Trains on drills, then dialogues, and evaluates; returns what it writes to summary.json."""
    run = runs.Run(args, "sft")

    # --- dialogues, model and optimisers, as they start
    world = envs.make(args.env, **envs.options(args.world))
    is_tiny = args.model == "tiny"
    if is_tiny:
        dialogues = read(world, args, 0)
        model = make_tiny(dialogues, args)
    else:  # loaded first, as that may fail and making dialogues may take minutes
        on_cpu = replace(args, device="cpu")
        model = models.load(transformers.AutoModelForCausalLM, args.model, on_cpu)
        args.context = min(args.context, model.context)
        dialogues = read(world, args, 0)
    models.prepare(model, args)
    tokenizer = model.tokenizer
    set_generation(model, args.max_action_tokens)
    probe_score(model)
    optimizers = make_optimizers(model, args.optimizer, args.lr)
    modules = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
    modules["model"] = models.learned(model)

    # --- a new run, or a resumed one: of `epoch`, which began with `rng`, `batch` batches are done
    position = {"epoch": 0, "batch": 0, "rng": run.rng.bit_generator.state}
    run.start(modules, episodes=len(dialogues), position=position)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens")
    if not (args.resume or is_tiny):
        sampled = play(model, args, greedy=False)
        run.log(envs.summarise(sampled, "eval/{}"), "return")

    # --- epoch by epoch
    logs = []
    position = run.state["position"]
    run.rng.bit_generator.state = position["rng"]  # makes the epoch's batches again
    for epoch in range(position["epoch"], args.epochs + 1):
        position["epoch"] = epoch
        position["rng"] = run.rng.bit_generator.state
        if args.fresh and epoch > 0:
            dialogues = read(world, args, epoch)
        rows = rows_of_epoch(epoch, dialogues, tokenizer, args, run.rng)
        batches = batches_of(rows, args.batch, run.rng)
        if epoch == 1 and position["batch"] == 0:
            for optimizer in optimizers:
                optimizer.state.clear()  # moments are tiny after the drills: steps would be huge
        # A decay of the rate spans `passes` epochs, of which `passed` are over; the drills have their own.
        passes = args.epochs if epoch > 0 else 1
        passed = max(0, epoch - 1)
        earlier = run.iteration - position["batch"]  # updates of the epochs before this one
        for iteration in run.iterations(earlier + len(batches)):
            number = position["batch"]
            step = passed * len(batches) + number
            progress = (passed + number / len(batches)) / passes
            share = lr_share(step, progress, args.warm_up)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = args.lr * share
            figures = update(model, optimizers, batches[number], args.micro_batch, args.reply_weight)
            logs.append(figures)
            position["batch"] = number + 1
            is_last = epoch == args.epochs and number + 1 == len(batches)
            is_due = args.save_every > 0 and iteration % args.save_every == 0
            if is_due or is_last or run.stopped:
                run.log(runs.means(logs), "")
                run.save(models.to_save("actor", model))
                logs = []
        if run.stopped or epoch == args.epochs:
            break
        position["batch"] = 0

    # --- evaluation, which a run that has ended has
    if not run.stopped and "eval/return_greedy" not in run.metrics[-1]:
        greedy = play(model, args, greedy=True)
        sampled = play(model, args, greedy=False)
        metrics = envs.summarise(greedy, "eval/{}_greedy")
        metrics |= envs.summarise(sampled, "eval/{}")
        run.log(metrics, "", sampled[:8])
        run.save(models.to_save("actor", model))  # again: its card has these figures
    return run.finish()


if __name__ == "__main__":
    runs.cli(Args, main)
