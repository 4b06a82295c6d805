"""Real training runs under PyTorch's allocators and xseg, each in a process of its own with the same seeds.

    python train.py --runs gpt2,llama --allocators native,expandable,async,xseg --seconds 20 --repeat 3 --out rows.jsonl
    python train.py --least --runs llama --allocators expandable,xseg        # least memory in which a run completes
    python train.py --limit 1.02x --runs llama --allocators expandable,xseg  # of the peak that was requested

A line of JSON a run: losses, tokens (images for the vision run) a second, peaks, retries, host waits. Rounds alternate
between the allocators, since the speed of a machine drifts.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GIB = 1 << 30
MIB = 1 << 20
ALLOCATORS = ("native", "expandable", "async", "xseg")


class Run:
    """A workload: `step(at)` trains one step and gives its loss tensor and how many tokens it had."""

    def __init__(self, torch: Any, model: Any, lr: float = 1e-4) -> None:
        self.torch, self.model = torch, model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=lr, fused=True)

    def tokens(self, at: int, batch: int, length: int, vocabulary: int) -> Any:
        generator = self.torch.Generator().manual_seed(at)
        return self.torch.randint(vocabulary, (batch, length), generator=generator).cuda(non_blocking=True)

    def update(self, loss: Any) -> Any:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def step(self, at: int) -> tuple[Any, int]:
        raise NotImplementedError


def lengths(at: int, least: int, most: int) -> int:
    """A length of step `at`, the same in every process."""
    return random.Random(at).randrange(least, most + 1)


class Language(Run):
    batch, least, most, vocabulary = 8, 1024, 1024, 50257

    def step(self, at: int) -> tuple[Any, int]:
        length = lengths(at, self.least, self.most)
        data = self.tokens(at, self.batch, length, self.vocabulary)
        with self.torch.autocast("cuda", self.torch.bfloat16):
            loss = self.model(input_ids=data, labels=data, use_cache=False).loss
        return self.update(loss), data.numel()


class Gpt2(Language):
    """GPT-2 medium with automatic mixed precision, fixed length."""

    def __init__(self, torch: Any) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_embd=1024, n_layer=24, n_head=16)
        super().__init__(torch, GPT2LMHeadModel(config).cuda())


class Llama(Language):
    """A Llama of about 1.1 billion parameters, lengths from 256 to 4096, with gradient checkpointing."""

    batch, least, most, vocabulary = 4, 256, 4096, 32000

    def __init__(self, torch: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
            num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=4096,
        )  # fmt: skip
        model = LlamaForCausalLM(config).cuda()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        super().__init__(torch, model.train())


class Moe(Language):
    """A mixture of eight experts, two of them for each token, with lengths from 256 to 2048."""

    batch, least, most, vocabulary = 4, 256, 2048, 32000

    def __init__(self, torch: Any) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=self.vocabulary, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
            num_attention_heads=16, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
        )  # fmt: skip
        super().__init__(torch, MixtralForCausalLM(config).cuda())


class Lora(Language):
    """Low-rank adapters on a frozen Llama, whose activations are offloaded to the host."""

    batch, least, most, vocabulary = 4, 256, 2048, 32000

    def __init__(self, torch: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16,
            num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=4096,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.bfloat16).cuda().requires_grad_(False)

        class Adapter(torch.nn.Module):
            def __init__(self, base: Any, rank: int = 16) -> None:
                super().__init__()
                self.base = base
                self.down = torch.nn.Linear(base.in_features, rank, bias=False, device="cuda")
                self.up = torch.nn.Linear(rank, base.out_features, bias=False, device="cuda")
                torch.nn.init.zeros_(self.up.weight)

            def forward(self, x: Any) -> Any:
                return self.base(x) + self.up(self.down(x))

        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
        super().__init__(torch, model.train(), lr=1e-3)

    def step(self, at: int) -> tuple[Any, int]:
        with self.torch.autograd.graph.save_on_cpu(pin_memory=True):
            return super().step(at)


class ConvNext(Run):
    """A ConvNeXt with images of 160 to 384 pixels: another size each step."""

    def __init__(self, torch: Any) -> None:
        from transformers import ConvNextConfig, ConvNextForImageClassification

        super().__init__(torch, ConvNextForImageClassification(ConvNextConfig(num_labels=1000)).cuda())

    def step(self, at: int) -> tuple[Any, int]:
        size, batch = 32 * lengths(at, 5, 12), 64
        generator = self.torch.Generator().manual_seed(at)
        images = self.torch.randn(batch, 3, size, size, generator=generator).cuda(non_blocking=True)
        labels = self.torch.randint(1000, (batch,), generator=generator).cuda(non_blocking=True)
        with self.torch.autocast("cuda", self.torch.bfloat16):
            loss = self.model(pixel_values=images, labels=labels).loss
        return self.update(loss), batch


RUNS = {"gpt2": Gpt2, "llama": Llama, "moe": Moe, "lora": Lora, "convnext": ConvNext}


def fill(torch: Any, left: int) -> int:
    """Takes memory from the driver until `left` bytes are free; it lives as long as the process."""
    torch.cuda.init()
    free = torch.cuda.mem_get_info()[0]
    address = ctypes.c_uint64()
    bytes_ = max(free - left, 0)
    if bytes_ and ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(bytes_)):
        raise RuntimeError(f"the driver refused a ballast of {bytes_} bytes")
    return bytes_


def child(args: argparse.Namespace) -> None:
    """One run in this process; prints its line."""
    import torch

    line: dict[str, Any] = {"run": args.run, "allocator": args.allocator, "limit": args.bytes, "completed": False}
    if args.allocator == "xseg":
        import xseg

        line["mode"] = xseg.install()
    total = torch.cuda.get_device_properties(0).total_memory
    if args.bytes and args.allocator == "async":
        # The fraction does not bind this one: the rest of the card is filled.
        line["ballast"] = fill(torch, args.bytes)
    elif args.bytes:
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.bytes / total))
    torch.manual_seed(1234)
    losses: list[Any] = []
    try:
        run = RUNS[args.run](torch)
        warm, tokens, began, steps = args.warmup, 0, 0.0, 0
        while True:
            if steps == warm:
                torch.cuda.synchronize()
                began, tokens = time.perf_counter(), 0
            loss, count = run.step(steps)
            losses.append(loss)
            tokens += count
            steps += 1
            if steps > warm and (steps >= args.steps if args.steps else time.perf_counter() - began >= args.seconds):
                break
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        line.update(completed=True, steps=steps, seconds=round(seconds, 3), per_second=round(tokens / seconds, 1))
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if "out of memory" not in str(error).lower():
            raise
        line["error"] = str(error)[:400]
    stats = torch.cuda.memory_stats()
    line["peak_requested"] = stats.get("requested_bytes.all.peak")
    line["peak_allocated"] = torch.cuda.max_memory_allocated()
    line["peak_reserved"] = torch.cuda.max_memory_reserved()
    line["retries"] = stats.get("num_alloc_retries")
    if args.allocator == "xseg":
        import xseg

        names = (
            "host_waits",
            "gpu_waits",
            "handles_moved",
            "bytes_moved",
            "handles_rechunked",
            "driver_nanos",
            "slow_allocs",
            "allocs",
        )
        line.update({name: xseg.stats()[name] for name in names})
    line["losses"] = [value.item().hex() for value in losses[: args.losses]]
    print(json.dumps(line), flush=True)


def launch(args: argparse.Namespace, run: str, allocator: str, limit: int = 0, steps: int = 0) -> dict[str, Any]:
    env = dict(os.environ)
    env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    env.pop("PYTORCH_ALLOC_CONF", None)
    if allocator == "expandable":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    elif allocator == "async":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    command = [
        sys.executable, __file__, "--child", "--run", run, "--allocator", allocator, "--bytes", str(limit),
        "--seconds", str(args.seconds), "--steps", str(steps or args.steps), "--warmup", str(args.warmup), "--losses", str(args.losses),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {
            "run": run,
            "allocator": allocator,
            "limit": limit,
            "completed": False,
            "error": f"no end in {args.timeout} s",
        }
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"run": run, "allocator": allocator, "limit": limit, "completed": False, "error": done.stderr[-800:]}
    return json.loads(lines[-1])


def least(args: argparse.Namespace, run: str, allocator: str, peak: int) -> Iterator[dict[str, Any]]:
    """The least limit, to half a per cent of the peak, at which a fixed number of steps completes."""
    low, high = 0.97, 2.0
    while high - low > 0.005:
        factor = (low + high) / 2
        # Where little is missing, most of the time, the search begins low.
        factor = min(factor, low + 0.06)
        line = launch(args, run, allocator, int(peak * factor), args.steps or 20)
        line["factor"] = round(factor, 4)
        yield line
        low, high = (low, factor) if line["completed"] else (factor, high)
    yield {
        "run": run,
        "allocator": allocator,
        "least_factor": round(high, 4),
        "least": int(peak * high),
        "peak_requested": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--allocators", default=",".join(ALLOCATORS), help=f"of {', '.join(ALLOCATORS)}")
    parser.add_argument("--seconds", type=float, default=20, help="of training after the warm-up (default 20)")
    parser.add_argument("--steps", type=int, default=0, help="this many steps instead")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts (default 5)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds over the allocators (default 3)")
    parser.add_argument("--losses", type=int, default=20, help="losses to keep (default 20)")
    parser.add_argument("--limit", default="", help="bytes, or a factor such as 1.02x of the peak that native requests")
    parser.add_argument("--least", action="store_true", help="search the least limit at which a run completes")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for one process (default 180)")
    parser.add_argument("--out", type=Path, default=Path("train.jsonl"), help="lines are added to this file")
    for name in ("--run", "--allocator"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    with args.out.open("a") as out:

        def keep(line: dict[str, Any]) -> dict[str, Any]:
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(json.dumps({name: value for name, value in line.items() if name != "losses"}), flush=True)
            return line

        for run in args.runs.split(","):
            allocators = args.allocators.split(",")
            peak = 0
            if args.least or args.limit.endswith("x"):
                first = keep(launch(args, run, "native", 0, args.steps or 20))
                peak = first.get("peak_requested") or 0
                if not peak:
                    continue
            if args.least:
                for allocator in allocators:
                    for line in least(args, run, allocator, peak):
                        keep(line)
                continue
            limit = int(peak * float(args.limit[:-1])) if args.limit.endswith("x") else int(args.limit or 0)
            rows: dict[str, list[dict[str, Any]]] = {}
            for _ in range(args.repeat):
                for allocator in allocators:
                    rows.setdefault(allocator, []).append(keep(launch(args, run, allocator, limit)))
            for allocator, lines in rows.items():
                speeds = [line["per_second"] for line in lines if line["completed"]]
                keep({
                    "summary": run, "allocator": allocator, "limit": limit, "completed": len(speeds), "of": len(lines),
                    "median_per_second": statistics.median(speeds) if speeds else None,
                    "spread": [min(speeds), max(speeds)] if speeds else None,
                    "peak_reserved": max((line.get("peak_reserved") or 0 for line in lines), default=0),
                    "equal_losses": lines[0].get("losses") == rows[allocators[0]][0].get("losses"),
                })  # fmt: skip


if __name__ == "__main__":
    main()
