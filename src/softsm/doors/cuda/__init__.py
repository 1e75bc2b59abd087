"""CUDA C++ programs: kernels and host side compiled by clang, the host side against a stand-in CUDA runtime."""
