"""Tests run against the package in this folder, with the program and libraries of `make test-python`."""

import signal

pytest_plugins = ["millstream.pytest_plugin"]

# A shell lets its background commands ignore Ctrl-C, and they pass that on to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
