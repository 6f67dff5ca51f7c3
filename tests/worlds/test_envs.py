"""What every world of the registry keeps to. A new world is tested here by being in envs.ENVS.

The rules stand in docs/your_world.md: those of envs.check, and the docstrings of tests that get a `world`.
"""

import io
import json
import random
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import fake_scienceworld
import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

import envs
import envs.check
import envs.play
import envs.runs
from envs.datasets import dialogue
from envs.fuzz import HOSTILE
from envs.worlds.mini_detective import MiniDetective

ROOT = Path(__file__).parents[2]


def all_worlds() -> list:
    """Every id of the registry; those that cannot be used here are skipped with their reason."""
    problems = {id: envs.missing(id) for id in envs.ENVS}
    skip = pytest.mark.skip
    return [pytest.param(id, marks=[skip(reason=why)] if why else []) for id, why in problems.items()]


WORLDS = all_worlds()
HERE = [pytest.param("scienceworld") if world.values[0] == "scienceworld" else world for world in WORLDS]


@pytest.fixture(params=HERE)
def world(request, monkeypatch):
    """Every world; without Java ScienceWorld is played in a house in Python."""
    if request.param == "scienceworld" and envs.missing("scienceworld"):
        fake_scienceworld.install(monkeypatch)
    world = envs.make(request.param)
    yield world
    world.close()


def some_actions(world, seed: int, n: int = 200) -> list[str]:
    """Hostile texts, random characters, and what a scripted player asks at the start."""
    rng = random.Random(seed)
    observation, _ = world.reset(seed=seed)
    player = world.players["random"]
    noise = ["".join(chr(rng.randrange(32, 1500)) for _ in range(rng.randrange(300))) for _ in range(n // 4)]
    sensible = [player(observation, rng) for _ in range(n - len(noise) - len(HOSTILE))]
    actions = HOSTILE + noise + sensible
    rng.shuffle(actions)
    return actions


def taken(world, action: str) -> str:
    """An action as a world takes it: up to the first newline unless it is `multiline`, stripped, bounded,
    without half a surrogate pair."""
    text = action if getattr(world, "multiline", False) else action.split("\n")[0]
    return re.sub(r"[\ud800-\udfff]", "?", text.strip()[: world.max_action_chars])


# ------------------------------------------------------------------------------------ the rules


@pytest.mark.parametrize("rule", envs.check.RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("id", WORLDS)
def test_keeps_the_rules_of_the_page(id, rule):
    rule(envs.check.maker(id))


@pytest.mark.parametrize("id", WORLDS)
def test_gymnasium_makes_it(id):
    """What gymnasium.make and make_vec make is the world; the checker also renders it, without a warning."""
    name = f"turnrl/{id}-v0"
    world, made = envs.make(id), gymnasium.make(name)
    index = {"seed": 3, "options": {"index": world.num_tasks - 1}}
    assert made.reset(**index) == world.reset(**index)
    assert made.step("Is it a dog?") == world.step("Is it a dog?")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(made.unwrapped)
    several = gymnasium.make_vec(name, 2, vectorization_mode="sync")
    several.reset(seed=[3, 3], options=index["options"])
    world.reset(**index)
    assert several.step(["Is it a dog?"] * 2)[0] == (world.step("Is it a dog?")[0],) * 2
    for one in (world, made, several):
        one.close()


# ------------------------------------------------------------------------------------ gymnasium


def test_passes_gymnasiums_checker_without_a_warning(world):
    """It is a `gymnasium.Env` that passes gymnasium's checker itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The check of render modes wants a world registered with gymnasium itself.
        check_env(world, skip_render_check=True)


def test_states_what_a_trainer_must_know(world):
    """It states what a trainer must know, and its `demonstration_env` is a world of `ENVS`."""
    assert envs.make(world.id).__class__ is world.__class__
    assert world.num_tasks > 0 and world.max_turns > 0 and world.max_action_chars > 0
    assert isinstance(world.append_only, bool)
    assert all(known is None or np.isfinite(known) for known in (world.best_return, world.expert_return))
    assert world.demonstration_env in envs.ENVS


def test_reset_reaches_every_task_and_no_other(world):
    """Each task has another answer; an index beyond them or an unknown option of `reset` is a ValueError."""
    tasks = (
        range(world.num_tasks) if world.num_tasks <= 500 else (0, world.num_tasks // 2, world.num_tasks - 1)
    )
    answers = [world.reset(options={"index": index})[1]["answer"] for index in tasks]
    assert len(set(answers)) == len(answers)
    for index in (-1, world.num_tasks):
        with pytest.raises(ValueError, match=f"index: {index}"):
            world.reset(options={"index": index})
    with pytest.raises(ValueError, match="'indx'"):
        world.reset(options={"indx": 0})


def test_draws_tasks_with_its_own_generator(world):
    """Without an index a task is drawn by the world's own generator."""
    random.seed(0)
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    drawn = [world.reset(seed=7)[1]["answer"], *(world.reset()[1]["answer"] for _ in range(20))]
    world.step("Is it a dog?")
    world.demonstrations(2, seed=0)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before

    other = envs.make(world.id)
    assert drawn == [other.reset(seed=7)[1]["answer"], *(other.reset()[1]["answer"] for _ in range(20))]
    assert len(set(drawn)) > 1 or world.num_tasks == 1


# --------------------------------------------------------------------------------------- actions


def test_any_text_is_an_ordinary_action(world):
    """The answer is not told at once; `info["action"]` is the action up to a newline, stripped and cut."""
    observation, info = world.reset(seed=0)
    assert info["answer"] not in observation
    for action in some_actions(world, seed=0):
        next_observation, reward, terminated, truncated, info = world.step(action)
        assert info["action"] == taken(world, action)
        assert next_observation in world.observation_space and info["action"] in world.action_space
        assert next_observation.encode(), "a file can take it"
        assert type(reward) is float and np.isfinite(reward)
        assert type(terminated) is bool and type(truncated) is bool and not (terminated and truncated)
        if world.append_only:
            assert next_observation.startswith(observation + info["action"])
        observation = next_observation
        if terminated or truncated:
            observation, _ = world.reset()


def test_the_answer_is_not_told(world):
    """A guessing game does not tell the answer before the end.

    Unless the action did: random players, many tasks.
    """
    if world.id not in ("twenty-questions", "twenty-questions-subset", "guess-my-city"):
        # or a world's own test says where it may stand
        pytest.skip("what is to be reached is no secret here")
    rng = random.Random(0)
    for index in range(0, world.num_tasks, max(1, world.num_tasks // 50)):
        observation, info = world.reset(seed=index, options={"index": index})
        secret, over = info["answer"].split(",")[0], False
        assert not re.search(rf"\b{re.escape(secret)}\b", observation, re.I)
        while not over:
            before = observation
            observation, _, terminated, truncated, info = world.step(
                world.players["random"](observation, rng)
            )
            over = terminated or truncated
            reply = observation[len(before) + len(info["action"]) :]
            assert over or not re.search(rf"\b{re.escape(secret)}\b", reply, re.I)


@pytest.mark.parametrize("action", [None, 3, b"Is it a dog?", ["Is it a dog?"]])
def test_an_action_of_another_type_is_refused(world, action):
    """An action of another type is a TypeError."""
    world.reset(seed=0)
    with pytest.raises(TypeError, match="an action is a str, not " + type(action).__name__):
        world.step(action)


def test_episodes_end_once_and_say_how(world):
    """It ends once, at `max_turns` if nothing sensible is said; `step` before or after is a ResetNeeded."""
    with pytest.raises(ResetNeeded, match="reset"):
        world.step("before the first reset")
    world.reset(seed=0)
    total, terminated, truncated = 0.0, False, False
    for turn in range(1, world.max_turns + 1):
        assert not (terminated or truncated)
        _, reward, terminated, truncated, info = world.step("nonsense")
        total += reward
        assert ("result" in info) == (terminated or truncated)
    assert truncated and not terminated
    assert info["result"].items() >= {"return": total, "length": turn, "success": False}.items()
    with pytest.raises(ResetNeeded, match="reset"):
        world.step("after the end")


def test_gymnasiums_wrappers_fit(world):
    """gymnasium's wrappers fit it, by its id `turnrl/ID-v0`, too.

    RecordEpisodeStatistics asserts that info["episode"] is free, and puts its own into it.
    """
    by_id = gymnasium.make(f"turnrl/{world.id}-v0", render_mode="ansi")
    for inner in (world, by_id):
        kept = RecordEpisodeStatistics(TimeLimit(inner, 5))
        kept.reset(seed=0)
        over, length = False, 0
        while not over:
            observation, _, terminated, truncated, info = kept.step("nonsense")
            over, length = terminated or truncated, length + 1
        assert length == info["episode"]["l"] == min(5, world.max_turns)
        if "result" in info:
            assert info["episode"]["r"] == pytest.approx(info["result"]["return"])
    assert by_id.render() == observation
    by_id.close()


def test_success_is_what_the_world_says(world):
    """`success` agrees with the world's own text.

    In a dialogue of the lockstep, in one of a scripted player, and in the figures of both.
    """
    worlds, rng = envs.VecTextEnv(world.id, 1), random.Random(0)
    for name, player in world.players.items():
        for _ in range(2):
            index = rng.randrange(world.num_tasks)
            worlds.reset(seeds=[5], indices=[index])
            played = dialogue(world, player, random.Random(5), index, seed=5)
            again, rng_of_player = worlds.envs[0].players[name], random.Random(5)  # one may know its world
            while worlds.alive():
                worlds.step({0: again(worlds.observations[0], rng_of_player)})
            assert worlds.dialogues == [{key: played.get(key, False) for key in worlds.dialogues[0]}]
            figures = envs.summarise(worlds.dialogues)
            assert figures["return"] == pytest.approx(sum(played["rewards"])) and figures["cut"] == 0
            assert (figures["length"], figures["success"]) == (len(played["actions"]), played["success"])
    worlds.close()


# ---------------------------------------------------------------------------------- demonstrations


def test_demonstrations_are_what_the_world_says(world, monkeypatch):
    """Its demonstrations are dialogues of the world `demonstration_env`."""
    source = envs.make(world.demonstration_env)
    reset, index_of = type(source).reset, {}

    def noted(world, **given):  # which task has which answer; to begin all of them would take seconds
        observation, info = reset(world, **given)
        index_of[info["answer"]] = (given.get("options") or {}).get("index")
        return observation, info

    monkeypatch.setattr(type(source), "reset", noted)
    demonstrations = world.demonstrations(50, seed=3)
    monkeypatch.setattr(type(source), "reset", reset)
    if None in index_of.values() or not index_of:
        index_of = {source.reset(options={"index": i})[1]["answer"]: i for i in range(source.num_tasks)}
    for made in demonstrations:
        observation, info = source.reset(options={"index": index_of[made["answer"]]})
        observations, rewards = [observation], []
        for action in made["actions"]:
            observation, reward, terminated, truncated, info = source.step(action)
            assert info["action"] == action
            observations.append(observation)
            rewards.append(reward)
        imitated = made.pop("imitate", made["actions"])  # a mark for each action, if there are any
        assert len(imitated) == len(made["actions"])
        assert made == {
            "observations": observations,
            "actions": made["actions"],
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "success": info["result"]["success"],
            "answer": made["answer"],
            "return": info["result"]["return"],
        }


def test_demonstrations_are_set_by_their_seed(world):
    """Its demonstrations are set by their seed, and another seed makes others."""
    assert world.demonstrations(5, seed=1) == envs.make(world.id).demonstrations(5, seed=1)
    assert world.demonstrations(5, seed=1) != world.demonstrations(5, seed=2)


# --------------------------------------------------------------------------------------- registry


def test_unknown_names_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^unknown environment 'chess'; known: twenty-questions, [^\n]*$"):
        envs.make("chess")
    with pytest.raises(
        ValueError, match=r"^twenty-questions has no option 'orcale'; it has: oracle, matching$"
    ):
        envs.make("twenty-questions", orcale="x")


def test_missing_packages_and_files_are_named(monkeypatch, tmp_path):
    with pytest.raises(
        envs.Unavailable, match=r"^twenty-questions: the oracle [^\n]* does not exist; give [^\n]*$"
    ):
        envs.make("twenty-questions", oracle=tmp_path / "nowhere")
    monkeypatch.setitem(envs.ENVS, "absent", envs.Entry("no_such_package:World", "", "no_such_package"))
    with pytest.raises(
        envs.Unavailable, match=r"^absent needs the package no_such_package: pip install [^\n]*$"
    ):
        envs.make("absent")
    assert "pip install" in envs.missing("absent")
    assert envs.missing("twenty-questions") is None


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, *args]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )


def test_importing_is_light():
    """No world for the registry, which gymnasium knows, too, and no torch for a world."""
    code = "import sys, envs, gymnasium; assert 'turnrl/apps-v0' in gymnasium.registry;"
    code += "assert not [name for name in sys.modules if name.startswith('envs.')];"
    code += "envs.make('twenty-questions').demonstrations(2, 0);"
    code += "assert not {'torch', 'transformers'} & set(sys.modules)"
    assert run("-c", code).stderr == ""


def test_listing_names_every_world():
    result = run("-m", "envs")
    assert result.returncode == 0
    *lines, own = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(envs.ENVS) and own.startswith("module:Class ")
    for line, (id, entry) in zip(lines, envs.ENVS.items(), strict=True):
        assert entry.about in line and entry.needs in line and f"; for {entry.scripts};" in line
        assert ("usable here" in line) == (envs.missing(id) is None)


@pytest.mark.parametrize("id", WORLDS)
def test_the_scripts_that_take_a_world_are_those_that_are_listed(id):
    scripts = envs.ENVS[id].scripts.split(", ")
    world = envs.make(id)
    assert ("loop_ppo.py" in scripts) == world.append_only
    assert ("archer.py" in scripts) != getattr(world, "multiline", False)
    for name in ("guide_simcse.py", "lge_drrn.py"):
        text = (ROOT / name).read_text(encoding="utf-8")
        (known,) = re.findall(r"^(?:WORLDS|ENCODERS) = \{(.*)\}", text, re.M)  # the worlds that it knows
        assert (name in scripts) == (f'"{id}": ' in known)
    assert all((ROOT / script).exists() for script in scripts)


# -------------------------------------------------------------------------------------- in lockstep


def test_lockstep_is_the_same_as_one_by_one():
    n, actions = 4, ["Is it an animal?", "Is it a dog?", "", "Is it a cat?"]
    worlds = envs.VecTextEnv("twenty-questions", n)
    singles = [envs.make("twenty-questions") for _ in range(n)]
    assert worlds.reset(seeds=[0, 1, 2, None], indices=[None, None, None, 10]) is None
    expected = [single.reset(seed=seed) for single, seed in zip(singles[:3], [0, 1, 2], strict=True)]
    expected.append(singles[3].reset(options={"index": 10}))
    assert worlds.observations == [observation for observation, _ in expected]
    assert [d["answer"] for d in worlds.dialogues] == [info["answer"] for _, info in expected]
    assert worlds.step(dict(enumerate(actions))) is None
    steps = [single.step(action) for single, action in zip(singles, actions, strict=True)]
    said, rewards, terminated, truncated, infos = map(list, zip(*steps, strict=True))
    assert (worlds.observations, worlds.terminated, worlds.truncated) == (said, terminated, truncated)
    for one, (began, _), text, reward, info in zip(
        worlds.dialogues, expected, said, rewards, infos, strict=True
    ):
        assert (one["observations"], one["actions"], one["rewards"]) == (
            [began, text],
            [info["action"]],
            [reward],
        )
    assert [d["terminated"] for d in worlds.dialogues] == terminated
    assert len(worlds) == n and terminated[3]  # word 10 is the cat


def test_lockstep_leaves_worlds_without_an_action_alone():
    worlds = envs.VecTextEnv("twenty-questions", 3)
    worlds.reset(indices=[10, 11, 12])  # cat, dog, horse
    worlds.step({0: "Is it a cat?", 2: "Is it a cat?"})
    first = ["Questions:\nIs it a cat? Yes.\n", "Questions:\n", "Questions:\nIs it a cat? No.\n"]
    assert worlds.observations == first and worlds.alive() == [1, 2]
    assert [d["rewards"] for d in worlds.dialogues] == [[0.0], [], [-1.0]]
    assert [d["success"] for d in worlds.dialogues] == [True, False, False]
    assert (worlds.terminated, worlds.truncated) == ([True, False, False], [False] * 3)
    worlds.step(dict.fromkeys(worlds.alive(), "Is it a horse?"))
    assert worlds.observations[0] == first[0] and worlds.alive() == [1]
    assert [d["rewards"] for d in worlds.dialogues] == [[0.0], [-1.0], [-1.0, 0.0]]
    assert worlds.dialogues[0]["actions"] == ["Is it a cat?"] and worlds.terminated == [True, False, True]
    played = worlds.dialogues
    worlds.reset()
    worlds.step({})
    assert worlds.observations == ["Questions:\n"] * 3 and worlds.alive() == [0, 1, 2]
    assert played[0]["observations"][-1] == first[0], "what was played is not changed by a reset"


@pytest.mark.parametrize("n", [0, -1])
def test_there_must_be_a_world(n):
    with pytest.raises(ValueError, match=f"^{n} worlds: at least one must be played, "):
        envs.VecTextEnv("twenty-questions", n)


def test_lockstep_names_the_world_that_fails():
    worlds = envs.VecTextEnv("twenty-questions", 3)
    with pytest.raises(RuntimeError, match=r"^world 0 \(twenty-questions\), step: .*reset"):
        worlds.step({0: "?"})
    worlds.reset()
    with pytest.raises(
        RuntimeError, match=r"^world 1 \(twenty-questions\), step: an action is a str, not int"
    ) as error:
        worlds.step({0: "?", 1: 3})
    assert isinstance(error.value.__cause__, TypeError)
    with pytest.raises(RuntimeError, match=r"^world 2 \(twenty-questions\), reset: index: 999"):
        worlds.reset(indices=[0, 1, 999])
    with pytest.raises(ValueError, match="indices: 2 for 3 worlds"):
        worlds.reset(indices=[0, 1])


def said(*actions: str, **more) -> dict:
    """A dialogue of these actions, each of which cost -1."""
    observations = [
        "> " + "".join(f"{action} no\n" for action in actions[:n]) for n in range(len(actions) + 1)
    ]
    rewards = [-1.0] * len(actions)
    made = {"observations": observations, "actions": [*actions], "rewards": rewards, "answer": "x"}
    return made | {"terminated": True, "success": False} | more


def test_late_repetitions_are_counted():
    """Of the utterances from the ninth on, those that an earlier one of the same dialogue had."""
    eight = [*"abcdefgg"]
    assert envs.summarise([said(*eight)])["repeated"] == 0.0, "nobody was asked so late"
    assert envs.summarise([said(*eight, "a", "h"), said(*eight, "h", "h")])["repeated"] == 0.5


def test_a_dialogue_can_be_cut_from_outside():
    worlds = envs.VecTextEnv("twenty-questions", 3)
    worlds.reset(indices=[10, 11, 12])  # cat, dog, horse
    worlds.cut(1)
    worlds.step({0: "Is it a cat?", 2: "Is it invalid?"})
    worlds.cut(0)  # has ended by itself
    assert worlds.alive() == [2] and worlds.truncated == [False, True, False]
    assert [d["cut"] for d in worlds.dialogues] == [False, True, False]
    assert worlds.dialogues[1]["actions"] == [] and not worlds.dialogues[1]["terminated"]
    figures = envs.summarise(worlds.dialogues)
    assert figures["cut"] == pytest.approx(1 / 3) and figures["truncated"] == pytest.approx(2 / 3)
    assert figures["length"] == pytest.approx(2 / 3) and figures["invalid"] == 0.5
    alone = envs.summarise([worlds.dialogues[1]])
    assert alone == {
        "return": 0,
        "success": 0,
        "length": 0,
        "truncated": 1,
        "cut": 1,
        "invalid": 0,
        "repeated": 0,
    }
    worlds.reset()
    assert worlds.alive() == [0, 1, 2] and not any(d["cut"] for d in worlds.dialogues)


def test_a_dialogue_that_is_cut_costs_what_the_world_charges_for_silence():
    """On the last action, and success is the world's word; the text ends where the dialogue did."""
    worlds = envs.VecTextEnv("twenty-questions", 2)
    worlds.reset(indices=[10, 11])
    worlds.step({0: "Is it alive?", 1: "Is it alive?"})
    worlds.step({0: "Is it big?"})
    worlds.cut(0)
    worlds.cut(0)
    first, second = worlds.dialogues
    assert first["rewards"] == [-1.0, -19.0] and first["actions"] == ["Is it alive?", "Is it big?"]
    assert len(first["observations"]) == 3 and not first["terminated"] and not first["success"]
    assert second["rewards"] == [-1.0] and worlds.alive() == [1]
    steps = iter([("", 1, False, False, {}), ("", 2.5, True, False, {"result": {"success": True}})])
    assert envs.play_out(lambda action: next(steps) if action == "" else None) == (3.5, True)


# ---------------------------------------------------------------------------------- a world's options


def test_options_from_a_command_line():
    assert envs.options("") == {}
    assert envs.options("oracle=a/b=c, max_turns=-5") == {"oracle": "a/b=c", "max_turns": -5}
    assert envs.options("data=007,max_turns=0") == {"data": "007", "max_turns": 0}, "007 may be a folder"
    assert envs.make("school", **envs.options("simplifications=")).simplifications == ""


@pytest.mark.parametrize("text", ["matching", "=paper", "a=1,,b=2", "a=1,", "a=1,a=2", "a b=1", ","])
def test_what_is_no_option_is_said_in_one_line(text):
    with pytest.raises(ValueError, match=r"^'[^\n]*' in '[^\n]*' is no option: write NAME=VALUE,[^\n]*$"):
        envs.options(text)


def test_an_option_of_the_wrong_kind_is_said_in_one_line():
    with pytest.raises(ValueError, match=r"^apps: max_turns must be a whole number, not 'ten'$"):
        envs.make("apps", **envs.options("max_turns=ten"))
    with pytest.raises(envs.Unavailable, match=r"^twenty-questions: the oracle 7 does not exist"):
        envs.make("twenty-questions", **envs.options("oracle=7"))


# ------------------------------------------------------------------------------------------- play


@pytest.fixture
def play_it(monkeypatch, capsys):
    """Calls envs.play in this process: exit code, output, errors."""

    def call(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["envs.play", *args])
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = envs.play.main()
        return code, *capsys.readouterr()

    return call


def test_a_person_can_play_and_win(play_it):
    asked = "Is it an animal?\n\nIs it a dog?\n"
    code, out, err = play_it("twenty-questions", "--index", "11", stdin=asked)
    assert (code, err) == (0, "")
    rules, dialogue = out.split("\n\n")
    assert dialogue == "Questions:\n> Yes.\n> Invalid Question.\n> Yes.\nSolved.\n3 turns, return -2\n"
    rules = " ".join(rules.split())
    assert rules.startswith("A thing is hidden.") and "You have 20 turns. For example: Is it " in rules


def test_a_person_can_type_a_loop(play_it):
    code, out, _ = play_it("apps", "--index", "0", stdin="for i in range(2):\n    print(i + 41)\n\n")
    assert code == 0 and "41\n42\n" in out and "Error" not in out


def test_a_person_can_leave_and_lose(play_it):
    """In a process of its own, too."""
    words = ["twenty-questions", "--index", "11", "--show-answer"]
    left = run("-m", "envs.play", *words, stdin="Is it a cat?\n")
    assert left.returncode == 0 and left.stderr == ""
    assert left.stdout.endswith("\n\n(hidden: dog)\nQuestions:\n> No.\n> \nGoodbye. It was: dog\n")
    _, lost, _ = play_it("twenty-questions", "--seed", "1", stdin="x\n" * 20)
    assert lost.endswith("Not solved. It was: desk\n20 turns, return -20\n")


def test_a_person_can_choose_the_worlds_options(play_it):
    """By the authors' rule a true question that ends in the word is right."""
    words = ["twenty-questions", "--index", "11", "--world", "matching=paper"]
    assert "Solved." in play_it(*words, stdin="Is it an animal, dog?\n")[1]


@pytest.mark.parametrize(
    "args",
    [
        ["chess"],
        ["twenty-questions", "--index", "999"],
        ["twenty-questions", "--seed", "-5"],
        ["twenty-questions", "--world", "matching=loose"],
        ["twenty-questions", "--world", "orcale=x"],
    ],
)
def test_play_refuses_nonsense_in_one_line(args, play_it):
    code, _, err = play_it(*args)
    assert code == 2 and len(err.splitlines()) == 1


# ------------------------------------------------------------------------------- an agent plays

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """The folder of a run whose actor is a random Llama of characters."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import tokenizers

    characters = ["</s>", *map(chr, range(32, 127)), "\n"]
    vocabulary = {character: i for i, character in enumerate(characters)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="</s>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(characters), max_position_embeddings=4000, eos_token_id=0, **sizes
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "actor")
    tokenizer.save_pretrained(folder / "actor")
    return folder


def test_an_agents_prompt_is_made_of_pieces(agent):
    player = envs.play.Agent(str(agent), True, True, None)
    observations = ["Hall.\n", "Hall.\ngo north Study.\n"]
    whole = player.tokenizer.decode(player.ids(observations, ["go north"]))
    assert whole == "Hall.\ngo north</s> Study.\n"
    silent = ["Hall.\n", "Hall.\n", "Hall.\ngo Study.\n"]  # nothing was said, and nothing was replied
    assert player.tokenizer.decode(player.ids(silent, ["", "go"])) == "Hall.\ngo</s> Study.\n"
    assert player.tokenizer.decode(player.ids(silent[:2], [""])) == "Hall.\n"
    player.append_only = False
    assert player.tokenizer.decode(player.ids(["Hall.", "Study."], ["go north"])) == "Study."
    player.append_only, player.tokenizer.chat_template = True, TEMPLATE
    for cached in (envs.models.chat_pieces, envs.models.encode_prompt, envs.models.encode_reply):
        cached.cache_clear()
    whole = player.tokenizer.decode(player.ids(observations, ["go north"]))
    asked = "<|user|>Hall.\n</s><|assistant|>go north</s>"
    assert whole == asked + "<|user|> Study.\n</s><|assistant|>"


def test_an_agent_plays_a_world(agent, play_it, monkeypatch):
    """The folder of a run and that of its model are the same agent; a seed repeats what it draws."""
    monkeypatch.setattr(MiniDetective, "max_turns", 8)
    command = ["mini-detective", "--index", "3", "--seed", "1", "--agent"]
    code, first, errors = play_it(*command, str(agent))
    assert code == 0 and errors == "" and play_it(*command, str(agent / "actor")) == (code, first, errors)
    assert first.count("\n> ") == 8 and first.endswith("8 turns, return 0\n")
    assert play_it(*command, str(agent), "--greedy")[1] not in ("", first)


def test_an_agent_asks_a_person(agent, play_it):
    """In a process of its own, too, where nothing but the dialogue may be printed."""
    command = ["twenty-questions", "--agent", str(agent), "--greedy"]
    result = run("-m", "envs.play", *command, stdin="y\n?\nc\n")
    assert result.returncode == 0 and result.stderr == ""
    assert (
        result.stdout.startswith("Think of one of these: basketball, ")
        and result.stdout.count("Answer: ") == 3
    )
    code, left, _ = play_it(*command, stdin="y\n")
    assert code == 0 and left.endswith("Goodbye.\n") and left.count("Answer: ") == 2


def test_a_person_answers_in_words_where_yes_and_no_are_not_all(monkeypatch, capsys):
    """As in Guess My City: what is typed is what the agent reads."""
    typed, seen = iter(["My city is in Asia.", "NO", "", "correct"]), []
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    envs.play.answer(lambda observations, _: seen.append(observations[-1]) or "Is it?", ["Rome", "Oslo"], 20)
    assert seen[-1] == "Questions:\nIs it? My city is in Asia.\nIs it? No.\nIs it? Invalid Question.\n"
    assert len(seen) == 4 and capsys.readouterr().out.startswith("Think of one of these: Rome, Oslo.\n")


def test_what_is_wrong_with_an_agent_is_said_in_one_line(agent, play_it, tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, _, errors = play_it("mini-detective", "--agent", str(folder))
        assert code == 2 and len(errors.splitlines()) == 1 and str(folder) in errors
    shutil.copytree(agent / "actor", tmp_path / "short")
    config = tmp_path / "short/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 100}))
    code, _, errors = play_it("mini-detective", "--agent", str(tmp_path / "short"))
    assert (code, errors) == (2, "the dialogue has outgrown the agent's context of 100 tokens\n")


# ------------------------------------------------------------------------------------------- speed


def test_the_speed_is_told_in_one_line():
    result = run("-m", "envs.speed", "guess-my-city", "--seconds", "0")
    assert result.returncode == 0 and result.stdout == "guess-my-city: 0 steps a second\n"
    result = run("-m", "envs.speed", "guess-my-city", "--seconds", "0.05")
    assert int(result.stdout.split()[1].replace(",", "")) > 0
    result = run("-m", "envs.speed", "chess")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
