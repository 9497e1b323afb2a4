"""What a launch shows while it runs: a live area on a terminal, lines elsewhere, and nothing with --quiet."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prism_sdk.runtime.gauges import DeviceGauge, Memory, host_memory
from prism_sdk.runtime.progress import Sample, Snapshot, _Pace, clock, one_line
from prism_sdk.runtime.stepboard import StepBoard, step_cell
from tests.runtime.terminal import Terminal

pytestmark = pytest.mark.timeout(240)

JOB = """
    import sys, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    print("rank", dist.get_rank(), "writes to", sys.stdout.isatty(), flush=True)
    linear = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    end = time.monotonic() + float(sys.argv[1])
    go_on = torch.ones(())
    step = 0
    while go_on.item() > 0:
        linear(torch.ones(4)).sum().backward()
        optimizer.step()
        go_on.fill_(float(time.monotonic() < end))
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
        if dist.get_rank() == 0 and step < 40:
            print("\\x1b[31mline of step", step, "\\x1b[0m", flush=True)
        step += 1
"""

# a launcher without torch: `count` ranks that write lines to the terminal as fast as they can
SHOW = """
    import os, subprocess, sys, time
    from prism_sdk.runtime.progress import Progress, Snapshot

    class Ranks:
        def snapshot(self):
            return Snapshot(num_running=2, num_parked=5, num_done=1, first_step=3, last_step=4, num_switches=7)

    WRITER = "import sys\\nfor i in range(300): sys.stdout.write(f'writer {sys.argv[1]} line {i} {40 * chr(120)}\\\\n')"
    if __name__ == "__main__":
        with Progress("record", environ=os.environ) as progress, progress.watch(Ranks(), after="writing"):
            time.sleep(0.6)
            writers = [subprocess.Popen([sys.executable, "-uc", WRITER, str(n)]) for n in range(int(sys.argv[1]))]
            for writer in writers:
                writer.wait()
            progress.say("said in between")
            time.sleep(float(sys.argv[2]))
        print("after the end")
"""


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(**size: int) -> Terminal:
        made.append(Terminal(**size))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def _record(folder: Path, *options: str, seconds: str) -> list[str | Path]:
    flags = ["--nproc-per-node", "3", "--slots", "1", "-o", "out.prism", *options]
    return [sys.executable, "-m", "prism_sdk.cli.main", "record", *flags, "--", _script(folder, JOB), seconds]


def _is_shown(terminal: Terminal, *words: str) -> bool:
    bottom = " ".join(terminal.lines()[-3:])
    return all(word in bottom for word in words)


def _assert_given_back(terminal: Terminal) -> None:
    margins = terminal.screen.margins
    assert margins is None or (margins.top, margins.bottom) == (0, terminal.screen.lines - 1)
    assert not any(line.startswith(("ranks  ", "memory  ")) for line in terminal.everything())


def test_the_live_area_stands_below_what_ranks_write(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = terminal(columns=100, rows=20)
    shown.start(_record(tmp_path, seconds="2"), folder=tmp_path)
    shown.until(lambda: _is_shown(shown, "loading torch"))
    shown.until(lambda: _is_shown(shown, "parked", "switches/s", "of 3 ranks", "host", "GiB", "step"))
    row = r"running \d, parked \d, (not started \d, )?done 0 of 3 ranks, [1-9]\d* switches/s"
    shown.until(lambda: re.search(row, shown.lines()[-2]) is not None)
    assert shown.finish() == 0
    _assert_given_back(shown)
    text = shown.everything()
    assert [line for line in text if line.startswith("line of step")] == [f"line of step {i}" for i in range(40)]
    assert sum("writes to True" in line for line in text) == 3  # ranks have the terminal itself
    assert any(line.startswith("prism record: done in") for line in text)
    assert b"\x1b[31mline of step 0 \x1b[0m" in shown.raw


def test_ctrl_c_gives_the_terminal_back(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = terminal(columns=80, rows=16)
    shown.start(_record(tmp_path, seconds="100"), folder=tmp_path)
    shown.until(lambda: _is_shown(shown, "step", "switches/s"))
    shown.type(b"\x03")
    assert shown.finish() == 130
    _assert_given_back(shown)
    assert any("interrupted by SIGINT" in line for line in shown.everything())


def test_through_a_pipe_there_are_lines_and_no_control_characters(tmp_path: Path) -> None:
    command = [str(word) for word in _record(tmp_path, seconds="2")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "\x1b" not in done.stderr.replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert sorted(line for line in done.stdout.splitlines() if "writes" in line) == [
        f"rank {rank} writes to False" for rank in range(3)
    ]
    lines = [line for line in done.stderr.splitlines() if "switches/s" in line]
    assert 1 <= len(lines) <= 3
    assert re.fullmatch(
        r"prism record: +\d+\.\d s  running \d, parked \d, (not started \d, )?done \d of 3 ranks; step \d+(\.\.\d+)?; "
        r"\d+ switches/s; host memory \d+\.\d of \d+\.\d GiB(, device .* GiB)?", lines[-1],
    )  # fmt: skip
    (last,) = re.findall(r"prism record: +(\d+\.\d) s  ", lines[-1])
    (end,) = re.findall(r"prism record: done in (\d+\.\d) s: ", done.stderr)
    assert float(last) <= float(end)  # both count from the start of the launch


def test_output_into_a_file_is_the_same_when_progress_is_on_the_terminal(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    shown = terminal(columns=80, rows=16)
    with (tmp_path / "stdout").open("wb") as file:
        shown.start([sys.executable, _script(tmp_path, SHOW), "1", "0.5"], folder=tmp_path, stdout=file.fileno())
        assert shown.finish() == 0
    assert shown.raw.count(b"\x1b7\x1b[1;13r") >= 2
    expected = [f"writer 0 line {i} " + "x" * 40 for i in range(300)] + ["after the end"]
    assert (tmp_path / "stdout").read_text().splitlines() == expected


def test_nothing_is_lost_or_torn_where_many_write(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = terminal(columns=90, rows=18)
    shown.start([sys.executable, _script(tmp_path, SHOW), "3", "0.3"], folder=tmp_path)
    assert shown.finish() == 0
    _assert_given_back(shown)
    text = [line for line in shown.everything() if line]
    for writer in range(3):
        own = [line for line in text if line.startswith(f"writer {writer} ")]
        assert own == [f"writer {writer} line {i} " + "x" * 40 for i in range(300)]
    assert text[-2:] == ["prism record: said in between", "after the end"]
    assert len(text) == 902


def test_the_area_follows_the_size_of_the_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = terminal(columns=90, rows=18)
    shown.start([sys.executable, _script(tmp_path, SHOW), "1", "3"], folder=tmp_path)
    shown.until(lambda: _is_shown(shown, "of 8 ranks", "host"))
    shown.resize(60, 12)
    shown.raw = b""
    shown.until(lambda: b"\x1b[1;9r" in shown.raw and _is_shown(shown, "of 8 ranks", "host"))
    assert max(map(len, shown.lines())) < 60
    assert shown.finish() == 0
    assert shown.screen.margins is None


@pytest.mark.parametrize(
    ("size", "env", "is_live", "is_coloured"),
    [
        ((90, 18), {}, True, True),
        ((90, 18), {"NO_COLOR": "1"}, True, False),
        ((90, 18), {"TERM": "dumb"}, False, False),
        ((90, 18), {"TERM": ""}, False, False),
        ((40, 18), {}, True, True),
        ((20, 18), {}, False, False),
        ((90, 5), {}, False, False),
    ],
)
def test_what_the_terminal_can_do_is_respected(
    terminal: Callable[..., Terminal], tmp_path: Path, size: tuple[int, int], env: dict[str, str],
    is_live: bool, is_coloured: bool,
) -> None:  # fmt: skip
    shown = terminal(columns=size[0], rows=size[1])
    shown.start([sys.executable, _script(tmp_path, SHOW), "0", "0.2"], folder=tmp_path, **env)
    assert shown.finish() == 0
    assert (b"\x1b[1;15r" in shown.raw) == is_live
    assert bool(re.search(rb"\x1b\[(\d+;)*3[0-7]m", shown.raw)) == is_coloured
    assert (b"\x1b" in shown.raw) == is_live
    rows = re.findall(rb"\x1b\[1[678];1H\x1b\[0m(.*?)\x1b\[0m\x1b\[K", shown.raw)
    assert all(len(re.sub(rb"\x1b\[[\d;]*m", b"", row).decode()) < size[0] for row in rows)


def test_sigterm_between_runs_of_ranks_gives_the_terminal_back(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    shown = terminal(columns=90, rows=18)
    shown.start([sys.executable, _script(tmp_path, SHOW), "0", "100"], folder=tmp_path)
    shown.until(lambda: _is_shown(shown, "of 8 ranks"))
    assert shown.process is not None
    shown.process.send_signal(signal.SIGTERM)
    assert shown.finish() == -signal.SIGTERM
    _assert_given_back(shown)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, for its job control")
def test_ctrl_z_gives_the_terminal_back_until_the_command_goes_on(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    shown = terminal(columns=90, rows=18)
    shown.start(["bash", "--norc", "--noprofile", "-i"], folder=tmp_path, PS1="$ ", HISTFILE="")
    shown.type(f"{sys.executable} {_script(tmp_path, SHOW).name} 0 100\n".encode())
    shown.until(lambda: _is_shown(shown, "of 8 ranks"))
    shown.type(b"\x1a")
    shown.until(lambda: any("Stopped" in line for line in shown.lines()))
    _assert_given_back(shown)
    shown.type(b"fg\n")
    shown.until(lambda: _is_shown(shown, "of 8 ranks"))
    shown.type(b"\x03")
    shown.until(lambda: not _is_shown(shown, "of 8 ranks"))
    _assert_given_back(shown)


def test_quiet_says_nothing_and_rich_is_imported_for_terminals_only(tmp_path: Path) -> None:
    code = """
    import sys, time
    from prism_sdk.runtime.progress import Progress
    import prism_sdk.runtime.launcher, prism_sdk.cli.main
    with Progress("record", quiet=sys.argv[1] == "quiet", environ={}) as progress:
        progress.say("hello")
        time.sleep(0.3)
    print("rich" in sys.modules)
    """
    script = _script(tmp_path, code)
    for word, said in (("quiet", ""), ("loud", "prism record: hello\n")):
        done = subprocess.run([sys.executable, script, word], capture_output=True, text=True, timeout=60, check=True)
        assert (done.stdout, done.stderr) == ("False\n", said)


def test_time_left_is_what_the_pace_so_far_says() -> None:
    pace = _Pace()
    assert pace.remaining_s(0, 10, now=100.0) is None
    assert pace.remaining_s(0, 10, now=110.0) is None
    assert pace.remaining_s(2, 10, now=120.0) == pytest.approx(80.0)  # 10 s a step
    assert pace.remaining_s(2, 10, now=125.0) == pytest.approx(75.0)
    assert pace.remaining_s(2, 10, now=500.0) == 0.0
    assert pace.remaining_s(10, 10, now=501.0) is None
    assert pace.remaining_s(1, 10, now=502.0) is None  # another run of the same stage starts anew


def test_a_line_holds_what_is_known() -> None:
    ranks = Snapshot(num_running=2, num_done=0, num_virtual=6, first_step=3, last_step=4, end_step=10)
    gib = 1 << 30
    sample = Sample("emulate", "", 5.0, ranks, None, 0.3, 75.4, Memory(3 * gib, 16 * gib), Memory(gib // 2, 139 * gib))
    assert one_line(sample) == (
        "running 2, done 0 of 2 ranks, 6 virtual; step 3..4 of 10; host memory 3.0 of 16.0 GiB, "
        "device memory 0.5 of 139.0 GiB; 1:15 left"
    )
    nothing = Sample("emulate", "contracting the graph", 5.0, None, None, None, None, None, None)
    assert one_line(nothing) == "contracting the graph"
    assert [clock(value) for value in (0.4, 65, 3661)] == ["0:00", "1:05", "1:01:01"]


def test_the_launcher_sees_the_steps_that_ranks_write() -> None:
    import os

    board = StepBoard(3)
    cell = step_cell(os.dup(board.fd), 1)
    assert cell is not None
    cell[0] = 7
    assert board.steps() == [0, 7, 0]
    os.close(board.fd)
    assert step_cell(-1, 0) is None


def test_memory_of_the_host_is_a_part_of_what_there_is() -> None:
    memory = host_memory()
    assert memory is not None
    assert 0 < memory.used_bytes < memory.total_bytes


@pytest.mark.gpu
def test_memory_of_devices_is_what_torch_sees() -> None:
    import torch

    gauge = DeviceGauge("0")
    before: Any = gauge.memory()
    kept = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda:0")
    after: Any = gauge.memory()
    assert after.used_bytes - before.used_bytes >= kept.numel()
    assert abs(after.total_bytes - torch.cuda.mem_get_info()[1]) < 4 << 30
