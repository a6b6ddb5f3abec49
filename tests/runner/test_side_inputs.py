"""What has arrived is reported to the scheduler once, as soon as there is room for it."""

from types import SimpleNamespace

from nanoactor.actors.side_inputs import SideInputs
from tests.runner.test_masks import masks
from tests.runner.test_pixels import pieces


class Outbox:
    """Has room or not, and keeps what was sent."""

    def __init__(self):
        self.ready, self.sent = True, []

    def send(self, message):
        self.sent.append((type(message).__name__, message.rank, plain(message)))


def plain(message):
    if hasattr(message, "pixels"):
        return message.pixels.tolist()
    return [*zip(message.uids.tolist(), message.positions.tolist(), strict=True)]


def test_arrivals_wait_for_room_and_are_reported_together():
    outbox = Outbox()
    inputs = SideInputs(SimpleNamespace(rank=1), lambda: outbox)
    outbox.ready = False
    for piece in [*pieces(7, 6), *pieces(8, 12), pieces(9, 6)[0]]:
        inputs.add_pixels(piece)
    inputs.add_masks(masks((3, 20)))
    inputs.add_masks(masks((4, 9)))
    assert outbox.sent == []
    outbox.ready = True
    inputs.report()
    told = [("ItemsReady", 1, [7, 8]), ("MasksReady", 1, [(3, 20), (4, 9)])]
    assert outbox.sent == told, "9 is not complete"
    inputs.report()
    assert outbox.sent == told
    inputs.add_pixels(pieces(9, 6)[1])
    assert outbox.sent[2:] == [("ItemsReady", 1, [9])]
