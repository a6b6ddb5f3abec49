"""The engine's errors, as clients see them."""

import pytest

from nanoactor import errors
from nanoactor.server.errors import from_engine


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.EngineOverloaded("full"), 429, "overloaded"),
        (errors.EngineDead("gone"), 503, "engine_dead"),
        (errors.EngineClosed("closed"), 503, "engine_dead"),
        (errors.ComputationFailed("not a number"), 500, "computation_failed"),
        # The official client tries 408, 409, 429 and what is from 500 on again.
        (errors.PoisonRequest("it kills"), 422, "poison_request"),
        (errors.InvalidRequest("no"), 400, None),
    ],
)
def test_each_error_has_its_status_and_code(error, status, code):
    told = from_engine(error, frozenset())
    assert (told.status, told.code) == (status, code)
    assert told.message == str(error)
