"""Both checkers against programs that share no code with them: each bug is named."""

import subprocess
import sys
from pathlib import Path

import pytest

from plugrl_protocol.conformance.client_cli import check_client
from plugrl_protocol.conformance.client_scenarios import SCENARIOS
from plugrl_protocol.conformance.raw import Target
from plugrl_protocol.conformance.server_checks import Setup
from plugrl_protocol.conformance.server_cli import check_server
from plugrl_protocol.conformance.stage import ClientOptions
from plugrl_protocol.messages import ALL_FEATURES

EXAMPLES = Path(__file__).parents[3] / "examples"
REFERENCE = EXAMPLES / "wire"
CPP_PROBE = EXAMPLES / "cpp" / "build" / "probe"

pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the repository's examples")

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


def bugs_of(program):
    done = subprocess.run(
        [sys.executable, REFERENCE / program, "--list-bugs"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {line.split("\t")[0] for line in done.stdout.splitlines()}


def test_every_bug_that_is_listed_is_known_here():
    assert bugs_of("ref_client.py") == set(CLIENT_BUGS)
    assert bugs_of("ref_server.py") == set(SERVER_BUGS)


def judge_client(command, scenario, timeout_s=8.0):
    options = ClientOptions(
        command=command, api_key="sesame", features=ALL_FEATURES, probe=True, timeout_s=timeout_s
    )
    return check_client(options, [scenario])


def reference_client(*arguments):
    program = REFERENCE / "ref_client.py"
    fixed = "--port {port} --reconnect-limit 1000 --episodes 400 --num-envs 4 --api-key sesame"
    return " ".join([sys.executable, str(program), fixed, *arguments])


@pytest.mark.slow
@pytest.mark.parametrize("bug", CLIENT_BUGS)
def test_each_bug_of_a_client_is_named(bug):
    scenario, clause = CLIENT_BUGS[bug]
    report = judge_client(reference_client("--bug", bug), scenario)
    assert clause in report.failures, "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_reference_client_passes(scenario):
    report = judge_client(reference_client(), scenario)
    assert report.exit_code == 0, "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.skipif(not CPP_PROBE.exists(), reason="make -C examples/cpp")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_cpp_client_passes(scenario):
    command = f"{CPP_PROBE} --port {{port}} --episodes 400 --num-envs 4 --api-key sesame"
    report = judge_client(command, scenario)
    assert report.exit_code == 0, "\n".join(report.lines())


class ReferenceServer:
    """The reference server as a process."""

    def __init__(self, *arguments):
        fixed = "--port 0 --echo state --max-message-mb 1 --api-key sesame --feedback-timeout 1"
        self.process = subprocess.Popen(
            [sys.executable, REFERENCE / "ref_server.py", *fixed.split(), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def __enter__(self):
        port = self.process.stdout.readline().strip().rpartition(":")[2]
        return Target(url=f"ws://127.0.0.1:{port}", api_key="sesame", timeout_s=4.0)

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def setup_for(target, **more):
    return Setup(target=target, max_message_mb=1.0, feedback_timeout_s=1.0, echo=True, **more)


def test_the_reference_server_passes():
    with ReferenceServer() as target:
        report = check_server(setup_for(target))
    assert report.exit_code == 0, "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("bug", SERVER_BUGS)
def test_each_bug_of_a_server_is_named(bug):
    clause = SERVER_BUGS[bug]
    more = {"ping-blocked": ["--infer-seconds", "1.5"], "stop-reason": ["--rounds", "30"]}
    with ReferenceServer("--bug", bug, *more.get(bug, [])) as target:
        report = check_server(setup_for(target, until_stop=bug == "stop-reason"), [clause])
    assert clause in report.failures, "\n".join(report.lines())
