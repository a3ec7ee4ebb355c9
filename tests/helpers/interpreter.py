"""Triton's interpreter without its repeated work: the same results in a fraction of the time."""

from typing import Any

import numpy as np


def speed_up() -> None:
    """Replace three of its functions, in this process. Does nothing if Triton is not installed.

    For every call of a device function, the interpreter looks through all of triton.language for what it has replaced
    already. It makes a table of all types whenever it looks up one. And it reduces by xor, which sorting does all the
    time, element by element in Python.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
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
