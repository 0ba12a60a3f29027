"""Looks back at all tests: everything that the package offers was used by one of them."""

import pytest
from tensorlake import sandbox

import conftest
import surface

# What no test uses, and why.
EXCUSED = {}


def test_every_public_method_was_used(request):
    if not request.config.whole:
        pytest.skip("not all tests ran")
    offered = {(cls, name) for cls in conftest.WATCHED for name in surface.public(getattr(sandbox, cls))}
    assert offered - surface.used - set(EXCUSED) == set()
    assert set(EXCUSED) - offered == set(), "excused, but not offered any more"
