"""The command line: names, flags, help, plug-ins, who may connect, runs that go on."""

import logging
import os
import pathlib
import resource
import subprocess
import sys
import threading
import types

import pytest
import torch
from safetensors.torch import load_file

from plugrl_server import cli, cli_args
from plugrl_server.common import registry as registry_module
from plugrl_server.common.metrics import RunMetricSink
from plugrl_server.errors import UsageError
from plugrl_server.policy.registration import POLICIES, register_builtin_policy
from plugrl_server.testing import IdentityTask, TaskClient

PPO = ["gaussian-policy", "default", "ppo", "default"]
SMALL = ["--policy.obs-dim", "2", "--policy.action-dim", "2", "--policy.device", "cpu"]


def test_the_four_names_choose_and_flags_set_their_fields():
    choice = cli_args.parse([*PPO, *SMALL, "--algo.global-steps", "77", "--port", "0", "--resume"])
    assert (choice.policy_uid, choice.algo_uid) == ("gaussian-policy", "ppo")
    assert choice.args.algo.global_steps == 77
    assert choice.args.policy.obs_dim == 2
    assert choice.args.policy.algo == "ppo"
    assert choice.args.resume
    assert choice.args.host == "127.0.0.1"
    assert POLICIES.configs["gaussian-policy"]["default"].algo == "unknown"


def test_underscores_are_as_good_as_hyphens():
    choice = cli_args.parse(["gaussian_policy", "default", "ppo", "default", "--exp_name", "x"])
    assert choice.policy_uid == "gaussian-policy"
    assert choice.args.exp_name == "x"


def test_overrides_of_a_configuration_may_stand_among_the_flags(capsys):
    choice = cli_args.parse(
        ["--rlightning", "cartpole_ppo", "train.seed=3", "--port", "0", "train.max_epochs=7",
         "--exp-name", "a=b", "+env.seed=5", "--resume", "log.name=x"]
    )  # fmt: skip
    assert (choice.args.port, choice.args.exp_name, choice.args.resume) == (0, "a=b", True)
    config = choice.config
    assert (config.train.seed, config.train.max_epochs, config.log.name) == (3, 7, "x")
    assert config.env[0].seed == 5
    with pytest.raises(UsageError, match="'stray' cannot be read; expected key=value"):
        cli_args.parse(["--rlightning", "cartpole_ppo", "--port", "0", "stray"])
    for wrong in (["--prot", "0"], ["--prot=0"]):
        with pytest.raises(SystemExit):
            cli_args.parse(["--rlightning", "cartpole_ppo", *wrong, "log.name=x"])
        said = capsys.readouterr().err
        assert "Unrecognized options" in said
        assert "log.name" not in said


def test_a_variant_brings_its_own_defaults():
    choice = cli_args.parse(["gaussian-policy", "default", "ppo", "dppo-square"])
    assert choice.args.algo.buffer_size == 20_000
    assert choice.args.algo.clip_vloss is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gausian-policy"], "Did you mean 'gaussian-policy'"),
        (["gaussian-policy", "none"], "policy variant"),
        (["gaussian-policy", "default", "ppp", "default"], "Did you mean 'ppo'"),
        (["gaussian-policy", "default"], "algorithm is missing"),
        ([], "policy is missing"),
        ([*PPO, "--host", "0.0.0.0"], "--allow-anonymous"),
        ([*PPO, "--resume", "--overwrite"], "give one"),
        ([*PPO, "--keep", "0"], "--keep"),
        (["--import", "no_such_module_here", *PPO], "no such module"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_way_out(argv, message):
    with pytest.raises(UsageError, match=message):
        cli_args.parse(argv)


def test_an_unknown_flag_ends_with_exit_code_two(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*PPO, "--algo.no-such-flag", "3"])
    assert end.value.code == 2
    with pytest.raises(SystemExit) as end:
        cli.main(["no-such-policy"])
    assert end.value.code == 2
    assert "plugrl-run-server" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::"])
def test_an_address_that_others_reach_needs_a_key_or_a_word(host, monkeypatch):
    assert cli_args.parse([*PPO, "--host", host, "--api-key", "k"]).args.api_key == "k"
    assert cli_args.parse([*PPO, "--host", host, "--allow-anonymous"]).args.api_key is None
    monkeypatch.setenv("PLUGRL_API_KEY", "secret")
    choice = cli_args.parse([*PPO, "--host", host])
    assert choice.args.api_key == "secret"
    assert "secret" not in str(cli._plain_config(choice))


def test_help_lists_everything_at_every_level(capsys):
    cli.main(["--help"])
    shown = capsys.readouterr().out
    for uid in ("gaussian-policy", "sac-policy", "dummy-policy", "categorical-policy"):
        assert uid in shown
    assert "default, dppo-square" in shown
    cli.main(["gaussian-policy", "-h"])
    assert "variants of gaussian-policy: default" in capsys.readouterr().out
    cli.main(["gaussian-policy", "default", "--help"])
    assert "sac" in capsys.readouterr().out
    cli.main(["gaussian-policy", "default", "ppo", "--help"])
    assert "dppo-square" in capsys.readouterr().out


def test_help_takes_less_than_a_second_and_loads_no_torch():
    program = pathlib.Path(sys.executable).parent / "plugrl-run-server"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([program, "--help"], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    code = (
        "import sys; from plugrl_server.cli import main; main(['--help']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_a_missing_extra_is_named_in_the_menu(capsys):
    register_builtin_policy("needs-it", "nowhere:Policy", extra="robots", requires="nowhere_at_all")
    POLICIES.configs["needs-it"]["default"] = POLICIES.configs["dummy-policy"]["default"]
    try:
        cli.main(["--help"])
    finally:
        del POLICIES.configs["needs-it"], POLICIES.specs["needs-it"]
    assert "not installed: pip install 'plugrl-server[robots]'" in capsys.readouterr().out


PLUG_IN = """
import dataclasses
from plugrl_server.policy.dummy.dummy_policy import DummyPolicy
from plugrl_server.policy.base_policy import BasePolicy, BasePolicyConfig
from plugrl_server.policy.registration import register_policy, register_policy_config

@register_policy_config("{uid}")
@dataclasses.dataclass
class Config(BasePolicyConfig):
    knob: int = 3

@register_policy("{uid}")
class Policy(BasePolicy):
    def get_action_and_runtime_state(self, _obs):
        raise NotImplementedError

    def fake_runtime_state(self, batch_size):
        return None
"""


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Returns a function that puts a plug-in module on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(module, uid):
        (tmp_path / f"{module}.py").write_text(PLUG_IN.format(uid=uid))
        return module

    yield make
    for uid in [uid for uid in POLICIES.specs if uid.startswith("plugged-")]:
        del POLICIES.specs[uid], POLICIES.configs[uid]


def test_a_plug_in_without_a_description_is_listed_without_one(plug_in, capsys):
    cli.main(["--import", plug_in("c_plug_in", "plugged-c"), "--help"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "plugged-c" in line]
    assert line.split() == ["plugged-c", "default"]


def test_a_plug_in_comes_by_the_import_flag(plug_in):
    module = plug_in("a_plug_in", "plugged-a")
    names = ["plugged-a", "default", "dummy", "default", "--policy.knob", "5"]
    assert cli_args.parse(["--import", module, *names]).args.policy.knob == 5
    assert cli_args.parse([*names, f"--import={module}"]).args.policy.knob == 5


def test_a_plug_in_comes_by_its_entry_point(plug_in, monkeypatch):
    module = plug_in("b_plug_in", "plugged-b")
    point = types.SimpleNamespace(value=module, load=lambda: __import__(module))
    asked = []
    monkeypatch.setattr(
        registry_module, "entry_points", lambda group: asked.append(group) or [point]
    )
    choice = cli_args.parse(["plugged-b", "default", "eval", "default"])
    assert choice.args.policy.knob == 3
    assert asked == ["plugrl_server.plugins"]


# --- whole runs -----------------------------------------------------------------------------------


def run(argv, *, rounds=None, seed=0):
    """Serve a command line in this process and play against it; give the server and the client."""
    server = cli.build_server(cli_args.parse(argv))
    listening = threading.Event()
    server._on_listening = lambda _: listening.set()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert listening.wait(30.0)
        task = IdentityTask(2, discrete=False, seed=seed)
        client = TaskClient(f"ws://127.0.0.1:{server.port}", task)
        client.play(rounds)
        client.close()
    finally:
        server.request_stop()
        thread.join(30.0)
    assert not thread.is_alive()
    return server, client


def ppo_run(folder, *more):
    small = ["--algo.buffer-size", "32", "--algo.batch-size", "16", "--algo.update-epochs", "2"]
    base = ["--checkpoint-base-dir", str(folder), "--port", "0", "--log-level", "error"]
    return [*PPO, *SMALL, *small, *base, "--no-show-metric-table", *more]


@pytest.fixture(autouse=True)
def no_tracker(monkeypatch):
    """Without TensorBoard a run starts in a tenth of the time."""
    real = cli._open_metrics

    def files_only(choice, run_dir, *, resumed_at):
        from rlightning.utils.logger import MetricsLogger
        from rlightning.utils.logger.backends import BackendOptions

        options = BackendOptions(project="p", name=run_dir.name, run_dir=run_dir)
        logger = MetricsLogger(logging.getLogger("plugrl_server.metrics"), options)
        if resumed_at is not None:
            logger.resume(env_step=resumed_at, epoch=0)
        return RunMetricSink(logger)

    monkeypatch.setattr(cli, "_open_metrics", files_only)
    return real


def test_a_run_leaves_checkpoints_metrics_and_a_configuration(tmp_path):
    server, _ = run(ppo_run(tmp_path, "--algo.global-steps", "100", "--exp-name", "a"))
    folder = tmp_path / "ppo" / "gaussian-policy" / "a"
    assert (folder / "100" / "model.safetensors").is_file()
    assert "losses/policy_loss" in (folder / "metrics.jsonl").read_text()
    assert server.trainer.algorithm.global_step == 100


def test_the_name_of_a_run_is_made_from_the_time_and_its_flags():
    choice = cli_args.parse(
        [*PPO, "--prefix", "p", "--suffix", "s", "--exp-id", "7", "--seed", "3"]
    )
    name = cli._run_directory(choice).name
    assert name.endswith("_p_0007--s-3_s")
    assert name.startswith("20")


def test_a_resumed_run_goes_on_where_it_stood_and_ends_at_its_steps(tmp_path):
    flags = ("--algo.global-steps", "200", "--exp-name", "a")
    first, _ = run(ppo_run(tmp_path, *flags), rounds=30)
    stored = first.trainer.algorithm.global_step
    # The last report may have been lost with the connection.
    assert stored in (58, 60)
    again, client = run(ppo_run(tmp_path, *flags[:2], "--resume"))
    assert again.trainer.algorithm.global_step == 200
    assert client.frames_sent == 200 - stored
    assert again.trainer.version == 7
    rows = (tmp_path / "ppo/gaussian-policy/a/metrics.jsonl").read_text().splitlines()
    assert len(rows) > 4


def test_a_run_that_goes_on_with_other_flags_says_so(tmp_path, caplog):
    flags = ("--algo.global-steps", "200", "--exp-name", "a")
    run(ppo_run(tmp_path, *flags), rounds=5)
    run(ppo_run(tmp_path, *flags, "--resume", "--keep", "3"), rounds=5)
    assert "another flag" not in caplog.text
    run(ppo_run(tmp_path, *flags, "--resume", "--algo.gamma", "0.9"), rounds=5)
    assert caplog.text.count("another flag") == 1
    assert "another flag: --algo.gamma 0.9 (it was 0.99)" in caplog.text


def test_a_stop_and_a_resume_change_no_byte_of_the_result(tmp_path):
    """The client reconnects at the same place in both runs; the server restarts in one."""
    ends = []
    for restarts in (False, True):
        argv = ppo_run(tmp_path / str(restarts), "--algo.global-steps", "160", "--exp-name", "a")
        task = IdentityTask(2, discrete=False)
        if restarts:
            serve_with(argv, task, [41])
            server = serve_with([*argv, "--resume"], task, [None])
        else:
            server = serve_with(argv, task, [41, None])
        assert server.trainer.algorithm.global_step == 160
        ends.append(server.trainer.algorithm.policy.state_dict())
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


def serve_with(argv, task, plays):
    """Play a task of one's own, so that it goes on over a restart of the server."""
    server = cli.build_server(cli_args.parse(argv))
    listening = threading.Event()
    server._on_listening = lambda _: listening.set()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert listening.wait(30.0)
        for rounds in plays:
            client = TaskClient(f"ws://127.0.0.1:{server.port}", task)
            client.play(rounds)
            client.close()
            while server.trainer.metrics.connections and thread.is_alive():
                thread.join(0.005)
    finally:
        server.request_stop()
        thread.join(30.0)
    return server


def test_serve_only_answers_with_a_checkpoint_and_learns_nothing(tmp_path):
    run(ppo_run(tmp_path, "--algo.global-steps", "64", "--exp-name", "a"))
    saved = tmp_path / "ppo" / "gaussian-policy" / "a"
    argv = ppo_run(tmp_path / "none", "--serve-only", str(saved), "--policy.deterministic")
    server, client = run(argv, rounds=40)
    assert client.frames_sent == 80
    assert server.trainer.version == 0
    assert not (tmp_path / "none").exists()
    stored = load_file(saved / "64" / "model.safetensors")
    found = server.trainer.algorithm.policy.state_dict()
    assert len(found) == len(stored)
    for path, tensor in stored.items():
        _, _, name = path.partition(".")  # behind "weights" or "extra"
        assert torch.equal(tensor, found[name]), name


def test_overlap_gives_the_learner_a_policy_of_its_own():
    choice = cli_args.parse([*PPO, *SMALL, "--learn-mode", "overlap"])
    algorithm = cli._build_algorithm(choice)
    assert algorithm.learner_policy is not algorithm.policy


def test_an_existing_run_is_refused_with_exit_code_two(tmp_path, capsys):
    (tmp_path / "ppo/gaussian-policy/a/5").mkdir(parents=True)
    with pytest.raises(SystemExit) as end:
        cli.main(ppo_run(tmp_path, "--exp-name", "a"))
    assert end.value.code == 2
    assert "--overwrite" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(ppo_run(tmp_path / "empty", "--resume"))
    assert end.value.code == 2
    assert not (tmp_path / "empty").exists()
    assert os.environ.get("PLUGRL_API_KEY") is None
