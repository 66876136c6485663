"""`rlhf`: the three stages in a chain, and InstructGPT's loop around the last two."""

from kedge.config.schema.field import Section, knob

__all__ = ["Rlhf"]


class Rlhf(Section):
    """Round 1 is SFT, reward model, PPO. Each further round labels the policy's own responses and repeats two."""

    num_rounds: int = knob(
        1,
        ge=1,
        meaning="Times that a reward model is trained and PPO is run.",
        source="S4's chain is one round; InstructGPT repeats",
        too_high="the labeller's mistakes are learnt ever more exactly",
        too_low="the reward model judges text unlike what it was trained on",
    )
    labeller: str | None = knob(
        None,
        meaning="Who compares the policy's responses from round 2 on: a function or a reward model.",
        source="kedge: there is no labeller to assume",
    )
    num_prompts: int = knob(
        256,
        ge=1,
        meaning="Prompts labelled per further round.",
        source="kedge",
        too_high="labels are dear",
        too_low="the reward model hardly notices the new comparisons",
    )
    num_responses: int = knob(
        4,
        ge=2,
        meaning="Responses per labelled prompt, ranked together.",
        source="InstructGPT: 4 to 9",
        too_high="many pairs of one prompt, which tell less than other prompts would",
        too_low="2 give one pair per prompt",
    )
    keep_comparisons: bool = knob(
        True,
        meaning="Whether a further round trains on the earlier comparisons too, or on the new ones alone.",
        source="InstructGPT trains on all",
    )
    restart_policy: bool = knob(
        False,
        meaning="Whether PPO of a further round starts from the SFT policy again, or from the newest policy.",
        source="kedge: the round's comparisons are of the newest policy's responses",
    )
