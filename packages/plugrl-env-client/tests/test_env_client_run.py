"""Processes: seeds, siblings, signals, and the referee of the protocol."""

import contextlib
import importlib
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from plugrl_env_client.runner.run import derive_process_seed
from plugrl_env_client.runner.signals import Interrupted, interruptible
from plugrl_protocol.conformance.client_cli import check_client
from plugrl_protocol.conformance.client_scenarios import SCENARIOS
from plugrl_protocol.conformance.stage import ClientOptions
from plugrl_protocol.messages import ALL_FEATURES
from plugrl_protocol.testing import NotingApplication, serve_in_thread

FORK = ["--runner.start-method", "fork"]  # starts at once
run = importlib.import_module("plugrl_env_client.runner.run")  # the function has its name
PROGRAM = str(Path(sys.executable).with_name("plugrl-run-env-client"))
FOREVER = ["--num-episodes", "1000000"]


@contextlib.contextmanager
def running(url, folder, *flags, uid="probe-v1", **options):
    """Start the command; whatever happens, nothing of it stays."""
    command = [PROGRAM, uid, "--server-host", url, "--runs-dir", str(folder), *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, **options
    )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.communicate()


def children(process):
    """The processes that run environments, without Python's own resource tracker."""
    found = psutil.Process(process.pid).children()
    return [child for child in found if "spawn_main" in " ".join(child.cmdline())]


def test_no_two_rows_of_a_run_share_a_seed():
    seeds = [derive_process_seed(7, process, 4) + row for process in range(3) for row in range(4)]
    assert seeds == list(range(7, 19))
    assert derive_process_seed(None, 2, 4) is None


def test_seeds_differ_per_process_and_row_in_the_environments_themselves(tmp_path):
    def first_states():
        application = NotingApplication(lambda request: np.zeros((1, len(request.env_indices))))
        flags = ["--num-envs", "2", "--num-procs", "2", "--runner.seed", "3", *FORK]
        with (
            serve_in_thread(application) as server,
            running(server.url, tmp_path, *flags, uid="classic-v1") as process,
        ):
            assert process.wait(60) == 0
        seen = {}
        for connection, request in application.requests:
            seen.setdefault(connection.serial, request.observation.states["obs"])
        return sorted(row.tobytes() for states in seen.values() for row in states)

    states = first_states()
    assert len(set(states)) == 4
    assert states == first_states()


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_when_a_process_dies_its_siblings_close_properly(tmp_path, start_method):
    application = NotingApplication(lambda request: np.zeros((1, len(request.env_indices), 3)))
    flags = [*FOREVER, "--num-procs", "2", "--runner.start-method", start_method]
    with serve_in_thread(application) as server:
        with running(server.url, tmp_path, *flags) as process:
            application.wait_for(lambda notes: len({c.serial for c, _ in notes.reports}) == 2, 30.0)
            found = psutil.Process(process.pid).children()
            victims = [child for child in found if "resource_tracker" not in str(child.cmdline())]
            assert len(victims) == 2
            max(victims, key=lambda child: child.pid).kill()
            said, _ = process.communicate(timeout=30)
            assert process.returncode == 1
            assert not any(psutil.pid_exists(victim.pid) for victim in victims)
        application.wait_for(lambda notes: len(notes.closes) == 2)
    codes = sorted(close.code for _, close in application.closes)
    assert codes == [1000, 1006]
    assert "was killed by SIGKILL (out of memory?)" in said
    assert "ending its siblings: process 0" in said


def test_when_a_process_is_refused_its_siblings_end_with_its_exit_code(tmp_path):
    application = NotingApplication(lambda request: np.zeros((1, len(request.env_indices), 3)))
    answer = application.infer

    def refuse_the_second(connection, request):
        if connection.serial == 2:
            connection.refuse("built for others")
        else:
            answer(connection, request)

    application.infer = refuse_the_second
    with serve_in_thread(application) as server:
        with running(server.url, tmp_path, *FOREVER, "--num-procs", "2") as process:
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 1
        application.wait_for(lambda notes: len(notes.closes) == 2)
    assert "built for others" in said
    assert sorted(close.code for _, close in application.closes)[0] == 1000


@pytest.mark.parametrize(("code", "expected"), [(run._SERVER_STOPPED, 0), (3, 3)])
def test_who_missed_the_end_of_the_run_is_ended_with_success(code, expected, monkeypatch):
    """One process was told that the run is finished; the other looks for a server that is gone."""
    monkeypatch.setattr(run, "_JOIN_S", 0.2)
    context = multiprocessing.get_context("fork")
    gate = context.Event()
    told = context.Process(target=os._exit, args=(code,))
    looking = context.Process(target=gate.wait)
    for process in (told, looking):
        process.start()
    assert run._wait_for_all([told, looking]) == expected
    assert looking.is_alive()
    run._end([told, looking])
    assert looking.exitcode == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("procs", [1, 2])
def test_a_signal_closes_every_connection_properly(tmp_path, number, procs):
    application = NotingApplication(lambda request: np.zeros((1, len(request.env_indices), 3)))
    with serve_in_thread(application) as server:
        with running(server.url, tmp_path, *FOREVER, *FORK, "--num-procs", str(procs)) as process:
            application.wait_for(
                lambda notes: len({c.serial for c, _ in notes.reports}) == procs, 30.0
            )
            workers = psutil.Process(process.pid).children()
            process.send_signal(number)
            said, _ = process.communicate(timeout=30)
        assert process.returncode == 128 + number
        assert "Traceback" not in said
        assert f"stopped by {number.name}" in said
        assert psutil.wait_procs(workers, timeout=5)[1] == []
        application.wait_for(lambda notes: len(notes.closes) == procs)
    assert {close.code for _, close in application.closes} == {1000}


def test_a_second_ctrl_c_of_the_terminal_changes_nothing(tmp_path):
    """It reaches the parent and all children at once, and their parent ends them as well."""
    application = NotingApplication(lambda request: np.zeros((1, len(request.env_indices), 3)))
    with serve_in_thread(application) as server:
        flags = ["--num-procs", "2", *FOREVER, *FORK]
        with running(server.url, tmp_path, *flags, start_new_session=True) as process:
            application.wait_for(lambda notes: len({c.serial for c, _ in notes.reports}) == 2, 30.0)
            for _ in range(2):
                os.killpg(process.pid, signal.SIGINT)
            said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "race condition" not in said


def test_a_signal_interrupts_a_client_that_waits_for_an_action(tmp_path):
    application = NotingApplication(act=None)
    with serve_in_thread(application) as server:
        with running(server.url, tmp_path) as process:
            application.wait_for(lambda notes: notes.requests, 30.0)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
        application.wait_for(lambda notes: notes.closes)
    assert application.closes[0][1].code == 1000


def test_a_signal_interrupts_the_search_for_a_server(tmp_path):
    with running("ws://127.0.0.1:1", tmp_path) as process:
        for line in process.stdout:
            if "writing to" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) in (143, -signal.SIGTERM)


def test_processes_end_with_their_parent_however_it_ended(tmp_path):
    application = NotingApplication(lambda request: np.zeros((1, len(request.env_indices), 3)))
    with serve_in_thread(application) as server:
        with running(server.url, tmp_path, *FOREVER, "--num-procs", "2") as process:
            application.wait_for(lambda notes: len({c.serial for c, _ in notes.reports}) == 2, 30.0)
            workers = children(process)
            process.kill()
            _, alive = psutil.wait_procs(workers, timeout=15)
            assert alive == []
        application.wait_for(lambda notes: len(notes.closes) == 2)
    assert {close.code for _, close in application.closes} == {1000}


BROKEN = """
import gymnasium as gym, numpy as np
from gymnasium import spaces
from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.utils.registration import register_env, register_env_config

class Old(gym.Env):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Box(-1, 1, (3,))
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, {}

gym.register("Old-v0", Old)
register_env_config("Broken-v1")(type("BrokenConfig", (BaseEnvConfig,), {}))

@register_env("Broken-v1")
class Broken(BaseEnv):
    single_action_space = spaces.Box(-1, 1, (3,))
    def reset(self, *, seed=None, options=None):
        return Observation(states={"x": np.zeros((self.num_envs, 2))}), {}
    def step(self, actions):
        return (self.reset()[0], None, *[np.zeros(self.num_envs, bool)] * 2, {})
"""


@pytest.mark.parametrize(
    ("uid", "flags", "complaint"),
    [
        ("broken-v1", [], "step returned rewards that are NoneType None; expected one number"),
        ("gym-v1", ["--env.name", "broken:Old-v0"], "Old.step() returned 4 values (ndarray,"),
    ],
)
def test_an_environment_that_breaks_its_contract_ends_the_run_in_one_line(
    uid, flags, complaint, tmp_path
):
    (tmp_path / "broken.py").write_text(BROKEN)
    with serve_in_thread(NotingApplication()) as server:
        known = ["--import", "broken", "--num-envs", "2", *flags]
        with running(server.url, tmp_path, *known, uid=uid) as process:
            said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert complaint in said
    assert "Traceback" not in said


def test_signals_are_restored_and_left_alone_in_threads():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM") as caught, interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before

    def in_a_thread():
        with interruptible():
            assert signal.getsignal(signal.SIGTERM) is before

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()


def judge(folder, scenarios, *flags):
    command = [PROGRAM, "probe-v1", "--num-envs", "4", "--num-episodes", "300",
               "--runs-dir", str(folder), *flags]  # fmt: skip
    options = ClientOptions(
        command=shlex.join(command) + " --server-host {url}",
        features=ALL_FEATURES,
        probe=True,
        timeout_s=20.0,
    )
    report = check_client(options, scenarios)
    assert report.exit_code == 0, "\n".join(report.lines())
    return report


def test_the_referee_passes_what_a_server_sees_most_often(tmp_path):
    report = judge(tmp_path, ["late", "refusal"])
    for clause in ("terminal-observation", "reward-sum", "steps-really-run", "late-feedback"):
        assert report.verdicts[clause][0].name == "PASS"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("flags", [[], ["--runner.replan-steps", "3"]])
def test_the_referee_passes_every_scenario(tmp_path, scenario, flags):
    judge(tmp_path, [scenario], *flags)
