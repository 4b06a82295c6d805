"""The C++ part against the PyTorch that is installed, as far as it goes without a GPU; skipped where there is none."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from xseg import _build, _native

if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

START = """
import ctypes, pickle
import torch
import xseg
from xseg import _build, _native, _torch
mode = MODE
_torch._mode = _torch._install_full(_build.torch_part()) if mode == "full" else _torch._install_plain(torch)
c = _torch._c()
c.xseg_device_alloc.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
c.xseg_device_free.argtypes = [ctypes.c_void_p]
def alloc(size):
    block = ctypes.c_void_p()
    assert c.xseg_device_alloc(0, size, None, ctypes.byref(block)) == 0, c.xseg_last_error()
    return block
MIB = 1 << 20
"""


def run(mode: str, code: str) -> str:
    """Runs code in a process whose device 0 is host memory, as PyTorch's allocator."""
    done = subprocess.run(
        [sys.executable, "-c", START.replace("MODE", repr(mode)) + code],
        env={**os.environ, "XSEG_CONF": "backend:host,limit:256MiB"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def modes() -> list[str]:
    import torch

    if torch.version.cuda is None:
        pytest.skip("this PyTorch was built without CUDA")
    try:
        _build.torch_part()
    except _build.BuildError as error:
        pytest.skip(f"the C++ part is not compiled: {error}")
    return ["full", "plain"]


def test_statistics_have_torchs_shape(modes: list[str]) -> None:
    for mode in modes:
        said = run(
            mode,
            """
blocks = [alloc(10 * MIB + 1) for _ in range(3)]
assert c.xseg_device_free(blocks.pop()) == 0
torch._C._cuda_resetPeakMemoryStats(0)
stats = torch._C._cuda_memoryStats(0)
assert stats["allocated_bytes"]["all"] == {
    "current": 2 * (10 * MIB + 512), "peak": 2 * (10 * MIB + 512),
    "allocated": 3 * (10 * MIB + 512), "freed": 10 * MIB + 512}, stats["allocated_bytes"]
assert stats["requested_bytes"]["all"]["current"] == 2 * (10 * MIB + 1)
assert stats["allocation"]["all"]["current"] == 2 and stats["allocation"]["all"]["freed"] == 1
assert stats["reserved_bytes"]["all"]["current"] >= 20 * MIB
torch._C._cuda_resetAccumulatedMemoryStats(0)
stats = torch._C._cuda_memoryStats(0)
assert stats["allocated_bytes"]["all"]["allocated"] == 0 and stats["allocated_bytes"]["all"]["freed"] == 0
assert stats["reserved_bytes"]["all"]["freed"] == 0
print(sorted(stats), sorted(stats["segment"]))
""",
        )
        assert "num_ooms" in said and "small_pool" in said, said


def test_a_snapshot_is_read_by_torchs_own_viewer(modes: list[str]) -> None:
    said = run(
        "full",
        """
blocks = [alloc(size) for size in (1000, 10 * MIB, 30 * MIB)]
snapshot = torch._C._cuda_memorySnapshot(None)
live = [block for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"]
assert sorted(block["requested_size"] for block in live) == [1000, 10 * MIB, 30 * MIB], live
for segment in snapshot["segments"]:
    assert segment["total_size"] == sum(block["size"] for block in segment["blocks"]) and segment["is_expandable"]
assert snapshot["device_traces"] == [[]], "a history needs a GPU"
from torch.cuda import _memory_viz
pictured = _memory_viz.segsum(pickle.loads(pickle.dumps(snapshot)))
assert "total_reserved" in pictured, pictured
print(torch._C._cuda_getAllocatorBackend(), torch._C._cuda_isHistoryEnabled())
""",
    )
    assert said.split() == ["xseg", "False"]


def test_a_second_install_is_refused(modes: list[str]) -> None:
    for mode in modes:
        run(
            mode,
            """
try:
    xseg.install()
    raise SystemExit("no error")
except RuntimeError as error:
    assert "already" in str(error), error
""",
        )


def test_what_does_not_compile_is_explained(
    modes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XSEG_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(_build.BuildError, match="does not compile against PyTorch"):
        _build.torch_part()


def test_without_a_compiler_install_warns_and_goes_on(modes: list[str]) -> None:
    code = """
import warnings
import xseg
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert xseg.install() == "plain" == xseg.installed()
assert any("install g++" in str(one.message) for one in told), told
try:
    xseg.install()
    raise SystemExit("no error")
except RuntimeError as error:
    assert "already" in str(error)
"""
    env = {**os.environ, "CXX": "no-such-compiler", "XSEG_CONF": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_nccl_registers_no_memory_that_moves(modes: list[str]) -> None:
    run(
        "full",
        """
import os, warnings
import torch.distributed as dist
class Pool:
    id = (0, 7)
try:
    dist.ProcessGroupNCCL.register_mem_pool(None, Pool())
    raise SystemExit("no error")
except RuntimeError as error:
    assert "mem_allocator" in str(error), error
os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "1"
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    _torch._mind_registration()
assert os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] == "0"
assert len(told) == 1 and "register_mem_pool" in str(told[0].message), told
""",
    )


def test_tags_have_figures_of_their_own(modes: list[str]) -> None:
    for mode in modes:
        run(
            mode,
            """
assert xseg.tags(0) == {}
plain = alloc(MIB)
with xseg.tag("weights"):
    weights = alloc(2 * MIB + 1)
    with xseg.tag("activations"):
        kept = [alloc(3 * MIB) for _ in range(2)]
assert c.xseg_device_free(kept.pop()) == 0
found = xseg.tags(0)
assert found == {
    "weights": {"allocated": 2 * MIB + 512, "peak_allocated": 2 * MIB + 512, "live_blocks": 1, "allocs": 1},
    "activations": {"allocated": 3 * MIB, "peak_allocated": 6 * MIB, "live_blocks": 1, "allocs": 2},
}, found
torch._C._cuda_resetPeakMemoryStats(0)
assert xseg.tags(0)["activations"]["peak_allocated"] == 3 * MIB
@xseg.tag("decorated")
def work():
    return alloc(512)
block = work()
assert xseg.tags(0)["decorated"]["live_blocks"] == 1 and xseg.tags(1)["decorated"]["live_blocks"] == 0
for number in range(40):
    with xseg.tag(str(number)):
        pass
assert len(xseg.tags(0)) == 43
""",
        )


def test_a_recording_is_replayed(modes: list[str], tmp_path: Path) -> None:
    for mode in modes:
        path = tmp_path / f"{mode}.trace"
        run(
            mode,
            f"""
early = alloc(5 * MIB)
with xseg.record({str(path)!r}, 0) as recording:
    blocks = [alloc((at % 7 + 1) * MIB) for at in range(50)]
    try:
        xseg.record({str(path)!r}, 0)
        raise SystemExit("no error")
    except xseg.Error as error:
        assert "already" in str(error)
    for block in blocks[::2]:
        assert c.xseg_device_free(block) == 0
recording.stop()
assert c.xseg_device_free(early) == 0
again = xseg.record({str(path)!r}, 0)
assert c.xseg_device_free(blocks[1]) == 0
# The end of the program ends it too.
""",
        )
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert [line[0] for line in lines] == ["a"] * 25 + ["f"], lines
        command = [sys.executable, "-m", "xseg", "replay", str(path), "--backend", "host", "--verify", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["events"] == 26 and found["peak_requested"] == sum(at % 7 + 1 for at in range(1, 50, 2)) << 20


def test_a_pool_goes_back_to_its_checkpoint(modes: list[str]) -> None:
    run(
        "full",
        """
pool = (0, 77)
def live():
    found = {}
    for segment in torch._C._cuda_memorySnapshot(None)["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if segment["segment_pool_id"] == pool and block["state"] == "active_allocated":
                found[address] = block["size"]
            address += block["size"]
    return found
torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
blocks = [alloc(size) for size in (700, 3 * MIB + 100, 40_000, 8 * MIB)]
torch._C._cuda_endAllocateToPool(0, pool)
addresses = {block.value for block in blocks}
outside = alloc(MIB)
state = torch._C._cuda_getCheckpointState(0, pool)
expected = live()
assert set(expected) == addresses and outside.value not in expected, expected
assert torch._C._cuda_checkPoolLiveAllocations(0, pool, addresses)
assert not torch._C._cuda_checkPoolLiveAllocations(0, pool, addresses - {blocks[0].value})
assert not torch._C._cuda_checkPoolLiveAllocations(0, pool, addresses | {outside.value})
# The pool's memory is used for something else meanwhile; one block of the checkpoint lives on.
for block in blocks[1:]:
    assert c.xseg_device_free(block) == 0
torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
others = [alloc(size) for size in (6 * MIB, 900, 2 * MIB)]
torch._C._cuda_endAllocateToPool(0, pool)
assert live().keys() != expected.keys()
for block in others:
    assert c.xseg_device_free(block) == 0
for round in range(2):
    torch._C._cuda_setCheckpointPoolState(0, state, [], [])
    assert live() == expected and torch._C._cuda_checkPoolLiveAllocations(0, pool, addresses)
    # A second time nothing changes.
    torch._C._cuda_setCheckpointPoolState(0, state, [], [])
    assert live() == expected
    torch._C._cuda_cudaCachingAllocator_raw_delete(blocks[2].value)
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool, addresses - {blocks[2].value})
empty = torch._C._cuda_getCheckpointState(0, (5, 5))
assert torch._C._cuda_checkPoolLiveAllocations(0, (5, 5), set())
torch._C._cuda_setCheckpointPoolState(0, empty, [], [])
# A pool that is gone has no checkpoints any more. It was opened twice.
for block in (blocks[0], blocks[1], blocks[3]):
    assert c.xseg_device_free(block) == 0
for _ in range(2):
    torch._C._cuda_releasePool(0, pool)
try:
    torch._C._cuda_setCheckpointPoolState(0, state, [], [])
    raise SystemExit("no error")
except RuntimeError as error:
    assert "cannot live again" in str(error), error
""",
    )


def test_an_open_pool_is_not_opened_again(modes: list[str]) -> None:
    run(
        "full",
        """
import threading
pool = (0, 71)
def pool_of(block):
    for segment in torch._C._cuda_memorySnapshot(None)["segments"]:
        if segment["address"] <= block.value < segment["address"] + segment["total_size"]:
            return tuple(segment["segment_pool_id"])
def refused():
    try:
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
    except RuntimeError as error:
        assert "(0, 71) already" in str(error), error
        return True
opened, asked = threading.Event(), threading.Event()
found = []
def second():
    opened.wait()
    found.append(refused())
    asked.set()
thread = threading.Thread(target=second)
thread.start()
torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
opened.set()
asked.wait()
thread.join()
assert found == [True] and refused()
# The refused ones changed nothing: the pool is open with one use, and its own end ends it.
assert pool_of(alloc(4 * MIB)) == pool
torch._C._cuda_endAllocateToPool(0, pool)
assert pool_of(alloc(4 * MIB)) == (0, 0)
torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
assert pool_of(alloc(4 * MIB)) == pool
torch._C._cuda_endAllocateToPool(0, pool)
for _ in range(2):
    torch._C._cuda_releasePool(0, pool)
class Pool(ctypes.Structure):
    _fields_ = [("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]
heap, uses = ctypes.c_void_p(), ctypes.c_uint32(9)
c.xseg_capture_uses.argtypes = [ctypes.c_void_p, Pool, ctypes.c_void_p]
assert c.xseg_device_heap(0, ctypes.byref(heap)) == 0
assert c.xseg_capture_uses(heap, Pool(*pool), ctypes.byref(uses)) == 0 and uses.value == 0
""",
    )
    said = run(
        "plain",
        """
torch._C._cuda_beginAllocateCurrentThreadToPool(0, (0, 71))
try:
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, (0, 71))
except RuntimeError as error:
    print(error)
torch._C._cuda_endAllocateToPool(0, (0, 71))
torch._C._cuda_beginAllocateCurrentThreadToPool(0, (0, 71))
torch._C._cuda_endAllocateToPool(0, (0, 71))
""",
    )
    assert "could not open a pool" in said and "(0, 71) already" in said, said


def test_a_forked_child_destroys_copies_of_pools_and_blocks(modes: list[str]) -> None:
    said = run(
        "full",
        """
import os
pool = (0, 77)
torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
block = alloc(MIB)
torch._C._cuda_endAllocateToPool(0, pool)
child = os.fork()
if child == 0:
    torch._C._cuda_cudaCachingAllocator_raw_delete(block.value)
    torch._C._cuda_releasePool(0, pool)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
torch._C._cuda_cudaCachingAllocator_raw_delete(block.value)
torch._C._cuda_releasePool(0, pool)
print(torch._C._cuda_memoryStats(0)["allocated_bytes"]["all"]["current"])
""",
    )
    assert said.split() == ["0"], said


def test_graph_trees_without_the_part_say_what_to_do(modes: list[str]) -> None:
    run(
        "plain",
        """
for call in (lambda: torch._C._cuda_checkPoolLiveAllocations(0, (0, 1), set()), lambda: torch._C._cuda_getCheckpointState(0, (0, 1))):
    try:
        call()
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "cudagraph_trees = False" in str(error), error
""",
    )


def test_tensors_for_other_processes_name_xseg(modes: list[str]) -> None:
    run(
        "full",
        """
from torch.multiprocessing import reductions
from xseg import _ipc
assert reductions.rebuild_cuda_tensor is _ipc.rebuild_cuda_tensor
assert b"xseg._ipc" in pickle.dumps(reductions.rebuild_cuda_tensor)
# PyTorch's own function does the work: of nothing it needs no GPU.
parts = (torch.Tensor, (0,), (1,), 0, torch.storage.TypedStorage, torch.float32, "cpu", None, 0, 0, False, None, 0, None, False)
assert reductions.rebuild_cuda_tensor(*parts).shape == (0,)
""",
    )


def test_tensors_without_the_part_say_what_to_do(modes: list[str]) -> None:
    run(
        "plain",
        """
from xseg import _ipc
storage = torch.UntypedStorage(8)
for call in (storage._share_cuda_, lambda: torch.UntypedStorage._new_shared_cuda(0, b"", 8), lambda: _ipc.rebuild_cuda_tensor(1)):
    try:
        call()
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "install g++" in str(error) and "tensor.cpu()" in str(error), error
""",
    )


def library(source: str, folder: Path) -> Path:
    """A part of the C++ part with functions for tests, as a library."""
    import torch

    torch_folder = Path(torch.__file__).parent
    (folder / "xseg.h").write_text(_native.header())
    includes = [folder, Path(_build.__file__).parent, torch_folder / "include"]
    command = [
        _build._compiler(), "-shared", "-fPIC", "-std=c++20", "-DUSE_CUDA", "-Wl,-Bsymbolic",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *[f"-I{include}" for include in includes],
        "-isystem", _build._cuda_include(torch_folder.parent), str(Path(__file__).with_name(source)), _native.__file__,
        "-o", str(folder / "test.so"), f"-L{torch_folder}/lib", "-lc10_cuda", "-lc10",
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "test.so"


@pytest.fixture(scope="module")
def ipc(modes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The functions that PyTorch calls for tensors between processes."""
    return library("ipc.cpp", tmp_path_factory.mktemp("ipc"))


IPC = """
import ctypes, os, socket, subprocess, sys, threading, time
import torch
from xseg import _torch
c = _torch._c()
c.xseg_device_alloc.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
c.xseg_device_free.argtypes = [ctypes.c_void_p]
# As PyTorch calls them: with Python's lock.
ipc = ctypes.PyDLL(os.environ["IPC_LIBRARY"])
ipc.test_share.argtypes, ipc.test_share.restype = [ctypes.c_void_p], ctypes.c_char_p
ipc.test_receive.argtypes, ipc.test_receive.restype = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.c_void_p
ipc.test_drop.argtypes = [ctypes.c_char_p]
MIB = 1 << 20
def receive(name, ticket):
    why = ctypes.c_char_p()
    address = ipc.test_receive(name, ticket, ctypes.byref(why))
    return address if address is not None else why.value.decode()
def byte(address):
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_ubyte))
def stats():
    filled = (ctypes.c_uint64 * (len(_torch._native.STATISTICS) + 1))()
    filled[0] = ctypes.sizeof(filled)
    _torch._check(c.xseg_stats(_torch._heap(0), filled))
    return dict(zip(_torch._native.STATISTICS, filled[1:]))
def until(done):
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, stats()
        time.sleep(0.001)
"""


def run_ipc(library: Path, code: str) -> None:
    settings = {"XSEG_CONF": "backend:host,limit:256MiB", "IPC_LIBRARY": str(library), "IPC": IPC}
    command = [sys.executable, "-c", IPC + code]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_block_is_received_once_and_given_back(ipc: Path) -> None:
    run_ipc(
        ipc,
        """
OTHER = os.environ["IPC"] + '''
ticket = sys.stdin.readline().strip().encode()
first, second = receive(b"first", ticket), receive(b"second", ticket)
assert first == second and stats()["imported"] == 40 * MIB, (first, second, stats()["imported"])
assert byte(first)[0] == 7 and byte(first)[40 * MIB - 1] == 9
byte(first)[1] = 11
ipc.test_drop(b"first")
assert byte(second)[0] == 7 and stats()["imported"] == 40 * MIB
print("read", flush=True)
sys.stdin.readline()
assert byte(second)[0] == 7, "freed by its owner, it is another's"
ipc.test_drop(b"second")
until(lambda: stats()["imported"] == 0)
print(receive(b"third", ticket), flush=True)
sys.stdin.readline()
'''
block = ctypes.c_void_p()
assert c.xseg_device_alloc(0, 40 * MIB, None, ctypes.byref(block)) == 0
byte(block.value)[0], byte(block.value)[40 * MIB - 1] = 7, 9
ticket = ipc.test_share(block).decode()
assert ticket == ipc.test_share(block).decode() and ticket.startswith("xseg-ticket ")
other = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(ticket, file=other.stdin, flush=True)
assert other.stdout.readline().strip() == "read" and byte(block.value)[1] == 11
assert c.xseg_device_free(block) == 0 and stats()["pending"] == 40 * MIB
more = ctypes.c_void_p()
assert c.xseg_device_alloc(0, 40 * MIB, None, ctypes.byref(more)) == 0 and more.value != block.value
ctypes.memset(more, 1, 40 * MIB)
print("freed", file=other.stdin, flush=True)
said = other.stdout.readline()
assert "could not receive a tensor of another process" in said and "the block was freed" in said, said
def over():
    c.xseg_tick(_torch._heap(0))
    return stats()["exported"] == stats()["pending"] == 0
until(over)
print("end", file=other.stdin, flush=True)
assert other.wait(60) == 0
said = ipc.test_share(block).decode()
assert said.startswith("!xseg could not send a tensor to another process") and "no live block" in said, said
""",
    )


def test_other_threads_run_while_one_waits_for_a_process(ipc: Path) -> None:
    run_ipc(
        ipc,
        r"""
here = socket.socket(socket.AF_UNIX)
here.bind("\0xseg-test-" + str(os.getpid()))
here.listen()
asked = []
def answer():
    there, _ = here.accept()
    asked.append(there.recv(100))
    there.sendall(bytes([2]) + b"not today")
    there.close()
thread = threading.Thread(target=answer)
thread.start()
ticket = f"xseg-ticket 1 {os.getpid()} xseg-test-{os.getpid()} {7:032x}"
said = receive(b"one", ticket.encode())
thread.join()
assert "refused it: not today" in str(said) and len(asked[0]) == 24 and asked[0].endswith(bytes([7])), said
# A handle of PyTorch's own allocator.
assert "xseg.install()" in receive(b"two", bytes([1, 99]) + b"x" * 60)
""",
    )


def test_a_device_gets_access_to_the_memory_of_another(modes: list[str], tmp_path: Path) -> None:
    compiler, source = shutil.which("rustc"), Path(__file__).parents[2] / "tests/fake_cuda/lib.rs"
    if compiler is None or not source.exists():
        pytest.skip("the stand-in for the CUDA driver needs rustc and the sources")
    # Four devices, of which 2 has no way to any other.
    stand_in = [compiler, "--edition", "2024", "--crate-type", "cdylib", "--crate-name", "fake_cuda", str(source), "-o"]
    subprocess.run([*stand_in, str(tmp_path / "libcuda.so.1")], check=True, capture_output=True)
    code = """
import ctypes, os
import torch
from xseg import _torch
c, driver, part = _torch._c(), ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(os.environ["PART"])
part.test_grant.restype = ctypes.c_char_p
driver.fake_access.argtypes, driver.fake_access.restype = [ctypes.c_void_p], ctypes.c_uint64
c.xseg_device_alloc.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
blocks = []
def reached_by(device):
    block = ctypes.c_void_p()
    assert c.xseg_device_alloc(device, 8 << 20, None, ctypes.byref(block)) == 0, c.xseg_last_error()
    blocks.append(block.value)
    return {driver.fake_access(block) for block in blocks}
assert reached_by(1) == {0b0010} and not part.test_granted(0, 1)
assert part.test_grant(0, 1) is None and part.test_grant(0, 1) is None and part.test_grant(3, 1) is None
assert reached_by(1) == {0b1011}, "what was there, and what came later"
assert part.test_granted(0, 1) and part.test_granted(3, 1) and not part.test_granted(1, 0)
for device, why in ((2, "cannot reach the memory of device 1"), (4, "does not exist"), (-1, "begin with 0")):
    said = part.test_grant(device, 1).decode()
    assert "xseg could not give a device access to the memory of another" in said and why in said, said
    assert not part.test_granted(device, 1)
"""
    env = {"FAKE_CUDA_DEVICES": "4", "FAKE_CUDA_FAR": "2", "XSEG_CONF": "backend:cuda,limit:256MiB,reserve:4GiB"}
    found = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("LD_LIBRARY_PATH"))))
    part = library("peers.cpp", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env, "LD_LIBRARY_PATH": found, "PART": str(part)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("conf", "gpus", "expected"),
    [
        ("", 2, "handles:small,peers:all"),
        ("limit:90%,", 8, "limit:90%,handles:small,peers:all"),
        ("peers:none,handles:large", 2, "peers:none,handles:large"),
        (" peers : 1 ", 2, "peers : 1,handles:small"),
        ("", 1, "handles:small"),
        ("", 0, "handles:small"),
    ],
)
def test_without_the_part_gpus_reach_each_other_from_the_start(
    modes: list[str], conf: str, gpus: int, expected: str
) -> None:
    code = f"""
import os
import torch, xseg
torch.cuda.device_count = lambda: {gpus}
assert xseg.install(compile=False) == "plain"
assert os.environ["XSEG_CONF"] == {expected!r}, os.environ["XSEG_CONF"]
assert not torch.cuda.is_initialized()
"""
    env = {**os.environ, "XSEG_CONF": conf}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
