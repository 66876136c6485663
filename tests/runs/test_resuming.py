"""What a run refuses to be resumed with, and what it says."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from kedge.config import load_config, with_values
from kedge.data import chat
from kedge.logs.run_folder import write_config
from kedge.runs.resuming import date_before
from kedge.runs.run import Resume, open_run
from tests.tiny import save_tiny_policy, tiny_tokenizer


def test_a_resumed_run_renders_templates_with_the_date_on_which_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_day", None)
    settings = [f"model={save_tiny_policy(tmp_path / 'model')}", f"out={tmp_path / 'run'}", "runtime.device=cpu"]
    config = load_config(overrides=[*settings, f"data.prompts={tmp_path / 'prompts.jsonl'}"])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    run = open_run(config, "generate")
    assert str(date.today()) == run.facts["date"] == chat._day  # pyright: ignore[reportPrivateUsage]
    replace(run, facts={**run.facts, "date": "2024-02-29"}).start()
    resumed = open_run(config, "generate", resume=Resume())
    assert resumed.facts["date"] == "2024-02-29"
    dated = {"chat_template": "{{ strftime_now('%d %b %Y') }}"}
    assert chat.apply_template(tiny_tokenizer(), [{"role": "user", "content": "a"}], **dated) == "29 Feb 2024"
    write_config(tmp_path, "model: a", {"date": "2023-01-31"})  # of a chain, whose stages are in its folder
    assert open_run(with_values(config, {"out": str(tmp_path / "new")}), "generate").facts["date"] == "2023-01-31"
    assert open_run(config, "generate", resume=Resume()).facts["date"] == "2024-02-29"
    for damaged in ("", "yesterday", "2024-02-30"):
        write_config(tmp_path / "run", "model: a", {"date": damaged})
        assert date_before(tmp_path / "run") is None
