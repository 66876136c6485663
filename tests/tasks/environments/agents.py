"""Agents for the tests, good ones and bad ones, by the name in the row's column `kind`."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import openai

HELD = {}
"""What an episode leaves for a later one."""


class Odd(BaseException):
    """Not an `Exception`."""


def user(text="hi"):
    return {"role": "user", "content": text}


async def ask(client, text="hi", **named):
    named = {"model": "policy", "messages": [user(text)], **named}
    return await client.chat.completions.create(**named)


async def said(client, text="hi", **named):
    answer = await ask(client, text, **named)
    return answer.choices[0].message.content


def send(client, path="/chat/completions", body=b"", key=None, method="POST"):
    """Send what OpenAI's client would not; return the status and the error's message."""
    headers = {"Authorization": f"Bearer {client.api_key if key is None else key}", "Content-Type": "application/json"}
    url = str(client.base_url).rstrip("/") + path
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body or None, headers, method=method)) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


def body(**named):
    return json.dumps({"model": "policy", "messages": [user()], **named}).encode()


class Kinds:
    """Each takes the row, and a client."""

    async def hangs_at_once(row, client):
        await asyncio.sleep(100)

    async def hangs_later(row, client):
        await said(client)
        await asyncio.sleep(100)

    async def blocks(row, client):
        await said(client)
        time.sleep(100)

    async def raises_at_once(row, client):
        raise ValueError("no such\nrow")

    async def raises(row, client):
        await said(client)
        raise KeyError("no such move")

    async def raises_odd(row, client):
        await said(client)
        raise Odd("odd")

    async def exits(row, client):
        await said(client)
        sys.exit(3)

    async def exits_at_once(row, client):
        sys.exit("nothing to do")

    async def interrupts(row, client):
        await said(client)
        raise KeyboardInterrupt

    async def cancels_itself(row, client):
        await said(client)
        asyncio.current_task().cancel()
        await asyncio.sleep(100)

    async def stops_iteration(row, client):
        await said(client)
        next(iter([]))

    async def returns(row, client):
        for _ in range(row.get("calls", 1)):
            await said(client)
        return eval(row["value"])

    async def returns_a_coroutine(row, client):
        await said(client)
        return said(client)

    async def makes_no_call(row, client):
        return 1.0

    async def floods(row, client):
        while True:
            await said(client)

    async def floods_at_once(row, client):
        await asyncio.gather(*(ask(client, n=128) for _ in range(80)))

    async def floods_whatever_happens(row, client):
        while True:
            try:
                await said(client)
            except Exception:
                continue

    async def many_at_once(row, client):
        return len(await asyncio.gather(*(said(client, str(number)) for number in range(row["number"]))))

    async def is_large(row, client):
        try:
            await said(client, "x" * row["size"])
        except openai.APIStatusError as error:
            await said(client, f"{error.status_code}: {error.body['message']}")

    async def sends(row, client):
        sent = {name: row[name] for name in ("path", "key", "method") if name in row}
        status, message = await asyncio.to_thread(send, client, body=row.get("body", "").encode(), **sent)
        await said(client, f"{status}: {message}")

    async def asks(row, client):
        try:
            await ask(client, **row["named"])
        except openai.APIStatusError as error:
            await said(client, f"{error.status_code} {error.code}: {error.body['message']}")

    async def keeps_its_client(row, client):
        HELD["client"] = client
        HELD["own"] = openai.AsyncOpenAI(api_key=client.api_key, base_url=client.base_url, max_retries=0)
        await said(HELD["own"])

    async def uses_the_kept_client(row, client):
        lines = []
        for name in ("client", "own"):
            try:
                await ask(HELD[name])
            except openai.APIStatusError as error:
                lines.append(f"{error.status_code} {error.code}")
            except Exception:
                lines.append("closed")
        await said(client, ", ".join(lines))

    async def leaves_a_task(row, client):
        async def later():
            await asyncio.sleep(0.05)
            while True:
                await said(client)

        HELD["task"] = asyncio.create_task(later())
        await said(client)
        return 1

    async def leaves_a_request(row, client):
        HELD["task"] = asyncio.create_task(said(client))
        await said(client)
        return 1

    async def leaves_processes(row, client):
        subprocess.Popen(["sleep", "100"], start_new_session=False)
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,), daemon=False).start()
        threading.Thread(target=time.sleep, args=(100,)).start()
        await said(client)
        return 1

    async def forks(row, client):
        await said(client)
        os.fork()
        return float(await said(client) == "x")

    async def closes_its_client(row, client):
        await said(client)
        await client.close()
        await said(client)

    async def cancels_its_request(row, client):
        task = asyncio.create_task(said(client, "never"))
        await asyncio.sleep(row.get("after", 0.2))
        task.cancel()
        return float(await said(client, "again") == "x")

    async def drops_its_stream(row, client):
        async for _ in await ask(client, stream=True):
            break
        return float(await said(client) == "x")

    async def changes_its_row(row, client):
        row["deck"].pop()
        await said(client, f"{len(row['deck'])} left")

    async def prints(row, client):
        print("printed " * row["times"])
        await said(client)

    async def runs_a_loop(row, client):
        await said(client)
        asyncio.run(said(client))

    async def cancels_all(row, client):
        await said(client)
        for task in asyncio.all_tasks():
            task.cancel()

    async def stops_the_loop(row, client):
        await said(client)
        asyncio.get_running_loop().stop()
        await asyncio.sleep(100)

    async def leaves_the_process(row, client):
        await said(client)
        os._exit(3)

    async def hangs_after_the_end(row, client):
        try:
            while True:
                await said(client)
        except openai.APIStatusError:
            await asyncio.sleep(100)

    async def pays_after_the_end(row, client):
        calls = 0
        try:
            while True:
                calls += len((await ask(client, n=row.get("n"))).choices)
        except openai.APIStatusError as error:
            calls -= 100 * (error.code != "episode_ended")
            return [1.0] * calls if row.get("by_call") else float(calls)


class PlainKinds:
    """Each takes the row, and a client without `async`; they run in threads."""

    def say(client, text="hi"):
        answer = client.chat.completions.create(model="policy", messages=[user(text)])
        return answer.choices[0].message.content

    def talks(row, client):
        return float(PlainKinds.say(client) == PlainKinds.say(client) == "x")

    def hangs(row, client):
        PlainKinds.say(client)
        time.sleep(100)

    def spins(row, client):
        PlainKinds.say(client)
        while True:
            pass

    def exits(row, client):
        PlainKinds.say(client)
        sys.exit(3)

    def stops_iteration(row, client):
        PlainKinds.say(client)
        next(iter([]))

    def forks(row, client):
        PlainKinds.say(client)
        os.fork()
        return 1

    def asks_whatever_happens(row, client):
        while True:
            try:
                PlainKinds.say(client)
            except openai.OpenAIError:
                continue


async def run(row, client):
    return await getattr(Kinds, row["kind"])(row, client)


def plain(row, client):
    return getattr(PlainKinds, row["kind"])(row, client)


async def seeded(row, client, seed):
    return float(await said(client, str(seed)) == "x")


async def misses_its_client(row):
    return row


async def slow(row, client):
    """Plays the same episode however long it takes."""
    messages = [user(row["text"])]
    for number in range(3):
        await asyncio.sleep(row["pause"])
        answer = await ask(client, messages=messages)
        messages = [*messages, answer.choices[0].message, user(f"{number}")]
        if number == 1:
            messages = [messages[0], {"role": "assistant", "content": "a summary"}, *messages[-2:]]
    return [1, 2, 3]


async def together(row, client):
    """Asks again when all episodes have been answered, so that one after the other they never would."""
    await ask(client, row["text"])
    HELD["answered"] = HELD.get("answered", 0) + 1
    while HELD["answered"] < row["count"]:
        await asyncio.sleep(0.01)
    await ask(client, row["text"])
