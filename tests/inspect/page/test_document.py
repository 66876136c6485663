"""The page as a file: self-contained, and no text of a run can become markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from kedge_inspect.page.data import ReportedRun, page_data
from kedge_inspect.page.document import MARKER, SCRIPTS, is_page, render_page
from tests.inspect.page.records import metric_row, ppo_record, sample

NASTY = [
    "</script><script>window.caught = true</script>",
    "<script>window.caught = true</script>",
    "<!--",
    "<img src=x onerror='window.caught = true'>",
    "&lt;b&gt; &amp;",
    "\u2028\u2029",
    "\ud800 alone",
    "\u202eright to left\u202c",
    "]]> ${window.caught = true} `",
    "\x00\x1b[31m",
]


class Parts(HTMLParser):
    """The texts of the page's script elements by id, and all attributes that would fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.fetched: list[str] = []
        self._open: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._open = (given.get("id") or given.get("type") or "") if tag == "script" else None
        self.fetched += [str(given[name]) for name in ("src", "href") if name in given]

    def handle_endtag(self, tag: str) -> None:
        self._open = None if tag == "script" else self._open

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data


def parts(page: bytes) -> Parts:
    found = Parts()
    found.feed(page.decode("utf-8"))
    return found


@pytest.fixture(scope="module")
def page() -> bytes:
    run = ReportedRun(NASTY[0], ppo_record(samples=[sample(1, tokens=NASTY, prompt="".join(NASTY))]), [])
    return render_page(page_data([run], title="".join(NASTY)))


def test_text_of_a_run_round_trips_and_ends_no_script(page):
    found = parts(page)
    assert set(found.scripts) == {"data", "plotly", "module"}
    assert "<" not in found.scripts["data"]
    assert "\u2028" not in found.scripts["data"]
    [run] = json.loads(found.scripts["data"])["runs"]
    [prompt] = run["samples"]["prompts"]
    assert prompt["responses"][0]["tokens"] == NASTY
    assert run["name"] == NASTY[0]


def test_the_page_fetches_nothing(page):
    assert parts(page).fetched == ["#verdict"]
    text = page.decode("utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    assert "connect-src 'self'" in render_page({"title": ""}, live="data.json").decode("utf-8")


def test_the_key_figures_are_there_without_javascript(page):
    plain = re.search(r"<noscript>(.*)</noscript>", page.decode("utf-8"), re.DOTALL)
    assert plain is not None
    assert "the score rose from 1 to 5" in plain[1]
    assert '<th scope="col">first</th>' in plain[1]
    assert "&lt;/script&gt;" in plain[1]
    assert not re.search(r"<(script|img|b|!--)", plain[1])


def test_the_policy_names_the_script_that_is_there(page):
    script = parts(page).scripts["module"]
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    assert f"script-src 'sha256-{digest}'" in page.decode("utf-8")


def test_the_plotting_library_is_the_one_that_plotly_ships(page):
    shipped = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    assert gzip.decompress(base64.b64decode(parts(page).scripts["plotly"])) == shipped


def test_the_script_has_every_part_and_writes_no_markup(page):
    assets = files("kedge_inspect.page") / "assets"
    assert {path.name for path in assets.iterdir() if path.name.endswith(".js")} == {f"{name}.js" for name in SCRIPTS}
    script = parts(page).scripts["module"]
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert dangerous not in script


def test_a_page_is_recognized_by_its_marker(page):
    assert is_page(page[:4096])
    assert not is_page(b"<!doctype html>\n<html>a user's own report</html>")
    assert not is_page(b"")
    assert not is_page(b"text\n" * 5 + MARKER.encode())


def test_the_same_run_gives_the_same_bytes():
    run = ReportedRun("story", ppo_record())
    assert render_page(page_data([run], title="t")) == render_page(page_data([run], title="t"))


def test_a_run_of_500_updates_is_under_five_megabytes():
    rows = [metric_row(update, **{f"score/{name}": update / 7 for name in range(20)}) for update in range(1, 501)]
    samples = [sample(update, fixed, tokens=[" word"] * 200) for update in range(1, 501, 5) for fixed in (0, 1, None)]
    long = ppo_record(metrics=rows, samples=samples, details=[ppo_record().details[0]] * 500)
    assert len(render_page(page_data([ReportedRun("long", long)], title="long"))) < 5_000_000
