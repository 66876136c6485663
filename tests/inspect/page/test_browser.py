"""The page in a real Chromium, opened from the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kedge_inspect.doctor import Finding
from kedge_inspect.live import serve_run
from kedge_inspect.page.data import ReportedRun, page_data
from kedge_inspect.page.document import render_page
from tests.inspect.page.judged import evaluation_record, write_judged
from tests.inspect.page.records import critic_check, ppo_record, reward_record, sample
from tests.inspect.page.test_document import NASTY
from tests.inspect.runs import add, begin, metrics

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install -e '.[dev]'")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

FINDING = Finding(
    "beta_too_small", "serious", "<b>35 nats</b>", "It drifts.", "", "switch", "ppo.kl_coef=0.1", "docs/doctor.md"
)
LONGEST_WAIT = 20_000
"""Milliseconds, for a busy machine."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [*ppo_record().samples, sample(6, 0, tokens=NASTY, prompt="".join(NASTY))]
    samples.append(sample(6, 1, foreign=[[2, f"{NASTY[0]}\n"]], ending="max_turns"))
    tree = {"turns": [[0, 0, 5, 5], [1, 1, 8, 2], [2, 0, 4, 3], [3, 1, 7, 1]], "foreign": [[1, "c"], [2, NASTY[0]]]}
    samples.append(sample(6, 2, **tree, ending="completed"))
    runs = [
        ReportedRun(
            "with <i>KL</i>",
            ppo_record(
                samples=samples, evaluations=[{"update": 4, "eval/score": 2.0}], critic_checks=[critic_check(4, 0.5)]
            ),
            [FINDING],
        ),
        ReportedRun("without", ppo_record(), []),
        ReportedRun("reward", reward_record(), []),
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_bytes(render_page(page_data(runs, title="".join(NASTY))))
    return path


@dataclass(frozen=True)
class Opened:
    """The page, and the warnings and errors of its browser."""

    page: Any
    messages: list[str]


@pytest.fixture(scope="module")
def opened(file: Path) -> Iterator[Opened]:
    messages: list[str] = []

    def collect(message: Any) -> None:
        if message.type in ("error", "warning"):
            messages.append(message.text)

    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.on("console", collect)
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("requestfailed", lambda request: messages.append(request.url))
        page.goto(file.as_uri())
        yield Opened(page, messages)
        browser.close()


@pytest.fixture
def page(opened: Opened) -> Iterator[Any]:
    """One page for all tests, because opening it is slow; each test leaves it as it was."""
    yield opened.page
    assert opened.messages == []
    assert opened.page.evaluate("window.caught") is None


def wait_for_chart(page: Any, title: str) -> Any:
    figure = page.locator("#curves figure", has=page.get_by_role("heading", name=title, exact=True))
    figure.scroll_into_view_if_needed()
    figure.locator(".plot[data-drawn]").wait_for(timeout=LONGEST_WAIT)
    return figure


def test_every_section_is_drawn_and_nothing_is_markup(page):
    # At the load event, and without scrolling: a picture of the page is whole.
    assert page.locator(".js-plotly-plot").count() == page.locator("details[open] .plot, #verdict .plot").count() > 20
    assert page.locator("main > section:visible").count() == 9
    assert page.locator("main img, main b b, main script, main i:not(.scale i)").count() == 0
    playwright.expect(page.locator("h2", has_text="with <i>KL</i>").first).to_be_visible()
    playwright.expect(page.locator(".finding")).to_contain_text("<b>35 nats</b>")


def test_a_finding_opens_to_its_meaning_and_remedy(page):
    remedy = page.locator(".finding dd", has_text="ppo.kl_coef=0.1")
    playwright.expect(remedy).to_be_hidden()
    page.locator(".finding summary").click()
    playwright.expect(remedy).to_be_visible()
    page.locator(".finding summary").click()


def test_a_constant_has_an_axis_from_0(page):
    chart = wait_for_chart(page, "EOS rate")
    low, high = chart.locator(".plot").evaluate("plot => plot.layout.yaxis.range")
    assert -0.1 < low <= 0 < 0.75 < high < 1.1


def test_hovering_over_a_curve_shows_its_values(page):
    chart = wait_for_chart(page, "Score")
    chart.locator(".nsewdrag").hover()
    label = chart.locator(".hoverlayer")
    playwright.expect(label).to_contain_text("without")
    playwright.expect(label).to_contain_text("3")


def until(page: Any, condition: str) -> None:
    """Wait for a condition. `wait_for_function` would evaluate it inside the page, whose policy forbids that."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(25)
    raise AssertionError(condition)


def test_axis_runs_and_zoom_are_shared_by_all_charts(page):
    score, entropy = wait_for_chart(page, "Score"), wait_for_chart(page, "Entropy")

    def shown(chart: Any, code: str) -> Any:
        return chart.locator(".plot").evaluate(f"plot => {code}")

    assert shown(score, "plot.data.length") == 2
    toggle = page.get_by_role("button", name="without", exact=True)
    toggle.click()
    playwright.expect(toggle).to_have_attribute("aria-pressed", "false")
    score.scroll_into_view_if_needed()
    until(page, "document.querySelector('#curves .plot[data-drawn]').data.length === 1")
    page.get_by_role("radio", name="Responses").check()
    until(page, "document.querySelector('#curves .plot[data-drawn]').data[0].x[0] === 8")
    box = score.locator(".nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20, steps=5)
    page.mouse.up()
    entropy.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    assert shown(entropy, "plot.layout.xaxis.range.join()") == shown(score, "plot.layout.xaxis.range.join()")
    page.get_by_role("button", name="Reset zoom").click()
    playwright.expect(page.get_by_role("button", name="Reset zoom")).to_be_disabled()
    page.get_by_role("radio", name="Updates").check()
    toggle.click()


def test_a_token_shows_its_values_to_mouse_and_keyboard(page):
    tokens, tip = page.locator(".tokens .token"), page.get_by_role("tooltip", include_hidden=True)
    tokens.first.scroll_into_view_if_needed()
    assert tokens.all_inner_texts()[0] == NASTY[0]
    page.locator(".answers button").first.click()
    tokens.nth(2).hover()
    playwright.expect(tip).to_contain_text("4.8")
    page.mouse.move(2, 2)
    playwright.expect(tip).to_be_hidden()
    tokens.first.focus()
    playwright.expect(tip).to_contain_text("4.2")
    page.keyboard.press("ArrowRight")
    playwright.expect(tip).to_contain_text("4.5")
    page.keyboard.press("End")
    playwright.expect(tip).to_contain_text("token 4 of 4")
    page.keyboard.press("Escape")
    playwright.expect(tip).to_be_hidden()
    before = tokens.nth(1).evaluate("token => getComputedStyle(token).backgroundColor")
    page.get_by_role("radio", name="Entropy").check()
    assert tokens.nth(1).evaluate("token => getComputedStyle(token).backgroundColor") != before


def test_an_episode_is_shown_turn_by_turn(page):
    page.get_by_role("radio", name="Prompt 2").check()
    said = page.locator(".tokens > span")
    assert said.all_inner_texts() == [" The", " boat", f"{NASTY[0]}↵\n", ".", "<eos>"]
    [foreign] = page.locator(".foreign").all()
    assert foreign.get_attribute("aria-label").startswith("only read: ")
    muted = page.locator(".samples .muted").last
    colors = [each.evaluate("node => getComputedStyle(node).color") for each in (foreign, muted, said.first)]
    assert colors[0] == colors[1] != colors[2]
    assert foreign.evaluate("node => getComputedStyle(node).display") == "block", "turns are apart"
    playwright.expect(muted).to_contain_text("2 turns with 4 tokens · the episode ended: max turns")
    playwright.expect(page.locator(".answers .text").last).to_contain_text(f"The boat{NASTY[0]}")
    said.nth(1).focus()
    page.keyboard.press("ArrowRight")
    assert foreign.evaluate("node => node === document.activeElement"), "arrow keys read both sides"
    page.keyboard.press("Escape")
    page.get_by_role("radio", name="Prompt 1").check()


def test_the_turns_of_an_episode_are_drawn_as_a_tree(page):
    page.get_by_role("radio", name="Prompt 3").check()
    heads = page.locator(".turn > .turn-head").all_inner_texts()
    assert [head.split(" · reward")[0] for head in heads] == [
        "Turn 1 · reads 5 tokens",
        "Turn 2 · reads 8 tokens, 2 of them new",
        "Turn 3 · begins anew · reads 4 tokens, 3 of them new · 2 of the policy's own tokens are left out",
        "Turn 4 · continues turn 1 · reads 7 tokens, 1 of them new · 2 of the policy's own tokens are left out",
    ]
    assert heads[-1].endswith("reward 6 · value 5 · advantage 0.15")
    turns = page.locator(".turn")
    assert [turn.locator("> span").all_inner_texts() for turn in turns.all()] == [
        [" The"],
        ["c", " boat"],
        [NASTY[0], "."],
        ["<eos>"],
    ]
    left = [turn.bounding_box()["x"] for turn in turns.all()]
    assert left[0] == left[1] == left[2] < left[3], "the second turn after the first is indented"
    assert turns.nth(2).get_attribute("aria-label") == heads[2]
    spans = page.locator(".turn > span")
    spans.first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert spans.nth(3).evaluate("node => node === document.activeElement"), "arrow keys cross turns"
    muted = page.locator(".samples .muted").last
    playwright.expect(muted).to_contain_text("4 turns in 3 contexts with 4 tokens · the episode ended: completed")
    page.keyboard.press("Escape")
    page.get_by_role("radio", name="Prompt 1").check()


def test_the_clipping_follows_its_slider(page):
    slider = page.get_by_role("slider", name="Update")
    slider.scroll_into_view_if_needed()
    playwright.expect(page.locator("#clipping output")).to_have_text("whole run")
    slider.focus()
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("#clipping output")).to_have_text("1")
    playwright.expect(page.locator("#clipping table")).to_contain_text("75%")


def test_the_theme_follows_the_system_until_it_is_chosen(page):
    root = page.locator("html")
    playwright.expect(root).to_have_attribute("data-theme", "light")
    page.emulate_media(color_scheme="dark")
    playwright.expect(root).to_have_attribute("data-theme", "dark")
    page.get_by_role("button", name="Switch to the light theme").press("Enter")
    playwright.expect(root).to_have_attribute("data-theme", "light")
    page.emulate_media(color_scheme="light")


def test_a_page_of_fine_tuning_has_no_empty_sections(opened, tmp_path):
    record = reward_record()
    path = tmp_path / "sft.html"
    run = ReportedRun("sft", replace(record, facts={"stage": "sft"}, summary={}), [])
    path.write_bytes(render_page(page_data([run], title="sft")))
    page = opened.page.context.browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.as_uri())
    assert [each.inner_text() for each in page.locator("nav a:visible").all()] == ["Verdict", "Curves", "Cost"]
    assert page.locator(".empty:visible, .omitted:visible").count() == 0
    page.set_viewport_size({"width": 390, "height": 800})
    page.reload()
    playwright.expect(page.locator("#curves .plot").first).to_be_hidden()
    page.locator("#curves > details > summary").click()
    playwright.expect(page.locator("#curves .plot[data-drawn]").first).to_be_visible(timeout=LONGEST_WAIT)
    page.close()


def test_an_axis_that_runs_lack_is_not_offered(opened, tmp_path):
    rows = [{"update": update, "reward/score_mean": 0.5, "objective/kl": 0.1} for update in (1, 2)]
    path = tmp_path / "report.html"
    runs = [
        ReportedRun("log", ppo_record(metrics=rows, config={}, critic_checks=[]), []),
        ReportedRun("critic", replace(ppo_record(), facts={"stage": "critic"}, metrics=[{"update": 1, "loss": 1.0}])),
    ]
    path.write_bytes(render_page(page_data(runs, title="log")))
    page = opened.page.context.browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.as_uri())
    stages, axes = page.get_by_role("group", name="Stage"), page.get_by_role("group", name="Over")
    assert stages.locator("label").all_inner_texts() == ["PPO", "Critic"]
    assert [each.is_enabled() for each in axes.get_by_role("radio").all()] == [True, False, False]
    page.close()


def test_a_page_that_follows_a_run_changes_only_with_it(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("kedge_inspect.live.REBUILD_SHARE", 0)
    add(begin(tmp_path / "ppo"), "metrics.jsonl", metrics(1))
    page = opened.page.context.browser.new_page()
    page.clock.install()

    def poll(server: Any) -> int:
        with page.expect_response(f"{server.url}data.json", timeout=LONGEST_WAIT) as answer:
            page.clock.run_for(6_000)
        return answer.value.status

    with serve_run(tmp_path) as server:
        page.goto(server.url)
        assert poll(server) == 304
        write_judged(tmp_path / "evaluate", evaluation_record())
        assert poll(server) == 200
        playwright.expect(page.get_by_role("heading", name="Evaluation", exact=False).first).to_be_visible()
        assert poll(server) == 304
    page.close()


def test_a_page_of_a_critics_check_shows_it_and_no_evaluation(opened, tmp_path):
    record = replace(
        ppo_record(critic_checks=[critic_check(4, 0.5)], summary={"critic": "runs/ppo"}),
        facts={"stage": "evaluate"},
        config={"evaluate": {"critic": "runs/ppo"}},
    )
    file = tmp_path / "report.html"
    file.write_bytes(render_page(page_data([ReportedRun("check", record, [])], title="check")))
    page = opened.page.context.browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.as_uri())
    page.locator("#critic .plot[data-drawn]").wait_for(timeout=LONGEST_WAIT)
    assert [each.inner_text() for each in page.locator("nav a:visible").all()] == ["Verdict", "Critic"]
    page.close()


def test_a_phone_needs_no_horizontal_scrolling(page):
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    tables = page.locator(".scroll:visible").all()
    assert tables
    assert all(table.evaluate("each => each.scrollWidth <= each.clientWidth + 1") for table in tables)
    page.set_viewport_size({"width": 1280, "height": 900})
