"""Supervised fine-tuning: train a model to imitate the demonstrations.

    demonstrations ─▶ train / held-out split ─▶ token ids with EOS ─▶ cross-entropy of the completions ─▶ model/

Source: spec §3.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import Unpack

from kedge.config import Config
from kedge.data import Demonstration, Mixture, Split, encode_example
from kedge.models import (
    LanguageModel,
    Precision,
    load_language_model,
    load_tokenizer,
    own_stop_tokens,
    save_policy,
)
from kedge.models.pretrained import inner_matrices
from kedge.models.sharded import shard_model
from kedge.runs.frozen import adapter_of, bases_of, hold_bases_of, say_loaded_whole
from kedge.runs.inputs import load_demonstrations
from kedge.runs.out_of_memory import stage_function
from kedge.runs.resuming import read_ending
from kedge.runs.run import Resume, Run, open_run
from kedge.runs.shown_result import shows_its_run
from kedge.runs.stage_card import stage_card
from kedge.runs.training import Callback, end_training, running, supervised_loop
from kedge.stages.planning.report import MachinePlan, compared
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.supervised.loop import Outcome, TrainingSettings, check_lengths, count_steps, train_supervised
from kedge.training.supervised.losses import CompletionLoss

__all__ = ["SftResult", "load_sft_inputs", "run_sft", "train_sft"]


@shows_its_run
@dataclass(frozen=True, repr=False)
class SftResult:
    """Result of a fine-tuning run.

    Attributes:
        folder: The run's folder.
        num_steps: Optimizer steps taken.
        evaluation: `loss` (nats per token) and `token_accuracy` on the held-out demonstrations; empty without any.
    """

    folder: Path
    num_steps: int
    evaluation: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> SftResult:
        """The result of a finished run."""
        num_steps, evaluation = read_ending(folder, "num_steps", "evaluation")
        return cls(folder, num_steps, evaluation)

    @property
    def model(self) -> Path:
        """Folder of the model, which plain transformers can load."""
        return self.folder / "model"


@stage_function("sft", SftResult.read)
def run_sft(
    config: Config,
    *,
    demonstrations: Sequence[Any] | None = None,
    resume: Resume | None = None,
    callback: Callback | None = None,
    planned: MachinePlan | None = None,
) -> SftResult:
    """Fine-tune `config.model` on `config.data.demonstrations`.

    Ctrl-C and SIGTERM are raised again after a checkpoint and the current model have been saved.

    Args:
        config: The resolved configuration.
        demonstrations: Rows instead of `config.data.demonstrations`.
        resume: Resume the run in the output folder; start a new one otherwise.
        callback: Called after each optimizer step.
        planned: Memory that it should hold, to be compared with the measured peak.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before any training.
        KeyboardInterrupt, Terminated: The run was interrupted; the model is saved.
    """
    run = open_run(config, "sft", in_memory={"data.demonstrations": demonstrations}, resume=resume)
    inputs = load_sft_inputs(config, run, demonstrations)
    model = inputs.model
    tokenizer = inputs.tokenizer
    split = inputs.split
    num_steps = inputs.num_steps

    stop_ids = own_stop_tokens(tokenizer, model).ids
    prompts = [record.prompt for record in split.train]

    def save(
        folder: Path, weights: dict[str, Tensor] | None, *, facts: Mapping[str, object], ended: bool = False
    ) -> Path:
        card = stage_card(config, run, facts, tokenizer=tokenizer, prompts=prompts, ended=ended)
        return save_policy(model, tokenizer, folder, card=card, stop_tokens=stop_ids, weights=weights, final=ended)

    in_checkpoints = CheckpointModel(
        model.causal, lambda folder, step, weights: save(folder, weights, facts={"optimizer steps": step})
    )
    given: Any = {"model": in_checkpoints, "tokenizer": tokenizer, "callback": callback}
    with (
        running(config, run) as summary,
        supervised_loop(config, run, num_steps, **given, shown=("loss", "eval/loss")) as training,
    ):
        training["order"] = inputs.mixture and inputs.mixture.order
        outcome = train_sft(model, tokenizer, split.train, held_out=split.eval, **training, **config.training_of("sft"))
        facts = {"optimizer steps": outcome.num_steps, **_held_out(outcome.evaluation)}
        save_last = partial(save, facts=facts, ended=True)
        end_training(config, run, outcome, module=model.causal, save=save_last)
        results = {"num_steps": outcome.num_steps, "evaluation": outcome.evaluation}
        summary |= {**training["loop"].summary(), **results, **compared(planned, run.device)}
    return SftResult(run.shared_folder, outcome.num_steps, outcome.evaluation)


def _held_out(evaluation: Mapping[str, float]) -> dict[str, float]:
    """The evaluation as rows of the model card."""
    names = {"loss": "loss on held-out demonstrations, nats per token", "token_accuracy": "held-out token accuracy"}
    return {names.get(name, name): value for name, value in evaluation.items()}


@dataclass(frozen=True)
class SftInputs:
    """The inputs of fine-tuning.

    Attributes:
        model: The model to train.
        tokenizer: Its tokenizer.
        split: The demonstrations, some of them held out.
        mixture: The order of several sources with weights; None for one pass after the other.
        num_steps: Optimizer steps of the run.
    """

    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    split: Split[Demonstration]
    mixture: Mixture | None
    num_steps: int


def load_sft_inputs(config: Config, run: Run, demonstrations: Sequence[Any] | None = None) -> SftInputs:
    """Load model and demonstrations; arguments and errors as in `run_sft`."""
    source = str(config.model)
    trusted = config.runtime.trust_remote_code
    tokenizer = load_tokenizer(source, trust_remote_code=trusted, chat_template=config.data.chat_template)
    model = load_language_model(
        source,
        tokenizer=tokenizer,
        device=run.device,
        trust_remote_code=trusted,
        adapter=adapter_of(config),
        bases=bases_of(config),
        ranks=run.ranks,
    )
    say_loaded_whole(model)
    shard_model(model, run.ranks, run.precision)
    hold_bases_of([model], config, run.device)
    records = load_demonstrations(config, run, tokenizer, context_length=model.context_length, rows=demonstrations)
    split = run.data.split("demonstrations", records, config)
    mixture = run.data.mixture("demonstrations", config, split.train_rows)
    num_steps = count_steps(len(split.train), num_epochs=config.sft.num_epochs, batch_size=config.sft.batch_size)
    return SftInputs(model, tokenizer, split, mixture, num_steps)


def train_sft(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Demonstration],
    *,
    held_out: Sequence[Demonstration] = (),
    precision: Precision = "fp32",
    **training: Unpack[TrainingSettings],
) -> Outcome:
    """Fine-tune a model in place.

    Args:
        model: The model to train; a value head, if present, is left unchanged.
        tokenizer: The model's tokenizer.
        demonstrations: Training examples; EOS is learned as well.
        held_out: Demonstrations for evaluation only.
        precision: Number format of the matrix products.
        training: Learning rate, batch size and so on: the arguments of `train_supervised`.

    Raises:
        DataError: A demonstration is longer than the model's context.
    """
    loss = CompletionLoss(model, precision)
    train, evaluation = (
        [encode_example(tokenizer, record.prompt, record.completion, read=record.read) for record in records]
        for records in (demonstrations, held_out)
    )
    check_lengths((loss.length(example) for example in [*train, *evaluation]), model.context_length)
    return train_supervised(
        loss,
        model.causal.parameters(),
        train,
        held_out=evaluation,
        inner_matrices=inner_matrices(model.causal),
        **training,
    )
