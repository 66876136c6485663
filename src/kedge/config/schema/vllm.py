"""`rollout.vllm`: the vLLM servers that sample with `rollout.engine=vllm`."""

from pydantic import model_validator

from kedge.config.schema.field import field
from kedge.config.schema.section import Section, StringList

__all__ = ["VllmConfig"]


class VllmConfig(Section):
    """A server that kedge starts in an environment of its own, or servers that are running."""

    python: str | None = field(
        None,
        meaning="Python of an environment with vLLM, in which kedge starts a server and ends it with the run; null "
        "uses rollout.vllm.urls.",
        source="kedge: an environment of its own, since vLLM pins its own torch and transformers",
        text="a file",
    )
    urls: StringList = field(
        [],
        meaning="Servers that are running, in place of one that kedge starts; the prompts are shared out among them.",
        source="kedge: none",
    )
    folder: str | None = field(
        None,
        meaning="Folder for the weights that the servers read; they must be able to read it; null is one in "
        "memory (/dev/shm) if there is room, else the run's own.",
        source="kedge",
        text="a folder",
    )
    devices: str | None = field(
        None,
        meaning="GPUs of the server that kedge starts, as in CUDA_VISIBLE_DEVICES, such as 1 or 2,3; null leaves the "
        "choice to vLLM.",
        source="kedge",
        text="GPU numbers",
    )
    memory: float = field(
        0.3,
        gt=0,
        le=1,
        meaning="Share of the device's memory (on a CPU: of the machine's) that the server may use.",
        source="kedge: trainer and server often share a machine",
        too_high="the trainer, or the server itself, runs out of memory",
        too_low="few responses are sampled at a time, or the server does not start",
    )
    args: StringList = field(
        [],
        meaning="Further arguments of the server that kedge starts, such as '--tensor-parallel-size 2'.",
        source="kedge: none",
    )

    @model_validator(mode="after")
    def _check_one_kind(self) -> "VllmConfig":
        if self.python and self.urls:
            raise ValueError("rollout.vllm.python starts a server, and rollout.vllm.urls names running ones; set one")
        if bad := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"rollout.vllm.urls: {bad[0]} is not an address such as http://localhost:8000")
        return self
