"""`judge`: judges behind an API, and limits on the requests to them."""

from kedge.config.schema.field import field
from kedge.config.schema.section import Parameters, Section


class CostLimit(Parameters):
    """The most that judges may cost, with the prices of their tokens."""

    cost: float = field(..., gt=0, meaning="The most that a run may cost, in the prices' currency.", source="kedge")
    price_in: float = field(..., ge=0, meaning="Price of a million tokens of prompts.", source="the server's list")
    price_out: float = field(..., ge=0, meaning="Price of a million tokens of answers.", source="the server's list")


class JudgeConfig(Section):
    """Judges behind an API: `openai:MODEL@URL` as evaluate.judge, rlhf.labeler or a reward.

    The limits hold for all judges of a run together, also over failed requests and resumed runs.
    """

    rubric: str | None = field(
        None,
        meaning="A text file that says what a good response is; null is a short text of kedge's.",
        source="kedge: correct, as asked, no longer than needed",
        text="a file",
    )
    max_tokens: int = field(
        1024,
        ge=1,
        meaning="Maximum length of an answer with its reasoning, in tokens.",
        source="kedge: a few sentences before the verdict; a reasoning model needs more",
        too_high="each request reserves this much of max_total_tokens and max_cost until it ends",
        too_low="answers are cut off, and asked for again",
    )
    concurrency: int = field(
        8,
        ge=1,
        meaning="Requests at the same time.",
        source="kedge: most servers batch this many",
        too_high="requests wait on the server until they time out",
        too_low="slow",
    )
    requests_per_minute: int | None = field(
        None,
        ge=1,
        meaning="Most requests in any 60 seconds; null: no limit.",
        source="kedge: off",
        too_high="the server refuses requests, which are then repeated",
        too_low="slow",
    )
    max_requests: int | None = field(
        None,
        ge=1,
        meaning="Most requests of a run, failed ones included; null: no limit.",
        source="kedge: off",
        too_high="a mistake in the settings is expensive",
        too_low="the run ends early, and is resumed with a higher limit",
    )
    max_total_tokens: int | None = field(
        None,
        ge=1,
        meaning="Most tokens of prompts and answers of a run; null: no limit. A request is only sent if its upper "
        "bound fits.",
        source="kedge: off",
        too_high="a mistake in the settings is expensive",
        too_low="the run ends early, and is resumed with a higher limit",
    )
    max_cost: CostLimit | None = field(
        None, meaning="Most that a run may cost: {cost: 5, price_in: 0.15, price_out: 0.6}.", source="kedge: off"
    )
    timeout: float = field(
        120.0,
        gt=0,
        meaning="Seconds that a request may take.",
        source="kedge: a large model on a busy server",
        too_high="a server that hangs blocks the run",
        too_low="slow answers are paid for, and not used",
    )
    retries: int = field(
        5,
        ge=0,
        meaning="Further requests after one that failed with status 429 or 5xx, a timeout or a closed connection, "
        "after about 1 s, 2 s, 4 s and so on, or when the server says.",
        source="kedge: half a minute of failures is bridged",
        too_high="a server that is down delays the end of the run",
        too_low="a short failure ends the run",
    )
    key_variable: str | None = field(
        "OPENAI_API_KEY",
        meaning="Environment variable with the key, which is sent if the variable is set; null: none is sent.",
        source="OpenAI",
        text="a name",
    )
    allow_http: bool = field(
        False,
        meaning="Allow sending the key unencrypted (http) to another machine.",
        source="kedge: a key is for those who have it",
    )
