"""Things that no argument means, put in the place of each argument of a right call: a ValueError of one form."""

import numpy as np
import pytest
import torch

NEVER_MEANT = {
    "object": object(), "dict": {}, "set": {1}, "bytes": b"abc", "complex": 1j, "nan": float("nan"), "word": "x",
    "numpy array": np.zeros(3), "empty list": [], "list of None": [None, None], "function": len,
    "scalar tensor": torch.tensor(1.5), "complex tensor": torch.zeros(2, 3, 4, 64, dtype=torch.complex64),
    "bool tensor": torch.zeros(2, 3, 4, 64, dtype=torch.bool), "seven dimensions": torch.zeros(1, 1, 1, 1, 1, 1, 1),
    "sparse tensor": torch.eye(3).to_sparse(),
}  # fmt: skip
SOMETIMES_MEANT = {"None": None, "huge int": 1 << 70, "True": True, "empty tensor": torch.zeros(0)}


def each_in_turn(name, function, right, meant=()):
    """meant: (argument, thing) that are right after all; "*" for every thing."""
    function(**right)
    # Made here: the first jagged tensor of a process imports torch's compiler.
    jagged, strided = (
        torch.nested.nested_tensor([torch.zeros(2, 64), torch.zeros(3, 64)], layout=layout)
        for layout in (torch.jagged, torch.strided)
    )
    never_meant = NEVER_MEANT | {"jagged tensor": jagged, "nested tensor": strided}
    for argument in right:
        for what, wrong in (never_meant | SOMETIMES_MEANT).items():
            said = f"{name}({argument}={what})"
            try:
                function(**right | {argument: wrong})
            except ValueError as error:
                assert ": got " in str(error) and "; accepted: " in str(error), f"{said}: {error}"
                assert len(str(error)) < 300, f"{said}: {len(str(error))} characters"
            except Exception as error:
                pytest.fail(f"{said}: {type(error).__name__}: {error}")
            else:
                known = what in SOMETIMES_MEANT or (argument, what) in meant or (argument, "*") in meant
                assert known, f"{said} is accepted"
