"""Masks by hand: windows, chunks and branches; and the verifiers that no mask can serve."""

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3NextConfig,
)
from transformers import PreTrainedConfig as Config

from conf.schema import ConfigError
from models.branches import Branches
from models.masks import Reach, masks_of, reaches_of, sight_of

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128}


def drawn(seen: Tensor) -> list[str]:
    """[T, S] -> a line a query, x where it sees."""
    return ["".join("x" if cell else "." for cell in row) for row in seen.tolist()]


def mask(lengths: list[int], steps: int, reach: Reach, branches: Branches | None = None) -> Tensor:
    size = max(lengths) + steps
    found = masks_of(sight_of(torch.tensor(lengths), steps, size, branches), [reach])
    assert isinstance(found, Tensor) and found.shape == (len(lengths), 1, steps, size)
    return found[:, 0]


def test_a_line_sees_what_is_committed_and_itself():
    first, second = mask([4, 2], 3, Reach("full_attention"))
    assert drawn(first) == ["xxxxx..", "xxxxxx.", "xxxxxxx"]
    assert drawn(second) == ["xxx....", "xxxx...", "xxxxx.."]


def test_a_window_counts_the_token_itself():
    first, second = mask([4, 2], 3, Reach("sliding_attention", window=3))
    assert drawn(first) == ["..xxx..", "...xxx.", "....xxx"]
    assert drawn(second) == ["xxx....", ".xxx...", "..xxx.."]


def test_a_chunk_forgets_all_before_it():
    first, second = mask([4, 2], 3, Reach("chunked_attention", chunk=3))
    assert drawn(first) == ["...xx..", "...xxx.", "......x"]
    assert drawn(second) == ["xxx....", "...x...", "...xx.."]


FORKS = Branches.of_parents(torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3]]), 4)  # two forks, one line


def test_a_branch_sees_its_ancestors():
    first, second = mask([2, 3], 5, Reach("full_attention"), FORKS)
    assert drawn(first) == ["xxx.....", "xxxx....", "xxx.x...", "xxxx.x..", "xxx.x.x."]
    assert drawn(second) == drawn(mask([2, 3], 5, Reach("full_attention"))[1])


def test_windows_and_chunks_count_positions_and_not_rows():
    """Node 4 lies four rows behind the root and two positions."""
    window = mask([2, 3], 5, Reach("sliding_attention", window=3), FORKS)[0]
    assert drawn(window) == ["xxx.....", ".xxx....", ".xx.x...", "..xx.x..", "..x.x.x."]
    chunk = mask([2, 3], 5, Reach("chunked_attention", chunk=3), FORKS)[0]
    assert drawn(chunk) == ["xxx.....", "...x....", "....x...", "...x.x..", "....x.x."]


def test_one_mask_for_all_layers_or_one_a_kind():
    sight = sight_of(torch.tensor([4]), 1, 5, None)
    full, window = Reach("full_attention"), Reach("sliding_attention", window=2)
    assert isinstance(masks_of(sight, [window]), Tensor)
    assert isinstance(masks_of(sight, [full, Reach("sliding_attention")]), Tensor)
    both = masks_of(sight, [full, window])
    assert isinstance(both, dict)
    assert {kind: drawn(found[0, 0]) for kind, found in both.items()} == {
        "full_attention": ["xxxxx"],
        "sliding_attention": ["...xx"],
    }


def test_how_far_the_layers_of_a_config_see():
    full = Reach("full_attention")
    assert reaches_of(LlamaConfig(**SIZES), 64) == [full]
    assert reaches_of(MistralConfig(sliding_window=None, **SIZES), 64) == [full]
    sliding = MistralConfig(sliding_window=32, **SIZES)
    assert reaches_of(sliding, 64) == [Reach("sliding_attention", window=32)]
    assert reaches_of(sliding, 32) == [Reach("sliding_attention")]  # never met
    mixed = reaches_of(Gemma2Config(sliding_window=16, **SIZES), 64)
    assert mixed == [Reach("sliding_attention", window=16), full]
    chunked = Llama4TextConfig(attention_chunk_size=8, floor_scale=64, **SIZES)
    assert reaches_of(chunked, 64) == [Reach("chunked_attention", chunk=8), full]


def test_refuses_what_no_mask_can_serve():
    class OwnConfig(Gemma2Config):
        """As of code that comes with the weights."""

    def refused(config: Config, why: str) -> None:
        config._name_or_path = "here/small"
        with pytest.raises(ConfigError, match=f"verifier.path=here/small: {why}"):
            reaches_of(config, 64)

    refused(Qwen3NextConfig(**SIZES), r"has linear_attention layers; .* take another verifier")
    refused(GPT2Config(), r"its positions are not rotary; .* such as Llama")
    scaled = Llama4TextConfig(attention_chunk_size=8, floor_scale=63, **SIZES)
    refused(scaled, r"scales attention by the position from 63 tokens on.*shorter prompts")
    stray = MistralConfig(sliding_window=16, layer_types=["full_attention"] * 4, **SIZES)
    refused(stray, r".*has layer_types, which MistralConfig does not read; remove them")
    refused(OwnConfig(sliding_window=16, **SIZES), "its own code .* within the window")
    assert len(reaches_of(OwnConfig(sliding_window=64, **SIZES), 64)) == 2
    flash = LlamaConfig(**SIZES)
    flash._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"verifier.attention=flash.*take verifier.attention"):
        reaches_of(flash, 64)
