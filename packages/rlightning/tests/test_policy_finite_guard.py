"""NaN and infinity stop learning before a parameter changes, and leave evidence."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rlightning.config import MainConfig
from rlightning.errors import NonFiniteError
from rlightning.policy import BasePolicy
from rlightning.types import EnvMeta


class Learner(BasePolicy):
    dtype = torch.float32

    def construct_network(self, env_meta, *args, **kwargs):
        torch.manual_seed(0)
        self.actor = nn.Linear(2, 1, dtype=self.dtype)
        self.log_std = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def setup_optimizer(self, optim_cfg):
        self.optimizers = {"all": torch.optim.Adam(self.parameters(), lr=0.1)}

    def rollout_step(self, env_ret, **kwargs): ...
    def postprocess(self, env_ret=None, policy_resp=None): ...

    def update_dataset(self, data):
        self.dataset = data

    def loss(self):
        return (self.actor(self.dataset["observation"]) * self.dataset["weight"]).mean()

    def train(self, *args, **kwargs):
        self.optimizers["all"].zero_grad()
        loss = self.loss() + self.log_std.sum()
        loss.backward()
        self.optimizers["all"].step()


def make(kind=Learner, dump_dir=None, **train):
    config = MainConfig.from_dict(
        {
            "env": {"name": "a", "backend": "b", "task": "t"},
            "buffer": {"type": "R", "capacity": 1},
            "policy": {"type": "P"},
            "train": {"max_epochs": 1, **train},
        }
    )
    policy = kind(config.policy, "train")
    policy.init_train(config.train, EnvMeta())
    if policy._guard:
        policy._guard.dump_dir = dump_dir
    return policy


def batch(**changes):
    data = {"observation": torch.ones(4, 2), "weight": torch.ones(4, 1), "id": torch.arange(4)}
    return TensorDict(data | changes, batch_size=[4])


def snapshot(policy):
    return {name: tensor.clone() for name, tensor in nn.Module.state_dict(policy).items()}


def assert_unchanged(policy, before):
    after = nn.Module.state_dict(policy)
    assert all(torch.equal(after[name], before[name]) for name in before)


def poisoned(value=float("nan")):
    observation = torch.ones(4, 2)
    observation[2, 1] = value
    return observation


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_batch_that_is_not_finite_is_named_before_anything_is_learned(value, tmp_path):
    policy = make(dump_dir=tmp_path / "nonfinite")
    before = snapshot(policy)
    with pytest.raises(NonFiniteError) as caught:
        policy._update_dataset(batch(observation=poisoned(value)))
    text = str(caught.value)
    assert "observation in the batch of Learner is not finite at step 1" in text
    assert "(1 of 8 numbers, first at index 2)" in text
    assert_unchanged(policy, before)


def test_the_dump_holds_tensor_and_batch_as_plain_data(tmp_path):
    policy = make(dump_dir=tmp_path / "nonfinite")
    data = batch(observation=poisoned())
    with pytest.raises(NonFiniteError) as caught:
        policy._update_dataset(data)
    assert caught.value.dump == str(tmp_path / "nonfinite" / "update_1.pt")
    content = torch.load(caught.value.dump, weights_only=True)
    assert content["name"] == "observation in the batch"
    assert content["tensor"].isnan().sum() == 1
    assert content["batch"].keys() == {"observation", "weight", "id"}
    assert content["batch"]["id"].tolist() == [0, 1, 2, 3]


def test_nested_observations_are_checked_and_dumped(tmp_path):
    policy = make(dump_dir=tmp_path)
    nested = TensorDict({"image": torch.ones(4), "deep": {"x": poisoned()}}, batch_size=[4])
    with pytest.raises(NonFiniteError, match=r"observation\.deep\.x in the batch") as caught:
        policy._update_dataset(batch(observation=nested))
    content = torch.load(caught.value.dump, weights_only=True)
    assert content["batch"]["observation"]["deep"]["x"].shape == (4, 2)


def test_a_plain_dictionary_is_checked_too():
    with pytest.raises(NonFiniteError, match="weight in the batch"):
        make()._update_dataset({"weight": torch.tensor([float("nan")])})


def test_a_loss_that_is_not_finite_is_named():
    class Checking(Learner):
        def train(self, *args, **kwargs):
            self.check_finite("loss", self.loss() * float("nan"))

    policy = make(Checking)
    before = snapshot(policy)
    policy._update_dataset(batch())
    with pytest.raises(NonFiniteError, match=r"loss of Checking is not finite at step 1 \(1 of 1"):
        policy._train()
    assert_unchanged(policy, before)


def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_stepped(tmp_path):
    class Exploding(Learner):
        def loss(self):
            return super().loss() * float("inf")

    policy = make(Exploding, dump_dir=tmp_path)
    policy._update_dataset(batch())
    before = snapshot(policy)
    with pytest.raises(NonFiniteError, match=r"gradient of actor\.weight of Exploding") as caught:
        policy._train()
    assert_unchanged(policy, before)
    assert policy.optimizers["all"].state_dict()["state"] == {}
    assert torch.load(caught.value.dump, weights_only=True)["batch"].keys() >= {"weight"}


def test_a_parameter_that_is_not_finite_is_named():
    class Breaking(Learner):
        def train(self, *args, **kwargs):
            with torch.no_grad():
                self.actor.bias.fill_(float("nan"))

    policy = make(Breaking)
    policy._update_dataset(batch())
    with pytest.raises(NonFiniteError, match=r"parameter actor\.bias of Breaking"):
        policy._train()


def test_updates_are_counted():
    policy = make()
    for _ in range(3):
        policy._update_dataset(batch())
        policy._train()
    with pytest.raises(NonFiniteError) as caught:
        policy._update_dataset(batch(weight=torch.full((4, 1), float("nan"))))
    assert caught.value.step == 4


def test_finite_learning_passes_also_where_squares_overflow():
    policy = make()
    policy._update_dataset(batch(observation=torch.full((4, 2), 3e37)))
    policy._train()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_several_kinds_are_checked_together(dtype):
    class Other(Learner):
        def loss(self):
            return self.actor(self.dataset["observation"].to(dtype)).sum().float()

    Other.dtype = dtype
    policy = make(Other)
    policy._update_dataset(batch())
    policy._train()


def test_sparse_gradients_are_checked():
    class Sparse(Learner):
        def construct_network(self, env_meta, *args, **kwargs):
            self.table = nn.Embedding(5, 2, sparse=True)

        def setup_optimizer(self, optim_cfg):
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

        def train(self, *args, **kwargs):
            self.optimizer.zero_grad()
            (self.table(self.dataset["id"]) * self.dataset["weight"]).sum().backward()
            self.optimizer.step()

    policy = make(Sparse)
    policy._update_dataset(batch())
    policy._train()
    policy._update_dataset(batch())
    policy.dataset["weight"] = torch.full((4, 1), float("nan"))
    with pytest.raises(NonFiniteError, match=r"gradient of table\.weight"):
        policy._train()


def test_the_check_can_be_turned_off():
    policy = make(check_finite=False)
    policy._update_dataset(batch(observation=poisoned()))
    policy.check_finite("loss", torch.tensor(float("nan")))
    policy._train()
    assert policy.actor.weight.isnan().any()
