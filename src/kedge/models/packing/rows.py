"""Rows of tokens end to end, as a pass without padding reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kedge.algorithm.prefixes import Pieces


@dataclass(frozen=True)
class TokenRows:
    """Concatenated rows of different lengths.

    Attributes:
        ids: The rows' token ids, concatenated.
        lengths: Tokens of each row, at least 1.
        prompts: The pieces of each row's prompt, which rows with the same numbers share. Empty if no rows share any.
    """

    ids: Int[Tensor, " tokens"]
    lengths: tuple[int, ...]
    prompts: tuple[Pieces, ...] = ()

    @classmethod
    def of(
        cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu", prompts: Sequence[Pieces] = ()
    ) -> TokenRows:
        """Make rows from lists of token ids."""
        ids = torch.tensor([token for row in rows for token in row], dtype=torch.long, device=device)
        return cls(ids, tuple(len(row) for row in rows), tuple(prompts))

    @classmethod
    def unpad(
        cls,
        ids: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows width"],
        prompts: Sequence[Pieces] = (),
    ) -> TokenRows:
        """Extract the counted tokens of a padded tensor, in order."""
        return cls(ids[mask], tuple(mask.sum(dim=1).tolist()), tuple(prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @property
    def starts(self) -> list[int]:
        """Index of each row's first token."""
        return [end - length for end, length in zip(accumulate(self.lengths), self.lengths, strict=True)]

    @property
    def last(self) -> Int[Tensor, " rows"]:
        """Index of each row's last token."""
        return torch.tensor(list(accumulate(self.lengths)), device=self.ids.device) - 1

    @property
    def positions(self) -> Int[Tensor, " tokens"]:
        """Each token's position in its row, from 0."""
        lengths = torch.tensor(self.lengths)
        starts = torch.tensor(self.starts).repeat_interleave(lengths)
        return (torch.arange(len(starts)) - starts).to(self.ids.device)

    def pad(
        self, pad_id: int = 0, *, left: bool = False
    ) -> tuple[Int[Tensor, "rows longest"], Bool[Tensor, "rows longest"]]:
        """Pad the rows to a tensor with `pad_id` on the right or left; also return its mask."""
        columns = torch.arange(self.longest)
        mask = (columns < torch.tensor(self.lengths)[:, None]).to(self.ids.device)
        mask = mask.flip(1) if left else mask
        return torch.full_like(mask, pad_id, dtype=torch.long).masked_scatter(mask, self.ids), mask

    def split(self, counts: Iterable[int]) -> list[TokenRows]:
        """Split into parts with these numbers of rows, in order; empty parts are dropped."""
        parts = []
        first_row = 0
        first_token = 0
        for count in counts:
            lengths = self.lengths[first_row : first_row + count]
            if lengths:
                ids = self.ids[first_token : first_token + sum(lengths)]
                parts.append(TokenRows(ids, lengths, self.prompts[first_row : first_row + count]))
            first_row += count
            first_token += sum(lengths)
        return parts

    def token_indices(self, rows: Sequence[int]) -> Int[Tensor, " chosen"]:
        """Indices of the tokens of these rows, row by row."""
        starts = self.starts
        indices = [index for row in rows for index in range(starts[row], starts[row] + self.lengths[row])]
        return torch.tensor(indices, dtype=torch.long, device=self.ids.device)

    def take(self, rows: Sequence[int]) -> TokenRows:
        """Select rows, in this order."""
        prompts = tuple(self.prompts[row] for row in rows) if self.prompts else ()
        return TokenRows(self.ids[self.token_indices(rows)], tuple(self.lengths[row] for row in rows), prompts)

    def order(self) -> list[int]:
        """The rows' indices, longest first."""
        return sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row])
