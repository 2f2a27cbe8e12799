"""The seam between the facades and the WebSocket libraries."""

import asyncio
import contextlib
import itertools
import platform
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from websockets.sync.server import serve

from plugrl_protocol.errors import (
    CLOSE_FINISHED,
    Close,
    ConnectionReplaced,
    HandshakeError,
    MisuseError,
)
from plugrl_protocol.links import ClientOptions, ServerOptions, base, choose
from plugrl_protocol.links.base import ConnectFailedError

PEM = Path(__file__).with_name("localhost_certificate.pem")
"""A certificate for localhost, signed by itself, and its key."""


def test_a_missing_extra_is_named(monkeypatch):
    for name in ("picows", "plugrl_protocol.links.fast"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "picows", None)
    with pytest.raises(MisuseError, match=r"plugrl-protocol\[fast\]"):
        choose("picows")


def test_an_unknown_library_is_refused():
    with pytest.raises(MisuseError, match="choose 'websockets' or 'picows'"):
        choose("aiohttp")


def test_the_handshake_is_decided_before_any_frame():
    options = ServerOptions(api_key="k", ready=lambda: False, max_message_mb=0.5)

    assert options.admit("/healthz", []) == (503, "not ready\n")
    assert options.admit("/", []) == (401, "wrong or missing API key\n")
    assert options.admit("/", ["Api-Key k", "Api-Key k"]) is not None
    assert options.admit("/", ["Api-Key \udcff"]) is not None
    assert options.admit("/any/path", ["Api-Key k"]) is None
    assert ServerOptions().admit("/", []) is None
    assert ServerOptions().admit("/healthz?x=1", []) == (200, "ok\n")
    assert (options.max_bytes, options.too_big.reason) == (2**19, "message over 0.5 MiB")


def test_the_key_becomes_a_header():
    assert ClientOptions(url="ws://x").headers == {}
    assert ClientOptions(url="ws://x", api_key="k").headers == {"Authorization": "Api-Key k"}


@contextlib.contextmanager
def listening(library, **options):
    """Listen in a thread; give the port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        listens = choose(library).listen(ServerOptions(**options), lambda link: None)
        links = asyncio.run_coroutine_threadsafe(listens, loop).result(10)
        yield links.port
        for end in (links.stop_listening, links.wait_closed):
            asyncio.run_coroutine_threadsafe(end(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.mark.parametrize("speaks_tls", [True, False], ids=["TLS", "plain"])
def test_a_client_of_the_other_scheme_is_told_which_one_to_try(library, speaks_tls):
    server, trusts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    server.load_cert_chain(PEM)
    context = {"ssl_context": server} if speaks_tls else {}
    wrong, right = ("ws", "wss") if speaks_tls else ("wss", "ws")
    with listening("websockets", **context) as port:
        url = f"{wrong}://localhost:{port}"
        options = ClientOptions(url=url, ssl_context=None if speaks_tls else trusts)
        with pytest.raises(ConnectFailedError, match=f"Then its address begins with {right}://"):
            choose(library).connect(options)
    with pytest.raises(ConnectFailedError) as nobody:  # nothing spoke at all
        choose(library).connect(options)
    assert "address begins" not in str(nobody.value)


def test_a_server_says_once_a_minute_whom_it_did_not_let_in(library, caplog, monkeypatch):
    refusals, clock = base.Refusals(), [0.0]
    monkeypatch.setattr(base.time, "monotonic", lambda: clock[0])
    for clock[0] in (0.0, 25.0, 50.0, 75.0):
        refusals.tell("10.0.0.7", "no API key")
    assert caplog.messages == ["10.0.0.7 was refused with HTTP 401: no API key"] * 2
    for number in range(2000):
        refusals.tell(f"10.1.{number // 256}.{number % 256}", "no API key")
    assert len(caplog.messages) < 300  # many are no reason to fill the disk
    monkeypatch.undo()
    caplog.clear()
    with listening(library, api_key="right") as port:
        for key in ("guess", "other guess"):
            with pytest.raises(HandshakeError):
                choose(library).connect(ClientOptions(url=f"ws://127.0.0.1:{port}", api_key=key))
    who = "127.0.0.1" if library == "websockets" else "a client"
    assert [text for text in caplog.messages if "401" in text] == [
        f"{who} was refused with HTTP 401: another API key"
    ]


def received(link):
    """Read a message; None at the end."""
    try:
        return link.receive(5.0)
    except ConnectionReplaced:
        return None


@contextlib.contextmanager
def linked(library, talk):
    """Join a client link to a server that talks as told."""
    with serve(talk, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.socket.getsockname()[1]
        link = choose(library).connect(ClientOptions(url=f"ws://127.0.0.1:{port}"))
        try:
            yield link
        finally:
            link.close(CLOSE_FINISHED)
            server.shutdown()
            thread.join()


def test_a_client_joins_fragments_and_reads_what_came_before_the_end(library):
    def talk(connection):
        connection.send([b"ab", b"", b"cd"])
        connection.send(["x", "y"])
        connection.send(b"")
        connection.close(1001, "bye")

    with linked(library, talk) as link:
        assert [link.receive(5.0) for _ in range(3)] == [b"abcd", "xy", b""]
        for _ in range(2):
            with pytest.raises(ConnectionReplaced) as caught:
                link.receive(5.0)
            assert caught.value.close == Close(1001, "bye")
        with pytest.raises(ConnectionReplaced):
            link.send(b"too late")


def test_a_client_waits_as_long_as_it_is_told(library):
    with linked(library, lambda connection: connection.recv()) as link:
        with pytest.raises(TimeoutError):
            link.receive(0.05)
        link.send(b"done")


def test_a_server_that_floods_is_held_back():
    sent = []

    def talk(connection):
        for _ in range(400):
            connection.send(bytes(2**18))
            sent.append(1)
        connection.close()

    with linked("websockets", talk) as link:
        before = -1
        while before != len(sent):
            before = len(sent)
            time.sleep(0.3)
        assert before < 200
        assert sum(len(link.receive(20.0)) for _ in range(400)) == 400 * 2**18


def test_closing_a_flooded_link_does_not_wait_for_its_reader():
    def talk(connection):
        with contextlib.suppress(Exception):
            while True:
                connection.send(bytes(2**16))

    with linked("websockets", talk) as link:
        time.sleep(0.3)
        link.close(CLOSE_FINISHED)
        left = itertools.takewhile(bool, (received(link) for _ in range(100)))
        assert len(list(left)) < 100


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="tells glibc something"
)
def test_memory_of_large_frames_is_not_given_back_each_time():
    program = """
import resource
from plugrl_protocol.links import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        kept = [bytearray(300_000) for _ in range(4)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()
print(faults())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) < 1000, "of 15,000 pages"
