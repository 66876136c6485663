"""How good a policy is: its win rate against another policy, or against the references in the data.

    prompts ─▶ both sides' responses ─▶ judge ─▶ win rate with its interval ─▶ judgments.jsonl, summary.json

Source: Stiennon figure 1 (win rates over references); Gao figure 1 (score over √KL).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.algorithm.statistics import Interval
from kedge.config import Config
from kedge.data import room_for_prompt
from kedge.errors import ConfigError
from kedge.evaluation.evaluator import Evaluator
from kedge.evaluation.report import Evaluation, report
from kedge.models import load_tokenizer
from kedge.rewards import RewardSpec
from kedge.runs.load_judge import load_judge
from kedge.runs.load_policy import load_policy, sampling_of
from kedge.runs.load_prompts import load_prompts
from kedge.runs.run import open_run

__all__ = ["EvaluateResult", "run_evaluate"]


@dataclass(frozen=True)
class EvaluateResult:
    """What an evaluation finds.

    Attributes:
        folder: The run's folder.
        win_rate: Share of the prompts at which the policy's response is the better one, ties counting half.
        summary: What `summary.json` holds.
    """

    folder: Path
    win_rate: Interval
    summary: dict[str, Any]


def run_evaluate(
    config: Config, *, prompts: Sequence[Any] | None = None, judge: RewardSpec | None = None
) -> EvaluateResult:
    """Let a judge compare `config.model` with `config.evaluate.against`, or with the references in the data.

    Responses are sampled as `config.generate` says, one per prompt. The KL is that of responses at
    `rollout.temperature`, as in training.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows that take the place of `config.data.prompts`.
        judge: A function or reward model that takes the place of `config.evaluate.judge`.

    Raises:
        KedgeError: What is missing, cannot be read or does not fit, in one line, before anything is sampled.
    """
    settings, trust = config.evaluate, config.runtime.trust_remote_code
    if settings.frontier and settings.against is None:
        raise ConfigError("evaluate.frontier needs evaluate.against: the policy that the KL is measured from")
    run = open_run(config, "evaluate", given={"data.prompts": prompts, "evaluate.judge": judge})
    policy = load_policy(str(config.model), config, run)
    against = None if settings.against is None else load_policy(settings.against, config, run)
    for source in settings.frontier:
        load_tokenizer(source, trust_remote_code=trust)  # a misspelt one stops here, not after the first sampling
    sampling = sampling_of(config)
    room = room_for_prompt([policy.model.context_length], sampling.max_new_tokens)
    questions = load_prompts(config, run, policy.tokenizer, room=room, prompts=prompts)[: settings.num_prompts]
    evaluator = Evaluator(
        questions,
        reader=policy,
        judge=load_judge(judge, config, run, policy.tokenizer),
        sampling=sampling,
        kl_temperature=config.rollout.temperature,
        template=config.data.template,
        confidence=settings.confidence,
        num_resamples=settings.num_bootstrap,
    )
    evaluator.judge.check_columns(list(questions[0].columns))

    with run.started():
        opponent = evaluator.references() if against is None else evaluator.sample(against)
        first = evaluator.compare(policy, opponent, against)
        frontier = (load_policy(source, config, run) for source in settings.frontier)
        others = [evaluator.compare(further, opponent, against) for further in frontier]
    evaluation = Evaluation(evaluator, first, opponent, settings.against or "references", others)
    summary = report(evaluation, run.folder, plots=config.runtime.plots)
    return EvaluateResult(run.folder, evaluation.win_rate(first), summary)
