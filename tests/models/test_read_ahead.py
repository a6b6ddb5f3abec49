"""Files are read ahead of the loader, in order, and by no more than a window."""

import os
import threading

import pytest

from nanoactor.models.weights.read_ahead import ReadAhead

PIECE, WINDOW = 100, 300


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, size in zip(paths, (250, 90, 1000), strict=True):
        path.write_bytes(bytes(size))
    return paths


@pytest.fixture
def asked(monkeypatch):
    """Requests to the kernel, as (file, start), and a semaphore that counts them."""
    made, count = [], threading.Semaphore(0)

    def advise(descriptor, start, size, advice):
        assert (size, advice) == (PIECE, os.POSIX_FADV_WILLNEED)
        made.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), start))
        count.release()

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return made, count


def test_it_stays_within_the_window(paths, asked):
    made, count = asked
    ahead = ReadAhead(paths, WINDOW, PIECE)
    wanted = [("a", 0), ("a", 100), ("a", 200), ("b", 0)]  # b begins at 250, c at 340
    for _ in wanted:
        count.acquire()
    assert made == wanted
    ahead.advance(40)
    assert not count.acquire(timeout=0.05), "340 is not below 40 + 300"
    ahead.advance(61)
    count.acquire()
    assert made == [*wanted, ("c", 0)], "440 is not below 101 + 300"
    ahead.close()
    assert made == [*wanted, ("c", 0)]


def test_all_is_read_in_order(paths, asked):
    made, count = asked
    ahead = ReadAhead(paths, WINDOW, PIECE)
    ahead.advance(1340)
    for _ in range(14):
        count.acquire()
    ahead.close()
    assert made == [
        *(("a", start) for start in (0, 100, 200)),
        ("b", 0),
        *(("c", start) for start in range(0, 1000, 100)),
    ]


def test_closing_ends_the_thread(paths, asked):
    before = threading.active_count()
    ahead = ReadAhead(paths, WINDOW, PIECE)
    ahead.close()
    assert threading.active_count() == before


def test_a_small_checkpoint_needs_no_thread(paths, asked):
    made, _ = asked
    ahead = ReadAhead(paths[:2], WINDOW, 340)
    ahead.advance(340)
    ahead.close()
    assert not made


def test_an_error_is_logged_and_loading_goes_on(paths, caplog, monkeypatch):
    def fail(*_):
        raise OSError("not supported")

    monkeypatch.setattr(os, "posix_fadvise", fail)
    ahead = ReadAhead(paths, WINDOW, PIECE)
    ahead._thread.join()
    ahead.advance(100)
    ahead.close()
    assert [record.message for record in caplog.records] == [
        "files are not read ahead, so loading from a disk is slower: not supported"
    ]
