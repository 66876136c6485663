"""What a run leaves when it ends early, is interrupted or fails, and what a resumed run makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge_base.errors import RewardError
from kedge_base.run_folder.output import best_checkpoint, kept_checkpoints
from kedge_inspect.doctor.rewards import _find_spread
from kedge_inspect.record import read_run
from tests.tiny import save_tiny_policy, tiny_causal_lm, tiny_tokenizer

PROMPTS = ["The boat", "A sailor", "My rope broke", "Once upon a time"]
SIZES: dict[str, Any] = {"num_updates": 3, "num_prompts": 4, "max_new_tokens": 6, "report": False}
TUNING: dict[str, Any] = {
    "demonstrations": [{"prompt": f"{prompt} {n}", "completion": " the sea"} for n in range(4) for prompt in PROMPTS],
    "batch_size": 4,
    "schedule": "constant",
    "data.eval_fraction": 0.25,
    "report": False,
}
OPEN = "what it wrote last may be missing"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def negative(completions: list[str], **_: Any) -> list[float]:
    return [len(text) / 10 - 100 for text in completions]


def at(number: int, error: BaseException | None = None) -> Any:
    """A callback that ends the run after an update, or raises an error."""

    def on_update(update: kedge.Update) -> None:
        if update.number == number:
            if error is not None:
                raise error
            update.stop("enough")

    return on_update


def ending(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "finished.json").read_text())


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_the_receipt_covers_what_an_interrupted_run_left(policy: Path, tmp_path: Path, stage: str) -> None:
    error = KeyboardInterrupt() if stage == "sft" else RewardError("no longer")
    data = TUNING if stage == "sft" else {"prompts": PROMPTS, "reward": lengths, **SIZES}
    with pytest.raises(type(error)):
        getattr(kedge, stage)(model=policy, out=tmp_path / "run", on_update=at(2, error), **data)
    [found] = kedge.verify(tmp_path / "run").values()
    assert (found.differences, OPEN in found.summary) == ([], False)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    assert next(iter(kedge.verify(tmp_path / "run").values())).differences


def test_a_model_whose_training_ended_early_is_evaluated(policy: Path, tmp_path: Path) -> None:
    whole = kedge.sft(model=policy, out=tmp_path / "whole", num_epochs=1, **TUNING)
    early = kedge.sft(model=policy, out=tmp_path / "early", num_epochs=9, on_update=at(whole.num_steps), **TUNING)
    assert early.evaluation == whole.evaluation
    assert f"nats per token | {whole.evaluation['loss']:.4g} |" in (early.model / "README.md").read_text()


def test_the_card_of_an_interrupted_model_has_no_figure_of_earlier_weights(policy: Path, tmp_path: Path) -> None:
    options = {**TUNING, "num_epochs": 4, "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        kedge.sft(model=policy, on_update=at(4, KeyboardInterrupt()), **options)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert ["eval/loss" in json.loads(row) for row in rows] == [False, False, True, False]
    assert "held-out" not in (tmp_path / "run" / "model" / "README.md").read_text()
    assert kedge.sft(model=policy, resume=True, **options).evaluation.keys() == {"loss", "token_accuracy"}


def test_a_run_that_was_asked_to_end_ends_there_again(policy: Path, tmp_path: Path) -> None:
    options = {"model": policy, "prompts": PROMPTS, "reward": lengths, "out": tmp_path / "run", **SIZES}
    result = kedge.ppo(on_update=at(2), **options)
    weights = (result.model / "model.safetensors").read_bytes()
    (result.model / "model.safetensors").write_bytes(b"damaged")
    kedge.ppo(resume=True, **options)
    assert (ending(tmp_path / "run")["updates"], ending(tmp_path / "run")["ended"]) == (2, "enough")
    assert (result.model / "model.safetensors").read_bytes() == weights
    assert len(kedge.ppo(resume=True, **{**options, "num_updates": 4}).metrics) == 4  # a longer one goes on


def test_the_start_is_the_best_also_after_updates_that_were_dropped(policy: Path, tmp_path: Path) -> None:
    def falling(completions: list[str], **_: Any) -> list[float]:
        return [-float(trainer.done)] * len(completions)

    options: Any = {"on_nonfinite": "skip", "eval_every": 1, "eval_prompts": ["One day"], **SIZES}
    with kedge.PpoTrainer(model=policy, prompts=PROMPTS, reward=falling, out=tmp_path / "run", **options) as trainer:
        for update in trainer.updates():
            trainer.update(trainer.sample(), [float("nan") if update == 1 else 0.0] * 4)
    assert best_checkpoint(tmp_path / "run") == 1
    assert kept_checkpoints(tmp_path / "run") == [1, 3]


def test_the_best_update_is_not_that_of_another_reward(policy: Path, tmp_path: Path) -> None:
    options = {"prompts": PROMPTS, "eval_prompts": ["One day"], "eval_every": 1, "out": tmp_path / "run", **SIZES}
    kedge.ppo(model=policy, reward=lengths, **options)
    changed = ["reward", "reward.code"]
    kedge.ppo(model=policy, reward=negative, resume=changed, **{**options, "num_updates": 4})
    assert ending(tmp_path / "run")["best"]["value"] < -90
    kedge.ppo(model=policy, reward={negative: -1.0}, resume=changed, **{**options, "num_updates": 5})
    assert ending(tmp_path / "run")["best"]["value"] > 90


def test_a_critic_is_not_fitted_to_the_returns_of_another_weight(policy: Path, tmp_path: Path) -> None:
    options: Any = {"prompts": PROMPTS * 4, "out": tmp_path / "run", "report": False, "checkpoint": {"every": 1}}
    options |= {"rollout.max_new_tokens": 6, "rollout.num_prompts": 4, "data.eval_fraction": 0.25}
    with pytest.raises(KeyboardInterrupt):
        kedge.critic(model=policy, reward={lengths: 1.0}, on_update=at(1, KeyboardInterrupt()), **options)
    before = json.loads((tmp_path / "run" / "summary.json").read_text())["returns_std"]
    options["resume"] = ["reward"]
    after = kedge.critic(model=policy, reward={lengths: 50.0}, **options).summary["returns_std"]
    assert after == pytest.approx(50 * before, rel=0.5)


def test_a_run_on_loaded_models_can_be_moved(policy: Path, tmp_path: Path) -> None:
    model = kedge.LoadedModel(tiny_causal_lm(), tiny_tokenizer())
    kedge.ppo(model=model, prompts=PROMPTS, reward=lengths, out=tmp_path / "run", **SIZES)
    (tmp_path / "run").rename(tmp_path / "moved")
    options = {**SIZES, "num_updates": 4, "out": tmp_path / "moved"}
    assert len(kedge.ppo(model=model, prompts=PROMPTS, reward=lengths, resume=True, **options).metrics) == 4


def test_a_run_without_results_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(completions: list[str], **_: Any) -> list[float]:
        raise ValueError("no score")

    model = kedge.LoadedModel(tiny_causal_lm(), tiny_tokenizer())
    with pytest.raises(RewardError, match="no score"):
        kedge.ppo(model=model, prompts=PROMPTS, reward=failing, out=tmp_path / "run", **SIZES)
    assert not (tmp_path / "run").exists()
    assert "Resume:" not in capsys.readouterr().err


def test_a_loop_that_goes_on_has_not_finished(policy: Path, tmp_path: Path) -> None:
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **{**SIZES, "report": True}) as trainer:
        trainer.update(trainer.sample(PROMPTS), [0.0, 1.0, 0.0, 1.0])
        trainer.save()
        assert '"state":"running"' in (tmp_path / "run" / "report.html").read_text().replace(" ", "")


def test_a_loop_is_advised_what_it_accepts(policy: Path, tmp_path: Path) -> None:
    groups = {**SIZES, "preset": "grpo", "num_responses": 2, "num_prompts": 2}
    with kedge.PpoTrainer(model=policy, out=tmp_path / "loop", **groups) as trainer:
        trainer.update(trainer.sample(PROMPTS), [0.0] * 8)
    kedge.ppo(model=policy, prompts=PROMPTS, reward=lengths, out=tmp_path / "run", **groups)
    for folder, advised in (("loop", "drop"), ("run", "resample")):
        run = read_run(tmp_path / folder)
        [spread, _] = [remedy(run) for remedy in _find_spread(run)]
        assert (spread.field, spread.value) == ("ppo.constant_groups", advised)
