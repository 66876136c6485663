"""What a run refuses to be resumed with, and what it says."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from kedge.config import load_config, resolved_yaml, with_values
from kedge.data import chat
from kedge.errors import ConfigError
from kedge.logs.run_folder import write_config
from kedge.runs.resuming import date_before
from kedge.runs.run import Resume, open_run
from kedge.system.output import CONFIG_FILE
from tests.tiny import save_tiny_policy, tiny_tokenizer


def test_a_run_that_trained_a_critic_it_did_not_need_names_the_setting_to_resume_it(tmp_path: Path) -> None:
    """As earlier versions did with `to_go`. Allowing the change would fail: the checkpoint has the critic's weights."""
    for name in ("model", "run"):
        (tmp_path / name).mkdir()
    settings = [f"model={tmp_path / 'model'}", f"out={tmp_path / 'run'}", "ppo.advantage=to_go"]
    settings += ["data.prompts=prompts.jsonl", "reward=rewards.py:brief"]
    (tmp_path / "run" / CONFIG_FILE).write_text(resolved_yaml(load_config(overrides=[*settings, "ppo.critic=shared"])))
    with pytest.raises(ConfigError) as caught:
        open_run(load_config(overrides=settings), "ppo", resume=Resume())
    assert str(caught.value) == (
        f"{tmp_path / 'run'} cannot be resumed, because ppo.critic: shared in the run, none now. It was trained with "
        "ppo.critic=shared: resume it with that setting"
    )


def test_a_resumed_run_renders_templates_with_the_date_on_which_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_day", None)
    settings = [f"model={save_tiny_policy(tmp_path / 'model')}", f"out={tmp_path / 'run'}", "runtime.device=cpu"]
    config = load_config(overrides=[*settings, "data.prompts=prompts.jsonl"])
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
