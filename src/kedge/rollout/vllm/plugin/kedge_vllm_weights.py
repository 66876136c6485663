"""A plugin of vLLM: the backend `kedge_folder` of its weight updates, which reads safetensors files from a folder.

It runs in the server's environment, where kedge is not installed. vLLM finds it by the entry point in the folder beside
this file, if this file's folder is in `PYTHONPATH`. The trainer drives it by vLLM's own protocol, as it does `nccl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)

BACKEND = "kedge_folder"


@dataclass
class NoInit(WeightTransferInitInfo):
    """Empty setup data: updates need no agreement beforehand."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """The argument of `/update_weights`.

    Attributes:
        path: A folder with `*.safetensors`; the tensors have the names of the model's checkpoint.
    """

    path: str


class FolderTransfer(WeightTransferEngine):
    """Loads weights in the format of a checkpoint, layer by layer, as vLLM does when a server starts."""

    init_info_cls = NoInit
    update_info_cls = FolderUpdate

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Prepare every layer for its weights."""
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FolderUpdate) -> None:
        """Load all files of the folder."""
        self.model.load_weights(_tensors(Path(update_info.path), self.device))

    def finish_weight_update(self) -> None:
        """Convert the loaded weights to the layout that the kernels need."""
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""


def _tensors(folder: Path, device: Any) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.safetensors; can this server read the trainer's folder?")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name).to(device)


def register() -> None:
    """Make the backend known; called by vLLM, in every process of a server."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FolderTransfer)
