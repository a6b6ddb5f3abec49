"""Descriptions of spans, made of statistics alone."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanoactor.telemetry.spans import FinishedRequest, spans_of

WHOLE = FinishedRequest(
    request_id="request-1",
    model="demo",
    operation="chat",
    arrival=10.0,
    scheduled=11.0,
    first_token=13.0,
    last_token=16.0,
    finished=17.0,
    prompt_tokens=5,
    cached_tokens=2,
    output_tokens=4,
    finish_reasons=("stop",),
    parameters={"temperature": 0.7, "max_tokens": 9},
)


def stages(request):
    return {span.name: (span.start, span.end) for span in spans_of(request)[1:]}


def attributes(request):
    return dict(spans_of(request)[0].attributes)


def test_a_request_and_its_stages():
    whole = spans_of(WHOLE)[0]
    assert (whole.name, whole.start, whole.end, whole.error) == ("llm_request", 10, 17, "")
    assert stages(WHOLE) == {"queue": (10, 11), "prefill": (11, 13), "decode": (13, 16)}


def test_attributes_have_the_names_of_the_conventions_and_of_vllm():
    assert attributes(WHOLE) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "nanoactor",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.request.id": "request-1",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_in_queue": 1,
        "gen_ai.latency.time_to_first_token": 3,
        "gen_ai.latency.time_in_model_prefill": 2,
        "gen_ai.latency.time_in_model_decode": 3,
        "gen_ai.latency.time_in_model_inference": 5,
        "gen_ai.latency.e2e": 7,
    }


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (dict(scheduled=None, first_token=None, last_token=None), []),
        (dict(first_token=None, last_token=None), ["queue", "prefill"]),
        # The engine has died: nobody has told when the first step began.
        (dict(scheduled=None), ["decode"]),
        (dict(last_token=None), ["queue", "prefill"]),
    ],
)
def test_a_stage_whose_limits_nobody_knows_has_no_span(changes, wanted):
    assert [*stages(dataclasses.replace(WHOLE, **changes))] == wanted


def test_the_only_step_of_a_pooling_request_is_its_prefill():
    pooled = dataclasses.replace(
        WHOLE, operation="embeddings", first_token=None, last_token=None, finish_reasons=()
    )
    assert stages(pooled) == {"queue": (10, 11), "prefill": (11, 17)}
    assert "gen_ai.usage.output_tokens" not in attributes(pooled)
    assert "gen_ai.response.finish_reasons" not in attributes(pooled)


def test_an_error_is_named_by_its_class():
    failed = dataclasses.replace(WHOLE, error="InvalidRequest", prompt_tokens=0)
    assert spans_of(failed)[0].error == "InvalidRequest"
    assert attributes(failed)["error.type"] == "InvalidRequest"
    assert "gen_ai.usage.input_tokens" not in attributes(failed), "it was never tokenized"


times = st.none() | st.floats(0, 100)


@given(st.floats(0, 100), st.floats(0, 100), times, times, times)
@example(arrival=0.0, finished=1.0, scheduled=1.0, first=None, last=0.0)
@example(arrival=-1.0, finished=1.0, scheduled=0.0, first=-0.5, last=-0.75)
def test_times_are_in_order_whatever_the_clocks_say(arrival, finished, scheduled, first, last):
    request = dataclasses.replace(
        WHOLE,
        arrival=arrival,
        finished=finished,
        scheduled=scheduled,
        first_token=first,
        last_token=last,
    )
    whole, *children = spans_of(request)
    at = whole.start
    for child in children:
        assert at <= child.start <= child.end <= whole.end
        at = child.end
    latencies = [v for name, v in whole.attributes.items() if name.startswith("gen_ai.latency.")]
    assert all(seconds >= 0 for seconds in latencies)


def test_the_descriptions_need_no_sdk():
    program = "import nanoactor.telemetry.spans, sys; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
