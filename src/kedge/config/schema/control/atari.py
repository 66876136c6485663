"""How Atari games are shown and cut into episodes."""

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["AtariConfig"]


class AtariConfig(Section):
    """Of environments whose name begins with `ALE/`, by Gymnasium's wrappers; no other is changed."""

    frame_skip: int = field(
        4,
        ge=1,
        meaning="Atari: frames for which an action is repeated. A step sees the maximum of the last two.",
        source="DQN",
        too_high="fast objects cannot be hit",
        too_low="episodes are long, and little happens in a step",
    )
    frame_stack: int = field(
        4,
        ge=1,
        meaning="Atari: latest frames in an observation.",
        source="DQN",
        too_high="slow, and nothing more to see",
        too_low="speeds and directions are not visible",
    )
    noop_max: int = field(
        30,
        ge=0,
        meaning="Atari: an episode begins with up to so many frames without an action, drawn from its seed.",
        source="DQN",
        too_high="the game begins without the policy",
        too_low="episodes begin alike, and actions can be learned by heart",
    )
    life_loss_ends_episode: bool = field(
        False,
        meaning="Atari: whether the first life lost ends the episode. Returns are then those of single lives.",
        source="DQN and OpenAI Baselines end episodes with a life; Machado et al. 2018 advise against it",
    )
