"""What a file is, from its first bytes. Names and media types that clients send are hints, nothing more."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mstar_server.media.limits import MediaFault

__all__ = ["AUDIO_FORMATS", "HEAD_BYTES", "IMAGE_FORMATS", "VIDEO_FORMATS", "Container", "require", "sniff"]

HEAD_BYTES = 4096
"""How much of a file :func:`sniff` looks at."""

IMAGE_FORMATS = ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF")
AUDIO_FORMATS = ("WAV", "FLAC", "Ogg", "MP3", "M4A", "MP4", "WebM", "AAC", "AIFF")
VIDEO_FORMATS = ("MP4", "MOV", "WebM", "Matroska", "AVI", "Ogg")


class Container(msgspec.Struct, frozen=True):
    """A kind of file. :ivar kinds: what it may hold. :ivar demuxer: FFmpeg's name for it, if FFmpeg reads it."""

    name: str
    kinds: tuple[str, ...]
    demuxer: str = ""


def _image(name: str) -> Container:
    return Container(name, ("image",))


_BOTH = ("audio", "video")
_MP4 = Container("MP4", _BOTH, "mov")
_MATROSKA = Container("Matroska", _BOTH, "matroska")
_OGG = Container("Ogg", _BOTH, "ogg")
_MP3 = Container("MP3", ("audio",), "mp3")
_AAC = Container("AAC", ("audio",), "aac")
_PREFIXES = (
    (b"\x89PNG", _image("PNG")),
    (b"\xff\xd8\xff", _image("JPEG")),
    (b"GIF8", _image("GIF")),
    (b"II*\x00", _image("TIFF")),
    (b"MM\x00*", _image("TIFF")),
    (b"fLaC", Container("FLAC", ("audio",), "flac")),
    (b"OggS", _OGG),
    (b"ID3", _MP3),
    (b"\x1a\x45\xdf\xa3", _MATROSKA),
    (b"%PDF-", Container("PDF", ())),
)
_HEIF = Container("HEIF", ())
_FTYP = {
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), _HEIF),
    **dict.fromkeys((b"avif", b"avis"), Container("AVIF", ())),
}
"""Pictures in MP4's boxes by their major brand: phones send them, and they are not read."""
_RIFF = {
    b"WAVE": Container("WAV", ("audio",), "wav"),
    b"WEBP": _image("WebP"),
    b"AVI ": Container("AVI", ("video",), "avi"),
}


_NOWHERE: Mapping[str, str] = {}


def sniff(head: bytes, audio: bool = False) -> Container | None:
    """What a file that begins with *head* is, or ``None``.

    :param audio: the sender says that it is sound: then two bytes are enough to know a bare MP3 or AAC stream.
    """
    for prefix, container in _PREFIXES:
        if head.startswith(prefix):
            return container
    if head[:4] in (b"RIFF", b"RF64", b"RIFX"):
        return _RIFF.get(head[8:12])
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return Container("AIFF", ("audio",))
    if head[4:8] == b"ftyp":
        return _FTYP.get(head[8:12], _MP4)
    if head[:2] == b"BM" and head[6:10] == b"\0\0\0\0":  # two letters alone would make images of many texts
        return _image("BMP")
    if audio and len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return _AAC if head[1] & 0x06 == 0 else _MP3  # the layer's bits are 0 in AAC's ADTS only
    return None


def require(head: bytes, kind: str, fields: Mapping[str, str] = _NOWHERE) -> Container:
    """The container of a file that must hold *kind*.

    :param fields: kind → the field of the request that takes such files.
    :raises MediaFault: 400 ``wrong_media_kind`` for a file that holds something else, with the right one of *fields*;
        for what is not read at all 400 for images and 415 for the rest.
    """
    container = sniff(head, kind == "audio")
    if container is not None and kind in container.kinds:
        return container
    if container is not None:
        what = f"is {_a(container.name)} {container.name} file, not {_a(kind)} {kind}"
        if container.kinds:
            right = " or ".join(repr(fields[held]) for held in reversed(container.kinds) if held in fields)
            raise MediaFault(f"the file {what}{right and f'; send it as {right}'}", "wrong_media_kind")
    elif head.lstrip()[:1] == b"<":
        what = f"is text that looks like HTML or XML, not {kind}"
    else:
        what = "is of an unknown format" if head else "is empty"
    known = {"image": IMAGE_FORMATS, "audio": AUDIO_FORMATS, "video": VIDEO_FORMATS}[kind]
    message = f"the file {what}; {kind} formats: {', '.join(known)}"
    if kind == "image" or not head:
        raise MediaFault(message, f"invalid_{kind}")
    raise MediaFault(message, "unsupported_media_type", 415)


def _a(word: str) -> str:
    return "an" if word[0] in "aeiouAEIOU" or word[:2] in ("MP", "M4") else "a"  # as one says it: an MP4
