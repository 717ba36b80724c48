"""Experts on the host beside those on a GPU: a layer that is divided between both, run at once."""
