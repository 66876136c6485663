"""The networks of a control run."""

from typing import Annotated, Literal

from annotated_types import Ge

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["NetworkConfig"]


class NetworkConfig(Section):
    """Policy and critic. Images are read by the convolutions of the Nature paper, everything else by layers."""

    hidden_sizes: list[Annotated[int, Ge(1)]] = field(
        [64, 64],
        meaning="Units of the hidden layers of policy and critic; for images, of those behind the convolutions.",
        source="PPO on MuJoCo; 512 behind convolutions",
        too_high="slow, and no better on tasks with few observations",
        too_low="the policy cannot represent a good controller",
    )
    activation: Literal["tanh", "relu"] = field("tanh", meaning="Between the layers.", source="PPO on MuJoCo")
    critic: Literal["separate", "shared"] = field(
        "separate",
        meaning="Whether the critic has a network of its own or a head on the policy's.",
        source="PPO: separate on MuJoCo, shared on Atari",
    )
    initialization: Literal["orthogonal", "torch"] = field(
        "orthogonal",
        meaning="Initial weights: orthogonal with a gain of √2, of 0.01 before the actions and of 1 before the value, "
        "and biases 0; or torch's own, uniform. Custom networks and an LSTM's weights keep theirs.",
        source="OpenAI Baselines: orthogonal; the small gain begins with actions that hardly depend on the state",
    )
    initial_log_std: float = field(
        0.0,
        ge=-10,
        le=5,
        meaning="Logarithm of the initial standard deviation of continuous actions, which is trained and the same in "
        "all states.",
        source="OpenAI Baselines",
        too_high="the first episodes are noise",
        too_low="little is explored",
    )
    network: str | None = field(
        None,
        meaning="A network of your own in place of the layers: a function of the spaces that returns a torch module "
        "from observations to features (file.py:name).",
        source="kedge",
        text="file.py:name",
    )
    memory_size: int | None = field(
        None,
        ge=1,
        meaning="Units of an LSTM behind the layers, for tasks whose observations do not show the whole state; needs "
        "control.critic=shared. Null: no memory.",
        source="PPO on MuJoCo and Atari: none; A3C's LSTM on Atari: 256",
        too_high="slow, and longer until something is remembered",
        too_low="too little is remembered",
    )
    sequence_length: int = field(
        32,
        ge=1,
        meaning="With a memory: the longest piece of an episode that is trained on at once, steps. Gradients reach so "
        "far back; what was remembered before is kept.",
        source="OpenAI Baselines' LSTM: the steps of a rollout, 128 on Atari",
        too_high="few rows per minibatch",
        too_low="what leads to a reward later is not remembered",
    )
