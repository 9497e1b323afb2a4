"""From a launch line to a ``LaunchConfig``: torchrun's spellings, checks before anything starts, reports after.

The launcher itself is replaced by one that keeps the config; running jobs is tested with the runtime.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from prism_sdk.cli.main import run
from prism_sdk.errors import RankFailedError
from prism_sdk.runtime.config import LaunchConfig, LaunchMode, LaunchResult, PayloadMode, StepRange
from prism_sdk.testing.scripted import write_trace
from prismtrace import GraphKind, ProcessGroup, TraceWriter


class Launcher:
    """Stands where the launcher stands, and keeps what it is asked to do."""

    def __init__(self) -> None:
        self.config: LaunchConfig | None = None
        self.exit_code = 0
        self.error: Exception | None = None

    def launch(self, config: LaunchConfig) -> LaunchResult:
        self.config = config
        if self.error is not None:
            raise self.error
        return LaunchResult(
            exit_code=self.exit_code,
            output=config.output,
            world_size=config.world_size,
            wall_ns=1_500_000_000,
            summary={"steps": 3, "loss": float("nan"), "path": config.output},
        )

    @property
    def asked(self) -> LaunchConfig:
        assert self.config is not None, "nothing was launched"
        return self.config


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "lab.py").write_text("")
    monkeypatch.chdir(tmp_path)
    stand_in = Launcher()
    module = ModuleType("prism_sdk.runtime.launcher")
    module.launch = stand_in.launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prism_sdk.runtime.launcher", module)
    return stand_in


def graph(kind: GraphKind, *, world_size: int = 4) -> str:
    path = Path(f"{kind.name.lower()}.prism")
    step_ns = None if kind is GraphKind.BARE else 1000
    write_trace(path, kind=kind, world_size=world_size, ranks=range(world_size), num_steps=2, step_ns=step_ns)
    return str(path)


def test_defaults(launcher: Launcher) -> None:
    assert run(["observe", "train.py"]) == 0
    assert launcher.asked == LaunchConfig(mode=LaunchMode.OBSERVE, target="train.py", output=Path("observed.prism"))


@pytest.mark.parametrize("separator", [["--"], []])
def test_options_of_prism_end_at_the_script(launcher: Launcher, separator: list[str]) -> None:
    assert run(["record", "-o", "x.prism", *separator, "train.py", "--lr", "1", "--slots", "9", "-o", "y"]) == 0
    config = launcher.asked
    assert (config.target, config.is_module, config.output) == ("train.py", False, Path("x.prism"))
    assert config.arguments == ("--lr", "1", "--slots", "9", "-o", "y")
    assert config.num_slots is None


@pytest.mark.parametrize("words", [["-m", "lab", "-x"], ["--", "-m", "lab", "-x"], ["--module", "--", "lab", "-x"]])
def test_modules(launcher: Launcher, words: list[str]) -> None:
    assert run(["observe", *words]) == 0
    assert (launcher.asked.target, launcher.asked.is_module, launcher.asked.arguments) == ("lab", True, ("-x",))


@pytest.mark.parametrize("dash", ["-", "_"])
def test_torchrun_spellings(launcher: Launcher, dash: str) -> None:
    flags = {
        "--nproc-per-node": "4",
        "--nnodes": "2:2",
        "--node-rank": "1",
        "--master-addr": "10.0.0.1",
        "--master-port": "29500",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "10.0.0.1:29400",
        "--rdzv-id": "my_job",
        "--local-ranks-filter": "0,2-3",
    }
    words = [f"--{name[2:].replace('-', dash)}={value}" for name, value in flags.items()]
    assert run(["observe", *words, "--standalone", "train.py", "--keep_this", "a_b"]) == 0
    config = launcher.asked
    assert (config.nproc_per_node, config.num_nodes, config.node_rank, config.world_size) == (4, 2, 1, 8)
    assert (config.master_addr, config.master_port) == ("10.0.0.1", 29500)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.rdzv_id) == ("c10d", "10.0.0.1:29400", "my_job")
    assert (config.local_ranks_filter, config.standalone) == ((0, 2, 3), True)
    assert config.arguments == ("--keep_this", "a_b")


def test_flags_of_torchrun_without_meaning_are_accepted_and_named(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["observe", "--max_restarts=0", "-r", "3", "train.py"]) == 0
    text = capsys.readouterr().err
    assert "--max-restarts is ignored" in text and "--redirects is ignored" in text and "--tee" not in text


def test_everything_else(launcher: Launcher) -> None:
    words = "record --world-size 8 --slots 2 --steps 2:5 --payloads results --no-pin -q"
    assert run([*words.split(), "train.py"]) == 0
    config = launcher.asked
    assert (config.world_size, config.num_slots, config.steps) == (8, 2, StepRange(2, 5))
    assert (config.payloads, config.pin, config.quiet) == (PayloadMode.RESULTS, False, True)


def test_kernels_of_some_steps(launcher: Launcher) -> None:
    assert run(["observe", "--kernels", "3:5", "train.py"]) == 0
    assert launcher.asked.kernels == StepRange(3, 5)
    assert run(["emulate", "--graph", graph(GraphKind.CALIBRATED), "--kernels", "1:", "train.py"]) == 0
    assert launcher.asked.kernels == StepRange(1)


def test_options_of_plugins(launcher: Launcher) -> None:
    words = ["--graph", graph(GraphKind.BARE), "-O", "passes=1", "-O", "transfers=x=y", "-O", "prefetch_bytes=9"]
    assert run(["calibrate", *words, "train.py"]) == 0
    assert launcher.asked.options == {"passes": "1", "transfers": "x=y", "prefetch_bytes": "9"}
    Path("mine.py").write_text(ANY_OPTION)
    words = [*words, "--plugin", "mine.py", "--strategy", "mine", "-O", "anything=1"]
    assert run(["calibrate", *words, "train.py"]) == 0


# a strategy that does not say which options it reads
ANY_OPTION = """
from prism_sdk.abc import CalibrationStrategy
from prism_sdk.hookspecs import hookimpl

class Mine(CalibrationStrategy):
    name, description = "mine", "test"
    def calibrate(self, context):
        raise NotImplementedError

@hookimpl
def prism_register_strategies():
    return [Mine()]
"""
BROKEN_IMPORTER = """
from prism_sdk.hookspecs import hookimpl

@hookimpl
def prism_register_importers():
    raise RuntimeError("no such engine")
"""


def test_a_launch_asks_plugins_only_for_what_it_needs(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """But what the user named is to work as a whole."""
    assert run(["observe", "train.py"]) == 0
    Path("broken.py").write_text(BROKEN_IMPORTER)
    launcher.config = None
    assert run(["observe", "--plugin", "broken.py", "train.py"]) == 2
    text = capsys.readouterr().err
    assert "no such engine" in text and "correct broken.py, or leave the option out" in text
    assert "uninstall" not in text
    assert launcher.config is None
    code = (
        "import sys\nfrom prism_sdk.cli import choosing\nfrom prism_sdk.runtime.config import *\n"
        "from prism_sdk.settings import Settings\n"
        "config = LaunchConfig(mode=LaunchMode.RECORD, target='x', output='y')\n"
        "choosing.checked_plugins(config, Settings.from_environ())\n"
        "print([name for name in sys.modules if 'import' in name and name.startswith('prismtrace_')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_the_world_of_calibrate_and_emulate_is_the_graphs(launcher: Launcher) -> None:
    assert run(["calibrate", "--graph", graph(GraphKind.BARE), "train.py"]) == 0
    assert (launcher.asked.world_size, launcher.asked.graph) == (4, Path("bare.prism"))
    calibrated = graph(GraphKind.CALIBRATED, world_size=8)
    assert run(["emulate", "--graph", calibrated, "--sandbox", "0,5-7", "--", "train.py"]) == 0
    assert (launcher.asked.world_size, launcher.asked.sandbox) == (8, (0, 5, 6, 7))
    assert run(["emulate", "--graph", calibrated, "--nproc-per-node", "8", "train.py"]) == 0


def test_json_is_the_last_line_and_strict(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    launcher.exit_code = 7
    assert run(["observe", "--json", "train.py"]) == 1
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["exit_code"] == 7 and values["mode"] == "observe" and values["wall_ns"] == 1_500_000_000
    assert values["summary"] == {"steps": 3, "loss": None, "path": "observed.prism"}


@pytest.mark.parametrize("mode", ["observe", "record"])
def test_a_program_that_communicates_nothing_is_remarked(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    with TraceWriter("x.prism", world_size=1) as writer:
        writer.add_units(0, {"kind": [1]})
    assert run([mode, "-o", "x.prism", "train.py"]) == 0
    assert f"prism {mode}: warning: the program ran, and nothing of it was seen" in capsys.readouterr().err
    assert run([mode, "-q", "-o", "x.prism", "train.py"]) == 0
    assert capsys.readouterr().err == ""
    with TraceWriter("x.prism", world_size=1, overwrite=True) as writer:
        writer.add_group(ProcessGroup(5, ranks=(0,)))
        writer.add_units(0, {"kind": [1]})
    assert run([mode, "-o", "x.prism", "train.py"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_the_report_goes_to_stderr(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["observe", "train.py"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "  steps: 3\n  loss: nan\n"
    launcher.exit_code = 7
    assert run(["observe", "train.py"]) == 1
    assert "prism observe: failed with exit code 7" in capsys.readouterr().err
    launcher.exit_code = 0
    assert run(["observe", "-q", "train.py"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_failed_rank_is_a_message(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    launcher.error = RankFailedError(1, exit_code=1, traceback_text="ValueError: lr", file="observed.prism")
    assert run(["observe", "train.py"]) == 1
    text = capsys.readouterr().err
    assert "rank 1 failed" in text and "ValueError: lr" in text and "kept in observed.prism" in text
    assert "defect of Prism" not in text


BAD = {
    "kernels of step 0": (["observe", "--kernels", ":2", "train.py"], 2, "begin with 1"),
    "values of an observed run": (["observe", "--payloads", "full", "train.py"], 2, "keeps no values"),
    "kernels of CPUs": (["observe", "--kernels", "1:2", "--device", "cpu", "train.py"], 2, "leave one of them out"),
    "kernels of a recording": (["record", "--kernels", "1:2", "train.py"], 2, "No such option"),
    "no script": (["observe"], 2, "which script?"),
    "script missing": (["observe", "--", "none.py"], 2, "'none.py' does not exist"),
    "elastic": (["observe", "--nnodes", "1:4", "train.py"], 2, "elastic"),
    "no ranks": (["observe", "--nproc-per-node", "0", "train.py"], 2, "not between 1"),
    "node rank": (["observe", "--nnodes", "2", "--node-rank", "2", "train.py"], 2, "not below --nnodes 2"),
    "no such local rank": (["observe", "--local-ranks-filter", "1-2", "train.py"], 2, "the local ranks 0 to 0"),
    "contradiction": (["record", "--world-size", "2", "--nproc-per-node", "3", "train.py"], 2, "contradict"),
    "sandbox text": (["emulate", "--graph", "calibrated.prism", "--sandbox", "0,x", "train.py"], 2, "'x' in '0,x'"),
    "sandbox rank": (["emulate", "--graph", "calibrated.prism", "--sandbox", "4", "train.py"], 2, "ranks 0 to 3"),
    "world size": (["emulate", "--graph", "calibrated.prism", "--nproc-per-node", "2", "train.py"], 2, "has 4"),
    "bare to emulate": (["emulate", "--graph", "bare.prism", "train.py"], 2, "prism calibrate"),
    "emulated to calibrate": (["calibrate", "--graph", "emulated.prism", "train.py"], 2, "result of an emulation"),
    "slots of an emulation": (
        ["emulate", "--graph", "calibrated.prism", "--slots", "2", "train.py"],
        2,
        "--slots has no meaning",
    ),
    "no graph": (["emulate", "train.py"], 2, "--graph"),
    "graph missing": (["emulate", "--graph", "none.prism", "train.py"], 3, "none.prism"),
    "graph not a trace": (["emulate", "--graph", "train.py", "train.py"], 3, "train.py"),
    "output folder": (["observe", "-o", "none/x.prism", "train.py"], 2, "there is no folder none"),
    "output is a folder": (["observe", "-o", ".", "train.py"], 2, "is a folder"),
    "output is the graph": (["calibrate", "--graph", "bare.prism", "-o", "bare.prism", "train.py"], 2, "graph itself"),
    "strategy": (["calibrate", "--graph", "bare.prism", "--strategy", "none", "train.py"], 2, "no strategy is called"),
    "backend": (["emulate", "--graph", "calibrated.prism", "--backend", "none", "train.py"], 2, "no backend is called"),
    "adapter": (["observe", "--adapter", "none", "train.py"], 2, "no adapter is called 'none'"),
    "plugin": (["observe", "--plugin", "not_there_at_all", "train.py"], 2, "'not_there_at_all' is broken"),
    "option": (["observe", "-O", "repeats", "train.py"], 2, "key=value"),
    "unknown option": (
        ["record", "-O", "nonsense=1", "train.py"],
        2,
        "no -O option 'nonsense'\n  prism record has none",
    ),
    "value of a strategy": (["calibrate", "--graph", "bare.prism", "-O", "passes=0", "train.py"], 2, "at least 1"),
    "value of warm-up": (["calibrate", "--graph", "bare.prism", "-O", "warmup_steps=-1", "train.py"], 2, "at least 0"),
    "value of a backend": (["emulate", "--graph", "calibrated.prism", "-O", "occupy=x", "train.py"], 2, "whole number"),
    "too many blocks": (
        ["emulate", "--graph", "calibrated.prism", "-O", "occupy=99999999999", "train.py"],
        2,
        "occupy=99999999999 is not in 0 .. 1024",
    ),
    "blocks in slices": (["calibrate", "--graph", "bare.prism", "-O", "occupy=x", "train.py"], 2, "whole number"),
    "an option twice": (["calibrate", "--graph", "bare.prism", "-O", "passes=1", "-O", "passes=2", "train.py"], 2,
                        "'passes' is given 2 times"),
    "value of another": (
        ["emulate", "--graph", "calibrated.prism", "--backend", "gloo", "-O", "lead_us=-1", "train.py"],
        2,
        "at least 0",
    ),
    "unknown option of a strategy": (
        ["calibrate", "--graph", "bare.prism", "-O", "pases=1", "train.py"],
        2,
        "with 'slices' and 'local' there are: cluster, device_pool_bytes, occupy, passes, prefetch_bytes, transfers,",
    ),
    "unknown option of a backend": (
        ["emulate", "--graph", "calibrated.prism", "-O", "x=1", "train.py"],
        2,
        "with 'local' there are: device_pool_bytes, occupy, prefetch_bytes",
    ),
}


@pytest.mark.parametrize(("words", "code", "message"), BAD.values(), ids=BAD)
def test_mistakes_are_found_before_anything_starts(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    for kind in (GraphKind.BARE, GraphKind.CALIBRATED, GraphKind.EMULATED):
        graph(kind)
    assert run(words) == code
    assert message in capsys.readouterr().err
    assert launcher.config is None
