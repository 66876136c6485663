"""Progress in a notebook is one block, and plain lines are few."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kedge_base.machine.progress import Progress, in_notebook


class Display:
    """Records what is displayed, as IPython's `display` and its handle would."""

    def __init__(self) -> None:
        self.created: list[dict[str, str]] = []
        self.updated: list[dict[str, str]] = []

    def __call__(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Display:
        assert raw
        assert display_id
        self.created.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        self.updated.append(bundle)


def kernel(monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_a_notebook_is_told_from_a_terminal(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    for shell, expected in ((None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=object()), True)):
        kernel(monkeypatch, shell)
        assert in_notebook() == expected


def test_a_stage_is_one_block_that_is_replaced(monkeypatch, capsys):
    display = Display()
    kernel(monkeypatch, SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    now = [0.0]
    monkeypatch.setattr("kedge_base.machine.progress.monotonic", lambda: now[0])
    with Progress("sft <b>", total=1_000) as progress:
        for step in range(1, 1_001):
            now[0] += 0.01
            progress.update(step, {"loss": 0.5})
        progress.say("the KL is high")
    assert len(display.created) == 1
    assert 30 < len(display.updated) < 40  # ten seconds, one in 0.3 seconds, the last step, the end
    assert display.updated[-2]["text/plain"] == "sft <b> 1000/1000  loss 0.500  eta 0:00"
    assert display.updated[-1]["text/plain"] == "sft <b>: done after 1000 of 1000 in 0:10"
    assert "<b>" not in display.updated[-1]["text/html"]
    assert capsys.readouterr() == ("the KL is high\n", "")


@pytest.mark.parametrize(("seconds_per_step", "most"), [(1.0, 22), (60.0, 202)])
def test_a_long_stage_writes_few_lines_but_is_not_silent(seconds_per_step, most, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("kedge_base.machine.progress.monotonic", lambda: now[0])
    with Progress("ppo", total=1_000) as progress:
        for step in range(1, 1_001):
            now[0] += seconds_per_step
            progress.update(step)
    lines = capsys.readouterr().err.splitlines()
    assert 20 <= len(lines) <= most  # every 5 %, and every five minutes
    assert lines[0].startswith("ppo 1/1000")
    assert lines[-2].startswith("ppo 1000/1000")
