"""pass@k and maj@k: how many prompts a policy solves with several responses to each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from kedge.algorithm.statistics import majority_at_k, pass_at_k
from kedge.logs.json_lines import JsonLines, as_rows
from kedge.logs.table import Cell, print_table
from kedge.stages.judges import ScoredResponses
from kedge_base.errors import RewardError
from kedge_base.intervals import Interval, mean_interval, share_interval
from kedge_base.machine.progress import format_figure
from kedge_base.run_folder.output import JUDGMENTS_FILE, write_summary
from kedge_base.texts import counted
from kedge_inspect.page.sentences import no_verdicts
from kedge_lab.evaluation.report import endings_line, plain_figures, verdict_lines

RIGHT = 1.0
"""The lowest score of a right response, as verifiers give it."""


@dataclass(frozen=True)
class Solved:
    """The scored responses of a policy, several to each prompt.

    Attributes:
        name: Folder or hub id of the policy.
        scored: Its responses, grouped by prompt.
        num_samples: Responses to each prompt.
    """

    name: str
    scored: ScoredResponses
    num_samples: int

    @property
    def ks(self) -> list[int]:
        """The values of k: powers of two up to the number of responses per prompt, and that number."""
        powers = [2**power for power in range(self.num_samples.bit_length())]
        return sorted({*powers, self.num_samples})

    @property
    def pass_at(self) -> dict[int, Interval]:
        """pass@k with its interval over prompts, by k."""
        return _intervals({k: self.passed(k) for k in self.ks})

    @property
    def maj_at(self) -> dict[int, Interval]:
        """maj@k with its interval over prompts, by k; empty if the judge finds no answers in the responses."""
        if self.scored.answers is None:
            return {}
        return _intervals({k: [each and majority_at_k(*each, k) for each in self._drawn(k)] for k in self.ks})

    def passed(self, k: int) -> list[float | None]:
        """pass@k of each prompt; None for a prompt with fewer than k scored responses."""
        return [each and pass_at_k(each[0] + sum(each[1]) + each[2], each[0], k) for each in self._drawn(k)]

    def _drawn(self, k: int) -> list[tuple[int, list[int], int] | None]:
        return [each if each[0] + sum(each[1]) + each[2] >= k else None for each in self._tallies]

    @cached_property
    def _tallies(self) -> list[tuple[int, list[int], int]]:
        """For each prompt, the counts of right responses, of each wrong answer, and of responses without an answer."""
        assert self.scored.scores is not None, "a judge that only compares cannot tell what is right"
        answers = self.scored.answers or [None] * len(self.scored.scores)
        rows = list(zip(self.scored.scores, answers, strict=True))
        found: list[tuple[int, list[int], int]] = []
        for start in range(0, len(rows), self.num_samples):
            known = [(score, answer) for score, answer in rows[start : start + self.num_samples] if score is not None]
            wrong = Counter(answer for score, answer in known if score < RIGHT)
            silent = wrong.pop(None, 0)
            found.append((len(known) - wrong.total() - silent, list(wrong.values()), silent))
        return found

    def summary(self) -> dict[str, Any]:
        """Figures for `summary.json`."""
        return {
            "model": self.name,
            "pass@k": _plain(self.pass_at),
            **({"maj@k": _plain(self.maj_at)} if self.maj_at else {}),
            **plain_figures(self.scored.figures(self.num_samples)),
            **self.scored.shares(),
        }

    def less(self, other: Solved) -> dict[int, Interval]:
        """By k, pass@k minus another policy's, paired by prompt, with its interval."""
        pairs = {k: zip(self.passed(k), other.passed(k), strict=True) for k in self.ks}
        apart = {k: [a - b for a, b in each if a is not None and b is not None] for k, each in pairs.items()}
        return {k: mean_interval(each) for k, each in apart.items() if each}


def _intervals(values: Mapping[int, Sequence[float | None]]) -> dict[int, Interval]:
    known = {k: [each for each in prompts if each is not None] for k, prompts in values.items()}
    return {k: share_interval(prompts) for k, prompts in known.items() if prompts}


def _plain(intervals: Mapping[int, Interval]) -> dict[str, Any]:
    return {str(k): each.as_json() for k, each in intervals.items()}


def report_solved(
    policies: Sequence[Solved], folder: Path, *, judge: str, temperature: float, is_shown: bool = True
) -> dict[str, Any]:
    """Write judgments and summary, print tables, and return the summary.

    Args:
        policies: The evaluated policy, followed by those that it is compared with.
        folder: The run's folder.
        judge: Name of the judge.
        temperature: The sampling temperature.
        is_shown: False on a rank that is not the first: nothing is printed.

    Raises:
        RewardError: No response of the evaluated policy has a score.
    """
    first, *others = policies
    scores = first.scored.scores or []
    if not first.pass_at:
        raise RewardError(f"{judge} scored none of {counted(len(scores), 'response')} of {first.name}")
    summary = {
        **first.summary(),
        "judge": judge,
        "temperature": temperature,
        "num_prompts": len(scores) // first.num_samples,
        "num_samples": first.num_samples,
        "num_responses": len(scores),
        "num_scored": len(scores) - scores.count(None),
        "others": [{**each.summary(), "difference": {"pass@k": _plain(first.less(each))}} for each in others],
    }
    with closing(JsonLines(folder / JUDGMENTS_FILE)) as lines:
        for row in (row for each in policies for row in _rows(each)):
            lines.write(row)
    write_summary(folder, summary)
    if is_shown:
        title = f"{first.num_samples} responses to each of {counted(summary['num_prompts'], 'prompt')} at temperature "
        title += f"{temperature:g}, judged by {judge}"
        _print(policies, title)
        known = [score for each in policies for score in each.scored.scores or () if score is not None]
        for line in no_verdicts(known, judge):
            print(line)
    return summary


def _rows(policy: Solved) -> Iterator[dict[str, Any]]:
    scored = policy.scored
    named = {"score": scored.scores, "reason": scored.reasons, "answer": scored.answers, "ending": scored.endings}
    columns: dict[str, Sequence[Any]] = {
        "prompt": scored.responses.prompts,
        "completion": scored.responses.completions,
        "stopped": scored.responses.stopped,
        "length": scored.num_tokens,
        **{name: entries for name, entries in named.items() if entries},
    }
    return ({"model": policy.name, **row} for row in as_rows(columns))


def _print(policies: Sequence[Solved], title: str) -> None:
    first = policies[0]
    for each in policies:
        majority = each.maj_at
        more = {} if each is first else first.less(each)
        rows: dict[str, list[Cell]] = {
            str(k): [interval, majority.get(k), more.get(k)] for k, interval in each.pass_at.items()
        }
        print_table(f"{each.name}: {title}", ["k", "pass@k", "maj@k", "difference in pass@k"], rows)
        length, stopped = mean(each.scored.num_tokens), mean(map(float, each.scored.responses.stopped))
        score = each.scored.figures(each.num_samples)["score"]
        known = "no response has a score, " if score is None else f"mean score {score}, "
        print(f"{known}{format_figure(length)} tokens on average, {stopped:.0%} with a stop token")
        for line in verdict_lines(each.scored.verdicts):
            print(line)
        if each.scored.endings:
            print(endings_line(each.scored.endings))
