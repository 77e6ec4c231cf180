"""Triton's interpreter, prepared once for each launch of a kernel.

While a kernel runs, the interpreter's own functions stand in the place of those of
``triton.language``. It puts them there at each launch, and again at each call of a function within
the kernel, which changes nothing, and looks at every name of ``triton.language`` for it: two fifths
of the time of the tests that it runs.
"""

from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any


def prepare_once_for_each_launch() -> None:
    """Have the interpreter leave out what a launch has done already."""
    from triton import language
    from triton.runtime import interpreter

    languages = (language, language.core)
    interpreter._patch_lang = once_for_each_launch(interpreter._patch_lang, languages)


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

    def replace_once(function: FunctionType) -> Launch:
        seen = {id(value) for value in function.__globals__.values()}
        missing = [one for one in languages if id(one) in seen and one not in replaced]
        is_launch = not replaced
        if not missing and not is_launch:
            return Launch()
        scope = replace(function)
        replaced.extend(missing)
        return Launch(scope if is_launch else None)

    return replace_once
