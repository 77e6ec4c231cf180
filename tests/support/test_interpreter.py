"""A launch replaces what the interpreter replaces once, and restores it."""

import types
from types import FunctionType, ModuleType
from typing import Any

from tests.support.interpreter import once_for_each_launch

LANGUAGE, CORE = ModuleType("language"), ModuleType("core")


def function_that_sees(*modules: ModuleType) -> FunctionType:
    seen: dict[str, Any] = {module.__name__: module for module in modules}
    return types.FunctionType((lambda: None).__code__, seen)


class Replaced:
    """What was replaced for which function, and how often it was restored."""

    def __init__(self) -> None:
        self.functions: list[FunctionType] = []
        self.num_restored = 0

    def replace(self, function: FunctionType) -> "Replaced":
        self.functions.append(function)
        return self

    def restore(self) -> None:
        self.num_restored += 1


def test_calls_within_a_launch_replace_what_it_has_not() -> None:
    replaced = Replaced()
    replace = once_for_each_launch(replaced.replace, (LANGUAGE, CORE))
    kernel, inner, standard = (
        function_that_sees(LANGUAGE),
        function_that_sees(LANGUAGE),
        function_that_sees(CORE),
    )
    for num_launches in (1, 2):
        launch = replace(kernel)
        for function in (inner, standard, standard, inner):
            replace(function)
        assert replaced.functions == [kernel, standard] * num_launches
        assert replaced.num_restored == num_launches - 1
        launch.restore()
        assert replaced.num_restored == num_launches


def test_the_scope_of_an_inner_call_restores_nothing() -> None:
    replaced = Replaced()
    replace = once_for_each_launch(replaced.replace, (LANGUAGE, CORE))
    replace(function_that_sees(LANGUAGE))
    for modules in ((LANGUAGE,), (CORE,)):
        replace(function_that_sees(*modules)).restore()
    assert replaced.num_restored == 0
    replace(function_that_sees(LANGUAGE, CORE))
    assert len(replaced.functions) == 2
