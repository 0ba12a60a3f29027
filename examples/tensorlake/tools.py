"""Installs Python packages in a sandbox from the registry that this machine uses."""

import os
import pathlib
import subprocess
import sys
import tempfile

WHERE = "/opt/tools"


def pip_settings():
    """This machine's pip configuration as environment, which is how it travels."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install"):
            settings.setdefault("PIP_" + key.upper().replace("-", "_"), value.strip("'"))
    # Files of this machine are not there inside.
    for name in ("PIP_FIND_LINKS", "PIP_CERT", "PIP_CACHE_DIR", "PIP_CONFIG_FILE"):
        settings.pop(name, None)
    return settings


def install(sandbox, packages):
    """Installs `packages`, and says how: from the registry, or with what this machine fetched."""
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", WHERE]
    limits = {"PIP_DEFAULT_TIMEOUT": "3", "PIP_RETRIES": "0"}
    direct = sandbox.run("python3", [*pip, *packages], env={**pip_settings(), **limits}, timeout=60)
    if direct.exit_code == 0:
        return "from the registry"
    with tempfile.TemporaryDirectory() as wheels:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
        subprocess.run([*fetch, "--only-binary", ":all:", *packages], check=True)
        for wheel in sorted(pathlib.Path(wheels).iterdir()):
            sandbox.upload_file(wheel, f"/tmp/wheels/{wheel.name}")
    offline = ["--no-index", "--no-deps", "--find-links", "/tmp/wheels"]
    done = sandbox.run("python3", [*pip, *offline, *packages])
    if done.exit_code != 0:
        raise RuntimeError(f"pip inside: {done.stderr}")
    return "with wheels that this machine fetched"
