"""Supervised fine-tuning on dialogues: what the other scripts start from, and what they must surpass.

    python sft.py --env twenty-questions                                  # a small Llama from nothing
    python sft.py --env twenty-questions --dataset FILE --keep 0.1        # filtered imitation of a file
    python sft.py --env guess-my-city --model gpt2 --lr 2e-4 --batch 32   # the paper's model, rate and batch
    python sft.py --resume runs/...                     # the commands behind checkpoints/ are in its README

Paper: Zhou et al. 2024 (ArCHer), arXiv:2402.19446
  E1  -sum w log pi(x_t | x_<t) / sum w,  w = 1 where the agent speaks      BC in sec. 5.7   imitation_loss
Differs from the paper; in brackets the switch (docs/sft.md has the reasons):
  D1  A tiny Llama from nothing (--model gpt2), in whose vocabulary a word is one token, or a whole line.
  D2  Drills on repeated words (--drills N) teach it to copy, exchanged words (--exchanged SHARE) to read.
  D3  It learns to foresee the replies, too (--reply-weight 0), and so what a question reveals.
  D4  An action that a dialogue marks as a mistake is read but not imitated; what it leads to is foreseen.
  D5  Filtered BC (--keep 0.1) is that of sec. 5.7, on a fixed set; sec. 5.2's learns from newest rollouts.
  D6  Muon, if asked for (--optimizer muon): with it a tiny model finds sooner how to look back.
"""

import json
import re
import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter

import envs.datasets
from envs import runs


# ---------------------------------------------------------- 1. arguments
@dataclass
class Args:
    # --- run
    env: str = "twenty-questions"  # the world: an id of `python -m envs` or your own (docs/your_world.md)
    world: str = ""  # its options, as NAME=VALUE with a comma between two (docs/worlds.md)
    seed: int = 1  # of all that is random but the evaluation; 0 or more
    runs: str = "runs"  # folder in which the run's own folder is made
    name: str = ""  # of the run, for the name of its folder
    resume: str = ""  # folder of a run to continue; its saved arguments are used unless given anew
    device: str = "cpu"  # cpu, cuda, cuda:1 ...
    threads: int = 1  # on the CPU; with one, resuming is exact to the bit
    save_every: int = 200  # updates between lines of metrics, each with a checkpoint; Ctrl-C writes one, too

    # --- model
    model: str = "tiny"  # tiny (a small Llama from nothing) or a causal LM: Hugging Face name or local folder
    width: int = 96  # hidden size of the tiny model; an attention head has 32 of it
    inner: int = 192  # hidden size of its feed-forward layers
    layers: int = 3  # of the tiny model
    init: float = 0.1  # standard deviation of its first weights
    vocabulary: int = 4000  # of its tokens, at most: words, numbers, pieces of words, bytes
    phrases: int = 0  # beyond these, whole lines of one token each, the most frequent ones
    context: int = 2048  # tokens of a dialogue, at most

    # --- data
    dataset: str = ""  # file of dialogues (envs/datasets.py has the formats) instead of demonstrations
    demonstrations: int = 20_000  # dialogues that the world's scripted player makes
    fresh: bool = False  # new ones for every epoch
    keep: float = 1.0  # share of the dialogues that is learned, the best by return (paper: 0.1)
    drills: int = 0  # random sequences that repeat, learned before all else (D2)
    exchanged: float = 0.0  # share of the dialogues in which words are exchanged (D2)

    # --- algorithm
    reply_weight: float = 1.0  # of a reply's token in the loss (D3; 0: none); one of the agent's has 1
    epochs: int = 3  # passes over the dialogues
    batch: int = 16  # dialogues in an update (paper, Table 3: 32)
    micro_batch: int = 0  # of these, how many are in memory at a time, activations being recomputed; 0: all
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon moves the matrices of the layers (D6)
    lr: float = 3e-3  # its peak (paper, Table 3: 2e-4; Filtered BC 3e-4 or 3e-5)
    warm_up: int = 50  # updates in which it rises to the peak (0: none); then it falls to zero, both linearly

    # --- evaluation
    max_action_tokens: int = 48  # tokens after which an action is cut in the evaluation
    eval_episodes: int = 0  # tasks of the evaluation, from the first on; 0 takes all


# ---------------------------------------------------------- 2. data: turns, trajectories, replay
CONTEXT, ACTION, REPLY = range(3)  # what a token is; the last two are learned


@lru_cache(maxsize=100_000)  # worlds repeat themselves
def encode(tokenizer, text: str) -> list[int]:
    """Token ids of a piece of text. The list is shared: do not change it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@lru_cache(maxsize=8)
def chat_pieces(tokenizer) -> tuple[str, str, str]:
    """A chat template's (head, to_prompt, to_reply): head prompt to_reply reply EOS to_prompt prompt ..."""
    if not tokenizer.chat_template:
        return "", "", ""
    chat = [{"role": role, "content": f"<{i}>"} for i, role in enumerate(("user", "assistant", "user"))]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    head, _, to_prompt, to_reply = re.split("<[012]>", text)  # _ is to_reply once more
    if not to_prompt.startswith(tokenizer.eos_token):
        raise ValueError(f"the chat template ends turns with another token than {tokenizer.eos_token!r}")
    return head, to_prompt.removeprefix(tokenizer.eos_token), to_reply


def read(world, args: Args, epoch: int) -> list[dict]:
    """The dialogues to learn from, of a file or of the world's player, or the best of them."""
    if args.dataset:
        dialogues, notes = envs.datasets.read_dialogues(args.dataset, world.append_only)
        print(*notes, sep="\n", end="\n" if notes else "")
    else:
        dialogues = world.demonstrations(args.demonstrations, args.seed + epoch * args.fresh)
    if args.keep < 1:  # D5
        dialogues.sort(key=lambda dialogue: -sum(dialogue["rewards"]))
    return dialogues[: round(args.keep * len(dialogues))]


def rows_of(dialogue: dict, tokenizer, args: Args) -> list[torch.Tensor]:
    """A dialogue as rows [T, 2] of tokens and what they are: prompt, action, end of turn, reply, action ...

    Where an observation does not begin with the last one and the action, the world has rewritten it. As much
    of it as fits is the reply that ends this row, and all of it is the prompt of the next.
    No rows come back for a dialogue that does not fit.
    """
    texts, actions = dialogue["observations"], dialogue["actions"]
    head, to_prompt, to_reply = chat_pieces(tokenizer)
    rows = [[(token, CONTEXT) for token in encode(tokenizer, head + texts[0] + to_reply)]]
    imitated = dialogue.get("imitate", [True] * len(actions))
    for before, action, after, is_imitated in zip(texts, actions, texts[1:], imitated, strict=False):
        kind = ACTION if is_imitated else CONTEXT  # D4
        rows[-1] += [(token, kind) for token in [*encode(tokenizer, action), tokenizer.eos_token_id]]
        reply = encode(tokenizer, to_prompt + after.removeprefix(before + action) + to_reply)
        is_rewritten = not after.startswith(before + action)
        room = max(0, args.context - len(rows[-1])) if is_rewritten else len(reply)
        rows[-1] += [(token, REPLY if args.reply_weight else CONTEXT) for token in reply[:room]]  # D3
        if is_rewritten:
            rows.append([(token, CONTEXT) for token in encode(tokenizer, head + after + to_reply)])
    return [torch.tensor(row).int() for row in rows] if max(map(len, rows)) <= args.context else []


def drills(words: np.ndarray, n: int, rng, length: int = 96) -> list[torch.Tensor]:
    """D2: random words that repeat every 8 to 39 places; what repeats is to be predicted."""
    periods = rng.integers(8, 40, n)
    ids = [np.resize(rng.choice(words, period), length) for period in periods]
    kinds = np.where(np.arange(length) > periods[:, None], ACTION, CONTEXT)
    return list(torch.tensor(np.stack([ids, kinds], -1), dtype=torch.int32)) if n else []


def exchange_words(row: torch.Tensor, words: np.ndarray, rng) -> torch.Tensor:
    """D2: the row with 30 % of the words that its actions copy replaced throughout by words not in it."""
    ids, kinds = row.numpy().T
    copied = np.intersect1d(words, np.intersect1d(ids[kinds == ACTION], ids[kinds != ACTION]))
    old = copied[rng.random(len(copied)) < 0.3]
    new_id = np.arange(max(ids.max(), words.max()) + 1)
    new_id[old] = rng.permutation(np.setdiff1d(words, ids))[: len(old)]
    return torch.tensor(np.stack([new_id[ids], kinds], 1), dtype=torch.int32)


def lessons(world, tokenizer, dialogues: list[dict], args: Args, rng, state: dict):
    """Yields a batch, its share of --lr and whether it is the last, from `state` on; epoch 0: drills."""
    names, window = tokenizer.convert_ids_to_tokens(range(len(tokenizer))), 16 * args.batch
    words = np.array([i for i, name in enumerate(names) if re.fullmatch(r"[\u2581\u0120]\w+", name)])
    for epoch in range(state["epoch"], args.epochs + 1):
        state |= {"epoch": epoch, "rng": rng.bit_generator.state}  # from which its batches can be made again
        if epoch == 0:
            rows = drills(np.arange(257, len(tokenizer)), args.drills, rng)  # all but bytes and the end
        else:
            dialogues = read(world, args, epoch) if args.fresh else dialogues
            found = [rows_of(dialogue, tokenizer, args) for dialogue in dialogues]
            print(f"epoch {epoch}: {found.count([])} of {len(found)} dialogues left out as they do not fit")
            rows = [row for part in found for row in part if row[:, 1].any()]
            if not rows:
                raise ValueError(f"nothing to learn fits into {args.context} tokens; give a longer --context")
            rows = [exchange_words(row, words, rng) if rng.random() < args.exchanged else row for row in rows]
        order, batches = rng.permutation(len(rows)), []
        for first in range(0, len(rows), window):  # in each window, rows of similar length share a batch
            near = sorted(order[first : first + window], key=lambda i: len(rows[i]))
            parts = [near[i : i + args.batch] for i in range(0, len(near), args.batch)]
            batches += [parts[i] for i in rng.permutation(len(parts))]
        for batch in batches[state["batch"] :]:
            done = state["batch"] / len(batches)
            progress = (epoch - 1 + done) / args.epochs if epoch else done
            step = max(0, epoch - 1) * len(batches) + state["batch"]
            share = min((step + 1) / args.warm_up, 1 - progress)  # up, then down; drills have their own
            state["batch"] += 1
            yield [rows[i] for i in batch], share, epoch == args.epochs and batch is batches[-1]
        state["batch"] = 0


# ---------------------------------------------------------- 3. the maths: pure functions
# Suffixes name the axes: B rows of a batch, T tokens, M all tokens of a batch to learn, V the vocabulary.
def imitation_loss(logp_M: torch.Tensor, weight_M: torch.Tensor) -> torch.Tensor:
    """E1: the weighted mean of -log pi, in nats a token.

    >>> imitation_loss(torch.tensor([-1.0, -3.0, -9.0]), torch.tensor([1.0, 1.0, 0.0])).item()
    2.0
    """
    return -(logp_M * weight_M).sum() / weight_M.sum()  # E1


# ---------------------------------------------------------- 4. models
def make_vocabulary(said: Counter, size: int, phrases: int):
    """D1: words and numbers that occur are tokens of their own, so that one look is enough to copy them.

    All else is written in pieces of words, characters and bytes, so that every text can be.
    """
    # A blank between two words becomes the second one's mark, and any other word gets one.
    tokenizer, end, mark = Tokenizer(models.BPE(byte_fallback=True)), "<|endoftext|>", "\u2581"
    drop = normalizers.Replace(Regex(r"(?<=\w) (?=\w)"), mark)
    put = normalizers.Replace(Regex(r"(?<![\w\u2581])(?=\w)"), mark)
    tokenizer.normalizer = normalizers.Sequence([drop, put])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\u2581\w+|[^\w\u2581\n]+|\n"), "isolated")
    back = decoders.Replace(Regex(rf"(?<=\w){mark}"), " "), decoders.Replace(mark, "")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), *back])
    options = {"special_tokens": [end, *(f"<0x{byte:02X}>" for byte in range(256))]}
    options |= {"initial_alphabet": [chr(code) for code in range(32, 127)], "vocab_size": size}
    tokenizer.train_from_iterator(said.elements(), trainers.BpeTrainer(show_progress=False, **options))
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = parts["added_tokens"][:1]  # bytes are no special tokens, which decoders skip
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    often = [AddedToken(text, normalized=False, single_word=True) for text, _ in said.most_common(phrases)]
    tokenizer.add_tokens(often)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def make_tiny(dialogues: list[dict], args: Args):
    """D1: a small Llama with random weights, and a tokenizer for what is said in these dialogues."""
    said = Counter()
    for d in dialogues:
        for text in [d["observations"][0], *d["actions"], *envs.replies(d["observations"], d["actions"])]:
            said.update(filter(str.strip, re.split(r"\n(?=.)", text)))  # lines; the last one keeps its end
    tokenizer = make_vocabulary(said, args.vocabulary, args.phrases)
    config = {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
    config |= {"hidden_size": args.width, "intermediate_size": args.inner, "num_hidden_layers": args.layers}
    config |= {"num_attention_heads": max(1, args.width // 32), "max_position_embeddings": args.context}
    config |= {"vocab_size": len(tokenizer), "tie_word_embeddings": True}
    config = transformers.LlamaConfig(initializer_range=args.init, **config)  # D1
    return transformers.AutoModelForCausalLM.from_config(config).to(args.device).eval(), tokenizer


def load(auto, source: str, args: Args):
    """A model without dropout, in float32, and its tokenizer, from a local folder or by Hugging Face name."""
    options = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
    try:
        model, report = auto.from_pretrained(source, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if missing := [name for name in report["missing_keys"] if "pooler" not in name]:
            raise ValueError(f"no weights for {missing[0]}")  # else they would be drawn at random
    except Exception as error:  # a damaged folder can raise anything
        why = runs.why_not_loaded(source, error, args)
        raise ValueError(f"no model in {source}: {why}") from error
    return model.to(args.device).eval(), tokenizer


def score(model, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [M] of all tokens to learn, and what they are [M]. Padding is behind: no token sees it."""
    ids_BT, kind_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True).long().to(model.device).unbind(-1)
    is_learned_BT = kind_BT[:, 1:] != CONTEXT  # which is 0, as padding is
    hidden_BTH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    logits_MV = model.get_output_embeddings()(hidden_BTH[:, :-1][is_learned_BT])  # [B, T, V] would be large
    nll_M = nn.functional.cross_entropy(logits_MV, ids_BT[:, 1:][is_learned_BT], reduction="none")
    return -nll_M, kind_BT[:, 1:][is_learned_BT]


# ---------------------------------------------------------- 6. updates
def make_optimizers(model, args: Args) -> list[torch.optim.Optimizer]:
    """AdamW, or D6: Muon for the matrices between embedding and output, and AdamW for the rest."""
    inside = {
        name: p for name, p in model.base_model.named_parameters() if p.ndim == 2 and "embed" not in name
    }
    matrices = list(inside.values()) if args.optimizer == "muon" else []
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def update(model, optimizers: list, rows: list[torch.Tensor], args: Args) -> dict[str, float]:
    """One step on E1. With micro-batches, activations are recomputed in the backward pass, part by part."""
    scorer = partial(checkpoint, score, use_reentrant=False) if args.micro_batch else score
    size = args.micro_batch or len(rows)
    parts = [scorer(model, rows[i : i + size]) for i in range(0, len(rows), size)]
    logp_M, kind_M = map(torch.cat, zip(*parts, strict=True))
    loss = imitation_loss(logp_M, torch.where(kind_M == ACTION, 1.0, args.reply_weight))
    model.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(loss + norm):
        raise ArithmeticError(f"the model diverged: loss {loss:.3g}, gradient {norm:.3g}; lower --lr")
    for optimizer in optimizers:
        optimizer.step()
    metrics = {"train/loss": loss.item(), "train/lr": optimizers[0].param_groups[0]["lr"]}
    for kind, name in ((ACTION, "actions"), (REPLY, "replies")):
        if (kind_M == kind).any():
            metrics[f"train/nll_{name}"] = -logp_M[kind_M == kind].mean().item()
    return metrics | {"train/grad_norm": norm.item()}


# ---------------------------------------------------------- 7. evaluation
@torch.no_grad()
def play(model, tokenizer, args: Args, greedy: bool) -> list[dict]:
    """Every task once, in lockstep, `generate` writing. Where the context has no room, a dialogue ends."""
    options = envs.options(args.world)
    tasks = list(range(envs.make(args.env, **options).num_tasks))[: args.eval_episodes or None]
    worlds = envs.VecTextEnv(args.env, len(tasks), **options)
    worlds.reset(seeds=tasks, indices=tasks)
    torch.manual_seed(0)
    while True:
        rows = {i: rows_of(worlds.dialogues[i], tokenizer, args) for i in worlds.alive()}
        ids = {i: parts[-1][:, 0].tolist() for i, parts in rows.items() if parts}
        ids = {i: part for i, part in ids.items() if len(part) + args.max_action_tokens <= args.context}
        if not ids:
            worlds.close()
            return worlds.dialogues
        inputs = tokenizer.pad({"input_ids": [*ids.values()]}, padding_side="left", return_tensors="pt")
        written = model.generate(**inputs.to(model.device), do_sample=not greedy)
        texts = tokenizer.batch_decode(written[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        actions = dict(zip(ids, texts, strict=True))
        worlds.step([actions.get(i) for i in range(len(tasks))])


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
    """Drills, then dialogues, update by update, then an evaluation; returns what is in summary.json."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started, cpu_started = time.time(), time.process_time()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng, generator = np.random.default_rng(args.seed), torch.default_generator  # of `generate`
    world = envs.make(args.env, **envs.options(args.world))

    # --- the dialogues, and all that learns, as it starts
    is_tiny, auto = args.model == "tiny", transformers.AutoModelForCausalLM
    loaded = None if is_tiny else load(auto, args.model, args)  # first, as dialogues may take minutes to make
    dialogues = read(world, args, 0)
    model, tokenizer = loaded or make_tiny(dialogues, args)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # masked, so that any will do
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": args.max_action_tokens}
    model.generation_config = transformers.GenerationConfig(**ends, **sampling)
    optimizers = make_optimizers(model, args)
    modules = {"model": model} | {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}

    # --- a new run, or one that goes on
    run = runs.folder(args, "sft")
    if args.resume:
        state = restore(run, modules, rng, generator)
        started, cpu_started = started - state["seconds"], cpu_started - state["cpu_seconds"]
    else:
        state = {"iteration": 0, "epoch": 0, "batch": 0, "metrics": [], "eval": {}, "warm_start_return": None}
        if not is_tiny:
            state["warm_start_return"] = envs.summarise(play(model, tokenizer, args, greedy=False))["return"]
    runs.write(run / "args.json", [asdict(replace(args, resume=""))], indent=2)
    print(f"{run}: {model.num_parameters():,} parameters, {len(tokenizer):,} tokens")
    writer = SummaryWriter(str(run), purge_step=state["iteration"] + 1)
    writer.add_text("args", "|name|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in vars(args).items()))
    stopped = runs.stop_signals()  # Ctrl-C ends the update that it falls into

    # --- updates, and after the last one the evaluation
    rows = []
    for batch, share, is_last in lessons(world, tokenizer, dialogues, args, rng, state):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * share
            if state["epoch"] == state["batch"] == 1:
                optimizer.state.clear()  # tiny once drills are mastered, so that steps would be huge
        rows.append(update(model, optimizers, batch, args))
        state["iteration"] += 1
        for suffix in ("_greedy", "") if is_last else ():
            played = play(model, tokenizer, args, greedy=suffix == "_greedy")
            state["eval"] |= {f"eval/{name}{suffix}": x for name, x in envs.summarise(played).items()}
        if stopped or is_last or state["iteration"] % args.save_every == 0:
            metrics = runs.means(rows) | state["eval"]
            state["metrics"].append(runs.log(writer, state["iteration"], metrics, ""))
            state["seconds"], state["cpu_seconds"] = time.time() - started, time.process_time() - cpu_started
            state["modules"] = {name: module.state_dict() for name, module in modules.items()}
            with runs.saving(run, state["iteration"]):  # a full disk, for example, does not end the run
                runs.write(run / "metrics.jsonl", state["metrics"])
                if is_last:
                    runs.write(run / "rollouts.jsonl", played[:8])
                save(run, state | {"generator": generator.get_state()}, {"actor": (model, tokenizer)})
            rows = []
        if stopped:
            break
    writer.close()

    summary = {f"eval_{x}": state["eval"].get(f"eval/{x}") for x in ("return", "return_greedy", "success")}
    summary |= {name: state[name] for name in ("warm_start_return", "seconds", "cpu_seconds")}
    summary |= {"episodes": len(dialogues), "seed": args.seed} | runs.facts()
    runs.write(run / "summary.json", [summary], indent=2)
    print(json.dumps(summary))
    return summary


if __name__ == "__main__":
    runs.cli(Args, main)
