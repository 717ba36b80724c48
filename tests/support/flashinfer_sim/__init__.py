"""A stand-in for FlashInfer's compiled MoE modules, which runs on a CPU.

FlashInfer's own Python front stays in place. What it hands to the compiled module arrives here, is bound to the
names of the C++ parameters (read from the sources in the wheel), checked as the C++ launcher checks it, decoded
by formulas that share nothing with the library under test, and computed in float64.
"""
