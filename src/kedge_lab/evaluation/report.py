"""Output of an evaluation: `judgments.jsonl`, `summary.json` and a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from statistics import mean
from typing import Any

from kedge.logs.json_lines import JsonLines, as_rows
from kedge.logs.table import Cell, print_table
from kedge.rewards import Scores
from kedge.stages.judges import Judge, ScoredResponses
from kedge.stages.policy import shares_of
from kedge_base.intervals import Interval, share_interval
from kedge_base.run_folder.output import JUDGMENTS_FILE, write_summary
from kedge_base.texts import counted
from kedge_lab.evaluation.evaluator import PolicyResult
from kedge_people.controlled import Controlled, controlled_win_rate, style_of


@dataclass(frozen=True)
class Evaluation:
    """All results of an evaluation.

    Attributes:
        judge: The judge.
        policy: Result of the evaluated policy.
        opponent: The responses that the policy was compared with.
        opponent_name: Folder or hub id of the other policy, or `references`.
        frontier: Results of further policies against the same opponent.
        judge_usage: The requests and tokens of a judge behind an API.
    """

    judge: Judge
    policy: PolicyResult
    opponent: ScoredResponses
    opponent_name: str = "references"
    frontier: Sequence[PolicyResult] = ()
    judge_usage: Mapping[str, Any] | None = None

    def by_length(self) -> dict[str, Any]:
        """The share of pairs of different length that the longer response wins, the share that it would win if each
        side won the same share of pairs at any length, and the number of these pairs.
        """
        pairs = zip(self.policy.scored.num_tokens, self.opponent.num_tokens, self.policy.outcomes.wins, strict=True)
        unequal = [(length > other, win) for length, other, win in pairs if win is not None and length != other]
        if not unequal:
            return {"longer_wins": None, "longer_wins_expected": None, "num_unequal_lengths": 0}
        longer, won = (mean(map(float, values)) for values in zip(*unequal, strict=True))
        return {
            "longer_wins": share_interval([win if is_ours else 1 - win for is_ours, win in unequal]),
            "longer_wins_expected": longer * won + (1 - longer) * (1 - won),
            "num_unequal_lengths": len(unequal),
        }

    def controlled(self, result: PolicyResult) -> Controlled | None:
        """The win rate of a result controlled for length in tokens and for markdown."""
        sides = (result.scored, self.opponent)
        return controlled_win_rate(
            result.outcomes.wins, *(list(map(style_of, each.responses.completions, each.num_tokens)) for each in sides)
        )

    def _figures(self, result: PolicyResult) -> dict[str, Any]:
        controlled = self.controlled(result)
        return {
            **plain_figures(result.summary()),
            "win_rate_controlled": controlled and {**controlled.rate.as_json(), "for": list(controlled.of)},
        }

    def summary(self) -> dict[str, Any]:
        """Figures for `summary.json`."""
        outcomes = self.policy.outcomes
        ours = self.policy.scored
        theirs = self.opponent
        return {
            **self._figures(self.policy),
            "against": self.opponent_name,
            "judge": self.judge.name,
            "judge_mode": self.judge.mode,
            "num_prompts": len(outcomes.wins),
            "num_judged": len(outcomes.decided),
            "num_equal": sum(map(eq, ours.responses.completions, theirs.responses.completions)),
            **plain_figures(ours.figures()),
            **{f"{name}_against": figure for name, figure in plain_figures(theirs.figures()).items()},
            **plain_figures(self.by_length()),
            "position_bias": outcomes.position_bias(),
            **ours.shares(),
            **theirs.shares("_against"),
            **({} if self.judge_usage is None else {"judge_usage": dict(self.judge_usage)}),
            "frontier": [self._figures(each) for each in self.frontier],
        }


def report(evaluation: Evaluation, folder: Path, *, is_shown: bool = True) -> dict[str, Any]:
    """Write judgments and summary, print a table, and return the summary.

    The summary is written last, because a folder with one counts as finished.

    Args:
        evaluation: The results.
        folder: The run's folder.
        is_shown: False on a rank that is not the first: nothing is printed.
    """
    summary = evaluation.summary()
    with closing(JsonLines(folder / JUDGMENTS_FILE)) as lines:
        for row in _judgments(evaluation):
            lines.write(row)
    write_summary(folder, summary)
    if is_shown:
        _print(evaluation, summary)
    return summary


def _judgments(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    ours = evaluation.policy.scored
    theirs = evaluation.opponent
    outcomes = evaluation.policy.outcomes
    columns: dict[str, Sequence[Any]] = {
        "prompt": ours.responses.prompts,
        "completion": ours.responses.completions,
        "completion_against": theirs.responses.completions,
        "winner": _winners(outcomes.wins),
        "length": ours.num_tokens,
        "length_against": theirs.num_tokens,
    }
    for name, own, other in (
        ("score", ours.scores, theirs.scores),
        ("reason", ours.reasons, theirs.reasons),
        ("ending", ours.endings, theirs.endings),
    ):
        if own and other:
            columns |= {name: own, f"{name}_against": other}
    for place, wins in (("first", outcomes.shown_first), ("second", outcomes.shown_second)):
        if wins is not None:
            columns[f"winner_shown_{place}"] = _winners(wins)
    return as_rows(columns)


def _winners(wins: Scores) -> list[str | None]:
    names = {1.0: "model", 0.5: "tie", 0.0: "against", None: None}
    return [names[win] for win in wins]


def _print(evaluation: Evaluation, summary: dict[str, Any]) -> None:
    rows: dict[str, list[Cell]] = {
        each.name: [
            each.win_rate,
            (controlled := evaluation.controlled(each)) and controlled.rate,
            " / ".join(map(str, each.outcomes.counts.values())),
            *_cells(each.scored, each.kl),
        ]
        for each in (evaluation.policy, *evaluation.frontier)
    }
    rows[f"against: {evaluation.opponent_name}"] = [None, None, None, *_cells(evaluation.opponent, None)]
    columns = ["policy", "win rate", "controlled", "won / tied / lost", "score", "KL", "tokens", "stopped"]
    print_table(f"{counted(summary['num_judged'], 'prompt')}, judged by {summary['judge']}", columns, rows)
    if controlled := summary["win_rate_controlled"]:
        print(f"Controlled: the win rate if both sides were alike in {', '.join(controlled['for'])}, by regression.")
    if longer := (length := evaluation.by_length())["longer_wins"]:
        expected = f"{length['longer_wins_expected']:.0%} expected from the win rates alone"
        print(f"Win rate of the longer response, where lengths differ: {longer}; {expected}")
    for each in filter(None, (evaluation.policy.scored.endings, evaluation.opponent.endings)):
        print(endings_line(each))
    if usage := evaluation.judge_usage:
        cost = "" if usage["cost"] is None else f", a cost of {usage['cost']:.4g}"
        print(
            f"The judge: {counted(usage['requests'], 'request')}, {counted(usage['tokens'], 'token')}{cost}; "
            f"{counted(usage['unanswered'], 'question')} without a usable answer"
        )
    if bias := summary["position_bias"]:
        print(
            f"Position bias: the judge preferred the response shown first {bias['first_rate']:.0%} of the time, and "
            f"contradicted itself on {bias['contradicted']:.0%} of the pairs, which count as ties."
        )


def endings_line(endings: Sequence[str]) -> str:
    """The share of each ending of episodes, on one line."""
    return "episodes: " + ", ".join(f"{share:.0%} {word}" for word, share in shares_of(endings).items())


def verdict_lines(verdicts: Mapping[str, float]) -> Iterator[str]:
    """A line per verifier: the shares of its reasons, the largest first."""
    parts: dict[str, list[tuple[float, str]]] = {}
    for metric, share in verdicts.items():
        _, name, reason = metric.split("/", 2)
        parts.setdefault(name, []).append((share, reason.replace("_", " ")))
    for name, shares in parts.items():
        shown = ", ".join(f"{share:.0%} {reason}" for share, reason in sorted(shares, key=lambda each: -each[0]))
        yield f"{name}: {shown}"


def _cells(scored: ScoredResponses, kl: Interval | None) -> list[Cell]:
    score, *others = scored.figures().values()
    return [score, kl, *others]


def plain_figures(figures: Mapping[str, Interval | float | str | None]) -> dict[str, Any]:
    """Figures in JSON types."""
    return {name: each.as_json() if isinstance(each, Interval) else each for name, each in figures.items()}
