"""No secret of the source is anywhere in a redacted trace, and everything else is still there."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings

import prismtrace
from prismtrace import Op, ProcessGroup, TraceReader, TraceResultError, TraceUsageError, TraceWriter, UnitKind, redact
from prismtrace.pseudonyms import Pseudonymiser

SECRETS = {
    "path": "/home/jdoe/secret_project/train.py",
    "mail": "jane.doe@example.org",
    "ip": "10.17.0.42",
    "ip6": "fd00:1234::17",
    "host": "gpu-login-07.cluster.example.com",
    "node": "dgx-0042",
    "url": "https://git.example.org/team/repo",
    "windows": "C:\\Users\\jdoe\\run",
}

HARMLESS = "layer.3.attention/dense torch.nn.Linear jdoexyz"


def write_secret(path: Path, *, payload: bytes = b"x" * 500) -> Path:
    with TraceWriter(path, world_size=2) as writer:
        writer.update_metadata(
            {
                "job.argv": json.dumps(
                    [SECRETS["path"], "--lr", "3e-4", "--run=night-owl", "--data", "/mnt/corpus/v3"]
                ),
                "job.error": f"RuntimeError at {SECRETS['path']}: night-owl exploded",
                "job.status": "aborted",
                "x-host": "machine17",
                "x-env": json.dumps({"USER": "mmuster", "HOSTNAME": "blackbox", "N": 4}),
                "x-note": f"{SECRETS['mail']} on {SECRETS['host']} ({SECRETS['ip']}, {SECRETS['ip6']})",
                "x-see": f"see {SECRETS['url']}",
                "x-file": "/mnt/my data/with spaces/a.bin",
                "torch.version": "2.13.0",
            }
        )
        description = f"on {SECRETS['node']} and blackbox"
        writer.add_group(ProcessGroup(group_id=1, name="dp", description=description, backend="nccl", ranks=(0, 1)))
        digest = writer.add_payload(payload)
        for rank in (0, 1):
            writer.add_units(
                rank,
                {
                    "kind": [UnitKind.COMPUTE, UnitKind.COLLECTIVE],
                    "op": [0, Op.ALL_REDUCE],
                    "group_id": [0, 1],
                    "seq": [None, 0],
                    "start_ns": [17, 1000],
                    "end_ns": [1000, 2000],
                    "label": [
                        f"jdoe's step in {SECRETS['windows']}",
                        HARMLESS,
                    ],
                    "payload_in": [None, digest],
                },
            )
            writer.add_scalars(rank, {"step": [0], "name": [f"loss@{SECRETS['node']}"], "value": [1.5]})
    return path


def everything(path: Path) -> bytes:
    """All bytes of a file, and all zstd frames in it decompressed."""
    raw = path.read_bytes()
    parts, place = [raw], raw.find(b"\x28\xb5\x2f\xfd")
    while place >= 0:
        try:
            parts.append(zstandard.ZstdDecompressor().decompressobj().decompress(raw[place:]))
        except zstandard.ZstdError:
            pass
        place = raw.find(b"\x28\xb5\x2f\xfd", place + 1)
    return b"\0".join(parts)


def test_nothing_secret_is_left_and_the_rest_is(tmp_path: Path) -> None:
    source = write_secret(tmp_path / "source.prism")
    report = redact(source, tmp_path / "out.prism", key="k")
    raw = everything(tmp_path / "out.prism")
    hidden = [*SECRETS.values(), "machine17", "mmuster", "blackbox", "night-owl", "/mnt/corpus", "with spaces", "jane"]
    for secret in hidden:
        assert secret.encode() not in raw, secret
    assert b"jdoe'" not in raw
    before, after = prismtrace.to_json(source), prismtrace.to_json(tmp_path / "out.prism")
    assert json.loads(after["metadata"]["job.argv"])[1:3] == ["--lr", "3e-4"]
    assert after["metadata"]["job.status"] == "aborted" and after["metadata"]["torch.version"] == "2.13.0"
    labels = after["ranks"]["0"]["units"]["columns"]["label"]
    assert labels[1] == HARMLESS, "words that only look similar stay"
    for rank in "01":
        old, new = (twin["ranks"][rank]["units"]["columns"] for twin in (before, after))
        assert {name: old[name] for name in new if name != "label"} == {
            name: new[name] for name in new if name != "label"
        }
        assert set(old) - set(new) == {"payload_in"}
    assert after["payloads"] == {} and report.num_payloads_dropped == 1 and report.reproducible
    assert {"path", "mail", "ip", "host", "user", "url"} <= set(report.counts)
    assert report.num_bytes_checked > (tmp_path / "out.prism").stat().st_size / 2
    assert prismtrace.validate(tmp_path / "out.prism") == []


def test_pseudonyms_follow_the_key(tmp_path: Path) -> None:
    source = write_secret(tmp_path / "source.prism")
    twins = []
    for name, key in (("a", "k"), ("b", b"k"), ("c", "other"), ("d", None)):
        redact(source, tmp_path / name, key=key)
        twins.append(prismtrace.to_json(tmp_path / name))
    assert twins[0] == twins[1] and twins[0] != twins[2] and twins[2] != twins[3]


def test_a_kept_payload_is_searched(tmp_path: Path) -> None:
    source = write_secret(tmp_path / "source.prism", payload=b"weights of " + SECRETS["mail"].encode() + bytes(300))
    with pytest.raises(TraceResultError, match=r"a mail of the source \(20 characters\) is still in payload"):
        redact(source, tmp_path / "out.prism", keep_payloads=True)
    assert not (tmp_path / "out.prism").exists() and len(list(tmp_path.iterdir())) == 1
    write_secret(tmp_path / "harmless.prism")
    redact(tmp_path / "harmless.prism", tmp_path / "out.prism", keep_payloads=True)
    with TraceReader(tmp_path / "out.prism") as reader:
        assert len(reader.payload_digests) == 1 and reader.units(0).payload_in[1] == reader.payload_digests[0]


@pytest.mark.parametrize("keep_payloads", [False, True])
def test_a_copy_without_payloads_promises_none(tmp_path: Path, keep_payloads: bool) -> None:
    source = write_secret(tmp_path / "source.prism")
    prismtrace.merge([source], source, metadata={"profile": "schedule-unit, payload"}, overwrite=True)
    redact(source, tmp_path / "out.prism", keep_payloads=keep_payloads)
    with TraceReader(tmp_path / "out.prism") as reader:
        assert reader.metadata["profile"] == ("schedule-unit, payload" if keep_payloads else "schedule-unit")


def test_all_strings_and_given_names(tmp_path: Path) -> None:
    source = write_secret(tmp_path / "source.prism")
    redact(source, tmp_path / "all", key="k", all_strings=True)
    raw = everything(tmp_path / "all")
    assert (
        b"attention" not in raw
        and b"loss" not in raw
        and b"dp" not in prismtrace.to_json(tmp_path / "all")["groups"][0]["name"].encode()
    )
    redact(source, tmp_path / "named", key="k", names=["attention"])
    label = prismtrace.to_json(tmp_path / "named")["ranks"]["1"]["units"]["columns"]["label"][1]
    assert label.startswith("layer.3.name-") and label.endswith("/dense torch.nn.Linear jdoexyz")
    for bad in ({"names": ["ab"]}, {"key": ""}):
        with pytest.raises(TraceUsageError):
            redact(source, tmp_path / "bad", **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
        "cub::DeviceReduce::Sum",
        "model.layers.0.mlp.down_proj",
        "torch/nn/modules/linear.py(114): forward",
        "fwd 3/4, 12:30:45, version 2.13.0",
        "nccl:all_reduce ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "aten::_scaled_dot_product_attention 1e-5 a@b:c",
    ][:6],
)
def test_ordinary_names_stay(text: str) -> None:
    made = Pseudonymiser(b"k")
    made.learn(text)
    assert made.replace(text) == text


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([*SECRETS.values(), "word", "attention.3", "0.5"]) | st.text("ab/.:@-_ 0", max_size=6),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([" ", ", ", "; ", " = ", "\n", "=", '"', "'"]),
)
def test_secrets_among_anything_are_found(words: list[str], joint: str) -> None:
    text = joint.join(words)
    made = Pseudonymiser(b"k")
    made.learn(text)
    replaced = made.replace(text)
    for secret in SECRETS.values():
        assert secret not in replaced
    assert "jdoe" not in replaced


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=8), st.booleans())
def test_any_text_can_be_redacted(tmp_path: Path, labels: list[str], all_strings: bool) -> None:
    path = tmp_path / "any"
    with TraceWriter(path, overwrite=True, metadata={"x-any": labels[0]}) as writer:
        writer.add_units(0, {"kind": [1] * len(labels), "label": labels})
    redact(path, tmp_path / "out", all_strings=all_strings, overwrite=True)
    assert prismtrace.validate(tmp_path / "out") == []
