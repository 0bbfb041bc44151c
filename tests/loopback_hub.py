"""A stand-in for the Hugging Face Hub on the loopback, of the standard library alone: just what huggingface_hub 2,
datasets 5 and transformers 5 call to make repositories and branches, to upload, list and download. Whoever has a token
may write; cards are not checked.

    python tests/loopback_hub.py DIR 8765
    HF_ENDPOINT=http://127.0.0.1:8765 HF_HUB_DISABLE_XET=1 HF_TOKEN=any python sft.py ...
"""

import base64
import hashlib
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

NOW = "2026-01-01T00:00:00.000Z"
# The Hub's default .gitattributes sends these to LFS whatever their size. datasets deletes a temporary parquet file
# right after it asked how to send it: as a regular file it would be read too late.
LARGE_FILES = (".parquet", ".arrow", ".safetensors")
LARGE = 10_000_000  # bytes


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Store:
    """Repositories in `root`: repos.json, and the content of files by its SHA-256 in blobs/."""

    def __init__(self, root: str):
        self.root, self.lock = Path(root), threading.RLock()
        (self.root / "blobs").mkdir(parents=True, exist_ok=True)
        # {"models/me/name": {"private", "refs": {"main": sha}, "commits": {sha: {"parent", "title", "files": {…}}}}}
        self.repos = {}

    def blob(self, sha: str) -> Path:
        return self.root / "blobs" / sha

    def put(self, content: bytes) -> str:
        sha = hashlib.sha256(content).hexdigest()
        self.blob(sha).write_bytes(content)
        return sha

    def commit(self, key: str, branch: str, title: str, files: dict, parent: str | None) -> str:
        repo = self.repos[key]
        about = json.dumps([key, parent, title, files, time.time_ns()], sort_keys=True)
        sha = hashlib.sha1(about.encode()).hexdigest()
        repo["commits"][sha] = {"parent": parent, "title": title, "files": files}
        repo["refs"][branch] = sha
        (self.root / "repos.json").write_text(json.dumps(self.repos, indent=1))
        return sha

    def entry(self, path: str, sha: str, large: bool) -> dict:
        """What a commit says of a file."""
        size = self.blob(sha).stat().st_size
        found = {"type": "file", "path": path, "size": size, "sha256": sha}
        if not large:
            return found | {"oid": git_oid(self.blob(sha).read_bytes())}
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {size}\n".encode()
        return found | {"oid": git_oid(pointer), "lfs": {"oid": sha, "size": size, "pointerSize": len(pointer)}}


class Refused(Exception):
    """An answer that is an error: HTTP code, message, and the code by which huggingface_hub knows it."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_):
        pass

    # ---- plumbing

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def send(self, code: int, content: bytes | dict | list, **headers: str):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self):
        url, body = urlsplit(self.path), self.body()
        try:
            if self.command in ("POST", "PUT") and not url.path.startswith("/_lfs/"):
                if not self.headers.get("Authorization", "").startswith("Bearer "):
                    raise Refused(401, "Invalid username or password.", "")
            for pattern, answer in ROUTES:
                if match := re.fullmatch(pattern, url.path):
                    parts = [unquote(part or "") for part in match.groups()]
                    with self.store.lock:
                        return answer(self, parse_qs(url.query), body, *parts)
            raise Refused(404, f"unhandled route {self.command} {url.path}", "")
        except Refused as refused:
            code, message, kind = refused.args
            self.send(code, {"error": message}, X_Error_Message=message, X_Error_Code=kind)

    do_HEAD = do_POST = do_PUT = do_GET

    def repo(self, kind: str, name: str) -> dict:
        if f"{kind}/{name}" not in self.store.repos:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return self.store.repos[f"{kind}/{name}"]

    def revision(self, repo: dict, name: str) -> str:
        name = name.removeprefix("refs/heads/")
        if name in repo["commits"]:
            return name
        if name not in repo["refs"]:
            raise Refused(404, f"Invalid rev id: {name}", "RevisionNotFound")
        return repo["refs"][name]

    def files(self, kind: str, name: str, revision: str) -> tuple[str, dict]:
        """(commit, its files)"""
        repo = self.repo(kind, name)
        sha = self.revision(repo, revision or "main")
        return sha, repo["commits"][sha]["files"]

    def base(self) -> str:
        return f"http://{self.headers.get('Host')}"

    # ---- API

    def whoami(self, query, body):
        token = {"accessToken": {"role": "write", "displayName": "fake"}}
        self.send(200, {"type": "user", "name": "me", "fullname": "me", "orgs": [], "auth": token})

    def validate_yaml(self, query, body):
        self.send(200, {"errors": [], "warnings": []})

    def create_repo(self, query, body):
        asked = json.loads(body)
        kind, name = f"{asked.get('type') or 'model'}s", f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = f"{self.base()}/{'' if kind == 'models' else kind + '/'}{name}"
        if f"{kind}/{name}" in self.store.repos:
            return self.send(409, {"error": "You already created this repo", "url": url, "id": name})
        self.store.repos[f"{kind}/{name}"] = {"private": bool(asked.get("private")), "refs": {}, "commits": {}}
        self.store.commit(f"{kind}/{name}", "main", "initial commit", {}, None)
        return self.send(200, {"url": url, "name": name, "id": name})

    def info(self, query, body, kind, name, revision=""):
        sha, files = self.files(kind, name, revision)
        siblings = []
        for path, entry in files.items():
            sibling = {"rfilename": path, "size": entry["size"], "blobId": entry["oid"]}
            if "lfs" in entry:
                sibling["lfs"] = {"sha256": entry["sha256"]} | entry["lfs"]
            siblings.append(sibling)
        about = {"_id": hashlib.md5(name.encode()).hexdigest()[:24], "id": name, "modelId": name, "sha": sha}
        about |= {"author": name.split("/")[0], "private": False, "disabled": False, "gated": False, "tags": []}
        about |= {"lastModified": NOW, "createdAt": NOW, "downloads": 0, "likes": 0, "siblings": siblings}
        self.send(200, about)

    def tree(self, query, body, kind, name, revision, folder=""):
        _, files = self.files(kind, name, revision)
        prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        everything = query.get("recursive", [""])[0].lower() in ("true", "1")
        folders, found = set(), []
        for path, entry in sorted(files.items()):
            if not path.startswith(prefix):
                continue
            *parents, _ = path.removeprefix(prefix).split("/")
            for i in range(len(parents) if everything else min(1, len(parents))):
                folders.add(prefix + "/".join(parents[: i + 1]))
            if everything or not parents:
                found.append(entry)
        if folder and not found and not folders:
            raise Refused(404, f"{folder} does not exist", "EntryNotFound")
        self.send(200, [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders)] + found)

    def paths_info(self, query, body, kind, name, revision):
        _, files = self.files(kind, name, revision)
        is_json = "json" in self.headers.get("Content-Type", "")
        paths = json.loads(body)["paths"] if is_json else parse_qs(body.decode()).get("paths", [])
        self.send(200, [files[path] for path in paths if path in files])

    def branch(self, query, body, kind, name, branch):
        repo = self.repo(kind, name)
        if branch in repo["refs"]:
            raise Refused(409, "Reference already exists", "")
        start = json.loads(body or b"{}").get("startingPoint") or "main"
        repo["refs"][branch] = self.revision(repo, start)
        self.send(200, {})

    def preupload(self, query, body, kind, name, revision):
        self.files(kind, name, revision)
        answers = []
        for file in json.loads(body)["files"]:
            large = file["size"] >= LARGE or file["path"].endswith(LARGE_FILES)
            mode = "lfs" if large else "regular"
            answers.append({"path": file["path"], "shouldIgnore": False, "uploadMode": mode})
        self.send(200, {"files": answers})

    def lfs_batch(self, query, body, kind, name):
        answers = []
        for asked in json.loads(body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if not self.store.blob(asked["oid"]).exists():
                answer["actions"] = {"upload": {"href": f"{self.base()}/_lfs/{asked['oid']}"}}
            answers.append(answer)
        self.send(200, {"transfer": "basic", "objects": answers})

    def lfs_put(self, query, body, oid):
        if self.store.put(body) != oid:
            raise Refused(400, "sha256 mismatch", "")
        self.send(200, {}, ETag=f'"{oid}"')

    def commit(self, query, body, kind, name, revision):
        parent, files = self.files(kind, name, revision)
        files, title = dict(files), ""
        for line in body.splitlines():
            said = json.loads(line)
            key, value = said["key"], said["value"]
            if key == "header":
                title = value["summary"]
            elif key == "file":
                sha = self.store.put(base64.b64decode(value["content"]))
                files[value["path"]] = self.store.entry(value["path"], sha, large=False)
            elif key == "lfsFile":
                files[value["path"]] = self.store.entry(value["path"], value["oid"], large=True)
            elif key == "deletedFile":
                files.pop(value["path"], None)
            else:
                raise Refused(400, f"unsupported operation {key}", "")
        sha = self.store.commit(f"{kind}/{name}", revision, title, files, parent)
        url = f"{self.base()}/{'' if kind == 'models' else kind + '/'}{name}/commit/{sha}"
        self.send(200, {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def resolve(self, query, body, kind, name, revision, path):
        sha, files = self.files(kind.rstrip("/") or "models", name, revision)
        if path not in files:
            message, code = "Entry not found", "EntryNotFound"
            return self.send(404, {}, X_Error_Code=code, X_Error_Message=message, X_Repo_Commit=sha)
        entry, headers = files[path], {"X_Repo_Commit": sha, "Content-Type": "application/octet-stream"}
        headers["ETag"] = f'"{entry["oid"]}"'
        if "lfs" in entry:
            headers["ETag"] = headers["X_Linked_Etag"] = f'"{entry["lfs"]["oid"]}"'
            headers["X_Linked_Size"] = str(entry["size"])
        return self.send(200, self.store.blob(entry["sha256"]).read_bytes(), **headers)


KIND, NAME = r"(models|datasets)", r"([\w.\-]+/[\w.\-]+)"
ROUTES = [
    (r"/api/whoami-v2", Handler.whoami),
    (r"/api/validate-yaml", Handler.validate_yaml),
    (r"/api/repos/create", Handler.create_repo),
    (rf"/api/{KIND}/{NAME}/preupload/([^/]+)", Handler.preupload),
    (rf"/api/{KIND}/{NAME}/commit/([^/]+)", Handler.commit),
    (rf"/api/{KIND}/{NAME}/tree/([^/]+)(?:/(.*))?", Handler.tree),
    (rf"/api/{KIND}/{NAME}/paths-info/([^/]+)", Handler.paths_info),
    (rf"/api/{KIND}/{NAME}/branch/(.+)", Handler.branch),
    (rf"/api/{KIND}/{NAME}/revision/([^/]+)", Handler.info),
    (rf"/api/{KIND}/{NAME}", Handler.info),
    (rf"/(datasets/)?{NAME}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"/_lfs/([0-9a-f]{64})", Handler.lfs_put),
    (rf"/(datasets/)?{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
]


def serve(root: str, port: int = 0) -> ThreadingHTTPServer:
    handler = type("HandlerOfStore", (Handler,), {"store": Store(root)})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    return server


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2])).serve_forever()
