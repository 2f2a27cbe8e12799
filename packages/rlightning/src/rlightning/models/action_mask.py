"""Action masks: what an observation says about which actions there are.

An environment whose actions are not always all there observes a Dict with the key ``action_mask``,
a MultiBinary of one bit per Discrete action or per number of a one-dimensional Box: 1 where there
is one. (The name is PettingZoo's and RLlib's.) What a policy answers in place of the others has no
effect. Huang & Ontanon 2022, "A Closer Look at Invalid Action Masking in Policy Gradient
Algorithms" (arXiv:2006.14171): masked logits make a policy whose gradient is that of the actions
there are.
"""

from typing import Any

from gymnasium import spaces

__all__ = ["MASK", "has_action_mask", "without_action_mask"]

MASK = "action_mask"
"""The key of the mask."""


def has_action_mask(observation_space: Any, action_space: Any) -> bool:
    """Return whether observations of a space hold a mask of the actions of another."""
    mask = (
        observation_space.spaces.get(MASK) if isinstance(observation_space, spaces.Dict) else None
    )
    if not isinstance(mask, spaces.MultiBinary):
        return False
    if isinstance(action_space, spaces.Discrete):
        return mask.shape == (int(action_space.n),)
    is_vector = isinstance(action_space, spaces.Box) and len(action_space.shape) == 1
    return is_vector and mask.shape == action_space.shape


def without_action_mask(observation_space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return what there is to see beside the mask."""
    assert isinstance(observation_space, spaces.Dict)  # or it would have no mask
    return spaces.Dict({k: v for k, v in observation_space.spaces.items() if k != MASK})
