"""CUDA kernels behind the C ABI of `memferry_ops.h`.

Empty today: CUDA kernels are planned. May import the loader
(`memferry_npu.backend`) and nothing else of the framework.
"""
