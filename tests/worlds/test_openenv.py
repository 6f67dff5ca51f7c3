"""Environments of OpenEnv servers: a server here that speaks the protocol of openenv 0.10.0."""

import importlib.util
import json
import random
import re
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import envs
import envs.check
import loop_ppo
import sft
from envs.worlds.openenv import OpenEnv

ID = "envs.worlds.openenv:OpenEnv"
HERE = "test_openenv"

is_here = importlib.util.find_spec("websockets")
needs_websockets = pytest.mark.skipif(
    not is_here, reason="needs the package websockets: pip install websockets"
)
external = [pytest.mark.external, needs_websockets]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


# ------------------------------------------------------------------------------------- the servers


class Game:
    """Higher or lower with numbers to 20, as the environment of a server; a guess is a whole number."""

    def reset(self, seed: int | None = None) -> dict:
        self.number, self.left = random.Random(seed).randint(1, 20), 6
        return self.told("Guess a number from 1 to 20.", 0.0, False)

    def step(self, action: dict) -> dict:
        guess = number_of(action)
        if guess > 10**6:
            raise OverflowError("too far,\nby far")
        self.left -= 1
        won = guess == self.number
        said = "Right." if won else "Higher." if guess < self.number else "Lower."
        return self.told(said, 1.0 if won else None, won or self.left == 0)

    def told(self, said: str, reward: float | None, done: bool) -> dict:
        observation = {"said": said, "left": self.left, "metadata": {"secret": self.number}}
        return {"observation": observation, "reward": reward, "done": done}


class Refused(Exception):
    """An action of another type, with pydantic's list of what is wrong with it."""


def number_of(action) -> int:
    """What the server's action class makes of it: another field, or no number, is refused."""
    if not isinstance(action, dict):
        raise Refused([{"type": "dict_type", "loc": ["data"], "msg": "Input should be a valid dictionary"}])
    extra = [
        {"type": "extra_forbidden", "loc": [name], "msg": "Extra inputs are not permitted"}
        for name in action
        if name != "guess"
    ]
    if "guess" not in action:
        raise Refused([{"type": "missing", "loc": ["guess"], "msg": "Field required"}, *extra])
    if extra:
        raise Refused(extra)
    if not re.fullmatch(r"-?[0-9]{1,300}", str(action["guess"])):
        raise Refused([{"type": "int_parsing", "loc": ["guess"], "msg": "Input should be\na valid integer"}])
    return int(action["guess"])


def answer_of(game, message: dict) -> dict:
    """An observation, or the error of the code that the server has for it."""
    try:
        if message["type"] == "reset":
            return {"type": "observation", "data": game.reset(message["data"]["seed"])}
        return {"type": "observation", "data": game.step(message["data"])}
    except Refused as error:
        about = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": error.args[0]}
    except Exception as error:
        about = {"message": str(error), "code": "EXECUTION_ERROR"}
    return {"type": "error", "data": about}


@contextmanager
def running(handle):
    """The address of a server that calls `handle` with each connection. At the end it is gone."""
    from websockets.sync.server import serve

    connections = []

    def handle_and_keep(connection):
        connections.append(connection)
        handle(connection)

    with serve(handle_and_keep, "127.0.0.1", 0, close_timeout=1) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        for connection in connections:  # versions before 17 leave them open
            connection.close()
        thread.join()


def sessions(room: int, make=Game):
    """How a server handles a connection: a session each, for as many at a time as there is room for."""
    places = threading.Semaphore(room)

    def handle(connection):
        if connection.request.path != "/ws" or not places.acquire(blocking=False):
            about = {"message": f"Server at capacity: {room}", "code": "CAPACITY_REACHED"}
            connection.send(json.dumps({"type": "error", "data": about}))
            return
        try:
            game = make()
            for text in connection:
                message = json.loads(text)
                if message == {"type": "close"}:
                    time.sleep(0.05)  # it takes its time to clear up
                    break
                connection.send(json.dumps(answer_of(game, message)))
        finally:
            places.release()

    return handle


def saying(*answers):
    """Handles a connection by these answers, whatever is asked; behind the last it closes."""

    def handle(connection):
        for answer in answers:
            connection.recv()
            connection.send(answer)

    return handle


@pytest.fixture(scope="module")
def url():
    with running(sessions(room=100)) as url:
        yield url


def halving(dialogue: str, rng: random.Random) -> str:
    """Guesses the middle of what is left, now and then anything."""
    low, high = 1, 20
    for guess, said in re.findall(r"^(\d+)\n(Higher|Lower)", dialogue, re.M):
        low = max(low, int(guess) + 1) if said == "Higher" else low
        high = min(high, int(guess) - 1) if said == "Lower" else high
    return str((low + high) // 2 if rng.random() < 0.8 else rng.randint(1, 20))


class Guessing(OpenEnv):
    """A class of one's own, which gives the environment a player."""

    def __init__(self, url: str):
        super().__init__(url, field="guess", text="said")
        self.players = {"halving": halving}


# ------------------------------------------------------------------------------------- tests


class TestWithServer:
    pytestmark = external

    @pytest.mark.parametrize("rule", envs.check.RULES, ids=lambda rule: rule.__name__)
    @pytest.mark.parametrize("id", [ID, f"{HERE}:Guessing"])
    def test_it_keeps_the_rules(self, id, rule, url):
        options = {"field": "guess", "text": "said"} if id == ID else {}
        rule(envs.check.maker(id, url=url, **options))

    def test_an_episode(self, url):
        world = envs.make(ID, url=url, field="guess", text="said")
        number = str(random.Random(5).randint(1, 20))
        observation, info = world.reset(seed=5)
        assert (observation, info) == ("Guess a number from 1 to 20.\n", {"answer": "unknown"})
        observation, *middle, info = world.step("0")
        assert (observation, middle) == ("Guess a number from 1 to 20.\n0\nHigher.\n", [0.0, False, False])
        observation, *end, info = world.step(number)
        assert observation.endswith(f"\n{number}\nRight.\n") and end == [1.0, True, False]
        assert info["result"] == {"return": 1.0, "length": 2, "success": True}

    def test_a_lost_episode_is_no_success(self, url):
        world = envs.make(ID, url=url, field="guess", text="said")
        world.reset(seed=5)
        *_, (_, reward, terminated, truncated, info) = [world.step("0") for _ in range(6)]
        assert (reward, terminated, truncated) == (0.0, True, False)
        assert info["result"] == {"return": 0.0, "length": 6, "success": False}

    def test_turns_cut_an_episode(self, url):
        world = envs.make(ID, url=url, field="guess", turns=2)
        world.reset(seed=5)
        assert not world.step("0")[3] and world.step("0")[2:4] == (False, True)

    def test_without_text_all_but_the_metadata_is_shown(self, url):
        for options in ({}, {"text": "sayd"}):
            world = envs.make(ID, url=url, field="guess", **options)
            assert world.reset(seed=1)[0] == "said: Guess a number from 1 to 20.\nleft: 6\n"

    def test_what_is_no_text_is_shown_as_json(self):
        seen = {"grid": [[1, None], [0.5, True]], "who": {"name": "Ä"}, "half": "\ud800!"}
        answer = {"observation": seen, "reward": None, "done": False}
        with running(saying(json.dumps({"type": "observation", "data": answer}))) as url:
            observation, _ = envs.make(ID, url=url).reset(seed=0)
        assert observation == 'grid: [[1, null], [0.5, true]]\nwho: {"name": "Ä"}\nhalf: ?!\n'

    @pytest.mark.parametrize(
        ("field", "action", "why"),
        [
            ("guess", "", "Input should be a valid integer"),
            ("guess", "seven", "Input should be a valid integer"),
            ("guess", "9999999", "too far, by far"),
            ("json", "seven", "Input should be a valid dictionary"),
            ("json", "[" * 999, "Input should be a valid dictionary"),
            ("json", "7", "Input should be a valid dictionary"),
            ("json", '{"gess": 7}', "Field required"),
            ("json", '{"guess": 7, "sure": true}', "Extra inputs are not permitted"),
        ],
    )
    def test_a_refused_action_costs_a_turn(self, field, action, why, url):
        world = envs.make(ID, url=url, field=field, text="said")
        before, _ = world.reset(seed=1)
        observation, reward, terminated, truncated, _ = world.step(action)
        assert observation == f"{before}{action}\nInvalid action: {why}\n"
        assert (reward, terminated, truncated) == (0.0, False, False)
        good = '{"guess": "0"}' if field == "json" else "0"
        assert world.step(good)[0].endswith(f"{good}\nHigher.\n"), "the session goes on"

    def test_a_field_that_actions_do_not_have_is_one_line(self, url):
        world = envs.make(ID, url=url)
        world.reset(seed=1)
        with pytest.raises(
            envs.WorldBroken,
            match=r"/ws gives no good answer to step: field=message, but an action needs guess$",
        ):
            world.step("7")

    @pytest.mark.parametrize("written", ["{}", "{}/", "{}/ws", "http{}"])
    def test_addresses_that_are_one(self, written, url):
        address = written.format(url.removeprefix("ws") if written.startswith("http") else url)
        assert envs.make(ID, url=address, field="guess").reset(seed=1)[0]

    def test_a_closed_world_makes_room_at_once(self):
        with running(sessions(room=1)) as url:
            for _ in range(3):
                world = envs.make(ID, url=url, field="guess")
                world.reset(seed=1)
                world.close()
                world.close()
            world = envs.make(ID, url=url, field="guess")
            with pytest.raises(envs.WorldBroken, match=r"answer to reset: .*Server at capacity: 1"):
                envs.make(ID, url=url, field="guess").reset(seed=1)
            assert world.reset(seed=1)[0]
            del world  # as scripts leave theirs
            assert envs.make(ID, url=url, field="guess").reset(seed=1)[0]

    def test_after_a_broken_connection_the_next_episode_has_a_new_one(self):
        doomed = iter([True, False])

        def handle(connection):
            if next(doomed):
                return saying(json.dumps(answer_of(Game(), {"type": "reset", "data": {"seed": 1}})))(
                    connection
                )
            return sessions(room=1)(connection)

        with running(handle) as url:
            world = envs.make(ID, url=url, field="guess", text="said")
            world.reset(seed=1)
            with pytest.raises(envs.WorldBroken, match=r"/ws gives no good answer to step: .*1000 \(OK\)"):
                world.step("0")
            world.reset(seed=1)
            assert "Higher." in world.step("0")[0]

    def test_no_server_any_more(self):
        with running(sessions(room=9)) as url:
            worlds = envs.VecTextEnv(ID, 1, url=url, field="guess")
            worlds.reset()
        with pytest.raises(
            envs.WorldBroken, match=rf"^world 0 .*, step: {url}/ws gives no .* to step: received 100[01]"
        ) as error:
            worlds.step({0: "1"})
        assert "\n" not in str(error.value)
        with pytest.raises(
            envs.WorldBroken, match=rf"^world 0 .*, reset: no OpenEnv server answers at {url}/ws"
        ):
            worlds.reset()

    @pytest.mark.parametrize(
        ("said", "why"),
        {
            "Hello.": "Expecting value",
            b"\xff\xfe\xfd": "can't decode",
            "[" * 10**5: "recursion",
            "[]": r"it said \[\]",
            "NaN": "it said nan",
            '{"type": "observation"}': "it said {'type'",
            '{"type": "state", "data": {"step_count": 1}}': "it said {'type': 'state'",
            '{"data": {"observation": "text", "reward": 1, "done": false}}': "it said",
            '{"data": {"observation": {}, "reward": 1, "done": "yes"}}': "it said",
            '{"data": {"observation": {}, "reward": [1], "done": true}}': "not 'list'",
            '{"data": {"observation": {}, "reward": 1%s, "done": true}}' % ("0" * 400): "too large",
            '{"data": {"observation": {}, "reward": 1%s, "done": true}}' % ("0" * 5000): "limit",
            json.dumps({"data": {"observation": {"a": "a" * 10**7}, "reward": 1, "done": True}}): "1009",
            '{"type": "error", "data": {"message": "no\\nroom", "code": "FACTORY_ERROR"}}': r"no\\nroom",
            '{"type": "error", "data": {"errors": []}}': "it said",
        }.items(),
        ids=lambda text: text[:60] if isinstance(text, str) else None,
    )
    def test_a_hostile_server_is_one_line(self, said, why):
        with running(saying(said)) as url:
            world = envs.make(ID, url=url)
            with pytest.raises(
                envs.WorldBroken, match=rf"^{url}/ws gives no good answer to reset: .*{why}"
            ) as error:
                world.reset(seed=0)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400

    def test_a_reward_that_is_no_number_is_one_line(self):
        with running(saying('{"data": {"observation": {}, "reward": NaN, "done": false}}')) as url:
            assert envs.make(ID, url=url).reset(seed=0)[0] == "\n", "that of a reset counts for nothing"
        good = '{"data": {"observation": {}, "reward": 0, "done": false}}'
        with running(saying(good, good.replace("0", "NaN"))) as url:
            world = envs.make(ID, url=url)
            world.reset(seed=0)
            with pytest.raises(envs.NotAWorld, match="reward that step returns must be a number, not nan"):
                world.step("x")

    def test_a_silent_server_is_not_waited_for(self):
        """Neither one that takes a request and does not answer, nor one that does not even shake hands."""
        with running(lambda connection: connection.recv() and time.sleep(3)) as url:
            world = envs.make(ID, url=url, wait=1)
            began = time.monotonic()
            with pytest.raises(envs.WorldBroken, match="reset: timed out"):
                world.reset(seed=0)
            assert time.monotonic() - began < 4
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            began = time.monotonic()
            with pytest.raises(envs.Unavailable, match=r"no OpenEnv server answers at .*timed out"):
                envs.make(ID, url=f"ws://127.0.0.1:{deaf.getsockname()[1]}", wait=1)
            assert time.monotonic() - began < 4

    def test_no_server_is_one_line(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        for url, why in {f"ws://127.0.0.1:{port}": "refused", "127.0.0.1": "scheme isn't ws or wss"}.items():
            with pytest.raises(envs.Unavailable, match=rf"^no OpenEnv server answers at {url}/ws: .*{why}"):
                envs.make(ID, url=url)

    def test_the_page_s_class_is_a_world(self, url, monkeypatch):
        page = Path(__file__).parents[2] / "docs/worlds/openenv.md"
        (example,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
        module = ModuleType("my_env")
        exec(example, vars(module))
        monkeypatch.setitem(sys.modules, "my_env", module)
        envs.check.has_players(envs.check.maker("my_env:Guess", url=url))
        made = envs.make("my_env:Guess", url=url).demonstrations(10, seed=0)
        assert 0 < envs.summarise(made)["success"] <= 1

    def test_sft_and_loop_take_it(self, tmp_path, url):
        sizes = {
            "epochs": 1,
            "batch": 4,
            "eval_episodes": 2,
            "width": 32,
            "layers": 1,
            "max_action_tokens": 6,
        }
        common = {"env": f"{HERE}:Guessing", "world": f"url={url}", "threads": 1}
        sft.main(sft.Args(runs=str(tmp_path / "sft"), demonstrations=8, **common, **sizes))
        (model,) = map(str, tmp_path.glob("sft/*/actor"))
        tiny = {"iterations": 2, "eval_episodes": 2, "max_action_tokens": 6, "min_advantage": 0.0}
        groups = {"tasks": 2, "rollouts": 2, "worlds": 4, "runs": str(tmp_path / "runs")}
        summary = loop_ppo.main(loop_ppo.Args(model=model, **common, **tiny, **groups))
        assert 0 <= summary["eval_return"] <= 1 and summary["episodes"] == 8


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets", None)
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    with pytest.raises(envs.Unavailable, match=r"needs the package websockets.*: pip install websockets"):
        envs.make(ID)
