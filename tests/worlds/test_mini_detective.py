"""Mini Detective: the house, the rules, what an observation gives away, and the players."""

import doctest
import importlib.util
import random
import re
import time
from functools import cache, partial
from pathlib import Path

import pytest

import envs
from envs.datasets import dialogue
from envs.worlds import mini_detective as md
from envs.worlds.mini_detective import CLUES, PEOPLE, PLACES, ROOMS, TASKS, THINGS

LONGEST = 400  # characters of an observation: a small model must read it
HOSTILE = [
    *(
        "",
        " ",
        "\n",
        "\neast",
        "[[[((({{{<<<|*+?.^$\\",
        "{thief} {place} {0} %s",
        "\x00\x07\x1b[31mred\x1b[0m\x7f",
    ),
    *(
        "Actions:",
        "none",
        "Illegal Action.",
        "accuse",
        "accuse everybody",
        "east, west",
        "east.",
        '"east"',
        "e ast",
    ),
    *(
        "これは動物ですか？",
        "هل هو",
        "Кто вор?",
        "🔍" * 90,
        "\ud800 lone surrogate",
        "east\u2028west",
        "</s><pad>",
    ),
    *("a" * 1_000_000, "accuse " * 150_000, "(" * 5000),
]


def start(index: int = 0):
    """A world at the start of a task, and its first observation."""
    world = envs.make("mini-detective")
    return world, world.reset(options={"index": index})[0]


def follow(index: int, actions: str) -> tuple[list[str], list[float], bool, dict]:
    """Observations, rewards, end and last info of actions with commas between them."""
    world, observation = start(index)
    observations, rewards = [observation], []
    for action in actions.split(", "):
        observation, reward, terminated, _, info = world.step(action)
        observations.append(observation)
        rewards.append(reward)
    return observations, rewards, terminated, info


def index_of(thief: str, place: str) -> int:
    return next(i for i, task in enumerate(TASKS) if (task["thief"], task["place"]) == (thief, place))


def listed(observation: str) -> list[str]:
    """The available actions, as the last line of the observation has them."""
    actions = observation.rstrip("\n").rsplit("\n", 1)[1].removeprefix("Actions: ")
    return [] if actions == "none" else actions.split(", ")


def play_all(player, rounds: int = 1, seed: int = 0) -> list[dict]:
    world, rng = envs.make("mini-detective"), random.Random(seed)
    return [dialogue(world, player, rng, index) for index in range(len(TASKS)) for _ in range(rounds)]


def mean_return(dialogues: list[dict]) -> float:
    return sum(d["return"] for d in dialogues) / len(dialogues)


@cache
def reachable(index: int) -> dict[tuple, tuple[int, int]]:
    """Every state of a task that can be reached while the game lasts, with (score, least steps to it).

    It plays the world itself, by what its observations list, and knows nothing of the module's own search.
    The score is a function of the state, which this asserts.
    """
    world, observation = start(index)
    found, queue = {(world.room, world.events): (0.0, 0, observation)}, [(world.room, world.events)]
    for state in queue:
        score, steps, observation = found[state]
        for action in listed(observation):
            after, reward, terminated, *_ = jump(world, state).step(action)
            key = ("over", frozenset([action])) if terminated else (world.room, world.events)
            if terminated:
                # The end that scores most; among equals the shortest.
                old = found.get(key, (-1e9, 0, ""))
                found[key] = max(old, (score + reward, steps + 1, after), key=lambda one: (one[0], -one[1]))
            elif key not in found:
                found[key] = score + reward, steps + 1, after
                queue.append(key)
            else:
                assert found[key][0] == score + reward
    return found


def jump(world, state: tuple):
    """The world, put into a state."""
    world.room, world.events = state
    world.turns, world.total, world.over = 0, 0.0, False
    return world


def test_docstrings():
    assert doctest.testmod(md).failed == 0


# -------------------------------------------------------------------------------------- the data


def test_the_clues_tell_all_tasks_apart():
    assert len(TASKS) == len(PEOPLE) * len(PLACES) >= 24
    notes = {tuple(row["note"].format(**task) for row in CLUES.values()) for task in TASKS}
    assert len(notes) == len(TASKS), "the clues of two tasks say the same"


def test_the_house_fits_together():
    assert all(row["room"] in ROOMS for table in (THINGS, CLUES, PEOPLE, PLACES) for row in table.values())
    assert md.CASE["start"] in ROOMS
    assert len({frozenset(traits) for traits in md.TRAITS.values()}) == 1, "somebody lacks a trait"
    for room, row in ROOMS.items():
        assert row.get("needs", "lamp") in THINGS
        assert all(room in ROOMS[other]["exits"].values() for other in row["exits"].values()), (
            f"no way back to {room}"
        )
        actions = [deed.action for deed in md.DEEDS[room]]
        assert len(set(actions)) == len(actions), f"an action of {room} could mean two things"
        for action in actions:
            assert action == action.lower().strip() and "," not in action and len(action) <= 100


def test_a_reader_can_change_the_case(tmp_path):
    """A room, a person, a place, a thing and a clue more, and other points: tasks,
    best score and expert follow."""
    source = Path(md.__file__)
    data = source.with_suffix(".toml").read_text(encoding="utf-8")
    data = data.replace("arrest = 8", "arrest = 30").replace(
        'north = "library"', 'north = "library", in = "lift"'
    )
    data += """
[rooms.lift]
text = "It hums."
exits = { out = "hall" }
[things.rope]
room = "lift"
points = 3
[people.poet]
room = "lift"
hair = "red"
shoes = "boots"
hat = "no hat"
[places.globe]
room = "study"
[clues.hook]
room = "hall"
sight = "A hook for hats."
points = 7
do = "examine hook"
says = "Whoever it was had {hat}."
note = "{hat}"
"""
    data = re.sub(r'^(shoes = "\w+")$(?!\nhat)', r'\1\nhat = "a hat"', data, flags=re.M)
    (tmp_path / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / source.with_suffix(".toml").name).write_text(data, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("changed", tmp_path / source.name)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)

    world = changed.MiniDetective()
    assert (world.num_tasks, world.best_return) == (35, 20 + 22 + 3 + 7)
    for index in range(world.num_tasks):
        assert dialogue(world, changed.expert, random.Random(0), index)["return"] == world.best_return


# ------------------------------------------------------------------------------------- the rules


def test_a_first_step():
    world, observation = start(0)
    assert observation == (
        "Hall. A clock ticks.\nYou carry: nothing.\nNotes: none.\nThe ruby is stolen. Find it and accuse "
        "the thief.\n"
        "Actions: north, east, south, west, up, search clock\n"
    )
    assert world.step(" EAST \r\nwest") == (
        "Kitchen. A stove glows. The cellar is too dark to enter. The cook is here: red hair, slippers.\n"
        "You carry: nothing.\nNotes: none.\nYou go east.\nActions: west, search stove, accuse cook\n",
        *(0.0, False, False, {"action": "EAST"}),
    )


def test_an_illegal_action_costs_a_turn_and_nothing_else():
    world, observation = start(0)
    for turn in range(1, 61):
        after, reward, terminated, truncated, info = world.step("take ruby")
        assert (reward, terminated, truncated) == (0.0, False, turn == 60)
        same = observation.replace(md.CASE["intro"], "Illegal Action.")
        assert after == (same if turn < 60 else re.sub("Actions: .*", "Actions: none", same))
    assert info["result"] == {"return": 0.0, "length": 60, "success": False}


def test_a_whole_case():
    """The colonel (grey hair, boots) has hidden the ruby in the clock."""
    observations, rewards, terminated, info = follow(
        index_of("colonel", "clock"),
        "south, examine prints, east, take lamp, west, north, east, down, take key, up, west, up, examine "
        "case, up, "
        "read letter, down, down, search clock, west, accuse colonel",
    )
    assert [reward for reward in rewards if reward] == [2.0, 1.0, 1.0, 2.0, 2.0, 4.0, 8.0]
    assert terminated and info["result"] == {"return": 20.0, "length": 20, "success": True}
    assert observations[-1] == (
        "Study. A desk and a globe. The colonel is here: grey hair, boots.\nYou carry: lamp, key, ruby.\n"
        "Notes: grey hair, boots, ruby in clock.\nThe colonel confesses. Well done! (+8)\nActions: none\n"
    )
    assert "A grey hair is caught in its lock. (+2)\n" in observations[13]


def test_closed_rooms_need_their_things():
    observations, *_ = follow(0, "down, east, down, west, up, up")
    assert [observation.split("\n")[3] for observation in observations[1:]] == [
        *(
            "Illegal Action.",
            "You go east.",
            "Illegal Action.",
            "You go west.",
            "You go up.",
            "Illegal Action.",
        ),
    ]
    assert "The attic is locked." in observations[-1]


def test_dead_ends():
    index = index_of("colonel", "clock")
    _, rewards, terminated, info = follow(index, "east, accuse cook")
    assert rewards == [0.0, -5.0] and terminated and not info["result"]["success"]

    observations, rewards, *_ = follow(index, "east, search stove, west, search clock")
    assert rewards == [0.0] * 4 and "Illegal Action." in observations[-1]
    assert "Notes: ruby lost." in observations[-1] and "search" not in observations[-1]

    observations, rewards, *_ = follow(
        index, "south, rake earth, examine prints, north, up, clean case, examine case"
    )
    assert rewards == [0.0] * 7 and "Notes: case cleaned, prints raked." in observations[-1]


@pytest.mark.parametrize(
    ("loss", "best"), [("no ruby", 16), ("no case", 18), ("no prints", 18)], ids=["ruby", "case", "prints"]
)
def test_what_is_lost_is_lost_for_good(loss, best):
    """No play that ends with this loss scores more than the best without it."""
    most = max(
        score + md.POINTS["arrest"]
        for index in (0, 13)
        for (_, events), (score, *_) in reachable(index).items()
        if loss in events
    )
    assert most == best < md.BEST


# ------------------------------------------------------------------------------- the observations


def test_the_list_is_exactly_what_is_not_illegal():
    """In every state of the task, every action of the game is tried."""
    world, _ = start(9)
    words = {action for index in (0, 9) for *_, text in reachable(index).values() for action in listed(text)}
    assert words == set(md.ACTIONS)
    for state, (_, _, observation) in reachable(9).items():
        if state[0] != "over":
            legal = [word for word in md.ACTIONS if "Illegal Action." not in jump(world, state).step(word)[0]]
            assert sorted(listed(observation)) == legal and legal


def test_observations_are_short_and_hold_the_whole_state():
    longest = 0
    for index in (0, 9, 23):
        texts = {}
        for state, (_, _, observation) in reachable(index).items():
            longest = max(longest, len(observation))
            if state[0] != "over":
                view = md.read(observation)
                assert (view.room, view.events) == state and index in view.tasks
                assert list(view.actions) == listed(observation)
                lines = observation.split("\n")
                texts[state] = lines[0], lines[1], lines[2], lines[4]  # all but the feedback
        assert len(set(texts.values())) == len(texts), "two states look the same"
    assert longest <= LONGEST


@pytest.mark.parametrize("index", [0, 13])
def test_nothing_is_told_before_it_is_found_out(index):
    """Two tasks look the same in every state, until a deed shows something in which they differ."""
    deeds = {key: {row["do"] for row in CLUES.values() if f"{{{key}}}" in row["says"]} for key in TASKS[0]}
    deeds["thief"] |= {f"accuse {name}" for name in PEOPLE}
    deeds["place"] |= {f"search {place}" for place in PLACES}
    shown = set()
    for other in set(range(24)) - {index}:
        (one, text), (two, text_of_two) = start(index), start(other)
        telling = {deed for key in TASKS[0] if TASKS[index][key] != TASKS[other][key] for deed in deeds[key]}
        assert text == text_of_two
        seen, queue = {(one.room, one.events)}, [((one.room, one.events), listed(text))]
        for state, actions in queue:
            for action in actions:
                result, result_of_two = jump(one, state).step(action), jump(two, state).step(action)
                if result != result_of_two:
                    assert action in telling
                    shown.add(action.split()[0])
                elif not one.over and (one.room, one.events) not in seen:
                    seen.add((one.room, one.events))
                    queue.append(((one.room, one.events), listed(result[0])))
    assert shown == {"examine", "read", "search", "accuse"}


def test_the_answer_stands_nowhere():
    for index, task in enumerate(TASKS):
        answer = start(index)[0].reset(options={"index": index})[1]["answer"]
        assert answer == f"{task['thief']}, {task['place']}"
        assert not any(answer in text for *_, text in reachable(index).values())


def test_ten_thousand_hostile_actions():
    rng, world = random.Random(0), envs.make("mini-detective")
    observation, info = world.reset(seed=0)
    letters = "".join(md.ACTIONS) + " \n\t,.:;{}[]()<>%\\\0\x1béßжשあ🐕"
    known = {observation.split("\n")[3]}
    for index in range(0, 24, 5):
        known |= {text.split("\n")[3] for *_, text in reachable(index).values()}
    known |= {f"The {name} {end}" for name in PEOPLE for end in ("confesses. Well done! (+8)",)}
    known |= {f"The {name} was innocent. You are off the case. (-5)" for name in PEOPLE}
    for n in range(10_000):
        pick = rng.random()
        if pick < 0.02:
            action = rng.choice(HOSTILE)
        elif pick < 0.6:
            action = "".join(rng.choice(letters) for _ in range(rng.randrange(30)))
        else:
            action = rng.choice(md.ACTIONS) + rng.choice(["", "", "\n", " ", ".", "\nhall", "\0"])
        legal = action.split("\n")[0].strip() in listed(observation)
        observation, _, terminated, truncated, after = world.step(action)
        feedback = observation.split("\n")[3]
        assert (feedback == "Illegal Action.") == (not legal) and feedback in known | {"Illegal Action."}
        assert (
            info["answer"] not in observation and observation.count("\n") == 5 and len(observation) <= LONGEST
        )
        assert set(after) == ({"action", "result"} if terminated or truncated else {"action"})
        if terminated or truncated:
            observation, info = world.reset()


# ---------------------------------------------------------------------------------- what can be won


def test_the_best_return_is_that_of_every_task():
    """An exhaustive search of each task, by its observations alone,
    finds no higher score than the expert's."""
    expert = {d["answer"]: d for d in play_all(md.expert)}
    for index, task in enumerate(TASKS):
        ends = [
            (score, -steps) for (room, _), (score, steps, _) in reachable(index).items() if room == "over"
        ]
        score, steps = max(ends)
        played = expert[f"{task['thief']}, {task['place']}"]
        assert played["return"] == score == md.MiniDetective.best_return == 20.0
        # Who knows the thief and the place from the start is at most a few steps faster.
        assert -steps <= len(played["actions"]) <= -steps + 6 <= 30


def test_the_expert_is_as_fast_as_it_says():
    (points, minus_steps), *_ = md.plan(md.CASE["start"], frozenset(), frozenset(range(24)))
    dialogues = play_all(md.expert)
    assert points == 20 * 24 and -minus_steps == sum(len(d["actions"]) for d in dialogues)
    assert all(d["terminated"] and d["rewards"][-1] == 8 for d in dialogues)


def test_no_other_play_is_better_on_average():
    """Bellman's equation: in no state of knowledge is any single action worth more than the plan says."""
    first = md.CASE["start"], frozenset(), frozenset(range(24))
    seen, queue = {first}, [first]
    for room, events, tasks in queue:
        value, where, planned = md.plan(room, events, tasks)
        values = {}
        for action, deed in md.available(room, events).items():
            results = {}
            for index in tasks:
                results.setdefault(md.outcome(deed, TASKS[index]), set()).add(index)
            points, steps = 0, -len(tasks)
            for (event, reward, _), group in results.items():
                points += reward * len(group)
                if event not in ("arrest", "wrong"):
                    after = (
                        deed.what if deed.kind == "go" else room,
                        events | ({event} - {""}),
                        frozenset(group),
                    )
                    (more, further), *_ = md.plan(*after)
                    points, steps = points + more, steps + further
                    if after not in seen:
                        seen.add(after)
                        queue.append(after)
            values[action] = points, steps
        assert max(values.values()) <= value
        if planned:
            assert values[planned if where == room else md.routes(room, events)[where][1]] == value
    assert len(seen) > 1000


def test_the_expert_makes_the_best_of_what_is_left():
    """Two suspects left are worth a guess, 8 / 2 - 5 / 2 points; six are not, 8 / 6 - 25 / 6."""
    world, observation = start(0)
    for action in ("south", "rake earth"):
        observation, *_ = world.step(action)
    while not world.over:
        observation, *_ = world.step(md.expert(observation))
    assert world.total in (2 + 1 + 1 + 2 + 4 + 8, 2 + 1 + 1 + 2 + 4 - 5)

    world, observation = start(0)
    for action in ("south", "rake earth", "north", "up", "clean case"):
        observation, *_ = world.step(action)
    while not world.over:
        observation, *_ = world.step(md.expert(observation))
    assert world.turns == 60 and world.total == 1 + 1 + 2 + 4


def test_no_fixed_sequence_of_actions_wins_more_than_a_few_tasks():
    """The first accusation ends the game:
    a sequence that does not read can only ever be right about one thief."""
    sequences = [d["actions"] for d in play_all(md.expert)]
    rng = random.Random(0)
    sequences += [[rng.choice(md.ACTIONS) for _ in range(60)] for _ in range(20)]
    world = envs.make("mini-detective")
    for actions in sequences:
        solved, full = 0, 0
        for index in range(24):
            world.reset(options={"index": index})
            for action in actions:
                *_, terminated, truncated, info = world.step(action)
                if terminated or truncated:
                    solved += info["result"]["success"]
                    full += info["result"]["return"] == 20.0
                    break
        assert solved <= len(PLACES) == 4 and full <= 1


# ------------------------------------------------------------------------------------ the players


def test_players_from_bad_to_good():
    world = envs.make("mini-detective")
    dialogues = {name: play_all(player, rounds=40) for name, player in world.players.items()}
    means = {name: mean_return(played) for name, played in dialogues.items()}
    assert means["random"] == pytest.approx(-2.0, abs=0.4)
    assert means["scripted"] == pytest.approx(7.8, abs=0.7)
    assert means["expert"] == world.expert_return == 20.0
    solved = {name: envs.summarise(played)["success"] for name, played in dialogues.items()}
    assert solved["random"] < 0.25 < solved["scripted"] < 0.7 < solved["expert"] == 1.0
    assert all(envs.summarise(played)["invalid"] == 0.0 for played in dialogues.values())


def test_the_scripted_player_searches_only_where_the_letter_says():
    for game in play_all(md.scripted, rounds=10):
        for before, action in zip(game["observations"], game["actions"], strict=False):
            assert not action.startswith(("rake", "clean"))
            if action.startswith("search"):
                assert f"ruby in {action.removeprefix('search ')}" in before


def test_demonstrations():
    world, began = envs.make("mini-detective"), time.perf_counter()
    dialogues = world.demonstrations(3000, seed=0)
    assert time.perf_counter() - began < 5  # about 0.5 s on one CPU core
    assert len({d["answer"] for d in dialogues}) == 24
    figures = envs.summarise(dialogues)
    assert figures["invalid"] == pytest.approx(0.02, abs=0.004)
    assert figures["return"] == pytest.approx(2.5, abs=0.4) and 0.2 < figures["success"] < 0.4
    assert {action for d in dialogues for action in d["actions"]} == set(md.ACTIONS)
    assert sum(d["return"] == 20.0 for d in dialogues) > 0, "the whole case is among them"
    assert envs.summarise(world.demonstrations(300, seed=0, illegal=0.0))["invalid"] == 0.0
    randomly = world.demonstrations(2000, seed=0, illegal=0.0, randomly=1.0)
    assert mean_return(randomly) == pytest.approx(-2.0, abs=0.4)


# ----------------------------------------------------------------------------------------- figures


WRONG = {"Hall": "west", "Study": "accuse maid", "Illegal Action.": "accuse colonel"}
RIGHT = {"Hall": "east", "Kitchen": "accuse cook"}


def say(words: dict[str, str], observation: str, rng) -> str:
    """The action for the last of the words that the observation has."""
    return [action for word, action in words.items() if word in observation][-1]


def test_figures_of_illegal_actions_and_of_bad_ends():
    wrong, right = (
        dialogue(envs.make("mini-detective"), partial(say, words), None, 0) for words in (WRONG, RIGHT)
    )
    expected = {"return": -5.0, "success": 0, "length": 3, "truncated": 0, "invalid": 1 / 3}
    assert envs.summarise([wrong]).items() >= expected.items()
    # An empty action after an illegal one changes not a letter, and is illegal all the same.
    observations, rewards, *_ = follow(0, "jump, , jump, east")
    assert observations[1] == observations[2] == observations[3]
    lost = {"observations": observations, "actions": ["jump", "", "jump", "east"], "rewards": rewards}
    assert envs.summarise([lost | {"terminated": False, "success": False}])["invalid"] == 0.75
    expected = {"return": 8.0, "success": 1, "length": 2, "truncated": 0, "invalid": 0}
    assert envs.summarise([right]).items() >= expected.items()


def test_it_is_fast():
    """At least 20,000 steps a second on one core; the bound
    is far below what is measured (docs/worlds/mini-detective.md)."""
    world, rng, steps = envs.make("mini-detective"), random.Random(0), 20_000
    observation, _ = world.reset(seed=0)
    began = time.perf_counter()
    for _ in range(steps):
        observation, _, terminated, truncated, _ = world.step(rng.choice(listed(observation)))
        if terminated or truncated:
            observation, _ = world.reset()
    assert time.perf_counter() - began < 1.0
