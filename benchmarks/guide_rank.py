"""What a guide of LGE thinks best, as in the paper's Tables 2 and 5: in states of a task, or for any text.

    python benchmarks/guide_rank.py find-plant
    python benchmarks/guide_rank.py "Your task is to bake a cake." --guide runs/RUN/guide
    python benchmarks/guide_rank.py all            # which threshold on the cosine would do instead of k

A star is on what the gold path takes. A description of one's own ranks all that can be done in the first
states of all tasks. The states are those that guide_simcse.py ranks.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tables import stop

sys.path.insert(0, str(Path(__file__).parent.parent))

import guide_simcse
from envs.worlds.scienceworld.guide import make_eval_data, read_lines
from guide_simcse import Step, best_actions, load_encoder, rank_steps, read_steps


@dataclass
class Args:
    task: Annotated[
        str, tyro.conf.Positional
    ]  # a task of the evaluation data, or a description of several words; all: thresholds over all tasks
    guide: str = ""  # folder of the guide; the newest in runs/ if not given
    eval_data: str = (
        "data/guide_dev_1.jsonl.gz"  # file of gold paths and valid actions; made if it is not there
    )
    eval_steps: int = 2  # states of each gold path; 0: all


def states(args: Args) -> list[Step]:
    """The states whose actions are to be ranked."""
    if not Path(args.eval_data).exists():
        make_eval_data(args.eval_data, 1)
    steps = read_steps(read_lines(args.eval_data), 1, args.eval_steps)
    chosen = [step for step in steps if args.task in (step.task, "all")]
    if not chosen and " " not in args.task:
        raise ValueError(f"{args.task}: no such task in {args.eval_data}; a description has several words")
    if chosen:
        return chosen
    first = {step.task: step for step in reversed(steps)}
    actions = sorted({action for step in first.values() for action in step.actions})
    return [Step("any", args.task, actions, np.zeros(len(actions), bool), 0)]


def best_threshold(relevant: list[np.ndarray], scores: list[np.ndarray]) -> tuple[float, float, float, float]:
    """The cosine (in hundredths) whose F1, mean over the states, is highest: it, the mean number of actions
    it leaves, F1, and recall.

    >>> best_threshold([np.array([True, False, False])], [np.array([0.9, 0.52, 0.1])])
    (0.53, 1.0, 1.0, 1.0)
    """
    rows = []
    for threshold in np.arange(-100, 100) / 100:
        kept = [score >= threshold for score in scores]
        hits = [(a & b).sum() for a, b in zip(kept, relevant, strict=True)]
        f1 = [2 * n / (a.sum() + b.sum()) for n, a, b in zip(hits, kept, relevant, strict=True)]
        recall = [n / b.sum() for n, b in zip(hits, relevant, strict=True)]
        rows.append((np.mean(f1), threshold, np.mean([a.sum() for a in kept]), np.mean(recall)))
    f1, threshold, number, recall = max(rows, key=lambda row: row[0])
    return float(threshold), float(number), float(f1), float(recall)


def main(args: Args) -> None:
    """Prints the ten best actions of each state, or the best threshold over all."""
    found = sorted(
        Path("runs").glob("scienceworld__guide_simcse__*/guide"), key=lambda path: path.stat().st_mtime
    )
    if not (args.guide or found):
        raise ValueError("no guide in runs/; train one with guide_simcse.py, or give --guide")
    chosen = states(args)
    options = guide_simcse.Args(encoder=args.guide or str(found[-1]))
    encoder = load_encoder(options.encoder, options)
    scores = rank_steps(encoder, chosen, options.dtype)
    if args.task == "all":
        relevant = [step.relevant for step in chosen]
        threshold, number, f1, recall = best_threshold(relevant, scores)
        print(f"{len(chosen)} states; cosine {threshold:.2f} leaves {number:.0f} actions")
        print(f"F1 {f1:.2f}, RSR {recall:.2f}")
        return
    for step, score_A in zip(chosen, scores, strict=True):
        star = "; * is on the gold path" if step.relevant.any() else ""
        print(f"\n{step.description}\n{len(step.actions)} valid actions{star}")
        print("\n".join(best_actions(step, score_A)))


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except (ValueError, OSError, ImportError) as error:
        stop(str(error).splitlines()[0])
