"""Which samples are held out, which are taken of a weighted source, and what they share.

Everything here follows from ids and tokens alone, never from the order of the rows. A digest is
64 bits: among a million samples two unlike ones share it in one of thirty million data sets.
"""

import hashlib
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

ANSWER_NUMBER = re.compile(r"#\d+$")  # data.regenerate numbers the answers of one prompt
# ShareGPT cuts a conversation into parts abcDe12_0, abcDe12_1: seven letters or digits, then the
# part. Names in words, as in seed_task_35, must stay apart: one of the seven is no small letter.
SHAREGPT_PART = re.compile(r"(?=.{0,6}[A-Z0-9])([A-Za-z0-9-]{7})_\d+")
SPLIT, TAKE = b"", b"take:"  # two draws from one id must not be one
Digests = NDArray[np.int64]  # [S]
Flags = NDArray[np.bool_]  # [S]
Places = NDArray[np.float64]  # [S] in [0, 1)
Labels = NDArray[np.int64]


def base_id(name: str) -> str:
    """The conversation's id: without the number of the answer or of the part."""
    name = ANSWER_NUMBER.sub("", name)
    part = SHAREGPT_PART.fullmatch(name)
    return part[1] if part else name


def place(base: str, salt: bytes = SPLIT) -> float:
    """A number in [0, 1) that depends on the id alone."""
    digest = hashlib.sha256(salt + base.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6]) / (1 << 48)


def is_taken(name: str, weight: float) -> bool:
    """Whether a weighted source gives this conversation: ``weight`` of its base ids are."""
    return weight >= 1 or place(base_id(name), TAKE) < weight


def digest_of(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)


def prompt_digest(tokens: ArrayLike) -> int:
    """Of the token ids before an answer: equal prompts have equal ones."""
    return digest_of(np.asarray(tokens, np.int32).tobytes())


@dataclass(frozen=True)
class Split:
    """What was decided for each sample."""

    held_out: Flags
    moved: int  # samples that their id holds out and their prompt, seen in training, does not
    overlap: int  # held-out samples whose prompt is trained on all the same


def split(bases: Digests, places: Places, prompts: Digests, share: float) -> Split:
    """Hold out about ``share`` of the conversations, and none whose prompt is trained on.

    A conversation's place depends on its id alone, so it stays where it is when data is added.
    Conversations that share a prompt, token for token, form a group; a group is held out when each
    of its conversations falls below ``share``. At least one group is held out and one is not.
    Where all samples are one group, its conversations are split by id alone, and those that
    overlap are counted; a single conversation is not held out.
    """
    groups = connected(bases, prompts)  # [S]
    if not groups.any():
        groups = np.unique(bases, return_inverse=True)[1]
    count = int(groups.max()) + 1
    asked = places < share
    held = np.ones(count, np.bool_)
    held[groups[~asked]] = False
    moved = int((asked & ~held[groups]).sum())
    if count == 1:
        held[:] = False
    elif not held.any():
        first = np.ones(count)
        np.minimum.at(first, groups, places)
        small = np.bincount(groups, minlength=count) * 2 <= len(groups)  # one of two groups is
        held[np.where(small, first, 1.0).argmin()] = True
    elif held.all():
        last = np.zeros(count)
        np.maximum.at(last, groups, places)
        held[last.argmax()] = False
    held_out = held[groups]
    overlap = int(np.isin(prompts[held_out], prompts[~held_out]).sum())
    return Split(held_out, moved, overlap)


def connected(bases: Digests, prompts: Digests) -> Labels:
    """The group of each sample: those of one id or of one prompt are together, at any remove."""
    _, base = np.unique(bases, return_inverse=True)
    _, prompt = np.unique(prompts, return_inverse=True)
    label = np.arange(int(base.max()) + 1)  # of each id; the smallest one wins
    while True:
        before = label
        of_prompt = np.full(int(prompt.max()) + 1, len(label))
        np.minimum.at(of_prompt, prompt, label[base])
        label = label.copy()
        np.minimum.at(label, base, of_prompt[prompt])
        if np.array_equal(label, before):
            return np.unique(label[base], return_inverse=True)[1]


def copies(digests: Digests) -> Flags:
    """Which samples equal an earlier one, token for token and mask for mask."""
    _, first = np.unique(digests, return_index=True)
    again = np.ones(len(digests), np.bool_)
    again[first] = False
    return again
