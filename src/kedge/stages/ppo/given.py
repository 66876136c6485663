"""Responses that were sampled elsewhere, as a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from kedge.algorithm.experience import Rollout
from kedge.data import Prompt, encode_prompt
from kedge.data.tokens import encode_completion
from kedge.errors import DataError
from kedge.rollout.responses import Request, Responses
from kedge.stages.ppo.trainer import Trainer


def given_rollout(
    trainer: Trainer,
    prompts: Sequence[Any],
    responses: Sequence[Any],
    *,
    read: Callable[[list[Any]], list[Prompt]],
    room: int | None,
    done: int,
    say: Callable[[str], None],
    logprobs: Sequence[Sequence[float]] | None = None,
    stopped: Sequence[bool] | None = None,
    groups: Sequence[int] | None = None,
    policy_version: int | None = None,
) -> tuple[Rollout, list[Prompt]]:
    """Responses from elsewhere as padded tensors, and the prompt of each group; see `PpoTrainer.batch`.

    Args:
        trainer: Its policy is trained on them.
        prompts: One per response.
        responses: Texts, token ids, or parts.
        read: Reads prompts that are not token ids.
        room: Longest prompt that the context allows.
        done: Updates that the policy has completed.
        say: Prints a line to the user.
        logprobs: See `PpoTrainer.batch`, like the next three.
        stopped: See `logprobs`.
        groups: See `logprobs`.
        policy_version: See `logprobs`.

    Raises:
        DataError: A prompt or response cannot be used.
    """
    if not responses:
        raise DataError("the batch has no responses")
    for name, entries in {"prompts": prompts, "logprobs": logprobs, "stopped": stopped, "groups": groups}.items():
        if entries is not None and not isinstance(entries, Sized):
            raise DataError(f"{name} are a {type(entries).__name__}; expected one per response")
        if entries is not None and len(entries) != len(responses):
            raise DataError(f"{len(entries)} {name} for {len(responses)} responses; expected one per response")
    version = done if policy_version is None else policy_version
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= done:
        raise DataError(f"policy_version is {version!r}; expected 0 to {done}, the updates that were made")
    rows, prompt_ids = rows_and_ids(trainer, prompts, read, room)
    encoded = [
        _Response(trainer, place, response, None if stopped is None else stopped[place])
        for place, response in enumerate(responses)
    ]
    numbers, firsts = _groups(rows, prompt_ids, groups)
    table = Responses.empty(len(responses), trainer.settings.rollout.max_new_tokens, pad_id=trainer.pad_id)
    for place, response in enumerate(encoded):
        table.append(place, response.ids)
        table.own[place, : len(response.own)] = torch.tensor(response.own)
        if logprobs is not None:
            table.logprobs[place, table.own[place]] = _logprobs(place, logprobs[place], sum(response.own))
    request = Request([*prompt_ids], seeds=(), groups=numbers, policy_version=version)
    rollout = table.rollout(request, stop_tokens=trainer.roles.stop_tokens.ids, device=trainer.run.device)
    # As the caller says, whatever its last token is.
    ended = torch.tensor([response.stopped for response in encoded], device=trainer.run.device)
    rollout = replace(rollout, stopped=ended)
    if logprobs is None:
        say(
            f"The log probabilities of {len(responses)} responses when they were sampled are not known; those of the "
            "current weights take their place."
        )
        rollout = replace(rollout, logprobs=trainer.logprobs(rollout))
    return rollout, [rows[first] for first in firsts]


def rows_and_ids(
    trainer: Trainer, prompts: Sequence[Any], read: Callable[[list[Any]], list[Prompt]], room: int | None
) -> tuple[list[Prompt], list[list[int]]]:
    """The prompts, and their tokens; arguments and errors as in `given_rollout`."""
    if not prompts:
        raise DataError("the list of prompts is empty; pass at least one")
    tokenizer = trainer.roles.tokenizer
    by_ids = [is_ids(prompt) for prompt in prompts]
    texts = iter(
        read([prompt for prompt, ids in zip(prompts, by_ids, strict=True) if not ids]) if not all(by_ids) else []
    )
    rows: list[Prompt] = []
    encoded: list[list[int]] = []
    for place, (prompt, ids) in enumerate(zip(prompts, by_ids, strict=True)):
        if ids:
            found = _checked(trainer, prompt, f"prompt {place}")
            if room is not None and len(found) > room:
                raise DataError(f"prompt {place} has {len(found)} tokens; the context leaves {room}")
            rows.append(Prompt(str(tokenizer.decode(found))))
            encoded.append(found)
        else:
            rows.append(next(texts))
            encoded.append(encode_prompt(tokenizer, rows[-1].text))
    return rows, encoded


def _groups(
    rows: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], groups: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Each response's group, numbered in the order of appearance, and the first response of each."""
    if groups is None:
        keys = [tuple(ids) for ids in prompt_ids]
    else:  # the entries of a tensor are never equal as keys
        keys = groups.tolist() if isinstance(groups, Tensor) else list(groups)
        for key in keys:
            if isinstance(key, (list, dict, set)):
                raise DataError(f"groups has a {type(key).__name__}; expected the number of each response's prompt")
    firsts = {key: place for place, key in reversed(list(enumerate(keys)))}
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    for place, key in enumerate(keys):
        if tuple(prompt_ids[place]) != tuple(prompt_ids[firsts[key]]):
            raise DataError(f"responses {firsts[key]} and {place} are in one group and have different prompts")
        if groups is None and rows[place].columns != rows[firsts[key]].columns:
            raise DataError(
                f"responses {firsts[key]} and {place} have one prompt and different columns; number them in groups="
            )
    return [order[key] for key in keys], [firsts[key] for key in order]


class _Response:
    """A response in tokens.

    Args:
        trainer: Its tokenizer encodes texts.
        place: Number of the response, for errors.
        given: A text, token ids, or parts.
        stopped: Whether it ended with a stop token; None to tell by itself.

    Attributes:
        ids: Its tokens.
        own: For each token, True if the policy chose it.
        stopped: It ended with a stop token.
    """

    def __init__(self, trainer: Trainer, place: int, given: Any, stopped: bool | None) -> None:
        name = f"response {place}"
        parts = [(given, True)] if isinstance(given, str) or is_ids(given) else _parts(given, name)
        self.ids: list[int] = []
        self.own: list[bool] = []
        for part, own in parts:
            if isinstance(part, str):
                found = encode_completion(trainer.roles.tokenizer, part, eos=False)
            else:
                found = _checked(trainer, part, name)
            self.ids += found
            self.own += [own] * len(found)
        stops = trainer.roles.stop_tokens.ids
        ends = bool(self.ids) and self.own[-1] and self.ids[-1] in stops
        last, is_own = parts[-1] if parts else ("", True)
        if stopped is None:
            stopped = ends or (isinstance(last, str) and is_own)
        if stopped and not ends:
            if not (isinstance(last, str) and is_own):
                raise DataError(f"{name} does not end with a stop token of the policy; expected one of {list(stops)}")
            self.ids.append(stops[0])
            self.own.append(True)
        self.stopped = stopped
        if not any(self.own):
            raise DataError(f"{name} has no token of the policy's own")
        longest = trainer.settings.rollout.max_new_tokens
        if len(self.ids) > longest:
            raise DataError(f"{name} has {len(self.ids)} tokens, and rollout.max_new_tokens is {longest}")


def is_ids(value: Any) -> bool:
    """True for token ids: a tensor, an array, or a list of numbers."""
    if hasattr(value, "tolist"):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Integral)


def _parts(given: Any, name: str) -> list[tuple[Any, bool]]:
    """The parts of a response of several turns."""
    expected = "expected a text, token ids, or a list of pairs (text or ids, own)"
    if not isinstance(given, (list, tuple)):
        raise DataError(f"{name} is a {type(given).__name__}; {expected}")
    parts: list[tuple[Any, bool]] = []
    for part in given:
        is_pair = isinstance(part, (list, tuple)) and len(part) == 2 and isinstance(part[1], bool)
        if not is_pair or not (isinstance(part[0], str) or is_ids(part[0]) or part[0] == []):
            raise DataError(f"{name} has the part {part!r:.60}; {expected}")
        parts.append((part[0], part[1]))
    return parts


def _checked(trainer: Trainer, ids: Any, name: str) -> list[int]:
    """Token ids of the policy's vocabulary."""
    found = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    size = len(trainer.roles.tokenizer)
    for token in found:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise DataError(f"{name} has {token!r:.40} among its token ids")
        if not 0 <= int(token) < size:
            raise DataError(f"{name} has the token id {token}; the policy's tokenizer has 0 to {size - 1}")
        if token == trainer.pad_id:
            raise DataError(f"{name} has the padding token {token}; leave padding out")
    return [int(token) for token in found]


def _logprobs(place: int, given: Sequence[float], count: int) -> torch.Tensor:
    """The log probabilities of a response's own tokens."""
    if not isinstance(given, Iterable):
        raise DataError(f"the log probabilities of response {place} are a {type(given).__name__}; expected a list")
    numbers: Any = given.tolist() if hasattr(given, "tolist") else list(given)  # pyright: ignore[reportAttributeAccessIssue]
    if len(numbers) != count:
        raise DataError(
            f"response {place} has {count} tokens of the policy's own, its stop token included, and {len(numbers)} log "
            "probabilities"
        )
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Real) or not float(number) <= 1e-4:
            raise DataError(f"response {place} has the log probability {number!r}; expected a number of at most 0")
    return torch.tensor(numbers, dtype=torch.float32)
