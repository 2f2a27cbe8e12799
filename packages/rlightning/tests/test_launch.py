"""`launch`: command lines of every form, exit codes, run directories, signals, resuming."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
import yaml

from rlightning.checkpoint import load_checkpoint
from rlightning.launch import launch, run_main
from rlightning.utils.logger import close_logger
from rlightning.utils.logger.files import read_rows
from rlightning.utils.registry import POLICIES

POLICY = """
import torch
from torch import nn
from rlightning.policy import BasePolicy
from rlightning.types import PolicyResponse
from rlightning.utils.registry import POLICIES

@POLICIES.register("LaunchedPolicy")
class LaunchedPolicy(BasePolicy):
    def construct_network(self, env_meta, *args, **kwargs):
        self.actor = nn.Linear(4, 2)

    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=optim_cfg.lr)

    def rollout_step(self, env_ret, **kwargs):
        logits = self.actor(env_ret.observation.float().unsqueeze(0))
        distribution = torch.distributions.Categorical(logits=logits)
        action = distribution.sample()
        return PolicyResponse(
            env_id=env_ret.env_id, action=action, log_prob=distribution.log_prob(action)
        )

    def postprocess(self, env_ret=None, policy_resp=None):
        pass

    def update_dataset(self, data):
        self.data = data

    def train(self, *args, **kwargs):
        self.optimizer.zero_grad()
        loss = -self.actor(self.data["observation"]).log_softmax(-1).mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}
"""

# The smallest configuration of the documentation, with fewer steps.
CONFIG = """
    imports: [launched_policy]
    engine: syncrl
    debug: true
    verbose: false
    env:
      - {name: cp, backend: mujoco, task: CartPole-v1, num_workers: 2, max_episode_steps: 200}
    buffer: {type: RolloutBuffer, capacity: 1000}
    policy: {type: LaunchedPolicy, optim_cfg: {lr: 0.01}}
    train: {max_epochs: 2, max_rollout_steps: 30, batch_size: 20, eval_episodes: 2, seed: 3}
    log: {level: INFO, backend: tensorboard, log_dir: LOG_DIR, name: exp}
"""

SCRIPT = """
import sys
from rlightning.utils.builders import (
    build_data_buffer, build_engine, build_env_group, build_policy_group,
)
from rlightning.utils.launch import launch

def main(config):
    env_group = build_env_group(config.env)
    policy_group = build_policy_group(config.policy.type, config.policy, config.cluster)
    buffer = build_data_buffer(config.buffer.type, config.buffer)
    engine = build_engine(config, env_group, policy_group, buffer)
    print("ready", flush=True)
    engine.run()
    print("done", flush=True)

if __name__ == "__main__":
    launch(main_func=main, config_path="conf")
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder as a user's: a policy module, a configuration folder and a script."""
    (tmp_path / "conf").mkdir()
    text = textwrap.dedent(CONFIG).replace("LOG_DIR", str(tmp_path / "runs"))
    (tmp_path / "conf" / "a.yaml").write_text(text)
    (tmp_path / "conf" / "broken.yaml").write_text("train: {max_epochs: '${nowhere}'}")
    (tmp_path / "launched_policy.py").write_text(POLICY)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    close_logger()
    POLICIES.module_dict.pop("LaunchedPolicy", None)
    sys.modules.pop("launched_policy", None)


def start(project, *argv, main=None):
    """Launch in this process and return the configuration that `main` saw."""
    seen = []
    launch(main or seen.append, project / "conf", ["--config-name", "a", *argv])
    return seen[0] if seen else None


def ends_with_code_2(capsys, *args, **kwargs):
    with pytest.raises(SystemExit) as caught:
        start(*args, **kwargs)
    assert caught.value.code == 2
    return capsys.readouterr().err


# ---- command lines -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["train.max_epochs=9", "--overwrite"],
        ["--overwrite", "train.max_epochs=9"],
        ["train.max_epochs=9", "--overwrite", "train.batch_size=21"],
        ["+policy.model_cfg.x=1", "--overwrite", "train.max_epochs=9", "~cluster"],
    ],
)
def test_options_and_overrides_stand_in_any_order(project, argv):
    if "~cluster" in argv:
        (project / "conf" / "a.yaml").write_text(
            (project / "conf" / "a.yaml").read_text() + "cluster: {train_worker_num: 1}\n"
        )
    assert start(project, *argv).train.max_epochs == 9


def test_resume_without_a_value_does_not_swallow_an_override(project, capsys):
    text = ends_with_code_2(capsys, project, "--resume", "train.max_epochs=9")
    assert "there is no whole checkpoint in" in text
    assert "max_epochs" not in text


def test_an_unknown_option_is_refused(project, capsys):
    assert "unrecognized arguments: --nothing" in ends_with_code_2(capsys, project, "--nothing")


@pytest.mark.parametrize("option", ["-m", "--multirun"])
def test_hydras_sweeps_are_answered_with_the_loop_that_does_it(project, capsys, option):
    assert "one command is one run" in ends_with_code_2(capsys, project, option, "train.seed=0,1")


def test_the_name_of_the_configuration_is_needed(project, capsys):
    with pytest.raises(SystemExit) as caught:
        launch(print, project / "conf", [])
    assert caught.value.code == 2
    assert "--config-name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian.max_epochs=3"], "unknown key 'trian'. Did you mean 'train'"),
        (["train.max_epoch=3"], "`train`: unknown key 'max_epoch'. Did you mean 'max_epochs'"),
        (["train.max_epochs=many"], "field 'train.max_epochs'"),
        (["policy.type=LaunchdPolicy"], "Did you mean 'LaunchedPolicy'"),
        (["engine=synkrl"], "Did you mean 'syncrl'"),
        (["env.0.backend=mujoko"], "Did you mean 'mujoco'"),
        (["buffer.type=RolutBuffer"], "Did you mean 'RolloutBuffer'"),
        (["imports=[no_such_module]"], "`imports:` names the module 'no_such_module'"),
        (["log.level=LOUD"], "expected one of DEBUG, INFO"),
        (["--resume", "nothing_here"], "there is no whole checkpoint in nothing_here"),
        (["--resume"], "there is no whole checkpoint in"),
    ],
)
def test_mistakes_end_with_code_2_and_a_message(project, capsys, argv, message):
    text = ends_with_code_2(capsys, project, *argv)
    assert text.startswith("error: ")
    assert message in text
    assert "Traceback" not in text
    assert not (project / "runs").exists()


def test_a_missing_file_suggests_one(project, capsys):
    with pytest.raises(SystemExit) as caught:
        launch(print, project / "conf", ["--config-name", "brokn"])
    assert caught.value.code == 2
    assert "Did you mean 'broken'" in capsys.readouterr().err


def test_cfg_job_prints_the_resolved_configuration_and_runs_nothing(project, capsys):
    assert start(project, "--cfg", "job", "train.max_epochs=9") is None
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["train"]["max_epochs"] == 9
    assert printed["policy"]["type"] == "LaunchedPolicy"
    assert not (project / "runs").exists()


def test_cfg_job_of_a_broken_file_is_a_mistake_too(project, capsys):
    with pytest.raises(SystemExit) as caught:
        launch(print, project / "conf", ["--config-name", "broken", "--cfg", "job"])
    assert caught.value.code == 2
    assert "nowhere" in capsys.readouterr().err


def test_one_run_at_a_time_in_a_process_and_one_after_the_other(project, capsys):
    """Two at once would write into one log and draw from each other's random numbers."""

    def main(config):
        error = ends_with_code_2(capsys, project, "log.name=second")
        assert "another run is under way in this process" in error

    start(project, "log.name=first", main=main)
    assert start(project, "log.name=second").log.name == "second"


def test_a_relative_folder_is_beside_the_function(project, monkeypatch):
    import launched_policy

    seen = []

    def main(config):
        seen.append(config)

    main.__module__ = launched_policy.__name__
    monkeypatch.chdir("/")
    launch(main, "conf", ["--config-name", "a"])
    assert len(seen) == 1


def test_a_function_without_a_file_takes_the_working_directory(project, monkeypatch):
    import types

    module = types.ModuleType("no_file")
    monkeypatch.setitem(sys.modules, "no_file", module)
    seen = []

    def main(config):
        seen.append(config)

    main.__module__ = "no_file"
    monkeypatch.chdir(project)
    launch(main, "conf", ["--config-name", "a"])
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("value", "argv", "expected"),
    [("0", [], False), ("1", [], True), ("0", ["+debug=true"], True), (None, [], True)],
)
def test_environment_variables_are_defaults_and_the_configuration_wins(
    project, monkeypatch, value, argv, expected
):
    path = project / "conf" / "a.yaml"
    path.write_text(path.read_text().replace("debug: true\n", ""))
    if value is not None:
        monkeypatch.setenv("RLIGHTNING_DEBUG", value)
    before = dict(os.environ)
    assert start(project, *argv).debug is expected
    assert dict(os.environ) == before, "nothing is exported"


def test_a_wrong_environment_variable_is_a_mistake(project, monkeypatch, capsys):
    path = project / "conf" / "a.yaml"
    path.write_text(path.read_text().replace("debug: true\n", ""))
    monkeypatch.setenv("RLIGHTNING_DEBUG", "yes")
    assert "RLIGHTNING_DEBUG is 'yes'; expected 0 or 1" in ends_with_code_2(capsys, project)


# ---- run directories ---------------------------------------------------------------------------


def test_a_run_directory_holds_what_the_run_was_started_with(project):
    config = start(project)
    text = (config.run.run_dir / "config.yaml").read_text()
    assert text.startswith("# rlightning: ")
    assert "\n# commit: " in text
    saved = yaml.safe_load(text)
    assert saved["train"]["seed"] == 3
    assert saved["train"]["save_dir"] == str(config.run.checkpoint_dir)
    assert config.run.run_dir == project / "runs" / "default_project" / "exp"


def test_a_named_run_is_never_written_over_unasked(project, capsys):
    start(project)
    text = ends_with_code_2(capsys, project)
    assert "holds an earlier run, which stays as it is" in text
    assert "--resume" in text
    assert "log.name=NAME" in text
    assert "--overwrite" in text
    start(project, "--overwrite")
    start(project, "log.name=other")


def unnamed(project):
    path = project / "conf" / "a.yaml"
    path.write_text(path.read_text().replace(", name: exp", ""))


def test_unnamed_runs_are_numbered(project):
    unnamed(project)
    names = [start(project).run.run_dir.name for _ in range(3)]
    assert names == ["default_exp", "default_exp-2", "default_exp-3"]


def test_an_unset_seed_is_drawn_and_written_down(project):
    path = project / "conf" / "a.yaml"
    path.write_text(path.read_text().replace(", seed: 3", ""))
    config = start(project)
    saved = yaml.safe_load((config.run.run_dir / "config.yaml").read_text())
    assert saved["train"]["seed"] == config.train.seed == config.run.seed
    assert 0 <= config.run.seed < 2**31


def test_an_error_in_the_function_reaches_the_caller_and_ends_the_logs(project):
    def main(config):
        raise OSError("no robot")

    with pytest.raises(OSError, match="no robot"):
        start(project, main=main)
    log = (project / "runs" / "default_project" / "exp" / "run.log").read_text()
    assert "the run failed" in log
    assert "no robot" in log


# ---- training and resuming ---------------------------------------------------------------------


def train(project, *argv):
    from rlightning.launch import train_main

    seen = []

    def main(config):
        seen.append(config)
        train_main(config)

    start(project, *argv, main=main)
    return seen[0]


def test_the_smallest_configuration_trains_and_resumes(project):
    config = train(project)
    run_dir = config.run.run_dir
    assert load_checkpoint(run_dir / "checkpoints" / "epoch_last").epoch == 2
    assert (run_dir / "checkpoints" / "epoch_last.pt").is_file()
    rows = read_rows(run_dir / "metrics.jsonl")
    assert {row["stream"] for row in rows} >= {"train", "eval"}
    train(project, "--resume", "train.max_epochs=4")
    assert load_checkpoint(run_dir / "checkpoints" / "epoch_last").epoch == 4
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["stream"] == "train"]
    assert [row["env_step"] for row in rows] == [60, 120, 180, 240]


def test_resuming_an_unnamed_run_takes_the_newest(project):
    unnamed(project)
    first = train(project, "train.max_epochs=3")
    second = train(project, "train.max_epochs=1")
    assert second.run.run_dir.name == "default_exp-2"
    resumed = train(project, "--resume", "train.max_epochs=2")
    assert resumed.run.run_dir == second.run.run_dir
    assert load_checkpoint(first.run.checkpoint_dir / "epoch_last").epoch == 3


def test_a_run_that_was_written_over_is_not_resumed_from(project):
    config = train(project, "train.max_epochs=3", "train.save_interval=1")
    train(project, "--overwrite", "train.max_epochs=1")
    resumed = train(project, "--resume", "train.max_epochs=2")
    assert resumed.run.resume_from == config.run.checkpoint_dir / "epoch_last"
    assert load_checkpoint(resumed.run.checkpoint_dir / "epoch_last").epoch == 2


def test_resuming_takes_over_the_seed(project):
    path = project / "conf" / "a.yaml"
    path.write_text(path.read_text().replace(", seed: 3", ""))
    first = train(project, "train.max_epochs=1")
    assert train(project, "--resume", "train.max_epochs=2").run.seed == first.run.seed


def test_a_stop_before_training_ends_normally_and_leaves_the_name_free(project):
    def main(config):
        config.run.stop.request()
        config.run.stop.raise_if_requested()

    start(project, "log.name=one", main=main)
    start(project, "log.name=one", main=main)


# ---- signals -----------------------------------------------------------------------------------


def spawn(project, *argv):
    return subprocess.Popen(
        [sys.executable, "train.py", "--config-name", "a", *argv],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def until_it_trains(process):
    """Wait until the process says that its engine is built and its first epochs are over."""
    assert process.stdout.readline() == "ready\n", process.stderr.read()


def test_the_first_signal_saves_and_exits_with_0_and_the_run_goes_on(project):
    process = spawn(project, "train.max_epochs=100000")
    try:
        until_it_trains(process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert out == "done\n"
    assert "SIGTERM: saving and stopping" in err
    run_dir = pathlib.Path(project / "runs" / "default_project" / "exp")
    saved = load_checkpoint(run_dir / "checkpoints" / "epoch_last")
    config = train(project, "--resume", f"train.max_epochs={saved.epoch + 1}")
    assert load_checkpoint(config.run.checkpoint_dir / "epoch_last").epoch == saved.epoch + 1


def test_a_second_signal_exits_at_once(project):
    slow = SCRIPT.replace(
        "    engine.run()",
        "    import time\n    engine.save = lambda name: time.sleep(1e6)\n    engine.run()",
    )
    (project / "train.py").write_text(slow)
    process = spawn(project, "train.max_epochs=100000")
    try:
        until_it_trains(process)
        process.send_signal(signal.SIGINT)
        for line in process.stderr:
            if "a second one stops at once" in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130


def test_handlers_are_put_back(project):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    start(project)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_run_main_is_usable_without_a_command_line(project):
    from rlightning.config import compose_main

    seen = []
    run_main(seen.append, compose_main(project / "conf", "a"))
    assert seen[0].run is not None


def test_a_resume_that_does_not_fit_leaves_the_earlier_run_as_it_was(tmp_path):
    """Another task, then another network: a message, and the folder's configuration is kept."""
    from rlightning.cli import main

    common = [
        "cartpole_ppo", "train.max_rollout_steps=16", "train.eval_episodes=1", "verbose=false",
        f"log.log_dir={tmp_path}", "log.name=ok", "env.num_envs=2",
    ]  # fmt: skip
    main(["train", *common, "train.max_epochs=1"])
    before = (tmp_path / "cartpole" / "ok" / "config.yaml").read_bytes()
    for change in ("env.task=Acrobot-v1", "policy.model_cfg.hidden_sizes=[8]"):
        with pytest.raises(SystemExit) as ended:
            main(["train", *common, "train.max_epochs=2", change, "--resume"])
        assert ended.value.code == 2
        assert (tmp_path / "cartpole" / "ok" / "config.yaml").read_bytes() == before


def test_a_name_is_free_again_after_a_run_that_could_not_start(tmp_path, capsys):
    from rlightning.cli import main

    common = [
        "cartpole_ppo", "train.max_epochs=1", "train.eval_episodes=1", "verbose=false",
        f"log.log_dir={tmp_path}", "log.name=k", "env.num_envs=2",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(["train", *common, "policy.optim_cfg.lrr=1"])
    assert ended.value.code == 2
    assert "Did you mean 'lr'" in capsys.readouterr().err
    main(["train", *common])


def test_a_broken_yaml_file_is_a_message(tmp_path, capsys):
    from rlightning.cli import main

    (tmp_path / "bad.yaml").write_text("engine: [a")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "bad.yaml")])
    assert ended.value.code == 2
    assert "cannot compose bad.yaml" in capsys.readouterr().err


def test_a_run_that_is_stopped_in_its_first_rollout_says_how_to_go_on(tmp_path, monkeypatch):
    from rlightning.cli import main
    from rlightning.engine import SyncRLEngine

    def stop_at_once(self):
        self.run_context.stop.request()

    monkeypatch.setattr(SyncRLEngine, "_pre_rollout_hook", stop_at_once)
    main(["train", "cartpole_ppo", f"log.log_dir={tmp_path}", "log.name=s", "verbose=false"])
    assert (tmp_path / "cartpole" / "s" / "checkpoints" / "epoch_last" / "manifest.json").is_file()
