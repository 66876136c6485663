"""`docs/benchmarks.md`, from what was measured."""

from __future__ import annotations

from bench.cases import ALIKE, DEFAULT, PEER, SFT, SHARED, cpu_cases
from bench.record import Record
from bench.systems import settings
from bench.tables import (
    Table,
    comparison_table,
    empty_gpu_table,
    gpu_table,
    growth_table,
    sft_table,
    vocabulary_table,
)
from bench.targets import target_table

__all__ = ["cpu_tables", "write_page"]

COMPARED = {
    "variable": "Variable lengths, 5.8 million parameters",
    "full": "Full lengths, 5.8 million parameters",
    "size-m": "Variable lengths, 14 million parameters",
}
GROWING = {
    "batch": "Growing batch",
    "response": "Growing responses, all of full length",
    "padding": "Growing padding, as many real tokens",
    "epochs": "Growing epochs",
    "vocabulary": "Growing vocabulary, one epoch",
}

INTRODUCTION = f"""\
# Benchmarks

Written by `make bench`; nothing on this page is entered by hand. {PEER} is the last release of TRL that has PPO.

## How it is measured

Every system is given the same model folders, prompts, lengths, epochs and threads. Each run is a process of its own
that has the machine to itself. The systems take turns, A B C A B C, so a ratio is of two runs that lie close
together. A run makes five updates, a growing one four; the first two are not counted. Seconds per update are taken
from outside, from one row of metrics on disk to the next, so they hold everything. Phases are what each system says
of itself. Peak memory is the process's largest resident set. A figure is the median over the rounds, with the lowest
and highest in brackets. What has no brackets ran in one round.

- **The workload.** Random Phi models, and a byte-level BPE learnt from Python's standard library, which also gives
  the prompts. The output layer's bias of EOS ends a response with the same probability at each token, so lengths vary
  as in use, for every system alike. *Variable lengths*: prompts of 16 to 64 tokens, responses of 24 on average before
  the cap of 64, so that about half of a padded batch is real. *Full lengths*: 64 and 64 tokens, no padding for
  anybody.
- **The update.** 32 prompts, a response each, four epochs of one minibatch. A reward model of the policy's size
  scores. The learning rate is next to 0, since a policy that learns changes its lengths, in each system by another
  amount.
- **Like for like.** A separate critic that starts from the reward model, in fp32: what TRL does.
- **kedge, default.** What a user gets: a value head on the policy's trunk, and bf16 matrix products where the
  processor has them and the model is wide enough.
- **The FLOP limit.** The least arithmetic of an update, in SFT steps on the same tokens. A forward pass is a third of
  such a step. Generation, reference and reward model are a forward pass each, every epoch is a step: ⅓ + ⅓ + ⅓ + 4 =
  5.0 with a shared trunk. A separate critic adds a forward pass for its values, and is trained as well: 4 × ⅓ + 8 =
  9.3. The step is that of `kedge sft` in fp32, in the same rounds, on the same prompts with completions as long as
  the responses.
- **Times faster** is TRL's seconds per update over the system's. **Real tokens** are those of prompts, and of
  responses up to and with EOS. TRL's phase *train* is all of an update that is not in the other three.
"""

GROWTH = """\
## How the cost grows

kedge alone, by default, 5.8 million parameters, variable lengths where nothing else is said. *Padding avoided* is the
part of a rectangle [batch, longest prompt + cap] that is not real tokens. Where padding grows, prompts and responses
become shorter alike and more of them make up an update, so that the real tokens are about as many in every row.
"""

VOCABULARY = """\
Memory grows with the vocabulary because the models do: embedding, output layer, their gradients and Adam's averages.
What a larger batch adds must not: the last column is the size of one tensor that holds every logit of the added
responses.
"""

NO_GPU = """\
No GPU was at hand, so there are no figures. `make bench-gpu` fills this table, for a Llama of half a billion random
parameters in bf16.
"""

GPU = """\
A Llama of half a billion random parameters in bf16, prompts and responses of 128 tokens, 32 of each per update. Peak
FLOP/s is what the card itself reaches in square bf16 products; memory is what is taken of the card's after an update.
"""

COMMANDS = """\
## Commands

```bash
make bench        # makes an environment for TRL in bench/.peer first
make bench-gpu    # the table of the GPU; needs a CUDA card
```

`python -m bench --help` tells what else there is: some cases only, more rounds, another number of threads. Beside
models and data, kedge was given on full lengths:

"""


def write_page(record: Record, gpu: Record | None) -> str:
    """The page as Markdown.

    Args:
        record: Of the processor, all cases.
        gpu: Of a GPU, or None where there was none.
    """
    tables = case_tables(record)
    compared = [_section(table) for name in COMPARED for table in tables[name]]
    growing = [_section(table) for name in GROWING for table in tables[name]]
    card = empty_gpu_table() if gpu is None else gpu_table(gpu.results["gpu"], gpu.card)
    parts = [
        INTRODUCTION,
        f"## Machine\n\n{_facts(record)}",
        f"## Targets\n\n{target_table(record.results).markdown()}\n",
        "## Beside TRL\n",
        *compared,
        GROWTH,
        *growing,
        VOCABULARY,
        f"## On a GPU\n\n{NO_GPU if gpu is None else GPU + _facts(gpu)}",
        f"{card.markdown()}\n",
        COMMANDS + _settings(),
    ]
    return "\n".join(parts)


def cpu_tables(record: Record) -> list[Table]:
    """That of the targets, then those of the cases that were measured."""
    return [target_table(record.results), *(table for tables in case_tables(record).values() for table in tables)]


def case_tables(record: Record) -> dict[str, list[Table]]:
    """The tables of each case that was measured."""
    tables: dict[str, list[Table]] = {}
    for case in cpu_cases(num_rounds=record.num_rounds):
        measured = record.results.get(case.name)
        if measured is None:
            continue
        if case.name in COMPARED:
            tables[case.name] = [comparison_table(COMPARED[case.name], measured)]
            tables[case.name] += [sft_table(measured)] if SFT in measured else []
        elif case.name == "vocabulary":
            tables[case.name] = [vocabulary_table(GROWING[case.name], measured)]
        else:
            tables[case.name] = [growth_table(GROWING[case.name], case, measured)]
    return tables


def _section(table: Table) -> str:
    return f"### {table.title}\n\n{table.markdown()}\n"


def _facts(record: Record) -> str:
    facts = {**record.machine, "rounds": str(record.num_rounds), **record.versions}
    return "\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n"


def _settings() -> str:
    """Kedge's overrides, as they stood on the command line."""
    [jobs] = [case.jobs for case in cpu_cases(num_rounds=1) if case.name == "full"]
    names = (ALIKE, DEFAULT, SHARED, SFT)
    return "\n".join(f"- {name}: `{' '.join(settings(jobs[name]))}`" for name in names) + "\n"
