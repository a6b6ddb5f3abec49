"""What a run's spans add up to, and the picture of them."""

from nanoactor.tracing.ledger import Ledger, Wait
from nanoactor.tracing.trace import Trace

__all__ = ["Ledger", "Trace", "Wait"]
