"""Mistakes in a command line end it with exit code 2 and one message, and leave nothing behind."""

import dataclasses
import math
import socket
import subprocess
import sys

import pytest

from plugrl_server import cli, cli_args
from plugrl_server.common.checkpoint_manager import CheckpointManager
from plugrl_server.common.ranges import check_ranges
from plugrl_server.errors import UsageError
from plugrl_server.policy.base_policy import BasePolicyConfig

PPO = ["gaussian-policy", "default", "ppo", "default", "--port", "0"]
SAC = ["sac-policy", "default", "sac", "default", "--port", "0"]


def refused(argv, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    said = capsys.readouterr().err
    return " ".join(said.replace("│", " ").split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*PPO, "--seed", "-1"], "--seed is -1; expected a number from 0 to 4294967295"),
        ([*PPO, "--port", "70000"], "--port is 70000; expected a number from 0 to 65535"),
        ([*PPO, "--torch-threads", "-1"], "--torch-threads is -1; expected at least 0"),
        ([*PPO, "--max-message-mb", "nan"], "--max-message-mb is nan; expected at least 0.001"),
        ([*PPO, "--batch-deadline-ms", "-1"], "--batch-deadline-ms is -1; expected a finite"),
        ([*PPO, "--mini-infer-batch-size", "0"], "--mini-infer-batch-size is 0"),
        ([*PPO, "--algo.gamma", "1.5"], "--algo.gamma is 1.5; expected a number from 0 to 1"),
        ([*PPO, "--algo.learning-rate", "nan"], "--algo.learning-rate is nan; expected a finite"),
        ([*PPO, "--algo.global-steps", "0"], "--algo.global-steps is 0; expected at least 1"),
        ([*PPO, "--policy.hidden-dims", "8", "0"], "--policy.hidden-dims is 0"),
        ([*SAC, "--policy.alpha", "0"], "--policy.alpha is 0; expected a finite number of at"),
        ([*SAC, "--algo.tau", "-1"], "--algo.tau is -1"),
        ([*PPO, "--policy.device", "gpu"], "--policy.device is 'gpu'; expected auto, cpu, cuda"),
        ([*PPO, "--policy.device", "cuda:99"], "torch sees"),
        ([*PPO, "--certificate", "no.pem"], "--certificate no.pem cannot be used: [Errno 2]"),
        ([*PPO, "--serve-only", "nowhere"], "there is no whole checkpoint in nowhere"),
        ([*PPO, "--host", "no.such.host.invalid", "--allow-anonymous"], "cannot listen on no."),
        (["--rlightning", "no_such_configuration"], "no_such_configuration"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(argv, capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_named_before_a_run_begins(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        said = refused([*PPO, "--port", port], capsys)
    assert f"cannot listen on 127.0.0.1 port {port}" in said
    assert "Choose another --port; 0 takes a free one" in said
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten_by_one_that_cannot_begin(capsys, tmp_path):
    run = tmp_path / "ppo" / "gaussian-policy" / "precious"
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text("a year of work")
    where = ["--checkpoint-base-dir", str(tmp_path), "--exp-name", "precious", "--overwrite"]
    refused([*PPO, *where, "--policy.device", "gpu"], capsys)
    assert (run / "metrics.csv").read_text() == "a year of work"


def test_ctrl_c_while_the_server_is_built_is_no_traceback(monkeypatch):
    def interrupted(choice):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_server", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main(PPO)
    assert end.value.code == 130


def test_a_run_that_failed_ends_with_one_and_is_told_once():
    class Failed:
        def __init__(self):
            self.trainer = self
            self.error = ZeroDivisionError("told by the log")

        def serve_forever(self):
            raise self.error

    with pytest.raises(SystemExit) as end:
        cli.serve(Failed())
    assert end.value.code == 1


def test_ranges_reach_the_fields_of_users_configurations():
    @dataclasses.dataclass
    class Own(BasePolicyConfig):
        knob: float = 1.0
        name: str = "x"
        flag: bool = False
        maybe: int | None = None

    Own(knob=math.inf)
    with pytest.raises(UsageError, match=r"--policy\.knob is nan; expected a number"):
        Own(knob=math.nan)
    check_ranges(Own(), "--policy.")


@pytest.mark.parametrize("how", [["--overwrite"], ["--resume"]])
def test_a_run_belongs_to_the_server_that_still_writes_it(how, capsys, tmp_path):
    run = tmp_path / "ppo" / "gaussian-policy" / "shared"
    code = (
        "import sys\n"
        "from plugrl_server.common.checkpoint_manager import Checkpoint, CheckpointManager\n"
        "manager = CheckpointManager(sys.argv[1], config={}, overwrite=False, resume=False)\n"
        "manager.save_checkpoint(Checkpoint(step=1, meta={}))\n"
        "print('saved', flush=True)\n"
        "sys.stdin.read()\n"
    )
    where = ["--checkpoint-base-dir", str(tmp_path), "--exp-name", "shared", *how]
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout.readline() == "saved\n"
        said = refused([*PPO, "--policy.device", "cpu", *where], capsys)
        assert "another server that still runs writes into" in said
        assert (run / "1" / "manifest.json").exists()
        other.kill()
    CheckpointManager(run, config={}, overwrite=how == ["--overwrite"], resume=how == ["--resume"])
    assert (run / "1" / "manifest.json").exists() == (how == ["--resume"])


def test_a_host_may_have_an_address_of_the_other_family(monkeypatch):
    """A name that stands for an IPv6 address alone."""
    real = socket.getaddrinfo

    def six(host, port, **more):
        return real("::1" if host == "six" else host, port, **more)

    if not socket.has_ipv6:
        pytest.skip("needs IPv6")
    monkeypatch.setattr(socket, "getaddrinfo", six)
    cli._try_address(cli_args.Args(host="six", port=0))
