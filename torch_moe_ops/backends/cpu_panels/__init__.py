"""The layout of the `cpu` backend: panels of 16 rows, and how weights get there and back."""
