"""Running normalisation of observations, leaf by leaf of their space."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlightning.models.encoders import ImageOptions, is_image, tuple_item
from rlightning.ops.normalization import Moments, RunningMeanStd, batch_moments

__all__ = ["ObservationNormalizer"]


class ObservationNormalizer(nn.Module):
    """Normalise every numeric vector in an observation by what was seen so far.

    Images, discrete and binary parts pass through unchanged. The order of ``statistics`` is that of
    the space, so lists of ``Moments`` from other workers match.

    Args:
        space: observation space of one environment.
        images: says which boxes are images.
        clip: bound of normalised values.

    Attributes:
        statistics: one ``RunningMeanStd`` per normalised leaf.
    """

    def __init__(
        self, space: spaces.Space[Any], images: ImageOptions | None = None, *, clip: float = 10.0
    ) -> None:
        super().__init__()
        self.statistics = nn.ModuleList()
        self._plan = self._make_plan(space, images or ImageOptions(), clip)

    def _make_plan(self, space: spaces.Space[Any], images: ImageOptions, clip: float) -> Any:
        """Mirror the space: a position in ``statistics`` per leaf to normalise, None elsewhere."""
        if isinstance(space, spaces.Dict):
            return {key: self._make_plan(sub, images, clip) for key, sub in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return [self._make_plan(inner, images, clip) for inner in space.spaces]
        if not isinstance(space, spaces.Box) or is_image(space, images):
            return None
        self.statistics.append(RunningMeanStd(space.shape, clip=clip))
        return len(self.statistics) - 1

    def forward(self, observation: Any) -> Any:
        """Return a batch of observations with its vectors normalised; the input is untouched."""
        return self._normalize(self._plan, observation)

    def _normalize(self, plan: Any, observation: Any) -> Any:
        if isinstance(plan, int):
            return self.statistics[plan].normalize(observation)  # type: ignore[operator]
        if isinstance(plan, dict):
            return {key: self._normalize(sub, observation[key]) for key, sub in plan.items()}
        if isinstance(plan, list):
            return tuple(
                self._normalize(sub, tuple_item(observation, i)) for i, sub in enumerate(plan)
            )
        return observation

    def moments(self, observation: Any) -> list[Moments]:
        """Return the moments of a batch, one per normalised leaf, without learning from them."""
        return [batch_moments(leaf) for leaf in self._leaves(self._plan, observation)]

    def merge(self, moments: list[Moments]) -> None:
        """Learn from moments as ``moments`` returns them; nothing happens in evaluation mode."""
        for statistics, part in zip(self.statistics, moments, strict=True):
            assert isinstance(statistics, RunningMeanStd)
            statistics.merge(part)

    def update(self, observation: Any) -> None:
        """Learn from a batch of observations."""
        self.merge(self.moments(observation))

    def _leaves(self, plan: Any, observation: Any) -> list[Tensor]:
        if isinstance(plan, int):
            return [torch.as_tensor(observation)]
        if isinstance(plan, dict):
            return [x for key, sub in plan.items() for x in self._leaves(sub, observation[key])]
        if isinstance(plan, list):
            parts = enumerate(plan)
            return [x for i, sub in parts for x in self._leaves(sub, tuple_item(observation, i))]
        return []
