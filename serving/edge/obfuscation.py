"""Padding of streamed frames (``stream_options.include_obfuscation``).

Whoever watches an encrypted connection sees how long its frames are, and from the lengths of tokens can guess text.
Padding is of a fixed length for a length of content, so that watching many answers averages nothing out, and of random
characters, so that a compressing proxy does not undo it.
"""

import base64
import os
from collections.abc import Callable

import orjson

MIN_BYTES = 32
"""Holds one token: of SmolLM2's 49,152 tokens 71 are longer, runs of spaces for the most part."""
MAX_STEP_BYTES = 4096


def obfuscation(*content: object, random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """Random ``A-Z a-z 0-9 - _`` that brings content up to 32, 64, … 4,096 bytes, then to a multiple of 4,096.

    content: the parts of a frame whose size depends on its tokens; they count as JSON.
    """
    size = sum(len(orjson.dumps(part)) for part in content)
    step = min(MAX_STEP_BYTES, max(MIN_BYTES, 1 << (size - 1).bit_length()))
    missing = -size % step
    return base64.urlsafe_b64encode(random_bytes(missing)).decode()[:missing]
