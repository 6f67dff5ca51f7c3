"""Environments of OpenEnv servers; docs/worlds/openenv.md says what becomes text, and how.

python -m envs.play envs.worlds.openenv:OpenEnv --world url=ws://127.0.0.1:8000,field=message

To take it alone, copy envs/__init__.py, envs/adapt.py, envs/datasets.py and envs/worlds/openenv.py, each to
the same place. It needs gymnasium and websockets.
"""

import json
import re
import weakref
from contextlib import suppress

from envs import Unavailable, WorldBroken

URL = "ws://127.0.0.1:8000"  # the port that OpenEnv's own servers take


class OpenEnv:
    """A session of a server. Whatever goes wrong between the two is an envs.WorldBroken, in one line."""

    def __init__(self, url=URL, field: str = "message", text: str = "", turns: int = 100, wait: int = 60):
        self.url = re.sub("^http", "ws", url.rstrip("/").removesuffix("/ws")) + "/ws"
        self.field, self.text, self.max_turns, self.wait = field, text, turns, wait
        self.begin(Unavailable)

    def begin(self, kind: type) -> None:
        """Begins a session, for which the server makes an environment. Raises `kind` if none answers."""
        from websockets.sync.client import connect  # here: not everyone who reads this file has it

        limits = {"open_timeout": self.wait, "close_timeout": 1, "max_size": 10**7}  # seconds, and bytes
        try:
            self.socket = connect(self.url, **limits).__enter__()  # `leave` is its exit
        except Exception as error:  # it depends on the server which
            raise kind(f"no OpenEnv server answers at {self.url}: {one_line(error)}") from error
        self.close = weakref.finalize(self, leave, self.socket)

    def reset(self, seed: int, options: dict) -> tuple[str, dict]:
        if self.socket.state.name != "OPEN":  # it broke, or the server was started anew
            self.begin(WorldBroken)
        return self.ask("reset", {"seed": seed})[0], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        text, reward, done = self.ask("step", self.to_action(action))
        return text, reward, done, False, {"result": {"success": done and reward >= 1}}

    def to_action(self, text: str) -> dict | str:
        """The environment's action. With field=json the server refuses text that is no JSON object."""
        if self.field != "json":
            return {self.field: text}
        with suppress(ValueError, RecursionError):
            return json.loads(text)
        return text

    def to_text(self, seen: dict) -> str:
        """The field `text` of an observation; where it has none, a line for each field but its metadata."""
        values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in seen.items()}
        return values.get(self.text, "\n".join(f"{k}: {v}" for k, v in values.items() if k != "metadata"))

    def ask(self, request: str, data: dict | str) -> tuple[str, float, bool]:
        """What the server says to a request: text, reward, and whether the episode is over."""
        try:
            with suppress(Exception):  # a server may have closed, having said why
                self.socket.send(json.dumps({"type": request, "data": data}))
            match json.loads(self.socket.recv(self.wait)):
                case {"data": {"observation": dict(seen), "reward": reward, "done": bool(done)}}:
                    text = self.to_text(seen).encode("utf-8", "replace")  # it may have half a surrogate pair
                    return text.decode("utf-8"), float(reward or 0), done
                case {"data": {"errors": [{"type": "missing", "loc": [name]}, *_]}} if self.field != "json":
                    raise ValueError(f"field={self.field}, but an action needs {name}")
                case {"data": {"errors": [{"msg": why}, *_]}}:
                    return f"Invalid action: {one_line(why)}", 0.0, False
                case {"data": {"code": "EXECUTION_ERROR", "message": why}} if request == "step":
                    return f"Invalid action: {one_line(why)}", 0.0, False
                case other:
                    raise ValueError(f"it said {other!r:.200}")
        except Exception as error:  # likewise
            self.close()  # a late answer must not be taken for that to the next request
            raise WorldBroken(f"{self.url} gives no good answer to {request}: {one_line(error)}") from error


def leave(socket) -> None:
    """Ends a session. Once the server has closed it, there is room for another."""
    with suppress(Exception), socket:
        socket.send('{"type": "close"}')
        socket.recv(timeout=1)


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
