"""Prefixes of responses with the critic's values, and with the returns of fresh continuations.

prompts ─▶ responses ─▶ prefixes ─▶ continuations ─▶ scores ─▶ returns to go
                            └─────▶ V(prefix)

Source: VinePPO (arXiv 2410.01679), section 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kedge.algorithm.advantages import RewardToGo
from kedge.algorithm.experience import Rollout
from kedge.algorithm.prefix_test import PrefixTest, prefix_test
from kedge.data import Prompt
from kedge.logs.critic_checks import CheckedPrefix
from kedge.rewards.score import score_rollout
from kedge.rollout.continuations import sample_continuations
from kedge.stages.ppo.steps import PpoSteps
from kedge.training.controllers import Coefficients
from kedge.training.runtime import stream, stream_seed

__all__ = ["NOTHING_TO_CHECK", "PrefixSample", "sample_prefixes"]

NOTHING_TO_CHECK = "no response of two or more tokens has enough scored continuations"


@dataclass(frozen=True)
class PrefixSample:
    """Prefixes with the returns of their continuations.

    Attributes:
        prompts: Number of each prefix's prompt.
        tokens: Length of each prefix.
        lengths: Length of the response that it was cut from.
        values: The critic's value of the state after the prefix.
        returns: Return to go of each continuation; NaN where it has no score.
        prompt_returns: Mean return of other responses to the prompt.
    """

    prompts: Int[Tensor, " prefixes"]
    tokens: Int[Tensor, " prefixes"]
    lengths: Int[Tensor, " prefixes"]
    values: Float[Tensor, " prefixes"]
    returns: Float[Tensor, "prefixes continuations"]
    prompt_returns: Float[Tensor, " prefixes"]

    @property
    def num(self) -> int:
        """Number of prefixes."""
        return len(self.values)

    @classmethod
    def joined(cls, parts: Sequence[PrefixSample]) -> PrefixSample:
        """Samples of different prompts as one."""
        return cls(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def test(self, *, confidence: float = 0.95) -> PrefixTest:
        """The figures; see `prefix_test`."""
        return prefix_test(self.values, self.returns, self.prompt_returns, self.prompts, confidence=confidence)

    def listed(self) -> list[CheckedPrefix]:
        """The prefixes one by one."""
        columns = (
            self.prompts, self.tokens, self.lengths, self.values, self.returns.nanmean(-1), self.prompt_returns
        )  # fmt: skip
        return [CheckedPrefix(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


@torch.no_grad()
def sample_prefixes(
    steps: PpoSteps,
    prompts: Sequence[Prompt],
    coefficients: Coefficients,
    *,
    num_prefixes: int,
    num_continuations: int,
    policy_version: int = 0,
    first_prompt: int = 0,
) -> PrefixSample:
    """Cut responses at random tokens, continue each prefix, and compute what PPO's critic is to predict there.

    That is the return to go by the run's own rewards: scores, the penalty for a missing stop token, the KL of the
    tokens after the prefix if it is part of the reward, and γ. The random numbers depend on the run's seed only.

    Args:
        steps: Samples, scores and collects as in training.
        prompts: The prompts.
        coefficients: The current coefficients.
        num_prefixes: Prefixes per prompt. Responses of one token have none.
        num_continuations: Continuations per prefix, and further responses per prompt.
        policy_version: Updates that the policy has completed.
        first_prompt: Number of the first prompt, for prompts that are sampled in several parts.

    Raises:
        RewardError: A reward failed.
        UnscoredError: No response has a score.
    """
    config, seed, name = steps.config, steps.config.runtime.seed, ("critic check", first_prompt)
    groups = [group for group in range(len(prompts)) for _ in range(num_prefixes)]
    sources = steps.roll_out(prompts, groups, *name, policy_version=policy_version)
    lengths = sources.response_lengths.cpu()
    draws = torch.rand(len(groups), generator=stream(seed, *name, "cuts"), dtype=torch.float64)
    cuts = 1 + (draws * (lengths - 1)).long()
    cut_rows = (lengths > 1).nonzero().squeeze(1)
    # The further responses of a prompt are continuations of nothing; they come first.
    rows = torch.cat([torch.arange(len(prompts)) * num_prefixes, cut_rows]).repeat_interleave(num_continuations)
    starts = torch.cat([torch.zeros(len(prompts), dtype=torch.long), cuts[cut_rows]]).repeat_interleave(
        num_continuations
    )
    whole = sample_continuations(
        steps.roles.engine,
        sources,
        rows.tolist(),
        starts.tolist(),
        seeds=[stream_seed(seed, *name, "continuation", number) for number in range(len(rows))],
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        room=steps.roles.actor_critic.policy.sampling_length,
    )
    returns, values = (
        each.gather(1, starts[:, None]).view(-1, num_continuations)
        for each in _returns_and_values(steps, whole, prompts, coefficients)
    )
    prompt_returns, to_go = returns[: len(prompts)].nanmean(-1), returns[len(prompts) :]
    prompt = sources.group.cpu()[cut_rows]
    kept = ((~to_go.isnan()).sum(-1) >= 2) & ~prompt_returns[prompt].isnan()
    # The continuations of a prefix share its value, up to rounding.
    scored = (~to_go.isnan()).int().argmax(-1, keepdim=True)
    value = values[len(prompts) :].gather(1, scored).squeeze(1)
    columns = prompt + first_prompt, cuts[cut_rows], lengths[cut_rows], value, to_go, prompt_returns[prompt]
    return PrefixSample(*(column[kept] for column in columns))


def _returns_and_values(
    steps: PpoSteps, rollout: Rollout, prompts: Sequence[Prompt], coefficients: Coefficients
) -> tuple[Float[Tensor, "rows time"], Float[Tensor, "rows time"]]:
    """Return to go and value at each token, on the CPU; NaN in rows without a score."""
    roles, config = steps.roles, steps.config
    scored = score_rollout(
        rollout,
        [prompts[group] for group in rollout.group.tolist()],
        roles.reward,
        roles.tokenizer,
        max_new_tokens=config.rollout.max_new_tokens,
        missing_eos=roles.missing_eos,
        seed=stream_seed(config.runtime.seed, "critic check", "reward"),
    )
    experience = steps.collect(scored, coefficients, advantage=RewardToGo(config.ppo.gamma))
    assert experience.values is not None, "a run without a critic is refused"
    known = torch.tensor([score is not None for score in scored.terms.scores])
    filled = torch.full(rollout.response_ids.shape, math.nan)
    returns, values = (filled.clone() for _ in range(2))
    returns[known], values[known] = experience.returns.float().cpu(), experience.values.float().cpu()
    return returns, values
