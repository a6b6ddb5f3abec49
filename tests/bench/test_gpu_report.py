"""The tables that `bench/gpu_report.py` makes of results, and the page they stand in."""

import json
from pathlib import Path

import pytest

from bench import gpu_report

ROOT = Path(__file__).parent.parent.parent
PAGE = f"# Title\n\n{gpu_report.BEGIN}\nold\n{gpu_report.END}\n\nAfter.\n"


def decode(milliseconds, idle=None):
    times = [milliseconds, milliseconds - 0.1, milliseconds + 5]
    row = {"ms_per_step": times, "window_ms_per_step": milliseconds}
    return row if idle is None else row | {"device_idle_share": idle, "device_ms_per_step": 1.0}


@pytest.fixture
def write(tmp_path):
    """Writes a results file."""

    def write(name, engine, runs, model="0.6b", **changes):
        results = {
            "command": f"python bench/gpu.py --model {model}",
            "date": "2026-01-02",
            "engine": engine,
            "model": model,
            "gpu": "GPU A",
            "versions": {"python": "3.11.7", "torch": "2.11", "vllm": "0.99"},
            "runs": runs,
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(results | changes))

    return write


def tables(tmp_path):
    return gpu_report.tables(gpu_report.read_results(tmp_path))


def cells(text, start):
    """The numbers of the only row that starts so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return line.removeprefix(f"| {start} |").strip(" |").split(" | ")


def write_both(write):
    one = {"depth": 1, "decode": {"1": decode(3.0, 0.25), "16": decode(4.0)}}
    two = {
        "depth": 2,
        "start_s": 3.0,
        "workload": {"tokens_per_s": [9000.0, 12000.0, 12500.0], "device_idle_share": 0.01},
        "latency": {"ttft_ms": [9.0, 10.0, 11.0, 12.0], "ms_per_token": [2.0]},
        "decode": {"1": decode(2.4, 0.015), "64": decode(6.0, 0.0)},
        "gap": {"largest_gap_ms": 3.0},
    }
    peer = {
        "start_s": 60.0,
        "workload": {"tokens_per_s": [10000.0]},
        "latency": {"ttft_ms": [21.0], "ms_per_token": [1.0]},
        "decode": {"1": decode(3.6), "256": decode(20.0)},
    }
    write("a-gpu-ours", "nanoactor 0.1.0", [one, two])
    write("a-gpu-vllm", "vLLM", [peer])


def test_both_engines_side_by_side(tmp_path, write):
    write_both(write)
    text = tables(tmp_path)
    assert "**Qwen3-0.6B, GPU A (nanoactor 0.1.0, vLLM 0.99)**" in text
    assert "|  | nanoactor (depth 2) | vLLM | ratio |\n| --- | ---: | ---: | ---: |" in text
    assert cells(text, "workload: output tokens/s") == ["12,000", "10,000", "1.20"]
    assert cells(text, "decode, batch 1: ms per step") == ["2.400", "3.600", "1.50"]
    assert cells(text, "TTFT, 512 tokens: ms") == ["10.50", "21.00", "2.00"]
    assert cells(text, "one request: ms per token") == ["2.000", "1.000", "0.50"]


def test_what_was_not_measured_is_a_dash_and_what_nobody_measured_no_row(tmp_path, write):
    write_both(write)
    text = tables(tmp_path)
    assert cells(text, "decode, batch 64: ms per step") == ["6.000", "-", "-"]
    assert cells(text, "decode, batch 256: ms per step") == ["-", "20.000", "-"]
    assert "decode, batch 8:" not in text
    assert "prefill" not in text


def test_depth_1_beside_depth_2(tmp_path, write):
    write_both(write)
    text = tables(tmp_path)
    assert "**Pipeline depth 1 and 2, GPU A**" in text
    row = ["3.000", "2.400", "+25.0 %", "25.00 %", "1.50 %"]
    assert cells(text, "Qwen3-0.6B | 1") == row
    assert cells(text, "Qwen3-0.6B | 16") == ["4.000", "-", "-", "-", "-"]
    assert cells(text, "Qwen3-0.6B | 64") == ["-", "6.000", "-", "-", "0.00 %"]
    assert "| Qwen3-0.6B | 256 |" not in text


def test_depths_are_compared_within_a_day(tmp_path, write):
    write_both(write)
    later = [{"depth": 2, "decode": {"1": decode(0.6, 0.1)}}]
    write("b-gpu-new", "nanoactor 0.1.0", later, date="2026-02-01")
    text = tables(tmp_path)
    assert cells(text, "decode, batch 1: ms per step")[0] == "0.600"
    assert cells(text, "Qwen3-0.6B | 1")[:2] == ["3.000", "2.400"]


def test_distinct_experts_stand_beside_the_times_of_a_step(tmp_path, write):
    for name, engine, count in (("ours", "nanoactor 0.2.0", 51.4), ("vllm", "vLLM", 53)):
        rows = {"8": decode(2.0) | {"distinct_experts": {"mean": count, "min": 1, "max": 99}}}
        run = {"depth": 2, "decode": rows} if name == "ours" else {"decode": rows}
        write(f"a-gpu-{name}", engine, [run])
    start = "decode, batch 8: ms per step (distinct experts per layer: nanoactor 51, vLLM 53)"
    assert cells(tables(tmp_path), start) == ["2.000", "2.000", "1.00"]
    run = {"depth": 2, "decode": {"8": decode(1.0)}}
    write("b-gpu-ours", "nanoactor 0.2.0", [run], date="2026-02-01")
    assert cells(tables(tmp_path), "decode, batch 8: ms per step") == ["1.000", "2.000", "2.00"]


def test_a_table_names_the_newest_version_of_each_engine(tmp_path, write):
    write_both(write)
    run = {"depth": 2, "workload": {"tokens_per_s": [1.0]}}
    write("b-gpu-new", "nanoactor 0.2.0+g989285c5a", [run], date="2026-02-01")
    assert "**Qwen3-0.6B, GPU A (nanoactor 0.2.0, vLLM 0.99)**" in tables(tmp_path)


def test_one_engine_alone(tmp_path, write):
    write("a-gpu-vllm", "vLLM", [{"prefill": {"tokens_per_s": [1234.5, 1233.5]}}])
    text = tables(tmp_path)
    assert cells(text, "prefill, 8 x 8,192: tokens/s") == ["-", "1,234", "-"]
    assert "depth 1" not in text


def test_models_in_order_of_size_and_gpus_apart(tmp_path, write):
    run = {"depth": 2, "decode": {"1": decode(2.0)}}
    write("a-gpu-8b", "nanoactor 0.1.0", [run], model="8b")
    write("b-gpu-small", "nanoactor 0.1.0", [run])
    write("c-gpu-vllm", "vLLM", [{"decode": {"1": decode(1.0)}}], gpu="GPU B")
    titles = [line for line in tables(tmp_path).splitlines() if line.startswith("**")]
    assert titles == [
        "**Qwen3-0.6B, GPU A (nanoactor 0.1.0)**",
        "**Qwen3-8B, GPU A (nanoactor 0.1.0)**",
        "**Qwen3-0.6B, GPU B (vLLM 0.99)**",
        "**Pipeline depth 1 and 2, GPU A**",
    ]


def test_files_are_pooled_and_the_latest_counts_for_each_test_and_batch(tmp_path, write):
    def ours(**tests):
        return [{"depth": 2, **tests}]

    rate = {"tokens_per_s": [500.0]}
    engine = "nanoactor 0.1.0"
    write("z-gpu-old", engine, ours(workload=rate, decode={"1": decode(9.0), "8": decode(8.0)}))
    later = ours(decode={"1": decode(2.0, 0.5)})
    write("a-gpu-new", engine, later, date="2026-02-01")
    write("b-gpu-new", engine, ours(decode={"1": decode(3.0)}), date="2026-02-01")
    write("c-other", engine, ours(workload={"tokens_per_s": [1.0]}), date="2026-03-01")
    text = tables(tmp_path)
    assert cells(text, "workload: output tokens/s") == ["500", "-", "-"]
    assert cells(text, "decode, batch 8: ms per step") == ["8.000", "-", "-"]
    assert cells(text, "Qwen3-0.6B | 1") == ["-", "3.000", "-", "-", "50.00 %"], (
        "of the file before"
    )


def test_runs_with_other_settings_and_other_benchmarks_are_left_out(tmp_path, write, capsys):
    write_both(write)
    before = tables(tmp_path)
    run = {"decode": {"1": decode(0.5)}}
    for number, flag in enumerate(("--sync", "--enforce-eager", "--plan-lead=late")):
        command = f"python bench/gpu.py {flag} --out x"
        name = f"z-gpu-{number}"
        write(name, "vLLM", [run], command=command, date="2027-01-01")
    (tmp_path / "kernels-gpu-a.json").write_text(json.dumps({"cases": []}))
    assert tables(tmp_path) == before
    assert capsys.readouterr().err.count("left out: ") == 4


def call(tmp_path, page, *flags):
    return gpu_report.main([str(page), "--results", str(tmp_path), *flags])


def test_the_page_changes_between_its_markers_alone(tmp_path, write):
    write_both(write)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert call(tmp_path, page) == 0
    text = page.read_text()
    assert text.startswith(f"# Title\n\n{gpu_report.BEGIN}\n\n**Qwen3-0.6B")
    assert text.endswith(f" |\n\n{gpu_report.END}\n\nAfter.\n")
    assert "old" not in text
    assert call(tmp_path, page) == 0
    assert page.read_text() == text


def test_check_says_whether_the_page_would_change_and_writes_nothing(tmp_path, write, capsys):
    write_both(write)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert call(tmp_path, page, "--check") == 1
    assert "differ" in capsys.readouterr().out
    assert page.read_text() == PAGE
    call(tmp_path, page)
    assert call(tmp_path, page, "--check") == 0
    page.write_text(page.read_text().replace("12,000", "12,001"))
    assert call(tmp_path, page, "--check") == 1


@pytest.mark.parametrize(
    "text",
    [
        "no markers\n",
        f"{gpu_report.BEGIN}\n",
        f"{gpu_report.END}\n",
        f"{gpu_report.END}\n{gpu_report.BEGIN}\n",
        PAGE + PAGE,
    ],
)
@pytest.mark.parametrize("flags", [(), ("--check",)])
def test_a_page_without_its_two_markers_is_an_error(tmp_path, write, capsys, text, flags):
    write_both(write)
    page = tmp_path / "page.md"
    page.write_text(text)
    assert call(tmp_path, page, *flags) == 2
    error = capsys.readouterr().err
    assert "page.md" in error
    assert gpu_report.BEGIN in error
    assert page.read_text() == text


def test_no_results_are_an_error_and_the_page_stays(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert call(tmp_path, page) == 2
    assert "no results" in capsys.readouterr().err
    assert page.read_text() == PAGE


def test_the_tables_in_the_readme_are_those_of_the_results():
    page = (ROOT / "docs" / "gpu.md").read_text()
    if gpu_report.BEGIN not in page and gpu_report.END not in page:
        pytest.skip("docs/gpu.md has no tables yet")
    assert gpu_report.main(["--check"]) == 0, "run python bench/gpu_report.py"
