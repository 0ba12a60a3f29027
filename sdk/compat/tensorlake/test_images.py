"""Images: built from code and from Dockerfiles, imported, listed, found, deleted, made of a snapshot."""

import pytest
from tensorlake import (
    Image,
    delete_sandbox_image,
    find_sandbox_image_by_name,
    import_sandbox_image,
    list_sandbox_images,
)
from tensorlake.image import (
    ImageBuildCancellationOutcome,
    ImageBuildFailedError,
    ImageBuildNotFoundError,
    ImageBuildStatus,
    cancel_build,
    get_build,
    start_build,
    start_import,
    wait_build,
)
from tensorlake.image.sandbox_builder import build_sandbox_image
from tensorlake.sandbox import Sandbox, SandboxError

from helpers import BASE_IMAGE, fresh_name, request

# There is nothing on this host to sign in to.
NO_REGISTRY = {"docker_config_json": "{}"}
IMAGES = "/images/v4"


@pytest.fixture
def name():
    """A name for an image, which is removed after the test."""
    name = fresh_name("image")
    yield name
    request("DELETE", f"{IMAGES}/images/name/{name}")


@pytest.fixture(scope="module")
def from_code(tmp_path_factory):
    """The name of an image that was built from code, which several tests build on; a build takes long."""
    context, name = tmp_path_factory.mktemp("context"), fresh_name("from-code")
    (context / "note.txt").write_text("copied\n")
    (context / "added.txt").write_text("added\n")
    image = (
        Image(name=name, base_image=BASE_IMAGE)
        .run("echo made > /opt/made")
        .env("GREETING", "good day")
        .copy("note.txt", "/opt/note.txt")
        .add("added.txt", "/opt/added.txt")
        .workdir("/opt")
    )
    assert image.build(context_dir=str(context), **NO_REGISTRY)["name"] == name
    yield name
    delete_sandbox_image(name)


def test_an_image_is_built_from_code_and_a_sandbox_runs_it(from_code):
    assert find_sandbox_image_by_name(from_code)["name"] == from_code
    box = Sandbox.create(image=from_code)
    assert box.info().image == from_code
    assert box.run("sh", ["-c", "cat made note.txt added.txt; echo $GREETING; pwd"]).stdout == (
        "made\ncopied\nadded\ngood day\n/opt"
    )


def test_an_image_is_built_from_a_dockerfile_on_one_that_was_built_before(name, from_code, tmp_path):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(
        f"FROM {from_code}\n"
        "ARG WHO=nobody\n"
        'RUN echo "for $WHO" > /opt/who\n'
        "COPY note /opt/\n"
        "USER tl-user\n"
    )
    (tmp_path / "note").write_text("from the context\n")
    events = []
    build_sandbox_image(
        str(dockerfile),
        registered_name=name,
        build_args={"WHO": "everybody"},
        emit=events.append,
        **NO_REGISTRY,
    )
    assert "image_registered" in [event["type"] for event in events]
    box = Sandbox.create(image=name)
    # Of the image below, of the argument, of the context, and the user.
    assert box.run("sh", ["-c", "cat /opt/made /opt/who /opt/note; echo $GREETING; id -un"]).stdout == (
        "made\nfor everybody\nfrom the context\ngood day\ntl-user"
    )


def test_an_image_of_this_host_is_imported_under_another_name(name):
    imported = import_sandbox_image(BASE_IMAGE, registered_name=name, **NO_REGISTRY)
    assert imported["name"] == name
    assert Sandbox.create(image=name).run("echo", ["imported"]).stdout == "imported"


def test_images_are_listed_found_and_deleted(name):
    assert find_sandbox_image_by_name(name) is None
    import_sandbox_image(BASE_IMAGE, registered_name=name, **NO_REGISTRY)
    assert name in [image["name"] for image in list_sandbox_images()]
    assert find_sandbox_image_by_name(name)["name"] == name
    delete_sandbox_image(name)
    assert find_sandbox_image_by_name(name) is None
    assert name not in [image["name"] for image in list_sandbox_images()]
    with pytest.raises(SandboxError):
        Sandbox.create(image=name)


def test_the_built_in_image_needs_no_prefix():
    assert Sandbox.create(image="ubuntu-minimal").run("true").exit_code == 0


def test_an_image_is_made_of_a_snapshot(name):
    box = Sandbox.create()
    box.write_file("/opt/made", b"by hand")
    snapshot = box.checkpoint(poll_interval=0.05, wait_until="completed")
    body = {"name": name, "snapshot_id": snapshot.snapshot_id, "public": False}
    answer = request("POST", f"{IMAGES}/images/from-snapshot", body=body)
    assert answer.status == 201, answer
    record = answer.json()
    assert record["name"] == name
    assert record["id"].startswith("image_")
    Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert Sandbox.create(image=name).read_file("/opt/made").value == b"by hand"


def test_a_record_of_an_image_has_all_that_the_package_reads(name):
    import_sandbox_image(BASE_IMAGE, registered_name=name, **NO_REGISTRY)
    by_name = request("GET", f"{IMAGES}/images/name/{name}").json()
    record = request("GET", f"{IMAGES}/images/{by_name['id']}").json()
    assert record == by_name
    assert {"snapshot_id", "global", "created_at", "updated_at"} <= set(record)
    assert isinstance(record["physical_size_bytes"], int)
    assert isinstance(record["logical_size_bytes"], int)
    page = request("GET", f"{IMAGES}/images?page_size=1").json()
    assert len(page["items"]) == 1
    assert "next" in page["pagination"]


def test_a_build_is_started_looked_at_and_waited_for(name):
    handle = start_build(Image(name=name, base_image=BASE_IMAGE).run("true"), **NO_REGISTRY)
    assert handle.build_id
    assert get_build(handle.build_id).info.name == name
    assert handle.wait(timeout=60)["name"] == name
    assert handle.refresh().status == ImageBuildStatus.SUCCEEDED
    assert handle.cancel().outcome == ImageBuildCancellationOutcome.ALREADY_COMPLETED


def test_an_import_is_started_and_waited_for(name):
    handle = start_import(BASE_IMAGE, registered_name=name, **NO_REGISTRY)
    assert wait_build(handle.build_id, timeout=60)["name"] == name


def test_a_build_is_cancelled(name):
    image = Image(name=name, base_image=BASE_IMAGE).run("sleep 600")
    handle = start_build(image, **NO_REGISTRY)
    outcome = cancel_build(handle.build_id)
    assert outcome.outcome == ImageBuildCancellationOutcome.CANCELLED
    again = cancel_build(handle.build_id)
    assert again.outcome == ImageBuildCancellationOutcome.ALREADY_CANCELLED
    assert find_sandbox_image_by_name(name) is None


def test_a_build_that_fails_says_why_and_registers_nothing(name):
    image = Image(name=name, base_image=BASE_IMAGE).run("echo the reason >&2; exit 9")
    with pytest.raises(ImageBuildFailedError) as failed:
        image.build(**NO_REGISTRY)
    assert "9" in str(failed.value)
    assert find_sandbox_image_by_name(name) is None


def test_a_build_that_nobody_knows_is_not_found():
    with pytest.raises(ImageBuildNotFoundError):
        get_build("no-such-build")
    assert request("GET", f"{IMAGES}/images/image_nosuchimage").status == 404
    assert request("DELETE", f"{IMAGES}/images/name/no-such-image").status == 404


def test_a_context_that_is_not_what_was_announced_is_refused(name):
    body = {
        "kind": "dockerfile",
        "name": name,
        "dockerfile_path": "Dockerfile",
        "parents": [],
        "build_args": {},
        "disk_mb": 10240,
        "builder_resources": {"cpus": 2.0, "memory_mb": 4096},
    }
    headers = {"Idempotency-Key": "0" * 32}
    answer = request("POST", f"{IMAGES}/builds", body=body, headers=headers)
    assert answer.status in (200, 201, 202)
    admitted = answer.json()
    assert (admitted["status"], admitted["phase"]) == ("pending", "awaiting_context")
    # The same key asked again is the same build.
    again = request("POST", f"{IMAGES}/builds", body=body, headers=headers)
    assert again.json()["build_id"] == admitted["build_id"]
    path = admitted["context_upload"]["url"].partition("//")[2].partition("/")[2]
    request("PUT", f"/{path}", body=b"no tar at all")
    seal = {"digest": "0" * 64}
    answer = request("POST", f"{IMAGES}/builds/{admitted['build_id']}/context/seal", body=seal)
    assert 400 <= answer.status < 500
    cancel = request("POST", f"{IMAGES}/builds/cancel", body={"build_id": admitted["build_id"]})
    assert cancel.status == 200
