"""Engines see videos: greedy tokens equal transformers', among images and text in every order."""

import asyncio
import io
import random
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from nanoactor import LLM, SamplingParams, Video
from nanoactor.errors import InvalidRequest
from nanoactor.model_files.files import resolve_model
from nanoactor.models.demo_vl import layout
from tests.engine.harness import Reference, collect, engine, greedy
from tests.models.checkpoints import make_checkpoint

PLACE = "<|vision_start|><|{}_pad|><|vision_end|>"


class Viewer(Reference):
    """transformers' model, and its processor's parts that need no torchvision."""

    def __init__(self, directory):
        # The demo's ids and tokenizer: the times of a video are text.
        ids = dict(
            image_token_id=layout.IMAGE,
            video_token_id=layout.VIDEO,
            vision_start_token_id=layout.VISION_START,
            vision_end_token_id=layout.VISION_END,
        )
        super().__init__(
            make_checkpoint(
                directory, family="Qwen3VL", num_hidden_layers=4, vocab_size=263, vision_ids=ids
            )
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve_model("demo-vl") / name, directory)
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self.directory = directory
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(directory)

    def frames(self, frames):
        """(patches, grid) of a video whose frames have their final size: the processor's patches of
        each, of which every temporal patch takes its first half from one frame and its second half
        from the next."""
        made = self.processor(
            [Image.fromarray(frame) for frame in frames], return_tensors="pt", do_resize=False
        )
        _, height, width = made["image_grid_thw"][0].tolist()
        channels, together, side = 3, 2, self.processor.patch_size
        rows = made["pixel_values"].view(len(frames), -1, channels, together, side, side)
        rows = torch.cat((rows, rows[-1:])) if len(frames) % 2 else rows
        pairs = torch.stack((rows[::2, :, :, 0], rows[1::2, :, :, 0]), dim=3)
        return pairs.flatten(0, 1).flatten(1), [len(rows) // 2, height, width]

    def see(self, prompt, output, images, videos):
        """As `check`, of a prompt in which the tokens of images and videos stand already."""
        given = {}
        if images:
            pixels = self.processor([Image.fromarray(p) for p in images], return_tensors="pt")
            given |= pixels
        if videos:
            patches, grids = zip(*map(self.frames, videos), strict=True)
            given |= dict(
                pixel_values_videos=torch.cat(patches), video_grid_thw=torch.tensor(grids)
            )
        whole = self.model

        def seeing(tokens):
            kinds = (tokens == layout.IMAGE).int() + 2 * (tokens == layout.VIDEO).int()
            return whole(tokens, mm_token_type_ids=kinds, **given)

        self.model = seeing
        try:
            self.check(prompt, output)
        finally:
            self.model = whole


@pytest.fixture(scope="module")
def viewer(tmp_path_factory):
    return Viewer(tmp_path_factory.mktemp("viewer"))


def shown(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3)).astype(np.uint8)


def jobs_of(seed, count):
    """(text, images, videos); frames have a size to which nothing is resized."""
    rng = random.Random(seed)
    jobs = []
    for number in range(count):
        kinds = [rng.choice(["image", "video"]) for _ in range(rng.randrange(1, 4))]
        text = "".join("ab"[: rng.randrange(3)] + PLACE.format(kind) for kind in kinds) + "xyz"
        images = [shown(rng.randrange(5), 16, 24) for kind in kinds if kind == "image"]
        videos = [
            shown(rng.randrange(5), rng.randrange(2, 6), 16, 8 * rng.randrange(2, 4))
            for kind in kinds
            if kind == "video"
        ]
        jobs.append((text[: -(number % 3) or None], images, videos))
    return jobs


def request(text, images, videos):
    data = {"image": images, "video": [Video(frames, fps=2) for frames in videos]}
    return {"prompt": text, "multi_modal_data": data}


SHAPES = [(1, 1, 1), (4, 7, 2), (6, 64, 3)]


@pytest.mark.parametrize(("seqs", "budget", "depth"), SHAPES)
def test_tokens_equal_transformers_in_every_order_and_chunk(viewer, seqs, budget, depth):
    jobs = jobs_of(budget, 2 if budget == 1 else 10)

    async def main():
        changes = dict(max_num_seqs=seqs, max_num_batched_tokens=budget, pipeline_depth=depth)
        changes |= dict(placement="single", skip_tokenizer_init=False, block_size=4)
        async with engine(viewer.directory, **changes) as llm:
            return await asyncio.gather(*(collect(llm, request(*j), greedy(5)) for j in jobs))

    for (_, images, videos), output in zip(jobs, asyncio.run(main()), strict=True):
        assert output.prompt_token_ids.count(layout.VIDEO) == sum(
            (len(video) + 1) // 2 * 2 * (video.shape[2] // 8) for video in videos
        )
        viewer.see(output.prompt_token_ids, output.outputs[0].token_ids, images, videos)
    viewer.conclude()


def test_a_video_is_decoded_and_encoded_once_whatever_its_times(viewer):
    frames = shown(1, 6, 16, 16)
    text = PLACE.format("video") + "?"

    async def main():
        async with engine(viewer.directory, skip_tokenizer_init=False, block_size=4) as llm:
            outputs = [
                await collect(
                    llm, {"prompt": text, "multi_modal_data": {"video": given}}, greedy(2)
                )
                for given in (Video(frames, fps=2), Video(frames, fps=1), frames)
            ]
            return outputs, await llm.statistics()

    outputs, figures = asyncio.run(main())
    for output, said in zip(outputs, ("0.2", "0.5", "0.0"), strict=True):
        spelt = bytes(t for t in output.prompt_token_ids if t < 256)
        assert spelt.startswith(f"<{said} seconds>".encode())
        viewer.see(output.prompt_token_ids, output.outputs[0].token_ids, [], [frames])
    assert figures["vision.0"]["actor"]["decoded"] == 1
    assert figures["scheduler"]["actor"]["items_encoded"] == 1


def test_videos_that_cannot_be_seen_are_refused_by_name(viewer):
    frames = shown(1, 4, 16, 16)
    text = PLACE.format("video")

    async def main():
        changes = dict(skip_tokenizer_init=False, limit_mm_per_prompt={"video": 1})
        async with engine(viewer.directory, encoder_cache_tokens=16, **changes) as llm:
            for given, message in [
                ([frames, frames], "at least 2 videos, but at most 1"),
                ("x.mp4", "video 1: .*files cannot be decoded"),
                (
                    [b"a", b"b"],
                    "video 1 of 1: frame 1: .*not in a supported format",
                ),
                (shown(1, 14, 16, 16), "the encoder cache, which holds 16"),
            ]:
                with pytest.raises(InvalidRequest, match=message):
                    await collect(llm, {"prompt": text, "multi_modal_data": {"video": given}})
            for part, message in [
                ({"type": "video_url", "video_url": {"url": "x"}}, "video files cannot be decoded"),
                ({"type": "video", "video": frames, "times": [1]}, "4 frames, but 1 times"),
            ]:
                with pytest.raises(InvalidRequest, match=message):
                    await collect(llm, [{"role": "user", "content": [part]}])
        async with engine(viewer.directory) as llm:
            tokens = {"prompt_token_ids": [layout.VIDEO, 1]}
            with pytest.raises(InvalidRequest, match="videos require a tokenizer"):
                await collect(llm, {**tokens, "multi_modal_data": {"video": frames}})

    asyncio.run(main())


def test_conversations_show_videos(viewer):
    """Times stand next to the frames; a blocking engine takes them too."""
    frames = [*shown(2, 3, 16, 16)]
    part = {"type": "video", "video": frames, "times": [0, 10, 20]}
    params = SamplingParams.for_model(temperature=0.0, max_tokens=3, ignore_eos=True)
    options = dict(device="cpu", dtype="float32", placement="single", num_kv_blocks=40)
    with LLM(str(viewer.directory), **options) as llm:
        text = PLACE.format("video") + "ab"
        outputs = llm.generate_multimodal(
            [
                {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "ab"}]}]},
                {"text": text, "videos": [Video(frames, times=[0, 10, 20])]},
            ],
            params,
            use_tqdm=False,
        )
    for output in outputs:
        spelt = bytes(t for t in output.prompt_token_ids if t < 256)
        assert b"<5.0 seconds><20.0 seconds>" in spelt
        viewer.see(output.prompt_token_ids, output.outputs[0].token_ids, [], [np.stack(frames)])
    viewer.conclude()


def test_a_long_video_is_progress_frame_by_frame_and_ends_when_nobody_wants_it(viewer):
    """The watchdog hears of each frame, and a video that was given up is broken off."""
    files = []
    for frame in shown(3, 60, 300, 400):
        out = io.BytesIO()
        Image.fromarray(frame).save(out, "PNG")
        files.append(out.getvalue())
    text = PLACE.format("video")

    async def worker(llm):
        """Who does not answer at once is left out."""
        while "vision.0" not in (figures := await llm.statistics()):
            await asyncio.sleep(0.01)
        return figures["vision.0"]["actor"]

    async def main():
        async with engine(viewer.directory, skip_tokenizer_init=False, max_num_seqs=2) as llm:
            stream = llm.generate({"prompt": text, "multi_modal_data": {"video": files}}, greedy(2))
            task = asyncio.ensure_future(anext(stream))
            while (await worker(llm))["frames"] <= 65:
                await asyncio.sleep(0.01)  # the headers, and the first frames
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
            small = request(text + "a", [], [shown(1, 4, 16, 16)])
            await collect(llm, small, greedy(2))
            return await worker(llm)

    figures = asyncio.run(main())
    assert figures["decoded"] == 1, "of the long one nothing is left"
    assert figures["frames"] < 60 + 60 + 60 + 12
    assert figures["wants"] == figures["waiting"] == 0
