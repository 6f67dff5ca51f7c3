"""What a checkpoint earns without learning: at eight temperatures, greedy, and by a rule.

    python benchmarks/start.py checkpoints/twenty-questions --env twenty-questions
    python benchmarks/start.py runs/RUN/actor --env guess-my-city --hold 4 8 12

A lower temperature alone may earn what a method seems to have learned. What a method has gained is what lies
above the best of these lines, which is printed last; among so many it owes a little to chance, see the ±.

The rule is "no guess in the first k turns", an accusation in Mini Detective: as long as it would be one, an
utterance is written anew, at temperature 1 and at the one that was best. Other worlds have no such rule.
Tokens are those of an utterance, without the one that ends it.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev

import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import archer
import envs
from envs import models
from envs.worlds import guess_my_city, twenty_questions

TRIES = 50  # so often an utterance is written anew; then it stays a guess


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]  # folder of a model and its tokenizer, or a Hugging Face name
    env: str  # the world: an id of `python -m envs` or your own
    world: str = ""  # options of the world, as NAME=VALUE, separated by commas
    temperatures: tuple[float, ...] = (1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
    hold: tuple[int, ...] = (3, 6, 9)  # turns without a guess
    episodes: int = 314  # sampled dialogues of a line, in whole passes over the tasks
    max_action_tokens: int = 16  # tokens after which an utterance is cut
    device: str = "cpu"
    threads: int = 1


def is_question_of(parse: Callable) -> Callable[[str], bool]:
    """Whether a text is a guess, by a parser that says so."""
    return lambda text: bool((question := parse(text)) and question.guess)


GUESSES = {  # by the world whose checkpoint is taken: whether a text is a guess
    "twenty-questions": is_question_of(twenty_questions.parse),
    "guess-my-city": is_question_of(guess_my_city.parse),
    "mini-detective": lambda text: text.startswith("accuse"),
}


def play_held(actor, args: archer.Args, k: int, is_guess: Callable[[str], bool]) -> list[dict]:
    """As archer.play_tasks, sampled; but none of a dialogue's first k turns is a guess, if others come up."""
    options = envs.options(args.world)
    tasks = envs.tasks_to_evaluate(args.env, args.eval_episodes, greedy=False, **options)
    worlds = envs.VecTextEnv(args.env, len(tasks), **options)
    worlds.reset(seeds=list(range(len(tasks))), indices=tasks)
    streams = models.streams(range(len(tasks)))
    while alive := worlds.alive():
        _, _, prompts = archer.lay_out([worlds.dialogues[i] for i in alive], actor.tokenizer)
        rows = dict(zip(alive, prompts, strict=True))
        for i in alive:
            if len(rows[i]) > actor.context - 4 * args.max_action_tokens:  # as in archer.rollout
                worlds.cut(i)
                del rows[i]
        said = {}
        for _ in range(TRIES):
            if not rows:
                break
            starts = [[len(row)] for row in rows.values()]
            memory = archer.Memory(actor, rows)  # a new one each time: rows that are left out come back
            own = [streams[i] for i in rows]
            utterances, _ = archer.generate(memory, rows, starts, args, own)
            texts = [archer.spoken(actor.tokenizer, ids) for ids in utterances]
            said |= dict(zip(rows, texts, strict=True))
            early = [i for i in rows if len(worlds.dialogues[i]["actions"]) < k and is_guess(said[i])]
            rows = {i: rows[i] for i in early}
        worlds.step(said)
    worlds.close()
    return [dialogue for dialogue in worlds.dialogues if dialogue["actions"]]


def figures_of(dialogues: list[dict], tokenizer) -> dict[str, float]:
    """Mean return with its standard error, share of successes, tokens an utterance."""
    figures = envs.summarise(dialogues)
    spread = pstdev([sum(d["rewards"]) for d in dialogues])
    actions = [action for d in dialogues for action in d["actions"]]
    return {
        "return": figures["return"],
        "error": spread / math.sqrt(len(dialogues)),
        "success": figures["success"],
        "tokens": fmean(len(models.encode(tokenizer, action)) for action in actions),
    }


def main(args: Args) -> dict[str, dict[str, float]]:
    """Prints the table; returns its lines by their names, the best once more as "best"."""
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    world = envs.make(args.env, **envs.options(args.world))
    actor = models.load(transformers.AutoModelForCausalLM, args.checkpoint, args)
    settings = archer.Args(
        env=args.env,
        world=args.world,
        eval_episodes=args.episodes,
        max_action_tokens=args.max_action_tokens,
        device=args.device,
    )
    table = {}

    def add(name: str, dialogues: list[dict]) -> None:
        row = table[name] = figures_of(dialogues, actor.tokenizer)
        print(
            f"{name:46} return {row['return']:7.2f} ± {row['error']:.2f}  success {row['success']:.2f}"
            f"  tokens {row['tokens']:.2f}",
            flush=True,
        )

    sampled = {}
    for temperature in args.temperatures:
        name = f"temperature {temperature:g}"
        add(name, archer.play_tasks(actor, replace(settings, temperature=temperature), greedy=False))
        sampled[temperature] = table[name]["return"]
    add("greedy", archer.play_tasks(actor, settings, greedy=True))
    is_guess = GUESSES.get(getattr(world, "demonstration_env", args.env))
    for temperature in sorted({1.0, max(sampled, key=sampled.get)}, reverse=True) if is_guess else ():
        for k in args.hold:
            dialogues = play_held(actor, replace(settings, temperature=temperature), k, is_guess)
            add(f"no guess in the first {k} turns, temperature {temperature:g}", dialogues)
    name = max(table, key=lambda name: table[name]["return"])
    best = table[name]
    print(f"best: {name}: return {best['return']:.2f}, success {best['success']:.2f}")
    return table | {"best": best}


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except (ValueError, envs.Unavailable) as error:
        print(f"{Path(__file__).name}: {error}".splitlines()[0], file=sys.stderr)
        sys.exit(2)
