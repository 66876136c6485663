"""`ppo`: the loop of updates."""

from typing import Annotated

from annotated_types import Ge, Gt, Lt

from kedge.config.schema.field import field
from kedge.config.schema.optimizer import Schedule, TrainedSection


class Loop(TrainedSection):
    """Updates, epochs, minibatches and the learning rate."""

    num_updates: int = field(200, ge=0)
    """Updates in the run; each one samples new responses.

    Source: kedge: S3 reports over-optimization within a few hundred
    Too high: the reward model is over-optimized: the score rises while the text gets worse
    Too low: the score is still rising at the end
    """
    learning_rate: float = field(1e-5, ge=0)
    """Peak learning rate of Adam.

    Source: S2 and Ziegler; N+ uses 3e-6 from 1B up, models of a few million parameters use 1e-4
        (bench/defaults/RESULTS.md)
    Too high: training is unstable: KL and clip fraction shoot up and the text collapses
    Too low: slow convergence: clip fraction and KL stay near 0 and the score is flat
    """
    schedule: Schedule = field("linear")
    """How the learning rate decays to 0 over the policy's updates, which follow ppo.value_warmup_updates; constant: not
    at all. {linear: 0.1}: after a linear rise from 0 over a tenth of all optimizer steps. A critic that is trained
    first starts with a rise of the same length.

    Source: Ziegler and N+; InstructGPT has a rise; N+ trains without a rise
    Too high: with a long rise, much of the run trains at a fraction of the learning rate
    Too low: without one, the first steps may be too large, because Adam's moment estimates are still poor
    """
    num_epochs: Annotated[int, Ge(1)] | Annotated[float, Gt(0), Lt(1)] = 4
    """Passes over the responses of each update. Below 1: the share of them that is trained on, a new random one in each
    step; all of them are in the baselines, and the expected gradient is that of all.

    Source: S2, Ziegler, Stiennon, N+; below 1: PODS, which chooses by score instead
    Too high: the batch is overfitted: in later epochs most tokens are clipped
    Too low: expensive samples are under-used, so more of them are needed
    """
    num_minibatches: int = field(1, ge=1)
    """Optimizer steps per epoch, each on an equal share of the update's responses.

    Source: Ziegler and N+; InstructGPT uses 8. Fewer, larger steps add less noise to the KL
    Too high: many small, noisy steps away from the policy that sampled
    Too low: few steps per update
    """
    early_stop_kl: float | None = field(None, gt=0)
    """KL to the sampling policy, in nats per token; the policy's steps of an update end at 1.5 times this value, and
    the rest of them train only the critic's own parameters. Null disables it.

    Source: off in the papers on language models; 0.01 is common elsewhere. The critic continues as in Spinning Up
    Too high: updates that go too far are not stopped
    Too low: every update stops in its first epoch
    """
