"""Fixtures of the tests of models."""

import os

import pytest

from nanoactor.models.devices.cuda.kernels import nvrtc


@pytest.fixture(scope="session")
def compiler():
    """NVRTC; tests that need it are skipped where it is not installed."""
    try:
        return nvrtc._nvrtc()
    except nvrtc.CompileError as error:
        if os.environ.get("CI"):  # which installs it
            raise
        pytest.skip(f"{error}; pip install .[kernels]")
