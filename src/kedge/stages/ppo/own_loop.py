"""PPO in a custom training loop: sample, score, update.

    with kedge.PpoTrainer(model="path/or/hub-id", out="runs/mine", num_prompts=32) as trainer:
        for prompts in batches:
            batch = trainer.sample(prompts)
            scores = [score(prompt, response) for prompt, response in zip(batch.prompts, batch.responses)]
            metrics = trainer.update(batch, scores)
        trainer.save()

The updates are those of `kedge.ppo`: the same code makes them, logs them, and saves their checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from kedge.config import Config, with_values
from kedge.data import PromptStream
from kedge.logs.experience_metrics import describe_experience
from kedge.rewards import RewardTerm
from kedge.rewards.score import describe_responses
from kedge.rewards.source import check_count, checked_scores
from kedge.runs.claim import claims
from kedge.runs.ending import chained
from kedge.runs.out_of_memory import memory_in_one_line
from kedge.runs.run import Resume, open_run, resumed
from kedge.runs.stage_function import decided
from kedge.runs.training import Callback, check_callback
from kedge.stages.arguments import (
    Data,
    Model,
    StrPath,
    Weighted,
    is_whole,
    resolved_arguments,
    with_named_models,
)
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.given import Batch, Reader
from kedge.stages.ppo.main import opened_updates
from kedge.stages.ppo.result import save_result
from kedge.stages.ppo.roles import Roles, longest_prompt
from kedge.stages.ppo.sampling import SampledBatch, Sampling, prompt_stream
from kedge.stages.ppo.settings import check_own_loop
from kedge.stages.session import Session, session_call
from kedge.training.runtime import Stopping, Stopwatch, default_modes
from kedge_base.errors import ConfigError, RewardError
from kedge_base.machine.invocation import refuse_nested_run
from kedge_base.stage import find_stage

NO_SCORES = "scores are missing: pass one per response, or give the trainer reward="


class PpoTrainer:
    """PPO in a training loop of your own. Takes the arguments and settings of `kedge.ppo`; rewards and prompts are
    optional.

    With `prompts`, `sample()` draws from them as `kedge.ppo` does; with `reward`, `update(batch)` scores with it.
    Settings that cannot take effect in such a loop are rejected: sampling ahead (`rollout.max_staleness`),
    additional rounds of sampling (`ppo.constant_groups=resample`), and measurements on held-out prompts
    without `prompts` and `reward`.

    The trainer saves checkpoints as `checkpoint` says. It is closed at the end of the `with` block, by `close()`, when
    the process ends, or when it is garbage-collected; it then saves the model, the last state, and the report.

    Args:
        model: Folder, hub id or `LoadedModel` of the policy to start from.
        out: The run's folder; must be empty unless its run is resumed.
        reward: Reward models and functions, for `update` without scores.
        environment: The environment that `sample` plays episodes in; it may give the reward. See `kedge.ppo`.
        prompts: Prompts for `sample` without prompts.
        eval_prompts: Prompts for `eval_every` and `critic_check`.
        critic: As in `kedge.ppo`.
        advantage: As in `kedge.ppo`.
        surrogate: As in `kedge.ppo`.
        resume: Resume the run in `out`, if there is one: weights, optimizer, controllers, random streams, and the
            number of the update. A list of fields or sections lets these differ.
        on_update: Called with an `Update` after each update.
        settings: Fields of the configuration.

    Attributes:
        config: The resolved configuration.
        roles: The models: `actor_critic`, `reference`, `reward`, with tokenizer, optimizer and engine.

    Raises:
        KedgeError: An input is invalid, or a setting cannot take effect in a custom loop.
    """

    config: Config
    roles: Roles

    def __init__(
        self,
        *,
        model: Model,
        out: StrPath | None = None,
        reward: Weighted | None = None,
        environment: Callable[[], Any] | str | None = None,
        prompts: Data | None = None,
        eval_prompts: Data | None = None,
        critic: Model | None = None,
        advantage: Callable[..., object] | str | Mapping[str, int] | None = None,
        surrogate: Callable[..., object] | str | None = None,
        resume: bool | Sequence[str] = False,
        on_update: Callback | None = None,
        **settings: Any,
    ) -> None:
        refuse_nested_run()
        check_callback(on_update)
        how, out = resumed(resume, out, "ppo")
        named = {"model": model, "out": out, "reward": reward, "prompts": prompts, "eval_prompts": eval_prompts}
        named |= {"advantage": advantage, "surrogate": surrogate, "environment": environment, "critic": critic}
        # None is a value for a setting, unlike for an argument.
        given = {**settings, **{name: value for name, value in named.items() if value is not None}}
        variables = copy_context()
        contexts = variables.run(self._open, given, how, on_update)
        self._session = Session(self._run, self._loop, self._stop, self.num_updates, contexts, variables)
        self._session.close_with(self)

    @default_modes()
    def _open(self, given: Mapping[str, Any], resume: Resume | None, on_update: Callback | None) -> ExitStack:
        with ExitStack() as opening:
            opening.enter_context(claims())
            named = opening.enter_context(with_named_models(find_stage("ppo"), given))
            config, objects = resolved_arguments(find_stage("ppo"), named)
            config = with_saved_critic(config)
            has_prompts = "prompts" in objects or bool(config.data.prompts)
            others_score = bool("reward" in objects or config.reward or config.ppo.reference)
            is_paid = others_score or config.environment.source is not None
            check_own_loop(config, has_prompts=has_prompts, has_reward=is_paid)
            if not is_paid:
                objects["reward"] = [RewardTerm(_given_scores, name="scores")]
                config = with_values(config, {"runtime.num_fixed_prompts": 0})  # nothing could score their responses
            config = decided(config, "ppo", resumes=resume is not None)
            opening.enter_context(memory_in_one_line(config, "ppo"))
            opening.enter_context(chained())
            in_memory = {field: objects.get(name) for name, field in find_stage("ppo").arguments.items()}
            if not has_prompts:
                in_memory["data.prompts"] = _own_prompts
            run = self._run = open_run(config, "ppo", in_memory=in_memory, resume=resume)
            run.facts = {**run.facts, "loop": "own"}
            self._stop = Stopping(run.ranks)
            self.config = config
            self._updates = opening.enter_context(
                opened_updates(run, has_prompts=has_prompts, has_scores=True, stop=self._stop, callback=on_update)
            )
            self._loop = self._updates.loop
            trainer = self._trainer = self._updates.trainer
            roles = self.roles = trainer.roles
            player = roles.player
            self._has_reward = others_score or (player is not None and player.environment.is_scored)
            self._stream = prompt_stream(trainer, self._loop) if has_prompts else None
            say = self._updates.log.progress.say
            self._sampling = Sampling(None, trainer, check=self._updates.guard.check_rollout, say=say)
            room = longest_prompt(config, roles.actor_critic, roles.reward.weighted_models, player)
            self._reader = Reader(trainer, room, say)
            self._begin_again()
            self._steps = self._updates.steps()
            self._next = next(self._steps, None)
            return opening.pop_all()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._run.shared_folder

    @property
    def done(self) -> int:
        """Number of updates made so far, including those before a resume."""
        return self._loop.done

    @property
    def num_updates(self) -> int:
        """Number of updates in the whole run (`ppo.num_updates`), which schedules and learning rate span."""
        return self.config.ppo.num_updates

    @property
    def ended(self) -> str | None:
        """Why the run ended before its last update, such as `ppo.max_kl`; None if it did not."""
        return self._loop.ended

    @property
    def policy(self) -> Any:
        """The transformers model that is trained; changes to it take effect."""
        return self.roles.actor_critic.policy.causal

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return self.roles.tokenizer

    def updates(self) -> Iterator[int]:
        """The numbers of the remaining updates, counted from 1; a resumed run continues where it was.

        Each number is repeated until its update has been made.
        """
        while self._next is not None:
            yield self._next

    @session_call
    def sample(self, prompts: Iterable[Any] | None = None, *, max_new_tokens: int | None = None) -> Batch:
        """Sample `rollout.num_responses` responses to each prompt.

        Args:
            prompts: Texts, rows, conversations or, without an environment, token ids; None draws
                `rollout.num_prompts` of the run's prompts.
            max_new_tokens: A lower limit than `rollout.max_new_tokens`, for one turn of several.

        Raises:
            DataError: A prompt cannot be used, such as one that is too long, or ids with an environment.
            ConfigError: No prompts are given, the limit is invalid, or the run has ended.
        """
        if prompts is None and self._stream is None:
            raise ConfigError("sample() needs prompts: pass them, or give the trainer prompts=")
        number, clock = self._begin()
        longest = self._trainer.settings.rollout.max_new_tokens
        if max_new_tokens is not None and not (is_whole(max_new_tokens) and 1 <= max_new_tokens <= longest):
            raise ConfigError(f"max_new_tokens is {max_new_tokens!r}; rollout.max_new_tokens allows 1 to {longest}")
        prompt_ids = None
        if prompts is not None:
            rows, prompt_ids = self._reader.prompts_to_sample(list(prompts))
        else:
            rows = cast("PromptStream", self._stream).next(self._trainer.settings.rollout.num_prompts)
        # A second batch for the same update draws different random numbers.
        again = ("again", count) if (count := self._counts["sample"]) else ()
        self._counts["sample"] += 1
        self._published |= self._trainer.publish(number - 1)
        with clock.phase("rollout"):
            rollout = self._trainer.sample(
                rows, "rollout", number, *again, prompt_ids=prompt_ids, max_new_tokens=max_new_tokens
            )
        return Batch.of(rollout, rows, self.roles.tokenizer, owner=self, is_exact=self._trainer.run_settings.exact)

    @session_call
    def batch(
        self,
        prompts: Iterable[Any],
        responses: Iterable[Any],
        *,
        logprobs: Sequence[Sequence[Any]] | None = None,
        stopped: Sequence[bool] | None = None,
        groups: Sequence[int] | None = None,
        policy_version: int | None = None,
    ) -> Batch:
        """Make a batch from responses that were sampled elsewhere: by an agent, a game or a server, or from a file.

        A response is a text, a list of token ids, or a list of pairs (text or ids, own) for several turns: the policy
        is trained on the parts with `own=True` and only reads the others, such as a tool's output. Ids are exact; a
        text is encoded again, which can give other tokens than the sampled ones.

        An episode whose turns do not all continue the same text, for example because an agent rewrites its history or
        has sub-agents, is a list of its calls of the policy: pairs (ids read, ids sampled), in the order of time. What
        calls have in common is trained on once; the episode then opens with what its first call read.

        Args:
            prompts: One per response: texts, rows, conversations or token ids.
            responses: The responses.
            logprobs: For each response, the log probability (nats) of each token with `own=True` when it was sampled,
                including the stop token; of calls, a list of them for each call. None computes them with the current
                weights, as if those had sampled the responses.
            stopped: True if the response ended with a stop token, which is added to a text. By default, True for texts;
                for ids, True if the last one is a stop token.
            groups: The number of each response's prompt; by default, equal prompts form a group.
            policy_version: Number of updates that the policy had completed when it sampled them; by default, all so
                far.

        Raises:
            DataError: A prompt or response cannot be used; the message says which and why.
        """
        given = {"logprobs": logprobs, "stopped": stopped, "groups": groups, "policy_version": policy_version}
        options = self._run.ranks.first(lambda: given)
        self._begin()
        rollout, rows = self._reader.rollout(list(prompts), list(responses), done=self.done, **options)
        return Batch.of(rollout, rows, self.roles.tokenizer, owner=self, is_exact=False)

    @session_call
    def update(self, batch: Batch, scores: Iterable[Any] | None = None) -> Mapping[str, float]:
        """Improve policy and critic on a batch; returns the update's row of `metrics.jsonl`.

        Args:
            batch: The responses. Each batch is trained on once.
            scores: For each response, a number, a list with a number per token or, in an episode, per call or turn, or
                None to leave it out. None instead of a list scores with the run's `reward`.

        Raises:
            RewardError: The scores do not fit the batch.
            ConfigError: The batch has been trained on, or the run has ended.
            NumericsError: The guard stops the run.
        """
        listed = self._checked(batch, scores, "update")
        if batch._trained:
            raise ConfigError(f"update {batch._trained[0]} has trained on this batch; sample another one")
        if listed is not None and self._trainer.run_settings.samples_greedy:
            raise ConfigError(
                f"ppo.advantage={self.config.ppo.estimator} compares with the score of a greedy response, which "
                "reward= has to give: call update(batch) without scores"
            )
        if listed is not None and self.config.ppo.on_nonfinite == "stop":  # before the guard records a stop
            checked_scores(listed, name="scores", lengths=[len(ids) for ids in batch.response_ids])
        number, clock = self._begin()
        try:
            metrics = self._updates.make(number, partial(self._scored, batch, listed), clock)
        except BaseException:
            if self._loop.done == number:  # `on_update` failed
                self._advance(batch)
            raise
        self._advance(batch)
        return {"update": number, **metrics}

    @session_call
    def evaluate(self, batch: Batch, scores: Iterable[Any] | None = None) -> Mapping[str, float]:
        """Compute score, KL, length and more, without training on the batch; arguments and errors as in `update`."""
        listed = self._checked(batch, scores, "evaluate")
        trainer = self._trainer.measuring(exact=batch._is_of(self.done))
        return describe_experience(trainer.evaluate(trainer.score(batch.rollout, batch._rows, scores=listed)))

    @session_call
    def generate(self, prompts: Iterable[Any], *, greedy: bool = False) -> list[str]:
        """Sample one response to each prompt, as text. Training is not affected.

        Args:
            prompts: Texts, rows, conversations or token ids.
            greedy: Take the most likely tokens instead of sampling.
        """
        rows, prompt_ids = self._reader.prompts_to_sample(list(prompts))
        self._trainer.publish(self.done)
        self._counts["generate"] += 1
        names = ("generate", self.done, self._counts["generate"])
        rollout = self._trainer.sample(rows, *names, groups=range(len(rows)), greedy=greedy, prompt_ids=prompt_ids)
        return describe_responses(rollout, rows, self.roles.tokenizer).completions

    @session_call
    def save(self) -> Path:
        """Save a checkpoint, the policy in `model/`, and the report; returns the model's folder."""
        if not self.done:
            raise ConfigError("no update has been made, so there is nothing to save")
        self._stop.at_once = False
        self._loop.save()
        save_result(self._run, self.roles, interrupted=None)
        self._run.ranks.wait()  # all return once the model is saved
        return self.folder / "model"

    def close(self) -> None:
        """Save, write the report, print the doctor's findings, and end the trainer's processes."""
        self._session.close()

    def __enter__(self) -> PpoTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close(error)

    def __repr__(self) -> str:
        why = self._session.closed_by
        state = self.ended or "open" if why is None else f"closed{why}"
        return f"<PpoTrainer in {self.folder}: update {self.done} of {self.num_updates}, {state}>"

    def _scored(self, given: Batch, scores: Sequence[Any] | None, update: int, clock: Stopwatch) -> SampledBatch:
        """Score the batch that the caller passed to `update`."""
        if not given._is_of(update - 1):
            self._trainer.settings = self._trainer.settings.inexact()
        batch = self._sampling.given(given.rollout, given._rows, clock, scores=scores)
        self._stop.at_once = False  # estimators and models change from here on
        return replace(batch, costs=self._published)

    def _advance(self, batch: Batch) -> None:
        """Complete the update made from a batch, and advance to the next one even after an error."""
        batch._trained.append(self._trainer.update)
        self._begin_again()
        try:
            self._next = next(self._steps, None)
        except BaseException:  # the update is complete, and the caller may continue
            self._stop.forget()
            self._steps = self._loop.steps(self.num_updates)
            self._next = next(self._steps, None)
            raise

    def _drawn(self) -> tuple[Any, ...]:
        """The state of the prompt stream, and the number of calls, on which random numbers depend."""
        return self.done, self._counts.copy(), self._stream and self._stream.state_dict()

    def _draw_again(self, done: int, counts: dict[str, int], stream: Any) -> None:
        """Restore `_drawn`, unless an update has been completed since."""
        if done == self.done:
            self._counts = counts
            if self._stream:
                self._stream.load_state_dict(stream)

    def _begin_again(self) -> None:
        """Reset the counts of calls, as at the start of an update."""
        self._clock: Stopwatch | None = None
        self._counts = {"sample": 0, "generate": 0}
        self._published: dict[str, float] = {}

    def _begin(self) -> tuple[int, Stopwatch]:
        """Start the next update unless it has been started; return its number and its clock."""
        if self._next is None:
            why = self.ended or (
                f"it has made its updates (ppo.num_updates={self.num_updates}); num_updates={2 * self.num_updates} and "
                "resume=True would make more"
            )
            raise ConfigError(f"the run in {self.folder} has ended: {why}")
        if self._clock is None:
            self._trainer.begin(self._next)
            self._clock = Stopwatch(self._run.device)
        return self._next, self._clock

    def _checked(self, batch: Batch, scores: Iterable[Any] | None, call: str) -> list[Any] | None:
        """Check that a batch can be used with these scores, and return them as a list."""
        if not isinstance(batch, Batch):
            raise ConfigError(f"{call} takes a batch from sample() or batch(), not one of type {type(batch).__name__}")
        if batch._owner is not self:
            raise ConfigError("this batch belongs to another trainer; sample it with this one, or use batch()")
        if scores is None:
            if not self._has_reward:
                raise RewardError(NO_SCORES)
            return None
        check_count(listed := list(scores), len(batch))
        return batch.by_token(listed)


def _own_prompts() -> None:
    """Placeholder for prompts that the custom loop supplies."""


def _given_scores(completions: list[str]) -> list[Any]:
    """Placeholder for scores that the custom loop supplies; its name is written to the run's configuration."""
    raise RewardError(NO_SCORES)
