"""The function of `kedge` that publishes models."""

from __future__ import annotations

from kedge.stages.arguments import StrPath
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import Result, folder_of
from kedge_hub.pushing import push_model


def push(model: StrPath | Result, repo: str, *, private: bool = False, existing: bool = False) -> str:
    """Push a trained model to the Hugging Face hub; returns its address.

    `kedge.ppo(..., push={"repo": "org/name"})` pushes as soon as the training has finished.

    Args:
        model: A run's folder or result, one of its checkpoints (`runs/ppo@8`), or a model's folder.
        repo: `org/name`; created if it does not exist.
        private: Whether a new repository is private.
        existing: Whether a repository with content that kedge did not push may get a commit.

    Raises:
        ConfigError: The push is not possible; nothing is pushed.
        PushError: The hub refused, or the connection failed.
    """
    return push_model(folder_of(model, "model"), repo, private=private, existing=existing, say=say)
