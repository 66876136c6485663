"""`python -m handbook`: writes the generated pages and their figures."""

from __future__ import annotations

from pathlib import Path

from handbook.pages import generated_pages
from handbook.token import compute_update, read_record
from handbook.token_pictures import draw_pictures

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    """Write the pages that changed, and draw all figures."""
    write_pages()
    draw_pictures(compute_update(read_record()), DOCS / "pictures")


def write_pages() -> None:
    """Write the pages that changed."""
    for name, text in generated_pages().items():
        page = DOCS / name
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(f"docs/{name} updated")


if __name__ == "__main__":
    main()
