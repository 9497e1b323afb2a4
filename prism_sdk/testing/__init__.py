"""For authors of plugins: contract tests to subclass, and a plugin manager that sees nothing but your plugin.

It is no part of a run, and needs pytest::

    from prism_sdk.testing import CalibrationStrategyContract

    class TestMine(CalibrationStrategyContract):
        def make_strategy(self):
            return Mine()

For the fixture ``isolated_plugins``, write ``pytest_plugins = ["prism_sdk.testing.fixtures"]`` in ``conftest.py``.
"""

from prism_sdk.testing.contracts import (
    CalibrationStrategyContract,
    FrameworkAdapterContract,
    NullNamer,
    ReplayBackendContract,
)
from prism_sdk.testing.launches import Launched, Launches, losses
from prism_sdk.testing.orders import NamedUnit, check_golden, unit_order, used_groups
from prism_sdk.testing.plain import run_plain
from prism_sdk.testing.plugins import isolated_manager
from prism_sdk.testing.routes import Route, run_route
from prism_sdk.testing.scripted import ScriptedCalibration, ScriptedReplay

__all__ = [
    "CalibrationStrategyContract",
    "FrameworkAdapterContract",
    "Launched",
    "Launches",
    "NamedUnit",
    "NullNamer",
    "ReplayBackendContract",
    "Route",
    "ScriptedCalibration",
    "ScriptedReplay",
    "check_golden",
    "isolated_manager",
    "losses",
    "run_plain",
    "run_route",
    "unit_order",
    "used_groups",
]
