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

    num_rounds: int = field(1, ge=1)
    """Number of times a reward model is trained and PPO is run.

    Source: S4 runs one round; InstructGPT repeats
    Too high: the labeler's errors are learned more and more exactly
    Too low: the reward model scores text unlike its training data
    """
    labeler: str | None = None
    """Compares the policy's responses from round 2 on, without data.comparisons from round 1 on: a function; a reward
    model; a model behind an API (`openai:MODEL@URL`), which sees every pair in both orders; or human: the run ends
    before each of these rounds, and is resumed once people have answered what it sampled.

    Source: kedge: no labeler is assumed
    Text: a folder, a hub id, a function or human
    """
    min_labels: int | None = field(None, ge=1)
    """Items that people must have answered before a round continues; null for all. May change when a run is resumed.

    Source: kedge: what was sampled is labeled
    Too high: the round waits for items that people leave out
    Too low: the new comparisons hardly change the reward model
    """
    num_prompts: int = field(256, ge=1)
    """Prompts labeled in each round with a labeler.

    Source: kedge: a few hundred fresh comparisons at a moderate cost
    Too high: labeling gets expensive
    Too low: the new comparisons hardly change the reward model
    """
    num_responses: int = field(4, ge=2)
    """Responses per labeled prompt, ranked together.

    Source: InstructGPT: 4 to 9
    Too high: many pairs of the same prompt, which add less than further prompts would
    Too low: 2 responses give only one pair per prompt
    """
    keep_comparisons: bool = True
    """Train each further round on the comparisons of earlier rounds as well.

    Source: InstructGPT trains on all of them
    """
    restart_policy: bool = False
    """Start PPO in each further round from the SFT policy instead of the newest policy.

    Source: kedge: the round's comparisons are of the newest policy's responses
    """
    train_critic: bool = False
    """Train a critic before PPO in each round (kedge critic, with the fields of `critic`), and start PPO from it.

    Source: kedge: off; VC-PPO and VAPO pretrain the critic
    """

    @property
    def asks_people(self) -> bool:
        """True if people compare the responses."""
        return self.labeler == HUMAN
