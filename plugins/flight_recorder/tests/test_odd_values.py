"""What a dump says and cannot be is neither guessed nor kept, and is told."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from prismtrace_flight_recorder.importer import FlightRecorderImporter

from prism_sdk.abc import ConversionReport
from prismtrace import ABSENT, TraceReader


def dump_of_rank_0() -> dict[str, Any]:
    entries: list[dict[str, Any]] = [
        {
            "record_id": number,
            "process_group": (str(number), "dp"),
            "collective_seq_id": number + 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1000 + number,
            "input_sizes": [[4]],
            "output_sizes": [[4]],
            "state": "completed",
        }
        for number in range(4)
    ]
    return {"version": "2.10", "entries": entries, "pg_config": {}}


def load(folder: Path, dump: dict[str, Any]) -> ConversionReport:
    (folder / "trace_rank_0").write_bytes(pickle.dumps(dump))
    importer = FlightRecorderImporter()
    return importer.import_trace([folder / "trace_rank_0"], output=folder / "a.prism", options={}, report=print)


def test_members_and_numbers_that_cannot_be_are_not_guessed(tmp_path: Path) -> None:
    dump = dump_of_rank_0()
    dump["pg_config"] = {"0": {"ranks": "[0, -1]"}, "1": {"ranks": [0, "2"]}, "2": {"ranks": "[1, 999999999]"}}
    dump["entries"][0] |= {"time_created_ns": "5", "input_sizes": [[2**40, 2**40]]}
    dump["entries"][1] |= {"time_created_ns": -5, "record_id": dump["entries"][0]["record_id"]}
    dump["entries"][2] |= {"process_group": None, "pg_id": -2}
    report = load(tmp_path, dump)
    told = " ".join(report.notes)
    assert "members of group '0' are no list of ranks" in told and "members of group '1' are no list" in told
    assert "2 times are no numbers, or negative" in told and "1 records have the number of another one" in told
    assert "1 of " in told and "entries are damaged" in told
    assert "no dump of ranks 1-999999999" in told
    with TraceReader(tmp_path / "a.prism") as reader:
        assert all(max(group.ranks) <= 999_999_999 and len(group.ranks) < 5 for group in reader.groups.values())
        assert ABSENT in reader.units(0).num_elements_in.tolist()


def test_text_that_is_no_unicode(tmp_path: Path) -> None:
    dump = dump_of_rank_0()
    dump["entries"][0] |= {"process_group": ("\ud800", "x\udfff"), "profiling_name": "nccl:all_reduce\ud801"}
    load(tmp_path, dump)
    with TraceReader(tmp_path / "a.prism") as reader:
        assert "\\ud800" in {group.name for group in reader.groups.values()}
