"""Checkpoints in parts: any number of ranks reads what any other wrote, and damage is found as in whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import kedge
from kedge.models import ActorCritic, find_model, load_language_model, load_tokenizer, save_policy
from kedge.ranks import Ranks
from kedge.ranks.sharding import part_for, shard_name
from kedge.training.checkpoint.files import write_files
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.checkpoint.shards import shard_pieces
from kedge.training.checkpoint.state import module_tensors, restore_module
from kedge.training.checkpoint.store import (
    Checkpoint,
    newest_valid,
    open_checkpoint,
    save_checkpoint,
)
from kedge_base.errors import DataError, LostContactError, ModelError, OutputError
from kedge_base.machine.durable import is_part
from kedge_hub.card import ModelCard
from tests.tiny import save_tiny_policy
from tests.training.checkpoint.saver import names, refuse, save_update

WHOLE = {
    "long": torch.arange(77.0).reshape(11, 7),
    "short": torch.tensor([[1.5, -0.0]]),
    "brief": torch.randn(5, 2, 2, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "bias": torch.tensor([0.25, float("inf"), -3.0]),
}
EVERYWHERE = {"step": torch.tensor(7.0), "head": torch.arange(6).reshape(2, 3)}
"""What is not in parts."""


@contextmanager
def as_rank(number: int, count: int) -> Iterator[dict[str, Tensor]]:
    """The tensors as one of several ranks has them, of which only this one exists."""
    dist.init_process_group("fake", rank=number, world_size=count, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (count,))
        parts = {name: distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for name, each in WHOLE.items()}
        yield {**parts, **EVERYWHERE}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class FirstOf(Ranks):
    """The first of several ranks; when it waits for their messages, the others write their shards."""

    folder: Path = Path()

    def first(self, do: Callable[[], Any]) -> Any:
        return do()

    def messages(self, message: Any) -> list[Any]:
        [part] = filter(is_part, self.folder.iterdir())
        dist.destroy_process_group()
        return [message, *(self._other(part, number) for number in range(1, self.count))]

    def _other(self, part: Path, number: int) -> dict[str, Any]:
        with as_rank(number, self.count) as tensors:
            pieces = shard_pieces(tensors, is_first=False)
            files = write_files(part, {shard_name("weights", number, self.count): pieces})
            return {"files": {name: vars(record) for name, record in files.items()}}


def save(folder: Path, *, update: int = 3, **more: Any) -> Path:
    settings = {"kind": "ppo", "fingerprint": {}, "tensors": {}, "state": {}, "keep": 2}
    return save_checkpoint(folder, update=update, **(settings | more))


def saved(folder: Path, count: int) -> Checkpoint:
    """A checkpoint that so many ranks wrote."""
    with as_rank(0, count) as tensors:
        path = save(folder, shards={"weights": tensors}, ranks=FirstOf(0, count, folder=folder))
    return open_checkpoint(path)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_number_of_ranks_reads_what_any_other_wrote(tmp_path, count):
    checkpoint = saved(tmp_path, count)
    assert_same(checkpoint.tensors("weights"), {**WHOLE, **EVERYWHERE})
    stored = checkpoint.stored("weights")
    for readers in (1, 2, 3, 4):
        for number in range(readers):
            with as_rank(number, readers) as own:
                found = {name: part_for(stored, name, tensor) for name, tensor in own.items()}
                for name in WHOLE:
                    part = found.pop(name)
                    assert isinstance(part, DTensor)
                    expected = (*WHOLE[name].chunk(readers), WHOLE[name][:0])[
                        min(number, len(WHOLE[name].chunk(readers)))
                    ]
                    assert torch.equal(part.to_local(), expected), (name, number, readers)
                assert_same(found, EVERYWHERE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_reads_it(tmp_path):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "HuggingFaceStorageReader"):
        pytest.skip("this version of PyTorch has no reader of safetensors")
    folder = saved(tmp_path, 3).folder / "weights"
    found = {name: torch.zeros_like(tensor) for name, tensor in {**WHOLE, **EVERYWHERE}.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert_same(found, {**WHOLE, **EVERYWHERE})


def test_each_rank_writes_its_rows_alone(tmp_path):
    folder = saved(tmp_path, 2).folder / "weights"
    first, second = (load_file(folder / f"shard-0000{number}-of-00002.safetensors") for number in (1, 2))
    assert {name: len(tensor) for name, tensor in first.items() if tensor.ndim} == {
        "long": 6, "short": 1, "brief": 3, "bias": 2, "head": 2,
    }  # fmt: skip
    assert {name: len(tensor) for name, tensor in second.items()} == {"long": 5, "brief": 2, "bias": 1}


def test_a_module_is_restored_from_it(tmp_path):
    module = torch.nn.Module()
    for name, tensor in {**WHOLE, **EVERYWHERE}.items():
        module.register_buffer(name, torch.zeros_like(tensor))
    stored = saved(tmp_path, 2).stored("weights")
    restore_module(module, stored)
    assert_same(dict(module.named_buffers()), {**WHOLE, **EVERYWHERE})
    module.register_buffer("long", torch.zeros(10, 7))
    with pytest.raises(ModelError, match=r"long is \[11, 7\] torch.float32, expected \[10, 7\]"):
        restore_module(module, stored)


@pytest.mark.parametrize("damage", ["missing", "foreign", "flipped", "shorter"])
def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_used(tmp_path, damage):
    save_update(tmp_path, 1)
    path = saved(tmp_path, 2).folder / "weights" / "shard-00002-of-00002.safetensors"
    content, said = path.read_bytes(), r"shard-00002-of-00002.safetensors: is damaged \("
    if damage == "missing":
        path.unlink()
        said = r"shard-00002-of-00002.safetensors: is missing"
    elif damage == "foreign":
        path.with_name("shard-00003-of-00003.safetensors").write_bytes(content)
        said = r"shard-00003-of-00003.safetensors: is not in the manifest"
    else:
        path.write_bytes(content[:-1] if damage == "shorter" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=said):
        open_checkpoint(path.parents[1])
    found = newest_valid(tmp_path, on_rejected=lambda line: None)
    assert found is not None
    assert found.update == 1


def test_missing_rows_are_an_error_also_where_the_manifest_lacks_them(tmp_path):
    with as_rank(1, 2) as tensors:
        path = save(tmp_path, shards={"weights": tensors})
    with pytest.raises(DataError, match=r"update-000003/weights: rows of .* are missing"):
        open_checkpoint(path).tensors("weights")


def test_a_model_is_made_of_the_shards(tmp_path):
    source = save_tiny_policy(tmp_path / "source")
    tokenizer = load_tokenizer(source)
    policy = load_language_model(source, tokenizer=tokenizer, value_head=True)
    module = ActorCritic(policy)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.125)

    def save_model(folder: Path, _: int, weights: dict[str, Tensor] | None) -> Path:
        return save_policy(policy, tokenizer, folder, card=ModelCard("ppo", "policy"), weights=weights)

    save_model(tmp_path / "expected", 3, None)
    weights = {"actor_critic": module_tensors(module)}
    model = CheckpointModel(policy.causal, save_model)
    save(tmp_path / "run" / "checkpoints", model=model, shards=weights)
    checkpoint = tmp_path / "run" / "checkpoints" / "update-000003"
    for name in (checkpoint, checkpoint / "model"):
        with pytest.raises(ModelError, match=rf"in one file per rank; make a model of it: kedge merge {name} --out"):
            find_model(name)
        assert find_model(name, in_shards=True) == str(checkpoint / "model")
    merged = kedge.merge(checkpoint, tmp_path / "merged")
    assert sorted(path.name for path in merged.iterdir()) == names(tmp_path / "expected")
    for name in ("model.safetensors", "value_head/model.safetensors"):
        assert_same(load_file(merged / name), load_file(tmp_path / "expected" / name))
    assert (merged / "generation_config.json").read_text() == (tmp_path / "expected/generation_config.json").read_text()

    (checkpoint / "actor_critic" / "shard-00001-of-00001.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="its shards cannot be read"):
        kedge.merge(checkpoint, tmp_path / "torn")


@dataclass(frozen=True)
class WithOther(Ranks):
    """The first of two ranks; the other one's message is given."""

    other: Any = None

    def messages(self, message: Any) -> list[Any]:
        return [message, self.other]


def test_if_another_rank_cannot_write_nothing_is_left_of_the_checkpoint(tmp_path):
    save_update(tmp_path, 1)
    ranks = WithOther(other={"problem": "rank 1: No space left on device"})
    with pytest.raises(OutputError, match=r"update 2 cannot be saved \(rank 1: No space left on device\); it needs"):
        save(tmp_path, update=2, ranks=ranks, shards={"weights": EVERYWHERE})
    assert names(tmp_path) == ["update-000001"]


def test_a_rank_that_is_gone_is_no_fault_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status tells a launcher whether a restart may help."""

    def lost(*_: object) -> list[Any]:
        raise LostContactError

    save_update(tmp_path, 1)
    monkeypatch.setattr(WithOther, "messages", lost)
    with pytest.raises(LostContactError):
        save(tmp_path, update=2, ranks=WithOther(other=None), shards={"weights": EVERYWHERE})
    assert names(tmp_path) == ["update-000001"]


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_share_the_hashing_out_and_agree_on_what_is_damaged(tmp_path, number):
    """Each hashes one of the two shards: of one flipped bit, one rank learns from the other."""
    path = saved(tmp_path, 2).folder / "weights" / "shard-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    ranks = [WithOther(rank, 2, other=None) for rank in (0, 1)]
    own = [_problem(path.parents[1], each) for each in ranks]
    assert sorted(each is None for each in own) == [False, True]
    told = next(each for each in own if each is not None)
    assert "shard-00001-of-00002.safetensors: is damaged" in told
    assert _problem(path.parents[1], WithOther(number, 2, other=told)) == told


def _problem(path: Path, ranks: Ranks) -> str | None:
    try:
        open_checkpoint(path, ranks)
    except DataError as error:
        return str(error)
    return None


def test_an_interrupted_save_leaves_the_checkpoint_before(tmp_path):
    save_update(tmp_path, 1)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    model = CheckpointModel(torch.nn.Linear(1, 1), interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, update=2, model=model, shards={"weights": EVERYWHERE})
    found = newest_valid(tmp_path, on_rejected=refuse)
    assert found is not None
    assert names(tmp_path) == ["update-000001"]
