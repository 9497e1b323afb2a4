"""pytest fixtures for plugin authors; load them with ``pytest_plugins``. It holds no test."""

from __future__ import annotations

import pytest

from prism_sdk.plugins import PluginManager
from prism_sdk.testing.plugins import isolated_manager

__all__ = ["isolated_plugins"]


@pytest.fixture
def isolated_plugins() -> PluginManager:
    """A plugin manager without built-in and installed plugins: ``register`` yours and ask it."""
    return isolated_manager()
