"""Tapes: a stand-in for CUDA graphs on the CPU. A tape records a step's operations, and replays them.

As with a CUDA graph, a capture forbids reads, and leaves memory unchanged. A replay runs none of the step's Python
code, and uses the Python numbers of the capture.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors of nested arguments or results."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    arguments = func._schema.arguments
    values = [args[place] if place < len(args) else kwargs.get(arg.name) for place, arg in enumerate(arguments)]
    changes = (arg.alias_info is not None and arg.alias_info.is_write for arg in arguments)
    return tensors([value for value, change in zip(values, changes, strict=True) if change])


class Graph(TorchDispatchMode):
    """Replacement for `torch.cuda.CUDAGraph`.

    Attributes:
        calls: Captured operations: function, positional and named arguments, result.
        replays: Number of replays.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        for storage in (tensor.untyped_storage() for tensor in written(func, args, kwargs)):
            self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    @property
    def operations(self) -> list[str]:
        """Names of the captured operations that launch a kernel."""
        names = [func._schema.name.removeprefix("aten::") for func, *_ in self.calls if not func.is_view]
        return [
            name
            for name in names
            if not name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "_reshape_alias", "profiler"))
        ]

    def restore(self) -> None:
        """Restore the memory that the captured operations have changed."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before = {}

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat the captured operations on the memory that the capture used."""
        self.replays += 1
        for func, args, kwargs, result in self.calls:
            for old, new in zip(tensors(result), tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)

    def reset(self) -> None:
        """Forget the captured operations, so that their memory is freed."""
        self.calls = []

    def pool(self) -> tuple[int, int]:
        """Return the id of the memory pool."""
        return 0, 1


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Replace CUDA graphs by tapes, and return the list of tapes, in the order of their capture."""
    made: list[Graph] = []

    def read(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    @contextmanager
    def capture(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        made.append(graph)
        with monkeypatch.context() as patch:
            # make reads raise, as on a GPU; `Graph` does not see them, because on a CPU they dispatch no operation
            for name in ("tolist", "numpy", "cpu"):
                patch.setattr(Tensor, name, read)
            patch.setattr(torch.cuda, "synchronize", read)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with graph:
                yield
        graph.restore()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    nothing = SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nothing)
    return made
