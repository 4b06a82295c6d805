"""Training, installing, the switch, processes that end or fork."""

from __future__ import annotations

import sys
from typing import Any

from common import check, full_only, model_and_data, other_process, start, step


@check
def losses() -> Any:
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    native = other_process("training", CHECK_MODE="native", **env)
    ours = other_process("training", **env)
    if ours != native:
        again = other_process("training", CHECK_MODE="native", **env)
        assert native == again, "native does not agree with itself, so this says nothing"
        first = next(at for at, (a, b) in enumerate(zip(native, ours)) if a != b)
        raise AssertionError(f"first difference at step {first}: {native[first]} and {ours[first]}")
    return {"steps": len(ours), "last": float.fromhex(ours[-1])}


@check
def install_errors() -> Any:
    torch = start()
    import xseg

    texts = []
    try:
        xseg.install()
    except RuntimeError as error:
        texts.append(str(error))
    texts.append(other_process("install_too_late"))
    texts.append(other_process("install_wrong_conf"))
    assert len(texts) == 3 and "already" in texts[0] and "before" in texts[1] and "limitt" in texts[2], texts
    assert torch.ones(3, device="cuda").sum().item() == 3
    return texts


def install_too_late() -> Any:
    import torch
    import xseg

    torch.ones(1, device="cuda")
    try:
        return xseg.install(compile=False)
    except RuntimeError as error:
        return str(error)


def install_wrong_conf() -> Any:
    import xseg

    try:
        return xseg.install("limitt:4G", compile=False)
    except xseg.ConfigError as error:
        return str(error)


@check
def kill_switch() -> Any:
    return other_process("without", XSEG_CONF="off")


def without() -> Any:
    import torch
    import xseg

    found = xseg.install()
    torch.ones(1, device="cuda")
    backend = torch.cuda.get_allocator_backend()
    assert (found, backend) == ("off", "native"), (found, backend)
    return [found, backend]


@check
def clean_exit() -> Any:
    return other_process("live_at_exit")


def live_at_exit() -> Any:
    torch = start()
    module = sys.modules[__name__]
    model, optimizer = model_and_data(torch)
    step(torch, model, optimizer, 0)
    module.kept = [model, optimizer, torch.ones(1000, device="cuda"), torch.cuda.Stream()]  # type: ignore[attr-defined]
    torch.ones(10_000_000, device="cuda").sum()
    return "left alive"


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((16,), float(index))


@check
def workers() -> Any:
    torch = start()
    alive = torch.ones(1000, device="cuda")
    sums = []
    for kind in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(
            Rows(), batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context=kind
        )
        sums.append(sum(batch.cuda(non_blocking=True).sum().item() for batch in loader))
    assert sums == [16 * sum(range(64))] * 2, sums
    assert alive.sum().item() == 1000
    return sums


@full_only
def cudnn_benchmark() -> Any:
    torch = start()
    torch.backends.cudnn.benchmark = True
    net = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
    total = 0.0
    for size in (32, 64, 128):
        total += net(torch.ones(4, 16, size, size, device="cuda")).sum().item()
    return total
