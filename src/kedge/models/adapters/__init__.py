"""Adapters: reading them, training them, several models on one base."""

from kedge.models.adapters.adapter import Adapter, AdapterSettings, is_frozen, is_product, mark_frozen, shared_copy
from kedge.models.adapters.folder import ADAPTER_CONFIG, AdapterFolder, is_adapter, read_adapter
from kedge.models.adapters.merging import merge_adapter

__all__ = [
    "ADAPTER_CONFIG",
    "Adapter",
    "AdapterFolder",
    "AdapterSettings",
    "is_adapter",
    "is_frozen",
    "is_product",
    "mark_frozen",
    "merge_adapter",
    "read_adapter",
    "shared_copy",
]
