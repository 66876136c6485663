"""vLLM as rollout engine: servers in an environment of their own, and weights by their own update protocol."""

from kedge.rollout.vllm.engine import VllmEngine
from kedge.rollout.vllm.fleet import Fleet
from kedge.rollout.vllm.nccl import NcclTransfer, TorchGroup
from kedge.rollout.vllm.responses import SamplingSettings
from kedge.rollout.vllm.server import PLUGIN, GivenServer, OwnServer, ServerOptions
from kedge.rollout.vllm.transfer import FolderTransfer, Transfer

__all__ = [
    "PLUGIN",
    "Fleet",
    "FolderTransfer",
    "GivenServer",
    "NcclTransfer",
    "OwnServer",
    "SamplingSettings",
    "ServerOptions",
    "TorchGroup",
    "Transfer",
    "VllmEngine",
]
