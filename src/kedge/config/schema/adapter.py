"""`adapter`: trains a few weights on top of a frozen model."""

from typing import Any, Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section, rewrite


class AdapterConfig(Section):
    """Low-rank adapters: the model's own weights are frozen, and only the adapter is trained and saved."""

    kind: Literal["none", "lora", "dora"] = "none"
    """What is trained: all weights (none), or an adapter on the frozen model: LoRA, or DoRA, which trains the length of
    each row of a matrix apart. Needs the extra adapters. Another value than the default in this section, without a
    kind, means lora.

    Source: LoRA, DoRA
    """
    rank: int = field(16, ge=1)
    """Rank of the adapter of each matrix.

    Source: LoRA Without Regret: for policy gradients even rank 1 suffices; fine-tuning on many examples needs more
    Too high: more memory and time than the task needs
    Too low: fine-tuning ends at a higher loss than training all weights
    """
    alpha: float = field(32.0, gt=0)
    """Scale of the adapter: its product is multiplied by alpha / rank.

    Source: LoRA Without Regret
    Too high: like a learning rate that is too high
    Too low: like a learning rate that is too low
    """
    target_modules: str | list[str] = "auto"
    """The layers that get an adapter, by the last parts of their names, such as `[q_proj, v_proj]`; auto: every linear
    layer but the output layer, and the stacked experts and routers of Mixtral, Qwen3-MoE and the like.

    Source: LoRA Without Regret, QLoRA: adapters on attention alone learn less
    Text: auto, or the name of layers
    """
    base_dtype: Literal["auto", "fp32", "bf16", "int8", "nf4"] = "auto"
    """Number format of the linear layers of the frozen model, under all adapters of the run. auto is bf16 for matrices
    whose numbers bf16 can represent, which changes no result. bf16, int8 and nf4 round: the adapter is trained on the
    rounded model. nf4 needs the extra bitsandbytes.

    Source: QLoRA: an adapter in nf4 learns as much as one in bf16
    """
    modules_to_save: list[str] = field([])
    """Modules that are trained whole, by the last parts of their names, such as `[embed_tokens]`; their weights may not
    be tied to others. The head of a reward model or critic always is trained whole.

    Source: PEFT; for new tokens, whose embeddings must be learned
    Text: a list of names
    """

    @rewrite
    @classmethod
    def _imply_lora(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Make `lora` the kind if only other fields have values; with `kind=none` set explicitly they are ignored."""
        fields = cls.model_fields
        has_values = any(name in fields and fields[name].default != value for name, value in settings.items())
        return {"kind": "lora", **settings} if has_values else settings
