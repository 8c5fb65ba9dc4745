#!/usr/bin/env python3
"""Writes the licences of all crates that are linked into the packages' programs.

Reads `cargo metadata`. Fails if a crate has neither a licence expression nor a licence file.

    tools/dist/licenses.py third-party-licenses.txt
"""

import json
import subprocess
import sys
from pathlib import Path

NAMES = ("license", "licence", "copying", "notice", "copyright", "unlicense")
#: Folders of C sources that crates carry.
SOURCES = ("", "ext/hdf5", "src/zlib")


def linked(metadata, roots):
    """Packages that the roots link, without build and test dependencies."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    names = {package["id"]: package["name"] for package in metadata["packages"]}
    todo = [key for key, name in names.items() if name in roots]
    seen = set()
    while todo:
        key = todo.pop()
        if key in seen:
            continue
        seen.add(key)
        for dependency in nodes[key]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                todo.append(dependency["pkg"])
    return seen


def texts(package):
    """Licence texts that the package carries."""
    root = Path(package["manifest_path"]).parent
    for folder in SOURCES:
        where = root / folder
        if where.is_dir():
            for file in sorted(where.iterdir()):
                if file.is_file() and file.name.lower().startswith(NAMES):
                    yield file.read_text(encoding="utf-8", errors="replace").strip()


def main():
    (out,) = sys.argv[1:]
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--features", "millstream/static-hdf5"]
    metadata = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    keys = linked(metadata, {
        "millstream", "millstream-capi", "millstream-card-capi", "millstream-cm", "millstream-fabric-capi",
        "millstream-libfabric", "millstream-python",
    })
    packages = [p for p in metadata["packages"] if p["id"] in keys and p["source"]]
    users, lines = {}, ["Libraries of others in Millstream's programs, with their licences.", ""]
    for package in sorted(packages, key=lambda p: (p["name"], p["version"])):
        name, found = f"{package['name']} {package['version']}", list(texts(package))
        if not package["license"] and not found:
            sys.exit(f"{name}: neither a licence expression nor a licence file")
        lines.append(f"{name}: {package['license'] or 'see its text below'}")
        for text in found:
            users.setdefault(text, []).append(name)
    for text, names in users.items():
        lines += ["", "-" * 80, ", ".join(dict.fromkeys(names)), "-" * 80, text]
    Path(out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(packages)} libraries, {len(users)} licence texts in {out}")


if __name__ == "__main__":
    main()
