"""Notes which public methods of the package the tests use, and only the tests: what the package calls in
itself does not count."""

import functools
import inspect
import pathlib
import sys

HERE = str(pathlib.Path(__file__).resolve().parent)

used = set()


def public(cls):
    """The names that a class offers itself."""
    kinds = (classmethod, property)
    members = vars(cls).items()
    return {
        name
        for name, member in members
        if not name.startswith("_") and (isinstance(member, kinds) or inspect.isfunction(member))
    }


def watch(cls):
    """From now on every use of a public name of this class by a test is noted."""
    for name in public(cls):
        member = vars(cls)[name]
        if isinstance(member, classmethod):
            setattr(cls, name, classmethod(noting(cls, name, member.__func__)))
        elif isinstance(member, property):
            read = noting(cls, name, member.fget)
            setattr(cls, name, property(read, member.fset, member.fdel, member.__doc__))
        else:
            setattr(cls, name, noting(cls, name, member))


def noting(cls, name, function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if sys._getframe(1).f_code.co_filename.startswith(HERE):
            used.add((cls.__name__, name))
        return function(*args, **kwargs)

    return wrapper
