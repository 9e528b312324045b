"""The runner's HTTP against servers that do everything wrong, over real sockets."""

from __future__ import annotations

import asyncio
import datetime
import gzip
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import orjson
import pytest

from tests.runner.engine_double import EngineDouble, answer
from tests.runner.sockets import Exchange, Server, head, serving, speaks_for
from vime.eval.config import EvalConfig
from vime.eval.contracts import PinProof
from vime.eval.runner import generate
from vime.eval.runner.generate import Generator, open_generator, sampling_of
from vime.eval.runner.http import Post, Unreachable, connect
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = pytest.mark.anyio

V = "run:1:abc"
WHOLE = orjson.dumps(answer([5, 257], V))

Fault = Callable[[Exchange], None]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "FIRST_BACKOFF_S", 0.0)


def proof_of(url: str) -> PinProof:
    return PinProof(url, "m", V, api_key="secret")


@asynccontextmanager
async def posting(behaves: Any, **more: Any) -> AsyncIterator[tuple[Post, Server]]:
    async with serving(behaves, **more) as (url, server), connect(proof_of(url)) as post:
        yield post, server


async def ask(generator: Generator) -> list[int]:
    generation = await generator.generate([1, 2, 3], 7, sampling_of(EvalConfig()))
    return generation.token_ids


def closes(exchange: Exchange) -> None:
    exchange.close()


def resets(exchange: Exchange) -> None:
    exchange.reset()


def halves_the_head(exchange: Exchange) -> None:
    exchange.send(head(200)[:20])
    exchange.close()


def halves_the_body(exchange: Exchange) -> None:
    exchange.send(head(200, f"Content-Length: {len(WHOLE)}") + WHOLE[:-3])
    exchange.close()


def resets_in_the_body(exchange: Exchange) -> None:
    exchange.send(head(200, f"Content-Length: {len(WHOLE)}") + WHOLE[:-3])
    exchange.reset()


def breaks_off_between_chunks(exchange: Exchange) -> None:
    exchange.send(head(200, "Transfer-Encoding: chunked") + b"5\r\n" + WHOLE[:5] + b"\r\n")
    exchange.close()


def sends_a_wrong_chunk(exchange: Exchange) -> None:
    exchange.send(head(200, "Transfer-Encoding: chunked") + b"not a size\r\n")


def sends_a_length_that_is_none(exchange: Exchange) -> None:
    exchange.send(head(200, "Content-Length: many") + WHOLE)


def speaks_another_protocol(exchange: Exchange) -> None:
    exchange.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


def ends_a_body_of_no_length_too_early(exchange: Exchange) -> None:
    exchange.send(head(200, "Connection: close") + WHOLE[:-3])
    exchange.close()


def compresses_unasked(exchange: Exchange) -> None:
    exchange.say(200, gzip.compress(WHOLE), "Content-Encoding: gzip")


def says_what_is_no_json(exchange: Exchange) -> None:
    exchange.say(200, b"\xff\xfe<html>")


def says_json_of_another_form(exchange: Exchange) -> None:
    exchange.say(200, b"[1, null]")


def is_busy(exchange: Exchange) -> None:
    exchange.say(503, b"busy")


FAULTS = [
    closes,
    resets,
    halves_the_head,
    halves_the_body,
    resets_in_the_body,
    breaks_off_between_chunks,
    sends_a_wrong_chunk,
    sends_a_length_that_is_none,
    speaks_another_protocol,
    ends_a_body_of_no_length_too_early,
    compresses_unasked,
    says_what_is_no_json,
    says_json_of_another_form,
    is_busy,
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("num_good", [0, 1], ids=["new connection", "kept one"])
async def test_what_goes_wrong_on_the_way_is_tried_again_and_then_named(
    fault: Fault, num_good: int
) -> None:
    async def behave(exchange: Exchange) -> None:
        if num_good < len(server.seen) <= num_good + 2:
            fault(exchange)
        else:
            exchange.say(200, WHOLE)

    async with (
        serving(behave) as (url, server),
        open_generator(EvalConfig(), proof_of(url)) as generator,
    ):
        for _ in range(num_good):
            assert await ask(generator) == [5, 257]
        assert await ask(generator) == [5, 257]
        assert len(server.seen) == num_good + 3
        assert len({exchange.body for exchange in server.seen}) == 1


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_goes_wrong_every_time_ends_the_evaluation_without_the_key_in_sight(
    fault: Fault,
) -> None:
    async def behave(exchange: Exchange) -> None:
        fault(exchange)

    async with (
        serving(behave) as (url, server),
        open_generator(EvalConfig(), proof_of(url)) as generator,
    ):
        with pytest.raises(EvalSkip) as caught:
            await ask(generator)
    assert caught.value.reason == "unhealthy"
    assert "8 attempts failed, the last one with: " in caught.value.detail
    assert len(server.seen) == 8
    error: BaseException | None = caught.value
    while error is not None:
        assert "secret" not in f"{error!s} {error!r}"
        error = error.__cause__ or error.__context__


async def test_a_server_that_closes_a_kept_connection_between_two_requests_costs_no_answer() -> (
    None
):
    async def behave(exchange: Exchange) -> None:
        exchange.say(200, WHOLE)
        exchange.close()

    async with (
        serving(behave) as (url, server),
        open_generator(EvalConfig(), proof_of(url)) as generator,
    ):
        for _ in range(5):
            assert await ask(generator) == [5, 257]
    assert server.num_connections >= 5


async def test_connections_are_kept_and_as_many_as_requests_at_once() -> None:
    present = 0
    all_there, go = asyncio.Event(), asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        nonlocal present
        present += 1
        if present == 150:  # more than the library's own limit
            all_there.set()
        await go.wait()
        exchange.say(200, exchange.body)

    async with posting(behave) as (post, server):

        async def twice(number: int) -> None:
            for _ in range(2):
                assert await post("/p", b"%d" % number) == (200, b"%d" % number)

        async with anyio.create_task_group() as tasks:
            for number in range(150):
                tasks.start_soon(twice, number)
            await all_there.wait()
            go.set()
    assert server.num_connections == 150
    assert len(server.seen) == 300


async def test_a_request_carries_the_key_and_nothing_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def behave(exchange: Exchange) -> None:
        exchange.say(200, b"{}", "Set-Cookie: a=b")

    async with serving(behave) as (url, server):
        for key in ("secret", None):
            async with connect(PinProof(url, "m", V, api_key=key)) as post:
                for _ in range(2):
                    assert await post("/inference/v1/generate", b'{"a": 1}') == (200, b"{}")
    first, second, *without_key = server.seen
    for exchange in (first, second):
        assert (exchange.method, exchange.path) == ("POST", "/inference/v1/generate")
        assert exchange.body == b'{"a": 1}'
        assert exchange.headers["authorization"] == "Bearer secret"
        assert exchange.headers["content-type"] == "application/json"
        assert exchange.headers["accept-encoding"] == "identity"
        assert "cookie" not in exchange.headers
    assert first.connection == second.connection
    assert not any("authorization" in exchange.headers for exchange in without_key)


async def test_the_key_follows_no_redirect() -> None:
    async def behave(exchange: Exchange) -> None:
        exchange.say(302, b"moved", f"Location: {exchange.path}/elsewhere")

    async with (
        serving(behave) as (url, server),
        open_generator(EvalConfig(), proof_of(url)) as generator,
    ):
        with pytest.raises(EvalSkip, match="HTTP 302: moved"):
            await ask(generator)
    assert len(server.seen) == 1


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_answer_of_many_megabytes_arrives_whole(chunked: bool) -> None:
    tokens = [index % 50_000 for index in range(2_000_000)]
    body = orjson.dumps(answer(tokens, V))
    assert len(body) > 10_000_000

    async def behave(exchange: Exchange) -> None:
        if not chunked:
            exchange.say(200, body)
            return
        exchange.send(head(200, "Transfer-Encoding: chunked"))
        for start in range(0, len(body), 1 << 20):
            part = body[start : start + (1 << 20)]
            exchange.send(b"%x\r\n%b\r\n" % (len(part), part))
            await exchange.writer.drain()
        exchange.send(b"0\r\n\r\n")

    async with (
        serving(behave) as (url, _),
        open_generator(EvalConfig(), proof_of(url)) as generator,
    ):
        assert await ask(generator) == tokens


async def never_answers(exchange: Exchange) -> None:
    """A hang before the first byte."""


async def stalls_in_the_body(exchange: Exchange) -> None:
    exchange.send(head(200, f"Content-Length: {len(WHOLE)}") + WHOLE[:9])
    await exchange.writer.drain()


HANGS = [never_answers, stalls_in_the_body]


@pytest.mark.parametrize("hang", HANGS)
async def test_a_server_that_stands_still_is_given_up_at_the_requests_deadline(
    hang: Callable[[Exchange], Awaitable[None]],
) -> None:
    async def behave(exchange: Exchange) -> None:
        await hang(exchange)
        await server.ends.wait()

    async with (
        serving(behave) as (url, server),
        open_generator(EvalConfig(eval_timeout_s=0.2), proof_of(url)) as generator,
    ):
        with pytest.raises(EvalSkip, match=r"unhealthy: .*no answer within 0\.2 s"):
            await ask(generator)
    assert len(server.seen) == 1


@pytest.mark.parametrize("hang", HANGS)
async def test_what_a_cancelled_request_would_have_got_is_never_taken_for_anothers_answer(
    hang: Callable[[Exchange], Awaitable[None]],
) -> None:
    stands, cancelled = asyncio.Event(), asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        if len(server.seen) > 1:
            exchange.say(200, exchange.body)
            return
        await hang(exchange)
        stands.set()
        await cancelled.wait()
        exchange.say(200, b"late")

    async with posting(behave) as (post, server):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, "/p", b"first")
            await stands.wait()
            tasks.cancel_scope.cancel()
        cancelled.set()
        for body in (b"second", b"third"):
            assert await post("/p", body) == (200, body)
    assert [exchange.connection for exchange in server.seen] == [0, 1, 1]


async def test_an_answer_that_nobody_asked_for_is_nobodys_answer() -> None:
    async def behave(exchange: Exchange) -> None:
        exchange.say(200, exchange.body)
        if exchange.body == b"first":
            exchange.say(200, b"unasked")

    async with posting(behave) as (post, server):
        for body in (b"first", b"second"):
            assert await post("/p", body) == (200, body)
        server.seen[-1].say(200, b"unasked, and later")
        for _ in range(5):  # rounds of the loop: it is in the client's socket already
            await anyio.lowlevel.checkpoint()
        with pytest.raises(Unreachable, match="what nobody had asked for"):
            await post("/p", b"third")
        assert await post("/p", b"fourth") == (200, b"fourth")


async def test_leaving_in_the_middle_of_requests_closes_every_connection() -> None:
    arrived = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        if len(server.seen) == 8:
            arrived.set()

    async with serving(behave) as (url, server):
        async with anyio.create_task_group() as tasks:

            async def evaluate() -> None:
                async with (
                    connect(proof_of(url)) as post,
                    anyio.create_task_group() as requests,
                ):
                    for _ in range(8):
                        requests.start_soon(post, "/p", b"x")

            tasks.start_soon(evaluate)
            await arrived.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(20):  # each talk ends when its connection does
            await asyncio.gather(*filter(None, server.talks.values()))


async def test_nobody_at_the_address_is_a_connect_error() -> None:
    with socket.socket() as bound_and_not_listening:
        bound_and_not_listening.bind(("127.0.0.1", 0))
        port = bound_and_not_listening.getsockname()[1]
        async with connect(proof_of(f"http://127.0.0.1:{port}")) as post:
            with pytest.raises(Unreachable, match=rf"ConnectError: .*127\.0\.0\.1:{port}"):
                await post("/p", b"")


async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    async with posting(speaks_for(EngineDouble()), tls=tls) as (post, server):
        with pytest.raises(Unreachable, match=r"ConnectError: .*self.signed"):
            await post("/p", b"")
    assert server.seen == []


def self_signed(directory: Path) -> Path:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    path = directory / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return path
