"""The table of responses that an engine fills, and the built-in engine.

It samples with a key–value cache and a random stream per row, and drops finished rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from typing_extensions import Unpack

from kedge.algorithm.experience import Rollout
from kedge.algorithm.logprobs import vocabulary_logprobs
from kedge.algorithm.masking import WITHOUT_FLOAT64
from kedge.algorithm.prefixes import common_start
from kedge.data.tokens import pad_left
from kedge.models import Decoder, LanguageModel, PackedDecoder, Precision, autocast, prepacked, read_values
from kedge.ranks import AdaptiveTokens
from kedge.rollout.engine import Dialogue, GenerateOptions, Reply
from kedge_base.machine.memory import is_out_of_memory, note_exhaustion, release

# Finished rows are dropped only once they make up this share of the batch: dropping them copies all others' cache.
COMPACTION_SHARE = 0.25
# Tokens whose probabilities are summed before a draw; most large vocabularies are a multiple.
SPAN = 128
# Turns that have ended are answered when they reach this share. Answered one by one, they would take as many steps as
# the longest conversation, and waits for an environment would add up; answered all at once, as many as the longest
# turns.
ANSWERED_SHARE = 0.5


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

    def cut(self, row: int, length: int) -> None:
        """Discard the tokens of a row from a length on."""
        for table in (self.logprobs, self.own, self.turn_starts, self.values):
            if table is not None:
                table[row, length:] = 0
        self.ids[row, length:] = self.pad_id
        self.parents[row, length:] = torch.arange(length - 1, self.parents.shape[1] - 1, device=self.parents.device)
        self.lengths[row] = length

    def start_turns(self, rows: list[int]) -> None:
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


@dataclass(frozen=True)
class _Rows:
    """The rows that a call of `generate` samples.

    Attributes:
        request: Their prompts and seeds.
        draws: A uniform random number for each of their tokens.
        responses: Their responses so far.
    """

    request: Request
    draws: Float[Tensor, "rows time"]
    responses: Responses


@dataclass(frozen=True)
class Sampler:
    """Samples from softmax(logits/τ) until a stop token or `max_new_tokens`.

    No top-k and no top-p: a filter that is not applied when the tokens are re-evaluated makes the KL negative.

    A row's tokens depend only on its prompt, its seed and the weights (up to rounding), not on the other rows. Padding
    costs nothing: finished rows are dropped, prompts are read without padding, and a shared prompt is read once.

    Args:
        model: The policy; every call uses its current weights.
        pad_id: Fills the unused slots.
        stop_tokens: The tokens that end a response; the response includes them.
        max_new_tokens: The longest response, in tokens.
        temperature: τ; 0 takes the most likely token at each step, the first of equal ones, regardless of the seeds.
            Its log probabilities are those at τ = 1.
        precision: Number format of the matrix products.
        batch_size: Rows sampled at a time; None samples all at once.
        adaptive: The number of rows sampled at a time if `batch_size` is None; it is reduced when memory runs out.
        is_copy: The model is a copy of the policy, with the last published weights.
        on_token: Called with the row and the id of each token as soon as it is sampled. An exception that it raises
            ends the sampling.

    Source: spec §4.13–15.
    """

    model: LanguageModel
    pad_id: int
    stop_tokens: Sequence[int]
    max_new_tokens: int
    temperature: float = 1.0
    precision: Precision = "fp32"
    batch_size: int | None = None
    adaptive: AdaptiveTokens | None = None
    is_copy: bool = False
    on_token: Callable[[int, int], None] | None = None

    @property
    def is_exact(self) -> bool:
        """True in fp32. In bf16, a token's log probability depends on the shape of the batch; a copy may be older."""
        return self.precision == "fp32" and not self.is_copy

    @cached_property
    def _stops(self) -> Int[Tensor, " stops"]:
        """The stop tokens on the device, where each step compares tokens with them."""
        return torch.tensor(self.stop_tokens, dtype=torch.long, device=self.model.device)

    def with_sampling(self, *, max_new_tokens: int, temperature: float) -> Sampler:
        """Return a sampler of the same policy with a different length limit and temperature; see `Engine`."""
        return replace(self, max_new_tokens=max_new_tokens, temperature=temperature)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], **options: Unpack[GenerateOptions]) -> Rollout:
        """Sample a response for every prompt; see `Engine`."""
        request = Request.of(prompts, **options)
        device = self.model.device
        # The cumulative sum over a large vocabulary needs double precision.
        dtype = torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64
        draws = _uniform_draws(request.seeds, self.max_new_tokens).to(device, dtype)
        responses = Responses.empty(
            len(request.prompts),
            self.max_new_tokens,
            pad_id=self.pad_id,
            device=device,
            with_values=self.model.value_head is not None,
        )
        table = _Rows(request, draws, responses)
        try:
            # Around all batches, because reordering the weights takes as long as one or two steps.
            with autocast(self.precision, device), prepacked(self.model, self.precision):
                for rows in self._batches(request.prompts):
                    self._sample_batch(table, rows)
        except Exception as error:
            note_exhaustion(error, "sampling")
            raise
        return responses.rollout(request, stop_tokens=self.stop_tokens, device=device)

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        """Update the weights of a copy; the policy itself already has them. See `Engine`."""
        if self.is_copy:
            keys = self.model.causal.load_state_dict(dict(tensors), strict=False)
            assert not keys.unexpected_keys, "the copy has the policy's weights"
        return {}

    def close(self) -> None:
        """Do nothing: sampling runs in this process; see `Engine`."""

    def _batches(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Put all rows in one batch, or in batches sorted by prompt length, to limit the padding of shorter prompts."""
        size = self.adaptive.rows if self.batch_size is None and self.adaptive is not None else self.batch_size
        if size is None or size >= len(prompts):
            return [list(range(len(prompts)))]
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _sample_batch(self, table: _Rows, rows: Sequence[int]) -> None:
        """Sample some rows at once; if memory runs out and the batch size is adaptive, in batches of half as many."""
        try:
            return self._sample_at_once(table, rows)
        except Exception as error:
            if self.adaptive is None or self.batch_size is not None or len(rows) == 1 or not is_out_of_memory(error):
                raise
            self.adaptive.halve_rows(-(-len(rows) // 2), error)
            release(error)
        for row in rows:
            table.responses.cut(row, 0)
        request = table.request
        if request.dialogue is not None:
            for row, prompt in zip(rows, request.dialogue.open(rows), strict=True):
                request.prompts[row] = prompt  # an environment may open differently the second time
        while rows:
            at_once = self.adaptive.rows  # read again, because the last batch may have halved it
            self._sample_batch(table, rows[:at_once])
            rows = rows[at_once:]

    def _sample_at_once(self, table: _Rows, rows: Sequence[int]) -> None:
        device = table.draws.device
        texts = [table.request.prompts[row] for row in rows]
        dialogue = table.request.dialogue
        decoder = self.model.trunk.decoder(texts, max_new_tokens=self.max_new_tokens, pad_id=self.pad_id)
        if dialogue is None:
            self._sample(table, torch.tensor(rows, device=device), decoder)
        else:
            self._talk(table, list(rows), decoder, dialogue)

    def _talk(self, table: _Rows, rows: list[int], decoder: Decoder, dialogue: Dialogue) -> None:
        """Sample conversations.

        Rows whose turn has ended wait until there are enough of them to be answered together. Conversations that have
        ended then leave the batch. A forward pass reads the other answers, and the last token of rows whose turn
        continues.
        """
        responses = table.responses
        starts = dict[int, int]()  # where each row's turn starts
        begins = rows
        while True:
            responses.start_turns(begins)
            lengths = responses.lengths.tolist()
            starts |= {row: lengths[row] for row in begins}
            ends = [min(starts[row] + dialogue.limit(row), self.max_new_tokens) for row in rows]
            last, goes_on = self._speak(table, rows, ends, decoder)
            before = Paths(responses, table.request.prompts)
            said = {row: responses.since(row, starts[row]) for row, on in zip(rows, goes_on, strict=True) if not on}
            for row, count in dialogue.kept(said).items():
                before.note(row)
                responses.cut(row, starts[row] + count)
                said[row] = said[row][:count]
            answers = dialogue.answer(said)
            kept = [place for place, row in enumerate(rows) if goes_on[place] or answers[row] is not None]
            if not kept:
                return
            rows = [rows[place] for place in kept]
            begins = [row for row in rows if row in said]
            for row in begins:
                if (reply := answers[row]) is not None:
                    if reply.parent is not None:
                        before.note(row)
                    responses.append(row, reply.tokens, parent=reply.parent)
            if isinstance(decoder, PackedDecoder):
                if len(kept) < len(goes_on):
                    decoder.keep(torch.tensor(kept, device=responses.ids.device))
                cuts, texts = before.next_texts(rows, [last[place] for place in kept], answers)
                if cuts:
                    decoder.cut(cuts)
                decoder.extend(texts)
            else:
                decoder = self._decoder_of(rows, table, dialogue)

    def _speak(self, table: _Rows, rows: list[int], ends: list[int], decoder: Decoder) -> tuple[list[int], list[bool]]:
        """Sample until enough rows have ended their turns; return their last tokens, and whether their turns continue.

        Args:
            table: The rows.
            rows: Those in the batch.
            ends: The length at which each one's turn ends without a stop token.
            decoder: Has read them.
        """
        index, limits = torch.tensor([rows, ends], device=self.model.device)
        speaks = torch.ones_like(index, dtype=torch.bool)
        last = torch.zeros_like(index)
        share = ANSWERED_SHARE if isinstance(decoder, PackedDecoder) else 1.0  # other decoders read all rows again
        while True:
            speaking = index[speaks]
            places = table.responses.lengths[speaking]
            hidden = decoder.hidden[speaks]
            tokens, logprobs = self._draw(hidden, table.draws[speaking, places])
            last[speaks] = tokens
            self._note(table, speaking, places, tokens, logprobs, hidden)
            speaks = speaks & ~torch.isin(last, self._stops) & (table.responses.lengths[index] < limits)
            if len(rows) - int(speaks.sum()) >= share * len(rows):
                return last.tolist(), speaks.tolist()
            decoder.step(last, speaks)

    def _decoder_of(self, rows: Sequence[int], table: _Rows, dialogue: Dialogue) -> Decoder:
        """A decoder that reads conversations from their start, for models that cannot continue them."""
        prompts = [table.request.prompts[row] for row in rows]
        so_far = [table.responses.read_next(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
        room = min(dialogue.longest_turn, self.max_new_tokens)
        longest = max(max(map(len, prompts)) + self.max_new_tokens, max(map(len, so_far)) + room)
        return self.model.trunk.decoder(so_far, max_new_tokens=room, pad_id=self.pad_id, longest=longest)

    def _sample(self, table: _Rows, rows: Int[Tensor, " rows"], decoder: Decoder) -> None:
        """Sample until a stop token; finished rows are computed, and ignored, until enough of them can be dropped."""
        alive = torch.arange(len(rows), device=rows.device)
        for place in range(self.max_new_tokens):
            tokens, logprobs = self._draw(decoder.hidden, table.draws[rows, place])
            self._note(table, rows[alive], place, tokens[alive], logprobs[alive], decoder.hidden[alive])
            alive = alive[~torch.isin(tokens[alive], self._stops)]  # the only wait for a GPU per token
            if len(alive) == 0 or place + 1 == self.max_new_tokens:
                return
            if len(alive) <= (1 - COMPACTION_SHARE) * len(rows) and decoder.can_drop_rows:
                decoder.keep(alive)
                rows = rows[alive]
                tokens = tokens[alive]
                alive = torch.arange(len(rows), device=rows.device)
            decoder.step(tokens)

    def _note(
        self,
        table: _Rows,
        rows: Int[Tensor, " rows"],
        places: Int[Tensor, " rows"] | int,
        tokens: Int[Tensor, " rows"],
        logprobs: Float[Tensor, " rows"],
        hidden: Float[Tensor, "rows dim"],
    ) -> None:
        """Add a sampled token to each of some rows."""
        if self.on_token is not None:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                self.on_token(row, token)
        head = self.model.value_head
        values = None if head is None else read_values(head, hidden).values
        table.responses.write(rows, places, tokens, logprobs, values)

    def _draw(self, hidden: Float[Tensor, "rows dim"], draws: Float[Tensor, " rows"]) -> tuple[Tensor, ...]:
        """Draw one token per row; return tokens and log probabilities."""

        def measure(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
            logprobs = vocabulary_logprobs(logits, temperature=self.temperature or 1.0)
            tokens = _inverse_cdf(logprobs, draws) if self.temperature > 0 else logits.argmax(dim=-1)
            return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(1)

        return self.model.over_logits(measure, hidden, draws)


def _uniform_draws(seeds: Sequence[int], num_steps: int) -> Float[Tensor, "rows steps"]:
    """A separate stream of uniform numbers per row, so that a row's samples do not depend on the other rows."""
    streams = (torch.Generator().manual_seed(seed) for seed in seeds)
    return torch.stack([torch.rand(num_steps, generator=stream, dtype=torch.float64) for stream in streams])


def _inverse_cdf(logprobs: Float[Tensor, "rows vocab"], draws: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Return the token at which the cumulative distribution first exceeds the draw, never one with probability 0.

    Only the sums of spans of the vocabulary are accumulated, and then the probabilities within the span of the draw:
    in double precision, the cumulative sum of a large vocabulary takes longer than the rest of the draw.
    """
    weights = logprobs.exp()
    if gap := -weights.shape[1] % SPAN:
        weights = nn.functional.pad(weights, (0, gap))
    spans = weights.unflatten(1, (-1, SPAN))
    span, rest = _first_above(spans.sum(dim=-1), draws)
    token, _ = _first_above(spans[torch.arange(len(span), device=span.device), span], rest)
    return (span * SPAN + token).clamp(max=logprobs.shape[1] - 1)


def _first_above(weights: Float[Tensor, "rows entries"], draws: Float[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
    """Return the entry at which the cumulative distribution first exceeds the draw, and the draw's place within it."""
    draws = draws.clamp(0, 1 - torch.finfo(draws.dtype).eps / 2)  # a draw below 1 may be rounded to it
    ends = weights.to(draws.dtype).cumsum(dim=-1)
    thresholds = draws[:, None] * ends[:, -1:]
    entry = torch.searchsorted(ends, thresholds, right=True).clamp(max=weights.shape[1] - 1)
    end, weight = ends.gather(1, entry), weights.gather(1, entry)
    return entry.squeeze(1), (1 - (end - thresholds) / weight).squeeze(1)


class Paths:
    """Remembers the contexts of rows before they change, for a cache that still has them.

    Call `note` before each change, and `next_texts` once after all of them.

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
