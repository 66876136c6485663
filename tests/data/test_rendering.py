"""Chat templates rendered in another process: the tokenizer's own text, and an end to what never finishes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kedge import template_worker as chat_templates
from kedge.data import chat
from kedge.data.chat import AT_ONCE, apply_template, apply_to_parts
from kedge.data.records import RowError
from kedge_base.errors import DataError
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

QUESTION: dict[str, Any] = {"role": "user", "content": "Why?"}
CALL: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "arguments": {"x": [1, 2.5]}}]}

EVERYTHING = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ loop.index }}: {{ m['content'] | trim | tojson }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson(indent=2) }}{% break %}{% endif %}{{ eos_token }}{% endfor %}"
    "{% generation %}{{ 2 ** 10 }}{% endgeneration %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def process_of() -> Any:
    return chat._renderer()._process  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def fresh() -> Iterator[None]:
    """A process of the test's own."""
    chat._renderer.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield
    process_of().kill()
    chat._renderer.cache_clear()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("settings", [{}, {"add_generation_prompt": True}, {"chat_template": CHAT_TEMPLATE}])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, EVERYTHING])
def test_the_text_is_that_of_the_tokenizers_own_method(template: str, settings: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer(chat_template=template)
    for messages in ([QUESTION], [QUESTION, CALL, {"role": "user", "content": " So\u2028 \U0001f300\x00 "}]):
        expected = _outcome(lambda: tokenizer.apply_chat_template(messages, tokenize=False, **settings))  # noqa: B023
        assert _outcome(lambda: apply_template(tokenizer, messages, **settings)) == expected  # noqa: B023


def _outcome(render: Any) -> str | None:
    """The text; None if the template refuses the conversation."""
    try:
        return render()
    except Exception:
        return None


@pytest.mark.usefixtures("fresh")
def test_a_process_that_ended_or_was_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ messages[0].content }}")
    assert apply_template(tokenizer, [QUESTION]) == "Why?"
    first = process_of()
    os.kill(first._process.pid, signal.SIGKILL)
    assert apply_template(tokenizer, [QUESTION]) == "Why?"
    assert process_of() is not first
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 0.3)
    tokenizer.chat_template = "{{ 7 ** 3000000 % 3 ** 1500000 }}"
    with pytest.raises(
        DataError, match=r"^the chat template: rendering one conversation took over 0\.3 s; it was killed$"
    ):
        apply_template(tokenizer, [QUESTION])
    assert not process_of().is_running
    tokenizer.chat_template = "{{ messages[0].role }}"
    assert apply_template(tokenizer, [QUESTION]) == "user"


@pytest.mark.parametrize(("num_answers", "length", "most"), [(5, 200, 1), (30, 50_000, 31), (300, 100, 20)])
def test_the_limits_are_for_few_renderings_of_a_long_conversation(
    num_answers: int, length: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request for all beginnings would take time and memory that grow with the square of their number."""
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    messages = [{"role": role, "content": "a " * (length // 2)} for role in ("user", "assistant") * num_answers]
    parts = [(2 * num_answers, {}), *((2 * turn + 1, {"add_generation_prompt": True}) for turn in range(num_answers))]
    requests: list[list[str]] = []

    def replies(*arguments: Any) -> list[dict[str, Any]]:
        found = reply(*arguments)
        requests.append([each["text"] for each in found])
        return found

    reply = chat._replies  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(chat, "_replies", replies)
    texts = apply_to_parts(tokenizer, messages, parts)
    for index in (0, 1, num_answers):
        count, settings = parts[index]
        assert texts[index] == tokenizer.apply_chat_template(messages[:count], tokenize=False, **settings)
    assert len(requests) <= most
    assert all(sum(map(len, each[1:])) < 1.2 * AT_ONCE for each in requests)  # the template adds tokens


@pytest.mark.usefixtures("fresh")
def test_threads_get_their_own_replies() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ messages[0].content }}")
    texts = [str(number) for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        rendered = threads.map(lambda text: apply_template(tokenizer, [{"role": "user", "content": text}]), texts)
    assert list(rendered) == texts


def test_the_process_ends_when_it_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[str, Any] = {}
    monkeypatch.setattr(chat_templates, "serve", lambda *_, idle: served.update(idle=idle))
    chat_templates.main(0, 0)
    assert 1 < served["idle"] <= 600


DATED = "{{ strftime_now('%d %b %Y, %H:%M') }}"


@pytest.mark.usefixtures("fresh")
def test_templates_write_the_date_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer(chat_template=DATED)
    monkeypatch.setattr(chat, "_day", None)
    today = {tokenizer.apply_chat_template([QUESTION], tokenize=False)}
    today |= {apply_template(tokenizer, [QUESTION]), tokenizer.apply_chat_template([QUESTION], tokenize=False)}
    assert len(today) <= 2  # the minute may have passed
    chat.render_as_of("2024-02-29")
    assert apply_template(tokenizer, [QUESTION]) == "29 Feb 2024, 00:00"


def test_a_tokenizer_with_its_own_method_renders_here() -> None:
    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return f"here {os.getpid()}"

    tokenizer = tiny_tokenizer(chat_template="{{ 1 }}")
    tokenizer.__class__ = Own
    assert apply_template(tokenizer, [QUESTION]) == f"here {os.getpid()}"


def test_values_that_cannot_be_sent_are_a_bad_row() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ messages[0].content }}")
    with pytest.raises(RowError, match="rejects the conversation"):
        apply_template(tokenizer, [{"role": "user", "content": object()}])
    dated = [{"role": "user", "content": date(2026, 1, 2)}]
    assert apply_template(tokenizer, dated) == tokenizer.apply_chat_template(dated, tokenize=False)
