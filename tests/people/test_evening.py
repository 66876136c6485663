"""Two people, one evening: pairs, rankings, corrections, a killed server and a reload in a browser; then training."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kedge_people.labels import read_labels
from tests.people.test_items import rows
from tests.people.test_page import CHROMIUM, PAUSE, playwright, press
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
PEOPLE = ("ana", "ben")
CORRECTED = 5
"""Pairs of each person whose first response is corrected as well."""


class Server:
    """The real command, which can be killed and started again."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.start(*arguments)

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "kedge", "label", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self.folder)
        assert self.process.stdout is not None
        self.urls = dict(self.process.stdout.readline().strip().split(": ", 1) for _ in PEOPLE)
        self.process.stdout.readline()

    def end(self, sent: signal.Signals) -> str:
        self.process.send_signal(sent)
        out, _ = self.process.communicate(timeout=60)
        return out


def work(page: Any, *, reload_at: int = -1, kill: Any = None) -> None:
    """Answer everything by keyboard: the longer response is better."""
    done, total = 0, 1
    while done < total:
        page.wait_for_timeout(PAUSE)
        shown = page.locator(".response .text")
        lengths = [len(text) for text in shown.all_inner_texts()]
        ranks = [sum(other > own for other in lengths) + 1 for own in lengths]
        if len(lengths) == 2 and done < CORRECTED:
            press(page, "Tab", "e", "End")
            page.keyboard.type(f" corrected {done}")
            press(page, "Control+Enter")
        if len(lengths) == 2:
            keys = ["=" if ranks[0] == ranks[1] else "ArrowLeft" if ranks[0] == 1 else "ArrowRight"]
        else:
            keys = [*map(str, ranks), "Enter"]
        if done == reload_at:
            press(page, *keys[:-1], "n")
            page.keyboard.type("before the reload")
            press(page, "Escape")
            page.reload()
            playwright.expect(page.locator("#note")).to_have_value("before the reload")
            page.wait_for_timeout(PAUSE)
            keys = keys[-1:]
        if kill is not None and done == 7:
            kill(lambda keys=keys: press(page, *keys))
        else:
            press(page, *keys)
        done += 1
        total = int(page.locator("#count").inner_text().split()[-1])
        playwright.expect(page.locator("#count")).to_have_text(f"{done} of {total}", timeout=30_000)


def test_an_evening(tmp_path):
    chat = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    model = str(save_tiny_policy(tmp_path / "model", tokenizer=chat))
    asked = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(100)]
    prompts = rows(tmp_path / "prompts.jsonl", asked[:80])
    evaluated = rows(tmp_path / "eval.jsonl", asked[80:])
    common = (model, "--prompts", prompts, "--not-in", evaluated, "--people", ",".join(PEOPLE))
    fields = ("generate.max_new_tokens=12", "runtime.device=cpu", "runtime.num_threads=1")
    for name, size, count in (("pairs", 2, 60), ("rankings", 4, 20)):
        given = ("--out", name, "--num-prompts", str(count), "--responses", str(size))
        server = Server(tmp_path, *common, *given, *fields)

        def kill(answer: Any, server: Server = server, name: str = name) -> None:
            server.end(signal.SIGKILL)
            answer()  # while nobody is there
            urls = server.urls
            server.start(name)
            assert server.urls == urls

        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for person in PEOPLE:
                page = browser.new_page(viewport={"width": 1400, "height": 900})
                page.goto(server.urls[person])
                work(page, reload_at=3, kill=kill if person == "ben" and name == "pairs" else None)
                page.close()
            browser.close()
        assert "Next:    kedge reward" in server.end(signal.SIGINT)
        labels = read_labels(tmp_path / name)
        counts = Counter((answer.person, answer.item) for answer in labels.answers)
        assert set(counts.values()) == {1, 2}
        assert {item for _, item in counts} == set(labels.items)
        shared = [item for item in labels.items if all(counts[person, item] for person in PEOPLE)]
        assert len(shared) == count // 5
        assert [answer.note for answer in labels.answers if answer.note] == ["before the reload"] * 2
        assert all(answer.seconds > 0 for answer in labels.answers)
    corrections = [json.loads(line) for line in (tmp_path / "pairs" / "demonstrations.jsonl").read_text().splitlines()]
    assert len(corrections) == 2 * CORRECTED
    train(tmp_path, model, prompts)


def train(folder: Path, model: str, prompts: str) -> None:
    """Train on what was answered: every row is used."""
    fields = ("runtime.device=cpu", "runtime.num_threads=1", "runtime.report=false")
    data = [name for part in ("pairs", "rankings") for name in ("--comparisons", f"{part}/comparisons.jsonl")]
    # Ties alone are no preference.
    reward = ("reward", "--model", model, *data, "--out", "reward", "num_epochs=1", "data.max_rejected_fraction=0.5")
    sft = ("sft", "--model", model, "--demonstrations", "pairs/demonstrations.jsonl", "--out", "sft", "num_epochs=1")
    ppo = (
        *("ppo", "--model", "sft/model", "--reward", "reward/model", "--prompts", prompts, "--out", "ppo"),
        *("num_updates=2", "rollout.max_new_tokens=8", "rollout.num_prompts=8", "ppo.num_minibatches=1"),
    )
    for command in (reward, sft, ppo):
        call = [sys.executable, "-m", "kedge", *command, *fields]
        subprocess.run(call, check=True, cwd=folder, capture_output=True, text=True)
    rejected = folder / "reward" / "rejected.jsonl"
    reasons = [json.loads(line)["reason"] for line in rejected.read_text().splitlines()] if rejected.exists() else []
    assert all("are equal" in reason for reason in reasons)
    assert (folder / "ppo" / "model").is_dir()
