"""A GPU that is not there: torch's rules of devices, without a device.

Inside `pretend_cuda`, tensors that are moved to or made on ``cuda`` stay in ordinary memory and are
marked. What a GPU refuses is refused: operations on tensors of two devices, ``numpy()`` of a marked
tensor, a generator of another device. Asked for its device, a marked tensor answers as if it were
on a GPU, so that code takes the ways it takes there. Kernels, streams and speed are not looked at.
"""

import contextlib
import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_MARKS_BEFORE_CLEANING = 1000
_aten = torch.ops.aten
_MIX_DEVICES = {_aten.copy_.default, _aten._to_copy.default}
_TAKE_AN_INDEX_FROM_THE_CPU = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}


@contextlib.contextmanager
def pretend_cuda():
    """Pretend that torch has one GPU, in this thread and in those that begin meanwhile."""
    marks = _Marks()
    run = threading.Thread.run

    def run_with_modes(thread):
        with _Operations(marks), _Questions(marks):
            run(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "run", run_with_modes)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
        for name, value in {
            "is_available": True,
            "device_count": 1,
            "current_device": 0,
            "memory_allocated": 0,
            "memory_reserved": 0,
            "is_bf16_supported": True,
            "get_rng_state_all": [],
            "synchronize": None,
        }.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=value, **__: answer)
        with _Operations(marks), _Questions(marks):
            yield


def _as_device(given):
    device = CUDA if isinstance(given, int) else torch.device(given)
    return CUDA if device.type == "cuda" else device


class _Marks:
    """Which storages pretend to be on the GPU."""

    def __init__(self):
        self._storages = {}
        self._here = threading.local()

    def __contains__(self, tensor):
        return tensor.untyped_storage()._cdata in self._storages

    def device_of(self, tensor):
        return CUDA if tensor in self else tensor.untyped_storage().device

    def add(self, tensor):
        if len(self._storages) % _MARKS_BEFORE_CLEANING == _MARKS_BEFORE_CLEANING - 1:
            for key, known in list(self._storages.items()):
                if known.expired():
                    self._storages.pop(key, None)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            # While this reference lives, no other storage gets the number.
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def moved(self, tensor, device):
        """Copy a tensor to the other device; give it as it is if it is there."""
        if self.device_of(tensor).type == device.type:
            return tensor
        if device.type == "cuda":
            copy = tensor.clone()
            self.add(copy)
            return copy
        with _disable_current_modes():  # where marks do not spread
            return tensor.clone()

    @property
    def is_inside(self):
        """Whether a function of this thread works on marked tensors."""
        return getattr(self._here, "is_inside", False)

    @is_inside.setter
    def is_inside(self, value):
        self._here.is_inside = value


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for child in tree for tensor in _tensors(child)]


class _Operations(TorchDispatchMode):
    """Refuses operations on two devices; marks what comes of marked tensors."""

    def __init__(self, marks):
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        del types
        tensors = _tensors((args, kwargs))
        marked = [tensor for tensor in tensors if tensor in self._marks]
        # A single number of the CPU may go with anything.
        others = [tensor for tensor in tensors if tensor.dim() and tensor not in self._marks]
        if function in _TAKE_AN_INDEX_FROM_THE_CPU and args[0] in self._marks:
            others = []
        if marked and others and function not in _MIX_DEVICES:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({function}, {[tuple(tensor.shape) for tensor in tensors]})"
            )
        result = function(*args, **(kwargs or {}))
        # Inside a function of marked tensors, what is made of nothing is made where they are.
        if function not in _MIX_DEVICES and (marked or (self._marks.is_inside and not tensors)):
            for tensor in _tensors(result):
                self._marks.add(tensor)
        if function is _aten._to_copy.default and marked:
            self._marks.add(result)
        return result


class _Generator(torch.Generator):
    """A generator that knows its device."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, "cpu")
        made._pretended = _as_device(device)
        return made

    @property
    def device(self):
        return self._pretended


class _Questions(TorchFunctionMode):
    """Answers questions about devices, and moves tensors."""

    def __init__(self, marks):
        super().__init__()
        self._marks = marks

    def __torch_function__(self, function, types, args=(), kwargs=None):
        del types
        kwargs = dict(kwargs or {})
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None:
            answer = self._asked(function, tensor)
            if answer is not None:
                return answer[0]
            if function is torch.Tensor.to:
                return self._to(tensor, *args[1:], **kwargs)
        self._check_generator(tensor, kwargs)
        kwargs.pop("pin_memory", None)
        device = None if kwargs.get("device") is None else _as_device(kwargs["device"])
        if device is not None and device.type in ("cpu", "cuda"):
            kwargs["device"] = CPU
            return self._made(function(*args, **kwargs), tensor, device)
        was = self._marks.is_inside
        self._marks.is_inside = any(t in self._marks for t in _tensors((args, kwargs)))
        try:
            return function(*args, **kwargs)
        finally:
            self._marks.is_inside = was

    def _asked(self, function, tensor):
        """Give the answer to a question in a tuple; None if it is no question of devices."""
        is_marked = tensor in self._marks
        attribute = getattr(function, "__self__", None)
        if attribute is torch.Tensor.device:
            return (self._marks.device_of(tensor),)
        if attribute is torch.Tensor.is_cuda:
            return (is_marked,)
        if attribute is torch.Tensor.is_cpu:
            return (self._marks.device_of(tensor).type == "cpu",)
        if function is torch.Tensor.get_device:
            return (0 if is_marked else -1,)
        if function in (torch.Tensor.numpy, torch.Tensor.__array__) and is_marked:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if function is torch.Tensor.cuda:
            return (self._marks.moved(tensor, CUDA),)
        if function is torch.Tensor.cpu:
            return (self._marks.moved(tensor, CPU),)
        if function is torch.Tensor.pin_memory:
            if is_marked:
                raise RuntimeError("cannot pin 'torch.cuda.FloatTensor'")
            return (tensor.clone(),)
        return (False,) if function is torch.Tensor.is_pinned else None

    def _to(self, tensor, *args, **kwargs):
        kwargs.pop("non_blocking", None)
        places = [kwargs.pop("device", None), *args]
        dtypes = [arg for arg in args if isinstance(arg, torch.dtype)]
        if args and isinstance(args[0], torch.Tensor):
            places, dtypes = [self._marks.device_of(args[0])], [args[0].dtype]
        places = [place for place in places if isinstance(place, str | int | torch.device)]
        places = [place for place in places if not isinstance(place, bool)]
        device = _as_device(places[0]) if places else self._marks.device_of(tensor)
        if dtypes:
            kwargs["dtype"] = dtypes[0]
        if device.type == "meta":
            return torch.empty_like(tensor, device="meta", **kwargs)
        moved = self._marks.moved(tensor, device)
        return moved.to(**kwargs) if kwargs else moved

    def _made(self, made, source, device):
        """Put a new tensor on the device that was asked for, apart from what it was made of."""
        if source is not None or device.type == "cuda":
            made = made.clone() if made not in self._marks else made
            return self._marks.moved(made, device)
        return made

    def _check_generator(self, tensor, kwargs):
        generator = kwargs.get("generator")
        if generator is None:
            return
        given = kwargs.get("device")
        here = CPU if tensor is None else self._marks.device_of(tensor)
        wanted = here if given is None else _as_device(given)
        if wanted.type != generator.device.type:
            raise RuntimeError(
                f"Expected a '{wanted.type}' device type for generator but found "
                f"'{generator.device.type}'"
            )
