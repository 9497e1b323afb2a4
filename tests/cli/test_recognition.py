"""Every importer of this repository knows its own files, and no other claims them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prism_sdk.conversion import head_of
from prism_sdk.plugins import PluginManager

PLUGINS = Path(__file__).parents[2] / "plugins"
FILES = {
    "kineto": sorted((PLUGINS / "kineto/tests/data").glob("*.json")),
    "pytorch_et": sorted((PLUGINS / "chakra/tests/data").glob("*.json")),
    "chakra": sorted((PLUGINS / "chakra/tests/data").glob("*.et")),
    "flight_recorder": sorted((PLUGINS / "flight_recorder/tests/data").glob("gloo_trace_*")),
    "straggler": sorted((PLUGINS / "arrow/tests/data").glob("*.parquet")),
}


@pytest.mark.parametrize(("name", "path"), [pytest.param(n, p, id=p.name) for n, ps in FILES.items() for p in ps])
@pytest.mark.parametrize("in_folder", [False, True])
def test_one_importer_recognises_a_file(name: str, path: Path, in_folder: bool, tmp_path: Path) -> None:
    importers = PluginManager().importers()
    if name not in importers:
        pytest.skip(f"the plugin with the importer {name} is not installed")
    if in_folder and name == "straggler":
        pytest.skip("this importer takes files")
    source = path
    if in_folder:
        source = tmp_path
        shutil.copy(path, tmp_path)
    head = head_of(source)
    assert [n for n, importer in importers.items() if importer.recognises(source, head)] == [name]
