"""Whole messages that pass the library's parser by, and everything that must not."""

import asyncio
import contextlib
import struct

import pytest

from plugrl_protocol.errors import CLOSE_STOP, Close
from plugrl_protocol.links import ServerOptions, choose

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
BINARY, TEXT, CONT, CLOSING, PING = 2, 1, 0, 8, 9
MASK = b"\x01\x80\x7f\xff"


def frame(payload, *, opcode=BINARY, fin=True, masked=True, length_bytes=None):
    """Spell a frame as a client sends it."""
    size = len(payload)
    if length_bytes is None:
        length_bytes = 0 if size < 126 else 2 if size < 65536 else 8
    short = {0: size, 2: 126, 8: 127}[length_bytes]
    head = bytes((0x80 * fin | opcode, 0x80 * masked | short))
    head += size.to_bytes(length_bytes, "big") if length_bytes else b""
    if not masked:
        return head + payload
    return head + MASK + bytes(b ^ MASK[i % 4] for i, b in enumerate(payload))


class Recorder:
    """Takes what one connection receives."""

    def __init__(self, link):
        self.link = link
        self.frames = []
        self.close = None
        self.gone = asyncio.Event()

    def frame(self, data):
        self.frames.append(data)

    def closed(self, close):
        self.close = close
        self.gone.set()


@contextlib.asynccontextmanager
async def opened(**options):
    """Give what the server received, what feeds it bytes, and the client's reader."""
    made = []

    def accept(link):
        made.append(Recorder(link))
        return made[0]

    links = await choose("websockets").listen(ServerOptions(**options), accept)
    reader, writer = await asyncio.open_connection("127.0.0.1", links.port)
    writer.write(HANDSHAKE)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    while not made:
        await asyncio.sleep(0)
    recorder = made[0]
    # Bytes are handed to the connection directly: what arrives together must not be chance.
    yield recorder, recorder.link._connection.data_received, reader
    writer.close()
    await links.stop_listening()
    await links.wait_closed()


async def sent(reader):
    """Read one frame of the server: its opcode and payload."""
    opcode, size = await reader.readexactly(2)
    if size > 125:
        size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
    return opcode & 0x0F, await reader.readexactly(size)


MESSAGES = [b"", b"a", bytes(125), bytes(range(256)) * 2, b"\xff" * 70_000, b"end"]


def test_messages_are_the_same_however_their_bytes_arrive():
    stream = b"".join(map(frame, MESSAGES))
    ends = [len(b"".join(map(frame, MESSAGES[:n]))) for n in range(1, len(MESSAGES))]
    cuts = {cut for end in ends for cut in range(end - 15, end + 16)} | {1, len(stream) - 1}

    async def check():
        async with opened() as (recorder, feed, _):
            for cut in sorted(c for c in cuts if 0 < c < len(stream)):
                recorder.frames.clear()
                feed(stream[:cut])
                feed(stream[cut:])
                assert recorder.frames == MESSAGES
            for size in (1, 2, 3, 7, 64):
                recorder.frames.clear()
                for start in range(0, len(stream), size):
                    feed(stream[start : start + size])
                assert recorder.frames == MESSAGES
            assert all(type(message) is bytes for message in recorder.frames)

    asyncio.run(check())


def test_whole_messages_pass_the_parser_by(monkeypatch):
    async def check():
        async with opened() as (recorder, feed, _):
            feed(frame(b"the first tells where the parser stands"))
            parsed = []
            monkeypatch.setattr(recorder.link._protocol, "receive_data", parsed.append)
            feed(b"".join(map(frame, MESSAGES[1:])))
            assert recorder.frames[1:] == MESSAGES[1:]
            assert not parsed

    asyncio.run(check())


def test_fragments_control_frames_and_text_stand_where_they_were_sent():
    stream = [
        frame(b"one"),
        frame(b"two-", fin=False),
        frame(b"are you there", opcode=PING),
        frame(b"halves", opcode=CONT),
        frame(b"three", opcode=TEXT),
        frame(b"four", length_bytes=8),
        frame(b"five"),
    ]

    async def check():
        async with opened() as (recorder, feed, reader):
            for pieces in ([b"".join(stream)], stream):
                recorder.frames.clear()
                for piece in pieces:
                    feed(piece)
                assert recorder.frames == [b"one", b"two-halves", "three", b"four", b"five"]
                assert await sent(reader) == (0x0A, b"are you there")

    asyncio.run(check())


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (frame(b"bare", masked=False), 1002),
        (frame(b"x", opcode=3), 1002),
        (bytes((0xC2,)) + frame(b"reserved bit")[1:], 1002),
        (frame(b"no beginning", opcode=CONT), 1002),
        (frame(b"first", fin=False) + frame(b"and another"), 1002),
        (frame(bytes(1025)), 1009),
        (frame(b"")[:1] + b"\xff" + bytes(8)[:-1] + b"\x80" + MASK, None),
    ],
    ids=["unmasked", "opcode", "reserved", "continuation", "interleaved", "large", "incomplete"],
)
def test_what_breaks_a_rule_is_refused_behind_whole_messages(wrong, code):
    async def check():
        async with opened(max_message_mb=1 / 1024) as (recorder, feed, reader):
            feed(frame(b"first"))
            feed(frame(b"second") + wrong)
            assert recorder.frames == [b"first", b"second"]
            if code is None:
                return
            opcode, payload = await sent(reader)
            assert (opcode, *struct.unpack(">H", payload[:2])) == (CLOSING, code)
            feed(frame(b"too late"))
            assert recorder.frames == [b"first", b"second"]

    asyncio.run(check())


def test_answers_of_every_size_are_frames():
    async def check():
        async with opened() as (recorder, feed, reader):
            feed(frame(b"hello"))
            for size in (0, 1, 125, 126, 65_535, 65_536, 200_000):
                recorder.link.send(b"\x07" * size)
                assert await sent(reader) == (BINARY, b"\x07" * size)

    asyncio.run(check())


def test_nothing_is_taken_or_sent_once_the_connection_closes():
    async def check():
        async with opened() as (recorder, feed, reader):
            feed(frame(b"first"))
            recorder.link.close(CLOSE_STOP)
            recorder.link.send(b"not any more")
            feed(frame(b"too late"))
            assert (await sent(reader))[0] == CLOSING
            recorder.link.send(b"not any more")
            feed(frame(b"too late") + frame(struct.pack(">H", 1000), opcode=CLOSING))
            await recorder.gone.wait()
            assert recorder.frames == [b"first"]
            assert recorder.close == Close(CLOSE_STOP.code, CLOSE_STOP.reason)
            assert await reader.read() == b""

    asyncio.run(check())


def test_messages_wait_while_answers_are_not_read():
    async def check():
        async with opened() as (recorder, feed, _):
            connection = recorder.link._connection
            feed(frame(b"first"))
            connection.pause_writing()
            feed(frame(b"second") + frame(b"third"))
            assert recorder.frames == [b"first"]
            connection.resume_writing()
            assert recorder.frames == [b"first", b"second", b"third"]
            feed(frame(b"fourth"))
            assert recorder.frames[-1] == b"fourth"

    asyncio.run(check())
