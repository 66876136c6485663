"""The state in a run's checkpoints: saves it, restores it, and marks the best checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kedge.models.adapters import is_frozen
from kedge.ranks import ALONE, Ranks, check_equal_weights
from kedge.ranks.sharding import StoredTensors, gather, part_for, whole
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.checkpoint.store import Checkpoint, newest_valid, save_checkpoint
from kedge.training.host_state import unwrapped
from kedge.training.optimizer import all_parameters
from kedge.training.optimizer_kinds import CODES, Optimizer, OptimizersAsOne, share_codes, state_shape
from kedge_base.errors import DataError, ModelError, NumericsError
from kedge_base.generators import random_state, restore_random_state
from kedge_base.run_folder.output import BEST_FILE, replace_file

AHEAD = "ahead"
"""The name in a checkpoint of work for later steps."""


class Stateful(Protocol):
    """State of a run that is saved and restored, besides weights and optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Restore a `state_dict`."""
        ...


class Deferred(Protocol):
    """Work for later steps that is under way, and is finished before it is saved."""

    def mark(self) -> Any:
        """Return the work that is under way now, without waiting for it."""
        ...

    def saved(self, mark: Any, /) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Wait for the results of a mark, and return them as tensors by name and JSON types."""
        ...

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], /) -> object:
        """Restore what `saved` returned; all parts have been restored before."""
        ...


class Log(Protocol):
    """An append-only log file."""

    def sync(self) -> None:
        """Flush all rows to disk."""
        ...


@dataclass(frozen=True)
class TrainingState:
    """Everything that changes during a run.

    Attributes:
        modules: The trained modules, by name.
        optimizer: The optimizer of all their parameters.
        parts: Everything else that is not registered with the loop, by name.
    """

    modules: Mapping[str, nn.Module]
    optimizer: Optimizer
    parts: Mapping[str, Stateful] = field(default_factory=dict)


@dataclass
class BestUpdate:
    """The best value so far of a metric; saved and resumed with the run.

    Attributes:
        metric: The metric, as in `metrics.jsonl`.
        higher_is_better: Its best value is the largest.
        is_kept: The checkpoint of the best update is kept.
        update: The update with the best value; None before the first value.
        value: The best value.
        num_since: Number of values since the best one.
    """

    metric: str
    higher_is_better: bool
    is_kept: bool
    update: int | None = None
    value: float | None = None
    num_since: int = 0

    def observe(self, update: int, metrics: Mapping[str, float]) -> bool:
        """Record an update's metrics; True if it is the new best. The first of equal values is the best."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return False
        sign = 1.0 if self.higher_is_better else -1.0
        if self.value is not None and sign * value <= sign * self.value:
            self.num_since += 1
            return False
        self.update = update
        self.value = float(value)
        self.num_since = 0
        return True

    def start_again(self) -> None:
        """Forget the values so far, because later ones cannot be compared with them."""
        self.update = self.value = None
        self.num_since = 0

    def summary(self) -> dict[str, object]:
        """Update, metric and value, for files about the run."""
        return {"update": self.update, "metric": self.metric, "value": self.value}

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        return {**self.summary(), "num_since": self.num_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; one of a different metric is ignored, since its values cannot be compared."""
        if state["metric"] == self.metric:
            self.update = state["update"]
            self.value = state["value"]
            self.num_since = state["num_since"]


@dataclass(frozen=True)
class _Boundary:
    """A copy, made between two steps, of state that changes before the weights do."""

    progress: dict[str, Any]
    streams: Mapping[str, Tensor]
    generators: Mapping[str, Any]
    ahead: Any


@dataclass(eq=False)
class RunState:
    """The state of a run, as it is saved to its checkpoints and restored from them.

    Args:
        folder: The folder of the checkpoints.
        kind: The stage.
        fingerprint: Hashes of the run's inputs; see `Manifest`.
        keep: Number of checkpoints to keep.
        found: The checkpoint to restore from; None starts a new run.
        model: The model that each checkpoint contains; None for no model.
        best: Tracks the best update so far, whose checkpoint is always kept.
        ranks: The ranks of the run; the first one writes.
        sharded_above: Number of parameters above which each rank writes its own shards of weights and moments; None for
            no limit.

    Attributes:
        parts: Registered parts of the run by name: data streams, coefficients, the guard's history.
        optional: The parts that a checkpoint may lack: runs with other settings do not have them.
        ahead: Work for later steps that is under way, if any.
        logs: Flushed before each save, so that a checkpoint never refers to rows that are not on disk.
    """

    folder: Path
    _: KW_ONLY
    kind: str
    fingerprint: Mapping[str, str]
    keep: int
    found: Checkpoint | None
    model: CheckpointModel | None = None
    best: BestUpdate | None = None
    ranks: Ranks = ALONE
    sharded_above: int | None = None

    def __post_init__(self) -> None:
        self._saved_at = self.found.update if self.found else None
        self._state: TrainingState | None = None
        self._boundary: _Boundary | None = None
        self.parts: dict[str, Stateful] = {}
        self.optional: set[str] = set()
        self.ahead: Deferred | None = None
        self.logs: Sequence[Log] = ()

    def restore(self, state: TrainingState) -> None:
        """Register the state to save; if the run is resumed, restore all of it from the checkpoint.

        Raises:
            DataError: The checkpoint does not fit the run.
        """
        self._state = state
        self.parts |= state.parts
        if self.found is None:
            return
        try:
            self._restore(state, self.found)
        except (LookupError, TypeError, AttributeError) as error:  # hashes are right: another version wrote it
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{self.found.folder}: this version of kedge cannot restore it ({reason})") from error

    def _restore(self, state: TrainingState, found: Checkpoint) -> None:
        self._load_weights(state, found)
        progress = found.state["progress"]
        for name in sorted(self.parts.keys() - progress.keys() - self.optional):
            raise DataError(
                f"the checkpoint has no state of {name}: the run had other settings, or another version of kedge"
            )
        if self.best is not None and "best" in progress:  # absent in a run that kept no best checkpoint so far
            self.best.load_state_dict(progress["best"])
        for name, part in self.parts.items():  # one of them may reset the best metric
            if name in progress:
                part.load_state_dict(progress[name])
        if self.ahead is not None and AHEAD in found.state:
            self.ahead.load(found.tensors(AHEAD), found.state[AHEAD])
        restore_random_state(found.tensors("random"), found.state["random"])

    def restore_weights(self, *, on_rejected: Callable[[str], None]) -> None:
        """Restore weights and optimizer from the newest valid checkpoint; arguments as in `roll_back` of the loop.

        Raises:
            NumericsError: No checkpoint is valid.
        """
        assert self._state is not None, "restore first"
        found = newest_valid(self.folder, on_rejected=on_rejected, ranks=self.ranks)
        if found is None:
            raise NumericsError(f"{self.folder} has no valid checkpoint to restore the weights from")
        self._load_weights(self._state, found)

    def drop_gradients(self) -> None:
        """Free the gradients of a step that is not taken."""
        if self._state is not None:
            self._state.optimizer.zero_grad(set_to_none=True)

    def remember(self) -> None:
        """Copy the state that changes before the weights do; a discarded step is repeated from this state."""
        assert self._state is not None, "restore first"
        progress = {name: part.state_dict() for name, part in self.parts.items()}
        if self.best is not None:
            progress["best"] = self.best.state_dict()
        mark = None if self.ahead is None else self.ahead.mark()
        self._boundary = _Boundary(progress, *random_state(), mark)

    def save(self, update: int) -> bool:
        """Save the last remembered state as the state after this update; False if it is missing or already saved.

        Raises:
            OutputError: The checkpoint cannot be written.
        """
        state = self._state
        boundary = self._boundary
        if state is None or boundary is None or self._saved_at == update:
            return False
        streams = {"random": boundary.streams}
        values = {"random": boundary.generators, "progress": boundary.progress}
        if self.ahead is not None:  # on every rank, because all of them sample it together
            streams[AHEAD], values[AHEAD] = self.ahead.saved(boundary.ahead)
        in_shards = self._writes_shards(state)
        if in_shards or self.ranks.is_sharded or self.ranks.is_first:
            self._write(state, update, streams, values, in_shards=in_shards)
        self._saved_at = update
        return True

    def _writes_shards(self, state: TrainingState) -> bool:
        if not self.ranks.is_sharded or self.sharded_above is None:
            return False
        return sum(each.numel() for module in state.modules.values() for each in module.parameters()) > (
            self.sharded_above
        )

    def _write(
        self,
        state: TrainingState,
        update: int,
        streams: Mapping[str, Mapping[str, Tensor]],
        values: Mapping[str, Any],
        *,
        in_shards: bool,
    ) -> None:
        weights = {group: module_tensors(module) for group, module in state.modules.items()}
        gathered: dict[Tensor, Tensor] = {}
        if not in_shards:
            named = [each for group in weights.values() for each in group.values()]
            if self.model is not None:  # it may have weights that are not trained
                named += self.model.parameters()
            gathered = gather(dict.fromkeys(named), keep=self.ranks.is_first)
        moments, groups = optimizer_state(
            state.optimizer, gathered=not in_shards, keep=in_shards or self.ranks.is_first
        )
        contents = {
            **{
                group: {name: gathered.get(tensor, tensor) for name, tensor in each.items()}
                for group, each in weights.items()
            },
            "optimizer": moments,
        }
        writers = self.ranks if in_shards else ALONE
        if in_shards or self.ranks.is_first:
            writers.first(self._sync_logs)
            save_checkpoint(
                self.folder,
                update=update,
                kind=self.kind,
                fingerprint=self.fingerprint,
                tensors=streams if in_shards else {**contents, **streams},
                state={"optimizer": groups, **values},
                keep=self.keep,
                model=self.model,
                gathered=gathered,
                shards=contents if in_shards else {},
                ranks=writers,
                protected=() if self.kept is None else (self.kept,),
            )
            self.point_at_best()

    def _sync_logs(self) -> None:
        for log in self.logs:
            log.sync()

    def check_equal_weights(self) -> None:
        """Compare the weights of all ranks.

        Raises:
            NumericsError: They differ.
        """
        if self._state is not None:
            check_equal_weights(self.ranks, self._state.modules.values())

    def point_at_best(self) -> None:
        """Write which checkpoint is the best, once it exists."""
        if self.best is not None and self.kept is not None and self.ranks.is_first:
            replace_file(self.folder / BEST_FILE, [json.dumps(self.best.summary()).encode()])

    @property
    def kept(self) -> int | None:
        """The update of the checkpoint that is kept as the best one."""
        return self.best.update if self.best is not None and self.best.is_kept else None

    def release(self) -> None:
        """Free the models now, because the loop's owner may keep a reference to it. Nothing is saved afterwards."""
        self._state = self.model = self.ahead = None
        self.parts.clear()

    def _load_weights(self, state: TrainingState, found: Checkpoint) -> None:
        for name, module in state.modules.items():
            restore_module(module, found.stored(name))
        restore_optimizer(state.optimizer, found.stored("optimizer"), found.state["optimizer"])


MOVING = ("lr", "tf1_step")
"""Entries of a parameter group that steps change; the others come from the configuration and are not restored."""


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; shared ones appear once, those under an adapter are left out."""
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: weight for name, weight in weights.items() if not is_frozen(weight)}


@torch.no_grad()
def restore_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite parameters and buffers in place, so that an optimizer keeps referring to them.

    Raises:
        ModelError: Names, a shape or a dtype differ; nothing has been overwritten.
    """
    own = module_tensors(module)
    for name in sorted(own.keys() ^ tensors.keys()):
        raise ModelError(
            f"the checkpoint's weights do not match the model: it has {len(tensors)} tensors, the model {len(own)} to "
            f"train; {'number ' * name.isdigit()}{name} is only in one of them"
        )
    for name, tensor in own.items():
        shape, dtype = _kind(tensors, name)
        if (shape, dtype) != (tuple(tensor.shape), tensor.dtype):
            raise ModelError(
                f"the checkpoint's weights do not match the model: {name} is {list(shape)} {dtype}, "
                f"expected {list(tensor.shape)} {tensor.dtype}"
            )
    for name, tensor in own.items():
        tensor.copy_(part_for(tensors, name, tensor))


def optimizer_state(
    optimizer: Optimizer, *, gathered: bool = True, keep: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state: tensors by `PARAMETER.KEY`, and the entries of its parameter groups that steps
    change.

    Parameters are numbered across groups, as in torch's state dict. A parameter that has taken no step has no state.
    Counts that are plain numbers become tensors. Sharded tensors are gathered in host memory, so all ranks must call
    this.

    Args:
        optimizer: The optimizer.
        gathered: False to leave sharded tensors as they are.
        keep: False for a rank that only helps others to gather: it returns no tensors.
    """
    tensors: dict[str, Tensor] = {}
    kept = optimizer.state
    for index, parameter in enumerate(all_parameters(optimizer)):
        for key, value in kept.get(parameter, {}).items():
            if key in CODES:
                continue
            value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int64)
            found = whole(value) if gathered else value
            if keep:
                tensors[f"{index}.{key}"] = found if found is value else found.cpu()
    groups = [
        {"num_parameters": len(group["params"]), **{key: group[key] for key in MOVING if key in group}}
        for group in optimizer.param_groups
    ]
    return tensors, {"kind": _kind_of(optimizer), "groups": groups}


def _kind_of(optimizer: Optimizer) -> str:
    """Return the optimizer's kind and form of Adam's ε, which determine the entries of its state."""
    own = unwrapped(optimizer)
    parts = own.parts if isinstance(own, OptimizersAsOne) else [own]
    form = " with tf1" if any("tf1_step" in group for group in own.param_groups) else ""
    return " and ".join(type(part).__name__ for part in parts) + form


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore a saved state into an optimizer of the same parameters in the same groups.

    Raises:
        ModelError: The optimizer's kind, the groups or a parameter's shape differ; nothing has been restored.
    """
    if (kind := _kind_of(optimizer)) != state["kind"]:
        raise ModelError(
            f"the checkpoint's optimizer is {state['kind']}, expected {kind}; a resumed run cannot change "
            "optimization.optimizer or the form of optimization.adam_eps"
        )
    groups = optimizer.state_dict()["param_groups"]
    saved = state["groups"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [group["num_parameters"] for group in saved]
    if sizes != saved_sizes:
        raise ModelError(
            f"the checkpoint's optimizer does not match: its groups have {saved_sizes} parameters, expected {sizes}"
        )
    parameters = all_parameters(optimizer)
    restored: dict[int, dict[str, Any]] = {}
    for name in tensors:
        index, _, key = name.partition(".")
        own, (shape, dtype) = parameters[int(index)], _kind(tensors, name)
        expected = state_shape(key, tuple(own.shape))
        if shape and shape != expected:
            raise ModelError(
                f"the checkpoint's optimizer does not match: {name} is {list(shape)}, expected {list(expected)}"
            )
        found = part_for(tensors, name, own) if shape else tensors[name]
        restored.setdefault(int(index), {})[key] = found if shape or dtype != torch.int64 else int(found)
    moved = [
        {**group, **{key: old[key] for key in MOVING if key in old}} for group, old in zip(groups, saved, strict=True)
    ]
    optimizer.load_state_dict({"state": restored, "param_groups": moved})
    _undo_casts(optimizer, restored)
    share_codes(unwrapped(optimizer))


def _undo_casts(optimizer: Optimizer, restored: Mapping[int, Mapping[str, Any]]) -> None:
    """Restore the dtype of moments: torch casts them to the parameter's, but some libraries use another."""
    kept = optimizer.state
    for index, parameter in enumerate(all_parameters(optimizer)):
        for key, value in restored.get(index, {}).items():
            if isinstance(value, Tensor) and kept[parameter][key].dtype != value.dtype:
                kept[parameter][key] = value.to(kept[parameter][key].device)


def _kind(tensors: Mapping[str, Tensor], name: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Return a tensor's shape and dtype, without reading a stored tensor."""
    if isinstance(tensors, StoredTensors):
        return tensors.shape(name), tensors.dtype(name)
    return tuple(tensors[name].shape), tensors[name].dtype
