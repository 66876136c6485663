"""Whether a name that is no folder can be a model on the Hugging Face Hub, found out within seconds."""

from __future__ import annotations

from functools import cache

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

from kedge.errors import ModelError

__all__ = ["check_hub_id"]

PROBE_SECONDS = 5.0
"""Time limit of the request; transformers alone tries six times over 23 seconds."""


@cache
def check_hub_id(name: str) -> None:
    """Refuse a name that cannot be loaded: no id, or neither in the local cache nor within reach.

    An answer of the hub, whatever it says, is left to transformers.

    Raises:
        ModelError: One line with the reason.
    """
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    except HFValidationError:
        raise ModelError(f"model {name!r}: no such folder, and not a hub id (org/name)") from None
    if "/" not in name:
        raise ModelError(f"model {name!r}: no such folder; a hub id has the form org/name")
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"model {name!r}: no such folder, and not in the cache, and HF_HUB_OFFLINE is set")
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=PROBE_SECONDS)
    except (HfHubHTTPError, EntryNotFoundError):
        return
    except Exception as error:  # the network: errors of httpx, ssl and the socket
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"model {name!r}: no such folder, and the Hugging Face Hub cannot be reached ({reason}); give a folder, or "
            "connect"
        ) from error
