"""Muon for the hidden matrices of a model, AdamW for all its other parameters.

    symbol  name here      meaning
    W, G    weight, grad   a hidden matrix, shape [A, B], and its gradient
    M       momentum       its momentum, shape [A, B]
    eta     lr             learning rate of both parts
    mu, w   momentum, weight_decay

    M <- mu*M + (1 - mu)*G ; U = mu*M + (1 - mu)*G (Nesterov) or M ; O = U with singular values
    near 1, by Newton-Schulz ; W <- (1 - eta*w)*W - eta*0.2*sqrt(max(A, B)) * O

Sources: Jordan and others 2024 (kellerjordan.github.io/posts/muon); the factor 0.2*sqrt(max(A, B)),
by which O has the size of a step of AdamW, so that one rate suits both parts: Liu and others,
arXiv 2502.16982. The steps are those of torch's own Muon and AdamW.

Which matrices are hidden follows from their role in the model, not from their shape:

- The weights of layers are hidden: parameters with ``weight`` in their own name, as in ``Linear``,
  attention, recurrent layers and convolutions. A filter counts as the matrix [out, in * height *
  width], as in Jordan's. Filters in groups are several small matrices, and AdamW has them.
- AdamW has tables of embeddings, the output layer (the last weight of a layer, in the order in
  which the model registers them), whatever is tied to one of these, biases, gains, and parameters
  of any other name, such as a table of positions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from raydl.core.sharing import memory_of
from raydl.core.torch_import import without_compiler


def hidden_matrices(model: nn.Module) -> frozenset[Hashable]:
    """Return the memory of each hidden matrix of a model; see ``raydl.core.sharing.memory_of``."""
    weights = [
        (module, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if "weight" in name and _is_matrix(parameter)
    ]
    layers = [(module, p) for module, p in weights if not isinstance(module, _TABLES)]
    others = [p for module, p in weights if isinstance(module, _TABLES)]
    others += [p for module, p in layers if getattr(module, "groups", 1) != 1]
    others += [p for _, p in layers[-1:]]
    return frozenset(memory_of(p) for _, p in layers) - {memory_of(p) for p in others}


_TABLES = (nn.Embedding, nn.EmbeddingBag)


def _is_matrix(tensor: Tensor) -> bool:
    """Whether it has several rows and columns, with its first dimension as rows."""
    return tensor.ndim > 1 and 1 < len(tensor) < tensor.numel()


def _as_matrix(tensor: Tensor) -> Tensor:
    """Return a view of a tensor with its first dimension and all others as one."""
    return tensor.detach().view(len(tensor), -1)


class Muon(Optimizer):
    """Muon for hidden matrices, AdamW for other parameters; see the top of this module.

    Args:
        params: tensors or parameter groups, of Muon, or of AdamW if a group has ``by_adamw``.
        lr: learning rate of both parts.
        weight_decay: of both parts.
        momentum: mu of Muon.
        nesterov: whether it is Nesterov's.
        ns_coefficients: of Newton-Schulz.
        eps: of Newton-Schulz.
        ns_steps: of Newton-Schulz.
        adjust_lr_fn: factor of O, as torch's Muon defines it: ``match_rms_adamw``, or ``original``,
            sqrt(max(1, A/B)), with which Muon needs a larger rate than AdamW: set the rates of the
            two by parameter groups.
        betas: of AdamW.
        adamw_eps: eps of AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        of_both: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        of_muon: dict[str, Any] = {
            "momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients,
            "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        of_adamw = {"betas": betas, "adamw_eps": adamw_eps}
        super().__init__(params, {**of_both, **of_muon, **of_adamw, "by_adamw": False})
        # They check their arguments, and get their tensors in each step.
        none = [torch.zeros(1, 1)]
        self._muon: Optimizer = without_compiler(torch.optim.Muon)(none, **of_both, **of_muon)
        self._adamw: Optimizer = without_compiler(AdamW)(
            none, **of_both, betas=betas, eps=adamw_eps
        )

    def step(self, closure: Any = None) -> Any:
        """Step both parts; parameters without a gradient are skipped, as in torch."""
        loss = None if closure is None else closure()
        self._step_adamw([group for group in self.param_groups if group["by_adamw"]])
        self._step_muon([group for group in self.param_groups if not group["by_adamw"]])
        return loss

    def _step_adamw(self, groups: list[dict[str, Any]]) -> None:
        usual = self._adamw.defaults
        self._adamw.param_groups = [{**usual, **g, "eps": g["adamw_eps"]} for g in groups]
        self._adamw.state = self.state
        self._adamw.step()

    def _step_muon(self, groups: list[dict[str, Any]]) -> None:
        """Step torch's Muon, which takes matrices only, over views of filters."""
        self._muon.param_groups, self._muon.state = [], defaultdict(dict)
        for group in groups:
            matrices = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                matrix = _as_matrix(parameter)
                matrix.grad = _as_matrix(parameter.grad)
                self._muon.state[matrix] = self.state[parameter]
                matrices.append(matrix)
            self._muon.param_groups.append({**group, "params": matrices})
        self._muon.step()
