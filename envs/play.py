"""Play a world yourself: python -m envs.play twenty-questions [--index N] [--option matching=paper] [--show-answer]"""

import argparse
import sys
from collections.abc import Callable

import gymnasium.error

import envs


def typed(multiline: bool) -> str:
    """What a person types: a line or, for code whose first line ends with a colon, all up to an empty one."""
    lines = [input("> ")]
    while multiline and lines[0].rstrip().endswith(":") and lines[-1].strip():
        lines.append(input(". "))
    return "\n".join(lines)


def play(world, observation: str) -> dict:
    """One episode in the terminal, from the first observation on; returns its summary."""
    print(observation, end="")
    terminated = truncated = False
    while not (terminated or truncated):
        before = observation
        observation, _, terminated, truncated, info = world.step(typed(getattr(world, "multiline", False)))
        print(envs.replies([before, observation], [info["action"]])[0].strip())
    return info["episode"]


def answer(ask: Callable[[str], str], observation: str, turns: int) -> None:
    """The other way round: `ask`, an agent, makes a question of each observation, and you answer it."""
    print("Think of one of its words. Answer y (yes), n (no) or ? (no such question); c (correct) ends the game.")
    for _ in range(turns):
        try:
            typed = input(f"{(question := ask(observation))} ")[:1].lower()
        except (EOFError, KeyboardInterrupt):
            return
        if typed == "c":
            return
        reply = {"y": "Yes.", "n": "No."}.get(typed, "Invalid Question.")
        observation += f"{question} {reply}\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m envs.play", description="Play a world yourself.")
    parser.add_argument("id", help="one of: " + ", ".join(envs.ENVS))
    parser.add_argument("--index", type=int, help="number of the task; drawn if not given")
    parser.add_argument("--seed", type=int, help="seed of that draw")
    about = "an option of the world, as in envs.make: oracle=FOLDER, matching=paper; may be repeated"
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help=about)
    parser.add_argument("--show-answer", action="store_true", help="say what is hidden before the first turn")
    args = parser.parse_args()
    try:
        world = envs.make(args.id, **dict(option.partition("=")[::2] for option in args.option))
        observation, info = world.reset(seed=args.seed, options={} if args.index is None else {"index": args.index})
    except (ValueError, envs.Unavailable, gymnasium.error.Error) as error:
        print(error, file=sys.stderr)
        return 2

    answer = info["answer"]
    if args.show_answer:
        print(f"(hidden: {answer})")
    try:
        episode = play(world, observation)
    except (EOFError, KeyboardInterrupt):
        print(f"\nGoodbye. It was: {answer}")
        return 0
    print("Solved." if episode["success"] else f"Not solved. It was: {answer}")
    print(f"{episode['length']} turns, return {episode['return']:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
