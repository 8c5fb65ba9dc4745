"""Calls the program `millstream`."""

import json
import subprocess
import tempfile
from pathlib import Path

from ._program import program

__all__ = ["ProgramFailed", "call", "call_json", "program"]


class ProgramFailed(RuntimeError):
    """A program ended with an error. The text is what it printed."""

    def __init__(self, command, code, errors):
        self.command = [str(word) for word in command]
        self.code = code
        self._errors = errors
        text = errors.strip() or f"exit status {code} without a message"
        super().__init__(f"{' '.join(self.command)}: {text}")

    def __reduce__(self):
        return type(self), (self.command, self.code, self._errors)


def call(*arguments, timeout=None, env=None, cwd=None):
    """Calls the program and returns its output.

    Raises :class:`ProgramFailed` if its exit status is not zero.
    """
    command = [program(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd, check=False)
    if done.returncode != 0:
        raise ProgramFailed(command, done.returncode, done.stderr)
    return done.stdout


def call_json(*arguments, timeout=None, env=None, cwd=None):
    """Calls the program with `--json FILE` and returns the content of the file."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        file = Path(folder) / "result.json"
        call(*arguments, "--json", file, timeout=timeout, env=env, cwd=cwd)
        return json.loads(file.read_text(encoding="utf-8"))
