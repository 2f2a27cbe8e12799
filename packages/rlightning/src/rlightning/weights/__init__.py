"""How weights travel from learner to actors: versioned, whole, pulled by who needs them."""

from rlightning.weights.weight_buffer import WeightBuffer

__all__ = ["WeightBuffer"]
