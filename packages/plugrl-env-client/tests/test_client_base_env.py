"""The observation of a batch of rows, and what every environment brings along."""

import numpy as np
import pytest
from gymnasium import spaces

from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.errors import EnvContractError
from plugrl_protocol.messages import parse_infer


def images(n):
    return {"cam": np.arange(n * 12, dtype=np.uint8).reshape(n, 2, 2, 3)}


def test_a_single_text_is_given_to_every_row():
    obs = Observation(images(3), {"pose": np.zeros((3, 2))}, "pick up the cup")
    assert obs.text.dtype.kind == "U"
    assert obs.text.tolist() == ["pick up the cup"] * 3
    assert len(obs) == 3


def test_texts_may_differ_per_row_and_may_be_missing():
    assert Observation(text=["a", "bc"]).text.tolist() == ["a", "bc"]
    assert Observation(states={"x": np.zeros((2, 1))}).text.tolist() == ["", ""]


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"images": images(2), "states": {"pose": np.zeros((3, 2))}}, r"states\['pose'\]\": 3"),
        ({"states": {"pose": np.zeros((3, 2))}, "text": ["a"]}, "'text': 1"),
        ({"text": "nobody says how many"}, "leading axis"),
        ({"states": {"pose": 1.0}}, "None"),
    ],
)
def test_rows_that_do_not_agree_are_refused_by_name(parts, named):
    with pytest.raises(ValueError, match=named):
        Observation(**parts)


def test_taken_rows_are_copies():
    state = np.arange(6.0).reshape(3, 2)
    taken = Observation(states={"x": state}, text=["a", "b", "c"]).rows(np.array([2, 0]))
    state[:] = -1
    assert taken.states["x"].tolist() == [[4, 5], [0, 1]]
    assert taken.text.tolist() == ["c", "a"]


def test_replaced_rows_keep_the_others_and_the_longer_text():
    obs = Observation(images(3), {"x": np.zeros((3, 1))}, ["a", "b", "c"])
    other = Observation(images(1), {"x": np.ones((1, 1))}, ["a long instruction"])
    merged = obs.with_rows(np.array([1]), other)
    assert merged.states["x"].ravel().tolist() == [0, 1, 0]
    assert merged.text.tolist() == ["a", "a long instruction", "c"]
    assert np.array_equal(merged.images["cam"][1], images(1)["cam"][0])
    assert np.array_equal(merged.images["cam"][2], images(3)["cam"][2])
    assert obs.states["x"].ravel().tolist() == [0, 0, 0]


def test_rows_with_other_names_cannot_replace():
    with pytest.raises(EnvContractError, match="names must be the same"):
        Observation(states={"x": np.zeros((2, 1))}).with_rows(
            np.array([0]), Observation(states={"y": np.zeros((1, 1))})
        )


def test_the_wire_takes_it_as_it_is():
    obs = Observation(images(2), {"x": np.zeros((2, 4), np.float32)}, "go")
    rows = np.arange(2)
    message = {"message_type": "infer", "env_indices": rows, "step_ids": rows}
    parsed = parse_infer({**message, "data": obs.to_wire().to_wire()})
    assert parsed.observation.text.tolist() == ["go", "go"]


class Plain(BaseEnv[BaseEnvConfig]):
    """As little as a subclass can be."""

    def __init__(self, config, num_envs=1):
        super().__init__(config, num_envs)
        self.single_action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.seed_rngs(seed)
        return Observation(states={"x": np.array([[rng.random()] for rng in self.rngs])}), {}

    def step(self, actions):
        raise NotImplementedError


def test_row_generators_are_seeded_by_consecutive_seeds():
    both = Plain(BaseEnvConfig(), 2).reset(seed=7)[0].states["x"]
    second = Plain(BaseEnvConfig(), 1).reset(seed=8)[0].states["x"]
    assert both[1] == second[0]
    assert both[0] != both[1]


def test_row_generators_go_on_without_a_seed():
    env = Plain(BaseEnvConfig(), 1)
    draws = [env.reset(seed=seed)[0].states["x"].item() for seed in (3, None, None, None)]
    values = set(draws)
    assert len(values) == 4


def test_fakes_have_the_right_shapes():
    env = Plain(BaseEnvConfig(), 3)
    assert env.fake_action().shape == (3, 2)
    assert len(env.fake_obs()) == 3


def test_it_cannot_be_made_without_its_two_methods():
    with pytest.raises(TypeError, match="abstract"):
        BaseEnv(BaseEnvConfig())
