"""How fast archer.py is: utterances per second of its parts, the median of 5, and peak memory.

    python benchmarks/speed.py                 # a table; with --json one line

Every part gets what a run gives it: dialogues of a briefly warm-started actor, in batches of the run's sizes; all
arguments of archer.py hold. The rate of a part is that of the utterances that it plays, samples or learns from.
"""

import copy
import json
import resource
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


@dataclass
class Args(archer.Args):
    demonstrations: int = 2000  # of a short warm start, not timed, that makes utterances as long as real ones are
    warm_start_epochs: int = 1  # passes over them
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
    rng, generator = np.random.default_rng(args.seed), torch.Generator(args.device).manual_seed(args.seed)
    worlds = envs.VecTextEnv(args.env, args.rollouts)
    append_only = worlds.envs[0].append_only

    demonstrations = archer.read_demonstrations(args, worlds.envs[0])
    texts = [t.observations[-1:] if append_only else t.observations for t in demonstrations[:3000]]
    actor = archer.make_actor(args, args.actor, [text for part in texts for text in part])
    archer.warm_start(actor, demonstrations, append_only, args, rng)
    baseline = archer.mlp(actor.config.hidden_size, actor.config.hidden_size, 0.0).to(args.device)
    critic = archer.make_critic(args, args.critic, actor, append_only, 0.0)
    start_actor, target = (copy.deepcopy(model).requires_grad_(False) for model in (actor, critic))
    # Learning rates of zero: every repetition does the same work.
    actor_optimizer, critic_optimizer = (torch.optim.AdamW(model.parameters(), lr=0.0) for model in (actor, critic))

    def play():
        return archer.rollout(actor, worlds, args, generator, list(range(args.rollouts)))[0]

    def sample(batch):
        return archer.fresh_utterances(actor, batch, append_only, args, generator)

    played = play()
    seen, acted = played[: args.critic_batch], played[: args.actor_batch]
    ids, texts = sample(acted), [[archer.spoken(actor.tokenizer, x) for x in row] for row in sample(seen)]
    critic_step = (critic, target, critic_optimizer, seen, texts, args)
    actor_step = (actor, start_actor, critic, baseline, actor_optimizer, acted, ids, append_only, args)
    parts = {
        "rollout": lambda: sum(map(len, play())),
        "sampling for the steps": lambda: sum(map(len, sample(acted))),
        "critic step": lambda: archer.critic_update(*critic_step) and sum(map(len, seen)),
        "actor step": lambda: archer.actor_update(*actor_step) and sum(map(len, acted)),
    }
    results = {f"{name}, utterances/s": rate(part, args.repeats, args.device) for name, part in parts.items()}
    unit = 2 ** (20 if sys.platform == "darwin" else 10)
    results["peak memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    if args.device != "cpu":
        results["peak memory of the device, MB"] = torch.cuda.max_memory_allocated(args.device) / 2**20
    rows = [f"{name:<38}{value:8.0f}" for name, value in results.items()]
    print(json.dumps(results) if args.json else "\n".join(rows))


if __name__ == "__main__":
    main(tyro.cli(Args))
