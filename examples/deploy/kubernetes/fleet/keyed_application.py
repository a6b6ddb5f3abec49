"""The application of `nanoactor.ray_serve`, with the API key from a Secret.

A RayService is readable for more people than a Secret, so its `serveConfigV2` names this module and
no key. Ray imports it on the cluster, where the key is in the environment.
"""

import os
from typing import Any

from nanoactor.ray_serve.application import Arguments
from nanoactor.ray_serve.application import app as without_key

VARIABLE = "NANOACTOR_API_KEY"


def app(arguments: Arguments) -> Any:
    """Return the application. Raises `SystemExit` if there is no key."""
    key = os.environ.get(VARIABLE)
    if not key:
        raise SystemExit(f"{VARIABLE} is not set: it comes from the Secret nanoactor-api-key")
    server = {**arguments.server, "api_keys": [key]}
    return without_key(arguments.model_copy(update={"server": server}))
