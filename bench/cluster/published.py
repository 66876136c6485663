"""Published times of updates and weight syncs: a table to check the cost model against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from bench.cluster.cards import CARDS
from bench.cluster.shape import ModelShape
from bench.cluster.work import Layout, Workload

KindName: TypeAlias = Literal["dense-hopper", "dense-gb200", "mixture", "mi300", "assumed"]


@dataclass(frozen=True)
class Kind:
    """Figures of one kind, and how far they may be from the model.

    Attributes:
        about: Which figures.
        low: Smallest published time, in units of the model's time.
        high: Largest published time, in units of the model's time.
    """

    about: str
    low: float
    high: float


KINDS: Final[dict[KindName, Kind]] = {
    "dense-hopper": Kind("dense, 7B to 33B, up to 64 H100, lengths published", 0.8, 1.25),
    "dense-gb200": Kind("dense, 8B to 33B, up to 32 GB200, lengths published", 1.0, 1.4),
    "mixture": Kind("mixtures of experts, up to 256 H100, lengths published", 0.45, 1.5),
    "mi300": Kind("7B on 8 MI300, responses of 130 tokens, measured lengths", 2.0, 3.0),
    "assumed": Kind("dense, 1.5B to 70B, H800, H20 or A800, mean lengths assumed", 0.4, 2.6),
}


SYNC_KIND: Final = Kind("weight syncs of 7B to 235B over 8 to 128 H20", 0.15, 4.0)
"""The way matters more than the size: in buckets, verl is two to six times as fast as tensor by tensor."""


@dataclass(frozen=True)
class PublishedUpdate:
    """A published time of one update.

    Attributes:
        name: Library, version and model.
        kind: Which band it belongs to.
        work: The update.
        layout: The cards.
        seconds: Published.
        source: Address, or repository and path.
        note: Assumptions.
    """

    name: str
    kind: KindName
    work: Workload
    layout: Layout
    seconds: float
    source: str
    note: str = ""


@dataclass(frozen=True)
class PublishedSync:
    """A published time of bringing the trainer's weights to the servers.

    Attributes:
        name: Library, model and way.
        policy: The model.
        layout: The cards.
        seconds: Published.
        source: Repository and path.
    """

    name: str
    policy: ModelShape
    layout: Layout
    seconds: float
    source: str


def _dense(billions: float, layers: int, hidden: int, kv_heads: int, vocabulary: int) -> ModelShape:
    return ModelShape(billions * 1e9, billions * 1e9, layers, hidden, kv_heads, 128, vocabulary)


LLAMA_3_8B: Final = _dense(8.03, 32, 4096, 8, 128256)
QWEN_3_32B: Final = _dense(32.8, 64, 5120, 8, 151936)
QWEN_2_1B: Final = _dense(1.54, 28, 1536, 2, 151936)
QWEN_2_7B: Final = _dense(7.62, 28, 3584, 4, 152064)
DEEPSEEK_7B: Final = _dense(6.91, 30, 4096, 32, 102400)
LLAMA_2_7B: Final = _dense(6.74, 32, 4096, 32, 32000)
LLAMA_2_13B: Final = _dense(13.0, 40, 5120, 40, 32000)
CODE_LLAMA_34B: Final = _dense(33.7, 48, 8192, 8, 32000)
LLAMA_2_70B: Final = _dense(69.0, 80, 8192, 8, 32000)
QWEN_3_30B_A3B: Final = ModelShape(30.5e9, 3.3e9, 48, 2048, 4, 128, 151936)
QWEN_3_235B_A22B: Final = ModelShape(235e9, 22e9, 94, 4096, 4, 128, 151936)

NEMO: Final = "NVIDIA-NeMo/RL docs/about/performance-summary.md at "
NEMO_PROMPT: Final = 160
"""Tokens of a prompt in OpenMathInstruct-2: an assumption. Published is the mean of prompt and response together."""

VERL: Final = "volcengine/verl docs/advance/fully_async.md at b178a3cd"
MI300_LOGS: Final = "yushengsu-thu/verl_training_log gsm8k/"
OPENRLHF: Final = "OpenRLHF/OpenRLHF README.md at 391e1de4"
AREAL: Final = "inclusionAI/AReaL blog/AReaL_v0_3.md, table 2"


def _nemo(
    version: str, commit: str, name: str, policy: ModelShape, cards: str, number: int, length: int, seconds: float,
    *, parallel: int, stale: bool = False, longest: int = 4096, responses: int = 2048, kind: KindName = "dense-hopper",
) -> PublishedUpdate:  # fmt: skip
    """A row of NeMo-RL's table: GRPO with a reference, one epoch in optimizer steps of 512 responses."""
    work = Workload(policy, responses, NEMO_PROMPT, NEMO_PROMPT, length - NEMO_PROMPT, longest - NEMO_PROMPT,
                    minibatches=responses // 512)  # fmt: skip
    layout = Layout(CARDS[cards], number, number // 2 if stale else 0, parallel, int(stale))
    way = "one step off" if stale else "on policy"
    return PublishedUpdate(f"NeMo-RL {version} {name}, {way}", kind, work, layout, seconds, NEMO + commit)


def _nemo_rows() -> Iterator[PublishedUpdate]:
    four = ("0.4", "cff17f83")
    five = ("0.5", "108bffda")
    six = ("0.6", "aea463dd")
    small = ("Llama-3.1-8B", LLAMA_3_8B)
    large = ("Qwen3-32B", QWEN_3_32B)
    yield _nemo(*four, *small, "H100", 16, 1060, 97.7, parallel=1)
    yield _nemo(*four, *small, "H100", 16, 1129, 74.6, parallel=1, stale=True)
    yield _nemo(*four, *large, "H100", 32, 3206, 393, parallel=4)
    yield _nemo(*four, *large, "H100", 64, 3207, 215, parallel=4, stale=True)
    yield _nemo(*five, *small, "H100", 16, 1019, 92.8, parallel=1)
    yield _nemo(*five, *small, "H100", 16, 1123, 64.8, parallel=1, stale=True)
    yield _nemo(*five, *large, "H100", 32, 3251, 376, parallel=4)
    yield _nemo(*five, *large, "H100", 64, 3252, 200, parallel=4, stale=True)
    yield _nemo(*five, *small, "GB200", 8, 1066, 91.0, parallel=1, kind="dense-gb200")
    yield _nemo(*five, *small, "GB200", 8, 1107, 71.1, parallel=1, stale=True, kind="dense-gb200")
    yield _nemo(*five, *large, "GB200", 16, 3253, 381, parallel=1, kind="dense-gb200")
    yield _nemo(*five, *large, "GB200", 32, 3258, 210, parallel=1, stale=True, kind="dense-gb200")
    for version, rows in (
        (four, ((32, 3154, 225, 4, False), (32, 3158, 244, 4, True))),
        (five, ((32, 3196, 198, 2, False), (32, 3201, 154, 2, True))),
        (six, ((32, 3203, 192, 2, False), (32, 3201, 152, 2, True))),
    ):
        for number, length, seconds, parallel, stale in rows:
            yield _nemo(*version, "Qwen3-30B-A3B", QWEN_3_30B_A3B, "H100", number, length, seconds,
                        parallel=parallel, stale=stale, kind="mixture")  # fmt: skip
    for version, rows in (
        (four, ((128, 5671, 506, 16, False), (256, 5691, 241, 8, True))),
        (five, ((128, 5700, 431, 16, False), (256, 5707, 203, 8, True))),
        (six, ((128, 5698, 395, 16, False), (256, 5713, 312, 16, False), (256, 5721, 231, 8, True))),
    ):
        for number, length, seconds, parallel, stale in rows:
            yield _nemo(*version, "Qwen3-235B-A22B", QWEN_3_235B_A22B, "H100", number, length, seconds, longest=8192,
                        responses=512, parallel=parallel, stale=stale, kind="mixture")  # fmt: skip


def _verl_rows() -> Iterator[PublishedUpdate]:
    mi300 = CARDS["MI300"]
    work = Workload(DEEPSEEK_7B, 5120, 83, 185, 130, 713, minibatches=4)
    name = "verl DeepSeek-7B, GRPO, update 60"
    measured = "without the 32 s of testing"
    yield PublishedUpdate(name, "mi300", work, Layout(mi300, 8, 0, 2), 75.4,
                          MI300_LOGS + "grpo_run_deepseek7b_llm.log", measured)  # fmt: skip
    work = Workload(DEEPSEEK_7B, 1024, 83, 185, 132, 378, minibatches=4, critic="separate")
    name = "verl DeepSeek-7B, PPO, update 60"
    measured = "without the 28 s of testing"
    yield PublishedUpdate(name, "mi300", work, Layout(mi300, 8, 0, 4), 35.5,
                          MI300_LOGS + "ppo_run_deepseek7b_llm.log", measured)  # fmt: skip
    note = "mean length from the 32 cards' 108 s of old log probabilities, at 40 % of the peak"
    for cards, seconds in ((32, 790.1), (64, 365.28), (128, 356.3)):
        work = Workload(QWEN_2_7B, 8192, 150, 2048, 1450, 28672, minibatches=16, reference=False)
        yield PublishedUpdate(
            "verl Qwen2.5-7B, DAPO", "assumed", work, Layout(CARDS["H20"], cards), seconds, VERL, note
        )


def _older_rows() -> Iterator[PublishedUpdate]:
    h800 = CARDS["H800"]
    a800 = CARDS["A800"]
    note = "2,048 responses of 8,000 tokens assumed; hours divided by 1,000 updates"
    for name, policy, cards, hours in (("1.5B", QWEN_2_1B, 128, (41.0, 14.8)), ("7B", QWEN_2_7B, 192, (57.7, 25.4))):
        work = Workload(policy, 2048, 100, 1024, 8000, 27648, reference=False)
        yield PublishedUpdate(f"AReaL 0.3 {name}, synchronous", "assumed", work, Layout(h800, cards), 3.6 * hours[0],
                              AREAL, note)  # fmt: skip
        layout = Layout(h800, cards, cards * 3 // 4, 1, 16)
        yield PublishedUpdate(f"AReaL 0.3 {name}, asynchronous", "assumed", work, layout, 3.6 * hours[1], AREAL, note)
    note = "prompts of 512 and responses of 1,024 tokens assumed; Adam on the CPU, which the model does not know"
    for name, policy, cards, servers, parallel, seconds in (
        ("7B", LLAMA_2_7B, 16, 4, 1, 471.11),
        ("13B", LLAMA_2_13B, 32, 8, 1, 608.93),
        ("34B", CODE_LLAMA_34B, 32, 8, 4, 1526.4),
        ("70B", LLAMA_2_70B, 32, 16, 4, 4488.53),
    ):
        work = Workload(policy, 1024, 512, 1024, 1024, 1024, critic="separate", reward=policy)
        layout = Layout(a800, cards, servers, parallel)
        yield PublishedUpdate(f"OpenRLHF 2024 {name}, PPO", "assumed", work, layout, seconds, OPENRLHF, note)


UPDATES: Final = (*_nemo_rows(), *_verl_rows(), *_older_rows())
"""Every published update that the model is checked against."""

SYNCS: Final = tuple(
    PublishedSync(f"verl {name}, {way}", policy, Layout(CARDS["H20"], 2 * side, side), seconds, VERL)
    for name, policy, side, times in (
        ("Qwen2.5-7B", QWEN_2_7B, 4, (0.12, 0.02)),
        ("Qwen3-30B-A3B", QWEN_3_30B_A3B, 16, (15.76, 4.38)),
        ("Qwen3-235B-A22B", QWEN_3_235B_A22B, 64, (58.57, 23.70)),
    )
    for way, seconds in zip(("tensor by tensor", "in buckets"), times, strict=True)
)
"""Every published weight sync that the model is checked against."""
