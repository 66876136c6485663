"""The presets against the published recipes, typed in by hand; a dash means kedge's default."""

import pytest

from kedge.config import PRESETS, load_config
from kedge.config.explain.describe import find_field
from kedge.config.loading.load import resolve
from kedge.errors import ConfigError

# learning rate, schedule | responses per update, epochs | β | γ, λ | ε, τ | c_v, c_e
FIELDS = (
    "ppo.learning_rate",
    "ppo.schedule",
    "rollout.num_prompts",
    "ppo.num_epochs",
    "ppo.kl_coef",
    "ppo.gamma",
    "ppo.gae_lambda",
    "ppo.clip_range",
    "rollout.temperature",
    "ppo.value_coef",
    "ppo.entropy_coef",
)
DASH = object()
TABLE = {
    "ziegler": (1e-5, "linear", 512, 4, 0.15, 1, 0.95, 0.2, 0.7, 0.1, 0),
    "stiennon": (1.5e-5, DASH, 512, 4, 0.05, 1, 0.95, DASH, DASH, 0.1, 0),
    "instructgpt": (DASH, "constant", 512, 1, 0.02, 1, DASH, 0.2, 1.0, DASH, DASH),
    "tldr-n+": (3e-6, "linear", 512, 4, 0.05, 1, 0.95, 0.2, 0.7, 0.1, 0),
    "s2-defaults": (1e-5, DASH, DASH, 4, DASH, DASH, DASH, 0.2, DASH, 0.5, 0.01),
}


@pytest.mark.parametrize(
    ("preset", "field", "value"),
    [(preset, *pair) for preset, row in TABLE.items() for pair in zip(FIELDS, row, strict=True)],
)
def test_recipes(preset: str, field: str, value: object) -> None:
    section, _, name = field.partition(".")
    if value is DASH:
        value = find_field(field).default if field != "ppo.schedule" else "linear"  # pyright: ignore
    assert load_config(preset=preset).model_dump()[section][name] == value


def test_values_that_the_papers_give_outside_the_table() -> None:
    ziegler, instruct = load_config(preset="ziegler").ppo, load_config(preset="instructgpt")
    assert (ziegler.kl.kl_controller, ziegler.kl.kl_target, ziegler.kl.kl_horizon) == ("ziegler", 6, 10_000)
    assert (instruct.ppo.loop.num_minibatches, instruct.responses_per_update // instruct.ppo.loop.num_minibatches) == (
        8,
        64,
    )
    assert instruct.ppo.optimizer.warmup_fraction > 0
    s2 = load_config(preset="s2-defaults").ppo
    assert s2.value.value_clip_range is None
    assert s2.value.value_weight == 1.0  # 0.5 × the squared error, which is not halved


def test_the_critics_of_the_papers() -> None:
    critics = {name: load_config(preset=name).ppo.value.critic for name in TABLE}
    assert critics == {
        "ziegler": "shared",
        "stiennon": "separate",
        "instructgpt": "separate",
        "tldr-n+": "separate",
        "s2-defaults": "shared",
    }


def test_the_list_of_presets() -> None:
    assert list(PRESETS) == ["tldr-n+", "instructgpt", "stiennon", "ziegler", "s2-defaults", "small-cpu"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_is_cited_and_valid(name: str) -> None:
    preset = PRESETS[name]
    assert all(cited.source for cited in preset.values.values())
    resolved = resolve([preset.settings])
    assert load_config(preset=name) == resolved.model_copy(update={"preset": name})


def test_small_cpu_is_sized_for_small_models() -> None:
    small = load_config(preset="small-cpu")
    assert small.ppo.loop.learning_rate >= 100 * load_config(preset="tldr-n+").ppo.loop.learning_rate
    assert small.responses_per_update == 64


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'best' does not exist; choose one of tldr-n\+"):
        load_config(preset="best")
