"""Small corpora on disk, a cache of its own for every test, and a package index in a thread."""

from __future__ import annotations

import http.server
import random
import threading
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Tests never touch the user's cache."""
    path = tmp_path / "cache"
    monkeypatch.setenv("SKIPLESS_CACHE", str(path))
    return path


@pytest.fixture(scope="session")
def cpython(tmp_path_factory):
    """A cache that holds the source `cpython`; reading the standard library takes seconds."""
    from skipless.data import fetch

    path = tmp_path_factory.mktemp("cpython")
    fetch("cpython", cache=path)
    return path


@pytest.fixture
def corpus(tmp_path):
    """A folder of ten different texts of about 3,000 characters."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    words = [
        "the",
        "king",
        "said",
        "that",
        "no",
        "man",
        "shall",
        "pass",
        "this",
        "gate",
        "before",
        "morning",
        "comes",
        "again",
    ]
    for number in range(10):
        chosen = random.Random(number)
        lines = [" ".join(chosen.choices(words, k=8)) + f" {number}." for _ in range(70)]
        (folder / f"text{number}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def index(monkeypatch):
    """A package index on this machine with one package, `toy`; it can break off downloads.

    `archive` what it serves, `break_after` bytes after which it hangs up (None: never),
    `ranges` the Range headers it saw.
    """
    state = SimpleNamespace(archive=b"", break_after=None, ranges=[])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.rstrip("/") == "/simple/toy":
                page = b'<!DOCTYPE html><a href="/files/toy-1.0.tar.gz">toy-1.0.tar.gz</a>'
                self._send(200, page, "text/html")
            elif self.path == "/files/toy-1.0.tar.gz":
                wanted = self.headers.get("Range")
                state.ranges.append(wanted)
                start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
                self._send(206 if wanted else 200, state.archive[start:], "application/gzip")
            else:
                self._send(404, b"no", "text/plain")

        def _send(self, code, body, kind):
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if kind == "application/gzip" and state.break_after is not None:
                body = body[: state.break_after]
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield state
    server.shutdown()
    server.server_close()
