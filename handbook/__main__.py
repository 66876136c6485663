"""`python -m handbook`: write the pages that are computed, and their pictures."""

from __future__ import annotations

from pathlib import Path

from handbook.pages import computed_pages
from handbook.token import read_record, tell_story
from handbook.token_pictures import draw_pictures

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    """Write each page that changed, and say so; draw all pictures."""
    for name, text in computed_pages().items():
        page = DOCS / name
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(f"docs/{name} is up to date again")
    draw_pictures(tell_story(read_record()), DOCS / "pictures")


if __name__ == "__main__":
    main()
