"""The games of TextArena as worlds of one's own."""

import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

import archer
import envs
import envs.check
import loop_ppo
import sft

pytestmark = pytest.mark.external
pytest.importorskip("textarena", reason="needs the package textarena: pip install textarena")

ID = "envs.worlds.textarena:TextArena"
GAMES = ["Mastermind", "GuessTheNumber", "FrozenLake", "TowerOfHanoi"]
ODD = ["Countdown", "Cryptarithm", "Slitherlink"]  # put the arguments of two calls into another order


@pytest.mark.parametrize("rule", envs.check.RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("game", GAMES + ODD)
def test_the_games_keep_the_rules(game, rule):
    rule(envs.check.maker(ID, game=f"{game}-v0-raw"))


def test_sokoban_starts():
    """It makes its boxes and walls for seconds, so that not all rules are asked for."""
    boards = [envs.make(ID, game="Sokoban-v0-raw").reset(seed=seed)[0] for seed in (1, 1)]
    assert boards[0] == boards[1] and "Sokoban" in boards[0]


def test_a_win_is_a_success_and_its_return_is_1():
    world = envs.make(ID)
    world.reset(seed=1)
    code = world.game.state.game_state["secret_code"]
    observation, reward, terminated, _, info = world.step(f"[{' '.join(map(str, code))}]")
    assert (reward, terminated, info["result"]["success"]) == (1.0, True, True)
    assert "cracked the code" in observation
    world.reset(seed=1)
    observation, _, terminated, _, _ = world.step("what?")
    assert "invalid move" in observation and observation.count("what?") == 1 and not terminated
    _, reward, terminated, _, info = world.step("what?")
    assert (reward, terminated, info["result"]["success"]) == (0.0, True, False)


@pytest.mark.parametrize("game", ODD)
def test_an_invalid_move_is_no_error(game):
    """Of the first the game warns, and the second ends it with what was reached so far."""
    world = envs.make(ID, game=f"{game}-v0-raw")
    begun, _ = world.reset(seed=1)
    observation, reward, terminated, _, _ = world.step("what?")
    assert observation.startswith(f"{begun}what?\nYou attempted an invalid move") and not terminated
    observation, reward, terminated, _, info = world.step("what?")
    assert "Invalid Move: " in observation.splitlines()[-1] and "format" in observation.splitlines()[-1]
    assert terminated and 0 <= reward < 1 and not info["result"]["success"]


def test_the_scripted_player_wins():
    made = envs.make(ID).demonstrations(20, seed=0)
    assert envs.summarise(made)["success"] == 1.0 and len({d["actions"][0] for d in made}) > 10


def test_the_page_s_class_gives_another_game_a_player(monkeypatch):
    page = Path(__file__).parents[2] / "docs/your_world.md"
    example = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)[-1]
    module = ModuleType("my_game")
    exec(example, vars(module))
    monkeypatch.setitem(sys.modules, "my_game", module)
    envs.check.has_players(envs.check.maker("my_game:GuessTheNumber"))
    made = envs.make("my_game:GuessTheNumber").demonstrations(10, seed=0)
    assert 0 < envs.summarise(made)["success"] < 1


def test_only_the_plain_mastermind_has_a_player():
    """The others have other codes."""
    assert envs.make(ID).players and not envs.make(ID, game="Mastermind-v0-hard-raw").players


def test_games_in_threads_are_those_that_were_played_one_by_one():
    worlds = [envs.make(ID, game="FrozenLake-v0-random-raw") for _ in range(8)]
    alone = [world.reset(seed=seed)[0] for seed, world in enumerate(worlds)]
    random.seed(5)
    before = random.getstate()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: worlds[i].reset(seed=i)[0], range(8))) == alone
    assert random.getstate() == before and len(set(alone)) > 1


def test_archer_and_loop_take_mastermind(tmp_path):
    sizes = {"epochs": 1, "batch": 4, "eval_episodes": 2, "width": 32, "layers": 1, "max_action_tokens": 12}
    sft.main(sft.Args(env=ID, runs=str(tmp_path / "sft"), demonstrations=8, **sizes))
    (model,) = map(str, tmp_path.glob("sft/*/actor"))
    tiny = {"iterations": 2, "eval_episodes": 2, "threads": 1, "max_action_tokens": 12}
    critic = {"critic_updates": 1, "critic_batch": 2, "critic_pool": 2}
    actor = {"warmup": 0, "actor_updates": 1, "actor_batch": 2, "rollouts": 2}
    runs = str(tmp_path / "runs")
    summary = archer.main(archer.Args(env=ID, actor=model, runs=runs, **tiny, **critic, **actor))
    assert 0 <= summary["eval_return"] <= 1 and summary["iteration"] == 2
    groups = {"tasks": 2, "rollouts": 2, "worlds": 4, "min_advantage": 0.0}
    summary = loop_ppo.main(loop_ppo.Args(env=ID, model=model, runs=runs, **tiny, **groups))
    assert 0 <= summary["eval_return"] <= 1 and summary["episodes"] == 8
