"""The loop of a control run: steps, epochs, minibatches, learning rate."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["ControlLoopConfig"]


class ControlLoopConfig(Section):
    """Each update plays num_envs × num_steps steps, then takes num_epochs × num_minibatches optimizer steps on them."""

    total_steps: int = field(
        1_000_000,
        ge=1,
        meaning="Environment steps of the run, over all copies; rounded down to whole updates.",
        source="PPO on MuJoCo",
        too_high="time is spent after learning has ended",
        too_low="returns are still rising at the end",
    )
    num_steps: int = field(
        2048,
        ge=1,
        meaning="Steps of each copy per update.",
        source="PPO on MuJoCo; 128 on Atari",
        too_high="few updates, each far from the policy that played",
        too_low="returns are mostly the critic's estimate",
    )
    algorithm: Literal["ppo", "trpo"] = field(
        "ppo",
        meaning="How an update improves the policy: PPO's epochs of minibatches, or TRPO's one natural-gradient step "
        "within a bound of the KL.",
        source="PPO; TRPO (arXiv 1502.05477)",
    )
    num_epochs: int = field(
        10,
        ge=1,
        meaning="Passes over the steps of each update; with algorithm=trpo, of the critic alone.",
        source="PPO on MuJoCo; 3 on Atari",
        too_high="the batch is overfitted: in later epochs most steps are clipped",
        too_low="steps that were expensive to play are under-used",
    )
    num_minibatches: int = field(
        32,
        ge=1,
        meaning="Optimizer steps per epoch, each on an equal share of the steps.",
        source="PPO on MuJoCo: 64 of 2,048 steps each; 8 on Atari",
        too_high="small, noisy optimizer steps",
        too_low="few optimizer steps per update",
    )
    learning_rate: float = field(
        3e-4,
        ge=0,
        meaning="Peak learning rate of Adam.",
        source="PPO on MuJoCo",
        too_high="returns collapse; KL and clip fraction shoot up",
        too_low="slow learning",
    )
    schedule: Literal["linear", "constant"] = field(
        "linear", meaning="Whether the learning rate falls to 0 over the run.", source="OpenAI Baselines"
    )
    adam_eps: float = field(
        1e-5,
        gt=0,
        meaning="Adam's ε, added to the denominator of the step.",
        source="OpenAI Baselines",
        too_high="weights with small gradients hardly move",
        too_low="weights with tiny gradients take full-size steps",
    )
    max_grad_norm: float | None = field(
        0.5,
        gt=0,
        meaning="L2 norm to which the gradient is clipped, of the policy and of a separate critic apart; null: not at "
        "all.",
        source="OpenAI Baselines",
        too_high="a single bad batch can ruin the weights",
        too_low="every step is clipped, which in effect lowers the learning rate",
    )
    early_stop_kl: float | None = field(
        None,
        gt=0,
        meaning="KL to the policy that played, nats per step; the policy's optimizer steps of an update end at 1.5 "
        "times this value. Null: they do not.",
        source="off in PPO; Spinning Up: 0.01",
        too_high="updates that go too far are not stopped",
        too_low="every update stops in its first epoch",
    )
    compile: Literal["auto"] | bool = field(
        "auto",
        meaning="Whether the optimizer steps are compiled into one graph, once, in the first update, which takes a C++ "
        "compiler and 10 to 40 s. Up to rounding it does not change results. auto: in PPO on vectors on a CPU, from "
        "30,000 steps on, if there is a compiler. If compiling fails, the run goes on without, and says so.",
        source="kedge: a step takes a fifth of the time",
    )
