"""Counts the memory of an update's phases, and extrapolates it to a model's full depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kedge.models import LanguageModel, ScalarModel
from kedge.models.live_bytes import LiveBytes
from kedge_plan.hollow import layers_of

Figures = dict[tuple[str, ...], float]
"""`held, PHASE, PART, KIND, ROLE`: bytes at the peak of a part of a phase; `work, PHASE, NAME`: per update;
`parameters, ROLE` and `trained, ROLE`: weights, and the bytes of trained ones; `resting, ROLE`: bytes of weights that
are in host memory between passes; and `cost, update` and `cost, step`: FLOPs of an update of PPO, and of a step of
supervised fine-tuning on its tokens.
"""


class Phases:
    """The peaks and the work of the phases of an update.

    A phase has parts, each of which grows linearly with the number of blocks: a backward pass is split where it reaches
    a model's first block. Before that, it holds the other blocks' activations; afterwards, their gradients.

    Args:
        counter: Counts the operations.
    """

    def __init__(self, counter: LiveBytes) -> None:
        self.counter = counter
        self._phase = self._part = "load"
        self._times = 0.0
        self._done = dict(counter.work)
        self._passes = 0
        self._work: Figures = {}
        self._peaks: dict[tuple[str, str], dict[Any, int]] = {}

    @property
    def figures(self) -> Figures:
        """All figures so far."""
        held = {
            ("held", *place, *label): float(size)
            for place, labels in self._peaks.items()
            for label, size in labels.items()
        }
        return {**held, **self._work}

    def start(self, phase: str, role: str, *, times: float = 1.0, kind: str = "activations") -> None:
        """Start a phase.

        Args:
            phase: Its name.
            role: The role that holds the phase's results.
            times: Repetitions of the phase's operations per update.
            kind: Kind of the results, such as activations.
        """
        self._cut("start")
        self._phase = phase
        self._times = times
        self._passes = 0
        self.counter.label = (kind, role)

    def end(self) -> None:
        """End the last phase."""
        self.start("load", "run")

    def keep(self, kind: str) -> None:
        """Assign the results of a phase so far to a separate kind."""
        role = self.counter.label[1]
        self.counter.rename(self.counter.label, (kind, role))

    def forget(self, *phases: str) -> None:
        """Forget the counts of some phases."""
        self._cut(self._part)
        self._peaks = {key: labels for key, labels in self._peaks.items() if key[0] not in phases}
        self._work = {name: done for name, done in self._work.items() if name[1] not in phases}

    def role_of(self, model: nn.Module) -> str:
        """The role under which a model's trained weights are counted."""
        return self.counter.label_of(next(each for each in model.parameters() if each.requires_grad))[1]

    @contextmanager
    def stepping(self, *models: LanguageModel | ScalarModel, times: float) -> Iterator[None]:
        """Record an optimizer's steps within the block as a separate phase.

        Args:
            models: Models whose passes are split into parts.
            times: Number of steps per update that each step in the block represents.
        """
        around: Any = None

        def before(*_: Any) -> None:
            nonlocal around
            around = self._phase, self.counter.label, self._times
            self.start("step", around[1][1], times=times)

        def after(optimizer: Any, *_: Any) -> None:
            for weight, state in optimizer.state.items():
                tensors = [each for each in state.values() if isinstance(each, Tensor)]
                self.counter.hold(tensors, ("optimizer", self.counter.label_of(weight)[1]))
            phase, (kind, role), times = around
            self.start(phase, role, times=times, kind=kind)

        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        for model in models:
            assert model.trunk is not None
            handles.append(model.trunk.model.register_forward_pre_hook(self._enter))
            if blocks := layers_of(model):
                handles.append(blocks[0].register_forward_hook(self._leave_first))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._passes += 1
        self._cut(f"pass {self._passes}")

    def _leave_first(self, module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        name = f"below pass {self._passes}"
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._cut(name))

    def _cut(self, part: str) -> None:
        """End a part, and record its peak and its work."""
        key = (self._phase, self._part)
        counter = self.counter
        if self._phase != "load":
            if counter.peak >= sum(self._peaks.get(key, {}).values()):
                self._peaks[key] = {label: size for label, size in counter.at_peak.items() if size}
            for name, done in counter.work.items():
                figure = ("work", self._phase, name)
                self._work[figure] = self._work.get(figure, 0.0) + self._times * (done - self._done[name])
        self._done = dict(counter.work)
        counter.restart()
        self._part = part


def extrapolated(
    measure: Callable[[Mapping[str, int]], Figures], layers: Mapping[str, int], shallow: int | None
) -> Figures:
    """Extrapolate figures from shallow models to their full depth: each block adds the same to every figure.

    Models of the same depth are deepened together.

    Args:
        measure: Returns the figures of models with the given number of blocks per role.
        layers: Blocks of each role at full depth.
        shallow: Models are measured with this many blocks and with one more; None measures them at full depth.
    """
    if shallow is None:
        return measure(layers)
    start = {role: min(number, shallow) for role, number in layers.items()}
    base = measure(start)
    figures = dict(base)
    for number in {each for each in layers.values() if each > shallow}:
        deeper = measure({role: start[role] + (layers[role] == number) for role in layers})
        for name in {*deeper, *base}:
            added = deeper.get(name, 0.0) - base.get(name, 0.0)
            figures[name] = figures.get(name, 0.0) + (number - shallow) * added
    return figures
