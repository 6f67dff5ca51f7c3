"""envs/worlds/apps/sandbox.py: what hostile code tries, one attack after the other.

Each is held, and the next turn works.
"""

import ctypes
import gc
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from envs.worlds.apps import sandbox as module
from envs.worlds.apps import sandbox_child
from envs.worlds.apps.sandbox import Finished, Refused, Sandbox

ROOT = Path(__file__).parents[2]
APPS = ROOT / "envs/worlds/apps"
SECRET = "rosebud"  # in this process's environment, in a file, and in the objects that answer calls

# Every class there is, by its name: how code without imports reaches for the system.
CLASSES = """
seen, todo = set(), [object]
while todo:
    for c in type.__subclasses__(todo.pop()):
        if c not in seen:
            seen.add(c)
            todo.append(c)
C = {c.__name__: c for c in seen}
"""
# The functions that the stubs use to talk to the host: the way to forge lines.
LINE = """
cell = lambda f, name: [
    c.cell_contents for c in f.__closure__ if getattr(c.cell_contents, '__name__', '') == name][0]
send, receive = cell(apis._ask, 'send'), cell(apis._ask, 'receive')
write, read = cell(send, 'write'), cell(receive, 'read')
"""
# Leaves less than 40 kB, too little to read the next turn.
FILL = """
x = None
for size in (10**6, 10**5, 4 * 10**4):
    try:
        while True: x = x, bytearray(size)
    except MemoryError: pass
"""
STOPPED = r"^Stopped: .* Python starts anew, all variables are gone\.$"
REFUSED = r"PermissionError: .* is not allowed here"
GONE = r"(Attribute|Name|Key|Import)Error"

# name: (code, what the agent reads). FILE is a file with the secret, FOLDER where it lies, PID this process.
ATTACKS = {
    # ------------------------------------------------------------------------------------------ files
    "open": ("open('FILE').read()", GONE),
    "import os": ("import os\nos.listdir('/')", "ImportError: there is no module os here"),
    "import pathlib": ("from pathlib import Path\nPath('FILE').read_text()", GONE),
    "import io": ("import io\nio.open('FILE')", GONE),
    "FileIO": (CLASSES + "C['FileIO']('FILE').read()", REFUSED),
    "FileIO to write": (CLASSES + "C['FileIO']('FOLDER/new', 'w').write(b'x')", REFUSED),
    "FileIO on the line": (CLASSES + "C['FileIO'](0).read()", REFUSED),
    "codecs.open": ("import json\njson.codecs.open('FILE')", GONE),
    "a loader of source": (CLASSES + "C['SourceFileLoader']('x', 'FILE').get_data('FILE')", GONE),
    "a loader of archives": (CLASSES + "C['zipimporter']('FILE')", GONE),
    "os behind random": ("import random\nrandom._os.listdir('/')", GONE),
    "os behind a class": (CLASSES + "C['_wrap_close'].__init__.__globals__['system']('id')", GONE),
    "os.popen": (CLASSES + "C['_wrap_close'].__init__.__globals__['popen']('id').read()", GONE),
    "codecs.open behind a class": (
        CLASSES + "C['IncrementalEncoder'].__init__.__globals__['open']('FILE').read()", GONE
    ),
    "posix behind the stubs": ("apis._ask.__globals__['posix'].stat('/')", GONE),
    "posix anew": (CLASSES + "C['BuiltinImporter'].load_module('posix')", GONE),
    "posix by its spec": (
        CLASSES + "C['BuiltinImporter'].create_module(C['ModuleSpec']('posix', C['BuiltinImporter']))",
        GONE + "|ImportError",
    ),
    "the project": ("from envs.worlds.apps import make_task", "ImportError: there is no module envs"),
    "the tests of the task": ("import sys\nsys.path.append('FOLDER')\nimport test_apps", GONE),
    # ---------------------------------------------------------------------- sockets, processes, threads
    "import socket": ("import socket", GONE),
    "a socket's class": (CLASSES + "C['socket']()", REFUSED),
    "the line as a socket": (CLASSES + "C['socket'](fileno=0)", REFUSED),
    "import urllib": ("import urllib.request", GONE),
    "import subprocess": ("import subprocess", GONE),
    "import ctypes": ("import ctypes", GONE),
    "import multiprocessing": ("import multiprocessing", GONE),
    "import threading": ("import threading", GONE),
    "a library": (CLASSES +
     "C['ExtensionFileLoader']('x', '/x.so').create_module(C['ModuleSpec']('x', None))",
     GONE),
    "fork": ("apis._ask.__globals__['posix'].fork()", GONE),
    "kill": ("apis._ask.__globals__['posix'].kill(PID, 9)", GONE),
    "the clock of the machine": ("import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)", GONE),
    "signals": ("apis._ask.__globals__['_signal'].signal(27, None)", GONE),
    # ------------------------------------------------------------------------ frames, code, interpreter
    "frame of a traceback": ("try:\n    1 / 0\nexcept Exception as e:\n    x = e\nx.__traceback__.tb_frame",
     REFUSED),
    "frame of a generator": ("(x for x in [1]).gi_frame", REFUSED),
    "frame of a coroutine": ("async def f(): pass\nf().cr_frame", REFUSED),
    "sys._getframe": ("import sys\nsys._getframe(1)", GONE),
    "sys._current_frames": ("import sys\nsys._current_frames()", GONE),
    "sys.settrace": ("import sys\nsys.settrace(print)", GONE),
    "the collector": ("import gc\ngc.get_objects()", GONE),
    "the collector behind the stubs": ("apis._ask.__globals__['gc'].get_objects()", GONE),
    "code of a function": ("(lambda: 1).__code__.replace(co_code=b'')", REFUSED),
    "code anew": ("CodeType = type(compile('1', '', 'eval'))\nCodeType.replace(compile('1', '', 'eval'))",
     REFUSED),
    "function anew": ("type(lambda: 1)(compile('1', '', 'exec'), {})", REFUSED),
    "bytes to code": ("import marshal", GONE),
    "another audit hook": ("import sys\nsys.addaudithook(print)", GONE),
    "the audit hook's words": (
        "apis._ask.__globals__.update(ORDINARY={'open'}, refuse=print)\n" + CLASSES + "C['FileIO']('FILE')",
        REFUSED,
    ),
    "builtins without errors": (
        "import builtins\nbuiltins.PermissionError = int\n" + CLASSES + "C['FileIO']('FILE').read()", REFUSED
    ),
    "the environment": (CLASSES + "dict(C['_wrap_close'].__init__.__globals__['environ'])",
     "PYTHONHASHSEED|Error"),
    # ---------------------------------------------------------------------------------- the host's data
    "fields of the stubs": ("vars(apis), vars(apis.supervisor), dir(apis._ask)", "_ask"),
    "the expected answer": ("apis.supervisor.expected_answer()",
     "ApiError: there is no supervisor.expected_answer"),
    "the host's objects": ("apis.__class__.__init__.__globals__['__builtins__']", "."),
    "SQL in a name": ("getattr(apis, 'keep; drop table mail')()",
     "ApiError: there is no keep; drop table mail"),
    "a call by an odd name": ("getattr(apis, '')()", "ApiError"),
    "parameters with names of ours": ("x = 1\napis.keep(self=x, name=x, args=x, value=x)", "^$"),
    "too much to say": ("apis.keep(value='x' * 10**6)", "ApiError: too much text"),
    "a number without end": ("apis.keep(value=1 << 20000)", "ValueError"),
    "a list without bottom": ("x = []\nfor i in range(10**5): x = [x]\napis.keep(value=x)", "RecursionError"),
    "a list in itself": ("x = []\nx.append(x)\napis.keep(value=x)", "ValueError: Circular"),
    # -------------------------------------------------------------------------------------- forged lines
    "a line that is no JSON": (LINE + "write(0, b'hello\\n')", STOPPED),
    "a line that is no object": (LINE + "write(0, b'[1]\\n')", STOPPED),
    "a line that is no call": (LINE + "write(0, b'{\"result\": 1}\\n')", STOPPED),
    "a line without end": (LINE + "while True: write(0, b'x' * 50000)", STOPPED),
    "a line of brackets": (LINE + "write(0, b'[' * 90000 + b'\\n')", STOPPED),
    "bytes": (LINE + "write(0, b'\\xff\\x00\\n')", STOPPED),
    "an early end": (LINE + "write(0, b'{\"done\": 1, \"output\": \"won\"}\\n')", "won|" + STOPPED),
    "many ends": (LINE + "for n in range(99): send({'done': n, 'output': 'won'})", "won|" + STOPPED),
    "an end of the wrong type": (LINE + "write(0, b'{\"done\": [], \"output\": {}}\\n')", STOPPED),
    "a call of the wrong type": (LINE + "send({'call': ['keep'], 'kwargs': 3})", STOPPED),
    "a call with more in it": (LINE + "send({'call': 'add', 'kwargs': {}, 'result': 7})", STOPPED),
    "a forged call": (LINE + "send({'call': 'add', 'kwargs': {'a': 1, 'b': 1}})\nreceive()", "{'result': 2}"),
    "calls without listening": (LINE + "while True: send({'call': 'long', 'kwargs': {}})", STOPPED),
    "listening to nothing": (LINE + "read(0, 1)", STOPPED),
    # ------------------------------------------------------------------------------------ time and memory
    "a loop": ("while True: pass", "TimeoutError: the code ran for more than 0.2 s"),
    "a loop that swallows the alarm": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "Timeout|" + STOPPED
    ),
    "a loop of calls": ("while True:\n    try: apis.keep(value=1)\n    except BaseException: pass", STOPPED),
    "sleep": ("import time\ntime.sleep(1000)\n'awake'", "awake"),
    "sleep of another kind": (CLASSES + "C['SimpleQueue']().get() if 'SimpleQueue' in C else {}['x']", "."),
    "a number": ("10 ** 10 ** 9", "TimeoutError|" + STOPPED),
    "a sum": ("sum(range(10 ** 12))", "TimeoutError|" + STOPPED),
    "a pattern": ("import re\nre.match('(a+)+$', 'a' * 40 + 'b')", "TimeoutError|" + STOPPED),
    "a string": ("'x' * 10 ** 11", "MemoryError"),
    "a list": ("x = []\nwhile True: x.append('x' * 10 ** 6)", "MemoryError|Timeout"),
    # Which comes first: the end of the memory, or that of the time?
    "no memory for the next turn": (FILL, "^$|TimeoutError"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "recursion without a limit": ("import sys\nsys.setrecursionlimit(10 ** 9)", GONE),
    "brackets": ("eval('(' * 1000 + ')' * 1000)", "SyntaxError|MemoryError|" + STOPPED),
    "minus": ("eval('-' * 100000 + '1')", "RecursionError|MemoryError|" + STOPPED),
    "a deep list shown": ("x = []\nfor i in range(10 ** 5): x = [x]\nx", "RecursionError|" + STOPPED),
    "a deep list deleted": ("x = []\nfor i in range(10 ** 6): x = [x]\ndel x\n'gone'",
     "gone|Error|" + STOPPED),
    # ---------------------------------------------------------------------------------------- the output
    "output without end": ("while True: print('x' * 1000)", "xxxx"),
    "one long line": ("print('x' * 10 ** 7)", "xxxx"),
    "a surrogate": ("print('\\ud800')", r"\?"),
    "the output's own parts": ("import sys\nsys.stdout.parts = 5", STOPPED),
    "output that is no text": ("import sys\nsys.stdout.parts.append(b'x')", STOPPED),
    "no output": ("import sys\nsys.stdout = None", "^$"),
    "the first output": ("import sys\nsys.__stdout__.write('x')\nsys.__stdout__.flush()", "."),
    "a text that lies": (
        "class S(str):\n    def __getitem__(self, i): return 3\nimport sys\nsys.stdout.write(S('x'))",
        "1|" + STOPPED
    ),
    "an error whose text is an error": ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
     STOPPED),
    "an error whose text leaves": ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
     STOPPED),
    "an error whose text has no end": (
        "class E(BaseException):\n    def __str__(self):\n        while True: pass\nraise E", STOPPED
    ),
    "an error without a name": (
        "class M(type):\n    __name__ = property(lambda s: 1 / 0)\nclass E(Exception, metaclass=M): "
        "pass\nraise E", "."
    ),
    "a value that cannot be shown": ("class A:\n    def __repr__(self): return 5\nA()", "TypeError"),
    # ---------------------------------------------------------------------------------- leaving, spoiling
    "sys.exit": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "GeneratorExit": ("raise GeneratorExit", "GeneratorExit"),
    "builtins spoilt": ("import builtins\nbuiltins.len = builtins.isinstance = builtins.type = None", "."),
    "builtins emptied": ("import builtins\nvars(builtins).clear()", STOPPED),
    "modules spoilt": ("import json, ast\njson.dumps = json.loads = ast.parse = None", "^$"),
    "modules emptied": ("import sys\nsys.modules.clear()", "^$"),
    "the runner spoilt": ("apis._ask.__globals__['run'] = None", "^$"),
    "apis deleted": ("del apis", "^$"),
    "apis replaced": ("apis = None", "^$"),
    "the stubs spoilt": ("apis.__class__.__call__ = None\napis.__class__.__getattr__ = None", "^$"),
    "a last will": ("class A:\n    def __del__(self):\n        while True: pass\na = A()\ndel a",
     "TimeoutError|^$"),
    "an unclosed bracket": ("print((1", "SyntaxError"),
    "a null byte": ("print(1)\x00", "ValueError|SyntaxError"),
    "a surrogate in the code": ("'\ud800'", "Unicode|ud800"),
    "nothing": ("", "^$"),
}  # fmt: skip

# More of them, as tables: each function that reaches the system, by each way to where functions lie; each
# module that has some, by each way to load one; each object that holds a frame or code.
FUNCTIONS = """
system fork forkpty execv execve posix_spawn kill killpg openpty unlink rename chmod chown stat listdir
scandir mkdir mkfifo link symlink truncate pipe dup2 memfd_create nice putenv _exit
"""
WAYS_TO_A_FUNCTION = {
    "behind the stubs": "apis._ask.__globals__['posix'].NAME",
    "behind a class": CLASSES + "C['_wrap_close'].__init__.__globals__['NAME']",
    "in any module": "import sys\n[m for m in list(sys.modules.values()) if 'NAME' in vars(m)][0]",
    "behind any method": CLASSES + "[f for c in seen for f in vars(c).values() if 'NAME' in getattr("
    "f, '__globals__', {})][0]",
}
MODULES = """
os posix socket _socket subprocess _posixsubprocess ctypes _ctypes multiprocessing signal resource mmap fcntl
select pty tempfile shutil gc _io faulthandler
"""
WAYS_TO_A_MODULE = {
    "import": "import NAME\nNAME.__name__",
    "__import__": "__import__('NAME').__name__",
    "exec": "exec('import NAME as m')\nm.__name__",
    "by its loader": CLASSES + "for name in ('BuiltinImporter', 'FrozenImporter', 'PathFinder'):\n"
    "    spec = C[name].find_spec('NAME')\n    if spec: break\nspec.loader.load_module('NAME').__name__",
}
HOLDERS = {
    "code of a generator": "(x for x in [1]).gi_code",
    "code of a coroutine": "async def f(): pass\nf().cr_code",
    "frame of an asynchronous generator": "async def f(): yield\nf().ag_frame",
    "code of an asynchronous generator": "async def f(): yield\nf().ag_code",
    "code of a method": "class A:\n    def f(self): pass\nA().f.__func__.__code__",
    "code of the stubs": "apis._ask.__code__",
    "frame of an error in hand": "import sys\ntry:\n    1 / 0\nexcept Exception:\n"
    "    sys.exc_info()[2].tb_frame",
    "code put into a function": "def f(): pass\ndef g(): pass\nf.__code__ = g.__code__",
}
WRITTEN_OUT = len(ATTACKS)
ATTACKS |= {
    f"{name} {way}": (code.replace("NAME", name), GONE + "|IndexError")
    for way, code in WAYS_TO_A_FUNCTION.items()
    for name in FUNCTIONS.split()
}
ATTACKS |= {
    f"module {name}, {way}": (code.replace("NAME", name), GONE)
    for way, code in WAYS_TO_A_MODULE.items()
    for name in MODULES.split()
}
ATTACKS |= {name: (code, REFUSED) for name, code in HOLDERS.items()}


class Host:
    """What answers the calls of the tests."""

    def __init__(self):
        self.kept, self.secret = [], SECRET

    def answer(self, name: str, kwargs: dict):
        if name == "add" and kwargs.keys() == {"a", "b"}:
            return kwargs["a"] + kwargs["b"]
        if name == "keep":
            self.kept.append(kwargs.get("value"))
            return None
        if name == "long":
            return "x" * 10_000
        if name == "end":
            raise Finished
        raise Refused(f"there is no {name}")


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def box(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 3.0)
    with Sandbox(seconds=0.2, max_output=2000) as sandbox:
        yield sandbox


def test_the_list_is_long_enough():
    assert len(ATTACKS) >= 300


@pytest.mark.skipif(sys.platform != "linux", reason="some of the functions are Linux's")
def test_what_the_tables_ask_for_is_there_without_a_sandbox():
    """Else an attack of theirs would be held by nothing but a wrong name."""
    program = """
import json, sys, types, warnings
warnings.simplefilter("ignore")
from envs.worlds.apps import sandbox_child
sandbox_child.load()
ask = types.FunctionType((lambda name, kwargs: None).__code__, vars(sandbox_child))
failed = {}
for name, code in json.load(sys.stdin).items():
    try: exec(code, {"apis": sandbox_child.Names(ask)})
    except Exception as error: failed[name] = repr(error)
print(json.dumps(failed))
"""
    attacks = {name: code for name, (code, _) in [*ATTACKS.items()][WRITTEN_OUT:]}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=json.dumps(attacks), capture_output=True, text=True, cwd=ROOT)
    assert json.loads(done.stdout) == {}, done.stderr


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_held_and_the_next_turn_works(name, box, host, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    (tmp_path / "secret.txt").write_text(SECRET)
    tmp_path.chmod(0o755)
    box.run("kept_from_before = 1", host.answer)
    code, expected = ATTACKS[name]
    for word, value in {"FILE": tmp_path / "secret.txt", "FOLDER": tmp_path, "PID": os.getpid()}.items():
        code = code.replace(word, str(value))
    output = box.run(code, host.answer)
    assert re.search(expected, output), output
    assert SECRET not in output and len(output) <= 2000
    assert [path.name for path in tmp_path.iterdir()] == ["secret.txt"]
    assert host.secret == SECRET and len(host.kept) <= module.MAX_CALLS + 1
    assert box.run("3 + 4", host.answer) == "7", output


# --------------------------------------------------------------------------------- ordinary code


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2"),
        ("x = 3", ""),
        ("x = 3\nx", "3"),
        ("'a'", "'a'"),
        ("None", ""),
        ("print('a', 1)", "a 1\n"),
        ("print('a')\n'b'", "a\n'b'"),
        ("for i in range(3):\n    print(i, end=' ')", "0 1 2 "),
        ("def f(x):\n    return x * 2\nf(4)", "8"),
        ("[x for x in range(3)]", "[0, 1, 2]"),
        ("import re, json\nre.findall('[a-z]', json.dumps({'a': 1}))", "['a']"),
        ("from collections import Counter\nCounter('aab')", "Counter({'a': 2, 'b': 1})"),
        (
            "import datetime\ndatetime.date(2026, 1, 31) + datetime.timedelta(days=1)",
            "datetime.date(2026, 2, 1)",
        ),
        ("import random\nrandom.random()", "0.8444218515250481"),
        ("lambda: 3", "<function <lambda>>"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = 1\ny = unknown", "NameError: name 'unknown' is not defined (line 2)"),
        ("x = = 1", "SyntaxError: invalid syntax (<code>, line 1)"),
        ("apis.add(a=1, b=2)", "3"),
        ("apis.add(1, 2)", "TypeError: add takes keyword arguments only"),
        ("apis.nothing.here()", "ApiError: there is no nothing.here"),
        ("try:\n    apis.nothing()\nexcept Exception as e:\n    print(e)", "there is no nothing\n"),
        ("apis.mail, apis", "(apis.mail, apis)"),
    ],
)
def test_what_code_prints(code, output, box, host):
    assert box.run(code, host.answer) == output


PLAIN = [
    "apis.add(a=1, b=2)", "apis.add(a=1,b=-20)", "apis.keep(value='a b, c=1')", "apis.keep()",
    "apis.keep(value=None)",
    "apis.long()", "apis.nothing.here(x='ä')", "apis.end()", "apis.add(a='x', b='y')",
    "apis.add(a=0, b=1234567890123)",
]  # fmt: skip
NOT_PLAIN = [
    "apis.add(a=1, a=2)", "apis.add(a=1b=2)", "apis.add(a=1, b=2,)", "apis.add(a=01, b=2)",
    "apis.add(a=1 b=2)",
    "apis.add(class=1)", "apis.class.x()", "apis.None()", "apis.keep(value='\\x41')",
    "apis.keep(value='a\nb')",
    "apis.keep(value='a' 'b')", "apis.keep(value='it''s')", "apis.keep(value=x)", "apis.keep(value=[1])",
    "apis()",
    "apis.keep(value='\x00')", "apis.keep(value='\ud800')", "apis._ask()", "x = apis.add(a=1, b=2)",
    "apis.add(a=1", "",
    "apis.keep(value='\r')", "apis.keep (value=1)", "apis.add(1, 2)", "apis.keep(value=1)\n",
    "apis.keep(**{'a': 1})",
]  # fmt: skip


def test_a_plain_call_needs_no_process_and_makes_no_difference(monkeypatch):
    results = []
    for plain_call in (module.plain_call, lambda code: None):
        monkeypatch.setattr(module, "plain_call", plain_call)
        host = Host()
        for code in [*PLAIN, *NOT_PLAIN, *random_programs(200, 5)]:
            host.kept.append(code)
            with Sandbox(seconds=0.05) as box:
                host.kept.append(box.run(code, host.answer))
        results.append(host.kept)
    assert results[0] == results[1]


def test_which_code_is_a_plain_call():
    assert [code for code in PLAIN if module.plain_call(code) is None] == []
    assert [code for code in NOT_PLAIN if module.plain_call(code) is not None] == []


def test_clocks_that_the_code_has_spoilt_are_not_asked(box, host, monkeypatch):
    """The alarm can be silenced, the clock of the kernel not. What a child has used, the next one lacks."""
    monkeypatch.setattr(module, "PATIENCE", 60.0)
    spoil = """
import builtins, time
time.process_time = lambda: 50.0
names = apis._ask.__globals__
names["time"] = names["resource"] = names["_signal"] = names["sys"] = None
builtins.int = builtins.min = lambda *_: 50
for cell in apis._ask.__closure__:
    if type(cell.cell_contents) is list:
        cell.cell_contents.append("asking")
"""
    assert box.run(spoil, host.answer) == ""
    assert box.run("while True: pass", host.answer).startswith("Stopped: the process ended.")
    assert 1.5 < box.spent < 5
    assert box.run("3 + 4", host.answer) == "7"
    spent = box.spent
    box.run("import sys\nsys.stdout.parts = 5", host.answer)  # ends the child
    assert spent < box.spent < spent + 1
    monkeypatch.setattr(module, "CPU_SECONDS", 2)
    assert box.run("3 + 4", host.answer) == "Stopped: the 2 s of CPU time of an episode are spent."
    assert box.run("apis.add(a=3, b=4)", host.answer) == "7", "which needs no process"
    box.close()
    assert box.run("3 + 4", host.answer) == "7", "a new episode"


def test_a_child_has_no_more_cpu_time_than_its_episode(host, monkeypatch):
    """Also where a turn may take longer than that."""
    monkeypatch.setattr(module, "PATIENCE", 60.0)
    monkeypatch.setattr(module, "CPU_SECONDS", 1)
    with Sandbox(seconds=30) as box:
        assert box.run("1 + 1", host.answer) == "2"
        assert box.run("while True: pass", host.answer).startswith("Stopped: the process ended.")
        assert "are spent" in box.run("1 + 1", host.answer)


def test_commands_may_come_in_pieces(host):
    """The line to the zygote keeps no borders between messages."""
    with Sandbox(max_output=127) as box:
        box.run("1", host.answer)
        zygote = box.zygote
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(zygote.line, [b"kill 99\nfo"], [theirs.fileno()])
        for piece in (b"r", b"k 7", b"\nkill 98"):
            time.sleep(0.02)
            zygote.line.sendall(piece)
        zygote.line.sendall(b"\n")
        ours.settimeout(30)
        hello = json.loads(ours.recv(1000))
        zygote.kill(hello["number"])
        assert ends(hello["pid"]) and zygote.process.poll() is None


def test_sets_have_the_same_order_every_time(box, host):
    """In the order of hashes, which a Python without a seed draws anew."""
    code = "print({'a', 'b', 'c', 'd', 'e'})"
    outputs = {box.run(code, host.answer)}
    box.zygote.close()
    box.close()
    assert outputs == {box.run(code, host.answer)}


def test_variables_stay_until_the_end(box, host):
    box.run("import math\ndef area(r): return round(math.pi * r * r, 2)", host.answer)
    assert box.run("area(2)", host.answer) == "12.57"
    box.run("while True: pass", host.answer)
    assert box.run("area(2)", host.answer) == "12.57", "an alarm leaves the variables as they are"
    box.close()
    assert box.run("area(2)", host.answer) == "NameError: name 'area' is not defined"


def test_nothing_is_executed_after_the_last_call(box, host):
    box.run("x = 1", host.answer)
    assert box.run("print('before')\napis.end()\napis.keep(value=1)", host.answer) == ""
    assert host.kept == [] and box.line is None
    assert box.run("x", host.answer) == "NameError: name 'x' is not defined"


def test_output_is_cut(box, host):
    assert box.run("print('x' * 5000)", host.answer) == "x" * 2000


# ------------------------------------------------------------------------------- the walls one by one


def probe(code: str) -> dict:
    """What `code` puts into `found`: in a whole Python that nothing but the system confines."""
    script = f"""
import json, os, resource, socket, sys, tempfile, threading
sys.path.insert(0, {str(APPS)!r})
import sandbox_child as child
ours, theirs = socket.socketpair()
os.chdir(tempfile.mkdtemp())
if os.fork() == 0:
    if os.getuid() == 0:
        os.chroot(".")
    child.confine(child.system_calls(), theirs.fileno(), 2**28, 5)
    found = {{}}
    def attempt(name, f, *args):
        try:
            found[name] = repr(f(*args))
        except BaseException as error:
            found[name] = type(error).__name__ + " " + str(getattr(error, "errno", ""))
{code}
    os.write(0, json.dumps(found).encode())
    os.close(0)  # a descriptor less, but none that could be used again
    attempt("file", os.open, "/", os.O_RDONLY)
    attempt("socket", socket.socket)
    os._exit(found["file"] + found["socket"] != "OSError 24OSError 24")
theirs.close()
assert os.wait()[1] == 0
os.rmdir(os.getcwd())
sys.stdout.write(ours.recv(65536).decode())
"""
    command = [sys.executable, "-I", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0 and result.stdout, result.stderr
    return json.loads(result.stdout)


def test_the_system_holds_without_python():
    """Native code could do what our Python forbids; the system forbids it, too."""
    found = probe("""
    attempt("file", os.open, "/proc/self/environ", os.O_RDONLY)
    attempt("folder", os.listdir, "/")
    attempt("new file", os.open, "new", os.O_CREAT | os.O_WRONLY)
    attempt("pipe", os.pipe)
    attempt("copy", os.dup, 0)
    attempt("socket", socket.socket)
    attempt("process", os.fork)
    attempt("program", os.posix_spawn, "/bin/true", ["true"], {})
    attempt("limit", resource.setrlimit, resource.RLIMIT_NOFILE, (9, 9))
    attempt("memory", bytearray, 2**29)
    attempt("thread", threading.Thread(target=print).start)
    """)
    assert found.pop("copy") in ("OSError 22", "OSError 24")
    # 24: too many open files; 11: no more processes; 2: no such file, as the root folder is empty
    assert found.pop("program").split()[-1] in ("2", "11")
    assert found.pop("new file").split()[-1] in ("2", "24")
    assert found == {
        "file": "OSError 24", "folder": "OSError 24", "pipe": "OSError 24",
        "socket": "OSError 24", "process": "BlockingIOError 11", "limit": "ValueError ",
        "memory": "MemoryError ",
        "thread": "RuntimeError ",
    }  # fmt: skip


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become nobody")
def test_as_root_the_child_is_nobody_in_an_empty_folder():
    found = probe("""
    attempt("user", os.getuid)
    attempt("root again", os.setuid, 0)
    attempt("file", os.stat, "/etc/passwd")
    attempt("signal", os.kill, os.getppid(), 0)
    """)
    assert int(found.pop("user")) > sandbox_child.USERS
    assert found == {
        "root again": "PermissionError 1",
        "file": "PermissionError 13",
        "signal": "PermissionError 1",
    }


def test_as_root_the_children_are_different_users(box, host):
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with Sandbox() as other:
        for one in (box, other):
            one.run("x = 1", host.answer)
        users = {Path(f"/proc/{one.pid}").stat().st_uid for one in (box, other)}
    assert len(users) == 2 and min(users) > sandbox_child.USERS


def test_a_root_that_must_remain_root_is_told_so(capfd):
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from envs.worlds.apps.sandbox import Sandbox\nSandbox().run('x = 1', None)"
    )
    drop = ["setpriv", "--bounding-set=-sys_chroot,-setuid,-setgid", "--inh-caps=-all"]
    subprocess.run([*drop, sys.executable, "-c", code], check=True)
    assert (
        capfd.readouterr().err == "sandbox: this root cannot become another user: agents' code runs as root\n"
    )


def test_a_wall_that_this_machine_lacks_is_told(tmp_path):
    """One line at the start, and the code runs nevertheless."""
    (tmp_path / "envs/worlds/apps").mkdir(parents=True)
    shutil.copy(APPS / "sandbox.py", tmp_path / "envs/worlds/apps")
    text = (APPS / "sandbox_child.py").read_text().replace('"x86_64": ', '"x": ').replace("aarch64", "a")
    (tmp_path / "envs/worlds/apps/sandbox_child.py").write_text(text)
    code = "from envs.worlds.apps.sandbox import Sandbox\nbox = Sandbox()"
    code += "\nfor _ in 1, 2: print(box.run('3 + 4', None))"
    code += "\nbox.close()\nprint(box.run('3 + 4', None))"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "7\n7\n7\n"
    said = [line for line in result.stderr.splitlines() if "Landlock" not in line]
    assert said == ["sandbox: no seccomp on this machine, see docs/sandbox.md"]


def test_what_the_kernel_refuses_is_noticed(monkeypatch):
    """An error of its calls is no wall."""

    class Refusing:
        def syscall(self, number, *_):
            return 7 if number == 444 and not _[0] else -1

        def prctl(self, *_):
            return -1

    assert not sandbox_child.landlock(Refusing()) and not sandbox_child.seccomp(Refusing())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Refusing())
    assert sandbox_child.lock_in() == ["no_new_privs", "Landlock", "seccomp"]


def test_linux_lets_it_change_no_file_and_reach_no_process(tmp_path):
    """Without a descriptor there is still much that native code of an ordinary user could do."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(444, None, 0, 1) if sys.platform == "linux" else -1
    if version < 1:
        pytest.skip("this kernel has no Landlock")
    code = f"""
import ctypes, json, os, socket, sys
sys.path.insert(0, {str(APPS)!r})
import sandbox_child as child
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and child.landlock(libc)
found = {{}}
def attempt(name, f, *args):
    try:
        found[name] = repr(f(*args))
    except OSError as error:
        found[name] = error.errno
attempt("new file", open, "new", "w")
attempt("write", open, "old", "r+")
attempt("remove", os.remove, "old")
attempt("move", os.rename, "old", "new")
attempt("folder", os.mkdir, "new")
attempt("link", os.symlink, "old", "new")
attempt("cut", os.truncate, "old", 0)
attempt("signal", os.kill, os.getppid(), 0)
attempt("connect", socket.create_connection, ("127.0.0.1", int(sys.argv[1])))
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
target = ctypes.create_string_buffer(7)
here, there = Span(ctypes.addressof(target), 7), Span(int(sys.argv[2]), 7)
read = libc.process_vm_readv(os.getppid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
found["memory"] = read, target.value.decode()
print(json.dumps(found))
"""
    (tmp_path / "old").write_text("precious")
    secret = ctypes.create_string_buffer(b"rosebud")
    with socket.create_server(("127.0.0.1", 0)) as server:
        numbers = [str(server.getsockname()[1]), str(ctypes.addressof(secret))]
        result = subprocess.run(
            [sys.executable, "-c", code, *numbers], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found.pop("memory") == [-1, ""]
    assert found.pop("signal") == (1 if version >= 6 else "None")
    connected = found.pop("connect")
    assert connected == 13 or version < 4
    assert found.pop("cut") == (13 if version >= 3 else "None")
    assert set(found.values()) <= {1, 13, 18} and not (tmp_path / "new").exists()
    assert version < 3 or (tmp_path / "old").read_text() == "precious"


SEARCH = """
names = '__dict__ __globals__ __closure__ __self__ __func__ __class__ __mro__ __bases__ __defaults__'
names += ' __kwdefaults__'
names += ' __builtins__ __loader__ __spec__ __wrapped__ __annotations__ cell_contents'
seen, todo, found = {}, [globals(), apis, *C.values()], set()
for thing in todo:
    if id(thing) in seen:
        continue
    seen[id(thing)] = thing  # held, so that no other object gets its number
    kind = type(thing).__name__
    if kind == 'builtin_function_or_method':
        found.add(f'{thing.__module__}.{thing.__name__}')
    if kind in ('dict', 'mappingproxy'):
        todo += [*thing.values(), *thing.keys()]
    elif kind in ('list', 'tuple', 'set', 'frozenset') and thing is not todo:
        todo += thing
    elif kind not in ('method-wrapper', 'int', 'str'):
        for name in names.split():
            try:
                todo.append(object.__getattribute__(thing, name))
            except (AttributeError, PermissionError, ValueError):
                pass
print(len(seen), sorted(f for f in found if f.rpartition('.')[0] in MODULES))
"""


def test_no_function_that_reaches_the_system_can_be_reached(host):
    """Follows every attribute, item and cell from all that agents' code can name."""
    search = SEARCH.replace("MODULES", repr(list(sandbox_child.REACHING)))
    with Sandbox(seconds=20, max_output=5000) as box:
        count, _, names = box.run(CLASSES + search, host.answer).partition(" ")
    harmless = {
        f"{owner}.{name}" for owner, names in sandbox_child.REACHING.items() for name in names.split()
    }
    assert int(count) > 10_000
    found = set(re.findall(r"'([\w.]+)'", names))
    # read and write: of the line, with which code can do no more than its stubs do
    assert found - harmless == {"posix.read", "posix.write"}


# ---------------------------------------------------------------------------- processes and threads


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def ends(pid: int | str) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_children_that_nobody_closes_do_not_pile_up(host):
    for _ in range(5):
        box = Sandbox(max_output=124)
        box.run("x = 1", host.answer)
        box.line.close()  # what becomes of one that is forgotten
        assert ends(box.pid)
        box.line = None
    box.run("x = 1", host.answer)
    assert str(box.pid) in (left := children_of(box.zygote.process.pid)) and len(left) <= 2
    box.close()


def test_a_bound_that_a_line_could_not_hold_is_refused(host):
    with pytest.raises(ValueError, match="max_output: 9000 is more than 8000"):
        Sandbox(max_output=9000)
    with Sandbox(max_output=8000) as box:
        assert box.run("print('\U0001f600' * 9000)", host.answer) == "\U0001f600" * 8000


def test_a_child_ends_with_its_sandbox(host):
    box = Sandbox(max_output=123)
    assert box.line is None, "nothing is started before it is needed"
    box.run("x = 1", host.answer)
    assert children_of(box.zygote.process.pid) == [str(box.pid)]
    box.close()
    box.close()
    assert ends(box.pid)


def test_a_zygote_that_died_is_replaced(host):
    box = Sandbox(max_output=124)
    box.run("x = 1", host.answer)
    os.kill(box.zygote.process.pid, signal.SIGKILL)
    assert ends(box.zygote.process.pid)
    assert box.run("x", host.answer) == "1", "its child goes on"
    box.close()
    assert box.run("2", host.answer) == "2"
    box.close()


def test_an_interrupt_from_the_terminal_is_not_for_the_child(host):
    """It goes to all processes of the terminal's group: ours decides what to do, the agent's code goes on."""
    box = Sandbox(max_output=126)
    box.run("x = 1", host.answer)
    assert {os.getpgid(pid) for pid in (box.pid, box.zygote.process.pid)} == {box.zygote.process.pid}
    box.close()


def test_without_a_child_it_says_so(host, monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/bin/true")
    with pytest.raises(OSError, match="does not start"):
        Sandbox(max_output=125).run("1", host.answer)


@pytest.mark.parametrize("end", ["", "os._exit(1)", "os.kill(os.getpid(), 9)", "raise SystemExit"])
def test_no_child_survives_this_process(end):
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from envs.worlds.apps.sandbox import Sandbox
box = Sandbox()
box.run("x = 1", None)
print(box.pid, box.zygote.process.pid, flush=True)
{end}
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    pids = result.stdout.split()
    assert len(pids) == 2 and all(map(ends, pids)), result.stderr


def test_sandboxes_in_threads_do_not_meet():
    results = {}

    def work(number: int) -> None:
        with Sandbox() as box:
            for turn in range(50):
                box.run(f"x = apis.add(a={number}, b={turn})", Host().answer)
            results[number] = box.run("x", Host().answer)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: str(number + 49) for number in range(8)}


def test_a_fork_of_this_process_has_its_own_zygote(host):
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from envs.worlds.apps.sandbox import Sandbox
with Sandbox() as box:
    print(box.run("1", None), flush=True)
    if os.fork() == 0:
        with Sandbox() as other:
            print(other.run("2", None), other.zygote is box.zygote, flush=True)
        raise SystemExit
    os.wait()
    print(box.run("3", None))
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout, result.stderr) == ("1\n2 False\n3\n", "")


# ---------------------------------------------------------------------------------- random programs

PIECES = [
    "1", "x", "'a'", "[]", "{}", "x = ", "for i in range(9):", "while True:", "if x:", "\n", "\n    ", "    ",
    "def f():", "return x", "f()", "print(x)", "apis.", "apis.add(a=1, b=x)", "apis.keep(value=x)",
    "apis.long()",
    "import ", "os", "sys", "json", "import builtins", "builtins.len = x", "x += [x]", "x * 10 ** 9",
    "lambda: x",
    "try:", "except:", "pass", "raise E", "del x", "(", ")", "[", "]", ":", ",", "=", "\x00", "\u2028",
    "\ud800",
    '"""', "__class__", "().__class__.__base__.__subclasses__()", "apis._ask.__globals__", "*", "**", ";",
    "apis._ask.__closure__[1].cell_contents(x)", "global x", "yield", "await", "async def f():", "class A:",
    "@x",
    "x.append(x)", "sys.stdout = x", "eval('x')", "exec('x = 1')", "vars()", "globals().clear()",
    "__import__('os')", "open('/')", "input()", "exit()",
]  # fmt: skip


def random_programs(n: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    ends = ["", " ", "\n"]
    return [
        "".join(rng.choice(PIECES) + rng.choice(ends) for _ in range(rng.randrange(1, 20))) for _ in range(n)
    ]


def resident() -> float:
    """MB that this process holds now; its peak would hide what leaks below an earlier one."""
    gc.collect()
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


def run_random_programs(n: int, seed: int, monkeypatch) -> None:
    """Lets a sandbox run them, a few to a child; this process must come out of it as it went in."""
    monkeypatch.setattr(module, "PATIENCE", 5.0)
    host, rng = Host(), random.Random(seed)
    box = Sandbox(seconds=0.05, max_output=500)
    box.run("1", host.answer)
    memory = resident()
    descriptors = len(os.listdir("/proc/self/fd"))
    ran = 0
    for program in random_programs(n, seed):
        output = box.run(program, host.answer)
        assert len(output) <= 500
        ran += "SyntaxError" not in output
        host.kept.clear()
        if rng.random() < 0.3:
            box.close()
    assert ran > n / 10, "some are programs"
    box.close()
    assert box.run("3 + 4", host.answer) == "7" and host.secret == SECRET
    box.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert resident() < memory + 50


def test_random_programs(monkeypatch):
    run_random_programs(500, 0, monkeypatch)


@pytest.mark.slow
def test_ten_thousand_random_programs(monkeypatch):
    run_random_programs(10_000, 1, monkeypatch)
