"""Sending of requests from the frontend to the scheduler, the tokenizers and the vision workers."""

from __future__ import annotations

from collections.abc import Sequence

from nanoactor.actors.media_sending import MediaSender
from nanoactor.admission.admission import Admission
from nanoactor.admission.untokenized import UntokenizedRequests
from nanoactor.messages.engine import Abort, Submit
from nanoactor.messages.vision import ResendMedia
from nanoactor.recovery.journal import Entry, Journal
from nanoactor.recovery.resuming import resume_submits
from nanoactor.runtime.outbox import Outbox


class RequestSender:
    """Sender of requests, and of their aborts, to the actors that process them first. The frontend
    uses it for new requests and for requests that resume after a restart."""

    def __init__(self, journal: Journal, untokenized: UntokenizedRequests) -> None:
        self._journal, self._untokenized = journal, untokenized
        self.media = MediaSender(())
        self.num_direct = 0
        """Number of requests admitted without a tokenizer since the start."""

    def connect(
        self,
        admission: Admission,
        scheduler: Outbox,
        tokenizers: Sequence[Outbox],
        vision: Sequence[Outbox],
    ) -> None:
        """Send to these actors from now on. Media that were in transit before are dropped.
        `tokenizers` and `vision` are the outboxes to the tokenizers and to the vision workers, by
        index."""
        self._admission, self._scheduler, self._tokenizers = admission, scheduler, tokenizers
        self.media = MediaSender(vision)

    def send(self, entry: Entry, submit: Submit, direct: bool) -> None:
        """Send a new or resumed request to a tokenizer, or to the scheduler if `direct` is True and
        the request needs no tokenizer."""
        admit = self._admission.direct(submit) if direct else None
        if admit is not None:
            self.num_direct += 1
            self._scheduler.send(admit)
        else:
            self._send_to_tokenizer(entry, submit)

    def _send_to_tokenizer(self, entry: Entry, submit: Submit) -> None:
        uid, tokenizer = submit.uid, self._untokenized.choose_tokenizer(entry.charge)
        self._tokenizers[tokenizer].send(submit)
        for item in range(len(entry.media)):
            self.media.send(entry, uid, item, tokenizer)
        self._untokenized.add(uid, tokenizer, entry.charge)

    def send_again(self, entry: Entry) -> None:
        """Send the unfinished sequences of a request again. They resume after the output that their
        reader has received."""
        for submit in resume_submits(entry):
            # Sequences with output resume at once; requests without output go to the tokenizers.
            self.send(entry, submit, direct=submit.output is not None)

    def resend(self, event: ResendMedia) -> None:
        """Send media again that a vision worker has dropped, unless the request has finished."""
        for uid, item in zip(event.uids.tolist(), event.items.tolist(), strict=True):
            entry = self._journal.find(uid)
            if entry is not None and not self.media.is_sending(uid, item):
                self.media.send(entry, uid, item, -1)

    def abort(self, entry: Entry) -> None:
        """Tell the scheduler to abort the unfinished sequences of a request. A tokenizer that may
        still spend time on the request is told too."""
        live = self._journal.live_uids(entry)
        for uid in live:
            self._scheduler.send(Abort(uid))
        if entry.submit.chat is None and not entry.media:
            return
        for uid in live:
            if (tokenizer := self._untokenized.tokenizer_of(uid)) is not None:
                self._tokenizers[tokenizer].send(Abort(uid))
