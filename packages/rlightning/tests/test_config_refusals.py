"""Values that no run can use are refused by name before anything is built, with exit code 2."""

import math

import pytest
from pydantic import ValidationError

from rlightning.cli import main
from rlightning.config import Config
from rlightning.config.wire import ActionSpaceConfig
from rlightning.errors import ConfigError
from rlightning.utils.logger import close_logger
from rlightning.utils.registry import BUFFERS, ENGINE, ENVS, POLICIES

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
        (
            ["policy.model_cfg.hidden_sizes=[8,0]"],
            "'policy.model_cfg.hidden_sizes.1': Input should be greater",
        ),
        (["policy.model_cfg.image_size=[4,4]"], "image_encoder nature needs at least [36, 36]"),
        (
            [*SAC, "policy.model_cfg.hidden_sizes=[-8]"],
            "'policy.model_cfg.hidden_sizes.0': Input should be",
        ),
        ([*SAC, "buffer.samples_per_insert=nan"], "'buffer.samples_per_insert': Input should be a"),
        (
            ["policy.model_cfg.log_std_init=nan"],
            "'policy.model_cfg.log_std_init': Input should be a finite number",
        ),
        (
            ["policy.model_cfg.log_std_init=-inf"],
            "'policy.model_cfg.log_std_init': Input should be a finite",
        ),
        (["policy.optim_cfg.learning_rate=1"], "'policy.optim_cfg': unknown key 'learning_rate'"),
        (
            ["policy.optim_cfg.betas=[0.9,nan]"],
            "'policy.optim_cfg.betas.1': Input should be a finite number",
        ),
        (["train.max_grad_norm=nan"], "'train.max_grad_norm': Input should be greater than 0"),
        (["env.step_timeout_s=inf"], "'env.step_timeout_s': Input should be a finite number"),
        (["env.step_timeout_s=0"], "'env.step_timeout_s': Input should be greater than 0"),
        (["env.num_cpus=inf"], "'env.0.num_cpus': Input should be a finite number"),
        ([*SAC, "buffer.error_buffer=8"], "samples_per_insert may be off, which is not"),
        (
            [*SAC, "buffer.storage.unit=episode", "buffer.samples_per_insert=1"],
            "buffer.samples_per_insert: these need transitions one by one",
        ),
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


def _sections(base=Config):
    for kind in base.__subclasses__():
        yield from [kind, *_sections(kind)] if kind.__module__.startswith("rlightning.") else []


def _accepts(kind, name, value):
    """Whether a field of a section takes a value, alone."""
    try:
        kind.__pydantic_validator__.validate_assignment(kind.model_construct(), name, value)
    except ValidationError as error:
        return all(item["loc"][:1] != (name,) for item in error.errors())
    return True


def test_no_number_of_a_configuration_is_nan_and_only_what_may_be_without_limit_is_infinite():
    for registry in (POLICIES, ENVS, BUFFERS, ENGINE):
        for name in registry.names():
            registry.get(name)
    unlimited = set()
    for kind in _sections():
        for name, field in kind.model_fields.items():
            if "float" not in str(field.annotation):
                continue
            pair = "tuple" in str(field.annotation)
            nan, inf = ((x, x) if pair else x for x in (math.nan, math.inf))
            assert not _accepts(kind, name, nan) or name in {"low", "high"}, (kind, name)
            if _accepts(kind, name, inf):
                unlimited.add(name)
    limits = {"max_grad_norm", "rho_bar", "c_bar", "target_noise_clip"}
    assert unlimited == limits | {"low", "high"}


@pytest.mark.parametrize("bounds", [{"low": math.nan}, {"low": 2.0}, {"low": [0, math.nan]}])
def test_bounds_of_actions_are_numbers_in_order(bounds):
    with pytest.raises(ConfigError, match="expected numbers, none of them above its high"):
        ActionSpaceConfig.from_dict({"high": 1.0, **bounds})
