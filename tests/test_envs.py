"""What every world of the registry keeps to. A new world is tested here by being in envs.ENVS."""

import random
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

import envs

ROOT = Path(__file__).parent.parent
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
    "\u2028 \u2029 \x85 \x0b \x0c lines of other kinds",
    "</s><pad><|endoftext|>",
    "Yes.",
    "Questions:",
    "Invalid Question.",
]


def all_worlds():
    """Every id of the registry; those that cannot be used here are skipped with their reason."""
    for id in envs.ENVS:
        problem = envs.missing(id)
        yield pytest.param(id, marks=pytest.mark.skipif(problem is not None, reason=problem or ""))


@pytest.fixture(params=all_worlds())
def world(request):
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
    """An action as a world takes it: up to the first newline unless it is `multiline`, stripped, bounded."""
    text = action if getattr(world, "multiline", False) else action.split("\n")[0]
    return text.strip()[: world.max_action_chars]


# ------------------------------------------------------------------------------------ gymnasium


def test_passes_gymnasiums_checker_without_a_warning(world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The check of render modes wants a world registered with gymnasium itself.
        check_env(world, skip_render_check=True)


def test_states_what_a_trainer_must_know(world):
    assert envs.make(world.id).__class__ is world.__class__
    assert world.num_tasks > 0 and world.max_turns > 0 and world.max_action_chars > 0
    assert isinstance(world.append_only, bool)
    assert all(known is None or np.isfinite(known) for known in (world.best_return, world.expert_return))
    assert world.demonstration_env in envs.ENVS


def test_reset_reaches_every_task_and_no_other(world):
    tasks = range(world.num_tasks) if world.num_tasks <= 500 else (0, world.num_tasks // 2, world.num_tasks - 1)
    answers = [world.reset(options={"index": index})[1]["answer"] for index in tasks]
    assert len(set(answers)) == len(answers)
    for index in (-1, world.num_tasks):
        with pytest.raises(ValueError, match=f"index: {index}"):
            world.reset(options={"index": index})
    with pytest.raises(ValueError, match="'indx'"):
        world.reset(options={"indx": 0})


def test_draws_tasks_with_its_own_generator(world):
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
    observation, info = world.reset(seed=0)
    assert info["answer"] not in observation
    for action in some_actions(world, seed=0):
        next_observation, reward, terminated, truncated, info = world.step(action)
        assert info["action"] == taken(world, action)
        assert next_observation in world.observation_space and info["action"] in world.action_space
        assert type(reward) is float and np.isfinite(reward)
        assert type(terminated) is bool and type(truncated) is bool and not (terminated and truncated)
        if world.append_only:
            assert next_observation.startswith(observation + info["action"])
        observation = next_observation
        if terminated or truncated:
            observation, _ = world.reset()


def test_the_answer_is_not_told(world):
    """What a step adds does not name it, unless the action did or the episode is over: random players, many tasks."""
    if world.id not in ("twenty-questions", "twenty-questions-subset", "guess-my-city"):
        pytest.skip("what is to be reached is no secret here")  # or a world's own test says where it may stand
    rng = random.Random(0)
    for index in range(0, world.num_tasks, max(1, world.num_tasks // 50)):
        observation, info = world.reset(seed=index, options={"index": index})
        secret, over = info["answer"].split(",")[0], False
        assert not re.search(rf"\b{re.escape(secret)}\b", observation, re.I)
        while not over:
            before = observation
            observation, _, terminated, truncated, info = world.step(world.players["random"](observation, rng))
            over = terminated or truncated
            reply = observation[len(before) + len(info["action"]) :]
            assert over or not re.search(rf"\b{re.escape(secret)}\b", reply, re.I)


@pytest.mark.parametrize("action", [None, 3, b"Is it a dog?", ["Is it a dog?"]])
def test_an_action_of_another_type_is_refused(world, action):
    world.reset(seed=0)
    with pytest.raises(TypeError, match="an action is a str, not " + type(action).__name__):
        world.step(action)


def test_episodes_end_once_and_say_how(world):
    with pytest.raises(ResetNeeded, match="reset"):
        world.step("before the first reset")
    world.reset(seed=0)
    total, terminated, truncated = 0.0, False, False
    for turn in range(1, world.max_turns + 1):
        assert not (terminated or truncated)
        _, reward, terminated, truncated, info = world.step("nonsense")
        total += reward
        assert ("episode" in info) == (terminated or truncated)
    assert truncated and not terminated
    assert info["episode"].items() >= {"return": total, "length": turn, "success": False}.items()
    with pytest.raises(ResetNeeded, match="reset"):
        world.step("after the end")


def test_the_figures_take_for_a_success_what_the_world_does(world):
    """A dialogue has no mark of success: `summarise` must find it in the end and the last reward."""
    if getattr(world, "multiline", False):
        pytest.skip("the last reward is the share of tests passed")
    rng = random.Random(0)
    for player in world.players.values():
        for _ in range(20):
            observation, info = world.reset(seed=rng.randrange(1000))
            played = {"observations": [observation], "actions": [], "rewards": []}
            terminated = truncated = False
            while not (terminated or truncated):
                observation, reward, terminated, truncated, info = world.step(player(observation, rng))
                played["observations"].append(observation)
                played["actions"].append(info["action"])
                played["rewards"].append(reward)
            figures = envs.summarise([played | {"terminated": terminated}])
            assert figures["success"] == info["episode"]["success"]
            assert (figures["return"], figures["length"]) == (info["episode"]["return"], info["episode"]["length"])


# ---------------------------------------------------------------------------------- demonstrations


def test_demonstrations_are_what_the_world_says(world):
    source = envs.make(world.demonstration_env)
    index_of = {source.reset(options={"index": i})[1]["answer"]: i for i in range(source.num_tasks)}
    for dialogue in world.demonstrations(50, seed=3):
        observation, info = source.reset(options={"index": index_of[dialogue["answer"]]})
        observations, rewards = [observation], []
        for action in dialogue["actions"]:
            observation, reward, terminated, truncated, info = source.step(action)
            assert info["action"] == action
            observations.append(observation)
            rewards.append(reward)
        assert dialogue == {
            "observations": observations,
            "actions": dialogue["actions"],
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "answer": dialogue["answer"],
            "return": info["episode"]["return"],
        }


def test_demonstrations_are_set_by_their_seed(world):
    assert world.demonstrations(5, seed=1) == envs.make(world.id).demonstrations(5, seed=1)
    assert world.demonstrations(5, seed=1) != world.demonstrations(5, seed=2)


# --------------------------------------------------------------------------------------- registry


def test_unknown_names_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^unknown environment 'chess'; known: twenty-questions, [^\n]*$"):
        envs.make("chess")
    with pytest.raises(ValueError, match=r"^twenty-questions has no option 'orcale'; it has: oracle, matching$"):
        envs.make("twenty-questions", orcale="x")


def test_missing_packages_and_files_are_named(monkeypatch, tmp_path):
    with pytest.raises(envs.Unavailable, match=r"^twenty-questions: the oracle [^\n]* does not exist; give [^\n]*$"):
        envs.make("twenty-questions", oracle=tmp_path / "nowhere")
    monkeypatch.setitem(envs.ENVS, "absent", envs.Entry("no_such_package:World", "", "no_such_package"))
    with pytest.raises(envs.Unavailable, match=r"^absent needs the package no_such_package: pip install [^\n]*$"):
        envs.make("absent")
    assert "pip install" in envs.missing("absent")
    assert envs.missing("twenty-questions") is None


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def test_importing_is_light():
    """No torch for a world of the table, not even gymnasium for the registry."""
    code = "import sys, envs; assert 'gymnasium' not in sys.modules;"
    code += "envs.make('twenty-questions').demonstrations(2, 0);"
    code += "assert not {'torch', 'transformers'} & set(sys.modules)"
    assert run("-c", code).stderr == ""


def test_listing_names_every_world():
    result = run("-m", "envs")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(envs.ENVS)
    for line, (id, entry) in zip(lines, envs.ENVS.items(), strict=True):
        assert entry.about in line and entry.needs in line
        assert ("usable here" in line) == (envs.missing(id) is None)


# -------------------------------------------------------------------------------------- in lockstep


def test_lockstep_is_the_same_as_one_by_one():
    n, actions = 4, ["Is it an animal?", "Is it a dog?", "", "Is it a cat?"]
    worlds = envs.VecTextEnv("twenty-questions", n)
    singles = [envs.make("twenty-questions") for _ in range(n)]
    observations, infos = worlds.reset(seeds=[0, 1, 2, None], indices=[None, None, None, 10])
    expected = [single.reset(seed=seed) for single, seed in zip(singles[:3], [0, 1, 2], strict=True)]
    expected.append(singles[3].reset(options={"index": 10}))
    assert (observations, infos) == ([o for o, _ in expected], [i for _, i in expected])
    results = worlds.step(actions)
    expected = [single.step(action) for single, action in zip(singles, actions, strict=True)]
    assert results == tuple(map(list, zip(*expected, strict=True)))
    assert len(worlds) == n and results[2][3]  # word 10 is the cat


def test_lockstep_leaves_ended_worlds_and_none_alone():
    worlds = envs.VecTextEnv("twenty-questions", 3)
    worlds.reset(indices=[10, 11, 12])  # cat, dog, horse
    first = worlds.step(["Is it a cat?", None, "Is it a cat?"])
    assert first[0] == ["Questions:\nIs it a cat? Yes.\n", "Questions:\n", "Questions:\nIs it a cat? No.\n"]
    assert first[1:4] == ([0.0, 0.0, -1.0], [True, False, False], [False] * 3)
    assert first[4][1] == {} and first[4][0]["episode"]["success"]
    second = worlds.step(["Is it a horse?"] * 3)
    assert second[0][0] == first[0][0] and second[1] == [0.0, -1.0, 0.0]
    assert second[2] == [True, False, True] and second[4][0] == {}
    assert first[0][1] == "Questions:\n"  # what a step returned is not changed by the next
    observations, _ = worlds.reset()
    assert observations == ["Questions:\n"] * 3 and worlds.step([None] * 3)[2] == [False] * 3


def test_lockstep_names_the_world_that_fails():
    worlds = envs.VecTextEnv("twenty-questions", 3)
    with pytest.raises(RuntimeError, match=r"^world 0 \(twenty-questions\), step: .*reset"):
        worlds.step(["?"] * 3)
    worlds.reset()
    with pytest.raises(
        RuntimeError, match=r"^world 1 \(twenty-questions\), step: an action is a str, not int"
    ) as error:
        worlds.step(["?", 3, "?"])
    assert isinstance(error.value.__cause__, TypeError)
    with pytest.raises(RuntimeError, match=r"^world 2 \(twenty-questions\), reset: index: 999"):
        worlds.reset(indices=[0, 1, 999])
    with pytest.raises(ValueError, match="actions: 2 for 3 worlds"):
        worlds.step(["?", "?"])


# ------------------------------------------------------------------------------------------- play


def test_a_person_can_play_and_win():
    result = run("-m", "envs.play", "twenty-questions", "--index", "11", stdin="Is it an animal?\n\nIs it a dog?\n")
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout == "Questions:\n> Yes.\n> Invalid Question.\n> Yes.\nSolved.\n3 turns, return -2\n"


def test_a_person_can_type_a_loop():
    result = run("-m", "envs.play", "apps", "--index", "0", stdin="for i in range(2):\n    print(i + 41)\n\n")
    assert result.returncode == 0 and "41\n42\n" in result.stdout and "Error" not in result.stdout


def test_a_person_can_leave_and_lose():
    left = run("-m", "envs.play", "twenty-questions", "--index", "11", "--show-answer", stdin="Is it a cat?\n")
    assert left.returncode == 0 and left.stderr == ""
    assert left.stdout == "(hidden: dog)\nQuestions:\n> No.\n> \nGoodbye. It was: dog\n"
    lost = run("-m", "envs.play", "twenty-questions", "--seed", "1", stdin="x\n" * 20)
    assert lost.stdout.endswith("Not solved. It was: desk\n20 turns, return -20\n")


def test_a_person_can_choose_the_worlds_options():
    """By the authors' rule a question of which the last word is right is right."""
    options = ["envs.play", "twenty-questions", "--index", "11", "--option", "matching=paper"]
    assert "Solved." in run("-m", *options, stdin="Is it a cat or a dog?\n").stdout


@pytest.mark.parametrize(
    "args",
    [
        ["chess"],
        ["twenty-questions", "--index", "999"],
        ["twenty-questions", "--seed", "-5"],
        ["twenty-questions", "--option", "matching=loose"],
        ["twenty-questions", "--option", "orcale=x"],
    ],
)
def test_play_refuses_nonsense_in_one_line(args):
    result = run("-m", "envs.play", *args)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


# ------------------------------------------------------------------------------------------- speed


def test_the_speed_is_told_in_one_line():
    result = run("-m", "envs.speed", "guess-my-city", "--seconds", "0")
    assert result.returncode == 0 and result.stdout == "guess-my-city: 0 steps a second\n"
    result = run("-m", "envs.speed", "guess-my-city", "--seconds", "0.05")
    assert int(result.stdout.split()[1].replace(",", "")) > 0
    result = run("-m", "envs.speed", "chess")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
