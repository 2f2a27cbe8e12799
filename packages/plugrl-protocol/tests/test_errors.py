"""Close frames and the exceptions that they become."""

import pytest

from plugrl_protocol import errors
from plugrl_protocol.errors import (
    Close,
    ClosedError,
    ConnectionReplaced,
    HandshakeError,
    MalformedMessageError,
    ObservationRefusedError,
    OutOfTurnError,
    ServerFailedError,
    ServerNotFoundError,
    ServerStopped,
    close_refused,
    close_too_big,
    closed_error,
    fit_reason,
)


def test_reasons_fit_into_a_close_frame():
    assert fit_reason("short") == "short"
    for text in ("x" * 500, "é" * 200, "\U0001f916" * 50):
        fitted = fit_reason(text)
        assert len(fitted.encode()) <= 123
        assert fitted.endswith("...")
    assert fit_reason("\ud800") == "?"
    assert len(close_refused("y" * 300).reason) == 123


def test_the_closes_of_the_page_are_exact():
    table = {
        errors.CLOSE_STOP: (1001, "plugrl-server-stop"),
        errors.CLOSE_RESYNC: (1001, "plugrl-server-resync"),
        errors.CLOSE_FEEDBACK_TIMEOUT: (1001, "Feedback timeout"),
        errors.CLOSE_SHUTDOWN: (1001, "Server shutdown"),
        errors.CLOSE_INTERNAL_ERROR: (1011, "Internal server error."),
        errors.CLOSE_FINISHED: (1000, ""),
        close_refused("no camera"): (1008, "no camera"),
        close_too_big(256): (1009, "message over 256 MiB"),
        close_too_big(0.5): (1009, "message over 0.5 MiB"),
    }
    for close, (code, reason) in table.items():
        assert (close.code, close.reason) == (code, reason)


@pytest.mark.parametrize(
    ("close", "kind"),
    [
        (errors.CLOSE_STOP, ServerStopped),
        (errors.CLOSE_RESYNC, ConnectionReplaced),
        (errors.CLOSE_FEEDBACK_TIMEOUT, ConnectionReplaced),
        (errors.CLOSE_SHUTDOWN, ConnectionReplaced),
        (Close(1006), ConnectionReplaced),
        (Close(1000), ConnectionReplaced),
        (Close(1011, "Internal server error."), ServerFailedError),
        (Close(1002), ServerFailedError),
        (Close(1008, "another camera"), ObservationRefusedError),
        (Close(1009, "message over 1 MiB"), ObservationRefusedError),
    ],
)
def test_each_close_becomes_one_exception(close, kind):
    error = closed_error(close)

    assert type(error) is kind
    assert isinstance(error, ClosedError)
    assert isinstance(error, ConnectionError)
    assert str(error) == f"connection closed: {close.code} {close.reason}".rstrip()


def test_a_replaced_connection_names_the_envs_to_reset():
    error = closed_error(errors.CLOSE_RESYNC, frozenset({3}))

    assert isinstance(error, ConnectionReplaced)
    assert error.must_reset == {3}


def test_violations_close_with_resync():
    assert MalformedMessageError("x").close == errors.CLOSE_RESYNC
    assert OutOfTurnError("x").close == errors.CLOSE_RESYNC


def test_errors_say_what_to_do():
    assert "api_key" in str(HandshakeError(401))
    assert "not trusted" in str(HandshakeError(495))
    assert str(HandshakeError(503)) == "the server refused the handshake with HTTP 503"
    error = ServerNotFoundError("ws://h:1", attempts=4, waited_s=2.5, last="refused")
    assert "ws://h:1 after 4 attempts in 2.5 s (last: refused)" in str(error)
