"""The environment of a control run: which, how many, and how observations, actions and rewards are treated."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["EnvironmentConfig"]


class EnvironmentConfig(Section):
    """Several copies of one environment, played side by side."""

    env: str | None = field(
        None,
        meaning="The environment: an id of Gymnasium (HalfCheetah-v5, ALE/Pong-v5), module:Id, or a function that "
        "makes one (file.py:name).",
        source="kedge: no environment is assumed",
        text="an id or file.py:name",
    )
    env_options: dict[str, bool | int | float | str | list[bool | int | float | str]] = field(
        {},
        meaning="Arguments of the environment, e.g. {ctrl_cost_weight: 0.1}.",
        source="kedge: the environment's own defaults",
    )
    num_envs: int = field(
        1,
        ge=1,
        meaning="Copies of the environment that are played side by side.",
        source="PPO on MuJoCo: 1; 8 on Atari",
        too_high="each contributes short pieces of episodes, whose ends rest on the critic",
        too_low="small batches for the policy's passes, and one episode's luck decides an update",
    )
    vectorization: Literal["sync", "async", "envpool"] = field(
        "sync",
        meaning="Where the copies run: one after the other in this process (sync), in a process each (async), which "
        "pays where a step takes longer than about a millisecond, or in threads of EnvPool (envpool), which has its "
        "own implementations and names (Pong-v5), and cannot restore an episode under way.",
        source="kedge, measured: sync is faster for every classic and MuJoCo task",
    )
    max_episode_steps: int | None = field(
        None,
        ge=1,
        meaning="Steps after which an episode is cut, each of control.frame_skip frames on Atari; null: the "
        "environment's own limit.",
        source="kedge: the environment's own",
        too_high="an agent that is stuck fills the batch",
        too_low="the critic's estimate replaces most of every return",
    )
    normalize_observations: bool = field(
        True,
        meaning="Whether vectors are scaled to mean 0 and variance 1 by running statistics, which change between "
        "updates only and are saved with the model. Images are divided by 255 in any case.",
        source="OpenAI Baselines on MuJoCo",
    )
    reward_scaling: Literal["std", "sign", "none"] = field(
        "std",
        meaning="What the critic learns of a reward: divided by the running standard deviation of the discounted "
        "return (std), its sign, or the reward itself. Logged returns are always those of the environment.",
        source="OpenAI Baselines: std on MuJoCo, sign on Atari",
    )
    normalization_clip: float = field(
        10.0,
        gt=0,
        meaning="Bound of normalized observations and of rewards that are divided by a standard deviation.",
        source="OpenAI Baselines",
        too_high="an outlier reaches the networks and dominates the critic's loss",
        too_low="what distinguishes rare states and large rewards is cut off",
    )
    action_bounds: Literal["clip", "squash", "none"] = field(
        "clip",
        meaning="What happens to continuous actions outside the environment's bounds: clipped where they are played "
        "(clip), drawn through a tanh, so that they are never outside (squash), or played as they are (none). Log "
        "probabilities are always those of what the policy drew.",
        source="OpenAI Baselines clip. The code behind table 1 of PPO did not: with Gymnasium's cost of controls, clip "
        "favors policies that draw large actions",
    )
