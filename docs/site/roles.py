"""Docstrings name things by roles, as :class:`TrainPipeline`; here these become links."""

import re

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(?:([^<`]+) <)?~?([\w.]+)>?`")


class Roles(griffe.Extension):
    """Makes each role a link to what it names, or code where the reference does not show that."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        _rewrite(pkg)


def _rewrite(thing: griffe.Object) -> None:
    if thing.docstring is not None:
        text = thing.docstring.value
        thing.docstring.value = _ROLE.sub(lambda m: _link(thing, m[2], m[1] or m[2]), text)
    for member in thing.members.values():
        if isinstance(member, griffe.Object):
            _rewrite(member)


def _link(thing: griffe.Object, name: str, text: str) -> str:
    try:
        path = name if name.startswith("torchembed.") else thing.resolve(name)
    except griffe.NameResolutionError:
        return f"`{text}`"
    return f'<autoref optional identifier="{path}"><code>{text}</code></autoref>'
