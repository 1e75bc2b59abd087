// clang's wrapper of a CUDA toolkit's headers includes this one, which is not part of the runtime.
