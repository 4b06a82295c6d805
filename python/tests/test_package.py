"""The package around the heaps: the command line, and what ``install`` says where there is nothing to install into."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import xseg
from xseg import _build, _native, _torch


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


def test_the_command_line() -> None:
    shown = run("-m", "xseg", "conf", XSEG_CONF="limit:40G")
    assert shown.returncode == 0 and "40GiB" in shown.stdout
    assert f"xseg {xseg.__version__}" in run("-m", "xseg", "--version").stdout
    wrong = run("-m", "xseg", "reply")
    assert wrong.returncode == 2 and "replay" in wrong.stderr
    missing = run("-m", "xseg", "replay", "nothing.trace")
    assert missing.returncode == 2 and "nothing.trace" in missing.stderr


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "small.trace"
    trace.write_text("# a small trace\n# {}\na,1,4194304,0,1\na,2,8388608,0,2\nf,1,3\nf,2,4\n")
    done = run("-m", "xseg", "replay", str(trace), "--backend", "host", "--verify", "--json")
    assert done.returncode == 0 and '"mismatches":0' in done.stdout.replace(" ", "")


def test_the_readme_names_statistics_that_exist() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text().split("## Statistics")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in row.replace("`", "").replace(",", " ").split()}
    assert named - set(_native.STATISTICS) == set()
    assert {"handles_joined", "bytes_joined", "joins_ended"} <= named


def test_the_readme_names_all_that_a_heap_does() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text().split("| method |")[1].split("\n\n")[0]
    named = {name for row in text.splitlines()[2:] for name in re.findall(r"`(\w+)", row.split("|")[1])}
    assert named == {name for name in vars(xseg.Heap) if not name.startswith("__")}


def test_everything_public_is_documented_and_typed() -> None:
    stub = Path(_native.__file__).with_name("_native.pyi").read_text()
    for kind in (xseg.Heap, xseg.Block):
        for name in vars(kind):
            if name.startswith("_"):
                continue
            assert getattr(kind, name).__doc__, f"{kind.__name__}.{name} has no text"
            assert re.search(rf"def {name}\(", stub), f"{kind.__name__}.{name} is not in the stub"
    for name in xseg.__all__:
        assert getattr(xseg, name) is not None
        assert name == "__version__" or getattr(xseg, name).__doc__, f"{name} has no text"
    assert Path(xseg.__file__).with_name("py.typed").exists()


def test_the_switch_needs_no_torch() -> None:
    code = "import sys, xseg; print(xseg.install('limit:4G'), xseg.installed(), 'torch' in sys.modules)"
    done = run("-c", code, XSEG_CONF=" off ")
    assert done.stdout.split() == ["off", "off", "False"], done.stderr


def test_what_needs_xseg_names_the_switch_that_turned_it_off(tmp_path: Path) -> None:
    code = f"""
import xseg
xseg.install(CONF)
with xseg.tag("any"):
    pass
for refused in (xseg.stats, xseg.tags, lambda: xseg.record({str(tmp_path / "x.trace")!r})):
    try:
        refused()
    except RuntimeError as error:
        print(error)
from xseg._ipc import rebuild_cuda_tensor
try:
    rebuild_cuda_tensor()
except RuntimeError as error:
    print(error)
"""
    for conf, variable, named in (("", "off", "XSEG_CONF=off"), ("'off'", "", 'install("off")')):
        done = run("-c", code.replace("CONF", conf), XSEG_CONF=variable)
        *said, sent = done.stdout.splitlines()
        assert len(said) == 3 and set(said) == {said[0]}, done.stderr
        assert said[0].startswith(f"{named} has PyTorch run without xseg here") and "leave `off` out" in said[0], said
        assert "call xseg.install()" not in said[0] and f"which {named} leaves it here" in sent, done.stdout
    assert not (tmp_path / "x.trace").exists()


def test_without_a_gpu_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_device() -> int:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(current_device=current_device)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(_torch, "_mode", "full")
    for refused in (xseg.stats, xseg.tags, lambda: xseg.record("nowhere.trace")):
        with pytest.raises(RuntimeError, match="^PyTorch has no current GPU here.*: Found no NVIDIA driver") as caught:
            refused()
        assert caught.value.__suppress_context__, "PyTorch's own traceback is left out"
    assert not Path("nowhere.trace").exists()


def test_memory_is_made_of_small_pieces_unless_the_policy_says_how_large() -> None:
    added = _torch._with_small_handles
    assert [added(conf) for conf in ("", "  ", "limit:4GiB", "limit:4GiB, ")] == [
        "handles:small",
        "handles:small",
        "limit:4GiB,handles:small",
        "limit:4GiB,handles:small",
    ]
    for said in ("handles:large", "limit:4GiB, handles : large", "handles:small,nvtx:on"):
        assert added(said) == said and _native.check_conf(said) is not None
    assert added("handle_max:8MiB") == "handle_max:8MiB"


def test_install_refuses_what_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    # What came from the variable says so, what was given does not.
    monkeypatch.setenv("XSEG_CONF", "limits:3")
    with pytest.raises(xseg.ConfigError, match="^XSEG_CONF: there is no key `limits`"):
        xseg.install()
    with pytest.raises(xseg.ConfigError, match="^there is no key `limitt`; did you mean"):
        xseg.install("limitt:4G")
    monkeypatch.setenv("XSEG_CONF", "backend:host")
    with pytest.raises(xseg.ConfigError, match="^XSEG_CONF: `backend:host` is no GPU's memory"):
        xseg.install()
    with pytest.raises(xseg.ConfigError, match="^`backend:sim` is no GPU's memory"):
        xseg.install("backend:sim")
    for named in ("cuda=1", "cuda=0"):
        with pytest.raises(xseg.ConfigError, match=f"^`backend:{named}` names one GPU, .*; leave `backend` out$"):
            xseg.install(f"limit:4G, backend : {named} ,joins:off")
    monkeypatch.setenv("XSEG_CONF", "backend:cuda=1")
    with pytest.raises(xseg.ConfigError, match="^XSEG_CONF: `backend:cuda=1` names one GPU"):
        xseg.install()
    for refused in (xseg.stats, xseg.tags, lambda: xseg.record("nowhere.trace")):
        with pytest.raises(RuntimeError, match="install"):
            refused()
    assert not Path("nowhere.trace").exists()
    with pytest.raises(ValueError, match="zero"):
        xseg.tag("a\0b")
    assert xseg.installed() is None


def test_arguments_of_another_kind_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = 5
    for switch in ("", "off"):
        monkeypatch.setenv("XSEG_CONF", switch)
        with pytest.raises(TypeError, match="^conf: give a policy such as .*, not int\\b"):
            xseg.install(wrong)
    with pytest.raises(TypeError, match="^name: give the tag's name as text, not int\\b"):
        xseg.tag(wrong)
    assert xseg.installed() is None
    monkeypatch.setattr(_torch, "_mode", "full")
    for wrong in (1.5, b"cuda", ("cuda", 1)):
        said = f"^device: give the number of a device, .*, or None for the current one, not {type(wrong).__name__}$"
        for refused in (xseg.stats, xseg.tags, lambda device: xseg.record("nowhere.trace", device)):
            with pytest.raises(TypeError, match=said):
                refused(wrong)
    assert not Path("nowhere.trace").exists()


def test_a_tensor_for_a_process_without_install_says_what_to_do() -> None:
    code = """
import pickle
from xseg._ipc import rebuild_cuda_tensor
class Tensor:
    def __reduce__(self):
        return rebuild_cuda_tensor, (1, 2)
pickle.loads(pickle.dumps(Tensor()))
"""
    done = run("-c", code)
    assert done.returncode == 1 and "call xseg.install() in this process too" in done.stderr, done.stderr


def test_the_c_functions_are_in_the_module() -> None:
    import ctypes

    library = ctypes.CDLL(_native.__file__)
    names = re.findall(r"^\S.*?[ *](xseg_\w+)\(", _native.header(), re.M)
    assert len(names) > 40
    for name in names:
        assert getattr(library, name)
    library.xseg_version_string.restype = ctypes.c_char_p
    assert library.xseg_version_string().decode() == xseg.__version__


def test_a_loaded_library_is_found_by_its_name() -> None:
    found = _build._loaded("libc.so.6")
    assert len(found) == 1 and Path(found[0]).exists(), found
    assert _build._loaded("libnowhere.so") == []


def test_without_a_compiler_the_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(_build.BuildError, match="no-such-compiler.*install g"):
        _build._compiler()
    monkeypatch.setenv("XSEG_CACHE", "/proc/nowhere")
    assert _build.cache_folder() == Path("/proc/nowhere")


def test_fork_leaves_device_heaps_alone() -> None:
    code = """
import ctypes, os, xseg
from xseg import _native
c = ctypes.CDLL(_native.__file__)
c.xseg_last_error.restype = ctypes.c_char_p
c.xseg_device_alloc.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
c.xseg_device_free.argtypes = [ctypes.c_void_p]
block = ctypes.c_void_p()
assert c.xseg_device_alloc(0, 4096, None, ctypes.byref(block)) == 0
child = os.fork()
if child == 0:
    other = ctypes.c_void_p()
    refused = c.xseg_device_alloc(0, 4096, None, ctypes.byref(other))
    said = b"fork" in c.xseg_last_error()
    os._exit(0 if refused == 8 and said and c.xseg_device_free(block) == 0 else 1)
assert os.waitpid(child, 0)[1] == 0
assert c.xseg_device_free(block) == 0 and c.xseg_device_free(block) == 3
print("ok")
"""
    done = run("-c", code, XSEG_CONF="backend:host,limit:64MiB")
    assert done.stdout == "ok\n", done.stderr


def test_pools_with_an_allocator_of_their_own(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = Path(__file__).with_name("own_pools.cpp"), tmp_path / "own_pools"
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-g", "-pthread", "-fsanitize=address,undefined"]
    include = f"-I{Path(_build.__file__).parent}"
    built = subprocess.run([compiler, *flags, include, str(source), "-o", str(program)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ok\n", done.stderr


def test_numbers_of_no_device_are_value_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "_mode", "full")
    assert _torch._device(7) == 7
    for number in (-1, 2**31, 2**32):
        with pytest.raises(ValueError, match=f"device {number} is out of range; give the number of a device, from 0"):
            _torch._device(number)
    for name in ("cpu", "cuda:", "cuda:-1", "cuda:01", "1", "", "cuda:1 ", "cuda:1\n", "CUDA:1"):
        with pytest.raises(ValueError, match=f'^device {re.escape(repr(name))} is no GPU; give .*"cuda:1"'):
            _torch._device(name)


def test_devices_are_named_as_for_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        """As PyTorch's, which need not be installed here."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __str__(self) -> str:
            return self.name

    monkeypatch.setattr(_torch, "_mode", "full")
    # A number by itself loads nothing.
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [_torch._device(device) for device in (3, "cuda:1", "cuda:12")] == [3, 1, 12]
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(current_device=lambda: 5)  # type: ignore[attr-defined]
    torch.device = Device  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    given: list[Any] = [Device("cuda:1"), Device("cuda"), "cuda", None]
    assert [_torch._device(device) for device in given] == [1, 5, 5, 5]
    cpu: Any = Device("cpu")
    with pytest.raises(ValueError, match="^device 'cpu' is no GPU"):
        xseg.stats(cpu)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_pytorchs_own_devices_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(_torch, "_mode", "full")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert _torch._device(torch.device("cuda:1")) == _torch._device(torch.device("cuda", 1)) == 1
    assert _torch._device(torch.device("cuda")) == 5
    with pytest.raises(ValueError, match="^device 'cpu' is no GPU"):
        _torch._device(torch.device("cpu"))
