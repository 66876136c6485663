"""Chat on a terminal, or with a pipe: one answer per line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kedge_base.errors import DataError, KedgeError
from kedge_base.machine.progress import format_figure
from kedge_base.texts import counted, printable
from kedge_lab.chat.chat import SETTINGS, Chat, Reply

PROMPT = "> "
CONTINUED = "… "
LETTERS = "AB"
NARROW = 80
"""On terminals with fewer columns, two answers are printed one below the other."""
CONTROLS = r"\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
"""Characters, other than the tab, that end a line, control a terminal, or cannot be encoded."""
BIDI = r"\u202a-\u202e\u2066-\u2069"
"""Characters that change the direction of text on a terminal, even after the answer has ended."""

HELP = (
    "/set              show the sampling settings\n"
    f"/set NAME VALUE   change one: {', '.join(SETTINGS)}\n"
    "/reset            forget the conversation and start over\n"
    "/help             this list\n"
    "/quit             leave; so does Ctrl-D\n"
    "A line that ends in \\ continues on the next. Ctrl-C ends an answer, or leaves between answers."
)


def chat_on_terminal(
    chat: Chat,
    *,
    source: IO[str] | None = None,
    console: Console | None = None,
    read: Callable[[str], str] | None = None,
) -> None:
    """Chat until /quit, Ctrl-D or Ctrl-C; a source that is not a terminal is answered line by line.

    Args:
        chat: The models.
        source: Where texts come from; standard input by default.
        console: Where answers go; standard output by default.
        read: Reads a line after showing a prompt; from the terminal by default.
    """
    lines = source or sys.stdin
    console = console or Console(highlight=False, soft_wrap=True)
    if not lines.isatty():
        _answer_lines(chat, lines, console.file, Console(file=sys.stderr, highlight=False, soft_wrap=True))
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # history and editing for console.input()
    for line in chat.introductions():
        console.out(line)
    console.out(f"{_settings(chat)}\n/help lists the commands.")
    with suppress(EOFError, KeyboardInterrupt):
        for text in _typed(read or partial(console.input, markup=False)):
            if text.startswith("/") and text.strip() == "/quit":
                return
            _respond(chat, text, console)
        return
    console.out("")


def figures(reply: Reply) -> str:
    """A line about an answer: score, length, ending, and the omitted part of the prompt."""
    parts = (
        "" if reply.score is None else f"score {format_figure(reply.score)}",
        f"no score: {reply.score_error}" if reply.score_error else "",
        counted(reply.num_tokens, "token"),
        reply.ending,
        f"the {counted(reply.num_dropped, 'oldest message')} no longer fit" if reply.num_dropped else "",
    )
    return " · ".join(filter(None, parts))


def _respond(chat: Chat, text: str, console: Console) -> None:
    """Run a command, or answer a text; an error prints one line, and the chat continues."""
    try:
        if text.startswith("/"):
            console.out(_command(chat, text))
        elif len(chat.policies) == 1 or console.width < NARROW:
            _stream(chat, text, console)
        else:
            _side_by_side(chat, text, console)
    except KedgeError as error:
        console.out(f"error: {error}")


def _command(chat: Chat, text: str) -> str:
    name, *arguments = text.replace("=", " ").split()
    if name == "/set" and len(arguments) in (0, 2):
        if arguments:
            chat.set(*arguments)
        return _settings(chat)
    if name == "/reset":
        chat.reset()
        return "The conversation starts over."
    if name == "/help":
        return HELP
    return f"{printable(text)[:80]!r} is not a command; /help lists them"


def _settings(chat: Chat) -> str:
    reward = "" if chat.scorer is None else f"; scores: {printable(chat.scorer.name)}"
    return ", ".join(f"{name} {value:g}" for name, value in chat.settings.items()) + reward


def _stream(chat: Chat, text: str, console: Console) -> None:
    """Write the answers token by token, one model after the other."""
    begun: set[int] = set()

    def write(model: int, piece: str) -> None:
        if model not in begun and len(chat.policies) > 1:
            console.out(("\n" if begun else "") + _name(chat, model))
        begun.add(model)
        console.out(_literal(piece), end="")
        console.file.flush()

    # Both answers come before the figures of the first, whose score is only known then.
    replies = chat.ask(text, write)
    console.out("")
    for model, reply in enumerate(replies):
        label = f"{LETTERS[model]}: " if len(chat.policies) > 1 else ""
        console.print(Text(f"  [{label}{figures(reply)}]", style="dim"))


def _side_by_side(chat: Chat, text: str, console: Console) -> None:
    """Write two answers as two columns, once both are complete."""
    with console.status("sampling"):
        replies = chat.ask(text)
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for model in range(len(replies)):
        table.add_column(Text(_name(chat, model)), ratio=1, overflow="fold")
    table.add_row(*(Text(_literal(reply.text.strip())) for reply in replies))
    table.add_row(*(Text(f"[{figures(reply)}]", style="dim") for reply in replies))
    console.print(table, soft_wrap=False)


def _answer_lines(chat: Chat, lines: Iterable[str], out: IO[str], notes: Console) -> None:
    """Write one line per text: the answer, with line breaks escaped, and the score if there is a reward.

    A blank line gets a blank answer.

    With two models, the second one's columns follow, all separated by tabs. Notes go to standard error.
    """
    for line in chat.introductions():
        notes.out(line)
    notes.out(_settings(chat))
    has_cells = chat.scorer is not None or len(chat.policies) > 1
    more = (r"\t" if has_cells else "") + (BIDI if out.isatty() else "")
    for line in _decoded(lines):
        text = line.rstrip("\r\n")
        if text.strip() == "/quit":
            return
        if not text.strip():  # keeps answers on the line numbers of their texts
            out.write("\n")
            out.flush()
            continue
        if text.startswith("/"):
            notes.out(_command(chat, text))
            continue
        cells: list[str] = []
        for reply in chat.ask(text):
            cells.append(_escaped(reply.text, more))
            if chat.scorer is not None:
                cells.append("" if reply.score is None else f"{reply.score:.6g}")
            if reply.num_dropped or reply.score_error:
                notes.out(figures(reply))
            if reply.ending == "interrupted":
                return
        out.write("\t".join(cells) + "\n")
        out.flush()


def _decoded(lines: Iterable[str]) -> Iterator[str]:
    """Decode the lines of a source (`DataError` for another encoding)."""
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"the input is not {error.encoding.upper()} text ({error.reason}); convert it") from error


def _typed(read: Callable[[str], str]) -> Iterator[str]:
    """Read the texts that a user types, except blank ones; a backslash at its end joins a line to the next."""
    while True:
        text = read(PROMPT)
        while text.endswith("\\"):
            text = f"{text[:-1]}\n{read(CONTINUED)}"
        if text.strip():
            yield text


def _name(chat: Chat, model: int) -> str:
    return f"{LETTERS[model]}  {printable(chat.policies[model].source)}"


def _literal(text: str) -> str:
    """Escape all characters in a text that would control the terminal."""
    return "\n".join(_escaped(line.replace("\t", "    "), BIDI) for line in text.split("\n"))


def _escaped(text: str, more: str) -> str:
    """Escape `CONTROLS` and some more characters; all others, such as joiners, are unchanged."""
    return re.sub(f"[{CONTROLS}{more}]", lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
