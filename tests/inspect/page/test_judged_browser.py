"""Filtering and searching the pairs of an evaluation in a real Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge_inspect.page.data import ReportedRun, page_data
from kedge_inspect.page.document import render_page
from tests.inspect.page.judged import evaluation_record, generation_record, judgment
from tests.inspect.page.test_browser import CHROMIUM
from tests.inspect.page.test_document import NASTY

playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def test_pairs_are_filtered_and_searched_and_nothing_is_markup(tmp_path: Path) -> None:
    rows = [judgment(number, "model" if number % 3 else "against") for number in range(30)]
    rows[3]["completion"] = "".join(NASTY)
    runs = [ReportedRun("e", evaluation_record(rows), []), ReportedRun("g", generation_record(), [])]
    (tmp_path / "report.html").write_bytes(render_page(page_data(runs, title="judged")))
    messages: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto((tmp_path / "report.html").as_uri())
        assert page.locator("main > section").evaluate_all("all => all.map(each => each.id)") == [
            "verdict", "evaluation", "generation",
        ]  # fmt: skip
        pairs = page.locator("#evaluation .pair")
        assert pairs.count() == 20
        page.get_by_role("radio", name="lost 10").check()
        assert pairs.count() == 10
        page.locator("#evaluation").get_by_role("searchbox").fill("deck 3:")
        assert pairs.count() == 1
        assert "<script>window.caught" in pairs.first.inner_text()
        page.locator("#generation").get_by_text("highest score").click()
        assert "score 3" in page.locator("#generation .pair").first.inner_text()
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("window.caught") is None
        browser.close()
    assert messages == []


def test_the_controlled_win_rate_stands_beside_the_raw_one(tmp_path: Path) -> None:
    controlled = {"value": 0.55, "low": 0.25, "high": 0.75, "for": ["length", "bold"]}
    runs = [ReportedRun("e", evaluation_record(win_rate_controlled=controlled), [])]
    (tmp_path / "report.html").write_bytes(render_page(page_data(runs, title="controlled")))
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto((tmp_path / "report.html").as_uri())
        cells = page.locator("#evaluation table").first.locator("tbody td").all_inner_texts()
        assert cells[1:3] == ["62.5% (25% to 100%)", "55% (25% to 75%)"]
        sentence = "If both sides were alike in length, bold, the win rate would be 55% (25% to 75%)"
        assert page.locator("#evaluation p", has_text=sentence).count() == 1
        browser.close()
