"""Saves a control policy as a folder, and loads it to act."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kedge_base.errors import ConfigError, EnvError, ModelError
from kedge_base.importing import find_named
from kedge_base.machine.durable import replaced_folder
from kedge_base.run_folder.output import writing
from kedge_base.texts import error_text
from kedge_control.actions import ActionBounds
from kedge_control.networks import Activation, ControlActorCritic, FeatureNetwork, acting_function
from kedge_control.normalization import Normalization, RewardScaling
from kedge_control.spaces import Count, Spaces, checked_observation, observation_buffer

WEIGHTS_FILE = "policy.safetensors"
DESCRIPTION_FILE = "control.json"


class _Network(BaseModel):
    """The arguments of `ControlActorCritic`."""

    hidden_sizes: Annotated[list[Count], Field(max_length=100)]
    activation: Activation
    share_trunk: bool
    action_bounds: ActionBounds
    memory_size: Count | None


class _Normalization(BaseModel):
    """The arguments of `Normalization`."""

    observations: bool
    rewards: RewardScaling
    gamma: float


class _Description(BaseModel):
    """The file that is saved with the weights."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    format: Literal[2] = 2
    environment: dict[str, Any]
    spaces: Spaces
    has_custom_network: bool
    network: _Network
    normalization: _Normalization
    statistics: dict[str, Any]


class ControlPolicy:
    """A saved policy, to act with.

    Args:
        policy: Its network.
        normalization: The statistics saved with it, which no longer change.
        environment: Its training environment, as it was saved.
        seed: Of the actions, if they are drawn.
    """

    def __init__(
        self,
        policy: ControlActorCritic,
        normalization: Normalization,
        environment: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.normalization = normalization
        self.environment = dict(environment or {})
        self._generator = torch.Generator().manual_seed(seed)
        self.begin_episode()

    def begin_episode(self) -> None:
        """Clear the memory of a policy at the end of an episode."""
        self._memory = self.policy.blank_memory(1)

    @torch.inference_mode()
    def act(self, observation: Any, *, deterministic: bool = True) -> Any:
        """Return the action for one observation, in the environment's format.

        Args:
            observation: As returned by the environment; flattened by Gymnasium's wrapper if it is not a `Box`.
            deterministic: Return the most probable action instead of a sampled one.

        Raises:
            EnvError: The observation has another shape, or a number that is not finite.
        """
        row = self._row(observation)
        outputs, self._memory = acting_function(self.policy, 1)(self.normalization.normalize(row), self._memory)
        if not deterministic:
            outputs = outputs + self.policy.draw_noise(1, 1, self._generator)[0].numpy()
        return self.policy.head.executed(self.policy.head.choose(outputs))[0]

    def _row(self, observation: Any) -> Any:
        """Convert an observation to the format of rollouts, in which only images are bytes."""
        spaces = self.policy.spaces
        if np.shape(observation) not in {spaces.observation_shape, (spaces.observation_size,)}:
            found = type(observation).__name__ if isinstance(observation, dict) else f"shape {np.shape(observation)}"
            raise EnvError(
                f"an observation of {found}; expected one of shape {spaces.observation_shape}, flattened by "
                "gymnasium.wrappers.FlattenObservation if the environment's are not a Box"
            )
        row = observation_buffer(spaces, 1)
        try:
            whole = checked_observation(np.reshape(observation, spaces.observation_shape), spaces)
            row.reshape(spaces.observation_shape)[...] = whole
        except (TypeError, ValueError) as error:
            raise EnvError(f"{error}; an observation cannot be read") from error
        if not np.isfinite(row).all():
            raise EnvError("an observation with numbers that are not finite")
        return row


def save_control_policy(
    folder: str | Path,
    policy: ControlActorCritic,
    normalization: Normalization,
    *,
    environment: Mapping[str, Any],
    card: str,
) -> Path:
    """Save a policy with everything needed to act: weights, spaces, network, statistics, environment.

    Args:
        folder: It only appears once complete; an existing one is replaced.
        policy: Policy and critic.
        normalization: Their statistics.
        environment: Its id and settings as JSON types, for the reader and the card.
        card: Text of its README.

    Raises:
        OutputError: The folder cannot be written.
    """
    folder = Path(folder)
    description = _Description(
        environment=dict(environment),
        spaces=policy.spaces,
        has_custom_network=policy.has_custom_network,
        network=_Network(**policy.settings),
        normalization=_Normalization.model_validate(normalization, from_attributes=True),
        statistics=normalization.state_dict(),
    )
    weights = {name: each.detach().cpu().contiguous() for name, each in policy.state_dict().items()}
    with writing(folder), replaced_folder(folder) as part:
        save_file(weights, part / WEIGHTS_FILE)
        (part / DESCRIPTION_FILE).write_text(description.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (part / "README.md").write_bytes(card.encode("utf-8", "backslashreplace"))
    return folder


def load_control_policy(
    folder: str | Path, *, network: str | FeatureNetwork | None = None, seed: int = 0
) -> ControlPolicy:
    """Load the policy of a control run, to act with: `action = policy.act(observation)`.

    Args:
        folder: The run's `model/`, or a checkpoint's.
        network: The function that made its layers, itself or as `file.py:name`, if it is a custom network.
        seed: Of the actions, if they are drawn.

    Raises:
        ModelError: The folder has no such policy, a file is damaged or missing, or `network` is missing or wrong.
    """
    folder = Path(os.path.expanduser(folder))
    described = _description(folder)
    if described.has_custom_network and network is None:
        raise ModelError(f"{folder}: the policy has a custom network; name the function that makes it")
    spaces = described.spaces
    make = find_named(network, word="network", error=ConfigError) if isinstance(network, str) else network
    try:
        policy = ControlActorCritic(spaces, network=make, **described.network.model_dump())
        policy.load_state_dict(load_file(folder / WEIGHTS_FILE))
        num_envs = len(described.statistics["running_returns"])
        normalization = Normalization(spaces.observation_size, num_envs, **described.normalization.model_dump())
        normalization.load_state_dict(described.statistics)
    except ConfigError as error:
        raise ModelError(f"{folder}: {error}") from error
    except (RuntimeError, OSError, SafetensorError, ValueError, TypeError, LookupError, MemoryError) as error:
        raise ModelError(f"{folder}: not a control policy that can be loaded: {error_text(error)}") from error
    if not all(weight.isfinite().all() for weight in policy.parameters()):
        raise ModelError(f"{folder / WEIGHTS_FILE}: the policy contains NaN or infinity")
    return ControlPolicy(policy.eval(), normalization, described.environment, seed)


def _description(folder: Path) -> _Description:
    path = folder / DESCRIPTION_FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{folder} is not the folder of a control policy: it has no {DESCRIPTION_FILE}") from error
    try:
        return _Description.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if where == "format":
            raise ModelError(f"{path} has the format {first['input']!r}; this version of kedge reads 2") from error
        raise ModelError(f"{path} is damaged: {where}: {first['msg']}"[:300]) from error
