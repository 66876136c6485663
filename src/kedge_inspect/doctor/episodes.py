"""Episodes: tools, late answers of the environment, and answers of the policy that an agent changes."""

from __future__ import annotations

from kedge_inspect.doctor.responses import TRUNCATED, has_episodes
from kedge_inspect.doctor.rule import Symptom, instruct, rule, scale
from kedge_inspect.doctor.series import MIN_LEVEL, Series, combine, fell, fmt, read, rose
from kedge_inspect.record import RunRecord

MOSTLY_FAIL = 0.5
NEARLY_ALL_FAIL = 0.95
"""Thresholds of a warning and of a serious finding: the share of calls that fail. A policy that learns to call fails at
first, so a falling share does not warn."""

RARELY = 0.05
"""Calls per episode below which too few episodes have a call to learn from."""

SOME_CHANGED = 0.1
MOST_CHANGED = 0.5
"""Thresholds of a note and of a warning: changed answers per turn of the policy."""

SHOW_CALLS = (
    instruct("data.prompts", "show a call in the prompts (data.prompts)"),
    instruct("model", "fine-tune the model on a few episodes with calls first (kedge sft)"),
)


def has_tools(run: RunRecord) -> bool:
    """True if the policy can call tools, also if it never did."""
    return bool(run.series("tools/calls")[0])


@rule(
    "Most calls of tools fail, and the policy reads errors instead of results: a tool is broken, or the policy cannot "
    "write its arguments.",
    needs=("tools/failed",),
    updates=MIN_LEVEL,
    fits=has_tools,
)
def tools_fail(run: RunRecord, failed: Series) -> Symptom | None:
    """Seen: `tools/failed` is high.

    Try: Read the errors in `samples.jsonl` or the report, and mend the tools or their docstrings
    (`environment.source`); show a call in the prompts (`data.prompts`), or fine-tune the model on a few episodes with
    calls first.

    Threshold: More than half of the calls, unless the share is falling: a warning. More than 95%: serious.
    """
    if failed.late <= MOSTLY_FAIL or (fell(failed) and failed.late <= NEARLY_ALL_FAIL):
        return None
    return Symptom(
        "serious" if failed.late > NEARLY_ALL_FAIL else "warning",
        f"{failed.late:.0%} of the calls of tools fail ({failed.late_span}), {failed.first:.0%} at first",
        (instruct("environment.source", "mend the tools or their docstrings (environment.source)"), *SHOW_CALLS),
        "read the errors among the samples",
    )


@rule(
    "The policy hardly ever calls a tool. It cannot learn to: a call that is not sampled is not rewarded.",
    needs=("tools/calls",),
    updates=MIN_LEVEL,
    fits=has_tools,
)
def tools_unused(run: RunRecord, calls: Series) -> Symptom | None:
    """Seen: `tools/calls` is near 0.

    Try: Show a call in the prompts (`data.prompts`), or fine-tune the model on a few episodes with calls first. If the
    policy called the tools at first, check that the reward pays for what they find, and `tools/failed`.

    Threshold: Less than one call in twenty episodes: a warning; a note if the score rises nevertheless. Not where calls
    [time out](#episodes_time_out), which are not counted.
    """
    if calls.late >= RARELY or episodes_time_out.find(run):
        return None  # a call that came back too late is not counted
    return Symptom(
        "note" if rose(read(run, "reward/score_mean")) else "warning",
        f"{fmt(calls.late)} calls of tools per episode ({calls.late_span}), {fmt(calls.first)} at first",
        SHOW_CALLS,
        "check that the reward pays for what the tools find" if calls.early >= RARELY else "",
    )


@rule(
    "The environment answers too late, which ends the episode. Its outcome is replaced with the critic's value, or "
    "left out without a critic.",
    needs=("episode/timeout",),
    updates=MIN_LEVEL,
    fits=has_episodes,
)
def episodes_time_out(run: RunRecord, late: Series) -> Symptom | None:
    """Seen: `episode/timeout` is above 0.

    Try: Double `environment.timeout`; make the environment faster, or its calls `async`, which then run at the same
    time.

    Threshold: A tenth of the episodes. Warning.
    """
    if late.late < TRUNCATED:
        return None
    return Symptom(
        "warning",
        f"{late.late:.0%} of the episodes end with a late answer ({late.late_span}), {late.first:.0%} at first",
        (scale("environment.timeout", 2.0),),
        "make the environment's calls faster, or async, so that they run at the same time",
    )


@rule(
    "The agent changes the policy's answers before it sends them back, or writes some of its own. What is changed "
    "is only read, and starts a new context, which is computed again.",
    needs=("episode/changed",),
    updates=MIN_LEVEL,
    fits=lambda run: bool(run.series("episode/changed")[0]),
)
def answers_changed(run: RunRecord, changed: Series) -> Symptom | None:
    """Seen: `episode/changed` is high compared with `episode/turns`.

    Try: Let the agent (`environment.source`) send answers back as they came, with their spaces, thoughts and calls of
    tools, unless a change is meant, as in a summary.

    Threshold: One changed answer in ten turns is a note, one in two a warning.
    """
    turns = read(run, "episode/turns")
    share = turns and combine(lambda count, of: count / of, changed, turns)
    if share is None or share.late < SOME_CHANGED:
        return None
    return Symptom(
        "warning" if share.late >= MOST_CHANGED else "note",
        f"an answer is changed in {share.late:.0%} of the turns ({share.late_span})",
        (
            instruct(
                "environment.source", "send answers back as they came, unless a change is meant (environment.source)"
            ),
        ),
    )
