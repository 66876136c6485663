"""The policy and its critic: a causal language model split into trunk, output layer and value head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kedge.algorithm.critic import Bins
from kedge.algorithm.experience import CriticOutputs, PolicyOutputs, Rollout
from kedge.algorithm.logprobs import token_logprobs, token_logprobs_and_entropy
from kedge.algorithm.masking import in_float64
from kedge.algorithm.readout import ReadoutSums
from kedge.models.adapters import Adapter
from kedge.models.heads import HistogramHead, ValueHead, Values, initialize_head, read_values, scale_head
from kedge.models.packing.probe import TOLERANCE, Findings, relative_error, trial_rows
from kedge.models.packing.rows import TokenRows
from kedge.models.packing.trunk import Trunk
from kedge.models.precision import Precision, autocast
from kedge.models.pretrained import context_length, disable_dropout, fit_embedding, least, rope_switch
from kedge.ranks import ALONE, Ranks
from kedge_base.errors import ModelError

if TYPE_CHECKING:
    from kedge.models.scalar import ScalarModel

ValueGradient = Literal["trunk", "head", "none"]

ROUNDING = 1e-6
"""Relative spread below which numbers count as equal."""

PROBED_LOGIT = 30.0
"""Scale of the largest logit, as in a trained model, for comparing logits with the model's own."""
FORBIDDEN_LOGIT = -1e9
"""Logit of a forbidden token. It is finite, so that p·log p is 0 and not NaN; exp(−1e9) is 0 in every format."""
MAX_LOGITS = 2**24
"""Maximum logits in memory at a time, 64 MiB in float32. More are computed in chunks, and recomputed in the backward
pass.
"""


class LanguageModel(nn.Module):
    """Policy or reference: a transformers causal LM, split so that unused positions are not computed.

    Padding and ids without a token (the output matrix can be wider than the vocabulary) are never sampled. Their logits
    are replaced here, the one place shared by policy, reference, sampler and trainer, so all four use the same
    distribution.

    Args:
        causal: Any `AutoModelForCausalLM`; its dropout is disabled.
        tokenizer: Supplies the pad token and the vocabulary.
        value_head: Add a zero-initialized value head on the trunk (`critic: shared`).
        bins: The bins of a value head that predicts a histogram; None for a scalar head.
        device: The device of the weights; needed where another rank has them.
        ranks: If they shard their models, the first has the weights, and checks them for all.

    Raises:
        ModelError: The tokenizer has more tokens than the model has embeddings, or kedge would not compute what
            transformers computes.

    Source: spec §2.2, §7.34 (S0, S1, S4).
    """

    forbidden: Tensor
    forbidden_ids: Tensor
    holds_bf16 = False  # see `hold_frozen`
    on_every_rank = False  # see `Loaded`
    host: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context for passes: `HostWeights.on_device` if the weights are in host memory between passes."""
    adapter: Adapter | None = None
    """The adapter, on a base that other models may share; None for a model with its own weights."""

    def __init__(
        self,
        causal: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        value_head: bool = False,
        bins: Bins | None = None,
        device: torch.device | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.causal = causal
        device = device or causal.device
        fit_embedding(causal, tokenizer)
        disable_dropout(causal)
        ids = torch.arange(len(output_layer(causal).weight), device=device)
        known = torch.tensor(list(tokenizer.get_vocab().values()), device=device)
        forbidden = torch.isin(ids, known, invert=True) | (ids == tokenizer.pad_token_id)
        self.register_buffer("forbidden", forbidden, persistent=False)
        self.register_buffer("forbidden_ids", forbidden.nonzero().squeeze(1), persistent=False)
        self.value_head: ValueHead | None = None
        if value_head:
            width = output_layer(causal).in_features
            head = nn.Linear(width, 1, device=device) if bins is None else HistogramHead(width, bins, device=device)
            self.value_head = initialize_head(head, "zero")
        self.trunk = Trunk(_base_model(causal), ranks)
        self._check(ranks)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.forbidden.device

    @property
    def context_length(self) -> int | None:
        """Maximum tokens per row; None if the architecture has no limit."""
        return context_length(self.causal)

    @property
    def sampling_length(self) -> int | None:
        """Maximum tokens of a prompt and its sampled response; None if the architecture has no limit."""
        return least(self.context_length, rope_switch(self.causal))

    def hidden(self, rows: TokenRows) -> Float[Tensor, "tokens dim"]:
        """The trunk's last hidden state at every token."""
        return self.trunk.hidden(rows)

    @cached_property
    def shares_up_to(self) -> float:
        """Maximum length of rows that can share their prompt in a pass."""
        return self.trunk.shares_up_to

    def logits(self, hidden: Float[Tensor, "*rest dim"]) -> Float[Tensor, "*rest vocab"]:
        """Float32 logits of the next token; forbidden tokens have probability 0."""
        return self._logits(hidden, self._output_weight())

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._raw_logits(hidden, weight).index_fill_(-1, self.forbidden_ids, FORBIDDEN_LOGIT)

    def over_logits(
        self,
        measure: Callable[[Float[Tensor, "tokens vocab"], Int[Tensor, " tokens"]], tuple[Tensor, ...]],
        hidden: Float[Tensor, "tokens dim"],
        targets: Int[Tensor, " tokens"],
    ) -> tuple[Tensor, ...]:
        """Apply `measure` to the logits of each hidden state and its target token.

        With a large vocabulary, the logits of a batch would be the largest tensor of all. They are computed in chunks,
        measured and freed, and recomputed in the backward pass.

        Args:
            measure: Maps logits and targets to tensors with one number per token.
            hidden: Hidden states.
            targets: Target token of each hidden state.
        """
        size = max(1, MAX_LOGITS // len(self.forbidden))
        weight = self._output_weight()

        def chunk(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            return measure(self._logits(states, weight), tokens)

        if len(targets) <= size:
            return chunk(hidden, targets)
        parts = [
            checkpoint(chunk, states, tokens, use_reentrant=False)
            for states, tokens in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        return tuple(torch.cat(measures) for measures in zip(*parts, strict=True))

    def _output_weight(self) -> Tensor:
        """The output layer's matrix, gathered once per pass, since ranks may compute different numbers of chunks."""
        weight = output_layer(self.causal).weight
        # If sharded, all ranks gather it together, and their gradients are summed.
        return weight.full_tensor(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight

    def _raw_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        config = self.causal.config.get_text_config()
        layer = output_layer(self.causal)
        logits = (layer(hidden) if weight is layer.weight else functional.linear(hidden, weight, layer.bias)).float()
        for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
            if scale := getattr(config, name, None):
                logits = logits * scale
        # Granite and Inkling divide, HyperCLOVA X multiplies.
        if scaling := getattr(config, "logits_scaling", None) or getattr(config, "logits_mup_width_multiplier", None):
            logits = logits * scaling if config.model_type.startswith("hyperclovax") else logits / scaling
        # Gemma, RecurrentGemma
        if cap := getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _check(self, ranks: Ranks) -> None:
        """Reject a model whose states depend on later tokens, or that computes its logits in an unsupported way."""
        kind = type(self.causal).__name__
        if not self.trunk.is_causal:
            raise ModelError(f"{kind} reads later tokens as well, so it is not a language model; use a causal one")
        if Findings(self.causal, ranks).error("logits", self._logit_error) > TOLERANCE:
            raise ModelError(
                f"{kind} computes its logits in a way that kedge does not support; use another architecture"
            )

    @torch.no_grad()
    def _logit_error(self) -> float:
        """Error of the log probabilities relative to the model's own forward pass, for a single row.

        Hidden states are scaled up, so that a cap on the logits shows even in a model with small logits.
        """
        rows = trial_rows(self.causal)
        ids = rows.ids[: rows.longest]
        hidden = self.hidden(TokenRows(ids, (len(ids),)))
        weight = self._output_weight()
        # An output layer may start at 0.
        factor = max(1.0, PROBED_LOGIT / float(self._raw_logits(hidden, weight).abs().max().clamp(min=ROUNDING)))

        def amplify(module: nn.Module, inputs: object, output: Any) -> Any:
            nonlocal hidden
            output.last_hidden_state = output.last_hidden_state * factor
            hidden = hidden * factor  # not reached if the model calls only a part of its trunk (OPT)
            return output

        handle = self.trunk.model.register_forward_hook(amplify)
        try:
            expected = self.causal(input_ids=ids[None], use_cache=False).logits[0].float()
        finally:
            handle.remove()
        logits = self._raw_logits(hidden, weight)
        width = expected.shape[-1]  # Inkling leaves out rows that only pad the matrix
        if self.forbidden[width:].all():
            logits = logits[:, :width]
        return relative_error(logits.log_softmax(-1), expected.log_softmax(-1))


def _base_model(causal: PreTrainedModel) -> PreTrainedModel:
    """The model without its output layer; `base_model` is the whole model in some architectures (Llama 4)."""
    base = cast(PreTrainedModel, causal.base_model)
    parts = [part for part in causal.children() if isinstance(part, PreTrainedModel)]
    return max(parts, key=lambda part: part.num_parameters()) if base is causal and parts else base


def output_layer(causal: PreTrainedModel) -> nn.Linear:
    """The layer that computes the logits."""
    layer = causal.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ModelError(f"{type(causal).__name__} has no linear output layer; use a causal language model")
    return layer


@dataclass(frozen=True)
class PolicyWeights:
    """Iterates over a policy's weights by their names in a checkpoint, one full tensor at a time; can be iterated
    repeatedly.

    Tied weights appear under both names, since a server may keep separate copies, as vLLM does on a CPU. The value
    head is not included.

    Args:
        policy: The policy.
        merged: Merge an adapter into the base's weights. False yields only the adapter's weights, for a copy of the
            policy on the same base.
    """

    policy: LanguageModel
    merged: bool = True

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if (adapter := self.policy.adapter) is not None:
            yield from adapter.merged() if self.merged else adapter.weights().items()
            return
        for name, tensor in self.policy.causal.state_dict().items():
            # Gathering is safe: all ranks that shard the policy read the weights in the same order.
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class _Reading:
    """The tokens that a forward pass reads, and the hidden states from which the slots are evaluated.

    Slot t of a response is evaluated at the last token read before it: the state in which action t was chosen (spec
    §1). Tokens after a row's last slot have no influence and are not read.

    Attributes:
        rows: Prompts and responses, without padding.
        states: For each slot, the index of its state among all tokens read.
        slots: The actions, and one more slot per row if the value after the last action is requested.
        action_mask: The actions.
        actions: Their token ids.
    """

    rows: TokenRows
    states: Int[Tensor, " slots"]
    slots: Bool[Tensor, "batch time"]
    action_mask: Bool[Tensor, "batch time"]
    actions: Int[Tensor, " actions"]

    @classmethod
    def of(cls, rollout: Rollout, *, after_last: bool = False, privileged: bool = False) -> _Reading:
        if privileged and not rollout.branches:
            rollout = rollout.for_critic
        mask = rollout.action_mask
        columns = torch.arange(mask.shape[1], device=mask.device)
        last = (columns * mask).amax(dim=1, keepdim=True)
        slots = mask
        if after_last:
            last = (last + 1).clamp(max=len(columns) - 1)
            slots = mask | (columns == last)
        if rollout.branches:
            contexts = rollout.contexts(slots, privileged=privileged)
            rows = TokenRows.of(contexts.paths, mask.device, contexts.pieces)
            starts = rows.starts
            states = torch.tensor([starts[path] + place for path, place in contexts.states], device=mask.device)
            return cls(rows, states, slots, mask, rollout.response_ids[mask])
        ids = torch.cat([rollout.prompt_ids, rollout.response_ids[:, :-1]], dim=1)
        read = torch.cat([rollout.prompt_mask, (rollout.token_mask & (columns < last))[:, :-1]], dim=1)
        # Tokens read up to each column, counting all of earlier rows, less 1: the index of the newest one, whose state
        # is that of the slot.
        newest = read.flatten().cumsum(0).view(read.shape)[:, rollout.prompt_ids.shape[1] - 1 :] - 1
        rows = TokenRows.unpad(ids, read, rollout.prompts)
        return cls(rows, newest[slots], slots, mask, rollout.response_ids[mask])

    def at_actions(self, states: Tensor) -> Tensor:
        """Select the entries of the actions from one entry per slot."""
        if self.slots is self.action_mask:
            return states
        # By index, because a plan's states have no contents and cannot be selected with a mask.
        return states[self.action_mask[self.slots].nonzero().flatten()]

    def pad(
        self, figures: Float[Tensor, "slots *each"], slots: Bool[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time *each"]:
        """Scatter into the rollout's padded shape, 0 elsewhere."""
        each = figures.shape[1:]
        mask = slots.view(*slots.shape, *(1 for _ in each))
        return figures.new_zeros((*slots.shape, *each)).masked_scatter(mask, figures)

    def pad_values(self, read: Values) -> tuple[Tensor, Tensor | None]:
        """`pad` for values of all slots, and for their histograms if there are any."""
        return self.pad(read.values, self.slots), None if read.logits is None else self.pad(read.logits, self.slots)


def response_logprobs(
    model: LanguageModel, rollout: Rollout, *, temperature: float, precision: Precision = "fp32"
) -> Float[Tensor, "batch time"]:
    """Log probabilities (nats) of the actions under `model`, 0 elsewhere; used for the frozen reference."""
    reading = _Reading.of(rollout)
    with autocast("bf16" if model.holds_bf16 else precision, model.device):
        hidden = model.hidden(reading.rows)[reading.states]
        [logprobs] = model.over_logits(
            lambda logits, tokens: (token_logprobs(logits, tokens, temperature=temperature),), hidden, reading.actions
        )
    return reading.pad(logprobs, reading.action_mask)


class ActorCritic(nn.Module):
    """The policy and its critic: a head on the policy's trunk, a separate model, or none.

    Args:
        policy: The policy; its value head, if any, is the critic.
        critic: A separate critic, for a policy without a value head.
        value_gradient: The gradient of the values reaches the trunk that a value head shares with the policy,
            or ends at the head; none: the critic is not trained, and is left out of training passes.

    Attributes:
        values_started: False for a new critic that has yet to be fitted to the first returns; see `start_values`. None
            without a critic.
        readout: The sums that an untrained value head is fitted to, of two halves; None for any other critic. See
            `Readout`.

    Source: spec §7.34.
    """

    values_started: Tensor | None
    readout: Tensor | None

    def __init__(
        self, policy: LanguageModel, critic: ScalarModel | None = None, *, value_gradient: ValueGradient = "trunk"
    ) -> None:
        super().__init__()
        assert policy.value_head is None or critic is None, "at most one critic: a value head or a model"
        self.policy = policy
        self.critic = critic
        self.value_gradient = value_gradient
        # Buffers, so that they are restored together with the weights that they describe.
        started = torch.tensor(True, device=policy.device) if self.has_critic else None
        self.register_buffer("values_started", started, persistent=False)
        head = None if self.trains_critic else policy.value_head
        sums = None
        if head is not None:
            head.requires_grad_(False)
            sums = ReadoutSums.empty(head.in_features).flat().repeat(2, 1)
        self.register_buffer("readout", sums, persistent=False)

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return self.policy.device

    @property
    def has_critic(self) -> bool:
        """True if the model has a value head or a separate critic."""
        return self.critic is not None or self.policy.value_head is not None

    @property
    def trains_critic(self) -> bool:
        """True if a gradient of the values trains a critic."""
        return self.has_critic and self.value_gradient != "none"

    def train_critic(self) -> None:
        """Train a separate critic from now on."""
        self.value_gradient = "trunk"

    def policy_parameters(self) -> Iterator[nn.Parameter]:
        """The policy's parameters without the value head; frozen while the critic warms up."""
        return self.policy.causal.parameters()

    @cached_property
    def shares_up_to(self) -> float:
        """Maximum length of rows that can share their prompt in a pass, in both policy and critic."""
        return min(model.shares_up_to for model in (self.policy, self.critic) if model is not None)

    @property
    def value_head(self) -> ValueHead | None:
        """The critic's output layer; None without a critic."""
        return self.policy.value_head if self.critic is None else self.critic.value_head

    @torch.no_grad()
    def start_values(
        self,
        values: Float[Tensor, "batch time"],
        returns: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"],
        *,
        rows: Bool[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch time"]:
        """Map a new critic's outputs V to a + b·V, the least-squares fit to the first returns; return the new values.

        b = max(0, cov(V, R)/var(V)),  a = mean(R) − b·mean(V);  b = 0 where V is constant

        A critic whose head is 0 starts at the mean return, and a reward model's readout is kept to the extent that it
        predicts the returns. Neither depends on the unit of the reward. If all returns are equal, they do not determine
        b: it is 1, and the fit is repeated on the next batch. Non-finite numbers are left to the guard.

        Args:
            values: V of the actions, as collected.
            returns: Their Monte Carlo returns, which contain no value.
            mask: True = counts.
            rows: The rows with known returns, to fit to; None for all.

        Source: kedge; PopArt (van Hasselt et al. 2016) starts and rescales an output layer in this way.
        """
        head = self.value_head
        started = self.values_started
        assert isinstance(head, nn.Linear), "the support of a histogram is a setting"
        assert started is not None
        fitted = mask if rows is None else mask & rows[:, None]
        counted = in_float64(values[fitted])
        targets = in_float64(returns[fitted])
        if not (counted.isfinite().all() and targets.isfinite().all()):
            return values
        spread = float(counted.var(correction=0))
        gain = 0.0
        varies = float(targets.std(correction=0)) > ROUNDING * float(targets.abs().max())
        if not varies:
            gain = 1.0
        elif spread > ROUNDING**2 * float(counted.square().mean()):
            covariance = (counted - counted.mean()) * (targets - targets.mean())
            gain = max(0.0, float(covariance.mean()) / spread)
        offset = float(targets.mean() - gain * counted.mean())
        if self.critic is not None:
            self.critic.rescale(gain, offset)
        else:
            scale_head(head, gain)
            head.bias.add_(offset)
        started.fill_(varies)
        return torch.where(mask, gain * values + offset, 0.0)

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the value head or of the separate critic."""
        critic = self.critic if self.critic is not None else self.policy.value_head
        return iter(()) if critic is None else critic.parameters()

    def separable_parameters(self) -> Iterator[nn.Parameter]:
        """The critic's parameters, if no gradient of the values reaches the policy; otherwise empty."""
        separable = self.critic is not None or self.value_gradient != "trunk"
        return self.critic_parameters() if separable else iter(())

    def checkpoint_activations(self) -> None:
        """Recompute activations in the backward pass from now on; see `Trunk.checkpoint_activations`."""
        self.policy.trunk.checkpoint_activations()
        if self.critic is not None and self.critic.trunk is not None:
            self.critic.trunk.checkpoint_activations()

    def forward(
        self,
        rollout: Rollout,
        *,
        temperature: float,
        precision: Precision = "fp32",
        entropy_gradient: bool = False,
        value_after_last: bool = False,
        values: bool = True,
    ) -> PolicyOutputs:
        """Evaluate the actions of some rows under the current weights.

        Args:
            rollout: The rows.
            temperature: The sampling temperature; divides the logits as in sampling (spec §4.14).
            precision: Number format of the matrix products.
            entropy_gradient: Keep the entropy differentiable, for an entropy bonus; otherwise it is only a metric.
            value_after_last: Also return the value of the state after the last action if the rollout is wide enough:
                the slot of the score with `score_at: after_last`.
            values: Also return the critic's values, if there is a critic.
        """
        reading = _Reading.of(rollout, after_last=value_after_last)
        measure = partial(token_logprobs_and_entropy, temperature=temperature, entropy_gradient=entropy_gradient)
        with autocast(precision, self.device):
            hidden = self.policy.hidden(reading.rows)[reading.states]
            logprobs, entropy = self.policy.over_logits(measure, reading.at_actions(hidden), reading.actions)
            shared = hidden if self.value_gradient == "trunk" else hidden.detach()
            read = None
            if values and self.has_critic:
                is_same = rollout.privileged_ids is None
                seen = reading if is_same else self._critic_reading(rollout, after_last=value_after_last)
                with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_critic):
                    read = seen.pad_values(self._read_values(seen, shared))
        return PolicyOutputs(
            reading.pad(logprobs, reading.action_mask),
            reading.pad(entropy, reading.action_mask),
            *(read or (None, None)),
            states=None if self.readout is None else hidden.detach(),
        )

    def value_states(
        self, rollout: Rollout, *, precision: Precision = "fp32", value_after_last: bool = False
    ) -> Float[Tensor, "slots dim"]:
        """The hidden states that the critic's head reads, row by row, in the order of the slots."""
        reading = self._critic_reading(rollout, after_last=value_after_last)
        trunk = self.policy.trunk if self.critic is None else self.critic.trunk
        assert trunk is not None, "a critic has a value at every token"
        with autocast(precision, self.device):
            return trunk.hidden(reading.rows)[reading.states]

    def critic_outputs(
        self, rollout: Rollout, *, precision: Precision = "fp32", value_after_last: bool = False
    ) -> CriticOutputs:
        """Evaluate only the critic. Gradients reach its own parameters; a shared trunk is run without a graph.

        Args:
            rollout: The rows.
            precision: Number format of the matrix products.
            value_after_last: Also return the value of the state after the last action; see `forward`.
        """
        reading = self._critic_reading(rollout, after_last=value_after_last)
        with autocast(precision, self.device):
            shared = None
            if self.critic is None:
                with torch.no_grad():
                    shared = self.policy.hidden(reading.rows)[reading.states]
            return CriticOutputs(*reading.pad_values(self._read_values(reading, shared)))

    def values(
        self, rollout: Rollout, *, precision: Precision = "fp32", value_after_last: bool = False
    ) -> Float[Tensor, "batch time"]:
        """Only the critic's values, as in `PolicyOutputs`; used when the log probabilities are already known."""
        return self.critic_outputs(rollout, precision=precision, value_after_last=value_after_last).values

    def _critic_reading(self, rollout: Rollout, *, after_last: bool) -> _Reading:
        """Read a rollout for the critic; a separate one also reads the privileged tokens."""
        return _Reading.of(rollout, after_last=after_last, privileged=self.critic is not None)

    def _read_values(self, reading: _Reading, hidden: Tensor | None) -> Values:
        if self.critic is not None:
            values, logits = self.critic.read_values(reading.rows)
            return Values(values[reading.states], None if logits is None else logits[reading.states])
        assert hidden is not None
        assert self.policy.value_head is not None
        return read_values(self.policy.value_head, hidden)
