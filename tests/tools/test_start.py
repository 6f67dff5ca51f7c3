"""benchmarks/start.py: which lines it prints, that the rule holds, and that the best line comes last."""

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tiny import make_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import start

import archer
import envs
from envs import models
from envs.worlds import guess_my_city, twenty_questions


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return str(make_checkpoint("twenty-questions-subset", tmp_path_factory.mktemp("checkpoint") / "model"))


def small(checkpoint, **changes) -> start.Args:
    sizes = {"env": "twenty-questions-subset", "temperatures": (1.0, 0.5), "hold": (2,), "episodes": 10}
    return start.Args(checkpoint, **sizes | {"max_action_tokens": 3} | changes)


def test_every_line_and_the_best_one(checkpoint, capsys):
    table = start.main(small(checkpoint))
    rule = "no guess in the first 2 turns, temperature "
    names = ["temperature 1", "temperature 0.5", "greedy", f"{rule}1"]
    assert list(table)[:4] == names and list(table)[-1] == "best"
    lines = capsys.readouterr().out.splitlines()[1:]
    for line, name in zip(lines, table, strict=False):
        if name != "best":
            pattern = rf"{name} +return +(-?[\d.]+) ± [\d.]+  success ([\d.]+)  tokens ([\d.]+)"
            found = re.fullmatch(pattern, line)
            assert float(found[1]) == pytest.approx(table[name]["return"], abs=0.006)
            assert float(found[3]) == pytest.approx(table[name]["tokens"], abs=0.006)
    best = max((row["return"], -i) for i, row in enumerate(list(table.values())[:-1]))
    assert table["best"] is list(table.values())[-best[1]]
    assert lines[-1].startswith(f"best: {list(table)[-best[1]]}: return {best[0]:.2f}")


def test_figures_of():
    """Tokens are those of the text, every utterance counts the same."""
    tokenizer = lambda text, **_: {"input_ids": text.split()}  # noqa: E731
    dialogue = {"observations": ["", "a b", "a bc"], "terminated": True, "success": True}
    dialogues = [
        dialogue | {"actions": ["a b", "c"], "rewards": [-1.0, 0.0]},
        dialogue | {"actions": ["a b c d"], "rewards": [-3.0], "success": False},
    ]
    figures = start.figures_of(dialogues, tokenizer)
    assert figures == pytest.approx(
        {"return": -2.0, "error": 1 / 2**0.5, "success": 0.5, "tokens": (2 + 1 + 4) / 3}
    )


def test_the_rule_holds_as_long_as_it_can(checkpoint, monkeypatch):
    """No guess in the first turns, unless the model finds nothing else; behind them guesses are free."""
    actor = models.load(transformers.AutoModelForCausalLM, checkpoint, small(checkpoint))
    written = []

    def generate(memory, rows, starts, args, streams, greedy=False):
        """A guess in two of three tries, the worlds not in step; the last world knows nothing else."""
        assert starts == [[len(row)] for row in rows.values()] and args.temperature == 0.5
        assert memory.actor is actor and list(memory.rows) == list(rows)
        texts = []
        for b in range(len(rows)):
            written.append(b)
            texts.append("Is it alive?" if len(written) % 3 == 0 else "Is it a dog?")
        return [models.encode(actor.tokenizer, text) for text in texts], [0.0] * len(rows)

    monkeypatch.setattr(archer, "generate", generate)
    args = archer.Args(env="twenty-questions-subset", eval_episodes=10, temperature=0.5)
    is_guess = start.GUESSES["twenty-questions"]
    dialogues = start.play_held(actor, args, 3, is_guess)
    assert len({d["answer"] for d in dialogues}) == 10, "every task once"
    assert not any(is_guess(action) for d in dialogues for action in d["actions"][:3])
    assert any(is_guess(d["actions"][3]) for d in dialogues if len(d["actions"]) > 3)
    free = start.play_held(actor, args, 0, is_guess)
    assert any(is_guess(d["actions"][0]) for d in free)
    monkeypatch.setattr(start, "GUESSES", {})
    stubborn = start.play_held(actor, args, 3, lambda text: True)
    assert all(d["actions"] for d in stubborn), "after so many tries it says what it has"


@pytest.mark.parametrize("episodes", [4, 10, 20])
def test_without_guesses_it_plays_as_archer_does(checkpoint, episodes):
    """With no turns held: the same dialogues as archer.py's, from the same seeds."""
    actor = models.load(transformers.AutoModelForCausalLM, checkpoint, small(checkpoint))
    args = archer.Args(env="twenty-questions-subset", eval_episodes=episodes, max_action_tokens=3)
    held = start.play_held(actor, args, 0, start.GUESSES["twenty-questions"])
    played = archer.play_tasks(actor, args, greedy=False)
    for dialogue in played:
        del dialogue["ids"], dialogue["logps"]
    assert held == played and len(held) == episodes


def test_what_is_written_anew_is_written_after_the_whole_dialogue(checkpoint, monkeypatch):
    """Of every try the log-prob is that of a plain pass over its own row, whoever was left out before; what
    counts is the last try."""
    actor = models.load(transformers.AutoModelForCausalLM, checkpoint, small(checkpoint))
    real, tries = archer.generate, []

    def generate(memory, rows, *given):
        utterances, logps = real(memory, rows, *given)
        tries.append({})
        for (i, row), ids, logp in zip(rows.items(), utterances, logps, strict=True):
            with torch.no_grad():
                logits_TV = actor(input_ids=torch.tensor([row + ids])).logits[0, len(row) - 1 : -1]
            expected = logits_TV.log_softmax(-1)[range(len(ids)), ids].tolist()
            assert logp == pytest.approx(expected, abs=1e-4)
            tries[-1][i] = archer.spoken(actor.tokenizer, ids)
        return utterances, logps

    monkeypatch.setattr(archer, "generate", generate)
    is_guess = lambda text: sum(map(ord, text)) % 3 > 0  # noqa: E731  so two tries of three are
    args = archer.Args(env="twenty-questions-subset", eval_episodes=10, max_action_tokens=3)
    dialogues = start.play_held(actor, args, 3, is_guess)
    assert not any(is_guess(action) for d in dialogues for action in d["actions"][:3])
    lasts, last = [], {}
    for attempt in tries:
        if not attempt.keys() <= {i for i, text in last.items() if is_guess(text)}:
            lasts.append(last)
            last = {}
        last |= attempt
    lasts.append(last)
    said = [d["actions"] for d in dialogues]
    for i, actions in enumerate(said):
        assert actions[:3] == [turn[i] for turn in lasts[1:4]]


def test_what_a_guess_is():
    city = start.GUESSES["guess-my-city"]
    assert city(guess_my_city.guess_of("Lima")) and not city("Is your city in Asia?") and not city("x")
    word = start.GUESSES["twenty-questions"]
    assert word(twenty_questions.guess_of("dog")) and not word("Is it alive?") and not word("")
    thief = start.GUESSES["mini-detective"]
    assert thief("accuse cook") and not thief("search stove")
    for id in start.GUESSES:
        assert envs.make(id).demonstration_env == id


def test_a_world_without_the_rule(tmp_path, capsys):
    folder = make_checkpoint("apps", tmp_path / "apps")
    args = small(str(folder), env="webshop", episodes=2, temperatures=(1.0,))
    assert list(start.main(args)) == ["temperature 1", "greedy", "best"]
