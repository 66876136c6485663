"""Pushes a model folder to the Hugging Face hub, with checks that can be made before hours of training.

A model replaces one that kedge pushed, as a new commit; a repository with any other content is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from kedge.models.adapters import ADAPTER_CONFIG, is_adapter, read_adapter
from kedge.models.adapters.folder import SHIFT_FILE
from kedge.models.origin import CARD, ORIGIN_FILE
from kedge.models.sources import check_source
from kedge_base.errors import ConfigError, ModelError, PushError
from kedge_base.machine.memory import with_unit
from kedge_base.texts import error_text, printable
from kedge_hub.card import PLACE

WEIGHTS = (".safetensors", ".safetensors.index.json", ADAPTER_CONFIG, SHIFT_FILE)
"""Suffixes of weight files, and of the files that accompany an adapter's weights."""
WRITE = "repo.write"

CLIENT_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    RuntimeError,
    *cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__),
)
"""Errors that the client raises: its own, and its HTTP library's, which differs between versions."""


def check_push(repo: str, *, existing: bool = False) -> None:
    """Check that a model can be pushed: the name, the token and its rights, and what the repository contains.

    Args:
        repo: `org/name`.
        existing: Allow a commit to a repository with content that kedge did not write.

    Raises:
        ConfigError: The model cannot be pushed; the message says why.
    """
    _check_name(repo)
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{repo} cannot be pushed to: HF_HUB_OFFLINE is set")
    if get_token() is None:
        raise ConfigError(f"{repo} cannot be pushed to: no token; run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    try:
        user = api.whoami()
        files = _pushed_files(api, repo)
    except CLIENT_ERRORS as error:
        refused = isinstance(error, HfHubHTTPError)
        what = "the hub refuses" if refused else f"{constants.ENDPOINT} cannot be reached"
        raise ConfigError(f"{repo} cannot be pushed to: {what}: {_reason(error)}") from error
    _check_rights(repo, user)
    if not existing and ORIGIN_FILE not in files and set(files) - {".gitattributes"}:
        raise ConfigError(
            f"{repo} exists, and kedge did not push its content; choose another name, or allow a new commit there with "
            "push.existing=true (kedge push: --existing)"
        )


def check_base(base: str | os.PathLike[str]) -> None:
    """Check that others can find the base of an adapter (`ConfigError` if it is a folder of this machine)."""
    if os.path.isdir(os.path.expanduser(base)):
        raise ConfigError(
            f"an adapter on {os.fspath(base)!r}, a folder of this machine, is of no use on the hub: push the merged "
            "model (kedge merge), or name a hub id in base_model_name_or_path of its adapter_config.json"
        )


def push_model(
    model: str | os.PathLike[str],
    repo: str,
    *,
    private: bool = False,
    existing: bool = False,
    dry_run: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Push a trained model; returns its address.

    Args:
        model: A run, a checkpoint of it, or a model's folder.
        repo: As in `push_folder`.
        private: See `push_folder`.
        existing: See `push_folder`.
        dry_run: Only list the files that would be pushed; with a token, also check that the hub would accept them.
        say: Prints a line to the user.

    Raises:
        ModelError: The folder does not exist, or has no model.
        ConfigError: See `check_push`; nothing is pushed.
        PushError: The hub refused, or the connection failed.
    """
    folder = Path(check_source(os.fspath(model)))
    if not folder.is_dir():
        raise ModelError(f"model {os.fspath(model)!r}: no such folder; only a folder can be pushed")
    files, left_out = _files_of(folder)
    if dry_run:
        _check_name(repo)
        for name, path in files.items():
            say(f"would push {name} ({with_unit(path.stat().st_size)})")
    if left_out:
        say(f"left out, since links and dot files are not pushed: {', '.join(map(printable, left_out))}")
    if not dry_run:
        return push_folder(folder, repo, private=private, existing=existing)
    if is_adapter(folder):
        check_base(read_adapter(folder).base)
    if constants.HF_HUB_OFFLINE or get_token() is None:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "there is no token"
        say(f"the hub was not asked if it takes them: {reason}")
    else:
        check_push(repo, existing=existing)
    return f"{constants.ENDPOINT}/{repo}"


def push_folder(folder: Path, repo: str, *, private: bool = False, existing: bool = False, again: str = "") -> str:
    """Push a model folder as one commit; returns the address of the model. Links and dot files are left out.

    An earlier model's weights and adapter settings that this folder lacks are deleted from the repository, since
    loaders could pick them up.

    Args:
        folder: The model's folder.
        repo: `org/name`; created if it does not exist.
        private: Make a new repository private; an existing one is unchanged.
        existing: As in `check_push`.
        again: The command that repeats the push, for the message.

    Raises:
        ConfigError: See `check_push` and `check_base`; nothing is pushed.
        PushError: The hub refused, or the connection failed. The folder is unchanged.
    """
    if is_adapter(folder):
        check_base(read_adapter(folder).base)
    try:
        check_push(repo, existing=existing)
        api = HfApi()
        api.create_repo(repo, private=True if private else None, exist_ok=True)
        files, _ = _files_of(folder)
        stale = [name for name in _pushed_files(api, repo) if name.endswith(WEIGHTS) and name not in files]
        added = [CommitOperationAdd(name, _content(name, path, repo)) for name, path in files.items()]
        deleted = [CommitOperationDelete(name) for name in stale]
        commit = api.create_commit(repo, [*added, *deleted], commit_message="Model trained with kedge")
    except CLIENT_ERRORS as error:
        if isinstance(error, ConfigError) and not again:  # raised by `kedge push`, where no training can be lost
            raise
        repeat = f"; push it again with: {again}" if again else ""
        raise PushError(f"{folder} is complete, but was not pushed to {repo}: {_reason(error)}{repeat}") from error
    return str(commit.repo_url)


def _files_of(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """List the files to push by name, and the names left out: dot files, and links, which may lead elsewhere."""
    files: dict[str, Path] = {}
    left_out: list[str] = []
    for parent, folders, names in os.walk(folder):
        for name in sorted([*folders, *names]):
            path = Path(parent, name)
            short = path.relative_to(folder).as_posix()
            if name.startswith(".") or path.is_symlink():
                left_out.append(short)
                if name in folders:
                    folders.remove(name)
            elif path.is_file():
                files[short] = path
    return dict(sorted(files.items())), left_out


def _check_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{repo!r} is not a name on the hub: {_reason(error)}") from error
    if "/" not in str(repo):
        raise ConfigError(f"{repo!r} is not a name on the hub; expected org/name or user/name")


def _check_rights(repo: str, user: Mapping[str, Any]) -> None:
    """Check that the token may write to the repository, if the hub gives the token's rights."""
    owner = repo.split("/")[0]
    name = str(user.get("name"))
    organizations = {str(entry.get("name")): entry for entry in user.get("orgs") or []}
    if owner != name and owner not in organizations:
        member = f", a member of {', '.join(organizations)}" if organizations else ""
        raise ConfigError(f"{repo} cannot be pushed to: the token is of {name}{member}, who cannot write to {owner}")
    if organizations.get(owner, {}).get("roleInOrg") == "read":
        raise ConfigError(f"{repo} cannot be pushed to: {name} may only read in {owner}")
    token = ((user.get("auth") or {}).get("accessToken")) or {}
    role = token.get("role")
    scopes = (token.get("fineGrained") or {}).get("scoped")
    if role == "read" or (role == "fineGrained" and scopes is not None and not _may_write(repo, scopes)):
        raise ConfigError(f"{repo} cannot be pushed to: the token may not write there; create one that may")


def _may_write(repo: str, scopes: Sequence[Mapping[str, Any]]) -> bool:
    """True if a token with fine-grained rights may write to the repository or its owner."""
    names = {repo, repo.split("/")[0]}
    return any(
        (scope.get("entity") or {}).get("name") in names and WRITE in (scope.get("permissions") or [])
        for scope in scopes
    )


def _pushed_files(api: HfApi, repo: str) -> list[str]:
    """List the files of a repository; none if it does not exist."""
    try:
        return api.list_repo_files(repo)
    except (RepositoryNotFoundError, RevisionNotFoundError):  # RevisionNotFoundError: it has no commit
        return []


def _content(name: str, path: Path, repo: str) -> str | bytes:
    """Return a file's content to push; in the card, the placeholder becomes the model's name on the hub."""
    if name == CARD:
        return path.read_bytes().replace(PLACE.encode(), repo.encode())
    return os.fspath(path)


def _reason(error: Exception) -> str:
    """The hub's message in a client's error, or else the error's own, without line breaks."""
    message = cast("str | None", getattr(error, "server_message", None))
    return printable(error_text(Exception(message) if message else error))
