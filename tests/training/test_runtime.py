"""Devices, threads and random streams: clear errors, and the same numbers in every process."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.training import runtime
from kedge_base.errors import ConfigError
from tests.forking import forked_python


def test_auto_uses_cuda_if_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert runtime.resolve_device("auto") == torch.device("cuda")


def test_an_unavailable_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert runtime.resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"'cuda:1' is not available \(1 cuda devices found\)"):
        runtime.resolve_device("cuda:1")
    with pytest.raises(ConfigError, match="'gpu' is unknown"):
        runtime.resolve_device("gpu")


@pytest.fixture
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("keep_threads")
def test_there_are_never_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(runtime, "available_cores", lambda: 2)
    assert runtime.set_threads(1) == 1
    torch.set_num_threads(4)
    assert runtime.set_threads(None) == 2
    with pytest.warns(UserWarning, match="num_threads: 64 exceeds the 2 available cores"):
        assert runtime.set_threads(64) == 2


@pytest.mark.parametrize(
    ("threads", "busy", "cores", "others"),
    [
        (2, 100.0, 2, "2.0 of 2"),
        (2, 50.0, 2, "1.0 of 2"),
        (2, 20.0, 2, None),  # less than half a core is missing
        (1, 100.0, 2, None),
        (4, 50.0, 8, None),
        (8, 50.0, 8, "4.0 of 8"),
    ],
)
def test_threads_that_share_their_cores_are_named(monkeypatch, threads, busy, cores, others):
    monkeypatch.setattr(runtime.psutil, "cpu_count", lambda: cores)
    monkeypatch.setattr(runtime.psutil, "cpu_percent", lambda interval: busy)
    line = runtime.crowded_line(threads)
    assert bool(line) == (others is not None)
    if others:
        assert line.startswith(f"other processes keep {others} cores busy, and the run's {threads} threads wait for")
        assert "runtime.num_threads=1 (OMP_NUM_THREADS=1)" in line
        assert "OMP_WAIT_POLICY=passive" in line


def test_a_stream_is_the_same_in_another_process():
    """The first 63 bits of BLAKE2b, with 8 bytes, of `(7, 'rollout', 3)`."""
    assert runtime.stream_seed(7, "rollout", 3) == 5_769_894_360_785_431_617


@given(st.lists(st.tuples(st.integers(0, 9), st.text(max_size=3), st.integers(0, 9)), unique=True, max_size=20))
def test_streams_of_different_names_differ(names):
    seeds = [runtime.stream_seed(*name) for name in names]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_stream_ignores_what_was_drawn_elsewhere():
    first = torch.rand(3, generator=runtime.stream(0, "shuffle", 1))
    torch.rand(5)
    assert torch.equal(torch.rand(3, generator=runtime.stream(0, "shuffle", 1)), first)
    assert not torch.equal(torch.rand(3, generator=runtime.stream(0, "shuffle", 2)), first)


def test_memory_in_use_grows_with_what_is_held():
    before = runtime.memory_in_use(torch.device("cpu"))["memory/process"]
    with mmap.mmap(-1, 2**28) as held:  # from the system: freed memory may be reused
        held.write(b"x" * len(held))
        during = runtime.memory_in_use(torch.device("cpu"))["memory/process"]
    assert during - before >= 0.24


KERNELS = """
import ctypes, sys, torch
from kedge.training.runtime import tune_memory
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f used g h".split()]
find = ctypes.CDLL(None).mallinfo2
find.restype = Info
tune_memory()
weight, rows = torch.randn(512, 192).bfloat16(), torch.randn(400, 192).bfloat16()
used = []
for count in range(1, 401):
    torch.nn.functional.linear(rows[:count], weight)
    used.append(find().used)
print((used[-1] - used[99]) / 2**20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc")
def test_products_of_new_shapes_leave_no_kernels_behind():
    """With torch's defaults, 300 shapes leave 150 MiB where bf16 is in hardware; memory grew with every pass."""
    command = [sys.executable, "-c", KERNELS]
    others = {name: value for name, value in os.environ.items() if name not in runtime.KERNEL_CACHES}
    grown = subprocess.run(command, capture_output=True, text=True, check=True, env=others).stdout
    assert float(grown) < 16


FREED = """
import torch
from kedge_base.machine.memory import give_back
from kedge.training.runtime import memory_in_use, tune_memory
tune_memory()
def used():
    return memory_in_use(torch.device("cpu"))["memory/process"]
blocks = [torch.ones(2**18) for _ in range(256)]
after_all = blocks.pop()  # so that the end of the heap is not free
del blocks
kept = used()
give_back()
print(kept - used())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries return freed memory in their own way")
def test_freed_memory_is_kept_until_it_is_given_back():
    given = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True).stdout
    assert float(given) == pytest.approx(0.25, abs=0.02)


def test_a_number_of_kernels_that_is_given_is_kept(monkeypatch):
    first, second = runtime.KERNEL_CACHES
    monkeypatch.setenv(first, "7")
    monkeypatch.delenv(second, raising=False)
    runtime.tune_memory()
    assert (os.environ[first], os.environ[second]) == ("7", str(runtime.KEPT_KERNELS))


def test_deterministic_kernels_are_a_switch_for_the_process():
    program = (
        "import torch; from kedge.training.runtime import use_deterministic_kernels as use; use();"
        "assert torch.are_deterministic_algorithms_enabled()"
    )
    assert forked_python(program).returncode == 0


def test_the_callers_dtype_comes_back_when_the_last_of_several_runs_ends():
    torch.set_default_dtype(torch.float64)
    try:
        first = runtime.default_modes()
        second = runtime.default_modes()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.get_default_dtype() == torch.float32
        second.__exit__(None, None, None)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_on_a_gpu_no_attention_plans_for_each_shape():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        runtime.avoid_kernels_per_shape(torch.device("cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        runtime.avoid_kernels_per_shape(torch.device("cuda"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
