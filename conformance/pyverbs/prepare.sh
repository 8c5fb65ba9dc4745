#!/bin/sh
# Copies the tests of Debian's pyverbs into the given folder. They are part of the package's documentation, partly
# compressed. If the system has no documentation, the package is downloaded again.
set -eu
folder=$1
package=python3-pyverbs=44.0-2
tests=/usr/share/doc/rdma-core/tests
if [ ! -d "$tests" ]; then
    cd "$folder"
    apt-get -qq download "$package"
    dpkg-deb --extract python3-pyverbs_*.deb package
    tests=$folder/package$tests
fi
cp -R "$tests" "$folder/tests"
gunzip -f "$folder"/tests/*.gz
# Tests for adapters of single vendors.
rm "$folder"/tests/test_mlx5* "$folder"/tests/test_efa*
