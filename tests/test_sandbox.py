"""envs/sandbox.py: what hostile code tries, one attack after the other. Each is held, and the next turn works."""

import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from envs import sandbox as module
from envs.sandbox import Finished, Refused, Sandbox

ENVS = Path(__file__).parent.parent / "envs"
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
cell = lambda f, name: [c.cell_contents for c in f.__closure__ if getattr(c.cell_contents, '__name__', '') == name][0]
send, receive = cell(apis._ask, 'send'), cell(apis._ask, 'receive')
write, read = cell(send, 'write'), cell(receive, 'read')
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
    "posix behind the stubs": ("apis._ask.__globals__['posix'].stat('/')", GONE),
    "posix anew": (CLASSES + "C['BuiltinImporter'].load_module('posix')", GONE),
    "posix by its spec": (
        CLASSES + "C['BuiltinImporter'].create_module(C['ModuleSpec']('posix', C['BuiltinImporter']))",
        GONE + "|ImportError",
    ),
    "the project": ("from envs.apps import make_task", "ImportError: there is no module envs"),
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
    "a library": (CLASSES + "C['ExtensionFileLoader']('x', '/x.so').create_module(C['ModuleSpec']('x', None))", GONE),
    "fork": ("apis._ask.__globals__['posix'].fork()", GONE),
    "kill": ("apis._ask.__globals__['posix'].kill(PID, 9)", GONE),
    "signals": ("apis._ask.__globals__['_signal'].signal(27, None)", GONE),
    # ------------------------------------------------------------------------ frames, code, interpreter
    "frame of a traceback": ("try:\n    1 / 0\nexcept Exception as e:\n    x = e\nx.__traceback__.tb_frame", REFUSED),
    "frame of a generator": ("(x for x in [1]).gi_frame", REFUSED),
    "frame of a coroutine": ("async def f(): pass\nf().cr_frame", REFUSED),
    "sys._getframe": ("import sys\nsys._getframe(1)", GONE),
    "sys._current_frames": ("import sys\nsys._current_frames()", GONE),
    "sys.settrace": ("import sys\nsys.settrace(print)", GONE),
    "the collector": ("import gc\ngc.get_objects()", GONE),
    "the collector behind the stubs": ("apis._ask.__globals__['gc'].get_objects()", GONE),
    "code of a function": ("(lambda: 1).__code__.replace(co_code=b'')", REFUSED),
    "code anew": ("CodeType = type(compile('1', '', 'eval'))\nCodeType.replace(compile('1', '', 'eval'))", REFUSED),
    "function anew": ("type(lambda: 1)(compile('1', '', 'exec'), {})", REFUSED),
    "bytes to code": ("import marshal", GONE),
    "another audit hook": ("import sys\nsys.addaudithook(print)", GONE),
    "the audit hook's words": (
        "apis._ask.__globals__.update(ORDINARY={'open'}, refuse=print)\n" + CLASSES + "C['FileIO']('FILE')",
        REFUSED,
    ),
    "builtins without errors": ("import builtins\nbuiltins.PermissionError = int\n" + CLASSES + "C['FileIO']('/')", "."),
    "the environment": (CLASSES + "dict(C['_wrap_close'].__init__.__globals__['environ'])", "PYTHONHASHSEED|Error"),
    # ---------------------------------------------------------------------------------- the host's data
    "fields of the stubs": ("vars(apis), vars(apis.supervisor), dir(apis._ask)", "_ask"),
    "the expected answer": ("apis.supervisor.expected_answer()", "ApiError: there is no supervisor.expected_answer"),
    "the host's objects": ("apis.__class__.__init__.__globals__['__builtins__']", "."),
    "SQL in a name": ("getattr(apis, 'keep; drop table mail')()", "ApiError: there is no keep; drop table mail"),
    "a call by an odd name": ("getattr(apis, '')()", "ApiError"),
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
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass", "Timeout|" + STOPPED
    ),
    "a loop of calls": ("while True:\n    try: apis.keep(value=1)\n    except BaseException: pass", STOPPED),
    "sleep": ("import time\ntime.sleep(1000)\n'awake'", "awake"),
    "sleep of another kind": (CLASSES + "C['SimpleQueue']().get() if 'SimpleQueue' in C else {}['x']", "."),
    "a number": ("10 ** 10 ** 9", "TimeoutError|" + STOPPED),
    "a sum": ("sum(range(10 ** 12))", "TimeoutError|" + STOPPED),
    "a pattern": ("import re\nre.match('(a+)+$', 'a' * 40 + 'b')", "TimeoutError|" + STOPPED),
    "a string": ("'x' * 10 ** 11", "MemoryError"),
    "a list": ("x = []\nwhile True: x.append('x' * 10 ** 6)", "MemoryError|Timeout"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "recursion without a limit": ("import sys\nsys.setrecursionlimit(10 ** 9)", GONE),
    "brackets": ("eval('(' * 1000 + ')' * 1000)", "SyntaxError|MemoryError|" + STOPPED),
    "minus": ("eval('-' * 100000 + '1')", "RecursionError|MemoryError|" + STOPPED),
    "a deep list shown": ("x = []\nfor i in range(10 ** 5): x = [x]\nx", "RecursionError|" + STOPPED),
    "a deep list deleted": ("x = []\nfor i in range(10 ** 6): x = [x]\ndel x\n'gone'", "gone|Error|" + STOPPED),
    # ---------------------------------------------------------------------------------------- the output
    "output without end": ("while True: print('x' * 1000)", "xxxx"),
    "one long line": ("print('x' * 10 ** 7)", "xxxx"),
    "a surrogate": ("print('\\ud800')", r"\?"),
    "the output's own parts": ("import sys\nsys.stdout.parts = 5", STOPPED),
    "output that is no text": ("import sys\nsys.stdout.parts.append(b'x')", STOPPED),
    "no output": ("import sys\nsys.stdout = None", "^$"),
    "the first output": ("import sys\nsys.__stdout__.write('x')\nsys.__stdout__.flush()", "."),
    "a text that lies": ("class S(str):\n    def __getitem__(self, i): return 3\nimport sys\nsys.stdout.write(S('x'))", "."),
    "an error whose text is an error": ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "ZeroDivisionError"),
    "an error whose text leaves": ("class E(Exception):\n    def __str__(self): exit\nraise E", "NameError"),
    "an error whose text has no end": (
        "class E(BaseException):\n    def __str__(self):\n        while True: pass\nraise E", "TimeoutError"
    ),
    "an error without a name": (
        "class M(type):\n    __name__ = property(lambda s: 1 / 0)\nclass E(Exception, metaclass=M): pass\nraise E", "."
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
    "the runner spoilt": ("apis._ask.__globals__['run'] = None", "^$|" + STOPPED),
    "apis deleted": ("del apis", "^$"),
    "apis replaced": ("apis = None", "^$"),
    "the stubs spoilt": ("apis.__class__.__call__ = None\napis.__class__.__getattr__ = None", "^$"),
    "a last will": ("class A:\n    def __del__(self):\n        while True: pass\na = A()\ndel a", "TimeoutError|^$"),
    "an unclosed bracket": ("print((1", "SyntaxError"),
    "a null byte": ("print(1)\x00", "ValueError|SyntaxError"),
    "a surrogate in the code": ("'\ud800'", "Unicode|ud800"),
    "nothing": ("", "^$"),
}  # fmt: skip


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
    assert len(ATTACKS) >= 40


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
