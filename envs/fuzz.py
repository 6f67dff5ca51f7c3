"""Whether a world stands any text, and pays for nothing that is not known: for authors of worlds.

    python -m envs.fuzz my_module:MyWorld --turns 10000

It plays hostile text and what scripted players say in other tasks, in no order, and stops at the first
broken promise:

    no text raises, or takes longer than `--limit` seconds
    rewards are finite, observations and actions in their spaces and fit to be written to a file
    the time limit holds; length and return of the last info["result"] are those of the episode
    text that only grows begins with what it was
    nobody wins without looking: actions that are drawn blindly win no more often when they are chained,
    repeated and garbled than one by one, which is chance

The last one asks for hundreds of episodes to say something: 10,000 turns of a world with 20 turns.
"""

import argparse
import math
import random
import sys
import time

import gymnasium

import envs
from envs.adapt import Adapted

WORDS = ["1", "7", "yes", "no", "look", "help", "Is it a dog?", "print(1)"]
HOSTILE = [
    "",
    " ",
    "\n",
    "\nIs it a dog?",
    "Is it a dog?\nIs it a cat?",
    "  \t Is it \r a dog?  ",
    "?" * 5000,
    "a" * 1_000_000,
    "is it " * 200_000,
    "\x00\x07\x1b[31mred\x1b[0m\x7f",
    "[[[((({{{<<<|*+?.^$\\",
    "\\b(?:a+)+$" * 10,
    "これは動物ですか？ هل هو حيوان؟ Это животное?",
    "🐕" * 300,
    "\ud800 lone surrogate",
    "search[\udfff] \ud83d\ud83d\udc15 Is it a \udc00?",
    "\u2028 \u2029 \x85 \x0b \x0c lines of other kinds",
    "</s><pad><|endoftext|>",
    "Yes.",
    "Questions:",
    "Invalid Question.",
]
BETWEEN = [" ", "", "\n", ", ", "; ", " or ", "? ", " and "]  # of actions that are chained
EVERY = 0x110000  # characters that there are, surrogates among them


class BrokenPromise(Exception):
    """The world does what no world may do; the message says what, and after which action."""


def spoilt(action: str, pool: list[str], rng: random.Random) -> str:
    """An action of the pool chained with others, repeated or garbled, or something that is none."""
    draw = rng.random()
    if draw < 0.5:
        return rng.choice(BETWEEN).join([action, *rng.choices(pool, k=rng.randrange(1, 12))])
    if draw < 0.6:
        return rng.choice(HOSTILE)
    if draw < 0.7:
        return "".join(chr(rng.randrange(rng.choice([128, 1500, EVERY]))) for _ in range(rng.randrange(300)))
    if draw < 0.8:
        return rng.choice(BETWEEN).join([action] * rng.randrange(2, 50))
    start, end = sorted(rng.randrange(len(action) + 1) for _ in range(2))
    if draw < 0.9:
        return action[:start] + action[end:]
    return action[:start] + rng.choice(HOSTILE)[:50] + action[start:]


def checked_reset(world, seed: int | None) -> str:
    """The first observation."""
    observation, info = world.reset(seed=seed)
    observation.encode()
    if observation not in world.observation_space or "answer" not in info:
        raise BrokenPromise("reset: the observation is not in its space, or there is no answer in info")
    return observation


def checked_step(world, before: str, action: str, limit: float) -> tuple[str, float, bool, dict]:
    """One step with all that a world promises of it: observation, reward, whether it is over, info."""
    began = time.perf_counter()
    observation, reward, terminated, truncated, info = world.step(action)
    if (seconds := time.perf_counter() - began) > limit:
        raise BrokenPromise(f"the step took {seconds:.1f} s")
    if type(reward) is not float or not math.isfinite(reward):
        raise BrokenPromise(f"the reward is {reward!r}")
    if type(terminated) is not bool or type(truncated) is not bool or (terminated and truncated):
        raise BrokenPromise(f"terminated is {terminated!r} and truncated {truncated!r}")
    taken = info["action"]
    expected = envs.read_action(action, world.max_action_chars, getattr(world, "multiline", False))
    if taken != expected and not isinstance(world, Adapted):  # such a world may say what it has read
        raise BrokenPromise(f"the action that it has taken is {taken[:200]!r}")
    if taken not in world.action_space or observation not in world.observation_space:
        raise BrokenPromise("action or observation are not in their space")
    observation.encode()
    if world.append_only and not observation.startswith(before + taken):
        raise BrokenPromise("the observation does not go on from the last one and the action")
    if ("result" in info) != (terminated or truncated):
        raise BrokenPromise("info['result'] must come with the end of an episode, and only there")
    return observation, reward, terminated or truncated, info


def play(world, actions, seed: int | None, limit: float) -> tuple[int, bool]:
    """Plays one episode: its length and whether it was won. Whatever goes wrong is a BrokenPromise."""
    action = "reset"
    try:
        observation, total, turns, over = checked_reset(world, seed), 0.0, 0, False
        while not over:
            action = next(actions)
            observation, reward, over, info = checked_step(world, observation, action, limit)
            total, turns = total + reward, turns + 1
            if turns > world.max_turns:
                raise BrokenPromise(f"turn {turns} of {world.max_turns}")
        result = info["result"]
        if result["length"] != turns or not math.isclose(result["return"], total, abs_tol=1e-9):
            raise BrokenPromise(f"{turns} turns and a return of {total}, but info says {result}")
        try:
            world.step("one more")
        except gymnasium.error.ResetNeeded:
            return turns, bool(result["success"])
        raise BrokenPromise("a step after the end must raise ResetNeeded")
    except Exception as error:
        said = str(error) if isinstance(error, BrokenPromise) else f"{type(error).__name__}: {error}"
        raise BrokenPromise(f"after the action {action[:200]!r}: {said}") from error


def fuzz(world, turns: int = 10_000, seed: int = 0, limit: float = 15.0) -> dict[str, tuple[int, int]]:
    """Plays at least so many turns. Returns episodes and wins, {"plain": (n, k), "spoilt": (n, k)}.

    A world without players hears WORDS. Raises BrokenPromise.
    """
    if turns < 1:
        raise ValueError(f"--turns {turns}: at least one must be played")
    rng = random.Random(seed)
    try:
        pool = sorted({action for made in world.demonstrations(100, seed) for action in made["actions"]})
    except ValueError:  # it has neither players nor demonstrations
        pool = WORDS
    plain = iter(lambda: rng.choice(pool), None)
    mixed = iter(lambda: spoilt(rng.choice(pool), pool, rng), None)
    counts, played = {"plain": (0, 0), "spoilt": (0, 0)}, 0
    while played < turns:
        for name, actions in {"plain": plain, "spoilt": mixed}.items():
            length, won = play(world, actions, None if played else seed, limit)
            n, k = counts[name]
            counts[name], played = (n + 1, k + won), played + length
    (n, k), (m, won) = counts["plain"], counts["spoilt"]
    share = (k + won + 1) / (n + m + 1)  # of both; one more, so that a single win is no proof
    if (won / m - k / n) > 4 * math.sqrt(share * (1 - share) * (1 / n + 1 / m)):  # standard errors
        raise BrokenPromise(
            f"{won} of {m} episodes of chained and garbled actions are won, but {k} of {n} of plain ones: "
            "what is paid for there is no knowledge"
        )
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envs.fuzz", description="Whether a world stands any text."
    )
    parser.add_argument("id", help="one of: " + ", ".join(envs.ENVS))
    parser.add_argument("--turns", type=int, default=10_000, help="how many to play, at least")
    parser.add_argument("--seed", type=int, default=0, help="another one says other things")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds that a step may take")
    parser.add_argument("--world", default="", metavar="NAME=VALUE,...", help="options of the world")
    args = parser.parse_args()
    began = time.perf_counter()
    try:
        world = envs.make(args.id, **envs.options(args.world))
        counts = fuzz(world, args.turns, args.seed, args.limit)
        world.close()
    except (ValueError, TypeError, envs.Unavailable, envs.WorldBroken) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPromise as error:
        print(f"{args.id}: {error}", file=sys.stderr)
        return 1
    told = ", ".join(f"{k} of {n} {name} episodes won" for name, (n, k) in counts.items())
    print(f"{args.id}: no promise broken; {told}; {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
