"""Client of OpenEnv servers: each episode is a session on a WebSocket, in JSON. OpenEnv's own package is not needed.

`--environment openenv:http://HOST:PORT` plays a server's environment as a game: the policy's text becomes a text field
of an action, and the policy reads a field of the observation. If there are several such fields,
`openenv:http://HOST:PORT,action=FIELD,observation=FIELD` names them; see `OpenEnv` for other actions.

Source: meta-pytorch/OpenEnv, src/openenv/core/env_server/http_server.py and types.py, of 0.3.0 and 0.10.0.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from kedge_base.errors import EnvError, install_line
from kedge_base.texts import error_text
from kedge_tasks.environments.shapes import Step, as_text

PREFIX = "openenv:"
"""Prefix of a server's address in an environment's name."""
LARGEST_MESSAGE = 2**24
"""Maximum bytes of a message from the server."""
SCHEMA_SECONDS = 20.0
SEEDS = 2**31
"""Upper bound of seeds, because many environments pass them to NumPy or C."""
SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


def find_served(spec: str) -> Callable[[], OpenEnv]:
    """Return a function that opens sessions on a named server.

    Args:
        spec: `openenv:URL`, followed by `,action=FIELD` and `,observation=FIELD` if the schema leaves them open.

    Raises:
        EnvError: The spec has another form.
    """
    url, *parts = spec.removeprefix(PREFIX).split(",")
    chosen = {name: field for name, _, field in (part.partition("=") for part in parts)}
    if not set(chosen) <= {"action", "observation"} or not all(chosen.values()):
        raise EnvError(f"environment {spec!r} is misspelt; expected {PREFIX}URL,action=FIELD,observation=FIELD")
    return partial(OpenEnv, url, chosen.get("action"), chosen.get("observation"))


class OpenEnv:
    """A game on an OpenEnv server, in a separate session.

    Args:
        url: The server's address, `http://HOST:PORT`; also with https, ws, wss or a path.
        action: The field of an action that gets the policy's text, or a function from the text to an action; None for
            the only text field in the server's schema.
        observation: The field of an observation that the policy reads, or a function from an observation to the text;
            None for the only text field.

    Raises:
        EnvError: The package websockets is not installed; the server does not answer, or has no such field.
    """

    def __init__(
        self,
        url: str,
        action: str | Callable[[str], Mapping[str, Any]] | None = None,
        observation: str | Callable[[Mapping[str, Any]], str | None] | None = None,
    ) -> None:
        try:
            import websockets  # noqa: F401
        except ImportError as error:
            raise EnvError(f"{PREFIX}{url} needs the package websockets: {install_line('openenv')}") from error
        self._url = _base(url)
        self._action = action if callable(action) else _field(self._url, "action", action)
        self._observation = observation if callable(observation) else _field(self._url, "observation", observation)
        self._socket: Any = None
        self._end: Callable[[], object] = lambda: None

    async def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        """Start an episode. The server uses the seed, and the row's columns that are arguments of its reset."""
        from websockets.protocol import State

        if self._socket is None or self._socket.state is not State.OPEN:
            self._socket = await self._connect()
        result = self._result(await self._ask("reset", {"seed": seed % SEEDS, **row}))
        if result["done"]:
            raise self._fault("has opened an episode that is over (done)")
        return self._read(result["observation"])

    async def step(self, text: str) -> Step:
        """Take a turn; return the reply, or the reason why the server rejected the action."""
        action = self._action(text) if callable(self._action) else {self._action: text}
        reply = await self._ask("step", action)
        data = reply["data"]
        if reply["type"] == "error" and data.get("code") == "VALIDATION_ERROR" and not callable(self._action):
            reasons = [str(each.get("msg")) for each in _mappings(data.get("errors"))]
            return Step(f"Invalid: {'; '.join(reasons) or data.get('message')}")
        result = self._result(reply)
        reward = 0.0 if result["reward"] is None else result["reward"]
        return Step(self._read(result["observation"]), reward, terminated=result["done"])

    async def _connect(self) -> Any:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        try:
            connection = await connect(
                f"ws{self._url.removeprefix('http')}/ws",
                proxy=None if _is_local(self._url) else True,
                compression=None,
                max_size=LARGEST_MESSAGE,
                open_timeout=None,  # calls have their own time limit
                ping_timeout=None,  # an environment may block its server as long as that
            )
        except (OSError, WebSocketException) as error:
            raise self._fault(f"accepts no session ({error_text(error)})") from error
        self._end()  # of an earlier connection, which was lost
        # Instances are dropped after a failure, but the event loop keeps their connections, and a server its sessions.
        loop = asyncio.get_running_loop()
        self._end = end = weakref.finalize(self, loop.call_soon_threadsafe, connection.transport.abort)
        end.atexit = False
        return connection

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request; return the reply, a mapping whose `data` is a mapping."""
        from websockets.exceptions import ConnectionClosed

        try:
            request = json.dumps({"type": kind, "data": data}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._fault(f"takes JSON, and a {kind} has another value ({error_text(error)})") from error
        try:
            with suppress(ConnectionClosed):  # the reason may still be readable
                await self._socket.send(request)
            received = await self._socket.recv()
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == 1009:
                raise self._fault(f"sent a message of more than {LARGEST_MESSAGE // 2**20} MiB") from error
            raise self._fault(f"has ended the connection during a {kind} ({error_text(error)})") from error
        except BaseException:  # such as a timeout: the late reply would be taken for the next call's
            self._socket.transport.abort()
            raise
        try:
            reply = json.loads(received)
        except (ValueError, RecursionError) as error:
            raise self._fault(f"answered a {kind} with something other than JSON ({error_text(error)})") from error
        if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict) or "type" not in reply:
            raise self._fault(f"answered a {kind} with {received!r:.80}; expected an object with type and data")
        return reply

    def _result(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        """The observation, reward and done of a reply."""
        data = reply["data"]
        if reply["type"] == "error":
            is_full = data.get("code") == "CAPACITY_REACHED"
            hint = "; the episodes of a batch have a session each: raise the server's max_concurrent_envs" * is_full
            raise self._fault(f"answered: {data.get('message')!s:.300} ({data.get('code')!s:.40}){hint}")
        is_complete = isinstance(data.get("observation"), dict) and isinstance(data.get("done"), bool)
        if reply["type"] != "observation" or not is_complete or "reward" not in data:
            raise self._fault(
                f"answered with {json.dumps(reply):.120}; expected an observation with a reward, and done as true or "
                "false"
            )
        return data

    def _read(self, observation: Mapping[str, Any]) -> str | None:
        if callable(self._observation):
            return self._observation(observation)
        if self._observation not in observation:
            raise self._fault(f"gave an observation without {self._observation!r}: {json.dumps(observation):.120}")
        value = observation[self._observation]
        return None if value is None else as_text(value)

    def _fault(self, what: str) -> EnvError:
        return EnvError(f"{PREFIX}{self._url} {what}")


def _base(url: str) -> str:
    """Normalize a server's address, to which `/ws` and `/schema` are added."""
    with suppress(ValueError):  # such as a port that is not a number
        parts = urlsplit(url)
        is_bare = not parts.query and not parts.fragment and "@" not in parts.netloc
        if parts.scheme in SCHEMES and parts.hostname and parts.port != 0 and is_bare:
            return f"{SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/ws')}"
    raise EnvError(f"environment '{PREFIX}{url}' has no address; expected such as {PREFIX}http://localhost:8000")


def _is_local(url: str) -> bool:
    """True for an address on this machine, which is reached without a proxy."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


@lru_cache(maxsize=32)
def _schemas(url: str) -> Mapping[str, Any]:
    """The JSON schemas of a server's actions and observations."""
    opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * _is_local(url))
    try:
        with opener.open(f"{url}/schema", timeout=SCHEMA_SECONDS) as reply:
            schemas = json.loads(reply.read(LARGEST_MESSAGE))
            return {part: _mapping(_mapping(schemas).get(part)) for part in ("action", "observation")}
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        raise EnvError(
            f"{PREFIX}{url} has no schema at {url}/schema ({error_text(error)}); is it an OpenEnv server, and running?"
        ) from error


def _field(url: str, part: str, name: str | None) -> str:
    """Return the field of an action or observation that contains the text.

    Raises:
        EnvError: The field is ambiguous or unknown, or an action also needs other fields.
    """
    schema = _schemas(url)[part]
    properties = {key: _mapping(value) for key, value in _mapping(schema.get("properties")).items()}
    fields = {key: value for key, value in properties.items() if key not in ("metadata", "reward", "done")}
    listed = ", ".join(f"{key} ({_type(value)})" for key, value in fields.items()) or "none"
    if {"tool_name", "arguments"} <= set(fields):
        raise EnvError(f"{PREFIX}{url} has tools by MCP, which kedge does not call")
    texts = [key for key, value in fields.items() if "string" in _type(value) and "const" not in value]
    if name not in fields and (name is not None or len(texts) != 1):
        problem = f"has {len(texts)} text fields" if name is None else f"has no field {name!r}"
        raise EnvError(f"{PREFIX}{url}: the {part} {problem}; name one by {part}=FIELD; the fields are {listed}")
    chosen = name or texts[0]
    others = [key for key in fields if key != chosen and key in (schema.get("required") or ())]
    if part == "action" and others:
        raise EnvError(f"{PREFIX}{url}: an action also needs {', '.join(others)}; write a function that builds it")
    return chosen


def _type(about: Mapping[str, Any]) -> str:
    """The types that a field's JSON schema allows, such as `string or null`."""
    kinds = [each.get("type") for each in (about, *_mappings(about.get("anyOf")))]
    return " or ".join(str(kind) for kind in kinds if kind is not None) or "any"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
