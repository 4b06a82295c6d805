#!/usr/bin/env bash
# Builds the program that drives other allocators and measures them beside xseg, in one go, on a machine with an
# NVIDIA GPU. Needs g++ and CUDA's headers; takes PyTorch and RMM where Python has them, and says what it leaves out.
#
#   benches/peers/run.sh [ARGUMENTS of xseg-device]      build, measure, write benches/results/peers-DATE-GPU.{md,json}
#   benches/peers/run.sh --build                         build only: target/peers/peers
#
# PYTHON: the Python that has torch (python3). CUDA_HOME: CUDA's toolkit (found by nvcc, or in Python's wheels).
# XSEG_DEVICE: the built xseg-device (else target/release/xseg-device, else cargo builds it). PEERS_BUILD: where to build.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=${PYTHON:-python3}
out=${PEERS_BUILD:-target/peers}
say() { echo "peers: $*" >&2; }

# Folder of an installed Python package, or nothing. The package itself is not run.
package() {
    "$python" -c "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); print(list(s.submodule_search_locations)[0] if s else '')" "$1" 2>/dev/null || true
}

wheels=$(package nvidia)
home=${CUDA_HOME:-$(command -v nvcc >/dev/null && dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")" || echo /usr/local/cuda)}
include='' library=''
for folder in "$home/include" "$home"/targets/*/include "$wheels/cu13/include"; do
    [ -e "$folder/cuda_runtime_api.h" ] && [ -e "$folder/crt/host_defines.h" ] && include=$folder && break
done
# PyTorch loads the one of the wheels: the same library for all, if it is there.
for folder in "$wheels/cu13/lib" "$home/lib64" "$home"/targets/*/lib; do
    [ -e "$folder/libcudart.so.13" ] && library=$folder && break
done
[ -n "$include" ] || { say "no cuda_runtime_api.h found; set CUDA_HOME to CUDA's toolkit"; exit 2; }
[ -n "$library" ] || { say "no libcudart.so.13 found; set CUDA_HOME to the toolkit of CUDA 13"; exit 2; }

flags=(-O2 -Wall -Wextra -isystem "$include")
# Also libraries that only other libraries need are named: theirs do not look where ours lie.
link=(-L"$library" -l:libcudart.so.13 -pthread -Wl,--no-as-needed -Wl,-rpath,"$library")
torch_flags=() rmm_flags=() main_flags=()
torch=$(package torch)
if [ -n "$torch" ] && [ -e "$torch/lib/libc10_cuda.so" ]; then
    torch_flags=(-DPEERS_TORCH -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include")
    main_flags+=(-DPEERS_TORCH)
    link+=(-L"$torch/lib" -lc10_cuda -lc10 -Wl,-rpath,"$torch/lib")
else
    say "left out: PyTorch's allocators ($python has no torch with CUDA; set PYTHON)"
fi
mkdir -p "$out"
rmm=$(package librmm)
logger=$(package rapids_logger)
if [ -n "$rmm" ] && [ -n "$logger" ]; then
    rmm_flags=(-std=c++20 -DPEERS_RMM="\"$(cat "$rmm/VERSION")\"" -isystem "$rmm/include" -isystem "$rmm/include/rapids" -isystem "$logger/include")
    if g++ "${rmm_flags[@]}" "${flags[@]}" -c "$here/rmm.cpp" -o "$out/rmm.o" 2>"$out/rmm.log"; then
        main_flags+=(-DPEERS_RMM)
        link+=(-L"$rmm/lib64" -lrmm -L"$logger/lib64" -lrapids_logger -Wl,-rpath,"$rmm/lib64" -Wl,-rpath,"$logger/lib64")
    else
        say "left out: RMM's pool, whose headers do not fit ($out/rmm.log)"
        g++ -std=c++17 "${flags[@]}" -c "$here/rmm.cpp" -o "$out/rmm.o"
    fi
else
    say "left out: RMM's pool ($python has no librmm and rapids_logger)"
    g++ -std=c++17 "${flags[@]}" -c "$here/rmm.cpp" -o "$out/rmm.o"
fi
jobs=()
for source in main plain torch pairs trace replay; do
    more=()
    [ "$source" = torch ] && more=("${torch_flags[@]}")
    [ "$source" = main ] && more=("${main_flags[@]}")
    g++ -std=c++17 "${flags[@]}" "${more[@]}" -c "$here/$source.cpp" -o "$out/$source.o" &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
g++ "$out"/{main,plain,torch,rmm,pairs,trace,replay}.o "${link[@]}" -o "$out/peers"
say "built $out/peers: $("$out/peers" list | tr '\n' ' ')"
[ "${1:-}" = --build ] && exit 0

device=("${XSEG_DEVICE:-target/release/xseg-device}")
[ -x "${device[0]}" ] || device=(cargo run --release --bin xseg-device --)
exec "${device[@]}" --only pairs,peers --report peers --peers "$out/peers" "$@"
