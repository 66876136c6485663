"""A row of a library's table."""

from typing import NamedTuple

__all__ = ["Row"]


class Row(NamedTuple):
    """Arguments of a library that have the same counterpart.

    Attributes:
        names: The arguments as the library spells them, separated by spaces.
        here: The counterpart, as Markdown. If it starts with a field in backticks, that is the answer; "none" says that
            there is no counterpart.
    """

    names: str
    here: str
