"""sandbox_child.py when the wall of Python has fallen: what native code reaches then, wall by wall.

A process plays the training, one the zygote, two its children; one of these attacks with the C library. Each
of Landlock and seccomp is switched off in turn, as root and as an ordinary user. The table that comes out is
that of docs/sandbox.md:

    python tests/sandbox/test_sandbox_walls.py
"""

import ctypes
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for the table

from envs.worlds.apps import sandbox_child  # noqa: E402

NOBODY = 65534
WALLS = {"neither": [], "Landlock": ["landlock"], "seccomp": ["seccomp"], "both": ["landlock", "seccomp"]}

# The training's process. Its arguments: the walls, a folder with the file `precious`, and who it is to be.
SCRIPT = """
import ctypes, json, os, signal, socket, sys
import sandbox_child as child
walls, folder, user = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
training, precious = os.getpid(), os.path.join(folder, "precious").encode()
secret = ctypes.create_string_buffer(b"rosebud")
libc = ctypes.CDLL(None, use_errno=True)
if user != os.getuid():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    libc.prctl(4, 1, 0, 0, 0)  # may be traced, as one that was this user from the start
libc.ptrace.argtypes, libc.ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
def reads(pid):
    target = ctypes.create_string_buffer(7)
    here, there = Span(ctypes.addressof(target), 7), Span(ctypes.addressof(secret), 7)
    libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return target.raw == b"rosebud"
def traces(pid):
    return libc.ptrace(0x4206, pid, 0, 0) == 0  # PTRACE_SEIZE
def limits(pid):
    return libc.prlimit(pid, 4, (ctypes.c_ulong * 2)(0, 0), None) == 0  # size of a core file
def signals_by_descriptor(pid):
    libc.fcntl(0, 10, signal.SIGUSR1)  # F_SETSIG
    owned = libc.fcntl(0, 8, pid) == 0  # F_SETOWN
    libc.fcntl(0, 4, os.O_ASYNC)
    return owned
def attack(zygote, sibling):
    permissions = os.stat(precious).st_mode if os.path.exists(precious) else None
    return {
        "limits of the training": limits(training),
        "limits of a sibling": limits(sibling),
        "signal to the training": libc.kill(training, 0) == 0,
        "signal to the zygote": libc.kill(zygote, 0) == 0,
        "signal to a sibling": libc.kill(sibling, 0) == 0,
        "trace the training": reads(training) or traces(training),
        "trace the zygote": reads(zygote) or traces(zygote),
        "trace a sibling": reads(sibling) or traces(sibling),
        "priority of the training": libc.setpriority(0, training, 19) == 0,
        "shared memory": libc.shmget(0, 1 << 20, 0o1600),
        "semaphores": libc.semget(0, 1, 0o1600),
        "message queues": libc.msgget(0, 0o1600),
        "memory as a file": libc.memfd_create(b"x", 0) >= 0,
        "open a file": libc.open(precious, 0) >= 0,
        "file: permissions": permissions is not None and libc.chmod(precious, 0o600) == 0,
        "file: times": libc.utimes(precious, None) == 0,
        "file: cut": libc.truncate(precious, ctypes.c_long(1)) == 0,
        "file: move": libc.rename(precious, precious + b"2") == 0,
        "file: remove": libc.unlink(precious + b"2") == 0 or libc.unlink(precious) == 0,
        "socket": libc.socket(2, 1, 0) >= 0,
        "process": libc.fork() > 0,
        "signal by a descriptor": signals_by_descriptor(training),
    }
struck = []
signal.signal(signal.SIGUSR1, lambda *_: struck.append(1))
(ours, line), (here, there) = socket.socketpair(), socket.socketpair()
shown, kept = os.pipe()
if (zygote := os.fork()) == 0:
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert all(getattr(child, wall)(libc) for wall in walls)
    if os.getuid() == 0:
        os.chroot(folder)
    system = child.system_calls()
    if (sibling := os.fork()) == 0:
        child.confine(system, there.fileno(), 2**30, 5)
        os.read(0, 1)
        os._exit(0)
    there.close()
    if os.fork() == 0:
        child.confine(system, line.fileno(), 2**30, 5)
        os.write(0, json.dumps(attack(os.getppid(), sibling)).encode())
        one = ctypes.create_string_buffer(1)
        while libc.recv(0, one, 1, socket.MSG_DONTWAIT) < 0:
            pass  # who waits for it in the kernel gets no signal
        os._exit(0)
    os.read(shown, 1)
    child.end(system, sibling)
    os.waitpid(sibling, 0)
    os._exit(0)
line.close()
found = json.loads(ours.recv(65536))
ours.send(b"x")  # which wakes the attacker, and whoever is to be signalled when something comes
os.write(kept, b"x")
os.waitpid(zygote, 0)
found["signal by a descriptor"] = bool(struck)
for name, remove in {"shared memory": libc.shmctl, "message queues": libc.msgctl}.items():
    if found[name] >= 0:
        remove(found[name], 0, None)
    found[name] = found[name] >= 0
if found["semaphores"] >= 0:
    libc.semctl(found["semaphores"], 0, 0)
found["semaphores"] = found["semaphores"] >= 0
print(json.dumps(found))
"""


@lru_cache
def reached(user: int, walls: str) -> dict[str, bool]:
    """Which attacks succeed."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "envs/worlds/apps/sandbox_child.py", folder)
        Path(folder, "precious").write_text("precious")
        for path in (folder, *Path(folder).iterdir()):
            os.chown(path, user, user)
        command = [sys.executable, "-c", SCRIPT, json.dumps(WALLS[walls]), folder, str(user)]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0 and result.stdout, result.stderr
    return json.loads(result.stdout)


def users() -> list[int]:
    return [0, NOBODY] if os.getuid() == 0 else [os.getuid()]


def version_of_landlock() -> int:
    return ctypes.CDLL(None).syscall(444, None, 0, 1) if sys.platform == "linux" else -1


linux = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
each_user = pytest.mark.parametrize("user", users(), ids=lambda user: "ordinary" if user else "root")
HELD_BY_LIMITS = {"memory as a file", "open a file", "socket", "process"}
OTHERS = {"training", "zygote", "sibling", "descriptor"}


@linux
@each_user
def test_with_both_walls_native_code_reaches_nothing(user):
    if version_of_landlock() < 1 or os.uname().machine not in sandbox_child.MACHINES:
        pytest.skip("this machine lacks Landlock or seccomp")
    found = reached(user, "both")
    assert len(found) == 22 and not any(found.values()), found


@linux
@each_user
def test_seccomp_alone_holds_all_of_it(user):
    if os.uname().machine not in sandbox_child.MACHINES:
        pytest.skip("no table of this processor's system calls")
    assert not any(reached(user, "seccomp").values())


@linux
@each_user
def test_landlock_alone_holds_files_and_the_training(user):
    version = version_of_landlock()
    if version < 6:
        pytest.skip("this kernel's Landlock knows no signals")
    found = {name for name, got in reached(user, "Landlock").items() if got}
    held = {"trace the training", "signal to the training", "signal by a descriptor"}
    held |= {"file: cut", "file: move", "file: remove"} | HELD_BY_LIMITS
    assert not found & held
    assert {"shared memory", "semaphores", "message queues"} <= found, "why there is seccomp"


@linux
@each_user
def test_the_attacks_are_real(user):
    """Without both walls they succeed where only the user is the same: else they would show nothing."""
    found = {name for name, got in reached(user, "neither").items() if got}
    assert not found & HELD_BY_LIMITS
    assert {"shared memory", "semaphores", "message queues"} <= found
    if user:
        assert {"limits of the training", "signal to the training", "signal to the zygote"} <= found
        assert {"signal to a sibling", "signal by a descriptor", "priority of the training"} <= found
        assert {name for name in reached(user, "neither") if name.startswith("file")} <= found


@linux
def test_the_numbers_are_those_of_the_kernels_headers():
    headers = {
        0: [*Path("/usr/include").glob("*/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")],
        1: [Path("/usr/include/asm-generic/unistd.h")],
    }
    checked = 0
    for column, paths in headers.items():
        for path in filter(Path.exists, paths):
            text = path.read_text()
            if column == 0 and "__NR_arch_prctl" not in text:
                continue  # another processor's
            numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text))
            numbers.setdefault("newfstatat", numbers.get("fstatat"))
            for name, pair in sandbox_child.CALLS.items():
                assert int(numbers.get(name) or -1) == (-1 if pair[column] is None else pair[column]), name
                checked += 1
    if not checked:
        pytest.skip("no headers of Linux here: apt install linux-libc-dev")


def run_filter(program: bytes, arch: int, number: int, arguments: tuple = ()) -> bool:
    """Whether the filter allows a call: the kernel's machine, written anew."""
    words = [number, arch, 0, 0]
    for value in (*arguments, *[0] * (6 - len(arguments))):
        words += [value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF]
    instructions = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    at = word = 0
    while True:  # until it returns
        code, if_true, if_false, value = instructions[at]
        at += 1
        if code == 0x06:
            return value == 0x7FFF0000
        if code == 0x20:
            word = words[value // 4]
        else:
            at += if_true if (word == value if code == 0x15 else word & value) else if_false


@pytest.mark.parametrize("machine", sandbox_child.MACHINES)
def test_the_filter_allows_the_table_and_nothing_else(machine):
    column, arch = sandbox_child.MACHINES[machine]
    program = sandbox_child.make_filter(machine)
    assert len(program) // 8 < 4096, "the kernel takes no longer ones"
    known = {pair[column] for pair in sandbox_child.CALLS.values()} - {None}
    fine = {n for n in range(1000) if run_filter(program, arch, n, (0, 1))}
    assert fine == known - {sandbox_child.CALLS["ioctl"][column]}
    assert not any(run_filter(program, arch ^ 1, n) for n in range(1000)), "another processor's calls"
    assert not run_filter(program, arch, 0x40000000), "a call of x32"
    for name, (argument, values) in sandbox_child.ARGUMENTS.items():
        number = sandbox_child.CALLS[name][column]
        for value in {*values, *range(4000), 1 << 31}:
            given = (0,) * argument + (value,)
            assert run_filter(program, arch, number, given) == (value in values)
    fork, thread = 0x01200011, 0x003D0F00
    clone = sandbox_child.CALLS["clone"][column]
    assert run_filter(program, arch, clone, (fork,)) and not run_filter(program, arch, clone, (thread,))
    assert not run_filter(program, arch, clone, (fork | 0x10000000,)), "a namespace of users"


def table() -> str:
    """That of docs/sandbox.md."""
    columns = {
        f"{'ordinary user' if user else 'root'}, {walls}": reached(user, walls)
        for user in reversed(users())
        for walls in WALLS
    }
    lines = ["| attack | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in next(iter(columns.values())):
        cells = ["reached" if found[name] else "held" for found in columns.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
