"""Detective: the story file, the list of actions, the score, what may reach the interpreter, and the players.

The tests below the second banner need jericho and a detective.z5, at $DETECTIVE_ROM or in ../shared/data.
They quote nothing of the game.
"""

import doctest
import hashlib
import os
import random
import re
import sys
import time

import pytest

import envs
from envs.datasets import dialogue
from envs.worlds import detective as dt
from envs.worlds.detective import listed

MISSING = envs.missing("detective")

HOSTILE = [
    *(
        "",
        " ",
        "\n",
        "\nnorth",
        "[[[((({{{<<<|*+?.^$\\",
        "%s%n{0}",
        "\x00\x07\x1b[31mred\x1b[0m\x7f",
        "\t\r\x0b\x0c",
    ),
    *(
        "Actions:",
        "none",
        "Illegal Action.",
        "go",
        "go go go",
        "take",
        "take all but all",
        "it",
        "examine me",
        '"',
        "'",
    ),
    *(
        "これは動物ですか？",
        "هل هو",
        "Кто вор?",
        "🔍" * 90,
        "\ud800 lone surrogate",
        "north\u2028west",
        "</s><pad>",
    ),
    *(
        "a" * 1_000_000,
        "take " * 200_000,
        "(" * 5000,
        "." * 5000,
        "north." * 1000,
        ",,,,",
        "then then",
        "é" * 198,
    ),
]
COMMANDS = [
    *(
        "save",
        "restore",
        "restart",
        "quit",
        "q",
        "script",
        "unscript",
        "noscript",
        "transcript",
        "transcrip",
        "undo",
    ),
    *(
        "again",
        "g",
        "oops",
        "recording",
        "replay",
        "superbrief",
        "purloin",
        "gonear",
        "goto",
        "showobj",
        "showverb",
    ),
    *("tree", "scope", "trace", "random", "help", "verify"),
]


def start(**options):
    """A world at the start of the game, and its first observation."""
    world = envs.make("detective", **options)
    return world, world.reset()[0]


def follow(actions, **options) -> tuple[list[str], list[float], bool, dict]:
    """Observations, rewards, end and last info."""
    world, observation = start(**options)
    observations, rewards = [observation], []
    for action in actions:
        observation, reward, terminated, _, info = world.step(action)
        observations.append(observation)
        rewards.append(reward)
    return observations, rewards, terminated, info


def games(name: str, n: int, seed: int = 0) -> list[dict]:
    world, rng = envs.make("detective"), random.Random(seed)
    return [dialogue(world, world.players[name], rng) for _ in range(n)]


def test_docstrings():
    assert doctest.testmod(dt).failed == 0


# ------------------------------------------------------------------------- without the story file or jericho


def test_what_is_missing_is_said_in_one_line(monkeypatch, tmp_path):
    advice = r"give --world rom=FILE, a detective.z5, or set \$DETECTIVE_ROM to it; mini-detective needs"
    monkeypatch.delenv("DETECTIVE_ROM", raising=False)
    with pytest.raises(envs.Unavailable, match="^detective: no story file; " + advice):
        envs.make("detective")
    with pytest.raises(
        envs.Unavailable, match=r"^detective: the story file \S+nowhere.z5 does not exist; " + advice
    ):
        envs.make("detective", rom=tmp_path / "nowhere.z5")
    monkeypatch.setenv("DETECTIVE_ROM", str(tmp_path))  # a folder
    with pytest.raises(envs.Unavailable, match=r"^detective: the story file \S+ does not exist; " + advice):
        envs.make("detective")
    assert envs.missing("mini-detective") is None


@pytest.mark.parametrize(
    "content", [b"", b"not a story", bytes([5]) + bytes(100_000)], ids=["empty", "text", "z5"]
)
def test_another_file_never_reaches_the_interpreter(content, monkeypatch, tmp_path):
    """It would end the process, and the tests with it."""
    rom = tmp_path / "detective.z5"
    rom.write_bytes(content)
    monkeypatch.setenv("DETECTIVE_ROM", str(rom))
    said = (
        r"^detective: \S+detective.z5 is not the story file with the md5 "
        r"822655c9be83e292e06d3d3b1d6a9734; give [^\n]*$"
    )
    with pytest.raises(envs.Unavailable, match=said):
        envs.make("detective")


def test_without_jericho(monkeypatch, tmp_path):
    rom = tmp_path / "detective.z5"
    rom.write_bytes(b"a story")
    monkeypatch.setattr(dt, "MD5", hashlib.md5(b"a story").hexdigest())
    monkeypatch.setitem(sys.modules, "jericho", None)
    with pytest.raises(envs.Unavailable, match=r"^detective needs the package jericho: pip install jericho$"):
        envs.make("detective", rom=rom)


def test_an_unknown_matching_is_refused():
    with pytest.raises(ValueError, match=r"^matching: 'loose' is none of strict, paper$"):
        envs.make("detective", matching="loose")


def test_players_read_the_last_line():
    room = "A room. Actions: none.\nYou are carrying nothing.\nActions: "
    rng = random.Random(0)
    text = room + "east, put hat down, take key, take all\n"
    assert {dt.random_player(text, rng) for _ in range(100)} == {
        "east",
        "put hat down",
        "take key",
        "take all",
    }
    assert {dt.scripted(text, rng) for _ in range(100)} == {"take key", "take all"}
    assert {dt.scripted(room + "east, put hat down, up\n", rng) for _ in range(100)} == {"east", "up"}
    assert dt.scripted(room + "put hat down\n", rng) == "put hat down"


# --------------------------------------------------------------------------------------- with the game


def with_the_game(test):
    return pytest.mark.external(pytest.mark.skipif(MISSING is not None, reason=MISSING or "")(test))


@with_the_game
def test_the_walkthrough_scores_360():
    """As it is typed there, which only the paper's matching takes: all points with the 50th command,
    then the end."""
    commands = start()[0].story.game.get_walkthrough()
    assert len(commands) == 51
    _, rewards, terminated, info = follow(commands, matching="paper")
    assert 10 + sum(rewards[:49]) == 260 and rewards[49] == 100 and rewards[50] == 0 and terminated
    assert info["result"] == {"return": 350.0, "score": 360, "length": 51, "success": True}


@with_the_game
def test_the_expert():
    (game,) = games("expert", 1)
    assert game["return"] == dt.Detective.best_return == dt.Detective.expert_return == 350.0
    assert game["terminated"] and len(game["actions"]) <= 51 and envs.summarise([game])["success"] == 1
    for observation, action in zip(game["observations"], game["actions"], strict=False):
        assert action in listed(observation)
    assert len(set(game["observations"])) == len(game["observations"]), "it knows nothing but the observation"


@with_the_game
def test_score_and_return_differ_by_what_one_starts_with():
    world, _ = start()
    assert world.story.start.score == 10 and world.story.game.get_max_score() == 360
    for game in games("scripted", 10):
        *_, info = follow(game["actions"])
        assert info["result"]["score"] == 10 + info["result"]["return"] == 10 + sum(game["rewards"])


@with_the_game
def test_the_parts_of_an_observation():
    for game in games("random", 20):
        for n, text in enumerate(game["observations"]):
            *lines, actions, rest = text.split("\n")
            assert rest == "" and actions.startswith("Actions: ")
            assert all(line == " ".join(line.split()) != "" for line in lines)
            if n == len(game["actions"]):
                assert actions == "Actions: none"
                if game["terminated"]:
                    assert len(lines) == 1 and "RESTART" not in text and "out of a possible" not in text
            else:
                surroundings, inventory, *feedback = lines
                assert (
                    surroundings.startswith("<<")
                    and inventory.startswith("You are carrying")
                    and len(feedback) < 2
                )
                assert surroundings not in "".join(feedback)
                assert 1 <= len(listed(text)) <= 15 and all(0 < len(action) < 30 for action in listed(text))


@with_the_game
def test_only_what_is_listed_is_legal():
    world, observation = start()
    actions = listed(observation)
    for action in [*HOSTILE, *COMMANDS, "look", "inventory", "read paper", "w", "east.", *dt.WAYS]:
        world.reset()
        after, reward, *_ = world.step(action)
        legal = action.split("\n")[0].strip().lower() in actions
        assert ("Illegal Action." in after) == (not legal)
        if not legal:
            lines = after.split("\n")
            assert (
                lines[2] == "Illegal Action."
                and lines[:2] + lines[3:] == observation.split("\n")[:2] + lines[3:]
            )
            assert listed(after) == actions and reward == 0.0 and world.moment is world.story.start
    for action in actions:
        small, capital = (follow([text]) for text in (action, f" {action.upper()} \nand more"))
        assert small[0] == capital[0] and "Illegal Action." not in small[0][1]


@with_the_game
def test_every_listed_action_does_something():
    """It changes what one sees, has or scores, or is the one that stands for all the blocked ways."""
    world, _ = start()
    for game in games("random", 5):
        world.reset()
        for action in game["actions"]:
            before, story = world.moment, world.story
            same = [a for a in story.actions(before) if story.play(before, a)[1][1:] == before[1:]]
            assert len(same) <= 1 and not any(a.startswith(("take", "put")) for a in same)
            world.step(action)


@with_the_game
def test_the_list_depends_on_what_is_seen():
    """What is kept for a room and its things is what would be found there now.

    Order matters: demonstrations repeat.
    """
    rng, checked = random.Random(1), 0
    for game in games("scripted", 40, seed=1):
        world, _ = start()
        for action in game["actions"]:
            world.step(action)
            if not world.over and rng.random() < 0.05:
                assert world.story.find_actions(world.moment.state) == world.story.actions(world.moment)
                checked += 1
    assert checked > 30


@with_the_game
def test_jericho_would_list_the_same_without_our_replacement(monkeypatch):
    """Jericho's own search, with every word of the text that its dictionary knows for spaCy's nouns.

    It finds the same actions and then some that differ in words or in nothing: "it", "floor" and directions
    as things.
    """
    world, _ = start()

    def words(text):
        return {(word, "NOUN") for word in re.findall("[a-z]+", text.lower())}

    monkeypatch.setattr(world.story.util, "extract_objs", words)
    rng, game = random.Random(0), world.story.game
    for _ in range(8):
        game.set_state(world.moment.state)
        theirs = game.get_valid_actions(use_object_tree=True, use_ctypes=True, use_parallel=False)
        ours = world.story.actions(world.moment)

        def effects(actions, moment=world.moment):
            return {world.story.play(moment, action)[1][1:] for action in actions}

        assert effects(ours) == effects(theirs)
        world.step(rng.choice(ours))


@with_the_game
@pytest.mark.parametrize("matching", ["strict", "paper"])
def test_nothing_reaches_the_interpreter_itself(matching, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    world, _ = start(matching=matching)
    world.step("take paper")
    before = world.moment
    texts = [*COMMANDS, *(f"look. {command}" for command in COMMANDS), *(f"{c.upper()},x" for c in COMMANDS)]
    for text in texts:
        world.turns = 1
        observation, *_ = world.step(text)
        assert "Illegal Action." in observation and world.moment is before, text
    assert os.listdir(tmp_path) == []


@with_the_game
def test_the_papers_matching_takes_what_the_game_understands():
    observations, rewards, *_ = follow(["TAKE PAPER", "i", "w", "sing", "n.e.n.e"], matching="paper")
    assert rewards[0] == 10 and not any("Illegal Action." in text for text in observations)
    strict = follow(["TAKE PAPER", "i", "w"])[0]
    assert ["Illegal Action." in text for text in strict] == [False, False, True, True]
    # Which can be abused: several moves in one turn.
    *_, info = follow([".".join(["take paper", "w", "take gun", "e", "n"]), *["look"] * 59], matching="paper")
    assert info["result"]["score"] == 30


@with_the_game
@pytest.mark.parametrize("matching", ["strict", "paper"])
def test_ten_thousand_hostile_actions(matching):
    """Nothing is raised and no text of an action gets into an observation."""
    rng = random.Random(0)
    world, observation = start(matching=matching)
    words = [*world.story.words, *COMMANDS, ".", ",", '"', "it", "n", "e", "s", "w"]
    letters = "abcdefghijklmnopqrstuvwxyz  .,;:!?'\"{}[]()<>%\\\0\x1béßжשあ🐕\n\t"
    for n in range(10_000):
        pick = rng.random()
        if pick < 0.02:
            action = rng.choice(HOSTILE)
        elif pick < 0.3:
            action = "".join(rng.choice(letters) for _ in range(rng.randrange(150)))
        elif pick < 0.5 and matching == "paper":
            action = " ".join(rng.choice(words) for _ in range(rng.randrange(1, 30)))
        elif pick < 0.95:
            action = "zqx" + rng.choice(letters) + rng.choice(words)
        else:
            action = rng.choice(listed(observation)) + rng.choice(["", " ", "\n", ".", "\nzqx", "\0"])
        observation, reward, terminated, truncated, info = world.step(action)
        assert "zqx" not in observation and "/" not in observation and len(observation) < 5000
        assert reward in (0.0, 10.0, 20.0, 30.0, 40.0) and (matching == "paper" or reward < 20)
        assert (
            observation.rstrip("\n").rpartition("\n")[2].startswith("Actions: ")
            and observation.isprintable() is False
        )
        assert set(info) == ({"action", "result"} if terminated or truncated else {"action"})
        if terminated or truncated:
            observation, _ = world.reset()


@with_the_game
def test_worlds_share_an_interpreter_and_nothing_else():
    """Eight worlds in turn play as each alone."""
    played = games("random", 8, seed=5)
    worlds = [envs.make("detective") for _ in played]
    assert len({id(world.story) for world in worlds}) == 1
    for world, game in zip(worlds, played, strict=True):
        assert world.reset()[0] == game["observations"][0]
    for turn in range(60):
        for world, game in zip(worlds, played, strict=True):
            if turn < len(game["actions"]):
                observation, reward, *_ = world.step(game["actions"][turn])
                assert (observation, reward) == (game["observations"][turn + 1], game["rewards"][turn])


@with_the_game
def test_nothing_is_left_to_chance():
    """Another seed of the interpreter changes nothing."""
    import jericho

    played = games("random", 10, seed=2)
    story = start()[0].story
    for seed in (1, 2, 12345):
        other = jericho.FrotzEnv(story.game.story_file.decode(), seed=seed)
        for game in played[:4]:
            other.reset()
            moment = story.start
            for action in game["actions"]:
                said, moment = story.play(moment, action)
                theirs = dt.plain(other.step(action)[0])
                assert said in theirs.replace(moment.surroundings or "\0", "").replace("  ", " ")
                assert other.get_score() == moment.score


@with_the_game
def test_deaths():
    """They end the game, cost nothing, and are no success."""
    died = [game for game in games("random", 40) if game["terminated"]]
    assert len(died) > 10
    for game in died:
        assert game["rewards"][-1] == 0.0 and "You have died" in game["observations"][-1]
        *_, terminated, info = follow(game["actions"])
        assert terminated and info["result"]["success"] is False
    assert envs.summarise(died)["success"] == 0.0


@with_the_game
def test_players_from_bad_to_good():
    means = {name: sum(game["return"] for game in games(name, 60)) / 60 for name in ("random", "scripted")}
    assert 25 < means["random"] < 50 and means["random"] < means["scripted"] < 75


@with_the_game
def test_the_expert_plays_on_where_its_way_does_not_lead():
    world, observation = start()
    for _ in range(3):
        observation, *_ = world.step("nonsense")
    assert world.players["expert"](observation, random.Random(0)) in listed(observation)


@with_the_game
def test_demonstrations():
    dialogues = envs.make("detective").demonstrations(60, seed=0)
    assert envs.summarise(dialogues)["invalid"] == pytest.approx(0.02, abs=0.012)
    assert {d["answer"] for d in dialogues} == {"360 points"}
    assert envs.summarise(envs.make("detective").demonstrations(5, seed=0, illegal=0.0))["invalid"] == 0.0


@with_the_game
def test_it_is_fast_enough():
    """At least 600 steps a second where the lists of actions are known."""
    games("random", 20)
    began = time.process_time()
    steps = sum(len(game["actions"]) for game in games("random", 20))
    assert steps / (time.process_time() - began) > 600
