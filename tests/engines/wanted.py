"""What transformers says of a tiny checkpoint (tiny_checkpoints.py), and how the answers of an engine are held against
it."""

import json
from pathlib import Path

import torch


class Wanted:
    def __init__(self, folder: Path):
        self.said = json.loads((folder / "transformers.json").read_text())
        self.requests = {len(r["prompt"]): r for r in self.said["requests"]}  # by the length of the prompt

    def prompts(self, *lengths: int) -> list[list[int]]:
        return [self.requests[n]["prompt"] for n in lengths]

    def assert_tokens(self, answers: list[list[int]], lengths: tuple[int, ...]) -> None:
        """Compare the tokens of prompts of these lengths that are certain, of which every request has some."""
        assert len(answers) == len(lengths)
        for n, tokens in zip(lengths, answers):
            certain = min(self.requests[n]["certain"], len(tokens))
            assert certain > 0, f"no token after the prompt of {n} is certain"
            assert tokens[:certain] == self.requests[n]["tokens"][:certain], f"after the prompt of {n}"

    def assert_logprobs(self, got: list[float], rounded: str = "fp32", length: int = 300) -> None:
        """Compare the log-probabilities of the prompt of this length, within the rounding of the engine."""
        wanted = self.said[rounded][str(length)]
        off = float((torch.tensor(got) - torch.tensor(wanted["logprobs"])).abs().max())
        assert off <= wanted["allowed"], f"off by {off:.2e}, allowed: {wanted['allowed']:.2e}"
