"""Every supported space becomes one vector per row; what is unclear or unsupported says so."""

import logging

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlightning.errors import ConfigError
from rlightning.models.encoders import ImageOptions, image_layout, is_image, make_encoder
from rlightning.models.normalizer import ObservationNormalizer

SMALL = ImageOptions(size=(36, 36), features=8, layout="HWC")


def test_a_box_of_any_shape_is_flattened_to_float32():
    encoder = make_encoder(spaces.Box(-1, 1, (2, 3), np.float64))
    assert encoder.out_features == 6
    x = torch.arange(12, dtype=torch.float64).reshape(2, 2, 3)
    assert torch.equal(encoder(x), torch.arange(12.0).reshape(2, 6))


def test_a_scalar_box_is_one_feature():
    assert make_encoder(spaces.Box(-1, 1, ()))(torch.tensor([1.0, 2.0])).tolist() == [[1], [2]]


def test_discrete_is_one_hot_from_its_start():
    encoder = make_encoder(spaces.Discrete(3, start=-1))
    assert encoder(torch.tensor([-1, 1])).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_multi_discrete_is_one_block_per_variable():
    encoder = make_encoder(spaces.MultiDiscrete([2, 3], start=[0, 5]))
    assert encoder(torch.tensor([[1, 5], [0, 7]])).tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]


def test_multi_discrete_of_two_axes():
    encoder = make_encoder(spaces.MultiDiscrete([[2, 2], [2, 2]]))
    assert encoder(torch.zeros(3, 2, 2, dtype=torch.int64)).shape == (3, 8)


def test_multi_binary_is_zeros_and_ones():
    encoder = make_encoder(spaces.MultiBinary(3))
    assert encoder(torch.tensor([[1, 0, 1]], dtype=torch.int8)).tolist() == [[1, 0, 1]]


@pytest.fixture
def nested():
    return spaces.Dict(
        {
            "camera.front": spaces.Box(0, 255, (12, 16, 3), np.uint8),
            "state": spaces.Box(-np.inf, np.inf, (4,)),
            "task": spaces.Tuple(
                [spaces.Discrete(3), spaces.Dict({"goal": spaces.Box(0, 1, (2,))})]
            ),
        }
    )


def batch_of(space: spaces.Space, n: int = 5):
    """A batch of n samples, as nested dicts and tuples of tensors."""
    samples = [space.sample() for _ in range(n)]

    def stack(values):
        if isinstance(values[0], dict):
            return {k: stack([v[k] for v in values]) for k in values[0]}
        if isinstance(values[0], tuple):
            return tuple(stack(list(parts)) for parts in zip(*values, strict=True))
        return torch.as_tensor(np.stack(values))

    return stack(samples)


def by_position(value):
    """Tuples as mappings with positions for keys, the way a TensorDict can hold them."""
    if isinstance(value, tuple):
        return {str(i): by_position(v) for i, v in enumerate(value)}
    if isinstance(value, dict):
        return {k: by_position(v) for k, v in value.items()}
    return value


def test_nested_spaces_are_concatenated_and_tensordicts_read_alike(nested):
    encoder = make_encoder(nested, SMALL)
    assert encoder.out_features == 8 + 4 + 3 + 2
    batch = batch_of(nested)
    features = encoder(batch)
    assert features.shape == (5, 17)
    assert torch.equal(features[:, 8:12], batch["state"])
    assert torch.equal(features[:, 15:], batch["task"][1]["goal"])
    as_tensordict = TensorDict(by_position(batch), batch_size=[5])
    assert torch.equal(encoder(as_tensordict), features)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((84, 84, 3), "HWC"), ((3, 84, 84), "CHW"), ((84, 60, 1), "HWC"), ((4, 84, 84), "CHW")],
)
def test_a_clear_layout_is_read_and_said_in_the_log(shape, layout, caplog):
    with caplog.at_level(logging.INFO, logger="rlightning.models.encoders"):
        assert image_layout(shape) == layout
    assert layout in caplog.text


@pytest.mark.parametrize("shape", [(3, 3, 3), (84, 3, 84), (10, 20, 10)])
def test_an_unclear_layout_must_be_stated(shape):
    with pytest.raises(ConfigError, match="image_layout: HWC or image_layout: CHW"):
        make_encoder(spaces.Box(0, 255, shape, np.uint8))
    assert image_layout(shape, "HWC") == "HWC"


def test_what_counts_as_an_image():
    options = ImageOptions()
    assert is_image(spaces.Box(0, 255, (84, 84), np.uint8), options)
    assert not is_image(spaces.Box(0, 1, (84, 84, 3)), options)
    assert is_image(spaces.Box(0, 1, (84, 84, 3)), ImageOptions(layout="HWC"))
    flatten = ImageOptions(encoder="flatten")
    assert not is_image(spaces.Box(0, 255, (84, 84, 3), np.uint8), flatten)
    assert make_encoder(spaces.Box(0, 255, (7, 7, 3), np.uint8), flatten).out_features == 147


@pytest.mark.parametrize("kind", ["nature", "impala"])
def test_grey_and_float_images_encode(kind):
    options = ImageOptions(encoder=kind, size=(36, 36), features=8, layout="CHW")
    grey = make_encoder(spaces.Box(0, 255, (20, 30), np.uint8), options)
    assert grey(torch.zeros(2, 20, 30, dtype=torch.uint8)).shape == (2, 8)
    unit = make_encoder(spaces.Box(0, 1, (3, 20, 30)), options)
    assert unit(torch.rand(2, 3, 20, 30)).shape == (2, 8)


def test_the_space_decides_the_scale_of_float_images():
    """A nearly black frame of a 0..255 float camera is not mistaken for a bright one."""
    options = ImageOptions(size=(36, 36), features=8, layout="CHW")
    as_bytes = make_encoder(spaces.Box(0, 255, (3, 36, 36), np.uint8), options)
    as_floats = make_encoder(spaces.Box(0, 255, (3, 36, 36), np.float32), options)
    as_floats.load_state_dict(as_bytes.state_dict())
    dark = torch.ones(1, 3, 36, 36)
    assert torch.allclose(as_floats(dark), as_bytes(dark.to(torch.uint8)))


def test_an_unsupported_space_says_what_is_supported():
    with pytest.raises(ConfigError, match=r"Text.*Box, Discrete"):
        make_encoder(spaces.Dict({"instruction": spaces.Text(10)}))


def test_the_normalizer_touches_vectors_only(nested):
    normalizer = ObservationNormalizer(nested, SMALL)
    batch = batch_of(nested, 50)
    before = batch["state"].clone()
    normalizer.update(batch)
    out = normalizer(batch)
    assert len(normalizer.statistics) == 2
    assert out["camera.front"] is batch["camera.front"]
    assert out["task"][0] is batch["task"][0]
    expected = (before - before.mean(0)) / before.std(0, correction=0)
    assert torch.allclose(out["state"], expected, atol=1e-4)
    goal = out["task"][1]["goal"]
    assert torch.allclose(goal.mean(0), torch.zeros(2), atol=1e-4)
    assert torch.equal(batch["state"], before)


def test_the_normalizer_reads_tensordicts_and_pools_workers(nested):
    one, two = batch_of(nested, 20), batch_of(nested, 30)
    pooled, whole = ObservationNormalizer(nested, SMALL), ObservationNormalizer(nested, SMALL)
    for part in (one, two):
        pooled.merge(pooled.moments(TensorDict(by_position(part), batch_size=[len(part["state"])])))
    whole.update(
        {"state": torch.cat([one["state"], two["state"]]), "camera.front": None}
        | {
            "task": (
                None,
                {"goal": torch.cat([one["task"][1]["goal"], two["task"][1]["goal"]])},
            )
        }
    )
    for left, right in zip(pooled.statistics, whole.statistics, strict=True):
        assert left.count.item() == 50
        assert torch.allclose(left.mean, right.mean)
        assert torch.allclose(left.var, right.var)


def test_the_normalizer_is_frozen_in_evaluation():
    normalizer = ObservationNormalizer(spaces.Box(-1, 1, (2,)))
    normalizer.eval()
    normalizer.update(torch.ones(4, 2))
    assert normalizer.statistics[0].count.item() == 0
