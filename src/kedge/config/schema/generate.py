"""`generate`: how a finished policy is sampled."""

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["GenerateConfig"]


class GenerateConfig(Section):
    """Sampling from a finished policy, in `kedge generate` and `kedge evaluate`."""

    num_responses: int = field(
        1, ge=1, meaning="Responses per prompt (evaluate always samples one).", source="kedge: one response per prompt"
    )
    max_new_tokens: int | None = field(
        None,
        ge=1,
        meaning="Maximum response length, in tokens; null uses rollout.max_new_tokens.",
        source="kedge: the length of the training rollouts",
        too_high="slow if responses do not stop",
        too_low="responses are cut off before they end",
    )
    temperature: float | None = field(
        None,
        gt=0,
        meaning="Divides the logits; null is 0.01, practically greedy, for one response per prompt, and "
        "rollout.temperature for several, which are to differ.",
        source="N+ (evaluation): 0.01",
        too_high="responses become incoherent",
        too_low="all responses to a prompt are identical",
    )
    batch_size: int = field(
        64,
        ge=1,
        meaning="Responses sampled at once. Does not change the result.",
        source="kedge",
        too_high="out of memory",
        too_low="the device is underused",
    )
