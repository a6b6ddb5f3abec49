"""Videos become frames with times; sizes are those of transformers."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from nanoactor import Video
from nanoactor.errors import InvalidRequest
from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.models.vision.config import parse_vision
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.models.vision.video_config import VideoConfig, parse_video_config, read_video_config
from nanoactor.vision.media import MediaReader
from nanoactor.vision.rules import MediaRules
from nanoactor.vision.video import split_videos

IMAGES = ImageConfig(4096, 65536, 32, rescale=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3)
VIDEOS = VideoConfig(
    min_pixels=4096, max_pixels=1 << 20, factor=32, temporal_patch_size=2, max_frames=40
)
RULES = MediaRules(IMAGES, 1_000_000, VIDEOS)
READER = MediaReader(IMAGES, b"s" * 16, 1_000_000, VIDEOS)
FRAMES = np.random.default_rng(0).integers(0, 256, (5, 70, 90, 3)).astype(np.uint8)
VISION = parse_vision({"vision_config": {}}, "here")


def file(frame, form="PNG"):
    out = io.BytesIO()
    Image.fromarray(frame).save(out, form)
    return out.getvalue()


def take(given):
    return RULES.read_video(given, RULES.video_area({}))


@given(
    st.integers(2, 40),
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.sampled_from([(4096, 1 << 20), (128 * 1024, 768 * 1024), (4096, 25165824)]),
)
def test_frames_are_resized_as_in_transformers(frames, height, width, area):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    least, most = area
    config = VideoConfig(least, most, 32, temporal_patch_size=2, max_frames=40)
    try:
        wanted = smart_resize(
            frames, height, width, 2, factor=32, min_pixels=least, max_pixels=most
        )
    except ValueError:
        with pytest.raises(ValueError, match="too narrow"):
            config.fit(frames, height, width)
        return
    assert config.fit(frames, height, width) == wanted


@given(st.integers(2, 40), st.integers(32, 2000), st.integers(32, 2000))
def test_frames_may_be_bounded_each_by_itself(frames, height, width):
    """As `Qwen3VLVideoProcessor.resize` calls it with `cap_pixels_per_frame`."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    config = VideoConfig(
        4096, 1 << 20, 32, temporal_patch_size=2, max_frames=40, max_frame_tokens=16
    )
    each = max(min(16 * 32**2, (1 << 20) // frames), int(4096 * 1.05))
    wanted = smart_resize(
        frames, height, width, 2, factor=32, min_pixels=4096, max_pixels=each * frames
    )
    assert config.fit(frames, height, width) == wanted


def test_every_way_to_give_a_video_gives_its_frames(tmp_path):
    paths = []
    for number, frame in enumerate(FRAMES):
        paths.append(tmp_path / f"{number}.png")
        paths[-1].write_bytes(file(frame))
    images = [Image.fromarray(frame) for frame in FRAMES]
    ways = [FRAMES, list(FRAMES), images, paths, [file(frame) for frame in FRAMES]]
    ways += [Video(FRAMES, fps=2), (FRAMES, {"fps": 3.0, "frames_indices": [0, 1, 2, 3, 4]})]
    found = [READER.decode(take(way)) for way in ways]
    height, width = VIDEOS.fit(5, 70, 90)
    assert found[0].shape == (5, height, width, 3)
    assert all(np.array_equal(found[0], other) for other in found)
    alone = READER._image_io.resize_image(images[3], height, width)
    assert np.array_equal(found[0][3], alone)


@pytest.mark.parametrize(
    ("given", "times"),
    [
        (Video(FRAMES, fps=1), (0.5, 2.5, 4.0)),
        (Video(FRAMES, fps=29.97), (0.5 / 29.97, 2.5 / 29.97, 4 / 29.97)),
        (Video(FRAMES, times=[0, 0.5, 2, 3, 9]), (0.25, 2.5, 9.0)),
        (FRAMES, (0.5 / 24, 2.5 / 24, 4 / 24)),
        ((FRAMES, {"fps": 2.0, "frames_indices": [0, 4, 8, 12, 16]}), (1.0, 5.0, 8.0)),
        ((FRAMES, {"fps": None, "duration": 3}), (0.5 / 24, 2.5 / 24, 4 / 24)),
    ],
)
def test_a_temporal_patch_stands_between_its_frames(given, times):
    assert take(given).times == pytest.approx(times)


def test_names_do_not_depend_on_times_but_on_frames():
    plain = READER.read(take(FRAMES))
    assert plain.grid == (3, *(side // 32 for side in VIDEOS.fit(5, 70, 90)))
    assert READER.read(take(Video(FRAMES, fps=1))) == plain
    assert READER.read(take(FRAMES[::-1])).key != plain.key
    assert READER.read(take(FRAMES[:4])).key != plain.key
    as_image = RULES.read_image(FRAMES.reshape(350, 90, 3), RULES.area({}))
    assert as_image.data == take(FRAMES).data
    assert READER.read(as_image).key != plain.key
    cut = RULES.read_video(FRAMES, RULES.video_area({"videos_kwargs": {"max_pixels": 10240}}))
    assert READER.read(cut).key != plain.key


WRONG = [
    (FRAMES[:1], "2 to 40 frames, but this one has 1"),
    ([], "2 to 40 frames, but this one has 0"),
    (np.zeros((41, 4, 4, 3), np.uint8), "2 to 40 frames, but this one has 41"),
    ("x.mp4", "files cannot be decoded"),
    (FRAMES[0, :, :, 0], "files cannot be decoded"),
    ([FRAMES[0], FRAMES[1][:-1]], "frame 2 is RGB .69, 90.*frames must have the same form"),
    ([FRAMES[0], file(FRAMES[1])], "frame 2 is a file"),
    ([FRAMES[0], 3], "frame 2: an image must be"),
    (Video(FRAMES, fps=0), "fps must be a number greater than 0"),
    (Video(FRAMES, fps=10**5000), "fps must be a number greater than 0"),
    (Video(FRAMES, times=[0, 1, 2, 3, 10**400]), "must be numbers, in seconds"),
    (
        (FRAMES, {"fps": 1, "frames_indices": [10**400]}),
        "frames_indices must be a list of frame numbers",
    ),
    (np.broadcast_to(FRAMES[:1, :1, :1], (40, 3000, 3000, 3)), "at most 1000000"),
    (Video(FRAMES, fps=True), "fps must be a number greater than 0"),
    (Video(FRAMES, fps=2, times=[1] * 5), "times or fps, but not both"),
    (Video(FRAMES, times=[1, 2]), "5 frames, but 2 times"),
    (Video(FRAMES, times=[5, 4, 3, 2, 1]), "must be in ascending order"),
    (Video(FRAMES, times=[0, 1, 2, 3, float("nan")]), "must be from 0 to"),
    (Video(FRAMES, times="five"), "must be numbers, in seconds"),
    ((FRAMES, {"speed": 2}), "unknown key 'speed'"),
    ((FRAMES, {"frames_indices": "all"}), "frames_indices must be a list of frame numbers"),
    ((FRAMES, {"frames_indices": 5}), "frames_indices must be a list of frame numbers"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_what_is_wrong_with_a_video_is_told(given, message):
    with pytest.raises(InvalidRequest, match=message):
        take(given)


def test_frames_are_counted_before_they_are_copied():
    """Of pixels that are all alike the first tells what the rest will take."""
    rules = MediaRules(IMAGES, 1 << 24, VIDEOS)
    frames = np.broadcast_to(FRAMES[:1, :1, :1], (40, 3000, 3000, 3))
    copied = []
    take = MediaRules.read_image
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MediaRules, "read_image", lambda *a: copied.append(1) or take(*a))
        with pytest.raises(InvalidRequest, match="more than 268435456 bytes"):
            rules.read_video(frames, rules.video_area({}))
    assert len(copied) == 1


def test_numbers_of_numpy_are_numbers():
    assert take(Video(FRAMES, fps=np.float32(2))).times == (0.25, 1.25, 2.0)
    assert take(Video(FRAMES, fps=np.int64(2), times=None)).times == (0.25, 1.25, 2.0)


def test_an_image_that_many_requests_share_is_decoded_by_one_thread_at_a_time():
    data = file(np.tile(FRAMES[0], (12, 12, 1)), "JPEG")
    for _ in range(5):
        image = Image.open(io.BytesIO(data))
        with ThreadPoolExecutor(4) as pool:
            found = list(
                pool.map(lambda _, i=image: RULES.read_image(i, (1024, 65536)).data, range(8))
            )
        assert len({bytes(one) for one in found}) == 1


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([FRAMES[0], FRAMES[1][:-1]], "frame 2 has 90 x 69 pixels, but the first has 90 x 70"),
        ([FRAMES[0]] * 2, None),
        ([np.zeros((1, 300, 3), np.uint8)] * 2, "too narrow"),
    ],
)
def test_files_are_looked_at_frame_by_frame(frames, message):
    media = take([file(frame) for frame in frames])
    if message is None:
        assert READER.read(media).grid[0] == 1
        return
    with pytest.raises(InvalidRequest, match=message):
        READER.read(media)


def test_a_broken_frame_is_named():
    data = file(FRAMES[1])
    with pytest.raises(InvalidRequest, match=r"frame 2: .*not in a supported format"):
        READER.read(take([file(FRAMES[0]), b"nonsense"]))
    with pytest.raises(InvalidRequest, match="frame 2: .*cannot be decoded"):
        READER.decode(take([file(FRAMES[0]), data[: len(data) // 2]]))


def test_a_model_without_a_file_for_videos_takes_none(tmp_path):
    assert read_video_config(tmp_path, VISION, IMAGES) is None
    with pytest.raises(InvalidRequest, match="video_preprocessor_config"):
        MediaRules(IMAGES, 1).video_area({})


def test_one_list_is_one_video_and_lists_of_frames_are_several():
    frame, array = FRAMES[0], FRAMES
    assert split_videos(array) == [array]
    assert split_videos([frame, frame]) == [[frame, frame]]
    assert split_videos([array, [frame]]) == [array, [frame]]
    metadata = (array, {})
    assert split_videos(metadata) == [metadata]
    assert split_videos([metadata, Video(array)])[0] is metadata


RAW = dict(
    size=dict(shortest_edge=4096, longest_edge=25165824),
    image_mean=[0.5] * 3,
    image_std=[0.5] * 3,
    temporal_patch_size=2,
)


def test_the_file_says_how_frames_are_resized():
    config = parse_video_config(RAW, VISION, IMAGES)
    assert (config.min_pixels, config.max_pixels, config.max_frames) == (4096, 25165824, 768)
    assert config.max_frame_tokens is None
    capped = parse_video_config({**RAW, "cap_pixels_per_frame": True}, VISION, IMAGES)
    assert capped.max_frame_tokens == 768


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"image_mean": [0.1] * 3}, UnsupportedModel, "must have the same values as in"),
        ({"do_resize": False}, UnsupportedModel, "do_resize must be true"),
        ({"max_frames": 1}, ModelError, "max_frames must be at least"),
        ({"temporal_patch_size": 4}, ModelError, "the vision tower requires 2"),
        ({"size": {}}, ModelError, "shortest_edge must be"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, error, message):
    with pytest.raises(error, match=message):
        parse_video_config({**RAW, **change}, VISION, IMAGES)
