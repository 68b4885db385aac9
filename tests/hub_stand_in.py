"""A hub on 127.0.0.1 that speaks the requests which huggingface_hub makes to push a folder; it keeps what it got."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_stand_in"


@dataclass
class HubStandIn:
    """What the hub has and was asked."""

    url: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: ``private`` and ``files``."""
    commits: list[dict[str, Any]] = field(default_factory=list)
    refuse: list[tuple[str, int]] = field(default_factory=list)
    """Parts of paths that are refused, once each and in this order, with the status of the answer."""
    uploads: dict[str, bytes] = field(default_factory=dict)
    """Large files by their sha256."""


@contextmanager
def hub() -> Iterator[HubStandIn]:
    """A hub that runs while the block does."""
    state = HubStandIn()

    class Handler(_Handler):
        hub = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if self._refused():
            return
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/\w+)?", path):
            self._info(match[1])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/main", path):
            files = self.hub.repositories[match[1]]["files"]
            self._answer(200, [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in files])
        else:
            self._answer(404, {"error": f"no {path}"}, {"X-Error-Code": "EntryNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self._refused():
            return
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.hub.repositories[name] = {"private": private, "files": {}}
            self._answer(200, {"url": f"{self.hub.url}/{name}", "id": name, "name": name})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [
                {"path": n, "uploadMode": "lfs" if n.endswith((".safetensors", ".gguf")) else "regular",
                 "shouldIgnore": False} for n in names
            ]  # fmt: skip
            self._answer(200, {"files": modes})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            put = [
                {**o, "actions": {"upload": {"href": f"{self.hub.url}/put/{o['oid']}", "header": {}}}} for o in objects
            ]
            self._answer(200, {"transfer": "basic", "objects": put})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {"error": f"no {path}"})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if not self._refused():
            self.hub.uploads[self.path.rpartition("/")[2]] = body
            self._answer(200, {})

    def _info(self, name: str) -> None:
        known = self.hub.repositories.get(name)
        if known is None:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        else:
            self._answer(200, {"id": name, "private": known["private"], "sha": "0" * 40, "tags": [], "siblings": []})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = self.hub.repositories[name]["files"]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"])
        self.hub.commits.append({"repo": name, **lines[0]["value"]})
        oid = f"{len(self.hub.commits):040x}"
        self._answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})

    def _refused(self) -> bool:
        is_upload = self.path.startswith("/put/")  # its address is secret itself, so the token is not sent
        if not is_upload and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials"})
            return True
        if self.hub.refuse and self.hub.refuse[0][0] in self.path:
            self._answer(self.hub.refuse.pop(0)[1], {"error": "it is refused"})
            return True
        return False

    def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)
