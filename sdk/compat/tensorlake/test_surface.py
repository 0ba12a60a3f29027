"""Looks back at all tests: everything that the package offers was used by one of them."""

import pytest

import conftest
import surface

# What no test uses, and why.
LOCAL_MOUNT = "a newer `tl` program than the one in the package mounts it, and not through us"
EXCUSED = {
    ("FilesystemClient", "mount"): LOCAL_MOUNT,
    ("FilesystemClient", "unmount"): LOCAL_MOUNT,
    ("FilesystemClient", "mount_status"): LOCAL_MOUNT,
    ("Filesystem", "mount"): LOCAL_MOUNT,
}


def test_every_public_method_was_used(request):
    if not request.config.whole:
        pytest.skip("not all tests ran")
    offered = {(cls.__name__, name) for cls in conftest.watched() for name in surface.public(cls)}
    assert offered - surface.used - set(EXCUSED) == set()
    assert set(EXCUSED) - offered == set(), "excused, but not offered any more"
