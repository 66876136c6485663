"""Hooks of mkdocs, which only the extra `docs` installs: its types are not named here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# mkdocs loads this file by its path, outside its package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from handbook.dark import dark_name, dark_svg, with_dark_pictures
from handbook.formulas import with_formulas
from handbook.tables import with_readable_tables


def on_files(files: Any, config: Any) -> Any:
    """Add the counterpart of each chart for dark pages."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for picture in [file for file in files if file.src_uri.startswith("pictures/") and file.src_uri.endswith(".svg")]:
        files.append(File.generated(config, dark_name(picture.src_uri), content=dark_svg(picture.content_string)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Give the front page the whole width. GitHub would show a front matter as a table."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    return markdown


def on_page_content(html: str, files: Any, **_: object) -> str:
    """Formulas, tables for narrow screens, pictures for dark pages."""
    return with_dark_pictures(with_readable_tables(with_formulas(html)), [file.src_uri for file in files])
