"""benchmarks/archer_speed.py without the authors' repository: our side."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import archer_speed
from archer_speed import Args, Worlds, load, parts_of_ours, rate

import envs
from envs import models


def test_a_folder_without_their_code_is_told_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="clone their repository") as error:
        load(str(tmp_path))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_our_parts_count_the_utterances_that_they_play_and_learn_from():
    args = Args(
        rollouts=3, critic_pool=2, critic_updates=2, critic_batch=2, actor_batch=2, max_action_tokens=4
    )
    world = envs.make(args.env)
    actor = models.load_actor(str(models.checkpoint_of(world)), args)
    parts = parts_of_ours(args, actor)
    played = parts["rollout"]()
    assert 3 <= played <= 3 * world.max_turns
    per_dialogue = range(1, world.max_turns + 1)
    assert parts["critic"]() in range(4 * per_dialogue[0], 4 * per_dialogue[-1] + 1)  # two updates of two
    assert parts["critic, fresh utterances every time"]() in range(2, 2 * per_dialogue[-1] + 1)
    assert parts["actor"]() in range(2, 2 * per_dialogue[-1] + 1)


def test_the_worlds_as_theirs_are_called():
    worlds = Worlds(Args(rollouts=2))
    assert worlds.bsize == 2
    before = worlds.reset()
    results = worlds.step(["Is it alive?", "Is it a dog?"])
    assert all(
        text.startswith(old) and len(text) > len(old)
        for old, (text, _, _) in zip(before, results, strict=True)
    )
    rewards = [sum(result[1] for result in results)]
    ended = [result[2] for result in results]
    while not all(ended):
        results = worlds.step(["", ""])
        rewards.append(sum(result[1] for result in results if result))
        ended = [done or result is None or result[2] for done, result in zip(ended, results, strict=True)]
    assert sum(rewards) == pytest.approx(-40.0)  # none was won: each turn costs 1
    assert worlds.step([]) == [None, None]


def test_a_rate_is_per_cpu_second_and_says_nothing(capsys, monkeypatch):
    clock = iter([3.0, 7.0])
    monkeypatch.setattr(archer_speed.time, "process_time", lambda: next(clock))

    def part():
        print("what theirs says")
        return 12

    assert rate(part) == 3.0
    assert capsys.readouterr().out == ""
