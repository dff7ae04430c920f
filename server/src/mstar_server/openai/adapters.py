"""What a route asks an adapter, the server's own or a family's.

An adapter is built as ``Adapter(spec, options)`` and makes tasks of a body: ``tasks(body)``; where requests carry
files, ``tasks(body, media)`` with the decoded :data:`~mstar.spec.tasks.Part` of each, by its place (the field of a form
or of the body, ``"messages[0].content[1]"`` in a chat). It decodes, fetches and waits for nothing.

Two things an adapter may have besides: ``check(body)``, which raises for everything that can be said of a body without
its files, so that nothing is fetched or decoded for a request that is refused in any case; and ``sampling``, a
:class:`~mstar_server.media.limits.Sampling`: which frames of a video its model wants.
"""

from __future__ import annotations

from typing import Any

__all__ = ["check_body"]


def check_body(adapter: Any, body: Any) -> None:
    """Have *adapter* judge *body* before its files, if it can. Raises :class:`~mstar.spec.errors.RequestError`."""
    check = getattr(adapter, "check", None)
    if check is not None:
        check(body)
