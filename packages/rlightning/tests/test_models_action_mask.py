"""Masked actions: never chosen, never learned from, and what stands in their place is no matter."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from rlightning.config import PolicyConfig, TrainConfig
from rlightning.config.base import resolve_extras
from rlightning.errors import ConfigError
from rlightning.models.action_mask import has_action_mask
from rlightning.models.actor_critic import ActorCritic
from rlightning.models.heads import make_action_head
from rlightning.models.recurrent import RecurrentActorCritic
from rlightning.ops.distributions import squashed_gaussian_log_prob
from rlightning.ops.q_learning import epsilon_greedy
from rlightning.policy.off_policy import Transitions
from rlightning.policy.policy_group import PolicyGroup
from rlightning.types import EnvMeta, EnvRet
from rlightning.utils.registry import POLICIES

BOX, FEW = spaces.Box(-1.0, 3.0, (3,), np.float32), spaces.Discrete(3)
VECTOR = spaces.Box(-np.inf, np.inf, (2,), np.float32)
SEEN = spaces.Dict(observation=VECTOR, action_mask=spaces.MultiBinary(3))
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1]], dtype=torch.int8)


def observations(rows=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = MASK.repeat(-(-rows // 4), 1)[:rows]
    return {"observation": torch.randn(rows, 2, generator=generator), "action_mask": mask}


def distribution_of(space, rows=4, **options):
    torch.manual_seed(0)
    head = make_action_head(space, 5, **options)
    return head, head(torch.randn(rows, 5))


# ---- where there is a mask ---------------------------------------------------------------------


def test_a_mask_is_one_bit_per_action_under_its_name():
    assert has_action_mask(SEEN, FEW)
    assert has_action_mask(SEEN, BOX)
    assert not has_action_mask(SEEN, spaces.Discrete(4))
    assert not has_action_mask(SEEN, spaces.MultiBinary(3))
    assert not has_action_mask(spaces.Dict(mask=spaces.MultiBinary(3)), FEW)
    assert not has_action_mask(VECTOR, FEW)


# ---- distributions -----------------------------------------------------------------------------


def test_probabilities_are_shared_among_the_actions_there_are():
    """Logits 0, log 2, log 5: with the last one left out, a third and two thirds."""
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]], requires_grad=True)
    head = make_action_head(FEW, 5)
    masked = head.distribution(logits).masked(torch.tensor([[1, 1, 0]]))
    assert masked.log_prob(torch.tensor([1])).exp().item() == pytest.approx(2 / 3)
    assert masked.log_prob(torch.tensor([2])).item() == -math.inf
    entropy = -(1 / 3) * math.log(1 / 3) - (2 / 3) * math.log(2 / 3)
    assert masked.entropy().item() == pytest.approx(entropy)
    (masked.log_prob(torch.tensor([1])) + masked.entropy()).sum().backward()
    assert logits.grad[0, 2] == 0
    assert logits.grad.isfinite().all()


def test_an_action_that_is_not_there_is_never_drawn_nor_the_likeliest():
    _, distribution = distribution_of(FEW, rows=4000)
    mask = MASK.repeat(1000, 1)
    masked = distribution.masked(mask)
    for action in (masked.sample(), masked.sample_with_log_prob()[0], masked.mode()):
        assert mask.gather(1, action.unsqueeze(1)).all()


def test_a_row_s_density_is_that_of_its_own_dimensions():
    """By hand, with torch's normal distribution over the dimensions that the mask keeps."""
    head, distribution = distribution_of(BOX, log_std_init=-0.5)
    action = torch.randn(4, 3)
    masked = distribution.masked(MASK)
    std = math.exp(-0.5)
    for row in range(4):
        own = MASK[row].bool()
        normal = torch.distributions.Normal(distribution.mean[row][own], std)
        expected = normal.log_prob(action[row][own]).sum()
        assert masked.log_prob(action)[row].item() == pytest.approx(expected.item(), rel=1e-5)
        assert masked.entropy()[row].item() == pytest.approx(normal.entropy().sum().item())
    head.log_std.grad = None
    masked.log_prob(action)[2].backward()
    assert head.log_std.grad.nonzero().flatten().tolist() == [1]


def test_dimensions_that_are_not_there_are_zero_whatever_is_drawn():
    _, distribution = distribution_of(BOX, rows=4)
    masked = distribution.masked(MASK)
    for action in (masked.sample(), masked.sample_with_log_prob()[0], masked.mode()):
        assert (action[MASK == 0] == 0).all()
        assert (action[MASK == 1] != 0).all()
    whole = distribution.sample(torch.Generator().manual_seed(3))
    drawn = masked.sample(torch.Generator().manual_seed(3))
    assert torch.equal(drawn, whole * MASK), "the same noise, so that nothing else changes"


def test_a_mask_of_ones_changes_nothing():
    for space in (FEW, BOX):
        _, distribution = distribution_of(space)
        masked = distribution.masked(torch.ones(4, 3))
        action = distribution.sample()
        assert torch.allclose(masked.log_prob(action), distribution.log_prob(action))
        assert torch.allclose(masked.entropy(), distribution.entropy())


# ---- networks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [FEW, BOX], ids=["discrete", "box"])
def test_the_mask_is_obeyed_and_is_no_feature(space):
    torch.manual_seed(0)
    network = ActorCritic(SEEN, space)
    plain = ActorCritic(VECTOR, space)
    plain.load_state_dict(network.state_dict())
    seen = observations()
    distribution, value = network(seen)
    acting, value_acting = network.act(seen)
    expected, expected_value = plain(seen["observation"])
    action = distribution.sample()
    assert torch.equal(value, expected_value)
    assert torch.allclose(value_acting, value, atol=1e-6)
    assert torch.allclose(distribution.log_prob(action), expected.masked(MASK).log_prob(action))
    assert torch.allclose(acting.log_prob(action), distribution.log_prob(action), atol=1e-5)
    assert network.plain_layers() is None, "the hand-written step knows nothing of masks"


def test_a_network_with_a_memory_obeys_too():
    network = RecurrentActorCritic(SEEN, FEW)
    step = network.step(observations(), torch.zeros(4, network.memory_size))
    assert (step.distribution.log_p[MASK == 0] == -math.inf).all()


# ---- policies ----------------------------------------------------------------------------------


def group_of(kind, space, **train):
    policy_class = POLICIES.get(kind)
    config = PolicyConfig.from_dict({"type": kind, "model_cfg": {"hidden_sizes": [8]}})
    given = {"max_epochs": 10, "max_rollout_steps": 8, "batch_size": 8, "seed": 0} | train
    config.train_config = TrainConfig.from_dict(given)
    resolve_extras(config.train_config, [policy_class.TrainExtras], path="train", owner=kind)
    torch.manual_seed(0)
    group = PolicyGroup([policy_class(config, "train")], [policy_class(config, "eval")], config)
    group.init(config.train_config, EnvMeta("e-0", space, SEEN, 4, masked_actions=True))
    group.sync_weights()
    return group


def rollout(policy, seed=0):
    no = torch.zeros(4, dtype=torch.bool)
    return policy.rollout_step(EnvRet("e-0", observations(seed=seed), torch.zeros(4), no, no))


def tensors_of(policy):
    return {name: tensor.clone() for name, tensor in nn.Module.state_dict(policy).items()}


def dataset(policy, space, noise):
    """Two observations' worth of rows; `noise` stands where there is no action."""
    parts = [rollout(policy, seed) for seed in (1, 2)]
    generator = torch.Generator().manual_seed(5)
    rows = observations(8, seed=1)
    rows["observation"] = torch.cat([observations(seed=s)["observation"] for s in (1, 2)])
    action = torch.cat([part.action for part in parts])
    if space is BOX:
        action = torch.where(rows["action_mask"] == 0, action + noise, action)
    columns = {
        "observation": rows,
        "next_observation": observations(8, seed=9),
        "action": action,
        "reward": torch.randn(8, generator=generator),
        "terminated": torch.zeros(8, dtype=torch.bool),
        "advantage": torch.randn(8, generator=generator),
        "return": torch.randn(8, generator=generator),
    }
    if "value" in parts[0].extras:
        for name in ("log_prob", "value"):
            columns[name] = torch.cat([getattr(part, name) for part in parts])
    return TensorDict(columns, batch_size=[8])


@pytest.mark.parametrize("kind", ["PPOPolicy", "A2CPolicy", "SACPolicy", "TD3Policy"])
def test_an_update_does_not_see_what_stands_in_place_of_missing_actions(kind):
    learned = []
    for noise in (0.0, 123.0):
        policy = group_of(kind, BOX).train_list[0]
        torch.manual_seed(1)
        before = tensors_of(policy)
        with torch.no_grad():
            data = dataset(policy, BOX, noise)
        torch.manual_seed(2)
        policy.update_dataset(data)
        policy.train()
        learned.append(tensors_of(policy))
    assert any(not torch.equal(learned[0][name], before[name]) for name in before)
    for name, tensor in learned[0].items():
        assert torch.equal(tensor, learned[1][name]), name


def test_a_spread_that_no_row_has_stays_as_it_is_even_with_an_entropy_bonus(monkeypatch):
    monkeypatch.setattr(f"{__name__}.MASK", torch.tensor([[1, 1, 0]] * 4, dtype=torch.int8))
    policy = group_of("PPOPolicy", BOX, entropy_coef=0.1).train_list[0]
    with torch.no_grad():
        data = dataset(policy, BOX, 0.0)
    policy.update_dataset(data)
    policy.train()
    log_std = policy.actor_critic.action_head.log_std
    assert log_std[2] == 0.0
    assert (log_std[:2] != 0.0).all()


def test_before_the_first_gradient_step_ratios_are_one():
    policy = group_of("PPOPolicy", BOX).train_list[0]
    with torch.no_grad():
        data = dataset(policy, BOX, noise=7.0)
        distribution, _ = policy.actor_critic(data["observation"])
    assert torch.allclose(distribution.log_prob(data["action"]), data["log_prob"], atol=1e-5)


@pytest.mark.parametrize("kind", ["PPOPolicy", "DQNPolicy"])
@pytest.mark.parametrize("learned", [False, True], ids=["new", "learned"])
def test_discrete_policies_never_choose_what_is_not_there(kind, learned):
    group = group_of(kind, FEW)
    policy = group.eval_list[0]
    if learned and kind == "DQNPolicy":
        policy.n_updates.fill_(100)
        policy.hyper = policy.hyper.model_copy(update={"epsilon_end": 0.5})
    for deterministic in (False, True):
        policy.deterministic = deterministic
        for seed in range(20):
            action = rollout(policy, seed).action
            assert MASK.gather(1, action.unsqueeze(1)).all()


def test_exploration_draws_all_actions_there_are_equally_often():
    values = torch.zeros(8000, 3).masked_fill(MASK.repeat(2000, 1) == 0, -torch.inf)
    drawn = epsilon_greedy(values, 1.0, generator=torch.Generator().manual_seed(0)).reshape(-1, 4)
    for row in range(4):
        counts = torch.bincount(drawn[:, row], minlength=3)
        expected = MASK[row].float() * 2000 / MASK[row].sum()
        assert (counts - expected).abs().max() < 120
        assert (counts[MASK[row] == 0] == 0).all()


def test_targets_are_of_the_best_action_there_is():
    """Slow values 1, 2, 9 with the last left out: 2, and not 9; double learning alike."""
    for double in (False, True):
        policy = group_of("DQNPolicy", FEW, double=double).train_list[0]
        for network in (policy.q_network, policy.target_network):
            last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
            with torch.no_grad():
                last.weight.zero_()
                last.bias.copy_(torch.tensor([1.0, 2.0, 9.0]))
        zero, one = torch.zeros(4), torch.ones(4)
        rows = Transitions(observations(), zero, zero, one, observations(), None)
        assert policy._target(rows).tolist() == [2.0, 9.0, 2.0, 9.0]


def test_soft_values_and_temperature_count_a_row_s_own_dimensions_only():
    policy = group_of("SACPolicy", BOX).train_list[0]
    seen = observations()
    torch.manual_seed(4)
    action, log_prob = policy._sample(seen)
    assert (action[MASK == 0] == 0).all()
    mean, log_std = policy.actor(seen)
    torch.manual_seed(4)
    pre_tanh = mean + torch.empty_like(mean).normal_() * log_std.exp()
    for row in range(4):
        own = MASK[row].bool()
        part = [x[row : row + 1, own] for x in (pre_tanh, mean, log_std)]
        expected = squashed_gaussian_log_prob(*part).item()
        assert log_prob[row].item() == pytest.approx(expected, rel=1e-4)
    # Two, three, one and two dimensions: an entropy of -2 is on target, and alpha stays.
    policy._sample = lambda _: (action, torch.full((4,), 2.0, requires_grad=True))
    before = policy.log_alpha.item()
    policy._judgement = lambda values: values + 0 * policy.actor(seen)[0].sum()
    policy._update_actor(seen)
    assert policy.log_alpha.item() == pytest.approx(before, abs=1e-7)


def test_a_policy_that_does_not_read_masks_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"SimpleSupervisedPolicy does not read which.*PPOPolicy"):
        group_of("SimpleSupervisedPolicy", FEW)
