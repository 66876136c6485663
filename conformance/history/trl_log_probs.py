"""The log probabilities of TRL's GRPOTrainer in the releases around the fix of its missing temperature.

https://github.com/huggingface/trl/issues/3029, fixed in 0.16: `--adapter conformance/history/trl_log_probs.py`
"""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace

import torch

from ppo_conformance.adapters.stand_ins import stand_in
from ppo_conformance.adapters.torch_tools import TorchAdapter

stand_in("deepspeed", "llm_blender", "mergekit", "vllm", "wandb", "weave")

from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402


class Adapter(TorchAdapter):
    """A model whose logits are given, and one position more than asked for."""

    name = "TRL"

    def version(self):
        """Return TRL's version."""
        return version("trl")

    def log_probs(self, logits, tokens, settings):
        """See `protocol.Adapter`."""
        ids, length = torch.nn.functional.pad(tokens, (1, 0)), logits.shape[1]
        trainer = SimpleNamespace(temperature=settings["temperature"], report_to=[])
        trainer.args = trainer

        def model(**_):
            return SimpleNamespace(logits=torch.cat([logits, torch.zeros_like(logits[:, :1])], 1))

        return GRPOTrainer._get_per_token_logps(trainer, model, ids, torch.ones_like(ids), length)
