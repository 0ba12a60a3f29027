"""Runs in a fork: one analysis of the project, chosen by the environment, one line of JSON.

The tools are in /opt/tools. Prints {"analysis", "findings": [{"file", "line", "severity", "text"}], …}.
"""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import time

PROJECT = pathlib.Path("/workspace/project")
TOOLS = "/opt/tools"


def tool(*command):
    """The lines that a tool prints about the project, as (file, line, text)."""
    environment = {**os.environ, "PYTHONPATH": TOOLS}
    done = subprocess.run(
        [sys.executable, "-m", *command, "."],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    for line in done.stdout.splitlines():
        if found := re.match(r"(?:\./)?([^:]+):(\d+):(?:\d+:?)?\s*(.*)", line):
            yield found[1], int(found[2]), found[3]


def trees():
    for path in sorted(PROJECT.rglob("*.py")):
        yield str(path.relative_to(PROJECT)), ast.parse(path.read_text())


def names():
    for file, line, text in tool("pyflakes"):
        yield file, line, "high" if "undefined" in text else "medium", text


def style():
    for file, line, text in tool("pycodestyle", "--max-line-length=100"):
        yield file, line, "low", text


def complexity():
    branches = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.BoolOp, ast.IfExp)
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                score = 1 + sum(isinstance(inner, branches) for inner in ast.walk(node))
                if score > 8:
                    yield file, node.lineno, "medium", f"{node.name} has a complexity of {score}"


def security():
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                shell = any(word.arg == "shell" for word in node.keywords)
                if name in ("eval", "exec") or shell:
                    yield file, node.lineno, "high", f"{name} of something that comes from outside"
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                yield file, node.lineno, "medium", "every exception is swallowed"


def promises():
    for path in sorted(PROJECT.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := re.search(r"#\s*(TODO|FIXME)\b:?\s*(.*)", line):
                yield str(path.relative_to(PROJECT)), number, "low", f"{found[1]}: {found[2]}"


ANALYSES = {
    "names": names,
    "style": style,
    "complexity": complexity,
    "security": security,
    "promises": promises,
}


def main():
    chosen = os.environ["ANALYSIS"]
    begun = time.perf_counter()
    found = [
        {"file": file, "line": line, "severity": severity, "text": text}
        for file, line, severity, text in ANALYSES[chosen]()
    ]
    elapsed = round((time.perf_counter() - begun) * 1000, 1)
    print(json.dumps({"analysis": chosen, "findings": found, "elapsed_ms": elapsed}))


if __name__ == "__main__":
    main()
