"""The benchmark's cases: jobs that take turns, so that a slow machine affects all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.recipe import Workload
from bench.systems import Job, Measurement, Runner

Results = dict[str, dict[str, list[Measurement]]]
"""Measurements per round, by case and job."""

PEER = "TRL 1.12.0"
ALIKE = "kedge, like for like"
DEFAULT = "kedge, default"
SHARED = "kedge, shared trunk, fp32"
SFT = "SFT step, fp32"
SFT_BF16 = "SFT step, bf16"
TRLS = ("ppo.critic=separate", "ppo.gae_lambda=0.95")
"""TRL's values of settings with other defaults here, as far as they are part of what is compared."""
LIKE_FOR_LIKE = (*TRLS, "runtime.precision=fp32")
PADDING_SHARES = {"0 %": (0.0, 0.0), "25 %": (0.25, 102.0), "50 %": (0.5, 40.0), "75 %": (0.75, 16.0)}
"""By target share of padding: the share, and the hazard with a capped mean of 64·(1 − share)."""
PADDED_WIDTH = 64
"""Longest prompt and cap of the padding case, tokens each."""
PADDED_BATCH = 32
"""Its batch size without padding; with padding it is larger, so that the number of real tokens stays the same."""


@dataclass(frozen=True)
class Case:
    """Jobs that are compared with each other.

    Attributes:
        name: Its name, as in `--only`.
        jobs: The jobs by name, in the order of every round.
        num_rounds: Runs of each job.
    """

    name: str
    jobs: dict[str, Job]
    num_rounds: int = 1


def cpu_cases(*, num_rounds: int) -> list[Case]:
    """The comparisons, then the scaling cases.

    Args:
        num_rounds: Rounds of the cases that have a target; the others run once.
    """
    compared = [
        Case("variable", _comparison(Workload()), num_rounds),
        Case("full", _comparison(FULL) | {SHARED: _shared(FULL), SFT: _sft(FULL)}, num_rounds),
        Case("size-m", _comparison(Workload(size="M")), 1),
    ]
    return [*compared, *growth_cases(num_rounds=num_rounds)]


def gpu_cases(*, num_rounds: int) -> list[Case]:
    """A Llama of half a billion parameters, in bf16."""
    load = Workload(size="0.5B", hazard=0, min_prompt=128, max_prompt=128, max_response=128, context_length=1024)
    bf16 = ("runtime.precision=bf16",)
    jobs = {
        PEER: Job("trl", load, bf16=True),
        ALIKE: Job("ppo", load, (*TRLS, *bf16)),
        DEFAULT: Job("ppo", load),
        SFT_BF16: Job("sft", load, bf16),
    }
    return [Case("gpu", jobs, num_rounds)]


FULL = Workload(hazard=0, min_prompt=64)
"""Prompts of 64 tokens and responses of 64, without any padding."""


def _comparison(load: Workload) -> dict[str, Job]:
    return {PEER: Job("trl", load), ALIKE: Job("ppo", load, LIKE_FOR_LIKE), DEFAULT: Job("ppo", load)}


def _shared(load: Workload) -> Job:
    return Job("ppo", load, ("ppo.critic=shared", "runtime.precision=fp32"))


def _sft(load: Workload) -> Job:
    return Job("sft", load, ("runtime.precision=fp32",))


def family_cases(*, num_rounds: int) -> list[Case]:
    """PPO and its relatives on full lengths, in fp32, with equally many responses and epochs."""
    base = Job("ppo", FULL, ("runtime.precision=fp32",))
    group = replace(base, num_responses=8)
    jobs = {name: _with(group if name in GROUPS else base, *own) for name, own in FAMILY.items()}
    return [Case("family", jobs | {SFT: _sft(FULL)}, num_rounds)]


FAMILY = {
    "PPO, head on the policy's trunk": ("ppo.critic=shared",),
    "PPO, separate critic": ("ppo.critic=separate",),
    "PPO, separate critic, two passes": ("ppo.critic=separate", "ppo.num_critic_epochs=2"),
    "RLOO": ("ppo.advantage=rloo",),
    "GRPO": ("ppo.advantage=grpo", "ppo.aggregation=sequence", "ppo.kl_in={loss: k3}"),
    "REINFORCE++": ("ppo.advantage=reinforce++",),
}
GROUPS = ("RLOO", "GRPO")
"""Cases with eight responses to each prompt."""


def _with(job: Job, *settings: str) -> Job:
    return replace(job, settings=(*job.settings, *settings))


def growth_cases(*, num_rounds: int) -> list[Case]:
    """Kedge only, with default settings and one growing quantity."""
    base = Job("ppo", Workload(), num_updates=4)
    return [
        Case("batch", {str(batch): replace(base, batch=batch) for batch in (16, 32, 64, 128)}),
        Case("response", {str(length): _full_responses(base, length) for length in (32, 64, 128, 256)}),
        Case("padding", {name: _padded(base, *share) for name, share in PADDING_SHARES.items()}, num_rounds),
        Case("epochs", {str(epochs): replace(base, num_epochs=epochs) for epochs in (1, 2, 4, 8)}),
        Case("vocabulary", {f"{size} × {batch}": _with_vocabulary(base, size, batch) for size, batch in VOCABULARIES}),
    ]


VOCABULARIES = [(size, batch) for size in (2048, 32768, 131072) for batch in (16, 64)]


def _full_responses(base: Job, length: int) -> Job:
    return replace(base, workload=Workload(hazard=0, max_response=length))


def _padded(base: Job, share: float, hazard: float) -> Job:
    """With more padding, prompts and responses are shorter and more numerous; real tokens stay the same."""
    load = Workload(
        hazard=hazard,
        max_response=PADDED_WIDTH,
        min_prompt=1,
        max_prompt=PADDED_WIDTH,
        prompt_skew=share / (1 - share),
    )
    return replace(base, workload=load, batch=round(PADDED_BATCH / (1 - share)))


def _with_vocabulary(base: Job, vocab_size: int, batch: int) -> Job:
    """Only memory matters here: one epoch, and Adam's moments exist from the first step."""
    load = Workload(vocab_size=vocab_size)
    return replace(base, workload=load, batch=batch, num_epochs=1, num_updates=2, num_dropped=1)


def measure_case(case: Case, runner: Runner, report: Callable[[str], None]) -> dict[str, list[Measurement]]:
    """Run the jobs of a case in turn, round after round: A B C A B C …

    Args:
        case: The case.
        runner: Runs the jobs.
        report: Receives a line per run.
    """
    measured: dict[str, list[Measurement]] = {name: [] for name in case.jobs}
    for job in case.jobs.values():
        runner.workload(job.workload)
    for number in range(1, case.num_rounds + 1):
        for name, job in case.jobs.items():
            result = runner.measure(job, seed=number)
            measured[name].append(result)
            report(
                f"{case.name}, round {number} of {case.num_rounds}, {name}: "
                f"{result.seconds:.2f} s per update, {result.peak_memory:.2f} GiB"
            )
    return measured
