"""The report on labels in a real Chromium."""

import pytest

from kedge_people.report import write_label_report
from tests.inspect.page.test_browser import CHROMIUM
from tests.people.test_quality import examined, folder  # noqa: F401 a fixture

playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def test_the_page_shows_hostile_texts_as_text(folder):  # noqa: F811
    messages = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: messages.append(dialog.message))
        page.goto(write_label_report(folder, examined(folder)).as_uri())
        assert page.locator("h1").inner_text().startswith("Labels in ")
        assert page.locator("main > section").evaluate_all("all => all.map(each => each.id)") == [
            "verdict", "disagreements",
        ]  # fmt: skip
        assert page.locator("#verdict .finding.serious").first.inner_text().startswith("serious Always first")
        assert page.locator("#verdict th", has_text="ben <b>").count() == 5
        pairs = page.locator("#disagreements .pair")
        shown = pairs.count()
        assert "</script><img src=x onerror=alert(1)>" in pairs.first.inner_text()
        page.get_by_role("searchbox").fill("shared 1")
        assert 0 < pairs.count() < shown
        assert page.evaluate("document.images.length") == 0
        page.set_viewport_size({"width": 700, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 700
        browser.close()
    assert messages == []
