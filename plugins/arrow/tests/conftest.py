"""Lets the tests of this plugin import what stands beside them. Holds no tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
