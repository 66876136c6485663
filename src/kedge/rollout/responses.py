"""The rows requested from an engine, the table of responses that it fills, and the resulting rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.experience import Rollout
from kedge.algorithm.prefixes import common_start
from kedge.data.tokens import pad_left
from kedge.rollout.engine import Dialogue, GenerateOptions, Reply


@dataclass(frozen=True)
class Request:
    """The rows requested by a call of `Engine.generate`; the attributes are its arguments.

    Attributes:
        prompts: The prompt of each row; for a conversation, its initial tokens.
        seeds: One seed per row; see `GenerateOptions`.
        groups: Number of each row's prompt; see `GenerateOptions`.
        policy_version: Number of updates that the policy has completed; see `GenerateOptions`.
        dialogue: Answers the policy; see `GenerateOptions`.
    """

    prompts: list[Sequence[int]]
    seeds: Sequence[int]
    groups: Sequence[int] | None = None
    policy_version: int = 0
    dialogue: Dialogue | None = None

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], **options: Unpack[GenerateOptions]) -> Request:
        """Make a request from the arguments of `Engine.generate`, and open the conversations."""
        dialogue = options.get("dialogue")
        rows = range(len(options["seeds"]))
        opened = prompts if dialogue is None else dialogue.open(rows)
        assert len(opened) == len(rows), "one seed per prompt"
        return cls([*opened], **options)


@dataclass(frozen=True)
class Responses:
    """The samples so far; slots after a row's last token keep their initial value.

    Attributes:
        ids: The tokens.
        logprobs: The log probability of each sampled token; 0 for others.
        own: Which of them were sampled.
        lengths: Tokens of each row.
        values: The value before each sampled token; None if the policy has no head for it.
        pad_id: Fills the unused slots.
        turn_starts: See `Rollout`.
        parents: See `Rollout`.
    """

    ids: Int[Tensor, "batch time"]
    logprobs: Float[Tensor, "batch time"]
    own: Bool[Tensor, "batch time"]
    lengths: Int[Tensor, " batch"]
    values: Float[Tensor, "batch time"] | None
    pad_id: int
    turn_starts: Bool[Tensor, "batch time"]
    parents: Int[Tensor, "batch time"]

    @classmethod
    def empty(
        cls, rows: int, time: int, *, pad_id: int, device: torch.device | None = None, with_values: bool = False
    ) -> Responses:
        """Make a table without tokens, on the CPU by default."""
        zeros = torch.zeros(rows, time, device=device)
        return cls(
            ids=torch.full((rows, time), pad_id, device=device),
            logprobs=zeros,
            own=zeros.bool(),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            values=zeros.clone() if with_values else None,
            pad_id=pad_id,
            turn_starts=zeros.bool(),
            parents=torch.arange(-1, time - 1, device=device).repeat(rows, 1),
        )

    def clear(self, rows: Sequence[int]) -> None:
        """Discard the tokens of some rows."""
        for row in rows:
            self.cut(row, 0)

    def cut(self, row: int, length: int) -> None:
        """Discard the tokens of a row from a length on."""
        fills: list[tuple[Tensor, float]] = [
            (self.ids, self.pad_id), (self.logprobs, 0.0), (self.own, False), (self.turn_starts, False)
        ]  # fmt: skip
        if self.values is not None:
            fills.append((self.values, 0.0))
        for table, value in fills:
            table[row, length:] = value
        self.parents[row, length:] = torch.arange(length - 1, self.parents.shape[1] - 1, device=self.parents.device)
        self.lengths[row] = length

    def start_turns(self, rows: Int[Tensor, " rows"]) -> None:
        """Note that a turn of the policy starts in each of some rows."""
        self.turn_starts[rows, self.lengths[rows]] = True

    def write(
        self,
        rows: Int[Tensor, " rows"],
        places: Int[Tensor, " rows"] | int,
        tokens: Int[Tensor, " rows"],
        logprobs: Float[Tensor, " rows"],
        values: Float[Tensor, " rows"] | None = None,
    ) -> None:
        """Add a sampled token to each of some rows."""
        self.ids[rows, places] = tokens
        self.logprobs[rows, places] = logprobs
        self.own[rows, places] = True
        self.lengths[rows] = places + 1
        if self.values is not None and values is not None:
            self.values[rows, places] = values

    def append(
        self, row: int, tokens: Sequence[int], logprobs: Sequence[float] | None = None, *, parent: int | None = None
    ) -> None:
        """Add tokens to a row; they count as sampled if they have log probabilities.

        Args:
            row: The row.
            tokens: Token ids.
            logprobs: One per token, if they were sampled.
            parent: The slot of the token that they, or the next ones, follow; None for the row's last one.
        """
        start = int(self.lengths[row])
        if parent is not None:
            self.parents[row, start] = parent
        added = slice(start, start + len(tokens))
        self.ids[row, added] = torch.tensor(tokens, dtype=torch.long, device=self.ids.device)
        self.lengths[row] = start + len(tokens)
        if logprobs is not None:
            self.logprobs[row, added] = torch.tensor(logprobs, device=self.logprobs.device)
            self.own[row, added] = True

    def path(self, row: int, prompt: Sequence[int]) -> list[tuple[int, int]]:
        """List the slots, negative in the prompt, and the token ids that the policy reads before its next token."""
        length = int(self.lengths[row])
        ids, parents = self.ids[row].tolist(), self.parents[row].tolist()
        slot = parents[length] if length < len(parents) else length - 1
        found: list[tuple[int, int]] = []
        while slot >= 0:
            found.append((slot, ids[slot]))
            slot = parents[slot]
        found += [(place, prompt[place]) for place in range(slot, -len(prompt) - 1, -1)]
        return found[::-1]

    def read_next(self, row: int, prompt: Sequence[int]) -> list[int]:
        """The token ids that the policy reads before its next token."""
        return [token for _, token in self.path(row, prompt)]

    def since(self, row: int, start: int) -> list[int]:
        """The tokens of a row from an index on."""
        return self.ids[row, start : int(self.lengths[row])].tolist()

    def rollout(self, request: Request, *, stop_tokens: Sequence[int], device: torch.device) -> Rollout:
        """Convert the responses, none of which is empty, to a rollout.

        Args:
            request: What they respond to.
            stop_tokens: The tokens that end a response.
            device: The device of the rollout.
        """
        slots = torch.arange(self.ids.shape[1], device=self.ids.device)
        last = self.ids.gather(1, self.lengths[:, None] - 1)[:, 0]
        stops = torch.tensor(stop_tokens, dtype=torch.long, device=self.ids.device)
        prompt_ids, prompt_mask = pad_left(request.prompts, self.pad_id)
        groups = range(len(last)) if request.groups is None else request.groups
        rollout = Rollout(
            prompt_ids=prompt_ids.to(device),
            prompt_mask=prompt_mask.to(device),
            response_ids=self.ids.to(device),
            token_mask=(slots < self.lengths[:, None]).to(device),
            action_mask=self.own.to(device),
            logprobs=self.logprobs.to(device),
            values=None if self.values is None else self.values.to(device),
            stopped=torch.isin(last, stops).to(device),
            group=torch.tensor(groups, device=device),
            policy_version=torch.full((len(last),), request.policy_version, device=device),
        )
        if request.dialogue is None:
            return rollout
        starts, parents = (table.to(device) for table in (self.turn_starts, self.parents))
        return request.dialogue.finished(replace(rollout, turn_starts=starts, parents=parents))


class Paths:
    """Remembers the contexts of rows before they change, for a cache that still has them.

    Args:
        responses: The rows.
        prompts: Their prompts.
    """

    def __init__(self, responses: Responses, prompts: Sequence[Sequence[int]]) -> None:
        self._responses = responses
        self._prompts = prompts
        self._before: dict[int, list[tuple[int, int]]] = {}

    def note(self, row: int) -> None:
        """Note that a row is about to change. Its last token has not been read yet."""
        if row not in self._before:
            self._before[row] = self._responses.path(row, self._prompts[row])[:-1]

    def next_texts(
        self, rows: Sequence[int], last: Sequence[int], replies: Mapping[int, Reply | None]
    ) -> tuple[dict[int, int], list[list[int]]]:
        """Return what to read next.

        Args:
            rows: The rows.
            last: Their last sampled tokens, which have not been read yet.
            replies: The replies to some of them.

        Returns:
            For the place of each row that has changed, the number of tokens read before that remain; and for each row,
            the token ids to read, at least one.
        """
        cuts: dict[int, int] = {}
        texts: list[list[int]] = []
        for place, (row, token) in enumerate(zip(rows, last, strict=True)):
            if row in self._before:
                now = self._responses.path(row, self._prompts[row])
                cuts[place] = common_start([self._before[row], now[:-1]])
                texts.append([each for _, each in now[cuts[place] :]])
            else:
                reply = replies.get(row)
                texts.append([token, *(reply.tokens if reply else ())])
        return cuts, texts
