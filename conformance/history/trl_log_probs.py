"""The log probabilities of TRL's GRPOTrainer in the releases around the fix of its missing temperature.

https://github.com/huggingface/trl/issues/3029, fixed in 0.16: `--adapter conformance/history/trl_log_probs.py`
"""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import torch

from ppo_conformance import Adapter as Base
from ppo_conformance.adapters.stand_ins import stand_in
from ppo_conformance.adapters.torch_tools import value_and_gradient

stand_in("deepspeed", "llm_blender", "mergekit", "vllm", "wandb", "weave")

from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402


class Adapter(Base):
    """See `protocol.Adapter`; a model whose logits are given, and one position more than asked for."""

    name = "TRL"

    def version(self):
        """See `protocol.Adapter`."""
        return version("trl")

    def log_probs(self, logits, tokens, settings):
        """See `protocol.Adapter`."""
        ids, length = torch.tensor(np.pad(tokens, ((0, 0), (1, 0)))), logits.shape[1]
        trainer = SimpleNamespace(temperature=settings["temperature"], report_to=[])
        trainer.args = trainer

        def score(x):
            def model(**_):
                return SimpleNamespace(logits=torch.cat([x, torch.zeros_like(x[:, :1])], 1))

            return GRPOTrainer._get_per_token_logps(trainer, model, ids, torch.ones_like(ids), length)

        return value_and_gradient(score, logits)
