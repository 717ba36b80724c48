"""Layers prepared for a backend: made, called, explained, saved, restored and updated."""
