"""Misbehaving reward functions; each is run by a real worker."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from decimal import Decimal
from multiprocessing import get_context

from kedge_base.errors import RewardError

LEAKED: list[bytes] = []


def lengths(completions):
    return [float(len(text)) for text in completions]


async def waits(completions):
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]


def hands_back_a_coroutine(completions):
    return waits(completions)


def one(text):
    return float(len(text))


def pools(completions):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return list(pool.map(one, completions))


GATE = asyncio.Semaphore(1)


async def gated(completions):
    async def one_of_several(text):
        async with GATE:
            await asyncio.sleep(0)
        return one(text)

    return await asyncio.gather(*map(one_of_several, completions))


def process(completions):
    return [os.getpid()] * len(completions)


def draws(completions):
    return [random.random() for _ in completions]


def draws_by_seed(completions, seed):
    return [float(seed % 1000)] * len(completions)


def heavy_modules(completions):
    return [float(len({"torch", "transformers", "numpy", "pydantic"} & set(sys.modules)))] * len(completions)


def checks_types(completions, when, price, raw):
    good = isinstance(when[0], datetime.datetime) and isinstance(price[0], Decimal) and isinstance(raw[0], bytes)
    return [float(good and raw[0] == b"\x00\xff" and price[0] == Decimal("0.10"))] * len(completions)


def everything(completions, **columns):
    return [float(len(columns))] * len(completions)


def of_columns_like_arguments(completion_ids, given_seed, given_completions):
    return [float(seed + len(words)) for seed, words in zip(given_seed, given_completions, strict=True)]


def of_levels(completions, given_seed):
    return [float(level) for level in given_seed]


def _check_levels(given_seed):
    if bad := [level for level in given_seed if level < 0]:
        raise RewardError(f"level {bad[0]} is not usable")


of_levels.check_rows = _check_levels


def scaled(completions, *, scale):
    return [scale * len(text) for text in completions]


def raises(completions):
    return [1 / 0 for _ in completions]


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


def raises_unprintable(completions):
    raise Unprintable


def raises_no_exception(completions):
    raise BaseException("base")


def exits(completions):
    sys.exit(3)


def exits_at_once(completions):
    os._exit(0)


def is_killed(completions):
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(completions):
    os.kill(os.getpid(), signal.SIGSEGV)


def is_stopped(completions):
    os.kill(os.getpid(), signal.SIGSTOP)


def hangs(completions):
    time.sleep(1000)


def hangs_with_a_child(completions, note):
    child = subprocess.Popen(["sleep", "1000"])
    with open(note[0], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def hangs_in_c(completions):
    re.fullmatch("(a|a)*b", "a" * 64)


def hangs_in_c_with_a_child(completions, note):
    subprocess.Popen(["sleep", "1000"])
    with open(note[0], "w") as file:
        file.write("begun")
    re.fullmatch("(a|a)*b", "a" * 64)  # runs no code of Python, and no other thread


def fakes_replies(completions):
    result = {"scores": [1.0], "memory": 1}
    for number in range(64):
        for fake in ({"result": result}, {"result": 7}, {"error": 7, "row": "x"}, {"error": "mine"}):
            for descriptor in range(3, 16):
                with contextlib.suppress(OSError):
                    os.write(descriptor, json.dumps({"id": number, **fake}).encode() + b"\n")
    return [2.0] * len(completions)


def hangs_on_request(completions):
    if completions[0].startswith("hang"):
        time.sleep(1000)
    return [1.0] * len(completions)


def returns_one(completions):
    return [1.0]


def returns_nan(completions):
    return [1.0, float("nan"), 1.0]


def returns_texts(completions):
    return ["1.0"] * len(completions)


def returns_nothing(completions):
    return None


def prints(completions):
    print("printed: ½", end="")
    print("and an error", file=sys.stderr)
    os.write(1, b'\xff{"id": 2, "answer": null}\n')
    subprocess.run(["echo", "from a child"], check=True)
    return [1.0] * len(completions)


def prints_without_end(completions):
    while True:
        os.write(1, b"x" * 4096)


def writes_everywhere(completions):
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"garbage\n")
    return [1.0] * len(completions)


def closes_everything(completions):
    os.closerange(0, 4096)
    return [1.0] * len(completions)


def closes_its_output(completions):
    os.close(1)
    os.close(2)
    return [1.0] * len(completions)


def reads_its_input(completions):
    return [float(len(sys.stdin.read()))] * len(completions)


def forks(completions):
    os.fork()
    return [float(len(text)) for text in completions]


def forks_and_exits(completions):
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)


def leaves_a_child(completions):
    return [subprocess.Popen(["sleep", "1000"]).pid] * len(completions)


def leaks(completions):
    LEAKED.append(os.urandom(1) * (64 << 20))
    return [os.getpid()] * len(completions)


def keeps_a_thread(completions):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return [os.getpid()] * len(completions)


def token_scores(completion_ids, weight=1.0):
    return [[weight * id for id in ids] if len(ids) != 3 else None for ids in completion_ids]


def one_token_short(completion_ids):
    return [[0.0] * (len(ids) - 1) for ids in completion_ids]
