"""Where models come from: folders, embedded ones, and a hub that may not be there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.cli_tools import run
from support.tiny_models import save_model, save_prm

from kvcore import Engine
from kvcore.models import load_model, load_prm, sources
from kvcore.models.embedded import DamagedWeights
from kvcore.models.sources import UnreachableModel, name_of, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No hub, and nothing in its cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))


def test_a_folder_comes_first_whatever_its_name(tmp_path, monkeypatch, offline):
    monkeypatch.chdir(tmp_path)
    folder = save_model(tmp_path / "owner" / "name")
    for source in ("owner/name", Path("owner/name"), folder):
        assert resolve(source).resolve() == folder
        assert load_model(source).name == "name"


@pytest.mark.parametrize("name", ["base", "helper", "prm"])
def test_embedded_models_go_by_name(name):
    folder = resolve(f"demo:{name}")
    assert folder.name == name and (folder / "model.safetensors").is_file()


def test_every_loader_takes_every_source():
    assert load_model("demo:base").name == "base"
    assert load_prm("demo:prm").has_head
    assert Engine.from_pretrained("demo:prm").model.has_head
    assert not Engine.from_pretrained("demo:helper").model.has_head


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "base: expected a directory, hub id or demo:NAME, got ''"),
        (None, "base: expected a directory, hub id or demo:NAME, got None"),
        ("nope", r"base: expected a model directory, got 'nope' \(nothing there"),
        ("/no/such", "base: expected a model directory, got '/no/such'"),
        ("a/b/c", "base: expected a model directory, got 'a/b/c'"),
        ("../x", "base: expected a model directory"),
        (__file__, r"\(a file\)"),
        ("demo:nope", "base: expected one of demo:base"),
    ],
)
def test_what_is_no_source_is_told(source, message):
    with pytest.raises(ValueError, match=message):
        resolve(source, "base")


def test_a_damaged_embedded_model_is_named(tmp_path, monkeypatch):
    from kvcore.models import embedded

    monkeypatch.setattr(embedded, "ROOT", tmp_path)
    with pytest.raises(DamagedWeights, match=r"manifest\.json"):
        load_model("demo:base")


def test_offline_says_what_to_download_and_how(offline):
    begin = time.monotonic()
    for load in (load_model, load_prm, Engine.from_pretrained):
        with pytest.raises(UnreachableModel) as caught:
            load("Some-Owner/some-model.v2")
        message = str(caught.value)
        assert "hf download Some-Owner/some-model.v2" in message and "--local-dir" in message
        assert "*.safetensors" in message and "cannot be reached" in message
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("flag", ["--base", "--helper", "--scorer"])
def test_offline_is_a_failure_that_names_the_flag(offline, flag):
    args = {"--base": "demo:base", flag: "Some-Owner/some-model", "--question": "x"}
    done = run("solve", *(part for pair in args.items() for part in pair))
    assert done.exit_code == 1
    expected = f"error: {flag}: expected a model directory, got 'Some-Owner/some-model'"
    assert done.output.startswith(expected)
    assert "hf download" in done.output and done.output.count("\n") == 1


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/c/models--Qwen--Qwen2.5-0.5B/snapshots/0123", "Qwen2.5-0.5B"),
        ("/c/models--a--b--c/snapshots/0123", "c"),
        ("/c/models--gpt2/snapshots/0123", "gpt2"),
        ("/c/my-model", "my-model"),
        ("/c/snapshots/0123", "0123"),
    ],
)
def test_a_hub_models_name_is_not_its_commit(folder, name):
    assert name_of(Path(folder)) == name


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a download needs, over the files of ``root``."""

    root: Path
    asked: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        files = sorted(f for f in self.root.rglob("*") if f.is_file())
        names = [str(f.relative_to(self.root)) for f in files]
        if not path.removeprefix("/api/models").startswith("/own/tiny"):
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/own/tiny/tree/"):
            entries = [
                {"type": "file", "path": n, "size": f.stat().st_size, "oid": str(i) * 40}
                for i, (n, f) in enumerate(zip(names, files, strict=True))
            ]
            self.answer(200, json.dumps(entries).encode())
        elif path.startswith("/api/models/own/tiny"):
            told = {"id": "own/tiny", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            self.answer(200, json.dumps(told).encode())
        else:
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            data = (self.root / name).read_bytes()
            tag = f'"{names.index(name):040d}"'
            self.answer(200, data, {"ETag": tag, "X-Repo-Commit": COMMIT})

    def answer(self, code: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        kind = "application/json"
        for key, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path):
    root = save_model(tmp_path / "served")
    (root / "README.md").write_text("not needed")
    (root / "pytorch_model.bin").write_bytes(b"not needed")
    (root / "onnx").mkdir()
    (root / "onnx" / "config.json").write_text("{}")
    handler = type("OwnHub", (Hub,), {"root": root, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, handler
    server.shutdown()


def load_in_process(source: str, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, kvcore\n"
        "try:\n"
        "    model = kvcore.load_model(sys.argv[1])\n"
        "    print(model.name, len(model.token_bytes))\n"
        "except ValueError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    import os

    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", code, source],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


def test_a_hub_model_is_downloaded_once_with_what_is_needed(hub, tmp_path):
    server, handler = hub
    endpoint, cache = f"http://127.0.0.1:{server.server_port}", tmp_path / "cache"
    done = load_in_process("own/tiny", endpoint, cache)
    assert done.stdout.strip() == "tiny 263", done.stdout + done.stderr
    fetched = {path.rpartition(f"{COMMIT}/")[2] for path in handler.asked if "/resolve/" in path}
    assert "config.json" in fetched and "model.safetensors" in fetched
    assert not fetched & {"README.md", "pytorch_model.bin", "onnx/config.json"}
    handler.asked.clear()
    assert load_in_process("own/tiny", endpoint, cache).stdout.strip() == "tiny 263"
    assert not any("/resolve/" in path for path in handler.asked)
    missing = load_in_process("own/none", endpoint, cache).stdout
    assert missing.startswith("UnreachableModel") and "is not on the hub" in missing
    server.shutdown()
    server.server_close()
    assert load_in_process("own/tiny", endpoint, cache).stdout.strip() == "tiny 263"
    gone = load_in_process("own/none", endpoint, cache).stdout
    assert "cannot be reached" in gone and "hf download own/none" in gone


def test_a_reward_model_is_told_from_a_language_model(tmp_path):
    assert Engine.from_pretrained(save_prm(tmp_path / "prm")).model.has_head
    assert not Engine.from_pretrained(save_model(tmp_path / "lm")).model.has_head


def test_finding_a_model_needs_no_torch():
    code = "import sys; from kvcore.models.sources import resolve; resolve('demo:base');"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    assert sources.PATTERNS
