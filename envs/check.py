"""Does a world keep the rules of docs/your_world.md?

python -m envs.check my_module:MyWorld

Each rule is a function below, and its docstring the sentence of the page. Whatever a rule raises says that
the world breaks it; what it returns, why there was nothing to look at. tests/worlds/test_envs.py asks the
same of every world of this repository.
"""

import argparse
import random
import sys
import traceback
import warnings
from collections import Counter
from functools import partial
from itertools import zip_longest
from numbers import Real

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env

import envs
from envs.adapt import STEP, Adapted, apart
from envs.datasets import dialogue
from envs.fuzz import HOSTILE, WORDS

WITHOUT = {  # what a world may have, and what happens without it
    "append_only": "what step returns is put behind all that was said",
    "num_tasks": "the tasks are the seeds 0 to 99",
    "max_turns": "an episode is cut after 100 turns, or gymnasium's max_episode_steps",
    "max_action_chars": "an action is cut after 1,000 characters, or its space's max_length",
    "multiline": "an action is cut at its first newline",
    "split": "loop_ppo.py evaluates on the training tasks",
    "difficulties": "loop_ppo.py trains on all tasks, whatever --max-difficulty says",
    "players": "archer_offline_iql.py needs --dataset; sft.py, too, without demonstrations",
    "demonstrations": "sft.py learns from the first of the players",
    "demonstration_env": "a start model is looked for in checkpoints/ under the name of the world",
    "rules": "python -m envs.play does not explain the world",
    "expert_return": "nobody knows how well an expert plays",
    "best_return": "nobody knows what could be reached at best",
}


def some_actions(world: Adapted, seed: int) -> list[str]:
    """What a model might say: hostile texts, words, numbers and, at the start, what the players would."""
    rng, actions = random.Random(seed), list(WORDS)
    observation, _ = world.reset(seed=seed)
    actions += [player(observation, rng) for player in world.players.values() for _ in range(5)]
    actions += HOSTILE
    rng.shuffle(actions)
    return actions


def play(world: Adapted, actions: list[str], seed: int, turns: int = 30) -> list[tuple]:
    """All that the world says in one episode, but for the infos."""
    said = [world.reset(seed=seed)[0]]
    for action in actions[:turns]:
        said.append(world.step(action)[:4])
        if world.over:
            break
    return said


# What a world must have. Each rule gets a function that makes the world.


def resets(make):
    """`reset(seed, options)` returns text and a dict."""
    make().reset(seed=0)  # Adapted looks at what comes


def steps(make):
    """`step(action)` takes text and returns text, reward, terminated, truncated and a dict."""
    world = make()
    for word in WORDS:  # whatever raises here is the world's own doing, and no other rule's to tell
        world.reset(seed=0)
        try:
            result = world.world.step(word)
        except Exception as error:
            raise AssertionError(f"{word!r} raised {type(error).__name__}: {error}") from error
        world.checked("step", STEP, result)


def takes_any_text(make):
    """Any text is an action, also an empty, long or foreign one: it may cost a turn, but raises nothing."""
    world = make()
    for action in some_actions(world, seed=0):
        if world.over:
            world.reset(seed=1)
        try:
            world.step(action)
        except Exception as error:
            raise AssertionError(f"{action[:30]!r} raised {type(error).__name__}: {error}") from error


def repeats_itself(make):
    """The same seed and the same actions make the same episode, whatever was played before."""
    world = make()
    actions = some_actions(world, seed=0)
    first = play(world, actions, seed=3)
    play(world, actions[::-1], seed=4)
    assert play(world, actions, seed=3) == first, "it was another one after an episode with another seed"
    assert play(make(), actions, seed=3) == first, "it was another one in another instance"


def plays_side_by_side(make):
    """Two worlds side by side do not disturb each other."""
    one, other = make(), make()
    actions = some_actions(one, seed=0)
    alone = play(one, actions, seed=5)
    said = [one.reset(seed=5)[0]]
    for action in actions[: len(alone) - 1]:
        if other.over:
            other.reset(seed=6)
        other.step(actions[-1])
        said.append(one.step(action)[:4])
    assert said == alone, "what one was told changed what the other said"


def leaves_generators_alone(make):
    """The world leaves the global generators of `random` and `numpy` alone."""
    random.seed(0)
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    world = make()
    play(world, some_actions(world, seed=0), seed=0)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before, (
        "they were used: take random.Random(seed) or numpy.random.default_rng(seed)"
    )


def satisfies_gymnasium(make):
    """As `envs.make` makes it, it passes gymnasium's own checker, `check_env`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(), skip_render_check=True)  # which wants a registered world


# What it may have. A world that does not have it keeps the rule.


def says_what_it_says(make):
    """`info["answer"]` is text, `info["action"]` too, and `info["result"]["success"]` a bool."""
    world = make()
    actions = some_actions(world, seed=0)
    for seed in range(3):
        _, info = world.reset(seed=seed)
        assert isinstance(info["answer"], str) and info["answer"], f"the answer is {info['answer']!r}"
        while not world.over:
            info = world.step(actions[(world.turns + seed) % len(actions)])[-1]
            assert isinstance(info["action"], str), f"the action is {info['action']!r}"
        success = info["result"]["success"]
        assert isinstance(success, bool), f"the success is {success!r}, of {type(success).__name__}"


def appends(make):
    """`append_only` is true if and only if each observation begins with the last one and the action."""
    world = make()
    for action in WORDS:
        before, _ = world.reset(seed=0)
        after, _, _, _, info = world.step(action)  # Adapted raises if append_only is true in vain
        reply = after.removeprefix(before + info["action"]).strip()
        own = reply.removeprefix(before.strip()).strip()
        is_whole = own != reply and own.startswith(info["action"])
        assert not (world.keeps_dialogue and is_whole), "observations are whole dialogues: append_only = True"
        if not world.over:
            world.step(action)  # it looks again: what a reply ends with shows only now


def keeps_tasks(make):
    """A task is fixed by its index, not by the seed; `info["answer"]` shows it."""
    world = make()
    if world.reset(seed=0)[1]["answer"] == "unknown":
        return 'no info["answer"]'
    for index in {0, world.num_tasks // 2, world.num_tasks - 1}:
        answers = {world.reset(seed=seed, options={"index": index})[1]["answer"] for seed in (0, 1, 2)}
        assert len(answers) == 1, f"task {index} is {' and '.join(sorted(answers))}"


def has_players(make):
    """`players` is a dict of functions `player(observation, rng)` of a `random.Random` that return text."""
    world = make()
    if not world.players:  # Adapted looks at what they are
        return "no players"
    for name, player in world.players.items():
        said = [None]

        def speak(observation, rng, player=player, said=said):
            said.append(None)
            said[-1] = player(observation, rng)
            return said[-1]

        try:
            played = dialogue(world, speak, random.Random(0), seed=0)
        except Exception as error:
            if said[-1] is None:  # the player's own
                raise
            problem = f"step raised {type(error).__name__}: {error}"
            raise AssertionError(f"to {name}'s action {said[-1]!r:.80} {problem}") from error
        assert all(isinstance(action, str) for action in played["actions"]), f"{name} returned no text"


def demonstrates(make):
    """In `demonstrations(n, seed)` each reply is what the world answers; a seed makes the same dialogues."""
    world = make()
    if not world.players and not world.own("demonstrations"):
        return "no demonstrations, and no players"
    made = world.demonstrations(2, seed=1)
    assert isinstance(made, list), f"they are {made!r:.80}, and no list"
    assert len(made) == 2, f"of 2 that were asked for came {len(made)}"
    assert made == make().demonstrations(2, seed=1), "the same seed made others"
    for shown in made:
        has_the_parts(shown)
    if world.own("demonstrations"):  # what its players said was played just now
        is_own = world.demonstration_env == world.id
        source = make() if is_own else maker(world.demonstration_env)()
        for shown in made:
            is_played(source, shown)


def has_the_parts(shown: dict) -> None:
    """Raises AssertionError for what is no dialogue at all."""
    keys = ["observations", "actions", "rewards", "terminated", "success", "answer"]
    absent = [key for key in keys if key not in shown]
    assert not absent, f"a dialogue has no {', '.join(absent)}"
    n = len(shown["actions"])
    assert len(shown["observations"]) == n + 1, f"{n} actions, but not one observation more"
    assert len(shown["rewards"]) == n, f"{n} actions, but another number of rewards"
    texts = [shown["answer"], *shown["observations"], *shown["actions"]]
    assert all(isinstance(text, str) for text in texts), "not all of a dialogue is text"


def is_played(world: Adapted, shown: dict) -> None:
    """Raises AssertionError for a dialogue that is not what the world says to its actions, on any task."""
    turns = zip(shown["observations"], shown["actions"], shown["observations"][1:], strict=False)
    for before, action, after in turns if world.append_only else ():
        whole = before + action
        assert after.startswith(whole), f"no observation is the whole dialogue: {apart(after, whole)}"
    tasks, begin = range(min(world.num_tasks, SEARCHED)), {}
    for index in tasks:
        observation, info = world.reset(seed=0, options={"index": index})
        begin.setdefault((observation, info["answer"]), []).append(index)
    same = begin.get((shown["observations"][0], shown["answer"]), [])
    said = [replay(world, shown["actions"], index, seed=0) for index in same]
    if any(played.items() <= shown.items() for played in said):
        return
    if said != [replay(world, shown["actions"], i, seed=1) for i in same]:
        return  # where the seed, too, decides what is said, nothing can be compared
    if same:
        for found, wanted in zip_longest(shown["observations"], said[0]["observations"]):
            way = apart(found or "", wanted or "")
            assert found == wanted, f"task {same[0]} begins likewise, but then {way}"
        for part, wanted in said[0].items():
            assert shown[part] == wanted, f"task {same[0]} has {part} = {wanted}, not {shown[part]}"
    is_all = tasks.stop == world.num_tasks if world.has_tasks else 2 * len(begin) <= tasks.stop
    observation, answer = next(iter(begin))
    assert not is_all, (
        f"no task begins with {shown['observations'][0][:60]!r} and has the answer {shown['answer']!r};"
        f" task 0 begins with {observation[:60]!r} and has {answer!r}"
    )


def replay(world: Adapted, actions: list[str], index: int, seed: int) -> dict:
    """What a world says of a task in which these actions are taken, as a dialogue has it."""
    observation, info = world.reset(seed=seed, options={"index": index})
    made = {"observations": [observation], "rewards": [], "terminated": False}
    for action in actions:
        if not world.over:
            observation, reward, made["terminated"], _, info = world.step(action)
            made["observations"].append(observation)
            made["rewards"].append(reward)
    return made | {"success": info.get("result", {"success": False})["success"]}


def knows_its_returns(make):
    """`best_return` and `expert_return` are numbers."""
    world = make()
    if world.best_return is None and world.expert_return is None:
        return "neither of the two"
    for known in (world.best_return, world.expert_return):
        assert known is None or isinstance(known, Real), f"one is {known!r}"


RULES = [resets, steps, takes_any_text, repeats_itself, plays_side_by_side, leaves_generators_alone]
RULES += [satisfies_gymnasium, says_what_it_says, appends, keeps_tasks, has_players, demonstrates]
RULES += [knows_its_returns]
FIRST = [resets, steps, appends, has_players, takes_any_text]  # who breaks one breaks others that use it
SEARCHED = 200  # tasks, at most, among which that of a demonstration is searched for


def maker(id: str, **options):
    """A function that makes the world as the scripts see it; one of this repository is adapted, too."""

    def make() -> Adapted:
        world = envs.make(id, **options)
        return world if isinstance(world, Adapted) else Adapted(partial(envs.make, id, **options), id)

    return make


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envs.check", description="Does a world keep the rules of docs/your_world.md?"
    )
    parser.add_argument(
        "id", help="package.module:Class, an id of gymnasium, or one that python -m envs lists"
    )
    parser.add_argument("--world", default="", metavar="NAME=VALUE,NAME=VALUE", help="options of the world")
    parser.add_argument("--traceback", action="store_true", help="show where a broken rule was broken")
    args = parser.parse_args()
    try:
        make = maker(args.id, **envs.options(args.world))
        world = make()
    except (ValueError, TypeError, envs.Unavailable, envs.WorldBroken) as error:
        print(f"envs.check: {error}".splitlines()[0], file=sys.stderr)
        return 2
    told, stopped = Counter(), ""
    for rule in [*FIRST, *(rule for rule in RULES if rule not in FIRST)]:
        try:
            why_not = stopped or rule(make)
            told["-" if why_not else "ok"] += 1
            print(f"-       {rule.__doc__}\n        {why_not}" if why_not else f"ok      {rule.__doc__}")
        except Exception as error:  # a world can raise anything
            told["BROKEN"] += 1
            kind = "" if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: "
            print(f"BROKEN  {rule.__doc__}\n        {kind}{(str(error).splitlines() or [''])[0]}")
            if args.traceback:
                traceback.print_exc(file=sys.stdout)
            stopped = "not tested: mend the broken rule first" if rule in FIRST else ""
    for name, consequence in WITHOUT.items():
        if world.own(name) is None:
            print(f"absent  {name}: {consequence}")
    if isinstance(world.world, gymnasium.Env):
        try:
            check_env(world.world.unwrapped, skip_render_check=True)
        except Exception as error:  # the scripts do not need it, gymnasium's other users do
            print(f"note    gymnasium's checker of the bare world: {(str(error).splitlines() or [''])[0]}")
    print(f"{len(RULES)} rules: {told['ok']} hold, {told['BROKEN']} broken, {told['-']} not tested")
    return int(told["BROKEN"] > 0)


if __name__ == "__main__":
    sys.exit(main())
