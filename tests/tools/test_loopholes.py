"""benchmarks/loopholes.py: the paper's rule pays for text that is no guess, and ours does not."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import loopholes

from envs.worlds import guess_my_city, twenty_questions


def test_the_table():
    """By the paper's rule a guess behind each question pays, and lists of names beat the expert."""
    rows = [line.split(" | ") for line in loopholes.main().splitlines()[2:]]
    (plain, plain_ours), (both, both_ours), (lists, lists_ours) = (
        (float(row[2]), float(row[3].removesuffix(" |"))) for row in rows
    )
    expert = round(twenty_questions.TwentyQuestions.expert_return, 2)
    assert plain_ours == both_ours == expert, "by ours the guess behind a question is not there"
    assert plain < expert < both, "names of two words cannot be won by the paper's rule"
    assert lists > guess_my_city.GuessMyCity.expert_return and lists_ours == -20


def test_what_is_said():
    """The question keeps its meaning, and all names fit into few actions."""
    question, both = loopholes.two_in_one([], random.Random(1))
    assert both.startswith(question.removesuffix("?") + ", ")
    assert twenty_questions.parse(both) == twenty_questions.parse(question)
    word = twenty_questions.NAMES[both.rpartition(" ")[2].removesuffix("?")]
    assert twenty_questions.table_oracle(word, both) == twenty_questions.YES, "with a No it could not win"
    actions = loopholes.lists()
    assert all(len(action) <= guess_my_city.GuessMyCity.max_action_chars for action in actions)
    assert all(any(city in action for action in actions) for city in guess_my_city.CITIES)
