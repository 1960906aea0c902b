"""Triton's interpreter, made quick enough for the tests of all kernels."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_NOTHING = SimpleNamespace(restore=lambda: None)


def hasten() -> None:
    """Leave out of it what takes most of its time and finds nothing here.

    It looks through Triton's language at each call of one function by another, where once a launch will do, and in 64
    bits at each sum and product of integers, which overflow at sizes that no test has, or, in a hash, by intent. An
    interpreter of another version is left alone.
    """
    if hasattr(interpreter, "_LangPatchScope"):
        object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)


def round_to_nearest() -> None:
    """Have float32 numbers become e4m3 as on a GPU: the interpreter loses the carry of a mantissa that rounds up."""
    convert = interpreter._convert_float

    def convert_rightly(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if (given, wanted) != (tl.float32, tl.float8e4nv):
            return convert(values, given, wanted, rounding)
        rounded = torch.from_numpy(np.array(values)).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy().reshape(values.shape)

    interpreter._convert_float = convert_rightly


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what replaces the language's functions for a launch, or for a call within one, where they are not yet."""
    replaced: set[int] = set()

    def patch_once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if seen <= replaced:
            return _NOTHING
        begins, scope = not replaced, patch(function)
        replaced.update(seen)
        if begins:
            restore = scope.restore

            def restore_all() -> None:
                restore()
                replaced.clear()

            scope.restore = restore_all
        return scope

    return patch_once
