"""`control`: the section of the configuration."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import model_validator

from kedge.config.schema.field import field
from kedge.config.schema.section import Section


class ControlConfig(Section):
    """PPO on Gymnasium's environments. The defaults are for PPO on MuJoCo."""

    env: str | None = None
    """The environment: an id of Gymnasium (HalfCheetah-v5, ALE/Pong-v5), module:Id, or a function that makes one
    (file.py:name).

    Source: kedge: no environment is assumed
    Text: an id or file.py:name
    """
    env_options: dict[str, bool | int | float | str | list[bool | int | float | str]] = field({})
    """Arguments of the environment, e.g. {ctrl_cost_weight: 0.1} or {max_episode_steps: 500}.

    Source: kedge: the environment's own defaults
    """
    num_envs: int = field(1, ge=1)
    """Copies of the environment that are played side by side.

    Source: PPO on MuJoCo: 1; 8 on Atari
    Too high: each contributes short pieces of episodes, with ends that rest on the critic
    Too low: small batches for the policy's passes, and one episode's luck decides an update
    """
    vectorization: Literal["sync", "async"] = "sync"
    """Where the copies run: one after the other in this process (sync), or in a process each (async), which pays where
    a step takes longer than about a millisecond.

    Source: kedge, measured: sync is faster for every classic and MuJoCo task
    """
    normalize_observations: bool = True
    """Whether vectors are scaled to mean 0 and variance 1 by running statistics, which change between updates only and
    are saved with the model. Images are divided by 255 in any case.

    Source: OpenAI Baselines on MuJoCo
    """
    reward_scaling: Literal["std", "sign", "none"] = "std"
    """The critic's version of a reward: divided by the running standard deviation of the discounted return (std), its
    sign, or the reward itself. Logged returns are always those of the environment.

    Source: OpenAI Baselines: std on MuJoCo, sign on Atari
    """
    action_bounds: Literal["clip", "squash", "none"] = "clip"
    """Continuous actions outside the environment's bounds are clipped where they are played (clip), drawn through a
    tanh, so that they are never outside (squash), or played as they are (none). Log probabilities are always those of
    the action that the policy drew.

    Source: OpenAI Baselines clip. The code behind table 1 of PPO did not: with Gymnasium's cost of controls, clip
        favors policies that draw large actions
    """
    hidden_sizes: list[Annotated[int, Ge(1)]] = field([64, 64])
    """Units of the hidden layers of policy and critic; for images, of those behind the convolutions.

    Source: PPO on MuJoCo; 512 behind convolutions
    Too high: slow, and no better on tasks with few observations
    Too low: the policy cannot represent a good controller
    """
    activation: Literal["tanh", "relu"] = "tanh"
    """Between the layers.

    Source: PPO on MuJoCo
    """
    critic: Literal["separate", "shared"] = "separate"
    """The critic's network: separate, or a head on the policy's.

    Source: PPO: separate on MuJoCo, shared on Atari
    """
    initial_log_std: float = field(0.0, ge=-10, le=5)
    """Logarithm of the initial standard deviation of continuous actions, which is trained and the same in all states.

    Source: OpenAI Baselines
    Too high: the first episodes are noise
    Too low: little is explored
    """
    network: str | None = None
    """A network of your own instead of the layers: a function of the spaces that returns a torch module from
    observations to features (file.py:name).

    Source: kedge
    Text: file.py:name
    """
    memory_size: int | None = field(None, ge=1)
    """Units of an LSTM behind the layers, for tasks with observations that do not show the whole state; needs
    control.critic=shared. Null: no memory.

    Source: PPO on MuJoCo and Atari: none; A3C's LSTM on Atari: 256
    Too high: slow, and longer until something is remembered
    Too low: too little is remembered
    """
    total_steps: int = field(1_000_000, ge=1)
    """Environment steps of the run, over all copies; rounded down to whole updates.

    Source: PPO on MuJoCo
    Too high: time is spent after learning has ended
    Too low: returns are still rising at the end
    """
    num_steps: int = field(2048, ge=1)
    """Steps of each copy per update.

    Source: PPO on MuJoCo; 128 on Atari
    Too high: few updates, each far from the policy that played
    Too low: returns are mostly the critic's estimate
    """
    num_epochs: int = field(10, ge=1)
    """Passes over the steps of each update; with policy_loss=trust_region, of the critic alone.

    Source: PPO on MuJoCo; 3 on Atari
    Too high: the batch is overfitted: in later epochs most steps are clipped
    Too low: steps that were expensive to play are under-used
    """
    num_minibatches: int = field(32, ge=1)
    """Optimizer steps per epoch, each on an equal share of the steps.

    Source: PPO on MuJoCo: 64 of 2,048 steps each; 8 on Atari
    Too high: small, noisy optimizer steps
    Too low: few optimizer steps per update
    """
    learning_rate: float = field(3e-4, ge=0)
    """Peak learning rate of Adam, with ε = 1e-5.

    Source: PPO on MuJoCo
    Too high: returns collapse; KL and clip fraction shoot up
    Too low: slow learning
    """
    schedule: Literal["linear", "constant"] = "linear"
    """Course of the learning rate: linear to 0 over the run, or constant.

    Source: OpenAI Baselines
    """
    max_grad_norm: float | None = field(0.5, gt=0)
    """L2 norm to which the gradient is clipped, of the policy and of a separate critic apart; null: not at all.

    Source: OpenAI Baselines
    Too high: a single bad batch can ruin the weights
    Too low: every step is clipped, which in effect lowers the learning rate
    """
    early_stop_kl: float | None = field(None, gt=0)
    """KL to the policy that played, nats per step; the policy's optimizer steps of an update end at 1.5 times this
    value. Null: they do not.

    Source: off in PPO; Spinning Up: 0.01
    Too high: updates that go too far are not stopped
    Too low: every update stops in its first epoch
    """
    compile: Literal["auto"] | bool = "auto"
    """Whether the optimizer steps are compiled into one graph, once, in the first update, which takes a C++ compiler
    and 10 to 40 s. Up to rounding it does not change results. auto: in PPO on vectors on a CPU, from 30,000 steps on,
    if there is a compiler. If compiling fails, one line says so, and the run does without.

    Source: kedge: a step takes a fifth of the time
    """
    policy_loss: Literal["clipped", "unclipped", "kl_penalty_fixed", "kl_penalty_adaptive", "trust_region"] = "clipped"
    """PPO's surrogate loss: clipped ratios, plain ratios, or plain ratios with a KL penalty to the policy that played;
    or TRPO's one natural-gradient step within a bound of the KL (trust_region). The KL is that of the whole
    distributions.

    Source: PPO eq. 7; clipping is the best in its table 1. TRPO (arXiv 1502.05477)
    """
    clip_range: float = field(0.2, gt=0, lt=1)
    """ε: how far an action's probability ratio may move from 1 before its gradient is cut.

    Source: PPO
    Too high: more aggressive updates, at the risk of instability
    Too low: most steps are clipped and learning is slow
    """
    anneal_clip_range: bool = False
    """Lower ε to 0 with the learning rate.

    Source: PPO: on Atari
    """
    surrogate_kl_coef: float = field(1.0, ge=0)
    """β of policy_loss=kl_penalty_*; its start for the adaptive one.

    Source: PPO table 1: 3 is the best fixed value, the adaptive one starts at 1
    Too high: the policy hardly moves
    Too low: nothing limits the size of an update
    """
    kl_target: float = field(0.01, gt=0)
    """KL of one update, nats per step: the target of policy_loss=kl_penalty_adaptive, and δ, the bound of
    policy_loss=trust_region.

    Source: PPO table 1: the best adaptive value; TRPO
    Too high: large, unstable updates; a step that the line search refuses
    Too low: the policy hardly moves
    """
    entropy_coef: float = field(0.0, ge=0)
    """Weight of the entropy bonus, per nat.

    Source: PPO: 0 on MuJoCo, 0.01 on Atari
    Too high: the policy stays random
    Too low: the policy becomes deterministic too fast and gets stuck
    """
    value_coef: float = field(0.5, ge=0)
    """Weight of the value loss, half the squared error. Without effect on the policy where the critic is separate.

    Source: Stable-Baselines3, CleanRL: 0.5 of the squared error
    Too high: a shared network serves the critic rather than the policy
    Too low: the critic learns slowly
    """
    whiten_advantages: Literal["minibatch", "batch", "none"] = "minibatch"
    """Over what the advantages are normalized to mean 0 and variance 1.

    Source: OpenAI Baselines: each minibatch
    """
    gamma: float = field(0.99, ge=0, le=1)
    """γ: discount per step.

    Source: PPO
    Too high: the critic has to predict far ahead
    Too low: the policy is short-sighted
    """
    gae_lambda: float = field(0.95, ge=0, le=1)
    """λ of GAE: 0 relies on the critic alone, 1 on the played return alone.

    Source: PPO
    Too high: noisy advantages
    Too low: advantages inherit the critic's errors
    """
    eval_every: int | None = field(None, ge=1)
    """Updates between two evaluations, and at the end: ten episodes with the most likely actions, in separate copies.
    Null: none. It never changes what is trained.

    Source: kedge: off; the returns of training are logged in any case
    Too high: the best policy lies between two evaluations
    Too low: evaluations take longer than training
    """
    video: bool = False
    """Show an episode of the trained policy in the report, rendered off-screen (episode.webp).

    Source: kedge: off, because it needs a renderer
    """

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
