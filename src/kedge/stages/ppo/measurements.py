"""Measures a run on fixed prompts and on held-out prompts, and checks its critic.

held-out prompts ─▶ rollout ─▶ scores, KL, length ─▶ eval/… in metrics.jsonl and evaluations.jsonl
                        └─▶ judge: better than the start's response? ─▶ eval/win_rate

prompts ─▶ responses ─▶ prefixes ─▶ continuations ─▶ scores ─▶ returns to go ─▶ critic/… and critic_checks.jsonl
                            └─────▶ V(prefix)

Source: VinePPO (arXiv 2410.01679), section 7.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kedge.algorithm.advantages import RewardToGo
from kedge.algorithm.experience import Experience, Rollout
from kedge.algorithm.prefix_test import PrefixTest, prefix_test
from kedge.data import Prompt
from kedge.logs.critic_checks import check_line, check_row, describe_check
from kedge.logs.experience_metrics import describe_experience, describe_samples, without_scores
from kedge.logs.json_lines import Sample
from kedge.rewards import Responses
from kedge.rewards.score import ScoredRollout, describe_responses
from kedge.rollout.continuations import sample_continuations
from kedge.stages.judges import Judge, ScoredResponses
from kedge.stages.ppo.log import Event, PpoLog
from kedge.stages.ppo.trainer import Trainer
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.runtime import Stopwatch, stream, stream_seed
from kedge_base.errors import NonfiniteScoreError, UnscoredError
from kedge_base.generators import kept_random_state
from kedge_base.intervals import score_interval

FIGURES = {
    "eval/score": "reward/score_mean",
    "eval/kl": "objective/kl",
    "eval/length": "response/length",
    "eval/eos_rate": "response/eos_rate",
}
"""Metrics of an evaluation, with the corresponding metrics of a training batch."""

TIMES = 10
"""Number of times the fixed prompts are sampled in a run, not counting the start."""

MIN_INTERVAL = 5
"""Minimum number of updates between two samplings, because sampling a few rows takes as long as sampling many."""


class Measurements:
    """Measures policy and critic at the start of a run, every few updates, and at the end.

    The same random numbers are used each time, so that only the weights differ, and the global generators are restored
    afterwards, so that training does not depend on it.

    Args:
        trainer: The run's trainer.
        log: The run's log.
        loop: The run's loop, which keeps the best update.
    """

    def __init__(self, trainer: Trainer, log: PpoLog, loop: CheckpointedLoop) -> None:
        config = trainer.run_settings.config
        self._config = config.ppo
        self._trainer = trainer
        self._log = log
        self._loop = loop
        self._left = self._at_start(loop.done == 0)
        self._measured: dict[str, float] = {}
        self._last = config.ppo.num_updates
        self._fixed = trainer.roles.prompts.train[: config.runtime.num_fixed_prompts]
        self._fixed_every = max(MIN_INTERVAL, math.ceil(self._last / TIMES))
        self._held_out = trainer.roles.prompts.held_out[: self._config.eval_every.num_prompts]
        inputs = trainer.run.fingerprint
        self._compared = {
            "texts": sha256("\0".join(prompt.text for prompt in self._held_out).encode()).hexdigest(),
            "prompts": inputs.get("data.eval_prompts"),
            "judge": [config.evaluate.judge, inputs.get("evaluate.judge")],
            "reward": [trainer.run.rewards, inputs.get("reward"), inputs.get("reward.code")],
        }
        self._start: dict[str, Any] | None = None
        self._start_scores: list[list[float]] = []
        loop.register("evaluation", self, optional=True)

    def at_start(self, clock: Stopwatch) -> None:
        """Measure the untrained policy and critic, once.

        Called after the first responses are scored: the score for a missing stop token can depend on them.
        """
        if not self._left:
            return
        with clock.paused():
            while self._left:  # if a reward or the judge fails, the next call continues there
                self._measured |= self._left[0](0)
                del self._left[0]
            self._loop.observe(self._loop.done, self._measured, is_start=True)
            if self._measured:
                self._log.metrics.show(0, self._measured)

    def _at_start(self, is_start: bool) -> list[Callable[[int], Mapping[str, float]]]:
        return [self._sample_fixed, self._evaluated, self._checked] if is_start else []

    def metrics(self, update: int) -> dict[str, float]:
        """Make the measurements that are due after an update; they are also logged separately.

        Raises:
            RewardError: A reward or the judge failed.
        """
        return {} if self._left else {**self._evaluated(update), **self._checked(update)}

    def after_update(self, event: Event) -> None:
        """Sample the fixed prompts if this is due."""
        if self._is_due(event.update, self._fixed_every):
            self._sample_fixed(event.update)

    def at_end(self, update: int) -> None:
        """Measure a run that ends early after this update, unless it has been measured there.

        Raises:
            RewardError: A reward or the judge failed.
        """
        self._last = update
        if update % (self._config.eval_every.updates or 1):
            self._loop.observe(update, self._evaluated(update))
        if update % (self._config.critic_check.every or 1):
            self._checked(update)
        if update % self._fixed_every:
            self._sample_fixed(update)

    def state_dict(self) -> dict[str, Any]:
        """The initial policy's responses to held-out prompts and their scores, to compare later ones with.

        `is_start` is true if it has not been measured yet, because all updates so far were dropped.
        """
        return {
            "is_start": bool(self._left),
            "start": self._start,
            "scores": self._start_scores,
            "compared": self._compared,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, except for entries from other prompts, or from a different judge or reward."""
        self._left = self._at_start(state.get("is_start", False))
        known = state["compared"]
        changed = {name for name, value in self._compared.items() if known[name] != value}
        wins_changed = changed - {"reward"}
        scores_changed = changed - {"judge"}
        if state["start"] and wins_changed <= {"judge"}:  # another judge has to score the same responses
            self._start = {"texts": state["start"]["texts"]} if wins_changed else state["start"]
        if not scores_changed:
            self._start_scores = state["scores"]
        best = self._loop.best
        if best is not None and best.metric.startswith("eval/"):
            values_changed = wins_changed if best.metric == "eval/win_rate" else scores_changed
            if values_changed:
                best.start_again()

    def _sample_fixed(self, update: int) -> Mapping[str, float]:
        """Sample responses to a few fixed prompts, and log them, to show how the policy changes."""
        prompts = self._fixed
        if not prompts:
            return {}
        with kept_random_state():
            self._trainer.publish(update)
            trainer = self._trainer.unscheduled()
            rollout = trainer.sample(prompts, "fixed prompts", groups=range(len(prompts)), policy_version=update)
            try:
                scored = trainer.score(rollout, prompts, "reward", update)
            except (UnscoredError, NonfiniteScoreError):  # not an error, because nothing is trained on it
                return {}
            samples = _described(trainer, scored, trainer.evaluate(scored))
            numbered = zip(scored.rollout.group.tolist(), samples, strict=True)
            self._log.samples.write(update, [replace(sample, fixed=number) for number, sample in numbered])
        return {}

    def _is_due(self, update: int, every: int | None) -> bool:
        return bool(every) and (update % every == 0 or update == self._last)

    def _evaluated(self, update: int) -> dict[str, float]:
        """Evaluate on held-out prompts if this is due, and return the metrics."""
        return self._timed("evaluation", self._config.eval_every.updates, self._evaluate, update)

    def _checked(self, update: int) -> dict[str, float]:
        """Check the critic if this is due, and return the metrics."""
        return self._timed("critic_check", self._config.critic_check.every, self._check_critic, update)

    def _timed(
        self, name: str, every: int | None, measure: Callable[[int], dict[str, float]], update: int
    ) -> dict[str, float]:
        if not self._is_due(update, every):
            return {}
        started = time.perf_counter()
        with kept_random_state():
            metrics = measure(update)
        return metrics | {f"time/{name}": time.perf_counter() - started}

    def _evaluate(self, update: int) -> dict[str, float]:
        """Evaluate, log the metrics with the responses and their scores, and return the metrics."""
        self._trainer.publish(update)
        trainer = self._trainer.unscheduled()
        prompts = self._held_out
        rollout = trainer.sample(prompts, "evaluation", groups=range(len(prompts)), policy_version=update)
        judge = trainer.roles.prompts.judge
        metrics = {} if judge is None else self._win_rate(update, judge, rollout)
        try:
            scored = trainer.score(rollout, prompts, "evaluation reward")
        except (UnscoredError, NonfiniteScoreError) as error:  # not an error, because nothing is trained on it
            self._log.progress.say(f"The evaluation after update {update} has no score: {error}")
            self._log.evaluations.append(update, metrics)
            return metrics
        experience = trainer.evaluate(scored)
        has_scores = not trainer.roles.reward.is_empty
        found = describe_experience(experience)
        # The KL has the same coefficient and estimator in every evaluation, wherever training penalizes it.
        cost = trainer.settings.ppo.kl_coef * found.get("objective/kl", 0.0)
        metrics["eval/total"] = found["reward/score_mean"] - cost
        found = found if has_scores else without_scores(found)
        metrics |= {name: found[source] for name, source in FIGURES.items() if source in found}
        samples = _described(trainer, scored, experience)
        responses = [
            {
                **{"number": number, "prompt": each.prompt, "completion": each.response},
                **{"score": each.score, "length": len(each.tokens)},
                **({} if each.reason is None else {"reason": each.reason}),
            }
            for number, each in zip(scored.rollout.group.tolist(), samples, strict=True)
        ]
        if has_scores:
            self._compare(update, "score", [[each.score] for each in samples if each.score is not None])
        else:
            self._compare(update, "KL to the teacher", [[kl] for kl in experience.kl.sum(-1).tolist()])
        metrics |= {f"eval/{name}": figure for name, figure in scored.terms.metrics().items()}
        self._log.evaluations.append(update, {**metrics, "responses": responses})
        return metrics

    def _compare(self, update: int, name: str, scores: list[list[float]]) -> None:
        """Store the scores, or the metric in their place, at the start; at the end, print both."""
        if update == 0:
            self._start_scores = scores
        elif update == self._last and scores and self._start_scores:
            start, end = (score_interval(each) for each in (self._start_scores, scores))
            self._log.progress.say(f"held-out prompts: {name} {start} at the start, {end} at the end")

    def _win_rate(self, update: int, judge: Judge, rollout: Rollout) -> dict[str, float]:
        """Compute the share of prompts with a better response than the initial policy's; ties count half."""
        settings = self._trainer.run_settings
        responses: Responses = describe_responses(
            rollout,
            self._held_out,
            self._trainer.roles.tokenizer,
            max_new_tokens=settings.rollout.max_new_tokens,
            seed=stream_seed(settings.seed, "evaluation reward"),
            stop_tokens=self._trainer.roles.stop_tokens.ids,
        )
        if update == 0 and self._start:
            return {"eval/win_rate": 0.5}  # this evaluation is repeated, because the reward failed after the judge
        ours = judge.score(responses)
        if self._start is None:
            names = ("completions", "response_ids", "stopped", "turns", "preceding")
            texts = {name: getattr(responses, name) for name in names}
            self._start = {"texts": texts, "scores": ours.scores}
            return {"eval/win_rate": 0.5}
        first = replace(responses, **self._start["texts"])
        if "scores" not in self._start:
            self._start["scores"] = judge.score(first).scores
        theirs = ScoredResponses(first, self._start["scores"])
        wins = judge.compare(ours, theirs).wins
        decided = [win for win in wins if win is not None]
        return {"eval/win_rate": sum(decided) / len(decided)} if decided else {}

    def _check_critic(self, update: int) -> dict[str, float]:
        self._trainer.publish(update)
        num_prompts, num_prefixes, num_continuations = self._config.critic_check.size
        try:
            sample = sample_prefixes(
                self._trainer,
                self._trainer.roles.prompts.held_out[:num_prompts],
                num_prefixes=num_prefixes,
                num_continuations=num_continuations,
                policy_version=update,
            )
            test = sample.test()
        except (UnscoredError, NonfiniteScoreError) as error:  # not an error, because nothing is trained on it
            self._log.progress.say(f"The critic was not checked after update {update}: {error}")
            return {}
        self._log.critic_checks.append(update, check_row(test, sample.listed()))
        self._log.progress.say(check_line(test, update))
        return describe_check(test)


def _described(trainer: Trainer, scored: ScoredRollout, experience: Experience) -> list[Sample]:
    """Describe the responses that have a score, with their values per token."""
    return describe_samples(
        experience,
        scored.prompts,
        trainer.roles.tokenizer,
        count=len(scored.prompts),
        reasons=scored.reasons,
        has_scores=not trainer.roles.reward.is_empty,
    )


@dataclass(frozen=True)
class PrefixSample:
    """Prefixes with the returns of their continuations.

    Attributes:
        prompts: Number of each prefix's prompt.
        tokens: Length of each prefix.
        lengths: Length of the response that each prefix was cut from.
        values: The critic's value of the state after each prefix.
        returns: Return to go of each continuation; NaN where it has no score.
        prompt_returns: Mean return of other responses to the prompt.
    """

    prompts: Int[Tensor, " prefixes"]
    tokens: Int[Tensor, " prefixes"]
    lengths: Int[Tensor, " prefixes"]
    values: Float[Tensor, " prefixes"]
    returns: Float[Tensor, "prefixes continuations"]
    prompt_returns: Float[Tensor, " prefixes"]

    @property
    def num(self) -> int:
        """The number of prefixes."""
        return len(self.values)

    @classmethod
    def joined(cls, parts: Sequence[PrefixSample]) -> PrefixSample:
        """Join samples of different prompts."""
        return cls(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def test(self) -> PrefixTest:
        """Compute the figures of `prefix_test`.

        Raises:
            UnscoredError: No prefix has enough scored continuations.
        """
        if not self.num:
            raise UnscoredError("no response of two or more tokens has enough scored continuations")
        return prefix_test(self.values, self.returns, self.prompt_returns, self.prompts)

    def listed(self) -> list[dict[str, float]]:
        """List the prefixes, with the mean returns of their continuations."""
        columns = {
            "prompt": self.prompts, "tokens": self.tokens, "of": self.lengths, "value": self.values,
            "returns": self.returns.nanmean(-1), "prompt_return": self.prompt_returns,
        }  # fmt: skip
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]


@torch.no_grad()
def sample_prefixes(
    trainer: Trainer,
    prompts: Sequence[Prompt],
    *,
    num_prefixes: int,
    num_continuations: int,
    policy_version: int = 0,
    first_prompt: int = 0,
) -> PrefixSample:
    """Cut responses at random tokens, continue each prefix, and compute the return to go that PPO's critic should
    predict.

    The return to go uses the run's rewards: scores, the penalty for a missing stop token, the KL of the tokens after
    the prefix if it is part of the reward, and γ. The random numbers depend on the run's seed only.

    Args:
        trainer: Samples, scores and evaluates as in training.
        prompts: The prompts.
        num_prefixes: Number of prefixes per prompt; a response of one token gets no prefix.
        num_continuations: Number of continuations per prefix, and of additional responses per prompt.
        policy_version: Number of updates that the policy has completed.
        first_prompt: Number of the first prompt, for prompts that are sampled in several parts.

    Raises:
        RewardError: A reward failed.
    """
    settings = trainer.settings
    name = ("critic check", first_prompt)
    groups = [group for group in range(len(prompts)) for _ in range(num_prefixes)]
    sources = trainer.sample(prompts, *name, groups=groups, policy_version=policy_version)
    lengths = sources.response_lengths.cpu()
    draws = torch.rand(len(groups), generator=stream(settings.seed, *name, "cuts"), dtype=torch.float64)
    cuts = 1 + (draws * (lengths - 1)).long()
    cut_rows = (lengths > 1).nonzero().squeeze(1)
    # Additional responses to a prompt are continuations of an empty prefix; their rows come first.
    rows = torch.cat([torch.arange(len(prompts)) * num_prefixes, cut_rows]).repeat_interleave(num_continuations)
    starts = torch.cat([torch.zeros(len(prompts), dtype=torch.long), cuts[cut_rows]]).repeat_interleave(
        num_continuations
    )
    whole = sample_continuations(
        trainer.roles.engine,
        sources,
        rows.tolist(),
        starts.tolist(),
        seeds=[stream_seed(settings.seed, *name, "continuation", number) for number in range(len(rows))],
        max_new_tokens=settings.rollout.max_new_tokens,
        temperature=settings.rollout.temperature,
        room=trainer.roles.actor_critic.policy.sampling_length,
    )
    returns, values = (
        each.gather(1, starts[:, None]).view(-1, num_continuations)
        for each in _returns_and_values(trainer, whole, prompts)
    )
    prompt_returns = returns[: len(prompts)].nanmean(-1)
    to_go = returns[len(prompts) :]
    prompt = sources.group.cpu()[cut_rows]
    kept = ((~to_go.isnan()).sum(-1) >= 2) & ~prompt_returns[prompt].isnan()
    # The continuations of a prefix share its value, up to rounding.
    scored = (~to_go.isnan()).int().argmax(-1, keepdim=True)
    value = values[len(prompts) :].gather(1, scored).squeeze(1)
    columns = prompt + first_prompt, cuts[cut_rows], lengths[cut_rows], value, to_go, prompt_returns[prompt]
    return PrefixSample(*(column[kept] for column in columns))


def _returns_and_values(
    trainer: Trainer, rollout: Rollout, prompts: Sequence[Prompt]
) -> tuple[Float[Tensor, "rows time"], Float[Tensor, "rows time"]]:
    """Compute the return to go and the value at each token, on the CPU; NaN in rows without a score."""
    returns = torch.full(rollout.response_ids.shape, math.nan)
    values = returns.clone()
    try:
        scored = trainer.score(rollout, prompts, "critic check", "reward")
    except UnscoredError:  # other prompts, which are sampled in another part, may have scores
        return returns, values
    # Prefixes end within a turn, where nothing is discounted if a turn is one action.
    ppo = trainer.settings.ppo
    gamma = 1.0 if ppo.resolved_credit == "turn" else ppo.gamma
    experience = trainer.evaluate(scored, advantage=RewardToGo(gamma))
    assert experience.values is not None, "a run without a critic is refused"
    known = torch.tensor([score is not None for score in scored.terms.scores])
    returns[known] = experience.returns.float().cpu()
    values[known] = experience.values.float().cpu()
    return returns, values
