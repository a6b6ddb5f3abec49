"""What is sent is what was meant; what cannot be read ends one request, or one link."""

import asyncio
import dataclasses

import msgspec
import pytest

from nanoactor import RequestOutputKind, SamplingParams
from nanoactor.fleet import wire
from nanoactor.fleet.fingerprint import fingerprint
from nanoactor.model_files.files import read_model_files
from nanoactor.requests.grammar_spec import ToolFunction, ToolGrammar
from nanoactor.requests.outputs import Logprob
from nanoactor.requests.params import TokenCap
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from nanoactor.vision.media import Media
from tests.engine.harness import on_a_loop
from tests.engine.test_continuations import kinds
from tests.fleet.local import SALT, engines, fleet
from tests.fleet.test_streams import until


def test_a_cap_stays_a_cap():
    for given, kind in ((TokenCap(7), TokenCap), (7, int), (None, type(None))):
        params = SamplingParams.for_model(max_tokens=given)
        found = wire.bytes_to_params(wire.params_to_bytes(params))
        assert (found.max_tokens, type(found.max_tokens)) == (given, kind)


def there_and_back(params):
    found = wire.bytes_to_params(wire.params_to_bytes(params))
    assert found == dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
    return found


def test_parameters_of_every_kind():
    for _, params in kinds():
        there_and_back(params)
    tools = ToolGrammar(functions=(ToolFunction(name="find", parameters="{}"),), required=True)
    there_and_back(
        SamplingParams.for_model(
            logit_bias={3: 1.5, 7: -2.0},
            stop=["a", "\n"],
            stop_token_ids=[1, 2],
            structured_outputs=StructuredOutputsParams(tools=tools, thoughts="optional"),
        )
    )
    there_and_back(SamplingParams(seed=2**64 - 1, max_tokens=None))


def test_max_tokens_that_nobody_wrote_stay_so():
    found = there_and_back(SamplingParams(seed=1))
    assert type(found.max_tokens) is type(SamplingParams().max_tokens)


def test_images_and_log_probabilities():
    media = Media("RGB", (2, 3), (16, 64), bytes(range(18)), (), ())
    assert wire.bytes_to_media(wire.media_to_bytes(media)) == media
    given = [None, {5: Logprob.of(-0.25, 1, b"\xe2"), 7: Logprob.of(-2.0, 2, None)}]
    assert wire.unpack_logprobs(wire.pack_logprobs(given)) == given
    assert wire.pack_logprobs(None) is wire.unpack_logprobs(None) is None


def test_what_is_no_message_is_refused():
    orders = wire.Orders("link", 3, [wire.Abort(7), wire.Reserve(True), wire.Close()])
    assert wire.decode_orders(wire.encode(orders)) == orders
    for data in (b"", b"\x93", b"hello", msgspec.msgpack.encode(["link", 1, [["eval", 1]]])):
        with pytest.raises(msgspec.DecodeError):
            wire.decode_orders(data)
        with pytest.raises(msgspec.DecodeError):
            wire.decode_report(data)


@on_a_loop
async def test_an_order_that_cannot_be_read_ends_its_request_alone():
    async with fleet(1) as (llm, _, _engines):
        (replica,) = llm.fleet.replicas.values()
        params = SamplingParams.for_model(max_tokens=4)
        bad = wire.Begin(
            99, "bad", b"\0\0\0\0", b"\xc1", 0, (), b"", -1, is_alone=False, is_pooling=False
        )
        failed = []
        taken = llm.fleet._handle_failure
        llm.fleet._handle_failure = lambda at, failure: (failed.append(failure), taken(at, failure))
        replica.link.send(bad)
        async for output in llm.generate("To be", params):
            assert output.outputs[0].finish_reason != "abort"
        await until(lambda: failed)
        assert (failed[0].stream, failed[0].kind) == (99, "ComputationFailed")
        assert llm.fleet.counts.deaths == 0


@on_a_loop
async def test_credits_bound_what_is_on_the_way():
    """An ingress that does not read gets a window of reports, and then one merged report."""
    from nanoactor.fleet.hub import WINDOW, Hub

    async with engines(1, device="simulated:1", dtype="auto") as (llm,):
        hub = Hub(llm, "same", interval=0.005)
        link = hub.link("slow")
        await anext(link)
        ids = wire.ids_to_bytes(list(range(50, 60)))
        params = SamplingParams.for_model(seed=1, max_tokens=450, ignore_eos=True)
        packed = wire.params_to_bytes(params)
        begin = wire.Begin(1, "one", ids, packed, 0, (), b"", -1, is_alone=False, is_pooling=False)
        assert hub.handle_orders(wire.encode(wire.Orders("slow", 1, [begin])))
        reports = []
        async with asyncio.timeout(30):
            while len(reports) < WINDOW:
                reports.append(wire.decode_report(await anext(link)))
        rest = asyncio.ensure_future(anext(link))
        (stream,) = hub.streams
        await until(lambda: stream.request._entry.is_over)  # it is complete, and was not told
        assert not rest.done()
        told = sum(len(d.token_ids) for report in reports for d in report.deltas) // 4
        assert told < 450
        assert hub.handle_orders(wire.encode(wire.Orders("slow", 1 + WINDOW, [])))
        # What was read of it already, and then all that has merged behind that.
        last = [wire.decode_report(await rest), wire.decode_report(await anext(link))]
        told += sum(len(delta.token_ids) for report in last for delta in report.deltas) // 4
        assert told == 450
        await link.aclose()
        assert not hub.links


def test_fingerprints_tell_models_and_options_apart(tmp_path):
    from nanoactor import EngineConfig

    def of(model="demo", **options):
        config = EngineConfig(str(model), prefix_salt=SALT, device="cpu", **options)
        return fingerprint(read_model_files(config), config)

    same = of()
    assert same == of(max_num_seqs=3) == of(num_kv_blocks=50)
    assert len({same, of(dtype="float32"), of(max_model_len=256), of("demo-vl")}) == 4


def test_the_salt_is_not_shown():
    from nanoactor import EngineConfig, InvalidConfig

    config = EngineConfig("demo", prefix_salt=SALT)
    assert "salt" not in repr(config)
    with pytest.raises(InvalidConfig) as caught:
        EngineConfig("demo", prefix_salt="a secret that is no bytes")
    assert "secret" not in str(caught.value)
