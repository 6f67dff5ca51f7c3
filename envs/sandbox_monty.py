"""A stricter sandbox, with the interface of envs/sandbox.py: the interpreter Monty of the package pydantic-monty.

    world = envs.make("apps", sandbox="monty")              # pip install pydantic-monty

Monty is a Python written anew in Rust, in which there is nothing that could reach the system: no file, no frame, no
module but its own. It runs in processes of its own, too. The price is that it is not all of Python (classes cannot
inherit, errors of calls are a plain Exception) and that names of calls must be known beforehand.
"""

import re
import threading
from collections.abc import Callable
from functools import partial

from envs.sandbox import Finished, Refused

MEMORY = 64 * 2**20  # bytes
POOL = []  # the pool of processes, once it has been started
STARTING = threading.Lock()


class MontySandbox:
    """A Python that keeps its variables until `close`; see envs.sandbox.Sandbox, which it can stand in for.

    `names` are the calls that `apis` has. Raises ModuleNotFoundError without the package.
    """

    def __init__(self, seconds: float = 1.0, max_output: int = 1000, names: tuple[str, ...] = ()):
        self.seconds, self.max_output, self.names = seconds, max_output, names
        self.session = None
        import pydantic_monty  # here, so that this file can be imported without it

        self.monty = pydantic_monty

    def run(self, code: str, answer: Callable[[str, dict], object]) -> str:
        """What the code prints, with the value of a last line that is an expression; "" if `answer` raised Finished."""
        if self.session is None:
            self.start()
        self.answer, self.finished = answer, False
        printed = self.monty.CollectString(max_bytes=10**6)
        try:
            value = self.session.feed_run(code, print_callback=printed)
            output = printed.output + ("" if value is None else repr(value))
        except self.monty.MontyCrashedError:
            self.close()
            output = "Stopped: the process ended. Python starts anew, all variables are gone."
        except (self.monty.MontyRuntimeError, self.monty.MontySyntaxError) as error:
            output = printed.output + error.display("type-msg")
        except (self.monty.MontyError, ValueError, RecursionError) as error:  # values that cannot be handed over
            output = printed.output + f"{type(error).__name__}: {error}"
        if self.finished:
            self.close()
            return ""
        return re.sub(r" at 0x[0-9a-f]+", "", output[: self.max_output].encode("utf-8", "replace").decode("utf-8"))

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
        self.session = POOL[0].checkout(limits=limits, external_modules={"apis": apis}).__enter__()
        self.session.feed_run("import apis")

    def close(self) -> None:
        """Ends the session, if there is one."""
        if self.session is not None:
            session, self.session = self.session, None
            session.__exit__(None, None, None)
