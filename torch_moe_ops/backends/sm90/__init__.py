"""What the `cuda_sm90*` backends share: formats, layouts, scales, and the choice of kernel by number of tokens."""
