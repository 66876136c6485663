"""Chat: prompts in the form of the training, conversations that fit, and answers of the sampler, on a terminal."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from kedge.config import load_config
from kedge.models.origin import Origin
from kedge.rewards.score import continuation
from kedge_base.errors import ConfigError, DataError
from kedge_lab.chat import Chat, chat_on_terminal, load_chat
from kedge_lab.chat.chat import Conversation, TextStream
from tests.tiny import (
    CHAT_TEMPLATE,
    save_tiny_policy,
    save_tiny_reward_model,
    tiny_sentencepiece_tokenizer,
    tiny_tokenizer,
)

CONFIG = load_config(overrides=["generate.temperature=1", "generate.max_new_tokens=6", "runtime.num_threads=1"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("models")
    talking = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    return {
        "talker": str(save_tiny_policy(base / "talker", tokenizer=talking)),
        "base": str(save_tiny_policy(base / "base", seed=1)),
        "reward": str(save_tiny_reward_model(base / "reward", tokenizer=talking)),
    }


@pytest.fixture
def talker(folders: dict[str, str]) -> Chat:
    return load_chat(CONFIG, [folders["talker"]])


def lengths(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(len(prompt)) for prompt in prompts]


def test_a_model_with_a_template_remembers_and_a_base_model_does_not(folders):
    chat = load_chat(CONFIG, [folders["talker"], folders["base"]], reward=lengths)
    first = chat.ask("Ahoy")
    assert [reply.score for reply in first] == [len("<|user|>\nAhoy\n<|assistant|>\n"), len("Ahoy")]
    answer = first[0].text.strip()
    second = chat.ask("Why?")
    whole = f"<|user|>\nAhoy\n<|assistant|>\n{answer}<eos>\n<|user|>\nWhy?\n<|assistant|>\n"
    assert [reply.score for reply in second] == [len(whole), len("Why?")]
    chat.reset()
    assert [reply.text for reply in chat.ask("Ahoy")] == [reply.text for reply in first]


def test_the_form_of_the_training_counts_more_than_the_template(folders, talker, monkeypatch):
    assert talker.conversations[0].form == "conversation"
    monkeypatch.setattr("kedge_lab.chat.chat.read_origin", lambda _: Origin("ppo", "x", prompt_form="text"))
    chat = load_chat(CONFIG, [folders["talker"]])
    assert chat.conversations[0].form == "text"
    assert "trained on plain prompts: it continues your text" in chat.introductions()[0]
    assert load_chat(CONFIG, [folders["talker"]], form="conversation").conversations[0].form == "conversation"
    with pytest.raises(DataError, match="--form conversation: the model's tokenizer has no chat template"):
        load_chat(CONFIG, [folders["base"]], form="conversation")


def test_the_oldest_messages_make_room():
    conversation = Conversation(tiny_tokenizer(chat_template=CHAT_TEMPLATE), "conversation")
    for letter in "abc":
        conversation.add(letter * 20, "yes")
    prompt, dropped = conversation.prompt("the last", room=None)
    assert (prompt.text.count("<|user|>"), dropped) == (4, 0)
    room = len(conversation.tokenizer.encode(prompt.text)) - 1
    prompt, dropped = conversation.prompt("the last", room=room)
    assert (prompt.text.count("<|user|>"), dropped, "aaa" in prompt.text) == (3, 2, False)
    conversation.add("the last", "aye", dropped=dropped)
    assert [message["content"][0] for message in conversation.messages] == list("bycyta")
    with pytest.raises(DataError, match=r"the text has \d+ tokens with its template, at most 10 fit; shorten it"):
        conversation.prompt("x" * 50, room=10)


def test_a_post_gets_its_ending_once():
    conversation = Conversation(tiny_tokenizer(), "tldr")
    assert conversation.prompt("POST: it broke\n", room=None)[0].text == "POST: it broke\n\nTL;DR:"
    assert conversation.prompt("POST: it broke\n\nTL;DR:", room=None)[0].text == "POST: it broke\n\nTL;DR:"


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), tiny_sentencepiece_tokenizer()], ids=["bytes", "sentences"])
def test_streamed_pieces_join_to_the_text(tokenizer):
    text = " the séa 🌊 and the sun"
    pieces: list[str] = []
    stream = TextStream(tokenizer, tokenizer.encode("Once"), [2], pieces.append)
    for token in [*tokenizer.encode(" the séa 🌊 and the sun", add_special_tokens=False), 2]:
        stream.add(token)
    stream.write_up_to(continuation(tokenizer, stream.prompt_ids, stream.ids))
    assert "".join(pieces).strip() == text.strip()
    assert len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_answer_can_be_interrupted(talker):
    def stop(model: int, piece: str) -> None:
        raise KeyboardInterrupt

    [reply] = talker.ask("Ahoy", stop)
    assert (reply.ending, reply.score) == ("interrupted", None)
    assert len(talker.ask("Ahoy")) == 1


def test_settings_are_checked_and_shown(talker):
    talker.set("temperature", "0.5")
    assert talker.settings == {"temperature": 0.5, "max_new_tokens": 6, "seed": 0}
    with pytest.raises(ConfigError, match="'top_p' is not a setting; choose one of temperature, max_new_tokens, seed"):
        talker.set("top_p", "1")
    with pytest.raises(ConfigError, match="leaves no room for a prompt: the model reads at most 256 tokens"):
        talker.set("max_new_tokens", "256")
    assert talker.settings["max_new_tokens"] == 6


def test_a_pipe_gets_one_line_per_text(folders, capsys):
    chat = load_chat(CONFIG, [folders["talker"], folders["base"]], reward=folders["reward"])
    out = io.StringIO()
    lines = io.StringIO("Ahoy\n\n/set seed 3\nWhy?\n/nope\n/quit\nnever read\n")
    chat_on_terminal(chat, source=lines, console=Console(file=out))
    first, blank, last = out.getvalue().splitlines()
    assert blank == ""
    rows = [first.split("\t"), last.split("\t")]
    assert [len(row) for row in rows] == [4, 4]
    assert all(float(row[place]) for row in rows for place in (1, 3))
    said = capsys.readouterr().err
    assert "seed 3" in said
    assert "'/nope' is not a command; /help lists them" in said


SAID = "می\u200cخواهم\u00a0x\u3000\u200f\u2067שלום\u2069 👩\u200d👩\u200d👧\tend\x1b[2J\r\nnext\u2028line"


@pytest.mark.parametrize(("has_reward", "tab"), [(False, "\t"), (True, r"\t")])
def test_a_pipe_gets_answers_as_they_are_but_on_one_line(folders, capsys, monkeypatch, has_reward, tab):
    chat = load_chat(CONFIG, [folders["talker"]], reward=folders["reward"] if has_reward else None)
    reply = next(iter(chat.ask("Ahoy")))
    monkeypatch.setattr(chat, "ask", lambda _: [dataclasses.replace(reply, text=SAID)])
    out = io.StringIO()
    chat_on_terminal(chat, source=io.StringIO("Ahoy\n"), console=Console(file=out))
    answer = out.getvalue().removesuffix("\n").split("\t" if has_reward else "\0")[0]
    expected = SAID
    for char, escape in {"\x1b": r"\x1b", "\r\n": r"\r\n", "\u2028": r"\u2028", "\t": tab}.items():
        expected = expected.replace(char, escape)
    assert answer == expected


def test_a_terminal_gets_no_text_that_acts_on_it(folders, monkeypatch):
    chat = load_chat(CONFIG, [folders["talker"]], reward=None)
    reply = next(iter(chat.ask("Ahoy")))
    monkeypatch.setattr(chat, "ask", lambda _: [dataclasses.replace(reply, text=SAID)])
    out = io.StringIO()
    out.isatty = lambda: True
    chat_on_terminal(chat, source=io.StringIO("Ahoy\n"), console=Console(file=out))
    assert "می\u200cخواهم\u00a0x" in out.getvalue()
    assert r"\u2067" in out.getvalue()
    assert not {"\x1b", "\u2067"} & set(out.getvalue())


def test_a_pipe_in_another_encoding_is_refused(talker):
    source = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nhello\n"), encoding="utf-8")
    with pytest.raises(DataError, match=r"^the input is not UTF-8 text \(invalid continuation byte\); convert it$"):
        chat_on_terminal(talker, source=source, console=Console(file=io.StringIO()))


def typed(chat: Chat, lines: list[str], *, width: int = 100) -> str:
    """What a terminal shows for these lines, followed by Ctrl-D."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def read(prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    shown = Terminal()
    chat_on_terminal(chat, source=Terminal(), console=Console(file=shown, width=width, highlight=False), read=read)
    return shown.getvalue()


def test_a_terminal_shows_answers_and_settings_and_survives_mistakes(folders, talker):
    shown = typed(
        talker, ["/set temperature=2", "/set temperature hot", "a" * 400, "two\\", "lines", "/reset", "/help"]
    )
    assert f"{folders['talker']}: a conversation in its chat template; responses end with <eos>" in shown
    assert "temperature 2, max_new_tokens 6, seed 0" in shown
    assert "error: generate.temperature must be a number" in shown
    assert "error: the text has" in shown
    assert "6 tokens · cut off" in shown
    assert "The conversation starts over." in shown
    assert "/set NAME VALUE" in shown


@pytest.mark.parametrize("width", [60, 100])
def test_two_models_are_told_apart(folders, width):
    chat = load_chat(CONFIG, [folders["talker"], folders["base"]], reward=folders["reward"])
    shown = typed(chat, ["Ahoy"], width=width)
    assert shown.count("score") == 3  # once in the settings
    assert shown.count("A  ") >= 1
    assert shown.count("B  ") >= 1


def test_nothing_that_a_model_writes_acts_on_the_terminal(talker, monkeypatch):
    monkeypatch.setattr("kedge_lab.chat.chat.continuation", lambda *_: "\x1b[2Jred")
    monkeypatch.setattr("kedge.rewards.score.continuation", lambda *_: "\x1b[2Jred")
    assert "\\x1b[2Jred" in typed(talker, ["Ahoy"])


def test_a_reward_that_fails_leaves_the_answer(folders):
    def failing(completions: list[str]) -> list[float]:
        raise ValueError("no")

    chat = load_chat(CONFIG, [folders["base"]], reward=failing)
    [reply] = chat.ask("Ahoy")
    assert reply.text
    assert "failing" in reply.score_error


def test_a_text_that_is_no_unicode_is_refused(talker):
    with pytest.raises(DataError, match="the text holds a lone surrogate"):
        talker.ask("\ud800")


def test_one_or_two_models(folders):
    with pytest.raises(ConfigError, match="chat needs one or 2 models, not 3"):
        load_chat(CONFIG, [folders["base"]] * 3)


def test_a_name_in_its_own_folder_stays_a_path(tmp_path: Path):
    (tmp_path / "kedge.json").write_text('{"stage": "ppo", "base_model": "x", "prompt_form": ["conversation"]}')
    from kedge.models.origin import read_origin

    assert read_origin(tmp_path) == Origin("ppo", "x", None, None, "")
    for damaged in ("[]", "{", '{"stage": 1}', "[" * 10_000):
        (tmp_path / "kedge.json").write_text(damaged)
        assert read_origin(tmp_path) is None
