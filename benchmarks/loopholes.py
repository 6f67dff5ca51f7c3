"""What text that is no guess earns by the papers' rules of a right guess (`matching=paper`).

    python benchmarks/loopholes.py

In Twenty Questions that rule wants a Yes and looks at the last word: a player of good questions ends each
with a guess of a word that the question is true of, "Is it made of metal, drill?". In Guess My City it looks
for the name anywhere: a player asks nothing and lists as many names as an action holds. Printed is the mean
return over all tasks by either rule.
"""

import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import envs
from envs.worlds import guess_my_city, twenty_questions


def two_in_one(history: list[tuple[str, str]], rng: random.Random) -> tuple[str, str]:
    """The expert's question on the answers so far, and the same with a guess at its end.

    `history` has the questions without their guesses, and the answers.
    """
    text = "Questions:\n" + "".join(f"{question} {answer}\n" for question, answer in history)
    question = twenty_questions.expert(text)
    asked = twenty_questions.parse(question)
    # With a No the guess cannot win, so it is one of the words on which the answer is Yes.
    left = twenty_questions.words_in(twenty_questions.candidates(text) & asked.yes)
    for word in rng.sample(left, len(left)) if asked.guess is None else ():
        name = twenty_questions.guess_of(word).removeprefix("Is it ")
        both = f"{question.removesuffix('?')}, {name}"
        wins = twenty_questions.is_right_paper(word, both, twenty_questions.table_oracle(word, both))
        if wins and twenty_questions.parse(both) == asked:
            return question, both
    return question, question


def lists() -> list[str]:
    """All names of Guess My City, in as few actions as hold them."""
    actions, most = [""], guess_my_city.GuessMyCity.max_action_chars
    for city in sorted(guess_my_city.CITIES, key=len):
        longer = f"{actions[-1]} {city}".strip()
        actions[-1:] = [longer] if len(longer) <= most else [actions[-1], city]
    return actions


def mean_return(world, player: Callable[[list[tuple[str, str]], random.Random], tuple[str, str]]) -> float:
    """Over all tasks. `player(history, rng)` is what it counts as asked, and what it says."""
    returns = []
    for task in range(world.num_tasks):
        observation, _ = world.reset(seed=task, options={"index": task})
        rng, history, over = random.Random(task), [], False
        while not over:
            asked, said = player(history, rng)
            before, (observation, _, *ended, info) = observation, world.step(said)
            history.append((asked, observation.removeprefix(f"{before}{info['action']} ").strip()))
            over = any(ended)
        returns.append(info["result"]["return"])
    return statistics.fmean(returns)


def main() -> str:
    """Prints and returns the table as markdown."""
    by_list = lists()
    players = {
        ("twenty-questions", "good questions"): lambda history, rng: two_in_one(history, rng)[:1] * 2,
        ("twenty-questions", "each ends in a guess, too"): two_in_one,
        ("guess-my-city", "lists of names"): lambda history, _: ("", by_list[len(history) % len(by_list)]),
    }
    lines = ["| world | what is said | by the paper's rule | by ours |", "|---|---|---|---|"]
    for (name, what), player in players.items():
        returns = [mean_return(envs.make(name, matching=rule), player) for rule in ("paper", "strict")]
        lines.append(f"| {name} | {what} | {returns[0]:.2f} | {returns[1]:.2f} |")
    print("\n".join(lines))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
