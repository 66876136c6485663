"""Evaluates policies on the same prompts with the same judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kedge.data import Prompt, Rendered
from kedge.logs.phases import JUDGING, OnPhase
from kedge.rewards import MESSAGES_COLUMN, Responses, Scores, WeightedReward
from kedge.rewards.model import share_tokens
from kedge.stages.judges import Judge, PairOutcomes, ScoredResponses
from kedge.stages.policy import (
    Policy,
    SampledResponses,
    SamplingSettings,
    policy_kl,
    read_references,
    render_for,
    written_responses,
)
from kedge_base.errors import ConfigError, RewardError
from kedge_base.intervals import Interval, mean_interval, share_interval

if TYPE_CHECKING:
    from kedge.rollout.player import Player


@dataclass(frozen=True)
class PolicyResult:
    """Result of one policy.

    Attributes:
        name: Folder or hub id of the policy.
        scored: Its responses and scores.
        outcomes: Outcome per prompt against the opponent.
        kl: KL to the opponent, nats per response; None if the opponent is not a policy with the same tokens, and for
            episodes.
    """

    name: str
    scored: ScoredResponses
    outcomes: PairOutcomes
    kl: Interval | None

    @property
    def win_rate(self) -> Interval:
        """Share of the pairs that the policy wins; ties count half."""
        return share_interval(self.outcomes.decided)

    def summary(self) -> dict[str, Interval | float | str | None]:
        """Figures for `summary.json`."""
        score = self.scored.figures()["score"]
        return {"model": self.name, "win_rate": self.win_rate, **self.outcomes.counts, "score": score, "kl": self.kl}


@dataclass(frozen=True)
class Evaluator:
    """Samples, scores and compares responses.

    Attributes:
        prompts: The prompts.
        reader: The policy with the tokenizer that read the prompts; the judge gets its tokens.
        judge: Compares or scores the responses.
        sampling: Settings of the sampling.
        kl_temperature: Sampling temperature of the KL estimate: that of training.
        template: The template that rendered the prompts, e.g. `tldr`.
        on_phase: Told how far sampling and judging are.
        player: Plays episodes, of which each is a response; None for single responses.
    """

    prompts: Sequence[Prompt]
    reader: Policy
    judge: Judge
    sampling: SamplingSettings
    kl_temperature: float
    template: str
    on_phase: OnPhase = lambda *_: None
    player: Player | None = None

    def references(self) -> ScoredResponses:
        """The reference responses in the data; `DataError` if a prompt lacks one."""
        texts = read_references(self.prompts, template=self.template)
        return self._score(written_responses(self.prompts, texts, [True] * len(texts), self.reader.tokenizer))

    def sample(self, policy: Policy) -> ScoredResponses:
        """Sample and score a policy's responses."""
        return self._scored(policy, self._sample(policy, self.sampling))

    def compare(self, policy: Policy, opponent: ScoredResponses, against: Policy | None) -> PolicyResult:
        """Sample a policy's responses and compare them with the opponent's.

        Args:
            policy: The policy to evaluate.
            opponent: The responses to compare with.
            against: The policy that they come from; None for references.
        """
        batches = self._sample(policy, self.sampling)
        scored = self._scored(policy, batches)
        self.on_phase(JUDGING, 0, len(scored.responses))
        outcomes = self.judge.compare(scored, opponent)
        return PolicyResult(policy.source, scored, outcomes, self._kl(policy, against, batches))

    def _scored(self, policy: Policy, batches: Sequence[SampledResponses]) -> ScoredResponses:
        scored = self._score(self._as_read(policy, batches))
        return replace(scored, endings=[word for each in batches for word in each.endings])

    def _score(self, responses: Responses) -> ScoredResponses:
        self.on_phase(JUDGING, 0, len(responses))
        return self.judge.score(responses)

    def _sample(self, policy: Policy, sampling: SamplingSettings, *, title: str = "sample") -> list[SampledResponses]:
        prompts = render_for(policy, self.prompts, self.reader, max_new_tokens=sampling.max_new_tokens)
        if self.player is not None:
            room = policy.room(sampling.max_new_tokens)
            self.player.begin(policy.stop_tokens.ids, room, policy.tokenizer, prompts[:1])
        title = f"{title} {policy.source}"
        return list(policy.sample(prompts, sampling, title=title, on_phase=self.on_phase, player=self.player))

    def _as_read(self, policy: Policy, batches: Sequence[SampledResponses]) -> Responses:
        """Responses as the judge reads them: to the original prompts, in the reader's tokens."""
        responses = Responses.joined([each.responses for each in batches])
        is_chat = self.player is not None or any(prompt.columns.get(MESSAGES_COLUMN) for prompt in self.prompts)
        alike = not is_chat or policy.tokenizer.chat_template == self.reader.tokenizer.chat_template
        if alike and share_tokens(policy.tokenizer, self.reader.tokenizer):
            return responses
        if self.player is not None:
            raise ConfigError(
                f"{policy.source} has another tokenizer or chat template than {self.reader.source}: their episodes "
                "cannot be compared"
            )
        written = written_responses(self.prompts, responses.completions, responses.stopped, self.reader.tokenizer)
        return replace(written, preceding=responses.preceding)

    def _kl(self, policy: Policy, against: Policy | None, batches: Sequence[SampledResponses]) -> Interval | None:
        if against is None or self.player is not None or not share_tokens(policy.tokenizer, against.tokenizer):
            return None
        temperature = self.kl_temperature
        if temperature != self.sampling.temperature:
            # A temperature near 0 turns every small difference into a huge KL, so measure it as in training.
            batches = self._sample(policy, replace(self.sampling, temperature=temperature), title="sample for the KL")
        return mean_interval(policy_kl(policy, against, batches, temperature=temperature))


POST_FIELDS = ("subreddit", "title", "post")
"""Columns that `data.template=tldr` builds the prompt from; a comparison needs no other columns."""


def collect_rankings(
    policy: Policy,
    prompts: Sequence[Prompt],
    labeler: WeightedReward,
    sampling: SamplingSettings,
    *,
    num_responses: int,
    title: str,
    on_phase: OnPhase = lambda *_: None,
) -> list[dict[str, Any]]:
    """Sample several responses to each prompt and rank them by the labeler's scores.

    Args:
        policy: The policy to sample from.
        prompts: The prompts.
        labeler: Scores the responses.
        sampling: Sampling settings.
        num_responses: Responses per prompt, ≥ 2.
        title: Title of the progress display.
        on_phase: Told how far the sampling is.

    Returns:
        Rows of `prompt`, `responses` and `ranks`, as `parse_comparison` expects them; prompts whose responses all have
        the same score are left out.

    Raises:
        RewardError: No row is left, or the labeler broke its contract.
    """
    repeated = [prompt for prompt in prompts for _ in range(num_responses)]
    batches = policy.sample(repeated, sampling, title=title, on_phase=on_phase)
    responses = Responses.joined([each.responses for each in batches])
    scores = labeler.score(responses)
    rows: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        own = slice(number * num_responses, (number + 1) * num_responses)
        texts, ranks = rank_responses(responses.completions[own], scores[own])
        if texts:
            post = {name: prompt.columns[name] for name in POST_FIELDS if name in prompt.columns}
            # A conversation stays one: its answers are then closed as its template closes them.
            asked = prompt.columns.get(MESSAGES_COLUMN) if isinstance(prompt.text, Rendered) else None
            rows.append({**post, "prompt": asked or prompt.text, "responses": texts, "ranks": ranks})
    if not rows:
        raise RewardError(
            f"labeler {labeler.name!r} scored all responses to each of {len(prompts)} prompts the same; increase "
            "rollout.temperature so that responses differ"
        )
    return rows


def rank_responses(texts: Sequence[str], scores: Scores) -> tuple[list[str], list[int]]:
    """Distinct texts with their ranks, 1 the best; equal scores get equal ranks. Empty without a preference.

    Blank responses and responses without a score are left out; equal texts are merged.
    """
    scored = {text: score for text, score in zip(texts, scores, strict=True) if text.strip() and score is not None}
    levels = sorted(set(scored.values()), reverse=True)
    if len(levels) < 2:
        return [], []
    return list(scored), [levels.index(score) + 1 for score in scored.values()]
