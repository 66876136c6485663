"""Thumbs and corrections of a chat's answers: each becomes an item with the prompt that was answered."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kedge_base.errors import DataError
from kedge_base.machine.local_server import LocalServer
from kedge_lab.chat import Chat, chat_server, load_chat
from kedge_people.corrections import Corrections
from kedge_people.labels import read_labels, write_data_sets
from tests.lab.chat.test_web import CONFIG, post
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("models")
    talker = save_tiny_policy(folder / "talker", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    return load_chat(CONFIG, [str(talker), str(save_tiny_policy(folder / "base"))])


def asked(server: LocalServer, text: str) -> list[dict]:
    return post(server, "ask", {"text": text})[1][-1]["replies"]


def test_thumbs_and_corrections_become_labels(chat, tmp_path):
    chat.reset()
    with Corrections(tmp_path / "labels", "ana") as corrections, chat_server(chat, corrections=corrections) as server:
        first, plain = asked(server, "one")
        second, _ = asked(server, "two")
        for values in (
            {"item": first["item"], "thumb": 1, "edit": None},
            {"item": first["item"], "thumb": -1, "edit": None},
            {"item": second["item"], "thumb": 0, "edit": "better"},
            {"item": plain["item"], "thumb": 1, "edit": None},
        ):
            assert post(server, "label", values) == (200, [{"thumb": values["thumb"], "edit": values["edit"]}])
        for values in (
            {"item": "nothing", "thumb": 1, "edit": None},
            {"item": first["item"], "thumb": 2, "edit": None},
            {"item": first["item"], "thumb": True, "edit": None},
            {"item": first["item"], "thumb": 0, "edit": " "},
            {"item": first["item"], "thumb": 0, "edit": 1},
        ):
            status, [answer] = post(server, "label", values)
            assert (status, list(answer)) == (400, ["error"])
        write_data_sets(tmp_path / "labels")
    labels = read_labels(tmp_path / "labels")
    assert [(each.item, each.thumbs, each.edits, each.person) for each in labels.answers] == [
        (first["item"], (-1,), (), "ana"),
        (second["item"], (), ("better",), "ana"),
        (plain["item"], (1,), (), "ana"),
    ]
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first["text"].strip()}]
    items = labels.items
    assert items[first["item"]].prompt == said[:1]
    assert items[second["item"]].prompt == [*said, {"role": "user", "content": "two"}]
    assert items[second["item"]].responses == (second["text"].strip(),)
    assert items[plain["item"]].prompt == "one"
    assert items[plain["item"]].responses == (plain["text"],)
    assert len((tmp_path / "labels" / "comparisons.jsonl").read_text().splitlines()) == 1
    with Corrections(tmp_path / "labels", "ben") as more:
        with pytest.raises(DataError, match="is in use"):
            Corrections(tmp_path / "labels", "ana")
        more.take(items[first["item"]], thumb=1, edit=None, seconds=1.0)
    assert len(read_labels(tmp_path / "labels").answers) == 4, "other people's answers stay"


def test_without_a_folder_nothing_is_labeled(chat):
    chat.reset()
    with chat_server(chat) as server:
        [first, _] = asked(server, "one")
        assert "item" not in first
        status, [answer] = post(server, "label", {"item": "x", "thumb": 1, "edit": None})
        assert (status, "without --labels" in answer["error"]) == (400, True)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_takes_thumbs_and_corrections(chat, tmp_path: Path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    chat.reset()
    with (
        Corrections(tmp_path, "ana") as corrections,
        chat_server(chat, corrections=corrections) as server,
        playwright.sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.url)
        page.get_by_role("textbox", name="Your text").fill("hello")
        page.keyboard.press("Enter")
        up = page.get_by_role("button", name="Good").first
        up.click()
        playwright.expect(up).to_have_attribute("aria-pressed", "true")
        page.get_by_role("button", name="Edit", exact=True).last.click()
        page.get_by_role("textbox", name="Corrected answer").fill("<b>mine</b>")
        page.get_by_role("button", name="Keep").click()
        playwright.expect(page.locator(".reply .answer").last).to_have_text("<b>mine</b>")
        page.reload()
        playwright.expect(page.locator(".reply .answer").last).to_have_text("<b>mine</b>")
        playwright.expect(page.get_by_role("button", name="Good").first).to_have_attribute("aria-pressed", "true")
        page.get_by_role("button", name="Undo edit").last.click()
        playwright.expect(page.get_by_role("button", name="Undo edit")).to_have_count(0)
        browser.close()
    found = read_labels(tmp_path).answers
    assert [(each.thumbs, each.edits) for each in found] == [((1,), ())]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_two_models_are_side_by_side_on_the_whole_page(chat):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    chat.reset()
    with chat_server(chat) as server, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 700})
        page.goto(server.url)
        page.get_by_role("textbox", name="Your text").fill("hello")
        page.keyboard.press("Enter")
        page.locator(".figures").nth(1).wait_for()
        assert [page.locator(name).bounding_box()["width"] for name in ("header", "main", "footer")] == [1000] * 3
        left, right = [card.bounding_box() for card in page.locator(".reply").all()]
        assert left["y"] == right["y"]
        assert left["x"] + left["width"] < right["x"]
        browser.close()
