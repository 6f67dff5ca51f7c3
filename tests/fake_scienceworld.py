"""A stand-in for ScienceWorld's Java program: all of envs/worlds/scienceworld but its Simulator plays in it.

python -m tests.fake_scienceworld lge_drrn.py --env scienceworld --steps 10    # a script in it
"""

import runpy
import sys
from functools import lru_cache
from types import ModuleType

import pytest

from envs.worlds import scienceworld


class House:
    """Three rooms in a row. Of the animals in the garden, to focus on the one of the variation is success.

    The kitchen is worth 8 points from the start, the garden 25. To focus on anything else fails. All tasks
    are alike but for their names.
    The methods are those of the simulator's own Python interface.
    """

    ROOMS, ANIMALS = ("kitchen", "hallway", "garden"), ("dove", "frog", "bee")
    dies_at = -1  # the action of every episode on which the process dies

    def __init__(self):
        self.is_alive = True

    def call(self, method: str, *args):
        if not self.is_alive:
            raise scienceworld.Died("the simulator: it is gone")
        return getattr(self, method)(*args)

    strings = call

    def load(self, task: str, variation: int, simplifications: str, with_gold_path: bool) -> None:
        self.task, self.animal, self.is_easy = task, self.ANIMALS[variation % 3], simplifications == "easy"
        self.room, self.score, self.turns = "kitchen", 0.0, -1  # the look around at the start is not a turn

    def step(self, action: str) -> str:
        self.turns, self.score = self.turns + 1, max(self.score, 0.08)
        self.is_alive = self.turns != self.dies_at
        if action not in self.call("getValidActionObjectCombinations"):
            return "No known action matches that input."
        if action.startswith("focus on "):
            self.score = 1.0 if action == f"focus on {self.animal}" else -1.0
        elif " to " in action:
            self.room = action.split(" to ")[1]
            self.score = max(self.score, 0.25 * (self.room == "garden"))
        return f"You {action}."

    def getValidActionObjectCombinations(self) -> list[str]:
        here = self.ROOMS.index(self.room)
        beside = [room for room in self.ROOMS if abs(self.ROOMS.index(room) - here) == 1]
        things = ["air", *(self.ANIMALS if self.room == "garden" else ())]
        goes = [f"go to {room}" for room in beside]
        goes += [f"teleport to {room}" for room in self.ROOMS if self.is_easy]
        does = [f"{verb} {thing}" for verb in ("eat", "focus on") for thing in things]
        return ["look around", "wait", *goes, *does]

    def getGoldActionSequence(self) -> list[str]:
        return ["go to hallway", "go to garden", f"focus on {self.animal}"]

    def getTaskDescription(self) -> str:
        return f"Your task is to find a(n) living thing ({self.task}). Focus on the {self.animal}."

    def freeActionLook(self) -> str:
        return f"This room is called the {self.room}."

    def freeActionInventory(self) -> str:
        return "In your inventory, you see: an orange"

    def getScore(self) -> float:
        return self.score

    def getCompleted(self) -> bool:
        return self.score == 1

    def close(self) -> None:
        self.is_alive = False


def install(patch: pytest.MonkeyPatch) -> None:
    """From now on worlds are played in the House."""
    patch.setitem(sys.modules, "scienceworld", ModuleType("scienceworld"))
    patch.setattr(scienceworld, "find_java", lambda: "java")
    patch.setattr(scienceworld, "Simulator", House)
    # Gold paths and their simulator are cached, here apart from the real ones.
    patch.setattr(scienceworld, "_shared", lru_cache(House))
    patch.setattr(scienceworld, "gold_path", scienceworld.gold_path.__wrapped__)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    install(pytest.MonkeyPatch())
    runpy.run_path(sys.argv[0], run_name="__main__")
