"""The packaged checkers pass the sound reference programs and catch every bug of theirs."""

import asyncio
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WIRE = Path(__file__).resolve().parents[1] / "examples" / "wire"
BIN = str(Path(sys.executable).parent)
SERVER_CHECKER = shutil.which("plugrl-conformance-server", path=BIN)
CLIENT_CHECKER = shutil.which("plugrl-conformance", path=BIN)


def load(name):
    """Import an example by its name; they are scripts, not packages."""
    sys.path.insert(0, str(WIRE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(WIRE))


ref_server, ref_client = load("ref_server"), load("ref_client")

# The checker's clause that must see the bug; all of them are tried in the slow test.
SEEN_BY = {
    "metadata-twice": "metadata-once",
    "metadata-never": "metadata-first",
    "metadata-zeros": "metadata-honest",
    "deflate": "no-deflate",
    "healthz-missing": "healthz",
    "api-key-ignored": "api-key",
    "cap-ignored": "frame-cap",
    "ping-blocked": "ping",
    "object-dtype": "dtype-object",
    "extra-bytes": "data-too-long",
    "huge-shape": "shape-overflow",
    "deep-tree": "depth-bomb",
    "action-batch-major": "action-shape",
    "env-ids-reordered": "env-ids",
    "action-by-position": "routing",
    "feedback-by-position": "routing",
    "feedback-set-must-match": "feedback-subset",
    "feedback-answered": "feedback-unanswered",
    "two-infers": "two-infers",
    "duplicate-indices": "duplicate-index",
    "negative-index": "negative-index",
    "empty-message": "no-envs",
    "wrong-length": "leading-dimension",
    "feedback-without-action": "idle-env",
    "text-ignored": "text-frame",
    "garbage-kills-server": "garbage",
    "garbage-1011": "garbage",
    "resync-reason": "garbage",
    "stop-reason": "stop",
    "timeout-reason": "feedback-timeout",
    "state-survives": "state-gone",
    "int-rewards": "integer-rewards",
    "nan-reward": "nonfinite-rewards",
    "int-states-refused": "int-states",
    "big-endian-refused": "big-endian",
    "text-list-refused": "text-forms",
    "float64-rewards-refused": "reward-kinds",
    "unsplittable-info": "info-unsplittable",
    "reuse-before-feedback": "reuse-before-feedback",
    "reuse-after-done": "reuse-after-done",
    "steps-out-of-range": "steps-range",
}


# Seen by tests/test_reference_pair.py; what the checker lacks where one clause is tried alone.
NOT_SEEN = {
    "ping-blocked": "a second ping, sent after the first pong: the first may travel with the infer",
}


def runnable(checker):
    """Whether the console script is installed and starts."""
    return checker and subprocess.run([checker, "--help"], capture_output=True).returncode == 0


server_checker = pytest.mark.skipif(
    not runnable(SERVER_CHECKER), reason="plugrl-conformance-server is not installed"
)


def check_server(monkeypatch, bug, *flags, rounds=0, timeout_s=60):
    """Run the checker against the reference server in this process; return (code, output)."""
    monkeypatch.setattr(ref_server, "BUG", bug)
    given = ["--port=0", "--echo=t", "--api-key=k", "--max-message-mb=1", "--feedback-timeout=1"]

    async def run():
        server = ref_server.Server(ref_server.parse([*given, f"--rounds={rounds}"]))
        task = asyncio.create_task(server.run())
        command = [SERVER_CHECKER, f"ws://127.0.0.1:{await server.port}", "--api-key=k", "--echo"]
        command += ["--state-key=t", "--state-dim=1", "--image-key=cam", "--max-message-mb=1"]
        command += ["--feedback-timeout=1", *flags]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            server.finish("Server shutdown")
            await task
        return process.returncode, output.decode()

    return asyncio.run(run())


@server_checker
def test_the_server_checker_passes_the_sound_server(monkeypatch):
    code, output = check_server(monkeypatch, "", "--timeout=5")
    assert code == 0, output
    assert "FAIL" not in output
    code, output = check_server(monkeypatch, "", "--until-stop", "--only=stop", rounds=3)
    assert code == 0, output


@server_checker
@pytest.mark.parametrize("bug", ref_server.BUGS)
def test_the_server_checker_catches(monkeypatch, request, bug):
    if bug in NOT_SEEN:
        request.applymarker(pytest.mark.xfail(reason=NOT_SEEN[bug], strict=False))
    flags, rounds = [f"--only={SEEN_BY[bug]}", "--timeout=1"], 0
    if bug == "stop-reason":
        flags, rounds = [*flags, "--until-stop"], 3
    code, output = check_server(monkeypatch, bug, *flags, rounds=rounds)
    assert code != 0, output
    assert "FAIL" in output


# --- the client checker --------------------------------------------------------------------------

SCENARIO = dict.fromkeys(ref_client.BUGS, "basic") | {
    "metadata-2mib-refused": "metadata",
    "unknown-metadata-fatal": "metadata",
    "metadata-required": "metadata",
    "env-ids-ignored": "order",
    "late-feedback": "late",
    "dropped-done-not-reset": "late",
    "reuse-across-connections": "resync",
    "resync-fatal": "resync",
    "text-exits-zero": "text",
    "text-ignored": "text",
    "refusal-reconnects": "refusal",
    "refusal-exits-zero": "refusal",
    "hammers": "patience",
    "ends-with-1001": "finish",
    "reuse-unasked": "reuse",
}
QUICK = ["last-reward-only", "next-first-observation", "late-feedback", "dropped-done-not-reset"]
QUICK += ["reuse-across-connections", "text-exits-zero", "refusal-exits-zero", "hammers"]
QUICK += ["metadata-required", "ends-with-1001", "steps-always-horizon", "action-batch-major"]
SLOW = [bug for bug in ref_client.BUGS if bug not in QUICK]

client_checker = pytest.mark.skipif(
    not runnable(CLIENT_CHECKER), reason="plugrl-conformance is not installed"
)


def check_clients(bugs, *, at_once=4):
    """Run the client checker on the client with each bug, several at once; return the outcomes."""

    async def one(bug, turn):
        scenario = SCENARIO.get(bug, "all")
        client = f"{sys.executable} {WIRE / 'ref_client.py'} --host {{host}} --port {{port}}"
        client += " --api-key k --reconnect-limit 5 --episodes "
        client += ("20" if scenario == "finish" else "300") + (f" --bug {bug}" if bug else "")
        command = [CLIENT_CHECKER, "--probe", "--api-key=k", "--port=0", "--timeout=10"]
        command += [f"--scenario={scenario}", "--client", client]
        async with turn:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            try:
                output, _ = await asyncio.wait_for(process.communicate(), 100)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return bug, (process.returncode, output.decode())

    async def run():
        turn = asyncio.Semaphore(at_once)
        return dict(await asyncio.gather(*(one(bug, turn) for bug in bugs)))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def quick_outcomes():
    """Return the outcomes of the quick bugs and, under "", of the sound client."""
    return check_clients(["", *QUICK])


@client_checker
@pytest.mark.timeout(300)  # the first of these runs them all
@pytest.mark.parametrize("bug", ["", *QUICK])
def test_the_client_checker_passes_the_sound_client_and_catches(quick_outcomes, bug):
    code, output = quick_outcomes[bug]
    assert (code != 0, "FAIL" in output) == (bug != "", bug != ""), output


@client_checker
@pytest.mark.slow
@pytest.mark.parametrize("bug", SLOW)
def test_the_client_checker_catches_also(bug):
    code, output = check_clients([bug])[bug]
    assert code != 0, output
    assert "FAIL" in output
