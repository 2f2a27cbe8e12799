"""Small tools without knowledge of learning."""

__all__: list[str] = []
