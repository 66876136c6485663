"""`rollout`: how responses are sampled, and what becomes of those that do not stop."""

from typing import Literal

from pydantic import field_validator

from kedge.config.schema.field import Section, knob

__all__ = ["Rollout"]


class Rollout(Section):
    """One PPO update samples num_prompts × num_responses responses."""

    num_prompts: int = knob(
        64,
        ge=1,
        meaning="Prompts per update.",
        source="kedge: fits a laptop; the papers' 512 is in the presets",
        too_high="an update takes long, and few updates are made from the same number of responses",
        too_low="the advantages, and with them the steps, are noisy",
    )
    num_responses: int = knob(
        1,
        ge=1,
        meaning="Responses per prompt, in one update.",
        source="Ziegler, Stiennon, N+: one",
        too_high="fewer different prompts for the same work",
        too_low="one is enough for PPO, whose critic is the baseline",
    )
    max_new_tokens: int = knob(
        64,
        ge=1,
        meaning="Longest response, in tokens, the stop token included.",
        source="kedge: near the 48 to 53 of the TL;DR papers",
        too_high="time and memory go into rambling responses, and credit is spread over more tokens",
        too_low="responses are cut before they stop",
    )
    temperature: float = knob(
        1.0,
        gt=0,
        meaning="Divides the logits, when sampling and in every logprob of the policy and the reference.",
        source="InstructGPT; at 1 the policy that is trained is the one that is served. The TL;DR papers take 0.7",
        too_high="responses are incoherent, and the policy learns from text it would never serve",
        too_low="all responses of a prompt are alike, so that there is nothing to learn from",
    )
    top_k: None = knob(
        None,
        meaning="Always null. A filter that is not mirrored when responses are re-scored makes the KL negative.",
        source="Ziegler, Stiennon, InstructGPT, N+: pure sampling",
    )
    top_p: None = knob(
        None,
        meaning="Always null. A filter that is not mirrored when responses are re-scored makes the KL negative.",
        source="Ziegler, Stiennon, InstructGPT, N+: pure sampling",
    )
    stop_token: str | int | None = knob(
        None,
        meaning="Token that ends a response, as text or as its id; null is the tokenizer's EOS.",
        source="N+; Ziegler stopped at a newline",
    )
    missing_eos_score: float | Literal["auto"] | None = knob(
        "auto",
        meaning="Score of a response without the stop token; null switches this off; auto is −1 where a reward model "
        "scores and null where only Python functions do.",
        source="−1 in Stiennon and N+. A reward model has never seen cut-off text; a function's author decides for it",
        too_high="cut-off responses pay, and the policy learns to ramble",
        too_low="the policy learns little beyond stopping, and stops too early",
    )
    missing_eos_mode: Literal["replace", "subtract"] = knob(
        "replace",
        meaning="Whether missing_eos_score takes the place of the score, or its size is subtracted from it.",
        source="N+ replaces",
    )
    micro_batch_size: int | None = knob(
        None,
        ge=1,
        meaning="Responses sampled at a time; null takes all at once. Never changes the result.",
        source="kedge: as fast as memory allows",
        too_high="out of memory",
        too_low="the device is not kept busy",
    )

    @field_validator("top_k", "top_p", mode="before")
    @classmethod
    def _refuse_filters(cls, value: object) -> None:
        """Refuse every filter but the neutral 0 and 1, which filter nothing."""
        if value not in (None, 0, 1):
            raise ValueError(
                "sampling is not filtered: the re-scored logprobs would not mirror the filter, which makes the KL "
                "negative; leave it out, and use rollout.temperature for less random responses"
            )

    def eos_score(self, *, reward_model: bool) -> float | None:
        """The score of a response without the stop token, or None to leave its score alone.

        Args:
            reward_model: whether any reward is a reward model, which is what `auto` depends on.
        """
        if self.missing_eos_score == "auto":
            return -1.0 if reward_model else None
        return self.missing_eos_score
