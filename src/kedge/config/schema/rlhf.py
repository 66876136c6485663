"""`rlhf`: the three stages in a chain, and InstructGPT's repetition of the last two."""

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

HUMAN = "human"
"""The labeler that is people."""


class RlhfConfig(Section):
    """The three stages in a chain. Round 1 is SFT, reward model and PPO.

    Each further round, and the first one without `data.comparisons`, labels responses of the current policy, then
    trains the reward model and the policy.
    """

    num_rounds: int = field(
        1,
        ge=1,
        meaning="Number of times a reward model is trained and PPO is run.",
        source="S4 runs one round; InstructGPT repeats",
        too_high="the labeler's errors are learned more and more exactly",
        too_low="the reward model scores text unlike its training data",
    )
    labeler: str | None = field(
        None,
        meaning="Compares the policy's responses from round 2 on, without data.comparisons from round 1 on: a "
        "function; a reward model; a model behind an API (`openai:MODEL@URL`), which sees every pair in both orders; "
        "or human: the run ends before each of these rounds, and is resumed once people have answered what it sampled.",
        source="kedge: no labeler is assumed",
        text="a folder, a hub id, a function or human",
    )
    min_labels: int | None = field(
        None,
        ge=1,
        meaning="Items that people must have answered before a round continues; null for all. May change when a run is "
        "resumed.",
        source="kedge: what was sampled is labeled",
        too_high="the round waits for items that people leave out",
        too_low="the new comparisons hardly change the reward model",
    )
    num_prompts: int = field(
        256,
        ge=1,
        meaning="Prompts labeled in each round with a labeler.",
        source="kedge: a few hundred fresh comparisons at a moderate cost",
        too_high="labeling gets expensive",
        too_low="the new comparisons hardly change the reward model",
    )
    num_responses: int = field(
        4,
        ge=2,
        meaning="Responses per labeled prompt, ranked together.",
        source="InstructGPT: 4 to 9",
        too_high="many pairs of the same prompt, which add less than further prompts would",
        too_low="2 responses give only one pair per prompt",
    )
    keep_comparisons: bool = field(
        True,
        meaning="Train each further round on the comparisons of earlier rounds as well.",
        source="InstructGPT trains on all of them",
    )
    restart_policy: bool = field(
        False,
        meaning="Start PPO in each further round from the SFT policy instead of the newest policy.",
        source="kedge: the round's comparisons are of the newest policy's responses",
    )
    train_critic: bool = field(
        False,
        meaning="Whether each round trains a critic before PPO, which starts from it: kedge critic, with the fields of "
        "`critic`.",
        source="kedge: off; VC-PPO and VAPO pretrain the critic",
    )

    @property
    def asks_people(self) -> bool:
        """True if people compare the responses."""
        return self.labeler == HUMAN
