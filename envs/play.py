"""Play a world yourself: python -m envs.play twenty-questions [--index N] [--seed S] [--show-answer]"""

import argparse
import sys

import envs


def play(world, index: int | None, seed: int | None, show_answer: bool) -> None:
    """One episode in the terminal."""
    observation, info = world.reset(seed=seed, options={} if index is None else {"index": index})
    answer = info["answer"]
    if show_answer:
        print(f"(hidden: {answer})")
    print(observation, end="")
    terminated = truncated = False
    while not (terminated or truncated):
        before = observation
        observation, _, terminated, truncated, info = world.step(input("> "))
        print(observation.removeprefix(before + info["action"]).strip())
    episode = info["episode"]
    outcome = "Solved" if episode["success"] else f"Not solved, it was: {answer}"
    print(f"{outcome}. {episode['length']} turns, return {episode['return']:g}.")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m envs.play", description="Play a world yourself.")
    parser.add_argument("id", help="one of: " + ", ".join(envs.ENVS))
    parser.add_argument("--index", type=int, help="number of the task; drawn if not given")
    parser.add_argument("--seed", type=int, help="seed of that draw")
    parser.add_argument("--show-answer", action="store_true", help="say what is hidden before the first turn")
    args = parser.parse_args()
    try:
        play(envs.make(args.id), args.index, args.seed, args.show_answer)
    except (ValueError, envs.Unavailable) as error:
        print(error, file=sys.stderr)
        return 2
    except (EOFError, KeyboardInterrupt):
        print("\nBye.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
