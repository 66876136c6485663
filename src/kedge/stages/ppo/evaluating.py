"""Evaluation during PPO: responses to held-out prompts, scored as in training and judged against those of the start.

held-out prompts ─▶ rollout ─▶ scores, KL, length ─▶ eval/… in metrics.jsonl and evaluations.jsonl
└─▶ judge: better than the start's response? ─▶ eval/win_rate
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kedge.algorithm.experience import Rollout
from kedge.errors import NonfiniteScoreError, UnscoredError
from kedge.logs.experience_metrics import describe_experience
from kedge.rewards import Responses
from kedge.rewards.score import describe_responses, score_rollout
from kedge.stages.evaluation.judges import Judge, ScoredResponses
from kedge.stages.ppo.log import PpoLog
from kedge.stages.ppo.steps import PpoSteps
from kedge.training.checkpoint.run_state import Stateful
from kedge.training.checkpoint.state import random_state, restore_random_state
from kedge.training.controllers import Coefficients
from kedge.training.runtime import stream_seed

__all__ = ["HeldOutEvaluation"]

FIGURES = {
    "eval/score": "reward/score_mean",
    "eval/kl": "objective/kl",
    "eval/length": "response/length",
    "eval/eos_rate": "response/eos_rate",
}
"""The metrics of an evaluation, and those of a training batch that they correspond to."""


class HeldOutEvaluation:
    """Evaluates the policy on the held-out prompts every `ppo.eval_every` updates, at the start and at the end.

    The same random numbers are used each time, so that only the policy differs, and the global generators are restored
    afterwards, so that training does not depend on it.

    Args:
        steps: The run's steps.
        log: The run's log.
    """

    def __init__(self, steps: PpoSteps, log: PpoLog) -> None:
        self._steps, self._log, self._roles = steps, log, steps.roles
        evaluation = steps.config.ppo
        self._every, self._prompts = evaluation.eval_every or 0, self._roles.held_out[: evaluation.eval_num_prompts]
        self._start: dict[str, Any] | None = None

    @property
    def state(self) -> dict[str, Stateful]:
        """What is saved and resumed with the run: nothing for a run that does not evaluate."""
        return {"evaluation": self} if self._every else {}

    def measure(self, update: int, coefficients: Coefficients) -> dict[str, float]:
        """The metrics of the policy after an update, if an evaluation is due; they are also logged by themselves.

        Args:
            update: Updates that the policy has completed; 0 is the start.
            coefficients: The current coefficients.

        Raises:
            RewardError: A reward or the judge failed.
        """
        last = self._steps.config.ppo.num_updates
        if not self._every or (update % self._every and update != last):
            return {}
        started, generators = time.perf_counter(), random_state()
        try:
            metrics = self._measure(update, coefficients)
        finally:
            restore_random_state(*generators)
        self._log.evaluations.write(update, metrics)
        return {**metrics, "time/evaluation": time.perf_counter() - started}

    def _measure(self, update: int, coefficients: Coefficients) -> dict[str, float]:
        roles, config, prompts = self._roles, self._steps.config, self._prompts
        rollout = self._steps.roll_out(prompts, range(len(prompts)), "evaluation", policy_version=update)
        limit, seed = config.rollout.max_new_tokens, stream_seed(config.runtime.seed, "evaluation reward")
        metrics = {} if roles.judge is None else self._win_rate(roles.judge, self._describe(rollout, limit, seed))
        try:
            scored = score_rollout(
                rollout,
                prompts,
                roles.reward,
                roles.tokenizer,
                max_new_tokens=limit,
                missing_eos=roles.missing_eos,
                seed=seed,
            )
        except (UnscoredError, NonfiniteScoreError) as error:  # not an error, because nothing is trained on it
            self._log.progress.say(f"The evaluation after update {update} has no score: {error}")
            return metrics
        found = describe_experience(self._steps.collect(scored, coefficients))
        metrics |= {name: found[source] for name, source in FIGURES.items() if source in found}
        return metrics | {f"eval/{name}": mean for name, mean in scored.terms.term_means().items()}

    def _win_rate(self, judge: Judge, responses: Responses) -> dict[str, float]:
        """The share of prompts whose response is better than the start's; ties count half."""
        ours = ScoredResponses(responses, judge.score(responses))
        if self._start is None:
            texts = {name: getattr(responses, name) for name in ("completions", "response_ids", "stopped")}
            self._start = {"texts": texts, "scores": ours.scores}
            return {"eval/win_rate": 0.5}
        theirs = ScoredResponses(replace(responses, **self._start["texts"]), self._start["scores"])
        wins = judge.compare(ours, theirs).wins
        decided = [win for win in wins if win is not None]
        return {"eval/win_rate": sum(decided) / len(decided)} if decided else {}

    def _describe(self, rollout: Rollout, limit: int, seed: int) -> Responses:
        return describe_responses(rollout, self._prompts, self._roles.tokenizer, max_new_tokens=limit, seed=seed)

    def state_dict(self) -> dict[str, Any]:
        """The start's responses, which later ones are compared with."""
        return {"start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._start = state["start"]
