"""The fastest way to run linear layers on this CPU.

A decode step of a small model is a chain of short matrix products, each of which must stream its weight from memory.
``F.linear`` in bfloat16 spends nearly as long on preparing each product as on the product; oneDNN takes weights that
have been rearranged once ("prepacked") without that. Which way and which dtype win depends on the CPU, so both are
measured, not assumed. Results are those of ``F.linear`` up to the rounding of the dtype.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import Linear, Product

__all__ = ["best_cpu_dtype", "prepacked_wins", "prepare_cpu"]

log = logging.getLogger(__name__)

_BATCHES = (1, 8, 32)
_PROBE_SHAPES = ((1536, 1024), (1024, 1536))  # (out, in): the size at which small models' layers are
_PROBE_BYTES = 24 << 20  # per way: enough weights that they come from memory and not from the cache
_ROUNDS = 7
_WORTH_A_COPY = 1.25  # speed-up for which a weight that is used elsewhere too is kept twice
_TRIM_BYTES = 32 << 20  # of originals freed between two trims of the heap


class PackedProduct:
    """``x @ weight.T + bias`` on a prepacked weight. Any leading shape of *x*, any number of rows.

    oneDNN's operators are private to torch: :func:`prepacked_wins` has run them, on this CPU, before any is made.
    """

    __slots__ = ("_op", "weight")

    def __init__(self, weight: Tensor):
        self.weight = _ops().reorder(weight, None)
        self._op = _ops().product

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._op(x, self.weight, bias, "none", [], "")


def prepare_cpu(module: nn.Module) -> int:
    """Prepack the linear layers in *module* if that is faster here; call it once its weights are loaded.

    Layer by layer, each original is freed as soon as its packed copy exists. A weight that something else uses too (a
    tied embedding) keeps its original; it is packed only if that is worth a second copy (1.25 times as fast). The
    packed layer's ``weight`` is an empty tensor afterwards: the module can run, but not be saved.

    :returns: the number of layers prepacked; 0 if ``F.linear`` is as fast, or this torch has no such operators.
    """
    users: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        users[id(parameter)] = users.get(id(parameter), 0) + 1
    packed = freed = 0
    with torch.inference_mode(False), torch.no_grad():
        for layer in module.modules():
            if not isinstance(layer, Linear) or layer.product is not None or layer.weight.device.type != "cpu":
                continue
            shared = users[id(layer.weight)] > 1
            if not prepacked_wins(layer.weight.dtype, by=_WORTH_A_COPY if shared else 1.0):
                continue
            layer.product = PackedProduct(layer.weight.detach())
            packed += 1
            if not shared:
                freed += layer.weight.nbytes
                layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
            if freed >= _TRIM_BYTES:
                _trim_heap()
                freed = 0
    _trim_heap()
    return packed


def _trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps the originals' blocks in its heap, where the packed copies,
    rounded up differently, leave holes (a sixth of a small model's weights). Elsewhere than on glibc: nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@cache
def prepacked_wins(dtype: torch.dtype, by: float = 1.0) -> bool:
    """Whether prepacked products in *dtype* are right and, over batches of 1, 8 and 32, more than *by* times as fast as
    ``F.linear`` here. Measured once."""
    plain, packed = _seconds(dtype)
    return packed is not None and packed * by < plain


@cache
def best_cpu_dtype() -> torch.dtype:
    """The dtype whose linear layers are faster on this CPU over batches of 1, 8 and 32: bfloat16 or float32."""
    times = {dtype: _fastest(dtype) for dtype in (torch.bfloat16, torch.float32)}
    return min(times, key=times.__getitem__)


def _fastest(dtype: torch.dtype) -> float:
    plain, packed = _seconds(dtype)
    return plain if packed is None else min(plain, packed)


class _Ops:
    def __init__(self) -> None:
        self.reorder: Callable[..., Tensor] = torch.ops.mkldnn._reorder_linear_weight.default
        self.product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default


@cache
def _ops() -> _Ops:
    return _Ops()


def _fault(dtype: torch.dtype) -> str | None:
    """Why prepacked products cannot be used, or ``None``. The operators are private to torch, so they are tried."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch has no oneDNN"
    try:
        for rows in (1, 33):
            x, weight, bias = _random((rows, 96), dtype), _random((80, 96), dtype), _random((80,), dtype)
            got = PackedProduct(weight)(x, bias)
            if not torch.allclose(got, F.linear(x, weight, bias), rtol=0.02, atol=0.02 * 96**0.5):
                return "its results differ from F.linear's"
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        return str(error).splitlines()[0] if str(error) else repr(error)
    return None


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)  # its own, so that the global one stays untouched
    return torch.randn(shape, generator=generator, device="cpu").to(dtype)


@cache
def _seconds(dtype: torch.dtype) -> tuple[float, float | None]:
    """Seconds for one pass over the probe's weights, summed over the batches: with ``F.linear``, and prepacked if that
    can be had. Both are timed in turn, and each product's best of a few rounds counts: a busy neighbour only adds time.
    On one thread, as several threads would have to meet a moment when no neighbour holds up any of them."""
    fault = _fault(dtype)
    plain = packed = 0.0
    with torch.no_grad(), _one_thread():
        for out, size in _PROBE_SHAPES:
            weight = _random((out, size), dtype)
            count = max(1, _PROBE_BYTES // len(_PROBE_SHAPES) // (out * size * dtype.itemsize))
            ways = [[_plain(weight.clone()) for _ in range(count)]]
            if fault is None:
                ways.append([PackedProduct(weight) for _ in range(count)])
            for rows in _BATCHES:
                times = _best(ways, _random((rows, size), dtype))
                plain, packed = plain + times[0], packed + times[-1]
    found = f"prepacked {packed * 1e3:.2f} ms" if fault is None else f"no prepacked weights ({fault})"
    log.debug("CPU linear layers in %s: F.linear %.2f ms, %s", dtype, plain * 1e3, found)
    return plain, None if fault is not None else packed


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _plain(weight: Tensor) -> Product:
    return lambda x, bias: F.linear(x, weight, bias)


def _best(ways: Sequence[Sequence[Product]], x: Tensor) -> list[float]:
    """Per way, the sum of its products' best times."""
    best = [[float("inf")] * len(products) for products in ways]
    for _ in range(_ROUNDS):
        for products, times in zip(ways, best, strict=True):
            for index, product in enumerate(products):
                start = time.perf_counter()
                product(x, None)
                times[index] = min(times[index], time.perf_counter() - start)
    return [sum(times) for times in best]
