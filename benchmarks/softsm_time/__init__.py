"""What `python benchmarks/timing.py` predicts with softsm, measures on a GPU and compares.

case         what is timed: a call and its inputs
development  the cases with which rules of the model were developed: the library's calls (library), Triton kernels of
             the usual kind (usual, usual_kernels) and kernels of other packages (foreign)
drawn        kernels, shapes and tiles drawn at random by a seed (drawing: how)
users        kernels written by hand, set by set
own          this library's calls with shapes drawn at random by a seed
published    Triton's tutorials, whose authors print their times on a B200
tune         every tile of one matrix product
parts        parts of drawn kernels that were predicted wrongly
predict, measure, cost, tables      what the command does with them
"""
