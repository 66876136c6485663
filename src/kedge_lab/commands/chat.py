"""`kedge chat`: talk to one or two models."""

from typing import Annotated, Literal

import typer

from kedge.cli.options import PresetName, Reward, Seed, names_and_overrides, weighted_rewards
from kedge.config import load_config
from kedge_base.errors import ConfigError
from kedge_people.assignments import checked_name, own_name
from kedge_people.commands import write_answers


def chat(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL [MODEL]",
            help="One or two models (folder or id), and fields to set, e.g. runtime.device=cpu.",
        ),
    ],
    reward: Reward = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 by default.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum length of an answer in tokens; 64 by default.")
    ] = None,
    seed: Seed = None,
    form: Annotated[
        Literal["auto", "conversation", "text", "tldr"],
        typer.Option(help="How your text becomes a prompt; auto: as in the model's training, or by its chat template."),
    ] = "auto",
    web: Annotated[bool, typer.Option("--web", help="Chat in a browser on this machine instead.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port for --web; a free one by default.")] = None,
    labels: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="With --web: take thumbs and corrections into this folder of labels."),
    ] = None,
    person: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Name of the person who labels; your login name by default."),
    ] = None,
    preset: PresetName = None,
) -> None:
    """Chat with a model, or with two side by side, with a reward's scores beside the answers."""
    names, overrides = names_and_overrides(models)
    if port is not None and not web:
        raise ConfigError("--port needs --web")
    if labels is not None and not web:
        raise ConfigError("--labels needs --web")
    if labels == "":
        raise ConfigError("--labels is empty text; give a folder's name, or . for the current folder")
    if person is not None and labels is None:
        raise ConfigError("--as needs --labels")
    if len(names) not in (1, 2):
        raise ConfigError(f"kedge chat needs one or two models, not {len(names)}")
    flags = {
        "generate.temperature": temperature,
        "generate.max_new_tokens": max_new_tokens,
        "runtime.seed": seed,
        "reward": weighted_rewards(reward),
    }
    config = load_config(None, overrides, flags, preset, stage="generate")
    from contextlib import nullcontext, suppress

    from kedge_lab.chat import chat_on_terminal, chat_server, load_chat
    from kedge_people.corrections import Corrections

    name = own_name() if person is None else checked_name(person, "--as")
    with nullcontext() if labels is None else Corrections(labels, name) as corrections:
        loaded = load_chat(config, names, form=None if form == "auto" else form)
        if not web:
            chat_on_terminal(loaded)
            return
        with suppress(KeyboardInterrupt), chat_server(loaded, port=port or 0, corrections=corrections) as server:
            typer.echo(f"{server.url}\nOnly this machine can open it. Ctrl-C exits.")
            server.wait()
        if corrections is not None:
            write_answers(corrections.folder)
