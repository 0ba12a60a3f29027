"""The daemon under test: `torpor serve` as a process of ours, in a data directory of its own.

The default image is made once, in the same template and in the same way as the end-to-end tests in Rust
(`tests/src/template.rs`) do it, so whoever comes first makes it for both.
"""

import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

from helpers import PATIENCE, wait_for
from traces import Traces

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BINARY = pathlib.Path(os.environ.get("TORPOR_BIN", ROOT / "target/debug/torpor")).resolve()


class Daemon:
    """A running `torpor serve`. `stop` ends it and says what it left on the host."""

    def __init__(self, data_dir):
        self.data_dir = pathlib.Path(data_dir)
        self.log = self.data_dir.with_suffix(".log")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [BINARY, "serve", "--listen", "127.0.0.1:0", "--data-dir", self.data_dir],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                # A test makes a key and revokes it; the others have none.
                env={**os.environ, "TORPOR_LOG_LEVEL": "debug,hyper=info,sqlx=warn", "TORPOR_REQUIRE_KEY": "false", "TORPOR_IMAGES_PULL": "never"},
            )
        line = self.process.stdout.readline().decode().strip()
        address = line.rpartition("http://")[2].rstrip("/")
        if ":" not in address:
            self.kill()
            raise RuntimeError(f"the daemon did not say where it listens: {line!r}\n{self.tail()}")
        self.port = int(address.rpartition(":")[2])

    @property
    def url(self):
        return f"http://localhost:{self.port}"

    def terminate(self):
        """SIGTERM, and waits until it ended well."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=PATIENCE)
        assert status == 0, f"the daemon ended with {status}\n{self.tail()}"

    def kill(self):
        self.process.kill()
        self.process.wait()

    def tail(self, lines=80):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class World:
    """A daemon with the default image and a directory that goes with it."""

    def __init__(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="torpor-compat-"))
        self.data_dir = self.dir / "data"
        self.data_dir.mkdir()
        self.daemon = None
        try:
            copy_template(self.data_dir)
            self.daemon = Daemon(self.data_dir)
        except BaseException:
            self.remove()
            raise

    def stop(self, installation):
        """Stops the daemon and returns what is left of its installation on the host."""
        self.daemon.terminate()
        self.daemon = None
        return Traces.find(installation, self.dir)

    def remove(self):
        """Removes everything, whatever state it is in."""
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon = None
        purge = [BINARY, "purge", "--yes", "--data-dir", self.data_dir]
        subprocess.run(purge, capture_output=True, check=False)
        shutil.rmtree(self.dir, ignore_errors=True)


def copy_template(data_dir):
    """Fills `data_dir` with a copy of the template, by hard links where that is possible."""
    template = ready_template()
    for how in ("-al", "-a"):
        copied = subprocess.run(["cp", how, "--", f"{template}/.", data_dir], capture_output=True)
        if copied.returncode == 0:
            break
        shutil.rmtree(data_dir)
        data_dir.mkdir()
    else:
        raise RuntimeError(f"the template can't be copied: {copied.stderr!r}")
    # The ledger is written in place: every world needs bytes of its own.
    for path in data_dir.iterdir():
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)


def ready_template():
    """The template, made if it is missing or of another build."""
    cache = pathlib.Path(os.environ.get("TORPOR_TEST_CACHE", BINARY.parent.parent / "test-cache"))
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, template = cache / "done", cache / "template"
        build = build_stamp()
        if done.exists() and done.read_text() == build:
            return template
        done.unlink(missing_ok=True)
        template.mkdir(exist_ok=True)
        make_template(template)
        done.write_text(build)
        return template


def build_stamp():
    """As the tests in Rust write it: length and time of the binary."""
    about = BINARY.stat()
    seconds, nanoseconds = divmod(about.st_mtime_ns, 1_000_000_000)
    return f"{about.st_size} Some(SystemTime {{ tv_sec: {seconds}, tv_nsec: {nanoseconds} }})"


def make_template(template):
    daemon = Daemon(template)
    try:
        server = {**os.environ, "TORPOR_SERVER": f"http://127.0.0.1:{daemon.port}"}
        for args in (["image", "base"], ["create", "--name", "first"], ["rm", "first"]):
            subprocess.run([BINARY, *args], env=server, check=True, capture_output=True)
    except BaseException:
        daemon.kill()
        raise
    daemon.terminate()
    wait_for("the daemon to be gone", lambda: daemon.process.poll() is not None)
