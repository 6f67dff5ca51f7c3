"""envs/worlds/apps/appworld.py, with a small server of our own in the place of the package;
and with the package where it is.

For the tests marked `external` set APPWORLD to the command of an installed package: they make data of their
own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import envs
from envs.worlds.apps import appworld

ROOT = Path(__file__).parents[2]

# ------------------------------------------------------------------------------------ the server of our own

# It speaks the protocol of the package: exec runs the code, two apps are there, and three tests: whether it
# was completed, whether the note is there, whether there is no other. `reply` is what an agent could do to
# the server.
FAKE = r"""
import contextlib, io, json, os, sys, time, traceback
from http.server import BaseHTTPRequestHandler
from socketserver import UnixStreamServer
from types import SimpleNamespace

folder, path = sys.argv[-2:]
assert sys.argv[1] == "-I", sys.argv
assert sys.argv[-6:-2] == ["serve", "environment", "--no-show-usage", "--root"], sys.argv
world, forged = None, []

def note(word):
    world["notes"].append(word)

def complete(answer=None):
    world["completed"] = True

def start(id):
    global world
    apis = SimpleNamespace(
        notes=SimpleNamespace(add=note),
        supervisor=SimpleNamespace(complete_task=complete),
        api_docs=SimpleNamespace(
            show_app_descriptions=lambda: [
                {"name": n, "description": f"For {n}."} for n in ("api_docs", "notes")],
            show_api_descriptions=lambda app_name: [app_name],
        ),
    )
    names = {"apis": apis, "requester": None, "reply": lambda raw: forged.append(raw), "time": time, "os": os}
    world = {"id": id, "notes": [], "completed": False, "names": names}

def answer(request, body):
    if request == "/initialize":
        start(body["task_id"])
        me = {"first_name": "Ada", "last_name": "Example"}
        me |= {"email": "ada@example.com", "phone_number": "5550100"}
        about = {"instruction": f"Add the note {body['task_id'][-1]}.", "datetime": "2023-05-18T12:00:00"}
        return about | {"task_id": body["task_id"], "supervisor": me}
    assert world["id"] == body["task_id"]
    if request == "/task_completed":
        return world["completed"]
    if request == "/evaluate":
        assert body["suppress_errors"] is True
        expected = world["id"][-1]
        passed = [world["completed"], expected in world["notes"], set(world["notes"]) <= {expected}]
        return {"num_tests": 3, "passes": [{} for test in passed if test], "failures": []}
    assert request == "/execute"
    body["code"].encode()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            exec(compile(body["code"], "<python-input>", "exec"), world["names"])
        except Exception as error:
            return f"Execution failed. Traceback:\n{type(error).__name__}: {error}"
    return said.getvalue() or "Execution successful."

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("seen", "a") as seen:
            seen.write(json.dumps([self.path, body]) + "\n")
        try:
            status, data = 200, json.dumps({"output": answer(self.path, body)}).encode()
        except Exception:
            status, data = 500, b"Internal Server Error"
            traceback.print_exc()
        if forged:
            self.wfile.write(forged.pop().encode())
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

UnixStreamServer(path, Handler).serve_forever()
"""


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    """Options of a world with our server: a command, with a python beside it,
    and data of two or one scenarios."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "bin").mkdir()
    (folder / "fake.py").write_text(FAKE, encoding="utf-8")
    for name in ("appworld", "python"):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/fake.py "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    for split in appworld.SPLITS:
        ids = [f"{split[-3:]}{scenario}_{n}" for scenario in range(1 + (split == "train")) for n in (1, 2, 3)]
        (folder / "data/datasets").mkdir(parents=True, exist_ok=True)
        (folder / f"data/datasets/{split}.txt").write_text("\n".join([*ids[:-1], f"{ids[-1]}:tag"]) + "\n")
        for id in ids:
            truth = folder / "data/tasks" / id / "ground_truth"
            truth.mkdir(parents=True)
            (truth / "metadata.json").write_text(json.dumps({"difficulty": int(id[-1])}))
            solution = f"# not shown\ndef solution(apis, requester):\n    apis.notes.add('{id[-1]}')\n"
            if split == "train":
                (truth / "compiled_solution.py").write_text(
                    solution + "    apis.supervisor.complete_task()\n"
                )
    return {"appworld": folder / "bin/appworld", "root": folder}


@pytest.fixture
def world(fake):
    world = envs.make("appworld", **fake)
    yield world
    world.close()


def seen(world) -> list:
    """The requests that the present server has had."""
    lines = (world.server.folder / "seen").read_text().splitlines()
    return [json.loads(line) for line in lines]


def pid_of(world) -> int:
    """The process in which the code runs."""
    return int(world.step("print(os.getpid())")[0].rpartition("=> ")[2])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


# -------------------------------------------------------------------------------------------- an episode


def test_the_text_grows_by_code_and_output(world):
    prompt, info = world.reset(options={"index": 0})
    assert info == {"answer": "ain0_1"}
    assert prompt.startswith(
        "Supervisor: Ada Example, ada@example.com, 5550100. Now: 2023-05-18T12:00:00.\nTask: Add the note "
        "1.\nWrite"
    )
    assert prompt.endswith("\napi_docs: For api_docs.\nnotes: For notes.\n\n")
    first, reward, terminated, truncated, info = world.step("  x = 'a\\nb'\nprint(x)\n")
    assert first == prompt + "x = 'a\\nb'\nprint(x)\n=> a\nb\n" and info == {
        "action": "x = 'a\\nb'\nprint(x)"
    }
    assert (reward, terminated, truncated) == (0.0, False, False)
    second, *_ = world.step("x.missing")
    assert (
        second
        == first
        + "x.missing\n=> Execution failed. Traceback:\nAttributeError: 'str' object has no attribute "
        "'missing'\n"
    )
    last, reward, terminated, truncated, info = world.step(
        "apis.notes.add('1')\napis.supervisor.complete_task()"
    )
    assert last.endswith("\n=> Execution successful.\nTask completed. Your score (min 0.0, max 1.0): 1.00\n")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["result"] == {"return": 1.0, "length": 3, "success": True, "passed": 3, "tests": 3}


def test_it_says_what_the_protocol_wants(world):
    world.reset(options={"index": 1})
    world.step("x = 1")
    world.step("apis.supervisor.complete_task()")
    initialize = ["/initialize", {"task_id": "ain0_2", "experiment_name": "turnrl", "timeout_seconds": 100}]
    turn = [["/execute", {"task_id": "ain0_2", "code": "x = 1"}], ["/task_completed", {"task_id": "ain0_2"}]]
    found = seen(world)
    assert found[0] == initialize and found[1][0] == "/execute" and found[2:4] == turn
    assert found[-1] == ["/evaluate", {"task_id": "ain0_2", "suppress_errors": True}]
    assert [path for path, _ in found].count("/evaluate") == 1  # it takes as long as several turns


@pytest.mark.parametrize(("reward", "expected"), [("fraction", 2 / 3), ("success", 0.0)])
def test_the_reward_is_the_share_of_tests_or_whether_all_are_passed(fake, reward, expected):
    world = envs.make("appworld", **fake, reward=reward)
    world.reset(options={"index": 0})
    observation, got, _, _, info = world.step("apis.supervisor.complete_task(3)")
    assert got == info["result"]["return"] == expected and not info["result"]["success"]
    assert observation.endswith(f"Your score (min 0.0, max 1.0): {expected:.2f}\n")
    world.reset(options={"index": 2})
    assert world.step(world.expert(""))[1] == 1.0
    world.close()


def test_what_is_done_by_the_limit_of_turns_counts(fake):
    world = envs.make("appworld", **fake, max_turns=2)
    world.reset(options={"index": 0})
    world.step("apis.notes.add('1')")
    observation, reward, terminated, truncated, info = world.step("pass")
    assert (reward, terminated, truncated) == (2 / 3, False, True) and "score" not in observation
    assert info["result"] == {"return": 2 / 3, "length": 2, "success": False, "passed": 2, "tests": 3}
    world.close()


def test_the_limit_of_turns_is_the_papers(fake):
    assert envs.make("appworld", **fake).max_turns == 40
    assert envs.make("appworld", **fake, split="dev").max_turns == 50


def test_output_is_cut(fake):
    world = envs.make("appworld", **fake, max_output=10)
    world.reset(options={"index": 0})
    assert world.step("print('x' * 25)")[0].endswith("\n=> xxxxxxxxxx ... (15 characters more)\n")
    assert world.step("print('x' * 10)")[0].endswith("\n=> xxxxxxxxxx\n")
    world.close()


def test_code_stands_in_fences_or_is_all_there_is(world):
    for action, code in [
        ("x = 1", "x = 1"),
        ("First\n```python\nx = 1\n```\nthen\n```\ny = 2\n```", "x = 1\n\ny = 2\n"),
        ("```py\nx = 1", "x = 1"),
        ("print('```')", "print('```')"),
    ]:
        assert appworld.code_of(action) == code
    prompt, _ = world.reset(options={"index": 0})
    action = "I count.\n```python\nprint(1)\n```\n```python\nprint(2)\n```"
    assert world.step(action)[0] == f"{prompt}{action}\n=> 1\n2\n"


# ------------------------------------------------------------------------------- tasks, splits, scenarios


def test_splits_go_by_name(fake):
    for split, name in [("train", "ain"), ("dev", "dev"), ("test_normal", "mal"), ("test-challenge", "nge")]:
        world = envs.make("appworld", **fake, split=split)
        assert world.split == split.replace("-", "_") and all(task.startswith(name) for task in world.tasks)
    world = envs.make("appworld", **fake)
    assert world.tasks == ("ain0_1", "ain0_2", "ain0_3", "ain1_1", "ain1_2", "ain1_3")
    assert world.scenarios == ("ain0",) * 3 + ("ain1",) * 3 and world.difficulties == (1, 2, 3) * 2
    with pytest.raises(
        ValueError, match=r"^split: 'test' is none of train, dev, test_normal, test_challenge$"
    ):
        envs.make("appworld", **fake, split="test")
    with pytest.raises(ValueError, match=r"^reward: 'all' is neither fraction nor success$"):
        envs.make("appworld", **fake, reward="all")


def test_what_is_missing_is_named_in_one_line(fake, tmp_path, monkeypatch):
    def problem(**options) -> str:
        with pytest.raises(envs.Unavailable) as error:
            envs.make("appworld", **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    monkeypatch.delenv("APPWORLD", raising=False)
    monkeypatch.delenv("APPWORLD_ROOT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert re.match(
        r"appworld: there is no appworld with a python beside it; .*pip install appworld", problem()
    )
    assert "there is no /nowhere/appworld" in problem(appworld="/nowhere/appworld")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/appworld").touch(mode=0o755)
    assert "with a python beside it" in problem(appworld=tmp_path / "bin/appworld")
    (tmp_path / "bin/python").touch(mode=0o755)
    (tmp_path / "lib/python3.11/site-packages/appworld/apps").mkdir(parents=True)
    assert problem(appworld=tmp_path / "bin/appworld").endswith(f"run {tmp_path}/bin/appworld install")
    (tmp_path / "lib/python3.11/site-packages/appworld/apps/admin").mkdir()
    said = problem(appworld=tmp_path / "bin/appworld", root=tmp_path)
    assert "there is no " in said and "datasets/train.txt; `appworld download data" in said
    (tmp_path / "data/datasets").mkdir(parents=True)
    (tmp_path / "data/datasets/train.txt").write_text("aaa_1\n")
    assert "aaa_1/ground_truth/metadata.json; " in problem(appworld=tmp_path / "bin/appworld", root=tmp_path)

    monkeypatch.setenv("APPWORLD", str(fake["appworld"]))
    monkeypatch.setenv("APPWORLD_ROOT", str(fake["root"]))
    assert envs.missing("appworld") is None


def test_a_server_that_does_not_start_says_why(fake, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for name in ("appworld", "python"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho 'Exception: no data' >&2\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    world = envs.make("appworld", appworld=tmp_path / "bin/appworld", root=fake["root"])
    with pytest.raises(envs.Unavailable, match=r"^appworld: the server does not start: Exception: no data$"):
        world.reset()
    (tmp_path / "bin/python").write_text("#!/bin/sh\nsleep 100\n")
    monkeypatch.setattr(appworld, "GRACE", -99)
    with pytest.raises(envs.Unavailable, match="it said nothing"):
        world.reset()


# ------------------------------------------------------------------------- hangs, crashes, hostile servers


def test_a_server_that_hangs_is_killed_and_the_next_episode_has_another(fake, monkeypatch):
    monkeypatch.setattr(appworld, "GRACE", -99)  # so that one second is patience enough
    world = envs.make("appworld", **fake)
    world.reset(options={"index": 0})
    pid, folder = pid_of(world), world.server.folder
    start = time.monotonic()
    with pytest.raises(envs.WorldBroken, match=r"^appworld, ain0_1: /execute: TimeoutError: timed out$"):
        world.step("while True: pass")
    assert time.monotonic() - start < 5 and not folder.exists()
    assert wait_until(lambda: not is_alive(pid))  # of its group only the leader is waited for
    with pytest.raises(Exception, match="reset"):
        world.step("1")
    world.reset(options={"index": 1})
    assert pid_of(world) != pid and world.step(world.expert(""))[1] == 1.0
    world.close()


def test_a_reply_that_drips_and_a_log_that_is_a_pipe_are_not_waited_for(fake, monkeypatch):
    monkeypatch.setattr(appworld, "GRACE", -99)
    drip = (
        "import gc\nhandler = [x for x in gc.get_objects() if type(x).__name__ == 'Handler'][-1]\n"
        "handler.wfile.write(b'HTTP/1.0 200 OK\\r\\n\\r\\n')\n"
        "while True:\n    handler.wfile.write(b' ')\n    time.sleep(0.3)"
    )
    pipe = "os.remove('log'); os.mkfifo('log')\nreply('HTTP/1.0 500 no\\r\\n\\r\\n')"
    for code, reason in ((drip, "JSONDecodeError"), (pipe, "error 500")):
        world, start = envs.make("appworld", **fake), time.monotonic()
        world.reset(options={"index": 0})
        with pytest.raises(envs.WorldBroken, match=rf"/execute: .*{reason}"):
            world.step(code)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os._exit(1)", "RemoteDisconnected"),
        ("os.kill(os.getpid(), 9)", "RemoteDisconnected"),
        ("reply('HTTP/1.0 500 no\\r\\n\\r\\n')", "error 500"),
        ("reply('HTTP/1.0 200 OK\\r\\n\\r\\nno json')", "JSONDecodeError"),
        ("reply('HTTP/1.0 200 OK\\r\\n\\r\\n[1, 2]')", "TypeError"),
        ("reply('HTTP/1.0 200 OK\\r\\n\\r\\n{}')", "KeyError"),
        ("reply('HTTP/1.0 200 OK\\r\\n\\r\\n{\"output\": 3}')", "a int instead of a str"),
        ("reply('HTTP/1.0 200 OK\\r\\n\\r\\n' + '[' * 100_000)", "RecursionError|JSONDecodeError"),
        ("reply('HTTP/1.0 200 OK\\r\\n\\r\\n{\"output\": \"' + 'x' * 30_000_000 + '\"}')", "JSONDecodeError"),
        ("reply('HTTP/1.0 200 OK\\r\\nContent-Length: 99\\r\\n\\r\\n{\"out')", "JSONDecodeError"),
        ("reply('nonsense\\r\\n' * 100)", "BadStatusLine"),
        ("reply('HTTP/1.0 200 OK\\r\\n' + 'a: b\\r\\n' * 1000)", "HTTPException"),
    ],
)
def test_whatever_a_server_does_is_a_broken_world_and_no_more(world, code, reason):
    world.reset(options={"index": 0})
    with pytest.raises(envs.WorldBroken, match=reason):
        world.step(code)
    assert world.server is None
    world.reset(options={"index": 0})
    assert world.step(world.expert(""))[4]["result"]["success"]


def test_no_text_of_either_side_has_half_a_character(world):
    """A lone surrogate cannot be encoded: the package fails on one in the code,
    a tokenizer on one in the output."""
    world.reset(options={"index": 0})
    observation, *_, info = world.step("print(chr(0xD800), '\ud800')")
    assert info["action"] == "print(chr(0xD800), '?')"
    assert observation.endswith("\n=> ? ?\n")


@pytest.mark.parametrize("report",
 ['{"passes": [1, 1], "num_tests": 1}', '{"passes": [], "num_tests": 0}', "{}",
                                    '{"passes": 3, "num_tests": 3}',
                                     '{"passes": [1], "num_tests": NaN}'])  # fmt: skip
def test_a_report_that_cannot_be_is_none(world, report):
    world.reset(options={"index": 0})
    lie = f'HTTP/1.0 200 OK\r\n\r\n{{"output": {report}}}'
    world.server.ask("/execute", task_id="ain0_1", code="apis.supervisor.complete_task()")
    done = 'HTTP/1.0 200 OK\r\n\r\n{"output": true}'
    code = f'[reply(x) for x in ({lie!r}, {done!r}, \'HTTP/1.0 200 OK\\r\\n\\r\\n{{"output": ""}}\')]'
    with pytest.raises(envs.WorldBroken, match="/evaluate: no report"):
        world.step(code)


def test_a_hanging_start_of_an_episode_is_a_broken_world(world):
    world.reset(options={"index": 0})
    world.step("import sys; sys.modules['__main__'].start = None")
    with pytest.raises(envs.WorldBroken, match="ain0_3: /initialize: error 500: TypeError: 'NoneType'"):
        world.reset(options={"index": 2})
    world.reset(options={"index": 2})


def test_the_server_sees_nothing_of_our_environment(world, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hf_123")
    world.reset(options={"index": 0})
    seen = world.step("print(sorted(os.environ), os.environ['HOME'], os.getcwd())")[0].rpartition("=> ")[2]
    assert "SECRET" not in seen and str(world.server.folder) in seen
    names = set(re.findall(r"'(\w+)'", seen))
    # the shell adds the last
    assert names <= {*appworld.KEPT, "HOME", "PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
    assert world.server.folder.stat().st_mode & 0o777 == 0o700  # nobody else can reach its socket


def test_the_start_replaces_the_address_and_reads_no_file_of_variables(tmp_path):
    """START with stand-ins for the three modules that it changes or calls."""
    (tmp_path / "dotenv.py").write_text("def load_dotenv(*a, **k): raise SystemExit('it read .env')\n")
    (tmp_path / "uvicorn.py").write_text("def run(app, **options): print(app, sorted(options.items()))\n")
    (tmp_path / "appworld").mkdir()
    (tmp_path / "appworld/__init__.py").write_text("import dotenv\ndotenv.load_dotenv()\n")
    (tmp_path / "appworld/cli.py").write_text(
        "import sys, uvicorn\ndef main(): print(sys.argv[1:]); uvicorn.run('app', host='0.0.0.0', "
        "port=8000)\n"
    )
    command = [sys.executable, "-c", appworld.START, "serve", "environment", "/x/socket"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.stderr == ""
    assert result.stdout == "['serve', 'environment']\napp [('log_level', 'error'), ('uds', '/x/socket')]\n"


# ----------------------------------------------------------------------------------- the life of a server


def test_one_server_serves_many_episodes_and_then_another_does(fake):
    world = envs.make("appworld", **fake, episodes_per_server=3)
    pids = []
    for _ in range(7):
        world.reset(options={"index": 0})
        pids.append(pid_of(world))
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1] and not is_alive(pids[0])
    world.close()
    assert wait_until(lambda: not is_alive(pids[-1]))


def test_two_worlds_have_two_servers_and_may_step_at_a_time(fake):
    worlds = [envs.make("appworld", **fake) for _ in range(2)]
    for world in worlds:
        world.reset(options={"index": 0})
    assert pid_of(worlds[0]) != pid_of(worlds[1])
    threads = [threading.Thread(target=world.step, args=["time.sleep(1)"]) for world in worlds]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 1.8
    for world in worlds:
        world.close()


def test_closed_or_forgotten_a_world_leaves_nothing(fake):
    world = envs.make("appworld", **fake)
    for forget in (False, True):
        world.reset(options={"index": 0})
        pid, folder = pid_of(world), world.server.folder
        assert is_alive(pid) and (folder / "data").is_symlink()
        if forget:
            del world
        else:
            world.close()
            world.close()
        assert wait_until(lambda pid=pid: not is_alive(pid)) and not folder.exists()
    assert (fake["root"] / "data/tasks").is_dir()


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_survives_the_death_of_the_parent(fake, busy):
    """SIGKILL, also while the server is in a loop."""
    code = (
        "import envs, threading, time\n"
        f"world = envs.make('appworld', appworld={str(fake['appworld'])!r}, root={str(fake['root'])!r})\n"
        "world.reset(options={'index': 0})\n"
        "print(world.step('print(os.getpid())')[0].rpartition('=> ')[2].strip(), world.server.folder, "
        "flush=True)\n"
        f"world.step('while True: pass') if {busy} else time.sleep(100)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pid, folder = parent.stdout.readline().split()
    assert is_alive(int(pid)) and Path(folder).exists()
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_until(lambda: not is_alive(int(pid)) and not Path(folder).exists())


# -------------------------------------------------------------- with the rest: every world's tests, a trainer


def run_with(options: dict, *command: str) -> str:
    """The output of a Python program for which $APPWORLD and $APPWORLD_ROOT are set."""
    ours = {
        "APPWORLD": str(options["appworld"]),
        "APPWORLD_ROOT": str(options["root"]),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, *command],
        env=os.environ | ours,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    return result.stdout


def test_it_keeps_to_what_every_world_does(fake):
    said = run_with(
        fake, "-m", "pytest", "tests/worlds/test_envs.py", "-q", "-k", "appworld", "-p", "no:cacheprovider"
    )
    assert re.search(r"\b[12][0-9] passed, 1 skipped", said), said


@pytest.mark.slow
def test_loop_trains_on_it(fake, tmp_path):
    """From a model that knows nothing of it, in few turns: the context ends after them."""
    tiny = "--model checkpoints/apps --iterations 1 --tasks 2 --rollouts 2 --worlds 4 --max-difficulty 1"
    tiny += " --max-action-tokens 4 --context 300 --min-advantage 0"
    run_with(fake, "loop_ppo.py", "--env", "appworld", "--runs", str(tmp_path / "runs"), *tiny.split())
    (run,) = (tmp_path / "runs").iterdir()
    _, row = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["rollout/broken"] == 0 and row["rollout/length"] > 1 and row["update/filtered"] == 0
    played = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert {rollout["answer"] for rollout in played} <= {"ain0_1", "ain1_1"}  # of difficulty 1
    summary = json.loads((run / "summary.json").read_text())
    assert {"test_normal_scenarios", "test_challenge_success"} <= summary.keys()


# ------------------------------------------------------------------------------ the package itself: external


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """Options of a world with the published package and data of our own."""
    problem = None
    try:
        python = appworld.find_python("")
        if not list(python.parent.parent.glob("lib/python3*/site-packages/appworld")):
            problem = f"{python} has no package appworld"
    except FileNotFoundError as error:
        problem = str(error)
    if problem:
        pytest.skip(problem)
    root = tmp_path_factory.mktemp("real") / "root"
    subprocess.run([python, ROOT / "tests/worlds/appworld_data.py", root], check=True, capture_output=True)
    return {"appworld": python.with_name("appworld"), "root": root}


@pytest.fixture(scope="session")
def real_world(real):
    """One world for most tests, as the package takes its time to start."""
    world = envs.make("appworld", **real, timeout=3)
    yield world
    world.close()


@pytest.mark.external
def test_the_package_says_what_ours_says(real_world):
    prompt, info = real_world.reset(options={"index": 0})
    assert info == {"answer": "made001_1"} and real_world.scenarios == ("made001",) * 3 + ("read002",) * 3
    assert prompt.startswith(
        "Supervisor: Ida Vogel, ida.vogel@example.com, 5550001234. Now: 2023-05-18T12:00:00.\n"
    )
    assert "\nTask: Make a note with the title word11.\n" in prompt and "\nsimple_note: " in prompt
    first, *_ = real_world.step("x = {'a': 1}\nprint(x, 'ä 🐕')")
    assert first == prompt + "x = {'a': 1}\nprint(x, 'ä 🐕')\n=> {'a': 1} ä 🐕\n"
    second, *_ = real_world.step("print(x['a'] + 1)")
    assert second.endswith("\n=> 2\n")
    third, *_ = real_world.step("x = 1 +")
    assert "\n=> Execution failed. Traceback:\n" in third.removeprefix(second)
    last, reward, terminated, _, info = real_world.step("apis.supervisor.complete_task()")
    assert last.endswith("\nTask completed. Your score (min 0.0, max 1.0): 0.67\n") and terminated
    assert reward == 2 / 3 and info["result"].items() >= {"success": False, "passed": 2, "tests": 3}.items()


@pytest.mark.external
@pytest.mark.parametrize("split", ["train", "dev", "test_normal", "test_challenge"])
def test_the_package_finds_its_solutions_right(real, split):
    world = envs.make("appworld", **real, split=split, reward="success")
    for index in range(world.num_tasks):
        observation, _ = world.reset(options={"index": index})
        assert world.step(world.expert(observation))[1] == 1.0
        world.reset(options={"index": index})
        _, reward, terminated, _, info = world.step("apis.supervisor.complete_task(answer='wrong')")
        assert terminated and reward == 0.0  # nothing was left of the episode before
        assert info["result"]["passed"] == (2 if world.tasks[index].startswith("read") else 1)
    world.close()


@pytest.mark.external
def test_the_package_stops_code_that_takes_too_long_and_we_stop_the_package(real_world):
    real_world.reset(options={"index": 0})
    assert "timed out after 3 seconds" in real_world.step("while True: pass")[0]
    assert real_world.step("print(1)")[0].endswith("\n=> 1\n")
    real_world.server.patience = 6
    pid = real_world.server.process.pid
    swallow = "while True:\n    try:\n        sum(range(10**6))\n    except BaseException: pass"
    with pytest.raises(envs.WorldBroken, match="TimeoutError"):
        real_world.step(swallow)
    assert not is_alive(pid)
    real_world.reset(options={"index": 3})
    assert real_world.step(real_world.expert(""))[1] == 1.0


FILE = "FILE"  # stands for the path of a file outside of the server's folder
HELD = {  # code, and what it reads
    "open(FILE).read()": "not allowed",
    "import socket": "not allowed",
    "import subprocess": "not allowed",
    "import sys; sys.exit()": "not allowed",
    "raise SystemExit(1)": "Exception: 1",
    "import builtins; getattr(builtins, 'open')(FILE, 'w')": "PermissionError",
    "import os; os.remove(FILE)": "not allowed",
    "print(getattr(__import__('os'), 'system')('echo no'))": "None",
    "get_ipython().system('echo no')": "Execution",
}
RIGHT = "data/tasks/read002_1/ground_truth/answer.json"
NOT_HELD = {
    "o = open; print(o(FILE).read())": "what is in the file",
    "import pathlib; print(pathlib.Path(FILE).read_text())": "what is in the file",
    "io = __import__('_io'); print(io.open(FILE, 'a').write('!'))": "1",
    "print(__import__('posix').system('test -d /'))": "0",
    "print(__import__('socket').socket().family)": "2",
    "print(__import__('ctypes').CDLL(None).getppid() > 0)": "True",
    f"import pathlib; print(pathlib.Path({RIGHT!r}).read_text())": "blue word21",
    "import appworld.evaluator; print(appworld.evaluator.TestTracker.__name__)": "TestTracker",
}


@pytest.mark.external
@pytest.mark.parametrize(("code", "said"), [*HELD.items(), *NOT_HELD.items()])
def test_what_the_docs_say_of_hostile_code_is_so(real_world, tmp_path, code, said):
    """If the package learns to hold more than this, docs/worlds/appworld.md is to be mended."""
    (tmp_path / "file").write_text("what is in the file")
    if real_world.over:
        real_world.reset(options={"index": 0})
    real_world.turns = 0
    before = real_world.observation
    code = code.replace(FILE, repr(str(tmp_path / "file")))
    assert said in real_world.step(code)[0].removeprefix(before + code)
    assert real_world.step("print(1 + 1)")[0].endswith("\n=> 2\n")


@pytest.mark.external
def test_what_code_changes_in_the_grading_stays_until_the_server_is_replaced(real):
    """No more than the docs say: with the package, code can reward itself."""
    world = envs.make("appworld", **real, episodes_per_server=2)
    forge = (
        "import appworld.evaluator as e\ne.TestTracker.to_dict = lambda *_, **__: {'num_tests': 9, "
        "'passes': [1] * 9}"
    )
    rewards = []
    for code in (forge, "pass", "pass"):
        world.reset(options={"index": 0})
        world.step(code)
        rewards.append(world.step("apis.supervisor.complete_task(answer='wrong')")[1])
    assert rewards == [1.0, 1.0, 1 / 3]
    world.close()


@pytest.mark.external
@pytest.mark.parametrize("code", ["print('\\ud800')", "raise KeyboardInterrupt", "print('x' * 30_000_000)"])
def test_what_breaks_the_package_breaks_the_episode_and_no_more(real_world, code):
    real_world.reset(options={"index": 0})
    with pytest.raises(envs.WorldBroken):
        real_world.step(code)
    real_world.reset(options={"index": 0})
    assert real_world.step(real_world.expert(""))[1] == 1.0


@pytest.mark.external
def test_the_package_reads_nothing_of_our_environment(real_world, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hf_123")
    real_world.close()
    real_world.reset(options={"index": 0})
    assert real_world.step("import os\nprint('SECRET' in str(os.environ), os.environ['HOME'])")[0].endswith(
        f"\n=> False {real_world.server.folder}\n"
    )
    assert not list((real_world.data.parent).glob("experiments"))  # it writes to the server's own folder


@pytest.mark.external
def test_with_the_package_it_keeps_to_what_every_world_does(real):
    said = run_with(
        real, "-m", "pytest", "tests/worlds/test_envs.py", "-q", "-k", "appworld", "-p", "no:cacheprovider"
    )
    assert re.search(r"\b[12][0-9] passed, 1 skipped", said), said
