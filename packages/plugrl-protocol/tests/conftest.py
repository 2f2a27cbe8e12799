"""Fixtures of the wire's tests: every facade test runs on both WebSocket libraries."""

import importlib.util
import ssl
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from websockets.sync.server import serve

CERTIFICATE = Path(__file__).with_name("localhost_certificate.pem")


@pytest.fixture(
    params=[
        "websockets",
        pytest.param(
            "picows",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("picows") is None, reason="the extra [fast]"
            ),
        ),
    ]
)
def library(request):
    """The WebSocket library behind the facades."""
    return request.param


@pytest.fixture
def server_tls():
    """A TLS context that shows the test certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


@pytest.fixture
def client_tls():
    """A TLS context that trusts the test certificate."""
    return ssl.create_default_context(cafile=CERTIFICATE)


@contextmanager
def scripted_server(script, **options):
    """Run ``script(connection, serial)`` for each raw connection; gives the URL."""
    serial = iter(range(10**6))

    def handle(connection):
        script(connection, next(serial))

    with serve(handle, "127.0.0.1", 0, compression=None, max_size=None, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def script_server():
    """The factory `scripted_server`."""
    return scripted_server
