"""Dialogues in files: what offline algorithms and warm starts learn from.

    dialogues, notes = envs.datasets.read_dialogues("data.json")       # notes say what was skipped and why
    dialogues = envs.datasets.make_dialogues(world, 5000, 0, "random=0.7,scripted=0.3")

What a dialogue is stands at the top of envs/__init__.py. Files that are read (FORMS): two of the authors of
ArCHer, a list each, and two that runs write, a dialogue a line: dataset.jsonl and rollouts.jsonl, which
loop_ppo.py writes in a form of its own.

A success is what the file says: "correct", "done" or "success". Where a run's file does not say it, a
dialogue that the world has ended counts as one: true of the guessing games, not of worlds that can end badly.
loop_ppo.py does not say what has ended a rollout: it counts as ended by the world. A dialogue of
dataset.jsonl may have "imitate", too.
"""

import json
import math
import random
import re
from collections import Counter
from pathlib import Path

START = "Questions:\n"  # the first observation of both games
MAX_TURNS = 20  # of both games
MAX_HISTORY = 6000  # characters of a dialogue in the authors' files
FORMS = """\
{"observations": [...], "actions": [...], "rewards": [...], "terminated": bool, "answer": "..."}
{"text": "...", "turns": [{"action": "", "reply": "", "reward": 0.0}], "fate": "ended", "answer": "..."}
{"lines": ["Is it alive? Yes."], "correct": bool, "word": ["dog"]}
{"conversation": ["Is it old? No."], "done": bool, "word": "lima,peru"}"""
KEYS = {"observations": list, "actions": list, "rewards": list, "terminated": bool, "answer": str}


def dialogue(world, player, rng: random.Random, index: int | None = None, seed: int | None = None) -> dict:
    """One episode of a scripted player, `player(observation, rng) -> action`; "return" and "truncated",
    too."""
    observation, info = world.reset(seed=seed, options={} if index is None else {"index": index})
    made = {"observations": [observation], "actions": [], "rewards": [], "answer": info["answer"]}
    terminated = truncated = False
    while not (terminated or truncated):
        observation, reward, terminated, truncated, info = world.step(player(observation, rng))
        made["observations"].append(observation)
        made["actions"].append(info["action"])
        made["rewards"].append(reward)
    result = info["result"]
    made |= {"terminated": terminated, "truncated": truncated, "success": result["success"]}
    return made | {"return": result["return"]}


def make_dialogues(world, n: int, seed: int, mix: str) -> list[dict]:
    """`n` dialogues about tasks drawn evenly, by players drawn by their shares.

    "random=0.7,scripted=0.3" draws a player for each turn: one player of middling skill.
    "random=0.7/scripted=0.3" draws one for each dialogue: good players and bad ones. Raises ValueError for a
    mix that is neither.
    """
    shares = {}
    if "/" in mix and "," in mix:
        raise ValueError(f"{mix!r}: part the players by commas or by slashes, not by both")
    for part in mix.replace("/", ",").split(","):
        name, _, share = part.strip().partition("=")
        if name not in world.players:
            known = "none, so give --dataset FILE"
            if world.players:
                example = "/".join(f"{player}=0.5" for player in world.players)
                known = f"{', '.join(world.players)} (--mix {example})"
            raise ValueError(f"{mix!r}: no player {name!r}; {world.id} has: {known}")
        if name in shares:
            raise ValueError(f"{mix!r}: {name} stands in it twice")
        try:
            shares[name] = float(share or 1)
        except ValueError:
            raise ValueError(
                f"{mix!r}: {share!r} is no number; write it as random=0.7,scripted=0.3"
            ) from None
    if min(shares.values()) < 0 or not 0 < sum(shares.values()) < float("inf"):
        raise ValueError(f"{mix!r}: the shares must be positive numbers")
    rng, made = random.Random(seed), []

    def draw() -> str:
        return rng.choices(list(shares), list(shares.values()))[0]

    for _ in range(n):
        index, world_seed, name = rng.randrange(world.num_tasks), rng.randrange(2**31), draw()

        def player(observation: str, rng: random.Random, name: str = name) -> str:
            return world.players[name if "/" in mix else draw()](observation, rng)

        made.append(dialogue(world, player, rng, index, world_seed))
    return made


def read_for(world, path: str) -> tuple[list[dict], list[str]]:
    """`read_dialogues` by the rules of a world: as long, and of as many lines, as its actions may be."""
    multiline = getattr(world, "multiline", False)
    return read_dialogues(path, world.append_only, world.max_action_chars, multiline)


def read_dialogues(
    path: str,
    append_only: bool = True,
    max_chars: int = 200,
    multiline: bool = False,
) -> tuple[list[dict], list[str]]:
    """The dialogues of a file in any of the formats above,
    and a note on each kind of record that was left out.

    Left out is what no world would write: an action of more than `max_chars` characters or, unless
    `multiline`, of several lines; of the authors' files also what has more than 20 turns or 6,000 characters,
    a line that is no question and answer, or an answer that asks back. `append_only`
    says whether a reply in rollouts.jsonl adds to the observation before it or takes its place. Raises
    ValueError with the number, from 0, and the field of a malformed record.
    """
    records, where = [], ""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        is_list = text.lstrip()[:1] == "["
        for n, line in enumerate([] if is_list else filter(str.strip, text.split("\n"))):
            where = f"record {n}: "
            records.append(json.loads(line))
        records = json.loads(text) if is_list else records
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: {where}{error}; give a JSON list of dialogues, or a line of JSON a dialogue"
        ) from error
    if not records:
        raise ValueError(f"{path}: no dialogues in it")
    dialogues, skipped, mended = [], Counter(), 0
    for n, record in enumerate(records):
        try:
            made, why, repairs = read_record(record, append_only)
            # half a surrogate pair is no text: nobody could save it
            json.dumps(made, ensure_ascii=False).encode()
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path}: record {n}, {error}") from None
        if made and max(map(len, made["actions"])) > max_chars:
            made, why = None, f"an action of more than {max_chars} characters"
        if made and not multiline and any("\n" in action for action in made["actions"]):
            made, why = None, "an action of more than one line"
        is_of_a_run = "observations" in record or "turns" in record
        if made and not is_of_a_run and len(made["observations"][-1]) > MAX_HISTORY:
            made, why = None, f"a history of more than {MAX_HISTORY} characters"
        if made:
            dialogues.append(made)
            mended += repairs
        else:
            skipped[why] += 1
    notes = [f"{path}: {count} of {len(records)} dialogues left out: {why}" for why, count in skipped.items()]
    if mended:
        notes.append(f"{path}: {mended} questions freed of what is said before them")
    if not dialogues:
        raise ValueError(f"{path}: no dialogue is left; {'; '.join(skipped)}")
    return dialogues, notes


def read_record(record: dict, append_only: bool) -> tuple[dict | None, str, int]:
    """A dialogue, or None and the reason why it is left out; and how many of its questions were mended."""
    if not isinstance(record, dict):
        raise ValueError(f"must be an object, not {type(record).__name__}")
    if "observations" in record:
        check(record, KEYS)
        n = len(record["actions"])
        if len(record["observations"]) != n + 1 or len(record["rewards"]) != n:
            raise ValueError(f'field "observations": {n} actions need {n + 1} observations and {n} rewards')
        for key, kind in {"observations": str, "actions": str, "rewards": float}.items():
            if not all(isinstance(x, kind) or (kind is float and type(x) is int) for x in record[key]):
                raise ValueError(f'field "{key}": each must be a {kind.__name__}')
        made = {key: record[key] for key in KEYS} | {
            "rewards": [float(reward) for reward in record["rewards"]]
        }
        follow(made, append_only)
        return made | said_besides(record, n), "", 0
    if "turns" in record:
        return from_turns(record, append_only)
    if "conversation" in record:
        check(record, {"conversation": list, "done": bool, "word": str})
        if not all(isinstance(line, str) for line in record["conversation"]):
            raise ValueError('field "conversation": each must be text, "question? answer"')
        return from_lines(record["conversation"], record["done"], record["word"])
    if "lines" not in record:
        forms = "; ".join(FORMS.splitlines())
        raise ValueError(
            f"which has {', '.join(map(repr, record)) or 'no fields'}, has none of the forms {forms}"
        )
    check(record, {"lines": list, "correct": bool, "word": list})
    if not all(isinstance(line, str) for line in record["lines"]):
        raise ValueError('field "lines": each must be text, "question? answer"')
    if not all(isinstance(name, str) and name for name in record["word"]):
        raise ValueError('field "word": each must be a name')
    return from_lines(record["lines"], record["correct"], record["word"][0])


def from_turns(record: dict, append_only: bool) -> tuple[dict | None, str, int]:
    """A dialogue of loop_ppo.py, whose text begins with what the world said first."""
    check(record, {"text": str, "turns": list, "fate": str, "answer": str})
    if record["fate"] != "ended":
        return None, f"a rollout that was {record['fate']}", 0
    for turn in record["turns"]:
        check(turn, {"action": str, "reply": str, "reward": float})
    said = [turn["action"] + turn["reply"] for turn in record["turns"]]
    if not append_only or not record["text"].endswith("".join(said)):
        raise ValueError(
            'field "text": must end in the actions and replies of the turns, one after the other'
        )
    observations = [record["text"].removesuffix("".join(said))]
    for text in said:
        observations.append(observations[-1] + text)
    made = {
        "observations": observations,
        "actions": [turn["action"] for turn in record["turns"]],
        "rewards": [float(turn["reward"]) for turn in record["turns"]],
    }
    follow(made, append_only)
    made |= {"terminated": True, "answer": record["answer"]}
    return made | said_besides(record | {"terminated": True}, len(said)), "", 0


def said_besides(record: dict, n: int) -> dict:
    """The success of a dialogue of n turns and, if the record has it, which actions are to be imitated."""
    success, imitate = record.get("success", record["terminated"]), record.get("imitate", [True] * n)
    if not isinstance(success, bool):
        raise ValueError('field "success": must be a bool')
    if not isinstance(imitate, list) or len(imitate) != n or not all(type(x) is bool for x in imitate):
        raise ValueError(f'field "imitate": must be {n} bools, one for each action')
    return {"success": success} | ({"imitate": imitate} if "imitate" in record else {})


def check(record: dict, fields: dict[str, type]) -> None:
    """Raises ValueError with the field's name where one is missing, of another type or empty."""
    for key, kind in fields.items():
        value = record.get(key) if isinstance(record, dict) else None
        fits = isinstance(value, kind) or (kind is float and type(value) is int)
        if not fits or (value in ([], "") and key not in ("action", "reply")):  # an agent may say nothing
            raise ValueError(f'field "{key}": must be a {kind.__name__} that is not empty')


def follow(made: dict, append_only: bool) -> None:
    """Raises ValueError where observations or rewards are not what a world gives."""
    texts = made["observations"]
    if not all(math.isfinite(reward) for reward in made["rewards"]):
        raise ValueError('field "rewards": must be finite numbers')
    if not all(texts[:-1]):
        raise ValueError('field "observations": empty before an action')
    pairs = zip(texts, made["actions"], texts[1:], strict=False)
    if append_only and not all(after.startswith(before + action) for before, action, after in pairs):
        raise ValueError('field "observations": each must begin with the one before and the action')


def from_lines(lines: list[str], success: bool, answer: str) -> tuple[dict | None, str, int]:
    """A dialogue from lines "question? answer"; -1 for each question but the right guess that ends it.

    The data of Guess My City was made by a chat model: some questions stand behind a paragraph about what
    comes next, and some answers ask back or repeat the question, after which nobody knows what was asked.
    """
    observations, actions, mended = [START], [], 0
    if len(lines) > MAX_TURNS:
        return None, f"more than {MAX_TURNS} turns", 0
    for line in lines:
        said, mark, reply = line.rpartition("? ")
        if not mark:
            return None, "a line that is no question and answer", 0
        question = said.strip().split("\n")[-1]
        before, colon, after = question.partition(": ")
        if colon and re.search("question|ask", before.lower()):
            question = after
        question = re.sub(r"^\d+[.)] ", "", question.strip(' "')) + "?"
        if "?" in reply or question == "?" or ("\n" in said and "?" in said):
            return None, "an answer that asks back", 0
        mended += question != said.strip(' "\n') + "?"
        actions.append(question)
        observations.append(f"{observations[-1]}{question} {' '.join(reply.split())}\n")
    rewards = [-1.0] * (len(actions) - 1) + [success - 1.0]
    made = {"observations": observations, "actions": actions, "rewards": rewards}
    return made | {"terminated": success, "success": success, "answer": answer}, "", mended
