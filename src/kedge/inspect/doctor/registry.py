"""The list of all rules, and the diagnosis of a run by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kedge.inspect.doctor import (
    agreement,
    ahead,
    control,
    cost,
    critic,
    critic_check,
    data,
    evaluation,
    exploration,
    first_update,
    fitted_critic,
    groups,
    hacking,
    kl,
    numerics,
    responses,
    rewards,
    steps,
    supervised,
)
from kedge.inspect.doctor.examination import Examination
from kedge.inspect.doctor.finding import DOCS, Advice, Finding, Rule, Symptom, no_advice, severity_rank
from kedge.inspect.doctor.needs import gaps_in_words
from kedge.inspect.record import RunRecord

__all__ = ["RULES", "diagnose", "examine", "severity_rank"]

RULES: tuple[Rule, ...] = (
    agreement.STALE_ROLLOUTS,
    ahead.ROLLOUT_TOO_OLD,
    agreement.SAMPLER_TRAINER_MISMATCH,
    agreement.SAMPLING_NOT_MIRRORED,
    numerics.NOT_FINITE,
    data.ROWS_DROPPED,
    rewards.REWARD_FUNCTION_FAILING,
    kl.KL_SIGN_FLIPPED,
    kl.KL_NEGATIVE,
    steps.STEPS_TOO_LARGE,
    critic.WHITENING_CONSTANT_BATCH,
    exploration.ENTROPY_RISING,
    groups.GROUPS_WITHOUT_SPREAD,
    rewards.REWARD_FLAT,
    exploration.NO_EXPLORATION,
    responses.DUPLICATED_PROMPTS,
    rewards.RESPONSES_UNSCORED,
    kl.BETA_TOO_SMALL,
    hacking.PROXY_UP_JUDGE_DOWN,
    hacking.HACKING_BY_NOT_STOPPING,
    groups.GROUP_STD_BLOWS_UP,
    groups.LENGTH_BIAS,
    responses.STOPS_AT_ONCE,
    hacking.HACKING_BY_LENGTH,
    hacking.HACKING_BY_REPETITION,
    kl.BETA_TOO_LARGE,
    steps.STEPS_TOO_SMALL,
    first_update.FIRST_UPDATE_TOO_LARGE,
    exploration.ENTROPY_COLLAPSE,
    kl.KL_EXPLODING,
    responses.TOO_FEW_EOS,
    responses.TRUNCATED_AT_CAP,
    critic.VALUE_SCALE_MISMATCH,
    critic.VALUE_CLIP_BINDING,
    critic.DEAD_CRITIC,
    critic_check.CRITIC_WORSE_THAN_PROMPT_MEAN,
    critic_check.CRITIC_BLIND_WITHIN_PROMPTS,
    rewards.SCORE_FALLING,
    rewards.REWARD_SATURATED,
    numerics.STEPS_SKIPPED,
    numerics.GRADIENT_SPIKES,
    supervised.LOSS_RISING,
    supervised.REWARD_MODEL_AT_CHANCE,
    supervised.REWARD_MODEL_BARELY_BETTER_THAN_LENGTH,
    fitted_critic.CRITIC_EXPLAINS_NOTHING,
    supervised.OVERFITTING,
    evaluation.JUDGE_CONTRADICTS_ITSELF,
    evaluation.UNJUDGED_RESPONSES,
    evaluation.RESPONSES_CUT_OFF,
    evaluation.RESPONSES_ALIKE,
    evaluation.MOSTLY_TIES,
    evaluation.JUDGE_PREFERS_LENGTH,
    evaluation.WIN_RATE_UNDECIDED,
    cost.MEMORY_GROWING,
    cost.REWARD_DOMINATES_TIME,
    ahead.ONE_SIDE_WAITS,
    control.UPDATES_TOO_LARGE,
    control.RETURN_COLLAPSED,
    control.RETURN_FLAT,
)
"""Causes come before their consequences: findings of equal severity are reported in this order."""

BROKEN_BY_STEPS = {
    rule.name
    for rule in (
        responses.STOPS_AT_ONCE,
        exploration.ENTROPY_COLLAPSE,
        kl.KL_EXPLODING,
        responses.TOO_FEW_EOS,
        rewards.SCORE_FALLING,
    )
}
"""What steps that are too large do to a policy. Where one of them is serious, so are the steps, unless something else
explains it."""

UNTIL = {"running": " so far", "stopped": " before it stopped"}


def diagnose(record: RunRecord, *, advice: Advice = no_advice) -> list[Finding]:
    """Findings on a run, most severe first, causes before their consequences.

    Args:
        record: The run so far.
        advice: Looks up what the configuration documents about a field that is too high or too low.
    """
    return list(examine(record, advice=advice).findings)


def examine(record: RunRecord, *, advice: Advice = no_advice) -> Examination:
    """Findings on a run, and the checks that could not be made.

    Args:
        record: The run so far.
        advice: See `diagnose`.
    """
    # The rules for language models would name fields that a control run does not read.
    rules = [rule for rule in RULES if record.stage != "control" or "control" in rule.needs.stages]
    symptoms = [(rule, rule.check(record)) for rule in rules]
    findings = _as_severe_as_consequences(
        [_finding(rule, symptom, advice) for rule, symptom in symptoms if symptom is not None]
    )
    silent = [rule for rule, symptom in symptoms if symptom is None and rule.needs.concerns(record)]
    gaps = [gap for rule in silent if (gap := rule.needs.gap(rule.name, record)) is not None]
    return Examination(
        tuple(sorted(findings, key=severity_rank)),
        len(findings) + len(silent) - len(gaps),
        tuple(gaps),
        gaps_in_words(record, gaps),
        UNTIL.get(record.state, ""),
        record.ended_early,
    )


def _as_severe_as_consequences(findings: list[Finding]) -> list[Finding]:
    """Steps that are too large, as severe as what they did to the policy, so that they come before it."""
    serious = {found.rule for found in findings if found.severity == "serious"}
    if not serious or not serious <= BROKEN_BY_STEPS:
        return findings
    cause = steps.STEPS_TOO_LARGE.name
    return [replace(found, severity="serious") if found.rule == cause else found for found in findings]


def _finding(rule: Rule, symptom: Symptom, advice: Advice) -> Finding:
    first = symptom.remedies[0] if symptom.remedies else None
    return Finding(
        rule.name,
        symptom.severity,
        symptom.seen,
        rule.means,
        first.field if first else "",
        first.direction if first else "switch",
        "; ".join(_steps(symptom, advice)),
        f"{DOCS}#{rule.name}",
        {remedy.field: remedy.value for remedy in symptom.remedies if remedy.value is not None},
    )


def _steps(symptom: Symptom, advice: Advice) -> Iterator[str]:
    if symptom.advice:
        yield symptom.advice
    for remedy in symptom.remedies:
        why = advice(remedy.field, remedy.direction)
        yield f"{remedy.change} (if {remedy.direction.replace('_', ' ')}: {why})" if why else remedy.change
