"""A Python for code that nobody trusts: each sandbox runs it in a child process,
whose calls this process answers.

    def answer(name, kwargs):                     # runs here; name and kwargs are whatever the code has sent
        if name != "add":
            raise Refused(f"there is no {name}")
        return kwargs["a"] + kwargs["b"]

    with Sandbox() as sandbox:
        sandbox.run("x = apis.add(a=1, b=2)", answer)         # ""
        sandbox.run("x + 1", answer)                          # "4": variables stay from turn to turn

The code shares nothing with this process but a line of text, and so this file has to be right about one
thing: every line that comes may have been written by the code itself. At worst it is a call with any
arguments, which the code could have made anyway, or it says what the code has printed. sandbox_child.py
is the other end, and says what confines the code there. It is no container: read docs/sandbox.md before you
give it to people rather than to language models.

Linux and macOS; a sandbox belongs to one thread at a time, but different ones may run in different threads.
"""

import atexit
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from keyword import iskeyword
from pathlib import Path

MEMORY = 128 * 2**20  # bytes of address space of a child, of which Python takes 17 MB
CPU_SECONDS = 60  # of an episode in all its turns, of all children that it needs one after the other
PATIENCE = 10.0  # seconds on the wall for one turn: long, as only code that waits for something meets it
START = 60.0  # seconds on the wall for a process to start
MAX_LINE = 100_000  # bytes of a line of a child
MAX_OUTPUT = 8_000  # characters of a turn, which take up to twelve bytes each of such a line
MAX_CALLS = 500  # of one turn


class Refused(Exception):
    """Raised by the function that answers calls: the code gets an error with this text."""


class Finished(Exception):
    """Raised by the function that answers calls: this call was the last, and nothing after it is executed."""


class Sandbox:
    """A Python that keeps its variables until `close`; it starts with the first turn and may be used again.

    `seconds` of CPU time end a turn with an error; `max_output` characters are kept of what a turn prints.
    `names`, the calls that there are, need not be given: `apis` here takes any name and `answer` refuses it.
    """

    def __init__(self, seconds: float = 1.0, max_output: int = 1000, names: tuple[str, ...] = ()):
        if max_output > MAX_OUTPUT:
            raise ValueError(f"max_output: {max_output} is more than {MAX_OUTPUT}")
        self.seconds, self.max_output, self.names = seconds, max_output, names
        self.line: socket.socket | None = None
        self.turn, self.spent = 0, 0.0  # seconds of CPU time of children that were stopped

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, code: str, answer: Callable[[str, dict], object]) -> str:
        """What the code prints, with the value of a last line that is an expression;
        "" if `answer` raised Finished.

        A child that breaks, or is broken by its code, is replaced, and what is returned says so. Raises
        OSError only if no child can be had at all.
        """
        if call := plain_call(code):
            try:
                result = answer(*call)
            except Refused as refused:
                return self.shown(f"ApiError: {refused}")
            except Finished:
                self.close()
                return ""
            return self.shown("" if result is None else repr(json.loads(json.dumps(result))))
        if self.line is None:
            if CPU_SECONDS - self.spent < 1:
                return f"Stopped: the {CPU_SECONDS} s of CPU time of an episode are spent."
            self.start()
        self.turn += 1
        self.deadline = time.monotonic() + PATIENCE
        try:
            self.send({"run": code, "turn": self.turn})
            for _ in range(MAX_CALLS + 1):
                message = self.receive()
                if message.keys() == {"done", "output"}:
                    return self.end(**message)
                self.send(self.reply(message, answer))
            why = f"more than {MAX_CALLS} calls in a turn"
        except Finished:
            self.close()
            return ""
        except TimeoutError:
            why = "too much time"
        except (OSError, ValueError, RecursionError) as error:
            why = str(error)
        self.stop()
        return f"Stopped: {why}. Python starts anew, all variables are gone."

    def reply(self, message: dict, answer: Callable[[str, dict], object]) -> dict:
        """The answer to one call, or to what was sent in the place of one."""
        name, kwargs = message.get("call"), message.get("kwargs")
        if len(message) != 2 or type(name) is not str or type(kwargs) is not dict:
            raise ValueError("it sent something that is no call")
        try:
            return {"result": answer(name, kwargs)}
        except Refused as refused:
            return {"error": str(refused)}

    def end(self, done: object, output: object) -> str:
        """The output of a turn."""
        if done != self.turn or type(output) is not str or self.received:
            raise ValueError("it spoke out of turn")
        return self.shown(output)

    def shown(self, output: str) -> str:
        """The output as the agent gets it: cut, encodable, without addresses,
        which differ from run to run."""
        output = output[: self.max_output].encode("utf-8", "replace").decode("utf-8")
        return re.sub(r" at 0x[0-9a-f]+", "", output)

    def start(self) -> None:
        """Lets the zygote fork a child, and if it has died, a new zygote. Raises OSError."""
        for last in (False, True):
            self.zygote = zygote(self.seconds, self.max_output)
            self.line, theirs = socket.socketpair()
            self.received, self.deadline = b"", time.monotonic() + START
            try:
                with theirs:
                    self.zygote.fork(theirs, int(CPU_SECONDS - self.spent))
                hello = self.receive()
                self.pid, self.number = hello["pid"], hello["number"]
                return
            except OSError:
                self.line.close()
                self.line = None
                if last or not self.zygote.has_died():
                    raise

    def stop(self) -> None:
        """Ends a child that another one is to replace, which has what is left of the CPU time."""
        self.line.close()
        self.line = None
        self.spent += self.zygote.stop(self.number)

    def close(self) -> None:
        """Ends the child, if there is one. What comes next is a new episode."""
        self.spent = 0.0
        if self.line is not None:
            self.line.close()
            self.line = None
            self.zygote.kill(self.number)

    def send(self, message: dict) -> None:
        """Raises OSError, of which TimeoutError is one: a child need not read what it is sent."""
        self.line.settimeout(self.left())
        self.line.sendall(json.dumps(message).encode("ascii") + b"\n")

    def receive(self) -> dict:
        """One line from the child.

        Raises OSError, and ValueError or RecursionError for what is not a JSON object.
        """
        while (end := self.received.find(b"\n")) < 0:
            if len(self.received) > MAX_LINE:
                raise ValueError("it sent a line without end")
            self.line.settimeout(self.left())
            data = self.line.recv(65536)
            if not data:
                raise OSError("the process ended")
            self.received += data
        line, self.received = self.received[:end], self.received[end + 1 :]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError("it sent something that is no JSON") from None
        if type(message) is not dict:
            raise ValueError("it sent something that is no call")
        return message

    def left(self) -> float:
        """Seconds until the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


WORD = r"[A-Za-z]\w{0,50}"
VALUE = r"(?:0|-?[1-9]\d{0,15}|'[^'\\\x00-\x1f\ud800-\udfff]*'|None)"
ARGUMENT = re.compile(f"({WORD})=({VALUE})", re.ASCII)
PLAIN = re.compile(
    rf"apis\.({WORD}(?:\.{WORD}){{0,5}})\(((?:{WORD}={VALUE}(?:, ?{WORD}={VALUE})*)?)\)", re.ASCII
)


def plain_call(code: str) -> tuple[str, dict] | None:
    """Name and arguments of code that is one call with plain arguments and nothing else;
    None for any other code.

    It could do no more than is done here without a process, a hundred times faster: most turns of small
    models.

    >>> plain_call("apis.mail.find(sender='Ada', page=2)"), plain_call("apis.mail.find(sender=name)")
    (('mail.find', {'sender': 'Ada', 'page': 2}), None)
    """
    match = PLAIN.fullmatch(code)
    if not match:
        return None
    found = ARGUMENT.findall(match[2])
    names = [name for name, _ in found]
    if len(set(names)) < len(names) or any(map(iskeyword, [*names, *match[1].split(".")])):
        return None  # Python does not take it
    return match[1], {name: read_value(text) for name, text in found}


def read_value(text: str) -> int | str | None:
    """What a plain value stands for.

    Not by `ast`: CPython 3.11's fails now and then when several threads parse.
    """
    if text == "None":
        return None
    return text[1:-1] if text[0] == "'" else int(text)


class Zygote:
    """The process from which children are forked: 3 ms of CPU time each instead of 40,
    and most of their memory shared.

    It is a Python of its own, not a fork of this one, so that it may be started before or after torch or
    threads are. Raises OSError if it does not start.
    """

    def __init__(self, seconds: float, max_output: int):
        self.lock, self.owner = threading.Lock(), os.getpid()
        self.line, theirs = socket.socketpair()
        numbers = [theirs.fileno(), MEMORY, seconds, max_output]
        # -P -s and an environment of our own are what -I stands for; but -I would also pass over the seed.
        command = [sys.executable, "-P", "-s", "-S", Path(__file__).with_name("sandbox_child.py"), *numbers]
        with theirs, tempfile.TemporaryDirectory(prefix="sandbox-") as empty:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=empty,
                env={"PYTHONHASHSEED": "0"},  # sets have the same order every time
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in our terminal is not for the agents' code
            )
            theirs.close()
            self.line.settimeout(START)
            if self.line.recv(64) != b"ready\n":
                raise OSError("the Python for agents' code does not start; its error stands above")
        # The folder is gone now, and with it all that could be found or made in it.

    def fork(self, line: socket.socket, cpu_seconds: int) -> None:
        with self.lock:
            socket.send_fds(self.line, [b"fork %d\n" % cpu_seconds], [line.fileno()])

    def stop(self, number: int) -> float:
        """Kills a child; the seconds of CPU time that it has used."""
        if self.owner == os.getpid():
            with self.lock, suppress(OSError):  # without a zygote there is nobody to ask
                self.line.sendall(b"stop %d\n" % number)
                return float(self.line.recv(64) or 0)
        return 0.0

    def kill(self, number: int) -> None:
        if self.owner == os.getpid():  # a fork of this process has only copies
            # without a zygote its child is left to the clock of the kernel
            with self.lock, suppress(OSError):
                self.line.sendall(b"kill %d\n" % number)

    def has_died(self) -> bool:
        try:
            self.process.wait(1)  # its line is closed a moment before it is gone
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Ends it and all its children."""
        self.line.close()
        if self.owner != os.getpid():
            return
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


ZYGOTES: dict[tuple, Zygote] = {}
STARTING = threading.Lock()


def zygote(seconds: float, max_output: int) -> Zygote:
    """The zygote for these limits; one that has died is replaced, and a forked process starts its own."""
    key = os.getpid(), seconds, max_output
    with STARTING:
        if key not in ZYGOTES or ZYGOTES[key].process.poll() is not None:
            ZYGOTES[key] = Zygote(seconds, max_output)
            atexit.register(ZYGOTES[key].close)
        return ZYGOTES[key]
