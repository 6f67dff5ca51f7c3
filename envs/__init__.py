"""The worlds: text games with gymnasium's interface. Importing this imports none of them.

    world = envs.make("twenty-questions")
    worlds = envs.VecTextEnv("twenty-questions", 8)        # eight of them in lockstep
    python -m envs                                         # which there are, and which can be used here
    python -m envs.play twenty-questions                   # play one yourself

What every world keeps to is written down, and tested, in tests/test_envs.py.
"""

import inspect
from dataclasses import dataclass, field
from importlib import import_module

from envs.vector import VecTextEnv

__all__ = ["ENVS", "Entry", "Unavailable", "VecTextEnv", "make", "missing"]


class Unavailable(RuntimeError):
    """A world needs a package or a file that is not here; the message says which and where to get it."""


@dataclass(frozen=True)
class Entry:
    """How to make a world: `target` is "module:Class", imported when the first is made."""

    target: str
    about: str  # one line
    needs: str = "gymnasium"  # packages and files, in words
    options: dict = field(default_factory=dict)  # always passed to the class


ENVS = {
    "twenty-questions": Entry(
        "envs.twenty_questions:TwentyQuestions", "find one of 157 hidden words with 20 yes/no questions"
    ),
    "twenty-questions-subset": Entry(
        "envs.twenty_questions:TwentyQuestionsSubset", "the same with 10 words, for quick experiments"
    ),
}


def make(id: str, **options):
    """A new world.

    Raises ValueError for an unknown id or option and Unavailable for a missing package or file.
    """
    if id not in ENVS:
        raise ValueError(f"unknown environment {id!r}; known: {', '.join(ENVS)}")
    module, name = ENVS[id].target.split(":")
    try:
        world_class = getattr(import_module(module), name)
        known = inspect.signature(world_class).parameters
        for option in options:
            if option not in known:
                raise ValueError(f"{id} has no option {option!r}; it has: {', '.join(known) or 'none'}")
        return world_class(**ENVS[id].options, **options)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{id} needs the package {error.name}: pip install {error.name}") from error
    except FileNotFoundError as error:
        raise Unavailable(f"{id}: {error}") from error


def missing(id: str) -> str | None:
    """What keeps `make(id)` from working here, in one line; None if it works."""
    try:
        make(id).close()
    except Unavailable as error:
        return str(error)
    return None
