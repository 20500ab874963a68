"""What `test_litellm` runs in an environment of its own, beside a server: LiteLLM over the OpenAI routes, as it comes.

python litellm_smoke.py URL MODEL ANSWER
"""

from __future__ import annotations

import asyncio
import sys

import litellm

URL, MODEL, ANSWER = sys.argv[1:]
HELLO = [{"role": "user", "content": "Hello"}]
OPTIONS = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 30}

done = litellm.completion(messages=HELLO, **OPTIONS)
assert done.choices[0].message.content == ANSWER and done.usage.completion_tokens == 10, done
chunks = litellm.completion(messages=HELLO, stream=True, **OPTIONS)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
done = asyncio.run(litellm.acompletion(messages=HELLO, logprobs=True, top_logprobs=2, **OPTIONS))
assert len(done.choices[0].logprobs.content) == 10, done
text = litellm.text_completion(
    prompt="The capital of France is", **{**OPTIONS, "max_tokens": 1, "model": f"text-completion-openai/{MODEL}"}
)
assert text.choices[0].text == " Paris", text
try:
    litellm.completion(messages=HELLO, **{**OPTIONS, "temperature": 7})
except litellm.BadRequestError:
    print("litellm: all as expected")
else:
    raise AssertionError("a temperature of 7 was accepted")
