# pyright: reportMissingImports=false
"""`python sb3_trpo.py ENV UPDATES SEED ITERATIONS OUT.npz`: one step of sb3-contrib's TRPO, with all that went into it.

Trains for some updates and saves the last one: observations, actions, log probabilities and advantages of the rollout,
the policy's weights before and after, the KL, and whether a step was accepted.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from sb3_contrib import TRPO


def main(env: str, updates: int, seed: int, iterations: int, out: str) -> None:
    """Train, and save the last step."""
    torch.set_num_threads(1)
    model = TRPO("MlpPolicy", gymnasium.make(env), cg_max_steps=iterations, n_critic_updates=5, seed=seed, device="cpu")
    saved: dict[str, Any] = {}
    train = model.train

    def weights() -> dict[str, np.ndarray]:
        return {name: each.detach().numpy().copy() for name, each in model.policy.named_parameters()}

    def recorded() -> None:
        buffer = model.rollout_buffer
        before = weights()
        rollout = {
            "observations": buffer.observations[:, 0],
            "actions": buffer.actions[:, 0],
            "logprobs": buffer.log_probs[:, 0],
            "advantages": buffer.advantages[:, 0],
        }
        saved.update({name: each.copy() for name, each in rollout.items()})
        train()
        saved.update({f"before/{name}": each for name, each in before.items()})
        saved.update({f"after/{name}": each for name, each in weights().items()})
        figures = model.logger.name_to_value
        saved["kl"] = np.asarray(figures["train/kl_divergence_loss"])
        saved["accepted"] = np.asarray(figures["train/is_line_search_success"])

    model.train = recorded
    model.learn(updates * model.n_steps)
    np.savez(out, **saved)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
