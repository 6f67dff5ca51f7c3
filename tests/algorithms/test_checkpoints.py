"""What holds for the ready-made models in checkpoints/, and for the programs that make and examine them."""

import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import knowledge

import archer
import checkpoints
import envs
import guide_simcse
import sft
from envs import models, runs
from envs.worlds.twenty_questions import candidates, parse

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in ROOT.glob("checkpoints/*/made.json"))
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)


def test_sizes():
    sizes = [checkpoints.size_of(folder / "model.safetensors") for folder in FOLDERS]
    assert all(size <= checkpoints.MEGABYTES for size in sizes)
    assert checkpoints.size_of(ROOT / "checkpoints") <= checkpoints.ALL_MEGABYTES


@each_folder
def test_a_checkpoint_is_what_its_page_says(folder):
    made = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    commands = checkpoints.COMMANDS | checkpoints.OTHERS | checkpoints.GUIDES
    assert made["sha256"] == checkpoints.digest(folder) and made["command"] == commands[made["world"]]
    if made["world"] in checkpoints.GUIDES:
        assert (
            made["world"] == folder.name and Path(models.guide_of("school", "/nowhere")).name == folder.name
        )
    elif made["world"] in checkpoints.OTHERS:
        assert made["world"] == folder.name
    else:
        assert envs.make(made["world"]).demonstration_env == folder.name
    page = (ROOT / "checkpoints/README.md").read_text(encoding="utf-8")
    assert page == checkpoints.readme(ROOT / "checkpoints")


@pytest.mark.parametrize("world", checkpoints.COMMANDS)
def test_sft_reads_the_command_of_a_checkpoint(world, monkeypatch):
    parsed = []
    monkeypatch.setattr(sys, "argv", shlex.split(checkpoints.COMMANDS[world])[1:])
    runs.cli(sft.Args, parsed.append)
    assert parsed[0].env == world


def test_guide_simcse_reads_the_command_of_a_guide(monkeypatch):
    parsed = []
    (command,) = checkpoints.GUIDES.values()
    monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
    runs.cli(guide_simcse.Args, parsed.append)
    assert parsed == [guide_simcse.Args()], "the default run"


@pytest.mark.slow
@each_folder
def test_its_command_makes_the_same_weights(folder, tmp_path):
    made = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    assert checkpoints.digest(checkpoints.make(made["world"], tmp_path)) == made["sha256"]


@pytest.mark.slow
def test_making_a_small_one_twice(tmp_path):
    """The same command, the same weights; the page has it, and sft.py can go on with it."""
    options = "--demonstrations 20 --epochs 1 --width 32 --layers 1 --eval-episodes 2 --max-action-tokens 4"
    folders = [checkpoints.make("twenty-questions", tmp_path / name, options) for name in "ab"]
    a, b = (json.loads((folder / "made.json").read_text()) for folder in folders)
    assert a["sha256"] == b["sha256"] == checkpoints.digest(folders[0])
    assert f"`{a['sha256']}`" in checkpoints.readme(tmp_path / "a") and a["command"].endswith(options)
    figures = knowledge.main(knowledge.Args(str(folders[0]), states=6))
    assert all(0 <= figures[kind] <= 1 for kind in ("repeated", "excluded", "possible"))


def test_late_states_are_what_they_are_called():
    for state in knowledge.late_states(60, 1):
        left = candidates(state["observations"][-1])
        words = {kind: parse(guess) for kind, guess in state["guesses"].items()}
        assert left.bit_count() == state["left"] <= 6 and all(word.guess for word in words.values())
        assert state["guesses"]["repeated"] in state["actions"]
        assert state["guesses"]["excluded"] not in state["actions"] and not words["excluded"].yes & left
        assert words["possible"].yes & left and not words["repeated"].yes & left


def test_p_yes_is_that_of_whole_answers():
    """Of a model that knows the answer by the last word of the guess, against a plain forward pass."""
    import torch

    dialogues = envs.make("twenty-questions").demonstrations(30, 0)
    model = sft.make_tiny(dialogues, sft.Args(width=32, layers=1, vocabulary=500))
    states = knowledge.late_states(5, 2)
    asked = [(state, state["guesses"]["possible"]) for state in states]
    for (state, guess), found in zip(asked, knowledge.p_yes(model, asked, 4), strict=True):
        logps = []
        for reply in knowledge.REPLIES:
            (row,) = sft.rows_of(knowledge.extended(state, guess, reply), model.tokenizer, 2048)
            ids, n = row[:, 0].long(), len(models.encode(model.tokenizer, reply))
            logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])
            logps.append(logp[-n:].sum())
        assert found == pytest.approx(torch.stack(logps).softmax(0)[0].item(), abs=1e-5)


def test_q_of_a_critic(tmp_path):
    """The critic of a run of archer.py, loaded from its folder, says what the run logged."""
    small = {"width": 32, "layers": 1, "demonstrations": 20, "epochs": 1, "eval_episodes": 2}
    sft.main(sft.Args(runs=str(tmp_path / "sft"), max_action_tokens=4, **small))
    (made,) = (tmp_path / "sft").iterdir()
    small = {"iterations": 1, "rollouts": 2, "critic_updates": 1, "critic_pool": 2, "critic_batch": 2}
    small |= {"eval_episodes": 1, "max_action_tokens": 4, "warmup": 1}
    archer.main(archer.Args(actor=str(made / "actor"), runs=str(tmp_path / "archer"), **small))
    (run,) = (tmp_path / "archer").iterdir()
    seen = json.loads((run / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()[0])
    state = {"observations": seen["observations"][:2], "actions": seen["actions"][:1]}
    found = knowledge.q_values(run, [(state, seen["actions"][1])])
    assert found == pytest.approx([seen["Q"][1]], abs=1e-4)
    figures = knowledge.main(knowledge.Args(str(run / "actor"), critic=str(run), states=4))
    assert 0 <= figures["q_repeated"] <= 1 and 0 <= figures["q_excluded"] <= 1
