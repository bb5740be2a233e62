"""GPT-2: a transformer that predicts the next token of a text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from raydl.errors import ShapeError

_STD = 0.02


class GPT(nn.Module):
    """The decoder of GPT-2: pre-norm blocks, learned positions, tied weights, GELU.

    ``wte`` and ``lm_head`` are one parameter under two names, which counts once. There is no
    dropout. Names are those of GPT-2; the weights of linear layers are [out, in], as in PyTorch.
    (Radford et al. 2019, Language Models are Unsupervised Multitask Learners, section 2.3.)

    Args:
        input_shape: (context,), most tokens of one input.
        vocabulary: number of different tokens, and of logits per position.
        num_layers: number of blocks.
        num_heads: attention heads; must divide ``width``.
        width: size of the hidden state of a token.

    Raises:
        ShapeError: if the data are no texts, or the heads do not divide the width.
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
            raise ShapeError("gpt", f"takes texts of shape [tokens], got {list(input_shape)}")
        if width % num_heads:
            raise ShapeError("gpt", f"width {width} is not a multiple of num_heads {num_heads}")
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(input_shape[0], width)
        self.h = nn.ModuleList(_Block(width, num_heads) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        _initialize_(self, num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next token, shape [B, T, vocabulary], for tokens [B, T].

        T is at most the context; the logits at t depend only on the tokens 0..t.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class _Block(nn.Module):
    """Attention, then two linear layers, each with a residual connection."""

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
    """Causal self-attention."""

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
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class _MLP(nn.Module):
    """Two linear layers with GELU (tanh approximation) between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))
        return y


def _initialize_(model: GPT, num_layers: int) -> None:
    """Initialize weights normal with standard deviation 0.02, biases 0, by torch's generator.

    Layers that add to the residual stream are scaled by 1 / sqrt(number of such layers).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = _STD * (2 * num_layers) ** -0.5 if name.endswith("c_proj") else _STD
            nn.init.normal_(module.weight, 0.0, std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 0.0, _STD)
