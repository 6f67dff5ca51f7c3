"""A Python for code that nobody trusts: envs/sandbox_child.py runs it in a process of its own."""

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

MEMORY = 128 * 2**20  # bytes of address space of a child
CPU_SECONDS = 60  # of a child in all its turns
MAX_LINE = 200_000  # bytes of a line of a child
MAX_CALLS = 500  # of one turn


class Refused(Exception):
    """A call's answer is an error; raised by the function that answers calls."""


class Finished(Exception):
    """A call that ends the episode; raised by the function that answers calls."""


class Zygote:
    """The process that forks the children, one of it for all sandboxes of this process."""

    def __init__(self, seconds: float, max_output: int):
        self.folder = tempfile.TemporaryDirectory(prefix="sandbox-")
        self.line, theirs = socket.socketpair()
        os.chmod(self.folder.name, 0o555)
        numbers = theirs.fileno(), MEMORY, CPU_SECONDS, seconds, max_output
        child = Path(__file__).with_name("sandbox_child.py")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(child), *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=self.folder.name,
            env={},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.lock, self.owner = threading.Lock(), os.getpid()
        self.line.settimeout(10)
        if self.line.recv(64) != b"ready\n":
            raise OSError("the sandbox does not start")

    def fork(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        with self.lock:
            socket.send_fds(self.line, [b"fork"], [theirs.fileno()])
            pid = int(self.line.recv(64))
        theirs.close()
        return ours, pid

    def kill(self, pid: int) -> None:
        with self.lock:
            self.line.sendall(b"kill %d" % pid)
            self.line.recv(64)

    def close(self) -> None:
        self.line.close()
        self.process.wait(5)
        self.folder.cleanup()


ZYGOTES: dict[tuple, Zygote] = {}
STARTING = threading.Lock()


def zygote(seconds: float, max_output: int) -> Zygote:
    key = os.getpid(), seconds, max_output
    with STARTING:
        if key not in ZYGOTES or ZYGOTES[key].process.poll() is not None:
            ZYGOTES[key] = Zygote(seconds, max_output)
            atexit.register(ZYGOTES[key].close)
        return ZYGOTES[key]


class Sandbox:
    def __init__(self, seconds: float = 1.0, max_output: int = 1000):
        self.seconds, self.max_output = seconds, max_output
        self.line = None
        self.turn = 0

    def start(self) -> None:
        self.zygote = zygote(self.seconds, self.max_output)
        self.line, self.pid = self.zygote.fork()
        self.buffer = b""

    def close(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None
            self.zygote.kill(self.pid)

    def run(self, code: str, answer: Callable[[str, dict], object]) -> str:
        """Runs the code and returns what it printed; `answer(name, kwargs)` answers its calls."""
        if self.line is None:
            self.start()
        self.turn += 1
        deadline = time.monotonic() + self.seconds + 0.5
        calls = 0
        try:
            self.send({"run": code, "turn": self.turn}, deadline)
            while True:
                message = self.receive(deadline)
                if message.keys() == {"done", "output"}:
                    if message["done"] != self.turn or type(message["output"]) is not str or self.buffer:
                        raise ValueError("it spoke out of turn")
                    return message["output"][: self.max_output]
                if message.keys() != {"call", "kwargs"}:
                    raise ValueError("it spoke out of turn")
                calls += 1
                name, kwargs = message["call"], message["kwargs"]
                if type(name) is not str or type(kwargs) is not dict:
                    raise ValueError("not a call")
                if calls > MAX_CALLS:
                    raise ValueError("too many calls")
                try:
                    reply = {"result": answer(name, kwargs)}
                except Refused as error:
                    reply = {"error": str(error)}
                self.send(reply, deadline)
        except Finished:
            self.close()
            return ""
        except TimeoutError:
            why = f"the code ran for more than {self.seconds:g} s"
        except (OSError, ValueError, RecursionError) as error:
            why = str(error)
        self.close()
        return f"Stopped: {why}. Python was started again, all variables are gone."

    def send(self, message: dict, deadline: float) -> None:
        self.line.settimeout(max(0.001, deadline - time.monotonic()))
        self.line.sendall(json.dumps(message).encode("ascii") + b"\n")

    def receive(self, deadline: float) -> dict:
        parts = self.buffer
        while (end := parts.find(b"\n")) < 0:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if len(parts) > MAX_LINE:
                raise ValueError("too long a line")
            self.line.settimeout(left)
            data = self.line.recv(65536)
            if not data:
                raise OSError("it ended")
            parts += data
        self.buffer = parts[end + 1 :]
        message = json.loads(parts[:end])
        if type(message) is not dict:
            raise ValueError("not an object")
        return message
