"""The command line: quick help, a training run, its evaluation, and mistakes with exit code 2."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from rlightning import __version__
from rlightning.cli import main
from rlightning.launch import reader_may_leave
from rlightning.utils.logger import close_logger

PROGRAM = "import sys; from rlightning.cli import main; sys.argv[0] = 'rlightning'; main()"


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    yield
    close_logger()


def ends_with_code_2(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


SHORT = [
    "train.max_epochs=1",
    "train.max_rollout_steps=8",
    "train.ppo_epochs=1",
    "train.minibatch_size=32",
    "train.eval_episodes=2",
    "log.level=ERROR",
    "verbose=false",
]


def test_help_answers_without_loading_torch():
    code = (
        "import sys; from rlightning.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'tensordict', 'gymnasium', 'hydra'} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"
    assert "train a policy as a configuration says" in out.stdout
    assert out.stderr == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [["--help"], ["list"], ["train", "pendulum_sac", "--cfg=job"]])
def test_a_reader_that_has_left_ends_a_command_without_a_message(command, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, *command],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    finally:
        os.close(writer)
    assert ended.stderr == b""
    assert ended.returncode == (0 if command == ["--help"] and unbuffered else 141)


def test_a_pipe_to_somebody_else_that_breaks_is_told():
    with pytest.raises(BrokenPipeError, match="of a worker"), reader_may_leave():
        raise BrokenPipeError("of a worker")


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_names_are_listed(capsys):
    main(["list"])
    text = capsys.readouterr().out
    for name in ("PPOPolicy", "gymnasium", "RolloutBuffer", "syncrl", "cartpole_ppo"):
        assert f"  {name}\n" in text
    main(["list", "engines"])
    text = capsys.readouterr().out
    assert text.startswith("engines\n")
    assert "PPOPolicy" not in text


def test_a_shipped_configuration_trains_and_its_checkpoint_is_measured(tmp_path, capsys):
    logs = [f"log.log_dir={tmp_path}", "log.name=first"]
    main(["train", "cartpole_ppo", *SHORT, *logs])
    text = capsys.readouterr().err
    assert "CartPole-v1, PPOPolicy" in text
    assert "mean return" in text
    run_dir = tmp_path / "cartpole" / "first"
    assert (run_dir / "checkpoints" / "epoch_last" / "manifest.json").is_file()
    results = []
    for where in (run_dir, run_dir / "checkpoints" / "epoch_last.pt"):
        main(["eval", str(where), "--episodes", "3", "--seed", "5"])
        results.append(capsys.readouterr().out)
    assert results[0] == results[1], "the same seed gives the same episodes"
    values = dict(line.split() for line in results[0].splitlines())
    assert values["episodes"] == "3.000"
    assert float(values["episode_return"]) >= 8
    again = ends_with_code_2(capsys, "train", "cartpole_ppo", *SHORT, *logs)
    assert "holds an earlier run, which stays as it is" in again
    main(["train", "cartpole_ppo", "--resume", "train.max_epochs=2", *SHORT[1:], *logs])
    main(["train", "cartpole_ppo", "--overwrite", *SHORT, *logs])


def test_a_file_of_ones_own_is_read(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("engine: syncrl\ntrain: {max_epochs: 3}\n")
    main(["train", str(tmp_path / "mine.yaml"), "--cfg", "job", "train.seed=1"])
    assert capsys.readouterr().out == "engine: syncrl\ntrain:\n  max_epochs: 3\n  seed: 1\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: config"),
        (["train", "cartpole_pp"], "Did you mean 'cartpole_ppo'"),
        (["train", "no_such_folder/x.yaml"], "there is no x.yaml in"),
        (["train", "cartpole_ppo", "train.max_epoch=1"], "Did you mean 'max_epochs'"),
        (["train", "cartpole_ppo", "policy.type=PPOPolcy"], "Did you mean 'PPOPolicy'"),
        (["train", "cartpole_ppo", "engine=synrl"], "Did you mean 'syncrl'"),
        (["train", "cartpole_ppo", "--nothing"], "unrecognized arguments: --nothing"),
        (["play", "nothing_here", "--video", "x.gif"], "'x.gif' does not end in .mp4"),
        (["eval", "nothing_here"], "no whole checkpoint in nothing_here"),
        (["eval", "nothing_here", "a.b=c"], "unrecognized arguments: a.b=c"),
        (["list", "robots"], "invalid choice: 'robots'"),
    ],
)
def test_mistakes_end_with_code_2_and_a_message(capsys, argv, message):
    text = ends_with_code_2(capsys, *argv)
    assert message in text
    assert "Traceback" not in text


def test_a_new_project_trains_with_one_environment_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["new", "my project"])
    assert "cd 'my project' &&" in capsys.readouterr().out
    sizes = ["env.num_envs=1", "train.max_epochs=1", "train.max_rollout_steps=64"]
    changes = [*sizes, "train.eval_episodes=1", "log.name=one"]
    # A process of its own: names that other tests have registered are taken here.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "train", "conf/train_cartpole.yaml", *changes],
        cwd=tmp_path / "my project",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my project" / "runs" / "my_project" / "one" / "metrics.jsonl").is_file()


def test_a_project_that_cannot_be_made_is_a_message(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["new", str(tmp_path / "file" / "project")])
    assert ended.value.code == 2
    assert "cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
def test_a_seed_that_no_generator_takes_is_refused(capsys, seed):
    assert f"{seed} is not in [0, 2**32)" in ends_with_code_2(capsys, "eval", "x", "--seed", seed)


def test_a_shell_completes_the_configurations_that_ship_with_the_package(capsys, tmp_path):
    main(["completion", "bash"])
    script = tmp_path / "complete.sh"
    script.write_text(capsys.readouterr().out)
    ask = "COMP_WORDS=(rlightning train cartpole_d) COMP_CWORD=2; _rlightning; echo ${COMPREPLY[@]}"
    shell = ["bash", "-c", f"source {script}; {ask}"]
    answer = subprocess.run(shell, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["cartpole_dqn"]


# --- what to do next ------------------------------------------------------------------------------


def commands_in(text):
    """Return the commands that a text ends with, as their words, without the program's name."""
    _, shown = text.rsplit(":\n", 1)
    return [shlex.split(line)[1:] for line in shown.splitlines()]


def test_the_commands_shown_at_the_end_run_as_they_are(tmp_path, capsys):
    own = ["policy.model_cfg.hidden_sizes=[7]", f"log.log_dir={tmp_path}/my runs"]
    main(["train", "cartpole_ppo", *SHORT, "log.name=one run", "train.seed=3", *own])
    measure, play, again = commands_in(capsys.readouterr().err)
    assert again == ["train", "cartpole_ppo", *SHORT, *own, "train.seed=4", "log.name=seed-4"]
    main([*measure, "--episodes", "1"])
    assert "episode_return" in capsys.readouterr().out
    assert play[0] == "play"
    main(again)
    assert (tmp_path / "my runs" / "cartpole" / "seed-4" / "checkpoints").is_dir()


def test_an_evaluation_ends_with_its_table(tmp_path, capsys):
    logs = [f"log.log_dir={tmp_path}"]
    main(["train", "cartpole_ppo", *SHORT, *logs, "log.name=trained"])
    capsys.readouterr()
    trained = f"train.checkpoint={tmp_path}/cartpole/trained"
    main(["train", "cartpole_ppo", *SHORT, *logs, "log.name=measured", "engine=eval", trained])
    text = capsys.readouterr().err
    assert "mean return" in text
    assert "next:" not in text


def test_a_stopped_run_shows_the_command_that_goes_on(tmp_path, monkeypatch, capsys):
    from rlightning.engine import SyncRLEngine

    def stop_at_once(self):
        self.run_context.stop.request()

    own = ["train.max_rollout_steps=4", f"log.log_dir={tmp_path}", "log.name=my run"]
    short = [
        item for item in SHORT if not item.startswith(("train.ppo", "train.mini", "train.max_r"))
    ]
    with monkeypatch.context() as changed:
        changed.setattr(SyncRLEngine, "_pre_rollout_hook", stop_at_once)
        main(["train", "cartpole_a2c", *short, *own])
    (again,) = commands_in(capsys.readouterr().err)
    assert again == [
        "train",
        "cartpole_a2c",
        *short,
        *own,
        "--resume",
        f"{tmp_path}/cartpole/my run",
    ]
    main(again)


def test_resuming_a_run_named_by_the_time_says_which_one_there_is(tmp_path, capsys):
    logs = [f"log.log_dir={tmp_path}"]
    main(["train", "cartpole_ppo", *SHORT, *logs])
    capsys.readouterr()
    text = ends_with_code_2(
        capsys, "train", "cartpole_ppo", *SHORT, *logs, "log.name=b", "--resume"
    )
    (run,) = (tmp_path / "cartpole").iterdir()
    assert text.endswith(f"The newest of its project is {run}; if it is meant: --resume {run}\n")


# --- stopping before a run ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_before_training_ends_quietly(tmp_path, monkeypatch, capsys, number):
    monkeypatch.syspath_prepend(tmp_path)
    module = f"stopped_by_{int(number)}"
    (tmp_path / f"{module}.py").write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["train", "cartpole_ppo", *SHORT, f"imports=[{module}]", f"log.log_dir={tmp_path}"])
    assert ended.value.code == 0
    assert capsys.readouterr().err == "stopped; nothing was under way that could be saved\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_in_a_command_that_trains_nothing_is_told_by_its_exit_code(monkeypatch, capsys):
    def interrupted(kind):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlightning.cli.listing.list_names", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["list"])
    assert ended.value.code == 130
    assert "Traceback" not in capsys.readouterr().err
