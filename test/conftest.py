"""For all tests."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def sigint_interrupts():
    """A shell starts what it puts into the background with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
