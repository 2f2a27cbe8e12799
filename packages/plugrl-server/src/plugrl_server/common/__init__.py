"""What policies, algorithms and the server share: registries, trees of arrays, checkpoints."""
