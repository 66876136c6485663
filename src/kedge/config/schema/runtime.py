"""`runtime`: device, numerics, seed, and the files of a run."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import BeforeValidator

from kedge.config.schema.field import field
from kedge.config.schema.section import Section, as_list, check

MOST_TOKENS = 8192
"""Maximum tokens per pass; on a CPU, larger numbers are not faster."""


Logger = Literal["tensorboard", "wandb", "trackio"]


class Machine(Section):
    """Seed, device, threads and ranks of a run."""

    seed: int = field(0, ge=0, lt=2**63)
    """Seed of every random stream; on the same machine, the same seed gives the same metrics.

    Source: kedge
    """
    device: str = "auto"
    """auto (CUDA if available, else CPU), or a torch device such as cpu, cuda, cuda:1 or mps.

    Source: kedge
    Text: auto or a device
    """
    parallel: Literal["replicate", "shard"] = "replicate"
    """What each of several processes started by torchrun holds: all weights, or (shard, with FSDP2) a part of each
    weight, gradient and optimizer moment. Does not change results, apart from rounding.

    Source: kedge: replicate needs no communication in a forward pass; shard is for models that do not fit
    """
    num_threads: int | None = field(None, ge=1)
    """CPU threads; null leaves the choice to PyTorch.

    Source: PyTorch
    Too high: threads wait for each other, above all if several processes share the cores
    Too low: cores are idle
    """
    deterministic: bool = False
    """Use only deterministic CUDA kernels. On a CPU results are deterministic anyway.

    Source: kedge: off, a GPU repeats and resumes a run up to rounding; on, bit-identically but slower
    """
    trust_remote_code: bool = False
    """Run Python code that comes with a model.

    Source: kedge: running downloaded code must be opt-in
    """


class Memory(Section):
    """Number formats, and settings that save memory."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the matrix products; auto is bf16 if the hardware supports it natively (and, on a CPU, the
    hidden size is at least 256), else fp32. Weights, and everything after the logits, stay fp32.

    Source: kedge: bf16 is faster; its cost is that sampler and trainer logprobs differ (published ratios: 0.89 to 1.09)
    """
    frozen_dtype: Literal["auto", "fp32", "bf16", "int8", "nf4"] = "auto"
    """Number format of the weights of models that are not trained: reference, reward models, judges, opponents. auto is
    bf16 where that changes no result: with bf16 products, for their matrices, and embeddings that were saved in bf16.
    bf16 is for all matrices, and their products run in bf16. int8 and nf4 hold the linear layers in 8 and 4 bits, and
    the rest as bf16 does; nf4 needs the extra bitsandbytes.

    Source: kedge: half, a quarter or an eighth of the memory; where it is not exact, the KL is that to a slightly
        different reference, by objective/reference_error, and scores differ by reward/rounding_error
    """
    micro_batch_tokens: Annotated[int, Ge(1)] | Literal["auto"] | None = MOST_TOKENS
    """Tokens per forward and backward pass, prompts and responses without padding; null passes the whole batch at once.
    auto: 8,192 (65,536 on a GPU), halved until a training pass fits into free memory, and whenever memory runs out: the
    step is repeated in smaller passes, and the run continues with them. So it does with fewer responses sampled at
    once, unless rollout.micro_batch_size is set. A number is kept. Does not change the gradient. In control, steps in
    the environment instead of tokens.

    Source: kedge: on a CPU no larger value is faster, and memory stays bounded
    Too high: out of memory
    Too low: the device is underused
    """
    activation_checkpointing: bool | Literal["auto"] = False
    """Whether the backward pass recomputes the activations inside the layers instead of storing them. A model that
    cannot do this, or whose gradients change, is refused; an encoder as reward model keeps them. auto: true if the plan
    of the run does not fit into free memory otherwise, and the model can; a resumed run keeps what it had.

    Source: kedge: saves most of the activation memory, for a third more time in training passes; auto is not the
        default, since a plan takes all responses to have the maximum length
    """
    offload: Annotated[list[Literal["frozen", "optimizer"]], BeforeValidator(as_list)] = field([])
    """What is in the host's memory while it is not needed; on a GPU only: the weights of reference, reward models and
    judges between their passes (frozen), and the optimizer's state between steps (optimizer). Does not change results.

    Source: kedge: frees their memory on the GPU (8 bytes per trained weight for the optimizer's state), for the time of
        copying them in every update or step
    """


class Records(Section):
    """A run's files, and the option to stop instead of warning."""

    report: bool = True
    """Write report.html, a page that shows the whole run.

    Source: kedge: takes a second at the end of the run
    """
    loggers: Annotated[list[Logger], BeforeValidator(as_list)] | dict[Logger, str] = field([])
    """Third-party loggers that also get the metrics and samples; each needs its extra, such as tensorboard. {wandb:
    tides} names the project in W&B or Trackio, which is otherwise kedge; TensorBoard has no projects, and needs no
    name: {wandb: tides, tensorboard: ''}. W&B stays offline unless WANDB_MODE says otherwise.

    Source: kedge: the run's own files are complete
    """
    num_samples: int = field(4, ge=0)
    """Responses per update to write to samples.jsonl.

    Source: kedge: enough to read, small on disk
    Too high: samples.jsonl grows large
    Too low: no text to look at if a run goes wrong
    """
    num_fixed_prompts: int = field(2, ge=0)
    """Prompts that PPO answers at the start, at the end and up to ten times in between, to show how the responses
    change; they are not trained on.

    Source: kedge: the same prompt side by side shows more than a curve
    Too high: sampling and scoring them takes a noticeable part of a short run
    Too low: no prompt can be followed through the run
    """
    strict: bool = False
    """Stop the run, instead of warning, if sampler and trainer disagree about a token's probability.

    Source: kedge: a warning should not end a long run; turn it on to test a new setup
    """


# pydantic orders the fields by the bases from the last to the first.
class RuntimeConfig(Records, Memory, Machine):
    """Device, numerics, seed, and the files of a run. They are the same for all stages."""

    @property
    def first_pass_tokens(self) -> int | None:
        """`micro_batch_tokens` at the start of a run."""
        return MOST_TOKENS if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    @property
    def recomputes(self) -> bool:
        """True if activations are recomputed; False for `auto`, which a stage replaces before it starts."""
        return self.activation_checkpointing is True

    @check
    def _check_frozen_dtype(self) -> None:
        if self.parallel == "shard" and self.frozen_dtype in ("int8", "nf4"):
            raise ValueError(
                f"runtime.frozen_dtype={self.frozen_dtype} does not work with runtime.parallel=shard, whose ranks hold "
                "parts of whole matrices; use runtime.frozen_dtype=bf16, or runtime.parallel=replicate"
            )
