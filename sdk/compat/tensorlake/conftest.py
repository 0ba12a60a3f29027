"""One daemon for all tests, started before the package is imported, because the package reads its
environment when it is imported. After each test nothing is left of it but what is shared."""

import os
import pathlib

import pytest

import helpers
from daemon import World

HERE = pathlib.Path(__file__).resolve().parent
CACHE = pathlib.Path(os.environ.get("TORPOR_COMPAT_CACHE", ""))
# Any key will do while the daemon has none; the image functions refuse to work without.
KEY = "tl_apiKey_of_the_tests"

# Ids of sandboxes that outlive a test.
_shared = set()


def pytest_sessionstart(session):
    for name in list(os.environ):
        if name.startswith(("TENSORLAKE_", "INDEXIFY_")):
            del os.environ[name]
    os.environ["TENSORLAKE_API_KEY"] = KEY
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1"
    session.config.world = None
    # Nothing answers there, for those who only want to see which tests there are.
    os.environ["TENSORLAKE_API_URL"] = "http://localhost:9"
    if not session.config.option.collectonly:
        session.config.world = World()
        os.environ["TENSORLAKE_API_URL"] = session.config.world.daemon.url
    watch_the_package()


def watch_the_package():
    import surface

    for cls in watched():
        surface.watch(cls)


def watched():
    """The classes of the package whose public methods the tests have to use."""
    from tensorlake import filesystem, sandbox

    return [getattr(sandbox, name) for name in SANDBOXES] + [getattr(filesystem, name) for name in FILE_SYSTEMS]


FILE_SYSTEMS = ["FilesystemClient", "Filesystem"]
SANDBOXES = [
    "Sandbox",
    "AsyncSandbox",
    "SandboxClient",
    "AsyncSandboxClient",
    "Pty",
    "AsyncPty",
    "Desktop",
    "TcpTunnel",
    "AsyncTcpTunnel",
]


def pytest_unconfigure(config):
    world = getattr(config, "world", None)
    if world is not None:
        world.remove()


def pytest_collection_modifyitems(config, items):
    """What looks back at all tests comes last, and only if all of them ran."""
    last = [item for item in items if item.path.name == "test_surface.py"]
    items[:] = [item for item in items if item not in last] + last
    there = {path.name for path in HERE.glob("test_*.py")}
    whole = {item.path.name for item in items} == there
    whole = whole and not config.option.keyword and not any("::" in arg for arg in config.args)
    config.whole = whole and not config.option.lf if hasattr(config.option, "lf") else whole


@pytest.fixture(scope="session", autouse=True)
def world(request):
    """The daemon under test. At the end it is stopped, and nothing of it is left on the host."""
    world = request.config.world
    wait = lambda: helpers.request("GET", "/healthz").status == 200  # noqa: E731
    helpers.wait_for("the daemon to be healthy", wait)
    yield world
    remove_everything()
    installation = helpers.own("GET", "/info").json()["installation"]
    left = world.stop(installation)
    assert not left, f"something is left on the host: {left}"


@pytest.fixture(autouse=True)
def cleaned():
    """After each test its sandboxes, snapshots, pools and drives are removed."""
    yield
    remove_everything(but=_shared)


def remove_everything(but=frozenset()):
    for pool in helpers.own_list("pools"):
        helpers.own("DELETE", f"/pools/{pool['name']}")
    for box in helpers.own_list("sandboxes"):
        if box["id"] not in but:
            helpers.own("DELETE", f"/sandboxes/{box['id']}")
    for snapshot in helpers.own_list("snapshots"):
        helpers.own("DELETE", f"/snapshots/{snapshot['id']}")
    for drive in helpers.own_list("drives"):
        helpers.own("DELETE", f"/drives/{drive['id']}")


@pytest.fixture(scope="session")
def box():
    """A running sandbox for tests that leave no trace in it worth speaking of."""
    from tensorlake.sandbox import Sandbox

    box = Sandbox.create(cpus=1.0, memory_mb=1024)
    _shared.add(box.sandbox_id)
    yield box
    _shared.discard(box.sandbox_id)
    box.terminate()


@pytest.fixture
def client():
    """The older client of the package, which has everything that the handles have."""
    from tensorlake.sandbox import SandboxClient

    with SandboxClient() as client:
        yield client


@pytest.fixture
def nothing_leaked():
    """Whatever the test tried, afterwards Torpor's own API lists what it listed before."""

    def listed():
        kinds = {"sandboxes": "id", "snapshots": "id", "pools": "name", "drives": "name"}
        return {kind: sorted(one[key] for one in helpers.own_list(kind)) for kind, key in kinds.items()}

    before = listed()
    yield
    helpers.wait_for(f"only {before} to be there", lambda: listed() == before)


@pytest.fixture(scope="session")
def old_package():
    """The directory of the package that still sends `secret_names`."""
    return CACHE / "old"


@pytest.fixture(scope="session")
def tl():
    """The command line program."""
    return CACHE / "cli" / "bin" / "tl"
