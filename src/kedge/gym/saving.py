"""Saves a control policy as a folder, and loads it to act."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kedge.errors import ConfigError, EnvError, ModelError
from kedge.gym.acting import acting_function
from kedge.gym.environments import checked_observation, observation_buffer
from kedge.gym.networks import ControlActorCritic, FeatureNetwork
from kedge.gym.normalization import Normalization
from kedge.gym.spaces import Spaces
from kedge.system.durable import replaced_folder
from kedge.system.output import writing

__all__ = ["ControlPolicy", "load_control_policy", "save_control_policy"]

WEIGHTS_FILE = "policy.safetensors"
DESCRIPTION_FILE = "control.json"
FORMAT = 1


class ControlPolicy:
    """A saved policy, to act with.

    Args:
        policy: Its network.
        normalization: The statistics that it was saved with; they no longer change.
        environment: What it was trained on, as it was saved.
        seed: Of the actions, if they are drawn.
    """

    def __init__(
        self,
        policy: ControlActorCritic,
        normalization: Normalization,
        environment: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.policy, self.normalization, self.environment = policy, normalization, dict(environment or {})
        self._memory = policy.blank_memory(1)
        self._generator = torch.Generator().manual_seed(seed)

    def begin_episode(self) -> None:
        """Forget what a policy with a memory remembers of the former episode."""
        self._memory = self.policy.blank_memory(1)

    @torch.inference_mode()
    def act(self, observation: Any, *, deterministic: bool = True) -> Any:
        """The action for one observation, as the environment takes it.

        Args:
            observation: As the environment gives it; one that is not a `Box`, flattened by Gymnasium's wrapper.
            deterministic: The most probable action, else a drawn one.

        Raises:
            EnvError: The observation has another shape, or a number that is not finite.
        """
        policy, row = self.policy, self._row(observation)
        outputs, self._memory = acting_function(policy, 1)(self.normalization.normalize(row), self._memory)
        if not deterministic:
            outputs = outputs + policy.draw_noise(1, 1, self._generator)[0].numpy()
        return policy.head.executed(policy.head.choose(outputs))[0]

    def _row(self, observation: Any) -> Any:
        """An observation as rollouts hold it: only images stay bytes."""
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
        folder: It appears only once complete; a former one is replaced.
        policy: Policy and critic.
        normalization: Their statistics.
        environment: What they were trained on, as JSON types: its id and settings, for the reader and the card.
        card: Text of its README.

    Raises:
        OutputError: The folder cannot be written.
    """
    folder = Path(folder)
    description = {
        "format": FORMAT,
        "environment": dict(environment),
        "spaces": policy.spaces.as_json(),
        "network": {**policy.settings, "is_custom": policy.has_custom_network},
        "normalization": {**normalization.settings, "state": normalization.state_dict()},
    }
    weights = {name: each.detach().cpu().contiguous() for name, each in policy.state_dict().items()}
    with writing(folder), replaced_folder(folder) as part:
        save_file(weights, part / WEIGHTS_FILE)
        (part / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        (part / "README.md").write_bytes(card.encode("utf-8", "backslashreplace"))
    return folder


def load_control_policy(folder: str | Path, *, network: FeatureNetwork | None = None, seed: int = 0) -> ControlPolicy:
    """Load a policy that `save_control_policy` saved.

    Args:
        folder: Its folder.
        network: The function that made its layers; needed if it has a network of its own.
        seed: Of the actions, if they are drawn.

    Raises:
        ModelError: Not such a folder, a file is damaged or missing, or `network` is missing or another one.
    """
    folder = Path(folder)
    described = _description(folder)
    try:
        settings = dict(described["network"])
        if settings.pop("is_custom") and network is None:
            raise ModelError(f"{folder}: the policy has a network of its own; name the function that makes it")
        spaces = Spaces.from_json(described["spaces"])
        policy = ControlActorCritic(spaces, network=network, **settings)
        policy.load_state_dict(load_file(folder / WEIGHTS_FILE))
        state = dict(described["normalization"])
        saved = state.pop("state")
        normalization = Normalization(spaces.observation_size, len(saved["running_returns"]), **state)
        normalization.load_state_dict(saved)
        loaded = ControlPolicy(policy.eval(), normalization, described["environment"], seed)
    except ModelError:
        raise
    except ConfigError as error:
        raise ModelError(f"{folder}: {error}") from error
    except (RuntimeError, OSError, SafetensorError, ValueError, TypeError, LookupError, MemoryError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"{folder}: not a control policy that can be loaded: {reason}") from error
    if not all(weight.isfinite().all() for weight in policy.parameters()):
        raise ModelError(f"{folder / WEIGHTS_FILE}: the policy contains NaN or infinity")
    return loaded


def _description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION_FILE
    try:
        described = json.loads(path.read_bytes())
        number = described["format"]
    except OSError as error:
        raise ModelError(f"{folder} is not the folder of a control policy: it has no {DESCRIPTION_FILE}") from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: it does not describe a control policy") from error
    if number != FORMAT or not {"spaces", "network", "normalization"} <= described.keys():
        raise ModelError(f"{path} has the format {number!r}; this version of kedge reads {FORMAT}")
    return described
