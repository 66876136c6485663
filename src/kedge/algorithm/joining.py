"""Several rollouts as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kedge.algorithm.experience import Rollout

__all__ = ["join_rollouts", "join_rows"]


def join_rollouts(parts: Sequence[Rollout], *, pad_id: int) -> Rollout:
    """The rows of all parts, in order, padded to the widest; a single part is returned unchanged.

    Args:
        parts: at least one. Their group numbers are kept, so groups that are not the same need different ones.
        pad_id: token id of the additional slots.
    """
    if len(parts) == 1:
        return parts[0]
    values = [part.values for part in parts if part.values is not None]
    return Rollout(
        prompt_ids=join_rows([part.prompt_ids for part in parts], fill=pad_id, left=True),
        prompt_mask=join_rows([part.prompt_mask for part in parts], left=True),
        response_ids=join_rows([part.response_ids for part in parts], fill=pad_id),
        token_mask=join_rows([part.token_mask for part in parts]),
        action_mask=join_rows([part.action_mask for part in parts]),
        logprobs=join_rows([part.logprobs for part in parts]),
        stopped=torch.cat([part.stopped for part in parts]),
        group=torch.cat([part.group for part in parts]),
        policy_version=torch.cat([part.policy_version for part in parts]),
        values=join_rows(values) if len(values) == len(parts) else None,
    )


def join_rows(parts: Sequence[Tensor], *, fill: float = 0, left: bool = False) -> Tensor:
    """Rows of several widths as one tensor.

    Args:
        parts: shaped `[rows, width]`.
        fill: content of the additional slots.
        left: whether these come before the row, as in prompts.
    """
    width = max(part.shape[1] for part in parts)
    missing = [width - part.shape[1] for part in parts]
    sides = [(count, 0) if left else (0, count) for count in missing]
    return torch.cat([pad(part, side, value=fill) for part, side in zip(parts, sides, strict=True)])
