"""Prints untrusted texts and values on one line, checks that they can be written as UTF-8, and reads tables."""

import os
import re
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

PACKAGE = "package:"
"""Prefix of the name of an installed package that contains a model's GGUF file."""

JUDGE = "openai:"
"""Prefix of the name of a model behind an API, which judges responses: `openai:MODEL@URL`."""

IN_MEMORY = "python:in_memory"
"""Placeholder in `config.yaml` for content that was passed in from Python, or given literally instead of as a file
name."""


_LIBRARY = re.compile(
    r"<frozen |.*[/\\](site|dist)-packages[/\\]|"
    + "|".join(re.escape(f"{folder}{os.sep}") for folder in (Path(os.__file__).parent, Path(__file__).parents[1]))
)
"""Matches files of Python, of installed packages and of kedge, as opposed to the user's."""


def names_function(text: str) -> bool:
    """True if a text names a Python function rather than a model: `file.py:function` or `package.module:function`.

    The part after the last colon must be a dotted Python name. A model id has no colon, and neither a Windows path nor
    `model:7b` has a Python name after it; `package:` precedes the name of a package with a model. A judge behind an API
    (`openai:MODEL@URL`) is a function of kedge. A `.py` file is
    never a model, so `rewards.py` counts as a function whose name is missing: the loader's error then says that it must
    be added.
    """
    _, colon, attribute = text.rpartition(":")
    is_named = bool(colon and DOTTED_NAME.fullmatch(attribute)) and not text.startswith(PACKAGE)
    return is_named or text.endswith(".py") or names_judge(text)


def names_judge(text: str) -> bool:
    """True if a text names a judge behind an API: `openai:MODEL@URL`."""
    return text.startswith(JUDGE)


def printable(text: str) -> str:
    """Escape line breaks and control characters in a text, so that it stays on one line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def markdown(text: str) -> str:
    """Escape a text for Markdown, on one line."""
    return re.sub(r"([\\|\[\]<>*`])", r"\\\1", printable(text))


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 response`, `1,200 responses`, `2 batches`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('ch', 'ss', 'x')) else 's'}"


def shortened(text: str, most: int) -> str:
    """The first characters of a text, with an ellipsis if it has more."""
    return text if len(text) <= most else f"{text[:most]}…"


def error_text(error: BaseException, limit: int = 300) -> str:
    """Return the message of an error from user or library code on one line, truncated if long, or its type if it has no
    message.
    """
    try:
        text = " ".join(str(error).split()) or type(error).__name__
    except Exception:  # `__str__` is user code as well
        return "(its message cannot be read)"
    return shortened(text, limit)


def typed_error_text(error: BaseException, limit: int = 300) -> str:
    """The type of such an error, and its message if it has one."""
    kind = type(error).__name__
    text = error_text(error, limit)
    return kind if text == kind else f"{kind}: {text}"


def place_of(error: BaseException) -> str:
    """The file and line of user code that raised an error, directly or through a library: `rewards.py:12`.

    Without user code in the traceback, this is the last line of library code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([each for each in frames if not _LIBRARY.match(each.filename)] or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def traceback_text(error: BaseException) -> str:
    """The traceback of an error of user code; its type if the error cannot be formatted."""
    with suppress(Exception):  # formatting runs the error's own code
        return "".join(traceback.format_exception(error))
    return type(error).__name__


def unwritable(value: object, *, deepest: int) -> str | None:
    """Return the reason why a value cannot be written to a file or sent to another process; None if it can.

    Works level by level instead of recursively: a value may nest deeper than the recursion limit, or contain itself.

    Args:
        value: Texts, numbers, and lists and mappings of them.
        deepest: Maximum nesting of lists and mappings.
    """
    level = [value]
    for _ in range(deepest + 1):
        try:
            "".join(entry for entry in level if isinstance(entry, str)).encode()
        except UnicodeEncodeError:
            return "holds a lone surrogate, which UTF-8 cannot write"
        held = [part for entry in level for part in _parts(entry)]
        level = list({id(part): part for part in held}.values())
        if not level:
            return None
    return f"nests deeper than {deepest} levels"


def _parts(value: object) -> list[object]:
    if isinstance(value, Mapping):
        inside = cast("Mapping[Any, Any]", value)
        return [*inside, *inside.values()]
    return list(cast("list[object]", value)) if isinstance(value, (list, tuple)) else []


_MAX_POINTER_BYTES = 1024
_POINTER_START = b"version https://git-lfs.github.com/spec/"


def pointer_fault(file: Path) -> str | None:
    """One line about a file that a clone without git-lfs left as a pointer; None for any other file.

    Source: the specification of git-lfs, docs/spec.md.
    """
    try:
        is_small = file.is_file() and file.stat().st_size <= _MAX_POINTER_BYTES
        if not is_small or not file.read_bytes().startswith(_POINTER_START):
            return None
    except OSError:  # reported by the reader of the file
        return None
    return f"{file} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder"


def read_table(path: Path) -> list[list[str]]:
    """Read the rows of a table in the package: columns are separated by tabs; empty lines and lines that start with `#`
    are skipped.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if line and not line.startswith("#")]
