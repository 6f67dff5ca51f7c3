"""How fast archer.py is: utterances per second of its parts, the median of 5, and peak memory.

    python benchmarks/speed.py                 # a table; with --json one line

Every part gets what a run gives it: dialogues of the checkpoint's actor, in batches of the run's sizes; all
arguments of archer.py hold. A part's rate is that of the utterances that it plays, samples or learns from.
With --fresh an actor step samples, too.
"""

import contextlib
import copy
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import archer
import envs
from envs import models, runs


@dataclass
class Args(archer.Args):
    repeats: int = 5  # how often each part is timed, after once without
    json: bool = False  # one line of JSON instead of the table


def rate(part, repeats: int, device: str) -> float:
    """Utterances per second of `part`, a function that returns how many it has done."""
    part()
    measured = []
    for _ in range(repeats):
        began = time.perf_counter()
        utterances = part()
        if device != "cpu":
            torch.cuda.synchronize(device)
        measured.append(utterances / (time.perf_counter() - began))
    return statistics.median(measured)


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    worlds = envs.VecTextEnv(args.env, args.rollouts, **envs.options(args.world))
    source = args.actor or models.checkpoint_of(worlds.envs[0])
    with contextlib.redirect_stdout(sys.stderr):
        actor = models.load_actor(source, args)  # says what it loads
        body = models.load_critic(args.critic, actor, args)
    width = models.width_of(actor)
    baseline = archer.mlp(width, width, 0.0).to(args.device)
    critic = archer.Critic(body, 0.0, args.dtype).to(args.device)
    ref_model = models.reference_of(actor)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    # Learning rates of zero: every repetition does the same work.
    actor_optimizer, critic_optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.0) for model in (actor, critic)
    )

    def play():
        return archer.rollout(actor, worlds, args, rng)[0]

    def count(dialogues):
        return sum(len(dialogue["actions"]) for dialogue in dialogues)

    played = play()
    acted = played[: args.actor_batch]
    seen = archer.with_fresh(played[: args.critic_batch], actor, args, rng)
    critic_step = (critic, target_critic, critic_optimizer, seen, args)
    actor_step = (actor, ref_model, critic, baseline, actor_optimizer, acted, args, rng)
    parts = {
        "rollout": lambda: count(play()),
        "sampling in each state": lambda: count(archer.with_fresh(acted, actor, args, rng)),
        "critic step": lambda: archer.critic_update(*critic_step) and count(seen),
        "actor step": lambda: archer.actor_update(*actor_step) and count(acted),
    }
    results = {f"{name}, utterances/s": rate(part, args.repeats, args.device) for name, part in parts.items()}
    results["peak memory, MB"] = runs.peak_memory_mb()
    if args.device != "cpu":
        results["peak memory of the device, MB"] = torch.cuda.max_memory_allocated(args.device) / 2**20
    rows = [f"{name:<38}{value:8.0f}" for name, value in results.items()]
    print(json.dumps(results) if args.json else "\n".join(rows))


if __name__ == "__main__":
    main(tyro.cli(Args))
