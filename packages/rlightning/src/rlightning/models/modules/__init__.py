"""Public import paths of small parts, kept for users' code."""
