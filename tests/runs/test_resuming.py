"""What a run refuses to be resumed with, and what it says."""

from pathlib import Path

import pytest

from kedge.config import load_config, resolved_yaml
from kedge.errors import ConfigError
from kedge.output import CONFIG_FILE
from kedge.runs.run import Resume, open_run


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
