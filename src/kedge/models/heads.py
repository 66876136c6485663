"""The heads of critics and reward models: a scalar, or a histogram of the return; and their files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from kedge.algorithm.critic import Bins
from kedge.downloads import repository_file
from kedge.models.sources import check_source, find_model
from kedge_base.errors import ModelError

HeadInit = Literal["zero", "normal"]

VALUE_HEAD_FILE = "value_head/model.safetensors"
"""File of a policy's value head; in a subfolder, since vLLM reads every `*.safetensors` next to `config.json` as the
policy's weights."""
LLAMA_FACTORY_FILE = "value_head.safetensors"

MAX_SHOWN = 4
"""Maximum number of weights that a message names."""

COPY_SPREAD = 1 / 12
"""Standard deviation of a histogram made from a scalar head, relative to the support. A wider one would be truncated at
the ends, where its expectation would miss the scalar; with a narrower one, distant bins would be many nats lower and
learn slowly.
"""
NEW_SPREAD = 1 / 4
"""Standard deviation of a new head's histogram, relative to the support: nearly uniform, as it has no values to keep.
In short runs, 1/16 needed twice as many updates as 1/4 to reach the returns; a uniform start needed as many as 1/4.
"""
MARGIN = 0.05
"""Minimum distance of a new head's initial value from the ends of the support, as a share of its width; the value is 0
where that allows it."""


class HistogramHead(nn.Module):
    """A linear layer from a hidden state to the logits of a histogram; the histogram's expectation is the value.

    It starts from a scalar head v = w·h + b, as the Gaussian with mean v and standard deviation s:

        logits_i = −(c_i − v)²/(2s²) + const = v·c_i/s² − c_i²/(2s²)

    which is also linear in h. So the initial values are those of the scalar head, except near the ends of the support.

    Args:
        in_features: Width of the hidden states.
        bins: The support.
        device: Target device.

    Source: kedge.
    """

    support: Tensor

    def __init__(self, in_features: int, bins: Bins, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.in_features = in_features
        self.bins = bins
        self.weight = nn.Parameter(torch.zeros(bins.num_bins, in_features, device=device))
        self.bias = nn.Parameter(torch.zeros(bins.num_bins, device=device))
        # Saved, so that a head is never loaded with a different support.
        self.register_buffer("support", torch.tensor([float(bins.low), float(bins.high)], device=device))

    @torch.no_grad()
    def start_from(
        self, scalar: nn.Linear, *, shift: float = 0.0, relative_spread: float = COPY_SPREAD
    ) -> HistogramHead:
        """Adopt the values of a scalar head; returns itself.

        Args:
            scalar: The head.
            shift: Subtracted from its output.
            relative_spread: s, relative to the support.
        """
        bias = torch.zeros_like(self.support[0]) if scalar.bias is None else scalar.bias
        centers = self.bins.centers(self.support)
        spread = _spread(self.bins, relative_spread)
        self.weight.copy_(centers[:, None] / spread**2 * scalar.weight)
        self.bias.copy_(_gaussian_logits(centers, bias - shift, spread))
        return self

    def forward(self, hidden: Float[Tensor, "*rest dim"]) -> Float[Tensor, "*rest bins"]:
        """The logits of the bins."""
        return functional.linear(hidden, self.weight, self.bias)


ValueHead = nn.Linear | HistogramHead


class Values(NamedTuple):
    """Values, and the histograms with these expectations; None if the head's output is a scalar."""

    values: Float[Tensor, "*rest"]
    logits: Float[Tensor, "*rest bins"] | None


def read_values(head: ValueHead, hidden: Float[Tensor, "*rest dim"]) -> Values:
    """The head's output at each hidden state, float32."""
    with torch.autocast(hidden.device.type, enabled=False):
        outputs = head(hidden.float())
        if isinstance(head, HistogramHead):
            return Values(head.bins.expectation(outputs), outputs)
        return Values(outputs.squeeze(-1), None)


def initialize_head(head: ValueHead, init: HeadInit) -> ValueHead:
    """Initialize a head in place: weights 0, or normal with std 1/√(d+1); the bias is 0 in both cases.

    A histogram head starts from such a scalar head, with a wide spread, and is shifted so that zero weights give the
    value 0. If 0 is outside the support or close to one of its ends, it starts at the value 5% inside that end.

    Source: spec §3.8 (N+), §7.34.
    """
    if isinstance(head, HistogramHead):
        scalar = nn.Linear(head.in_features, 1, device=head.weight.device)
        initialize_head(scalar, init)
        return head.start_from(scalar, shift=-_location_of_start(head.bins), relative_spread=NEW_SPREAD)
    for weight in head.parameters():
        nn.init.zeros_(weight)
    if init == "normal":
        nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
    return head


def find_head(
    folder: Path, *, trunk: str, own: Collection[str], ignored: Collection[str], width: int
) -> nn.Linear | None:
    """Find the head that another library saved with a model under a different name; None unless there is exactly one.

    OpenRLHF names it `value_head`, TRL `v_head.summary`, and LLaMA-Factory saves the latter in a separate file, so the
    head is recognized by its shape.

    Args:
        folder: The model's folder.
        trunk: Prefix of the names of the trunk's weights, which are skipped.
        own: The trunk's names without the prefix, as in files of a trunk alone.
        ignored: Patterns of names that are skipped as well.
        width: Width of the hidden states.

    Raises:
        ModelError: A file is damaged, or the head has several layers, of which only the last would be used.
    """
    try:
        skipped = re.compile("|".join([rf"^{re.escape(trunk)}\.", *ignored]))
        stored = [each for each in _stored(folder) if each.name not in own and not skipped.search(each.name)]
        rows = [each for each in stored if each.name.endswith(".weight") and each.shape[:-1] == [1]]
        found = [each for each in rows if each.shape == [1, width]] or rows
        if len(found) != 1:
            return None
        [row] = found
        part = [each for each in stored if each.part == row.part]
        # A preceding layer has as many outputs as this one has inputs.
        if any(each.shape[:1] == row.shape[1:] for each in part if len(each.shape) == 2):
            names = ", ".join(sorted(each.name for each in part)[:MAX_SHOWN])
            raise ModelError(
                f"{folder}: its head has several layers ({names}), and kedge reads one linear layer on the hidden "
                "states; use a reward model with such a head"
            )
        return _read_head(row, f"{row.name.removesuffix('weight')}bias") if row.shape == [1, width] else None
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"{folder}: the weights of its head cannot be read: {error}") from error


class _Stored(NamedTuple):
    """A tensor in one of a model's files."""

    path: Path
    name: str
    shape: list[int]

    @property
    def part(self) -> str:
        """The top-level module that the tensor belongs to, such as a head of several layers."""
        return self.name.partition(".")[0]


def _stored(folder: Path) -> list[_Stored]:
    found: list[_Stored] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found += [_Stored(path, name, file.get_slice(name).get_shape()) for name in sorted(file.keys())]
    return found


def _read_head(row: _Stored, bias: str) -> nn.Linear:
    with safe_open(row.path, framework="pt") as file:
        names = {row.name, bias} & {*file.keys()}
        found = {name.rpartition(".")[2]: file.get_tensor(name).float() for name in names}
    head = nn.Linear(row.shape[1], 1, bias="bias" in found, device="meta")
    head.load_state_dict(found, assign=True)
    return head


def scale_head(head: nn.Linear, gain: float) -> None:
    """Multiply a scalar head's output, in place."""
    for weight in head.parameters():
        weight.mul_(gain)


def _gaussian_logits(centers: Tensor, mean: Tensor, spread: float) -> Tensor:
    """A Gaussian's log density at the centers, up to a constant; linear in the mean."""
    return (mean * centers - centers.square() / 2) / spread**2


def _spread(bins: Bins, relative_spread: float) -> float:
    """Standard deviation of the initial histogram, wide enough that its expectation does not depend on the bins."""
    return max(relative_spread * (bins.high - bins.low), 0.75 * bins.width)


def _location_of_start(bins: Bins) -> float:
    """Find, by bisection, the Gaussian's mean for which the histogram's expectation is the start; it is monotone."""
    size = bins.high - bins.low
    start = min(max(0.0, bins.low + MARGIN * size), bins.high - MARGIN * size)
    low = bins.low - 4 * size
    high = bins.high + 4 * size
    centers = bins.centers(torch.empty(0, dtype=torch.float64))
    for _ in range(60):
        middle = (low + high) / 2
        logits = _gaussian_logits(centers, torch.tensor(middle, dtype=torch.float64), _spread(bins, NEW_SPREAD))
        if float(bins.expectation(logits)) < start:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def value_head_file(source: str | Path) -> Path | None:
    """The file of the value head saved with a policy by kedge or LLaMA-Factory; None without one.

    For a whole model on the hub, the file is downloaded; an adapter's was downloaded with the adapter.
    """
    model = find_model(source)
    model = model if os.path.isdir(model) else check_source(model)
    for name in (VALUE_HEAD_FILE, LLAMA_FACTORY_FILE):
        file = Path(model, name) if os.path.isdir(model) else repository_file(model, name)
        if file is not None and file.is_file():
            return file
    return None


def load_value_head(head: ValueHead, source: str | Path) -> bool:
    """Load the value head saved with a policy; returns False for a policy without one.

    A histogram head adopts the values of a saved scalar head. The reverse, and other bins, are rejected.

    Raises:
        ModelError: The saved head has a different width, different bins, or non-finite weights.
    """
    path = value_head_file(source)
    if path is None:
        return False
    not_a_head = f"{path}: not a value head of the model in this folder; move it away to start with a new one"
    try:
        # LLaMA-Factory's names are v_head.summary.weight and v_head.summary.bias.
        saved = {name.removeprefix("v_head.summary."): tensor for name, tensor in load_file(path).items()}
        bins = _bins_of(saved)
    except (RuntimeError, OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ModelError(not_a_head) from error
    if bins is not None and bins != _bins_of(head.state_dict()):
        raise ModelError(
            f"{path}: the value head has {bins.num_bins} bins from {bins.low:g} to {bins.high:g}; use it with "
            f"ppo.value_loss={{hl_gauss: [{bins.low:g}, {bins.high:g}, {bins.num_bins}]}}, or delete the file"
        )
    try:
        _fill(head, saved, scalar=bins is None)
    except RuntimeError as error:
        raise ModelError(not_a_head) from error
    if not all(weight.isfinite().all() for weight in head.parameters()):
        raise ModelError(f"{path}: the value head contains NaN or infinity")
    return True


def _bins_of(state: Mapping[str, Tensor]) -> Bins | None:
    """The bins in the state of a histogram head; None for a scalar head."""
    if "support" not in state:
        return None
    low, high = state["support"].float().tolist()
    return Bins(low, high, len(state["bias"]))


def _fill(head: ValueHead, saved: dict[str, Tensor], *, scalar: bool) -> None:
    if scalar:
        saved = {"bias": torch.zeros(1), **saved}
    if scalar and isinstance(head, HistogramHead):
        source = nn.Linear(head.in_features, 1, device=head.weight.device)
        source.load_state_dict(saved)
        head.start_from(source)
    else:
        head.load_state_dict(saved)
