"""The command `millstream` of a package without the program."""

import os
import stat
import sys

import pytest
from millstream import _program

SCRIPT = f"#!{sys.executable}\nimport sys\nfrom millstream._program import main\nsys.exit(main())\n"


def install(folder, content):
    folder.mkdir()
    file = folder / "millstream"
    file.write_bytes(content)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.fixture
def search(monkeypatch, tmp_path):
    """A function that sets PATH. No other place has the program."""
    monkeypatch.delenv("MILLSTREAM_PROGRAM", raising=False)
    monkeypatch.setattr(_program, "BUNDLE", tmp_path / "no-bundle")
    return lambda *files: monkeypatch.setenv("PATH", os.pathsep.join(str(file.parent) for file in files))


def test_the_command_of_the_package_is_no_program(search, monkeypatch, tmp_path):
    script = install(tmp_path / "script", SCRIPT.encode())
    search(script)
    with pytest.raises(FileNotFoundError, match="millstream was not found"):
        _program.program()
    launcher = install(tmp_path / "launcher", b"\x7fELF")
    monkeypatch.setattr(sys, "argv", [str(launcher)])
    search(launcher)
    with pytest.raises(FileNotFoundError, match="millstream was not found"):
        _program.program()


def test_a_program_behind_the_command_of_the_package_is_found(search, tmp_path):
    script, program = install(tmp_path / "script", SCRIPT.encode()), install(tmp_path / "program", b"\x7fELF")
    search(script, program)
    assert _program.program() == program
