"""`checkpoint` and `push`: state saved for `--resume`, and uploads to the hub."""

from functools import partial

from kedge.config.schema.field import field
from kedge.config.schema.section import Parameters, Section, rewrite
from kedge.config.schema.update.former import with_parts


class SaveInterval(Parameters):
    """How often a checkpoint is saved."""

    updates: int | None = field(None, ge=1)
    """Updates between checkpoints, as the value alone; null: by time only.

    Source: kedge: off
    """
    minutes: float | None = field(10.0, gt=0)
    """Minutes between checkpoints, in addition to the updates; null: by updates only.

    Source: kedge: saving takes seconds, about 1% of the time, and a killed run loses at most ten minutes
    Too high: a killed run loses hours of work
    Too low: much of the run's time goes into saving
    """


class CheckpointConfig(Section):
    """Checkpoints for `--resume`. A killed run loses the work since its last one.

    They do not affect results, unless the guard rolls a run back to the newest one.
    """

    every: SaveInterval = SaveInterval()
    """Updates (optimizer steps in sft, reward and critic) between checkpoints, which are also saved every ten minutes;
    null: by time only. {updates: 50, minutes: 30} gives both.

    Source: kedge: an update takes milliseconds to minutes, so no one number suits all runs
    Too high: a killed run loses many updates
    Too low: much of the run's time goes into saving
    """
    keep: int = field(2, ge=1)
    """Number of newest checkpoints to keep; each is about three times the size of the trained weights.

    Source: kedge: if the newest is damaged, the one before it can be used
    Too high: the disk fills up
    Too low: with 1, a damaged checkpoint cannot be recovered from
    """
    keep_best: str = "auto"
    """Metric by which the best checkpoint is kept, beyond `keep`, as RUN@best; none: no metric. auto: with
    ppo.eval_every, eval/win_rate if evaluate.judge is set, else eval/score, or eval/total with a teacher
    (ppo.reference); with control.eval_every, eval/return_mean; otherwise none. A metric of the training batch, such as
    reward/score_mean, is that of the policy before the update, and the checkpoint is the one after it.

    Source: kedge: the last policy is often not the best, because the reward is over-optimized
    Text: auto, none or a metric
    """
    keep_last: bool = True
    """Keep the checkpoint of the last update when a run has finished, so that it can be extended.

    Source: kedge: a run of over ten minutes keeps checkpoints anyway, so this takes no further space there
    """
    sharded_above: int | None = field(1_000_000_000, ge=0)
    """With runtime.parallel=shard and more trained parameters than this, each rank writes its own part of weights and
    moments, in the layout of torch's distributed checkpoints; `kedge merge` makes a model of it. Otherwise the first
    rank collects and writes all of them; null: always.

    Source: kedge: whole, a billion parameters take 12 GB of the first rank's host memory while they are saved
    Too high: saving is slow, and weights and moments may not fit into the memory of one machine
    Too low: small checkpoints have to be merged before they are used as models
    """

    _read_former = rewrite(classmethod(partial(with_parts, section="checkpoint")))


class PushConfig(Section):
    """Pushing the finished model to the Hugging Face hub."""

    repo: str | None = None
    """Repository on the hub, org/name, that the finished model is pushed to; null pushes nothing. Token, name and
    rights are checked before the training.

    Source: kedge: nothing leaves the machine unasked
    Text: org/name
    """
    private: bool = False
    """Make a new repository private; an existing one stays as it is.

    Source: Hugging Face hub
    """
    existing: bool = False
    """Push to a repository even if its content was not pushed by kedge.

    Source: kedge: somebody's files are not overwritten unasked
    """
