"""A spoken question gets a spoken answer: three models of one server, asked with OpenAI's client.

    mstar serve whisper_base smollm2 kokoro
    python examples/spoken_question.py question.wav answer.wav
    python examples/spoken_question.py --ask "What is the capital of France?" answer.wav    # Kokoro asks it first

It needs ``pip install openai``; the server's machine needs espeak-ng or the extra ``mstar-tts[g2p]``. Each sentence of
the answer is spoken while the model writes the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
import wave
from collections.abc import AsyncIterator
from pathlib import Path

from openai import AsyncOpenAI

HEARS, ANSWERS, SPEAKS = "whisper_base", "smollm2", "kokoro"
RATE = 24_000
INSTRUCTIONS = "You are a voice assistant. Answer in one or two short sentences, without lists and markup."


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="[QUESTION] ANSWER", help="sound files: one to read, WAV to write"
    )
    parser.add_argument(
        "--ask", metavar="TEXT", help="the question, which is spoken first; then there is no file of it"
    )
    parser.add_argument("--server", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--key", default="none", help="if the server wants one")
    parser.add_argument("--voice", default="af_heart")
    arguments = parser.parse_args()
    if len(arguments.files) != (1 if arguments.ask else 2):
        parser.error("give a question's file and an answer's, or --ask TEXT and an answer's")
    client = AsyncOpenAI(base_url=f"{arguments.server.rstrip('/')}/v1", api_key=arguments.key)
    question = (
        ("question.wav", await say(client, arguments.ask, arguments.voice)) if arguments.ask else arguments.files[0]
    )

    began = time.perf_counter()
    heard = (await client.audio.transcriptions.create(model=HEARS, file=question, language="en")).text.strip()
    print(f"heard    {heard}")
    written: asyncio.Queue[str | None] = asyncio.Queue()
    spoken = asyncio.create_task(speak(client, written, arguments.files[-1], arguments.voice))
    async for sentence in sentences(client, heard):
        print(f"answers  {sentence}")
        written.put_nowait(sentence)
    written.put_nowait(None)
    first, seconds = await spoken
    print(f"{arguments.files[-1]}: {seconds:.1f} s of sound; the first of it {first - began:.1f} s after the question")


async def say(client: AsyncOpenAI, text: str, voice: str) -> bytes:
    """*text* as a WAV file."""
    return (await client.audio.speech.create(model=SPEAKS, voice=voice, input=text, response_format="wav")).content


async def sentences(client: AsyncOpenAI, question: str) -> AsyncIterator[str]:
    """The answer, sentence by sentence, each as soon as it is complete."""
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    stream = await client.chat.completions.create(
        model=ANSWERS, messages=messages, stream=True, temperature=0, max_tokens=80
    )
    text = ""
    async for chunk in stream:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        *complete, text = re.split(r"(?<=[.!?])\s+", text)
        for sentence in complete:
            yield sentence
    if text.strip():
        yield text.strip()


async def speak(client: AsyncOpenAI, written: asyncio.Queue[str | None], file: Path, voice: str) -> tuple[float, float]:
    """Speak what comes until ``None``, into *file*. When its first sound came, and how many seconds there are."""
    first = frames = 0.0
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        while (sentence := await written.get()) is not None:
            async with client.audio.speech.with_streaming_response.create(
                model=SPEAKS, voice=voice, input=sentence, response_format="pcm"
            ) as response:
                async for piece in response.iter_bytes():  # 16 bit; a player would take it from here
                    first = first or time.perf_counter()
                    sound.writeframesraw(piece)
                    frames += len(piece) / 2
    return first, frames / RATE


if __name__ == "__main__":
    asyncio.run(main())
