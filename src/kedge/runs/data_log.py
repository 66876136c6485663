"""What a run uses of its data: collected while it is loaded; printed and written to `data.json` when the run starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kedge.config import Config
from kedge.data import DataUsage, Split, Table, split_eval
from kedge.data.splitting import RecordT
from kedge.logs.progress import say
from kedge.output import DATA_FILE, replace_file

__all__ = ["DataLog"]


@dataclass(frozen=True)
class DataLog:
    """The usage of each role of a run's data.

    Attributes:
        roles: By role: `demonstrations`, `comparisons`, `prompts`, `pretraining`.
    """

    roles: dict[str, DataUsage] = field(default_factory=dict[str, DataUsage])

    def note(
        self, role: str, table: Table[RecordT], sources: Sequence[str], limits: Mapping[str, str] | None = None
    ) -> None:
        """Note a role whose rows have been read.

        Args:
            role: The role.
            table: Its rows.
            sources: Names of its sources; empty for rows passed from Python.
            limits: Names of the limits in reasons, by the text that the reader wrote.
        """
        dropped = table.dropped()
        for text, name in (limits or {}).items():
            dropped = {reason.replace(text, name): count for reason, count in dropped.items()}
        rows = len(table.records) + len(table.rejected)
        self.roles[role] = DataUsage(tuple(sources), rows, len(table.records), cut=table.num_cut, dropped=dropped)

    def add(self, role: str, *, held_out: int = 0, note: str = "", used: int | None = None) -> None:
        """Add to what is noted of a role: rows held out, rows used if only a part is, or a further fact."""
        before = self.roles[role]
        self.roles[role] = replace(
            before,
            held_out=before.held_out + held_out,
            used=before.used if used is None else used,
            notes=(*before.notes, note) if note else before.notes,
        )

    def split(self, role: str, records: Sequence[RecordT], config: Config) -> Split[RecordT]:
        """Hold out `data.eval_fraction` of a role's records, and note it.

        Raises:
            DataError: There is only one record, or all are equal.
        """
        split = split_eval(records, config.data.eval_fraction, config.runtime.seed)
        note = "" if split.by_prompt else "all rows have the same prompt, so they are held out row by row"
        self.add(role, held_out=len(split.eval), note=note)
        return split

    def facts(self) -> dict[str, object]:
        """Rows of a model card, one per role."""
        return {role: usage.public_line for role, usage in self.roles.items()}

    def publish(self, folder: Path) -> None:
        """Write `data.json` and print one line per role; nothing for a run without data."""
        if not self.roles:
            return
        content = {role: usage.as_json() for role, usage in self.roles.items()}
        replace_file(folder / DATA_FILE, [json.dumps(content, indent=2, ensure_ascii=False).encode()])
        for role, usage in self.roles.items():
            say(f"{role}: {usage.line}")
