"""Records the data that a run uses while it is loaded; prints it and writes `data.json` when the run starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.data import DataUsage, Mixture, Split, Table, split_eval
from kedge.data.preview import PLAIN_WIDTH, Part, example_lines, parts_of
from kedge.data.prompts import RecordT
from kedge_base.errors import DataError
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import DATA_FILE, LABELS_FILE, replace_file
from kedge_base.run_folder.record_format import read_json_object, text_hash


@dataclass(frozen=True)
class DataLog:
    """The usage of each role of a run's data.

    Attributes:
        roles: By role: `demonstrations`, `comparisons`, `prompts`, `pretraining`.
        origins: By role: the source of each usable row, for `data.mix`.
        examples: By role: its first usable row, in tokens.
        labels: By role: the labeled rows by number, with who answered, the hash of the prompt, and the optimizer steps
            that are trained on the row; none for a row that is held out.
    """

    roles: dict[str, DataUsage] = field(default_factory=dict)
    origins: dict[str, Sequence[int]] = field(default_factory=dict)
    examples: dict[str, list[Part]] = field(default_factory=dict)
    labels: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)

    def note(
        self,
        role: str,
        table: Table[Any],
        sources: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        limits: Mapping[str, str],
    ) -> None:
        """Note a role after its rows have been read.

        Args:
            role: The role.
            table: Its rows.
            sources: Names of its sources; empty for rows passed from Python.
            tokenizer: Encodes the example.
            limits: Names of the limits to use in reasons, by the reader's text.
        """
        self.roles[role] = DataUsage.of(table, limits, sources=sources)
        self.origins[role] = table.origins
        self.examples[role] = parts_of(table.records[0], tokenizer)
        self.labels[role] = {
            row: {
                **{name: label.get(name) for name in ("answer", "person", "when", "source")},
                "prompt": text_hash(getattr(table.records[row], "prompt", "")),
                "steps": [],
            }
            for row, label in table.labels.items()
        }

    def add(self, role: str, *, held_out: int = 0, note: str = "", used: int | None = None) -> None:
        """Add to the notes of a role: rows held out, rows used if only a part is, or a further fact."""
        before = self.roles[role]
        self.roles[role] = replace(
            before,
            held_out=before.held_out + held_out,
            used=before.used if used is None else used,
            notes=(*before.notes, note) if note else before.notes,
        )

    def split(
        self, role: str, records: Sequence[RecordT], config: Config, *, fraction: float | None = None
    ) -> Split[RecordT]:
        """Hold out a fraction of a role's records, by default `data.eval_fraction`, and note it.

        Raises:
            DataError: There is only one record, or all are equal.
        """
        split = split_eval(records, config.data.eval_fraction if fraction is None else fraction, config.runtime.seed)
        note = "" if split.by_prompt else "all rows have the same prompt, so they are held out row by row"
        self.add(role, held_out=len(split.eval), note=note)
        return split

    def trace(self, role: str, rows: Sequence[int], batches: Sequence[Sequence[int]]) -> None:
        """Note which optimizer steps are trained on each labeled row.

        Args:
            role: The role.
            rows: The training rows among all.
            batches: The training rows of each step, by their place in `rows`.
        """
        for step, batch in enumerate(batches, 1):
            for row in batch:
                if label := self.labels[role].get(rows[row]):
                    label["steps"].append(step)

    def mixture(self, role: str, config: Config, rows: Sequence[int] | None = None) -> Mixture | None:
        """Return and note the mixture that `data.mix` makes of a role's sources; None for a single source.

        Args:
            role: The role.
            config: `data.mix`, checked.
            rows: Positions of the records that are drawn from; None for all.

        Raises:
            DataError: A source with a share has no rows left, or its share is too small for a single row.
        """
        shares = config.data.shares(role)
        usage = self.roles[role]
        names = usage.sources
        if shares is None or not names:
            return None
        origins = self.origins[role]
        chosen = origins if rows is None else [origins[row] for row in rows]
        if empty := [name for index, name in enumerate(names) if shares[index] and index not in chosen]:
            raise DataError(f"data.mix: {empty[0]} has no row to train on")
        used = sum(shares[origin] > 0 for origin in chosen) + usage.held_out
        self.roles[role] = replace(usage, used=used, shares=tuple(share / sum(shares) for share in shares))
        mixture = Mixture(chosen, shares, config.runtime.seed)
        if unread := [name for index, name in enumerate(names) if shares[index] and not mixture.counts[index]]:
            raise DataError(
                f"data.mix: the share of {unread[0]} is less than one of {len(chosen)} rows, so it would never be "
                "read; raise it, or set it to 0"
            )
        return mixture

    def facts(self) -> dict[str, object]:
        """Rows of a model card, one per role."""
        return {role: usage.public_line for role, usage in self.roles.items()}

    def publish(self, folder: Path, done: int = 0) -> None:
        """Write `data.json` and `labels.json`, and print one line per role; nothing for a run without data.

        Args:
            folder: The run's folder.
            done: Steps so far of a resumed run, whose labels may have differed.
        """
        if not self.roles:
            return
        content = {role: usage.as_json() for role, usage in self.roles.items()}
        replace_file(folder / DATA_FILE, [json.dumps(content, indent=2, ensure_ascii=False).encode()])
        before = read_json_object(folder / LABELS_FILE)
        labels = {
            role: _joined(before.get(role, ()), self.labels.get(role, {}).values(), done)
            for role in {**before, **self.labels}
        }
        if before or any(labels.values()):
            replace_file(folder / LABELS_FILE, [json.dumps(labels, default=str).encode()])
        for role, usage in self.roles.items():
            say(f"{role}: {usage.line}")
        role, parts = next(iter(self.examples.items()))
        say(f"first of the {role}, in tokens:")
        for line in example_lines(parts, width=shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns):
            say(line)


def _joined(before: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]], done: int) -> list[dict[str, Any]]:
    """Join the labels of the steps that are done and those of the steps to come."""
    found: dict[str, dict[str, Any]] = {}
    for labels, is_past in ((before, True), (now, False)):
        for label in labels:
            key = json.dumps({**label, "steps": []}, default=str)
            steps = [step for step in label["steps"] if (step <= done) == is_past]
            if steps or not is_past:
                found.setdefault(key, {**label, "steps": []})["steps"] += steps
    return list(found.values())
