"""One step of TRPO against sb3-contrib's: the same rollout and weights, and the two steps side by side.

sb3-contrib averages the KL of a Gaussian over the numbers of an action, where it is their sum; its bound is larger by
that factor. For the comparison kedge's KL is divided in the same way; the KL of the peer's step is also measured.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor

from bench.control.tables import markdown
from bench.processes import BenchError, environment
from kedge.algorithm.experience import CriticOutputs, PolicyOutputs
from kedge.algorithm.policy_losses import unclipped_policy_loss
from kedge.ranks import ALONE, Ranks
from kedge.training.learner import T
from kedge.training.objective import Objective
from kedge.training.optimizer import build_optimizer
from kedge.training.update import PpoUpdate
from kedge_control.experience import ControlExperience, ControlLearner
from kedge_control.networks import ControlActorCritic
from kedge_control.spaces import spaces_of
from kedge_control.trpo import TrustRegion, trpo_update

NAMES = {
    "mlp_extractor.policy_net.0": "policy_trunk.0",
    "mlp_extractor.policy_net.2": "policy_trunk.2",
    "action_net": "policy_output",
}
"""Layers of the policy in sb3-contrib and in kedge."""


@dataclass(frozen=True)
class Compared:
    """Two steps from the same weights on the same rollout.

    Attributes:
        env: The environment.
        iterations: Of the conjugate gradients. sb3-contrib starts them from random numbers, kedge from 0, so that the
            steps are the same only once they have converged.
        cosine: Of the angle between the two steps.
        distance: Norm of their difference, as a share of theirs.
        peer_kl: The KL that sb3-contrib reports of its step, nats.
        true_kl: Mean KL(old‖new) of that step, nats.
    """

    env: str
    iterations: int
    cosine: float
    distance: float
    peer_kl: float
    true_kl: float


def compare(env: str, *, iterations: int, peer: Path, work: Path, updates: int = 3, seed: int = 1) -> Compared:
    """Let sb3-contrib train, and repeat its last step.

    Raises:
        BenchError: sb3-contrib failed.
    """
    work.mkdir(parents=True, exist_ok=True)
    out = work / f"trpo-{env}.npz"
    script = Path(__file__).with_name("sb3_trpo.py")
    command = [str(peer), str(script), env, str(updates), str(seed), str(iterations), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(1), check=False)
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    with np.load(out) as file:
        saved = {name: torch.from_numpy(file[name]).float() for name in file.files}
    made = gymnasium.make(env)
    policy = ControlActorCritic(spaces_of(made.observation_space, made.action_space))
    _load(policy, saved)
    before = _flat(policy)
    with torch.no_grad():
        old = policy(saved["observations"])[0].parameters
    _step(policy, saved, old, iterations)
    ours = _flat(policy) - before
    theirs = torch.cat([(saved[f"after/{name}"] - saved[f"before/{name}"]).flatten() for name in _parameters(policy)])
    _load(policy, saved, "after")
    with torch.no_grad():
        true_kl = float(policy(saved["observations"])[0].kl_from(policy.head.restored(old)).mean())
    return Compared(
        env=env,
        iterations=iterations,
        cosine=float(ours @ theirs / (ours.norm() * theirs.norm())),
        distance=float((ours - theirs).norm() / theirs.norm()),
        peer_kl=float(saved["kl"]),
        true_kl=true_kl,
    )


def oracle_table(found: Sequence[Compared]) -> str:
    """A row per environment."""
    head = (
        "environment",
        "iterations",
        "cosine",
        "relative distance",
        "sb3-contrib's KL, by itself",
        "the same, summed",
    )
    rows = [
        [e.env, str(e.iterations), f"{e.cosine:.6f}", f"{e.distance:.2%}", f"{e.peer_kl:.4f}", f"{e.true_kl:.4f}"]
        for e in found
    ]
    return markdown(head, rows)


@dataclass
class MeanOverNumbers:
    """A learner with a KL that is the mean over the numbers of an action."""

    learner: ControlLearner
    num_numbers: int
    needs_values: bool = False
    ranks: Ranks = ALONE

    def has_first_pass(self, batch: ControlExperience) -> bool:
        """See `Learner`."""
        return self.learner.has_first_pass(batch)

    def micro_batches(self, batch: ControlExperience) -> Iterator[tuple[Tensor, ControlExperience]]:
        """See `Learner`."""
        return self.learner.micro_batches(batch)

    def evaluate(self, batch: ControlExperience) -> PolicyOutputs:
        """See `Learner`."""
        outputs = self.learner.evaluate(batch)
        assert outputs.kl is not None
        return replace(outputs, kl=outputs.kl / self.num_numbers)

    def evaluate_critic(self, batch: ControlExperience) -> CriticOutputs:
        """See `Learner`."""
        return self.learner.evaluate_critic(batch)

    def repeated(self, batch: ControlExperience, attempt: Callable[[], T]) -> T:
        """See `Learner`."""
        return self.learner.repeated(batch, attempt)


def _parameters(policy: ControlActorCritic) -> list[str]:
    """sb3-contrib's names of the policy's parameters, in kedge's order."""
    peers = {own: theirs for theirs, own in NAMES.items()}
    return [
        "log_std" if name == "log_std" else f"{peers[stem]}.{end}"
        for name in _own(policy)
        for stem, _, end in [name.rpartition(".")]
    ]


def _own(policy: ControlActorCritic) -> dict[str, Tensor]:
    """The policy's parameters without those that only the critic has."""
    return {name: each for name, each in policy.named_parameters() if not name.startswith("value_")}


def _load(policy: ControlActorCritic, saved: dict[str, Tensor], when: str = "before") -> None:
    with torch.no_grad():
        for each, name in zip(_own(policy).values(), _parameters(policy), strict=True):
            each.copy_(saved[f"{when}/{name}"])


def _flat(policy: ControlActorCritic) -> Tensor:
    return torch.cat([each.detach().flatten().clone() for each in _own(policy).values()])


def _step(policy: ControlActorCritic, saved: dict[str, Tensor], old: Tensor, iterations: int) -> None:
    """Take kedge's step on the saved rollout."""
    advantages = saved["advantages"].unsqueeze(-1)
    is_gaussian = policy.log_std is not None
    learner = MeanOverNumbers(ControlLearner(policy), saved["actions"].shape[-1] if is_gaussian else 1)
    zeros = torch.zeros_like(advantages)
    experience = ControlExperience(
        observations=saved["observations"],
        actions=saved["actions"] if is_gaussian else saved["actions"].long(),
        parameters=old,
        action_mask=torch.ones_like(advantages, dtype=torch.bool),
        old_logprobs=saved["logprobs"].unsqueeze(-1),
        values=zeros,
        advantages=(advantages - advantages.mean()) / (advantages.std() + 1e-8),
        returns=zeros,
    )
    update = PpoUpdate(
        learner,
        build_optimizer(policy.parameters(), learning_rate=1e-3, critic_parameters=policy.critic_parameters()),
        experience,
        Objective(surrogate=unclipped_policy_loss, value_clip_range=None, value_coef=0.5),
        num_epochs=0,
        num_minibatches=1,
        generator=torch.Generator(),
        max_grad_norm=None,
    )
    trpo_update(update, TrustRegion(iterations=iterations))
