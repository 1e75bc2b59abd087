"""What is replaced in other libraries: once, with the old value's name, and callable as before."""

import inspect

from dsv4.integrations.wrapping import wrap


class Library:
    def method(self, x: int) -> int:
        """Its own words."""
        return x

    @classmethod
    def of_the_class(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x


def doubled(theirs):
    def ours(*arguments):
        found = theirs(*arguments)
        return (*found, "ours") if isinstance(found, tuple) else 2 * found

    return ours


def test_a_method_is_wrapped_once():
    for _ in range(2):
        wrap(Library, "method", doubled)
    assert Library().method(3) == 6
    assert Library.method.__doc__ == "Its own words."
    assert list(inspect.signature(Library.method).parameters) == ["self", "x"]


def test_a_class_method_is_wrapped_once_and_called_on_the_class_or_an_object():
    for _ in range(2):
        wrap(Library, "of_the_class", doubled)
    assert Library.of_the_class(3) == Library().of_the_class(3) == ("Library", 3, "ours")


def test_a_class_is_replaced_by_a_function():
    class Module:
        Thing = Library

    wrap(Module, "Thing", lambda theirs: lambda *given: theirs(*given))
    assert isinstance(Module.Thing(), Library) and Module.Thing.__name__ == "Library"
