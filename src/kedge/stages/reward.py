"""The reward model: train a model on comparisons to predict which of two answers people prefer.

    comparisons ─▶ train / held-out split ─▶ all answers to a prompt in one forward pass ─▶ −log σ(better − worse)
                ─▶ accuracy and calibration on held-out prompts ─▶ mean score 0 on the demonstrations ─▶ model/

Source: spec §3.8–11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.data import Comparison, Demonstration, Mixture, Ranking, Split
from kedge.logs.progress import say
from kedge.models import ScalarModel, load_scalar_model, load_tokenizer, save_scalar_model
from kedge.models.sharded import shard_model
from kedge.runs.frozen import adapter_of, bases_of, hold_bases_of, say_loaded_whole
from kedge.runs.inputs import load_comparisons, load_demonstrations
from kedge.runs.out_of_memory import stage_function
from kedge.runs.resuming import read_ending
from kedge.runs.run import Resume, Run, open_run
from kedge.runs.shown_result import shows_its_run
from kedge.runs.stage_card import stage_card
from kedge.runs.training import Callback, end_training, running, supervised_loop
from kedge.stages.planning.report import MachinePlan, compared
from kedge.system.output import write_summary
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.supervised.loop import count_steps
from kedge.training.supervised.reward_model import RewardModelReport, train_reward_model

__all__ = ["RewardModelReport", "RewardResult", "load_reward_inputs", "run_reward", "train_reward_model"]


@shows_its_run
@dataclass(frozen=True, repr=False)
class RewardResult:
    """Result of a reward-model run.

    Attributes:
        folder: The run's folder.
        summary: Contents of `summary.json`: held-out accuracy, length-only baseline, calibration, normalization.
    """

    folder: Path
    summary: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> RewardResult:
        """The result of a finished run."""
        return cls(folder, *read_ending(folder, "summary"))

    @property
    def model(self) -> Path:
        """Folder of the model: an `AutoModelForSequenceClassification` with one label."""
        return self.folder / "model"


@stage_function("reward", RewardResult.read)
def run_reward(
    config: Config,
    *,
    comparisons: Sequence[Any] | None = None,
    demonstrations: Sequence[Any] | None = None,
    resume: Resume | None = None,
    callback: Callback | None = None,
    planned: MachinePlan | None = None,
) -> RewardResult:
    """Train a reward model on `config.data.comparisons`, from `config.reward_model.base` or `config.model`.

    Ctrl-C and SIGTERM are raised again after a checkpoint and the current model, normalized, have been saved.

    Args:
        config: The resolved configuration.
        comparisons: Rows instead of `config.data.comparisons`.
        demonstrations: Rows instead of `config.data.demonstrations`; the mean score on them becomes 0.
        resume: Resume the run in the output folder; start a new one otherwise.
        callback: Called after each optimizer step.
        planned: Memory that it should hold, to be compared with the measured peak.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before any training.
        KeyboardInterrupt, Terminated: The run was interrupted; the model is saved.
    """
    in_memory = {"data.comparisons": comparisons, "data.demonstrations": demonstrations}
    run = open_run(config, "reward", in_memory=in_memory, resume=resume)
    inputs = load_reward_inputs(config, run, comparisons, demonstrations)
    model = inputs.model
    tokenizer = inputs.tokenizer
    split = inputs.split

    prompts = [record.prompt for record in split.train]

    def save(
        folder: Path, weights: dict[str, Tensor] | None, *, facts: Mapping[str, object], ended: bool = False
    ) -> Path:
        card = stage_card(config, run, facts, tokenizer=tokenizer, prompts=prompts, ended=ended)
        return save_scalar_model(model, tokenizer, folder, card=card, weights=weights, final=ended)

    unnormalized = {"mean score": "not set to 0, since training had not ended"}
    in_checkpoints = CheckpointModel(
        model.classifier,
        lambda folder, step, weights: save(folder, weights, facts={"optimizer steps": step, **unnormalized}),
    )
    given: Any = {"model": in_checkpoints, "tokenizer": tokenizer, "callback": callback}
    shown = ("loss", "accuracy", "eval/accuracy")
    with (
        running(config, run) as ending,
        supervised_loop(config, run, inputs.num_steps, **given, shown=shown) as training,
    ):
        training["order"] = inputs.mixture and inputs.mixture.order
        report = train_reward_model(
            model,
            tokenizer,
            split.train,
            held_out=split.eval,
            demonstrations=inputs.demonstrations,
            **training,
            **config.training_of("reward_model"),
        )
        run.sync()
        summary = _write_summary(run.folder, report, num_comparisons=len(split.train))
        save_last = partial(save, facts=_facts(report), ended=True)
        end_training(config, run, report.outcome, module=model.classifier, save=save_last)
        ending |= {**training["loop"].summary(), "summary": summary, **compared(planned, run.device)}
    return RewardResult(run.shared_folder, summary)


@dataclass(frozen=True)
class RewardInputs:
    """The inputs of reward modeling.

    Attributes:
        model: The model to train, with its trained head or a new one.
        tokenizer: Its tokenizer.
        split: The comparisons, some of them held out.
        mixture: The order of several sources with weights; None for one pass after the other.
        demonstrations: Texts that get a mean score of 0; may be empty.
        num_steps: Optimizer steps of the run.
    """

    model: ScalarModel
    tokenizer: PreTrainedTokenizerBase
    split: Split[Comparison | Ranking]
    mixture: Mixture | None
    demonstrations: list[Demonstration]
    num_steps: int


def load_reward_inputs(
    config: Config,
    run: Run,
    comparisons: Sequence[Any] | None = None,
    demonstrations: Sequence[Any] | None = None,
) -> RewardInputs:
    """Load model, comparisons and demonstrations; arguments and errors as in `run_reward`."""
    settings = config.reward_model
    trusted = config.runtime.trust_remote_code
    source = str(settings.base or config.model)
    tokenizer = load_tokenizer(source, trust_remote_code=trusted, chat_template=config.data.chat_template)
    model = load_scalar_model(
        source,
        tokenizer=tokenizer,
        device=run.device,
        trust_remote_code=trusted,
        init="any",
        adapter=adapter_of(config),
        bases=bases_of(config),
        ranks=run.ranks,
    )
    if not model.has_new_head:
        say(f"{source} is a reward model: it is trained further, with its head.")
    say_loaded_whole(model)
    hold_bases_of([model], config, run.device)
    shard_model(model, run.ranks)  # gathered in fp32, as the scores are normalized in it

    context = model.context_length
    records = load_comparisons(config, run, tokenizer, context_length=context, rows=comparisons)
    zeroed = (
        load_demonstrations(config, run, tokenizer, context_length=context, rows=demonstrations)
        if demonstrations or config.data.demonstrations
        else []
    )
    split = run.data.split("comparisons", records, config)
    mixture = run.data.mixture("comparisons", config, split.train_rows)
    num_steps = count_steps(len(split.train), num_epochs=settings.num_epochs, batch_size=settings.batch_size)
    return RewardInputs(model, tokenizer, split, mixture, zeroed, num_steps)


def _write_summary(folder: Path, report: RewardModelReport, *, num_comparisons: int) -> dict[str, Any]:
    summary = {
        "num_comparisons": num_comparisons,
        "num_steps": report.outcome.num_steps,
        "normalization": {"mean": report.mean, "std": report.std},
        **({} if report.agreement is None else report.agreement.summary()),
    }
    write_summary(folder, summary)
    return summary


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
