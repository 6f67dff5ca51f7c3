"""What a model of Twenty Questions knows late in a dialogue, when at most six words are left.

    python benchmarks/knowledge.py checkpoints/twenty-questions
    python benchmarks/knowledge.py runs/RUN/actor --critic runs/RUN      # a run of archer.py

Behind a guess that was made before the answer is No, and so it is behind one that is excluded; behind a
guess that is possible it is Yes with one over the number of words left. Printed is the model's P(Yes) for
the three kinds beside this truth: mean, and, as means hide much, the mean distance from it. A critic that
knows as much prefers the possible guess: printed is the share of states in which Q(possible) > Q(the other).
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import archer
import envs
import sft
from envs import models
from envs.datasets import make_dialogues
from envs.worlds.twenty_questions import ALL, INVALID, NO, YES, candidates, guess_of, words_in

REPLIES = [f" {answer}\n" for answer in (YES, NO, INVALID)]


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]  # folder of a model and its tokenizer, or a Hugging Face name
    critic: str = ""  # folder of a run of archer.py
    states: int = 400  # so many, from as many dialogues
    seed: int = 0  # of the dialogues
    batch: int = 96  # rows in a pass
    device: str = "cpu"


def late_states(n: int, seed: int) -> list[dict]:
    """Dialogues cut at a random turn with at most six words left, and a guess of each kind as "guesses".

    The player guesses early and, in a fifth of its turns, what it could know to be wrong: repeats occur.
    """
    rng, world, states = random.Random(seed), envs.make("twenty-questions"), []
    while len(states) < n:
        for d in make_dialogues(world, n, rng.randrange(2**31), "scripted=0.8,forgetful=0.2"):
            left = {i: candidates(d["observations"][i]) for i in range(1, len(d["actions"]))}
            late = [i for i, words in left.items() if words.bit_count() <= 6]
            if not late:
                continue
            turn = rng.choice(late)
            possible, said = words_in(left[turn]), set(d["actions"][:turn])
            guessed = [word for word in words_in(ALL) if guess_of(word) in said]
            excluded = [word for word in words_in(ALL & ~left[turn]) if word not in guessed]
            if guessed and len(states) < n:
                words = {"repeated": guessed, "excluded": excluded, "possible": possible}
                guesses = {kind: guess_of(rng.choice(found)) for kind, found in words.items()}
                texts, actions = d["observations"][: turn + 1], d["actions"][:turn]
                cut = {"observations": texts, "actions": actions, "guesses": guesses, "left": len(possible)}
                states.append(cut)
    return states


def extended(state: dict, guess: str, reply: str) -> dict:
    """The dialogue with one turn more."""
    text = state["observations"][-1] + guess + reply
    return {"observations": [*state["observations"], text], "actions": [*state["actions"], guess]}


@torch.no_grad()
def p_yes(model, asked: list[tuple[dict, str]], batch: int) -> list[float]:
    """P(Yes) behind each guess: of the three answers whole, however many tokens they have."""
    rows, last, tokenizer = [], [], model.tokenizer
    for state, guess in asked:
        for reply in REPLIES:
            rows += sft.rows_of(extended(state, guess, reply), tokenizer, sys.maxsize)
            last.append(len(models.encode_reply(tokenizer, reply)))
            rows[-1][: -last[-1], 1] = sft.CONTEXT
    order, total = sorted(range(len(rows)), key=lambda i: len(rows[i])), torch.zeros(len(rows))
    for part in (order[i : i + batch] for i in range(0, len(order), batch)):
        logp_M, _ = sft.score(model, [rows[i] for i in part])
        total[part] = torch.stack([x.sum() for x in logp_M.split([last[i] for i in part])]).cpu()
    return total.view(-1, len(REPLIES)).softmax(-1)[:, 0].tolist()


@torch.no_grad()
def q_values(run: Path, asked: list[tuple[dict, str]]) -> list[float]:
    """What the critic of an archer.py run thinks each guess is worth: the smaller of the twins' Q."""
    args = archer.Args(**json.loads((run / "args.json").read_text(encoding="utf-8")))
    body = models.load(transformers.AutoModel, str(run / "critic"), args)
    critic = archer.Critic(body, 0.0, args.dtype).to(args.device)
    state = torch.load(run / "checkpoint.pt", map_location=args.device, weights_only=True)
    critic.load_state_dict(state["modules"]["critic"])
    found = []
    for dialogue in (extended(state, guess, "") for state, guess in asked):
        _, q_N2 = critic([dialogue])
        found.append(q_N2[-1].min().item())
    return found


def main(args: Args) -> dict[str, float]:
    """Prints the table; returns its figures."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = models.load(transformers.AutoModelForCausalLM, args.checkpoint, args)
    states, figures = late_states(args.states, args.seed), {}
    for kind in ("repeated", "excluded", "possible"):
        truth = [1 / state["left"] if kind == "possible" else 0.0 for state in states]
        asked = [(state, state["guesses"][kind]) for state in states]
        found = p_yes(model, asked, args.batch)
        off = fmean(abs(a - b) for a, b in zip(found, truth, strict=True))
        figures |= {kind: fmean(found), f"{kind}_truth": fmean(truth), f"{kind}_off": off}
        print(
            f"P(Yes) behind a {kind:8} guess {fmean(found):.3f}  truth {fmean(truth):.3f}  distance {off:.3f}"
        )
    if args.critic:
        kinds = ("possible", "repeated", "excluded")
        values = {k: q_values(Path(args.critic), [(s, s["guesses"][k]) for s in states]) for k in kinds}
        for kind in kinds[1:]:
            pairs = zip(values["possible"], values[kind], strict=True)
            figures[f"q_{kind}"] = fmean(a > b for a, b in pairs)
            print(f"Q(possible) > Q({kind}) in {figures[f'q_{kind}']:.2f} of {len(states)} states")
    return figures


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except ValueError as error:
        print(f"{Path(__file__).name}: {error}".splitlines()[0], file=sys.stderr)
        sys.exit(2)
