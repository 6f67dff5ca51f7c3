"""The far end of sandbox.py: where an agent's code is executed. Started by it, never imported.

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
              and no process be reached (seccomp, Landlock); as root also an empty root folder and a user of
              its own. This holds for native code, too: docs/sandbox.md says what holds where
    host      believes nothing that comes along the line (sandbox.py)
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
ROOM = 2**21  # bytes of memory that no turn can have

# ------------------------------------------------------------------------------------- 1. the zygote


def lock_in() -> list[str]:
    """Landlock and seccomp, for good, for this process and all that come from it.

    Returns what this machine does not have of them: each is one wall of several.
    """
    import ctypes  # agents' code could do much with it; the process in which that runs never has it

    libc = ctypes.CDLL(None)
    # programs bring no rights with them; without this, only root may do what follows
    missing = [] if libc.prctl(38, 1, 0, 0, 0) == 0 else ["no_new_privs"]
    missing += [] if landlock(libc) else ["Landlock"]
    missing += [] if seccomp(libc) else ["seccomp"]
    return missing


def landlock(libc) -> bool:
    """They change no file, connect nowhere by TCP, and trace or signal no process but each other. Linux has
    the first from 5.13 on, TCP from 6.7 and signals from 6.12 on; what a kernel does not know is left out.

    Source: docs.kernel.org/userspace-api/landlock
    """
    import ctypes
    import struct

    create, restrict = 444, 446  # system calls, of the same numbers on all processors
    version = libc.syscall(create, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    # 1 is to write, 4 to 12 to remove and make, 13 to move, 14 to cut off
    last = {1: 12, 2: 13}.get(version, 14)
    rules = struct.pack("QQQ", sum(1 << right for right in (1, *range(4, last + 1))), 0b11, 0b11)
    rules = rules[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc.syscall(create, rules, ctypes.c_size_t(len(rules)), 0)
    return ruleset >= 0 and libc.syscall(restrict, ruleset, 0) == 0


# The system calls that Python needs to start, to fork and to run what agents may import, with their numbers
# on x86-64 and aarch64 (None: has no such call). What the zygote needs and a child does not, to open a
# descriptor and to fork, the child's limits forbid. None of them reaches other processes (kill, ptrace,
# shmget, ...) or changes a file (unlink, chmod, ...).
# Source: asm/unistd_64.h and asm-generic/unistd.h of Linux
CALLS = {
    "read": (0, 63), "write": (1, 64), "setitimer": (38, 103), "prlimit64": (302, 261),
    "rt_sigreturn": (15, 139), "futex": (202, 98), "clock_gettime": (228, 113), "gettimeofday": (96, 169),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233),
    # files: to look, to open, to read. Landlock and the limit of descriptors hold what may be opened.
    "open": (2, None), "openat": (257, 56), "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62),
    "pread64": (17, 67), "stat": (4, None), "lstat": (6, None), "fstat": (5, 80), "newfstatat": (262, 79),
    "statx": (332, 291), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17),
    "ioctl": (16, 29), "fcntl": (72, 25), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    # the zygote's line to the host
    "sendto": (44, 206), "recvfrom": (45, 207), "recvmsg": (47, 212), "getsockname": (51, 204),
    "getsockopt": (55, 209),
    # processes: to become Python, to fork, to end a child by a descriptor that only the zygote can open
    "execve": (59, 221), "clone": (56, 220), "fork": (57, None), "wait4": (61, 260), "exit": (60, 93),
    "exit_group": (231, 94), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getrusage": (98, 165),
    "set_tid_address": (218, 96), "set_robust_list": (273, 99), "rseq": (334, 293),
    "arch_prctl": (158, None), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128),
    # users
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "setuid": (105, 146), "setgid": (106, 144), "setgroups": (116, 159), "chroot": (161, 51),
    # the machine
    "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278), "clock_getres": (229, 114),
}  # fmt: skip
# Where an argument decides: its number, and the values that it may have.
ARGUMENTS = {
    "prlimit64": (0, [0]),  # limits of itself, of no other process
    "ioctl": (1, [0x5401, 0x5413, 0x5450, 0x5451]),  # a terminal? closed by exec? others send signals
    "fcntl": (1, [0, 1, 2, 3, 1030]),  # to copy a descriptor and its flags: F_SETOWN sends signals
}
NO_FORK = 0xFEDFFF00  # flags of clone other than those of fork: threads, namespaces, shared memory
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of CALLS; the kernel's name of it


def make_filter(machine: str) -> bytes:
    """The program that the kernel runs at each system call. All calls but those of CALLS seem not to exist.

    Source: docs.kernel.org/userspace-api/seccomp_filter
    """
    import struct

    load_word, equal, any_bit, end = 0x20, 0x15, 0x45, 0x06
    allow, absent = 0x7FFF0000, 0x00050000 | 38  # 38: ENOSYS, which libraries know how to live with
    column, arch = MACHINES[machine]
    # (code, jump if true, jump if false, value); first whether the call is one of this machine's
    program = [(load_word, 0, 0, 4), (equal, 1, 0, arch), (end, 0, 0, absent), (load_word, 0, 0, 0)]
    for name, numbers in CALLS.items():
        number, checks = numbers[column], []
        if number is None:
            continue
        if name == "clone":
            checks = [(load_word, 0, 0, 16), (any_bit, 0, 1, NO_FORK), (end, 0, 0, absent)]
        elif name in ARGUMENTS:
            argument, values = ARGUMENTS[name]
            left = range(len(values), 0, -1)
            checks = [(load_word, 0, 0, 16 + 8 * argument)]
            checks += [(equal, n, 0, value) for n, value in zip(left, values, strict=True)]
            checks += [(end, 0, 0, absent)]
        program += [(equal, 0, len(checks) + 1, number), *checks, (end, 0, 0, allow)]
    program.append((end, 0, 0, absent))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def seccomp(libc) -> bool:
    """They make no system call but those of CALLS, which reach no other process and change no file."""
    import ctypes
    import struct

    machine = posix.uname().machine
    if machine not in MACHINES or struct.calcsize("P") != 8:
        return False
    try:
        posix.close(posix.pidfd_open(posix.getpid()))  # without it the zygote must kill by number
    except (AttributeError, OSError):
        return False
    text = make_filter(machine)
    program = ctypes.create_string_buffer(text, len(text))
    head = ctypes.create_string_buffer(struct.pack("HP", len(text) // 8, ctypes.addressof(program)))
    return libc.prctl(22, 2, ctypes.byref(head), 0, 0) == 0


def system_calls() -> types.SimpleNamespace:
    """What `zygote` needs of that which reaches the system,
    for it to hold while the modules forget the rest."""
    names = (
        "fork kill pidfd_open pidfd_send_signal waitpid _exit write getpid getuid chroot dup2 close "
        "closerange setgroups setgid setuid setrlimit getrusage RUSAGE_CHILDREN WNOHANG"
    )
    known = vars(posix) | vars(resource) | vars(_signal)
    limits = [name for name in known if name.startswith("RLIMIT_")]
    # macOS has no pidfd_open
    return types.SimpleNamespace(**{name: known[name] for name in [*names.split(), *limits] if name in known})


def load() -> None:
    """Imports what agents may import."""
    os.register_at_fork = lambda **hooks: None  # with which random would draw a new seed in every child
    for module in MODULES:
        __import__(module)
    sys.modules["random"].seed(0)


def zygote(system: types.SimpleNamespace, kept: list, control: int, memory: int) -> int:
    """Obeys the host. Returns in children only: the seconds of CPU time that one has.

        fork SECONDS    comes with a descriptor, the line of the child
        stop NUMBER     ends a child and says how much CPU time it has used
        kill NUMBER     ends a child

    `system` is held by this frame and by no other, and a child leaves it; `kept` are the functions that a
    child needs. `memory` in bytes bounds each child.
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
    children, used, number, heard, lines = {}, {}, 0, b"", []
    line.sendall(b"ready\n")
    while True:
        data, ancillary, _, _ = line.recvmsg(4096, 64)
        # A command may come in pieces, and its descriptor with the first of them.
        lines += [descriptor for _, _, found in ancillary for descriptor in memoryview(found).cast("i")]
        *commands, heard = (heard + data).split(b"\n")
        for command in commands:
            verb, _, argument = command.partition(b" ")
            if verb == b"fork":
                number, theirs = number + 1, lines.pop(0)
                children[number] = system.fork()
                if children[number] == 0:
                    line.detach()
                    confine(system, theirs, memory, int(argument))
                    system.write(0, b'{"pid": %d, "number": %d}\n' % (system.getpid(), number))
                    return int(argument)
                system.close(theirs)
                continue
            pid, spent = children.pop(int(argument), 0), used.pop(int(argument), 0.0)
            if pid:
                end(system, pid)
            if verb == b"stop":
                line.sendall(b"%f\n" % (wait(system, pid)[1] if pid else spent))
        ended, spent = wait(system, -1, system.WNOHANG)
        while ended:
            for n in [n for n, pid in children.items() if pid == ended]:
                used[n] = spent  # until the host asks
                del children[n]
            ended, spent = wait(system, -1, system.WNOHANG)
        if not data:  # the host is gone
            for pid in children.values():
                end(system, pid)
            system._exit(0)


def end(system: types.SimpleNamespace, pid: int) -> None:
    """Kills a child that nobody has waited for yet: its number cannot be a stranger's.

    By a descriptor, which a child cannot open: so seccomp need not allow to kill by number.
    """
    try:
        handle = system.pidfd_open(pid)
        system.pidfd_send_signal(handle, 9)
        system.close(handle)
    except (AttributeError, OSError):  # macOS, or a kernel without; then there is no seccomp here either
        with suppress(OSError):  # a root without this right: the clock of the kernel ends it
            system.kill(pid, 9)


def wait(system: types.SimpleNamespace, pid: int, options: int = 0) -> tuple[int, float]:
    """Waits for a child, or with -1 for any: which it was, 0 for none, and what CPU time it has used."""
    before = system.getrusage(system.RUSAGE_CHILDREN)
    try:
        ended = system.waitpid(pid, options)[0]
    except ChildProcessError:  # there is none
        return 0, 0.0
    after = system.getrusage(system.RUSAGE_CHILDREN)
    return ended, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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

    def __call__(self, /, *args, **kwargs):  # a parameter may be called self
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
    read,
    write,
    set_timer,
    set_handler,
    set_limit,
    memory: int,
    cpu_seconds: int,
    seconds: float,
    max_output: int,
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
    # Agents can reach all that modules hold, and change it; of this function they reach what `ask` needs.
    apis, execute, new_output, streams = Names(ask), run, Output, sys
    cpu_time, cpu_limit, cpu_timer = time.process_time, resource.RLIMIT_CPU, _signal.ITIMER_PROF
    whole, memory_limit = int, resource.RLIMIT_AS
    less, all_of_it = (memory - ROOM, memory), (memory, memory)
    while True:
        while "run" not in (message := receive()):
            """The answer to a call that the code has made behind our back."""
        variables["apis"] = apis  # whatever the last turn has made of it
        output = streams.stdout = streams.stderr = new_output(max_output)
        # Two clocks of CPU time: an alarm, which leaves the variables as they are, and for code that swallows
        # it or that does not come back to Python the kernel, which ends the process.
        last = whole(cpu_time() + seconds) + 2
        set_limit(cpu_limit, (last if last < cpu_seconds else cpu_seconds, cpu_seconds))
        set_timer(cpu_timer, seconds, 0.1)
        set_limit(memory_limit, less)  # so that a turn that fills it leaves enough to read the next one
        execute(message["run"], variables, output)
        set_limit(memory_limit, all_of_it)
        set_timer(cpu_timer, 0)
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
    control, memory, seconds, max_output, *is_locked_in = sys.argv[1:]
    if not is_locked_in:
        missing = ["Landlock", "seccomp"]
        if sys.platform == "linux":
            with suppress(ImportError, OSError, AttributeError):  # not every Python has ctypes
                missing = lock_in()
        for wall in missing:
            print(f"sandbox: no {wall} on this machine, see docs/sandbox.md", file=sys.stderr)
        # a new Python, which has never heard of ctypes
        os.execv(sys.executable, [*sys.orig_argv, "locked in"])
    load()
    warnings.simplefilter("ignore")
    # What a child needs to the end. Agents' code that gets hold of these can talk to the host, which it may,
    # and can stop its own clocks, which leaves the host's.
    kept = [posix.read, posix.write, _signal.setitimer, _signal.signal, resource.setrlimit, posix._exit]
    kept.append(sys.addaudithook)
    cpu_seconds = zygote(system_calls(), kept, int(control), int(memory))
    *calls, leave, add_hook = kept
    add_hook(refuse)
    try:
        serve(*calls, int(memory), cpu_seconds, float(seconds), int(max_output))
    finally:
        leave(0)  # at once: to take an interpreter down costs more than to start a child


if __name__ == "__main__":
    main()
