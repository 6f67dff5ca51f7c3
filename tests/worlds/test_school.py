"""The school: its book, its rules one by one, what it pays blind play, and its data for LGE's two scripts."""

import doctest
import random
import re
import time
from statistics import fmean

import numpy as np
import pytest

import envs
from envs.datasets import dialogue
from envs.fuzz import HOSTILE
from envs.worlds import school, scienceworld
from envs.worlds.school import (
    BOOK,
    FOUND,
    REFUSAL,
    ROOMS,
    SPLITS,
    TASKS,
    THINGS,
    Lesson,
    School,
    Variation,
    Worlds,
    gold_path,
    valid_actions,
    variation,
    variations,
)

PAINT = "chemistry-mix-paint-secondary-color"
each_task = pytest.mark.parametrize("task", TASKS)


def lesson(task: str, boxes=("red box", "blue box"), degrees=None, **facts) -> Lesson:
    """An exercise in which all things of the training split lie in the hall, as do the two boxes."""
    where = {name: "hall" for name, thing in THINGS.items() if thing.split == "train" and thing.kind != "box"}
    facts = {"thing": "", "plant": "", "mixed": "", "targets": frozenset()} | facts
    where = {name: room for name, room in where.items() if name != facts["plant"]}
    rooms = dict.fromkeys(boxes, "hall")
    known = {"box": boxes[0], "other": boxes[1], "degrees": degrees or {}}
    return Lesson(
        Variation(task=task, split="train", text="", boxes=rooms, where=where, **facts, **known), True
    )


def scores(one: Lesson, *actions: str) -> list[int]:
    """The score behind each action; all of them are valid."""
    found = []
    for action in actions:
        assert action in valid_actions(one.seen(), True), action
        one.act(action)
        found.append(one.score)
    return found


def play(task: str, number: int, actions) -> tuple[list[float], bool, bool]:
    """Rewards of actions in a variation, and how it has ended."""
    split = next(split for split in SPLITS if number in variations(task, split))
    world, rewards, terminated, truncated = School(task, split), [], False, False
    world.reset(options={"index": number - world.variations.start})
    for action in actions:
        if not (terminated or truncated):
            _, reward, terminated, truncated, _ = world.step(action)
            rewards.append(reward)
    return rewards, terminated, truncated


def test_docstrings():
    assert doctest.testmod(school).failed == 0


# -------------------------------------------------------------------------------------- the book


def test_the_book_fits_together():
    fixtures = [name for row in ROOMS.values() for name in row["fixtures"]]
    names = [*ROOMS, *fixtures, *THINGS]
    assert len(set(names)) == len(names) and len(ROOMS) == 8 and len(THINGS) > 150
    for room, row in ROOMS.items():
        assert all(room in ROOMS[other]["ways"] for other in row["ways"]), f"no way back to {room}"
        assert school.way("attic", room)[-1:] == ([room] if room != "attic" else [])
    assert {*school.HOLDERS, *school.SWITCHES} <= set(fixtures)
    assert {school.POT, school.KETTLE, school.BOWL} <= school.HOLDERS
    assert {school.KETTLE, school.LAMP} <= school.SWITCHES
    for name in names:  # the pattern of the deeds must find the two names again
        assert school.DEED.fullmatch(f"use {name} on {name}").groups() == ("use", name, name)
        assert (
            name == name.lower()
            and ("focus on", name, None) == school.DEED.fullmatch(f"focus on {name}").groups()
        )


def test_the_tasks_add_up():
    assert len(TASKS) == 10 and set(TASKS) <= set(scienceworld.TASKS)
    for task in TASKS:
        row = BOOK["tasks"][task]
        assert sum(row["points"].values()) == 100 and row["points"]["near"] < 5
        wordings = [text for split in SPLITS for text in row[split]]
        assert len(set(wordings)) == len(wordings) and all(row[split] for split in SPLITS)


# -------------------------------------------------------------------------------- the variations


@each_task
def test_gold_paths_reach_the_whole_score(task):
    for split in SPLITS:
        for number in variations(task, split):
            path = gold_path(task, number)
            rewards, terminated, _ = play(task, number, path)
            assert sum(rewards) == 100 and terminated and len(rewards) == len(path) <= 20
            assert min(rewards) >= 0 and not any(action.startswith("teleport") for action in path)


def test_tasks_have_different_lengths():
    lengths = sorted(fmean(len(gold_path(task, number)) for number in range(70)) for task in TASKS)
    assert lengths[0] < 3 and lengths[-1] > 11 and sum(length > 8 for length in lengths) == 5


@each_task
def test_dev_and_test_have_things_and_words_that_training_did_not_have(task):
    seen = {name for number in variations(task, "train") for name in variation(task, number).where}
    said = {re.sub(r"\W+", " ", text) for text in BOOK["tasks"][task]["train"]}
    for split in ("dev", "test"):
        for number in variations(task, split):
            one = variation(task, number)
            asked = {one.thing, one.mixed, *(() if task in FOUND else one.targets)} - {""}
            assert not asked & seen and one.split == split
            if task in FOUND:  # some are new, and lie beside some that are not
                assert {THINGS[name].split for name in one.targets} >= {split}
            assert not {re.sub(r"\W+", " ", text) for text in BOOK["tasks"][task][split]} & said
        other = "test" if split == "dev" else "dev"
        assert not {THINGS[x].split for n in variations(task, split) for x in variation(task, n).where} & {
            other
        }


@each_task
def test_variations_differ_and_stay_as_they_are(task):
    numbers = range(70)
    assert len({str(variation(task, n)) for n in numbers}) == 70
    assert len({gold_path(task, n) for n in numbers}) > 45
    again = variation.__wrapped__(task, 3)
    assert again == variation(task, 3)
    assert len({variation(task, n).text for n in variations(task, "train")}) > 10
    assert all("{" not in variation(task, n).text for n in numbers)


def test_what_a_variation_asks_is_true():
    """Of every one: the answer by the things themselves, and that nothing else would be right."""
    for number in range(70):
        one = variation("lifespan-longest-lived", number)
        here = [name for name, room in one.where.items() if room == one.where[one.thing]]
        animals = [name for name in here if THINGS[name].kind == "animal"]
        assert len(animals) == 3 and one.where[one.thing] in one.text
        assert one.thing == max(animals, key=lambda name: THINGS[name].years)

        one = variation("use-thermometer", number)
        (bound,) = map(int, re.findall(r"(\d+) degrees", one.text))
        first = min((one.box, one.other), key=one.text.index)
        assert (first == one.box) == (one.degrees[one.thing] > bound) and one.thing in one.text

        one = variation("test-conductivity", number)
        conducts = one.thing.split()[0] in ("copper", "steel", "brass", "tin")
        assert (one.text.index(one.box) < one.text.index(one.other)) == conducts and one.thing in one.text

        one = variation("grow-plant", number)
        assert one.plant not in one.where and one.plant in one.text
        assert sum(THINGS[name].kind == "seed" for name in one.where) >= 4
        one = variation(PAINT, number)
        assert (
            one.mixed in one.text
            and sorted(x.split()[0] for x in one.targets) == BOOK["colours"][one.mixed.split()[0]]
        )
    for task in FOUND:
        for number in range(70):
            one = variation(task, number)
            kinds = {name for name in one.where if THINGS[name].kind in FOUND[task]}
            assert one.targets == kinds and one.box in one.text and one.boxes[one.box] in one.text
    for task in ("use-thermometer", "test-conductivity"):
        every = [variation(task, number) for number in range(70)]
        yes = [one.text.index(one.box) < one.text.index(one.other) for one in every]
        assert 20 < sum(yes) < 50, "both answers are common"


# ------------------------------------------------------------------------------------- the rules


def test_the_list_is_exactly_what_is_understood():
    """Deeds with all sorts of names are tried: what is not listed is refused, and changes nothing."""
    world, rng = School("grow-plant"), random.Random(0)
    names = [*ROOMS, *(x for row in ROOMS.values() for x in row["fixtures"]), *THINGS]
    for index in range(6):
        _, info = world.reset(options={"index": index})
        for action in gold_path("grow-plant", index)[: 2 * index]:
            info = world.step(action)[4]
        assert info["valid"] == tuple(sorted(set(info["valid"]))) and 150 < len(info["valid"]) < 700
        tried = rng.sample(names, 40)
        deeds = [f"{verb} {x}" for verb in school.VERBS.split("|") for x in tried]
        deeds += [f"{verb} {x} to {y}" for verb in ("move", "connect") for x in tried for y in tried]
        for action in deeds:
            if action not in info["valid"] and action not in school.ABSENT and not world.over:
                world.turns, before = 0, world.observe()
                after, reward, terminated, *_ = world.step(action)
                assert (reward, terminated, world.info["observation"]) == (0.0, False, REFUSAL)
                assert after.rsplit("\n", 2)[0] == before.rsplit("\n", 2)[0]


def test_how_many_actions_are_valid():
    found = []
    for task in TASKS:
        for number in range(0, 70, 7):
            one = Lesson(variation(task, number), True)
            for action in gold_path(task, number):
                found.append(len(valid_actions(one.seen(), True)))
                one.act(action)
    assert 300 < fmean(found) < 500 and max(found) < 700


def test_only_easy_has_teleporting():
    for simplifications, expected in (("easy", 8), ("", 0)):
        _, info = School("boil", simplifications=simplifications).reset(seed=0)
        assert sum(action.startswith("teleport to ") for action in info["valid"]) == expected
    with pytest.raises(ValueError, match="'hard'"):
        School(simplifications="hard")


def test_what_is_seen():
    one = lesson("boil")
    one.where = {"mint tea": "hall", "tin can": "trophy case", "copper coin": "", "nut oil": "lab"}
    look, bag = school.describe(one.seen(), frozenset({"fire bell", "kettle"}), ())
    assert look == (
        "You are in the hall, with coat rack, fire bell, front door, long bench, notice board, trophy case, "
        "umbrella stand, wall clock, blue box, red box. You see: mint tea. In the trophy case: tin can. "
        "The fire bell is on. Ways lead to attic, canteen, garden, lab, library."
    )
    assert bag == "You carry: copper coin."
    assert (
        school.describe(one.seen(), frozenset(), ("a", "b"))[1]
        == "You carry: copper coin. Your book says: a; b."
    )


def test_the_book_says_what_was_chosen_measured_tested_and_watered():
    """Each once, in the order of the deeds: else a player would have to remember it."""
    facts = {"thing": "bean seed", "plant": "bean vine", "targets": frozenset({"bean seed"})}
    one = lesson("grow-plant", degrees={"nut oil": 60}, **facts)
    one.where |= {"tin can": "", "rubber ball": "", "bean seed": ""}
    for action in (
        "use thermometer on nut oil",
        "focus on bean seed",
        "use thermometer on nut oil",
        "pick up watering can",
        "teleport to workshop",
        "activate test lamp",
        "connect tin can to test lamp",
        "activate test lamp",
        "connect rubber ball to test lamp",
        "activate test lamp",
        "teleport to garden",
        "use watering can on flower pot",
        "move bean seed to flower pot",
    ):
        assert action in valid_actions(one.seen(), True), action
        one.act(action)
    assert not any("watered" in note for note in one.notes), "there was nothing in the pot"
    one.act("use watering can on flower pot")
    assert list(one.notes) == [
        "the nut oil has 60 degrees",
        "you focused on the bean seed",
        "the tin can conducts",
        "the rubber ball does not conduct",
        "you watered the bean seed",
    ]
    world = School("find-plant")
    world.reset(options={"index": 4})
    path = gold_path("find-plant", 4)
    for action in path[: path.index(next(action for action in path if action.startswith("focus"))) + 1]:
        observation, *_, info = world.step(action)
    assert "Your book says: you focused on the " in info["inventory"] and info["inventory"] in observation


def test_moving_things():
    one = lesson("boil")
    replies = [one.act(f"{deed} tin can") for deed in ("pick up", "pick up", "put down")]
    assert replies == [
        "You pick up the tin can.",
        "You already carry the tin can.",
        "You put down the tin can.",
    ]
    one.act("pick up tin can")
    one.act("go to attic")
    assert one.seen().carried == ("tin can",) and one.seen().loose == ()
    one.act("move tin can to old chest")
    assert one.where["tin can"] == "old chest" and one.seen().inside == (("old chest", ("tin can",)),)
    one.act("put down tin can")
    assert one.seen().loose == ("tin can",)
    assert one.act("eat tin can").startswith("Nobody eats")


def test_looking_at_a_thing_says_whether_it_lives():
    one = lesson("boil")
    assert one.act("look at cape parrot") == "The cape parrot breathes. It can live for 45 years."
    assert "grows" in one.act("look at pine tree") and "does not live" in one.act("look at toy owl")
    assert [
        one.act(f"{x} fire bell") for x in ("look at", "activate", "look at", "deactivate", "look at")
    ] == [
        "The fire bell is off.",
        "The fire bell is on.",
        "The fire bell is on.",
        "The fire bell is off.",
        "The fire bell is off.",
    ]


@each_task
def test_a_wrong_focus_fails(task):
    """At the start of a variation, of all that is in view, only what is looked for does not fail."""
    for number in (0, 55):
        one = variation(task, number)
        place = one.where[min(one.targets)]
        right = {one.thing} if one.thing else one.targets
        right = frozenset() if task == PAINT else right
        actions = valid_actions(Lesson(one, True).seen(), True)
        start = Lesson(one, True)
        start.act(f"teleport to {place}")
        actions = [a for a in valid_actions(start.seen(), True) if a.startswith("focus on ")]
        assert len(actions) > 12
        for action in actions:
            tried = Lesson(one, True)
            tried.act(f"teleport to {place}")
            tried.act(action)
            assert (tried.score == -100) == (action.removeprefix("focus on ") not in right)


def test_a_failure_ends_the_episode_with_minus_100():
    path = gold_path("find-plant", 4)
    focus = next(i for i, action in enumerate(path) if action.startswith("focus"))
    world = School("find-plant")
    world.reset(options={"index": 4})
    total = sum(world.step(action)[1] for action in path[: focus + 1])
    assert total == 50
    _, reward, terminated, truncated, info = world.step("focus on " + ROOMS[world.lesson.room]["fixtures"][0])
    assert (reward, terminated, truncated, info["score"]) == (-150.0, True, False, -100)
    assert info["result"] == {"return": -100.0, "length": focus + 2, "success": False}


def test_names_cannot_be_tried_out():
    """To focus on a thing that is elsewhere fails; on a word that is none is refused."""
    one = variation("find-plant", 5)
    start = BOOK["start"]
    elsewhere = next(name for name in sorted(one.targets) if one.where[name] != start)
    assert play("find-plant", 5, [f"Focus on {elsewhere}"]) == ([-100.0], True, False)
    assert play("find-plant", 5, ["focus on banana tree"]) == ([0.0], False, False)
    assert play("find-plant", 5, ["focus on plant", "pick up " + elsewhere])[0] == [0.0, 0.0]


def test_finding():
    one = lesson("find-plant", targets=frozenset({"pine tree", "oat grass"}))
    one.exercise = one.exercise._replace(boxes={"red box": "hall", "blue box": "attic"})
    assert scores(one, "wait", "move oat grass to red box") == [4, 4], "nothing is chosen yet"
    assert scores(one, "focus on pine tree", "focus on pine tree") == [50, 50]
    assert scores(one, "teleport to lab", "teleport to hall") == [50, 50]
    assert scores(one, "pick up pine tree") == [75], "held, and where the box is"
    assert scores(one, "move pine tree to long bench", "move pine tree to red box") == [75, 100]
    one = lesson("find-plant", targets=frozenset({"pine tree", "oat grass"}))
    assert scores(one, "move pine tree to blue box", "focus on pine tree") == [4, 50], "the other box"


def test_finding_pays_for_the_way_only_with_the_thing():
    one = lesson("find-animal", targets=frozenset({"tree frog"}))
    one.exercise = one.exercise._replace(boxes={"red box": "attic", "blue box": "hall"})
    assert scores(one, "focus on tree frog", "go to attic", "go to hall") == [50, 50, 50]
    assert scores(one, "pick up tree frog", "go to attic", "move tree frog to red box") == [65, 75, 100]


def test_measuring():
    facts = {
        "thing": "mint tea",
        "targets": frozenset({"mint tea"}),
        "degrees": {"mint tea": 35, "nut oil": 60},
    }
    one = lesson("use-thermometer", **facts)
    assert one.act("use thermometer on nut oil") == "The thermometer shows 60 degrees." and one.score == 4
    assert scores(one, "pick up thermometer", "focus on mint tea") == [20, 50]
    assert one.act("use barometer on mint tea").endswith("nothing comes of it.") and one.score == 50
    assert one.act("use thermometer on mint tea") == "The thermometer shows 35 degrees." and one.score == 70
    assert scores(one, "focus on red box") == [100]
    for actions in (["focus on red box"], ["use thermometer on nut oil", "focus on red box"]):
        assert scores(lesson("use-thermometer", **facts), *actions)[-1] == -100, "not measured yet"
    assert (
        scores(lesson("use-thermometer", **facts), "use thermometer on mint tea", "focus on blue box")[-1]
        == -100
    )


def test_boiling():
    facts = {"thing": "mint tea", "targets": frozenset({"mint tea"})}
    one = lesson("boil", **facts)
    assert scores(one, "focus on mint tea", "pick up mint tea", "teleport to canteen") == [40, 40, 40]
    assert scores(one, "activate kettle", "wait", "wait", "wait") == [40] * 4, "it is empty"
    assert scores(one, "deactivate kettle", "move mint tea to kettle", "wait") == [40, 64, 64]
    assert scores(one, "activate kettle", "wait", "deactivate kettle", "wait") == [84] * 4
    assert scores(one, "activate kettle") == [100], "the third turn of heat"
    one = lesson("boil", **facts)
    assert (
        scores(one, "pick up nut oil", "pick up mint tea", "teleport to canteen", "move nut oil to kettle")
        == [4] * 4
    )
    assert (
        scores(one, "activate kettle", "wait", "wait", "move mint tea to stove", "activate stove", "wait")
        == [4] * 6
    )


def test_mixing():
    facts = {"mixed": "green paint", "targets": frozenset({"blue paint", "yellow paint"})}
    carry = [f"pick up {x}" for x in ("blue paint", "yellow paint", "red paint", "blue dye")]
    one = lesson(PAINT, **facts)
    assert scores(one, *carry, "teleport to lab", "move yellow paint to mixing bowl") == [4] * 5 + [20]
    assert scores(one, "mix mixing bowl", "move blue dye to mixing bowl", "mix mixing bowl") == [20] * 3
    assert "green dye" not in one.where and "green paint" not in one.where
    assert scores(one, "pick up blue dye", "move blue paint to mixing bowl") == [20, 40]
    one.act("move red paint to mixing bowl")
    assert one.act("mix mixing bowl") == "What is in the mixing bowl does not mix."
    one.act("pick up red paint")
    one.where |= {"red dye": "lab bench", "yellow dye": "lab bench"}
    assert one.act("mix lab bench") == "What is in the lab bench does not mix." and one.score == 40
    assert one.act("mix mixing bowl") == "In the mixing bowl it turns green." and one.score == 70
    assert one.where["green paint"] == "mixing bowl" and "blue paint" not in one.where
    assert scores(one, "focus on green paint") == [100]
    one = lesson(PAINT, **facts)
    scores(one, *carry, "teleport to lab", "move blue paint to mixing bowl", "move red paint to mixing bowl")
    assert scores(one, "mix mixing bowl", "focus on violet paint") == [20, -100], "another colour"


def test_conducting():
    facts = {"thing": "tin can", "targets": frozenset({"tin can"})}
    one = lesson("test-conductivity", **facts)
    assert scores(one, "focus on tin can", "move tin can to red box") == [30, 30], "not tested"
    scores(one, "pick up tin can", "pick up rubber ball", "teleport to workshop")
    assert one.act("activate test lamp").endswith("nothing is connected to it.")
    scores(one, "connect rubber ball to test lamp")
    assert one.act("activate test lamp") == "The test lamp stays dark." and one.score == 30
    assert scores(one, "connect tin can to vice", "connect tin can to test lamp") == [30, 50]
    scores(one, "put down tin can")
    assert one.act("activate test lamp").endswith("nothing is connected to it."), "it was moved"
    scores(one, "connect tin can to test lamp", "pick up rubber ball")
    assert one.act("activate test lamp") == "The test lamp glows." and one.score == 70
    assert scores(one, "pick up tin can", "teleport to hall", "move tin can to red box") == [70, 70, 100]
    assert scores(lesson("test-conductivity", **facts), "move tin can to blue box") == [-100]
    assert scores(lesson("test-conductivity", **facts), "move tin plate to blue box") == [4]
    assert scores(lesson("boil", **facts), "move tin can to blue box") == [4]


def test_growing():
    facts = {"thing": "bean seed", "plant": "bean vine", "targets": frozenset({"bean seed"})}
    one = lesson("grow-plant", **facts)
    assert scores(one, "focus on bean seed", "pick up bean seed", "pick up watering can") == [30] * 3
    assert scores(one, "pick up hop seed", "teleport to garden", "use watering can on flower pot") == [30] * 3
    assert scores(one, "move hop seed to flower pot", "use watering can on flower pot") == [30, 30]
    assert scores(one, "move bean seed to flower pot", "wait", "wait", "wait") == [50] * 4, "it is dry"
    assert scores(one, "use watering can on compost heap", "use watering can on flower pot") == [50, 70]
    assert scores(one, "pick up bean seed", "wait", "move bean seed to flower pot") == [70] * 3, (
        "out of the pot"
    )
    assert "bean vine" not in one.where
    assert scores(one, "wait") == [80] and one.where["bean vine"] == "flower pot"
    assert "bean seed" not in one.where and scores(one, "focus on bean vine") == [100]
    one = lesson("grow-plant", **facts)
    scores(one, "pick up bean seed", "pick up watering can", "teleport to garden")
    scores(one, "move bean seed to flower pot", "use watering can on flower pot", "wait", "wait")
    assert scores(one, "focus on bean vine") == [74], "the seed was never shown"


# --------------------------------------------------------------------------------- blind play


def test_who_reads_nothing_is_paid_less_than_five():
    """Of the ten tasks' mean: any valid action, the path of another variation, and such paths in a row."""
    rng, paid = random.Random(0), {"random": [], "another path": [], "paths in a row": []}
    for task in TASKS:
        for split in ("train", "test"):
            world = School(task, split)
            for index in range(world.num_tasks):
                played = dialogue(world, world.random_player, rng, index)
                paid["random"].append(max(0, played["return"]))
                others = rng.sample([n for n in world.variations if n != world.variations[index]], 6)
                paths = [gold_path(task, n) for n in others]
                for path in paths[:3]:
                    paid["another path"].append(max(0, sum(play(task, world.variations[index], path)[0])))
                row = [action for path in paths for action in path]
                paid["paths in a row"].append(max(0, sum(play(task, world.variations[index], row)[0])))
    assert all(fmean(scores) < 5 for scores in paid.values()), {k: fmean(v) for k, v in paid.items()}


def test_hostile_text_is_refused_and_does_not_return():
    world, rng = School("find-plant"), random.Random(0)
    letters = "abc focus on move to\n\t\0\x1béßжשあ🐕{}%<|>"
    texts = [*HOSTILE, *("".join(rng.choices(letters, k=rng.randrange(80))) for _ in range(2000))]
    texts += [
        "focus on",
        "focus on ",
        "move to red box",
        "use  on ",
        "go to hall to hall",
        "focus on {thing}",
        "__init__",
    ]
    world.reset(options={"index": 0})
    first = world.observe()
    for action in texts:
        if world.over:
            world.reset(options={"index": 0})
        observation, reward, terminated, _, info = world.step(action)
        assert reward == 0 and not terminated and info["observation"] == REFUSAL
        assert observation == first.replace("You look around.", REFUSAL)


def test_a_step_takes_no_time():
    """A tenth of a millisecond is usual; the bound leaves room for a slow machine."""
    worlds, rng = Worlds(8, task="find-plant"), random.Random(0)
    infos, began = worlds.reset("train", range(8)), time.process_time()
    for _ in range(50):
        actions = {i: rng.choice(info["valid"]) for i, info in enumerate(infos)}
        infos = [shown for _, shown in worlds.step(actions, list(range(8)))]
    assert (time.process_time() - began) / 400 < 1e-3


# ------------------------------------------------------------------------ for LGE's two scripts


def test_worlds_side_by_side_are_worlds_apart():
    worlds, singles = Worlds(3, task="boil", step_limit=4), [School("boil", step_limit=4) for _ in range(3)]
    infos = worlds.reset("test", [3, 5])
    for single in singles:
        single.choose("test")
    assert infos == [
        single.reset(options={"index": i})[1] for single, i in zip(singles, (3, 5), strict=False)
    ]
    rng = random.Random(0)
    for turn in range(1, 5):
        actions = {i: rng.choice([a for a in infos[i]["valid"] if "focus" not in a]) for i in (1, 0)}
        results = worlds.step(actions, [7, 8, 9])
        expected = [singles[i].step(actions[i]) for i in (1, 0)]
        assert [result for result, _ in results] == expected
        if turn < 4:
            assert [shown for _, shown in results] == [result[4] for result in expected]
        infos = [results[1][1], results[0][1]]
    assert [info["answer"] for info in infos] == ["boil 57", "boil 58"], "the next episodes have begun"
    worlds.step({0: "wait"})


def test_texts_for_a_vocabulary():
    first, again = (Worlds(2, task="boil").texts(5, np.random.default_rng(1)) for _ in range(2))
    assert first == again and len(set(first)) == len(first) > 600
    assert any(text.startswith("You are in the ") for text in first) and "wait" in first


@each_task
def test_the_guides_data_are_what_can_be_done(task):
    record = school.walk(task, 45, True)
    short = school.walk(task, 45, False)
    assert record.items() >= short.items() and short["gold"] == list(gold_path(task, 45))
    valid, one = set(), Lesson(variation(task, 45), False)
    for step, action in zip(record["steps"], record["gold"], strict=True):
        valid = valid - set(step["rem"]) | set(step["add"])
        assert sorted(record["vocab"][i] for i in valid) == list(valid_actions(one.seen(), False))
        assert record["vocab"][step["gold"]] == action
        one.act(action)


def test_bad_names_are_refused():
    with pytest.raises(ValueError, match="'cook'"):
        School("cook")
    with pytest.raises(ValueError, match="'exam'"):
        School(split="exam")
    with pytest.raises(ValueError, match="step_limit: 0"):
        School(step_limit=0)


def test_it_says_that_it_is_not_scienceworld():
    assert "not ScienceWorld" in school.__doc__ and "not ScienceWorld" in envs.ENVS["school"].about
