"""Media in and out: uploads, data URLs and remote files become task parts; samples, pixels and frames become files.

:mod:`~mstar_server.media.decoder` is the way in: ``await state.media.decode(...)`` from any route. What decodes runs in
processes of its own (:mod:`~mstar_server.media.pool`), what fetches in one guarded place
(:mod:`~mstar_server.media.fetch`). The way out is :mod:`~mstar_server.media.encode`.
"""
