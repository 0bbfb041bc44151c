"""A stand-in for the Hugging Face Hub on the loopback, of the standard library alone: just what huggingface_hub 2,
datasets 5 and transformers 5 call to make repositories and branches, to upload, list and download. Whoever has a token
may write; cards are not checked.

    python tests/loopback_hub.py --root DIR --port 8765
    HF_ENDPOINT=http://127.0.0.1:8765 HF_HUB_DISABLE_XET=1 HF_TOKEN=any python sft.py ...
"""

import argparse
import base64
import hashlib
import json
import os
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

NOW = "2026-01-01T00:00:00.000Z"
# the Hub's default .gitattributes sends these to LFS whatever their size; datasets>=5 deletes its
# temporary parquet shard right after preupload, so ".parquet" -> "regular" breaks push_to_hub
LFS_EXT = (
    ".parquet",
    ".arrow",
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gz",
    ".zip",
    ".tar",
    ".zst",
    ".npy",
    ".npz",
    ".h5",
    ".onnx",
    ".msgpack",
    ".model",
)


class Store:
    def __init__(self, root, lfs_threshold):
        self.root, self.lfs_threshold, self.lock = root, lfs_threshold, threading.RLock()
        os.makedirs(os.path.join(root, "blobs"), exist_ok=True)
        self.path = os.path.join(root, "repos.json")
        # {"models/me/name": {"private", "refs": {"main": sha}, "commits": {sha: {"parent", "title", "files": {…}}}}}
        self.repos = json.load(open(self.path)) if os.path.exists(self.path) else {}

    def save(self):
        with open(self.path + ".tmp", "w") as f:
            json.dump(self.repos, f, indent=1)
        os.replace(self.path + ".tmp", self.path)

    def blob(self, sha):
        return os.path.join(self.root, "blobs", sha)

    def put(self, data):
        sha = hashlib.sha256(data).hexdigest()
        if not os.path.exists(self.blob(sha)):
            with open(f"{self.blob(sha)}.tmp{threading.get_ident()}", "wb") as f:
                f.write(data)
            os.replace(f.name, self.blob(sha))
        return sha

    def create(self, key, private):
        r = {"private": private, "refs": {}, "commits": {}}
        self.repos[key] = r
        self.commit(key, "main", "initial commit", {}, None)

    def commit(self, key, branch, title, files, parent):
        r = self.repos[key]
        sha = hashlib.sha1(json.dumps([key, parent, title, files, time.time_ns()], sort_keys=True).encode()).hexdigest()
        r["commits"][sha] = {"parent": parent, "title": title, "files": files}
        r["refs"][branch] = sha
        self.save()
        return sha

    def entry(self, path, sha, lfs):
        size = os.path.getsize(self.blob(sha))
        if lfs:
            ptr = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {size}\n".encode()
            oid, extra = git_oid(ptr), {"lfs": {"oid": sha, "size": size, "pointerSize": len(ptr)}}
        else:
            oid, extra = git_oid(open(self.blob(sha), "rb").read()), {}
        return {"type": "file", "path": path, "size": size, "oid": oid, "sha256": sha, **extra}


def git_oid(b):
    return hashlib.sha1(b"blob %d\0" % len(b) + b).hexdigest()


def pub(e):
    return {k: v for k, v in e.items() if k != "sha256"}


class H(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store = None
    quiet = False

    def log_message(self, fmt, *a):
        if not self.quiet:
            sys.stderr.write("{} {}\n".format(time.strftime("%T"), fmt % a))

    # ---- plumbing
    def body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            out = []
            while n := int(self.rfile.readline().split(b";")[0], 16):
                out.append(self.rfile.read(n))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(out)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, code, obj=None, headers=None, raw=None):
        data = raw if raw is not None else json.dumps(obj if obj is not None else {}).encode()
        self.send_response(code)
        h = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        for k, v in h.items():
            self.send_header(k, v)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def err(self, code, msg, ecode=None):
        self.send(code, {"error": msg}, {"X-Error-Message": msg, **({"X-Error-Code": ecode} if ecode else {})})

    def do_GET(self):
        self.route()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def route(self):
        u = urlsplit(self.path)
        p, q = u.path, parse_qs(u.query)
        body = self.body()
        if (
            self.command != "HEAD"
            and self.command != "GET"
            and not self.headers.get("Authorization", "").startswith("Bearer ")
            and not p.startswith("/_lfs/")
        ):
            return self.err(401, "Invalid username or password.")
        with self.store.lock:
            try:
                for rx, fn in ROUTES:
                    m = rx.fullmatch(p)
                    if (
                        m
                        and (r := fn(self, q, body, *[unquote(x) if x else x for x in m.groups()]))
                        is not NotImplemented
                    ):
                        return r
            except BrokenPipeError:
                return
            except Exception as e:  # report, do not hang the client
                import traceback

                traceback.print_exc()
                return self.err(500, repr(e))
        self.log_message("UNHANDLED %s %s", self.command, self.path)
        self.err(404, "unhandled route " + p)

    # ---- helpers
    def repo(self, typ, rid):
        r = self.store.repos.get(f"{typ}/{rid}")
        if r is None:
            self.err(404, "Repository not found", "RepoNotFound")
        return r

    def rev(self, r, rev):
        sha = (
            r["refs"].get(rev)
            or r["refs"].get((rev or "").replace("refs/heads/", ""))
            or (rev if rev in r["commits"] else None)
        )
        if sha is None:
            self.err(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        return sha

    # ---- API
    def whoami(self, q, body):
        self.send(
            200,
            {
                "type": "user",
                "name": "me",
                "fullname": "me",
                "email": "me@localhost",
                "orgs": [{"name": "org"}],
                "auth": {"accessToken": {"role": "write", "displayName": "fake"}},
            },
        )

    def yaml(self, q, body):
        self.send(200, {"errors": [], "warnings": []})

    def create_repo(self, q, body):
        d = json.loads(body)
        typ, rid = (d.get("type") or "model") + "s", f"{d.get('organization') or 'me'}/{d['name']}"
        url = f"{self.base()}/{'' if typ == 'models' else typ + '/'}{rid}"
        if f"{typ}/{rid}" in self.store.repos:
            return self.send(409, {"error": "You already created this repo", "url": url, "id": rid})
        self.store.create(f"{typ}/{rid}", d.get("visibility") == "private" or bool(d.get("private")))
        self.send(200, {"url": url, "name": rid, "id": rid})

    def base(self):
        return "http://" + self.headers.get("Host")

    def info(self, q, body, typ, rid, rev=None):
        if (r := self.repo(typ, rid)) is None or (sha := self.rev(r, rev or "main")) is None:
            return
        fs = r["commits"][sha]["files"]
        self.send(
            200,
            {
                "_id": hashlib.md5(rid.encode()).hexdigest()[:24],
                "id": rid,
                "modelId": rid,
                "author": rid.split("/")[0],
                "sha": sha,
                "private": r["private"],
                "disabled": False,
                "gated": False,
                "lastModified": NOW,
                "createdAt": NOW,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [
                    {
                        "rfilename": f,
                        **(
                            {
                                "size": e["size"],
                                "blobId": e["oid"],
                                **(
                                    {
                                        "lfs": {
                                            "sha256": e["lfs"]["oid"],
                                            "size": e["lfs"]["size"],
                                            "pointerSize": e["lfs"]["pointerSize"],
                                        }
                                    }
                                    if "lfs" in e
                                    else {}
                                ),
                            }
                            if "blobs" in q
                            else {}
                        ),
                    }
                    for f, e in fs.items()
                ],
            },
        )

    def tree(self, q, body, typ, rid, rev, sub=None):
        if (r := self.repo(typ, rid)) is None or (sha := self.rev(r, rev)) is None:
            return
        fs, sub = r["commits"][sha]["files"], (sub or "").strip("/")
        rec, out, dirs = q.get("recursive", ["false"])[0].lower() in ("true", "1"), [], set()
        pre = sub + "/" if sub else ""
        for f, e in sorted(fs.items()):
            if not f.startswith(pre):
                continue
            parts = f[len(pre) :].split("/")
            for i in range(1, len(parts) if rec else min(2, len(parts))):
                dirs.add(pre + "/".join(parts[:i]))
            if rec or len(parts) == 1:
                out.append(pub(e))
        if sub and not out and not dirs:
            return self.err(404, f"{sub} does not exist", "EntryNotFound")
        self.send(
            200,
            [
                {"type": "directory", "path": d, "oid": hashlib.sha1(d.encode()).hexdigest(), "size": 0}
                for d in sorted(dirs)
            ]
            + out,
        )

    def paths_info(self, q, body, typ, rid, rev):
        if (r := self.repo(typ, rid)) is None or (sha := self.rev(r, rev)) is None:
            return
        ct = self.headers.get("Content-Type", "")
        paths = json.loads(body)["paths"] if "json" in ct else parse_qs(body.decode()).get("paths", [])
        fs, out = r["commits"][sha]["files"], []
        for p in paths:
            if p in fs:
                out.append(pub(fs[p]))
            elif any(f.startswith(p.rstrip("/") + "/") for f in fs):
                out.append({"type": "directory", "path": p, "oid": hashlib.sha1(p.encode()).hexdigest(), "size": 0})
        self.send(200, out)

    def branch(self, q, body, typ, rid, name):
        if (r := self.repo(typ, rid)) is None:
            return
        if self.command == "DELETE":
            r["refs"].pop(name, None)
            self.store.save()
            return self.send(200, {})
        if name in r["refs"]:
            return self.err(409, "Reference already exists")
        start = (json.loads(body) if body else {}).get("startingPoint") or "main"
        if (sha := self.rev(r, start)) is None:
            return
        r["refs"][name] = sha
        self.store.save()
        self.send(200, {})

    def preupload(self, q, body, typ, rid, rev):
        if (r := self.repo(typ, rid)) is None or (sha := self.rev(r, rev)) is None:
            return
        fs = r["commits"][sha]["files"]
        self.send(
            200,
            {
                "files": [
                    {
                        "path": f["path"],
                        "shouldIgnore": False,
                        "uploadMode": "lfs"
                        if f["size"] >= self.store.lfs_threshold or f["path"].endswith(LFS_EXT)
                        else "regular",
                        **({"oid": fs[f["path"]]["oid"]} if f["path"] in fs else {}),
                    }
                    for f in json.loads(body)["files"]
                ]
            },
        )

    def lfs_batch(self, q, body, prefix, rid):
        d, out = json.loads(body), []
        for o in d["objects"]:
            have = os.path.exists(self.store.blob(o["oid"]))
            out.append(
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    **({} if have else {"actions": {"upload": {"href": f"{self.base()}/_lfs/{o['oid']}"}}}),
                }
            )
        self.send(200, {"transfer": "basic", "objects": out})

    def lfs_put(self, q, body, oid):
        if self.store.put(body) != oid:
            return self.err(400, "sha256 mismatch")
        self.send(200, {}, {"ETag": f'"{oid}"'})

    def commit(self, q, body, typ, rid, rev):
        if (r := self.repo(typ, rid)) is None or (parent := self.rev(r, rev)) is None:
            return
        files, title = dict(r["commits"][parent]["files"]), ""
        for line in body.splitlines():
            if not line.strip():
                continue
            d = json.loads(line)
            k, v = d["key"], d["value"]
            if k == "header":
                title = v["summary"]
                if v.get("parentCommit") and v["parentCommit"] != parent:
                    return self.err(412, "A commit has happened since. Please refresh and try again.")
            elif k == "file":
                files[v["path"]] = self.store.entry(v["path"], self.store.put(base64.b64decode(v["content"])), False)
            elif k == "lfsFile":
                if not os.path.exists(self.store.blob(v["oid"])):
                    return self.err(400, "LFS pointer pointed to a file that does not exist: " + v["path"])
                files[v["path"]] = self.store.entry(v["path"], v["oid"], True)
            elif k == "deletedFile":
                files.pop(v["path"], None)
            elif k == "deletedFolder":
                files = {f: e for f, e in files.items() if not f.startswith(v["path"].rstrip("/") + "/")}
            else:
                return self.err(400, "unsupported operation " + k)
        sha = self.store.commit(f"{typ}/{rid}", rev, title, files, parent)
        self.send(
            200,
            {
                "success": True,
                "commitOid": sha,
                "commitUrl": f"{self.base()}/{'' if typ == 'models' else typ + '/'}{rid}/commit/{sha}",
                "hookOutput": "",
            },
        )

    def resolve(self, q, body, typ, rid, rev, path):
        typ = (typ or "models/").rstrip("/")
        if (r := self.repo(typ, rid)) is None or (sha := self.rev(r, rev)) is None:
            return
        e = r["commits"][sha]["files"].get(path)
        if e is None:
            return self.send(
                404,
                {"error": "Entry not found"},
                {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": sha},
            )
        size, fn = e["size"], self.store.blob(e["sha256"])
        h = {
            "X-Repo-Commit": sha,
            "ETag": '"{}"'.format(e.get("lfs", {}).get("oid", e["oid"])),
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "Content-Disposition": f'inline; filename="{os.path.basename(path)}"',
        }
        if "lfs" in e:
            h |= {"X-Linked-Etag": '"{}"'.format(e["lfs"]["oid"]), "X-Linked-Size": str(size)}
        lo, hi, code = 0, size - 1, 200
        if m := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            if m[1] == "":
                lo = max(0, size - int(m[2]))
            else:
                lo, hi = int(m[1]), min(size - 1, int(m[2] or size - 1))
            if lo >= size and size:
                return self.send(416, {}, {"Content-Range": f"bytes */{size}"})
            code, h["Content-Range"] = 206, f"bytes {lo}-{hi}/{size}"
        self.send_response(code)
        for k, v in {**h, "Content-Length": str(hi - lo + 1)}.items():
            self.send_header(k, v)
        self.end_headers()
        if self.command == "HEAD":
            return
        with open(fn, "rb") as f:
            f.seek(lo)
            left = hi - lo + 1
            while left > 0 and (b := f.read(min(left, 1 << 20))):
                self.wfile.write(b)
                left -= len(b)


T, ID = r"(models|datasets|spaces)", r"([\w.\-]+/[\w.\-]+)"
ROUTES = [
    (re.compile(rx), fn)
    for rx, fn in [
        (r"/api/whoami-v2", H.whoami),
        (r"/api/validate-yaml", H.yaml),
        (r"/api/repos/create", H.create_repo),
        (rf"/api/{T}/{ID}/preupload/([^/]+)", H.preupload),
        (rf"/api/{T}/{ID}/commit/([^/]+)", H.commit),
        (rf"/api/{T}/{ID}/tree/([^/]+)(?:/(.*))?", H.tree),
        (rf"/api/{T}/{ID}/paths-info/([^/]+)", H.paths_info),
        (rf"/api/{T}/{ID}/branch/(.+)", H.branch),
        (rf"/api/{T}/{ID}/revision/([^/]+)", H.info),
        (rf"/api/{T}/{ID}", H.info),
        (rf"/(datasets/|spaces/)?{ID}\.git/info/lfs/objects/batch", H.lfs_batch),
        (r"/_lfs/([0-9a-f]{64})", H.lfs_put),
        (rf"/(datasets/|spaces/)?{ID}/resolve/([^/]+)/(.+)", H.resolve),
    ]
]


def serve(root, port=0, lfs_threshold=10_000_000, quiet=False):
    h = type("Handler", (H,), {"store": Store(root, lfs_threshold), "quiet": quiet})
    srv = ThreadingHTTPServer(("127.0.0.1", port), h)
    srv.daemon_threads = True
    return srv


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--port", type=int, default=8765)
    ap.add_argument("--lfs-threshold", type=int, default=10_000_000)
    ap.add_argument("--quiet", action="store_true")
    a = ap.parse_args()
    s = serve(a.root, a.port, a.lfs_threshold, a.quiet)
    print(f"http://127.0.0.1:{s.server_address[1]}", flush=True)
    s.serve_forever()
