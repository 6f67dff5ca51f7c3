"""Behaviour cloning on gold paths: the row "BC" of Table 3, with the network of lge_drrn.py.

    python benchmarks/lge_bc.py --task find-living-thing --seed 1
    python benchmarks/lge_bc.py --env school --task find-plant

The network that is Q there scores the actions here: it learns to put the gold action above other valid ones
(cross-entropy against so many drawn from them) and is judged as the explorer is, greedily, among all valid
actions. The paper's BC is another model, Macaw, which writes its action (sec. 4.2). The run's folder has what
a run of lge_drrn.py has but for checkpoints. ScienceWorld needs its package and a Java, the school nothing.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import lge_drrn
from envs import runs
from envs.worlds import school, scienceworld


@dataclass
class Args:
    task: str = "find-living-thing"  # by name or by the paper's number, as T12
    seed: int = 1  # of everything random in the run
    paths: int = 100  # training variations, at most, whose gold paths are learned
    steps: int = 1_000  # updates
    batch: int = 32  # steps of gold paths in an update
    negatives: int = 63  # valid actions drawn for each of them
    lr: float = 1e-3  # of Adam, at the start; it falls to zero
    eval_episodes: int = 50  # greedy episodes on test variations
    dev_episodes: int = 10  # greedy episodes on dev variations
    guide: str = "none"  # none: judged among all valid actions; a folder: among those that the guide leaves
    runs: str = "runs"  # folder in which the run's own folder is made
    name: str = ""  # of the run, for the name of its folder
    env: str = "scienceworld"  # or school
    resume: str = ""  # it cannot be resumed
    device: str = "cpu"
    threads: int = 1  # of the network on the CPU


def gold_steps(worlds, texts, explorer: lge_drrn.Args, indices: list[int]) -> list[tuple]:
    """(state, gold action, other valid actions) of the steps of gold paths whose action is valid there."""
    steps, n = [], len(worlds.worlds)
    numbers = lge_drrn.WORLDS[explorer.env].variations(explorer.task, "train")
    for start in range(0, len(indices), n):
        some = indices[start : start + n]
        infos = dict(enumerate(worlds.reset("train", some)))
        paths = [path_of(explorer, numbers[index]) for index in some]
        for t in range(max(map(len, paths))):
            actions = {i: paths[i][t] for i in infos if t < len(paths[i])}
            for i, action in actions.items():
                view, gold = lge_drrn.to_view(infos[i], texts), texts.add(action)
                if gold in view.valid and len(view.valid) > 1:
                    steps.append((view.state, gold, view.valid[view.valid != gold]))
            results = zip([*actions], worlds.step(actions), strict=True)
            infos = {i: info for i, (result, info) in results if not (result[2] or result[3])}
    return steps


def path_of(explorer: lge_drrn.Args, number: int) -> list[str]:
    """The gold path of a variation."""
    if explorer.env == "school":
        return list(school.gold_path(explorer.task, number))
    return scienceworld.gold_path(explorer.task, number, explorer.simplifications)


def learn(network, texts, optimizer, steps: list[tuple], negatives: int, rng) -> float:
    """One descent on the cross-entropy of the gold action among itself and `negatives` others."""
    states, gold, others = zip(*steps, strict=True)
    sets = [[action, *rng.choice(row, negatives)] for action, row in zip(gold, others, strict=True)]
    columns = zip(lge_drrn.FIELDS, np.array(states).T, strict=True)
    fields = [network.encode(name, texts, column) for name, column in columns]
    action_MH = network.encode_action(texts, np.array(sets).ravel())
    action_NAH = action_MH.unflatten(0, (len(steps), -1))
    q_NA = network.q(network.state_part(torch.cat(fields, -1))[:, None], action_NAH)
    loss = nn.functional.cross_entropy(q_NA, torch.zeros(len(steps), dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main(args: Args) -> dict[str, float]:
    """Plays gold paths, learns from them, plays greedily; returns what it writes to summary.json."""
    same = ("env", "task", "seed", "guide", "eval_episodes", "dev_episodes")
    explorer = lge_drrn.complete(lge_drrn.Args(**{name: getattr(args, name) for name in same}))
    if args.resume:
        raise ValueError(f"--resume {args.resume}: BC is quick, and cannot be resumed; start it again")
    run = runs.Run(args, "lge_bc")
    worlds = lge_drrn.start_worlds(explorer)
    words = worlds.texts(explorer.vocabulary_steps, run.rng)
    texts = lge_drrn.Texts(lge_drrn.make_vocabulary(words, explorer.vocabulary))
    guide = lge_drrn.Guide(explorer, texts)
    torch.manual_seed(args.seed)
    network = lge_drrn.DRRN(texts.tokenizer.get_vocab_size(), explorer.hidden)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr)

    numbers = lge_drrn.WORLDS[args.env].variations(explorer.task, "train")
    order = run.rng.permutation(len(numbers)).tolist()[: args.paths]
    steps = gold_steps(worlds, texts, explorer, order)
    run.start({})
    print(f"{run.folder}: {len(steps)} steps of {len(order)} gold paths")
    losses = []
    for step in run.iterations(args.steps):
        optimizer.param_groups[0]["lr"] = args.lr * (1 - (step - 1) / args.steps)
        batch = [steps[i] for i in run.rng.integers(len(steps), size=args.batch)]
        losses.append(learn(network, texts, optimizer, batch, args.negatives, run.rng))
        metrics, transcripts = {"bc/loss": float(np.mean(losses[-100:]))}, []
        if step == args.steps:
            player = lge_drrn.Copy(network, texts)
            last = explorer.steps  # it chooses the variations
            evaluation, transcripts = lge_drrn.greedy_play(
                player, guide, worlds, explorer.epsilon, explorer, last
            )
            metrics |= evaluation
        if run.is_due(100) or run.stopped:
            run.log(metrics, "loss|score", transcripts)
        if run.stopped:  # nothing is saved, so that the run cannot go on
            break
    worlds.close()
    return run.finish(steps=run.iteration, paths=len(order))


if __name__ == "__main__":
    runs.cli(Args, main)
