"""Engines see: greedy tokens equal transformers', whatever is cut, cached, preempted or shared."""

import asyncio
import io
import itertools
import random
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from nanoactor import LLM, SamplingParams
from nanoactor.admission.request_builder import RequestBuilder
from nanoactor.errors import EngineOverloaded, InvalidRequest
from nanoactor.model_files.files import resolve_model
from nanoactor.requests.params import derived_seed
from tests.engine.harness import Reference, collect, engine, greedy, ids
from tests.models.checkpoints import TOWERS, VISION_IDS, make_checkpoint

IMAGE, VIDEO, START, END = VISION_IDS.values()
BLOCK = 4
SIDE = 8
"""Pixels of a token's side."""


class Eyes(Reference):
    """transformers' model and processor, and images."""

    def __init__(self, directory, **config):
        super().__init__(make_checkpoint(directory, family="Qwen3VL", **config))
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self.directory = directory
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(directory)

    def see(self, prompt, output, images):
        """As `check`, of a prompt in which each image's tokens stand already."""
        pixels = self.processor([Image.fromarray(p) for p in images], return_tensors="pt")
        tokens = torch.tensor([[*prompt, *output]])
        whole = self.model

        def with_images(given):
            assert torch.equal(given, tokens)
            return whole(
                given,
                mm_token_type_ids=(given == IMAGE).int(),
                pixel_values=pixels["pixel_values"],
                image_grid_thw=pixels["image_grid_thw"],
            )

        self.model = with_images
        try:
            self.check(prompt, output)
        finally:
            self.model = whole


def image(seed, height, width):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def prompt_of(rng, count, text=6):
    """Ids with a placeholder for each of so many images."""
    made = []
    for _ in range(count):
        made += [rng.randrange(200) for _ in range(rng.randrange(text))]
        made += [START, IMAGE, END]
    return [*made, *(rng.randrange(200) for _ in range(1 + rng.randrange(text)))]


def request(tokens, images):
    return {**ids(tokens), "multi_modal_data": {"image": list(images)}}


def jobs_of(seed, count, most=3):
    """(tokens, images), some of which share images and beginnings, and some have none."""
    rng = random.Random(seed)
    pool = [image(n, rng.randrange(4, 60), rng.randrange(4, 60)) for n in range(6)]
    jobs = []
    for number in range(count):
        if number % 3 == 2:  # another end behind the same beginning
            tokens, images = jobs[rng.randrange(len(jobs))]
            jobs.append(([*tokens, rng.randrange(200), number], images))
            continue
        images = [rng.choice(pool) for _ in range(rng.randrange(most + 1))]
        jobs.append((prompt_of(rng, len(images)), images))
    return jobs


async def run_all(llm, jobs, tokens):
    return await asyncio.gather(*(collect(llm, request(*job), greedy(tokens)) for job in jobs))


def check_all(eyes, jobs, outputs, tokens):
    for (_, images), output in zip(jobs, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == tokens
        assert output.prompt_token_ids.count(START) == len(images)
        if images:
            eyes.see(output.prompt_token_ids, output.outputs[0].token_ids, images)
        else:
            eyes.check(output.prompt_token_ids, output.outputs[0].token_ids)
    eyes.conclude()


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    return Eyes(tmp_path_factory.mktemp("eyes"), num_hidden_layers=4)


# (sequences at once, tokens a step, depth): with 1 and 3 tokens a step every image is encoded in
# parts, and every chunk ends in one.
SHAPES = [(1, 1, 1), (3, 3, 2), (6, 17, 3), (8, 64, 2)]


@pytest.mark.parametrize(("seqs", "budget", "depth"), SHAPES)
def test_tokens_equal_transformers_for_every_chunk(eyes, seqs, budget, depth):
    jobs = jobs_of(budget, 3 if budget == 1 else 12)

    async def main():
        changes = dict(max_num_seqs=seqs, max_num_batched_tokens=budget, pipeline_depth=depth)
        async with engine(eyes.directory, placement="single", block_size=BLOCK, **changes) as llm:
            return await run_all(llm, jobs, 5)

    check_all(eyes, jobs, asyncio.run(main()), 5)


@pytest.mark.parametrize("tower", [name for name in TOWERS if name != "two_levels"])
def test_every_tower_in_processes_of_its_own(tmp_path, tower):
    eyes, jobs = Eyes(tmp_path, num_hidden_layers=5, tower=TOWERS[tower]), jobs_of(7, 6)

    async def main():
        async with engine(eyes.directory, max_num_batched_tokens=40, num_vision_workers=2) as llm:
            return await run_all(llm, jobs, 4)

    check_all(eyes, jobs, asyncio.run(main()), 4)


def test_sequences_preempted_at_any_step_see_the_same_when_they_come_back(eyes):
    """Few blocks and few pages: sequences give up images that are half read, and encoded ones are
    evicted, again and again."""
    jobs = jobs_of(3, 20, most=2)

    async def main():
        changes = dict(max_num_seqs=6, max_num_batched_tokens=12, max_model_len=128)
        changes |= dict(num_kv_blocks=40, encoder_cache_tokens=96)
        async with engine(eyes.directory, placement="single", block_size=BLOCK, **changes) as llm:
            return await run_all(llm, jobs, 24), await llm.statistics()

    outputs, figures = asyncio.run(main())
    check_all(eyes, jobs, outputs, 24)
    assert figures["scheduler"]["actor"]["preemptions"] > 5
    assert figures["blocks"]["actor"]["encoder_evictions"] > 0


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2])
def test_ranks_see_as_one(eyes, ranks):
    jobs = jobs_of(5, 12)

    async def main():
        changes = dict(tensor_parallel_size=ranks, max_num_batched_tokens=40)
        async with engine(eyes.directory, **changes) as llm:
            return await run_all(llm, jobs, 6)

    check_all(eyes, jobs, asyncio.run(main()), 6)


@pytest.mark.parametrize("cut", range(0, 22, 3))
def test_a_prefix_hit_may_end_before_in_and_after_an_image(eyes, cut):
    """The other prompt leaves the first one before, in the middle of, or behind its image."""
    seen = image(1, 4 * SIDE, 4 * SIDE)
    first = [1, 2, 3, START, IMAGE, END, 7, 8, 9]
    whole = [1, 2, 3, START, *[IMAGE] * 16, END, 7, 8, 9]
    other = [1, 2, 3, 99, START, IMAGE, END, 5] if cut < 4 else [*first[:6], 5][: cut + 9]
    if 4 <= cut < 20:  # as long as the first up to here, and another image of the same size
        other = first

    async def main():
        async with engine(eyes.directory, placement="single", block_size=BLOCK) as llm:
            before = await collect(llm, request(first, [seen]), greedy(3))
            shown = seen if cut < 4 or cut >= 20 else image(2, 4 * SIDE, 4 * SIDE)
            return before, shown, await collect(llm, request(other, [shown]), greedy(3))

    before, shown, after = asyncio.run(main())
    assert before.prompt_token_ids == whole
    eyes.see(after.prompt_token_ids, after.outputs[0].token_ids, [shown])
    same = sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1],
            zip(before.prompt_token_ids, after.prompt_token_ids, strict=False),
        )
    )
    shared = same if shown is seen else 4  # the first block has nothing of the image
    most = min(shared, len(after.prompt_token_ids) - 1)
    assert after.num_cached_tokens == most // BLOCK * BLOCK


def test_an_image_in_many_requests_is_decoded_and_encoded_once(eyes):
    seen = image(3, 6 * SIDE, 6 * SIDE)
    jobs = [([n, START, IMAGE, END, n], [seen]) for n in range(8)]

    async def main():
        async with engine(eyes.directory, max_num_seqs=8, block_size=BLOCK) as llm:
            await run_all(llm, jobs, 3)
            first = await llm.statistics()
            (turn,) = await run_all(llm, [([0, START, IMAGE, END, 0, 1, 2], [seen])], 3)
            return first, turn, await llm.statistics()

    first, turn, second = asyncio.run(main())
    for figures in (first, second):
        assert figures["vision.0"]["actor"]["decoded"] == 1
        assert figures["scheduler"]["actor"]["items_encoded"] == 1
    assert first["blocks"]["actor"]["encoder_hits"] == 7
    # The second turn computes nothing of the first, so it asks for nothing of the image.
    assert turn.num_cached_tokens == 40
    assert second["blocks"]["actor"]["encoder_hits"] == 7


@pytest.mark.parametrize(
    "parts", [3, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_images_leave_nothing_behind(eyes, parts):
    """Distinct ones, several at once: what is held is bounded. They are decoded at the lowest
    priority, which takes a long time on a busy machine."""
    each = 100 if parts > 3 else 30

    async def main():
        changes = dict(placement="default", max_num_seqs=8, encoder_cache_tokens=64)
        async with engine(eyes.directory, device="simulated:0.2", dtype="auto", **changes) as llm:
            vision = llm.pids["vision.0"]
            sizes = []
            for part in range(parts):
                jobs = [
                    ([START, IMAGE, END, 1], [image(1000 * part + n, 64, 64)]) for n in range(each)
                ]
                await run_all(llm, jobs, 1)
                sizes.append(resident(vision))
            return sizes, await llm.statistics()

    sizes, figures = asyncio.run(main())
    assert figures["vision.0"]["actor"]["decoded"] == each * parts
    assert figures["runner.0"]["actor"]["pixels"] == 0
    # Images of 12 KiB are kept undecoded; nothing else may stay.
    kept = each * 64 * 64 * 3 * (parts - 2)
    assert sizes[-1] - sizes[1] < (12 << 20) + kept, sizes


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


def test_text_passes_images_that_are_being_decoded(eyes):
    """Text that comes behind large images is done before the first of them is decoded."""

    async def main():
        changes = dict(device="simulated:1", dtype="auto", max_num_seqs=16)
        async with engine(eyes.directory, **changes) as llm:
            order = []

            async def run(name, prompt):
                await collect(llm, prompt, greedy(2))
                order.append(name)

            large = [image(n, 2000, 3000) for n in range(6)]
            jobs = [run("image", request([START, IMAGE, END, 1], [p])) for p in large]
            await asyncio.gather(*jobs, *(run("text", ids([1, 2, n])) for n in range(12)))
            return order

    order = asyncio.run(main())
    assert order.count("image") == 6
    assert order.index("image") >= 10, order


def test_images_are_opened_on_a_thread_and_seeds_come_in_the_order_of_requests(monkeypatch):
    """Pillow decodes what it has opened when it is asked for pixels: on the user's loop everybody
    would wait for that."""
    threads = []
    take = RequestBuilder.extract_media

    def noted(own, prompt):
        threads.append(threading.current_thread())
        time.sleep(0.05 * (len(threads) == 1))  # the first is the last to be ready
        return take(own, prompt)

    monkeypatch.setattr(RequestBuilder, "extract_media", noted)
    params = SamplingParams.for_model(temperature=1.0, max_tokens=6, ignore_eos=True)

    async def main():
        async with engine("demo-vl", skip_tokenizer_init=False, num_kv_blocks=200) as llm:
            chats = [conversation("say: ", drawn("12")) for _ in range(2)]
            outputs = await asyncio.gather(*(collect(llm, chat, params) for chat in chats))
            return [output.outputs[0].token_ids for output in outputs]

    slow = asyncio.run(main())
    assert threading.main_thread() not in threads
    assert len(threads) == 2
    assert asyncio.run(main()) == slow


def test_a_request_may_be_aborted_while_its_images_are_opened(monkeypatch):
    """And its name is taken from then on."""
    opened = threading.Event()
    take = RequestBuilder.extract_media
    monkeypatch.setattr(
        RequestBuilder, "extract_media", lambda *given: opened.wait(30) and take(*given)
    )

    async def main():
        async with engine("demo-vl", skip_tokenizer_init=False, num_kv_blocks=200) as llm:
            chat, params = conversation("say: ", drawn("12")), greedy(500)
            stream = llm.generate(chat, params, request_id="mine")
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.05)
            with pytest.raises(InvalidRequest, match="'mine' is already in use"):
                await collect(llm, chat, params, request_id="mine")
            await llm.abort("mine")
            opened.set()
            output = await task
            await stream.aclose()
            again = await collect(llm, chat, greedy(2), request_id="mine")
            return output, again

    output, again = asyncio.run(main())
    assert output.outputs[0].finish_reason == "abort"
    assert again.outputs[0].finish_reason == "length"


def test_what_was_given_may_be_changed_at_once(eyes, tmp_path):
    """Though images are opened later."""
    path, shown = tmp_path / "x.png", image(5, 24, 24)
    path.write_bytes(encoded(Image.fromarray(image(6, 24, 24))))
    expected = shown.copy()
    data = {"image": [shown, str(path)]}
    tokens = [START, IMAGE, END, 1, START, IMAGE, END]

    async def main():
        async with engine(eyes.directory, placement="single") as llm:
            stream = llm.generate({**ids(tokens), "multi_modal_data": data}, greedy(4))
            shown[:] = 0
            data["image"].clear()
            async for output in stream:
                final = output
            return final

    output = asyncio.run(main())
    seen = [expected, image(6, 24, 24)]
    eyes.see(output.prompt_token_ids, output.outputs[0].token_ids, seen)


# -- what is refused ----------------------------------------------------------------------


def encoded(image, form="PNG"):
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


WHOLE = encoded(Image.fromarray(image(1, 40, 40)))
WRONG = [
    ([START, IMAGE, END], [], "1 image placeholders .* number of images given is 0"),
    ([1, 2], [WHOLE], "0 image placeholders .* number of images given is 1"),
    ([VIDEO, 1], [], "1 video placeholders"),
    (
        [IMAGE, 1],
        [b"nonsense"],
        "image 1 of 1: the image .8 bytes. is not in a supported format",
    ),
    ([IMAGE, IMAGE, 1], [WHOLE, WHOLE[:300]], "cannot be decoded"),
    ([IMAGE, 1], [np.zeros((4, 900, 3), np.uint8)], "too narrow"),
    (
        [IMAGE, 1],
        [np.zeros((4, 4, 2), np.uint8)],
        "image 1: an image array must have the dtype uint8",
    ),
    ([IMAGE, 1], [b""], "image 1: the image is empty"),
    ([IMAGE, 1], [17], "image 1: an image must be given as encoded bytes"),
    ([IMAGE, 1], ["/nowhere/x.png"], "image 1: the image cannot be read"),
    ([IMAGE, 1], ["data:text/plain,x"], 'must begin with "data:image'),
    ([IMAGE] * 5, [WHOLE] * 5, "at most 4 are allowed"),
    ([IMAGE, 1], [np.zeros((2000, 2000, 3), np.uint8)], "at least one and at most 1000000"),
    ([IMAGE] * 4, [image(9, 48, 48)] * 4, "the encoder cache, which holds 64"),
]


def test_what_is_wrong_with_an_image_is_told_and_harms_nobody(eyes):
    good = ([START, IMAGE, END, 5], [image(4, 20, 20)])

    async def main():
        changes = dict(max_image_pixels=1_000_000, limit_mm_per_prompt={"image": 4})
        changes |= dict(encoder_cache_tokens=64)
        async with engine(eyes.directory, **changes) as llm:
            others = asyncio.ensure_future(run_all(llm, [good] * 3, 20))
            for tokens, images, message in WRONG:
                given = request(tokens, images) if images else ids(tokens)
                with pytest.raises(InvalidRequest, match=message):
                    await collect(llm, given, greedy(2))
            return await others

    outputs = asyncio.run(main())
    for output in outputs:
        eyes.see(output.prompt_token_ids, output.outputs[0].token_ids, good[1])


def test_the_bytes_of_images_that_wait_are_bounded(eyes):
    """The journal keeps them: a queue of 10,000 requests might hold terabytes."""
    shown = image(2, 40, 40)

    async def main():
        changes = dict(device="simulated:20", dtype="auto", max_num_seqs=1)
        async with engine(eyes.directory, max_waiting_media_bytes=12_000, **changes) as llm:
            jobs = [([n, START, IMAGE, END], [shown]) for n in range(6)]  # 4,800 bytes each
            requests = (collect(llm, request(*job), greedy(3)) for job in jobs)
            found = await asyncio.gather(*requests, return_exceptions=True)
            (alone,) = await run_all(llm, [([START, IMAGE, END], [image(3, 80, 80)])], 2)
            return found, alone, await llm.statistics()

    found, alone, figures = asyncio.run(main())
    refused = [one for one in found if isinstance(one, Exception)]
    assert 0 < len(refused) < 6
    assert all("max_waiting_media_bytes is 12000" in str(one) for one in refused)
    assert all(isinstance(one, EngineOverloaded) for one in refused)
    assert alone.finished, "where nothing waits, one of any size is let in"
    assert figures["frontend"]["actor"]["waiting_media_bytes"] == 0


def test_a_model_that_is_blind_says_so():
    async def main():
        async with engine("demo", skip_tokenizer_init=False) as llm:
            with pytest.raises(InvalidRequest, match="does not support images"):
                await collect(llm, request([1, 2], [WHOLE]), greedy(2))

    asyncio.run(main())


def test_requests_with_images_may_be_given_up_at_any_time(eyes):
    """Before the header is read, while it is decoded, encoded and answered."""

    async def main():
        async with engine(eyes.directory, max_num_batched_tokens=32) as llm:
            for number in range(30):
                shown = image(number % 7, 900, 900) if number % 2 else image(number, 30, 30)
                stream = llm.generate(request([START, IMAGE, END, 1], [shown]), greedy(30))
                task = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0.003 * (number % 8))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await stream.aclose()
            (output,) = await run_all(llm, [([START, IMAGE, END], [image(1, 30, 30)])], 3)
            return output

    output = asyncio.run(main())
    eyes.see(output.prompt_token_ids, output.outputs[0].token_ids, [image(1, 30, 30)])


# -- the demo that sees -------------------------------------------------------------------


def drawn(text, ink=(250, 220, 90), paper=(20, 30, 90)):
    from PIL import ImageDraw, ImageFont

    image = Image.new("RGB", (32 * max(1, len(text)), 64), paper)
    font = ImageFont.load_default(30)
    ImageDraw.Draw(image).text((6, 12), text, font=font, fill=ink)
    return image


def conversation(question, *images):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


SIZES = [(32, 32), (500, 2000), (2000, 500), (20, 4000), (3990, 20), (1, 1), (333, 77)]


def test_images_of_every_shape_are_seen_as_in_transformers():
    """True patches, from one pixel to sides of 200 to 1, larger than a step."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    directory = resolve_model("demo-vl")
    kind = transformers.Qwen3VLForConditionalGeneration
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    shown = [image(number, *size) for number, size in enumerate(SIZES)]
    tokens = [259, 261, 260, *b"read: "]
    jobs = [(tokens, [one]) for one in shown]

    async def main():
        changes = dict(max_num_seqs=4, max_num_batched_tokens=48, num_kv_blocks=300)
        async with engine("demo-vl", placement="single", **changes) as llm:
            return await run_all(llm, jobs, 6)

    for one, output in zip(shown, asyncio.run(main()), strict=True):
        pixels = processor([Image.fromarray(one)], return_tensors="pt")
        answer = list(output.outputs[0].token_ids)
        whole = torch.tensor([[*output.prompt_token_ids, *answer]])
        with torch.inference_mode():
            logits = model(whole, mm_token_type_ids=(whole == 261).int(), **pixels).logits[0]
        assert logits[-len(answer) - 1 : -1].argmax(-1).tolist() == answer, one.shape


def test_the_demo_reads_digits():
    params = SamplingParams.for_model(temperature=0.0, max_tokens=8)
    with LLM("demo-vl", device="cpu", dtype="float32", num_kv_blocks=400) as llm:
        numbers = ["7", "42", "905", "318", "60"]
        chats = [conversation("read: ", drawn(number)) for number in numbers]
        answers = llm.chat(chats, params, use_tqdm=False)
        assert [answer.outputs[0].text for answer in answers] == numbers
        place = "<|vision_start|><|image_pad|><|vision_end|>"
        shown = {"image": [encoded(drawn("12")), encoded(drawn("34"))]}
        prompts = [
            {"prompt": f"{place}{place}{which}: ", "multi_modal_data": shown}
            for which in ("first", "second")
        ]
        texts = [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]
        assert texts == ["12", "34"]
        several = [
            {"text": f"{place}read: ", "images": [drawn("61")]},
            {"messages": conversation("read: ", drawn("248"))},
        ]
        outputs = llm.generate_multimodal(several, params, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == ["61", "248"]
        with pytest.raises(InvalidRequest, match="a request must be"):
            llm.generate_multimodal([{"image": 3}], params, use_tqdm=False)
        # What a user spells like a placeholder stays text.
        (spelt,) = llm.chat(conversation("<|image_pad|> read: ", drawn("5")), params, False)
        assert spelt.prompt_token_ids.count(261) == drawn("5").width * 64 // 32**2
        assert bytes(t for t in spelt.prompt_token_ids if t < 256).count(b"<|image_pad|>") == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("seqs", "budget", "depth"), [(3, 3, 2), (8, 64, 2)])
def test_a_gpu_sees_as_transformers(eyes, seqs, budget, depth):
    jobs = jobs_of(budget, 12)

    async def main():
        changes = dict(max_num_seqs=seqs, max_num_batched_tokens=budget, pipeline_depth=depth)
        changes |= dict(device="cuda", placement="default")
        async with engine(eyes.directory, **changes) as llm:
            return await run_all(llm, jobs, 8)

    check_all(eyes, jobs, asyncio.run(main()), 8)


@pytest.mark.gpu
def test_the_demo_reads_digits_on_a_gpu():
    params = SamplingParams.for_model(temperature=0.0, max_tokens=8)
    with LLM("demo-vl", device="cuda") as llm:
        numbers = [str(7 * n * n + 1)[:3] for n in range(1, 33)]
        chats = [conversation("read: ", drawn(number)) for number in numbers]
        answers = [o.outputs[0].text for o in llm.chat(chats, params, use_tqdm=False)]
    right = sum(map(str.__eq__, answers, numbers))
    assert right >= 30, [pair for pair in zip(answers, numbers, strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize("workers", [1, 2])
def test_several_answers_see_the_same_images(eyes, workers):
    """As many requests with the derived seeds would, also where an answer is preempted, and has to
    have its images encoded again."""
    jobs = [job for job in jobs_of(11, 9, most=2) if job[1]][:5]

    def params(at, number=0, **more):
        seed = derived_seed(at, number)
        return SamplingParams.for_model(
            temperature=0.9, seed=seed, max_tokens=20, ignore_eos=True, **more
        )

    async def main():
        changes = dict(max_num_batched_tokens=12, max_model_len=128, num_kv_blocks=40)
        changes |= dict(encoder_cache_tokens=96, num_vision_workers=workers, max_num_seqs=6)
        async with engine(eyes.directory, placement="single", block_size=BLOCK, **changes) as llm:
            together = [collect(llm, request(*job), params(at, n=3)) for at, job in enumerate(jobs)]
            outputs = await asyncio.gather(*together)
            figures = await llm.statistics()
            for at, job in enumerate(jobs):
                for number in range(3):
                    alone = await collect(llm, request(*job), params(at, number))
                    found = outputs[at].outputs[number].token_ids
                    assert found == alone.outputs[0].token_ids
            return figures

    assert asyncio.run(main())["scheduler"]["actor"]["preemptions"] > 0
