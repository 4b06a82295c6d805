"""Options that `bench/` would not look at are refused, and the one that is meant is named."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import distributed  # noqa: E402
import modes  # noqa: E402
import options  # noqa: E402
import train  # noqa: E402

# A value for each option that takes one.
VALUES = {
    "kind": "ddp", "allocator": "native", "record": "run.trace", "kinds": "ddp", "others": "xseg", "limited": "xseg", "limit": "1.02x", "least": "xseg",
    "probes": "1.01x", "commit": "abc", "have": "a.jsonl", "out": "b.jsonl", "runs": "gpt2", "stages": "rounds", "gpus": "0", "device": "cuda",
    "length": "64",
}  # fmt: skip
SWITCHES = {"deterministic", "turns", "register", "share", "small", "compare"}


@pytest.fixture(autouse=True)
def outside_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def words(name: str) -> list[str]:
    return [modes.option(name), *([] if name in SWITCHES else [VALUES.get(name, "3")])]


def said(program: str, *given: str) -> list[str]:
    """What is wrong with a command line, without running it."""
    parser = importlib.import_module(program).arguments()
    args = parser.parse_args(given)
    check = modes.of_distributed if program == "distributed" else modes.of_train
    return check(options.given(parser, given), args)


def test_options_that_are_given_are_told_from_defaults() -> None:
    parser = distributed.arguments()
    assert options.given(parser, []) == set()
    # Also where they are given what is their default, by a shorter name, with `=`, or without a value.
    line = ["--limit", "1.02x", "--repe", "1", "--kinds=ddp,fsdp2", "--least", "--have", "--small"]
    assert options.given(parser, line) == {"limit", "repeat", "kinds", "least", "have", "small"}
    assert parser.parse_args([]).limit == 1.02, "the parser's own defaults stay"


def test_every_option_is_for_one_run_or_a_comparison_or_both() -> None:
    all_of_them = set(vars(distributed.arguments().parse_args([])))
    both = {"steps", "warmup", "register", "share", "hang", "width", "layers", "vocabulary", "batch", "length", "small"}
    assert both | {"compare", "summary"} | set(modes.ONE_RUN) | set(modes.COMPARISON) == all_of_them
    assert not set(modes.ONE_RUN) & set(modes.COMPARISON)
    for name in both:
        assert said("distributed", *words(name)) == said("distributed", "--compare", *words(name)) == []


@pytest.mark.parametrize("name", list(modes.COMPARISON))
def test_one_run_refuses_what_is_for_a_comparison(name: str) -> None:
    (why,) = said("distributed", *words(name))
    assert why.startswith(f"{modes.option(name)} is for --compare; ")
    named = {"limit": "--bytes", "ranks": "--nproc-per-node", "kinds": "--kind ", "minutes": "--steps", "exact_runs": "--deterministic"}  # fmt: skip
    assert named.get(name, "") in why


@pytest.mark.parametrize("name", list(modes.ONE_RUN))
def test_a_comparison_refuses_what_is_for_one_run(name: str) -> None:
    (why,) = said("distributed", "--compare", *words(name))
    assert why.startswith(f"{modes.option(name)} is for one run, which torchrun starts; ")
    named = {"kind": "--kinds", "allocator": "--others", "bytes": "--limit", "deterministic": "--exact-runs"}
    assert named.get(name, "") in why


def test_a_report_refuses_what_would_run_something() -> None:
    assert said("distributed", "--summary", "a", "--commit", "abc", "--others", "xseg", "--limited", "xseg") == []
    assert said("train", "--summary", "a", "--report", "b", "--commit", "abc", "--limited", "async") == []
    for program, known in (("distributed", distributed.arguments()), ("train", train.arguments())):
        for name in set(vars(known.parse_args([]))) - modes.REPORT - {"child"}:
            why = f"{modes.option(name)} is not for --summary, which runs nothing"
            assert said(program, "--summary", "a", *words(name)) == [why]


def test_what_only_a_search_or_probes_take_is_refused_without() -> None:
    compare = ("distributed", "--compare")
    assert said(*compare, "--probes", "1.01x") == ["--probes is for the allocators of --least; name them there"]
    assert said(*compare, "--resolution", "0.01") == ["--resolution is for --least, which is not given"]
    assert said(*compare, "--probe-steps", "3") == ["--probe-steps is for --least, which is not given"]
    assert said(*compare, "--least", "--resolution", "0.01", "--probe-steps", "3") == []
    probes = (*compare, "--least", "--probes", "1.01x")
    assert said(*probes, "--repeat", "0", "--probe-steps", "3", "--others", "", "--have", "a") == []
    for name in ("repeat", "turn", "limit", "minutes", "exact_runs"):
        why = f"{modes.option(name)} has no use with --probes, which only tries its limits"
        assert said(*probes, *words(name)) == [why]
    both = ["--resolution is for the search, which --probes replaces"]
    assert said(*probes, "--resolution", "0.01") == said("train", "--probes", "1.01x", "--resolution", "0.01") == both


def test_recordings_are_of_xseg() -> None:
    assert said("distributed", "--record", "a", "--allocator", "xseg") == []
    assert said("distributed", "--record", "a") == [
        "--record is for what xseg allocates; give --allocator xseg with it"
    ]


def test_train_refuses_what_is_for_a_stage_that_is_left_out() -> None:
    assert said("train", *(word for names in modes.STAGES.values() for name in names if name != "resolution" for word in words(name))) == []  # fmt: skip
    for stage, names in modes.STAGES.items():
        other = "others" if stage != "others" else "rounds"
        for name in names:
            why = f"{modes.option(name)} is for the stage {stage}, which --stages leaves out"
            assert said("train", "--stages", other, *words(name)) == [why]
            if name != "probes":
                assert said("train", "--stages", stage, *words(name)) == []
    assert said("train", "--least", "", "--probes", "1.01x") == [
        "--probes is for the allocators of --least; name them there"
    ]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_torchrun_starts_one_run_and_no_comparison(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert said("distributed", "--allocator", "xseg") == said("distributed", "--summary", "a") == []
    (why,) = said("distributed", "--compare", "--ranks", "2")
    assert why == f"--compare starts torchrun itself; start it by python alone, without {name} in the environment"
    (why,) = said("train")
    assert "train.py is no rank of torchrun's" in why and f"without {name}" in why


@pytest.mark.parametrize(
    "line, why",
    [
        ("distributed --limit 1.02x --ranks 2", "distributed.py: error: --ranks is for --compare; torchrun's --nproc-per-node"),
        ("distributed --compare --kind ddp", "error: --kind is for one run, which torchrun starts; --kinds names"),
        ("distributed --compare --probes 1.01x", "error: --probes is for the allocators of --least"),
        ("distributed --compare --summary x", "error: --compare is not for --summary"),
        ("train --stages rounds --probes 1.01x", "train.py: error: --probes is for the stage least"),
        ("distributed --register", "--register is for GPUs: on the host there is no NCCL"),
        ("distributed --compare --small --register", "--register is for GPUs: on the host there is no NCCL"),
        ("distributed --allocator xseg --record x", "--record is for GPUs: on the host nothing is allocated"),
    ],
)  # fmt: skip
def test_the_programs_say_so_and_end_with_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, why: str
) -> None:
    name, *given = line.split()
    program = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "gpus_here", lambda: 0)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given])
    status: object = None
    try:
        status = program.main()
    except SystemExit as ended:
        status = ended.code
    shown = capsys.readouterr()
    assert status == 2 and why in shown.err and shown.out == "" and list(tmp_path.iterdir()) == []


def test_a_parsers_words_come_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", default="3", type=int)
    monkeypatch.setattr(sys, "argv", ["program", "--most=3"])
    assert options.given(parser) == {"most"}
