"""Finds the program `millstream` and the soft device's library."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

#: The wheel has the program and the libraries here.
BUNDLE = Path(__file__).parent / "_bundle"


def program():
    """Path of the program `millstream`.

    The order is: `MILLSTREAM_PROGRAM`, the program in this package, `millstream` in `PATH`. Scripts in `PATH` are passed
    over: pip installs this package's command, which calls this function, as one.
    """
    given = os.environ.get("MILLSTREAM_PROGRAM")
    if given:
        if not os.access(given, os.X_OK):
            raise FileNotFoundError(f"MILLSTREAM_PROGRAM={given}: there is no such program")
        return Path(given)
    bundled = BUNDLE / "bin" / "millstream"
    if bundled.is_file():
        return bundled
    for folder in os.get_exec_path():
        found = shutil.which("millstream", path=folder)
        if found and not _is_command_of_package(found):
            return Path(found)
    raise FileNotFoundError(
        "the program millstream was not found: this package was built without it, MILLSTREAM_PROGRAM is not set, "
        "and PATH does not have it (`make build` makes target/release/millstream)"
    )


def _is_command_of_package(path):
    """Whether this is a script, or the command that runs now."""
    if os.path.exists(sys.argv[0]) and os.path.samefile(path, sys.argv[0]):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except PermissionError:  # a script must be readable
        return False


@contextlib.contextmanager
def soft_device_in_environment():
    """Sets `MILLSTREAM_LIB` to the soft device of this package, unless it is set."""
    directory = BUNDLE / "lib"
    if "MILLSTREAM_LIB" in os.environ or not directory.is_dir():
        yield
        return
    os.environ["MILLSTREAM_LIB"] = str(directory)
    try:
        yield
    finally:
        del os.environ["MILLSTREAM_LIB"]


def main():
    """The command `millstream` of this package."""
    try:
        path = program()
    except FileNotFoundError as error:
        sys.exit(f"millstream: {error}")
    os.execv(path, ["millstream", *sys.argv[1:]])
