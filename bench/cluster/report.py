"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.cluster.check import Band
from bench.cluster.layouts import cheapest
from bench.cluster.update import UpdateTime
from bench.cluster.work import Layout, Workload

MOST_LAYOUTS = 8
GIGABYTE = 1e9


def plan_report(best: UpdateTime, updates: Sequence[UpdateTime], band: Band, *, lengths_known: bool) -> str:
    """The update, its phases and memory on the cheapest layout, other layouts, and the error band."""
    return "\n".join(
        [
            *_head(best.work, lengths_known),
            "",
            *_phases(best),
            "",
            *_memory(best),
            "",
            *_others(best, updates),
            "",
            *_band(best, band),
        ]
    )


def layout_name(layout: Layout) -> str:
    """Such as `48 cards train, 16 sample, servers of 2 cards, one step off`."""
    servers = _count(layout.tensor_parallel, "card")
    if not layout.apart:
        return f"{_count(layout.cards, 'card')} in turns, servers of {servers}, synchronous"
    pace = "one step off" if layout.staleness else "synchronous"
    return f"{_count(layout.training_cards, 'card')} train, {layout.rollout_cards} sample, servers of {servers}, {pace}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one}" if number == 1 else f"{number:,} {many or one + 's'}"


def _head(work: Workload, lengths_known: bool) -> Iterator[str]:
    policy = work.policy
    size = f"{policy.parameters / 1e9:.1f}B parameters"
    used = f", {policy.active / 1e9:.1f}B per token" if policy.is_mixture else ""
    yield f"policy: {size}{used} ({policy.origin})"
    assumed = "" if lengths_known else " (longest response assumed: give it)"
    yield (
        f"update: {_count(work.responses, 'response')}; prompts of {work.prompt:,.0f} tokens, at most "
        f"{work.longest_prompt:,.0f}; responses of {work.response:,.0f}, at most {work.longest_response:,.0f}{assumed}"
    )
    critic = {"shared": "critic on the policy's trunk", "separate": "critic of its own", "none": "no critic"}
    reward = f"reward model of {work.reward.parameters / 1e9:.1f}B" if work.reward else "reward function"
    reference = "reference" if work.reference else "no reference"
    steps = f"{_count(work.epochs, 'epoch')} of {_count(work.minibatches, 'minibatch', 'minibatches')}"
    yield f"        {steps}; {critic[work.critic]}, {reference}, {reward}"


def _phases(best: UpdateTime) -> Iterator[str]:
    yield f"cheapest that fits: {layout_name(best.layout)}; {best.layout.card.name}"
    yield (
        f"  {_seconds(best.seconds)} s per update, {best.card_seconds / 3.6:,.0f} card-hours per 1,000 updates, "
        f"{best.tokens_per_second:,.0f} tokens per second and card"
    )
    rollout = best.rollout
    running_empty = f", {_seconds(rollout.tail)} s of it while servers run empty" if rollout.tail else ""
    meanwhile = " (while the trainer works)" if best.layout.staleness else ""
    rows = [
        ("rollout", rollout.seconds, f"{rollout.limit}{running_empty}{meanwhile}"),
        ("passes", best.experience.seconds, f"{best.experience.limit}; {_passes(best.work)}"),
        ("training", best.training.seconds, best.training.limit),
        ("weight sync", best.sync, ""),
        ("other", best.other, "scoring, moving data, barriers"),
        ("waiting", best.waiting, "of the average card, for the other side"),
    ]
    for name, seconds, about in rows:
        share = 100 * seconds / best.seconds
        yield f"  {name:<12}{_seconds(seconds):>9} s {share:>4.0f} %  {about}".rstrip()
    yield f"bottleneck: {best.bottleneck}"


def _passes(work: Workload) -> str:
    """The models that read the samples once."""
    named = {"old log probabilities": work.old_logprobs, "reference": work.reference,
             "critic": work.critic == "separate", "reward model": work.reward is not None}  # fmt: skip
    return ", ".join(name for name, runs in named.items() if runs)


def _memory(best: UpdateTime) -> Iterator[str]:
    trainer = best.trainer
    server = best.server
    card = best.layout.card
    yield (
        f"memory per training card: {trainer.bytes / GIGABYTE:.1f} of {card.memory / GIGABYTE:.0f} GB "
        f"(weights, gradients, Adam {trainer.state / GIGABYTE:.1f}; frozen models {trainer.frozen / GIGABYTE:.1f}; "
        f"gathered {trainer.gathered / GIGABYTE:.1f}; activations of {trainer.micro_batch:,.0f} tokens "
        f"{trainer.activations / GIGABYTE:.1f})"
    )
    yield (
        f"memory per server card: weights {server.weights / GIGABYTE:.1f} GB, room for keys and values "
        f"{server.room / GIGABYTE:.1f} GB: {best.rollout.rows:,.0f} responses at once"
    )


def _others(best: UpdateTime, updates: Sequence[UpdateTime]) -> Iterator[str]:
    fitting = [each for each in updates if each.problem is None]
    numbers = sorted({each.layout.cards for each in updates})
    yield f"{len(updates)} layouts tried, {len(fitting)} fit:"
    if len(numbers) > 1:
        chosen = [cheapest([each for each in updates if each.layout.cards == number]) for number in numbers]
        rows = [each for each in chosen if each]
        yield from (f"  {_count(number, 'card')}: nothing fits" for number, each in zip(numbers, chosen, strict=True)
                    if each is None)  # fmt: skip
    else:
        rows = sorted(fitting, key=lambda each: each.seconds)[:MOST_LAYOUTS]
    for each in rows:
        mark = "*" if each is best else " "
        hours = f"{each.card_seconds / 3.6:,.0f} card-hours per 1,000"
        yield f"{mark} {_seconds(each.seconds):>8} s  {hours:>30}  {layout_name(each.layout)}; {each.bottleneck}"
    # Stale samples cost learning that no clock shows.
    synchronous = cheapest([each for each in updates if not each.layout.staleness])
    if best.layout.staleness and synchronous:
        yield f"cheapest that is synchronous: {_seconds(synchronous.seconds)} s, {layout_name(synchronous.layout)}"


def _band(best: UpdateTime, band: Band) -> Iterator[str]:
    low = band.low * best.seconds
    high = band.high * best.seconds
    yield f"error band: {_seconds(low)} to {_seconds(high)} s per update ({band.low:g} to {band.high:g} times)"
    yield f"  from published figures: {band.why}"
    for row, seconds in band.checks:
        cards = f"{row.layout.cards} {row.layout.card.name}"
        yield f"  {row.name}, {cards}: {row.seconds:g} s, here {seconds:.0f} s ({row.seconds / seconds:.2f} times)"
    for source in dict.fromkeys(row.source for row, _ in band.checks):
        yield f"  source: {source}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2f}"
