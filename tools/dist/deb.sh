#!/usr/bin/env bash
# Makes the Debian packages millstream, millstream-dev and python3-millstream from the staged files and the wheel.
# Arguments: the stage, the folder of packages, the version.
set -euo pipefail
cd "$(dirname "$0")/../.."

stage=$1 packages=$2 version=$3-1
architecture=$(dpkg --print-architecture)
# Releases name the uploader here; Debian requires an address.
maintainer=${DEB_MAINTAINER:-The Millstream authors <millstream@packages.debian.org>}
work=$packages/deb
description=tools/dist/debian

# common NAME: documents of a package, then md5sums and the archive.
finish() {
    local name=$1 root=$work/$1 doc=$work/$1/usr/share/doc/$1
    mkdir -p "$doc" "$root/DEBIAN"
    cp $description/copyright "$doc/copyright"
    printf 'millstream (%s) unstable; urgency=medium\n\n  * Build of release %s; CHANGELOG.md lists the changes.\n\n -- %s  %s\n' \
        "$version" "${version%-*}" "$maintainer" "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")" | gzip -9n > "$doc/changelog.Debian.gz"
    gzip -9nc CHANGELOG.md > "$doc/changelog.gz"
    if [ -f "$description/$name.overrides" ]; then
        install -D -m 644 "$description/$name.overrides" "$root/usr/share/lintian/overrides/$name"
    fi
    (cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum > DEBIAN/md5sums)
    local size
    size=$(du -ks --apparent-size "$root/usr" | cut -f1)
    sed -e "s/@VERSION@/$version/; s/@ARCHITECTURE@/$architecture/; s/@MAINTAINER@/$maintainer/; s/@SIZE@/$size/" \
        "$description/$name.control" > "$root/DEBIAN/control"
    for script in postinst prerm; do
        if [ -f "$description/$name.$script" ]; then install -m 755 "$description/$name.$script" "$root/DEBIAN/$script"; fi
    done
    chmod -R u=rwX,go=rX "$root"
    find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    local target
    target=$(sed -n 's/^Architecture: //p' "$root/DEBIAN/control")
    dpkg-deb --root-owner-group -Zxz --build "$root" "$packages/${name}_${version}_$target.deb" > /dev/null
}

rm -rf "$work"

root=$work/millstream/usr
mkdir -p "$root/share/zsh/vendor-completions"
cp -r "$stage/bin" "$stage/lib" "$root/"
cp -r "$stage/share/man" "$stage/share/millstream" "$stage/share/bash-completion" "$stage/share/fish" "$root/share/"
cp "$stage/share/zsh/site-functions/_millstream" "$root/share/zsh/vendor-completions/"
# debian/copyright has this text.
rm "$root/share/millstream/data/sst1m/LICENSE"
find "$root/share/man" -name '*.1' -exec gzip -9n {} +
find "$root/lib/millstream" -type f -exec chmod 644 {} +
mkdir -p "$root/share/doc/millstream"
gzip -9nc "$stage/share/doc/millstream/third-party-licenses.txt" > "$root/share/doc/millstream/third-party-licenses.txt.gz"
finish millstream

root=$work/millstream-dev/usr
mkdir -p "$root/include" "$root/share/pkgconfig"
cp -r "$stage/include/millstream" "$root/include/"
for name in millstream millstream-memory; do
    sed "s/@VERSION@/${version%-*}/" "$description/$name.pc" > "$root/share/pkgconfig/$name.pc"
done
finish millstream-dev

root=$work/python3-millstream/usr/lib/python3/dist-packages
mkdir -p "$root"
python3 -m zipfile -e "$packages/millstream-${version%-*}"-*.whl "$root"
# Program and libraries are those of the package millstream. RECORD lists files by an installer's choice.
rm -rf "$root/millstream/_bundle" "$root"/millstream-*.dist-info/{RECORD,WHEEL,licenses,sboms} "$root"/bin
sed -i '/\[console_scripts\]/,/^$/d' "$root"/millstream-*.dist-info/entry_points.txt
finish python3-millstream

rm -rf "$work"
