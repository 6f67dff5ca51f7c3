"""Dialogues made and read by envs/datasets.py: every format, and what is left out."""

import json
import random
from pathlib import Path

import pytest

import envs
from envs.datasets import dialogue, make_dialogues, read_dialogues

# published with the authors' code
REAL = Path(__file__).parents[3] / "shared/data/guess_my_city.json"
CITY = {"conversation": ["Is it in Asia? No.", "Is it Lima? Yes."], "done": True, "word": "lima,peru"}


@pytest.fixture
def world():
    return envs.make("twenty-questions-subset")


def read(tmp_path, *records, **options):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(records))
    return read_dialogues(str(path), **options)


# ---------------------------------------------------------------------------------------------- making


def test_dialogues_are_made_as_the_world_plays_them(world):
    """Each can be played again, action by action, with the same replies, rewards and end."""
    for made in make_dialogues(world, 20, 0, "random=0.5,scripted=0.5"):
        observation, _ = world.reset(options={"index": world.words.index(made["answer"])})
        assert observation == made["observations"][0]
        for k, action in enumerate(made["actions"]):
            observation, reward, terminated, truncated, info = world.step(action)
            assert (observation, reward, info["action"]) == (
                made["observations"][k + 1],
                made["rewards"][k],
                action,
            )
        assert (terminated, truncated) == (made["terminated"], made["truncated"])


def test_a_seed_makes_the_same_dialogues(world):
    one, same, other = (make_dialogues(world, 10, seed, "random=0.5/scripted=0.5") for seed in (0, 0, 1))
    assert one == same != other


def test_more_skill_is_a_higher_return(world):
    """Shares of turns, and of dialogues: the mean return lies between those of the players,
    in their order."""
    mixes = ["random", "random=0.75,scripted=0.25", "random=0.25,scripted=0.75", "scripted", "expert"]
    means = [sum(d["return"] for d in make_dialogues(world, 300, 0, mix)) / 300 for mix in mixes]
    assert means == sorted(means) and means[1] - means[0] > 1.5
    by_dialogue = [d["return"] for d in make_dialogues(world, 300, 0, "random=0.5/expert=0.5")]
    expected = (means[0] + means[-1]) / 2
    assert sum(by_dialogue) / 300 == pytest.approx(expected, abs=1.5)
    assert sum(r >= -4 for r in by_dialogue) > 140, (
        "half of the dialogues are an expert's from beginning to end"
    )


def test_players_leave_the_global_generator_alone(world):
    random.seed(5)
    before = random.getstate()
    make_dialogues(world, 3, 0, "random")
    dialogue(world, world.players["scripted"], random.Random(0))
    assert random.getstate() == before


# --------------------------------------------------------------------------------------------- reading


def test_what_a_run_has_saved_is_read_as_it_was(world, tmp_path):
    """A line a dialogue, with more keys than are needed."""
    made = make_dialogues(world, 5, 0, "random")
    path = tmp_path / "dataset.jsonl"
    path.write_text("".join(json.dumps(d | {"action_ids": [[1, 2]]}) + "\n" for d in made))
    keys = ("observations", "actions", "rewards", "terminated", "success", "answer")
    assert read_dialogues(str(path)) == ([{key: d[key] for key in keys} for d in made], [])


def loop_record(*turns, begun="> ", **more) -> dict:
    """A rollout as loop_ppo.py writes it, of turns (action, reply, reward)."""
    text = begun + "".join(action + reply for action, reply, _ in turns)
    named = [dict(zip(("action", "reply", "reward"), turn, strict=True)) for turn in turns]
    return {"iteration": 3, "answer": "b", "fate": "ended", "text": text, "turns": named} | more


def test_rollouts_of_loop(tmp_path):
    """Those that were dropped, or whose world broke, have no end to learn from."""
    turns = ("a", " no\n", -1.0), ("b", " yes\n", 0.0)
    records = [loop_record(*turns, success=True), loop_record(*turns, fate="dropped")]
    (read_one,), notes = read(tmp_path, *records)
    assert read_one["observations"] == ["> ", "> a no\n", "> a no\nb yes\n"]
    assert (read_one["actions"], read_one["rewards"]) == (["a", "b"], [-1.0, 0.0])
    assert read_one["success"] and read_one["terminated"] and read_one["answer"] == "b"
    assert len(notes) == 1 and "1 of 2 dialogues left out: a rollout that was dropped" in notes[0]
    with pytest.raises(ValueError, match='record 0, field "text": must end in the actions and replies'):
        read(tmp_path, loop_record(*turns, text="> a no\n"))


@pytest.mark.parametrize("record", [{"state": "a", "utterance": "b"}, {"messages": []}, {}])
def test_of_what_has_another_form_the_forms_are_named(tmp_path, record):
    """In one line, and not the fields of a form that was never meant."""
    with pytest.raises(ValueError) as error:
        read(tmp_path, record)
    said = str(error.value)
    assert "record 0, " in said and len(said.splitlines()) == 1
    for name in ("observations", "turns", "lines", "conversation", *record):
        assert repr(name) in said or f'"{name}"' in said


def test_guess_my_city(tmp_path):
    """A chat model's preface is no part of its question; newlines in an answer become blanks."""
    said = [
        "Based on the information provided, my next question would be:\n\nIs it in Asia? No,\nit is not.",
        'Given this, I would like to ask: "Is it big? Yes.',
        "3. Is it known for one thing: the river? Yes.",
        '"Is it old?  Yes.',
    ]
    (one,), notes = read(tmp_path, {"conversation": said, "done": False, "word": "lima,peru"})
    assert one["actions"] == [
        "Is it in Asia?",
        "Is it big?",
        "Is it known for one thing: the river?",
        "Is it old?",
    ]
    assert one["observations"][1] == "Questions:\nIs it in Asia? No, it is not.\n"
    assert (one["rewards"], one["terminated"], one["answer"]) == ([-1.0] * 4, False, "lima,peru")
    assert len(notes) == 1 and "3 questions freed" in notes[0], (
        "a stray quote is not what is said before a question"
    )
    (won,), _ = read(tmp_path, CITY)
    assert (won["rewards"], won["terminated"]) == ([-1.0, 0.0], True)


def test_an_empty_utterance_and_whole_rewards_are_read(tmp_path):
    """What an agent may say, and how other programs write -1.0."""
    record = loop_record(("", " no\n", -1), success=False)
    whole = {
        "observations": ["> ", ">  no\n"],
        "actions": [""],
        "rewards": [-1],
        "terminated": True,
        "success": False,
        "answer": "b",
    }
    (one, two), _ = read(tmp_path, record, whole)
    assert one == two == whole | {"rewards": [-1.0]}
    assert isinstance(two["rewards"][0], float)


def test_success_is_what_the_file_says(tmp_path):
    """Its own field; where a run's file has none, the end counts for one."""
    lines = {"lines": ["Is it a ball? Yes."], "correct": True, "word": ["ball"]}
    whole = {"observations": ["> ", "> a no\n"], "actions": ["a"], "rewards": [0.0], "answer": "b"}
    records = [lines, lines | {"correct": False}, CITY, CITY | {"done": False}]
    records += [whole | {"terminated": end} for end in (True, False)]
    records.append(whole | {"terminated": True, "success": False})
    records += [loop_record(("a", " no\n", 0.0), success=success) for success in (True, False)]
    dialogues, _ = read(tmp_path, *records)
    assert [d["success"] for d in dialogues] == [True, False] * 2 + [True, False, False] + [True, False]
    with pytest.raises(ValueError, match='record 0, field "success": must be a bool'):
        read(tmp_path, whole | {"terminated": True, "success": 1})


def test_what_is_not_to_be_imitated_is_kept(tmp_path):
    """It is a mark of each action, and no record needs it."""
    record = {"observations": ["> ", "> a no\n", "> a no\nb no\n"], "actions": ["a", "b"]}
    record |= {"rewards": [-1.0, -1.0], "terminated": False, "answer": "c"}
    marked, without = read(tmp_path, record | {"imitate": [True, False]}, record)[0]
    assert marked["imitate"] == [True, False] and "imitate" not in without
    for wrong in ([True], [1, 0], "no"):
        with pytest.raises(ValueError, match='record 0, field "imitate": must be 2 bools'):
            read(tmp_path, record | {"imitate": wrong})


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(CITY) + "\n\n" + json.dumps(CITY) + '\n{"conversation"')
    with pytest.raises(ValueError, match=r"data\.jsonl: record 2: "):
        read_dialogues(str(path))


def test_the_first_line_has_a_number_too_and_a_mark_of_the_encoding_is_none_of_it(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("{broken\n")
    with pytest.raises(ValueError, match="record 0: "):
        read_dialogues(str(path))
    path.write_text(json.dumps([CITY]), encoding="utf-8-sig")
    assert len(read_dialogues(str(path))[0]) == 1


def test_a_list_without_dialogues_and_one_without_end(tmp_path):
    path = tmp_path / "data.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"data\.json: no dialogues in it"):
        read_dialogues(str(path))
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="give a JSON list of dialogues"):
        read_dialogues(str(path))


def test_half_a_character_is_named(tmp_path):
    """JSON can spell what no file of text can hold."""
    with pytest.raises(ValueError, match="record 1, "):
        read(tmp_path, CITY, CITY | {"conversation": ["Is it \ud800? No."]})


def test_a_reward_beyond_all_numbers_is_named(tmp_path):
    with pytest.raises(ValueError, match="record 0, "):
        read(tmp_path, loop_record(("c", "d", 10**400)))


LEFT_OUT = {
    "more than one line": {
        "observations": ["a", "ab\nc"],
        "actions": ["b\nc"],
        "rewards": [1.0],
        "terminated": True,
        "answer": "e",
    },
    "asks back": {"conversation": ["Is it? As an AI I cannot say. What else?"]},
    "turns": {"conversation": ["Is it? No."] * 21},
    "action of more": {"conversation": [f"Is it {'very ' * 50}big? No."]},
    "history of more": {"conversation": [f"Is it? {'No. ' * 2000}"]},
    "no question and answer": {"conversation": ["I give up."]},
}


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_what_is_left_out_is_counted_with_its_reason(tmp_path, reason):
    dialogues, notes = read(tmp_path, CITY, CITY | LEFT_OUT[reason], CITY)
    assert len(dialogues) == 2 and len(notes) == 1
    assert reason in notes[0] and "1 of 3" in notes[0]


def test_a_world_of_code_may_have_long_actions_of_several_lines(tmp_path):
    record = LEFT_OUT["more than one line"]
    long = record | {"observations": ["a", "ab\nc" + 300 * "d"], "actions": ["b\nc" + 300 * "d"]}
    dialogues, notes = read(tmp_path, record, long, max_chars=1000, multiline=True)
    assert len(dialogues) == 2 and not notes


def test_what_a_run_has_written_may_be_long(tmp_path):
    """The authors' games end after 20 questions; a world of one's own, or apps, may go on."""
    state = "so far, " * 2000
    record = {"observations": ["a", state], "actions": ["b"], "rewards": [1.0]}
    record |= {"terminated": True, "answer": "e"}
    dialogues, notes = read(tmp_path, record, append_only=False)
    assert len(dialogues) == 1 and not notes


BROKEN = {
    "conversation": CITY | {"conversation": "Is it? No."},
    "conversation ": CITY | {"conversation": ["Is it? No.", None]},
    "word ": {"lines": ["Is it? No."], "correct": False, "word": [5]},
    "word  ": {"lines": ["Is it? No."], "correct": False, "word": [""]},
    "done": CITY | {"done": "yes"},
    "word": CITY | {"word": ["lima"]},
    "rewards": {
        "observations": ["a", "b"],
        "actions": ["c"],
        "rewards": ["d"],
        "terminated": True,
        "answer": "e",
    },
    "observations": {
        "observations": ["a"],
        "actions": ["c"],
        "rewards": [1.0],
        "terminated": True,
        "answer": "e",
    },
    "observations ": {
        "observations": ["a", "x"],
        "actions": ["c"],
        "rewards": [1.0],
        "terminated": True,
        "answer": "e",
    },
    "observations  ": {
        "observations": ["", "c"],
        "actions": ["c"],
        "rewards": [1.0],
        "terminated": True,
        "answer": "e",
    },
    "reply": {"text": "ac", "turns": [{"action": "c", "reward": 1.0}], "fate": "ended", "answer": "e"},
}


@pytest.mark.parametrize("field", BROKEN)
def test_a_malformed_record_is_named(tmp_path, field):
    with pytest.raises(ValueError, match=rf'data\.json: record 1, field "{field.strip()}"'):
        read(tmp_path, CITY, BROKEN[field])


@pytest.mark.external
@pytest.mark.skipif(not REAL.exists(), reason=f"the authors' data of Guess My City is not at {REAL}")
def test_the_real_data_of_guess_my_city():
    """950 dialogues; what is left out is said, and no question that is kept has a preface or a newline."""
    dialogues, notes = read_dialogues(str(REAL))
    assert 850 < len(dialogues) < 950
    assert sum(int(note.split(": ")[1].split()[0]) for note in notes if "left out" in note) == 950 - len(
        dialogues
    )
    actions = [action for d in dialogues for action in d["actions"]]
    assert not any(
        "\n" in action or "question would be" in action or action[0].isdigit() for action in actions
    )
    assert all(action.endswith("?") and len(action) <= 200 for action in actions)


@pytest.mark.parametrize("mix", ["random=0.5/scripted=0.3,expert=0.2", "random=0.9/random=0.1"])
def test_a_mix_that_says_two_things_is_refused(mix):
    with pytest.raises(ValueError, match=r"not by both|stands in it twice"):
        make_dialogues(envs.make("twenty-questions-subset"), 3, 0, mix)


def test_one_line_that_is_no_question_costs_its_dialogue_only(tmp_path):
    """In either of the authors' formats."""
    good = {"lines": ["Is it alive? No.", "Is it a ball? Yes."], "correct": True, "word": ["ball"]}
    odd = good | {"lines": ["Is it alive? No.", "It is a ball. Yes."]}
    dialogues, notes = read(tmp_path, good, odd)
    assert len(dialogues) == 1 and "1 of 2 dialogues left out: a line that is no question" in notes[0]
