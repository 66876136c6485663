"""The whitening of TRL's PPOTrainer, up to 1.12; everything else is computed inside one long method."""

# pyright: reportMissingImports=false

import os

from ppo_conformance.adapters.torch_tools import TorchAdapter
from ppo_conformance.protocol import NotOffered

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl.experimental.ppo import ppo_trainer


class Adapter(TorchAdapter):
    """`masked_whiten`."""

    name = "TRL PPO"
    distribution = "trl"
    profile = {
        "whitening": "mean_and_std std_only",
        "whitening_bessel": "yes",
        **dict.fromkeys(("tools", "left_padding"), "yes"),
    }

    def whiten(self, values, mask, settings):
        if mask.sum() < 2:
            raise NotOffered("one value has no deviation")
        return ppo_trainer.masked_whiten(values, mask, settings["whitening"] == "mean_and_std")
