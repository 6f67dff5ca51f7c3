"""What loop_ppo.py promises: its equations, that a batch is no more than its parts, and that a run can be resumed.

The world is a toy defined here: list a table, then copy the value that belongs to a name. The models have one or two
layers. What they should compute is computed a second time, one rollout at a time, by a plain forward pass.
"""

import random

import gymnasium
import pytest
import torch

import envs
import loop_ppo

NAMES = ["ann", "bob", "cid", "dot", "eve", "fay"]


class Lookup(gymnasium.Env):
    """A name is asked for; `list` shows the table, `answer 17` ends the episode. Doing nothing earns 0, as does a guess.

    What is right can be known, so the best return is 1; who answers without looking is right once in 40 tries.
    """

    id = "lookup"
    num_tasks = 600  # for training; 48 in the other splits
    max_turns = 4
    max_action_chars = 40
    append_only = True
    multiline = True
    best_return = 1.0

    def __init__(self, split: str = "train", reward: str = "fraction"):
        offset = {"train": 0, "dev": 1000, "test-normal": 2000, "test-challenge": 3000}[split]
        self.num_tasks = 600 if split == "train" else 48
        self.tables = []
        for i in range(self.num_tasks):
            rng = random.Random(offset + i)
            self.tables.append(dict(zip(rng.sample(NAMES, 4), rng.sample(range(10, 50), 4), strict=True)))
        self.scenarios = tuple(i // 3 for i in range(self.num_tasks))
        self.difficulties = tuple(1 + i % 3 for i in range(self.num_tasks))
        self.is_question = tuple(i % 2 == 0 for i in range(self.num_tasks))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.index = (options or {}).get("index", 0)
        self.table, self.turn = self.tables[self.index], 0
        self.name = list(self.table)[self.index % 4]
        self.observation = f"value of {self.name}?\n> "
        return self.observation, {"answer": f"lookup_{self.index}"}

    def step(self, action):
        action = action.strip()[: self.max_action_chars]
        self.turn += 1
        terminated, reward, reply = False, 0.0, "\nerror\n> "
        if action == "list":
            reply = "\n" + "\n".join(f"{name} {value}" for name, value in self.table.items()) + "\n> "
        elif action.startswith("answer"):
            terminated, reward, reply = True, float(action == f"answer {self.table[self.name]}"), "\ndone\n> "
        self.observation += action + reply
        truncated = not terminated and self.turn == self.max_turns
        info = {"action": action}
        if terminated or truncated:
            info["episode"] = {"return": reward, "length": self.turn, "success": reward == 1}
        return self.observation, reward, terminated, truncated, info

    def demonstrations(self, n, seed, skill=0.5):
        """Half of them answer without looking, or with the value of another name."""
        rng, made = random.Random(seed), []
        for _ in range(n):
            observation, info = self.reset(options={"index": rng.randrange(self.num_tasks)})
            d = {"observations": [observation], "actions": [], "rewards": [], "answer": info["answer"]}
            value = self.table[self.name] if rng.random() < skill else rng.choice(list(self.table.values()))
            for action in ["list"] * (rng.random() < 0.7) + [f"answer {value}"]:
                observation, reward, terminated, truncated, _ = self.step(action)
                d["observations"].append(observation)
                d["actions"].append(action)
                d["rewards"].append(reward)
            made.append(d | {"terminated": terminated})
        return made


@pytest.fixture(autouse=True, scope="module")
def toy():
    envs.ENVS["lookup"] = envs.Entry(f"{__name__}:Lookup", "a toy of the tests")
    yield
    del envs.ENVS["lookup"]
