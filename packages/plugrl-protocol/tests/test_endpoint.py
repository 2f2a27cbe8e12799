"""The server facade under honest and hostile clients; on both libraries."""

import contextlib
import itertools
import logging
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from plugrl_protocol.codec import decode, encode
from plugrl_protocol.endpoint import Endpoint, EndpointConfig
from plugrl_protocol.env_client import Backoff, EnvClient
from plugrl_protocol.errors import (
    CLOSE_RESYNC,
    CLOSE_STOP,
    MalformedMessageError,
    MisuseError,
)
from plugrl_protocol.links import ServerOptions
from plugrl_protocol.messages import (
    Feedback,
    Infer,
    make_metadata,
    make_observation,
    read_episodes,
)
from plugrl_protocol.server_session import SessionConfig
from plugrl_protocol.testing import NotingApplication, ProbeEnv, play, serve_in_thread

QUICK = Backoff(first_s=0.02, longest_s=0.1, limit_s=10.0)
RESYNC = (1001, "plugrl-server-resync")


def config(library, session=None, **listen):
    return EndpointConfig(
        library=library, listen=ServerOptions(**listen), session=session or SessionConfig()
    )


def ids(*values):
    return np.array(values, dtype=np.int64)


def infer_frame(*envs, size=1):
    request = Infer(
        env_indices=ids(*envs),
        step_ids=ids(*[0] * len(envs)),
        observation=make_observation(
            num_envs=len(envs), states={"s": np.zeros((len(envs), size), np.float32)}
        ),
    )
    return encode(request.to_wire())


def feedback_frame(*envs, **changes):
    m = len(envs)
    report = Feedback(
        env_indices=ids(*envs),
        step_ids=ids(*[0] * m),
        observation=make_observation(num_envs=m, states={"s": np.zeros((m, 1), np.float32)}),
        rewards=np.ones(m, np.float32),
        terminated=np.ones(m, np.bool_),
        truncated=np.zeros(m, np.bool_),
        **changes,
    )
    return encode(report.to_wire())


def raw(url, **options):
    """A client without any of our code behind it."""
    return connect(url, compression=None, max_size=None, **options)


def closing(connection):
    """Read to the end; give the code and reason of the server's close frame."""
    with contextlib.suppress(TimeoutError):
        while True:
            try:
                connection.recv(timeout=10)
            except ConnectionClosed as error:
                frame = error.rcvd
                return (1006, "") if frame is None else (frame.code, frame.reason)
    raise AssertionError("the server did not close")


def honest_round(url, library="websockets"):
    with EnvClient(url, library=library, backoff=QUICK) as client:
        play(client, ProbeEnv(2), episodes=2)


def test_many_clients_play_the_probe(library):
    app = NotingApplication()
    metadata = make_metadata(policy="Probe", action_horizon=4)
    with serve_in_thread(app, metadata=metadata, config=config(library)) as server:
        results = []

        def run(replan):
            with EnvClient(server.url, library=library) as client:
                results.append(play(client, ProbeEnv(3), episodes=6, replan_steps=replan))

        threads = [threading.Thread(target=run, args=(replan,)) for replan in (None, 1, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        app.wait_for(lambda notes: len(notes.closes) == 3)

    assert sum(result.episodes for result in results) >= 18
    assert {close.code for _, close in app.closes} == {1000}
    for _, report in app.reports:
        assert report.rewards.tolist() == report.steps.tolist(), "the probe pays 1 a step"
        assert report.steps.max() <= 4
        for episode in read_episodes(report):
            length = 3 + 2 * (episode.env_index % 3)
            assert (episode.episode_return, episode.length_steps) == (length, length)
            assert episode.success


def test_metadata_comes_first_and_pings_are_answered_while_inferring(library):
    app = NotingApplication(act=None)
    with serve_in_thread(app, config=config(library)) as server, raw(server.url) as client:
        assert decode(client.recv())["message_type"] == "metadata"
        client.send(infer_frame(0))
        app.wait_for(lambda notes: notes.requests)
        for _ in range(3):
            assert client.ping().wait(5)
        ((connection, _),) = app.requests
        assert repr(connection).startswith("<Connection 1 127.0.0.1:")
        answerer = threading.Thread(target=connection.answer_soon, args=(np.zeros((2, 1, 3)),))
        answerer.start()
        assert decode(client.recv())["data"]["action"].shape == (2, 1, 3)
        answerer.join()
        client.send(feedback_frame(0))
        app.wait_for(lambda notes: notes.reports)
        assert connection.records[0].terminated
        assert connection.reused_rows == 0
        assert connection.is_open
    app.wait_for(lambda notes: notes.closes)
    assert not connection.is_open
    connection.answer(np.zeros((2, 1, 3)))  # too late, and harmless


HOSTILE = {
    "garbage": b"\xc1\xff\x00",
    "empty": b"",
    "text": "hello",
    "a number": b"\x01",
    "a list": msgpack.packb([1, 2]),
    "no type": msgpack.packb({"a": 1}),
    "another type": msgpack.packb({"message_type": "hello"}),
    "objects": msgpack.packb(
        {
            "message_type": "infer",
            "env_indices": {
                b"__ndarray__": True, b"data": b"\x41" * 8, b"dtype": "|O", b"shape": [1],
            },
        }
    ),
    "a depth bomb": b"\x81\xa1k" * 100_000,
    "a key bomb": msgpack.packb({str(i): i for i in range(100_000)}),
    "feedback first": feedback_frame(0),
    "a truncated infer": infer_frame(0)[:-3],
    "two envs of one name": infer_frame(0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_frame_closes_that_connection_and_no_other(library, name):
    app = NotingApplication()
    with (
        serve_in_thread(app, config=config(library)) as server,
        raw(server.url) as honest,
        raw(server.url) as hostile,
    ):
        honest.recv()
        honest.send(infer_frame(0))
        honest.recv()
        hostile.send(HOSTILE[name])
        assert closing(hostile) == RESYNC
        honest.send(feedback_frame(0))
        honest.send(infer_frame(0))
        assert decode(honest.recv(timeout=10))["message_type"] == "action"
        assert len(app.requests) == 2


def test_a_frame_out_of_turn_while_inferring_closes_with_resync(library):
    app = NotingApplication(act=None)
    with serve_in_thread(app, config=config(library)) as server, raw(server.url) as client:
        client.send(infer_frame(0))
        client.send(infer_frame(1))
        assert closing(client) == RESYNC
        app.wait_for(lambda notes: notes.closes)
        assert (app.closes[0][1]) == CLOSE_RESYNC


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_message_over_the_cap_is_refused_and_the_server_stays(library, fragments):
    app = NotingApplication()
    with serve_in_thread(app, config=config(library, max_message_mb=1)) as server:
        with raw(server.url) as client:
            client.recv()
            client.send(infer_frame(0, size=200_000))
            client.recv()
            client.send(feedback_frame(0))
            part = bytes(int(1.2 * 2**20) // fragments)
            with contextlib.suppress(ConnectionClosed):
                client.send(part if fragments == 1 else [part] * fragments)
            code, reason = closing(client)
        assert (code, reason) == (1009, "message over 1 MiB")
        honest_round(server.url)


def test_empty_fragments_are_counted_too(library):
    app = NotingApplication()
    with serve_in_thread(app, config=config(library, max_message_mb=0.5)) as server:
        with raw(server.url) as client:
            client.recv()
            with contextlib.suppress(ConnectionClosed):
                client.send(itertools.repeat(b"", 20_000))
            assert closing(client) == (1009, "message over 0.5 MiB")
        honest_round(server.url)
        with raw(server.url) as client:
            client.recv()
            frame = infer_frame(0)
            client.send([frame[:50], b"", frame[50:90], frame[90:]])
            assert decode(client.recv())["message_type"] == "action"


def test_a_frame_far_over_the_cap_is_refused_before_it_is_read(library):
    app = NotingApplication()
    with serve_in_thread(app, config=config(library, max_message_mb=1)) as server:
        with raw(server.url) as client:
            with contextlib.suppress(ConnectionClosed):
                client.send(bytes(2**25))
            assert closing(client)[0] in (1009, 1006), "unread bytes may cost the close frame"
        app.wait_for(lambda notes: notes.closes)
        assert app.closes[0][1].code == 1009
        honest_round(server.url)


def test_healthz_answers_when_the_server_can_infer(library):
    ready = threading.Event()
    listening = config(library, api_key="k", ready=ready.is_set)
    with serve_in_thread(NotingApplication(), config=listening) as server:
        url = server.url.replace("ws://", "http://") + "/healthz"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url, timeout=10)
        assert caught.value.code == 503
        caught.value.close()
        ready.set()
        with urllib.request.urlopen(url + "?verbose", timeout=10) as response:
            assert response.status == 200


def test_an_api_key_is_asked_for_in_the_handshake(library):
    with serve_in_thread(NotingApplication(), config=config(library, api_key="clé")) as server:
        for headers in (
            {},
            {"Authorization": "Api-Key wrong"},
            {"Authorization": "Bearer cle"},
            {"Authorization": "Api-Key "},
        ):
            with pytest.raises(InvalidStatus) as caught:
                raw(server.url, additional_headers=headers).__enter__()
            assert caught.value.response.status_code == 401
    with serve_in_thread(NotingApplication(), config=config(library, api_key="right")) as server:
        headers = {"authorization": "Api-Key right"}
        with raw(server.url, additional_headers=headers) as client:
            assert decode(client.recv())["message_type"] == "metadata"
        with EnvClient(server.url, api_key="right", library=library) as ours:
            assert ours.connections == 1


def test_tls(library, server_tls, client_tls):
    listening = config(library, ssl_context=server_tls)
    with serve_in_thread(NotingApplication(), config=listening) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        with EnvClient(url, library=library, ssl_context=client_tls) as client:
            play(client, ProbeEnv(1), episodes=2)


def test_compression_is_not_negotiated(library):
    with (
        serve_in_thread(NotingApplication(), config=config(library)) as server,
        connect(server.url) as client,  # offers permessage-deflate
    ):
        assert "Sec-WebSocket-Extensions" not in client.response.headers


def test_a_feedback_that_does_not_come_closes_the_connection(library):
    session = SessionConfig(feedback_timeout_s=0.2)
    app = NotingApplication()
    with (
        serve_in_thread(app, config=config(library, session)) as server,
        raw(server.url) as client,
        raw(server.url) as idle,
    ):
        client.recv()
        client.send(infer_frame(0))
        client.recv()
        assert closing(client) == (1001, "Feedback timeout")
        idle.recv()
        idle.send(infer_frame(0))
        assert decode(idle.recv())["message_type"] == "action", "one that was idle is not overdue"


def test_the_feedback_clock_stands_while_the_server_learns(library):
    session = SessionConfig(feedback_timeout_s=0.3)
    app = NotingApplication()
    with serve_in_thread(app, config=config(library, session)) as server, raw(server.url) as client:
        client.send(infer_frame(0))
        server.call(server.endpoint.suspend_feedback_clock)
        with raw(server.url) as later:
            later.send(infer_frame(0))
            for one in (client, later):
                one.recv()
                one.recv()
            threading.Event().wait(0.8)  # the learn step itself, longer than the timeout
            client.send(feedback_frame(0))
            client.send(infer_frame(0))
            assert decode(client.recv(timeout=5))["message_type"] == "action"
            server.call(server.endpoint.resume_feedback_clock)
            begin = time.monotonic()
            assert closing(later) == (1001, "Feedback timeout")
            assert time.monotonic() - begin > 0.1


def test_an_application_that_fails_closes_with_1011_and_shows_no_traceback(library, caplog):
    class Broken(NotingApplication):
        def feedback(self, connection, report):
            raise ZeroDivisionError("secret")

        def disconnected(self, connection, close):
            super().disconnected(connection, close)
            raise ZeroDivisionError("again")

    app = Broken()
    with (
        caplog.at_level(logging.CRITICAL, "plugrl_protocol"),
        serve_in_thread(app, config=config(library)) as server,
        raw(server.url) as client,
    ):
        client.send(infer_frame(0))
        client.send(feedback_frame(0))
        assert closing(client) == (1011, "Internal server error.")
        app.wait_for(lambda notes: notes.closes)
        with raw(server.url) as other:
            assert decode(other.recv())["message_type"] == "metadata"


def test_an_application_may_find_a_message_malformed(library):
    class Strict(NotingApplication):
        def feedback(self, connection, report):
            raise MalformedMessageError("an episode record of text")

    with (
        serve_in_thread(Strict(), config=config(library)) as server,
        raw(server.url) as client,
    ):
        client.send(infer_frame(0))
        client.send(feedback_frame(0))
        assert closing(client) == RESYNC


def test_an_application_can_refuse_an_observation(library):
    class Picky(NotingApplication):
        def infer(self, connection, request):
            connection.refuse("built for states pose:7, got s:1; " + "x" * 200)

    with (
        serve_in_thread(Picky(), config=config(library)) as server,
        raw(server.url) as client,
    ):
        client.send(infer_frame(0))
        code, reason = closing(client)
        assert code == 1008
        assert reason.startswith("built for states pose:7, got s:1")
        assert len(reason.encode()) <= 123


def test_a_client_can_refuse_what_it_is_told_to_do(library, caplog):
    """The server hears why, says so, and goes on for others."""
    app = NotingApplication()
    with serve_in_thread(app, config=config(library)) as server:
        with EnvClient(server.url, library=library, backoff=QUICK) as client:
            client.refuse("8 steps were declared; the server sends 4; " + "x" * 200)
        app.wait_for(lambda notes: notes.closes)
        honest_round(server.url, library)
    close = app.closes[0][1]
    assert close.code == 1008
    assert close.reason.startswith("8 steps were declared; the server sends 4; xxx")
    assert f"the client refuses this server, {close.reason}" in caplog.text


def test_an_answer_from_a_thread_that_does_not_fit_closes_with_1011(library, caplog):
    app = NotingApplication(act=None)
    with (
        caplog.at_level(logging.CRITICAL, "plugrl_protocol"),
        serve_in_thread(app, config=config(library)) as server,
        raw(server.url) as client,
    ):
        client.send(infer_frame(0))
        app.wait_for(lambda notes: notes.requests)
        app.requests[0][0].answer_soon(np.zeros(3))
        assert closing(client) == (1011, "Internal server error.")


def test_a_close_from_a_thread(library):
    app = NotingApplication(act=None)
    with serve_in_thread(app, config=config(library)) as server, raw(server.url) as client:
        client.send(infer_frame(0))
        app.wait_for(lambda notes: notes.requests)
        app.requests[0][0].close_soon(CLOSE_STOP)
        app.requests[0][0].close_soon(CLOSE_RESYNC)
        assert closing(client) == (1001, "plugrl-server-stop"), "the first close decides"


def test_stopping_tells_every_client_why(library):
    app = NotingApplication()
    with serve_in_thread(app, config=config(library)) as server:
        clients = [raw(server.url).__enter__() for _ in range(3)]
        app.wait_for(lambda notes: len(notes.clients) == 3)
        server.stop(CLOSE_STOP)
        assert [closing(client) for client in clients] == [(1001, "plugrl-server-stop")] * 3
        with pytest.raises(OSError, match="refused"):
            raw(server.url).__enter__()
        server.stop(CLOSE_STOP)


def test_a_client_that_vanishes_is_noticed_while_inferring(library):
    app = NotingApplication(act=None)
    with serve_in_thread(app, config=config(library)) as server:
        client = raw(server.url).__enter__()
        client.send(infer_frame(0))
        app.wait_for(lambda notes: notes.requests)
        linger = struct.pack("ii", 1, 0)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.socket.shutdown(socket.SHUT_RDWR)
        app.wait_for(lambda notes: notes.closes)
        assert app.closes[0][1].code == 1006
        client.close()


def test_a_client_that_answers_no_pings_is_dropped(library):
    app = NotingApplication()
    listening = config(library, ping_interval_s=0.1, ping_timeout_s=0.1, close_timeout_s=0.1)
    with (
        serve_in_thread(app, config=listening) as server,
        socket.create_connection(("127.0.0.1", server.endpoint.port)) as frozen,
    ):
        frozen.sendall(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        app.wait_for(lambda notes: notes.clients)
        app.wait_for(lambda notes: notes.closes)


def test_a_half_open_handshake_costs_nobody_anything(library):
    app = NotingApplication()
    listening = config(library, open_timeout_s=0.3)
    with serve_in_thread(app, config=listening) as server:
        address = ("127.0.0.1", server.endpoint.port)
        with socket.create_connection(address) as silent, socket.create_connection(address) as slow:
            slow.sendall(b"GET / HTT")
            honest_round(server.url)
            silent.settimeout(10)
            with contextlib.suppress(ConnectionError):
                while silent.recv(4096):
                    pass
        assert len(app.clients) == 1


def test_a_client_that_does_not_read_stalls_only_itself(library):
    huge = np.zeros((1, 1, 4_000_000), np.float64)
    app = NotingApplication(
        act=lambda request: huge if request.env_indices[0] == 7 else np.zeros((1, 2, 3))
    )
    session = SessionConfig(feedback_timeout_s=0.3)
    listening = config(library, session, close_timeout_s=0.2)
    with (
        serve_in_thread(app, config=listening) as server,
        socket.create_connection(("127.0.0.1", server.endpoint.port)) as stuck,
    ):
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        from websockets.client import ClientProtocol
        from websockets.uri import parse_uri

        protocol = ClientProtocol(parse_uri(server.url))
        protocol.send_request(protocol.connect())
        stuck.sendall(b"".join(protocol.data_to_send()))
        protocol.receive_data(stuck.recv(2048))
        protocol.send_binary(infer_frame(7))
        stuck.sendall(b"".join(protocol.data_to_send()))
        app.wait_for(lambda notes: notes.requests)
        for _ in range(3):
            honest_round(server.url)
        app.wait_for(lambda notes: any(c.serial == 1 for c, _ in notes.closes))


def test_a_client_is_served_again_after_a_resync(library):
    class Moody(NotingApplication):
        def infer(self, connection, request):
            if connection.serial == 1 and len(self.requests) == 3:
                connection.close(CLOSE_RESYNC)
            else:
                super().infer(connection, request)

    app = Moody()
    with (
        serve_in_thread(app, config=config(library)) as server,
        EnvClient(server.url, library=library, backoff=QUICK) as client,
    ):
        result = play(client, ProbeEnv(2), episodes=6)
    assert result.replaced == 1
    assert result.episodes >= 6
    assert [c.serial for c in app.clients] == [1, 2]


def test_an_endpoint_starts_once_and_needs_a_known_library():
    with (
        serve_in_thread(NotingApplication()) as server,
        pytest.raises(MisuseError, match="already"),
    ):
        server.call(lambda: server.endpoint.start().send(None))
    endpoint = Endpoint(NotingApplication(), config=EndpointConfig(library="carrier pigeon"))
    with pytest.raises(MisuseError, match="carrier pigeon"):
        endpoint.start().send(None)


def test_an_endpoint_is_an_async_context_manager(library):
    import asyncio

    async def main():
        async with Endpoint(NotingApplication(), config=config(library)) as endpoint:
            await asyncio.to_thread(honest_round, f"ws://127.0.0.1:{endpoint.port}")

    asyncio.run(main())


def test_who_does_not_read_the_answers_is_served_no_further(library):
    """Memory stays bounded: requests wait in the sockets until the answers are read."""
    large = np.zeros((65_536, 1, 1), np.float32)
    app = NotingApplication(act=lambda request: large)
    with (
        serve_in_thread(app, config=config(library)) as server,
        connect(server.url, compression=None, max_size=None, max_queue=1) as client,
    ):
        client.recv()
        for _ in range(400):
            client.send(infer_frame(0))
            client.send(feedback_frame(0))
        served = -1
        while served != len(app.requests):
            served = len(app.requests)
            time.sleep(0.3)
        assert served < 200
        for _ in range(400):
            assert len(client.recv(timeout=20)) > large.nbytes
