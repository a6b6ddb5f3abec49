"""Starts the scripted model as a process of its own."""

import contextlib
import re
import signal
import subprocess
import sys

from tests.product_files import ROOT


@contextlib.contextmanager
def scripted_server(model):
    """The URL of a server of the scripted model; `model` is a folder that is made for it."""
    command = [sys.executable, "-m", "tests.clients.scripted_model", str(model), "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()
