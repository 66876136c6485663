"""Sampling ahead of training: later updates' responses are sampled and scored while this update is trained on.

With s = `rollout.max_staleness`, the responses of update u come from the weights after update max(0, u − 1 − s):

    s = 1    sampling   1 │ 2 │ 3      │ 4      │ …      of update
                        v0  v0  v1       v2              with the weights after update
             training       │ 1        │ 2      │ …      from v0, then v1

At the start of update u, when v(u − 1) is complete, the sampling of all updates up to u + s that are not under way is
given to the background, in order; it begins when the ones before it are done. Nothing depends on which side is faster,
so two runs are equal, and a checkpoint needs only the batches under way. They are finished before it is written. On
several ranks all do the same in the background, over a process group of its own.

Source: one step off: Noukhovitch et al., "Asynchronous RLHF" (arXiv 2410.18252); AReaL (arXiv 2505.24298).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from kedge.algorithm.experience import Rollout
from kedge.config import Config
from kedge.data import Prompt, PromptStream
from kedge.errors import ConfigError, NonfiniteScoreError
from kedge.logs.stopwatch import Stopwatch
from kedge.rollout import BackgroundEngine, Engine, Sampler, SharedEngine, frozen_copy
from kedge.runs.run import Run
from kedge.stages.ppo.batch import SampledBatch
from kedge.stages.ppo.roles import Roles
from kedge.stages.ppo.sampling import Sampling
from kedge.stages.ppo.saved_batches import packed, unpacked
from kedge.stages.ppo.steps import PpoSteps

__all__ = ["SamplingAhead", "check_ahead", "choose_sampling", "with_background"]

PHASES = ("time/rollout", "time/reward")


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
    """The same roles, with an engine that samples in the background if the run samples ahead."""
    if not config.rollout.max_staleness:
        return roles
    return replace(roles, engine=BackgroundEngine(_with_copy(roles.engine), run.ranks.apart()))


def _with_copy(engine: Engine) -> Engine:
    """The built-in engine with a copy of the policy; another one has its own."""
    if isinstance(engine, SharedEngine):
        return replace(engine, engine=_with_copy(engine.engine))
    return replace(engine, model=frozen_copy(engine.model), is_copy=True) if isinstance(engine, Sampler) else engine


def choose_sampling(
    prompts: PromptStream, steps: PpoSteps, *, check: Callable[[Rollout], None], say: Callable[[str], None]
) -> Sampling | SamplingAhead:
    """What samples a run's batches: each when it is needed, or ahead.

    Args:
        prompts: The stream of prompts.
        steps: The run's steps.
        check: Called with the responses of each round.
        say: Prints a line to the user.
    """
    if isinstance(engine := steps.roles.engine, BackgroundEngine):
        return SamplingAhead(prompts, steps, engine, check=check, say=say)
    return Sampling(prompts, check=check, say=say)


@dataclass(frozen=True)
class _Sampled:
    """A batch, what its sampling took, and the lines that it has for the user."""

    batch: SampledBatch
    figures: Mapping[str, float]
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Job:
    """The sampling of an update, under way or done, and the state of the prompts before its own were drawn."""

    update: int
    prompts: Mapping[str, int]
    sampled: Future[_Sampled]


class _Rejected(Exception):
    """A score was not finite. Carries the responses, which the incident is described by."""

    def __init__(self, error: NonfiniteScoreError, rollout: Rollout | None) -> None:
        super().__init__(str(error))
        self.error, self.rollout = error, rollout


class SamplingAhead:
    """Samples and scores batches in the background, at most `rollout.max_staleness` updates ahead.

    Args:
        prompts: The stream of prompts; those of an update are drawn when its sampling is given to the background.
        steps: The run's steps.
        engine: Samples in the background.
        check: Called with the responses of each round, when the batch is taken.
        say: Prints a line to the user.
    """

    def __init__(
        self,
        prompts: PromptStream,
        steps: PpoSteps,
        engine: BackgroundEngine,
        *,
        check: Callable[[Rollout], None],
        say: Callable[[str], None],
    ) -> None:
        self._prompts, self._steps, self._engine, self._check, self._say = prompts, steps, engine, check, say
        self._ahead, self._last = steps.config.rollout.max_staleness, steps.config.ppo.num_updates
        self._drawn = _Drawn()
        self._lines: list[str] = []
        self._seen: Rollout | None = None
        self._sampling = Sampling(self._drawn, check=self._note, say=self._lines.append)
        # Tokenizers are not safe to use from two threads.
        self._tokenizer = deepcopy(steps.roles.tokenizer)
        self._jobs: deque[_Job] = deque()
        self._idle_since: float | None = None
        self._figures: Mapping[str, float] = {}

    def batch(self, now: PpoSteps, update: int, clock: Stopwatch) -> SampledBatch:
        """The responses of an update; the sampling of later ones is under way from here on.

        Args:
            now: The update's steps.
            update: Its number.
            clock: Times the phase `waiting_for_rollout`.

        Raises:
            RewardError: A reward failed or returned invalid scores.
            UnscoredError: No response of the first round has a score.
        """
        first = self._jobs[-1].update + 1 if self._jobs else update
        for coming in range(first, min(update + self._ahead, self._last) + 1):
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
        self._figures = sampled.figures
        return sampled.batch

    def metrics(self) -> dict[str, float]:
        """What the sampling of the last batch took: seconds by phase, and how long the sampler had waited before."""
        return dict(self._figures)

    def mark(self) -> tuple[_Job, ...]:
        """What a checkpoint of now consists of; nothing is waited for."""
        return tuple(self._jobs)

    def saved(self, mark: tuple[_Job, ...]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The batches of a mark, as tensors and JSON types, once they are finished.

        Where one fails, it and those after it are left out, and their prompts are drawn again by the resumed run.
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
                "figures": dict(sampled.figures),
                "batch": packed(sampled.batch, tensors, self._steps.roles.prompts),
            }
            for job, sampled in done
        ]
        return tensors, {"batches": rows, "prompts": None if prompts is None else dict(prompts)}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore what `saved` returned; the stream of prompts is restored already."""
        device = self._steps.run.device
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        for row in state["batches"]:
            batch = unpacked(row["batch"], on_device, self._steps.roles.prompts)
            future: Future[_Sampled] = Future()
            future.set_result(_Sampled(batch, row["figures"]))
            self._jobs.append(_Job(row["update"], row["prompts"], future))
        if state["prompts"] is not None:
            self._prompts.load_state_dict(state["prompts"])

    def _start(self, update: int, *, version: int) -> _Job:
        steps, before = self._steps.behind(update, version), self._prompts.state_dict()
        self._drawn.put(self._prompts.next(steps.config.rollout.num_prompts))
        return _Job(update, before, self._engine.start(lambda engine, sent: self._sample(steps, update, engine, sent)))

    def _sample(self, steps: PpoSteps, update: int, engine: Engine, sent: Mapping[str, float]) -> _Sampled:
        """In the background: draws from no global generator, and uses nothing that the trainer changes."""
        started, clock = time.perf_counter(), Stopwatch(steps.run.device)
        waited = 0.0 if self._idle_since is None else started - self._idle_since
        self._lines.clear()
        aside = replace(steps, roles=replace(steps.roles, engine=engine, tokenizer=self._tokenizer))
        try:
            batch = self._sampling.batch(aside, update, clock)
        except NonfiniteScoreError as error:
            raise _Rejected(error, self._seen) from None
        finally:
            self._idle_since = time.perf_counter()
        took = clock.metrics(num_tokens=batch.num_tokens)
        figures = {**sent, **{name: took[name] for name in PHASES}, "time/rollout_waiting": waited}
        return _Sampled(batch, figures, tuple(self._lines))

    def _note(self, rollout: Rollout) -> None:
        self._seen = rollout


class _Drawn:
    """The prompts that were drawn for the updates under way, in order."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[list[Prompt]] = SimpleQueue()

    def put(self, prompts: list[Prompt]) -> None:
        self._waiting.put(prompts)

    def next(self, num_prompts: int) -> list[Prompt]:
        prompts = self._waiting.get_nowait()
        assert len(prompts) == num_prompts, "a single round"
        return prompts
