"""Files of a sandbox: written, read, uploaded, listed, deleted."""

import hashlib
import time

import pytest
from tensorlake.sandbox import RemoteAPIError

from helpers import fresh_name


@pytest.fixture
def place(box):
    """A directory in the shared sandbox for one test."""
    path = f"/tmp/{fresh_name('files')}"
    box.run("mkdir", [path])
    yield path
    box.run("rm", ["-rf", path])


def refusal(call, *args):
    with pytest.raises(RemoteAPIError) as refused:
        call(*args)
    return refused.value.status_code, refused.value.code


def test_what_is_written_is_read(box, place):
    content = bytes(range(256)) * 10
    box.write_file(f"{place}/bytes", content)
    assert box.read_file(f"{place}/bytes").value == content
    assert box.run("sha256sum", [f"{place}/bytes"]).stdout.startswith(
        hashlib.sha256(content).hexdigest()
    )
    box.write_file(f"{place}/bytes", b"short")
    assert box.read_file(f"{place}/bytes").value == b"short"


def test_an_empty_file_is_a_file(box, place):
    box.write_file(f"{place}/empty", b"")
    assert box.read_file(f"{place}/empty").value == b""


def test_directories_above_a_file_are_made(box, place):
    box.write_file(f"{place}/a/b/c.txt", b"deep")
    assert box.read_file(f"{place}/a/b/c.txt").decode() == "deep"


def test_names_with_blanks_and_other_letters_are_names(box, place):
    for name in ("a b.txt", "a+b", "50%", "ä ö ü", "q?x=1&y#z"):
        box.write_file(f"{place}/{name}", name.encode())
        assert box.read_file(f"{place}/{name}").decode() == name
    listed = {entry.name for entry in box.list_directory(place).entries}
    assert listed == {"a b.txt", "a+b", "50%", "ä ö ü", "q?x=1&y#z"}


def test_a_large_file_is_uploaded_whole(box, place, tmp_path):
    local = tmp_path / "large"
    content = bytes(1024) + b"x" * (24 * 1024 * 1024)
    local.write_bytes(content)
    assert box.upload_file(local, f"{place}/large").value is None
    assert box.run("stat", ["-c", "%s", f"{place}/large"]).stdout == str(len(content))
    back = box.read_file(f"{place}/large").value
    assert hashlib.sha256(back).digest() == hashlib.sha256(content).digest()


def test_a_directory_is_listed_with_sizes_and_times(box, place):
    box.write_file(f"{place}/file", b"12345")
    box.run("mkdir", [f"{place}/sub"])
    listing = box.list_directory(place)
    assert listing.path == place
    entries = {entry.name: entry for entry in listing.entries}
    assert set(entries) == {"file", "sub"}
    assert (entries["file"].is_dir, entries["file"].size) == (False, 5)
    assert entries["sub"].is_dir is True
    assert abs(entries["file"].modified_at.timestamp() - time.time()) < 60


def test_a_file_is_deleted(box, place):
    box.write_file(f"{place}/file", b"x")
    assert box.delete_file(f"{place}/file").value is None
    assert refusal(box.read_file, f"{place}/file") == (404, "NOT_FOUND")
    assert refusal(box.delete_file, f"{place}/file") == (404, "NOT_FOUND")


def test_what_is_no_file_or_no_directory_is_refused(box, place):
    box.write_file(f"{place}/file", b"x")
    assert refusal(box.read_file, "/nope") == (404, "NOT_FOUND")
    assert refusal(box.read_file, place) == (400, "IS_DIRECTORY")
    assert refusal(box.list_directory, f"{place}/file") == (400, "NOT_A_DIRECTORY")
    assert refusal(box.list_directory, f"{place}/nope") == (404, "NOT_FOUND")
    assert refusal(box.write_file, place, b"x")[0] == 400


def test_a_path_that_climbs_is_refused(box):
    assert refusal(box.read_file, "/tmp/../../etc/passwd") == (403, "PATH_TRAVERSAL")
    assert refusal(box.write_file, "/tmp/../etc/evil", b"x") == (403, "PATH_TRAVERSAL")
