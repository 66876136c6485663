"""Privileged information: columns of a prompt's row that a critic reads, and the policy does not.

They become a text between prompt and response. A baseline may depend on anything but the actions that follow, so the
policy's gradient stays unbiased.

Source: asymmetric actor-critic: Pinto et al. (arXiv 1710.06542); Baisero & Amato (2105.11674), who condition the value
on the policy's own state as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import Rollout
from kedge.data import Prompt
from kedge.data.tokens import encode_text, pad_left
from kedge_base.errors import DataError


def privileged_text(template: str | None) -> PrivilegedText | None:
    """The text of a template, if there is one."""
    return None if template is None else PrivilegedText(template)


@dataclass(frozen=True)
class PrivilegedText:
    """Renders privileged information.

    Args:
        template: A text with columns in braces.
    """

    template: str

    def ids(self, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, place: str) -> list[int]:
        """The text's tokens for a row of the data.

        Raises:
            DataError: The row lacks a column; the message names its `place`.
        """
        columns = [name for _, name, _, _ in Formatter().parse(self.template) if name]
        if missing := [name for name in columns if row.get(name) is None]:
            known = ", ".join(sorted(name for name, value in row.items() if value is not None))
            raise DataError(
                f"{place} has no {missing[0]!r}, which the critic of ppo.critic=privileged reads; there are: {known}"
            )
        texts = {
            name: each if isinstance(each := row[name], str) else json.dumps(each, ensure_ascii=False, default=str)
            for name in columns
        }
        return encode_text(tokenizer, self.template.format_map(texts), continues=True)

    def longest(self, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> int:
        """Maximum number of its tokens over these prompts; errors as in `ids`."""
        return max((len(self.ids(prompt.row, tokenizer, prompt.place)) for prompt in prompts), default=0)

    def added(
        self, rollout: Rollout, rows: Sequence[Mapping[str, Any] | None], tokenizer: PreTrainedTokenizerBase
    ) -> Rollout:
        """Add the privileged tokens to a rollout.

        Args:
            rollout: Sampled responses.
            rows: The row of each response's prompt; None for no privileged tokens.
            tokenizer: The critic's, which is the policy's.
        """
        texts = [[] if row is None else self.ids(row, tokenizer, "a prompt") for row in rows]
        ids, mask = (each.to(rollout.response_ids.device) for each in pad_left(texts, 0))
        return replace(rollout, privileged_ids=ids, privileged_mask=mask)
