"""The reward model: learn from comparisons which of two answers people would prefer.

    comparisons ─▶ held-out prompts apart ─▶ all answers of a prompt in one forward pass ─▶ −log σ(better − worse)
                ─▶ accuracy and calibration on the held-out prompts ─▶ mean score 0 on the demonstrations ─▶ model/

Source: spec §3.8–11.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.config import Config
from kedge.data import Sources, read_comparisons, read_demonstrations, split_eval
from kedge.models import ModelCard, load_scalar_model, load_tokenizer, save_scalar_model
from kedge.runs.ending import leave_stage_report, say_findings
from kedge.runs.run import REJECTED_FILE, Resume, finished_run, open_run, read_ending
from kedge.runs.stage_loop import logged_steps, stage_loop
from kedge.training.supervised.loop import count_steps
from kedge.training.supervised.reward_model import RewardModelReport, train_reward_model

__all__ = ["RewardModelReport", "RewardResult", "run_reward", "train_reward_model"]


@dataclass(frozen=True)
class RewardResult:
    """What a reward-model run leaves.

    Attributes:
        folder: The run's folder; the model is in its `model/`.
        summary: What `summary.json` holds: held-out accuracy, the length-only baseline, calibration, normalisation.
    """

    folder: Path
    summary: dict[str, Any]

    @property
    def model(self) -> Path:
        """The model's folder: an `AutoModelForSequenceClassification` with one label."""
        return self.folder / "model"


def run_reward(
    config: Config,
    *,
    comparisons: Sequence[Any] | None = None,
    demonstrations: Sequence[Any] | None = None,
    resume: Resume | None = None,
) -> RewardResult:
    """Train a reward model on `config.data.comparisons`, from `config.reward_model.base` or `config.model`.

    Ctrl-C and SIGTERM save a checkpoint, and the model as far as it has learnt, normalised, and are raised again.

    Args:
        config: The resolved configuration.
        comparisons: Rows that take the place of `config.data.comparisons`.
        demonstrations: Rows that take the place of `config.data.demonstrations`; the mean score on them becomes 0.
        resume: Go on with the run in the output folder; where there is none, begin it.

    Raises:
        KedgeError: What is missing, cannot be read or does not fit, in one line, before any training.
        KeyboardInterrupt, Terminated: The run was interrupted; the model is saved.
    """
    if resume and (folder := finished_run(config)):
        return RewardResult(folder, *read_ending(folder, "summary"))
    given = {"data.comparisons": comparisons, "data.demonstrations": demonstrations}
    run = open_run(config, "reward", given=given, resume=resume)
    settings, data, seed = config.reward_model, config.data, config.runtime.seed
    source, trusted = str(settings.base or config.model), config.runtime.trust_remote_code
    tokenizer = load_tokenizer(source, trust_remote_code=trusted)
    model = load_scalar_model(source, tokenizer=tokenizer, device=run.device, trust_remote_code=trusted, init="fresh")

    rules: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_length": min(data.max_length, model.context_length or data.max_length),
        "max_prompt_tokens": data.max_prompt_tokens,
        "template": data.template,
        "max_rejected_fraction": data.max_rejected_fraction,
        "rejected_to": run.folder / REJECTED_FILE,
    }
    preferred = read_comparisons(Sources(tuple(data.comparisons)) if comparisons is None else comparisons, **rules)
    imitated = Sources(tuple(data.demonstrations)) if demonstrations is None else demonstrations
    exemplary = read_demonstrations(imitated, **rules).records if demonstrations or data.demonstrations else []
    split = split_eval(preferred.records, data.eval_fraction, seed)

    num_steps = count_steps(len(split.train), num_epochs=settings.num_epochs, batch_size=settings.batch_size)
    shown = ("loss", "accuracy", "eval/accuracy")
    with (
        run.started(),
        stage_loop(config, run) as loop,
        logged_steps(config, run, loop, num_steps, shown=shown) as on_step,
    ):
        report = train_reward_model(
            model,
            tokenizer,
            split.train,
            held_out=split.eval,
            demonstrations=exemplary,
            normalize=settings.normalize,
            normalize_scale=settings.normalize_scale,
            precision=run.precision,
            seed=seed,
            micro_batch_tokens=config.runtime.micro_batch_tokens,
            on_step=on_step,
            loop=loop,
            **settings.model_dump(exclude={"base", "normalize", "normalize_scale"}),
        )
        summary = _write_summary(run.folder, report, num_comparisons=len(split.train))
        save_scalar_model(model, tokenizer, run.folder / "model", card=_card(source, report))
        leave_stage_report(config, run.folder, interrupted=report.outcome.interruption is not None)
        if report.outcome.interruption is not None:
            raise report.outcome.interruption
    run.finish({"summary": summary})
    say_findings(run.folder)
    return RewardResult(run.folder, summary)


def _write_summary(folder: Path, report: RewardModelReport, *, num_comparisons: int) -> dict[str, Any]:
    summary = {
        "num_comparisons": num_comparisons,
        "num_steps": report.outcome.num_steps,
        "normalization": {"mean": report.mean, "std": report.std},
        **({} if report.agreement is None else report.agreement.summary()),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _card(source: str, report: RewardModelReport) -> ModelCard:
    facts: dict[str, object] = {"optimiser steps": report.outcome.num_steps}
    if report.agreement is not None:
        facts["held-out accuracy"] = report.agreement.accuracy
        facts["accuracy of taking the longer answer"] = report.agreement.length_accuracy
        facts["calibration error"] = f"{report.agreement.calibration.error:.3f}"
    return ModelCard("reward", source, facts)
