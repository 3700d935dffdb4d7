"""Bytes of tensors alive at the worst moment, counted op by op; works on real and on fake tensors alike."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

ELSEWHERE = "elsewhere"


class PeakMemory(TorchDispatchMode):
    """Counts, while active, the memory of every tensor made and not yet freed, by the place that made it.

    Memory that an operator takes and gives back within itself is not seen.

    Attributes:
        peak: bytes alive at the worst moment. at_peak: the same by place; the sum is `peak`.
        largest: of each place the largest tensor ever alive, `(bytes, shape)`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak, self.at_peak = 0, dict[str, int]()
        self.largest: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.place = [ELSEWHERE]
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note what it makes."""
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                self.hold(x)
        return out

    def hold(self, x: Tensor) -> None:
        """Count a tensor's memory until it is freed."""
        storage = x.untyped_storage()
        size = storage.nbytes()
        if not size or storage in self._known:
            return
        self._known.add(storage)
        place = self.place_of(x)
        weakref.finalize(storage, self._free, place, size)
        self.live[place] += size
        self._total += size
        self.largest[place] = max(self.largest.get(place, (0, ())), (size, tuple(x.shape)))
        if self._total > self.peak:
            self.peak, self.at_peak = self._total, {k: v for k, v in self.live.items() if v}

    def place_of(self, x: Tensor) -> str:
        """Which place a new tensor belongs to: the innermost one open."""
        return self.place[-1]

    def _free(self, place: str, size: int) -> None:
        self.live[place] -= size
        self._total -= size

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """What is made inside belongs to this place."""
        self.place.append(place)
        try:
            yield
        finally:
            self.place.pop()

    @contextmanager
    def watching(self, places: list[tuple[str, nn.Module]]) -> Iterator[None]:
        """What these modules make in their forward pass belongs to the place beside them."""

        def enter(place: str) -> Callable[..., None]:
            return lambda *_: self.place.append(place)

        hooks = [m.register_forward_pre_hook(enter(name)) for name, m in places]
        hooks += [m.register_forward_hook(lambda *_: (self.place.pop(), None)[1]) for _, m in places]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def nbytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of tensors, shared memory once."""
    storages = {id(s): s for s in (t.untyped_storage() for t in tensors)}
    return sum(s.nbytes() for s in storages.values())
