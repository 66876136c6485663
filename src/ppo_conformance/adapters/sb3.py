"""Stable-Baselines3: GAE of its rollout buffer, for control. A row is an environment's steps, without gaps."""

# pyright: reportMissingImports=false

import numpy as np
import torch
from gymnasium.spaces import Box
from stable_baselines3.common.buffers import RolloutBuffer

from ppo_conformance import protocol
from ppo_conformance.protocol import NotOffered


class Adapter(protocol.Adapter):
    """`RolloutBuffer`."""

    name = "Stable-Baselines3"
    distribution = "stable-baselines3"
    profile = {"precision": "float32", "truncation": "yes"}

    def gae(self, rewards, values, mask, last_values, settings):
        """Compute each row separately, without its padding."""
        found = np.zeros((2, *rewards.shape))
        for row, counts in enumerate(mask):
            steps = int(counts.sum())
            if not counts[:steps].all():
                raise NotOffered("every step of an environment counts")
            if not steps:
                continue
            space = Box(-1.0, 1.0, (1,))
            buffer = RolloutBuffer(
                steps, space, space, device="cpu", gamma=settings["gamma"], gae_lambda=settings["lam"]
            )
            for step in range(steps):
                value = torch.tensor([values[row, step]])
                buffer.add(np.zeros(1), np.zeros(1), rewards[row, step], np.zeros(1), value, torch.zeros(1))
            # A value of 0 after the last step is the end of an episode.
            buffer.compute_returns_and_advantage(torch.tensor([last_values[row]]), np.array([last_values[row] == 0]))
            found[:, row, :steps] = buffer.advantages[:, 0], buffer.returns[:, 0]
        return found[0], found[1]
