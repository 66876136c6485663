"""`ppo`: the KL to the reference."""

from typing import Literal

from kedge.config.schema.field import Choice, field
from kedge.config.schema.section import Parameters, Section

Place = Literal["reward", "score", "loss"]


class KlControl(Parameters):
    """How a controller adapts β."""

    horizon: int | None = field(None, gt=0)
    """Responses over which Ziegler's controller may change β by a factor of about 1.2; null is 1/30 of the policy's
    updates, at most 10,000 responses.

    Source: kedge; Ziegler's horizon is 10,000, for a run of two million responses
    Too high: β follows the KL too slowly
    Too low: β swings
    """
    target: float = field(6.0, gt=0)
    """Target KL, in nats per response.

    Source: Ziegler
    Too high: β falls to almost 0, and the policy drifts away
    Too low: β grows until the policy cannot learn
    """
    wait: float = field(0.1, ge=0, lt=1)
    """Fraction of the policy's updates before the controller starts; ppo.value_warmup_updates come first.

    Source: kedge: early on the KL is small because the policy has just started, not because β is large. The papers'
        controllers start immediately, which makes no difference in runs as long as theirs
    Too high: the KL is far above its target when the controller starts
    Too low: β falls at first, and the KL overshoots its target
    """


class KlPenalty(Section):
    """The KL penalty to the reference policy, and the controller of its weight."""

    kl_coef: float = field(0.05, ge=0)
    """β: weight of the KL to the reference, in score per nat; the start value if kl_controller adapts it.

    Source: Stiennon and N+
    Too high: the policy stays close to the reference, and the score is flat
    Too low: the policy drifts into text that exploits the reward
    """
    measure_kl: bool = False
    """Measure the KL to the reference even if it is not penalized (ppo.kl_coef=0). ppo.max_kl also measures it.

    Source: kedge: if off and ppo.kl_coef=0, no reference model is loaded
    """
    reference: str | None = None
    """The reference, such as a teacher (`--teacher`): a model with the policy's vocabulary. Null: the policy that the
    run starts from. With one, a run needs no reward: it can learn from the KL alone, as with the preset distill.

    Source: null: Ziegler, S4, InstructGPT, N+. A teacher: MiniLLM, GKD, On-Policy Distillation
    Text: a folder, a hub id or a run
    """
    kl_in: Choice[Place, Place, Literal["k1", "k2", "k3"]] = field("reward")
    """Place of the KL: each token's in its own reward, a response's sum in its score, or each token's in the loss. It
    is estimated by k1 in the reward and in the score, and by k2 in the loss; {loss: k3} names another estimator: k1 is
    unbiased, k2 has low variance, k3 has both and is never negative. ppo.advantage=grpo needs loss, which is then the
    default: it would divide the KL by the standard deviation in the group.

    Source: Ziegler, S4, InstructGPT, N+: k1 in the reward; S1 for score; S3 and GRPO put it in the loss, where k2 has
        the right gradient, and k1's is 0 on average
    """
    kl_controller: Choice[Literal["fixed", "ziegler", "schulman"], Literal["ziegler", "schulman"], KlControl] = field(
        "fixed"
    )
    """β is fixed, or adapted by Ziegler's proportional controller or by the PPO paper's halving and doubling: {ziegler:
    {target: 6, horizon: 10000, wait: 0.1}}, all of which may be left out.

    Source: Stiennon, InstructGPT, N+
    """
