"""File systems, which are drives: in sandboxes, in claims on pools, and their files from outside."""

import hashlib
import os

import pytest
from tensorlake.filesystem import (
    FileNotFoundInFilesystemError,
    FilesystemAPIError,
    FilesystemClient,
    FilesystemError,
    FilesystemNotFoundError,
)
from tensorlake.sandbox import (
    AsyncSandbox,
    AsyncSandboxClient,
    FileSystemMount,
    RemoteAPIError,
    Sandbox,
    SandboxError,
    create_file_system,
    delete_file_system,
    list_file_systems,
)

from helpers import BASE_IMAGE, fresh_name, own, server

VERSION = "a" * 64


@pytest.fixture
def stores():
    return FilesystemClient()


@pytest.fixture
def store(stores):
    """A file system of the test's own."""
    return stores.create(fresh_name("store"))


@pytest.fixture
def pool(client):
    """A pool with one sandbox ready ahead."""
    return client.create_pool(image=BASE_IMAGE, cpus=1.0, memory_mb=1024, warm_containers=1).pool_id


def at(store, path, **more):
    return FileSystemMount(file_system_id=store.name, mount_path=path, **more)


def refused(call):
    """What the client says of a call that is refused because it is not possible here."""
    with pytest.raises(FilesystemAPIError) as error:
        call()
    assert error.value.status_code == 400, error.value
    return error.value.message


# === From outside ===


def test_a_file_system_is_made_found_listed_and_deleted(stores, nothing_leaked):
    name = fresh_name("store")
    assert stores.create(name).name == name
    assert stores.get(name).name == name
    [found] = [one for one in stores.list() if one.name == name]
    assert (found.kind, found.status) == ("filesystem", "active")
    assert own("GET", f"/drives/{name}").json()["kind"] == "drive"
    status = stores.get(name).status()
    assert (status.name, status.status, status.version_id) == (name, "active", None)
    with pytest.raises(FilesystemAPIError) as again:
        stores.create(name)
    assert again.value.status_code == 409
    stores.delete(name)
    for gone in (stores.get, stores.delete):
        with pytest.raises(FilesystemNotFoundError):
            gone(name)


def test_the_older_functions_make_list_and_delete_one(nothing_leaked):
    name = fresh_name("store")
    made = create_file_system(name, "of a test")
    assert (made.id, made.status) == (name, "ready")
    assert name in [one.id for one in list_file_systems()]
    delete_file_system(name)
    with pytest.raises(SandboxError):
        delete_file_system(name)


def test_files_are_written_read_and_listed(store):
    written = store.write_file("docs/hello.txt", "hello")
    assert written.created
    store.write_files({"a b+c%.txt": b"odd name", "empty": b"", "raw": bytes(range(256))})
    assert store.read_text("docs/hello.txt") == "hello"
    assert store.read_file("a b+c%.txt") == b"odd name"
    assert store.read_file("empty") == b""
    assert store.read_file("raw") == bytes(range(256))
    listed = {one.name: (one.kind, one.size) for one in store.list_files()}
    expected = {"a b+c%.txt": ("file", 8), "empty": ("file", 0), "raw": ("file", 256), "docs": ("directory", None)}
    assert listed == expected
    assert [one.path for one in store.list_files("docs")] == ["docs/hello.txt"]
    store.write_file("docs/hello.txt", "replaced")
    assert store.read_text("docs/hello.txt") == "replaced"


def test_files_are_moved_copied_and_deleted(store):
    store.write_files({"one": "1", "dir/two": "2"})
    store.move_file("one", "new/one")
    store.copy_file("dir", "copy")
    store.copy_file("dir/two", "three")
    store.delete_file("dir/two")
    assert {one.name for one in store.list_files()} == {"new", "copy", "dir", "three"}
    assert store.list_files("dir") == []
    for path, text in (("new/one", "1"), ("copy/two", "2"), ("three", "2")):
        assert store.read_text(path) == text
    store.write_files({"four": "4"}, deletes=["three"])
    with pytest.raises(FileNotFoundInFilesystemError):
        store.read_file("three")


def test_a_file_of_many_parts_arrives_whole(store, tmp_path):
    # The client cuts at 64 MiB.
    content = os.urandom(1 << 20) * 65
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(content)
    small.write_bytes(b"small")
    store.write_file_from_path("large", large)
    store.write_files_from_paths({"deep/small": small, "deep/other": small})
    assert hashlib.sha256(store.read_file("large")).digest() == hashlib.sha256(content).digest()
    assert store.read_file("deep/other") == b"small"
    # Nothing is left of what came in parts.
    own_view = own("GET", f"/drives/{store.name}/files/list?path=/").json()["entries"]
    assert {one["path"] for one in own_view} == {"large", "deep"}


def test_a_fork_has_the_files_of_that_moment(stores, store):
    store.write_file("note", "before")
    fork = stores.fork(fresh_name("fork"), store.name)
    store.write_file("note", "after")
    assert (fork.read_text("note"), store.read_text("note")) == ("before", "after")
    with pytest.raises(FilesystemNotFoundError):
        stores.fork(fresh_name("fork"), "no-such-store")


def test_versions_and_snapshots_are_refused_with_what_to_do_instead(stores, store):
    store.write_file("note", "text")
    assert store.list_snapshots() == []
    for call in (
        lambda: store.snapshot("kept"),
        lambda: store.delete_snapshot(VERSION),
        lambda: store.read_file("note", version=VERSION),
        lambda: store.list_files(version=VERSION),
        lambda: stores.fork(fresh_name("fork"), store.name, VERSION),
    ):
        said = refused(call)
        assert "versions" in said and "fork" in said
    assert "region" in refused(lambda: stores.create(fresh_name("store"), region="eu-central-1"))


def test_files_asked_for_wrongly_are_refused_in_words(stores, store):
    store.write_file("dir/note", "text")
    for missing in (lambda: store.read_file("none"), lambda: store.list_files("none")):
        with pytest.raises(FileNotFoundInFilesystemError):
            missing()
    for call in (
        lambda: store.delete_file("none"),
        lambda: store.move_file("none", "x"),
        lambda: store.copy_file("none", "x"),
    ):
        assert "none" in refused(call)
    for call in (lambda: store.read_file("dir"), lambda: store.delete_file("dir"), lambda: store.write_file("dir", "x")):
        with pytest.raises(FilesystemAPIError) as error:
            call()
        assert error.value.status_code == 422 and "dir" in error.value.message
    assert store.read_text("dir/note") == "text"
    with pytest.raises(FilesystemError):
        store.write_file("../outside", "x")
    assert "Not_A_Name" in refused(lambda: stores.create("Not_A_Name"))
    assert "Not_A_Name" in refused(lambda: stores.fork("Not_A_Name", store.name))


def test_a_file_system_that_is_full_says_so(stores, nothing_leaked):
    name = fresh_name("small")
    assert own("POST", "/drives", body={"name": name, "size_mib": 16}).status == 201
    with pytest.raises(FilesystemAPIError) as full:
        stores.get(name).write_file("large", os.urandom(32 << 20))
    assert "space" in full.value.message.lower()
    stores.get(name).write_file("small", "fits")
    own_view = own("GET", f"/drives/{name}/files/list?path=/").json()["entries"]
    assert [one["path"] for one in own_view] == ["small"]
    stores.delete(name)


def test_an_api_key_of_torpor_opens_file_systems_on_this_host():
    made = own("POST", "/keys", body={"label": "for file systems"}).json()
    try:
        stores = FilesystemClient(api_key=made["secret"])
        store = stores.create(fresh_name("store"))
        store.write_file("note", "with a key")
        assert store.read_text("note") == "with a key"
        with pytest.raises(FilesystemError) as refused:
            FilesystemClient(api_key="wrong").list()
        assert "key" in str(refused.value)
        stores.delete(store.name)
        # Any other name of this host would make the client look for file systems elsewhere.
        far = f"http://[::ffff:127.0.0.1]:{server()[1]}"
        with pytest.raises(FilesystemError) as refused:
            FilesystemClient(api_key=made["secret"], api_url=far).list()
        assert "git.tensorlake.ai" in str(refused.value) and "ssh -L" in str(refused.value)
    finally:
        own("DELETE", f"/keys/{made['id']}", headers={"Authorization": f"Bearer {made['secret']}"})


# === In sandboxes ===


def test_a_file_system_is_a_drive_that_sandboxes_share(client, stores, nothing_leaked):
    store = stores.create(fresh_name("store"))
    store.write_file("from-outside", "seen inside")
    one = Sandbox.create(file_systems=[at(store, "/mnt/skills")])
    other = Sandbox.create()
    other.attach_file_system(store.name, "/skills", read_only=True)
    assert one.read_file("/mnt/skills/from-outside").value == b"seen inside"
    one.write_file("/mnt/skills/note", b"for all")
    assert other.read_file("/skills/note").value == b"for all"
    assert store.read_text("note") == "for all"
    assert other.run("touch", ["/skills/denied"]).exit_code != 0
    [mount] = other.list_file_systems()
    assert (mount.file_system_id, mount.mount_path, mount.read_only) == (store.name, "/skills", True)
    with pytest.raises(FilesystemAPIError) as used:
        stores.delete(store.name)
    assert used.value.status_code == 409
    client.detach_file_system(other.sandbox_id, "/skills")
    assert other.list_file_systems() == []
    assert other.run("test", ["-e", "/skills/note"]).exit_code != 0
    for box in (one, other):
        box.terminate()
    assert store.read_text("note") == "for all"
    stores.delete(store.name)


def test_file_systems_that_are_not_there_are_refused_in_words(client, nothing_leaked):
    box = Sandbox.create()
    assert box.list_file_systems() == []
    attempts = [
        lambda: box.attach_file_system("skills", "/mnt/skills"),
        lambda: box.detach_file_system("/mnt/skills"),
        lambda: client.attach_file_system(box.sandbox_id, "skills", "/mnt/skills", read_only=True),
        lambda: client.detach_file_system(box.sandbox_id, "/mnt/skills"),
    ]
    for attempt in attempts:
        with pytest.raises(RemoteAPIError) as refused:
            attempt()
        assert refused.value.status_code == 400
        assert "skills" in refused.value.message
    box.terminate()


def test_mounts_that_make_no_sense_are_refused_in_words(store):
    for more, word in (({"owner": "1001:1001"}, "owner"), ({"snapshot_id": VERSION, "read_only": True}, "snapshot_id")):
        with pytest.raises(RemoteAPIError) as refused:
            Sandbox.create(file_systems=[at(store, "/mnt", **more)])
        assert refused.value.status_code == 400 and word in refused.value.message
    for path in ("/proc", "/"):
        with pytest.raises(RemoteAPIError) as refused:
            Sandbox.create(file_systems=[at(store, path)])
        assert refused.value.status_code == 400 and path in refused.value.message
    with pytest.raises(RemoteAPIError) as refused:
        Sandbox.create(file_systems=[at(store, "/mnt"), at(store, "/mnt/below")])
    assert "/mnt" in refused.value.message


# === In claims ===


def test_a_claim_has_its_file_systems(client, pool, store):
    store.write_file("note", "for whoever is claimed")
    claimed = client.claim(pool, file_systems=[at(store, "/mnt/skills")])
    box = Sandbox.connect(claimed.sandbox_id)
    assert box.read_file("/mnt/skills/note").value == b"for whoever is claimed"
    other = Sandbox.create(pool_id=pool, file_systems=[at(store, "/skills", read_only=True)])
    box.write_file("/mnt/skills/note", b"changed")
    assert other.read_file("/skills/note").value == b"changed"
    [mount] = other.list_file_systems()
    assert (mount.file_system_id, mount.read_only) == (store.name, True)


async def test_an_asynchronous_claim_has_its_file_systems(client, pool, store):
    store.write_file("note", "for whoever is claimed")
    async with AsyncSandboxClient() as async_client:
        claimed = await async_client.claim(pool, file_systems=[at(store, "/mnt/skills")])
        box = await AsyncSandbox.connect(claimed.sandbox_id)
        assert (await box.read_file("/mnt/skills/note")).value == b"for whoever is claimed"
        [mount] = await box.list_file_systems()
        assert mount.file_system_id == store.name
        await box.detach_file_system("/mnt/skills")
        assert await box.list_file_systems() == []
        await async_client.attach_file_system(box.sandbox_id, store.name, "/again")
        assert (await box.read_file("/again/note")).value == b"for whoever is claimed"


async def test_an_asynchronous_sandbox_begins_with_its_file_systems(store):
    store.write_file("note", "there from the beginning")
    box = await AsyncSandbox.create(file_systems=[at(store, "/mnt/skills")])
    assert (await box.read_file("/mnt/skills/note")).value == b"there from the beginning"
    await box.write_file("/mnt/skills/answer", b"from inside")
    assert store.read_text("answer") == "from inside"
