"""What the installed vLLM has of the names in dsv4.integrations.vllm.contract.

    python vllm_record.py > vllm_recorded.json

For tests that run where no vLLM is; test_vllm_contract.py holds the file against the installed one."""

import inspect
import json
import sys
from dataclasses import fields


def record() -> dict:
    import vllm

    from dsv4.integrations.vllm import contract

    return dict(
        version=vllm.__version__.split("+")[0],
        parameters={x: list(inspect.signature(contract.resolve(x)).parameters) for x in contract.PARAMETERS},
        fields={x: [f.name for f in fields(contract.resolve(x))] for x in contract.FIELDS},
        looked_up={x: name for x, name in contract.LOOKED_UP.items() if contract.looks_up(x, name)},
    )


if __name__ == "__main__":
    json.dump(record(), sys.stdout, indent=1)
    print()
