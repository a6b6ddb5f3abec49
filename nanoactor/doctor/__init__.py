"""`nanoactor doctor`: what of this machine is right for the engine, what is not, what mends it.

Facts are read in one place, judged in another: `examine(look())` is all there is to it.
"""

from nanoactor.doctor.facts import look
from nanoactor.doctor.finding import Finding
from nanoactor.doctor.findings import examine

__all__ = ["Finding", "examine", "look"]
