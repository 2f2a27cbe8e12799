"""Gymnasium observations become images and float32 vectors, without losing a number."""

import logging

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces.utils import flatten
from gymnasium.vector.utils import concatenate, create_empty_array

from plugrl_env_client.envs.gym_observation import ObservationMapper


def batch_of(space, n=4):
    samples = [space.sample() for _ in range(n)]
    return samples, concatenate(space, samples, create_empty_array(space, n))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-5, 5, (3,), np.float64, seed=0),
        spaces.Box(-5, 5, (2, 3), np.float32, seed=0),
        spaces.Box(0, 255, (6,), np.uint8, seed=0),
        spaces.Box(-3, 3, (), np.float32, seed=0),
        spaces.Discrete(5, seed=0),
        spaces.Discrete(5, start=-2, seed=0),
        spaces.MultiDiscrete([2, 3, 4], seed=0),
        spaces.MultiDiscrete([[2, 3], [4, 2]], seed=0),
        spaces.MultiBinary(7, seed=0),
    ],
    ids=str,
)
def test_vectors_are_those_of_gymnasiums_flatten(space):
    samples, batch = batch_of(space)
    obs = ObservationMapper(space)(batch)
    assert not obs.images
    vector = obs.states["obs"]
    assert vector.dtype == np.float32
    expected = np.stack([np.ravel(flatten(space, sample)) for sample in samples])
    assert np.array_equal(vector, expected.astype(np.float32))


def test_parts_are_named_by_their_keys_and_positions():
    space = spaces.Dict(
        {
            "cam": spaces.Box(0, 255, (4, 5, 3), np.uint8),
            "arm": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)]),
        },
        seed=0,
    )
    samples, batch = batch_of(space)
    obs = ObservationMapper(space)(batch)
    assert list(obs.images) == ["cam"]
    assert sorted(obs.states) == ["arm.0", "arm.1"]
    assert np.array_equal(obs.images["cam"][2], samples[2]["cam"])
    assert obs.states["arm.1"].argmax(1).tolist() == [s["arm"][1] for s in samples]


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((6, 7, 3), "auto", (6, 7, 3)),
        ((3, 6, 7), "auto", (6, 7, 3)),
        ((1, 6, 7), "auto", (6, 7, 1)),
        ((3, 3, 3), "auto", (3, 3, 3)),
        ((6, 7, 2), "auto", (6, 7, 2)),
        ((6, 7), "auto", (6, 7, 1)),
        ((4, 84, 84), "chw", (84, 84, 4)),
        ((3, 6, 4), "hwc", (3, 6, 4)),
    ],
)
def test_images_end_with_their_channels_on_the_last_axis(shape, layout, expected):
    space = spaces.Box(0, 255, shape, np.uint8, seed=0)
    samples, batch = batch_of(space)
    image = ObservationMapper(space, image_layout=layout)(batch).images["image"]
    assert image.shape == (4, *expected)
    assert image.dtype == np.uint8
    moved = expected != shape and len(shape) == 3
    original = np.moveaxis(samples[1], 0, -1) if moved else samples[1].reshape(expected)
    assert np.array_equal(image[1], original)


def test_a_guessed_layout_is_logged(caplog):
    with caplog.at_level(logging.INFO, "plugrl_env_client"):
        ObservationMapper(spaces.Box(0, 255, (3, 6, 7), np.uint8))
    assert "channels first" in caplog.text
