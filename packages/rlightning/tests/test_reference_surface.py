"""What users of the RLightning reference import, name and call: there, or listed as not kept."""

import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import gymnasium as gym
import pytest
import torch
from torch import nn

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    define_env_instance_cfgs,
)
from rlightning.config import BufferConfig, MainConfig
from rlightning.engine import SyncRLEngine
from rlightning.errors import ConfigError, ContractError
from rlightning.launch import launch
from rlightning.policy import BasePolicy
from rlightning.types import PolicyResponse
from rlightning.utils.logger import close_logger
from rlightning.utils.logger.files import read_rows
from rlightning.utils.profiler import profiler

DIFFERENCES = pathlib.Path(__file__).parents[3] / "docs" / "reference" / "differences.md"

IMPORTS = """
rlightning: __version__ buffer engine env policy types utils weights
rlightning.policy: BasePolicy PolicyGroup
rlightning.policy.base_policy: PolicyRole set_nested_attr infer_train_dp_world_size
rlightning.types: EnvRet MultiAgentEnvRet PolicyResponse MultiAgentPolicyResponse BatchedData
rlightning.types: EnvMeta Processed_EnvRet_fields
rlightning.env: BaseEnv EnvGroup EnvMeta
rlightning.env.remote_env: RemoteEnvClient
rlightning.env.env_server: RemoteEnvServer
rlightning.env.utils.utils: default_env_preprocess_fn
rlightning.buffer: DataBuffer BufferConfig RolloutBuffer ReplayBuffer
rlightning.buffer.rollout_buffer: RolloutBuffer
rlightning.buffer.replay_buffer: ReplayBuffer
rlightning.buffer.sampler: BaseSampler UniformSampler AllDataSampler BatchSampler
rlightning.buffer.utils.preprocessors: Preprocessor NonPreprocessor BoxFlattenPreprocessor
rlightning.buffer.utils.preprocessors: DiscretePreprocessor get_preprocessor_cls
rlightning.buffer.utils.preprocessors: default_obs_preprocessor default_reward_preprocessor
rlightning.buffer.utils.utils: default_preprocess_fn default_env_ret_preprocess_fn
rlightning.buffer.utils.utils: default_policy_resp_preprocess_fn default_postprocess_fn
rlightning.buffer.utils.utils: default_compute_gae default_gae_no_loop
rlightning.buffer.utils: Storage BufferView EpisodeTable default_compute_gae default_gae_no_loop
rlightning.engine: BaseEngine SyncRLEngine AsyncRLEngine EvaluationEngine RSLRLEngine
rlightning.engine: AsyncRSLRLEngine
rlightning.utils.builders: build_data_buffer build_env_group build_policy_group build_engine
rlightning.utils.builders: define_env_instance_cfgs create_distributed_policy_class
rlightning.utils.launch: launch
rlightning.utils.registry: BUFFERS WEIGHTS POLICIES ENVS ENGINE Registry load_modules_from_config
rlightning.utils.registry.registry: Registry
rlightning.utils.config: Config MainConfig EnvConfig BufferConfig PolicyConfig TrainConfig
rlightning.utils.config: LogConfig WeightBufferConfig ClusterConfig ResourcePoolConfig
rlightning.utils.config: StorageConfig SamplerConfig validate_config_for_placement
rlightning.utils.config.config: StorageConfig SamplerConfig
rlightning.utils.logger: get_logger log_metric setup_logger get_metrics_logger MetricsLogger
rlightning.utils.logger.logger: get_metrics_logger is_ray_worker
rlightning.utils.profiler: profiler
rlightning.utils.ray: TaskSubmitter
rlightning.utils.utils: InternalFlag to_device to_numpy torch_dtype_from_precision
rlightning.utils.progress: get_progress
rlightning.utils.distributed.comm_context: CommContext
rlightning.utils.placement: GlobalResourceManager
rlightning.weights: WeightTransferManager
rlightning.weights.weight_buffer: WeightBuffer CPUWeightBuffer ShardedWeightBuffer
rlightning.weights.utils: build_weight_buffer
rlightning.models.vision: NatureCNN
rlightning.models.modules.value_head: ValueHead
rlightning.policy.utils.losses: compute_ppo_actor_critic_loss
rlightning.policy.utils.vtrace: vtrace_correction
"""


def found(module, name):
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
def test_every_name_is_where_the_reference_has_it_or_listed_as_not_kept(line):
    module, names = line.split(": ")
    listed = DIFFERENCES.read_text(encoding="utf-8")
    missing = [name for name in names.split() if not found(module, name)]
    assert [name for name in missing if f"`{name}`" not in listed] == []


EVERY_MODULE = """
import importlib, logging, pkgutil, signal, sys, threading
import rlightning

def everything_global():
    root = logging.getLogger()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return root.level, list(root.handlers), handlers, threading.enumerate()

before = everything_global()
for found in pkgutil.walk_packages(rlightning.__path__, "rlightning."):
    if "templates" not in found.name and found.name != "rlightning.runtime.ray":
        importlib.import_module(found.name)
assert everything_global() == before, everything_global()
assert not logging.getLogger("rlightning").handlers
heavy = {"ray", "matplotlib", "wandb", "mlflow", "minari"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_importing_every_module_prints_and_starts_nothing_and_loads_no_ray():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EVERY_MODULE],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


BUILDERS = """
(buffer_cls, buffer_cfg, obs_preprocessor, reward_preprocessor, env_ret_preprocess_fn,
 policy_resp_preprocess_fn, preprocess_fn, postprocess_fn)
(env_cfgs, preprocess_fn)
(policy_cls, policy_cfg, cluster_cfg, backend, is_colocated)
(config, env_group, policy_group, buffer)
(env_cfg, num_workers)
(main_func, config_path)
"""


def test_builders_take_their_arguments_by_the_documented_names_and_in_that_order():
    functions = (
        *(build_data_buffer, build_env_group, build_policy_group, build_engine),
        *(define_env_instance_cfgs, launch),
    )
    for function, names in zip(functions, BUILDERS.strip().split(")\n"), strict=True):
        documented = re.findall(r"\w+", names)
        parameters = inspect.signature(function).parameters.values()
        positional = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
        assert positional[: len(documented)] == documented


def test_a_stage_of_the_buffer_may_be_given_by_its_position():
    config = BufferConfig(type="RolloutBuffer", capacity=8)
    with pytest.raises(ConfigError, match="obs_preprocessor"):
        build_data_buffer("RolloutBuffer", config, abs, preprocess_fn=dict)


# --- engines --------------------------------------------------------------------------------------


class Held(gym.Env):
    """Rewards the second of two actions; episodes are cut after ten steps."""

    metadata = {"render_modes": []}  # noqa: RUF012  # Gymnasium declares it so
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, float(action), False, False, {}


gym.register("Held-v0", lambda **_: Held(), max_episode_steps=10)


class Lever(BasePolicy):
    """Answers `actions`, as the reference's own policies do, and times itself."""

    answers = "actions"

    def construct_network(self, env_meta, *args, **kwargs):
        self.model = nn.Linear(2, 2)

    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def rollout_step(self, env_ret, **kwargs):
        return PolicyResponse(env_ret.env_id, **{self.answers: torch.ones((), dtype=torch.int64)})

    def postprocess(self, env_ret=None, policy_resp=None): ...

    def update_dataset(self, data):
        self.dataset = data

    @profiler.timer_wrap("my_update")
    def train(self, *args, **kwargs):
        return {"rows": float(self.dataset["actions"].sum())}


class Plain(Lever):
    answers = "action"

    def train(self, *args, **kwargs):
        return {"rows": float(self.dataset["action"].sum())}


class FromTheGuide(SyncRLEngine):
    """Overrides what the reference's examples override, with their signatures."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def rollout(self, obj_set, prefix=""):
        self.calls.append(("rollout", obj_set, prefix))
        super().rollout(obj_set=obj_set, prefix=prefix)

    def evaluate(self, obj_set, prefix=""):
        self.calls.append(("evaluate", obj_set, prefix))
        return super().evaluate(obj_set=obj_set, prefix=prefix)


def engine_for(folder, policy, *, engine=SyncRLEngine, preprocess_fn=None, **changes):
    config = MainConfig.from_dict(
        {
            "engine": "syncrl",
            "debug": False,
            "verbose": False,
            "env": {"name": "held", "backend": "gymnasium", "task": "Held-v0"},
            "buffer": {"type": "RolloutBuffer", "capacity": 20},
            "policy": {"type": f"{__name__}:{policy.__name__}"},
            "train": {"max_epochs": 1, "eval_episodes": 1, "seed": 0},
            "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "ERROR"},
            **changes,
        }
    )
    env_group = build_env_group(config.env, preprocess_fn)
    policy_group = build_policy_group(config.policy.type, config.policy)
    buffer = build_data_buffer(config.buffer.type, config.buffer)
    if engine is SyncRLEngine:
        return build_engine(config, env_group, policy_group, buffer)
    return engine(config, env_group, policy_group, buffer)


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    yield
    close_logger()


def test_an_engine_overrides_rollout_and_evaluate_with_the_documented_arguments(tmp_path):
    engine = engine_for(tmp_path, Plain, engine=FromTheGuide)
    engine.run()
    assert engine.calls == [("rollout", "train", "rollout"), ("evaluate", "train", "eval")]


def test_stages_are_called_by_their_documented_keywords(tmp_path):
    engine = engine_for(tmp_path, Plain)
    engine._rollout(obj_set="train", prefix="warm")
    assert engine.buffer.size() == 20
    engine.buffer.clear()
    engine._rollout(obj_set="test", is_eval=True)
    assert engine.buffer.size() == 0
    assert engine._evaluate(obj_set="test", prefix="eval_ood")["episode_return"] == 10
    engine.close()
    streams = [row["stream"] for row in read_rows(tmp_path / "p" / "n" / "metrics.jsonl")]
    assert streams == ["warm", "eval", "eval_ood"]


# --- what a policy answers ------------------------------------------------------------------------


def test_an_environment_makes_its_action_of_whatever_the_policy_answers(tmp_path):
    engine = engine_for(tmp_path, Lever, preprocess_fn=lambda response: response.actions)
    engine.run()
    assert engine.last_metrics["train/rows"] == 20
    assert engine.last_metrics["eval/episode_return"] == 10


@pytest.mark.parametrize(
    ("answer", "message"),
    [("actions", "answered actions: it has no `action`.*preprocess_fn"), ("action", "is None")],
)
def test_without_an_action_or_a_function_that_makes_one_it_says_so(
    tmp_path, monkeypatch, answer, message
):
    class Wrong(Plain):
        def rollout_step(self, env_ret, **kwargs):
            return PolicyResponse(env_ret.env_id, **{answer: None})

    monkeypatch.setitem(globals(), "Wrong", Wrong)
    with pytest.raises(ContractError, match=message):
        engine_for(tmp_path, Wrong).run()


def test_what_a_policy_timed_of_its_own_is_in_the_summary_of_a_debugged_run(tmp_path):
    engine = engine_for(
        tmp_path, Lever, preprocess_fn=lambda response: response.actions, debug=True
    )
    engine.run()
    assert "my_update" in (tmp_path / "p" / "n" / "run.log").read_text(encoding="utf-8")
    engine.print_timing_summary(True)
    assert engine.policy_group.train_list[0].timing_raw == {}
