"""A model behind an OpenAI-compatible API as a judge: scores, comparisons and rankings of responses.

texts ─▶ questions ─▶ known answer? ─▶ reserve ─▶ request, again if it fails ─▶ read by schema ─▶ keep
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import permutations
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from kedge_tasks.judge.endpoint import Endpoint, RequestError, encoded
from kedge_tasks.judge.ledger import Ledger, Limits
from kedge_tasks.judge.questions import RUBRIC, Question, asked, shown

ATTEMPTS = 3
"""How often a question is asked whose answers cannot be read."""

LONGEST_WAIT = 600.0
"""The longest wait that a server may ask for, seconds."""

OVERHEAD = 1024
"""Tokens that a server may add to a request: a chat template, a system prompt of its own."""

FORMATS = ("json_schema", "json_object", "text")

BAD_REQUEST = (400, 413, 422)

NONSENSE = 2**40
"""Tokens that no request uses, and of which the file could not hold many sums."""


class Judge:
    """A judge; also a reward function for TRL, with one score from 1 to 10 per completion.

    Args:
        judge: `openai:MODEL@URL`; without a URL, OpenAI's.
        rubric: What is good, in words; empty for the built-in text.
        ranks: Score the responses to each prompt by comparing all pairs of them, see `rank`.
        max_tokens: Longest answer, with the judge's own thoughts, tokens.
        limits: Fields of `Limits`.
        file: The file with requests and answers, in a folder that exists; None to keep them in memory.

    Raises:
        RewardError: The judge's name is wrong, or its key cannot be sent.
    """

    def __init__(
        self,
        judge: str,
        *,
        rubric: str = "",
        ranks: bool = False,
        max_tokens: int = 1024,
        limits: Mapping[str, Any] | None = None,
        file: str | Path | None = None,
    ) -> None:
        self._limits = Limits(**limits or {})
        self.endpoint = Endpoint.of(judge, self._limits)
        self.__name__ = self.endpoint.model
        self._rubric = rubric.strip() or RUBRIC
        self._ranks = ranks
        self._max_tokens = max_tokens
        self._file = None if file is None else Path(file)
        self._form: dict[str, Any] = {"format": 0, "limit": "max_tokens", "temperature": True}
        self._has_answered = False
        self._not_before = 0.0

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self._file, self._limits)

    def score(
        self, prompts: Sequence[Any], completions: Sequence[Any], messages: Sequence[Any] | None = None, **_: Any
    ) -> list[float | None]:
        """Scores from 1 to 10; None without a usable answer. Calling the judge does the same, as TRL's trainers do.

        Args:
            prompts: Texts, or lists of messages.
            completions: A response to each, in the same form; only what follows its thoughts is shown.
            messages: The messages that the prompts render, if they do.

        Raises:
            RewardError: The judge cannot be reached, or refuses; a limit is reached.
        """
        texts, responses = _prompts(prompts, messages), list(map(shown, completions))
        if self._ranks:
            return self._places(texts, responses)
        pairs = zip(texts, responses, strict=True)
        return self._ask([Question("score", text, (response,), self._rubric) for text, response in pairs])

    __call__ = score

    def compare(
        self,
        prompts: Sequence[Any],
        first: Sequence[Any],
        second: Sequence[Any],
        messages: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Compare two responses to each prompt, shown in this order: 1 if the first is better, 0 if the second, ½ for a
        tie, None without a usable answer. Equal texts tie without a request; the rest is as in `score`.
        """
        rows = list(zip(_prompts(prompts, messages), map(shown, first), map(shown, second), strict=True))
        different = [row for row in rows if row[1] != row[2]]
        winners = self._ask([Question("winner", text, tuple(pair), self._rubric) for text, *pair in different])
        found = dict.fromkeys(rows, "tie") | dict(zip(different, winners, strict=True))
        values = {"A": 1.0, "B": 0.0, "tie": 0.5, None: None}
        return [values[found[row]] for row in rows]

    def rank(self, prompt: Any, responses: Sequence[Any]) -> list[float] | None:
        """Rank the responses to a prompt, with 1 as the best and equal ranks for ties.

        All pairs are compared in both orders; a pair is a tie if the orders disagree. The response that wins more pairs
        ranks higher. The result is None if there is no usable answer about some response.

        Raises:
            RewardError: See `score`.
        """
        if len(responses) == 1:
            return [1.0]
        found = self._places([asked(prompt, None)] * len(responses), list(map(shown, responses)))
        places = [place for place in found if place is not None]
        return [1.0 + sum(other > place for other in places) for place in places] if None not in found else None

    def _places(self, prompts: Sequence[str], responses: Sequence[Any]) -> list[float | None]:
        """The share of the other responses to the same prompt that each response beats; a tie counts half."""
        rows = range(len(prompts))
        pairs = [(one, other) for one, other in permutations(rows, 2) if prompts[one] == prompts[other]]
        sides = zip(*[(prompts[one], responses[one], responses[other]) for one, other in pairs], strict=True)
        verdicts = dict(zip(pairs, self.compare(*sides) if pairs else [], strict=True))
        won: list[list[float]] = [[] for _ in rows]
        for one, other in pairs:
            ahead, behind = verdicts[one, other], verdicts[other, one]
            if ahead is not None and behind is not None:
                won[one].append(ahead if ahead == 1 - behind else 0.5)
        return [sum(each) / len(each) if each else None for each in won]

    def _ask(self, questions: Sequence[Question]) -> list[Any]:
        """Ask questions, several at a time and each only once, also across runs that share the file."""
        keys = list(map(self._key, questions))
        known = self._ledger.answers(keys)
        new = [(key, each) for key, each in dict(zip(keys, questions, strict=True)).items() if key not in known]
        if new and not self._has_answered:
            # One alone, to learn what the server understands: the shortest, which is the least likely to be too long.
            shortest = min(new, key=lambda each: len(each[1].prompt) + sum(map(len, each[1].responses)))
            new.remove(shortest)
            self._answer_all([shortest])
        self._answer_all(new)
        known = self._ledger.answers(keys)
        return [known[key] and known[key]["value"] for key in keys]

    def _answer_all(self, waiting: Sequence[tuple[str, Question]]) -> None:
        """Answer questions in threads that do not keep the process from ending."""
        questions: SimpleQueue[tuple[str, Question]] = SimpleQueue()
        for each in waiting:
            questions.put(each)
        results: SimpleQueue[BaseException | None] = SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            try:
                while not stop.is_set():
                    self._answer(*questions.get_nowait(), stop)
                    results.put(None)
            except Empty:
                pass
            except BaseException as error:
                results.put(error)

        count = min(len(waiting), self._limits.concurrency)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            error = next(filter(None, (results.get() for _ in waiting)), None)
        finally:
            stop.set()
        for thread in threads:  # requests that are under way cost money, so wait for their answers
            thread.join()
        if error is not None:
            raise error

    def _answer(self, key: str, question: Question, stop: threading.Event) -> None:
        answer = None
        for attempt in range(ATTEMPTS):
            try:
                answer = question.read(self._content(question, stop, is_again=attempt > 0))
            except RequestError as error:
                # If earlier requests were accepted, only this prompt is at fault, such as one that is too long.
                if error.status not in BAD_REQUEST or not self._has_answered:
                    raise self.endpoint.failed(error) from None
                break
            if answer is not None:
                answer["reasoning"] = self.endpoint.clean(answer["reasoning"])
                break
        self._ledger.keep(key, answer)

    def _content(self, question: Question, stop: threading.Event, *, is_again: bool) -> object:
        """The text of an answer, requested as often as necessary."""
        failures = 0
        while True:
            stop.wait(max(self._not_before - time.monotonic(), 0.0))
            form = dict(self._form)
            try:
                return self._send(self._body(question, form, is_again=is_again), stop)
            except RequestError as error:
                if error.status in BAD_REQUEST and not self._has_answered and self._simplify(form, str(error)):
                    continue
                failures += 1
                pause = error.wait or 2.0 ** (failures - 1) * random.uniform(0.5, 1.0)  # a wait of 0 says nothing
                is_last = failures > self._limits.retries or pause > LONGEST_WAIT
                if not error.is_passing or is_last or stop.is_set():
                    raise
                if error.status == 429:  # also for the other threads
                    self._not_before = max(self._not_before, time.monotonic() + pause)
                else:
                    stop.wait(pause)

    def _send(self, body: Mapping[str, Any], stop: threading.Event) -> object:
        number = self._ledger.reserve(_most_tokens(body), self._max_tokens, stop)
        used: tuple[int, int] | None = None
        try:
            found = self.endpoint.request("/chat/completions", body)
            match found.get("usage"):
                case {"prompt_tokens": int(prompt), "completion_tokens": int(answer), **more} if prompt > 0 <= answer:
                    total = more.get("total_tokens")  # some servers count thoughts here alone
                    used = prompt, max(answer, total - prompt) if isinstance(total, int) else answer
        except RequestError as error:
            used = (0, 0) if error.is_free else None
            raise
        finally:
            self._ledger.settle(number, used if sum(used or ()) < NONSENSE else None)
        match found:
            case {"choices": [{"message": {"content": content}}, *_]}:
                self._has_answered = True
                return content
        raise RequestError("the answer has no message", status=200)

    def _body(self, question: Question, form: Mapping[str, Any], *, is_again: bool) -> dict[str, Any]:
        body = {"model": self.endpoint.model, "messages": question.messages, form["limit"]: self._max_tokens}
        if form["temperature"]:
            body["temperature"] = float(is_again)  # at 0, the answer would be the same again
        kind = FORMATS[form["format"]]
        if kind != "text":
            schema = {"json_schema": {"name": question.kind, "strict": True, "schema": question.schema}}
            body["response_format"] = {"type": kind, **(schema if kind == "json_schema" else {})}
        return body

    def _simplify(self, form: Mapping[str, Any], message: str) -> bool:
        """Simplify later requests by one parameter; False if all forms have been tried."""
        if "max_completion_tokens" in message and form["limit"] == "max_tokens":
            self._form["limit"] = "max_completion_tokens"
        elif "temperature" in message and form["temperature"]:
            self._form["temperature"] = False
        else:
            self._form["format"] = (form["format"] + 1) % len(FORMATS)
            return self._form["format"] > 0
        return True

    def _key(self, question: Question) -> str:
        settings = [self.endpoint.url, self.endpoint.model, self._max_tokens, question.messages]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _prompts(prompts: Sequence[Any], messages: Sequence[Any] | None) -> list[str]:
    return [asked(*each) for each in zip(prompts, messages or [None] * len(prompts), strict=True)]


def _most_tokens(body: Mapping[str, Any]) -> int:
    """An upper bound of a prompt's tokens: no tokenizer makes more of a text than it has bytes, as it is or in NFKC."""
    text = encoded(body).decode()
    return max(len(text.encode()), len(unicodedata.normalize("NFKC", text).encode())) + OVERHEAD
