"""The server's settings: one frozen object, built once by the command line and passed down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ServerOptions"]

MIB = 1 << 20


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens and what it accepts. Every limit is answered with a 4xx that names it.

    :param port: 0 takes any free port.
    :param api_key: when set, every route but ``/health*`` wants ``Authorization: Bearer KEY``.
    :param api_keys: likewise: a file of keys, as ``mstar key`` writes it.
    :param max_key_requests: requests that a key may have in flight, unless its own record says otherwise; more are
        answered 429.
    :param key_requests_per_minute: likewise, requests begun within a minute.
    :param cors: origins whose pages may use this server (``"*"``: all); none by default.
    :param aliases: other names that a model answers to, each with the model's key: for clients that can ask only for
        the names of somebody's models (``{"tts-1": "kokoro"}``). Each is a model of its own in the listing.
    :param playground: whether there is a page to try the models, at ``/``.
    :param root_path: the path below which a proxy shows this server (``"/mstar"``).
    :param max_body_bytes: largest request body; more is answered 413.
    :param max_head_bytes: largest head of a request, all header lines together; more is answered 431.
    :param head_timeout_s: longest time that a request's head may take; then 408, or if nothing was sent, just the end.
    :param body_timeout_s: longest pause in the middle of a request's body; then 408.
    :param max_messages: most messages of one chat.
    :param max_text_chars: most characters of all texts of one request.
    :param max_inputs: most texts of one request to ``/v1/completions`` or ``/v1/embeddings``.
    :param max_choices: largest ``n`` of a chat request.
    :param max_files: most files of one ``/generate`` request, and most media parts of one chat.
    :param max_kwargs_bytes: largest ``model_kwargs``, as JSON.
    :param max_file_bytes: largest media file, uploaded, in JSON or fetched; more is answered 413.
    :param max_pixels: largest image or frame of a video, width × height, judged from the file's header; and the largest
        picture that a client may ask for.
    :param max_video_pixels: most pixels of all frames of a video that are decoded. The default are 259 s of 1920x1080
        at two frames a second; more is answered 400.
    :param max_video_frames: most frames of a video that are decoded; of a longer one every n-th frame is taken.
    :param max_video_s: longest video in seconds.
    :param max_audio_s: longest audio in seconds, judged from the file's header and while it is decoded.
    :param max_decoded_bytes: what all media of a request may decode to; more is answered 413.
    :param allow_remote_media: fetch media that a request names by an http or https URL. Off: such a request gets 400.
    :param media_hosts: the only hosts to fetch from (``"example.com"``, ``"*.example.com"`` for all below it); empty:
        any on the public internet. Addresses that are not public are refused in any case.
    :param fetch_timeout_s: longest fetch in seconds, with its redirects. :param max_fetch_redirects: most of them.
    :param media_processes: most processes that decode media; 0: half of the cores, one to four.
    :param media_timeout_s: longest decoding of one file in seconds; more is answered 422.
    :param max_decoder_memory_bytes: most memory that a decoder may use beside its result (enforced on Linux).
    :param max_media_waiting: files that may wait for a decoder; more is answered 429.
    :param max_socket_message_bytes: largest message on ``/generate/ws``; more is answered with an error event. A
        message four times as large closes the socket (1009).
    :param max_socket_requests: requests in flight on one socket.
    :param max_socket_appends: messages that may wait for one live request of a socket.
    :param max_realtime_audio_s: seconds of audio that a session of ``/v1/realtime`` holds: in its buffer, and in its
        conversation. :param max_realtime_items: items of its conversation.
    :param realtime_idle_s: a session in which nothing is sent and nothing runs for so long is closed.
    :param max_images: largest ``n`` of a request for pictures.
    :param state_dir: where the server keeps what outlives it: stored responses, uploaded voices and videos. ``None``:
        responses and voices in memory, videos in a temporary folder.
    :param max_videos: video jobs that are kept; of more the oldest go.
    :param max_running_videos: of them, those that may be unfinished; more are answered 429.
    :param max_videos_bytes: what their files may take on disk; beyond it the oldest go. What goes is of the client (the
        key) that has most, so that nobody's videos are lost to another's.
    :param max_key_videos: likewise, the jobs of one client that are kept, and :param max_key_videos_bytes: its files;
        ``None``: as much as there is room for.
    :param video_timeout_s: longest that a video job may take, its time in the queue included; then it fails.
    :param videos_days: how long a video is kept after it was made.
    :param responses_file: SQLite file of the responses that clients want kept (``/v1/responses``); ``None``: one in
        *state_dir*, or memory.
    :param max_stored_responses: of more the oldest go, of the client that has most.
    :param stored_responses_days: how long they are kept.
    :param max_speech_chars: longest text to be spoken, and longest instructions or transcript beside it.
    :param speech_ahead: pieces of a long text that are made beside the one that is heard; 0: none.
    :param max_voices: most voices that one client (one key) may upload.
    :param max_voice_s: longest sample of a voice in seconds, uploaded or sent with a request.
    :param keepalive_s: a stream that is silent for so long gets an empty chunk. Also how long a stream's status line is
        held back for the first event: until then an error still has its proper status.
    :param log_stats: log a line for each request to a model, with where its time went.
    :param otel: OTLP collector that traces are sent to (``http://host:4318``); ``None``: none are made.
    :param drain_s: after SIGTERM, how long running requests may go on.
    :param load_wait_s: how long a request waits for a model that is loaded on demand, before it is answered 503.
    :param idle_unload_s: seconds without a request or a session after which such a model is unloaded; ``None``: never.
    :param max_loaded: most of them loaded at once; the one used longest ago makes room.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    api_keys: Path | None = None
    max_key_requests: int | None = None
    key_requests_per_minute: int | None = None
    cors: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    playground: bool = True
    root_path: str = ""
    max_body_bytes: int = 64 * MIB
    max_head_bytes: int = 64 * 1024
    head_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    max_messages: int = 4096
    max_text_chars: int = 4_000_000
    max_inputs: int = 2048
    max_choices: int = 128
    max_files: int = 64
    max_kwargs_bytes: int = MIB
    max_file_bytes: int = 64 * MIB
    max_pixels: int = 50_000_000
    max_video_pixels: int = 1 << 30
    max_video_frames: int = 768
    max_video_s: float = 7200.0
    max_audio_s: float = 7200.0
    max_decoded_bytes: int = 4096 * MIB
    allow_remote_media: bool = False
    media_hosts: tuple[str, ...] = ()
    fetch_timeout_s: float = 20.0
    max_fetch_redirects: int = 5
    media_processes: int = 0
    media_timeout_s: float = 60.0
    max_decoder_memory_bytes: int = 2048 * MIB
    max_media_waiting: int = 256
    max_socket_message_bytes: int = 16 * MIB
    max_socket_requests: int = 256
    max_socket_appends: int = 256
    max_realtime_audio_s: float = 900.0
    max_realtime_items: int = 2000
    realtime_idle_s: float = 600.0
    max_images: int = 10
    state_dir: Path | None = None
    max_videos: int = 1000
    max_running_videos: int = 64
    max_videos_bytes: int = 16 * 1024 * MIB
    max_key_videos: int | None = None
    max_key_videos_bytes: int | None = None
    video_timeout_s: float = 6 * 3600.0
    videos_days: float = 1.0
    responses_file: Path | None = None
    max_stored_responses: int = 10_000
    stored_responses_days: float = 30.0
    max_speech_chars: int = 32_768
    speech_ahead: int = 2
    max_voices: int = 256
    max_voice_s: float = 60.0
    keepalive_s: float = 10.0
    log_stats: bool = False
    otel: str | None = None
    drain_s: float = 30.0
    load_wait_s: float = 60.0
    idle_unload_s: float | None = None
    max_loaded: int | None = None
