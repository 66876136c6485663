"""All architectures, and their trials."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from kedge.models.sources import quiet_transformers
from tests.models.registry.outcome import Kind, Outcome, unbuilt
from tests.models.registry.particular import VARIANTS
from tests.models.registry.policy_trial import try_policy
from tests.models.registry.reward_trial import try_reward_model

ARCHITECTURES: dict[Kind, tuple[str, ...]] = {
    "policies": tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS})),
    "reward_models": tuple(sorted(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)),
}


def outcome(kind: Kind, architecture: str) -> Outcome:
    """What becomes of an architecture.

    Raises:
        Fault: See `try_policy`.
    """
    if (reason := unbuilt(kind, architecture)) is not None:
        return reason
    attempt = try_policy if kind == "policies" else try_reward_model
    with tempfile.TemporaryDirectory() as folder, quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about tiny sizes
        return attempt(architecture, Path(folder) / "model")
