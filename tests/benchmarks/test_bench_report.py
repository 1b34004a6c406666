"""What is printed and written: machine, versions, seed, sizes, rows, figures."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import _options
from benchmarks._machine import Machine, cpu_model, this_machine, versions
from benchmarks._measure import Spread
from benchmarks._plot import Panel, draw
from benchmarks._report import Report, seconds, text_table, times

QUIET = Machine("Some CPU", 2, 8.0, "Linux x86_64", (0.1, 0.2, 0.3))


def report() -> Report:
    return Report(
        "made_up",
        QUIET,
        {"python": "3.11", "vllm": "0.32"},
        seed=7,
        sizes={"grid": "1/2"},
        rows=[{"name": "a", "ttft": 0.5, "count": 3, "why": None}],
        figures={"hit": 14.123456789},
        notes=["short"],
    )


def test_the_json_has_what_a_reader_needs(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    report().write(path)
    read = json.loads(path.read_text())
    assert {"machine", "versions", "seed", "rows", "figures"} <= read.keys()
    assert read["machine"]["cpu"] == "Some CPU"
    assert read["machine"]["load_before"] == [0.1, 0.2, 0.3]
    assert read["machine"]["quiet"] is True
    assert read["figures"] == {"hit": 14.123457}
    assert read["rows"] == [{"name": "a", "ttft": 0.5, "count": 3, "why": None}]


def test_what_is_no_number_is_no_figure() -> None:
    bad = report()
    bad.figures["hit"] = float("nan")
    with pytest.raises(ValueError, match=r"figures\['hit'\] is nan"):
        bad.as_json()


def test_rows_are_flat() -> None:
    bad = report()
    bad.rows.append({"list": [1]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"rows\[1\]\['list'\] is a list"):
        bad.as_json()


def test_the_heading_says_where_it_comes_from() -> None:
    heading = report().heading()
    for part in ("Some CPU, 2 cores, 8.0 GiB", "load before 0.10", "vllm 0.32", "seed      7", "grid 1/2"):
        assert part in heading
    assert "WARNING" not in heading
    assert "hit  14.1" in report().footing()
    assert "note: short" in report().footing()


def test_a_busy_machine_is_warned_about() -> None:
    busy = replace(QUIET, load_before=(1.3, 0.2, 0.1))
    assert "load average was 1.30 on 2 cores" in busy.warning
    assert "WARNING" in replace(report(), machine=busy).heading()
    assert replace(busy, cores=16).warning == ""


def test_this_machine_and_its_versions() -> None:
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert machine.cpu
    assert {"python", "spanflow", "numpy"} <= versions().keys()


def test_the_name_of_the_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Chip 9\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Chip 9"
    assert cpu_model(tmp_path / "none") != ""


def test_a_table_aligns_numbers_and_leaves_gaps() -> None:
    rows: list[dict[str, str | int | float | bool | None]] = [
        {"name": "stock", "n": 1876.0, "share": 0.25},
        {"name": "ours, moved", "n": 3, "share": None},
    ]
    assert text_table({"name": "who", "n": "tokens", "share": "share"}, rows).split("\n") == [
        "who          tokens  share",
        "-----------  ------  -----",
        "stock          1876   0.25",
        "ours, moved       3",
    ]


def test_numbers_with_their_range() -> None:
    assert seconds(Spread(0.131, 0.128, 0.14, 3)) == "0.131 (0.128-0.140)"
    assert times(Spread(14.63, 9.5, 15.2, 3)) == "14.6x (9.50-15.2)"


def test_options_are_the_same_everywhere() -> None:
    options = _options.parser("some", "about", repeats=5).parse_args(["--quick", "--json", "a.json", "--seed", "3"])
    assert (options.quick, options.json, options.seed, options.repeats) == (True, Path("a.json"), 3, 5)
    assert _options.whole_numbers("8, 1,8") == (1, 8)


def test_a_bad_number_ends_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _options.parser("some", "about", repeats=5).parse_args(["--repeats", "0"])
    assert "expected a whole number of at least 1, got '0'" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _options.check_plot(None)
    with pytest.raises(SystemExit, match=r"--plot needs matplotlib .* run pip install -e '\.\[plot\]'"):
        _options.check_plot(Path("x.png"))


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = {"stock": {1: Spread(1.0, 0.9, 1.2, 3), 8: Spread(3.0, 2.9, 3.2, 3)}, "ours": {8: Spread(0.2, 0.1, 0.3, 3)}}
    path = tmp_path / "new" / "plot.png"
    draw(path, "made up", [Panel("a", "tokens", lines), Panel("b", "tokens", lines)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_importing_a_benchmark_loads_nothing_heavy() -> None:
    code = "import sys, benchmarks.rag_ttft, benchmarks.judge_ttft; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "vllm", "transformers", "matplotlib"} & set(done.stdout.split()) == set()
