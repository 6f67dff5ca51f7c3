"""The far end of envs/sandbox.py: where an agent's code is executed. Started by it, never imported.

    zygote    one of it. It loads what agents may import, forgets what could do harm, and forks when asked to
    child     runs the code of one agent, turn after turn, and keeps its variables. Its only open descriptor
              is the line to the host, and it holds no data: `apis.app.call(...)` asks the host

On the line are JSON objects, each on a line of its own. The host says {"run": code, "turn": n}; the child
asks {"call": "app.call", "kwargs": {...}} and is told {"result": ...} or {"error": "..."}, any number of
times, and ends the turn with {"done": n, "output": "..."}. Before the first turn it says {"pid": its process,
"number": n}, where n is the zygote's number of it.

Three walls, each enough for what an agent is likely to try:

    Python    functions that reach the system are deleted from all modules, `import` finds what is loaded
              already, and an audit hook refuses every event that ordinary code does not cause: files, frames,
              code objects, ...
    system    no second descriptor, process or thread; little memory and time; on Linux no file can be changed
              and no process be reached but its like; as root also an empty root folder and a user of its own.
              This holds for native code, too
    host      believes nothing that comes along the line (envs/sandbox.py)
"""

import _signal
import _socket
import builtins
import gc
import json
import os
import posix
import resource
import sys
import time
import types
import warnings
from _ast import Expr, Expression
from _ast import PyCF_ONLY_AST as PARSE
from builtins import compile, eval, exec, len, repr, type  # ours, whatever agents make of theirs
from contextlib import suppress

# What agents may import: all of it is loaded before the first child exists, and nothing can be loaded
# afterwards.
MODULES = [
    "ast", "bisect", "collections", "collections.abc", "copy", "datetime", "functools", "heapq", "itertools",
    "json",
    "math", "operator", "random", "re", "string", "textwrap", "time",
]  # fmt: skip
# The functions of these modules are deleted wherever a loaded module holds them, except for the harmless ones
# named.
REACHING = {
    "posix": "fspath",
    "io": "",
    "_io": "",
    "_thread": "allocate_lock get_ident",
    "_signal": "default_int_handler",
    "_socket": "",
    "_imp": "acquire_lock release_lock lock_held",
    "sys": "exc_info excepthook exit getrecursionlimit getsizeof intern",
    "sys.monitoring": "",
    "gc": "",
    "marshal": "",
    "resource": "",
    "_locale": "",
    "time": "asctime ctime gmtime localtime mktime monotonic perf_counter process_time strftime strptime "
    "time time_ns",
}
# Audit events of ordinary code and of ours, see https://docs.python.org/3/library/audit_events.html
ORDINARY = frozenset(["compile", "exec", "builtins.id", "sys.unraisablehook", "resource.setrlimit"])
NOBODY = 65534  # the user and the group of that name, also where they have no name
# from here on users and groups whom nobody is: a child is this plus the number of its process
USERS = 3_000_000_000
MAX_LINE = 100_000  # bytes of a line to the host, which reads no longer ones

# ------------------------------------------------------------------------------------- 1. the zygote


def lock_in() -> None:
    """Landlock, for good, for this process and all that come from it: they change no file, connect nowhere by
    TCP, and trace or signal no process but each other. Linux has the first from 5.13 on, TCP from 6.7 and
    signals from 6.12 on.

    What a kernel does not know is left out: it is one wall of several. Source:
    docs.kernel.org/userspace-api/landlock
    """
    import ctypes  # agents' code could do much with it; the process in which that runs never has it
    import struct

    libc = ctypes.CDLL(None)
    create, restrict = 444, 446  # system calls, of the same numbers on all processors
    version = libc.syscall(create, None, 0, 1)
    if version >= 1:
        # 1 is to write, 4 to 12 to remove and make, 13 to move, 14 to cut off
        last = {1: 12, 2: 13}.get(version, 14)
        rules = struct.pack("QQQ", sum(1 << right for right in (1, *range(4, last + 1))), 0b11, 0b11)
        rules = rules[: 8 if version < 4 else 16 if version < 6 else 24]
        ruleset = libc.syscall(create, rules, ctypes.c_size_t(len(rules)), 0)
        # programs bring no rights with them; without this, only root may do what follows
        libc.prctl(38, 1, 0, 0, 0)
        libc.syscall(restrict, ruleset, 0)


def system_calls() -> types.SimpleNamespace:
    """What `zygote` needs of that which reaches the system,
    for it to hold while the modules forget the rest."""
    names = (
        "fork kill waitpid _exit write getpid getuid chroot dup2 close closerange setgroups setgid "
        "setuid setrlimit"
    )
    known = vars(posix) | vars(resource)
    limits = [name for name in known if name.startswith("RLIMIT_")]
    return types.SimpleNamespace(**{name: known[name] for name in [*names.split(), "WNOHANG", *limits]})


def load() -> None:
    """Imports what agents may import."""
    os.register_at_fork = lambda **hooks: None  # with which random would draw a new seed in every child
    for module in MODULES:
        __import__(module)
    sys.modules["random"].seed(0)


def zygote(system: types.SimpleNamespace, kept: list, control: int, memory: int, cpu_seconds: int) -> None:
    """Obeys the host: "fork", which comes with a descriptor, and "kill PID". Returns in children only.

    `system` is held by this frame and by no other, and a child leaves it; `kept` are the functions that a
    child needs. `memory` in bytes and `cpu_seconds` bound each child.
    """
    line = _socket.socket(fileno=control)
    if system.getuid() == 0:
        with suppress(OSError):  # some containers do not let their root do this
            system.chroot(".")  # the host has started us in an empty folder
        if (trial := system.fork()) == 0:
            drop_root(system)
            system._exit(system.getuid() == 0)
        if system.waitpid(trial, 0)[1]:
            system.write(2, b"sandbox: this root cannot become another user: agents' code runs as root\n")
    forget(system, kept)
    children, number, heard = {}, 0, b""
    line.sendall(b"ready\n")
    while True:
        data, ancillary, _, _ = line.recvmsg(4096, 64)  # never more than one descriptor comes with the data
        *commands, heard = (heard + data).split(b"\n")
        for command in commands:
            if command == b"fork":
                theirs = int.from_bytes(ancillary[0][2], sys.byteorder)
                number += 1
                pid = system.fork()
                if pid == 0:
                    line.detach()
                    confine(system, theirs, memory, cpu_seconds)
                    system.write(0, b'{"pid": %d, "number": %d}\n' % (system.getpid(), number))
                    return
                system.close(theirs)
                children[number] = pid
            elif pid := children.get(int(command.removeprefix(b"kill "))):
                # One that has ended keeps its process number until waitpid: the signal cannot hit a stranger.
                system.kill(pid, 9)
        children = {n: pid for n, pid in children.items() if not system.waitpid(pid, system.WNOHANG)[0]}
        if not data:  # the host is gone
            for pid in children.values():
                system.kill(pid, 9)
            system._exit(0)


def drop_root(system: types.SimpleNamespace) -> None:
    """Becomes a user of its own, or where the system has no such numbers "nobody";
    some containers allow neither."""
    with suppress(OSError):
        system.setgroups([])
    for user in (USERS + system.getpid(), NOBODY):
        with suppress(OSError):
            system.setgid(user)
            system.setuid(user)
            return


def confine(system: types.SimpleNamespace, line: int, memory: int, cpu_seconds: int) -> None:
    """Gives up, for good, all that this process can do without. `line` becomes descriptor 0."""
    system.dup2(line, 0)
    system.closerange(1, 4096)
    if system.getuid() == 0:
        drop_root(system)
    limits = {
        system.RLIMIT_AS: memory,
        system.RLIMIT_CPU: cpu_seconds,
        system.RLIMIT_FSIZE: 0,
        system.RLIMIT_CORE: 0,
        system.RLIMIT_NPROC: 0,  # no process and no thread, however many others this user has
        system.RLIMIT_NOFILE: 0,  # descriptor 0 stays, nothing can be opened: no file, no socket, no pipe
    }
    for which, limit in limits.items():
        system.setrlimit(which, (limit, limit))


def reaches_out(thing) -> bool:
    """Whether it is a function that agents must not have."""
    owner = thing.__module__ if isinstance(thing, types.BuiltinFunctionType) else None
    return owner in REACHING and thing.__name__ not in REACHING[owner].split()


def forget(system: types.SimpleNamespace, kept: list) -> None:
    """Deletes what reaches the system from all modules, and all modules but MODULES from what `import` finds.

    Raises RuntimeError if anything but `system` and `kept` still holds such a function afterwards.
    """
    get_objects, get_referrers, freeze = gc.get_objects, gc.get_referrers, gc.freeze
    del builtins.input, builtins.breakpoint  # builtins.open is io.open and goes with it
    time.sleep = lambda seconds: None  # what is limited is the time of the CPU
    for name in set(sys.modules) - {*MODULES, "builtins", "sys"}:
        del sys.modules[name]
    sys.argv.clear()
    sys.path.clear()

    mine = [value for value in vars(system).values() if reaches_out(value)] + kept
    functions = [thing for thing in get_objects() if reaches_out(thing)]
    # the dicts of modules, the interpreter's copies of them, sets in os
    for holder in get_referrers(*functions):
        if type(holder) is dict and holder is not vars(system):
            for name in [name for name, value in holder.items() if reaches_out(value)]:
                del holder[name]
        elif type(holder) is set:
            holder.difference_update(functions)
    del functions
    numbers = {id(value) for value in [*mine, get_objects, get_referrers, freeze]}
    if others := [thing for thing in get_objects() if reaches_out(thing) and id(thing) not in numbers]:
        raise RuntimeError(f"not forgotten: {others}")
    known = [vars(system)], (kept, mine)  # a call's arguments are a tuple, and hold them, too
    strangers = [x for x in get_referrers(*mine) if x not in known[0] and list(x) not in known[1]]
    if strangers:
        raise RuntimeError(f"not forgotten by: {strangers}")
    freeze()  # the collector would write to every page, and the children share them


def refuse(event, args, ordinary=ORDINARY, denied=PermissionError, absent=ImportError):
    """The audit hook.

    All it needs is in its arguments, out of reach: its globals can be changed by the agent.
    """
    if event not in ordinary:
        if event == "import":
            raise absent(f"there is no module {args[0]} here")
        raise denied(f"{event} is not allowed here")


# -------------------------------------------------------------------------------------- 2. the child


class ApiError(Exception):
    """The host refuses a call; the message says why."""


class Names:
    """`apis` and all that hangs on it: attributes make up the name of a call,
    and calling it asks the host."""

    def __init__(self, ask, name: str = ""):
        self._ask, self._name = ask, name

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return Names(self._ask, f"{self._name}.{name}" if self._name else name)

    def __call__(self, *args, **kwargs):
        if args:
            raise TypeError(f"{self._name} takes keyword arguments only")
        return self._ask(self._name, kwargs)

    def __repr__(self):
        return f"apis.{self._name}" if self._name else "apis"


class Output:
    """What `print` writes to. What goes beyond the limit is lost."""

    def __init__(self, limit: int):
        self.parts, self.left = [], limit

    def write(self, text: str) -> int:
        if self.left > 0:
            self.parts.append(text[: self.left])
            self.left -= len(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def serve(
    read, write, set_timer, set_handler, set_limit, cpu_seconds: int, seconds: float, max_output: int
) -> None:
    """The life of a child: reads a turn, runs it, answers, until the host is gone."""
    received, asking = bytearray(), []

    def receive(loads=json.loads) -> dict:
        while (end := received.find(b"\n")) < 0:
            data = read(0, 65536)
            if not data:
                raise EOFError
            received.extend(data)
        line = received[:end]
        del received[: end + 1]
        return loads(line)

    def send(message: dict, dumps=json.dumps) -> None:
        data = dumps(message, allow_nan=False).encode("ascii") + b"\n"
        if len(data) > MAX_LINE:
            raise ApiError("too much text")
        while data:
            data = data[write(0, data) :]

    def ask(name: str, kwargs: dict):
        asking.append(name)
        try:
            send({"call": name, "kwargs": kwargs})
            reply = receive()
        finally:
            asking.clear()
        if "error" in reply:
            raise ApiError(reply["error"])
        return reply["result"]

    def alarm(*_):
        # Not between a question and its answer, which the next question would take for its own. It rings
        # again.
        if not asking:
            raise TimeoutError(f"the code ran for more than {seconds:g} s")

    set_handler(_signal.SIGPROF, alarm)
    variables = {"__name__": "__main__"}
    apis, execute, new_output = Names(ask), run, Output  # agents can reach the module's
    while True:
        while "run" not in (message := receive()):
            """The answer to a call that the code has made behind our back."""
        variables["apis"] = apis  # whatever the last turn has made of it
        output = sys.stdout = sys.stderr = new_output(max_output)
        # Two clocks of CPU time: an alarm, which leaves the variables as they are, and for code that swallows
        # it or that does not come back to Python the kernel, which ends the process.
        set_limit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 2, cpu_seconds))
        set_timer(_signal.ITIMER_PROF, seconds, 0.1)
        execute(message["run"], variables, output)
        set_timer(_signal.ITIMER_PROF, 0)
        send({"done": message["turn"], "output": "".join(output.parts)})


def run(code: str, variables: dict, output: Output) -> None:
    """Runs the code. The value of a last line that is an expression is shown, as in a notebook;
    an error in one line.

    An error whose own text goes wrong is raised, and ends the child.
    """
    try:
        tree = compile(code, "<code>", "exec", PARSE)
        last = Expression(tree.body.pop().value) if tree.body and type(tree.body[-1]) is Expr else None
        if tree.body:
            exec(compile(tree, "<code>", "exec"), variables)
        if last:
            value = eval(compile(last, "<code>", "eval"), variables)
            if value is not None:
                output.write(repr(value))
    except BaseException as error:
        where, trace = None, error.__traceback__
        while trace := trace.tb_next:
            where = where or trace.tb_lineno  # the first line below this function is one of the agent's
        line = f" (line {where})" if where and "\n" in code else ""
        output.write(f"{type(error).__name__}: {error}{line}")


def main() -> None:
    control, memory, cpu_seconds, seconds, max_output, *is_locked_in = sys.argv[1:]
    if sys.platform == "linux" and not is_locked_in:
        with suppress(ImportError, OSError, AttributeError):  # not every Python has ctypes
            lock_in()
        # a new Python, which has never heard of ctypes
        os.execv(sys.executable, [*sys.orig_argv, "locked in"])
    load()
    warnings.simplefilter("ignore")
    # What a child needs to the end. Agents' code that gets hold of these can talk to the host, which it may,
    # and can stop its own clocks, which leaves the host's.
    kept = [posix.read, posix.write, _signal.setitimer, _signal.signal, resource.setrlimit, posix._exit]
    kept.append(sys.addaudithook)
    zygote(system_calls(), kept, int(control), int(memory), int(cpu_seconds))
    *calls, leave, add_hook = kept
    add_hook(refuse)
    try:
        serve(*calls, int(cpu_seconds), float(seconds), int(max_output))
    finally:
        leave(0)  # at once: to take an interpreter down costs more than to start a child


if __name__ == "__main__":
    main()
