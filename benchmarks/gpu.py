"""A GPU beside the CPU: the same step of learning on both; speed and memory at the size of GPT-2.

    bash benchmarks/gpu.sh                   # where there is a GPU: the scripts themselves, then this
    python benchmarks/gpu.py --device cpu    # without one, in tiny sizes, to see that it works

The same step: archer.py, loop_ppo.py and sft.py start from a ready-made checkpoint with the same dialogues.
Shown are the largest differences from what the CPU finds in float32. Gradients are compared after clipping:
their norm is at most 1. Random numbers are the same on all devices, so rollouts leave those of the CPU only
where a rounding tips the choice of a token.

Speed: of a GPT-2 with random weights; on the CPU with smaller batches, as it would take minutes. Parts and
units are those of speed.py and loop_speed.py; the peak of memory is that of all parts of a script.
"""

import contextlib
import copy
import gc
import io
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import loop_speed
import speed

import archer
import envs
import loop_ppo
import sft
from envs import models, runs

WORLD = "twenty-questions"


@dataclass
class Args:
    device: str = "cuda"  # cpu: everything in tiny sizes
    limit: float = 400.0  # seconds after which no section begins


# ---------------------------------------------------------- 1. the same step
def load(args):
    source = models.checkpoint_of(envs.make(WORLD))
    return models.load(transformers.AutoModelForCausalLM, source, args)


def still(model) -> torch.optim.Optimizer:
    """An optimizer that moves nothing: behind a step the gradients can be looked at."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def gradients(model) -> list:
    return [p.grad for p in model.parameters() if p.grad is not None]


@cache
def dialogues() -> list[dict]:
    """Eight demonstrations, with an utterance of the checkpoint in each state, sampled on the CPU."""
    args = archer.Args()
    made = envs.make(WORLD).demonstrations(8, 0)
    return archer.with_fresh(made, load(args), args, np.random.default_rng(0))


def archer_step(device: str, dtype: str) -> dict:
    """One update of the critic and one of the actor."""
    args = archer.Args(device=device, dtype=dtype, fresh=True)
    actor = load(args)
    body = copy.deepcopy(actor.base_model)
    body.tokenizer = actor.tokenizer
    width = models.width_of(actor)
    torch.manual_seed(0)
    critic = archer.Critic(body, -10.0, dtype)
    torch.nn.init.normal_(critic.a_heads.weight)  # at their start, zero, all advantages are 0
    critic.to(device)
    baseline = archer.mlp(width, width, 0.0).to(device)
    batch = dialogues()
    ids = archer.flat(batch, "ids")
    with torch.no_grad():
        logits_MV, token_M, *_ = archer.score(actor, batch, ids, 1.0, dtype)
        values = critic(batch)
    # The old log-probs are the device's own, so that the ratio is 1 there, too.
    logps = logits_MV.log_softmax(-1).gather(-1, token_M[:, None])[:, 0].tolist()
    own = []
    for dialogue in batch:
        sizes = [len(row) for row in dialogue["ids"]]
        rows = [logps[sum(sizes[:n]) : sum(sizes[: n + 1])] for n in range(len(sizes))]
        logps = logps[sum(sizes) :]
        own.append(dialogue | {"logps": rows})
    batch = own
    archer.critic_update(critic, copy.deepcopy(critic), still(critic), batch, args)
    with mock.patch.object(archer, "with_fresh", lambda dialogues, *_: dialogues):  # the batch has them
        archer.actor_update(actor, copy.deepcopy(actor), critic, baseline, still(actor), batch, args, None)
    return {
        "archer: logits": [logits_MV],
        "archer: V and Q": values,
        "archer: gradient of the critic": gradients(critic),
        "archer: gradient of the actor": gradients(actor),
    }


@cache
def loop_play(device: str, dtype: str) -> tuple:
    """The model, its arguments, and two rollouts of each of two tasks, with advantages."""
    torch.set_default_device(None)  # where loop_ppo.py loads a model
    sizes = {"worlds": 4, "context": 1024, "max_action_tokens": 16, "epochs": 1, "minibatch": 0}
    args = loop_ppo.Args(env=WORLD, device=device, dtype=dtype, min_advantage=0.0, **sizes)
    model = loop_ppo.make_model(args, models.checkpoint_of(envs.make(WORLD)))
    torch.set_default_device(device)
    tasks = [0, 0, 5, 5]
    played = loop_ppo.rollout(model, loop_ppo.make_worlds(args, "train"), tasks, tasks, range(4), args)
    for i, t in enumerate(played):
        t.advantage = (-1.0) ** i
    return model, args, played


def loop_step(device: str, dtype: str) -> dict:
    """One step with the CPU's rollouts, and what became of its own."""
    *_, shared = loop_play("cpu", "float32")
    model, args, own = loop_play(device, dtype)
    torch.set_default_device(device)
    with torch.no_grad():
        logps = [logp_M for pairs in loop_ppo.score(model, shared, args) for _, logp_M in pairs]
        pairs = [pair for pairs in loop_ppo.score(model, own, args) for pair in pairs]
    gap = max(largest(logp_M - torch.tensor(t.logps)) for t, logp_M in pairs)
    loop_ppo.update(model, still(model), shared, args, np.random.default_rng(0))
    same = sum(a.ids == b.ids for a, b in zip(own, shared, strict=True))
    return {
        "loop_ppo: log-probs": logps,
        "loop_ppo: gradient": gradients(model),
        "loop_ppo: log-probs sampled against scored, both there": f"{gap:.1e}",
        "loop_ppo: rollouts that are the CPU's, token for token": f"{same} of {len(own)}",
    }


def sft_step(device: str, dtype: str) -> dict:
    """One update."""
    args = sft.Args(device=device, dtype=dtype)
    model = load(args)
    models.prepare(model, args)
    rows = []
    for dialogue in dialogues():
        rows += sft.rows_of(dialogue, model.tokenizer, model.context)
    with torch.no_grad():
        logp_M, _ = sft.score(model, rows)
    sft.update(model, [still(model)], rows, micro_batch=0, reply_weight=1.0)
    return {"sft: log-probs": [logp_M], "sft: gradient": gradients(model)}


def largest(x) -> float:
    return x.abs().max().item()


def far(found, expected) -> str:
    """The largest difference between two lists of tensors; words are as they are."""
    if isinstance(found, str):
        return found
    pairs = zip(found, expected, strict=True)
    return f"{max(largest(x.detach().cpu().double() - y.detach().double()) for x, y in pairs):.1e}"


def differences(step, device: str):
    """A row for each thing that a step finds: its largest entry, and how far the device is from it."""
    of_cpu = step("cpu", "float32")
    found = [step(device, "float32"), step(device, "bfloat16")]
    for name, expected in of_cpu.items():
        size = expected if isinstance(expected, str) else f"{max(map(largest, expected)):.1e}"
        yield [name, size, *(far(of_dtype.get(name, ""), expected) for of_dtype in found)]


# ---------------------------------------------------------- 2. speed and memory
def gpt2(tiny: bool) -> transformers.GPT2LMHeadModel:
    """With random weights."""
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 4000} if tiny else {}
    torch.manual_seed(0)
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)
    return transformers.GPT2LMHeadModel(config).eval()


def archer_speed(device: str, dtype: str, n: int, tiny: bool):
    """The parts of speed.py: n rollouts, and steps with a quarter of these."""
    tokenizer = sft.make_tiny(envs.make(WORLD).demonstrations(100, 0), sft.Args()).tokenizer
    model = gpt2(tiny)
    body = model.transformer
    body.ln_f.bias.data[0] = 8.0  # so that it writes hardly a token that the tokenizer does not know
    body.wte.weight.data[:, 0] = torch.arange(model.config.vocab_size) < len(tokenizer)
    quarter = max(2, n // 4)
    args = speed.Args(device=device, dtype=dtype, repeats=1, json=True, rollouts=n, max_action_tokens=8)
    args.threads, args.actor_batch, args.critic_batch = torch.get_num_threads(), quarter, quarter
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as args.actor, contextlib.redirect_stdout(said):
        model.save_pretrained(args.actor)
        tokenizer.save_pretrained(args.actor)
        speed.main(args)
    for name, rate in json.loads(said.getvalue()).items():
        part, _, unit = name.rpartition(", ")
        if unit == "utterances/s":
            yield f"archer: {part}, {n if part == 'rollout' else quarter} dialogues", rate, unit


def loop_speeds(device: str, dtype: str, n: int, tiny: bool):
    """Rollouts of one turn, with 128 tokens read and 64 written, and a step with these."""
    prompt, written = (8, 4) if tiny else (128, 64)
    model = gpt2(tiny).to(device, getattr(torch, dtype))
    model.tokenizer = loop_speed.Tokens()
    model.context = model.config.max_position_embeddings
    args = loop_ppo.Args(dtype=dtype, minibatch=0, epochs=1, min_advantage=0.0)
    torch.set_default_device(device)
    played = []

    def write() -> int:
        played[:] = loop_speed.play(model, [i // 6 for i in range(n)], 1, prompt, written, 0)
        return sum(len(t.logps) for t in played)

    def learn() -> int:
        judged = loop_ppo.set_advantages(played, args.rollouts, args.normalise)
        loop_ppo.update(model, still(model), judged, args, np.random.default_rng(0))
        return sum(len(t.ids) for t in judged)

    yield f"loop_ppo: {n} rollouts", speed.rate(write, 1, device), "tokens/s"
    yield f"loop_ppo: step with {n} rollouts", speed.rate(learn, 1, device), "tokens/s"


def sft_speed(device: str, dtype: str, n: int, tiny: bool):
    """Updates with n rows of 384 tokens, in float32, as sft.py has it."""
    model = gpt2(tiny).to(device)
    tokens = 40 if tiny else 384
    kinds = torch.full((tokens,), sft.REPLY)
    rows = [torch.stack([torch.randint(1, 4000, (tokens,)), kinds], 1) for _ in range(n)]

    def learn() -> int:
        sft.update(model, [still(model)], rows, micro_batch=0, reply_weight=1.0)
        return n * tokens

    yield f"sft: update with {n} dialogues", speed.rate(learn, 1, device), "tokens/s"


def speeds(part, device: str, dtype: str, *sizes):
    """The rows of a part: what, where, how fast, and the peak memory of the device, or of the process."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    for name, rate, unit in part(device, dtype, *sizes):
        *_, peak = runs.peak_memory(device).values()
        yield [name, f"{device}, {dtype}", f"{rate:,.0f} {unit}", f"{peak:,.0f}"]


# ---------------------------------------------------------- 3. the tables
def show(name: str, rows, deadline: float) -> bool:
    """Prints the rows that come, unless it is too late; returns whether it went well."""
    if time.time() > deadline:
        print(f"| {name} | left out | | |", flush=True)
        return True
    try:
        with contextlib.redirect_stdout(sys.stderr):  # models say what they load
            rows = list(rows)
    except Exception as error:  # what comes next is worth a try
        traceback.print_exc()
        why = (str(error).strip() or "no reason given").splitlines()[0]
        rows = [[name, f"failed: {type(error).__name__}: {why[:100]}", "", ""]]
    torch.set_default_device(None)  # loop_ppo.py sets it
    gc.collect()
    torch.cuda.empty_cache()
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    return not any(row[1].startswith("failed") for row in rows)


def main(args: Args) -> bool:
    """Prints the tables; returns whether all that began went well."""
    deadline = time.time() + args.limit
    tiny = args.device == "cpu"
    threads = 1 if tiny else min(16, os.cpu_count())
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    card = "no GPU" if tiny else torch.cuda.get_device_name(args.device)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"\n{card}; {versions}; {threads} of {os.cpu_count()} CPU cores.")
    print(f"\n| against the CPU, float32 | there | {args.device}, float32 | {args.device}, bfloat16 |")
    print("|---|---|---|---|")
    well = []
    for step in (archer_step, loop_step, sft_step):
        well.append(show(step.__name__, differences(step, args.device), deadline))

    print("\n| GPT-2's size, random weights | where | speed | peak memory, MB |\n|---|---|---|---|")
    n = 6 if tiny else 48
    places = [(args.device, "float32", n), (args.device, "bfloat16", n), ("cpu", "float32", 6)]
    for device, dtype, n in places[: 2 if tiny else 3]:
        parts = [archer_speed, loop_speeds, sft_speed]
        for part in parts[: 2 if dtype == "bfloat16" else 3]:
            rows = speeds(part, device, dtype, n, tiny)
            well.append(show(f"{part.__name__}, {device}, {dtype}", rows, deadline))
    return all(well)


if __name__ == "__main__":
    sys.exit(not main(tyro.cli(Args)))
