"""The command line: ``kvcore solve``, ``kvcore doctor``."""

from kvcore.cli.app import main

__all__ = ["main"]
