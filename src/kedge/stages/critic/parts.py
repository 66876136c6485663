"""Stores sampled responses on disk in parts: a resumed run reads the existing parts and samples the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.algorithm.experience import Experience, Rollout
from kedge.ranks.sharding import StoredTensors
from kedge.training.checkpoint.files import FileRecord, record_file, tensor_pieces
from kedge.training.supervised.returns import SampledReturns
from kedge_base.machine.durable import make_folder
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import replace_file, writing

INDEX = "index.json"
STORED = (
    *("prompt_ids", "prompt_mask", "response_ids", "token_mask", "action_mask", "stopped", "group"),
    *("privileged_ids", "privileged_mask"),
)
"""The tensors of a rollout that are needed to train a critic; the last two only for one with privileged information."""


@dataclass(frozen=True)
class Part:
    """Responses that were sampled together.

    Attributes:
        returns: The responses and their returns.
        is_held_out: Whether their prompts are held out.
        missing_eos: State of the penalty for a missing stop token after this part.
        unscored: Number of responses without a score; they are left out.
        seconds: Time that sampling and scoring took.
    """

    returns: SampledReturns
    is_held_out: bool = False
    missing_eos: Mapping[str, Any] = field(default_factory=dict)
    unscored: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, experience: Experience, group: Tensor, **facts: Any) -> Part:
        """Make a part from an experience; `group` has the number of each row's prompt among all prompts."""
        rollout = experience.rollout
        tensors = {name: table.cpu() for name, table in rollout.tensors().items() if name in STORED}
        return cls.from_tensors(
            {**tensors, "group": group, "returns": experience.returns.cpu(), "mask": experience.reward_mask.cpu()},
            **facts,
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], **facts: Any) -> Part:
        """Make a part from stored tensors; see `tensors`."""
        kept: dict[str, Any] = {name: tensors[name] for name in STORED if name in tensors}
        rollout = Rollout(
            **kept,
            logprobs=torch.zeros(tensors["action_mask"].shape),
            policy_version=torch.zeros(len(tensors["group"]), dtype=torch.long),
        )
        return cls(SampledReturns(rollout, tensors["returns"], tensors["mask"]), **facts)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors to store."""
        tables = self.returns.rollout.tensors()
        rollout = {name: tables[name].contiguous() for name in STORED if name in tables}
        return {**rollout, "returns": self.returns.returns.contiguous(), "mask": self.returns.mask.contiguous()}

    @property
    def facts(self) -> dict[str, Any]:
        """Values to store with the tensors."""
        return {name: value for name, value in vars(self).items() if name != "returns"}


class PartStore:
    """The parts in a folder, with their hashes and those of the models and data that they were sampled with.

    Parts from a different policy, reward or data set, and those after a damaged one, are sampled again.

    Args:
        folder: The folder.
        fingerprint: Hashes of the run's inputs.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, str]) -> None:
        self._folder = folder
        self._fingerprint = dict(fingerprint)

    @property
    def num_kept(self) -> int:
        """Number of parts in the folder."""
        return len(self._entries)

    def read(self, number: int) -> Part | None:
        """Read a part; None if it is missing or damaged. Parts are read and written in order."""
        if number >= len(self._entries):
            return None
        entry = self._entries[number]
        path = self._path(number)
        if not path.is_file() or record_file(path) != FileRecord(**entry["file"]):
            say(f"{path} is missing or damaged: its responses, and those after it, are sampled again")
            del self._entries[number:]
            return None
        return Part.from_tensors(dict(StoredTensors([(path, None)])), **entry["facts"])

    def write(self, number: int, part: Part) -> None:
        """Store a part.

        Raises:
            OutputError: It cannot be written.
        """
        with writing(self._folder):
            make_folder(self._folder)
        path = self._path(number)
        replace_file(path, (bytes(piece) for piece in tensor_pieces(part.tensors)))
        self._entries[number:] = [{"file": asdict(record_file(path)), "facts": part.facts}]
        content = {"fingerprint": self._fingerprint, "parts": self._entries}
        replace_file(self._folder / INDEX, [json.dumps(content).encode()])

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number + 1:06d}.safetensors"

    @cached_property
    def _entries(self) -> list[dict[str, Any]]:
        """The usable parts, in order."""
        try:
            content = json.loads((self._folder / INDEX).read_bytes())
            entries = list(content["parts"])
            fingerprint = dict(content["fingerprint"])
        except FileNotFoundError:
            return []
        except (ValueError, LookupError, TypeError, OSError):
            say(f"{self._folder / INDEX} is damaged: the responses are sampled again")
            return []
        if fingerprint != self._fingerprint:
            say(f"the responses in {self._folder} are those of other inputs: they are sampled again")
            return []
        return entries
