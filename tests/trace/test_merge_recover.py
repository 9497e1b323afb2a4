"""Shards become one file, and damaged files give back every whole record."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from trace_sample import GROUP, write_sample

import prismtrace
from prismtrace import (
    GraphKind,
    ProcessGroup,
    TraceDataError,
    TraceReader,
    TraceUnfinishedError,
    TraceUsageError,
    TraceWriteError,
    TraceWriter,
    merge,
    recover,
    validate,
)


def test_shards_merge_into_the_whole(tmp_path: Path, sample: Path) -> None:
    shards = [write_sample(tmp_path / f"rank{rank}", ranks=(rank,)) for rank in (0, 1)]
    merge(shards, tmp_path / "all.prism")
    assert prismtrace.to_json(tmp_path / "all.prism") == prismtrace.to_json(sample)
    assert prismtrace.validate(tmp_path / "all.prism") == []
    assert sorted(os.listdir(tmp_path)) == ["all.prism", "rank0", "rank1", "sample.prism"]


def test_later_tables_and_metadata_win(tmp_path: Path, sample: Path) -> None:
    with TraceWriter(tmp_path / "new", graph_kind=GraphKind.CALIBRATED, metadata={"a": "1"}) as writer:
        writer.add_units(1, {"kind": [1], "start_ns": [5]})
    merge([sample, tmp_path / "new"], tmp_path / "out", metadata={"b": "2"})
    with TraceReader(tmp_path / "out") as reader:
        assert reader.graph_kind is GraphKind.CALIBRATED
        assert reader.world_size == 2
        assert reader.metadata == {"job.status": "complete", "a": "1", "b": "2"}
        assert reader.units(1).start_ns.tolist() == [5]
        assert reader.num_units(0) == 10
        assert reader.num_steps(1) == 2
    merge([sample], tmp_path / "bare", graph_kind=GraphKind.BARE)
    with TraceReader(tmp_path / "bare") as reader:
        assert reader.graph_kind is GraphKind.BARE


def test_payloads_are_deduplicated(tmp_path: Path) -> None:
    blob = os.urandom(100_000)
    for name in "abc":
        with TraceWriter(tmp_path / name) as writer:
            digest = writer.add_payload(blob)
            writer.add_payload(name.encode())
    merge([tmp_path / name for name in "abc"], tmp_path / "out")
    assert (tmp_path / "out").stat().st_size < 103_000
    with TraceReader(tmp_path / "out") as reader:
        assert reader.payload(digest) == blob
        assert len(reader.payload_digests) == 4
    assert prismtrace.validate(tmp_path / "out") == []


def test_disagreeing_inputs_are_refused(tmp_path: Path, sample: Path) -> None:
    with TraceWriter(tmp_path / "world", world_size=3):
        pass
    with TraceWriter(tmp_path / "group") as writer:
        writer.add_group(ProcessGroup(group_id=GROUP.group_id, ranks=(1, 0)))
    with pytest.raises(TraceDataError, match="world sizes"):
        merge([sample, tmp_path / "world"], tmp_path / "out")
    with pytest.raises(TraceDataError, match="an earlier file says"):
        merge([sample, tmp_path / "group"], tmp_path / "out")
    with pytest.raises(TraceUsageError, match="no input"):
        merge([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merge_is_atomic_and_does_not_overwrite(tmp_path: Path, sample: Path) -> None:
    with pytest.raises(TraceWriteError, match="exists"):
        merge([sample], sample)
    twin = prismtrace.to_json(sample)
    merge([sample], sample, overwrite=True)
    assert prismtrace.to_json(sample) == twin
    broken = tmp_path / "broken"
    broken.write_bytes(sample.read_bytes()[:-100])
    with pytest.raises(TraceUnfinishedError):
        merge([sample, broken], tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["broken", "sample.prism"]
    merge([broken], tmp_path / "out", allow_unfinished=True)
    with pytest.raises(TraceWriteError, match="No such file"):
        merge([sample], tmp_path / "no" / "out")


@pytest.mark.parametrize(
    "more",
    [b"x", b"garbage" * 5, pytest.param(b"\0" * 4096, id="zeros"), pytest.param(b"\0" * (9 << 20), id="9 MiB of zeros"),
     pytest.param(None, id="another trace")],
)  # fmt: skip
def test_what_stands_behind_the_end_is_all_that_is_lost(
    tmp_path: Path, sample: Path, more: bytes | None
) -> None:  # fmt: skip
    size, twin = sample.stat().st_size, prismtrace.to_json(sample)
    more = write_sample(tmp_path / "another", steps=4).read_bytes() if more is None else more
    sample.write_bytes(sample.read_bytes() + more)
    report = recover(sample, tmp_path / "out")
    assert [(part.start, part.end) for part in report.lost] == [(size, size + len(more))]
    assert report.was_finished and report.lost_bytes == len(more)
    saved = prismtrace.to_json(tmp_path / "out")
    assert saved["metadata"].pop("recover.lost_bytes") == str(len(more))
    assert {key: saved[key] for key in ("metadata", "groups")} == {key: twin[key] for key in ("metadata", "groups")}


def test_a_validator_finds_the_end_however_much_stands_behind_it(sample: Path) -> None:
    size = sample.stat().st_size
    with sample.open("ab") as file:
        file.truncate(size + (9 << 20))
    (found,) = validate(sample)
    assert found.message.startswith("9437184 bytes after the end of a finished file") and found.where == f"byte {size}"


def test_many_shards_need_few_descriptors(tmp_path: Path) -> None:
    paths = []
    for rank in range(300):
        paths.append(tmp_path / f"{rank}")
        with TraceWriter(paths[-1], world_size=300) as writer:
            writer.add_group(ProcessGroup(group_id=1 + rank // 8, ranks=tuple(range(rank // 8 * 8, rank // 8 * 8 + 8))))
            writer.add_units(rank, {"kind": [1, 1], "start_ns": [rank, None]})
    merge(paths, tmp_path / "out")
    with TraceReader(tmp_path / "out") as reader:
        assert reader.ranks == tuple(range(300))
        assert all(reader.units(rank).start_ns[0] == rank for rank in reader.ranks)
        assert len(reader.groups) == 38


def test_recover_an_unfinished_file(tmp_path: Path, sample: Path) -> None:
    cut = tmp_path / "cut"
    raw = sample.read_bytes()
    with TraceReader(sample) as reader:
        end = int(reader._index.chunk_entries["offset"][-1])
    cut.write_bytes(raw[: end + 40])
    report = recover(cut, tmp_path / "out")
    assert report.num_chunks == 11
    assert report.num_payloads == 1
    assert not report.was_finished
    assert [(part.start, part.end) for part in report.lost] == [(end, end + 40)]
    with TraceReader(tmp_path / "out") as reader:
        assert reader.num_units(1) == 10
        assert reader.metadata["recover.lost_bytes"] == "40"
    assert {item.code for item in prismtrace.validate(tmp_path / "out")} == set()


def test_recover_a_good_file_loses_nothing(tmp_path: Path, sample: Path) -> None:
    report = recover(sample, tmp_path / "out")
    assert report.was_finished
    assert report.lost == ()
    assert prismtrace.to_json(tmp_path / "out") == prismtrace.to_json(sample)


def test_recover_finds_the_records_after_a_damaged_one(tmp_path: Path) -> None:
    raw = bytearray(write_sample(tmp_path / "long", steps=6).read_bytes())
    with TraceReader(tmp_path / "long") as reader:
        entries = reader._index.chunk_entries
        first, second = (int(entries["offset"][i]) for i in (3, 12))
    raw[first + 5] ^= 1  # a frame
    raw[second + 200] ^= 1  # a meta section
    (tmp_path / "bad").write_bytes(raw)
    report = recover(tmp_path / "bad", tmp_path / "out")
    assert report.num_chunks == 34
    assert len(report.lost) == 2
    assert prismtrace.validate(tmp_path / "bad", deep=False) != []
    with TraceReader(tmp_path / "out") as reader:
        codes = {item.code for item in prismtrace.validate(tmp_path / "out")}
        units = reader.units(1)
        assert len(units) == 25
        assert units.row_index.tolist()[:2] == [5, 6] or 0 in units.row_index
    assert codes <= {"PT005", "PT023", "PT032", "PT033"}


def test_every_truncation_and_many_corruptions_can_be_recovered(tmp_path: Path, sample: Path) -> None:
    raw = sample.read_bytes()
    twin = prismtrace.to_json(sample)
    rng = random.Random(5)
    bad = tmp_path / "bad"
    for length in [*range(300, len(raw), 37), len(raw)]:
        damaged = bytearray(raw[:length])
        if rng.random() < 0.5:
            damaged[rng.randrange(200, length)] ^= rng.randrange(1, 256)
        bad.write_bytes(damaged)
        recover(bad, tmp_path / "out", overwrite=True)
        saved = prismtrace.to_json(tmp_path / "out")
        for rank, tables in saved["ranks"].items():
            for name, table in tables.items():
                whole = twin["ranks"][rank][name]["columns"]
                if table["first_index"] == "0" and table["num_rows"] == 5:
                    assert all(whole[column][:5] == values for column, values in table["columns"].items())
