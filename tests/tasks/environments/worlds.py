"""Environments for the tests: good ones, and all kinds of bad ones."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import ClassVar

import numpy

from kedge_tasks.environments import Step


class Guess:
    """Guess a number; pays .25 for each turn and 1 at the end."""

    def reset(self, row, seed):
        self.secret = random.Random(seed).randint(1, 5)
        self.row = row
        return f"From 1 to {row.get('most', 5)}.\n"

    def privileged(self):
        return {"secret": getattr(self, "secret", None)}

    def step(self, text):
        guess = sum(character.isdigit() for character in text)
        if guess == self.secret:
            return Step("yes", reward=1.0, terminated=True)
        return Step("no.\n", reward=0.25)


class Deck:
    """Draws a card of its row each time it is asked, and says how many are left."""

    def reset(self, row, seed):
        self.cards = row["hand"]["cards"]

    def step(self, text):
        self.cards.pop()
        return Step(f"{len(self.cards)} left.\n")


class Drawn:
    """Draws from the global generator, of which each episode has its own stream."""

    def reset(self, row, seed):
        return str(random.randint(0, 10**9))

    def step(self, text):
        return {"messages": [{"role": "user", "content": str(random.randint(0, 10**9))}], "reward": 0}


class Notes:
    """Three rooms; after the second, the policy reads what it has said so far instead of the history."""

    def reset(self, row, seed):
        self.said = ""
        return "Room 0.\n"

    def step(self, text):
        self.said += text
        room = f"Room {len(self.said)}.\n"
        if len(self.said) == 3:
            return Step(reward=1.0, terminated=True)
        return Step(room) if len(self.said) == 1 else Step(room, context=f"Play. Notes: {self.said}. ")


class Rooms:
    """Pays vowels; after every second turn, the policy reads a note of its last words instead of the history."""

    def reset(self, row, seed):
        self.turns = 0
        return "Room 0.\n"

    def step(self, text):
        self.turns += 1
        note = f"Notes: {text[-3:]}. " if self.turns % 2 == 0 else None
        reward = sum(map(text.count, "aeiou")) / 4
        return Step(f"Room {self.turns}.\n", reward, terminated=self.turns == 12, context=note)


class Tuple:
    def reset(self, row, seed):
        return None

    def step(self, text):
        return "again", 0.5, False, text == "cut", {"info": 1}


class Calculator:
    def reset(self, answer, **row):
        self.answer = answer
        self.results = []

    def add(self, a: float, b: float) -> float:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.results.append(a + b)
        return a + b

    def shout(self, text: str) -> str:
        """Say it in capitals.

        Args:
            text: What to say.
        """
        return text.upper()

    def fail(self) -> str:
        """Raise."""
        raise ValueError("the wire is cut")

    def get_reward(self) -> float:
        return float(self.answer in self.results)


class Unscored:
    """One tool, in few words, and no reward."""

    def add(self, a: int) -> int:
        """Add 1.

        Args:
            a: It.
        """
        return a + 1


class Adder(Unscored):
    """With a reward."""

    def get_reward(self) -> float:
        return 0.0


class Together:
    """Async: a step ends when ten have begun, so that one after the other they never would."""

    waiting = 0
    begun = asyncio.Event()

    def reset(self, row, seed):
        return "go"

    async def step(self, text):
        Together.waiting += 1
        if Together.waiting == 10:
            Together.begun.set()
        await Together.begun.wait()
        return Step(text, terminated=True)


class Slow:
    """Async: calls run at the same time."""

    async def reset(self, row, seed):
        await asyncio.sleep(0.2)
        return "go"

    async def step(self, text):
        await asyncio.sleep(float(text))
        return Step(text, terminated=True)


class Sleeps:
    def reset(self, row, seed):
        return None

    def step(self, text):
        try:
            time.sleep(float(text))
        except Exception:
            return Step("never", terminated=True)
        return Step("woke", terminated=True)


class SleepsAtReset:
    def reset(self, row, seed):
        time.sleep(60)

    def step(self, text): ...


class Raises:
    def reset(self, row, seed):
        return None

    def step(self, text):
        raise KeyError("no such move\nat all")


class Cancels:
    """Async: waits for what it has canceled, as a client does whose connection was closed."""

    async def reset(self, row, seed):
        return None

    async def step(self, text):
        reading = asyncio.ensure_future(asyncio.sleep(60))
        reading.cancel()
        await reading


class Knows:
    """Its secrets are of NumPy's types."""

    def reset(self, row, seed):
        self.secrets = {"number": numpy.int64(7), "board": numpy.ones((1, 2)), "moves": [numpy.int8(3)], "words": {"a"}}

    def step(self, text): ...

    def privileged(self):
        return self.secrets


class Exits:
    def reset(self, row, seed):
        return None

    def step(self, text):
        os._exit(3)


class Hangs:
    """Not to be interrupted from Python."""

    def reset(self, row, seed):
        return None

    def step(self, text):
        return Step(reward=sum(range(10**12)))


class Nonsense:
    def reset(self, row, seed):
        return row.get("says")

    def step(self, text):
        return {
            "none": None,
            "number": 3,
            "nan": Step("", reward=float("nan")),
            "role": Step([{"role": "me"}]),
            "array": (numpy.ones(2), 0.0, False, False, {}),
        }[text]


class Needs:
    def __init__(self, path):
        self.path = path


class Nothing:
    pass


class Undescribed:
    def tool(self, a):
        return a


class Crowd:
    """Says more than fits, or ends it from outside."""

    def reset(self, row, seed):
        return None

    def step(self, text):
        return Step("word " * 200)


class Client:
    """Belongs to the event loop in which it was made, as the session of an HTTP client does."""

    running: ClassVar[set] = set()  # until the loop is closed, which ends them

    def __init__(self):
        self.questions = asyncio.Queue()
        self.running.add(asyncio.create_task(self.read()))

    async def read(self):
        while True:
            text, answer = await self.questions.get()
            await asyncio.sleep(0.001)
            answer.set_result(text[::-1])

    async def ask(self, text):
        answer = asyncio.get_running_loop().create_future()
        await self.questions.put((text, answer))
        return await answer


class Remote:
    """Async, with a client that is made once and kept for all episodes."""

    client = None

    async def reset(self, row, seed):
        Remote.client = Remote.client or Client()
        return str(random.randint(0, 10**9))

    async def step(self, text):
        if text == "late":
            raise TimeoutError("the server does not answer")
        drawn = random.random()
        return Step(await self.client.ask(text), reward=drawn)


class OwnClient:
    """Makes its client at once."""

    def __init__(self):
        self.client = Client()

    async def reset(self, row, seed):
        return await self.client.ask("go")

    async def step(self, text):
        return Step(await self.client.ask(text))


def remote():
    """Makes an environment, as a lambda would."""
    return Remote()
