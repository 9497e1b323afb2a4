"""Runs the c10d suite under plain gloo and under Prism, and holds one against the other; the cases live elsewhere.

The references run once a session, without a launcher. ``observe`` passes every call through, ``record`` computes every
result itself with ranks that take turns: both must return what gloo returns.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism_sdk.testing.workplace import Workplace

pytest.importorskip("torch")

SUITE = Path(__file__).with_name("c10d_suite.py")
sys.path.insert(0, str(SUITE.parent))

from compare import compare_results, first_difference, read_results  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_suite(launcher: list[str], out: Path, *, extra: tuple[str, ...] = ()) -> Path:
    """Run the suite under ``launcher`` and return the folder of its results; fail with its output if it died."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [*launcher, str(SUITE), "--out", str(out), *extra]
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=500
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-6000:]}", pytrace=False)
    return out


def torchrun(world_size: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    workplace = Workplace(tmp_path_factory.mktemp("prism"), environment={"PYTHONUNBUFFERED": "1"}, timeout_s=500)
    yield workplace
    workplace.close()


def prism(
    workplace: Workplace, verb: str, world_size: int, folder: Path, *options: str, extra: tuple[str, ...] = ()
) -> Path:
    """Run the suite under `prism VERB`, as `run_suite` does."""
    results = folder / "results"
    where = ("--nproc-per-node", str(world_size), "-o", folder / "trace.prism")
    ended = workplace.run(verb, *where, *options, "--", SUITE, "--out", results, *extra)
    if ended.code != 0:
        pytest.fail(f"prism {verb} ended with {ended.code}:\n{(ended.out + ended.err)[-6000:]}", pytrace=False)
    return results


def plain(world_size: int, out: Path, *extra: str) -> Path:
    return run_suite([sys.executable], out, extra=("--ranks", str(world_size), *extra))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain(4, tmp_path_factory.mktemp("gloo") / "results")


@pytest.fixture(scope="session")
def reference_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain(2, tmp_path_factory.mktemp("gloo") / "results", "--no-slow")


@pytest.fixture(scope="session")
def recorded(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prism(workplace, "record", 4, tmp_path_factory.mktemp("recorded"), "--slots", "2")


def check(reference: Path, other: Path, *, tolerance: float | None = None, with_slow: bool = True) -> None:
    comparison = compare_results(reference, other, tolerance=tolerance, with_slow=with_slow)
    if comparison.failures:
        pytest.fail(str(comparison), pytrace=False)
    print(comparison)


def test_observe_returns_what_gloo_returns(reference: Path, workplace: Workplace, tmp_path: Path) -> None:
    check(reference, prism(workplace, "observe", 4, tmp_path))


def test_observe_under_torchrun_returns_what_gloo_returns(
    reference_of_two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRISM_MODE", "observe")
    monkeypatch.setenv("PRISM_OUTPUT", str(tmp_path / "real.prism"))
    # what differs from the test above is how ranks are started: two are enough
    check(reference_of_two, run_suite(torchrun(2), tmp_path / "results", extra=("--no-slow",)))


def test_record_returns_what_gloo_returns(reference: Path, recorded: Path) -> None:
    check(reference, recorded)


def test_record_with_one_slot_is_bit_identical(recorded: Path, workplace: Workplace, tmp_path: Path) -> None:
    check(recorded, prism(workplace, "record", 4, tmp_path, "--slots", "1"), tolerance=0.0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_record_at_other_sizes_returns_what_gloo_returns(
    request: pytest.FixtureRequest, workplace: Workplace, world_size: int, tmp_path: Path
) -> None:
    if world_size == 2:
        expected: Path = request.getfixturevalue("reference_of_two")
    else:
        expected = plain(world_size, tmp_path / "plain", "--no-slow")
    check(expected, prism(workplace, "record", world_size, tmp_path, "--slots", "2", extra=("--no-slow",)))


def test_the_comparison_sees_differences(reference: Path, tmp_path: Path) -> None:
    for file in reference.glob("rank-*.pickles"):
        results = read_results(file)
        if file.name == "rank-2.pickles":
            results["all_reduce_op_sum"]["value"][3] += 1
            results["ddp"]["value"][0][0] += 0.01
            del results["barriers"]
            results["send_recv_ring"] = {"error": "RuntimeError: no"}
            results["send_to_self"] = {"error": "WrongAnswer: zeros"}
        with (tmp_path / file.name).open("wb") as written:
            for result in results.items():
                pickle.dump(result, written)
    comparison = compare_results(reference, tmp_path)
    found = {(difference.case, difference.rank) for difference in comparison.failures}
    names = ("all_reduce_op_sum", "ddp", "barriers", "send_recv_ring", "send_to_self")
    assert found == {(name, 2) for name in names}


def test_first_difference_names_the_place() -> None:
    assert first_difference({"a": [1, 2]}, {"a": [1, 3]}, tolerance=0) == "result['a'][1] is 3, not 2"
    assert first_difference([1], [1.0], tolerance=0) == "result[0] is a float, not a int: 1.0"
    assert first_difference([None, "x"], [None, "x"], tolerance=0) is None
