"""The tables of a page from the results of `bench/gpu.py` and `bench/gpu_vllm.py`, and a plot.

    python bench/gpu_report.py [FILE] [--results DIRECTORY] [--check | --plot IMAGE]

What stands between `<!-- gpu-tables -->` and `<!-- /gpu-tables -->` in FILE (docs/gpu.md) is
replaced by tables of medians from `bench/results/*-gpu-*.json`: nanoactor at depth 2 compared with
vLLM, a ratio above 1 meaning that nanoactor is faster, and depth 1 compared with depth 2. Files are
pooled by GPU, model, engine and depth; for each test (of decode: each figure of a batch) the latest
date and file name count. Depths are compared within a day. Files of runs with `--sync`,
`--enforce-eager`, `--plan-lead`, `--max-depth` or `--no-decode-kernel` are left out, as are those
of other benchmarks. `--check` writes nothing: its exit status is 1 if FILE would change. The status
is 2 where there are no markers or no results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- gpu-tables -->", "<!-- /gpu-tables -->"
MODELS = {
    "0.6b": "Qwen3-0.6B",
    "8b": "Qwen3-8B",
    "8b-fp8": "Qwen3-8B in FP8",
    "30b-a3b": "Qwen3-30B-A3B",
    "30b-a3b-fp8": "Qwen3-30B-A3B in FP8",
}
BATCHES = ("1", "2", "4", "8", "16", "64", "256")
VARIANTS = {"--sync", "--enforce-eager", "--plan-lead", "--max-depth", "--no-decode-kernel"}
SINGLE, OURS, PEER = "nanoactor (depth 1)", "nanoactor (depth 2)", "vLLM"
DASH = "-"


class ReportError(Exception):
    """There is nothing to report, or nowhere to put it."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure: what it is called, where a run holds it, and how it reads."""

    name: str
    unit: str
    keys: tuple[str, ...]
    style: str
    more_is_faster: bool = False

    def of(self, tests: dict) -> float | None:
        return value(tests, *self.keys)

    def text(self, number: float | None) -> str:
        return DASH if number is None else format(number, self.style)

    def experts(self, *engines: dict) -> str:
        """Return how many distinct experts per layer the rows of each engine have chosen."""
        if self.keys[0] != "decode":
            return ""
        found = [value(tests, *self.keys[:2], "distinct_experts", "mean") for tests in engines]
        if None in found:
            return ""
        ours, theirs = found
        return f" (distinct experts per layer: nanoactor {ours:.0f}, vLLM {theirs:.0f})"

    def ratio(self, ours: float | None, theirs: float | None) -> float | None:
        """Return how many times as fast ours is."""
        if not ours or not theirs:
            return None
        return ours / theirs if self.more_is_faster else theirs / ours


WORKLOAD = Row("workload", "output tokens/s", ("workload", "tokens_per_s"), ",.0f", True)
DECODE = [
    Row(f"decode, batch {n}", "ms per step", ("decode", n, "ms_per_step"), ".3f") for n in BATCHES
]
OVERLAP = [
    Row(f"batch {n}", "ms per step", ("decode", n, "window_ms_per_step"), ".3f")
    for n in ("1", "16", "64", "256")
]
ROWS = [
    WORKLOAD,
    *DECODE,
    Row("TTFT, 512 tokens", "ms", ("latency", "ttft_ms"), ".2f"),
    Row("one request", "ms per token", ("latency", "ms_per_token"), ".3f"),
    Row("prefill, 8 x 8,192", "tokens/s", ("prefill", "tokens_per_s"), ",.0f", True),
    Row("prefill, 16 x 4,000", "tokens/s", ("prompts", "tokens_per_s"), ",.0f", True),
    Row("burst, 256 x 560", "tokens/s", ("burst", "560", "tokens_per_s"), ",.0f", True),
]


@dataclasses.dataclass
class Setup:
    """All that was measured with one model on one GPU; tests by engine and depth."""

    gpu: str
    model: str
    engines: dict[str, str] = dataclasses.field(default_factory=dict)
    """The newest version of each engine."""
    runs: dict[str, dict] = dataclasses.field(default_factory=dict)
    days: dict[str, dict[str, dict]] = dataclasses.field(default_factory=dict)
    """The same by date, ascending."""

    def add(self, results: dict) -> None:
        engine = results["engine"]
        version = results.get("versions", {}).get(engine.lower())
        released, _, _ = engine.partition("+")
        self.engines[engine.split()[0]] = f"{released} {version}" if version else released
        for run in results["runs"]:
            name = f"{engine.split()[0]} (depth {run['depth']})" if "depth" in run else engine
            merge(self.runs.setdefault(name, {}), run)
            merge(self.days.setdefault(results["date"], {}).setdefault(name, {}), run)

    def depths(self, row: Row) -> tuple[dict, dict]:
        """Tests at depth 1 and 2, of the last day on which a row was measured at depth 1, if any:
        between days more has changed than the depth."""
        pooled = self.runs
        for runs in self.days.values():
            if row.of(runs.get(SINGLE, {})) is not None:
                pooled = runs
        return pooled.get(SINGLE, {}), pooled.get(OURS, {})

    def tests(self, name: str) -> dict:
        return self.runs.get(name, {})

    @property
    def model_name(self) -> str:
        return MODELS.get(self.model, self.model)

    @property
    def title(self) -> str:
        return f"{self.model_name}, {self.gpu} ({', '.join(sorted(self.engines.values()))})"

    def pair(self, row: Row) -> tuple[float | None, float | None]:
        return row.of(self.tests(OURS)), row.of(self.tests(PEER))


def merge(tests: dict, run: dict) -> None:
    for name, found in run.items():
        if name == "decode":
            batches = tests.setdefault(name, {})
            for batch, figures in found.items():
                known = batches.setdefault(batch, {})
                if "ms_per_step" in figures:  # an older count belongs to an older time
                    known.pop("distinct_experts", None)
                known.update(figures)
        else:
            tests[name] = found


def value(tests: dict, *keys: str) -> float | None:
    """The median where there are several; None where it was not measured."""
    found = tests
    for key in keys:
        found = found.get(key)
        if found is None:
            return None
    if isinstance(found, list):
        return statistics.median(found) if found else None
    return found


def read_results(directory: Path) -> list[Setup]:
    """By GPU, then by model."""
    files = []
    for path in sorted(directory.glob("*-gpu-*.json")):
        results = json.loads(path.read_text())
        if counts(results):
            files.append(results)
        else:
            print(f"left out: {path}", file=sys.stderr)
    setups: dict[tuple[str, str], Setup] = {}
    for results in sorted(files, key=lambda results: results["date"]):
        key = results["gpu"], results["model"]
        setups.setdefault(key, Setup(*key)).add(results)
    if not setups:
        raise ReportError(f"{directory} has no results: no *-gpu-*.json that counts")
    order = [*MODELS]
    return sorted(
        setups.values(),
        key=lambda s: (s.gpu, order.index(s.model) if s.model in order else len(order), s.model),
    )


def counts(results: dict) -> bool:
    """Tell whether it is of these benchmarks, with the settings that the tables are about."""
    words = {word.partition("=")[0] for word in results.get("command", "").split()}
    return {"engine", "runs"} <= results.keys() and not words & VARIANTS


# -- tables -------------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """In Markdown; the columns after the first `words` are numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def peer_table(setup: Setup) -> str | None:
    rows = []
    for row in ROWS:
        ours, theirs = setup.pair(row)
        if ours is not None or theirs is not None:
            ratio = row.ratio(ours, theirs)
            rows.append(
                [
                    f"{row.name}: {row.unit}{row.experts(setup.tests(OURS), setup.tests(PEER))}",
                    row.text(ours),
                    row.text(theirs),
                    DASH if ratio is None else f"{ratio:.2f}",
                ]
            )
    if not rows:
        return None
    return f"**{setup.title}**\n\n" + table(["", OURS, PEER, "ratio"], rows)


def overlap_rows(setup: Setup) -> Iterable[list[str]]:
    for row in OVERLAP:
        batch, (one, two) = row.keys[1], setup.depths(row)
        times = row.of(one), row.of(two)
        idle = [value(tests, "decode", batch, "device_idle_share") for tests in (one, two)]
        if any(number is not None for number in (*times, *idle)):
            ratio = row.ratio(times[1], times[0])
            yield [
                setup.model_name,
                batch,
                *map(row.text, times),
                percent(None if ratio is None else ratio - 1, "+.1f"),
                *(percent(share, ".2f") for share in idle),
            ]


def percent(share: float | None, style: str) -> str:
    return DASH if share is None else f"{share * 100:{style}} %"


def overlap_table(gpu: str, setups: list[Setup]) -> str | None:
    head = ["model", "batch", "depth 1: ms per step", "depth 2: ms per step", "gain"]
    head += ["device idle, depth 1", "device idle, depth 2"]
    rows = [cells for setup in setups for cells in overlap_rows(setup)]
    return f"**Pipeline depth 1 and 2, {gpu}**\n\n" + table(head, rows) if rows else None


def tables(setups: list[Setup]) -> str:
    parts = [peer_table(setup) for setup in setups]
    for gpu in dict.fromkeys(setup.gpu for setup in setups):
        parts.append(overlap_table(gpu, [setup for setup in setups if setup.gpu == gpu]))
    return "\n\n".join(part for part in parts if part is not None)


def replaced(page: str, text: str) -> str:
    """The page with its tables replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ReportError(f"it needs {BEGIN} and, after it, {END}, each once")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


# -- plot ---------------------------------------------------------------------------------


def plot(setups: list[Setup], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(setup, rows) for setup in setups if (rows := rows_with_peer(setup))]
    if not shown:
        raise ReportError("nothing to plot: no figure of both engines on one GPU")
    figure, axes = pyplot.subplots(
        len(shown), 1, figsize=(9, 3.6 * len(shown)), sharey=True, squeeze=False
    )
    for axis, (setup, rows) in zip(axes[:, 0], shown, strict=True):
        draw(axis, setup, rows)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper right", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.25 / (3.6 * len(shown))))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def rows_with_peer(setup: Setup) -> list[Row]:
    return [row for row in (WORKLOAD, *DECODE) if None not in setup.pair(row)]


def draw(axis, setup: Setup, rows: list[Row]) -> None:
    pairs = [setup.pair(row) for row in rows]
    ratios = [row.ratio(*pair) for row, pair in zip(rows, pairs, strict=True)]
    heights = [ratios, [1.0] * len(rows)]
    for side, (name, color) in enumerate(((OURS, "C0"), (PEER, "0.75"))):
        places = [number + (side - 0.5) * 0.38 for number in range(len(rows))]
        bars = axis.bar(places, heights[side], 0.36, label=name, color=color)
        labels = [row.text(pair[side]) for row, pair in zip(rows, pairs, strict=True)]
        # Upright, as neighbours' numbers are wider than their bars.
        axis.bar_label(bars, labels, label_type="center", rotation=90, fontsize=9)
    names = ["\n".join([*row.name.split(", "), row.unit.replace(" ", "\n", 1)]) for row in rows]
    axis.set_xticks(range(len(rows)), names, fontsize=9)
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("speed, vLLM = 1")
    axis.set_title(f"{setup.model_name}, {setup.gpu}", loc="left", fontsize=11)
    axis.margins(y=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "docs" / "gpu.md")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true")
    what.add_argument("--plot", type=Path)
    args = parser.parse_args(arguments)
    try:
        setups = read_results(args.results)
        page = args.file.read_text()
        after = replaced(page, tables(setups))
        if args.plot:
            plot(setups, args.plot)
    except (ReportError, OSError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 2
    if args.check:
        print(f"{args.file}: the tables {'agree' if after == page else 'differ'}")
        return int(after != page)
    if after != page:
        args.file.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
