"""`ppo`: the critic."""

from typing import Annotated, Literal

from annotated_types import Ge, Len

from kedge.config.schema.field import Choice, field
from kedge.config.schema.section import Parameters, Section


class ValueWarmup(Parameters):
    """How long the critic is trained alone."""

    at_most: int = field(..., ge=0)
    """Updates, at most; as the value alone.

    Source: kedge: off
    """
    until: float | None = field(None, gt=0, lt=1)
    """Explained variance that ends the warm-up: after the first update whose responses, to which the critic is not yet
    fitted, it explains at least so well. Null: the warm-up has its full length.

    Source: kedge: null; VC-PPO and VAPO warm up until value loss and explained variance are good enough. With
        ppo.value_gae_lambda below 1 the returns contain the critic's own values, which raises the figure
    Too high: the warm-up always takes its full length
    Too low: one lucky batch ends it, and the first policy steps follow a critic that is hardly trained
    """


class CriticTraining(Section):
    """The critic, its loss and its warm-up."""

    critic: (
        Choice[
            Literal["auto", "shared", "detached", "readout", "separate", "frozen_attention", "frozen", "none"],
            Literal["readout"],
            Annotated[int, Ge(1)],
        ]
        | Choice[Literal["privileged"], Literal["privileged"], Annotated[list[str], Len(1)] | str]
    ) = field("auto")
    """A value head on the policy's trunk (shared; detached: the value loss does not train the trunk, so that value
    prediction never changes the policy; readout: no loss trains it, but each update refits it by least squares to about
    the last 8 batches, or to k of them with {readout: k}), a separate model (frozen_attention: its attention layers,
    and any adapter in them, stay as they are, without gradients and optimizer state; frozen: all of it does, until its
    values explain nothing for five updates), or none. Privileged: a separate model that also reads columns of the
    prompt's row, or of what an environment's privileged() returns, and the policy does not: {privileged: [answer,
    steps]}, or a text with columns in braces: {privileged: 'Right: {answer}.'}; privileged alone reads the column
    answer. Auto: none where ppo.advantage needs no values, else shared. One that ppo.advantage does not need is trained
    but not used.

    Source: shared: S0, S1, S4, Ziegler; it costs nothing, and explains nothing in short runs. S3, Stiennon and N+ use a
        separate one, which learns, at twice the memory and training time (bench/defaults/RESULTS.md). RLOO and GRPO
        have no critic. Privileged: asymmetric actor-critic (Pinto et al., 1710.06542; unbiased for any signal if the
        policy's state is read as well: Baisero & Amato, 2105.11674)
    Text: columns, or a text with columns in braces
    """
    critic_init: Literal["auto", "reward", "policy"] | str = "auto"
    """Initial weights of the critic. Separate: a copy of the reward model or of the policy; auto is the reward model if
    there is exactly one (those of weight 0 aside), a decoder with the policy's tokens, else the policy. Or a trained
    critic: a folder, a hub id or a run, such as that of `kedge critic`; ppo.critic=auto is then of its kind.

    Source: Stiennon, N+: the reward model, whose outputs before the last token mean nothing at first: warm it up
        (bench/defaults/RESULTS.md); VC-PPO and VAPO: a critic trained before PPO
    Text: a folder, a hub id or a run
    """
    value_coef: float = field(0.1, ge=0)
    """Weight of the value loss. Unused, as all settings of the loss, with critic=readout.

    Source: Ziegler, Stiennon, N+; S0 and S2 use 0.5, where value gradients dominate a shared trunk
    Too high: a shared trunk serves value prediction rather than the policy
    Too low: the value function learns slowly, and the advantages are poor
    """
    value_loss: Choice[Literal["half_mse", "mse", "hl_gauss"], Literal["hl_gauss"], tuple[float, float, int]] = field(
        "half_mse"
    )
    """The critic's loss: half the squared error, the squared error, or the cross-entropy of a histogram of the return
    (HL-Gauss), which has no unit and no clip. {hl_gauss: [-10, 10, 101]}, which is hl_gauss alone, names the
    histogram's ends, in units of the return (the score minus the KL penalty), and number of bins; returns beyond the
    ends are moved to them.

    Source: S4 and N+ halve the squared error, S0 and S2 do not; hl_gauss: Farebrother et al., on Atari with C51's −10
        to 10; kedge: twice C51's 51 bins, for scores with a standard deviation of 1
    Too high: too wide a histogram: bins that are never used, and returns closer than a bin are told apart badly
    Too low: too narrow a histogram: returns beyond the ends cannot be predicted
    """
    value_unit: Literal["returns_std", "score"] = "returns_std"
    """Unit in which the critic learns: of the value loss, value_clip_range, and the steps of its output layer. The
    standard deviation of the batch's returns or the critic's RMS error, whichever is larger, so that learning does not
    depend on the scale of the reward; or the unit of the score. Unused with value_loss=hl_gauss.

    Source: kedge: in the unit of the score (all papers), large returns are out of reach of Adam's steps, and on a
        shared trunk their gradient swamps the policy's; PopArt (van Hasselt et al. 2016) adapts the output layer
    """
    critic_learning_rate: float | None = field(None, ge=0)
    """Peak learning rate of a separate critic, scheduled as the policy's; null: ppo.learning_rate.

    Source: null: N+ and Ziegler have one rate. Of those with two, VAPO's critic has twice the policy's, those of
        Open-Reasoner-Zero and SAO five times (5e-6 and 1e-6). kedge, measured (bench/defaults/RESULTS.md): the rate
        that trained the reward model, about seven times the policy's, explains twice as much in a short run
    Too high: the values jump from update to update, and the advantages with them
    Too low: the critic lags behind the policy, and explained variance stays low
    """
    value_head_rate: float = field(10.0, gt=0)
    """Learning rate of a value head on a trunk that starts as the policy's, shared or separate, as a multiple of
    ppo.learning_rate, or of ppo.critic_learning_rate.

    Source: kedge, measured (bench/defaults/RESULTS.md): at 1 to 3 a head that starts at 0 may not have reached the
        returns after ten updates; at 30 the first steps overshoot
    Too high: the values jump, and the advantages with them
    Too low: explained variance stays at 0 for most of the run
    """
    value_clip_range: float | None = field(1.0, gt=0)
    """How far a value may move in an update before its gradient is cut, in ppo.value_unit; null disables it, and is the
    default with value_loss=hl_gauss, which has no clip.

    Source: kedge: with 0.2 standard deviations per update the critic never reaches scores far from 0, without a limit a
        shared head overshoots them. Ziegler and N+ have 0.2, in units of the score; S2 has no limit
    Too high: no effect, or values that overshoot the returns
    Too low: the values cannot follow large returns
    """
    num_critic_epochs: int = field(1, ge=1)
    """Passes of the critic over the responses for each pass of the policy. The first is the policy's own; the others
    train only the parameters that are the critic's alone: a separate critic, or a shared value head. Unused with
    critic=readout, which is refitted once per update.

    Source: 1 in the papers on short responses; SAO: 2. Open-Reasoner-Zero takes 12 steps of the critic for each one of
        the policy, but within one pass
    Too high: the critic is overfitted to the batch: value/loss falls while value/explained_variance, on new responses,
        does not rise
    Too low: the critic lags behind the policy, and explained variance stays low
    """
    value_warmup_updates: ValueWarmup = ValueWarmup(at_most=0)
    """First updates that train only the critic, at the peak learning rate, with the policy frozen. The learning-rate
    schedule and the controllers of the coefficients start after them. {at_most: 50, until: 0.4} ends them earlier, once
    the critic explains that share of the variance.

    Source: off in the papers on short responses; VC-PPO pretrains the critic for long ones, VAPO for 50 steps
    Too high: updates are spent without training the policy
    Too low: the first policy steps follow an untrained critic
    """
