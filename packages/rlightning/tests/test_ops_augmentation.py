"""Shifted images: the content moves by whole pixels and the border repeats."""

import pytest
import torch

from rlightning.ops.augmentation import random_shift, shift_images


def naive_shift(images, down, right):
    """Pixel by pixel."""
    out = torch.empty_like(images)
    n, _, height, width = images.shape
    for image in range(n):
        for row in range(height):
            for column in range(width):
                source_row = min(max(row - int(down[image]), 0), height - 1)
                source_column = min(max(column - int(right[image]), 0), width - 1)
                out[image, :, row, column] = images[image, :, source_row, source_column]
    return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_shifts_are_those_of_the_naive_twin(dtype):
    images = torch.randint(0, 256, (6, 3, 7, 5)).to(dtype)
    down, right = torch.randint(-8, 9, (2, 6))
    shifted = shift_images(images, down, right)
    assert shifted.dtype == dtype
    assert torch.equal(shifted, naive_shift(images, down, right))


def test_a_shift_by_hand():
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    moved = shift_images(image, torch.tensor([1]), torch.tensor([-1]))
    assert moved[0, 0].tolist() == [[1, 2, 2], [1, 2, 2], [4, 5, 5]]


def test_every_image_gets_a_shift_of_its_own_and_every_shift_comes_up():
    image = torch.zeros(1, 1, 9, 9)
    image[0, 0, 4, 4] = 1
    shifted = random_shift(image.expand(500, 1, 9, 9), 2)
    places = {tuple(place.tolist()) for place in shifted[:, 0].nonzero()[:, 1:]}
    assert places == {(row, column) for row in range(2, 7) for column in range(2, 7)}


def test_no_pixels_moves_nothing_and_the_global_seed_decides():
    images = torch.rand(4, 3, 6, 6)
    assert torch.equal(random_shift(images, 0), images)
    torch.manual_seed(3)
    first = random_shift(images, 2)
    torch.manual_seed(3)
    assert torch.equal(first, random_shift(images, 2))


def test_gradients_reach_the_pixels_that_are_seen():
    images = torch.rand(1, 1, 3, 3, requires_grad=True)
    shift_images(images, torch.tensor([1]), torch.tensor([0])).sum().backward()
    assert images.grad[0, 0].tolist() == [[2, 2, 2], [1, 1, 1], [0, 0, 0]]
