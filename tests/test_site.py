"""What the documentation site adds to the pages: formulas, tables for phones, charts for dark pages, a filter."""

import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from handbook.dark import dark_name, dark_svg, with_dark_pictures
from handbook.formulas import mathml, with_formulas
from handbook.tables import with_readable_tables

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")}
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def formulas(page: str) -> list[str]:
    """The TeX of a page, blocks and inline, outside code."""
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^\$\$\n(.+?)\n\$\$$", text, re.MULTILINE | re.DOTALL)
    return blocks + re.findall(r"(?<![$\\])\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\$)", text)


def test_a_formula_becomes_mathml_with_the_signs_and_names_in_place() -> None:
    page = r'<p>So <span class="arithmatex">\(r_t = -\beta \log \pi\)</span>.</p>'
    [formula] = ElementTree.fromstring(with_formulas(page))
    texts = [part.text for part in formula.iter() if part.text]
    assert formula.tag == "{http://www.w3.org/1998/Math/MathML}math"
    assert texts == ["r", "t", "=", "−", "β", "log", "π"]
    assert 'form="prefix">&#x02212;<' in with_formulas(page)
    assert 'display="block"' in with_formulas('<div class="arithmatex">\n\\[\na &lt; b\n\\]</div>')
    assert "&#x0003C;" in mathml("a < b") or "&lt;" in mathml("a < b")


@pytest.mark.parametrize("page", [page for page in PAGES if formulas(page)])
def test_every_formula_can_be_shown_on_the_site_and_on_github(page: str) -> None:
    for tex in formulas(page):
        assert "\\" not in mathml(tex), f"unknown command in {tex}"
        assert ElementTree.fromstring(mathml(tex)) is not None
        # GitHub's Markdown drops a backslash before a sign, and its renderer refuses \operatorname.
        assert not re.search(r"\\[^a-zA-Z]|\\operatorname", tex), tex


def test_the_algorithms_formulas_are_formulas() -> None:
    assert len(formulas("algorithm.md")) > 40
    assert len(formulas("token.md")) >= 7
    assert not re.search(r"\w_\w+ = [−\w]+[·+]|√|ᵗ|½", re.sub(r"`[^`]+`", "", PAGES["algorithm.md"]))


def table(*rows: tuple[str, ...]) -> str:
    head, *body = rows
    cells = ["".join(f"<td>{cell}</td>" for cell in row) for row in body]
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<table>\n<tr>{heads}</tr>\n" + "\n".join(f"<tr>{row}</tr>" for row in cells) + "\n</table>"


def test_a_table_of_prose_is_stacked_with_labels_and_one_of_numbers_is_not() -> None:
    prose = table(("№", "detail", "owner <b>of it</b>"), ("1", "word " * 20, "–"), ("2", "short", "a"))
    stacked = with_readable_tables(prose)
    assert stacked.startswith("<table data-stacked>")
    assert re.findall(r'data-label="([^"]*)"', stacked) == ["№", "detail", "№", "detail", "owner of it"]
    assert re.sub(r' data-(stacked|short|label="[^"]*")', "", stacked) == prose
    assert stacked.count("data-short") == 4
    assert "data-stacked" not in with_readable_tables(table(("a", "b", "c"), ("1", "2", "3")))
    assert "data-stacked" not in with_readable_tables(table(("to", "read"), ("x", "word " * 20)))


def test_long_names_may_break_in_cells_and_headings() -> None:
    row = table(("a", "b"), ("<code>a/b_c</code>", "see <code>x/y.py::test_z</code>")) + "<p><code>a/b</code></p>"
    shown = re.sub(r' data-(short|label="[^"]*")', "", with_readable_tables(row))
    broken = row.replace("<td><code>a/b_c", "<td><code>a/<wbr>b_<wbr>c")
    assert shown == broken.replace("x/y.py::test_z", "x/<wbr>y.py::<wbr>test_<wbr>z")
    heading = '<h3 id="a_b"><code class="c_d">a_b</code> c_d<a class="headerlink" href="#a_b">¶</a></h3>'
    broken = heading.replace(">a_b<", ">a_<wbr>b<").replace("> c_d<", "> c_<wbr>d<")
    assert with_readable_tables(heading) == broken


def test_every_chart_has_a_counterpart_for_dark_pages() -> None:
    for chart in (DOCS / "pictures").glob("*.svg"):
        light = chart.read_text(encoding="utf-8")
        kept = set(re.findall(r"#[0-9a-f]{6}\b", light)) & set(re.findall(r"#[0-9a-f]{6}\b", dark_svg(light)))
        assert kept == set(), f"{chart.name}: colors without a counterpart in handbook.palette.DARK"
        assert re.findall(r"<text[^>]*>([^<]*)", light) == re.findall(r"<text[^>]*>([^<]*)", dark_svg(light))


def test_the_page_shows_one_of_two_variants() -> None:
    page = '<p><img alt="A" src="pictures/a.svg" /> <img alt="B" src="b.png" /></p>'
    shown = with_dark_pictures(page, [dark_name("pictures/a.svg")])
    assert re.findall(r'src="([^"]*)"', shown) == [
        "pictures/a.svg#only-light",
        "pictures/a-dark.svg#only-dark",
        "b.png",
    ]
    assert with_dark_pictures(page, []) == page


def test_the_front_page_opens_with_the_commands_and_a_picture() -> None:
    first = PAGES["index.md"].split("\n## ")[0]
    commands, picture = first.index("make demo"), first.index("![")
    assert commands < first.index("make test") < picture < 1200


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_filter_shows_the_fields_that_contain_all_words() -> None:
    playwright: Any = pytest.importorskip("playwright.sync_api", reason="drives the browser: pip install -e '.[dev]'")
    page = """<article><h1 id="every-field">Every field</h1><p id="about">About.</p>
    <h2 id="ppo">ppo</h2><p>The update.</p>
      <h3 id="clip">ppo.clip_range</h3><p>Largest ratio.</p><h3 id="rate">ppo.learning_rate</h3><p>Step size.</p>
    <h2 id="sft">sft</h2><p>Fine-tuning.</p><h3 id="size">sft.batch_size</h3><p>Rows per step.</p>
    <h2 id="works">Works</h2><p id="papers">Papers.</p></article>"""
    ids = "() => [...document.querySelectorAll('[id]')].filter((node) => !node.hidden).map((node) => node.id)"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page()
        tab.set_content(page)
        everything = tab.evaluate(ids)
        tab.add_script_tag(content=(DOCS / "site" / "filter.js").read_text(encoding="utf-8"))
        assert tab.inner_text("output") == "3 fields"
        around = {"every-field", "about", "works", "papers"}
        for words, found in [
            ("STEP", {"ppo", "rate", "sft", "size"}),
            ("step  rate", {"ppo", "rate"}),
            ("none", set()),
        ]:
            tab.fill("input", words)
            assert set(tab.evaluate(ids)) == around | found
        tab.fill("input", "")
        assert tab.evaluate(ids) == everything
        browser.close()
