"""Built-in policies: shapes, bounds, log-probabilities, and what they say to a wrong client."""

import copy
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch

from plugrl_server.cli_args import parse
from plugrl_server.errors import MissingExtraError, ObservationError, PolicyContractError
from plugrl_server.policy.base_policy import BasePolicy, BasePolicyConfig
from plugrl_server.policy.freezing import freeze_matching
from plugrl_server.policy.gaussian import GaussianPolicyConfig
from plugrl_server.policy.registration import (
    POLICIES,
    REGISTERED_POLICIES,
    REGISTERED_POLICY_CONFIGS,
    make_policy,
    register_builtin_policy,
    register_policy,
    register_policy_config,
)
from plugrl_server.policy.sac import SACPolicyConfig
from plugrl_server.policy.state import (
    ArraySpec,
    PolicyStepState,
    infer_train_state_spec,
    is_numpy_state_mapping,
    pick_fields,
    slice_batched_state,
    slice_policy_step_state,
    to_numpy_state,
)

BUILT_INS = ["dummy-policy", "gaussian-policy", "categorical-policy", "sac-policy"]


def observation(rows, width=17, name="obs"):
    states = {name: np.linspace(-1, 1, rows * width, dtype=np.float32).reshape(rows, width)}
    return {"images": {}, "states": states, "text": [""] * rows}


def built_in(uid):
    config = REGISTERED_POLICY_CONFIGS[uid]["default"]
    width = getattr(config, "obs_dim", getattr(config, "state_dim", 3))
    return make_policy(uid, config), width


@pytest.mark.parametrize("uid", BUILT_INS)
def test_a_built_in_answers_batch_first_with_a_horizon_and_a_state_like_its_fake(uid):
    policy, width = built_in(uid)
    action, state = policy.get_action_and_runtime_state(observation(3, width))
    assert action.shape[:2] == (3, policy.action_horizon)
    fake = policy.fake_runtime_state(3)
    if fake is None:
        assert state is None
        return
    assert infer_train_state_spec(to_numpy_state(state)) == infer_train_state_spec(
        to_numpy_state(fake)
    )


def test_importing_the_policies_and_their_configurations_loads_no_torch():
    code = (
        "import sys, plugrl_server.policy.registration as r; "
        f"assert sorted(r.REGISTERED_POLICY_CONFIGS) == {sorted(BUILT_INS)}; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_actions_of_the_gaussian_policy_are_clipped_when_sent_and_stored_as_drawn():
    torch.manual_seed(0)
    policy = make_policy("gaussian-policy", GaussianPolicyConfig(action_clip=0.1))
    action, state = policy.get_action_and_runtime_state(observation(50))
    assert np.abs(action).max() == np.float32(0.1)
    assert state.action.abs().max() > 0.5
    logprob, entropy, value = policy.evaluate_actions(state.obs, state.action)
    torch.testing.assert_close(logprob.detach(), state.logprob)
    torch.testing.assert_close(value.detach(), state.value)
    torch.testing.assert_close(policy.get_value(observation(50)), state.value)
    assert entropy.shape == (50,)


@pytest.mark.parametrize("uid", ["gaussian-policy", "categorical-policy"])
def test_a_state_keeps_arrays_for_who_stores_and_gives_tensors_to_who_asks(uid):
    policy, width = built_in(uid)
    _, state = policy.get_action_and_runtime_state(observation(3, width))
    names = ["obs", "action", "logprob", "value"]
    stored = pick_fields(state, names, needed_by="it")
    assert list(state.arrays) == names  # nothing has been converted
    changed = copy.copy(state)
    changed.value = torch.zeros(3)
    assert torch.equal(state.action, torch.from_numpy(stored["action"]))
    assert all(isinstance(getattr(state, name), torch.Tensor) for name in names)
    assert not state.arrays
    again = pick_fields(state, names, needed_by="it")
    assert all(np.array_equal(stored[name], again[name]) for name in names)
    assert pick_fields(changed, names, needed_by="it")["value"].tolist() == [0.0] * 3
    assert slice_batched_state(state, 1).logprob.tolist() == stored["logprob"][1:2].tolist()
    with pytest.raises(AttributeError, match="RuntimeState has no attribute 'entropy'"):
        _ = state.entropy


def test_a_deterministic_policy_repeats_itself():
    policy = make_policy("gaussian-policy", GaussianPolicyConfig(deterministic=True))
    one, _ = policy.get_action_and_runtime_state(observation(4))
    two, _ = policy.get_action_and_runtime_state(observation(4))
    assert np.array_equal(one, two)


@pytest.mark.parametrize(
    ("uid", "states", "flags"),
    [
        ("gaussian-policy", {"obs": 3}, "--policy.obs-dim 3"),
        ("gaussian-policy", {"joints": 17}, "--policy.state-keys joints"),
        ("sac-policy", {"é": 1, "a b": 4}, "--policy.state-keys 'a b' 'é' --policy.state-dim 5"),
        ("sac-policy", {"joints": 3}, "--policy.state-keys joints --policy.state-dim 3"),
    ],
)
def test_another_width_or_name_is_refused_with_the_flags_that_would_read_it(uid, states, flags):
    policy, width = built_in(uid)
    seen = observation(2, 1)
    seen["states"] = {name: np.zeros((2, width)) for name, width in states.items()}
    with pytest.raises(ObservationError) as error:
        policy.get_action_and_runtime_state(seen)
    found = ",".join(f"{name}:{width}" for name, width in sorted(states.items()))
    assert error.value.reason == f"states {found}, policy has obs:{width}"
    assert error.value.hint == f"serve it with {flags}"

    given = shlex.split(flags)
    parsed = parse([uid, "default", "eval", "default", *given]).args.policy
    assert len(make_policy(uid, parsed).prepare_observation(seen)) == 2


def test_a_client_without_states_is_told_that_they_are_needed():
    policy, _ = built_in("gaussian-policy")
    seen = {"images": {}, "states": {}, "text": [""]}
    with pytest.raises(ObservationError, match=r"states none, .*; it acts on state vectors"):
        policy.get_action_and_runtime_state(seen)


def test_several_states_are_joined_in_the_order_of_their_keys():
    config = GaussianPolicyConfig(obs_dim=3, state_keys=("b", "a"))
    policy = make_policy("gaussian-policy", config)
    states = {"a": np.array([[1.0]]), "b": np.array([[2.0, 3.0]])}
    seen = {"images": {}, "states": states, "text": [""]}
    assert policy.prepare_observation(seen).tolist() == [[2.0, 3.0, 1.0]]


@pytest.mark.parametrize("share", [1 / 512, 0.4])
def test_a_client_gone_wrong_does_not_reach_the_statistics_of_all(share):
    spoiled, clean = (
        make_policy("gaussian-policy", GaussianPolicyConfig(obs_dim=3)) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):  # the first batch as well as later ones
        rows = torch.randn(512, 3, generator=generator)
        wrong = torch.rand(512, generator=generator) < share
        wrong[0] = True
        clean.update_obs_stats(rows[~wrong])
        rows[wrong, 1] = 1e14
        spoiled.update_obs_stats(rows)
    assert torch.equal(spoiled.obs_stats.mean, clean.obs_stats.mean)
    assert torch.equal(spoiled.obs_stats.var, clean.obs_stats.var)


def test_statistics_learn_from_every_scale_and_from_sensors_that_begin_to_speak():
    policy = make_policy("gaussian-policy", GaussianPolicyConfig(obs_dim=3))
    rows = torch.randn(512, 3) * torch.tensor([1e9, 1.0, 0.0])
    policy.update_obs_stats(rows)
    rows[:20, 2] = 5000.0
    rows[:5, 0] *= 100
    policy.update_obs_stats(rows)
    assert policy.obs_stats.count == 1024


def test_observation_statistics_are_learned_and_frozen_on_request():
    for frozen, count in ((False, 4.0), (True, 0.0)):
        config = GaussianPolicyConfig(obs_dim=2, freeze_obs_stats=frozen)
        policy = make_policy("gaussian-policy", config)
        policy.update_obs_stats(torch.ones(4, 2))
        assert policy.obs_stats.count == count


def test_the_density_of_a_squashed_action_accounts_for_its_bounds():
    """One dimension: the density at a place is the share of draws that fall around it."""
    torch.manual_seed(0)
    config = SACPolicyConfig(state_dim=1, action_dim=1, action_low=-3.0, action_high=1.0)
    policy = make_policy("sac-policy", config)
    with torch.no_grad():
        action, log_prob = policy.sample_with_log_prob(torch.zeros(200_000, 1))
    assert action.min() >= -3.0
    assert action.max() <= 1.0
    near = (action.squeeze(1) + 1.2).abs() < 0.02
    share = float(near.float().mean()) / 0.04
    assert share == pytest.approx(float(log_prob[near].exp().mean()), rel=0.05)


def test_the_temperature_is_saved_and_slow_critics_follow():
    policy, _ = built_in("sac-policy")
    assert "log_alpha" in policy.state_dict()
    with torch.no_grad():
        for parameter in policy.critic.parameters():
            parameter.add_(1.0)
    before = [p.clone() for p in policy.target_critic.parameters()]
    policy.update_targets(0.25)
    for old, new in zip(before, policy.target_critic.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.25)
    assert policy.q_values(torch.zeros(5, 11), torch.zeros(5, 3)).shape == (2, 5)
    with pytest.raises(PolicyContractError, match="lower bound"):
        make_policy("sac-policy", SACPolicyConfig(action_low=1.0, action_high=-1.0))


# --- registration ---------------------------------------------------------------------------------


def test_a_taken_uid_is_refused_and_override_takes_it():
    class One(BasePolicy):
        def get_action_and_runtime_state(self, _obs):
            return np.zeros((1, 1, 1)), None

        def fake_runtime_state(self, batch_size):
            return None

    class Two(One):
        pass

    register_policy("taken")(One)
    register_policy("taken")(One)
    with pytest.raises(KeyError, match="Policy taken is already registered"):
        register_policy("taken")(Two)
    register_policy("taken", override=True)(Two)
    assert REGISTERED_POLICIES["taken"].cls is Two
    with pytest.raises(KeyError, match="Policy absent is not registered"):
        make_policy("absent", None)
    with pytest.raises(TypeError, match="no subclass of BasePolicy"):
        register_policy("other")(int)
    with pytest.raises(NotImplementedError, match="prepare_observation"):
        One(None).prepare_observation({})
    with pytest.raises(NotImplementedError, match="get_value"):
        One(None).get_value({})
    assert "taken" not in POLICIES.uids()
    register_policy_config("taken")(BasePolicyConfig)
    assert "taken" in POLICIES.uids()
    with pytest.raises(KeyError, match="taken default is already registered"):
        register_policy_config("taken")(BasePolicyConfig)


def test_a_missing_dependency_is_named_with_its_extra():
    register_builtin_policy("needs", "module_that_is_not_there:Policy", extra="robots")
    with pytest.raises(MissingExtraError, match=r"module_that_is_not_there.*plugrl-server\[robots"):
        make_policy("needs", None)


# --- state and freezing ---------------------------------------------------------------------------


def test_states_are_cut_converted_and_described():
    state = {"a": torch.ones(3, 2, dtype=torch.bfloat16), "b": {"c": np.zeros((3, 4), np.int64)}}
    plain = to_numpy_state(state)
    assert plain["a"].dtype == np.float32
    assert infer_train_state_spec(plain) == {
        "a": ArraySpec((2,), "<f4"),
        "b": {"c": ArraySpec((4,), "<i8")},
    }
    assert infer_train_state_spec(None) == {}
    assert is_numpy_state_mapping(plain)
    assert not is_numpy_state_mapping({"a": 1})
    cut = slice_policy_step_state(PolicyStepState(runtime_state=state, train_state=None), 2)
    assert cut.runtime_state["b"]["c"].shape == (1, 4)
    assert cut.train_state is None
    with pytest.raises(TypeError, match="None"):
        to_numpy_state({"a": None})
    with pytest.raises(TypeError, match="object"):
        to_numpy_state({"a": object()})


def test_parameters_are_frozen_by_pattern_or_not_at_all():
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="absent"):
        freeze_matching(module, ["0", "absent"])
    assert all(p.requires_grad for p in module.parameters())
    assert freeze_matching(module, [r"^0\."]) == ["0.weight", "0.bias"]
    assert [p.requires_grad for p in module.parameters()] == [False, False, True, True]


def test_the_short_way_through_the_networks_computes_what_the_modules_compute():
    torch.manual_seed(0)
    policy = make_policy("gaussian-policy", GaussianPolicyConfig(obs_dim=3, deterministic=True))
    obs = torch.randn(5, 3) * 20
    for _ in range(2):
        _, state = policy.get_action_and_runtime_state(
            {"images": {}, "states": {"obs": obs.numpy()}, "text": [""] * 5}
        )
        distribution, value = policy.actor_critic(policy.obs_stats.normalize(obs))
        torch.testing.assert_close(state.value, value.detach())
        torch.testing.assert_close(state.action, distribution.mode().detach())
        policy.update_obs_stats(torch.randn(64, 3) + 1.0)


def test_a_copy_made_after_acting_follows_its_own_weights():
    """The short way keeps weights in one vector; a copy must not go on with that of the first."""
    policy = make_policy("gaussian-policy", GaussianPolicyConfig(obs_dim=3, deterministic=True))
    seen = {"images": {}, "states": {"obs": np.ones((2, 3), np.float32)}, "text": [""] * 2}
    before = policy.get_action_and_runtime_state(seen)[1].value
    other = copy.deepcopy(policy)
    with torch.no_grad():
        other.actor_critic.value_head.bias.add_(1.0)
    torch.testing.assert_close(other.get_action_and_runtime_state(seen)[1].value, before + 1.0)
    torch.testing.assert_close(policy.get_action_and_runtime_state(seen)[1].value, before)
