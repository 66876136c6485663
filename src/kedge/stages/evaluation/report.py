"""Output of an evaluation: `judgments.jsonl`, `summary.json` and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from statistics import mean
from typing import Any

from kedge.logs.json_lines import JsonLines
from kedge.logs.table import Cell, print_table
from kedge.rewards import Responses, Scores
from kedge.rewards.source import free_names
from kedge.stages.evaluation.evaluator import Evaluator, PolicyResult
from kedge.stages.evaluation.judges import ScoredResponses
from kedge.system.intervals import Interval
from kedge.system.output import JUDGMENTS_FILE, write_summary

__all__ = ["Evaluation", "report", "response_rows"]


@dataclass(frozen=True)
class Evaluation:
    """All results of an evaluation.

    Attributes:
        evaluator: The prompts and the judge.
        policy: Result of the evaluated policy.
        opponent: The responses that it was compared with.
        opponent_name: Folder or hub id of the other policy, or `references`.
        frontier: Results of further policies against the same opponent.
    """

    evaluator: Evaluator
    policy: PolicyResult
    opponent: ScoredResponses
    opponent_name: str = "references"
    frontier: Sequence[PolicyResult] = ()

    def win_rate(self, result: PolicyResult) -> Interval:
        """Share of the pairs that the policy wins; ties count half."""
        return self.evaluator.share(result.outcomes.decided)

    def score(self, scored: ScoredResponses) -> Interval | None:
        """Mean score; None if the judge only compares or scored nothing."""
        known = [score for score in scored.scores or () if score is not None]
        return self.evaluator.score(known) if known else None

    def longer_wins(self) -> Interval | None:
        """Share of pairs that the longer response wins: ½ without length bias; None if all lengths are equal."""
        longer = self._longer_won()
        return self.evaluator.share(longer) if longer else None

    def _longer_won(self) -> list[float]:
        """The outcome for the longer response of each decided pair of different length."""
        ours = _lengths(self.policy.scored)
        theirs = _lengths(self.opponent)
        return [
            win if length > other else 1 - win
            for length, other, win in zip(ours, theirs, self.policy.outcomes.wins, strict=True)
            if win is not None and length != other
        ]

    def summary(self) -> dict[str, Any]:
        """Figures for `summary.json`."""
        outcomes = self.policy.outcomes
        wins = self.policy.outcomes.decided
        return {
            "model": self.policy.name,
            "against": self.opponent_name,
            "judge": self.evaluator.judge.name,
            "judge_mode": self.evaluator.judge.mode,
            "num_prompts": len(outcomes.wins),
            "num_judged": len(wins),
            "num_equal": sum(map(eq, *(each.responses.completions for each in (self.policy.scored, self.opponent)))),
            "win_rate": self.win_rate(self.policy).as_json(),
            **outcomes.counts,
            "score": _plain(self.score(self.policy.scored)),
            "score_against": _plain(self.score(self.opponent)),
            "kl": _plain(self.policy.kl),
            "length": mean(_lengths(self.policy.scored)),
            "length_against": mean(_lengths(self.opponent)),
            "eos_rate": _eos_rate(self.policy.scored),
            "eos_rate_against": _eos_rate(self.opponent),
            "longer_wins": _plain(self.longer_wins()),
            "num_unequal_lengths": len(self._longer_won()),
            "position_bias": outcomes.position_bias(),
            "frontier": [
                {
                    "model": each.name,
                    "win_rate": self.win_rate(each).as_json(),
                    **each.outcomes.counts,
                    "score": _plain(self.score(each.scored)),
                    "kl": _plain(each.kl),
                }
                for each in self.frontier
            ],
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
    winners = {1.0: "model", 0.5: "tie", 0.0: "against", None: None}
    for index, win in enumerate(outcomes.wins):
        row: dict[str, Any] = {
            "prompt": ours.responses.prompts[index],
            "completion": ours.responses.completions[index],
            "completion_against": theirs.responses.completions[index],
            "winner": winners[win],
            "length": len(ours.responses.response_ids[index]),
            "length_against": len(theirs.responses.response_ids[index]),
        }
        if ours.scores is not None and theirs.scores is not None:
            row |= {"score": ours.scores[index], "score_against": theirs.scores[index]}
        if outcomes.shown_first is not None and outcomes.shown_second is not None:
            row |= {
                "winner_shown_first": winners[outcomes.shown_first[index]],
                "winner_shown_second": winners[outcomes.shown_second[index]],
            }
        yield row


def _print(evaluation: Evaluation, summary: dict[str, Any]) -> None:
    rows: dict[str, list[Cell]] = {
        each.name: [evaluation.win_rate(each), _counts(each), *_figures(evaluation, each.scored, each.kl)]
        for each in (evaluation.policy, *evaluation.frontier)
    }
    opponent = f"against: {evaluation.opponent_name}"
    rows[opponent] = [None, None, *_figures(evaluation, evaluation.opponent, None)]
    columns = ["policy", "win rate", "won / tied / lost", "score", "KL", "tokens", "stopped"]
    print_table(f"{summary['num_judged']} prompts, judged by {summary['judge']}", columns, rows)
    if (longer := evaluation.longer_wins()) is not None:
        print(f"Win rate of the longer response, where lengths differ: {longer}")
    if bias := summary["position_bias"]:
        print(
            f"Position bias: the judge preferred the response shown first {bias['first_rate']:.0%} of the time, and "
            f"contradicted itself on {bias['contradicted']:.0%} of the pairs, which count as ties."
        )


def _counts(result: PolicyResult) -> str:
    return " / ".join(map(str, result.outcomes.counts.values()))


def _figures(evaluation: Evaluation, scored: ScoredResponses, kl: Interval | None) -> list[Cell]:
    return [evaluation.score(scored), kl, mean(_lengths(scored)), _eos_rate(scored)]


def _lengths(scored: ScoredResponses) -> list[int]:
    """Length of each response, in tokens of the evaluated policy."""
    return [len(ids) for ids in scored.responses.response_ids]


def _eos_rate(scored: ScoredResponses) -> float:
    return mean(map(float, scored.responses.stopped))


def _plain(interval: Interval | None) -> dict[str, float | None] | None:
    return None if interval is None else interval.as_json()


def response_rows(responses: Responses, scores: Scores | None) -> Iterator[dict[str, Any]]:
    """Each response as a row with the columns of its prompt.

    A column with a name that is taken, such as a reference `completion`, becomes `given_<name>`.
    """
    own = ("prompt", "completion", "stopped", *(() if scores is None else ("score",)))
    names = free_names(responses.columns, own)
    for index, (prompt, completion) in enumerate(zip(responses.prompts, responses.completions, strict=True)):
        row: dict[str, Any] = {"prompt": prompt, "completion": completion, "stopped": responses.stopped[index]}
        if scores is not None:
            row["score"] = scores[index]
        yield {**row, **{names[column]: entries[index] for column, entries in responses.columns.items()}}
