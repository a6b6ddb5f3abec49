"""What spans add up to, what the image of them holds, and that they cost next to nothing."""

import asyncio
import json
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor import AsyncLLM, SamplingParams
from nanoactor.runtime.tracing import SPAN_DTYPE, IntervalSet, NodeTrace, Track, TrackTrace
from nanoactor.server.observe import ObservationRoutes
from nanoactor.tracing import Trace
from nanoactor.tracing.export import join_snapshots
from nanoactor.tracing.summary import summarize
from tests.engine.harness import settled
from tests.tracing.complete import complete_trace

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def cover(pairs):
    begins = np.array([b for b, _ in pairs], np.int64)
    return IntervalSet(begins, begins + np.array([d for _, d in pairs], np.int64))


def points(pairs):
    return {p for begin, length in pairs for p in range(begin, begin + length)}


@given(spans, spans)
def test_covers_count_every_moment_once(one, two):
    assert cover(one).length == len(points(one))
    assert cover(one).overlap(cover(two)) == len(points(one) & points(two))
    inside = {p for p in points(one) if 10 <= p < 40}
    assert cover(one).clip(10, 40).length == len(inside)


@given(st.integers(1, 5), st.integers(0, 20))
def test_a_track_remembers_the_latest_spans_in_order(capacity, count):
    track = Track("track", capacity)
    kind = track.kind("work", "step")
    assert track.kind("work", "step") == kind
    for number in range(count):
        track.add(kind, number, 10 * number, 10 * number + 5)
    trace = track.trace("node")
    assert trace.spans["number"].tolist() == list(range(max(0, count - capacity), count))
    assert trace.lost == max(0, count - capacity)
    assert [k.name for k in trace.kinds] == ["work"]


def track(name, rows, kinds=(("work", "step", ""),), lost=0):
    made = Track(name)
    for kind in kinds:
        made.kind(*kind)
    recorded = np.array(rows, SPAN_DTYPE) if rows else np.empty(0, SPAN_DTYPE)
    return TrackTrace(name, "node", made.trace("node").kinds, recorded, lost)


def node(*tracks, cpu=0.0):
    return NodeTrace("node", list(tracks), cpu, 0)


def test_a_summary_counts_idle_time_only_while_there_is_load():
    device = track("runner.0 device", [(0, 1, 0, 1000, 2000), (0, 2, 0, 2500, 3500)])
    load = track("scheduler load", [(0, 0, 0, 1000, 3500)])
    scheduler = track(
        "scheduler",
        [(0, 1, 900, 1500, 1700), (0, 2, 1900, 2100, 2400)],
        [("schedule", "step", "r")],
    )
    late = track("frontend", [(0, 2, 0, 9000, 9100)])
    summary = summarize([node(device, load, scheduler, cpu=0.001), node(late)], tokens=10)
    assert summary.steps == 2
    assert summary.device_idle == pytest.approx(500 / 2500)
    assert summary.hidden == pytest.approx(200 / 600)
    assert summary.bottleneck == "scheduler"
    assert summary.cpu_us_per_token == {"scheduler": pytest.approx(100.0), "frontend": 0.0}
    (wait,) = summary.waits
    assert (wait.edge, wait.messages) == ("r -> scheduler (schedule)", 2)
    assert wait.mean == pytest.approx(0.4)


def test_a_summary_begins_where_every_track_remembers():
    device = track("runner.0 device", [(0, n, 0, 1000 * n, 1000 * n + 900) for n in range(10)])
    short = track("scheduler", [(0, 9, 0, 5000, 5100), (0, 9, 0, 8000, 8100)], lost=7)
    summary = summarize([node(device, short)], tokens=1)
    assert summary.steps == 4
    assert summary.lost == 7
    assert summary.seconds == pytest.approx((9900 - 5100) * 1e-9)


def test_nothing_happened_is_a_summary_too():
    summary = summarize([node(track("frontend", []))], tokens=0)
    assert summary.line == "no step was computed"


async def traced(tmp_path, **options):
    async with AsyncLLM("demo", device="simulated:2", **options) as llm:
        params = SamplingParams.for_model(max_tokens=60, ignore_eos=True)

        async def one(number):
            async for output in llm.generate({"prompt_token_ids": [number + 3] * 20}, params):
                final = output
            return final

        await asyncio.gather(*(one(number) for number in range(4)))
        trace = await complete_trace(llm, {*TRACKS, "runner.0 device"})
    trace.save(tmp_path / "trace.json")
    return trace, json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


TRACKS = {"frontend", "tokenizer.0", "scheduler", "blocks", "detokenizer", "runner.0"}
WORK = {"submit", "tokenize", "admit", "schedule", "bind", "prepare", "forward"}
WORK |= {"report", "detokenize", "deliver"}


@pytest.mark.parametrize("placement", ["default", "single"])
def test_arrows_follow_every_step_and_every_request_through_all_tracks(tmp_path, placement):
    trace, events = asyncio.run(traced(tmp_path, placement=placement))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) >= {*TRACKS, "runner.0 device"}
    work = {e["name"] for e in events if e["ph"] == "X"}
    assert work >= WORK
    through = TRACKS - {"tokenizer.0"}  # the first request is admitted by the frontend
    for category in ("step", "request"):
        arrows = [e for e in events if e.get("cat") == category and e["ph"] in "stf"]
        numbers = {e["id"] for e in arrows}
        assert len(numbers) == (4 if category == "request" else trace.summary().steps)
        # What a late frontend is told of several steps merges, and goes by the number of one.
        told = sorted({e["id"] for e in arrows if names[e["pid"], e["tid"]] == "frontend"})
        for number in numbers if category == "request" else [told[len(told) // 2]]:
            mine = [e for e in arrows if e["id"] == number]
            assert {names[e["pid"], e["tid"]] for e in mine} >= {*through, "runner.0 device"}
            assert [e["ph"] for e in mine] == ["s", *"t" * (len(mine) - 2), "f"]
            assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)
        tokenized = {e["id"] for e in arrows if names[e["pid"], e["tid"]] == "tokenizer.0"}
        assert len(tokenized) == (3 if category == "request" else 0)
    slices = {place: [] for place in names}
    for event in events:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"] + 0.001
            slices[event["pid"], event["tid"]].append((event["ts"] - 0.001, end))
    for event in events:
        if event["ph"] in "stf":  # an arrow ends in a span, or the viewer drops it
            assert any(
                begin <= event["ts"] <= end for begin, end in slices[event["pid"], event["tid"]]
            ), event


def test_arrows_lead_from_an_image_to_the_steps_that_encode_it(tmp_path):
    """Of which there are several, as it is larger than a step's budget."""

    async def main():
        config = dict(device="cpu", max_num_batched_tokens=16, max_num_seqs=2, num_kv_blocks=70)
        async with AsyncLLM("demo-vl", **config) as llm:
            image = np.random.default_rng(0).integers(0, 256, (192, 256, 3)).astype(np.uint8)
            prompt = {"prompt": "<|image_pad|>", "multi_modal_data": {"image": image}}
            async for _ in llm.generate(prompt, SamplingParams.for_model(max_tokens=2)):
                pass
            tracks = {"vision.0 decode", "runner.0 device"}
            (await complete_trace(llm, tracks)).save(tmp_path / "trace.json")

    asyncio.run(main())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    arrows = [e for e in events if e.get("cat") == "image" and e["ph"] in "stf"]
    tracks = [names[e["pid"], e["tid"]] for e in arrows]
    assert tracks == ["vision.0 decode", *["runner.0 device"] * 3]
    assert [e["ph"] for e in arrows] == ["s", "t", "t", "f"]
    assert [e["ts"] for e in arrows] == sorted(e["ts"] for e in arrows)
    encoding = [e for e in events if e["ph"] == "X" and e["name"] == "encode"]
    assert len(encoding) == 3
    for event, arrow in zip(encoding, arrows[1:], strict=True):
        assert event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"]


def test_a_step_costs_few_spans(tmp_path):
    """At 0.5 us a span, 18 of them are under 1 % of a step of 1 ms."""
    trace, _ = asyncio.run(traced(tmp_path))
    summary = trace.summary()
    spans = sum(len(track.spans) for node in trace.nodes for track in node.tracks)
    requests = 4 * 12  # what comes once for each of them
    assert (spans - requests) / summary.steps <= 18
    assert summary.steps >= 60
    assert summary.tokens == 240
    assert 0 <= summary.device_idle < 1
    assert 0 < summary.hidden <= 1
    assert "device idle" in summary.line


# -- the latest only ----------------------------------------------------------------------


def filled(spans, capacity=8):
    made = Track("track", capacity)
    kind = made.kind("work")
    for begin, end in spans:
        made.add(kind, 0, begin, end)
    return made


@pytest.mark.parametrize("count", [0, 3, 8, 9, 21])
@pytest.mark.parametrize("since", [0, 1, 55, 210, 10_000])
def test_a_track_tells_what_ended_after_a_moment(count, since):
    spans = [(10 * n, 10 * n + 5) for n in range(1, count + 1)]
    trace = filled(spans).trace("node", since)
    kept = [span for span in spans[-8:] if span[1] > since]
    assert [(begin, end) for _, _, _, begin, end in trace.spans.tolist()] == kept
    if count > 8 and not since:
        assert trace.lost == count - 8


def test_activity_is_the_busy_share_of_each_stretch():
    busy = filled([(0, 100), (150, 200), (160, 190), (290, 450)])
    shares = busy.activity(100, 100, 4)
    assert shares.tolist() == pytest.approx([0.5, 0.1, 1.0, 0.5])
    assert filled([]).activity(0, 10, 3).tolist() == [0, 0, 0]


def test_an_engine_tells_how_busy_its_actors_and_its_device_are():
    width, bins = 50_000_000, 8

    async def main():
        async with AsyncLLM("demo", device="simulated:5") as llm:
            stream = llm.generate(
                "ROMEO:", SamplingParams.for_model(max_tokens=300, ignore_eos=True)
            )
            await anext(stream)
            begin = time.monotonic_ns()
            await asyncio.sleep(1e-9 * width * bins)
            await stream.aclose()
            await settled(llm)  # nothing is under way any more
            tracks, shares = {*TRACKS, "grammar", "runner.0 device"}, {}
            trace = await complete_trace(llm, tracks, begin)
            while not shares.keys() >= tracks:  # for the same reason
                shares = await llm.activity(begin, width, bins)
        return shares, trace, begin, tracks

    shares, trace, begin, tracks = asyncio.run(main())
    assert set(shares) == tracks | {"scheduler load"}
    edges = begin + width * np.arange(bins + 1)
    for node_ in trace.nodes:
        for track_ in node_.tracks:
            assert (track_.spans["end"] > begin).all()
            covered = IntervalSet(track_.spans["begin"], track_.spans["end"])
            busy = np.diff(covered.covered_before(edges)) / width
            assert shares[track_.track] == pytest.approx(busy, abs=1e-6), track_.track
    means = {name: track_.mean() for name, track_ in shares.items() if name != "scheduler load"}
    assert max(means, key=means.get) == "runner.0 device"
    assert means["scheduler"] > 0
    assert shares["tokenizer.0"].max() == 0
    assert trace.summary().steps > 0


def test_a_trace_in_parts_is_the_trace(tmp_path):
    whole = filled([(10 * n, 10 * n + 5) for n in range(6)], 64)
    first = NodeTrace("n", [whole.trace("n")], 1.0, 55)
    whole.add(whole.kind("more"), 0, 60, 65)
    second = NodeTrace("n", [whole.trace("n", 55)], 2.0, 70)
    (made,) = join_snapshots([[first], [second]])
    assert made.cpu_seconds == 2.0
    assert made.tracks[0].spans.tolist() == whole.trace("n").spans.tolist()
    assert [kind.name for kind in made.tracks[0].kinds] == ["work", "more"]
    command = [sys.executable, "-m", "nanoactor.tracing.export"]
    snapshots = pickle.dumps([[first], [second]])
    done = subprocess.run(command, input=snapshots, capture_output=True, check=True, timeout=30)
    Trace((made,), 0).save(tmp_path / "trace.json")
    assert done.stdout == (tmp_path / "trace.json").read_bytes()
    assert len([e for e in json.loads(done.stdout)["traceEvents"] if e["ph"] == "X"]) == 7


def test_a_span_that_is_remembered_late_is_in_a_trace_of_many_looks_once():
    """A device's step is over before its loop, which is late, remembers it."""
    track = Track("runner.0 device")
    kind = track.kind("forward", "step")
    looks = []

    def look(since):
        looks.append([NodeTrace("runner.0", [track.trace("runner.0", since)], 0.0, 0)])

    track.add(kind, 1, 0, 100)
    look(0)
    track.add(kind, 2, 100, 200)  # was over at the first look
    track.add(kind, 3, 200, 300)
    look(50)
    (node,) = join_snapshots(looks)
    assert node.tracks[0].spans["number"].tolist() == [1, 2, 3]
    assert node.tracks[0].spans["end"].tolist() == [100, 200, 300]


def test_a_watcher_looks_back_for_what_is_remembered_late():
    """The server's trace: a span whose end lies before a look, remembered after it, is in it."""
    track = Track("runner.0 device")
    kind = track.kind("forward", "step")

    class Engine:
        async def trace(self, since):
            number = 2 * len(track.spans())
            now = time.monotonic_ns()
            track.add(kind, number, now - 90_000_000, now - 80_000_000)
            found = NodeTrace("runner.0", [track.trace("runner.0", since)], 0.0, 0)
            track.add(kind, number + 1, now - 70_000_000, now - 60_000_000)
            return Trace((found,), 0)

    watcher = object.__new__(ObservationRoutes)
    (node,) = join_snapshots(asyncio.run(watcher._record(Engine(), 0.7)))
    assert node.tracks[0].spans["number"].tolist() == [0, 1, 4]
