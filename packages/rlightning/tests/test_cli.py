"""The command line: quick help, a training run, its evaluation, and mistakes with exit code 2."""

import os
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
