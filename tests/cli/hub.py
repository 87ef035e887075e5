"""A hub on this machine: folders served as the Hugging Face hub serves repositories. For tests and records of sessions.

  python tests/cli/hub.py ORG/NAME=FOLDER.. [--shards N] [--speed BYTES] [--token TOKEN] [--log FILE] [--quantized
  ID=BASE..]

Prints the address for HF_ENDPOINT and serves until it is ended. What it does as the hub does:
- `/api/models/ORG/NAME/revision/REV` tells commit and files. An unknown revision is 404 `RevisionNotFound`; an unknown
  repository 401 `RepoNotFound`, as for somebody who may not see it.
- `/api/models?filter=base_model:quantized:ORG/NAME` lists the models that `--quantized` says are quantised from that
  one.
- `/ORG/NAME/resolve/REV/FILE`: for a small file the answer is a redirect within the host (307), with the git hash as
  ETag;
  for weights it is a redirect to another host (302), with `X-Linked-ETag` (SHA-256) and `X-Linked-Size`.
- Both know ranges. The storage host refuses a request that brings a token (400), as storage with signed addresses does.
- With --token other tokens are refused (401), for whatever path of the first host.
`--shards` is the number of files into which `model.safetensors` is cut, with an index; `--speed` is bytes per second of
the storage.
"""
import argparse
import hashlib
import json
import struct
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

PIECE = 64 << 10
INDEX = "model.safetensors.index.json"


def shards_of(data, count):
    """The tensors of a safetensors file in `count` files of about equal size, and their index."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    metadata = header.pop("__metadata__", {"format": "pt"})
    shards = [({"__metadata__": metadata}, bytearray()) for _ in range(count)]
    weight_map = {}
    for name, tensor in sorted(header.items()):
        number = min(range(count), key=lambda i: len(shards[i][1]))
        head, bytes_ = shards[number]
        begin, end = tensor["data_offsets"]
        head[name] = tensor | {"data_offsets": [len(bytes_), len(bytes_) + end - begin]}
        bytes_ += body[begin:end]
        weight_map[name] = f"model-{number + 1:05}-of-{count:05}.safetensors"
    files = {INDEX: json.dumps({"metadata": {"total_size": len(body)}, "weight_map": weight_map}).encode()}
    for number, (head, bytes_) in enumerate(shards):
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        files[f"model-{number + 1:05}-of-{count:05}.safetensors"] = struct.pack("<Q", len(text)) + text + bytes(bytes_)
    return files


class Repository:
    def __init__(self, folder, shards):
        self.files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
        if shards > 1:
            self.files |= shards_of(self.files.pop("model.safetensors"), shards)
        names = "".join(f"{name} {self.etag(name)}\n" for name in sorted(self.files))
        self.commit = hashlib.sha1(names.encode()).hexdigest()

    def etag(self, name):
        data = self.files[name]
        git = hashlib.sha1(b"blob %d\0" % len(data) + data)
        return (hashlib.sha256(data) if is_large(name) else git).hexdigest()


def is_large(name):
    return name.endswith(".safetensors")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that goes away early is none of the server's business."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.route()

    def do_HEAD(self):
        self.route()

    def route(self):
        path, token = unquote(self.path), self.headers.get("Authorization")
        if path.startswith("/storage/"):
            return self.error(400, "", "only one way to authorize is allowed") if token else self.blob(path)
        if self.server.token and token != f"Bearer {self.server.token}":
            return self.error(401, "", "Invalid credentials in Authorization header")
        if path.startswith("/api/models?"):
            return self.list(path)
        if path.startswith("/api/models/"):
            return self.describe(path.removeprefix("/api/models/"))
        if path.startswith("/api/resolve-cache/"):
            return self.blob(path)
        self.resolve(path)

    def describe(self, path):
        name, _, revision = path.partition("/revision/")
        repository = self.server.repositories.get(name)
        if repository is None:
            return self.error(401, "RepoNotFound", "Repository not found")
        if revision not in ("main", repository.commit):
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        siblings = [{"rfilename": file} for file in repository.files]
        body = {"id": name, "sha": repository.commit, "gated": False, "siblings": siblings}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def list(self, path):
        base = path.partition("filter=base_model:quantized:")[2].partition("&")[0]
        found = [{"id": name, "downloads": 1} for name, of in self.server.quantized if of == base]
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

    def resolve(self, path):
        name, _, rest = path[1:].partition("/resolve/")
        revision, _, file = rest.partition("/")
        repository = self.server.repositories.get(name)
        if repository is None:
            return self.error(401, "RepoNotFound", "Repository not found")
        if revision not in ("main", repository.commit):
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if file not in repository.files:
            return self.error(404, "EntryNotFound", "Entry not found")
        etag, headers = repository.etag(file), {"X-Repo-Commit": repository.commit}
        if is_large(file):
            headers["Location"] = f"http://localhost:{self.server.server_port}/storage/{etag}?signature=x"
            headers |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": len(repository.files[file])}
            return self.answer(302, headers, b"Found. Redirecting")
        headers["Location"] = f"/api/resolve-cache/{etag}"
        self.answer(307, headers, b"")

    def blob(self, path):
        etag = path.rpartition("/")[2].partition("?")[0]
        for repository in self.server.repositories.values():
            for name, data in repository.files.items():
                if repository.etag(name) == etag:
                    return self.part(etag, data)
        self.error(404, "", "")

    def part(self, etag, data):
        headers, start, status = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}, 0, 200
        if asked := self.headers.get("Range"):
            start, status = int(asked.removeprefix("bytes=").partition("-")[0]), 206
            if start >= len(data):
                return self.answer(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(status, headers, data[start:])

    def error(self, status, code, message):
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer(status, headers, message.encode())

    def answer(self, status, headers, body):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        is_slow = self.path.startswith("/storage/") and self.server.speed
        for at in range(0, len(body), PIECE):
            self.wfile.write(body[at : at + PIECE])
            if is_slow:
                time.sleep(PIECE / self.server.speed)

    def log_message(self, format, *args):
        if self.server.log:
            extra = " ".join(f"{name}={value}" for name in ("Range", "Authorization") if (value := self.headers.get(name)))
            print(format % args, extra, file=self.server.log, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("repositories", nargs="+", metavar="ORG/NAME=FOLDER")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--speed", type=int, default=0)
    parser.add_argument("--token")
    parser.add_argument("--quantized", nargs="*", default=[], metavar="ID=BASE")
    parser.add_argument("--log", type=argparse.FileType("w"))
    args = parser.parse_args()
    server = Server(("127.0.0.1", 0), Handler)
    server.speed, server.token, server.log = args.speed, args.token, args.log
    server.quantized = [tuple(pair.split("=")) for pair in args.quantized]
    pairs = (pair.partition("=")[::2] for pair in args.repositories)
    server.repositories = {name: Repository(folder, args.shards) for name, folder in pairs}
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)


if __name__ == "__main__":
    main()
