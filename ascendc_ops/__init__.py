"""Ascend C kernels behind the C ABI of `memferry_ops.h`.

Empty today: Ascend kernels are planned. May import the loader
(`memferry_npu.backend`) and nothing else of the framework.
"""
