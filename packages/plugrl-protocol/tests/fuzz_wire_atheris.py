"""Coverage-guided fuzzing of the decoder and of both sessions; run by the slow tests."""

import contextlib
import sys

import atheris

with atheris.instrument_imports(include=["plugrl_protocol"]):
    from plugrl_protocol.client_session import ClientSession
    from plugrl_protocol.codec import decode, encode
    from plugrl_protocol.errors import CodecError, ProtocolError
    from plugrl_protocol.server_session import ServerSession


def one_input(frame):
    """Decode, decode again what was decoded, and show the frame to both ends."""
    with contextlib.suppress(CodecError):
        value = decode(frame)
        if isinstance(value, dict):
            decode(encode(value))
    server = ServerSession()
    server.open()
    for session in (server, ClientSession()):
        with contextlib.suppress(ProtocolError):
            session.receive(frame)


atheris.Setup(sys.argv, one_input)
atheris.Fuzz()
