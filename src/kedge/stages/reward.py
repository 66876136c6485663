"""Train a reward model on comparisons, to predict which of two answers people prefer.

    comparisons ─▶ train / held-out split ─▶ all answers to a prompt in one forward pass ─▶ −log σ(better − worse)
                ─▶ accuracy and calibration on held-out prompts ─▶ mean score 0 on the demonstrations ─▶ model/

Source: spec §3.8–11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kedge.config import Config
from kedge.data import Comparison, Ranking
from kedge.models import ScalarModel, load_scalar_model, save_scalar_model
from kedge.models.sharded import shard_model
from kedge.runs.frozen import hold_bases_of
from kedge.runs.inputs import load_rows
from kedge.runs.run import Resume, Run, open_run
from kedge.runs.stage_function import stage_function
from kedge.runs.training import Callback, running
from kedge.stages.planned import PlannedMemory
from kedge.stages.supervised import EndedResult, SupervisedInputs, Trained, load_start, split_inputs, train_model
from kedge.training.supervised.reward_model import RewardModelReport, train_reward_model
from kedge_base.machine.progress import say


@dataclass(frozen=True, repr=False)
class RewardResult(EndedResult):
    """Result of a reward-model run.

    Attributes:
        folder: The run's folder.
        model: Folder of the model: an `AutoModelForSequenceClassification` with one label.
        summary: Contents of `summary.json`: held-out accuracy, length-only baseline, calibration, normalization.
    """

    summary: dict[str, Any]


@stage_function("reward", RewardResult.read)
def run_reward(
    config: Config,
    *,
    comparisons: Sequence[Any] | None = None,
    demonstrations: Sequence[Any] | None = None,
    resume: Resume | None = None,
    callback: Callback | None = None,
    planned: PlannedMemory | None = None,
) -> RewardResult:
    """Train a reward model on `config.data.comparisons`, from `config.reward_model.base` or `config.model`.

    Ctrl-C and SIGTERM are raised again after a checkpoint and the current model, normalized, have been saved; no
    checkpoint if an evaluation was cut short.

    Args:
        config: The resolved configuration.
        comparisons: Rows instead of `config.data.comparisons`.
        demonstrations: Rows instead of `config.data.demonstrations`; the mean score on them becomes 0.
        resume: Resume the run in the output folder; start a new one otherwise.
        callback: Called after each optimizer step.
        planned: The planned memory, which is compared with the measured peak.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before any training.
        KeyboardInterrupt, Terminated: The run was interrupted; the model is saved.
    """
    in_memory = {"data.comparisons": comparisons, "data.demonstrations": demonstrations}
    run = open_run(config, "reward", in_memory=in_memory, resume=resume)
    inputs = load_reward_inputs(run)
    model = inputs.model
    tokenizer = inputs.tokenizer
    split = inputs.split

    def train(**training: Any) -> Trained:
        report = train_reward_model(
            model, tokenizer, split.train, held_out=split.eval, demonstrations=inputs.zeroed, **training
        )
        summary = {
            "num_comparisons": len(split.train),
            "num_steps": report.outcome.num_steps,
            "normalization": {"mean": report.mean, "std": report.std},
            **({} if report.tie is None else {"tie": report.tie}),
            **({} if report.agreement is None else report.agreement.summary()),
        }
        return Trained(report.outcome, _facts(report), {"summary": summary})

    with running(run) as ending:
        ending |= train_model(
            run,
            train,
            partial(save_scalar_model, model, tokenizer),
            model.classifier,
            tokenizer=tokenizer,
            prompts=[record.prompt for record in split.train],
            num_steps=inputs.num_steps,
            shown=("loss", "accuracy", "eval/accuracy"),
            order=inputs.order,
            callback=callback,
            planned=planned,
            unfinished={"mean score": "not set to 0, since training had not ended"},
        )
    return RewardResult.read(run.shared_folder)


def load_reward_inputs(run: Run) -> SupervisedInputs[ScalarModel, Comparison | Ranking]:
    """Load model, comparisons and demonstrations; errors as in `run_reward`."""
    config = run.config
    model, tokenizer = load_start(run, load_scalar_model, init="any")
    if not model.has_new_head:
        say(f"{config.reward_model.base or config.model} is a reward model: it is trained further, with its head.")
    hold_bases_of([model], config, run.device)
    shard_model(model, run.ranks)  # gathered in fp32, because scores are normalized in fp32
    context = model.context_length
    records = load_rows("comparisons", config, run, tokenizer, room=context)
    zeroed = (
        load_rows("demonstrations", config, run, tokenizer, room=context)
        if run.objects.get("data.demonstrations") or config.data.demonstrations
        else []
    )
    return split_inputs(run, model, tokenizer, records, zeroed, role="comparisons")


def _facts(report: RewardModelReport) -> dict[str, object]:
    """The results as rows of the model card."""
    facts: dict[str, object] = {"optimizer steps": report.outcome.num_steps}
    if report.agreement is None:
        facts["held-out accuracy"] = "not measured: no comparisons were held out"
        return facts
    facts["held-out accuracy"] = report.agreement.accuracy
    facts["accuracy of taking the longer answer"] = report.agreement.length_accuracy
    facts["calibration error"] = report.agreement.calibration.error
    return facts
