"""Play a world in the terminal, or let an agent play.

python -m envs.play twenty-questions                            # you play
python -m envs.play mini-detective --agent runs/RUN             # an agent does: a run's, or any causal
                                                                # language model in a folder
python -m envs.play twenty-questions --agent runs/RUN --greedy  # it asks, you think of a word and answer
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import gymnasium.error

import envs
from envs.models import chat_pieces, context_of, encode, encode_prompt, encode_reply, why_not_loaded

QUESTIONS = "Questions:\n"  # how the worlds begin in which one asks for something hidden
SHORT = {
    "y": "Yes.",
    "yes": "Yes.",
    "n": "No.",
    "no": "No.",
    "?": "Invalid Question.",
    "": "Invalid Question.",
}

# What plays: a function of the observations and the actions of a dialogue, which returns the next action.
Player = Callable[[list[str], list[str]], str]


def typed(multiline: bool) -> str:
    """What a person types: a line or, for code whose first line ends with a colon, all up to an empty one."""
    lines = [input("> ")]
    while multiline and lines[0].rstrip().endswith(":") and lines[-1].strip():
        lines.append(input(". "))
    return "\n".join(lines)


def introduction(world) -> str:
    """What a person should know before the first turn: rules, number of turns, an example."""
    lines = [getattr(world, "rules", ""), f"You have {world.max_turns} turns."]
    if world.players and world.append_only:  # elsewhere an action hardly makes sense in another task
        lines.append(f"For example: {world.demonstrations(1, 0)[0]['actions'][0]}")
    return textwrap.fill(" ".join(lines).strip(), 100) + "\n\n"


def play(world, observation: str, player: Player) -> dict:
    """One episode in the terminal, from the first observation on; returns its result."""
    print(observation, end="")
    observations, actions = [observation], []
    terminated = truncated = False
    while not (terminated or truncated):
        observation, _, terminated, truncated, info = world.step(player(observations, actions))
        observations.append(observation)
        actions.append(info["action"])
        print(envs.replies(observations[-2:], actions[-1:])[0].strip())
    return info["result"]


def answer(player: Player, hidden: list[str], turns: int) -> None:
    """The other way round: the player, an agent, asks and you answer."""
    print(textwrap.fill(f"Think of one of these: {', '.join(hidden)}.", 100) + "\n")
    print("y is Yes, n is No, ? no such question; else type what is true. c, correct, ends the game.")
    observations, actions = [QUESTIONS], []
    for _ in range(turns):
        actions.append(player(observations, actions))
        reply = input("Answer: ").strip()
        if reply.lower() in ("c", "correct"):
            return
        observations.append(f"{observations[-1]}{actions[-1]} {SHORT.get(reply.lower(), reply)}\n")


# ------------------------------------------------------------------------------------ an agent


class Agent:
    """A causal language model in a folder, and its tokenizer: writes what follows on a dialogue.

    Raises ValueError if it cannot be loaded, and for a dialogue that is longer than its context.
    """

    def __init__(self, folder: str, append_only: bool, greedy: bool, seed: int | None):
        import torch  # here, so that a person can play without them
        import transformers

        source = Path(folder, "actor") if Path(folder, "actor").is_dir() else Path(folder)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        known = {"local_files_only": True, "trust_remote_code": False}
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(source, **known)
            self.model, report = transformers.AutoModelForCausalLM.from_pretrained(
                source, output_loading_info=True, **known
            )
            if report["missing_keys"] or self.tokenizer.eos_token is None:
                raise ValueError("weights or the end token are missing")
            self.model.generation_config = transformers.GenerationConfig()  # no penalty for repetition
            self.end = self.tokenizer.convert_tokens_to_ids(chat_pieces(self.tokenizer).end)
        except Exception as error:  # what a folder can hold has no end, nor have the errors
            reason = why_not_loaded(str(source), error)
            raise ValueError(f"{folder} is no folder of a causal language model: {reason}") from error
        if seed is not None:
            torch.manual_seed(seed)
        self.torch, self.append_only, self.greedy = torch, append_only, greedy

    def ids(self, observations: list[str], actions: list[str]) -> list[int]:
        """The tokens of the prompt, as the scripts lay them out: each text is tokenised by itself, and a turn
        ends with the end token."""
        if not self.append_only:
            observations, actions = observations[-1:], []
        ids = [*encode_prompt(self.tokenizer, observations[0])]
        for before, action, after in zip(observations, actions, observations[1:], strict=False):
            so_far = before + action
            if after == so_far or not after.startswith(so_far):  # a new row, as in training
                ids = [*encode_prompt(self.tokenizer, after)]
                continue
            ids += [*encode(self.tokenizer, action), self.end]
            ids += encode_reply(self.tokenizer, after.removeprefix(so_far))
        return ids

    def write(self, observations: list[str], actions: list[str], max_tokens: int) -> str:
        """The next action: drawn from the model or, if greedy, the likeliest token each time."""
        prompt = self.torch.tensor([self.ids(observations, actions)])
        context = context_of(self.model)
        room = context - prompt.shape[1]
        if room < 1:
            raise ValueError(f"the dialogue has outgrown the agent's context of {context} tokens")
        how = (
            {"do_sample": False}
            if self.greedy
            else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        )
        written = self.model.generate(
            prompt,
            attention_mask=self.torch.ones_like(prompt),
            max_new_tokens=min(room, max_tokens),
            eos_token_id=self.end,
            pad_token_id=self.end,
            **how,
        )
        return self.tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True)


# ------------------------------------------------------------------------------------- the command


def player_of(args: argparse.Namespace, world) -> Player:
    """A person or, with --agent, a model whose actions are printed."""
    if not args.agent:
        return lambda observations, actions: typed(getattr(world, "multiline", False))
    agent = Agent(args.agent, world.append_only, args.greedy, args.seed)
    saved = Path(args.agent, "args.json")  # a run's: an action is cut there as it was in training
    run = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else {}
    max_tokens = run.get("max_action_tokens", world.max_action_chars)
    if run.get("env", world.id) not in (world.id, args.id):
        print(f"(This agent was trained in {run['env']}.)", flush=True)

    def player(observations: list[str], actions: list[str]) -> str:
        action = agent.write(observations, actions, max_tokens)
        action = (action if getattr(world, "multiline", False) else action.split("\n")[0]).strip()
        print(f"> {action}", flush=True)
        return action

    return player


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envs.play", description="Play a world, or let an agent play."
    )
    known = ", ".join([*envs.ENVS, "module:Class", "an id of gymnasium"])
    parser.add_argument("id", help=f"one of: {known}")
    parser.add_argument("--index", type=int, help="number of the task; drawn if not given")
    parser.add_argument("--seed", type=int, help="seed of that draw, and of the agent's")
    about = "options of the world, as in envs.make: oracle=FOLDER,matching=paper"
    parser.add_argument("--world", default="", metavar="NAME=VALUE,...", help=about)
    parser.add_argument("--show-answer", action="store_true", help="say what is hidden before the first turn")
    parser.add_argument(
        "--agent", metavar="FOLDER", help="a run, or a Hugging Face causal language model, plays"
    )
    parser.add_argument("--greedy", action="store_true", help="the agent writes its likeliest tokens")
    args = parser.parse_args()
    info = {}
    try:
        world = envs.make(args.id, **envs.options(args.world))
        task = {} if args.index is None else {"index": args.index}
        observation, info = world.reset(seed=args.seed, options=task)
        player = player_of(args, world)
        hidden = getattr(world, "words", None) or getattr(world, "cities", None)
        if args.agent and observation == QUESTIONS and hidden:
            answer(player, hidden, world.max_turns)
            return 0
        if not args.agent:
            print(introduction(world), end="")
        if args.show_answer:
            print(f"(hidden: {info['answer']})")
        result = play(world, observation, player)
    except (ValueError, TypeError, envs.Unavailable, envs.WorldBroken, gymnasium.error.Error) as error:
        print(error, file=sys.stderr)
        return 2
    except (EOFError, KeyboardInterrupt):
        hidden = "" if args.agent or not info else f" It was: {info['answer']}"
        print(f"\nGoodbye.{hidden}")
        return 0
    print("Solved." if result["success"] else f"Not solved. It was: {info['answer']}")
    print(f"{result['length']} turns, return {result['return']:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
