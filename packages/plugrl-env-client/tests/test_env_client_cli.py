"""The command line: what it says, what it refuses, and how it ends."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from plugrl_env_client.cli import main, parse
from plugrl_env_client.envs.mujoco_env import MuJoCoEnvConfig
from plugrl_env_client.errors import UnknownEnvironmentError, UsageError
from plugrl_protocol import CLOSE_STOP, Close, make_metadata
from plugrl_protocol.testing import NotingApplication, serve_in_thread

PROGRAM = str(Path(sys.executable).with_name("plugrl-run-env-client"))


def serve(act=None, **metadata):
    """A scripted server of zeros, three wide, two steps ahead."""
    zeros = lambda request: np.zeros((2, len(request.env_indices), 3))  # noqa: E731
    application = NotingApplication(act or zeros)
    return application, serve_in_thread(application, metadata=make_metadata(**metadata))


def client(server, folder, *flags, uid="probe-v1"):
    """Run the command in this process; gives its exit code."""
    return main([uid, "--server-host", server.url, "--runs-dir", str(folder), *flags])


def test_the_references_flags_are_read():
    job = parse(
        [
            "mujoco-v1",
            "--env.name",
            "Hopper-v5",
            "--num-envs",
            "4",
            "--num-procs",
            "2",
            "--num-episodes",
            "7",
            "--runner.replan-steps",
            "2",
            "--runner.seed",
            "3",
            "--runner.max-episode-steps",
            "9",
            "--runner.fps",
            "20",
            "--runner.action-dim",
            "3",
            "--runner.action-horizon",
            "4",
            "--runner.pass-proc-id",
            "--runner.use-env-lock",
            "--runner.start-method",
            "fork",
            "--recorder.episode-freq",
            "5",
            "--recorder.no-thread0-only",
            "--exp-name",
            "mine",
            "--server-host",
            "there",
            "--server-port",
            "81",
            "--reconnect-on-server-stop",
            "--no-reuse-feedback-obs",
            "--give-up-after",
            "2.5",
        ]
    )
    args = job.args
    assert job.uid == "MuJoCo-v1"
    assert args.env == MuJoCoEnvConfig(name="Hopper-v5")
    assert (args.num_envs, args.num_procs, args.num_episodes) == (4, 2, 7)
    assert (args.runner.replan_steps, args.runner.seed, args.runner.fps) == (2, 3, 20.0)
    assert (args.runner.action_dim, args.runner.action_horizon) == (3, 4)
    assert (args.runner.pass_proc_id, args.runner.use_env_lock) == (True, True)
    assert args.runner.start_method == "fork"
    assert (args.recorder.episode_freq, args.recorder.thread0_only) == (5, False)
    assert (args.server_host, args.server_port) == ("there", 81)
    assert (args.reconnect_on_server_stop, args.reuse_feedback_obs) == (True, False)
    assert args.give_up_after == 2.5
    assert str(job.run_dir) == "runs/mine"


def test_the_defaults_are_the_documented_ones():
    args = parse(["probe-v1"]).args
    assert (args.server_host, args.server_port) == ("127.0.0.1", 8000)
    assert (args.num_envs, args.num_procs, args.num_episodes) == (1, 1, 1)
    assert (args.runner.replan_steps, args.runner.seed) == (None, None)
    assert (args.recorder.episode_freq, args.recorder.metric_window) == (0, 100)
    assert (args.reconnect_on_server_stop, args.reuse_feedback_obs) == (False, True)


def test_a_run_is_named_by_environment_size_and_time():
    first, second = (parse(["probe-v1", "--num-envs", "3"]).run_dir.name for _ in range(2))
    assert first != second
    assert first.startswith(f"probe-v1-nenv3-{time.strftime('%Y%m')}")


def test_the_key_comes_from_the_environment_and_is_never_written(monkeypatch, tmp_path):
    monkeypatch.setenv("PLUGRL_API_KEY", "sesame")
    assert parse(["probe-v1"]).args.key == "sesame"
    flags = ["--api-key", "secret", "--give-up-after", "0.01", "--server-port", "1"]
    assert main(["probe-v1", "--runs-dir", str(tmp_path), *flags]) == 1
    (written,) = tmp_path.glob("*/client_config.json")
    assert "secret" not in written.read_text()
    assert json.loads(written.read_text())["uid"] == "Probe-v1"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ([], "which environment?"),
        (["--num-envs", "2"], "which environment?"),
        (["prope-v1"], "Did you mean 'Probe-v1'?"),
        (["--import", "no_such_module", "probe-v1"], "there is no such module"),
    ],
)
def test_what_cannot_be_meant_ends_with_2(command, complaint, capsys):
    assert main(command) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint", "code"),
    [
        (["--env.kwargs", '{"bogus": 1}'], "cannot be made with --env.kwargs", 1),
        (["--env.vectorization", "native"], "registers no native vector environment", 1),
        (["--server-host", "http://here"], "is no address of a server (its scheme is 'http')", 1),
        (["--server-host", "ws://here:port"], "is no address of a server", 1),
        (["--runs-dir", "/proc/no"], "error: --runs-dir /proc/no: ", 2),
    ],
)
def test_what_cannot_be_done_is_one_line(flags, complaint, code, capsys, tmp_path):
    known = ["--env.name", "Pendulum-v1", "--give-up-after", "0", "--runs-dir", str(tmp_path)]
    assert main(["gym-v1", *known, *flags]) == code
    said = capsys.readouterr().err
    assert complaint in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "flags",
    [
        "--num-envs 0",
        "--runner.fps 0",
        "--runner.fps nan",
        "--runner.seed -1",
        "--server-port 0",
        "--server-port 65536",
        "--give-up-after -1",
        "--give-up-after nan",
        "--no-such-flag 1",
    ],
)
def test_a_flag_that_cannot_be_meant_ends_with_2(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["probe-v1", *flags.split()])
    assert ended.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err


def test_errors_of_the_command_line_are_the_clients_own():
    with pytest.raises(UsageError):
        parse([])
    with pytest.raises(UnknownEnvironmentError):
        parse(["nothing-v1"])


def test_help_lists_the_environments(capsys):
    assert main(["--help"]) == 0
    assert "atari-v1, classic-v1, dummy-v1, gym-v1, mujoco-v1, probe-v1" in capsys.readouterr().out


def test_help_answers_within_a_second_of_processor_time():
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "plugrl_env_client.cli", "mujoco-v1", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    after = os.times()
    assert "--runner.action-horizon" in done.stdout
    spent_s = after.children_user + after.children_system
    assert spent_s - before.children_user - before.children_system < 1.0


@pytest.mark.parametrize("name", ["plugrl-run-env-client", "plugrl-run-worker"])
def test_both_commands_are_installed(name):
    done = subprocess.run(
        [str(Path(sys.executable).with_name(name)), "--help"], capture_output=True, check=True
    )
    assert b"environments:" in done.stdout


@pytest.mark.parametrize(
    ("uid", "flags", "width"),
    [
        pytest.param(
            "mujoco-v1",
            ["--env.name", "Hopper-v5"],
            (3,),
            marks=pytest.mark.skipif(find_spec("mujoco") is None, reason="the extra [mujoco]"),
        ),
        ("classic-v1", ["--env.name", "Pendulum-v1"], (1,)),
        ("gym-v1", ["--env.name", "CartPole-v1", "--env.vectorization", "async"], ()),
    ],
)
def test_a_family_rolls_out_against_a_scripted_server(uid, flags, width, tmp_path):
    application, serving = serve(
        lambda request: np.zeros((2, len(request.env_indices), *width), np.float32)
    )
    limit = ["--runner.max-episode-steps", "5", "--num-envs", "2", "--num-episodes", "4"]
    with serving as server:
        assert client(server, tmp_path, *flags, *limit, uid=uid) == 0
        application.wait_for(lambda notes: notes.closes)
    assert application.closes[0][1].code == 1000
    reports = [report for _, report in application.reports]
    ended = sum(int(report.done.sum()) for report in reports)
    assert ended >= 4
    assert all(report.steps.max() <= 2 for report in reports)
    for report in reports:
        if report.done.any():
            assert (report.info["episode"]["l"][report.done] <= 5).all()


def test_the_runs_folder_holds_what_the_reference_page_lists(tmp_path):
    _, serving = serve()
    with serving as server:
        assert client(server, tmp_path, "--exp-name", "mine", "--num-episodes", "3") == 0
    found = {str(path.relative_to(tmp_path / "mine")) for path in tmp_path.rglob("*.*")}
    assert {
        "client_config.json",
        "logs/client.log",
        "rollout/proc_000/manifest.json",
        "rollout/proc_000/summary.json",
        "rollout/proc_000/metrics/episode_metrics.jsonl",
        "rollout/proc_000/metrics/obs_stats.jsonl",
    } <= found
    assert "rolled out 3 episodes" in (tmp_path / "mine" / "logs" / "client.log").read_text()


def test_replanned_chunks_are_used_in_a_prefix(tmp_path):
    application, serving = serve(action_horizon=2)
    with serving as server:
        assert client(server, tmp_path, "--runner.replan-steps", "1", "--num-episodes", "2") == 0
    assert all(report.steps.tolist() == [1] for _, report in application.reports)


@pytest.mark.parametrize(
    ("metadata", "flags", "complaint"),
    [
        ({"action_dim": 7}, [], "actions have 7 entries, the environment takes 3"),
        ({}, ["--runner.action-dim", "5"], "actions have 5 entries, the environment takes 3"),
        ({"action_dim": 3}, ["--runner.action-dim", "4"], "is 4; the server says 3"),
        ({"action_horizon": 2}, ["--runner.replan-steps", "3"], "chunks have 2 steps"),
        ({}, ["--runner.action-horizon", "3"], "chunk of 2 steps; 3 were declared"),
    ],
)
def test_shapes_that_do_not_fit_end_with_1_and_the_numbers(
    metadata, flags, complaint, tmp_path, caplog
):
    _, serving = serve(**metadata)
    with serving as server:
        assert client(server, tmp_path, *flags) == 1
    assert complaint in caplog.text


@pytest.mark.parametrize(
    ("close", "code", "said"),
    [
        (CLOSE_STOP, 0, "the run is finished"),
        (Close(1008, "built for states pose:7, got a:3,t:1"), 1, "built for states pose:7"),
        (Close(1009, "message over 1 MiB"), 1, "message over 1 MiB"),
        (Close(1011, "Internal server error."), 1, "Internal server error."),
    ],
)
def test_a_close_decides_the_exit_code_and_its_text_is_shown(close, code, said, tmp_path, caplog):
    application, serving = serve()
    application.act = None
    original = application.infer

    def refuse(connection, request):
        original(connection, request)
        connection.close(close)

    application.infer = refuse
    with serving as server, caplog.at_level("INFO"):
        assert client(server, tmp_path) == code
    assert said in caplog.text
    assert len(application.clients) == 1


def test_a_server_that_never_comes_is_given_up(tmp_path, caplog):
    flags = ["--server-port", "1", "--give-up-after", "0.2", "--runs-dir", str(tmp_path)]
    assert main(["probe-v1", *flags]) == 1
    assert "no server at ws://127.0.0.1:1 after" in caplog.text


def test_a_simulator_that_breaks_ends_with_1_and_its_traceback(tmp_path, caplog, monkeypatch):
    from plugrl_env_client.envs.probe_env import ProbeEnv

    def step(self, actions):
        raise ZeroDivisionError("the arm fell off")

    monkeypatch.setattr(ProbeEnv, "step", step)
    _, serving = serve()
    with serving as server:
        assert client(server, tmp_path) == 1
    assert "ZeroDivisionError: the arm fell off" in caplog.text


def test_the_next_run_is_waited_for_where_asked(tmp_path):
    application, serving = serve()
    stops = iter([True])

    def stop_once(connection, request):
        if next(stops, False):
            connection.close(CLOSE_STOP)
        else:
            connection.answer(np.zeros((2, len(request.env_indices), 3)))

    application.infer = stop_once
    with serving as server:
        assert client(server, tmp_path, "--reconnect-on-server-stop", "--num-episodes", "2") == 0
    assert len(application.clients) == 2


def test_an_environment_of_ones_own_is_imported_by_name(tmp_path):
    """From the folder that the command starts in, in every process."""
    (tmp_path / "my_client_env.py").write_text(
        "import dataclasses\n"
        "from plugrl_env_client.envs.probe_env import ProbeEnv, ProbeEnvConfig\n"
        "from plugrl_env_client.utils.registration import register_env, register_env_config\n"
        "@register_env_config('Mine-v1')\n"
        "@dataclasses.dataclass\n"
        "class MineConfig(ProbeEnvConfig):\n"
        "    action_dim: int = 2\n"
        "@register_env('Mine-v1')\n"
        "class Mine(ProbeEnv):\n"
        "    pass\n"
    )
    application, serving = serve(lambda request: np.zeros((1, len(request.env_indices), 2)))
    with serving as server:
        done = subprocess.run(
            [PROGRAM, "mine-v1", "--import", "my_client_env", "--num-procs", "2",
             "--server-host", server.url],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert len(application.clients) == 2
