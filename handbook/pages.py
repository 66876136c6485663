"""Which pages are computed; a test holds the committed ones against them."""

from __future__ import annotations

from handbook.fields import fields_page
from handbook.token_page import token_page

__all__ = ["computed_pages"]


def computed_pages() -> dict[str, str]:
    """The text of each, by its name in `docs/`."""
    return {"fields.md": fields_page(), "token.md": token_page()}
