"""`runtime`: the machine, the seed, and what a run writes down."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from kedge.config.schema.field import Section, as_list, knob

__all__ = ["Runtime"]


class Runtime(Section):
    """What holds for every stage alike."""

    seed: int = knob(
        0,
        ge=0,
        lt=2**63,
        meaning="Seeds every random stream; the same seed gives the same metrics on one machine.",
        source="kedge",
    )
    device: str = knob(
        "auto",
        meaning="auto (CUDA, then CPU), or a torch device such as cpu, cuda, cuda:1 or mps.",
        source="kedge",
    )
    precision: Literal["auto", "fp32", "bf16"] = knob(
        "auto",
        meaning="Number format of the matrix products: auto is bf16 where the hardware multiplies it natively (on a "
        "CPU, if the hidden size is at least 256), else fp32. Weights are fp32, and all that follows the logits.",
        source="kedge: in bf16 the sampler's and the trainer's logprobs differ (ratios of 0.89 to 1.09 are published)",
    )
    num_threads: int | None = knob(
        None,
        ge=1,
        meaning="CPU threads; null leaves it to torch.",
        source="torch",
        too_high="threads wait for each other, above all when several processes share the cores",
        too_low="cores stand idle",
    )
    micro_batch_tokens: int | None = knob(
        8192,
        ge=1,
        meaning="Tokens per forward and backward pass, prompts and responses without padding; null takes a whole batch "
        "at once. Never changes a gradient.",
        source="kedge: as fast as any larger one on a processor, and memory stays bounded",
        too_high="out of memory",
        too_low="the device is not kept busy",
    )
    deterministic: bool = knob(
        False,
        meaning="Whether CUDA is held to kernels that give the same bits each time. On a CPU they do so anyway.",
        source="kedge: without it a GPU repeats and resumes a run to rounding, with it to the bit, more slowly",
    )
    activation_checkpointing: bool = knob(
        False,
        meaning="Whether PPO keeps no activations inside of the layers and computes them again for the gradient.",
        source="kedge: a third more time for the training passes, for a fraction of their memory",
    )
    trust_remote_code: bool = knob(
        False,
        meaning="Whether Python code that lies beside a model may run.",
        source="kedge: code from data runs only when asked for",
    )
    strict: bool = knob(
        False,
        meaning="Whether a run stops where it would only warn: when sampler and trainer disagree about a token.",
        source="kedge: a long run should not end over a doubt; a test of a new set-up should",
    )
    plots: bool = knob(True, meaning="Whether to draw PNG plots of evaluations and of the demo.", source="kedge")
    report: bool = knob(
        True,
        meaning="Whether the run leaves report.html, one page that shows what it did.",
        source="kedge: a second's work at the end of a run",
    )
    loggers: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(as_list)] = knob(
        [],
        meaning="Who is told the metrics and samples beside the run's own files; each is an extra, such as "
        "kedge[tensorboard]. W&B stays offline unless WANDB_MODE says otherwise.",
        source="kedge: the files hold all of it",
    )
    project: str = knob(
        "kedge", min_length=1, meaning="The project that W&B and Trackio file the run under.", source="kedge"
    )
    num_samples: int = knob(
        4,
        ge=0,
        meaning="Responses per update that samples.jsonl keeps.",
        source="kedge: enough to read, small on disk",
        too_high="samples.jsonl grows large",
        too_low="nothing to read when a run goes wrong",
    )
    num_fixed_prompts: int = knob(
        2,
        ge=0,
        meaning="Prompts that PPO asks again and again, at its start, at its end and up to ten times on its way, to "
        "show how the answers change; nothing is learnt from them.",
        source="kedge: the same question side by side tells more than a curve",
        too_high="sampling and scoring them takes a noticeable share of a short run",
        too_low="no prompt can be followed through the run",
    )
