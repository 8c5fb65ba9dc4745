#!/bin/sh
# Puts the tests that belong to Debian's pyverbs into the folder given. The package has them among its
# documentation, partly compressed; where the system keeps no documentation, the package is fetched once more.
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
# Of one vendor's adapters.
rm "$folder"/tests/test_mlx5* "$folder"/tests/test_efa*
