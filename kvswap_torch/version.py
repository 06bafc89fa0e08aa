"""The one place the version is written; pyproject.toml and CMake read it here."""

__version__ = "0.1.0"
