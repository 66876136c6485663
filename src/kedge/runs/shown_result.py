"""The results of runs as text at a prompt and as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from kedge.inspect.report import REPORT_FILE, report_as_html, report_as_text, runs_in
from kedge.runs.calls import following_call
from kedge.system.output import MODEL_FOLDER
from kedge.system.texts import printable

T = TypeVar("T")


def shows_its_run(result: type[T]) -> type[T]:
    """Decorates the class of a run's result, which has a `folder`: it shows the report in that folder.

    As text it is at most three lines: the outcome, the files to open, and the call that usually comes next.
    """
    setattr(result, "__repr__", lambda self: "\n  ".join(map(printable, _lines(result.__name__, self.folder))))  # noqa: B010 (the type of a method is not that of a value)
    setattr(result, "_repr_html_", lambda self: report_as_html(self.folder))  # noqa: B010
    return result


def _lines(kind: str, folder: Path) -> Iterator[Any]:
    yield f"{kind} in {folder}: {report_as_text(folder)}"
    files = {"model": folder / MODEL_FOLDER, "report": folder / REPORT_FILE}
    if found := [f"{label}: {path}" for label, path in files.items() if path.exists()]:
        yield ", ".join(found)
    if following := following_call(runs_in(folder)[-1]):
        yield f"next: {following}"
