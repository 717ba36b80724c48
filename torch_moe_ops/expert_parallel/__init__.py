"""Expert parallelism: a layer whose experts lie on several ranks of torch.distributed."""
