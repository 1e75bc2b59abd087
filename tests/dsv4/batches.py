"""Greedy tokens of a model of transformers: in continuous batching, and of each request alone."""

import torch
import transformers

PROMPTS = [[5, 9, 33, 2], list(range(3, 40)), [7]]


def generated(model, prompts=PROMPTS, tokens=6):
    """Tokens that generate_batch makes, in pages of 16 tokens and steps of 64."""
    settings = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    size = "page_size" if hasattr(transformers.ContinuousBatchingConfig(), "page_size") else "block_size"
    batching = transformers.ContinuousBatchingConfig(**{size: 16}, num_blocks=64, max_batch_tokens=64)
    with torch.no_grad():
        outs = model.generate_batch(
            inputs=prompts, generation_config=settings, continuous_batching_config=batching, progress_bar=False
        )
    return [outs[key].generated_tokens for key in sorted(outs, key=lambda k: int(k.rsplit("_", 1)[-1]))]


def alone(model, prompts=PROMPTS, tokens=6):
    """One request at a time, with the model's own attention and no cache."""
    results = []
    for prompt in prompts:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(tokens):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        results.append(ids[len(prompt) :])
    return results
