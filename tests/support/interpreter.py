"""Triton's interpreter without two things that take most of its time and change nothing.

While a kernel runs, the interpreter's own functions stand in the place of those of
``triton.language``. It puts them there at each launch, and again at each call of a function within
the kernel, and looks at every name of ``triton.language`` for it. And it computes whether sums and
products of integers overflow, of which it makes assertions that it then leaves out.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from tests.support import lanes


def leave_out_what_changes_nothing() -> None:
    """Have the interpreter, where it runs the kernels, do neither."""
    if not lanes.is_interpreted() or importlib.util.find_spec("triton") is None:
        return
    from triton import language
    from triton.runtime import interpreter

    languages = (language, language.core)
    interpreter._patch_lang = once_for_each_launch(interpreter._patch_lang, languages)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "assertions about overflow are not left out"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def once_for_each_launch(
    replace: Callable[[FunctionType], Any], languages: Sequence[ModuleType]
) -> Callable[[FunctionType], Any]:
    """``replace``, which replaces functions of those ``languages`` that its argument sees, and
    returns what restores them; until they are restored, each language once."""
    replaced: list[ModuleType] = []

    class Launch:
        """What restores the functions of the languages, or, of a call within a kernel, nothing."""

        def __init__(self, scope: Any = None) -> None:
            self._scope = scope

        def restore(self) -> None:
            if self._scope is not None:
                self._scope.restore()
                replaced.clear()

    @functools.cache
    def seen_by(function: FunctionType) -> list[ModuleType]:
        seen = {id(value) for value in function.__globals__.values()}
        return [language for language in languages if id(language) in seen]

    def replace_once(function: FunctionType) -> Launch:
        missing = [language for language in seen_by(function) if language not in replaced]
        is_launch = not replaced
        if not missing and not is_launch:
            return Launch()
        scope = replace(function)
        replaced.extend(missing)
        return Launch(scope if is_launch else None)

    return replace_once
