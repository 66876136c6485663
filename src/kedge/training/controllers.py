"""The loss coefficients of a PPO run and their controllers, the critic's warm-up, and early stopping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kedge.algorithm.controllers import adapt_entropy_coef, adapt_kl_coef_schulman, adapt_kl_coef_ziegler
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge_base.texts import counted

KLController = Literal["fixed", "ziegler", "schulman"]

ZIEGLER_HORIZON = 10_000


@dataclass(frozen=True)
class Controllers:
    """The adaptive coefficients and their targets.

    Attributes:
        kl: The controller of β: `fixed`, Ziegler's, or Schulman's (the PPO paper's).
        kl_target: Target KL to the reference, nats per response.
        horizon: Responses over which Ziegler's controller may change β by 20%; None chooses them by the run's length.
        wait_fraction: Share of the policy's updates before β first changes.
        num_policy_updates: Updates that train the policy.
        responses_per_update: Responses in each.
        entropy_target: Target entropy, nats per token; None keeps the entropy coefficient fixed.
        surrogate_kl_target: Target KL of one update, nats per token; None keeps the surrogate's β fixed.
    """

    kl: KLController = "fixed"
    kl_target: float = 1.0
    horizon: int | None = None
    wait_fraction: float = 0.0
    num_policy_updates: int = 1
    responses_per_update: int = 1
    entropy_target: float | None = None
    surrogate_kl_target: float | None = None

    @property
    def kl_wait_updates(self) -> float:
        """Updates of the policy before β first changes; can be a fraction."""
        return self.wait_fraction * self.num_policy_updates

    @property
    def kl_horizon(self) -> int:
        """The configured horizon, or else Ziegler's, but at most 1/30 of the responses that train the policy.

        An update of n responses changes β by at most a factor 1 ± 0.2·n/horizon. With a horizon of 10,000, β would
        hardly change in a run of a few thousand responses; with 1/30 of the responses it can change by a factor of e^6
        up or down.
        """
        responses = self.num_policy_updates * self.responses_per_update
        return self.horizon or max(1, min(ZIEGLER_HORIZON, responses // 30))


@dataclass
class Coefficients:
    """The coefficients of the current update; `adapt` changes them for the next one.

    They adapt after an update of the policy only: a frozen policy's behavior does not depend on them.

    Attributes:
        controllers: How they adapt.
        kl_coef: β of the KL to the reference.
        entropy_coef: c_e of the entropy bonus.
        surrogate_kl_coef: β of the KL to the sampling policy, in the KL-penalty surrogate.
        update: The policy update that they apply to, counted from 1.
    """

    controllers: Controllers
    kl_coef: float
    entropy_coef: float
    surrogate_kl_coef: float
    update: int = 1

    def metrics(self) -> dict[str, float]:
        """The coefficients of the current update."""
        adapting = self.controllers.surrogate_kl_target is not None
        surrogate = {"policy/surrogate_kl_coef": self.surrogate_kl_coef} if adapting else {}
        return {"objective/kl_coef": self.kl_coef, "objective/entropy_coef": self.entropy_coef, **surrogate}

    def adapt(self, metrics: Mapping[str, float], *, num_responses: int) -> None:
        """Adapt the coefficients for the next update, from the metrics of this one, which trained the policy.

        Source: spec §5.21, §6.27, §6.29.
        """
        use = self.controllers
        # Missing without a reference. The sampled estimate can be negative, unlike the true KL.
        kl = max(metrics.get("objective/kl", 0.0), 0.0)
        waits = self.update <= use.kl_wait_updates
        if use.kl == "ziegler" and not waits:
            self.kl_coef = adapt_kl_coef_ziegler(
                self.kl_coef, kl, kl_target=use.kl_target, num_episodes=num_responses, horizon=use.kl_horizon
            )
        elif use.kl == "schulman" and not waits:
            self.kl_coef = adapt_kl_coef_schulman(self.kl_coef, kl, kl_target=use.kl_target)
        if use.entropy_target is not None:
            self.entropy_coef = adapt_entropy_coef(
                self.entropy_coef, metrics["policy/entropy"], entropy_target=use.entropy_target
            )
        if use.surrogate_kl_target is not None:
            self.surrogate_kl_coef = adapt_kl_coef_schulman(
                self.surrogate_kl_coef, metrics["policy/distance_moved"], kl_target=use.surrogate_kl_target
            )
        self.update += 1

    def follow(self, scheduled: Mapping[str, float]) -> None:
        """Set scheduled coefficients, by dotted name; no controller adapts these."""
        self.kl_coef = scheduled.get("ppo.kl_coef", self.kl_coef)
        self.entropy_coef = scheduled.get("ppo.entropy_coef", self.entropy_coef)

    def state_dict(self) -> dict[str, float]:
        """The coefficients and the update number."""
        return {
            "update": self.update,
            "kl_coef": self.kl_coef,
            "entropy_coef": self.entropy_coef,
            "surrogate_kl_coef": self.surrogate_kl_coef,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a `state_dict`; a coefficient without a controller is taken from the configuration, which may have
        changed.
        """
        self.update = int(state["update"])
        if self.controllers.kl != "fixed":
            self.kl_coef = state["kl_coef"]
        if self.controllers.entropy_target is not None:
            self.entropy_coef = state["entropy_coef"]
        if self.controllers.surrogate_kl_target is not None:
            self.surrogate_kl_coef = state["surrogate_kl_coef"]


EXPLAINED = "value/explained_variance"


class ValueWarmup:
    """Ends after a number of updates, or after the first one with a high enough explained variance.

    An update's explained variance is measured before the critic is fitted to its responses.

    Args:
        most: Maximum number of updates (`ppo.value_warmup_updates`).
        until: Explained variance that ends it (`ppo.value_warmup_updates.until`), if any.
        num_updates: Updates of the run.

    Source: VC-PPO (arXiv 2503.01491) and VAPO (2504.05118) train the critic until loss and explained variance are good
    enough; spec §7.34.
    """

    def __init__(self, *, most: int, until: float | None, num_updates: int) -> None:
        self._most = most
        self._until = until
        self._total = num_updates
        self._length: int | None = None

    @property
    def num_updates(self) -> int:
        """Its length in updates, or the maximum length until it has ended."""
        return self._most if self._length is None else self._length

    @property
    def num_policy_updates(self) -> int:
        """Minimum number of updates that train the policy."""
        return self._total - self.num_updates

    @property
    def ends_by_result(self) -> bool:
        """True if the length is not known in advance."""
        return self._until is not None

    def trains_policy(self, update: int) -> bool:
        """False for the updates of the warm-up."""
        return update > self.num_updates

    def metrics(self, update: int) -> dict[str, float]:
        """1 in the warm-up and 0 after it."""
        return {"value/warmup": float(not self.trains_policy(update))}

    def observe(self, update: int, metrics: Mapping[str, float]) -> str | None:
        """Record an update; return a line for the user if the warm-up ends after it.

        Args:
            update: Its number, from 1.
            metrics: Its metrics.
        """
        if self.trains_policy(update):
            return None
        explained = metrics[EXPLAINED]
        reached = self._until is not None and explained >= self._until
        if not reached and update < self._most:
            return None
        self._length = update
        return f"The critic's warm-up ends after update {update}: {self._result(explained, reached)}."

    def _result(self, explained: float, reached: bool) -> str:
        measured = f"its values explain {explained:.3g} of the variance of the returns on new responses"
        if self._until is None:
            return measured
        limit = f"ppo.value_warmup_updates.until={self._until:g}"
        if reached:
            return f"{measured} ({limit})"
        return f"{measured}, less than {limit}, but ppo.value_warmup_updates={self._most} is the most"

    def state_dict(self) -> dict[str, Any]:
        """Its length; null until it has ended."""
        return {"length": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._length = state["length"]


BLIND_UPDATES = 5
"""Updates over which a frozen critic is judged: a single batch of a good critic can look bad by chance."""

LEAST_EXPLAINED = 0.001
"""Share of the variance that a frozen critic has to explain. Not 0, since a constant explains 0 up to rounding."""


@dataclass
class FrozenCritic:
    """Keeps a critic as it is until its values no longer explain anything.

    It is judged by the last updates together, 1 − Σ Var(R − V) / Σ Var(R), so that a batch whose returns hardly vary
    does not decide. Values are measured on fresh responses, to which nothing has been fitted.

    Attributes:
        thaw: Lets the critic be trained from now on.
        errors: Var(R − V) and Var(R) of the last updates.
        is_frozen: The critic has not been thawed.

    Source: DVPO (arXiv 2502.16944) freezes a pretrained critic for good.
    """

    thaw: Callable[[], object]
    errors: list[list[float]] = field(default_factory=list[list[float]])
    is_frozen: bool = True

    def metrics(self, update: int) -> dict[str, float]:
        """1 while it is frozen and 0 after that."""
        return {"value/frozen": float(self.is_frozen)}

    def observe(self, update: int, metrics: Mapping[str, float]) -> str | None:
        """Record an update; return a line for the user if the critic is trained from the next one on."""
        variance = metrics["value/returns_std"] ** 2
        if not (self.is_frozen and variance):
            return None
        self.errors = [*self.errors, [(1 - metrics[EXPLAINED]) * variance, variance]][-BLIND_UPDATES:]
        explained = 1 - sum(error for error, _ in self.errors) / sum(variance for _, variance in self.errors)
        if len(self.errors) < BLIND_UPDATES or explained >= LEAST_EXPLAINED:
            return None
        self.is_frozen = False
        self.thaw()
        return (
            f"The critic is trained from update {update + 1} on: frozen, it explained {explained:.3g} of the variance "
            f"of the returns in the last {BLIND_UPDATES} updates."
        )

    def state_dict(self) -> dict[str, Any]:
        """The last updates' errors, and whether it is frozen."""
        return {"errors": self.errors, "is_frozen": self.is_frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.errors = state["errors"]
        self.is_frozen = state["is_frozen"]
        if not self.is_frozen:
            self.thaw()


class EarlyEnd:
    """Ends a run before its last update: the held-out metric has stopped improving, or the KL is too large.

    Args:
        patience: Evaluations without an improvement (`ppo.eval_patience`); None for any number.
        max_kl: Largest KL to the reference, nats per response (`ppo.max_kl`); None for no limit.
        loop: The run's loop, which asks for the reason before every update, and keeps the best update by the held-out
            metric.
    """

    def __init__(self, patience: int | None, max_kl: float | None, loop: CheckpointedLoop) -> None:
        self._patience = patience
        self._max_kl = max_kl
        self._best = loop.best
        self._kl = 0.0
        loop.until = self.reason
        if max_kl is not None:
            loop.register("early end", self, optional=True)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Record an update's KL."""
        self._kl = metrics.get("objective/kl", self._kl)

    def reason(self) -> str | None:
        """The reason why the run ends here; None if it continues."""
        best = self._best
        if self._max_kl is not None and self._kl > self._max_kl:
            return f"the KL to the reference is {self._kl:.3g} nats per response, above ppo.max_kl={self._max_kl:g}"
        if self._patience is not None and best is not None and best.num_since >= self._patience:
            return (
                f"{best.metric} has not improved in {counted(best.num_since, 'evaluation')} (ppo.eval_patience); its "
                f"best value is {best.value:.4g}, after update {best.update}"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """The last KL."""
        return {"kl": self._kl}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._kl = state["kl"]
