"""The far end of envs/sandbox.py, run as `python -I -S` and never imported: where an agent's code is executed.

    zygote    started once. It loads what agents may import, forgets what could do harm, and forks on request
    child     runs the code of one agent, turn after turn, and keeps its variables. Its one open descriptor is the line
              to the host; it holds no data: `apis.app.call(...)` asks the host

On the line are JSON objects, one a line. The host says {"run": code, "turn": n}; the child asks
{"call": "app.call", "kwargs": {...}}, is told {"result": ...} or {"error": "..."}, any number of times, and ends with
{"done": n, "output": "..."}.
"""

import ast
import builtins
import gc
import json
import posix
import resource
import sys
import types
import warnings

import _signal
import _socket

# What agents may import. All of it is loaded before the first child exists; nothing can be loaded afterwards.
MODULES = (
    "bisect collections collections.abc copy datetime functools heapq itertools json math operator random re "
    "statistics string textwrap time"
).split()
for name in MODULES:
    __import__(name)

# The functions of these modules are deleted wherever a loaded module holds them, except for those behind them.
HARMFUL = {
    "posix": "fspath",
    "_io": "",
    "io": "",
    "_thread": "allocate_lock get_ident",
    "_signal": "",
    "_socket": "",
    "_imp": "acquire_lock release_lock lock_held",
    "sys": "excepthook exc_info exit getrecursionlimit getsizeof intern",
    "gc": "",
    "marshal": "",
    "resource": "",
    "_locale": "",
}
# Audit events of ordinary code. All others are refused: https://docs.python.org/3/library/audit_events.html
ORDINARY = frozenset(["compile", "exec", "builtins.id", "time.sleep", "sys.unraisablehook"])
NOBODY = 65534  # the user "nobody"
MAX_CALL = 50_000  # characters of a call's arguments


# ------------------------------------------------------------------------------------ 1. the zygote


def zygote(control: int, memory: int, seconds: int) -> None:
    """Serves "fork" (which comes with a descriptor) and "kill PID" until the host is gone. Returns in children only.

    What could do harm is held by this frame alone, and in a child the frame is gone. `memory` in bytes and `seconds`
    of CPU time bound each child.
    """
    fork, kill, waitpid, leave = posix.fork, posix.kill, posix.waitpid, posix._exit
    dup2, closerange, setrlimit = posix.dup2, posix.closerange, resource.setrlimit
    setgroups, setgid, setuid, root = posix.setgroups, posix.setgid, posix.setuid, posix.getuid() == 0
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,  # no process and no thread, however many others the user has
        resource.RLIMIT_NOFILE: 1,  # descriptor 0 is the line to the host: nothing else can be opened
    }
    line = _socket.socket(fileno=control)
    if root:
        posix.chroot(".")  # the empty folder in which the host has started us
    gc_freeze = gc.freeze
    forget()
    gc_freeze()  # the collector would write to every page, and children share them
    children, dying = set(), set()
    line.sendall(b"ready\n")
    while True:
        message, ancillary, _, _ = line.recvmsg(64, 64)
        if not message:
            break
        dying -= {pid for pid in dying if waitpid(pid, 1)[0]}
        if message.startswith(b"kill "):
            pid = int(message[5:])
            # A process that has ended keeps its number until waitpid: the signal cannot hit another one.
            if pid in children:
                kill(pid, 9)
                children.remove(pid)
                dying.add(pid)
            line.sendall(b"killed\n")
            continue
        theirs = int.from_bytes(ancillary[0][2], sys.byteorder)
        pid = fork()
        if pid == 0:
            line.detach()
            dup2(theirs, 0)
            closerange(1, 4096)
            if root:
                setgroups([])
                setgid(NOBODY)
                setuid(NOBODY)
            for which, limit in limits.items():
                setrlimit(which, (limit, limit))
            return
        closerange(theirs, theirs + 1)
        children.add(pid)
        line.sendall(b"%d\n" % pid)
    for pid in children:
        kill(pid, 9)
    leave(0)


def forget() -> None:
    """Deletes the harmful functions from all modules, and the modules that agents may not import from sys.modules."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            owner = value.__module__ if isinstance(value, types.BuiltinFunctionType) else None
            if owner in HARMFUL and name not in HARMFUL[owner].split():
                delattr(module, name)
    del builtins.input, builtins.breakpoint  # open has gone with io
    for name in set(sys.modules) - {*MODULES, "builtins", "sys"}:
        del sys.modules[name]


def refuse(event, args, ordinary=ORDINARY, modules=", ".join(MODULES), denied=PermissionError, absent=ImportError):
    """The audit hook. All it needs is in its arguments, where agents' code cannot reach it."""
    if event not in ordinary:
        if event == "import":
            raise absent(f"no module {args[0]!r} here; there are {modules}")
        raise denied(f"{event} is not allowed here")


# ------------------------------------------------------------------------------------ 2. the child


class ApiError(Exception):
    """The host refuses a call; the message says why."""


class Names:
    """`apis` and all that hangs on it: attributes make the name of a call, and calling it asks the host."""

    def __init__(self, ask, name: str = ""):
        self._ask, self._name = ask, name

    def __getattr__(self, name: str):
        return Names(self._ask, f"{self._name}.{name}" if self._name else name)

    def __call__(self, *args, **kwargs):
        if args:
            raise TypeError(f"{self._name} takes keyword arguments only")
        return self._ask(self._name, kwargs)

    def __repr__(self):
        return f"apis.{self._name}" if self._name else "apis"


class Output:
    """Where `print` writes to. What goes beyond the limit is lost."""

    def __init__(self, limit: int):
        self.parts, self.left = [], limit

    def write(self, text: str) -> int:
        part = text[: self.left]
        self.parts.append(part)
        self.left -= len(part)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def serve(read, write, set_timer, set_handler, seconds: float, max_output: int) -> None:
    """The life of a child: reads turns and runs them until the host is gone."""
    buffer, state = bytearray(), {"asking": False}
    loads, dumps = json.loads, json.dumps

    def receive() -> dict:
        while (end := buffer.find(b"\n")) < 0:
            data = read(0, 65536)
            if not data:
                raise SystemExit
            buffer.extend(data)
        line = buffer[:end]
        del buffer[: end + 1]
        return loads(line)

    def send(message: dict) -> None:
        data = dumps(message).encode("ascii") + b"\n"
        while data:
            data = data[write(0, data) :]

    def ask(name: str, kwargs: dict):
        if len(dumps(kwargs)) > MAX_CALL:
            raise ApiError(f"{name}: too much text")
        state["asking"] = True
        try:
            send({"call": name, "kwargs": kwargs})
            reply = receive()
        finally:
            state["asking"] = False
        if "error" in reply:
            raise ApiError(reply["error"])
        return reply["result"]

    def on_alarm(*_):
        # Not between a question and its answer, which would then be taken for that of the next. The alarm comes again.
        if not state["asking"]:
            raise TimeoutError(f"the code ran for more than {seconds:g} s")

    set_handler(_signal.SIGALRM, on_alarm)
    variables = {"__name__": "__main__", "__builtins__": builtins, "apis": Names(ask)}
    while True:
        message = receive()
        output = sys.stdout = sys.stderr = Output(max_output)
        try:
            set_timer(0, seconds, 0.1)
            try:
                run(message["run"], variables, output)
            finally:
                set_timer(0, 0)
        except BaseException as error:
            output.write(describe(error))
        send({"done": message["turn"], "output": "".join(output.parts)})


def run(code: str, variables: dict, output: Output) -> None:
    """Runs the code; the value of a last line that is an expression is shown, as in a notebook."""
    tree = ast.parse(code, "<code>")
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    if tree.body:
        exec(compile(tree, "<code>", "exec"), variables)
    if last:
        value = eval(compile(last, "<code>", "eval"), variables)
        if value is not None:
            output.write(repr(value))


def describe(error: BaseException) -> str:
    """One line about an error of the agent's code, which may have been made to go wrong when it is looked at."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return "Error"


def main() -> None:
    # Names of this function, as those of the module are forgotten with the rest.
    read, write, set_timer, set_handler = posix.read, posix.write, _signal.setitimer, _signal.signal
    add_hook = sys.addaudithook
    warnings.simplefilter("ignore")
    control, memory, cpu_seconds, seconds, max_output = sys.argv[1:]
    zygote(int(control), int(memory), int(cpu_seconds))
    add_hook(refuse)
    serve(read, write, set_timer, set_handler, float(seconds), int(max_output))


if __name__ == "__main__":
    main()
