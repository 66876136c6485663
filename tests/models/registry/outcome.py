"""The outcomes of trials, and the table in which they are committed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.models.registry.particular import UNBUILT, UNBUILT_REWARDS

TABLE = Path(__file__).resolve().parents[3] / "handbook" / "architectures.json"

Kind = Literal["policies", "reward_models"]


class Fault(AssertionError):
    """kedge gives other figures than plain transformers, or ends with anything but its own error."""


@dataclass(frozen=True)
class Refused:
    """kedge refuses the architecture when it is loaded.

    Attributes:
        refused: The error's one line; FOLDER stands for the model's folder.
    """

    refused: str


@dataclass(frozen=True)
class Unbuilt:
    """The architecture cannot be built here, for the reason given."""

    unbuilt: str


@dataclass(frozen=True)
class Policy:
    """How kedge trains the architecture.

    Attributes:
        layout: `packed`: rows end to end without padding; `packed in window`: while no row is longer than the
            attention window; `padded`: padded rows of similar length; `equal lengths`: rows of equal length only.
        sampling: `packed`, `padded`, or `by prompt length`; `refused` if it is refused before a run samples.
        drops_rows: Finished responses leave the batch during sampling.
        checkpointing: Activations can be recomputed in the backward pass.
        separate_critic: A copy can serve as separate critic, not only a value head on the policy.
    """

    layout: str
    sampling: str
    drops_rows: bool
    checkpointing: bool
    separate_critic: bool


@dataclass(frozen=True)
class RewardModel:
    """How kedge reads the architecture's classifier.

    Attributes:
        layout: As in `Policy`.
        critic: It has a score at every token, so it can also become the critic.
    """

    layout: str
    critic: bool


Outcome = Policy | RewardModel | Refused | Unbuilt


def unbuilt(kind: Kind, architecture: str) -> Unbuilt | None:
    """The reason why an architecture has no trial, if there is one."""
    reason = (UNBUILT if kind == "policies" else UNBUILT_REWARDS).get(architecture)
    return None if reason is None else Unbuilt(reason)


def read_table() -> dict[str, dict[str, dict[str, object]]]:
    """The committed outcomes by kind and architecture, and the version of transformers."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def write_table(version: str, outcomes: Mapping[str, Mapping[str, Mapping[str, object]]]) -> None:
    """Replace the committed outcomes."""
    kinds = {kind: dict(sorted(outcomes[kind].items())) for kind in ("policies", "reward_models")}
    text = json.dumps({"transformers": version, **kinds}, indent=1, ensure_ascii=False)
    TABLE.write_text(text + "\n", encoding="utf-8")
