"""Uses the client that was generated (`run`): one call that works, and one that is refused."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import attrs
from client import Client
from client.api.sandboxes import get_sandbox, list_sandboxes
from client.models import Error, Sandbox, SandboxList

PATIENCE = 30


def main():
    # Every schema that an SDK is built of is there under its own name.
    assert {"id", "image", "created_at", "state"} <= {field.name for field in attrs.fields(Sandbox)}
    with tempfile.TemporaryDirectory(prefix="torpor-generated-") as data_dir:
        daemon = subprocess.Popen(
            [os.environ["TORPOR_BIN"], "serve", "--listen", "127.0.0.1:0", "--data-dir", data_dir],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            address = daemon.stdout.readline().decode().strip().rpartition("http://")[2].rstrip("/")
            client = Client(base_url=f"http://{address}", timeout=PATIENCE)
            listed = list_sandboxes.sync(client=client)
            assert isinstance(listed, SandboxList) and listed.sandboxes == [], listed
            refused = get_sandbox.sync(sandbox="nobody", client=client)
            assert isinstance(refused, Error) and refused.code == "sandbox_not_found", refused
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(timeout=PATIENCE)
            purge = [os.environ["TORPOR_BIN"], "purge", "--yes", "--data-dir", data_dir]
            subprocess.run(purge, capture_output=True, check=False)


if __name__ == "__main__":
    begun = time.monotonic()
    main()
    print(f"a generated client works ({time.monotonic() - begun:.1f} s)", file=sys.stderr)
