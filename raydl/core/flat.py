"""Parameters, gradients and running statistics of a model as three contiguous tensors.

All trainable parameters become views of one tensor, their gradients views of a second, the running
statistics (of batch norm) views of a third. No other module of raydl computes an offset.

The rest of a model, its *non-trainable state*, is not moved: frozen parameters and all other
buffers. Exchanges do not average it; ``raydl.core.non_trainable.NonTrainableState`` makes it equal
in all processes at the start.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydl.core.non_trainable import (
    NonTrainable,
    NonTrainableState,
    Place,
    can_be_kept,
    places_of,
    plain,
    tensor_of,
)
from raydl.core.sharing import check_sharing, memory_of, trained_parameters
from raydl.core.state_names import check_trained, names_by_key, plain_items, state_of
from raydl.errors import ShapeError


class FlatModel:
    """A model whose trained state lives in three flat tensors.

    Args:
        model: modified in place: its parameters and running statistics become views.
        name: name of the model, for error messages.
        non_trainable: names of the non-trainable state of the run's first model, so that all
            processes average the same buffers, or None if this is the first model.
        unfrozen: names of parameters that were frozen in the run's first model and are trained
            since then, in the order in which that began. They come last in the flat tensors, so
            that all elements before them keep their places.

    Attributes:
        model: the module itself.
        weights: all trainable parameters, shape [num_parameters].
        gradients: their gradients, shape [num_parameters]; autograd accumulates into it.
        buffers: the running statistics, which exchanges average, shape [num_buffers]; see
            ``_statistics``.
        non_trainable: all other tensors of the model.
        unfrozen: as given.

    Raises:
        ShapeError: if ``model`` is not a module, has nothing to train, has parameters of several
            dtypes or devices, has state that is not a tensor, has tensors that overlap, or names
            buffers to average that it does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str = "",
        non_trainable: Collection[str] | None = None,
        unfrozen: Sequence[str] = (),
    ) -> None:
        self._name = name or type(model).__name__
        self.model = model
        self.unfrozen = tuple(unfrozen)
        _check_module(model, self._name)
        _unfreeze(model, self.unfrozen, self._name)
        trained = trained_parameters(model)
        # Of two names of one tensor the second is none of its own.
        self.unfrozen = tuple(k for k in self.unfrozen if k in trained)
        last = {k: trained.pop(k) for k in self.unfrozen}
        self._parameters = {**trained, **last}
        first = _one_kind(list(self._parameters.values()), self._name)
        self._buffers = {
            k: b
            for k, b in _statistics(model, first.dtype, self._name).items()
            if (k not in non_trainable if non_trainable is not None else is_finite(b))
        }
        self.weights = _gather(list(self._parameters.values()), first)
        self.gradients = torch.zeros_like(self.weights)
        self.buffers = _gather(list(self._buffers.values()), first)
        self.num_reached: list[int] = []
        """For each parameter, the number of backward passes that reached it; empty until
        ``watch_gradients``."""
        self._hooks: list[Any] = []
        self.newly_trained: set[str] = set()
        """Names of frozen parameters that a backward pass has given a gradient, since the model's
        own code has unfrozen them; after ``watch_gradients``."""
        places = places_of(model)
        self._names = names_by_key(state_of(model, self._name), places, self._name)
        """By plain key of the state dict, the name of its tensor in the model."""
        self._holders = self._holders_in(places)
        # Compared by identity: a parameter may be registered elsewhere as a buffer.
        flat = {id(holder.tensor) for holders in self._holders.values() for holder in holders}
        self.non_trainable = NonTrainableState(
            self._name, {k: p for k, p in places.items() if id(p.get()) not in flat}
        )
        weights, buffers = self.named(self.weights, self.buffers)
        gradients, _ = self.named(self.gradients, self.buffers)
        self._views = {**weights, **buffers}
        for key, holders in self._holders.items():
            for holder in holders:
                holder.hold(self._views[key])
                if key in gradients and isinstance(holder.tensor, nn.Parameter):
                    holder.tensor.grad = gradients[key]

    def _holders_in(self, places: Mapping[str, Place]) -> dict[str, list[_Holder]]:
        """Return the tensors of the model that are one with each flattened tensor, by its name.

        A frozen parameter or a buffer over the memory of a trainable parameter follows it.
        """
        flat = {**self._parameters, **self._buffers}
        names = {memory_of(tensor): key for key, tensor in flat.items()}
        holders: dict[str, list[_Holder]] = {key: [] for key in flat}
        for name, place in places.items():
            tensor = place.get()
            if tensor is not None and (key := names.get(memory_of(tensor))) is not None:
                holders[key].append(_Holder(name, tensor, place))
        return holders

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return self.weights.numel()

    @property
    def layer_sizes(self) -> list[int]:
        """Number of elements of each parameter tensor, in the order of the flat weights."""
        return [p.numel() for p in self._parameters.values()]

    @property
    def num_buffers(self) -> int:
        """Number of elements of all averaged buffers."""
        return self.buffers.numel()

    @staticmethod
    def check(model: nn.Module) -> None:
        """Raise a ShapeError if a model cannot be flattened; the model is not modified."""
        _check_module(model, type(model).__name__)
        check_trained(model)
        name = type(model).__name__
        first = _one_kind(list(trained_parameters(model).values()), name)
        _statistics(model, first.dtype, name)

    def release_gradients(self) -> None:
        """Leave the gradients to autograd, for a training loop that zeroes them itself."""
        for handle in self._hooks:
            handle.remove()
        self._hooks, self.num_reached = [], []
        self.gradients = self.weights.new_empty(0)
        for parameters in self.sharing.values():
            for parameter in parameters:
                parameter.grad = None

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable parameters, in the order of the flat weights."""
        return list(self._parameters.values())

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Return (name, parameter) of the trained parameters, in the order of the flat weights."""
        return list(self._parameters.items())

    def first_parameters(self, num_elements: int) -> list[Tensor]:
        """Return the parameters of a saved state, which may lack the last of ``unfrozen``.

        Args:
            num_elements: number of elements of the flat weights in that state.

        Raises:
            ShapeError: if it is the state of another model.
        """
        count, left = len(self._parameters), self.num_parameters - num_elements
        while left > 0 and count > len(self._parameters) - len(self.unfrozen):
            count -= 1
            left -= self.layer_sizes[count]
        if left:
            raise ShapeError(
                self._name,
                f"has {self.num_parameters:,} trained elements, but a saved state has "
                f"{num_elements:,}; build the same model to resume",
            )
        return self.parameters[:count]

    def with_unfrozen(self, names: Sequence[str]) -> FlatModel:
        """Return the same model flattened with further parameters, which are trained from now on.

        Args:
            names: those of ``unfrozen``, and after them new ones.
        """
        if tuple(names) == self.unfrozen:
            return self
        others = [name for name in self.non_trainable.names if name not in names]
        return FlatModel(self.model, name=self._name, non_trainable=others, unfrozen=names)

    @property
    def sharing(self) -> dict[str, list[Tensor]]:
        """By name of each flat parameter, all parameters that are one with it, itself included.

        Some may be frozen.
        """
        tensors = {key: [h.tensor for h in self._holders[key]] for key in self._parameters}
        return {key: [t for t in ts if isinstance(t, nn.Parameter)] for key, ts in tensors.items()}

    def watch_gradients(self) -> None:
        """Count from now on which parameters each backward pass reaches.

        Frozen parameters are watched, too: their hooks cost nothing while they get no gradient.
        """
        for name, tensor in self.non_trainable.tensors().items():
            if isinstance(tensor, nn.Parameter) and (
                tensor.is_floating_point() or tensor.is_complex()
            ):
                self._hooks.append(_on_gradient(tensor, self._noter(name)))
        self.num_reached = [0] * len(self._parameters)
        for number, (key, parameters) in enumerate(self.sharing.items()):
            bound = self._parameters[key].grad
            assert bound is not None
            trained = [p for p in parameters if p.requires_grad]
            for parameter in parameters:
                others = [p for p in trained if p is not parameter]
                call = self._counter(number, bound, others)
                self._hooks.append(_on_gradient(parameter, call))

    def _noter(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self.newly_trained.add(name)

    def _counter(
        self, number: int, bound: Tensor, others: Sequence[Tensor]
    ) -> Callable[[Tensor], None]:
        def count(parameter: Tensor) -> None:
            self.num_reached[number] += 1
            if parameter.grad is not bound:  # the model's own code had set it to None
                assert parameter.grad is not None
                # What others over the same memory have accumulated stays.
                is_begun = any(other.grad is bound for other in others)
                (bound.add_ if is_begun else bound.copy_)(parameter.grad)
                parameter.grad = bound

        return count

    def is_reached(self, since: Sequence[int]) -> bytearray:
        """Return, for each parameter, 1 if a backward pass has reached it.

        Args:
            since: earlier value of ``num_reached`` to compare with.
        """
        return bytearray(now > before for now, before in zip(self.num_reached, since, strict=True))

    def note_reached(self, is_reached: bytearray) -> None:
        """Count, for each parameter, that the backward pass of another worker reached it."""
        self.num_reached = [
            count + reached for count, reached in zip(self.num_reached, is_reached, strict=True)
        ]

    def unreached(self, since: Sequence[int], span: slice | None = None) -> list[str]:
        """Return the names of the parameters that no backward pass has reached.

        Without ``watch_gradients`` there are none.

        Args:
            since: earlier value of ``num_reached`` to compare with.
            span: only parameters with elements in this span of the flat parameters; None: all.
        """
        if not self.num_reached:
            return []
        if all(now > before for now, before in zip(self.num_reached, since, strict=True)):
            return []
        span = span or slice(0, self.num_parameters)
        sizes = self.layer_sizes
        stops = itertools.accumulate(sizes)
        return [
            name
            for name, now, before, size, stop in zip(
                self._parameters, self.num_reached, since, sizes, stops, strict=True
            )
            if now == before and stop - size < span.stop and span.start < stop
        ]

    @contextlib.contextmanager
    def without_gradients_of(self, names: Collection[str]) -> Iterator[None]:
        """Set the gradients of some parameters to None within this context.

        Optimizers of torch skip such parameters.
        """
        kept = [(p, p.grad) for name in names for p in self.sharing[name]]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def rebind(self) -> None:
        """Copy parameters and buffers that the model replaced into the flat tensors.

        ``self.mean = 0.9 * self.mean + x`` and ``p.data = p.data.clamp(-1, 1)`` replace a view of
        the flat tensor by a new tensor, which exchanges would not see.

        Raises:
            ShapeError: if a new tensor has another shape, dtype or device.
        """
        replaced = {
            key: holder
            for key, holders in self._holders.items()
            for holder in holders
            if holder.is_replaced()
        }
        for key, holder in replaced.items():
            self._take_over(key, holder)

    def _take_over(self, key: str, replaced: _Holder) -> None:
        """Copy the new values of a tensor into its view, and lay the tensor over it again."""
        view, holders = self._views[key], self._holders[key]
        values = {holder.name: self._checked(view, holder.now) for holder in holders}
        new = values[replaced.name]
        for name, value in values.items():
            if value is not new and not torch.equal(value, new):
                raise ShapeError(
                    self._name,
                    f"replaced {replaced.name} apart from {name}, which had the same memory; "
                    f"change the values in place, or give each its own memory (clone())",
                )
        if key in self._parameters and _is_within(new, self.weights):
            raise ShapeError(
                self._name,
                f"gave {replaced.name} the memory of another parameter during training; tie them "
                f"where the model is built",
            )
        view.copy_(new.detach())
        for holder in holders:
            holder.hold(view)

    def _checked(self, view: Tensor, value: Tensor | None) -> Tensor:
        found = "nothing" if value is None else _kind(value)
        if value is None or found != _kind(view):
            raise ShapeError(
                self._name,
                f"replaced a parameter or buffer of {_kind(view)} by {found}; its shape, dtype and "
                f"device must not change during training",
            )
        return value

    def named(
        self, weights: Tensor, buffers: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return views of flat tensors by the names in the model: (parameters, buffers)."""
        return _views(weights, self._parameters), _views(buffers, self._buffers)

    def state_dict_of(
        self,
        weights: Tensor,
        buffers: Tensor,
        non_trainable: NonTrainable | None = None,
        *,
        copies: bool = True,
    ) -> dict[str, Tensor]:
        """Return the model's whole state dict with other values, under its plain keys.

        Every tensor is a copy on the CPU, or without ``copies`` a view, valid until the next step.
        Names that share one tensor in the model (tied weights) get the same values.

        Args:
            weights: shape [num_parameters].
            buffers: shape [num_buffers].
            non_trainable: arrays from ``NonTrainableState.changed``; the model's own values are
                used for all other names.
            copies: whether to copy.
        """
        self.rebind()
        own = self.non_trainable.tensors()
        parameter_views, buffer_views = self.named(weights, buffers)
        others = {key: tensor_of(a, own[key].dtype) for key, a in (non_trainable or {}).items()}
        views = {**parameter_views, **buffer_views}
        held = {holder.name: views[k] for k, hs in self._holders.items() for holder in hs}
        values = {**own, **held, **others}
        state = dict(plain_items(self.model.state_dict(keep_vars=True).items()))
        replaced = {k: values.get(self._names.get(k, ""), t).detach() for k, t in state.items()}
        return {key: t.cpu().clone() for key, t in replaced.items()} if copies else replaced

    def load_non_trainable(self, state: Mapping[str, Tensor], unsaved: NonTrainable) -> None:
        """Load the non-trainable state of a checkpoint.

        Args:
            state: state dict of the model.
            unsaved: non-trainable tensors that are not in the state dict, by name.

        Raises:
            ShapeError: if a name is missing or a shape differs.
        """
        own, values = self.non_trainable, self._by_name(state)
        saved = {k: t for k, t in own.tensors().items() if own.is_saved(k)}
        for key, tensor in saved.items():  # a buffer may have changed its shape since
            _require_like(values, key, tensor if isinstance(tensor, nn.Parameter) else None)
        own.load({**unsaved, **{key: values[key] for key in saved}})

    def flatten(self, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (weights, buffers) as flat CPU tensors from a state dict of this model.

        Raises:
            ShapeError: if a name is missing or a shape differs.
        """
        values = self._by_name(state)
        self._check_tied(values)
        return _pick(values, self._parameters), _pick(values, self._buffers)

    def _by_name(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a saved state by the names in the model."""
        saved = {plain(key): tensor for key, tensor in state.items()}
        return {name: saved[key] for key, name in self._names.items() if key in saved}

    def split_buffers(
        self, values: Tensor, others: Collection[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the running statistics, and the other buffers by name, of a replica's saved state.

        Earlier versions averaged all float buffers, so that their states have buffers among the
        flat ones that are non-trainable state now.

        Args:
            values: the flat buffers of the state.
            others: names in the non-trainable state that was saved with it.

        Raises:
            ShapeError: if it is the state of another model.
        """
        if values.numel() == self.num_buffers:
            return values, {}
        dtype = self.weights.dtype
        saved = {k: b for k, b in _float_buffers(self.model, dtype) if k not in others}
        size = sum(b.numel() for b in saved.values())
        if size != values.numel():
            problem = f"has float buffers of {size} elements, but the state has {values.numel()}"
            raise ShapeError(self._name, problem)
        by_name = _views(values, saved)
        own = set(self.non_trainable.names)
        return _pick(by_name, self._buffers), {k: b for k, b in by_name.items() if k in own}

    def _check_tied(self, state: Mapping[str, Tensor]) -> None:
        """Raise a ShapeError if a saved state has several values for one tensor of the model.

        Earlier versions trained tensors apart that are two objects over the same memory.
        """
        for key, holders in self._holders.items():
            for name in (h.name for h in holders if h.name in state and key in state):
                if not torch.equal(state[name], state[key]):
                    raise ShapeError(
                        self._name,
                        f"has {name} and {key} over the same memory, but they were saved with "
                        f"different values; give each its own memory (clone()) to resume",
                    )


class _Holder:
    """A parameter or buffer of the model over a view of a flat tensor.

    Args:
        name: its name in the model.
        tensor: the parameter or buffer.
        place: its slot. A model may assign another tensor to that of a buffer.
    """

    def __init__(self, name: str, tensor: Tensor, place: Place) -> None:
        self.name = name
        self.tensor = tensor
        self._place = None if isinstance(tensor, nn.Parameter) else place
        self._address = 0

    @property
    def now(self) -> Tensor | None:
        """The present tensor."""
        return self.tensor if self._place is None else self._place.get()

    def is_replaced(self) -> bool:
        """Return whether the model has another tensor or other memory now."""
        if self._place is not None and self._place.get() is not self.tensor:
            return True
        return self.tensor.data_ptr() != self._address

    def hold(self, view: Tensor) -> None:
        """Lay the tensor over a view."""
        self.tensor.data = view
        self._address = view.data_ptr()
        if self._place is not None:
            self._place.set(self.tensor)


def _is_within(tensor: Tensor, flat: Tensor) -> bool:
    """Whether a tensor begins in the memory of a flat one."""
    return 0 <= tensor.data_ptr() - flat.data_ptr() < flat.nbytes


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite, and small enough for their sums to be finite.

    Computes the squared L2 norm, which takes one fast pass. In float32 it overflows from values of
    1.8e19 on.
    """
    flat = values.reshape(-1)
    return math.isfinite(float(torch.dot(flat, flat)))


def _unfreeze(model: nn.Module, names: Sequence[str], model_name: str) -> None:
    """Let parameters require a gradient."""
    parameters = dict(plain_items(model.named_parameters()))
    for name in names:
        if name not in parameters:
            problem = f"lacks {name}, which the run trains; build the same model in all processes"
            raise ShapeError(model_name, problem)
        parameters[name].requires_grad_(True)


def _on_gradient(parameter: Tensor, call: Callable[[Tensor], None]) -> Any:
    """Have a function called with a parameter after each backward pass that reaches it."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch registers the hook of no other parameter
    register: Any = parameter.register_post_accumulate_grad_hook
    handle = register(call)
    parameter.requires_grad_(is_trained)
    return handle


def _statistics(model: nn.Module, dtype: torch.dtype, name: str) -> dict[str, Tensor]:
    """Return the buffers of a model that exchanges average, by name.

    These are the running statistics of each module that has a ``running_mean`` and a
    ``running_var``, as torch's norms do (all its buffers whose names begin with ``running_``), and
    the buffers that a module names in its attribute ``averaged_buffers``. They are in the state
    dict and have the dtype of the weights. Other buffers (masks, queues, constants, the vectors of
    spectral norm) lose their meaning in a mean.

    Raises:
        ShapeError: if ``averaged_buffers`` names anything else.
    """
    candidates = {id(buffer): (key, buffer) for key, buffer in _float_buffers(model, dtype)}
    statistics: set[int] = set()
    for prefix, module in model.named_modules():
        own = {key: b for key, b in module._buffers.items() if b is not None}
        if {"running_mean", "running_var"} <= own.keys():
            statistics.update(id(b) for key, b in own.items() if key.startswith("running_"))
        for key in _named_to_average(module, name):
            buffer = _buffer_of(module, key)
            if buffer is None or id(buffer) not in candidates or not is_finite(buffer):
                raise ShapeError(
                    name,
                    f"names {key} in averaged_buffers of {prefix or 'the model'}, which must be a "
                    f"buffer of {dtype} in its state dict, with finite values below 1e19",
                )
            statistics.add(id(buffer))
    trained = {memory_of(parameter) for parameter in trained_parameters(model).values()}
    averaged = [candidates[number] for number in candidates if number in statistics]
    first: dict[Any, tuple[str, Tensor]] = {}
    for key, buffer in averaged:
        if memory_of(buffer) not in trained:
            first.setdefault(memory_of(buffer), (key, buffer))
    return dict(first.values())


def _named_to_average(module: nn.Module, model: str) -> list[str]:
    """Return the names in the attribute ``averaged_buffers`` of a module, if it has one."""
    names: Any = getattr(module, "averaged_buffers", ())
    is_list = isinstance(names, (list, tuple, set, frozenset))
    if not is_list or not all(isinstance(name, str) for name in names):
        problem = f"has averaged_buffers {names!r}, which must be a list of names of buffers"
        raise ShapeError(model, problem)
    return list(names)


def _buffer_of(module: nn.Module, name: str) -> Tensor | None:
    try:
        return module.get_buffer(name)
    except AttributeError:
        return None


def _float_buffers(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the float buffers of a dtype that are in the state dict."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    saved -= {id(parameter) for parameter in model.parameters()}  # registered as both
    for key, buffer in plain_items(model.named_buffers()):
        is_float = buffer.is_floating_point() and buffer.dtype == dtype
        if is_float and id(buffer) in saved and can_be_kept(buffer):
            yield key, buffer


def _check_module(model: object, name: str) -> None:
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ShapeError(
            name, f"must be a torch.nn.Module, but its builder returned an object of type {kind}"
        )
    _check_whole(model, name)
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ShapeError(
            name,
            "has lazy layers, whose parameters have no shape yet; use layers of a known size, or "
            "run a batch through the model before you return it",
        )
    for module in model.modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ShapeError(
                name,
                f"has {type(module).__name__} with extra state (get_extra_state), which "
                f"checkpoints cannot hold; keep it in buffers",
            )
    for key, tensor in state_of(model, name).items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ShapeError(name, f"has a {kind} in its state dict, {key}; keep it in a buffer")
        if not can_be_kept(tensor):
            raise ShapeError(
                name,
                f"has {key}, {tensor.layout} of {tensor.dtype}, which checkpoints cannot hold; "
                f"register it with persistent=False, or convert it to a dense real tensor",
            )
    check_sharing(model, name)


def _check_whole(model: nn.Module, name: str) -> None:
    """Raise a ShapeError if this process does not hold each tensor of a model as plain memory.

    By the names of classes: most processes have never imported torch.distributed.tensor.
    """
    for key, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if not hasattr(type(tensor), "__tensor_flatten__"):
            continue
        kind = type(tensor).__name__
        if kind == "DTensor":
            raise ShapeError(
                name,
                f"has {key}, a DTensor, of which each process may hold a part, but raydl needs "
                f"whole tensors in every worker; give it the model before fully_shard, "
                f"parallelize_module or distribute_tensor",
            )
        raise ShapeError(
            name,
            f"has {key}, a {kind}, which wraps other tensors, but raydl needs plain tensors; give "
            f"it the model before the conversion to {kind}",
        )
    for key, module in model.named_modules():  # between its passes it may hold whole tensors
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            raise ShapeError(
                name,
                f"has {key or 'a model'} prepared by fully_shard, which splits tensors between "
                f"processes, but raydl needs whole tensors in every worker; give it the model "
                f"before fully_shard",
            )


def _one_kind(parameters: Sequence[Tensor], name: str) -> Tensor:
    if not parameters:
        raise ShapeError(name, "has no parameter that requires a gradient")
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ShapeError(name, f"must have parameters of one dtype and device, found {found}")
    return parameters[0]


def _kind(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)}, {tensor.dtype} on {tensor.device}"


def _gather(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    parts = [t.detach().reshape(-1) for t in tensors]
    if not parts:
        return torch.empty(0, dtype=like.dtype, device=like.device)
    return torch.cat(parts)


def _views(flat: Tensor, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sizes = [t.numel() for t in shapes.values()]
    pieces = torch.split(flat, sizes) if sizes else ()
    return {k: piece.view(t.shape) for (k, t), piece in zip(shapes.items(), pieces, strict=True)}


def _pick(state: Mapping[str, Tensor], shapes: Mapping[str, Tensor]) -> Tensor:
    for key, tensor in shapes.items():
        _require_like(state, key, tensor)
    parts = [state[key].reshape(-1) for key in shapes]
    return torch.cat(parts) if parts else torch.empty(0)


def _require_like(state: Mapping[str, Tensor], key: str, tensor: Tensor | None) -> None:
    """Raise a ShapeError unless a saved state has a tensor, of the shape of ``tensor`` if given."""
    if key not in state:
        raise ShapeError(key, "is missing from the saved state")
    if tensor is not None and state[key].shape != tensor.shape:
        raise ShapeError(key, f"has shape {list(tensor.shape)}, saved as {list(state[key].shape)}")
