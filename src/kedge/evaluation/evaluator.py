"""One set of questions, put to one policy after another and marked by one judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kedge.algorithm.statistics import Interval, bootstrap_interval
from kedge.data import Prompt
from kedge.evaluation.judges import Judge, PairOutcomes, ScoredResponses
from kedge.evaluation.opponents import read_references, render_for
from kedge.evaluation.policy import Policy, SampledBatch, Sampling, policy_kl
from kedge.evaluation.responses import join_responses, written_responses
from kedge.rewards import Responses
from kedge.rewards.model import share_tokens

__all__ = ["Evaluator", "PolicyResult"]


@dataclass(frozen=True)
class PolicyResult:
    """What came out for one policy.

    Attributes:
        name: The policy's folder or id.
        judged: Its responses and scores.
        verdicts: Whether they are better than the opponent's.
        kl: KL to the opponent, nats per response; None where that is no policy of the same tokens.
    """

    name: str
    judged: ScoredResponses
    verdicts: PairOutcomes
    kl: Interval | None


@dataclass(frozen=True)
class Evaluator:
    """The questions and the judge.

    Attributes:
        questions: The prompts.
        reader: The policy whose tokenizer read the prompts; the judge is given its tokens.
        judge: Compares or scores the responses.
        sampling: How responses are sampled.
        kl_temperature: The temperature at which the KL is measured: that of the training.
        template: The template that rendered the prompts, `tldr` or another.
        confidence: Coverage of the intervals, in (0, 1).
        num_resamples: Bootstrap resamples of an interval.
    """

    questions: Sequence[Prompt]
    reader: Policy
    judge: Judge
    sampling: Sampling
    kl_temperature: float
    template: str
    confidence: float = 0.95
    num_resamples: int = 10_000

    def references(self) -> ScoredResponses:
        """The data's own responses; `DataError` where a question has none."""
        texts = read_references(self.questions, template=self.template)
        return self._mark(written_responses(self.questions, texts, [True] * len(texts), self.reader.tokenizer))

    def sample(self, policy: Policy) -> ScoredResponses:
        """A policy's responses."""
        return self._mark(self._described(policy, self._answers(policy, self.sampling)))

    def compare(self, policy: Policy, opponent: ScoredResponses, against: Policy | None) -> PolicyResult:
        """A policy's responses beside the opponent's.

        Args:
            policy: Who is examined.
            opponent: The responses to compare with.
            against: The policy that gave them; None for references.
        """
        answers = self._answers(policy, self.sampling)
        judged = self._mark(self._described(policy, answers))
        verdicts = self.judge.compare(judged, opponent)
        return PolicyResult(policy.source, judged, verdicts, self._kl(policy, against, answers))

    def interval(self, values: Sequence[float]) -> Interval:
        """The mean of one figure per question, with the configured interval."""
        return bootstrap_interval(values, confidence=self.confidence, num_resamples=self.num_resamples)

    def _mark(self, responses: Responses) -> ScoredResponses:
        return ScoredResponses(responses, self.judge.scores(responses))

    def _answers(self, policy: Policy, sampling: Sampling, *, title: str = "sample") -> list[SampledBatch]:
        prompts = render_for(policy, self.questions, self.reader, max_new_tokens=sampling.max_new_tokens)
        return policy.sample_all(prompts, sampling, title=f"{title} {policy.source}")

    def _described(self, policy: Policy, answers: Sequence[SampledBatch]) -> Responses:
        """Responses as the judge reads them: to the questions as they were read, in the reader's tokens."""
        responses = join_responses([each.responses for each in answers])
        alike = policy.tokenizer.chat_template == self.reader.tokenizer.chat_template
        if alike and share_tokens(policy.tokenizer, self.reader.tokenizer):
            return responses
        return written_responses(self.questions, responses.completions, responses.stopped, self.reader.tokenizer)

    def _kl(self, policy: Policy, against: Policy | None, answers: Sequence[SampledBatch]) -> Interval | None:
        if against is None or not share_tokens(policy.tokenizer, against.tokenizer):
            return None
        temperature = self.kl_temperature
        if temperature != self.sampling.temperature:
            # Near 0 a temperature turns every small difference into an enormous KL: measured as in training.
            answers = self._answers(policy, replace(self.sampling, temperature=temperature), title="sample for the KL")
        return self.interval(policy_kl(policy, against, answers, temperature=temperature))
