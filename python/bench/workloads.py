"""The training runs of `train.py`: models, data and one step of each, made from a seed on the GPU itself.

Steps of varying length follow one fixed sequence, which is the same in every process: step 1 has the greatest length, so
that the peak comes during the warm-up, and the rest are drawn by the step's number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

SEED = 1234


def length_of(at: int, least: int, most: int) -> int:
    """A length of step `at`, the same in every process."""
    return most if at == 1 else random.Random(at).randrange(least, most + 1)


class Run:
    """A workload: `step(at)` trains one step and gives its loss, a tensor without a graph, and how many tokens it had."""

    lr = 1e-4
    # Steps at the start that are not like those after them, so that the clock starts behind them.
    first_steps = 0

    def __init__(self, torch: Any, device: str, small: bool) -> None:
        self.torch, self.device = torch, device
        torch.manual_seed(SEED)
        # Made where it is used: a billion parameters drawn on the host take longer than many steps.
        with torch.device(device):
            self.model = self.build(small)
        self.model.train()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=self.lr, fused=True)

    def build(self, small: bool) -> Any:
        raise NotImplementedError

    def loss(self, at: int) -> tuple[Any, int]:
        """The loss of step `at` with its graph, and its tokens."""
        raise NotImplementedError

    def generator(self, at: int) -> Any:
        return self.torch.Generator(self.device).manual_seed(SEED + at)

    def step(self, at: int) -> tuple[Any, int]:
        loss, tokens = self.loss(at)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), tokens


class Language(Run):
    """A language model on tokens drawn at random."""

    batch, least, most, vocabulary = 8, 1024, 1024, 50257

    def __init__(self, torch: Any, device: str, small: bool) -> None:
        if small:
            self.batch, self.least, self.most, self.vocabulary = 2, min(self.least, 8), min(self.most, 32), 128
        super().__init__(torch, device, small)

    def loss(self, at: int) -> tuple[Any, int]:
        shape = (self.batch, length_of(at, self.least, self.most))
        data = self.torch.randint(self.vocabulary, shape, generator=self.generator(at), device=self.device)
        with self.torch.autocast(self.device, self.torch.bfloat16):
            return self.model(input_ids=data, labels=data, use_cache=False).loss, data.numel()


class Gpt2(Language):
    """GPT-2 medium (355 million parameters) with automatic mixed precision, 8 x 1024 tokens."""

    def build(self, small: bool) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        size = {"n_embd": 32, "n_layer": 2, "n_head": 2} if small else {"n_embd": 1024, "n_layer": 24, "n_head": 16}
        return GPT2LMHeadModel(GPT2Config(vocab_size=self.vocabulary, **size))


def llama(vocabulary: int, layers: int, small: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, heads, shared = (32, 64, 4, 2) if small else (2048, 5632, 32, 4)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=2 if small else layers,
            num_attention_heads=heads, num_key_value_heads=shared, max_position_embeddings=4096,
        )
    )  # fmt: skip


class Llama(Language):
    """A Llama of 1.1 billion parameters with gradient checkpointing, 4 x 256 to 4096 tokens."""

    batch, least, most, vocabulary = 4, 256, 4096, 32000

    def build(self, small: bool) -> Any:
        model = llama(self.vocabulary, 22, small)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


class Moe(Language):
    """A Mixtral of 640 million parameters, two of eight experts for each token, 4 x 256 to 2048 tokens."""

    batch, least, most, vocabulary = 4, 256, 2048, 32000

    def build(self, small: bool) -> Any:
        from transformers import MixtralConfig, MixtralForCausalLM

        width, inner, layers, heads, shared = (32, 64, 2, 4, 2) if small else (1024, 2816, 8, 16, 4)
        config = MixtralConfig(
            vocab_size=self.vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=shared, num_local_experts=8, num_experts_per_tok=2,
        )  # fmt: skip
        # One product for each expert that has tokens, so that sizes follow the routing.
        config._experts_implementation = "eager"
        return MixtralForCausalLM(config)


class Lora(Language):
    """Low-rank adapters on a frozen Llama in bfloat16, 4 x 256 to 2048 tokens, activations of the model's width on the host."""

    batch, least, most, vocabulary, lr = 4, 256, 2048, 32000, 1e-3

    def build(self, small: bool) -> Any:
        torch = self.torch
        model = llama(self.vocabulary, 16, small).to(torch.bfloat16).requires_grad_(False)

        class Adapter(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self, base: Any, rank: int = 16) -> None:
                super().__init__()
                self.base = base
                self.down = torch.nn.Linear(base.in_features, rank, bias=False)
                self.up = torch.nn.Linear(rank, base.out_features, bias=False)
                torch.nn.init.zeros_(self.up.weight)

            def forward(self, x: Any) -> Any:
                return self.base(x) + self.up(self.down(x))

        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
        self.width = model.config.hidden_size
        self.least_bytes = 0 if small else 1 << 20
        self.side = torch.cuda.Stream() if self.device == "cuda" else None
        return model

    def loss(self, at: int) -> tuple[Any, int]:
        with self.torch.autograd.graph.saved_tensors_hooks(self.to_host, self.to_device):
            return super().loss(at)

    def to_host(self, tensor: Any) -> Any:
        """Copies on a stream of its own, beside the next layers; parameters (no third dimension) and small or wide tensors stay."""
        torch = self.torch
        wanted = tensor.dim() == 3 and tensor.shape[-1] == self.width
        if not wanted or tensor.nbytes < self.least_bytes:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.side is not None)
        if self.side is None:
            return host.copy_(tensor), None
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.side)
        return host, self.side.record_event()

    def to_device(self, packed: Any) -> Any:
        if isinstance(packed, self.torch.Tensor):
            return packed
        host, copied = packed
        if copied is not None:
            self.torch.cuda.current_stream().wait_event(copied)
        return host.to(self.device, non_blocking=True)


class ConvNext(Run):
    """A ConvNeXt-S (50 million parameters) on 64 images of 160 to 384 pixels, another size each step; each size once first."""

    def build(self, small: bool) -> Any:
        from transformers import ConvNextConfig, ConvNextForImageClassification

        size: dict[str, Any] = {"depths": [3, 3, 27, 3]}
        if small:
            size = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 8, 8]}
        self.batch, self.pixels = (2, (1, 2)) if small else (64, (5, 12))
        # The first step of each size loads and tries kernels for seconds, with any allocator.
        self.first_steps = self.pixels[1] - self.pixels[0] + 1
        self.labels = 10 if small else 1000
        return ConvNextForImageClassification(ConvNextConfig(num_labels=self.labels, **size))

    def size(self, at: int) -> int:
        least, most = self.pixels
        if at >= self.first_steps:
            return 32 * length_of(at, least, most)
        # Each size once in no order, the largest second as elsewhere: in order of size nothing would be scattered.
        others = random.Random(0).sample(range(least, most), most - least)
        return 32 * (most if at == 1 else others[max(at - 1, 0)])

    def loss(self, at: int) -> tuple[Any, int]:
        size, generator = self.size(at), self.generator(at)
        images = self.torch.randn(self.batch, 3, size, size, generator=generator, device=self.device)
        labels = self.torch.randint(self.labels, (self.batch,), generator=generator, device=self.device)
        with self.torch.autocast(self.device, self.torch.bfloat16):
            return self.model(pixel_values=images, labels=labels).loss, self.batch


RUNS: dict[str, Callable[[Any, str, bool], Run]] = {
    "gpt2": Gpt2,
    "llama": Llama,
    "moe": Moe,
    "lora": Lora,
    "convnext": ConvNext,
}
