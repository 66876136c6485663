"""The runs that memory is measured of: architectures, adapters, critics, checkpointing, lengths and vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A short run of a random model.

    Attributes:
        family: llama, gpt2 or qwen2.
        hidden: Width.
        layers: Blocks.
        vocabulary: Rows of the embedding.
        adapter: none or lora.
        critic: shared, separate or none.
        checkpointing: Whether activations are recomputed.
        prompt: Tokens of each prompt.
        response: Tokens of each response.
        rows: Responses per update.
        budget: Tokens per micro-batch.
        minibatches: Steps per epoch.
        reward: True if a reward model scores instead of a function.
        precision: fp32 or bf16.
        stage: ppo, critic, sft or reward.
    """

    family: str
    hidden: int = 256
    layers: int = 6
    vocabulary: int = 2000
    adapter: str = "none"
    critic: str = "shared"
    checkpointing: bool = False
    prompt: int = 32
    response: int = 32
    rows: int = 16
    budget: int = 8192
    minibatches: int = 1
    reward: bool = False
    precision: str = "fp32"
    stage: str = "ppo"

    @property
    def name(self) -> str:
        """A summary on one line."""
        return " ".join(str(value) for value in asdict(self).values())

    @property
    def settings(self) -> dict[str, Any]:
        """The run's fields."""
        return {
            **self._of_stage,
            "adapter.kind": self.adapter,
            "adapter.rank": 8,
            "runtime.micro_batch_tokens": self.budget,
            "runtime.activation_checkpointing": self.checkpointing,
            "runtime.precision": self.precision,
            "runtime.device": "cpu",
            "runtime.num_fixed_prompts": 0,
            "runtime.num_threads": 1,
        }

    @property
    def _of_stage(self) -> dict[str, Any]:
        if self.stage in ("sft", "reward"):
            section = "sft" if self.stage == "sft" else "reward_model"
            return {f"{section}.batch_size": self.rows, "data.eval_fraction": 0.0}
        sampled = {"rollout.num_prompts": self.rows // 2, "rollout.max_new_tokens": self.response}
        return {**(self._of_ppo if self.stage == "ppo" else self._of_critic), **sampled}

    @property
    def _of_ppo(self) -> dict[str, Any]:
        return {
            "ppo.critic": self.critic,
            "ppo.advantage": "gae" if self.critic != "none" else "rloo",
            "rollout.num_responses": 2,
            "ppo.num_minibatches": self.minibatches,
            "ppo.num_epochs": 2,
            "ppo.num_updates": 2,
        }

    @property
    def _of_critic(self) -> dict[str, Any]:
        return {
            "critic.kind": self.critic,
            "critic.num_responses": 2,
            "critic.num_prompts": self.rows,
            "critic.batch_size": self.rows,
            "data.eval_fraction": 0.0,
        }


def _cases() -> Iterator[Case]:
    for family in ("llama", "gpt2", "qwen2"):
        yield Case(family)
        yield Case(family, checkpointing=True, rows=32)
        yield Case(family, critic="separate", reward=True)
        yield Case(family, critic="separate", minibatches=2, budget=512)
        yield Case(family, adapter="lora")
        yield Case(family, adapter="lora", checkpointing=True, rows=32, prompt=96)
        yield Case(family, hidden=128, layers=4, vocabulary=128_000)
        yield Case(family, hidden=128, layers=4, vocabulary=128_000, critic="separate", checkpointing=True, budget=512)
        yield Case(
            family, hidden=128, layers=4, vocabulary=128_000, adapter="lora", prompt=128, response=16, budget=1024
        )
        yield Case(family, prompt=160, response=96, rows=8, minibatches=2)
    yield Case("llama", precision="bf16", critic="separate")
    yield Case("qwen2", critic="none", prompt=16, response=128, budget=1024)
    for family in ("llama", "gpt2", "qwen2"):
        yield Case(family, stage="critic", critic="separate", reward=family == "llama")
        yield Case(family, stage="critic", critic="separate", checkpointing=True, prompt=96, budget=1024)
    yield Case("gpt2", stage="critic")
    yield Case("qwen2", stage="critic", critic="separate", adapter="lora")
    alone: dict[str, Any] = {"critic": "none", "rows": 32, "budget": 1024}
    yield Case("llama", stage="sft", **alone)
    yield Case("qwen2", stage="sft", adapter="lora", **alone)
    yield Case("gpt2", stage="sft", checkpointing=True, precision="bf16", **alone)
    yield Case("gpt2", stage="reward", **alone)
    yield Case("llama", stage="reward", checkpointing=True, precision="bf16", **alone)
    yield Case("qwen2", stage="reward", hidden=128, layers=4, vocabulary=128_000, **alone)


CASES = tuple(_cases())
