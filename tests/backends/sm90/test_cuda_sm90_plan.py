"""The plan of the few-token kernel's launches, made by the host's code with no GPU: which problems it takes, and which
units of work each of its blocks does."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from pathlib import Path

import pytest
from host_library import planning_library
from sm90_cases import LONG_ROWS, SHARES

from torch_moe_ops.backends.sm90 import choice
from torch_moe_ops.core.kernel_facts import SM90_FORMATS

HOPPER = (132, 227 * 1024)
# top_k, experts, hidden, inter
QWEN3, GPT_OSS, DEEPSEEK, MIXTRAL = (8, 128, 2048, 768), (4, 128, 2880, 2880), (8, 256, 7168, 2048), (2, 8, 4096, 14336)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planning_library("sm90_plan_host.cu", tmp_path_factory.mktemp("plan"))


# sms, shared memory, tokens, top_k, experts, hidden, inter, gated, dynamic scales, format: after those of
# 4 and 8 bits few::Codes; whether rows may be gathered; whether hidden states are float16
Layer = ctypes.c_int * 12
OF_CODES = range(len(SM90_FORMATS), len(SM90_FORMATS) + 10)
FP8_ROWS, FP8_GROUPS, BESIDE_FP8, BESIDE_MXFP8, PACKED, MXFP8, BOTH_MXFP8 = OF_CODES[:7]
ROWS_BESIDE_16, BLOCKS_BESIDE_16, INT8 = OF_CODES[7:]
OF_4_BITS = range(len(SM90_FORMATS) - 3)
FORMATS = ",".join(map(str, (*OF_4_BITS, *OF_CODES)))


def parts(
    library: Path,
    layer: tuple[int, int, int, int],
    tokens: int,
    dynamic: bool = False,
    weights: int = 0,
    half: bool = False,
) -> int:
    """Of a unit that blocks share; 1: they share none, 0: the kernel does not take the layer."""
    top_k, experts, hidden, inter = layer
    fields = Layer(*HOPPER, tokens, top_k, experts, hidden, inter, 1, dynamic, weights, 0, half)
    found: int = ctypes.CDLL(str(library)).plan_few(fields)
    assert found >= 0, (layer, tokens, found)
    return found


@pytest.mark.parametrize(
    ("layer", "most"),
    [(QWEN3, 8), (GPT_OSS, 4), (DEEPSEEK, 3), (MIXTRAL, 4)],
    ids=["qwen3", "gpt-oss", "dsv3", "mixtral"],
)
def test_the_tokens_that_the_documentation_names(library: Path, layer: tuple[int, int, int, int], most: int) -> None:
    assert [parts(library, layer, tokens) > 0 for tokens in range(1, 9)] == [tokens <= most for tokens in range(1, 9)]


@pytest.mark.parametrize(
    ("layer", "most"),
    [(QWEN3, 8), (GPT_OSS, 4), (DEEPSEEK, 3), (MIXTRAL, 4)],
    ids=["qwen3", "gpt-oss", "dsv3", "mixtral"],
)
@pytest.mark.parametrize("form", ("int4_zero_per32", "int4_float"))
def test_as_many_tokens_with_more_bytes_of_scales(
    library: Path, form: str, layer: tuple[int, int, int, int], most: int
) -> None:
    """Stages have fewer tiles, so that they take no more room."""
    weights = list(SM90_FORMATS).index(form)
    assert [parts(library, layer, n, False, weights) > 0 for n in range(1, 9)] == [n <= most for n in range(1, 9)]


def gathers(
    library: Path, layer: tuple[int, int, int, int], tokens: int, weights: int = 0, dynamic: bool = False
) -> int:
    """For how many rows there is room; 0: none are gathered."""
    top_k, experts, hidden, inter = layer
    fields = Layer(*HOPPER, tokens, top_k, experts, hidden, inter, 1, dynamic, weights, 1)
    found: int = ctypes.CDLL(str(library)).gathers_few(fields)
    assert found >= 0
    return found


@pytest.mark.parametrize("weights", OF_4_BITS, ids=list(SM90_FORMATS)[:-3])
@pytest.mark.parametrize(
    ("layer", "most"),
    [
        (QWEN3, 32), (DEEPSEEK, 32), (MIXTRAL, 0), ((8, 32, 4096, 1536), 32), ((10, 128, 2048, 512), 25),
        ((1, 512, 2048, 512), 32), ((1, 513, 2048, 512), 32), ((8, 513, 2048, 512), 0),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_are_gathered(library: Path, layer: tuple[int, int, int, int], most: int, weights: int) -> None:
    """Those of no more tokens than the kernel without grid barriers takes are all there."""
    for tokens in range(1, 40):
        plain = parts(library, layer, tokens, weights=weights) > 0
        assert (gathers(library, layer, tokens, weights) > 0) == (tokens <= most and not plain), tokens
    assert not gathers(library, layer, 16, dynamic=True)


@pytest.mark.parametrize("shape", (*SHARES, *LONG_ROWS), ids=str)
def test_shares_that_a_gpu_runs_gather_rows(library: Path, shape: tuple[int, ...]) -> None:
    local, _, top_k, hidden, inter, tokens = shape
    rows = [gathers(library, (top_k, local, hidden, inter), tokens, weights) for weights in OF_4_BITS]
    assert rows[:2] == ([4, 4] if hidden == 8192 else [8, 8]), "of NVFP4 and MXFP4"
    assert all(rows)


def test_tokens_of_the_rules_are_gathered(library: Path) -> None:
    """What Python gives the kernel for certain, the kernel takes."""
    draw = random.Random(0)
    for _ in range(300):
        top_k, local, ranks = draw.randint(1, 22), draw.randint(1, 512), draw.choice((1, 2, 4, 64))
        hidden, inter = 32 * draw.randint(2, draw.choice((64, 256))), 16 * draw.randint(2, draw.choice((48, 400)))
        for tokens in range(9, choice.gathered_max_tokens(ranks * local, top_k, hidden, inter, local) + 1):
            assert gathers(library, (top_k, local, hidden, inter), tokens), (top_k, local, hidden, inter, tokens)


@pytest.mark.parametrize(
    "weights",
    (FP8_ROWS, FP8_GROUPS, MXFP8, BOTH_MXFP8, ROWS_BESIDE_16, BLOCKS_BESIDE_16, INT8),
    ids=("rows", "blocks", "mxfp8", "mxfp8-a8", "rows-a16", "blocks-a16", "int8"),
)
@pytest.mark.parametrize(
    ("layer", "most"),
    [(QWEN3, 8), (GPT_OSS, 4), (DEEPSEEK, 4), (MIXTRAL, 4)],
    ids=["qwen3", "gpt-oss", "dsv3", "mixtral"],
)
def test_as_many_tokens_with_weights_of_8_bits(
    library: Path, layer: tuple[int, int, int, int], most: int, weights: int
) -> None:
    assert [parts(library, layer, n, False, weights) > 0 for n in range(1, 10)] == [n <= most for n in range(1, 10)]


@pytest.mark.parametrize("weights", (0, 1, MXFP8, ROWS_BESIDE_16, BLOCKS_BESIDE_16))
@pytest.mark.parametrize(
    ("layer", "of_4_bits", "of_8_bits"),
    [(QWEN3, 8, 8), (GPT_OSS, 7, 8), (DEEPSEEK, 3, 3), (MIXTRAL, 4, 5)],
    ids=["qwen3", "gpt-oss", "dsv3", "mixtral"],
)
def test_as_many_tokens_of_float16(
    library: Path, layer: tuple[int, int, int, int], of_4_bits: int, of_8_bits: int, weights: int
) -> None:
    """Of which each is two rows: stages are short, where they would leave no room."""
    most = of_4_bits if weights in OF_4_BITS else of_8_bits
    assert [parts(library, layer, n, False, weights, half=True) > 0 for n in range(1, 10)] == [
        n <= most for n in range(1, 10)
    ]


@pytest.mark.parametrize(
    ("layer", "most"),
    [(QWEN3, 16), (GPT_OSS, 4), (DEEPSEEK, 3), (MIXTRAL, 4)],
    ids=["qwen3", "gpt-oss", "dsv3", "mixtral"],
)
def test_as_many_tokens_beside_fp8_activations(library: Path, layer: tuple[int, int, int, int], most: int) -> None:
    """A row's scale takes no room, and a long intermediate, Mixtral's, is cut as beside 16-bit activations."""
    found = [parts(library, layer, tokens, True, BESIDE_FP8) > 0 for tokens in range(1, 19)]
    assert found == [tokens <= most for tokens in range(1, 19)]


def test_more_than_eight_tokens_beside_fp8_activations_need_as_many_experts_as_slots(library: Path) -> None:
    found = [parts(library, (8, 96, *QWEN3[2:]), tokens, True, BESIDE_FP8) > 0 for tokens in range(1, 19)]
    assert found == [tokens <= 12 for tokens in range(1, 19)]


@pytest.mark.parametrize(
    ("layer", "most"), [(QWEN3, 16), (GPT_OSS, 12), (DEEPSEEK, 5)], ids=["qwen3", "gpt-oss", "dsv3"]
)
def test_packed_takes_more_tokens(library: Path, layer: tuple[int, int, int, int], most: int) -> None:
    found = [parts(library, layer, tokens, True, PACKED) > 0 for tokens in range(1, 19)]
    assert found == [tokens <= most for tokens in range(1, 19)]


# Units of GEMM1 are left when 132 blocks have as many: 60 of 192, 96 of 360, 116 of 512, 104 of 896, 4 of 136, 16 of 16;
# of the last one, a part would have two tiles.
@pytest.mark.parametrize(
    ("layer", "want"),
    [
        (QWEN3, 2), (GPT_OSS, 1), (DEEPSEEK, 1), (MIXTRAL, 1),
        ((8, 128, 2048, 544), 4), ((2, 8, 1024, 256), 4), ((2, 8, 512, 256), 2), ((2, 8, 256, 256), 1),
    ],
    ids=str,
)  # fmt: skip
def test_one_token_s_blocks_end_together(library: Path, layer: tuple[int, int, int, int], want: int) -> None:
    assert parts(library, layer, 1) == want
    assert parts(library, layer, 2) <= 1
    assert parts(library, layer, 1, dynamic=True) <= 1  # sums are exchanged, not finished values


# 960, 3072 and 288 units, of which 36, 36 and 24 are left. Slots are more than lanes: other code sorts and deals.
@pytest.mark.parametrize("layer", [(40, 128, 2048, 768), (128, 128, 2048, 768), (36, 256, 512, 256)], ids=str)
def test_no_units_are_shared_where_slots_are_more_than_a_warp(library: Path, layer: tuple[int, int, int, int]) -> None:
    assert parts(library, layer, 1) == 1


# Each tile of K of each row tile of each entry once, by the code of the kernel; all experts local or not.
DEALS = """
import ctypes, random, sys
deal = ctypes.CDLL(sys.argv[1]).deal_few
draw, formats = random.Random(int(sys.argv[2])), [int(number) for number in sys.argv[3].split(",")]
found = [0, 0, 0]
for _ in range(6000):
    sizes = [32 * draw.randint(1, draw.choice((40, 224))), 16 * draw.randint(1, draw.choice((40, 300)))]
    tokens, top_k = draw.choice((1, 1, 1, draw.randint(1, 8), draw.randint(9, 32))), draw.randint(1, draw.choice((10, 32, 128)))
    problem = (tokens, top_k, draw.randint(top_k, 512), *sizes, int(draw.random() < 0.8), int(draw.random() < 0.2),
               draw.choice(formats), draw.randint(0, 1), int(draw.random() < 0.3))
    sms = draw.choice((132, 132, 78, 114, 1, 2, 31, 33, 160, 200))
    shares = deal((ctypes.c_int * 12)(sms, draw.choice((232448, 232448, 101376)), *problem))
    assert shares >= 0, (sms, problem)
    found[shares] += 1
print(*found)
"""


@pytest.mark.parametrize("seed", range(3))
def test_every_tile_is_multiplied_once(library: Path, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEALS, str(library), str(seed), FORMATS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert min(map(int, done.stdout.split())) > 300


# Of a green context, or another share of the GPU: results must not depend on how many there are.
@pytest.mark.parametrize("layer", [QWEN3, GPT_OSS, DEEPSEEK, MIXTRAL], ids=["qwen3", "gpt-oss", "dsv3", "mixtral"])
def test_any_number_of_multiprocessors(library: Path, layer: tuple[int, int, int, int]) -> None:
    top_k, experts, hidden, inter = layer
    functions = ctypes.CDLL(str(library))
    for sms in range(1, 133):
        for tokens in (1, 2, 3):
            fields = Layer(sms, HOPPER[1], tokens, top_k, experts, hidden, inter, 1, 0, 0)
            assert functions.plan_few(fields) > 0, (sms, tokens)
            assert functions.deal_few(fields) > 0, (sms, tokens)


# In a process of its own: a plan that divides by what was never written ends it.
PROGRAM = """
import ctypes, random, sys
plan = ctypes.CDLL(sys.argv[1]).plan_few
draw, formats = random.Random(int(sys.argv[2])), [int(number) for number in sys.argv[3].split(",")]
taken = 0
for _ in range(4000):
    sizes = [32 * draw.randint(1, 320), 16 * draw.randint(1, 1200)]
    top_k = draw.randint(1, draw.choice((22, 128)))
    problem = (draw.randint(0, draw.choice((9, 40))), top_k, draw.randint(top_k, 512), *sizes)
    gpu = draw.choice(((132, 232448), (78, 232448), (114, 232448), (132, 101376)))
    more = draw.randint(0, 1), draw.randint(0, 1), draw.choice(formats), draw.randint(0, 1), int(draw.random() < 0.3)
    found = plan((ctypes.c_int * 12)(*gpu, *problem, *more))
    assert found >= 0, problem
    taken += found > 0
print(taken)
"""


@pytest.mark.parametrize("seed", range(3))
def test_every_plan_fits_or_is_none(library: Path, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library), str(seed), FORMATS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert 200 < int(done.stdout) < 3800


def test_sums_that_the_exchange_has_no_room_for(library: Path) -> None:
    assert parts(library, DEEPSEEK, 8) == 0
