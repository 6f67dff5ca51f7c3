"""A stricter sandbox, with the interface of sandbox.py:
the interpreter Monty of the package pydantic-monty.

    world = envs.make("apps", sandbox="monty")              # pip install pydantic-monty

Monty is a Python written anew in Rust, in which there is nothing that could reach the system: no file, no
frame, no module but its own. It runs in processes of its own, too. The price is that it is not all of Python
(classes cannot inherit, errors of calls are a plain Exception) and that names of calls must be known
beforehand.
"""

import re
import threading
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from functools import partial

from envs.worlds.apps.sandbox import Finished, Refused

MEMORY = 64 * 2**20  # bytes
PRINTED = 10**6  # bytes of what a turn prints
POOL = []  # the pool of processes, once it has been started
STARTING = threading.Lock()


class MontySandbox:
    """A Python that keeps its variables until `close`; see sandbox.Sandbox, which it can stand in for.

    `names` are the calls that `apis` has. Raises ModuleNotFoundError without the package.
    """

    def __init__(self, seconds: float = 1.0, max_output: int = 1000, names: tuple[str, ...] = ()):
        self.seconds, self.max_output, self.names = seconds, max_output, names
        self.session = None
        import pydantic_monty  # here, so that this file can be imported without it

        self.monty = pydantic_monty

    def run(self, code: str, answer: Callable[[str, dict], object]) -> str:
        """What the code prints, with the value of a last line that is an expression;
        "" if `answer` raised Finished."""
        if self.session is None:
            self.start()
        self.answer, self.finished = answer, False
        printed = self.monty.CollectString(max_bytes=PRINTED)
        try:
            value = self.session.feed_run(code, print_callback=printed)
            output = printed.output + ("" if value is None else beginning(value, self.max_output))
        except self.monty.MontyCrashedError:
            output = self.stopped()
        except (self.monty.MontyRuntimeError, self.monty.MontySyntaxError) as error:
            output = printed.output + error.display("type-msg")
        except (
            self.monty.MontyError,
            ValueError,
            RecursionError,
        ) as error:  # values that cannot be handed over
            output = printed.output + f"{type(error).__name__}: {error}"
        if self.session.worker_pid is None:  # so it may be after a MemoryError, which is no crash
            output = self.stopped()
        if self.finished:
            self.close()
            return ""
        return re.sub(
            r" at 0x[0-9a-f]+", "", output[: self.max_output].encode("utf-8", "replace").decode("utf-8")
        )

    def stopped(self) -> str:
        """The output of a turn that has cost the process its life."""
        self.close()
        return "Stopped: the process ended. Python starts anew, all variables are gone."

    def call(self, name: str, /, *args, **kwargs) -> object:
        """Answers one call of the code; after the last one there is no other."""
        if args:
            raise TypeError(f"{name} takes keyword arguments only")
        if self.finished:
            raise PermissionError("the task is completed")
        try:
            return self.answer(name, kwargs)
        except Refused as refused:
            raise Exception(str(refused)) from None
        except Finished:
            self.finished = True
            raise PermissionError("the task is completed") from None

    def start(self) -> None:
        monty = self.monty
        with STARTING:
            if not POOL:
                POOL.append(monty.Monty(max_processes=1000).__enter__())
        apps = {}
        for name in self.names:
            app, _, rest = name.partition(".")
            apps.setdefault(app, {})[rest] = partial(self.call, name)
        apis = monty.ExternalModule({app: monty.ExternalModule(calls) for app, calls in apps.items()})
        limits = {"max_feed_duration_secs": self.seconds, "max_memory": MEMORY}
        options = {"limits": limits, "external_modules": {"apis": apis}, "os_policy": {"sleep": "zero"}}
        self.session = POOL[0].checkout(**options).__enter__()
        self.session.feed_run("import apis")

    def close(self) -> None:
        """Ends the session, if there is one."""
        if self.session is not None:
            session, self.session = self.session, None
            session.__exit__(None, None, None)


BRACKETS = {list: "[]", tuple: "()", set: "{}", dict: "{}", frozenset: ("frozenset({", "})")}
PLAIN = (type(None), bool, int, float, complex, type(...), date, datetime, time, timedelta)


def beginning(value: object, room: int) -> str:
    """The first `room` characters of repr(value), and perhaps some more;
    of what the code itself has defined its name.

    Not repr itself: a list of a list of ... forty deep, each of which holds the next one twice, is small
    here, and its repr would never end.

    >>> beginning({"a": [1, (2.5,), set()]}, 100), beginning([[0] * 1000] * 1000, 8)
    ("{'a': [1, (2.5,), set()]}", '[[0, 0, 0]]')
    """
    kind = type(value)
    if kind in (str, bytes):
        return repr(value[:room])
    if kind not in BRACKETS or not value:
        return (
            repr(value) if kind in BRACKETS or kind in PLAIN else f"<{getattr(value, 'name', kind.__name__)}>"
        )
    text, end = BRACKETS[kind]
    for i, item in enumerate(value.items() if kind is dict else value):
        if len(text) >= room:
            break
        text += ", " if i else ""
        if kind is dict:
            name, item = item
            text += beginning(name, room - len(text)) + ": "
        text += beginning(item, room - len(text))
    return text + ("," if kind is tuple and len(value) == 1 else "") + end
