"""Supervised fine-tuning: train a model to imitate the demonstrations.

    demonstrations ─▶ train / held-out split ─▶ token ids with EOS ─▶ cross-entropy of the completions ─▶ model/

Source: spec §3.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.data import Demonstration, encode_example
from kedge.models import LanguageModel, load_language_model, own_stop_tokens, save_policy
from kedge.models.pretrained import inner_matrices
from kedge.models.sharded import shard_model
from kedge.runs.frozen import hold_bases_of
from kedge.runs.inputs import load_rows
from kedge.runs.run import Resume, Run, open_run
from kedge.runs.stage_function import stage_function
from kedge.runs.training import Callback, running
from kedge.stages.planned import PlannedMemory
from kedge.stages.supervised import EndedResult, SupervisedInputs, Trained, load_start, split_inputs, train_model
from kedge.training.supervised.loop import Outcome, TrainingSettings, check_lengths, train_supervised
from kedge.training.supervised.losses import CompletionLoss

HELD_OUT = {
    "loss": "loss on held-out demonstrations, nats per token",
    "token_accuracy": "held-out token accuracy",
}
"""Names of the evaluation's figures in the model card."""


@dataclass(frozen=True, repr=False)
class SftResult(EndedResult):
    """Result of a fine-tuning run.

    Attributes:
        folder: The run's folder.
        model: Folder of the model, which plain transformers can load.
        num_steps: Optimizer steps taken.
        evaluation: `loss` (nats per token) and `token_accuracy` on the held-out demonstrations; empty without any.
    """

    num_steps: int
    evaluation: dict[str, float]


@stage_function("sft", SftResult.read)
def run_sft(
    config: Config,
    *,
    demonstrations: Sequence[Any] | None = None,
    resume: Resume | None = None,
    callback: Callback | None = None,
    planned: PlannedMemory | None = None,
) -> SftResult:
    """Fine-tune `config.model` on `config.data.demonstrations`.

    Ctrl-C and SIGTERM are raised again after a checkpoint and the current model have been saved; no checkpoint if an
    evaluation was cut short.

    Args:
        config: The resolved configuration.
        demonstrations: Rows instead of `config.data.demonstrations`.
        resume: Resume the run in the output folder; start a new one otherwise.
        callback: Called after each optimizer step.
        planned: The planned memory, which is compared with the measured peak.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before any training.
        KeyboardInterrupt, Terminated: The run was interrupted; the model is saved.
    """
    run = open_run(config, "sft", in_memory={"data.demonstrations": demonstrations}, resume=resume)
    inputs = load_sft_inputs(run)
    model = inputs.model
    tokenizer = inputs.tokenizer
    split = inputs.split

    def train(**training: Any) -> Trained:
        outcome = train_sft(model, tokenizer, split.train, held_out=split.eval, **training)
        held_out = {HELD_OUT.get(name, name): value for name, value in outcome.evaluation.items()}
        facts = {"optimizer steps": outcome.num_steps, **held_out}
        return Trained(outcome, facts, {"num_steps": outcome.num_steps, "evaluation": outcome.evaluation})

    with running(run) as ending:
        ending |= train_model(
            run,
            train,
            partial(save_policy, model, tokenizer, stop_tokens=own_stop_tokens(tokenizer, model).ids),
            model.causal,
            tokenizer=tokenizer,
            prompts=[record.prompt for record in split.train],
            num_steps=inputs.num_steps,
            shown=("loss", "eval/loss"),
            order=inputs.order,
            callback=callback,
            planned=planned,
        )
    return SftResult.read(run.shared_folder)


def load_sft_inputs(run: Run) -> SupervisedInputs[LanguageModel, Demonstration]:
    """Load model and demonstrations; errors as in `run_sft`."""
    config = run.config
    model, tokenizer = load_start(run, load_language_model)
    shard_model(model, run.ranks, run.precision)
    hold_bases_of([model], config, run.device)
    records = load_rows("demonstrations", config, run, tokenizer, room=model.context_length)
    return split_inputs(run, model, tokenizer, records, role="demonstrations")


def train_sft(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Demonstration],
    *,
    held_out: Sequence[Demonstration] = (),
    **training: Any,
) -> Outcome:
    """Fine-tune a model in place.

    Args:
        model: The model to train; a value head, if present, is left unchanged.
        tokenizer: The model's tokenizer.
        demonstrations: Training examples; EOS is also learned.
        held_out: Demonstrations for evaluation only.
        training: Learning rate, batch size and so on: the fields of `TrainingSettings`.

    Raises:
        DataError: A demonstration is longer than the model's context.
    """
    settings = TrainingSettings(**training)
    loss = CompletionLoss(model, settings.precision)
    train, evaluation = (
        [encode_example(tokenizer, record.prompt, record.completion, read=record.read) for record in records]
        for records in (demonstrations, held_out)
    )
    check_lengths((loss.length(example) for example in [*train, *evaluation]), model.context_length)
    return train_supervised(
        loss,
        model.causal.parameters(),
        train,
        settings,
        held_out=evaluation,
        inner_matrices=inner_matrices(model.causal),
    )
