"""How many steps a second a world makes on one thread: python -m envs.speed guess-my-city [--seconds 2]

The actions are those of the world's random player, drawn before the clock starts. What a world keeps in
memory for questions that it has seen, as both guessing games do, counts: a player asks the same things again
and again.
"""

import argparse
import random
import sys
import time

import envs


def steps_per_second(world, seconds: float) -> float:
    """Plays episodes for so long and counts."""
    rng = random.Random(0)
    if "random" not in world.players:
        raise ValueError(f"{world.id} has no player 'random', which makes the actions")
    observation, _ = world.reset(seed=0)
    actions = [world.players["random"](observation, rng) for _ in range(5000)]
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for action in actions:
            _, _, terminated, truncated, _ = world.step(action)
            if terminated or truncated:
                world.reset()
        steps += len(actions)
    return steps / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envs.speed", description="How many steps a second a world makes."
    )
    parser.add_argument("id", help="one of: " + ", ".join(envs.ENVS))
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to play")
    parser.add_argument("--world", default="", metavar="NAME=VALUE,...", help="options of the world")
    args = parser.parse_args()
    try:
        world = envs.make(args.id, **envs.options(args.world))
        speed = steps_per_second(world, args.seconds)
        world.close()
    except (ValueError, TypeError, envs.Unavailable, envs.WorldBroken) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{args.id}: {speed:,.0f} steps a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
