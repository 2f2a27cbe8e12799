"""The client checker passes our facade, on both libraries, and sees what is broken."""

import contextlib
import shlex
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import connect

from plugrl_protocol import Backoff, EnvClient, WireError, encode
from plugrl_protocol.conformance.clauses import Report, index
from plugrl_protocol.conformance.client_cli import check_client, main, run_scenario
from plugrl_protocol.conformance.client_scenarios import CLAUSES, SCENARIOS
from plugrl_protocol.conformance.stage import ClientOptions, Stage
from plugrl_protocol.messages import ALL_FEATURES
from plugrl_protocol.testing import ProbeEnv, play

CLIENT = (
    f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name('probe_client.py')))}"
)


def judge(scenarios, command=CLIENT, **changes):
    options = {
        "command": f"{command} {{url}}",
        "features": ALL_FEATURES,
        "probe": True,
        "timeout_s": 10.0,
        **changes,
    }
    return check_client(ClientOptions(**options), scenarios)


def test_our_client_passes_the_main_scenario(library):
    command = f"{CLIENT} --library {library} --api-key sesame"
    report = judge(["basic"], command, api_key="sesame")

    assert report.failures == [], "\n".join(report.lines())
    for name in ("api-key", "action-executed", "steps-really-run", "stop-exit"):
        assert report.verdicts[name][0].name == "PASS"


@pytest.mark.parametrize("scenario", ["late", "reuse", "order", "metadata", "resync", "finish"])
def test_our_client_in_a_thread_passes_the_scenarios(scenario):
    def client(url):
        with EnvClient(url, backoff=Backoff(first_s=0.02, longest_s=0.1, limit_s=10)) as ours:
            play(ours, ProbeEnv(4), episodes=200)

    report = judge_thread(scenario, client)
    assert report.failures == [], "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("replan", ["", "--replan-steps 3"])
def test_our_client_passes_every_scenario(library, scenario, replan):
    report = judge([scenario], f"{CLIENT} --library {library} {replan}")
    assert report.exit_code == 0, "\n".join(report.lines())


def judge_thread(scenario, client, **changes):
    """Judge a client that is a function of a URL, running in a thread."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

    def run():
        with contextlib.suppress(WireError, ConnectionClosed, OSError, InvalidHandshake):
            client(f"ws://127.0.0.1:{port}")

    options = {"port": port, "features": ALL_FEATURES, "probe": True, "timeout_s": 10.0, **changes}
    thread = threading.Thread(target=run)
    with Stage(ClientOptions(**options), Report(index(CLAUSES)), scenario) as stage:
        stage.start_client()
        stage.start_client = thread.start
        run_scenario(stage, scenario)
        report = stage.report
    thread.join(10)
    return report


def infer(ids, **changes):
    n = len(ids)
    message = {
        "message_type": "infer",
        "env_indices": np.array(ids),
        "step_ids": np.zeros(n, int),
        "data": {"images": {}, "states": {}, "text": np.full(n, "x")},
        **changes,
    }
    return encode(message)


def saying(*frames):
    """A client that says these frames, one after each that it hears."""

    def client(url):
        with connect(url, compression=None) as ws:
            for frame in frames:
                ws.recv()
                ws.send(frame)
            while ws.recv():
                pass

    return client


@pytest.mark.parametrize(
    ("frames", "clause"),
    [
        (["hello"], "binary-frames"),
        ([b"\xc1"], "encoding"),
        ([b"\x01"], "root"),
        ([infer([1, 1])], "unique-index"),
        ([infer([-1])], "index-range"),
        ([infer([0], env_indices=np.zeros(1))], "index-dtype"),
        ([infer([], env_indices=np.zeros(0, int))], "no-empty-message"),
        ([infer([0])], "probe-states"),
        ([infer([0], data={"images": {}, "states": {}})], "text"),
        ([infer([0], data={"states": [], "images": {}, "text": ["x"]})], "observation-form"),
        ([infer([0], reuse=np.array([True]))], "text"),
        ([encode({"message_type": "feedback"})], "starts-with-infer"),
        ([], "goes-on"),
    ],
)
def test_broken_messages_are_named(frames, clause):
    report = judge_thread("basic", saying(*frames), timeout_s=0.5)
    assert report.failures == [clause], "\n".join(report.lines())


@pytest.mark.parametrize("frame", [infer([0]), infer([1])])
def test_without_the_probe_only_forms_and_turns_are_judged(frame):
    report = judge_thread("basic", saying(infer([0]), frame), probe=False)
    assert report.failures == ["alternation"]


def test_a_client_that_leaves_or_never_comes_is_named():
    def leave(url):
        with connect(url, compression=None) as ws:
            ws.recv()

    report = judge_thread("basic", leave)
    assert report.failures == ["connects"]
    assert "closed with 1000" in report.verdicts["connects"][1]
    report = judge_thread("basic", lambda url: None, timeout_s=0.3)
    assert report.failures == ["connects"]
    assert "no connection" in report.verdicts["connects"][1]


def test_a_wrong_key_and_an_offer_of_compression_are_named():
    def keyless(url):
        connect(url).__enter__()

    report = judge_thread("basic", keyless, api_key="sesame", timeout_s=0.5)
    assert set(report.failures) == {"api-key", "no-deflate", "connects"}


def test_a_client_that_hammers_is_named():
    def hammer(url):
        deadline = time.monotonic() + 4.0
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(address) as sock:
                sock.recv(1)

    assert judge_thread("patience", hammer).failures == ["patience"]


def test_the_command_line(capsys):
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CLAUSES)
    with pytest.raises(SystemExit):
        main(["--client", "no placeholder"])
    capsys.readouterr()
    arguments = ["--client", f"{CLIENT} {{url}}", "--scenario", "text"]
    assert main([*arguments, "--features", ""]) == 0
    assert " failed" in capsys.readouterr().out
