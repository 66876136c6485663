"""Pushing with the real client to a stand-in for the hub on this machine: no network."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from kedge.cli import main
from kedge.config import config_from_settings
from kedge.runs.run import check_publishing
from kedge.stages.sft import run_sft
from kedge_base.errors import ConfigError, PushError
from kedge_hub.pushing import check_push, push_folder, push_model
from tests.tiny import save_tiny_policy

ME = {"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}, "orgs": [{"name": "crew"}]}


class Hub:
    """A hub with one user, holding the files of its repositories."""

    def __init__(self) -> None:
        self.user: dict[str, Any] = ME
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: list[str] = []
        self.requests: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.fails = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        self.requests.append(f"{method} {path}")
        if self.fails and self.fails in path:
            return 403, {"error": "the disk is full"}  # the client repeats after 500, with pauses
        if path == "/api/whoami-v2":
            return 200, self.user
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            values = json.loads(body)
            name = f"{values['organization'] or 'me'}/{values['name']}"
            if name in self.repos:
                return 409, {"error": "exists", "url": f"{self.url}/{name}"}
            self.repos[name] = {".gitattributes": b""}
            self.private += [name] if values.get("visibility") == "private" else []
            return 200, {"url": f"{self.url}/{name}", "id": name}
        if path.startswith("/lfs/"):
            self.objects[path.removeprefix("/lfs/")] = body
            return 200, {}
        owner, name, *rest = path.removeprefix("/api/models/").removeprefix("/").split("/")
        return self.of_repo(f"{owner}/{name.removesuffix('.git')}", "/".join(rest), body)

    def of_repo(self, repo: str, rest: str, body: bytes) -> tuple[int, Any]:
        files = self.repos.get(repo)
        if files is None:
            return 404, {"error": "Repository not found"}
        if rest.startswith("preupload"):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            sent = {"shouldIgnore": False, "oid": None}
            return 200, {"files": [{"path": name, "uploadMode": mode, **sent} for name, mode in modes.items()]}
        if rest == "info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            return 200, {"objects": [{**each, "actions": {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}}
                                     for each in objects], "transfer": "basic"}  # fmt: skip
        if rest.startswith("commit"):
            self.commit(files, [json.loads(line) for line in body.splitlines()])
            return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{repo}/commit/{'0' * 40}"}
        assert rest == "tree/main"
        return 200, [{"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40} for name in files]

    def commit(self, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]

    url = ""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, values = hub.answer(self.command, self.path, body)
            content = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status >= 400:
                self.send_header("X-Error-Code", "RepoNotFound" if status == 404 else "Refused")
                self.send_header("X-Error-Message", values["error"])
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # The stand-in speaks git-lfs, as the hub does to clients without Xet.
        monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield hub
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "kedge.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\0" * 100)
    (model / "README.md").write_text('name = "path/to/this/folder"\n')
    return model


def test_a_model_arrives_whole_and_its_card_names_it(hub, folder):
    assert push_folder(folder, "crew/ship", private=True) == f"{hub.url}/crew/ship"
    pushed = dict(hub.repos["crew/ship"])
    assert pushed.pop(".gitattributes") == b""
    assert pushed.pop("README.md") == b'name = "crew/ship"\n'
    assert pushed == {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}
    assert hub.private == ["crew/ship"]
    requests = hub.requests[hub.requests.index("GET /api/whoami-v2") :]  # the client may first look for news
    assert [line.partition("/api/")[2] or "lfs" for line in requests] == [
        "whoami-v2",
        "models/crew/ship/tree/main",
        "repos/create",
        "models/crew/ship/tree/main",
        "validate-yaml",
        "models/crew/ship/preupload/main",
        "lfs",  # where to
        "lfs",  # the weights
        "models/crew/ship/commit/main",
    ]


def test_links_and_dot_files_stay_here_and_a_dry_run_says_so(hub, folder, tmp_path, monkeypatch, capfd):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("private")
    (folder / "link").symlink_to(secret / "key")
    (folder / "loop").symlink_to(folder)
    (folder / ".env").write_text("TOKEN=1")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "key").write_text("1")
    monkeypatch.setattr(sys, "argv", ["kedge", "push", str(folder), "me/ship", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    shown = capfd.readouterr()
    assert shown.out == f"{hub.url}/me/ship\n"
    assert shown.err.splitlines() == [
        *(f"would push {name}" for name in ("README.md (29 bytes)", "config.json (2 bytes)", "kedge.json (2 bytes)")),
        "would push model.safetensors (100 bytes)",
        "left out, since links and dot files are not pushed: .cache, .env, link, loop",
    ]
    assert "me/ship" not in hub.repos
    said: list[str] = []
    with monkeypatch.context() as without:
        without.setattr("kedge_hub.pushing.get_token", lambda: None)
        assert push_model(folder, "me/ship", dry_run=True, say=said.append) == f"{hub.url}/me/ship"
    assert said == [*shown.err.splitlines(), "the hub was not asked if it takes them: there is no token"]
    push_model(folder, "me/ship")
    sent = {".gitattributes", "README.md", "config.json", "kedge.json", "model.safetensors"}
    assert set(hub.repos["me/ship"]) == sent


def test_a_newer_model_replaces_one_of_kedges_and_its_weights(hub, folder):
    hub.repos["me/ship"] = {"kedge.json": b"", "model-00001-of-00002.safetensors": b"old", "notes.md": b"kept"}
    push_folder(folder, "me/ship")
    assert set(hub.repos["me/ship"]) == {*(path.name for path in folder.iterdir()), "notes.md"}


def test_a_whole_model_replaces_an_adapter_with_all_of_its_files(hub, folder):
    files = ("kedge.json", "adapter_config.json", "adapter_model.safetensors", "score_shift.json", "notes.md")
    hub.repos["me/ship"] = dict.fromkeys(files, b"")
    push_folder(folder, "me/ship")
    assert set(hub.repos["me/ship"]) == {*(path.name for path in folder.iterdir()), "notes.md"}


def test_an_adapter_whose_base_is_a_folder_of_this_machine_is_not_pushed(hub, folder, tmp_path):
    """Its address would tell the machine's paths, and nobody could load it; a run that would end so does not begin."""
    adapter, base = tmp_path / "adapter", folder
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    for named, is_refused in ((str(base), True), ("org/base", False)):
        settings = {"peft_type": "LORA", "base_model_name_or_path": named}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
        if not is_refused:
            push_model(adapter, "me/adapter")
            continue
        for dry_run in (True, False):
            with pytest.raises(ConfigError, match=r"push the merged model \(kedge merge\)"):
                push_model(adapter, "me/adapter", dry_run=dry_run)
        assert "me/adapter" not in hub.repos
        given = {"model": str(base), "demonstrations": "d.jsonl", "push.repo": "me/adapter"}
        with pytest.raises(ConfigError, match="is of no use on the hub"):
            check_publishing(config_from_settings("sft", {**given, "adapter.kind": "lora"}))
        check_publishing(config_from_settings("sft", given))
    assert "adapter_model.safetensors" in hub.repos["me/adapter"]


def test_what_kedge_did_not_push_is_left_alone(hub, folder):
    hub.repos["me/ship"] = {".gitattributes": b"", "README.md": b"mine"}
    with pytest.raises(ConfigError, match="me/ship exists, and kedge did not push its content; choose another name"):
        push_folder(folder, "me/ship")
    assert hub.repos["me/ship"]["README.md"] == b"mine"
    push_folder(folder, "me/ship", existing=True)
    assert "model.safetensors" in hub.repos["me/ship"]


@pytest.mark.parametrize(
    ("repo", "user", "reason"),
    [
        ("ship", ME, "'ship' is not a name on the hub; expected org/name"),
        ("me/a b", ME, "'me/a b' is not a name on the hub"),
        ("other/ship", ME, "the token is of me, a member of crew, who cannot write to other"),
        ("me/ship", {**ME, "auth": {"accessToken": {"role": "read"}}}, "the token may not write there"),
        ("crew/ship", {**ME, "orgs": [{"name": "crew", "roleInOrg": "read"}]}, "me may only read in crew"),
    ],
)
def test_a_push_that_must_fail_is_refused_before_the_training(hub, repo, user, reason):
    hub.user = user
    with pytest.raises(ConfigError, match=reason):
        check_push(repo)


def test_fine_grained_tokens(hub):
    def token(entity: str, permission: str) -> dict[str, Any]:
        scoped = [{"entity": {"name": entity}, "permissions": [permission]}]
        return {**ME, "auth": {"accessToken": {"role": "fineGrained", "fineGrained": {"scoped": scoped}}}}

    for user in (token("crew", "repo.write"), token("me/ship", "repo.write"), token("me", "repo.content.read")):
        hub.user = user
        with pytest.raises(ConfigError, match="the token may not write there"):
            check_push("me/boat")
    hub.user = token("me", "repo.write")
    check_push("me/boat")


def test_no_token_no_network_no_hub(hub, monkeypatch):
    hub.fails = "whoami"
    with pytest.raises(ConfigError, match="me/ship cannot be pushed to: the hub refuses: the disk is full"):
        check_push("me/ship")
    monkeypatch.setattr("kedge_hub.pushing.get_token", lambda: None)
    with pytest.raises(ConfigError, match="no token; run `hf auth login`, or set HF_TOKEN"):
        check_push("me/ship")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_push("me/ship")


def test_a_stage_pushes_what_it_trained_and_a_failure_costs_nothing(hub, tmp_path, capfd):
    rows = [{"prompt": f"Deck {number}:", "completion": " the sea"} for number in range(4)]
    policy = save_tiny_policy(tmp_path / "policy")

    def train(name: str, repo: str) -> Any:
        settings = {"model": str(policy), "out": str(tmp_path / name), "push.repo": repo, "runtime.report": False}
        return run_sft(config_from_settings("sft", {**settings, "num_epochs": 1}), demonstrations=rows)

    result = train("run", "me/ship")
    assert hub.repos["me/ship"]["model.safetensors"] == (result.model / "model.safetensors").read_bytes()
    assert f"pushed to {hub.url}/me/ship" in capfd.readouterr().err
    hub.fails = "preupload"
    again = f"push it again with: kedge push {tmp_path / 'second'} me/boat"
    with pytest.raises(PushError, match="is complete, but was not pushed to me/boat: the disk is full") as failed:
        train("second", "me/boat")
    assert str(failed.value).endswith(again)
    assert (tmp_path / "second" / "finished.json").is_file()
    assert (tmp_path / "second" / "model" / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="who cannot write to other"):
        train("third", "other/boat")
    assert not (tmp_path / "third").exists()
