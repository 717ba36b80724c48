"""What `python -m torch_moe_ops` offers: inspect, doctor, tune."""
