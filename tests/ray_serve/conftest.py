"""These tests need Ray; where it is not installed they are skipped, and that is said."""

import importlib.util

import pytest

WHY = "Ray is not installed: pip install 'nanoactor[ray]'"


def pytest_collection_modifyitems(items):
    is_there = importlib.util.find_spec("ray") is not None
    for item in items:
        if "ray_serve" in item.path.parts:
            # Ray warns of itself when it is imported.
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
            if not is_there:
                item.add_marker(pytest.mark.skip(reason=WHY))
