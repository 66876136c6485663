"""Sampling ahead of training: later updates' responses are sampled and scored while this update is trained on.

With s = `rollout.max_staleness`, the responses of update u come from the weights after update max(0, u − 1 − s):

    s = 1    sampling   1 │ 2 │ 3      │ 4      │ …      of update
                        v0  v0  v1       v2              with the weights after update
             training       │ 1        │ 2      │ …      from v0, then v1

At the start of update u, when v(u − 1) is complete, the sampling of all updates up to u + s that is not yet under way
is queued in the background, in order. Nothing depends on which side is faster, so runs are reproducible, and a
checkpoint only needs the batches under way. They are finished before it is written. With several ranks, each samples in
the background, over a separate process group.

Source: one step off: Noukhovitch et al., "Asynchronous RLHF" (arXiv 2410.18252); AReaL (arXiv 2505.24298).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from kedge.algorithm.experience import Rollout
from kedge.config import Config
from kedge.data import Prompt, PromptStream
from kedge.rewards import ScoredTerms
from kedge.rewards.score import ScoredRollout
from kedge.rollout import BackgroundEngine, Engine, Sampler, SharedEngine, frozen_copy
from kedge.runs.run import Run
from kedge.stages.ppo.roles import Roles
from kedge.stages.ppo.sampling import SampledBatch, Sampling
from kedge.stages.ppo.trainer import Trainer
from kedge.training.runtime import Stopwatch
from kedge_base.errors import ConfigError, NonfiniteScoreError

PHASES = ("time/rollout", "time/reward")
KINDS = {kind.__name__: kind for kind in (SampledBatch, ScoredRollout, ScoredTerms, Rollout)}
TENSOR = "tensor"
PROMPT = "prompt"
KIND = "kind"
SAME = "same"
"""Keys of the JSON objects that stand for other types in a saved batch."""


def check_ahead(config: Config, run: Run) -> None:
    """Check, before any model is loaded, that a run can sample ahead.

    Raises:
        ConfigError: Its weights are sharded.
    """
    if config.rollout.max_staleness and run.ranks.is_sharded:
        raise ConfigError(
            f"rollout.max_staleness={config.rollout.max_staleness} needs a second copy of the whole policy; use "
            "runtime.parallel=replicate, or rollout.max_staleness=0"
        )


def with_background(config: Config, run: Run, roles: Roles) -> Roles:
    """Return the roles, with an engine that samples in the background if the run samples ahead."""
    if not config.rollout.max_staleness:
        return roles
    return replace(roles, engine=BackgroundEngine(_with_copy(roles.engine), run.ranks.apart()))


def _with_copy(engine: Engine) -> Engine:
    """Give the built-in engine a copy of the policy; other engines have their own."""
    if isinstance(engine, SharedEngine):
        return replace(engine, engine=_with_copy(engine.engine))
    return replace(engine, model=frozen_copy(engine.model), is_copy=True) if isinstance(engine, Sampler) else engine


@dataclass(frozen=True)
class _Sampled:
    """A batch, and the messages for the user."""

    batch: SampledBatch
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Job:
    """The sampling of an update, under way or done.

    Attributes:
        update: Its number.
        prompts: The state of the prompt stream before it.
        sampled: The result.
    """

    update: int
    prompts: Mapping[str, int]
    sampled: Future[_Sampled]


class _Rejected(Exception):
    """A score was not finite. Carries the responses, for the incident log."""

    def __init__(self, error: NonfiniteScoreError, rollout: Rollout | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.rollout = rollout


class SamplingAhead:
    """Samples and scores batches in the background, at most `rollout.max_staleness` updates ahead.

    Args:
        prompts: The stream of prompts; an update's prompts are drawn when its sampling is queued.
        trainer: Samples and scores.
        engine: Samples in the background.
        check: Called with the responses of each round, when the batch is taken.
        say: Prints a line to the user.
    """

    def __init__(
        self,
        prompts: PromptStream,
        trainer: Trainer,
        engine: BackgroundEngine,
        *,
        check: Callable[[Rollout], None],
        say: Callable[[str], None],
    ) -> None:
        self._prompts = prompts
        self._trainer = trainer
        self._engine = engine
        self._check = check
        self._say = say
        self._lines: list[str] = []
        self._checked: Rollout | None = None
        self._sampling = Sampling(None, trainer, check=self._note, say=self._lines.append)
        # Tokenizers are not safe to use from two threads.
        self._tokenizer = deepcopy(trainer.roles.tokenizer)
        self._jobs: deque[_Job] = deque()
        self._idle_since: float | None = None

    def batch(self, update: int, clock: Stopwatch) -> SampledBatch:
        """Return the responses of an update, and start the sampling of later ones.

        Args:
            update: Its number.
            clock: Times the phase `waiting_for_rollout`.

        Raises:
            RewardError: A reward failed or returned invalid scores.
            UnscoredError: No response of the first round has a score.
        """
        published = self._trainer.publish(update - 1)
        settings = self._trainer.run_settings
        first = self._jobs[-1].update + 1 if self._jobs else update
        for coming in range(first, min(update + settings.rollout.max_staleness, settings.ppo.num_updates) + 1):
            self._jobs.append(self._start(coming, version=update - 1))
        job = self._jobs.popleft()
        assert job.update == update, "batches are taken in order"
        with clock.phase("waiting_for_rollout"):
            try:
                sampled = job.sampled.result()
            except _Rejected as rejected:
                if rejected.rollout is not None:
                    self._check(rejected.rollout)
                raise rejected.error from None
        for line in sampled.lines:
            self._say(line)
        for rollout in sampled.batch.rollouts:
            self._check(rollout)
        return replace(sampled.batch, costs={**published, **sampled.batch.costs})

    def mark(self) -> tuple[_Job, ...]:
        """Return the batches under way, for a checkpoint, without waiting for them."""
        return tuple(self._jobs)

    def saved(self, mark: tuple[_Job, ...]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Wait for the batches of a mark, and return them as tensors and JSON types.

        If one fails, it and the later ones are left out, and the resumed run draws their prompts again and samples with
        its newer weights. A stored failure would end the resumed run again, even if the reward has been fixed.
        """
        done: list[tuple[_Job, _Sampled]] = []
        prompts: Mapping[str, int] | None = None
        for job in mark:
            try:
                done.append((job, job.sampled.result()))
            except Exception:
                prompts = job.prompts
                break
        tensors: dict[str, Tensor] = {}
        rows = [
            {
                "update": job.update,
                "prompts": dict(job.prompts),
                "batch": _packed(sampled.batch, tensors, self._trainer.roles.prompts.train),
            }
            for job, sampled in done
        ]
        return tensors, {"batches": rows, "prompts": None if prompts is None else dict(prompts)}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore what `saved` returned; the prompt stream has been restored before."""
        device = self._trainer.run.device
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        for row in state["batches"]:
            batch = _unpacked(row["batch"], on_device, self._trainer.roles.prompts.train)
            future: Future[_Sampled] = Future()
            future.set_result(_Sampled(batch))
            self._jobs.append(_Job(row["update"], row["prompts"], future))
        if state["prompts"] is not None:
            self._prompts.load_state_dict(state["prompts"])

    def _start(self, update: int, *, version: int) -> _Job:
        before = self._prompts.state_dict()
        drawn = self._prompts.next(self._trainer.run_settings.rollout.num_prompts)
        sampled = self._engine.start(lambda engine, sent: self._sample(update, version, drawn, engine, sent))
        return _Job(update, before, sampled)

    def _sample(
        self, update: int, version: int, prompts: list[Prompt], engine: Engine, sent: Mapping[str, float]
    ) -> _Sampled:
        """Sample in the background, without global random generators or anything that the trainer changes."""
        started = time.perf_counter()
        clock = Stopwatch(self._trainer.run.device)
        waited = 0.0 if self._idle_since is None else started - self._idle_since
        self._lines.clear()
        trainer = self._trainer.in_background(update, version, engine, self._tokenizer)
        try:
            batch = self._sampling.sampled(trainer, clock, lambda _: prompts)
        except NonfiniteScoreError as error:
            raise _Rejected(error, self._checked) from None
        finally:
            self._idle_since = time.perf_counter()
        took = clock.metrics(num_tokens=batch.num_tokens)
        figures = {**sent, **{name: took[name] for name in PHASES}, "time/rollout_waiting": waited}
        return _Sampled(replace(batch, costs=figures), tuple(self._lines))

    def _note(self, rollout: Rollout) -> None:
        self._checked = rollout


def _packed(batch: SampledBatch, tensors: dict[str, Tensor], prompts: Sequence[Prompt]) -> Any:
    """Convert a batch to JSON types. Repeated objects are stored once.

    All of them live as long as the batch, so that their ids tell them apart.

    Args:
        batch: The batch.
        tensors: Receives the batch's tensors, under the names that the result refers to.
        prompts: All prompts of the run; the batch's prompts are stored as indices into them.
    """
    places = {id(prompt): place for place, prompt in enumerate(prompts)}
    numbers: dict[int, int] = {}

    def pack(value: Any) -> Any:
        if isinstance(value, Prompt):
            return {PROMPT: places[id(value)]}
        if isinstance(value, Tensor) or is_dataclass(value):
            if id(value) in numbers:
                return {SAME: numbers[id(value)]}
            numbers[id(value)] = len(numbers)
        if isinstance(value, Tensor):
            name = f"{len(tensors)}"
            tensors[name] = value.contiguous()
            return {TENSOR: name}
        if is_dataclass(value):
            entries = {each.name: pack(getattr(value, each.name)) for each in fields(value)}
            return {KIND: type(value).__name__, "fields": entries}
        if isinstance(value, Mapping):
            return {"entries": {str(name): pack(entry) for name, entry in value.items()}}
        if isinstance(value, (list, tuple)):
            return [pack(entry) for entry in value]
        return value

    return pack(batch)


def _unpacked(value: Any, tensors: Mapping[str, Tensor], prompts: Sequence[Prompt]) -> Any:
    """Invert `_packed`; the arguments are the same."""
    found: list[Any] = []

    def unpack(value: Any) -> Any:
        if isinstance(value, list):
            return [unpack(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if SAME in value:
            return found[value[SAME]]
        if PROMPT in value:
            return prompts[value[PROMPT]]
        if "entries" in value:
            return {name: unpack(entry) for name, entry in value["entries"].items()}
        place = len(found)
        found.append(None)
        if TENSOR in value:
            found[place] = tensors[value[TENSOR]]
        else:
            found[place] = KINDS[value[KIND]](**{name: unpack(entry) for name, entry in value["fields"].items()})
        return found[place]

    return unpack(value)
