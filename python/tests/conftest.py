"""Tests run against the package in this folder, with the program and libraries of `make test-python`."""

pytest_plugins = ["millstream.pytest_plugin"]
