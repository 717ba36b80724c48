"""`python -m torch_moe_ops tune`: times tile sizes of the Triton kernels on this device and keeps the best.

candidates.py: what is worth timing. layers.py: what is tuned, and random layers of that kind. search.py: the
order of trials. measure.py: trials on a GPU. command.py: the command line. What was found lies in tuned.py's files.
"""
