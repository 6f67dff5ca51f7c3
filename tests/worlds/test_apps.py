"""The world apps: every task can be solved, its tests see what was done, and hostile calls change nothing."""

import gc
import keyword
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from statistics import fmean

import pytest

import envs
from envs.datasets import dialogue
from envs.worlds import apps
from envs.worlds.apps import (
    CALLS,
    DATA,
    DRAWN,
    SPLITS,
    Apps,
    difference,
    make_task,
    read_prompt,
    read_state,
    run_tests,
    sandbox,
    tasks_of,
)
from envs.worlds.apps.tasks import SCENARIOS

DONE = "apis.supervisor.complete_task()"
TRAINING = ["train", "dev", "test-normal"]  # the splits with the apps of training


def index_of(kind: str, split: str = "train", where=lambda task: True) -> int:
    """The first task of a kind of scenario."""
    indices = [i for i, (scenario, _, _) in enumerate(tasks_of(split)) if scenario.name == kind]
    return next(i for i in indices if where(make_task(split, i)))


def start(kind: str, split: str = "train", **options) -> Apps:
    world = Apps(split, **options)
    world.reset(options={"index": index_of(kind, split)})
    return world


def output_of(world: Apps, code: str) -> str:
    """What a turn shows."""
    before = world.observation
    observation, *_, info = world.step(code)
    return observation.removeprefix(before + info["action"])


def play(world: Apps, index: int, player) -> dict:
    return dialogue(world, player, random.Random(index), index)


@pytest.fixture(scope="module")
def solved() -> dict[str, list[dict]]:
    """The expert's dialogues by split: of every task, and for training of a ninth of the scenarios."""
    played = {}
    for split in SPLITS:
        world = Apps(split)
        indices = [i for i in range(world.num_tasks) if split != "train" or world.scenarios[i] % 9 == 0]
        played[split] = [play(world, index, apps.expert) for index in indices]
        world.close()
    return played


# ------------------------------------------------------------------------------------------ the tasks


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_solves_the_tasks(split, solved):
    failed = [d["answer"] for d in solved[split] if d["return"] != 1.0 or not d["terminated"]]
    assert failed == []


@pytest.mark.slow
def test_the_expert_solves_every_task_of_training():
    world = Apps("train")
    assert [i for i in range(world.num_tasks) if play(world, i, apps.expert)["return"] != 1.0] == []


def test_there_are_enough_scenarios_of_three_variants():
    kinds = {split: {scenario.name for scenario, _, _ in tasks_of(split)} for split in SPLITS}
    assert len(kinds["train"]) >= 40 and kinds["train"] == kinds["dev"] == kinds["test-normal"]
    assert kinds["test-challenge"] & kinds["train"] == set() and len(kinds["test-challenge"]) >= 8
    for split in SPLITS:
        world = Apps(split)
        assert set(Counter(world.scenarios).values()) == {3} and len(world.scenarios) == world.num_tasks
        assert set(world.difficulties) >= {2, 3} and set(world.is_question) == {True, False}
        assert len(world.difficulties) == len(world.is_question) == world.num_tasks
        for index in range(0, world.num_tasks, 41):
            first, second = (make_task(split, i).id.rpartition("_")[0] for i in (index, index // 3 * 3))
            assert first == second, "mail-star.train5_2: scenario and variant"
    assert set(Apps("train").difficulties) == {1, 2, 3}


def test_no_two_tasks_are_the_same():
    tasks = [make_task(split, i) for split in SPLITS for i in range(0, len(tasks_of(split)), 7)]
    assert len({task.start for task in tasks}) == len(tasks)
    ids = Counter(key for task in tasks for key in task.state)
    assert max(ids.values()) < 0.3 * len(tasks), "no id is worth remembering"
    assert all(id in apps.NUMBERS for _, id in ids)


def test_a_task_is_the_same_every_time():
    assert make_task.__wrapped__("train", 17) == make_task("train", 17) != make_task("dev", 17)


def test_questions_have_one_answer():
    for split in ("test-normal", "test-challenge"):
        for index, (scenario, _, _) in enumerate(tasks_of(split)):
            if scenario.answer is None:
                continue
            task = make_task(split, index)
            world = Apps(split)
            world.reset(options={"index": index})
            _, values = read_prompt(task.prompt.split("\n\n")[0])
            answers = {row[0] for row in world.db.execute(scenario.answer, values)}
            assert len(answers) == 1 or "order by" in scenario.answer, f"{task.id}: {answers}"
            assert task.answer in answers and type(task.answer) in (int, str)
            assert not task.changes


def test_the_players_understand_every_prompt():
    for split in ("dev", "test-challenge"):
        for index, (scenario, _, _) in enumerate(tasks_of(split)):
            prompt = make_task(split, index).prompt
            assert read_prompt(prompt.split("\n\n")[0])[0].solve is scenario.solve, prompt


def test_prompts_and_solutions_are_short(solved):
    for split in SPLITS:
        for d in solved[split]:
            assert 40 <= len(re.findall(r"\w+", d["observations"][0])) <= 70
            assert 2 <= len(d["actions"]) <= 6
            assert all(len(action) < 120 for action in d["actions"])
            assert len(d["observations"][-1]) < 1500


def test_the_examples_are_true():
    (index,) = re.findall(r'"index": (\d+)', apps.__doc__)
    (action,) = re.findall(r'world.step\("(.*)"\)', apps.__doc__)
    world = Apps("train")
    shown = world.reset(options={"index": int(index)})[0].splitlines()[:2]
    shown += world.step(action)[0].splitlines()[-2:]
    assert all(f"    {line}\n" in apps.__doc__ for line in shown)
    page = (Path(__file__).parents[2] / "docs/worlds/apps.md").read_text(encoding="utf-8")
    (index,) = re.findall(r"envs\.play apps --index (\d+)", page)
    assert play(world, int(index), apps.expert)["observations"][-1].strip() in page


def test_a_scenario_that_asks_for_nothing_is_refused(monkeypatch):
    bad = SCENARIOS[0]._replace(name="bad", answer=None)
    monkeypatch.setattr(apps, "tasks_of", lambda split: [(bad, 0, 1)])
    with pytest.raises(ValueError, match=r"^bad\.train0_1: in 100 databases there was nothing to do$"):
        make_task.__wrapped__("train", 0)


# ----------------------------------------------------------------------------- what only training lacks


def test_the_challenge_is_new_in_its_calls_and_old_in_its_words(solved):
    def words(split: str) -> set[str]:
        return {word for d in solved[split] for word in re.findall(r"[^\W\d]+", d["observations"][-1])}

    def calls(split: str) -> set[str]:
        return {name for i in range(0, len(tasks_of(split)), 6) for name in make_task(split, i).calls}

    seen = set().union(*map(calls, TRAINING))
    used = {
        call
        for d in solved["test-challenge"]
        for code in d["actions"]
        for call in re.findall(r"apis\.(\w+\.\w+)", code)
    }
    common = {"supervisor.complete_task", "api_docs.show_api_doc", "phone.find", "phone.text"}
    assert used & seen == common and len(used) > 12
    assert not any(name.startswith("shop.") for name in seen)
    contents = {word for words in apps.WORDS.values() for word in words}
    assert words("test-challenge") - words("train") <= contents, "training writes of these nowhere"


@pytest.mark.slow
def test_the_default_demonstrations_have_all_words_of_the_challenge(solved):
    """A vocabulary made from them has a token for each."""
    seen = {
        word
        for d in Apps("train").demonstrations(16_000, 1)
        for word in re.findall(r"\w+", d["observations"][-1])
    }
    new = {word for d in solved["test-challenge"] for word in re.findall(r"[^\W\d]+", d["observations"][-1])}
    assert new - seen == set()


@pytest.mark.parametrize(("family", "takes"), [("device", [1, 2]), ("shop", [1, 1, 1, 2, 2])])
def test_drawn_calls_are_known_from_their_documentation_alone(family, takes):
    docs, used = defaultdict(set), defaultdict(set)
    for index, (scenario, number, _) in enumerate(tasks_of("train")):
        if f"{{{family}}}" in scenario.apps and number < 40:
            made = [call for name, call in make_task("train", index).calls.items() if name not in CALLS]
            assert sorted(len(call.parameters) for call in made) == takes, "a name for each"
            for call in made:
                app, name = call.name.split(".")
                docs[app].add(call.doc)
                used[name].add(call.about)
                for parameter in call.parameters:
                    used[parameter].add("takes")
    assert len(docs) > 50 and statistics.fmean(map(len, docs.values())) > 8, "others in another task"
    assert statistics.fmean(len(uses) for uses in used.values()) > 2.5, "a name does not say what it is for"


def test_what_is_drawn_for_the_challenge_is_drawn_nowhere_else():
    new, old = ({word for words in DRAWN[who].values() for word in words} for who in ("challenge", "known"))
    assert not new & (old | set(DATA["apps"]))
    assert all(word.isidentifier() and not keyword.iskeyword(word) for word in new | old)
    apps_of = [family for group in DRAWN.values() for name, family in group.items() if name != "name"]
    assert len({app for family in apps_of for app in family}) == sum(map(len, apps_of)), "of one family each"


def test_a_shop_is_not_named_by_its_task():
    for index, (scenario, _, _) in enumerate(tasks_of("test-challenge")):
        if "{shop}" in scenario.apps:
            values = read_prompt(make_task("test-challenge", index).prompt)[1]
            sentence = make_task("test-challenge", index).prompt.splitlines()[1]
            assert values["shop"] in DRAWN["challenge"]["shop"] and values["shop"] not in sentence


def test_documentation_names_what_a_call_takes():
    world = start("device-set")
    for name, call in world.task.calls.items():
        assert output_of(world, f"apis.api_docs.show_api_doc(name={name!r})") == f"\n=> {[call.doc]!r}\n"
        assert all(parameter in call.doc for parameter in call.parameters)
        world.turns = 0
    whole = output_of(world, "apis.api_docs.show_api_doc(name='supervisor')")
    assert whole == (
        "\n=> ['ends the task: apis.supervisor.complete_task(answer=None)', "
        "'shows the password of an app: apis.supervisor.show_password(app)']\n"
    )
    assert (
        output_of(world, "apis.api_docs.show_api_doc(name='chess')") == "\n=> ApiError: there is no chess\n"
    )


# -------------------------------------------------------------------------------------------- grading


def test_doing_nothing_earns_nothing():
    for split in ("dev", "test-normal", "test-challenge"):
        world = Apps(split)
        for index in range(0, world.num_tasks, 7):
            world.reset(options={"index": index})
            _, reward, terminated, _, info = world.step(DONE)
            assert terminated and reward == 0.0 and not info["result"]["success"]


def blind_returns(split: str) -> dict[str, list[float]]:
    """What a policy earns that reads nothing and knows all else, by kind of task.

    To a question it gives the answer that is the most frequent one of its kind in this split; else it does to
    all rows of a table what is asked of one. What it would have to say or to add it does not know.
    """
    world, returns, answers = Apps(split), {}, {}
    for index, (scenario, _, _) in enumerate(tasks_of(split)):
        task = make_task(split, index)
        if task.answer is not None:
            answers.setdefault(scenario.name, []).append(str(task.answer))
            continue
        table, id, after = next(iter(task.changes))
        before, done = task.state.get((table, id)), Counter()
        for (other, row_id), row in task.state.items():
            if before and other == table:
                both = zip(row, before, after or row, strict=True)
                new = tuple(now if now != was else value for value, was, now in both) if after else None
                done[(table, row_id, new)] += new != row
        tests = run_tests(task, done, None)
        returns.setdefault(scenario.name, []).append(sum(tests) / len(tests))
    world.close()
    return returns | {
        name: [float(answer == Counter(given).most_common(1)[0][0]) for answer in given]
        for name, given in answers.items()
    }


def test_a_policy_that_reads_nothing_earns_little():
    """With six tasks of a kind the most frequent answer is right more often than with 120, as in training."""
    returns = blind_returns("test-normal")
    assert fmean(chain(*returns.values())) < 0.25
    assert fmean(returns["mail-star"]) < 0.2, "to star all mails"


@pytest.mark.slow
def test_a_policy_that_reads_nothing_earns_little_in_training():
    returns = blind_returns("train")
    blind, most = fmean(chain(*returns.values())), max(map(fmean, returns.values()))
    print(f"a policy that reads nothing: {blind:.3f}, in a kind at most {most:.2f}")
    assert blind < 0.2 and most < 0.6


def test_each_test_of_a_task_can_fail():
    for split in ("dev", "test-challenge"):
        for index in range(len(tasks_of(split))):
            task = make_task(split, index)
            assert all(run_tests(task, task.changes, task.answer))
            for i, change in enumerate(task.changes):
                tests = run_tests(task, task.changes - Counter([change]), task.answer)
                assert [n for n, passed in enumerate(tests) if not passed] == [i]
                twice = run_tests(task, task.changes + Counter([change]), task.answer)
                assert not twice[i] and not twice[-1]
            other = Counter([("note", None, ("garden", "yes", 0))])
            right = [True] * (len(task.changes) + (task.answer is not None))
            assert run_tests(task, task.changes + other, task.answer) == [*right, False]
            assert not all(run_tests(task, task.changes, "nonsense")), (
                "a wrong answer, or one where nothing is asked"
            )
            assert not all(run_tests(task, task.changes, None)) or task.answer is None


def test_what_was_changed_is_what_counts():
    """Not how: other calls, other order, more than one turn."""
    world = start("phone-text-kind")
    asked = [after for (_, _, after) in world.task.changes]
    for phone, words in reversed(asked):
        world.step(f"x = {phone}\napis.phone.text(phone=x, words={words!r})")
    assert world.step(DONE)[1] == 1.0
    world.reset(options={"index": index_of("phone-text-kind")})
    world.step(
        f"for p in {[phone for phone, _ in asked[1:]]}: apis.phone.text(phone=p, words={asked[0][1]!r})"
    )
    *_, info = world.step(DONE)
    assert info["result"]["passed"] == len(asked) - 1, "one was not written to"


def test_half_of_it_and_more_than_it():
    world = start("mail-star")
    ((_, id, _),) = world.task.changes
    other = next(key[1] for key in world.task.state if key[0] == "mail" and key[1] != id)
    for ids, passed, tests in [([id], 1, 1), ([other], 0, 2), ([id, other], 1, 2), ([], 0, 1)]:
        world.reset(options={"index": index_of("mail-star")})
        for one in ids:
            world.step(f"apis.mail.star(id={one})")
        _, reward, _, _, info = world.step(DONE)
        assert info["result"] == {
            "return": passed / tests, "length": len(ids) + 1, "success": passed == tests == 1,
            "passed": passed, "tests": tests,
        }  # fmt: skip
        assert reward == passed / tests


def test_a_change_that_is_taken_back_is_none():
    world = start("phone-number")
    contact = next(key for key in world.task.state if key[0] == "contact")
    phone = world.task.state[contact][1]
    world.step(f"apis.phone.change(id={contact[1]}, phone=1)")
    world.step(f"apis.phone.change(id={contact[1]}, phone={phone})")
    assert world.step(f"apis.supervisor.complete_task(answer={world.task.answer!r})")[1] == 1.0


@pytest.mark.parametrize(
    "answer", ["[]", "{}", "True", "1.5", "float('1e300')", "'x' * 300", "10 ** 4000", "[[1]]", "''"]
)
def test_any_answer_is_an_answer(answer):
    world = start("phone-number")
    _, reward, terminated, _, info = world.step(f"apis.supervisor.complete_task(answer={answer})")
    assert terminated and reward == 0.0 and not info["result"]["success"]


def test_at_the_turn_limit_nothing_has_been_handed_in():
    world = start("mail-star", max_turns=3)
    ((_, id, _),) = world.task.changes
    world.step(f"apis.mail.star(id={id})")
    world.step("1")
    _, reward, terminated, truncated, info = world.step("2")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["result"] == {"return": 0.0, "length": 3, "success": False, "passed": 1, "tests": 1}
    world.reset(options={"index": index_of("mail-star")})
    world.step("1")
    world.step(f"apis.mail.star(id={id})")
    assert world.step(DONE)[1:4] == (1.0, True, False), "the last turn is a turn"


def test_the_reward_may_be_success_alone():
    for player, expected in ((apps.expert, 1.0), (lambda observation, rng: DONE, 0.0)):
        world = Apps("dev", reward="success")
        assert {play(world, index, player)["return"] for index in range(0, world.num_tasks, 10)} == {expected}
        world.close()


def test_nothing_happens_after_the_end():
    world = start("mail-star")
    ((_, id, _),) = world.task.changes
    _, reward, terminated, _, _ = world.step(f"{DONE}\napis.mail.star(id={id})")
    assert terminated and reward == 0.0


# -------------------------------------------------------------------------------------------- the calls


def test_a_login_is_for_one_app_and_one_episode():
    world = start("pay-balance")
    assert output_of(world, "apis.pay.balance()") == "\n=> ApiError: log in to pay first\n"
    assert output_of(world, "apis.pay.login(password=1)") == "\n=> ApiError: wrong password\n"
    password = re.search(r"\d+", output_of(world, "apis.supervisor.show_password(app='pay')"))[0]
    assert output_of(world, f"apis.pay.login(password={password})") == "\n=> 'ok'\n"
    assert output_of(world, "apis.pay.balance()") == f"\n=> [{{'balance': {world.task.answer}}}]\n"
    world.reset(options={"index": index_of("pay-balance")})
    assert output_of(world, "apis.pay.balance()") == "\n=> ApiError: log in to pay first\n"


def test_lists_come_in_pages():
    world = start("phone-count")
    code = (
        "[len(apis.phone.list(page=p)) for p in range(4)], len(apis.phone.list()), "
        "apis.phone.list(page=-5)[0]['name']"
    )
    assert output_of(world, code).startswith("\n=> ([4, 3, 0, 0], 4, '")


HOSTILE = [
    "apis.mail.star()", "apis.mail.star(id='1')", "apis.mail.star(id=True)", "apis.mail.star(id=1.0)",
    "apis.mail.star(id=None)", "apis.mail.star(id=[1])", "apis.mail.star(id=2 ** 70)",
    "apis.mail.star(id=-1)",
    "apis.mail.star(id=1, other=2)", "apis.mail.star(1)", "apis.mail.nothing()", "apis.nothing.star(id=1)",
    "apis.mail()", "apis()", "apis.mail.star.more(id=1)", "getattr(apis, 'mail.star; drop table mail')(id=1)",
    "apis.mail.find(sender='\"; drop table mail; --')", "apis.mail.find(sender=\"' or 1=1 --\")",
    "apis.mail.find(sender='x' * 301)", "apis.mail.find(sender='\\ud800')", "apis.mail.find(sender='\\x00')",
    "apis.mail.list(page=2 ** 62)", "apis.mail.list(page=-(2 ** 63))", "apis.phone.change(id=1, phone=2)",
    "apis.mail.send(to=1, subject='x')", "apis.api_docs.show_api_doc(name=['mail'])",
    "apis.api_docs.show_api_doc()", "apis.api_docs.show_api_doc(name='')",
    "apis.supervisor.show_password(app='mail')",
    "apis.supervisor.complete_task(result=1)", "apis.supervisor.complete_task(1)", "apis.pay.balance()",
    "apis.mail.star(**{'id': 1, '': 2})", "apis.mail.star(**{'x' * 9999: 1})", "getattr(apis, 'x' * 9999)()",
]  # fmt: skip


@pytest.mark.parametrize("code", HOSTILE)
def test_a_hostile_call_changes_nothing(code):
    world = Apps(max_turns=50)
    world.reset(options={"index": index_of("mail-send", where=lambda task: "pay.balance" not in task.calls)})
    output = output_of(world, code)
    assert re.match(r"\n=> (ApiError: |TypeError: |\[\]|\[\{'\w+': )", output) and len(output) < 500
    assert not difference(world.task.state, read_state(world.db))
    assert output_of(world, "3 + 4") == "\n=> 7\n"


def test_a_call_happens_whole_or_not_at_all():
    world = start("pay-send")
    world.step(apps.next_step(world.observation))
    world.step(apps.next_step(world.observation))
    contact = next(id for table, id in world.task.state if table == "contact")
    for code in (
        "apis.pay.send(to=1, amount=5)", f"apis.pay.send(to={contact}, amount=5000)",
        f"apis.pay.send(to={contact}, amount=-5)", "apis.pay.accept(id=1)",
    ):  # fmt: skip
        assert output_of(world, code).startswith("\n=> ApiError: pay.")
        assert not difference(world.task.state, read_state(world.db))
    assert output_of(world, f"apis.pay.send(to={contact}, amount=5)") == "\n=> 'ok'\n"
    assert len(difference(world.task.state, read_state(world.db))) == 2


def test_every_call_can_be_made():
    """Each does something with some of the ids and texts of the database; a login has a test of its own."""
    offered, made, rng = set(), set(), random.Random(0)
    for split in SPLITS:
        world = Apps(split)
        for index in range(0, world.num_tasks, 21 if split == "train" else 3):
            world.reset(options={"index": index})
            world.logged_in = set(DATA["login"])
            state = world.task.state
            some = {int: [1, *(number for _, number in state)], str: [*DATA["login"]]}
            some[str] += [value for row in state.values() for value in row if isinstance(value, str)]
            for name, call in world.task.calls.items():
                if not call.sql or call.about in made or name.endswith(".login"):
                    continue
                offered.add(call.about)  # which names the device or shop, too
                for _ in range(300):
                    kinds = {parameter: kind for parameter, (kind, _) in call.parameters.items()}
                    values = {parameter: rng.choice(some[kind]) for parameter, kind in kinds.items()}
                    try:
                        world.call(name, values)
                    except sandbox.Refused as refused:
                        assert "not found" in str(refused) or "constraint" in str(refused)
                    else:
                        made.add(call.about)
                        break
        world.close()
    fixed = {call.about for name, call in CALLS.items() if call.sql and not name.endswith(".login")}
    assert fixed < offered == made


# ------------------------------------------------------------------------------------- code and episodes


def test_code_has_several_lines_and_variables_stay():
    world = start("phone-number")
    observation, _, _, _, info = world.step("  x = 3\nfor i in range(2):\n    print(i)\nx  ")
    assert info["action"] == "x = 3\nfor i in range(2):\n    print(i)\nx"
    assert observation == world.task.prompt + info["action"] + "\n=> 0\n1\n3\n"
    assert output_of(world, "x + 1") == "\n=> 4\n"
    assert output_of(world, "y = 1") == "\n=>\n"
    world.reset(options={"index": 0})
    assert output_of(world, "x") == "\n=> NameError: name 'x' is not defined\n"


def test_broken_code_costs_a_turn_and_no_more(monkeypatch):
    monkeypatch.setattr(sandbox, "PATIENCE", 5.0)
    world = start("phone-number", max_turns=20)
    world.sandbox.seconds = 0.1
    for code in (
        "while True: pass",
        "'x' * 10 ** 11",
        "def f(): f()\nf()",
        "import os",
        "exit()",
        "(",
        "\x00",
    ):
        output = output_of(world, code)
        assert "Error" in output or "Stopped" in output
        assert output_of(world, "3 + 4") == "\n=> 7\n"
    assert not difference(world.task.state, read_state(world.db))


def test_the_expected_answer_is_nowhere_in_the_process():
    world = start("phone-number", max_turns=20)
    world.task = world.task._replace(answer="unmistakable")
    for code in (
        "vars()",
        "vars(apis)",
        "apis._ask.__globals__",
        "[c.cell_contents for c in apis._ask.__closure__]",
    ):
        assert output_of(world, f"'unmistak' + 'able' in str({code})") == "\n=> False\n"
    output_of(world, "planted = 'unmistak' + 'able'")
    assert output_of(world, "'unmistak' + 'able' in str(vars())") == "\n=> True\n"


def test_a_world_that_has_no_process_is_broken(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "executable", "/bin/true")
    world = start("phone-number", max_output=777)
    with pytest.raises(envs.WorldBroken, match=r"^apps: .* does not start"):
        world.step("1 + 1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "split: 'test' is none of train, dev, test-normal, test-challenge"),
        ({"reward": "fracture"}, "reward: 'fracture' is neither fraction nor success"),
        ({"sandbox": "box"}, "sandbox: 'box' is neither process nor monty"),
    ],
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        envs.make("apps", **options)


def test_outputs_are_read_in_threads():
    """Without a lock CPython 3.11 raises SystemError when a collection of garbage lets another thread in."""
    text, errors = repr([{"id": i, "kind": {"of": [i, {"a": (i, [i, [i]])}]}} for i in range(60)]), []

    def work() -> None:
        try:
            for _ in range(60):
                apps.read_output(text)
                [[] for _ in range(2000)]  # makes the collector run now and then
        except SystemError as error:
            errors.append(error)

    gc.callbacks.append(yields := lambda *_: time.sleep(0))
    try:
        threads = [threading.Thread(target=work) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(yields)
    assert errors == []


def test_worlds_in_threads_do_not_meet():
    results = {}

    def work(number: int) -> None:
        world = Apps("dev")
        results[number] = [
            play(world, index, apps.expert)["return"] for index in range(number, world.num_tasks, 12)
        ]
        world.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(map(len, results.values())) == Apps("dev").num_tasks
    assert all(reward == 1.0 for rewards in results.values() for reward in rewards)


@pytest.mark.external
def test_the_stricter_sandbox_solves_the_same_tasks():
    pytest.importorskip("pydantic_monty")
    for split in ("dev", "test-challenge"):
        world = envs.make("apps", split=split, sandbox="monty")
        failed = [i for i in range(world.num_tasks) if play(world, i, apps.expert)["return"] != 1.0]
        assert failed == []
    world.reset(options={"index": index_of("shop-text-new", "test-challenge")})
    for code, output in [
        ("x = 3", ""), ("x + 1", " 4"), ("print(x)", " 3"), ("import socket", "Error"),
        ("open('/etc')", "Error"),
        ("while True: pass", "TimeoutError"), ("'x' * 10 ** 10", "MemoryError"), ("(", "SyntaxError"),
        ("apis.phone.find(item='tea')", "has no parameter item"), ("apis.phone.nothing()", "AttributeError"),
        ("apis.phone.find('tea')", "keyword arguments only"),
        ("apis.phone.find(name={1})", "must be str"),
        ("x", " 3"), ("x = [0]\nfor i in range(40):\n    x = [x, x]\nx", " [[["),
        ("class A:\n    y = 1\nA()", " <A>"),
        ("import time\nfor i in range(3):\n    time.sleep(9)\n5", " 5"), ("'x' * 60_000_000", "Stopped"),
        ("1 + 1", " 2"), ("10 ** 5000", "ValueError"),
    ]:  # fmt: skip
        assert output in output_of(world, code) and not difference(world.task.state, read_state(world.db))
        world.turns = 0
    shown = output_of(
        world,
        "try:\n    apis.supervisor.complete_task(answer=10**5000)\nexcept Exception:\n    "
        "apis.phone.delete(id=1)",
    )
    assert "Task completed" in shown
    world.close()


def test_the_stricter_sandbox_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    monkeypatch.delitem(sys.modules, "envs.worlds.apps.sandbox_monty", raising=False)
    with pytest.raises(
        envs.Unavailable, match=r"^apps needs the package pydantic_monty: pip install pydantic_monty$"
    ):
        envs.make("apps", sandbox="monty")


# ------------------------------------------------------------------------------------------ the players


def test_demonstrations_are_of_training_and_mostly_flawed():
    made = Apps("test-normal").demonstrations(600, seed=0)
    assert {d["answer"].split(".")[1][:5] for d in made} == {"train"}
    assert 0.2 < sum(d["return"] == 1 for d in made) / len(made) < 0.5
    text = "\n".join(d["observations"][-1] for d in made)
    assert "not found" in text, "guesses an id"
    assert "has no parameter" in text or "there is no" in text, "reads no documentation"
    assert "log in" in text, "does not log in"
    assert Counter(len(d["actions"]) for d in made)[1] > 30, "completes at once"
    assert all(d["terminated"] for d in made) or sum(d["truncated"] for d in made) < 20


def test_knobs_make_the_scripted_player_the_expert():
    made = Apps().demonstrations(60, seed=1, hasty=0.0, guessing=0.0, careless=0.0, garbled=0)
    assert {d["return"] for d in made} == {1.0}
    idle = Apps().demonstrations(60, seed=1, careful=0, hasty=1.0, garbled=0)
    assert {len(d["actions"]) for d in idle} == {1} and sum(d["return"] == 1 for d in idle) < 3, (
        "a lucky guess"
    )


def test_players_go_on_from_anywhere():
    world, rng = Apps("dev", max_turns=8), random.Random(0)
    for index in range(0, world.num_tasks, 5):
        observation, _ = world.reset(options={"index": index})
        over = False
        while not over:
            player = rng.choice([apps.random_player, apps.scripted, apps.expert])
            observation, _, terminated, truncated, _ = world.step(player(observation, rng))
            over = terminated or truncated
    world.close()


# --------------------------------------------------------------------------------- random programs

LINES = [
    "x = 1", "print(x)", "for x in range(9): print(x)", "if x:",
    "    x = 2", "try:", "except: pass",
    "x = apis.mail.list()", "x = apis.mail.list(page=1)[0]", "apis.mail.star(id=x['id'])",
    "apis.phone.list(page=x)",
    "apis.notes.add(title='a', words='b')", "for m in apis.mail.list(): apis.mail.read(id=m['id'])", "exit()",
    "import json",
    "apis.phone.text(phone=x, words='b')", "x = [x]", "f()", "def f(): apis.mail.delete(id=x['id'])", "(",
    "[c.cell_contents for c in apis._ask.__closure__ if getattr(c.cell_contents, '__name__', '') == "
    "'send'][0]("
    "{'call': 'notes.add', 'kwargs': {'title': 'forged', 'words': 'line'}})",
    "del x", "lambda: x",
    "apis.mail.delete(id=apis.mail.list()[0]['id'])", "apis.calendar.add(title='a', day=1, hour=x)",
    "apis.pay.balance()",
]  # fmt: skip


def resident() -> float:
    """MB that this process holds now; its peak would hide what leaks below an earlier one."""
    gc.collect()
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


def run_random_programs(n: int, monkeypatch) -> None:
    """The database is what the calls that were answered have made of it, whatever else the code has done."""
    monkeypatch.setattr(sandbox, "PATIENCE", 3.0)
    world, rng = Apps(max_turns=20), random.Random(0)
    world.sandbox.seconds = 0.05
    answered, call = [], world.call

    def record(name: str, kwargs: dict) -> object:
        result = call(name, kwargs)
        answered.append((name, kwargs))
        return result

    world.call, over, changed, memory = record, True, 0, None
    for i in range(n):
        if i == n // 10:  # by now all that is kept on purpose is there
            memory = resident()
        if over:
            world.reset(options={"index": rng.randrange(world.num_tasks)})
            answered.clear()
        program = "\n".join(rng.choice(LINES) for _ in range(rng.randrange(1, 5)))
        program += "\nwhile True: pass" * (rng.random() < 0.02)
        *_, terminated, truncated, _ = world.step(program)
        over = terminated or truncated
        if rng.random() < 0.1 and not over:
            after, log = read_state(world.db), list(answered)
            world.db.deserialize(world.task.start)
            for name, kwargs in log:
                call(name, kwargs)
            assert read_state(world.db) == after
            changed += after != world.task.state
    assert changed > n / 500 and resident() < memory + 50
    world.close()


def test_random_programs(monkeypatch):
    run_random_programs(300, monkeypatch)


@pytest.mark.slow
def test_ten_thousand_random_programs(monkeypatch):
    run_random_programs(10_000, monkeypatch)


def test_the_benchmark_runs():
    command = [sys.executable, "benchmarks/apps.py", "--turns", "30", "--worlds", "2"]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120, check=False)
    assert result.returncode == 0 and "memory of 2 processes" in result.stdout, result.stderr
