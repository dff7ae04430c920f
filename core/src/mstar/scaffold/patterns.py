"""What each pattern says about itself, in the question and in the files that it writes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PATTERNS", "Pattern"]

_CURL = """Then ask it:

```sh
curl localhost:8000/{route} {sent}
```"""


@dataclass(frozen=True)
class Pattern:
    """*help*: one line for who chooses. *summary*, *about*: what the family is, for its spec and its README, as
    templates. *route*, *body*: a first request, as JSON or as curl's options. *todo*: the README's steps."""

    help: str
    summary: str
    about: str
    route: str
    body: str
    todo: tuple[str, ...]

    def ask(self, key: str) -> str:
        body = self.body.replace("KEY", key)
        sent = body if body.startswith("-") else f"-H 'Content-Type: application/json' \\\n  -d '{body}'"
        return _CURL.format(route=self.route, sent=sent)


_SPEC = "`spec.py`: the licence of the weights, where they are published (pinned), the knobs with their bounds."
_TEST = "`tests/test_parity.py`: compare with the model's own reference implementation, node by node."
_GENERATE = '{"model": "KEY", "text": "Hello"}'

PATTERNS: dict[str, Pattern] = {
    "causal-lm": Pattern(
        help="a prompt goes in, tokens come out (chat, completion)",
        summary="A causal language model.",
        about="a causal language model.",
        route="v1/chat/completions",
        body='{"model": "KEY", "messages": [{"role": "user", "content": "Hello"}]}',
        todo=(
            _SPEC,
            "`weights.py` and `nodes.py`: published names, and what your decoder does that Llama's does not.",
            _TEST,
        ),
    ),
    "encoder-decoder": Pattern(
        help="an input is read once, then tokens come out (translation, speech recognition)",
        summary="An encoder with an autoregressive decoder.",
        about="an encoder that reads a text, and a decoder that writes another one.",
        route="generate",
        body=_GENERATE,
        todo=(
            _SPEC,
            "`nodes.py`: your encoder and decoder. `model.py`: their sizes, the longest input.",
            "`processor.py`: what the encoder reads. For speech, features from the request's audio part.",
            _TEST,
        ),
    ),
    "lm-codec": Pattern(
        help="a language model writes codes, a codec plays them meanwhile (speech, music)",
        summary="A language model that speaks through a codec.",
        about="a language model that writes audio codes, and a codec that turns them into sound while it goes on.",
        route="generate",
        body=_GENERATE,
        todo=(
            _SPEC,
            "`nodes.py`: your codec. `model.py`: its rate, the left context that it needs, the windows' sizes.",
            "`processor.py`: the prompt's form (voice, language), which ids are codes.",
            _TEST,
        ),
    ),
    "denoise": Pattern(
        help="noise becomes an answer in steps (images, video, actions)",
        summary="A text-to-image denoiser.",
        about="a text encoder, a denoiser with classifier-free guidance, and a decoder to pixels.",
        route="generate",
        body=_GENERATE,
        todo=(
            _SPEC,
            "`nodes.py`: your text encoder, denoiser (its solver is `update`) and decoder.",
            "`processor.py`: the latent's shape, the seed's noise, the form of the answer.",
            _TEST,
        ),
    ),
    "transducer": Pattern(
        help="sound is read, a predictor writes tokens along its frames (streaming speech recognition)",
        summary="A transducer for speech recognition.",
        about="an encoder that reads sound, and a predictor that writes text as it walks along its frames. The server "
        "reads WAV, FLAC, Ogg, MP3, M4A and more.",
        route="generate",
        body="-F model=KEY -F files=@speech.wav",
        todo=(
            _SPEC,
            "`processor.py`: your features and your resampler.",
            "`nodes.py`: your encoder, predictor and joiner. `model.py`: their sizes, what the predictor remembers.",
            _TEST,
        ),
    ),
    "encoder-lm": Pattern(
        help="pictures or sounds go into a language model's prompt, tokens come out (chat that sees or hears)",
        summary="A language model that sees.",
        about="a vision tower, whose embeddings take the place of placeholders in a causal language model's prompt.",
        route="v1/chat/completions",
        body='{"model": "KEY", "messages": [{"role": "user", "content": "Hello"}]}',
        todo=(
            _SPEC,
            "`processor.py`: how a picture is scaled and cut up, and how many placeholders stand for it.",
            "`nodes.py`: your tower. `model.py`: its sizes; override `build` where your language model is not Llama's.",
            _TEST,
        ),
    ),
    "other": Pattern(
        help="anything else: a graph written by hand (here: a text becomes a vector)",
        summary="A text encoder: a text becomes a vector.",
        about="a text encoder. No pattern fits it, so its graph is written by hand.",
        route="generate",
        body=_GENERATE,
        todo=(
            _SPEC,
            "`model.py`: your graph. M*'s page on nodes (docs/nodes.md) tells what a node finds in a step; "
            "`mstar.testing.miniatures` has a small model of every shape.",
            "`nodes.py` and `processor.py`: what its nodes compute, what goes in and what comes out.",
            _TEST,
        ),
    ),
}
