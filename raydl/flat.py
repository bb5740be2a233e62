"""Parameters, gradients and float buffers of a model as contiguous tensors.

All trainable parameters become views into one tensor, their gradients views into another, the
float buffers (batch-norm statistics) views into a third. Nothing else in raydl knows an offset.

What a model has beside these, its *untrained state*, stays where it is: frozen parameters,
integer buffers, buffers of another dtype than the weights, and masks. No exchange averages it;
:class:`UntrainedState` makes it equal in all processes at the start, and keeps it in checkpoints.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raydl.errors import ShapeError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, the integers that its bits can be read as."""
Untrained = Mapping[str, np.ndarray]
"""Values of the untrained state, or of a part of it, by the model's own names."""
_NONE: Untrained = {}


class FlatModel:
    """A model whose trained state lives in three flat tensors.

    Args:
        model: changed in place: its parameters and float buffers become views.
        name: for messages.
        untrained: names of the untrained state, as the first model of the run has it; None: this
            model decides. Which buffers are averaged must be the same in all processes.

    Attributes:
        model: the module itself.
        weights: all trainable parameters, shape [num_parameters].
        gradients: their gradients, shape [num_parameters]; autograd adds into it.
        buffers: the float buffers that exchanges average, shape [num_buffers]: those of the state
            dict, of the dtype of the weights, with finite values.
        untrained: everything else that the model has.

    Raises:
        ShapeError: no module, nothing to train, parameters of several dtypes or devices, or state
            that is no tensor.
    """

    def __init__(
        self, model: nn.Module, *, name: str = "", untrained: Collection[str] | None = None
    ) -> None:
        self._name = name or type(model).__name__
        self.model = model
        _check_module(model, self._name)
        self._parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
        first = _one_kind(list(self._parameters.values()), self._name)
        self._buffers = {
            k: b
            for k, b in _averaged_buffers(model, first.dtype)
            if (k not in untrained if untrained is not None else bool(torch.isfinite(b).all()))
        }
        self.weights = _gather(list(self._parameters.values()), first)
        self.gradients = torch.zeros_like(self.weights)
        self.buffers = _gather(list(self._buffers.values()), first)
        self.num_reached: list[int] = []
        """By parameter, how often a backward pass has reached it; empty where nobody watches."""
        self._hooks: list[Any] = []
        self._bind()
        flat = {*self._parameters, *self._buffers}
        self.untrained = UntrainedState(
            self._name, {k: place for k, place in _places(model).items() if k not in flat}
        )

    @property
    def num_parameters(self) -> int:
        """Trainable parameters."""
        return self.weights.numel()

    @property
    def layer_sizes(self) -> list[int]:
        """Elements of each parameter tensor, in the order of the flat weights."""
        return [p.numel() for p in self._parameters.values()]

    @property
    def num_buffers(self) -> int:
        """Elements of all averaged buffers."""
        return self.buffers.numel()

    def _bind(self) -> None:
        weights, buffers = self.named(self.weights, self.buffers)
        gradients, _ = self.named(self.gradients, self.buffers)
        self._views = [(p, weights[k]) for k, p in self._parameters.items()]
        for key, parameter in self._parameters.items():
            parameter.data = weights[key]
            parameter.grad = gradients[key]
        places = _places(self.model)
        self._buffer_views = [(places[k], b, buffers[k]) for k, b in self._buffers.items()]
        for key, buffer in self._buffers.items():
            buffer.data = buffers[key]

    @staticmethod
    def check(model: nn.Module) -> None:
        """Raise a ShapeError if a model can not be made flat; it stays as it is."""
        _check_module(model, type(model).__name__)
        parameters = [p for p in model.parameters() if p.requires_grad]
        _one_kind(parameters, type(model).__name__)

    def release_gradients(self) -> None:
        """Leave the gradients to autograd, for a loop that zeroes them itself."""
        for handle in self._hooks:
            handle.remove()
        self._hooks, self.num_reached = [], []
        self.gradients = self.weights.new_empty(0)
        for parameter in self._parameters.values():
            parameter.grad = None

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters, in the order of the flat weights."""
        return list(self._parameters.values())

    def watch_gradients(self) -> None:
        """Note from now on which parameters a backward pass reaches."""
        self.num_reached = [0] * len(self._parameters)
        for number, parameter in enumerate(self._parameters.values()):
            bound = parameter.grad
            assert bound is not None
            watch: Any = parameter.register_post_accumulate_grad_hook
            self._hooks.append(watch(self._noting(number, bound)))

    def _noting(self, number: int, bound: Tensor) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self.num_reached[number] += 1
            if parameter.grad is not bound:  # the model's own code set it to None
                assert parameter.grad is not None
                bound.copy_(parameter.grad)
                parameter.grad = bound

        return note

    def is_reached(self, since: Sequence[int]) -> bytearray:
        """Return, by parameter, 1 if a backward pass has reached it since :attr:`num_reached`."""
        return bytearray(now > before for now, before in zip(self.num_reached, since, strict=True))

    def note_reached(self, is_reached: bytearray) -> None:
        """Note, by parameter, what the backward passes of others have reached."""
        self.num_reached = [
            count + reached for count, reached in zip(self.num_reached, is_reached, strict=True)
        ]

    def unreached(self, since: Sequence[int], span: slice | None = None) -> list[str]:
        """Return the names of the parameters that no backward pass has reached of late.

        Args:
            since: :attr:`num_reached` as it was then.
            span: those of which a part is in it alone, of the flat parameters; None: all.

        Where nobody watches there are none.
        """
        if not self.num_reached:
            return []
        span = span or slice(0, self.num_parameters)
        if all(now > before for now, before in zip(self.num_reached, since, strict=True)):
            return []
        return [
            name
            for name, now, before, (start, stop) in zip(
                self._parameters, self.num_reached, since, self._ends(), strict=True
            )
            if now == before and start < span.stop and span.start < stop
        ]

    def _ends(self) -> Iterator[tuple[int, int]]:
        """Return where each parameter begins and ends in the flat weights."""
        stops = list(itertools.accumulate(self.layer_sizes))
        return zip([0, *stops[:-1]], stops, strict=True)

    @contextlib.contextmanager
    def without_gradients_of(self, names: Collection[str]) -> Iterator[None]:
        """Let some parameters have no gradient for a while: torch's optimizers pass them over."""
        kept = [(self._parameters[name], self._parameters[name].grad) for name in names]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def rebind(self) -> None:
        """Take over the values of parameters and buffers that the model replaced.

        ``self.mean = 0.9 * self.mean + x`` and ``p.data = p.data.clamp(-1, 1)`` make tensors of
        their own where the flat tensor had a view; without this no exchange would see them.

        Raises:
            ShapeError: a new one has another shape, dtype or device.
        """
        for parameter, view in self._views:
            if parameter.data_ptr() != view.data_ptr():
                self._take_over(view, parameter)
                parameter.data = view
        for place, buffer, view in self._buffer_views:
            now = place.get()
            if now is not buffer or buffer.data_ptr() != view.data_ptr():
                self._take_over(view, now)
                buffer.data = view
                place.set(buffer)

    def _take_over(self, view: Tensor, value: Tensor | None) -> None:
        is_alike = value is not None and (value.shape, value.dtype, value.device) == (
            view.shape,
            view.dtype,
            view.device,
        )
        if value is None or not is_alike:
            found = "nothing" if value is None else _kind(value)
            raise ShapeError(
                self._name,
                f"replaced a parameter or buffer of {_kind(view)} by {found}; while it trains, "
                f"each keeps its shape, dtype and device",
            )
        view.copy_(value.detach())

    def named(
        self, weights: Tensor, buffers: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return views of flat tensors under the model's own names: (parameters, buffers)."""
        return _views(weights, self._parameters), _views(buffers, self._buffers)

    def state_dict_of(
        self, weights: Tensor, buffers: Tensor, untrained: Untrained | None = None
    ) -> dict[str, Tensor]:
        """Return the model's whole state dict with other values in it.

        Every tensor is a copy on the CPU. Names that share one tensor in the model (tied
        weights) each get the same values.

        Args:
            weights: shape [num_parameters].
            buffers: shape [num_buffers].
            untrained: arrays of the untrained state, as :meth:`UntrainedState.changed` returns
                them; what is not among them is as the model has it.
        """
        self.rebind()
        parameter_views, buffer_views = self.named(weights, buffers)
        others, here = {}, self.untrained.tensors()
        for key, array in (untrained or {}).items():
            others[key] = _tensor_of(array, here[key].dtype)
        by_identity = {
            id(tensor): values[key]
            for tensors, values in (
                (self._parameters, parameter_views),
                (self._buffers, buffer_views),
                (here, others),
            )
            for key, tensor in tensors.items()
            if key in values
        }
        state = self.model.state_dict(keep_vars=True)
        return {
            key: by_identity.get(id(tensor), tensor).detach().cpu().clone()
            for key, tensor in state.items()
        }

    def load_untrained(self, state: Mapping[str, Tensor], unsaved: Untrained) -> None:
        """Take over the untrained state of a checkpoint, and mark it.

        Args:
            state: the model's state dict.
            unsaved: by name, what the state dict does not have.

        Raises:
            ShapeError: a name is missing or a shape differs.
        """
        saved = {k: t for k, t in self.untrained.tensors().items() if self.untrained.is_saved(k)}
        for key, tensor in saved.items():
            _require_like(state, key, tensor)
        self.untrained.load({**unsaved, **{key: state[key] for key in saved}})
        self.untrained.mark()

    def flatten(self, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (weights, buffers) as flat CPU tensors from a state dict of this model.

        Raises:
            ShapeError: a name is missing or a shape differs.
        """
        return _pick(state, self._parameters), _pick(state, self._buffers)


class _Place:
    """Where a module keeps a parameter or a buffer: a model may put another tensor there."""

    def __init__(self, tensors: dict[str, Any], key: str, *, is_saved: bool) -> None:
        self._tensors = tensors
        self._key = key
        self.is_saved = is_saved
        """Whether the state dict has it."""

    def get(self) -> Tensor | None:
        tensor: Tensor | None = self._tensors.get(self._key)
        return tensor

    def set(self, tensor: Tensor) -> None:
        self._tensors[self._key] = tensor


class UntrainedState:
    """What a model has that is neither trained nor averaged.

    Every process begins with that of the run's first model, as torch's DDP makes all ranks equal
    when it is constructed. From then on each replica keeps its own: frozen parameters are never
    sent, and of buffers that can not be averaged (a counter of batches) the center has those of
    one worker.

    Values travel as NumPy arrays under the model's own names; a dtype that NumPy lacks, bfloat16
    say, as integers of its size.

    Args:
        name: of the model, for messages.
        places: of each tensor, by name.
    """

    def __init__(self, name: str, places: Mapping[str, _Place]) -> None:
        self._name = name
        self._places = dict(places)
        self.mark()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._places)

    def is_saved(self, name: str) -> bool:
        """Whether the model's state dict has it."""
        return self._places[name].is_saved

    def unsaved(self) -> dict[str, np.ndarray]:
        """Return copies of what the state dict does not have."""
        return {k: _array_of(t) for k, t in self.tensors().items() if not self.is_saved(k)}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors themselves."""
        found = {name: place.get() for name, place in self._places.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return copies of all of it."""
        return {name: _array_of(tensor) for name, tensor in self.tensors().items()}

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Take over values; tensors that are not named stay as they are.

        Args:
            arrays: arrays, or tensors, by name.

        Raises:
            ShapeError: the model has no such tensor, or one of another shape or dtype.
        """
        for name, values in arrays.items():
            if name not in self._places:
                raise ShapeError(
                    self._name,
                    f"has no {name}, which the run's first model has; build all models alike",
                )
            tensor = self._places[name].get()
            if tensor is not None:  # else a cache that the model has dropped
                self._load(name, tensor, values)

    def load_first(self, arrays: Untrained) -> None:
        """Take over all of the run's first model, and mark it.

        Raises:
            ShapeError: this is another model.
        """
        others = [k for k in self.tensors() if self.is_saved(k) and k not in arrays]
        if others:
            raise ShapeError(
                self._name,
                f"has {others[0]}, which the run's first model does not have; build all models "
                f"alike",
            )
        self.load(arrays)
        self.mark()

    def _load(self, name: str, tensor: Tensor, values: Any) -> None:
        is_size_known = isinstance(tensor, nn.Parameter) or self._places[name].is_saved
        if tuple(values.shape) != tuple(tensor.shape) and is_size_known:
            raise ShapeError(
                self._name,
                f"has {name} of shape {list(tensor.shape)}, the run's first model of "
                f"{list(values.shape)}; build all models alike",
            )
        try:
            found = _tensor_of(values, tensor.dtype)
        except RuntimeError as error:  # other bytes an element
            raise ShapeError(
                self._name,
                f"has {name} of {tensor.dtype}, the run's first model of {values.dtype}; build "
                f"all models alike",
            ) from error
        with torch.no_grad():
            if found.shape == tensor.shape:
                tensor.copy_(found)
            else:  # a cache that grows; it is no state that the model saves
                tensor.data = found.to(tensor.device)

    # what has changed

    def mark(self) -> None:
        """Remember the state as it is now; :meth:`changed` compares with it."""
        self._prints: dict[str, Any] = {}
        self._base: dict[str, np.ndarray] = {}
        for name, tensor in self.tensors().items():
            if isinstance(tensor, nn.Parameter):
                self._prints[name] = _fingerprint(tensor)
            else:
                self._base[name] = _array_of(tensor)

    def changed(self) -> dict[str, np.ndarray]:
        """Return copies of what differs from the marked state, as far as the state dict has it.

        Frozen parameters among them are those that the model moves by itself, a teacher's say.
        """
        return {**self._changed_parameters(), **self.changed_buffers()}

    def changed_buffers(self, known: Untrained = _NONE) -> dict[str, np.ndarray]:
        """Return copies of the buffers of the state dict that differ from what is known of them.

        Args:
            known: by name; of one that is missing the marked state is known.
        """
        before = {**self._base, **known}
        now = {name: _array_of(tensor) for name, tensor in self._buffers(only_saved=True).items()}
        return {name: array for name, array in now.items() if _differs(array, before[name])}

    def own(self) -> dict[str, np.ndarray]:
        """Return copies of what a replica needs to go on: all buffers, and changed parameters.

        Not only the changed buffers: one that counts in a ring comes back to where it began.
        """
        buffers = {name: _array_of(tensor) for name, tensor in self._buffers().items()}
        return {**self._changed_parameters(), **buffers}

    def moved_parameters(self) -> tuple[str, ...]:
        """Return the names of frozen parameters that differ from the marked state."""
        tensors = self.tensors()
        return tuple(k for k, before in self._prints.items() if _fingerprint(tensors[k]) != before)

    def _changed_parameters(self) -> dict[str, np.ndarray]:
        tensors = self.tensors()
        return {name: _array_of(tensors[name]) for name in self.moved_parameters()}

    def _buffers(self, *, only_saved: bool = False) -> dict[str, Tensor]:
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if name in self._base and (self._places[name].is_saved or not only_saved)
        }


def as_tensors(arrays: Untrained) -> dict[str, Tensor]:
    """Return copies of the arrays as tensors, by name."""
    return {name: torch.tensor(array) for name, array in arrays.items()}


def _differs(array: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays differ in shape or in any bit."""
    if array.shape != other.shape:
        return True
    return not np.array_equal(array.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


def _places(model: nn.Module) -> dict[str, _Place]:
    """Return where each parameter and buffer is, by name; one that has two names, by the first."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    found: dict[str, _Place] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                name = f"{prefix}.{key}" if prefix else key
                found[name] = _Place(tensors, key, is_saved=id(tensor) in saved)
    return found


def _averaged_buffers(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the float buffers that a model saves; one that it does not save is no state of it."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for key, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.dtype == dtype and id(buffer) in saved:
            yield key, buffer


def _check_module(model: object, name: str) -> None:
    if not isinstance(model, nn.Module):
        found = f"what should build it returned a value of type {type(model).__name__}"
        raise ShapeError(name, f"must be a torch.nn.Module, {found}")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ShapeError(
            name,
            "has lazy layers, whose parameters have no shape yet; build it with layers of a known "
            "size, or pass it a batch before it is returned",
        )
    for module in model.modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ShapeError(
                name,
                f"has {type(module).__name__} with extra state (get_extra_state), which no "
                f"checkpoint would hold; keep it in buffers",
            )


def _one_kind(parameters: Sequence[Tensor], name: str) -> Tensor:
    if not parameters:
        raise ShapeError(name, "has no parameter that requires a gradient")
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ShapeError(name, f"all parameters must share one dtype and device, found {found}")
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


def _require_like(state: Mapping[str, Tensor], key: str, tensor: Tensor) -> None:
    """Raise a ShapeError unless a saved state has a tensor, in its shape."""
    if key not in state:
        raise ShapeError(key, "is missing from the saved state")
    if state[key].shape != tensor.shape:
        raise ShapeError(key, f"has shape {list(tensor.shape)}, saved as {list(state[key].shape)}")


def _array_of(tensor: Tensor) -> np.ndarray:
    """Return a copy as an array; a dtype that NumPy lacks as integers of its size."""
    tensor = tensor.detach().to("cpu", copy=True).contiguous()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def _tensor_of(values: Any, dtype: torch.dtype) -> Tensor:
    """Return an array of :func:`_array_of`, or a tensor, as a tensor of a dtype.

    Raises:
        RuntimeError: its elements have another size.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype not in _INTEGERS.values() or tensor.element_size() != dtype.itemsize:
        raise RuntimeError(f"{tensor.dtype} is no form of {dtype}")
    return tensor.view(dtype)


def _fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells whether a frozen parameter was moved: its shape, the sum of its bits."""
    flat = tensor.detach().reshape(-1)
    if flat.element_size() not in _INTEGERS:  # complex128
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    return tuple(tensor.shape), int(bits.sum(dtype=torch.int64))
