"""Exit with 0 if the server in this container answers, else with 1.

`NANOACTOR_HEALTH_URL` names another URL, for a server with another port or with TLS.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

DEFAULT = "http://127.0.0.1:8000/live"
SECONDS = 4.0


def check(url: str) -> str:
    """Return what is wrong; empty if the server answers with 200."""
    # The certificate is for the name that clients use, not for this address.
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(url, timeout=SECONDS, context=context):
            return ""
    except urllib.error.HTTPError as error:
        return f"{url}: status {error.code}"
    except OSError as error:
        return f"{url}: {error}"


if __name__ == "__main__":
    sys.exit(check(os.environ.get("NANOACTOR_HEALTH_URL") or DEFAULT) or 0)
