#!/bin/sh
# Puts the tests of rdma-core 44.0, the release that Debian's pyverbs is from, into the folder given. Debian's
# package does not have them. RDMA_CORE names a git repository to take instead of the project's own.
set -eu
folder=$1
commit=91392a91eb41affee3bd75dc7d03eb86b4854aea
git init --quiet --bare "$folder/rdma-core.git"
cd "$folder/rdma-core.git"
git fetch --quiet --depth 1 "${RDMA_CORE:-https://github.com/linux-rdma/rdma-core}" refs/tags/v44.0
if [ "$(git rev-parse 'FETCH_HEAD^{commit}')" != $commit ]; then
    echo "v44.0 is not the commit $commit"
    exit 1
fi
git archive $commit tests | tar -x -C "$folder"
# Of one vendor's adapters.
rm "$folder"/tests/test_mlx5* "$folder"/tests/test_efa*
