"""The blocking facade: patience, lost connections, what is fatal; on both libraries."""

import contextlib
import random
import socket
import ssl
import threading
import time

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from plugrl_protocol.codec import decode, encode
from plugrl_protocol.env_client import Backoff, EnvClient
from plugrl_protocol.errors import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_RESYNC,
    CLOSE_SHUTDOWN,
    CLOSE_STOP,
    Close,
    ConnectionReplaced,
    HandshakeError,
    MalformedMessageError,
    MisuseError,
    ObservationRefusedError,
    OutOfTurnError,
    ServerFailedError,
    ServerNotFoundError,
    ServerStopped,
    close_refused,
)
from plugrl_protocol.links import ClientOptions
from plugrl_protocol.messages import Action, Feedback, Infer, make_metadata, make_observation

QUICK = Backoff(first_s=0.02, longest_s=0.1, limit_s=10.0)


def wait_until(condition, timeout_s=5.0):
    """Wait until something holds, or for long enough."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def ids(*values):
    return np.array(values, dtype=np.int64)


def ask(*envs):
    states = {"s": np.ones((len(envs), 2))}
    return Infer(
        env_indices=ids(*envs),
        step_ids=ids(*[0] * len(envs)),
        observation=make_observation(num_envs=len(envs), states=states),
    )


def report(*envs, done=False):
    m = len(envs)
    return Feedback(
        env_indices=ids(*envs),
        step_ids=ids(*[0] * m),
        observation=make_observation(num_envs=m, states={"s": np.zeros((m, 2))}),
        rewards=np.ones(m, np.float32),
        terminated=np.full(m, done),
        truncated=np.zeros(m, np.bool_),
    )


METADATA = encode(make_metadata(action_horizon=1).to_wire())


def answer(frame):
    envs = decode(frame)["env_indices"]
    action = np.zeros((1, len(envs), 1), np.float32)
    return encode(Action(env_ids=envs, action=action).to_wire())


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def obliging(connection, serial):
    """Serve honestly until the client goes."""
    connection.send(METADATA)
    try:
        while True:
            frame = connection.recv()
            if decode(frame)["message_type"] == "infer":
                connection.send(answer(frame))
    except ConnectionClosed:
        return


def test_delays_grow_with_jitter_up_to_the_longest():
    delays = Backoff(first_s=1.0, longest_s=4.0).delays(random.Random(0))
    seen = [next(delays) for _ in range(200)]

    for delay, step in zip(seen, [1.0, 2.0] + [4.0] * 198, strict=True):
        assert step / 2 <= delay <= step
    assert len(set(seen[2:])) == 198


def test_a_round_trip(library, script_server):
    closes = []

    def script(connection, serial):
        obliging(connection, serial)
        closes.append((connection.protocol.close_rcvd.code, connection.request.headers))

    with script_server(script) as url, EnvClient(url, library=library, backoff=QUICK) as client:
        assert client.metadata.positive("action_horizon") == 1
        for _ in range(3):
            action = client.infer(ask(0, 1))
            assert action.action.shape == (1, 2, 1)
            assert not action.action.flags.writeable
            assert client.holding == {0, 1}
            client.feedback(report(0, 1))
        assert client.connections == 1
        client.connect()
        client.close()
        client.close()
        assert client.holding == frozenset()
    ((code, headers),) = closes
    assert code == 1000
    assert "Sec-WebSocket-Extensions" not in headers, "no permessage-deflate"


def test_it_waits_for_a_server_that_comes_late(library, script_server):
    port = free_port()
    client = EnvClient(f"ws://127.0.0.1:{port}", library=library, backoff=QUICK)
    found = []
    thread = threading.Thread(target=lambda: found.append(client.connect()))
    thread.start()
    from websockets.sync.server import serve

    with serve(lambda c: obliging(c, 0), "127.0.0.1", port) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        thread.join(10)
        client.close()
        server.shutdown()
        serving.join()
    assert found[0].positive("action_horizon") == 1


def test_it_gives_up_within_its_limit(library):
    backoff = Backoff(first_s=0.01, longest_s=0.05, limit_s=0.3)
    client = EnvClient(f"ws://127.0.0.1:{free_port()}", library=library, backoff=backoff)
    begin = time.monotonic()
    with pytest.raises(ServerNotFoundError) as caught:
        client.infer(ask(0))

    assert time.monotonic() - begin < 5.0
    assert 3 <= caught.value.attempts <= 40, "patient, not hammering"
    assert caught.value.waited_s <= 1.0


def test_a_limit_of_none_is_no_limit(library, script_server):
    attempts = []

    def flaky(connection, request):
        attempts.append(1)
        return connection.respond(503, "starting\n") if len(attempts) < 5 else None

    backoff = Backoff(first_s=0.01, longest_s=0.02, limit_s=None)
    with (
        script_server(obliging, process_request=flaky) as url,
        EnvClient(url, library=library, backoff=backoff) as client,
    ):
        assert client.connections == 1
    assert len(attempts) == 5


@pytest.mark.parametrize("status", [401, 404])
def test_a_refused_handshake_is_not_retried(library, script_server, status):
    attempts = []

    def refuse(connection, request):
        attempts.append(1)
        return connection.respond(status, "no\n")

    with script_server(obliging, process_request=refuse) as url:
        with pytest.raises(HandshakeError) as caught:
            EnvClient(url, library=library, backoff=QUICK).connect()
        assert caught.value.status == status
    assert len(attempts) == 1


def test_the_api_key_travels_in_the_handshake(library, script_server):
    seen = []

    def look(connection, request):
        seen.append(request.headers["Authorization"])

    with (
        script_server(obliging, process_request=look) as url,
        EnvClient(url, library=library, api_key="s3cret"),
    ):
        assert seen == ["Api-Key s3cret"]


def test_tls(library, script_server, server_tls, client_tls):
    with script_server(obliging, ssl=server_tls) as url:
        url = url.replace("ws://127.0.0.1", "wss://localhost")
        with EnvClient(url, library=library, ssl_context=client_tls) as client:
            client.infer(ask(0))
        with pytest.raises(HandshakeError):
            EnvClient(url, library=library, backoff=QUICK).connect()


@pytest.mark.parametrize(
    ("close", "kind"),
    [
        (CLOSE_STOP, ServerStopped),
        (CLOSE_RESYNC, ConnectionReplaced),
        (CLOSE_SHUTDOWN, ConnectionReplaced),
        (close_refused("cameras: a, not b"), ObservationRefusedError),
        (CLOSE_INTERNAL_ERROR, ServerFailedError),
    ],
)
def test_a_close_instead_of_an_action_is_reported(library, script_server, close, kind):
    def script(connection, serial):
        connection.send(METADATA)
        connection.recv()
        connection.close(close.code, close.reason)

    with (
        script_server(script) as url,
        EnvClient(url, library=library, backoff=QUICK) as client,
    ):
        with pytest.raises(kind) as caught:
            client.infer(ask(0))
        assert caught.value.close == close


def test_a_lost_tcp_connection_is_handled_like_a_shutdown(library, script_server):
    def script(connection, serial):
        if serial == 0:
            connection.send(METADATA)
            connection.recv()
            connection.socket.shutdown(socket.SHUT_RDWR)
        else:
            obliging(connection, serial)

    with (
        script_server(script) as url,
        EnvClient(url, library=library, backoff=QUICK) as client,
    ):
        with pytest.raises(ConnectionReplaced) as caught:
            client.infer(ask(0))
        assert caught.value.close.code == 1006
        client.infer(ask(0))
        assert client.connections == 2


def test_a_dropped_feedback_names_the_envs_to_reset(library, script_server):
    gone = threading.Event()

    def script(connection, serial):
        if serial:
            return obliging(connection, serial)
        connection.send(METADATA)
        connection.send(answer(connection.recv()))
        connection.close(1001, "Server shutdown")
        gone.set()
        return None

    with (
        script_server(script) as url,
        EnvClient(url, library=library, backoff=QUICK) as client,
    ):
        client.infer(ask(0, 1))
        assert gone.wait(10)

        def go_on():
            client.feedback(report(0, 1, done=True))
            client.infer(ask(0, 1))  # the close may still have been on its way before

        with pytest.raises(ConnectionReplaced) as caught:
            go_on()
        if caught.value.must_reset:
            assert caught.value.must_reset == {0, 1}
        with pytest.raises(ConnectionReplaced) as caught:
            client.feedback(report(0, 1, done=True))
        assert caught.value.must_reset == {0, 1}
        client.infer(ask(0, 1))
        client.feedback(report(1))
        assert client.connections == 2


def test_it_can_wait_for_the_next_run(library, script_server):
    def script(connection, serial):
        if serial < 2:
            connection.send(METADATA)
            connection.recv()
            connection.close(1001, "plugrl-server-stop")
        else:
            obliging(connection, serial)

    with script_server(script) as url:
        client = EnvClient(url, library=library, backoff=QUICK, wait_for_next_run=True)
        for _ in range(2):
            with pytest.raises(ConnectionReplaced):
                client.infer(ask(0))
        client.infer(ask(0))
        assert client.connections == 3
        client.close()


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (["Traceback: text"], MalformedMessageError),
        ([b"\xc1"], MalformedMessageError),
        ([encode({"message_type": "action"})], OutOfTurnError),
    ],
)
def test_a_server_that_breaks_the_protocol_at_once_is_fatal(library, script_server, frames, kind):
    def script(connection, serial):
        for frame in frames:
            connection.send(frame)
        with pytest.raises(ConnectionClosed):
            connection.recv()

    with script_server(script) as url, pytest.raises(kind):
        EnvClient(url, library=library, backoff=QUICK).connect()


@pytest.mark.parametrize("frame", ["text", METADATA, b"\x80"])
def test_a_server_that_breaks_the_protocol_later_is_fatal(library, script_server, frame):
    seen = []

    def script(connection, serial):
        connection.send(METADATA)
        connection.recv()
        connection.send(frame)
        try:
            connection.recv()
        except ConnectionClosed as error:
            seen.append(error.rcvd.code)

    with script_server(script) as url:
        client = EnvClient(url, library=library, backoff=QUICK)
        with pytest.raises((MalformedMessageError, OutOfTurnError)):
            client.infer(ask(0))
    wait_until(lambda: seen)  # the script's thread may be a moment behind
    assert seen == [1002]


def test_an_action_that_does_not_come_in_time_is_given_up_with_its_connection(
    library, script_server
):
    def script(connection, serial):
        if serial:
            return obliging(connection, serial)
        connection.send(METADATA)
        connection.recv()
        with pytest.raises(ConnectionClosed):
            connection.recv()
        return None

    with (
        script_server(script) as url,
        EnvClient(url, library=library, backoff=QUICK) as client,
    ):
        with pytest.raises(ConnectionReplaced, match=r"no action within 0\.05 s"):
            client.infer(ask(0), timeout_s=0.05)
        assert client.infer(ask(0)).env_ids.tolist() == [0], "a late reply cannot be taken for this"


def test_a_server_without_metadata_is_not_waited_for_ever(library, script_server):
    def silent(connection, serial):
        with pytest.raises(ConnectionClosed):
            connection.recv()

    backoff = Backoff(first_s=0.01, longest_s=0.01, limit_s=0.2)
    with script_server(silent) as url:
        client = EnvClient(url, library=library, backoff=backoff)
        client.options = ClientOptions(url=url, open_timeout_s=0.6)
        with pytest.raises(ServerNotFoundError, match="no metadata"):
            client.connect()


@pytest.mark.parametrize(
    ("close", "wait", "kind"),
    [
        (CLOSE_RESYNC, False, None),
        (CLOSE_STOP, True, None),
        (CLOSE_STOP, False, ServerStopped),
        (CLOSE_INTERNAL_ERROR, True, ServerFailedError),
    ],
)
def test_a_server_that_closes_before_its_metadata(library, script_server, close, wait, kind):
    def script(connection, serial):
        if serial:
            return obliging(connection, serial)
        return connection.close(close.code, close.reason)

    with script_server(script) as url:
        client = EnvClient(url, library=library, backoff=QUICK, wait_for_next_run=wait)
        if kind is None:
            client.connect()
            assert client.connections == 1, "one that is on its way out, then the next"
        else:
            with pytest.raises(kind):
                client.connect()
        client.close()


def test_a_server_that_is_no_websocket_server_is_not_found(library):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_nonsense():
            for _ in range(2):
                connection, _address = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = threading.Thread(target=answer_nonsense)
        thread.start()
        backoff = Backoff(first_s=0.02, longest_s=0.02, limit_s=0.03)
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerNotFoundError):
            EnvClient(url, library=library, backoff=backoff).connect()
        socket.create_connection(listener.getsockname()).close()
        thread.join(10)


def test_pings_are_answered_while_the_client_steps_its_environment(library, script_server):
    pongs = []

    def script(connection, serial):
        connection.send(METADATA)
        connection.send(answer(connection.recv()))
        pongs.extend(connection.ping().wait(5) for _ in range(3))
        done.set()
        obliging_rest(connection)

    def obliging_rest(connection):
        with contextlib.suppress(ConnectionClosed):
            while connection.recv():
                pass

    done = threading.Event()
    with (
        script_server(script) as url,
        EnvClient(url, library=library, backoff=QUICK) as client,
    ):
        client.infer(ask(0))
        assert done.wait(10), "while the client does nothing but step"
        client.feedback(report(0))
    assert pongs == [True] * 3


def test_a_server_that_answers_no_pings_is_given_up(library):
    """A half-open connection: the server's machine is gone, TCP does not know."""
    from websockets.http11 import Request
    from websockets.server import ServerProtocol

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def freeze():
            connection, _address = listener.accept()
            protocol = ServerProtocol()
            while not (events := protocol.events_received()):
                protocol.receive_data(connection.recv(65536))
            assert isinstance(events[0], Request)
            protocol.send_response(protocol.accept(events[0]))
            protocol.send_binary(METADATA)
            connection.sendall(b"".join(protocol.data_to_send()))
            release.wait(30)
            connection.close()

        release = threading.Event()
        thread = threading.Thread(target=freeze)
        thread.start()
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        client = EnvClient(url, library=library, backoff=QUICK)
        client.options = ClientOptions(
            url=url, ping_interval_s=0.1, ping_timeout_s=0.1, close_timeout_s=0.1
        )
        with pytest.raises(ConnectionReplaced):
            client.infer(ask(0))
        release.set()
        thread.join(10)


def test_closing_a_client_that_never_connected_does_nothing(library):
    EnvClient("ws://127.0.0.1:1", library=library).close()


def test_a_close_frame_is_a_value():
    assert str(Close(1006)) == "1006"


@pytest.mark.parametrize(
    "url",
    ["http://here", "ws://", "ws://:1", "ws://here:port", "ws://here:99999", "ws://here:0",
     "ws://here:1#x", "ws://[::1:80", "here:8000", ""],
)  # fmt: skip
def test_what_is_no_address_is_refused_before_anything_is_tried(url):
    with pytest.raises(MisuseError, match="expected ws://host:port"):
        EnvClient(url)


def test_certificates_are_for_wss():
    with pytest.raises(MisuseError, match="certificates are for wss"):
        EnvClient("ws://here:1", ssl_context=ssl.create_default_context())
