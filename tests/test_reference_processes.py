"""The reference server and client run as processes, to the ends and exit codes they promise."""

import contextlib
import importlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WIRE = Path(__file__).resolve().parents[1] / "examples" / "wire"
SERVER, CLIENT = WIRE / "ref_server.py", WIRE / "ref_client.py"


def load(name):
    """Import an example by its name; they are scripts, not packages."""
    sys.path.insert(0, str(WIRE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(WIRE))


ref_server, ref_client = load("ref_server"), load("ref_client")


@contextlib.contextmanager
def server_process(*flags):
    """Run the reference server; yield (process, port)."""
    command = [sys.executable, str(SERVER), "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = re.fullmatch(r"listening on 127\.0\.0\.1:(\d+)", process.stdout.readline()[:-1])
            yield process, int(found[1])
        finally:
            process.terminate()


def run_client(port, *flags):
    """Run the reference client to its end; return (exit code, output)."""
    command = [sys.executable, str(CLIENT), "--port", str(port), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_the_pair_runs_to_the_end_and_the_server_stops_on_sigterm():
    with server_process("--probe") as (server, port):
        assert run_client(port, "--episodes", "9")[0] == 0
        assert run_client(port, "--episodes", "9", "--features", "", "--replan-steps", "1")[0] == 0
        server.send_signal(signal.SIGTERM)
        last = server.stdout.read().splitlines()[-1]
        assert server.wait(10) == 0
    assert re.match(r"Server shutdown: \d+ rounds, \d+ steps, (\d+) episodes", last)
    assert "malformed" not in last


def test_a_finished_run_ends_the_client_with_exit_code_zero():
    with server_process("--rounds", "5") as (server, port):
        code, output = run_client(port, "--episodes", "1000000")
        assert server.wait(10) == 0
        assert "plugrl-server-stop: 5 rounds" in server.stdout.read()
    assert code == 0
    assert "closed by the server: 1001 plugrl-server-stop" in output


def test_a_wrong_key_and_a_refusing_policy_end_the_client_with_exit_code_one():
    with server_process("--api-key", "k", "--expect", "x:2") as (_, port):
        assert run_client(port)[0] == 1
        code, output = run_client(port, "--api-key", "k")
    assert code == 1
    assert "1008 states a:3,t:1, policy has x:2" in output


def test_a_client_without_a_server_gives_up_with_exit_code_three():
    with server_process() as (_, port):
        pass
    code, output = run_client(port, "--reconnect-limit", "2")
    assert code == 3
    assert output.count("no server at") == 3


@pytest.mark.parametrize(
    "bug", ["metadata-twice", "env-ids-reordered", "feedback-answered", "action-batch-major"]
)
def test_a_server_that_breaks_the_protocol_is_reported(bug):
    with server_process("--bug", bug) as (_, port):
        code, output = run_client(port, "--num-envs", "3")
    assert code == 1
    assert "giving up: " in output


@pytest.mark.parametrize(("script", "module"), [(SERVER, ref_server), (CLIENT, ref_client)])
def test_every_bug_is_listed_with_its_clause(script, module):
    command = [sys.executable, str(script), "--list-bugs"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(module.BUGS) >= 15
    for line, name in zip(lines, module.BUGS, strict=True):
        assert re.fullmatch(rf"{name}\t[1-7]: .+", line)
        assert script.read_text().count(f'"{name}"') >= 2, f"{name} is listed but does nothing"
