"""Makes the items to label: responses sampled from policies, or finished ones from files.

prompts ─▶ without those that are evaluated ─▶ responses of each policy ─▶ distinct ones ─▶ items
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kedge.config import Config
from kedge.data import Prompt, Rendered, Sources, read_rows, rows_of
from kedge.data.fields import Messages, is_conversation, messages_of
from kedge.data.parsing import ReadingOptions, parse_prompt
from kedge.data.records import RowError
from kedge.rewards import MESSAGES_COLUMN
from kedge.runs.inputs import reading
from kedge.stages.policy import load_policies, render_for, sampling_settings
from kedge.stages.rankings import POST_FIELDS
from kedge_base.errors import DataError
from kedge_base.machine.progress import say
from kedge_people.labels import Item

PROMPT_COLUMNS = ("prompt", "messages", "text", "question", "instruction", "post")


@dataclass(frozen=True)
class Candidate:
    """A prompt, and the different responses to it so far, with the model of each."""

    prompt: str | Messages
    columns: Mapping[str, Any]
    responses: dict[str, str] = field(default_factory=dict[str, str])


def sample_items(
    config: Config, names: Sequence[str], *, num_prompts: int, num_responses: int, seed: int, not_in: Sequence[str] = ()
) -> list[Item]:
    """Sample responses of policies to prompts. With several policies, a prompt's responses come from different ones.

    Args:
        config: Names the prompts, `data.prompts`, and the settings of the sampling.
        names: The policies, folders or hub ids.
        num_prompts: Number of prompts, drawn at random.
        num_responses: Responses to each prompt. Equal and blank ones are left out.
        seed: Seed of the draws.
        not_in: Data whose prompts are not used, such as those of an evaluation.

    Raises:
        KedgeError: An input cannot be read or does not fit, or no item is left.
    """
    policies = load_policies(names, config)
    reader = policies[0]
    sampling = sampling_settings(config, num_responses=num_responses)
    options = reading(config, "prompts", reader.tokenizer, room=reader.room(sampling.max_new_tokens))
    share = config.data.max_rejected_fraction
    table = read_rows(Sources(tuple(config.data.prompts)), "prompts", max_rejected_fraction=share, **options)
    # Other columns may be alike in different prompts, such as a question about many texts.
    read = [*{" ".join(prompt.text.split()): prompt for prompt in table.records}.values()]
    evaluated = _known_prompts(not_in, ReadingOptions(**options))
    prompts = [read[place] for place in _drawn([*map(_prompt_forms, read)], evaluated, num_prompts, seed)]
    found: list[Candidate] = []
    for prompt in prompts:
        # A conversation stays one, so that the template of the reward model closes its answers.
        messages = prompt.columns.get(MESSAGES_COLUMN) if isinstance(prompt.text, Rendered) else None
        found.append(Candidate(messages or str(prompt.text), prompt.columns))
    # With more policies than responses, all of them meet in some prompts.
    turns = [random.Random(f"{seed} {place}").sample(range(len(names)), len(names)) for place in range(len(prompts))]
    for index, policy in enumerate(policies):
        rendered = render_for(policy, prompts, reader, max_new_tokens=sampling.max_new_tokens)
        numbers = range(num_responses)
        rows = [place for place, turn in enumerate(turns) for each in numbers if turn[each % len(names)] == index]
        batches = policy.sample([rendered[place] for place in rows], sampling, title=f"sample {policy.source}")
        texts = [text for batch in batches for text in batch.responses.completions]
        for place, text in zip(rows, texts, strict=True):
            found[place].responses.setdefault(text, policy.source)
    return _items(found, num_responses, seed)


def read_items(
    sources: Sequence[str], *, num_prompts: int, num_responses: int, seed: int, not_in: Sequence[str] = ()
) -> list[Item]:
    """Read finished responses; those to the same prompt, also from several files, become one item.

    Args:
        sources: Files or data sets, whose rows have a prompt and `responses`, `completions`, `completion`, or `chosen`
            and `rejected`.
        num_prompts: Number of prompts, drawn at random.
        num_responses: Maximum number of responses to a prompt, drawn at random.
        seed: Seed of the draws.
        not_in: Data whose prompts are not used, such as those of an evaluation.

    Raises:
        DataError: A row has no prompt or no response, or no item is left.
    """
    found: dict[str, Candidate] = {}
    for source in sources:
        for row in rows_of(source):
            try:
                if row.fault is not None or not isinstance(row.value, Mapping):
                    raise RowError(row.fault or "expected an object with named fields")
                prompt, responses = _finished(row.value, source)
            except RowError as error:
                raise DataError(f"{row.place}: {error}") from error
            candidate = found.setdefault(json.dumps(prompt), Candidate(prompt, row.value))
            for text, model in responses:
                candidate.responses.setdefault(text, model)
    candidates = list(found.values())
    forms = [_forms({**each.columns, "prompt": each.prompt}) for each in candidates]
    drawn = _drawn(forms, _known_prompts(not_in), num_prompts, seed)
    return _items([candidates[place] for place in drawn], num_responses, seed)


def _items(candidates: Sequence[Candidate], num_responses: int, seed: int) -> list[Item]:
    """Make items of candidates with enough distinct, nonblank responses: two, or one if one is requested."""
    items: list[Item] = []
    for candidate in candidates:
        texts = [*filter(str.strip, candidate.responses)]
        chosen = random.Random(f"responses {seed} {len(items)}").sample(texts, min(num_responses, len(texts)))
        if len(chosen) >= min(num_responses, 2):
            models = tuple(candidate.responses[text] for text in chosen)
            post = {name: candidate.columns[name] for name in POST_FIELDS if candidate.columns.get(name)}
            items.append(Item(str(len(items) + 1), candidate.prompt, tuple(chosen), models, post))
    if not items:
        raise DataError(
            "no prompt has two different responses; raise generate.temperature, or label with --responses 1"
        )
    if fewer := len(candidates) - len(items):
        say(f"Prompts whose responses are all the same, or blank, are left out: {fewer} of {len(candidates)}")
    return items


def _drawn(forms: Sequence[set[str]], evaluated: set[str], count: int, seed: int) -> list[int]:
    """Draw prompts at random, without those that are evaluated; returns their places, in order."""
    others = [place for place, own in enumerate(forms) if not own & evaluated]
    if known := len(forms) - len(others):
        say(f"Prompts in the data of --not-in are left out: {known}")
    if not others:
        raise DataError("all prompts are in the data of --not-in; give others")
    if len(others) < count:
        say(f"Different prompts: {len(others)} instead of {count}")
    return sorted(random.Random(f"prompts {seed}").sample(others, min(count, len(others))))


def _known_prompts(sources: Sequence[str], *parsings: ReadingOptions) -> set[str]:
    """All prompts in some data, both raw and as read with some options; see `_forms`."""
    found = set[str]()
    for row in chain.from_iterable(map(rows_of, sources)):
        found |= _forms(row.value if isinstance(row.value, Mapping) else {"prompt": row.value})
        for options in parsings:
            with suppress(RowError, DataError):  # not every row has to be a prompt
                found |= _prompt_forms(parse_prompt(row.value, options))
    return found


def _prompt_forms(prompt: Prompt) -> set[str]:
    return _forms({**prompt.columns, "prompt": prompt.text})


def _forms(fields: Mapping[str, Any]) -> set[str]:
    """All forms of a row's prompt: a question as text matches the same question as a message."""
    found = set[str]()
    for name in PROMPT_COLUMNS:
        # Alpaca's instruction is a part of the prompt if there is an input.
        value = None if name == "instruction" and fields.get("input") else fields.get(name)
        if is_conversation(value):
            try:
                turns = [(turn["role"], turn["content"]) for turn in messages_of(value, name)]
            except RowError:  # such as tool calls, which no prompt can have
                continue
            if turns[-1][0] == "assistant":
                turns.pop()
            value = turns[0][1] if len(turns) == 1 and turns[0][0] == "user" else json.dumps(turns)
        if isinstance(value, str) and value.strip():
            found.add(" ".join(value.split()))
    return found


def _finished(fields: Mapping[str, Any], source: str) -> tuple[str | Messages, list[tuple[str, str]]]:
    """The prompt of a row with finished responses, and these with the model of each."""
    prompt = next((fields[name] for name in (MESSAGES_COLUMN, *PROMPT_COLUMNS) if fields.get(name)), None)
    if not isinstance(prompt, str):
        if not is_conversation(prompt):
            raise RowError("the row has no prompt: expected a text or messages in the column 'prompt'")
        prompt = messages_of(prompt, "prompt")
    one_each = [fields[name] for name in ("chosen", "rejected", "completion") if fields.get(name)]
    given = next((fields[name] for name in ("responses", "completions") if fields.get(name)), one_each)
    if not isinstance(given, (list, tuple)):
        raise RowError("'responses' must be a list of texts")
    texts = [messages_of(each, "response")[-1]["content"] if is_conversation(each) else each for each in given]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RowError(
            "the row has no responses: expected texts in 'responses', 'completion', or 'chosen' and 'rejected'"
        )
    models = fields.get("models") or [fields.get("model") or source] * len(texts)
    if not isinstance(models, (list, tuple)) or len(models) != len(texts):
        raise RowError(f"'models' must be a list of {len(texts)} names, one for each response")
    return prompt, list(zip(texts, map(str, models), strict=True))
