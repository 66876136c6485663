"""Score: its improvement, its functions, and the comparison of responses to a prompt."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from kedge_base.texts import counted, names_function
from kedge_inspect.doctor.responses import (
    MORE_PROMPTS,
    MORE_TOKENS,
    has_episodes,
    nearly_all_truncated,
    num_responses,
    num_sampled,
    scores_are_constant,
)
from kedge_inspect.doctor.rule import SMALLER_STEPS, Remedy, Symptom, rule, scale, set_to
from kedge_inspect.doctor.series import (
    MIN_LEVEL,
    MIN_TREND,
    SIGNIFICANT,
    WINDOW,
    Series,
    combine,
    fmt,
    read,
    rose,
    span,
)
from kedge_inspect.doctor.steps import larger_steps
from kedge_inspect.record import RunRecord
from kedge_inspect.resolved import compares_groups, estimator_facts

MANY_LOST = 0.1
"""Share of unscored responses above which the scored ones are a biased sample."""

MANY_UNSCORED = 0.1
MOSTLY_UNSCORED = 0.5
"""Shares of responses deliberately left unscored (the reward returned None) above which the doctor notes it and warns
about it, respectively. With 10% unscored, the standard error of an update's mean grows by 5%; with 50%, by 40%, and
half of the sampling is wasted."""

PATIENCE = 12
"""Updates after which a score should have improved; the demo's has after three."""

FLAT = 0.15
"""Change of the mean score, in standard deviations of the scores, that is negligible; healthy runs gain one or more."""

LOST = 0.5
"""Fall of the mean score, in the same unit, that is not noise, so that the policy is worse than at the start."""

FAR_BELOW = 3.0
"""Fall of the mean score, in standard deviations of the scores, that is a finding even without a trend."""

SATURATED = 0.1
"""Standard deviation of the scores, relative to the start, at which nearly all responses score the same."""


OF_ENVIRONMENT = "reward/environment_given_up"
"""Episodes in which the environment failed."""


@rule(
    "A reward function raises, times out or returns invalid scores, or an environment fails. Retries cost time; the "
    "responses it gives up on are left out of the update or get a substitute score.",
)
def reward_function_failing(run: RunRecord) -> Symptom | None:
    """Seen: `reward/NAME_failures`, `reward/NAME_timeouts` or `reward/NAME_given_up` is above 0.

    Try: Read the function's output and exceptions in `reward.log`, or the environment's; double
    `reward_functions.timeout` if a function's calls time out, else `reward_functions.retries`.

    Threshold: Any failure is a warning; it is serious if a function has given up on more than a tenth of the responses.
    Returning `None` is not a failure: see [responses_unscored](#responses_unscored).
    """
    counters = _counters(run)
    totals = {name: sum(counter.values) for name, counter in counters.items()}
    if not any(totals.values()):
        return None
    scored = num_sampled(run, [row["update"] for row in run.metrics])
    lost = {name: count for name, count in totals.items() if name.endswith("_given_up") and count}
    failed = [name for name, count in totals.items() if name.endswith("_failures") and count]
    slow = any(count for name, count in totals.items() if name.endswith("_timeouts"))
    limit = scale("reward_functions.timeout" if slow else "reward_functions.retries", 2.0)
    is_environment = [*lost, *failed] == [OF_ENVIRONMENT]
    seen = [f"{name}: {totals[name]:g} in {span(counters[name].where(bool).updates)}" for name in failed]
    seen += [f"{name}: {count:g} of {counted(round(scored), 'response')}" for name, count in lost.items()]
    return Symptom(
        "serious" if max(lost.values(), default=0.0) > MANY_LOST * scored else "warning",
        "; ".join(seen or [f"{name}: {count:g}" for name, count in totals.items() if count]),
        () if is_environment else (limit,),
        f"see reward.log for the {'environment' if is_environment else 'function'}'s output and exceptions",
    )


def _counters(run: RunRecord) -> dict[str, Series]:
    """Counts of failed calls, and of responses that a function has given up on, by metric."""
    endings = ("_failures", "_timeouts", "_given_up")
    names = {name for row in run.metrics for name in row if name.startswith("reward/") and name.endswith(endings)}
    return {name: counter for name in sorted(names) if (counter := read(run, name, at_least=1))}


@rule(
    "A reward function returns None, which means no score, for many responses. They are sampled and then left out of "
    "the update, which is smaller and noisier for it.",
    needs=("reward/unscored",),
)
def responses_unscored(run: RunRecord, unscored: Series) -> Symptom | None:
    """Seen: `reward/unscored` is above 0 for reasons other than failures (`reward/NAME_given_up`).

    Try: Check that `None` is meant: the policy learns nothing from such a response, so a bad one needs a low score. If
    it is, raise `rollout.num_prompts`.

    Threshold: A tenth of the responses is a note, half of them a warning: the error of an update's mean grows by 5%
    and 40%.
    """
    failed = _dropped(run)
    none = sum(max(0.0, count - failed[update]) for update, count in unscored.items)
    share = none / num_sampled(run, unscored.updates)
    if share <= MANY_UNSCORED:
        return None
    what = f"the reward returned None for {share:.0%} of the responses"
    if estimator_facts(run).baseline == "greedy":
        what = f"{share:.0%} of the responses are unscored, or the greedy response to their prompt is"
    return Symptom(
        "warning" if share > MOSTLY_UNSCORED else "note",
        f"{what} ({span(unscored.updates)}); the updates learn from the rest",
        (scale("rollout.num_prompts", 1 / max(1 - share, 0.1)),),
        "check that None is meant: the policy learns nothing from such a response, so a bad one needs a low score",
    )


def _dropped(run: RunRecord) -> Mapping[int, float]:
    """Count the responses of each update that were dropped because a function failed on them."""
    dropped = defaultdict[int, float](float)
    if isinstance(run.setting("reward_functions.on_error"), (int, float)):
        return dropped
    judges = {f"reward/{name.removeprefix('score/')}_given_up" for name in run.judges}
    for name, counter in _counters(run).items():
        if name.endswith("_given_up") and name not in judges:
            for update, count in counter.items:
                dropped[update] += count
    return dropped


FORMS = {
    "gsm8k": "`#### N`",
    "gsm8k_strict": "`#### N`",
    "number": "`#### N`",
    "math": "`\\boxed{…}`",
    "choice": "`Answer: B`",
    "tags": "`<think>…</think><answer>…</answer>`",
    "json_schema": "one JSON value and nothing else",
    "code": "a fenced block in Python",
    "code_stdio": "a fenced block in Python",
}
"""The form of an answer that each of kedge's verifiers finds most reliably."""

SAY_THE_FORM = "say in the prompt in which form {name} expects the answer{form}, and give an example"
TOO_HARD = "the prompts are too hard for this model: easier ones, a stronger model, or supervised fine-tuning first"
ADVICE = {
    "no_answer_found": SAY_THE_FORM,
    "no_code": SAY_THE_FORM,
    "raised_NameError": "name in the prompt the function that the tests call, or show one of the tests",
    "wrong_format": SAY_THE_FORM,
    "several_answers": SAY_THE_FORM,
    "wrong_value": TOO_HARD,
    "wrong_text": TOO_HARD,
}
"""Advice by reason, as written in the metric's name."""

CUT_OFF = "cut_off"
MANY_CUT = 0.1
"""Share of responses cut off before an answer from which a higher limit is worth the time."""

MOST_NAMED = 4
"""Maximum number of reasons that are named, the most frequent first."""


def _reasons(run: RunRecord) -> Symptom:
    """The verdicts of the last quarter of the run, with remedies; empty if no reward gives reasons."""
    rows = [row for row in run.metrics if any(name.startswith("verdict/") for name in row)]
    rows = rows[-max(1, len(rows) // 4) :]
    judges = {name.removeprefix("score/") for name in run.judges}
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    for metric in {metric for row in rows for metric in row if metric.startswith("verdict/")}:
        _, name, reason = metric.split("/", 2)
        if name not in judges:
            shares[name][reason] = sum(row.get(metric) or 0.0 for row in rows) / len(rows)
    seen = []
    advice: dict[str, None] = {}
    for name, found in sorted(shares.items()):
        common = sorted(found, key=lambda reason: (-found[reason], reason))[:MOST_NAMED]
        words = [f"{found[reason]:.0%} {_in_words(run, reason)}" for reason in common]
        seen.append(f"{name}: " * (len(shares) > 1) + ", ".join(words))
        form = f", {FORMS[name]}" if name in FORMS else ""
        helpful = [ADVICE[reason] for reason in common if reason in ADVICE]
        advice |= dict.fromkeys(each.format(name=name, form=form) for each in helpful[:1])
    is_cut = any(found.get(CUT_OFF, 0.0) >= MANY_CUT for found in shares.values())
    return Symptom("note", "; ".join(seen), (MORE_TOKENS,) if is_cut else (), "; ".join(advice))


def _in_words(run: RunRecord, reason: str) -> str:
    limit = run.setting("rollout.max_new_tokens")
    at = f" at rollout.max_new_tokens={limit}" if reason == CUT_OFF and limit else ""
    return reason.replace("_", " ") + at


FEW = 8
"""Number of scores that can all be equal by chance, as in a task that is rarely solved at first."""

TEXTS = (
    "; completions are texts, also those of conversations, so a function for lists of messages, "
    '`completion[0]["content"]`, finds no content in them'
)
"""Advice on functions that score every response the same."""


def _all_alike(run: RunRecord) -> Symptom | None:
    score = read(run, "reward/score_mean", at_least=1)
    score_std = read(run, "reward/score_std", at_least=1)
    if score is None or score_std is None or nearly_all_truncated(run) or not scores_are_constant(score, score_std):
        return None
    by_chance = has_episodes(run) or num_sampled(run, score.updates) < FEW
    patience = PATIENCE if has_episodes(run) else MIN_LEVEL
    reasons = _reasons(run)
    terms = run.config.get("reward") or ()
    are_functions = all(names_function(str(term.get("source"))) for term in terms)
    environment_pays = has_episodes(run) and not terms
    return Symptom(
        "serious" if len(score) >= patience else "note" if by_chance else "warning",
        f"all scores are {fmt(score.late)}: "
        + (f"{reasons.seen}; " if reasons.seen else "")
        + f"their standard deviation is {fmt(score_std.late)} ({score_std.late_span})",
        reasons.remedies,
        reasons.advice
        or "check the reward: it gives every response the same score"
        + TEXTS * (are_functions and not environment_pays and not reasons.seen),
    )


AS_THEY_COME = {"data.curriculum": None, "data.rest": 0, "data.draw": "evenly"}  # earlier versions had data.rest
"""Values with which the prompts of the first and the last update are alike."""


def _other_prompts(run: RunRecord) -> str:
    """The reason why the scores of early and late updates cannot be compared; empty if they can."""
    chosen = [name for name, usual in AS_THEY_COME.items() if run.setting(name) not in (None, usual)]
    return f"{chosen[0]} makes later prompts harder or easier than the first" if chosen else ""


@rule(
    "The policy does not improve its score: its steps are too small or too noisy, β is too large, or the reward does "
    "not tell the responses apart.",
    needs=("reward/score_mean", "reward/score_std"),
    early=_all_alike,
    updates=PATIENCE,
    of_policy=True,
    lacks=_other_prompts,
)
def reward_flat(run: RunRecord, score: Series, score_std: Series) -> Symptom | None:
    """Seen: `reward/score_mean` does not move, or all scores are the same. A verifier's reasons (`verdict/NAME/REASON`)
    say why.

    Try: Triple `ppo.learning_rate`, if the steps are small: three times the clip fraction and nine times the KL of an
    update would not be [too large](#steps_too_large), and the policy is within 0.05 nats per token of its start. Double
    `rollout.num_prompts`. If all scores are the same, fix the reward; with a verifier, first what its reasons say:
    raise `rollout.max_new_tokens` against responses that are cut off, state the form of the answer in the prompt, take
    easier prompts. A function gets completions as texts, also those of conversations.

    Threshold: After 12 updates, no change of at least 0.15 standard deviations of the scores and three standard errors,
    from the first update, the first three or the first eighth of the run: a warning. Healthy runs gain one standard
    deviation or more. A standard deviation of a thousandth of the mean is a warning from the first update on, which a
    running run says at once, a note if it has fewer than 8 scores, and serious after 4 updates; with an environment,
    which may pay rarely at first, a note and after 12 updates serious. Only that is looked for with `data.curriculum`
    or `data.draw`, where later prompts are harder or easier. Updates in which only the critic is trained do
    not count.
    """
    if constant := _all_alike(run):
        return constant
    if nearly_all_truncated(run) or _has_moved(run, score, score_std):
        return None
    reasons = _reasons(run)
    return Symptom(
        "warning",
        f"the mean score is {fmt(score.first)} in update {score.updates[0]} and {fmt(score.late)} in {score.late_span}"
        + (f" (verdicts: {reasons.seen})" if reasons.seen else "")
        + f", with a standard deviation of {fmt(score_std.late)} between responses",
        (*reasons.remedies, *larger_steps(run), scale("rollout.num_prompts", 2.0)),
        reasons.advice,
    )


def _has_moved(run: RunRecord, score: Series, score_std: Series) -> bool:
    """True if the score has moved away from where it started."""
    for move, error in _moves(score):
        # A fall from near the top widens the spread, but must not count as flat because of that.
        spread = score_std.start if move < 0 else max(score_std.start, score_std.late)
        of_update = spread / math.sqrt(num_responses(run))
        # Consecutive updates show no noise if most of them have the same score.
        if abs(move) > max(FLAT * spread, SIGNIFICANT * min(of_update, error or of_update)):
            return True
    return False


def _moves(score: Series) -> Iterator[tuple[float, float]]:
    """Changes of the score since its first value, its first few and the first eighth of the run, with standard errors.

    A single update is noisy, and an eighth of a long run hides a quick change.
    """
    return map(score.since, (1, WINDOW, max(WINDOW, len(score) // 8)))


def _fallen_at_once(run: RunRecord) -> Symptom | None:
    """Symptom of a score that the first updates have brought below nearly all initial scores."""
    score = read(run, "reward/score_mean", at_least=2)
    score_std = read(run, "reward/score_std", at_least=2)
    if score is None or score_std is None:
        return None
    last = score.values[-1]
    is_far = 0 < FAR_BELOW * score_std.start < score.first - last
    return _fallen(score.first, last, span(score.updates), score_std) if is_far and not _other_prompts(run) else None


def _fallen(first: float, last: float, where: str, score_std: Series) -> Symptom:
    return Symptom(
        "serious",
        f"the mean score falls from {fmt(first)} to {fmt(last)} ({where}); the scores' standard deviation was "
        f"{fmt(score_std.start)} at the start",
        (SMALLER_STEPS,),
    )


@rule(
    "The policy scores worse than at the start, the opposite of what PPO optimizes: the steps are too large, or a sign "
    "is wrong somewhere between score and gradient.",
    needs=("reward/score_mean", "reward/score_std"),
    early=_fallen_at_once,
    updates=MIN_LEVEL,
    lacks=_other_prompts,
)
def score_falling(run: RunRecord, score: Series, score_std: Series) -> Symptom | None:
    """Seen: `reward/score_mean` is lower than in the first update, the first three or the first eighth of the run.

    Try: Lower `ppo.learning_rate` to a third; if that does not help, look for the sign.

    Threshold: A fall of half a standard deviation of the scores, and of three standard errors, which is not noise.
    Serious. Not with `data.curriculum` or `data.draw`, where later prompts are harder or easier.
    """
    least = max(LOST, SIGNIFICANT / math.sqrt(num_responses(run))) * score_std.start
    for move, error in _moves(score):
        if -move > max(least, SIGNIFICANT * error):
            return _fallen(score.late - move, score.late, score.late_span, score_std)
    return None


@rule(
    "Nearly every response already gets the best score. Whitening, or division by a group's standard deviation, scales "
    "the remaining differences up, so further steps follow noise; without either, there is little left to learn.",
    needs=("reward/score_mean", "reward/score_std"),
    updates=MIN_TREND,
)
def reward_saturated(run: RunRecord, score: Series, score_std: Series) -> Symptom | None:
    """Seen: `reward/score_mean` has risen and `reward/score_std` has collapsed.

    Try: Use an earlier checkpoint, harder prompts, or a reward that tells good responses apart; halve
    `ppo.num_updates`.

    Threshold: A standard deviation of a tenth of the early one. A warning.
    """
    if not rose(score) or score_std.late >= SATURATED * score_std.early:
        return None
    return Symptom(
        "warning",
        f"the scores' standard deviation falls from {fmt(score_std.early)} to {fmt(score_std.late)} at a mean score of "
        f"{fmt(score.late)} ({score_std.late_span})",
        (scale("ppo.num_updates", 0.5),),
        "use an earlier checkpoint, harder prompts, or a reward that tells good responses apart",
    )


MEMORIZED = 0.5
"""Share of the gain on the training prompts that held-out ones may lack."""


@rule(
    "The score rises on the prompts that the policy is trained on, and much less on others: it learns what scores well "
    "for each of them by heart.",
    needs=("reward/score_mean", "eval/score"),
    updates=MIN_TREND,
    fits=lambda run: run.setting("ppo.eval_every") is not None or bool(run.series("eval/score")[0]),
    lacks=_other_prompts,
)
def prompts_memorized(run: RunRecord, score: Series, held_out: Series) -> Symptom | None:
    """Seen: `reward/score_mean` rises, and `eval/score` on held-out prompts rises much less, or falls.

    Try: More prompts in `data.prompts`; if there are none, halve `ppo.num_updates`, which means fewer passes over them.
    Compare like with like: held-out prompts of a different kind show the same.

    Threshold: Held-out prompts gain less than half of what the training prompts do in the updates with an evaluation,
    and the difference is more than three standard errors. A warning; serious if they gain nothing. Not with
    `data.curriculum` or `data.draw`, where later prompts are harder or easier.
    """
    trained = combine(lambda _, mean: mean, held_out, score)
    ahead = combine(lambda other, mean: mean - other, held_out, score)
    if trained is None or ahead is None or not (rose(trained) and rose(ahead)):
        return None
    if ahead.rise <= MEMORIZED * trained.rise:
        return None
    return Symptom(
        "warning" if held_out.rise > 0 else "serious",
        f"the mean score goes from {fmt(trained.early)} to {fmt(trained.late)} on the training prompts, and from "
        f"{fmt(held_out.early)} to {fmt(held_out.late)} on held-out ones ({held_out.late_span})",
        (MORE_PROMPTS, scale("ppo.num_updates", 0.5)),
        "check that the held-out prompts are of the same kind",
    )


MANY_SINGLE = 0.5
"""Share of groups with a single response above which most of the sampling is wasted."""


@rule(
    "The advantage compares the responses to a prompt with each other. One that is alone has nothing to be compared "
    "with: its advantage is 0, and it moves no weight at any learning rate.",
    needs=("group/single",),
    fits=compares_groups,
)
def groups_of_one(run: RunRecord, single: Series) -> Symptom | None:
    """Seen: `group/single` is high: most prompts have one response, as in a loop of your own that gives `batch` one
    response to each of its prompts, or with a reward that returns `None` for the others.

    Try: Several responses to each prompt; in `batch`, equal prompts or equal `groups`. Or `reinforce++` for
    `ppo.advantage`, which compares with the whole batch.

    Threshold: More than half of the prompts: a warning. Serious if no update has a prompt with two responses, from the
    first one on, which a running run says at once.
    """
    if single.late <= MANY_SINGLE:
        return None
    return Symptom(
        "serious" if min(single.values) >= 1 else "warning",
        f"{single.late:.0%} of the prompts have a single response with a score ({single.late_span}), and "
        f"ppo.advantage={run.choice('ppo.advantage')} compares the responses to a prompt",
        (set_to("ppo.advantage", "reinforce++", why="which compares with the whole batch"),),
        "give several responses to each prompt (in a loop of your own, equal prompts or groups= in batch)",
    )


MANY_CONSTANT = 0.5
MOST_CONSTANT = 0.9
"""Share of groups without spread above which most of the sampling, or nearly all, is wasted. Training on sorting digits
went well up to 0.77, with ever smaller batches."""

MANY_SMALL = 0.2
"""Share of groups with a tenth of the usual spread. Equally distributed scores give 0.08 with two responses per prompt,
and less than 0.01 from three on."""

LONGER = 1.3
"""Length of low-scored responses, relative to the start, that exceeds drift."""

APART = 1.15
"""Growth of the low-scored responses' length over the high-scored ones', relative to the start."""


@rule(
    "The responses to most prompts score alike. The advantages of these prompts are 0, apart from a KL in the reward: "
    "they are sampled, scored and evaluated, and teach nothing about the score.",
    needs=("group/constant",),
    updates=MIN_LEVEL,
    fits=compares_groups,
)
def groups_without_spread(run: RunRecord, constant: Series) -> Symptom | None:
    """Seen: `group/constant` is high: the responses to most prompts all score the same.

    Try: `resample` for `ppo.constant_groups`, or `drop` in a loop of your own, to train on prompts with spread alone;
    twice as many `rollout.num_responses`; prompts that are neither solved nor out of reach; a reward that reads the
    completions.

    Threshold: Half of the prompts late in the run is a note, nine tenths a warning. All of them in every update is
    serious, after 4 updates.
    """
    has_none = min(constant.values) >= 1
    if constant.late < MANY_CONSTANT or not (has_none or len(constant) >= MIN_TREND):
        return None
    reasons = _reasons(run)
    return Symptom(
        "serious" if has_none else "warning" if constant.late >= MOST_CONSTANT else "note",
        f"the responses of {constant.late:.0%} of the prompts all score the same ({constant.late_span}"
        + (f"; verdicts: {reasons.seen}" if reasons.seen else "")
        + f"); at the start it was {constant.early:.0%}",
        _find_spread(run),
        "prompts that are neither solved nor out of reach, or a reward that reads the completions and tells them apart",
    )


def _find_spread(run: RunRecord) -> Iterator[Remedy]:
    # Sampling ahead draws an update's prompts before it knows their scores, and so does not resample.
    if run.choice("ppo.constant_groups") in ("", "keep") and not run.setting("rollout.max_staleness"):
        yield set_to(
            "ppo.constant_groups",
            "drop" if "loop" in run.facts else "resample",  # a loop of the user's own draws the prompts
            why="to train on prompts with spread alone",
        )
    yield scale("rollout.num_responses", 2.0)


@rule(
    "Dividing by a group's standard deviation gives every group the same weight. Where its responses are nearly equal, "
    "it makes differences that mean little as large as those that mean much.",
    needs=("group/small_spread",),
    updates=MIN_TREND,
    fits=lambda run: estimator_facts(run).divides,
)
def group_std_blows_up(run: RunRecord, small: Series) -> Symptom | None:
    """Seen: `group/small_spread` is high: many groups have a tenth of the usual spread.

    Try: `dr_grpo` for `ppo.advantage`, which does not divide.

    Threshold: A fifth of the groups with spread, late in the run. Chance gives 0.08 with two responses per prompt, and
    less than 0.01 from three on.
    """
    if small.late < MANY_SMALL:
        return None
    return Symptom(
        "warning",
        f"in {small.late:.0%} of the groups with spread, the scores differ by less than a tenth of what is usual "
        f"({small.late_span})",
        (set_to("ppo.advantage", "dr_grpo", why="which does not divide by it"),),
    )


@rule(
    "A mean over each response's tokens divides the loss of a long response by its length, so a bad response costs "
    "less per token the longer it is. The policy learns to make bad responses longer.",
    needs=("group/length_below", "group/length_above"),
    updates=MIN_TREND,
    fits=lambda run: compares_groups(run) and run.setting("ppo.aggregation") == "sequence",
)
def length_bias(run: RunRecord, below: Series, above: Series) -> Symptom | None:
    """Seen: `group/length_below`, the length of the responses that score below their group's mean, grows, and
    `group/length_above` grows less.

    Try: `ppo.aggregation=token`.

    Threshold: The low-scored responses are 1.3 times as long as at the start, and their length relative to that of the
    others has grown by 1.15.
    """
    apart = combine(lambda low, high: low / high if high > 0 else None, below, above)
    if apart is None or below.early <= 0 or apart.early <= 0:
        return None
    if below.late < LONGER * below.early or apart.late < APART * apart.early:
        return None
    return Symptom(
        "warning",
        f"the responses that score below their group's mean grow from {fmt(below.early)} to {fmt(below.late)} tokens "
        f"({below.late_span}), and from {fmt(apart.early)} to {fmt(apart.late)} times the length of the others",
        (set_to("ppo.aggregation", "token", why="so that every token has the same weight"),),
    )
