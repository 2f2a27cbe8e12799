"""Values that no run can use are refused by name before anything is built, with exit code 2."""

import pytest

from rlightning.cli import main
from rlightning.utils.logger import close_logger

SAC = ["buffer.type=ReplayBuffer", "policy.type=SACPolicy", "env.task=Pendulum-v1"]
BASE = """
engine: syncrl
verbose: false
debug: false
env: {name: e, backend: gymnasium, task: CartPole-v1, num_envs: 2}
buffer: {type: RolloutBuffer, capacity: 64}
policy: {type: PPOPolicy}
train: {max_epochs: 1, max_rollout_steps: 16, batch_size: 16, eval_episodes: 1, torch_threads: 1}
log: {level: CRITICAL, project: p, name: n}
"""


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    yield
    close_logger()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.seed=-1"], "'train.seed': Input should be greater than or equal to 0"),
        (["train.seed=4294967296"], "'train.seed': Input should be less than 4294967296"),
        (["env.seed=-1"], "'env.seed': Input should be greater than or equal to 0"),
        (["buffer.gamma=1.5"], "'buffer.gamma': Input should be less than or equal to 1"),
        (["buffer.gamma=nan"], "'buffer.gamma': Input should be"),
        (["buffer.gae_lambda=-1"], "'buffer.gae_lambda': Input should be greater than or"),
        (
            ["policy.type=VTracePPOPolicy", "+train.gamma=0.9"],
            "buffer.gamma is 0.99 and train.gamma is 0.9",
        ),
        (["engine=asyncrl", "train.max_staleness=-1"], "'train.max_staleness': Input should be"),
        (["policy.model_cfg.hidden_sizes=[8,0]"], "'hidden_sizes.1': Input should be greater"),
        (["policy.model_cfg.image_size=[4,4]"], "image_encoder nature needs at least [36, 36]"),
        ([*SAC, "policy.model_cfg.hidden_sizes=[-8]"], "'hidden_sizes.0': Input should be"),
        ([*SAC, "buffer.samples_per_insert=nan"], "samples_per_insert is nan; expected more"),
        ([*SAC, "buffer.importance_exponent=7"], "'buffer.importance_exponent': Input should"),
        (["env.evaluate_cfg.num_env=2"], "unknown key 'num_env'. Did you mean 'num_envs'"),
        (["env.evaluate_cfg.num_envs=0"], "evaluate_cfg of env 'e': "),
        (["env.evaluate_cfg.vectorization=syn"], "'env.evaluate_cfg.vectorization': Input"),
        (
            ["env.evaluate_cfg.num_workers=3"],
            "evaluate_cfg cannot replace 'num_workers' of env 'e'",
        ),
        (["log.name="], "'log.name': String should have at least 1 character"),
        (["log.log_dir=base.yaml"], "the run directory base.yaml/p/n cannot be made"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_value_that_no_run_can_use_is_a_message(tmp_path, monkeypatch, capsys, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    with pytest.raises(SystemExit) as ended:
        main(["train", "base.yaml", *changes])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
