"""Files that ``rlightning new`` copies."""
