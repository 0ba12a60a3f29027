"""The package of before secrets were taken out of it: it sends `secret_names`, and `tl-user` as the user of
every command. It runs in a process of its own, with the environment and nothing else from us."""

import json
import os
import subprocess
import sys

import pytest

from helpers import fresh_name, lifecycle, own_list

PROGRAM = """
import json, sys
import tensorlake
from importlib.metadata import version
from tensorlake.sandbox import Sandbox

name = sys.argv[1]
told = {}
with Sandbox.create(name=name, cpus=1.0, memory_mb=1024, secret_names=["OLD_TOKEN"]) as box:
    told["id"] = box.sandbox_id
    told["secret"] = box.run("sh", ["-c", "echo $OLD_TOKEN"]).stdout
    told["user"] = box.run("id", ["-un"]).stdout
    told["root"] = box.run("id", ["-un"], user="root").stdout
    box.write_file("/tmp/old", b"an old file")
    told["file"] = box.read_file("/tmp/old").value.decode()
    told["listed"] = "old" in [entry.name for entry in box.list_directory("/tmp").entries]
    started = box.start_process("sh", ["-c", "echo started; echo $OLD_TOKEN"])
    told["followed"] = [event.line for event in box.follow_stdout(started.pid)]
    box.suspend()
    told["asleep"] = box.status.value
    box.resume()
    told["awake"] = box.run("cat", ["/tmp/old"]).stdout
    snapshot = box.checkpoint()
    told["snapshot"] = snapshot.status.value
    Sandbox.delete_snapshot(snapshot.snapshot_id)
told["version"] = version("tensorlake")
print(json.dumps(told))
"""


@pytest.fixture
def secret():
    made = lifecycle("POST", "/secrets", body={"name": "OLD_TOKEN", "value": "kept well"}).json()
    yield
    lifecycle("DELETE", f"/secrets/{made['id']}")


@pytest.fixture
def told(old_package, secret):
    """What the program above tells."""
    environment = {**os.environ, "PYTHONPATH": str(old_package)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, fresh_name("old")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_old_package_gets_its_secrets_and_its_user(told):
    assert told["version"] == "0.5.31"
    assert told["secret"] == "kept well"
    assert (told["user"], told["root"]) == ("tl-user", "root")
    assert (told["file"], told["listed"]) == ("an old file", True)
    assert told["followed"] == ["started", "kept well"]
    assert (told["asleep"], told["awake"]) == ("suspended", "an old file")
    assert told["snapshot"] in ("local_ready", "completed")
    assert told["id"] not in [one["id"] for one in own_list("sandboxes")]
