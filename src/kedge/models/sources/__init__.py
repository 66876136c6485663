"""Sources of models: folders, runs and their checkpoints, adapters, hub ids, and GGUF files."""

from kedge.models.sources.gguf_files import MAX_LAYERS
from kedge.models.sources.names import (
    SHARDED_WEIGHTS,
    base_source,
    check_source,
    find_adapter,
    find_model,
    local_folder,
)
from kedge.models.sources.quiet import loading_reason, quiet_transformers, unknown_kind

__all__ = [
    "MAX_LAYERS",
    "SHARDED_WEIGHTS",
    "base_source",
    "check_source",
    "find_adapter",
    "find_model",
    "loading_reason",
    "local_folder",
    "quiet_transformers",
    "unknown_kind",
]
