"""What `memferry train` runs: the model, the data and the loop.

Owns: a byte-level GPT, text from this machine, and the comparison with training
without offload. It uses the framework as any user would and is used by nothing else.
"""
