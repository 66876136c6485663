"""vLLM as rollout engine: servers in a separate environment, updated with vLLM's own protocol."""

from kedge.rollout.vllm.engine import SamplingSettings, VllmEngine
from kedge.rollout.vllm.fleet import Fleet
from kedge.rollout.vllm.server import PLUGIN, GivenServer, OwnServer, ServerOptions

__all__ = [
    "PLUGIN",
    "Fleet",
    "GivenServer",
    "OwnServer",
    "SamplingSettings",
    "ServerOptions",
    "VllmEngine",
]
