"""Triton's interpreter without its repeated work: the same results in less than half the time."""

from typing import Any

import numpy as np


def speed_up() -> None:
    """Replace three functions of the interpreter in this process, if Triton 3.9 is installed.

    At each call of a device function, the interpreter searches triton.language for builtins that it has already
    replaced. At each look-up of a type, it builds the table of all types. An xor reduction, which `tl.topk` calls many
    times, runs element by element in Python.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope"):  # another version, with other internals
        return

    patch_lang = interpreter._patch_lang

    def patch_lang_once(fn: Any) -> Any:
        known = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        done = known and not any(tl.core.is_builtin(lang.load) for lang in known)
        return interpreter._LangPatchScope() if done else patch_lang(fn)

    np_dtype, np_dtypes = interpreter._get_np_dtype, {}

    def np_dtype_by_name(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    apply_impl = interpreter.ReduceOps.apply_impl

    def apply_impl_by_numpy(self: Any, given: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return apply_impl(self, given)
        data = np.bitwise_xor.reduce(given[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, given[0].dtype)

    interpreter._patch_lang = patch_lang_once
    interpreter._get_np_dtype = np_dtype_by_name
    interpreter.ReduceOps.apply_impl = apply_impl_by_numpy
