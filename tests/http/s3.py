"""As much of S3's interface as reading needs: objects of one bucket, in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

EMPTY = (
    b'<?xml version="1.0"?><ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>'
)
DENIED = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>denied</Message></Error>'


@dataclass
class Bucket:
    """Objects by name. Each change takes a second of the store's own clock, which is all that its times tell apart."""

    address: tuple[str, int]
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    denies: frozenset[str] = frozenset()
    """What is refused: to `look`, to `read`."""
    gets: int = 0
    clock: float = 1.9e9

    def put(self, name: str, content: bytes) -> None:
        self.clock += 1
        self.objects[name] = content, self.clock

    def uri(self, name: str) -> str:
        host, port = self.address
        return f"s3://bucket/{name}?endpoint_override={host}:{port}&scheme=http&region=us-east-1"


@contextmanager
def bucket() -> Iterator[Bucket]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = urlsplit(self.path).path.removeprefix("/bucket").removeprefix("/")
            content, changed = here.objects.get(name, (None, 0.0))
            if ("look" if self.command == "HEAD" or name == "" else "read") in here.denies:
                self.answer(403, DENIED)
            elif name == "":
                self.answer(200, EMPTY)
            elif content is None:
                self.answer(404, b"")
            else:
                first, last = 0, len(content) - 1
                if given := self.headers.get("Range"):
                    first, last = (int(part) for part in given.removeprefix("bytes=").split("-"))
                part = content[first : last + 1]
                self.answer(206 if given else 200, part, {"Last-Modified": formatdate(changed, usegmt=True)})
                here.gets += self.command == "GET"

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), "ETag": '"x"', **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        here = Bucket(("127.0.0.1", server.server_address[1]))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield here
        server.shutdown()
        thread.join()
