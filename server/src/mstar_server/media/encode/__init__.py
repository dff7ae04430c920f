"""Samples, pixels and frames → files that a client can read. No external program: PyAV, Pillow, our own WAV header
and PNG.

:mod:`~mstar_server.media.encode.audio` streams sound, :mod:`~mstar_server.media.encode.images` makes PNG, WebP and
JPEG, :mod:`~mstar_server.media.encode.video` MP4 with sound.
"""
