"""Continuous batching on a PagedModel: requests arrive at any time, and prompts run together with decoding requests.

    from deepseek_v4.serving import Serving
    serving = Serving(PagedModel(model, rows="fp8"))
    job = serving.submit(prompt, new_tokens=100, stop=1)
    while serving:
        for job in serving.step():
            print(job.name, job.said[-1], job.done)

In each step every decoding request gets its token; the rest of the chunk goes to prompts, the oldest first. A request
is admitted only when there are enough pages for it to finish, so none is ever preempted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dsv4.runtime import checks


@dataclass(eq=False)
class Job:
    """One request. left: tokens still to be run; said: the tokens generated so far."""

    name: Hashable
    left: list[int]
    new_tokens: int
    stop: int | None
    end: int  # tokens that it will have fed at most; the last one is not fed
    said: list[int] = field(default_factory=list)
    done: bool = False


class Serving:
    """Greedy decoding of jobs on one PagedModel, which may be used elsewhere too.

    jobs    the unfinished jobs, the oldest first
    fed     (job, tokens) of the last step
    """

    def __init__(self, served: Any):  # a PagedModel
        self.served = served
        self.jobs: list[Job] = []
        self.fed: list[tuple[Job, int]] = []
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self.jobs)

    def submit(
        self,
        prompt: Sequence[int] | Tensor,
        new_tokens: int,
        *,
        stop: int | None = None,
        name: Hashable = None,
        argument: str = "prompt",
    ) -> Job:
        """Request the next new_tokens tokens of the prompt, or fewer if the token ``stop`` comes first.

        name: of the request; default: a new one. argument: what an error calls the prompt.
        """
        checks.at_least(1, "new_tokens", new_tokens)
        if stop is not None:
            checks.at_least(0, "stop", stop, "None or a token number")
        left = self.served.token_ids(argument, prompt).tolist()
        end = len(left) + new_tokens - 1
        if end > self.served.context:
            came = f"{len(left)} tokens, and {new_tokens} new ones"
            checks.fail(argument, came, f"at most {self.served.context + 1} together in a request")
        self._count += 1
        job = Job(("job", self._count) if name is None else name, left, new_tokens, stop, end)
        if not isinstance(job.name, Hashable):
            checks.fail("name", checks.describe(name), "a name that can be the key of a dictionary")
        if job.name in self.served.requests or any(job.name == other.name for other in self.jobs):
            checks.fail("name", checks.describe(name), "a name that no request has")
        self.jobs.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """End the job and free its pages."""
        if job not in self.jobs:
            checks.fail("job", checks.describe(job), "a job that is not done")
        self.jobs.remove(job)
        job.done = True
        if job.name in self.served.requests:
            self.served.drop(job.name)

    def step(self) -> list[Job]:
        """Run as many tokens as fit -> the jobs that generated a token. Runs none if nothing fits."""
        self.fed = self._choose()
        if not self.fed:
            return []
        tokens = self.served.next_tokens({job.name: job.left[:count] for job, count in self.fed})
        spoke = []
        for (job, count), token in zip(self.fed, tokens):
            job.left = job.left[count:]
            if job.left:  # the prompt is not in yet
                continue
            job.left = [token]
            job.said.append(token)
            spoke.append(job)
            if len(job.said) == job.new_tokens or token == job.stop:
                self.cancel(job)
        return spoke

    def _choose(self) -> list[tuple[Job, int]]:
        served, room = self.served, self.served.chunk
        inside = [job for job in self.jobs if job.name in served.requests]
        spare = len(served.places.pages.free) - sum(
            served.pages_for(job.end) - len(served.requests[job.name].pages) for job in inside
        )
        places = served.limit - len(served.requests)
        chosen = []
        for job in sorted(inside, key=lambda job: not job.said):  # those that decode before prompts
            if room:
                chosen.append((job, min(len(job.left), room)))
                room -= chosen[-1][1]
        for job in self.jobs:
            if job.name not in served.requests:
                pages = served.pages_for(job.end)
                if not room or not places or pages > spare:
                    break  # the oldest first: no younger one overtakes it
                chosen.append((job, min(len(job.left), room)))
                room, places, spare = room - chosen[-1][1], places - 1, spare - pages
        return chosen
