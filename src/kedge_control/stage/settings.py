"""`control`: the section of the configuration."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import model_validator

from kedge.config.schema.field import field
from kedge.config.schema.section import Section


class ControlConfig(Section):
    """PPO on Gymnasium's environments. The defaults are for PPO on MuJoCo."""

    env: str | None = field(
        None,
        meaning="The environment: an id of Gymnasium (HalfCheetah-v5, ALE/Pong-v5), module:Id, or a function that "
        "makes one (file.py:name).",
        source="kedge: no environment is assumed",
        text="an id or file.py:name",
    )
    env_options: dict[str, bool | int | float | str | list[bool | int | float | str]] = field(
        {},
        meaning="Arguments of the environment, e.g. {ctrl_cost_weight: 0.1} or {max_episode_steps: 500}.",
        source="kedge: the environment's own defaults",
    )
    num_envs: int = field(
        1,
        ge=1,
        meaning="Copies of the environment that are played side by side.",
        source="PPO on MuJoCo: 1; 8 on Atari",
        too_high="each contributes short pieces of episodes, with ends that rest on the critic",
        too_low="small batches for the policy's passes, and one episode's luck decides an update",
    )
    vectorization: Literal["sync", "async"] = field(
        "sync",
        meaning="Where the copies run: one after the other in this process (sync), or in a process each (async), which "
        "pays where a step takes longer than about a millisecond.",
        source="kedge, measured: sync is faster for every classic and MuJoCo task",
    )
    normalize_observations: bool = field(
        True,
        meaning="Whether vectors are scaled to mean 0 and variance 1 by running statistics, which change between "
        "updates only and are saved with the model. Images are divided by 255 in any case.",
        source="OpenAI Baselines on MuJoCo",
    )
    reward_scaling: Literal["std", "sign", "none"] = field(
        "std",
        meaning="The critic's version of a reward: divided by the running standard deviation of the discounted "
        "return (std), its sign, or the reward itself. Logged returns are always those of the environment.",
        source="OpenAI Baselines: std on MuJoCo, sign on Atari",
    )
    action_bounds: Literal["clip", "squash", "none"] = field(
        "clip",
        meaning="Continuous actions outside the environment's bounds are clipped where they are played (clip), drawn "
        "through a tanh, so that they are never outside (squash), or played as they are (none). Log probabilities are "
        "always those of the action that the policy drew.",
        source="OpenAI Baselines clip. The code behind table 1 of PPO did not: with Gymnasium's cost of controls, clip "
        "favors policies that draw large actions",
    )
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
        meaning="The critic's network: separate, or a head on the policy's.",
        source="PPO: separate on MuJoCo, shared on Atari",
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
        meaning="A network of your own instead of the layers: a function of the spaces that returns a torch module "
        "from observations to features (file.py:name).",
        source="kedge",
        text="file.py:name",
    )
    memory_size: int | None = field(
        None,
        ge=1,
        meaning="Units of an LSTM behind the layers, for tasks with observations that do not show the whole state; "
        "needs control.critic=shared. Null: no memory.",
        source="PPO on MuJoCo and Atari: none; A3C's LSTM on Atari: 256",
        too_high="slow, and longer until something is remembered",
        too_low="too little is remembered",
    )
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
    num_epochs: int = field(
        10,
        ge=1,
        meaning="Passes over the steps of each update; with policy_loss=trust_region, of the critic alone.",
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
        meaning="Peak learning rate of Adam, with ε = 1e-5.",
        source="PPO on MuJoCo",
        too_high="returns collapse; KL and clip fraction shoot up",
        too_low="slow learning",
    )
    schedule: Literal["linear", "constant"] = field(
        "linear",
        meaning="Course of the learning rate: linear to 0 over the run, or constant.",
        source="OpenAI Baselines",
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
        "30,000 steps on, if there is a compiler. If compiling fails, one line says so, and the run does without.",
        source="kedge: a step takes a fifth of the time",
    )
    policy_loss: Literal["clipped", "unclipped", "kl_penalty_fixed", "kl_penalty_adaptive", "trust_region"] = field(
        "clipped",
        meaning="PPO's surrogate loss: clipped ratios, plain ratios, or plain ratios with a KL penalty to the policy "
        "that played; or TRPO's one natural-gradient step within a bound of the KL (trust_region). The KL is that of "
        "the whole distributions.",
        source="PPO eq. 7; clipping is the best in its table 1. TRPO (arXiv 1502.05477)",
    )
    clip_range: float = field(
        0.2,
        gt=0,
        lt=1,
        meaning="ε: how far an action's probability ratio may move from 1 before its gradient is cut.",
        source="PPO",
        too_high="more aggressive updates, at the risk of instability",
        too_low="most steps are clipped and learning is slow",
    )
    anneal_clip_range: bool = field(False, meaning="Lower ε to 0 with the learning rate.", source="PPO: on Atari")
    surrogate_kl_coef: float = field(
        1.0,
        ge=0,
        meaning="β of policy_loss=kl_penalty_*; its start for the adaptive one.",
        source="PPO table 1: 3 is the best fixed value, the adaptive one starts at 1",
        too_high="the policy hardly moves",
        too_low="nothing limits the size of an update",
    )
    kl_target: float = field(
        0.01,
        gt=0,
        meaning="KL of one update, nats per step: the target of policy_loss=kl_penalty_adaptive, and δ, the bound of "
        "policy_loss=trust_region.",
        source="PPO table 1: the best adaptive value; TRPO",
        too_high="large, unstable updates; a step that the line search refuses",
        too_low="the policy hardly moves",
    )
    entropy_coef: float = field(
        0.0,
        ge=0,
        meaning="Weight of the entropy bonus, per nat.",
        source="PPO: 0 on MuJoCo, 0.01 on Atari",
        too_high="the policy stays random",
        too_low="the policy becomes deterministic too fast and gets stuck",
    )
    value_coef: float = field(
        0.5,
        ge=0,
        meaning="Weight of the value loss, half the squared error. Without effect on the policy where the critic is "
        "separate.",
        source="Stable-Baselines3, CleanRL: 0.5 of the squared error",
        too_high="a shared network serves the critic rather than the policy",
        too_low="the critic learns slowly",
    )
    whiten_advantages: Literal["minibatch", "batch", "none"] = field(
        "minibatch",
        meaning="Over what the advantages are normalized to mean 0 and variance 1.",
        source="OpenAI Baselines: each minibatch",
    )
    gamma: float = field(
        0.99,
        ge=0,
        le=1,
        meaning="γ: discount per step.",
        source="PPO",
        too_high="the critic has to predict far ahead",
        too_low="the policy is short-sighted",
    )
    gae_lambda: float = field(
        0.95,
        ge=0,
        le=1,
        meaning="λ of GAE: 0 relies on the critic alone, 1 on the played return alone.",
        source="PPO",
        too_high="noisy advantages",
        too_low="advantages inherit the critic's errors",
    )
    eval_every: int | None = field(
        None,
        ge=1,
        meaning="Updates between two evaluations, and at the end: ten episodes with the most likely actions, in "
        "separate copies. Null: none. It never changes what is trained.",
        source="kedge: off; the returns of training are logged in any case",
        too_high="the best policy lies between two evaluations",
        too_low="evaluations take longer than training",
    )
    video: bool = field(
        False,
        meaning="Show an episode of the trained policy in the report, rendered off-screen (episode.webp).",
        source="kedge: off, because it needs a renderer",
    )

    @property
    def is_trpo(self) -> bool:
        """True if an update is TRPO's."""
        return self.policy_loss == "trust_region"

    @property
    def steps_per_update(self) -> int:
        """Environment steps of an update."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Updates of the run."""
        return self.total_steps // self.steps_per_update

    @model_validator(mode="after")
    def _check_sizes(self) -> "ControlConfig":
        steps = self.steps_per_update
        product = f"control.num_envs={self.num_envs} × control.num_steps={self.num_steps}"
        if steps % self.num_minibatches:
            raise ValueError(
                f"control.num_minibatches={self.num_minibatches} does not divide an update's {steps} steps ({product})"
            )
        if not self.num_updates:
            raise ValueError(
                f"control.total_steps={self.total_steps} is less than one update of {steps} steps ({product})"
            )
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> "ControlConfig":
        if self.memory_size and self.critic != "shared":
            raise ValueError("control.memory_size needs a critic that reads the same memory: control.critic=shared")
        if self.is_trpo:
            for name in ("entropy_coef", "early_stop_kl"):
                if value := getattr(self, name):
                    raise ValueError(f"control.{name}={value} has no effect on TRPO's one step; leave it out")
        if self.compile is not True:
            return self
        reasons = {
            "compiles the steps of PPO, and control.policy_loss=trust_region has others": self.is_trpo,
            "needs rows of one length, and with control.memory_size they are pieces of episodes": self.memory_size,
            "knows the KL of its steps after the update, and control.early_stop_kl needs it before": self.early_stop_kl,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(f"control.compile=true {reason}; leave one of them out")
        return self
