"""When the critic's warm-up ends, and what a resumed run knows of it."""

import json

from kedge.training.controllers import ValueWarmup


def watch(warmup: ValueWarmup, *explained: float) -> list[str | None]:
    """What is said after each update."""
    return [
        warmup.observe(update, {"value/explained_variance": each}) for update, each in enumerate(explained, start=1)
    ]


def test_it_ends_after_the_first_update_that_explains_enough():
    warmup = ValueWarmup(most=5, until=0.4, num_updates=20)
    assert (warmup.num_updates, warmup.num_policy_updates) == (5, 15)
    said = watch(warmup, -0.2, 0.39, 0.4, 0.1, 0.9)
    assert said[:2] == said[3:] == [None, None]
    assert said[2] == (
        "The critic's warm-up ends after update 3: its values explain 0.4 of the variance of the returns on new "
        "responses (ppo.value_warmup_updates.until=0.4)."
    )
    assert (warmup.num_updates, warmup.num_policy_updates) == (3, 17)
    assert [warmup.trains_policy(update) for update in (3, 4)] == [False, True]
    assert [warmup.metrics(update)["value/warmup"] for update in (3, 4)] == [1.0, 0.0]


def test_it_ends_with_the_most_updates_if_it_does_not_get_there():
    warmup = ValueWarmup(most=2, until=0.4, num_updates=20)
    [first, last, later] = watch(warmup, 0.1, 0.3, 0.3)
    assert (first, later, warmup.num_updates) == (None, None, 2)
    assert "explain 0.3 of" in str(last)
    assert "less than ppo.value_warmup_updates.until=0.4, but ppo.value_warmup_updates=2 is the most." in str(last)


def test_a_length_that_is_known_is_kept_and_its_result_said():
    warmup = ValueWarmup(most=2, until=None, num_updates=20)
    [first, last] = watch(warmup, 0.9, 0.9)
    assert (first, warmup.num_updates, warmup.ends_by_result) == (None, 2, False)
    assert str(last).endswith("after update 2: its values explain 0.9 of the variance of the returns on new responses.")


def test_a_resumed_run_knows_when_it_ended():
    def fresh() -> ValueWarmup:
        return ValueWarmup(most=5, until=0.4, num_updates=20)

    ended, going_on = fresh(), fresh()
    watch(ended, 0.5)
    watch(going_on, 0.1)
    for warmup, length in ((ended, 1), (going_on, 5)):
        resumed = fresh()
        resumed.load_state_dict(json.loads(json.dumps(warmup.state_dict())))
        assert resumed.num_updates == length
