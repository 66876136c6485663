"""Examines a run with the doctor's rules, and prints the findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kedge_base.texts import counted, printable
from kedge_inspect.abroad.settings import in_words_of, without_own_words
from kedge_inspect.doctor import (
    critic,
    episodes,
    evaluation,
    hacking,
    kl,
    responses,
    rewards,
    sampling,
    steps,
    supervised,
)
from kedge_inspect.doctor.rule import (
    DOCS,
    SCHEDULES,
    TRAINED,
    Advice,
    Change,
    Direction,
    Finding,
    Gap,
    Rule,
    Severity,
    Symptom,
    no_advice,
    severity_rank,
)
from kedge_inspect.page.looks import look_of
from kedge_inspect.record import RunRecord

RULES: tuple[Rule, ...] = (
    sampling.rollout_too_old,
    sampling.sampler_ratios_wide,
    sampling.sampler_trainer_mismatch,
    steps.not_finite,
    responses.rows_dropped,
    rewards.reward_function_failing,
    episodes.tools_fail,
    episodes.tools_unused,
    episodes.episodes_time_out,
    episodes.answers_changed,
    kl.no_exploration,
    steps.steps_too_large,
    kl.entropy_rising,
    rewards.groups_of_one,
    rewards.groups_without_spread,
    rewards.reward_flat,
    responses.duplicated_prompts,
    rewards.responses_unscored,
    kl.beta_too_small,
    rewards.prompts_memorized,
    hacking.proxy_up_judge_down,
    hacking.hacking_by_not_stopping,
    rewards.group_std_blows_up,
    rewards.length_bias,
    responses.stops_at_once,
    hacking.hacking_by_length,
    hacking.hacking_by_repetition,
    kl.beta_too_large,
    steps.steps_too_small,
    steps.first_update_too_large,
    kl.entropy_collapse,
    kl.kl_exploding,
    kl.teacher_not_approached,
    responses.too_few_eos,
    responses.truncated_at_cap,
    critic.value_scale_mismatch,
    critic.value_clip_binding,
    critic.dead_critic,
    critic.idle_critic,
    critic.critic_worse_than_prompt_mean,
    critic.critic_blind_within_prompts,
    rewards.score_falling,
    rewards.reward_saturated,
    steps.steps_skipped,
    steps.gradient_spikes,
    supervised.loss_rising,
    supervised.reward_model_at_chance,
    supervised.reward_model_barely_better_than_length,
    supervised.critic_explains_nothing,
    supervised.overfitting,
    evaluation.judge_contradicts_itself,
    evaluation.unjudged_responses,
    evaluation.responses_cut_off,
    evaluation.responses_alike,
    evaluation.mostly_ties,
    evaluation.judge_prefers_length,
    evaluation.win_rate_undecided,
    sampling.memory_growing,
    sampling.reward_dominates_time,
    sampling.one_side_waits,
)
"""All rules. Causes come before their consequences: findings of equal severity are reported in this order."""

BROKEN_BY_STEPS = {
    rule.name
    for rule in (
        responses.stops_at_once,
        kl.entropy_collapse,
        kl.kl_exploding,
        responses.too_few_eos,
        rewards.score_falling,
    )
}
"""Rules about damage to a policy by too large steps. If one of them is serious, so are the steps, unless something else
explains it.
"""

INDIRECT = {
    rule.name: place
    for place, rule in enumerate(
        (
            critic.value_scale_mismatch,
            critic.dead_critic,
            critic.critic_worse_than_prompt_mean,
            supervised.reward_model_at_chance,
            supervised.critic_explains_nothing,
            kl.beta_too_large,
            kl.teacher_not_approached,
            rewards.reward_flat,
        ),
        start=1,
    )
}
"""Rules that detect that something is not learned, which has many causes, instead of the effect of a field's value; the
most direct first, by place. The advice of other rules takes precedence.
"""

UNTIL = {"running": " so far", "stopped": " before it stopped"}

STYLES: dict[Severity, str] = {"serious": "bold red", "warning": "bold yellow", "note": "bold cyan"}


@dataclass(frozen=True)
class Examination:
    """The result of all checks of a run.

    Attributes:
        findings: The problems, most severe first.
        num_checks: Number of rules that could judge the run.
        gaps: The rules that could not, with reasons; those for other stages or settings are left out.
        unjudged: The reasons, joined; empty without gaps.
        until: ` so far` or ` before it stopped`, for a run that has not finished.
        ended_early: The reason why the run ended before its last update; empty if it did not.
    """

    findings: tuple[Finding, ...]
    num_checks: int
    gaps: tuple[Gap, ...] = ()
    unjudged: str = ""
    until: str = ""
    ended_early: str = ""

    @property
    def is_clean(self) -> bool:
        """True if something was checked and nothing is wrong."""
        return self.num_checks > 0 and not self.findings

    @property
    def verdict(self) -> str:
        """One line, such as `nothing wrong in 31 checks; 7 could not be made: 7 need 8 to 12 updates, and the run has
        6`.
        """
        if not self.num_checks:
            return f"nothing was checked: {self.unjudged or 'there are no rules for this stage'}"
        counts = Counter(finding.severity for finding in self.findings)
        parts = [f"{count} {severity if count == 1 or severity == 'serious' else severity + 's'}"
                 for severity, count in counts.items()]  # fmt: skip
        missed = f"; {len(self.gaps)} could not be made: {self.unjudged}" if self.gaps else ""
        return f"{', '.join(parts) or 'nothing wrong'} in {counted(self.num_checks, 'check')}{self.until}{missed}"

    def as_json(self) -> dict[str, Any]:
        """The content of `kedge doctor --json`."""
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "checks": self.num_checks,
            "not_judged": [{"rule": gap.rule, "why": gap.why} for gap in self.gaps],
            "verdict": self.verdict,
            "ended_early": self.ended_early,
        }


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
        advice: Looks up the configuration's text about a field; see `diagnose`.
    """
    # Control's rules are in another package, which may not be installed, and these would judge its logs wrongly.
    general = RULES if record.trainer is None or record.stage in TRAINED else ()
    symptoms = [(each, each.find(record)) for each in look_of(record.stage).rules or general]
    found = {rule.name: (rule, symptom) for rule, symptom in symptoms if symptom is not None}
    movers: _Movers = {}
    evidence = {name: (INDIRECT.get(name, 0), severity_rank(symptom)) for name, (_, symptom) in found.items()}
    made = {
        name: _finding(record, *found[name], movers, advice) for name in sorted(found, key=lambda name: evidence[name])
    }
    findings = _as_severe_as_consequences([made[name] for name in found])
    silent = [rule for rule, symptom in symptoms if symptom is None and rule.concerns(record)]
    gaps = [gap for rule in silent if (gap := rule.gap(record)) is not None]
    return Examination(
        tuple(sorted(findings, key=severity_rank)),
        len(findings) + len(silent) - len(gaps),
        tuple(gaps),
        gaps_in_words(record, gaps),
        UNTIL.get(record.state, ""),
        record.ended_early,
    )


def _as_severe_as_consequences(findings: list[Finding]) -> list[Finding]:
    """Make steps that are too large as severe as the damage they did, so that they are listed first."""
    serious = {found.rule for found in findings if found.severity == "serious"}
    if not serious or not serious <= BROKEN_BY_STEPS:
        return findings
    cause = steps.steps_too_large.name
    return [replace(found, severity="serious") if found.rule == cause else found for found in findings]


_Movers = dict[str, tuple[str, Direction]]
"""For each field, the first rule that raises or lowers it, and the direction."""


def _finding(run: RunRecord, rule: Rule, symptom: Symptom, movers: _Movers, advice: Advice) -> Finding:
    """Build the finding; drop changes without effect, and changes that a rule with better evidence contradicts.

    Args:
        run: The run.
        rule: The rule.
        symptom: Its symptom.
        movers: The changes of rules with better evidence; this rule's are added.
        advice: Looks up the configuration's text about a field; see `diagnose`.
    """
    said = without_own_words(symptom.advice) if run.trainer else symptom.advice
    steps = [said] * bool(said)
    changes: list[Change] = []
    against = ""
    for each in (remedy(run) for remedy in symptom.remedies):
        if each.value is not None and each.value == run.setting(each.field):
            continue
        field = each.field.removeprefix(SCHEDULES)
        if each.direction != "switch":
            mover, direction = movers.setdefault(field, (rule.name, each.direction))
            if direction != each.direction:
                against = against or mover
                continue
        text = in_words_of(run, each) if run.trainer else each.text
        if not text:
            continue
        why = "" if run.trainer else advice(field, each.direction)
        steps.append(f"{text} (if {each.direction.replace('_', ' ')}: {why})" if why else text)
        changes.append(each)
    return Finding(
        rule.name,
        symptom.severity,
        symptom.seen,
        rule.means,
        changes[0].field.removeprefix(SCHEDULES) if changes else "",
        changes[0].direction if changes else "switch",
        "; ".join(steps) or (against and f"follow {against} first"),
        f"{DOCS}#{rule.name}",
        {each.field: each.value for each in changes if each.value is not None},
    )


def gaps_in_words(run: RunRecord, gaps: Sequence[Gap]) -> str:
    """Describe gaps in one line: `3 need 8 to 12 updates, and the run has 6; nothing was held out
    (data.eval_fraction)`.
    """
    short = [gap.updates for gap in gaps if gap.updates]
    lacking = [gap.needs for gap in gaps if gap.needs]
    reasons = dict.fromkeys(gap.reason for gap in gaps if gap.reason)
    counts = {reason: sum(gap.reason == reason for gap in gaps) for reason in reasons}
    return "; ".join(
        ([_too_short(run, short)] if short else [])
        + ([f"{len(lacking)} need{'s' * (len(lacking) == 1)} {', '.join(dict.fromkeys(lacking))}"] if lacking else [])
        + [f"{count} because {reason}" if len(gaps) > 1 else reason for reason, count in counts.items()]
    )


def _too_short(run: RunRecord, needed: Sequence[int]) -> str:
    high = max(needed)
    span = f"{high}" if min(needed) == high else f"{min(needed)} to {high}"
    need = f"{len(needed)} need{'s' * (len(needed) == 1)} {span} {look_of(run.stage).unit}s"
    has = len(run.metrics)
    return f"{need}, and the run has {has}" if has < high else f"{need} with their metrics, and the log has fewer"


def merge(parts: Iterable[Examination]) -> Examination:
    """Merge the examinations of several runs: findings by severity, counts added, each reason once."""
    examined = list(parts)
    if len(examined) == 1:
        return examined[0]
    findings = sorted((finding for each in examined for finding in each.findings), key=severity_rank)
    return Examination(
        tuple(findings),
        sum(each.num_checks for each in examined),
        tuple(gap for each in examined for gap in each.gaps),
        "; ".join(dict.fromkeys(each.unjudged for each in examined if each.unjudged)),
        ended_early="; ".join(each.ended_early for each in examined if each.ended_early),
    )


def one_line(finding: Finding) -> str:
    """Format severity, rule and figures in one line, for a run's log."""
    return printable(f"{finding.severity}: {finding.rule}: {finding.seen}")


def print_examinations(examined: Mapping[str, Examination], console: Console) -> None:
    """Print the verdict on each run, and each finding with its figures, meaning, remedies and documentation link.

    Args:
        examined: The runs that were examined, by name.
        console: Where to print.
    """
    for name, examination in examined.items():
        console.print(Text(printable(f"{'✓ ' if examination.is_clean else ''}{name}: {examination.verdict}")))
        if examination.ended_early:
            console.print(Text(printable(f"ended early: {examination.ended_early}")))
    for finding in merge(examined.values()).findings:
        console.print()
        console.print(Text.assemble((finding.severity, STYLES[finding.severity]), "  ", (finding.rule, "bold")))
        console.print(Padding(_table(finding), (0, 0, 0, 2)))


def _table(finding: Finding) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, text in list(finding.as_json().items())[2:]:
        if text:
            table.add_row(label, Text(printable(text)))
    return table
