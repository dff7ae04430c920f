from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for hearing


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny multilingual checkpoint."""
    from mstar_asr.whisper.tiny import write

    folder = tmp_path_factory.mktemp("whisper")
    write(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_english_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mstar_asr.whisper.tiny import write_english

    folder = tmp_path_factory.mktemp("whisper-en")
    write_english(folder)
    return folder
