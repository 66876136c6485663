"""Opens, resumes and finishes a stage's run: its folder, device, seed and configuration."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch

from kedge.config import Config, check_stage, full_name, preset_conflicts, resolved_yaml, suggestion, with_values
from kedge.data.chat import render_as_of
from kedge.logs.run_folder import create_run_folder, discard_run_folder, write_config
from kedge.models import Precision, model_width, resolve_precision
from kedge.models.frozen import load_bitsandbytes
from kedge.models.sources import base_source, find_adapter
from kedge.ranks import ALONE, AdaptiveTokens, PassTokens, Ranks
from kedge.ranks.start import join_ranks, local_rank
from kedge.rewards.function import name_of
from kedge.rewards.loading import terms_of
from kedge.runs.claim import claim, claim_free_folder
from kedge.runs.data_log import DataLog
from kedge.runs.fingerprint import CODE, changed_inputs, input_hashes, outdated_models
from kedge.runs.names import check_names
from kedge.runs.receipt import Receipt
from kedge.runs.resuming import (
    CHANGED,
    DATE,
    THREADS,
    RunFinished,
    changes_so_far,
    check_finished,
    check_same_stage,
    checkpoint_to_resume,
    date_before,
    finished_run,
    mark_finished,
    threads_before,
)
from kedge.training.checkpoint.store import Checkpoint
from kedge.training.optimizer_kinds import check_optimizer
from kedge.training.runtime import (
    avoid_kernels_per_shape,
    crowded_line,
    resolve_device,
    set_threads,
    tune_memory,
    use_deterministic_kernels,
)
from kedge_base.errors import ConfigError
from kedge_base.generators import seed_generators
from kedge_base.machine.durable import make_folder, remove_parts, sync_folder
from kedge_base.machine.progress import say
from kedge_base.registry import service
from kedge_base.run_folder.output import (
    DIAGNOSTIC_FILES,
    FINISHED_FILE,
    REJECTED_FILE,
    WAITING_FILE,
    check_output,
    is_run,
    run_stage,
    writing,
)
from kedge_base.stage import Stage, find_stage, stages, value_of
from kedge_base.texts import IN_MEMORY


def describe_in_memory(in_memory: Mapping[str, object]) -> dict[str, Any]:
    """Return values by dotted name for the fields whose content was passed from Python.

    Rewards keep the name and weight of each term, so that readers of the run's folder can tell which term is a judge.
    """
    described: dict[str, Any] = dict.fromkeys(in_memory, IN_MEMORY)
    if (reward := in_memory.get("reward")) is not None:
        terms = terms_of(cast("Any", reward))
        described["reward"] = [
            {
                "source": str(given) if isinstance(given := term.reward, (str, Path)) else f"python:{name_of(given)}",
                "weight": term.weight,
                "name": term.name,
            }
            for term in terms
        ]
    return described


@dataclass(frozen=True)
class Resume:
    """Resume the run in the output folder, if there is one.

    Attributes:
        allow_changes: Dotted names of settings, models, data or whole sections that may differ from the original run.
        chain: The run of the chain that the run is a stage of.
        skips_finished: Raise `RunFinished` for a run that has finished and is not extended.
    """

    allow_changes: tuple[str, ...] = ()
    chain: Run | None = None
    skips_finished: bool = False


def resumed(
    resume: bool | str | Sequence[str], out: str | os.PathLike[str] | None, stage: str
) -> tuple[Resume | None, str | os.PathLike[str] | None]:
    """Return how a stage's function resumes, and its folder: `runs/STAGE` if it resumes without `out`, like the
    command.

    Args:
        resume: The function's argument; names of settings that may differ also request resuming.
        out: The function's argument.
        stage: The stage.

    Raises:
        ConfigError: A name is neither a field nor a section.
    """
    if not resume:
        return None, out
    names: Any = [resume] if isinstance(resume, str) else [] if isinstance(resume, bool) else resume
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"resume must be True, False, or a list of fields that may differ; it is {resume!r}")
    allowed = tuple(full_change(name, stage, f"resume={names!r}") for name in names)
    return Resume(allowed), Path("runs") / stage if out is None else out


def full_change(name: str, stage: str, said: str) -> str:
    """Return the dotted name of a field, which may be given as in the stage's settings or by a part of its value, or of
    a section.

    Raises:
        ConfigError: It is neither.
    """
    sections = Config().model_dump(mode="json")
    fields = [f"{section}.{field}" for section, each in sections.items() if isinstance(each, dict) for field in each]
    known = [*sections, *fields]
    if name.partition("[")[0].removesuffix(CODE) in known or name.startswith(
        ("data.", "rollout.", "reward.", "schedules.")
    ):
        return name
    if whole := [field for field in fields if name.startswith(f"{field}.")]:
        return whole[0]
    if "." not in name:
        try:
            return full_name(name, stage)
        except ConfigError as error:
            raise ConfigError(f"{said}: {error}") from None
    raise ConfigError(f"{said}: there is no such field or section{suggestion(name, known)}")


@dataclass
class Run:
    """The run of a stage.

    Attributes:
        folder: The run's folder; `start` creates it.
        stage: The stage's name.
        config: The stage's configuration.
        objects: Python objects instead of configured fields, by dotted name.
        device: The models' device.
        precision: Number format of the matrix products.
        config_text: The content of `config.yaml`.
        facts: The header of `config.yaml`: stage, device and precision; the versions are added when it is written.
        fingerprint: Hashes of the run's inputs; see `input_hashes`.
        resumed: The folder contains an earlier start of this run.
        checkpoint: The checkpoint to resume from; None starts from the beginning.
        data: Records how much of the data the run uses, while it is loaded.
        ranks: The processes of the run.
        micro_batch_tokens: Tokens per pass, `runtime.micro_batch_tokens`, for the passes of all stages.
        first_folder: On other ranks, the first rank's folder; their `folder` is temporary, so that files that every
            rank writes are kept once.
        chain: The run of the chain that this run is a stage of; it starts with this run.
        receipt: The hashes of what the run reads and writes.
        has_started: `start` was called. A resumed run that is rejected before then leaves its folder unchanged.
    """

    folder: Path
    stage: str
    config: Config
    objects: Mapping[str, Any]
    device: torch.device
    precision: Precision
    config_text: str
    facts: Mapping[str, object]
    fingerprint: Mapping[str, str]
    resumed: bool = False
    checkpoint: Checkpoint | None = None
    data: DataLog = field(default_factory=DataLog)
    ranks: Ranks = ALONE
    micro_batch_tokens: PassTokens = None
    first_folder: Path | None = None
    chain: Run | None = None
    receipt: Receipt = field(default_factory=Receipt)
    has_started: bool = False

    @cached_property
    def rejected_file(self) -> Path:
        """Return the file for unusable rows, after removing those of an earlier start."""
        path = self.folder / REJECTED_FILE
        with writing(path):
            path.unlink(missing_ok=True)
        return path

    @property
    def shared_folder(self) -> Path:
        """The folder with the run's results, on every rank."""
        return self.folder if self.first_folder is None else self.first_folder

    @property
    def judge_folder(self) -> Path:
        """The folder with the answers of judges: for a stage of a chain, the chain's, whose limits hold for all."""
        chain = run_stage(self.folder.parent)
        is_part = find_stage(self.stage).trains and chain is not None and len(chain.trains) > 1
        return self.folder.parent if is_part else self.folder

    @property
    def rewards(self) -> list[dict[str, Any]]:
        """The rewards with their weights; objects passed from Python appear by name."""
        given = describe_in_memory(self.objects).get("reward")
        return given or [term.model_dump() for term in self.config.reward]

    def offloads(self, name: Literal["frozen", "optimizer"]) -> bool:
        """True if frozen weights, or the optimizer's state, are kept in host memory between uses."""
        return name in self.config.runtime.offload and self.device.type == "cuda"

    def start(self) -> None:
        """Create the folder with `config.yaml` and `data.json`. Called after everything is loaded and checked.

        An earlier error leaves no files, so the corrected command can use the same folder. A second call does nothing.

        Raises:
            OutputError: The folder cannot be created, or is no longer empty.
        """
        if self.has_started:
            return
        if self.chain is not None:
            self.chain.start()
        if not self.resumed:
            create_run_folder(self.folder)
            claim(self.folder)
            check_output(self.folder)  # another process may have been faster
        with writing(self.folder / FINISHED_FILE):  # written by the run that is now extended
            remove_parts(self.folder)
            (self.folder / FINISHED_FILE).unlink(missing_ok=True)
            (self.folder / WAITING_FILE).unlink(missing_ok=True)
            sync_folder(self.folder)  # before the settings say that the run is longer
        write_config(self.folder, self.config_text, self.facts)
        if self.ranks.are_several:
            say(f"ranks: {self.facts['ranks']}")
        self.data.publish(self.folder, self.checkpoint.update if self.checkpoint else 0)
        self.has_started = True

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the run as finished and write its summary. Called once all its files are on disk."""
        mark_finished(self.folder, self.stage, summary, self.fingerprint, self.receipt)

    def abandon(self) -> bool:
        """Remove the folder that `start` created, unless it contains log rows or other files; return True if it was
        removed.

        The corrected command can then use the same folder. The file of rejected rows is kept.
        """
        self.receipt.close()
        return self.has_started and discard_run_folder(self.folder)

    def sync(self) -> None:
        """If the folder was moved or deleted during the run, create it again for the next checkpoint and the model.

        Called before each file that outlives the run is written.

        Raises:
            OutputError: The folder cannot be created.
        """
        if is_run(self.folder):
            return
        say(f"{self.folder} was moved or deleted during the run: a new folder gets the logs, checkpoints and the model")
        with writing(self.folder):
            make_folder(self.folder)
        claim(self.folder)
        write_config(self.folder, self.config_text, self.facts)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Context that calls `start` on entry and `abandon` on an error. A resumed chain starts with the first stage
        that does.

        Raises:
            OutputError: See `start`.
        """
        if not self.resumed:
            self.start()
        try:
            yield
        except BaseException:  # includes Ctrl-C; re-raised
            self.abandon()
            raise


def open_run(
    config: Config, stage: str, *, in_memory: Mapping[str, object] | None = None, resume: Resume | None = None
) -> Run:
    """Check the stage's settings, inputs and output folder, set up device and threads, and seed the random generators.

    On one page, since a check may need the results of those before it.

    Args:
        config: The resolved configuration.
        stage: The stage; also the default name of the output folder.
        in_memory: Python objects instead of configured fields, by dotted name; None entries are ignored.
        resume: Resume the run in the output folder, or start one in a new folder.

    Raises:
        ConfigError: A required field is missing, a logger is not installed, the device is not available, or the run to
            resume has another configuration, model or data.
        OutputError: The folder is not empty or cannot be created, or another process trains in it.
        RunFinished: See `Resume`.
    """
    described = find_stage(stage)
    ranks = join_ranks(config.runtime.parallel)
    objects = {name: value for name, value in (in_memory or {}).items() if value is not None}
    # If a stage's public function was called, functions and classes have been replaced by their names.
    unnamed = {name: value for name, value in objects.items() if not isinstance(value_of(config, name), str)}
    named = with_values(config, describe_in_memory(unnamed))
    _check_settings(named, described, ranks)
    place, is_resumed = ranks.first(lambda: _find_folder(named.out, stage, resumes=resume is not None))
    shared = Path(place)
    if is_resumed:
        check_same_stage(shared, stage)
    else:
        check_names(named, stage, objects)
    files = dict[Path, str]()
    fingerprint = _hash_inputs(named, objects, ranks, files)
    allowed = () if resume is None else resume.allow_changes
    if resume is not None and resume.skips_finished and finished_run(named):
        # In a chain, an allowed change can concern a later stage.
        of_chain = () if resume.chain is None else allowed
        check_finished(named, shared, fingerprint, stage=described, allowed=of_chain)
        raise RunFinished(shared)
    for line in outdated_models(named):
        say(line)
    if described.makes_model:
        check_publishing(named)
    checkpoint = None
    if is_resumed:
        checkpoint = checkpoint_to_resume(named, shared, fingerprint, stage=described, allowed=allowed, ranks=ranks)
        check_names(named, stage, objects)  # after the check above, whose message about missing inputs is clearer
    device = _find_device(named, described, ranks)
    run = Run(
        shared,
        stage,
        config,
        objects,
        device,
        _choose_precision(named, described, device),
        resolved_yaml(named),
        {},
        fingerprint,
        is_resumed,
        checkpoint,
        ranks=ranks,
        micro_batch_tokens=pass_tokens(config),
        chain=None if resume is None else resume.chain,
        receipt=Receipt(files),
    )
    run.facts = _set_up(run, named)
    if not ranks.is_first:
        run.folder = Path(tempfile.mkdtemp(prefix="kedge-rank-"))
        atexit.register(shutil.rmtree, run.folder, ignore_errors=True)
        run.first_folder = shared
    for name in () if is_resumed else sorted(DIAGNOSTIC_FILES):  # written by an earlier run in this folder
        with writing(run.folder / name):
            (run.folder / name).unlink(missing_ok=True)
    return run


def _check_settings(config: Config, stage: Stage, ranks: Ranks) -> None:
    """Check that the stage works with its settings and the ranks; warn of conflicting presets and of further runs in
    the same Slurm job.
    """
    if ranks.are_several and not stage.is_ranked:
        ranked = ", ".join(each.name for each in stages().values() if each.is_ranked)
        raise ConfigError(f"kedge {stage.name} runs as a single process; {ranked} can have several ranks")
    if ranks.is_sharded and "optimizer" in config.runtime.offload:
        raise ConfigError(
            "runtime.offload=optimizer does not work with runtime.parallel=shard, whose ranks hold a part of the "
            "optimizer's state each; use replicate, or more ranks"
        )
    check_stage(config, stage.name)
    in_chain = config.out is not None and is_run(Path(config.out).parent)  # the chain has already printed this
    if not in_chain and (line := preset_conflicts(config, stage.name)):
        say(line)
    if not ranks.are_several and (tasks := os.environ.get("SLURM_NTASKS", "1")) != "1":
        say(f"Slurm has {tasks} tasks: if each starts kedge, each is a separate run; torchrun makes them ranks of one")


def _find_folder(out: str | None, stage: str, *, resumes: bool) -> tuple[str, bool]:
    """Find and claim the run's folder, and find out if a run in it is resumed."""
    if resumes and out is not None and is_run(Path(out)):
        folder = Path(os.path.expanduser(out))
        claim(folder)
        if is_run(folder):  # checked again, because its owner may just have removed it
            return str(folder), True
    return str(claim_free_folder(Path("runs") / stage) if out is None else check_output(out)), False


def _hash_inputs(
    config: Config, objects: Mapping[str, object], ranks: Ranks, files: dict[Path, str]
) -> Mapping[str, str]:
    """Hash the inputs, and check that all ranks read the same ones; the ranks can be on several machines.

    Args:
        config: Names the inputs.
        objects: Python objects instead of configured fields.
        ranks: The processes of the run.
        files: Receives the hash of each file.

    Raises:
        ConfigError: They do not; raised on every rank.
    """
    fingerprint = input_hashes(config, objects, files=files)
    if ranks.are_several:
        other = changed_inputs(ranks.first(lambda: dict(fingerprint)), fingerprint)
        if ranks.largest(len(other)):
            what = other[0].partition(":")[0] if other else "an input"
            raise ConfigError(f"{what} is not the same on all ranks; every machine needs the same files")
    return fingerprint


def _find_device(config: Config, stage: Stage, ranks: Ranks) -> torch.device:
    """Find the device, and check that number formats and optimizers work on it."""
    device = resolve_device(config.runtime.device, local_rank())
    held = {"runtime.frozen_dtype": config.runtime.frozen_dtype}
    held |= {"adapter.base_dtype": config.adapter.base_dtype} if config.adapter.kind != "none" else {}
    for name in (name for name, dtype in held.items() if dtype == "nf4"):
        load_bitsandbytes(f"{name}=nf4", device)
    for section in stage.trains:
        kind = config.optimization.of(section).optimizer
        check_optimizer(kind, device, named="optimization.optimizer", is_sharded=ranks.is_sharded)
    return device


def _choose_precision(config: Config, stage: Stage, device: torch.device) -> Precision:
    """Choose the precision for the initial model, and print a line if it is an adapter."""
    if not stage.starts_from:
        return "fp32"
    source = str(stage.starting_model(config))
    width = model_width(source, trust_remote_code=config.runtime.trust_remote_code)
    precision = resolve_precision(config.runtime.precision, device, width=width)
    if stage.makes_model:
        _say_of_saved_adapter(source, config)
    return precision


def _set_up(run: Run, named: Config) -> dict[str, object]:
    """Set up memory, kernels, threads, random generators and the date of chat templates.

    Args:
        run: The run, in the folder that all ranks share.
        named: The configuration, with names instead of Python objects.

    Returns:
        The facts for the header of `config.yaml`.
    """
    device = run.device
    ranks = run.ranks
    folder = run.folder
    stage = find_stage(run.stage)
    tune_memory()
    avoid_kernels_per_shape(device)
    threads = set_threads(named.runtime.num_threads or (threads_before(folder) if run.resumed else None))
    seed_generators(named.runtime.seed)
    if named.runtime.deterministic and device.type == "cuda":
        use_deterministic_kernels()
    _say_of_settings(named, stage, device)
    # All stages of a chain use the same date.
    earlier = [folder, folder.parent] if run.resumed else [folder.parent]
    day = ranks.first(lambda: next(filter(None, map(date_before, earlier)), str(date.today())))
    render_as_of(day)
    facts: dict[str, object] = {"stage": run.stage, "device": device, "precision": run.precision, DATE: day}
    if device.type == "cpu":
        facts[THREADS] = threads
        if not ranks.are_several and (line := crowded_line(threads)):
            say(line)
    done = 0 if run.checkpoint is None else run.checkpoint.update
    if changed := changes_so_far(named, folder, stage, done):
        facts[CHANGED] = changed
    if ranks.are_several:
        facts["ranks"] = f"{ranks.count} ({named.runtime.parallel})"
    return facts


def check_publishing(config: Config) -> None:
    """Check that a run's model can be pushed, if configured (`ConfigError` if not)."""
    if config.push.repo:
        service("check_push")(config.push.repo, existing=config.push.existing)
        if config.adapter.kind != "none" and config.model is not None:
            service("check_base")(base_source(config.model))


def pass_tokens(config: Config) -> PassTokens:
    """Return a run's tokens per pass: the configured number, or an adaptive one that is halved when memory runs out."""
    first = config.runtime.first_pass_tokens
    if first is None or config.runtime.micro_batch_tokens != "auto":
        return first
    return AdaptiveTokens(first, say=say)


def _say_of_settings(config: Config, stage: Stage, device: torch.device) -> None:
    """Say which settings have no effect, or count several times."""
    if device.type != "cuda":
        for name in config.runtime.offload:
            say(f"runtime.offload={name} has no effect on {device}: it moves tensors from a GPU to the host's memory")
    for source, count in dict.fromkeys((term.source, config.reward.count(term)) for term in config.reward):
        if count > 1 and not source.startswith("python:"):  # objects may share a name
            say(f"reward {source} is given {count} times, and counts as often")
    judge = config.evaluate.judge
    if judge is not None and stage.evaluations == "ppo.eval_every" and config.ppo.eval_every.updates is None:
        say(f"evaluate.judge={judge} has no effect here without ppo.eval_every")


def _say_of_saved_adapter(source: str, config: Config) -> None:
    """Warn if a run that starts from an adapter trains all weights, or configures another form than the adapter's."""
    if (adapter := find_adapter(source)) is None:
        return
    kind = "dora" if adapter.settings.get("use_dora") else "lora"
    own = {"kind": kind, "rank": adapter.settings.get("r"), "alpha": adapter.settings.get("lora_alpha")}
    if config.adapter.kind != "none":
        for name, value in own.items():
            if (named := getattr(config.adapter, name)) != value:
                say(f"{source} is trained further with the {name} {value} that it has, not adapter.{name}={named}")
    else:
        say(
            f"{source} is an adapter: it is merged into its base, {adapter.base}, and all weights are trained; "
            f"adapter.kind={kind} trains the adapter further"
        )
