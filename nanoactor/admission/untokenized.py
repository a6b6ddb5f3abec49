"""The requests that are at the tokenizers, and the choice of a tokenizer for the next one."""

from __future__ import annotations

# If there are several tokenizers, the first one gets no prompts longer than this, in bytes.
_LONG_PROMPT_BYTES = 64 * 1024


class UntokenizedRequests:
    """The requests that were sent to a tokenizer and that no tokenizer has processed yet. The
    frontend uses it to spread requests over the tokenizers."""

    def __init__(self, num_tokenizers: int) -> None:
        self._requests: dict[int, tuple[int, int]] = {}
        """(index of the tokenizer, charge) of each request by uid. The charge is the request's size
        as it counts towards the limits."""
        self._load = [0] * num_tokenizers
        """Sum of the charges of the requests at each tokenizer."""

    def __len__(self) -> int:
        """Return the number of requests that no tokenizer has processed yet."""
        return len(self._requests)

    def choose_tokenizer(self, size: int) -> int:
        """Return the index of the least loaded tokenizer for a prompt of `size` bytes or tokens. If
        there are several tokenizers, the first one receives no long prompts, so that short prompts
        need not wait for long ones."""
        first = 1 if size > _LONG_PROMPT_BYTES and len(self._load) > 1 else 0
        return min(range(first, len(self._load)), key=self._load.__getitem__)

    def add(self, uid: int, tokenizer: int, charge: int) -> None:
        """Record that a request was sent to the tokenizer with index `tokenizer`."""
        self._load[tokenizer] += charge
        self._requests[uid] = (tokenizer, charge)

    def remove(self, uid: int) -> None:
        """Record that a tokenizer has processed a request. Other requests are ignored."""
        tokenizer, charge = self._requests.pop(uid, (0, 0))
        self._load[tokenizer] -= charge

    def tokenizer_of(self, uid: int) -> int | None:
        """Return the index of the tokenizer that has yet to process a request; None if there is
        none."""
        return self._requests.get(uid, (None, 0))[0]

    def clear(self) -> None:
        """Forget all requests, because the tokenizers restart."""
        self._requests, self._load = {}, [0] * len(self._load)
