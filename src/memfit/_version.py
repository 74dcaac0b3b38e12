"""The version, readable without `importlib.metadata`. Kept equal to `pyproject.toml` by a test."""

__version__ = "0.1.0"
