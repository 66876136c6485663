"""Code shared by sft, reward and critic: loads the model and its data, trains it, and saves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import Self

from kedge.data import Demonstration, Split
from kedge.data.prompts import RecordT
from kedge.models import LanguageModel, ScalarModel
from kedge.ranks.sharding import gathered_state
from kedge.runs.calls import TrainingResult
from kedge.runs.ending import leave_stage_report
from kedge.runs.frozen import loading_of, say_loaded_whole, tokenizer_of
from kedge.runs.resuming import read_ending
from kedge.runs.run import Run
from kedge.runs.training import Callback, logged_steps, stage_loop, watched
from kedge.stages.planned import PlannedMemory, compared
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.supervised.loop import Outcome, count_steps, draw_batches
from kedge_base.machine.progress import say
from kedge_base.registry import service
from kedge_base.run_folder.output import MODEL_FOLDER, write_summary
from kedge_base.stage import find_stage

Model = TypeVar("Model", bound=LanguageModel | ScalarModel)


@dataclass(frozen=True, repr=False)
class EndedResult(TrainingResult):
    """The result of a run whose `finished.json` has the other attributes."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The result of a finished run."""
        return cls(folder, *read_ending(folder, *(each.name for each in fields(cls)[1:])))


@dataclass(frozen=True)
class SupervisedInputs(Generic[Model, RecordT]):
    """The inputs of fine-tuning or reward modeling.

    Attributes:
        model: The model to train.
        tokenizer: Its tokenizer.
        split: The records, split into training and held-out records.
        order: Returns the order of the records in a pass over weighted sources, given the pass's number; None for
            successive passes over the data.
        num_steps: Number of optimizer steps in the run.
        zeroed: Demonstrations on which the trained reward model's scores are shifted to average 0.
    """

    model: Model
    tokenizer: PreTrainedTokenizerBase
    split: Split[RecordT]
    order: Callable[[int], Sequence[int]] | None
    num_steps: int
    zeroed: Sequence[Demonstration] = ()


def load_start(run: Run, load: Callable[..., Model], **options: Any) -> tuple[Model, PreTrainedTokenizerBase]:
    """Load the model that a stage trains, using a function of `kedge.models`, and its tokenizer."""
    config = run.config
    source = str(find_stage(run.stage).starting_model(config))
    tokenizer = tokenizer_of(config, source)
    model = load(source, tokenizer=tokenizer, **loading_of(config, run), **options)
    if config.runtime.recomputes:
        if model.trunk is None:  # the model is an encoder with a pooled head
            say(f"runtime.activation_checkpointing is not for {type(model.classifier).__name__}, which keeps them")
        else:
            model.trunk.checkpoint_activations()
    say_loaded_whole(model)
    return model, tokenizer


def split_inputs(
    run: Run,
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[RecordT],
    zeroed: Sequence[Demonstration] = (),
    *,
    role: str,
) -> SupervisedInputs[Model, RecordT]:
    """Hold out some of the records of a role in `data`."""
    config = run.config
    split = run.data.split(role, records, config)
    mixture = run.data.mixture(role, config, split.train_rows)
    settings = getattr(config, _section(run))
    num_steps = count_steps(len(split.train), num_epochs=settings.num_epochs, batch_size=settings.batch_size)
    order = mixture and mixture.order
    if run.data.labels.get(role):
        passes = (settings.num_epochs, settings.batch_size)
        batches = draw_batches(len(split.train), *passes, seed=config.runtime.seed, order=order)
        run.data.trace(role, split.train_rows, batches)
    return SupervisedInputs(model, tokenizer, split, order, num_steps, zeroed)


@dataclass(frozen=True)
class Trained:
    """The result of training a model.

    Attributes:
        outcome: How it ended.
        facts: Rows of the model card.
        results: Entries of `finished.json`; `summary` is also written to `summary.json`.
    """

    outcome: Outcome
    facts: Mapping[str, object]
    results: Mapping[str, Any]


def train_model(
    run: Run,
    train: Callable[..., Trained],
    write: Callable[..., Path],
    module: nn.Module,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    num_steps: int,
    shown: tuple[str, ...],
    order: Callable[[int], Sequence[int]] | None = None,
    callback: Callback | None = None,
    planned: PlannedMemory | None = None,
    trained: nn.Module | None = None,
    unfinished: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Train a started run's model, with logs, checkpoints and callbacks; save it, also after an interruption.

    Args:
        run: The stage's run, started.
        train: Trains the model; its arguments are the fields of `TrainingSettings` and the stage's own settings.
        write: Saves the model in a folder; accepts `card`, `weights` and `final`, as `save_policy` does.
        module: The transformers model that checkpoints save.
        tokenizer: Its tokenizer.
        prompts: Prompts that it is trained on.
        num_steps: Number of optimizer steps.
        shown: Names of the metrics in the progress display.
        order: Returns the order of the records in a pass; see `TrainingSettings`.
        callback: The user's function, called after each step.
        planned: The planned memory, which is compared with the measured peak.
        trained: The model that the callback receives; None for the one in checkpoints.
        unfinished: Additional rows of the model card in checkpoints.

    Returns:
        The content of `finished.json`.

    Raises:
        KeyboardInterrupt, Terminated: Training was interrupted.
    """

    def save(folder: Path, weights: dict[str, Tensor] | None, facts: Mapping[str, object], *, ended: bool) -> Path:
        card = service("card")(run, facts, tokenizer=tokenizer, prompts=prompts, ended=ended)
        return write(folder, card=card, weights=weights, final=ended)

    def save_at(folder: Path, step: int, weights: dict[str, Tensor] | None) -> Path:
        return save(folder, weights, {"optimizer steps": step, **(unfinished or {})}, ended=False)

    with (
        stage_loop(run, model=CheckpointModel(module, save_at)) as loop,
        logged_steps(run, loop, num_steps, shown=shown) as log_step,
    ):
        after_step = watched(callback, run, loop, num_steps, model=trained or module, tokenizer=tokenizer)

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            log_step(step, metrics)
            after_step(step, metrics)

        ended = train(
            **run.config.training_of(_section(run)),
            precision=run.precision,
            seed=run.config.runtime.seed,
            order=order,
            micro_batch_tokens=run.micro_batch_tokens,
            offload_optimizer=run.offloads("optimizer"),
            on_step=on_step,
            loop=loop,
            ranks=run.ranks,
        )
        run.sync()
        if "summary" in ended.results:
            write_summary(run.folder, ended.results["summary"])
        weights = gathered_state(module, run.ranks)
        if run.ranks.is_first:
            save(run.folder / MODEL_FOLDER, weights, ended.facts, ended=True)
        interruption = ended.outcome.interruption
        leave_stage_report(run.config, run.folder, interrupted=interruption is not None)
        if interruption is not None:
            raise interruption
    return {**loop.summary(), **ended.results, **compared(planned, run.device)}


def _section(run: Run) -> str:
    """The section of the configuration with the settings of the training."""
    return find_stage(run.stage).trains[0]
