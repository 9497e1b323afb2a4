"""The library that serves device memory, over a driver played in host memory; and whole recordings over it."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.oncuda.checkpoint import Checkpointer
from prism_sdk.runtime.oncuda.paging import build

HERE = Path(__file__).parent
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not any(map(build.shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    for name, flags in (("libcuda.so.1", []), ("libcudart.so.13", ["-DRUNTIME"])):
        command = ["cc", "-shared", "-fPIC", "-O1", *flags, HERE / "fake_cuda.c", f"-Wl,-soname,{name}"]
        subprocess.run([*command, "-o", folder / name], check=True)
    return folder


def environment(driver: Path, tmp_path: Path, *, device_bytes: int, **more: str) -> dict[str, str]:
    device = tmp_path / "device"
    device.write_bytes(struct.pack("QQ", 0, device_bytes).ljust(4096, b"\0"))
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "FAKE_DEVICE": str(device), "LD_LIBRARY_PATH": str(driver), "PYTHONPATH": path, **more}


def in_use(tmp_path: Path) -> int:
    return int.from_bytes((tmp_path / "device").read_bytes()[:8], "little")


@pytest.mark.parametrize("sanitizer", ["none", "address,undefined"])
def test_memory_goes_and_comes_back_as_it_was(driver: Path, tmp_path: Path, sanitizer: str) -> None:
    library, more = build.compiled_library(), {}
    if sanitizer != "none":
        library = tmp_path / "pages.so"
        sources = [Path(build.__file__).with_name(name) for name in build._SOURCES]
        made = subprocess.run(
            ["cc", *build._FLAGS, "-Wl,-z,undefs", f"-fsanitize={sanitizer}", *sources, "-o", library, "-ldl"],
            capture_output=True, text=True,
        )  # fmt: skip
        runtime = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
        if made.returncode or not Path(runtime).is_file():
            pytest.skip("the compiler has no sanitizers")
        more = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, HERE / "pages_job.py", library, tmp_path], capture_output=True, text=True, timeout=100,
        env=environment(driver, tmp_path, device_bytes=256 * MIB, **more),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
    assert in_use(tmp_path) == 0


@pytest.mark.parametrize(("others", "mib"), [({}, 511), ({"FAKE_OTHERS": "1"}, 540)], ids=["alone", "with others"])
def test_the_context_counts_also_where_others_begin(
    driver: Path, tmp_path: Path, others: dict[str, str], mib: int
) -> None:
    for library in driver.iterdir():
        (tmp_path / library.name).symlink_to(library)
    command = ["cc", "-shared", "-fPIC", "-DMANAGEMENT", HERE / "fake_cuda.c", "-o", tmp_path / "libnvidia-ml.so.1"]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, HERE / "pages_job.py", "context", build.compiled_library()], capture_output=True, text=True,
        env=environment(tmp_path, tmp_path, device_bytes=1 << 30, **others), timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{mib - (mib == 512)}\n"), done.stderr


def test_what_a_real_run_has_beside_counts_under_a_limit(driver: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "pages_job.py", "others", build.compiled_library()], capture_output=True, text=True,
        timeout=60, env=environment(driver, tmp_path, device_bytes=512 << 20),
    )  # fmt: skip
    assert done.stdout == "good\n", done.stderr


def record(
    driver: Path, tmp_path: Path, *words: str, device_mib: int, options: tuple[str, ...]
) -> tuple[int, str, str]:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "prism_sdk.cli.main", "record", "-o", tmp_path / "o.prism", *options]
    done = subprocess.run(
        [*command, "--", HERE / "pages_job.py", "job", *words], capture_output=True, text=True, timeout=100,
        env=environment(driver, tmp_path, device_bytes=device_mib * MIB),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_ranks_that_do_not_fit_together_are_recorded(driver: Path, tmp_path: Path) -> None:
    options = ("--nproc-per-node", "5", "--slots", "2", "--device-memory", "100MiB", "--parked-memory", "45MiB",
               "--parked-disk", str(tmp_path))  # fmt: skip
    code, out, err = record(driver, tmp_path, "4", "3", device_mib=130, options=options)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"{rank} 20.0" for rank in range(5)]
    assert "device memory of parked ranks: out" in err
    assert in_use(tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"device", "o.prism"}


def test_ranks_hand_each_other_host_memory(driver: Path, tmp_path: Path) -> None:
    options = ("--nproc-per-node", "6", "--slots", "1", "--device-memory", "100MiB", "--parked-memory", "160MiB")
    code, out, err = record(driver, tmp_path, "4", "5", device_mib=130, options=options)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"{rank} 39.0" for rank in range(6)]
    found = re.search(r"out (\S+) GB in \d+ moves .* back .*, (\S+) GB of host memory taken", err)
    assert found is not None and float(found[1]) > 0.6 and float(found[2]) <= 0.2, err


def test_a_parked_rank_that_dies_is_named(driver: Path, tmp_path: Path) -> None:
    options = ("--nproc-per-node", "4", "--slots", "1", "--device-memory", "100MiB")
    code, _, err = record(driver, tmp_path, "4", "3", "--dies", device_mib=100, options=options)
    assert code == 1 and "rank 1 was killed by SIGKILL" in err, err


def test_the_helper_takes_processes_off_and_puts_them_back(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    helper, codes = Checkpointer(), []
    sock = helper.order("out", 7, codes.append)
    assert sock is not None and helper.order("in", 7, codes.append) is None
    helper.order("out", 1, codes.append)
    while len(codes) < 3:
        helper.hear()
    assert codes == [0, 0, 801]
    helper.order("out", 7, codes.append)
    helper.order("in", 7, codes.append)
    assert helper._process is not None
    helper._process.kill()
    while len(codes) < 5:
        helper.hear()
    assert codes[3:] in ([0, 0], [0, -1], [-1, -1]) and helper.sock in (sock, None)
    helper.close()
    assert helper.sock is None


def test_without_a_compiler_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_folders", lambda: iter([tmp_path]))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnsupportedError, match="without a C compiler"):
        build.compiled_library()


def test_what_the_compiler_says_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_folders", lambda: iter([tmp_path]))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-Dstate=1+"))
    with pytest.raises(UnsupportedError, match="failed:"):
        build.compiled_library()
    assert list(tmp_path.iterdir()) == []
