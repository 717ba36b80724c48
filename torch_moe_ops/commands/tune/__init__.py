"""`python -m torch_moe_ops tune`: times what can be chosen on this device and keeps the best.

Tile sizes of the Triton kernels: candidates.py: what is worth timing. search.py: the order of trials. measure.py:
trials on a GPU. What was found lies in the files of tuning/tuned.py. Kernels of `cuda_sm90`: kernels.py, and the files
of tuning/tuned_kernels.py. layers.py: what is tuned, and random layers of that kind. command.py: the command line.
"""
