"""The results of runs show themselves: as text at a prompt, as HTML in a notebook."""

from __future__ import annotations

from typing import Any, TypeVar

from kedge.inspect.notebook.runs import shown_run
from kedge.inspect.notebook.shown import Shown
from kedge.runs.calls import following_call

__all__ = ["shows_its_run"]

T = TypeVar("T")


def shows_its_run(result: type[T]) -> type[T]:
    """Decorates the class of a run's result, which has a `folder`: it shows the run, read from there.

    Also with the call that usually comes next, if there is one.
    """

    def shown(self: Any) -> Shown:
        return shown_run(result.__name__, self.folder, following_call(self.folder))

    setattr(result, "__repr__", lambda self: shown(self).text())  # noqa: B010 (the type of a method is not that of a value)
    setattr(result, "_repr_html_", lambda self: shown(self).html())  # noqa: B010
    return result
