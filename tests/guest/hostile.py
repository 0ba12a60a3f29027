"""Makes the attempts of the groups that its argument names, by every means of a root user, and prints a line of
JSON for each. What a group needs to know of the host is in the argument, too."""

import importlib

import attempts

for group in attempts.CONFIG["groups"]:
    importlib.import_module(f"hostile_{group}")
attempts.run()
