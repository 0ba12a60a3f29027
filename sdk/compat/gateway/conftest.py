"""A daemon of its own for all tests, with images that have the servers in them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tensorlake"))
os.environ["TORPOR_EGRESS_OUTGOING"] = '["127.0.0.0/8"]'

import daemon as daemons  # noqa: E402

CACHE = pathlib.Path(os.environ["TORPOR_COMPAT_CACHE"])
OLD, NEW = "2025.9.25", "2026.8.31"
EVERYTHING = ["node", "/srv/node_modules/@modelcontextprotocol/server-everything/dist/index.js"]


class Gateway:
    """The verbs of a user."""

    def __init__(self, world):
        self.world = world
        self.url = f"{world.daemon.url}/v1/mcp/gateway"

    def run(self, *args, code=0, stdin=None):
        env = {**os.environ, "TORPOR_SERVER": self.world.daemon.url}
        done = subprocess.run([daemons.BINARY, *args], env=env, input=stdin, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, f"{args}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def json(self, *args):
        # What comes after `--` is a command of its own.
        return json.loads(self.run(*args[:2], "--json", *args[2:]))

    def add(self, name, *args):
        """Adds a server and approves what it shows."""
        added = self.json("gateway", "add", name, "--approve", *args)
        assert added["problem"] is None, added
        return added

    def image(self, name, source, place):
        context = self.world.dir / f"image-{name}"
        context.mkdir()
        subprocess.run(["cp", "-a", source, context / "files"], check=True)
        (context / "Dockerfile").write_text(f"FROM torpor/base\nCOPY files {place}\n")
        self.run("image", "build", str(context), "--name", name)


@pytest.fixture(scope="session")
def gateway():
    world = daemons.World()
    try:
        gateway = Gateway(world)
        for version in [OLD, NEW]:
            source = CACHE / f"everything-{version}" / "node_modules"
            gateway.image(f"everything-{version.split('.')[0]}", source, "/srv/node_modules")
        gateway.image("servers", CACHE / "servers" / "python", "/srv/python")
        yield gateway
    finally:
        world.remove()
