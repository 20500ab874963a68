"""quantization="int8" and "int4": what they cost in quality, and that company changes no bit of a row."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slotline
from slotline.config import EngineConfig
from slotline.errors import ConfigError
from slotline.plugins.torch_backend import int4, int8
from slotline.plugins.torch_backend.backend import TorchBackend
from slotline.plugins.torch_backend.int4 import Int4Linear
from slotline.plugins.torch_backend.int8 import FbgemmProduct, Int8Linear, OnednnProduct, first_exact
from slotline.plugins.torch_backend.linear import linear_kinds
from slotline.testing import Work

TEXT = Path(__file__).parents[1] / "data" / "perplexity.txt"
SHAPES = [(576, 960), (1536, 576), (40, 97), (7, 3)]
CPU = {"backend": "torch", "device": "cpu", "threads": 1}


def rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Return rows of very different size, one channel of which is a hundred times the rest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator) * torch.logspace(-3, 3, count)[:, None]
    x[:, width // 2] *= 100
    return x


def layer(kind, inputs: int, outputs: int, *, biased: bool = True):
    generator = torch.Generator().manual_seed(inputs + outputs)
    weight = 0.1 * torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    return kind(weight, bias), weight, bias


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "limit"), [(Int8Linear, 0.01), (Int4Linear, 0.15)])
def test_results_are_close_to_the_plain_product(kind, limit, shape):
    linear, weight, bias = layer(kind, *shape)
    for count in (1, 3, 40):
        x = rows(count, shape[0])
        error = linear(x) - bias - x @ weight.t()
        assert (error.norm(dim=1) <= limit * (x @ weight.t()).norm(dim=1) + 1e-6 * bias.norm()).all()


def test_two_digits_leave_what_the_weights_cost():
    """With weights that int8 holds exactly, what remains is the rounding of the activations."""
    weight = torch.randint(-126, 127, (64, 576), generator=torch.Generator().manual_seed(1)).float()
    weight[:, 0] = 127
    x = rows(9, 576)
    error = Int8Linear(weight)(x) - x @ weight.t()
    assert (error.norm(dim=1) < 5e-4 * (x @ weight.t()).norm(dim=1)).all()


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
@pytest.mark.parametrize("threads", [1, 2])
def test_company_changes_no_bit_of_a_row(kind, threads):
    layers = [layer(kind, *shape)[0] for shape in SHAPES]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    @given(st.sampled_from(range(len(SHAPES))), st.integers(1, 70), st.integers(0, 3), st.data())
    @settings(max_examples=60)
    def check(which, count, seed, data):
        x = rows(count, SHAPES[which][0], seed)
        chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count))
        assert torch.equal(layers[which](x)[chosen], layers[which](x[chosen]))

    try:
        check()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_zeros_give_the_bias_and_nan_stays_in_its_row(kind):
    linear, _, bias = layer(kind, 64, 32)
    x = rows(5, 64)
    clean = linear(x)
    x[1] = 0
    x[2, 7] = float("nan")
    x[3, 9] = float("inf")
    y = linear(x)
    assert torch.equal(y[1], bias)
    assert not y[2].isfinite().any() and not y[3].isfinite().any()
    assert torch.equal(y[[0, 4]], clean[[0, 4]])


@pytest.mark.parametrize("kind", [FbgemmProduct, OnednnProduct])
@pytest.mark.parametrize("levels", [127, 63])
def test_products_of_either_kind_give_the_same_layer(monkeypatch, kind, levels):
    if not int8._exact(kind, levels):
        pytest.skip("this processor saturates")
    expected, weight, _ = layer(Int8Linear, 100, 60, biased=False)
    monkeypatch.setattr(int8, "_NARROW", ((kind, levels),))
    x = rows(6, 100)
    assert torch.allclose(
        Int8Linear(weight)(x), expected(x), rtol=1e-3, atol=1e-3 * float((x @ weight.t()).abs().max())
    )


class Saturating(FbgemmProduct):
    """A processor that adds pairs of products in 16 bits."""

    def __init__(self, weight, scale, levels) -> None:
        super().__init__(weight, scale, levels)
        self.weight, self.zero = weight.float(), levels + 1

    def __call__(self, x):
        pairs = ((x + self.zero)[:, None] * self.weight).unflatten(-1, (-1, 2)).sum(-1)
        return pairs.clamp(-(2**15), 2**15 - 1).sum(-1) - self.zero * self.weight.sum(1)


def test_sums_that_saturate_are_found_out_and_seven_bits_chosen():
    candidates = ((Saturating, 127), (Saturating, 63), (FbgemmProduct, 127))
    assert first_exact(candidates) == (Saturating, 63)


def test_a_build_without_the_operators_says_so(monkeypatch):
    def missing(*_args):
        raise RuntimeError("no such operator")

    with pytest.raises(ConfigError, match=r"'int8'.*leave quantization out"):
        first_exact(((missing, 127),))
    monkeypatch.setattr(int4, "_pack", missing)
    int4._check.cache_clear()
    with pytest.raises(ConfigError, match=r"'int4'.*use int8"):
        Int4Linear(torch.ones(16, 32))
    int4._check.cache_clear()


def test_int4_keeps_what_a_file_of_four_bits_holds():
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 16, (48, 64), generator=generator)
    values.view(48, -1, 32)[..., 0], values.view(48, -1, 32)[..., 1] = 0, 15
    scale = torch.rand(48, 2, 1, generator=generator).bfloat16().float() / 16
    weight = ((values.view(48, 2, 32) - 8) * scale).view(48, 64)
    found, scales = int4.quantise(weight)
    assert torch.equal(found, values.to(torch.int32)) and torch.equal(scales[..., 0].t().float(), scale[..., 0])


def test_the_backend_lists_them_and_engines_refuse_others(tiny, load):
    assert TorchBackend().capabilities.quantizations == ("int8", "int4")
    with pytest.raises(ConfigError, match="quantization is 'int3'; this backend has: int8, int4"):
        slotline.loading.check_config(EngineConfig.of(quantization="int3"), TorchBackend())
    for name in ("int8", "int4"):
        with pytest.raises(ConfigError, match=rf"quantization is '{name}'.*on a CPU only; use device cpu"):
            linear_kinds(torch.device("cuda"), torch.bfloat16, name)


@pytest.mark.parametrize("tied", [True, False])
def test_the_memory_report_says_what_they_save(tiny, load, tied):
    _, model = tiny(tie_word_embeddings=tied, hidden_size=96, intermediate_size=256, num_hidden_layers=4)
    sizes = {q: load(model, quantization=q).info.memory_report["weights"] for q in (None, "int8", "int4")}
    matrices = 4 * (96 * (48 + 2 * 16) + 48 * 96 + 3 * 96 * 256)
    head = 97 * 96
    plain = sizes[None] - 4 * (matrices + head)
    assert sizes["int8"] - plain == pytest.approx(matrices + head, rel=0.15)
    assert sizes["int4"] - plain == pytest.approx(matrices * 5 / 8 + head, rel=0.15)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_deterministic_mode_holds_with_them(tiny, load, quantization):
    _, model = tiny(attention_bias=True)
    driver = load(model, quantization=quantization, deterministic=True)
    prompts = [list(range(3 + 9 * i)) for i in range(5)]

    def last(result, i):
        return result.tokens[i, 0], result.logprobs.slice(i, i + 1).values.tobytes()

    alone = []
    for prompt in prompts:
        driver.admit(0, prompt, logprobs=20, max_tokens=4)
        alone.append([last(driver.step(Work(0, n)), 0) for n in (len(prompt), 1, 1)])
        driver.end(0)
    for slot, prompt in enumerate(prompts):
        driver.admit(slot, prompt, logprobs=20, max_tokens=4)
    driver_steps = [driver.step(*[Work(s, n or len(p)) for s, p in enumerate(prompts)]) for n in (0, 1, 1)]
    assert [[last(step, i) for step in driver_steps] for i in range(5)] == alone


def perplexity(**options) -> float:
    with slotline.pipeline(max_slots=4, kv_cache_tokens=4096, **CPU, **options) as pipe:
        scores = pipe.score(TEXT.read_text(encoding="utf-8").strip().split("\n\n"))
    values = [value for score in scores for value in score.logprobs[1:]]
    assert len(values) > 800
    return math.exp(-sum(values) / len(values))


@pytest.mark.timeout(600)
def test_perplexity_stays_within_two_percent():
    plain = perplexity()
    assert perplexity(quantization="int8") / plain == pytest.approx(1, abs=0.02)
    # This checkpoint's matrices come from a 4-bit file, so int4 keeps them.
    assert perplexity(quantization="int4") / plain == pytest.approx(1, abs=0.02)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
async def test_the_real_model_answers_alike_alone_and_in_company(quantization, mixed_prompts):
    params = slotline.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    options = {"max_slots": 8, "kv_cache_tokens": 8192, "prefix_caching": False, "quantization": quantization, **CPU}
    async with slotline.Engine.open(**options) as engine:
        paris = await engine.generate("The capital of France is", params)
        assert paris.text.startswith(" Paris")
        alone = [(await engine.generate(prompt, params)).token_ids for prompt in mixed_prompts[:8]]
        handles = [await engine.submit([prompt], params) for prompt in mixed_prompts[:8]]
        together = [(await handle.completions())[0].token_ids for handle in handles]
    assert together == alone
