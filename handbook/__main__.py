"""`python -m handbook`: writes the generated pages, the demo's table of results, and all figures."""

from __future__ import annotations

from pathlib import Path

from handbook.demo import draw_demo, read_demo, with_results
from handbook.doctor import with_rules
from handbook.pages import generated_pages
from handbook.scaling import draw_scaling, with_scaling
from handbook.token import compute_update, read_record
from handbook.token_pictures import draw_pictures

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
WITH_RESULTS = (ROOT / "README.md", DOCS / "index.md")
"""Written by hand, except for the demo's table."""
DOCTOR = DOCS / "doctor.md"
"""Written by hand, except for the sections of its rules."""
SCALING = (DOCS / "ranks.md", ROOT / "bench" / "cluster" / "RESULTS.md")
"""Written by hand, except for their tables."""


def main() -> None:
    """Write the pages that changed, and draw all figures."""
    write_pages()
    draw_pictures(compute_update(read_record()), DOCS / "pictures")
    draw_demo(read_demo(), DOCS / "pictures")
    draw_scaling(DOCS / "pictures")


def write_pages() -> None:
    """Write the pages that changed."""
    for page in WITH_RESULTS:
        _write(page, with_results(page.read_text(encoding="utf-8"), read_demo()))
    _write(DOCTOR, with_rules(DOCTOR.read_text(encoding="utf-8")))
    for page in SCALING:
        _write(page, with_scaling(page.read_text(encoding="utf-8")))
    for name, text in generated_pages().items():
        _write(DOCS / name, text)


def _write(page: Path, text: str) -> None:
    if not page.is_file() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")
        print(f"{page.relative_to(ROOT)} updated")


if __name__ == "__main__":
    main()
