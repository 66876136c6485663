"""Supervised fine-tuning: learn to answer as the demonstrations do.

    demonstrations ─▶ held-out ones apart ─▶ token ids, EOS kept ─▶ cross-entropy of the completions ─▶ model/

Source: spec §3.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase
from typing_extensions import Unpack

from kedge.config import Config
from kedge.data import Demonstration, Sources, encode_example, read_demonstrations, split_eval
from kedge.models import LanguageModel, ModelCard, load_language_model, load_tokenizer, save_policy
from kedge.runs.ending import leave_stage_report, say_findings
from kedge.runs.run import REJECTED_FILE, Resume, finished_run, open_run, read_ending
from kedge.runs.stage_loop import logged_steps, stage_loop
from kedge.training.supervised.loop import Outcome, TrainingSettings, check_lengths, count_steps, train_supervised
from kedge.training.supervised.losses import CompletionLoss

__all__ = ["SftResult", "run_sft", "train_sft"]


@dataclass(frozen=True)
class SftResult:
    """What a fine-tuning run leaves.

    Attributes:
        folder: The run's folder; the model is in its `model/`.
        num_steps: Optimiser steps taken.
        evaluation: `loss` (nats per token) and `token_accuracy` on the held-out demonstrations; empty without any.
    """

    folder: Path
    num_steps: int
    evaluation: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> SftResult:
        """Of a run that has come to its end."""
        num_steps, evaluation = read_ending(folder, "num_steps", "evaluation")
        return cls(folder, num_steps, evaluation)

    @property
    def model(self) -> Path:
        """The model's folder, which plain transformers loads."""
        return self.folder / "model"


def run_sft(config: Config, *, demonstrations: Sequence[Any] | None = None, resume: Resume | None = None) -> SftResult:
    """Fine-tune `config.model` on `config.data.demonstrations`.

    Ctrl-C and SIGTERM save a checkpoint, and the model as far as it has learnt, and are raised again afterwards.

    Args:
        config: The resolved configuration.
        demonstrations: Rows that take the place of `config.data.demonstrations`.
        resume: Go on with the run in the output folder; where there is none, begin it.

    Raises:
        KedgeError: What is missing, cannot be read or does not fit, in one line, before any training.
        KeyboardInterrupt, Terminated: The run was interrupted; the model is saved.
    """
    if resume and (folder := finished_run(config)):
        return SftResult.read(folder)
    run = open_run(config, "sft", given={"data.demonstrations": demonstrations}, resume=resume)
    source, data, trusted = str(config.model), config.data, config.runtime.trust_remote_code
    tokenizer = load_tokenizer(source, trust_remote_code=trusted)
    model = load_language_model(source, tokenizer=tokenizer, device=run.device, trust_remote_code=trusted)

    table = read_demonstrations(
        Sources(tuple(data.demonstrations)) if demonstrations is None else demonstrations,
        tokenizer=tokenizer,
        max_length=min(data.max_length, model.context_length or data.max_length),
        max_prompt_tokens=data.max_prompt_tokens,
        template=data.template,
        max_rejected_fraction=data.max_rejected_fraction,
        rejected_to=run.folder / REJECTED_FILE,
    )
    split = split_eval(table.records, data.eval_fraction, config.runtime.seed)

    num_steps = count_steps(len(split.train), num_epochs=config.sft.num_epochs, batch_size=config.sft.batch_size)
    shown = ("loss", "eval/loss")
    with (
        run.started(),
        stage_loop(config, run) as loop,
        logged_steps(config, run, loop, num_steps, shown=shown) as on_step,
    ):
        outcome = train_sft(
            model,
            tokenizer,
            split.train,
            held_out=split.eval,
            precision=run.precision,
            seed=config.runtime.seed,
            micro_batch_tokens=config.runtime.micro_batch_tokens,
            on_step=on_step,
            loop=loop,
            **config.sft.model_dump(),
        )
        facts = {"demonstrations": len(split.train), "optimiser steps": outcome.num_steps, **outcome.evaluation}
        save_policy(model, tokenizer, run.folder / "model", card=ModelCard("sft", source, facts))
        leave_stage_report(config, run.folder, interrupted=outcome.interruption is not None)
        if outcome.interruption is not None:
            raise outcome.interruption
    run.finish({"num_steps": outcome.num_steps, "evaluation": outcome.evaluation})
    say_findings(run.folder)
    return SftResult(run.folder, outcome.num_steps, outcome.evaluation)


def train_sft(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Demonstration],
    *,
    held_out: Sequence[Demonstration] = (),
    precision: Literal["fp32", "bf16"] = "fp32",
    **training: Unpack[TrainingSettings],
) -> Outcome:
    """Fine-tune a model in place.

    Args:
        model: What learns; its value head, if it has one, does not.
        tokenizer: The model's.
        demonstrations: What is imitated, EOS included.
        held_out: Demonstrations that are only measured on.
        precision: Number format of the matrix products.
        training: Learning rate, batch size and so on: the arguments of `train_supervised`.

    Raises:
        DataError: A demonstration is longer than the model's context.
    """
    loss = CompletionLoss(model, precision)
    train, evaluation = (
        [encode_example(tokenizer, record.prompt, record.completion) for record in records]
        for records in (demonstrations, held_out)
    )
    check_lengths((loss.length(example) for example in [*train, *evaluation]), model.context_length)
    return train_supervised(loss, model.causal.parameters(), train, held_out=evaluation, **training)
