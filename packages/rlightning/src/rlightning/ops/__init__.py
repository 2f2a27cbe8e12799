"""Pure tensor functions: returns, losses, normalisation, distributions; each maths once."""
