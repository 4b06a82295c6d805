"""Training on several ranks, DDP and FSDP2, under PyTorch's allocators and xseg.

One run, on as many hosts as torchrun is started on; a line of JSON for each rank, and one for all from rank 0:

    torchrun --nproc-per-node 2 distributed.py --kind fsdp2 --allocator xseg --steps 200
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 distributed.py --kind ddp --allocator xseg

Comparisons on the GPUs of this host (it starts torchrun itself), with a report at the end. Native is run by itself first, for its peak;
then all processes of a round are on the GPUs, and take turns of `--turn` seconds, since a machine's own speed changes by more within
minutes than allocators differ (`--turn 0`: one after the other, where the GPUs cannot hold all):

    python distributed.py --compare --ranks 2 --out lines.jsonl              # native, xseg, xseg at 1.02x; then expandable
    python distributed.py --compare --ranks 2 --least --out lines.jsonl      # and the least memory of a rank
    python distributed.py --compare --ranks 2 --least --probes 1.005x,1.01x --have lines.jsonl --out more.jsonl
    python distributed.py --compare --ranks 2 --exact-runs 2 --out lines.jsonl   # and losses with deterministic kernels
    python distributed.py --compare --ranks 2 --register --out lines.jsonl   # and all that from memory that NCCL registered
    python distributed.py --compare --ranks 2 --share --width 1024 --layers 8 --vocabulary 8000 --out lines.jsonl   # two ranks on one GPU
    python distributed.py --summary lines.jsonl

Every rank trains on data and lengths of its own. A rank that does not get on within `--hang` seconds says so, with the stacks of its
threads, and ends with status 3. Where there is no GPU the ranks train a small model on the host, by gloo. An option that is only for the
other of the two ways is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from measure import Marks, be_deterministic, dry_figures, installed
from modes import misplaced
from options import amount, factor, factors, names, some, whole
from pace import Turns, Watch, say
from visit import gpus_here, interruptible, lacks

KINDS = ("ddp", "fsdp2")
ALLOCATORS = ("native", "expandable", "xseg")
SEED = 1234
# Width, layers, vocabulary, batch and length of `--small`.
SMALL = (64, 2, 128, 2, 32)


def make_model(torch: Any, width: int, layers: int, vocabulary: int) -> Any:
    """A decoder: attention and a wide layer in each block."""
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            heads = max(width // 64, 1)
            parts = self.mixed(self.before(x)).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
            return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))

    class Decoder(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))[:, :-1]
            return nn.functional.cross_entropy(logits.reshape(-1, vocabulary).float(), tokens[:, 1:].reshape(-1))

    return Decoder()


def spread(torch: Any, model: Any, args: argparse.Namespace, backend: Any, device: Any) -> tuple[Any, Any]:
    """The model on all ranks, and the pool of registered memory that it communicates from, if wanted."""
    pool = None
    if args.register:
        # Memory of NCCL's own: what is registered must neither move nor be cut differently on another rank.
        pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(pool)
    if args.kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        ids = [device.index] if device.type == "cuda" else None
        if pool is None:
            return DistributedDataParallel(model, device_ids=ids), None
        # Buckets are made anew after the first step, outside of the pool, unless parameters may be unused.
        with torch.cuda.use_mem_pool(pool):
            made = DistributedDataParallel(
                model, device_ids=ids, find_unused_parameters=True, gradient_as_bucket_view=True
            )
        return made, pool
    from torch.distributed.fsdp import fully_shard

    parts = [*model.blocks, model]
    for part in parts:
        fully_shard(part)
    if pool is not None:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        class Pooled:
            def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
                with torch.cuda.use_mem_pool(pool):
                    return torch.empty(*size, dtype=dtype, device=device)

        gather = type("PooledGather", (Pooled, collectives.DefaultAllGather), {})
        scatter = type("PooledScatter", (Pooled, collectives.DefaultReduceScatter), {})
        for part in parts:
            part.set_custom_all_gather(gather())
            part.set_custom_reduce_scatter(scatter())
    return model, pool


def train(torch: Any, args: argparse.Namespace, line: dict[str, Any], watch: Watch) -> None:
    """All steps of this rank; fills its line."""
    dist = torch.distributed
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        if args.bytes:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, args.bytes / total), device)
    timeout = datetime.timedelta(seconds=2 * args.hang)
    nccl = cuda and not args.share
    dist.init_process_group("nccl" if nccl else "gloo", timeout=timeout, device_id=device if nccl else None)
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.deterministic:
        be_deterministic(torch)
    torch.manual_seed(SEED)
    with torch.device(device):
        model = make_model(torch, args.width, args.layers, args.vocabulary)
    backend = dist.group.WORLD._get_backend(device)
    model, pool = spread(torch, model, args, backend, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wait = torch.cuda.synchronize if cuda else lambda: None
    losses = torch.zeros(args.warmup + args.steps, device=device)
    turns = Turns(dist, args, watch)
    tokens, seconds, began, end = 0, 0.0, time.perf_counter(), 0
    marks = Marks(torch if cuda else None)
    for at in range(args.warmup + args.steps):
        if at == args.warmup:
            wait()
            dist.barrier()
            tokens = 0
        if at >= args.warmup and at - args.warmup == end:
            wait()
            seconds += time.perf_counter() - began if end else 0
            end = turns.next(end)
            began = time.perf_counter()
            marks.turn()
            marks.mark()
        # Step 1 has the greatest length on all ranks, so that peaks are met before the clock starts.
        drawn = random.Random(at * world + rank).randrange(args.length // 8, args.length + 1)
        shape = (args.batch, args.length if at == 1 else drawn)
        generator = torch.Generator(device).manual_seed(SEED + at * world + rank)
        data = torch.randint(args.vocabulary, shape, generator=generator, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[at].copy_(loss.detach())
        tokens += data.numel()
        if at >= args.warmup:
            marks.mark()
        # DDP makes its buckets anew after the first step: whether the old ones are gone when the peak is met must not depend on
        # how far the device is behind.
        if at < args.warmup:
            wait()
        if at == 0 and cuda:
            # PyTorch's watchdog of NCCL lets go of what a finished collective used within a tenth of a second.
            time.sleep(1)
        # A program that logs waits now and then too; only what has run counts as getting on.
        if at % 10 == 9:
            wait()
            watch.at(at + 1)
    wait()
    seconds += time.perf_counter() - began
    turns.over()
    dist.all_reduce(losses)
    counted = torch.tensor(float(tokens), device=device, dtype=torch.float64)
    dist.all_reduce(counted)
    wait()
    line.update(completed=True, seconds=round(seconds, 3), per_second=round(counted.item() / seconds, 1))
    line["step_ms"] = marks.between()
    line["losses"] = [(value / world).hex() for value in losses.tolist()]
    line["registered"] = pool is not None
    line.update(figures(torch, args.allocator, device) if cuda else dry_figures())
    dist.barrier()
    if pool is not None:
        backend.deregister_mem_pool(pool)
    dist.destroy_process_group()


def figures(torch: Any, allocator: str, device: Any) -> dict[str, Any]:
    stats = torch.cuda.memory_stats(device)
    found = {
        "peak_requested": stats.get("requested_bytes.all.peak"),
        "peak_reserved": torch.cuda.max_memory_reserved(device),
        "retries": stats.get("num_alloc_retries"),
    }
    if allocator == "xseg":
        import xseg

        ours = xseg.stats(device.index)
        found.update(
            {
                name: ours[name]
                for name in (
                    "host_waits",
                    "gpu_waits",
                    "handles_moved",
                    "bytes_moved",
                    "handles_joined",
                    "driver_nanos",
                )
            }
        )
    return found


def recorded(args: argparse.Namespace, rank: int) -> contextlib.AbstractContextManager[Any]:
    """Records what rank 0 allocates, if that is wanted and xseg allocates it."""
    if not args.record or rank or args.allocator != "xseg":
        return contextlib.nullcontext()
    import xseg

    return xseg.record(args.record)


def rank_main(args: argparse.Namespace) -> int:
    """One rank, as torchrun starts it."""
    if lacks("distributed.py", ("torch",), (args.allocator,)):
        return 2
    if "RANK" not in os.environ:
        words = "distributed.py is a rank, which torchrun starts; or give --compare, and it starts the ranks of several runs"
        print(words, file=sys.stderr)
        return 2
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), gpus_here()
    if ranks > gpus > 0 and not args.share:
        print(
            f"{ranks} ranks on this host, but {gpus} {'GPU' if gpus == 1 else 'GPUs'}, and NCCL takes one rank on each; --share has ranks share them",
            file=sys.stderr,
        )
        return 2
    if args.allocator == "expandable":
        # Read when PyTorch is loaded.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    rank = int(os.environ["RANK"])
    line: dict[str, Any] = {
        "rank": rank, "world": int(os.environ.get("WORLD_SIZE", 1)), "host": os.uname().nodename, "kind": args.kind,
        "allocator": args.allocator, "limit": args.bytes, "steps": args.steps, "register": args.register, "completed": False,
    }  # fmt: skip
    import torch

    if args.allocator == "xseg" and torch.cuda.is_available():
        # Before the watch: the first call on a machine compiles.
        line.update(installed())
    watch = Watch(args.hang, line)
    watch.at(0)
    watch.start()
    try:
        with recorded(args, rank):
            train(torch, args, line, watch)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        line["error"] = str(error)[:400]
        if "out of memory" not in str(error).lower():
            say(line)
            raise
        line.update(figures(torch, args.allocator, torch.device("cuda", torch.cuda.current_device())))
    say(line)
    watch.stop()
    if not line["completed"]:
        # The others wait for this rank in a collective; torchrun ends them.
        os._exit(1)
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kind", choices=KINDS, default="ddp", help="default %(default)s")
    add("--allocator", choices=ALLOCATORS, default="native", help="default %(default)s")
    add("--steps", type=whole(1), default=200, help="after the warm-up (default %(default)s)")
    add("--warmup", type=whole(0), default=5, help="steps before the clock starts (default %(default)s)")
    add("--bytes", type=whole(0), default=0, help="most memory of each rank; 0: no limit")
    add("--register", action="store_true", help="communicate from memory that NCCL allocated and registered")
    add(
        "--share",
        action="store_true",
        help="ranks share the GPUs where there are fewer; they communicate by gloo, through the host's memory",
    )
    add("--deterministic", action="store_true", help="kernels whose results are the same each time")
    add("--record", default="", help="file for a recording of what rank 0 allocates on xseg (`xseg replay` takes it)")
    add(
        "--hang",
        type=some,
        default=60,
        help="seconds without ten more steps that count as a hang (default %(default)s)",
    )
    add("--width", type=whole(1), default=2048, help="of the model (default %(default)s)")
    add("--layers", type=whole(1), default=12, help="default %(default)s")
    add("--vocabulary", type=whole(1), default=32000, help="default %(default)s")
    add("--batch", type=whole(1), default=4, help="sequences of a step on each rank (default %(default)s)")
    add(
        "--length",
        type=whole(16),
        default=2048,
        help="tokens of the longest batch; the shortest has an eighth (default %(default)s)",
    )
    add("--turns", action="store_true", help=argparse.SUPPRESS)
    add(
        "--small",
        action="store_true",
        help="a small model, which ranks without a GPU train anyway; overrides the five above",
    )
    compare = parser.add_argument_group("comparisons on this host")
    add = compare.add_argument
    add("--compare", action="store_true", help="start the ranks of several runs")
    add("--ranks", type=whole(1), default=2, help="ranks, and so GPUs, of each run (default %(default)s)")
    add("--kinds", type=names(KINDS), default="ddp,fsdp2", help="default %(default)s")
    add(
        "--others",
        type=names(ALLOCATORS),
        default="expandable",
        help="allocators that run once, for their peaks (default %(default)s)",
    )
    add(
        "--limited",
        type=names(ALLOCATORS),
        default="xseg",
        help="allocators that run at `--limit`, too, in each round (default %(default)s)",
    )
    add(
        "--limit",
        type=factor,
        default="1.02x",
        help="memory of a limited run, in times native's peak requested on its worst rank (default %(default)s)",
    )
    add(
        "--turn",
        type=amount,
        default=1.0,
        help="seconds of each turn of a round's processes; 0: one run after the other (default %(default)s)",
    )
    add("--repeat", type=whole(0), default=1, help="rounds of native, xseg and xseg at the limit (default %(default)s)")
    add(
        "--least",
        nargs="?",
        type=names(ALLOCATORS),
        const="xseg,expandable",
        default="",
        help="search the least memory for these allocators (without a name: %(const)s)",
    )
    add(
        "--resolution",
        type=some,
        default=0.0025,
        help="how exact that search is, as a share of peak requested (default %(default)s)",
    )
    add(
        "--probes",
        type=factors,
        default=[],
        help="with --least, try these limits at once instead of searching, such as 1.0025x,1.005x",
    )
    add("--probe-steps", type=whole(1), default=24, help="steps of a run of the search (default %(default)s)")
    add(
        "--exact-runs",
        type=whole(0),
        default=0,
        help="of native and xseg, with deterministic kernels, for their losses (default %(default)s)",
    )
    add("--minutes", type=amount, default=0, help="start nothing that would not end within this time (default: no end)")
    add("--timeout", type=some, default=240, help="seconds for one run (default %(default)s)")
    add("--commit", default="", help="commit of xseg, named in the report")
    add("--have", type=Path, nargs="*", default=[], help="files whose lines need no second run")
    add(
        "--out",
        type=Path,
        default=Path("distributed.jsonl"),
        help="lines are added to this file, and those there count (default %(default)s)",
    )
    add("--summary", type=Path, nargs="+", help="run nothing: report on these files")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if args.share and args.register:
        parser.error("--register is for NCCL, which --share does without")
    misplaced(parser, args)
    here = bool(args.summary or gpus_here())
    for wanted, why in (
        (args.record, "--record is for GPUs: on the host nothing is allocated on xseg"),
        (args.register, "--register is for GPUs: on the host there is no NCCL to register memory"),
    ):
        if wanted and not here:
            print(why, file=sys.stderr)
            return 2
    if args.small or not here:
        args.small = True
        args.width, args.layers, args.vocabulary, args.batch, args.length = SMALL
    if args.compare or args.summary:
        import comparison

        return interruptible(lambda: comparison.main(args))
    return rank_main(args)


if __name__ == "__main__":
    sys.exit(main())
