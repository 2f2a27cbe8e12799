"""Image encoders read every layout and scale once; a sample's encoding never depends on others."""

import numpy as np
import pytest
import torch

from rlightning.models.vision import IMPALACNN, ImageInput, NatureCNN, ResNet


@pytest.fixture
def images():
    return torch.randint(0, 256, (2, 3, 84, 84), dtype=torch.uint8)


def plain(**options) -> ImageInput:
    """Scaling and layout alone, to see pixel values."""
    return ImageInput(options.pop("in_channels", 3), standardize=False, **options)


def test_the_guides_encoder_works_without_arguments():
    encoder = NatureCNN()
    assert encoder.out_feature_dim == 256
    assert encoder(torch.rand(4, 3, 64, 48)).shape == (4, 256)


def test_a_cast_byte_image_encodes_like_the_byte_image(images):
    encoder = NatureCNN()
    assert torch.allclose(encoder(images.float()), encoder(images), atol=1e-5)


def test_arrays_and_tensors_and_both_layouts_agree(images):
    torch.manual_seed(0)
    chw = NatureCNN()
    hwc = NatureCNN(image_format="HWC")
    hwc.load_state_dict(chw.state_dict())
    expected = chw(images)
    assert torch.allclose(chw(images.numpy()), expected)
    assert torch.allclose(hwc(images.permute(0, 2, 3, 1)), expected, atol=1e-5)
    assert torch.allclose(hwc(images.permute(0, 2, 3, 1).numpy()), expected, atol=1e-5)


def test_bytes_are_always_divided_even_a_black_image():
    pixels = plain()(torch.ones(1, 3, 4, 4, dtype=torch.uint8))
    assert torch.allclose(pixels, torch.full((1, 3, 4, 4), 1 / 255))


def test_floats_in_the_unit_range_are_not_divided():
    image = torch.rand(2, 3, 4, 4)
    image[0, 0, 0, 0] = 1.0
    assert torch.equal(plain()(image), image)


def test_an_image_is_scaled_by_itself_whatever_its_batch():
    unit, byte = torch.full((1, 3, 2, 2), 0.5), torch.full((1, 3, 2, 2), 200.0)
    pixels = plain()(torch.cat([unit, byte]))
    assert torch.equal(pixels[0], unit[0])
    assert torch.allclose(pixels[1], byte[0] / 255)


def test_a_stated_range_is_believed():
    overshoot = torch.full((1, 3, 2, 2), 1.1)
    assert torch.equal(plain(pixel_range="unit")(overshoot), overshoot)
    dark = torch.ones(1, 3, 2, 2)
    assert torch.allclose(plain(pixel_range="byte")(dark), dark / 255)


def test_standardization_uses_imagenet_per_channel_and_its_average_elsewhere():
    rgb = ImageInput(3)(torch.full((1, 3, 1, 1), 0.5)).flatten()
    expected = (0.5 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(rgb, expected)
    stacked = ImageInput(6)(torch.full((1, 6, 1, 1), 0.5)).flatten()
    assert torch.allclose(stacked, expected.repeat(2))
    depth = ImageInput(1)(torch.full((1, 1, 1, 1), 0.449)).flatten()
    assert torch.allclose(depth, torch.zeros(1), atol=1e-6)


def test_images_are_resized_to_the_standard_size():
    assert plain(size=(8, 6))(torch.rand(1, 3, 20, 30)).shape == (1, 3, 8, 6)
    constant = plain(size=(8, 6))(torch.full((1, 3, 20, 30), 0.25))
    assert torch.allclose(constant, torch.full((1, 3, 8, 6), 0.25), atol=1e-6)


@pytest.mark.parametrize("network", [NatureCNN, IMPALACNN])
@pytest.mark.parametrize(
    ("shape", "channels", "layout"),
    [
        ((3, 3, 3), 3, "CHW"),
        ((3, 3, 3), 3, "HWC"),
        ((40, 90, 1), 1, "HWC"),
        ((4, 84, 84), 4, "CHW"),
    ],
)
def test_one_channel_tiny_non_square_and_stacked_images(network, shape, channels, layout):
    encoder = network((48, 40), channels, layout)
    features = encoder(torch.randint(0, 256, (2, *shape), dtype=torch.uint8))
    assert features.shape == (2, 256)
    assert torch.isfinite(features).all()


def test_impala_takes_its_own_widths_and_tiny_inputs():
    encoder = IMPALACNN((3, 3), 3, channels=(4, 4), out_feature_dim=8)
    assert encoder(torch.rand(2, 3, 3, 3)).shape == (2, 8)


@pytest.mark.parametrize("shape", [(3, 84, 84), (2, 1, 3, 84, 84), (84,)])
def test_anything_but_four_axes_is_refused(shape):
    with pytest.raises(ValueError, match="four axes"):
        NatureCNN()(torch.zeros(shape))


def test_a_wrong_channel_count_names_both_and_the_options():
    with pytest.raises(ValueError, match=r"expected 3 channels in format CHW, got 84.*\(2, 84"):
        NatureCNN()(np.zeros((2, 84, 84, 3), np.uint8))


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="image_format is 'HCW'"):
        NatureCNN(image_format="HCW")
    with pytest.raises(ValueError, match="pixel_range is 'float'"):
        NatureCNN(pixel_range="float")
    with pytest.raises(ValueError, match=r"\(20, 84\).*at least \(36, 36\)"):
        NatureCNN((20, 84))


def test_constants_stay_out_of_checkpoints():
    assert not any("mean" in name or "std" in name for name in NatureCNN().state_dict())


def test_gradients_reach_every_parameter(images):
    encoder = NatureCNN()
    encoder(images).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())


# ---- the small residual network, and shifts ----------------------------------------------------


@pytest.mark.parametrize("size", [(84, 84), (64, 48), (7, 5), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3, 9])
def test_a_small_resnet_takes_images_of_any_size(size, channels):
    encoder = ResNet(size, channels, out_feature_dim=16)
    images = torch.randint(0, 256, (2, channels, *size), dtype=torch.uint8)
    assert encoder(images).shape == (2, 16)


def test_a_small_resnet_is_small_and_all_of_it_learns(images):
    encoder = ResNet()
    blocks = [module for module in encoder.modules() if isinstance(module, torch.nn.Conv2d)]
    assert 1e5 < sum(p.numel() for p in encoder.parameters()) < 2e6
    assert len(blocks) == 1 + 2 * 4 + 3  # the stem, two per block, one where a shape changes
    torch.nn.init.normal_(
        encoder.convolutions[4].inner[-1].weight
    )  # zero at the start: no gradient
    encoder(images.float().requires_grad_()).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in encoder.parameters())
    assert encoder.convolutions[4].inner[0].weight.grad.abs().sum() > 0


def test_a_block_is_its_input_at_first():
    encoder = ResNet((32, 32), channels=(8,))
    maps = torch.rand(2, 8, 8, 8)
    assert torch.equal(encoder.convolutions[4](maps), maps)


def test_a_small_resnet_encodes_an_image_whatever_its_batch(images):
    encoder = ResNet()
    together = encoder(images)
    assert torch.allclose(together[:1], encoder(images[:1]), atol=1e-5)


@pytest.mark.parametrize("kind", [NatureCNN, IMPALACNN, ResNet])
@pytest.mark.parametrize("image_format", ["CHW", "HWC"])
def test_images_are_shifted_while_learning_and_never_while_acting(kind, image_format):
    images = torch.rand(3, 3, 40, 40) if image_format == "CHW" else torch.rand(3, 40, 40, 3)
    torch.manual_seed(0)
    plain, shifted = (
        kind((40, 40), image_format=image_format, random_shift=pixels) for pixels in (0, 4)
    )
    shifted.load_state_dict(plain.state_dict())
    assert torch.equal(shifted.eval()(images), plain(images))
    first, second = shifted.train()(images), shifted(images)
    assert not torch.equal(first, second)
    assert shifted.input(images).shape == (3, 3, 40, 40)
