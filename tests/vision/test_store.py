"""Bytes that may be wanted again."""

from types import SimpleNamespace

from nanoactor.vision.store import MediaStore


def media(size):
    return SimpleNamespace(data=bytes(size))


def test_what_was_used_longest_ago_goes_first():
    store, first = MediaStore(10), media(4)
    store.add(b"a", first)
    store.add(b"b", media(4))
    assert store.get(b"a") is first
    store.add(b"c", media(4))
    assert (store.get(b"b"), store.nbytes) == (None, 8)
    store.add(b"a", first)  # again: it is used, and counts once
    store.add(b"d", media(6))
    assert (store.get(b"c"), store.get(b"a"), store.nbytes) == (None, first, 10)


def test_what_is_larger_than_the_store_is_not_kept():
    store = MediaStore(3)
    store.add(b"a", media(4))
    assert (store.get(b"a"), store.nbytes) == (None, 0)
