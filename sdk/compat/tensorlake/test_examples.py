"""The example programs, as a user would start them; their tables are printed for whoever reads the run."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples/tensorlake"
# Longer than any of them may take on a busy machine.
PATIENCE = 300


@pytest.mark.parametrize(
    ("program", "arguments", "proof"),
    [
        ("swarm.py", [], "warm fork"),
        ("researcher.py", [], "resume"),
        ("sqlite_bench.py", ["--times", "1"], "FULL"),
    ],
)
def test_an_example_does_its_work_and_shows_what_it_took(program, arguments, proof, capsys):
    command = [sys.executable, EXAMPLES / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    with capsys.disabled():
        print(f"\n--- {program}\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    assert proof in done.stdout
