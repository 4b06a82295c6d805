"""Compiles the C++ part against the PyTorch that is installed, once, and keeps it in a cache."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import _native

_SOURCE = Path(__file__).with_name("torch_part.cpp")
_PARTS = sorted(Path(__file__).parent.glob("torch_*.hpp"))


class BuildError(RuntimeError):
    """The C++ part cannot be compiled here; the text says what is missing."""


def cache_folder() -> Path:
    """Where compiled parts are kept: XSEG_CACHE, or the user's cache folder."""
    chosen = os.environ.get("XSEG_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "xseg"


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler was found ({', '.join(names)}); install g++ or set CXX")


def _cuda_include(site: Path) -> str:
    """A folder with cuda_runtime_api.h: of a toolkit, or of the packages that PyTorch itself needs."""
    places = [
        os.path.join(home, "include") for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home
    ]
    nvcc = shutil.which("nvcc")
    if nvcc:
        places.append(str(Path(nvcc).resolve().parent.parent / "include"))
    places += sorted(glob.glob(str(site / "nvidia" / "cu*" / "include")), reverse=True)
    places += [str(site / "nvidia" / "cuda_runtime" / "include"), "/usr/local/cuda/include"]
    places.append(str(site / "triton" / "backends" / "nvidia" / "include"))
    for place in places:
        # Some packages have only a part of the headers.
        if all(os.path.isfile(os.path.join(place, name)) for name in ("cuda_runtime_api.h", "crt/host_defines.h")):
            return place
    raise BuildError("CUDA's headers (cuda_runtime_api.h) were not found; install the CUDA toolkit or set CUDA_HOME")


def _loaded(library: str) -> list[str]:
    """The path of a library that this process has loaded.

    PyTorch's C++ library must be ours too. A compiler that finds no shared one links a second copy into the part, and the first
    number that is printed there crashes, since each copy has locales of its own.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return [path for path in dict.fromkeys(paths) if Path(path).name.startswith(library)][:1]


def torch_part() -> str:
    """The path of the compiled part, compiled now if it is not in the cache. Raises BuildError."""
    import torch

    torch_folder = Path(torch.__file__).resolve().parent
    native = Path(_native.__file__).resolve()
    compiler, cuda = _compiler(), _cuda_include(torch_folder.parent)
    flags = [
        "-shared", "-fPIC", "-O2", "-std=c++20", "-fvisibility=hidden", "-DUSE_CUDA",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include",
    ]  # fmt: skip
    libraries = [f"-L{torch_folder}/lib", "-ltorch_cuda", "-lc10_cuda", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
    libraries += _loaded("libstdc++.so.6")
    text = "".join(part.read_text() for part in (_SOURCE, *_PARTS))
    seed = [
        torch.__version__,
        str(torch_folder),
        str(native),
        compiler,
        cuda,
        _native.header(),
        text,
        *flags,
        *libraries,
    ]
    key = hashlib.sha256("\0".join(seed).encode()).hexdigest()[:20]
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"the cache folder cannot be made: {error}; set XSEG_CACHE to one that can be written"
        ) from None
    done = folder / f"torch_part-{key}.so"
    if done.exists():
        return str(done)
    # Others may build the same at the same time: each in a folder of its own, and the last rename stands.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        Path(work, "xseg.h").write_text(_native.header())
        out = Path(work, "part.so")
        command = [
            compiler,
            *flags,
            f"-I{work}",
            "-isystem",
            cuda,
            str(_SOURCE),
            str(native),
            "-o",
            str(out),
            *libraries,
        ]
        if os.environ.get("XSEG_VERBOSE"):
            print("xseg:", " ".join(command), file=sys.stderr)
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            lines = [line for line in built.stderr.splitlines() if "error" in line][:5]
            shown = "\n".join(lines or built.stderr.splitlines()[-5:])
            raise BuildError(
                f"it does not compile against PyTorch {torch.__version__}:\n{shown}\n"
                "(XSEG_VERBOSE=1 shows the command); please report it with the version of PyTorch"
            )
        os.replace(out, done)
    return str(done)
