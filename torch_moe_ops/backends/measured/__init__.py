"""Measurements that the library came with, by which `auto` takes backends that round more than the contract."""
