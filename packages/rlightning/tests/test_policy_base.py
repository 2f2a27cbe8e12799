"""`BasePolicy`: the order of its hooks in both roles, and what travels between them."""

import numpy as np
import pytest
import torch
from torch import nn

from rlightning.config import MainConfig
from rlightning.errors import CheckpointError, ContractError
from rlightning.policy import BasePolicy, PolicyGroup
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse
from rlightning.weights import WeightBuffer

META = EnvMeta(env_id="e-0", num_envs=1)


def config(policy=None, train=None):
    return MainConfig.from_dict(
        {
            "env": {"name": "a", "backend": "b", "task": "t"},
            "buffer": {"type": "RolloutBuffer", "capacity": 8},
            "policy": {"type": "P", "optim_cfg": {"lr": 0.1}, **(policy or {})},
            "train": {"max_epochs": 1, **(train or {})},
        }
    )


class Linear(BasePolicy):
    """The smallest policy: one layer, one optimizer, and a record of every call."""

    calls = ()

    def note(self, *call):
        self.__dict__.setdefault("log", []).append(call)

    def construct_network(self, env_meta, *args, **kwargs):
        self.note("construct_network", env_meta, kwargs)
        torch.manual_seed(0 if self.role_type == "train" else 1)
        self.actor = nn.Linear(2, 1)

    def setup_optimizer(self, optim_cfg):
        self.note("setup_optimizer", optim_cfg.lr, [name for name, _ in self.model_list])
        self.optimizer = torch.optim.SGD(self.parameters(), lr=optim_cfg.lr)

    def rollout_step(self, env_ret, **kwargs):
        self.note("rollout_step", torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        return PolicyResponse(env_ret.env_id, action=self.actor(env_ret.observation))

    def postprocess(self, env_ret=None, policy_resp=None):
        self.note("postprocess")

    def update_dataset(self, data):
        self.note("update_dataset")
        self.dataset = data

    def train(self, *args, **kwargs):
        self.note("train")
        self.optimizer.zero_grad()
        loss = self.actor(self.dataset["observation"]).sum()
        loss.backward()
        self.optimizer.step()
        return {"loss": float(loss.detach())}

    def get_trainable_parameters(self):
        self.note("get_trainable_parameters")
        return super().get_trainable_parameters()

    def load_state_dict(self, state_dict, *args, **kwargs):
        self.note("load_state_dict")
        return super().load_state_dict(state_dict, *args, **kwargs)


@pytest.mark.parametrize("optim_cfg", [None, {"rate": 0.1}], ids=["no section", "another key"])
def test_a_key_of_the_configuration_that_a_policy_misses_is_named(optim_cfg):
    with pytest.raises(ContractError, match=r"Linear reads 'lr', .*; set policy\.optim_cfg\.lr"):
        build(Linear, "train", policy={"optim_cfg": optim_cfg})


def build(kind, role, **sections):
    cfg = config(**sections)
    policy = kind(cfg.policy, role)
    if role == "train":
        policy.init_train(cfg.train, META)
    else:
        policy.init_eval(env_meta=META)
    return policy


def build_group(kind, *, buffered=True, **sections):
    cfg = config(**sections)
    group = PolicyGroup(
        [kind(cfg.policy, "train")],
        [kind(cfg.policy, "eval")],
        cfg.policy,
        weight_buffer=WeightBuffer() if buffered else None,
    )
    group.init(cfg.train, META)
    return group


def ret(env_id="e-0", observation=(1.0, 2.0), **fields):
    return EnvRet(env_id, np.asarray(observation, np.float32), **fields)


BATCH = {"observation": torch.ones(4, 2)}


# ---- order of calls ----------------------------------------------------------------------------


def test_train_calls_come_in_the_documented_order():
    group = build_group(Linear)
    learner = group.train_list[0]
    group.sync_weights()
    for _ in range(2):
        group.update_dataset([BATCH])
        group.train()
        group.sync_weights()
    assert [call[0] for call in learner.log] == [
        "construct_network",
        "setup_optimizer",
        "get_trainable_parameters",
        "update_dataset",
        "train",
        "get_trainable_parameters",
        "update_dataset",
        "train",
        "get_trainable_parameters",
    ]
    assert learner.log[0][1:] == (META, {"backend": "transformers"})
    assert learner.log[1][1:] == (0.1, ["actor"])


def test_eval_calls_come_in_the_documented_order():
    group = build_group(Linear)
    actor = group.eval_list[0]
    group.sync_weights()
    group.rollout_batch(BatchedData(["e-0"], [ret()]))
    group.sync_weights()
    group.rollout_batch(BatchedData(["e-0"], [ret()]))
    assert [call[0] for call in actor.log] == [
        "construct_network",
        "load_state_dict",
        "rollout_step",
        "load_state_dict",
        "rollout_step",
    ]
    assert actor.log[0][1:] == (META, {})


def test_roles_put_modules_into_their_mode():
    assert build(Linear, "train").actor.training
    acting = build(Linear, "eval")
    assert not acting.actor.training
    assert not acting.training
    assert acting.is_initialized()


def test_another_role_is_refused():
    with pytest.raises(ValueError, match="critic"):
        Linear(config().policy, "critic")


def test_a_policy_without_the_abstract_methods_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        BasePolicy(config().policy, "train")


def test_going_into_evaluation_mode_does_not_run_the_users_training():
    learner = build(Linear, "train")
    assert learner.eval() is learner
    assert not learner.actor.training
    assert "train" not in [call[0] for call in learner.log]


def test_the_train_section_is_readable_from_the_policy_section():
    assert build(Linear, "train").config.train_config.max_epochs == 1


def test_a_new_policy_has_the_documented_attributes():
    policy = Linear(config().policy, "eval")
    assert (policy.model_list, policy.is_init, policy.dataset) == ([], False, None)
    assert (policy.rollout_mode, policy.world_size, policy.timing_raw) == ("sync", 1, {})
    assert policy.device == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert not policy.is_initialized()


# ---- model_list --------------------------------------------------------------------------------


class Mixed(Linear):
    """Every kind of tensor that may stand outside `model_list`."""

    def construct_network(self, env_meta, *args, **kwargs):
        super().construct_network(env_meta, *args, **kwargs)
        self.critic = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.log_std = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.register_buffer("mean", torch.zeros(2))


def test_model_list_is_the_direct_children_that_train_in_order():
    assert [name for name, _ in build(Mixed, "train").model_list] == ["actor", "critic"]


def test_an_explicit_model_list_is_kept():
    class Explicit(Mixed):
        def construct_network(self, env_meta, *args, **kwargs):
            super().construct_network(env_meta, *args, **kwargs)
            self.model_list = [("critic", self.critic)]

    policy = build(Explicit, "train")
    assert [name for name, _ in policy.model_list] == ["critic"]
    assert "actor.weight" in policy.export_weights()["extra"]


def test_an_entry_that_is_no_module_is_refused():
    class Wrong(Linear):
        def construct_network(self, env_meta, *args, **kwargs):
            self.model_list = [("actor", 3)]

    with pytest.raises(ValueError, match=r"'actor' is a int; expected a torch\.nn\.Module"):
        build(Wrong, "train")


# ---- what travels ------------------------------------------------------------------------------


def change_everything(policy):
    with torch.no_grad():
        for index, tensor in enumerate(nn.Module.state_dict(policy, keep_vars=True).values()):
            tensor.copy_(torch.full_like(tensor, index + 2))


OUTSIDE = {
    "log_std",
    "mean",
    "frozen.weight",
    "frozen.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
}


@pytest.mark.parametrize("buffered", [True, False])
def test_everything_the_learner_holds_reaches_the_actor(buffered):
    group = build_group(Mixed, buffered=buffered)
    change_everything(group.train_list[0])
    group.sync_weights()
    want = nn.Module.state_dict(group.train_list[0])
    have = nn.Module.state_dict(group.eval_list[0])
    assert have.keys() == want.keys()
    assert all(torch.equal(have[name], want[name]) for name in want)
    assert have.keys() >= OUTSIDE
    assert group.verify_eval_weight_consistency()


def test_what_stands_outside_model_list_is_exported_under_a_key_of_its_own():
    exported = build(Mixed, "train").export_weights()
    assert exported["weights"].keys() == {"actor", "critic"}
    assert "1.running_mean" in exported["weights"]["critic"]
    assert exported["extra"].keys() == OUTSIDE


def test_a_checkpoint_holds_everything_and_loads_as_plain_data(tmp_path):
    policy = build(Mixed, "train")
    change_everything(policy)
    path = tmp_path / "deep" / "epoch_0.pt"
    policy.save_checkpoint(str(path))
    content = torch.load(path, weights_only=True)
    assert content.keys() == {"actor", "critic", "_extra_state"}
    assert content["_extra_state"].keys() == OUTSIDE
    other = build(Mixed, "eval")
    other.load_checkpoint(str(path))
    want, have = nn.Module.state_dict(policy), nn.Module.state_dict(other)
    assert all(torch.equal(have[name], want[name]) for name in want)


def test_a_checkpoint_without_extras_holds_the_modules_only(tmp_path):
    build(Linear, "train").save_checkpoint(str(tmp_path / "a.pt"))
    assert torch.load(tmp_path / "a.pt", weights_only=True).keys() == {"actor"}


def test_another_policys_checkpoint_is_refused(tmp_path):
    path = tmp_path / "epoch_0.pt"
    build(Linear, "train").save_checkpoint(str(path))
    with pytest.raises(CheckpointError, match=r"holds the modules \['actor'\]; Mixed has"):
        build(Mixed, "eval").load_checkpoint(str(path))

    class Wider(Linear):
        def construct_network(self, env_meta, *args, **kwargs):
            self.actor = nn.Linear(3, 1)

    with pytest.raises(CheckpointError, match="does not fit Wider"):
        build(Wider, "eval").load_checkpoint(str(path))


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('code from a checkpoint ran')",)


def test_code_in_a_policys_checkpoint_is_refused(tmp_path):
    path = tmp_path / "epoch_0.pt"
    torch.save({"actor": Bomb()}, path)
    with pytest.raises(CheckpointError, match="cannot be loaded as plain data"):
        build(Linear, "eval").load_checkpoint(str(path))


def test_a_damaged_checkpoint_is_a_checkpoint_error(tmp_path):
    path = tmp_path / "epoch_0.pt"
    build(Linear, "train").save_checkpoint(str(path))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="cannot be loaded as plain data"):
        build(Linear, "eval").load_checkpoint(str(path))


def test_the_guides_own_pair_of_methods_works():
    class FromTheGuide(Mixed):
        def get_trainable_parameters(self):
            return {name: module.state_dict() for name, module in self.model_list}

        def load_state_dict(self, state_dict, strict=True, assign=False):
            for name, model in self.model_list:
                model.load_state_dict(state_dict[name], strict=strict)

    group = build_group(FromTheGuide)
    change_everything(group.train_list[0])
    group.sync_weights()
    assert group.verify_eval_weight_consistency()
    assert group.eval_list[0].log_std.item() == group.train_list[0].log_std.item() > 1


def test_weights_that_a_policy_assigns_do_not_alias_the_learner():
    """A user may load with ``assign=True``; learning must still not reach the actor by itself."""

    class Assigning(Linear):
        def load_state_dict(self, state_dict, *args, **kwargs):
            for name, module in self.model_list:
                module.load_state_dict(state_dict[name], assign=True)

    group = build_group(Assigning)
    group.sync_weights()
    before = group.eval_list[0].actor.weight.clone()
    group.update_dataset([BATCH])
    group.train()
    assert torch.equal(group.eval_list[0].actor.weight, before)
    assert not torch.equal(group.train_list[0].actor.weight, before)


def test_statistics_that_an_actor_replaces_while_acting_can_still_be_synchronised():
    class Counting(Linear):
        def construct_network(self, env_meta, *args, **kwargs):
            super().construct_network(env_meta, *args, **kwargs)
            self.register_buffer("seen", torch.zeros(()))

        def rollout_step(self, env_ret, **kwargs):
            self.seen = self.seen + 1
            return super().rollout_step(env_ret, **kwargs)

    group = build_group(Counting)
    group.sync_weights()
    group.rollout_batch(BatchedData(["e-0"], [ret()]))
    assert float(group.eval_list[0].seen) == 1
    group.sync_weights()
    assert float(group.eval_list[0].seen) == 0


def test_extra_state_of_other_names_or_shapes_is_refused():
    policy = build(Mixed, "train")
    exported = policy.export_weights()
    with pytest.raises(ContractError, match="outside model_list has the names"):
        policy.import_weights(1, {**exported, "extra": {}})
    wrong = exported["extra"] | {"mean": torch.zeros(3)}
    with pytest.raises(ContractError, match=r"mean has shape \(3,\); this policy has \(2,\)"):
        policy.import_weights(1, {**exported, "extra": wrong})


# ---- training state ----------------------------------------------------------------------------


class Scheduled(Linear):
    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=optim_cfg.lr, momentum=0.9)
        self.others = {"scale": torch.optim.Adam([nn.Parameter(torch.zeros(1))])}
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.generator = torch.Generator().manual_seed(3)
        self.updates = 0

    def training_state(self):
        return {"updates": self.updates}

    def load_training_state(self, state):
        self.updates = state["updates"]


def test_optimizers_schedulers_generators_and_own_state_are_restored():
    one, two = build(Scheduled, "train"), build(Scheduled, "train")
    one.update_dataset(BATCH)
    one.train()
    one.schedule.step()
    one.updates = 5
    torch.rand(3, generator=one.generator)
    state = one.export_training_state()
    assert state["stateful"].keys() == {"optimizer", "others.scale", "schedule", "generator"}
    two.import_training_state(state)
    assert two.updates == 5
    assert two.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert two.schedule.last_epoch == 1
    momentum = [policy.optimizer.state_dict()["state"] for policy in (one, two)]
    assert torch.equal(momentum[0][0]["momentum_buffer"], momentum[1][0]["momentum_buffer"])
    assert torch.equal(
        torch.rand(3, generator=one.generator), torch.rand(3, generator=two.generator)
    )


class WarmsUp(Linear):
    """Its rate rises over ten epochs to what the configuration says."""

    lr, betas = 0.1, (0.9, 0.99)

    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=self.betas)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda epoch: min(1.0, (epoch + 1) / 10)
        )


@pytest.mark.parametrize("changed", [False, True])
def test_settings_of_an_optimizer_that_were_changed_win_over_the_restored_ones(changed):
    class Now(WarmsUp):
        lr, betas = (0.5, (0.8, 0.99)) if changed else (WarmsUp.lr, WarmsUp.betas)

    one, two = build(WarmsUp, "train"), build(Now, "train")
    for _ in range(4):
        one.optimizer.step()
        one.schedule.step()
    two.import_training_state(one.export_training_state())
    (group,) = two.optimizer.param_groups
    assert group["lr"] == pytest.approx(Now.lr * 0.5), "five of ten steps into the warm-up"
    assert tuple(group["betas"]) == Now.betas
    two.optimizer.step()
    two.schedule.step()
    assert group["lr"] == pytest.approx(Now.lr * 0.6)
    three = build(Now, "train")
    three.import_training_state(two.export_training_state())
    assert three.optimizer.param_groups[0]["lr"] == group["lr"], "nothing has changed since"


def test_training_state_of_other_helpers_is_refused():
    state = build(Linear, "train").export_training_state()
    with pytest.raises(CheckpointError, match=r"training state of \['optimizer'\]; this"):
        build(Scheduled, "train").import_training_state(state)


# ---- acting ------------------------------------------------------------------------------------


def test_acting_runs_in_inference_mode_on_a_tensor():
    group = build_group(Linear)
    responses = group.rollout_batch(BatchedData(["e-0", "e-1"], [ret("e-0"), ret("e-1")]))
    assert group.eval_list[0].log[-2:] == [("rollout_step", True, False)] * 2
    assert responses.ids() == ("e-0", "e-1")
    assert [response.env_id for response in responses.values()] == ["e-0", "e-1"]
    assert not responses["e-0"].action.requires_grad
    assert not torch.is_inference_mode_enabled()


def test_a_step_that_raises_leaves_the_policy_usable():
    class Fragile(Linear):
        def rollout_step(self, env_ret, **kwargs):
            if env_ret.observation[0] < 0:
                raise OSError("bad observation")
            return super().rollout_step(env_ret, **kwargs)

    group = build_group(Fragile)
    with pytest.raises(OSError, match="bad observation"):
        group.rollout_batch(BatchedData(["e-0"], [ret(observation=(-1, 0))]), deterministic=True)
    assert not torch.is_inference_mode_enabled()
    assert group.eval_list[0].deterministic is False
    group.sync_weights()
    assert len(group.rollout_batch(BatchedData(["e-0"], [ret()]))) == 1


def test_evaluation_is_visible_as_deterministic_and_ends():
    seen = []

    class Watching(Linear):
        def rollout_step(self, env_ret, **kwargs):
            seen.append(self.deterministic)
            return super().rollout_step(env_ret, **kwargs)

    group = build_group(Watching)
    batch = BatchedData(["e-0"], [ret()])
    group.rollout_batch(batch)
    group.rollout_batch(batch, deterministic=True)
    group.rollout_batch(batch)
    assert seen == [False, True, False]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda ret: None, "returned a NoneType; expected a PolicyResponse"),
        (lambda ret: np.zeros(1), "returned a ndarray; expected a PolicyResponse"),
        (lambda ret: PolicyResponse("x", action=1), "answered env_id 'x'; expected 'e-0'"),
    ],
)
def test_a_wrong_answer_says_what_was_found_and_expected(answer, message):
    class Wrong(Linear):
        def rollout_step(self, env_ret, **kwargs):
            return answer(env_ret)

    with pytest.raises(ContractError, match=rf"Wrong\.rollout_step {message}"):
        build(Wrong, "eval")._rollout(ret())


def test_postprocess_may_do_nothing_or_answer():
    group = build_group(Linear)
    batch = BatchedData(["e-0"], [ret()])
    responses = group.rollout_batch(batch)
    assert group.postprocess(batch, responses)["e-0"] is responses["e-0"]

    class Doubling(Linear):
        def postprocess(self, env_ret=None, policy_resp=None):
            return PolicyResponse(env_ret.env_id, action=policy_resp.action * 2)

    group = build_group(Doubling)
    responses = group.rollout_batch(batch)
    doubled = group.postprocess(batch, responses)["e-0"]
    assert torch.equal(doubled.action, responses["e-0"].action * 2)


# ---- learning ----------------------------------------------------------------------------------


def test_metrics_are_returned_and_logged_ones_averaged():
    class Logging(Linear):
        def train(self, *args, **kwargs):
            self.log_metric("kl", 1)
            self.log_metric("kl", torch.tensor(2.0))
            return None if kwargs.get("silent") else {"loss": 3.0}

    group = build_group(Logging)
    assert group.train() == {"kl": 1.5, "loss": 3.0}
    assert group.train(silent=True) == {"kl": 1.5}


def test_metrics_of_another_type_are_refused():
    class Wrong(Linear):
        def train(self, *args, **kwargs):
            return 3

    with pytest.raises(ContractError, match=r"Wrong\.train returned a int; expected a dict"):
        build(Wrong, "train")._train()


def test_each_learner_gets_one_batch():
    with pytest.raises(ContractError, match="2 batches for 1 train workers"):
        build_group(Linear).update_dataset([BATCH, BATCH])


def test_fingerprints_are_norms_by_name():
    policy = build(Mixed, "train")
    change_everything(policy)
    prints = policy.get_param_fingerprint()
    state = nn.Module.state_dict(policy)
    assert prints["mean"] == pytest.approx(float(state["mean"][0]) * 2**0.5)
    assert "norm.num_batches_tracked" not in prints


def test_inconsistent_weights_are_noticed_also_where_they_are_nan():
    group = build_group(Linear)
    group.sync_weights()
    assert group.verify_eval_weight_consistency()
    with torch.no_grad():
        group.eval_list[0].actor.weight.add_(1)
    assert not group.verify_eval_weight_consistency()
    with torch.no_grad():
        group.eval_list[0].actor.weight.fill_(float("nan"))
    assert not group.verify_eval_weight_consistency()


def test_the_state_of_more_learners_than_there_are_is_refused():
    group = build_group(Linear)
    state = group.export_state()
    state["training"] *= 2
    with pytest.raises(ContractError, match="of 2 train workers, and this run has 1"):
        group.import_state(state)
