"""The built-in engine: sampling with a key–value cache, a random stream per row, and dropping of finished rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import Unpack

from kedge.algorithm.experience import Rollout
from kedge.algorithm.logprobs import vocabulary_logprobs
from kedge.algorithm.masking import WITHOUT_FLOAT64
from kedge.models import Decoder, LanguageModel, PackedDecoder, Precision, autocast, prepacked, read_values
from kedge.ranks import AdaptiveTokens
from kedge.rollout.engine import Dialogue, GenerateOptions
from kedge.rollout.responses import Paths, Request, Responses
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
        table.responses.clear(rows)
        request = table.request
        if request.dialogue is not None:
            for row, prompt in zip(rows, request.dialogue.open(rows), strict=True):
                request.prompts[row] = prompt  # an environment may open differently the second time
        while rows:
            at_once = self.adaptive.rows  # which the last batch may have halved again
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
        device = self.model.device
        prompts, responses = table.request.prompts, table.responses
        index = torch.tensor(rows, device=device)
        speaks = torch.ones_like(index, dtype=torch.bool)
        starts = torch.zeros_like(index)  # of each row's turn
        limits = torch.tensor([dialogue.limit(row) for row in rows], device=device).clamp(max=self.max_new_tokens)
        last = torch.zeros_like(index)
        responses.start_turns(index)
        while True:
            speaking = index[speaks]
            places = responses.lengths[speaking]
            hidden = decoder.hidden[speaks]
            tokens, logprobs = self._draw(hidden, table.draws[speaking, places])
            last[speaks] = tokens
            self._note(table, speaking, places, tokens, logprobs, hidden)
            lengths = responses.lengths[index]
            speaks = speaks & ~torch.isin(last, self._stops) & (lengths < limits)
            share = ANSWERED_SHARE if isinstance(decoder, PackedDecoder) else 1.0  # others read all rows again
            if len(rows) - int(speaks.sum()) < share * len(rows):
                decoder.step(last, speaks)
                continue
            goes_on = speaks.tolist()
            turns = zip(rows, starts.tolist(), goes_on, strict=True)
            before = Paths(responses, prompts)
            said = {row: responses.since(row, start) for row, start, on in turns if not on}
            for row, count in dialogue.kept(said).items():
                before.note(row)
                responses.cut(row, int(responses.lengths[row]) - len(said[row]) + count)
                said[row] = said[row][:count]
            answers = dialogue.answer(said)
            kept = [place for place, row in enumerate(rows) if goes_on[place] or answers[row] is not None]
            if not kept:
                return
            rows = [rows[place] for place in kept]
            for row in rows:
                if (reply := answers.get(row)) is not None:
                    if reply.parent is not None:
                        before.note(row)
                    responses.append(row, reply.tokens, parent=reply.parent)
            places = torch.tensor(kept, device=device)
            answered = ~speaks[places]
            index, last = index[places], last[places]
            lengths = responses.lengths[index]
            starts = torch.where(answered, lengths, starts[places])
            ends = lengths + torch.tensor([dialogue.limit(row) for row in rows], device=device)
            limits = torch.where(answered, ends, limits[places]).clamp(max=self.max_new_tokens)
            responses.start_turns(index[answered])
            speaks = torch.ones_like(answered)
            if isinstance(decoder, PackedDecoder):
                if len(kept) < len(goes_on):
                    decoder.keep(places)
                cuts, texts = before.next_texts(rows, last.tolist(), answers)
                if cuts:
                    decoder.cut(cuts)
                decoder.extend(texts)
            else:
                decoder = self._decoder_of(rows, table, dialogue)

    def _decoder_of(self, rows: Sequence[int], table: _Rows, dialogue: Dialogue) -> Decoder:
        """A decoder that reads conversations from their start, for models that cannot continue them."""
        prompts = [table.request.prompts[row] for row in rows]
        so_far = [table.responses.read_next(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
        room = min(dialogue.longest_turn, self.max_new_tokens)
        longest = max(max(map(len, prompts)) + self.max_new_tokens, max(map(len, so_far)) + room)
        return self.model.trunk.decoder(so_far, max_new_tokens=room, pad_id=self.pad_id, longest=longest)

    def _sample(self, table: _Rows, rows: Int[Tensor, " rows"], decoder: Decoder) -> None:
        """Sample until a stop token; finished rows are computed, and ignored, until enough of them can be dropped."""
        running = torch.ones_like(rows, dtype=torch.bool)
        alive = torch.arange(len(rows), device=rows.device)
        for place in range(self.max_new_tokens):
            tokens, logprobs = self._draw(decoder.hidden, table.draws[rows, place])
            self._note(table, rows[alive], place, tokens[alive], logprobs[alive], decoder.hidden[alive])
            running = running & ~torch.isin(tokens, self._stops)
            alive = running.nonzero().squeeze(1)  # once per token: a GPU is waited for
            if len(alive) == 0 or place + 1 == self.max_new_tokens:
                return
            if len(alive) <= (1 - COMPACTION_SHARE) * len(rows) and decoder.can_drop_rows:
                decoder.keep(alive)
                rows = rows[alive]
                tokens = tokens[alive]
                running = running[alive]
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

    def _draw(self, hidden: Float[Tensor, "rows dim"], draws: Float[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
        """Draw one token per row; return tokens and log probabilities."""

        def measure(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
            logprobs = vocabulary_logprobs(logits, temperature=self.temperature or 1.0)
            tokens = _inverse_cdf(logprobs, draws) if self.temperature > 0 else logits.argmax(dim=-1)
            return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(1)

        tokens, logprobs = self.model.over_logits(measure, hidden, draws)
        return tokens, logprobs


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
