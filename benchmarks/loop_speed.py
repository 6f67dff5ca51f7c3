"""How fast loop_ppo.py is: tokens per second of its rollouts and updates,
and what the cache across turns saves.

    python benchmarks/loop_speed.py    # a table; CPU seconds on one thread, best of --repeats

The work is that of a usual comparison: 8 prompts of 128 tokens, 6 completions of 64 tokens each in one turn,
then two epochs of two minibatches. Rollouts are counted in tokens written, updates in tokens read, prompts
and both epochs included. "plain" is the same work as one writes it down at first, in this file, measured in
turn with ours. Over many turns, 12 rollouts write 16 tokens a turn and read as many; "read again" is the same
without a cache kept: each turn begins with a pass over all that was written before. That pass is added to the
time of ours, in which replies are read, too: some hundredths too much.
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import loop_ppo


@dataclass
class Args:
    widths: tuple[int, ...] = (
        128,
        320,
    )  # of a Llama of 4 layers: 0.9M and 5M parameters, vocabulary apart
    vocabularies: tuple[int, ...] = (2048, 16384)  # their sizes
    turns: tuple[int, ...] = (10, 40)  # of the rollouts over many turns
    repeats: int = 3  # the best of so many is shown, after one that is not


class Tokens:
    """In the place of a tokenizer: a text is the numbers of its tokens; any other word is token 1."""

    eos_token, eos_token_id, chat_template = "0", 0, None

    def __call__(self, text, **options):
        return {"input_ids": [int(word) if word.isdigit() else 1 for word in text.split()]}

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


class World:
    """Says `read` tokens after each of `turns` turns; random numbers all of them."""

    def __init__(self, prompt: int, turns: int, read: int, vocabulary: int):
        self.prompt, self.turns, self.read, self.vocabulary = prompt, turns, read, vocabulary

    def say(self, n: int) -> str:
        return "".join(f" {token}" for token in self.rng.integers(1, self.vocabulary, n))

    def reset(self, seed, options):
        self.rng, self.turn = np.random.default_rng(options["index"]), 0
        self.observation = self.say(self.prompt)  # the same for a task
        self.rng = np.random.default_rng(seed)
        return self.observation, {"answer": ""}

    def step(self, action):
        self.turn += 1
        self.observation += action + self.say(self.read)
        info = {"action": action, "result": {"success": False}}
        return self.observation, float(self.rng.random()), self.turn == self.turns, False, info


def make_model(width: int, vocabulary: int):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
        num_attention_heads=width // 32, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.tokenizer = Tokens()
    model.context = model.config.max_position_embeddings
    with torch.no_grad():  # so that hardly a turn ends early: all have the same length
        model.get_input_embeddings().weight[0] = 0
    return model


def cpu_seconds(part, repeats: int) -> float:
    """The least CPU time of `part`, a function, in some calls after the first."""
    part()
    measured = []
    for _ in range(repeats):
        began = time.process_time()
        part()
        measured.append(time.process_time() - began)
    return min(measured)


@torch.no_grad()
def plain_rollout(model, prompts: list[list[int]], written: int):
    """Each prompt read for each of its rollouts, then a token at a time; ids and log-probs [48, ...]."""
    ids, cache, all_ids, logps = (
        torch.tensor(prompts),
        transformers.DynamicCache(),
        [torch.tensor(prompts)],
        [],
    )
    for _ in range(written):
        hidden = model.base_model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state[
            :, -1
        ]
        logp = model.get_output_embeddings()(hidden).log_softmax(-1)
        ids = torch.multinomial(logp.exp(), 1)
        all_ids.append(ids)
        logps.append(logp.gather(1, ids))
    return torch.cat(all_ids, 1), torch.cat(logps, 1)


def plain_update(model, optimizer, ids, old_logp, advantages, minibatch: int) -> None:
    """Two epochs with the logits of all tokens; the sampler's log-probs are the old ones: a pass less."""
    for _ in range(2):
        for rows in torch.randperm(len(ids)).split(minibatch):
            logits = model(input_ids=ids[rows]).logits[:, :-1]
            logp = logits.log_softmax(-1).gather(-1, ids[rows, 1:, None])[..., 0][:, -old_logp.shape[1] :]
            w, a = (logp - old_logp[rows]).exp(), advantages[rows, None]
            optimizer.zero_grad()
            (-torch.minimum(w * a, w.clamp(0.8, 1.2) * a).mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def play(model, tasks: list[int], turns: int, prompt: int, written: int, read: int):
    """Rollouts in which every turn is cut after `written` tokens."""
    args = loop_ppo.Args(
        max_action_tokens=written, context=prompt + turns * (written + read + 1) + 1, world_threads=1
    )
    worlds = [World(prompt, turns, read, model.config.vocab_size) for _ in tasks]
    seeds = list(range(len(tasks)))
    return loop_ppo.rollout(model, worlds, tasks, seeds, seeds, args)


@torch.no_grad()
def read_again(model, played) -> None:
    """What a rollout without a cache across turns reads more: at each turn all that stands before it."""
    for turn in range(1, len(played[0].turns)):
        so_far = [loop_ppo.Trajectory(t.task, ids=t.ids[: t.turns[turn].start]) for t in played]
        loop_ppo.Memory(model, so_far)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    print(f"{'parameters':>12}{'vocabulary':>12}{'rollout tokens/s':>18}{'plain':>8}", end="")
    print(f"{'update tokens/s':>18}{'plain':>8}")
    for width in args.widths:
        for vocabulary in args.vocabularies:
            model = make_model(width, vocabulary)
            tasks = [i // 6 for i in range(48)]
            played = play(model, tasks, 1, 128, 64, 0)
            tokens = sum(len(t.logps) for t in played)
            rollout = cpu_seconds(partial(play, model, tasks, 1, 128, 64, 0), args.repeats)
            options = loop_ppo.Args(minibatch=24, micro_batch=24, epochs=2, min_advantage=0.0, rollouts=6)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
            judged = loop_ppo.set_advantages(played, options.rollouts, options.normalise)
            step = (model, optimizer, judged, options)
            update = cpu_seconds(partial(loop_ppo.update, *step, np.random.default_rng(0)), args.repeats)
            size = sum(p.numel() for p in model.parameters()) / 1e6
            seen = options.epochs * sum(len(t.ids) for t in judged)
            prompts = [t.ids[:128] for t in played]
            plain = 48 * 64 / cpu_seconds(partial(plain_rollout, model, prompts, 64), args.repeats)
            plain_step = (model, optimizer, *plain_rollout(model, prompts, 64), torch.randn(48), 24)
            plain_read = 2 * 48 * 192 / cpu_seconds(partial(plain_update, *plain_step), args.repeats)
            print(f"{size:>11.1f}M{vocabulary:>12,}{tokens / rollout:>18,.0f}{plain:>8,.0f}", end="")
            print(f"{seen / update:>18,.0f}{plain_read:>8,.0f}", flush=True)

    print(f"\n{'turns':>8}{'cache kept, s':>16}{'read again, s':>16}{'ratio':>8}")
    model = make_model(args.widths[0], args.vocabularies[0])
    for turns in args.turns:
        tasks = [i // 6 for i in range(12)]
        played = play(model, tasks, turns, 128, 16, 16)
        kept = cpu_seconds(partial(play, model, tasks, turns, 128, 16, 16), args.repeats)
        more = cpu_seconds(partial(read_again, model, played), args.repeats)
        print(f"{turns:>8}{kept:>16.2f}{kept + more:>16.2f}{(kept + more) / kept:>8.1f}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
