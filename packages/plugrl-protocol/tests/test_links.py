"""The seam between the facades and the WebSocket libraries."""

import contextlib
import itertools
import platform
import subprocess
import sys
import threading
import time

import pytest
from websockets.sync.server import serve

from plugrl_protocol.errors import CLOSE_FINISHED, Close, ConnectionReplaced, MisuseError
from plugrl_protocol.links import ClientOptions, ServerOptions, choose


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
