"""What a policy writes: its responses to prompts, and their scores where a reward is given.

prompts ─▶ responses ─▶ scores ─▶ responses.jsonl, summary.json
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from kedge.algorithm.statistics import Interval, bootstrap_interval
from kedge.config import Config
from kedge.data import room_for_prompt
from kedge.errors import RewardError
from kedge.evaluation.policy import SampledBatch
from kedge.evaluation.responses import join_responses
from kedge.logs.json_lines import JsonLines, read_json_lines
from kedge.logs.progress import Progress
from kedge.logs.table import print_table
from kedge.rewards import Responses, Scores, WeightedReward
from kedge.runs.load_policy import load_policy, sampling_of
from kedge.runs.load_prompts import load_prompts
from kedge.runs.load_rewards import Rewards, configured_rewards, load_rewards
from kedge.runs.run import open_run

__all__ = ["GenerateResult", "run_generate"]

RESPONSES_FILE = "responses.jsonl"


@dataclass(frozen=True)
class GenerateResult:
    """What sampling leaves.

    Attributes:
        folder: The run's folder.
        summary: What `summary.json` holds.
        score: The mean score with its interval over the prompts; None without a reward.
    """

    folder: Path
    summary: dict[str, Any]
    score: Interval | None

    @property
    def responses(self) -> list[dict[str, Any]]:
        """The rows of `responses.jsonl`."""
        return read_json_lines(self.folder / RESPONSES_FILE)


def run_generate(
    config: Config, *, prompts: Sequence[Any] | None = None, reward: Rewards | None = None
) -> GenerateResult:
    """Sample `config.model`'s responses to `config.data.prompts`, and score them by `config.reward` if there is one.

    Rows are written as they come: what an interrupted run has sampled stays.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows that take the place of `config.data.prompts`.
        reward: Functions or models that take the place of `config.reward`.

    Raises:
        KedgeError: What is missing, cannot be read or does not fit, in one line, before anything is sampled.
    """
    run = open_run(config, "generate", given={"data.prompts": prompts, "reward": reward})
    sampling = sampling_of(config)
    policy = load_policy(str(config.model), config, run)
    room = room_for_prompt([policy.model.context_length], sampling.max_new_tokens)
    questions = load_prompts(config, run, policy.tokenizer, room=room, prompts=prompts)
    rewards = configured_rewards(config) if reward is None else reward
    scorer = None
    if rewards:
        scorer = load_rewards(rewards, config, run, policy.tokenizer)
        scorer.check_columns(list(questions[0].columns))

    asked = [question for question in questions for _ in range(config.generate.num_responses)]
    with run.started():
        answers = policy.sample(asked, sampling)
        responses, scores = _sample(answers, scorer, run.folder / RESPONSES_FILE, total=len(asked))
    score = None if scores is None else _mean_score(scores, config)
    summary = {
        "model": policy.source,
        "num_prompts": len(questions),
        "num_responses": len(asked),
        "length": mean(map(len, responses.response_ids)),
        "eos_rate": mean(map(float, responses.stopped)),
        **({} if scorer is None or score is None else {"reward": scorer.name, "score": asdict(score)}),
    }
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_table(
        f"{len(asked)} responses in {run.folder / RESPONSES_FILE}",
        ["policy", "score", "tokens", "stopped"],
        {policy.source: [score, summary["length"], summary["eos_rate"]]},
    )
    return GenerateResult(run.folder, summary, score)


def _sample(
    batches: Iterable[SampledBatch], scorer: WeightedReward | None, path: Path, *, total: int
) -> tuple[Responses, Scores | None]:
    """Score and write each batch as it comes; all responses, with their scores where there is a reward."""
    parts: list[Responses] = []
    scores: Scores = []
    with Progress("generate", total=total) as progress, closing(JsonLines(path)) as lines:
        for answers in batches:
            batch = answers.responses
            batch_scores = None if scorer is None else scorer.scores(batch)
            for row in _rows(batch, batch_scores):
                lines.write(row)
            parts.append(batch)
            scores += batch_scores or []
            progress.update(sum(len(part) for part in parts))
    return join_responses(parts), None if scorer is None else scores


def _rows(responses: Responses, scores: Scores | None) -> Iterator[dict[str, Any]]:
    """Each response as a row: a column whose name is taken (a reference `completion`) becomes `given_<name>`."""
    own = ("prompt", "completion", "stopped", *(() if scores is None else ("score",)))
    names = _free_names(responses.columns, own)
    for index, (prompt, completion) in enumerate(zip(responses.prompts, responses.completions, strict=True)):
        row: dict[str, Any] = {"prompt": prompt, "completion": completion, "stopped": responses.stopped[index]}
        if scores is not None:
            row["score"] = scores[index]
        yield {**row, **{names[column]: entries[index] for column, entries in responses.columns.items()}}


def _free_names(columns: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """What each column is called where some names are taken: no two alike, and none of those."""
    names = {column: column for column in columns if column not in taken}
    for column in (column for column in columns if column in taken):
        name = f"given_{column}"
        while name in names.values():
            name = f"given_{name}"
        names[column] = name
    return names


def _mean_score(scores: Scores, config: Config) -> Interval:
    """The mean over prompts of each prompt's mean: responses to one prompt are not independent of each other."""
    size = config.generate.num_responses
    groups = (scores[start : start + size] for start in range(0, len(scores), size))
    scored = [[score for score in group if score is not None] for group in groups]
    means = [mean(group) for group in scored if group]
    if not means:
        raise RewardError(f"the reward gave none of {len(scores)} responses a score")
    settings = config.evaluate
    return bootstrap_interval(means, confidence=settings.confidence, num_resamples=settings.num_bootstrap)
