"""`ppo`: the loop of updates."""

from typing import Annotated

from annotated_types import Ge, Gt, Lt

from kedge.config.schema.field import field
from kedge.config.schema.optimizer import Schedule, TrainedSection, schedule_field


class Loop(TrainedSection):
    """Updates, epochs, minibatches and the learning rate."""

    num_updates: int = field(
        200,
        ge=0,
        meaning="Updates in the run; each one samples new responses.",
        source="kedge: S3 reports over-optimization within a few hundred",
        too_high="the reward model is over-optimized: the score rises while the text gets worse",
        too_low="the score is still rising at the end",
    )
    learning_rate: float = field(
        1e-5,
        ge=0,
        meaning="Peak learning rate of Adam.",
        source="S2 and Ziegler; N+ uses 3e-6 from 1B up, models of a few million parameters use 1e-4 "
        "(bench/defaults/RESULTS.md)",
        too_high="training is unstable: KL and clip fraction shoot up and the text collapses",
        too_low="slow convergence: clip fraction and KL stay near 0 and the score is flat",
    )
    schedule: Schedule = schedule_field(
        "linear",
        source="Ziegler and N+; InstructGPT has a rise",
        over="the policy's updates, which follow ppo.value_warmup_updates",
        further=" A critic that is trained first starts with a rise of the same length.",
    )
    num_epochs: Annotated[int, Ge(1)] | Annotated[float, Gt(0), Lt(1)] = field(
        4,
        meaning="Passes over the responses of each update. Below 1: the share of them that is trained on, a new random "
        "one in each step; all of them are in the baselines, and the expected gradient is that of all.",
        source="S2, Ziegler, Stiennon, N+; below 1: PODS, which chooses by score instead",
        too_high="the batch is overfitted: in later epochs most tokens are clipped",
        too_low="expensive samples are under-used, so more of them are needed",
    )
    num_minibatches: int = field(
        1,
        ge=1,
        meaning="Optimizer steps per epoch, each on an equal share of the update's responses.",
        source="Ziegler and N+; InstructGPT uses 8. Fewer, larger steps add less noise to the KL",
        too_high="many small, noisy steps away from the policy that sampled",
        too_low="few steps per update",
    )
    early_stop_kl: float | None = field(
        None,
        gt=0,
        meaning="KL to the sampling policy, in nats per token; the policy's steps of an update end at 1.5 times this "
        "value, and the rest of them train only the critic's own parameters. Null disables it.",
        source="off in the papers on language models; 0.01 is common elsewhere. The critic continues as in Spinning Up",
        too_high="updates that go too far are not stopped",
        too_low="every update stops in its first epoch",
    )
