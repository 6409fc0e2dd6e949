"""API keys: which routes are closed, what is answered, and what the files may hold."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import hdrs

from tests.http.service import Service, code, running_service
from widebeam import Client, errors
from widebeam.config import ServerConfig
from widebeam.engine.engine import Engine
from widebeam.errors import ConfigError
from widebeam.http.app import build_app
from widebeam.http.auth import ACCESS, Access, Keyring
from widebeam.http.server import Server

USER, OTHER, ADMIN = "user-key-0123456789", "another-key-of-a-user", "admin-key-0123456789"
GOOD = {"input_ids": [7, 11], "n": 2}
PROBES = {"/health", "/ping", "/ready"}


def key_file(folder: Path, *lines: str, mode: int = 0o600) -> str:
    path = folder / f"keys-{len(list(folder.iterdir()))}"
    path.write_text("".join(line + "\n" for line in lines))
    path.chmod(mode)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def closed(checkpoint: Path, catalog_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With keys for users and for administrators."""
    folder = tmp_path_factory.mktemp("keys")
    users = key_file(folder, "# two teams", "", f"  {USER}  ", OTHER)
    admins = key_file(folder, ADMIN)
    with running_service(checkpoint, catalog_file, api_key_file=users, admin_api_key_file=admins) as service:
        yield service
        service.check()


async def routes() -> set[tuple[str, str]]:
    """Method and path of every route, HEAD aside."""
    engine = Engine("nowhere")
    found = build_app(engine, ServerConfig()).router.routes()
    await engine.stop()
    return {(r.method, r.resource.canonical) for r in found if r.resource is not None and r.method != hdrs.METH_HEAD}


async def test_every_route_is_classified() -> None:
    assert {path for _, path in await routes()} == set(ACCESS)
    assert {path for path, access in ACCESS.items() if access is Access.PUBLIC} == PROBES


async def test_every_route_but_the_probes_needs_a_key(closed: Service) -> None:
    for method, path in sorted(await routes()):
        for headers in ({}, bearer("wrong-key-0123456789"), bearer(USER[:-1]), {"Authorization": f"Basic {USER}"}):
            answer = await asyncio.to_thread(closed.call, method, path, b"never read", headers)
            if path in PROBES:
                assert answer.status == 200
                continue
            assert code(answer) == (401, "unauthorized"), (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "key-0123" not in answer.content.decode()


def test_each_dialect_has_its_own_form_of_a_401(closed: Service) -> None:
    native = closed.post("/v1/recommend", GOOD).json
    assert native["error"]["type"] == "unauthorized" and native["error"]["retryable"] is False
    sglang = closed.post("/generate", GOOD).json
    assert (sglang["object"], sglang["code"], sglang["type"]) == ("error", 401, "401")
    for path in ("/v1/chat/completions", "/v1/models"):
        openai = closed.call("GET" if path == "/v1/models" else "POST", path).json
        assert openai == {
            "error": {
                "message": native["error"]["message"],
                "type": "authentication_error",
                "param": None,
                "code": "unauthorized",
            }
        }


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/nowhere", "/v1/recommend/", "//health", "/health/", "/v1/models/../../health"])
def test_routes_cannot_be_probed(closed: Service, method: str, path: str) -> None:
    assert code(closed.call(method, path)) == (401, "unauthorized")
    assert closed.call(method, path, headers=bearer(USER)).status in (404, 405)


def test_a_wrong_method_of_a_probe_needs_a_key(closed: Service) -> None:
    assert closed.post("/health", {}).status == 401
    assert code(closed.post("/health", {}, bearer(USER))) == (405, "method_not_allowed")
    assert closed.call("HEAD", "/health").status == 200


def test_any_key_of_the_file_opens_what_users_need(closed: Service) -> None:
    for key in (USER, OTHER, ADMIN):
        for scheme in ("Bearer", "bearer", "BEARER "):
            answer = closed.post("/v1/recommend", GOOD, {"Authorization": f"{scheme} {key}"})
            assert answer.status == 200, answer.content
    assert closed.call("GET", "/metrics", headers=bearer(USER)).status == 200


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info", "/flush_cache"])
def test_administrators_have_routes_of_their_own(closed: Service, path: str) -> None:
    assert code(closed.call("GET", path, headers=bearer(USER))) == (403, "forbidden")
    assert closed.call("GET", path, headers=bearer(ADMIN)).status == 200


def test_all_requests_are_ended_by_administrators_only(closed: Service) -> None:
    assert closed.post("/abort_request", {"rid": "mine"}, bearer(USER)).json == {"aborted": 0}
    assert code(closed.post("/abort_request", {"abort_all": True}, bearer(USER))) == (403, "forbidden")
    assert closed.post("/abort_request", {"abort_all": True}, bearer(ADMIN)).json == {"aborted": 0}


def test_an_unauthorized_body_is_never_waited_for(closed: Service) -> None:
    head = "POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    with socket.create_connection(closed.address, timeout=10) as sock:
        sock.sendall(head.encode() + b'{"history": [')
        assert sock.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_only_one_well_formed_header_counts(closed: Service) -> None:
    for value in (USER, f"Bearer{USER}", f"Bearer {USER} {USER}", f"Bearer {USER},", "Bearer ", f"Bearer {USER}\xe9"):
        assert closed.call("GET", "/v1/models", headers={"Authorization": value}).status == 401, value
    for first, second in (("Basic x", f"Bearer {USER}"), (f"Bearer {USER}", "Basic x"), (f"Bearer {USER}",) * 2):
        head = f"Host: x\r\nAuthorization: {first}\r\nAuthorization: {second}"
        with socket.create_connection(closed.address, timeout=10) as sock:
            sock.sendall(f"GET /v1/models HTTP/1.1\r\n{head}\r\n\r\n".encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_the_document_says_which_routes_need_a_key(closed: Service) -> None:
    document = closed.call("GET", "/openapi.json", headers=bearer(USER)).json
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation.get("security") == (None if path in PROBES else [{"key": []}])
            assert ("401" in operation["responses"]) == (path not in PROBES)


def test_the_client_sends_its_key(closed: Service) -> None:
    with Client(closed.url, api_key=USER) as client:
        assert len(client.recommend(input_ids=[7, 11], n=2).items) == 2
    with Client(closed.url) as client, pytest.raises(errors.Unauthorized):
        client.models()


@pytest.mark.parametrize(
    ("users", "admins", "anonymous", "user", "admin"),
    [
        ([], [], (200, 200), (200, 200), (200, 200)),
        ([USER], [], (401, 401), (200, 200), (401, 401)),
        ([], [ADMIN], (200, 401), (200, 401), (200, 200)),
    ],
    ids=["no file", "keys of users alone", "keys of administrators alone"],
)
def test_which_files_close_what(
    checkpoint: Path,
    tmp_path: Path,
    users: list[str],
    admins: list[str],
    anonymous: tuple[int, int],
    user: tuple[int, int],
    admin: tuple[int, int],
) -> None:
    """Statuses of /v1/models and /server_info without a key, with a user's and with an administrator's."""
    files = {
        "api_key_file": key_file(tmp_path, *users) if users else None,
        "admin_api_key_file": key_file(tmp_path, *admins) if admins else None,
    }
    with running_service(checkpoint, None, **files) as service:
        for headers, expected in (({}, anonymous), (bearer(USER), user), (bearer(ADMIN), admin)):
            found = [service.call("GET", path, headers=headers).status for path in ("/v1/models", "/server_info")]
            assert tuple(found) == expected


async def started(config: ServerConfig) -> None:
    """Start a server that would listen, and stop it."""
    engine = Engine("nowhere")
    server = Server(engine, config)
    try:
        await server.start()
    finally:
        await server.stop()
        await engine.stop()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "has no keys"),
        (["# nothing", "", "   "], "has no keys"),
        ([USER, "short"], "line 2 of .* at least 16"),
        (["a key with spaces in it"], "line 1 of .* visible ASCII"),
        (["schlüssel-schlüssel-schlüssel"], "line 1 of"),
    ],
)
@pytest.mark.parametrize("flag", ["api_key_file", "admin_api_key_file"])
async def test_bad_key_files_end_the_start(tmp_path: Path, flag: str, lines: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        await started(ServerConfig(port=0, **{flag: key_file(tmp_path, *lines)}))
    assert f"--{flag.replace('_', '-')}: " in str(caught.value)
    assert not any(line and line in str(caught.value) for line in lines), "the key itself is told"


async def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"\ufeff{USER}")
    await started(ServerConfig(port=0, api_key_file=path))


async def test_unreadable_key_files_end_the_start(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9" * 20)
    for file, words in (("absent", "No such file"), ("", "Is a directory"), ("latin", "not UTF-8")):
        with pytest.raises(ConfigError, match=words):
            await started(ServerConfig(port=0, api_key_file=str(tmp_path / file)))


async def test_a_key_file_that_everybody_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for mode, warned in ((0o644, True), (0o640, False)):
        caplog.clear()
        await started(ServerConfig(port=0, api_key_file=key_file(tmp_path, USER, mode=mode)))
        assert [record.levelno == logging.WARNING for record in caplog.records] == [True] * warned
        assert USER not in caplog.text


async def test_an_open_server_beyond_loopback_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = key_file(tmp_path, USER)
    open_to_all = [ServerConfig(host="0.0.0.0", port=0), ServerConfig(host="0.0.0.0", port=0, admin_api_key_file=keys)]
    for config in open_to_all:
        caplog.clear()
        await started(config)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "--api-key-file" in record.getMessage()
    fine = [ServerConfig(port=0), ServerConfig(host="localhost", port=0)]
    for config in [*fine, ServerConfig(host="0.0.0.0", port=0, api_key_file=keys)]:
        caplog.clear()
        await started(config)
        assert not caplog.records


def test_loopback_is_the_default() -> None:
    assert ServerConfig().host == "127.0.0.1"


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"key-number-{number:06}" for number in range(5)]
    keyring = Keyring(tuple(hashlib.sha256(key.encode()).digest() for key in keys))
    compared: list[bytes] = []

    def spy(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return compare(given, known)

    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", spy)
    for key, access in [(keys[0], Access.ADMIN), (keys[-1], Access.ADMIN), ("wrong", Access.PUBLIC)]:
        compared.clear()
        assert keyring.access(key) is access
        assert compared == list(keyring.user)


def test_the_threat_model_names_files_that_exist() -> None:
    root = Path(__file__).resolve().parents[2]
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", (root / "THREAT_MODEL.md").read_text())
    assert len(named) > 15
    assert not [name for name in named if not ((root / "widebeam" / name).exists() or (root / name).exists())]
