#!/bin/sh
# Builds the C library and installs it: capi/install.sh [PREFIX], by default /usr/local. PROFILE names a profile of
# cargo's other than release; DESTDIR is put in front of the prefix for packaging.
set -eu
prefix=${1:-/usr/local}
case "$prefix" in
-*) sed -n '2,3s/^# //p' "$0"; exit 2 ;;
/*) ;;
# The pkg-config file and the advice below name it, wherever they are read.
*) prefix=$PWD/$prefix ;;
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

to=${DESTDIR:-}$prefix
mkdir -p "$to/lib/pkgconfig" "$to/include"
cp "$built" "$to/lib/libxseg.so.$version"
ln -sf "libxseg.so.$version" "$to/lib/libxseg.so.${version%%.*}"
ln -sf "libxseg.so.${version%%.*}" "$to/lib/libxseg.so"
cp "$(dirname "$built")/libxseg.a" "$to/lib/"
cp "$here/../include/xseg.h" "$here/../include/xseg.hpp" "$to/include/"
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" "$here/xseg.pc.in" >"$to/lib/pkgconfig/xseg.pc"
echo "installed xseg $version under $to"
if [ -z "${DESTDIR:-}" ]; then
    # The loader looks for new libraries only when it is told.
    if [ "$(id -u)" = 0 ] && command -v ldconfig >/dev/null; then ldconfig; fi
    case "$(ldconfig -p 2>/dev/null)" in
    *"$prefix/lib/libxseg.so"*) ;;
    *) echo "programs find it by LD_LIBRARY_PATH=$prefix/lib, and pkg-config by PKG_CONFIG_PATH=$prefix/lib/pkgconfig" ;;
    esac
fi
