"""Batches of a custom loop: reads their prompts, and converts responses that were sampled elsewhere to a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import Rollout
from kedge.data import Prompt, encode_prompt, read_rows
from kedge.data.fields import is_conversation
from kedge.data.records import plain_value
from kedge.data.tokens import encode_completion
from kedge.logs.json_lines import plain_json
from kedge.rewards.score import describe_responses
from kedge.rollout.episodes import Episode
from kedge.rollout.sampler import Request, Responses
from kedge.runs.inputs import reading, with_all_columns
from kedge.stages.arguments import is_whole
from kedge.stages.ppo.roles import shortest_context
from kedge.stages.ppo.trainer import Trainer
from kedge_base.errors import DataError, RewardError
from kedge_base.texts import counted
from kedge_base.workers.codec import own_copy


@dataclass(frozen=True, eq=False)
class Batch:
    """Responses to train on. Every list has one entry per response.

    Attributes:
        prompts: The prompts as text; conversations as the chat template renders them.
        responses: The responses as text, without the stop token.
        columns: The other columns of the prompts' rows, each a list.
        prompt_ids: The prompts in tokens.
        response_ids: The responses in tokens, the stop token included.
        masks: For each token of the response, True if the policy chose it and is trained on it.
        logprobs: The log probability (nats) of each token when it was sampled; 0 where the mask is False.
        values: The critic's value of the state before each token; None unless the sampler computes values, as it does
            with a shared critic.
        stopped: True if the response ended with a stop token, False if it was cut off.
        groups: The number of each response's prompt.
        rollout: The responses as padded tensors.
    """

    prompts: list[str]
    responses: list[str]
    columns: Mapping[str, list[Any]]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    masks: list[list[bool]]
    logprobs: list[list[float]]
    values: list[list[float]] | None
    stopped: list[bool]
    groups: list[int]
    rollout: Rollout
    _rows: Sequence[Prompt]
    _owner: object
    _is_exact: bool
    _trained: list[int] = field(default_factory=list[int])

    @classmethod
    def of(
        cls,
        rollout: Rollout,
        rows: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        owner: object,
        is_exact: bool,
    ) -> Batch:
        """Make the batch of a rollout.

        Args:
            rollout: The responses.
            rows: The prompts, by group.
            tokenizer: The policy's.
            owner: The trainer that the batch belongs to.
            is_exact: Its log probabilities and values are exactly those of the weights that sampled it.
        """
        texts = describe_responses(rollout, [rows[group] for group in rollout.group.tolist()], tokenizer)
        lengths = [len(ids) for ids in texts.response_ids]

        def listed(table: Any) -> list[list[Any]]:
            return [row[:length] for row, length in zip(table.tolist(), lengths, strict=True)]

        return cls(
            texts.prompts,
            texts.completions,
            own_copy(texts.columns),
            texts.prompt_ids,
            texts.response_ids,
            listed(rollout.action_mask),
            listed(rollout.logprobs),
            None if rollout.values is None else listed(rollout.values),
            texts.stopped,
            rollout.group.tolist(),
            rollout,
            rows,
            owner,
            is_exact,
        )

    def __len__(self) -> int:
        return len(self.responses)

    def by_token(self, scores: Sequence[Any]) -> list[Any]:
        """Put numbers per turn at the last token of each turn; other scores are unchanged.

        Raises:
            RewardError: The number of scores matches neither turns nor tokens.
        """
        if (starts := self.rollout.turn_starts) is None:
            return [*scores]
        found: list[Any] = []
        for row, (score, begins, ids) in enumerate(zip(scores, starts, self.response_ids, strict=True)):
            numbers = plain_value(score)
            turns = begins.nonzero().flatten().tolist()
            if isinstance(numbers, (list, tuple)) and len(numbers) not in (1, len(ids)):
                if len(numbers) != len(turns):
                    raise RewardError(
                        f"response {row} has {counted(len(turns), 'turn')} and {counted(len(ids), 'token')}, and "
                        f"{counted(len(numbers), 'score')}; expected a number, or one for each turn or token"
                    )
                # As for all scores, tokens read between two turns belong to the earlier one.
                ends = [*(slot - 1 for slot in turns[1:]), len(ids) - 1]
                by_slot = dict(zip(ends, numbers, strict=True))
                numbers = [by_slot.get(slot, 0.0) for slot in range(len(ids))]
            found.append(numbers)
        return found

    def _is_of(self, version: int) -> bool:
        """True if its log probabilities and values are exactly those of the weights after `version` updates."""
        return self._is_exact and int(self.rollout.policy_version.min()) >= version

    def __repr__(self) -> str:
        return (
            f"<Batch: {counted(len(self), 'response')} to {counted(len(self._rows), 'prompt')}, "
            f"{counted(self.rollout.num_actions, 'token')}>"
        )


@dataclass(frozen=True)
class Reader:
    """Reads the prompts of a custom loop, and responses that were sampled elsewhere.

    Attributes:
        trainer: The trainer of the policy.
        room: Longest prompt that the context allows.
        say: Prints a line to the user.
    """

    trainer: Trainer
    room: int | None
    say: Callable[[str], None]

    def prompts(self, prompts: Sequence[Any]) -> tuple[list[Prompt], list[list[int]]]:
        """Read prompts, and encode them.

        Args:
            prompts: Texts, rows, conversations or token ids.

        Raises:
            DataError: A prompt cannot be used.
        """
        if not prompts:
            raise DataError("the list of prompts is empty; pass at least one")
        tokenizer = self.trainer.roles.tokenizer
        others = [prompt for prompt in prompts if not is_ids(prompt)]
        texts = iter(self._read(others) if others else [])
        rows: list[Prompt] = []
        encoded: list[list[int]] = []
        for place, prompt in enumerate(prompts):
            if is_ids(prompt):
                found = _checked(self.trainer, prompt, f"prompt {place}")
                if not found:
                    raise DataError(f"prompt {place} has no tokens")
                if self.room is not None and len(found) > self.room:
                    raise DataError(f"prompt {place} has {len(found)} tokens; the context leaves {self.room}")
                row = Prompt(str(tokenizer.decode(found)))
            else:
                row = next(texts)
                found = encode_prompt(tokenizer, row.text)
            rows.append(row)
            encoded.append(found)
        return rows, encoded

    def prompts_to_sample(self, prompts: Sequence[Any]) -> tuple[list[Prompt], list[list[int]]]:
        """Read prompts to sample responses to, like `prompts`; an environment cannot start an episode from ids."""
        if (player := self.trainer.roles.player) is not None:
            for place, prompt in enumerate(prompts):
                if is_ids(prompt):
                    raise DataError(
                        f"prompt {place} is token ids, and an episode of {player.environment.name} opens with a text, "
                        "row or conversation; pass one of these"
                    )
        return self.prompts(prompts)

    def _read(self, prompts: Sequence[Any]) -> list[Prompt]:
        rows = [{"messages": each} if is_conversation(each) else each for each in prompts]
        config = self.trainer.run_settings.config
        options = reading(config, "prompts", self.trainer.roles.tokenizer, room=self.room)
        return with_all_columns(read_rows(rows, "prompts", **options).records)

    def rollout(
        self,
        prompts: Sequence[Any],
        responses: Sequence[Any],
        *,
        done: int,
        logprobs: Sequence[Sequence[Any]] | None = None,
        stopped: Sequence[bool] | None = None,
        groups: Sequence[int] | None = None,
        policy_version: int | None = None,
    ) -> tuple[Rollout, list[Prompt]]:
        """Convert responses that were sampled elsewhere to a rollout; also return each group's prompt. See
        `PpoTrainer.batch`.

        Args:
            prompts: One per response.
            responses: Texts, token ids, parts, or calls.
            done: Number of updates that the policy has completed.
            logprobs: Log probabilities of each response's tokens; see `PpoTrainer.batch`.
            stopped: True if the response ended with a stop token; see `PpoTrainer.batch`.
            groups: The number of each response's prompt; see `PpoTrainer.batch`.
            policy_version: Number of updates that the policy had completed; see `PpoTrainer.batch`.

        Raises:
            DataError: A prompt or response cannot be used.
        """
        if not responses:
            raise DataError("the batch has no responses")
        for name, entries in {"prompts": prompts, "logprobs": logprobs, "stopped": stopped, "groups": groups}.items():
            if entries is None:
                continue
            if not isinstance(entries, Sized):
                raise DataError(f"{name} are of type {type(entries).__name__}; expected one per response")
            if len(entries) != len(responses):
                raise DataError(
                    f"{len(entries)} {name} for {counted(len(responses), 'response')}; expected one per response"
                )
        version = done if policy_version is None else policy_version
        if not (is_whole(version) and 0 <= version <= done):
            raise DataError(f"policy_version is {version!r}; expected 0 to {done}, the updates that were made")
        trainer = self.trainer
        rows, prompt_ids = self.prompts(prompts)
        encoded = [
            _Response(trainer, place, response, None if stopped is None else stopped[place])
            for place, response in enumerate(responses)
        ]
        for response in encoded:
            self._check_lengths(response)
        numbers, firsts = _groups(rows, prompt_ids, groups)
        table = Responses.empty(len(responses), trainer.settings.rollout.max_new_tokens, pad_id=trainer.pad_id)
        for place, response in enumerate(encoded):
            table.append(place, response.ids)
            table.own[place, : len(response.own)] = torch.tensor(response.own)
            table.turn_starts[place, response.starts] = True
            for slot, parent in response.parents.items():
                table.parents[place, slot] = parent
            if logprobs is not None:
                table.logprobs[place, table.own[place]] = response.known(logprobs[place])
        opened = (response.opening or ids for response, ids in zip(encoded, prompt_ids, strict=True))
        request = Request([*opened], seeds=(), groups=numbers, policy_version=version)
        rollout = table.rollout(request, stop_tokens=trainer.roles.stop_tokens.ids, device=trainer.run.device)
        # The caller decides, regardless of the last token.
        tables = {"stopped": torch.tensor([response.stopped for response in encoded])}
        if any(response.opening or len(response.starts) > 1 for response in encoded):
            tables["turn_starts"] = table.turn_starts
        if any(response.opening for response in encoded):
            tables["parents"] = table.parents
        rollout = replace(rollout, **{name: each.to(trainer.run.device) for name, each in tables.items()})
        if logprobs is None:
            self.say(
                f"The log probabilities of {counted(len(responses), 'response')} when they were sampled are not known; "
                "those of the current weights take their place."
            )
            rollout = replace(rollout, logprobs=trainer.logprobs(rollout))
        return rollout, [rows[first] for first in firsts]

    def _check_lengths(self, response: _Response) -> None:
        """Check that calls fit into the context."""
        context = shortest_context(self.trainer.run_settings.config, self.trainer.roles.actor_critic)
        opening = len(response.opening)
        if self.room is not None and opening > self.room:
            raise DataError(f"call 0 of {response.name} read {opening} tokens; the context leaves {self.room}")
        if context is not None and response.longest > context:
            raise DataError(f"a call of {response.name} has {response.longest} tokens; the context has {context}")


def _groups(
    rows: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], groups: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return each response's group, numbered in order of appearance, and each group's first response."""
    # A tensor's entries hash by identity, so equal ones would be different keys.
    keys = list(map(tuple, prompt_ids) if groups is None else plain_value(groups))
    for key in keys:
        if isinstance(key, (list, dict, set)):
            raise DataError(
                f"groups has an entry of type {type(key).__name__}; expected the number of each response's prompt"
            )
    firsts = {key: place for place, key in reversed(list(enumerate(keys)))}
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    for place, key in enumerate(keys):
        if prompt_ids[place] != prompt_ids[firsts[key]]:
            raise DataError(f"responses {firsts[key]} and {place} are in one group and have different prompts")
    if groups is None:
        columns = [plain_json(row.columns) for row in rows]  # in JSON, missing values are equal; NaN is not
        for place, first in enumerate(firsts[key] for key in keys):
            if columns[place] != columns[first]:
                raise DataError(
                    f"responses {first} and {place} have one prompt and different columns; number them in groups="
                )
    return [order[key] for key in keys], [firsts[key] for key in order]


class _Response:
    """A response in tokens.

    Args:
        trainer: Has the tokenizer that encodes texts.
        place: Number of the response, for errors.
        given: A text, token ids, parts, or calls.
        stopped: Whether it ended with a stop token; None to infer this.

    Attributes:
        ids: Its tokens.
        own: True for each token that the policy chose.
        stopped: It ended with a stop token.
        opening: The tokens that its first call read; empty for a response without calls.
        starts: The first slot of each turn of the policy, which is a call or a part that the policy chose.
        counts: Tokens sampled by each of its calls.
        parents: The slots that do not follow the slot before them; see `Rollout.parents`.
        longest: Tokens of its longest call, read and sampled.
    """

    def __init__(self, trainer: Trainer, place: int, given: Any, stopped: bool | None) -> None:
        self.name = name = f"response {place}"
        self.own: list[bool] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.longest = 0
        episode = Episode(place)
        parts = [(given, True)] if isinstance(given, str) or is_ids(given) else _parts(given, name)
        for number, (part, own) in enumerate(parts):
            if isinstance(own, bool):
                if isinstance(part, str):
                    found = encode_completion(trainer.roles.tokenizer, part, eos=False)
                else:
                    found = _checked(trainer, part, name)
                self.starts += [episode.length] if own and found else []
                episode.add(found)
                self.own += [own] * len(found)
            else:
                call = f"call {number} of {name}"
                self._add_call(episode, _checked(trainer, part, call), _checked(trainer, own, call), call)
        self.ids = episode.tokens
        self.opening = episode.prompt
        self.parents = episode.parents
        stops = trainer.roles.stop_tokens.ids
        ends = any(self.own[-1:]) and self.ids[-1] in stops
        last, is_own = parts[-1] if parts else (given, True)  # an empty list is not a text
        is_text = isinstance(last, str) and is_own
        if stopped is None:
            stopped = ends or is_text
        if stopped and not ends:
            if not is_text:
                raise DataError(f"{name} does not end with a stop token of the policy; expected one of {list(stops)}")
            self.ids.append(stops[0])
            self.own.append(True)
        self.stopped = bool(stopped)
        if not any(self.own):
            raise DataError(f"{name} has no token of the policy's own")
        if len(self.ids) > trainer.settings.rollout.max_new_tokens:
            raise DataError(
                f"{name} has {len(self.ids)} tokens, and rollout.max_new_tokens is "
                f"{trainer.settings.rollout.max_new_tokens}"
            )

    def _add_call(self, episode: Episode, read: list[int], said: list[int], name: str) -> None:
        """Add the tokens that a call read beyond the episode so far, and those it sampled."""
        if not (read and said):
            raise DataError(f"{name} has {'no sampled tokens' if read else 'read no tokens'}")
        new = list[int]()
        if self.counts:
            count, slot = episode.known(read)
            new = read[count:]
            episode.add(new, None if slot == episode.length - 1 else slot)
        else:
            episode.opens(read)
        self.starts.append(episode.length)
        self.counts.append(len(said))
        self.longest = max(self.longest, len(read) + len(said))
        episode.add(said)
        self.own += [False] * len(new) + [True] * len(said)

    def known(self, logprobs: Any) -> Tensor:
        """Check the log probabilities of the tokens that the policy chose; those of calls are a list per call."""
        if not self.counts:
            return _logprobs(self.name, logprobs, sum(self.own))
        if not isinstance(logprobs, (list, tuple)) or len(logprobs) != len(self.counts):
            raise DataError(
                f"{self.name} has {counted(len(self.counts), 'call')}; expected a list of log probabilities for each"
            )
        calls = enumerate(zip(logprobs, self.counts, strict=True))
        return torch.cat([_logprobs(f"call {number} of {self.name}", *call) for number, call in calls])


def is_ids(value: Any) -> bool:
    """True for token ids: a tensor, an array, or a list of numbers; not for a single number or text of NumPy."""
    if hasattr(value, "tolist"):
        return getattr(value, "ndim", 1) > 0
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Integral)


def _parts(given: Any, name: str) -> list[tuple[Any, Any]]:
    """Split a response of several turns into its parts, or into calls."""
    expected = "expected a text, token ids, or a list of pairs (text or ids, own) or (ids read, ids sampled)"
    if not isinstance(given, (list, tuple)):
        raise DataError(f"{name} is of type {type(given).__name__}; {expected}")
    parts: list[tuple[Any, Any]] = []
    for part in given:
        is_pair = isinstance(part, (list, tuple)) and len(part) == 2
        is_part = is_pair and isinstance(part[1], bool) and (isinstance(part[0], str) or _may_be_ids(part[0]))
        is_call = is_pair and all(map(_may_be_ids, part))
        if not (is_part or is_call) or (parts and is_part != isinstance(parts[0][1], bool)):
            raise DataError(f"{name} has the part {part!r:.60}; {expected}")
        parts.append((part[0], part[1]))
    return parts


def _may_be_ids(value: Any) -> bool:
    return is_ids(value) or (isinstance(value, (list, tuple)) and not value)


def _checked(trainer: Trainer, ids: Any, name: str) -> list[int]:
    """Check that token ids are in the policy's vocabulary."""
    found = list(plain_value(ids))
    size = len(trainer.roles.tokenizer)
    for token in found:
        if not is_whole(token) or not 0 <= int(token) < size:
            raise DataError(f"{name} has the token id {token!r:.40}; the policy's tokenizer has 0 to {size - 1}")
        if token == trainer.pad_id:
            raise DataError(f"{name} has the padding token {token}; leave padding out")
    return [int(token) for token in found]


def _logprobs(name: str, given: Sequence[float], count: int) -> torch.Tensor:
    """Check the log probabilities of the tokens that the policy chose."""
    if not isinstance(given, Iterable):
        raise DataError(f"log probabilities of {name} are of type {type(given).__name__}; expected a list")
    numbers = list(plain_value(given))
    if len(numbers) != count:
        raise DataError(
            f"{name} has {counted(count, 'token')} of the policy's own, its stop token included, and {len(numbers)} "
            "log probabilities"
        )
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Real) or not -1e30 < float(number) <= 1e-4:
            raise DataError(f"{name} has the log probability {number!r}; expected a finite one of at most 0")
    return torch.tensor(numbers, dtype=torch.float32)
