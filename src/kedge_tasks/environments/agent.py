"""Agents: functions that play an episode on their own, and call the policy through OpenAI's client.

    async def run(row, client):
        answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["q"]}])
        return float(row["answer"] in answer.choices[0].message.content)

It returns its reward: a number, one number for each call, or None for 0. `row` is a copy of the prompt's row; an
argument `seed`, if it has one, is the episode's seed. A function without `async` gets the client without `async`, and
runs in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from kedge_base.environment_turn import EnvironmentTurn
from kedge_base.errors import EnvError
from kedge_base.texts import place_of, typed_error_text
from kedge_base.workers.codec import own_copy
from kedge_tasks.environments.chat import Answer, Answers, Request
from kedge_tasks.environments.endpoint import Endpoint, ended
from kedge_tasks.environments.shapes import accepted, finite_number


def is_agent(kind: Callable[..., Any]) -> bool:
    """True for a function that needs arguments, as opposed to a class, or a function that makes an environment."""
    if inspect.isclass(kind):
        return False
    try:
        inspect.signature(kind).bind()
    except TypeError:
        return callable(kind)
    except ValueError:  # the callable has no signature
        pass
    return False


class Agent:
    """An episode of an agent: its requests are the turns of the policy.

    Args:
        function: The user's function.
        name: Its name in errors.
        endpoint: Where it calls the policy.
    """

    tools = None
    has_reset = False
    is_async = True

    def __init__(self, function: Callable[..., Any], name: str, endpoint: Endpoint) -> None:
        self._function = function
        self._name = name
        self._endpoint = endpoint
        self._queue: deque[tuple[Request, asyncio.Future[Answer]]] = deque()
        self._answers = Answers()

    async def open(self, row: Mapping[str, Any], seed: int) -> EnvironmentTurn:
        """Start the function; return the conversation of its first request."""
        function = self._function
        is_async = inspect.iscoroutinefunction(function)
        self._news = asyncio.Event()
        self._key = self._endpoint.admit(self._answered)
        client = self._endpoint.client(self._key, is_async=is_async)
        play = partial(function, own_copy(row), client, **accepted(function, {"seed": seed}))
        self._task = asyncio.create_task((_played if is_async else _played_in_thread)(play, client))
        self._task.add_done_callback(lambda _: self._news.set())
        return await self._next()

    async def step(self, **said: Any) -> EnvironmentTurn:
        """Answer the request, see `Request.answered`; return the conversation of the next one, or the reward."""
        request, awaited = self._queue.popleft()
        answer = request.answered(len(self._answers.texts), **said)
        self._answers.add(request.conversation, answer)
        if not awaited.done():  # otherwise its client has canceled it
            awaited.set_result(answer)
        return replace(await self._next(), num_calls=answer.num_calls, num_errors=answer.num_errors)

    async def finish(self) -> EnvironmentTurn:
        """Refuse further requests; return the reward, or 0 if the function raises."""
        self._refuse()
        await asyncio.wait([self._task])
        _, error = self._task.result()
        return EnvironmentTurn(ending="completed") if error or not self._answers.texts else self._end()

    def close(self) -> None:
        """Refuse further requests and cancel the function."""
        self._refuse()
        self._task.cancel()

    async def _answered(self, request: Request) -> Sequence[Answer]:
        """See `Answering`."""
        answers = [asyncio.Future[Answer]() for _ in range(request.number)]
        self._queue.extend((request, answer) for answer in answers)
        self._news.set()
        return await asyncio.gather(*answers)

    async def _next(self) -> EnvironmentTurn:
        """Wait for a request, or for the function to return."""
        while not self._task.done():
            for request, answer in [*self._queue]:
                if not answer.done():
                    context, num_changed = self._answers.context(request.conversation)
                    return replace(request.turn, context=context, num_changed=num_changed)
                self._queue.popleft()  # its client has canceled it
            self._news.clear()
            await self._news.wait()
        return self._end()

    def _end(self) -> EnvironmentTurn:
        """Return the function's reward; 0 for the first answers to a last request that was not sent the others.

        Raises:
            EnvError: It has raised, returned something else, or not called the policy.
        """
        value, error = self._task.result()
        if error is not None:
            raise EnvError(f"{self._name} raised {typed_error_text(error)} ({place_of(error)})") from error
        number = len(self._answers.texts)
        unsent = [request.number for request, _ in self._queue if request is self._queue[0][0]]
        rewards = [*[0.0] * (number - 1), 0.0 if value is None else value]
        if isinstance(value, list):
            rewards = value + [0.0] * (max(unsent, default=0) - len(unsent))
        if not number or len(rewards) != number:
            raise EnvError(
                f"{self._name} returned {value!r:.60} after {number} calls of the policy; expected a reward after one "
                "or more calls, or a list with one for each"
            )
        giver = f"{self._name} returned the reward"
        return EnvironmentTurn(rewards=[finite_number(each, giver) for each in rewards], ending="completed")

    def _refuse(self) -> None:
        """Answer all requests, and later ones, with an error."""
        self._endpoint.episodes.pop(self._key, None)
        for _, answer in self._queue:
            if not answer.done():
                answer.set_exception(ended())


async def _played(play: Callable[[], Awaitable[Any]], client: Any) -> tuple[Any, Any]:
    """Return the result of an async function and None, or None and its error: SystemExit would end the event loop."""
    try:
        async with client:
            return await play(), None
    except BaseException as error:
        return None, error


async def _played_in_thread(play: Callable[[], Any], client: Any) -> tuple[Any, Any]:
    """Run a function in a daemon thread; see `_played`."""
    future = Future[tuple[Any, Any]]()
    future.set_running_or_notify_cancel()
    process = os.getpid()

    def run() -> None:
        try:
            with client:
                outcome = play(), None
        except BaseException as error:
            outcome = None, error
        if os.getpid() != process:
            os._exit(0)  # a fork made by the function
        future.set_result(outcome)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
