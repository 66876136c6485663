"""An OpenAI-compatible server on this machine, through which agents call the policy: each episode has its own key."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from kedge_base.errors import EnvError, install_line
from kedge_base.texts import typed_error_text
from kedge_tasks.environments import responses_api
from kedge_tasks.environments.chat import MODEL, Answer, Refusal, Request

HOST = "127.0.0.1"
KINDS = ("chat/completions", "completions", "responses")
"""The requests for answers."""
LARGEST_REQUEST = 2**24
"""Maximum bytes of a request."""


Answering: TypeAlias = Callable[[Request], Awaitable[Sequence[Answer]]]
"""Returns the policy's answers to an episode's request, in the order of arrival; raises `Refusal`."""


class Endpoint:
    """A server for the agents of all episodes.

    Args:
        temperature: The sampling temperature; None if no request may name one.

    Attributes:
        episodes: The episodes in progress, by key.

    Raises:
        EnvError: The packages are not installed.
    """

    def __init__(self, temperature: float | None) -> None:
        try:
            import aiohttp.web  # pyright: ignore[reportMissingImports]
            import openai  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise EnvError(f"agents need the packages openai and aiohttp: {install_line('agents')}") from error
        self._web: Any = aiohttp.web
        self._openai: Any = openai
        self._temperature = temperature
        self._prefix = f"kedge-{secrets.token_hex(8)}-"
        self.episodes: dict[str, Answering] = {}

    async def start(self) -> Endpoint:
        """Start to listen, in the running event loop; return the endpoint."""
        web = self._web
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A request that its client has given up is not sampled.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        import resource

        # Each episode holds two ends of a connection; the usual limit allows some five hundred.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # macOS has no hard limit, but refuses more than this.
        soft = 10240 if most == resource.RLIM_INFINITY else most
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
        await web.TCPSite(self._runner, HOST, 0).start()
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}/v1"
        return self

    async def close(self) -> None:
        """End the server and its connections."""
        await self._runner.cleanup()

    def admit(self, answering: Answering) -> str:
        """Return a key for an episode's requests."""
        key = self._prefix + secrets.token_hex(16)
        self.episodes[key] = answering
        return key

    def client(self, key: str, *, is_async: bool) -> Any:
        """Return OpenAI's client with a key; the caller closes it."""
        kind = self._openai.AsyncOpenAI if is_async else self._openai.OpenAI
        transport = self._openai.DefaultAsyncHttpxClient if is_async else self._openai.DefaultHttpxClient
        http = transport(trust_env=False, verify=False)  # no proxy; certificates take 70 ms to load
        client = kind(api_key=key, base_url=self.url, timeout=None, max_retries=0, http_client=http)
        if is_async:
            http.send = partial(_in_order, asyncio.Lock(), http.send)
            client._platform = "Unknown"  # otherwise found in a thread, which changes the order of the first requests
        return client

    def _episode(self, request: Any) -> Answering:
        key = request.headers.get("Authorization", "")[len("Bearer ") :]
        if key in self.episodes:
            return self.episodes[key]
        if key.startswith(self._prefix):
            raise ended()
        raise Refusal("the API key is not that of an episode; pass client.api_key", 401, "invalid_api_key")

    async def _handle(self, request: Any) -> Any:
        """Answer a request, also with an error in OpenAI's form."""
        try:
            return self._web.json_response(**await self._answered(request))
        except Refusal as error:
            refusal = error
        except self._web.HTTPRequestEntityTooLarge:
            refusal = Refusal(f"the request has more than {LARGEST_REQUEST // 2**20} MiB", 413)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            refusal = Refusal(f"the request is not valid ({typed_error_text(error, 80)})")
        body = {"message": refusal.message, "type": "invalid_request_error", "param": None, "code": refusal.code}
        return self._web.json_response({"error": body}, status=refusal.status)

    async def _answered(self, request: Any) -> dict[str, Any]:
        """The answer to a request, as arguments of `json_response`."""
        self._episode(request)  # raises for a stranger, before anything it sent is read
        asked = f"{request.method} {request.path}"
        if asked == "GET /v1/models":
            return {
                "data": {
                    "object": "list",
                    "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "kedge"}],
                }
            }
        kind = asked.removeprefix("POST /v1/")
        if kind not in KINDS:
            raise Refusal(f"{asked:.60} is not supported; there are {', '.join(KINDS)}", 404)
        body = await request.json()
        parsed = Request.of(responses_api.as_chat(body) if kind == "responses" else body, self._temperature)
        answers = await self._episode(request)(parsed)  # its episode may have ended meanwhile
        is_streamed = bool(body.get("stream"))
        if kind == "responses":
            written = responses_api.written(answers[0])
            events = responses_api.events(written)
        else:
            written = parsed.written(answers, is_chat=kind != "completions", is_streamed=is_streamed)
            events = f"data: {json.dumps(written)}\n\ndata: [DONE]\n\n"
        return {"text": events, "content_type": "text/event-stream"} if is_streamed else {"data": written}


async def _in_order(lock: asyncio.Lock, send: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Send a request after those that were made before it, and read the response, which the agent may drop."""
    async with lock:
        response = await send(*given, **named)
        await response.aread()
        return response


def ended() -> Refusal:
    """The answer to requests after the end of their episode."""
    return Refusal("the episode has ended; return the reward", 410, "episode_ended")
