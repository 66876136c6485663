"""What a run refuses to be resumed with, and what it says."""

import re
from ast import literal_eval
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from kedge.config import load_config, resolved_yaml, with_values
from kedge.data import chat
from kedge.logs.run_folder import write_config
from kedge.ranks import ALONE
from kedge.runs.resuming import checkpoint_to_resume, date_before
from kedge.runs.run import Resume, open_run, resumed
from kedge_base.errors import ConfigError
from kedge_base.stage import find_stage
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


@pytest.mark.parametrize(
    ("setting", "before", "now"),
    [
        ("ppo.eval_every", 20, {"updates": 20, "num_prompts": 100}),
        ("ppo.kl_controller", {"ziegler": {"target": 3.0}}, {"ziegler": {"target": 4.0}}),
        ("schedules", {"ppo.clip_range": {1: 0.1, 9: 0.2}}, {"ppo.clip_range": {1: 0.1, 9: 0.3}}),
        ("optimization.stages", {"ppo": {"weight_decay": 0.1}}, {"ppo": {"weight_decay": 0.2}}),
        ("data.mix", {"a/b:train": 1.0, "c": 1.0}, {"a/b:train": 2.0, "c": 1.0}),
        ("data.columns", {"prompt": "question"}, {"prompt": "text"}),
        ("reward", [{"source": "a"}], [{"source": "b", "weight": 2.0}]),
    ],
)
def test_the_fields_that_a_refusal_names_permit_the_change(setting, before, now, tmp_path: Path) -> None:
    config = load_config(None, ["data.prompts=[a/b:train, c]"])
    write_config(tmp_path, resolved_yaml(with_values(config, {setting: before})), {"stage": "ppo"})

    def resume(allowed: Any = ()) -> None:
        names, _ = resumed(allowed, tmp_path, "ppo")
        permitted = names.allow_changes if names else ()
        changed = with_values(config, {setting: now})
        checkpoint_to_resume(changed, tmp_path, {}, stage=find_stage("ppo"), allowed=permitted, ranks=ALONE)

    with pytest.raises(ConfigError) as refused:
        resume()
    [named] = re.findall(r"If this is intended: resume=(.*)", str(refused.value))
    assert len(literal_eval(named)) == 1
    resume(literal_eval(named))


def test_a_part_of_a_value_may_be_named_to_permit_its_change() -> None:
    names, _ = resumed("ppo.eval_every.num_prompts", None, "ppo")
    assert names == Resume(("ppo.eval_every",))
    with pytest.raises(ConfigError, match="no such field or section"):
        resumed("ppo.evaluate.num_prompts", None, "ppo")
