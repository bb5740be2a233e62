"""GPT-2: a transformer that tells the next token from those before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from raydl.errors import ShapeError

_STD = 0.02


class GPT(nn.Module):
    """GPT-2's decoder: normalised before each block, learned positions, tied weights, GELU.

    The matrix that embeds the tokens is the one that tells the next: ``wte`` and ``lm_head``
    are one parameter under two names, and it counts once. There is no dropout. Names are those
    of GPT-2; the weights of linear layers are [out, in], as everywhere in PyTorch.
    (Radford et al. 2019, Language Models are Unsupervised Multitask Learners, section 2.3.)

    Args:
        input_shape: (context,), the most tokens that are read at once.
        vocabulary: different tokens, and logits for each position.
        num_layers: blocks of attention and two linear layers.
        num_heads: of the attention; divides ``width``.
        width: numbers that stand for a token between the blocks.

    Raises:
        ShapeError: the data are no texts, or the heads do not divide the width.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        vocabulary: int,
        *,
        num_layers: int,
        num_heads: int,
        width: int,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ShapeError("gpt", f"reads texts of shape [tokens], got {list(input_shape)}")
        if width % num_heads:
            raise ShapeError("gpt", f"width {width} is no multiple of num_heads {num_heads}")
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(input_shape[0], width)
        self.h = nn.ModuleList(_Block(width, num_heads) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        _first_weights_(self, num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next token, shape [B, T, vocabulary], for tokens [B, T].

        T is at most the context; the logits at t depend on the tokens 0..t alone.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class _Block(nn.Module):
    """Attention, then two linear layers; each adds to what it was given."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = _Attention(width, num_heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = _MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class _Attention(nn.Module):
    """Each token looks at itself and those before it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        # [B, heads, T, width / heads] each
        query, key, value = (
            part.view(split).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.c_proj(seen.transpose(1, 2).reshape(batch, length, width))
        return y


class _MLP(nn.Module):
    """Two linear layers with GELU (its form by tanh) between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))
        return y


def _first_weights_(model: GPT, num_layers: int) -> None:
    """Draw all weights from normals of deviation 0.02, biases 0, by torch's generator.

    What adds to the stream between the blocks is drawn smaller, by the root of how many do.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            adds = name.endswith("c_proj")
            nn.init.normal_(module.weight, 0.0, _STD * (2 * num_layers) ** -0.5 if adds else _STD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 0.0, _STD)
