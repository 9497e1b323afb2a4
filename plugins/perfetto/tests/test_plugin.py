"""Prism finds the exporter of this plugin, and lists it without importing what the exporter needs."""

from __future__ import annotations

import subprocess
import sys

import prismtrace_perfetto

from prism_sdk.testing import isolated_manager


def test_the_exporter_is_registered() -> None:
    exporters = isolated_manager(prismtrace_perfetto).exporters()
    assert set(exporters) == {"perfetto"}
    assert ".perfetto-trace" in exporters["perfetto"].suffixes and exporters["perfetto"].description


def test_the_entry_point_imports_nothing_heavy() -> None:
    program = "import sys, prismtrace_perfetto; sys.exit('perfetto' in sys.modules or 'google.protobuf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
