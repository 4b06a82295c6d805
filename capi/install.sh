#!/bin/sh
# Builds the C library and installs it: capi/install.sh [PREFIX], by default /usr/local. PROFILE names a profile of
# cargo's other than release; DESTDIR is put in front of the prefix for packaging. Where the folder is root's, sudo copies into it.
set -eu
prefix=${1:-/usr/local}
case "$prefix" in
-*) sed -n '2,3s/^# //p' "$0"; exit 2 ;;
/*) ;;
# The pkg-config file and the advice below name it, wherever they are read.
*) prefix=$PWD/$prefix ;;
esac
while [ "$prefix" != "${prefix%/}" ]; do prefix=${prefix%/}; done
case "$prefix" in
*[[:space:]\"\'\\\$\#\|\&]*) echo "install.sh: pkg-config cannot name $prefix; give a folder without spaces, quotes and the like" >&2; exit 2 ;;
esac
profile=${PROFILE:-release}
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/library/Cargo.toml")
cargo=${CARGO:-cargo}
command -v "$cargo" >/dev/null || { echo "install.sh: there is no $cargo; install Rust (https://rustup.rs) or name it by CARGO" >&2; exit 1; }

echo "building libxseg ($profile); the first time takes minutes" >&2
built=$(cd "$here/.." && "$cargo" build --quiet --locked -p xseg-library --profile "$profile" --message-format json-render-diagnostics |
    tr ',' '\n' | sed -n 's/.*"\([^"]*libxseg\.so\)".*/\1/p' | tail -n 1)
[ -f "$built" ] || { echo "install.sh: cargo built no libxseg.so" >&2; exit 1; }

files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT
mkdir -p "$files/lib/pkgconfig" "$files/include"
cp "$built" "$files/lib/libxseg.so.$version"
ln -s "libxseg.so.$version" "$files/lib/libxseg.so.${version%%.*}"
ln -s "libxseg.so.${version%%.*}" "$files/lib/libxseg.so"
cp "$(dirname "$built")/libxseg.a" "$files/lib/"
cp "$here/../include/xseg.h" "$here/../include/xseg.hpp" "$files/include/"
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" "$here/xseg.pc.in" >"$files/lib/pkgconfig/xseg.pc"

to=${DESTDIR:-}$prefix
# What is built is the user's: root has neither its cargo nor business in its folders.
as=
mkdir -p "$to/lib/pkgconfig" "$to/include" 2>/dev/null && [ -w "$to/lib/pkgconfig" ] && [ -w "$to/lib" ] && [ -w "$to/include" ] || as=sudo
if [ -n "$as" ] && ! command -v sudo >/dev/null; then
    echo "install.sh: $to cannot be written to, and there is no sudo; name another folder" >&2
    exit 1
fi
$as mkdir -p "$to/lib" "$to/include"
$as cp -R -P -f "$files/lib" "$files/include" "$to/"
echo "installed xseg $version under $to"
if [ -z "${DESTDIR:-}" ]; then
    # The loader looks for new libraries only when it is told.
    PATH=$PATH:/usr/sbin:/sbin
    if { [ "$(id -u)" = 0 ] || [ -n "$as" ]; } && command -v ldconfig >/dev/null; then $as ldconfig; fi
    case "$(ldconfig -p 2>/dev/null)" in
    *"$prefix/lib/libxseg.so"*) ;;
    *) echo "programs find it by LD_LIBRARY_PATH=$prefix/lib, and pkg-config by PKG_CONFIG_PATH=$prefix/lib/pkgconfig" ;;
    esac
fi
