"""The generated pages; a test compares the committed ones with them."""

from __future__ import annotations

from handbook.architectures import architectures_page
from handbook.fields import fields_page
from handbook.libraries import from_trl_page, libraries_page
from handbook.token_page import token_page


def generated_pages() -> dict[str, str]:
    """The text of each page, by its file name in `docs/`."""
    return {
        "architectures.md": architectures_page(),
        "fields.md": fields_page(),
        "from-trl.md": from_trl_page(),
        "other-libraries.md": libraries_page(),
        "token.md": token_page(),
    }
