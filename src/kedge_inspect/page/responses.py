"""Shows responses: token by token, in the pairs of an evaluation, and generated ones."""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kedge_inspect.page.looks import has_part
from kedge_inspect.page.numbers import as_number, distributions, evenly_spaced, fitting, rounded, shortened
from kedge_inspect.page.sentences import why_no_result
from kedge_inspect.record import RunRecord

TOKEN_VALUES = ("logprobs", "ref_logprobs", "new_logprobs", "values", "rewards", "advantages", "entropies")
MOST_TOKENS = 600
"""Longer responses lose their end, longer prompts their beginning."""

MOST_UPDATES = (24, 16, 10, 6, 4, 2)
"""Updates with responses on the page: the first of these numbers whose responses fit, or the last one."""

MOST_PROMPTS = 8


def shown_responses(record: RunRecord, *, most_bytes: int) -> dict[str, Any]:
    """Prompts with responses from the whole run, as many as fit.

    Args:
        record: The run.
        most_bytes: Size limit of the resulting JSON; exceeded only if the responses of two updates are larger.

    Returns:
        `prompts`, each with `title`, `prompt` and `responses` by update; the number of responses `kept`, and `of` all.
    """
    rows = [row for row in record.samples if isinstance(row.get("tokens"), list)]
    if not rows:
        return {"empty": _why_empty(record)}
    numbers = sorted({row["fixed"] for row in rows if isinstance(row.get("fixed"), int)})[:MOST_PROMPTS]
    fixed = {number: [row for row in rows if row.get("fixed") == number] for number in numbers}
    others = [row for row in rows if row.get("fixed") is None]
    shown: list[dict[str, Any]] = []
    for most_updates in MOST_UPDATES:
        shown = [_prompt(f"Prompt {number + 1}", rows, most_updates) for number, rows in fixed.items()]
        shown += [_prompt("", others, most_updates)] if others else []
        if len(json.dumps(shown)) <= most_bytes:
            break
    return {"prompts": shown, "kept": sum(len(prompt["responses"]) for prompt in shown), "of": len(rows)}


def _prompt(title: str, rows: Sequence[Mapping[str, Any]], most_updates: int) -> dict[str, Any]:
    """The responses to one prompt over time; without a title, responses that have their own prompt each."""
    updates = sorted({int(row["update"]) for row in rows})
    kept = evenly_spaced(updates, most_updates)
    responses = [_response(row, with_prompt=not title) for row in rows if row["update"] in kept]
    responses.sort(key=lambda response: response["update"])
    return {"title": title, "prompt": shortened(str(rows[0]["prompt"])) if title else "", "responses": responses}


def _response(row: Mapping[str, Any], *, with_prompt: bool) -> dict[str, Any]:
    tokens = [str(token) for token in row["tokens"]]
    values = {name: rounded(row[name][:MOST_TOKENS], 4) for name in TOKEN_VALUES if isinstance(row.get(name), list)}
    later = [known for each in (row.get("rewards") or ())[MOST_TOKENS:] if (known := as_number(each)) is not None]
    return {
        "update": int(row["update"]),
        "score": rounded(row.get("score")),
        "stopped": bool(row.get("stopped")),
        "length": len(tokens),
        "tokens": tokens[:MOST_TOKENS],
        "later": rounded(math.fsum(later), 4),
        **_turns(row, len(tokens)),
        **reasons(row),
        **values,
        **({"prompt": shortened(str(row["prompt"]))} if with_prompt else {}),
    }


def _turns(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Describe the other side of an episode, its turns and its ending; empty for other responses.

    Args:
        row: The row of the sample.
        length: The policy's tokens, between which `foreign` is placed.
    """
    foreign = row.get("foreign") or ()
    if not foreign and "ending" not in row:
        return {}
    tree = _tree(row)
    return {
        "foreign": [[at, shortened(str(text))] for at, text in foreign if at <= MOST_TOKENS],
        "turns": len(tree) or 1 + len({at for at, _ in foreign if 0 < at < length}),
        "tree": tree,
        "ending": row.get("ending"),
    }


def _tree(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Describe each turn of an episode; empty for a folder that does not have them.

    Returns:
        By turn: `at`, the policy's tokens before it; the numbers of tokens that it `reads`, of `new` ones, and of the
        policy's own that are `left_out`; `reward`, its sum; the `value` at its first token; its mean `advantage`; and
        `level`, how far to indent it. A turn in a new context has `after`, the turn that the context continues, or 0,
        and how many tokens of that turn are `kept`.
    """
    turns: Sequence[Sequence[int]] = row.get("turns") or ()
    starts = [turn[0] for turn in turns]
    shown: list[dict[str, Any]] = []
    continued: set[int] = set()
    for (at, last, num_read, num_new), end in zip(turns, [*starts, None][1:], strict=True):
        rewards, values, advantages = (
            [known for value in (row.get(name) or ())[at:end] if (known := as_number(value)) is not None]
            for name in ("rewards", "values", "advantages")
        )
        after = bisect_left(starts, last)
        before = shown[after - 1] if after else {"at": 0, "level": 0, "left_out": 0}
        turn = {
            "at": at,
            "level": before["level"] + (after in continued),
            "reads": num_read,
            "new": num_new,
            "left_out": at - last + before["left_out"],
            "reward": math.fsum(rewards),
            "value": values[0] if values else None,
            "advantage": fmean(advantages) if advantages else None,
            **({"after": after, "kept": last - before["at"]} if last < at else {}),
        }
        shown.append(rounded(turn, 4))
        continued |= {after} - {0}
    return shown


def reasons(row: Mapping[str, Any]) -> dict[str, str]:
    """The reasons for a row's scores, where it has them."""
    return {name: shortened(row[name]) for name in ("reason", "reason_against") if isinstance(row.get(name), str)}


def _why_empty(record: RunRecord) -> str:
    if not has_part(record, "samples"):
        return ""
    if record.setting("runtime.num_samples") == 0:
        return "runtime.num_samples is 0; set it to 1 or more to keep responses of every update."
    return "No responses yet: they come with the first update."


OUTCOMES = {"model": "won", "tie": "tied", "against": "lost"}


def evaluation(record: RunRecord, *, most_bytes: int) -> dict[str, Any]:
    """The figures of `summary.json` and the pairs of `judgments.jsonl`.

    Args:
        record: The run.
        most_bytes: Size limit of the pairs' JSON; of larger evaluations, evenly spaced pairs are shown.

    Returns:
        The figures by name; `orders` of a pairwise judge; `frontier`; `scores` and `lengths` as distributions; `pairs`
        and the number `of` all. `empty` with the reason for a run without them.
    """
    if not has_part(record, "evaluation") or is_solving(record) or record.setting("evaluate.critic") is not None:
        return {"empty": ""}
    if not record.summary:
        return {"empty": why_no_result(record)}
    return {
        **rounded(dict(record.summary)),
        "orders": _orders(record.results),
        "frontier": _frontier(record.summary),
        "scores": _both_sides(record, "score"),
        "lengths": _both_sides(record, "length"),
        "pairs": fitting([_pair(row) for row in record.results], most_bytes),
        "of": len(record.results),
    }


def is_solving(record: RunRecord) -> bool:
    """True for an evaluation that measures pass@k, with several responses to each prompt."""
    return record.stage == "evaluate" and (record.setting("generate.num_responses") or 1) > 1


def _pair(row: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: shortened(str(row.get(name, ""))) for name in ("prompt", "completion", "completion_against")}
    named = ("score", "score_against", "length", "length_against")
    figures = {name: rounded(as_number(row[name])) for name in named if name in row}
    orders = [OUTCOMES.get(str(row.get(f"winner_shown_{place}")), "") for place in ("first", "second")]
    shown = {"orders": orders} if "winner_shown_first" in row else {}
    return {"outcome": OUTCOMES.get(str(row.get("winner")), "undecided"), **texts, **figures, **reasons(row), **shown}


def _orders(rows: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Counts of pairs with the same winner in both orders, and of the position that the judge preferred otherwise."""
    both = [(row.get("winner_shown_first"), row.get("winner_shown_second")) for row in rows]
    decided = Counter((one, two) for one, two in both if one in OUTCOMES and two in OUTCOMES)
    if not decided:
        return None
    return {
        "pairs": decided.total(),
        "same": sum(decided[each, each] for each in OUTCOMES),
        "first": decided["model", "against"],
        "second": decided["against", "model"],
    }


def _frontier(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Score over √KL, or the win rate for a judge that only compares; the opponent is at KL 0."""
    others = [point for point in summary.get("frontier") or () if isinstance(point, Mapping)]
    known = [point for point in (summary, *others) if isinstance(point.get("kl"), Mapping)]
    if not others or not known:
        return None
    scored = isinstance(summary.get("score_against"), Mapping)
    even = {"value": 0.5, "low": 0.5, "high": 0.5}
    start = {"model": summary.get("against"), "kl": {"value": 0.0}, "win_rate": even}
    points = [{**start, "score": summary.get("score_against")}, *known]
    name = "score" if scored else "win_rate"
    shown = [
        {"model": str(point.get("model")), "root_kl": math.sqrt(max(0.0, point["kl"]["value"])), **_ends(point[name])}
        for point in points
        if isinstance(point.get(name), Mapping)
    ]
    return {"of": name.replace("_", " "), "points": rounded(sorted(shown, key=lambda point: point["root_kl"]))}


def _ends(figures: Mapping[str, Any]) -> dict[str, float]:
    """A figure with the ends of its error bar; a single prompt has a bar of no length."""
    return {name: figures["value"] if figures[name] is None else figures[name] for name in ("value", "low", "high")}


def _both_sides(record: RunRecord, name: str) -> dict[str, Any] | None:
    sides = {"model": name, "against": f"{name}_against"}
    return distributions({side: [as_number(row.get(key)) for row in record.results] for side, key in sides.items()})


def generation(record: RunRecord, *, most_bytes: int) -> dict[str, Any]:
    """The figures of `summary.json` and the rows of `responses.jsonl`, also of a run in progress.

    Args:
        record: The run; also one that measures pass@k.
        most_bytes: Size limit of the responses' JSON; of larger runs, evenly spaced responses are shown.

    Returns:
        The figures by name; `solved`, pass@k and maj@k of each policy, or null; `scores` and `lengths` as
        distributions; `responses` and the number `of` all. `empty` with the reason for a run without them.
    """
    if not has_part(record, "generation") and not is_solving(record):
        return {"empty": ""}
    if not record.results:
        return {"empty": "No responses yet." if record.state == "running" else "The run stopped before any response."}
    return {
        **rounded(dict(record.summary)),
        "solved": _solved(record.summary),
        "scores": distributions({"responses": [as_number(row.get("score")) for row in record.results]}),
        "lengths": distributions({"responses": [len(str(row.get("completion", ""))) for row in record.results]}),
        "responses": fitting([_generation_response(row) for row in record.results], most_bytes),
        "of": len(record.results),
    }


def _solved(summary: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """A row for each policy and k: pass@k, and maj@k or null."""
    policies = [each for each in (summary, *(summary.get("others") or ())) if "pass@k" in each]
    rows = [
        {"model": each["model"], "k": k, "pass": _ends(interval), "maj": (each.get("maj@k") or {}).get(k)}
        for each in policies
        for k, interval in each["pass@k"].items()
    ]
    return rounded(rows) or None


def _generation_response(row: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: shortened(str(row[name])) for name in ("prompt", "completion", "model", "answer") if row.get(name)}
    texts = {"prompt": "", "completion": "", **texts}
    scored = {"score": rounded(as_number(row["score"]))} if "score" in row else {}
    return {**texts, "stopped": bool(row.get("stopped")), **scored, **reasons(row)}


def judge_agreement(records: Mapping[str, RunRecord]) -> list[dict[str, Any]]:
    """For every two evaluations with pairs in common: how many, how many with the same outcome, and Cohen's κ.

    κ = (p_o − p_e) / (1 − p_e), with p_o the share of equal outcomes and p_e the share expected of independent judges
    with the same frequencies of won, tied and lost; null if both judges always decide alike.

    Args:
        records: Runs by name; only evaluations are shown.

    Source: Cohen 1960, A coefficient of agreement for nominal scales, eq. 1.
    """
    outcomes = {name: _outcomes(record) for name, record in records.items() if has_part(record, "evaluation")}
    found = []
    for one, other in itertools.combinations(outcomes, 2):
        pairs = [(outcomes[one][key], outcomes[other][key]) for key in outcomes[one] if key in outcomes[other]]
        if pairs:
            judges = [str(records[name].summary.get("judge", "")) for name in (one, other)]
            same = sum(first == second for first, second in pairs)
            found.append({"runs": [one, other], "judges": judges, "pairs": len(pairs), "same": same,
                          "kappa": rounded(_kappa(pairs))})  # fmt: skip
    return found


def _outcomes(record: RunRecord) -> dict[tuple[str, ...], str]:
    """The winner of each decided pair, by its texts."""
    texts = ("prompt", "completion", "completion_against")
    return {
        tuple(str(row.get(name)) for name in texts): row["winner"]
        for row in record.results
        if row.get("winner") in OUTCOMES
    }


def _kappa(pairs: list[tuple[str, str]]) -> float | None:
    count = len(pairs)
    observed = sum(first == second for first, second in pairs) / count
    ones, others = map(Counter, zip(*pairs, strict=True))
    expected = sum(ones[outcome] * others[outcome] for outcome in OUTCOMES) / count**2
    return None if expected >= 1 else (observed - expected) / (1 - expected)
