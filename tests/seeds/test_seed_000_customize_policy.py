"""The guide "Customize Policy", one test per statement and snippet, on the class it builds up.

The class is the guide's, its ``.cuda()`` lines behind ``torch.cuda.is_available()`` and the bodies
that the guide leaves open (`get_action`, `get_value`, `update_dataset`, `train`) filled in as one
step of advantage actor-critic per epoch.
"""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # as the guide has it

from rlightning.models.vision import NatureCNN
from rlightning.policy import BasePolicy
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.builders import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
)
from rlightning.utils.config import Config, MainConfig, PolicyConfig
from rlightning.utils.launch import launch
from rlightning.utils.registry import POLICIES

CALLS = []
"""What the framework called, in order: (role, hook, detail)."""


class ImageReach(gym.Env):
    """A dot on a 3x16x16 image is moved by a two-dimensional action; right is good."""

    metadata = {"render_modes": []}  # noqa: RUF012  # Gymnasium declares it so
    observation_space = gym.spaces.Box(0, 255, (3, 16, 16), np.uint8)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def _observe(self):
        image = np.zeros((3, 16, 16), np.uint8)
        column = int(np.clip(8 + 7 * self._position, 0, 15))
        image[:, 8, column] = 255
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._position = float(self.np_random.uniform(-0.5, 0.5))
        return self._observe(), {}

    def step(self, action):
        self._position = float(np.clip(self._position + 0.1 * action[0], -1, 1))
        return self._observe(), self._position, False, False, {}


gym.register("SeedImageReach-v0", lambda **_: ImageReach(), max_episode_steps=12)


@POLICIES.register("MyPolicy")
class MyPolicy(BasePolicy):
    # --- Network & optimizer ---
    def construct_network(self, env_meta, *args, **kwargs):
        CALLS.append((str(self.role_type), "construct_network", env_meta))
        action_space = env_meta.action_space
        action_dim = action_space.shape[0]

        self.encoder = NatureCNN()
        self.actor = nn.Linear(self.encoder.out_feature_dim, action_dim)
        self.critic = nn.Linear(self.encoder.out_feature_dim, 1)

        if torch.cuda.is_available():
            self.encoder.cuda()
            self.actor.cuda()
            self.critic.cuda()

    def setup_optimizer(self, optim_cfg):
        CALLS.append((str(self.role_type), "setup_optimizer", list(self.model_list)))
        params = (
            list(self.encoder.parameters())
            + list(self.actor.parameters())
            + list(self.critic.parameters())
        )
        self.optimizer = torch.optim.AdamW(params, lr=optim_cfg.lr)

    # --- Rollout (EVAL workers) ---
    def rollout_step(self, env_ret: EnvRet, **kwargs) -> PolicyResponse:
        CALLS.append((str(self.role_type), "rollout_step", torch.is_inference_mode_enabled()))
        obs = env_ret.observation.float().unsqueeze(0)
        if torch.cuda.is_available():
            obs = obs.cuda()

        action, log_prob, entropy = self.get_action(obs)
        value = self.get_value(obs)

        return PolicyResponse(
            env_id=env_ret.env_id,
            action=action,
            log_prob=log_prob,
            entropy=entropy,
            value=value,
        )

    def postprocess(self, env_ret=None, policy_resp=None):
        pass

    # --- Training (TRAIN workers) ---
    def update_dataset(self, data):
        CALLS.append((str(self.role_type), "update_dataset", data))
        self.dataset = data

    def train(self, *args, **kwargs):
        CALLS.append((str(self.role_type), "train", None))
        data = self.dataset
        features = self.encoder(data["observation"].float())
        value = self.critic(features).squeeze(-1)
        with torch.no_grad():
            bootstrap = self.get_value(data["next_observation"].float())
            target = data["reward"] + 0.9 * bootstrap * ~data["terminated"]
        log_prob = self.distribution(features).log_prob(data["action"]).sum(-1)
        policy_loss = -((target - value).detach() * log_prob).mean()
        value_loss = (target - value).square().mean()
        self.optimizer.zero_grad()
        (policy_loss + value_loss).backward()
        self.optimizer.step()
        return {"policy_loss": policy_loss.item(), "value_loss": value_loss.item()}

    # --- Weight management ---
    def get_trainable_parameters(self):
        CALLS.append((str(self.role_type), "get_trainable_parameters", None))
        state_dict = {}
        for name, model in self.model_list:
            module = model.module if isinstance(model, DDP) else model
            state_dict[name] = module.state_dict()
        return state_dict

    def load_state_dict(self, state_dict, strict=True, assign=False):
        CALLS.append((str(self.role_type), "load_state_dict", sorted(state_dict)))
        for name, model in self.model_list:
            model.load_state_dict(state_dict[name], strict=strict)

    # --- what the guide leaves to the reader ---
    def distribution(self, features):
        return torch.distributions.Normal(self.actor(features), 0.5)

    def get_action(self, obs):
        distribution = self.distribution(self.encoder(obs))
        action = distribution.sample()
        return action, distribution.log_prob(action).sum(-1), distribution.entropy().sum(-1)

    def get_value(self, obs):
        return self.critic(self.encoder(obs)).squeeze(-1)


CONFIG = """
engine: syncrl
env: {name: reach, backend: gymnasium, task: SeedImageReach-v0}
buffer: {type: RolloutBuffer, capacity: 64}
policy:
  type: "MyPolicy"
  model_cfg:
    obs_dim: 64
    action_dim: 7
  optim_cfg: {lr: 0.001}
  weight_buffer:
    type: WeightBuffer
    buffer_strategy: Double
train: {max_epochs: 2, max_rollout_steps: 16, batch_size: 16, eval_episodes: 1, seed: 0}
log: {level: WARNING}
verbose: false
"""
META = EnvMeta("reach-0", ImageReach.action_space, ImageReach.observation_space, 1)


def main(config):
    """The guide's program: builders, then the engine."""
    env_group = build_env_group(config.env)
    policy_group = build_policy_group(config.policy.type, config.policy, config.cluster)
    buffer = build_data_buffer(config.buffer.type, config.buffer)
    engine = build_engine(config, env_group, policy_group, buffer)
    engine.run()
    return engine


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the framework called while `launch` trained the guide's policy for two epochs."""
    return train_as_written(tmp_path_factory.mktemp("guide"))


def train_as_written(folder):
    text = CONFIG.replace("level: WARNING", f"level: WARNING, log_dir: {folder}/runs")
    text = text.replace("seed: 0", f"seed: 0, save_dir: {folder}/ck")
    (folder / "conf").mkdir()
    (folder / "conf" / "train.yaml").write_text(text)
    CALLS.clear()
    seen = {}

    def program(config):
        seen["engine"] = main(config)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-name", "train"])
    try:
        launch(main_func=program, config_path=folder / "conf")
    finally:
        monkeypatch.undo()
    return {"calls": list(CALLS), "engine": seen["engine"], "checkpoints": folder / "ck"}


def config():
    return MainConfig.from_dict(yaml.safe_load(CONFIG))


def policy(role="train", cls=MyPolicy):
    """A policy on its own, initialised for a role."""
    settings = config()
    made = cls(settings.policy, role)
    if role == "train":
        made.init_train(settings.train, META)
    else:
        made.init_eval(env_meta=META)
    return made


def env_ret():
    observation = torch.zeros(3, 16, 16, dtype=torch.uint8)
    return EnvRet(env_id="reach-0", observation=observation)


def roles_of(run, hook):
    return {role for role, name, _ in run["calls"] if name == hook}


# --- Overview -------------------------------------------------------------------------------------


def test_snippet_a_subclass_with_the_eight_methods_is_complete():
    assert BasePolicy in MyPolicy.__mro__
    assert not MyPolicy.__abstractmethods__


@pytest.mark.parametrize(
    "method",
    [
        "construct_network",
        "setup_optimizer",
        "rollout_step",
        "postprocess",
        "update_dataset",
        "train",
    ],
)
def test_statement_a_subclass_without_a_required_method_cannot_be_made(method):
    methods = {name: value for name, value in vars(MyPolicy).items() if name != method}
    incomplete = type("Incomplete", (BasePolicy,), methods)
    with pytest.raises(TypeError, match=method):
        incomplete(config().policy, "eval")


@pytest.mark.parametrize("method", ["get_trainable_parameters", "load_state_dict"])
def test_statement_the_weight_methods_have_defaults_that_do_what_the_guide_writes(method):
    methods = {name: value for name, value in vars(MyPolicy).items() if name != method}
    shorter = policy("eval", type("Shorter", (BasePolicy,), methods))
    source = policy("train")
    shorter.load_state_dict(source.get_trainable_parameters())
    assert torch.equal(shorter.actor.weight, source.actor.weight)


def test_statement_the_class_is_registered_under_its_name():
    assert POLICIES.get("MyPolicy") is MyPolicy


def test_statement_the_same_class_plays_both_roles(run):
    assert roles_of(run, "construct_network") == {"train", "eval"}


# --- Step 1: construct_network --------------------------------------------------------------------


def test_statement_modules_with_trainable_parameters_are_found_by_themselves():
    names = [name for name, _ in policy().model_list]
    assert names == ["encoder", "actor", "critic"]


def test_statement_a_frozen_module_is_not_in_model_list():
    class Frozen(MyPolicy):
        def construct_network(self, env_meta, *args, **kwargs):
            super().construct_network(env_meta)
            self.encoder.requires_grad_(False)

    assert [name for name, _ in policy(cls=Frozen).model_list] == ["actor", "critic"]


def test_statement_a_model_list_set_before_init_is_kept():
    class Explicit(MyPolicy):
        def construct_network(self, env_meta, *args, **kwargs):
            super().construct_network(env_meta)
            self.model_list = [("actor", self.actor)]

    for role in ("train", "eval"):
        assert [name for name, _ in policy(role, Explicit).model_list] == ["actor"]


def test_statement_env_meta_carries_the_spaces_of_one_environment(run):
    metas = [detail for _, name, detail in run["calls"] if name == "construct_network"]
    for meta in metas:
        assert meta.observation_space == ImageReach.observation_space
        assert meta.action_space == ImageReach.action_space


def test_snippet_nature_cnn_has_the_width_of_its_features():
    encoder = NatureCNN()
    features = encoder(torch.zeros(2, 3, 16, 16))
    assert features.shape == (2, encoder.out_feature_dim)


# --- Step 2: setup_optimizer ----------------------------------------------------------------------


def test_statement_the_optimizer_is_made_on_train_workers_only(run):
    assert roles_of(run, "setup_optimizer") == {"train"}


def test_statement_the_optimizer_is_made_after_the_network_and_model_list(run):
    train = [(name, detail) for role, name, detail in run["calls"] if role == "train"]
    names = [name for name, _ in train]
    assert names.index("construct_network") < names.index("setup_optimizer")
    model_list = dict(train)["setup_optimizer"]
    assert [name for name, _ in model_list] == ["encoder", "actor", "critic"]


# --- Step 3: rollout_step -------------------------------------------------------------------------


def test_statement_rollout_step_runs_on_eval_workers_in_inference_mode(run):
    assert roles_of(run, "rollout_step") == {"eval"}
    assert all(detail for _, name, detail in run["calls"] if name == "rollout_step")


def test_statement_a_response_needs_an_env_id_first():
    with pytest.raises(TypeError, match="env_id"):
        PolicyResponse(action=1)
    assert PolicyResponse("reach-0").env_id == "reach-0"


def test_statement_additional_fields_are_stored_by_name():
    response = PolicyResponse("reach-0", action=1, anything="kept")
    assert (response.action, response.anything) == (1, "kept")


@pytest.mark.parametrize("field", ["action", "log_prob", "value", "entropy"])
def test_statement_every_field_of_the_response_is_available_in_update_dataset(run, field):
    (first, *_) = [detail for _, name, detail in run["calls"] if name == "update_dataset"]
    assert first[field].shape == {"action": (16, 2)}.get(field, (16,))


def test_statement_tensors_may_be_returned_without_conversion():
    response = policy("eval")._rollout(env_ret())
    assert isinstance(response.action, torch.Tensor)


# --- Step 4: postprocess --------------------------------------------------------------------------


def test_statement_postprocess_may_do_nothing(run):
    assert run["engine"].epoch == 2
    assert MyPolicy.postprocess(None) is None


# --- Steps 5 and 6: update_dataset, train ---------------------------------------------------------


def test_statement_update_dataset_is_called_on_train_workers_after_sampling(run):
    assert roles_of(run, "update_dataset") == {"train"}
    expected = {"observation", "next_observation", "reward", "terminated", "truncated"}
    for data in (detail for _, name, detail in run["calls"] if name == "update_dataset"):
        assert expected <= set(data.keys())
        assert data["observation"].shape == (16, 3, 16, 16)
        assert data["observation"].dtype == torch.uint8


def test_statement_train_follows_update_dataset_once_per_epoch(run):
    learning = [name for _, name, _ in run["calls"] if name in ("update_dataset", "train")]
    assert learning == ["update_dataset", "train"] * 2


def test_statement_train_does_gradient_updates():
    learner = policy()
    before = learner.actor.weight.detach().clone()
    rows = 4
    learner.update_dataset(
        {
            "observation": torch.randint(0, 255, (rows, 3, 16, 16), dtype=torch.uint8),
            "next_observation": torch.randint(0, 255, (rows, 3, 16, 16), dtype=torch.uint8),
            "action": torch.randn(rows, 2),
            "reward": torch.ones(rows),
            "terminated": torch.zeros(rows, dtype=torch.bool),
        }
    )
    metrics = learner.train()
    assert set(metrics) == {"policy_loss", "value_loss"}
    assert not torch.equal(before, learner.actor.weight)


# --- Step 7: get_trainable_parameters / load_state_dict -------------------------------------------


def test_snippet_weights_travel_from_train_to_eval(run):
    assert roles_of(run, "get_trainable_parameters") == {"train"}
    assert roles_of(run, "load_state_dict") == {"eval"}
    loads = [detail for _, name, detail in run["calls"] if name == "load_state_dict"]
    assert all(names == ["actor", "critic", "encoder"] for names in loads)


def test_snippet_a_loaded_eval_policy_answers_like_the_trained_one():
    learner, actor = policy("train"), policy("eval")
    actor.load_state_dict(learner.get_trainable_parameters())
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(learner.get_value(images), actor.get_value(images))


# --- Optional: checkpointing ----------------------------------------------------------------------


def test_statement_the_default_checkpoint_holds_every_model_of_model_list(run):
    saved = torch.load(run["checkpoints"] / "epoch_last.pt", weights_only=True)
    assert {"encoder", "actor", "critic"} <= set(saved)
    fresh = policy("eval")
    fresh.load_checkpoint(str(run["checkpoints"] / "epoch_last.pt"))
    assert torch.equal(fresh.actor.weight.cpu(), saved["actor"]["weight"].cpu())


def test_statement_save_checkpoint_can_be_overridden(tmp_path):
    class Custom(MyPolicy):
        def save_checkpoint(self, path):
            torch.save({"optimizer": self.optimizer.state_dict()}, path)

    policy(cls=Custom).save_checkpoint(str(tmp_path / "own.pt"))
    assert set(torch.load(tmp_path / "own.pt", weights_only=True)) == {"optimizer"}


# --- Optional: DDP wrapping -----------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def wrapped_policy(cls, process_group):
    settings = config()
    settings.train.parallel = "ddp"
    made = cls(settings.policy, "train")
    made.process_group = process_group
    made.init_train(settings.train, META)
    return made


def test_statement_every_module_of_model_list_is_wrapped_for_data_parallelism(process_group):
    learner = wrapped_policy(MyPolicy, process_group)
    assert all(isinstance(getattr(learner, name), DDP) for name in ("encoder", "actor", "critic"))


def test_statement_weights_and_checkpoints_are_unwrapped(process_group, tmp_path):
    learner = wrapped_policy(MyPolicy, process_group)
    learner.save_checkpoint(str(tmp_path / "epoch_0.pt"))
    saved = torch.load(tmp_path / "epoch_0.pt", weights_only=True)
    assert set(saved["actor"]) == {"weight", "bias"}
    assert set(learner.get_trainable_parameters()["actor"]) == {"weight", "bias"}


def test_snippet_wrap_with_ddp_chooses_what_is_wrapped(process_group):
    class OnlyActor(MyPolicy):
        def wrap_with_ddp(self, logic_gpu_id, process_group):
            on_gpu = torch.cuda.is_available()
            self.actor = DDP(
                self.actor.cuda() if on_gpu else self.actor,
                device_ids=[logic_gpu_id] if on_gpu else None,
                process_group=process_group,
            )

    learner = wrapped_policy(OnlyActor, process_group)
    assert isinstance(learner.actor, DDP)
    assert not isinstance(learner.critic, DDP)


# --- Registration and config wiring ---------------------------------------------------------------


def test_snippet_the_policy_section_is_accepted_as_written():
    section = """
policy:
  type: "MyPolicy"
  model_cfg:
    obs_dim: 64
    action_dim: 7
  weight_buffer:
    type: WeightBuffer
    buffer_strategy: Double
"""
    parsed = PolicyConfig.from_dict(yaml.safe_load(section)["policy"])
    assert parsed.type == "MyPolicy"
    assert parsed.weight_buffer.type == "WeightBuffer"
    assert parsed.weight_buffer.buffer_strategy == "Double"


def test_statement_model_cfg_is_an_open_config_that_the_policy_reads():
    model_cfg = policy("eval").config.model_cfg
    assert isinstance(model_cfg, Config)
    assert (model_cfg.obs_dim, model_cfg.action_dim) == (64, 7)


def test_statement_training_changes_the_weights_and_acting_uses_them(run):
    groups = run["engine"].policy_group
    trained = groups.train_list[0].actor.weight
    acting = groups.eval_list[0].actor.weight
    assert torch.equal(trained, acting)


def test_snippet_the_guides_cuda_lines_train_where_there_is_a_gpu(tmp_path, pretend_cuda):
    with pretend_cuda():
        trained = train_as_written(tmp_path)
        (policy,) = trained["engine"].policy_group.train_list
        assert all(parameter.is_cuda for parameter in policy.parameters())
    assert "train" in roles_of(trained, "train")
