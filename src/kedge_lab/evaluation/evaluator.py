"""Evaluates policies on the same prompts with the same judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kedge.data import Prompt
from kedge.rewards import MESSAGES_COLUMN, Responses
from kedge.rewards.model import share_tokens
from kedge.runs.training import OnPhase
from kedge.stages.judges import Judge, PairOutcomes, ScoredResponses
from kedge.stages.policy import (
    Policy,
    SampledResponses,
    SamplingSettings,
    policy_kl,
    read_references,
    reencoded,
    render_for,
    written_responses,
)
from kedge_base.errors import ConfigError
from kedge_base.intervals import Interval, mean_interval, share_interval
from kedge_base.run_folder.record_format import JUDGING

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
    def win_rate(self) -> Interval | None:
        """Share of the decided pairs that the policy wins; ties count half. None if no pair is decided."""
        decided = self.outcomes.decided
        return share_interval(decided) if decided else None

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
        on_phase: Called with the progress of sampling and judging.
        player: Plays episodes, each of which counts as a response; None for single-turn responses.
    """

    prompts: Sequence[Prompt]
    reader: Policy
    judge: Judge
    sampling: SamplingSettings
    kl_temperature: float
    template: str
    on_phase: OnPhase = lambda *_: None
    player: Player | None = None

    def check(self, policy: Policy) -> None:
        """Check that a policy's responses can be sampled and compared; `ConfigError` or `DataError` if not."""
        if self.player is not None and not self._reads_alike(policy):
            raise ConfigError(
                f"{policy.source} has another tokenizer or chat template than {self.reader.source}: their episodes "
                "cannot be compared"
            )
        self._rendered(policy)

    def references(self) -> ScoredResponses:
        """The reference responses in the data; `DataError` if a prompt lacks one."""
        texts = read_references(self.prompts, template=self.template)
        tokenizer, most = self.reader.tokenizer, self.sampling.max_new_tokens
        stopped = [True] * len(texts)
        return self._score(written_responses(self.prompts, texts, stopped, tokenizer, max_new_tokens=most))

    def sample(self, policy: Policy) -> ScoredResponses:
        """Sample and score a policy's responses."""
        return self._scored(policy, self._sample(policy, self.sampling))

    def compare(self, policy: Policy, opponent: ScoredResponses, against: Policy | None) -> PolicyResult:
        """Sample a policy's responses and compare them with the opponent's.

        Args:
            policy: The policy to evaluate.
            opponent: The responses to compare with.
            against: The policy that the opponent's responses come from; None for references.
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
        prompts = self._rendered(policy)
        if self.player is not None:
            room = policy.room(sampling.max_new_tokens, player=self.player)
            rooms = room, policy.model.sampling_length
            self.player.begin(policy.stop_tokens.ids, *rooms, policy.tokenizer, prompts[:1])
        title = f"{title} {policy.source}"
        return list(policy.sample(prompts, sampling, title=title, on_phase=self.on_phase, player=self.player))

    def _rendered(self, policy: Policy) -> list[Prompt]:
        """The prompts as the policy's chat template renders them."""
        tokens = self.sampling.max_new_tokens
        return render_for(policy, self.prompts, self.reader, max_new_tokens=tokens, player=self.player)

    def _reads_alike(self, policy: Policy) -> bool:
        """True if the policy's responses, as tokens, are what the judge reads."""
        is_chat = self.player is not None or any(prompt.columns.get(MESSAGES_COLUMN) for prompt in self.prompts)
        alike = not is_chat or policy.tokenizer.chat_template == self.reader.tokenizer.chat_template
        return alike and share_tokens(policy.tokenizer, self.reader.tokenizer)

    def _as_read(self, policy: Policy, batches: Sequence[SampledResponses]) -> Responses:
        """Convert responses to the judge's input: the original prompts, and the reader's tokens."""
        responses = Responses.joined([each.responses for each in batches])
        if self._reads_alike(policy):
            return responses
        return reencoded(responses, self.prompts, self.reader.tokenizer)

    def _kl(self, policy: Policy, against: Policy | None, batches: Sequence[SampledResponses]) -> Interval | None:
        if against is None or self.player is not None or not share_tokens(policy.tokenizer, against.tokenizer):
            return None
        temperature = self.kl_temperature
        if temperature != self.sampling.temperature:
            # A temperature near 0 turns every small difference into a huge KL, so measure it as in training.
            batches = self._sample(policy, replace(self.sampling, temperature=temperature), title="sample for the KL")
        return mean_interval(policy_kl(policy, against, batches, temperature=temperature))
