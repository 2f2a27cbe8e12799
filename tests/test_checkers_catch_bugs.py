"""Both checkers pass the sound reference programs and name every bug of theirs.

The reference programs share no code with the packages. This is the one table of their bugs.
"""

import asyncio
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plugrl_protocol.conformance.raw import Target
from plugrl_protocol.conformance.server_checks import Setup
from plugrl_protocol.conformance.server_cli import check_server

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

# bug: (scenario that shows it, clause that names it)
CLIENT_BUGS = {
    "deflate": ("basic", "no-deflate"),
    "metadata-2mib-refused": ("metadata", "metadata-2mib"),
    "object-dtype": ("basic", "encoding"),
    "extra-bytes": ("basic", "encoding"),
    "starts-with-feedback": ("basic", "starts-with-infer"),
    "two-infers": ("basic", "alternation"),
    "duplicate-indices": ("basic", "unique-index"),
    "feedback-without-action": ("basic", "feedback-of-holders"),
    "not-flushed-on-done": ("basic", "flush-on-done"),
    "next-first-observation": ("basic", "terminal-observation"),
    "last-reward-only": ("basic", "reward-sum"),
    "int-rewards": ("basic", "reward-kind"),
    "done-as-uint8": ("basic", "flag-dtype"),
    "int32-indices": ("basic", "index-dtype"),
    "step-ids-count-env-steps": ("basic", "step-ids"),
    "step-ids-survive-reset": ("basic", "step-ids"),
    "action-batch-major": ("basic", "action-executed"),
    "env-ids-ignored": ("order", "env-ids"),
    "unknown-metadata-fatal": ("metadata", "metadata-unknown-keys"),
    "metadata-required": ("metadata", "metadata-optional"),
    "unsplittable-info": ("basic", "info-split"),
    "terminated-as-truncated": ("basic", "probe-ends"),
    "text-missing": ("basic", "text"),
    "late-feedback": ("late", "late-feedback"),
    "dropped-done-not-reset": ("late", "dropped-done-reset"),
    "reconnects-on-stop": ("basic", "stop-no-reconnect"),
    "text-exits-zero": ("text", "text-exit"),
    "text-ignored": ("text", "text-exit"),
    "resync-fatal": ("resync", "resync-reconnects"),
    "refusal-reconnects": ("refusal", "refusal-no-reconnect"),
    "refusal-exits-zero": ("refusal", "refusal-exit"),
    "hammers": ("patience", "patience"),
    "ends-with-1001": ("finish", "finish"),
    "no-api-key": ("basic", "api-key"),
    "reuse-after-done": ("reuse", "reuse-after-done"),
    "reuse-across-connections": ("reuse", "reuse-this-connection"),
    "reuse-sends-all-rows": ("reuse", "reuse-rows"),
    "reuse-unasked": ("reuse", "features-unasked"),
    "steps-always-horizon": ("basic", "steps-really-run"),
}

# bug: clause that names it
SERVER_BUGS = {
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


def test_every_bug_of_the_reference_programs_is_in_the_tables():
    assert set(ref_client.BUGS) == set(CLIENT_BUGS)
    assert set(ref_server.BUGS) == set(SERVER_BUGS)


# --- the server checker --------------------------------------------------------------------------


def against_server(monkeypatch, judge, bug="", *, rounds=0):
    """Run the reference server in this process's loop, and a judge of its port in a thread."""
    monkeypatch.setattr(ref_server, "BUG", bug)
    given = ["--port=0", "--echo=t", "--api-key=k", "--max-message-mb=1", "--feedback-timeout=1"]

    async def run():
        server = ref_server.Server(ref_server.parse([*given, f"--rounds={rounds}"]))
        task = asyncio.create_task(server.run())
        try:
            return await asyncio.to_thread(judge, await server.port)
        finally:
            server.finish("Server shutdown")
            await task

    return asyncio.run(run())


def judged(monkeypatch, bug, only=None, *, timeout_s=5.0, rounds=0):
    """Give the checker's report on the reference server."""

    def judge(port):
        target = Target(
            url=f"ws://127.0.0.1:{port}", api_key="k", timeout_s=timeout_s,
            state_key="t", state_dim=1, image_key="cam",
        )  # fmt: skip
        setup = Setup(
            target=target, max_message_mb=1.0, feedback_timeout_s=1.0, echo=True,
            until_stop=rounds > 0,
        )  # fmt: skip
        return check_server(setup, only)

    return against_server(monkeypatch, judge, bug, rounds=rounds)


def command(monkeypatch, bug, *flags):
    """Run the console script on the reference server; return (code, output)."""

    def judge(port):
        told = f"--api-key=k --echo --state-key=t --state-dim=1 --image-key=cam {' '.join(flags)}"
        done = subprocess.run(
            [SERVER_CHECKER, f"ws://127.0.0.1:{port}", *told.split()],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout

    return against_server(monkeypatch, judge, bug)


def test_the_server_checker_passes_the_sound_server(monkeypatch):
    report = judged(monkeypatch, "")
    assert report.exit_code == 0, "\n".join(report.lines())
    assert [name for name, (verdict, _) in report.verdicts.items() if verdict.name == "SKIP"] == [
        "stop"
    ]


def test_the_end_of_a_run_is_judged_last(monkeypatch):
    report = judged(monkeypatch, "", ["stop", "env-ids", "garbage"], rounds=20)
    assert list(report.verdicts) == ["env-ids", "garbage", "stop"]
    assert report.exit_code == 0, "\n".join(report.lines())


@pytest.mark.skipif(SERVER_CHECKER is None, reason="plugrl-conformance-server is not installed")
def test_the_command_tells_a_sound_server_from_a_broken_one(monkeypatch):
    code, output = command(monkeypatch, "", "--only=env-ids", "--only=garbage")
    assert code == 0, output
    code, output = command(monkeypatch, "garbage-1011", "--only=env-ids", "--only=garbage")
    assert code == 1
    assert "FAIL  garbage" in output
    assert "pass  env-ids" in output


@pytest.mark.parametrize("bug", SERVER_BUGS)
def test_the_server_checker_names(monkeypatch, bug):
    clause = SERVER_BUGS[bug]
    rounds = 3 if bug == "stop-reason" else 0
    report = judged(monkeypatch, bug, [clause], timeout_s=1.0, rounds=rounds)
    assert clause in report.failures, "\n".join(report.lines())


# --- the client checker --------------------------------------------------------------------------

QUICK = ["last-reward-only", "next-first-observation", "late-feedback", "dropped-done-not-reset"]
QUICK += ["reuse-across-connections", "text-exits-zero", "refusal-exits-zero", "hammers"]
QUICK += ["metadata-required", "ends-with-1001", "steps-always-horizon", "action-batch-major"]
SLOW = [bug for bug in CLIENT_BUGS if bug not in QUICK]
REFERENCE = f"{sys.executable} {WIRE / 'ref_client.py'} --host {{host}} --reconnect-limit 1000"

client_checker = pytest.mark.skipif(
    CLIENT_CHECKER is None, reason="plugrl-conformance is not installed"
)


def check_clients(runs, *, at_once=4):
    """Run the client checker, several at once.

    Args:
        runs: scenario and client command of each.
        at_once: how many.

    Returns:
        Code and output of each.
    """

    async def one(scenario, client, turn):
        client += " --port {port} --api-key k --num-envs 4 --episodes "
        client += "20" if scenario == "finish" else "400"
        told = ["--probe", "--api-key=k", "--port=0", "--timeout=10", f"--scenario={scenario}"]
        async with turn:
            process = await asyncio.create_subprocess_exec(
                CLIENT_CHECKER, *told, "--client", client,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                output, _ = await asyncio.wait_for(process.communicate(), 100)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return process.returncode, output.decode()

    async def run():
        turn = asyncio.Semaphore(at_once)
        return await asyncio.gather(*(one(*run, turn) for run in runs))

    return asyncio.run(run())


def with_bug(bug):
    return CLIENT_BUGS[bug][0], f"{REFERENCE} --bug {bug}"


@pytest.fixture(scope="module")
def quick_outcomes():
    """Return the outcomes of the quick bugs and, under "", of the sound client."""
    runs = [("all", REFERENCE), *(with_bug(bug) for bug in QUICK)]
    return dict(zip(["", *QUICK], check_clients(runs), strict=True))


@client_checker
@pytest.mark.timeout(300)  # the first of these runs them all
@pytest.mark.parametrize("bug", ["", *QUICK])
def test_the_client_checker_passes_the_sound_client_and_names(quick_outcomes, bug):
    code, output = quick_outcomes[bug]
    if bug:
        assert code != 0, output
        assert f"FAIL  {CLIENT_BUGS[bug][1]} " in output, output
    else:
        assert code == 0, output


@client_checker
@pytest.mark.slow
@pytest.mark.parametrize("bug", SLOW)
def test_the_client_checker_names_also(bug):
    ((code, output),) = check_clients([with_bug(bug)])
    assert code != 0, output
    assert f"FAIL  {CLIENT_BUGS[bug][1]} " in output, output
