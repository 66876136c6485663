"""PPO in a loop of the caller's own: sample, score, update.

    with kedge.PpoTrainer(model="path/or/hub-id", out="runs/mine", num_prompts=32) as trainer:
        for prompts in batches:
            batch = trainer.sample(prompts)
            scores = [score(prompt, response) for prompt, response in zip(batch.prompts, batch.responses)]
            metrics = trainer.update(batch, scores)
        trainer.save()

The updates are those of `kedge.ppo`: the same code makes them, logs them, and saves their checkpoints.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from kedge.algorithm.experience import Rollout
from kedge.config import Config, with_values
from kedge.data import Prompt
from kedge.data.fields import is_conversation
from kedge.errors import ConfigError, DataError, KedgeError, RewardError
from kedge.logs.experience_metrics import describe_experience
from kedge.logs.progress import say
from kedge.rewards import RewardTerm, load_reward
from kedge.rewards.score import describe_responses
from kedge.rewards.source import check_count, checked_scores
from kedge.runs.claim import claims
from kedge.runs.ending import chained
from kedge.runs.inputs import given_prompts
from kedge.runs.out_of_memory import memory_in_one_line
from kedge.runs.run import Resume, open_run, resumed
from kedge.runs.training import Callback, check_callback, running, stage_loop
from kedge.stages.arguments import (
    Data,
    Model,
    StrPath,
    Weighted,
    is_whole,
    resolved_arguments,
    with_named_models,
)
from kedge.stages.ppo.ahead import prompt_stream
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.given import given_rollout, is_ids, rows_and_ids
from kedge.stages.ppo.main import opened_updates
from kedge.stages.ppo.result import checkpoint_model, save_result
from kedge.stages.ppo.roles import Roles, load_roles, longest_prompt
from kedge.stages.ppo.sampling import SampledBatch, Sampling
from kedge.system.invocation import refuse_nested_run
from kedge.system.stage import find_stage
from kedge.system.workers.codec import own_copy
from kedge.training.runtime import Stopwatch, default_modes
from kedge.training.stopping import Stopping, Terminated, listening

P = ParamSpec("P")
T = TypeVar("T")

LISTS = ("prompts", "responses", "scores")
"""Arguments with an entry per prompt or response."""


def _listening(method: Callable[Concatenate[PpoTrainer, P], T]) -> Callable[Concatenate[PpoTrainer, P], T]:
    """Decorates a method that uses the models: it runs in the trainer's context, and a signal ends it.

    A single process ends it at once, unless that would leave something half done. Nothing of the signal is left for the
    next call. An error that comes after an update has changed weights closes the trainer: the update is
    discarded. Lists are those of the first rank.
    """
    declared = signature(method)
    kinds = {name: each.kind for name, each in declared.parameters.items() if name != "self"}
    places = [
        "[…]" if name in LISTS else name for name, kind in kinds.items() if kind is Parameter.POSITIONAL_OR_KEYWORD
    ]
    example = f"{method.__name__}({', '.join(places)})"

    def listened(self: PpoTrainer, *args: Any, **arguments: Any) -> T:
        try:
            with listening(self._stop):
                self._stop.at_once = True
                result = method(self, *args, **arguments)
            self._stop.raise_if_requested()
            return result
        finally:
            self._stop.forget()

    @wraps(method)
    def call(self: PpoTrainer, *args: P.args, **arguments: P.kwargs) -> T:
        self._check_usable()
        given = declared.bind(self, *args, **arguments)
        lists = {name: given.arguments[name] for name in LISTS if given.arguments.get(name) is not None}
        # Outside of the context, because what makes them may call the trainer.
        given.arguments |= self._run.ranks.first(
            lambda: {name: _listed(name, each, example) for name, each in lists.items()}
        )
        try:
            return self._inside(listened, *given.args, **given.kwargs)
        except BaseException as error:
            if self._loop.is_changing:
                self._closed_by = f" after an error in update {self.done + 1}"
                self._close(error)
            raise

    return call


@dataclass(frozen=True, eq=False)
class Batch:
    """Responses to train on. Every list has one entry per response.

    Attributes:
        prompts: The prompts as text; conversations as the chat template renders them.
        responses: The responses as text, without the stop token.
        columns: The other fields of the prompts' rows, each a list.
        prompt_ids: The prompts in tokens.
        response_ids: The responses in tokens, the stop token included.
        masks: For each token of the response, True if the policy chose it and is trained on it.
        logprobs: For each token its log probability (nats) when it was sampled; 0 where the mask is False.
        values: For each token the critic's value of the state before it; None unless the sampler computes values, which
            it does with a shared critic.
        stopped: True if the response ended with a stop token, False if it was cut off.
        groups: The number of the response's prompt.
        rollout: The same as padded tensors.
    """

    prompts: list[str]
    responses: list[str]
    columns: Mapping[str, list[Any]]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    masks: list[list[bool]]
    logprobs: list[list[float]]
    values: list[list[float]] | None
    stopped: list[bool]
    groups: list[int]
    rollout: Rollout
    _rows: Sequence[Prompt]
    _owner: PpoTrainer
    _is_exact: bool
    _trained: list[int] = field(default_factory=list[int])

    def __len__(self) -> int:
        return len(self.responses)

    def _is_of(self, version: int) -> bool:
        """True if its log probabilities and values are exactly those of the weights after `version` updates."""
        return self._is_exact and int(self.rollout.policy_version.min()) >= version

    def __repr__(self) -> str:
        return f"<Batch: {len(self)} responses to {len(self._rows)} prompts, {self.rollout.num_actions} tokens>"


class PpoTrainer:
    """PPO on a loop of your own. Takes the arguments and settings of `kedge.ppo`; rewards and prompts are optional.

    With `prompts`, `sample()` draws from them as `kedge.ppo` does; with `reward`, `update(batch)` scores with it. What
    cannot act in such a loop is refused: sampling ahead (`rollout.max_staleness`), further rounds of sampling
    (`ppo.constant_groups=resample`), and measurements on held-out prompts without `prompts` and `reward`.

    The trainer saves checkpoints as `checkpoint` says. It is closed at the end of the `with` block, by `close()`, or
    when the process ends or nothing refers to it any more, not even a callback; then it saves the model, the last
    state, and the report.

    Args:
        model: Folder, hub id or `LoadedModel` of the policy to start from.
        out: The run's folder; must be empty unless its run is resumed.
        reward: Reward models and functions, for `update` without scores.
        environment: What `sample` plays episodes with; it may pay the reward. See `kedge.ppo`.
        prompts: Prompts for `sample` without prompts.
        eval_prompts: Prompts for `eval_every` and `critic_check`.
        critic: As in `kedge.ppo`, like the next two.
        advantage: See `critic`.
        surrogate: See `critic`.
        resume: Resume the run in `out`, if there is one: weights, optimizer, controllers, random streams, and the
            number of the update. A list of fields or sections lets these differ.
        on_update: Called with an `Update` after each update.
        settings: Fields of the configuration.

    Attributes:
        config: The resolved configuration.
        roles: The models: `actor_critic`, `reference`, `reward`, with tokenizer, optimizer and engine.

    Raises:
        KedgeError: An invalid input, or a setting that cannot act here.
    """

    config: Config
    roles: Roles
    _is_open = False

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
        # None of a setting, unlike that of an argument, is a value.
        given = {**settings, **{name: value for name, value in named.items() if value is not None}}
        self._closed_by = ""
        # A notebook runs every cell in another context; what a context manager sets has to be reset in the same one.
        self._context = copy_context()
        self._inside(self._open, given, how, on_update)

    def _open(self, given: Mapping[str, Any], resume: Resume | None, on_update: Callback | None) -> None:
        with ExitStack() as opening:
            opening.enter_context(claims())
            named = opening.enter_context(with_named_models(find_stage("ppo"), given))
            config, objects = resolved_arguments(find_stage("ppo"), named)
            config = with_saved_critic(config)
            _check(
                config, has_prompts="prompts" in given, has_reward="reward" in given or bool(config.environment.source)
            )
            opening.enter_context(memory_in_one_line(config, "ppo"))
            opening.enter_context(chained())
            self._scores: list[Any] = []
            self._open_run(config, opening, objects, resume, on_update)
            self._stack = opening.pop_all()
        self._process = os.getpid()
        self._is_open = True
        # It keeps what the stack closes: generators that are collected with the trainer may end before it is closed.
        self._close_at_exit = partial(_close, weakref.ref(self), self._stack, self._process)
        atexit.register(self._close_at_exit)

    def _open_run(
        self,
        config: Config,
        opening: ExitStack,
        objects: Mapping[str, Any],
        resume: Resume | None,
        on_update: Callback | None,
    ) -> None:
        reward = objects.get("reward")
        scores = self._scores  # without a reference to the trainer, which is closed when nothing refers to it

        def _given_scores(completions: list[str]) -> list[Any]:
            return scores

        own = RewardTerm(_given_scores, name="scores")
        pays = objects.get("environment") is not None or config.environment.source is not None
        has_teacher = config.ppo.reference is not None
        if has_no_reward := reward is None and not config.reward and not pays and not has_teacher:
            reward = [own]
            config = with_values(config, {"runtime.num_fixed_prompts": 0})  # nothing could score their responses
        has_prompts = objects.get("prompts") is not None or bool(config.data.prompts)
        in_memory = {field: objects.get(name) for name, field in find_stage("ppo").arguments.items()}
        in_memory["reward"] = reward
        if not has_prompts:
            in_memory["data.prompts"] = _own_prompts
        run = self._run = open_run(config, "ppo", in_memory=in_memory, resume=resume)
        roles = self.roles = load_roles(config, run, has_prompts=has_prompts, **{**objects, "reward": reward})
        self._own_reward = roles.reward if has_no_reward else load_reward([own], ranks=run.ranks)
        self._has_reward = not has_no_reward
        self._stop = Stopping(run.ranks)
        self.config = config
        self._summary = opening.enter_context(running(config, run, save=partial(save_result, config, run, roles)))
        opening.enter_context(closing(roles.engine))
        model = checkpoint_model(config, run, roles)
        self._loop = opening.enter_context(stage_loop(config, run, model=model, stop=self._stop))
        self._updates = opening.enter_context(opened_updates(config, run, roles, self._loop, callback=on_update))
        self._trainer = self._updates.trainer
        self._stream = prompt_stream(config, self._trainer, self._loop) if has_prompts else None
        self._say = self._updates.log.progress.say
        self._sampling = Sampling(None, self._trainer, check=self._updates.guard.check_rollout, say=self._say)
        self._published: Mapping[str, float] = {}
        self._updates.restore()
        self._room = longest_prompt(config, roles.actor_critic, roles.reward.weighted_models)
        self._clock: Stopwatch | None = None
        self._num_sampled = 0
        self._num_generated = 1
        self._steps = self._loop.steps(config.ppo.num_updates)
        self._next = next(self._steps, None)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._run.shared_folder

    @property
    def done(self) -> int:
        """Updates made so far, those before a resume included."""
        return self._loop.done

    @property
    def num_updates(self) -> int:
        """Updates of the whole run (`ppo.num_updates`), over which schedules and learning rate are planned."""
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
        """The numbers of the updates that are still to be made, from 1; a resumed run starts where it was.

        Each number is given until its update has been made.
        """
        while self._next is not None:
            yield self._next

    @_listening
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
        stream = self._stream
        if prompts is None and stream is None:
            raise ConfigError("sample() needs prompts: pass them, or give the trainer prompts=")
        number = self._begin()
        longest = self._trainer.settings.rollout.max_new_tokens
        if max_new_tokens is not None and not (is_whole(max_new_tokens) and 1 <= max_new_tokens <= longest):
            raise ConfigError(f"max_new_tokens is {max_new_tokens!r}; rollout.max_new_tokens allows 1 to {longest}")
        assert self._clock is not None
        before = None if stream is None else stream.state_dict()
        try:
            if prompts is None:
                assert stream is not None
                rows = stream.next(self._trainer.settings.rollout.num_prompts)
                prompt_ids = None
            else:
                rows, prompt_ids = self._encoded(prompts)
            # A second batch of the same update gets other random numbers.
            again = ("again", self._num_sampled) if self._num_sampled else ()
            self._published = self._trainer.publish(number - 1)
            with self._clock.phase("rollout"):
                rollout = self._trainer.sample(
                    rows, "rollout", number, *again, prompt_ids=prompt_ids, max_new_tokens=max_new_tokens
                )
            batch = self._described(rollout, rows, is_exact=self._trainer.run_settings.exact)
        except (KeyboardInterrupt, Terminated):  # the next call draws what this one would have
            if stream is not None and before is not None:
                stream.load_state_dict(before)
            raise
        self._num_sampled += 1
        return batch

    @_listening
    def batch(
        self,
        prompts: Iterable[Any],
        responses: Iterable[Any],
        *,
        logprobs: Sequence[Sequence[float]] | None = None,
        stopped: Sequence[bool] | None = None,
        groups: Sequence[int] | None = None,
        policy_version: int | None = None,
    ) -> Batch:
        """A batch of responses that were sampled elsewhere: by an agent, a game, a server, or from a file.

        A response is a text, a list of token ids, or a list of pairs (text or ids, own) for several turns: the policy
        is trained on the parts with `own=True` and only reads the others, such as a tool's output. Ids are exact; a
        text is encoded again, which can give other tokens than the sampled ones.

        Args:
            prompts: One per response: texts, rows, conversations or token ids.
            responses: The responses.
            logprobs: For each response the log probability (nats) of each own token when it was sampled, the stop token
                included. None: they are computed with the current weights, as if these had sampled the responses.
            stopped: True if the response ended with a stop token, which is added to a text. By default True for texts;
                for ids, whether the last of them is one.
            groups: The number of each response's prompt; by default equal prompts are one group.
            policy_version: Updates that the policy had completed when it sampled them; by default all so far.

        Raises:
            DataError: A prompt or response cannot be used; the line says which and why.
        """
        options = {"logprobs": logprobs, "stopped": stopped, "groups": groups, "policy_version": policy_version}
        options = self._run.ranks.first(lambda: options)
        self._begin()
        rollout, rows = given_rollout(
            self._trainer,
            list(prompts),
            list(responses),
            read=self._read,
            room=self._room,
            done=self.done,
            say=self._say,
            **options,
        )
        return self._described(rollout, rows, is_exact=False)

    @_listening
    def update(self, batch: Batch, scores: Iterable[Any] | None = None) -> Mapping[str, float]:
        """Improve policy and critic on a batch; returns the update's row of `metrics.jsonl`.

        Args:
            batch: The responses. Each batch is trained on once.
            scores: For each response a number, a list with a number for each of its tokens, or None to leave it out.
                None instead of a list scores with the run's `reward`.

        Raises:
            RewardError: The scores do not fit the batch.
            ConfigError: The batch has been trained on, or the run has ended.
            NumericsError: The guard stops the run.
        """
        self._check_update(batch, scores)
        number = self._begin()
        assert self._clock is not None
        metrics = self._updates.make(number, partial(self._scored, batch, scores is not None), self._clock)
        batch._trained.append(number)
        self._clock = None
        self._num_sampled = 0
        try:
            self._next = next(self._steps, None)
        except (KeyboardInterrupt, Terminated):  # the update is made, and the caller may go on after it
            self._stop.forget()
            self._steps = self._loop.steps(self.num_updates)
            self._next = next(self._steps, None)
            raise
        return {"update": number, **metrics}

    @_listening
    def evaluate(self, batch: Batch, scores: Iterable[Any] | None = None) -> Mapping[str, float]:
        """Score, KL, length and more of a batch, without training on it; arguments and errors as in `update`."""
        self._check_scores(batch, scores, "evaluate")
        trainer = self._trainer.measuring(exact=batch._is_of(self.done))
        scorer = trainer if scores is None else trainer.scored_by(self._own_reward)
        return describe_experience(trainer.evaluate(scorer.score(batch.rollout, batch._rows)))

    @_listening
    def generate(self, prompts: Iterable[Any], *, greedy: bool = False) -> list[str]:
        """One response to each prompt, as text. Training is not affected by it.

        Args:
            prompts: Texts, rows, conversations or token ids.
            greedy: Take the most likely tokens, instead of drawing them.
        """
        rows, prompt_ids = self._encoded(prompts)
        self._trainer.publish(self.done)
        names = ("generate", self.done, self._num_generated)
        rollout = self._trainer.sample(rows, *names, groups=range(len(rows)), greedy=greedy, prompt_ids=prompt_ids)
        self._num_generated += 1
        return describe_responses(rollout, rows, self.roles.tokenizer).completions

    @_listening
    def save(self) -> Path:
        """Save a checkpoint, the policy in `model/`, and the report; returns the model's folder."""
        if not self.done:
            raise ConfigError("no update has been made, so there is nothing to save")
        self._stop.at_once = False
        self._loop.save()
        save_result(self.config, self._run, self.roles, interrupted=False)
        self._run.ranks.wait()  # so that the model is there on every rank
        return self.folder / "model"

    def close(self) -> None:
        """Save, write the report, print what the doctor finds, and end the processes of the trainer."""
        self._close(None)

    def __del__(self) -> None:
        try:
            self.close()
        except KedgeError as error:  # which no caller gets
            say(f"error: {error}")

    def __enter__(self) -> PpoTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def __repr__(self) -> str:
        state = f"closed{self._closed_by}" if not self._is_open else self.ended or "open"
        return f"<PpoTrainer in {self.folder}: update {self.done} of {self.num_updates}, {state}>"

    def _described(self, rollout: Rollout, rows: Sequence[Prompt], *, is_exact: bool) -> Batch:
        texts = describe_responses(rollout, [rows[group] for group in rollout.group.tolist()], self.roles.tokenizer)
        lengths = [len(ids) for ids in texts.response_ids]

        def listed(table: Any) -> list[list[Any]]:
            return [row[:length] for row, length in zip(table.tolist(), lengths, strict=True)]

        return Batch(
            texts.prompts,
            texts.completions,
            own_copy(texts.columns),
            texts.prompt_ids,
            texts.response_ids,
            listed(rollout.action_mask),
            listed(rollout.logprobs),
            None if rollout.values is None else listed(rollout.values),
            texts.stopped,
            rollout.group.tolist(),
            rollout,
            rows,
            self,
            is_exact,
        )

    def _scored(self, given: Batch, has_scores: bool, update: int, clock: Stopwatch) -> SampledBatch:
        """The batch that the caller gives to `update`, with its scores."""
        if not given._is_of(update - 1):
            self._trainer.settings = self._trainer.settings.inexact()
        scorer = self._trainer.scored_by(self._own_reward) if has_scores else self._trainer
        batch = self._sampling.sampled(scorer, clock, lambda _: list(given._rows), given.rollout)
        self._stop.at_once = False  # from here on, estimators and models learn of the batch
        return replace(batch, costs=self._published)

    def _begin(self) -> int:
        """Begin the next update, unless it has begun; returns its number."""
        if self._next is None:
            more = f"; num_updates={2 * self.num_updates} and resume=True would make more" if not self.ended else ""
            why = self.ended or f"it has made its {self.num_updates} updates (ppo.num_updates)"
            raise ConfigError(f"the run in {self.folder} has ended: {why}{more}")
        if self._clock is None:
            self._trainer.begin(self._next)
            self._clock = Stopwatch(self._run.device)
        return self._next

    def _encoded(self, given: Iterable[Any]) -> tuple[list[Prompt], list[list[int]]]:
        prompts = list(given)
        if (player := self.roles.player) is not None:
            for place, prompt in enumerate(prompts):
                if is_ids(prompt):
                    raise DataError(
                        f"prompt {place} is token ids, and an episode of {player.environment.name} opens with a text, "
                        "row or conversation; pass one of these"
                    )
        return rows_and_ids(self._trainer, prompts, self._read, self._room)

    def _read(self, prompts: list[Any]) -> list[Prompt]:
        rows = [{"messages": each} if is_conversation(each) else each for each in prompts]
        return given_prompts(rows, self.config, self.roles.tokenizer, room=self._room)

    def _check_update(self, batch: Batch, scores: Iterable[Any] | None) -> None:
        self._check_scores(batch, scores, "update")
        if batch._trained:
            raise ConfigError(f"update {batch._trained[0]} has trained on this batch; sample another one")
        if scores is not None and self._trainer.run_settings.needs_baseline:
            raise ConfigError(
                f"ppo.advantage={self.config.ppo.estimator} compares with the score of a greedy response, which "
                "reward= has to give: call update(batch) without scores"
            )
        if scores is not None and self.config.ppo.on_nonfinite == "stop":  # the guard would note a stop of the run
            checked_scores(self._scores, name="scores", lengths=[len(ids) for ids in batch.response_ids])

    def _check_scores(self, batch: Batch, scores: Iterable[Any] | None, call: str) -> None:
        """Check that a batch can be used with these scores, and keep them for its reward."""
        if not isinstance(batch, Batch):
            raise ConfigError(f"{call} takes a batch from sample() or batch(), not a {type(batch).__name__}")
        if batch._owner is not self:
            raise ConfigError("this batch belongs to another trainer; sample it with this one, or use batch()")
        if scores is None and not self._has_reward:
            raise RewardError("scores are missing: pass one per response, or give the trainer reward=")
        self._scores[:] = scores or ()
        if scores is not None:
            check_count(self._scores, len(batch))

    def _inside(self, do: Callable[P, T], *args: P.args, **arguments: P.kwargs) -> T:
        """Call a function in the trainer's context, with torch's modes as in `kedge.ppo`."""
        return self._context.run(default_modes()(do), *args, **arguments)

    def _check_usable(self) -> None:
        if not self._is_open:
            raise ConfigError(f"the trainer of {self.folder} is closed{self._closed_by}; open another with resume=True")
        if self._process != os.getpid():
            raise ConfigError(f"process {self._process} trains in {self.folder}, and a fork of it cannot")

    def _close(self, error: BaseException | None) -> None:
        if not self._is_open or self._process != os.getpid():  # a forked child's run is its parent's
            return
        self._is_open = False
        atexit.unregister(self._close_at_exit)
        stopped = True
        try:
            with listening(self._stop):
                self._inside(self._finish, error)
            if error is None:
                self._stop.raise_if_requested()
            stopped = error is not None
        except _NothingDone:
            say("No update was made, so no run is left.")
        finally:
            if self.done:
                self._say_ending(stopped=stopped)

    def _finish(self, error: BaseException | None) -> None:
        if error is not None:
            self._stack.__exit__(type(error), error, error.__traceback__)
            return
        with self._stack:  # which also ends the run if it cannot be saved
            if not self.done:
                raise _NothingDone("no update was made")
            if self.done < self.num_updates and self._loop.ended is None:
                self._loop.ended = "the loop ended it"
            self._loop.save()
            self._summary |= self._loop.summary()

    def _say_ending(self, *, stopped: bool) -> None:
        if stopped or self.done < self.num_updates:
            say(f"Resume: the same loop with kedge.PpoTrainer(..., out={str(self.folder)!r}, resume=True)")
        if not stopped:
            say(f"Model:  {self.folder / 'model'}")


class _NothingDone(KedgeError):
    """Leaves a run in which no update was made."""


def _close(trainer: weakref.ref[PpoTrainer], stack: ExitStack, process: int) -> None:
    found = trainer()
    if found is not None:
        found.__del__()
    if process != os.getpid():  # a fork must not run the ends of its parent's run, not even when these are collected
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stack))
        if found is not None:
            found._is_open = False


def _listed(name: str, given: Any, call: str) -> list[Any]:
    """A list that a caller passes; a text or row in its place would be taken apart into characters or keys.

    Raises:
        DataError: It is one text, row or number, has no order, or cannot be iterated over; `RewardError` for scores.
    """
    is_one = isinstance(given, (str, bytes, Mapping, Set)) or not getattr(given, "ndim", 1)
    if is_one or not isinstance(given, Iterable):
        kind = RewardError if name == "scores" else DataError
        raise kind(f"{name} are a {type(given).__name__}; pass a list: {call}")
    return list(cast("Iterable[Any]", given))


def _own_prompts() -> None:
    """Stands for prompts that the caller's loop has."""


def _check(config: Config, *, has_prompts: bool, has_reward: bool) -> None:
    """Refuse what cannot act in a loop that is not kedge's.

    Raises:
        ConfigError: One line with the setting and the reason.
    """
    ppo = config.ppo
    if config.rollout.max_staleness:
        raise ConfigError(
            "rollout.max_staleness samples the next prompts ahead, which only the loop knows; use 0, or train on "
            "batches of earlier updates"
        )
    if ppo.constant_groups.name == "resample":
        raise ConfigError("ppo.constant_groups=resample draws further prompts; use drop, or sample more in the loop")
    if ppo.holds_out and not (has_prompts and has_reward):
        name = "eval_every" if ppo.eval_every is not None else "critic_check"
        raise ConfigError(f"ppo.{name} samples and scores held-out prompts: give the trainer prompts= and reward=")
    if ppo.estimator == "remax" and not has_reward:
        raise ConfigError("ppo.advantage=remax scores a greedy response to each prompt: give the trainer reward=")
    if chosen := config.data.choice_by_scores:
        raise ConfigError(f"{chosen[0]} chooses among prompts that the run draws; choose them in the loop")
    for name, value in {"curriculum": config.data.curriculum, "mix": config.data.mix}.items():
        if value and not has_prompts:
            raise ConfigError(f"data.{name} orders the run's prompts: give the trainer prompts=")
