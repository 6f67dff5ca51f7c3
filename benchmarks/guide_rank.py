"""What a guide of LGE thinks best, as in the paper's Tables 2 and 5: in states of a task, or for any text.

    python benchmarks/guide_rank.py find-plant
    python benchmarks/guide_rank.py "Your task is to bake a cake." --guide runs/RUN/guide

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
from envs.scienceworld_guide import make_eval_data, read_lines
from guide_simcse import Step, best_actions, load_encoder, rank_steps, read_steps


@dataclass
class Args:
    task: Annotated[
        str, tyro.conf.Positional
    ]  # a task of the evaluation data, or a description of several words
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
    chosen = [step for step in steps if step.task == args.task]
    if not chosen and " " not in args.task:
        raise ValueError(f"{args.task}: no such task in {args.eval_data}; a description has several words")
    if chosen:
        return chosen
    first = {step.task: step for step in reversed(steps)}
    actions = sorted({action for step in first.values() for action in step.actions})
    return [Step("any", args.task, actions, np.zeros(len(actions), bool), 0)]


def main(args: Args) -> None:
    """Prints the ten best actions of each state."""
    found = sorted(
        Path("runs").glob("scienceworld__guide_simcse__*/guide"), key=lambda path: path.stat().st_mtime
    )
    if not (args.guide or found):
        raise ValueError("no guide in runs/; train one with guide_simcse.py, or give --guide")
    chosen = states(args)
    encoder, tokenizer = load_encoder(args.guide or str(found[-1]), "cpu")
    for step, score_A in zip(
        chosen, rank_steps(encoder, tokenizer, chosen, guide_simcse.Args()), strict=True
    ):
        star = "; * is on the gold path" if step.relevant.any() else ""
        print(f"\n{step.description}\n{len(step.actions)} valid actions{star}")
        print("\n".join(best_actions(step, score_A)))


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except (ValueError, OSError, ImportError) as error:
        stop(str(error).splitlines()[0])
