"""`kedge plan --probe`: the passes of a real run of shallow models at full width, whose live bytes are counted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from kedge.config import Config, with_values
from kedge.data import PromptStream
from kedge.models import ScalarModel
from kedge.models.hollow import layers_of
from kedge.models.language import LanguageModel
from kedge.models.live_bytes import LiveBytes
from kedge.runs.run import open_run
from kedge.stages.planning.counting import Figures, extrapolated
from kedge.stages.planning.plan import SHALLOW, Counted
from kedge.stages.planning.shallow import save_shallow, text_of
from kedge.stages.ppo.roles import Roles, load_roles
from kedge.stages.ppo.trainer import Trainer

__all__ = ["probe_ppo"]

UPDATES = 2
"""The first has no gradients and moments of an earlier one yet."""


def probe_ppo(counted: Counted) -> dict[str, float]:
    """The peak of each phase of a PPO run, bytes: measured with two and with three layers, and extrapolated.

    Every measurement is cut where the backward pass reaches a model's first block: before, activations grow with the
    number of layers; afterwards, gradients do.

    Args:
        counted: The run; its lengths are used.
    """
    shallow = SHALLOW if all(each.alike for each in counted.count.blueprints.values()) else None
    figures = extrapolated(lambda layers: _measured(counted, layers), counted.count.layers, shallow)
    peaks: dict[str, float] = {}
    for name, size in figures.items():
        phase = name.partition(":")[0]
        peaks[phase] = max(peaks.get(phase, 0.0), size)
    return peaks


def _measured(counted: Counted, layers: Mapping[str, int]) -> Figures:
    """The peaks of the parts of each phase, as `PHASE:PART`."""
    count = counted.count
    with TemporaryDirectory(prefix="kedge-probe-") as scratch:
        folder = Path(scratch)
        names: dict[str, str] = {}
        for number, (role, blueprint) in enumerate(count.blueprints.items()):
            names[role] = str(folder / f"model-{number}")
            if role != "critic":  # starts from one of the others
                save_shallow(blueprint.with_layers(layers[role]), Path(names[role]), scalar=role != "policy")
        rewards = [names[role] for role in names if role.startswith("reward")]
        config = _changed(count.config, names["policy"], rewards, folder)
        prompts = text_of(count.rows.prompts[:: config.rollout.num_responses])
        counter = LiveBytes()
        with counter:
            run = open_run(config, "ppo", in_memory={"data.prompts": prompts, "reward": None if rewards else _score})
            roles = load_roles(config, run, prompts=prompts, reward=None if rewards else _score)
            with closing(roles.engine):
                return _updates(config, Trainer.of(config, run, roles), counter)


def _changed(config: Config, policy: str, rewards: list[str], folder: Path) -> Config:
    settings: dict[str, Any] = {
        "model": policy,
        "reward": rewards,
        "out": str(folder / "out"),
        "ppo.num_updates": UPDATES,
        "ppo.value_warmup_updates": 0,
        "ppo.eval_every": None,
        "ppo.critic_check": None,
        "data.prompts": [],
        "data.eval_prompts": [],
        "data.curriculum": None,
        "runtime.loggers": [],
        "rollout.stop_token": None,
    }
    if config.ppo.names_critic:
        settings["ppo.critic_init"] = "auto"
    return with_values(config, settings)


def _updates(config: Config, trainer: Trainer, counter: LiveBytes) -> Figures:
    """Two updates, as `stages/ppo/main.py` has them, without logs."""
    parts = _Parts(counter)
    parts.watch(trainer.roles)
    prompts = PromptStream(trainer.roles.prompts, seed=0)
    trainer.publish(0)
    for update in range(1, UPDATES + 1):
        parts.start("rollout")
        drawn = prompts.next(config.rollout.num_prompts)
        trainer.begin(update)
        rollout = trainer.sample(drawn)
        parts.start("reward")
        scored = trainer.score(rollout, drawn)
        parts.start("experience")
        experience = trainer.estimate(scored)
        parts.start("train")
        trainer.improve(experience)
    parts.start("end")
    return parts.peaks


class _Parts:
    """The peaks of the parts of phases, each of which grows linearly with the number of layers."""

    def __init__(self, counter: LiveBytes) -> None:
        self.peaks: Figures = {}
        self._counter, self._phase, self._now = counter, "load", "load:start"
        counter.restart()

    def start(self, phase: str) -> None:
        """Begin a phase."""
        self._phase = phase
        self._cut("start")

    def watch(self, roles: Roles) -> None:
        """Begin a part at each forward pass of the policy, and where a backward pass reaches a first block."""
        policy, critic = roles.actor_critic.policy, roles.actor_critic.critic
        policy.trunk.model.register_forward_pre_hook(lambda *_: self._cut("top"))
        self._watch_block("policy", policy)
        if critic is not None:
            self._watch_block("critic", critic)

    def _watch_block(self, role: str, model: LanguageModel | ScalarModel) -> None:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: self._cut(f"below {role}"))

        layers_of(model)[0].register_forward_hook(hook)

    def _cut(self, part: str) -> None:
        self.peaks[self._now] = max(self.peaks.get(self._now, 0.0), float(self._counter.restart()))
        self._now = f"{self._phase}:{part}"


def _score(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(map(ord, text[:40])) % 97) for text in completions]
