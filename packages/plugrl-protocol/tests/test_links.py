"""The seam between the facades and the WebSocket libraries."""

import sys

import pytest

from plugrl_protocol.errors import MisuseError
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
