"""Greedy tokens and log-probabilities equal those of transformers on the same weights."""

import numpy as np
import pytest
import torch

from slotline.testing import Work

SHAPES = {
    "grouped, untied": {},
    "multi-head, tied": {"num_key_value_heads": 6, "tie_word_embeddings": True},
    "multi-query, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "multi-query, untied, biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 32, "rope_theta": 500.0},
}
PROMPTS = [[5], [1, 2, 3], list(range(40)), [7, 8] * 50, [96] * 17]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_tiny_models_answer_like_transformers(tiny, load, generate, shape, deterministic):
    hf, model = tiny(**SHAPES[shape])
    driver = load(model, deterministic=deterministic)
    for row, prompt in enumerate(PROMPTS):
        driver.admit(row, prompt, max_tokens=24)
    steps = [driver.step(*(Work(row, len(prompt)) for row, prompt in enumerate(PROMPTS)))]
    steps += [driver.step(*(Work(row, 1) for row in range(len(PROMPTS)))) for _ in range(23)]
    for row, prompt in enumerate(PROMPTS):
        assert [int(step.tokens[row, 0]) for step in steps] == generate(hf, prompt, 24), f"prompt {row}"


def test_chunked_prefill_beside_decoding_rows(tiny, load, generate):
    hf, model = tiny()
    driver = load(model, block_size=32)
    long, short = list(range(90)), [3, 1, 4]
    driver.admit(0, short)
    driver.admit(1, long)
    chunks = [(30, False), (1, False), (33, False), (26, True), *[(1, True)] * 8]
    steps = [driver.step(Work(1, n, sample), Work(0, 1 if i else 3)) for i, (n, sample) in enumerate(chunks)]
    assert [int(step.tokens[1, 0]) for step in steps] == generate(hf, short, 12)
    assert [int(step.tokens[0, 0]) for step in steps[3:]] == generate(hf, long, 9)


def test_prompt_logprobs_are_the_model_s(tiny, load):
    hf, model = tiny()
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, 97, 70)]
    with torch.inference_mode():
        expected = torch.log_softmax(hf(torch.tensor([prompt])).logits[0].float(), -1).numpy()
    for chunks in ([70], [1, 16, 33, 20]):
        driver = load(model)
        driver.admit(0, prompt, prompt_logprobs=3)
        results = [driver.step(Work(0, n, sample=i == len(chunks) - 1)) for i, n in enumerate(chunks)]
        position = 0
        for result in results:
            for i in range(int(result.prompt_counts[0])):
                entry = result.prompt_logprobs.slice(i, i + 1)
                np.testing.assert_allclose(entry.values, expected[position, entry.ids], atol=2e-4)
                assert entry.ids[0] == prompt[position + 1]
                assert entry.ranks[0] == 1 + (expected[position] > expected[position, entry.ids[0]]).sum()
                position += 1
        assert position == 69  # position 0 has no log-probability


def test_sliding_window(tiny, load, generate):
    """Against Mistral, which is Llama with a window."""
    from dataclasses import replace

    from transformers import MistralConfig, MistralForCausalLM

    hf, model = tiny()
    config = MistralConfig(
        **{**hf.config.to_dict(), "model_type": "mistral", "architectures": None, "sliding_window": 12}
    )
    mistral = MistralForCausalLM(config).eval()
    mistral.load_state_dict(hf.state_dict())
    mistral.generation_config.eos_token_id = None
    model.checkpoint.config = replace(model.checkpoint.config, sliding_window=12)
    prompt = list(range(30))
    expected = generate(mistral, prompt, 20)
    assert expected != generate(hf, prompt, 20), "the window makes no difference here, so nothing is tested"
    for deterministic in (False, True):
        driver = load(model, deterministic=deterministic)
        driver.admit(0, prompt, max_tokens=20)
        driver.step(Work(0, 17, sample=False))
        assert driver.decode(0, 20) == expected


def test_bfloat16_is_close(smollm2, load):
    """Case ML-10: scores within 0.15 of float32's, and the same next token."""
    driver = load(smollm2, dtype="bfloat16")
    driver.admit(0, [504, 3575, 282, 4649, 314, 7042], prompt_logprobs=0)
    scores = driver.step(Work(0, 6)).prompt_logprobs.values
    np.testing.assert_allclose(scores, [-11.539, -0.338, -2.439, -0.451, -0.258], atol=0.15)
    driver.admit(1, [504, 3575, 282, 4649, 314])
    assert driver.decode(1, 1) == [7042]


# The reference values of SmolLM2-135M-Instruct, Q4_1 dequantised to float32.
FRANCE = (504, 3575, 282, 4649, 314)
GREEDY = {
    FRANCE: [7042, 30, 198, 198, 504, 2988, 314, 42],
    (33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 28): [
        *[216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33]
    ],
}


def test_reference_values(smollm2, load):
    driver = load(smollm2)
    for row, (prompt, answer) in enumerate(GREEDY.items()):
        driver.admit(row, prompt, max_tokens=32)
        assert driver.decode(row, len(answer)) == answer
    tokenizer = smollm2.tokenizer
    assert tokenizer.encode("1, 2, 3, 4, 5, 6,") == list(list(GREEDY)[1])
    driver.admit(2, tokenizer.encode("Here is the English alphabet: ABC"), max_tokens=32)
    text = b"".join(tokenizer.token_bytes()[i] for i in driver.decode(2, 14)).decode()
    assert text == "DEFGHIJKLMNOPQRSTUVWXYZ"
    driver.admit(3, FRANCE, logprobs=2)
    table = driver.step(Work(3, 5)).logprobs
    np.testing.assert_allclose(table.values, [-0.258, -2.741], atol=2e-3)
    assert table.ids.tolist() == [7042, 260]
    driver.admit(4, [*FRANCE, 7042], prompt_logprobs=0)
    scores = driver.step(Work(4, 6)).prompt_logprobs.values
    np.testing.assert_allclose(scores, [-11.539, -0.338, -2.439, -0.451, -0.258], atol=2e-3)


def test_smollm2_answers_like_transformers(smollm2, load, generate):
    hf = as_transformers(smollm2)
    prompts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, " * 9]
    ids = [smollm2.tokenizer.encode(prompt) for prompt in prompts]
    driver = load(smollm2)
    for row, prompt in enumerate(ids):
        driver.admit(row, prompt, max_tokens=32)
    steps = [driver.step(*(Work(row, len(prompt)) for row, prompt in enumerate(ids)))]
    steps += [driver.step(*(Work(row, 1) for row in range(3))) for _ in range(31)]
    for row, prompt in enumerate(ids):
        assert [int(step.tokens[row, 0]) for step in steps] == generate(hf, prompt, 32)


def as_transformers(model):
    """Return the same weights as a transformers model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint, c = model.checkpoint, model.checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
    )
    hf = LlamaForCausalLM(config).eval()
    names = {"embed": "embed_tokens", "final_norm": "norm", "attn_norm": "input_layernorm"}
    names |= {"mlp_norm": "post_attention_layernorm"} | {n: f"self_attn.{n}_proj" for n in "qkvo"}
    names |= {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    state = {}
    for name in checkpoint.names():
        *prefix, part = name.split(".")
        state[".".join(["model", *prefix, names[part], "weight"])] = checkpoint.tensor(name)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    hf.load_state_dict(state)
    hf.generation_config.eos_token_id = None
    return hf
