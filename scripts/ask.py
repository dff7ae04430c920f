"""Ask a server one question through the official OpenAI client and print the answer as it comes, with its speed:
``ask.py BASE_URL MODEL QUESTION``."""

from __future__ import annotations

import sys
import time

from openai import OpenAI


def main(base_url: str, model: str, question: str) -> int:
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    began = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, tokens, answer = None, 0, ""
    for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            first = first or time.perf_counter()
            answer += text
            print(text, end="", flush=True)
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    ended = time.perf_counter()
    print()
    if first is None or not answer.strip():
        print("The model gave no text.", file=sys.stderr)
        return 1
    print(f"* first token after {1000 * (first - began):.0f} ms; {speed(tokens, ended - first)}")
    return 0


def speed(tokens: int, seconds: float) -> str:
    """Tokens after the first one, over the time that they took."""
    if tokens < 2 or seconds <= 0:
        return f"{tokens} token(s)"
    return f"{tokens} tokens, {(tokens - 1) / seconds:.1f} tokens/s"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
