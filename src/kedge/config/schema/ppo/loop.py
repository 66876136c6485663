"""The loop of PPO: updates, epochs, minibatches, and the learning rate over them."""

from typing import Literal

from kedge.config.schema.field import knob
from kedge.config.schema.optimizer import Optimiser

__all__ = ["PpoLoop"]


class PpoLoop(Optimiser):
    """An update samples once, then passes num_epochs times over the responses in num_minibatches steps each."""

    num_updates: int = knob(
        200,
        ge=0,
        meaning="Updates in the run; each samples anew.",
        source="kedge: S3's over-optimisation sets in within a few hundred",
        too_high="the reward model is over-optimised: its score rises while the text gets worse",
        too_low="the score is still rising at the end",
    )
    learning_rate: float = knob(
        1e-5,
        ge=0,
        meaning="Peak step size of Adam.",
        source="S2 and Ziegler; N+ takes 3e-6 for 1B and up, models of a few million parameters take 1e-3",
        too_high="training is unstable: KL and clip fraction shoot up, the text collapses",
        too_low="slow convergence: clip fraction and KL stay near 0, the score is flat",
    )
    schedule: Literal["linear", "cosine", "constant"] = knob(
        "linear", meaning="How the learning rate falls to 0 over all updates, or stays.", source="Ziegler and N+"
    )
    num_epochs: int = knob(
        4,
        ge=1,
        meaning="Passes over the responses of one update.",
        source="S2, Ziegler, Stiennon, N+",
        too_high="the batch is overfitted: later epochs are mostly clipped",
        too_low="responses, the dear part, are used little; more of them are needed",
    )
    num_minibatches: int = knob(
        1,
        ge=1,
        meaning="Optimiser steps per epoch; each takes an equal share of the update's responses.",
        source="Ziegler and N+; InstructGPT takes 8. The fewer and larger the steps, the less noise adds to the KL",
        too_high="small, noisy steps, and many of them away from the policy that sampled",
        too_low="few steps per update",
    )
    early_stop_kl: float | None = knob(
        None,
        gt=0,
        meaning="KL to the sampling policy, nats per token, at 1.5 times which an update's epochs end.",
        source="off in the papers of language; 0.01 is the custom elsewhere",
        too_high="never stops an update that goes too far",
        too_low="every update stops in its first epoch",
    )
