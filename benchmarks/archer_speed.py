"""archer.py beside the authors' loop: utterances per second of the same work, each in turn, on one thread.

    git clone https://github.com/YifeiZhou02/ArCHer authors      # measured with 7c771a7
    python benchmarks/archer_speed.py --authors authors

Both have the same actor and the same world, and play as many dialogues at a time. The authors' critic is an
encoder as wide and deep as the actor, with random weights; their batches are those of their Twenty Questions,
32 times 8 utterances. Their files are used as they are. Stand-ins replace what these import beside torch and
transformers, and their tokenizer pads on the left: on the right their actor would go on behind the padding.
Rates are per CPU-second. docs/archer.md explains what makes the difference.
"""

import copy
import importlib
import os
import statistics
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import numpy as np
import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import archer as ours
import envs
from envs import models


@dataclass
class Args(ours.Args):
    authors: str = ""  # folder of their repository
    repeats: int = 3  # how often each part is timed, after once without
    threads: int = 1
    fresh: bool = True  # as theirs


# ---------------------------------------------------------- 1. their code
class Accelerator:
    """What their trainer asks of accelerate, on one device."""

    def prepare(self, *things):
        return things if len(things) > 1 else things[0]

    def unwrap_model(self, model):
        return model

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, norm):
        return torch.nn.utils.clip_grad_norm_(parameters, norm)


def load(folder: str) -> dict[str, ModuleType]:
    """Their modules by name, without the packages' own imports: wandb, jericho, gym.

    Raises ValueError if they are not there.
    """
    root = Path(folder) / "archer"
    if not (root / "models/archer_agent.py").is_file():
        raise ValueError(
            f"--authors {folder}: no archer/models/archer_agent.py there; clone their repository"
        )
    del sys.modules["archer"]  # their package has the name of our script
    for name in ("archer", "archer.models", "archer.algorithms", "archer.environment"):
        module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    names = (
        "data",
        "models.archer_agent",
        "models.critic",
        "algorithms.archer.trainer",
        "environment.env_utils",
    )
    return {name: importlib.import_module(f"archer.{name}") for name in names}


class Worlds:
    """Our worlds as theirs are called."""

    def __init__(self, args: Args):
        self.worlds = envs.VecTextEnv(args.env, args.rollouts, **envs.options(args.world))
        self.bsize = len(self.worlds)
        self.rng = np.random.default_rng(args.seed)

    def reset(self, idx=None) -> list[str]:
        self.worlds.reset(seeds=self.rng.integers(2**31, size=self.bsize).tolist())
        return list(self.worlds.observations)

    def step(self, actions: list[str]) -> list:
        alive = self.worlds.alive()
        self.worlds.step({i: actions[i] for i in alive})
        results = [None] * self.bsize
        for i in alive:
            ended = self.worlds.terminated[i] or self.worlds.truncated[i]
            reward = self.worlds.dialogues[i]["rewards"][-1]
            results[i] = (self.worlds.observations[i], reward, ended)
        return results


def encoder_like(actor, folder: str) -> str:
    """Saves a BERT with random weights, as wide and deep as the actor, in the folder; returns it."""
    config = actor.config
    bert = transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
    )
    transformers.BertModel(bert).save_pretrained(folder)
    actor.tokenizer.save_pretrained(folder)
    return folder


def parts_of_theirs(args: Args, source: str, actor) -> dict:
    """By name: a function that does the work and returns the number of utterances."""
    code = load(args.authors)
    accelerator = Accelerator()
    with TemporaryDirectory() as folder:
        critic_lm = encoder_like(actor, folder)
        options = {"policy_lm": source, "critic_lm": critic_lm, "max_new_tokens": args.max_action_tokens}
        agent = code["models.archer_agent"].ArcherAgent(args.device, accelerator, **options)
        width = actor.config.hidden_size  # theirs is written for 768
        made = [
            code["models.critic"].DoubleCritic(args.device, accelerator, critic_lm, None, width, 1)
            for _ in range(2)
        ]
    agent.critic, agent.target_critic = made
    agent.tokenizer.padding_side = "left"
    trainer = code["algorithms.archer.trainer"].ArcherTrainer(
        agent, accelerator, agent.tokenizer, critic_lr=0.0, lm_lr=0.0, grad_accum_steps=32
    )
    buffer = code["data"].ReplayBuffer(batch_size=8, capacity=100_000)
    worlds = Worlds(args)

    def play() -> int:
        trajectories = code["environment.env_utils"].batch_interact_environment(
            agent, agent.tokenizer, worlds, worlds.bsize, use_tqdm=False
        )
        for trajectory in trajectories:
            for step in trajectory:
                buffer.insert(**step)
        return sum(map(len, trajectories))

    def critic() -> int:
        trainer.epochs, trainer.actor_epochs = 1, 0
        trainer.update(buffer, no_update_actor=True)
        return 256

    def act() -> int:
        trainer.epochs, trainer.actor_epochs = 0, 1
        trainer.update(buffer)
        return 256

    return {"rollout": play, "critic": critic, "critic, fresh utterances every time": critic, "actor": act}


# ---------------------------------------------------------- 2. ours
def parts_of_ours(args: Args, actor) -> dict:
    """The same of archer.py: rates of zero, so that every repetition does the same work."""
    rng = np.random.default_rng(args.seed)
    worlds = envs.VecTextEnv(args.env, args.rollouts, **envs.options(args.world))
    critic = ours.Critic(models.load_critic(args.critic, actor, args), 0.0, args.dtype)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    ref_model = models.reference_of(actor)
    baseline = ours.mlp(actor.config.hidden_size, actor.config.hidden_size, 0.0)
    actor_optimizer = torch.optim.AdamW(actor.parameters(), lr=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=0.0)
    played = []

    def count(dialogues) -> int:
        return sum(len(dialogue["actions"]) for dialogue in dialogues)

    def play() -> int:
        played[:], _ = ours.rollout(actor, worlds, args, rng)
        return count(played)

    def learn(pool, updates: int) -> int:
        pool = ours.with_fresh(pool, actor, args, rng)
        seen = 0
        for _ in range(updates):
            batch = rng.choice(pool, args.critic_batch)
            ours.critic_update(critic, target_critic, critic_optimizer, batch, args)
            seen += count(batch)
        return seen

    def phase() -> int:
        return learn(rng.choice(played, args.critic_pool), args.critic_updates)

    def step() -> int:
        return learn(rng.choice(played, args.critic_batch), 1)

    def act() -> int:
        batch = rng.choice(played, args.actor_batch)
        ours.actor_update(actor, ref_model, critic, baseline, actor_optimizer, batch, args, rng)
        return count(batch)

    return {"rollout": play, "critic": phase, "critic, fresh utterances every time": step, "actor": act}


# ---------------------------------------------------------- 3. the table
def rate(part) -> float:
    """Utterances per CPU-second."""
    began = time.process_time()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # theirs tells what it does
        utterances = part()
    return utterances / (time.process_time() - began)


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    world = envs.make(args.env, **envs.options(args.world))
    source = str(args.actor or models.checkpoint_of(world))
    actor = models.load_actor(source, args)
    own = parts_of_ours(args, actor)
    theirs = parts_of_theirs(args, source, actor)
    print(f"{'utterances per CPU-second':<38}{'archer.py':>10}{'authors':>9}{'ratio':>7}")
    for name in own:
        measured = [(rate(own[name]), rate(theirs[name])) for _ in range(args.repeats + 1)][1:]
        mine, other = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"{name:<38}{mine:>10.0f}{other:>9.1f}{mine / other:>7.1f}", flush=True)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except ValueError as error:
        sys.exit(str(error))
