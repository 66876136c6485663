"""The page in a real Chromium: by keyboard alone, by mouse, over a reload, a lost server and hostile texts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from kedge_people.labels import Item, read_labels
from tests.people.test_server import PAIR, THREE, serving

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install -e '.[dev]'")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

NASTY = "<img src=x onerror='window.caught=1'><script>window.caught=1</script>\u202eevil\u2066\x1b[31m\0\u200b"
PAUSE = 220
"""Milliseconds after which the page takes an answer to a new question."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser) -> Iterator[Any]:
    """Opens a page; it must show no error of the browser, save those that a test expects."""
    messages: list[str] = []
    expected: list[str] = []
    contexts: list[Any] = []

    def open_page(url: str, *, width: int = 1400, scheme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: messages.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(url)
        return page

    open_page.expected = expected
    yield open_page
    for context in contexts:
        assert all(page.evaluate("window.caught") is None for page in context.pages)
        context.close()
    assert [text for text in messages if not any(part in text for part in expected)] == []


def count(page: Any, done: int, total: int) -> None:
    playwright.expect(page.locator("#count")).to_have_text(f"{done} of {total}", timeout=20_000)
    page.wait_for_timeout(PAUSE)


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_pairs_by_keyboard_alone(opened, tmp_path):
    with serving(tmp_path, ["ana"]) as server:
        page = opened(server.urls["ana"])
        count(page, 0, 6)
        for done, key in enumerate(["ArrowLeft", "ArrowRight", "=", "0", "s"], 1):
            press(page, key)
            count(page, done, 6)
            playwright.expect(page.locator("#status")).to_have_text("Saved.")
        press(page, "e")
        playwright.expect(page.locator("#status")).to_contain_text("Press Tab")
        press(page, "Tab", "u", "Tab", "d", "e")
        playwright.expect(page.locator(".response textarea")).to_be_focused()
        press(page, "End")
        page.keyboard.type(" better= 0 s")
        press(page, "Control+Enter", "n")
        page.keyboard.type("a note")
        press(page, "Escape", "ArrowRight")
        count(page, 6, 6)
        playwright.expect(page.locator("#finished")).to_contain_text("Thank you")
    found = read_labels(tmp_path).answers
    assert [each.verdict for each in found] == ["ranked", "ranked", "ranked", "bad", "skipped", "ranked"]
    shown = [[each.ranks[place] for place in each.order] if each.ranks else [] for each in found]
    assert shown == [[1, 2], [2, 1], [1, 1], [], [], [2, 1]]
    last = found[-1]
    first, second = last.order
    assert (last.thumbs[first], last.thumbs[second], last.note) == (1, -1, "a note")
    assert last.edits[second] == PAIR[5].responses[second] + " better= 0 s"
    assert last.edits[first] is None
    assert all(0 < each.seconds < 60 for each in found)


def test_undo_goes_back_and_replaces(opened, tmp_path):
    with serving(tmp_path, ["ana"]) as server:
        page = opened(server.urls["ana"])
        count(page, 0, 6)
        for done, key in enumerate(["ArrowLeft", "s"], 1):
            press(page, key)
            count(page, done, 6)
        press(page, "z")
        playwright.expect(page.locator("#changing")).to_be_visible()
        page.wait_for_timeout(PAUSE)
        press(page, "z")
        playwright.expect(page.locator("#prompt")).to_contain_text("question 0")
        playwright.expect(page.locator(".response.picked")).to_have_count(1)
        page.wait_for_timeout(PAUSE)
        press(page, "Escape")
        playwright.expect(page.locator("#prompt")).to_contain_text("question 2")
        page.wait_for_timeout(PAUSE)
        press(page, "z")
        playwright.expect(page.locator("#prompt")).to_contain_text("question 1")
        page.wait_for_timeout(PAUSE)
        press(page, "=")
        count(page, 2, 6)
        playwright.expect(page.locator("#changing")).to_be_hidden()
    found = read_labels(tmp_path).answers
    assert [(each.item, each.verdict) for each in found] == [("0", "ranked"), ("1", "ranked")]
    assert found[1].replaces is not None


def test_ranks_and_grades_by_keyboard(opened, tmp_path):
    with serving(tmp_path, ["ana"], items=THREE, axes=("overall", "tone")) as server:
        page = opened(server.urls["ana"], scheme="dark", width=700)
        playwright.expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        count(page, 0, 1)
        press(page, "Enter")
        playwright.expect(page.locator("#status")).to_contain_text("Give each response a rank")
        press(page, "2", "3", "Backspace", "1")
        playwright.expect(page.locator("#choices button")).to_be_disabled()
        press(page, "2", "g", "7", "0", "3", "ArrowRight", "Escape", "Enter")
        count(page, 1, 1)
    [found] = read_labels(tmp_path).answers
    assert [found.ranks[place] for place in found.order] == [2, 1, 2]
    assert {axis: [grades[place] for place in found.order] for axis, grades in found.axes.items()} == {
        "overall": [7, 3, None],
        "tone": [None, 2, None],  # the arrow chose the grade after the first one
    }


def test_nine_responses_are_ranked(opened, tmp_path):
    item = Item("1", "q", tuple(f"response {number}" for number in range(9)), ("m",) * 9)
    with serving(tmp_path, ["ana"], items=[item]) as server:
        page = opened(server.urls["ana"])
        count(page, 0, 1)
        press(page, *"987654321", "Enter")
        count(page, 1, 1)
    [found] = read_labels(tmp_path).answers
    assert [found.ranks[place] for place in found.order] == [9, 8, 7, 6, 5, 4, 3, 2, 1]


def test_everything_by_mouse(opened, tmp_path):
    with serving(tmp_path, ["ana"], items=[*PAIR[:2], *THREE], axes=("overall",)) as server:
        page = opened(server.urls["ana"])
        count(page, 0, 3)
        page.get_by_role("button", name="Keys").click()
        playwright.expect(page.get_by_role("dialog")).to_be_visible()
        page.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Good").first.click()
        page.get_by_role("radio", name="6").first.check(force=True)
        page.get_by_role("button", name="Edit").nth(1).click()
        page.get_by_role("textbox", name="Edit response B").fill("by mouse")
        page.get_by_role("button", name="Note").click()
        page.get_by_role("textbox", name="Note").fill("clicked")
        page.get_by_role("button", name="A is better").click()
        count(page, 1, 3)
        page.get_by_role("button", name="Undo", exact=False).click()
        playwright.expect(page.get_by_role("textbox", name="Note")).to_have_value("clicked")
        playwright.expect(page.locator(".response .text").nth(1)).to_have_text("by mouse")
        page.get_by_role("button", name="Back to the next").click()
        playwright.expect(page.locator("#prompt")).to_contain_text("question 1")
        page.wait_for_timeout(PAUSE)
        page.get_by_role("button", name="Both bad").click()
        count(page, 2, 3)
        for place, rank in enumerate((3, 1, 1)):
            page.get_by_role("group", name=f"Rank of {'ABC'[place]}").get_by_role("button", name=str(rank)).click()
        page.get_by_role("button", name="Send the ranks").click()
        count(page, 3, 3)
    first, bad, ranked = read_labels(tmp_path).answers
    assert (first.note, bad.verdict) == ("clicked", "bad")
    assert first.edits[first.order[1]] == "by mouse"
    assert first.thumbs[first.order[0]] == 1
    assert first.axes["overall"][first.order[0]] == 6
    assert [ranked.ranks[place] for place in ranked.order] == [2, 1, 1]


def test_a_reload_in_mid_answer_keeps_everything(opened, tmp_path):
    with serving(tmp_path, ["ana"], items=THREE) as server:
        page = opened(server.urls["ana"])
        count(page, 0, 1)
        texts = page.locator(".response .text").all_inner_texts()
        press(page, "1", "3", "Tab", "d", "n")
        page.keyboard.type("half a note")
        press(page, "Escape", "Tab", "Tab", "e")
        page.keyboard.type(" in the middle")
        page.wait_for_timeout(1000)
        page.reload()
        count(page, 0, 1)
        playwright.expect(page.locator("#note")).to_have_value("half a note")
        assert page.locator(".response .text").all_inner_texts() == [texts[0], f"{texts[1]} in the middle", texts[2]]
        press(page, "2", "Enter")
        count(page, 1, 1)
    [found] = read_labels(tmp_path).answers
    assert [found.ranks[place] for place in found.order] == [1, 3, 2]
    assert (found.thumbs[found.order[0]], found.note) == (-1, "half a note")
    assert found.seconds > 1


def test_an_answer_waits_for_a_server_that_is_gone(opened, tmp_path):
    opened.expected += ["net::ERR_CONNECTION_REFUSED", "503"]
    with serving(tmp_path, ["ana"]) as server:
        page = opened(server.urls["ana"])
        count(page, 0, 6)
    press(page, "ArrowLeft")
    playwright.expect(page.locator("#error")).to_contain_text("Not saved yet")
    press(page, "ArrowRight", "s", "z")  # nothing else is taken meanwhile
    with serving(tmp_path, ["ana"]):
        count(page, 1, 6)
        playwright.expect(page.locator("#error")).to_be_hidden()
    [found] = read_labels(tmp_path).answers
    assert [found.ranks[place] for place in found.order] == [1, 2]


@pytest.mark.parametrize("is_copied", [False, True])
def test_two_tabs_of_one_person_do_not_answer_twice(opened, tmp_path, is_copied):
    opened.expected.append("409")
    with serving(tmp_path, ["ana"]) as server:
        one = opened(server.urls["ana"])
        count(one, 0, 6)
        if is_copied:
            press(one, "Tab", "u")  # the draft is kept, and a browser copies it into the new tab
            with one.expect_popup() as popup:
                one.evaluate("window.open(location.href)")
            two = popup.value
        else:
            two = opened(server.urls["ana"])
        count(two, 0, 6)
        press(one, "ArrowLeft")
        count(one, 1, 6)
        press(two, "ArrowRight")
        count(two, 1, 6)
        playwright.expect(two.locator("#error")).to_contain_text("answered in another window")
        playwright.expect(two.locator("#prompt")).to_contain_text("question 1")
    assert len(read_labels(tmp_path).answers) == 1


def test_an_answer_whose_reply_was_lost_can_be_undone_and_given_again(opened, tmp_path):
    opened.expected.append("net::ERR_FAILED")
    with serving(tmp_path, ["ana"]) as server:
        page = opened(server.urls["ana"])
        count(page, 0, 6)
        page.route("**/answer", lambda route: (route.fetch(), route.abort()))
        press(page, "ArrowLeft")
        playwright.expect(page.locator("#error")).to_contain_text("Not saved yet")
        page.unroute_all(behavior="wait")
        page.reload()
        count(page, 1, 6)
        press(page, "z")
        playwright.expect(page.locator("#changing")).to_be_visible()
        page.wait_for_timeout(PAUSE)
        press(page, "s")
        count(page, 0, 6)
        press(page, "ArrowRight")
        count(page, 1, 6)
    [found] = read_labels(tmp_path).answers
    assert (found.item, [found.ranks[place] for place in found.order]) == (PAIR[0].id, [2, 1])


def test_hostile_texts_are_text(opened, tmp_path):
    prompt = [{"role": "user" + NASTY, "content": NASTY}]
    item = Item("1", prompt, (NASTY, "y" * 1_000_000), ("m", "m"))
    with serving(tmp_path, ["ana"], items=[item]) as server:
        page = opened(server.urls["ana"])
        count(page, 0, 1)
        assert page.locator("main img, main script, main style").count() == 0
        shown = "<img src=x onerror='window.caught=1'><script>window.caught=1</script>‹U+202E›evil‹U+2066›‹U+001B›[31m"
        for place in (page.locator("#prompt .text"), page.locator(".response .text").filter(has_text="img")):
            assert place.inner_text() == f"{shown}‹U+0000›‹U+200B›"
        for width in (1400, 700):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        box = page.locator(".response .text").filter(has_text="yyy")
        assert box.evaluate("box => box.scrollHeight > box.clientHeight && box.scrollWidth <= box.clientWidth + 1")
        press(page, "ArrowLeft")
        count(page, 1, 1)


def test_a_single_response_is_corrected(opened, tmp_path):
    with serving(
        tmp_path, ["ana"], items=[Item("1", "q", ("a text",), ("m",)), Item("2", "q", ("b",), ("m",))]
    ) as server:
        page = opened(server.urls["ana"], width=700)
        count(page, 0, 2)
        press(page, "e", "End")
        page.keyboard.type(" and gone")
        press(page, "Escape")
        playwright.expect(page.locator(".response .text")).to_have_text("a text")
        press(page, "e", "End")
        page.keyboard.type(" corrected")
        press(page, "Control+Enter", "u", "Enter")
        count(page, 1, 2)
        press(page, "d", "Enter")
        count(page, 2, 2)
    first, second = read_labels(tmp_path).answers
    assert (first.edits, first.thumbs, first.verdict) == (("a text corrected",), (1,), "ranked")
    assert (second.edits, second.thumbs) == ((), (-1,))
