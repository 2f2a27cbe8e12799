"""Image augmentation: small random shifts.

Yarats et al. 2021, "Image Augmentation Is All You Need: Regularizing Deep Reinforcement Learning
from Pixels" (arXiv:2004.13649).
"""

import torch
from torch import Tensor

__all__ = ["random_shift", "shift_images"]


def shift_images(images_BCHW: Tensor, down_B: Tensor, right_B: Tensor) -> Tensor:
    """Move each image by whole pixels; what comes in from outside repeats the border.

    Args:
        images_BCHW: any dtype.
        down_B: int64, by how many pixels its content moves down; negative is up.
        right_B: likewise to the right.

    Returns:
        Images of the same shape and dtype; gradients flow to the pixels that are seen.
    """
    n, channels, height, width = images_BCHW.shape
    device = images_BCHW.device
    row_BH = (torch.arange(height, device=device) - down_B.unsqueeze(1)).clamp(0, height - 1)
    column_BW = (torch.arange(width, device=device) - right_B.unsqueeze(1)).clamp(0, width - 1)
    image_B = torch.arange(n, device=device)
    channel_C = torch.arange(channels, device=device)
    return images_BCHW[
        image_B[:, None, None, None],
        channel_C[None, :, None, None],
        row_BH[:, None, :, None],
        column_BW[:, None, None, :],
    ]


def random_shift(images_BCHW: Tensor, max_pixels: int) -> Tensor:
    """Move each image by up to `max_pixels` in both directions, every shift as likely.

    Args:
        images_BCHW: any dtype.
        max_pixels: 0 moves nothing.

    Returns:
        Images of the same shape and dtype.
    """
    shifts = torch.randint(
        -max_pixels, max_pixels + 1, (2, len(images_BCHW)), device=images_BCHW.device
    )
    return shift_images(images_BCHW, shifts[0], shifts[1])
